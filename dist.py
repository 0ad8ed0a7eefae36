"""Ranks, meshes and precision: one curve whatever executes it (one process, DDP, FSDP2, HSDP). Needs torch.

    cluster = start("auto", ParallelismConfig(dp_shard=-1))    # under torchrun, or alone
    module = parallelize(policy, cluster, ddp, fsdp)           # compile before, build the optimizer after
    check_optimizer(optimizer, module)
    scaler = LossScaler(cluster.device) if mixed_precision == "fp16" else None

    with accumulate(module, sync=last_of_window), autocast(cluster, mixed_precision, fsdp):
        loss, parts = module(batch)
        backward(loss / accumulation_steps, scaler)            # forward and backward both inside
    if last_of_window:
        grad_norm = clip_grad_norm_(module, 10.0, scaler)      # the global norm, left on the device
        optimizer_step(optimizer, scaler)
        optimizer.zero_grad()
    scheduler.step()                                           # every loop step, also after a skipped update

Modes by (dp_replicate, dp_shard), whose product is the world size W:
(1, 1) single, (W, 1) ddp, (1, W) fsdp, (R, S) hsdp. Rank = replica * dp_shard + shard: a replica's shards are
neighbours. Gradients are means over all ranks in every mode.

A policy may declare `wrap_modules` (class names of its FSDP wrap units) and `forward_methods` (entry points
beside `forward` for which FSDP must gather).

fp16: an update whose global gradient is not finite is skipped by every rank. It still counts for --steps, for
the sample order and for the learning-rate schedule, but not in Adam's own step count.

Errors: a rank that throws lets its process die, and torchrun ends the others. `finish` is for success only,
since tearing a group down beside dead peers can hang.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import inspect
import json
import os
import re
import sys
import time
import warnings
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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

MixedPrecision = Literal["no", "bf16", "fp16"]
DtypeName = Literal["float32", "bfloat16", "float16"]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ParallelismConfig:
    dp_replicate: int = 1
    """Copies of the model that average their gradients (DDP across them). -1: the rest of the world."""
    dp_shard: int = 1
    """Ranks that one copy is cut over (FSDP). -1: the rest of the world. Both at 1: DDP over the world."""


@dataclass(frozen=True)
class DDPConfig:
    bucket_cap_mb: int = 1024
    """DDP gradient bucket, MiB. Smaller overlaps earlier, larger launches fewer all-reduces."""
    broadcast_buffers: bool | None = None
    """Send rank 0's buffers before each forward. None: only where a BatchNorm has running statistics."""
    gradient_as_bucket_view: bool = True
    """Let gradients live inside the communication buckets: one copy of them less in memory."""
    static_graph: bool = False
    """Promise that every step uses the same parameters in the same order."""
    find_unused_parameters: bool = False
    """Look for parameters without a gradient in each step. Slower; only for policies that skip layers."""


@dataclass(frozen=True)
class FSDPConfig:
    wrap_modules: tuple[str, ...] | None = None
    """Class names of the units that are gathered one at a time. None: what the policy declares."""
    min_num_params: int | None = None
    """Instead of class names: wrap each block that holds this many parameters not wrapped yet."""
    reshard_after_forward: bool = True
    """Free a unit's gathered weights after forward, gather again in backward: less memory, more traffic."""
    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory. For CUDA; much slower."""
    ignored_modules: str | None = None
    """Regular expression on whole module names: these stay whole on every rank, and train the same."""
    param_dtype: DtypeName | None = None
    """Gather and compute in this dtype. Once one of these four is set, they alone are FSDP's precision."""
    reduce_dtype: DtypeName | None = None
    """Reduce gradients in this dtype. None: the dtype in which they were computed."""
    output_dtype: DtypeName | None = None
    """Cast the outputs of each wrap unit. The policy's own outputs are not cast: a loss stays float32."""
    cast_forward_inputs: bool | None = None
    """Cast the inputs of each wrap unit to param_dtype. None: yes. The batch itself is never cast."""


