"""Bad days of a run against what must be left of it: a closed console, damaged metrics, too little shared
memory, a rank that raises, ranks with other clocks; and the console against what was decided."""

import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT
from ranks import free_port, run_ranks
from test_train import ENV, rows, run

import data
import dist
import evaluate
import train
from extras import assembly, datasets, hub, lerobot_ckpt, rundir


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

    class Clock(rundir.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 1, 1, 12, 0, 7 * rank)

    os.chdir(folder)
    rundir.datetime = Clock  # type: ignore[misc]
    cluster = train.dist.start("cpu", train.dist.ParallelismConfig())
    return rundir.with_run_dir(train.Config(job_name="me"), cluster, None).output_dir


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


def test_the_default_number_of_workers_fits_the_cores_of_a_rank(monkeypatch):
    def chosen(cores: int, ranks: int, **flags) -> int:
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        cluster = dist.start("cpu")
        return assembly.workers(train.Config(**flags), dataclasses.replace(cluster, local_world_size=ranks))

    assert [chosen(16, 8), chosen(64, 8), chosen(2, 1), chosen(2, 4)] == [2, 4, 2, 1]
    assert chosen(2, 4, num_workers=3) == 3 and chosen(2, 4, num_workers=0) == 0


def test_one_set_of_statistics_in_training_in_the_checkpoint_and_at_inference(tmp_path, monkeypatch, capsys):
    rng, lengths = np.random.default_rng(0), [12] * 10
    offsets = np.repeat(np.arange(10.0) ** 2, 12)[:, None]  # each episode acts somewhere else
    columns = {
        key: (rng.normal(size=(120, 3)) + offsets).astype(np.float32) for key in (data.ACTION, data.STATE)
    }
    columns[data.ENV_STATE] = rng.normal(size=(120, 2)).astype(np.float32)
    monkeypatch.setattr(
        assembly, "open_data", lambda cfg: datasets.open_columns(cfg.dataset, 20, columns, lengths, 50, {})
    )
    seen: list[train.Run] = []
    real = train.train
    monkeypatch.setattr(train, "train", lambda run: seen.append(run) or real(run))
    chosen = ["--dataset.episodes", *"0123456", "--dataset.val-episodes", "7", "8", "--eval-freq", "1"]
    assert run(tmp_path / "run", "--steps", "1", *chosen) == 0
    assert "statistics from 7 of 10 episodes" in capsys.readouterr().out
    used = np.concatenate([columns[data.ACTION][12 * e : 12 * e + 12] for e in range(7)])
    config, saved = lerobot_ckpt.load_policy_files(tmp_path / "run")
    policies = {
        "training": seen[0].learner.policy,
        "inference": lerobot_ckpt.policy_of(config, saved),
    }
    for key, values in ((data.ACTION, used), (data.STATE, None)):
        for where, policy in policies.items():
            normalizer = policy.model.normalizers[key.replace(".", "/")]
            assert torch.equal(normalizer.shift, saved[key]["mean"].float()), (where, key)
            assert torch.equal(normalizer.factor, saved[key]["std"].float()), (where, key)
        if values is not None:
            torch.testing.assert_close(saved[key]["mean"].float(), torch.tensor(values.mean(0)))
            x = torch.tensor(values)
            model = policies["inference"].model
            torch.testing.assert_close(
                model.unnormalize(key, model.normalize(key, x)), x, rtol=1e-5, atol=1e-5
            )


@pytest.mark.parametrize("name", ["cosine", "linear", "none"])
def test_the_learning_rate_past_the_end_stays_at_its_floor(name):
    schedule = train.SchedulerConfig(name, warmup_steps=3, decay_steps=10, final_lr_ratio=0.1)
    cfg = train.Config(steps=10, scheduler=schedule)
    floor = 0.1 if name == "cosine" else 1.0
    assert [train.lr_factor(cfg, step) for step in (10, 11, 40, 10**9)] == pytest.approx([floor] * 4)
    assert min(train.lr_factor(cfg, step) for step in range(3, 50)) == pytest.approx(floor)


