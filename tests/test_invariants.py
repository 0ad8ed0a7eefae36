"""The rules that make defensive code needless, each broken on purpose or measured on a run: no generator in a step;
rate, order, noise and "best" are functions of step and log; flags are checked once, before anything is read; a bug
keeps its traceback. (Published = whole: test_ckpt.py.)"""

import json
import os
import random
import typing
from pathlib import Path

import numpy as np
import pytest
import torch
from test_train import BAD, assert_equal, rows, run, tensors

import data
import dist
import model_act
import train
from extras import check_policy, checks, datasets, runlog
from extras.flags import field_types

# ---- no generator in a step


def generators() -> tuple:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


@pytest.mark.parametrize("flags", [[], ["--dataset.val-split", "0.3", "--eval-freq", "2"]])
def test_no_generator_is_drawn_from_between_the_first_step_and_the_last(flags, tmp_path, monkeypatch):
    states, real = [], train.train

    def watched(run: train.Run) -> int:
        states.append(generators())
        code = real(run)
        states.append(generators())
        return code

    monkeypatch.setattr(train, "train", watched)
    assert run(tmp_path / "run", "--steps", "4", "--save-freq", "2", *flags) == 0
    assert states[0] == states[1]


def test_another_state_of_the_generators_changes_nothing_after_the_first_weights(tmp_path, monkeypatch):
    """Dropout and the VAE's noise are on."""
    assert run(tmp_path / "whole", "--steps", "4", "--save-freq", "2") == 0
    real = train.train

    def disturbed(run: train.Run) -> int:
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        return real(run)

    monkeypatch.setattr(train, "train", disturbed)
    at = str(tmp_path / "whole/checkpoints/000002")
    assert train.main(["--resume", at, "--output-dir", str(tmp_path / "resumed")]) == 0
    assert_equal(tensors(tmp_path / "resumed", 4), tensors(tmp_path / "whole", 4))


# ---- functions of step and log

VAL = ["--dataset.val-split", "0.3", "--eval-freq", "2"]


def test_a_checkpoint_stores_nothing_that_follows_from_step_and_log(tmp_path):
    assert run(tmp_path / "run", "--steps", "4", "--save-freq", "2", "--scheduler.name", "cosine", *VAL) == 0
    training = tmp_path / "run/checkpoints/000002/training_state"
    state = json.loads((training / "training_step.json").read_text())
    assert not {"best", "best_step", "evaluations_since_best", "evaluation_owed", "lr"} & set(state)
    assert not list(training.glob("rng_state_*"))


def test_a_resume_reads_neither_schedule_nor_random_state(tmp_path):
    flags = [
        "--steps",
        "6",
        "--save-freq",
        "3",
        "--scheduler.name",
        "cosine",
        "--scheduler.warmup-steps",
        "2",
    ]
    assert run(tmp_path / "run", *flags) == 0
    training = tmp_path / "run/checkpoints/000003/training_state"
    for name in ("scheduler_state.json", "rng_state.safetensors", "checksums.json"):
        (training / name).unlink()
    (training / "scheduler_state.json").write_text('{"last_epoch": 77, "base_lrs": [5.0, 5.0]}')
    (training / "rng_state.safetensors").write_bytes(b"nothing")
    at = tmp_path / "run/checkpoints/000003"
    model = train.lerobot_ckpt.policy_of(*train.lerobot_ckpt.load_policy_files(at))
    optimizer = torch.optim.AdamW(model.optim_groups(1e-3, 1e-3, 0.0), fused=True)
    state = train.lerobot_ckpt.load_training_state(at, model, optimizer)
    assert state["step"] == 3
    cfg = train.Config(steps=6, scheduler=train.SchedulerConfig("cosine", warmup_steps=2))
    assert [row["lr"] for row in rows(tmp_path / "run")] == [1e-3 * train.lr_factor(cfg, s) for s in range(6)]


def test_the_best_checkpoint_follows_from_the_rows_alone(tmp_path, monkeypatch):
    losses = iter([9.0, 5.0, 4.0, 4.5])
    monkeypatch.setattr(train, "validation_loss", lambda run: next(losses))
    assert run(tmp_path / "run", *VAL, "--steps", "6", "--save-freq", "2") == 0
    history = runlog.evaluations(tmp_path / "run", 6)
    assert [row["step"] for row in history] == [2, 4, 6] and runlog.best_evaluation(history) == 1
    assert os.readlink(tmp_path / "run/checkpoints/best") == "000004"
    assert runlog.evaluations_since_best(history) == 1
    # a run killed between the row and the pointer: the resumed one moves it
    (tmp_path / "run/checkpoints/best").unlink()
    os.symlink("000002", tmp_path / "run/checkpoints/best")
    losses = iter([4.2])
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "8"]) == 0
    assert os.readlink(tmp_path / "run/checkpoints/best") == "000004"


