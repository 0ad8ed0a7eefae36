"""Ranks, meshes and precision: one curve whatever executes it (1 process, DDP, FSDP2, HSDP). Needs torch only.

    cluster = start("auto", ParallelismConfig(dp_shard=-1))      # under torchrun, or alone
    check_precision(cluster, "bf16", fsdp)                       # refuses what cannot work
    module = parallelize(policy, cluster, ddp, fsdp)             # policy is moved, then wrapped or sharded
    optimizer = torch.optim.AdamW(policy.optim_groups(...), fused=True)
    check_optimizer(optimizer, module)
    scaler = LossScaler(cluster.device) if mixed_precision == "fp16" else None

    with accumulate(module, sync=last_of_window), autocast(cluster, mixed_precision, fsdp):
        loss, parts = module(batch)
        backward(loss / accumulation_steps, scaler)              # forward and backward both inside
    if last_of_window:
        grad_norm = clip_grad_norm_(module, 10.0, scaler)        # the global norm, on the device
        optimizer_step(optimizer, scaler)
        optimizer.zero_grad()
    scheduler.step()                                             # once per loop step, skipped or not

Modes by (dp_replicate, dp_shard), whose product is the world size W: (1, 1) single, (W, 1) ddp, (1, W) fsdp, (R, S) hsdp.
Ranks are laid out as replica * dp_shard + shard, so that a replica's shards are neighbours (one node).

The policy may declare `wrap_modules` (class names of the FSDP wrap units) and `forward_methods` (entry points
beside `forward` that FSDP must gather for). Gradients are means over ranks in every mode.

fp16: a step whose global gradient is not finite is skipped by every rank. Such a step counts for `--steps`, for the
sample order and for the learning-rate schedule; it does not count in Adam's own step count.

Errors: a rank that throws lets its process die, and torchrun ends the others. `finish()` is for success only: tearing
a group down beside dead peers can hang.
"""

import contextlib
import dataclasses
import datetime
import inspect
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

MixedPrecision = Literal["no", "bf16", "fp16"]
DtypeName = Literal["float32", "bfloat16", "float16"]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ParallelismConfig:
    dp_replicate: int = 1
    """Copies of the model that average their gradients. With dp_shard 1 this is DDP. -1: the rest of the world."""
    dp_shard: int = 1
    """Ranks that one copy of the model is cut over (FSDP). -1: the rest of the world. Both left at 1: DDP over the world."""


@dataclass(frozen=True)
class DDPConfig:
    bucket_cap_mb: int = 1024
    """DDP gradient bucket, MiB. Smaller overlaps earlier, larger launches fewer all-reduces."""
    broadcast_buffers: bool | None = None
    """Send rank 0's buffers to all ranks before each forward. None: only where a BatchNorm has running statistics."""
    gradient_as_bucket_view: bool = True
    """Let gradients live inside the communication buckets: one copy of them less in memory."""
    static_graph: bool = False
    """Promise that every step uses the same parameters; DDP then reorders its buckets once."""
    find_unused_parameters: bool = False
    """Look each step for parameters without a gradient. Slower; only for policies that skip some of their layers."""


@dataclass(frozen=True)
class FSDPConfig:
    wrap_modules: tuple[str, ...] | None = None
    """Class names of the units that are gathered one at a time. None: what the policy declares."""
    min_num_params: int | None = None
    """Instead of class names: wrap every module that holds at least this many parameters not wrapped yet."""
    reshard_after_forward: bool = True
    """Free a unit's gathered parameters after its forward and gather again in backward: less memory, more traffic."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory. CUDA only; much slower."""
    ignored_modules: str | None = None
    """Regular expression on whole module names. Matching modules stay whole on every rank; they train the same."""
    param_dtype: DtypeName | None = None
    """Gather and compute in this dtype. As soon as one of these four is set, the precision policy is built from them alone."""
    reduce_dtype: DtypeName | None = None
    """Reduce gradients in this dtype. None: the dtype in which they were computed."""
    output_dtype: DtypeName | None = None
    """Cast each wrap unit's floating outputs. The policy's own outputs are not cast: a loss stays float32."""
    cast_forward_inputs: bool | None = None
    """Cast each wrap unit's floating inputs to param_dtype. None: yes. The batch itself is never cast."""


# ----------------------------------------------------------------------------------------------------- start and end


