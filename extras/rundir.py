"""The run directory, the lock that keeps a second run out of it, and the signals that end a run in order.

cfg = with_run_dir(cfg, cluster, source)      # named by rank 0, made, and proved to be writable
lock = lock_run_dir(run_dir(cfg))             # held while the file is open
stop = StopOnSignal(cluster, cfg.max_hours)
if stop.poll(): ...                           # all ranks, after the same step
"""

import contextlib
import fcntl
import math
import os
import signal
import time
import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import ckpt
import dist
from extras.flags import UserError

LOCK = ".lock"
"""File in a run directory that its run holds a lock on."""


def run_dir(cfg: Any) -> Path:
    """The run directory, once `with_run_dir` has decided it."""
    assert cfg.output_dir is not None
    return Path(cfg.output_dir)


def with_run_dir(cfg: Any, cluster: dist.Cluster, source: Path | None) -> Any:
    """`cfg` with its run directory, which rank 0 names and makes. Collective: call on every rank.

    Args:
        cfg: train.Config.
        source: the checkpoint that is resumed; its own run directory may hold files.
    """
    now = datetime.now()
    name = cfg.output_dir or f"outputs/train/{now:%Y-%m-%d}/{now:%H-%M-%S}_{cfg.job_name}"
    name = dist.from_main(cluster, name)  # clocks differ by a second, and there is one directory
    with dist.raise_together(cluster):
        if cluster.is_main:
            make_run_dir(name, cfg.resume == "auto", source)
    return replace(cfg, output_dir=name)


def make_run_dir(name: str, resumes_what_is_there: bool, source: Path | None) -> None:
    """Make the directory, or refuse one that holds files of something else."""
    path = Path(name)
    if path.exists() and not path.is_dir():
        raise UserError(f"--output-dir={name} is a file; name a directory.")
    resumes = resumes_what_is_there or (source is not None and ckpt.run_dir_of(source) == path.resolve())
    try:
        if path.is_dir() and any(p.name != LOCK for p in path.iterdir()) and not resumes:
            raise UserError(
                f"--output-dir={name} holds files already; name another directory, or resume the run in it "
                f"with --resume {name}."
            )
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".write-test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        why = f"--output-dir={name} cannot be written ({error.strerror}); name another directory."
        raise UserError(why) from error
    metrics = path / "metrics.jsonl"
    if metrics.exists() and not metrics.is_file():
        raise UserError(f"{metrics} is not a file; move it away, or name another --output-dir.")


@contextlib.contextmanager
def removed_if_refused(directory: Path | None) -> Iterator[None]:
    """Remove a run directory that this run has made, if set-up ends in an error before anything is in it."""
    try:
        yield
    except BaseException:
        if directory is not None:
            with contextlib.suppress(OSError):  # not empty, or gone
                (directory / LOCK).unlink(missing_ok=True)
                directory.rmdir()
        raise


def lock_run_dir(directory: Path) -> typing.TextIO | None:
    """The run directory's lock, held while the file is open; None where the file system has no locks.

    A run that is just ending is waited for, since a scheduler starts its successor at once.
    Raises:
        UserError: another run writes there.
    """
    try:
        lock = (directory / LOCK).open("a+")
        for tries_left in range(10, -1, -1):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not tries_left:
                    lock.seek(0)
                    raise UserError(
                        f"--output-dir={directory} is being written by another run ({lock.read().strip()}); "
                        "wait for its end, or name another directory."
                    ) from None
                time.sleep(0.5)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        lock.flush()
        return lock
    except OSError:
        return None


class StopOnSignal:
    """SIGTERM, SIGUSR1, Ctrl-C or --max-hours on any rank: all leave the loop after the same step, with a
    checkpoint.

    Build it before set-up's last collective, so that every rank listens when the first goes on to start its
    loader's workers, which may take seconds. torchrun and Slurm signal the whole group: the workers ignore it
    (see data.py), this process must not. Before, a signal ends the process at once: nothing is lost.
    """

    TIME_IS_UP = 1  # votes are signals' numbers, of which this is none that is caught here

    def __init__(self, cluster: dist.Cluster, max_hours: float | None = None) -> None:
        self._end = math.inf if max_hours is None else time.monotonic() + max_hours * 3600
        self._signalled = 0
        self._agreed = 0
        self._signalled_at = math.inf
        self._is_main = cluster.is_main
        self._vote = dist.StopVote(cluster)
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        self._handlers_before = {number: signal.signal(number, self._note) for number in numbers}

    def restore(self) -> None:
        """Signals act as before again: nothing is left that a checkpoint would save."""
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        # A second Ctrl-C ends the process at once; torchrun passes the first one on a second time.
        if number == signal.SIGINT and time.monotonic() > self._signalled_at + 2:
            raise KeyboardInterrupt
        if not self._signalled:
            self._signalled, self._signalled_at = number, time.monotonic()
            if self._is_main:  # print is not for signal handlers: it may be inside of another print
                os.write(2, f"{signal.Signals(number).name}: stopping after this step\n".encode())

    def is_asked(self) -> bool:
        """Whether this rank has been signalled. The others may not have been: see `poll`."""
        return self._signalled > 0

    def poll(self) -> bool:
        """Whether to stop. Collective: call on every rank at the same steps."""
        vote = self._signalled
        if not vote and time.monotonic() > self._end:
            vote = self.TIME_IS_UP
        self._agreed = self._vote.poll(vote)
        return self._agreed > 0

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell has it: 143, 138, 130; 0 without a signal."""
        return 128 + self._agreed if self._agreed > self.TIME_IS_UP else 0

    @property
    def reason(self) -> str | None:
        if self._agreed == self.TIME_IS_UP:
            return "--max-hours"
        return signal.Signals(self._agreed).name if self._agreed else None
