"""Checkpoints of any module with any optimizer: whole or not at all, resumed on any layout.

    RUN/checkpoints/last -> 005000        (and best -> 004000, for a run that evaluates)
    RUN/checkpoints/005000/pretrained_model/
        model.safetensors and / or pytorch_model_fsdp_0/ (DCP shards); or adapter_model.safetensors
    RUN/checkpoints/005000/training_state/
        training_step.json  optimizer_names.json  checksums.json
        optimizer_state.safetensors + optimizer_param_groups.json, or optimizer_0/ (DCP shards)

The names are LeRobot's; what else LeRobot reads, the caller hands in as `files`. A run that resumes
when it is started again:

    model = torch.nn.Sequential(torch.nn.Linear(3, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    writer = ckpt.CheckpointWriter("run", keep_last=3, async_save=True)
    done, step_dir = 0, ckpt.resolve_resume("auto", "run")  # None: nothing to resume
    if step_dir is not None:
        ckpt.load_weights(step_dir, model, resume=True)
        done = ckpt.load_training_state(step_dir, model, optimizer)["step"]
    for step in range(done + 1, 301):
        x = torch.randn(32, 3, generator=torch.Generator().manual_seed(step))
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        writer.poll()                                       # raises the error of a background save
        if step % 100 == 0:
            writer.save(step, model, optimizer)             # under DDP or FSDP2: on every rank
    writer.wait()

Saving communicates, loading never does: each rank reads its own part. Three rules:
published = whole: a checkpoint appears by one rename, and checksums.json lists its files with their sizes;
reading executes nothing: pickles may hold tensors, plain values and DCP's own metadata classes only;
state goes to parameters by name: groups, layout and world size may change between two runs.
"""

import json
import logging
import os
import pickle
import re
import shutil
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

import safetensors.torch
import torch
import torch.distributed as c10d
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

CheckpointFormat = Literal["safetensors", "dcp", "safetensors_dcp"]
Foreign = Callable[[Path], list[str]]  # what is wrong with a checkpoint of others; [] if it is whole

MODEL, TRAINING, STEP = "pretrained_model", "training_state", "training_step.json"
WEIGHTS, WEIGHT_SHARDS = "model.safetensors", "pytorch_model_fsdp_0"
OPTIMIZER, OPTIMIZER_GROUPS = "optimizer_state.safetensors", "optimizer_param_groups.json"
OPTIMIZER_NAMES, OPTIMIZER_SHARDS = "optimizer_names.json", "optimizer_0"
ADAPTER, CHECKSUMS, RUN_ID = "adapter_model.safetensors", "checksums.json", ".run_id"
MASTER_WEIGHTS = "model_float32.safetensors"  # kept where WEIGHTS was converted to less

log = logging.getLogger(__name__)
log.addFilter(lambda record: os.environ.get("RANK", "0") == "0")  # the ranks read the same files


class UserError(ValueError):
    """The user's to mend, in one sentence: flag or file, rule, way out. Others are bugs."""


class CheckpointError(UserError):
    """A checkpoint was not written. The one before it is untouched, and training can continue."""


