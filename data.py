"""Batches for ACT from demonstrations: batch contract, episodes, sample order, loader, statistics.

    time = np.arange(500)[:, None] / 50
    columns = {"observation.state": np.sin(time), "action": np.sin(time + 0.02)}
    train, val, notes = open_columns(DatasetConfig(val_split=0.2), 100, columns, [100] * 5, 50, cameras={})
    batches = TrainBatches(train, 0, batch_size=8, rank=0, world_size=1, accumulation_steps=1, steps=9)
    for batch in to_device(make_loader(batches, num_workers=2), "cpu"): ...

A batch (B samples, S = chunk_size, A action_dim); frames stay uint8 until they are on the device:

    "observation.state" (B, state_dim), "observation.environment_state" (B, env_dim) float32, if any
    "observation.images.NAME"  (B, 3, H, W) uint8, one per camera
    "action" (B, S, A) float32, "action_is_pad" (B, S) bool   past the end the last action repeats
    "index", "episode_index", "frame_index", "task_index" (B,) int64, "timestamp" (B,) float32
    "num_valid" () float32, "noise_seed" (B,) int64           training only, see TrainBatches
    "sample_weight" (B,) float32                              validation only, see ValBatches

Frames come from any FrameSource. LeRobot datasets, videos, images and the cache of decoded frames are
extras/datasets.py, which ends in `open_columns` too; `python data.py check` is extras/check_data.py.
"""

from __future__ import annotations

import atexit
import copy
import math
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

ACTION, STATE, ENV_STATE = "action", "observation.state", "observation.environment_state"
INDEX_COLUMNS = ("index", "episode_index", "frame_index", "timestamp", "task_index")


def open_columns(
    cfg: DatasetConfig,
    chunk_size: int,
    columns: Mapping[str, np.ndarray],
    lengths: Sequence[int],
    fps: float,
    cameras: Mapping[str, FrameSource],
    *,
    episode_ids: Sequence[int] | None = None,
    num_episodes: int | None = None,
    input_order: Sequence[str] = (),
    stored_stats: Stats | None = None,
) -> tuple[EpisodeDataset, EpisodeDataset | None, list[Note]]:
    """Training episodes, validation episodes or None, and notes; frames may come from anywhere.

    Args:
        columns: "action" (N, A); "observation.state", "observation.environment_state" (N, D) if any.
        lengths: frames per episode; they add up to N.
        cameras: by key; cfg.image_size and cfg.cache are applied by extras/datasets.py, not here.
        episode_ids, num_episodes: ids of the episodes given, and how many the whole dataset has.
        input_order: the inputs in the policy's order. Else: state, environment state, cameras.
        stored_stats: statistics of the training episodes, used where available, else computed.
    """
    num_episodes = len(lengths) if num_episodes is None else num_episodes
    train_ids, val_ids = split_episodes(cfg, num_episodes)
    cameras = {key: cameras[key] for key in chosen_cameras(cfg, cameras)}
    episodes = EpisodeDataset(columns, lengths, fps, cameras, chunk_size, episode_ids, input_order)
    train = episodes.select(train_ids)
    train.stats, notes = statistics(cfg, train, stored_stats or {})
    # Validation is normalized as training is, else its loss would be another quantity.
    return train, train.select(val_ids) if val_ids else None, notes


def split_episodes(cfg: DatasetConfig, num_episodes: int) -> tuple[list[int], list[int]]:
    """(training, validation) episodes, each in ascending order and without common members."""
    check_episodes(cfg, num_episodes)
    val = sorted(cfg.val_episodes or ())
    held_out = set(val)
    train = [e for e in sorted(cfg.episodes or range(num_episodes)) if e not in held_out]
    if cfg.val_split:
        count = max(1, round(cfg.val_split * len(train)))
        train, val = train[:-count], train[-count:]
    if not train:
        raise DatasetError("the validation episodes leave none to train on; hold out fewer.")
    return train, val


