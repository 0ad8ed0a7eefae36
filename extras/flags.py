"""From argv to a configuration: lerobot-train's spelling, presets, saved configurations, differences.

    cfg, source = parse_command_line(Config, PRESETS, argv, description)

Defaults come, from weak to strong, from the preset, from the config.json under --policy.path, and from the
configuration saved in the resumed checkpoint; flags override them all. `Config` is any dataclass of
dataclasses with train.Config's fields.
"""

import dataclasses
import json
import os
import re
import sys
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

import ckpt
import dist
import model_act
from extras import lerobot_ckpt, lerobot_flags


class UserError(ValueError):
    """The user's to mend, in one sentence: flag or file, rule, way out. Any other error is a bug."""


def is_user_error(error: BaseException) -> bool:
    """Whether an error is told in one sentence. Known by name: each leaf has a class of its own."""
    return any(base.__name__ == "UserError" for base in type(error).__mro__)


def parse_command_line(
    config_class: type, presets: dict[str, Any], argv: list[str], description: str
) -> tuple[Any, Path | None]:
    """The configuration of a command line, and the checkpoint to resume from (None: a fresh start).

    Raises:
        UserError: one sentence. Flags that nobody knows end in tyro's own message, exit code 2.
    """
    types = field_types(config_class)
    given = lerobot_flags.split_flags(argv)
    flags = lerobot_flags.translate(given, types)
    preset = presets.get(last_value(flags, "preset") or "", config_class())
    default = fitted_preset(preset, flags)
    path = last_value(flags, "policy.path")
    if path not in (None, "None"):
        assert path is not None
        saved_policy, _ = lerobot_ckpt.load_policy_files(path)
        default = replace(default, policy=with_saved_policy(default.policy, saved_policy, path))
    if {"steps", "epochs"} <= set(flags):
        raise UserError("--steps and --epochs are mutually exclusive; give one of them.")
    source, saved = None, None
    if "resume" in flags:
        output_dir, resume = last_value(flags, "output_dir"), last_value(flags, "resume") or "auto"
        source = resolve_source(resume, output_dir)
        if source is not None:
            saved, default = resumed_config(config_class, presets, source, output_dir, flags)
        default = replace(default, resume=resume)
        if (last_value(given, f"{default.tracker}.enable") or "").lower() == "false":
            flags.setdefault("tracker", ["none"])  # --wandb.enable=false, and the saved run had it on
    if "policy.normalization_mapping" in flags:
        # tyro would take single keys only: --policy.normalization-mapping.STATE
        words = flags.pop("policy.normalization_mapping")
        mapping = dict(zip(words[::2], words[1::2]))
        default = replace(default, policy=replace(default.policy, normalization_mapping=mapping))
    if "steps" in flags:
        default = replace(default, epochs=None)
    args = lerobot_flags.join_flags(flags, types)
    config = tyro.cli(config_class, args=args, default=default, description=description)
    if saved is not None:
        print_changes(saved, config)
    return config, source


def resolve_source(resume: str, output_dir: str | None) -> Path | None:
    """The checkpoint that --resume names; None, and a line, where `auto` finds none."""
    if resume == "auto" and output_dir is None:
        raise UserError("--resume auto looks under --output-dir: name the run directory with it.")
    source = lerobot_ckpt.resolve_resume(resume, output_dir)
    if source is None and is_rank_0():
        print(f"resume auto: no checkpoint under {output_dir}; a fresh start")
    return source


def is_rank_0() -> bool:
    """Before the process group exists, by the launcher's variable."""
    return int(os.environ.get("RANK", 0)) == 0


# ----------------------------------------------------------------------------------------- presets, policies


