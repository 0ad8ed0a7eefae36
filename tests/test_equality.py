"""Every layout is compared with one process, and a compiled or captured step with an eager one."""

import json
import math
import signal
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import bench
import data
import dist
import train
from extras import assembly


def failures(first: str, other: str, ranks: tuple[list[dict], list[dict]], tolerance: float = 1e-9) -> dict:
    layouts = (bench.LAYOUTS[first], bench.LAYOUTS[other])
    columns = bench.compare(*ranks, layouts, tolerance, with_weights=True)
    return {name: failed for name, (_, failed, _) in columns.items() if failed}


# ---- layouts


def test_all_layouts_train_the_same_curve_to_rounding(tmp_path):
    layouts = ("single", "ddp2", "fsdp2", "hsdp2x2", "accum2")
    flags = bench.Equality(("float64",), layouts, steps=4, json=str(tmp_path / "table.json"))
    assert bench.equality(flags) == 0
    table = json.loads((tmp_path / "table.json").read_text())
    assert [row["layout"] for row in table["rows"]] == list(layouts[1:])
    # 4 metrics and the ids at 4 steps, each tensor of the weights, each rank's digest
    tensors = len(table["rows"][0]) and table["rows"][0]["weights"][0]
    assert tensors > 100
    assert table["checks"] == sum(5 * 4 + tensors + bench.LAYOUTS[name].world_size for name in layouts[1:])
    assert table["failed"] == 0


# Without inductor, whose C++ of a ResNet takes minutes: test_model_act.py has it without a camera, and the table
# of `bench.py equality` with one.
def traced(rank: int, world_size: int, *job) -> dict:
    compiled = torch.nn.Module.compile

    def compile_without_inductor(self, **kwargs):
        return compiled(self, backend="aot_eager", dynamic=kwargs["dynamic"])

    torch.nn.Module.compile = compile_without_inductor  # type: ignore[method-assign]
    out = bench.record(rank, world_size, *job)
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    return out


@pytest.mark.parametrize("name", ["ddp2-compiled", "fsdp2-compiled"])
def test_compiled_equals_eager_with_dropout_on(name, eager):
    layout = bench.LAYOUTS[name]
    ranks = bench.run_ranks(layout.world_size, traced, layout, "float64", 3, deadline_s=600)
    assert failures("single", name, (eager, ranks)) == {}


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2"])
def test_an_inf_on_one_rank_is_skipped_by_all(layout):
    job = (bench.LAYOUTS[layout], "fp16", 3, "cpu", True, 1)
    ranks = bench.run_ranks(2, bench.record, *job, deadline_s=600)
    checks, failed, _ = bench.overflow_checks(ranks)
    assert (checks, failed) == (8, 0)
    # the same check on ranks of which one went on: it must be seen
    ranks[0]["digests"][1] = "stepped"
    assert bench.overflow_checks(ranks)[1] == 1


def in_this_process(layout: str, steps: int = 3) -> list[dict]:
    return [bench.record(0, 1, bench.LAYOUTS[layout], "float64", steps)]


@pytest.fixture(scope="module")
def eager() -> list[dict]:
    return in_this_process("single")


def test_a_wrong_normaliser_noise_or_order_is_seen(monkeypatch, eager):
    first = eager
    assert failures("single", "accum2", (first, in_this_process("accum2"))) == {}

    # each micro-batch divided by its own count of valid steps, as trainers commonly do
    whole = data.TrainBatches.__getitem__

    def without_count(self, step):
        return {key: value for key, value in whole(self, step).items() if key != "num_valid"}

    with monkeypatch.context() as patch:
        patch.setattr(data.TrainBatches, "__getitem__", without_count)
        found = failures("single", "accum2", (first, in_this_process("accum2")))
    assert found["loss"] == 3 and found["grad_norm"] == 3 and found["weights"] > 100 and "ids" not in found

    # noise that depends on the place in the batch, not on the sample
    def noise_by_place(self, step):
        batch = whole(self, step)
        return batch | {"noise_seed": torch.arange(len(batch["index"]))}

    with monkeypatch.context() as patch:
        patch.setattr(data.TrainBatches, "__getitem__", noise_by_place)
        ranks = [in_this_process(name) for name in ("single", "accum2")]
        assert failures("single", "accum2", (ranks[0], ranks[1]))["loss"] == 3

    with monkeypatch.context() as patch:
        patch.setattr(data.SampleOrder, "frame", lambda self, p: (p + 1) % self.num_frames)
        assert failures("single", "accum2", (first, in_this_process("accum2")))["ids"] == 3


def test_a_check_that_is_nan_or_missing_has_failed():
    assert bench.column([0.0, math.nan], 1e-9, 2)[:2] == (2, 1)
    assert bench.column([0.0], 1e-9, 2)[:2] == (2, 1)
    assert bench.column([1e-10, 1e-8], 1e-9, 2)[:2] == (2, 1)
    assert bench.relative([1.0, -4.0], torch.tensor([1.0, -4.4]).numpy()) == pytest.approx(0.1)


def test_a_rank_that_fails_or_hangs_ends_the_table_with_its_name():
    with pytest.raises(RuntimeError, match=r"rank 1 failed:\n(.|\n)*ZeroDivisionError"):
        bench.run_ranks(2, fails_on_rank_1, deadline_s=60)
    with pytest.raises(RuntimeError, match="hung for 3 s"):
        bench.run_ranks(1, sleeps, deadline_s=3)


def fails_on_rank_1(rank: int, world_size: int) -> float:
    return 1 / (1 - rank)


def sleeps(rank: int, world_size: int) -> None:
    import time

    time.sleep(600)