def slow_evaluation(rank: int, world_size: int) -> tuple[float, list[float]]:
    """Rank 0's evaluation takes three times what a collective may wait for."""
    cluster = dist.start("cpu", step_timeout_s=3)
    dist.shorten_timeout(cluster)

    def may_wait_s() -> float:
        options = torch.distributed.group.WORLD._get_backend(torch.device("cpu")).options
        return options._timeout.total_seconds()

    waits = [may_wait_s()]
    with dist.extended_timeout(cluster):
        waits.append(may_wait_s())
        if rank == 0:
            time.sleep(9)
        total = dist.sum_over_ranks(cluster, torch.ones(1)).item()
    return total, [*waits, may_wait_s()]


def test_an_evaluation_longer_than_the_time_out_is_waited_for_and_only_that():
    assert run_ranks(2, slow_evaluation, init_group=False) == [(2.0, [3, 86400, 3])] * 2


# ---- signals, and who is first


VAL = ["--dataset.val-split", "0.3", "--eval-freq", "2", "--steps", "4", "--save-freq", "0"]


def signalled_in_validation(rank: int, world_size: int, argv: list[str], number: int) -> int:
    """The last rank gets the signal in the middle of the validation of step 2, the second of three."""
    real, seen = train.validation_loss, []

    def counted(run):
        seen.append(run.progress.step)
        return real(run)

    batch = data.ValBatches.__getitem__

    def signalling(self, step):
        if seen[-1] == 2 and rank == world_size - 1 and step == 1:
            os.kill(os.getpid(), number)
        return batch(self, step)

    train.validation_loss, data.ValBatches.__getitem__ = counted, signalling  # type: ignore[method-assign]
    return train.main(argv)


