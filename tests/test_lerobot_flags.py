"""lerobot-train's command line: each of its flags means the same in every spelling, alone and among all others,
and all of them together train."""

import json
from pathlib import Path

import pytest
from conftest import DATA
from ranks import run_ranks
from test_train import rows

import train
from extras import lerobot_flags
from extras.flags import field_types, flatten, to_dict

LEROBOT = {
    "policy.type": "act",
    "policy.device": "cpu",
    "policy.repo_id": "user/name",
    "policy.push_to_hub": "false",
    "dataset.repo_id": "user/name",
    "accelerator.mixed_precision": "bf16",
    "accelerator.gradient_accumulation.steps": "2",
    "accelerator.compile.enabled": "true",
    "accelerator.compile.mode": "default",
    "accelerator.ddp.bucket_cap_mb": "25",
    "accelerator.ddp.broadcast_buffers": "false",
    "accelerator.ddp.gradient_as_bucket_view": "true",
    "accelerator.ddp.static_graph": "true",
    "accelerator.ddp.find_unused_parameters": "false",
    "accelerator.fsdp.wrap_modules": '["ACTEncoderLayer"]',
    "accelerator.fsdp.min_num_params": "1000",
    "accelerator.fsdp.reshard_after_forward": "false",
    "accelerator.fsdp.cpu_offload": "false",
    "accelerator.fsdp.ignored_modules": "model.action_head",
    "accelerator.fsdp.mixed_precision_policy.param_dtype": "bfloat16",
    "accelerator.fsdp.mixed_precision_policy.reduce_dtype": "float32",
    "accelerator.fsdp.mixed_precision_policy.output_dtype": "null",
    "accelerator.fsdp.mixed_precision_policy.cast_forward_inputs": "true",
    "wandb.enable": "false",
    "trackio.enable": "true",
    "save_checkpoint": "false",
    "eval_steps": "3",
    "env_eval_freq": "3",
    "optimizer.type": "adamw",
    "optimizer.lr": "1e-4",
    "optimizer.weight_decay": "0",
    "optimizer.betas": "[0.9, 0.99]",
    "optimizer.eps": "1e-7",
    "optimizer.grad_clip_norm": "1",
    "scheduler.type": "cosine_decay_with_warmup",
    "scheduler.num_warmup_steps": "2",
    "scheduler.num_decay_steps": "4",
    "scheduler.peak_lr": "1e-4",
    "scheduler.decay_lr": "1e-5",
    "peft.method_type": "LORA",
    "peft.r": "4",
    "peft.target_modules": '["linear1", "linear2"]',
    "parallelism.dp_replicate": "1",
    "parallelism.dp_shard": "1",
    "checkpoint_format": "safetensors",
    "log_freq": "7",
    "save_freq": "8",
    "seed": "9",
    "steps": "10",
    "batch_size": "11",
    "num_workers": "0",
    "job_name": "mine",
    "output_dir": "here",
}
"""The flags that the field's multi-GPU guide and command lines in use consist of, each with a value."""

OURS = {
    "device": "cpu", "push_to_hub": None, "dataset.repo_id": "user/name", "mixed_precision": "bf16",
    "gradient_accumulation_steps": 2, "compile": True, "compile_mode": "default", "ddp.bucket_cap_mb": 25,
    "ddp.broadcast_buffers": False, "ddp.gradient_as_bucket_view": True, "ddp.static_graph": True,
    "ddp.find_unused_parameters": False, "fsdp.wrap_modules": ["ACTEncoderLayer"], "fsdp.min_num_params": 1000,
    "fsdp.reshard_after_forward": False, "fsdp.cpu_offload": False, "fsdp.ignored_modules": "model.action_head",
    "fsdp.param_dtype": "bfloat16", "fsdp.reduce_dtype": "float32", "fsdp.output_dtype": None,
    "fsdp.cast_forward_inputs": True, "tracker": "trackio", "save_checkpoint": False, "eval_freq": 3,
    "optimizer.lr": 1e-4, "optimizer.weight_decay": 0.0, "optimizer.betas": [0.9, 0.99], "optimizer.eps": 1e-7,
    "optimizer.grad_clip_norm": 1.0, "scheduler.name": "cosine", "scheduler.warmup_steps": 2,
    "scheduler.decay_steps": 4, "scheduler.final_lr_ratio": 0.1, "peft.method_type": "LORA", "peft.r": 4,
    "peft.target_modules": ["linear1", "linear2"], "parallelism.dp_replicate": 1, "parallelism.dp_shard": 1,
    "checkpoint_format": "safetensors", "log_freq": 7, "save_freq": 8, "seed": 9, "steps": 10, "batch_size": 11,
    "num_workers": 0, "job_name": "mine", "output_dir": "here",
}  # fmt: skip
"""All of them in our words."""


