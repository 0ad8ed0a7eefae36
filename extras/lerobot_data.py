"""LeRobot datasets on disk (v3.0, v2.1, v2.0): where they are, their metadata, rows, and each row's frames.

    meta = read_metadata(resolve_root("DIR", None))
    names = vector_keys(meta, "action", "observation.state")
    rows = read_rows(meta, names, range(len(meta.episodes)), tolerance_s=1e-4)
    videos = VideoRows(meta, rows, "observation.images.top", (480, 640), 1e-4, scan=...)    # see frames.py

Functions return what they read, with warnings where it is wrong but can be trained on, or raise a
DatasetError: one sentence that names the file. `check_data.py` goes through the same functions and collects.
All files are JSON, parquet, images or videos: nothing that is read can run code, and a path in the metadata
cannot leave the dataset's directory. This file imports nothing of the project; it needs pyarrow.
"""

from __future__ import annotations

import bisect
import importlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

ACTION, STATE, ENV_STATE = "action", "observation.state", "observation.environment_state"
INDEX_COLUMNS = ("index", "episode_index", "frame_index", "timestamp", "task_index")
Stats = dict[str, dict[str, np.ndarray]]


class UserError(ValueError):
    """The user's to mend, in one sentence: flag or file, rule, way out. Any other error is a bug and keeps
    its traceback."""


class DatasetError(UserError):
    """A dataset that cannot be trained on, or a flag that does not fit it."""


class MissingPackage(UserError, ImportError):
    """An optional package is not installed; names its pip line."""


@dataclass
class Episode:
    length: int
    first: int
    """Its first frame's row in the whole dataset."""
    file: Path
    videos: dict[str, tuple[Path, float, float]]
    """Camera -> file, from and to (s)."""


@dataclass
class Metadata:
    root: Path
    version: str
    fps: float
    features: dict[str, dict[str, Any]]
    episodes: list[Episode]
    episode_files: list[Path]
    """The files of meta/episodes (v3), or meta/episodes_stats.jsonl if there is one."""
    num_tasks: int | None = None
    """None: they cannot be read, and training does not need them."""
    warnings: list[str] = field(default_factory=list)

    @property
    def info(self) -> Path:
        return self.root / "meta" / "info.json"

    def shape(self, key: str) -> list[int]:
        """Of a feature, checked when it is used: one that is not may have any."""
        shape = self.features[key].get("shape")
        if isinstance(shape, list) and all(isinstance(n, int) and 0 < n < 1e8 for n in shape):
            return shape
        raise DatasetError(f"{self.info}: feature {key} has shape {shape}; sizes of 1 or more are needed.")

    def cameras(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature["dtype"] in ("video", "image")]

    def videos(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature["dtype"] == "video"]


# ---- where a dataset is
def resolve_root(root: str | None, repo_id: str | None) -> Path:
    """The dataset's directory. The network is used only if nothing local is found for a repo id, and
    HF_HUB_OFFLINE is not set."""
    if repo_id is not None and not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", repo_id):
        raise DatasetError(f"--dataset.repo-id={repo_id} is not of the form USER/NAME.")
    if root is not None:
        folder = Path(root).expanduser()
        candidates = [folder] if repo_id is None else [folder, folder / repo_id]
    elif repo_id is not None:
        candidates = local_copies(repo_id)
    else:
        raise DatasetError("no dataset: give --dataset.root DIR or --dataset.repo-id USER/NAME.")
    for candidate in candidates:
        if (candidate / "meta" / "info.json").is_file():
            return candidate
    if repo_id is None:
        raise DatasetError(
            f"--dataset.root={root} holds no LeRobot dataset (no meta/info.json); give the directory "
            "that has meta/, data/ and videos/."
        )
    sentence = f"--dataset.repo-id={repo_id} is in none of {', '.join(map(str, candidates))}"
    way = "copy it there, or use --dataset.root."
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise DatasetError(f"{sentence}, and HF_HUB_OFFLINE forbids the download; {way}")
    hub = import_package("huggingface_hub", "downloads from the hub")
    try:
        return Path(hub.snapshot_download(repo_id, repo_type="dataset", local_dir=root))
    except (
        Exception
    ) as error:  # of the library alone, which raises its own, its HTTP client's and the system's
        raise DatasetError(f"{sentence}, and the download failed ({first_line(error)}); {way}") from error


