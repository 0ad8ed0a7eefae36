"""LeRobot data sets as batches for ACT: reader, frame cache, sample order, loader, and a check of a data set.

    python data.py check --root DIR [--fix-stats]   every problem of a data set, named; exit 1 if there is any
    python data.py cache --root DIR                 decode its frames into the cache ahead of a run

    train, val = open_dataset(DatasetConfig(root="DIR"), chunk_size=100)
    batches = TrainBatches(train, seed=0, batch_size=8, rank=0, world_size=1, accumulation_steps=1, steps=100)
    for batch in to_device(make_loader(batches, num_workers=4, pin_memory=True), device): ...

A batch (B samples, S = chunk_size, A action_dim); frames stay uint8 until they are on the device:

    "observation.state" (B, state_dim), "observation.environment_state" (B, env_dim) float32, if there is
    "observation.images.NAME"  (B, 3, H, W) uint8, one for each camera
    "action" (B, S, A) float32, "action_is_pad" (B, S) bool   past the end the last action repeats
    "index", "episode_index", "frame_index", "task_index" (B,) int64, "timestamp" (B,) float32
    "num_valid" () float32, "noise_seed" (B,) int64           training only, see TrainBatches
    "sample_weight" (B,) float32                              validation only, see ValBatches

Read: LeRobot v3.0, v2.1 and v2.0; AV1, H.264, H.265 and what else PyAV's FFmpeg decodes; PNG and JPEG inside
parquet. Needs pyarrow for a data set on disk and av for its videos. All files are JSON, parquet, images or
videos: nothing that is read can run code, and a path in the metadata cannot leave the data set's directory.

The rules, each in one place: which episodes (`split_episodes`), which statistics (`_statistics`), which order
(`SampleOrder`), which frame belongs to a row (`_match_frames`), what is cached and where (`cached`).
"""

import atexit
import bisect
import copy
import fcntl
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

ACTION, STATE, ENV_STATE = "action", "observation.state", "observation.environment_state"
INDEX_COLUMNS = ("index", "episode_index", "frame_index", "timestamp", "task_index")
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CACHE_FORMAT = "1"  # part of every cache key: raise it when the bytes of a cached frame change
RAM_DIR = Path("/dev/shm")  # where --dataset.cache ram keeps its files
AUTO_CACHE_GB = 200  # what --dataset.cache auto may take, beside its rule of half the free disk
MUCH_PADDING = 0.5  # share of the target steps, above which it is a warning
MAX_DECODERS = 8  # open videos of one camera in one process
MAX_MAPS = 4096  # mapped files of one camera in one process; Linux allows 65530 in all (vm.max_map_count)
JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # pixel data has 00 or a restart after each ff


class DatasetError(ValueError):
    """A data set that cannot be trained on, or a flag that does not fit it: one sentence for the user."""


@dataclass(frozen=True)
class DatasetConfig:
    root: str | None = None
    """Directory of a LeRobot data set, which holds meta/, data/, videos/. None: --dataset.repo-id."""
    repo_id: str | None = None
    """USER/NAME of a LeRobot data set: found in the local caches, downloaded if it is in none of them."""
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
    /dev/shm until the run ends. "off" decodes on demand. "auto": disk if half the free space will do, else
    off."""
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
    """(training episodes, validation episodes or None) of a LeRobot data set, checked and with frames cached.

    `notes` of the first says what was decided, a line each; lines that begin with "warning:" want attention.

    Raises:
        ValueError: one sentence, for whatever would stop the training later: a wrong flag, missing or broken
            files, metadata that does not add up, frames off their times, NaN, no space for the cache.
        ImportError: pyarrow or av is needed and not installed; names the pip line.
    """
    findings = _Findings(strict=True)
    meta = _read_metadata(resolve_root(cfg), findings)
    train_ids, val_ids = split_episodes(cfg, len(meta.episodes))
    rows = _read_rows(meta, sorted(train_ids + val_ids), cfg, findings)
    cameras, gray = _open_cameras(meta, rows, cfg, findings)
    names = _vector_keys(meta, cfg)
    base = EpisodeDataset(
        rows.columns,
        [meta.episodes[e].length for e in rows.ids],
        fps=meta.fps,
        cameras=cameras,
        chunk_size=chunk_size,
        episode_ids=rows.ids,
        order=[names.get(key, key) for key in meta.features],
    )
    base.notes = [f"data set {meta.root}: {_count(len(meta.episodes), 'episode')} at {meta.fps:g} fps"]
    base.notes += findings.warnings[:8]
    if len(findings.warnings) > 8:
        more = f"{len(findings.warnings) - 8} more of the kind"
        base.notes.append(f"warning: {more}; python data.py check --root {meta.root} lists them.")
    given = _statistics_on_disk(meta, train_ids, cfg, cameras)
    return _finish(cfg, base, train_ids, val_ids, given, gray, len(meta.episodes))


def camera_keys(cfg: DatasetConfig) -> list[str]:
    """The cameras that training will read, from meta/info.json alone: known before any frame is decoded."""
    path = resolve_root(cfg) / "meta" / "info.json"
    with _told(path):
        features = _read_json(path)["features"]
        have = [key for key, feature in features.items() if feature["dtype"] in ("video", "image")]
    return _chosen_cameras(cfg, have)


def open_columns(
    cfg: DatasetConfig,
    chunk_size: int,
    columns: dict[str, np.ndarray],
    lengths: Sequence[int],
    fps: float,
    cameras: dict[str, Any],
) -> tuple["EpisodeDataset", "EpisodeDataset | None"]:
    """As `open_dataset`, from arrays in memory and frames from anywhere, as the embedded task has them.

    Args:
        columns: "action" (N, A); "observation.state", "observation.environment_state" (N, D) if any.
        lengths: frames of each episode; they add up to N.
        cameras: frame sources by key: picklable objects with shape (H, W), __len__ (N), get(row) -> (H, W, 3)
            uint8, cache_key() -> equal only for equal frames, optionally in_order(start, stop) -> frames.
    """
    train_ids, val_ids = split_episodes(cfg, len(lengths))
    cameras = {key: cameras[key] for key in _chosen_cameras(cfg, list(cameras))}
    base = EpisodeDataset(columns, lengths, fps=fps, cameras=cameras, chunk_size=chunk_size)
    return _finish(cfg, base, train_ids, val_ids, {}, set(), len(lengths))


def split_episodes(cfg: DatasetConfig, num_episodes: int) -> tuple[list[int], list[int]]:
    """(training, validation) episodes, each in ascending order and without common members."""
    last = num_episodes - 1
    for flag, chosen in (("--dataset.episodes", cfg.episodes), ("--dataset.val-episodes", cfg.val_episodes)):
        if chosen is None:
            continue
        if not chosen:
            raise DatasetError(f"{flag} is empty; name some of 0 to {last}, or leave it out.")
        for e in chosen:
            if not 0 <= e <= last:
                raise DatasetError(f"{flag} names episode {e}; the data set has 0 to {last}.")
        if len(set(chosen)) < len(chosen):
            twice = next(e for place, e in enumerate(chosen) if e in chosen[:place])
            raise DatasetError(f"{flag} names episode {twice} twice; name each once.")
    if not 0 <= cfg.val_split < 1:
        raise DatasetError(f"--dataset.val-split={cfg.val_split} is no fraction; use 0 (off) or less than 1.")
    if cfg.val_split and cfg.val_episodes:
        raise DatasetError("--dataset.val-split and --dataset.val-episodes do the same; use one of them.")
    train, val = sorted(cfg.episodes or range(num_episodes)), sorted(cfg.val_episodes or ())
    if cfg.episodes and set(train) & set(val):
        both = min(set(train) & set(val))
        raise DatasetError(f"--dataset.episodes and --dataset.val-episodes both name {both}; use it once.")
    held = set(val)
    train = [e for e in train if e not in held]
    if cfg.val_split:
        held_out = max(1, round(cfg.val_split * len(train)))
        train, val = train[:-held_out], train[-held_out:]
    if not train:
        raise DatasetError("the validation episodes leave none to train on; hold out fewer.")
    return train, val


def _finish(
    cfg: DatasetConfig,
    base: "EpisodeDataset",
    train_ids: list[int],
    val_ids: list[int],
    given: dict[str, dict[str, np.ndarray]],
    gray: set[str],
    num_episodes: int,
) -> tuple["EpisodeDataset", "EpisodeDataset | None"]:
    """The common end of both ways to open a set: resize, cache, statistics, and the two views."""
    if base.chunk_size < 1:
        raise DatasetError(f"--policy.chunk-size={base.chunk_size} is no number of steps; use 1 or more.")
    if cfg.image_size is not None:
        size = (int(cfg.image_size[0]), int(cfg.image_size[1]))
        if not 1 <= min(size) <= max(size) <= 8192:
            raise DatasetError(
                f"--dataset.image-size={size} is no height and width in pixels; use 1 to 8192."
            )
        base.cameras = {
            key: source if tuple(source.shape) == size else Resized(source, size)
            for key, source in base.cameras.items()
        }
    spans = base.select(sorted(train_ids + val_ids)).spans()
    base.cameras = cached(base.cameras, spans, cfg.cache, cfg.cache_dir, base.notes)
    train = base.select(train_ids)
    base.stats, origin = _statistics(cfg, train, given, gray)
    train.stats = base.stats
    train.notes.append(f"statistics from {len(train_ids)} of {num_episodes} episodes ({origin})")
    short, padded = train.padding()
    if padded > MUCH_PADDING:
        train.notes.append(
            f"warning: {padded:.0%} of the target steps are padding: {short} of {len(train_ids)} episodes "
            f"are shorter than --policy.chunk-size={base.chunk_size}; a smaller one wastes less."
        )
    return train, base.select(val_ids) if val_ids else None


class EpisodeDataset(Dataset):
    """Frames of chosen episodes, in ascending order of episode and time; local index i counts from 0.

    Picklable at any time: open videos and mapped files stay behind. `stats` are in the form of `_statistics`.

    Args: as `open_columns`, and
        episode_ids: what the episodes are called, ascending; None counts from 0.
        order: the inputs in the order that the policy gets them; None is state, environment state, cameras.
    """

    def __init__(
        self, columns, lengths, *, fps, cameras, chunk_size, stats=None, episode_ids=None, order=()
    ) -> None:
        self.fps, self.cameras, self.chunk_size, self.order = fps, cameras, chunk_size, order
        self.stats: dict[str, dict[str, Tensor]] = stats or {}
        self.notes: list[str] = []
        self._lengths = np.asarray(lengths, np.int64)
        self._ids = (
            np.arange(len(self._lengths)) if episode_ids is None else np.asarray(episode_ids, np.int64)
        )
        total = int(self._lengths.sum())
        frame = np.arange(total) - np.repeat(np.cumsum(self._lengths) - self._lengths, self._lengths)
        index_columns = {
            "index": np.arange(total),
            "episode_index": np.repeat(self._ids, self._lengths),
            "frame_index": frame,
            "timestamp": (frame / fps).astype(np.float32),
            "task_index": np.zeros(total, np.int64),
        }
        self.columns = {key: np.ascontiguousarray(v) for key, v in (index_columns | dict(columns)).items()}
        for key, values in (*self.columns.items(), *cameras.items()):
            if len(values) != total:
                raise DatasetError(f"{key} has {len(values)} rows, but the episodes have {total} frames.")
        self._choose(np.arange(len(self._lengths)))

    def _choose(self, places: np.ndarray) -> None:
        self.episode_ids = [int(e) for e in self._ids[places]]
        self.episode_lengths = lengths = self._lengths[places]
        self._ends = np.cumsum(self._lengths)[places]
        self._rows = np.arange(int(lengths.sum())) + np.repeat(self._ends - np.cumsum(lengths), lengths)
        self._last_rows = np.repeat(self._ends - 1, lengths)

    def select(self, episode_ids: Sequence[int]) -> "EpisodeDataset":
        """A view of some of the episodes, which shares all data."""
        view = copy.copy(self)
        view._choose(np.searchsorted(self._ids, np.asarray(episode_ids)))
        return view

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_episodes(self) -> int:
        return len(self.episode_ids)

    @property
    def features(self) -> tuple[dict, dict]:
        """(inputs, outputs) in LeRobot's form: {"observation.state": {"type": "STATE", "shape": [14]}}."""
        kinds = {STATE: "STATE", ENV_STATE: "ENV"}
        inputs: dict[str, dict] = {}
        for key in dict.fromkeys([*self.order, *kinds, *self.cameras]):
            if key in self.cameras:
                inputs[key] = {"type": "VISUAL", "shape": [3, *self.cameras[key].shape]}
            elif key in kinds and key in self.columns:
                inputs[key] = {"type": kinds[key], "shape": [self.columns[key].shape[1]]}
        return inputs, {ACTION: {"type": "ACTION", "shape": [self.columns[ACTION].shape[1]]}}

    def spans(self) -> list[tuple[int, int]]:
        """First row and last row + 1 of each episode, in columns and cameras."""
        return [(int(end - n), int(end)) for end, n in zip(self._ends, self.episode_lengths)]

    def valid_steps(self, indices: np.ndarray) -> np.ndarray:
        """Unpadded steps in the chunk of each frame."""
        return np.minimum(self._last_rows[indices] - self._rows[indices] + 1, self.chunk_size)

    def padding(self) -> tuple[int, float]:
        """(episodes shorter than the chunk, share of padded steps over all chunks)"""
        valid = float(self.valid_steps(np.arange(len(self))).sum())
        return int((self.episode_lengths < self.chunk_size).sum()), 1 - valid / (len(self) * self.chunk_size)

    def get_batch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Samples at local indices; see the file's head for keys and shapes."""
        rows, last = self._rows[indices], self._last_rows[indices]
        keys = [key for key in (*INDEX_COLUMNS, STATE, ENV_STATE) if key in self.columns]
        batch = {key: torch.from_numpy(self.columns[key][rows]) for key in keys}
        steps = rows[:, None] + np.arange(self.chunk_size)
        batch[ACTION] = torch.from_numpy(self.columns[ACTION].take(np.minimum(steps, last[:, None]), axis=0))
        batch["action_is_pad"] = torch.from_numpy(steps > last[:, None])
        for key, source in self.cameras.items():
            batch[key] = _new_frames((len(rows), 3, *source.shape))
            if isinstance(source, CachedFrames):
                source.read_into(rows, batch[key])
            else:
                for frame, row in zip(batch[key], rows.tolist()):
                    frame.copy_(torch.from_numpy(source.get(row)).permute(2, 0, 1))
        return batch


