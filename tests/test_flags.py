"""Every flag of train.py is set, and what it promises to change is compared with a run that does not set it.

One row a flag; a flag without a row fails. Two steps of a tiny policy are trained for each, in this process; flags
of DDP and FSDP are set on two ranks.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import DATA
from ranks import run_ranks
from safetensors.torch import load_file
from test_train import SMALL, rows

import train
from extras import assembly, checks
from extras.flags import field_types

BASE = [
    *SMALL,
    "--batch-size",
    "2",
    "--steps",
    "2",
    "--log-freq",
    "1",
    "--optimizer.lr",
    "1e-3",
    "--device",
    "cpu",
]
ENV = ["--dataset.root", str(DATA / "env_state_v3")]
TINY_IMAGES = ["--dataset.image-size", "32", "48", "--dataset.cache", "off"]
TWO_CAM = ["--dataset.root", str(DATA / "two_cam_v3"), *TINY_IMAGES]
SIM = ["--sim.episodes", "2", *TINY_IMAGES, "--policy.n-encoder-layers", "1"]
VAL = ["--eval-freq", "1", "--dataset.val-episodes", "0"]
ROLL = [*SIM, "--eval-freq", "2", "--eval.env", "sim", "--eval.episodes", "2"]
LORA = ["--policy.path", "BASE_RUN", "--peft.method-type", "LORA"]


def observe(argv: list[str], run_dir: Path, capsys) -> SimpleNamespace:
    code = train.main([*BASE, "--output-dir", str(run_dir), *argv])
    said = capsys.readouterr()
    assert code == 0, said.err
    last = run_dir / "checkpoints/last"
    seen = SimpleNamespace(out=said.out, err=said.err, dir=run_dir, rows=rows(run_dir))
    seen.train = [row for row in seen.rows if "loss" in row]
    seen.files = sorted(str(p.relative_to(run_dir)) for p in run_dir.rglob("*"))
    seen.steps = sorted(p.name for p in (run_dir / "checkpoints").glob("[0-9]*"))
    if last.exists():
        seen.config = json.loads((last / "pretrained_model/config.json").read_text())
        seen.run_config = json.loads((last / "training_state/run_config.json").read_text())
        weights = last / "pretrained_model/model.safetensors"
        seen.weights = load_file(weights) if weights.exists() else {}
        seen.shapes = {key: tuple(value.shape) for key, value in seen.weights.items()}
        seen.stats = load_file(next((last / "pretrained_model").glob("policy_preprocessor_*.safetensors")))
        seen.adapter = last / "pretrained_model/adapter_config.json"
    return seen


def losses(seen):
    return [row["loss"] for row in seen.train]


def learned(seen):
    return {key: value.sum().item() for key, value in seen.weights.items()}


def shapes(seen):
    return seen.shapes


def lrs(seen):
    return [row["lr"] for row in seen.train]


def stats(seen):
    return {key: value.tolist() for key, value in seen.stats.items()}


def adapter(key):
    return lambda seen: json.loads(seen.adapter.read_text())[key]


# flag: (the run without it, what setting it adds, what must differ)
TABLE = {
    "preset": (ENV, ["--preset", "demo", "--save-freq", "1"], lambda s: s.run_config["policy"]["optimizer_lr"]),
    "job_name": (ENV, ["--job-name", "mine"], lambda s: s.run_config["job_name"]),
    "steps": (ENV, ["--steps", "3"], lambda s: len(s.train)),
    "batch_size": (ENV, ["--batch-size", "3"], lambda s: s.train[0]["samples"]),
    "seed": (ENV, ["--seed", "1"], losses),
    "log_freq": (ENV, ["--log-freq", "2"], lambda s: len(s.train)),
    "save_checkpoint": (ENV, ["--no-save-checkpoint"], lambda s: s.steps),
    "save_freq": (ENV, ["--save-freq", "1"], lambda s: s.steps),
    "keep_last": ([*ENV, "--save-freq", "1"], ["--keep-last", "1"], lambda s: s.steps),
    "eval_freq": ([*ENV, "--dataset.val-episodes", "0"], ["--eval-freq", "1"], lambda s: len(s.rows)),
    "mixed_precision": (ENV, ["--mixed-precision", "bf16"], losses),
    "gradient_accumulation_steps": (ENV, ["--gradient-accumulation-steps", "2"], lambda s: len(s.train)),
    "dataset.root": (SIM, ENV, shapes),
    "dataset.episodes": (ENV, ["--dataset.episodes", "1"], stats),
    "dataset.val_episodes": ([*ENV, "--eval-freq", "1"], ["--dataset.val-episodes", "0"], lambda s: len(s.rows)),
    "dataset.val_split": ([*ENV, "--eval-freq", "1"], ["--dataset.val-split", "0.4"], lambda s: len(s.rows)),
    "dataset.action_key": (TWO_CAM, ["--dataset.action-key", "observation.state"], losses),
    "dataset.state_key": (ENV, ["--dataset.state-key", "action"], losses),
    "dataset.image_keys": (TWO_CAM, ["--dataset.image-keys", "observation.images.top"], lambda s: s.config["input_features"]),
    "dataset.image_size": (TWO_CAM, ["--dataset.image-size", "64", "64"], lambda s: s.config["input_features"]),
    "dataset.use_imagenet_stats": (TWO_CAM, ["--dataset.no-use-imagenet-stats"], stats),
    "dataset.min_std": (ENV, ["--dataset.min-std", "10"], stats),
    "sim.episodes": (SIM, ["--sim.episodes", "3"], lambda s: s.train[-1]["epoch"]),
    "sim.seed": (SIM, ["--sim.seed", "5"], losses),
    "policy.chunk_size": (ENV, ["--policy.chunk-size", "22"], shapes),
    "policy.n_action_steps": (ENV, ["--policy.n-action-steps", "5"], lambda s: s.config["n_action_steps"]),
    "policy.normalization_mapping": (ENV, ["--policy.normalization-mapping", "STATE", "MIN_MAX", "ACTION", "MIN_MAX"], losses),
    "policy.vision_backbone": (TWO_CAM, ["--policy.vision-backbone", "resnet34"], shapes),
    "policy.replace_final_stride_with_dilation": (
        [*TWO_CAM, "--policy.vision-backbone", "resnet50"], ["--policy.replace-final-stride-with-dilation"], losses),
    "policy.pre_norm": (ENV, ["--policy.pre-norm"], shapes),
    "policy.dim_model": (ENV, ["--policy.dim-model", "16"], shapes),
    "policy.n_heads": (ENV, ["--policy.n-heads", "2"], losses),
    "policy.dim_feedforward": (ENV, ["--policy.dim-feedforward", "32"], shapes),
    "policy.feedforward_activation": (ENV, ["--policy.feedforward-activation", "gelu"], losses),
    "policy.n_encoder_layers": (ENV, ["--policy.n-encoder-layers", "2"], shapes),
    "policy.n_decoder_layers": (ENV, ["--policy.n-decoder-layers", "2"], shapes),
    "policy.use_vae": (ENV, ["--policy.no-use-vae"], shapes),
    "policy.latent_dim": (ENV, ["--policy.latent-dim", "8"], shapes),
    "policy.n_vae_encoder_layers": (ENV, ["--policy.n-vae-encoder-layers", "2"], shapes),
    "policy.temporal_ensemble_coeff": ([*ENV, "--policy.n-action-steps", "1"], ["--policy.temporal-ensemble-coeff", "0.01"],
                                       lambda s: s.config["temporal_ensemble_coeff"]),
    "policy.dropout": (ENV, ["--policy.dropout", "0.5"], losses),
    "policy.kl_weight": (ENV, ["--policy.kl-weight", "1"], losses),
    "policy.optimizer_lr": ([*ENV, "--optimizer.lr", "None"], ["--policy.optimizer-lr", "1e-2"], lrs),
    "policy.optimizer_weight_decay": (ENV, ["--policy.optimizer-weight-decay", "0.9"], learned),
    "policy.optimizer_lr_backbone": (TWO_CAM, ["--policy.optimizer-lr-backbone", "1e-2"], learned),
    "policy.path": (ENV, ["--policy.path", "BASE_RUN"], losses),
    "optimizer.lr": (ENV, ["--optimizer.lr", "1e-2"], lrs),
    "optimizer.lr_backbone": (TWO_CAM, ["--optimizer.lr-backbone", "1e-2"], learned),
    "optimizer.weight_decay": (ENV, ["--optimizer.weight-decay", "0.9"], learned),
    "optimizer.betas": (ENV, ["--optimizer.betas", "0.5", "0.5"], learned),
    "optimizer.eps": (ENV, ["--optimizer.eps", "1"], learned),
    "optimizer.grad_clip_norm": (ENV, ["--optimizer.grad-clip-norm", "1e-9"], learned),
    "scheduler.name": ([*ENV, "--scheduler.warmup-steps", "5"], ["--scheduler.name", "linear"], lrs),
    "scheduler.warmup_steps": ([*ENV, "--scheduler.name", "linear"], ["--scheduler.warmup-steps", "5"], lrs),
    "scheduler.decay_steps": ([*ENV, "--scheduler.name", "cosine"], ["--scheduler.decay-steps", "1"], lrs),
    "scheduler.final_lr_ratio": ([*ENV, "--scheduler.name", "cosine"], ["--scheduler.final-lr-ratio", "0.5"], lrs),
    "peft.method_type": ([*ENV, "--policy.path", "BASE_RUN"], ["--peft.method-type", "LORA"], lambda s: s.adapter.exists()),
    "peft.r": ([*ENV, *LORA], ["--peft.r", "2"], adapter("r")),
    "peft.lora_alpha": ([*ENV, *LORA], ["--peft.lora-alpha", "32"], losses),
    "peft.target_modules": ([*ENV, *LORA], ["--peft.target-modules", "linear1"], adapter("target_modules")),
    "peft.full_training_modules": ([*ENV, *LORA], ["--peft.full-training-modules", "action_head"], adapter("modules_to_save")),
    "eval.env": ([*SIM, "--eval-freq", "2"], ["--eval.env", "sim", "--eval.episodes", "1"],
                 lambda s: any("success_rate" in row for row in s.rows)),
    "eval.episodes": (ROLL, ["--eval.episodes", "1"], lambda s: results(s)["episodes"]),
    "eval.seed": (ROLL, ["--eval.seed", "7"], lambda s: [row["seed"] for row in results(s)["rows"]]),
    "eval.n_action_steps": (ROLL, ["--eval.n-action-steps", "10"], lambda s: results(s)["rows"][0]["asked"]),
    "eval.temporal_ensemble_coeff": ([*ROLL, "--eval.episodes", "1"], ["--eval.temporal-ensemble-coeff", "0.1"],
                                     lambda s: results(s)["rows"][0]["asked"]),
    "tracker": (ENV, ["--tracker", "tensorboard"], lambda s: any("events.out" in name for name in s.files)),
}  # fmt: skip
ELSEWHERE = {
    "output_dir": "every run of this file",
    "epochs": "test_pain: they become steps",
    "max_hours": "test_pain: they end a run with a checkpoint",
    "num_workers": "test_data: workers make the batches of one process",
    "device": "test_dist: refused where there is none",
    "checkpoint_format": "test_train and test_ckpt: shards are written and read",
    "async_save": "test_ckpt: the loop goes on while files are written",
    "resume": "test_train",
    "compile": "test_equality: one graph, equal losses",
    "compile_mode": "test_the_compile_mode_reaches_the_compiler",
    "tf32": "test_tf32_is_switched",
    "dataset.repo_id": "test_data: found in the local caches",
    "dataset.cache": "test_data: where frames come from",
    "dataset.cache_dir": "test_data",
    "dataset.tolerance_s": "test_data: a frame off its timestamp is refused",
    "policy.n_obs_steps": "test_train: only 1 is accepted",
    "policy.pretrained_backbone_weights": "test_model_act: loaded, or a sentence when offline",
    "eval.batch_size": "test_evaluate: results do not depend on it, calls do",
    "eval.patience": "test_patience_ends_a_run_that_no_longer_improves",
    "tracker_project": "test_track",
    "push_to_hub": "test_hub",
    "profile": "test_a_profile_is_written_for_steps_60_to_62",
}  # fmt: skip


def results(seen) -> dict:
    return json.loads(next(seen.dir.rglob("episodes.json")).read_text())


@pytest.fixture(scope="module")
def base_run(tmp_path_factory) -> str:
    at = tmp_path_factory.mktemp("base") / "run"
    assert train.main([*BASE, *ENV, "--output-dir", str(at)]) == 0
    return str(at)


def test_every_flag_has_a_row():
    ranks = {f"{group}.{name}" for group in ("ddp", "fsdp", "parallelism") for name in RANK_FLAGS[group]}
    assert set(TABLE) | set(ELSEWHERE) | ranks == set(field_types(train.Config))


@pytest.mark.parametrize("flag", TABLE)
def test_the_flag_changes_what_it_says(flag, base_run, tmp_path, capsys):
    without, added, probe = TABLE[flag]
    without, added = (
        [base_run if word == "BASE_RUN" else word for word in words] for words in (without, added)
    )
    before, after = tmp_path / "before", tmp_path / "after"
    if flag == "preset":
        # The preset's own size would take long; what it brings along is seen in what no flag here overrides.
        without, added = [*SIM, *without], [*SIM, *added, "--eval-freq", "0", "--scheduler.name", "none"]
    assert probe(observe(without, before, capsys)) != probe(observe([*without, *added], after, capsys))


def test_two_runs_with_the_same_flags_are_equal(tmp_path, capsys):
    """Without this, every row above could pass by chance."""
    one, two = (observe(ENV, tmp_path / name, capsys) for name in ("one", "two"))
    assert losses(one) == losses(two) and learned(one) == learned(two) and stats(one) == stats(two)


def test_the_compile_mode_reaches_the_compiler(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: seen.append(options["mode"]))
    for flags in ([], ["--compile-mode", "max-autotune-no-cudagraphs"]):
        assert (
            train.main([*BASE, *ENV, "--compile", *flags, "--output-dir", str(tmp_path / str(len(seen)))])
            == 0
        )
    assert seen == ["default", "max-autotune-no-cudagraphs"]


def test_tf32_is_switched(tmp_path):
    for flags, allowed in (([], True), (["--no-tf32"], False)):
        assert train.main([*BASE, *ENV, *flags, "--output-dir", str(tmp_path / str(allowed))]) == 0
        assert torch.backends.cudnn.allow_tf32 is allowed and torch.backends.cuda.matmul.allow_tf32 is allowed


def test_patience_ends_a_run_that_no_longer_improves(tmp_path, capsys):
    flags = [*ENV, *VAL, "--optimizer.lr", "0", "--steps", "10", "--eval.patience", "2"]
    seen = observe(flags, tmp_path / "run", capsys)
    assert seen.rows[-1]["step"] == 3 and seen.steps == ["000001", "000003"]
    assert (seen.dir / "checkpoints/best").resolve().name == "000001"


def test_a_profile_is_written_for_steps_60_to_62(tmp_path, capsys):
    seen = observe([*ENV, "--steps", "63", "--profile", "--log-freq", "63"], tmp_path / "run", capsys)
    trace = json.loads((seen.dir / "profile/rank0.json").read_text())
    steps = {e["name"] for e in trace["traceEvents"] if str(e.get("name", "")).startswith("ProfilerStep#")}
    assert len(steps) == 3
    assert "steps 60 to 62" in (seen.dir / "profile/rank0.txt").read_text()


RANK_FLAGS = {
    "parallelism": {
        "dp_shard": ["--parallelism.dp-shard", "2"],
        "dp_replicate": ["--parallelism.dp-replicate", "2"],
    },
    "ddp": {
        "bucket_cap_mb": ["--ddp.bucket-cap-mb", "1"],
        "broadcast_buffers": ["--ddp.broadcast-buffers=true"],
        "gradient_as_bucket_view": ["--ddp.no-gradient-as-bucket-view"],
        "static_graph": ["--ddp.static-graph"],
        "find_unused_parameters": ["--ddp.find-unused-parameters"],
    },
    "fsdp": {
        "wrap_modules": ["--fsdp.wrap-modules", "ACTEncoder"],
        "min_num_params": ["--fsdp.min-num-params", "1000"],
        "reshard_after_forward": ["--fsdp.no-reshard-after-forward"],
        "cpu_offload": ["--fsdp.cpu-offload"],
        "ignored_modules": ["--fsdp.ignored-modules", "model.action_head"],
        "param_dtype": ["--fsdp.param-dtype", "bfloat16"],
        "reduce_dtype": ["--fsdp.reduce-dtype", "bfloat16"],
        "output_dtype": ["--fsdp.output-dtype", "bfloat16"],
        "cast_forward_inputs": ["--fsdp.cast-forward-inputs=false"],
    },
}


def wrapping(rank: int, world_size: int, run_dir: str) -> dict[str, str]:
    """What torch's DDP and fully_shard were called with, for each flag, as text."""
    import contextlib
    import io

    import dist

    ddp, shard, seen = dist.DistributedDataParallel, dist.fully_shard, {}
    calls: list[str] = []

    class SpyDDP(ddp):
        def __init__(self, module, **options):
            calls.append(str(options))
            super().__init__(module, **options)

    def spy_shard(module, **options):
        ignored = len(options.pop("ignored_params", None) or ())
        calls.append(f"{type(module).__name__} {options} {ignored}")
        return shard(module, **options)

    dist.DistributedDataParallel, dist.fully_shard = SpyDDP, spy_shard
    sharded = ["--parallelism.dp-shard", "2"]
    cases = {"ddp": [], "fsdp": sharded}
    for group in RANK_FLAGS:
        cases |= {
            f"{group}.{n}": [*flags, *(sharded if group == "fsdp" else [])]
            for n, flags in RANK_FLAGS[group].items()
        }
    for name, given in cases.items():
        calls.clear()
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            cfg, _ = train.parse_command_line([*BASE, *ENV, *given])
            cluster = dist.start(cfg.device, cfg.parallelism)
            train_set, _, _ = assembly.open_data(cfg)
            train.prepare(cfg, cluster, train.build_policy(cfg, train_set, None))
            said.write(" ".join(checks.without_effect(cfg, cluster, False, train.PRESETS[cfg.preset])))
        seen[name] = f"{cluster.mode} {calls} {said.getvalue()}"
    return seen


def test_the_flags_of_the_layouts_reach_torch(tmp_path):
    seen = run_ranks(2, wrapping, str(tmp_path), init_group=False, deadline_s=120)[0]
    assert seen["ddp"].startswith("ddp") and seen["fsdp"].startswith("fsdp")
    for group in ("ddp", "fsdp"):
        for name in RANK_FLAGS[group]:
            assert seen[f"{group}.{name}"] != seen[group], name
    assert seen["parallelism.dp_shard"] == seen["fsdp"] and seen["parallelism.dp_replicate"] == seen["ddp"]
    assert "cpu-offload has no effect on a CPU" in seen["fsdp.cpu_offload"]
