"""DDP, FSDP, HSDP compared with one process in losses, norms and weights; then errors, crashes and 1,024."""

# mypy: disable-error-code="union-attr,operator,arg-type,index,attr-defined,func-returns-value"
# (torch types every attribute of a module as Tensor | Module, and every gradient as Tensor | None)

import dataclasses
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from conftest import ROOT
from ranks import free_port, run_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import dist
from dist import DDPConfig, FSDPConfig, ParallelismConfig
from extras import checks
from extras.memory import memory_per_rank

# ------------------------------------------------------------------------------------------- what is trained


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Toy(nn.Module):
    """Odd sizes (shards are uneven), a weight that is read and not called, and one frozen parameter."""

    wrap_modules = ("Block",)
    forward_methods = ("predict",)

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 11)
        self.pos = nn.Embedding(1, 11)
        self.layers = nn.ModuleList([Block(11) for _ in range(3)])
        self.out = nn.Linear(11, 3)
        self.out.bias.requires_grad_(False)

    def predict(self, batch):
        x = self.inp(batch["x"].to(self.inp.weight.dtype)) + self.pos.weight
        for layer in self.layers:
            x = layer(x)
        return self.out(x)

    def forward(self, batch):
        loss = (self.predict(batch) - batch["y"]).abs().sum() / batch["num_valid"]
        return loss, {"l1_loss": loss.detach()}

    def optim_groups(self):
        return [{"params": [p for p in self.parameters() if p.requires_grad], "lr": 1e-2}]


def toy_batch(step: int) -> dict:
    g = torch.Generator().manual_seed(step)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    return {"x": draw(8, 6), "y": draw(8, 3), "is_pad": torch.zeros(8, 3, dtype=torch.bool)}


def float_batch(step: int) -> dict:
    batch = {k: v.float() for k, v in toy_batch(step).items() if k != "is_pad"}
    return batch | {"num_valid": torch.tensor(24.0)}


ACT: dict[str, Any] = {
    "chunk_size": 6,
    "n_action_steps": 6,
    "dim_model": 32,
    "n_heads": 4,
    "dim_feedforward": 48,
    "n_encoder_layers": 2,
    "n_vae_encoder_layers": 2,
    "latent_dim": 8,
    "dropout": 0.1,
    "pretrained_backbone_weights": None,
}


def act_policy(camera: bool = False) -> nn.Module:
    import model_act  # here, since torchvision would cost each launched process seconds

    inputs = {"observation.state": {"type": "STATE", "shape": [5]}}
    if camera:
        inputs["observation.images.top"] = {"type": "VISUAL", "shape": [3, 32, 32]}
    else:
        inputs["observation.environment_state"] = {"type": "ENV", "shape": [7]}
    return model_act.ACTPolicy(
        model_act.ACTConfig(**ACT), inputs, {"action": {"type": "ACTION", "shape": [4]}}
    )


def act_batch(step: int) -> dict:
    g = torch.Generator().manual_seed(step)
    pad = torch.zeros(8, 6, dtype=torch.bool)
    pad[0, 1:], pad[3, 4:], pad[6, 2:] = True, True, True
    return {
        "observation.state": torch.randn(8, 5, generator=g),
        "observation.environment_state": torch.randn(8, 7, generator=g),
        "observation.images.top": torch.randint(256, (8, 3, 32, 32), generator=g, dtype=torch.uint8),
        "action": torch.randn(8, 6, 4, generator=g),
        "action_is_pad": pad,
        "is_pad": pad,
        "noise_seed": torch.arange(8 * step, 8 * step + 8),
    }


# ----------------------------------------------------------------------------------------- how it is trained


@dataclasses.dataclass(frozen=True)
class Case:
    replicate: int = 1
    shard: int = 1
    accum: int = 1
    ddp: DDPConfig = DDPConfig()  # noqa: RUF009 (frozen)
    fsdp: FSDPConfig = FSDPConfig()  # noqa: RUF009 (frozen)
    mixed: dist.MixedPrecision = "no"
    dtype: torch.dtype = torch.float64
    policy: str = "toy"
    steps: int = 4
    compile_backend: str | None = None
    fused: bool = True
    inf_at: tuple[int, int] | None = None  # (rank, step): an infinite loss there


def train(case: Case) -> dict:
    """Losses and norms by step, final weights by name, the scaler's state and Adam's step count."""
    cluster = dist.start("cpu", ParallelismConfig(case.replicate, case.shard))
    torch.manual_seed(0)
    policy = Toy() if case.policy == "toy" else act_policy(camera=case.policy == "act with camera")
    policy.to(case.dtype)
    if cluster.rank > 0:  # rank 0's weights must win
        for p in policy.parameters():
            nn.init.zeros_(p)
    if case.compile_backend:
        units = dist.wrap_units(policy, case.fsdp).values() if cluster.sharded else [policy]
        for unit in units:
            unit.compile(backend=case.compile_backend, dynamic=False)
    module = dist.parallelize(policy, cluster, case.ddp, case.fsdp)
    groups = policy.optim_groups() if case.policy == "toy" else policy.optim_groups(1e-3, 1e-3, 1e-4)
    optimizer = torch.optim.AdamW(groups, fused=case.fused)
    dist.check_optimizer(optimizer, module)
    scaler = dist.LossScaler(cluster.device) if case.mixed == "fp16" else None
    sums, curve = dist.MetricSums(cluster), []
    for step in range(case.steps):
        whole = (toy_batch if case.policy == "toy" else act_batch)(step)
        valid = (~whole.pop("is_pad")).sum().to(case.dtype)
        share = 8 // cluster.world_size // case.accum
        for micro in range(case.accum):
            at = (micro * cluster.world_size + cluster.rank) * share
            batch = {k: v[at : at + share] for k, v in whole.items()}
            batch = {k: v.to(case.dtype) if v.is_floating_point() else v for k, v in batch.items()}
            batch["num_valid"] = valid / (cluster.world_size * case.accum)
            with dist.accumulate(module, micro == case.accum - 1):
                with dist.autocast(cluster, case.mixed, case.fsdp):
                    loss, loss_terms = module(batch)
                assert loss.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
                if case.inf_at == (cluster.rank, step):
                    loss = loss * float("inf")
                dist.backward(loss / case.accum, scaler)
            sums.add({"loss": loss, **loss_terms})
        norm = dist.clip_grad_norm_(module, 0.5, scaler)
        dist.optimizer_step(optimizer, scaler)
        optimizer.zero_grad()
        sums.add({"grad_norm": norm})
        curve.append(list(sums.reduce().values()))
    weights = {name: w.numpy() for name, w in dist.gathered_state_dict(policy).items()}
    digest = hashlib.sha256(b"".join(w.tobytes() for w in weights.values())).hexdigest()
    adam = next(iter(optimizer.state.values()))["step"]
    return {
        "curve": np.array(curve),
        "weights": weights if cluster.is_main else None,
        "digest": digest,
        "scaler": scaler and scaler.state_dict(),
        "adam_steps": float(adam),
        "pieces": sum(isinstance(p, DTensor) for p in policy.parameters()),
    }


