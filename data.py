"""LeRobot data sets as batches for ACT: reader, frame cache, sample order, loader, and a check of a data set.

    python data.py check --root DIR [--fix-stats]   every problem of a data set, named; exit 1 if there is any
    python data.py cache --root DIR                 decode its frames into the cache ahead of a run

    train, val = open_dataset(DatasetConfig(root="DIR"), chunk_size=100)
    batches = TrainBatches(train, seed=0, batch_size=8, rank=0, world_size=1, accumulation_steps=1, steps=100)
    for batch in to_device(make_loader(batches, num_workers=4, pin_memory=True), device): ...

A batch (B samples, S = chunk_size, A action_dim); frames stay uint8 until they are on the device:

    "observation.state" (B, state_dim), "observation.environment_state" (B, env_dim) float32, if the set has it
    "observation.images.NAME"  (B, 3, H, W) uint8, one for each camera
    "action" (B, S, A) float32, "action_is_pad" (B, S) bool   past an episode's end its last action is repeated
    "index", "episode_index", "frame_index", "task_index" (B,) int64, "timestamp" (B,) float32
    "num_valid" () float32, "noise_seed" (B,) int64           training only, see TrainBatches
    "sample_weight" (B,) float32                              validation only, see ValBatches

Read: LeRobot v3.0, v2.1 and v2.0; AV1, H.264, H.265 and what else PyAV's FFmpeg decodes; PNG and JPEG inside
parquet. Needs pyarrow for a data set on disk and av for its videos. All files are JSON, parquet, images or
videos: nothing that is read can run code, and a path in the metadata cannot leave the data set's directory.

The rules, each in one place: which episodes (`split_episodes`), which statistics (`_statistics`), which order
(`SampleOrder`), which frame belongs to a row (`_match_frames`), what is cached and where (`cached`).
"""

import copy
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

ACTION, STATE, ENV_STATE = "action", "observation.state", "observation.environment_state"
INDEX_COLUMNS = ("index", "episode_index", "frame_index", "timestamp", "task_index")
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CACHE_FORMAT = "1"  # part of every cache key: raise it when the bytes of a cached frame change
AUTO_CACHE_GB = 200  # what --dataset.cache auto may take, beside its rule of half the free disk
MAX_DECODERS = 8  # open videos of one camera in one process


class DatasetError(ValueError):
    """A data set that cannot be trained on, or a flag that does not fit it: one sentence for the user."""


@dataclass(frozen=True)
class DatasetConfig:
    root: str | None = None
    """Directory of a LeRobot data set, the one that holds meta/, data/ and videos/. None: --dataset.repo-id."""
    repo_id: str | None = None
    """USER/NAME of a LeRobot data set: found in the local caches, downloaded only if it is in none of them."""
    episodes: tuple[int, ...] | None = None
    """Episodes to train on; their order changes nothing, and the statistics are theirs. None: all."""
    val_episodes: tuple[int, ...] | None = None
    """Episodes held out for the validation loss, never trained on."""
    val_split: float = 0.0
    """Fraction of the chosen episodes, taken from the end, that is held out for the validation loss."""
    action_key: str = ACTION
    """The data set's column that is the action; it becomes "action"."""
    state_key: str = STATE
    """The data set's column that is the robot's state; it becomes "observation.state"."""
    image_keys: tuple[str, ...] | None = None
    """Cameras to use; their order stays the data set's, which is that of the image tokens. None: all."""
    image_size: tuple[int, int] | None = None
    """Height and width that all frames are resized to (bilinear, antialiased). None: as stored."""
    cache: Literal["auto", "disk", "ram", "off"] = "auto"
    """Decoded frames in memory-mapped files that a node's processes share: "disk" in cache_dir, "ram" in
    /dev/shm until the run ends. "off" decodes on demand. "auto": disk if half its free space will do, else off."""
    cache_dir: str | None = None
    """Directory of the frame cache. None: $XDG_CACHE_HOME/act-frames or ~/.cache/act-frames."""
    tolerance_s: float = 1e-4
    """Seconds that a video frame may be away from its row's time; raise it for real clock times."""
    use_imagenet_stats: bool = True
    """Normalise 3-channel cameras with ImageNet's mean and std, as the pretrained backbone expects."""
    min_std: float = 1e-3
    """Least std of a joint of state or action, in its own unit, so that one that hardly moves is not blown
    up by normalisation. 0 is LeRobot's rule, 0.01 the original ACT's."""


# ---- open a data set ---------------------------------------------------------------------------------------
def open_dataset(cfg: DatasetConfig, chunk_size: int) -> tuple["EpisodeDataset", "EpisodeDataset | None"]:
    """Read a LeRobot data set: (training episodes, validation episodes or None), checked and with its frames cached.

    What was decided stands in `notes` of the first, a line each; lines that begin with "warning:" deserve an eye.

    Raises:
        ValueError: one sentence, for everything that would stop the training later: a wrong flag, missing or
            broken files, metadata that does not add up, frames off their timestamps, NaN, no space for the cache.
        ImportError: pyarrow or av is needed and not installed; names the pip line.
    """
    findings = _Findings(strict=True)
    meta = _read_metadata(resolve_root(cfg), findings)
    train_ids, val_ids = split_episodes(cfg, len(meta.episodes))
    rows = _read_rows(meta, sorted(train_ids + val_ids), cfg, findings)
    cameras, gray = _open_cameras(meta, rows, cfg, findings)
    names = _vector_keys(meta, cfg)
    table = _Table(
        rows.columns, rows.lengths, meta.fps, cameras, rows.ids, gray,
        stats=_statistics_on_disk(meta, train_ids, cfg, cameras),
        num_episodes=len(meta.episodes),
        order=[names.get(key, key) for key in meta.features],
    )  # fmt: skip
    notes = [f"data set {meta.root}: {len(meta.episodes)} episodes at {meta.fps:g} fps", *findings.warnings]
    return _assemble(cfg, chunk_size, table, train_ids, val_ids, notes)


def open_columns(
    cfg: DatasetConfig,
    chunk_size: int,
    columns: dict[str, np.ndarray],
    lengths: Sequence[int],
    fps: float,
    cameras: dict[str, Any],
) -> tuple["EpisodeDataset", "EpisodeDataset | None"]:
    """As `open_dataset`, from arrays in memory and frames from anywhere: the embedded task, or a set of your own.

    Args:
        columns: "action" (N, A) and, if there are any, "observation.state" and "observation.environment_state" (N, D).
        lengths: frames of each episode; they add up to N.
        cameras: frame sources by key: picklable objects with shape (H, W), __len__ (N), get(row) -> (H, W, 3) uint8,
            cache_key() -> a string that is equal only for equal frames, and optionally in_order(start, stop) -> frames.
    """
    train_ids, val_ids = split_episodes(cfg, len(lengths))
    cameras = {key: cameras[key] for key in _known_cameras(cfg, list(cameras))}
    table = _Table(columns, lengths, fps, cameras, list(range(len(lengths))), num_episodes=len(lengths))
    return _assemble(cfg, chunk_size, table, train_ids, val_ids, [])


@dataclass
class _Table:
    """What the two ways to open a set have in common; rows and frames are those of the episodes `ids`."""

    columns: dict[str, np.ndarray]
    lengths: Sequence[int]
    fps: float
    cameras: dict[str, Any]
    ids: list[int]
    gray: set[str] = field(default_factory=set)  # cameras with one channel
    stats: dict[str, dict[str, np.ndarray]] = field(
        default_factory=dict
    )  # as given, of the training episodes
    num_episodes: int = 0  # that exist, loaded or not
    order: list[str] = field(default_factory=list)  # of features


def split_episodes(cfg: DatasetConfig, num_episodes: int) -> tuple[list[int], list[int]]:
    """(training, validation) episodes, each in ascending order and without common members."""
    everything = list(range(num_episodes))
    for flag, chosen in (("episodes", cfg.episodes), ("val-episodes", cfg.val_episodes)):
        if chosen is None:
            continue
        if not chosen:
            raise DatasetError(
                f"--dataset.{flag} chooses no episode; name some of 0 to {num_episodes - 1}, or leave it out."
            )
        outside = sorted(set(chosen) - set(everything))
        if outside:
            raise DatasetError(
                f"--dataset.{flag} names episode {outside[0]}, but the data set has 0 to {num_episodes - 1}."
            )
        twice = sorted({e for e in chosen if list(chosen).count(e) > 1})
        if twice:
            raise DatasetError(f"--dataset.{flag} names episode {twice[0]} twice; name each once.")
    if not 0 <= cfg.val_split < 1:
        raise DatasetError(f"--dataset.val-split={cfg.val_split} is no fraction; use 0 (off) or less than 1.")
    if cfg.val_split and cfg.val_episodes:
        raise DatasetError(
            "--dataset.val-split and --dataset.val-episodes both choose the validation episodes; use one."
        )
    train = sorted(cfg.episodes if cfg.episodes is not None else everything)
    if cfg.val_episodes:
        val = sorted(cfg.val_episodes)
        both = sorted(set(train) & set(val))
        if both and cfg.episodes is not None:
            raise DatasetError(
                f"episode {both[0]} is in --dataset.episodes and in --dataset.val-episodes; it belongs to one."
            )
        train = [e for e in train if e not in set(val)]
    else:
        held_out = max(1, round(cfg.val_split * len(train))) if cfg.val_split else 0
        train, val = train[: len(train) - held_out], train[len(train) - held_out :]
    if not train:
        raise DatasetError("the validation episodes leave none to train on; hold out fewer.")
    return train, val


