"""Ranks, meshes and precision: one curve in every layout (one process, DDP, FSDP2, HSDP).

    cluster = start("auto", ParallelismConfig(dp_shard=-1))    # under torchrun, or alone
    set_process(compiled=False)                                # all process-wide switches
    module = parallelize(policy, cluster, ddp, fsdp)           # compile before, build the optimizer after
    check_optimizer(optimizer, module)
    scaler = LossScaler(cluster.device) if mixed_precision == "fp16" else None

    with accumulate(module, sync=last_of_window):              # forward and backward both inside
        with autocast(cluster, mixed_precision, fsdp):
            loss, loss_terms = module(batch)
        backward(loss / len(window), scaler)
    if last_of_window:
        grad_norm = clip_grad_norm_(module, 10.0, scaler)      # the global norm, left on the device
        optimizer.param_groups[0]["lr"] = base_lr * lr_factor(step)  # a function of the step
        optimizer_step(optimizer, scaler)
        optimizer.zero_grad()

Modes by resolved (dp_replicate, dp_shard), whose product is the world size W:
(1, 1) single, (W, 1) ddp, (1, W) fsdp, (R, S) hsdp. Rank = replica * dp_shard + shard: a replica's
shards are neighbours. Gradients are means over all ranks in every mode.

Needs torch only. A policy is any nn.Module; it may declare `wrap_modules` (class names of its FSDP
wrap units) and `forward_methods` (entry points beside `forward` for which FSDP must gather).

fp16: every rank skips an update whose global gradient is not finite. The step still counts for
--steps, for the sample order and for the learning rate, but not in Adam's own step count.

Errors: a rank that raises lets its process die, and torchrun ends the others. `finish` is for
success only, since tearing down a group whose peers are dead can hang.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import pickle
import re
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
import torch.distributed as c10d
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel


class UserError(ValueError):
    """The user's to mend, in one sentence: flag, rule, way out. Any other error is a bug."""


@dataclass(frozen=True)
class ParallelismConfig:  # DDPConfig and FSDPConfig stand below the spine
    dp_replicate: int = 1
    """Replicas of the model, which average their gradients. -1: inferred from the world size."""
    dp_shard: int = 1
    """Ranks that each replica is sharded across (FSDP). -1: inferred. Both 1: DDP over all."""


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
        if self.world_size == 1:
            return "single"
        if self.dp_shard == 1:
            return "ddp"
        return "fsdp" if self.dp_replicate == 1 else "hsdp"

    @property
    def sharded(self) -> bool:
        return self.mode in ("fsdp", "hsdp")

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def start(
    device: str = "auto",
    parallelism: ParallelismConfig = ParallelismConfig(),
    startup_timeout_s: float = 3600,
    step_timeout_s: float = 600,
) -> Cluster:
    """Join the process group that the launcher describes, or run alone if there is none.

    Collective: call on every rank. Collectives may take `startup_timeout_s` until `shorten_timeout`:
    a first step may compile for minutes. UserError if variables, device and degrees do not fit.
    """
    ranks = _ranks_from_launcher()
    _, local_rank, world_size, local_world_size = ranks
    dp_replicate, dp_shard = resolve_degrees(parallelism, world_size)
    device_type = _resolve_device(device, local_world_size)
    own_device = torch.device(device_type)
    if device_type == "cuda":
        own_device = torch.device("cuda", local_rank)
        # Before the group is made: otherwise every rank opens a context on device 0.
        torch.cuda.set_device(own_device)
    if world_size > 1 and not c10d.is_initialized():
        _join_group(device_type, world_size, datetime.timedelta(seconds=startup_timeout_s))
    mesh = None
    if dp_shard > 1:
        axes = {"dp_replicate": dp_replicate, "dp_shard": dp_shard}
        if dp_replicate == 1:
            del axes["dp_replicate"]  # one axis: plain FSDP
        mesh = init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    cluster = Cluster(*ranks, own_device, dp_replicate, dp_shard, mesh, step_timeout_s)
    _set_timeout(cluster, startup_timeout_s)
    return cluster


