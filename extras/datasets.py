"""LeRobot datasets and the built-in task, opened for training: lerobot_data, frames and data.py together.

    train, val, notes = open_dataset(DatasetConfig(root="DIR"), chunk_size=100)
    train, val, notes = open_demonstrations(DatasetConfig(), SimConfig(episodes=50), chunk_size=100)

The order of things: flags, metadata, rows, frame sources, resizing, the frame cache; then `data.open_columns`
takes columns and sources, as it would take them from anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import data
from extras import frames, lerobot_data, sim
from extras.lerobot_data import Metadata, Rows

Opened = tuple[data.EpisodeDataset, data.EpisodeDataset | None, list[data.Note]]
MANY_WARNINGS = 8
MUCH_PADDING = 0.5
"""Share of the target steps, above which padding is a warning."""


def open_dataset(cfg: data.DatasetConfig, chunk_size: int) -> Opened:
    """(training episodes, validation episodes or None, notes) of a LeRobot dataset, checked and cached.

    Raises:
        UserError: one sentence, for whatever would stop the training later: a wrong flag, missing or corrupt
            files, metadata that does not add up, frames off their times, NaN, no space for the cache. An
            optional package that is not installed names its pip line.
    """
    check_dataset_config(cfg, chunk_size)
    meta = lerobot_data.read_metadata(lerobot_data.resolve_root(cfg.root, cfg.repo_id))
    stats, warnings = lerobot_data.read_stats(meta)
    train_ids, val_ids = data.split_episodes(cfg, len(meta.episodes))
    names = lerobot_data.vector_keys(meta, cfg.action_key, cfg.state_key)
    rows = lerobot_data.read_rows(meta, names, sorted(train_ids + val_ids), cfg.tolerance_s)
    warnings = [*warnings, *meta.warnings, *lerobot_data.state_note(meta, names), *rows.warnings]
    cameras: dict[str, Any] = {}
    gray = set()
    for key in data.chosen_cameras(cfg, meta.cameras()):
        cameras[key], is_gray, more = open_camera(meta, rows, key, cfg)
        warnings += more
        if is_gray:
            gray.add(key)
    train, val, notes = open_columns(
        cfg,
        chunk_size,
        rows.columns,
        [meta.episodes[e].length for e in rows.ids],
        meta.fps,
        cameras,
        episode_ids=rows.ids,
        num_episodes=len(meta.episodes),
        input_order=[names.get(key, key) for key in meta.features],
        stored=stored_stats(meta, stats, train_ids, names, list(cameras)),
        gray=gray,
    )
    return train, val, opening_notes(meta, warnings) + notes


def open_demonstrations(cfg: data.DatasetConfig, task: sim.SimConfig, chunk_size: int) -> Opened:
    """The same of the built-in task's demonstrations, drawn at cfg.image_size (480x640 if there is none)."""
    check_dataset_config(cfg, chunk_size)
    height, width = cfg.image_size or (480, 640)
    demos = sim.Demonstrations(task.episodes, task.seed, height, width)
    lengths = [int(length) for length in demos.lengths]
    train, val, notes = open_columns(cfg, chunk_size, demos.columns, lengths, demos.fps, demos.cameras)
    note = data.Note("info", f"dataset: the built-in two-arm task, {task.episodes} demonstrations")
    return train, val, [note, *notes]


def open_columns(
    cfg: data.DatasetConfig,
    chunk_size: int,
    columns: Mapping[str, np.ndarray],
    lengths: Sequence[int],
    fps: float,
    cameras: Mapping[str, Any],
    *,
    episode_ids: Sequence[int] | None = None,
    num_episodes: int | None = None,
    input_order: Sequence[str] = (),
    stored: data.Stats | None = None,
    gray: Collection[str] = (),
) -> Opened:
    """data.open_columns, with the frames resized and cached as the flags say, and statistics of cameras.

    Args: as there, and
        stored: the dataset's own statistics, used where the data agrees.
        gray: cameras of one channel, repeated; ImageNet's statistics are not theirs.
    """
    check_dataset_config(cfg, chunk_size)
    num_episodes = len(lengths) if num_episodes is None else num_episodes
    ids = list(range(len(lengths)) if episode_ids is None else episode_ids)
    train_ids, val_ids = (set(part) for part in data.split_episodes(cfg, num_episodes))
    ends = np.cumsum(lengths).tolist()
    spans = {e: (end - length, end) for e, end, length in zip(ids, ends, lengths)}
    sources = {key: cameras[key] for key in data.chosen_cameras(cfg, cameras)}
    if cfg.image_size is not None:
        sources = {key: resized(source, cfg.image_size) for key, source in sources.items()}
    used = [span for e, span in spans.items() if e in train_ids | val_ids]
    sources, about = frames.cached(sources, used, cfg.cache, frames.default_cache_dir(cfg.cache_dir))
    rows = np.concatenate([np.arange(*span) for e, span in spans.items() if e in train_ids])
    keys = (key for key in (data.ACTION, data.STATE, data.ENV_STATE) if key in columns)
    vectors = {key: columns[key][rows] for key in keys}
    stats, wrong = usable_statistics(vectors, stored or {})
    computed = [key for key in vectors if key not in stats]
    for key, source in sources.items():
        imagenet = cfg.use_imagenet_stats and key not in gray
        stats[key] = camera_statistics(source, rows, (stored or {}).get(key, {}), imagenet)
        if not imagenet:
            wrong += implausible(key, stats[key])
    train, val, notes = data.open_columns(
        cfg,
        chunk_size,
        columns,
        lengths,
        fps,
        sources,
        episode_ids=episode_ids,
        num_episodes=num_episodes,
        input_order=input_order,
        stored_stats=stats,
    )
    notes = [data.Note("warning", text, "statistics") for text in wrong] + notes
    notes.append(data.Note("info", origin(train, num_episodes, vectors, computed), "statistics"))
    about_cache = [data.Note(note.level, note.text, "cache") for note in about]
    return train, val, about_cache + notes + padding_notes(train)