class CheckpointWriter:
    """Writes the checkpoints of one run directory. Collective: build it and call it on every rank.

    Its own gloo group keeps background saves apart from the training's collectives, and off the GPU.
    """

    last_published: int | None = None
    """Step of the newest checkpoint that this writer has on disk."""

    def __init__(
        self,
        run_dir: str | os.PathLike,
        *,
        checkpoint_format: CheckpointFormat = "safetensors",
        keep_last: int | None = None,
        async_save: bool = False,
        sharded: bool = False,
        digits: int = 6,
    ) -> None:
        """
        Args:
            keep_last: whole checkpoints of this run directory that stay; None keeps all.
            async_save: `save` copies to host memory; the files are written in the background.
            sharded: FSDP or HSDP; only then are there shards to write.
        Raises:
            UserError: on every rank alike; flags that contradict, or an unwritable checkpoints/.
        """
        check_flags(checkpoint_format, sharded, keep_last)
        self.checkpoints = Path(run_dir) / "checkpoints"
        self.format, self.keep_last, self.async_save = checkpoint_format, keep_last, async_save
        self.sharded, self.digits = sharded, digits
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._ranks = _Ranks()
        self._ranks.together(_probe, self.checkpoints)
        # Distinguishes this run's checkpoints from copied ones; rank 0's is the one that is written.
        file = self.checkpoints / RUN_ID
        self.run_id = file.read_text() if file.exists() else os.urandom(16).hex()

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        state: Mapping[str, Any] | None = None,
        files: Mapping[str, Any] | None = None,
        adapter: Mapping[str, Tensor] | None = None,
        best: bool = False,
    ) -> float:
        """Collective: write `checkpoints/STEP` and point `last` at it.

        Args:
            model: plain, compiled, in DDP or sharded by FSDP2.
            state: plain values for training_step.json; `load_training_state` returns them.
            files: path in the step directory -> a value for JSON, bytes, or (for a path that ends in
                .safetensors) a dict of tensors. Those of rank 0 are written.
            adapter: file key -> live tensor, stored in place of the weights.
            best: point `checkpoints/best` at it as well; keep_last spares what is pointed at.
        Returns:
            Seconds that the training was held up.
        Raises:
            CheckpointError: on every rank alike; nothing changed on disk. With async_save the next `poll`
                or `wait` raises it.
        """
        began = time.monotonic()
        self._join()
        if isinstance(self._failure, CheckpointError):  # nobody polled: log it, and write this one
            log.error("%s", self._failure)
            self._failure = None
        self.poll()
        content = self._collect(step, model, optimizer, state or {}, files or {}, adapter, best)
        if self.async_save:
            self._thread = threading.Thread(target=self._write_in_background, args=[content], daemon=True)
            self._thread.start()
        else:
            self._write(content)
        return time.monotonic() - began

    def mark_best(self, step: int) -> bool:
        """Collective: point `best` at the checkpoint of a step; False if it is not on disk."""
        self._join()
        name = f"{step:0{self.digits}d}"
        is_on_disk = self._ranks.gather((self.checkpoints / name).is_dir())[0]
        if is_on_disk:
            self._ranks.together(point, self.checkpoints, "best", name)
        return is_on_disk

    def poll(self) -> None:
        """Raise the failure of a save in the background, once; return at once otherwise.

        Ranks see the same failure a moment apart: do nothing collective about it.
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

    def _collect(self, step, model, optimizer, state, files, adapter, best) -> "_Content":
        """Collective: what the save will write, in host memory where training would change it."""
        content, is_main = _Content(f"{step:0{self.digits}d}", step, best), self._ranks.rank == 0
        weights = dict(adapter) if adapter is not None else state_dict(model)
        if self.format != "dcp":
            # Every rank takes part in the gathering, and only rank 0 keeps the result.
            whole = {key: _gathered(value, keep=is_main) for key, value in weights.items()}
            file = WEIGHTS if adapter is None else ADAPTER
            content.files[f"{MODEL}/{file}"] = {k: v for k, v in whole.items() if v is not None}
        if self.format != "safetensors":
            content.shards[f"{MODEL}/{WEIGHT_SHARDS}"] = {"model": self._staged(weights)}
        names, groups, tensors = _describe(unwrap(model), optimizer)
        if self.sharded:
            saved = {"state": {k: self._staged(v) for k, v in tensors.items()}, "param_groups": groups}
            content.shards[f"{TRAINING}/{OPTIMIZER_SHARDS}"] = {"optimizer": saved}
        elif is_main:
            content.add(_by_index(tensors, groups))
        if is_main:
            now = {"step": step, **state, "saved_at": time.time(), "run_id": self.run_id}
            content.add({f"{TRAINING}/{STEP}": now, f"{TRAINING}/{OPTIMIZER_NAMES}": names, **files})
        return content

    def _staged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What DCP gets: the live tensors, or with async_save host copies (shards stay shards)."""
        if not self.async_save:
            return {key: value.detach() for key, value in tensors.items()}
        return {key: value.detach().to("cpu", copy=True) for key, value in tensors.items()}

    def _write(self, content: "_Content") -> None:
        """Collective: rank 0 does a stage (every_rank: all do), then all learn of any failure."""
        tmp, ranks = self.checkpoints / f".tmp-{content.name}", self._ranks
        try:
            ranks.together(_prepare, tmp, self.run_id)
            ranks.together(_write_shards, tmp, content, ranks.group, every_rank=True)
            # After the shards: the checksums, written with the other files, list them as well.
            ranks.together(_write_files, tmp, content)
            ranks.together(_publish, tmp, content)
        except CheckpointError as error:
            if ranks.rank == 0:
                shutil.rmtree(tmp, ignore_errors=True)
            last = read_pointer(self.checkpoints / "last") or "there is none"
            raise CheckpointError(
                f"The checkpoint of step {content.step} was not written to {self.checkpoints}: "
                f"{str(error).rstrip('.')}. The previous one ({last}) is as it was."
            ) from None
        self.last_published = content.step
        # Only now: until the new one is published, the old ones are all there is.
        if ranks.rank == 0 and self.keep_last is not None:
            _retain(self.checkpoints, self.run_id, content.name, self.keep_last)

    def _write_in_background(self, content: "_Content") -> None:
        try:
            self._write(content)
        except BaseException as error:
            self._failure = error  # for the next `poll`: in a thread it would end nothing

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _publish(tmp: Path, content: "_Content") -> None:
    # This rename makes the checkpoint visible, whole; the pointers follow, each by a rename too.
    checkpoints, final = tmp.parent, tmp.parent / content.name
    if final.exists():  # a run that was resumed from an earlier step passes this one again
        _exchange(tmp, final)
    else:
        os.rename(tmp, final)
    flush(checkpoints)
    for pointer in ("last", "best") if content.best else ("last",):
        point(checkpoints, pointer, content.name)
    if tmp.exists():
        _remove(tmp)


def load_weights(
    path: str | os.PathLike,
    model: nn.Module,
    *,
    adapter: Mapping[str, Tensor] | None = None,
    resume: bool = False,
) -> None:
    """Fill the model, or the given adapter tensors, in place; a shard reads its own rows only.

    Args:
        path: a step directory, or a folder that holds the weights.
        adapter: file key -> live tensor: load the adapter, onto a model that has its base already.
        resume: prefer the weights that training continues from to a converted, rounded file.
    Raises:
        UserError: a tensor is missing, unexpected or misshapen (by name); a file is corrupt.
    """
    source = weights_source(model_dir(path), adapter is not None, resume)
    load_tensors(source, state_dict(model) if adapter is None else adapter)