def parallelize(
    policy: nn.Module, cluster: Cluster, ddp: DDPConfig | None = None, fsdp: FSDPConfig | None = None
) -> nn.Module:
    """Move `policy` to the device, in the cluster's mode. Compile before, make the optimizer after.

    Collective: call on every rank; all leave with rank 0's weights and buffers. With sharding the
    policy itself is changed and returned, with DDP its wrapper. Between steps a sharded policy's
    parameters are always shards. UserError if it has no wrap unit, or a parameter tied across two.
    """
    policy.to(cluster.device)
    if cluster.mode == "single":
        return policy
    ddp, fsdp = ddp or DDPConfig(), fsdp or FSDPConfig()
    sync_buffers = ddp.broadcast_buffers
    if sync_buffers is None:
        sync_buffers = bool(_batch_norm_buffers(policy))  # running statistics
    if cluster.sharded:
        return _shard(policy, cluster, fsdp, sync_buffers)
    # No device_ids: the batch is on its device already, and DDP need not walk over it.
    return DistributedDataParallel(
        policy,
        bucket_cap_mb=ddp.bucket_cap_mb,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
        static_graph=ddp.static_graph,
        find_unused_parameters=ddp.find_unused_parameters,
        **_sync_buffers_option(sync_buffers),
    )


def _shard(policy: nn.Module, cluster: Cluster, fsdp: FSDPConfig, sync_buffers: bool) -> nn.Module:
    """FSDP2 of the wrap units and of the rest as the root; HSDP where the mesh has two axes."""
    ignored = ignored_modules(policy, fsdp)
    units = wrap_units(policy, fsdp)
    refuse_tied(policy, units)
    # DDP does this by itself; FSDP would shard the weights that each rank drew for itself.
    for tensor in [*policy.parameters(), *policy.buffers()]:
        c10d.broadcast(tensor.detach(), src=0)
    options: dict[str, Any] = {
        "mesh": cluster.mesh,
        "reshard_after_forward": fsdp.reshard_after_forward,
        "ignored_params": {p for module in ignored for p in module.parameters()},
    }
    if fsdp.cpu_offload and cluster.device.type == "cuda":
        options["offload_policy"] = CPUOffloadPolicy()
    precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[fsdp.param_dtype],
        reduce_dtype=DTYPES[fsdp.reduce_dtype],
        output_dtype=DTYPES[fsdp.output_dtype],
        cast_forward_inputs=fsdp.cast_forward_inputs is not False,
    )
    # Inner units before those that contain them: each takes the parameters that are left.
    for unit in reversed(units.values()):
        fully_shard(cast(Any, unit), mp_policy=precision, **options)
    # Targets and counts come in through the root and losses go out: none of them may be rounded. The
    # root is resharded as any unit (torch would keep it gathered): validation leaves shards behind.
    root_precision = replace(precision, output_dtype=None, cast_forward_inputs=False)
    fully_shard(policy, mp_policy=root_precision, **options)
    for name in getattr(policy, "forward_methods", ()):
        c10d.fsdp.register_fsdp_forward_method(policy, name)
    if sync_buffers:
        policy.register_forward_pre_hook(_broadcast_batch_norms)
    return policy


def wrap_units(policy: nn.Module, fsdp: FSDPConfig) -> dict[str, nn.Module]:
    """The modules that FSDP gathers one at a time, by name, outer first; the root has the rest.

    UserError if there is none, or if two ways of choosing them were given.
    """
    left_out = {m for module in ignored_modules(policy, fsdp) for m in module.modules()}
    classes = getattr(policy, "wrap_modules", ()) if fsdp.wrap_modules is None else fsdp.wrap_modules
    if fsdp.min_num_params is not None:
        units = _units_by_size(policy, fsdp, left_out)
    else:
        units = {name: m for name, m in policy.named_modules() if type(m).__name__ in classes}
        units = {name: m for name, m in units.items() if m not in left_out}
    if not units:
        raise _no_unit(policy, fsdp, classes, left_out)
    return units


@contextlib.contextmanager
def accumulate(module: nn.Module, sync: bool) -> Iterator[None]:
    """One micro-batch: forward and backward both inside. `sync`: gradients become means over ranks.

    Collective: call on every rank. Only a window's last micro-batch syncs; before, gradients add up
    locally, under FSDP as whole tensors. DDP and FSDP2 modules not made by `parallelize` work, too.
    """
    if isinstance(module, DistributedDataParallel):
        # static_graph counts hooks in the first window: sync each of its micro-batches (torch 2.14).
        # The sum comes out the same: a gradient that is equal on all ranks is its own mean.
        counts_hooks = module.static_graph and module not in _past_first_window
        with contextlib.nullcontext() if sync or counts_hooks else module.no_sync():
            yield
        if sync:
            _past_first_window.add(module)
    elif isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(sync)
        yield
        if sync:
            _average_ignored(module)
    else:
        yield


