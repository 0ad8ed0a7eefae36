"""Whole runs, handed from layout to layout, signalled, killed or spread over launchers, compared with one that
nobody disturbed; and LeRobot's own runs, continued here, with how LeRobot continued them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DATA, ROOT, shared
from ranks import free_port, run_ranks
from safetensors.torch import load_file
from test_train import ENV, rows
from torch.distributed.tensor import DTensor

import ckpt
import data
import train

CURVE = ("samples", "epoch", "loss", "l1_loss", "kld_loss", "grad_norm", "lr")


def assert_same_curve(found: list[dict], expected: list[dict]) -> None:
    """Equal to float32 rounding, which 1e-4 leaves room for over the few steps of a test."""
    by_step = {row["step"]: row for row in expected}
    for row in found:
        for key in CURVE:
            assert row[key] == pytest.approx(by_step[row["step"]][key], rel=1e-4), (row["step"], key)


# ---- from layout to layout

ONE_EPISODE = ["--dataset.episodes", "0", "--scheduler.name", "linear", "--scheduler.warmup-steps", "9"]
"""50 frames: the seventh step of 8 samples goes over into the second epoch, the ninth ends the warm-up."""

HOPS = [
    (1, []),
    (4, ["--parallelism.dp-replicate", "2", "--parallelism.dp-shard", "2", "--checkpoint-format", "dcp"]),
    (2, ["--parallelism.dp-replicate", "1", "--parallelism.dp-shard", "1"]),
    (2, ["--parallelism.dp-shard", "2", "--checkpoint-format", "safetensors"]),
    (4, ["--parallelism.dp-shard", "-1", "--checkpoint-format", "safetensors_dcp"]),
    (1, ["--parallelism.dp-shard", "1"]),
]
"""(ranks, flags): every layout once as the source and once as the target, every format once between two."""


def gathered(learner: train.Learner) -> dict[str, np.ndarray]:
    """Weights and moments whole, by parameter. Collective: call on every rank."""

    def whole(tensor: torch.Tensor) -> np.ndarray:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()

    found = {}
    for name, parameter in learner.policy.named_parameters():
        found[name] = whole(parameter)
        for key, value in learner.optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = whole(value)
    return found


def train_and_look(rank: int, world_size: int, argv: list[str]) -> tuple[int, list[dict]]:
    """The exit code, and what was in memory before the first and after the last step of the run."""
    seen, real = [], train.train

    def looking(run: train.Run) -> int:
        seen.append(gathered(run.learner))
        code = real(run)
        seen.append(gathered(run.learner))
        return code

    train.train = looking
    return train.main(argv), seen


def test_a_run_handed_from_layout_to_layout_is_the_run_of_one_process(tmp_path):
    flags = [*ENV, *ONE_EPISODE, "--save-freq", "0"]
    steps = 2 * len(HOPS)
    argv = [*flags, "--batch-size", "8", "--steps", str(steps), "--output-dir", str(tmp_path / "whole")]
    assert train.main(argv) == 0
    whole, before = rows(tmp_path / "whole"), None
    for hop, (ranks, layout) in enumerate(HOPS):
        at = tmp_path / f"hop{hop}"
        argv = ["--resume", str(tmp_path / f"hop{hop - 1}")] if hop else flags
        argv = [*argv, "--output-dir", str(at), "--batch-size", str(8 // ranks), *layout]
        results = run_ranks(
            ranks, train_and_look, [*argv, "--steps", str(2 * hop + 2)], init_group=False, deadline_s=240
        )
        assert [code for code, _ in results] == [0] * ranks
        for _, (loaded, _) in results:
            if before is not None:
                assert loaded.keys() == before.keys()
                assert [key for key in loaded if loaded[key].tobytes() != before[key].tobytes()] == []
        before = results[0][1][1]
        assert [row["step"] for row in rows(at)] == [2 * hop + 1, 2 * hop + 2]
        assert_same_curve(rows(at), whole)


# ---- launchers and accidents


class Job:
    """A command in the background, with what it has said so far."""

    def __init__(self, *command: str) -> None:
        self.said: list[str] = []
        env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "90"  # for a busy machine; the default is 30
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line)

    def has_said(self, start: str) -> bool:
        return any(line.startswith(start) for line in self.said)

    @property
    def was_killed(self) -> bool:
        """torchrun's grace time was over before its ranks had ended."""
        return any("forcefully exiting" in line for line in self.said)

    def until(self, condition, deadline_s: float = 120) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, "".join(self.said)
            time.sleep(0.002)

    def ends(self, deadline_s: float = 120) -> int:
        try:
            return self.process.wait(deadline_s)
        finally:
            self.process.kill()


