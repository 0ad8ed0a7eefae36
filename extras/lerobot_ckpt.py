"""LeRobot's side of a checkpoint: the files that it reads beside weights and optimizer, and reading its own.

    pretrained_model/   config.json  train_config.json  policy_preprocessor*  policy_postprocessor*
                        adapter_config.json, where adapters train
    training_state/     rng_state.safetensors  scheduler_state.json  and the keys of training_step.json

Saving: `files=checkpoint_files(...)` and `state=step_state(...)` of ckpt.CheckpointWriter.save.
Resuming, also from what LeRobot itself wrote:

    step_dir = resolve_resume("auto", output_dir)            # None: nothing to resume
    run_config = load_run_config(step_dir)
    config, stats = load_policy_files(step_dir)
    load_weights(step_dir, policy, resume=True)              # plain, compiled, DDP or FSDP2 / HSDP
    state = load_training_state(step_dir, policy, optimizer)
"""

import functools
import json
import logging
import os
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

import ckpt
import model_act
from ckpt import (
    ADAPTER,
    MODEL,
    OPTIMIZER,
    OPTIMIZER_GROUPS,
    OPTIMIZER_SHARDS,
    TRAINING,
    WEIGHT_SHARDS,
    WEIGHTS,
)
from extras import hub, lora
from extras.check_policy import check_config
from model_act import NORMALIZATION_STATS

UserError = ckpt.UserError
ADAPTER_CONFIG = "adapter_config.json"
NORMALIZER = "policy_preprocessor_step_3_normalizer_processor.safetensors"
UNNORMALIZER = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
# What LeRobot 0.1 to 0.3 kept in the weights: statistics, under names whose dots had become underscores.
LEGACY_BUFFER = re.compile(
    r"^(?:normalize_inputs|normalize_targets|unnormalize_outputs)\.buffer_(.+)\.(\w+)$"
)
# Fields of config.json that decide which tensors there are, and their shapes.
DIMENSIONS = (
    "chunk_size", "dim_model", "dim_feedforward", "feedforward_activation", "latent_dim", "use_vae",
    "pre_norm", "n_encoder_layers", "n_decoder_layers", "n_vae_encoder_layers", "vision_backbone",
)  # fmt: skip

# config.json's other keys, in LeRobot's order, with the values of a run that uses none of them.
LEROBOT_KEYS: dict[str, Any] = {
    **{"device": None, "use_amp": False, "use_peft": False, "push_to_hub": False, "repo_id": None},
    **dict.fromkeys(["private", "tags", "license", "pretrained_path", "pretrained_revision"]),
}

log = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------------------ config.json


def config_dict(policy: model_act.ACTPolicy, device: str) -> dict[str, Any]:
    """The content of config.json, keys in LeRobot's order."""
    config, inputs, outputs = policy.config, policy.input_features, policy.output_features
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    values["normalization_mapping"] = dict(config.normalization_mapping)
    head = {"type": "act", "n_obs_steps": values.pop("n_obs_steps")}
    features = {"input_features": inputs, "output_features": outputs}
    return head | features | LEROBOT_KEYS | {"device": device} | values


def policy_of(content: dict[str, Any], stats: model_act.Stats = None) -> model_act.ACTPolicy:
    """The policy that a config.json describes, its weights random; what the file lacks takes its default.

    Raises:
        UserError: another type of policy, no features, an unknown key, or a value of the wrong type.
    """
    kind, features = content.get("type", "act"), ("input_features", "output_features")
    _refuse_unless(kind == "act", f"config.json is of a policy of type {kind!r}; only 'act' can be loaded.")
    hints = get_type_hints(model_act.ACTConfig)
    names = ", ".join(sorted(set(content) - {"type", *features, *LEROBOT_KEYS, *hints}))
    _refuse_unless(not names, f"config.json has keys that ACT does not know, {names}; remove them.")
    for name in features:
        value = content.get(name)
        entries = list(value.values()) if isinstance(value, dict) else [None]
        fine = all(isinstance(entry, dict) and {"type", "shape"} <= set(entry) for entry in entries)
        _refuse_unless(fine, f"config.json's {name} must map each feature to its type and shape.")
    values = {name: _checked(name, content[name], hint) for name, hint in hints.items() if name in content}
    config = model_act.ACTConfig(**values)
    check_config(config)
    return model_act.ACTPolicy(config, content["input_features"], content["output_features"], stats)


