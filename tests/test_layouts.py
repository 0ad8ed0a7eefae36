"""Whole runs, handed from layout to layout, signalled, killed or spread over launchers, compared with one that
nobody disturbed; and LeRobot's own runs, continued here, with how LeRobot continued them."""

import json
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
import lerobot_flags
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


def gathered(parts: train.Parts) -> dict[str, np.ndarray]:
    """Weights and moments whole, by parameter. Collective: call on every rank."""

    def whole(tensor: torch.Tensor) -> np.ndarray:
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().numpy().copy()

    found = {}
    for name, parameter in parts.policy.named_parameters():
        found[name] = whole(parameter)
        for key, value in parts.optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = whole(value)
    return found


def train_and_look(rank: int, world_size: int, argv: list[str]) -> tuple[int, list[dict]]:
    """The exit code, and what was in memory before the first and after the last step of the run."""
    seen, real = [], train.train

    def looking(run: train.Run) -> int:
        seen.append(gathered(run.parts))
        code = real(run)
        seen.append(gathered(run.parts))
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


def whole_checkpoints(run_dir: Path) -> list[str]:
    """Names of all checkpoints; none may be torn, and `last` points to the newest."""
    found = ckpt.find_checkpoints(run_dir / "checkpoints")
    assert [problems for _, problems in found if problems] == []
    names = sorted(path.name for path, _ in found)
    assert not names or os.readlink(run_dir / "checkpoints/last") == names[-1]
    return names


def test_sigterm_while_the_workers_start_leaves_one_checkpoint(tmp_path):
    job = Job(*torchrun("--nproc-per-node=2", f"--master-port={free_port()}"), "--num-workers", "2",
              "--output-dir", str(tmp_path / "run"), "--steps", "100000", "--save-freq", "0")  # fmt: skip
    job.until(lambda: job.has_said("run: "))  # the last line before the workers start
    job.process.send_signal(signal.SIGTERM)
    job.ends()
    assert len(whole_checkpoints(tmp_path / "run")) == 1, "".join(job.said)
    assert len(rows(tmp_path / "run")) <= 3


def test_sigterm_during_a_save_leaves_whole_checkpoints_only(tmp_path):
    checkpoints = tmp_path / "run/checkpoints"
    job = Job(*torchrun("--nproc-per-node=2", f"--master-port={free_port()}"), "--num-workers", "2",
              "--output-dir", str(tmp_path / "run"), "--steps", "100000", "--save-freq", "1",
              "--keep-last", "2", "--parallelism.dp-shard", "2")  # fmt: skip
    job.until(lambda: job.has_said("checkpoint 3 ") and any(checkpoints.glob(".tmp-*")))
    job.process.send_signal(signal.SIGTERM)
    job.ends()
    assert len(whole_checkpoints(tmp_path / "run")) == 2, "".join(job.said)
    assert not any(checkpoints.glob(".tmp-*"))


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def train_rank(rank: int, world_size: int, argv: list[str]) -> int:
    return train.main(argv)


def test_a_killed_rank_is_started_again_and_the_run_ends_as_if_it_had_not_been(tmp_path):
    flags = ["--steps", "300", "--save-freq", "20", "--keep-last", "1"]
    argv = [*ENV, *flags, "--output-dir", str(tmp_path / "whole")]
    assert run_ranks(2, train_rank, argv, init_group=False, deadline_s=240) == [0, 0]
    job = Job(*torchrun("--nproc-per-node=2", "--max-restarts=3", f"--master-port={free_port()}"), *flags,
              "--output-dir", str(tmp_path / "run"), "--resume", "auto")  # fmt: skip
    job.until(lambda: job.has_said("checkpoint 20 "))
    os.kill(children(job.process.pid)[-1], signal.SIGKILL)
    assert job.ends() == 0, "".join(job.said)
    starts = [line for line in job.said if line.startswith("run: ")]
    assert len(starts) == 2 and "from step 0," not in starts[1]
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")  # the same layout: bit for bit


