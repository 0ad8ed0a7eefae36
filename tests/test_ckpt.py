"""Checkpoints: what any layout saved against what any layout loads, bit by bit; LeRobot's files against ours;
broken saves and broken files against the rule: a whole one is always there, a torn one never chosen."""

import errno
import functools
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path
from traceback import StackSummary
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from conftest import DATA, ROOT, shared
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckpt
from extras import ckpt_tools, hub, lerobot_ckpt
from model_act import ACTPolicy

SINGLE = DATA / "ckpts/env_single_safetensors/000010"
SHARDED = DATA / "ckpts/env_fsdp2_dcp/000010"
WORLD = {"single": 1, "ddp": 2, "fsdp2": 2, "fsdp4": 4, "hsdp": 4}
CONFIG = {
    "type": "act",
    "input_features": {
        "observation.state": {"type": "STATE", "shape": [3]},
        "observation.images.top_1.left": {"type": "VISUAL", "shape": [3, 8, 8]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [3]}},
    "device": "cpu",
    "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    "optimizer_lr": 1e-5,
    "optimizer_weight_decay": 1e-4,
}
RUN = {"steps": 100, "batch_size": 4, "gradient_accumulation_steps": 2, "seed": 7}


class Tiny(nn.Module):
    """Two optimizer groups, rows that no world size divides, a buffer, a frozen and an unused parameter."""

    model: Any

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.encoder = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))
        self.model.backbone = nn.Conv2d(3, 6, 3)
        self.model.action_head = nn.Linear(5, 3)
        self.model.unused = nn.Linear(2, 3)
        self.model.frozen = nn.Linear(2, 3).requires_grad_(False)
        self.model.register_buffer("pos_enc", torch.arange(6.0).reshape(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x.reshape(-1, 1, 3, 1).expand(-1, 3, 3, 3)
        return self.model.action_head(self.model.encoder(x)).sum() + self.model.backbone(image).sum()

    def groups(self) -> list[dict]:
        named = [(n, p) for n, p in self.named_parameters() if p.requires_grad]
        rest = [p for n, p in named if not n.startswith("model.backbone")]
        backbone = [p for n, p in named if n.startswith("model.backbone")]
        return [{"params": rest, "lr": 3e-4}, {"params": backbone, "lr": 2e-5, "weight_decay": 0.0}]


def spread(policy: Any, layout: str) -> nn.Module:
    if layout == "ddp":
        return DistributedDataParallel(policy, find_unused_parameters=True)
    if layout != "single":
        shape, names = (
            ((2, 2), ("replicate", "shard")) if layout == "hsdp" else ((dist.get_world_size(),), ("shard",))
        )
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(policy.model.encoder[0], mesh=mesh)
        fully_shard(policy, mesh=mesh)
    return policy


def parts(layout: str = "single", seed: int = 0) -> tuple:
    torch.manual_seed(seed)
    policy = Tiny()
    module = spread(policy, layout)
    return policy, module, torch.optim.AdamW(policy.groups(), betas=(0.8, 0.95))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for i in range(steps):
        module(torch.arange(6.0).reshape(2, 3) + i).backward()
        optimizer.step()
        optimizer.zero_grad()


def number(name: str, kind: str, shape: torch.Size) -> torch.Tensor:
    """The value that every layout stores for a tensor of this name."""
    seed = torch.Generator().manual_seed(zlib.crc32(f"{name}/{kind}".encode()))
    return torch.rand(shape, generator=seed)


def fill(policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = {id(p): n for n, p in policy.named_parameters()}
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            ckpt.copy_part(weight, number(name, "weight", weight.shape).__getitem__)
        for p, state in optimizer.state.items():
            for kind in ("exp_avg", "exp_avg_sq"):
                ckpt.copy_part(state[kind], number(names[id(p)], kind, p.shape).__getitem__)
            state["step"].fill_(41)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(policy: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Collective: weights and moments as full arrays."""
    names = {id(p): n for n, p in policy.named_parameters()}
    out = {n: ckpt._host_copy(full(v)).numpy() for n, v in policy.state_dict().items()}
    for p, state in optimizer.state.items():
        out |= {f"{names[id(p)]}/{k}": ckpt._host_copy(full(v)).numpy() for k, v in state.items()}
    return out


def stats() -> dict:
    keys = {"observation.state": (3,), "observation.images.top_1.left": (3, 1, 1), "action": (3,)}
    return {k: {s: number(k, s, torch.Size(shape)) for s in ("mean", "std")} for k, shape in keys.items()}


def save(
    run_dir: Path, step: int, module: nn.Module, optimizer, writer=None, *, run_config=RUN, **kwargs
) -> ckpt.CheckpointWriter:
    """As train.py saves: with LeRobot's files, and an adapter as {"state_dict": ..., "config": ...}."""
    names = ("checkpoint_format", "keep_last", "async_save", "sharded")
    options = {k: kwargs.pop(k) for k in names if k in kwargs}
    writer = writer or ckpt.CheckpointWriter(run_dir, **options)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    state = {"samples_seen": step * 4, "seed": 7} | kwargs.pop("state", {})
    parallelism = state.pop("parallelism", {"dp_replicate": world_size, "dp_shard": 1})
    state = lerobot_ckpt.step_state(run_config, world_size, parallelism) | state
    run_config = {**run_config, "checkpoint_format": writer.format}
    adapter = kwargs.pop("adapter", {})
    files = lerobot_ckpt.checkpoint_files(
        CONFIG, run_config, parallelism, stats=stats(), step=step, adapter_config=adapter.get("config"),
        base_lrs=[group["lr"] for group in optimizer.param_groups],
    )  # fmt: skip
    files["training_state/run_config.json"] = run_config
    tensors = adapter.get("state_dict")
    writer.save(step, module, optimizer, state=state, files=files, adapter=tensors, **kwargs)
    return writer


def load(step_dir: Path, module: nn.Module, optimizer) -> dict:
    lerobot_ckpt.load_weights(step_dir, module, resume=True)
    return lerobot_ckpt.load_training_state(step_dir, module, optimizer)


def found(path: str | Path, output_dir: str | Path | None = None) -> Path:
    step_dir = lerobot_ckpt.resolve_resume(path, output_dir)
    assert step_dir is not None
    return step_dir


def names_in(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


# -- every layout to every layout


def save_all_formats(rank: int, world: int, layout: str, root: Path) -> None:
    sharded = layout not in ("single", "ddp")
    for form in ("safetensors", "dcp", "safetensors_dcp") if sharded else ("safetensors",):
        policy, module, optimizer = parts(layout)
        train(module, optimizer)
        fill(policy, optimizer)
        parallelism = {"dp_replicate": 2 if layout == "hsdp" else 1, "dp_shard": 2}
        state = {"samples_seen": 164, "parallelism": parallelism}
        save(
            root / f"{layout}-{form}",
            41,
            module,
            optimizer,
            checkpoint_format=form,
            sharded=sharded,
            state=state,
        )


def load_all(rank: int, world: int, layout: str, root: Path) -> dict:
    loaded = {}
    for run_dir in sorted(root.iterdir()):
        policy, module, optimizer = parts(layout, seed=3)
        state = load(found(run_dir), module, optimizer)
        names = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
        settings = [{k: group[k] for k in names} for group in optimizer.param_groups]
        loaded[run_dir.name] = whole(policy, optimizer), state["samples_seen"], settings
    return loaded


@pytest.fixture(scope="module")
def every_layout(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    for layout, world in WORLD.items():
        run_ranks(world, save_all_formats, layout, root)
    return root


@pytest.fixture(scope="module")
def loaded(every_layout: Path) -> Any:
    return functools.cache(lambda layout: run_ranks(WORLD[layout], load_all, layout, every_layout))


@pytest.mark.parametrize("layout", WORLD)
def test_what_any_layout_saved_in_any_format_is_loaded_bit_for_bit(loaded: Any, layout: str) -> None:
    policy, module, optimizer = parts()
    train(module, optimizer)
    fill(policy, optimizer)
    want = whole(policy, optimizer)
    ranks = loaded(layout)
    assert len(ranks[0]) == 2 + 3 * 3
    for source in ranks[0]:
        got, samples_seen, settings = ranks[0][source]
        assert got.keys() == want.keys(), source
        assert all(np.array_equal(got[k], want[k]) for k in want), source
        assert samples_seen == 164
        same = {"eps": 1e-8, "amsgrad": False, "maximize": False}
        assert settings[0] == same | {"lr": 3e-4, "betas": (0.8, 0.95), "weight_decay": 0.01}
        assert (settings[1]["lr"], settings[1]["weight_decay"]) == (2e-5, 0.0)


def test_a_resume_leaves_the_random_generators_alone(every_layout: Path) -> None:
    """No step draws from one; what is in rng_state.safetensors is for LeRobot."""

    def draws() -> tuple:
        return random.gauss(0, 1), np.random.standard_normal(), torch.rand(()).item()

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    want = draws()
    _, module, optimizer = parts()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    load(every_layout / "fsdp2-dcp/checkpoints/000041", module, optimizer)
    assert draws() == want
    assert not list(every_layout.rglob("rng_state_ranks.safetensors"))


def test_keys_and_bits_of_the_weights_do_not_depend_on_layout_or_format(every_layout: Path) -> None:
    want = (
        every_layout / "single-safetensors/checkpoints/000041/pretrained_model/model.safetensors"
    ).read_bytes()
    files = list(every_layout.glob("*/checkpoints/000041/pretrained_model/model.safetensors"))
    assert len(files) == 2 + 3 * 2
    assert all(f.read_bytes() == want for f in files)


def test_lerobot_finds_in_the_shards_what_it_looks_for(every_layout: Path) -> None:
    step_dir = every_layout / "fsdp2-dcp/checkpoints/000041"
    ours = ckpt.read_shard_metadata(step_dir / "training_state/optimizer_0").state_dict_metadata
    theirs = ckpt.read_shard_metadata(SHARDED / "training_state/optimizer_0").state_dict_metadata
    settings = {k for k in theirs if k.startswith("optimizer.param_groups.")}
    assert settings == {k for k in ours if k.startswith("optimizer.param_groups.")}
    assert "optimizer.state.model.action_head.weight.exp_avg_sq" in ours
    weights = ckpt.read_shard_metadata(step_dir / "pretrained_model/pytorch_model_fsdp_0").state_dict_metadata
    assert {"model.model.action_head.weight", "model.model.pos_enc"} <= weights.keys()
    assert len(getattr(weights["model.model.action_head.weight"], "chunks")) == 2  # noqa: B009


def compiled_and_wrapped(rank: int, world: int, root: Path) -> None:
    policy, module, optimizer = parts("ddp")
    train(module, optimizer)
    fill(policy, optimizer)
    policy.model.encoder.compile()
    compiled: Any = torch.compile(module)
    save(root / "ddp", 1, compiled, optimizer)


def test_compiled_and_wrapped_policies_save_plain_keys(tmp_path: Path) -> None:
    run_ranks(2, compiled_and_wrapped, tmp_path)
    policy, _, optimizer = parts()
    train(policy, optimizer)
    policy.model.encoder = torch.compile(policy.model.encoder)
    compiled: Any = torch.compile(policy)
    save(tmp_path / "single", 1, compiled, optimizer)
    for run in ("ddp", "single"):
        file = load_file(tmp_path / run / "checkpoints/last/pretrained_model/model.safetensors")
        assert file.keys() == Tiny().state_dict().keys()


# -- exactness


def test_a_resumed_run_takes_the_very_steps_of_the_uninterrupted_one(tmp_path: Path) -> None:
    def train_by_schedule(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] / (1 + step)
            train(module, optimizer)

    policy, module, optimizer = parts()
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    train_by_schedule(module, optimizer, range(3))
    run_config = {**RUN, "scheduler": {"name": "cosine", "warmup_steps": 2}}
    save(tmp_path, 3, module, optimizer, run_config=run_config)
    train_by_schedule(module, optimizer, range(3, 5))
    again, module2, optimizer2 = parts(seed=9)
    for group in optimizer2.param_groups:  # all of it comes from the file
        group |= {"lr": 1.0, "initial_lr": 1.0, "weight_decay": 0.5, "betas": (0.1, 0.1)}
    load(found(tmp_path), module2, optimizer2)
    train_by_schedule(module2, optimizer2, range(3, 5))
    want, got = whole(policy, optimizer), whole(again, optimizer2)
    assert all(np.array_equal(want[k], got[k]) for k in want)
    assert optimizer.param_groups[1]["lr"] == optimizer2.param_groups[1]["lr"] < 2e-5
    assert optimizer2.param_groups[0]["initial_lr"] == 3e-4


def test_nothing_is_stepped_by_preparing_to_load(tmp_path: Path) -> None:
    save(tmp_path, 0, *parts()[1:])
    _, module, optimizer = parts(seed=1)
    load(found(tmp_path), module, optimizer)
    assert not optimizer.state
    policy, module2, optimizer2 = parts()
    train(module, optimizer)
    train(module2, optimizer2)
    assert torch.equal(module.model.action_head.weight, policy.model.action_head.weight)


def test_fused_and_plain_adamw_continue_each_other(tmp_path: Path) -> None:
    for fused in (True, False):
        policy, module, _ = parts()
        optimizer = torch.optim.AdamW(policy.groups(), fused=fused)
        train(module, optimizer, 2)
        save(tmp_path / str(fused), 2, module, optimizer)
        other, module2, _ = parts(seed=5)
        optimizer2 = torch.optim.AdamW(other.groups(), fused=not fused)
        load(found(tmp_path / str(fused)), module2, optimizer2)
        assert optimizer2.param_groups[0]["fused"] is (not fused)
        assert optimizer2.state[other.model.action_head.weight]["step"] == 2
        train(module2, optimizer2)
        train(module, optimizer)
        torch.testing.assert_close(policy.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-7)


def test_a_layer_frozen_or_freed_between_runs_loses_only_its_own_moments(tmp_path: Path, caplog) -> None:
    policy, module, optimizer = parts()
    train(module, optimizer)
    save(tmp_path, 1, module, optimizer)
    other = Tiny()
    other.model.frozen.requires_grad_(True)
    other.model.backbone.requires_grad_(False)
    optimizer2 = torch.optim.AdamW(other.groups())
    load(found(tmp_path), other, optimizer2)
    assert "no longer train" in caplog.text and "model.backbone.weight" in caplog.text
    assert "starts anew: model.frozen.weight" in caplog.text
    moments = optimizer2.state[other.model.action_head.weight]
    assert torch.equal(moments["exp_avg"], optimizer.state[policy.model.action_head.weight]["exp_avg"])
    assert other.model.unused.weight not in optimizer2.state


def test_tied_and_channels_last_weights_are_stored_as_plain_ones(tmp_path: Path) -> None:
    policy = parts()[0]
    plain = policy.state_dict()["model.backbone.weight"].clone()
    policy.model.unused = policy.model.frozen  # one module under two names
    optimizer = torch.optim.AdamW(policy.groups())
    policy.to(memory_format=torch.channels_last)
    save(tmp_path, 1, policy, optimizer)
    file = load_file(tmp_path / "checkpoints/000001/pretrained_model/model.safetensors")
    assert torch.equal(file["model.backbone.weight"], plain)
    assert torch.equal(file["model.unused.weight"], file["model.frozen.weight"])
    other = Tiny().to(memory_format=torch.channels_last)
    other.model.unused = other.model.frozen
    lerobot_ckpt.load_weights(tmp_path, other)
    assert other.model.unused.weight is other.model.frozen.weight
    assert torch.equal(other.model.backbone.weight, plain)
    assert other.model.backbone.weight.is_contiguous(memory_format=torch.channels_last)


def test_half_precision_policies_are_stored_in_float32(tmp_path: Path) -> None:
    policy, _, optimizer = parts()
    save(tmp_path, 1, policy.bfloat16(), optimizer)
    file = load_file(tmp_path / "checkpoints/000001/pretrained_model/model.safetensors")
    assert {v.dtype for v in file.values()} == {torch.float32}
    other = Tiny().bfloat16()
    lerobot_ckpt.load_weights(tmp_path, other)
    assert torch.equal(other.model.action_head.weight, policy.model.action_head.weight)


# -- LeRobot's checkpoints


def act(step_dir: Path) -> tuple[ACTPolicy, torch.optim.AdamW]:
    config, stats = lerobot_ckpt.load_policy_files(step_dir)
    policy = lerobot_ckpt.policy_of(config, stats)
    return policy, torch.optim.AdamW(policy.optim_groups(1.0, 1.0, 0.5))


@pytest.mark.parametrize("step_dir", [SINGLE, SHARDED], ids=["safetensors", "dcp"])
def test_lerobots_checkpoints_load_and_are_written_back_with_its_keys_and_types(
    step_dir: Path, tmp_path: Path
) -> None:
    assert ckpt.checkpoint_problems(step_dir, lerobot_ckpt.problems) == []
    policy, optimizer = act(step_dir)
    state = load(step_dir, policy, optimizer)
    assert (state["step"], state["samples_seen"]) == (10, 80 if step_dir is SHARDED else 40)
    assert len(optimizer.state) == sum(1 for _ in policy.parameters())
    assert optimizer.param_groups[0]["lr"] == 1e-5 and optimizer.param_groups[1]["weight_decay"] == 1e-4
    config = json.loads((step_dir / "pretrained_model/config.json").read_text())
    run_config = lerobot_ckpt.load_run_config(step_dir)
    writer = ckpt.CheckpointWriter(tmp_path)
    files = lerobot_ckpt.checkpoint_files(
        lerobot_ckpt.config_dict(policy, "cpu"), run_config, {"dp_replicate": 1, "dp_shard": 1}, stats=policy.stats, step=10,
        base_lrs=[1e-5, 1e-5],
    )  # fmt: skip
    writer.save(10, policy, optimizer, state=state, files=files)
    ours = tmp_path / "checkpoints/000010"
    assert json.loads((ours / "pretrained_model/config.json").read_text()) == config
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        theirs = json.loads((step_dir / "pretrained_model" / name).read_text())
        assert json.loads((ours / "pretrained_model" / name).read_text()) == theirs

    def typed(value):
        if isinstance(value, dict):
            return {k: typed(v) for k, v in value.items()}
        return [typed(v) for v in value] if isinstance(value, list) else type(value)

    theirs = json.loads((SINGLE / "training_state/optimizer_param_groups.json").read_text())
    mine = json.loads((ours / "training_state/optimizer_param_groups.json").read_text())
    assert mine == theirs and typed(mine) == typed(theirs)
    for file in ("training_state/optimizer_state.safetensors", "training_state/rng_state.safetensors"):
        a, b = load_file(ours / file), load_file(SINGLE / file)
        assert {k: (v.dtype, v.shape) for k, v in a.items()} == {k: (v.dtype, v.shape) for k, v in b.items()}
    for file in ("training_state/optimizer_state.safetensors", "pretrained_model/model.safetensors"):
        a, b = load_file(ours / file), load_file(SINGLE / file)
        if step_dir is SINGLE:
            assert all(torch.equal(a[k], b[k]) for k in b)
    schema = json.loads((SINGLE / "pretrained_model/train_config.json").read_text())
    mine = json.loads((ours / "pretrained_model/train_config.json").read_text())

    def within(part: dict, whole: dict, path: str = "") -> None:
        for key, value in part.items():
            assert key in whole, f"{path}{key} is not LeRobot's"
            if isinstance(value, dict) and isinstance(whole[key], dict):
                within(value, whole[key], f"{path}{key}.")
            elif whole[key] is not None and value is not None:
                assert type(value) is type(whole[key]), f"{path}{key}"

    within(mine, schema)
    assert mine["optimizer"] == schema["optimizer"] and mine["policy"] == config


@pytest.mark.parametrize(
    "kind", ["ddp2_safetensors", "fsdp2_safetensors", "fsdp2_dcp", "fsdp2_safetensors_dcp"]
)
def test_lerobots_sharded_and_unsharded_moments_are_the_same_after_loading(kind: str) -> None:
    want: dict[str, np.ndarray] = {}
    got: dict[str, np.ndarray] = {}
    for out, name in ((want, "ddp2_safetensors"), (got, kind)):
        policy, optimizer = act(shared("reference/ckpts", f"env_{name}", "000010"))
        load(shared("reference/ckpts", f"env_{name}"), policy, optimizer)
        out |= whole(policy, optimizer)
    moments = [k for k in want if "/" in k]
    assert len(moments) == 3 * 73 and want.keys() == got.keys()
    # The runs differ by rounding, which Adam amplifies for the key bias (its true gradient is zero).
    assert all(np.allclose(want[k], got[k], rtol=1e-4, atol=5e-6) for k in want)


def test_lerobots_runs_without_its_preset_have_one_group(tmp_path: Path) -> None:
    policy, module, optimizer = parts()
    train(module, optimizer)
    save(tmp_path, 1, module, optimizer)
    training = tmp_path / "checkpoints/000001/training_state"
    order = [n for n, p in policy.named_parameters() if p.requires_grad]
    old = json.loads((training / "optimizer_names.json").read_text())["groups"]
    index = {name: i for i, name in enumerate(old[0]["params"] + old[1]["params"])}
    tensors = load_file(training / "optimizer_state.safetensors")
    moved = {}
    for i, name in enumerate(order):
        for kind in ("step", "exp_avg", "exp_avg_sq"):
            if f"state/{index[name]}/{kind}" in tensors:
                moved[f"state/{i}/{kind}"] = tensors[f"state/{index[name]}/{kind}"]
    save_file(moved, training / "optimizer_state.safetensors")
    group = json.loads((training / "optimizer_param_groups.json").read_text())[0]
    group |= {"params": list(range(len(order))), "initial_lr": 0.25}
    (training / "optimizer_param_groups.json").write_text(json.dumps([group]))
    (training / "optimizer_names.json").unlink()
    (training / "checksums.json").unlink()
    other, module2, optimizer2 = parts(seed=2)
    load(tmp_path, module2, optimizer2)
    want, got = whole(policy, optimizer), whole(other, optimizer2)
    assert want.keys() == got.keys() and all(np.array_equal(want[k], got[k]) for k in want)
    assert [g["initial_lr"] for g in optimizer2.param_groups] == [0.25, 0.25]


def test_the_configuration_of_lerobots_run_is_read_under_our_names() -> None:
    run = lerobot_ckpt.load_run_config(SHARDED / "pretrained_model/train_config.json")
    assert (run["steps"], run["batch_size"], run["seed"], run["checkpoint_format"]) == (10, 4, 1000, "dcp")
    assert run["parallelism"] == {"dp_replicate": 1, "dp_shard": 2}
    assert run["dataset"]["root"] == "data/env_state_v3" and run["policy"]["chunk_size"] == 20
    assert run["optimizer"]["betas"] == [0.9, 0.999] and run["scheduler"] == {"name": "none"}


@pytest.mark.parametrize(
    "changes",
    [
        {"scheduler": {"name": "cosine", "warmup_steps": 10, "decay_steps": 50, "final_lr_ratio": 0.1}},
        {"scheduler": {"name": "linear", "warmup_steps": 10}},
        {"mixed_precision": "bf16", "gradient_accumulation_steps": 4},
        {"compile": True, "compile_mode": "default"},
        {"optimizer": {"lr": 3e-4, "weight_decay": 0.0, "grad_clip_norm": 1.0}},
        {"optimizer": {"betas": [0.8, 0.9], "eps": 1e-7}},
        {"dataset": {"root": "/d", "repo_id": "a/b", "episodes": [0, 3]}},
        {"dataset": {"root": "/d", "val_split": 0.2, "tolerance_s": 0.01, "val_episodes": [4]}},
        {"checkpoint_format": "safetensors_dcp", "fsdp": {"cpu_offload": True, "wrap_modules": ["A"]}},
        {"peft": {"method_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["linear1"]}},
        {"tracker": "wandb"},
    ],
)  # fmt: skip
def test_settings_survive_the_way_through_lerobots_schema(changes: dict) -> None:
    shard = 2 if "fsdp" in changes else 1
    theirs = lerobot_ckpt.lerobot_train_config(RUN | changes, CONFIG, {"dp_replicate": 1, "dp_shard": shard})
    back = lerobot_ckpt.run_config_from_lerobot(json.loads(json.dumps(theirs)))
    for key, value in changes.items():
        got = {k: back[key][k] for k in value} if isinstance(value, dict) else back[key]
        assert got == value


# -- statistics


def test_statistics_come_back_under_names_with_dots_and_underscores(tmp_path: Path) -> None:
    save(tmp_path, 1, *parts()[1:])
    config, got = lerobot_ckpt.load_policy_files(tmp_path / "checkpoints/000001/pretrained_model")
    assert config == CONFIG and got.keys() == stats().keys()
    for key, values in stats().items():
        assert all(torch.equal(got[key][s], values[s]) for s in values)


def test_a_lost_or_renamed_statistic_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1, *parts()[1:])
    file = tmp_path / "checkpoints/000001/pretrained_model" / lerobot_ckpt.NORMALIZER
    tensors = load_file(file)
    tensors["observation.images.top.1.left.std"] = tensors.pop("observation.images.top_1.left.std")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"observation\.images\.top_1\.left\.std"):
        lerobot_ckpt.load_policy_files(tmp_path)


def test_old_lerobot_files_keep_their_statistics_in_the_weights(tmp_path: Path) -> None:
    save(tmp_path, 1, *parts()[1:])
    model_dir = tmp_path / "checkpoints/000001/pretrained_model"
    (model_dir / "policy_preprocessor.json").unlink()
    (model_dir / "policy_postprocessor.json").unlink()
    shutil.rmtree(tmp_path / "checkpoints/000001/training_state")
    tensors = load_file(model_dir / "model.safetensors")
    for key, values in stats().items():
        sides = ("normalize_targets", "unnormalize_outputs") if key == "action" else ("normalize_inputs",)
        for side in sides:
            name = f"{side}.buffer_{key.replace('.', '_')}"
            tensors |= {f"{name}.{stat}": value.clone() for stat, value in values.items()}
    save_file(tensors, model_dir / "model.safetensors")
    _, got = lerobot_ckpt.load_policy_files(model_dir)
    assert all(torch.equal(got[k][s], v) for k, values in stats().items() for s, v in values.items())
    lerobot_ckpt.load_weights(model_dir, Tiny())  # they are not "unexpected"
    tensors["normalize_inputs.buffer_observation_force.mean"] = torch.zeros(1)
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(ValueError, match="buffer_observation_force"):
        lerobot_ckpt.load_policy_files(model_dir)


# -- strictness, corruption, pickles


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_missing_unexpected_and_misshapen_tensors_are_named(every_layout: Path, form: str) -> None:
    source = every_layout / f"fsdp2-{form}"
    policy = Tiny()
    policy.model.extra = nn.Linear(1, 1)
    del policy.model.unused
    policy.model.action_head = nn.Linear(5, 4)
    with pytest.raises(ValueError) as error:
        lerobot_ckpt.load_weights(source, policy, resume=True)
    for text in (
        "missing model.extra.bias",
        "unexpected model.unused.weight",
        "model.action_head.weight has shape (3, 5)",
        "; and 1 more.",
    ):
        assert text in str(error.value)
    policy = Tiny()
    policy.model.action_head = nn.Linear(5, 4)
    del policy.model.backbone
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad])
    with pytest.raises(ValueError) as error:
        lerobot_ckpt.load_training_state(source, policy, optimizer)
    assert "unexpected model.backbone.weight" in str(error.value)
    assert "exp_avg of model.action_head.weight has shape (3, 5), not (4, 5)" in str(error.value)


def test_a_policy_of_other_dimensions_is_told_the_flags_not_the_tensors() -> None:
    config, stats = lerobot_ckpt.load_policy_files(SINGLE)
    for changes in ({"dim_model": 2 * config["dim_model"]}, {"n_encoder_layers": 3, "use_vae": False}):
        policy = lerobot_ckpt.policy_of(config | changes, stats)
        with pytest.raises(ValueError) as error:
            lerobot_ckpt.load_weights(SINGLE, policy)
        parts = [
            f"--policy.{key.replace('_', '-')}={value}, but the policy in {SINGLE} has {config[key]}"
            for key, value in changes.items()
        ]
        flags = "the flag" if len(parts) == 1 else "these flags"
        assert set(str(error.value).partition("; leave ")[0].split("; ")) == set(parts)
        assert str(error.value).endswith(f"; leave {flags} out.")


def test_a_moment_that_was_taken_out_is_missed(tmp_path: Path) -> None:
    _, module, optimizer = parts()
    train(module, optimizer)
    save(tmp_path, 1, module, optimizer)
    file = tmp_path / "checkpoints/000001/training_state/optimizer_state.safetensors"
    tensors = load_file(file)
    for key in [k for k in tensors if k.startswith("state/0/")]:
        del tensors[key]
    save_file(tensors, file)
    (file.parent / "checksums.json").unlink()
    with pytest.raises(ValueError, match=r"missing exp_avg of model\.encoder\.0\.weight"):
        load(tmp_path, *parts(seed=1)[1:])


def test_tensors_are_read_to_the_host_never_to_a_bare_cuda(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path, 1, *parts()[1:])
    devices = []

    def spy(*args, **kwargs):
        devices.append(kwargs["device"])
        return original(*args, **kwargs)

    original = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", spy)
    load(tmp_path, *parts()[1:])
    assert set(devices) == {"cpu"}


class Evil:
    def __reduce__(self):
        return os.system, ("touch /tmp/ckpt-was-executed",)


@pytest.mark.parametrize("where", ["metadata", "settings"])
def test_a_pickle_that_would_run_code_is_refused(every_layout: Path, tmp_path: Path, where: str) -> None:
    shutil.copytree(every_layout / "fsdp2-dcp/checkpoints", tmp_path / "checkpoints", symlinks=True)
    step_dir = tmp_path / "checkpoints/000041"
    shards = step_dir / "training_state/optimizer_0"
    (step_dir / "training_state/checksums.json").unlink()
    (step_dir / "training_state/optimizer_names.json").unlink()  # as LeRobot's: all is in the shards
    if where == "metadata":
        (shards / ".metadata").write_bytes(pickle.dumps(Evil()))
    else:
        metadata = ckpt.read_shard_metadata(shards)
        info = next(v for k, v in metadata.storage_data.items() if k.fqn == "optimizer.param_groups.0.lr")
        torch.save(Evil(), shards / "__9_0.distcp")
        info.relative_path, info.offset, info.length = (
            "__9_0.distcp",
            0,
            (shards / "__9_0.distcp").stat().st_size,
        )
        (shards / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"cannot be read"):
        load(tmp_path / "checkpoints/000041", *parts()[1:])
    assert not Path("/tmp/ckpt-was-executed").exists()


def test_shards_outside_the_directory_are_refused(every_layout: Path, tmp_path: Path) -> None:
    metadata = ckpt.read_shard_metadata(
        every_layout / "fsdp2-dcp/checkpoints/000041/pretrained_model/pytorch_model_fsdp_0"
    )
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="outside its directory"):
        ckpt.read_shard_metadata(tmp_path)


def everything(step_dir: Path) -> None:
    """All that a resume reads."""
    assert not ckpt.checkpoint_problems(step_dir, lerobot_ckpt.problems), ckpt.checkpoint_problems(
        step_dir, lerobot_ckpt.problems
    )[0]
    lerobot_ckpt.load_run_config(step_dir)
    lerobot_ckpt.load_policy_files(step_dir)
    load(step_dir, *parts(seed=1)[1:])


@pytest.mark.parametrize("run", ["single-safetensors", "fsdp2-dcp"])
def test_a_cut_or_flipped_file_is_named_whatever_file_it_is(
    every_layout: Path, tmp_path: Path, run: str, caplog
) -> None:
    step_dir = tmp_path / "000041"
    shutil.copytree(every_layout / run / "checkpoints/000041", step_dir)
    everything(step_dir)
    rng = np.random.default_rng(0)
    files = [p for p in step_dir.rglob("*") if p.is_file() and p.name != "checksums.json"]
    assert len(files) >= 12
    for file in files:
        original = file.read_bytes()
        for damage in ("cut", "empty", "gone", "flip", "flip", "flip"):
            data = bytearray(original)
            if damage == "flip":
                data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
            data = data[: {"cut": len(data) * 2 // 3, "empty": 0}.get(damage, len(data))]
            caplog.clear()
            file.unlink() if damage == "gone" else file.write_bytes(data)
            try:
                everything(step_dir)
            except (ValueError, AssertionError) as error:
                named = file.name in str(error) + caplog.text
                assert named and "Traceback" not in str(error), (file, damage, str(error))
            else:
                # A configuration, which people edit: it is mentioned.
                assert (
                    damage == "flip" and file.name in caplog.text and "config" in file.name
                ) or "processor.json" in file.name, (file, damage)
        file.write_bytes(original)
    everything(step_dir)


# -- publishing: whole or not at all


def chosen(run_dir: Path) -> str | None:
    """The checkpoint that a restart takes, after reading all of it."""
    step_dir = lerobot_ckpt.resolve_resume("auto", run_dir)
    if step_dir is not None:
        everything(step_dir)
        assert lerobot_ckpt.resolve_resume(run_dir / "checkpoints/last", None) is not None
    return None if step_dir is None else step_dir.name


OPERATIONS = {
    os: ("rename", "replace", "symlink", "mkdir", "fsync", "unlink", "rmdir"),
    ckpt: ("write_bytes", "_exchange"),
    safetensors.torch: ("save_file",),
    ckpt.dcp: ("save",),
}


def interrupt(at: int, action) -> None:
    """Instead of the operation number `at` on files, call `action`."""
    count = [0]

    def wrap(name, function):
        def operation(*args, **kwargs):
            count[0] += 1
            if at == count[0]:
                action(name, args)
            return function(*args, **kwargs) if name != "fsync" else None  # no power is cut here

        return operation

    for module, names in OPERATIONS.items():
        for name in names:
            setattr(module, name, wrap(name, getattr(module, name)))


def in_a_fork(work) -> int:
    """Exit status of `work` in a forked child, which never returns into the test."""
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            work()
        except ckpt.CheckpointError:
            code = 7
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            code = 9
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("resaved", [False, True], ids=["new step", "step saved again"])
@pytest.mark.parametrize("damage", ["killed", "disk full"])
def test_an_interrupted_save_leaves_a_whole_checkpoint_and_never_a_torn_one(
    tmp_path: Path, resaved, damage
) -> None:
    def kill(name, args) -> None:
        if name == "save_file":  # half a file
            Path(args[1]).write_bytes(b"\0" * 100)
        os.kill(os.getpid(), signal.SIGKILL)

    def full(name, args) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def again(run_dir: Path, action=None) -> int:
        def work() -> None:
            interrupt(at if action else -1, action)
            save(run_dir, step, module, optimizer, keep_last=2)

        return in_a_fork(work)

    start, at, step = tmp_path / "start", 1, 2 if resaved else 3
    _, module, optimizer = parts()
    train(module, optimizer)
    writer = save(start, 1, module, optimizer, keep_last=2)
    save(start, 2, module, optimizer, writer=writer)
    action, failed = (kill, -signal.SIGKILL) if damage == "killed" else (full, 7)
    finished = 0
    while finished < 4:  # from here on there are no more operations
        run_dir = tmp_path / f"run{at}"
        shutil.copytree(start, run_dir, symlinks=True)
        code = again(run_dir, action)
        assert code in (failed, 0)
        finished = finished + 1 if code == 0 else 0
        assert chosen(run_dir) in ("000002", f"{step:06d}") if code == failed else (f"{step:06d}",)
        assert (run_dir / "checkpoints/000002/training_state").is_dir()
        if code == failed:
            assert again(run_dir) == 0
            left = names_in(run_dir / "checkpoints")
            assert (
                left == {"000001", "000002", "last", ".run_id"}
                if resaved
                else {"000002", "000003", "last", ".run_id"}
            )
        shutil.rmtree(run_dir)
        at += 1
    assert at > 30


def test_a_write_that_really_fails_is_one_sentence_and_frees_the_disk(tmp_path: Path) -> None:
    _, module, optimizer = parts()
    train(module, optimizer)
    save(tmp_path, 1, module, optimizer)

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))
        try:
            save(tmp_path, 2, module, optimizer)
        except ckpt.CheckpointError as error:
            text = str(error)
            assert (
                "step 2 was not written" in text and "(000001) is as it was" in text and "\n" not in text
            ), text
            raise

    assert in_a_fork(work) == 7
    assert names_in(tmp_path / "checkpoints") == {"000001", "last", ".run_id"}
    assert chosen(tmp_path) == "000001"


def fail_on_rank_1(rank: int, world: int, root: Path) -> tuple[str, ...]:
    _, module, optimizer = parts("fsdp2")
    train(module, optimizer)
    writer = save(root, 1, module, optimizer, checkpoint_format="dcp", sharded=True)
    texts = []
    for where in ("write_data", "finish"):
        original = getattr(ckpt.dcp.FileSystemWriter, where)
        if rank == (1 if where == "write_data" else 0):
            setattr(
                ckpt.dcp.FileSystemWriter,
                where,
                lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left")),
            )
        try:
            save(root, 2, module, optimizer, writer=writer)
            texts.append("saved")
        except ckpt.CheckpointError as error:
            texts.append(str(error))
        setattr(ckpt.dcp.FileSystemWriter, where, original)
    save(root, 3, module, optimizer, writer=writer)
    return tuple(texts)


def test_a_failure_on_one_rank_is_the_same_sentence_on_all_and_training_goes_on(tmp_path: Path) -> None:
    first, second = run_ranks(2, fail_on_rank_1, tmp_path)
    assert first == second
    assert all("No space left" in text and "\n" not in text for text in first)
    assert names_in(tmp_path / "checkpoints") == {"000001", "000003", "last", ".run_id"}


def test_where_links_are_refused_a_text_file_points_to_the_last(tmp_path: Path, monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, "Operation not permitted")

    _, module, optimizer = parts()
    save(tmp_path, 1, module, optimizer)  # a link first
    with monkeypatch.context() as patch:
        patch.setattr(os, "symlink", refuse)
        save(tmp_path, 2, module, optimizer)
    last = tmp_path / "checkpoints/last"
    assert not last.is_symlink() and last.read_text().strip() == "000002"
    assert found(last) == tmp_path / "checkpoints/000002"
    save(tmp_path, 3, module, optimizer)
    assert os.readlink(last) == "000003"


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_every_file_of_a_checkpoint_has_the_mode_that_the_umask_gives(tmp_path: Path, umask, mode) -> None:
    _, module, optimizer = parts()
    train(module, optimizer)
    before = os.umask(umask)
    try:
        save(tmp_path, 1, module, optimizer)
        ckpt_tools.convert(tmp_path, dtype="bfloat16")
    finally:
        os.umask(before)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {p.name: oct(p.stat().st_mode & 0o777) for p in files} == {p.name: oct(mode) for p in files}
    assert {"model.safetensors", "model_float32.safetensors", ckpt.OPTIMIZER} <= {p.name for p in files}


def test_keep_last_deletes_old_checkpoints_of_this_run_and_nothing_else(tmp_path: Path, caplog) -> None:
    _, module, optimizer = parts()
    other = tmp_path / "other"
    save(other, 7, module, optimizer)
    checkpoints = tmp_path / "run/checkpoints"
    writer = save(tmp_path / "run", 1, module, optimizer, keep_last=2, best=True)
    shutil.copytree(other / "checkpoints/000007", checkpoints / "000007")  # another run's
    for name in ("000001.bak", "foo-000001", ".tmp-000009", ".tmp-notes"):
        (checkpoints / name).mkdir()
    (checkpoints / "000000").mkdir()  # torn
    for step in (2, 3, 4, 5):
        save(tmp_path / "run", step, module, optimizer, writer=writer)
    strange = {"000007", "000001.bak", "foo-000001", ".tmp-notes", "000000", ".run_id"}
    assert names_in(checkpoints) == {"000004", "000005", "last", "best", "000001"} | strange
    assert ".tmp-000009" in caplog.text and os.readlink(checkpoints / "best") == "000001"
    save(tmp_path / "run", 6, module, optimizer, keep_last=1)  # a resumed run is the same run
    assert names_in(checkpoints) == {"000006", "last", "best", "000001"} | strange


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"checkpoint_format": "dcp"}, "--checkpoint-format=dcp needs a sharded run"),
        ({"checkpoint_format": "pt"}, "--checkpoint-format=pt is unknown"),
        ({"keep_last": 0}, "--keep-last=0"),
    ],
)
def test_impossible_flags_are_refused_at_the_start(tmp_path: Path, flags: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ckpt.CheckpointWriter(tmp_path, **flags)


# -- in the background


def test_a_save_in_the_background_keeps_the_weights_of_the_call(tmp_path: Path, monkeypatch) -> None:
    policy, module, optimizer = parts()
    train(module, optimizer)
    writer = save(tmp_path, 1, module, optimizer, async_save=True)
    writer.wait()
    gate, original = os.pipe(), safetensors.torch.save_file
    monkeypatch.setattr(safetensors.torch, "save_file", lambda *a: (os.read(gate[0], 1), original(*a))[1])
    want = whole(policy, optimizer)
    save(tmp_path, 2, module, optimizer, writer=writer)
    train(module, optimizer, 3)  # the writer is still at the gate
    writer.poll()
    assert os.readlink(tmp_path / "checkpoints/last") == "000001" and writer.last_published == 1
    os.write(gate[1], b"x" * 100)
    writer.wait()
    assert os.readlink(tmp_path / "checkpoints/last") == "000002" and writer.last_published == 2
    other, module2, optimizer2 = parts(seed=1)
    load(tmp_path, module2, optimizer2)
    got = whole(other, optimizer2)
    assert all(np.array_equal(got[k], want[k]) for k in want)


def test_a_failure_in_the_background_surfaces_at_the_next_poll_once(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    _, module, optimizer = parts()
    writer = save(tmp_path, 1, module, optimizer, async_save=True)
    writer.wait()

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "save_file", fail)
        for surface in (writer.wait, writer.poll):
            save(tmp_path, 2, module, optimizer, writer=writer)
            writer._join()
            with pytest.raises(ckpt.CheckpointError, match="No space left on device"):
                surface()
            surface()
        save(tmp_path, 2, module, optimizer, writer=writer)
        writer._join()
    save(tmp_path, 3, module, optimizer, writer=writer)  # nobody polled: this one is written all the same
    writer.wait()
    assert "step 2 was not written" in caplog.text
    assert chosen(tmp_path) == "000003" and writer.last_published == 3


def background_shards(rank: int, world: int, root: Path) -> dict:
    policy, module, optimizer = parts("fsdp2")
    train(module, optimizer)
    want = whole(policy, optimizer)
    writer = save(
        root, 1, module, optimizer, async_save=True, sharded=True, checkpoint_format="safetensors_dcp"
    )
    train(module, optimizer, 5)  # collectives of the training beside those of the save
    writer.wait()
    return want


def test_shards_saved_in_the_background_beside_training_are_those_of_the_call(tmp_path: Path) -> None:
    want = run_ranks(2, background_shards, tmp_path)[0]
    policy, module, optimizer = parts(seed=1)
    load(tmp_path, module, optimizer)
    got = whole(policy, optimizer)
    assert all(np.array_equal(got[k], want[k]) for k in want)


# -- naming a checkpoint


def test_all_forms_of_naming_a_checkpoint_find_it(tmp_path: Path, monkeypatch) -> None:
    _, module, optimizer = parts()
    for step in (1, 2):
        save(tmp_path / "run", step, module, optimizer)
    newest = tmp_path / "run/checkpoints/000002"
    forms = [
        "run", "run/checkpoints", "run/checkpoints/000002", "run/checkpoints/last",
        "run/checkpoints/000002/pretrained_model", "run/checkpoints/last/pretrained_model",
        "run/checkpoints/000002/pretrained_model/train_config.json",
    ]  # fmt: skip
    monkeypatch.chdir(tmp_path)
    for form in forms:
        for slash in ("", "/"):
            for start in ("", f"{tmp_path}/"):
                assert found(start + form + slash).resolve() == newest, form
    assert found("run/checkpoints/000001").name == "000001"
    assert found("auto", "run").resolve() == newest
    assert ckpt.run_dir_of(newest) == tmp_path / "run"
    ckpt.point(newest.parent, "last", "000001")  # by hand
    assert found("run/checkpoints/last").name == "000001"


def test_auto_without_a_checkpoint_is_a_fresh_start(tmp_path: Path) -> None:
    assert lerobot_ckpt.resolve_resume("auto", None) is None
    assert lerobot_ckpt.resolve_resume("auto", tmp_path / "none") is None
    (tmp_path / "checkpoints").mkdir()
    assert lerobot_ckpt.resolve_resume("auto", tmp_path) is None


@pytest.mark.parametrize("what", ["link", "loop", "file"])
def test_checkpoints_that_are_no_directory_are_no_fresh_start(tmp_path: Path, what) -> None:
    """A disk that is not mounted: a fresh start would wipe the metrics and fail at the first save."""
    place = tmp_path / "checkpoints"
    if what == "file":
        place.write_text("")
    else:
        place.symlink_to(place if what == "loop" else "/mnt/gone")
    text = f"{place} is a file" if what == "file" else f"{place} leads to {os.readlink(place)}, which is no"
    tries: list[Any] = [
        lambda: lerobot_ckpt.resolve_resume("auto", tmp_path),
        lambda: lerobot_ckpt.resolve_resume(tmp_path, None),
        lambda: lerobot_ckpt.resolve_resume(place, None),
        lambda: ckpt.CheckpointWriter(tmp_path),
    ]
    for attempt in tries:
        with pytest.raises(ValueError, match=text) as error:
            attempt()
        assert "name another --output-dir" in str(error.value)
    assert os.path.lexists(place) and names_in(tmp_path) == {"checkpoints"}


def test_a_writer_tries_its_directory_and_leaves_no_trace(tmp_path: Path, monkeypatch) -> None:
    ckpt.CheckpointWriter(tmp_path)
    assert names_in(tmp_path) == set()
    save(tmp_path, 1, *parts()[1:])
    before = names_in(tmp_path / "checkpoints")
    ckpt.CheckpointWriter(tmp_path)
    assert names_in(tmp_path / "checkpoints") == before

    def refuse(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(
        ValueError, match=r"checkpoints cannot be written \(Read-only file system\); name another"
    ):
        ckpt.CheckpointWriter(tmp_path)


def test_a_wrong_path_lists_the_checkpoints_found(tmp_path: Path) -> None:
    _, module, optimizer = parts()
    for step in (1, 2):
        save(tmp_path, step, module, optimizer)
    for wrong in ("checkpoints/000009", "nothing/here", "checkpoints/last/training_state/training_step.json"):
        with pytest.raises(ValueError, match="is no checkpoint; give a run directory") as error:
            lerobot_ckpt.resolve_resume(tmp_path / wrong, None)
        if wrong.startswith("checkpoints/000"):
            assert "000001, 000002" in str(error.value)


def test_torn_checkpoints_are_passed_over_with_a_line_that_names_them(tmp_path: Path, caplog) -> None:
    """LeRobot writes in place: a kill leaves any prefix of its files."""
    _, module, optimizer = parts()
    for step in (1, 2):
        save(tmp_path, step, module, optimizer)
    newest = tmp_path / "checkpoints/000002"
    backup = tmp_path / "whole"
    shutil.copytree(newest, backup)
    for file in sorted(p.relative_to(backup) for p in backup.rglob("*") if p.is_file()):
        if file.name in (ckpt.CHECKSUMS, "run_config.json", "optimizer_names.json"):
            continue  # ours alone
        shutil.rmtree(newest)
        shutil.copytree(backup, newest)
        for ours in (ckpt.CHECKSUMS, "run_config.json", "optimizer_names.json"):
            (newest / "training_state" / ours).unlink()
        (newest / file).unlink()
        caplog.clear()
        assert found("auto", tmp_path).name == "000001", file
        assert f"{newest} is not whole" in caplog.text
        assert found(tmp_path / "checkpoints/last").name == "000001"
        with pytest.raises(ValueError, match="not a whole checkpoint"):
            lerobot_ckpt.resolve_resume(newest, None)


def test_a_run_that_went_back_goes_on_from_what_it_saved_last(tmp_path: Path) -> None:
    _, module, optimizer = parts()
    for step in (1, 5, 3):
        save(tmp_path, step, module, optimizer)
    assert found("auto", tmp_path).name == "000003"


# -- convert and show


def command(*args: object) -> None:
    ckpt_tools.main([str(arg) for arg in args])


def test_convert_merges_shards_and_deletes_them_after_reading_back(
    every_layout: Path, tmp_path: Path
) -> None:
    shutil.copytree(every_layout / "fsdp4-dcp", tmp_path, symlinks=True, dirs_exist_ok=True)
    model_dir = tmp_path / "checkpoints/000041/pretrained_model"
    command("convert", f"--checkpoint_dir={tmp_path}/checkpoints/last", "--delete_dcp=true")
    want = every_layout / "single-safetensors/checkpoints/000041/pretrained_model/model.safetensors"
    assert (model_dir / "model.safetensors").read_bytes() == want.read_bytes()
    assert not (model_dir / "pytorch_model_fsdp_0").exists() and not list(model_dir.glob(".*"))
    everything(model_dir.parent)
    assert json.loads((model_dir / "train_config.json").read_text())["checkpoint_format"] == "safetensors"
    command("show", "--checkpoint-dir", model_dir)


def test_convert_keeps_shards_that_the_merged_file_does_not_equal(
    every_layout: Path, tmp_path: Path, monkeypatch
) -> None:
    shutil.copytree(every_layout / "fsdp2-dcp", tmp_path, symlinks=True, dirs_exist_ok=True)
    model_dir = tmp_path / "checkpoints/000041/pretrained_model"
    original = safetensors.torch.save_file

    def bad_disk(tensors, path, metadata):
        original({k: v + 1 if k == "model.pos_enc" else v for k, v in tensors.items()}, path, metadata)

    monkeypatch.setattr(safetensors.torch, "save_file", bad_disk)
    with pytest.raises(ValueError, match=r"reads back differently.*model\.pos_enc"):
        ckpt_tools.convert(model_dir, delete_dcp=True)
    assert (model_dir / "pytorch_model_fsdp_0").is_dir() and not (model_dir / "model.safetensors").exists()


@pytest.mark.parametrize("run", ["fsdp2-dcp", "fsdp2-safetensors", "single-safetensors"])
def test_a_converted_half_precision_file_does_not_round_the_run_that_goes_on(
    every_layout: Path, tmp_path: Path, run
) -> None:
    shutil.copytree(every_layout / run, tmp_path, symlinks=True, dirs_exist_ok=True)
    ckpt_tools.convert(tmp_path, dtype="bfloat16")
    file = load_file(tmp_path / "checkpoints/000041/pretrained_model/model.safetensors")
    assert {v.dtype for v in file.values()} == {torch.bfloat16}
    full, rounded = Tiny(), Tiny()
    lerobot_ckpt.load_weights(tmp_path, full, resume=True)
    lerobot_ckpt.load_weights(tmp_path, rounded)
    want = number("model.action_head.weight", "weight", torch.Size((3, 5)))
    assert torch.equal(full.model.action_head.weight, want)
    assert torch.equal(rounded.model.action_head.weight, want.bfloat16().float())
    everything(tmp_path / "checkpoints/000041")


def test_convert_keeps_float32_weights_where_a_smaller_file_would_be_the_last(tmp_path: Path, capsys) -> None:
    """A folder without training state, as a download is; and shards that --delete-dcp takes away."""
    model_dir = shutil.copytree(SINGLE / "pretrained_model", tmp_path / "model")
    want = (model_dir / "model.safetensors").read_bytes()
    for dtype in ("bfloat16", "float16"):
        ckpt_tools.convert(model_dir, dtype=dtype)
    assert (model_dir / "model_float32.safetensors").read_bytes() == want
    assert f"{model_dir}/model_float32.safetensors keeps the weights" in capsys.readouterr().out
    half, full = (
        load_file(model_dir / "model.safetensors"),
        load_file(model_dir / "model_float32.safetensors"),
    )
    assert all(torch.equal(half[k], v.half() if v.is_floating_point() else v) for k, v in full.items())
    ckpt_tools.convert(model_dir)
    again = load_file(model_dir / "model.safetensors")
    assert all(torch.equal(again[k], v) for k, v in full.items())


def test_convert_says_what_it_leaves_and_what_is_loaded_from_here_on(
    every_layout: Path, tmp_path: Path, capsys
) -> None:
    shutil.copytree(every_layout / "fsdp2-safetensors_dcp", tmp_path, symlinks=True, dirs_exist_ok=True)
    step_dir = tmp_path / "checkpoints/000041"
    ckpt_tools.convert(tmp_path, dtype="bfloat16")
    shards = step_dir / "pretrained_model/pytorch_model_fsdp_0"
    assert (
        f"{shards} is kept, and --resume continues from it; --delete-dcp deletes it."
        in capsys.readouterr().out
    )
    assert not (step_dir / "training_state/model_float32.safetensors").exists()
    ckpt_tools.convert(tmp_path)
    ckpt_tools.convert(tmp_path, dtype="bfloat16", delete_dcp=True)
    text = capsys.readouterr().out
    assert f"{shards} deleted" in text and "model_float32.safetensors keeps the weights" in text
    resumed = Tiny()
    lerobot_ckpt.load_weights(tmp_path, resumed, resume=True)
    want = number("model.action_head.weight", "weight", torch.Size((3, 5)))
    assert torch.equal(resumed.model.action_head.weight, want)
    everything(step_dir)


def test_convert_does_not_delete_the_shards_that_alone_hold_an_adapter(tmp_path: Path) -> None:
    policy, _, optimizer = parts()
    save(tmp_path / "base", 1, policy, optimizer)
    adapter = {
        "base_model.model.model.encoder.1.lora_A.weight": torch.randn(2, 7),
        "base_model.model.model.encoder.1.lora_B.weight": torch.randn(5, 2),
    }
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "base_model_name_or_path": str(tmp_path / "base")}
    kwargs: dict[str, Any] = {"checkpoint_format": "dcp", "sharded": True}
    save(tmp_path / "lora", 1, policy, optimizer, adapter={"state_dict": adapter, "config": config}, **kwargs)
    with pytest.raises(ValueError, match="--delete-dcp would delete the only copy of the adapter"):
        ckpt_tools.convert(tmp_path / "lora", delete_dcp=True)
    ckpt_tools.convert(tmp_path / "lora")
    live = {k: torch.zeros_like(v) for k, v in adapter.items()}
    lerobot_ckpt.load_weights(tmp_path / "lora", policy, adapter=live, resume=True)
    assert all(torch.equal(live[k], adapter[k]) for k in live)


def test_convert_merges_an_adapter_into_its_base(tmp_path: Path, capsys) -> None:
    policy, _, optimizer = parts()
    save(tmp_path / "base", 1, policy, optimizer)
    base = policy.state_dict()
    a, b, head = torch.randn(2, 7), torch.randn(5, 2), torch.randn(3, 5)
    adapter = {
        "base_model.model.model.encoder.1.lora_A.weight": a,
        "base_model.model.model.encoder.1.lora_B.weight": b,
        "base_model.model.model.action_head.weight": head,
    }
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "base_model_name_or_path": str(tmp_path / "base")}
    save(tmp_path / "lora", 1, policy, optimizer, adapter={"state_dict": adapter, "config": config})
    model_dir = tmp_path / "lora/checkpoints/000001/pretrained_model"
    assert (model_dir / "adapter_config.json").exists() and not (model_dir / "model.safetensors").exists()
    assert ckpt.checkpoint_problems(model_dir.parent, lerobot_ckpt.problems) == []
    live = {k: torch.zeros_like(v) for k, v in adapter.items()}
    lerobot_ckpt.load_weights(model_dir, policy, adapter=live, resume=True)
    assert all(torch.equal(live[k], adapter[k]) for k in live)
    merged = Tiny()
    lerobot_ckpt.load_weights(model_dir, merged)
    ckpt_tools.convert(model_dir)
    said = capsys.readouterr().out
    assert "The adapter stays beside it for --resume; everything else loads model.safetensors" in said
    ckpt_tools.show(model_dir)
    said = capsys.readouterr().out
    assert f"adapter: safetensors, float32, 39 parameters, r 2, on the base {tmp_path / 'base'}" in said
    file = load_file(model_dir / "model.safetensors")
    want = base["model.encoder.1.weight"] + 3 * b @ a
    torch.testing.assert_close(file["model.encoder.1.weight"], want, rtol=1e-6, atol=1e-6)
    assert torch.equal(file["model.action_head.weight"], head)
    assert all(torch.equal(file[k], v) for k, v in merged.state_dict().items())
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(ValueError, match=r"builds on .*base, which is not there"):
        ckpt_tools.convert(model_dir)