# --------------------------------------------------------------------------------------------- start and end


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
    """Join the process group that the launcher describes, or run alone where there is none.

    Collective: call on every rank. Collectives may take `startup_timeout_s` until `shorten_timeout`, for a
    first step may compile for minutes. The group has gloo beside NCCL: flags and messages between hosts never
    touch the GPU, and CPU offload has a backend for its tensors.

    Raises:
        ValueError: the launcher's variables, the device and the degrees do not fit together.
    """
    rank, world_size = _env_int("RANK", 0), _env_int("WORLD_SIZE", 1)
    local_rank, local_world_size = _env_int("LOCAL_RANK", 0), _env_int("LOCAL_WORLD_SIZE", 1)
    needed = (
        ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if world_size > 1 else ()
    )
    if missing := [name for name in needed if name not in os.environ]:
        raise ValueError(
            f"WORLD_SIZE={world_size} is set but {', '.join(missing)} is not; start with torchrun."
        )
    dp_replicate, dp_shard = resolve_degrees(parallelism, world_size)
    device = _resolve_device(device, local_world_size)
    refuse_accelerate_settings(device)
    here = torch.device(device)
    if device == "cuda":
        here = torch.device("cuda", local_rank)
        torch.cuda.set_device(here)  # before the group: otherwise every rank opens a context on device 0
    mesh = None
    if world_size > 1:
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
            timeout = datetime.timedelta(seconds=startup_timeout_s)
            address = f"MASTER_ADDR={os.environ.get('MASTER_ADDR')} MASTER_PORT={_env_int('MASTER_PORT', 0)}"
            try:
                dist.init_process_group(backend, timeout=timeout, **_store_of_this_life(timeout))
            except dist.DistError as error:
                why = str(error).splitlines()[0]
                raise ValueError(
                    f"the {world_size} ranks could not meet at {address} ({why}); choose a free port "
                    "(torchrun --master-port), and an address that every node can reach."
                ) from error
        if dp_shard > 1 and dp_replicate > 1:
            mesh = init_device_mesh(
                device, (dp_replicate, dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
            )
        elif dp_shard > 1:
            mesh = init_device_mesh(device, (dp_shard,), mesh_dim_names=("dp_shard",))
    cluster = Cluster(
        rank, local_rank, world_size, local_world_size, here, dp_replicate, dp_shard, mesh, step_timeout_s
    )
    _set_timeout(cluster, startup_timeout_s)
    return cluster


def _store_of_this_life(timeout: datetime.timedelta) -> dict[str, Any]:
    """Where ranks that torchrun started again find each other; {} leaves it to torch.

    torchrun's default (static) rendezvous keeps its store, and in it the addresses of the dead ranks, which
    the new ones may read (torch 2.14). Several nodes count their restarts apart: they need c10d's rendezvous,
    which opens a new store each time.
    """
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if life == "0" or os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]:
        return {}
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    return {"store": dist.PrefixStore(f"life_{life}", store), "rank": rank, "world_size": world_size}


def resolve_degrees(parallelism: ParallelismConfig, world_size: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard) with -1 filled in, so that their product is the world size.

    Raises:
        ValueError: they cannot give the world size; the sentence holds all three numbers.
    """
    replicate, shard = parallelism.dp_replicate, parallelism.dp_shard
    flags = f"--parallelism.dp-replicate={replicate} and --parallelism.dp-shard={shard}"
    if replicate == 1 and shard == 1:
        return world_size, 1
    if any(degree == 0 or degree < -1 for degree in (replicate, shard)):
        raise ValueError(f"{flags} must be positive, or -1 for the rest of the world size {world_size}.")
    if replicate == shard == -1:
        raise ValueError(f"{flags} are both open at world size {world_size}; give one of them a number.")
    if -1 in (replicate, shard):
        given = max(replicate, shard)
        if world_size % given:
            raise ValueError(
                f"{flags}: {given} does not divide the world size {world_size}; use a divisor of it."
            )
        replicate, shard = (d if d > 0 else world_size // given for d in (replicate, shard))
    if replicate * shard != world_size:
        raise ValueError(
            f"{flags} multiply to {replicate * shard}, but the world size is {world_size}; "
            "change one of them, use -1, or start another number of processes."
        )
    return replicate, shard


def _resolve_device(device: str, local_world_size: int) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device={device} is not known; use auto, cpu or cuda.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # Not each rank for itself: all ranks of the machine refuse, and none is left waiting for another.
    if device == "cuda" and local_world_size > torch.cuda.device_count():
        raise ValueError(
            f"--device=cuda with {local_world_size} processes on this machine needs as many CUDA devices, "
            f"but torch sees {torch.cuda.device_count()}; start fewer, or use --device cpu."
        )
    return device


def refuse_accelerate_settings(device: str) -> None:
    """Accept `accelerate launch` as a plain launcher; refuse it as a configuration of the training engine.

    Source: the variables that accelerate 1.15 sets in accelerate/utils/launch.py.
    """
    flags = {
        "ACCELERATE_USE_FSDP": "--parallelism.dp-shard",
        "ACCELERATE_USE_DEEPSPEED": "--parallelism.dp-shard",
        "ACCELERATE_USE_MEGATRON_LM": "--parallelism.dp-shard",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "--parallelism.*",
        "ACCELERATE_MIXED_PRECISION": "--mixed-precision",
        "ACCELERATE_DYNAMO_BACKEND": "--compile",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "--gradient-accumulation-steps",
    }
    for prefix in ("FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "ACCELERATE_DEEPSPEED_"):
        flags |= {name: "--parallelism.* and --fsdp.*" for name in os.environ if name.startswith(prefix)}
    if device != "cpu":
        flags["ACCELERATE_USE_CPU"] = "--device cpu"
    for name, flag in flags.items():
        value = os.environ.get(name, "")
        harmless = ("", "0", "no", "none", "false", *(["1"] if name.endswith("ACCUMULATION_STEPS") else []))
        if value.strip().lower() not in harmless:
            raise ValueError(
                f"{name}={value} asks Accelerate to configure the run, which it does not do here; "
                f"launch without it and use {flag}."
            )


def _env_int(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdigit():
        raise ValueError(f"The launcher's variable {name}={value} is not a number; start with torchrun.")
    return int(value)


def set_numerics(tf32: bool, keep_memory: bool = True) -> None:
    """TF32 for CUDA's products and convolutions; cuDNN searches its fastest ones (shapes are static).

    Without a GPU, glibc is told to keep freed memory: a step frees and takes the same hundreds of MB again,
    and fresh pages cost the paper-size step 0.4 to 0.9 s of 11.
    """
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    if keep_memory and sys.platform == "linux" and not torch.cuda.is_available():
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # musl has none
            libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: and stay there


def shorten_timeout(cluster: Cluster) -> None:
    """From start-up's patience to `step_timeout_s`. Call once the first step is done."""
    _set_timeout(cluster, cluster.step_timeout_s)