def train_all(rank: int, world_size: int, cases: list[Case]) -> list[dict]:
    return [train(case) for case in cases]


def on_ranks(world_size: int, *cases: Case, deadline_s: float = 120) -> list[list[dict]]:
    """results[case][rank]"""
    by_rank = run_ranks(world_size, train_all, list(cases), deadline_s=deadline_s, init_group=world_size > 1)
    return [list(results) for results in zip(*by_rank)]


_alone: dict[Case, dict] = {}


def alone(case: Case) -> dict:
    if case not in _alone:
        _alone[case] = on_ranks(1, case)[0][0]
    return _alone[case]


def largest_difference(a: dict, b: dict) -> tuple[float, float]:
    """Relative, of the curves (to each value) and of the weights (to each tensor's largest)."""
    assert a["weights"].keys() == b["weights"].keys()
    curve = np.abs(a["curve"] - b["curve"]) / np.abs(b["curve"])
    weights = [
        np.abs(a["weights"][k] - w).max() / max(np.abs(w).max(), 1e-12)
        for k, w in b["weights"].items()
        if w.size
    ]
    return float(curve.max()), float(max(weights))


def assert_same(results: list[dict], reference: dict, tolerance: float, name: object) -> None:
    """All ranks end with the very same weights; they and the curve differ from the reference by rounding."""
    curve, weights = largest_difference(results[0], reference)
    assert curve <= tolerance and weights <= tolerance, f"{name}: curve {curve:.1e}, weights {weights:.1e}"
    for result in results[1:]:
        assert result["digest"] == results[0]["digest"] and np.array_equal(
            result["curve"], results[0]["curve"]
        ), name


# ------------------------------------------------------------------------------------------------- one curve

WHOLE_PARTS = FSDPConfig(ignored_modules=r"inp|pos|layers\.1")
# The rounding of float64 sums in another order; it passes through 4 steps of AdamW.
EXACT = 1e-9


def test_two_ranks_give_the_curve_and_the_weights_of_one_process():
    cases = [
        Case(2, 1),
        Case(1, 2),
        Case(1, -1, accum=2),
        Case(-1, 1, accum=4),
        Case(ddp=DDPConfig(static_graph=True), accum=4),
        Case(
            ddp=DDPConfig(gradient_as_bucket_view=False, bucket_cap_mb=1, find_unused_parameters=True),
            accum=2,
        ),
        Case(shard=2, accum=2, fsdp=WHOLE_PARTS),
        Case(shard=2, accum=2, fsdp=dataclasses.replace(WHOLE_PARTS, wrap_modules=("Linear",))),
        Case(shard=2, accum=2, fsdp=FSDPConfig(reshard_after_forward=False)),
        Case(shard=2, fsdp=FSDPConfig(min_num_params=600)),
        Case(shard=2, fsdp=FSDPConfig(cpu_offload=True)),
        Case(shard=2, fsdp=WHOLE_PARTS, fused=False),
    ]
    for case, results in zip(cases, on_ranks(2, *cases)):
        assert_same(results, alone(Case()), EXACT, case)
        trained_as_shards = results[0]["pieces"]
        assert (trained_as_shards > 0) == (case.shard in (2, -1)), "the mode was not in force"
        assert trained_as_shards == (0 if case.shard == 1 else 14 if case.fsdp.ignored_modules else 23)


def test_four_ranks_give_the_curve_and_the_weights_of_one_process():
    cases = [Case(), Case(1, 4), Case(2, 2), Case(2, -1, accum=2), Case(2, 2, accum=2, fsdp=WHOLE_PARTS)]
    for case, results in zip(cases, on_ranks(4, *cases)):
        assert_same(results, alone(Case()), EXACT, case)


def test_accumulation_in_one_process_is_the_undivided_batch():
    for results in on_ranks(1, Case(accum=2), Case(accum=8)):
        assert_same(results, alone(Case()), EXACT, "accumulation")


def test_act_with_dropout_vae_and_padding_is_one_curve_in_every_layout():
    act = Case(policy="act", steps=3)
    four = [act, dataclasses.replace(act, shard=4, accum=2), dataclasses.replace(act, replicate=2, shard=2)]
    for case, results in zip(four, on_ranks(4, *four)):
        assert_same(results, alone(act), EXACT, case)
    seen = Case(policy="act with camera", steps=2)
    two = [seen, dataclasses.replace(seen, shard=2, fsdp=FSDPConfig(ignored_modules=r"model\.backbone"))]
    for case, results in zip(two, on_ranks(2, *two)):
        assert_same(results, alone(seen), EXACT, case)


def test_compiled_wrap_units_train_the_same_under_fsdp():
    [results] = on_ranks(2, Case(shard=2, steps=3, compile_backend="inductor"))
    assert_same(results, alone(Case(steps=3)), EXACT, "compiled")


def graphs_under_ddp(rank, world_size):
    import torch._dynamo.testing

    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    cluster = dist.start("cpu")
    dist.set_process(compiled=True)
    policy = Toy()
    policy.compile(backend=counter, dynamic=False)
    module = dist.parallelize(policy, cluster, DDPConfig(bucket_cap_mb=1))
    for step in range(4):
        module.train(step != 2)  # an evaluation in between
        batch = float_batch(step)
        with torch.set_grad_enabled(step != 2):
            loss, _ = module(batch)
        if step != 2:
            loss.backward()
    return counter.frame_count


