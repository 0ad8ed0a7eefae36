"""data.py against LeRobot's values (expected.json), frames with their number drawn in, and itself: cached = on demand,
every start method, every split over ranks, every resume; and broken sets against one sentence each."""

import fcntl
import hashlib
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import DATA, ROOT, shared
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from data import DatasetConfig, SampleOrder, TrainBatches, ValBatches, make_loader, to_device
from extras import assembly, check_data, datasets, frames, lerobot_data

av = pytest.importorskip("av")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SETS = ("env_state_v3", "aloha_img_v3", "two_cam_v3", "g1_v3")
TOP = "observation.images.top"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """No test sees the user's caches; the tests of one process share the folder of scans."""
    home = tmp_path_factory.getbasetemp() / "home"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    for name in ("HF_HOME", "HF_LEROBOT_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def reference(name: str) -> Path:
    return DATA / name if (DATA / name).exists() else shared("data", name)


def open_dataset(cfg, chunk_size):
    return datasets.open_dataset(cfg, chunk_size)[:2]


def opened(root, chunk_size=100, **flags):
    flags = {"cache": "off"} | flags
    return open_dataset(DatasetConfig(root=str(root), **flags), chunk_size)


def lines(notes) -> list[str]:
    """Notes as the console shows them."""
    return [f"warning: {note.text}" if note.level == "warning" else note.text for note in notes]


def notes_of(root, chunk_size=100, **flags) -> list[str]:
    cfg = DatasetConfig(root=str(root), **({"cache": "off"} | flags))
    return lines(datasets.open_dataset(cfg, chunk_size)[2])


def refusal(root, **flags) -> str:
    with pytest.raises(ValueError) as caught:
        opened(root, **flags)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith("."), sentence
    return sentence


# ---- sets made here: each frame shows its own number -------------------------------------------------------
def picture(number: int, height=64, width=64, seed=0) -> np.ndarray:
    """Bit k of the number is the brightness of block k in the top quarter; noise below."""
    image = np.random.default_rng(number + seed).integers(60, 120, (height, width, 3), np.uint8)
    for bit in range(12):
        image[: height // 4, bit * width // 12 : (bit + 1) * width // 12] = (
            235 if number >> (11 - bit) & 1 else 16
        )
    return image


def shown(frame: torch.Tensor) -> int:
    """The number drawn into a (3, H, W) frame."""
    _, height, width = frame.shape
    row = frame[:, 2 : height // 4 - 2].float().mean((0, 1))
    bits = [row[bit * width // 12 + 1 : (bit + 1) * width // 12 - 1].mean() > 125 for bit in range(12)]
    return sum(int(bit) << (11 - k) for k, bit in enumerate(bits))


def write_video(
    path: Path, numbers, fps, codec="libx264", size=(64, 64), options=None, jitter=None, gray=False
) -> None:
    from fractions import Fraction

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(
            codec, rate=Fraction(fps).limit_denominator(1001), options=options or {}
        )
        stream.width, stream.height, stream.pix_fmt = size[1], size[0], "gray" if gray else "yuv420p"
        stream.codec_context.time_base = Fraction(1, 90000)
        for place, number in enumerate(numbers):
            frame = av.VideoFrame.from_ndarray(picture(number, *size), format="rgb24")
            late = jitter[place] if jitter is not None else 0.0
            frame.pts, frame.time_base = round((place / fps + late) * 90000), Fraction(1, 90000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def write_set(
    root: Path, lengths, fps=30, codec="libx264", size=(64, 64), options=None, jitter=None, float32=False
) -> Path:
    """A v3.0 set with one parquet and one mp4 for all episodes; states and actions count the frames."""
    total, ends = sum(lengths), np.cumsum(lengths)
    episode = np.repeat(np.arange(len(lengths)), lengths)
    frame = np.arange(total) - (ends - lengths)[episode]
    columns = {
        "observation.state": pa.array(
            np.stack([np.arange(total), episode], 1).astype(np.float32).tolist(), pa.list_(pa.float32())
        ),
        "action": pa.array(
            np.stack([np.arange(total), -frame], 1).astype(np.float32).tolist(), pa.list_(pa.float32(), 2)
        ),
        "timestamp": pa.array((frame / fps).astype(np.float32)),
        "frame_index": pa.array(frame),
        "episode_index": pa.array(episode),
        "index": pa.array(np.arange(total)),
        "task_index": pa.array(np.zeros(total, np.int64)),
    }
    (root / "data" / "chunk-000").mkdir(parents=True)
    pq.write_table(pa.table(columns), root / "data" / "chunk-000" / "file-000.parquet")
    write_video(
        root / "videos" / TOP / "chunk-000" / "file-000.mp4", range(total), fps, codec, size, options, jitter
    )
    offsets = (
        np.concatenate([[0], np.cumsum(np.float32(np.asarray(lengths) / fps), dtype=np.float32)])
        if float32
        else np.concatenate([[0], ends]) / fps
    )
    rows = {
        "episode_index": list(range(len(lengths))),
        "length": list(lengths),
        "data/chunk_index": [0] * len(lengths),
        "data/file_index": [0] * len(lengths),
        "dataset_from_index": (ends - lengths).tolist(),
        "dataset_to_index": ends.tolist(),
        f"videos/{TOP}/chunk_index": [0] * len(lengths),
        f"videos/{TOP}/file_index": [0] * len(lengths),
        f"videos/{TOP}/from_timestamp": offsets[:-1].astype(float).tolist(),
        f"videos/{TOP}/to_timestamp": offsets[1:].astype(float).tolist(),
    }
    (root / "meta" / "episodes" / "chunk-000").mkdir(parents=True)
    pq.write_table(pa.table(rows), root / "meta" / "episodes" / "chunk-000" / "file-000.parquet")
    pq.write_table(pa.table({"task_index": [0], "task": ["count"]}), root / "meta" / "tasks.parquet")
    vector = {"dtype": "float32", "shape": [2], "names": None}
    number = {"dtype": "int64", "shape": [1], "names": None}
    info = {
        "codebase_version": "v3.0", "fps": fps, "total_episodes": len(lengths), "total_frames": total, "chunks_size": 1000,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": {
            "observation.state": vector, "action": vector,
            TOP: {"dtype": "video", "shape": [*size, 3], "names": ["height", "width", "channels"]},
            "timestamp": number | {"dtype": "float32"}, "frame_index": number, "episode_index": number, "index": number, "task_index": number,
        },
    }  # fmt: skip
    (root / "meta" / "info.json").write_text(json.dumps(info))
    state, action = (np.array(columns[key].to_pylist()) for key in ("observation.state", "action"))
    stats = {
        key: {n: v.tolist() for n, v in data.measure(values).items()}
        for key, values in (("observation.state", state), ("action", action))
    }
    stats[TOP] = {"mean": [[[0.315]]] * 3, "std": [[[0.179]]] * 3}
    (root / "meta" / "stats.json").write_text(json.dumps(stats))
    return root


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> Path:
    return write_set(tmp_path_factory.mktemp("counted") / "set", [7, 12, 5], options={"g": "4"})


def copied(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755)
    return target


def edit_json(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_table(path: Path, **columns) -> None:
    """Replace columns of a parquet file: NAME=function of the list of values; _ and . stand as they are in `name`."""
    table = pq.read_table(path)
    for name, change in columns.items():
        place = table.schema.get_field_index(name)
        values = table.column(name).to_pylist()
        changed = change(values)
        table = table.set_column(
            place, name, pa.array(values if changed is None else changed, table.schema.field(name).type)
        )
    pq.write_table(table, path)


# ---- equal to LeRobot --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("cache", ["off", "disk"])
def test_every_value_frame_and_statistic_is_lerobots(name, cache, tmp_path):
    root = reference(name)
    expected = json.loads((root / "expected.json").read_text())
    indices = expected["indices"]
    chosen = (
        {"episodes": (0, 3), "cache_dir": str(tmp_path)}
        if name == "g1_v3" and cache == "disk"
        else {"cache_dir": str(tmp_path)}
    )
    train, _ = opened(root, cache=cache, **chosen)
    local = {int(index): i for i, index in enumerate(train.columns["index"])}
    if "episodes" not in chosen:
        assert (len(train), train.num_episodes, train.fps) == (
            expected["num_frames"],
            expected["num_episodes"],
            expected["fps"],
        )
        for key, stats in expected["stats"].items():
            for stat, value in stats.items():
                if key not in train.cameras or stat not in ("mean", "std"):  # ImageNet's there
                    assert (
                        train.stats[key][stat].flatten().tolist() == torch.tensor(value).flatten().tolist()
                    ), (key, stat)
    for index in (index for index in indices if index in local):
        frame = expected["frames"][str(index)]
        batch = {key: value[0] for key, value in train.get_batch(np.array([local[index]])).items()}
        for key in data.INDEX_COLUMNS:
            assert batch[key].item() == frame[key]
        assert batch["observation.state"].tolist() == frame["observation.state"]
        assert batch["action"][:3].tolist() == frame["action_first3"]
        assert batch["action"][-1].tolist() == frame["action_last"]
        assert batch["action_is_pad"].sum().item() == frame["action_is_pad_sum"]
        for camera, decoded in frame["cameras"].items():
            assert batch[camera].dtype == torch.uint8
            expected_hash = next(iter(decoded.values()))["sha1_chw_bytes"]
            assert hashlib.sha1(batch[camera].numpy().tobytes()).hexdigest() == expected_hash


@pytest.mark.parametrize("codec, options", [
    ("libx264", {"g": "250", "bf": "3"}), ("libx265", {"x265-params": "log-level=none:keyint=8:bframes=3"}), ("libsvtav1", {"g": "2", "preset": "12"}),
])  # fmt: skip
def test_any_codec_gives_the_frame_of_the_row_in_any_order(codec, options, tmp_path):
    if codec not in av.codecs_available:
        pytest.skip(f"this PyAV cannot encode {codec}")
    root = write_set(tmp_path / "set", [9, 14, 11], codec=codec, options=options, size=(64, 96))
    demand, _ = opened(root)
    cached, _ = opened(root, cache="disk", cache_dir=str(tmp_path / "cache"))
    order = np.random.default_rng(0).permutation(34)
    frames = demand.get_batch(order)[TOP]
    assert [shown(frame) for frame in frames] == order.tolist()
    assert torch.equal(frames, cached.get_batch(order)[TOP])


@pytest.mark.parametrize("fps", [30, 30000 / 1001])
def test_sixty_episodes_in_one_video_with_offsets_summed_in_float32(fps, tmp_path):
    root = write_set(tmp_path / "set", [9] * 60, fps=fps, options={"g": "9"}, float32=True)
    train, _ = opened(root)
    rows = np.arange(0, 540, 7)
    assert [shown(frame) for frame in train.get_batch(rows)[TOP]] == rows.tolist()


def test_frames_off_their_times_are_refused_at_start_and_allowed_by_a_wider_tolerance(tmp_path):
    jitter = np.zeros(24)
    jitter[10:] = np.random.default_rng(0).uniform(-0.003, 0.003, 14)
    root = write_set(tmp_path / "set", [7, 12, 5], jitter=jitter)
    sentence = refusal(root)
    assert re.search(
        r"file-000.mp4: episode 1 of camera observation.images.top wants a frame at 0\.\d+ s for its frame",
        sentence,
    )
    assert "nearest" in sentence and "--dataset.tolerance-s" in sentence
    train, _ = opened(root, tolerance_s=0.01)
    assert [shown(frame) for frame in train.get_batch(np.arange(24))[TOP]] == list(range(24))


def test_times_inside_the_tolerance_pass_whatever_offset_the_frames_share(tmp_path):
    jitter = np.where(np.arange(24) % 5 < 3, 0.003, -0.004)
    jitter[0] = 0.003  # the first frame defines 0 s
    root = write_set(tmp_path / "set", [24], jitter=jitter)
    train, _ = opened(root, tolerance_s=0.005)
    assert [shown(frame) for frame in train.get_batch(np.arange(24))[TOP]] == list(range(24))
    numbers = re.search(r"wants a frame at ([\d.]+) s .* is at ([\d.]+) s", refusal(root, tolerance_s=0.002))
    wanted, nearest = map(float, numbers.groups())
    assert len(numbers[1].partition(".")[2]) == 6 and 0.002 < abs(wanted - nearest) < 0.0075


def test_rows_with_clock_times_are_refused_and_allowed_by_a_wider_tolerance(tmp_path):
    root = write_set(tmp_path / "set", [40])
    late = np.float32(np.arange(40) / 30 + np.where(np.arange(40) > 20, 0.2, 0))
    edit_table(root / "data/chunk-000/file-000.parquet", timestamp=lambda _: late.tolist())
    assert re.search(
        r"timestamp of episode 0, frame 2\d .row 2\d. is .* at 30 fps it is", refusal(root, image_keys=())
    )
    train, _ = opened(root, image_keys=(), tolerance_s=0.5)
    assert len(train) == 40


def test_a_v21_set_gives_the_same_batches_as_v30(counted, tmp_path):
    new, _ = opened(counted)
    old = tmp_path / "old"
    table = pq.read_table(counted / "data" / "chunk-000" / "file-000.parquet")
    rows = pq.read_table(counted / "meta" / "episodes" / "chunk-000" / "file-000.parquet").to_pylist()
    for row in rows:
        e, start, end = row["episode_index"], row["dataset_from_index"], row["dataset_to_index"]
        (old / "data" / "chunk-000").mkdir(parents=True, exist_ok=True)
        pq.write_table(
            table.slice(start, end - start), old / "data" / "chunk-000" / f"episode_{e:06d}.parquet"
        )
        write_video(
            old / "videos" / "chunk-000" / TOP / f"episode_{e:06d}.mp4",
            range(start, end),
            30,
            options={"g": "4"},
        )
    (old / "meta").mkdir()
    info = json.loads((counted / "meta" / "info.json").read_text())
    info |= {
        "codebase_version": "v2.1",
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    }
    info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    (old / "meta" / "info.json").write_text(json.dumps(info))
    lines = [
        {"episode_index": row["episode_index"], "length": row["length"], "tasks": ["count"]} for row in rows
    ]
    (old / "meta" / "episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (old / "meta" / "tasks.jsonl").write_text('{"task_index": 0, "task": "count"}\n')
    train, _ = opened(old)
    assert "computed" in next(note for note in notes_of(old) if note.startswith("statistics"))
    a, b = new.get_batch(np.arange(24)), train.get_batch(np.arange(24))
    assert [shown(frame) for frame in b[TOP]] == list(range(24))
    for key in set(a) - {TOP}:
        assert torch.equal(a[key], b[key])
    for stat in ("mean", "std", "min", "max"):
        torch.testing.assert_close(new.stats["action"][stat], train.stats["action"][stat])
    edit_json(old / "meta" / "info.json", lambda info: info.update(codebase_version="v1.6"))
    assert "python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id" in refusal(old)


def write_v21(root: Path, lengths, image=None) -> Path:
    """A v2.1 set, one parquet file an episode; image(episode, frame) gives {"bytes", "path"} of a camera."""
    vector = {"dtype": "float32", "shape": [2], "names": None}
    number = {"dtype": "int64", "shape": [1], "names": None}
    features = {"observation.state": vector, "action": vector, "timestamp": number | {"dtype": "float32"}}
    features |= dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), number)
    if image:
        features[TOP] = {"dtype": "image", "shape": [64, 64, 3], "names": ["height", "width", "channel"]}
    (root / "meta").mkdir(parents=True)
    (root / "data" / "chunk-000").mkdir(parents=True)
    total = 0
    for e, length in enumerate(lengths):
        rows = np.arange(total, total + length)
        columns = {
            key: pa.array(np.stack([rows, -rows], 1).astype(np.float32).tolist())
            for key in ("observation.state", "action")
        }
        columns |= {
            "timestamp": pa.array(np.float32(np.arange(length) / 30)),
            "frame_index": pa.array(np.arange(length)),
        }
        columns |= {
            "episode_index": pa.array(np.full(length, e)),
            "index": pa.array(rows),
            "task_index": pa.array(rows * 0),
        }
        if image:
            kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
            columns[TOP] = pa.array([image(e, k) for k in range(length)], kind)
        pq.write_table(pa.table(columns), root / "data" / "chunk-000" / f"episode_{e:06d}.parquet")
        total += length
    info = {
        "codebase_version": "v2.1", "fps": 30, "total_episodes": len(lengths), "total_frames": total, "chunks_size": 1000, "features": features,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    }  # fmt: skip
    (root / "meta" / "info.json").write_text(json.dumps(info))
    lines = [{"episode_index": e, "length": length, "tasks": ["count"]} for e, length in enumerate(lengths)]
    (root / "meta" / "episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (root / "meta" / "tasks.jsonl").write_text('{"task_index": 0, "task": "count"}\n')
    return root


def encoded(number: int, kind: str = "png") -> bytes:
    from torchvision.io import encode_jpeg, encode_png

    image = torch.from_numpy(picture(number)).permute(2, 0, 1)
    return (encode_png(image) if kind == "png" else encode_jpeg(image, 95)).numpy().tobytes()


def test_images_in_files_beside_the_parquet_are_read_anew_when_they_change(tmp_path):
    def beside(e, k):
        file = tmp_path / "set" / "images" / f"{e}-{k}.png"
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_bytes(encoded(5 * e + k))
        return {"bytes": None, "path": f"images/{e}-{k}.png"}

    root = write_v21(tmp_path / "set", [5, 4], beside)
    flags = {"cache_dir": str(tmp_path / "cache")}
    for cache in ("off", "disk"):
        train, _ = opened(root, cache=cache, **flags)
        assert [shown(frame) for frame in train.get_batch(np.arange(9))[TOP]] == list(range(9))
    (root / "images" / "0-2.png").write_bytes(encoded(99))
    for cache in ("off", "disk"):
        train, _ = opened(root, cache=cache, **flags)
        assert [shown(frame) for frame in train.get_batch(np.arange(9))[TOP]] == [0, 1, 99, *range(3, 9)]
    (root / "images" / "1-3.png").unlink()
    assert re.search(r"1-3\.png is missing", refusal(root, **flags))


@pytest.mark.parametrize("trailer", [b"", b"\n", b"\0\0", b"SEFT1234" * 100])
def test_a_jpeg_may_have_bytes_behind_its_end_but_not_lack_it(trailer, tmp_path):
    def jpeg(number):  # with a thumbnail in its head, which ends like a picture
        content = encoded(number, "jpeg")
        thumbnail = b"\xff\xe1" + (len(content) + 2).to_bytes(2) + content
        return content[:2] + thumbnail + content[2:] + trailer

    root = write_v21(tmp_path / "set", [3], lambda e, k: {"bytes": jpeg(k), "path": None})
    train, _ = opened(root)
    assert [shown(frame) for frame in train.get_batch(np.arange(3))[TOP]] == [0, 1, 2]
    for left in (0.3, 0.7, 0.95):
        content = jpeg(1)
        cut = content[: int(left * (len(content) - len(trailer)))]
        assert not frames.is_whole_image(cut) and not frames.is_whole_image(cut + b"\n")


def test_the_work_at_the_start_grows_with_the_episodes_and_not_with_their_square(tmp_path, monkeypatch):
    calls, real = [], Path.__eq__
    root = write_v21(tmp_path / "set", [2] * 50)

    def counted(self, other):
        calls.append(1)
        return real(self, other)

    monkeypatch.setattr(Path, "__eq__", counted)
    train, val = opened(root, val_split=0.5)
    assert (len(train), len(val)) == (50, 50) and len(calls) < 10 * 50


def test_images_in_parquet_are_decoded_one_for_each_sample(monkeypatch):
    import torchvision.io

    train, _ = opened(reference("aloha_img_v3"))
    calls, real = [], torchvision.io.decode_image

    def counted(*arguments):
        calls.append(1)
        return real(*arguments)

    monkeypatch.setattr(torchvision.io, "decode_image", counted)
    train.get_batch(np.array([3, 50, 7]))
    assert len(calls) == 3


def test_cameras_of_different_size_keep_their_order_and_can_be_chosen_or_resized(tmp_path):
    root = reference("two_cam_v3")
    train, _ = opened(root)
    inputs, outputs = train.features
    assert list(inputs) == ["observation.state", TOP, "observation.images.wrist"]
    assert inputs[TOP] == {"type": "VISUAL", "shape": [3, 480, 640]} and outputs == {
        "action": {"type": "ACTION", "shape": [14]}
    }
    wrist, _ = opened(root, image_keys=("observation.images.wrist",))
    assert list(wrist.features[0]) == ["observation.state", "observation.images.wrist"]
    demand, _ = opened(root, image_size=(60, 80), episodes=(3,))
    cached, _ = opened(root, image_size=(60, 80), episodes=(3,), cache="disk", cache_dir=str(tmp_path))
    a, b = demand.get_batch(np.arange(30)), cached.get_batch(np.arange(30))
    assert a[TOP].shape == (30, 3, 60, 80) and all(torch.equal(a[key], b[key]) for key in a)


def test_other_key_names_become_action_and_state(tmp_path):
    root = copied(reference("env_state_v3"), tmp_path / "set")
    old, _ = opened(root)
    text = (root / "meta" / "info.json").read_text()
    (root / "meta" / "info.json").write_text(
        text.replace('"action"', '"arm.target"').replace('"observation.state"', '"joints"')
    )
    text = (root / "meta" / "stats.json").read_text()
    (root / "meta" / "stats.json").write_text(
        text.replace('"action"', '"arm.target"').replace('"observation.state"', '"joints"')
    )
    path = root / "data" / "chunk-000" / "file-000.parquet"
    names = {"action": "arm.target", "observation.state": "joints"}
    table = pq.read_table(path)
    pq.write_table(table.rename_columns([names.get(name, name) for name in table.column_names]), path)
    assert "--dataset.action-key=action is no column" in refusal(root)
    new, _ = opened(root, action_key="arm.target", state_key="joints")
    a, b = old.get_batch(np.arange(20)), new.get_batch(np.arange(20))
    assert list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)
    assert torch.equal(old.stats["action"]["mean"], new.stats["action"]["mean"])
    assert old.features == new.features


def test_a_set_whose_state_has_another_name_is_warned_of(tmp_path, counted):
    root = copied(counted, tmp_path / "set")
    table = pq.read_table(root / TABLE)
    names = [name.replace("observation.state", "observation.qpos") for name in table.column_names]
    pq.write_table(table.rename_columns(names), root / TABLE)
    text = (root / "meta" / "info.json").read_text()
    (root / "meta" / "info.json").write_text(text.replace('"observation.state"', '"observation.qpos"'))
    cfg = DatasetConfig(root=str(root), cache="off")
    words = "the policy gets no robot state; the dataset has observation.qpos: give --dataset.state-key."
    assert f"warning: {words}" in notes_of(root) and words in check_data.check_dataset(cfg, 8)[1]
    assert "no robot state" not in str(notes_of(root, state_key="observation.qpos"))
    (root / "meta" / "info.json").write_text(
        text.replace('"observation.state"', '"observation.environment_state"')
    )
    names = [name.replace("qpos", "environment_state") for name in names]
    pq.write_table(table.rename_columns(names), root / TABLE)
    assert "no robot state" not in str(notes_of(root))


def test_a_feature_that_is_not_used_may_have_any_shape(tmp_path, counted):
    root = copied(counted, tmp_path / "set")
    more = {
        "note": {"dtype": "string", "shape": None},
        "empty": {"dtype": "float32", "shape": [0]},
        "none": {"dtype": "int64"},
    }
    edit_json(root / "meta" / "info.json", lambda info: info["features"].update(more))
    assert len(opened(root)[0]) == 24 and not check_data.check_dataset(DatasetConfig(root=str(root)), 8)[0]
    for key, shape in (("empty", r"\[0\]"), ("none", "None")):
        assert re.search(rf"info.json: feature {key} has shape {shape}", refusal(root, state_key=key))


def test_scalar_action_and_episodes_of_1_3_and_100_frames(tmp_path):
    lengths = [1, 3, 100]
    values = np.arange(104, dtype=np.float32)
    train, _, _ = data.open_columns(
        DatasetConfig(),
        100,
        {"action": values[:, None], "observation.environment_state": values[:, None]},
        lengths,
        50,
        {},
    )
    batch = train.get_batch(np.array([0, 1, 4]))
    assert (
        (~batch["action_is_pad"]).sum(1).tolist()
        == [1, 3, 100]
        == train.valid_steps(np.array([0, 1, 4])).tolist()
    )
    assert batch["action"][1, :, 0].tolist() == [1, 2] + [3] * 98
    assert train.features[0] == {"observation.environment_state": {"type": "ENV", "shape": [1]}}
    *_, notes = datasets.open_columns(DatasetConfig(), 1000, {"action": values[:, None]}, lengths, 50, {})
    assert any("padding: 3 of 3 episodes" in note for note in lines(notes))


# ---- episodes and statistics -------------------------------------------------------------------------------
@pytest.mark.parametrize("chosen", [(1,), (0, 2, 4), (4,), (4, 2, 0)])
def test_a_subset_holds_whole_episodes_and_raw_chunks(chosen):
    root = reference("two_cam_v3")
    train, _ = opened(root, chunk_size=10, episodes=chosen, image_keys=())
    raw = pa.concat_tables(pq.read_table(path) for path in sorted((root / "data").rglob("*.parquet")))
    action, episode = np.array(raw["action"].to_pylist(), np.float32), np.array(raw["episode_index"])
    assert len(train) == 30 * len(chosen) and train.episode_ids == sorted(chosen)
    batch = train.get_batch(np.arange(len(train)))
    assert set(batch["episode_index"].tolist()) == set(chosen)
    for i in range(len(train)):
        index = int(batch["index"][i])
        want = action[index : index + 10][episode[index : index + 10] == episode[index]]
        assert np.array_equal(batch["action"][i][~batch["action_is_pad"][i]].numpy(), want)


@pytest.mark.parametrize("flags, words", [
    ({"episodes": (5,)}, "names episode 5; the dataset has 0 to 4"), ({"episodes": (-1,)}, "names episode -1"),
    ({"episodes": (1, 2, 1)}, "names episode 1 twice"), ({"episodes": ()}, "is empty"),
    ({"val_episodes": (9,)}, "--dataset.val-episodes names episode 9"), ({"val_split": 1.0}, "--dataset.val-split=1.0"),
    ({"val_split": -0.1}, "--dataset.val-split"), ({"val_split": 0.2, "val_episodes": (1,)}, "do the same"),
    ({"episodes": (0, 1), "val_episodes": (1,)}, "both name 1"), ({"val_episodes": (0, 1, 2, 3, 4)}, "none to train on"),
    ({"episodes": (2,), "val_split": 0.1}, "none to train on"), ({"image_keys": ("side",)}, "--dataset.image-keys names side"),
    ({"action_key": "actions"}, "--dataset.action-key=actions"), ({"state_key": "pose"}, "--dataset.state-key=pose"),
    ({"image_size": (0, 10)}, "--dataset.image-size"), ({"tolerance_s": 0.0}, "--dataset.tolerance-s"),
    ({"min_std": -1.0}, "--dataset.min-std"), ({"chunk_size": 0}, "chunk-size=0"), ({"repo_id": "no"}, "USER/NAME"),
])  # fmt: skip
def test_a_wrong_flag_is_refused_in_one_sentence_that_names_it(flags, words):
    assert words in refusal(reference("two_cam_v3"), **flags)


@pytest.mark.parametrize("flags, words", [
    ({"min_std": -1.0}, "--dataset.min-std=-1.0"), ({"min_std": float("nan")}, "--dataset.min-std=nan"),
    ({"image_size": (0, 10)}, "--dataset.image-size=(0, 10)"), ({"image_size": (9000, 10)}, "--dataset.image-size=(9000, 10)"),
    ({"tolerance_s": 0.0}, "--dataset.tolerance-s=0.0"), ({"val_split": 1.5}, "--dataset.val-split=1.5"),
    ({"chunk_size": 0}, "--policy.chunk-size=0"), ({"episodes": ()}, "--dataset.episodes is empty"),
    ({"episodes": (1, 1)}, "--dataset.episodes names episode 1 twice"),
])  # fmt: skip
def test_a_flag_that_fits_no_dataset_is_refused_before_anything_is_read(flags, words, tmp_path):
    assert words in refusal(tmp_path / "nowhere", **flags)
    assert not (tmp_path / "nowhere").exists()


def test_validation_episodes_are_held_out_of_samples_and_statistics():
    root = reference("two_cam_v3")
    train, val = opened(root, val_split=0.4, image_keys=())
    assert (train.episode_ids, val.episode_ids) == ([0, 1, 2], [3, 4])
    train, val = opened(root, val_episodes=(1,), image_keys=())
    assert (train.episode_ids, val.episode_ids) == ([0, 2, 3, 4], [1])
    assert not set(train.get_batch(np.arange(len(train)))["index"].tolist()) & set(
        val.get_batch(np.arange(30))["index"].tolist()
    )
    assert val.stats is not None and torch.equal(val.stats["action"]["mean"], train.stats["action"]["mean"])


def test_the_statistics_are_those_of_the_episodes_trained_on():
    root = reference("two_cam_v3")
    train, _ = opened(root, episodes=(1, 3), use_imagenet_stats=False)
    raw = pa.concat_tables(pq.read_table(path) for path in sorted((root / "data").rglob("*.parquet")))
    action = np.array(raw["action"].to_pylist())[np.isin(np.array(raw["episode_index"]), (1, 3))]
    for stat in ("mean", "std", "min", "max"):
        torch.testing.assert_close(
            train.stats["action"][stat], torch.tensor(getattr(action, stat)(0), dtype=torch.float32)
        )
    notes = notes_of(root, episodes=(1, 3), use_imagenet_stats=False)
    assert any(note.startswith("statistics from 2 of 5 episodes") for note in notes)
    pixels = train.get_batch(np.arange(60))[TOP].double() / 255
    assert train.stats[TOP]["mean"].shape == (3, 1, 1)
    torch.testing.assert_close(
        train.stats[TOP]["mean"].double().flatten(), pixels.mean((0, 2, 3)), atol=0.01, rtol=0
    )
    torch.testing.assert_close(
        train.stats[TOP]["std"].double().flatten(), pixels.std((0, 2, 3)), atol=0.01, rtol=0
    )


def test_the_per_episode_statistics_of_all_episodes_join_to_the_whole_sets():
    root = reference("two_cam_v3")
    meta = lerobot_data.read_metadata(root)
    joined, (stats, _) = (
        datasets.aggregate(lerobot_data.episode_stats(meta, TOP)),
        lerobot_data.read_stats(meta),
    )
    for stat in ("mean", "std", "min", "max"):
        np.testing.assert_allclose(joined[stat], stats[TOP][stat], rtol=1e-6)


def test_a_joint_that_hardly_moves_gets_the_least_std_and_a_warning():
    columns = {
        "action": np.stack([np.sin(np.arange(50)), np.full(50, 0.3) + 1e-5 * np.arange(50)], 1).astype(
            np.float32
        )
    }
    train, _, notes = data.open_columns(DatasetConfig(), 5, columns, [50], 50, {})
    assert train.stats["action"]["std"][1] == np.float32(1e-3) and train.stats["action"]["std"][0] > 0.5
    assert any("action hardly moves in joint 1" in note for note in lines(notes))
    exact, _, _ = data.open_columns(DatasetConfig(min_std=0.0), 5, columns, [50], 50, {})
    assert 1e-4 < exact.stats["action"]["std"][1] < 2e-4


@pytest.mark.parametrize("mean, std", [(0.4, 0.006), (127.0, 60.0)])
def test_image_statistics_off_by_a_factor_are_replaced_by_imagenets_or_warned_of_with_numbers(
    mean, std, tmp_path
):
    root = copied(reference("aloha_img_v3"), tmp_path / "set")
    wrong = {"mean": [[[mean]]] * 3, "std": [[[std]]] * 3}
    edit_json(root / "meta" / "stats.json", lambda stats: stats[TOP].update(wrong))
    train, _ = opened(root)
    assert train.stats[TOP]["std"].flatten().tolist() == pytest.approx(list(data.IMAGENET["std"]))
    own = notes_of(root, use_imagenet_stats=False)
    assert any(note.startswith("warning") and str(std) in note and TOP in note for note in own)


def test_stale_statistics_warn_with_both_numbers(tmp_path):
    root = copied(reference("env_state_v3"), tmp_path / "set")
    edit_json(root / "meta" / "stats.json", lambda stats: stats["action"]["mean"].__setitem__(3, 7.5))
    assert any(
        re.search(r"warning: the mean of action, joint 3 is 7.5 in the statistics and -0.1169", n)
        for n in notes_of(root)
    )


def test_the_note_on_the_statistics_names_what_was_computed_anew(tmp_path):
    root = copied(reference("env_state_v3"), tmp_path / "set")
    assert any(note.endswith("(meta/stats.json)") for note in notes_of(root))
    edit_json(
        root / "meta" / "stats.json", lambda stats: stats["action"]["mean"].__setitem__(0, float("nan"))
    )
    note = next(note for note in notes_of(root) if note.startswith("statistics from"))
    assert note.endswith("(meta/stats.json; action computed from the rows)")


def test_gray_cameras_are_repeated_and_depth_cameras_refused(tmp_path, counted):
    root = copied(counted, tmp_path / "set")
    edit_json(
        root / "meta" / "info.json",
        lambda info: info["features"][TOP].update(shape=[1, 64, 64], names=["channels", "height", "width"]),
    )
    train, _ = opened(root)
    assert train.get_batch(np.array([5]))[TOP].shape == (1, 3, 64, 64)
    assert train.stats[TOP]["mean"].flatten().tolist() == pytest.approx(
        [0.315] * 3
    )  # its own, not ImageNet's
    assert any("one channel" in note for note in notes_of(root))
    edit_json(
        root / "meta" / "info.json", lambda info: info["features"][TOP].update(info={"is_depth_map": True})
    )
    assert "depth camera" in refusal(root) and "--dataset.image-keys" in refusal(root)


# ---- order, batches ----------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_each_epoch_is_a_permutation(num_frames, seed, epoch):
    order = SampleOrder(num_frames, seed)
    frames = order.frame(epoch * num_frames + np.arange(num_frames))
    assert np.array_equal(np.sort(frames), np.arange(num_frames))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2**62),
    st.integers(-(2**31), 2**31),
    st.lists(st.integers(0, 2**62), min_size=1, max_size=40, unique=True),
)
def test_any_number_of_frames_and_any_position_work_alone_as_in_company(num_frames, seed, positions):
    order = SampleOrder(num_frames, seed)
    together = order.frame(np.array(positions))
    assert together.min() >= 0 and together.max() < num_frames
    assert together.tolist() == [int(order.frame(np.array(p))) for p in positions]
    places = {(p // num_frames, int(f)) for p, f in zip(positions, together)}
    assert len(places) == len(positions)  # no frame twice in an epoch
    seeds = order.noise_seed(np.array(positions))
    assert seeds.min() >= 0 and len(set(seeds.tolist())) == len(positions)


def test_epochs_and_seeds_shuffle_independently():
    orders = [SampleOrder(1000, seed).frame(np.arange(5000)).reshape(5, 1000) for seed in range(4)]
    rows = np.concatenate(orders).astype(float)
    assert np.abs(np.corrcoef(rows) - np.eye(20)).max() < 0.15  # 1/sqrt(1000) is 0.03
    assert abs(np.corrcoef(rows[0], np.arange(1000))[0, 1]) < 0.15
    places = np.array([SampleOrder(10, seed).frame(np.arange(10)) for seed in range(2000)])
    for column in places.T:  # every frame is as likely at every place
        assert np.abs(np.bincount(column, minlength=10) / 2000 - 0.1).max() < 0.035


class Counted:
    """Ten frames without data: a set as TrainBatches sees it."""

    def __init__(self, lengths=(4, 1, 5), chunk_size=3):
        columns = {"action": np.arange(sum(lengths), dtype=np.float32)[:, None]}
        self.set, _, _ = data.open_columns(DatasetConfig(), chunk_size, columns, lengths, 50, {})


def ids(batches, steps) -> list[list[int]]:
    return [batches[step]["index"].tolist() for step in steps]


def test_a_run_stopped_after_any_step_goes_on_in_the_same_order_on_any_number_of_ranks():
    episodes = Counted().set
    whole = ids(TrainBatches(episodes, 3, 4, 0, 1, 1, 10), range(10))  # 40 samples: 4 epochs
    flat = [index for batch in whole for index in batch]
    assert all(sorted(flat[k : k + 10]) == list(range(10)) for k in range(0, 40, 10))
    for stopped in range(10):
        for world in (1, 2, 4):
            ranks = [
                TrainBatches(episodes, 3, 4 // world, r, world, 1, 10, stopped, 4 * stopped)
                for r in range(world)
            ]
            joined = [
                [i for rank in ranks for i in rank[step]["index"].tolist()] for step in range(stopped, 10)
            ]
            assert joined == whole[stopped:]


@pytest.mark.parametrize(
    "world, accumulation, batch_size", [(1, 1, 8), (2, 1, 4), (1, 2, 4), (2, 2, 2), (4, 2, 1), (1, 8, 1)]
)
def test_num_valid_makes_the_mean_over_pieces_the_undivided_mean(world, accumulation, batch_size):
    episodes = Counted((4, 1, 5, 7), 4).set
    whole = TrainBatches(episodes, 0, 8, 0, 1, 1, 6)
    for window in range(6):
        batch = whole[window]
        assert batch["num_valid"] == (~batch["action_is_pad"]).sum()
        total = batch["action"][~batch["action_is_pad"]].sum() / batch["num_valid"]
        steps = range(window * accumulation, (window + 1) * accumulation)
        pieces = [
            TrainBatches(episodes, 0, batch_size, rank, world, accumulation, 6 * accumulation)[step]
            for step in steps
            for rank in range(world)
        ]
        losses = [piece["action"][~piece["action_is_pad"]].sum() / piece["num_valid"] for piece in pieces]
        torch.testing.assert_close(torch.stack(losses).mean(), total)
        assert [s for piece in pieces for s in piece["noise_seed"].tolist()] == batch["noise_seed"].tolist()


@pytest.mark.parametrize(
    "accumulation, start, steps", [(1, 0, 5), (4, 0, 8), (4, 2, 7), (3, 5, 6), (3, 6, 6), (2, 3, 12)]
)
def test_windows_cover_the_run_once_and_agree_with_the_window_of_each_step(accumulation, start, steps):
    batches = TrainBatches(Counted().set, 0, 2, 0, 1, accumulation, steps, start, 2 * start)
    windows = list(batches.windows())
    assert [step for window in windows for step in window] == list(range(start, steps)) == list(batches.steps)
    for window in windows:
        assert all(batches.window(step) == window for step in window)
        assert len({step // accumulation for step in window}) == 1


def test_num_valid_counts_the_window_that_a_resume_or_the_end_cuts_short():
    episodes = Counted().set
    batches = TrainBatches(episodes, 0, 2, 0, 1, 4, 7, start_step=2, samples_seen=4)
    for window in ((2, 3), (4, 5, 6)):
        valid = sum(int((~batches[s]["action_is_pad"]).sum()) for s in window)
        assert [float(batches[s]["num_valid"]) for s in window] == pytest.approx(
            [valid / len(window)] * len(window)
        )


@pytest.mark.parametrize("world, batch_size", [(1, 4), (2, 3), (4, 4), (3, 1)])
def test_validation_sees_every_sample_once_in_batches_of_one_shape(world, batch_size):
    episodes = Counted().set
    ranks = [ValBatches(episodes, batch_size, rank, world) for rank in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    seen = []
    for batch in (rank[i] for i in range(len(ranks[0])) for rank in ranks):
        assert len(batch["index"]) == batch_size
        seen += batch["index"][batch["sample_weight"] > 0].tolist()
    assert seen == list(range(10))


# ---- loader ------------------------------------------------------------------------------------------------
def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_one_sample_is_a_row_of_its_batch_and_a_plain_dataloader_works(counted):
    train, val = opened(counted, chunk_size=4, val_split=0.3)
    batch = train.get_batch(np.arange(len(train)))
    for index in (0, 6, len(train) - 1):
        assert same(train[index], {key: values[index] for key, values in batch.items()})
    with pytest.raises(IndexError):
        train[len(train)]
    loader = torch.utils.data.DataLoader(train, batch_size=5)
    joined = list(loader)
    assert same({key: torch.cat([part[key] for part in joined]) for key in batch}, batch)
    assert len(list(torch.utils.data.DataLoader(val, batch_size=2, shuffle=True))) == 3


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_start_method_give_the_batches_of_one_process(method, counted):
    train, _ = opened(counted, chunk_size=4)
    batches = TrainBatches(train, 0, 3, 0, 1, 1, 5)
    want = [batches[step] for step in range(5)]  # read in the parent first: decoders are open
    assert len(pickle.dumps(batches)) < 20_000
    generator = torch.get_rng_state()
    loader = to_device(make_loader(batches, 2, start_method=method), "cpu")
    got = list(loader)
    assert len(got) == 5 and all(same(a, b) for a, b in zip(got, want))
    assert torch.equal(generator, torch.get_rng_state()) and loader.waited_s > 0
    assert all(same(a, b) for a, b in zip(make_loader(batches, 0), want))


class Slow:
    """A data.FrameSource that takes its time, and fails on row 5."""

    shape, thread_safe = (2, 2), False

    def __init__(self, rows, fails=False):
        self.rows, self.fails = rows, fails

    def __len__(self):
        return self.rows

    def span_key(self, start, stop):
        return f"slow {start} {stop}"

    def in_order(self, start, stop):
        return (self.get(row) for row in range(start, stop))

    def read_into(self, rows, out):
        for frame, row in zip(out, rows.tolist()):
            frame.copy_(torch.from_numpy(self.get(row)).permute(2, 0, 1))

    def get(self, row):
        if self.fails and row == 5:
            raise OSError("the camera of row 5 is gone")
        time.sleep(0.01)
        return np.full((2, 2, 3), row, np.uint8)


def columns_with(source, lengths=(20, 20)):
    columns = {"action": np.arange(sum(lengths), dtype=np.float32)[:, None]}
    return data.open_columns(DatasetConfig(cache="off"), 3, columns, lengths, 50, {TOP: source})[0]


def test_an_error_in_a_worker_reaches_the_trainer_with_its_words():
    batches = TrainBatches(columns_with(Slow(40, fails=True)), 0, 4, 0, 1, 1, 10)
    with pytest.raises(OSError, match="the camera of row 5 is gone"):
        list(to_device(make_loader(batches, 2, start_method="fork"), "cpu"))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_signals_to_the_whole_process_group_leave_the_workers_alive(method, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        f"import os, signal, sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import test_data, data\n"
        "def main():\n"
        "    got = []\n"
        "    for s in (signal.SIGTERM, signal.SIGUSR1):\n"
        "        signal.signal(s, lambda number, frame: got.append(number))\n"
        "    batches = data.TrainBatches(test_data.columns_with(test_data.Slow(40)), 0, 4, 0, 1, 1, 40)\n"
        f"    loader = data.make_loader(batches, 2, start_method={method!r})\n"
        "    for step, batch in enumerate(data.to_device(loader, 'cpu')):\n"
        "        if step in (3, 9):\n"
        "            os.killpg(0, signal.SIGTERM)\n"
        "            os.killpg(0, signal.SIGUSR1)\n"
        "    assert step == 39 and got.count(signal.SIGTERM) == got.count(signal.SIGUSR1) == 2, (step, got)\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    done = subprocess.run(
        [sys.executable, script], start_new_session=True, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_signal_while_workers_start_is_kept_for_our_handler():
    got = []
    before = signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    try:
        with data.signals_blocked():
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
        assert got == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_end_with_a_trainer_that_is_killed(method, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        f"import sys, time\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import test_data, data\n"
        "if __name__ == '__main__':\n"
        "    batches = data.TrainBatches(test_data.columns_with(test_data.Slow(40)), 0, 4, 0, 1, 1, 10**6)\n"
        f"    it = iter(data.make_loader(batches, 2, start_method={method!r}))\n"
        "    next(it)\n"
        "    print(*[w.pid for w in it._workers], flush=True)\n"
        "    time.sleep(60)\n"
    )
    job = subprocess.Popen(
        [sys.executable, script], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    workers = [int(pid) for pid in job.stdout.readline().split()]
    assert len(workers) == 2
    job.kill()
    job.wait()
    end = time.monotonic() + 20
    while any(
        Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
        for pid in workers
    ):
        assert time.monotonic() < end, "workers outlive the trainer"
        time.sleep(0.1)


def test_an_error_in_the_loop_ends_the_process_though_its_workers_are_deaf(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(
        f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import test_data, data\n"
        "def main():\n"
        "    batches = data.TrainBatches(test_data.columns_with(test_data.Slow(40)), 0, 4, 0, 1, 1, 10**6)\n"
        "    for batch in data.to_device(data.make_loader(batches, 2), 'cpu'):\n"
        "        raise KeyboardInterrupt\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt"), done.stderr


def test_too_little_shared_memory_is_a_sentence(counted, monkeypatch):
    train, _ = opened(counted)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 10**5))
    with pytest.raises(
        ValueError, match=r"--num-workers=2 needs 1\.6 MB .* 0\.1 MB are free; use fewer workers"
    ):
        assembly.check_shared_memory(TrainBatches(train, 0, 32, 0, 1, 1, 5), 2)


# ---- frame cache -------------------------------------------------------------------------------------------
class Noted(Slow):
    """Frames that leave a line in a file for each one that is made."""

    def __init__(self, rows, log, key="noted", pause=0.0):
        super().__init__(rows)
        self.log, self.key, self.pause = str(log), key, pause

    def span_key(self, start, stop):
        return f"{self.key} {start} {stop}"

    def get(self, row):
        with open(self.log, "a") as file:
            file.write(f"{row}\n")
        time.sleep(self.pause)
        return np.full((2, 2, 3), row, np.uint8)


def build(folder, log, pause=0.0, key="noted", mode="disk"):
    return build_with_notes(folder, log, pause, key, mode)[0]


def build_with_notes(folder, log, pause=0.0, key="noted", mode="disk"):
    columns = {"action": np.arange(40, dtype=np.float32)[:, None]}
    cfg = DatasetConfig(cache=mode, cache_dir=str(folder))
    cameras = {TOP: Noted(40, log, key, pause)}
    train, _, notes = datasets.open_columns(cfg, 3, columns, (20, 20), 50, cameras)
    assert train.get_batch(np.array([0, 25, 39]))[TOP][:, 0, 0, 0].tolist() == [0, 25, 39]
    return train, lines(notes)


def made(log: Path) -> int:
    return len(log.read_text().split()) if log.exists() else 0


def test_two_processes_that_need_the_same_cache_make_each_frame_once(tmp_path):
    context = multiprocessing.get_context("fork")
    jobs = [context.Process(target=build, args=(tmp_path / "c", tmp_path / "log", 0.01)) for _ in range(3)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(30)
    assert [job.exitcode for job in jobs] == [0, 0, 0]
    assert made(tmp_path / "log") == 40
    build(tmp_path / "c", tmp_path / "log2")
    assert made(tmp_path / "log2") == 0 and not list((tmp_path / "c").glob("*.building"))


def test_a_killed_build_is_never_used_and_finished_episodes_are_kept(tmp_path):
    job = multiprocessing.get_context("fork").Process(
        target=build, args=(tmp_path / "c", tmp_path / "log", 0.02)
    )
    job.start()
    while made(tmp_path / "log") < 30:
        time.sleep(0.01)
    job.kill()
    job.join()
    assert (
        len(list((tmp_path / "c").glob("*.frames"))) == 1
        and len(list((tmp_path / "c").glob("*.building"))) == 1
    )
    train, notes = build_with_notes(tmp_path / "c", tmp_path / "log2")
    assert made(tmp_path / "log2") == 20 and any(
        "2 files" in note and "1 of them written now" in note for note in notes
    )
    assert train.get_batch(np.arange(40))[TOP][:, 0, 0, 0].tolist() == list(range(40))


def test_a_cut_file_is_made_again_and_other_content_has_another_file(tmp_path):
    build(tmp_path / "c", tmp_path / "log")
    victim = next((tmp_path / "c").glob("*.frames"))
    victim.write_bytes(victim.read_bytes()[:-1])
    build(tmp_path / "c", tmp_path / "log2")
    assert made(tmp_path / "log2") == 20
    build(tmp_path / "c", tmp_path / "log3", key="other")
    assert made(tmp_path / "log3") == 40


def test_the_cache_knows_a_video_by_its_content(counted, tmp_path):
    flags = {"cache": "disk", "cache_dir": str(tmp_path / "cache")}
    opened(counted, **flags)
    moved = copied(counted, tmp_path / "elsewhere")
    notes = notes_of(moved, **flags)
    assert any("3 files" in note and "none of them written now" in note for note in notes)
    write_video(moved / "videos" / TOP / "chunk-000" / "file-000.mp4", range(100, 124), 30)
    train, _ = opened(moved, **flags)
    assert [shown(frame) for frame in train.get_batch(np.arange(24))[TOP]] == list(range(100, 124))
    notes = notes_of(moved, episodes=(2,), **flags)
    assert any("1 file (" in note and "none of them written now" in note for note in notes)


def test_a_cache_that_does_not_fit_is_refused_and_auto_decodes_on_demand(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1000, 600, 400))
    with pytest.raises(ValueError, match=r"--dataset.cache disk needs 0\.0 MB in .* has 0\.0 MB free"):
        build(tmp_path / "c", tmp_path / "log")
    train, notes = build_with_notes(tmp_path / "c", tmp_path / "log", mode="auto")
    assert isinstance(train.cameras[TOP], Noted) and any("decoded on demand" in note for note in notes)
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"cannot write to .*file.*--dataset.cache-dir"):
        build(blocked / "c", tmp_path / "log")
    assert isinstance(build(blocked / "c", tmp_path / "log", mode="auto").cameras[TOP], Noted)


def test_a_disk_that_fills_up_during_the_build_is_a_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match="No space left on device"):
        build(tmp_path / "c", tmp_path / "log")
    assert not list((tmp_path / "c").iterdir())


def test_the_ram_cache_is_removed_by_the_last_process_that_uses_it(tmp_path, monkeypatch):
    folder = Path("/dev/shm") / f"act-frames-{os.getuid()}"
    if folder.exists():
        pytest.skip("a run on this machine uses the RAM cache")
    context = multiprocessing.get_context("spawn")
    job = context.Process(target=build, args=(None, tmp_path / "log", 0.0, "noted", "ram"))
    job.start()
    job.join(60)
    assert job.exitcode == 0 and made(tmp_path / "log") == 40 and not folder.exists()


def test_the_ram_cache_survives_the_end_of_another_run_and_drops_what_a_killed_one_left(
    tmp_path, monkeypatch
):
    """The lock of a removed file guards nothing: who waited for it must take the new one."""
    monkeypatch.setattr(frames, "RAM_DIR", tmp_path)
    at_exit = []
    monkeypatch.setattr(frames.atexit, "register", at_exit.append)
    folder = tmp_path / f"act-frames-{os.getuid()}"
    folder.mkdir()
    with ThreadPoolExecutor(1) as pool:
        with open(folder / "users", "w") as leaving:
            fcntl.flock(leaving, fcntl.LOCK_EX)
            waiting = pool.submit(frames.ram_folder, set())
            time.sleep(0.3)
            assert not waiting.done()
            shutil.rmtree(folder)
        assert waiting.result(30) == folder
    with open(folder / "users", "w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / "mine.frames").write_bytes(b"1")
    frames.ram_folder(set())  # a second user, which removes nothing
    at_exit[1]()
    assert (folder / "mine.frames").exists()
    folder.rename(tmp_path / "gone")
    at_exit[0]()  # its folder was taken away, and what lies there now is another's
    folder.mkdir()
    for name in ("old.frames", "old.building", "same.frames"):
        (folder / name).write_bytes(b"1")
    frames.ram_folder({"same.frames"})
    assert sorted(path.name for path in folder.iterdir()) == ["same.frames", "users"]
    at_exit[2]()
    assert not folder.exists()


def test_more_files_than_may_be_mapped_are_read_in_turn(tmp_path, monkeypatch):
    monkeypatch.setattr(frames, "MAX_MAPS", 3)
    files = [tmp_path / f"{e}.frames" for e in range(8)]
    for e, file in enumerate(files):
        file.write_bytes(bytes([e]) * (2 * 3 * 4))
    source = frames.CachedFrames((2, 2), 16, [(2 * e, 2 * e + 2) for e in range(8)], files)
    order = np.random.default_rng(0).integers(0, 16, 200)
    out = torch.empty((200, 3, 2, 2), dtype=torch.uint8)
    source.read_into(order, out)
    assert out[:, 0, 0, 0].tolist() == (order // 2).tolist() and len(source._maps) <= 3

    def full(*_, **__):
        raise RuntimeError("unable to mmap 24 bytes from file <f>: Cannot allocate memory (12)")

    monkeypatch.setattr(torch, "from_file", full)
    with pytest.raises(ValueError, match=r"cannot be mapped .*vm\.max_map_count") as caught:
        pickle.loads(pickle.dumps(source)).get(0)
    assert "damaged" not in str(caught.value)


def test_a_frame_cache_removed_during_a_run_is_told_as_such(tmp_path):
    train = pickle.loads(pickle.dumps(build(tmp_path / "c", tmp_path / "log")))
    shutil.rmtree(tmp_path / "c")
    with pytest.raises(
        ValueError, match=r"the frame cache was removed .* start again .--resume.*built again\.$"
    ):
        train.get_batch(np.array([3]))


# ---- where a data set is -----------------------------------------------------------------------------------
@pytest.fixture
def offline(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("place", ["lerobot", "home", "hub", "plain_hub", "root"])
def test_a_local_copy_is_found_without_the_network(place, tmp_path, monkeypatch, offline):
    snapshot = f"{'abc' * 13}a"
    folder = {
        "lerobot": "lr/me/set", "home": "hf/lerobot/me/set", "root": "here/me/set",
        "hub": f"hf/hub/datasets--me--set/snapshots/{snapshot}", "plain_hub": f"hubs/datasets--me--set/snapshots/{snapshot}",
    }[place]  # fmt: skip
    target = tmp_path / folder
    target.parent.mkdir(parents=True)
    copied(reference("env_state_v3"), target)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path / "lr"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hubs"))
    if snapshot in folder:
        (target.parent.parent / "refs").mkdir()
        (target.parent.parent / "refs" / "main").write_text(snapshot)
    root = str(tmp_path / "here") if place == "root" else None
    train, _ = open_dataset(DatasetConfig(root=root, repo_id="me/set"), 10)
    assert len(train) == 150
    monkeypatch.chdir(target.parent)
    assert len(open_dataset(DatasetConfig(root=target.name, repo_id="me/other"), 10)[0]) == 150


def test_a_set_that_is_nowhere_is_one_sentence(tmp_path, monkeypatch, offline):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"me/none is in none of .*lerobot/me/none.* the download failed|pip install"
    ):
        open_dataset(DatasetConfig(repo_id="me/none"), 10)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE forbids the download"):
        open_dataset(DatasetConfig(repo_id="me/none"), 10)
    with pytest.raises(ValueError, match=r"--dataset.root=.* holds no LeRobot dataset"):
        open_dataset(DatasetConfig(root=str(tmp_path)), 10)
    with pytest.raises(ValueError, match=r"give --dataset.root"):
        open_dataset(DatasetConfig(), 10)


# ---- broken sets -------------------------------------------------------------------------------------------
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
TABLE = "data/chunk-000/file-000.parquet"
VIDEO = f"videos/{TOP}/chunk-000/file-000.mp4"


def at(place, value):
    return lambda values: values.__setitem__(place, value)


def info(**change):
    return lambda root: edit_json(root / "meta" / "info.json", lambda content: content.update(change))


def feature(key, **change):
    return lambda root: edit_json(
        root / "meta" / "info.json", lambda content: content["features"][key].update(change)
    )


def table(path, **columns):
    return lambda root: edit_table(root / path, **columns)


def other_video(root):
    shutil.copy(root / VIDEO, root / VIDEO.replace("000.mp4", "001.mp4"))
    edit_table(
        root / EPISODES, **{f"videos/{TOP}/file_index": at(2, 1), f"videos/{TOP}/from_timestamp": at(2, 0.0)}
    )


BROKEN = {
    "length 0": (table(EPISODES, length=at(1, 0)), r"episode 1 has length 0"),
    "two lengths swapped": (table(EPISODES, length=lambda v: [v[1], v[0], v[2]]), r"episode 0 spans frames 0 to 7, but with 12"),
    "total frames": (info(total_frames=25), r"info.json: total_frames is 25, but .* 24"),
    "total episodes": (info(total_episodes=2), r"total_episodes is 2, but .* 3"),
    "episode twice": (table(EPISODES, episode_index=at(2, 1)), r"episode 2 is missing, or 1 is there twice"),
    "no such data file": (table(EPISODES, **{"data/file_index": at(1, 3)}), r"file-003.parquet is missing"),
    "rows of another episode": (table(TABLE, episode_index=at(8, 2)), r"file-000.parquet: .* episode 1 has 12 rows here, but there are 11"),
    "frame_index": (table(TABLE, frame_index=at(9, 7)), r"frame_index of episode 1 is 7 in row 9, not 2"),
    "index": (table(TABLE, index=at(9, 7)), r"index of episode 1 is 7 in row 9, not 9"),
    "wrong fps": (info(fps=60), r"timestamp of episode 0, frame \d+ .* at 60 fps"),
    "nan": (table(TABLE, action=at(8, [float("nan"), 0.0])), r"action of episode 1, frame 1 \(row 8\), joint 0 is nan"),
    "inf": (table(TABLE, **{"observation.state": at(20, [0.0, float("inf")])}), r"observation.state of episode 2, frame 1 .*joint 1 is inf"),
    "short row": (table(TABLE, **{"observation.state": at(3, [1.0])}), r"observation.state has 1 values in row 3, not the 2"),
    "empty row": (table(TABLE, **{"observation.state": at(3, None)}), r"observation.state is empty in row 3"),
    "wrong shape": (feature("action", shape=[3]), r"action has 2 values in row 0, not the 3"),
    "image shape": (feature(TOP, shape=[48, 64, 3]), r"file-000.mp4: frames are 64x64, but meta/info.json says 48x64"),
    "image channels": (feature(TOP, shape=[64, 64, 5]), r"camera observation.images.top has shape"),
    "feature gone": (lambda root: edit_json(root / "meta" / "info.json", lambda i: i["features"].pop("timestamp")), r"feature timestamp is missing"),
    "column gone": (lambda root: pq.write_table(pq.read_table(root / TABLE).drop_columns(["action"]), root / TABLE), r"has no column action"),
    "video missing": (lambda root: (root / VIDEO).unlink(), r"file-000.mp4 is missing"),
    "video too short": (lambda root: write_video(root / VIDEO, range(20), 30), r"episode 2 of camera .* wants a frame at 0\.\d+ s for its frame 4"),
    "video of 25 fps": (lambda root: write_video(root / VIDEO, range(24), 25), r"wants a frame at 0\.\d{6} s"),
    "clip of another episode": (table(EPISODES, **{f"videos/{TOP}/from_timestamp": at(2, 0.0)}), r"episodes 0 and 2 of camera .* both use its frame 0"),
    "video is text": (lambda root: (root / VIDEO).write_text("no video"), r"file-000.mp4 cannot be read"),
    "no episodes": (lambda root: shutil.rmtree(root / "meta" / "episodes"), r"episodes has no parquet file"),
    "stats are a list": (lambda root: (root / "meta" / "stats.json").write_text("[1]"), r"stats.json is no JSON object"),
    "newer version": (info(codebase_version="v4.0"), r"codebase_version is v4.0.* newer version of this program"),
    "path up": (info(data_path="../x/{chunk_index}-{file_index}.parquet"), r"leaves the dataset's directory"),
    "path absolute": (info(video_path="/etc/{video_key}{chunk_index}{file_index}"), r"leaves the dataset's directory"),
    "path with code": (info(data_path="{chunk_index.__class__.__mro__}/{nothing}"), r"info.json: the path .* cannot be filled in"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_set_is_refused_before_step_1_and_found_by_check(fault, counted, tmp_path):
    breaks, words = BROKEN[fault]
    root = copied(counted, tmp_path / "set")
    breaks(root)
    assert re.search(words, refusal(root)), refusal(root)
    problems, *_ = check_data.check_dataset(DatasetConfig(root=str(root)), 4)
    assert any(re.search(words, problem) for problem in problems), problems


def test_check_finds_several_problems_at_once_and_says_how_many(counted, tmp_path):
    root = copied(counted, tmp_path / "set")
    edit_table(root / TABLE, action=at(8, [float("nan"), 0.0]), frame_index=at(20, 9))
    edit_json(root / "meta" / "stats.json", lambda stats: stats["observation.state"].update(std=[9.0, 0.0]))
    run = [sys.executable, str(ROOT / "data.py"), "check", "--root", str(root), "--chunk-size", "8"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    for words in (
        "action of episode 1, frame 1 (row 8)",
        "frame_index of episode 2 is 9 in row 20",
        "the std of observation.state, joint 1 is 0 in the statistics and 0.702",
    ):
        assert words in done.stdout, done.stdout
    assert re.search(r"\n\d+ problems, 1 warning$", done.stdout.strip())
    assert f"{root}: 3 episodes, 24 frames at 30 fps, action [2], " in done.stdout
    done = subprocess.run([*run[:3], "--root", "nowhere"], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("problem: --root=nowhere holds no") and "1 problem, 0 w" in done.stdout


def test_check_passes_a_sound_set_and_warns_of_what_can_be_trained_on(counted, tmp_path):
    root = copied(counted, tmp_path / "set")
    cfg = DatasetConfig(root=str(root))
    problems, warnings, notes = check_data.check_dataset(cfg, 8)
    assert not problems and any(
        "2 episodes are shorter than the chunk of 8: 0, 2" in text for text in warnings
    )
    assert notes[0] == ("3 episodes, 24 frames at 30 fps, action [2], observation.state [2], 1 camera 64x64")
    assert re.fullmatch(r"\d+\.\d% of the target steps are padding at chunk 8", notes[1])
    assert any("padding at chunk 100; a smaller one" in text for text in check_data.check_dataset(cfg)[1])
    shutil.copy(root / TABLE, root / TABLE.replace("000.parquet", "007.parquet"))
    edit_table(root / TABLE, action=lambda values: [[a, 0.5] for a, _ in values])
    problems, warnings, _ = check_data.check_dataset(cfg, 8)
    assert any("file-007.parquet belongs to no episode" in text for text in warnings)
    assert any("action, joint 1 is constant" in text for text in warnings)
    assert any("of action, joint 1" in text for text in problems)  # the statistics are stale now


def test_fix_stats_writes_right_ones_beside_the_old(tmp_path):
    root = copied(reference("aloha_img_v3"), tmp_path / "set")
    right = json.loads((root / "meta" / "stats.json").read_text())
    wrong = {"mean": [[[127.0]]] * 3, "std": [[[60.0]]] * 3}
    edit_json(
        root / "meta" / "stats.json",
        lambda stats: (stats[TOP].update(wrong), stats["action"]["std"].__setitem__(2, 5.0)),
    )
    before = (root / "meta" / "stats.json").read_bytes()
    problems, *_ = check_data.check_dataset(DatasetConfig(root=str(root)), 8, fix_stats=True)
    assert any("the std of action, joint 2 is 5" in text for text in problems)
    assert any(f"camera {TOP}" in text and "127.0" in text for text in problems)
    assert (root / "meta" / "stats.json").read_bytes() == before
    os.replace(root / "meta" / "stats.fixed.json", root / "meta" / "stats.json")
    problems, *_ = check_data.check_dataset(DatasetConfig(root=str(root)), 8)
    assert not problems
    fixed = json.loads((root / "meta" / "stats.json").read_text())
    np.testing.assert_allclose(fixed["action"]["std"], right["action"]["std"], rtol=1e-5)


def damaged(content: bytes, kind: str, seed: int) -> bytes:
    draw = random.Random(seed)
    if kind == "cut":
        return content[: draw.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(3):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


@pytest.mark.parametrize(
    "name", ["meta/info.json", "meta/stats.json", "meta/tasks.parquet", EPISODES, TABLE, VIDEO]
)
@pytest.mark.parametrize("kind", ["cut", "flipped"])
def test_damaged_files_give_a_sentence_or_the_same_data(name, kind, counted, tmp_path):
    """A flipped bit may hit what nobody reads (a name, padding); then nothing at all may change."""
    root = copied(counted, tmp_path / "set")
    flags = {"cache": "disk", "chunk_size": 4}
    good, _ = opened(root, cache_dir=str(tmp_path / "good"), **flags)
    want, whole = good.get_batch(np.arange(24)), (root / name).read_bytes()
    sentences = 0
    for seed in range(8):
        (root / name).write_bytes(damaged(whole, kind, seed))
        try:
            train, _ = opened(root, cache_dir=str(tmp_path / str(seed)), **flags)
            notes = notes_of(root, cache_dir=str(tmp_path / str(seed)), **flags)
        except ValueError as error:
            assert "\n" not in str(error) and str(root) in str(error), error
            sentences += 1
            continue
        warned = [note for note in notes if note.startswith("warning") and "padding" not in note]
        batch = train.get_batch(np.arange(24))
        stats = all(
            torch.equal(good.stats[k]["mean"], train.stats[k]["mean"])
            and torch.equal(good.stats[k]["std"], train.stats[k]["std"])
            for k in good.stats
        )
        sound = same(want, batch) and stats and train.features == good.features
        # entropy-coded pictures and raw floats carry no checksum: a change there cannot be known
        assert warned or sound or (kind == "flipped" and name in (TABLE, VIDEO, "meta/stats.json")), (
            seed,
            notes,
        )
        sentences += bool(warned)
    assert sentences == 8 if kind == "cut" else sentences >= 1


def test_nothing_that_is_read_can_run_code(counted, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'boom'}",)

    for name in ("meta/info.json", "meta/stats.json", EPISODES, TABLE, VIDEO):
        root = copied(counted, tmp_path / name.replace("/", "_"))
        (root / name).write_bytes(pickle.dumps(Bomb()))
        refusal(root)
    for module in (data, datasets, frames, lerobot_data, check_data):
        source = Path(module.__file__).read_text()
        assert "pickle" not in re.sub(r"allow_pickle=False|[Pp]icklable", "", source)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("package, words", [("pyarrow", "pip install pyarrow"), ("av", "pip install av")])
def test_a_missing_package_names_its_pip_line(package, words, counted, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")  # no scan is remembered
    with pytest.raises(ImportError, match=words):
        opened(counted)


def test_the_file_works_alone(tmp_path):
    shutil.copy(data.__file__, tmp_path / "data.py")
    code = "import data, sys; assert not {'pyarrow', 'av', 'tyro'} & set(sys.modules); print(data.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
    )
    assert done.stdout.strip() == str(tmp_path / "data.py"), done.stderr


def test_the_file_alone_opens_columns_and_makes_batches(tmp_path):
    """As its docstring shows it, with a camera of one's own beside."""
    shutil.copy(data.__file__, tmp_path / "data.py")
    example = (
        data.__doc__.split("\n\n")[1]
        .replace("...", "seen.append(batch)")
        .replace('"cpu"): ', '"cpu"):\n        ')
    )
    script = f"""
import numpy as np
import torch
from data import *

class Gray:
    shape, thread_safe = (4, 6), True
    def __len__(self): return 500
    def read_into(self, rows, out): out.copy_(torch.from_numpy(rows % 256)[:, None, None, None].expand(out.shape))
    def in_order(self, start, stop): return (np.full((4, 6, 3), row % 256, np.uint8) for row in range(start, stop))
    def span_key(self, start, stop): return f"gray {{start}} {{stop}}"

if __name__ == "__main__":
    seen = []
{example.replace("cameras={}", "cameras={'observation.images.gray': Gray()}")}
    assert len(seen) == 9 and (len(train), len(val)) == (400, 100) and not notes
    for batch in seen:
        assert batch["action"].shape == (8, 100, 1) and batch["observation.images.gray"].shape == (8, 3, 4, 6)
        assert (batch["observation.images.gray"][:, 0, 0, 0] == batch["index"] % 256).all()
    assert train[7]["index"] == 7 and train.stats["observation.images.gray"]["mean"].shape == (3, 1, 1)
"""
    (tmp_path / "job.py").write_text(script)
    env = {"PATH": os.environ["PATH"]}
    command = [sys.executable, "job.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr


def test_the_cache_command_builds_what_a_run_then_finds(counted, tmp_path):
    run = [
        sys.executable,
        str(ROOT / "data.py"),
        "cache",
        "--root",
        str(counted),
        "--cache-dir",
        str(tmp_path),
        "--image-size",
        "16",
        "24",
    ]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    notes = notes_of(counted, cache="disk", cache_dir=str(tmp_path), image_size=(16, 24))
    assert any("3 files" in note and "none of them written now" in note for note in notes)
    done = subprocess.run([*run[:4], str(tmp_path / "nowhere")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "holds no LeRobot dataset" in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].startswith("--root=")  # the flag's name here


@pytest.mark.gpu
def test_batches_copied_ahead_on_a_side_stream_are_the_loaders(counted):
    train, _ = opened(counted, chunk_size=4)
    batches = TrainBatches(train, 0, 3, 0, 1, 1, 20)
    got = []
    for batch in to_device(make_loader(batches, 2, pin_memory=True), "cuda"):
        assert batch["action"].device.type == "cuda"
        torch.cuda._sleep(1_000_000)
        got.append({key: value.clone() for key, value in batch.items()})
    assert len(got) == 20 and all(
        same({k: v.cpu() for k, v in g.items()}, batches[s]) for s, g in enumerate(got)
    )


def test_replace_keeps_the_configuration_hashable_and_json_ready():
    cfg = replace(DatasetConfig(), episodes=(1, 2))
    assert json.loads(json.dumps(vars(cfg)))["episodes"] == [1, 2] and hash(cfg) == hash(replace(cfg))