def in_our_words(flags: list[str]) -> dict[str, list[str]]:
    return lerobot_flags.translate(lerobot_flags.split_flags(flags), field_types(train.Config))


def test_a_flag_of_lerobot_train_means_the_same_in_every_spelling_alone_and_among_others():
    together = in_our_words([f"--{name}={value}" for name, value in LEROBOT.items()])
    pair = ["--scheduler.peak_lr=1e-4", "--scheduler.decay_lr=1e-5"]  # refused one without the other
    assert in_our_words(pair).items() <= together.items()
    for name, value in LEROBOT.items():
        if name in ("scheduler.peak_lr", "scheduler.decay_lr"):
            continue
        dashes = name.replace("_", "-")
        spellings = [
            [f"--{name}={value}"],
            [f"--{name}", value],
            [f"--{dashes}={value}"],
            [f"--{dashes}", value],
        ]
        if value == "true":
            spellings += [[f"--{name}=True"], [f"--{name}"]]
        alone = [in_our_words(flags) for flags in spellings]
        alone = [{key: words or ["true"] for key, words in flags.items() if key} for flags in alone]
        assert alone == [alone[0]] * len(alone), name
        assert alone[0].items() <= together.items(), name
    config = train.parse_command_line([f"--{name}={value}" for name, value in LEROBOT.items()])[0]
    found = flatten(to_dict(config))
    assert {key: found[key] for key in OURS} == OURS


def refusal(*flags: str) -> str:
    with pytest.raises(ValueError) as error:
        in_our_words(list(flags))
    return str(error.value)


@pytest.mark.parametrize(
    "flags, want",
    [
        (["--env_eval_freq=0", "--eval_steps=2"], ["2"]),
        (["--eval_steps=2", "--env_eval_freq=0"], ["2"]),
        (["--eval_steps=0", "--env_eval_freq=2"], ["2"]),
        (["--eval-freq=2", "--env_eval_freq", "2"], ["2"]),
        (["--eval_steps=0", "--env_eval_freq=0"], ["0"]),
    ],
)
def test_an_interval_of_0_only_switches_its_own_kind_off(flags, want):
    assert in_our_words(flags)["eval_freq"] == want


def test_two_different_intervals_are_refused_and_both_named():
    for flags in (["--env_eval_freq=4", "--eval_steps=2"], ["--eval_steps=2", "--env_eval_freq=4"]):
        assert refusal(*flags).startswith("--eval_steps=2 and --env_eval_freq=4 contradict each other: here")


def test_an_environment_that_is_never_run_is_not_set():
    env = ["--env.type=aloha", "--env.task=AlohaTransferCube-v0"]
    assert in_our_words(env)["eval.env"] == ["aloha-transfer-cube"]
    assert "eval.env" not in in_our_words([*env, "--env_eval_freq=0", "--eval_steps=2"])


@pytest.mark.parametrize(
    "typo, meant",
    [("dataset.rot", "--dataset.root"), ("eval.episode", "--eval.episodes"), ("ddp.static_grap", "--ddp.static-graph"),
     ("accelerator.fsdp.cpu_ofload", "--fsdp.cpu-offload"), ("policy.dim_modle", "--policy.dim-model")],
)  # fmt: skip
def test_a_mistyped_flag_is_tyros_to_refuse_with_its_suggestion(typo, meant, capsys):
    with pytest.raises(SystemExit) as ended:
        train.parse_command_line([f"--{typo}=x"])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert typo.removeprefix("accelerator.").replace("_", "-") in said.err and meant in said.err


def test_a_mistyped_flag_of_lerobot_train_is_told_the_nearest():
    said = refusal("--accelerator.mixed_precison=bf16")
    assert said == (
        "--accelerator.mixed_precison is unknown; the nearest flag of lerobot-train is --accelerator.mixed_precision."
    )


REAL_BUT_NOT_HERE = """
dataset.image_transforms.max_num_transforms dataset.exclude_episodes dataset.exclude_features dataset.revision
dataset.depth_output_unit eval.use_async_envs env.fps env.episode_length ema.decay job.timeout
wandb.entity wandb.notes wandb.run_id wandb.mode wandb.add_tags trackio.space_id peft.init_type
accelerator.compile.dynamic accelerator.compile.fullgraph accelerator.gradient_accumulation.sync_each_batch
accelerator.activation_checkpointing.layers accelerator.fsdp.state_dict_type accelerator.fsdp.activation_checkpointing
accelerator.ddp.comm_hook accelerator.rng_types policy.pretrained_path prefetch_factor rename_map
sample_weighting.type reward_model.type
""".split()


