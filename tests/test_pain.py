"""Bad days of a run against what must be left of it: a closed console, damaged metrics, too little shared
memory, a rank that raises, ranks with other clocks; and the console against what was decided."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from ranks import free_port, run_ranks
from test_train import ENV, rows, run

import data
import train


def test_a_run_whose_console_is_gone_trains_on(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *ENV,
        "--output-dir",
        str(tmp_path / "run"),
        "--steps",
        "3",
    ]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(write)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert len(rows(tmp_path / "run")) == 3 and (tmp_path / "run/checkpoints/000003").is_dir()


def test_damaged_rows_of_the_metrics_are_left_out_with_a_warning(tmp_path, capsys):
    assert run(tmp_path / "run", "--steps", "3") == 0
    file = tmp_path / "run/metrics.jsonl"
    first, second, third = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + b"\xff" + second + b'{"samples": 4}\n[]\n' + third[:-9])
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "4"]) == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 4]
    assert "metrics.jsonl: 4 of 5 rows are damaged" in capsys.readouterr().err
    assert json.loads(first) == json.loads(file.read_bytes().splitlines()[0])


@pytest.mark.parametrize("flags", [[], ["--dataset.val-split", "0.3", "--eval-freq", "1"]])
def test_too_little_shared_memory_is_one_sentence_before_the_run(flags, tmp_path, capsys, monkeypatch):
    real = shutil.disk_usage
    small = lambda path: shutil._ntuple_diskusage(9, 9, -1) if path == "/dev/shm" else real(path)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", small)
    assert run(tmp_path / "run", "--steps", "1", *flags, "--num-workers", "2") == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert "--num-workers=2" in said[-1] and "Traceback" not in "".join(said)


RAISES = """
import sys
sys.path.insert(0, {root!r})
import data, train
real = data.TrainBatches.__getitem__
def batch(self, step):
    if (step, self.rank) == (3, 1):
        raise OSError("frame 17 of episode 2 is gone")
    return real(self, step)
data.TrainBatches.__getitem__ = batch
if __name__ == "__main__":
    sys.exit(train.elastic.record(train.main)())
"""


def test_a_rank_whose_worker_raises_ends_the_job_with_its_traceback_last(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(RAISES.format(root=str(ROOT)))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    ]
    flags = [*ENV, "--output-dir", str(tmp_path / "run"), "--steps", "1000", "--num-workers", "1"]
    job = subprocess.run([*command, str(script), *flags], capture_output=True, text=True, timeout=180)
    assert job.returncode == 1 and time.time() - (tmp_path / "run/metrics.jsonl").stat().st_mtime < 60
    assert "frame 17 of episode 2 is gone" in job.stderr[job.stderr.rindex("Root Cause") :], job.stderr
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3]


def test_the_console_says_what_batch_rate_and_time_there_will_be(tmp_path, capsys, monkeypatch):
    real = data.TrainBatches.__getitem__

    def slow(self, step):
        time.sleep(0.05)
        return real(self, step)

    monkeypatch.setattr(data.TrainBatches, "__getitem__", slow)
    flags = ["--steps", "6", "--gradient-accumulation-steps", "2", "--log-freq", "2"]
    assert run(tmp_path / "run", *flags) == 0
    said = capsys.readouterr()
    assert (
        "batch: 4 a rank x 1 ranks x 2 accumulated = 8 effective; 6 steps = 24 samples = 0.16 epochs; lr 0.001"
        in said.out
    )
    assert re.search(r"step 4/6  samples 16  epoch 0\.11  loss .*  eta \d+:\d\d:\d\d", said.out)
    waited = [row["data_s"] / row["step_s"] for row in rows(tmp_path / "run", times=True)]
    assert (
        min(waited) > 0.2
        and said.err.count("of the time is spent waiting for data; raise --num-workers") == 1
    )


def run_dirs(rank: int, world_size: int, folder: Path) -> str | None:
    """The run directory that this rank takes, with a clock that is 7 s ahead of the one before."""

    class Clock(train.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 1, 12, 0, 7 * rank)

    os.chdir(folder)
    train.datetime = Clock  # type: ignore[misc]
    cluster = train.dist.start("cpu", train.dist.ParallelismConfig())
    return train.with_run_dir(train.Config(job_name="me"), cluster, None).output_dir


def test_rank_0s_clock_names_the_run_directory(tmp_path):
    found = run_ranks(2, run_dirs, tmp_path, init_group=False)
    assert found == ["outputs/train/2026-01-01/12-00-00_me"] * 2
    assert [p.name for p in tmp_path.rglob("*_me")] == ["12-00-00_me"]


def test_a_run_directory_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(tmp_path / "file/run", "--steps", "1") == 1
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.fullmatch(
        r"--output-dir=.*/file/run cannot be written \(.*\); name another directory\.", sentence
    )