@contextlib.contextmanager
def patience(cluster: Cluster, seconds: float = 86400) -> Iterator[None]:
    """Collective: enter on every rank. Inside, ranks may wait this long for each other (rollouts)."""
    _set_timeout(cluster, seconds)
    yield
    _set_timeout(cluster, cluster.step_timeout_s)


def _set_timeout(cluster: Cluster, seconds: float) -> None:
    if cluster.world_size == 1:
        return
    # torch 2.14 made it public and deprecates the private name, which is all that 2.11 has.
    set_timeout: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in [dist.group.WORLD, *(cluster.mesh.get_all_groups() if cluster.mesh is not None else [])]:
        set_timeout(datetime.timedelta(seconds=seconds), group)


def finish(cluster: Cluster) -> None:
    """Collective: call on every rank, on success only. Waits for all and destroys the group."""
    if cluster.world_size > 1:
        any_rank(cluster, False)
        dist.destroy_process_group()


# ----------------------------------------------------------------------------------- agreement between ranks


def any_rank(cluster: Cluster, flag: bool) -> bool:
    """Collective: call on every rank. True on all if `flag` is true on one. Never touches the GPU."""
    if cluster.world_size == 1:
        return flag
    vote = torch.tensor([flag], dtype=torch.int32)
    dist.all_reduce(vote, op=dist.ReduceOp.MAX)
    return bool(vote.item())


class StopVote:
    """`any_rank` for every step, without waiting: a message in the background, read at the next poll.

    Collective: poll on every rank. What one rank votes in step n is seen by all of them in step n + 1.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._alone = cluster.world_size == 1
        self._vote = torch.zeros(1, dtype=torch.int32)
        self._work: Any = None

    def poll(self, number: int) -> int:
        """Vote `number`, 0 to go on. Returns the largest vote of the poll before."""
        if self._alone:
            return number
        if self._work is not None:
            self._work.wait()
        stop = int(self._vote.item())
        self._vote = torch.tensor([number or stop], dtype=torch.int32)
        self._work = dist.all_reduce(self._vote, op=dist.ReduceOp.MAX, async_op=True)
        return stop


def from_main(cluster: Cluster, value: Any) -> Any:
    """Collective: call on every rank; all get rank 0's value (pickled: a name, a small setting)."""
    box = [value]
    if cluster.world_size > 1:
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


@contextlib.contextmanager
def raise_together(cluster: Cluster) -> Iterator[None]:
    """An error inside, on any rank, becomes an error on all. The body must hold no collective.

    Collective: enter on every rank. A user's error (ValueError, OSError, ImportError) has the same sentence
    everywhere. Any other leaves its own rank as it is, and is quoted by the others.
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
    dist.all_gather_object(errors, None if error is None else _described(error))
    first = next(rank for rank, e in enumerate(errors) if e is not None)
    if error is not None and (cluster.rank == first or _described(error)[0] == "RuntimeError"):
        raise error
    raise _restored(errors[first], first)


def _described(error: BaseException) -> tuple[str, str]:
    """(type, sentence) for other ranks: a user's error as it is, any other quoted."""
    for kind in (ValueError, OSError, ImportError):
        if isinstance(error, kind):
            return kind.__name__, str(error)
    return "RuntimeError", f"{type(error).__name__}: {error}"


