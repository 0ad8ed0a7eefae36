"""How fast the trainer is on this machine, and whether every layout trains the same: four tables.

    python bench.py equality      one curve on every layout: checks tried, checks failed; exit code 1 if any
    python bench.py speed         step time, one change a row, from LeRobot's to ours; also under torchrun
    python bench.py loader        samples/s from the frame cache, from the decoder, from images in parquet
    python bench.py checkpoint    save and load times, and how long a save holds up the training

--json FILE writes a table's content. What is measured is train.py's own construction and step, beside a step
from public torch modules (`ReferencePolicy`), which is also what tests compare the policy with.
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
import socket
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
import torch.nn.functional as F
import torchvision
import tyro
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.ops.misc import FrozenBatchNorm2d

import ckpt
import data
import dist
import model_act
import train

# ------------------------------------------------------------------------------------------------- reference


class ReferencePolicy(nn.Module):
    """ACT as LeRobot trains it, from public modules: attention that returns its weights, one pass of the
    backbone a camera, float images, dropout modules. Takes a normalised batch; ACTPolicy's parameter names.

    Source: lerobot 0.6, policies/act/modeling_act.py.
    """

    def __init__(
        self, config: model_act.ACTConfig, inputs: dict[str, dict], outputs: dict[str, dict]
    ) -> None:
        super().__init__()
        self.model = ReferenceACT(config, inputs, outputs)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        loss, l1, kld = self.model.loss(batch)
        return loss, {"l1_loss": l1.detach(), "kld_loss": kld.detach()}


class ReferenceACT(nn.Module):
    def __init__(self, c: model_act.ACTConfig, inputs: dict[str, dict], outputs: dict[str, dict]) -> None:
        super().__init__()
        self.config, dim, action_dim = c, c.dim_model, outputs["action"]["shape"][0]
        self.cameras = [key for key, f in inputs.items() if f["type"] == "VISUAL"]
        widths = {key: f["shape"][0] for key, f in inputs.items() if f["type"] != "VISUAL"}
        self.state_width, self.env_width = widths.get(model_act.STATE), widths.get(model_act.ENV_STATE)
        if c.use_vae:
            self.vae_encoder = ReferenceStack(c, c.n_vae_encoder_layers, False)
            self.vae_encoder_cls_embed = nn.Embedding(1, dim)
            if self.state_width:
                self.vae_encoder_robot_state_input_proj = nn.Linear(self.state_width, dim)
            self.vae_encoder_action_input_proj = nn.Linear(action_dim, dim)
            self.vae_encoder_latent_output_proj = nn.Linear(dim, c.latent_dim * 2)
            tokens = 1 + (self.state_width is not None) + c.chunk_size  # the table comes with the weights
            self.vae_encoder_pos_enc: Tensor
            self.register_buffer("vae_encoder_pos_enc", torch.zeros(1, tokens, dim))
        if self.cameras:
            net = getattr(torchvision.models, c.vision_backbone)(
                weights=None, norm_layer=FrozenBatchNorm2d,
                replace_stride_with_dilation=[False, False, c.replace_final_stride_with_dilation],
            )  # fmt: skip
            self.backbone = IntermediateLayerGetter(net, {"layer4": "features"})
        self.encoder = ReferenceStack(c, c.n_encoder_layers, False)
        self.decoder = ReferenceStack(c, c.n_decoder_layers, True)
        if self.state_width:
            self.encoder_robot_state_input_proj = nn.Linear(self.state_width, dim)
        if self.env_width:
            self.encoder_env_state_input_proj = nn.Linear(self.env_width, dim)
        self.encoder_latent_input_proj = nn.Linear(c.latent_dim, dim)
        if self.cameras:
            self.encoder_img_feat_input_proj = nn.Conv2d(net.fc.in_features, dim, kernel_size=1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + len(widths), dim)
        self.decoder_pos_embed = nn.Embedding(c.chunk_size, dim)
        self.action_head = nn.Linear(dim, action_dim)

    def forward(
        self, batch: dict[str, Tensor], noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Actions (B, S, A); mean and log variance of the latent (B, L); `noise` (B, L) is drawn if None."""
        c, weight, mu, log_sigma_x2 = self.config, self.action_head.weight, None, None
        size = len(next(iter(batch.values())))
        latent = weight.new_zeros(size, c.latent_dim)
        if c.use_vae and self.training:  # sequences are (tokens, B, D)
            tokens = [self.vae_encoder_cls_embed.weight[None].repeat(size, 1, 1)]
            if self.state_width:
                tokens.append(self.vae_encoder_robot_state_input_proj(batch[model_act.STATE])[:, None])
            seen = torch.zeros(size, len(tokens), dtype=torch.bool, device=weight.device)
            tokens.append(self.vae_encoder_action_input_proj(batch["action"]))
            pad = torch.cat([seen, batch["action_is_pad"]], 1)
            positions = self.vae_encoder_pos_enc.transpose(0, 1)
            encoded = self.vae_encoder(torch.cat(tokens, 1).transpose(0, 1), positions, pad)
            mu, log_sigma_x2 = self.vae_encoder_latent_output_proj(encoded[0]).split(c.latent_dim, dim=1)
            latent = mu + log_sigma_x2.div(2).exp() * (torch.randn_like(mu) if noise is None else noise)
        rows = [self.encoder_latent_input_proj(latent)]
        if self.state_width:
            rows.append(self.encoder_robot_state_input_proj(batch[model_act.STATE]))
        if self.env_width:
            rows.append(self.encoder_env_state_input_proj(batch[model_act.ENV_STATE]))
        places = list(self.encoder_1d_feature_pos_embed.weight[:, None])
        for camera in self.cameras:
            features = self.backbone(batch[camera])["features"]  # (B, C, h, w)
            places += list(camera_positions(features, c.dim_model // 2).flatten(2).permute(2, 0, 1))
            rows += list(self.encoder_img_feat_input_proj(features).flatten(2).permute(2, 0, 1))
        positions = torch.stack(places)
        encoded = self.encoder(torch.stack(rows), positions)
        blank = torch.zeros(c.chunk_size, size, c.dim_model, dtype=encoded.dtype, device=weight.device)
        decoded = self.decoder(blank, self.decoder_pos_embed.weight[:, None], None, encoded, positions)
        return self.action_head(decoded.transpose(0, 1)), mu, log_sigma_x2

    def loss(self, batch: dict[str, Tensor], noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """LeRobot's loss, its L1 and its KL (0 without one)."""
        actions, mu, log_sigma_x2 = self(batch, noise)
        valid = ~batch["action_is_pad"][..., None]
        error = (actions - batch["action"]).abs() * valid
        l1 = error.sum() / (valid.sum() * actions.shape[-1]).clamp_min(1)
        if mu is None or log_sigma_x2 is None:
            return l1, l1, torch.zeros_like(l1)
        kld = (-0.5 * (1 + log_sigma_x2 - mu.pow(2) - log_sigma_x2.exp())).sum(-1).mean()
        return l1 + kld * self.config.kl_weight, l1, kld


class ReferenceStack(nn.Module):
    def __init__(self, c: model_act.ACTConfig, count: int, decodes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ReferenceLayer(c, decodes) for _ in range(count))
        self.norm = nn.LayerNorm(c.dim_model) if c.pre_norm or decodes else nn.Identity()

    def forward(self, x, positions, pad=None, encoded=None, encoded_positions=None) -> Tensor:
        for layer in self.layers:
            x = layer(x, positions, pad, encoded, encoded_positions)
        return self.norm(x)


class ReferenceLayer(nn.Module):
    def __init__(self, c: model_act.ACTConfig, decodes: bool) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(c.dim_model, c.n_heads, dropout=c.dropout)
        if decodes:
            self.multihead_attn = nn.MultiheadAttention(c.dim_model, c.n_heads, dropout=c.dropout)
        self.activation, self.pre_norm = getattr(F, c.feedforward_activation), c.pre_norm
        self.linear1 = nn.Linear(c.dim_model, c.dim_feedforward)
        self.linear2 = nn.Linear(c.dim_feedforward, c.dim_model)
        self.dropout = nn.Dropout(c.dropout)
        for number in range(1, 4 if decodes else 3):
            self.add_module(f"norm{number}", nn.LayerNorm(c.dim_model))
            self.add_module(f"dropout{number}", nn.Dropout(c.dropout))

    def forward(self, x, positions, pad, encoded, encoded_positions) -> Tensor:
        def attend_self(v: Tensor) -> Tensor:
            query = v + positions
            return self.self_attn(query, query, v, key_padding_mask=pad)[0]

        def attend_encoded(v: Tensor) -> Tensor:
            return self.multihead_attn(v + positions, encoded + encoded_positions, encoded)[0]

        def feedforward(v: Tensor) -> Tensor:
            return self.linear2(self.dropout(self.activation(self.linear1(v))))

        blocks = [attend_self, *([attend_encoded] if encoded is not None else []), feedforward]
        for number, block in enumerate(blocks, 1):
            norm, dropout = self.get_submodule(f"norm{number}"), self.get_submodule(f"dropout{number}")
            x = x + dropout(block(norm(x) if self.pre_norm else x))
            x = x if self.pre_norm else norm(x)
        return x


def camera_positions(features: Tensor, dim: int) -> Tensor:
    """(1, 2 * dim, h, w), computed in each forward, as there."""
    ones = torch.ones_like(features[0, :1])  # (1, h, w)
    frequency = 10000 ** (2 * (torch.arange(dim, dtype=torch.float32, device=ones.device) // 2) / dim)
    waves = []
    for axis in (1, 2):
        place = ones.cumsum(axis, dtype=torch.float32)
        place = place / (place.amax(axis, keepdim=True) + 1e-6) * (2 * math.pi)
        angle = place[..., None] / frequency
        waves.append(torch.stack([angle[..., 0::2].sin(), angle[..., 1::2].cos()], -1).flatten(3))
    return torch.cat(waves, 3).permute(0, 3, 1, 2).to(features.dtype)


def normalized(batch: dict[str, Tensor], stats: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """(x - mean) / (std + 1e-8) on every feature, as LeRobot's preprocessor; uint8 is scaled first."""
    out = {key: value.float() / 255 if value.dtype == torch.uint8 else value for key, value in batch.items()}
    return out | {k: (out[k] - s["mean"]) / (s["std"] + 1e-8) for k, s in stats.items() if k in out}


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


class NoiseFrames:
    """Frames of noise that depend on their number alone."""

    def __init__(self, count: int, height: int, width: int) -> None:
        self.count, self.shape = count, (height, width)

    def __len__(self) -> int:
        return self.count

    def get(self, row: int) -> np.ndarray:
        return np.random.default_rng(row).integers(0, 256, (*self.shape, 3), dtype=np.uint8)

    def cache_key(self) -> str:
        return f"noise-{self.count}-{self.shape}"


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
        device=device, compile=layout.compile, gradient_accumulation_steps=layout.accumulation,  # type: ignore[arg-type]
        mixed_precision=precision if precision in ("bf16", "fp16") else "no",  # type: ignore[arg-type]
        parallelism=dist.ParallelismConfig(layout.world_size // layout.dp_shard, layout.dp_shard),
        policy=train.PolicyFlags(
            pretrained_backbone_weights=None, dim_model=64, n_heads=4, dim_feedforward=256,
            n_encoder_layers=2, n_vae_encoder_layers=2, latent_dim=8, dropout=0.1,
        ),
    )  # fmt: skip
    lengths, rng = [230, 60, 310, 90, 140], np.random.default_rng(0)
    count = sum(lengths)
    keys = (data.ACTION, data.STATE, *([] if camera else [data.ENV_STATE]))
    columns = {key: rng.normal(size=(count, 14)).astype(np.float32) for key in keys}
    cameras = {"observation.images.top": NoiseFrames(count, 48, 64)} if camera else {}
    flags, chunk_size = replace(cfg.dataset, cache="off"), cfg.policy.chunk_size
    train_set, _ = data.open_columns(flags, chunk_size, columns, lengths, 50, cameras)
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
    dist.set_numerics(tf32=False)
    policy = train.build_policy(cfg, train_set, None)
    if precision == "float64":
        policy.double()
    parts = train.prepare(cfg, cluster, policy)
    if parts.scaler is not None:
        parts.scaler.scale.fill_(
            2.0**10
        )  # below any overflow of this job: which updates are skipped is tested apart
    batches = data.TrainBatches(
        train_set, cfg.seed, cfg.batch_size, cluster.rank, cluster.world_size, layout.accumulation, cfg.steps
    )
    loader = data.to_device(data.make_loader(batches, num_workers=0), cluster.device)
    sums = dist.MetricSums(cluster)
    parts.module.train()
    out: dict[str, Any] = {"rows": [], "ids": [], "digests": [], "scales": [], "weights": None}
    for step in batches.steps:
        batch, window = next(loader), batches.window(step)
        out["ids"].append(batch["index"].tolist())
        if len(out["rows"]) == overflow_at and cluster.rank == cluster.world_size - 1:
            batch[data.STATE][0, 0] = math.inf
        train.train_step(cfg, cluster, parts, batch, window, step, sums)
        if step + 1 == window.stop:
            out["rows"].append(sums.reduce())
            if overflow_at >= 0:
                out["digests"].append(digest({n: dist._local(p) for n, p in parts.policy.named_parameters()}))
                out["scales"].append(parts.scaler.state_dict()["scale"] if parts.scaler else 1.0)
    weights = {name: value.detach().cpu() for name, value in dist.gathered_state_dict(parts.policy).items()}
    out["final"] = digest(weights)
    if rank == 0:
        out["weights"] = {name: value.numpy() for name, value in weights.items()}
    return out


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors.values():
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


Column = tuple[int, int, float]
"""(checks tried, checks failed, worst relative difference)"""


def compare(first: list[dict], other: list[dict], layouts: tuple[Layout, Layout], tolerance: float,
            with_weights: bool) -> dict[str, Column]:  # fmt: skip
    """What the ranks of two layouts recorded, column by column."""
    columns: dict[str, Column] = {}
    for name in METRICS:
        values = [[row[name] for row in ranks[0]["rows"]] for ranks in (first, other)]
        columns[name] = column([relative(a, b) for a, b in zip(*values)], tolerance, len(values[0]))
    ids = [window_ids(ranks, layout) for ranks, layout in zip((first, other), layouts)]
    columns["ids"] = column([float(a != b) for a, b in zip(*ids)], 0, len(ids[0]))
    if with_weights:
        a, b = first[0]["weights"], other[0]["weights"]
        columns["weights"] = column(
            [relative(a[name], b[name]) for name in a if name in b], tolerance, len(a)
        )
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
    windows = [steps[i : i + layout.accumulation] for i in steps[:: layout.accumulation]]
    return [
        [sample for step in window for rank in ranks for sample in rank["ids"][step]] for window in windows
    ]


def overflow_checks(ranks: list[dict]) -> Column:
    """Of a run with an inf at its second of three updates: that one alone is skipped, on all ranks, and
    halves the loss scale."""
    checks = []
    for rank in ranks:
        (before, at, after), scales = rank["digests"], rank["scales"]
        checks += [before == at, at != after, scales == [scales[0], scales[0] / 2, scales[0] / 2],
                   math.isfinite(rank["rows"][2]["loss"])]  # fmt: skip
    return len(checks), checks.count(False), float(False in checks)


def equality(flags: Equality) -> int:
    """The table. Returns the exit code."""
    layouts = {name: LAYOUTS[name] for name in known("layouts", flags.layouts, LAYOUTS)}
    if flags.device == "cuda":
        layouts = {name: layout for name, layout in layouts.items() if layout.world_size == 1}
    print(f"{flags.steps} optimizer steps of {GLOBAL_BATCH} samples on {flags.device}: {', '.join(layouts)}")
    print(f"{'precision':<10}{'layout':<18}" + "".join(f"{name:>13}" for name in (*METRICS, "ids", "weights"))
          + f"{'ranks agree':>13}{'checks':>9}{'failed':>8}   (worst relative difference)")  # fmt: skip
    table: list[dict[str, Any]] = []
    single32 = None

    def run(layout: Layout, precision: str, steps: int, overflow_at: int = -1) -> list[dict]:
        job = (layout, precision, steps, flags.device, flags.camera, overflow_at)
        return run_ranks(layout.world_size, record, *job, deadline_s=flags.deadline_s)

    def add(precision: str, name: str, columns: dict[str, Column]) -> None:
        checks, failed = (sum(c[i] for c in columns.values()) for i in (0, 1))
        table.append({"precision": precision, "layout": name, "checks": checks, "failed": failed} | columns)
        cells = [f"{columns[k][2]:>13.1e}" if k in columns else f"{'-':>13}"
                 for k in (*METRICS, "ids", "weights", "ranks agree")]  # fmt: skip
        print(f"{precision:<10}{name:<18}{''.join(cells)}{checks:>9}{failed:>8}", flush=True)

    for precision in flags.precisions:
        first, tolerance = None, TOLERANCES[precision]
        for name, layout in layouts.items():
            if name in MINUTES and precision != "float64" and not flags.layouts:
                continue
            ranks = run(layout, precision, flags.steps)
            if first is None:
                first, first_layout = ranks, layout
                single32 = ranks if precision == "float32" else single32
                if single32 is not None and precision in ("bf16", "fp16"):
                    columns = compare(single32, ranks, (layout, layout), tolerance, False)
                    add(precision, f"{name} : float32", columns)
                continue
            weights = precision in COMPARES_WEIGHTS
            add(precision, name, compare(first, ranks, (first_layout, layout), tolerance, weights))
        for name, layout in layouts.items() if precision == "fp16" else ():
            if layout.compile or layout.accumulation > 1:
                continue
            add(
                precision,
                f"{name} : inf",
                {"overflow": overflow_checks(run(layout, precision, 3, overflow_at=1))},
            )
    checks, failed = (sum(row[key] for row in table) for key in ("checks", "failed"))
    print(f"{checks} checks tried, {failed} failed")
    write_json(flags.json, {"checks": checks, "failed": failed, "tolerances": TOLERANCES, "rows": table})
    return int(failed > 0 or checks == 0)


def known(flag: str, chosen: tuple[str, ...], names: Any) -> list[str]:
    if unknown := [name for name in chosen if name not in names]:
        raise ValueError(f"--{flag}={unknown[0]} is not known; use some of {', '.join(names)}.")
    return [name for name in names if not chosen or name in chosen]


def run_ranks(world_size: int, function: Callable, *args: Any, deadline_s: float) -> list:
    """function(rank, world_size, *args) in gloo ranks of this machine, one thread each; results by rank.

    Raises:
        RuntimeError: a rank failed (with its traceback), died, or took longer than the deadline.
    """
    context = multiprocessing.get_context("forkserver")  # ranks inherit no thread and no lock of this process
    context.set_forkserver_preload(["torch", "torchvision", "torch.distributed.fsdp", "tyro"])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(function, rank, world_size, port, args, queue), daemon=True)
             for rank in range(world_size)]  # fmt: skip
    for process in ranks:
        process.start()
    results: dict[int, Any] = {}
    end = time.monotonic() + deadline_s
    try:
        while len(results) < world_size:
            if time.monotonic() > end:
                raise RuntimeError(
                    f"{function.__name__}{args}: {world_size} ranks hung for {deadline_s:.0f} s"
                )
            dead = [
                rank for rank, p in enumerate(ranks) if rank not in results and p.exitcode not in (None, 0)
            ]
            try:
                rank, fine, result = queue.get(timeout=1)
            except Exception:
                if dead:
                    raise RuntimeError(f"{function.__name__}{args}: ranks {dead} died") from None
                continue
            if not fine:
                raise RuntimeError(f"{function.__name__}{args}: rank {rank} failed:\n{result}")
            results[rank] = result
    finally:
        for process in ranks:
            process.join(timeout=5 if len(results) == world_size else 0)
            process.kill()
            process.join()  # until then the process object keeps the queue's semaphores
    return [results[rank] for rank in range(world_size)]


def _rank(function: Callable, rank: int, world_size: int, port: int, args: tuple, queue: Any) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    try:
        queue.put((rank, True, function(rank, world_size, *args)))
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
    queue.close()
    queue.join_thread()
    os._exit(0)  # the group's destructor may wait for peers that are gone


# ----------------------------------------------------------------------------------------------------- speed


@dataclass(frozen=True)
class Row:
    """One way to train. The first six are the reference step with one change more each; then our own step."""

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
    """Step time, one change a row; the job: batch 8 a rank, one 480x640 camera, paper-size ACT."""

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
        return normalized(super().__getitem__(step), {})


class ReferenceStep:
    """One training step as LeRobot's loop does it, on a raw batch. Called, it gives the loss, if it may."""

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
        self.module, self.model, self.row = policy, policy.model, row
        if cluster is not None:
            device = cluster.device
            if row.compile:
                mode = "reduce-overhead" if device.type == "cuda" else "default"
                self.model.compile(mode=mode, dynamic=False)
            # Accelerate's DDP as LeRobot configures it; the options of ours for the last row.
            ddp = dist.DDPConfig(
                25, row.broadcast, gradient_as_bucket_view=False, find_unused_parameters=True
            )
            self.module = dist.parallelize(policy, cluster, dist.DDPConfig() if row.one_bucket else ddp)  # type: ignore[assignment]
        self.stats = {key: {name: torch.as_tensor(value).to(device) for name, value in entry.items()}
                      for key, entry in (stats or {}).items() if key != model_act.ENV_STATE}  # fmt: skip
        named = list(policy.named_parameters())
        lrs = {False: config.optimizer_lr, True: config.optimizer_lr_backbone}
        groups = [
            {"params": [p for n, p in named if n.startswith("model.backbone") is backbone], "lr": lr}
            for backbone, lr in lrs.items()
        ]
        self.optimizer = torch.optim.AdamW(
            groups, weight_decay=config.optimizer_weight_decay, fused=row.fused or None
        )

    def __call__(self, batch: dict[str, Tensor]) -> float:
        torch.compiler.cudagraph_mark_step_begin()
        loss, parts = self.module(normalized(batch, self.stats))
        values = [value.item() for value in parts.values()] if self.row.read_back else []
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 10.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        values += [norm.item(), loss.item()] if self.row.read_back else [math.nan]
        return values[-1]


class OurStep:
    """train.py's own step, with what it needs."""

    def __init__(
        self, row: Row, cfg: train.Config, cluster: dist.Cluster, policy: model_act.ACTPolicy
    ) -> None:
        self.cfg, self.cluster = replace(cfg, compile=row.compile, mixed_precision=row.precision), cluster
        self.parts, self.sums = train.prepare(self.cfg, cluster, policy), dist.MetricSums(cluster)
        self.parts.module.train()
        self.done = 0

    def __call__(self, batch: dict[str, Tensor]) -> None:
        window = range(self.done, self.done + 1)
        train.train_step(self.cfg, self.cluster, self.parts, batch, window, self.done, self.sums)
        self.done += 1


class Runner:
    """A row's step and the batches that it is fed with."""

    def __init__(self, row: Row, cfg: train.Config, cluster: dist.Cluster, policy: model_act.ACTPolicy,
                 loader: data.DeviceBatches) -> None:  # fmt: skip
        self.loader, self.cuda = loader, cluster.device.type == "cuda"
        config, inputs, outputs, stats = (
            policy.config,
            policy.input_features,
            policy.output_features,
            policy.stats or {},
        )
        self.step: Callable
        if row.ours:
            own = model_act.ACTPolicy(config, inputs, outputs, stats)
            own.load_state_dict(policy.state_dict())
            self.step = OurStep(row, cfg, cluster, own)
        else:
            self.step = ReferenceStep(config, inputs, outputs, stats, cluster, row)
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
            fine, result = self.pipe.recv()
        except EOFError:
            raise RuntimeError(
                f"the process of a row died (exit code {self.process.exitcode}); see above."
            ) from None
        if not fine:
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
    cfg = replace(cfg, dataset=replace(flags.dataset, image_size=size),
                  policy=replace(cfg.policy, pretrained_backbone_weights=None, dropout=0.1))  # fmt: skip
    cluster = dist.start(cfg.device)
    dist.set_numerics(flags.tf32, keep_memory)
    train_set, _, policy = train.build(cfg, cluster, None)
    total = len(names) * (flags.steps + 3)
    batches = {kind: cls(train_set, cfg.seed, cfg.batch_size, cluster.rank, cluster.world_size, 1, total)
               for kind, cls in ((True, data.TrainBatches), (False, FloatImages))}  # fmt: skip

    @functools.cache
    def loader_of(ours: bool) -> data.DeviceBatches:
        return data.to_device(train.make_loader(cfg, cluster, batches[ours]), cluster.device)

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
        raise ValueError(
            f"--steps={flags.steps} must be more than --warmup={flags.warmup}, which is at least 1."
        )
    chosen = known("rows", flags.rows, ROWS)
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
        deciles = (
            statistics.quantiles(times[name], n=10, method="inclusive")
            if len(times[name]) > 1
            else times[name] * 9
        )
        kind = "bf16" if ROWS[name].precision == "bf16" else "float32"
        floor = count / rates[kind]
        row |= {"median_s": statistics.median(times[name]), "p10_s": deciles[0], "p90_s": deciles[8]}
        row |= {"worst_s": max(times[name]), "data": sum(waits[name]) / sum(times[name]), "floor_s": floor}
        row |= {"to_floor": row["median_s"] / floor}
        row |= {"to_reference": row["median_s"] / table[chosen[0]]["median_s"]}
    if cluster.is_main:
        print_speed(flags, cluster, table, count, rates)
        write_json(flags.json, {**machine(cluster), "operations": count, "rates": rates, "rows": table,
                                "flags": asdict(flags)})  # fmt: skip
    dist.finish(cluster)
    return 0


def print_speed(
    flags: Speed, cluster: dist.Cluster, table: dict, count: float, rates: dict[str, float]
) -> None:
    for key, value in machine(cluster).items():
        print(f"{key}: {value}")
    print(f"job: batch {flags.batch_size} a rank, {cluster.world_size} ranks, {flags.size} policy, "
          f"steps {flags.warmup + 1} to {flags.steps}")  # fmt: skip
    print(
        f"floor: {count / 1e9:.1f} GFLOP a step (the reference's), over the measured rate of matrix products:"
    )
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
    """Kernels and graphs that the host launches in a step; on a CPU, operators that it calls."""
    kinds = [
        torch.profiler.ProfilerActivity.CPU,
        *([torch.profiler.ProfilerActivity.CUDA] if runner.cuda else []),
    ]
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
    """Operations a second of a large matrix product, the best of some: what no step can exceed."""
    size, rates = (8192, {}) if device.type == "cuda" else (2048, {})
    threads = torch.get_num_threads()
    cases = [(kind, threads) for kind in ("float32", "bf16")]
    if device.type == "cpu":  # beside the floor: what the other number of threads would give
        cases += [(kind, 1 if threads > 1 else os.cpu_count() or 1) for kind in ("float32", "bf16")]
    for kind, used in cases:
        torch.set_num_threads(used)
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16 if kind == "bf16" else torch.float32)
        best = math.inf
        for _ in range(6):
            start = time.perf_counter()
            for _ in range(10 if device.type == "cuda" else 1):
                a @ a
            if device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) / (10 if device.type == "cuda" else 1))
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
    """A LeRobot data set. None: one made here, with a 480x640 camera in H.264 and the same one as PNG."""
    frames: int = 240
    """Frames of the data set that is made here."""
    chunk_size: int = 100
    """Action steps of an item."""
    num_workers: int = 2
    """Processes for the figure of the whole loader."""
    seconds: float = 2.0
    """Time for each figure."""
    json: str | None = None
    """File that the table is written to."""


def loader(flags: Loader) -> int:
    torch.set_num_threads(1)
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(flags.root) if flags.root else write_data_set(Path(folder) / "set", flags.frames)
        features = json.loads((root / "meta" / "info.json").read_text())["features"]
        for key, kind in ((k, f["dtype"]) for k, f in features.items() if f["dtype"] in ("video", "image")):
            cfg = data.DatasetConfig(str(root), image_keys=(key,), cache="off", cache_dir=f"{folder}/cache")
            direct, _ = data.open_dataset(cfg, flags.chunk_size)  # scans the videos, which is done once
            start = time.perf_counter()
            data.open_dataset(replace(cfg, cache="disk"), flags.chunk_size)
            built = time.perf_counter() - start
            warm, _ = data.open_dataset(replace(cfg, cache="disk"), flags.chunk_size)
            item_s = seconds_per_item(warm, flags.seconds)
            row = {"warm_ms": item_s * 1e3, "direct_ms": seconds_per_item(direct, flags.seconds) * 1e3}
            row |= {"build_frames_per_s": len(warm) / built, "loader_items_per_s": items_per_s(warm, flags)}
            if kind == "image":
                row["one_image_ms"] = seconds_per_image(root, key, flags.seconds) * 1e3
            rows[f"{key} ({kind})"] = row
    need = 8 / 0.013  # items a second of a rank that trains a batch of 8 in 13 ms
    for name, value in machine().items():
        print(f"{name}: {value}")
    for name, row in rows.items():
        print(f"{name}:\n  {row['warm_ms']:.3f} ms an item from the warm cache")
        print(f"  {row['direct_ms']:.2f} ms an item decoded on demand")
        if "one_image_ms" in row:
            row["direct_to_one_image"] = row["direct_ms"] / row["one_image_ms"]
            print(f"  decoded is {row['direct_to_one_image']:.2f} times the decoding of one image alone")
        print(f"  {row['build_frames_per_s']:.0f} frames/s into the cache; the loader gives "
              f"{row['loader_items_per_s']:.0f} items/s with {flags.num_workers} workers")  # fmt: skip
        for way in ("warm", "direct"):
            cores = need * row[f"{way}_ms"] / 1e3
            row[f"workers_a_rank_at_13_ms_{way}"] = math.ceil(cores)
            print(f"  batch 8 in 13 ms: {need:.0f} items/s = {cores:.2f} cores ({way})", end="")
            print(f", {math.ceil(cores)} workers a rank; 8 GPUs: {8 * need:.0f} items/s")
    write_json(flags.json, {**machine(), "rows": rows, "items_per_s_needed": need})
    return 0


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


def write_data_set(root: Path, frames: int, height: int = 480, width: int = 640) -> Path:
    """A LeRobot v3.0 data set of two episodes of moving noise, as H.264 video and as PNG inside parquet."""
    import av
    import pyarrow as pa
    import pyarrow.parquet as pq

    video, image, fps = "observation.images.video", "observation.images.image", 50
    rng = np.random.default_rng(0)
    texture = (
        rng.integers(0, 256, (height // 8 + 64, width // 8 + 64, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    )
    grain = rng.integers(0, 16, (height, width, 3), dtype=np.uint8)
    pictures = [
        texture[t % 512 : t % 512 + height, 2 * t % 512 : 2 * t % 512 + width] // 2 + grain
        for t in range(frames)
    ]
    place = {"chunk_index": 0, "file_index": 0}
    paths = {"data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"}
    paths |= {"video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"}
    files = [root / path.format(**place, video_key=video) for path in paths.values()]
    episodes_file = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    for file in (*files, episodes_file):
        file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(files[1]), "w") as container:
        stream: Any = container.add_stream(
            "libx264", rate=fps, options={"g": "2", "crf": "30"}
        )  # LeRobot's g and crf
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for picture in pictures:
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24"))
            )
        container.mux(stream.encode())
    lengths = [frames // 2, frames - frames // 2]
    frame = np.concatenate([np.arange(n) for n in lengths])
    png = [
        torchvision.io.encode_png(torch.from_numpy(p).permute(2, 0, 1).contiguous(), compression_level=1)
        for p in pictures
    ]
    numbers = {"timestamp": (frame / fps).astype(np.float32), "frame_index": frame}
    numbers |= {"episode_index": np.repeat([0, 1], lengths), "index": np.arange(frames)}
    numbers |= {"task_index": np.zeros(frames, np.int64)}
    vectors = {
        key: list(rng.normal(size=(frames, 14)).astype(np.float32)) for key in (data.STATE, data.ACTION)
    }
    encoded = [{"bytes": p.numpy().tobytes(), "path": f"{i}.png"} for i, p in enumerate(png)]
    pq.write_table(pa.table({**vectors, **numbers, image: encoded}), files[0])
    ends = np.cumsum(lengths).tolist()
    rows = []
    for e, (n, end) in enumerate(zip(lengths, ends)):
        row = {"episode_index": e, "length": n, "dataset_from_index": end - n, "dataset_to_index": end}
        row |= {f"{part}/{k}": v for part in ("data", f"videos/{video}") for k, v in place.items()}
        spans = (
            (f"videos/{video}/from_timestamp", (end - n) / fps),
            (f"videos/{video}/to_timestamp", end / fps),
        )
        rows.append(row | {"tasks": ["noise"]} | dict(spans))
    pq.write_table(pa.Table.from_pylist(rows), episodes_file)
    pq.write_table(pa.table({"task_index": [0], "task": ["noise"]}), root / "meta" / "tasks.parquet")
    features: dict[str, dict[str, Any]] = {}
    for key, kind in ((video, "video"), (image, "image")):
        names = ["height", "width", "channels"]
        features[key] = {"dtype": kind, "shape": [height, width, 3], "names": names}
    features |= {key: {"dtype": "float32", "shape": [14], "names": None} for key in vectors}
    features |= {key: {"dtype": str(v.dtype), "shape": [1], "names": None} for key, v in numbers.items()}
    info = {
        "codebase_version": "v3.0",
        "fps": fps,
        "total_episodes": 2,
        "total_frames": frames,
        **paths,
        "features": features,
    }
    (root / "meta" / "info.json").write_text(json.dumps(info))
    stats = {
        key: {"mean": [0.0] * 14, "std": [1.0] * 14, "min": [-4.0] * 14, "max": [4.0] * 14} for key in vectors
    }
    (root / "meta" / "stats.json").write_text(json.dumps(stats))
    return root


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
        for mode in ranks[0]:
            row = {key: max(rank[mode][key] for rank in ranks) for key in ranks[0][mode]}
            row |= {
                "layout": "1 process" if world_size == 1 else f"fsdp {world_size}",
                "format": format,
                "mode": mode,
            }
            table.append(row)
            print(f"{row['layout']:<12}{format:<18}{mode:<8}{row['held_up_s']:>10.2f}{row['on_disk_s']:>10.2f}"
                  f"{row['load_s']:>10.2f}{row['bytes'] / 1e9:>8.2f}", flush=True)  # fmt: skip
    write_json(flags.json, {**machine(), "rows": table})
    return 0


def save_and_load(
    rank: int, world_size: int, format: ckpt.CheckpointFormat, size: str, folder: str
) -> dict[str, dict]:
    """Collective: one rank's seconds for a save in the foreground and for one in the background."""
    cfg = replace(train.PRESETS["aloha" if size == "paper" else "demo"], device="cpu",
                  parallelism=dist.ParallelismConfig(1, world_size))  # fmt: skip
    cluster = dist.start(cfg.device, cfg.parallelism)
    inputs = {data.STATE: {"type": "STATE", "shape": [14]},
              "observation.images.top": {"type": "VISUAL", "shape": [3, 480, 640]}}  # fmt: skip
    policy = model_act.ACTPolicy(
        train.act_config(cfg.policy), inputs, {data.ACTION: {"type": "ACTION", "shape": [14]}}
    )
    parts = train.prepare(cfg, cluster, policy)
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    parts.optimizer.step()
    parts.optimizer.zero_grad()
    results: dict[str, dict] = {}
    for step, (mode, in_background) in enumerate((("sync", False), ("async", True)), 1):
        writer = ckpt.CheckpointWriter(
            folder, checkpoint_format=format, async_save=in_background, sharded=cluster.sharded
        )
        start = time.perf_counter()
        held_up = writer.save(
            step, policy=policy, optimizer=parts.optimizer, state={}, policy_config=policy.config_dict("cpu"),
            run_config=train.to_dict(cfg), stats=None,
        )  # fmt: skip
        writer.wait()
        on_disk = time.perf_counter() - start
        dist.any_rank(cluster, False)
        source, start = writer.checkpoints / f"{step:06d}", time.perf_counter()
        ckpt.load_weights(source, policy, resume=True)
        ckpt.load_training_state(source, policy, parts.optimizer, None, None)
        results[mode] = {"held_up_s": held_up, "on_disk_s": on_disk, "load_s": time.perf_counter() - start}
        results[mode]["bytes"] = sum(f.stat().st_size for f in source.rglob("*") if f.is_file())
        dist.any_rank(cluster, False)
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
    try:
        return next(command for kind, command in COMMANDS.values() if isinstance(flags, kind))(flags)
    except train.USER_ERRORS as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
