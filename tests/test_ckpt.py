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
import zlib
from pathlib import Path
from traceback import StackSummary
from typing import Any

import numpy as np
import pytest
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


def parts(layout: str = "single", seed: int = 0, schedule: bool = False) -> tuple:
    torch.manual_seed(seed)
    policy = Tiny()
    module = spread(policy, layout)
    optimizer = torch.optim.AdamW(policy.groups(), betas=(0.8, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s)) if schedule else None
    return policy, module, optimizer, scheduler


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, scheduler=None) -> None:
    for i in range(steps):
        module(torch.arange(6.0).reshape(2, 3) + i).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()


def number(name: str, kind: str, shape: torch.Size) -> torch.Tensor:
    """The value that every layout stores for a tensor of this name."""
    seed = torch.Generator().manual_seed(zlib.crc32(f"{name}/{kind}".encode()))
    return torch.rand(shape, generator=seed)


def fill(policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = {id(p): n for n, p in policy.named_parameters()}
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            ckpt._copy_part(weight, number(name, "weight", weight.shape).__getitem__)
        for p, state in optimizer.state.items():
            for kind in ("exp_avg", "exp_avg_sq"):
                ckpt._copy_part(state[kind], number(names[id(p)], kind, p.shape).__getitem__)
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
    run_dir: Path, step: int, module: nn.Module, optimizer, writer=None, **kwargs
) -> ckpt.CheckpointWriter:
    options = {
        k: kwargs.pop(k) for k in ("checkpoint_format", "keep_last", "async_save", "sharded") if k in kwargs
    }
    writer = writer or ckpt.CheckpointWriter(run_dir, **options)
    settings = {"state": {"samples_seen": step * 4, "seed": 7}, "policy_config": CONFIG, "run_config": RUN}
    writer.save(step, policy=module, optimizer=optimizer, stats=stats(), **(settings | kwargs))
    return writer


def load(step_dir: Path, module: nn.Module, optimizer, scheduler=None) -> dict:
    ckpt.load_weights(step_dir, module, resume=True)
    return ckpt.load_training_state(step_dir, module, optimizer, scheduler)


def found(path: str | Path, output_dir: str | Path | None = None) -> Path:
    step_dir = ckpt.resolve_resume(path, output_dir)
    assert step_dir is not None
    return step_dir