def load_training_state(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    record_of: Callable[[Path], dict] | None = None,
) -> dict[str, Any]:
    """Restore the optimizer (built after the model was sharded). Returns training_step.json.

    Settings of its groups (lr, ...) become the saved ones; kernels (fused, foreach) stay its own.
    No random generator is restored: what a step draws must follow from its number.

    Args:
        record_of: training_state/ of others -> what their optimizer_names.json would hold.
    Raises:
        UserError: another class of optimizer; state is missing, unexpected or misshapen (by name); a
            file is missing or corrupt.
    """
    step_dir = model_dir(path).parent
    progress = training_step(step_dir)
    later = (CHECKSUMS, OPTIMIZER, OPTIMIZER_SHARDS, MASTER_WEIGHTS)  # large, or verified when read
    verify(step_dir, [p for p in (step_dir / TRAINING).iterdir() if p.name not in later])
    source, saved, stored = _open_optimizer(step_dir / TRAINING, record_of)
    kind = type(optimizer).__name__
    if saved["optimizer"] not in (None, kind):
        raise UserError(f"{source} is the state of {saved['optimizer']}, not of {kind}; use that.")
    names = parameter_names(unwrap(model))
    trained = {names[id(p)]: (p, group) for group in optimizer.param_groups for p in group["params"]}
    wrong = [f"unexpected {name}" for name in stored if name not in names.values()]
    states: dict[nn.Parameter, dict[str, Any]] = {}
    targets, wanted, shapes = dict[str, Any](), dict[str, Tensor](), dict[str, tuple]()
    for name, (parameter, group) in trained.items():
        tensors, expected = stored.get(name, {}), saved["state"].get(name, {})
        if tensors or expected:
            states[parameter] = state = _empty_state(parameter, group, tensors, expected)
            wanted |= {f"{kind} of {name}": v for kind, v in state.items() if isinstance(v, Tensor)}
            shapes |= {f"{kind} of {name}": shape for kind, (_, shape, _) in tensors.items()}
            targets |= {key: state.get(kind) for kind, (key, _, _) in tensors.items()}
    if wrong := wrong + misfits(wanted, shapes):  # nothing is changed before all of it fits
        raise UserError(f"{source} does not fit this optimizer: {first_few(wrong)}.")
    _read_into(source, targets)
    cast(dict, optimizer.state).update(states)
    _restore_settings(saved["groups"], optimizer, names)
    _warn_of_fresh_and_frozen(saved["groups"], stored, names, trained)
    return progress


def checkpoint_problems(step_dir: Path, foreign: Foreign | None = None) -> list[str]:
    """What keeps a step directory from being whole; [] if it is.

    Published = whole: each file of checksums.json is there with its size. (JSON of another size that can
    still be read was edited by somebody, which reading it mentions.)
    """
    record = step_dir / TRAINING / CHECKSUMS
    if not record.is_file():
        return foreign(step_dir) if foreign else [f"{record} does not exist: others wrote it"]
    try:
        training_step(step_dir)
        sums = read_sums(record)
    except UserError as error:
        return [str(error).rstrip(".")]
    problems = [_file_problem(step_dir / name, size) for name, (size, _) in sums.items()]
    return [problem for problem in problems if problem is not None]


# ------------------------------------------------------------------------------------- end of the spine


class _Ranks:
    """Agreement between the ranks of one writer."""

    group: Any = None
    rank, world_size = 0, 1

    def __init__(self) -> None:
        if c10d.is_available() and c10d.is_initialized():
            self.rank, self.world_size = c10d.get_rank(), c10d.get_world_size()
            self.group = c10d.new_group(backend="gloo") if self.world_size > 1 else None

    def gather(self, value: Any) -> list:
        values = [value] * self.world_size
        if self.group is not None:
            c10d.all_gather_object(values, value, group=self.group)
        return values

    def together(self, work: Callable[..., None], *args: Any, every_rank: bool = False) -> None:
        """Collective: do it on rank 0, or on every rank; if it fails on one, it is an error on all.

        What a disk or a library does is a CheckpointError; a bug keeps its traceback.
        """
        failure, bug = None, None
        if self.rank == 0 or every_rank:
            try:
                work(*args)
            except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
                bug = None if isinstance(_cause(error), SAVE_ERRORS) else error
                # DCP's comes to every rank and knows the first that failed.
                rank = next(iter(getattr(error, "failures", [self.rank])))
                failure = rank, _sentence(error), CheckpointError if bug is None else RuntimeError
        failures = self.gather(failure)
        if bug is not None:
            raise bug
        for rank, text, kind in filter(None, failures):
            raise kind(text if self.world_size == 1 else f"rank {rank}: {text}")