def test_ddp_leaves_a_compiled_policy_in_one_graph_for_training_and_one_for_evaluation():
    assert run_ranks(2, graphs_under_ddp) == [2, 2]


# ------------------------------------------------------------------------------------------------- precision


def test_bf16_runs_of_all_layouts_stay_together():
    # A bf16 product is off by up to 2^-8; another split changes the order of float32 sums around it, which
    # may flip such a rounding. Bounds set before: 1 % of losses and norms over 4 steps at a learning rate of
    # 1e-2; 3 % where weights are gathered in bf16, since layer norms and biases are then rounded, too.
    reference = alone(Case(dtype=torch.float32, mixed="bf16"))
    exact = alone(Case(dtype=torch.float32))
    assert 1e-4 < largest_difference(reference, exact)[0] < 0.05, "bf16 is not in force, or far off"
    half = FSDPConfig(param_dtype="bfloat16", reduce_dtype="float32", output_dtype="bfloat16")
    base: dict[str, Any] = {"dtype": torch.float32, "mixed": "bf16"}
    cases = [
        Case(2, 1, **base),
        Case(1, 2, **base),
        Case(1, 2, accum=2, **base),
        Case(1, 2, fsdp=WHOLE_PARTS, **base),
        Case(1, 2, fsdp=half, **base),
        Case(
            1,
            2,
            fsdp=dataclasses.replace(half, ignored_modules=WHOLE_PARTS.ignored_modules),
            dtype=torch.float32,
        ),
        Case(1, 2, fsdp=dataclasses.replace(half, cast_forward_inputs=False), dtype=torch.float32),
    ]
    for case, results in zip(cases, on_ranks(2, *cases)):
        gathers_half = case.fsdp.param_dtype is not None
        assert largest_difference(results[0], reference)[0] < (0.03 if gathers_half else 0.01), case
        assert_same(results, results[0], 0.0, case)


def test_fp16_skips_an_overflow_of_one_rank_on_all_of_them():
    base: dict[str, Any] = {"dtype": torch.float32, "mixed": "fp16"}
    reference = alone(Case(inf_at=(0, 2), **base))
    assert reference["adam_steps"] == 3 and reference["scaler"]["scale"] == 2.0**15
    assert not np.isfinite(reference["curve"][2]).all() and np.isfinite(reference["curve"][3]).all()
    two = [
        Case(2, 1, inf_at=(1, 2), **base),
        Case(1, 2, inf_at=(1, 2), accum=2, **base),
        Case(1, 2, inf_at=(0, 2), fsdp=WHOLE_PARTS, **base),
        Case(1, 2, inf_at=(0, 2), fused=False, **base),
    ]
    four = [Case(2, 2, inf_at=(3, 2), **base), Case(2, 2, inf_at=(2, 2), fsdp=WHOLE_PARTS, **base)]
    for case, results in [*zip(two, on_ranks(2, *two)), *zip(four, on_ranks(4, *four))]:
        for result in results:
            assert result["scaler"] == reference["scaler"] and result["adam_steps"] == 3, case
            finite = [0, 1, 3]
            assert np.abs(result["curve"][finite] / reference["curve"][finite] - 1).max() < 0.01, case
            assert result["digest"] == results[0]["digest"], case


def test_the_loss_scale_follows_gradscaler_step_by_step_and_shares_its_state():
    ours = dist.LossScaler(torch.device("cpu"), init_scale=1024.0, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    weight, twin = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, twin_optimizer = (
        torch.optim.AdamW([weight], lr=0.1, fused=True),
        torch.optim.AdamW([twin], lr=0.1, fused=True),
    )
    for step in range(12):
        factor = float("inf") if step in (2, 6, 7) else 1.0 + step
        for p, o in ((weight, optimizer), (twin, twin_optimizer)):
            o.zero_grad()
            loss = (p * factor).sum()
            if p is weight:
                dist.backward(loss, ours)
                dist.clip_grad_norm_([p], float("inf"), ours)
                dist.optimizer_step(o, ours)
            else:
                theirs.scale(loss).backward()
                theirs.step(o)
                theirs.update()
        assert ours.state_dict() == theirs.state_dict()
        # Ours divides by the scale in the clipping pass; powers of two lose nothing.
        assert torch.equal(weight, twin)
    again = dist.LossScaler(torch.device("cpu"))
    again.load_state_dict(theirs.state_dict())
    assert again.state_dict() == theirs.state_dict()


def hooked_dtypes(rank, world_size, shard, settings):
    """(of a layer's output, of the loss, of the gradients) for each (mixed_precision, FSDPConfig)."""
    cluster, out = dist.start("cpu", ParallelismConfig(1, shard)), []
    for mixed, fsdp in settings:
        policy: Any = Toy()
        seen: list[torch.dtype] = []
        policy.layers[1].up.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out.dtype))
        module = dist.parallelize(policy, cluster, DDPConfig(), fsdp)
        with dist.accumulate(module, True):
            with dist.autocast(cluster, mixed, fsdp):
                loss, _ = module(float_batch(0))
            loss.backward()
        grads = {str(p.grad.dtype) for p in policy.parameters() if p.requires_grad}
        out.append((str(seen[0]), str(loss.dtype), grads))
    return out


def test_a_precision_flag_reaches_the_layers_and_leaves_loss_and_gradients_in_float32():
    names = {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}
    expected = [(f"torch.{dtype}", "torch.float32", {"torch.float32"}) for dtype in names.values()]
    settings = [(mixed, FSDPConfig()) for mixed in names]
    assert run_ranks(1, hooked_dtypes, 1, settings, init_group=False)[0] == expected
    assert run_ranks(2, hooked_dtypes, 1, settings)[1] == expected
    settings.append(("no", FSDPConfig(param_dtype="bfloat16")))
    assert run_ranks(2, hooked_dtypes, 2, settings)[1] == [*expected, expected[1]]