class EpisodeDataset(Dataset):
    """Frames of chosen episodes, ascending by episode and time; local index i counts from 0.

    Map-style: `train[0]` is one sample, `DataLoader(train, batch_size=8)` works. Picklable at any
    time. `stats` has the form of `statistics`; the other attributes are as in `open_columns`.
    """

    def __init__(
        self,
        columns: Mapping[str, np.ndarray],
        lengths: Sequence[int],
        fps: float,
        cameras: Mapping[str, FrameSource],
        chunk_size: int,
        episode_ids: Sequence[int] | None = None,
        input_order: Sequence[str] = (),
    ) -> None:
        self.fps, self.chunk_size, self.input_order = fps, chunk_size, input_order
        self.cameras = dict(cameras)
        self.stats: dict[str, dict[str, Tensor]] = {}
        self._lengths = np.asarray(lengths, np.int64)
        self._ids = np.asarray(range(len(lengths)) if episode_ids is None else episode_ids, np.int64)
        self.columns = index_columns(self._ids, self._lengths, fps)
        self.columns |= {key: np.ascontiguousarray(values) for key, values in columns.items()}
        check_lengths([*self.columns.items(), *self.cameras.items()], int(self._lengths.sum()))
        self._choose(np.arange(len(self._ids)))

    def _choose(self, chosen: np.ndarray) -> None:
        self.episode_ids, self.num_episodes = [int(e) for e in self._ids[chosen]], len(chosen)
        self.episode_lengths = lengths = self._lengths[chosen]
        self._ends = np.cumsum(self._lengths)[chosen]
        shift = self._ends - np.cumsum(lengths)
        self.rows = np.arange(int(lengths.sum())) + np.repeat(shift, lengths)
        self._last_rows = np.repeat(self._ends - 1, lengths)

    def select(self, episode_ids: Sequence[int]) -> EpisodeDataset:
        """A view of some of the episodes, which shares all data."""
        view = copy.copy(self)
        view._choose(np.searchsorted(self._ids, np.asarray(episode_ids)))
        return view

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One sample: a batch without its first axis."""
        return {key: values[0] for key, values in self.get_batch(np.array([index])).items()}

    def get_batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Samples at local indices; see the file's head for keys and shapes."""
        rows, last = self.rows[indices], self._last_rows[indices]
        keys = [key for key in (*INDEX_COLUMNS, STATE, ENV_STATE) if key in self.columns]
        batch = {key: torch.from_numpy(self.columns[key][rows]) for key in keys}
        steps = rows[:, None] + np.arange(self.chunk_size)  # (B, S) rows, past the episode's end too
        actions = self.columns[ACTION].take(np.minimum(steps, last[:, None]), axis=0)
        batch[ACTION] = torch.from_numpy(actions)
        batch["action_is_pad"] = torch.from_numpy(steps > last[:, None])
        for key, source in self.cameras.items():
            batch[key] = empty_frames((len(rows), 3, *source.shape))
            source.read_into(rows, batch[key])
        return batch

    @property
    def features(self) -> tuple[dict, dict]:
        """(inputs, outputs) in LeRobot's form: {"action": {"type": "ACTION", "shape": [14]}}."""
        return features_of(self)

    def valid_steps(self, indices: np.ndarray) -> np.ndarray:
        """Unpadded steps in the chunk of each frame."""
        return np.minimum(self._last_rows[indices] - self.rows[indices] + 1, self.chunk_size)