@dataclass
class _Content:
    """What one save writes: DCP directories (every rank its shards), the other files (rank 0)."""

    name: str
    step: int
    best: bool
    shards: dict[str, dict] = field(default_factory=dict)
    files: dict[str, bytes | dict[str, Tensor]] = field(default_factory=dict)

    def add(self, files: Mapping[str, Any]) -> None:
        """Files with the content that they have now."""
        for path, value in files.items():
            if path.endswith(".safetensors"):
                self.files[path] = {key: _host_copy(tensor) for key, tensor in value.items()}
            elif isinstance(value, bytes):
                self.files[path] = value
            else:  # `default`: paths
                self.files[path] = json.dumps(value, indent=4, default=os.fspath).encode()


def check_flags(checkpoint_format: str, sharded: bool, keep_last: int | None) -> None:
    """Raise a UserError for what no `CheckpointWriter` can do."""
    flag = f"--checkpoint-format={checkpoint_format}"
    if checkpoint_format not in ("safetensors", "dcp", "safetensors_dcp"):
        raise UserError(f"{flag} is unknown; use safetensors, dcp or safetensors_dcp.")
    if checkpoint_format != "safetensors" and not sharded:
        needed = "a sharded run (--parallelism.dp-shard other than 1)"
        raise UserError(f"{flag} needs {needed}; other runs write safetensors.")
    if keep_last is not None and keep_last < 1:
        raise UserError(f"--keep-last={keep_last} would delete every checkpoint; use 1 or more.")


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile's wrapper; FSDP2 has none."""
    inner: Any = model
    ddp = nn.parallel.DistributedDataParallel
    while isinstance(inner, ddp) or hasattr(inner, "_orig_mod"):
        inner = inner.module if isinstance(inner, ddp) else inner._orig_mod
    return inner