def test_precisions_that_cannot_work_are_refused():
    cluster = dist.Cluster(0, 0, 2, 2, torch.device("cuda"), 1, 2)
    for mixed, fsdp, flag in (
        ("no", FSDPConfig(param_dtype="float16"), "--mixed-precision fp16"),
        ("fp16", FSDPConfig(param_dtype="bfloat16"), "two dtypes"),
        ("fp16", FSDPConfig(cpu_offload=True), "--fsdp.cpu-offload"),
        ("bf16", FSDPConfig(cpu_offload=True, ignored_modules="x"), "--fsdp.cpu-offload"),
    ):
        with pytest.raises(ValueError, match=re.escape(flag)):
            checks.check_precision(cluster, mixed, fsdp)
    checks.check_precision(cluster, "bf16", FSDPConfig(param_dtype="bfloat16", cpu_offload=True))
    checks.check_precision(
        dataclasses.replace(cluster, dp_replicate=2, dp_shard=1), "no", FSDPConfig(param_dtype="float16")
    )


# ------------------------------------------------------------------------------- clipping, reads, evaluation


def mixed_norms(rank, world_size):
    """The norms and clipped gradients of one set of tensors on meshes of several kinds."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    flat = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    g = torch.Generator().manual_seed(7)
    grads = [torch.randn(n, 37, generator=g) * 10.0**n for n in (1, 2, 3, 5)] + [
        torch.randn(400_000, generator=g)
    ]
    places = [
        (flat, [Shard(0)]),
        (square, [Replicate(), Shard(0)]),
        (square, [Shard(0), Shard(0)]),
        None,
        (flat, [Shard(0)]),
    ]
    out = []
    for max_norm in (float("inf"), 1.0):
        parameters = []
        for grad, place in zip(grads, places):
            tensor = grad.clone() if place is None else distribute_tensor(grad.clone(), *place)
            parameters.append(nn.Parameter(torch.zeros_like(tensor)))
            parameters[-1].grad = tensor
        norm = dist.clip_grad_norm_(parameters, max_norm)
        whole = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
        out.append((norm.item(), [w.numpy() for w in whole], type(norm).__name__, norm.dim()))
    plain = [nn.Parameter(torch.zeros_like(g).double()) for g in grads]
    for p, grad in zip(plain, grads):
        p.grad = grad.double()  # the reference is exact
    return out, torch.nn.utils.clip_grad_norm_(plain, 1.0).item(), [p.grad.numpy() for p in plain]


def test_the_norm_of_mixed_parameters_is_that_of_one_process():
    for out, norm, clipped in run_ranks(4, mixed_norms):
        (measured, untouched, kind, axes), (same, scaled, _, _) = out
        assert (kind, axes) == ("Tensor", 0) and measured == same
        assert abs(measured / norm - 1) < 1e-6
        for ours, theirs in zip(scaled, clipped):
            assert np.allclose(ours, theirs, rtol=1e-5, atol=0)
        assert np.abs(untouched[0]).max() > 1 > np.abs(scaled[0]).max(), "inf must only measure"


class CountReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
        return func(*args, **(kwargs or {}))


def reads_per_step(rank, world_size, shard, mixed):
    cluster = dist.start("cpu", ParallelismConfig(1, shard))
    policy = Toy()
    module = dist.parallelize(policy, cluster, DDPConfig(), WHOLE_PARTS)
    optimizer = torch.optim.AdamW(policy.optim_groups(), fused=True)
    scaler = dist.LossScaler(cluster.device) if mixed == "fp16" else None
    sums, counts = dist.MetricSums(cluster), []
    for step in range(3):
        batch = float_batch(step)
        with CountReads() as counter:
            with dist.accumulate(module, True):
                with dist.autocast(cluster, mixed):
                    loss, loss_terms = module(batch)
                dist.backward(loss, scaler)
            sums.add({"loss": loss, **loss_terms})
            norm = dist.clip_grad_norm_(module, 1.0, scaler)
            sums.add({"grad_norm": norm}, 1.0 if scaler is None else 1 - scaler.found_inf)
            dist.optimizer_step(optimizer, scaler)
            optimizer.zero_grad()
        counts.append(counter.reads)
    with CountReads() as counter:
        float(norm)
    return counts, counter.reads


def test_the_host_reads_nothing_in_a_step():
    for shard, mixed in ((1, "no"), (1, "fp16"), (2, "fp16")):
        for counts, control in run_ranks(2, reads_per_step, shard, mixed):
            assert control == 1, "the counter sees no read at all"
            assert counts == [0, 0, 0], (shard, mixed)


def evaluation_between_micro_batches(rank, world_size):
    cluster = dist.start("cpu", ParallelismConfig(1, 2))
    torch.manual_seed(0)
    policy, plain = Toy().double(), None
    plain = Toy().double()
    plain.load_state_dict(policy.state_dict())
    module = dist.parallelize(policy, cluster)
    batch = {k: v for k, v in toy_batch(0).items() if k != "is_pad"} | {"num_valid": torch.tensor(24.0)}
    for sync in (False, True):
        with dist.accumulate(module, sync):
            module(batch)[0].backward()
        plain(batch)[0].backward()
        with torch.no_grad():
            module.eval()
            assert torch.allclose(module(batch)[0], plain(batch)[0])
            assert torch.allclose(policy.predict(batch), plain.predict(batch))
            module.train()
        assert all(isinstance(p, DTensor) for p in policy.parameters()), (
            "shards between steps, whatever ran last"
        )
    return all(
        torch.allclose(p.grad.full_tensor(), q.grad)
        for p, q in zip(policy.parameters(), plain.parameters())
        if p.requires_grad
    )


def test_evaluation_and_prediction_between_micro_batches_disturb_nothing_under_fsdp():
    assert run_ranks(2, evaluation_between_micro_batches) == [True, True]


class WithBatchNorm(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, batch):
        return super().forward(batch | {"x": self.norm(batch["x"])})


def running_means(rank, world_size):
    """After a forward, by (degree, --ddp.broadcast-buffers), from statistics that differ between ranks."""
    out = {}
    for shard in (1, 2):
        for broadcast in (None, False):
            policy = WithBatchNorm()
            cluster = dist.start("cpu", ParallelismConfig(1, shard))
            module = dist.parallelize(policy, cluster, DDPConfig(broadcast_buffers=broadcast))
            policy.norm.running_mean.fill_(rank)
            module(float_batch(0))
            out[shard, broadcast] = policy.norm.running_mean[0].item()
    frozen = dist.parallelize(act_policy(), dist.start("cpu"))
    names = [n for n in ("broadcast_buffers", "forward_sync_buffers") if hasattr(frozen, n)]
    data = frozen._get_ddp_logging_data()
    return out, any(getattr(frozen, n) for n in names), data["bucket_cap_bytes"]


def test_running_statistics_come_from_rank_0_and_without_them_nothing_is_broadcast():
    (first, on, bucket), (second, _, _) = run_ranks(2, running_means)
    for (shard, broadcast), mean in first.items():
        assert (second[shard, broadcast] == mean) == (broadcast is None)
    assert not on and bucket == 1024 * 2**20


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "replicate, shard, world, expected",
    [
        (1, 1, 1, (1, 1)),
        (1, 1, 8, (8, 1)),
        (8, 1, 8, (8, 1)),
        (-1, 1, 8, (8, 1)),
        (1, 8, 8, (1, 8)),
        (1, -1, 8, (1, 8)),
        (2, 4, 8, (2, 4)),
        (2, -1, 8, (2, 4)),
        (-1, 4, 8, (2, 4)),
        (1, -1, 1, (1, 1)),
        (32, -1, 1024, (32, 32)),
    ],
)
def test_degrees_that_fit(replicate, shard, world, expected):
    assert dist.resolve_degrees(ParallelismConfig(replicate, shard), world) == expected


@pytest.mark.parametrize(
    "replicate, shard, world",
    [(2, 2, 8), (3, -1, 8), (-1, 3, 8), (-1, -1, 8), (0, 8, 8), (1, -2, 8), (8, 1, 1)],
)
def test_degrees_that_do_not_fit_are_refused_with_all_numbers(replicate, shard, world):
    with pytest.raises(ValueError) as error:
        dist.resolve_degrees(ParallelismConfig(replicate, shard), world)
    assert all(str(number) in str(error.value) for number in (replicate, shard, world))
    assert "--parallelism.dp-replicate" in str(error.value) and "--parallelism.dp-shard" in str(error.value)


def test_a_policy_without_wrap_units_or_with_wrong_patterns_is_refused():
    for fsdp, flag in (
        (FSDPConfig(wrap_modules=("NoSuchLayer",)), "--fsdp.wrap-modules=NoSuchLayer"),
        (FSDPConfig(wrap_modules=()), "--fsdp.wrap-modules"),
        (FSDPConfig(min_num_params=10**9), "--fsdp.min-num-params=1000000000"),
        (FSDPConfig(min_num_params=1, wrap_modules=("Block",)), "give one of them"),
        (FSDPConfig(ignored_modules="nothing"), "--fsdp.ignored-modules=nothing"),
        (FSDPConfig(ignored_modules="("), "not a regular expression"),
        (FSDPConfig(ignored_modules=r"layers\..*"), "--fsdp.wrap-modules=Block"),
    ):
        with pytest.raises(ValueError, match=re.escape(flag)):
            dist.wrap_units(Toy(), fsdp)
    assert list(dist.wrap_units(Toy(), FSDPConfig(ignored_modules=r"layers\.0"))) == ["layers.1", "layers.2"]


def test_a_parameter_tied_across_wrap_units_is_refused_by_name():
    policy = Toy()
    policy.layers[2].up.weight = policy.layers[0].up.weight
    with pytest.raises(ValueError, match=r"layers\.0\.up\.weight and layers\.2\.up\.weight"):
        dist.refuse_tied(policy, dist.wrap_units(policy, FSDPConfig()))
    policy = Toy()
    policy.layers[1].norm.bias = policy.layers[1].down.bias  # within one unit: fine
    dist.refuse_tied(policy, dist.wrap_units(policy, FSDPConfig()))


def early_optimizer(rank, world_size, replicate, shard):
    cluster = dist.start("cpu", ParallelismConfig(replicate, shard))
    policy = Toy()
    early = torch.optim.AdamW(policy.optim_groups())
    module = dist.parallelize(policy, cluster)
    try:
        dist.check_optimizer(early, module)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_an_optimizer_built_before_sharding_is_refused_and_under_ddp_it_is_fine():
    assert "build it after parallelize()" in run_ranks(2, early_optimizer, 1, 2)[0]
    assert run_ranks(2, early_optimizer, 2, 1) == ["accepted", "accepted"]


def test_every_trainable_weight_moves_and_the_frozen_one_stays():
    torch.manual_seed(0)
    start = Toy().double().state_dict()
    for result in on_ranks(4, Case(1, 4, steps=1), Case(2, 2, steps=1)):
        for name, before in start.items():
            moved = not np.array_equal(result[0]["weights"][name], before.numpy())
            assert moved == (name != "out.bias"), name


def test_bad_surroundings_are_refused_before_anything_waits(monkeypatch):
    with pytest.raises(ValueError, match="--device=tpu"):
        dist.start("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"--device=cuda with 1 processes.*sees 0"):
            dist.start("cuda")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"RANK.*MASTER_ADDR.*torchrun"):
        dist.start("cpu")
    monkeypatch.setenv("RANK", "zero")
    with pytest.raises(ValueError, match="RANK=zero"):
        dist.start("cpu")


# ----------------------------------------------------------------------------- agreement, time-outs, crashes


class Missing(dist.UserError, ImportError):
    """As a package that is not installed."""


class TwoArguments(ValueError):
    def __init__(self, flag, rule):
        super().__init__(f"{flag} {rule}")


def agreements(rank, world_size):
    cluster = dist.start("cpu", startup_timeout_s=30, step_timeout_s=2)
    out = [
        dist.any_rank(cluster, rank == 1),
        dist.any_rank(cluster, False),
        dist.from_main(cluster, f"run-of-{rank}"),
    ]
    vote = dist.StopVote(cluster)
    out.append([vote.poll(15 if (rank, step) == (2, 1) else 0) for step in range(4)])
    for error in (
        ValueError("--flag=3 is odd; use 2."),
        FileNotFoundError("no such file"),
        KeyError("bug"),
        Missing("pip install it"),
        FileNotFoundError(2, "No such file", "x.json"),
        TwoArguments("--flag", "is odd"),
    ):
        try:
            with dist.raise_together(cluster):
                if rank == 1:
                    raise error
            out.append("nothing")
        except Exception as caught:
            out.append((type(caught).__name__, str(caught)))
    with dist.raise_together(cluster):
        pass
    total = torch.tensor([1.0, rank])
    out.append(dist.sum_over_ranks(cluster, total).tolist())
    return out


def test_what_one_rank_knows_all_of_them_learn():
    results = run_ranks(3, agreements, init_group=False)
    for rank, (yes, no, name, votes, user, missing, bug, package, file, odd, total) in enumerate(results):
        assert (yes, no, name, total) == (True, False, "run-of-0", [3.0, 3.0])
        assert votes == [0, 0, 15, 15], "all learn in the step after"
        assert user == ("ValueError", "--flag=3 is odd; use 2.")
        assert missing == ("FileNotFoundError", "no such file")
        assert package == ("Missing", "pip install it"), "the class is carried to the other ranks"
        assert file == ("FileNotFoundError", "[Errno 2] No such file: 'x.json'")
        quoted = ("RuntimeError", "rank 1 failed with TwoArguments: --flag is odd")
        assert odd == (("TwoArguments", "--flag is odd") if rank == 1 else quoted), "it cannot be pickled"
        assert bug == (
            ("KeyError", "'bug'") if rank == 1 else ("RuntimeError", "rank 1 failed with KeyError: 'bug'")
        )


def slow_preparation(rank, world_size, per_node):
    cluster = dist.start("cpu", startup_timeout_s=30, step_timeout_s=4)
    if per_node:  # two machines of two ranks each
        os.environ["GROUP_RANK"] = str(rank // 2)
        cluster = dataclasses.replace(cluster, local_rank=rank % 2, local_world_size=2)
    dist.shorten_timeout(cluster)
    prepared, begin = [], time.monotonic()

    def prepare():
        time.sleep(9)  # more than twice what a collective may wait
        prepared.append(rank)

    dist.rank0_first(cluster, prepare, per_node)
    waited = time.monotonic() - begin

    def fail():
        raise ValueError("the download broke off; try again.")

    try:
        dist.rank0_first(cluster, fail, per_node)
    except ValueError as error:
        return prepared, waited > 8.9, str(error), dist.any_rank(cluster, False)


@pytest.mark.parametrize("per_node", [False, True])
def test_ranks_wait_for_a_slow_preparation_longer_than_any_time_out(per_node):
    for rank, result in enumerate(run_ranks(4, slow_preparation, per_node, init_group=False)):
        works = rank in (0, 2) if per_node else rank == 0
        assert result == ([rank] if works else [], True, "the download broke off; try again.", False)


def lone_collective(rank, world_size, shard):
    cluster = dist.start("cpu", ParallelismConfig(1, shard), startup_timeout_s=60, step_timeout_s=1)
    group = cluster.mesh.get_group(0) if cluster.mesh is not None else None
    begin = time.monotonic()
    if rank == 1:
        time.sleep(2.5)  # start-up is patient
    torch.distributed.all_reduce(torch.ones(1), group=group)
    patient = time.monotonic() - begin > 2
    dist.shorten_timeout(cluster)
    begin = time.monotonic()
    if rank == 0:
        try:
            torch.distributed.all_reduce(torch.ones(1), group=group)
        except RuntimeError:
            soon = 0.5 < time.monotonic() - begin < 20  # of 60 at start-up; a busy machine adds some to the 1
            raise AssertionError(f"patient {patient}, then soon {soon}") from None
    time.sleep(25)


@pytest.mark.parametrize("shard", [1, 2])
def test_a_collective_may_wait_long_at_start_up_and_shortly_after_the_first_step(shard):
    with pytest.raises(AssertionError, match="patient True, then soon True"):
        run_ranks(2, lone_collective, shard, init_group=False, deadline_s=60)


def metric_sums(rank, world_size):
    cluster = dist.start("cpu")
    sums = dist.MetricSums(cluster)
    graph_owned = torch.zeros(())
    for step in range(3):
        graph_owned.fill_(10 * rank + step)  # the next replay overwrites it
        sums.add({"loss": graph_owned, "l1_loss": graph_owned.double() / 3})
        if step == 1:
            sums.add(
                {"grad_norm": torch.tensor(float("inf") if rank == 0 else 4.0)}, torch.tensor(float(rank > 0))
            )
        sums.add_times({"step_s": 1.0 + rank + step})
    state = sums.state_dict()
    calls = []
    original = torch.distributed.all_gather
    torch.distributed.all_gather = lambda *a, **k: calls.append(1) or original(*a, **k)
    first = sums.reduce()
    resumed = dist.MetricSums(cluster, state)
    torch.distributed.all_gather = original
    again = resumed.reduce()
    return first, len(calls), again, dist.MetricSums(cluster).reduce()


def test_metrics_are_means_over_ranks_times_the_slowest_and_one_message():
    for first, messages, again, empty in run_ranks(2, metric_sums):
        expected = {"loss": 6.0, "l1_loss": 2.0, "grad_norm": 4.0}
        assert {k: v for k, v in first.items() if k != "step_s"} == pytest.approx(expected, rel=1e-15)
        assert first["step_s"] == 3.0 and messages == 1 and empty == {}
        assert again == pytest.approx(expected, rel=1e-15), "sums survive a stop between log steps"


SCRIPT = """
import sys, time
import torch
import dist
from test_dist import Toy, toy_batch
cluster = dist.start("cpu", dist.ParallelismConfig(1, int(sys.argv[2])), step_timeout_s=20)
torch.manual_seed(0)
policy = Toy().double()
module = dist.parallelize(policy, cluster)
optimizer = torch.optim.AdamW(policy.optim_groups(), fused=True)
sums = dist.MetricSums(cluster)
for step in range(4):
    if sys.argv[1] == "crash" and step == 3 and cluster.rank == 1:
        raise RuntimeError("frame 17 cannot be decoded")
    share = 8 // cluster.world_size
    rows = slice(cluster.rank * share, (cluster.rank + 1) * share)
    batch = {k: v[rows] for k, v in toy_batch(step).items()}
    batch["num_valid"] = torch.tensor(24.0 / cluster.world_size)
    with dist.accumulate(module, True):
        loss, _ = module(batch)
        loss.backward()
    sums.add({"loss": loss})
    norm = dist.clip_grad_norm_(module, 0.5)
    dist.optimizer_step(optimizer)
    optimizer.zero_grad()
    if step == 0:
        dist.shorten_timeout(cluster)
    if cluster.is_main:
        print("curve", step, repr(sums._sums and norm.item()), flush=True)