def _new_frames(shape: tuple[int, ...]) -> Tensor:
    """Uninitialised uint8; in a worker it lies in the shared memory that it is sent through."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, shape)  # type: ignore[call-overload]


# ---- order and batches -------------------------------------------------------------------------------------
class SampleOrder:
    """Which frame stands at position p of the run: a pure function of (seed, p), with nothing stored.

    Epoch p // N has a permutation of [0, N) of its own: a Feistel network on the least power of two that
    holds N, walked until it lands inside. Any p >= 0, N up to 2^62. Source: Black and Rogaway 2002, method 3.
    """

    ROUNDS = 6

    def __init__(self, num_frames: int, seed: int) -> None:
        if not 1 <= num_frames <= 2**62:
            raise DatasetError(f"a sample order needs 1 to 2^62 frames, got {num_frames}.")
        self.num_frames = num_frames
        bits = max(4, (num_frames - 1).bit_length())  # tiny domains make poor permutations; walking is cheap
        self._left, self._right = np.uint64(bits - bits // 2), np.uint64(bits // 2)
        self._seed = _mix(np.array([seed % 2**64], np.uint64))

    def frame(self, positions: np.ndarray) -> np.ndarray:
        """Local indices (int64) at these positions."""
        epoch, place = np.divmod(np.asarray(positions, np.int64).reshape(-1), self.num_frames)
        key = _mix(self._seed + epoch.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        x = self._permute(place.astype(np.uint64), key)
        while (walk := np.flatnonzero(x >= np.uint64(self.num_frames))).size:
            x[walk] = self._permute(x[walk], key[walk])
        return x.astype(np.int64).reshape(np.shape(positions))

    def _permute(self, x: np.ndarray, key: np.ndarray) -> np.ndarray:
        left, right = x >> self._right, x & ((np.uint64(1) << self._right) - np.uint64(1))
        for turn in range(self.ROUNDS):
            key = key + np.uint64(0xD1B54A32D192ED03)
            if turn % 2:
                right = right ^ (_mix(left + key) >> (np.uint64(64) - self._right))
            else:
                left = left ^ (_mix(right + key) >> (np.uint64(64) - self._left))
        return (left << self._right) | right

    def noise_seed(self, positions: np.ndarray) -> np.ndarray:
        """One int64 >= 0 for each position, from which all randomness of that sample is derived."""
        p = np.asarray(positions, np.int64).astype(np.uint64)
        return (_mix(_mix(p + np.uint64(0x632BE59BD9B4E019)) ^ self._seed) >> np.uint64(1)).astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, uint64 -> uint64: every bit depends on all. Source: Steele et al. 2014."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class TrainBatches(Dataset):
    """Item s is this rank's whole batch of loop step s: a pure function of s, so a resume just starts at s.

    Step s takes the next batch_size * world_size positions of the order, and each rank its part. "num_valid"
    is the count of unpadded action steps in the optimizer window of s, over all ranks and micro-batches, over
    the number of (rank, micro-batch) pieces: the mean over pieces is then the undivided batch's loss.

    Args:
        steps: the last step of the whole run + 1.
        start_step, samples_seen: where the run stands; samples_seen is the position of its next sample.
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
        """Of the first sample of a step, over all ranks."""
        return self.samples_seen + (step - self.steps.start) * self.batch_size * self.world_size

    def window(self, step: int) -> range:
        """The steps that share an optimizer step with this one, cut where the run starts and ends."""
        first = step // self.accumulation_steps * self.accumulation_steps
        return range(max(self.steps.start, first), min(first + self.accumulation_steps, self.steps.stop))

    def __getitem__(self, step: int) -> dict[str, Tensor]:
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


class ValBatches(Dataset):
    """Every sample exactly once over the ranks, in order. The last batches are filled up with the last sample
    at "sample_weight" 0, so that shapes and the number of batches are the same on every rank."""

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


# ---- loader ------------------------------------------------------------------------------------------------
WORKERS_IGNORE = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def make_loader(
    batches: TrainBatches | ValBatches,
    num_workers: int,
    pin_memory: bool = False,
    start_method: str = "forkserver",
    prefetch_factor: int = 2,
) -> DataLoader:
    """The batches of `batches.steps` in order, prepared by `num_workers` processes (0: by this one).

    Workers come from a server process that has torch imported and none of our threads and locks. They use one
    thread each and ignore SIGINT, SIGTERM and SIGUSR1: a signal to the whole process group (from torchrun,
    Slurm, a terminal) is left to the trainer, which ends them.

    Raises:
        ValueError: the batches in flight do not fit into /dev/shm.
    """
    plain: dict[str, Any] = {"batch_size": None, "sampler": batches.steps, "collate_fn": _same}
    plain |= {"pin_memory": pin_memory, "generator": torch.Generator()}  # so the global one is not drawn from
    if num_workers == 0:
        return DataLoader(batches, **plain)
    frame_bytes = sum(3 * math.prod(source.shape) for source in batches.dataset.cameras.values())
    need = num_workers * prefetch_factor * batches.batch_size * frame_bytes
    need *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else need
    if need > free:
        raise DatasetError(
            f"--num-workers={num_workers} needs {_size(need)} of /dev/shm on this node for its batches, "
            f"and {_size(free)} are free; use fewer workers, or more of it (docker run --shm-size=8g)."
        )
    context = torch.multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        context.set_forkserver_preload(["__main__", "torch", __name__])
    return _Loader(
        batches,
        num_workers=num_workers,
        worker_init_fn=_start_worker,
        multiprocessing_context=context,
        prefetch_factor=prefetch_factor,
        persistent_workers=True,
        **plain,
    )


def _same(batch: Any) -> Any:
    return batch


class _Loader(DataLoader):
    def __iter__(self):
        began = self._iterator
        with _deaf_children():
            iterator = super().__iter__()
        if iterator is not began:
            atexit.register(_kill, iterator._workers)  # type: ignore[attr-defined]
        return iterator


def _kill(workers: list) -> None:
    """At exit Python sends its daemons SIGTERM and waits; these ignore it, and an error would hang."""
    for worker in workers:
        worker.kill()


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started inside do not get the signals: they inherit the mask of this thread.

    Ours are kept: another thread of this process takes them at once, or they stay pending until the end.
    """
    resource_tracker.ensure_running()  # its start would unblock the signals (Python 3.11)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WORKERS_IGNORE)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(worker: int) -> None:
    for number in WORKERS_IGNORE:
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_trainer, daemon=True).start()


def _end_with_trainer() -> None:
    """A killed trainer takes its workers along. torch's own watch is on the parent process, which here is the
    server, and the server stays as long as it has workers (torch 2.14)."""
    trainer = multiprocessing.parent_process()
    if trainer is not None:
        trainer.join()
        os._exit(1)


def to_device(loader: DataLoader, device: torch.device | str) -> "DeviceBatches":
    """Iterator over the loader's batches on the device; `waited_s` sums the time waited for data."""
    return DeviceBatches(loader, torch.device(device))


