"""Experiment trackers behind one hook: tensorboard, trackio, wandb, or none. Needs the one that is chosen.

    tracker = start_tracker("wandb", run_dir, job_name, config, run_id, is_main)  # run_id: saved, or None
    tracker.log(step, {"loss": 0.5, "lr": 1e-5})                                  # never blocks, never raises
    state["tracker_run_id"] = tracker.run_id                                      # a resume continues the run
    tracker.finish()

Only rank 0 has a tracker; elsewhere the calls do nothing. The tracker lives in a thread of its own behind a
bounded queue, so that one that raises, hangs or is slow costs the training nothing: it is warned of once, and
values that find the queue full are dropped. `metrics.jsonl` is written elsewhere and always whole.

Where the values go. tensorboard: RUN_DIR/tensorboard. trackio: its own folder (TRACKIO_DIR). wandb:
RUN_DIR/wandb and the server; without a login it writes offline, and `wandb sync` uploads later.
"""

import importlib.util
import json
import netrc
import os
import queue
import re
import sys
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UserError(ValueError):
    """The user's to mend, in one sentence. Any other error is a bug and keeps its traceback."""


class MissingPackage(UserError, ImportError):
    """An optional package is not installed; the sentence names the pip line."""


KINDS = ("none", "tensorboard", "trackio", "wandb")
QUEUE_SIZE = 1000
FINISH_TIMEOUT_S = 60.0

Log = Callable[[int, dict[str, float]], None]
Finish = Callable[[], None]


class Tracker:
    """One run of a tracker. `connect`, called in the tracker's thread, gives its log and finish functions."""

    def __init__(self, kind: str, run_id: str | None, connect: Callable[[], tuple[Log, Finish]] | None):
        self.kind = kind
        self.run_id = run_id
        self._warned = False
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(QUEUE_SIZE)
        self._thread: threading.Thread | None = None
        if connect is not None:
            # A daemon, so that a hung tracker cannot keep the finished process alive.
            self._thread = threading.Thread(target=self._work, args=(connect,), name="tracker", daemon=True)
            self._thread.start()

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Hand the numbers among `values` over; `step` counts as in metrics.jsonl."""
        if self._thread is None or not self._thread.is_alive():
            return
        numbers = {
            key: float(v) for key, v in values.items() if isinstance(v, (int, float)) and key != "step"
        }
        try:
            self._queue.put_nowait((step, numbers))
        except queue.Full:
            self._warn("does not keep up; values are dropped")

    def finish(self, timeout_s: float = FINISH_TIMEOUT_S) -> None:
        """Write what is queued and close, or give up after `timeout_s`."""
        if self._thread is None or not self._thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._warn(f"did not finish within {timeout_s:g} s; its last values may be missing")

    def _work(self, connect: Callable[[], tuple[Log, Finish]]) -> None:
        try:
            log, finish = connect()
        except BaseException as error:  # trackers raise SystemExit, too
            self._warn(f"could not start ({error!r})")
            return
        while (item := self._queue.get()) is not None:
            try:
                log(*item)
            except BaseException as error:
                self._warn(f"failed at step {item[0]} ({error!r})")
        try:
            finish()
        except BaseException as error:
            self._warn(f"failed while finishing ({error!r})")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            print(
                f"warning: --tracker {self.kind} {what}; training goes on, metrics.jsonl has every value.",
                file=sys.stderr,
                flush=True,
            )


@dataclass(frozen=True)
class _Run:
    run_dir: Path
    project: str
    job_name: str
    run_id: str
    resumed: bool
    config: dict


def start_tracker(
    kind: str,
    run_dir: str | os.PathLike,
    job_name: str,
    config: dict,
    run_id: str | None,
    is_main: bool,
    project: str = "act",
) -> Tracker:
    """Start the tracker `kind`, or continue its run `run_id`; both happen in its own thread.

    Raises:
        UserError: an unknown kind.
        MissingPackage: its package is missing; on every rank.
    """
    if kind not in KINDS:
        raise UserError(f"--tracker={kind} is unknown; use one of {', '.join(KINDS)}.")
    # Looked up on every rank, so that all of them stop; and a folder ./wandb of old runs is no package.
    if kind != "none" and getattr(importlib.util.find_spec(kind), "origin", None) is None:
        raise MissingPackage(f"--tracker={kind} needs its package: pip install {kind}")
    if kind == "none" or not is_main:
        return Tracker(kind, run_id, None)
    resumed = run_id is not None
    # Not from a seeded generator: two runs with one seed are two runs. wandb allows few characters in an id.
    run_id = run_id or f"{re.sub(r'[^A-Za-z0-9_.-]', '-', job_name)[:64]}-{os.urandom(4).hex()}"
    connect = {"tensorboard": _tensorboard, "trackio": _trackio, "wandb": _wandb}[kind]
    config = json.loads(json.dumps(config, default=str))
    run = _Run(Path(run_dir), project, job_name, run_id, resumed, config)
    return Tracker(kind, run_id, lambda: connect(run))


def _tensorboard(run: _Run) -> tuple[Log, Finish]:
    from torch.utils.tensorboard import SummaryWriter

    writers: list[SummaryWriter] = []

    def log(step: int, values: dict[str, float]) -> None:
        if not writers:
            # Values that the stopped run wrote beyond its checkpoint are hidden from the first new step on.
            writers.append(
                SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=step if run.resumed else None)
            )
            writers[0].add_text("config", f"```json\n{json.dumps(run.config, indent=2)}\n```", step)
        for key, value in values.items():
            writers[0].add_scalar(key, value, step)
        writers[0].flush()

    def finish() -> None:
        for writer in writers:
            writer.close()

    return log, finish


def _trackio(run: _Run) -> tuple[Log, Finish]:
    import trackio

    # trackio finds a run by its name, hence the id as name.
    there = trackio.init(project=run.project, name=run.run_id, config=run.config, resume="allow")
    return (lambda step, values: there.log(values, step=step)), there.finish


def _wandb(run: _Run) -> tuple[Log, Finish]:
    import wandb

    mode: Any = os.environ.get("WANDB_MODE")
    if mode is None and not _logged_in(wandb.setup().settings.base_url):
        mode = "offline"
        print(
            f"wandb: no login found; writing offline, later: wandb sync {run.run_dir}/wandb/offline-*",
            flush=True,
        )
    there = wandb.init(
        project=run.project,
        id=run.run_id,
        name=run.job_name,
        dir=str(run.run_dir),
        config=run.config,
        resume="allow",
        mode=mode,
    )
    # wandb drops steps that go back, as they do when an older checkpoint is resumed; ours are an axis.
    there.define_metric("step")
    there.define_metric("*", step_metric="step")
    return (lambda step, values: there.log({"step": step, **values})), there.finish


def _logged_in(base_url: str) -> bool:
    """Whether wandb will find a key; without one it would ask on the terminal, in the middle of a run."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        hosts = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return urllib.parse.urlparse(base_url).hostname in hosts
