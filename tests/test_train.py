"""Command lines of train.py compared with what they promise: resumed with uninterrupted runs, lerobot-train's
spelling with ours, any layout with one process, and bad input with one sentence."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import DATA, ROOT
from ranks import free_port, run_ranks
from safetensors.torch import load_file

import train
from extras import assembly

SMALL = [
    "--policy.dim-model", "32", "--policy.n-heads", "4", "--policy.dim-feedforward", "64", "--policy.chunk-size", "20",
    "--policy.n-action-steps", "20", "--policy.latent-dim", "4", "--policy.n-encoder-layers", "1",
    "--policy.n-vae-encoder-layers", "1", "--policy.pretrained-backbone-weights", "None", "--num-workers", "0",
]  # fmt: skip
ENV = [
    "--dataset.root",
    str(DATA / "env_state_v3"),
    *SMALL,
    "--batch-size",
    "4",
    "--log-freq",
    "1",
    "--optimizer.lr",
    "1e-3",
]


def run(output_dir: Path, *flags: str) -> int:
    return train.main([*ENV, "--output-dir", str(output_dir), *flags])


def rows(run_dir: Path, times: bool = False) -> list[dict]:
    """The metrics file; without what a clock decides, two equal runs have equal rows."""
    clock = () if times else ("step_s", "data_s", "samples_per_s")
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    at = run_dir / f"checkpoints/{step:06d}"
    optimizer = load_file(at / "training_state/optimizer_state.safetensors")
    return load_file(at / "pretrained_model/model.safetensors") | optimizer


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert torch.equal(a[key], b[key]), key


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """12 steps without a stop: dropout, VAE noise and a schedule on, a log line every 3 steps."""
    run_dir = tmp_path_factory.mktemp("whole")
    assert run(run_dir / "run", "--steps", "12", "--save-freq", "1", "--log-freq", "3", *WARMUP) == 0
    return run_dir / "run"


WARMUP = ["--scheduler.name", "linear", "--scheduler.warmup-steps", "3"]


def test_a_resume_after_every_step_equals_the_uninterrupted_run_bit_for_bit(whole, tmp_path):
    for step in range(1, 12):
        resumed = tmp_path / f"from{step}"
        flags = [
            "--resume",
            str(whole / f"checkpoints/{step:06d}"),
            "--output-dir",
            str(resumed),
            "--save-freq",
            "0",
        ]
        assert train.main(flags) == 0
        assert_equal(tensors(resumed, 12), tensors(whole, 12))
        assert rows(resumed) == [row for row in rows(whole) if row["step"] > step]


def test_a_resumed_run_directory_holds_each_row_once(whole, tmp_path):
    assert run(tmp_path / "run", "--steps", "5", "--save-freq", "2", *WARMUP) == 0
    (tmp_path / "run/checkpoints/last").unlink()
    os.symlink("000002", tmp_path / "run/checkpoints/last")
    assert train.main(["--resume", str(tmp_path / "run/checkpoints/000002"), "--steps", "6"]) == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("form", ["", "/", "/checkpoints", "/checkpoints/000012", "/checkpoints/last",
                                  "/checkpoints/last/pretrained_model", "/checkpoints/last/pretrained_model/train_config.json"])  # fmt: skip
def test_every_form_of_resume_is_understood(whole, form, capsys):
    assert train.main(["--resume", str(whole) + form]) == 0  # the run is over: nothing left to do
    assert "from step 12" in capsys.readouterr().out


def test_flags_override_the_saved_configuration_and_the_difference_is_printed(whole, tmp_path, capsys):
    flags = [
        "--resume",
        str(whole),
        "--output-dir",
        str(tmp_path / "run"),
        "--steps",
        "14",
        "--optimizer.lr",
        "5e-5",
    ]
    assert train.main([*flags, "--scheduler.name", "none", "--log-freq", "1"]) == 0
    out = capsys.readouterr().out
    assert "--steps 12 -> 14" in out and "--optimizer.lr 0.001 -> 5e-05" in out
    assert [row["step"] for row in rows(tmp_path / "run")] == [13, 14]
    assert {row["lr"] for row in rows(tmp_path / "run")} == {5e-5}


def test_auto_resume_starts_afresh_and_then_goes_on(tmp_path):
    flags = ["--resume", "auto", "--steps", "3", "--save-freq", "1"]
    assert run(tmp_path / "run", *flags) == 0
    assert run(tmp_path / "run", "--resume", "auto", "--steps", "5") == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4, 5]


def test_accumulation_and_log_windows_give_the_curve_of_the_undivided_batch(tmp_path):
    plain = ["--steps", "6", "--batch-size", "4"]
    halves = ["--steps", "12", "--batch-size", "2", "--gradient-accumulation-steps", "2"]
    assert run(tmp_path / "a", *plain) == 0 and run(tmp_path / "b", *halves) == 0
    for one, two in zip(rows(tmp_path / "a"), rows(tmp_path / "b"), strict=True):
        assert one["samples"] == two["samples"] and two["step"] == 2 * one["step"]
        for key in ("loss", "l1_loss", "kld_loss", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-4)


LAYOUTS = {
    "ddp": [],
    "fsdp": ["--parallelism.dp-shard", "2"],
    "fsdp_dcp": ["--parallelism.dp-shard", "-1", "--checkpoint-format", "safetensors_dcp", "--async-save"],
}


def train_rank(rank: int, world_size: int, argv: list[str]) -> int:
    return train.main(argv)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_continue_the_curve_of_one_and_hand_it_back(whole, tmp_path, layout):
    two = ["--resume", str(whole / "checkpoints/000004"), "--output-dir", str(tmp_path / "two"), "--batch-size", "2",
           "--steps", "8", "--save-freq", "0", "--log-freq", "3", *LAYOUTS[layout]]  # fmt: skip
    assert run_ranks(2, train_rank, two, init_group=False) == [0, 0]
    one = [
        "--resume",
        str(tmp_path / "two"),
        "--batch-size",
        "4",
        "--steps",
        "12",
        "--parallelism.dp-shard",
        "1",
    ]
    assert train.main([*one, "--checkpoint-format", "safetensors", "--no-async-save"]) == 0
    expected, found = ({row["step"]: row for row in rows(at)} for at in (whole, tmp_path / "two"))
    for step in (6, 12):  # the log windows that both runs have whole
        for key in ("samples", "loss", "l1_loss", "kld_loss", "grad_norm", "lr"):
            assert found[step][key] == pytest.approx(expected[step][key], rel=1e-4), (step, key)


def test_validation_is_the_mean_over_every_frame_once_in_any_layout(tmp_path):
    flags = ["--steps", "2", "--eval-freq", "1", "--dataset.val-episodes", "1", "--optimizer.lr", "0"]
    assert run(tmp_path / "one", *flags, "--batch-size", "4") == 0
    sharded = ["--parallelism.dp-shard", "2", "--batch-size", "7"]
    argv = [*ENV, "--output-dir", str(tmp_path / "two"), *flags, *sharded]
    assert run_ranks(2, train_rank, argv, init_group=False) == [0, 0]
    losses = [
        row["val_l1_loss"] for name in ("one", "two") for row in rows(tmp_path / name) if "val_l1_loss" in row
    ]
    assert len(losses) == 6  # two runs, before the first step and after each of two
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-6)


@pytest.mark.parametrize("name", ["env_state_v3", "two_cam_v3", "aloha_img_v3"])
def test_every_kind_of_data_set_trains(tmp_path, name):
    size = ["--dataset.image-size", "48", "64", "--dataset.cache", "off"] if name != "env_state_v3" else []
    flags = ["--dataset.root", str(DATA / name), "--steps", "2", "--batch-size", "2", *size]
    assert run(tmp_path / "run", *flags) == 0
    assert all(row["loss"] > 0 for row in rows(tmp_path / "run"))


LEROBOT = (
    "--policy.type=act --policy.device=cpu --policy.push_to_hub=false --wandb.enable=false --dataset.repo_id=local/env "
    "--accelerator.mixed_precision=no --accelerator.gradient_accumulation.steps=2 --accelerator.compile.enabled=false "
    "--accelerator.ddp.static_graph=false --accelerator.fsdp.reshard_after_forward=true --steps=4 --batch_size=2 "
    "--accelerator.fsdp.mixed_precision_policy.param_dtype=null --num_workers=0 --log_freq=2 --save_freq=4 --seed=1000 "
    "--job_name=act --eval_steps=0 --env_eval_freq=0 --checkpoint_format=safetensors --parallelism.dp_shard=1 "
    "--optimizer.type=adamw --optimizer.betas=[0.9,0.999] --scheduler.type=cosine_decay_with_warmup "
    "--scheduler.num_warmup_steps=2 --scheduler.num_decay_steps=4 --scheduler.peak_lr=1e-3 --scheduler.decay_lr=1e-4 "
    "--use_policy_training_preset=false --dataset.episodes=[0,1] --policy.use_vae=false --trackio.enable=false "
).split()


def test_a_lerobot_command_line_does_what_our_own_spelling_does(tmp_path):
    assert train.main([*ENV, *LEROBOT, f"--output_dir={tmp_path / 'theirs'}"]) == 0
    ours = ["--device", "cpu", "--gradient-accumulation-steps", "2", "--steps", "4", "--batch-size", "2", "--log-freq", "2",
            "--scheduler.name", "cosine", "--scheduler.warmup-steps", "2", "--scheduler.decay-steps", "4",
            "--scheduler.final-lr-ratio", "0.1", "--dataset.episodes", "0", "1", "--no-policy.use-vae"]  # fmt: skip
    ours = [flag.replace("--no-policy.", "--policy.no-") for flag in ours]
    assert run(tmp_path / "ours", *ours) == 0
    assert rows(tmp_path / "theirs") == rows(tmp_path / "ours")
    assert train.main(["--resume=true", f"--config_path={tmp_path / 'theirs'}", "--steps=6"]) == 0
    assert rows(tmp_path / "theirs")[-1]["step"] == 6


BAD = {
    "--policy.type=diffusion": "trains ACT only",
    "--ema.enable=true": "--ema.enable",
    "--prefetch_factor=8": "--num-workers",
    "--env.type=pusht": "gym-aloha",
    "--scheduler.type=diffuser": "cosine_decay_with_warmup",
    "--policy.push_to_hub=true": "--policy.repo_id",
    "--steps=0": "--steps",
    "--batch-size=0": "--batch-size",
    "--num-workers=-1": "--num-workers",
    "--log-freq=0": "--log-freq",
    "--save-freq=-1": "--save-freq",
    "--eval-freq=-5": "--eval-freq",
    "--keep-last=0": "--keep-last",
    "--seed=-1": "--seed",
    "--gradient-accumulation-steps=0": "--gradient-accumulation-steps",
    "--optimizer.lr=-1": "--optimizer.lr",
    "--optimizer.lr=nan": "--optimizer.lr",
    "--optimizer.betas=[0.9,1.5]": "--optimizer.betas",
    "--optimizer.eps=0": "--optimizer.eps",
    "--optimizer.grad-clip-norm=-1": "--optimizer.grad-clip-norm",
    "--scheduler.final-lr-ratio=2": "--scheduler.final-lr-ratio",
    "--scheduler.warmup-steps=-1": "--scheduler.warmup-steps",
    "--policy.n-heads=5": "--policy.n-heads",
    "--policy.n-action-steps=21": "--policy.n-action-steps",
    "--policy.temporal-ensemble-coeff=0.01": "--policy.n-action-steps",
    "--policy.vision-backbone=vgg": "--policy.vision-backbone",
    "--policy.path=nowhere": "nowhere",
    "--dataset.root=nowhere": "--dataset.root",
    "--dataset.episodes=[7]": "--dataset.episodes",
    "--dataset.val-split=1.5": "--dataset.val-split",
    "--checkpoint-format=dcp": "--parallelism.dp-shard",
    "--parallelism.dp-shard=3": "world size is 1",
    "--peft.method-type=LORA": "--policy.path",
    "--push-to-hub=nonsense": "USER/NAME",
    "--eval.episodes=0": "--eval.episodes",
    "--eval.seed=-1": "--eval.seed",
    "--resume=nowhere": "nowhere",
    "--tracker=wandb --no-save-checkpoint --push-to-hub=a/b": "--no-save-checkpoint",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_input_ends_in_one_sentence_before_any_work(tmp_path, capsys, flags):
    assert run(tmp_path / "run", *flags.split()) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert BAD[flags] in said[-1] and said[-1].endswith((".", ")")), said
    assert "Traceback" not in "\n".join(said)
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_flags_that_nobody_knows_end_with_exit_code_2(tmp_path):
    for flags in (["--nonsense", "1"], ["--batch-size", "many"], ["--mixed-precision", "int3"]):
        with pytest.raises(SystemExit) as ended:
            run(tmp_path / "run", *flags)
        assert ended.value.code == 2


def test_a_directory_with_files_is_refused_and_keeps_them(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/thesis.tex").write_text("years")
    assert run(tmp_path / "run", "--steps", "1") == 1
    assert "--output-dir" in capsys.readouterr().err
    assert (tmp_path / "run/thesis.tex").read_text() == "years"


def test_flags_without_effect_are_named_once(tmp_path, capsys):
    flags = [
        "--steps",
        "1",
        "--ddp.bucket-cap-mb",
        "25",
        "--fsdp.cpu-offload",
        "--compile-mode",
        "default",
        "--profile",
    ]
    assert run(tmp_path / "run", *flags) == 0
    said = capsys.readouterr().err
    for name in ("--ddp.*", "--fsdp.*", "--compile-mode", "--profile"):
        assert said.count(f"{name} has no effect") == 1


def test_a_failed_save_leaves_the_previous_checkpoint_and_training_goes_on(tmp_path, capsys, monkeypatch):
    real, calls = os.rename, []

    def full_disk(source, target):
        calls.append(target)
        if str(target).endswith("000004"):
            raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "rename", full_disk)
    assert run(tmp_path / "run", "--steps", "6", "--save-freq", "2") == 0
    kept = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir() if p.name.isdigit())
    assert kept == ["000002", "000006"] and "No space left" in capsys.readouterr().err


def torchrun(*flags: str, ranks: int = 2) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={ranks}",
        f"--master-port={free_port()}",
    ]
    return subprocess.Popen([*command, str(ROOT / "train.py"), *ENV, *flags], cwd=ROOT, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)  # fmt: skip


def wait_for(condition, process: subprocess.Popen, deadline_s: float = 90) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)


def test_sigterm_to_torchrun_stops_all_ranks_at_one_step_with_a_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    process = torchrun(
        "--output-dir", str(run_dir), "--steps", "100000", "--num-workers", "2", "--save-freq", "0"
    )
    try:
        wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(rows(run_dir)) > 5, process)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    finally:
        process.kill()
    saved = [p.name for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit()]
    assert len(saved) == 1 and os.readlink(run_dir / "checkpoints/last") == saved[0]
    assert train.main(["--resume", str(run_dir), "--steps", str(int(saved[0]) + 2), "--batch-size", "8"]) == 0


@pytest.mark.parametrize("number,code", [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_a_signal_ends_one_process_with_a_checkpoint_and_its_exit_code(tmp_path, number, code):
    run_dir = tmp_path / "run"
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        *ENV,
        "--output-dir",
        str(run_dir),
        "--steps",
        "100000",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: (run_dir / "metrics.jsonl").exists() and len(rows(run_dir)) > 5, process)
        process.send_signal(number)
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == code, output
    assert len([p for p in (run_dir / "checkpoints").iterdir() if p.name.isdigit()]) == 1


def test_missing_backbone_weights_are_told_before_any_frame_is_decoded(tmp_path, monkeypatch, capsys):
    def never(*args):
        raise AssertionError("frames were opened")

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    flags = ["--output-dir", str(tmp_path / "run"), "--steps", "1", "--num-workers", "0"]
    with monkeypatch.context() as patched:
        patched.setattr(assembly, "open_data", never)
        for where in ([], ["--dataset.root", str(DATA / "two_cam_v3")]):
            assert train.main([*where, *flags]) == 1
            error = capsys.readouterr().err.strip()
            assert "set TORCH_HOME" in error and "\n" not in error
    # Without a camera there is no backbone, and nothing to miss.
    assert (
        train.main([*ENV, *flags, "--policy.pretrained-backbone-weights", "ResNet18_Weights.IMAGENET1K_V1"])
        == 0
    )