class DeviceBatches:
    """On CUDA the next batch is copied on a stream of its own while the current one is trained on."""

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        self.device, self.waited_s, self._iterator = device, 0.0, iter(loader)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: dict[str, Tensor] | None = None

    def __iter__(self) -> "DeviceBatches":
        return self

    def __next__(self) -> dict[str, Tensor]:
        batch = self._next or self._fetch()
        if batch is None:
            raise StopIteration
        if self._stream is not None:
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
        except (RuntimeError, ConnectionError, EOFError) as error:
            if not isinstance(error, RuntimeError) or "exited unexpectedly" in str(error):
                raise RuntimeError(
                    "a worker of the loader was killed, by the system for want of memory perhaps; use fewer "
                    "--num-workers, and go on with --resume."
                ) from error
            shortage = (
                r"Bus error|No space left|shared memory|unable to (write|open|mmap)|Too many open files"
            )
            if re.search(shortage, str(error)):
                raise RuntimeError(
                    "the loader's workers ran out of /dev/shm or file handles; use fewer --num-workers, or "
                    "more of it (docker run --shm-size=8g, ulimit -n 65536)."
                ) from error
            raise
        self.waited_s += time.perf_counter() - before
        if batch is None:
            return None
        with torch.cuda.stream(self._stream):  # None: does nothing
            return {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}


# ---- frame sources: where a camera's frames come from; rows count over the loaded episodes -----------------
class VideoFrames:
    """One camera's frames in videos, decoded on demand; a row's frame is known by file and pts."""

    thread_safe = True  # in_order opens a decoder of its own

    def __init__(self, shape, files, digests, keyframes, file_of_row, pts_of_row) -> None:
        self.shape, self.files, self.digests, self.keyframes = shape, files, digests, keyframes
        self.file_of_row, self.pts_of_row = file_of_row, pts_of_row
        self._open: OrderedDict[int, _Decoder] = OrderedDict()
        self._forked: OrderedDict[int, _Decoder] = OrderedDict()
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self.pts_of_row)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_open": OrderedDict(), "_forked": OrderedDict()}

    def get(self, row: int) -> np.ndarray:
        """(H, W, 3) uint8"""
        if self._pid != os.getpid():
            # Forked: file offsets are the parent's too, so open anew. The copies of its decoders are kept,
            # since closing one waits for threads that only the parent has (PyAV 18).
            self._forked, self._open, self._pid = self._open, OrderedDict(), os.getpid()
        number = int(self.file_of_row[row])
        decoder = self._open.pop(number, None) or _Decoder(self.files[number], self.keyframes[number])
        self._open[number] = decoder
        if len(self._open) > MAX_DECODERS:
            self._open.popitem(last=False)[1].close()
        return decoder.read(int(self.pts_of_row[row]), self.shape)

    def in_order(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Rows of one episode, decoded forward; what the decoder complains about is an error here."""
        number = int(self.file_of_row[start])
        decoder = _Decoder(self.files[number], self.keyframes[number])
        try:
            for row in range(start, stop):
                yield decoder.read(int(self.pts_of_row[row]), self.shape, forward=True)
        finally:
            decoder.close()

    def span_key(self, start: int, stop: int) -> str:
        """Of the frames of one episode: equal only for equal frames."""
        times = _hash(self.pts_of_row[start:stop].tobytes())
        return f"video {self.digests[int(self.file_of_row[start])]} {times} {self.shape}"


class _Decoder:
    """One open video. Decodes on from where it is, or seeks to the key frame before the wanted frame."""

    def __init__(self, path: Path, keyframes: np.ndarray) -> None:
        self.path, self.keyframes = path, keyframes
        self.av = _import("av", "videos")
        self.av.logging.set_level(self.av.logging.ERROR)
        with _told(path):
            self.container = self.av.open(str(path))
            self.stream = self.container.streams.video[0]
            self.stream.codec_context.thread_count = 1  # the workers are the parallelism
        self.frames: Iterator | None = None
        self.frame: Any = None

    def read(self, pts: int, shape: tuple[int, int], forward: bool = False) -> np.ndarray:
        at = f"the frame at {float(pts * self.stream.time_base):.4f} s"
        with _told(self.path, at), self.av.logging.Capture() as complaints:
            if (self.frame is None or self.frame.pts != pts) and not self._go_to(pts, forward):
                raise DatasetError(f"{self.path}: {at} cannot be decoded; the file is damaged.")
            if self.frame.is_corrupt or (forward and complaints):
                reason = complaints[0][2].strip() if complaints else "marked as corrupt"
                raise DatasetError(f"{self.path}: {at} is damaged ({reason}); replace or re-encode the file.")
            image = self.frame.to_ndarray(format="rgb24")
        if image.shape[:2] != tuple(shape):
            raise DatasetError(_other_size(self.path, image.shape, shape))
        return image

    def _go_to(self, pts: int, forward: bool) -> bool:
        key = max(0, int(np.searchsorted(self.keyframes[:, 0], pts, "right")) - 1)
        seeks: list[int | None] = [*self.keyframes[key].tolist(), int(self.keyframes[0].min())]
        if (
            self.frame is not None
            and self.frame.pts < pts
            and (forward or self.keyframes[key, 0] <= self.frame.pts)
        ):
            seeks.insert(0, None)  # decode on
        for target in seeks:  # a later one is needed only where a container seeks past the wanted frame
            if target is not None:
                self.container.seek(target, stream=self.stream)
                self.frames = self.container.decode(self.stream)
            for frame in self.frames or ():
                if frame.pts is not None and frame.pts >= pts:
                    self.frame = frame
                    if frame.pts == pts:
                        return True
                    break
        return False

    def close(self) -> None:
        self.frames = self.frame = None
        self.container.close()


def _other_size(path: Path, found: Sequence[int] | np.ndarray, wanted: tuple[int, int]) -> str:
    return (
        f"{path}: frames are {found[0]}x{found[1]}, but meta/info.json says {wanted[0]}x{wanted[1]}; correct "
        "the feature's shape."
    )


class EncodedFrames:
    """Images stored inside parquet: their PNG or JPEG bytes lie in mapped files, and get() decodes one."""

    thread_safe = True

    def __init__(self, shape, blobs, origin, file_of_row, start_of_row, size_of_row) -> None:
        self.shape, self.blobs, self.origin = shape, blobs, origin
        self.file_of_row, self.start_of_row, self.size_of_row = file_of_row, start_of_row, size_of_row
        self._maps: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.file_of_row)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_maps": {}}

    def get(self, row: int) -> np.ndarray:
        """(H, W, 3) uint8"""
        from torchvision.io import ImageReadMode, decode_image

        number, start = int(self.file_of_row[row]), int(self.start_of_row[row])
        blob = self._maps.get(number)
        if blob is None:
            _make_room(self._maps)
            blob = self._maps[number] = _map_file(self.blobs[number])
        with _told(self.origin[number], f"image {row}"):
            image = decode_image(blob[start : start + int(self.size_of_row[row])], ImageReadMode.RGB)
        if image.dtype != torch.uint8 or tuple(image.shape[1:]) != tuple(self.shape):
            raise DatasetError(
                f"{self.origin[number]}: an image is {tuple(image.shape[1:])} {image.dtype}, but "
                f"meta/info.json says {tuple(self.shape)} and 8 bits are needed; correct the feature."
            )
        return image.permute(1, 2, 0).numpy()

    def span_key(self, start: int, stop: int) -> str:
        places = _hash(self.start_of_row[start:stop].tobytes())
        return f"images {self.blobs[int(self.file_of_row[start])].name} {places} {self.shape}"


class Resized:
    """Another source's frames at (H, W), bilinear with antialiasing; the same bytes cached or on demand."""

    def __init__(self, source: Any, shape: tuple[int, int]) -> None:
        self.source, self.shape, self.thread_safe = source, shape, getattr(source, "thread_safe", False)

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
    """One camera's decoded frames in the frame cache, one file an episode: raw uint8 (length, 3, H, W)."""

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
        for frame, episode, place in zip(out, episodes.tolist(), (rows - self.starts[episodes]).tolist()):
            if episode not in self._maps:
                _make_room(self._maps)
                size = (self.lengths[episode], 3, *self.shape)
                self._maps[episode] = _map_file(self.files[episode], math.prod(size)).view(size)
            frame.copy_(self._maps[episode][place])

    def get(self, row: int) -> np.ndarray:
        out = torch.empty((1, 3, *self.shape), dtype=torch.uint8)
        self.read_into(np.array([row]), out)
        return out[0].permute(1, 2, 0).numpy()


def _make_room(maps: dict[int, Tensor]) -> None:
    """For one more map: the newest goes, in one call, since threads share them."""
    if len(maps) >= MAX_MAPS:
        maps.popitem()


def _map_file(path: Path, size: int | None = None) -> Tensor:
    """A cache file's bytes, mapped privately: nothing is read before its use, no file handle stays open."""
    with _told(path):
        try:
            found = path.stat().st_size
            if size not in (None, found):
                raise DatasetError(f"{path} has {found} bytes, not {size}; delete it, and it is built again.")
            return torch.from_file(str(path), shared=False, size=found, dtype=torch.uint8)
        except FileNotFoundError as error:
            raise DatasetError(
                f"{path} is gone: the frame cache was removed while this run used it; start again (--resume "
                "goes on from the last checkpoint), and it is built again."
            ) from error
        except RuntimeError as error:  # torch's, with the system's reason in its text
            if not re.search(r"allocate memory|Too many open files", str(error)):
                raise
            raise DatasetError(
                f"{path} cannot be mapped into memory ({_first_line(error)}): this process has too many maps "
                "or files; raise vm.max_map_count or ulimit -n, or use --dataset.cache off."
            ) from error


# ---- frame cache -------------------------------------------------------------------------------------------
def cached(
    cameras: dict[str, Any], spans: list[tuple[int, int]], mode: str, cache_dir: str | None, notes: list[str]
) -> dict[str, Any]:
    """Sources that read decoded frames from mapped files; missing files are made first, once on a node.

    A file holds one camera's frames of one episode, for the episodes that are used. Its name is a hash of the
    frames' origin (the video's bytes, the frames' times) and size: a changed video or another resize never
    reads wrong frames, and a copy of the data set reads the same ones. It is written under another name and
    renamed when whole, so a killed build leaves nothing that is used; a lock makes others wait and share.
    """
    if not cameras or mode == "off":
        return cameras
    names = {
        key: [f"{_hash(f'{CACHE_FORMAT} {_span_key(source, *span)}'.encode())}.frames" for span in spans]
        for key, source in cameras.items()
    }
    folder = _ram_folder(set().union(*names.values())) if mode == "ram" else default_cache_dir(cache_dir)
    result: dict[str, Any] = {}
    jobs: list[tuple[Path, Any, int, int]] = []
    for key, source in cameras.items():
        files = [folder / name for name in names[key]]
        result[key] = CachedFrames(source.shape, len(source), spans, files)
        jobs += [(f, source, *span) for f, span in zip(files, spans) if not _whole(f, source, *span)]
    need = sum((stop - start) * 3 * math.prod(source.shape) for _, source, start, stop in jobs)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if mode == "auto" and need > min(free / 2, AUTO_CACHE_GB * 1e9):
            notes.append(
                f"warning: frames are decoded on demand, since their cache needs {_size(need)} and {folder} "
                f"has {_size(free)} free; --dataset.cache disk forces it, --dataset.image-size shrinks it."
            )
            return cameras
        if need > free:
            raise DatasetError(
                f"--dataset.cache {mode} needs {_size(need)} in {folder}, which has {_size(free)} free; use "
                "another --dataset.cache-dir, a smaller --dataset.image-size, or --dataset.cache off."
            )
        _build(jobs)
    except OSError as error:
        if mode != "auto":
            raise DatasetError(
                f"--dataset.cache {mode} cannot write to {folder} ({error.strerror}); use another "
                "--dataset.cache-dir, or --dataset.cache off."
            ) from error
        notes.append(f"warning: frames are decoded on demand: {folder} cannot be written ({error.strerror}).")
        return cameras
    size = sum((stop - start) * 3 * math.prod(c.shape) for c in cameras.values() for start, stop in spans)
    notes.append(
        f"frame cache: {folder}, {_count(len(spans) * len(cameras), 'file')} (one for each episode and "
        f"camera), {_size(size)}, {len(jobs) or 'none'} of them written now"
    )
    return result


def default_cache_dir(cache_dir: str | None = None) -> Path:
    """Of --dataset.cache-dir."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "act-frames"


def _ram_folder(keep: set[str]) -> Path:
    """/dev/shm/act-frames-USER, removed at exit by the last process that uses it (a lock tells).

    What a killed run has left is removed here, but for the files to keep.
    """
    folder = RAM_DIR / f"act-frames-{os.getuid()}"
    path, owner = folder / "users", os.getpid()

    def empty(keep: set[str]) -> None:
        for file in folder.iterdir():
            if file != path and file.name not in keep:
                file.unlink()

    try:
        while True:
            folder.mkdir(exist_ok=True)
            try:
                users = open(path, "w")  # noqa: SIM115 (held until exit)
            except FileNotFoundError:
                continue  # the folder was removed between the two lines
            with suppress(BlockingIOError):
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(users, path):  # nobody else is here
                    empty(keep)
            fcntl.flock(users, fcntl.LOCK_SH)
            if _is_at(users, path):
                break
            users.close()  # the last user removed the folder while we waited: its lock guards nothing
    except OSError as error:
        raise DatasetError(
            f"--dataset.cache ram cannot write to {folder} ({error.strerror}); use disk."
        ) from error

    def leave() -> None:
        with suppress(OSError):
            if os.getpid() == owner:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(users, path):
                    empty(set())
                    path.unlink()  # last, since who comes now waits for its lock
                    folder.rmdir()

    atexit.register(leave)
    return folder


def _is_at(file: Any, path: Path) -> bool:
    """Is this open file the one at the path? Who held its lock before us may have removed or renamed it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _whole(path: Path, source: Any, start: int, stop: int) -> bool:
    with suppress(OSError):
        if path.stat().st_size == (stop - start) * 3 * math.prod(source.shape):
            return True
        path.unlink()  # cut by something else: what is published is whole
    return False


def _build(jobs: list[tuple[Path, Any, int, int]]) -> None:
    """Decode the episodes of all jobs, several at a time where the sources allow it, with a progress bar."""
    if not jobs:
        return
    progress = _Progress("frame cache", sum(stop - start for _, _, start, stop in jobs))
    give_up = threading.Event()

    def build(job: tuple[Path, Any, int, int], wait: bool) -> bool:
        path, source, start, stop = job

        def write(file: BinaryIO) -> None:
            for frame in _in_order(source, start, stop):
                if give_up.is_set():
                    raise InterruptedError
                file.write(np.ascontiguousarray(frame.transpose(2, 0, 1)).data)
                progress.add(1)

        return _build_once(path, write, wait)

    safe = all(getattr(source, "thread_safe", False) for _, source, _, _ in jobs)
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)) if safe else 1)
    try:
        for wait in (False, True):  # first what nobody else is building, then what another process has begun
            done = list(pool.map(build, jobs, [wait] * len(jobs)))
            jobs = [job for job, mine in zip(jobs, done) if not mine]
    finally:
        give_up.set()
        pool.shutdown(cancel_futures=True)
        progress.close()