# ---- what the host reads, and how many graphs there are


class Trainer:
    """The small job in this process, one step at a time."""

    def __init__(
        self, precision: str = "float32", device: str = "cpu", mode: Any = None, camera=True, **layout: Any
    ) -> None:
        self.cfg, self.train_set = bench.small_job(bench.Layout(**layout), precision, 40, device, camera)
        if mode:
            self.cfg = replace(self.cfg, compile_mode=mode)
        self.cluster = dist.start(device, self.cfg.parallelism)
        policy = train.build_policy(self.cfg, self.train_set, None)
        self.learner = train.prepare(self.cfg, self.cluster, policy)
        accumulation = self.cfg.gradient_accumulation_steps
        self.batches = data.TrainBatches(
            self.train_set, 0, self.cfg.batch_size, 0, 1, accumulation, self.cfg.steps
        )
        self.sums = dist.MetricSums(self.cluster)
        self.learner.module.train()
        if self.learner.scaler is not None:
            self.learner.scaler.scale.fill_(2.0**10)  # the first scale overflows, and an overflow has no norm

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        return {key: value.to(self.cluster.device) for key, value in self.batches[step].items()}

    def step(self, step: int, batch: dict[str, torch.Tensor] | None = None) -> None:
        batch = self.batch(step) if batch is None else batch
        window = self.batches.window(step)
        train.train_step(self.cfg, self.cluster, self.learner, batch, window, step, self.sums)

    def validate(self) -> float:
        batches = data.ValBatches(self.train_set, self.cfg.batch_size, 0, 1)
        run: Any = SimpleNamespace(cfg=self.cfg, cluster=self.cluster, learner=self.learner)
        run.val_loader = data.make_loader(batches, 0)
        loss = train.validation_loss(run)
        self.learner.module.train()
        return loss


READS = ("item", "cpu", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__array__")


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_the_host_reads_nothing_between_log_steps(precision, monkeypatch):
    trainer = Trainer(precision, accumulation=2)
    batches = [trainer.batch(step) for step in range(6)]
    for step in (0, 1):
        trainer.step(step, batches[step])
    seen: list[str] = []
    for name in READS:
        original = getattr(torch.Tensor, name)

        def counted(self, *args, _name=name, _original=original, **kwargs):
            seen.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    for step in (2, 3, 4, 5):
        trainer.step(step, batches[step])
    assert seen == []
    values = trainer.sums.reduce()  # a log step: this is read
    assert seen and math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])


@pytest.fixture
def traced_only(monkeypatch):
    """torch.compile without what makes code of a graph: as many graphs and breaks, in a fraction of the time."""
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.nn.Module.compile

    def compile_without_inductor(self, **kwargs):
        return compiled(self, **{k: v for k, v in kwargs.items() if k != "mode"}, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", compile_without_inductor)
    yield
    torch._dynamo.reset()


def test_two_epochs_with_validation_compile_one_graph_and_one_more(traced_only, tmp_path, monkeypatch):
    _, frames = bench.small_job(bench.Layout(), "float32", 1, "cpu")
    train_set, val_set = frames.select([1, 3]), frames.select([4])
    assert len(train_set) % 8 and len(val_set) % 8
    monkeypatch.setattr(assembly, "open_data", lambda cfg: (train_set, val_set, []))
    steps = 2 * -(-len(train_set) // 8)
    flags = """--policy.pretrained-backbone-weights None --policy.dim-model 32 --policy.n-heads 4
        --policy.dim-feedforward 64 --policy.n-encoder-layers 1 --policy.n-vae-encoder-layers 1
        --compile --device cpu --num-workers 0 --batch-size 8
        --eval-freq 15 --log-freq 4 --no-save-checkpoint""".split()
    flags += ["--steps", str(steps), "--output-dir", str(tmp_path / "run")]
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGUSR1)]
    try:
        assert train.main(flags) == 0
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGUSR1), handlers):
            signal.signal(number, handler)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("val_l1_loss" in row for row in rows) >= 3
    assert counters["stats"]["unique_graphs"] == 2, dict(counters["stats"])
    assert not counters["graph_break"], dict(counters["graph_break"])


def test_another_batch_shape_would_be_seen_as_a_graph_more(traced_only):
    trainer = Trainer(camera=False, compile=True)
    trainer.step(0)
    assert counters["stats"]["unique_graphs"] == 1
    trainer.step(1)
    assert counters["stats"]["unique_graphs"] == 1
    short = {k: v[:5] if v.dim() else v for k, v in trainer.batch(2).items()}
    trainer.step(2, short)
    assert counters["stats"]["unique_graphs"] == 2


# ---- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"compile": True}], ids=["eager", "compiled"])
def test_no_step_waits_for_the_gpu(options):
    trainer = Trainer("bf16", "cuda", accumulation=2, **options)
    batches = [trainer.batch(step) for step in range(12)]
    for step in range(6):
        trainer.step(step, batches[step])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(6, 12):
            trainer.step(step, batches[step])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert math.isfinite(trainer.sums.reduce()["loss"])


@pytest.mark.gpu
def test_cuda_graphs_with_accumulation_and_validation_equal_eager():
    dist.set_process(tf32=False)
    found = []
    rows: tuple[dict[str, Any], ...] = ({}, {"compile": True, "mode": "reduce-overhead"})
    for options in rows:
        trainer, losses = Trainer("float32", "cuda", accumulation=2, **options), []
        for step in range(20):
            trainer.step(step)
            if step % 2:
                losses += list(trainer.sums.reduce().values())
            if step in (5, 11, 13):
                losses.append(trainer.validate())
        found.append(losses)
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(found[0]), rtol=1e-4, atol=0)
