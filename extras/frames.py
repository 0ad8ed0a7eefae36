"""Where a camera's frames come from: videos, encoded images, resized ones, and the cache of decoded frames.

    scan = scan_video(path, cache_dir)                        # times of all frames, without decoding
    source = VideoFrames((480, 640), [path], [scan.digest], [scan.keyframes], file_of_row, pts_of_row)
    source = Resized(source, (240, 320))
    cameras, notes = cached({"top": source}, spans, "disk", default_cache_dir())

Every source has the members of data.FrameSource: `shape`, `thread_safe`, `__len__`, `read_into(rows, out)`,
`in_order(start, stop)` and `span_key(start, stop)`; `get(row)` gives one frame (H, W, 3). Rows count over the
loaded episodes. This file imports nothing of the project and needs av for videos, torchvision for images.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import importlib
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

CACHE_FORMAT = "1"
"""Part of every cache key: raise it when the bytes of a cached frame change."""
RAM_DIR = Path("/dev/shm")
"""Where --dataset.cache ram keeps its files."""
AUTO_CACHE_GB = 200
"""What --dataset.cache auto may take, beside its rule of half the free disk."""
MAX_DECODERS = 8
"""Open videos per camera and process."""
MAX_MAPS = 4096
"""Mapped files per camera and process; Linux allows 65530 in all (vm.max_map_count)."""
JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
"""Pixel data has 00 or a restart after each ff."""


class UserError(ValueError):
    """The user's to mend, in one sentence: flag or file, rule, way out. Any other error is a bug and keeps
    its traceback."""


class MissingPackage(UserError, ImportError):
    """An optional package is not installed; names its pip line."""


class CacheUnwritable(UserError):
    """The file system refuses to store a file of the cache; its own error is the cause."""


class Source(Protocol):
    """data.FrameSource, named here so that this file stands alone."""

    shape: tuple[int, int]
    thread_safe: bool

    def __len__(self) -> int: ...
    def read_into(self, rows: np.ndarray, out: Tensor) -> None: ...
    def in_order(self, start: int, stop: int) -> Iterator[np.ndarray]: ...
    def span_key(self, start: int, stop: int) -> str: ...


class _Frames:
    """What sources have in common: everything from `get`."""

    shape: tuple[int, int]

    def get(self, row: int) -> np.ndarray:
        """(H, W, 3) uint8"""
        raise NotImplementedError

    def read_into(self, rows: np.ndarray, out: Tensor) -> None:
        """Write the frames of these rows into out (B, 3, H, W)."""
        for frame, row in zip(out, rows.tolist()):
            frame.copy_(torch.from_numpy(self.get(row)).permute(2, 0, 1))

    def in_order(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """The frames (H, W, 3) of consecutive rows of one episode."""
        return (self.get(row) for row in range(start, stop))


# ---- videos
class VideoFrames(_Frames):
    """One camera's frames in videos, decoded on demand; a row's frame is known by file and pts.

    Args:
        files, digests, keyframes: per video; the last two as `scan_video` finds them.
        file_of_row: number of a row's video; -1 where there is none.
        pts_of_row: a row's frame in it, in the stream's unit of time.
    """

    thread_safe = True  # in_order opens a decoder of its own

    def __init__(
        self,
        shape: tuple[int, int],
        files: list[Path],
        digests: list[str],
        keyframes: list[np.ndarray],
        file_of_row: np.ndarray,
        pts_of_row: np.ndarray,
    ) -> None:
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
        times = content_hash(self.pts_of_row[start:stop].tobytes())
        return f"video {self.digests[int(self.file_of_row[start])]} {times} {self.shape}"


class _Decoder:
    """One open video. Decodes on from where it is, or seeks to the key frame before the wanted frame."""

    def __init__(self, path: Path, keyframes: np.ndarray) -> None:
        self.path, self.keyframes = path, keyframes
        self.av = import_package("av", "videos")
        self.av.logging.set_level(self.av.logging.ERROR)
        with file_errors(path, "", self.av.FFmpegError):
            self.container = self.av.open(str(path))
            self.stream = self.container.streams.video[0]
            self.stream.codec_context.thread_count = 1  # the workers are the parallelism
        self.frames: Iterator | None = None
        self.frame: Any = None

    def read(self, pts: int, shape: tuple[int, int], forward: bool = False) -> np.ndarray:
        at = f"the frame at {float(pts * self.stream.time_base):.4f} s"
        with self.av.logging.Capture() as complaints:
            if (self.frame is None or self.frame.pts != pts) and not self._go_to(pts, forward, at):
                raise UserError(f"{self.path}: {at} cannot be decoded; the file is corrupt.")
            if self.frame.is_corrupt or (forward and complaints):
                reason = complaints[0][2].strip() if complaints else "marked as corrupt"
                raise UserError(f"{self.path}: {at} is corrupt ({reason}); replace or re-encode the file.")
            with file_errors(self.path, at, self.av.FFmpegError):
                image = self.frame.to_ndarray(format="rgb24")
        if image.shape[:2] != tuple(shape):
            raise UserError(
                f"{self.path}: frames are {image.shape[0]}x{image.shape[1]}, but meta/info.json says "
                f"{shape[0]}x{shape[1]}; correct the feature's shape."
            )
        return image

    def _go_to(self, pts: int, forward: bool, at: str) -> bool:
        key = max(0, int(np.searchsorted(self.keyframes[:, 0], pts, "right")) - 1)
        seeks: list[int | None] = [*self.keyframes[key].tolist(), int(self.keyframes[0].min())]
        behind = self.frame is not None and self.frame.pts < pts
        if behind and (forward or self.keyframes[key, 0] <= self.frame.pts):
            seeks.insert(0, None)  # decode on
        for target in seeks:  # a later one is needed only where a container seeks past the wanted frame
            if target is not None:
                with file_errors(self.path, at, self.av.FFmpegError):
                    self.container.seek(target, stream=self.stream)
                    self.frames = self.container.decode(self.stream)
            while (frame := self._next_frame(at)) is not None:
                if frame.pts is not None and frame.pts >= pts:
                    self.frame = frame
                    if frame.pts == pts:
                        return True
                    break
        return False

    def _next_frame(self, at: str) -> Any:
        with file_errors(self.path, at, self.av.FFmpegError):
            return next(self.frames, None) if self.frames is not None else None

    def close(self) -> None:
        self.frames = self.frame = None
        self.container.close()


@dataclass
class Scan:
    """What a video's packets tell, without decoding."""

    digest: np.ndarray
    """() of the file's bytes."""
    size: np.ndarray
    """(2,) height, width."""
    pts: np.ndarray
    """(F,) of every frame, ascending."""
    keyframes: np.ndarray
    """(K, 2) pts and dts of the key frames, ascending."""
    seconds: np.ndarray
    """() of one unit of pts."""