def torchrun(*flags: str) -> list[str]:
    return ["-m", "torch.distributed.run", *flags, str(ROOT / "train.py"), *ENV]


@pytest.fixture
def start():
    """Starts `Job`s; those of a failed test end with it, ranks included."""
    jobs: list[Job] = []

    def begin(*command: str) -> Job:
        jobs.append(Job(*command))
        return jobs[-1]

    yield begin
    for job in jobs:
        if job.process.poll() is None:
            job.process.terminate()
            job.ends()


def whole_checkpoints(run_dir: Path) -> list[str]:
    """Names of all checkpoints; none may be torn, and `last` points to the newest."""
    found = ckpt.find_checkpoints(run_dir / "checkpoints")
    assert [problems for _, problems in found if problems] == []
    names = sorted(path.name for path, _ in found)
    assert not names or os.readlink(run_dir / "checkpoints/last") == names[-1]
    return names


def test_sigterm_while_the_workers_start_leaves_one_checkpoint(start, tmp_path):
    job = start(*torchrun("--nproc-per-node=2", f"--master-port={free_port()}"), "--num-workers", "2",
              "--output-dir", str(tmp_path / "run"), "--steps", "100000", "--save-freq", "0")  # fmt: skip
    job.until(lambda: job.has_said("run: "))  # the last line before the workers start
    job.process.send_signal(signal.SIGTERM)
    job.ends()
    assert len(whole_checkpoints(tmp_path / "run")) == 1 and not job.was_killed, "".join(job.said)
    assert len(rows(tmp_path / "run")) <= 3


def test_sigterm_during_a_save_leaves_whole_checkpoints_only(start, tmp_path):
    checkpoints = tmp_path / "run/checkpoints"
    job = start(*torchrun("--nproc-per-node=2", f"--master-port={free_port()}"), "--num-workers", "2",
              "--output-dir", str(tmp_path / "run"), "--steps", "100000", "--save-freq", "1",
              "--keep-last", "2", "--parallelism.dp-shard", "2")  # fmt: skip
    job.until(lambda: job.has_said("checkpoint 3 ") and any(checkpoints.glob(".tmp-*")))
    job.process.send_signal(signal.SIGTERM)
    job.ends()
    assert len(whole_checkpoints(tmp_path / "run")) == 2 and not job.was_killed, "".join(job.said)
    assert not any(checkpoints.glob(".tmp-*"))


def test_after_a_run_signals_act_as_before(tmp_path):
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    assert train.main([*ENV, "--steps", "1", "--output-dir", str(tmp_path / "run")]) == 0
    assert [signal.getsignal(number) for number in numbers] == before


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def train_rank(rank: int, world_size: int, argv: list[str]) -> int:
    return train.main(argv)


def test_a_killed_rank_is_started_again_and_the_run_ends_as_if_it_had_not_been(start, tmp_path):
    flags = ["--steps", "300", "--save-freq", "20", "--keep-last", "1"]
    argv = [*ENV, *flags, "--output-dir", str(tmp_path / "whole")]
    assert run_ranks(2, train_rank, argv, init_group=False, deadline_s=240) == [0, 0]
    job = start(*torchrun("--nproc-per-node=2", "--max-restarts=3", f"--master-port={free_port()}"), *flags,
              "--output-dir", str(tmp_path / "run"), "--resume", "auto")  # fmt: skip
    job.until(lambda: job.has_said("checkpoint 20 "))
    os.kill(children(job.process.pid)[-1], signal.SIGKILL)
    assert job.ends() == 0, "".join(job.said)
    starts = [line for line in job.said if line.startswith("run: ")]
    assert len(starts) == 2 and "from step 0," not in starts[1]
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")  # the same layout: bit for bit


