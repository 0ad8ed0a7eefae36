"""How fast the trainer is on this machine, and whether every layout trains the same: four tables.

    python bench.py equality      one curve on every layout: checks tried, checks failed; exit code 1 if any
    python bench.py speed         step time, one change per row, from LeRobot's to ours; also under torchrun
    python bench.py loader        samples/s from the frame cache, from the decoder, from images in parquet
    python bench.py checkpoint    save and load times, and how long a save holds up the training

--json FILE writes a table's content. What is measured is train.py's own construction and step, beside a step
from public torch modules (extras/plain_act.py), which is also what tests compare the policy with.
"""

import ctypes
import functools
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torchvision
import tyro
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

import ckpt
import data
import dist
import model_act
import train
from extras import assembly, datasets, noise, plain_act
from extras.flags import UserError, act_config, is_user_error
from extras.ranks import run_ranks

# -------------------------------------------------------------------------------------------------- equality


@dataclass(frozen=True)
class Layout:
    """How one run is laid out; batch size x world size x accumulation is always GLOBAL_BATCH."""

    world_size: int = 1
    dp_shard: int = 1
    accumulation: int = 1
    compile: bool = False


LAYOUTS = {
    "single": Layout(),
    "ddp2": Layout(2),
    "ddp4": Layout(4),
    "fsdp2": Layout(2, dp_shard=2),
    "fsdp4": Layout(4, dp_shard=4),
    "hsdp2x2": Layout(4, dp_shard=2),
    "accum2": Layout(accumulation=2),
    "accum4": Layout(accumulation=4),
    "ddp2-accum2": Layout(2, accumulation=2),
    "fsdp2-accum2": Layout(2, dp_shard=2, accumulation=2),
    "compiled": Layout(compile=True),
    "compiled-accum2": Layout(accumulation=2, compile=True),
    "ddp2-compiled": Layout(2, compile=True),
    "fsdp2-compiled": Layout(2, dp_shard=2, compile=True),
}
MINUTES = ("compiled-accum2", "ddp2-compiled", "fsdp2-compiled")
GLOBAL_BATCH = 8
METRICS = ("loss", "l1_loss", "kld_loss", "grad_norm")
CELLS = (*METRICS, "ids", "weights", "ranks agree")
Precision = Literal["float64", "float32", "bf16", "fp16"]

# Relative, and set before any run. In float32 Adam turns rounding of a gradient near zero into steps of up
# to the learning rate, so final weights are compared in float64. Half types: ten times their rounding, for a
# layout against one process and for one process against float32 alike.
TOLERANCES: dict[str, float] = {"float64": 1e-9, "float32": 1e-4, "bf16": 10 * 2.0**-8, "fp16": 10 * 2.0**-11}
COMPARES_WEIGHTS = ("float64",)


@dataclass(frozen=True)
class Equality:
    """Train the same small job on every layout and compare each with one process, at every optimizer step."""

    precisions: tuple[Precision, ...] = ("float64", "float32", "bf16", "fp16")
    """float64 is held to 1e-9, final weights included; float32 to 1e-4; bf16 to 4e-2 and fp16 to 5e-3."""
    layouts: tuple[str, ...] = ()
    """Some of single, ddp2, ddp4, fsdp2, fsdp4, hsdp2x2, accum2, accum4, ddp2-accum2, fsdp2-accum2, compiled,
    compiled-accum2, ddp2-compiled, fsdp2-compiled, each compared with the first. None named: all that the
    device can run; the last three in float64 only, since a compilation takes a minute or two."""
    steps: int = 30
    """Optimizer steps."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: the layouts of one process only."""
    camera: bool = True
    """Off: an environment state in place of the camera, which compiles several times faster."""
    deadline_s: float = 900
    """Seconds that one layout may take before it counts as hung."""
    json: str | None = None
    """File that the table is written to."""


SMALL_POLICY = train.PolicyFlags(
    pretrained_backbone_weights=None,
    dim_model=64,
    n_heads=4,
    dim_feedforward=256,
    n_encoder_layers=2,
    n_vae_encoder_layers=2,
    latent_dim=8,
    dropout=0.1,
)


