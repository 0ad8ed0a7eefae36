"""The commands of ckpt.py: weights in one file out of shards or adapters; what a checkpoint holds.

python ckpt.py convert --checkpoint-dir RUN/checkpoints/last [--delete-dcp] [--dtype bfloat16]
python ckpt.py show --checkpoint-dir RUN/checkpoints/last
"""

import json
import logging
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Literal

import safetensors
import torch
from torch import Tensor

import ckpt
from ckpt import ADAPTER, CHECKSUMS, MASTER_WEIGHTS, MODEL, OPTIMIZER_NAMES, TRAINING, WEIGHT_SHARDS, WEIGHTS
from extras import hub, lerobot_ckpt
from extras.lerobot_ckpt import ADAPTER_CONFIG

UserError = ckpt.UserError
Dtype = Literal["float32", "bfloat16", "float16"]


def convert(
    checkpoint_dir: Path, delete_dcp: bool = False, dtype: Dtype = "float32", push_to_hub: str | None = None
) -> None:
    """Make one model.safetensors of DCP shards or of an adapter and its base. No GPU, no process group.

    Args:
        checkpoint_dir: Step directory, run directory, `last` or pretrained_model/.
        delete_dcp: Delete the weight shards once the merged file was read back and compared.
        dtype: Precision of the merged file. Where the float32 weights would be lost they are kept in
            model_float32.safetensors, and a resume continues from them.
        push_to_hub: USER/NAME of a model repository to upload the result to (needs huggingface_hub).
    """
    folder = lerobot_ckpt.policy_dir(checkpoint_dir)
    target, shards = folder / WEIGHTS, folder / WEIGHT_SHARDS
    training = folder.parent / TRAINING  # absent in a download
    master = (training if training.is_dir() else folder) / MASTER_WEIGHTS
    source = folder / ADAPTER_CONFIG
    is_adapter = source.is_file()
    if not is_adapter:
        source = ckpt.weights_source(folder, adapter=False, resume=True)
    deletes = delete_dcp and shards.is_dir()
    if deletes and is_adapter and not (folder / ADAPTER).is_file():
        raise UserError(
            f"--delete-dcp would delete the only copy of the adapter, {shards}, and a resume with it; leave "
            "the flag out."
        )
    loses = source == target or (deletes and target.is_file() and "float32" in precision(target))
    keeps = dtype != "float32" and loses
    ckpt.verify(folder.parent, [source])
    weights = lerobot_ckpt.read_weights(source)
    for key in weights:  # one at a time: never two copies of the weights
        if weights[key].is_floating_point():
            weights[key] = weights[key].to(getattr(torch, dtype)).contiguous()
    size = sum(value.nbytes for value in weights.values())
    needed = size + (target.stat().st_size if keeps else 0)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise UserError(f"{target} needs {needed:,} bytes and the disk has {free:,} free; make room.")
    try:
        new = _write_and_compare(weights, target)
        _put_in_place(new, target, master if keeps else None, shards if deletes else None, is_adapter)
    except OSError as error:
        raise UserError(f"{target} was not written: {error}") from None
    # Printed when all is done: a reader that has gone (| head) cannot break it off halfway.
    print(f"{target}: {len(weights)} tensors, {size:,} bytes, {dtype}, verified")
    if keeps:
        print(f"{master} keeps the weights as they were, for --resume and another convert.")
    if is_adapter:
        print(f"The adapter stays beside it for --resume; everything else loads {WEIGHTS} from here on.")
    if deletes:
        print(f"{shards} deleted")
    elif shards.is_dir():
        print(f"{shards} is kept, and --resume continues from it; --delete-dcp deletes it.")
    if deletes and dtype != "float32" and not master.is_file():
        print(f"Only {dtype} weights remain: a resume would continue from rounded values.")
    if push_to_hub:
        hub.upload_policy(folder, push_to_hub)


def _write_and_compare(weights: dict[str, Tensor], target: Path) -> Path:
    """A file beside `target` that reads back as it was written."""
    new = target.with_name(f".{target.name}.new")
    try:
        ckpt.save_tensors(weights, new, {"format": "pt"})
        with ckpt.open_safetensors(new) as file:
            different = [key for key, value in weights.items() if not _is_same(file.get_tensor(key), value)]
    except (OSError, safetensors.SafetensorError) as error:
        new.unlink(missing_ok=True)
        raise UserError(f"{target} was not written: {error}") from None
    if different:
        new.unlink()
        raise UserError(f"{new} reads back differently from what was written ({different[0]}): a bad disk?")
    return new


def _put_in_place(
    new: Path, target: Path, master: Path | None, deleted_shards: Path | None, is_adapter: bool
) -> None:
    """Each step leaves weights that a resume can use; the record of the checkpoint's files comes last."""
    folder = target.parent
    if master is not None:
        shutil.copyfile(target, master.with_suffix(".new"))
        ckpt.flush(master.with_suffix(".new"))
        os.replace(master.with_suffix(".new"), master)  # what a resume continues from
    os.replace(new, target)
    ckpt.flush(folder)
    if is_adapter:
        _edit_json(folder / "config.json", "use_peft", False)
    if deleted_shards is not None:
        _edit_json(folder / "train_config.json", "checkpoint_format", "safetensors")
        os.rename(deleted_shards, folder / ".trash-0")
        shutil.rmtree(folder / ".trash-0")
    _record_changes(folder.parent)