@pytest.mark.parametrize("ranks, number", [(1, signal.SIGTERM), (2, signal.SIGUSR1), (1, signal.SIGINT)])
def test_a_signal_breaks_a_validation_off_and_the_resumed_run_makes_up_for_it(ranks, number, tmp_path):
    flags = [*ENV, *VAL, "--batch-size", str(4 // ranks), "--log-freq", "4"]
    assert train.main([*ENV, *VAL, "--log-freq", "4", "--output-dir", str(tmp_path / "whole")]) == 0
    argv = [*flags, "--output-dir", str(tmp_path / "run")]
    codes = run_ranks(ranks, signalled_in_validation, argv, number, init_group=False, deadline_s=120)
    assert codes == [128 + number] * ranks
    # With several ranks a step may pass until all of them know.
    stopped = int(os.readlink(tmp_path / "run/checkpoints/last"))
    assert stopped == 2 and [row["step"] for row in rows(tmp_path / "run")] == [0]
    assert train.main(["--resume", str(tmp_path / "run"), "--batch-size", "4"]) == 0
    found, expected = rows(tmp_path / "run"), rows(tmp_path / "whole")
    assert [row["step"] for row in found] == [row["step"] for row in expected] == [0, 2, 4, 4]
    for one, other in zip(found, expected):
        assert one == pytest.approx(other, rel=1e-4)


def test_rollouts_end_where_they_are_when_the_run_is_asked_to_stop():
    asked = iter([False] * 7 + [True] * 9)
    policy = SimpleNamespace(
        config=SimpleNamespace(chunk_size=5, n_action_steps=5, temporal_ensemble_coeff=None),
        input_features={evaluate.STATE: {"type": "STATE", "shape": [14]}},
        output_features={"action": {"type": "ACTION", "shape": [14]}},
        predict_action_chunk=lambda batch: torch.zeros(len(batch[evaluate.STATE]), 5, 14),
        training=False, eval=lambda: None, train=lambda mode: None,
    )  # fmt: skip
    episodes = evaluate.rollout(policy, "sim", range(2), interrupted=lambda: next(asked))  # type: ignore[arg-type]
    assert [episode.steps for episode in episodes] == [7, 7]


def test_a_second_run_in_a_run_directory_is_refused(tmp_path, capsys, monkeypatch):
    (tmp_path / "run").mkdir()
    lock = rundir.lock_run_dir(tmp_path / "run")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    assert run(tmp_path / "run", "--steps", "1", "--resume", "auto") == 1
    said = capsys.readouterr().err
    assert f"is being written by another run (process {os.getpid()} on " in said
    lock.close()
    assert run(tmp_path / "run", "--steps", "1") == 0  # a lock file alone does not make a directory full


def test_what_rank_0_does_alone_at_the_end_comes_after_the_last_collective(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(dist, "finish", lambda cluster: order.append("group"))
    monkeypatch.setattr(hub, "upload_policy", lambda *args: order.append("upload"))
    assert run(tmp_path / "run", "--steps", "1", "--push-to-hub", "user/name") == 0
    assert order == ["group", "upload"]


def test_equal_success_is_decided_by_the_validation_loss(tmp_path, monkeypatch):
    losses = iter([9.0, 5.0, 4.0, 4.5])
    monkeypatch.setattr(train, "validation_loss", lambda run: next(losses))
    monkeypatch.setattr(evaluate, "evaluate_in_training", lambda *args: {"success_rate": 0.0})
    assert run(tmp_path / "run", *VAL, "--steps", "6") == 0
    assert os.readlink(tmp_path / "run/checkpoints/best") == "000004"


def test_a_checkpoint_whose_best_is_one_number_goes_on(tmp_path):
    assert run(tmp_path / "run", *VAL, "--steps", "2") == 0
    at = tmp_path / "run/checkpoints/000002/training_state"
    state = json.loads((at / "training_step.json").read_text())
    # as earlier versions stored what now follows from metrics.jsonl
    stored = {"best": -0.5, "best_step": 2, "evaluations_since_best": 0, "evaluation_owed": False}
    (at / "training_step.json").write_text(json.dumps(state | stored))
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "4"]) == 0
    assert [row["step"] for row in rows(tmp_path / "run") if "val_l1_loss" in row] == [0, 2, 4]


# ---- what the console and the defaults say


def test_a_preset_fits_the_flags_beside_it(tmp_path, capsys):
    assert train.parse_command_line(["--preset", "demo"])[0] == train.DEMO
    short = train.parse_command_line(["--preset", "demo", "--steps", "20"])[0]
    assert short.scheduler.warmup_steps == 1 and short.eval.env == "sim"
    long = train.parse_command_line(["--preset", "demo", "--steps", "9000"])[0]
    assert long.scheduler.warmup_steps == train.DEMO.scheduler.warmup_steps
    own = train.parse_command_line(["--preset", "demo", "--dataset.root", "DIR"])[0]
    assert own.eval.env is None
    given = [
        "--preset",
        "demo",
        "--dataset.root",
        "DIR",
        "--eval.env",
        "sim",
        "--scheduler.warmup-steps",
        "7",
    ]
    kept = train.parse_command_line([*given, "--steps", "20"])[0]
    assert kept.eval.env == "sim" and kept.scheduler.warmup_steps == 7
    assert (
        run(tmp_path / "run", "--preset", "demo", "--steps", "1", "--batch-size", "2", "--eval-freq", "0")
        == 0
    )
    said = capsys.readouterr()
    assert "preset demo: --seed" not in said.out and "--sim" not in said.err
    assert re.search(r"^preset demo: .*--scheduler.name cosine", said.out, re.MULTILINE)
    assert "--batch-size" not in re.search(r"^preset demo: .*", said.out, re.MULTILINE).group()  # type: ignore[union-attr]


def test_the_console_says_how_a_run_ended(tmp_path, capsys):
    assert run(tmp_path / "run", "--steps", "2") == 0
    assert re.search(rf"^done: 2 steps, 0:00:\d\d, {tmp_path}/run$", capsys.readouterr().out, re.MULTILINE)
    assert train.main(["--resume", str(tmp_path / "run")]) == 0
    assert "nothing to do: the run is at step 2 of 2" in capsys.readouterr().out
    changed = [
        "--steps",
        "3",
        "--seed",
        "5",
        "--dataset.min-std",
        "5",
        "--output-dir",
        str(tmp_path / "other"),
    ]
    assert train.main(["--resume", str(tmp_path / "run"), *changed]) == 0
    said = capsys.readouterr()
    assert "warning: with another --seed other samples follow" in said.err
    assert "warning: --dataset.min-std has no effect on a resumed run" in said.err
    assert "is raised to" not in said.err and "statistics: those of " in said.out


def test_epochs_become_steps_and_hours_end_a_run_with_a_checkpoint(tmp_path, capsys):
    flags = ["--batch-size", "32", "--gradient-accumulation-steps", "2", "--save-freq", "0"]
    assert run(tmp_path / "run", *flags, "--epochs", "1.5", "--max-hours", "1") == 0  # 225 of 150 frames
    assert "8 steps = 256 samples = 1.71 epochs" in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path / "run")] == [2, 4, 6, 8]
    assert train.main(["--resume", str(tmp_path / "run"), "--epochs", "2"]) == 0
    assert "--epochs 1.5 -> 2.0" in capsys.readouterr().out and len(rows(tmp_path / "run")) == 5
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "14", "--max-hours", "1e-9"]) == 0
    assert re.search(r"stopped \(--max-hours\) at step 12 of 14.*--resume", capsys.readouterr().out)
    assert os.readlink(tmp_path / "run/checkpoints/last") == "000012"
    for bad in (["--epochs", "1", "--steps", "2"], ["--epochs", "0"], ["--max-hours", "-1"]):
        assert run(tmp_path / "bad", *bad) == 1
        assert bad[0] in capsys.readouterr().err