def backward(loss: Tensor, scaler: LossScaler | None = None) -> None:
    """`loss.backward()`, through the loss scale if there is one."""
    (loss if scaler is None else loss * scaler.scale).backward()


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module | Iterable[nn.Parameter], max_norm: float, scaler: LossScaler | None = None
) -> Tensor:
    """Scale gradients to a global norm of at most `max_norm` (inf: only measure); return the old norm.

    Collective: call on every rank after a window's last backward; all get the same number in every
    layout, for whole tensors, shards, or both mixed, as a 0-d tensor on the device: the host reads
    nothing. A norm that is not finite spreads into the gradients, as with torch's function, whose
    formula this is. With a scaler gradients are unscaled in the same pass, and it notes whether the
    norm is finite (weight the logged norm by `1 - scaler.found_inf`).
    """
    parameters = module.parameters() if isinstance(module, nn.Module) else module
    grads = [p.grad for p in parameters if p.grad is not None]
    assert grads, "no parameter has a gradient"
    total = torch.zeros((), dtype=torch.float64, device=_local(grads[0]).device)
    # The CPU adds float32 squares in few lanes: 4e-6 off over 20 M elements. CUDA adds in a tree.
    accuracy = torch.float64 if total.device.type == "cpu" else None
    # Tensors sharded across the same ranks share an all-reduce; replicated ones need none.
    for groups, pieces in _by_shard_groups(grads).items():
        # A rank may hold no row of a small unit, and must still take part in the all-reduce.
        held = [p for p in pieces if p.numel()] or [total.new_zeros(1)]
        norms = torch._foreach_norm(held, 2, dtype=accuracy)
        squares = torch.stack([norm.double() for norm in norms]).square_().sum()
        for group in groups:
            c10d.all_reduce(squares, group=group)
        total = total + squares
    scale = 1.0 if scaler is None else scaler.inspect(total)
    norm = total.sqrt() / scale
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) / scale
    if scaler is not None or max_norm != float("inf"):
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            torch._foreach_mul_([_local(g) for g in grads if g.dtype == dtype], factor.to(dtype))
    return norm.to(torch.float64 if grads[0].dtype == torch.float64 else torch.float32)


def optimizer_step(optimizer: torch.optim.Optimizer, scaler: LossScaler | None = None) -> None:
    """`optimizer.step()` for shards and whole tensors alike, skipped after an overflow.

    A fused optimizer skips on the device; for any other the host reads the verdict (fp16 only).
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


class MetricSums:
    """Sums of what steps report, kept on the device: one message and one host read per `reduce`.

    Values are added at once, into its own memory: a CUDA graph may overwrite them in its next replay.
    """

    def __init__(self, cluster: Cluster, state: dict[str, Any] | None = None) -> None:
        """`state`: from `state_dict`, if a run was stopped between two log steps, in any layout."""
        self._cluster = cluster
        # names -> (names + 1,): weighted sums, then the weight
        self._sums: dict[tuple[str, ...], Tensor] = {}
        for names, sums in (state or {}).get("sums", []):
            self._sums[tuple(names)] = torch.tensor(sums, dtype=torch.float64, device=cluster.device)
        self._times: dict[str, tuple[float, int]] = {}

    @torch.no_grad()
    def add(self, values: dict[str, Tensor], weight: Tensor | float = 1.0) -> None:
        """Add 0-d tensors; each becomes its mean over calls and ranks, weighted by `weight`.

        A value of weight 0 leaves no trace, even if it is not finite. A name always comes with the
        same others.
        """
        names, device = tuple(values), self._cluster.device
        if names not in self._sums:
            self._sums[names] = torch.zeros(len(names) + 1, dtype=torch.float64, device=device)
        sums = self._sums[names]
        row = torch.stack([value.to(device) for value in values.values()])
        if isinstance(weight, Tensor):
            row = torch.where(weight > 0, row * weight, 0)
        elif weight != 1.0:
            row = row * weight if weight > 0 else torch.zeros_like(row)
        sums[:-1] += row
        sums[-1] += weight

    def add_times(self, seconds: dict[str, float]) -> None:
        """Add times measured by the host; each becomes the slowest rank's mean over calls."""
        for name, value in seconds.items():
            total, count = self._times.get(name, (0.0, 0))
            self._times[name] = (total + value, count + 1)

    def reduce(self) -> dict[str, float]:
        """Collective: call on every rank; all get the result. The next sums start at zero."""
        gathered = _gathered(self._cluster, self._sums, self._times)  # the one host read
        *rows, times = gathered.split(self._widths(), dim=1)
        result: dict[str, float] = {}
        for names, of_ranks in zip(self._sums, rows):
            sums = of_ranks.sum(0)
            result |= dict(zip(names, (sums[:-1] / sums[-1]).tolist()))
        result |= dict(zip(self._times, times.amax(0).tolist()))
        self._sums, self._times = {}, {}
        return result

    def state_dict(self) -> dict[str, Any]:
        """Collective: call on every rank; all get the mean of the ranks' sums, for any layout."""
        means = _gathered(self._cluster, self._sums, self._times).mean(0).split(self._widths())
        return {"sums": [[list(names), mean.tolist()] for names, mean in zip(self._sums, means)]}

    def _widths(self) -> list[int]:
        return [*(len(names) + 1 for names in self._sums), len(self._times)]