dist.finish(cluster)
"""


def launch(tmp_path: Path, launcher: list[str], *args: str) -> subprocess.Popen:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", *launcher, str(script), *args]
    return subprocess.Popen(
        command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def norms(out: str) -> list[float]:
    return [float(line.split()[2]) for line in out.splitlines() if line.startswith("curve")]


def test_a_rank_that_throws_ends_the_job_with_its_traceback(tmp_path):
    begin = time.monotonic()
    job = launch(
        tmp_path,
        ["torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"],
        "crash",
        "2",
    )
    out, err = job.communicate(timeout=60)
    assert job.returncode != 0 and time.monotonic() - begin < 60
    assert "RuntimeError: frame 17 cannot be decoded" in err
    assert "Traceback" in err and len(norms(out)) == 3


def test_two_agents_train_together_and_give_the_same_curve(tmp_path):
    port = free_port()
    jobs = [
        launch(
            tmp_path,
            [
                "torch.distributed.run",
                "--nnodes=2",
                f"--node-rank={node}",
                "--nproc-per-node=1",
                f"--master-port={port}",
                "--master-addr=127.0.0.1",
            ],
            "train",
            "2",
        )
        for node in range(2)
    ]
    (out, err), (other, _) = (job.communicate(timeout=90) for job in jobs)
    assert [job.returncode for job in jobs] == [0, 0], err
    assert norms(other) == [] and np.allclose(norms(out), alone(Case())["curve"][:, 2], rtol=EXACT, atol=0)


def test_accelerate_launch_works_as_a_plain_launcher(tmp_path):
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    command = [
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes=2",
        "--num_machines=1",
        "--mixed_precision=no",
        "--dynamo_backend=no",
        f"--main_process_port={free_port()}",
    ]
    job = launch(tmp_path, command, "train", "2")
    out, err = job.communicate(timeout=90)
    assert job.returncode == 0, err
    assert np.allclose(norms(out), alone(Case())["curve"][:, 2], rtol=EXACT, atol=0)


# ------------------------------------------------------------------------------------ a fork's own module

FORK = """
import sys
import torch
from torch import nn
import dist

class ToyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))

class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), ToyBlock(), ToyBlock(), nn.Linear(16, 3))

    def forward(self, x):
        return self.net(x)

cluster = dist.start("cpu", dist.ParallelismConfig(dp_shard=int(sys.argv[1])))
dist.set_process()
torch.manual_seed(0)
fsdp = dist.FSDPConfig(wrap_modules=("ToyBlock",) if "wrap" in sys.argv else None)
module = dist.parallelize(ToyModel().double(), cluster, fsdp=fsdp)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
dist.check_optimizer(optimizer, module)
share = 4 // cluster.world_size
for step in range(4):
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 6, generator=g).double(), torch.randn(8, 3, generator=g).double()
    for micro in range(2):
        first = 4 * micro + cluster.rank * share
        with dist.accumulate(module, sync=micro == 1):
            loss = (module(x[first : first + share]) - y[first : first + share]).square().mean()
            dist.backward(loss / 2)
    norm = dist.clip_grad_norm_(module, 0.5)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * (4 - step) / 4
    dist.optimizer_step(optimizer)
    optimizer.zero_grad()
    if cluster.is_main:
        print("curve", step, repr(norm.item()), flush=True)
dist.finish(cluster)
"""


def run_fork(folder: Path, ranks: int, *args: str) -> tuple[list[float], str]:
    """(norms, stderr) of FORK beside a copy of dist.py, with nothing else of the project in reach."""
    shutil.copy(ROOT / "dist.py", folder)
    (folder / "fork.py").write_text(FORK)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK")}
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={free_port()}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), "fork.py", *args]
    job = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=90)
    return norms(job.stdout), job.stderr


def test_in_an_empty_folder_any_module_trains_to_the_norms_of_one_process(tmp_path):
    expected, err = run_fork(tmp_path, 1, "1")
    assert len(expected) == 4, err
    for args in (["1"], ["2", "wrap"]):
        curve, err = run_fork(tmp_path, 2, *args)
        assert len(curve) == 4, err
        assert np.allclose(curve, expected, rtol=EXACT, atol=0), args


def test_in_an_empty_folder_fsdp_without_wrap_modules_names_the_attribute(tmp_path):
    curve, err = run_fork(tmp_path, 2, "2")
    assert curve == [] and "UserError: ToyModel declares no `wrap_modules`, so FSDP would" in err
    assert "FSDPConfig(wrap_modules=...)" in err and "choose among Sequential, ToyBlock." in err


def made_by_hand(rank, world_size):
    """Largest differences of gradients from one process: DDP and FSDP2 modules that parallelize never saw."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.start("cpu")
    out = []
    for kind in ("ddp", "static ddp", "fsdp"):
        torch.manual_seed(0)
        policy, plain = Toy().double(), Toy().double()
        plain.load_state_dict(policy.state_dict())
        module: Any = policy
        if kind == "fsdp":
            for layer in policy.layers:
                fully_shard(layer)
            fully_shard(policy, ignored_params=set(policy.inp.parameters()))
        else:
            module = DistributedDataParallel(policy, static_graph=kind == "static ddp")
        for window in range(2):
            for micro in range(2):
                batch = {k: v for k, v in toy_batch(2 * window + micro).items() if k != "is_pad"}
                batch["num_valid"] = torch.tensor(24.0)
                plain(batch)[0].backward()
                own = {k: v[4 * rank : 4 * rank + 4] if v.dim() else v / 2 for k, v in batch.items()}
                with dist.accumulate(module, sync=micro == 1):
                    dist.backward(module(own)[0])
            for p, q in zip(policy.parameters(), plain.parameters()):
                if p.requires_grad:
                    whole = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                    out.append((whole - q.grad).abs().max().item())
            policy.zero_grad()
            plain.zero_grad()
    return out