def names_in(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


# -- every layout to every layout


def save_all_formats(rank: int, world: int, layout: str, root: Path) -> None:
    sharded = layout not in ("single", "ddp")
    for form in ("safetensors", "dcp", "safetensors_dcp") if sharded else ("safetensors",):
        policy, module, optimizer, _ = parts(layout)
        train(module, optimizer)
        fill(policy, optimizer)
        random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
        np.random.standard_normal(), random.gauss(0, 1)  # half a pair is left in each
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
        policy, module, optimizer, _ = parts(layout, seed=3)
        state = load(found(run_dir), module, optimizer)
        draws = random.gauss(0, 1), np.random.standard_normal(), torch.rand(()).item()
        settings = [{k: g[k] for k in ckpt.GROUP_SETTINGS if k in g} for g in optimizer.param_groups]
        loaded[run_dir.name] = whole(policy, optimizer), state["samples_seen"], settings, draws
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
    policy, module, optimizer, _ = parts()
    train(module, optimizer)
    fill(policy, optimizer)
    want = whole(policy, optimizer)
    ranks = loaded(layout)
    assert len(ranks[0]) == 2 + 3 * 3
    for source in ranks[0]:
        got, samples_seen, settings, _ = ranks[0][source]
        assert got.keys() == want.keys(), source
        assert all(np.array_equal(got[k], want[k]) for k in want), source
        assert samples_seen == 164
        same = {"eps": 1e-8, "amsgrad": False, "maximize": False}
        assert settings[0] == same | {"lr": 3e-4, "betas": (0.8, 0.95), "weight_decay": 0.01}
        assert (settings[1]["lr"], settings[1]["weight_decay"]) == (2e-5, 0.0)


def test_each_rank_goes_on_with_its_own_random_numbers(loaded: Any) -> None:
    ranks = loaded("hsdp")
    for rank in range(4):
        random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
        np.random.standard_normal(), random.gauss(0, 1)
        want = random.gauss(0, 1), np.random.standard_normal(), torch.rand(()).item()
        assert ranks[rank]["fsdp4-dcp"][3] == want


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
    policy, module, optimizer, _ = parts("ddp")
    train(module, optimizer)
    fill(policy, optimizer)
    policy.model.encoder.compile()
    compiled: Any = torch.compile(module)
    save(root / "ddp", 1, compiled, optimizer)


def test_compiled_and_wrapped_policies_save_plain_keys(tmp_path: Path) -> None:
    run_ranks(2, compiled_and_wrapped, tmp_path)
    policy, _, optimizer, _ = parts()
    train(policy, optimizer)
    policy.model.encoder = torch.compile(policy.model.encoder)
    compiled: Any = torch.compile(policy)
    save(tmp_path / "single", 1, compiled, optimizer)
    for run in ("ddp", "single"):
        file = load_file(tmp_path / run / "checkpoints/last/pretrained_model/model.safetensors")
        assert file.keys() == Tiny().state_dict().keys()


# -- exactness


def test_a_resumed_run_takes_the_very_steps_of_the_uninterrupted_one(tmp_path: Path) -> None:
    policy, module, optimizer, scheduler = parts(schedule=True)
    train(module, optimizer, 3, scheduler)
    run_config = {**RUN, "scheduler": {"name": "cosine", "warmup_steps": 2}}
    save(tmp_path, 3, module, optimizer, scheduler=scheduler, run_config=run_config)
    train(module, optimizer, 2, scheduler)
    again, module2, optimizer2, scheduler2 = parts(seed=9, schedule=True)
    for group in optimizer2.param_groups:  # all of it comes from the file
        group |= {"lr": 1.0, "initial_lr": 1.0, "weight_decay": 0.5, "betas": (0.1, 0.1)}
    load(found(tmp_path), module2, optimizer2, scheduler2)
    train(module2, optimizer2, 2, scheduler2)
    want, got = whole(policy, optimizer), whole(again, optimizer2)
    assert all(np.array_equal(want[k], got[k]) for k in want)
    assert optimizer.param_groups[1]["lr"] == optimizer2.param_groups[1]["lr"] < 2e-5
    assert optimizer2.param_groups[0]["initial_lr"] == 3e-4


def test_nothing_is_stepped_by_preparing_to_load(tmp_path: Path) -> None:
    save(tmp_path, 0, *parts()[1:3])
    _, module, optimizer, _ = parts(seed=1)
    load(found(tmp_path), module, optimizer)
    assert not optimizer.state
    policy, module2, optimizer2, _ = parts()
    train(module, optimizer)
    train(module2, optimizer2)
    assert torch.equal(module.model.action_head.weight, policy.model.action_head.weight)


def test_fused_and_plain_adamw_continue_each_other(tmp_path: Path) -> None:
    for fused in (True, False):
        policy, module, _, _ = parts()
        optimizer = torch.optim.AdamW(policy.groups(), fused=fused)
        train(module, optimizer, 2)
        save(tmp_path / str(fused), 2, module, optimizer)
        other, module2, _, _ = parts(seed=5)
        optimizer2 = torch.optim.AdamW(other.groups(), fused=not fused)
        load(found(tmp_path / str(fused)), module2, optimizer2)
        assert optimizer2.param_groups[0]["fused"] is (not fused)
        assert optimizer2.state[other.model.action_head.weight]["step"] == 2
        train(module2, optimizer2)
        train(module, optimizer)
        torch.testing.assert_close(policy.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-7)


def test_a_layer_frozen_or_freed_between_runs_loses_only_its_own_moments(tmp_path: Path, caplog) -> None:
    policy, module, optimizer, _ = parts()
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
    ckpt.load_weights(tmp_path, other)
    assert other.model.unused.weight is other.model.frozen.weight
    assert torch.equal(other.model.backbone.weight, plain)
    assert other.model.backbone.weight.is_contiguous(memory_format=torch.channels_last)


def test_half_precision_policies_are_stored_in_float32(tmp_path: Path) -> None:
    policy, _, optimizer, _ = parts()
    save(tmp_path, 1, policy.bfloat16(), optimizer)
    file = load_file(tmp_path / "checkpoints/000001/pretrained_model/model.safetensors")
    assert {v.dtype for v in file.values()} == {torch.float32}
    other = Tiny().bfloat16()
    ckpt.load_weights(tmp_path, other)
    assert torch.equal(other.model.action_head.weight, policy.model.action_head.weight)


# -- LeRobot's checkpoints


def act(step_dir: Path) -> tuple[ACTPolicy, torch.optim.AdamW]:
    config, stats = ckpt.load_policy_files(step_dir)
    policy = ACTPolicy.from_config_dict(config, stats)
    return policy, torch.optim.AdamW(policy.optim_groups(1.0, 1.0, 0.5))


@pytest.mark.parametrize("step_dir", [SINGLE, SHARDED], ids=["safetensors", "dcp"])
def test_lerobots_checkpoints_load_and_are_written_back_with_its_keys_and_types(
    step_dir: Path, tmp_path: Path
) -> None:
    assert ckpt.checkpoint_problems(step_dir) == []
    policy, optimizer = act(step_dir)
    state = load(step_dir, policy, optimizer)
    assert (state["step"], state["samples_seen"]) == (10, 80 if step_dir is SHARDED else 40)
    assert len(optimizer.state) == sum(1 for _ in policy.parameters())
    assert optimizer.param_groups[0]["lr"] == 1e-5 and optimizer.param_groups[1]["weight_decay"] == 1e-4
    config = json.loads((step_dir / "pretrained_model/config.json").read_text())
    run_config = ckpt.load_run_config(step_dir)
    writer = ckpt.CheckpointWriter(tmp_path)
    writer.save(
        10, policy=policy, optimizer=optimizer, state=state, policy_config=policy.config_dict("cpu"),
        run_config=run_config, stats=policy.stats,
    )  # fmt: skip
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
    policy, module, optimizer, _ = parts()
    train(module, optimizer)
    save(tmp_path, 1, module, optimizer)
    training = tmp_path / "checkpoints/000001/training_state"
    order = [n for n, p in policy.named_parameters() if p.requires_grad]
    old = json.loads((training / "optimizer_names.json").read_text())["groups"]
    index = {name: i for i, name in enumerate(old[0] + old[1])}
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
    other, module2, optimizer2, _ = parts(seed=2)
    load(tmp_path, module2, optimizer2)
    want, got = whole(policy, optimizer), whole(other, optimizer2)
    assert want.keys() == got.keys() and all(np.array_equal(want[k], got[k]) for k in want)
    assert [g["initial_lr"] for g in optimizer2.param_groups] == [0.25, 0.25]


def test_the_configuration_of_lerobots_run_is_read_under_our_names() -> None:
    run = ckpt.load_run_config(SHARDED / "pretrained_model/train_config.json")
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
    theirs = ckpt.lerobot_train_config(RUN | changes, CONFIG, {"dp_replicate": 1, "dp_shard": shard})
    back = ckpt.run_config_from_lerobot(json.loads(json.dumps(theirs)))
    for key, value in changes.items():
        got = {k: back[key][k] for k in value} if isinstance(value, dict) else back[key]
        assert got == value


# -- statistics


def test_statistics_come_back_under_names_with_dots_and_underscores(tmp_path: Path) -> None:
    save(tmp_path, 1, *parts()[1:3])
    config, got = ckpt.load_policy_files(tmp_path / "checkpoints/000001/pretrained_model")
    assert config == CONFIG and got.keys() == stats().keys()
    for key, values in stats().items():
        assert all(torch.equal(got[key][s], values[s]) for s in values)


def test_a_lost_or_renamed_statistic_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1, *parts()[1:3])
    file = tmp_path / "checkpoints/000001/pretrained_model" / ckpt.NORMALIZER
    tensors = load_file(file)
    tensors["observation.images.top.1.left.std"] = tensors.pop("observation.images.top_1.left.std")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"observation\.images\.top_1\.left\.std"):
        ckpt.load_policy_files(tmp_path)