def _build_once(path: Path, write: Callable[[BinaryIO], None], wait: bool = True) -> bool:
    """Make a file whole or not at all, by one of the processes that try. False: another is at it (not wait).

    The lock is the kernel's and on the unfinished file, so that it ends with the process that held it.
    """
    unfinished = path.with_suffix(".building")
    while not path.exists():
        with open(unfinished, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                return False
            mine = _is_at(file, unfinished)
            if path.exists() and mine:
                unfinished.unlink()
            if path.exists() or not mine:
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
            if time.monotonic() - self.shown >= (0.2 if self.terminal else 10.0):
                self._print()

    def _print(self) -> None:
        self.shown = time.monotonic()
        rate = self.done / max(self.shown - self.start, 1e-9)
        left = time.strftime("%H:%M:%S", time.gmtime((self.total - self.done) / max(rate, 1e-9)))
        line = f"{self.what}: {self.done}/{self.total} frames, {rate:.0f}/s, {left} to go"
        start, end = ("\r", "\x1b[K") if self.terminal else ("", "\n")
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.done and (self.terminal or time.monotonic() - self.start > 1):
            self._print()
        if self.terminal:
            print(file=sys.stderr)


# ---- where a data set is -----------------------------------------------------------------------------------
def resolve_root(cfg: DatasetConfig) -> Path:
    """The data set's directory. The network is used only if nothing local is found for a repo id, and
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
    if cfg.repo_id is None:
        raise DatasetError(
            f"--dataset.root={cfg.root} holds no LeRobot data set (no meta/info.json); give the directory "
            "that has meta/, data/ and videos/."
        )
    sentence = f"--dataset.repo-id={cfg.repo_id} is in none of {', '.join(str(place) for place in places)}"
    way = "copy it there, or use --dataset.root."
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise DatasetError(f"{sentence}, and HF_HUB_OFFLINE forbids the download; {way}")
    hub = _import("huggingface_hub", "downloads from the hub")
    try:
        return Path(hub.snapshot_download(cfg.repo_id, repo_type="dataset", local_dir=cfg.root))
    except Exception as error:
        raise DatasetError(f"{sentence}, and the download failed ({_first_line(error)}); {way}") from error


def _local_places(repo_id: str) -> list[Path]:
    """Where LeRobot and the hub keep a data set: a directory of its name, or a cache's newest snapshot."""
    env = os.environ
    hf_home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    homes = [Path(home).expanduser() for home in (env.get("HF_LEROBOT_HOME"), hf_home / "lerobot") if home]
    hubs = [home / "hub" for home in homes]
    hubs += [Path(env[name]) for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE") if env.get(name)]
    places = [home / repo_id for home in homes]
    for hub in (*hubs, hf_home / "hub"):
        folder = hub.expanduser() / f"datasets--{repo_id.replace('/', '--')}"
        snapshots = sorted(folder.glob("snapshots/*"), key=lambda path: path.stat().st_mtime, reverse=True)
        main = folder / "refs" / "main"
        places += [folder / "snapshots" / main.read_text().strip()] if main.is_file() else []
        places += snapshots or [folder]
    return list(dict.fromkeys(places))


# ---- findings: what is wrong with a data set ---------------------------------------------------------------
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
        (self.warn if self.strict else self.problem)(text)

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
        reason = f"{type(error).__name__}: {_first_line(error)}"
        at = f"{what} in {path}" if what else path
        raise DatasetError(
            f"{at} cannot be read ({reason}); the file is damaged or of another kind."
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")


def _import(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(f"{what} need {package} ({_first_line(error)}): pip install {package}") from error


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _file_hash(path: Path, cache_dir: Path) -> str:
    """Of a file's bytes; remembered in the cache folder until its size or time changes."""
    memo = _memo(path, cache_dir).with_suffix(".hash")
    with suppress(OSError):
        if re.fullmatch(r"[0-9a-f]{32}", known := memo.read_text()):
            return known
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    _remember(memo, lambda file: file.write(digest.encode()))
    return digest


def _memo(path: Path, cache_dir: Path) -> Path:
    stat = path.stat()
    return cache_dir / "scans" / _hash(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())


def _remember(memo: Path, write: Callable[[BinaryIO], Any]) -> None:
    with suppress(OSError):  # a folder that cannot be written costs the next run the time again
        memo.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=memo.parent, delete=False) as file:
            write(file)  # type: ignore[arg-type]
        os.replace(file.name, memo)


# ---- metadata ----------------------------------------------------------------------------------------------
@dataclass
class _Episode:
    length: int
    first: int  # its first frame's row in the whole data set
    file: Path
    videos: dict[str, tuple[Path, float, float]]  # file, from and to (s)


@dataclass
class _Metadata:
    root: Path
    fps: float
    features: dict[str, dict]
    episodes: list[_Episode]
    num_tasks: int | None  # None: they cannot be read, and training does not need them
    stats: dict[str, dict[str, np.ndarray]]  # of the whole set; empty where it has none
    episode_stats: Callable[[str], list[dict[str, np.ndarray]]]  # of one feature, by episode

    @property
    def info(self) -> Path:
        return self.root / "meta" / "info.json"

    def shape(self, key: str) -> list[int]:
        """Of a feature, checked when it is used: one that is not may have any."""
        found: Any = self.features[key].get("shape")
        with suppress(TypeError, ValueError):
            shape = [int(n) for n in found]
            if all(0 < n < 1e8 for n in shape):
                return shape
        raise DatasetError(f"{self.info}: feature {key} has shape {found}; sizes of 1 or more are needed.")

    def cameras(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature["dtype"] in ("video", "image")]


def _read_metadata(root: Path, findings: _Findings) -> _Metadata:
    """meta/ of any supported version in one form, checked against itself."""
    path = root / "meta" / "info.json"
    with _told(path):
        info = _read_json(path)
        version = str(info["codebase_version"])
        if not re.fullmatch(r"v(3\.\d+|2\.[01])", version):
            way = "python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=USER/NAME"
            way = f"convert it with LeRobot: {way} --root={root} --push-to-hub=false (v1 to v2.1 first)"
            way = "a newer version of this program is needed" if re.match(r"v([4-9]|\d\d)", version) else way
            raise DatasetError(
                f"{path}: codebase_version is {version}; v3.0, v2.1 and v2.0 can be read, so {way}."
            )
        fps, features = float(info["fps"]), info["features"]
        if not 0 < fps < 1e6:
            raise DatasetError(f"{path}: fps is {info['fps']}; it must be a positive number.")
        for key, feature in features.items():
            if not isinstance(feature["dtype"], str):
                raise DatasetError(f"{path}: feature {key} has dtype {feature['dtype']}; it must be a name.")
        for key in INDEX_COLUMNS[:4]:
            if key not in features:
                raise DatasetError(f"{path}: feature {key} is missing, which every LeRobot data set has.")
    read = _read_episodes_v3 if version.startswith("v3") else _read_episodes_v2
    episodes, episode_stats = read(
        root, info, [k for k, f in features.items() if f["dtype"] == "video"], findings
    )
    if not episodes:
        raise DatasetError(f"{root / 'meta/episodes'}: the data set has no episode.")
    frames = sum(episode.length for episode in episodes)
    for name, found in (("total_episodes", len(episodes)), ("total_frames", frames)):
        if info.get(name, found) != found:
            findings.problem(f"{path}: {name} is {info[name]}, but the metadata of the episodes has {found}.")
    stats: dict[str, dict[str, np.ndarray]] = {}
    if (root / "meta" / "stats.json").exists():
        with findings.reading(root / "meta" / "stats.json"):
            for key, entry in _read_json(root / "meta" / "stats.json").items():
                stats[key] = {name: np.asarray(value, np.float64) for name, value in entry.items()}
    elif version != "v2.1":  # which has them by episode only
        findings.doubt(f"{root / 'meta/stats.json'} is missing; the statistics are computed from the data.")
    tasks = root / "meta" / ("tasks.parquet" if version.startswith("v3") else "tasks.jsonl")
    num_tasks = None
    try:
        with _told(tasks):
            num_tasks = len(_parquet(tasks).read()) if version.startswith("v3") else len(_read_lines(tasks))
    except DatasetError as error:
        findings.doubt(str(error))
    return _Metadata(root, fps, features, episodes, num_tasks, stats, episode_stats)


def _read_json(path: Path) -> dict:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise DatasetError(f"{path} is no JSON object; the file is damaged or of another kind.")
    return content


def _read_lines(path: Path) -> list[dict]:
    with _told(path):
        return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _parquet(path: Path) -> Any:
    return _import("pyarrow.parquet", "data sets on disk").ParquetFile(path, page_checksum_verification=True)


def _inside(root: Path, template: Any, **values: Any) -> Path:
    """A path from the metadata, which may not leave the data set."""
    try:
        relative = template.format(**values)
    except Exception as error:  # no text, or it asks for what there is not
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise DatasetError(
            f"{root / 'meta/info.json'}: the path {template!r} cannot be filled in ({reason}); correct it."
        ) from error
    parts = PurePosixPath(relative)
    if parts.is_absolute() or ".." in parts.parts or "\0" in relative or len(relative) > 1000:
        raise DatasetError(
            f"{root / 'meta/info.json'}: the path {relative[:200]!r} leaves the data set's directory."
        )
    return root / parts


def _check_order(path: Path, rows: list[dict], findings: _Findings) -> list[dict]:
    """Rows of the episodes' metadata, sorted: numbers must be 0, 1, 2 ... and lengths positive."""
    with _told(path):
        rows = sorted(rows, key=lambda row: row["episode_index"])
        for number, row in enumerate(rows):
            if row["episode_index"] != number:
                raise DatasetError(
                    f"{path}: episode {number} is missing, or {row['episode_index']} is there twice."
                )
            if not isinstance(row["length"], int) or row["length"] < 1:
                findings.problem(
                    f"{path}: episode {number} has length {row['length']}; it needs 1 frame or more."
                )
    return rows


def _read_episodes_v3(root: Path, info: dict, videos: list[str], findings: _Findings):
    files = sorted((root / "meta" / "episodes").glob("*/*.parquet"))
    if not files:
        raise DatasetError(f"{root / 'meta/episodes'} has no parquet file; copy the data set again.")
    rows: list[dict] = []
    for path in files:
        with _told(path):
            names = [name for name in _parquet(path).schema_arrow.names if not name.startswith("stats/")]
            rows += [row | {"": path} for row in _parquet(path).read(names).to_pylist()]
    episodes: list[_Episode] = []
    first = 0
    for number, row in enumerate(_check_order(files[0], rows, findings)):
        path, length = row[""], row["length"]
        with _told(path, f"episode {number}"):
            start, end = row["dataset_from_index"], row["dataset_to_index"]
            if (start, end) != (first, first + length):
                findings.problem(
                    f"{path}: episode {number} spans frames {start} to {end}, but with {length} frames after "
                    f"{first} others it must span {first} to {first + length}."
                )
            place = {name: int(row[f"data/{name}"]) for name in ("chunk_index", "file_index")}
            clips = {}
            for key in videos:
                at = {name: int(row[f"videos/{key}/{name}"]) for name in ("chunk_index", "file_index")}
                begin, to = (float(row[f"videos/{key}/{name}_timestamp"]) for name in ("from", "to"))
                if not math.isfinite(begin + to):
                    raise DatasetError(f"{path}: episode {number} lasts from {begin} to {to} s in {key}.")
                clips[key] = (_inside(root, info.get("video_path"), video_key=key, **at), begin, to)
            episodes.append(_Episode(length, first, _inside(root, info.get("data_path"), **place), clips))
            first += length

    def episode_stats(key: str) -> list[dict[str, np.ndarray]]:
        found: dict[int, dict] = {}
        for path in files:
            with _told(path):
                names = [
                    n for n in _parquet(path).schema_arrow.names if n.rpartition("/")[0] == f"stats/{key}"
                ]
                for row in _parquet(path).read(["episode_index", *names]).to_pylist():
                    values = {n.rpartition("/")[2]: row[n] for n in names if row[n] is not None}
                    found[row["episode_index"]] = {n: np.asarray(v, np.float64) for n, v in values.items()}
        return [found.get(e, {}) for e in range(len(episodes))]

    return episodes, episode_stats


def _read_episodes_v2(root: Path, info: dict, videos: list[str], findings: _Findings):
    path = root / "meta" / "episodes.jsonl"
    episodes: list[_Episode] = []
    first = 0
    for number, row in enumerate(_check_order(path, _read_lines(path), findings)):
        with _told(path, f"episode {number}"):
            at = {"episode_index": number, "episode_chunk": number // int(info.get("chunks_size", 1000))}
            end = row["length"] / float(info["fps"])
            clips = {
                key: (_inside(root, info.get("video_path"), video_key=key, **at), 0.0, end) for key in videos
            }
            episodes.append(_Episode(row["length"], first, _inside(root, info.get("data_path"), **at), clips))
            first += row["length"]

    def episode_stats(key: str) -> list[dict[str, np.ndarray]]:
        path = root / "meta" / "episodes_stats.jsonl"  # v2.0 has none
        rows = _read_lines(path) if path.exists() else []
        with _told(path):
            found = {row["episode_index"]: row["stats"].get(key, {}) for row in rows}
            values = [found.get(e, {}) for e in range(len(episodes))]
            return [{name: np.asarray(v, np.float64) for name, v in entry.items()} for entry in values]

    return episodes, episode_stats


# ---- rows of the tables ------------------------------------------------------------------------------------
@dataclass
class _Rows:
    """Rows of the episodes `ids`, in ascending order, and where each row's other columns are."""

    ids: list[int]
    spans: list[tuple[int, int]]
    columns: dict[str, np.ndarray]
    files: list[Path]
    file_of_row: np.ndarray
    row_in_file: np.ndarray


def _vector_keys(meta: _Metadata, cfg: DatasetConfig) -> dict[str, str]:
    """Column of the data set -> name in the batch, for action, state and environment state."""
    other = (*INDEX_COLUMNS, *meta.cameras())
    have = [key for key, f in meta.features.items() if key not in other and f["dtype"] != "string"]
    for flag, key in (("action-key", cfg.action_key), ("state-key", cfg.state_key)):
        if (
            key not in have and key != STATE
        ):  # a set without a state can be trained on, one without an action not
            raise DatasetError(
                f"--dataset.{flag}={key} is no column of {meta.root}; it has {', '.join(have)}."
            )
    wanted = {ENV_STATE: ENV_STATE, cfg.state_key: STATE, cfg.action_key: ACTION}
    names = {key: name for key, name in wanted.items() if key in have}
    for key in names:
        if len(meta.shape(key)) > 1:
            raise DatasetError(f"{meta.info}: {key} has shape {meta.shape(key)}; a vector is needed.")
    return names


def _other_states(meta: _Metadata, cfg: DatasetConfig) -> list[str]:
    """Vectors of numbers observed beside the environment's state, of which one may be the robot's."""
    used = (*meta.cameras(), ENV_STATE, cfg.action_key)
    return [
        key
        for key, feature in meta.features.items()
        if key.startswith("observation.") and key not in used
        if feature["dtype"].startswith("float") and np.shape(feature.get("shape") or 0) == (1,)
    ]


def _read_rows(meta: _Metadata, ids: list[int], cfg: DatasetConfig, findings: _Findings) -> _Rows:
    """Read and check the table rows of some episodes; images are left where they are."""
    names = _vector_keys(meta, cfg)
    if STATE not in names.values() and (others := _other_states(meta, cfg)):
        findings.warn(
            f"the policy gets no robot state; the data set has {', '.join(others)}: give --dataset.state-key."
        )
    names |= {key: key for key in INDEX_COLUMNS if key in meta.features}
    parts: dict[int, dict[str, np.ndarray]] = {}
    episodes_of: dict[Path, list[int]] = {}
    for e in ids:
        episodes_of.setdefault(meta.episodes[e].file, []).append(e)
    files = list(episodes_of)
    for number, path in enumerate(files):
        with findings.reading(path):
            parquet = _parquet(path)
            for key in names:
                if key not in parquet.schema_arrow.names:
                    raise DatasetError(f"{path} has no column {key}, which meta/info.json names.")
            table = parquet.read(list(names))
            columns = {
                name: _to_numpy(table.column(key), meta.shape(key), f"{path}: column {key}")
                for key, name in names.items()
            }
            for e in episodes_of[path]:
                with findings.reading(path, f"episode {e}"):
                    part = _episode_rows(meta, e, columns, cfg.tolerance_s, findings)
                    parts[e] = part | {"_file": np.full(meta.episodes[e].length, number, np.int32)}
    ids = [e for e in ids if e in parts]  # all of them, unless problems are being collected
    if not ids:
        raise DatasetError(f"{meta.root}: no episode can be read.")
    joined = {key: np.concatenate([parts[e][key] for e in ids]) for key in parts[ids[0]]}
    ends = np.cumsum([meta.episodes[e].length for e in ids]).tolist()
    spans = [(end - meta.episodes[e].length, end) for e, end in zip(ids, ends)]
    return _Rows(ids, spans, joined, files, joined.pop("_file"), joined.pop("_row"))


def _to_numpy(column: Any, shape: list[int], where: str) -> np.ndarray:
    """A parquet column as (rows, width) if it has lists of any nesting, else as (rows,)."""
    types = _import("pyarrow", "data sets on disk").types
    count, width = len(column), math.prod(shape)
    values, lists = column.combine_chunks(), 0
    while hasattr(values, "flatten") and types.is_nested(values.type):
        if values.null_count:
            break
        if lists == 0 and len(shape) == 1:
            fixed = types.is_fixed_size_list(values.type)
            sizes = np.full(count, values.type.list_size) if fixed else values.value_lengths().to_numpy()
            for short in np.flatnonzero(sizes != width):
                raise DatasetError(
                    f"{where} has {sizes[short]} values in row {short}, not the {width} of info.json."
                )
        values, lists = values.flatten(), lists + 1
    if values.null_count:
        row = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise DatasetError(f"{where} is empty in row {row * count // max(1, len(values))}.")
    array = values.to_numpy(zero_copy_only=False)
    if len(array) != count * width or array.dtype.kind not in "fiub":
        raise DatasetError(
            f"{where} has {len(array)} {array.dtype} in {count} rows; meta/info.json says {width} a row."
        )
    return array.reshape(count, width) if lists or width > 1 else array


def _episode_rows(
    meta: _Metadata, e: int, columns: dict[str, np.ndarray], tolerance_s: float, findings: _Findings
) -> dict[str, np.ndarray]:
    """One episode's rows of a file's columns, checked."""
    path, length = meta.episodes[e].file, meta.episodes[e].length
    inside = columns["episode_index"].reshape(-1)
    places = np.flatnonzero(inside == e)
    if len(places) != length:
        has = (
            f"{len(places)} of it"
            if len(places)
            else f"episodes {inside.min()} to {inside.max()}"
            if len(inside)
            else "none"
        )
        raise DatasetError(
            f"{path}: the metadata says that episode {e} has {length} rows here, but there are {has}."
        )
    part: dict[str, np.ndarray] = {"_row": places, "task_index": np.zeros(length, np.int64)}
    for name, values in columns.items():
        if name in INDEX_COLUMNS:
            part[name] = values.reshape(-1)[places].astype(np.float32 if name == "timestamp" else np.int64)
            continue
        part[name] = values[places].reshape(length, -1).astype(np.float32)
        bad = np.argwhere(~np.isfinite(part[name]))
        if len(bad):
            frame, joint = bad[0]
            findings.problem(
                f"{path}: {name} of episode {e}, frame {frame} (row {places[frame]}), joint {joint} is "
                f"{part[name][frame, joint]}, one of {len(bad)} such values; repair or leave out the episode."
            )
    for name, wanted in (
        ("frame_index", np.arange(length)),
        ("index", meta.episodes[e].first + np.arange(length)),
    ):
        wrong = np.flatnonzero(part[name] != wanted)
        if len(wrong):
            found, right = part[name][wrong[0]], wanted[wrong[0]]
            findings.problem(
                f"{path}: {name} of episode {e} is {found} in row {places[wrong[0]]}, not {right}."
            )
    grid = np.arange(length) / meta.fps
    off = np.nan_to_num(np.abs(part["timestamp"] - grid), nan=np.inf)
    frame = off.argmax()
    if off[frame] > max(0.01 / meta.fps, tolerance_s):
        say = findings.problem if off[frame] > max(0.5 / meta.fps, tolerance_s) else findings.doubt
        say(
            f"{path}: timestamp of episode {e}, frame {frame} (row {places[frame]}) is "
            f"{part['timestamp'][frame]:.4f} s, but at {meta.fps:g} fps it is {grid[frame]:.4f} s; correct "
            f"it, or fps in meta/info.json, or allow more than --dataset.tolerance-s={tolerance_s:g}."
        )
    if (
        meta.num_tasks is not None
        and not 0 <= part["task_index"].min() <= part["task_index"].max() < meta.num_tasks
    ):
        findings.doubt(f"{path}: a task_index of episode {e} is not among the {meta.num_tasks} tasks.")
    return part


# ---- cameras of a data set on disk -------------------------------------------------------------------------
def _chosen_cameras(cfg: DatasetConfig, have: list[str]) -> list[str]:
    for key in cfg.image_keys or ():
        if key not in have:
            raise DatasetError(
                f"--dataset.image-keys names {key}; the cameras are {', '.join(have) or 'none'}."
            )
    return [key for key in have if cfg.image_keys is None or key in cfg.image_keys]


def _image_shape(meta: _Metadata, key: str) -> tuple[int, int, int]:
    """(channels, H, W). LeRobot stores H, W, C and names them; older sets also C, H, W."""
    info, shape, names = meta.info, meta.shape(key), meta.features[key].get("names")
    more = meta.features[key].get("info") or {}
    if more.get("is_depth_map") or more.get("video.is_depth_map"):
        raise DatasetError(
            f"{info}: {key} is a depth camera, which ACT cannot take; leave it out with --dataset.image-keys."
        )
    shape = [*shape, 1] if len(shape) == 2 else shape
    names = [str(name) for name in names[:3]] if isinstance(names, list) else []
    last = 2 if shape[-1] in (1, 3, 4) else 0
    place = next((i for i, name in enumerate(names) if name.startswith("channel")), last)
    height_width = [n for i, n in enumerate(shape) if i != place]
    if len(shape) != 3 or shape[place] not in (1, 3):
        raise DatasetError(
            f"{info}: camera {key} has shape {shape}; height, width and 3 or 1 channels are needed."
        )
    return shape[place], height_width[0], height_width[1]


def _open_cameras(
    meta: _Metadata, rows: _Rows, cfg: DatasetConfig, findings: _Findings
) -> tuple[dict[str, Any], set[str]]:
    """(frame sources, those with one channel): every row's frame is known, one of each camera decoded."""
    cameras: dict[str, Any] = {}
    gray: set[str] = set()
    if not cfg.tolerance_s > 0:
        raise DatasetError(
            f"--dataset.tolerance-s={cfg.tolerance_s} is no length of time; use seconds above 0."
        )
    for key in _chosen_cameras(cfg, meta.cameras()):
        with findings.reading(meta.info, f"camera {key}"):
            channels, *size = _image_shape(meta, key)
            opened = _open_videos if meta.features[key]["dtype"] == "video" else _open_images
            source = opened(meta, rows, key, (size[0], size[1]), cfg, findings)
            if (source.file_of_row >= 0).any():
                source.get(int(np.argmax(source.file_of_row >= 0)))
                cameras[key] = source
            if channels == 1:
                gray.add(key)
                findings.warn(f"camera {key} has one channel; it is repeated three times.")
    return cameras, gray


def _open_videos(
    meta: _Metadata, rows: _Rows, key: str, shape: tuple[int, int], cfg: DatasetConfig, findings: _Findings
) -> VideoFrames:
    files: list[Path] = []
    scans: list[_Scan] = []
    file_of_row, pts_of_row = np.full(rows.spans[-1][1], -1, np.int32), np.zeros(rows.spans[-1][1], np.int64)
    number_of: dict[Path, int] = {}
    used: list[list[tuple[int, int, int]]] = []  # by file: first and last frame and episode, ascending
    promised: Counter[Path] = Counter()
    for episode in meta.episodes:
        promised[episode.videos[key][0]] += episode.length
    for e, span in zip(rows.ids, rows.spans):
        path, begin, to = meta.episodes[e].videos[key]
        with findings.reading(path):
            if path not in number_of:
                scans.append(_scan_video(path, default_cache_dir(cfg.cache_dir)))
                number_of[path] = len(files)
                files.append(path)
                used.append([])
                if tuple(scans[-1].size) != shape:
                    findings.problem(_other_size(path, scans[-1].size, shape))
                has, count = len(scans[-1].pts), promised[path]
                if has != count:
                    findings.doubt(f"{path} has {has} frames, but its episodes have {count}.")
            number = number_of[path]
            scan = scans[number]
            what = f"episode {e} of camera {key}"
            wanted = begin + rows.columns["timestamp"][slice(*span)].astype(np.float64)
            found = _match_frames(scan, wanted, meta.fps, cfg.tolerance_s, what, path)
            place = bisect.bisect(used[number], (int(found[0]), int(found[-1]), e))
            for start, stop, other in used[number][max(0, place - 1) : place + 1]:
                if found[0] <= stop and start <= found[-1]:
                    both = max(int(found[0]), start)
                    raise DatasetError(
                        f"{path}: episodes {other} and {e} of camera {key} both use its frame {both}; the "
                        "metadata points to the wrong file or time."
                    )
            used[number].insert(place, (int(found[0]), int(found[-1]), e))
            file_of_row[slice(*span)], pts_of_row[slice(*span)] = number, scan.pts[found]
            if abs(to - begin - meta.episodes[e].length / meta.fps) > 1.5 / meta.fps:
                findings.doubt(
                    f"{path}: {what} lasts from {begin:.3f} to {to:.3f} s in the metadata, not its length."
                )
    digests, keyframes = [str(scan.digest) for scan in scans], [scan.keyframes for scan in scans]
    return VideoFrames(shape, files, digests, keyframes, file_of_row, pts_of_row)


@dataclass
class _Scan:
    digest: np.ndarray  # () of the file's bytes
    size: np.ndarray  # (2,) height, width
    pts: np.ndarray  # (F,) of every frame, ascending
    keyframes: np.ndarray  # (K, 2) pts and dts of the key frames, ascending
    seconds: np.ndarray  # () of one unit of pts


def _scan_video(path: Path, cache_dir: Path) -> _Scan:
    """Frame times of a video from its packets, without decoding; kept in the cache for the next run."""
    av = _import("av", "videos")
    memo = _memo(path, cache_dir).with_suffix(".npz")
    with suppress(Exception), np.load(memo, allow_pickle=False) as kept:  # not there, or broken: scan again
        return _Scan(**{name: kept[name] for name in kept.files})
    with av.open(str(path)) as container:
        if not container.streams.video or container.streams.video[0].codec_context is None:
            raise DatasetError(
                f"{path} holds no video that this build of PyAV can decode; pip install -U av."
            )
        packets = [
            (packet.pts, packet.pts if packet.dts is None else packet.dts, packet.is_keyframe)
            for packet in container.demux(container.streams.video[0])
            if packet.pts is not None and packet.size and not packet.is_discard
        ]
        table = np.array(sorted(packets), np.int64).reshape(-1, 3)
        stream = container.streams.video[0]
        size = np.array([stream.codec_context.height, stream.codec_context.width])
        seconds = np.array(float(stream.time_base))
    digest = np.array(_file_hash(path, cache_dir))
    scan = _Scan(digest, size, table[:, 0], table[table[:, 2] == 1][:, :2], seconds)
    if not len(scan.keyframes):
        raise DatasetError(f"{path} holds no video frame; the file is damaged.")
    _remember(memo, lambda file: np.savez(file, **vars(scan)))
    return scan


def _match_frames(
    scan: _Scan, wanted: np.ndarray, fps: float, tolerance_s: float, what: str, path: Path
) -> np.ndarray:
    """Number of the video frame for each wanted time (s): the nearest, which must be within the tolerance.

    An offset that all frames of an episode share, as from times summed in float32, is forgiven up to a tenth
    of a frame, where it cannot choose another frame.
    """
    times = scan.pts * scan.seconds
    after = np.searchsorted(times, wanted).clip(0, len(times) - 1)
    before = (after - 1).clip(0)
    nearest = np.where(wanted - times[before] < times[after] - wanted, before, after)
    error = times[nearest] - wanted
    shift = float(np.median(error))
    raw = np.nan_to_num(np.abs(error), nan=np.inf)
    off = np.minimum(raw, np.nan_to_num(np.abs(error - shift), nan=np.inf)) if abs(shift) < 0.1 / fps else raw
    if (off > tolerance_s).any():
        k = int(np.argmax(np.where(off > tolerance_s, raw, -1)))
        raise DatasetError(
            f"{path}: {what} wants a frame at {wanted[k]:.6f} s for its frame {k}, and the nearest of "
            f"{len(times)} is at {times[nearest[k]]:.6f} s; --dataset.tolerance-s allows {tolerance_s:g} s."
        )
    return nearest


def _open_images(
    meta: _Metadata, rows: _Rows, key: str, shape: tuple[int, int], cfg: DatasetConfig, findings: _Findings
) -> EncodedFrames:
    """Copy the encoded images of each parquet file into one that can be mapped, once; where each lies."""
    folder = default_cache_dir(cfg.cache_dir)
    blobs: list[Path] = []
    file_of_row, start, size = (
        np.full_like(rows.file_of_row, -1),
        *np.zeros((2, len(rows.file_of_row)), np.int64),
    )
    order = np.argsort(rows.file_of_row, kind="stable")
    rows_of_file = np.split(order, np.cumsum(np.bincount(rows.file_of_row, minlength=len(rows.files)))[:-1])
    for number, (path, here) in enumerate(zip(rows.files, rows_of_file)):
        blobs.append(folder / "unknown.images")
        with findings.reading(path, f"column {key}"):
            origin = f"{CACHE_FORMAT} encoded {_file_hash(path, folder)} {key}"
            blobs[-1] = folder / f"{_hash((origin + _image_files(path, key, meta.root)).encode())}.images"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                _build_once(blobs[-1], partial(_write_images, path=path, key=key, root=meta.root))
            except OSError as error:
                raise DatasetError(
                    f"{folder} cannot be written ({error}); use another --dataset.cache-dir."
                ) from error
            content = _map_file(blobs[-1])
            table = (
                content[-8 * (int(content[-8:].numpy().view(np.int64)[0]) + 2) : -8].numpy().view(np.int64)
            )
            places = rows.row_in_file[here]
            start[here], size[here], file_of_row[here] = (
                table[places],
                table[places + 1] - table[places],
                number,
            )
            for row in here[size[here] == 0]:
                raise DatasetError(f"{path}: {key} has no image in row {rows.row_in_file[row]}.")
    return EncodedFrames(shape, blobs, rows.files, file_of_row, start, size)


def _image_files(path: Path, key: str, root: Path) -> str:
    """Path, size and time of the image files that a parquet file names; "" if it holds all images itself."""
    parquet, names, held = _parquet(path), [], True
    for group in (parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)):
        for column in (group.column(i) for i in range(group.num_columns)):
            names.append(column.path_in_schema)
            if names[-1] == f"{key}.bytes":  # without its statistics it may miss some
                held &= bool(column.statistics and column.statistics.null_count == 0)
    if held or f"{key}.path" not in names:
        return ""
    about = []
    for value in parquet.read([f"{key}.path"]).column(0).to_pylist():
        if value and value.get("path"):
            with suppress(DatasetError, OSError):  # told when it is read, if this image is not held
                stat = _inside(root, "{path}", path=value["path"]).stat()
                about.append((value["path"], stat.st_size, stat.st_mtime_ns))
    return f" {about}"


def _write_images(file: BinaryIO, path: Path, key: str, root: Path) -> None:
    """The images' bytes, padding to 8, then int64: where they begin and end (rows + 1), number of rows."""
    offsets = [0]
    with _told(path):
        for batch in _parquet(path).iter_batches(batch_size=64, columns=[key]):
            for value in batch.column(0).to_pylist():
                content = value.get("bytes") if isinstance(value, dict) else value
                if content is None and isinstance(value, dict) and value.get("path"):
                    image = _inside(root, "{path}", path=value["path"])
                    with _told(image):
                        content = image.read_bytes()
                if content and not _is_whole_image(content):
                    raise DatasetError(
                        f"{path}: the image of {key} in row {len(offsets) - 1} is damaged; replace it, or "
                        "leave out its episode."
                    )
                file.write(content or b"")
                offsets.append(offsets[-1] + len(content or b""))
    file.write(b"\0" * (-offsets[-1] % 8))
    file.write(np.array([*offsets, len(offsets) - 1], np.int64).tobytes())


def _is_whole_image(content: bytes) -> bool:
    """Checksums of a PNG, the end marker of a JPEG; of other kinds nothing is known.

    Before the decoder sees it: a PNG with a wrong checksum crashes or hangs torchvision's (0.29), and a JPEG
    that is cut becomes a picture with a gray part.
    """
    if content[:3] == b"\xff\xd8\xff":
        place = 2
        while marker := JPEG_MARKER.search(content, place):
            if marker[0] == b"\xff\xd9":
                return True  # the end; cameras write things of their own behind it
            size = int.from_bytes(content[marker.end() : marker.end() + 2])
            place = marker.end() + size  # past a thumbnail, which has an end marker too
        return False
    if content[:8] != b"\x89PNG\r\n\x1a\n":
        return True
    place, kind = 8, b""
    while kind != b"IEND" and place + 12 <= len(content):
        end = place + 8 + int.from_bytes(content[place : place + 4])
        kind = content[place + 4 : place + 8]
        if zlib.crc32(content[place + 4 : end]) != int.from_bytes(content[end : end + 4]):
            return False
        place = end + 4
    return kind == b"IEND"


# ---- statistics --------------------------------------------------------------------------------------------
def _statistics(
    cfg: DatasetConfig, train: EpisodeDataset, given: dict[str, dict[str, np.ndarray]], gray: set[str]
) -> tuple[dict[str, dict[str, Tensor]], str]:
    """The one set of statistics of a run: used in training, stored in the checkpoint, used at inference.

    They are those of the episodes that are trained on. All episodes: meta/stats.json as it is, equal to
    LeRobot's. A subset: computed anew from its rows, for cameras aggregated from the episodes' own. What is
    missing is computed. 3-channel cameras get ImageNet's mean and std unless the flag says no. The std of a
    joint of state or action is at least cfg.min_std.

    Returns:
        ({key: {"mean", "std", "min", "max", "count", ...: float32}}, where from). Cameras: (3, 1, 1).
    """
    if not cfg.min_std >= 0:
        raise DatasetError(f"--dataset.min-std={cfg.min_std} is no floor; use 0 or more.")
    rows = np.concatenate([np.arange(*span) for span in train.spans()])
    stats = {key: given[key] for key in INDEX_COLUMNS if key in given}
    computed: dict[str, bool] = {}
    for key in (key for key in (ACTION, STATE, ENV_STATE) if key in train.columns):
        measured = _measure(train.columns[key][rows])
        wrong, usable = _compare(key, given.get(key), measured)
        train.notes += [f"warning: {text}" for text in wrong]
        stats[key], computed[key] = (given[key], False) if usable else (measured, True)
        still = np.flatnonzero(stats[key]["std"] < cfg.min_std)
        if len(still):
            train.notes.append(
                f"warning: {key} hardly moves in joint {', '.join(str(j) for j in still)}: its std, at least "
                f"{stats[key]['std'].min():.2g}, is raised to --dataset.min-std={cfg.min_std:g}."
            )
            stats[key] = stats[key] | {"std": np.maximum(stats[key]["std"], cfg.min_std)}
    for key, source in train.cameras.items():
        imagenet = cfg.use_imagenet_stats and key not in gray
        entry = given.get(key) or ({} if imagenet else _measure_frames(source, rows))
        entry = {
            name: value.reshape(-1) if name == "count" else np.resize(value, (3, 1, 1))
            for name, value in entry.items()
        }
        if imagenet:
            entry |= {name: np.array(value).reshape(3, 1, 1) for name, value in IMAGENET.items()}
        else:
            mean, std = (
                entry["mean"].reshape(-1).round(4).tolist(),
                entry["std"].reshape(-1).round(4).tolist(),
            )
            if min(mean) < 0 or max(mean) > 1 or min(std) < 0.02 or max(std) > 0.6:
                train.notes.append(
                    f"warning: the statistics of camera {key}, mean {mean} and std {std}, do not look like "
                    "frames scaled to 0..1; correct them, or use --dataset.use-imagenet-stats."
                )
        stats[key] = entry
    tensors = {
        key: {name: torch.tensor(np.array(value), dtype=torch.float32) for name, value in entry.items()}
        for key, entry in stats.items()
    }
    if all(computed.values()):
        return tensors, "computed from their rows"
    again = [key for key in computed if computed[key]]
    return tensors, "meta/stats.json" + (f"; {', '.join(again)} computed from the rows" if again else "")


def _statistics_on_disk(
    meta: _Metadata, ids: list[int], cfg: DatasetConfig, cameras: dict[str, Any]
) -> dict[str, dict[str, np.ndarray]]:
    """What the data set says: meta/stats.json for all episodes, else for cameras the chosen episodes' own."""
    names = _vector_keys(meta, cfg) | {key: key for key in (*cameras, *INDEX_COLUMNS)}
    whole, chosen = len(ids) == len(meta.episodes), set(ids)
    stats = {name: meta.stats[key] for key, name in names.items() if whole and key in meta.stats}
    for key in cameras:
        if not {"mean", "std"} <= set(stats.get(key, ())):
            parts = [part for e, part in enumerate(meta.episode_stats(key)) if e in chosen]
            stats[key] = _aggregate(parts) if all({"mean", "std", "count"} <= set(p) for p in parts) else {}
        if any(stats[key][name].size not in (1, 3) for name in stats[key]):
            stats[key] = {}  # of another form: computed anew
    return stats


def _aggregate(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Statistics of a union from its parts' (population std; quantiles by weighted mean, as LeRobot does)."""
    count = np.array([part["count"].reshape(-1)[0] for part in parts])
    stack = {name: np.stack([p[name] for p in parts]) for name in parts[0] if all(name in p for p in parts)}
    weight = (count / count.sum()).reshape(-1, *(1,) * parts[0]["mean"].ndim)
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
    with np.errstate(invalid="ignore"):  # NaN in, NaN out
        found = {name: getattr(values, name)(axis=0) for name in ("min", "max", "mean", "std")}
        quantiles = np.quantile(values, (0.01, 0.1, 0.5, 0.9, 0.99), axis=0)
    return (
        found | {"count": np.array([len(values)])} | dict(zip(("q01", "q10", "q50", "q90", "q99"), quantiles))
    )


def _measure_frames(source: Any, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics of a camera in [0, 1] by channel (3, 1, 1), from 48 of these rows at every second pixel."""
    chosen = rows[np.unique(np.linspace(0, len(rows) - 1, 48).astype(int))]
    parts = [_measure(source.get(int(row))[::2, ::2].reshape(-1, 3) / 255.0) for row in chosen]
    joined = _aggregate(parts)
    return {name: value if name == "count" else value.reshape(3, 1, 1) for name, value in joined.items()}


def _compare(
    key: str,
    entry: dict[str, np.ndarray] | None,
    measured: dict[str, np.ndarray],
    where: str = "meta/stats.json",
) -> tuple[list[str], bool]:
    """(sentences on what the data contradicts, are the stored statistics usable)"""
    if entry is None:
        return [], False
    wrong = []
    for name in ("mean", "std", "min", "max"):
        if name not in entry or entry[name].shape != measured[name].shape:
            text = f"the statistics of {key} in {where} have no {name} of its shape; they are computed anew."
            return [text], False
        scale = np.maximum(measured["std"], 1e-3 * np.abs(measured["mean"]) + 1e-6)
        off = np.nan_to_num(np.abs(entry[name] - measured[name]) / scale, nan=np.inf)
        off[~np.isfinite(measured[name])] = 0  # NaN in the data has been told
        if off.max() > 0.01:
            j = int(off.argmax())
            wrong.append(
                f"the {name} of {key}, joint {j} is {entry[name][j]:.6g} in the statistics and "
                f"{measured[name][j]:.6g} in the data ({(off > 0.01).sum()} of {off.size} joints in {where} "
                "are off); python data.py check --fix-stats writes the right ones."
            )
    return wrong, all(np.isfinite(entry[name]).all() for name in ("mean", "std", "min", "max"))


# ---- commands ----------------------------------------------------------------------------------------------
def check_dataset(
    cfg: DatasetConfig, chunk_size: int = 100, fix_stats: bool = False
) -> tuple[list[str], list[str], list[str]]:
    """(problems, warnings, what was checked) of a whole data set, every frame decoded."""
    findings = _Findings(strict=False)
    try:
        meta = _read_metadata(resolve_root(cfg), findings)
        rows = _read_rows(meta, list(range(len(meta.episodes))), cfg, findings)
        cameras, _ = _open_cameras(meta, rows, cfg, findings)
        names = _vector_keys(meta, cfg)
    except DatasetError as error:
        return [*findings.problems, str(error)], findings.warnings, []
    frames = _count(sum(stop - start for start, stop in rows.spans), "frame")
    sizes = Counter("x".join(map(str, source.shape)) for source in cameras.values())
    parts = [f"{key} [{rows.columns[name].shape[1]}]" for key, name in reversed(names.items())]
    parts += [f"{_count(number, 'camera')} {size}" for size, number in sizes.items()]
    notes = [", ".join([_count(len(rows.ids), "episode"), f"{frames} at {meta.fps:g} fps", *parts])]
    known = {episode.file for episode in meta.episodes} | {
        v[0] for e in meta.episodes for v in e.videos.values()
    }
    for path in (*(meta.root / "data").rglob("*.parquet"), *(meta.root / "videos").rglob("*.mp4")):
        if path not in known:
            findings.warn(f"{path} belongs to no episode.")
    fixed = {key: {name: v.tolist() for name, v in entry.items()} for key, entry in meta.stats.items()}
    for key, name in names.items():
        measured = _measure(rows.columns[name])
        wrong, usable = _compare(name, meta.stats.get(key), measured)
        if meta.stats and key not in meta.stats:
            wrong = [f"meta/stats.json has no statistics of {key}."]
        if wrong or not usable:
            fixed[key] = {n: v.tolist() for n, v in measured.items()}
        with findings.reading(meta.root, f"the statistics of {key} by episode"):
            by_episode = meta.episode_stats(key)
            for e, span in zip(rows.ids, rows.spans):
                measured_here = _measure(rows.columns[name][slice(*span)])
                off, _ = _compare(name, by_episode[e] or None, measured_here, "the metadata of episodes")
                wrong += [f"episode {e}: {text}" for text in off[:1]]
        for text in wrong:
            findings.problem(f"{meta.root}: {text}")
        for j in np.flatnonzero(measured["std"] < cfg.min_std):
            findings.warn(f"{key}, joint {j} is constant or nearly so (std {measured['std'][j]:.2g}).")
    for key, source in cameras.items():
        progress = _Progress(f"decoding {key}", len(source))
        for e, span in zip(rows.ids, rows.spans):
            if source.file_of_row[span[0]] >= 0:
                with findings.reading(meta.root, f"episode {e} of camera {key}"):
                    for _ in _in_order(source, *span):
                        progress.add(1)
        progress.close()
        with findings.reading(meta.root, f"the statistics of camera {key}"):
            measured = _measure_frames(source, np.flatnonzero(source.file_of_row >= 0))
            stored = {name: np.resize(v, (3, 1, 1)) for name, v in meta.stats.get(key, {}).items()}
            if meta.stats and not {"mean", "std"} <= set(stored):
                raise DatasetError(f"{meta.root}: meta/stats.json has no mean and std of camera {key}.")
            ratio = stored["std"] / measured["std"] if stored else np.ones(3)
            far = bool(stored) and np.abs(stored["mean"] - measured["mean"]).max() > 0.1
            if far or abs(np.log2(ratio)).max() > 1:
                fixed[key] = {n: v.tolist() for n, v in measured.items()}
                text = "; ".join(
                    f"{n} {stored[n].reshape(-1).round(4).tolist()} in the statistics and "
                    f"{measured[n].reshape(-1).round(4).tolist()} in the frames"
                    for n in ("mean", "std")
                )
                findings.problem(f"{meta.root}: camera {key} has {text}.")
    lengths = np.array([stop - start for start, stop in rows.spans])
    if (lengths < chunk_size).any():
        which = ", ".join(str(rows.ids[i]) for i in np.flatnonzero(lengths < chunk_size)[:20])
        short = int((lengths < chunk_size).sum())
        verb = "is" if short == 1 else "are"
        findings.warn(f"{_count(short, 'episode')} {verb} shorter than the chunk of {chunk_size}: {which}.")
    valid = np.concatenate([np.minimum(np.arange(n, 0, -1), chunk_size) for n in lengths])
    padded = 1 - valid.mean() / chunk_size
    text = f"{padded:.1%} of the target steps are padding at chunk {chunk_size}"
    if padded > MUCH_PADDING:
        findings.warn(f"{text}; a smaller one wastes less.")
    else:
        notes.append(text)
    if fix_stats:
        target = meta.root / "meta" / "stats.fixed.json"
        for key, name in names.items():
            fixed.setdefault(key, {n: v.tolist() for n, v in _measure(rows.columns[name]).items()})
        target.write_text(json.dumps(fixed, indent=4))
        notes.append(
            f"the statistics, corrected where they were wrong, are in {target}; move it over stats.json"
        )
    return findings.problems, findings.warnings, notes


def main() -> int:
    import tyro

    def own_flags(text: str) -> str:
        """The text for these commands, whose flags are train.py's without their prefix."""
        return re.sub(r"--(dataset|policy)\.(?=[a-z])", "--", text)

    def check(cfg: DatasetConfig, chunk_size: int = 100, fix_stats: bool = False) -> int:
        """Check a whole data set, every frame decoded: name each problem, and exit with 1 if there is one.

        Args:
            cfg: Where the data set is, and how it would be trained on.
            chunk_size: Steps of an action chunk, for the share of padding.
            fix_stats: Write meta/stats.fixed.json, with what was wrong computed from the data.
        """
        problems, warnings, notes = check_dataset(cfg, chunk_size, fix_stats)
        lines = [*(f"problem: {text}" for text in problems), *warnings]
        lines += [f"{cfg.root or cfg.repo_id}: {'; '.join(notes) or 'not all of it could be read'}"]
        print(*map(own_flags, lines), sep="\n")
        print(f"{_count(len(problems), 'problem')}, {_count(len(warnings), 'warning')}")
        return 1 if problems else 0

    def cache(cfg: DatasetConfig) -> int:
        """Decode a data set's frames into the frame cache, so that the next run starts at once.

        Args:
            cfg: Where the data set is, which part of it, and where the cache goes.
        """
        mode: Literal["disk"] = "disk"
        train, _ = open_dataset(replace(cfg, cache=mode), chunk_size=1)
        print(*map(own_flags, train.notes), sep="\n")
        return 0

    try:
        commands = {"check": check, "cache": cache}
        return tyro.extras.subcommand_cli_from_dict(commands, config=(tyro.conf.OmitArgPrefixes,))
    except (ValueError, ImportError) as error:
        print(own_flags(str(error)), file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
