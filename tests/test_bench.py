"""The reference step is compared with ours, and each table with what it must hold; no time is asserted."""

import json
import math
from dataclasses import replace

import pytest
import torch

import bench
import model_act
import train
from extras import plain_act
from extras.flags import act_config


@pytest.mark.parametrize("steps, camera", [(3, True), (20, False)])
def test_the_reference_step_equals_ours(steps, camera, monkeypatch):
    cfg, train_set = bench.small_job(bench.Layout(), "float64", steps, "cpu", camera)
    cfg = replace(cfg, policy=replace(cfg.policy, dropout=0.0))
    policy = train.build_policy(cfg, train_set, None)
    reference = bench.ReferenceStep(
        policy.config, policy.input_features, policy.output_features, policy.stats
    )
    reference.model.load_state_dict(policy.model.state_dict())
    policy.double()
    reference.module.double()
    latent: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "randn_like", lambda mu: latent.pop().to(mu.dtype))
    cluster = bench.dist.start("cpu")
    learner, sums = train.prepare(cfg, cluster, policy), bench.dist.MetricSums(cluster)
    learner.module.train()
    batches = bench.data.TrainBatches(train_set, 0, 8, 0, 1, 1, steps)
    as_double = lambda batch: {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}  # noqa: E731
    real = plain_act.normalized
    monkeypatch.setattr(plain_act, "normalized", lambda b, s: real(double_images(b), s))
    for step in batches.steps:
        batch = as_double(batches[step])
        latent.append(model_act.normal_noise(batch["noise_seed"], cfg.policy.latent_dim))
        train.train_step(cfg, cluster, learner, batch, range(step, step + 1), step, sums)
        assert sums.reduce()["loss"] == pytest.approx(reference(batch), rel=1e-9)
    for name, value in reference.model.named_parameters():
        if not name.endswith("in_proj_bias"):  # its key third has noise of rounding for a gradient there
            torch.testing.assert_close(policy.model.get_parameter(name), value, rtol=1e-7, atol=1e-9)


def double_images(batch):
    return {
        key: value.double() / 255 if value.dtype == torch.uint8 else value for key, value in batch.items()
    }


def test_the_floor_counts_the_paper_sizes_operations():
    cfg = train.PRESETS["aloha"]
    inputs = {"observation.state": {"type": "STATE", "shape": [14]}}
    inputs["observation.images.top"] = {"type": "VISUAL", "shape": [3, 480, 640]}
    with torch.device("meta"):
        policy = model_act.ACTPolicy(
            act_config(cfg.policy), inputs, {"action": {"type": "ACTION", "shape": [14]}}
        )
    # design, fact 20: about 910 GFLOP at batch 8
    assert bench.operations(policy, 8) == pytest.approx(910e9, rel=0.02)
    assert bench.operations(policy, 4) == pytest.approx(bench.operations(policy, 8) / 2, rel=1e-6)


def test_the_speed_table_is_complete(tmp_path, monkeypatch, capsys):
    compiled = torch.nn.Module.compile
    calls = []

    def compile_without_inductor(self, **kwargs):
        calls.append(type(self).__name__)
        return compiled(self, dynamic=kwargs["dynamic"], backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_without_inductor)
    monkeypatch.setattr(bench, "matmul_rates", lambda device: {"float32": 1e9, "bf16": 2e9})
    file = tmp_path / "speed.json"
    flags = (
        f"speed --size small --steps 3 --warmup 1 --batch-size 2 --num-workers 0 --json {file} --device cpu"
    )
    flags += " --no-own-process"
    assert bench.main([*flags.split(), "--dataset.cache", "off", "--dataset.image-size", "32", "32"]) == 0
    table = json.loads(file.read_text())
    assert list(table["rows"]) == [name for name in bench.ROWS if name not in bench.DDP_ONLY]
    assert calls == ["PlainACT", "PlainACT", "ACT", "ACT"]  # two rows with, two of ours
    for name, row in table["rows"].items():
        assert all(math.isfinite(value) for value in row.values()), (name, row)
        assert 0 < row["p10_s"] <= row["median_s"] <= row["p90_s"] <= row["worst_s"]
        assert row["launches"] > 10 and 0 <= row["data"] < 1
        rate = 2e9 if "bf16" in name else 1e9
        assert row["to_floor"] == pytest.approx(row["median_s"] / (table["operations"] / rate))
    assert table["rows"]["reference"]["to_reference"] == 1
    assert "torch" in table["versions"] and "cores" in table["machine"] and table["command"]
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in table["rows"])


def test_rows_in_processes_of_their_own_take_turns_and_a_failure_is_told(tmp_path, capfd):
    file = tmp_path / "speed.json"
    flags = (
        f"speed --size small --steps 4 --warmup 1 --batch-size 2 --num-workers 1 --json {file} --device cpu"
    )
    flags = [*flags.split(), "--threads", "1", "--dataset.cache", "off", "--dataset.image-size", "32", "32"]
    assert bench.main([*flags, "--rows", "reference", "ours"]) == 0
    for row in json.loads(file.read_text())["rows"].values():
        assert 0 < row["p10_s"] <= row["median_s"] <= row["worst_s"] and row["launches"] > 10
    with pytest.raises(RuntimeError, match=r"(?s)a row failed:.*no such row"):
        bench.RowProcess(bench.Speed(), "no such row").receive()


def test_the_loader_table_reads_its_own_data_set(tmp_path):
    pytest.importorskip("av")
    pytest.importorskip("pyarrow")
    file = tmp_path / "loader.json"
    flags = f"loader --frames 24 --chunk-size 10 --num-workers 1 --seconds 0.05 --json {file}"
    assert bench.main(flags.split()) == 0
    rows = json.loads(file.read_text())["rows"]
    assert list(rows) == ["observation.images.video (video)", "observation.images.image (image)"]
    for row in rows.values():
        assert row["warm_ms"] > 0 and row["direct_ms"] > row["warm_ms"] and row["loader_items_per_s"] > 0
        assert row["workers_a_rank_at_13_ms_warm"] == math.ceil(8 / 0.013 * row["warm_ms"] / 1e3)
    assert rows["observation.images.image (image)"]["one_image_ms"] > 0


def test_the_checkpoint_table_has_every_format(tmp_path):
    file = tmp_path / "checkpoint.json"
    assert (
        bench.main(["checkpoint", "--size", "small", "--json", str(file), "--directory", str(tmp_path)]) == 0
    )
    rows = json.loads(file.read_text())["rows"]
    assert [(r["layout"], r["format"], r["mode"]) for r in rows] == [
        (layout, kind, mode)
        for layout, kind in [
            ("1 process", "safetensors"),
            ("fsdp 2", "safetensors"),
            ("fsdp 2", "dcp"),
            ("fsdp 2", "safetensors_dcp"),
        ]
        for mode in ("sync", "async")
    ]
    for row in rows:
        assert 0 < row["held_up_s"] <= row["on_disk_s"] and row["load_s"] > 0 and row["bytes"] > 1e7
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "command, sentence",
    [
        ("speed --rows fastest", "--rows=fastest is not known; use some of reference, "),
        ("speed --steps 5 --warmup 5", "--steps=5 must be more than --warmup=5"),
        ("equality --layouts single ring", "--layouts=ring is not known; use some of single, ddp2"),
    ],
)
def test_a_wrong_flag_gives_one_sentence(command, sentence, capsys):
    assert bench.main(command.split()) == 1
    error = capsys.readouterr().err.strip()
    assert error.startswith(sentence) and "\n" not in error
