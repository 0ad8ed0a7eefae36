"""Data without a robot, for bench.py: frames of noise, and a LeRobot dataset of moving noise.

    frames = NoiseFrames(830, 48, 64)        # a data.FrameSource
    root = write_dataset(Path("set"), 240)   # LeRobot v3.0: H.264 and PNG inside parquet; needs av, pyarrow

This file imports nothing of the project.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from torch import Tensor

ACTION_DIM = 14  # two arms of seven joints each, as ALOHA has
VIDEO, IMAGE = "observation.images.video", "observation.images.image"
FPS = 50
PATHS = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}


class NoiseFrames:
    """Frames of noise that depend on their number alone."""

    thread_safe = True

    def __init__(self, count: int, height: int, width: int) -> None:
        self.count, self.shape = count, (height, width)

    def __len__(self) -> int:
        return self.count

    def frame(self, row: int) -> np.ndarray:
        return np.random.default_rng(row).integers(0, 256, (*self.shape, 3), dtype=np.uint8)

    def read_into(self, rows: np.ndarray, out: Tensor) -> None:
        for row, image in zip(rows, out):
            image.copy_(torch.from_numpy(self.frame(row)).permute(2, 0, 1))

    def in_order(self, start: int, stop: int) -> Iterator[np.ndarray]:
        return (self.frame(row) for row in range(start, stop))

    def span_key(self, start: int, stop: int) -> str:
        return f"noise-{self.shape}-{start}-{stop}"


def write_dataset(root: Path, frames: int, height: int = 480, width: int = 640) -> Path:
    """Write a dataset of two episodes, with the same pictures under VIDEO and under IMAGE. Returns `root`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file_numbers = {"chunk_index": 0, "file_index": 0}
    data_file, video_file = (root / p.format(**file_numbers, video_key=VIDEO) for p in PATHS.values())
    episodes_file = root / "meta" / "episodes" / "chunk-000" / "file-000.parquet"
    for file in (data_file, video_file, episodes_file):
        file.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    pictures = moving_noise(rng, frames, height, width)
    write_video(video_file, pictures)

    lengths = [frames // 2, frames - frames // 2]
    frame = np.concatenate([np.arange(length) for length in lengths])
    numbers = {"timestamp": (frame / FPS).astype(np.float32), "frame_index": frame}
    numbers |= {"episode_index": np.repeat([0, 1], lengths), "index": np.arange(frames)}
    numbers |= {"task_index": np.zeros(frames, np.int64)}
    vectors = {}
    for key in ("observation.state", "action"):
        vectors[key] = list(rng.normal(size=(frames, ACTION_DIM)).astype(np.float32))
    images = [{"bytes": as_png(picture), "path": f"{i}.png"} for i, picture in enumerate(pictures)]
    pq.write_table(pa.table({**vectors, **numbers, IMAGE: images}), data_file)

    episodes = []
    for number, length in enumerate(lengths):
        start = sum(lengths[:number])
        row: dict[str, Any] = {"episode_index": number, "length": length, "tasks": ["noise"]}
        row |= {"dataset_from_index": start, "dataset_to_index": start + length}
        for prefix in ("data", f"videos/{VIDEO}"):
            row |= {f"{prefix}/{key}": value for key, value in file_numbers.items()}
        row |= {f"videos/{VIDEO}/from_timestamp": start / FPS}
        row |= {f"videos/{VIDEO}/to_timestamp": (start + length) / FPS}
        episodes.append(row)
    pq.write_table(pa.Table.from_pylist(episodes), episodes_file)
    pq.write_table(pa.table({"task_index": [0], "task": ["noise"]}), root / "meta" / "tasks.parquet")

    shape, names = [height, width, 3], ["height", "width", "channels"]
    features: dict[str, dict[str, Any]] = {
        VIDEO: {"dtype": "video", "shape": shape, "names": names},
        IMAGE: {"dtype": "image", "shape": shape, "names": names},
    }
    features |= {key: {"dtype": "float32", "shape": [ACTION_DIM], "names": None} for key in vectors}
    features |= {key: {"dtype": str(v.dtype), "shape": [1], "names": None} for key, v in numbers.items()}
    info = {"codebase_version": "v3.0", "fps": FPS, "total_episodes": 2, "total_frames": frames, **PATHS}
    (root / "meta" / "info.json").write_text(json.dumps(info | {"features": features}))
    moments = {"mean": 0.0, "std": 1.0, "min": -4.0, "max": 4.0}
    stats = {key: {name: [value] * ACTION_DIM for name, value in moments.items()} for key in vectors}
    (root / "meta" / "stats.json").write_text(json.dumps(stats))
    return root


def moving_noise(rng: np.random.Generator, frames: int, height: int, width: int) -> list[np.ndarray]:
    """Pictures (H, W, 3) of a coarse texture that moves under a fine grain that does not."""
    coarse = rng.integers(0, 256, (height // 8 + 64, width // 8 + 64, 3), dtype=np.uint8)
    texture = coarse.repeat(8, axis=0).repeat(8, axis=1)
    grain = rng.integers(0, 16, (height, width, 3), dtype=np.uint8)
    pictures = []
    for t in range(frames):
        top, left = t % 512, 2 * t % 512
        pictures.append(texture[top : top + height, left : left + width] // 2 + grain)
    return pictures


def write_video(path: Path, pictures: list[np.ndarray]) -> None:
    """H.264 with LeRobot's options: a key frame every two frames, quality 30."""
    import av

    height, width = pictures[0].shape[:2]
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("libx264", rate=FPS, options={"g": "2", "crf": "30"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for picture in pictures:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def as_png(picture: np.ndarray) -> bytes:
    image = torch.from_numpy(picture).permute(2, 0, 1).contiguous()
    return torchvision.io.encode_png(image, compression_level=1).numpy().tobytes()