def scan_video(path: Path, cache_dir: Path) -> Scan:
    """Frame times of a video; kept in the cache for the next run."""
    memo = _memo(path, cache_dir).with_suffix(".npz")
    if (kept := _kept_scan(memo)) is not None:
        return kept
    av = import_package("av", "videos")
    with file_errors(path, "", av.FFmpegError), av.open(str(path)) as container:
        stream = next(iter(container.streams.video), None)
        if stream is None or stream.codec_context is None or stream.time_base is None:
            text = "holds no video that this build of PyAV can decode; pip install -U av."
            raise UserError(f"{path} {text}")
        packets = [
            (packet.pts, packet.pts if packet.dts is None else packet.dts, packet.is_keyframe)
            for packet in container.demux(stream)
            if packet.pts is not None and packet.size and not packet.is_discard
        ]
        size = np.array([stream.codec_context.height, stream.codec_context.width])
        seconds = np.array(float(stream.time_base))
    table = np.array(sorted(packets), np.int64).reshape(-1, 3)
    digest = np.array(file_hash(path, cache_dir))
    scan = Scan(digest, size, table[:, 0], table[table[:, 2] == 1][:, :2], seconds)
    if not len(scan.keyframes):
        raise UserError(f"{path} holds no video frame; the file is corrupt.")
    _remember(memo, lambda file: np.savez(file, **vars(scan)))
    return scan


def _kept_scan(memo: Path) -> Scan | None:
    """None: there is none, or it is corrupt, so the video is scanned again."""
    names = list(Scan.__dataclass_fields__)
    broken = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError)
    with suppress(*broken), np.load(memo, allow_pickle=False) as kept:
        if sorted(kept.files) == sorted(names):
            return Scan(**{name: kept[name] for name in names})
    return None