def test_two_agents_that_find_each_other_give_the_curve_of_one_process(tmp_path):
    steps = ["--steps", "4", "--save-freq", "0"]
    assert train.main([*ENV, *steps, "--batch-size", "8", "--output-dir", str(tmp_path / "whole")]) == 0
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    launch = torchrun("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", endpoint)
    jobs = [Job(*launch, *steps, "--output-dir", str(tmp_path / "run")) for _ in range(2)]
    assert [job.ends() for job in jobs] == [0, 0], "".join(jobs[0].said + jobs[1].said)
    assert len(rows(tmp_path / "run")) == 4
    assert_same_curve(rows(tmp_path / "run"), rows(tmp_path / "whole"))


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


# ---- lerobot-train's command line

LEROBOT = {
    "policy.type": "act",
    "policy.device": "cpu",
    "policy.repo_id": "user/name",
    "policy.push_to_hub": "false",
    "dataset.repo_id": "user/name",
    "accelerator.mixed_precision": "bf16",
    "accelerator.gradient_accumulation.steps": "2",
    "accelerator.compile.enabled": "true",
    "accelerator.compile.mode": "default",
    "accelerator.ddp.bucket_cap_mb": "25",
    "accelerator.ddp.broadcast_buffers": "false",
    "accelerator.ddp.gradient_as_bucket_view": "true",
    "accelerator.ddp.static_graph": "true",
    "accelerator.ddp.find_unused_parameters": "false",
    "accelerator.fsdp.wrap_modules": '["ACTEncoderLayer"]',
    "accelerator.fsdp.min_num_params": "1000",
    "accelerator.fsdp.reshard_after_forward": "false",
    "accelerator.fsdp.cpu_offload": "false",
    "accelerator.fsdp.ignored_modules": "model.action_head",
    "accelerator.fsdp.mixed_precision_policy.param_dtype": "bfloat16",
    "accelerator.fsdp.mixed_precision_policy.reduce_dtype": "float32",
    "accelerator.fsdp.mixed_precision_policy.output_dtype": "null",
    "accelerator.fsdp.mixed_precision_policy.cast_forward_inputs": "true",
    "wandb.enable": "false",
    "trackio.enable": "true",
    "save_checkpoint": "false",
    "eval_steps": "3",
    "env_eval_freq": "3",
    "optimizer.type": "adamw",
    "optimizer.lr": "1e-4",
    "optimizer.weight_decay": "0",
    "optimizer.betas": "[0.9, 0.99]",
    "optimizer.eps": "1e-7",
    "optimizer.grad_clip_norm": "1",
    "scheduler.type": "cosine_decay_with_warmup",
    "scheduler.num_warmup_steps": "2",
    "scheduler.num_decay_steps": "4",
    "scheduler.peak_lr": "1e-4",
    "scheduler.decay_lr": "1e-5",
    "peft.method_type": "LORA",
    "peft.r": "4",
    "peft.target_modules": '["linear1", "linear2"]',
    "parallelism.dp_replicate": "1",
    "parallelism.dp_shard": "1",
    "checkpoint_format": "safetensors",
    "log_freq": "7",
    "save_freq": "8",
    "seed": "9",
    "steps": "10",
    "batch_size": "11",
    "num_workers": "0",
    "job_name": "mine",
    "output_dir": "here",
}
"""The flags that the field's multi-GPU guide and command lines in use consist of, each with a value."""

