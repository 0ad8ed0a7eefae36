"""lerobot-train's command line to our flag names, so that an old command runs as it is. No dependencies.

    flags = split_flags(["--policy.type=act", "--accelerator.mixed_precision=bf16", "--resume=true", ...])
    flags = translate(flags, kinds)     # {"mixed_precision": ["bf16"], ...}; kinds: our flags, their types
    argv = join_flags(flags, kinds)     # ["--mixed_precision", "bf16", ...], for tyro

Names that are ours already pass through, and so does what says only what is always so here (ACCEPTED); a flag
of lerobot-train that has no meaning here is refused with the reason (REFUSED), never ignored. A name that is
nearly one of ours passes as well: tyro refuses it, and says which was meant.
"""

import difflib
import json
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """The user's to mend, in one sentence. Any other error is a bug and keeps its traceback."""


RENAMED = {
    "policy.device": "device",
    "config_path": "resume",
    "tolerance_s": "dataset.tolerance_s",
    "dataset.eval_split": "dataset.val_split",
    "eval_steps": "eval_freq",
    "env_eval_freq": "eval_freq",
    "eval.n_episodes": "eval.episodes",
    "peft.method": "peft.method_type",
    "scheduler.num_warmup_steps": "scheduler.warmup_steps",
    "scheduler.num_decay_steps": "scheduler.decay_steps",
    "wandb.project": "tracker_project",
    "trackio.project": "tracker_project",
    "accelerator.mixed_precision": "mixed_precision",
    "accelerator.gradient_accumulation.steps": "gradient_accumulation_steps",
    "accelerator.gradient_accumulation_steps": "gradient_accumulation_steps",
    "accelerator.compile.enabled": "compile",
    "accelerator.compile.mode": "compile_mode",
}
"""lerobot-train's name -> ours. Also every --accelerator.X.Y of the groups in OUR_GROUPS (see `rename`)."""

OUR_GROUPS = ("accelerator.ddp.", "accelerator.fsdp.", "accelerator.parallelism.")
INTERVALS = ("eval_steps", "env_eval_freq", "eval_freq")

ACCEPTED = {
    "policy.type": ("act",),
    "optimizer.type": ("adamw",),
    "policy.n_obs_steps": ("1",),
    "policy.use_amp": ("false",),
    "policy.use_peft": ("false",),
    "use_policy_training_preset": ("true", "false"),
    "persistent_workers": ("true",),
    "dataset.video_backend": ("pyav", "torchcodec"),
    "dataset.image_transforms.enable": ("false",),
    "dataset.streaming": ("false",),
    "dataset.return_uint8": ("true", "false"),
    "dataset.repo_type": ("dataset",),
    "max_eval_samples": ("0",),
    "cudnn_deterministic": ("false",),
    "ema.enable": ("false",),
    "accelerator.compile.backend": ("inductor",),
    "accelerator.activation_checkpointing.mode": ("none",),
    "wandb.disable_artifact": ("true",),
    "parallelism.context_parallel.ring_degree": ("1",),
    "parallelism.context_parallel.ulysses_degree": ("1",),
    "parallelism.cfg_parallel": ("1",),
    "save_checkpoint_to_hub": ("false",),
    "job.target": ("local",),
}
"""lerobot-train flags that say what is always so here: these values pass, others are refused."""

OTHER_VALUES = {
    "policy.type": "this trains ACT only",
    "policy.use_amp": "use --mixed-precision bf16",
}
"""Why, or what instead, where there is a better way out of a value than to leave its flag out."""

REFUSED = {
    "env.": "rollouts are chosen with --eval.env {sim,aloha-transfer-cube,aloha-insertion}",
    "eval.": "rollouts are set with --eval.env, --eval.episodes and --eval.seed",
    "ema.": "there is no weight averaging here",
    "job.": "jobs are not submitted to the hub from here; start train.py on the machine that trains",
    "reward_model.": "only the ACT policy is trained here",
    "sample_weighting": "every frame has the same weight here",
    "rename_map": "use --dataset.action-key, --dataset.state-key and --dataset.image-keys",
    "dataset.image_transforms.": "there is no image augmentation here",
    "dataset.exclude_features": "name the cameras to read with --dataset.image-keys",
    "dataset.exclude_episodes": "list the episodes to train on with --dataset.episodes",
    "dataset.revision": "give the folder of that revision with --dataset.root",
    "dataset.depth_output_unit": "depth cameras are not read here",
    "dataset.": "data sets are read from disk with the --dataset.* flags of --help",
    "prefetch_factor": "two batches a worker are fetched ahead; raise --num-workers instead",
    "dataloader_multiprocessing_context": "workers come from a clean server process, safe with decoders",
    "policy.private": "set the visibility of the repository on the hub",
    "policy.tags": "edit the model card on the hub",
    "policy.license": "edit the model card on the hub",
    "policy.pretrained_path": "give --policy.path",
    "policy.pretrained_revision": "give the folder of that revision with --policy.path",
    "wandb.": "set wandb's own environment variables (WANDB_ENTITY, WANDB_MODE, WANDB_RUN_ID)",
    "trackio.": "set trackio's own environment variables",
    "peft.init_type": "adapters start as PEFT's default does: A uniform, B zero",
    "accelerator.compile.": "the layout chooses the regions: the whole network, or each wrap unit under FSDP",
    "accelerator.activation_checkpointing.": "ACT's activations are small next to its images",
    "accelerator.": "there is no Accelerate here; see the groups ddp, fsdp and parallelism in --help",
    "parallelism.context_parallel.": "ACT's sequences are short; only data parallelism is offered",
    "scheduler.name": "--scheduler.name takes none, linear or cosine",
}  # fmt: skip
"""lerobot-train flags without a meaning here, longest prefix first: the reason ends the sentence."""