# ---- images
class EncodedFrames(_Frames):
    """Images stored as PNG or JPEG: their bytes lie in mapped files (`pack_images`), and get() decodes one.

    Args:
        blobs, origin: per packed file; its path, and what a message names.
        file_of_row, start_of_row, size_of_row: where a row's bytes are; -1 where there are none.
    """

    thread_safe = True

    def __init__(
        self,
        shape: tuple[int, int],
        blobs: list[Path],
        origin: list[Path],
        file_of_row: np.ndarray,
        start_of_row: np.ndarray,
        size_of_row: np.ndarray,
    ) -> None:
        self.shape, self.blobs, self.origin = shape, blobs, origin
        self.file_of_row, self.start_of_row, self.size_of_row = file_of_row, start_of_row, size_of_row
        self._maps: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.file_of_row)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_maps": {}}

    def get(self, row: int) -> np.ndarray:
        from torchvision.io import ImageReadMode, decode_image

        number, start = int(self.file_of_row[row]), int(self.start_of_row[row])
        blob = self._maps.get(number)
        if blob is None:
            _make_room(self._maps)
            blob = self._maps[number] = map_file(self.blobs[number])
        with file_errors(self.origin[number], f"image {row}", RuntimeError):
            image = decode_image(blob[start : start + int(self.size_of_row[row])], ImageReadMode.RGB)
        if image.dtype != torch.uint8 or tuple(image.shape[1:]) != tuple(self.shape):
            raise UserError(
                f"{self.origin[number]}: an image is {tuple(image.shape[1:])} {image.dtype}, but "
                f"meta/info.json says {tuple(self.shape)} and 8 bits are needed; correct the feature."
            )
        return image.permute(1, 2, 0).numpy()

    def span_key(self, start: int, stop: int) -> str:
        starts = content_hash(self.start_of_row[start:stop].tobytes())
        return f"images {self.blobs[int(self.file_of_row[start])].name} {starts} {self.shape}"


def pack_images(images: Callable[[], Iterable[bytes]], key: str, cache_dir: Path) -> tuple[Path, np.ndarray]:
    """Encoded images in one file that can be mapped, written once per `key`.

    Returns:
        its path; where the images begin and end in it (images + 1,).
    """
    blob = cache_dir / f"{content_hash(key.encode())}.images"

    def content() -> Iterator[bytes]:
        # The images' bytes, padding to 8, then int64: where they begin and end, number of images.
        offsets = [0]
        for image in images():
            yield image
            offsets.append(offsets[-1] + len(image))
        yield b"\0" * (-offsets[-1] % 8)
        yield np.array([*offsets, len(offsets) - 1], np.int64).tobytes()

    build_once(blob, content)
    mapped = map_file(blob)
    count = int(mapped[-8:].numpy().view(np.int64)[0])
    return blob, mapped[-8 * (count + 2) : -8].numpy().view(np.int64)


def is_whole_image(content: bytes) -> bool:
    """Checksums of a PNG, the end marker of a JPEG; of other kinds nothing is known.

    Before the decoder sees it: a PNG with a wrong checksum crashes or hangs torchvision's (0.29), and a JPEG
    that is cut becomes a picture with a gray part.
    """
    if content[:3] == b"\xff\xd8\xff":
        at = 2
        while marker := JPEG_MARKER.search(content, at):
            if marker[0] == b"\xff\xd9":
                return True  # the end; cameras write things of their own behind it
            size = int.from_bytes(content[marker.end() : marker.end() + 2])
            at = marker.end() + size  # past a thumbnail, which has an end marker too
        return False
    if content[:8] != b"\x89PNG\r\n\x1a\n":
        return True
    at, kind = 8, b""
    while kind != b"IEND" and at + 12 <= len(content):
        end = at + 8 + int.from_bytes(content[at : at + 4])
        kind = content[at + 4 : at + 8]
        if zlib.crc32(content[at + 4 : end]) != int.from_bytes(content[end : end + 4]):
            return False
        at = end + 4
    return kind == b"IEND"


