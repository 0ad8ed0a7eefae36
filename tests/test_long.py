"""What the other tests show on a few cases, on all of them: `python -m pytest -m long`, about half an hour.

A stop after each of 30 steps with loader workers; every layout handed to every layout in every format that it
can write; every data set of the reference collection, trained on through the command line.
"""

import hashlib
import shutil
import subprocess
import sys

import pytest
from conftest import DATA, ROOT, shared
from ranks import run_ranks
from safetensors.torch import load_file
from test_layouts import ONE_EPISODE, assert_same_curve, train_and_look
from test_train import ENV, SMALL, assert_equal, rows, tensors

import train

pytestmark = pytest.mark.long
CAMERA = [
    "--dataset.root",
    str(DATA / "aloha_img_v3"),
    *SMALL,
    "--dataset.image-size",
    "48",
    "64",
    "--batch-size",
    "6",
]


def run_and_note_samples(argv: list[str]) -> list[str]:
    """A digest of each step's batch: which frames, in which order, with which noise."""
    seen, real = [], train.train_step

    def noting(cfg, cluster, parts, batch, *rest):
        parts_of_batch = [batch[key].numpy().tobytes() for key in sorted(batch)]
        seen.append(hashlib.sha1(b"".join(parts_of_batch)).hexdigest())
        return real(cfg, cluster, parts, batch, *rest)

    train.train_step = noting
    try:
        assert train.main(argv) == 0
    finally:
        train.train_step = real
    return seen


@pytest.mark.parametrize("extra", [[], ["--gradient-accumulation-steps", "2", "--scheduler.name", "cosine"]])
def test_thirty_steps_stopped_after_each_in_turn_are_thirty_steps(extra, tmp_path):
    flags = [*CAMERA, "--num-workers", "2", "--steps", "30", "--save-freq", "1", "--log-freq", "1", *extra]
    whole = tmp_path / "whole"
    batches = run_and_note_samples([*flags, "--output-dir", str(whole)])
    assert len(set(batches)) == 30
    stops = [int(path.name) for path in sorted((whole / "checkpoints").glob("0*"))]
    assert stops == (list(range(2, 31, 2)) if extra else list(range(1, 31)))
    for step in stops[:-1]:
        resumed = tmp_path / "resumed"
        at = str(whole / f"checkpoints/{step:06d}")
        assert (
            run_and_note_samples(["--resume", at, "--output-dir", str(resumed), "--save-freq", "0"])
            == batches[step:]
        )
        assert_equal(tensors(resumed, 30), tensors(whole, 30))
        assert rows(resumed) == [row for row in rows(whole) if row["step"] > step]
        shutil.rmtree(resumed)


LAYOUTS = {
    "single": (1, ["--parallelism.dp-replicate", "1", "--parallelism.dp-shard", "1"]),
    "ddp2": (2, ["--parallelism.dp-replicate", "1", "--parallelism.dp-shard", "1"]),
    "fsdp2": (2, ["--parallelism.dp-replicate", "1", "--parallelism.dp-shard", "2"]),
    "fsdp4": (4, ["--parallelism.dp-replicate", "1", "--parallelism.dp-shard", "4"]),
    "hsdp2x2": (4, ["--parallelism.dp-replicate", "2", "--parallelism.dp-shard", "2"]),
}
SHARDED = ("safetensors", "dcp", "safetensors_dcp")
FORMATS = {"single": SHARDED[:1], "ddp2": SHARDED[:1], "fsdp2": SHARDED, "fsdp4": SHARDED, "hsdp2x2": SHARDED}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> list[dict]:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    flags = [*ENV, *ONE_EPISODE, "--batch-size", "8", "--steps", "6", "--save-freq", "0"]
    assert train.main([*flags, "--output-dir", str(run_dir)]) == 0
    return rows(run_dir)


def look(name: str, argv: list[str]) -> list[dict]:
    """What was in memory at rank 0 before the first step and after the last."""
    ranks, layout = LAYOUTS[name]
    argv = [*argv, *layout, "--batch-size", str(8 // ranks)]
    results = run_ranks(ranks, train_and_look, argv, init_group=False, deadline_s=240)
    assert [code for code, _ in results] == [0] * ranks
    for _, seen in results[1:]:
        assert all(seen[0][key].tobytes() == value.tobytes() for key, value in results[0][1][0].items())
    return results[0][1]


@pytest.mark.parametrize(
    "source, written", [(source, written) for source in LAYOUTS for written in FORMATS[source]]
)
def test_every_layout_goes_on_from_every_layout_in_every_format(source, written, undisturbed, tmp_path):
    """Stopped at step 4 of 6, within the first epoch; dropout on, the warm-up not over."""
    flags = [*ENV, *ONE_EPISODE, "--steps", "4", "--save-freq", "0", "--checkpoint-format", written]
    before = look(source, [*flags, "--output-dir", str(tmp_path / "from")])[-1]
    assert_same_curve(rows(tmp_path / "from"), undisturbed)
    for target in LAYOUTS:
        argv = ["--resume", str(tmp_path / "from"), "--steps", "6", "--output-dir", str(tmp_path / target)]
        loaded = look(target, [*argv, "--checkpoint-format", "safetensors"])[0]
        assert loaded.keys() == before.keys(), target
        assert [key for key in loaded if loaded[key].tobytes() != before[key].tobytes()] == [], target
        assert [row["step"] for row in rows(tmp_path / target)] == [5, 6]
        assert_same_curve(rows(tmp_path / target), undisturbed)


@pytest.mark.parametrize("name", ["g1_v3", "aloha_sim_v3", "two_cam_v3", "aloha_img_v3", "env_state_v3"])
def test_every_data_set_of_the_collection_is_trained_on(name, tmp_path):
    """The network is small, the images are not: 480x640 where the set has them."""
    command = [
        sys.executable,
        "train.py",
        "--dataset.root",
        str(shared("data", name)),
        *SMALL,
        "--num-workers",
        "1",
    ]
    command += [
        "--policy.chunk-size",
        "100",
        "--policy.n-action-steps",
        "100",
        "--batch-size",
        "2",
        "--steps",
        "3",
    ]
    command += [
        "--log-freq",
        "1",
        "--output-dir",
        str(tmp_path / "run"),
        "--dataset.cache-dir",
        str(tmp_path / "cache"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    losses = [row["loss"] for row in rows(tmp_path / "run")]
    assert len(losses) == 3 and all(0 < loss < 1e3 for loss in losses)
    weights = load_file(tmp_path / "run/checkpoints/last/pretrained_model/model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