OURS = {
    "device": "cpu", "push_to_hub": None, "dataset.repo_id": "user/name", "mixed_precision": "bf16",
    "gradient_accumulation_steps": 2, "compile": True, "compile_mode": "default", "ddp.bucket_cap_mb": 25,
    "ddp.broadcast_buffers": False, "ddp.gradient_as_bucket_view": True, "ddp.static_graph": True,
    "ddp.find_unused_parameters": False, "fsdp.wrap_modules": ["ACTEncoderLayer"], "fsdp.min_num_params": 1000,
    "fsdp.reshard_after_forward": False, "fsdp.cpu_offload": False, "fsdp.ignored_modules": "model.action_head",
    "fsdp.param_dtype": "bfloat16", "fsdp.reduce_dtype": "float32", "fsdp.output_dtype": None,
    "fsdp.cast_forward_inputs": True, "tracker": "trackio", "save_checkpoint": False, "eval_freq": 3,
    "optimizer.lr": 1e-4, "optimizer.weight_decay": 0.0, "optimizer.betas": [0.9, 0.99], "optimizer.eps": 1e-7,
    "optimizer.grad_clip_norm": 1.0, "scheduler.name": "cosine", "scheduler.warmup_steps": 2,
    "scheduler.decay_steps": 4, "scheduler.final_lr_ratio": 0.1, "peft.method_type": "LORA", "peft.r": 4,
    "peft.target_modules": ["linear1", "linear2"], "parallelism.dp_replicate": 1, "parallelism.dp_shard": 1,
    "checkpoint_format": "safetensors", "log_freq": 7, "save_freq": 8, "seed": 9, "steps": 10, "batch_size": 11,
    "num_workers": 0, "job_name": "mine", "output_dir": "here",
}  # fmt: skip
"""All of them in our words."""


def in_our_words(flags: list[str]) -> dict[str, list[str]]:
    return lerobot_flags.translate(lerobot_flags.split_flags(flags), train.field_types(train.Config))


def test_a_flag_of_lerobot_train_means_the_same_in_every_spelling_alone_and_among_others():
    together = in_our_words([f"--{name}={value}" for name, value in LEROBOT.items()])
    for name, value in LEROBOT.items():
        dashes = name.replace("_", "-")
        spellings = [
            [f"--{name}={value}"],
            [f"--{name}", value],
            [f"--{dashes}={value}"],
            [f"--{dashes}", value],
        ]
        if value == "true":
            spellings += [[f"--{name}=True"], [f"--{name}"]]
        alone = [in_our_words(flags) for flags in spellings]
        alone = [{key: words or ["true"] for key, words in flags.items() if key} for flags in alone]
        assert alone == [alone[0]] * len(alone), name
        assert alone[0].items() <= together.items(), name
    config = train.parse_command_line([f"--{name}={value}" for name, value in LEROBOT.items()])[0]
    found = train.flat(train.to_dict(config))
    assert {key: found[key] for key in OURS} == OURS


def lerobot_job(run_dir: Path, equals: bool) -> list[str]:
    flags = LEROBOT | {
        "dataset.root": str(DATA / "env_state_v3"), "policy.chunk_size": "20", "policy.n_action_steps": "20",
        "policy.dim_model": "32", "policy.n_heads": "4", "policy.dim_feedforward": "64", "steps": "4",
        "batch_size": "2", "log_freq": "2", "trackio.enable": "false", "peft.method_type": "null",
        "accelerator.compile.enabled": "false", "output_dir": str(run_dir), "save_checkpoint": "true",
        "dataset.eval_split": "0.4",
    }  # fmt: skip
    if equals:
        return [f"--{name}={value}" for name, value in flags.items()]
    return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]


def train_twice(rank: int, world_size: int, jobs: list[list[str]]) -> list[int]:
    return [train.main(job) for job in jobs]


def test_all_flags_of_lerobot_train_together_train_on_two_ranks_in_either_spelling(tmp_path):
    jobs = [lerobot_job(tmp_path / name, name == "equals") for name in ("equals", "blank")]
    jobs.append(["--resume=true", f"--config_path={tmp_path / 'blank/checkpoints/last'}", "--steps=6"])
    assert run_ranks(2, train_twice, jobs, init_group=False, deadline_s=240) == [[0, 0, 0]] * 2
    one, other = rows(tmp_path / "equals"), rows(tmp_path / "blank")
    assert other[: len(one)] == one and [row["step"] for row in one] == [2, 4, 4]
    saved = json.loads((tmp_path / "equals/checkpoints/last/training_state/run_config.json").read_text())
    assert saved["mixed_precision"] == "bf16" and saved["gradient_accumulation_steps"] == 2
    assert other[-1]["step"] == 6