def fitted_preset(preset: Any, flags: dict[str, list[str]]) -> Any:
    """The preset without what other flags make senseless: its warm-up is a share of --steps, and it has
    rollouts in the built-in task for the built-in task's data only."""
    steps, scheduler = last_value(flags, "steps") or "", preset.scheduler
    if steps.isdecimal() and scheduler.warmup_steps:
        warmup = min(scheduler.warmup_steps, scheduler.warmup_steps * int(steps) // preset.steps)
        preset = replace(preset, scheduler=replace(scheduler, warmup_steps=warmup))
    if {"dataset.root", "dataset.repo_id"} & set(flags):
        preset = replace(preset, eval=replace(preset.eval, env=None))
    return preset


def preset_flags(cfg: Any, preset: Any) -> str:
    """The flags that a preset other than the first decided, with their values."""
    plain, decided, now = (flatten(to_dict(config)) for config in (type(cfg)(), preset, cfg))
    names = [n for n in now if n != "preset" and n in decided and decided[n] == now[n] != plain.get(n)]
    return " ".join(f"--{name.replace('_', '-')} {now[name]}" for name in names)


def last_value(flags: dict[str, list[str]], name: str) -> str | None:
    values = flags.get(name)
    return values[-1] if values else None


def act_config(policy_flags: model_act.ACTConfig) -> model_act.ACTConfig:
    """The policy's own configuration, without the flags that only a command line has."""
    names = [field.name for field in dataclasses.fields(model_act.ACTConfig)]
    return model_act.ACTConfig(**{name: getattr(policy_flags, name) for name in names})


def with_saved_policy(default: Any, saved: dict[str, Any], path: str) -> Any:
    """The policy of a config.json, as defaults for the flags."""
    names = {field.name for field in dataclasses.fields(model_act.ACTConfig)}
    return replace(default, path=path, **{key: value for key, value in saved.items() if key in names})


# ---------------------------------------------------------------------------------------- resumed and changed


def resumed_config(
    config_class: type,
    presets: dict[str, Any],
    source: Path,
    output_dir: str | None,
    flags: dict[str, list[str]],
) -> tuple[Any, Any]:
    """The configuration saved in a checkpoint: as it is, and as defaults for the flags.

    The layout is not part of what a run is: saved degrees that do not fit today's processes and flags give
    way to DDP (or one process), and a format of shards, which that cannot write, to safetensors.
    """
    values = lerobot_ckpt.load_run_config(source)
    preset = presets.get(values.get("preset", ""), config_class())
    saved = config = from_dict(config_class, values, preset)
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    given = {name: last_value(flags, f"parallelism.{name}") for name in ("dp_replicate", "dp_shard")}
    sharded = True  # where nothing fits, dist.start says so with all numbers
    for degrees in (config.parallelism, dist.ParallelismConfig()):
        config = replace(config, parallelism=degrees)
        try:
            asked = replace(degrees, **{name: int(value) for name, value in given.items() if value})
            sharded = dist.resolve_degrees(asked, world_size)[1] > 1
            break
        except ValueError:
            continue
    if not sharded and "checkpoint_format" not in flags:
        config = replace(config, checkpoint_format="safetensors")
    return saved, replace(config, output_dir=output_dir or str(ckpt.run_dir_of(source)))


def print_changes(saved: Any, now: Any) -> None:
    """Each flag that differs from the resumed run's, on rank 0."""
    before, after = flatten(to_dict(saved)), flatten(to_dict(now))
    differ = [name for name in after if before.get(name) != after[name] and name != "resume"]
    if not is_rank_0():
        return

    def spelled(names: list[str]) -> str:
        return f"--{', --'.join(names).replace('_', '-')}"

    for name in differ:
        print(f"resume: {spelled([name])} {before.get(name)} -> {after[name]}")
    kept = [name for name in differ if name in ("dataset.use_imagenet_stats", "dataset.min_std")]
    if kept:
        print(
            f"warning: {spelled(kept)} has no effect on a resumed run, which keeps its statistics.",
            file=sys.stderr,
        )
    decides_samples = re.compile(r"seed$|sim\.|dataset\.(?!cache|tolerance)")
    other = [name for name in differ if name not in kept and decides_samples.match(name)]
    if other:
        copy = " (unless it is a copy of the same dataset)" if other == ["dataset.root"] else ""
        print(
            f"warning: with another {spelled(other)} other samples follow than the run would have had{copy}; "
            "to begin a new run with its weights use --policy.path.",
            file=sys.stderr,
        )


# ------------------------------------------------------------------------------------ configurations as JSON


def field_types(config: Any, prefix: str = "") -> dict[str, Any]:
    """{"steps": int, "dataset.root": str | None, ...}: every flag and its type."""
    types: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(config).items():
        if dataclasses.is_dataclass(kind):
            types |= field_types(kind, f"{prefix}{name}.")
        else:
            types[prefix + name] = kind
    return types


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as JSON has it: nested dicts, lists for tuples."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(kind: type, values: dict[str, Any], default: Any) -> Any:
    """The inverse of `to_dict`; what is absent is `default`'s.

    Raises:
        UserError: a key that this version does not know.
    """
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(values) - set(hints)):
        raise UserError(
            f"The saved configuration has keys that this version does not know: {', '.join(unknown)}; "
            "remove them from training_state/run_config.json."
        )
    changes = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            assert isinstance(hints[name], type)
            value = from_dict(hints[name], value, getattr(default, name))
        changes[name] = tuple(value) if isinstance(value, list) else value
    return replace(default, **changes)


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"dataset": {"root": None}} -> {"dataset.root": None}"""
    values: dict[str, Any] = {}
    for name, value in nested.items():
        values |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return values