@dataclass(frozen=True)
class Cluster:
    """Who this process is, and how the ranks are arranged. `mesh` is None without sharding."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    dp_replicate: int
    dp_shard: int
    mesh: DeviceMesh | None = None
    step_timeout_s: float = 600

    @property
    def mode(self) -> str:
        """ "single", "ddp", "fsdp" or "hsdp"."""
        if self.world_size == 1:
            return "single"
        if self.dp_shard == 1:
            return "ddp"
        return "fsdp" if self.dp_replicate == 1 else "hsdp"

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def sharded(self) -> bool:
        return self.mode in ("fsdp", "hsdp")


def resolve_degrees(parallelism: ParallelismConfig, world_size: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard) with -1 filled in, so that their product is the world size.

    Raises:
        ValueError: the degrees cannot give the world size; the sentence holds all three numbers.
    """
    replicate, shard = parallelism.dp_replicate, parallelism.dp_shard
    flags = f"--parallelism.dp-replicate={replicate} and --parallelism.dp-shard={shard}"
    if replicate == 1 and shard == 1:
        return world_size, 1
    if replicate == -1 and shard == -1:
        raise ValueError(
            f"{flags} leave both degrees of world size {world_size} open; give one of them a number."
        )
    if any(degree == 0 or degree < -1 for degree in (replicate, shard)):
        raise ValueError(f"{flags} must be positive, or -1 for the rest of the world size {world_size}.")
    fixed = shard if replicate == -1 else replicate
    if -1 in (replicate, shard):
        if world_size % fixed:
            raise ValueError(
                f"{flags}: {fixed} does not divide the world size {world_size}; use one of its divisors."
            )
        return (world_size // fixed, shard) if replicate == -1 else (replicate, world_size // fixed)
    if replicate * shard != world_size:
        raise ValueError(
            f"{flags} multiply to {replicate * shard}, but the world size is {world_size}; "
            "change one of them, use -1, or start another number of processes."
        )
    return replicate, shard


def start(
    device: str = "auto",
    parallelism: ParallelismConfig = ParallelismConfig(),
    startup_timeout_s: float = 3600,
    step_timeout_s: float = 600,
) -> Cluster:
    """Join the process group that the launcher describes, or run alone where there is none.

    Collective: call on every rank. Time-outs are `startup_timeout_s` until `shorten_timeout`, for a first step may compile
    for minutes, then `step_timeout_s`. The group carries gloo beside NCCL: flags and messages between hosts
    then never touch the GPU, and CPU offload has a backend for its tensors.

    Raises:
        ValueError: the launcher's variables, the device or the degrees do not fit together.
    """
    rank, world_size = _env_int("RANK", 0), _env_int("WORLD_SIZE", 1)
    local_rank, local_world_size = _env_int("LOCAL_RANK", 0), _env_int("LOCAL_WORLD_SIZE", world_size)
    if world_size > 1:
        missing = [n for n in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]
        if missing:
            raise ValueError(
                f"WORLD_SIZE={world_size} is set but {', '.join(missing)} is not; start with torchrun."
            )
    dp_replicate, dp_shard = resolve_degrees(parallelism, world_size)
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device={device} is not known; use auto, cpu or cuda.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    refuse_accelerate_settings(device)
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                "--device=cuda, but torch sees no CUDA device; use --device cpu, or install a CUDA build."
            )
        # Compared for all local ranks, so that all of them refuse and none is left waiting.
        if local_world_size > torch.cuda.device_count() or local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"{local_world_size} processes on this machine, but torch sees {torch.cuda.device_count()} CUDA devices; "
                "start one process per device (--nproc-per-node)."
            )
        torch.cuda.set_device(
            local_rank
        )  # before the group: otherwise every rank opens a context on device 0
    here = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    mesh = None
    if world_size > 1:
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=datetime.timedelta(seconds=startup_timeout_s))
        if dp_shard > 1 and dp_replicate > 1:
            mesh = init_device_mesh(
                device, (dp_replicate, dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
            )
        elif dp_shard > 1:
            mesh = init_device_mesh(device, (dp_shard,), mesh_dim_names=("dp_shard",))
    return Cluster(
        rank, local_rank, world_size, local_world_size, here, dp_replicate, dp_shard, mesh, step_timeout_s
    )


def refuse_accelerate_settings(device: str) -> None:
    """Accept `accelerate launch` as a plain launcher, refuse it as a configuration of the training engine.

    Source: the variables that accelerate 1.15 sets in `accelerate/utils/launch.py`.
    """
    way_out = "launch without it and use train.py's own flags"
    flags = {
        "ACCELERATE_USE_FSDP": "--parallelism.dp-shard and --fsdp.*",
        "ACCELERATE_USE_DEEPSPEED": "--parallelism.dp-shard",
        "ACCELERATE_USE_MEGATRON_LM": "--parallelism.dp-shard",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "--parallelism.*",
        "ACCELERATE_MIXED_PRECISION": "--mixed-precision",
        "ACCELERATE_DYNAMO_BACKEND": "--compile",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "--gradient-accumulation-steps",
    }
    for name, value in sorted(os.environ.items()):
        off = value.strip().lower() in ("", "0", "false", "no", "none")
        if name in flags and not off and not (name.endswith("ACCUMULATION_STEPS") and value == "1"):
            raise ValueError(
                f"{name}={value} asks Accelerate to configure the run; {way_out} ({flags[name]})."
            )
        if name.startswith(("FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "ACCELERATE_DEEPSPEED_")):
            raise ValueError(
                f"{name}={value} asks Accelerate to configure the run; {way_out} (--parallelism.*, --fsdp.*)."
            )
        if name == "ACCELERATE_USE_CPU" and not off and device != "cpu":
            raise ValueError(f"{name}={value}, but the device is {device}; use --device cpu.")


def _env_int(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdigit():
        raise ValueError(f"The launcher's variable {name}={value} is not a number; start with torchrun.")
    return int(value)


def set_numerics(tf32: bool) -> None:
    """TF32 for CUDA's matrix products and convolutions, and cuDNN's search for the fastest convolution (static shapes)."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True


def shorten_timeout(cluster: Cluster) -> None:
    """From start-up's patience to `step_timeout_s`, in every group. Call once the first step is done."""
    if cluster.world_size == 1:
        return
    # torch 2.14 made it public and deprecates the private name, which is all that 2.11 has.
    set_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    groups = [dist.group.WORLD, *(cluster.mesh.get_all_groups() if cluster.mesh is not None else [])]
    for group in groups:
        set_timeout(datetime.timedelta(seconds=cluster.step_timeout_s), group)


def finish(cluster: Cluster) -> None:
    """Collective: call on every rank, on success only. Waits for all ranks and destroys the group."""
    if cluster.world_size > 1:
        any_rank(cluster, False)
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------- agreement between ranks


def any_rank(cluster: Cluster, flag: bool) -> bool:
    """Collective: call on every rank. True on all if `flag` is true on one. Host memory only, never the GPU."""
    if cluster.world_size == 1:
        return flag
    vote = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


class StopVote:
    """Lets ranks stop at the same step: `poll(flag)` in every step, at the price of a message in the background.

    Collective: poll on every rank. The answer is that of the previous poll, which has arrived by now: a signal
    seen by one rank in step n stops all of them after step n + 1.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._vote: Tensor | None = None
        self._work: Any = None

    def poll(self, flag: bool) -> bool:
        if self._cluster.world_size == 1:
            return flag
        stop = self._read()
        self._vote = torch.tensor([flag], dtype=torch.int32)
        self._work = dist.all_reduce(self._vote, op=dist.ReduceOp.MAX, async_op=True)
        return stop

    def _read(self) -> bool:
        if self._vote is None:
            return False
        self._work.wait()
        return bool(self._vote.item())


def from_main(cluster: Cluster, value: Any) -> Any:
    """Collective: call on every rank. Rank 0's value, on all (pickled: names, small settings)."""
    if cluster.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


@contextlib.contextmanager
def raise_together(cluster: Cluster) -> Iterator[None]:
    """An error inside, on one rank, becomes the same sentence on all. The body must hold no collective.

    Collective: enter on every rank. A user's error (ValueError, FileNotFoundError, ImportError) keeps its sentence and its type; anything
    else leaves its own rank with its traceback and the others with a RuntimeError that quotes it.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if not any_rank(cluster, error is not None):
        return
    if cluster.world_size == 1:
        assert error is not None
        raise error
    errors: list[tuple[str, str] | None] = [None] * cluster.world_size
    dist.all_gather_object(errors, None if error is None else (type(error).__name__, str(error)))
    first = next(rank for rank, e in enumerate(errors) if e is not None)
    name, sentence = cast(tuple[str, str], errors[first])
    user_errors: dict[str, type[Exception]] = {
        "ValueError": ValueError, "FileNotFoundError": FileNotFoundError, "ImportError": ImportError,
        "ModuleNotFoundError": ImportError,
    }  # fmt: skip
    if error is not None and type(error).__name__ not in user_errors:
        raise error
    if name in user_errors:
        raise user_errors[name](sentence) from error
    raise RuntimeError(f"rank {first} failed: {name}: {sentence}") from error


def rank0_first(cluster: Cluster, prepare: Callable[[], Any], per_node: bool = False) -> None:
    """Let rank 0 (`per_node`: the first rank of every machine) run `prepare` alone, however long it takes.

    Collective: call on every rank. The others poll the store: no collective waits, so no time-out can strike. An error of the
    one that prepares is raised on all that waited for it.
    """
    if cluster.world_size == 1:
        prepare()
        return
    global _rank0_first_calls
    _rank0_first_calls += 1
    node = _env_int("GROUP_RANK", cluster.rank // max(1, cluster.local_world_size)) if per_node else 0
    key = f"rank0_first/{_rank0_first_calls}/{node}"
    store = dist.PrefixStore("act", dist.distributed_c10d._get_default_store())
    if (cluster.local_rank if per_node else cluster.rank) == 0:
        try:
            prepare()
        except Exception as error:
            store.set(
                key, f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
            )
            raise
        store.set(key, "")
        return
    while not store.check([key]):
        time.sleep(0.05)
    sentence = store.get(key).decode()
    if sentence:
        raise ValueError(sentence)


_rank0_first_calls = 0  # names the keys of the store; equal on all ranks, which call in the same order


# --------------------------------------------------------------------------------------------------- wrap and shard


def check_precision(cluster: Cluster, mixed_precision: MixedPrecision, fsdp: FSDPConfig) -> None:
    """Refuse what cannot work; `cluster` decides whether the FSDP flags count at all.

    Raises:
        ValueError: two compute dtypes at once, fp16 without a loss scaler, or offloading with fp16.
    """
    if not cluster.sharded:
        return
    if fsdp.param_dtype == "float16" and mixed_precision != "fp16":
        raise ValueError("--fsdp.param-dtype=float16 needs the loss scaler; add --mixed-precision fp16.")
    half = HALF.get(mixed_precision)
    if half and fsdp.param_dtype not in (None, "float32") and _dtype(fsdp.param_dtype) != half:
        raise ValueError(
            f"--mixed-precision={mixed_precision} and --fsdp.param-dtype={fsdp.param_dtype} name two compute dtypes; drop one."
        )
    if fsdp.cpu_offload and mixed_precision == "fp16":
        raise ValueError(
            "--fsdp.cpu-offload keeps gradients on the CPU, where the loss scale on the GPU cannot reach them "
            "without a stop in every step; use --mixed-precision bf16."
        )


def parallelize(
    policy: nn.Module,
    cluster: Cluster,
    ddp: DDPConfig = DDPConfig(),
    fsdp: FSDPConfig = FSDPConfig(),
) -> nn.Module:
    """Move `policy` to the device and give it this cluster's mode. Compile before, build the optimizer after.

    Collective: call on every rank. All ranks leave with rank 0's weights. Under FSDP and HSDP the policy is changed in place and
    returned; under DDP the wrapper is returned.

    Raises:
        ValueError: no wrap unit, a parameter tied across wrap units, or a pattern that matches nothing.
    """
    policy.to(cluster.device)
    if cluster.mode == "single":
        return policy
    buffers = ddp.broadcast_buffers
    if buffers is None:
        buffers = any(
            isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None
            for m in policy.modules()
        )
    if cluster.mode == "ddp":
        if any(m._compiled_call_impl is not None for m in policy.modules()):
            # Dynamo would cut the graph at bucket borders; one graph and one all-reduce after it are faster here.
            import torch._dynamo

            torch._dynamo.config.optimize_ddp = False
        # torch 2.14 renamed the option, 2.11 knows the old name only.
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        module = DistributedDataParallel(
            policy,  # no device_ids: the batch is on the device already, and DDP need not copy it again
            **{name: buffers},
            bucket_cap_mb=ddp.bucket_cap_mb,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            static_graph=ddp.static_graph,
            find_unused_parameters=ddp.find_unused_parameters,
        )
        module._first_window_done = not ddp.static_graph  # type: ignore[assignment]
        return module
    return _shard(policy, cluster, fsdp, buffers)


def _shard(policy: nn.Module, cluster: Cluster, fsdp: FSDPConfig, broadcast_buffers: bool) -> nn.Module:
    ignored = _ignored_modules(policy, fsdp.ignored_modules)
    ignored_params = {p for module in ignored for p in module.parameters()}
    units = wrap_units(policy, fsdp, ignored)
    refuse_tied(policy, units)
    for tensor in [*policy.parameters(), *policy.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    given = {
        f: getattr(fsdp, f) for f in ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    }
    precision = MixedPrecisionPolicy()
    if any(value is not None for value in given.values()):
        precision = MixedPrecisionPolicy(
            _dtype(fsdp.param_dtype),
            _dtype(fsdp.reduce_dtype),
            _dtype(fsdp.output_dtype),
            fsdp.cast_forward_inputs is not False,
        )
    # Masters, targets and counts come in through the root, losses go out: neither may be rounded to a half type.
    root_precision = dataclasses.replace(precision, output_dtype=None, cast_forward_inputs=False)
    offload = OffloadPolicy()
    if fsdp.cpu_offload and cluster.device.type == "cuda":
        offload = CPUOffloadPolicy()
    # The root follows the flag as well (torch would keep it gathered), so that between steps
    # `parameters()` are shards at all times, whether a training or a validation step ran last.
    shard: Any = lambda module, precision: fully_shard(  # noqa: E731
        module,
        mesh=cluster.mesh,
        reshard_after_forward=fsdp.reshard_after_forward,
        mp_policy=precision,
        offload_policy=offload,
        ignored_params=ignored_params,
    )
    for unit in reversed(list(units.values())):  # named_modules is top-down; sharding goes bottom-up
        shard(unit, precision)
    shard(policy, root_precision)
    for name in getattr(policy, "forward_methods", ()):
        register_fsdp_forward_method(policy, name)
    policy._ignored_parameters = [p for p in policy.parameters() if p in ignored_params and p.requires_grad]  # type: ignore[assignment]
    if broadcast_buffers:
        policy.register_forward_pre_hook(_broadcast_buffers)
    return policy


def _broadcast_buffers(module: nn.Module, args: Any) -> None:
    """What DDP does with the running statistics of batch norms, for sharded modules."""
    if module.training:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _ignored_modules(policy: nn.Module, pattern: str | None) -> list[nn.Module]:
    if pattern is None:
        return []
    try:
        matching = [m for name, m in policy.named_modules() if name and re.fullmatch(pattern, name)]
    except re.error as error:
        raise ValueError(
            f"--fsdp.ignored-modules={pattern!r} is not a regular expression: {error}."
        ) from error
    if not matching:
        raise ValueError(
            f"--fsdp.ignored-modules={pattern!r} matches no module; it must match whole names such as "
            f"{next((n for n, _ in policy.named_modules() if n), '')!r}."
        )
    return matching


def wrap_units(
    policy: nn.Module, fsdp: FSDPConfig, ignored: Iterable[nn.Module] = ()
) -> dict[str, nn.Module]:
    """The modules that FSDP gathers one at a time, by name, outer before inner; the rest belongs to the root.

    Raises:
        ValueError: there is none, or both ways of choosing were given.
    """
    left_out = {m for module in ignored for m in module.modules()}
    # Containers have no forward to gather for; a leaf's weight may be read without calling the leaf (embeddings).
    candidates = {
        name: m
        for name, m in policy.named_modules()
        if name and m not in left_out and type(m).forward is not nn.Module.forward
    }
    if fsdp.min_num_params is not None:
        if fsdp.wrap_modules is not None:
            raise ValueError(
                "--fsdp.min-num-params and --fsdp.wrap-modules both choose the wrap units; give one of them."
            )
        units: dict[str, nn.Module] = {}
        taken = {p for m in left_out for p in m.parameters()}
        for name, module in reversed(list(candidates.items())):  # inner before outer
            own = {p for p in module.parameters() if p not in taken}
            if (
                next(module.children(), None) is not None
                and sum(p.numel() for p in own) >= fsdp.min_num_params
            ):
                units[name] = module
                taken |= own
        units = dict(reversed(list(units.items())))
        rule = (
            f"--fsdp.min-num-params={fsdp.min_num_params}: no module with children holds so many parameters"
        )
    else:
        names = (
            fsdp.wrap_modules if fsdp.wrap_modules is not None else tuple(getattr(policy, "wrap_modules", ()))
        )
        units = {name: m for name, m in candidates.items() if type(m).__name__ in names}
        rule = f"--fsdp.wrap-modules={' '.join(names) or '(none)'}: the policy has no module of these classes"
    if not units:
        classes = sorted(
            {type(m).__name__ for m in candidates.values() if next(m.children(), None) is not None}
        )
        raise ValueError(f"{rule}, so FSDP would gather it all at once; it has {', '.join(classes)}.")
    return units


def refuse_tied(policy: nn.Module, units: dict[str, nn.Module]) -> None:
    """A parameter shared by two wrap units would be sharded as two: they drift apart. Refused by name."""
    owners: dict[nn.Parameter, dict[str, str]] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        unit = max((u for u in units if name.startswith(u + ".")), key=len, default="")
        owners.setdefault(parameter, {}).setdefault(unit, name)
    for names in owners.values():
        if len(names) > 1:
            raise ValueError(
                f"The parameters {' and '.join(names.values())} are one tensor tied across FSDP wrap units; "
                "untie them, choose wrap units that hold both (--fsdp.wrap-modules), or train with DDP."
            )


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Every trainable parameter of the module is the optimizer's, by identity: one built before sharding steps dead tensors.

    Raises:
        ValueError: the names that differ.
    """
    held = {p for group in optimizer.param_groups for p in group["params"]}
    named = dict(module.named_parameters())
    missing = [name for name, p in named.items() if p.requires_grad and p not in held]
    foreign = len(held - set(named.values()))
    if missing or foreign:
        raise ValueError(
            f"The optimizer does not hold the module's parameters: {len(missing)} trainable ones are missing "
            f"({', '.join(missing[:3])}) and {foreign} are not the module's; build it after parallelize()."
        )


def memory_per_rank(policy: nn.Module, dp_shard: int, fsdp: FSDPConfig = FSDPConfig()) -> dict[str, int]:
    """Bytes that a rank holds beside activations, on paper: call before `parallelize`, with any degree.

    Returns:
        "parameters", "gradients", "optimizer" (AdamW's two moments) and "gathered" (the two largest units, one in
        use and one fetched ahead; 0 without sharding). Every sharded tensor is cut along its first axis, and
        the first rank's share (the largest) is counted.
    """
    ignored = (
        {p for m in _ignored_modules(policy, fsdp.ignored_modules) for p in m.parameters()}
        if dp_shard > 1
        else set()
    )

    def share(p: Tensor) -> int:
        if dp_shard == 1 or p in ignored or p.dim() == 0:
            return p.numel() * p.element_size()
        rows = -(-p.shape[0] // dp_shard)
        return rows * (p.numel() // max(1, p.shape[0])) * p.element_size()

    parameters = list(policy.parameters())
    trainable = sum(share(p) for p in parameters if p.requires_grad)
    gathered = 0
    if dp_shard > 1:
        units = wrap_units(policy, fsdp, _ignored_modules(policy, fsdp.ignored_modules))
        size = 4 if fsdp.param_dtype in (None, "float32") else 2
        whole = [sum(p.numel() for p in m.parameters()) * size for m in units.values()]
        rest = sum(p.numel() for p in parameters if p not in ignored) * size - sum(whole)
        gathered = sum(sorted([*whole, rest])[-2:])
    return {
        "parameters": sum(share(p) for p in parameters),
        "gradients": trainable,
        "optimizer": 2 * trainable,
        "gathered": gathered,
    }


# ------------------------------------------------------------------------------------------------------ the step


def autocast(cluster: Cluster, mixed_precision: MixedPrecision, fsdp: FSDPConfig = FSDPConfig()) -> Any:
    """The compute precision of one forward. Parameters, gradients and their reduction stay float32 in every layout.

    FSDP needs no parameter dtype for this: a product rounds its weight just as it does in one process, so the layout
    does not change the curve. With --fsdp.param-dtype a half type is gathered instead (half the traffic), and
    autocast follows it: modules left out of sharding (float32) and sharded ones then meet without an error.
    """
    dtype = HALF.get(mixed_precision)
    if cluster.sharded and fsdp.param_dtype not in (None, "float32"):
        dtype = _dtype(fsdp.param_dtype)
    if dtype is None:
        return contextlib.nullcontext()
    # No cache of cast weights: it would keep gathered parameters alive, and sum the gradients of two uses in half precision.
    return torch.autocast(cluster.device.type, dtype=dtype, cache_enabled=False)


@contextlib.contextmanager
def accumulate(module: nn.Module, sync: bool) -> Iterator[None]:
    """One micro-batch: forward and backward both inside. Gradients are averaged over ranks where `sync` is true.

    Collective: call on every rank. The last micro-batch of a window has sync=True; those before it add up locally (under FSDP: whole, not
    sharded, gradients in memory). Without ranks it does nothing.
    """
    if isinstance(module, DistributedDataParallel):
        # static_graph counts hooks during the first step, so that step must sync every micro-batch (torch 2.14).
        # The mean of gradients that are equal on all ranks is themselves, so the sum is the same.
        with contextlib.nullcontext() if sync or not module._first_window_done else module.no_sync():
            yield
        if sync:
            module._first_window_done = True  # type: ignore[assignment]
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(sync)
        yield
        if sync:
            _average_gradients(cast(list[nn.Parameter], cast(nn.Module, module)._ignored_parameters))
    else:
        yield


def _average_gradients(parameters: list[nn.Parameter]) -> None:
    """The mean over ranks of gradients that FSDP does not see, one message per dtype."""
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        same = [p for p in parameters if p.dtype == dtype]
        for p in same:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        flat = torch.cat([cast(Tensor, p.grad).reshape(-1) for p in same])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        pieces = flat.split([p.numel() for p in same])
        torch._foreach_copy_([p.grad for p in same], [piece.view_as(p) for piece, p in zip(pieces, same)])


def backward(loss: Tensor, scaler: "LossScaler | None" = None) -> None:
    """`loss.backward()`, through the loss scale where there is one."""
    (loss if scaler is None else scaler.scale_loss(loss)).backward()


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module | Iterable[nn.Parameter], max_norm: float, scaler: "LossScaler | None" = None
) -> Tensor:
    """Scale the gradients to a global norm of at most `max_norm` (inf: only measure), and return the norm before.

    Collective: call on every rank, after the window's last micro-batch; all get the same number. Works on plain tensors, shards, and both
    mixed, whatever their meshes. Nothing is read by the host. With a scaler, gradients are unscaled in the same pass and
    the scaler learns whether the norm is finite. Without one a norm that is not finite spreads into the
    gradients, as in `torch.nn.utils.clip_grad_norm_`, whose formula this is.

    Returns:
        A 0-d tensor on the gradients' device, float64 for float64 gradients, else float32.
    """
    parameters = module.parameters() if isinstance(module, nn.Module) else module
    grads = [p.grad for p in parameters if p.grad is not None]
    assert grads, "no parameter has a gradient: clip after backward"
    # Tensors whose pieces lie on the same ranks share one all-reduce; plain and replicated ones need none.
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for grad in grads:
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(grad, DTensor):
            assert not any(p.is_partial() for p in grad.placements), "gradients are not reduced yet"
            groups = tuple(
                grad.device_mesh.get_group(i) for i, p in enumerate(grad.placements) if p.is_shard()
            )
        by_groups.setdefault(groups, []).append(_local(grad))
    device = _local(grads[0]).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, local in by_groups.items():
        # On the CPU a float32 norm adds up in float32 lanes, which costs 1e-6 and more; CUDA reduces in a tree.
        accuracy = torch.float64 if device.type == "cpu" else None
        pieces = [piece for piece in local if piece.numel()]
        norms = torch._foreach_norm(pieces, 2, dtype=accuracy) if pieces else (total.new_zeros(()),)
        squares = torch.stack([n.to(torch.float64) for n in norms]).square_().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total += squares
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if scaler is not None:
        norm, factor = scaler.inspect(norm, max_norm)
    if scaler is not None or max_norm != float("inf"):
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            torch._foreach_mul_([_local(g) for g in grads if g.dtype == dtype], factor.to(dtype))
    return norm.to(torch.float64 if grads[0].dtype == torch.float64 else torch.float32)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class LossScaler:
    """The loss scale of fp16 training: `torch.amp.GradScaler`'s rule and state, decided on the device from the global norm.

    An overflow on one rank makes the global norm infinite on all, so all skip the step and halve the scale.
    """

    def __init__(
        self, device: torch.device, init_scale: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        self.scale = torch.full((), init_scale, dtype=torch.float32, device=device)
        self.growth_factor = 2.0
        self.backoff_factor = 0.5
        self.growth_interval = growth_interval
        self.growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.scale

    def inspect(self, scaled_norm: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
        """Note whether the step is to be skipped; give the true norm and the factor that unscales and clips."""
        self.found_inf.copy_(~torch.isfinite(scaled_norm))
        norm = scaled_norm / self.scale
        return norm, (max_norm / (norm + 1e-6)).clamp(max=1.0) / self.scale

    def update(self) -> None:
        """After the optimizer's step: back off after an overflow, grow after `growth_interval` steps without one."""
        good = self.found_inf == 0
        tracker = torch.where(good, self.growth_tracker + 1, 0)
        grow = tracker >= self.growth_interval
        grown = torch.where(
            torch.isfinite(self.scale * self.growth_factor), self.scale * self.growth_factor, self.scale
        )
        self.scale.copy_(
            torch.where(good, torch.where(grow, grown, self.scale), self.scale * self.backoff_factor)
        )
        self.growth_tracker.copy_(torch.where(grow, 0, tracker))

    def state_dict(self) -> dict[str, float | int]:
        """GradScaler's keys. Reads from the device: call when saving only."""
        return {
            "scale": float(self.scale.item()),
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": int(self.growth_tracker.item()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.fill_(state["scale"])
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self.growth_tracker.fill_(state["_growth_tracker"])


def optimizer_step(optimizer: torch.optim.Optimizer, scaler: LossScaler | None = None) -> None:
    """`optimizer.step()`, skipped on all ranks after an overflow, for shards and whole tensors alike.

    A fused optimizer skips on the device; another one needs a host read to know (fp16 only).
    """
    if scaler is None:
        _step(optimizer)
        return
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        fused: Any = optimizer
        fused.grad_scale, fused.found_inf = None, scaler.found_inf
        _step(optimizer)
        del fused.grad_scale, fused.found_inf
    elif not scaler.found_inf.item():
        _step(optimizer)
    scaler.update()


def _step(optimizer: torch.optim.Optimizer) -> None:
    # Fused and foreach kernels refuse lists that mix shards with plain tensors (torch 2.14): one pass for each kind.
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    kinds = {isinstance(p, DTensor) for params in whole for p in params}
    if len(kinds) == 1:
        optimizer.step()
        return
    try:
        for kind in kinds:
            for group, params in zip(groups, whole):
                group["params"] = [p for p in params if isinstance(p, DTensor) == kind]
            optimizer.step()
    finally:
        for group, params in zip(groups, whole):
            group["params"] = params


# ------------------------------------------------------------------------------------------------------ metrics


class MetricSums:
    """Sums of what the steps report, kept on the device; one message and one host read per `reduce()`.

    The values are copied into own memory at once, so a CUDA graph may overwrite them in its next replay.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._names: tuple[str, ...] = ()
        self._sums: Tensor | None = None  # (2, names): weighted sums, weights
        self._times: dict[str, float] = {}
        self._time_counts: dict[str, int] = {}

    def add(self, values: dict[str, Tensor], weight: Tensor | float = 1.0) -> None:
        """Add one step's 0-d tensors. Over steps and ranks the result is their mean, weighted by `weight`.

        A value of weight 0 counts for nothing, even if it is not finite. The names must be the same in every call until `reduce`.
        """
        if self._sums is None:
            self._names = tuple(values)
            self._sums = torch.zeros(2, len(values), dtype=torch.float64, device=self._cluster.device)
        assert self._names == tuple(values), f"metrics changed from {self._names} to {tuple(values)}"
        row = torch.stack([v.detach().to(torch.float64) for v in values.values()])
        if isinstance(weight, Tensor):
            weight = weight.detach().to(torch.float64)
            row = torch.where(weight > 0, row * weight, 0.0)
            self._sums[1] += weight
        else:
            row = row * weight if weight else torch.zeros_like(row)
            self._sums[1] += weight
        self._sums[0] += row

    def add_times(self, seconds: dict[str, float]) -> None:
        """Add one step's times, measured by the host. The result is the mean over steps of the slowest rank."""
        for name, value in seconds.items():
            self._times[name] = self._times.get(name, 0.0) + value
            self._time_counts[name] = self._time_counts.get(name, 0) + 1

    def reduce(self) -> dict[str, float]:
        """Collective: call on every rank; all get the result. Starts the next sums at zero."""
        times = torch.tensor(
            [self._times[n] / self._time_counts[n] for n in self._times], dtype=torch.float64
        )
        mine = times.to(self._cluster.device)
        if self._sums is not None:
            mine = torch.cat([self._sums.reshape(-1), mine])
        if self._cluster.world_size > 1:
            # A gather serves means and maxima with one collective.
            every = [torch.empty_like(mine) for _ in range(self._cluster.world_size)]
            dist.all_gather(every, mine)
        else:
            every = [mine]
        rows = torch.stack(every).cpu()  # the one host read
        n = len(self._names)
        means = rows[:, :n].sum(0) / rows[:, n : 2 * n].sum(0)
        result = dict(zip(self._names, means.tolist())) | dict(
            zip(self._times, rows[:, 2 * n :].amax(0).tolist())
        )
        self._names, self._sums, self._times, self._time_counts = (), None, {}, {}
        return result