def _checked(name: str, value: Any, hint: Any) -> Any:
    """A config.json value as its field's type; whole numbers pass as floats, 0 and 1 as bools."""
    if hint is bool and value in (0, 1):
        return bool(value)
    kinds = (dict,) if name == "normalization_mapping" else getattr(hint, "__args__", (hint,))
    kinds = (*kinds, int) if float in kinds else kinds
    fine, wanted = isinstance(value, kinds) and not isinstance(value, bool), getattr(hint, "__name__", hint)
    _refuse_unless(fine, f"config.json has {name}={value!r}; it must be {wanted}.")
    return value


def _refuse_unless(fine: bool, sentence: str) -> None:
    if not fine:
        raise UserError(sentence)


# ------------------------------------------------------------------------------------------------ save


def checkpoint_files(
    policy_config: dict[str, Any],
    run_config: dict[str, Any],
    parallelism: dict[str, int],
    *,
    stats: Mapping[str, Mapping[str, Any]] | None,
    step: int,
    base_lrs: list[float],
    lr_factor: float = 1.0,
    adapter_config: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """LeRobot's files beside weights and optimizer, for `files` of `ckpt.CheckpointWriter.save`.

    Args:
        policy_config: content of config.json.
        run_config: nested by the command line's names.
        parallelism: the resolved degrees dp_replicate and dp_shard.
        base_lrs: learning rate per parameter group, before the schedule.
        lr_factor: the schedule's share of them for the next step.
    """
    train_config = lerobot_train_config(run_config, policy_config, parallelism)
    files: dict[str, Any] = {**_processor_tensors(policy_config, stats)}
    # LeRobot indents its processors by 2, everything else by 4.
    for path, content in _processor_json(policy_config, bool(stats)).items():
        files[path] = json.dumps(content, indent=2).encode()
    files[f"{MODEL}/config.json"] = policy_config
    files[f"{MODEL}/train_config.json"] = train_config
    if adapter_config is not None:
        files[f"{MODEL}/{ADAPTER_CONFIG}"] = adapter_config
    # Its reader wants the file. A resume here restores none of it: no step draws from a global generator.
    files[f"{TRAINING}/rng_state.safetensors"] = _rng_state()
    if train_config["scheduler"] is not None:
        files[f"{TRAINING}/scheduler_state.json"] = {
            "base_lrs": list(base_lrs),
            "last_epoch": step,
            "_step_count": step + 1,
            "_is_initial": False,
            "_get_lr_called_within_step": False,
            "_last_lr": [lr * lr_factor for lr in base_lrs],
            "lr_lambdas": [None] * len(base_lrs),
        }
    return files


def step_state(run_config: dict[str, Any], world_size: int, parallelism: dict[str, int]) -> dict[str, Any]:
    """What LeRobot reads in training_step.json, for `state` of `ckpt.CheckpointWriter.save`."""
    degrees = {key: parallelism[key] for key in ("dp_replicate", "dp_shard")}
    return {
        "dp_world_size": world_size,
        "num_processes": world_size,  # LeRobot up to 0.6.1 reads this name
        "batch_size": run_config.get("batch_size"),
        "grad_accum_steps": run_config.get("gradient_accumulation_steps", 1),
        "parallelism": {**degrees, "ring_degree": 1, "ulysses_degree": 1},
    }


def _rng_state() -> dict[str, Tensor]:
    version, internal, _ = random.getstate()
    _, values, index, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "py_rng_version": torch.tensor([version]),
        "py_rng_state": torch.tensor(internal, dtype=torch.int64),
        "np_rng_state_values": torch.from_numpy(np.asarray(values).astype(np.int64)),
        "np_rng_state_index": torch.tensor([index]),
        "np_rng_has_gauss": torch.tensor([has_gauss]),
        "np_rng_cached_gaussian": torch.tensor([cached], dtype=torch.float32),
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


# ------------------------------------------------------------------------------------------------ load


def resolve_resume(path: str | os.PathLike, output_dir: str | os.PathLike | None) -> Path | None:
    """As `ckpt.resolve_resume`, for all forms in which a checkpoint can be named, and those of LeRobot.

    Args:
        path: run directory, checkpoints/, step directory, `last`, pretrained_model/ or train_config.json; or
            "auto".
    Raises:
        UserError: nothing to resume there, or what was named is not whole; lists the checkpoints there are.
    """
    if str(path) == "auto":
        return ckpt.resolve_resume(path, output_dir, problems)
    folder = Path(path)
    for name in ("train_config.json", MODEL):
        folder = folder.parent if folder.name == name and folder.exists() else folder
    ckpt.refuse_no_directory(folder if folder.name == "checkpoints" else folder / "checkpoints")
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    pointed = ckpt.read_pointer(folder)
    target = folder if pointed is None else folder.parent / pointed
    is_step = (target / MODEL).is_dir() or (target / TRAINING).is_dir()
    wrong = ckpt.checkpoint_problems(target, problems) if is_step else ["it does not exist"]
    if not wrong:
        return target
    is_last = folder.name == "last"
    if is_last and pointed is not None:
        ckpt.log.warning("%s leads to %s, which is not whole: %s.", folder, pointed, wrong[0])
    elif is_step:
        raise UserError(f"{target} is not a whole checkpoint: {wrong[0]}. {_whole_near(target)}")
    newest = ckpt.newest_checkpoint(folder.parent if is_last else folder, problems)
    if newest is None:
        raise UserError(
            f"{path} is no checkpoint; give a run directory, its checkpoints/, a step directory, `last`, "
            f"pretrained_model/ or train_config.json. {_whole_near(folder)}"
        )
    return newest


def _whole_near(path: Path) -> str:
    """A sentence with the whole checkpoints in or around a path."""
    for folder in (path, *list(path.parents)[:2], path.parent / "checkpoints"):
        whole = [p for p, wrong in ckpt.find_checkpoints(folder, problems) if not wrong]
        if whole:
            return f"Whole checkpoints in {folder}: {', '.join(p.name for p in whole)}."
    return "No whole checkpoint was found near it."


def policy_dir(path: str | os.PathLike) -> Path:
    """pretrained_model/ of the checkpoint, in whatever form it is named; USER/NAME is one of the hub."""
    try:
        path = Path(hub.policy_folder(path))
    except hub.UserError as error:
        raise UserError(f"{error} {_whole_near(Path(path))}") from None
    given = path.parent if path.name in ("train_config.json", "config.json") and path.is_file() else path
    if (given / MODEL).is_dir():
        return given / MODEL
    if (given / "config.json").is_file() or (given / ADAPTER_CONFIG).is_file():
        return given
    step_dir = resolve_resume(path, None)
    assert step_dir is not None  # only "auto" may find nothing
    return step_dir / MODEL


def load_policy_files(path: str | os.PathLike) -> tuple[dict, dict[str, dict[str, Tensor]]]:
    """(content of config.json, statistics) of a step directory, run directory, `last`, pretrained_model/ or
    USER/NAME of the hub.

    Raises:
        UserError: a file is missing or unreadable; a feature that is normalised has no statistics.
    """
    model_dir = policy_dir(path)
    config = ckpt.read_json(model_dir / "config.json")
    for key in ("input_features", "output_features"):
        if not isinstance(config, dict) or not isinstance(config.get(key), dict):
            raise UserError(f"{model_dir / 'config.json'} has no {key}; it is not a policy's configuration.")
    ckpt.verify(model_dir.parent, sorted(model_dir.glob("*.json")))
    stats = _load_stats(model_dir, config)
    ckpt.verify(model_dir.parent, sorted(model_dir.glob("*processor*.safetensors")))
    return config, stats


def load_weights(
    path: str | os.PathLike,
    policy: nn.Module,
    *,
    adapter: Mapping[str, Tensor] | None = None,
    resume: bool = False,
) -> None:
    """As `ckpt.load_weights`, also for USER/NAME of the hub and for LeRobot's older files.

    An adapter's checkpoint read without `adapter` gives base and adapter merged.
    """
    model_dir = policy_dir(path)
    targets = ckpt.state_dict(policy) if adapter is None else dict(adapter)
    merges = (
        adapter is None and (model_dir / ADAPTER_CONFIG).is_file() and not (model_dir / WEIGHTS).is_file()
    )
    if merges:
        source = model_dir / ADAPTER_CONFIG
        merged = read_weights(source)
        shapes = {key: tuple(value.shape) for key, value in merged.items()}
    else:
        # Beside an adapter, weights are what `convert` merged: a resume has its base from elsewhere.
        is_adapter = (model_dir / ADAPTER_CONFIG).is_file()
        source = ckpt.weights_source(model_dir, adapter is not None, resume and not is_adapter)
        shapes = {k: s for k, s in ckpt.weight_shapes(source).items() if not LEGACY_BUFFER.match(k)}
    wrong = ckpt.misfits(targets, shapes)
    if wrong and adapter is None and (flags := _other_dimensions(path, model_dir, ckpt.unwrap(policy))):
        raise UserError(f"{'; '.join(flags)}; leave {'the flag' if len(flags) == 1 else 'these flags'} out.")
    if not merges:
        ckpt.load_tensors(source, targets, shapes)
        return
    if wrong:
        raise UserError(f"{source} does not fit this policy: {ckpt.first_few(wrong)}.")
    with torch.no_grad():
        for key, target in targets.items():
            ckpt.copy_part(target, merged[key].__getitem__)


def load_training_state(
    path: str | os.PathLike, policy: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """As `ckpt.load_training_state`; `samples_seen` is worked out where LeRobot did not write it."""
    step_dir = policy_dir(path).parent
    record_of = functools.partial(_optimizer_record, ckpt.unwrap(policy))
    state = ckpt.load_training_state(step_dir, policy, optimizer, record_of)
    if not isinstance(state.get("samples_seen"), int):
        world_size = state.get("dp_world_size") or state.get("num_processes") or 1
        state["samples_seen"] = state["step"] * (state.get("batch_size") or 0) * world_size
    return state


def load_run_config(path: str | os.PathLike) -> dict[str, Any]:
    """The run's configuration, nested by the command line's names; LeRobot's own is translated.

    Raises:
        UserError: neither run_config.json nor train_config.json can be read.
    """
    model_dir = policy_dir(path)
    ours = model_dir.parent / TRAINING / "run_config.json"
    if ours.is_file():
        ckpt.verify(model_dir.parent, [ours])
        return ckpt.read_json(ours, "steps")
    config = ckpt.read_json(model_dir / "train_config.json")
    if not isinstance(config, dict):
        raise UserError(f"{model_dir / 'train_config.json'} is not a training configuration.")
    return run_config_from_lerobot(config)


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
    data, peft = ({**(run.get(part) or {})} for part in ("dataset", "peft"))
    root, steps = data.get("root"), int(run.get("steps", 100_000))
    eval_split = float(data.get("val_split") or 0)
    optimizer = _lerobot_optimizer(run.get("optimizer") or {}, policy_config)
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
        "optimizer": optimizer,
        "scheduler": _lerobot_scheduler(run.get("scheduler") or {}, steps, optimizer["lr"]),
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
    if accelerator := _lerobot_accelerator(run, parallelism["dp_replicate"], parallelism["dp_shard"]):
        config["accelerator"] = accelerator
    return config


def _lerobot_optimizer(optimizer: dict, policy_config: dict) -> dict[str, Any]:
    lr, decay = optimizer.get("lr"), optimizer.get("weight_decay")
    return {
        "type": "adamw",
        "lr": float(policy_config.get("optimizer_lr", 1e-5) if lr is None else lr),
        "weight_decay": float(policy_config.get("optimizer_weight_decay", 1e-4) if decay is None else decay),
        "grad_clip_norm": float(optimizer.get("grad_clip_norm", 10.0)),
        "betas": [float(beta) for beta in optimizer.get("betas", (0.9, 0.999))],
        "eps": float(optimizer.get("eps", 1e-8)),
    }


def _lerobot_accelerator(run: dict, replicate: int, shard: int) -> dict[str, Any]:
    """Precision, accumulation, compilation and the settings of the layout; {} for the defaults."""
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
    return accelerator


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
        section = config
        for name in path:
            section = section.get(name) or {}
        return section

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
    not_ours = ("type", "input_features", "output_features", *LEROBOT_KEYS)
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
            log.warning("LeRobot's schedule %s continues as %s.", kind, run["scheduler"])
    if part("peft"):
        run["peft"] = keep(part("peft"), "method_type", "r", "lora_alpha", "target_modules",
                           "full_training_modules")  # fmt: skip
    if part("wandb").get("enable"):
        run["tracker"] = "wandb"
    return run


# -- is a checkpoint of LeRobot's whole?


def problems(step_dir: Path) -> list[str]:
    """What keeps a step directory that has no checksums.json from being whole; [] if it is.

    As far as names, sizes and headers show: LeRobot writes in place, and a kill leaves any part of its files.
    """
    model_dir, training = step_dir / MODEL, step_dir / TRAINING
    wrong: list[str] = []

    def attempt(read: Callable[[Path], Any], path: Path) -> Any:
        try:
            return read(path)
        except UserError as error:
            wrong.append(str(error).rstrip("."))
            return None

    attempt(ckpt.training_step, step_dir)
    for name in ("config.json", "train_config.json"):
        attempt(ckpt.read_json, model_dir / name)
    legacy = (model_dir / WEIGHTS).is_file() and not (model_dir / "policy_preprocessor.json").exists()
    if legacy:  # LeRobot before 0.4
        legacy = any(map(LEGACY_BUFFER.match, attempt(ckpt.entries, model_dir / WEIGHTS) or ()))
    if not legacy:
        for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
            for file in attempt(_state_files, model_dir / name) or []:
                attempt(ckpt.entries, file)
    attempt(ckpt.entries, training / "rng_state.safetensors")
    sources = [model_dir / name for name in (WEIGHTS, ADAPTER, WEIGHT_SHARDS) if (model_dir / name).exists()]
    if not sources:
        wrong.append(f"{model_dir} has neither {WEIGHTS}, {ADAPTER} nor {WEIGHT_SHARDS}")
    if (model_dir / ADAPTER).exists() or (model_dir / ADAPTER_CONFIG).exists():
        attempt(ckpt.read_json, model_dir / ADAPTER_CONFIG)
    if (training / OPTIMIZER_SHARDS).is_dir():
        sources.append(training / OPTIMIZER_SHARDS)
    else:
        sources.append(training / OPTIMIZER)
        attempt(ckpt.read_json, training / OPTIMIZER_GROUPS)
    for source in sources:
        if source.is_dir():
            wrong += shard_problems(source)
        else:
            attempt(ckpt.entries, source)
    for name in ("run_config.json", "scheduler_state.json", "scaler_state.json", ckpt.OPTIMIZER_NAMES):
        if (training / name).exists():
            attempt(ckpt.read_json, training / name)
    return wrong


def shard_problems(directory: Path) -> list[str]:
    """What is wrong with a directory of DCP shards, as far as names and sizes show."""
    try:
        metadata = ckpt.read_shard_metadata(directory)
    except UserError as error:
        return [str(error).rstrip(".")]
    needed: dict[str, int] = {}
    for info in metadata.storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    wrong = []
    for name, size in sorted(needed.items()):
        path = directory / name
        if not path.is_file():
            wrong.append(f"{path} does not exist")
        elif path.stat().st_size < size:
            wrong.append(f"{path} is cut off: {path.stat().st_size} of {size} bytes")
    return wrong


def _processor_steps(processor: Path) -> list[dict]:
    steps = ckpt.read_json(processor, "steps")["steps"]
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise UserError(f"{processor} cannot be used: its steps are not a list of objects.")
    return steps


def _state_files(processor: Path) -> list[Path]:
    """The files of tensors that a processor's JSON names."""
    names = [step["state_file"] for step in _processor_steps(processor) if step.get("state_file")]
    for name in names:
        if Path(str(name)).name != name:
            raise UserError(f"{processor}: state_file {name!r} leaves the checkpoint.")
    return [processor.parent / name for name in names]


# -- statistics


def _load_stats(model_dir: Path, config: dict) -> dict[str, dict[str, Tensor]]:
    processor = model_dir / "policy_preprocessor.json"
    if processor.is_file():
        source, flat = processor, {}
        for step in _processor_steps(processor):
            if step.get("registry_name") == "normalizer_processor" and step.get("state_file"):
                source = next(f for f in _state_files(processor) if f.name == step["state_file"])
                flat = _all_tensors(source)
    else:
        source, flat = _legacy_stats(model_dir, config)
    stats: dict[str, dict[str, Tensor]] = {}
    for key, value in flat.items():
        feature, _, stat = key.rpartition(".")  # feature names have dots of their own
        stats.setdefault(feature, {})[stat] = value.float()
    for key, feature in {**config["input_features"], **config["output_features"]}.items():
        mode = (config.get("normalization_mapping") or {}).get(feature.get("type"), "IDENTITY")
        for stat in NORMALIZATION_STATS.get(mode, ()):
            if stat not in stats.get(key, {}):
                raise UserError(
                    f"{source} has no {key}.{stat}, and {key} is normalised by {mode}: acting on raw values "
                    "would fail without a word; restore the statistics."
                )
    return stats


def _legacy_stats(model_dir: Path, config: dict) -> tuple[Path, dict[str, Tensor]]:
    """Statistics that old LeRobot files keep in the weights, under the names of this policy's features."""
    source = model_dir / WEIGHTS
    if not source.is_file():
        raise UserError(f"{model_dir / 'policy_preprocessor.json'} does not exist: there are no statistics.")
    features: dict[str, list[str]] = {}
    for key in {**config["input_features"], **config["output_features"]}:
        features.setdefault(key.replace(".", "_"), []).append(key)
    flat: dict[str, Tensor] = {}
    for key, value in _all_tensors(source).items():
        if match := LEGACY_BUFFER.match(key):
            names = features.get(match[1], [])
            if len(names) != 1:
                raise UserError(
                    f"{source}: {key} belongs to {' or '.join(names) or 'no feature'} of config.json."
                )
            name = f"{names[0]}.{match[2]}"
            if not torch.equal(flat.setdefault(name, value), value):
                raise UserError(f"{source} holds two different statistics {name}.")
    return source, flat


# -- weights and adapters


def read_weights(source: Path) -> dict[str, Tensor]:
    """Every tensor of a weights source, whole, in host memory, without the statistics of old files.

    adapter_config.json as the source gives base and adapter merged.
    """
    if source.name == ADAPTER_CONFIG:
        return _merged(source)
    if source.is_dir():
        empty = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in ckpt.entries(source).items()}
        return {key.removeprefix("model."): v for key, v in ckpt.read_shards(source, empty).items()}
    return {key: value for key, value in _all_tensors(source).items() if not LEGACY_BUFFER.match(key)}


def _all_tensors(path: Path) -> dict[str, Tensor]:
    with ckpt.open_safetensors(path) as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


def _merged(adapter_config: Path) -> dict[str, Tensor]:
    """Base weights with a LoRA adapter of PEFT's format worked in."""
    scaling, base = lora.merge_settings(ckpt.read_json(adapter_config, "peft_type"), adapter_config)
    if not base or not Path(base := hub.policy_folder(base)).exists():
        raise UserError(
            f"{adapter_config} builds on {base}, which is not there; restore it or correct the path."
        )
    base_dir = policy_dir(base)
    weights = read_weights(ckpt.weights_source(base_dir, adapter=False, resume=True))
    file = ckpt.weights_source(adapter_config.parent, adapter=True, resume=False)
    try:
        return lora.merge_state_dict(weights, read_weights(file), scaling)
    except lora.UserError as error:
        raise UserError(f"{file} on the base {base_dir}: {error}") from None


def _other_dimensions(path: str | os.PathLike, model_dir: Path, policy: nn.Module) -> list[str]:
    """The flags, each with both values, in which a policy with a configuration differs from the saved one."""
    config = getattr(policy, "config", None)
    saved = ckpt.read_json(model_dir / "config.json") if (model_dir / "config.json").is_file() else {}
    names = [n for n in DIMENSIONS if isinstance(saved, dict) and n in saved and hasattr(config, n)]
    values = {n: (getattr(config, n), saved[n]) for n in names}
    return [
        f"--policy.{n.replace('_', '-')}={mine}, but the policy in {path} has {theirs}"
        for n, (mine, theirs) in values.items()
        if mine != theirs
    ]


def _optimizer_record(module: nn.Module, training: Path) -> dict[str, Any]:
    """What optimizer_names.json holds today: for LeRobot's files, and for ours from when AdamW had to do."""
    file, source = training / OPTIMIZER_GROUPS, training / OPTIMIZER_SHARDS
    ours = training / ckpt.OPTIMIZER_NAMES
    record = ckpt.read_json(ours, "groups", "without_state") if ours.is_file() else None
    if source.is_dir():
        groups = _shard_groups(source)
    else:
        source, groups = training / OPTIMIZER, ckpt.read_json(file)
        is_list = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
        if not is_list or not all("params" in group for group in groups):
            raise UserError(f"{file} cannot be used: it is not a list of parameter groups.")
        names = record["groups"] if record else _names_of(module, file, groups)
        groups = [{**group, "params": order} for group, order in zip(groups, names)]
    stored = ckpt.stored_state(source, groups)
    # Each parameter has the state that any other has.
    shapes = {kind: shape for state in stored.values() for kind, (_, shape, _) in state.items()}
    kinds = {kind: ckpt.AS_PARAMETER if shape else ckpt.WHOLE for kind, shape in shapes.items()}
    trained = [name for group in groups for name in group["params"]]
    expected = [n for n in trained if n not in record["without_state"]] if record else stored
    return {"optimizer": None, "groups": groups, "state": dict.fromkeys(expected, kinds)}


def _shard_groups(directory: Path) -> list[dict]:
    stored, prefix = ckpt.read_shard_metadata(directory).state_dict_metadata, "optimizer.param_groups."
    wanted = {key: None for key in stored if key.startswith(prefix)}
    groups: dict[int, dict] = {}
    for key, value in ckpt.read_shards(directory, wanted).items():
        index, _, setting = key.removeprefix(prefix).partition(".")
        groups.setdefault(int(index), {})[setting] = value
    return [groups[index] for index in sorted(groups)]


def _names_of(module: nn.Module, path: Path, groups: list[dict]) -> list[list[str]]:
    """The names of the parameters that LeRobot numbers, by group.

    It keeps the backbone last in a group of its own, or has all in one group; with or without the frozen.
    """
    numbers = [group["params"] for group in groups]
    if all(isinstance(number, str) for group in numbers for number in group):
        return numbers  # names themselves: LeRobot 0.6.1 under FSDP
    orders = []
    for trained_only in (False, True):
        named = module.named_parameters()
        names = [ckpt.clean_name(n) for n, p in named if p.requires_grad or not trained_only]
        backbone = [n for n in names if n.startswith("model.backbone")]
        split = [[n for n in names if n not in set(backbone)], backbone]
        orders.append(split if len(groups) == 2 else [names])
    for order in orders:
        if [len(names) for names in order] == [len(group) for group in numbers]:
            return order
    raise UserError(
        f"{path} has groups of {' + '.join(str(len(group)) for group in numbers)} parameters, this policy of "
        f"{' + '.join(str(len(names)) for names in orders[0])}; it is another policy's."
    )