SCHEDULER_TYPES = {"cosine_decay_with_warmup": "cosine", "constant_with_warmup": "linear"}
ENVIRONMENTS = {"AlohaTransferCube-v0": "aloha-transfer-cube", "AlohaInsertion-v0": "aloha-insertion"}


def split_flags(argv: list[str]) -> dict[str, list[str]]:
    """["--a.b=1", "--c", "2", "3"] -> {"a.b": ["1"], "c": ["2", "3"]}; the last one wins."""
    flags: dict[str, list[str]] = {}
    values: list[str] = flags.setdefault("", [])
    for token in argv:
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            values = flags[name.replace("-", "_")] = [value] if equals else []
        else:
            values.append(token)
    return flags


def translate(flags: dict[str, list[str]], kinds: dict[str, Any]) -> dict[str, list[str]]:
    """lerobot-train's flags in our names; ours stay as they are.

    Raises:
        UserError: flags of lerobot-train that have no meaning here, all of them, a sentence each.
    """
    out: dict[str, list[str]] = {}
    refused: list[str] = []
    taken = {name: " ".join(values).lower() or "true" for name, values in flags.items()}
    for name, values in flags.items():
        try:
            out |= translate_one(name, values, flags, taken, kinds)
        except UserError as error:
            refused.append(str(error))
    try:
        out |= interval(flags)
    except UserError as error:
        refused.append(str(error))
    if refused:
        raise UserError(" ".join(dict.fromkeys(refused)))  # of a pair of flags both say the same
    return out


def translate_one(
    name: str, values: list[str], flags: dict[str, list[str]], taken: dict[str, str], kinds: dict[str, Any]
) -> dict[str, list[str]]:
    """What one flag says in our words; {} for what is always so here, or belongs to another flag.

    Args:
        taken: each flag's value, in small letters.
    """
    value, new = taken[name], rename(name)
    if positive(new) in kinds or name in ("", "help", "resume") or new == "resume":
        if name == "resume" and ("config_path" in flags or value == "false"):
            return {}
        if name == "resume" and value == "true":
            values = ["auto"]
        return {new: as_tyro(values, kinds.get(new))}
    if (several := translate_group(name, values, flags, taken)) is not None:
        return several
    always = new if new in ACCEPTED else name
    if always in ACCEPTED:
        if value not in ACCEPTED[always]:
            reason = OTHER_VALUES.get(
                always,
                f"there is no counterpart here, where it is always {' or '.join(ACCEPTED[always])}; "
                "leave the flag out",
            )
            raise UserError(f"--{name}={value}: {reason}.")
        return {}
    reasons = [why for prefix, why in REFUSED.items() if name.startswith(prefix) or new.startswith(prefix)]
    if reasons and (name in REFUSED or not nearest(new, kinds)):
        if name not in REFUSED and (known := nearest(name, [*RENAMED, *ACCEPTED])):
            # tyro does not know these names, so it could not suggest one
            raise UserError(f"--{name} is unknown; the nearest flag of lerobot-train is --{known}.")
        raise UserError(f"--{name} is a flag of lerobot-train that has no meaning here: {reasons[0]}.")
    return {new: values}


