"""Checkpoints in LeRobot's tree: written whole or not at all, resumed on any layout (torch, safetensors).

    RUN/checkpoints/last -> 005000
    RUN/checkpoints/005000/pretrained_model/
        config.json  train_config.json  policy_preprocessor*  policy_postprocessor*
        model.safetensors and / or pytorch_model_fsdp_0/ (DCP shards); adapter_* where adapters train
    RUN/checkpoints/005000/training_state/
        training_step.json  run_config.json  rng_state*.safetensors  scheduler_state.json  scaler_state.json
        optimizer_state.safetensors + optimizer_param_groups.json (unsharded) or optimizer_0/ (DCP shards)
        optimizer_names.json  checksums.json

Saving (every rank makes every call):

    writer = CheckpointWriter(run_dir, checkpoint_format="safetensors", keep_last=3, async_save=True)
    pause_s = writer.save(step, policy=policy, optimizer=optimizer, ...)     # CheckpointError: train on
    writer.poll()        # every step: raises CheckpointError if the save in the background failed
    writer.wait()        # before the end

Resuming (no call communicates, each rank reads its own part):

    step_dir = resolve_resume("auto", output_dir)            # None: nothing to resume
    run_config = load_run_config(step_dir)                   # also from LeRobot's own checkpoints
    config, stats = load_policy_files(step_dir)
    load_weights(step_dir, policy, resume=True)              # plain, compiled, DDP or FSDP2 / HSDP
    state = load_training_state(step_dir, policy, optimizer, scheduler, scaler)

A checkpoint is written under checkpoints/.tmp-005000, flushed, and appears by one rename; then `last` is
replaced. Reading never executes anything: the pickles inside DCP's files may hold tensors, plain values and
DCP's own metadata classes only.

As a command:

    python ckpt.py convert --checkpoint-dir RUN/checkpoints/last [--delete-dcp] [--dtype bfloat16]
    python ckpt.py show --checkpoint-dir RUN/checkpoints/last
"""

import ctypes
import datetime
import json
import logging
import math
import os
import pathlib
import pickle
import random
import re
import shutil
import signal
import sys
import threading
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DistributedDataParallel

CheckpointFormat = Literal["safetensors", "dcp", "safetensors_dcp"]
Dtype = Literal["float32", "bfloat16", "float16"]

MODEL, TRAINING = "pretrained_model", "training_state"
WEIGHTS, WEIGHT_SHARDS = "model.safetensors", "pytorch_model_fsdp_0"
MASTER_WEIGHTS = "model_float32.safetensors"  # kept (in training_state/) when WEIGHTS was converted to less
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
OPTIMIZER, OPTIMIZER_GROUPS = "optimizer_state.safetensors", "optimizer_param_groups.json"
OPTIMIZER_NAMES, OPTIMIZER_SHARDS = "optimizer_names.json", "optimizer_0"
NORMALIZER = "policy_preprocessor_step_3_normalizer_processor.safetensors"
UNNORMALIZER = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
CHECKSUMS, RUN_ID = "checksums.json", ".run_id"
PEFT_PREFIX = "base_model.model."
# What LeRobot 0.1 to 0.3 kept in the weights: statistics, under names whose dots had become underscores.
LEGACY_BUFFER = re.compile(
    r"^(?:normalize_inputs|normalize_targets|unnormalize_outputs)\.buffer_(.+)\.(\w+)$"
)
# The statistics that each normalisation mode divides by.
STATS_OF_MODE = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
    "IDENTITY": (),
}
# Hyper-parameters of a group that a checkpoint restores; the others (fused, foreach, ...) say how this
# process computes, and stay as they are.
GROUP_SETTINGS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "initial_lr")
# Fields of config.json that decide which tensors there are, and their shapes.
DIMENSIONS = (
    "chunk_size", "dim_model", "dim_feedforward", "feedforward_activation", "latent_dim", "use_vae",
    "pre_norm", "n_encoder_layers", "n_decoder_layers", "n_vae_encoder_layers", "vision_backbone",
)  # fmt: skip