class Resized(_Frames):
    """Another source's frames at (H, W), bilinear with antialiasing; the same bytes cached or on demand."""

    def __init__(self, source: Source, shape: tuple[int, int]) -> None:
        self.source, self.shape, self.thread_safe = source, shape, source.thread_safe

    def __len__(self) -> int:
        return len(self.source)

    def get(self, row: int) -> np.ndarray:
        frame = torch.empty((1, 3, *self.source.shape), dtype=torch.uint8)
        self.source.read_into(np.array([row]), frame)
        return self._resize(frame)

    def in_order(self, start: int, stop: int) -> Iterator[np.ndarray]:
        for frame in self.source.in_order(start, stop):
            yield self._resize(torch.from_numpy(frame).permute(2, 0, 1)[None])

    def span_key(self, start: int, stop: int) -> str:
        return f"{self.source.span_key(start, stop)} to {self.shape}"

    def _resize(self, frame: Tensor) -> np.ndarray:
        image = torch.nn.functional.interpolate(frame, self.shape, mode="bilinear", antialias=True)
        return image[0].permute(1, 2, 0).numpy()


# ---- the cache of decoded frames
class CachedFrames(_Frames):
    """One camera's decoded frames in the frame cache, one file per episode: raw uint8 (length, 3, H, W).

    Args:
        spans: first row and last row + 1 of each cached episode, ascending, and `files` in their order.
    """

    thread_safe = True

    def __init__(
        self, shape: tuple[int, int], num_rows: int, spans: Sequence[tuple[int, int]], files: list[Path]
    ) -> None:
        self.shape, self.num_rows, self.files = (int(shape[0]), int(shape[1])), num_rows, files
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
        for frame, episode, at in zip(out, episodes.tolist(), (rows - self.starts[episodes]).tolist()):
            if episode not in self._maps:
                _make_room(self._maps)
                size = (self.lengths[episode], 3, *self.shape)
                self._maps[episode] = map_file(self.files[episode], math.prod(size)).view(size)
            frame.copy_(self._maps[episode][at])

    def get(self, row: int) -> np.ndarray:
        out = torch.empty((1, 3, *self.shape), dtype=torch.uint8)
        self.read_into(np.array([row]), out)
        return out[0].permute(1, 2, 0).numpy()

    def span_key(self, start: int, stop: int) -> str:
        episode = int(np.searchsorted(self.starts, start, "right")) - 1
        first = start - int(self.starts[episode])
        return f"cached {self.files[episode].name} {first} {first + stop - start}"


def _make_room(maps: dict[int, Tensor]) -> None:
    """For one more map: the newest goes, in one call, since threads share them."""
    if len(maps) >= MAX_MAPS:
        maps.popitem()


def map_file(path: Path, size: int | None = None) -> Tensor:
    """A cache file's bytes, mapped privately: nothing is read before its use, no file handle stays open."""
    try:
        bytes_there = path.stat().st_size
        if size is not None and size != bytes_there:
            text = f"{path} has {bytes_there} bytes, not {size}; delete it, and it is built again."
            raise UserError(text)
        return torch.from_file(str(path), shared=False, size=bytes_there, dtype=torch.uint8)
    except FileNotFoundError as error:
        raise UserError(
            f"{path} is gone: the frame cache was removed while this run used it; start again (--resume "
            "continues from the last checkpoint), and it is built again."
        ) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({first_line(error)}).") from error
    except RuntimeError as error:  # torch's, with the system's reason in its text
        way = "check the disk, or use --dataset.cache off"
        if re.search(r"allocate memory|Too many open files", str(error)):
            way = "this process has too many maps or files; raise vm.max_map_count or ulimit -n, or use "
            way += "--dataset.cache off"
        text = f"{path} cannot be mapped into memory ({first_line(error)}): {way}."
        raise UserError(text) from error


class CacheNote(NamedTuple):
    """data.Note without its subject, which is the cache."""

    level: Literal["info", "warning"]
    text: str