def resized(source: Any, size: tuple[int, int]) -> Any:
    shape = (int(size[0]), int(size[1]))
    return source if tuple(source.shape) == shape else frames.Resized(source, shape)


def camera_keys(cfg: data.DatasetConfig) -> list[str]:
    """The cameras that training will read, from meta/info.json alone: known before any frame is decoded."""
    features = lerobot_data.read_info(lerobot_data.resolve_root(cfg.root, cfg.repo_id))["features"]
    cameras = [key for key, feature in features.items() if feature["dtype"] in ("video", "image")]
    return data.chosen_cameras(cfg, cameras)


def opening_notes(meta: Metadata, warnings: list[str]) -> list[data.Note]:
    count = len(meta.episodes)
    text = f"dataset {meta.root}: {count:,} episode{'' if count == 1 else 's'} at {meta.fps:g} fps"
    notes = [data.Note("info", text)]
    notes += [data.Note("warning", warning) for warning in warnings[:MANY_WARNINGS]]
    more = len(warnings) - MANY_WARNINGS
    if more > 0:
        text = f"{more} more of the kind; python data.py check --root {meta.root} lists them."
        notes.append(data.Note("warning", text))
    return notes


# ---- cameras of a dataset on disk
def open_camera(meta: Metadata, rows: Rows, key: str, cfg: data.DatasetConfig) -> tuple[Any, bool, list[str]]:
    """(frame source, has it one channel, warnings): every row's frame is known, the first one decoded."""
    camera = new_camera(meta, rows, key, cfg)
    warnings: list[str] = []
    for part in camera.parts:
        warnings += camera.add(*part)
    source = camera.source()
    source.get(0)
    if camera.gray:
        warnings.append(gray_warning(key))
    return source, camera.gray, warnings


def new_camera(meta: Metadata, rows: Rows, key: str, cfg: data.DatasetConfig) -> VideoCamera | ImageCamera:
    """Not one part of it is read yet."""
    kind = VideoCamera if meta.features[key]["dtype"] == "video" else ImageCamera
    return kind(meta, rows, key, cfg)


def gray_warning(key: str) -> str:
    return f"camera {key} has one channel; it is repeated three times."


class VideoCamera:
    """A camera in videos; its parts are the episodes."""

    def __init__(self, meta: Metadata, rows: Rows, key: str, cfg: data.DatasetConfig) -> None:
        channels, height, width = lerobot_data.image_shape(meta, key)
        self.gray, self.shape, self.parts = channels == 1, (height, width), list(zip(rows.ids, rows.spans))
        scan = partial(frames.scan_video, cache_dir=frames.default_cache_dir(cfg.cache_dir))
        self.videos = lerobot_data.VideoRows(meta, rows, key, self.shape, cfg.tolerance_s, scan)

    def add(self, e: int, span: tuple[int, int]) -> list[str]:
        return self.videos.add(e, span)

    def source(self) -> frames.VideoFrames:
        videos = self.videos
        digests = [str(scan.digest) for scan in videos.scans]
        keyframes = [scan.keyframes for scan in videos.scans]
        row_columns = videos.file_of_row, videos.pts_of_row
        return frames.VideoFrames(self.shape, videos.files, digests, keyframes, *row_columns)