def test_show_tells_whole_from_torn(every_layout: Path, tmp_path: Path, capsys) -> None:
    shutil.copytree(every_layout / "hsdp-dcp", tmp_path, symlinks=True, dirs_exist_ok=True)
    command("show", "--checkpoint-dir", tmp_path)
    text = capsys.readouterr().out
    assert "000041: whole" in text and "step 41, samples seen 164" in text
    assert "dp_replicate 2, dp_shard 2" in text and "pytorch_model_fsdp_0 in " in text
    numbers = sum(p.numel() for p in Tiny().parameters())
    assert f"weights: DCP shards, float32, {numbers:,} parameters\n" in text
    shard = next((tmp_path / "checkpoints/000041/pretrained_model/pytorch_model_fsdp_0").glob("*.distcp"))
    data = shard.read_bytes()
    for damaged in (data[: len(data) // 2], data[:-9] + b"\0" + data[-8:]):
        shard.write_bytes(damaged)
        with pytest.raises(SystemExit) as ended:
            command("show", "--checkpoint-dir", tmp_path / "checkpoints/000041")
        text = capsys.readouterr().out
        assert ended.value.code == 1 and "torn" in text and shard.name in text


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_ends_show_without_a_traceback(tmp_path: Path, unbuffered) -> None:
    show = subprocess.Popen(
        [sys.executable, ROOT / "ckpt.py", "show", "--checkpoint-dir", SINGLE],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )  # fmt: skip
    assert show.stdout is not None and show.stderr is not None
    show.stdout.close()  # `| head` that has seen enough
    assert show.stderr.read() == "" and show.wait(120) == 141


def test_a_command_on_a_wrong_path_ends_with_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "ckpt.py", "convert", "--checkpoint-dir", tmp_path / "none"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "is no checkpoint" in done.stderr


def test_an_upload_that_fails_says_how_to_repeat_it(tmp_path: Path, monkeypatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    save(tmp_path, 1, *parts()[1:])
    calls = []

    class Api:
        def create_repo(self, repo_id, **kwargs):
            return f"https://hub/{repo_id}"

        def upload_folder(self, folder_path, ignore_patterns, **kwargs):
            calls.append(names_in(Path(folder_path)))
            raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    with pytest.raises(ValueError, match=r"no network.*--push-to-hub me/act"):
        hub.upload_policy(tmp_path / "checkpoints/last", "me/act", {"success rate": 0.9})
    assert {"README.md", "config.json", "model.safetensors", "train_config.json"} <= calls[0]
    card = (tmp_path / "checkpoints/000001/pretrained_model/README.md").read_text()
    assert card.startswith("---\n") and "| success rate | 0.9 |" in card
    assert found("auto", tmp_path).name == "000001"


def test_dcps_exception_is_caught_though_it_is_no_exception() -> None:
    assert not issubclass(CheckpointException, Exception)
    text = ckpt._sentence(CheckpointException("x", {0: (OSError(28, "No space left"), StackSummary())}))
    assert text == "[Errno 28] No space left"


# -- any module, any optimizer, this file alone


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5), nn.Linear(5, 1))


def mlp_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class CountedSGD(torch.optim.Optimizer):
    """State of every kind: a plain number, an integer tensor, a tensor of a shape of its own, one of halves."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    counts, kept = (
                        torch.zeros(2, dtype=torch.int64),
                        torch.zeros_like(p, dtype=torch.bfloat16),
                    )
                    self.state[p] = {"step": 0, "counts": counts, "kept": kept, "unset": None}
                state = self.state[p]
                state["step"] += 1
                state["counts"] += 2
                state["kept"] += p.grad.bfloat16()
                p -= group["lr"] / (state["step"] + state["counts"].sum()) * state["kept"].float()


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True, foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "of one's own": CountedSGD,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_takes_the_steps_of_the_uninterrupted_run(tmp_path: Path, name: str) -> None:
    model = mlp()
    optimizer = OPTIMIZERS[name](model.parameters())
    mlp_steps(model, optimizer, range(3))
    ckpt.CheckpointWriter(tmp_path).save(3, model, optimizer, state={"best": [0.5, 2]})
    mlp_steps(model, optimizer, range(3, 6))
    again = mlp()
    optimizer2 = OPTIMIZERS[name](again.parameters())
    for group in optimizer2.param_groups:
        group["lr"] = group["lr"] * 3
    step_dir = ckpt.resolve_resume("auto", tmp_path)
    assert step_dir is not None
    ckpt.load_weights(step_dir, again, resume=True)
    progress = ckpt.load_training_state(step_dir, again, optimizer2)
    assert (progress["step"], progress["best"]) == (3, [0.5, 2])
    mlp_steps(again, optimizer2, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    for p, q in zip(model.parameters(), again.parameters()):
        first, second = optimizer.state[p], optimizer2.state[q]
        assert first.keys() == second.keys()
        assert all(type(first[k]) is type(second[k]) for k in first)
        assert all(first[k].dtype == second[k].dtype for k in first if isinstance(first[k], torch.Tensor))


def test_state_of_another_class_of_optimizer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mlp_steps(model, sgd, range(1))
    ckpt.CheckpointWriter(tmp_path).save(1, model, sgd)
    with pytest.raises(ckpt.UserError, match=r"is the state of SGD, not of AdamW; use that\."):
        ckpt.load_training_state(tmp_path / "checkpoints/last", model, torch.optim.AdamW(model.parameters()))
    other = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(ckpt.UserError, match="SGD holds parameters that are not the model's"):
        ckpt.CheckpointWriter(tmp_path).save(2, model, other)


def test_a_tensor_that_an_optimizers_record_names_is_missed(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.Adafactor(model.parameters())
    mlp_steps(model, optimizer, range(1))
    ckpt.CheckpointWriter(tmp_path).save(1, model, optimizer)
    file = tmp_path / "checkpoints/000001/training_state/optimizer_state.safetensors"
    tensors = load_file(file)
    assert {"state/0/row_var", "state/0/col_var", "state/1/variance"} <= tensors.keys()
    tensors["state/1/row_var"] = tensors.pop("state/0/row_var")
    save_file(tensors, file)
    (file.parent / "checksums.json").unlink()
    with pytest.raises(ckpt.UserError) as error:
        ckpt.load_training_state(tmp_path / "checkpoints/last", model, optimizer)
    assert "missing row_var of 0.weight; unexpected row_var of 0.bias" in str(error.value)


FORK = """
import os, signal, sys, torch, ckpt

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def step(model, optimizer, number):
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(number))
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def resume(model, optimizer):
    step_dir = ckpt.resolve_resume("auto", "run")
    if step_dir is None:
        return 0
    ckpt.load_weights(step_dir, model, resume=True)
    return ckpt.load_training_state(step_dir, model, optimizer)["step"]