log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint was not written. The one before it is untouched, and training can go on."""


# ------------------------------------------------------------------------------------------------ save


class CheckpointWriter:
    """Writes the checkpoints of one run directory. Collective: build it and call it on every rank.

    Communication goes over a gloo group of its own, so that a save in the background can neither meet the
    training's collectives nor need a GPU.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike,
        *,
        checkpoint_format: CheckpointFormat = "safetensors",
        keep_last: int | None = None,
        async_save: bool = False,
        sharded: bool = False,
    ) -> None:
        """
        Args:
            keep_last: whole checkpoints of this run directory that stay; None keeps all.
            sharded: FSDP or HSDP; only then are there shards to write.
        Raises:
            ValueError: on every rank alike; flags that contradict, or a checkpoints/ that cannot be written.
        """
        check_flags(checkpoint_format, sharded, keep_last)
        self.checkpoints = Path(run_dir) / "checkpoints"
        self.format, self.keep_last, self.async_save = checkpoint_format, keep_last, async_save
        self.sharded = sharded
        self.last_published: int | None = None
        """Step of the newest checkpoint that this writer has on disk."""
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None
        self._group: Any = None
        self.rank, self.world_size = 0, 1
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            if self.world_size > 1:
                self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(minutes=30))
        self._together(lambda: self._probe() if self.rank == 0 else None)

    def save(
        self,
        step: int,
        *,
        policy: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        scaler: Any = None,
        state: Mapping[str, Any],
        policy_config: dict,
        run_config: dict,
        stats: Mapping[str, Mapping[str, Any]] | None,
        adapter: dict | None = None,
        best: bool = False,
    ) -> float:
        """Collective: write `checkpoints/STEP` and point `last` at it.

        Args:
            state: into training_step.json; LeRobot reads dp_world_size, batch_size, grad_accum_steps and
                parallelism {dp_replicate, dp_shard}; samples_seen, seed and whatever else a resume needs.
            policy_config: content of config.json.
            adapter: {"state_dict": file key -> live tensor, "config": content of adapter_config.json}; stored
                in place of the weights.
            best: point `checkpoints/best` at it as well; --keep-last never deletes what is pointed at.
        Returns:
            Seconds that the training was held up.
        Raises:
            CheckpointError: on every rank alike; nothing changed on disk. With async_save it is raised by the
                next `poll` or `wait`.
        """
        began = time.monotonic()
        self._join()
        if self._failure is not None:  # nobody polled since: say it, and write this one all the same
            log.error("%s", self._failure)
            self._failure = None
        content = self._collect(
            step, policy, optimizer, scheduler, scaler, state, policy_config, run_config, stats, adapter
        )
        content.best = best
        if self.async_save:
            self._thread = threading.Thread(target=self._write_in_background, args=(content,), daemon=True)
            self._thread.start()
        else:
            self._write(content)
        return time.monotonic() - began

    def poll(self) -> None:
        """Raise the failure of a save in the background, once; return at once otherwise.

        Not collective: ranks see the same failure a moment apart, so do nothing collective about it.
        """
        if self._thread is not None and not self._thread.is_alive():
            self._join()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait(self) -> None:
        """Return when the save in the background is on disk; raise its failure."""
        self._join()
        self.poll()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _collect(
        self, step, policy, optimizer, scheduler, scaler, state, policy_config, run_config, stats, adapter
    ) -> "_Content":
        """Collective: everything that the save will write, in host memory where training would change it."""
        module = unwrap(policy)
        is_main = self.rank == 0
        content = _Content(_step_name(step, run_config), step)
        parallelism = {"dp_replicate": self.world_size, "dp_shard": 1, **state.get("parallelism", {})}
        parallelism = {k: parallelism[k] for k in ("dp_replicate", "dp_shard")}
        train_config = lerobot_train_config(
            {**run_config, "checkpoint_format": self.format}, policy_config, parallelism
        )

        weights = adapter["state_dict"] if adapter else _state_dict(module)
        if self.format != "dcp":
            file = ADAPTER if adapter else WEIGHTS
            full = {key: _gathered(value, keep=is_main) for key, value in weights.items()}
            content.tensors[f"{MODEL}/{file}"] = {k: _master(v) for k, v in full.items() if v is not None}
        if self.format != "safetensors":
            content.shards[f"{MODEL}/{WEIGHT_SHARDS}"] = {"model": self._staged(weights)}
        if adapter:
            content.json[f"{MODEL}/{ADAPTER_CONFIG}"] = adapter["config"]

        names = _parameter_names(module)
        groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        states = {names[id(p)]: value for p, value in optimizer.state.items() if value}
        scheduled = train_config["scheduler"] is not None
        settings = [_group_settings(group, scheduled) for group in optimizer.param_groups]
        content.json[f"{TRAINING}/{OPTIMIZER_NAMES}"] = {
            "groups": groups,
            "without_state": [name for name in names.values() if name not in states],
        }
        if self.sharded:
            content.shards[f"{TRAINING}/{OPTIMIZER_SHARDS}"] = {
                "optimizer": {
                    "state": {name: self._staged(values) for name, values in states.items()},
                    "param_groups": [
                        {**s, "betas": tuple(s["betas"]), "params": group}
                        for s, group in zip(settings, groups)
                    ],
                }
            }
        elif is_main:
            index = {name: i for i, name in enumerate(name for group in groups for name in group)}
            content.tensors[f"{TRAINING}/{OPTIMIZER}"] = {
                f"state/{index[name]}/{kind}": _host_copy(value)
                for name, values in states.items()
                for kind, value in values.items()
            }
            content.json[f"{TRAINING}/{OPTIMIZER_GROUPS}"] = [
                {**s, "params": [index[name] for name in group]} for s, group in zip(settings, groups)
            ]

        rng = _rng_state()
        content.tensors[f"{TRAINING}/rng_state.safetensors"] = {k: rng[k] for k in rng if k not in RNG_EXTRA}
        content.tensors[f"{TRAINING}/rng_state_ranks.safetensors"] = {
            f"rank{r}.{key}": value for r, one in enumerate(self._gather(rng)) for key, value in one.items()
        }
        content.tensors |= _processor_tensors(policy_config, stats)
        content.json |= _processor_json(policy_config, bool(stats))
        content.json[f"{MODEL}/config.json"] = policy_config
        content.json[f"{MODEL}/train_config.json"] = train_config
        content.json[f"{TRAINING}/run_config.json"] = run_config
        content.json[f"{TRAINING}/training_step.json"] = {
            "step": step,
            "dp_world_size": self.world_size,
            "num_processes": self.world_size,  # LeRobot up to 0.6.1 reads this name
            "batch_size": run_config.get("batch_size"),
            "grad_accum_steps": run_config.get("gradient_accumulation_steps", 1),
            **state,
            "parallelism": {**parallelism, "ring_degree": 1, "ulysses_degree": 1},
            "saved_at": time.time(),
        }
        if scheduler is not None:
            content.json[f"{TRAINING}/scheduler_state.json"] = scheduler.state_dict()
        if scaler is not None:
            content.json[f"{TRAINING}/scaler_state.json"] = scaler.state_dict()
        content.encoded = {
            path: json.dumps(value, indent=2 if "processor" in path else 4, default=_plain).encode()
            for path, value in content.json.items()
        }
        return content

    def _staged(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """What DCP gets: the live tensors, or with async_save host copies (shards stay shards)."""
        if not self.async_save:
            return {key: value.detach() for key, value in tensors.items()}
        return {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}

    # -- write and publish: in the caller's thread, or in the background

    def _write_in_background(self, content: "_Content") -> None:
        try:
            self._write(content)
        except BaseException as error:
            self._failure = error if isinstance(error, CheckpointError) else CheckpointError(_sentence(error))

    def _write(self, content: "_Content") -> None:
        """Collective: every stage ends with all ranks knowing whether all of them did it."""
        tmp = self.checkpoints / f".tmp-{content.name}"
        main = self.rank == 0
        try:
            self._together(lambda: self._prepare(tmp) if main else None)
            self._together(lambda: self._write_shards(tmp, content))
            self._together(lambda: self._write_files(tmp, content) if main else None)
            self._together(lambda: self._publish(tmp, content) if main else None)
        except CheckpointError as error:
            if main:
                shutil.rmtree(tmp, ignore_errors=True)
            last = _read_pointer(self.checkpoints / "last") or "there is none"
            raise CheckpointError(
                f"The checkpoint of step {content.step} was not written to {self.checkpoints}: "
                f"{str(error).rstrip('.')}. The previous one ({last}) is as it was."
            ) from None
        self.last_published = content.step
        if main:
            self._retain_or_warn(content.name)

    def _together(self, work: Callable[[], None]) -> None:
        """Collective: do it, and raise the same CheckpointError everywhere if it failed anywhere."""
        failure = None
        try:
            work()
        except CheckpointException as caught:  # DCP's: every rank gets it; no Exception (torch 2.14)
            failure = (next(iter(caught.failures)), _sentence(caught))
        except Exception as caught:
            failure = (self.rank, _sentence(caught))
        for rank, text in filter(None, self._gather(failure)):
            raise CheckpointError(text if self.world_size == 1 else f"rank {rank}: {text}")

    def _gather(self, value: Any) -> list:
        if self._group is None:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _probe(self) -> None:
        """Refuse at the start what the first save would stumble over, perhaps hours later; leave no trace."""
        _refuse_no_directory(self.checkpoints)
        absent = not self.checkpoints.exists()
        probe = self.checkpoints / ".write-test"
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
            if absent:
                self.checkpoints.rmdir()
        except OSError as error:
            raise ValueError(
                f"{self.checkpoints} cannot be written ({error.strerror}); name another --output-dir, or "
                "train with --no-save-checkpoint."
            ) from None

    def _prepare(self, tmp: Path) -> None:
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        for left in _leftovers(self.checkpoints):
            log.warning("%s is left from a save that was interrupted; removing it.", left)
            _remove(left)
        if not (self.checkpoints / RUN_ID).exists():
            _write_bytes(self.checkpoints / f"{RUN_ID}.new", uuid.uuid4().hex.encode())
            os.replace(self.checkpoints / f"{RUN_ID}.new", self.checkpoints / RUN_ID)
        for part in (MODEL, TRAINING):
            (tmp / part).mkdir(parents=True)

    def _write_shards(self, tmp: Path, content: "_Content") -> None:
        for path, state_dict in content.shards.items():
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*(assuming the intent is to save|TypedStorage).*")
                dcp.save(
                    state_dict,
                    storage_writer=dcp.FileSystemWriter(tmp / path),
                    process_group=self._group,
                    no_dist=self.world_size == 1,
                )

    def _write_files(self, tmp: Path, content: "_Content") -> None:
        run_id = (self.checkpoints / RUN_ID).read_text()
        step_file = f"{TRAINING}/training_step.json"
        content.encoded[step_file] = json.dumps(
            {**json.loads(content.encoded[step_file]), "run_id": run_id}, indent=4
        ).encode()
        for path, tensors in content.tensors.items():
            metadata = {"format": "pt"} if Path(path).name in (WEIGHTS, ADAPTER) else None
            _save_tensors(tensors, tmp / path, metadata)
            _flush(tmp / path)
        for path, data in content.encoded.items():
            _write_bytes(tmp / path, data)
        lost = [p for directory in content.shards for p in shard_problems(tmp / directory)]
        if lost:  # another node wrote its shards to a disk of its own
            raise ValueError(f"{lost[0]}; --output-dir must be on a file system that every node shares.")
        _write_checksums(tmp)
        for directory in [*(d for d in tmp.rglob("*") if d.is_dir()), tmp]:
            _flush(directory)

    def _publish(self, tmp: Path, content: "_Content") -> None:
        final = self.checkpoints / content.name
        if final.exists():  # a run that was resumed from an earlier step comes by again
            _exchange(tmp, final)
        else:
            os.rename(tmp, final)
        _flush(self.checkpoints)
        point(self.checkpoints, "last", content.name)
        if content.best:
            point(self.checkpoints, "best", content.name)
        if tmp.exists():
            _remove(tmp)

    def _retain_or_warn(self, newest: str) -> None:
        try:
            if self.keep_last is not None:
                self._retain(newest, self.keep_last)
        except (OSError, ValueError) as error:
            log.warning("--keep-last could not delete old checkpoints: %s", error)

    def _retain(self, newest: str, keep_last: int) -> None:
        """Delete whole checkpoints of this run directory beyond the newest `keep_last`, and nothing else."""
        run_id = (self.checkpoints / RUN_ID).read_text()
        pointed = {_read_pointer(path) for path in self.checkpoints.iterdir()}  # last, best, and yours
        mine = [
            path
            for path, problems in find_checkpoints(self.checkpoints)
            if not problems and path.name != newest and _training_step(path).get("run_id") == run_id
        ]
        for path in mine[: max(0, len(mine) - (keep_last - 1))]:
            if path.name not in pointed:
                _remove(path)


@dataclass
class _Content:
    """What one save writes: DCP directories (every rank its shards), the other files (rank 0)."""

    name: str
    step: int
    best: bool = False
    shards: dict[str, dict] = field(default_factory=dict)
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    json: dict[str, Any] = field(default_factory=dict)
    encoded: dict[str, bytes] = field(default_factory=dict)


def check_flags(checkpoint_format: str, sharded: bool, keep_last: int | None) -> None:
    """Raise a ValueError for what no `CheckpointWriter` can do."""
    if checkpoint_format not in ("safetensors", "dcp", "safetensors_dcp"):
        raise ValueError(
            f"--checkpoint-format={checkpoint_format} is unknown; use safetensors, dcp or safetensors_dcp."
        )
    if checkpoint_format != "safetensors" and not sharded:
        raise ValueError(
            f"--checkpoint-format={checkpoint_format} needs a sharded run (--parallelism.dp-shard other than "
            "1); other runs write safetensors."
        )
    if keep_last is not None and keep_last < 1:
        raise ValueError(f"--keep-last={keep_last} would delete every checkpoint; use 1 or more.")


def unwrap(policy: nn.Module) -> nn.Module:
    """The policy inside DDP and torch.compile's wrapper; FSDP2 has none."""
    inner: Any = policy
    while isinstance(inner, DistributedDataParallel) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, DistributedDataParallel) else inner._orig_mod
    return inner


def _step_name(step: int, run_config: dict) -> str:
    return f"{step:0{max(6, len(str(run_config.get('steps') or 0)))}d}"


def _clean(name: str) -> str:
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _state_dict(module: nn.Module) -> dict[str, Tensor]:
    return {_clean(key): value for key, value in module.state_dict().items()}


def _parameter_names(module: nn.Module) -> dict[int, str]:
    return {id(p): _clean(name) for name, p in module.named_parameters()}


def _gathered(tensor: Tensor, keep: bool) -> Tensor | None:
    """Collective for a shard: the whole tensor in host memory of its own, where it is to be kept."""
    if isinstance(tensor, DTensor):
        if tensor.device.type != tensor.device_mesh.device_type:  # FSDP's CPU offload
            tensor = tensor.to(tensor.device_mesh.device_type)
        tensor = cast(DTensor, tensor.detach()).full_tensor()
    return _host_copy(tensor) if keep else None