def test_two_agents_that_find_each_other_give_the_curve_of_one_process(start, tmp_path):
    steps = ["--steps", "4", "--save-freq", "0"]
    assert train.main([*ENV, *steps, "--batch-size", "8", "--output-dir", str(tmp_path / "whole")]) == 0
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    launch = torchrun("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", endpoint)
    jobs = [start(*launch, *steps, "--output-dir", str(tmp_path / "run")) for _ in range(2)]
    assert [job.ends() for job in jobs] == [0, 0], "".join(jobs[0].said + jobs[1].said)
    assert len(rows(tmp_path / "run")) == 4
    assert_same_curve(rows(tmp_path / "run"), rows(tmp_path / "whole"))


@pytest.mark.long
def test_a_killed_agent_is_replaced_and_the_run_ends_as_if_it_had_not_been(start, tmp_path, monkeypatch):
    """Its rank trains on, an orphan, until torchrun has missed the agent (here for 3 s) and takes a new one in."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    flags = ["--steps", "1500", "--save-freq", "50", "--keep-last", "2", "--log-freq", "250"]
    argv = [*ENV, *flags, "--output-dir", str(tmp_path / "whole")]
    assert run_ranks(2, train_rank, argv, init_group=False, deadline_s=240) == [0, 0]
    launch = torchrun("--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d",
                      f"--rdzv-endpoint=127.0.0.1:{free_port()}",
                      "--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3")  # fmt: skip
    command = [*launch, *flags, "--output-dir", str(tmp_path / "run"), "--resume", "auto"]
    stays = start(*command)
    time.sleep(5)  # whoever comes first holds the meeting point
    leaves = start(*command)
    stays.until((tmp_path / "run/checkpoints/000100").exists, deadline_s=240)
    leaves.process.kill()
    time.sleep(6)
    again = start(*command)
    assert [job.ends(400) for job in (stays, again)] == [0, 0], "".join(stays.said + again.said)
    assert "stopped (SIGTERM)" in "".join(stays.said + leaves.said + again.said)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


# ---- what LeRobot began


def lerobots_order(self: data.SampleOrder, positions: np.ndarray) -> np.ndarray:
    """Source: LeRobot 0.6.2, EpisodeAwareSampler; within the first epoch."""
    seed = int(np.random.SeedSequence([1000, 0]).generate_state(1, np.uint64)[0])
    return torch.randperm(150, generator=torch.Generator().manual_seed(seed)).numpy()[positions]


def train_in_lerobots_order(rank: int, world_size: int, argv: list[str]) -> int:
    whole = data.TrainBatches.__getitem__

    def without_count(self, step):  # LeRobot divides by the valid steps of each rank's own batch
        return {key: value for key, value in whole(self, step).items() if key != "num_valid"}

    data.SampleOrder.frame = lerobots_order  # type: ignore[method-assign]
    data.TrainBatches.__getitem__ = without_count  # type: ignore[method-assign]
    return train.main(argv)


@pytest.mark.parametrize("kind,ranks", [("exact_env_single", 1), ("exact_env_ddp2", 2)])
def test_a_run_of_lerobot_goes_on_as_lerobot_itself_went_on(tmp_path, kind, ranks):
    source = shared("reference", "ckpts", kind)
    argv = ["--resume", str(source / "000005"), "--steps", "10", "--output-dir", str(tmp_path / "run"),
            "--dataset.root", str(DATA / "env_state_v3"), "--log-freq", "1", "--num-workers", "0"]  # fmt: skip
    assert run_ranks(ranks, train_in_lerobots_order, argv, init_group=False, deadline_s=240) == [0] * ranks
    begun, ours, theirs = (
        load_file(at / "pretrained_model/model.safetensors")
        for at in (source / "000005", tmp_path / "run/checkpoints/000010", source / "000010")
    )
    assert ours.keys() == theirs.keys()
    moved = max((theirs[key] - begun[key]).abs().max().item() for key in theirs)
    for key in theirs:
        assert (ours[key] - theirs[key]).abs().max().item() < 0.01 * moved, key
    lines = shared("reference", "ckpts", "exact_losses.txt").read_text().split("ex_" + kind[10:] + "\n")[1]
    said = [float(line.split("loss:")[1].split()[0]) for line in lines.splitlines()[5:10]]
    assert [row["loss"] for row in rows(tmp_path / "run")] == pytest.approx(said, abs=6e-4)  # three digits