def test_accumulate_serves_ddp_and_fsdp_modules_that_were_made_by_hand():
    for differences in run_ranks(2, made_by_hand):
        assert len(differences) == 3 * 2 * 22 and max(differences) < EXACT


def process_switches() -> tuple:
    import torch._dynamo

    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    optimize_ddp = torch._dynamo.config.optimize_ddp
    return list(warnings.filters), optimize_ddp, cuda.allow_tf32, cudnn.allow_tf32, cudnn.benchmark


def switches_of_a_run(rank, world_size):
    before, same = process_switches(), []
    for shard in (1, 2):
        policy = Toy()
        policy.compile(backend="eager")
        dist.parallelize(policy, dist.start("cpu", ParallelismConfig(1, shard)))
        same.append(process_switches() == before)
    tf32 = not before[2]
    dist.set_process(tf32=tf32, compiled=True)
    filters, *switches = process_switches()
    return same, len(filters) - len(before[0]), switches == [False, tf32, tf32, True]


def test_process_wide_switches_change_in_set_process_and_nowhere_else():
    assert run_ranks(2, switches_of_a_run) == [([True, True], 1, True)] * 2


def documented_step(rank, world_size):
    """The step of dist.py's docstring, run as it stands there."""
    lines = dist.__doc__.splitlines()
    code = "\n".join(line[4:] for line in lines if line.startswith("    ")).replace('"auto"', '"cpu"')
    policy = Toy()
    given: dict[str, Any] = {
        "policy": policy,
        "ddp": DDPConfig(),
        "fsdp": FSDPConfig(),
        "batch": float_batch(0),
    }
    given |= {"optimizer": torch.optim.AdamW(policy.parameters()), "mixed_precision": "fp16", "step": 0}
    given |= {"last_of_window": True, "window": range(1), "base_lr": 1e-3, "lr_factor": lambda step: 0.5}
    exec(code, vars(dist) | given)
    return given["optimizer"].param_groups[0]["lr"], len(given["optimizer"].state)