def _restored(described: Iterable[str], rank: int) -> Exception:
    name, sentence = described
    kinds = {"ValueError": ValueError, "OSError": OSError, "ImportError": ImportError}
    return kinds[name](sentence) if name in kinds else RuntimeError(f"rank {rank} failed with {sentence}")


def rank0_first(cluster: Cluster, prepare: Callable[[], Any], per_node: bool = False) -> None:
    """Let rank 0 (`per_node`: the first rank of every machine) run `prepare`, however long it takes.

    Collective: call on every rank. The others do not run it and poll the store meanwhile: no collective
    waits, so no time-out can strike. An error of the one that prepares is raised on all that wait for it.
    """
    global _rank0_first_calls
    if cluster.world_size == 1:
        prepare()
        return
    _rank0_first_calls += 1
    node = _env_int("GROUP_RANK", cluster.rank // cluster.local_world_size) if per_node else 0
    key = f"rank0_first/{_rank0_first_calls}/{node}"
    store = dist.PrefixStore("act", dist.distributed_c10d._get_default_store())
    if (cluster.local_rank if per_node else cluster.rank) == 0:
        try:
            prepare()
        except BaseException as error:
            store.set(key, json.dumps(_described(error)))
            raise
        store.set(key, "null")
        return
    while not store.check([key]):
        time.sleep(0.1)
    if described := json.loads(store.get(key)):
        raise _restored(described, 0)


_rank0_first_calls = 0  # names the store's keys; equal on all ranks, since they call in the same order


# -------------------------------------------------------------------------------------------- wrap and shard


def parallelize(
    policy: nn.Module, cluster: Cluster, ddp: DDPConfig = DDPConfig(), fsdp: FSDPConfig = FSDPConfig()
) -> nn.Module:
    """Move `policy` to the device and give it the cluster's mode. Compile before, build the optimizer after.

    Collective: call on every rank; all leave with rank 0's weights and buffers. With sharding the policy
    itself is changed and returned, with DDP its wrapper. Between steps a sharded policy's parameters are
    always shards.

    Raises:
        ValueError: no wrap unit, a parameter tied across wrap units, or a pattern that matches nothing.
    """
    policy.to(cluster.device)
    if cluster.mode == "single":
        return policy
    sync_buffers = ddp.broadcast_buffers
    if sync_buffers is None:
        sync_buffers = any(isinstance(m, _BatchNorm) and m.running_mean is not None for m in policy.modules())
    if cluster.sharded:
        return _shard(policy, cluster, fsdp, sync_buffers)
    if any(m._compiled_call_impl is not None for m in policy.modules()):
        # Dynamo would cut the graph at bucket borders; one whole graph is worth more than the overlap.
        import torch._dynamo

        torch._dynamo.config.optimize_ddp = False
    # A channels-last image gives a 1x1 convolution's gradient other strides than the weight has, for the same
    # order in memory: DDP warns, and copies it as fast as any other.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    # torch 2.14 renamed the option, 2.11 knows the old name only.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    renamed: Any = {
        "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": sync_buffers
    }
    module: Any = (
        DistributedDataParallel(  # no device_ids: the batch is on its device, DDP need not walk over it
            policy,
            bucket_cap_mb=ddp.bucket_cap_mb,
            gradient_as_bucket_view=ddp.gradient_as_bucket_view,
            static_graph=ddp.static_graph,
            find_unused_parameters=ddp.find_unused_parameters,
            **renamed,
        )
    )
    module._first_window_done = not ddp.static_graph
    return module