class ImageCamera:
    """A camera whose images lie inside the tables or in files beside them; its parts are the tables.

    The encoded images of each table are copied into one file that can be mapped, once.
    """

    def __init__(self, meta: Metadata, rows: Rows, key: str, cfg: data.DatasetConfig) -> None:
        channels, height, width = lerobot_data.image_shape(meta, key)
        self.gray, self.shape = channels == 1, (height, width)
        self.root, self.rows, self.key = meta.root, rows, key
        self.cache_dir = frames.default_cache_dir(cfg.cache_dir)
        order = np.argsort(rows.file_of_row, kind="stable")
        counts = np.bincount(rows.file_of_row, minlength=len(rows.files))
        rows_of_file = np.split(order, np.cumsum(counts)[:-1])
        self.parts = list(zip(range(len(rows.files)), rows.files, rows_of_file))
        self.blobs = [self.cache_dir / "unknown.images"] * len(rows.files)
        self.file_of_row = np.full_like(rows.file_of_row, -1)
        self.start, self.size = np.zeros((2, len(rows.file_of_row)), np.int64)

    def add(self, number: int, path: Path, rows: np.ndarray) -> list[str]:
        key, root = self.key, self.root
        digest = frames.file_hash(path, self.cache_dir)
        origin = f"{frames.CACHE_FORMAT} encoded {digest} {key}"
        origin += lerobot_data.image_files(path, key, root)
        images = partial(lerobot_data.read_images, path, key, root, frames.is_whole_image)
        self.blobs[number], offsets = frames.pack_images(images, origin, self.cache_dir)
        at = self.rows.row_in_file[rows]
        size = offsets[at + 1] - offsets[at]
        for row in at[size == 0]:
            raise lerobot_data.DatasetError(f"{path}: {key} has no image in row {row}.")
        self.start[rows], self.size[rows], self.file_of_row[rows] = offsets[at], size, number
        return []

    def source(self) -> frames.EncodedFrames:
        row_columns = self.file_of_row, self.start, self.size
        return frames.EncodedFrames(self.shape, self.blobs, self.rows.files, *row_columns)


# ---- statistics
def stored_stats(
    meta: Metadata, stats: data.Stats, ids: list[int], names: dict[str, str], cameras: Collection[str]
) -> data.Stats:
    """What the dataset says: meta/stats.json for all episodes, else for cameras the chosen episodes' own."""
    names = names | {key: key for key in (*cameras, *data.INDEX_COLUMNS)}
    whole, chosen = len(ids) == len(meta.episodes), set(ids)
    stored = {name: stats[key] for key, name in names.items() if whole and key in stats}
    for key in cameras:
        if not {"mean", "std"} <= set(stored.get(key, ())):
            per_episode = lerobot_data.episode_stats(meta, key)
            parts = [part for e, part in enumerate(per_episode) if e in chosen]
            stored[key] = aggregate(parts) if can_be_joined(parts) else {}
        if any(value.size not in (1, 3) for value in stored[key].values()):
            stored[key] = {}  # of another form: computed anew
    return stored


def can_be_joined(parts: list[dict[str, np.ndarray]]) -> bool:
    shapes = {name: {part[name].shape for part in parts if name in part} for name in parts[0]}
    complete = all({"mean", "std", "count"} <= set(part) for part in parts)
    return complete and all(len(found) == 1 for found in shapes.values())


def usable_statistics(vectors: Mapping[str, np.ndarray], stored: data.Stats) -> tuple[data.Stats, list[str]]:
    """The stored statistics that can be used for these rows, and what the rows contradict, in sentences."""
    usable = {key: stored[key] for key in data.INDEX_COLUMNS if key in stored}
    wrong: list[str] = []
    for key, values in vectors.items():
        if key in stored:
            sentences, is_usable = contradictions(key, stored[key], data.measure(values))
            wrong += sentences
            if is_usable:
                usable[key] = stored[key]
    return usable, wrong


def origin(
    train: data.EpisodeDataset, num_episodes: int, vectors: Collection[str], computed: list[str]
) -> str:
    """A sentence on where the statistics come from."""
    source = "computed from their rows"
    if len(computed) < len(vectors):
        anew = f"; {', '.join(computed)} computed from the rows" if computed else ""
        source = f"meta/stats.json{anew}"
    return f"statistics from {train.num_episodes} of {num_episodes} episodes ({source})"


def camera_statistics(
    source: data.FrameSource, rows: np.ndarray, stored: dict[str, np.ndarray], imagenet: bool
) -> dict[str, np.ndarray]:
    """Per channel (3, 1, 1): the stored ones, else measured; with ImageNet's mean and std if so."""
    entry = stored
    if not entry and not imagenet:
        entry = measure_frames(source, rows)
    entry = {
        name: value.reshape(-1) if name == "count" else np.resize(value, (3, 1, 1))
        for name, value in entry.items()
    }
    if imagenet:
        entry |= {name: np.array(value).reshape(3, 1, 1) for name, value in data.IMAGENET.items()}
    return entry


