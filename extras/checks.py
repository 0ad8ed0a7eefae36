"""Every refusal of a command line in one place: a table of ranges, combinations, and what has no effect.

    checks.check(cfg, cluster)                       # UserError: one sentence, before any file is read
    for sentence in checks.without_effect(...): ...  # flags that were set and do nothing in this mode
    checks.check_rollouts(cfg)                       # evaluate.py's own flags

A flag that cannot work is told with its name, its value, the rule and the way out, on all ranks alike. What
concerns one file only is checked there (`ckpt.check_flags`, `lora.check`, ...), since a research fork may
have copied it without this one; it is called from here.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ckpt
import data
import dist
from extras import datasets, lerobot_ckpt, lora
from extras.check_policy import check_config
from extras.flags import UserError, flatten, to_dict

AT_LEAST_1 = (1, math.inf, "it must be at least 1")
NOT_NEGATIVE = (0, math.inf, "it must be 0 or more")
POSITIVE = (math.nextafter(0, 1), math.inf, "it must be a positive number")
FINITE = (0, math.inf, "it must be a finite number of at least 0")

RANGES: dict[str, tuple[float, float, str]] = {
    "steps": AT_LEAST_1,
    "batch_size": AT_LEAST_1,
    "log_freq": AT_LEAST_1,
    "gradient_accumulation_steps": AT_LEAST_1,
    "num_workers": NOT_NEGATIVE,
    "save_freq": NOT_NEGATIVE,
    "eval_freq": NOT_NEGATIVE,
    "keep_last": (1, math.inf, "it would delete every checkpoint; use 1 or more"),
    "seed": (0, 2**63 - 1, "it must be 0 or more, and below 2^63"),
    "epochs": POSITIVE,
    "max_hours": POSITIVE,
    "sim.episodes": (1, math.inf, "the built-in task needs a demonstration"),
    "optimizer.lr": FINITE,
    "optimizer.lr_backbone": FINITE,
    "optimizer.weight_decay": FINITE,
    "optimizer.grad_clip_norm": FINITE,
    "optimizer.betas": (0, math.nextafter(1, 0), "each must be at least 0 and below 1"),
    "optimizer.eps": (math.nextafter(0, 1), math.inf, "it must be positive"),
    "scheduler.warmup_steps": NOT_NEGATIVE,
    "scheduler.decay_steps": (1, math.inf, "use 1 or more"),
    "scheduler.final_lr_ratio": (0, 1, "it is a share, from 0 to 1"),
    "eval.episodes": AT_LEAST_1,
    "eval.batch_size": AT_LEAST_1,
    "eval.n_action_steps": AT_LEAST_1,
    "eval.patience": AT_LEAST_1,
    "eval.seed": (0, math.inf, "seeds of episodes are 0 or more"),
}
"""Flag -> (lowest, highest, rule). None, where a flag takes it, is always in range; inf and NaN never are."""


def check(cfg: Any, cluster: dist.Cluster) -> None:
    """Refuse what cannot work, before any file is read or written.

    Args:
        cfg: train.Config.
    Raises:
        UserError: one sentence that names the flag, the rule and the way out.
    """
    refuse_accelerate_settings(cluster.device.type)
    check_ranges(flatten(to_dict(cfg)))
    check_config(cfg.policy)
    datasets.check_dataset_config(cfg.dataset, cfg.policy.chunk_size)
    lora.check(cfg.peft)
    check_rollouts(cfg.eval, prefix="eval.")
    ckpt.check_flags(cfg.checkpoint_format, cluster.sharded, cfg.keep_last)
    check_precision(cluster, cfg.mixed_precision, cfg.fsdp)
    check_combinations(cfg, cluster)


def check_ranges(values: dict[str, Any]) -> None:
    for flag, (low, high, rule) in RANGES.items():
        value = values.get(flag)
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if number is not None and not (low <= number <= high and math.isfinite(number)):
                raise UserError(f"--{flag.replace('_', '-')}={value} cannot work: {rule}.")


def check_combinations(cfg: Any, cluster: dist.Cluster) -> None:
    schedule = cfg.scheduler
    last = schedule.decay_steps or cfg.steps
    if schedule.name == "cosine" and schedule.warmup_steps >= last:
        raise UserError(
            f"--scheduler.warmup-steps={schedule.warmup_steps} leaves no step for the cosine, which ends at "
            f"{last}; lower it, or raise --scheduler.decay-steps."
        )
    if cfg.compile_mode in ("reduce-overhead", "max-autotune") and cluster.sharded:
        raise UserError(
            f"--compile-mode={cfg.compile_mode} records CUDA graphs, which cannot hold FSDP's gathers; "
            "use --compile-mode default or max-autotune-no-cudagraphs, or train with DDP."
        )
    if cfg.peft.enabled and cfg.policy.path is None:
        raise UserError("--peft.method-type adapts a trained policy: say which with --policy.path.")
    if cfg.push_to_hub is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", cfg.push_to_hub):
        raise UserError(f"--push-to-hub={cfg.push_to_hub} is not a repository on the hub; give USER/NAME.")
    if cfg.push_to_hub is not None and not cfg.save_checkpoint:
        raise UserError(
            "--push-to-hub uploads the last checkpoint, and --no-save-checkpoint writes none; drop one."
        )


def check_precision(
    cluster: dist.Cluster, mixed_precision: dist.MixedPrecision, fsdp: dist.FSDPConfig
) -> None:
    """UserError for precisions that cannot work together in this mode. Call before any work."""
    if not cluster.sharded:
        return
    half, gathered = dist.HALF.get(mixed_precision), dist.DTYPES[fsdp.param_dtype]
    if gathered == torch.float16 and half != torch.float16:
        raise UserError("--fsdp.param-dtype=float16 needs the loss scale; add --mixed-precision fp16.")
    if half and gathered not in (None, torch.float32, half):
        raise UserError(
            f"--mixed-precision={mixed_precision} and --fsdp.param-dtype={fsdp.param_dtype} name two dtypes "
            "to compute in; drop one of them."
        )
    offloads = fsdp.cpu_offload and cluster.device.type == "cuda"
    if offloads and (mixed_precision == "fp16" or fsdp.ignored_modules is not None):
        raise UserError(
            "--fsdp.cpu-offload has its gradients on the CPU, but fp16's loss scale and "
            "--fsdp.ignored-modules are on the GPU; use --mixed-precision bf16 or no, and ignore no module."
        )


def check_rollouts(cfg: Any, prefix: str = "") -> None:
    """The flags of rollouts. `prefix` comes before their names in messages: "eval." or nothing.

    Args:
        cfg: evaluate.EvalConfig, or evaluate.py's own command.
    """
    for flag in ("episodes", "batch_size", "n_action_steps", "seed"):
        low, _, rule = RANGES[f"eval.{flag}"]
        value = getattr(cfg, flag)
        if value is not None and value < low:
            raise UserError(f"--{prefix}{flag.replace('_', '-')}={value} cannot work: {rule}.")
    if cfg.temporal_ensemble_coeff is not None and (cfg.n_action_steps or 1) != 1:
        raise UserError(
            f"--{prefix}temporal-ensemble-coeff={cfg.temporal_ensemble_coeff} asks the policy at every step; "
            f"drop --{prefix}n-action-steps={cfg.n_action_steps}."
        )


def without_effect(cfg: Any, cluster: dist.Cluster, has_validation: bool, preset: Any) -> Iterator[str]:
    """A sentence for each group of flags that was set and does nothing in this mode.

    Args:
        cfg: train.Config, and `preset` the one whose defaults it started from.
    """

    def changed(group: Any) -> bool:
        return group != type(group)()

    on_cpu = cluster.device.type == "cpu"
    rows = [
        (changed(cfg.ddp) and cluster.mode != "ddp", f"--ddp.* has no effect in mode {cluster.mode}"),
        (changed(cfg.fsdp) and not cluster.sharded, f"--fsdp.* has no effect in mode {cluster.mode}"),
        (
            cluster.sharded and cfg.fsdp.cpu_offload and on_cpu,
            "--fsdp.cpu-offload has no effect on a CPU",
        ),
        (
            cfg.compile_mode is not None and not cfg.compile,
            "--compile-mode has no effect without --compile",
        ),
        (
            changed(cfg.scheduler) and cfg.scheduler.name == "none",
            "--scheduler.* has no effect without --scheduler.name linear or cosine",
        ),
        (
            cfg.eval_freq > 0 and not has_validation and cfg.eval.env is None,
            "--eval-freq has no effect without --dataset.val-split, --dataset.val-episodes or --eval.env",
        ),
        (has_validation and not cfg.eval_freq, "held-out episodes have no effect without --eval-freq"),
        (
            cfg.eval.env is not None and not cfg.eval_freq,
            "--eval.env has no effect without --eval-freq",
        ),
        (
            cfg.eval.env == "sim" and cfg.eval_freq > 0 and not cfg.uses_sim,
            "--eval.env sim rolls out in the built-in task, which this dataset need not show",
        ),
        (
            cluster.world_size == 1 and {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= set(os.environ),
            "--num_processes of accelerate launch has no effect beside --cpu or on one GPU, where it starts "
            "one process; use torchrun --nproc-per-node, or accelerate's --multi_gpu, which runs on CPUs",
        ),
        (
            cfg.sim != preset.sim and not cfg.uses_sim,
            "--sim.* has no effect with --dataset.root or --dataset.repo-id",
        ),
        (
            changed(cfg.peft) and not cfg.peft.enabled,
            "--peft.* has no effect without --peft.method-type LORA",
        ),
        (cfg.profile and cfg.steps < 62, "--profile has no effect: it traces steps 60 to 62"),
        (
            not cfg.save_checkpoint and cfg.keep_last is not None,
            "--keep-last has no effect without checkpoints",
        ),
        (on_cpu and not cfg.tf32, "--no-tf32 has no effect on a CPU"),
    ]
    return (sentence for holds, sentence in rows if holds)


def refuse_other_features(saved: dict, inputs: dict, outputs: dict, where: Any) -> None:
    """Raise a sentence that lists every feature in which a checkpoint and the dataset differ."""
    wanted, given = saved["input_features"] | saved["output_features"], inputs | outputs
    differ = []
    for key in dict.fromkeys([*wanted, *given]):
        one, other = (list(side.get(key, {}).get("shape", [])) for side in (wanted, given))
        # A camera of another size works, since ACT is convolutional there: see `other_sizes`.
        same_shape = one == other or wanted.get(key, {}).get("type") == "VISUAL"
        if (key in wanted) != (key in given) or not same_shape:
            shapes = [side[key]["shape"] if key in side else "absent" for side in (wanted, given)]
            differ.append(f"{key} ({shapes[0]} there, {shapes[1]} here)")
    if differ:
        raise UserError(
            f"The policy in {where} was made for other features than this dataset has: {'; '.join(differ)}; "
            "choose them with --dataset.state-key, --dataset.action-key and --dataset.image-keys."
        )


def other_sizes(saved: dict, inputs: dict, where: Any) -> list[data.Note]:
    """Warnings of cameras that have another size now than what the saved policy was trained on."""
    notes = []
    for key, feature in inputs.items():
        was, now = saved["input_features"].get(key, {}).get("shape"), feature["shape"]
        if feature["type"] == "VISUAL" and was and list(was[-2:]) != list(now[-2:]):
            text = (
                f"the policy in {where} saw {key} at {was[-2]}x{was[-1]}, here it is "
                f"{now[-2]}x{now[-1]}; --dataset.image-size {was[-2]} {was[-1]} makes it the same."
            )
            notes.append(data.Note("warning", text))
    return notes


def notes_on_weights(cfg: Any, train_set: data.EpisodeDataset, source: Path | None) -> list[data.Note]:
    """Where the statistics come from, and what --policy.path was trained on, if that was something else."""
    if source is not None:
        return [data.Note("info", f"statistics: those of {source}")]
    if cfg.policy.path is None:
        return []
    saved, _ = lerobot_ckpt.load_policy_files(cfg.policy.path)
    return other_sizes(saved, train_set.features[0], cfg.policy.path)


def notes_on_batch(cfg: Any, cluster: dist.Cluster, state: dict[str, Any]) -> list[data.Note]:
    """A warning if the resumed run had another effective batch."""
    batch = cfg.batch_size * cluster.world_size * cfg.gradient_accumulation_steps
    was = state.get("effective_batch_size", batch)
    if was == batch:
        return []
    micro_batches = batch // cfg.batch_size
    way = f" --batch-size {was // micro_batches} keeps it." if was % micro_batches == 0 else ""
    text = (
        f"the effective batch is {batch} samples now and was {was}; the order of the samples continues, the "
        f"curve is another one.{way}"
    )
    return [data.Note("warning", text)]


def with_steps(cfg: Any, cluster: dist.Cluster, num_frames: int) -> Any:
    """`cfg` with the --steps that --epochs come to, rounded up to whole accumulation windows, and checked."""
    if cfg.epochs is None:
        return cfg
    window = cfg.gradient_accumulation_steps
    steps = math.ceil(cfg.epochs * num_frames / (cfg.batch_size * cluster.world_size * window)) * window
    cfg = replace(cfg, steps=steps)
    check(cfg, cluster)
    return cfg


def refuse_fewer_steps(cfg: Any, step: int) -> None:
    if step > cfg.steps:
        raise UserError(f"--steps={cfg.steps} is behind the checkpoint's step {step}; give a larger --steps.")


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
        harmless = ["", "0", "no", "none", "false"]
        if name.endswith("ACCUMULATION_STEPS"):
            harmless.append("1")
        if value.strip().lower() not in harmless:
            raise UserError(
                f"{name}={value} asks Accelerate to configure the run, which it does not do here; "
                f"launch without it and use {flag}."
            )