def _assemble(
    cfg: DatasetConfig,
    chunk_size: int,
    table: _Table,
    train_ids: list[int],
    val_ids: list[int],
    notes: list[str],
) -> tuple["EpisodeDataset", "EpisodeDataset | None"]:
    """The common end of both ways to open a set: resize, cache, statistics, and the two views."""
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise DatasetError(f"chunk size {chunk_size} is no number of steps; use 1 or more.")
    cameras = table.cameras
    if cfg.image_size is not None:
        height_width = tuple(cfg.image_size)
        if len(height_width) != 2 or not all(1 <= n <= 8192 for n in height_width):
            raise DatasetError(f"--dataset.image-size={cfg.image_size} is no height and width in pixels.")
        cameras = {
            key: source if tuple(source.shape) == height_width else Resized(source, height_width)
            for key, source in cameras.items()
        }
    ends = np.cumsum(np.asarray(table.lengths, np.int64)).tolist()
    spans = {e: (end - n, end) for e, end, n in zip(table.ids, ends, table.lengths)}
    cameras = cached(
        cameras, [spans[e] for e in sorted(train_ids + val_ids)], cfg.cache, cfg.cache_dir, notes
    )
    stats, origin = _statistics(cfg, table, cameras, [spans[e] for e in train_ids], notes)
    notes.append(f"statistics from {len(train_ids)} of {table.num_episodes} episodes ({origin})")
    base = EpisodeDataset(
        table.columns,
        table.lengths,
        fps=table.fps,
        cameras=cameras,
        stats=stats,
        chunk_size=chunk_size,
        episode_ids=table.ids,
        order=table.order,
    )
    train = base.select(train_ids)
    short, padded = train.padding()
    if padded > 0.5:
        notes.append(f"warning: {padded:.0%} of the target steps are padding ({short} of {len(train_ids)} episodes are shorter than the chunk of {chunk_size}); a smaller --policy.chunk-size wastes less.")  # fmt: skip
    train.notes = notes
    return train, base.select(val_ids) if val_ids else None


class EpisodeDataset(Dataset):
    """Frames of chosen episodes, in ascending order of episode and time; local index i counts from 0.

    Picklable at any time: open videos and mapped files stay behind.

    Args: as `open_columns`, and
        stats: by key and by "mean", "std", "min", "max", ...; see `_statistics`.
        episode_ids: what the episodes are called, ascending; None counts from 0.
        order: the inputs in the order that the policy gets them; None is state, environment state, cameras.
    """

    def __init__(
        self, columns, lengths, *, fps, cameras, stats, chunk_size, episode_ids=None, order=None
    ) -> None:
        lengths = np.asarray(lengths, np.int64)
        total = int(lengths.sum())
        ids = np.arange(len(lengths)) if episode_ids is None else np.asarray(episode_ids, np.int64)
        frame = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        given = {
            "index": np.arange(total),
            "episode_index": np.repeat(ids, lengths),
            "frame_index": frame,
            "timestamp": (frame / fps).astype(np.float32),
            "task_index": np.zeros(total, np.int64),
        } | dict(columns)
        assert all(len(values) == total for values in given.values()), (
            "columns of another length than the episodes"
        )
        self.columns = {key: np.ascontiguousarray(values) for key, values in given.items()}
        self.lengths, self.ids, self.fps, self.cameras, self.stats = lengths, ids, fps, cameras, stats
        self.chunk_size, self.order = chunk_size, order or []
        self.notes: list[str] = []
        self._choose(np.arange(len(lengths)))

    def _choose(self, places: np.ndarray) -> None:
        ends = np.cumsum(self.lengths)[places]
        lengths = self.lengths[places]
        self.episode_ids = [int(e) for e in self.ids[places]]
        self.episode_lengths = lengths
        starts = np.cumsum(lengths) - lengths
        self._rows = np.arange(int(lengths.sum())) + np.repeat(ends - lengths - starts, lengths)
        self._last_rows = np.repeat(ends - 1, lengths)

    def select(self, episode_ids: Sequence[int]) -> "EpisodeDataset":
        """A view of some episodes; it shares all data."""
        view = copy.copy(self)
        view._choose(np.searchsorted(self.ids, np.asarray(episode_ids)))
        return view

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_episodes(self) -> int:
        return len(self.episode_ids)

    @property
    def features(self) -> tuple[dict, dict]:
        """(input, output) features in LeRobot's policy form, {"observation.state": {"type": "STATE", "shape": [14]}}."""
        kinds = {STATE: "STATE", ENV_STATE: "ENV"}
        inputs = {
            k: {"type": kinds[k], "shape": [self.columns[k].shape[1]]} for k in kinds if k in self.columns
        }
        inputs |= {k: {"type": "VISUAL", "shape": [3, *source.shape]} for k, source in self.cameras.items()}
        inputs = {key: inputs[key] for key in dict.fromkeys([*self.order, *inputs]) if key in inputs}
        return inputs, {ACTION: {"type": "ACTION", "shape": [self.columns[ACTION].shape[1]]}}

    def valid_steps(self, indices: np.ndarray) -> np.ndarray:
        """Unpadded steps in the chunk of each frame."""
        return np.minimum(self._last_rows[indices] - self._rows[indices] + 1, self.chunk_size)

    def padding(self) -> tuple[int, float]:
        """(episodes shorter than the chunk, share of padded steps over all chunks)"""
        short = int((self.episode_lengths < self.chunk_size).sum())
        valid = self.valid_steps(np.arange(len(self))).sum()
        return short, 1 - float(valid) / (len(self) * self.chunk_size)

    def get_batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Samples at local indices; see the file's head for keys and shapes."""
        rows, last = self._rows[indices], self._last_rows[indices]
        batch = {
            key: torch.from_numpy(self.columns[key][rows])
            for key in (*INDEX_COLUMNS, STATE, ENV_STATE)
            if key in self.columns
        }
        steps = rows[:, None] + np.arange(self.chunk_size)
        batch[ACTION] = torch.from_numpy(self.columns[ACTION].take(np.minimum(steps, last[:, None]), axis=0))
        batch["action_is_pad"] = torch.from_numpy(steps > last[:, None])
        for key, source in self.cameras.items():
            frames = _new_frames((len(rows), 3, *source.shape))
            if isinstance(source, CachedFrames):
                source.read_into(rows, frames)
            else:
                for frame, row in zip(frames, rows):
                    frame.copy_(torch.from_numpy(source.get(int(row))).permute(2, 0, 1))
            batch[key] = frames
        return batch


def _new_frames(shape: tuple[int, ...]) -> Tensor:
    """Uninitialised uint8; inside a loader worker in the shared memory it is sent through, which saves a copy."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape)  # type: ignore[call-overload]


# ---- order, batches, loader --------------------------------------------------------------------------------
def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: uint64 -> uint64, each bit depends on all. Source: Steele et al. 2014."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class SampleOrder:
    """Which frame stands at position p of the run: a pure function of (seed, p), with nothing stored.

    Epoch p // N is a permutation of [0, N) of its own: a Feistel network on the smallest power of two that holds N,
    walked until it lands inside. Positions may be any integers >= 0, N up to 2^62. Source: Black and Rogaway 2002.
    """

    ROUNDS = 6

    def __init__(self, num_frames: int, seed: int) -> None:
        if not 1 <= num_frames <= 2**62:
            raise DatasetError(f"a sample order needs 1 to 2^62 frames, got {num_frames}.")
        self.num_frames = num_frames
        bits = max(
            4, (num_frames - 1).bit_length()
        )  # tiny domains make poor permutations; walking is cheap there
        self._left, self._right = np.uint64(bits - bits // 2), np.uint64(bits // 2)
        self._seed = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))

    def frame(self, positions: np.ndarray) -> np.ndarray:
        """Local indices (int64) at these positions."""
        p = np.asarray(positions, np.int64).reshape(-1)
        epoch, x = (part.astype(np.uint64) for part in np.divmod(p, self.num_frames))
        key = _mix(self._seed + epoch * np.uint64(0x9E3779B97F4A7C15))
        inside = np.uint64(self.num_frames)
        x = self._permute(x, key)
        while (walk := np.flatnonzero(x >= inside)).size:
            x[walk] = self._permute(x[walk], key[walk])
        return x.astype(np.int64).reshape(np.shape(positions))

    def _permute(self, x: np.ndarray, key: np.ndarray) -> np.ndarray:
        one = np.uint64(1)
        left, right = x >> self._right, x & ((one << self._right) - one)
        for turn in range(self.ROUNDS):
            key = key + np.uint64(0xD1B54A32D192ED03)
            if turn % 2:
                right = right ^ (_mix(left + key) >> (np.uint64(64) - self._right))
            else:
                left = left ^ (_mix(right + key) >> (np.uint64(64) - self._left))
        return (left << self._right) | right

    def noise_seed(self, positions: np.ndarray) -> np.ndarray:
        """One int64 >= 0 for each position, for all randomness of that sample."""
        p = np.asarray(positions, np.int64).astype(np.uint64)
        return (_mix(_mix(p + np.uint64(0x632BE59BD9B4E019)) ^ self._seed) >> np.uint64(1)).astype(np.int64)


class TrainBatches(Dataset):
    """Item s is this rank's whole batch of loop step s: a pure function of s, so a resume only starts at another s.

    Step s takes the next batch_size * world_size positions of the order and each rank its part. "num_valid" is the
    count of unpadded action steps of the optimizer window that s lies in, over all ranks and micro-batches, divided
    by the number of (rank, micro-batch) pieces: with it the plain mean over pieces is the undivided batch's loss.

    Args:
        steps: the last step + 1, of the whole run.
        start_step, samples_seen: where the run stands; samples_seen is the position of start_step's first sample.
    """

    def __init__(
        self,
        dataset,
        seed,
        batch_size,
        rank,
        world_size,
        accumulation_steps,
        steps,
        start_step=0,
        samples_seen=0,
    ) -> None:
        self.dataset, self.order = dataset, SampleOrder(len(dataset), seed)
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.accumulation_steps, self.steps = accumulation_steps, range(start_step, steps)
        self.samples_seen = samples_seen

    def __len__(self) -> int:
        return len(self.steps)

    def position(self, step: int) -> int:
        """Of the step's first sample over all ranks."""
        return self.samples_seen + (step - self.steps.start) * self.batch_size * self.world_size

    def window(self, step: int) -> range:
        """The steps whose gradients make one optimizer step with this one's; cut where the run starts and ends."""
        accumulation = self.accumulation_steps
        first = step // accumulation * accumulation
        return range(max(self.steps.start, first), min(first + accumulation, self.steps.stop))

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        steps = self.window(step)
        window = np.arange(self.position(steps.start), self.position(steps.stop))
        frames = self.order.frame(window)
        mine = slice(self.position(step) + self.rank * self.batch_size - window[0], None)
        mine = slice(mine.start, mine.start + self.batch_size)
        batch = self.dataset.get_batch(frames[mine])
        pieces = self.world_size * len(steps)
        batch["num_valid"] = torch.tensor(
            self.dataset.valid_steps(frames).sum() / pieces, dtype=torch.float32
        )
        batch["noise_seed"] = torch.from_numpy(self.order.noise_seed(window[mine]))
        return batch