def implausible(key: str, entry: dict[str, np.ndarray]) -> list[str]:
    """A warning if a camera's statistics cannot be those of values from 0 to 1."""
    mean, std = (entry[name].reshape(-1).round(4).tolist() for name in ("mean", "std"))
    if min(mean) >= 0 and max(mean) <= 1 and min(std) >= 0.02 and max(std) <= 0.6:
        return []
    text = (
        f"the statistics of camera {key}, mean {mean} and std {std}, do not look like "
        "frames scaled to 0..1; correct them, or use --dataset.use-imagenet-stats."
    )
    return [text]


def aggregate(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
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


def measure_frames(source: data.FrameSource, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics of a camera in [0, 1] per channel (3, 1, 1), from 48 of these rows at every second pixel."""
    chosen = rows[np.unique(np.linspace(0, len(rows) - 1, 48).astype(int))]
    frame, parts = torch.empty((1, 3, *source.shape), dtype=torch.uint8), []
    for row in chosen:
        source.read_into(np.array([row]), frame)
        pixels = frame[0, :, ::2, ::2].permute(1, 2, 0).reshape(-1, 3).numpy()
        parts.append(data.measure(pixels / 255.0))
    joined = aggregate(parts)
    return {name: value if name == "count" else value.reshape(3, 1, 1) for name, value in joined.items()}


def contradictions(
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
        off[~np.isfinite(measured[name])] = 0  # NaN in the data was refused, or is told elsewhere
        if off.max() > 0.01:
            j = int(off.argmax())
            wrong.append(
                f"the {name} of {key}, joint {j} is {entry[name][j]:.6g} in the statistics and "
                f"{measured[name][j]:.6g} in the data ({(off > 0.01).sum()} of {off.size} joints in {where} "
                "are off); python data.py check --fix-stats writes the right ones."
            )
    return wrong, all(np.isfinite(entry[name]).all() for name in ("mean", "std", "min", "max"))


def padding_notes(train: data.EpisodeDataset) -> list[data.Note]:
    """A warning if most steps of the chunks lie past the ends of their episodes."""
    chunk_size = train.chunk_size
    valid = float(train.valid_steps(np.arange(len(train))).sum())
    padded = 1 - valid / (len(train) * chunk_size)
    if padded <= MUCH_PADDING:
        return []
    short = int((train.episode_lengths < chunk_size).sum())
    text = (
        f"{padded:.0%} of the target steps are padding: {short} of {train.num_episodes} episodes "
        f"are shorter than --policy.chunk-size={chunk_size}; a smaller one wastes less."
    )
    return [data.Note("warning", text)]


def check_dataset_config(cfg: data.DatasetConfig, chunk_size: int) -> None:
    """Refuse flags that cannot fit any dataset, before anything is read."""
    if chunk_size < 1:
        raise data.DatasetError(f"--policy.chunk-size={chunk_size} is no number of steps; use 1 or more.")
    size = cfg.image_size
    if size is not None and not 1 <= min(size) <= max(size) <= 8192:
        text = "is no height and width in pixels; use 1 to 8192"
        raise data.DatasetError(f"--dataset.image-size={tuple(size)} {text}.")
    if not cfg.tolerance_s > 0:
        text = "is no length of time; use seconds above 0"
        raise data.DatasetError(f"--dataset.tolerance-s={cfg.tolerance_s} {text}.")
    if not cfg.min_std >= 0:
        raise data.DatasetError(f"--dataset.min-std={cfg.min_std} is no floor; use 0 or more.")
    if not 0 <= cfg.val_split < 1:
        text = "is no fraction; use 0 (off) or less than 1"
        raise data.DatasetError(f"--dataset.val-split={cfg.val_split} {text}.")
    if cfg.val_split and cfg.val_episodes:
        raise data.DatasetError("--dataset.val-split and --dataset.val-episodes do the same; use one.")
    for flag, episodes in data.episode_flags(cfg):
        if not episodes:
            raise data.DatasetError(f"{flag} is empty; name episodes, or leave it out.")
        if len(set(episodes)) < len(episodes):
            twice = next(e for i, e in enumerate(episodes) if e in episodes[:i])
            raise data.DatasetError(f"{flag} names episode {twice} twice; name each once.")
    if both := set(cfg.episodes or ()) & set(cfg.val_episodes or ()):
        flags = "--dataset.episodes and --dataset.val-episodes"
        raise data.DatasetError(f"{flags} both name {min(both)}; use it once.")