def test_an_evaluation_without_its_row_is_owed_and_made_once(tmp_path, monkeypatch):
    made, real = [], train.validation_loss

    def counted(run: train.Run) -> float | None:
        made.append(run.progress.step)
        return real(run)

    monkeypatch.setattr(train, "validation_loss", counted)
    assert run(tmp_path / "run", *VAL, "--steps", "4", "--save-freq", "2") == 0
    assert made == [0, 2, 4]
    file = tmp_path / "run/metrics.jsonl"
    kept = [line for line in file.read_text().splitlines() if not ('"step": 2,' in line and "val_" in line)]
    file.write_text("\n".join(kept) + "\n")
    made.clear()
    assert train.main(["--resume", str(tmp_path / "run/checkpoints/000002")]) == 0
    assert made == [2, 4]
    made.clear()
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "5"]) == 0
    assert made == [5]


def test_a_step_is_saved_once_also_where_saving_evaluating_and_the_end_meet(tmp_path, capsys):
    assert run(tmp_path / "run", *VAL, "--steps", "4", "--save-freq", "2") == 0
    said = capsys.readouterr().out
    assert [said.count(f"checkpoint {step} saved") for step in (2, 4)] == [1, 1]


# ---- flags are checked once, before anything is read


@pytest.mark.parametrize(
    "flags", [f for f in BAD if "=" in f and not f.startswith(("--dataset.root", "--dataset.ep"))]
)
def test_a_flag_that_cannot_work_is_refused_before_the_dataset_is_looked_for(
    flags, tmp_path, capsys, monkeypatch
):
    def never(*args):
        raise AssertionError("the dataset was opened")

    monkeypatch.setattr(datasets, "open_dataset", never)
    monkeypatch.setattr(datasets, "camera_keys", never)
    monkeypatch.setattr(datasets, "open_demonstrations", never)
    assert run(tmp_path / "run", *flags.split()) == 1
    assert BAD[flags] in capsys.readouterr().err.strip().splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_every_flag_that_is_a_number_has_a_range():
    elsewhere = {
        "parallelism.dp_replicate", "parallelism.dp_shard",  # dist.resolve_degrees: with the world size
        "ddp.bucket_cap_mb", "fsdp.min_num_params",  # torch's own
        "dataset.episodes", "dataset.val_episodes",  # with the dataset's episodes
        "sim.seed", "eval.temporal_ensemble_coeff", "policy.n_obs_steps", "peft.r", "peft.lora_alpha",
    }  # fmt: skip
    checked = {"dataset.val_split", "dataset.image_size", "dataset.tolerance_s", "dataset.min_std"}
    for flag, kind in field_types(train.Config).items():
        kinds = {
            kind,
            *typing.get_args(kind),
            *(k for a in typing.get_args(kind) for k in typing.get_args(a)),
        }
        if {int, float} & kinds and flag not in elsewhere | checked:
            known = flag in checks.RANGES or flag.removeprefix("policy.") in check_policy.RANGES
            assert known or flag == "policy.temporal_ensemble_coeff", flag


# ---- errors: the user's in one sentence, ours with their traceback


def test_a_bug_in_set_up_keeps_its_traceback_whatever_its_class(tmp_path, monkeypatch):
    for kind in (ValueError, TypeError, OSError, ImportError, KeyError, AttributeError):

        def buggy(*args, kind=kind):
            raise kind("a bug of ours")

        monkeypatch.setattr(train, "prepare", buggy)
        with pytest.raises(kind, match="a bug of ours"):
            run(tmp_path / "run", "--steps", "1")
        assert not (tmp_path / "run").exists()


def test_an_error_of_the_user_has_one_class_name_in_every_file(tmp_path):
    assert issubclass(data.DatasetError, data.UserError) and issubclass(
        train.ckpt.CheckpointError, ValueError
    )
    for module in (
        data,
        dist,
        model_act,
        train.ckpt,
        train.lora,
        train.hub if hasattr(train, "hub") else train.ckpt,
    ):
        assert module.UserError.__name__ == "UserError" and issubclass(module.UserError, ValueError)


def test_the_metrics_of_another_directory_decide_what_is_best_there(tmp_path, monkeypatch):
    """A run that is resumed into a directory of its own knows the earlier evaluations, whose rows stay behind."""
    losses = iter([9.0, 3.0, 5.0])
    monkeypatch.setattr(train, "validation_loss", lambda run: next(losses))
    assert run(tmp_path / "one", *VAL, "--steps", "2") == 0
    assert (
        train.main(["--resume", str(tmp_path / "one"), "--output-dir", str(tmp_path / "two"), "--steps", "4"])
        == 0
    )
    assert [row["step"] for row in rows(tmp_path / "two") if "val_l1_loss" in row] == [4]
    assert not Path(tmp_path / "two/checkpoints/best").exists()  # 5.0 is no better than 3.0