def test_old_lerobot_files_keep_their_statistics_in_the_weights(tmp_path: Path) -> None:
    save(tmp_path, 1, *parts()[1:3])
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
    _, got = ckpt.load_policy_files(model_dir)
    assert all(torch.equal(got[k][s], v) for k, values in stats().items() for s, v in values.items())
    ckpt.load_weights(model_dir, Tiny())  # they are not "unexpected"
    tensors["normalize_inputs.buffer_observation_force.mean"] = torch.zeros(1)
    save_file(tensors, model_dir / "model.safetensors")
    with pytest.raises(ValueError, match="buffer_observation_force"):
        ckpt.load_policy_files(model_dir)


# -- strictness, corruption, pickles


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_missing_unexpected_and_misshapen_tensors_are_named(every_layout: Path, form: str) -> None:
    source = every_layout / f"fsdp2-{form}"
    policy = Tiny()
    policy.model.extra = nn.Linear(1, 1)
    del policy.model.unused
    policy.model.action_head = nn.Linear(5, 4)
    with pytest.raises(ValueError) as error:
        ckpt.load_weights(source, policy, resume=True)
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
        ckpt.load_training_state(source, policy, optimizer)
    assert "unexpected model.backbone.weight" in str(error.value)
    assert "exp_avg of model.action_head.weight has shape (3, 5), not (4, 5)" in str(error.value)