def finish(cluster: Cluster) -> None:
    """Collective: call on every rank, on success only. Waits for all and destroys the group."""
    if cluster.world_size > 1:
        any_rank(cluster, False)
        c10d.destroy_process_group()


# ------------------------------------------------------------------------------------------- end of the spine

MixedPrecision = Literal["no", "bf16", "fp16"]
DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPES = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class DDPConfig:
    bucket_cap_mb: int = 1024
    """DDP gradient bucket, MiB. Smaller overlaps earlier, larger launches fewer all-reduces."""
    broadcast_buffers: bool | None = None
    """Broadcast rank 0's buffers before each forward. None: if a BatchNorm tracks statistics."""
    gradient_as_bucket_view: bool = True
    """Keep gradients inside the communication buckets, which saves one copy of them in memory."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """Search each step for parameters without a gradient. Slower; for policies that skip layers."""


@dataclass(frozen=True)
class FSDPConfig:
    wrap_modules: tuple[str, ...] | None = None
    """Class names of the modules to gather one at a time. None: the policy's own `wrap_modules`."""
    min_num_params: int | None = None
    """Instead of class names: wrap blocks with at least this many parameters not wrapped yet."""
    reshard_after_forward: bool = True
    """Free gathered weights after forward, gather again in backward: less memory, more traffic."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory (CUDA only). Much slower."""
    ignored_modules: str | None = None
    """Regular expression on full module names: these are replicated, and train the same."""
    param_dtype: DtypeName | None = None
    """Gather and compute in this dtype. None: gather float32, compute by --mixed-precision."""
    reduce_dtype: DtypeName | None = None
    """Reduce gradients in this dtype. None: the dtype in which they were computed."""
    output_dtype: DtypeName | None = None
    """Cast the outputs of each wrap unit, but not those of the policy: a loss stays float32."""
    cast_forward_inputs: bool | None = None
    """Cast the inputs of each wrap unit to param_dtype. None: yes. The batch is never cast."""


# ---------------------------------------------------------------------------- the process and its time-outs