def _host_copy(tensor: Tensor) -> Tensor:
    # A gathered tensor may be a view of a padded buffer, and channels_last is not contiguous: safetensors
    # refuses both. Tied tensors become two copies, which load back into the tie.
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _master(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _group_settings(group: dict, scheduled: bool) -> dict:
    """A group of AdamW with the keys and types that LeRobot's strict reader expects, whatever the kernel."""
    settings = {
        "lr": float(group["lr"]),
        "betas": [float(b) for b in group["betas"]],
        "eps": float(group["eps"]),
        "weight_decay": float(group["weight_decay"]),
        "amsgrad": bool(group.get("amsgrad", False)),
        "maximize": bool(group.get("maximize", False)),
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }
    if scheduled:
        settings["initial_lr"] = float(group.get("initial_lr", group["lr"]))
    return settings


# Keys that LeRobot's rng_state.safetensors lacks; without them half a pair of Gaussians would be lost.
RNG_EXTRA = ("py_rng_gauss", "np_rng_cached_gaussian_f64")


def _rng_state() -> dict[str, Tensor]:
    version, internal, gauss = random.getstate()
    _, values, index, has_gauss, cached = cast(tuple, np.random.get_state(legacy=True))
    state = {
        "py_rng_version": torch.tensor([version]),
        "py_rng_state": torch.tensor(internal, dtype=torch.int64),
        "py_rng_gauss": torch.tensor([math.nan if gauss is None else gauss], dtype=torch.float64),
        "np_rng_state_values": torch.from_numpy(values.astype(np.int64)),
        "np_rng_state_index": torch.tensor([index]),
        "np_rng_has_gauss": torch.tensor([has_gauss]),
        "np_rng_cached_gaussian": torch.tensor([cached], dtype=torch.float32),
        "np_rng_cached_gaussian_f64": torch.tensor([cached], dtype=torch.float64),
        "torch_rng_state": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["torch_cuda_rng_state"] = torch.cuda.get_rng_state()
    return state


def _processor_json(policy_config: dict, has_stats: bool) -> dict[str, Any]:
    inputs, outputs = policy_config["input_features"], policy_config["output_features"]
    device = {
        "registry_name": "device_processor",
        "config": {"device": policy_config.get("device") or "cpu", "float_dtype": None},
    }
    common = {"eps": 1e-08, "norm_map": policy_config["normalization_mapping"]}

    def step(name: str, features: dict, file: str) -> dict:
        config = {"eps": common["eps"], "features": features, "norm_map": common["norm_map"]}
        return {"registry_name": name, "config": config} | ({"state_file": file} if has_stats else {})

    return {
        f"{MODEL}/policy_preprocessor.json": {
            "name": "policy_preprocessor",
            "steps": [
                {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
                {"registry_name": "to_batch_processor", "config": {}},
                device,
                step("normalizer_processor", {**inputs, **outputs}, NORMALIZER),
            ],
        },
        f"{MODEL}/policy_postprocessor.json": {
            "name": "policy_postprocessor",
            "steps": [
                step("unnormalizer_processor", outputs, UNNORMALIZER),
                {**device, "config": {"device": "cpu", "float_dtype": None}},
            ],
        },
    }


def _processor_tensors(policy_config: dict, stats: Mapping | None) -> dict[str, dict[str, Tensor]]:
    if not stats:
        return {}
    visual = {k for k, f in policy_config["input_features"].items() if f["type"] == "VISUAL"}
    flat = {}
    for key, values in stats.items():
        for stat, value in values.items():
            tensor = torch.as_tensor(value).detach().to("cpu", torch.float32, copy=True)
            shape = (-1, 1, 1) if key in visual and tensor.ndim <= 1 else tensor.shape or (1,)
            flat[f"{key}.{stat}"] = tensor.reshape(shape).contiguous()
    return {f"{MODEL}/{NORMALIZER}": flat, f"{MODEL}/{UNNORMALIZER}": dict(flat)}


# --------------------------------------------------------------------------------------------- publish


def point(checkpoints: Path, pointer: str, name: str) -> None:
    """Make checkpoints/POINTER lead to checkpoints/NAME: a link, or a text file where links are refused."""
    new = checkpoints / f".{pointer}.new"
    new.unlink(missing_ok=True)
    try:
        os.symlink(name, new)
    except (OSError, NotImplementedError):  # some mounts, and Windows without the right to
        _write_bytes(new, f"{name}\n".encode())
    os.replace(new, checkpoints / pointer)
    _flush(checkpoints)


def _read_pointer(path: Path) -> str | None:
    """The name that `last` (link or text file) leads to; None for anything that is no pointer."""
    if path.is_symlink():
        target = Path(os.readlink(path))
        return (
            target.name
            if len(target.parts) == 1 or target.parent.resolve() == path.parent.resolve()
            else None
        )
    if path.is_file() and path.stat().st_size < 256:
        text = path.read_bytes().decode(errors="replace").strip()
        return text if text and Path(text).name == text else None
    return None


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories in one operation (Linux); elsewhere `_recover` heals the moment in between."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "renameat2"):
        at_cwd, rename_exchange = -100, 2
        if libc.renameat2(at_cwd, os.fsencode(new), at_cwd, os.fsencode(old), rename_exchange) == 0:
            return
    aside = old.parent / f".old-{old.name}"
    os.rename(old, aside)
    os.rename(new, old)
    _remove(aside)


def _recover(checkpoints: Path) -> None:
    """Put back a checkpoint whose replacement was killed between two renames."""
    for aside in checkpoints.glob(".old-*"):
        name = aside.name.removeprefix(".old-")
        if name.isdigit() and not (checkpoints / name).exists():
            os.rename(aside, checkpoints / name)


def _leftovers(checkpoints: Path) -> list[Path]:
    """What an interrupted save of ours left behind; names of other people's making are not touched."""
    _recover(checkpoints)
    return sorted(p for p in checkpoints.iterdir() if re.fullmatch(r"\.(tmp|old|trash)-\d+", p.name))


def _remove(directory: Path) -> None:
    if not directory.name.startswith(".trash-"):  # a half deleted directory must not look like anything else
        trash = directory.parent / f".trash-{directory.name.rpartition('-')[2]}"
        shutil.rmtree(trash, ignore_errors=True)
        os.rename(directory, trash)
        directory = trash
    shutil.rmtree(directory, ignore_errors=True)


def _write_bytes(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str] | None) -> None:
    # safetensors (0.8) leaves files that only their owner can read; an empty file shows the umask's mode.
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    if path.stat().st_mode != mode:
        path.chmod(mode)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _plain(value: Any) -> Any:
    """JSON for what schedulers, scalers and configs hold besides plain values."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be written to JSON")


def _sentence(error: BaseException) -> str:
    """One line for an error of the file system, of safetensors or of DCP (whose own text is a traceback)."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


def _write_checksums(step_dir: Path, changed: Iterable[str] | None = None) -> None:
    """Record size and checksum of every file, or bring the record up to date with what `changed` and went."""
    record = step_dir / TRAINING / CHECKSUMS
    sums = _read_json(record) if changed is not None else {}
    files = {
        p.relative_to(step_dir).as_posix(): p for p in step_dir.rglob("*") if p.is_file() and p != record
    }
    names = sorted(files if changed is None else files.keys() & set(changed))
    sums = {n: entry for n, entry in sums.items() if n in files}
    sums |= {name: [files[name].stat().st_size, _crc32(files[name])] for name in names}
    new = record.with_name(f".{CHECKSUMS}.new")
    _write_bytes(new, json.dumps(sums, indent=1).encode())
    os.replace(new, record)


def _crc32(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def _verify(step_dir: Path, paths: Iterable[Path]) -> None:
    """Refuse a file that is not the one that was saved, though nothing shows it (a flipped bit).

    A file of another size has been replaced by somebody, and its structure is checked by who reads it;
    a configuration that was edited is only mentioned.
    """
    record = step_dir / TRAINING / CHECKSUMS
    if not record.is_file():
        return
    sums = _read_json(record)
    for path in paths:
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            size, crc = sums.get(file.relative_to(step_dir).as_posix(), (None, None))
            if size is None or file.stat().st_size != size or _crc32(file) == crc:
                continue
            if (file.suffix == ".json" and file.parent.name == MODEL) or file.name == "run_config.json":
                log.warning("%s was changed after it was saved.", file)
            else:
                raise ValueError(
                    f"{file} is corrupt: its checksum is not that of the save; use another checkpoint "
                    f"(if the change was meant, delete {record})."
                )


# ------------------------------------------------------------------------------------------------ load


def policy_dir(path: str | os.PathLike) -> Path:
    """pretrained_model/ of the checkpoint, in whatever form it is named."""
    return _model_dir(policy_folder(path))


def load_policy_files(path: str | os.PathLike) -> tuple[dict, dict[str, dict[str, Tensor]]]:
    """(content of config.json, statistics) of a step directory, run directory, `last`, pretrained_model/ or
    USER/NAME of the hub.

    Raises:
        ValueError: a file is missing or unreadable; a feature that is normalised has no statistics.
    """
    model_dir = _model_dir(policy_folder(path))
    config = _read_json(model_dir / "config.json")
    for key in ("input_features", "output_features"):
        if not isinstance(config, dict) or not isinstance(config.get(key), dict):
            raise ValueError(f"{model_dir / 'config.json'} has no {key}; it is not a policy's configuration.")
    _verify(model_dir.parent, sorted(model_dir.glob("*.json")))
    stats = _load_stats(model_dir, config)
    _verify(model_dir.parent, sorted(model_dir.glob("*processor*.safetensors")))
    return config, stats


def load_weights(
    path: str | os.PathLike,
    policy: nn.Module,
    *,
    adapter: Mapping[str, Tensor] | None = None,
    resume: bool = False,
) -> None:
    """Fill the policy, or the given adapter tensors, in place; a shard reads its own rows only.

    An adapter's checkpoint read without `adapter` gives base and adapter merged.

    Args:
        adapter: file key -> live tensor, to load the adapter onto a policy that has its base already.
        resume: prefer the weights that training goes on from to a converted file of lower precision.
    Raises:
        ValueError: a tensor is missing, unexpected or misshapen, each by name; a file is torn or corrupt.
    """
    model_dir = _model_dir(policy_folder(path))
    source = _weights_source(model_dir, adapter is not None, resume)
    wanted = dict(adapter) if adapter is not None else _state_dict(unwrap(policy))
    other = [] if adapter is not None else _other_dimensions(path, model_dir, unwrap(policy))
    if source.name == ADAPTER_CONFIG:
        full = _merged(model_dir)
        _check(source, wanted, {key: tuple(value.shape) for key, value in full.items()}, other)
        with torch.no_grad():
            for key, target in wanted.items():
                _copy_part(target, full[key].__getitem__)
        return
    prefix = "model." if source.is_dir() else ""
    found = {
        key.removeprefix(prefix): shape
        for key, shape in _shapes(source).items()
        if not LEGACY_BUFFER.match(key)
    }
    _check(source, wanted, found, other)
    _verify(model_dir.parent, [source])
    _read_into(source, {prefix + key: target for key, target in wanted.items()})


def load_training_state(
    path: str | os.PathLike,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
) -> dict[str, Any]:
    """Restore optimizer, schedule, loss scale and this rank's random state; build all of them before.

    Hyper-parameters of the groups (lr, ...) become the saved ones. Moments go to the parameters by name, so
    the order of groups and the layout may differ. Kernels (fused, foreach) stay this process's own.

    Returns:
        Content of training_step.json, with `samples_seen` worked out where LeRobot did not write it, and
        `scheduler_restored`.
    Raises:
        ValueError: a tensor is missing, unexpected or misshapen; a file is missing, torn or corrupt.
    """
    step_dir = _model_dir(path).parent
    training = step_dir / TRAINING
    state = _training_step(step_dir)
    later = (CHECKSUMS, OPTIMIZER, OPTIMIZER_SHARDS, MASTER_WEIGHTS)
    _verify(step_dir, [p for p in training.iterdir() if p.name not in later])
    if not isinstance(state.get("samples_seen"), int):
        state["samples_seen"] = (
            state["step"]
            * (state.get("batch_size") or 0)
            * (state.get("dp_world_size") or state.get("num_processes") or 1)
        )
    if optimizer is not None:
        _load_optimizer(step_dir, unwrap(policy), optimizer)
    state["scheduler_restored"] = False
    saved = training / "scheduler_state.json"
    if scheduler is not None and saved.is_file():
        _load_scheduler(saved, scheduler)
        state["scheduler_restored"] = True
    saved = training / "scaler_state.json"
    if scaler is not None and saved.is_file():
        scaler.load_state_dict(_read_json(saved))
    elif scaler is not None:
        log.warning("%s has no loss scale; it starts from its initial value.", step_dir)
    _load_rng(training)
    return state


def load_run_config(path: str | os.PathLike) -> dict[str, Any]:
    """The run's configuration, nested by the command line's names; LeRobot's own is translated.

    Raises:
        ValueError: neither run_config.json nor train_config.json can be read.
    """
    model_dir = _model_dir(path)
    ours = model_dir.parent / TRAINING / "run_config.json"
    if ours.is_file():
        _verify(model_dir.parent, [ours])
        return _read_json(ours)
    config = _read_json(model_dir / "train_config.json")
    if not isinstance(config, dict):
        raise ValueError(f"{model_dir / 'train_config.json'} is not a training configuration.")
    return run_config_from_lerobot(config)


def policy_folder(path: str | os.PathLike) -> str:
    """`path`, or the folder in the hub's cache of the repository USER/NAME where there is no such path here.

    What is in the cache is taken as it is, and only what is not there is downloaded: weights and JSON, no
    folders. HF_HUB_CACHE, HF_HOME and HF_HUB_OFFLINE mean what they always do.
    Raises:
        ValueError: it has the form USER/NAME, and cannot be had.
    """
    name = os.fspath(path)
    if os.path.lexists(name) or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        return name
    wanted: Any = {"allow_patterns": ["*.json", "*.safetensors"], "ignore_patterns": "*/*"}
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars

        try:
            cached = snapshot_download(name, local_files_only=True, **wanted)
            if (Path(cached) / "config.json").is_file() and any(Path(cached).glob("*.safetensors")):
                return cached
        except OSError:  # not there, or half of it; whatever else is wrong, the download says as well
            pass
        disable_progress_bars()  # one of each rank
        return snapshot_download(name, **wanted)
    except ImportError:
        why = "huggingface_hub, which would ask for it, is not installed"
    except Exception as error:  # whatever the network, the hub or the credentials do
        why = _sentence(error.__cause__ or error).partition(". ")[0].rstrip(".")
        if type(error).__name__ == "RepositoryNotFoundError":  # its text is an address and an essay
            why = "it has no such model, or it is private"
    raise ValueError(
        f"{name} (--policy.path or --checkpoint) is no folder here, and the hub did not give it: {why}; "
        f"correct the path, or run `hf download {name} --local-dir DIR` where there is a network and name "
        f"DIR. {_found_near(Path(name))}"
    )


def _model_dir(path: str | os.PathLike) -> Path:
    """pretrained_model/ for any of the forms in which a checkpoint can be named."""
    path = Path(path)
    given = path.parent if path.name in ("train_config.json", "config.json") and path.is_file() else path
    if (given / "config.json").is_file() and not (given / MODEL).is_dir():
        return given
    if (given / MODEL).is_dir():
        return given / MODEL
    step_dir = resolve_resume(path, None)
    assert step_dir is not None
    return step_dir / MODEL


def _master_file(model_dir: Path) -> Path:
    """Where `convert` keeps the weights that a file of lower precision replaced."""
    training = model_dir.parent / TRAINING
    return (training if training.is_dir() else model_dir) / MASTER_WEIGHTS


def _weights_source(model_dir: Path, adapter: bool, resume: bool) -> Path:
    shards, weights = model_dir / WEIGHT_SHARDS, model_dir / WEIGHTS
    if adapter:
        order = [model_dir / ADAPTER, shards]
    elif (model_dir / ADAPTER_CONFIG).is_file():
        order = [weights, model_dir / ADAPTER_CONFIG]
    elif resume:
        order = [shards, _master_file(model_dir), weights]
    else:
        order = [weights, shards]
    for source in order:
        if source.exists():
            return source
    raise ValueError(f"{model_dir} has no weights: neither {' nor '.join(p.name for p in order)}.")


def _other_dimensions(path: str | os.PathLike, model_dir: Path, policy: nn.Module) -> list[str]:
    """The flags, each with both values, in which a policy with a configuration differs from the saved one."""
    config = getattr(policy, "config", None)
    saved = _read_json(model_dir / "config.json") if (model_dir / "config.json").is_file() else {}
    names = [n for n in DIMENSIONS if isinstance(saved, dict) and n in saved and hasattr(config, n)]
    values = {n: (getattr(config, n), saved[n]) for n in names}
    return [
        f"--policy.{n.replace('_', '-')}={mine}, but the policy in {path} has {theirs}"
        for n, (mine, theirs) in values.items()
        if mine != theirs
    ]


def _check(
    source: Path, wanted: Mapping[str, Any], found: Mapping[str, tuple], other_dimensions: list[str]
) -> None:
    """Both directions and every shape, before anything is changed."""
    wrong = [f"missing {key}" for key in sorted(wanted.keys() - found.keys())]
    wrong += [f"unexpected {key}" for key in sorted(found.keys() - wanted.keys())]
    wrong += [
        f"{key} has shape {tuple(found[key])}, not {tuple(value.shape)}"
        for key, value in wanted.items()
        if key in found and tuple(found[key]) != tuple(value.shape)
    ]
    if wrong and other_dimensions:
        flags = "the flag" if len(other_dimensions) == 1 else "these flags"
        raise ValueError(f"{'; '.join(other_dimensions)}; leave {flags} out.")
    if wrong:
        raise ValueError(f"{source} does not fit this policy: {_some(wrong)}.")


def _some(wrong: list[str]) -> str:
    return "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")


def _shapes(source: Path) -> dict[str, tuple]:
    """Tensor names and shapes of a safetensors file or a DCP directory."""
    if source.is_dir():
        entries = read_shard_metadata(source).state_dict_metadata
        return {k: tuple(m.size) for k, m in entries.items() if isinstance(m, TensorStorageMetadata)}
    with _open_safetensors(source) as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def _precision(source: Path) -> str:
    """The floating-point types in a weights source: "float32", or "bfloat16, float32"."""
    if source.is_dir():
        entries = read_shard_metadata(source).state_dict_metadata.values()
        found = {m.properties.dtype for m in entries if isinstance(m, TensorStorageMetadata)}
        return ", ".join(sorted(str(d).removeprefix("torch.") for d in found if d.is_floating_point))
    words = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    with _open_safetensors(source) as file:
        names = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    return ", ".join(sorted(words[name] for name in names & words.keys()))


def _read_into(source: Path, targets: dict[str, Tensor]) -> None:
    """Copy stored tensors into live ones, sharded or not; each rank reads its part, to host memory first."""
    with torch.no_grad():
        if source.is_dir():
            _read_shards(source, {key: target.detach() for key, target in targets.items()})
            return
        with _open_safetensors(source) as file:
            for key, target in targets.items():
                if target.ndim == 0:
                    target.copy_(file.get_tensor(key))
                else:
                    _copy_part(target, file.get_slice(key).__getitem__)


def _copy_part(target: Tensor, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
    shape, offset, local = tuple(target.shape), (0,) * target.ndim, target
    if isinstance(target, DTensor):
        shape, offset = compute_local_shape_and_global_offset(
            target.shape, target.device_mesh, target.placements
        )
        local = target.to_local()
    if local.numel():
        local.copy_(read(tuple(slice(o, o + s) for o, s in zip(offset, shape))))


def _open_safetensors(path: Path) -> Any:
    # The device is named: safetensors takes a bare "cuda" for the first GPU, on every rank.
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {_sentence(error)}") from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {_sentence(error)}") from None


def _training_step(step_dir: Path) -> dict[str, Any]:
    path = step_dir / TRAINING / "training_step.json"
    state = _read_json(path)
    step = state.get("step") if isinstance(state, dict) else None
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"{path} has no valid step.")
    return state


# -- statistics


def _load_stats(model_dir: Path, config: dict) -> dict[str, dict[str, Tensor]]:
    processor = model_dir / "policy_preprocessor.json"
    if processor.is_file():
        source, flat = processor, {}
        for step in _read_json(processor).get("steps", []):
            if step.get("registry_name") == "normalizer_processor" and step.get("state_file"):
                if Path(step["state_file"]).name != step["state_file"]:
                    raise ValueError(f"{processor}: state_file {step['state_file']!r} leaves the checkpoint.")
                source = model_dir / step["state_file"]
                with _open_safetensors(source) as file:
                    flat = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    else:
        source, flat = _legacy_stats(model_dir, config)
    stats: dict[str, dict[str, Tensor]] = {}
    for key, value in flat.items():
        feature, _, stat = key.rpartition(".")  # feature names have dots of their own
        stats.setdefault(feature, {})[stat] = value.float()
    for key, feature in {**config["input_features"], **config["output_features"]}.items():
        mode = (config.get("normalization_mapping") or {}).get(feature.get("type"), "IDENTITY")
        for stat in STATS_OF_MODE.get(mode, ()):
            if stat not in stats.get(key, {}):
                raise ValueError(
                    f"{source} has no {key}.{stat}, and {key} is normalised by {mode}: acting on raw values "
                    "would fail without a word; restore the statistics."
                )
    return stats


def _legacy_stats(model_dir: Path, config: dict) -> tuple[Path, dict[str, Tensor]]:
    """Statistics that old LeRobot files keep in the weights, under the names of this policy's features."""
    source = model_dir / WEIGHTS
    if not source.is_file():
        raise ValueError(f"{model_dir / 'policy_preprocessor.json'} does not exist: there are no statistics.")
    features: dict[str, list[str]] = {}
    for key in {**config["input_features"], **config["output_features"]}:
        features.setdefault(key.replace(".", "_"), []).append(key)
    flat: dict[str, Tensor] = {}
    with _open_safetensors(source) as file:
        for key in file.keys():  # noqa: SIM118
            if match := LEGACY_BUFFER.match(key):
                names = features.get(match[1], [])
                if len(names) != 1:
                    raise ValueError(
                        f"{source}: {key} belongs to {' or '.join(names) or 'no feature'} of config.json."
                    )
                name, value = f"{names[0]}.{match[2]}", file.get_tensor(key)
                if not torch.equal(flat.setdefault(name, value), value):
                    raise ValueError(f"{source} holds two different statistics {name}.")
    return source, flat


# -- optimizer, schedule, random state


@dataclass
class _SavedOptimizer:
    """An optimizer's file, by parameter name instead of by index."""

    source: Path
    groups: list[dict]  # settings, and "params": names
    keys: dict[str, dict[str, str]]  # parameter -> "exp_avg" -> key in the source
    shapes: dict[str, tuple]
    without_state: set[str] | None  # None: LeRobot's file, which does not say


def _load_optimizer(step_dir: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    saved = _open_optimizer(step_dir / TRAINING, module)
    names = _parameter_names(module)
    trained = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    wrong = [f"unexpected {name}" for name in saved.keys if name not in names.values()]
    frozen = [name for name in saved.keys if name not in trained and name in names.values()]
    fresh, targets, states = [], {}, {}
    settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    known = {name for group in saved.groups for name in group["params"]}
    for name, parameter in trained.items():
        group = settings[id(parameter)]
        kinds = {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if group.get("amsgrad") else set())
        have = saved.keys.get(name, {})
        if not have and (saved.without_state is None or name in saved.without_state or name not in known):
            fresh.append(name)
            continue
        wrong += [f"missing {kind} of {name}" for kind in sorted(kinds - have.keys())]
        wrong += [f"unexpected {kind} of {name}" for kind in sorted(have.keys() - kinds)]
        state: dict[str, Tensor] = {}
        for kind in sorted(kinds & have.keys()):
            state[kind] = (
                torch.zeros((), dtype=torch.float32)
                if kind == "step"
                else torch.zeros_like(parameter.detach(), memory_format=torch.preserve_format)
            )
            if tuple(state[kind].shape) != (shape := saved.shapes[have[kind]]):
                wrong.append(f"{kind} of {name} has shape {shape}, not {tuple(state[kind].shape)}")
            targets[have[kind]] = state[kind]
        states[parameter] = state
    if wrong:
        raise ValueError(f"{saved.source} does not fit this optimizer: {_some(wrong)}.")
    _verify(step_dir, [saved.source])
    _read_into(saved.source, targets)
    for parameter, state in states.items():
        group = settings[id(parameter)]
        if group.get("fused") or group.get("capturable"):  # these kernels count the steps on the device
            state["step"] = state["step"].to(parameter.device)
        optimizer.state[parameter] = state
    _restore_settings(saved, optimizer, names)
    if frozen:
        log.warning(
            "The saved optimizer state of %d parameters that no longer train is dropped: %s",
            len(frozen), _few(frozen),
        )  # fmt: skip
    new = [name for name in fresh if saved.without_state is None or name not in known]
    if new:
        log.warning(
            "No optimizer state was saved for %d parameters; theirs starts anew: %s", len(new), _few(new)
        )


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")


def _restore_settings(
    saved: _SavedOptimizer, optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> None:
    by_name = {name: group for group in saved.groups for name in group["params"]}
    for index, group in enumerate(optimizer.param_groups):
        sources = [by_name[names[id(p)]] for p in group["params"] if names[id(p)] in by_name]
        if not sources and len(saved.groups) == len(optimizer.param_groups):
            sources = [saved.groups[index]]  # a policy without cameras has an empty group
        for key in GROUP_SETTINGS if sources else ():
            if key in sources[0]:
                value = sources[0][key]
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if key == "betas" else value


def _open_optimizer(training: Path, module: nn.Module) -> _SavedOptimizer:
    ours = _read_json(training / OPTIMIZER_NAMES) if (training / OPTIMIZER_NAMES).is_file() else None
    without_state = None if ours is None else set(ours["without_state"])
    source = training / OPTIMIZER_SHARDS
    keys: dict[str, dict[str, str]] = {}
    if source.is_dir():
        prefix = "optimizer.state."
        shapes = {key: shape for key, shape in _shapes(source).items() if key.startswith(prefix)}
        for key in shapes:
            name, _, kind = key.removeprefix(prefix).rpartition(".")
            keys.setdefault(name, {})[kind] = key
        return _SavedOptimizer(source, _read_shard_groups(source), keys, shapes, without_state)
    source = training / OPTIMIZER
    groups, shapes = _read_json(training / OPTIMIZER_GROUPS), _shapes(source)
    counts = [len(group["params"]) for group in groups]
    if groups and all(isinstance(p, str) for group in groups for p in group["params"]):
        orders = [[group["params"] for group in groups]]  # LeRobot 0.6.1 under FSDP
    else:
        orders = [ours["groups"]] if ours else _lerobot_orders(module, len(groups))
    order = next((names for names in orders if [len(n) for n in names] == counts), None)
    if order is None:
        raise ValueError(
            f"{training / OPTIMIZER_GROUPS} has groups of {' + '.join(map(str, counts))} parameters, this "
            f"policy of {' + '.join(str(len(n)) for n in orders[0])}; it is another policy's."
        )
    name_of = {str(i): n for group, names in zip(groups, order) for i, n in zip(group["params"], names)}
    for key in shapes:
        _, index, kind = key.split("/")
        keys.setdefault(name_of.get(index, f"parameter {index}"), {})[kind] = key
    settings = [{**group, "params": names} for group, names in zip(groups, order)]
    return _SavedOptimizer(source, settings, keys, shapes, without_state)


def _lerobot_orders(module: nn.Module, group_count: int) -> list[list[list[str]]]:
    """The names behind LeRobot's indices: the backbone last in a group of its own, or all in one group."""
    orders = []
    for trained_only in (False, True):
        names = [_clean(n) for n, p in module.named_parameters() if p.requires_grad or not trained_only]
        backbone = [n for n in names if n.startswith("model.backbone")]
        two = [[n for n in names if n not in set(backbone)], backbone]
        orders.append(two if group_count == 2 else [names])
    return orders


def _load_scheduler(path: Path, scheduler: Any) -> None:
    state, now = _read_json(path), scheduler.state_dict()
    if not isinstance(state, dict) or "last_epoch" not in state:
        raise ValueError(f"{path} is not a schedule's state.")
    for key in (
        "base_lrs",
        "_last_lr",
        "lr_lambdas",
    ):  # LeRobot without its preset has one group, we have two
        if key in now and len(state.get(key, [])) == 1:
            state[key] = state[key] * len(now[key])
    if missing := sorted(now.keys() - state.keys()):
        raise ValueError(f"{path} is of another schedule: it lacks {', '.join(missing)}.")
    scheduler.load_state_dict(state)


def _load_rng(training: Path) -> None:
    """This rank's random state. Ranks that the saved run did not have keep what they were seeded with."""
    rank = int(os.environ.get("RANK", "0")) if not dist.is_initialized() else dist.get_rank()
    source = training / "rng_state_ranks.safetensors"
    prefix = f"rank{rank}."
    if not source.is_file():
        source, prefix = training / "rng_state.safetensors", ""
        if rank > 0:  # LeRobot's file holds rank 0 only; the same draws on every rank would be worse
            return
    with _open_safetensors(source) as file:
        state = {k.removeprefix(prefix): file.get_tensor(k) for k in file.keys() if k.startswith(prefix)}  # noqa: SIM118
    if not state:
        return
    try:
        gauss = float(state.get("py_rng_gauss", torch.tensor([math.nan])))
        internal = tuple(state["py_rng_state"].tolist())
        random.setstate((int(state["py_rng_version"]), internal, None if math.isnan(gauss) else gauss))
        cached = state.get("np_rng_cached_gaussian_f64", state["np_rng_cached_gaussian"])
        values = state["np_rng_state_values"].numpy().astype(np.uint32)
        index, has_gauss = int(state["np_rng_state_index"]), int(state["np_rng_has_gauss"])
        np.random.set_state(("MT19937", values, index, has_gauss, float(cached)))
        torch.set_rng_state(state["torch_rng_state"])
        if "torch_cuda_rng_state" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["torch_cuda_rng_state"])
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise ValueError(f"{source} is not a random state: {_sentence(error)}") from None


# -- DCP, without its pickles


class _MetadataUnpickler(pickle.Unpickler):
    """Admits the classes that DCP's .metadata is made of, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and name in (
            "PosixPath",
            "WindowsPath",
            "PurePosixPath",
            "PureWindowsPath",
        ):
            return pathlib.PurePosixPath
        classes = {
            "torch.distributed.checkpoint.metadata": (
                "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
                "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
            ),
            "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
            "torch.serialization": ("_get_layout",),
            "torch": ("Size",),
            "collections": ("OrderedDict",),
        }  # fmt: skip
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in classes.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def read_shard_metadata(directory: Path) -> Metadata:
    """The .metadata of a DCP directory.

    Raises:
        ValueError: it is missing, damaged, asks for foreign classes or names files outside the directory.
    """
    path = directory / ".metadata"
    try:
        with open(path, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        entries, storage = metadata.state_dict_metadata, metadata.storage_data
        if not (isinstance(metadata, Metadata) and isinstance(entries, dict) and isinstance(storage, dict)):
            raise TypeError("it is not the metadata of shards")
        files = {info.relative_path for info in storage.values()}
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist.") from None
    except Exception as error:  # damaged pickles raise nearly anything
        raise ValueError(f"{path} cannot be read: {_sentence(error)}") from None
    for name in files:
        if Path(name).name != name:
            raise ValueError(f"{path} names {name!r}, which is outside its directory.")
    return metadata


def shard_problems(directory: Path) -> list[str]:
    """What is wrong with a DCP directory as far as names and sizes show."""
    try:
        metadata = read_shard_metadata(directory)
    except ValueError as error:
        return [str(error).rstrip(".")]
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    problems = []
    for name, size in sorted(needed.items()):
        path = directory / name
        if not path.is_file():
            problems.append(f"{path} does not exist")
        elif path.stat().st_size < size:
            problems.append(f"{path} is cut off: {path.stat().st_size} of {size} bytes")
    return problems


class _ShardReader(dcp.FileSystemReader):
    """DCP's reader with the safe unpickler, and with the name of the file in its errors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_shard_metadata(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: Any) -> Any:
        per_file: dict[str, list] = {}
        for item in plan.items:
            per_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in per_file.items():
            try:
                super().read_data(LoadPlan(items), planner)
            except Exception as error:
                raise ValueError(f"{Path(self.path) / name} cannot be read: {_sentence(error)}") from None
        return super().read_data(LoadPlan([]), planner)


class _ShardPlanner(DefaultLoadPlanner):
    """DCP's planner, which would unpickle whatever bytes it finds; these may hold plain values only."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _read_shards(directory: Path, targets: dict[str, Any]) -> dict[str, Any]:
    """Fill `targets`, whose keys are those of the .metadata; values that are no tensors are replaced."""
    planner = _ShardPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to load.*")
            dcp.load(targets, storage_reader=_ShardReader(directory), planner=planner, no_dist=True)
    except (Exception, CheckpointException) as error:  # CheckpointException is no Exception (torch 2.14)
        text = _sentence(error)
        raise ValueError(text if str(directory) in text else f"{directory} cannot be read: {text}") from None
    return targets


def _read_shard_groups(directory: Path) -> list[dict]:
    entries = read_shard_metadata(directory).state_dict_metadata
    prefix = "optimizer.param_groups."
    wanted: dict[str, Any] = {key: None for key in entries if key.startswith(prefix)}
    groups: dict[int, dict] = {}
    for key, value in _read_shards(directory, wanted).items():
        index, _, setting = key.removeprefix(prefix).partition(".")
        groups.setdefault(int(index), {})[setting] = value
    return [groups[index] for index in sorted(groups)]


# --------------------------------------------------------------------------------------------- resolve


def resolve_resume(path: str | os.PathLike, output_dir: str | os.PathLike | None) -> Path | None:
    """The step directory to resume from.

    Args:
        path: run directory, checkpoints/, step directory, `last`, pretrained_model/, train_config.json; or
            "auto": the newest whole checkpoint under `output_dir`, None where there is none.
    Raises:
        ValueError: nothing to resume there, or what was named is torn; lists the checkpoints found. Also
            where checkpoints/ is no directory: a disk that is not mounted must not look like a fresh start.
    """
    if str(path) == "auto":
        checkpoints = None if output_dir is None else Path(output_dir) / "checkpoints"
        if checkpoints is not None:
            _refuse_no_directory(checkpoints.parent)
            _refuse_no_directory(checkpoints)
        return _newest(checkpoints) if checkpoints and checkpoints.is_dir() else None
    place = Path(path)
    for name in ("train_config.json", MODEL):
        place = place.parent if place.name == name and place.exists() else place
    _refuse_no_directory(place if place.name == "checkpoints" else place / "checkpoints")
    if (place / "checkpoints").is_dir():
        place = place / "checkpoints"
    pointed = _read_pointer(place)
    target = place if pointed is None else place.parent / pointed
    problems = ["it does not exist"]
    if (target / MODEL).is_dir() or (target / TRAINING).is_dir():
        problems = checkpoint_problems(target)
        if not problems:
            return target
    is_last = place.name == "last"
    if is_last and pointed is not None:
        _warn_once(f"{place} leads to {pointed}, which is not whole: {problems[0]}.")
    elif target.is_dir() and problems != ["it does not exist"]:
        raise ValueError(f"{target} is not a whole checkpoint: {problems[0]}. {_found_near(target)}")
    folder = place.parent if is_last else place
    newest = _newest(folder) if folder.is_dir() else None
    if newest is None:
        raise ValueError(
            f"{path} is no checkpoint; give a run directory, its checkpoints/, a step directory, `last`, "
            f"pretrained_model/ or train_config.json. {_found_near(place)}"
        )
    return newest


def _refuse_no_directory(path: Path) -> None:
    """Raise a ValueError for a file or a dangling link where a directory belongs; absent is fine."""
    if path.is_dir() or not os.path.lexists(path):
        return
    what = f"leads to {os.readlink(path)}, which is no directory" if path.is_symlink() else "is a file"
    raise ValueError(
        f"{path} {what}: mount or restore the directory (then --resume finds it), remove {path}, or name "
        "another --output-dir."
    )


def run_dir_of(step_dir: Path) -> Path:
    """The run directory that a step directory of `resolve_resume` lies in."""
    parent = step_dir.resolve().parent
    return parent.parent if parent.name == "checkpoints" else parent


def find_checkpoints(checkpoints: Path) -> list[tuple[Path, list[str]]]:
    """Step directories, oldest first, each with what is wrong with it.

    Ours are ordered by the time of saving, since a run that went back saves lower steps later.
    """
    found = []
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        if _is_step(path):
            problems = checkpoint_problems(path)
            saved_at = None if problems else _training_step(path).get("saved_at")
            found.append((saved_at, int(path.name), path, problems))
    timed = all(isinstance(f[0], float) for f in found if not f[3])
    found.sort(key=lambda f: (f[0] or 0.0, f[1]) if timed else (0.0, f[1]))
    return [(path, problems) for _, _, path, problems in found]


def checkpoint_problems(step_dir: Path) -> list[str]:
    """What keeps a step directory from being whole, as far as names, sizes and headers show; [] if it is."""
    model_dir, training = step_dir / MODEL, step_dir / TRAINING
    problems = []

    def attempt(read: Callable[[Path], Any], path: Path) -> Any:
        try:
            return read(path)
        except ValueError as error:
            problems.append(str(error).rstrip("."))
            return None

    attempt(lambda _: _training_step(step_dir), training)
    for name in ("config.json", "train_config.json"):
        attempt(_read_json, model_dir / name)
    legacy = (model_dir / WEIGHTS).is_file() and not (model_dir / "policy_preprocessor.json").exists()
    if legacy:  # LeRobot before 0.4
        legacy = any(map(LEGACY_BUFFER.match, attempt(_shapes, model_dir / WEIGHTS) or ()))
    for side in () if legacy else ("pre", "post"):
        processor = attempt(_read_json, model_dir / f"policy_{side}processor.json")
        for step in processor.get("steps", []) if isinstance(processor, dict) else []:
            if isinstance(step, dict) and step.get("state_file"):
                attempt(_shapes, model_dir / step["state_file"])
    attempt(_shapes, training / "rng_state.safetensors")
    weights = [f for f in (WEIGHTS, ADAPTER, WEIGHT_SHARDS) if (model_dir / f).exists()]
    if (model_dir / ADAPTER).exists() or (model_dir / ADAPTER_CONFIG).exists():
        attempt(_read_json, model_dir / ADAPTER_CONFIG)
    if not weights:
        problems.append(f"{model_dir} has neither {WEIGHTS}, {ADAPTER} nor {WEIGHT_SHARDS}")
    for source in [model_dir / f for f in weights] + [training / OPTIMIZER_SHARDS]:
        if source.is_dir():
            problems += shard_problems(source)
        elif source.name != OPTIMIZER_SHARDS:
            attempt(_shapes, source)
    if not (training / OPTIMIZER_SHARDS).is_dir():
        attempt(_shapes, training / OPTIMIZER)
        attempt(_read_json, training / OPTIMIZER_GROUPS)
    for name in ("run_config.json", "scheduler_state.json", "scaler_state.json", OPTIMIZER_NAMES, CHECKSUMS):
        if (training / name).exists():
            attempt(_read_json, training / name)
    record = training / CHECKSUMS
    if not problems and record.exists():
        replaced = (f"{MODEL}/{WEIGHT_SHARDS}", f"{MODEL}/{WEIGHTS}")  # conversion trades one for the other
        for name in _read_json(record):
            if not (step_dir / name).exists() and not name.startswith(replaced):
                problems.append(f"{step_dir / name} does not exist")
    return problems


def _is_step(path: Path) -> bool:
    return path.name.isdigit() and path.is_dir() and not path.is_symlink()


def _newest(checkpoints: Path) -> Path | None:
    _recover(checkpoints)
    for path in sorted(checkpoints.iterdir()):
        if re.fullmatch(r"\.(tmp|old|trash)-\d+", path.name):
            _warn_once(f"{path} is left from a save that was interrupted; it is not used.")
    newest = None
    for path, problems in find_checkpoints(checkpoints):
        if problems:
            _warn_once(f"{path} is not whole and is not used: {problems[0]}.")
        else:
            newest = path
    return newest


def _warn_once(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        log.warning("%s", text)


def _found_near(path: Path) -> str:
    for place in (path, *list(path.parents)[:2], path.parent / "checkpoints"):
        whole = [p for p, problems in find_checkpoints(place) if not problems]
        if whole:
            return f"Whole checkpoints in {place}: {', '.join(p.name for p in whole)}."
    return "No whole checkpoint was found near it."


# ------------------------------------------------------------------------- LeRobot's train_config.json

# Written only where they differ from LeRobot's default: its versions up to 0.6.1 refuse them as unknown keys.
# Every other key that is left out takes LeRobot's default, too.
_UNSHARDED = {"dp_replicate": 1, "dp_shard": 1}


def lerobot_train_config(run_config: dict, policy_config: dict, parallelism: dict[str, int]) -> dict:
    """Content of train_config.json: what LeRobot has a word for, since it refuses any other key.

    Args:
        run_config: nested by the command line's names.
        parallelism: the resolved degrees dp_replicate and dp_shard.
    """
    run = {key: value for key, value in run_config.items() if value is not None}
    data, optim, peft = ({**(run.get(part) or {})} for part in ("dataset", "optimizer", "peft"))
    root, lr, decay = data.get("root"), optim.get("lr"), optim.get("weight_decay")
    lr = float(policy_config.get("optimizer_lr", 1e-5) if lr is None else lr)
    decay = float(policy_config.get("optimizer_weight_decay", 1e-4) if decay is None else decay)
    eval_split, steps = float(data.get("val_split") or 0), int(run.get("steps", 100_000))
    replicate, shard = parallelism["dp_replicate"], parallelism["dp_shard"]
    config: dict[str, Any] = {
        "dataset": {
            "repo_id": data.get("repo_id") or f"local/{Path(root).name if root else 'embedded'}",
            "root": os.path.abspath(root) if root else None,
            "episodes": None if data.get("episodes") is None else list(data["episodes"]),
            "use_imagenet_stats": bool(data.get("use_imagenet_stats", True)),
            "eval_split": eval_split,
        },
        "policy": dict(policy_config),
        "output_dir": os.path.abspath(run["output_dir"]) if "output_dir" in run else None,
        "job_name": run.get("job_name", "act"),
        "resume": False,
        "seed": run.get("seed", 1000),
        "num_workers": 4 if run.get("num_workers") is None else run["num_workers"],
        "batch_size": run.get("batch_size", 8),
        "steps": steps,
        "env_eval_freq": 0,
        "log_freq": run.get("log_freq", 200),
        "eval_steps": int(run.get("eval_freq", 0)) if eval_split else 0,  # refused without a split
        "tolerance_s": float(data.get("tolerance_s") or 1e-4),
        "save_checkpoint": True,
        "save_freq": run.get("save_freq", 20_000),
        "use_policy_training_preset": True,
        "optimizer": {
            "type": "adamw",
            "lr": lr,
            "weight_decay": decay,
            "grad_clip_norm": float(optim.get("grad_clip_norm", 10.0)),
            "betas": [float(beta) for beta in optim.get("betas", (0.9, 0.999))],
            "eps": float(optim.get("eps", 1e-8)),
        },
        "scheduler": _lerobot_scheduler(run.get("scheduler") or {}, steps, lr),
        "wandb": {"enable": run.get("tracker") == "wandb"},
        "peft": None,
    }
    if data.get("val_episodes"):
        config["dataset"]["exclude_episodes"] = list(data["val_episodes"])
    if peft.get("method_type"):
        names = ("method_type", "r", "lora_alpha", "target_modules", "full_training_modules")
        config["peft"] = {
            k: list(peft[k]) if isinstance(peft[k], tuple) else peft[k] for k in names if k in peft
        }
    if run.get("checkpoint_format", "safetensors") != "safetensors":
        config["checkpoint_format"] = run["checkpoint_format"]
    if parallelism != _UNSHARDED:
        config["parallelism"] = dict(parallelism)

    accelerator: dict[str, Any] = {}
    if run.get("mixed_precision", "no") != "no":
        accelerator["mixed_precision"] = run["mixed_precision"]
    if run.get("gradient_accumulation_steps", 1) != 1:
        accelerator["gradient_accumulation"] = {"steps": run["gradient_accumulation_steps"]}
    if run.get("compile"):
        accelerator["compile"] = {"enabled": True, "mode": run.get("compile_mode")}
    keys: tuple[str, ...] = ()
    if shard > 1:
        keys = ("reshard_after_forward", "wrap_modules", "min_num_params", "cpu_offload", "ignored_modules")
    elif replicate > 1:
        keys = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph")
    part = "fsdp" if shard > 1 else "ddp"
    given = run.get(part) or {}
    if settings := {k: given[k] for k in keys if given.get(k) is not None}:
        accelerator[part] = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
    return config | ({"accelerator": accelerator} if accelerator else {})


def _lerobot_scheduler(scheduler: dict, steps: int, lr: float) -> dict | None:
    """The schedule under LeRobot's names; None for a constant rate."""
    warmup = {"num_warmup_steps": int(scheduler.get("warmup_steps") or 0)}
    match scheduler.get("name") or "none":
        case "none":
            return None
        case "linear":
            return {"type": "constant_with_warmup", **warmup}
    decay = {"num_decay_steps": int(scheduler.get("decay_steps") or steps), "peak_lr": lr}
    decay["decay_lr"] = lr * float(scheduler.get("final_lr_ratio") or 0.0)
    return {"type": "cosine_decay_with_warmup", **warmup, **decay}


def run_config_from_lerobot(config: dict) -> dict:
    """Our configuration, nested by the command line's names, from LeRobot's train_config.json."""

    def part(*path: str) -> dict:
        here = config
        for name in path:
            here = here.get(name) or {}
        return here

    def keep(source: dict, *names: str) -> dict:
        return {name: source[name] for name in names if source.get(name) is not None}

    policy, scheduler = part("policy"), part("scheduler")
    run = keep(
        config, "output_dir", "job_name", "steps", "batch_size", "num_workers", "seed", "log_freq",
        "save_freq", "save_checkpoint", "checkpoint_format",
    )  # fmt: skip
    run |= keep(part("accelerator"), "mixed_precision")
    run["eval_freq"] = config.get("eval_steps") or 0
    run["device"] = "cpu" if policy.get("device") == "cpu" else "auto"
    run["gradient_accumulation_steps"] = part("accelerator", "gradient_accumulation").get("steps") or 1
    run["compile"] = bool(part("accelerator", "compile").get("enabled"))
    run["compile_mode"] = part("accelerator", "compile").get("mode")
    run["parallelism"] = keep(part("parallelism"), "dp_replicate", "dp_shard")
    run["fsdp"] = keep(part("accelerator", "fsdp"), "reshard_after_forward", "wrap_modules", "min_num_params",
                       "cpu_offload", "ignored_modules")  # fmt: skip
    run["dataset"] = keep(part("dataset"), "repo_id", "root", "episodes", "use_imagenet_stats")
    run["dataset"] |= keep(config, "tolerance_s")
    if part("dataset").get("eval_split"):
        run["dataset"]["val_split"] = part("dataset")["eval_split"]
    if part("dataset").get("exclude_episodes"):
        run["dataset"]["val_episodes"] = part("dataset")["exclude_episodes"]
    not_ours = (
        "type", "input_features", "output_features", "device", "use_amp", "use_peft", "push_to_hub",
        "repo_id", "private", "tags", "license", "pretrained_path", "pretrained_revision",
    )  # fmt: skip
    run["policy"] = {key: value for key, value in policy.items() if key not in not_ours}
    run["optimizer"] = keep(part("optimizer"), "lr", "weight_decay", "betas", "eps", "grad_clip_norm")
    if policy.get("optimizer_lr_backbone") is not None:
        run["optimizer"]["lr_backbone"] = policy["optimizer_lr_backbone"]
    run["scheduler"] = {"name": "none"}
    if kind := scheduler.get("type"):
        cosine = "cosine" in kind or "cosine" in str(scheduler.get("name", "cosine"))
        run["scheduler"] = {
            "name": "cosine" if cosine and kind != "constant_with_warmup" else "linear",
            "warmup_steps": scheduler.get("num_warmup_steps") or 0,
        }
        if scheduler.get("peak_lr"):
            run["scheduler"]["final_lr_ratio"] = scheduler.get("decay_lr", 0.0) / scheduler["peak_lr"]
            run["scheduler"]["decay_steps"] = scheduler.get("num_decay_steps")
        if kind not in ("cosine_decay_with_warmup", "constant_with_warmup"):
            log.warning("LeRobot's schedule %s goes on as %s.", kind, run["scheduler"])
    if part("peft"):
        run["peft"] = keep(part("peft"), "method_type", "r", "lora_alpha", "target_modules",
                           "full_training_modules")  # fmt: skip
    if part("wandb").get("enable"):
        run["tracker"] = "wandb"
    return run


# --------------------------------------------------------------------------------------------- convert


def convert(
    checkpoint_dir: Path, delete_dcp: bool = False, dtype: Dtype = "float32", push_to_hub: str | None = None
) -> None:
    """Make one model.safetensors of DCP shards or of an adapter and its base. No GPU, no process group.

    Args:
        checkpoint_dir: Step directory, run directory, `last` or pretrained_model/.
        delete_dcp: Delete the weight shards once the merged file was read back and compared.
        dtype: Precision of the merged file. Where the float32 weights would be lost they are kept in
            model_float32.safetensors, and a resume goes on from them.
        push_to_hub: USER/NAME of a model repository to upload the result to (needs huggingface_hub).
    """
    model_dir = _model_dir(checkpoint_dir)
    target, master, shards = model_dir / WEIGHTS, _master_file(model_dir), model_dir / WEIGHT_SHARDS
    source = model_dir / ADAPTER_CONFIG
    if not source.is_file():
        source = _weights_source(model_dir, adapter=False, resume=True)
    deletes = delete_dcp and shards.is_dir()
    if deletes and source.name == ADAPTER_CONFIG and not (model_dir / ADAPTER).is_file():
        raise ValueError(
            f"--delete-dcp would delete the only copy of the adapter, {shards}, and a resume with it; leave "
            "the flag out."
        )
    loses = source == target or (deletes and target.is_file() and "float32" in _precision(target))
    keeps = dtype != "float32" and loses
    _verify(model_dir.parent, [source])
    cast = _read_all(source)
    for key in cast:  # one at a time: never two copies of the weights
        if cast[key].is_floating_point():
            cast[key] = cast[key].to(getattr(torch, dtype)).contiguous()
    size = sum(value.nbytes for value in cast.values())
    needed = size + (target.stat().st_size if keeps else 0)
    if (free := shutil.disk_usage(model_dir).free) < needed:
        raise ValueError(f"{target} needs {needed:,} bytes and the disk has {free:,} free; make room.")
    new = model_dir / f".{WEIGHTS}.new"
    try:
        _save_tensors(cast, new, {"format": "pt"})
        _flush(new)
        with _open_safetensors(new) as file:
            different = [key for key, value in cast.items() if not _same(file.get_tensor(key), value)]
    except (OSError, SafetensorError) as error:
        new.unlink(missing_ok=True)
        raise ValueError(f"{target} was not written: {_sentence(error)}") from None
    if different:
        new.unlink()
        raise ValueError(f"{new} reads back differently from what was written ({different[0]}): a bad disk?")
    if keeps:
        shutil.copyfile(target, master.with_suffix(".new"))
        _flush(master.with_suffix(".new"))
        os.replace(master.with_suffix(".new"), master)  # what a resume goes on from
    os.replace(new, target)
    _flush(model_dir)
    if (model_dir / ADAPTER_CONFIG).is_file():
        _edit_json(model_dir / "config.json", {"use_peft": False})
    if deletes:
        _edit_json(model_dir / "train_config.json", {"checkpoint_format": "safetensors"})
        os.rename(shards, model_dir / ".trash-0")
        shutil.rmtree(model_dir / ".trash-0")
    if (model_dir.parent / TRAINING / CHECKSUMS).is_file():
        names = [f"{MODEL}/{name}" for name in (WEIGHTS, "config.json", "train_config.json")]
        _write_checksums(model_dir.parent, [*names, f"{TRAINING}/{MASTER_WEIGHTS}"])
    # Said when all is done: a reader that has gone (| head) cannot break it off halfway.
    print(f"{target}: {len(cast)} tensors, {size:,} bytes, {dtype}, verified")
    if keeps:
        print(f"{master} keeps the weights as they were, for --resume and another convert.")
    if (model_dir / ADAPTER_CONFIG).is_file():
        print(f"The adapter stays beside it for --resume; everything else loads {WEIGHTS} from here on.")
    if deletes:
        print(f"{shards} deleted")
    elif shards.is_dir():
        print(f"{shards} is kept, and a --resume goes on from it; --delete-dcp deletes it.")
    if deletes and dtype != "float32" and not master.is_file():
        print(f"Only {dtype} weights remain: a resume would go on from rounded values.")
    if push_to_hub:
        upload_policy(model_dir, push_to_hub)


def _same(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    )


def _read_all(source: Path) -> dict[str, Tensor]:
    """Every tensor of a weights source, whole, in host memory; without the statistics of old files."""
    if source.name == ADAPTER_CONFIG:
        return _merged(source.parent)
    if source.is_dir():
        entries = read_shard_metadata(source).state_dict_metadata
        empty = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        return {key.removeprefix("model."): v for key, v in _read_shards(source, empty).items()}
    with _open_safetensors(source) as file:
        return {k: file.get_tensor(k) for k in file.keys() if not LEGACY_BUFFER.match(k)}  # noqa: SIM118


def _merged(model_dir: Path) -> dict[str, Tensor]:
    """Base weights with a LoRA adapter of PEFT's format worked in: W + (alpha / r) B A, summed in float64."""
    path = model_dir / ADAPTER_CONFIG
    config = _read_json(path)
    strange = [
        k
        for k in ("use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "lora_bias")
        if config.get(k)
    ]
    if config.get("peft_type") != "LORA" or strange or config.get("bias", "none") != "none":
        what = ", ".join(strange) or f"peft_type {config.get('peft_type')}, bias {config.get('bias')}"
        raise ValueError(f"{path} uses {what}, which cannot be merged here; merge it with PEFT.")
    base = config.get("base_model_name_or_path")
    if not base or not Path(base := policy_folder(base)).exists():
        raise ValueError(f"{path} builds on {base}, which is not there; restore it or correct the path.")
    base_dir = _model_dir(base)
    merged = _read_all(_weights_source(base_dir, adapter=False, resume=True))
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    file = model_dir / ADAPTER if (model_dir / ADAPTER).is_file() else model_dir / WEIGHT_SHARDS
    saved = _read_all(file)
    for key, value in saved.items():
        if key.endswith(".base_layer.out_proj.lora_B.weight") and value.any():
            raise ValueError(
                f"{file}: {key} is not zero, and versions of peft differ in what it means "
                "(huggingface/peft#3774); merge this adapter with the peft that trained it."
            )
    # PEFT wraps an attention, and the wrapped one is its base_layer.
    adapter = {
        key.removeprefix(PEFT_PREFIX).replace(".base_layer.", "."): value for key, value in saved.items()
    }
    for key, value in adapter.items():
        module, is_lora, side = key.rpartition(".lora_")
        if is_lora and side == "A.weight":
            continue
        target, new = key, value
        if is_lora:
            target = (
                f"{module}.in_proj_weight" if f"{module}.in_proj_weight" in merged else f"{module}.weight"
            )
            new = value.double() @ adapter[f"{module}.lora_A.weight"].double()
        if target not in merged or merged[target].shape != new.shape:
            raise ValueError(f"{file}: {key} does not fit {target} of the base {base_dir}.")
        old = merged[target]
        merged[target] = (old.double() + new * scale if is_lora else new).to(old.dtype)
    return merged


def _edit_json(path: Path, changes: dict) -> None:
    if path.is_file():
        content = _read_json(path)
        if any(key in content and content[key] != value for key, value in changes.items()):
            new = path.with_name(f".{path.name}.new")
            _write_bytes(new, json.dumps({**content, **changes}, indent=4).encode())
            os.replace(new, path)


def upload_policy(path: str | os.PathLike, repo_id: str, facts: Mapping[str, Any] | None = None) -> str:
    """Upload a checkpoint's pretrained_model/ with a model card; the address of the repository.

    Args:
        facts: rows of the card: data set, steps, losses, success rate, ...
    Raises:
        ValueError: the upload failed; says how to repeat it. The checkpoint is untouched.
        ImportError: huggingface_hub is not installed.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise ImportError("--push-to-hub needs huggingface_hub: pip install huggingface_hub") from None
    model_dir = _model_dir(path)
    if not (model_dir / WEIGHTS).is_file() and not (model_dir / ADAPTER).is_file():
        raise ValueError(
            f"{model_dir} holds only shards; run: python ckpt.py convert --checkpoint-dir "
            f"{model_dir.parent} --push-to-hub {repo_id}"
        )
    _write_bytes(model_dir / "README.md", _model_card(model_dir, repo_id, facts or {}).encode())
    try:
        disable_progress_bars()  # of several threads: drawn over, and after, the error's sentence
        api = HfApi()
        address = api.create_repo(repo_id, repo_type="model", exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=str(model_dir),
            commit_message=f"Checkpoint {model_dir.parent.name}",
            ignore_patterns=[f"{WEIGHT_SHARDS}/*", MASTER_WEIGHTS, ".*"],
        )
    except Exception as error:  # whatever the network, the hub or the credentials do
        raise ValueError(
            f"The upload to {repo_id} failed ({_sentence(error.__cause__ or error)}); {model_dir} is "
            f"complete. Repeat: python ckpt.py convert --checkpoint-dir {model_dir.parent} "
            f"--push-to-hub {repo_id}"
        ) from None
    print(f"uploaded {model_dir} to {address}")
    return str(address)


def _model_card(model_dir: Path, repo_id: str, facts: Mapping[str, Any]) -> str:
    config = _read_json(model_dir / "config.json")
    train = _read_json(model_dir / "train_config.json") if (model_dir / "train_config.json").is_file() else {}
    data = (train.get("dataset") or {}).get("repo_id")
    rows = {"data set": data, "steps": train.get("steps"), "batch size per rank": train.get("batch_size")}
    rows |= {"seed": train.get("seed"), "learning rate": (train.get("optimizer") or {}).get("lr")}
    rows |= {key: config.get(key) for key in ("chunk_size", "dim_model", "vision_backbone", "use_vae")}
    rows |= facts
    lines = ["---", "library_name: lerobot", "pipeline_tag: robotics", "tags: [robotics, lerobot, act]"]
    if data and not data.startswith("local/"):
        lines.append(f"datasets: [{data}]")
    lines += ["---", "", f"# {repo_id}", "", "An Action Chunking Transformer policy (arXiv:2304.13705).", ""]
    lines += ["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items() if v is not None), ""]
    lines += ["```python", "from lerobot.policies.act.modeling_act import ACTPolicy", ""]
    lines += [f'policy = ACTPolicy.from_pretrained("{repo_id}")', "```", ""]
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------ show


def show(checkpoint_dir: Path) -> None:
    """Say what a checkpoint holds: step, layout, weights, sizes, whole or torn (exit code 1).

    Args:
        checkpoint_dir: Step directory, `last`, run directory (its newest) or pretrained_model/.
    """
    path = Path(checkpoint_dir)
    if path.name == MODEL:
        path = path.parent
    if not (path / MODEL).is_dir() and not (path / TRAINING).is_dir():
        path = resolve_resume(path, None) or path
    problems = checkpoint_problems(path)
    if not problems:
        try:
            files = [p for p in (path / MODEL, path / TRAINING) if p.is_dir()]
            _verify(
                path, [p for directory in files for p in sorted(directory.iterdir()) if p.name != CHECKSUMS]
            )
        except ValueError as error:
            problems = [str(error)]
    print(f"{path}: {'torn' if problems else 'whole'}")
    for problem in problems:
        print(f"  wrong: {problem}")
    try:
        state = _training_step(path)
    except ValueError:
        state = {}
    parallelism = state.get("parallelism") or {}
    if state:
        print(f"  step {state['step']}, samples seen {state.get('samples_seen', 'not recorded')}")
        print(
            f"  written by {state.get('dp_world_size', '?')} ranks: "
            f"dp_replicate {parallelism.get('dp_replicate', '?')}, "
            f"dp_shard {parallelism.get('dp_shard', '?')}, batch {state.get('batch_size', '?')} a rank, "
            f"accumulation {state.get('grad_accum_steps', '?')}"
        )
    for line in _weights_lines(path):
        print(f"  {line}")
    for part in (MODEL, TRAINING):
        for entry in sorted((path / part).iterdir()) if (path / part).is_dir() else ():
            inside = [entry] if entry.is_file() else [p for p in entry.rglob("*") if p.is_file()]
            size = sum(p.stat().st_size for p in inside)
            shards = f" in {len(inside)} files" if entry.is_dir() else ""
            print(f"  {size:>14,} bytes  {part}/{entry.name}{shards}")
    if problems:
        raise SystemExit(1)


def _weights_lines(step_dir: Path) -> list[str]:
    """Format, precision and size of each copy of the weights that can be read; an adapter's base."""
    lines = []
    model_dir, names_file = step_dir / MODEL, step_dir / TRAINING / OPTIMIZER_NAMES
    has_adapter = (model_dir / ADAPTER_CONFIG).is_file()
    for source in (model_dir / name for name in (WEIGHTS, ADAPTER, WEIGHT_SHARDS)):
        if not source.exists():
            continue
        of_adapter = has_adapter and source.name != WEIGHTS
        try:
            shapes = {
                k.removeprefix("model.") if source.is_dir() else k: s for k, s in _shapes(source).items()
            }
            what, names = "numbers, buffers included", set(shapes)
            if of_adapter:
                what = "parameters"
            elif names_file.is_file() and not has_adapter:
                saved = _read_json(names_file)
                what, names = (
                    "parameters",
                    {*saved["without_state"], *(n for g in saved["groups"] for n in g)},
                )
            total = sum(math.prod(shape) for key, shape in shapes.items() if key in names)
            form = "DCP shards" if source.is_dir() else "safetensors"
            line = f"{'adapter' if of_adapter else 'weights'}: {form}, {_precision(source)}, {total:,} {what}"
            if of_adapter:
                config = _read_json(model_dir / ADAPTER_CONFIG)
                line += f", r {config.get('r')}, on the base {config.get('base_model_name_or_path')}"
            lines.append(line)
        except ValueError:  # torn, which was said already
            continue
    return lines


def main(argv: list[str] | None = None) -> None:
    import tyro

    given = sys.argv[1:] if argv is None else argv
    switch = re.compile(r"^--delete[-_]dcp=(true|false)$", re.IGNORECASE)  # lerobot-convert-dcp's spelling
    given = [
        ("--delete-dcp" if m[1].lower() == "true" else "--no-delete-dcp") if (m := switch.match(a)) else a
        for a in given
    ]
    logging.basicConfig(format="%(message)s")
    try:
        try:
            tyro.extras.subcommand_cli_from_dict({"convert": convert, "show": show}, args=given)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has gone; without a new end Python would say so at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)  # what a shell reports of other commands
    except (ValueError, OSError, ImportError) as error:
        sys.exit(_sentence(error))


if __name__ == "__main__":
    main()