class SampleOrder:
    """Which frame stands at position p of the run: a pure function of (seed, p), nothing is stored.

    Epoch p // N has a permutation of [0, N) of its own: a Feistel network on the least power of two
    that holds N, walked until it lands inside. Any p >= 0, N up to 2^62.
    Source: Black and Rogaway 2002, method 3.
    """

    def __init__(self, num_frames: int, seed: int) -> None:
        if not 1 <= num_frames <= 2**62:
            raise DatasetError(f"a sample order needs 1 to 2^62 frames, got {num_frames}.")
        self.num_frames = num_frames
        # Tiny domains make poor permutations, and walking is cheap.
        bits = max(4, (num_frames - 1).bit_length())
        self._left, self._right = np.uint64(bits - bits // 2), np.uint64(bits // 2)
        self._seed = mix_bits(np.array([seed % 2**64], np.uint64))

    def frame(self, positions: np.ndarray) -> np.ndarray:
        """Local indices (int64) at these positions."""
        epoch, x = np.divmod(np.asarray(positions, np.int64).reshape(-1), self.num_frames)
        key = mix_bits(self._seed + epoch.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        x = permuted(x.astype(np.uint64), key, self._left, self._right)
        while (walk := np.flatnonzero(x >= np.uint64(self.num_frames))).size:
            x[walk] = permuted(x[walk], key[walk], self._left, self._right)
        return x.astype(np.int64).reshape(np.shape(positions))

    def noise_seed(self, positions: np.ndarray) -> np.ndarray:
        """One int64 >= 0 for each position, from which all randomness of that sample is derived."""
        p = np.asarray(positions, np.int64).astype(np.uint64)
        mixed = mix_bits(mix_bits(p + np.uint64(0x632BE59BD9B4E019)) ^ self._seed)
        return (mixed >> np.uint64(1)).astype(np.int64)


class TrainBatches(Dataset):
    """Item s is this rank's batch of loop step s: a pure function of s, so a resume just starts at s.

    Step s takes the next batch_size * world_size positions of the order, and each rank its part.
    "num_valid" = unpadded action steps of the whole optimizer window (all ranks and micro-batches) /
    pieces of it (rank, micro-batch). A piece's L1 sum divided by it is the piece's loss; the mean of
    the pieces' losses is the loss of the undivided batch, however it was divided.

    Args:
        steps: loop steps (micro-batches per rank) of the whole run, as --steps.
        start_step, samples_seen: where the run stands; samples_seen is its next sample's position.
    """

    def __init__(
        self,
        dataset: EpisodeDataset,
        seed: int,
        batch_size: int,
        rank: int,
        world_size: int,
        accumulation_steps: int,
        steps: int,
        start_step: int = 0,
        samples_seen: int = 0,
    ) -> None:
        self.dataset, self.order = dataset, SampleOrder(len(dataset), seed)
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.accumulation_steps, self.steps = accumulation_steps, range(start_step, steps)
        self.samples_seen = samples_seen

    def __len__(self) -> int:
        return len(self.steps)

    def position(self, step: int) -> int:
        """Of the first sample of a step, over all ranks."""
        return self.samples_seen + (step - self.steps.start) * self.batch_size * self.world_size

    def window(self, step: int) -> range:
        """The steps that share an optimizer step with this one, cut where the run starts or ends."""
        first = step // self.accumulation_steps * self.accumulation_steps
        last = min(first + self.accumulation_steps, self.steps.stop)
        return range(max(self.steps.start, first), last)

    def windows(self) -> Iterator[range]:
        """The loop steps (micro-batches) of each optimizer step that is still to come."""
        step = self.steps.start
        while step < self.steps.stop:
            yield self.window(step)
            step = self.window(step).stop

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        # Of all ranks and micro-batches of the window, since the loss is divided by their valid steps.
        window = self.window(step)
        positions = np.arange(self.position(window.start), self.position(window.stop))
        frames = self.order.frame(positions)
        begin = self.position(step) - positions[0] + self.rank * self.batch_size
        mine = slice(begin, begin + self.batch_size)
        batch = self.dataset.get_batch(frames[mine])
        valid = self.dataset.valid_steps(frames).sum() / (self.world_size * len(window))
        batch["num_valid"] = torch.tensor(valid, dtype=torch.float32)
        batch["noise_seed"] = torch.from_numpy(self.order.noise_seed(positions[mine]))
        return batch


def make_loader(
    batches: TrainBatches | ValBatches,
    num_workers: int,
    pin_memory: bool = False,
    start_method: str = "forkserver",
    prefetch_factor: int = 2,
) -> DataLoader:
    """The batches of `batches.steps` in order, made by `num_workers` processes (0: by this one)."""
    options: dict[str, Any] = {"batch_size": None, "sampler": batches.steps, "pin_memory": pin_memory}
    options["generator"] = torch.Generator()  # so that nothing is drawn from the global one
    if num_workers == 0:
        return DataLoader(batches, **options)
    options |= {"num_workers": num_workers, "prefetch_factor": prefetch_factor}
    return WorkerLoader(batches, start_method, options)


def to_device(loader: Iterable[dict[str, Tensor]], device: torch.device | str) -> DeviceBatches:
    """Iterator over the batches on the device; `waited_s` sums the time waited for data."""
    return DeviceBatches(loader, torch.device(device))


# ------------------------------------------------------------------------------------------- end of the spine


class UserError(ValueError):
    """The user's to mend, in one sentence: flag, rule, way out. Any other error is a bug."""


class DatasetError(UserError):
    """A dataset that cannot be trained on, or a flag that does not fit it."""


@dataclass(frozen=True)
class DatasetConfig:
    root: str | None = None
    """Directory of a LeRobot dataset, with meta/, data/, videos/. None: --dataset.repo-id."""
    repo_id: str | None = None
    """USER/NAME of a LeRobot dataset: from the local caches, else downloaded."""
    episodes: tuple[int, ...] | None = None
    """Episodes to train on; order changes nothing, and the statistics are theirs. None: all."""
    val_episodes: tuple[int, ...] | None = None
    """Episodes held out for the validation loss, never trained on."""
    val_split: float = 0.0
    """Fraction of the chosen episodes, from the end, that is held out for the validation loss."""
    action_key: str = ACTION
    """The dataset's column that is the action; it becomes "action"."""
    state_key: str = STATE
    """The dataset's column that is the robot's state; it becomes "observation.state"."""
    image_keys: tuple[str, ...] | None = None
    """Cameras to use; their order, that of the image tokens, stays the dataset's. None: all."""
    image_size: tuple[int, int] | None = None
    """Height and width that all frames are resized to (bilinear, antialiased). None: as stored."""
    cache: Literal["auto", "disk", "ram", "off"] = "auto"
    """Decoded frames in memory-mapped files that a node's processes share: "disk" in cache_dir,
    "ram" in /dev/shm until the run ends. "off" decodes on demand. "auto": disk if half the free
    space will do, else off."""
    cache_dir: str | None = None
    """Directory of the frame cache. None: $XDG_CACHE_HOME/act-frames or ~/.cache/act-frames."""
    tolerance_s: float = 1e-4
    """Seconds that a video frame may be away from its row's time; raise it for real clock times."""
    use_imagenet_stats: bool = True
    """Normalize 3-channel cameras with ImageNet's mean and std, as the pretrained backbone expects."""
    min_std: float = 1e-3
    """Least std of a joint of state or action, in its own unit, so that one that hardly moves is not
    blown up by normalization. 0 is LeRobot's rule, 0.01 the original ACT's."""


class Note(NamedTuple):
    """What was decided while a dataset was opened, for the console."""

    level: Literal["info", "warning"]
    text: str
    about: Literal["data", "cache", "statistics"] = "data"


class FrameSource(Protocol):
    """One camera's frames, one per row of the columns. Picklable, for loader workers get a copy."""

    shape: tuple[int, int]  # height, width
    thread_safe: bool  # several threads may call `in_order` at once

    def __len__(self) -> int: ...

    def read_into(self, rows: np.ndarray, out: Tensor) -> None:
        """Write the frames of these rows into out (B, 3, H, W) uint8."""

    def in_order(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """The frames (H, W, 3) uint8 of consecutive rows of one episode."""

    def span_key(self, start: int, stop: int) -> str:
        """Names the content of these frames: equal only for equal frames."""


class ValBatches(Dataset):
    """Every sample exactly once over the ranks, in order. The last batches are filled up with the
    last sample at "sample_weight" 0, so that every rank has as many batches, of one shape."""

    def __init__(self, dataset: EpisodeDataset, batch_size: int, rank: int, world_size: int) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.rank, self.world_size = rank, world_size
        self.steps = range(math.ceil(len(dataset) / (batch_size * world_size)))

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        first = (step * self.world_size + self.rank) * self.batch_size
        indices = first + np.arange(self.batch_size)
        batch = self.dataset.get_batch(np.minimum(indices, len(self.dataset) - 1))
        batch["sample_weight"] = torch.from_numpy((indices < len(self.dataset)).astype(np.float32))
        return batch


class DeviceBatches:
    """On CUDA the next batch is copied on a stream of its own while this one is trained on."""

    def __init__(self, loader: Iterable[dict[str, Tensor]], device: torch.device) -> None:
        self.device, self.waited_s, self._iterator = device, 0.0, iter(loader)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: dict[str, Tensor] | None = None

    def __iter__(self) -> DeviceBatches:
        return self

    def __next__(self) -> dict[str, Tensor]:
        batch = self._next or self._fetch()
        if batch is None:
            raise StopIteration
        if self._stream is not None:
            now = torch.cuda.current_stream(self.device)
            now.wait_stream(self._stream)
            # The memory belongs to the side stream, which must not hand it out while we compute.
            for value in batch.values():
                value.record_stream(now)
            self._next = self._fetch()
        return batch

    def _fetch(self) -> dict[str, Tensor] | None:
        before = time.perf_counter()
        with worker_errors():
            batch = next(self._iterator, None)
        self.waited_s += time.perf_counter() - before
        if batch is None:
            return None
        with torch.cuda.stream(self._stream):  # None: does nothing
            return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}


# ---- parts of the above
def features_of(dataset: EpisodeDataset) -> tuple[dict, dict]:
    kinds = {STATE: "STATE", ENV_STATE: "ENV"}
    columns, cameras = dataset.columns, dataset.cameras
    inputs: dict[str, dict] = {}
    for key in dict.fromkeys([*dataset.input_order, *kinds, *cameras]):
        if key in cameras:
            inputs[key] = {"type": "VISUAL", "shape": [3, *cameras[key].shape]}
        elif key in kinds and key in columns:
            inputs[key] = {"type": kinds[key], "shape": [columns[key].shape[1]]}
    return inputs, {ACTION: {"type": "ACTION", "shape": [columns[ACTION].shape[1]]}}


def index_columns(ids: np.ndarray, lengths: np.ndarray, fps: float) -> dict[str, np.ndarray]:
    """The columns that LeRobot's datasets have beside the data, where nobody gives other ones."""
    total = int(lengths.sum())
    frame = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return {
        "index": np.arange(total),
        "episode_index": np.repeat(ids, lengths),
        "frame_index": frame,
        "timestamp": (frame / fps).astype(np.float32),
        "task_index": np.zeros(total, np.int64),
    }


def empty_frames(shape: tuple[int, ...]) -> Tensor:
    """Uninitialised uint8; in a worker it lies in the shared memory that it is sent through."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape)  # type: ignore[call-overload]


def permuted(x: np.ndarray, key: np.ndarray, left_bits: np.uint64, right_bits: np.uint64) -> np.ndarray:
    """A keyed permutation of the numbers of left_bits + right_bits bits: six Feistel rounds."""
    left, right = x >> right_bits, x & ((np.uint64(1) << right_bits) - np.uint64(1))
    for turn in range(6):
        key = key + np.uint64(0xD1B54A32D192ED03)
        if turn % 2:
            right = right ^ (mix_bits(left + key) >> (np.uint64(64) - right_bits))
        else:
            left = left ^ (mix_bits(right + key) >> (np.uint64(64) - left_bits))
    return (left << right_bits) | right


def mix_bits(x: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer: every bit depends on all. Source: Steele et al. 2014."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# ---- loader workers
WORKERS_IGNORE = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class WorkerLoader(DataLoader):
    """Its workers come from a server process that has torch imported and none of our threads and locks.

    They use one thread each and ignore SIGINT, SIGTERM and SIGUSR1: a signal to the whole process
    group (from torchrun, Slurm, a terminal) is left to the trainer, which ends them.
    """

    def __init__(self, batches: Dataset, start_method: str, options: dict[str, Any]) -> None:
        context = torch.multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(["__main__", "torch", __name__])
        options |= {"worker_init_fn": start_worker, "multiprocessing_context": context}
        super().__init__(batches, persistent_workers=True, **options)

    def __iter__(self):
        previous = self._iterator
        with signals_blocked():
            iterator = super().__iter__()
        if iterator is not previous:
            atexit.register(kill_workers, iterator._workers)  # type: ignore[attr-defined]
        return iterator


def kill_workers(workers: list) -> None:
    """At exit Python sends its daemons SIGTERM and waits: an error would hang, for these ignore it."""
    for worker in workers:
        worker.kill()


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Processes started inside do not get the signals: they inherit the mask of this thread.

    Ours are kept: another thread takes them at once, or they stay pending until the end.
    """
    resource_tracker.ensure_running()  # its start would unblock the signals (Python 3.11)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WORKERS_IGNORE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(worker: int) -> None:
    for number in WORKERS_IGNORE:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=exit_with_trainer, daemon=True).start()


def exit_with_trainer() -> None:
    """A killed trainer takes its workers along. torch's own watch is on the parent process, which here
    is the server, and the server stays as long as it has workers (torch 2.14)."""
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        trainer.join()
        os._exit(1)


@contextmanager
def worker_errors() -> Iterator[None]:
    """What to do about a worker that was killed or has no memory left; other errors stay as they are."""
    killed = (
        "a worker of the loader was killed, by the system for want of memory perhaps; use fewer "
        "--num-workers, and continue with --resume."
    )
    full = (
        "the loader's workers ran out of /dev/shm or file handles; use fewer --num-workers, or "
        "more of it (docker run --shm-size=8g, ulimit -n 65536)."
    )
    shortage = "Bus error|No space left|shared memory|unable to (write|open|mmap)|Too many open files"
    try:
        yield
    except (ConnectionError, EOFError, RuntimeError) as error:
        if not isinstance(error, RuntimeError) or "exited unexpectedly" in str(error):
            raise RuntimeError(killed) from error
        if re.search(shortage, str(error)):
            raise RuntimeError(full) from error
        raise


# ---- refusals
def check_episodes(cfg: DatasetConfig, num_episodes: int) -> None:
    last = num_episodes - 1
    for flag, episodes in episode_flags(cfg):
        if outside := [e for e in episodes if not 0 <= e <= last]:
            raise DatasetError(f"{flag} names episode {outside[0]}; the dataset has 0 to {last}.")


def episode_flags(cfg: DatasetConfig) -> list[tuple[str, tuple[int, ...]]]:
    flags = [("--dataset.episodes", cfg.episodes), ("--dataset.val-episodes", cfg.val_episodes)]
    return [(flag, episodes) for flag, episodes in flags if episodes is not None]


def check_lengths(sources: Iterable[tuple[str, Sized]], total: int) -> None:
    for key, rows in sources:
        if len(rows) != total:
            raise DatasetError(f"{key} has {len(rows)} rows, but the episodes have {total} frames.")


def chosen_cameras(cfg: DatasetConfig, cameras: Iterable[str]) -> list[str]:
    """The keys of the cameras that are used, in the dataset's order."""
    keys = list(cameras)
    for key in cfg.image_keys or ():
        if key not in keys:
            names = ", ".join(keys) or "none"
            raise DatasetError(f"--dataset.image-keys names {key}; the cameras are {names}.")
    return [key for key in keys if cfg.image_keys is None or key in cfg.image_keys]


# ---- statistics
Stats = dict[str, dict[str, np.ndarray]]
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def statistics(
    cfg: DatasetConfig, train: EpisodeDataset, stored: Stats
) -> tuple[dict[str, dict[str, Tensor]], list[Note]]:
    """The one set of statistics of a run: for training, in the checkpoint, at inference.

    They are those of the episodes that are trained on: the stored ones, else computed from the rows;
    for cameras ImageNet's. The std of a joint of state or action is at least cfg.min_std.

    Returns:
        {key: {"mean", "std", "min", "max", "count", ...: float32}}, cameras (3, 1, 1); notes.
    """
    stats = {key: stored[key] for key in INDEX_COLUMNS if key in stored}
    notes: list[Note] = []
    for key in (key for key in (ACTION, STATE, ENV_STATE) if key in train.columns):
        stats[key] = stored[key] if key in stored else measure(train.columns[key][train.rows])
        still = np.flatnonzero(stats[key]["std"] < cfg.min_std)
        if len(still):
            joints, least = ", ".join(map(str, still)), stats[key]["std"].min()
            text = f"{key} hardly moves in joint {joints}: its std, at least {least:.2g}, is raised"
            text += f" to --dataset.min-std={cfg.min_std:g}."
            notes.append(Note("warning", text, "statistics"))
            stats[key] = stats[key] | {"std": np.maximum(stats[key]["std"], cfg.min_std)}
    imagenet = {name: np.reshape(value, (3, 1, 1)) for name, value in IMAGENET.items()}
    for key in train.cameras:
        if key not in stored and not cfg.use_imagenet_stats:
            way = "pass stored_stats, or use --dataset.use-imagenet-stats"
            raise DatasetError(f"camera {key} has no statistics; {way}.")
        stats[key] = stored.get(key, imagenet)
    tensors = {
        key: {name: torch.tensor(np.array(v), dtype=torch.float32) for name, v in entry.items()}
        for key, entry in stats.items()
    }
    return tensors, notes


def measure(values: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics over the first axis, in float64."""
    values = values.astype(np.float64)
    with np.errstate(invalid="ignore"):  # NaN in, NaN out
        stats = {name: getattr(values, name)(axis=0) for name in ("min", "max", "mean", "std")}
        quantiles = np.quantile(values, (0.01, 0.1, 0.5, 0.9, 0.99), axis=0)
    named = dict(zip(("q01", "q10", "q50", "q90", "q99"), quantiles))
    return stats | {"count": np.array([len(values)])} | named


if __name__ == "__main__":
    from extras import check_data

    raise SystemExit(check_data.main())