def set_process(tf32: bool = True, keep_memory: bool = True, compiled: bool = False) -> None:
    """Every process-wide switch: nothing else in this file sets one. Call it right after `start`.

    `tf32`: for CUDA's products and convolutions. `compiled`: torch.compile is used. `keep_memory`:
    without a GPU, glibc keeps freed memory. A step frees and takes the same hundreds of MB again,
    and fresh pages cost the paper-size step 0.4 to 0.9 s of 11.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True  # shapes are static: search the fastest convolutions once
    if keep_memory and not torch.cuda.is_available():
        import ctypes

        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # macOS and musl have none
            libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: and stay there
    # A channels-last image gives a 1x1 convolution's gradient other strides than the weight has,
    # for the same order in memory: DDP warns, and copies it as fast as any other.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    if compiled:
        # Dynamo would cut the graph at DDP's buckets; a whole graph is worth more than the overlap.
        import torch._dynamo as dynamo

        dynamo.config.optimize_ddp = False


def shorten_timeout(cluster: Cluster) -> None:
    """From the time-out of start-up to `step_timeout_s`. Call once the first step is done."""
    _set_timeout(cluster, cluster.step_timeout_s)


@contextlib.contextmanager
def extended_timeout(cluster: Cluster, seconds: float = 86400) -> Iterator[None]:
    """Collective: enter on every rank. Inside, ranks may wait this long for each other."""
    _set_timeout(cluster, seconds)
    yield
    _set_timeout(cluster, cluster.step_timeout_s)


def _set_timeout(cluster: Cluster, seconds: float) -> None:
    if cluster.world_size == 1:
        return
    # torch 2.14 made it public and deprecates the private name, which is all that 2.11 has.
    set_timeout: Any = getattr(c10d, "set_timeout", None) or c10d.distributed_c10d._set_pg_timeout
    mesh_groups = [] if cluster.mesh is None else cluster.mesh.get_all_groups()
    for group in [c10d.group.WORLD, *mesh_groups]:
        set_timeout(datetime.timedelta(seconds=seconds), group)


def _ranks_from_launcher() -> tuple[int, int, int, int]:
    """(rank, local_rank, world_size, local_world_size); (0, 0, 1, 1) without a launcher."""
    rank, world_size = _env_int("RANK", 0), _env_int("WORLD_SIZE", 1)
    needed = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if name not in os.environ]
    if world_size > 1 and missing:
        raise UserError(f"WORLD_SIZE={world_size} is set, but not {', '.join(missing)}; start with torchrun.")
    return rank, _env_int("LOCAL_RANK", 0), world_size, _env_int("LOCAL_WORLD_SIZE", 1)


def _env_int(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdigit():
        raise UserError(f"The launcher's variable {name}={value} is not a number; start with torchrun.")
    return int(value)


def _join_group(device_type: str, world_size: int, timeout: datetime.timedelta) -> None:
    # gloo beside NCCL: messages between hosts never touch the GPU, nor do offloaded tensors.
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    address = f"MASTER_ADDR={os.environ['MASTER_ADDR']} MASTER_PORT={_env_int('MASTER_PORT', 0)}"
    restarts, options = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), {}
    try:
        # torchrun's default (static) rendezvous keeps its store, with the addresses of dead ranks,
        # which restarted ones may read (torch 2.14). Several nodes count their restarts apart: they
        # need c10d's rendezvous, which opens a new store each time.
        if restarts != "0" and os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]:
            store, rank, _ = next(c10d.rendezvous("env://", timeout=timeout))
            store = c10d.PrefixStore(f"restart_{restarts}", store)
            options = {"store": store, "rank": rank, "world_size": world_size}
        c10d.init_process_group(backend, timeout=timeout, **options)
    except c10d.DistError as error:
        raise UserError(
            f"the {world_size} ranks could not meet at {address} ({str(error).splitlines()[0]}); choose a "
            "free port (torchrun --master-port), and an address that every node can reach."
        ) from error


def resolve_degrees(parallelism: ParallelismConfig, world_size: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard) with -1 filled in. UserError unless they multiply to the world size."""
    replicate, shard = parallelism.dp_replicate, parallelism.dp_shard
    if replicate == shard == 1:
        return world_size, 1
    flags = f"--parallelism.dp-replicate={replicate} and --parallelism.dp-shard={shard}"
    if 0 in (replicate, shard) or min(replicate, shard) < -1 or replicate == shard == -1:
        raise UserError(f"{flags} must be positive; one may be -1, inferred from world size {world_size}.")
    inferred = world_size // max(replicate, shard)
    replicate, shard = (inferred if degree == -1 else degree for degree in (replicate, shard))
    if replicate * shard != world_size:
        raise UserError(f"{flags} give {replicate * shard}, the world size is {world_size}; set one to -1.")
    return replicate, shard


def _resolve_device(device: str, local_world_size: int) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device={device} is not known; use auto, cpu or cuda.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # All ranks of the machine refuse, not each for itself: none is left waiting for another.
    if device == "cuda" and local_world_size > torch.cuda.device_count():
        raise UserError(
            f"--device=cuda with {local_world_size} processes on this machine needs as many CUDA devices, "
            f"but torch sees {torch.cuda.device_count()}; start fewer, or use --device cpu."
        )
    return device


# ----------------------------------------------------------------------------------- agreement between ranks


def any_rank(cluster: Cluster, flag: bool) -> bool:
    """Collective: call on every rank. True on all if `flag` is on one. Never touches the GPU."""
    if cluster.world_size == 1:
        return flag
    vote = torch.tensor([flag], dtype=torch.int32)
    c10d.all_reduce(vote, op=c10d.ReduceOp.MAX)
    return bool(vote.item())