def _shard(policy: nn.Module, cluster: Cluster, fsdp: FSDPConfig, sync_buffers: bool) -> nn.Module:
    ignored = ignored_modules(policy, fsdp)
    ignored_params = {p for module in ignored for p in module.parameters()}
    units = wrap_units(policy, fsdp)
    refuse_tied(policy, units)
    for tensor in [*policy.parameters(), *policy.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    options: dict[str, Any] = {
        "mesh": cluster.mesh,
        "reshard_after_forward": fsdp.reshard_after_forward,
        "offload_policy": CPUOffloadPolicy() if _offloads(cluster, fsdp) else OffloadPolicy(),
        "ignored_params": ignored_params,
    }
    precision = MixedPrecisionPolicy()
    dtypes = {name: _dtype(getattr(fsdp, name)) for name in ("param_dtype", "reduce_dtype", "output_dtype")}
    if any(dtypes.values()) or fsdp.cast_forward_inputs is not None:
        precision = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=fsdp.cast_forward_inputs is not False)
    for unit in reversed(units.values()):  # inner units before those that hold them
        fully_shard(cast(Any, unit), mp_policy=precision, **options)
    # Targets and counts come in through the root and losses go out: none of them may be rounded. The root is
    # resharded as any unit is (torch would keep it gathered): its parameters are shards after validation.
    root_precision = dataclasses.replace(precision, output_dtype=None, cast_forward_inputs=False)
    fully_shard(policy, mp_policy=root_precision, **options)
    for name in getattr(policy, "forward_methods", ()):
        register_fsdp_forward_method(policy, name)
    sharded: Any = policy
    sharded._whole_parameters = [p for p in policy.parameters() if p in ignored_params and p.requires_grad]
    sharded._syncs = True
    if sync_buffers:
        policy.register_forward_pre_hook(_broadcast_batch_norms)
    return policy


def _broadcast_batch_norms(module: nn.Module, _: Any) -> None:
    for norm in module.modules() if module.training else ():
        for buffer in norm.buffers() if isinstance(norm, _BatchNorm) else ():
            dist.broadcast(buffer, src=0)


def _offloads(cluster: Cluster, fsdp: FSDPConfig) -> bool:
    return fsdp.cpu_offload and cluster.device.type == "cuda"


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def ignored_modules(policy: nn.Module, fsdp: FSDPConfig) -> list[nn.Module]:
    """The modules whose whole name --fsdp.ignored-modules matches. ValueError if it matches none."""
    pattern = fsdp.ignored_modules
    if pattern is None:
        return []
    names = [name for name, _ in policy.named_modules() if name]
    try:
        matching = [policy.get_submodule(name) for name in names if re.fullmatch(pattern, name)]
    except re.error as error:
        raise ValueError(f"--fsdp.ignored-modules={pattern} is not a regular expression: {error}.") from error
    if not matching:
        raise ValueError(
            f"--fsdp.ignored-modules={pattern} matches no module; match whole names, as {names[-1]}."
        )
    return matching


def wrap_units(policy: nn.Module, fsdp: FSDPConfig) -> dict[str, nn.Module]:
    """The modules that FSDP gathers one at a time, by name, outer before inner; the root holds the rest.

    Raises:
        ValueError: there is none, or two ways of choosing them were given.
    """
    left_out = {m for module in ignored_modules(policy, fsdp) for m in module.modules()}
    # A container has no forward to gather for; a module without children (embedding) may be read, not called.
    blocks = {
        name: m
        for name, m in policy.named_modules()
        if name and m not in left_out and type(m).forward is not nn.Module.forward and any(m.children())
    }
    if fsdp.min_num_params is None:
        classes = fsdp.wrap_modules if fsdp.wrap_modules is not None else getattr(policy, "wrap_modules", ())
        units = {
            name: m for name, m in policy.named_modules() if type(m).__name__ in classes and m not in left_out
        }
        rule = f"--fsdp.wrap-modules={' '.join(classes)} names no class of the policy"
    elif fsdp.wrap_modules is not None:
        raise ValueError(
            "--fsdp.min-num-params and --fsdp.wrap-modules both choose wrap units; give one of them."
        )
    else:
        units, taken = {}, {p for m in left_out for p in m.parameters()}
        for name, module in reversed(blocks.items()):
            own = set(module.parameters()) - taken
            if sum(p.numel() for p in own) >= fsdp.min_num_params:
                units[name] = module
                taken |= own
        units = dict(reversed(units.items()))
        rule = f"--fsdp.min-num-params={fsdp.min_num_params} is more than any block holds"
    if not units:
        known = ", ".join(sorted({type(m).__name__ for m in blocks.values()}))
        raise ValueError(f"{rule}, so FSDP would gather everything at once; choose among {known}.")
    return units