def cached(
    cameras: Mapping[str, Source], spans: Sequence[tuple[int, int]], mode: str, cache_dir: Path
) -> tuple[dict[str, Source], list[CacheNote]]:
    """Sources that read decoded frames from mapped files; missing files are made first, once on a node.

    A file holds one camera's frames of one episode, for the episodes that are used. Its name is a hash of the
    frames' origin (the video's bytes, the frames' times) and size: a changed video or another resize never
    reads wrong frames, and a copy of the dataset reads the same ones. It is written under another name and
    renamed when complete, so a killed build leaves nothing that is used; a lock makes others wait and share.
    """
    plain = dict(cameras)
    if not cameras or mode == "off":
        return plain, []
    names = {
        key: [content_hash(f"{CACHE_FORMAT} {source.span_key(*span)}".encode()) + ".frames" for span in spans]
        for key, source in cameras.items()
    }
    folder = ram_folder(set().union(*names.values())) if mode == "ram" else cache_dir
    result: dict[str, Source] = {}
    jobs: list[_Job] = []
    for key, source in cameras.items():
        files = [folder / name for name in names[key]]
        result[key] = CachedFrames(source.shape, len(source), spans, files)
        every = [_Job(file, source, *span) for file, span in zip(files, spans)]
        jobs += [job for job in every if not job.is_done()]
    try:
        reason = _too_large(jobs, folder, mode)
        if reason is None:
            _build(jobs)
    except CacheUnwritable as error:
        why = system_reason(error.__cause__)
        if mode != "auto":
            raise UserError(
                f"--dataset.cache {mode} cannot write to {folder} ({why}); use another "
                "--dataset.cache-dir, or --dataset.cache off."
            ) from error
        reason = f"frames are decoded on demand: {folder} cannot be written ({why})."
    if reason is not None:
        return plain, [CacheNote("warning", reason)]
    size = sum((stop - start) * 3 * math.prod(c.shape) for c in cameras.values() for start, stop in spans)
    count = len(spans) * len(cameras)
    files_text = f"{count:,} file{'' if count == 1 else 's'} (one per episode and camera)"
    written = f"{len(jobs) or 'none'} of them written now"
    return result, [CacheNote("info", f"frame cache: {folder}, {files_text}, {_size(size)}, {written}")]


def default_cache_dir(cache_dir: str | None = None) -> Path:
    """Of --dataset.cache-dir."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "act-frames"


@dataclass(frozen=True)
class _Job:
    """One file of the cache: the frames of one episode of one camera."""

    path: Path
    source: Source
    start: int
    stop: int

    @property
    def size(self) -> int:
        return (self.stop - self.start) * 3 * math.prod(self.source.shape)

    def is_done(self) -> bool:
        with suppress(OSError):
            if self.path.stat().st_size == self.size:
                return True
            self.path.unlink()  # cut by something else: what is published is complete
        return False


def _too_large(jobs: list[_Job], folder: Path, mode: str) -> str | None:
    """Why --dataset.cache auto decodes on demand, if it does; a refusal for the other modes."""
    need = sum(job.size for job in jobs)
    with _storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    if mode == "auto" and need > min(free / 2, AUTO_CACHE_GB * 1e9):
        return (
            f"frames are decoded on demand, since their cache needs {_size(need)} and {folder} "
            f"has {_size(free)} free; --dataset.cache disk forces it, --dataset.image-size shrinks it."
        )
    if need > free:
        raise UserError(
            f"--dataset.cache {mode} needs {_size(need)} in {folder}, which has {_size(free)} free; use "
            "another --dataset.cache-dir, a smaller --dataset.image-size, or --dataset.cache off."
        )
    return None


def _build(jobs: list[_Job]) -> None:
    """Decode the episodes of all jobs, several at a time where the sources allow it, with a progress bar."""
    if not jobs:
        return
    progress = ProgressBar("frame cache", sum(job.stop - job.start for job in jobs))
    give_up = threading.Event()

    def build(job: _Job, wait: bool) -> bool:
        def content() -> Iterator[memoryview]:
            for frame in job.source.in_order(job.start, job.stop):
                if give_up.is_set():
                    raise InterruptedError
                yield np.ascontiguousarray(frame.transpose(2, 0, 1)).data
                progress.add(1)

        return build_once(job.path, content, wait)

    threads = len(os.sched_getaffinity(0)) if all(job.source.thread_safe for job in jobs) else 1
    pool = ThreadPoolExecutor(threads)
    try:
        for wait in (False, True):  # first what nobody else is building, then what another process has begun
            done = list(pool.map(build, jobs, [wait] * len(jobs)))
            jobs = [job for job, mine in zip(jobs, done) if not mine]
    finally:
        give_up.set()
        pool.shutdown(cancel_futures=True)
        progress.close()


def build_once(path: Path, content: Callable[[], Iterable[Any]], wait: bool = True) -> bool:
    """Make a file complete or not at all, by one of the processes that try.

    The lock is the kernel's and on the unfinished file, so that it ends with the process that held it.

    Args:
        content: makes the file's bytes, in pieces; its errors are raised as they are.
        wait: for another process that is writing it.
    Returns:
        False: another process is writing it, and `wait` is not set.
    Raises:
        CacheUnwritable: the file system's reason.
    """
    unfinished = path.with_suffix(".building")
    while not path.exists():
        with _storing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(unfinished, "ab")  # noqa: SIM115 (closed below, which ends the lock)
        with file:
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
                _write(file, content, path.parent)
                with _storing(path.parent):
                    os.replace(unfinished, path)
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
    return True


def _write(file: BinaryIO, content: Callable[[], Iterable[Any]], folder: Path) -> None:
    with _storing(folder):
        file.truncate(0)  # what a killed build left
    for piece in content():
        with _storing(folder):
            file.write(piece)
    with _storing(folder):
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _storing(folder: Path) -> Iterator[None]:
    """Around calls that write to the cache alone."""
    try:
        yield
    except OSError as error:
        text = f"{folder} cannot be written ({system_reason(error)}); use another --dataset.cache-dir."
        raise CacheUnwritable(text) from error


def system_reason(error: BaseException | None) -> str:
    return getattr(error, "strerror", None) or first_line(error or OSError())


def ram_folder(keep: set[str]) -> Path:
    """/dev/shm/act-frames-USER, removed at exit by the last process that uses it (a lock tells).

    What a killed run has left is removed here, but for the files to keep. Files on a disk are read as fast
    while they fit into the page cache; this is for nodes without a disk that holds them.
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
        text = f"--dataset.cache ram cannot write to {folder} ({error.strerror}); use disk."
        raise UserError(text) from error

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