class ValBatches(Dataset):
    """Every sample exactly once over the ranks, in order. The tail repeats the last sample with "sample_weight" 0,
    so that shapes and the number of batches are the same everywhere."""

    def __init__(self, dataset, batch_size, rank, world_size) -> None:
        self.dataset, self.batch_size, self.rank, self.world_size = dataset, batch_size, rank, world_size
        self.steps = range(math.ceil(len(dataset) / (batch_size * world_size)))

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        places = (step * self.world_size + self.rank) * self.batch_size + np.arange(self.batch_size)
        batch = self.dataset.get_batch(np.minimum(places, len(self.dataset) - 1))
        batch["sample_weight"] = torch.from_numpy((places < len(self.dataset)).astype(np.float32))
        return batch


def make_loader(
    batches: TrainBatches | ValBatches,
    num_workers: int,
    pin_memory: bool = False,
    start_method: str = "forkserver",
    prefetch_factor: int = 2,
) -> DataLoader:
    """The batches of `batches.steps` in order, prepared by `num_workers` processes (0: in this one).

    Workers come from a server process that has torch imported and has no thread and no lock of ours, use one
    thread each, and ignore SIGINT, SIGTERM and SIGUSR1: whoever signals the whole process group (torchrun, a
    terminal, Slurm) stops the trainer, which stops them.

    Raises:
        ValueError: the batches in flight do not fit into /dev/shm.
    """
    if num_workers == 0:
        return DataLoader(
            batches, batch_size=None, sampler=batches.steps, collate_fn=_same, generator=torch.Generator()
        )
    source = batches.dataset
    frame_bytes = sum(3 * math.prod(camera.shape) for camera in source.cameras.values())
    need = num_workers * prefetch_factor * batches.batch_size * frame_bytes
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else need
    if need > free:
        raise DatasetError(f"--num-workers={num_workers} needs {_size(need)} of shared memory for batches in flight, and /dev/shm has {_size(free)} free; use fewer workers, a smaller --batch-size, or more shared memory (docker run --shm-size=8g).")  # fmt: skip
    context = torch.multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["__main__", "torch", "numpy", __name__])
    return _Loader(
        batches,
        batch_size=None,
        sampler=batches.steps,
        num_workers=num_workers,
        collate_fn=_same,
        pin_memory=pin_memory,
        worker_init_fn=_start_worker,
        multiprocessing_context=context,
        generator=torch.Generator(),  # of its own: the global one is not drawn from
        prefetch_factor=prefetch_factor,
        persistent_workers=True,
    )


def _same(batch: Any) -> Any:
    return batch


WORKERS_IGNORE = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class _Loader(DataLoader):
    def __iter__(self):
        with _deaf_children():
            return super().__iter__()


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started inside ignore the signals from their first instruction; ours wait until the end.

    Blocked signals stay pending although they are ignored (Linux), so one that arrives meanwhile reaches our handler.
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # starting it later would unblock the signals (Python 3.11)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, WORKERS_IGNORE)
    main = threading.current_thread() is threading.main_thread()
    handlers = {s: signal.signal(s, signal.SIG_IGN) for s in WORKERS_IGNORE} if main else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _start_worker(worker: int) -> None:
    for number in WORKERS_IGNORE:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)


def to_device(loader: DataLoader, device: torch.device | str) -> "DeviceBatches":
    """Iterate over the loader with batches on the device; `.waited_s` counts the seconds spent waiting for data."""
    return DeviceBatches(loader, torch.device(device))


class DeviceBatches:
    """On CUDA the next batch is copied on a stream of its own while the current one is trained on."""

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        self.device, self.waited_s = device, 0.0
        self._iterator = iter(loader)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: dict[str, Tensor] | None = None

    def __iter__(self) -> "DeviceBatches":
        return self

    def __next__(self) -> dict[str, Tensor]:
        if self._stream is None:
            batch = self._fetch()
            if batch is None:
                raise StopIteration
            return {key: value.to(self.device) for key, value in batch.items()}
        batch = self._next if self._next is not None else self._fetch()
        if batch is None:
            raise StopIteration
        now = torch.cuda.current_stream(self.device)
        now.wait_stream(self._stream)
        for value in batch.values():
            value.record_stream(now)
        self._next = self._fetch()
        return batch

    def _fetch(self) -> dict[str, Tensor] | None:
        before = time.perf_counter()
        try:
            batch = next(self._iterator, None)
        except RuntimeError as error:
            if re.search(
                r"Bus error|No space left|shared memory|unable to (write|open|mmap)|Too many open files",
                str(error),
            ):
                raise RuntimeError("the loader's workers ran out of shared memory (/dev/shm) or file handles; use fewer --num-workers, or more of it (docker run --shm-size=8g, ulimit -n 65536).") from error  # fmt: skip
            raise
        self.waited_s += time.perf_counter() - before
        if batch is None or self._stream is None:
            return batch
        with torch.cuda.stream(self._stream):
            return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}