def refuse_tied(policy: nn.Module, units: dict[str, nn.Module]) -> None:
    """A parameter shared by two wrap units would be cut twice and drift apart: ValueError with its names."""
    owners: dict[nn.Parameter, dict[str, str]] = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        unit = max((u for u in units if name.startswith(u + ".")), key=len, default="")
        owners.setdefault(parameter, {}).setdefault(unit, name)
    for names in owners.values():
        if len(names) > 1:
            raise ValueError(
                f"The parameters {' and '.join(names.values())} are one tensor, tied across FSDP wrap units; "
                "untie them, choose a unit that holds both (--fsdp.wrap-modules), or train with DDP."
            )


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """ValueError unless it holds the module's own tensors: built before sharding, it would step dead ones."""
    held = {p for group in optimizer.param_groups for p in group["params"]}
    named = dict(module.named_parameters())
    missing = [name for name, p in named.items() if p.requires_grad and p not in held]
    foreign = len(held - set(named.values()))
    if missing or foreign:
        raise ValueError(
            f"The optimizer misses {len(missing)} trainable parameters of the module "
            f"({', '.join(missing[:3])}) and holds {foreign} of something else; build it after parallelize()."
        )


def check_precision(cluster: Cluster, mixed_precision: MixedPrecision, fsdp: FSDPConfig) -> None:
    """ValueError for precisions that cannot work together in this mode. Call before any work."""
    if not cluster.sharded:
        return
    half, gathered = HALF.get(mixed_precision), _dtype(fsdp.param_dtype)
    if gathered == torch.float16 and half != torch.float16:
        raise ValueError("--fsdp.param-dtype=float16 needs the loss scale; add --mixed-precision fp16.")
    if half and gathered not in (None, torch.float32, half):
        raise ValueError(
            f"--mixed-precision={mixed_precision} and --fsdp.param-dtype={fsdp.param_dtype} name two dtypes "
            "to compute in; drop one of them."
        )
    if _offloads(cluster, fsdp) and (mixed_precision == "fp16" or fsdp.ignored_modules is not None):
        raise ValueError(
            "--fsdp.cpu-offload has its gradients on the CPU, apart from fp16's loss scale and from "
            "--fsdp.ignored-modules on the GPU; use --mixed-precision bf16 or no, and ignore no module."
        )


def memory_per_rank(policy: nn.Module, dp_shard: int, fsdp: FSDPConfig = FSDPConfig()) -> dict[str, int]:
    """Bytes that the fullest rank holds beside activations, on paper. Call before `parallelize`, any degree.

    Returns:
        "parameters", "gradients", "optimizer" (AdamW's two moments) and "gathered": the two largest units,
        one in use and one fetched ahead. Each tensor is cut along its first axis, and padded as if it were
        even.
    """
    parameters = list(policy.parameters())
    sharded = dp_shard > 1
    ignored = (
        {p for m in ignored_modules(policy, fsdp) for p in m.parameters()} if sharded else set(parameters)
    )
    held = {p: p.numel() * p.element_size() for p in parameters}
    for p in set(parameters) - ignored:
        held[p] = -(-p.shape[0] // dp_shard) * p.shape[1:].numel() * p.element_size()
    trainable = sum(held[p] for p in parameters if p.requires_grad)
    units = [set(m.parameters()) - ignored for m in (wrap_units(policy, fsdp).values() if sharded else ())]
    units.append(set(parameters) - ignored - set().union(*units))
    itemsize = (_dtype(fsdp.param_dtype) or parameters[0].dtype).itemsize
    whole = sorted(itemsize * sum(p.numel() for p in unit) for unit in units)
    return {
        "parameters": sum(held.values()),
        "gradients": trainable,
        "optimizer": 2 * trainable,
        "gathered": sum(whole[-2:]),
    }


# -------------------------------------------------------------------------------------------------- the step


def autocast(cluster: Cluster, mixed_precision: MixedPrecision, fsdp: FSDPConfig = FSDPConfig()) -> Any:
    """The precision of a forward pass; parameters, gradients and their mean stay float32 in every layout.

    FSDP needs no parameter dtype for it: a product rounds its weight as it does in one process, so the layout
    does not change the curve. With --fsdp.param-dtype the half type is gathered (half the traffic), and
    autocast follows it, so that modules left out of sharding (float32) and the sharded ones can meet.
    """
    dtype = HALF.get(mixed_precision)
    if cluster.sharded and fsdp.param_dtype in ("bfloat16", "float16"):
        dtype = _dtype(fsdp.param_dtype)
    if dtype is None:
        return contextlib.nullcontext()
    # Cached casts would keep gathered weights alive, and add up a weight's gradients in half precision.
    return torch.autocast(cluster.device.type, dtype=dtype, cache_enabled=False)


@contextlib.contextmanager
def accumulate(module: nn.Module, sync: bool) -> Iterator[None]:
    """One micro-batch: forward and backward both inside. With `sync` the gradients become means over ranks.

    Collective: call on every rank. Only a window's last micro-batch syncs; before it gradients add up
    locally, under FSDP as whole tensors.
    """
    wrapped: Any = module
    if isinstance(module, DistributedDataParallel):
        # static_graph counts hooks in the first window, which must sync every micro-batch (torch 2.14).
        # The sum comes out the same: a gradient that is equal on all ranks is its own mean.
        with contextlib.nullcontext() if sync or not wrapped._first_window_done else module.no_sync():
            yield
        wrapped._first_window_done |= sync
    elif isinstance(module, FSDPModule):
        if wrapped._syncs != sync:
            module.set_requires_gradient_sync(sync)
            wrapped._syncs = sync
        yield
        if sync:
            _average_gradients(wrapped._whole_parameters)
    else:
        yield


def _average_gradients(parameters: list[nn.Parameter]) -> None:
    """What FSDP does not do for ignored modules: the mean over ranks, one message per dtype."""
    for dtype in dict.fromkeys(p.dtype for p in parameters):
        same = [p for p in parameters if p.dtype == dtype]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in same]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, grad, piece in zip(same, grads, flat.split([g.numel() for g in grads])):
            p.grad = grad.copy_(piece.view_as(grad))


