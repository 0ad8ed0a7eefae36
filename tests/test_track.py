"""Trackers, started for real without a network: their files compared with what was logged. Failing ones."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import time

import pytest
from conftest import ROOT

from extras.track import QUEUE_SIZE, Tracker, start_tracker

# A run, stopped at step 30 and resumed from the checkpoint of step 20; its process reaches no other host.
RUN = """
import socket, sys
from extras import track

def connect(self, address, real=socket.socket.connect):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1"):
        print("NETWORK", address, flush=True)
        raise OSError("no network")
    return real(self, address)

socket.socket.connect = connect
kind, run_dir = sys.argv[1:]
config = {"policy": {"dim_model": 64}}
first = track.start_tracker(kind, run_dir, "my job/1", config, None, True)
for step in (10, 20, 30):
    first.log(step, {"step": step, "loss": 1 / step, "name": "ignored"})
first.finish()
again = track.start_tracker(kind, run_dir, "my job/1", config, first.run_id, True)
for step in (25, 35):
    again.log(step, {"loss": 2 / step})
again.finish()
print("ID", first.run_id, again.run_id, flush=True)
"""


def run(kind, folder, **environment):
    pytest.importorskip(kind, reason=f"{kind} is not installed")
    hidden = ("WANDB_", "TRACKIO_", "HF_")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, kind, str(folder)],
        env=clean | {"HOME": str(folder), "PYTHONPATH": str(ROOT)} | environment,
        cwd=folder, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "NETWORK" not in done.stdout and "warning: --tracker" not in done.stderr, done.stdout + done.stderr
    first, again = done.stdout.rpartition("ID ")[2].split()
    assert first == again and first.startswith("my-job-1-")
    return first


def test_tensorboard_reads_back_the_steps_and_hides_those_that_the_resume_took_back(tmp_path):
    run("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (10, pytest.approx(1 / 10)), (20, pytest.approx(1 / 20)),
        (25, pytest.approx(2 / 25)), (35, pytest.approx(2 / 35)),
    ]  # fmt: skip
    assert "dim_model" in str(events.Tensors("config/text_summary")[0])


def test_trackio_keeps_one_run_across_the_resume(tmp_path):
    run_id = run("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    with sqlite3.connect(tmp_path / "trackio" / "act.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert {name for name, _, _ in rows} == {run_id}
    assert [(step, json.loads(metrics)["loss"]) for _, step, metrics in rows] == [
        (10, 1 / 10), (20, 1 / 20), (25, 2 / 25), (30, 1 / 30), (35, 2 / 35),
    ]  # fmt: skip


def test_wandb_writes_offline_without_a_login_under_one_id(tmp_path):
    run_id = run("wandb", tmp_path)
    files = sorted(
        (tmp_path / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime
    )
    assert len(files) == 2
    logged = []
    for file in files:
        records = _wandb_records(file)
        assert [r.run.run_id for r in records if r.HasField("run")] == [run_id]
        for record in records:
            if record.HasField("history"):
                row = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
                logged.append((float(row["step"]), json.loads(row["loss"])))
    assert logged == [(10, 1 / 10), (20, 1 / 20), (30, 1 / 30), (25, 2 / 25), (35, 2 / 35)]


def _wandb_records(path):
    """Records of wandb's transaction log: LevelDB's log format behind 7 bytes, small enough for one block."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, records, at, parts = path.read_bytes(), [], 7, b""
    assert len(content) < 32768
    while at + 7 <= len(content):
        _, size, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(Record.FromString(parts))
            parts = b""
    return records


def test_ranks_other_than_0_and_no_tracker_do_nothing(tmp_path):
    for kind, is_main in (("none", True), ("none", False), ("tensorboard", False)):
        if kind != "none":
            pytest.importorskip(kind)
        before = threading.active_count()
        tracker = start_tracker(kind, tmp_path, "job", {}, "job-1", is_main)
        tracker.log(1, {"loss": 1.0})
        tracker.finish()
        assert tracker.run_id == "job-1"
        assert threading.active_count() == before and not list(tmp_path.iterdir())


def test_an_unknown_tracker_and_a_missing_package_are_named_on_every_rank(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="--tracker=mlflow"):
        start_tracker("mlflow", tmp_path, "job", {}, None, False)
    (tmp_path / "wandb").mkdir()  # what old runs leave behind looks like a package to Python
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb"]:
        monkeypatch.delitem(sys.modules, name)
    for is_main in (True, False):
        with pytest.raises(ImportError, match="pip install wandb"):
            start_tracker("wandb", tmp_path, "job", {}, None, is_main)


def test_a_tracker_that_fails_while_logging_is_warned_of_once_and_tried_again(capfd):
    seen = []

    def log(step, values):
        if step < 4:
            raise ConnectionError("server away")
        seen.append((step, values))

    tracker = Tracker("wandb", "job-1", lambda: (log, lambda: None))
    for step in range(6):
        tracker.log(step, {"loss": 0.5, "note": "text", "step": step})
    tracker.finish()
    assert seen == [(4, {"loss": 0.5}), (5, {"loss": 0.5})]
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 1 and "server away" in warnings[0] and "metrics.jsonl" in warnings[0]


@pytest.mark.parametrize("error", [RuntimeError("no key"), SystemExit(1)])
def test_a_tracker_that_cannot_start_is_warned_of_and_left_alone(capfd, error):
    def connect():
        raise error

    tracker = Tracker("wandb", "job-1", connect)
    for step in range(3 * QUEUE_SIZE):
        tracker.log(step, {"loss": 0.5})
    tracker.finish()
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 1 and "could not start" in warnings[0]


def test_a_tracker_that_hangs_neither_slows_the_loop_nor_keeps_the_process(capfd):
    forever = threading.Event()
    tracker = Tracker("trackio", "job-1", lambda: (lambda step, values: forever.wait(), lambda: None))
    start = time.monotonic()
    for step in range(2 * QUEUE_SIZE):
        tracker.log(step, {"loss": 0.5})
    assert time.monotonic() - start < 1  # microseconds each
    tracker.finish(timeout_s=0.2)
    assert time.monotonic() - start < 2
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 1 and "does not keep up" in warnings[0]
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "tracker")
    forever.set()