def small_job(
    layout: Layout, precision: str, steps: int, device: str, camera: bool = True
) -> tuple[train.Config, data.EpisodeDataset]:
    """Configuration and data: dropout and KL on, one camera, some episodes shorter than the chunk.

    Chunk and learning rates are ACT's own. They matter in float32: L1 and ReLU have kinks, and a residual
    that rounding carries over its kink moves the gradient by its share of all residuals; with a chunk of 10
    and ten times the rate one does so within 30 steps: 1e-3 of the norm in float32, nothing in float64.
    """
    cfg = train.Config(
        steps=steps * layout.accumulation,
        batch_size=GLOBAL_BATCH // layout.world_size // layout.accumulation,
        device=device,  # type: ignore[arg-type]
        compile=layout.compile,
        gradient_accumulation_steps=layout.accumulation,
        mixed_precision=precision if precision in ("bf16", "fp16") else "no",  # type: ignore[arg-type]
        parallelism=dist.ParallelismConfig(layout.world_size // layout.dp_shard, layout.dp_shard),
        policy=SMALL_POLICY,
    )
    lengths, rng = [230, 60, 310, 90, 140], np.random.default_rng(0)
    count = sum(lengths)
    keys = [data.ACTION, data.STATE] if camera else [data.ACTION, data.STATE, data.ENV_STATE]
    columns = {key: rng.normal(size=(count, noise.ACTION_DIM)).astype(np.float32) for key in keys}
    cameras = {"observation.images.top": noise.NoiseFrames(count, 48, 64)} if camera else {}
    flags, chunk_size = replace(cfg.dataset, cache="off"), cfg.policy.chunk_size
    train_set, _, _ = data.open_columns(flags, chunk_size, columns, lengths, 50, cameras)
    return cfg, train_set


def record(
    rank: int,
    world_size: int,
    layout: Layout,
    precision: str,
    steps: int,
    device: str = "cpu",
    camera: bool = True,
    overflow_at: int = -1,
) -> dict[str, Any]:
    """Collective: train the small job. At optimizer step `overflow_at` the last rank's batch holds an inf.

    Returns:
        "rows", the metrics of each optimizer step; "ids", this rank's samples of each loop step; "weights",
        whole, at the end (rank 0), and "final", their digest. With an overflow "digests" of this rank's own
        parameters and the loss "scales", after each optimizer step.
    """
    cfg, train_set = small_job(layout, precision, steps, device, camera)
    cluster = dist.start(cfg.device, cfg.parallelism)
    dist.set_process(tf32=False, compiled=cfg.compile)
    policy = train.build_policy(cfg, train_set, None)
    if precision == "float64":
        policy.double()
    learner = train.prepare(cfg, cluster, policy)
    if learner.scaler is not None:
        # Below any overflow of this job: which updates are skipped is compared apart, with `overflow_at`.
        learner.scaler.scale.fill_(2.0**10)
    batches = data.TrainBatches(
        train_set, cfg.seed, cfg.batch_size, cluster.rank, cluster.world_size, layout.accumulation, cfg.steps
    )
    loader = data.to_device(data.make_loader(batches, num_workers=0), cluster.device)
    sums = dist.MetricSums(cluster)
    learner.module.train()
    out: dict[str, Any] = {"rows": [], "ids": [], "digests": [], "scales": [], "weights": None}
    for step in batches.steps:
        batch, window = next(loader), batches.window(step)
        out["ids"].append(batch["index"].tolist())
        if len(out["rows"]) == overflow_at and cluster.rank == cluster.world_size - 1:
            batch[data.STATE][0, 0] = math.inf
        train.train_step(cfg, cluster, learner, batch, window, step, sums)
        if step + 1 == window.stop:
            out["rows"].append(sums.reduce())
            if overflow_at >= 0:
                out["digests"].append(digest(dict(policy.named_parameters())))
                out["scales"].append(learner.scaler.state_dict()["scale"] if learner.scaler else 1.0)
    weights = {name: value.detach().cpu() for name, value in dist.gathered_state_dict(policy).items()}
    out["final"] = digest(weights)
    if rank == 0:
        out["weights"] = {name: value.numpy() for name, value in weights.items()}
    return out


def digest(tensors: dict[str, Tensor]) -> str:
    """Of this rank's own values: of a sharded tensor its shard."""
    total = hashlib.sha256()
    for tensor in tensors.values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        total.update(local.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


Column = tuple[int, int, float]
"""(checks tried, checks failed, worst relative difference)"""


def compare(
    first: list[dict],
    other: list[dict],
    layouts: tuple[Layout, Layout],
    tolerance: float,
    with_weights: bool,
) -> dict[str, Column]:
    """What the ranks of two layouts recorded, column by column."""
    columns: dict[str, Column] = {}
    for name in METRICS:
        values = [[row[name] for row in ranks[0]["rows"]] for ranks in (first, other)]
        columns[name] = column([relative(a, b) for a, b in zip(*values)], tolerance, len(values[0]))
    ids = [window_ids(ranks, layout) for ranks, layout in zip((first, other), layouts)]
    columns["ids"] = column([float(a != b) for a, b in zip(*ids)], 0, len(ids[0]))
    if with_weights:
        a, b = first[0]["weights"], other[0]["weights"]
        differences = [relative(a[name], b[name]) for name in a if name in b]
        columns["weights"] = column(differences, tolerance, len(a))
    columns["ranks agree"] = column([float(r["final"] != other[0]["final"]) for r in other], 0, len(other))
    return columns


def column(differences: list[float], tolerance: float, wanted: int) -> Column:
    """NaN fails, and so does a check that is missing."""
    failed = sum(not difference <= tolerance for difference in differences) + wanted - len(differences)
    return wanted, failed, max(differences, key=lambda d: math.inf if math.isnan(d) else d, default=math.nan)


def relative(a: Any, b: Any) -> float:
    """The largest difference, as a share of the largest value of `a`."""
    difference, size = np.abs(np.asarray(a, np.float64) - b).max(), np.abs(a).max()
    return float(difference / size if size > 0 else difference)


def window_ids(ranks: list[dict], layout: Layout) -> list[list[int]]:
    """The samples of each optimizer step, in the order of the run."""
    steps = range(len(ranks[0]["ids"]))
    samples = []
    for start in steps[:: layout.accumulation]:
        window = steps[start : start + layout.accumulation]
        samples.append([sample for step in window for rank in ranks for sample in rank["ids"][step]])
    return samples


def overflow_checks(ranks: list[dict]) -> Column:
    """Of a run with an inf at its second of three updates: that one alone is skipped, on all ranks, and
    halves the loss scale."""
    checks = []
    for rank in ranks:
        (before, at, after), scales = rank["digests"], rank["scales"]
        checks += [before == at, at != after]
        checks += [scales == [scales[0], scales[0] / 2, scales[0] / 2]]
        checks += [math.isfinite(rank["rows"][2]["loss"])]
    return len(checks), checks.count(False), float(False in checks)


def equality(flags: Equality) -> int:
    """The table. Returns the exit code."""
    layouts = {name: LAYOUTS[name] for name in chosen_names("layouts", flags.layouts, LAYOUTS)}
    if flags.device == "cuda":
        layouts = {name: layout for name, layout in layouts.items() if layout.world_size == 1}
    print(f"{flags.steps} optimizer steps of {GLOBAL_BATCH} samples on {flags.device}: {', '.join(layouts)}")
    heads = "".join(f"{name:>13}" for name in CELLS)
    tail = "   (worst relative difference)"
    print(f"{'precision':<10}{'layout':<18}{heads}{'checks':>9}{'failed':>8}{tail}")
    table: list[dict[str, Any]] = []
    single32 = None

    def run(layout: Layout, precision: str, steps: int, overflow_at: int = -1) -> list[dict]:
        job = (layout, precision, steps, flags.device, flags.camera, overflow_at)
        return run_ranks(layout.world_size, record, *job, deadline_s=flags.deadline_s)

    def add(precision: str, name: str, columns: dict[str, Column]) -> None:
        checks, failed = (sum(c[i] for c in columns.values()) for i in (0, 1))
        table.append({"precision": precision, "layout": name, "checks": checks, "failed": failed} | columns)
        cells = [f"{columns[key][2]:>13.1e}" if key in columns else f"{'-':>13}" for key in CELLS]
        print(f"{precision:<10}{name:<18}{''.join(cells)}{checks:>9}{failed:>8}", flush=True)

    for precision in flags.precisions:
        first, first_layout, tolerance = None, None, TOLERANCES[precision]
        for name, layout in layouts.items():
            if name in MINUTES and precision != "float64" and not flags.layouts:
                continue
            ranks = run(layout, precision, flags.steps)
            if first is not None and first_layout is not None:
                weights = precision in COMPARES_WEIGHTS
                add(precision, name, compare(first, ranks, (first_layout, layout), tolerance, weights))
                continue
            first, first_layout = ranks, layout
            if precision == "float32":
                single32 = ranks
            if single32 is not None and precision in ("bf16", "fp16"):
                columns = compare(single32, ranks, (layout, layout), tolerance, False)
                add(precision, f"{name} : float32", columns)
        if precision == "fp16":
            for name, layout in layouts.items():
                if not layout.compile and layout.accumulation == 1:
                    ranks = run(layout, precision, 3, overflow_at=1)
                    add(precision, f"{name} : inf", {"overflow": overflow_checks(ranks)})
    checks, failed = (sum(row[key] for row in table) for key in ("checks", "failed"))
    print(f"{checks} checks tried, {failed} failed")
    write_json(flags.json, {"checks": checks, "failed": failed, "tolerances": TOLERANCES, "rows": table})
    return int(failed > 0 or checks == 0)


def chosen_names(flag: str, chosen: tuple[str, ...], names: Any) -> list[str]:
    """Those of `names` that a flag's values choose, in the order of `names`; all where it has none."""
    if unknown := [name for name in chosen if name not in names]:
        raise UserError(f"--{flag}={unknown[0]} is not known; use some of {', '.join(names)}.")
    return [name for name in names if not chosen or name in chosen]


# ----------------------------------------------------------------------------------------------------- speed


@dataclass(frozen=True)
class Row:
    """One way to train. The first six are the reference step, each with one change more; then ours."""

    ours: bool = False
    fused: bool = False
    broadcast: bool = True
    compile: bool = False
    read_back: bool = True
    one_bucket: bool = False
    precision: Literal["no", "bf16"] = "no"


ROWS = {
    "reference": Row(),
    "+fused-adamw": Row(fused=True),
    "+no-broadcast": Row(fused=True, broadcast=False),
    "+compile": Row(fused=True, broadcast=False, compile=True),
    "+losses-on-device": Row(fused=True, broadcast=False, compile=True, read_back=False),
    "+one-all-reduce": Row(fused=True, broadcast=False, compile=True, read_back=False, one_bucket=True),
    "ours": Row(ours=True),
    "ours-compiled": Row(ours=True, compile=True),
    "ours-bf16": Row(ours=True, precision="bf16"),
    "ours-bf16-compiled": Row(ours=True, compile=True, precision="bf16"),
}
DDP_ONLY = ("+no-broadcast", "+one-all-reduce")


@dataclass(frozen=True)
class Speed:
    """Step time, one change per row; the job: batch 8 per rank, one 480x640 camera, paper-size ACT."""

    steps: int = 300
    """Steps of each row, the first of them not measured."""
    warmup: int = 50
    """Steps of each row that are not measured."""
    batch_size: int = 8
    """Samples per rank and step."""
    rows: tuple[str, ...] = ()
    """Some of reference, +fused-adamw, +no-broadcast, +compile, +losses-on-device, +one-all-reduce, ours,
    ours-compiled, ours-bf16, ours-bf16-compiled. None named: all that the launch can tell apart."""
    size: Literal["paper", "small"] = "paper"
    """small: a small policy on small images, to try the command."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""
    threads: int | None = None
    """Threads of the CPU. None: as torch found them."""
    num_workers: int = 4
    """Loader processes per rank, for each of the two loaders (float images, and ours)."""
    tf32: bool = True
    """TensorFloat-32 on CUDA, as in the job of the record; for all rows."""
    own_process: bool = True
    """One rank without a GPU: each row has a process of its own, and they take turns. So what a row sets (our
    step lets glibc keep freed memory, LeRobot's does not) or leaves in memory does not reach the next."""
    dataset: data.DatasetConfig = field(default_factory=data.DatasetConfig)
    json: str | None = None
    """File that the table is written to."""


class FloatImages(data.TrainBatches):
    """The same batches with images as LeRobot's loader gives them: float32 in [0, 1]."""

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        return plain_act.normalized(super().__getitem__(step), {})


class ReferencePolicy(nn.Module):
    """The loss of a normalised batch, and its terms; parameters are called as in model_act.ACTPolicy."""

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.model = plain_act.PlainACT(*args)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, l1_loss, kld_loss = self.model.loss(batch)
        return loss, {"l1_loss": l1_loss.detach(), "kld_loss": kld_loss.detach()}


class ReferenceStep:
    """One training step as LeRobot's loop does it, on a raw batch. It returns the loss, or NaN if unread."""

    def __init__(
        self,
        config: model_act.ACTConfig,
        inputs: dict[str, dict],
        outputs: dict[str, dict],
        stats: dict[str, dict[str, Tensor]] | None,
        cluster: dist.Cluster | None = None,
        row: Row = Row(),
    ) -> None:
        policy, device = ReferencePolicy(config, inputs, outputs).train(), torch.device("cpu")
        self.module: nn.Module = policy
        self.model, self.row = policy.model, row
        if cluster is not None:
            device = cluster.device
            if row.compile:
                mode = "reduce-overhead" if device.type == "cuda" else "default"
                self.model.compile(mode=mode, dynamic=False)
            # Accelerate's DDP as LeRobot configures it; the options of ours for the last row.
            lerobots = dist.DDPConfig(
                bucket_cap_mb=25,
                broadcast_buffers=row.broadcast,
                gradient_as_bucket_view=False,
                find_unused_parameters=True,
            )
            self.module = dist.parallelize(policy, cluster, dist.DDPConfig() if row.one_bucket else lerobots)
        self.stats = {}
        for key, entry in (stats or {}).items():
            if key != model_act.ENV_STATE:
                self.stats[key] = {name: torch.as_tensor(value).to(device) for name, value in entry.items()}
        groups: list[dict[str, Any]] = [
            {"params": [], "lr": config.optimizer_lr},
            {"params": [], "lr": config.optimizer_lr_backbone},
        ]
        for name, parameter in policy.named_parameters():
            groups[name.startswith("model.backbone")]["params"].append(parameter)
        self.optimizer = torch.optim.AdamW(
            groups, weight_decay=config.optimizer_weight_decay, fused=row.fused or None
        )

    def __call__(self, batch: dict[str, Tensor]) -> float:
        torch.compiler.cudagraph_mark_step_begin()
        loss, loss_terms = self.module(plain_act.normalized(batch, self.stats))
        if self.row.read_back:
            for term in loss_terms.values():
                term.item()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 10.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if not self.row.read_back:
            return math.nan
        norm.item()
        return loss.item()


class OurStep:
    """train.py's own step, with what it needs."""

    def __init__(
        self, row: Row, cfg: train.Config, cluster: dist.Cluster, policy: model_act.ACTPolicy
    ) -> None:
        self.cfg, self.cluster = replace(cfg, compile=row.compile, mixed_precision=row.precision), cluster
        self.learner, self.sums = train.prepare(self.cfg, cluster, policy), dist.MetricSums(cluster)
        self.learner.module.train()
        self.done = 0

    def __call__(self, batch: dict[str, Tensor]) -> None:
        window = range(self.done, self.done + 1)
        train.train_step(self.cfg, self.cluster, self.learner, batch, window, self.done, self.sums)
        self.done += 1


class Runner:
    """A row's step and the batches that it is fed with."""

    def __init__(
        self,
        row: Row,
        cfg: train.Config,
        cluster: dist.Cluster,
        policy: model_act.ACTPolicy,
        loader: data.DeviceBatches,
    ) -> None:
        self.loader, self.cuda = loader, cluster.device.type == "cuda"
        config, stats = policy.config, policy.stats or {}
        features = (policy.input_features, policy.output_features)
        self.step: Callable
        if row.ours:
            own = model_act.ACTPolicy(config, *features, stats)
            own.load_state_dict(policy.state_dict())
            self.step = OurStep(row, cfg, cluster, own)
        else:
            self.step = ReferenceStep(config, *features, stats, cluster, row)
            self.step.model.load_state_dict(policy.model.state_dict())  # strict: the names are the same


class RowProcess:
    """A row in a process of its own that measures when it is told to; the others wait meanwhile."""

    def __init__(self, flags: Speed, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve_row, args=(flags, name, theirs))
        self.process.start()
        theirs.close()

    def __call__(self, steps: int) -> Any:
        self.pipe.send(steps)
        return self.receive()

    def receive(self) -> Any:
        try:
            succeeded, result = self.pipe.recv()
        except EOFError:
            code = self.process.exitcode
            raise RuntimeError(f"the process of a row died (exit code {code}); see above.") from None
        if not succeeded:
            raise RuntimeError(f"a row failed:\n{result}")
        return result

    def close(self) -> None:
        self.pipe.close()  # which ends serve_row
        self.process.join()


def serve_row(flags: Speed, name: str, pipe: Any) -> None:
    """Warms the row up, sends what was seen, then measures as many steps as each message says."""
    try:
        _, build_row, _ = rows_of(flags, [name], keep_memory=ROWS[name].ours)
        runner, seen = build_row(name)
        pipe.send((True, seen))
        while True:
            pipe.send((True, measure(runner, pipe.recv())))
    except EOFError:
        pass  # the table is complete
    except Exception:
        pipe.send((False, traceback.format_exc()))


def rows_of(flags: Speed, names: list[str], keep_memory: bool) -> tuple[dist.Cluster, Callable, int]:
    """The cluster, a function that builds and warms up a row, and the operations of the reference's step."""
    if flags.threads is not None:
        torch.set_num_threads(flags.threads)
    cfg = train.PRESETS["aloha" if flags.size == "paper" else "demo"]
    cfg = replace(cfg, batch_size=flags.batch_size, num_workers=flags.num_workers, device=flags.device)
    cfg = replace(cfg, sim=replace(cfg.sim, episodes=5))
    size = flags.dataset.image_size or (cfg.dataset.image_size if flags.dataset.root is None else None)
    policy_flags = replace(cfg.policy, pretrained_backbone_weights=None, dropout=0.1)
    cfg = replace(cfg, dataset=replace(flags.dataset, image_size=size), policy=policy_flags)
    cluster = dist.start(cfg.device)
    dist.set_process(flags.tf32, keep_memory, compiled=any(ROWS[name].compile for name in names))
    train_set, _, policy, _ = train.build(cfg, cluster, None)
    total = len(names) * (flags.steps + 3)

    @functools.cache
    def loader_of(ours: bool) -> data.DeviceBatches:
        order = (cfg.seed, cfg.batch_size, cluster.rank, cluster.world_size, 1, total)
        batches = data.TrainBatches(train_set, *order) if ours else FloatImages(train_set, *order)
        return data.to_device(assembly.make_loader(cfg, cluster, batches), cluster.device)

    def build_row(name: str) -> tuple[Runner, dict[str, float]]:
        before = memory(cluster.device, reset=True)
        runner = Runner(ROWS[name], cfg, cluster, policy, loader_of(ROWS[name].ours))
        first = measure(runner, 1)[0][0]
        measure(runner, flags.warmup - 1)
        seen = {"first_s": first, "memory_gb": (memory(cluster.device) - before) / 1e9}
        return runner, seen | {"launches": launches(runner)}

    return cluster, build_row, operations(policy, cfg.batch_size)


def speed(flags: Speed) -> int:
    """The table. Collective under torchrun: rank 0 prints, times are the slowest rank's."""
    if not 0 < flags.warmup < flags.steps:
        raise UserError(
            f"--steps={flags.steps} must be more than --warmup={flags.warmup}, which is at least 1."
        )
    chosen = chosen_names("rows", flags.rows, ROWS)
    cluster, build_row, count = rows_of(flags, chosen, keep_memory=True)
    if cluster.world_size == 1 and not flags.rows:
        chosen = [name for name in chosen if name not in DDP_ONLY]
    rates = matmul_rates(cluster.device)
    apart = flags.own_process and cluster.world_size == 1 and cluster.device.type == "cpu"
    turns: dict[str, Callable] = {}  # row -> a function that measures the given number of steps
    table: dict[str, dict[str, Any]] = {}
    try:
        for name in chosen:  # one after the other, so that each one's own memory is seen
            if apart:
                turns[name] = process = RowProcess(flags, name)
                table[name] = process.receive()
            else:
                runner, table[name] = build_row(name)
                turns[name] = functools.partial(measure, runner)
        times: dict[str, list[float]] = {name: [] for name in chosen}
        waits: dict[str, list[float]] = {name: [] for name in chosen}
        for block in blocks(flags.steps - flags.warmup):  # in turns: a drift of the machine hits all alike
            for name in chosen:
                seconds, waited = turns[name](block)
                times[name] += slowest(cluster, seconds)
                waits[name] += waited
    finally:
        for turn in turns.values():
            if isinstance(turn, RowProcess):
                turn.close()
    for name, row in table.items():
        floor = count / rates["bf16" if ROWS[name].precision == "bf16" else "float32"]
        row |= summary(times[name], floor) | {"data": sum(waits[name]) / sum(times[name])}
        row |= {"to_reference": row["median_s"] / table[chosen[0]]["median_s"]}
    if cluster.is_main:
        print_speed(flags, cluster, table, count, rates)
        content = {**machine(cluster), "operations": count, "rates": rates, "rows": table}
        write_json(flags.json, content | {"flags": asdict(flags)})
    dist.finish(cluster)
    return 0


def summary(times: list[float], floor_s: float) -> dict[str, float]:
    """Of a row's step times, beside the time that its operations take at the rate of matrix products."""
    median, tenth, ninetieth = times[0], times[0], times[0]
    if len(times) > 1:
        deciles = statistics.quantiles(times, n=10, method="inclusive")
        median, tenth, ninetieth = statistics.median(times), deciles[0], deciles[8]
    row = {"median_s": median, "p10_s": tenth, "p90_s": ninetieth, "worst_s": max(times)}
    return row | {"floor_s": floor_s, "to_floor": median / floor_s}


def print_speed(
    flags: Speed, cluster: dist.Cluster, table: dict, count: float, rates: dict[str, float]
) -> None:
    for key, value in machine(cluster).items():
        print(f"{key}: {value}")
    print(
        f"job: batch {flags.batch_size} per rank, {cluster.world_size} ranks, {flags.size} policy, "
        f"steps {flags.warmup + 1} to {flags.steps}"
    )
    print(f"floor: {count / 1e9:.1f} GFLOP per step (the reference's), over the rate of matrix products:")
    for kind, rate in rates.items():
        print(f"  {kind}: {rate / 1e9:.1f} GFLOP/s, {count / rate * 1e3:.2f} ms")
    heads = ["median ms", "p10", "p90", "worst", "first s", "memory GB", "launches", "data"]
    heads += ["x reference", "x floor"]
    print(f"{'row':<20}" + "".join(f"{head:>12}" for head in heads))
    for name, row in table.items():
        cells = [f"{row[key] * 1e3:.2f}" for key in ("median_s", "p10_s", "p90_s", "worst_s")]
        cells += [f"{row['first_s']:.1f}", f"{row['memory_gb']:.2f}", f"{row['launches']:.0f}"]
        cells += [f"{row['data']:.1%}", f"{row['to_reference']:.3f}", f"{row['to_floor']:.3f}"]
        print(f"{name:<20}" + "".join(f"{cell:>12}" for cell in cells))


def measure(runner: Runner, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, its data included, and those spent waiting for data. No step is waited for."""

    def mark() -> Any:
        if not runner.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    if runner.cuda:
        torch.cuda.synchronize()
    marks, waited = [mark()], []
    for _ in range(steps):
        before = runner.loader.waited_s
        runner.step(next(runner.loader))
        waited.append(runner.loader.waited_s - before)
        marks.append(mark())
    if runner.cuda:
        torch.cuda.synchronize()
    pairs = itertools.pairwise(marks)
    return [a.elapsed_time(b) / 1e3 if runner.cuda else b - a for a, b in pairs], waited


def blocks(steps: int) -> Iterator[int]:
    """Lengths of a row's turns: about eight turns of at most 50 steps."""
    length = max(1, min(50, steps // 8))
    while steps > 0:
        yield min(length, steps)
        steps -= length


def slowest(cluster: dist.Cluster, seconds: list[float]) -> list[float]:
    """Collective: each step's time on the slowest rank."""
    every: list[Any] = [seconds]
    if cluster.world_size > 1:
        every = [None] * cluster.world_size
        torch.distributed.all_gather_object(every, seconds)
    return [max(step) for step in zip(*every)]


def launches(runner: Runner) -> float:
    """Kernels and graphs that the host launches per step; on a CPU, operators that it calls."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if runner.cuda:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profile:
        measure(runner, 2)
    events = list(profile.events())
    if runner.cuda:
        return sum("LaunchKernel" in e.name or "GraphLaunch" in e.name for e in events) / 2
    calls = [e for e in events if e.name.startswith("aten::")]
    return sum(e.cpu_parent is None or not e.cpu_parent.name.startswith("aten::") for e in calls) / 2


def memory(device: torch.device, reset: bool = False) -> int:
    """Peak bytes since the last reset, allocated on the GPU or resident on a CPU; at a reset, those now."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated()
    try:
        if reset:
            libc = ctypes.CDLL(None)
            if hasattr(libc, "malloc_trim"):
                libc.malloc_trim(0)  # else this row seems not to need what the one before has left
            Path("/proc/self/clear_refs").write_text("5")
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def operations(policy: model_act.ACTPolicy, batch_size: int) -> int:
    """Floating-point operations of the reference's forward and backward, counted without computing."""
    with torch.device("meta"):
        reference = ReferencePolicy(policy.config, policy.input_features, policy.output_features).train()
        chunk = [policy.config.chunk_size, *policy.output_features["action"]["shape"]]
        features = policy.input_features | {"action": {"shape": chunk}}
        batch = {key: torch.zeros(batch_size, *feature["shape"]) for key, feature in features.items()}
        batch["action_is_pad"] = torch.zeros(batch_size, policy.config.chunk_size, dtype=torch.bool)
        with FlopCounterMode(display=False) as counter:
            reference(batch)[0].backward()
    return counter.get_total_flops()


def matmul_rates(device: torch.device) -> dict[str, float]:
    """Operations per second of a large matrix product, the best of six: what no step can exceed."""
    on_gpu, threads = device.type == "cuda", torch.get_num_threads()
    size, repeats = (8192, 10) if on_gpu else (2048, 1)
    rates: dict[str, float] = {}
    cases = [(kind, threads) for kind in ("float32", "bf16")]
    if not on_gpu:  # beside the floor: what the other number of threads would give
        cases += [(kind, 1 if threads > 1 else os.cpu_count() or 1) for kind in ("float32", "bf16")]
    for kind, used in cases:
        torch.set_num_threads(used)
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
        best = math.inf
        for _ in range(6):
            start = time.perf_counter()
            for _ in range(repeats):
                torch.mm(a, a)
            if on_gpu:
                torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) / repeats)
        rates[kind if used == threads else f"{kind} at {used} threads"] = 2 * size**3 / best
    torch.set_num_threads(threads)
    return rates


def machine(cluster: dist.Cluster | None = None) -> dict[str, str]:
    """What a figure cannot be read without."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    ranks = "" if cluster is None else f", {cluster.world_size} ranks on {cluster.device.type}"
    return {
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used, GPU {gpu}{ranks}",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d"),
    }


def write_json(path: str | None, content: dict[str, Any]) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(content, indent=1) + "\n")


# ---------------------------------------------------------------------------------------- loader, checkpoint


@dataclass(frozen=True)
class Loader:
    """Time to read an item (one camera, a chunk of actions) on one core, for each way to store frames."""

    root: str | None = None
    """A LeRobot dataset. None: one made here, with a 480x640 camera in H.264 and the same one as PNG."""
    frames: int = 240
    """Frames of the dataset that is made here."""
    chunk_size: int = 100
    """Action steps of an item."""
    num_workers: int = 2
    """Processes for the figure of the whole loader."""
    seconds: float = 2.0
    """Time for each figure."""
    json: str | None = None
    """File that the table is written to."""


NEEDED = 8 / 0.013
"""Items per second of a rank that trains a batch of 8 in 13 ms."""


def loader(flags: Loader) -> int:
    torch.set_num_threads(1)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(flags.root) if flags.root else noise.write_dataset(Path(folder) / "set", flags.frames)
        features = json.loads((root / "meta" / "info.json").read_text())["features"]
        for key, feature in features.items():
            if feature["dtype"] in ("video", "image"):
                rows[f"{key} ({feature['dtype']})"] = loader_row(flags, root, key, feature["dtype"], folder)
    for name, value in machine().items():
        print(f"{name}: {value}")
    for name, row in rows.items():
        print(f"{name}:\n  {row['warm_ms']:.3f} ms per item from the warm cache")
        print(f"  {row['direct_ms']:.2f} ms per item decoded on demand")
        if "direct_to_one_image" in row:
            print(f"  decoded is {row['direct_to_one_image']:.2f} times the decoding of one image alone")
        built, loaded = row["build_frames_per_s"], row["loader_items_per_s"]
        print(f"  {built:.0f} frames/s into the cache", end="; ")
        print(f"the loader gives {loaded:.0f} items/s with {flags.num_workers} workers")
        for way in ("warm", "direct"):
            cores, workers = NEEDED * row[f"{way}_ms"] / 1e3, row[f"workers_a_rank_at_13_ms_{way}"]
            print(f"  batch 8 in 13 ms: {NEEDED:.0f} items/s = {cores:.2f} cores ({way})", end=", ")
            print(f"{workers} workers per rank; 8 GPUs: {8 * NEEDED:.0f} items/s")
    write_json(flags.json, {**machine(), "rows": rows, "items_per_s_needed": NEEDED})
    return 0


def loader_row(flags: Loader, root: Path, key: str, kind: str, folder: str) -> dict[str, float]:
    """The figures of one camera."""
    cfg = data.DatasetConfig(str(root), image_keys=(key,), cache="off", cache_dir=f"{folder}/cache")
    # The videos are scanned at the first opening, and only then: the time to build the cache is without it.
    direct, _, _ = datasets.open_dataset(cfg, flags.chunk_size)
    start = time.perf_counter()
    datasets.open_dataset(replace(cfg, cache="disk"), flags.chunk_size)
    built = time.perf_counter() - start
    warm, _, _ = datasets.open_dataset(replace(cfg, cache="disk"), flags.chunk_size)
    row = {"warm_ms": seconds_per_item(warm, flags.seconds) * 1e3}
    row |= {"direct_ms": seconds_per_item(direct, flags.seconds) * 1e3}
    row |= {"build_frames_per_s": len(warm) / built, "loader_items_per_s": items_per_s(warm, flags)}
    if kind == "image":
        row["one_image_ms"] = seconds_per_image(root, key, flags.seconds) * 1e3
        row["direct_to_one_image"] = row["direct_ms"] / row["one_image_ms"]
    for way in ("warm", "direct"):
        row[f"workers_a_rank_at_13_ms_{way}"] = math.ceil(NEEDED * row[f"{way}_ms"] / 1e3)
    return row


def seconds_per_item(dataset: data.EpisodeDataset, seconds: float) -> float:
    """Of batches of 8 in the order of a run, prepared in this process."""
    batches = data.TrainBatches(dataset, 0, 8, 0, 1, 1, 2**40)
    for step in range(3):
        batches[step]
    start, step = time.perf_counter(), 3
    while time.perf_counter() < start + seconds:
        batches[step]
        step += 1
    return (time.perf_counter() - start) / ((step - 3) * 8)


def items_per_s(dataset: data.EpisodeDataset, flags: Loader) -> float:
    """Of the whole loader, once its workers run."""
    batches = iter(data.make_loader(data.TrainBatches(dataset, 0, 8, 0, 1, 1, 2**40), flags.num_workers))
    for _ in range(2 + 2 * flags.num_workers):
        next(batches)
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + flags.seconds:
        next(batches)
        count += 8
    return count / (time.perf_counter() - start)


def seconds_per_image(root: Path, key: str, seconds: float) -> float:
    """Of decoding alone, from bytes in memory to pixels, of the first file's images in turn."""
    import pyarrow.parquet

    path = sorted((root / "data").rglob("*.parquet"))[0]
    images = [row["bytes"] for row in pyarrow.parquet.read_table(path, columns=[key])[key].to_pylist()[:64]]
    encoded = [torch.frombuffer(bytearray(image), dtype=torch.uint8) for image in images]
    start, count = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        torchvision.io.decode_image(encoded[count % len(encoded)])
        count += 1
    return (time.perf_counter() - start) / count


@dataclass(frozen=True)
class Checkpoint:
    """Seconds to save and to load a checkpoint with its optimizer, and those that training is held up."""

    size: Literal["paper", "small"] = "paper"
    """Which policy: the paper's, or that of the demo preset."""
    directory: str | None = None
    """Where the checkpoints are written (and removed). None: the system's temporary directory."""
    json: str | None = None
    """File that the table is written to."""


def checkpoint(flags: Checkpoint) -> int:
    cases = [(1, "safetensors"), (2, "safetensors"), (2, "dcp"), (2, "safetensors_dcp")]
    for name, value in machine().items():
        print(f"{name}: {value}")
    print(f"{'layout':<12}{'format':<18}{'':<8}{'held up s':>10}{'on disk s':>10}{'load s':>10}{'GB':>8}")
    table = []
    for world_size, format in cases:
        with tempfile.TemporaryDirectory(dir=flags.directory) as folder:
            ranks = run_ranks(world_size, save_and_load, format, flags.size, folder, deadline_s=900)
        layout = "1 process" if world_size == 1 else f"fsdp {world_size}"
        for mode in ranks[0]:
            row = {key: max(rank[mode][key] for rank in ranks) for key in ranks[0][mode]}
            table.append(row | {"layout": layout, "format": format, "mode": mode})
            cells = [f"{row[key]:>10.2f}" for key in ("held_up_s", "on_disk_s", "load_s")]
            cells.append(f"{row['bytes'] / 1e9:>8.2f}")
            print(f"{layout:<12}{format:<18}{mode:<8}{''.join(cells)}", flush=True)
    write_json(flags.json, {**machine(), "rows": table})
    return 0


def save_and_load(
    rank: int, world_size: int, format: ckpt.CheckpointFormat, size: str, folder: str
) -> dict[str, dict]:
    """Collective: one rank's seconds for a save in the foreground and for one in the background."""
    cfg = train.PRESETS["aloha" if size == "paper" else "demo"]
    cfg = replace(cfg, device="cpu", parallelism=dist.ParallelismConfig(1, world_size))
    cluster = dist.start(cfg.device, cfg.parallelism)
    inputs = {
        data.STATE: {"type": "STATE", "shape": [noise.ACTION_DIM]},
        "observation.images.top": {"type": "VISUAL", "shape": [3, 480, 640]},
    }
    outputs = {data.ACTION: {"type": "ACTION", "shape": [noise.ACTION_DIM]}}
    policy = model_act.ACTPolicy(act_config(cfg.policy), inputs, outputs)
    optimizer = train.prepare(cfg, cluster, policy).optimizer
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    results: dict[str, dict] = {}
    for step, (mode, in_background) in enumerate((("sync", False), ("async", True)), 1):
        writer = ckpt.CheckpointWriter(
            folder, checkpoint_format=format, async_save=in_background, sharded=cluster.sharded
        )
        start = time.perf_counter()
        held_up = writer.save(step, policy, optimizer)
        writer.wait()
        on_disk = time.perf_counter() - start
        dist.any_rank(cluster, False)  # nobody reads before all have written
        source, start = writer.checkpoints / f"{step:06d}", time.perf_counter()
        ckpt.load_weights(source, policy, resume=True)
        ckpt.load_training_state(source, policy, optimizer)
        results[mode] = {"held_up_s": held_up, "on_disk_s": on_disk, "load_s": time.perf_counter() - start}
        results[mode]["bytes"] = sum(f.stat().st_size for f in source.rglob("*") if f.is_file())
        dist.any_rank(cluster, False)  # nor deletes before all have read
        if cluster.is_main:
            shutil.rmtree(source)
    return results


COMMANDS: dict[str, tuple[type, Callable]] = {
    "equality": (Equality, equality),
    "speed": (Speed, speed),
    "loader": (Loader, loader),
    "checkpoint": (Checkpoint, checkpoint),
}


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Returns its exit code; an error for the user is one sentence on stderr and 1."""
    kinds: dict[str, Callable] = {name: kind for name, (kind, _) in COMMANDS.items()}
    about = (__doc__ or "").split("\n\n")[0]
    flags: Any = tyro.extras.subcommand_cli_from_dict(kinds, args=argv, description=about)
    command = next(command for kind, command in COMMANDS.values() if isinstance(flags, kind))
    try:
        return command(flags)
    except ValueError as error:
        if not is_user_error(error):
            raise
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