class StopVote:
    """`any_rank` for every step, without waiting: a background message, read at the next poll.

    Collective: poll on every rank. What one rank votes in step n all of them see in step n + 1.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._alone = cluster.world_size == 1
        self._vote = torch.zeros(1, dtype=torch.int32)
        self._work: Any = None

    def poll(self, number: int) -> int:
        """Vote `number`, 0 to continue. Returns the largest vote of the poll before."""
        if self._alone:
            return number
        if self._work is not None:
            self._work.wait()
        stop = int(self._vote.item())
        self._vote = torch.tensor([number or stop], dtype=torch.int32)
        self._work = c10d.all_reduce(self._vote, op=c10d.ReduceOp.MAX, async_op=True)
        return stop


def from_main(cluster: Cluster, value: Any) -> Any:
    """Collective: call on every rank; all get rank 0's value (pickled: a name, a small setting)."""
    box = [value]
    if cluster.world_size > 1:
        c10d.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


@contextlib.contextmanager
def raise_together(cluster: Cluster) -> Iterator[None]:
    """An error inside, on any rank, becomes an error on all. The body must hold no collective.

    Collective: enter on every rank. Without it the others would wait in their next collective for the one
    that failed. A ValueError (as UserError), OSError or ImportError is the same on all. Any other
    error keeps its traceback on its own rank, and is quoted by the others.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if error is not None and cluster.world_size == 1:
        raise error
    if not any_rank(cluster, error is not None):
        return
    errors: list[Any] = [None] * cluster.world_size
    c10d.all_gather_object(errors, None if error is None else _for_other_ranks(error, cluster.rank))
    first = next(rank for rank, e in enumerate(errors) if e is not None)
    if error is not None and (cluster.rank == first or isinstance(errors[cluster.rank], RuntimeError)):
        raise error
    raise errors[first]


def _for_other_ranks(error: BaseException, rank: int) -> Exception:
    """The error for other ranks: a user's as it is; a bug, or what cannot be pickled, quoted."""
    if isinstance(error, ValueError | OSError | ImportError):
        with contextlib.suppress(Exception):
            return pickle.loads(pickle.dumps(error))
    return RuntimeError(f"rank {rank} failed with {type(error).__name__}: {error}")