def _record_changes(step_dir: Path) -> None:
    """Bring checksums.json up to date with the files that a conversion writes and deletes."""
    record = step_dir / TRAINING / CHECKSUMS
    if not record.is_file():
        return
    sums = {name: entry for name, entry in ckpt.read_sums(record).items() if (step_dir / name).is_file()}
    written = [f"{MODEL}/{name}" for name in (WEIGHTS, "config.json", "train_config.json")]
    for name in [*written, f"{TRAINING}/{MASTER_WEIGHTS}"]:
        if (path := step_dir / name).is_file():
            sums[name] = [path.stat().st_size, ckpt.crc32(path)]
    new = record.with_name(f".{CHECKSUMS}.new")
    ckpt.write_bytes(new, json.dumps(sums, indent=1).encode())
    os.replace(new, record)


def _is_same(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))


def _edit_json(path: Path, key: str, value: object) -> None:
    if path.is_file():
        content = ckpt.read_json(path)
        if isinstance(content, dict) and key in content and content[key] != value:
            new = path.with_name(f".{path.name}.new")
            ckpt.write_bytes(new, json.dumps({**content, key: value}, indent=4).encode())
            os.replace(new, path)


def show(checkpoint_dir: Path) -> None:
    """Print what a checkpoint holds: step, layout, weights, sizes, whole or torn (exit code 1).

    Args:
        checkpoint_dir: Step directory, `last`, run directory (its newest) or pretrained_model/.
    """
    path = Path(checkpoint_dir)
    if path.name == MODEL:
        path = path.parent
    if not (path / MODEL).is_dir() and not (path / TRAINING).is_dir():
        path = lerobot_ckpt.resolve_resume(path, None) or path
    problems = ckpt.checkpoint_problems(path, lerobot_ckpt.problems)
    folders = [folder for folder in (path / MODEL, path / TRAINING) if folder.is_dir()]
    if not problems:
        try:
            for folder in folders:
                ckpt.verify(path, [p for p in sorted(folder.iterdir()) if p.name != CHECKSUMS])
        except UserError as error:
            problems = [str(error)]
    print(f"{path}: {'torn' if problems else 'whole'}")
    for problem in problems:
        print(f"  wrong: {problem}")
    for line in _step_lines(path) + _weights_lines(path):
        print(f"  {line}")
    for folder in folders:
        for entry in sorted(folder.iterdir()):
            inside = [entry] if entry.is_file() else [p for p in entry.rglob("*") if p.is_file()]
            size = sum(p.stat().st_size for p in inside)
            shards = f" in {len(inside)} files" if entry.is_dir() else ""
            print(f"  {size:>14,} bytes  {folder.name}/{entry.name}{shards}")
    if problems:
        raise SystemExit(1)


def _step_lines(step_dir: Path) -> list[str]:
    try:
        state = ckpt.training_step(step_dir)
    except UserError:  # torn, which was printed already
        return []
    parallelism = state.get("parallelism") or {}
    return [
        f"step {state['step']}, samples seen {state.get('samples_seen', 'not recorded')}",
        f"written by {state.get('dp_world_size', '?')} ranks: "
        f"dp_replicate {parallelism.get('dp_replicate', '?')}, "
        f"dp_shard {parallelism.get('dp_shard', '?')}, batch {state.get('batch_size', '?')} per rank, "
        f"accumulation {state.get('grad_accum_steps', '?')}",
    ]


def _weights_lines(step_dir: Path) -> list[str]:
    """Format, precision and size of each copy of the weights that can be read; an adapter's base."""
    lines = []
    folder, names_file = step_dir / MODEL, step_dir / TRAINING / OPTIMIZER_NAMES
    has_adapter = (folder / ADAPTER_CONFIG).is_file()
    for source in (folder / name for name in (WEIGHTS, ADAPTER, WEIGHT_SHARDS)):
        if not source.exists():
            continue
        of_adapter = has_adapter and source.name != WEIGHTS
        try:
            shapes = ckpt.weight_shapes(source)
            what, names = "numbers, buffers included", set(shapes)
            if of_adapter:
                what = "parameters"
            elif names_file.is_file() and not has_adapter:
                saved = ckpt.read_json(names_file, "groups", "without_state")
                # Names alone, in checkpoints of an earlier version.
                groups = [group["params"] if isinstance(group, dict) else group for group in saved["groups"]]
                what, names = "parameters", {*saved["without_state"], *(n for g in groups for n in g)}
            total = sum(math.prod(shape) for key, shape in shapes.items() if key in names)
            form = "DCP shards" if source.is_dir() else "safetensors"
            line = f"{'adapter' if of_adapter else 'weights'}: {form}, {precision(source)}, {total:,} {what}"
            if of_adapter:
                config = ckpt.read_json(folder / ADAPTER_CONFIG, "peft_type")
                line += f", r {config.get('r')}, on the base {config.get('base_model_name_or_path')}"
            lines.append(line)
        except UserError:  # torn, which was printed already
            continue
    return lines


def precision(source: Path) -> str:
    """The floating-point types in a weights source: "float32", or "bfloat16, float32"."""
    dtypes = {dtype for _, dtype in ckpt.entries(source).values() if dtype.is_floating_point}
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def main(argv: list[str] | None = None) -> None:
    import tyro

    given = sys.argv[1:] if argv is None else argv
    # lerobot-convert-dcp's spelling
    switch = re.compile(r"^--delete[-_]dcp=(true|false)$", re.IGNORECASE)
    names = {"true": "--delete-dcp", "false": "--no-delete-dcp"}
    given = [names[match[1].lower()] if (match := switch.match(word)) else word for word in given]
    logging.basicConfig(format="%(message)s")
    try:
        try:
            tyro.extras.subcommand_cli_from_dict({"convert": convert, "show": show}, args=given)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has gone; without a new end Python would say so at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)  # what a shell reports of other commands
    except ValueError as error:
        if all(kind.__name__ != "UserError" for kind in type(error).__mro__):
            raise  # a bug keeps its traceback
        sys.exit(str(error))