def show(model):
    print(*(value.item().hex() for p in model.parameters() for value in p.double().flatten()))
"""

KILLED = """
die_at, renames = int(sys.argv[1]), 0
model, optimizer = build()
done = resume(model, optimizer)
real = os.rename
def rename(*paths):
    global renames
    renames += 1
    if renames == die_at:
        os.kill(os.getpid(), signal.SIGKILL)  # in the middle of a save: all is written, nothing published
    real(*paths)
os.rename = rename
writer = ckpt.CheckpointWriter("run", keep_last=2)
for number in range(done + 1, 11):
    step(model, optimizer, number)
    writer.save(number, model, optimizer)
print(done)
show(model)
"""

SHARDED_FORK = """
import torch.distributed as c10d
from torch.distributed.fsdp import fully_shard
c10d.init_process_group("gloo")
model, _ = build()
fully_shard(model[0], mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
writer = ckpt.CheckpointWriter("run", checkpoint_format=sys.argv[1], async_save=True, sharded=True)
for number in range(1, 6):
    step(model, optimizer, number)
writer.save(5, model, optimizer)
writer.wait()
c10d.destroy_process_group()
"""


def forked(folder: Path, script: str, *command: str) -> subprocess.CompletedProcess:
    """Run a script in a folder that holds ckpt.py and nothing else of the project."""
    shutil.copy(ROOT / "ckpt.py", folder)
    (folder / "go.py").write_text(FORK + script)
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=clean, capture_output=True, text=True, timeout=120
    )


def test_a_fork_with_this_file_alone_survives_a_kill_in_the_middle_of_a_save(tmp_path: Path) -> None:
    for run in "ab":
        (tmp_path / run).mkdir()
    whole_run = forked(tmp_path / "a", KILLED, "go.py", "0")
    assert whole_run.returncode == 0, whole_run.stderr
    killed = forked(tmp_path / "b", KILLED, "go.py", "9")
    assert killed.returncode == -signal.SIGKILL
    assert any(name.startswith(".tmp-") for name in names_in(tmp_path / "b/run/checkpoints"))
    resumed = forked(tmp_path / "b", KILLED, "go.py", "0")
    assert resumed.returncode == 0, resumed.stderr
    done, weights = resumed.stdout.splitlines()
    assert 0 < int(done) < 10 and weights == whole_run.stdout.splitlines()[1]
    assert names_in(tmp_path / "b/run/checkpoints") == {"000009", "000010", "last", ".run_id"}
    files = {p.name for p in (tmp_path / "b/run/checkpoints/000010").rglob("*") if p.is_file()}
    assert files == {
        "model.safetensors", "training_step.json", "checksums.json", "optimizer_names.json",
        "optimizer_param_groups.json", "optimizer_state.safetensors",
    }  # fmt: skip


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_a_fork_resumes_the_shards_of_two_ranks_in_one_process(tmp_path: Path, form: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    sharded = forked(tmp_path, SHARDED_FORK, *torchrun, "go.py", form)
    assert sharded.returncode == 0, sharded.stderr
    alone = """
model, optimizer = build()
assert resume(model, optimizer) == 5
step(model, optimizer, 6)
again, optimizer = build()
for number in range(1, 7):
    step(again, optimizer, number)
for p, q in zip(model.parameters(), again.parameters()):
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
"""
    done = forked(tmp_path, alone, "go.py")
    assert done.returncode == 0, done.stderr


def test_the_example_of_the_docstring_runs_and_resumes(tmp_path: Path) -> None:
    assert ckpt.__doc__ is not None
    example = ckpt.__doc__.partition("when it is started again:\n")[2].partition("\nSaving communicates")[0]
    script = f"{textwrap.dedent(example)}\nprint(done)\nshow(model)\n"
    first, second = (forked(tmp_path, script, "go.py") for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[0] == "0" and second.stdout.splitlines()[0] == "300"
    assert first.stdout.splitlines()[1] == second.stdout.splitlines()[1]


# -- published = whole; bugs are bugs


@pytest.mark.parametrize("run", ["single-safetensors", "fsdp2-safetensors_dcp"])
def test_a_file_of_the_record_that_is_gone_or_cut_is_named_with_its_bytes(
    every_layout: Path, tmp_path: Path, run: str
) -> None:
    step_dir = tmp_path / "checkpoints/000041"
    shutil.copytree(every_layout / run / "checkpoints/000041", step_dir)
    record = json.loads((step_dir / "training_state/checksums.json").read_text())
    files = {p.relative_to(step_dir).as_posix() for p in step_dir.rglob("*") if p.is_file()}
    assert files - {"training_state/checksums.json"} == record.keys()
    assert ckpt.checkpoint_problems(step_dir) == []
    for name, (size, _) in record.items():
        file, content = step_dir / name, (step_dir / name).read_bytes()
        assert size == len(content)
        file.unlink()
        (problem,) = ckpt.checkpoint_problems(step_dir)
        assert str(file) in problem
        file.write_bytes(content[: size // 2])
        (problem,) = ckpt.checkpoint_problems(step_dir)
        assert str(file) in problem
        if name != "training_state/training_step.json":  # read before the record
            assert f"{size // 2} of {size} bytes" in problem
        assert ckpt.resolve_resume("auto", tmp_path) is None
        with pytest.raises(ckpt.UserError, match="is not a whole checkpoint"):
            ckpt.resolve_resume(step_dir, None)
        file.write_bytes(content)
    everything(step_dir)


def test_a_configuration_that_was_edited_is_whole_and_mentioned(tmp_path: Path, caplog) -> None:
    save(tmp_path, 1, *parts()[1:])
    file = tmp_path / "checkpoints/000001/training_state/run_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"steps": 123_456}))
    assert found("auto", tmp_path).name == "000001"
    assert lerobot_ckpt.load_run_config(tmp_path)["steps"] == 123_456
    assert f"{file} was changed after it was saved" in caplog.text


def test_a_checkpoint_that_was_not_written_here_needs_a_judge(tmp_path: Path) -> None:
    shutil.copytree(SINGLE, tmp_path / "checkpoints/000010")
    assert ckpt.resolve_resume("auto", tmp_path) is None
    assert ckpt.resolve_resume("auto", tmp_path, lerobot_ckpt.problems) == tmp_path / "checkpoints/000010"


@pytest.mark.parametrize("async_save", [False, True])
def test_a_bug_in_saving_keeps_its_class_and_is_no_failed_save(
    tmp_path: Path, monkeypatch, async_save: bool
) -> None:
    def bug(*args):
        raise AttributeError("a slip")

    writer = ckpt.CheckpointWriter(tmp_path, async_save=async_save)
    model = mlp()
    with monkeypatch.context() as patch:
        patch.setattr(ckpt, "save_tensors", bug)
        with pytest.raises(AttributeError, match="a slip"):
            writer.save(1, model, torch.optim.SGD(model.parameters()))
            writer.wait()


@pytest.mark.parametrize("error", [AttributeError, KeyError, TypeError, NameError, AssertionError])
def test_a_bug_in_loading_keeps_its_class(every_layout: Path, monkeypatch, error: type[Exception]) -> None:
    def bug(*args, **kwargs):
        raise error("a slip")

    for name, run in (
        ("copy_part", "single-safetensors"),
        ("_read_into", "fsdp2-dcp"),
        ("entries", "fsdp2-dcp"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(ckpt, name, bug)
            with pytest.raises(error, match="a slip"):
                load(every_layout / run, *parts(seed=1)[1:])


def test_a_bug_on_one_rank_ends_the_others_too(tmp_path: Path) -> None:
    first, second = run_ranks(2, bug_on_rank_1, tmp_path)
    assert second == ("KeyError", "'A_SLIP'")
    assert first == ("RuntimeError", "rank 1: KeyError: 'A_SLIP'")


def bug_on_rank_1(rank: int, world: int, root: Path) -> tuple[str, str]:
    setattr(ckpt, "_write_shards", lambda *args: os.environ["A_SLIP"] if rank == 1 else None)  # noqa: B010
    _, module, optimizer = parts("fsdp2")
    writer = ckpt.CheckpointWriter(root, sharded=True)
    try:
        writer.save(1, module, optimizer)
    except Exception as error:
        return type(error).__name__, str(error)
    return "saved", ""


def mark_on_two_ranks(rank: int, world: int, root: Path) -> list[bool]:
    _, module, optimizer = parts("fsdp2")
    writer = save(root, 1, module, optimizer, async_save=True, sharded=True)
    return [writer.mark_best(step) for step in (1, 2)]


def test_best_moves_to_a_step_that_is_on_disk_and_is_left_where_it_leads_there(tmp_path: Path) -> None:
    assert run_ranks(2, mark_on_two_ranks, tmp_path) == [[True, False]] * 2  # it waits for the save
    best = tmp_path / "checkpoints/best"
    assert os.readlink(best) == "000001"
    before = best.lstat().st_ino
    writer = ckpt.CheckpointWriter(tmp_path)  # of a run that was resumed
    assert writer.mark_best(1) and not writer.mark_best(2)
    assert os.readlink(best) == "000001" and best.lstat().st_ino == before
    _, module, optimizer = parts()
    save(tmp_path, 2, module, optimizer, writer=writer)
    assert writer.mark_best(2) and os.readlink(best) == "000002"