def rank0_first(cluster: Cluster, prepare: Callable[[], Any], per_node: bool = False) -> None:
    """Let rank 0 (`per_node`: the first rank of each machine) run `prepare`, however long it takes.

    Collective: call on every rank. The others poll the store meanwhile: no collective waits, so no
    time-out can strike. An error of the rank that prepares is raised on all that wait for it.
    """
    if cluster.world_size == 1:
        prepare()
        return
    node = _env_int("GROUP_RANK", cluster.rank // cluster.local_world_size) if per_node else 0
    store: Any = c10d.PrefixStore("rank0_first", c10d.distributed_c10d._get_default_store())
    # Each rank counts its calls in the store: the same on all, since they call in the same order.
    key = f"{store.add(f'calls/{cluster.rank}', 1)}/{node}"
    if (cluster.local_rank if per_node else cluster.rank) == 0:
        try:
            prepare()
        except BaseException as error:
            store.set(key, pickle.dumps(_for_other_ranks(error, cluster.rank)))
            raise
        store.set(key, pickle.dumps(None))
        return
    while not store.check([key]):
        time.sleep(0.1)
    if (outcome := pickle.loads(store.get(key))) is not None:
        raise outcome


def sum_over_ranks(cluster: Cluster, value: Tensor) -> Tensor:
    """Collective: call on every rank; all get the sum. `value` is overwritten."""
    if cluster.world_size > 1:
        c10d.all_reduce(value)
    return value


def gathered_state_dict(policy: nn.Module) -> dict[str, Tensor]:
    """Collective: call on every rank; all get the whole tensors, whether sharded or not."""
    state = policy.state_dict()
    return {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in state.items()}


# --------------------------------------------------------------------------- wrap units, gradients, precision


def _batch_norm_buffers(policy: nn.Module) -> list[Tensor]:
    norms = [m for m in policy.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return [buffer for norm in norms for buffer in norm.buffers()]


def _broadcast_batch_norms(module: nn.Module, _: Any) -> None:
    if module.training:
        for buffer in _batch_norm_buffers(module):
            c10d.broadcast(buffer, src=0)


def _sync_buffers_option(sync_buffers: bool) -> dict[str, Any]:
    # torch 2.14 renamed the option; 2.11 has the old name only.
    options = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
    return {name: sync_buffers}


def ignored_modules(policy: nn.Module, fsdp: FSDPConfig) -> list[nn.Module]:
    """The modules whose full name --fsdp.ignored-modules matches. UserError if it matches none."""
    pattern = fsdp.ignored_modules
    if pattern is None:
        return []
    names = [name for name, _ in policy.named_modules() if name]
    try:
        matches = [policy.get_submodule(name) for name in names if re.fullmatch(pattern, name)]
    except re.error as error:
        raise UserError(f"--fsdp.ignored-modules={pattern} is not a regular expression: {error}.") from error
    if not matches:
        raise UserError(f"--fsdp.ignored-modules={pattern} matches no full module name, as {names[-1]} is.")
    return matches


def _blocks(policy: nn.Module, left_out: set[nn.Module]) -> dict[str, nn.Module]:
    # A container has no forward to gather for; an embedding, say, may be read without a call.
    return {
        name: m
        for name, m in policy.named_modules()
        if name and m not in left_out and type(m).forward is not nn.Module.forward and any(m.children())
    }


def _units_by_size(policy: nn.Module, fsdp: FSDPConfig, left_out: set) -> dict[str, nn.Module]:
    if fsdp.wrap_modules is not None:
        raise UserError("--fsdp.min-num-params and --fsdp.wrap-modules both choose units; give one of them.")
    assert fsdp.min_num_params is not None
    units, taken = {}, {p for m in left_out for p in m.parameters()}
    for name, module in reversed(_blocks(policy, left_out).items()):
        own = set(module.parameters()) - taken
        if sum(p.numel() for p in own) >= fsdp.min_num_params:
            units[name] = module
            taken |= own
    return dict(reversed(units.items()))


def _no_unit(policy: nn.Module, fsdp: FSDPConfig, classes: Any, left_out: set[nn.Module]) -> UserError:
    candidates = list(_blocks(policy, left_out).values()) or policy.children()
    hint = f"choose among {', '.join(sorted({type(m).__name__ for m in candidates}))}."
    if fsdp.min_num_params is not None:
        rule = f"--fsdp.min-num-params={fsdp.min_num_params} is more than any block holds"
    elif classes or fsdp.wrap_modules is not None:
        rule = f"--fsdp.wrap-modules={' '.join(classes)} names no class of the policy"
    else:
        rule = f"{type(policy).__name__} declares no `wrap_modules`"
        hint = f"declare it or pass FSDPConfig(wrap_modules=...), as --fsdp.wrap-modules does; {hint}"
    return UserError(f"{rule}, so FSDP would gather everything at once; {hint}")


def refuse_tied(policy: nn.Module, units: dict[str, nn.Module]) -> None:
    """A parameter shared by two wrap units would be sharded twice and drift apart: UserError."""
    owners: dict[nn.Parameter, dict[str, str]] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        unit = max((u for u in units if name.startswith(u + ".")), key=len, default="")
        owners.setdefault(parameter, {}).setdefault(unit, name)
    for names in owners.values():
        if len(names) > 1:
            raise UserError(
                f"The parameters {' and '.join(names.values())} are one tensor, tied across FSDP wrap "
                "units; untie them, wrap both in one unit (--fsdp.wrap-modules), or train with DDP."
            )


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """UserError unless it has the module's tensors: one built before sharding steps dead ones."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    named = dict(module.named_parameters())
    missing = [name for name, p in named.items() if p.requires_grad and p not in held]
    foreign = len(held - set(named.values()))
    if missing or foreign:
        raise UserError(
            f"The optimizer misses {len(missing)} trainable parameters of the module "
            f"({', '.join(missing[:3])}) and has {foreign} others; build it after parallelize()."
        )


# DDP modules whose first window is over (for static_graph), also those made by hand.
_past_first_window: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _average_ignored(module: nn.Module) -> None:
    """What FSDP does not do for ignored modules: the mean over ranks, one message per dtype."""
    # After a backward the parameters that FSDP manages are shards again.
    whole = [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    for dtype in dict.fromkeys(p.dtype for p in whole):
        parameters = [p for p in whole if p.dtype == dtype]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = torch.cat([g.reshape(-1) for g in grads])
        c10d.all_reduce(flat)
        flat /= c10d.get_world_size()
        for p, grad, piece in zip(parameters, grads, flat.split([g.numel() for g in grads])):
            p.grad = grad.copy_(piece.view_as(grad))


def _by_shard_groups(grads: list[Tensor]) -> dict[tuple[c10d.ProcessGroup, ...], list[Tensor]]:
    """This rank's pieces of the gradients, by the process groups that each is sharded across."""
    pieces: dict[tuple[c10d.ProcessGroup, ...], list[Tensor]] = {}
    for grad in grads:
        groups: tuple[c10d.ProcessGroup, ...] = ()
        if isinstance(grad, DTensor):
            assert not any(p.is_partial() for p in grad.placements), "gradients are not reduced yet"
            axes = [axis for axis, p in enumerate(grad.placements) if p.is_shard()]
            groups = tuple(grad.device_mesh.get_group(axis) for axis in axes)
        pieces.setdefault(groups, []).append(_local(grad))
    return pieces


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _step(optimizer: torch.optim.Optimizer) -> None:
    params = [group["params"] for group in optimizer.param_groups]
    kinds = sorted({isinstance(p, DTensor) for ps in params for p in ps})
    try:
        # Fused and foreach kernels refuse lists that mix shards with whole tensors (torch 2.14).
        for kind in kinds:
            for group, ps in zip(optimizer.param_groups, params):
                group["params"] = [p for p in ps if isinstance(p, DTensor) == kind]
            optimizer.step()
    finally:
        for group, ps in zip(optimizer.param_groups, params):
            group["params"] = ps


def _gathered(
    cluster: Cluster, sums: dict[tuple[str, ...], Tensor], times: dict[str, tuple[float, int]]
) -> Tensor:
    """(ranks, values) on the host: the sums, then the means of the times."""
    means = torch.tensor([total / count for total, count in times.values()], dtype=torch.float64)
    own = torch.cat([*sums.values(), means.to(cluster.device)])
    rows = [own]
    if cluster.world_size > 1:
        rows = [torch.empty_like(own) for _ in range(cluster.world_size)]
        c10d.all_gather(rows, own)  # one message serves the sums and the slowest times
    return torch.stack(rows).cpu()


def autocast(cluster: Cluster, mixed_precision: MixedPrecision, fsdp: FSDPConfig = FSDPConfig()) -> Any:
    """The precision of a forward pass; parameters, gradients and their mean stay float32.

    FSDP needs no parameter dtype for it: a product rounds its weight as it does in one process, so
    the layout does not change the curve. With --fsdp.param-dtype the half type is gathered (half the
    traffic), and autocast follows it, so that ignored and sharded modules compute in one dtype.
    """
    dtype = HALF.get(mixed_precision)
    if cluster.sharded and fsdp.param_dtype in ("bfloat16", "float16"):
        dtype = DTYPES[fsdp.param_dtype]
    if dtype is None:
        return contextlib.nullcontext()
    # Cached casts would keep gathered weights alive, and add up gradients in half precision.
    return torch.autocast(cluster.device.type, dtype=dtype, cache_enabled=False)


class LossScaler:
    """The loss scale of fp16 training: `torch.amp.GradScaler`'s rule and state, kept on the device.

    An overflow on one rank is an overflow on all: all skip the update and halve the scale.
    """

    def __init__(
        self, device: torch.device, init_scale: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        self._rule = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": growth_interval}
        self.scale = torch.full((), init_scale, dtype=torch.float32, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)

    def inspect(self, scaled_norm: Tensor) -> Tensor:
        """Collective: call on every rank. Note if the norm is finite on all; return the scale."""
        self.found_inf.copy_(~torch.isfinite(scaled_norm))
        if c10d.is_initialized() and c10d.get_world_size() > 1:
            # Replicas have equal gradients; now they skip together even if one of them went wrong.
            c10d.all_reduce(self.found_inf, op=c10d.ReduceOp.MAX)
        return self.scale

    def update(self) -> None:
        """Halve the scale after an overflow, double it after `growth_interval` updates without."""
        fine = self.found_inf == 0
        tracker = torch.where(fine, self._growth_tracker + 1, 0)
        grow = tracker == self._rule["growth_interval"]
        grown = self.scale * self._rule["growth_factor"]
        grown = torch.where(grow & torch.isfinite(grown), grown, self.scale)
        self.scale.copy_(torch.where(fine, grown, self.scale * self._rule["backoff_factor"]))
        self._growth_tracker.copy_(torch.where(grow, 0, tracker))

    def state_dict(self) -> dict[str, float | int]:
        """GradScaler's keys and types. Reads from the device."""
        return {"scale": self.scale.item(), **self._rule, "_growth_tracker": int(self._growth_tracker.item())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.fill_(state["scale"])
        self._growth_tracker.fill_(state["_growth_tracker"])
        self._rule = {name: state[name] for name in self._rule}