# ---- small parts
class ProgressBar:
    """A bar with the time to go: redrawn on a terminal, a line every 10 s elsewhere. Thread-safe."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self.start = self.printed = time.monotonic()
        self.lock, self.terminal = threading.Lock(), sys.stderr.isatty()

    def add(self, frames: int) -> None:
        with self.lock:
            self.done += frames
            if time.monotonic() - self.printed >= (0.2 if self.terminal else 10.0):
                self._print()

    def _print(self) -> None:
        self.printed = time.monotonic()
        rate = self.done / max(self.printed - self.start, 1e-9)
        left = time.strftime("%H:%M:%S", time.gmtime((self.total - self.done) / max(rate, 1e-9)))
        line = f"{self.what}: {self.done}/{self.total} frames, {rate:.0f}/s, {left} to go"
        start, end = ("\r", "\x1b[K") if self.terminal else ("", "\n")
        print(f"{start}{line}", end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.done and (self.terminal or time.monotonic() - self.start > 1):
            self._print()
        if self.terminal:
            print(file=sys.stderr)


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
        raise UserError(f"{path} is missing; copy the dataset again, or download it.") from error
    except broken as error:
        at = f"{what} in {path}" if what else path
        reason = f"{type(error).__name__}: {first_line(error)}"
        text = f"{at} cannot be read ({reason}); the file is corrupt or of another kind."
        raise UserError(text) from error


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")


def import_package(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        text = f"{what} need {name} ({first_line(error)}): pip install {name}"
        raise MissingPackage(text) from error


def content_hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def file_hash(path: Path, cache_dir: Path) -> str:
    """Of a file's bytes; remembered in the cache folder until its size or time changes."""
    memo = _memo(path, cache_dir).with_suffix(".hash")
    with suppress(OSError, UnicodeDecodeError):
        if re.fullmatch(r"[0-9a-f]{32}", digest := memo.read_text()):
            return digest
    with file_errors(path), open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    _remember(memo, lambda file: file.write(digest.encode()))
    return digest


def _memo(path: Path, cache_dir: Path) -> Path:
    with file_errors(path):
        stat = path.stat()
    key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    return cache_dir / "scans" / content_hash(key.encode())


def _remember(memo: Path, write: Callable[[BinaryIO], Any]) -> None:
    with suppress(OSError):  # a folder that cannot be written costs the next run the time again
        memo.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=memo.parent, delete=False) as file:
            write(file)  # type: ignore[arg-type]
        os.replace(file.name, memo)


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