def test_a_policy_of_other_dimensions_is_told_the_flags_not_the_tensors() -> None:
    config, stats = ckpt.load_policy_files(SINGLE)
    for changes in ({"dim_model": 2 * config["dim_model"]}, {"n_encoder_layers": 3, "use_vae": False}):
        policy = ACTPolicy.from_config_dict(config | changes, stats)
        with pytest.raises(ValueError) as error:
            ckpt.load_weights(SINGLE, policy)
        parts = [
            f"--policy.{key.replace('_', '-')}={value}, but the policy in {SINGLE} has {config[key]}"
            for key, value in changes.items()
        ]
        flags = "the flag" if len(parts) == 1 else "these flags"
        assert set(str(error.value).partition("; leave ")[0].split("; ")) == set(parts)
        assert str(error.value).endswith(f"; leave {flags} out.")


def test_a_moment_that_was_taken_out_is_missed(tmp_path: Path) -> None:
    _, module, optimizer, _ = parts()
    train(module, optimizer)
    save(tmp_path, 1, module, optimizer)
    file = tmp_path / "checkpoints/000001/training_state/optimizer_state.safetensors"
    tensors = load_file(file)
    for key in [k for k in tensors if k.startswith("state/0/")]:
        del tensors[key]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"missing exp_avg of model\.encoder\.0\.weight"):
        load(tmp_path, *parts(seed=1)[1:3])


def test_tensors_are_read_to_the_host_never_to_a_bare_cuda(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path, 1, *parts()[1:3])
    devices = []

    def spy(*args, **kwargs):
        devices.append(kwargs["device"])
        return original(*args, **kwargs)

    original = ckpt.safe_open
    monkeypatch.setattr(ckpt, "safe_open", spy)
    load(tmp_path, *parts()[1:3])
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
        load(tmp_path / "checkpoints/000041", *parts()[1:3])
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
    assert not ckpt.checkpoint_problems(step_dir), ckpt.checkpoint_problems(step_dir)[0]
    ckpt.load_run_config(step_dir)
    ckpt.load_policy_files(step_dir)
    load(step_dir, *parts(seed=1)[1:3])


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
    step_dir = ckpt.resolve_resume("auto", run_dir)
    if step_dir is not None:
        everything(step_dir)
        assert ckpt.resolve_resume(run_dir / "checkpoints/last", None) is not None
    return None if step_dir is None else step_dir.name