def test_the_step_of_the_docstring_runs():
    assert run_ranks(1, documented_step, init_group=False) == [(5e-4, 22)]


# ------------------------------------------------------------------------------ 1,024 ranks without hardware


def dry_run(rank, world_size, replicate, shard, ranks):
    """Each of `ranks` for itself, in a group that only pretends: (coordinate, rows of every shard, bytes)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    out = {}
    for fake in ranks:
        os.environ.update(RANK=str(fake), WORLD_SIZE="1024", LOCAL_RANK=str(fake % 8), LOCAL_WORLD_SIZE="8")
        torch.distributed.init_process_group("fake", rank=fake, world_size=1024, store=FakeStore())
        cluster = dist.start("cpu", ParallelismConfig(replicate, shard))
        policy = dist.parallelize(act_policy(), cluster)
        local = {name: p.to_local() for name, p in policy.named_parameters()}
        rows = {name: p.shape[0] for name, p in local.items()}
        held = sum(p.numel() * p.element_size() for p in local.values())
        out[fake] = (cluster.mode, tuple(cluster.mesh.get_coordinate()), rows, held)
        torch.distributed.destroy_process_group()
    return out


def test_a_dry_run_of_1024_ranks_covers_every_row_once():
    # One replica in full, and the corners of the mesh.
    ranks = [*range(64, 96), 0, 31, 32, 1023]
    [out] = run_ranks(1, dry_run, 32, -1, ranks, init_group=False, deadline_s=120)
    whole = dict(act_policy().named_parameters())
    for rank, (mode, coordinate, _, _) in out.items():
        assert mode == "hsdp" and coordinate == (rank // 32, rank % 32)
    for name, parameter in whole.items():
        assert sum(out[rank][2][name] for rank in range(64, 96)) == parameter.shape[0], name
    assert out[64][2] == out[0][2] and out[95][2] == out[1023][2] == out[31][2], "replicas hold the same rows"
    paper = memory_per_rank(act_policy(), 32)
    assert paper["parameters"] == out[0][3] == max(held for *_, held in out.values())


class Numbered:
    """A dataset whose batch is the numbers of its frames; the last frame of every 100 has one valid step."""

    def __len__(self) -> int:
        return 1_000_003

    def get_batch(self, frames):
        return {"index": torch.from_numpy(np.asarray(frames))}

    def valid_steps(self, frames):
        return np.where(np.asarray(frames) % 100 == 99, 1, 6)


def test_a_step_of_1024_ranks_takes_every_sample_of_its_share_once():
    import data

    def ranks(world_size: int, batch_size: int, step: int) -> list[dict]:
        return [
            data.TrainBatches(Numbered(), 5, batch_size, r, world_size, 1, 10)[step]
            for r in range(world_size)
        ]

    many, one = ranks(1024, 8, 3), ranks(1, 8192, 3)[0]
    taken = torch.cat([batch["index"] for batch in many])
    assert torch.equal(taken, one["index"]), "the order is that of one process"
    assert len(taken.unique()) == 8192
    assert torch.equal(torch.cat([batch["noise_seed"] for batch in many]), one["noise_seed"])
    # Every rank knows the normaliser of the whole step, without a message.
    assert {batch["num_valid"].item() for batch in many} == {one["num_valid"].item() / 1024}


def test_memory_on_paper_adds_up():
    policy = act_policy(camera=True)
    total = sum(p.numel() * 4 for p in policy.parameters())
    whole = memory_per_rank(policy, 1)
    assert whole == {"parameters": total, "gradients": total, "optimizer": 2 * total, "gathered": 0}
    cut = memory_per_rank(policy, 8)
    assert total / 8 <= cut["parameters"] < total / 8 * 1.1 and cut["optimizer"] == 2 * cut["gradients"]
    half = memory_per_rank(policy, 8, FSDPConfig(param_dtype="bfloat16"))
    assert half["gathered"] * 2 == cut["gathered"] > 0
    kept = memory_per_rank(policy, 8, FSDPConfig(ignored_modules=r"model\.backbone"))
    assert kept["parameters"] > cut["parameters"] and kept["gathered"] < cut["gathered"]