# ---- frame sources: what a camera's frames come from; row counts over the loaded episodes ------------------
class VideoFrames:
    """Frames of one camera from videos, decoded on demand. The frame of a row is known by file and pts, exactly."""

    thread_safe = True  # in_order opens a decoder of its own

    def __init__(self, shape, files, digests, keyframes, file_of_row, pts_of_row) -> None:
        self.shape, self.files, self.digests, self.keyframes = shape, files, digests, keyframes
        self.file_of_row, self.pts_of_row = file_of_row, pts_of_row
        self._open: OrderedDict[int, _Decoder] = OrderedDict()
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self.pts_of_row)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_open": OrderedDict()}

    def get(self, row: int) -> np.ndarray:
        """(H, W, 3) uint8"""
        if self._pid != os.getpid():  # forked: the file offsets are shared with the parent, so open anew
            self._open, self._pid = OrderedDict(), os.getpid()
        number = int(self.file_of_row[row])
        decoder = self._open.pop(number, None) or _Decoder(self.files[number], self.keyframes[number])
        self._open[number] = decoder
        if len(self._open) > MAX_DECODERS:
            self._open.popitem(last=False)[1].close()
        return decoder.read(int(self.pts_of_row[row]), self.shape)

    def in_order(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Rows of one episode, decoded forward."""
        number = int(self.file_of_row[start])
        decoder = _Decoder(self.files[number], self.keyframes[number])
        try:
            for row in range(start, stop):
                yield decoder.read(int(self.pts_of_row[row]), self.shape, forward=row > start)
        finally:
            decoder.close()

    def span_key(self, start: int, stop: int) -> str:
        digest = self.digests[int(self.file_of_row[start])]
        return f"video {digest} {_hash(self.pts_of_row[start:stop].tobytes())} {self.shape}"


class _Decoder:
    """One open video. Decodes on from where it is, and seeks to the key frame before the wanted one otherwise."""

    def __init__(self, path: Path, keyframes: np.ndarray) -> None:
        av = _import("av", "videos")
        self.path, self.keyframes = path, keyframes
        with _told(path):
            self.container = av.open(str(path))
            self.stream = self.container.streams.video[0]
            self.stream.codec_context.thread_count = 1  # workers are the parallelism
        self.frames: Iterator | None = None
        self.at: int | None = None
        self.frame: Any = None

    def read(self, pts: int, shape: tuple[int, int], forward: bool = False) -> np.ndarray:
        with _told(self.path):
            if self.at != pts or self.frame is None:
                self._go_to(pts, forward)
            if self.frame.is_corrupt:
                raise DatasetError(
                    f"{self.path}: the frame at {self._seconds(pts)} s is damaged; replace the file."
                )
            image = self.frame.to_ndarray(format="rgb24")
        if image.shape[:2] != tuple(shape):
            raise DatasetError(f"{self.path}: frames are {image.shape[0]}x{image.shape[1]}, but meta/info.json says {shape[0]}x{shape[1]}; correct the feature's shape.")  # fmt: skip
        return image

    def _go_to(self, pts: int, forward: bool) -> None:
        key = max(0, int(np.searchsorted(self.keyframes[:, 0], pts, "right")) - 1)
        seeks: list[int | None] = [
            int(self.keyframes[key, 0]),
            int(self.keyframes[key, 1]),
            int(self.keyframes[0].min()),
        ]
        if self.frames is not None and self.at is not None and self.at < pts:
            if forward or self.keyframes[key, 0] <= self.at:
                seeks.insert(0, None)
        for target in seeks:  # a later entry is needed only where a container seeks past the wanted frame
            if target is not None:
                self.container.seek(target, stream=self.stream)
                self.frames = self.container.decode(self.stream)
            assert self.frames is not None
            for frame in self.frames:
                self.at, self.frame = frame.pts, frame
                if frame.pts is not None and frame.pts >= pts:
                    break
            if self.at == pts:
                return
        raise DatasetError(
            f"{self.path}: the frame at {self._seconds(pts)} s cannot be decoded; the file is damaged."
        )

    def _seconds(self, pts: int) -> str:
        return f"{float(pts * self.stream.time_base):.4f}"

    def close(self) -> None:
        self.frames = self.frame = None
        self.container.close()


class EncodedFrames:
    """Images stored inside parquet: their PNG or JPEG bytes lie in mapped files, and get() decodes just the one."""

    thread_safe = True

    def __init__(
        self, shape, blobs: list[Path], blob_of_row, start_of_row, size_of_row, origin: list[Path]
    ) -> None:
        self.shape, self.blobs, self.origin = shape, blobs, origin
        self.blob_of_row, self.start_of_row, self.size_of_row = blob_of_row, start_of_row, size_of_row
        self._maps: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.blob_of_row)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_maps": {}}

    def get(self, row: int) -> np.ndarray:
        from torchvision.io import ImageReadMode, decode_image

        number = int(self.blob_of_row[row])
        if number not in self._maps:
            self._maps[number] = _map_file(self.blobs[number])
        start, size = int(self.start_of_row[row]), int(self.size_of_row[row])
        with _told(self.origin[number], f"the image of row {row}"):
            image = decode_image(self._maps[number][start : start + size], ImageReadMode.RGB)
        if image.dtype != torch.uint8 or tuple(image.shape[1:]) != tuple(self.shape):
            raise DatasetError(f"{self.origin[number]}: an image is {tuple(image.shape[1:])} {image.dtype}, but meta/info.json says {tuple(self.shape)} and 8 bits; correct the feature.")  # fmt: skip
        return image.permute(1, 2, 0).numpy()

    def span_key(self, start: int, stop: int) -> str:
        names = f"{self.blobs[int(self.blob_of_row[start])].name} {_hash(self.start_of_row[start:stop].tobytes())}"
        return f"images {names} {self.shape}"


class Resized:
    """Another source's frames at (H, W), bilinear with antialiasing; the same bytes whether cached or on demand."""

    def __init__(self, source: Any, shape: tuple[int, int]) -> None:
        self.source, self.shape, self.thread_safe = (
            source,
            tuple(shape),
            getattr(source, "thread_safe", False),
        )

    def __len__(self) -> int:
        return len(self.source)

    def get(self, row: int) -> np.ndarray:
        return self._resize(self.source.get(row))

    def in_order(self, start: int, stop: int) -> Iterator[np.ndarray]:
        return (self._resize(frame) for frame in _in_order(self.source, start, stop))

    def span_key(self, start: int, stop: int) -> str:
        return f"{_span_key(self.source, start, stop)} to {self.shape}"

    def _resize(self, frame: np.ndarray) -> np.ndarray:
        image = torch.from_numpy(frame).permute(2, 0, 1)[None]
        image = torch.nn.functional.interpolate(image, self.shape, mode="bilinear", antialias=True)
        return image[0].permute(1, 2, 0).numpy()


def _in_order(source: Any, start: int, stop: int) -> Iterator[np.ndarray]:
    if hasattr(source, "in_order"):
        return source.in_order(start, stop)
    return (source.get(row) for row in range(start, stop))


def _span_key(source: Any, start: int, stop: int) -> str:
    return (
        source.span_key(start, stop)
        if hasattr(source, "span_key")
        else f"{source.cache_key()} {start} {stop}"
    )


class CachedFrames:
    """Decoded frames of one camera in files of the frame cache, one file an episode: raw uint8 (length, 3, H, W)."""

    def __init__(self, shape, num_rows: int, spans: list[tuple[int, int]], files: list[Path]) -> None:
        self.shape, self.num_rows, self.files = tuple(shape), num_rows, files
        self.starts = np.array([start for start, _ in spans])
        self.lengths = [stop - start for start, stop in spans]
        self._maps: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return self.num_rows

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_maps": {}}

    def read_into(self, rows: np.ndarray, out: Tensor) -> None:
        """Copy the frames of these rows into out (B, 3, H, W)."""
        episodes = np.searchsorted(self.starts, rows, "right") - 1
        for frame, episode, row in zip(out, episodes.tolist(), (rows - self.starts[episodes]).tolist()):
            if episode not in self._maps:
                size = (self.lengths[episode], 3, *self.shape)
                self._maps[episode] = _map_file(self.files[episode], math.prod(size)).view(size)
            frame.copy_(self._maps[episode][row])

    def get(self, row: int) -> np.ndarray:
        out = torch.empty((1, 3, *self.shape), dtype=torch.uint8)
        self.read_into(np.array([row]), out)
        return out[0].permute(1, 2, 0).numpy()


def _map_file(path: Path, size: int | None = None) -> Tensor:
    """A file's bytes, mapped privately: nothing is read before it is used, and no file handle stays open."""
    with _told(path):
        found = path.stat().st_size
        if size is not None and found != size:
            raise DatasetError(
                f"{path} has {found} bytes, not {size}; delete it, and the next run builds it again."
            )
        return torch.from_file(str(path), shared=False, size=found, dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)  # fmt: skip


# ---- frame cache -------------------------------------------------------------------------------------------
def cached(
    cameras: dict[str, Any], spans: list[tuple[int, int]], mode: str, cache_dir: str | None, notes: list[str]
) -> dict[str, Any]:
    """Sources that read decoded frames from mapped files; what is missing is decoded first, once on a node.

    A file holds one camera's frames of one episode. Its name is a hash of the frames' origin (the video's bytes, the
    frames' times) and size, so that a changed video, another resize or another subset never reads wrong frames, and
    a copy of the data set reads the same ones. It is written under another name and renamed when whole, so a killed
    build leaves nothing that could be used; a lock on that name makes other processes wait and then share.
    Only the episodes that are used are cached.
    """
    if not cameras or mode == "off":
        return cameras
    folder = _ram_folder() if mode == "ram" else default_cache_dir(cache_dir)
    jobs: list[tuple[Path, Any, int, int]] = []
    result = {}
    for key, source in cameras.items():
        names = [_hash(f"{CACHE_FORMAT} {_span_key(source, *span)}".encode()) for span in spans]
        files = [folder / f"{name}.frames" for name in names]
        result[key] = CachedFrames(source.shape, len(source), spans, files)
        jobs += [
            (f, source, start, stop)
            for f, (start, stop) in zip(files, spans)
            if not _whole(f, source, start, stop)
        ]
    need = sum((stop - start) * 3 * math.prod(source.shape) for _, source, start, stop in jobs)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if mode == "auto" and need > min(free / 2, AUTO_CACHE_GB * 1e9):
            notes.append(f"warning: frames are decoded on demand: the cache would need {_size(need)} and {folder} has {_size(free)} free; --dataset.cache disk forces it, --dataset.image-size makes it smaller.")  # fmt: skip
            return cameras
        if need > free:
            raise DatasetError(f"--dataset.cache {mode} needs {_size(need)} in {folder}, which has {_size(free)} free; use --dataset.cache-dir on another disk, a smaller --dataset.image-size, or --dataset.cache off.")  # fmt: skip
        _build(jobs)
    except OSError as error:
        if mode != "auto":
            raise DatasetError(f"--dataset.cache {mode} cannot write to {folder} ({error.strerror}); use --dataset.cache-dir, or --dataset.cache off.") from error  # fmt: skip
        notes.append(f"warning: frames are decoded on demand: {folder} cannot be written ({error.strerror}).")
        return cameras
    notes.append(
        f"frame cache: {folder}, {len(spans) * len(cameras) - len(jobs)} of {len(spans) * len(cameras)} files were there"
    )
    return result


def default_cache_dir(cache_dir: str | None = None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "act-frames"


def _ram_folder() -> Path:
    """/dev/shm/act-frames-USER, removed at exit by the last run that uses it (a lock says who does)."""
    import atexit

    folder = Path("/dev/shm") / f"act-frames-{os.getuid()}"
    try:
        folder.mkdir(exist_ok=True)
        users = open(folder / "users", "w")  # noqa: SIM115 (held until exit)
        fcntl.flock(users, fcntl.LOCK_SH)
    except OSError as error:
        raise DatasetError(
            f"--dataset.cache ram cannot write to {folder} ({error.strerror}); use --dataset.cache disk."
        ) from error
    owner = os.getpid()

    def leave() -> None:
        if os.getpid() == owner:
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except OSError:
                pass

    atexit.register(leave)
    return folder


def _whole(path: Path, source: Any, start: int, stop: int) -> bool:
    try:
        if path.stat().st_size == (stop - start) * 3 * math.prod(source.shape):
            return True
        path.unlink()  # cut short by something else than us: a publication is always whole
    except OSError:
        pass
    return False


def _build(jobs: list[tuple[Path, Any, int, int]]) -> None:
    """Decode the episodes of all jobs, several at a time where the source allows it, with a progress bar."""
    if not jobs:
        return
    progress = _Progress("frame cache", sum(stop - start for _, _, start, stop in jobs))
    stop_all = threading.Event()

    def build(job: tuple[Path, Any, int, int], wait: bool) -> bool:
        path, source, start, stop = job

        def write(file) -> None:
            for frame in _in_order(source, start, stop):
                if stop_all.is_set():
                    raise InterruptedError("stopped")
                file.write(np.ascontiguousarray(frame.transpose(2, 0, 1)).data)
                progress.add(1)

        return _build_once(path, write, wait)

    threads = (
        len(os.sched_getaffinity(0)) if all(getattr(job[1], "thread_safe", False) for job in jobs) else 1
    )
    pool = ThreadPoolExecutor(threads)
    try:
        later = []
        for wait in (False, True):  # first what nobody else is building, then what another process has begun
            done = list(pool.map(lambda job, wait=wait: build(job, wait), later if wait else jobs))
            later = [job for job, fine in zip(jobs, done) if not fine]
    finally:
        stop_all.set()
        pool.shutdown(wait=True, cancel_futures=True)
        progress.close()


def _build_once(path: Path, write: Callable, wait: bool = True) -> bool:
    """Create a file whole or not at all, by one process of those that try. False: another is at it (wait=False).

    The lock is the kernel's, on the unfinished file, so it ends with the process that held it.
    """
    unfinished = path.with_suffix(".building")
    while not path.exists():
        with open(unfinished, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                return False
            mine = unfinished.exists() and os.fstat(file.fileno()).st_ino == unfinished.stat().st_ino
            if path.exists() or not mine:
                if mine:
                    unfinished.unlink()
                continue
            try:
                file.truncate(0)  # what a killed build left
                write(file)
                file.flush()
                os.fsync(file.fileno())
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
            os.replace(unfinished, path)
    return True


class _Progress:
    """A bar with the time to go: redrawn on a terminal, a line every 10 s elsewhere. Thread-safe."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self.start = self.shown = time.monotonic()
        self.lock, self.terminal = threading.Lock(), sys.stderr.isatty()

    def add(self, frames: int) -> None:
        with self.lock:
            self.done += frames
            now = time.monotonic()
            if now - self.shown >= (0.2 if self.terminal else 10.0):
                self.shown = now
                self._print()

    def _print(self) -> None:
        took = time.monotonic() - self.start
        rate = self.done / max(took, 1e-9)
        left = time.strftime("%H:%M:%S", time.gmtime((self.total - self.done) / max(rate, 1e-9)))
        line = f"{self.what}: {self.done}/{self.total} frames ({self.done / self.total:.0%}), {rate:.0f}/s, {left} to go"
        print(
            f"\r{line}\x1b[K" if self.terminal else line,
            end="" if self.terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        if self.done and (self.terminal or time.monotonic() - self.start > 1):
            self._print()
            if self.terminal:
                print(file=sys.stderr)


# ---- where a data set is -----------------------------------------------------------------------------------
def resolve_root(cfg: DatasetConfig) -> Path:
    """The data set's directory. The network is used only where nothing local is found, a repo id is given and
    HF_HUB_OFFLINE is not set."""
    if cfg.repo_id is not None and not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", cfg.repo_id):
        raise DatasetError(f"--dataset.repo-id={cfg.repo_id} is not of the form USER/NAME.")
    if cfg.root is not None:
        root = Path(cfg.root).expanduser()
        places = [root, *([root / cfg.repo_id] if cfg.repo_id else [])]
    elif cfg.repo_id is not None:
        places = _local_places(cfg.repo_id)
    else:
        raise DatasetError("no data set: give --dataset.root DIR or --dataset.repo-id USER/NAME.")
    for place in places:
        if (place / "meta" / "info.json").is_file():
            return place
    looked = ", ".join(str(place) for place in places)
    if cfg.repo_id is None:
        raise DatasetError(f"--dataset.root={cfg.root} holds no LeRobot data set (no meta/info.json); give the directory that has meta/, data/ and videos/.")  # fmt: skip
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise DatasetError(f"--dataset.repo-id={cfg.repo_id} is in none of {looked}, and HF_HUB_OFFLINE forbids the download; copy it there, or use --dataset.root.")  # fmt: skip
    hub = _import("huggingface_hub", "downloads from the hub")
    try:
        return Path(hub.snapshot_download(cfg.repo_id, repo_type="dataset", local_dir=cfg.root))
    except Exception as error:
        raise DatasetError(f"--dataset.repo-id={cfg.repo_id} is in none of {looked}, and the download failed ({_first_line(error)}); copy it there, or use --dataset.root.") from error  # fmt: skip


def _local_places(repo_id: str) -> list[Path]:
    """Where LeRobot and the hub keep a data set: as a directory of its name, or as the newest snapshot of a cache."""
    env = os.environ
    hf_home = Path(
        env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    ).expanduser()
    lerobot = [Path(env["HF_LEROBOT_HOME"]).expanduser()] if env.get("HF_LEROBOT_HOME") else []
    lerobot.append(hf_home / "lerobot")
    hubs = [env[name] for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE") if env.get(name)]
    places = [home / repo_id for home in lerobot]
    for hub in (*(home / "hub" for home in lerobot), *(Path(h).expanduser() for h in hubs), hf_home / "hub"):
        folder = hub / f"datasets--{repo_id.replace('/', '--')}"
        snapshots = sorted(folder.glob("snapshots/*"), key=lambda path: path.stat().st_mtime, reverse=True)
        main = folder / "refs" / "main"
        if main.is_file():
            snapshots.insert(0, folder / "snapshots" / main.read_text().strip())
        places += snapshots or [folder]
    return list(dict.fromkeys(places))


# ---- metadata ----------------------------------------------------------------------------------------------
class _Findings:
    """Collects what is wrong. Strict (opening a set to train): a problem is raised as it is found."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.problems: list[str] = []
        self.warnings: list[str] = []

    def problem(self, text: str) -> None:
        """Training cannot go on."""
        if self.strict:
            raise DatasetError(text)
        self.problems.append(text)

    def doubt(self, text: str) -> None:
        """Wrong, but training can go on."""
        if self.strict:
            self.warn(text)
        else:
            self.problems.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(f"warning: {text}")

    @contextmanager
    def reading(self, path: Path, what: str = "") -> Iterator[None]:
        try:
            with _told(path, what):
                yield
        except DatasetError as error:
            self.problem(str(error))


@contextmanager
def _told(path: Path, what: str = "") -> Iterator[None]:
    """Turns whatever a broken file makes a reader raise into one sentence that names the file."""
    try:
        yield
    except (DatasetError, ImportError, InterruptedError):
        raise
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is missing; copy the data set again, or download it.") from error
    except Exception as error:
        at = f"{what} in {path}" if what else str(path)
        raise DatasetError(f"{at} cannot be read ({type(error).__name__}: {_first_line(error)}); the file is damaged or of another kind.") from error  # fmt: skip


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")


def _import(name: str, what: str):
    try:
        module = __import__(name)
        if name == "pyarrow":
            import pyarrow.parquet  # noqa: F401
        return module
    except ImportError as error:
        raise ImportError(f"{what} need {name} ({_first_line(error)}): pip install {name}") from error


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass
class _Episode:
    length: int
    first: int  # row of its first frame in the whole data set
    file: Path
    videos: dict[str, tuple[Path, float, float | None]]  # file, from and to (s)


@dataclass
class _Metadata:
    root: Path
    version: str
    fps: float
    features: dict[str, dict]
    episodes: list[_Episode]
    stats: dict[str, dict[str, np.ndarray]]  # of the whole set; empty where it has none
    episode_stats: Callable[
        [list[int], str], list[dict[str, np.ndarray]]
    ]  # of some episodes, for one feature

    def cameras(self) -> list[str]:
        return [key for key, f in self.features.items() if f["dtype"] in ("video", "image")]


def _read_metadata(root: Path, findings: _Findings) -> _Metadata:
    """meta/: features, episodes and statistics of any supported version, in one form, checked against each other."""
    path = root / "meta" / "info.json"
    with _told(path):
        info = _read_json(path)
        version = str(info["codebase_version"])
        if not re.fullmatch(r"v(3\.\d+|2\.[01])", version):
            newer = re.match(r"v?([4-9]|\d\d)", version)
            way = (
                "update this program"
                if newer
                else "convert it with LeRobot: python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=USER/NAME --root=DIR --push-to-hub=false (older than v2: its convert_dataset_v1_to_v2 first)"
            )
            raise DatasetError(
                f"{path}: codebase_version is {version}, and v3.0, v2.1 and v2.0 can be read; {way}."
            )
        fps = float(info["fps"])
        if not 0 < fps < 1e6:
            raise DatasetError(f"{path}: fps is {info['fps']}; it must be a positive number.")
        features = info["features"]
        for key, feature in features.items():
            shape = feature["shape"] = [int(n) for n in feature["shape"]]
            if not isinstance(feature["dtype"], str) or any(not 0 < n < 1e8 for n in shape):
                raise DatasetError(f"{path}: feature {key} has dtype {feature['dtype']} and shape {shape}.")
        missing = [
            key for key in ("episode_index", "frame_index", "timestamp", "index") if key not in features
        ]
        if missing:
            raise DatasetError(f"{path}: feature {missing[0]} is missing, which every LeRobot data set has.")
    videos = [key for key, f in features.items() if f["dtype"] == "video"]
    read = _read_episodes_v3 if version.startswith("v3") else _read_episodes_v2
    episodes, episode_stats = read(root, info, videos, findings)
    if not episodes:
        raise DatasetError(f"{root}: the data set has no episode.")
    total = sum(episode.length for episode in episodes)
    for name, found in (("total_episodes", len(episodes)), ("total_frames", total)):
        if info.get(name) is not None and info[name] != found:
            findings.problem(f"{path}: {name} is {info[name]}, but the episodes' metadata has {found}.")
    stats_path = root / "meta" / "stats.json"
    stats: dict[str, dict[str, np.ndarray]] = {}
    if stats_path.exists():
        with findings.reading(stats_path):
            stats = {
                key: {name: np.asarray(value, np.float64) for name, value in entry.items()}
                for key, entry in _read_json(stats_path).items()
            }
    elif version != "v2.1":  # which keeps them by episode only
        findings.doubt(f"{stats_path} is missing; the statistics are computed from the data.")
    return _Metadata(root, version, fps, features, episodes, stats, episode_stats)


def _read_json(path: Path) -> dict:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise DatasetError(f"{path} is no JSON object; the file is damaged or of another kind.")
    return content


def _inside(root: Path, relative: str) -> Path:
    """A path from the metadata, which may not leave the data set."""
    parts = PurePosixPath(relative)
    if parts.is_absolute() or ".." in parts.parts or "\0" in relative or len(relative) > 1000:
        raise DatasetError(
            f"{root}: the path {relative[:200]!r} in the metadata leaves the data set's directory."
        )
    return root / parts


def _read_episodes_v3(root: Path, info: dict, videos: list[str], findings: _Findings):
    pa = _import("pyarrow", "data sets on disk")
    files = sorted((root / "meta" / "episodes").glob("*/*.parquet"))
    if not files:
        raise DatasetError(f"{root / 'meta' / 'episodes'} has no parquet file; copy the data set again.")
    rows: list[dict] = []
    for path in files:
        with _told(path):
            parquet = pa.parquet.ParquetFile(path, page_checksum_verification=True)
            names = [name for name in parquet.schema_arrow.names if not name.startswith("stats/")]
            rows += [row | {"_file": path} for row in parquet.read(names).to_pylist()]
    try:
        rows.sort(key=lambda row: row["episode_index"])
    except (KeyError, TypeError) as error:
        raise DatasetError(f"{files[0]} has rows without an episode_index; the file is damaged.") from error
    episodes: list[_Episode] = []
    first = 0
    for number, row in enumerate(rows):
        path = row["_file"]
        with _told(path, f"episode {number}"):
            if row["episode_index"] != number:
                raise DatasetError(f"{path}: episode {number} is missing or episode {row['episode_index']} is there twice; copy the data set again.")  # fmt: skip
            length, start, end = row["length"], row["dataset_from_index"], row["dataset_to_index"]
            if not isinstance(length, int) or length < 1:
                findings.problem(
                    f"{path}: episode {number} has length {length}; an episode has at least 1 frame."
                )
            if (start, end) != (first, first + length):
                findings.problem(f"{path}: episode {number} spans frames {start} to {end}, but with {length} frames after {first} it must span {first} to {first + length}.")  # fmt: skip
            where = {name: int(row[f"data/{name}"]) for name in ("chunk_index", "file_index")}
            data_file = _inside(root, info["data_path"].format(**where))
            clips = {}
            for key in videos:
                where = {name: int(row[f"videos/{key}/{name}"]) for name in ("chunk_index", "file_index")}
                begin, to = (row.get(f"videos/{key}/{name}_timestamp") for name in ("from", "to"))
                clips[key] = (
                    _inside(root, info["video_path"].format(video_key=key, **where)),
                    float(begin),
                    to,
                )
            episodes.append(_Episode(length, first, data_file, clips))
            first += length

    def episode_stats(ids: list[int], key: str) -> list[dict[str, np.ndarray]]:
        found: dict[int, dict] = {}
        for path in files:
            with _told(path):
                parquet = pa.parquet.ParquetFile(path)
                names = [n for n in parquet.schema_arrow.names if n.rpartition("/")[0] == f"stats/{key}"]
                for row in parquet.read(["episode_index", *names]).to_pylist():
                    found[row["episode_index"]] = {n.rpartition("/")[2]: np.asarray(row[n], np.float64) for n in names if row[n] is not None}  # fmt: skip
        return [found.get(e, {}) for e in ids]

    return episodes, episode_stats


def _read_episodes_v2(root: Path, info: dict, videos: list[str], findings: _Findings):
    def lines(path: Path) -> list[dict]:
        with _told(path):
            return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]

    path = root / "meta" / "episodes.jsonl"
    rows = lines(path)
    episodes: list[_Episode] = []
    first = 0
    with _told(path):
        for number, row in enumerate(sorted(rows, key=lambda row: row["episode_index"])):
            length = row["length"]
            if row["episode_index"] != number:
                raise DatasetError(f"{path}: episode {number} is missing or episode {row['episode_index']} is there twice; copy the data set again.")  # fmt: skip
            if not isinstance(length, int) or length < 1:
                findings.problem(
                    f"{path}: episode {number} has length {length}; an episode has at least 1 frame."
                )
            where = {"episode_index": number, "episode_chunk": number // int(info.get("chunks_size", 1000))}
            clips = {
                key: (_inside(root, info["video_path"].format(video_key=key, **where)), 0.0, None)
                for key in videos
            }
            episodes.append(_Episode(length, first, _inside(root, info["data_path"].format(**where)), clips))
            first += length

    def episode_stats(ids: list[int], key: str) -> list[dict[str, np.ndarray]]:
        path = root / "meta" / "episodes_stats.jsonl"
        if not path.exists():
            return [{} for _ in ids]
        found = {row["episode_index"]: row["stats"].get(key, {}) for row in lines(path)}
        return [{name: np.asarray(v, np.float64) for name, v in found.get(e, {}).items()} for e in ids]

    return episodes, episode_stats


# ---- rows: the columns of the chosen episodes --------------------------------------------------------------
@dataclass
class _Rows:
    ids: list[int]
    lengths: list[int]
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    file_of_row: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    row_in_file: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


def _vector_keys(meta: _Metadata, cfg: DatasetConfig) -> dict[str, str]:
    """Column of the data set -> name in the batch, for action, state and environment state."""
    vectors = [key for key, f in meta.features.items() if f["dtype"] not in ("video", "image", "string")]
    have = [key for key in vectors if key not in INDEX_COLUMNS]
    if cfg.action_key not in have:
        raise DatasetError(
            f"--dataset.action-key={cfg.action_key} is no column of {meta.root}; it has {', '.join(have) or 'none'}."
        )
    names = {cfg.action_key: ACTION}
    if cfg.state_key in have:
        names[cfg.state_key] = STATE
    elif cfg.state_key != STATE:
        raise DatasetError(
            f"--dataset.state-key={cfg.state_key} is no column of {meta.root}; it has {', '.join(have)}."
        )
    if ENV_STATE in have and ENV_STATE not in names:
        names[ENV_STATE] = ENV_STATE
    for key in names:
        shape = meta.features[key]["shape"]
        if len(shape) > 1:
            raise DatasetError(
                f"{meta.root / 'meta/info.json'}: {key} has shape {shape}; state and action are vectors, so flatten it."
            )
    return names


def _read_rows(meta: _Metadata, ids: list[int], cfg: DatasetConfig, findings: _Findings) -> _Rows:
    """Read and check the table rows of some episodes, in ascending order; images are left where they are."""
    pa = _import("pyarrow", "data sets on disk")
    names = _vector_keys(meta, cfg) | {key: key for key in INDEX_COLUMNS if key in meta.features}
    rows = _Rows(ids, [meta.episodes[e].length for e in ids])
    parts: dict[int, dict[str, np.ndarray]] = {}
    for path in dict.fromkeys(meta.episodes[e].file for e in ids):
        here = [e for e in ids if meta.episodes[e].file == path]
        with findings.reading(path):
            parquet = pa.parquet.ParquetFile(path, page_checksum_verification=True)
            missing = [key for key in names if key not in parquet.schema_arrow.names]
            if missing:
                raise DatasetError(f"{path} has no column {missing[0]}, which meta/info.json names.")
            table = parquet.read(list(names))
            columns = {
                name: _to_numpy(table.column(key), meta.features[key]["shape"], f"{path}: column {key}", pa)
                for key, name in names.items()
            }
            for e in here:
                with findings.reading(path, f"episode {e}"):
                    parts[e] = _episode_rows(meta, e, columns, findings) | {
                        "_file": np.full(meta.episodes[e].length, len(rows.files), np.int32)
                    }
            rows.files.append(path)
    if any(
        e not in parts for e in ids
    ):  # only when collecting problems: go on with the episodes that are whole
        rows.ids = [e for e in ids if e in parts]
        rows.lengths = [meta.episodes[e].length for e in rows.ids]
        if not rows.ids:
            raise DatasetError(f"{meta.root}: no episode can be read.")
    joined = {key: np.concatenate([parts[e][key] for e in rows.ids]) for key in parts[rows.ids[0]]}
    rows.file_of_row, rows.row_in_file = joined.pop("_file"), joined.pop("_row")
    rows.columns = joined
    return rows


def _to_numpy(column, shape: list[int], where: str, pa) -> np.ndarray:
    """A parquet column as (rows, width), or (rows,) for the index columns; lists of any nesting are flattened."""
    count, width = len(column), math.prod(shape)
    values = column.combine_chunks()
    if isinstance(values, pa.ChunkedArray):
        values = (
            pa.concat_arrays(values.chunks) if values.num_chunks else pa.array([], column.type.value_type)
        )
    nested = False
    while (
        pa.types.is_list(values.type)
        or pa.types.is_large_list(values.type)
        or pa.types.is_fixed_size_list(values.type)
    ):
        if values.null_count:
            raise DatasetError(f"{where} is empty in row {values.is_null().index(True).as_py()}.")
        if not nested and len(shape) == 1:
            fixed = pa.types.is_fixed_size_list(values.type)
            sizes = np.full(count, values.type.list_size) if fixed else values.value_lengths().to_numpy()
            if (sizes != width).any():
                row = int(np.flatnonzero(sizes != width)[0])
                raise DatasetError(
                    f"{where} has {sizes[row]} values in row {row}, but meta/info.json says {width}."
                )
        nested, values = True, values.flatten()
    if values.null_count:
        row = int(values.is_null().index(True).as_py()) // max(1, width)
        raise DatasetError(f"{where} is empty in row {row}.")
    array = values.to_numpy(zero_copy_only=False)
    if len(array) != count * width:
        raise DatasetError(
            f"{where} has {len(array)} values in {count} rows, but meta/info.json says {width} a row."
        )
    return array.reshape(count, width) if nested or width > 1 else array


def _episode_rows(
    meta: _Metadata, e: int, columns: dict[str, np.ndarray], findings: _Findings
) -> dict[str, np.ndarray]:
    """One episode's rows of a file's columns, checked."""
    episode = meta.episodes[e]
    path, length = episode.file, episode.length
    inside = columns["episode_index"].reshape(-1)
    places = np.flatnonzero(inside == e)
    if len(places) != length:
        has = f"it has {len(places)}" if len(places) else f"it holds episodes {_ranges(np.unique(inside))}"
        raise DatasetError(
            f"{path}: the metadata says that {length} rows of episode {e} are here, but {has}."
        )
    part: dict[str, np.ndarray] = {"_row": places}
    for name, values in columns.items():
        values = values[places]
        if name in INDEX_COLUMNS:
            part[name] = values.reshape(-1).astype(np.float32 if name == "timestamp" else np.int64)
            if name == "timestamp":
                part["_exact"] = values.reshape(-1).astype(np.float64)
        else:
            part[name] = values.reshape(length, -1).astype(np.float32)
            bad = np.argwhere(~np.isfinite(part[name]))
            if len(bad):
                row, joint = bad[0]
                findings.problem(f"{path}: {name} of episode {e}, frame {row}, joint {joint} is {part[name][row, joint]} ({len(bad)} such values in the episode); repair or leave out the episode.")  # fmt: skip
    part.setdefault("task_index", np.zeros(length, np.int64))
    for name, wanted in (("frame_index", np.arange(length)), ("index", episode.first + np.arange(length))):
        wrong = np.flatnonzero(part[name] != wanted)
        if len(wrong):
            findings.problem(
                f"{path}: {name} of episode {e} is {part[name][wrong[0]]} in its row {wrong[0]}, not {wanted[wrong[0]]}."
            )
    stamps = part.pop("_exact")
    off = np.abs(stamps - np.arange(length) / meta.fps)
    worst = int(np.argmax(np.where(np.isfinite(off), off, np.inf)))
    if not off[worst] <= 0.5 / meta.fps:
        findings.problem(f"{path}: timestamp of episode {e}, frame {worst} is {stamps[worst]:.4f} s, but at {meta.fps:g} fps it is {worst / meta.fps:.4f} s; correct fps or the timestamps.")  # fmt: skip
    return part


def _ranges(numbers: np.ndarray) -> str:
    return f"{numbers.min()} to {numbers.max()}" if len(numbers) else "none"


# ---- cameras of a data set on disk -------------------------------------------------------------------------
def _known_cameras(cfg: DatasetConfig, have: list[str]) -> list[str]:
    if cfg.image_keys is None:
        return have
    unknown = [key for key in cfg.image_keys if key not in have]
    if unknown:
        raise DatasetError(
            f"--dataset.image-keys names {unknown[0]}, but the cameras are {', '.join(have) or 'none'}."
        )
    return [key for key in have if key in cfg.image_keys]


def _image_shape(key: str, feature: dict, where: Path) -> tuple[int, int, int]:
    """(channels, H, W); LeRobot stores H, W, C with names, older sets also C, H, W."""
    shape, names = feature["shape"], feature.get("names")
    info = feature.get("info") or {}
    if info.get("is_depth_map") or info.get("video.is_depth_map"):
        raise DatasetError(
            f"{where}: {key} is a depth camera, which ACT's backbone cannot take; leave it out with --dataset.image-keys."
        )
    if len(shape) == 2:
        shape = [*shape, 1]
    if len(shape) != 3:
        raise DatasetError(f"{where}: camera {key} has shape {shape}; it must be height, width, channels.")
    names = [str(name) for name in names] if isinstance(names, list) else []
    place = next(
        (i for i, name in enumerate(names[:3]) if name.startswith("channel")), 2 if shape[2] in (1, 3) else 0
    )
    channels = shape[place]
    height, width = (n for i, n in enumerate(shape) if i != place)
    if channels not in (1, 3):
        raise DatasetError(
            f"{where}: camera {key} has {channels} channels; 3 or 1 can be used, so leave it out with --dataset.image-keys."
        )
    return channels, height, width


def _open_cameras(
    meta: _Metadata, rows: _Rows, cfg: DatasetConfig, findings: _Findings
) -> tuple[dict[str, Any], set[str]]:
    """(a frame source for each camera, those with one channel): every row's frame known, one of each decoded."""
    where = meta.root / "meta" / "info.json"
    cameras: dict[str, Any] = {}
    gray: set[str] = set()
    if not cfg.tolerance_s > 0:
        raise DatasetError(
            f"--dataset.tolerance-s={cfg.tolerance_s} is no length of time; use seconds above 0."
        )
    for key in _known_cameras(cfg, meta.cameras()):
        with findings.reading(where):
            channels, *shape = _image_shape(key, meta.features[key], where)
            opened = _open_videos if meta.features[key]["dtype"] == "video" else _open_images
            source = opened(meta, rows, key, tuple(shape), cfg, findings)
            source.get(0)
            cameras[key] = source
            if channels == 1:
                gray.add(key)
                findings.warn(f"camera {key} has one channel; it is repeated three times.")
    return cameras, gray


def _open_videos(meta, rows: _Rows, key: str, shape, cfg: DatasetConfig, findings: _Findings) -> VideoFrames:
    files: list[Path] = []
    scans: list[_Scan] = []
    file_of_row, pts_of_row = np.zeros(sum(rows.lengths), np.int32), np.zeros(sum(rows.lengths), np.int64)
    used: dict[Path, list[tuple[int, np.ndarray]]] = {}
    ends = np.cumsum(rows.lengths)
    for e, end, length in zip(rows.ids, ends, rows.lengths):
        path, begin, _ = meta.episodes[e].videos[key]
        span = slice(end - length, end)
        with findings.reading(path):
            if path not in files:
                scans.append(_scan_video(path, default_cache_dir(cfg.cache_dir)))
                files.append(path)
            number = files.index(path)
            found = _match_frames(scans[number], begin + rows.columns["timestamp"][span].astype(np.float64), meta.fps, cfg.tolerance_s, f"episode {e} of camera {key}", path)  # fmt: skip
            for other, theirs in used.setdefault(path, []):
                if found[0] <= theirs[-1] and theirs[0] <= found[-1]:
                    raise DatasetError(f"{path}: episodes {other} and {e} both use its frame {max(found[0], theirs[0])}; the metadata points to the wrong file or time.")  # fmt: skip
            used[path].append((e, found))
            file_of_row[span], pts_of_row[span] = number, scans[number].pts[found]
    return VideoFrames(
        shape, files, [s.digest for s in scans], [s.keyframes for s in scans], file_of_row, pts_of_row
    )


@dataclass
class _Scan:
    digest: str  # of the file's bytes
    pts: np.ndarray  # (F,) of every frame, ascending
    keyframes: np.ndarray  # (K, 2) pts and dts of the key frames, ascending
    seconds: float  # of one unit of pts


def _scan_video(path: Path, cache_dir: Path) -> _Scan:
    """Frame times of a video from its packets, without decoding; kept in the cache folder for the next run."""
    av = _import("av", "videos")
    stat = path.stat()
    memo = (
        cache_dir / "scans" / f"{_hash(f'{path.resolve()} {stat.st_size} {stat.st_mtime_ns}'.encode())}.npz"
    )
    try:
        with np.load(memo, allow_pickle=False) as kept:
            return _Scan(str(kept["digest"]), kept["pts"], kept["keyframes"], float(kept["seconds"]))
    except Exception:  # not there, or not ours: scan
        pass
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    with av.open(str(path)) as container:
        if not container.streams.video:
            raise DatasetError(f"{path} holds no video.")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise DatasetError(f"{path}: this build of PyAV has no decoder for its codec; pip install -U av.")
        packets = [
            (packet.pts, packet.dts if packet.dts is not None else packet.pts, packet.is_keyframe)
            for packet in container.demux(stream)
            if packet.pts is not None and packet.size and not packet.is_discard
        ]
        table = np.array(sorted(packets), np.int64).reshape(-1, 3)
        keyframes = table[table[:, 2] == 1][:, :2]
        if not len(keyframes):
            raise DatasetError(f"{path} holds no video frame.")
        scan = _Scan(digest, table[:, 0], keyframes, float(stream.time_base))
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        temporary = memo.with_name(f"{memo.stem}.{os.getpid()}.npz")
        np.savez(temporary, digest=scan.digest, pts=scan.pts, keyframes=scan.keyframes, seconds=scan.seconds)
        os.replace(temporary, memo)
    except OSError:  # a folder that cannot be written costs the next run a scan
        pass
    return scan


def _match_frames(
    scan: _Scan, wanted: np.ndarray, fps: float, tolerance_s: float, what: str, path: Path
) -> np.ndarray:
    """Number of the video frame for each wanted time (s): the nearest, and within the tolerance.

    An offset that all frames of an episode share, as from times summed in float32, is forgiven up to a tenth of a
    frame, since it cannot choose another frame.
    """
    times = scan.pts * scan.seconds
    after = np.clip(np.searchsorted(times, wanted), 1, max(1, len(times) - 1))
    nearest = np.minimum(after, len(times) - 1) - (
        wanted - times[after - 1] < times[np.minimum(after, len(times) - 1)] - wanted
    )
    error = times[nearest] - wanted
    shift = float(np.median(error))
    if abs(shift) > 0.1 / fps:
        shift = 0.0
    off = np.where(np.isfinite(error), np.abs(error - shift), np.inf)
    if (off > tolerance_s).any():
        k = int(np.flatnonzero(off > tolerance_s)[0])
        raise DatasetError(f"{path}: {what} wants a frame at {wanted[k]:.4f} s for its frame {k}, and the nearest of {len(times)} is at {times[nearest[k]]:.4f} s, {off[k] * 1000:.1f} ms away; --dataset.tolerance-s allows {tolerance_s:g} s.")  # fmt: skip
    return nearest


def _open_images(
    meta, rows: _Rows, key: str, shape, cfg: DatasetConfig, findings: _Findings
) -> EncodedFrames:
    """Put the encoded images of each parquet file side by side into a mapped file, once, and know where each lies."""
    pa = _import("pyarrow", "data sets on disk")
    folder = default_cache_dir(cfg.cache_dir)
    blobs: list[Path] = []
    start, size = np.zeros(len(rows.file_of_row), np.int64), np.zeros(len(rows.file_of_row), np.int64)
    for number, path in enumerate(rows.files):
        with findings.reading(path):
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
            blob = folder / f"{_hash(f'{CACHE_FORMAT} encoded {digest} {key}'.encode())}.images"
            if not blob.exists():
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    _build_once(blob, lambda file, path=path: _write_images(file, path, key, meta.root, pa))
                except OSError as error:
                    if isinstance(error, InterruptedError):
                        raise
                    raise DatasetError(f"{folder} cannot be written ({error.strerror or error}); use --dataset.cache-dir for the images of {path}.") from error  # fmt: skip
            content = _map_file(blob)
            count = int(content[-8:].numpy().view(np.int64)[0])
            offsets = content[len(content) - 8 * (count + 2) : -8].numpy().view(np.int64)
            here = rows.file_of_row == number
            places = rows.row_in_file[here]
            start[here], size[here] = offsets[places], offsets[places + 1] - offsets[places]
            blobs.append(blob)
    empty = np.flatnonzero(size == 0)
    if len(empty):
        raise DatasetError(
            f"{rows.files[rows.file_of_row[empty[0]]]}: {key} is empty in row {rows.row_in_file[empty[0]]}."
        )
    return EncodedFrames(shape, blobs, rows.file_of_row, start, size, rows.files)


def _write_images(file, path: Path, key: str, root: Path, pa) -> None:
    """The images' bytes, padding to 8, then their offsets (rows + 1) and the number of rows, int64."""
    offsets = [0]
    with _told(path):
        for batch in pa.parquet.ParquetFile(path).iter_batches(batch_size=256, columns=[key]):
            for value in batch.column(0).to_pylist():
                content = value.get("bytes") if isinstance(value, dict) else value
                if content is None and isinstance(value, dict) and value.get("path"):
                    content = _inside(root, value["path"]).read_bytes()
                if not isinstance(content, bytes | None):
                    raise DatasetError(f"{path}: column {key} holds {type(content).__name__}, not images.")
                file.write(content or b"")
                offsets.append(offsets[-1] + len(content or b""))
    file.write(b"\0" * (-offsets[-1] % 8))
    file.write(np.array([*offsets, len(offsets) - 1], np.int64).tobytes())


# ---- statistics --------------------------------------------------------------------------------------------
def _statistics_on_disk(meta: _Metadata, ids: list[int], cfg: DatasetConfig, cameras: dict[str, Any]) -> dict:
    """What the data set itself says: meta/stats.json for all episodes, else for cameras the chosen episodes' own."""
    whole = len(ids) == len(meta.episodes)
    names = {ours: theirs for theirs, ours in _vector_keys(meta, cfg).items()} | {
        key: key for key in (*cameras, *INDEX_COLUMNS)
    }
    stats = {ours: meta.stats[theirs] for ours, theirs in names.items() if whole and theirs in meta.stats}
    for key in cameras:
        if key not in stats:
            parts = [part for part in meta.episode_stats(ids, key) if {"mean", "std", "count"} <= set(part)]
            if len(parts) == len(ids):
                stats[key] = _aggregate(parts)
    return stats


def _aggregate(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Statistics of a union from those of its parts (population std); quantiles by weighted mean, as LeRobot does."""
    shape = (-1,) + (1,) * parts[0]["mean"].ndim
    count = np.array([part["count"].reshape(-1)[0] for part in parts])
    weight = (count / count.sum()).reshape(shape)
    stack = {
        name: np.stack([part[name] for part in parts])
        for name in parts[0]
        if all(name in part for part in parts)
    }
    mean = (stack["mean"] * weight).sum(0)
    result = {
        "mean": mean,
        "std": np.sqrt(((stack["std"] ** 2 + (stack["mean"] - mean) ** 2) * weight).sum(0)),
    }
    result |= {name: getattr(stack[name], name)(axis=0) for name in ("min", "max") if name in stack}
    result |= {name: (stack[name] * weight).sum(0) for name in stack if re.fullmatch(r"q\d+", name)}
    return result | {"count": np.array([count.sum()])}


def _measure(values: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics over the first axis, in float64."""
    values = values.astype(np.float64)
    quantiles = np.quantile(values, [0.01, 0.1, 0.5, 0.9, 0.99], axis=0)
    found = {
        "min": values.min(0),
        "max": values.max(0),
        "mean": values.mean(0),
        "std": values.std(0),
        "count": np.array([len(values)]),
    }
    return found | dict(zip(("q01", "q10", "q50", "q90", "q99"), quantiles))


def _measure_frames(source: Any, spans: list[tuple[int, int]], most: int = 48) -> dict[str, np.ndarray]:
    """Statistics of a camera in [0, 1] by channel, from frames spread evenly over the episodes."""
    rows = np.concatenate([np.arange(*span) for span in spans])
    rows = rows[np.unique(np.linspace(0, len(rows) - 1, most).astype(int))]
    parts = [{k: v[:, None, None] if k != "count" else v for k, v in _measure(source.get(int(row))[::2, ::2].reshape(-1, 3) / 255.0).items()} for row in rows]  # fmt: skip
    return _aggregate(parts)


def _statistics(
    cfg: DatasetConfig, table: _Table, cameras: dict[str, Any], spans: list[tuple[int, int]], notes: list[str]
) -> tuple[dict[str, dict[str, Tensor]], str]:
    """The one set of statistics of a run: used in training, stored in the checkpoint, used at inference.

    They are those of the episodes trained on. All episodes: meta/stats.json as it is, so that they equal LeRobot's.
    A subset: computed anew from its rows; cameras aggregated from the episodes' own statistics. Whatever is missing
    is computed. 3-channel cameras get ImageNet's mean and std unless the flag says no. The std of a joint of state
    and action is at least cfg.min_std.

    Returns:
        ({key: {"mean", "std", "min", "max", "count", ...: float32}}, where they come from). Cameras are (3, 1, 1).
    """
    if not cfg.min_std >= 0:
        raise DatasetError(f"--dataset.min-std={cfg.min_std} is no floor; use 0 or more.")
    rows = np.concatenate([np.arange(*span) for span in spans])
    columns, given = table.columns, table.stats
    stats: dict[str, dict[str, np.ndarray]] = {}
    for key in (ACTION, STATE, ENV_STATE, *INDEX_COLUMNS):
        if key not in columns:
            continue
        entry = given.get(key)
        shape = columns[key].shape[1:]
        if key in INDEX_COLUMNS:
            if entry is not None:
                stats[key] = entry
            continue
        measured = _measure(columns[key][rows])
        for problem in _compare(key, entry, measured, shape):
            notes.append(f"warning: {problem}")
        usable = entry is not None and all(entry.get(n) is not None and entry[n].size == max(1, math.prod(shape)) for n in ("mean", "std", "min", "max"))  # fmt: skip
        stats[key] = {n: v.reshape(shape) if v.size == math.prod(shape) and n != "count" else v for n, v in entry.items()} if usable else measured  # fmt: skip
        still = np.flatnonzero(stats[key]["std"] < cfg.min_std)
        if len(still):
            few = ", ".join(f"{j} ({stats[key]['std'][j]:.2g})" for j in still[:8])
            notes.append(
                f"warning: {key} hardly moves in joint {few}: its std is raised to {cfg.min_std:g} (--dataset.min-std)."
            )
            stats[key] = stats[key] | {"std": np.maximum(stats[key]["std"], cfg.min_std)}
    for key, source in cameras.items():
        entry = given.get(key)
        if entry is None or not {"mean", "std"} <= set(entry):
            entry = _measure_frames(source, spans)
        entry = {
            n: np.broadcast_to(v.reshape(-1, 1, 1), (3, 1, 1)) if n != "count" else v.reshape(-1)
            for n, v in entry.items()
        }
        if cfg.use_imagenet_stats and key not in table.gray:
            entry |= {name: np.array(value).reshape(3, 1, 1) for name, value in IMAGENET.items()}
        else:
            notes += [f"warning: {text}" for text in _odd_image_stats(key, entry)]
        stats[key] = entry
    tensors = {
        key: {name: torch.tensor(np.array(value), dtype=torch.float32) for name, value in entry.items()}
        for key, entry in stats.items()
    }
    return tensors, "meta/stats.json" if ACTION in given else "computed from their rows"


def _odd_image_stats(key: str, entry: dict[str, np.ndarray]) -> list[str]:
    mean, std = entry["mean"].reshape(-1), entry["std"].reshape(-1)
    if mean.min() < 0 or mean.max() > 1 or std.min() < 0.02 or std.max() > 0.6:
        return [f"the statistics of camera {key} have mean {np.round(mean, 4).tolist()} and std {np.round(std, 4).tolist()}, which frames scaled to 0..1 hardly have; --dataset.use-imagenet-stats, or correct them."]  # fmt: skip
    return []


def _compare(
    key: str, entry: dict[str, np.ndarray] | None, measured: dict[str, np.ndarray], shape
) -> list[str]:
    """Sentences on stored statistics that the data contradicts."""
    if entry is None:
        return []
    result = []
    for name in ("mean", "std", "min", "max"):
        if entry.get(name) is None or entry[name].size != measured[name].size:
            result.append(
                f"the statistics of {key} have no {name} of {measured[name].size} values; they are computed anew."
            )
            return result
        stored = entry[name].reshape(measured[name].shape)
        scale = np.maximum(measured["std"], 1e-3 * np.abs(measured["mean"]) + 1e-6)
        off = np.abs(stored - measured[name]) / scale
        if not (off <= 0.01).all():
            j = int(np.argmax(np.where(np.isfinite(off), off, np.inf)))
            result.append(f"the {name} of {key}, joint {j} is {stored.reshape(-1)[j]:.6g} in the statistics and {measured[name].reshape(-1)[j]:.6g} in the data; python data.py check --fix-stats writes the right ones.")  # fmt: skip
    return result