def clean_name(name: str) -> str:
    """A tensor's name without the wrappers inside the model."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def state_dict(model: nn.Module) -> dict[str, Tensor]:
    return {clean_name(key): value for key, value in unwrap(model).state_dict().items()}


def parameter_names(module: nn.Module) -> dict[int, str]:
    return {id(p): clean_name(name) for name, p in module.named_parameters()}


def _gathered(tensor: Tensor, keep: bool) -> Tensor | None:
    """Collective for a shard: the whole weight in host memory of its own, if it is to be kept."""
    if isinstance(tensor, DTensor):
        if tensor.device.type != tensor.device_mesh.device_type:  # FSDP's CPU offload
            tensor = tensor.to(tensor.device_mesh.device_type)
        tensor = cast(DTensor, tensor.detach()).full_tensor()
    # Weights are stored in float32, whatever a policy computes in.
    tensor = tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
    return _host_copy(tensor) if keep else None


def _host_copy(tensor: Tensor) -> Tensor:
    # safetensors refuses padded views, channels_last and ties (two copies, which load back into one).
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _describe(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict, list[dict], dict]:
    """Content of optimizer_names.json, groups with names as "params", the state's live tensors."""
    names, kind = parameter_names(module), type(optimizer).__name__
    if any(id(p) not in names for group in optimizer.param_groups for p in group["params"]):
        raise UserError(f"{kind} holds parameters that are not the model's: build it after sharding.")
    groups = [
        _settings(optimizer, group) | {"params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    tensors: dict[str, dict[str, Tensor]] = {}
    record: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            what = value
            if isinstance(value, Tensor):
                tensors.setdefault(names[id(parameter)], {})[key] = value
                what = AS_PARAMETER if value.shape == parameter.shape else WHOLE
            elif not isinstance(value, int | float | None):
                raise UserError(f"{kind} keeps a {type(value).__name__}, {key}: it cannot be saved.")
            record.setdefault(names[id(parameter)], {})[key] = what
    rest = [name for name in names.values() if name not in record]
    return {"optimizer": kind, "groups": groups, "without_state": rest, "state": record}, groups, tensors


# Settings of a group that say how this process computes: stored as the defaults, never restored.
KERNELS = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
# What optimizer_names.json says of a tensor: shaped, and so sharded, as its parameter is; or not.
AS_PARAMETER, WHOLE = "as the parameter", "whole"


def _settings(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Plain settings of a group, in the order that LeRobot's strict reader expects of AdamW."""
    settings = {}
    for key in dict.fromkeys([*optimizer.defaults, *group]):
        if key in group and key != "params":
            value: Any = group[key].item() if isinstance(group[key], Tensor) else group[key]
            is_float = type(value) is int and isinstance(optimizer.defaults.get(key), float)
            value = float(value) if is_float else value
            value = tuple(value) if isinstance(value, list) else value  # lists, DCP takes apart
            settings[key] = KERNELS.get(key, value)
    return settings


def _by_index(states: dict[str, dict], groups: list[dict]) -> dict[str, Any]:
    """Files of state and groups, with parameters numbered in the order of the groups, as LeRobot does."""
    index = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
    tensors: dict[str, Tensor] = {}
    for name, state in states.items():
        tensors |= {f"state/{index[name]}/{kind}": value for kind, value in state.items()}
    numbered = [group | {"params": [index[name] for name in group["params"]]} for group in groups]
    return {f"{TRAINING}/{OPTIMIZER}": tensors, f"{TRAINING}/{OPTIMIZER_GROUPS}": numbered}


# -- write and publish: in the caller's thread, or in the background


def _probe(checkpoints: Path) -> None:
    """Refuse at the start what would fail at the first save, perhaps hours later; leave no trace."""
    refuse_no_directory(checkpoints)
    absent, probe = not checkpoints.exists(), checkpoints / ".write-test"
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
        if absent:
            checkpoints.rmdir()
    except OSError as error:
        way_out = "name another --output-dir, or train with --no-save-checkpoint"
        raise UserError(f"{checkpoints} cannot be written ({error.strerror}); {way_out}.") from None


def _prepare(tmp: Path, run_id: str) -> None:
    checkpoints = tmp.parent
    checkpoints.mkdir(parents=True, exist_ok=True)
    for left in _leftovers(checkpoints):
        log.warning("%s is left from a save that was interrupted; removing it.", left)
        _remove(left)
    if not (checkpoints / RUN_ID).exists():
        write_bytes(checkpoints / RUN_ID, run_id.encode())
    for part in (MODEL, TRAINING):
        (tmp / part).mkdir(parents=True)


def _write_shards(tmp: Path, content: _Content, group: Any) -> None:
    for path, shards in content.shards.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*(assuming the intent is to save|TypedStorage).*")
            writer = dcp.FileSystemWriter(tmp / path)
            dcp.save(shards, storage_writer=writer, process_group=group, no_dist=group is None)


def _write_files(tmp: Path, content: _Content) -> None:
    for name, value in content.files.items():
        (tmp / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(value, bytes):
            write_bytes(tmp / name, value)
        else:
            metadata = {"format": "pt"} if Path(name).name in (WEIGHTS, ADAPTER) else None
            save_tensors(value, tmp / name, metadata)
    for directory in content.shards:
        for info in read_shard_metadata(tmp / directory).storage_data.values():
            if not (tmp / directory / info.relative_path).is_file():  # another node has its own disk
                way_out = "--output-dir must be on a file system that every node shares"
                raise UserError(f"{tmp / directory / info.relative_path} does not exist; {way_out}.")
    paths = [tmp, *tmp.rglob("*")]
    files = {path.relative_to(tmp).as_posix(): path for path in sorted(paths) if path.is_file()}
    sums = {name: [path.stat().st_size, crc32(path)] for name, path in files.items()}
    write_bytes(tmp / TRAINING / CHECKSUMS, json.dumps(sums, indent=1).encode())
    for folder in [path for path in paths if path.is_dir()]:
        flush(folder)


def _retain(checkpoints: Path, run_id: str, newest: str, keep_last: int) -> None:
    """Delete whole checkpoints of this run directory beyond the newest, and nothing else."""
    try:
        pointed = {read_pointer(path) for path in checkpoints.iterdir()}  # last, best, and yours
        whole = [path for path, problems in find_checkpoints(checkpoints) if not problems]
        mine = [p for p in whole if p.name != newest and training_step(p).get("run_id") == run_id]
        for path in mine[: max(0, len(mine) - (keep_last - 1))]:
            if path.name not in pointed:
                _remove(path)
    except (OSError, UserError) as error:
        log.warning("--keep-last could not delete old checkpoints: %s", error)


def point(checkpoints: Path, pointer: str, name: str) -> None:
    """Let checkpoints/POINTER lead to NAME: by a link, or a text file where links are refused."""
    if read_pointer(checkpoints / pointer) == name:
        return
    new = checkpoints / f".{pointer}.new"
    new.unlink(missing_ok=True)
    try:
        os.symlink(name, new)
    except (OSError, NotImplementedError):  # some mounts, and Windows without the right to
        write_bytes(new, f"{name}\n".encode())
    os.replace(new, checkpoints / pointer)
    flush(checkpoints)


def read_pointer(path: Path) -> str | None:
    """The name that `last` (link or text file) leads to; None for anything that is no pointer."""
    if path.is_symlink():
        target = Path(os.readlink(path))
        is_near = len(target.parts) == 1 or target.parent.resolve() == path.parent.resolve()
        return target.name if is_near else None
    if path.is_file() and path.stat().st_size < 256:
        text = path.read_bytes().decode(errors="replace").strip()
        return text if text and Path(text).name == text else None
    return None


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories in one operation (Linux), or in two: `_leftovers` heals the moment between."""
    import ctypes

    swap = getattr(ctypes.CDLL(None) if os.name == "posix" else None, "renameat2", None)
    if swap is None or swap(-100, os.fsencode(new), -100, os.fsencode(old), 2) != 0:  # RENAME_EXCHANGE
        aside = old.parent / f".old-{old.name}"
        os.rename(old, aside)
        os.rename(new, old)
        _remove(aside)


def _leftovers(checkpoints: Path) -> list[Path]:
    """What interrupted saves left behind; names of other people's making are not touched."""
    for aside in checkpoints.glob(".old-*"):  # killed between two renames: put it back
        name = aside.name.removeprefix(".old-")
        if name.isdigit() and not (checkpoints / name).exists():
            os.rename(aside, checkpoints / name)
    return sorted(p for p in checkpoints.iterdir() if re.fullmatch(r"\.(tmp|old|trash)-\d+", p.name))


def _remove(directory: Path) -> None:
    # By another name first: a half deleted directory must not look like anything else.
    trash = directory.parent / f".trash-{directory.name.rpartition('-')[2]}"
    if directory != trash:
        shutil.rmtree(trash, ignore_errors=True)
        os.rename(directory, trash)
    shutil.rmtree(trash, ignore_errors=True)


def write_bytes(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: dict | None = None) -> None:
    # safetensors (0.8) makes files that only their owner can read; an empty file has the umask's mode.
    path.touch()
    mode = path.stat().st_mode
    safetensors.torch.save_file(tensors, path, metadata)
    if path.stat().st_mode != mode:
        path.chmod(mode)
    flush(path)


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# What a full disk and a broken file raise.
SAVE_ERRORS = (OSError, RuntimeError, safetensors.SafetensorError, UserError)
FILE_ERRORS = (*SAVE_ERRORS, EOFError, ValueError, pickle.PickleError)


def _cause(error: BaseException) -> BaseException:
    """The first rank's error out of DCP's own, whose text is a traceback."""
    return next(iter(error.failures.values()))[0] if isinstance(error, dcp.CheckpointException) else error


def _sentence(error: BaseException) -> str:
    error = _cause(error)
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


def read_sums(record: Path) -> dict[str, list[int]]:
    """checksums.json: path in the step directory -> [size, CRC-32]."""
    sums = read_json(record)
    if not isinstance(sums, dict) or not all(isinstance(e, list) and len(e) == 2 for e in sums.values()):
        raise UserError(f"{record} is corrupt: it is not a record of sizes and checksums.")
    return sums


def crc32(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value


def verify(step_dir: Path, paths: Iterable[Path]) -> None:
    """Refuse a file (or one in a directory) that is not as it was saved, be it by one bit."""
    record, paths = step_dir / TRAINING / CHECKSUMS, set(paths)
    sums = read_sums(record) if record.is_file() else {}
    for name, (size, crc) in sums.items():
        file = step_dir / name
        if {file, file.parent} & paths and (problem := _file_problem(file, size, crc)):
            way_out = f"use another checkpoint (if the change was meant, delete {record})"
            raise UserError(f"{problem}; {way_out}.")


def _file_problem(path: Path, size: int, crc: int | None = None) -> str | None:
    """What is wrong with a file as far as its size, and its checksum, show; JSON may be edited."""
    now = path.stat().st_size if path.is_file() else None
    if now is None or (now == size and crc in (None, crc32(path))):
        return f"{path} does not exist" if now is None else None
    what = f"{now} of {size} bytes" if now != size else "its checksum is not that of the save"
    if path.suffix == ".json" and (now != size or path.parent.name == MODEL or "config" in path.name):
        try:
            read_json(path)
            if crc is not None:
                log.warning("%s was changed after it was saved.", path)
            return None
        except UserError:
            pass
    return f"{path} is corrupt: {what}"


def read_json(path: Path, *keys: str) -> Any:
    """The content of a JSON file; with `keys`, an object that has them all."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {_sentence(error)}") from None
    for key in keys:
        if not isinstance(content, dict) or key not in content:
            raise UserError(f"{path} cannot be used: it has no {key}.")
    return content


def training_step(step_dir: Path) -> dict[str, Any]:
    """Content of training_step.json; its step is a whole number."""
    path = step_dir / TRAINING / STEP
    state = read_json(path, "step")
    if type(state["step"]) is not int or state["step"] < 0:
        raise UserError(f"{path} has no valid step.")
    return state


def model_dir(path: str | os.PathLike) -> Path:
    """pretrained_model/ of a step directory, or the folder itself."""
    return Path(path) / MODEL if (Path(path) / MODEL).is_dir() else Path(path)


def weights_source(model_dir: Path, adapter: bool, resume: bool) -> Path:
    """The file or the directory of shards that holds the weights, or the adapter's."""
    shards, weights = model_dir / WEIGHT_SHARDS, model_dir / WEIGHTS
    training = model_dir.parent / TRAINING  # absent where the folder of the weights alone was copied
    master = (training if training.is_dir() else model_dir) / MASTER_WEIGHTS
    order = [shards, master, weights] if resume else [weights, shards]
    order = [model_dir / ADAPTER, shards] if adapter else order
    for source in order:
        if source.exists():
            return source
    raise UserError(f"{model_dir} has no weights: neither {' nor '.join(p.name for p in order)}.")


def load_tensors(source: Path, targets: Mapping[str, Tensor], shapes: dict | None = None) -> None:
    """Fill live tensors from a source that holds exactly these; `shapes`: what of it counts."""
    if wrong := misfits(targets, weight_shapes(source) if shapes is None else shapes):
        raise UserError(f"{source} does not fit this model: {first_few(wrong)}.")
    verify(source.parent.parent, [source])
    prefix = "model." if source.is_dir() else ""
    _read_into(source, {prefix + key: target for key, target in targets.items()})


def misfits(targets: Mapping[str, Tensor], shapes: Mapping[str, tuple]) -> list[str]:
    """Both directions and every shape, before anything is changed."""
    wrong = [f"missing {key}" for key in sorted(targets.keys() - shapes.keys())]
    wrong += [f"unexpected {key}" for key in sorted(shapes.keys() - targets.keys())]
    return wrong + [
        f"{key} has shape {tuple(shapes[key])}, not {tuple(value.shape)}"
        for key, value in targets.items()
        if key in shapes and tuple(shapes[key]) != tuple(value.shape)
    ]


def first_few(wrong: list[str]) -> str:
    return "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")


def entries(source: Path) -> dict[str, tuple[tuple, torch.dtype]]:
    """Name -> (shape, type) of the tensors in a safetensors file or a directory of shards."""
    if source.is_dir():
        stored = read_shard_metadata(source).state_dict_metadata
        tensors = {k: m for k, m in stored.items() if isinstance(m, dcp.TensorStorageMetadata)}
        return {key: (tuple(meta.size), meta.properties.dtype) for key, meta in tensors.items()}
    with open_safetensors(source) as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        shapes = {key: tuple(part.get_shape()) for key, part in slices.items()}
        nothing = {key: slices[key][(slice(0, 0),) * len(shape)] for key, shape in shapes.items()}
        return {key: (shape, nothing[key].dtype) for key, shape in shapes.items()}


def weight_shapes(source: Path) -> dict[str, tuple]:
    prefix = "model." if source.is_dir() else ""
    return {key.removeprefix(prefix): shape for key, (shape, _) in entries(source).items()}


def _read_into(source: Path, targets: dict[str, Tensor]) -> None:
    """Copy stored tensors into live ones; each rank reads its part, to host memory first."""
    with torch.no_grad():
        if source.is_dir():
            read_shards(source, {key: target.detach() for key, target in targets.items()})
            return
        with open_safetensors(source) as file:
            for key, target in targets.items():
                copy_part(target, file.get_slice(key).__getitem__)


def copy_part(target: Tensor, read: Callable[[tuple[slice, ...]], Tensor]) -> None:
    """Fill a tensor, or this rank's part of a sharded one, from what reads parts of the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset, local = tuple(target.shape), (0,) * target.ndim, target
    if isinstance(target, DTensor):
        mesh, placements = target.device_mesh, target.placements
        shape, offset = compute_local_shape_and_global_offset(target.shape, mesh, placements)
        local = target.to_local()
    if local.numel():
        local.copy_(read(tuple(slice(o, o + s) for o, s in zip(offset, shape))))


def open_safetensors(path: Path) -> Any:
    # The device is named: safetensors takes a bare "cuda" for the first GPU, on every rank.
    try:
        return safetensors.safe_open(path, framework="pt", device="cpu")
    except (safetensors.SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {_sentence(error)}") from None


@torch.no_grad()
def _empty_state(parameter: Tensor, group: dict, stored: dict, expected: dict) -> dict[str, Any]:
    """A parameter's state, with tensors to be filled where the optimizer looks for them."""
    state = {}
    for kind, what in expected.items():
        _, shape, dtype = stored.get(kind, ("", (), torch.float32))
        if what == AS_PARAMETER:
            state[kind] = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
        elif what == WHOLE:
            # Counters stay in host memory, but for the kernels that count on the device.
            on_device = len(shape) > 0 or group.get("fused") or group.get("capturable")
            state[kind] = torch.zeros(shape, dtype=dtype, device=parameter.device if on_device else "cpu")
        else:
            state[kind] = what
    return state


def _restore_settings(saved: list[dict], optimizer: Any, names: dict[int, str]) -> None:
    by_name = {name: group for group in saved for name in group["params"]}
    for index, group in enumerate(optimizer.param_groups):
        matches = [by_name[names[id(p)]] for p in group["params"] if names[id(p)] in by_name]
        if len(saved) == len(optimizer.param_groups):
            matches.append(saved[index])  # a policy without cameras has an empty group
        for key, value in matches[0].items() if matches else ():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            elif key != "params" and key not in KERNELS:
                group[key] = tuple(value) if isinstance(value, list) else value


def _warn_of_fresh_and_frozen(saved: list[dict], stored: dict, names: dict, trained: dict) -> None:
    recorded = {name for group in saved for name in group["params"]} | stored.keys()
    frozen = [name for name in stored if name not in trained and name in names.values()]
    fresh = [name for name in trained if name not in recorded]
    for some, text in (
        (frozen, "The saved optimizer state of %d parameters that no longer train is dropped: %s"),
        (fresh, "No optimizer state was saved for %d parameters; theirs starts anew: %s"),
    ):
        if some:
            log.warning(text, len(some), ", ".join(some[:3]) + (" ..." if len(some) > 3 else ""))


def _open_optimizer(training: Path, record_of: Any) -> tuple[Path, dict, dict[str, dict[str, tuple]]]:
    """(file or shards, content of optimizer_names.json, `stored_state`)."""
    source, record = training / OPTIMIZER_SHARDS, training / OPTIMIZER_NAMES
    source = source if source.is_dir() else training / OPTIMIZER
    verify(training.parent, [source])  # before any of its pickles is read
    about = read_json(record) if record.is_file() else {}
    if "state" not in about:
        if record_of is None:
            raise UserError(f"{source} only numbers parameters, and {record} does not name them.")
        about = record_of(training)
    return source, about, stored_state(source, about["groups"])


def stored_state(source: Path, groups: list[dict]) -> dict[str, dict[str, tuple]]:
    """Name -> "exp_avg" -> key, shape and type in an optimizer's file, which may number the parameters."""
    pattern = r"optimizer\.state\.(.+)\.([^.]+)" if source.is_dir() else r"state/([^/]+)/([^/]+)"
    names = {str(i): name for i, name in enumerate(name for group in groups for name in group["params"])}
    stored: dict[str, dict[str, tuple]] = {}
    for key, (shape, dtype) in entries(source).items():
        if match := re.fullmatch(pattern, key):
            name = match[1] if source.is_dir() else names.get(match[1], f"parameter {match[1]}")
            stored.setdefault(name, {})[match[2]] = key, shape, dtype
    return stored


# What the pickles of DCP may ask for.
METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata "
    "ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "collections": "OrderedDict",
}


class _MetadataUnpickler(pickle.Unpickler):
    """Admits the classes that DCP's .metadata is made of, and nothing that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("pathlib") and name.endswith("Path"):  # of whatever system wrote it
            return PurePosixPath
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in METADATA_CLASSES.get(module, "").split():
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def read_shard_metadata(directory: Path) -> dcp.Metadata:
    """The .metadata of a DCP directory; it may ask for no other class, and name no file outside."""
    path = directory / ".metadata"
    try:
        with open(path, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except Exception as error:  # damaged pickles raise nearly anything
        raise UserError(f"{path} cannot be read: {_sentence(error)}") from None
    parts = [getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data")]
    if not isinstance(metadata, dcp.Metadata) or not all(isinstance(part, dict) for part in parts):
        raise UserError(f"{path} cannot be read: it is not the metadata of shards.")
    for info in metadata.storage_data.values():
        name = getattr(info, "relative_path", None)
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{path} names {name!r}, which is outside its directory.")
    return metadata


class _ShardReader(dcp.FileSystemReader):
    """DCP's reader with the safe unpickler."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        metadata = read_shard_metadata(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _ShardPlanner(dcp.DefaultLoadPlanner):
    """DCP's planner, which would unpickle any bytes; these may hold plain values only."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def read_shards(directory: Path, targets: dict[str, Any]) -> dict[str, Any]:
    """Fill `targets`, by keys of the .metadata; values that are no tensors are replaced."""
    planner = _ShardPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*assuming the intent is to load.*")
            dcp.load(targets, storage_reader=_ShardReader(directory), planner=planner, no_dist=True)
    except dcp.CheckpointException as error:
        cause = _cause(error)
        if isinstance(cause, UserError) or not isinstance(cause, FILE_ERRORS):
            raise cause from None
        raise UserError(f"{directory} cannot be read: {_sentence(cause)}") from None
    return targets


def resolve_resume(
    path: str | os.PathLike, output_dir: str | os.PathLike | None, foreign: Foreign | None = None
) -> Path | None:
    """The step directory to resume from.

    Args:
        path: a step directory or `last`; or "auto": the newest whole checkpoint under `output_dir`,
            None where there is none.
        foreign: judges checkpoints that have no checksums.json; without it, none of them is whole.
    Raises:
        UserError: it is not whole, or checkpoints/ is no directory (a disk that is not mounted).
    """
    if str(path) == "auto":
        if output_dir is None:
            return None
        refuse_no_directory(Path(output_dir))
        refuse_no_directory(Path(output_dir) / "checkpoints")
        return newest_checkpoint(Path(output_dir) / "checkpoints", foreign)
    step_dir = Path(path)
    if problems := checkpoint_problems(step_dir, foreign):
        raise UserError(f"{step_dir} is not a whole checkpoint: {problems[0]}.")
    return step_dir


def refuse_no_directory(path: Path) -> None:
    """Raise a UserError for a file or a dangling link where a directory belongs; absent is fine."""
    if os.path.lexists(path) and not path.is_dir():
        what = f"leads to {os.readlink(path)}, which is no directory" if path.is_symlink() else "is a file"
        way_out = f"mount or restore the directory (then --resume finds it), remove {path}"
        raise UserError(f"{path} {what}: {way_out}, or name another --output-dir.")


def run_dir_of(step_dir: Path) -> Path:
    """The run directory that a step directory of `resolve_resume` lies in."""
    parent = step_dir.resolve().parent
    return parent.parent if parent.name == "checkpoints" else parent


def find_checkpoints(checkpoints: Path, foreign: Foreign | None = None) -> list[tuple[Path, list[str]]]:
    """Step directories, oldest first, each with what is wrong with it."""
    paths = checkpoints.iterdir() if checkpoints.is_dir() else []
    steps = [p for p in paths if p.name.isdigit() and p.is_dir() and not p.is_symlink()]
    steps.sort(key=lambda path: int(path.name))
    checked = [(path, checkpoint_problems(path, foreign)) for path in steps]
    times = {path: training_step(path).get("saved_at") for path, problems in checked if not problems}
    if all(isinstance(saved_at, float) for saved_at in times.values()):  # a run may go back
        checked.sort(key=lambda entry: times.get(entry[0]) or 0.0)
    return checked


def newest_checkpoint(checkpoints: Path, foreign: Foreign | None) -> Path | None:
    newest = None
    for path in _leftovers(checkpoints) if checkpoints.is_dir() else []:
        log.warning("%s is left from a save that was interrupted; it is not used.", path)
    for path, problems in find_checkpoints(checkpoints, foreign):
        if problems:
            log.warning("%s is not whole and is not used: %s.", path, problems[0])
        else:
            newest = path
    return newest


if __name__ == "__main__":
    from extras import ckpt_tools

    ckpt_tools.main()