def local_copies(repo_id: str) -> list[Path]:
    """Where LeRobot and the hub keep a dataset: a directory of its name, or a cache's newest snapshot."""
    env = os.environ
    hf_home = Path(env.get("HF_HOME") or Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    homes = [Path(home).expanduser() for home in (env.get("HF_LEROBOT_HOME"), hf_home / "lerobot") if home]
    hubs = [home / "hub" for home in homes]
    hubs += [Path(env[name]) for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE") if env.get(name)]
    folders = [home / repo_id for home in homes]
    for hub in (*hubs, hf_home / "hub"):
        folder = hub.expanduser() / f"datasets--{repo_id.replace('/', '--')}"
        snapshots = sorted(folder.glob("snapshots/*"), key=lambda path: path.stat().st_mtime, reverse=True)
        main = folder / "refs" / "main"
        folders += [folder / "snapshots" / main.read_text().strip()] if main.is_file() else []
        folders += snapshots or [folder]
    return list(dict.fromkeys(folders))


# ---- metadata
def read_metadata(root: Path) -> Metadata:
    """meta/ of any supported version in one form, checked against itself; without the statistics."""
    path = root / "meta" / "info.json"
    info = read_info(root)
    version, fps = info["codebase_version"], float(info["fps"])
    meta = Metadata(root, version, fps, info["features"], [], [])
    if version.startswith("v3"):
        read_episodes_v3(meta, info)
    else:
        read_episodes_v2(meta, info)
    if not meta.episodes:
        raise DatasetError(f"{root / 'meta/episodes'}: the dataset has no episode.")
    frames = sum(episode.length for episode in meta.episodes)
    for name, counted in (("total_episodes", len(meta.episodes)), ("total_frames", frames)):
        if info.get(name, counted) != counted:
            text = f"{name} is {info[name]}, but the metadata of the episodes has {counted}."
            raise DatasetError(f"{path}: {text}")
    tasks = root / "meta" / ("tasks.parquet" if version.startswith("v3") else "tasks.jsonl")
    try:
        rows = read_table(tasks) if version.startswith("v3") else read_lines(tasks)
        meta.num_tasks = len(rows)
    except DatasetError as error:
        meta.warnings.append(str(error))
    return meta


def read_info(root: Path) -> dict[str, Any]:
    """meta/info.json, with codebase_version, fps and features checked."""
    path = root / "meta" / "info.json"
    info = read_json(path)
    version = entry(info, "codebase_version", str, path)
    if not re.fullmatch(r"v(3\.\d+|2\.[01])", version):
        way = "python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=USER/NAME"
        way = f"convert it with LeRobot: {way} --root={root} --push-to-hub=false (v1 to v2.1 first)"
        if re.match(r"v([4-9]|\d\d)", version):
            way = "a newer version of this program is needed"
        text = f"codebase_version is {version}; v3.0, v2.1 and v2.0 can be read, so {way}."
        raise DatasetError(f"{path}: {text}")
    if not 0 < float_entry(info, "fps", path) < 1e6:
        raise DatasetError(f"{path}: fps is {info['fps']}; it must be a positive number.")
    features = entry(info, "features", dict, path)
    for key in features:
        feature = entry(features, key, dict, f"{path}: features")
        entry(feature, "dtype", str, f"{path}: feature {key}")
    for key in INDEX_COLUMNS[:4]:
        if key not in features:
            raise DatasetError(f"{path}: feature {key} is missing, which every LeRobot dataset has.")
    return info


def read_episodes_v3(meta: Metadata, info: dict[str, Any]) -> None:
    files = sorted((meta.root / "meta" / "episodes").glob("*/*.parquet"))
    if not files:
        raise DatasetError(f"{meta.root / 'meta/episodes'} has no parquet file; copy the dataset again.")
    rows: list[tuple[Path, dict]] = []
    for path in files:
        rows += [(path, row) for row in read_table(path, lambda name: not name.startswith("stats/"))]
    data_path = entry(info, "data_path", str, meta.info)
    video_path = entry(info, "video_path", str, meta.info) if meta.videos() else ""
    first = 0
    for number, (path, row) in enumerate(in_order(rows)):
        where = f"{path}: episode {number}"
        length = row["length"]
        start, end = (int_entry(row, f"dataset_{side}_index", where) for side in ("from", "to"))
        if (start, end) != (first, first + length):
            raise DatasetError(
                f"{where} spans frames {start} to {end}, but with {length} frames after "
                f"{first} others it must span {first} to {first + length}."
            )
        at = {name: int_entry(row, f"data/{name}", where) for name in ("chunk_index", "file_index")}
        file = inside(meta.root, data_path, **at)
        clips = {key: clip_v3(meta.root, video_path, key, row, where) for key in meta.videos()}
        meta.episodes.append(Episode(length, first, file, clips))
        first += length
    meta.episode_files = files


def clip_v3(root: Path, video_path: str, key: str, row: dict, where: str) -> tuple[Path, float, float]:
    at = {name: int_entry(row, f"videos/{key}/{name}", where) for name in ("chunk_index", "file_index")}
    begin, to = (float_entry(row, f"videos/{key}/{side}_timestamp", where) for side in ("from", "to"))
    if not math.isfinite(begin + to):
        raise DatasetError(f"{where} lasts from {begin} to {to} s in {key}.")
    return inside(root, video_path, video_key=key, **at), begin, to


def read_episodes_v2(meta: Metadata, info: dict[str, Any]) -> None:
    path = meta.root / "meta" / "episodes.jsonl"
    data_path = entry(info, "data_path", str, meta.info)
    video_path = entry(info, "video_path", str, meta.info) if meta.videos() else ""
    chunks_size = int_entry({"chunks_size": 1000} | info, "chunks_size", meta.info)
    if chunks_size < 1:
        raise DatasetError(f"{meta.info}: chunks_size is {chunks_size}; it must be 1 or more.")
    first = 0
    for number, (_, row) in enumerate(in_order([(path, row) for row in read_lines(path)])):
        at = {"episode_index": number, "episode_chunk": number // chunks_size}
        length, end = row["length"], row["length"] / meta.fps
        clips = {key: (inside(meta.root, video_path, video_key=key, **at), 0.0, end) for key in meta.videos()}
        meta.episodes.append(Episode(length, first, inside(meta.root, data_path, **at), clips))
        first += length
    stats = meta.root / "meta" / "episodes_stats.jsonl"  # v2.0 has none
    meta.episode_files = [stats] if stats.exists() else []


def in_order(rows: list[tuple[Path, dict]]) -> list[tuple[Path, dict]]:
    """Rows of the episodes' metadata, sorted: numbers must be 0, 1, 2 ... and lengths positive."""
    rows = sorted(rows, key=lambda item: int_entry(item[1], "episode_index", item[0]))
    for expected, (path, row) in enumerate(rows):
        if row["episode_index"] != expected:
            text = f"episode {expected} is missing, or {row['episode_index']} is there twice."
            raise DatasetError(f"{path}: {text}")
        length = entry(row, "length", object, f"{path}: episode {expected}")
        if not isinstance(length, int) or length < 1:
            text = f"episode {expected} has length {length}; it needs 1 frame or more."
            raise DatasetError(f"{path}: {text}")
    return rows


def inside(root: Path, template: str, **values: Any) -> Path:
    """A path from the metadata, which may not leave the dataset."""
    info = root / "meta/info.json"
    try:
        relative = template.format(**values)
    except (LookupError, AttributeError, TypeError, ValueError) as error:  # it asks for what there is not
        reason = f"{type(error).__name__}: {first_line(error)}"
        text = f"{info}: the path {template!r} cannot be filled in ({reason}); correct it."
        raise DatasetError(text) from error
    parts = PurePosixPath(relative)
    if parts.is_absolute() or ".." in parts.parts or "\0" in relative or len(relative) > 1000:
        raise DatasetError(f"{info}: the path {relative[:200]!r} leaves the dataset's directory.")
    return root / parts


# ---- statistics, as the dataset has them
def read_stats(meta: Metadata) -> tuple[Stats, list[str]]:
    """(statistics of the whole dataset, empty where it has none; warnings)"""
    path = meta.root / "meta" / "stats.json"
    if path.exists():
        content = read_json(path)
        return {key: stats_entry(entry(content, key, dict, path), path) for key in content}, []
    if meta.version == "v2.1":  # which has them by episode only
        return {}, []
    return {}, [f"{path} is missing; the statistics are computed from the data."]


def episode_stats(meta: Metadata, key: str) -> list[dict[str, np.ndarray]]:
    """Statistics of one feature per episode; empty where the dataset has none."""
    stats: dict[int, dict[str, np.ndarray]] = {}
    prefix = f"stats/{key}"

    def is_needed(column: str) -> bool:
        return column == "episode_index" or column.rpartition("/")[0] == prefix

    for path in meta.episode_files:
        is_table = meta.version.startswith("v3")
        for row in read_table(path, is_needed) if is_table else read_lines(path):
            e = int_entry(row, "episode_index", path)
            if is_table:
                values = {name.rpartition("/")[2]: v for name, v in row.items() if v is not None}
                del values["episode_index"]
            else:
                values = entry({key: {}} | entry(row, "stats", dict, path), key, dict, path)
            stats[e] = stats_entry(values, path)
    return [stats.get(e, {}) for e in range(len(meta.episodes))]


def stats_entry(values: dict[str, Any], path: Path) -> dict[str, np.ndarray]:
    arrays = {}
    for name, value in values.items():
        try:
            arrays[name] = np.asarray(value, np.float64)
        except (TypeError, ValueError) as error:
            text = (
                f"{path}: the {name} of a feature is no array of numbers ({first_line(error)}); correct it."
            )
            raise DatasetError(text) from error
    return arrays


# ---- rows of the tables
@dataclass
class Rows:
    """Rows of the episodes `ids`, in ascending order, and where each row's other columns are."""

    ids: list[int]
    spans: list[tuple[int, int]]
    columns: dict[str, np.ndarray]
    files: list[Path]
    file_of_row: np.ndarray
    row_in_file: np.ndarray
    warnings: list[str]


def vector_keys(meta: Metadata, action_key: str, state_key: str) -> dict[str, str]:
    """Column of the dataset -> name in the batch, for action, state and environment state."""
    other = (*INDEX_COLUMNS, *meta.cameras())
    keys = [key for key, f in meta.features.items() if key not in other and f["dtype"] != "string"]
    for flag, key in (("action-key", action_key), ("state-key", state_key)):
        # A dataset without a state can be trained on, one without an action cannot.
        if key not in keys and key != STATE:
            raise DatasetError(
                f"--dataset.{flag}={key} is no column of {meta.root}; it has {', '.join(keys)}."
            )
    wanted = {ENV_STATE: ENV_STATE, state_key: STATE, action_key: ACTION}
    names = {key: name for key, name in wanted.items() if key in keys}
    for key in names:
        if len(meta.shape(key)) > 1:
            raise DatasetError(f"{meta.info}: {key} has shape {meta.shape(key)}; a vector is needed.")
    return names


def state_note(meta: Metadata, names: dict[str, str]) -> list[str]:
    """A warning if the policy gets no state, though the dataset has a vector that may be one."""
    used = (*meta.cameras(), ENV_STATE, *names)
    others = [
        key
        for key, feature in meta.features.items()
        if key.startswith("observation.") and key not in used
        if feature["dtype"].startswith("float") and np.shape(feature.get("shape") or 0) == (1,)
    ]
    if STATE in names.values() or not others:
        return []
    keys = ", ".join(others)
    return [f"the policy gets no robot state; the dataset has {keys}: give --dataset.state-key."]


def read_rows(meta: Metadata, names: dict[str, str], ids: Iterable[int], tolerance_s: float) -> Rows:
    """Read and check the table rows of some episodes; images are left where they are."""
    parts: dict[int, dict[str, np.ndarray]] = {}
    warnings: list[str] = []
    for path, episodes in episodes_by_file(meta, ids).items():
        columns = read_columns(meta, names, path)
        for e in episodes:
            parts[e] = episode_rows(meta, e, columns)
            warnings += check_rows(meta, e, parts[e], tolerance_s)
    return join_rows(meta, parts, warnings)


def episodes_by_file(meta: Metadata, ids: Iterable[int]) -> dict[Path, list[int]]:
    files: dict[Path, list[int]] = {}
    for e in ids:
        files.setdefault(meta.episodes[e].file, []).append(e)
    return files


def read_columns(meta: Metadata, names: dict[str, str], path: Path) -> dict[str, np.ndarray]:
    """The columns of one parquet file by their name in the batch, the index columns included."""
    names = names | {key: key for key in INDEX_COLUMNS if key in meta.features}
    parquet = open_parquet(path)
    for key in names:
        if key not in parquet.schema_arrow.names:
            raise DatasetError(f"{path} has no column {key}, which meta/info.json names.")
    with file_errors(path, "", arrow_error()):
        table = parquet.read(list(names))
    return {
        name: to_numpy(table.column(key), meta.shape(key), path, f"column {key}")
        for key, name in names.items()
    }


def to_numpy(column: Any, shape: list[int], path: Path, what: str) -> np.ndarray:
    """A parquet column as (rows, width) if it has lists of any nesting, else as (rows,)."""
    types = import_package("pyarrow", "datasets on disk").types
    count, width, where = len(column), math.prod(shape), f"{path}: {what}"
    with file_errors(path, what, arrow_error()):
        values = column.combine_chunks()
    lists = 0
    while any(
        is_kind(values.type) for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list)
    ):
        if values.null_count:
            break
        if lists == 0 and len(shape) == 1:
            fixed = types.is_fixed_size_list(values.type)
            sizes = np.full(count, values.type.list_size) if fixed else values.value_lengths().to_numpy()
            for short in np.flatnonzero(sizes != width):
                text = f"{where} has {sizes[short]} values in row {short}, not the {width} of info.json."
                raise DatasetError(text)
        values, lists = values.flatten(), lists + 1
    if values.null_count:
        row = int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise DatasetError(f"{where} is empty in row {row * count // max(1, len(values))}.")
    with file_errors(path, what, arrow_error()):
        array = values.to_numpy(zero_copy_only=False)
    if len(array) != count * width or array.dtype.kind not in "fiub":
        text = f"{len(array)} {array.dtype} in {count} rows; meta/info.json says {width} per row."
        raise DatasetError(f"{where} has {text}")
    return array.reshape(count, width) if lists or width > 1 else array


def episode_rows(meta: Metadata, e: int, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One episode's rows of a file's columns; "_row" is their number in the file."""
    path, length = meta.episodes[e].file, meta.episodes[e].length
    episode = columns["episode_index"].reshape(-1)
    rows = np.flatnonzero(episode == e)
    if len(rows) != length:
        has = "none"
        if len(rows):
            has = f"{len(rows)} of it"
        elif len(episode):
            has = f"episodes {episode.min()} to {episode.max()}"
        raise DatasetError(
            f"{path}: the metadata says that episode {e} has {length} rows here, but there are {has}."
        )
    part: dict[str, np.ndarray] = {"_row": rows, "task_index": np.zeros(length, np.int64)}
    for name, values in columns.items():
        if name in INDEX_COLUMNS:
            part[name] = values.reshape(-1)[rows].astype(np.float32 if name == "timestamp" else np.int64)
        else:
            part[name] = values[rows].reshape(length, -1).astype(np.float32)
    return part


def check_rows(meta: Metadata, e: int, part: dict[str, np.ndarray], tolerance_s: float) -> list[str]:
    """Refuse an episode's rows with values that cannot be; return warnings of what can be trained on."""
    path, rows = meta.episodes[e].file, part["_row"]
    for name in part.keys() - {*INDEX_COLUMNS, "_row"}:
        bad = np.argwhere(~np.isfinite(part[name]))
        if len(bad):
            frame, joint = bad[0]
            raise DatasetError(
                f"{path}: {name} of episode {e}, frame {frame} (row {rows[frame]}), joint {joint} is "
                f"{part[name][frame, joint]}, one of {len(bad)} such values; repair or leave out the episode."
            )
    counts = np.arange(len(rows))
    for name, wanted in (("frame_index", counts), ("index", meta.episodes[e].first + counts)):
        wrong = np.flatnonzero(part[name] != wanted)
        if len(wrong):
            value, right = part[name][wrong[0]], wanted[wrong[0]]
            text = f"{name} of episode {e} is {value} in row {rows[wrong[0]]}, not {right}."
            raise DatasetError(f"{path}: {text}")
    warnings = check_times(meta, e, part, tolerance_s)
    tasks = part["task_index"]
    if meta.num_tasks is not None and not 0 <= tasks.min() <= tasks.max() < meta.num_tasks:
        text = f"a task_index of episode {e} is not among the {meta.num_tasks} tasks."
        warnings.append(f"{path}: {text}")
    return warnings


def check_times(meta: Metadata, e: int, part: dict[str, np.ndarray], tolerance_s: float) -> list[str]:
    """Of the rows, against the grid of fps."""
    times, grid = part["timestamp"], np.arange(len(part["timestamp"])) / meta.fps
    off = np.nan_to_num(np.abs(times - grid), nan=np.inf)
    frame = off.argmax()
    if off[frame] <= max(0.01 / meta.fps, tolerance_s):
        return []
    text = (
        f"{meta.episodes[e].file}: timestamp of episode {e}, frame {frame} (row {part['_row'][frame]}) is "
        f"{times[frame]:.4f} s, but at {meta.fps:g} fps it is {grid[frame]:.4f} s; correct "
        f"it, or fps in meta/info.json, or allow more than --dataset.tolerance-s={tolerance_s:g}."
    )
    if off[frame] > max(0.5 / meta.fps, tolerance_s):
        raise DatasetError(text)
    return [text]


def join_rows(meta: Metadata, parts: dict[int, dict[str, np.ndarray]], warnings: list[str]) -> Rows:
    """The rows of these episodes one after the other."""
    ids = sorted(parts)
    lengths = [meta.episodes[e].length for e in ids]
    files = list(episodes_by_file(meta, ids))
    numberof = {path: i for i, path in enumerate(files)}
    columns = {key: np.concatenate([parts[e][key] for e in ids]) for key in parts[ids[0]]}
    file_of_row = np.repeat(np.array([numberof[meta.episodes[e].file] for e in ids], np.int32), lengths)
    ends = np.cumsum(lengths).tolist()
    spans = [(end - length, end) for end, length in zip(ends, lengths)]
    row_in_file = columns.pop("_row")
    return Rows(ids, spans, columns, files, file_of_row, row_in_file, warnings)


# ---- cameras
def image_shape(meta: Metadata, key: str) -> tuple[int, int, int]:
    """(channels, H, W). LeRobot stores H, W, C and names them; older sets also C, H, W."""
    info, shape, feature = meta.info, meta.shape(key), meta.features[key]
    more = feature.get("info")
    if isinstance(more, dict) and (more.get("is_depth_map") or more.get("video.is_depth_map")):
        raise DatasetError(
            f"{info}: {key} is a depth camera, which ACT cannot take; leave it out with --dataset.image-keys."
        )
    shape = [*shape, 1] if len(shape) == 2 else shape
    names = feature.get("names")
    names = [str(name) for name in names[:3]] if isinstance(names, list) else []
    last = 2 if shape and shape[-1] in (1, 3, 4) else 0
    axis = next((i for i, name in enumerate(names) if name.startswith("channel")), last)
    height_width = [n for i, n in enumerate(shape) if i != axis]
    if len(shape) != 3 or shape[axis] not in (1, 3):
        raise DatasetError(
            f"{info}: camera {key} has shape {shape}; height, width and 3 or 1 channels are needed."
        )
    return shape[axis], height_width[0], height_width[1]


class Scan(Protocol):
    """What a video's packets tell (frames.Scan)."""

    size: np.ndarray
    pts: np.ndarray
    seconds: np.ndarray


class VideoRows:
    """Which frame of which video each row of one camera shows: add the episodes one by one.

    Args:
        scan: a video's height and width, pts of its frames, ascending, and seconds per unit of pts.
    """

    def __init__(
        self,
        meta: Metadata,
        rows: Rows,
        key: str,
        shape: tuple[int, int],
        tolerance_s: float,
        scan: Callable[[Path], Any],
    ) -> None:
        self.meta, self.rows, self.key, self.shape = meta, rows, key, shape
        self.tolerance_s, self.scan = tolerance_s, scan
        self.files: list[Path] = []
        self.scans: list[Any] = []
        count = rows.spans[-1][1]
        self.file_of_row, self.pts_of_row = np.full(count, -1, np.int32), np.zeros(count, np.int64)
        self._numberof: dict[Path, int] = {}
        self._used: list[
            list[tuple[int, int, int]]
        ] = []  # per file: first and last frame and episode, ascending
        self._promised: Counter[Path] = Counter()
        for episode in meta.episodes:
            self._promised[episode.videos[key][0]] += episode.length

    def add(self, e: int, span: tuple[int, int]) -> list[str]:
        """Match the rows of an episode to frames. Returns warnings.

        Raises:
            DatasetError: the video is missing or another, or has no frame at a row's time.
        """
        path, begin, to = self.meta.episodes[e].videos[self.key]
        fps, warnings = self.meta.fps, self._open(path)
        number = self._numberof[path]
        scan, what = self.scans[number], f"episode {e} of camera {self.key}"
        if tuple(scan.size) != self.shape:
            raise DatasetError(
                f"{path}: frames are {scan.size[0]}x{scan.size[1]}, but meta/info.json says "
                f"{self.shape[0]}x{self.shape[1]}; correct the feature's shape."
            )
        wanted = begin + self.rows.columns["timestamp"][slice(*span)].astype(np.float64)
        frames = match_frames(scan, wanted, fps, self.tolerance_s, what, path)
        self._claim(number, int(frames[0]), int(frames[-1]), e)
        self.file_of_row[slice(*span)], self.pts_of_row[slice(*span)] = number, scan.pts[frames]
        if abs(to - begin - self.meta.episodes[e].length / fps) > 1.5 / fps:
            text = f"{what} lasts from {begin:.3f} to {to:.3f} s in the metadata, not its length."
            warnings.append(f"{path}: {text}")
        return warnings

    def _open(self, path: Path) -> list[str]:
        if path in self._numberof:
            return []
        scan = self.scan(path)
        self._numberof[path] = len(self.files)
        self.files.append(path)
        self.scans.append(scan)
        self._used.append([])
        if len(scan.pts) == self._promised[path]:
            return []
        return [f"{path} has {len(scan.pts)} frames, but its episodes have {self._promised[path]}."]

    def _claim(self, number: int, first: int, last: int, e: int) -> None:
        """No two episodes may use the same frames: the metadata points to the wrong file or time then."""
        used = self._used[number]
        at = bisect.bisect(used, (first, last, e))
        for start, stop, other in used[max(0, at - 1) : at + 1]:
            if first <= stop and start <= last:
                raise DatasetError(
                    f"{self.files[number]}: episodes {other} and {e} of camera {self.key} both use its "
                    f"frame {max(first, start)}; the metadata points to the wrong file or time."
                )
        used.insert(at, (first, last, e))


def match_frames(
    scan: Scan, wanted: np.ndarray, fps: float, tolerance_s: float, what: str, path: Path
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


def image_files(path: Path, key: str, root: Path) -> str:
    """Path, size and time of the image files that a parquet file names; "" if it holds all images itself."""
    parquet, names, complete = open_parquet(path), [], True
    for group in (parquet.metadata.row_group(i) for i in range(parquet.num_row_groups)):
        for column in (group.column(i) for i in range(group.num_columns)):
            names.append(column.path_in_schema)
            if names[-1] == f"{key}.bytes":  # without its statistics it may miss some
                complete &= bool(column.statistics and column.statistics.null_count == 0)
    if complete or f"{key}.path" not in names:
        return ""
    with file_errors(path, f"column {key}", arrow_error()):
        values = parquet.read([f"{key}.path"]).column(0).to_pylist()
    about = []
    for value in values:
        if value and value.get("path"):
            # Refused when it is read, if the table does not hold this image.
            with suppress(DatasetError, OSError):
                stat = inside(root, "{path}", path=value["path"]).stat()
                about.append((value["path"], stat.st_size, stat.st_mtime_ns))
    return f" {about}"


def read_images(path: Path, key: str, root: Path, is_whole: Callable[[bytes], bool]) -> Iterator[bytes]:
    """The encoded images of a parquet file, row by row; b"" where there is none.

    Args:
        is_whole: tells whether PNG or JPEG bytes are complete.
    """
    what, row = f"column {key}", 0
    parquet = open_parquet(path)
    if key not in parquet.schema_arrow.names:
        raise DatasetError(f"{path} has no column {key}, which meta/info.json names.")
    batches = parquet.iter_batches(batch_size=64, columns=[key])
    while True:
        with file_errors(path, what, arrow_error()):
            batch = next(batches, None)
            values = [] if batch is None else batch.column(0).to_pylist()
        if batch is None:
            return
        for value in values:
            content = image_content(value, root, f"{path}: {what}, row {row}")
            if content and not is_whole(content):
                text = f"the image of {key} in row {row} is corrupt; replace it, or leave out its episode."
                raise DatasetError(f"{path}: {text}")
            yield content
            row += 1


def image_content(value: Any, root: Path, where: str) -> bytes:
    """Of one cell: bytes, or {"bytes", "path"} of which one may be null."""
    content = value.get("bytes") if isinstance(value, dict) else value
    if content is None and isinstance(value, dict) and value.get("path"):
        file = inside(root, "{path}", path=entry(value, "path", str, where))
        with file_errors(file):
            content = file.read_bytes()
    if content is not None and not isinstance(content, bytes):
        raise DatasetError(f"{where} is {type(content).__name__}; an image's bytes are needed.")
    return content or b""


# ---- files, and what is in them
def read_json(path: Path) -> dict[str, Any]:
    with file_errors(path, "", RecursionError):
        content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise DatasetError(f"{path} is no JSON object; the file is corrupt or of another kind.")
    return content


def read_lines(path: Path) -> list[dict[str, Any]]:
    with file_errors(path, "", RecursionError):
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    for line, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DatasetError(f"{path}: line {line} is no JSON object; the file is corrupt.")
    return rows


def read_table(path: Path, is_needed: Callable[[str], bool] = lambda name: True) -> list[dict[str, Any]]:
    """Rows of a parquet file, with the columns whose name is needed."""
    parquet = open_parquet(path)
    names = [name for name in parquet.schema_arrow.names if is_needed(name)]
    with file_errors(path, "", arrow_error()):
        return parquet.read(names).to_pylist()


def open_parquet(path: Path) -> Any:
    pq = import_package("pyarrow.parquet", "datasets on disk")
    with file_errors(path, "", arrow_error()):
        parquet = pq.ParquetFile(path, page_checksum_verification=True)
        _ = parquet.schema_arrow  # parsed at the first use
    return parquet


def arrow_error() -> type[Exception]:
    return import_package("pyarrow", "datasets on disk").ArrowException


def entry(content: dict[str, Any], name: str, kind: type, where: Path | str) -> Any:
    """content[name], if it is there and of this kind."""
    if name not in content:
        raise DatasetError(f"{where}: {name} is missing; the file is corrupt or of another kind.")
    value = content[name]
    if not isinstance(value, kind):
        names: dict[Any, str] = {str: "a text", dict: "an object"}
        text = f"{name} is {shortened(value)}; {names[kind]} is needed."
        raise DatasetError(f"{where}: {text}")
    return value


def float_entry(content: dict[str, Any], name: str, where: Path | str) -> float:
    value = entry(content, name, object, where)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise DatasetError(f"{where}: {name} is {shortened(value)}; a number is needed.")
    return float(value)


def int_entry(content: dict[str, Any], name: str, where: Path | str) -> int:
    value = float_entry(content, name, where)
    if not value.is_integer():
        raise DatasetError(f"{where}: {name} is {value}; a whole number is needed.")
    return int(content[name])


def shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@contextmanager
def file_errors(path: Path, what: str = "", *errors: type[Exception]) -> Iterator[None]:
    """Around calls of a library alone: what it raises for broken content becomes one sentence with the file.

    Args:
        errors: the library's own, beside OSError, ValueError and EOFError.
    """
    broken: tuple[type[Exception], ...] = (OSError, ValueError, EOFError, *errors)
    try:
        yield
    except UserError:
        raise
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is missing; copy the dataset again, or download it.") from error
    except broken as error:
        at = f"{what} in {path}" if what else path
        reason = f"{type(error).__name__}: {first_line(error)}"
        text = f"{at} cannot be read ({reason}); the file is corrupt or of another kind."
        raise DatasetError(text) from error


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")


def import_package(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        text = f"{what} need {package} ({first_line(error)}): pip install {package}"
        raise MissingPackage(text) from error