@pytest.mark.parametrize("name", REAL_BUT_NOT_HERE)
def test_a_real_flag_of_lerobot_train_is_not_taken_for_a_mistyped_one(name):
    assert refusal(f"--{name}=x").startswith(
        f"--{name} is a flag of lerobot-train that has no meaning here: "
    )


@pytest.mark.parametrize(
    "flag, way_out",
    [
        ("--policy.use_amp=true", "--policy.use_amp=true: use --mixed-precision bf16."),
        ("--policy.type=diffusion", "--policy.type=diffusion: this trains ACT only."),
        ("--dataset.exclude_features=[a]", "name the cameras to read with --dataset.image-keys."),
    ],
)
def test_a_refused_flag_is_told_what_does_it_here(flag, way_out):
    said = refusal(flag)
    assert said.endswith(way_out) and "leave the flag out" not in said


def test_accelerates_own_names_are_understood():
    got = in_our_words(
        ["--accelerator.gradient_accumulation_steps=2", "--accelerator.parallelism.dp-shard", "4"]
    )
    assert got == {"": [], "gradient_accumulation_steps": ["2"], "parallelism.dp_shard": ["4"]}
    assert "ring_degree=2: there is no" in refusal("--accelerator.parallelism.context_parallel.ring_degree=2")


def test_all_refused_flags_of_a_command_line_are_said_at_once():
    flags = [
        "--policy.type=vqbet",
        "--rename_map={}",
        "--scheduler.peak_lr=1",
        "--eval_steps=1",
        "--eval_freq=2",
    ]
    flags += ["--env.type=pusht", "--env.task=x", "--steps=3"]
    parts = [refusal(*flags[i:j]) for i, j in ((0, 1), (1, 2), (2, 3), (5, 7), (3, 5))]
    assert refusal(*flags) == " ".join(parts)


def test_tyro_gets_the_names_with_dashes_and_takes_them_as_before():
    flags = [
        "--dataset.use_imagenet_stats=false",
        "--compile_mode=default",
        "--ddp.static_graph",
        "--policy.pre_norm",
    ]
    flags += ["--policy.no_use_vae", "--dataset.image_keys", "a_b", "c_d"]
    argv = lerobot_flags.join_flags(in_our_words(flags), field_types(train.Config))
    assert argv == [
        "--dataset.no-use-imagenet-stats", "--compile-mode", "default", "--ddp.static-graph", "--policy.pre-norm",
        "--policy.no-use-vae", "--dataset.image-keys", "a_b", "c_d",
    ]  # fmt: skip
    config = train.parse_command_line(flags)[0]
    assert (
        not config.dataset.use_imagenet_stats and config.compile_mode == "default" and config.ddp.static_graph
    )
    assert (
        config.policy.pre_norm and not config.policy.use_vae and config.dataset.image_keys == ("a_b", "c_d")
    )


def lerobot_job(run_dir: Path, equals: bool) -> list[str]:
    flags = LEROBOT | {
        "dataset.root": str(DATA / "env_state_v3"), "policy.chunk_size": "20", "policy.n_action_steps": "20",
        "policy.dim_model": "32", "policy.n_heads": "4", "policy.dim_feedforward": "64", "steps": "4",
        "batch_size": "2", "log_freq": "2", "trackio.enable": "false", "peft.method_type": "null",
        "accelerator.compile.enabled": "false", "output_dir": str(run_dir), "save_checkpoint": "true",
        "dataset.eval_split": "0.4",
    }  # fmt: skip
    if equals:
        return [f"--{name}={value}" for name, value in flags.items()]
    return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]


def train_rank(rank: int, world_size: int, argv: list[str]) -> int:
    return train.main(argv)


def test_all_flags_of_lerobot_train_together_train_on_two_ranks_in_either_spelling(tmp_path):
    jobs = [lerobot_job(tmp_path / name, name == "equals") for name in ("equals", "blank")]
    jobs.append(["--resume=true", f"--config_path={tmp_path / 'blank/checkpoints/last'}", "--steps=6"])
    for job in jobs:
        assert run_ranks(2, train_rank, job, init_group=False, deadline_s=240) == [0, 0], job
    one, other = rows(tmp_path / "equals"), rows(tmp_path / "blank")
    assert other[: len(one)] == one and [row["step"] for row in one] == [0, 2, 4, 4]
    saved = json.loads((tmp_path / "equals/checkpoints/last/training_state/run_config.json").read_text())
    assert saved["mixed_precision"] == "bf16" and saved["gradient_accumulation_steps"] == 2
    assert other[-1]["step"] == 6