def translate_group(
    name: str, values: list[str], flags: dict[str, list[str]], taken: dict[str, str]
) -> dict[str, list[str]] | None:
    """A flag whose meaning depends on others of its group (hub, trackers, schedule, environment), or None."""
    value = taken[name]
    if name in ("policy.push_to_hub", "policy.repo_id"):
        if taken.get("policy.push_to_hub") == "true" and "policy.repo_id" not in flags:
            raise UserError(
                "--policy.push_to_hub=true needs --policy.repo_id=USER/NAME; or give --push-to-hub."
            )
        pushes = name == "policy.repo_id" and taken.get("policy.push_to_hub", "false") == "true"
        return {"push_to_hub": values} if pushes else {}
    if name in ("wandb.enable", "trackio.enable"):
        return {"tracker": [name.split(".")[0]]} if value == "true" else {}
    if name == "scheduler.type":
        if value not in SCHEDULER_TYPES:
            raise UserError(
                f"--scheduler.type={value} is not offered; use one of {', '.join(SCHEDULER_TYPES)}."
            )
        return {"scheduler.name": [SCHEDULER_TYPES[value]]}
    if name in ("scheduler.peak_lr", "scheduler.decay_lr"):
        if not {"scheduler.peak_lr", "scheduler.decay_lr"} <= set(flags):
            raise UserError("--scheduler.peak_lr and --scheduler.decay_lr go together; give both or neither.")
        peak, decay = taken["scheduler.peak_lr"], taken["scheduler.decay_lr"]
        try:
            return {"scheduler.final_lr_ratio": [repr(float(decay) / float(peak))]}
        except (ValueError, ZeroDivisionError):
            raise UserError(
                f"--scheduler.peak_lr={peak} with --scheduler.decay_lr={decay} cannot work: they are "
                "learning rates, the first of them positive."
            ) from None
    if name in ("env.type", "env.task"):
        task = flags.get("env.task", ["AlohaInsertion-v0"])[-1]
        if taken.get("env.type") != "aloha" or task not in ENVIRONMENTS:
            given = " ".join(f"--{n}={flags[n][-1]}" for n in ("env.type", "env.task") if flags.get(n))
            raise UserError(
                f"{given}: rollouts run in gym-aloha's {' and '.join(ENVIRONMENTS)} only "
                "(--env.type=aloha), or choose with --eval.env."
            )
        return {} if taken.get("env_eval_freq") == "0" else {"eval.env": [ENVIRONMENTS[task]]}
    return None


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The name in the same group that `name` mistypes, if there is one.

    Without the group: a long one makes any two of its names alike.
    """
    group, _, leaf = name.rpartition(".")
    leaves = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == group}
    found = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)
    return leaves[found[0]] if found else None


def interval(flags: dict[str, list[str]]) -> dict[str, list[str]]:
    """--eval-freq, one interval for both, of lerobot-train's two; a 0 only switches its own kind off.

    Raises:
        UserError: two different intervals.
    """
    given = {name: flags[name][-1] for name in INTERVALS if flags.get(name)}
    on = {name: value for name, value in given.items() if value != "0"}
    if len(set(on.values())) > 1:
        both = " and ".join(f"--{name}={value}" for name, value in on.items())
        raise UserError(
            f"{both} contradict each other: here --eval-freq is one interval for validation loss and "
            "rollouts; give one value."
        )
    found = [*on.values(), *given.values()]
    return {"eval_freq": found[:1]} if found else {}


def rename(name: str) -> str:
    """Our name of a flag of lerobot-train; any other name comes back as it is."""
    if name in RENAMED:
        return RENAMED[name]
    name = name.removeprefix("accelerator.") if name.startswith(OUR_GROUPS) else name
    return name.replace("fsdp.mixed_precision_policy.", "fsdp.")


def positive(name: str) -> str:
    """The switch that --no-switch or --group.no-switch turns off; any other name comes back as it is."""
    group, dot, leaf = name.rpartition(".")
    return group + dot + leaf.removeprefix("no_")


def as_tyro(values: list[str], kind: Any) -> list[str]:
    """What draccus takes (`true`, `null`, `[1,2]`, `{"A": "B"}`) in the words that tyro takes."""
    values = ["None" if v == "null" else v for v in values]
    if not values and kind == bool | None:
        return ["True"]
    if len(values) == 1 and values[0].lower() in ("true", "false"):
        return [values[0].lower() if kind is bool else values[0].capitalize()]
    if len(values) == 1 and values[0][:1] in "[{" and values[0][:1]:
        try:
            value = json.loads(values[0].replace("'", '"'))
        except json.JSONDecodeError:
            return [v.strip() for v in values[0].strip("[]").split(",") if v.strip()]
        if isinstance(value, dict):
            return [str(part) for pair in value.items() for part in pair]
        return [str(part) for part in value]
    return values


def join_flags(flags: dict[str, list[str]], kinds: dict[str, Any]) -> list[str]:
    """The inverse of `split_flags`, as tyro has it: --compile and --no-compile, and dashes in names."""
    argv = list(flags.get("", []))
    for name, values in flags.items():
        if not name or (name == "resume"):
            continue
        group, dot, leaf = name.replace("_", "-").rpartition(".")
        if kinds.get(name) is bool and values in (["true"], ["false"], []):
            argv.append(f"--{group}{dot}{'no-' if values == ['false'] else ''}{leaf}")
        else:
            argv += [f"--{group}{dot}{leaf}", *values]
    return argv
