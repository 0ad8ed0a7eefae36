"""Checkpoints of an earlier version (310c275), resumed, against what that version wrote when it resumed them.

tests/data/old_310c275/KIND/000006 was saved in the middle of a run of 12 steps on tests/data/env_state_v3: in one
process with a cosine schedule, in the DCP shards of two ranks, and adapters on top of the first. expected.jsonl
holds loss, grad_norm and lr of steps 7 to 12.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DATA, ROOT

OLD = DATA / "old_310c275"


def rows(path: Path) -> list[dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in lines if row["step"] > 6 and "loss" in row]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which the paths of the runs are as they were: relative."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    for kind in ("single", "fsdp2_dcp", "lora"):
        shutil.copytree(OLD / kind / "000006", tmp_path / f"outputs/{kind}/checkpoints/000006")
    return tmp_path


def resumed(folder: Path, kind: str, ranks: int, *flags: str) -> list[dict]:
    """The rows of the steps that train.py takes from the checkpoint to the end."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    source = f"outputs/{kind}/checkpoints/000006"
    command = [str(ROOT / "train.py"), "--resume", source, "--output-dir", "again", *flags]
    python = [sys.executable, *(launcher if ranks > 1 else [])]
    done = subprocess.run([*python, *command], cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return rows(folder / "again/metrics.jsonl")


def compare(got: list[dict], kind: str, tolerance: float) -> None:
    want = rows(OLD / kind / "expected.jsonl")
    assert [row["step"] for row in got] == [row["step"] for row in want] == [7, 8, 9, 10, 11, 12]
    for mine, theirs in zip(got, want, strict=True):
        for key in ("loss", "grad_norm", "lr"):
            assert mine[key] == pytest.approx(theirs[key], rel=tolerance), (mine["step"], key)


@pytest.mark.parametrize("kind, ranks", [("single", 1), ("fsdp2_dcp", 2), ("lora", 1)])
def test_an_old_checkpoint_continues_on_its_layout_as_it_did(folder: Path, kind: str, ranks: int) -> None:
    compare(resumed(folder, kind, ranks), kind, 1e-6)


def test_old_shards_of_two_ranks_continue_in_one_process(folder: Path) -> None:
    # Sums in another order, which Adam amplifies over six steps.
    got = resumed(folder, "fsdp2_dcp", 1, "--parallelism.dp-shard", "1", "--batch-size", "4")
    compare(got, "fsdp2_dcp", 1e-4)


def test_an_old_checkpoint_of_one_process_continues_in_the_shards_of_two(folder: Path) -> None:
    got = resumed(folder, "single", 2, "--parallelism.dp-shard", "2", "--batch-size", "2")
    compare(got, "single", 1e-4)