def test_resume_auto_says_what_it_found_and_wants_a_directory(tmp_path, capsys):
    assert train.main([*ENV, "--resume", "auto"]) == 1
    assert "--output-dir" in capsys.readouterr().err
    assert run(tmp_path / "run", "--steps", "1", "--resume", "auto") == 0
    assert "resume auto: no checkpoint under" in capsys.readouterr().out


def test_a_refused_run_leaves_no_directory(tmp_path):
    assert run(tmp_path / "run", "--dataset.episodes", "77") == 1
    assert not (tmp_path / "run").exists()


def test_rows_of_an_earlier_run_are_kept_aside(tmp_path):
    assert run(tmp_path / "run", "--steps", "2") == 0
    shutil.rmtree(tmp_path / "run/checkpoints")
    assert run(tmp_path / "run", "--steps", "1", "--resume", "auto") == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1]
    assert len((tmp_path / "run/metrics.jsonl.before").read_text().splitlines()) == 2


def test_a_run_directory_that_is_removed_in_the_middle_gets_new_metrics(tmp_path, monkeypatch, capsys):
    real = train.train_step

    def removing(cfg, cluster, parts, batch, window, step, sums):
        if step == 1:
            shutil.rmtree(tmp_path / "run")
        real(cfg, cluster, parts, batch, window, step, sums)

    monkeypatch.setattr(train, "train_step", removing)
    assert run(tmp_path / "run", "--steps", "3", "--no-save-checkpoint") == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [2, 3]
    assert "metrics.jsonl was removed" in capsys.readouterr().err


def test_ranks_that_cannot_meet_say_so(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(taken.getsockname()[1]))  # fmt: skip
        command = [sys.executable, str(ROOT / "train.py"), *ENV, "--output-dir", str(tmp_path / "run")]
        busy = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        env["MASTER_PORT"] = "abc"
        odd = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    for done, word in ((busy, "MASTER_PORT="), (odd, "MASTER_PORT")):
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert word in done.stderr.strip().splitlines()[-1], done.stderr


@pytest.mark.parametrize(
    "error",
    [ConnectionResetError(104, "reset"), RuntimeError("DataLoader worker (pid 7) exited unexpectedly")],
)
def test_a_killed_worker_is_explained(error):
    def killed():
        raise error
        yield

    with pytest.raises(RuntimeError, match=r"want of memory.*--num-workers.*--resume"):
        next(data.to_device(killed(), "cpu"))  # type: ignore[arg-type]