OPERATIONS = {
    os: ("rename", "replace", "symlink", "mkdir", "fsync", "unlink", "rmdir"),
    ckpt: ("save_file", "_write_bytes", "_exchange"),
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
    _, module, optimizer, _ = parts()
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
    _, module, optimizer, _ = parts()
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
    _, module, optimizer, _ = parts("fsdp2")
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

    _, module, optimizer, _ = parts()
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
    _, module, optimizer, _ = parts()
    train(module, optimizer)
    before = os.umask(umask)
    try:
        save(tmp_path, 1, module, optimizer)
        ckpt.convert(tmp_path, dtype="bfloat16")
    finally:
        os.umask(before)
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {p.name: oct(p.stat().st_mode & 0o777) for p in files} == {p.name: oct(mode) for p in files}
    assert {"model.safetensors", "model_float32.safetensors", ckpt.OPTIMIZER} <= {p.name for p in files}


def test_keep_last_deletes_old_checkpoints_of_this_run_and_nothing_else(tmp_path: Path, caplog) -> None:
    _, module, optimizer, _ = parts()
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
    policy, module, optimizer, _ = parts()
    train(module, optimizer)
    writer = save(tmp_path, 1, module, optimizer, async_save=True)
    writer.wait()
    gate, original = os.pipe(), ckpt.save_file
    monkeypatch.setattr(ckpt, "save_file", lambda *a: (os.read(gate[0], 1), original(*a))[1])
    want = whole(policy, optimizer)
    save(tmp_path, 2, module, optimizer, writer=writer)
    train(module, optimizer, 3)  # the writer is still at the gate
    writer.poll()
    assert os.readlink(tmp_path / "checkpoints/last") == "000001" and writer.last_published == 1
    os.write(gate[1], b"x" * 100)
    writer.wait()
    assert os.readlink(tmp_path / "checkpoints/last") == "000002" and writer.last_published == 2
    other, module2, optimizer2, _ = parts(seed=1)
    load(tmp_path, module2, optimizer2)
    got = whole(other, optimizer2)
    assert all(np.array_equal(got[k], want[k]) for k in want)


def test_a_failure_in_the_background_surfaces_at_the_next_poll_once(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    _, module, optimizer, _ = parts()
    writer = save(tmp_path, 1, module, optimizer, async_save=True)
    writer.wait()

    def fail(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ckpt, "save_file", fail)
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
    policy, module, optimizer, _ = parts("fsdp2")
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
    policy, module, optimizer, _ = parts(seed=1)
    load(tmp_path, module, optimizer)
    got = whole(policy, optimizer)
    assert all(np.array_equal(got[k], want[k]) for k in want)


# -- naming a checkpoint


def test_all_forms_of_naming_a_checkpoint_find_it(tmp_path: Path, monkeypatch) -> None:
    _, module, optimizer, _ = parts()
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
    assert ckpt.resolve_resume("auto", None) is None
    assert ckpt.resolve_resume("auto", tmp_path / "none") is None
    (tmp_path / "checkpoints").mkdir()
    assert ckpt.resolve_resume("auto", tmp_path) is None


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
        lambda: ckpt.resolve_resume("auto", tmp_path),
        lambda: ckpt.resolve_resume(tmp_path, None),
        lambda: ckpt.resolve_resume(place, None),
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
    save(tmp_path, 1, *parts()[1:3])
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
    _, module, optimizer, _ = parts()
    for step in (1, 2):
        save(tmp_path, step, module, optimizer)
    for wrong in ("checkpoints/000009", "nothing/here", "checkpoints/last/training_state/training_step.json"):
        with pytest.raises(ValueError, match="is no checkpoint; give a run directory") as error:
            ckpt.resolve_resume(tmp_path / wrong, None)
        if wrong.startswith("checkpoints/000"):
            assert "000001, 000002" in str(error.value)


def test_torn_checkpoints_are_passed_over_with_a_line_that_names_them(tmp_path: Path, caplog) -> None:
    """LeRobot writes in place: a kill leaves any prefix of its files."""
    _, module, optimizer, _ = parts()
    for step in (1, 2):
        save(tmp_path, step, module, optimizer)
    newest = tmp_path / "checkpoints/000002"
    backup = tmp_path / "whole"
    shutil.copytree(newest, backup)
    for file in sorted(p.relative_to(backup) for p in backup.rglob("*") if p.is_file()):
        if file.name in (
            ckpt.CHECKSUMS,
            "run_config.json",
            "optimizer_names.json",
            "rng_state_ranks.safetensors",
        ):
            continue  # ours alone
        shutil.rmtree(newest)
        shutil.copytree(backup, newest)
        for ours in (
            ckpt.CHECKSUMS,
            "run_config.json",
            "optimizer_names.json",
            "rng_state_ranks.safetensors",
        ):
            (newest / "training_state" / ours).unlink()
        (newest / file).unlink()
        caplog.clear()
        assert found("auto", tmp_path).name == "000001", file
        assert f"{newest} is not whole" in caplog.text
        assert found(tmp_path / "checkpoints/last").name == "000001"
        with pytest.raises(ValueError, match="not a whole checkpoint"):
            ckpt.resolve_resume(newest, None)


def test_a_run_that_went_back_goes_on_from_what_it_saved_last(tmp_path: Path) -> None:
    _, module, optimizer, _ = parts()
    for step in (1, 5, 3):
        save(tmp_path, step, module, optimizer)
    assert found("auto", tmp_path).name == "000003"


# -- convert and show


def command(*args: object) -> None:
    ckpt.main([str(arg) for arg in args])


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
    original = ckpt.save_file

    def bad_disk(tensors, path, metadata):
        original({k: v + 1 if k == "model.pos_enc" else v for k, v in tensors.items()}, path, metadata)

    monkeypatch.setattr(ckpt, "save_file", bad_disk)
    with pytest.raises(ValueError, match=r"reads back differently.*model\.pos_enc"):
        ckpt.convert(model_dir, delete_dcp=True)
    assert (model_dir / "pytorch_model_fsdp_0").is_dir() and not (model_dir / "model.safetensors").exists()


@pytest.mark.parametrize("run", ["fsdp2-dcp", "fsdp2-safetensors", "single-safetensors"])
def test_a_converted_half_precision_file_does_not_round_the_run_that_goes_on(
    every_layout: Path, tmp_path: Path, run
) -> None:
    shutil.copytree(every_layout / run, tmp_path, symlinks=True, dirs_exist_ok=True)
    ckpt.convert(tmp_path, dtype="bfloat16")
    file = load_file(tmp_path / "checkpoints/000041/pretrained_model/model.safetensors")
    assert {v.dtype for v in file.values()} == {torch.bfloat16}
    full, rounded = Tiny(), Tiny()
    ckpt.load_weights(tmp_path, full, resume=True)
    ckpt.load_weights(tmp_path, rounded)
    want = number("model.action_head.weight", "weight", torch.Size((3, 5)))
    assert torch.equal(full.model.action_head.weight, want)
    assert torch.equal(rounded.model.action_head.weight, want.bfloat16().float())
    everything(tmp_path / "checkpoints/000041")


def test_convert_keeps_float32_weights_where_a_smaller_file_would_be_the_last(tmp_path: Path, capsys) -> None:
    """A folder without training state, as a download is; and shards that --delete-dcp takes away."""
    model_dir = shutil.copytree(SINGLE / "pretrained_model", tmp_path / "model")
    want = (model_dir / "model.safetensors").read_bytes()
    for dtype in ("bfloat16", "float16"):
        ckpt.convert(model_dir, dtype=dtype)
    assert (model_dir / "model_float32.safetensors").read_bytes() == want
    assert f"{model_dir}/model_float32.safetensors keeps the weights" in capsys.readouterr().out
    half, full = (
        load_file(model_dir / "model.safetensors"),
        load_file(model_dir / "model_float32.safetensors"),
    )
    assert all(torch.equal(half[k], v.half() if v.is_floating_point() else v) for k, v in full.items())
    ckpt.convert(model_dir)
    again = load_file(model_dir / "model.safetensors")
    assert all(torch.equal(again[k], v) for k, v in full.items())


def test_convert_says_what_it_leaves_and_what_is_loaded_from_here_on(
    every_layout: Path, tmp_path: Path, capsys
) -> None:
    shutil.copytree(every_layout / "fsdp2-safetensors_dcp", tmp_path, symlinks=True, dirs_exist_ok=True)
    step_dir = tmp_path / "checkpoints/000041"
    ckpt.convert(tmp_path, dtype="bfloat16")
    shards = step_dir / "pretrained_model/pytorch_model_fsdp_0"
    assert (
        f"{shards} is kept, and a --resume goes on from it; --delete-dcp deletes it."
        in capsys.readouterr().out
    )
    assert not (step_dir / "training_state/model_float32.safetensors").exists()
    ckpt.convert(tmp_path)
    ckpt.convert(tmp_path, dtype="bfloat16", delete_dcp=True)
    text = capsys.readouterr().out
    assert f"{shards} deleted" in text and "model_float32.safetensors keeps the weights" in text
    resumed = Tiny()
    ckpt.load_weights(tmp_path, resumed, resume=True)
    want = number("model.action_head.weight", "weight", torch.Size((3, 5)))
    assert torch.equal(resumed.model.action_head.weight, want)
    everything(step_dir)


def test_convert_does_not_delete_the_shards_that_alone_hold_an_adapter(tmp_path: Path) -> None:
    policy, _, optimizer, _ = parts()
    save(tmp_path / "base", 1, policy, optimizer)
    adapter = {
        "base_model.model.model.encoder.1.lora_A.weight": torch.randn(2, 7),
        "base_model.model.model.encoder.1.lora_B.weight": torch.randn(5, 2),
    }
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "base_model_name_or_path": str(tmp_path / "base")}
    kwargs: dict[str, Any] = {"checkpoint_format": "dcp", "sharded": True}
    save(tmp_path / "lora", 1, policy, optimizer, adapter={"state_dict": adapter, "config": config}, **kwargs)
    with pytest.raises(ValueError, match="--delete-dcp would delete the only copy of the adapter"):
        ckpt.convert(tmp_path / "lora", delete_dcp=True)
    ckpt.convert(tmp_path / "lora")
    live = {k: torch.zeros_like(v) for k, v in adapter.items()}
    ckpt.load_weights(tmp_path / "lora", policy, adapter=live, resume=True)
    assert all(torch.equal(live[k], adapter[k]) for k in live)


def test_convert_merges_an_adapter_into_its_base(tmp_path: Path, capsys) -> None:
    policy, _, optimizer, _ = parts()
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
    assert ckpt.checkpoint_problems(model_dir.parent) == []
    live = {k: torch.zeros_like(v) for k, v in adapter.items()}
    ckpt.load_weights(model_dir, policy, adapter=live, resume=True)
    assert all(torch.equal(live[k], adapter[k]) for k in live)
    merged = Tiny()
    ckpt.load_weights(model_dir, merged)
    ckpt.convert(model_dir)
    said = capsys.readouterr().out
    assert "The adapter stays beside it for --resume; everything else loads model.safetensors" in said
    ckpt.show(model_dir)
    said = capsys.readouterr().out
    assert f"adapter: safetensors, float32, 39 parameters, r 2, on the base {tmp_path / 'base'}" in said
    file = load_file(model_dir / "model.safetensors")
    want = base["model.encoder.1.weight"] + 3 * b @ a
    torch.testing.assert_close(file["model.encoder.1.weight"], want, rtol=1e-6, atol=1e-6)
    assert torch.equal(file["model.action_head.weight"], head)
    assert all(torch.equal(file[k], v) for k, v in merged.state_dict().items())
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(ValueError, match=r"builds on .*base, which is not there"):
        ckpt.convert(model_dir)


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
    hub = pytest.importorskip("huggingface_hub")
    save(tmp_path, 1, *parts()[1:3])
    calls = []

    class Api:
        def create_repo(self, repo_id, **kwargs):
            return f"https://hub/{repo_id}"

        def upload_folder(self, folder_path, ignore_patterns, **kwargs):
            calls.append(names_in(Path(folder_path)))
            raise ConnectionError("no network")

    monkeypatch.setattr(hub, "HfApi", Api)
    with pytest.raises(ValueError, match=r"no network.*--push-to-hub me/act"):
        ckpt.upload_policy(tmp_path, "me/act", {"success rate": 0.9})
    assert {"README.md", "config.json", "model.safetensors", "train_config.json"} <= calls[0]
    card = (tmp_path / "checkpoints/000001/pretrained_model/README.md").read_text()
    assert card.startswith("---\n") and "| success rate | 0.9 |" in card
    assert found("auto", tmp_path).name == "000001"


def test_dcps_exception_is_caught_though_it_is_no_exception() -> None:
    assert not issubclass(CheckpointException, Exception)
    text = ckpt._sentence(CheckpointException("x", {0: (OSError(28, "No space left"), StackSummary())}))
    assert text == "[Errno 28] No space left"