def backward(loss: Tensor, scaler: "LossScaler | None" = None) -> None:
    """`loss.backward()`, through the loss scale where there is one."""
    (loss if scaler is None else loss * scaler.scale).backward()


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module | Iterable[nn.Parameter], max_norm: float, scaler: "LossScaler | None" = None
) -> Tensor:
    """Scale gradients down to a global norm of `max_norm` (inf: only measure); give the norm before that.

    Collective: call on every rank after a window's last backward; all get the same number in every layout,
    for whole tensors, shards, or both mixed. The host reads nothing. With a scaler gradients are unscaled in
    the same pass, and the scaler notes whether the norm is finite (weigh the logged norm by `1 -
    scaler.found_inf`). Without one a norm that is not finite spreads into the gradients, as with torch's
    function, whose formula this is.

    Returns:
        A 0-d tensor beside the gradients, float64 for float64 gradients, else float32.
    """
    parameters = module.parameters() if isinstance(module, nn.Module) else module
    grads = [p.grad for p in parameters if p.grad is not None]
    assert grads, "no parameter has a gradient"
    # Tensors that are cut over the same ranks share one all-reduce; whole and replicated ones need none.
    cut_over: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for grad in grads:
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(grad, DTensor):
            assert not any(p.is_partial() for p in grad.placements), "the gradients are not reduced yet"
            groups = tuple(
                grad.device_mesh.get_group(i) for i, p in enumerate(grad.placements) if p.is_shard()
            )
        cut_over.setdefault(groups, []).append(_local(grad))
    total = torch.zeros((), dtype=torch.float64, device=_local(grads[0]).device)
    # The CPU adds float32 squares up in few lanes, which costs 4e-6 over 20 M elements; CUDA adds in a tree.
    accuracy = torch.float64 if total.device.type == "cpu" else None
    for groups, pieces in cut_over.items():
        held = [p for p in pieces if p.numel()] or [
            total.new_zeros(1)
        ]  # a rank may have no row of a small unit
        norms = torch._foreach_norm(held, 2, dtype=accuracy)
        squares = torch.stack([norm.double() for norm in norms]).square_().sum()
        for group in groups:
            dist.all_reduce(squares, group=group)
        total = total + squares
    scale = 1.0 if scaler is None else scaler.inspect(total)
    norm = total.sqrt() / scale
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) / scale
    if scaler is not None or max_norm != float("inf"):
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            torch._foreach_mul_([_local(g) for g in grads if g.dtype == dtype], factor.to(dtype))
    return norm.to(torch.float64 if grads[0].dtype == torch.float64 else torch.float32)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class LossScaler:
    """The loss scale of fp16 training: rule and state of `torch.amp.GradScaler`, kept on the device.

    An overflow on one rank is an overflow on all: all skip the update and halve the scale.
    """

    def __init__(
        self, device: torch.device, init_scale: float = 2.0**16, growth_interval: int = 2000
    ) -> None:
        self.scale = torch.full((), init_scale, dtype=torch.float32, device=device)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._growth_factor, self._backoff_factor, self._growth_interval = 2.0, 0.5, growth_interval

    def inspect(self, scaled_norm: Tensor) -> Tensor:
        """Collective: call on every rank. Note whether the norm is finite on all; give the scale in force."""
        self.found_inf.copy_(~torch.isfinite(scaled_norm))
        if dist.is_initialized() and dist.get_world_size() > 1:
            # Replicas have equal gradients; this makes them skip together even if one of them went wrong.
            dist.all_reduce(self.found_inf, op=dist.ReduceOp.MAX)
        return self.scale

    def update(self) -> None:
        """Halve the scale after an overflow, double it after `growth_interval` updates without one."""
        fine = self.found_inf == 0
        tracker = torch.where(fine, self._growth_tracker + 1, 0)
        grow = tracker == self._growth_interval
        grown = self.scale * self._growth_factor
        grown = torch.where(grow & torch.isfinite(grown), grown, self.scale)
        self.scale.copy_(torch.where(fine, grown, self.scale * self._backoff_factor))
        self._growth_tracker.copy_(torch.where(grow, 0, tracker))

    def state_dict(self) -> dict[str, float | int]:
        """GradScaler's keys and types. Reads from the device."""
        return {
            "scale": self.scale.item(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": int(self._growth_tracker.item()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.fill_(state["scale"])
        self._growth_tracker.fill_(state["_growth_tracker"])
        self._growth_factor, self._backoff_factor = state["growth_factor"], state["backoff_factor"]
        self._growth_interval = state["growth_interval"]


def optimizer_step(optimizer: torch.optim.Optimizer, scaler: LossScaler | None = None) -> None:
    """`optimizer.step()` for shards and whole tensors alike, skipped after an overflow.

    A fused optimizer skips on the device; with another one the host must read the verdict (fp16 only).
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
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    kinds = sorted({isinstance(p, DTensor) for params in whole for p in params})
    if len(kinds) == 1:
        optimizer.step()
        return
    try:  # fused and foreach kernels refuse lists that mix shards with whole tensors (torch 2.14)
        for kind in kinds:
            for group, params in zip(groups, whole):
                group["params"] = [p for p in params if isinstance(p, DTensor) == kind]
            optimizer.step()
    finally:
        for group, params in zip(groups, whole):
            group["params"] = params


# --------------------------------------------------------------------------------------------------- metrics


class MetricSums:
    """Sums of what the steps report, kept on the device: one message and one host read per `reduce`.

    Values are added into memory of its own at once, so a CUDA graph may overwrite them in its next replay.
    """

    def __init__(self, cluster: Cluster, state: dict[str, Any] | None = None) -> None:
        """`state`: what `state_dict` gave when a run was stopped between two log steps, in any layout."""
        self._cluster = cluster
        # names -> (names + 1,): weighted sums, then the weight
        self._sums: dict[tuple[str, ...], Tensor] = {}
        for names, sums in (state or {}).get("sums", []):
            self._sums[tuple(names)] = torch.tensor(sums, dtype=torch.float64, device=cluster.device)
        self._times: dict[str, tuple[float, int]] = {}

    @torch.no_grad()
    def add(self, values: dict[str, Tensor], weight: Tensor | float = 1.0) -> None:
        """Add 0-d tensors; each becomes its mean over calls and ranks, weighted by `weight`.

        A value of weight 0 leaves no trace, even if it is not finite. A name always comes with the same
        others.
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
        rows = self._gather()
        result: dict[str, float] = {}
        at = 0
        for names in self._sums:
            sums = rows[:, at : at + len(names) + 1].sum(0)
            result |= dict(zip(names, (sums[:-1] / sums[-1]).tolist()))
            at += len(names) + 1
        result |= dict(zip(self._times, rows[:, at:].amax(0).tolist()))
        self._sums, self._times = {}, {}
        return result

    def state_dict(self) -> dict[str, Any]:
        """Collective: call on every rank; all get the mean of the ranks' sums: any layout can go on."""
        totals, at, sums = self._gather().mean(0).tolist(), 0, []
        for names in self._sums:
            sums.append([list(names), totals[at : at + len(names) + 1]])
            at += len(names) + 1
        return {"sums": sums}

    def _gather(self) -> Tensor:
        """(ranks, values) on the host: the sums, then the times."""
        times = torch.tensor([total / count for total, count in self._times.values()], dtype=torch.float64)
        mine = torch.cat([*self._sums.values(), times.to(self._cluster.device)])
        every = [mine]
        if self._cluster.world_size > 1:
            every = [torch.empty_like(mine) for _ in range(self._cluster.world_size)]
            dist.all_gather(every, mine)  # one message serves the means and the slowest
        return torch.stack(every).cpu()  # the one host read


def sum_over_ranks(cluster: Cluster, value: Tensor) -> Tensor:
    """Collective: call on every rank; all get the sum. `value` is overwritten."""
    if cluster.world_size > 1:
        dist.all_reduce(value)
    return value


def gathered_state_dict(policy: nn.Module) -> dict[str, Tensor]:
    """Collective: call on every rank; all get the whole tensors, of a sharded or an unsharded policy."""
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in policy.state_dict().items()
    }
