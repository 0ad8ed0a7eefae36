"""200 corrupted inputs against one rule: the command that reads one ends with one sentence that names the file.

A dataset goes through what a run reads at its start (`datasets.open_dataset`, frames cached) and through
`python data.py check`; a run directory through `python train.py --resume`. Each case has a deadline, and the
sentence is the last line on stderr, without a traceback. What only costs a convenience (names of tasks, rows of
metrics.jsonl), is contradicted by the data (stored statistics that can be read) or may be meant (a configuration that was edited
by hand: its checksum tells) is a warning that names the file; the table says which.

Where a file has no checksum, a changed number is a number, and nobody can know it: entropy-coded pictures, raw
floats of a parquet page, digits in info.json and metrics.jsonl. Such places are not in the table by construction.
What is: structure, types, names, pages with a checksum (which LeRobot's files may have and are verified), floats
that become infinite or leave the range in the statistics, and whatever a checkpoint's own record covers.
"""

import contextlib
import faulthandler
import functools
import json
import logging
import shutil
import signal
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks
from test_data import EPISODES, TABLE, TOP, VIDEO, at, edit_json, edit_table, write_set
from test_train import ENV

import data
import train
from extras import check_data, datasets, frames, lerobot_data

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
pytest.importorskip("av")

DEADLINE_S = 20
INFO, STATS, TASKS = "meta/info.json", "meta/stats.json", "meta/tasks.parquet"
MODEL, STATE = "checkpoints/000002/pretrained_model", "checkpoints/000002/training_state"


@dataclass(frozen=True)
class Case:
    tree: str
    """Which sound tree is damaged: "video", "images", "v21", "safetensors", "dcp" or "adapter"."""
    file: str
    damage: Callable[[Path], object]
    warned: bool = False
    """The run goes on, with a warning that names the file."""


# ---- damages: each takes the file ---------------------------------------------------------------------------
def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def replaced_by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


COARSE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": rewritten(lambda content: b""),
    "first half": rewritten(lambda content: content[: len(content) // 2]),
    "all but 9 bytes": rewritten(lambda content: content[:-9]),
    "zeros": rewritten(lambda content: bytes(len(content))),
    "noise": rewritten(lambda content: np.random.default_rng(0).bytes(len(content))),
    "text": rewritten(lambda content: b"<html>404 Not Found</html>"),
    "a directory": replaced_by_a_directory,
    "a dangling link": link_to_nothing,
}


def flipped(place: float, bit: int = 0) -> Callable[[Path], object]:
    """One bit, at this share of the file."""

    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[int(place * (len(content) - 1))] ^= 1 << bit
        return bytes(changed)

    return rewritten(flip)


def zeroed(name: bytes, skip: int, count: int) -> Callable[[Path], object]:
    """Bytes behind the box of this name in an mp4."""

    def zero(content: bytes) -> bytes:
        start = content.index(name) + 4 + skip
        return content[:start] + bytes(count) + content[start + count :]

    return rewritten(zero)


def renamed(old: bytes, new: bytes) -> Callable[[Path], object]:
    def rename(content: bytes) -> bytes:
        assert old in content and len(old) == len(new)
        return content.replace(old, new)

    return rewritten(rename)


def page_flipped(column: str) -> Callable[[Path], object]:
    """A bit in the body of a column's data page, which has a checksum."""

    def flip(path: Path) -> None:
        metadata = pq.ParquetFile(path).metadata.row_group(0)
        chunks = [metadata.column(i) for i in range(metadata.num_columns)]
        chunk = next(c for c in chunks if c.path_in_schema.startswith(column))
        end = chunk.data_page_offset + chunk.total_compressed_size
        end -= chunk.data_page_offset - (chunk.dictionary_page_offset or chunk.data_page_offset)
        content = bytearray(path.read_bytes())
        content[end - 1] ^= 4
        path.write_bytes(content)

    return flip


def json_with(*keys, value) -> Callable[[Path], object]:
    """`value` at this place of a JSON object."""

    def change(content: dict) -> None:
        for key in keys[:-1]:
            content = content[key]
        content[keys[-1]] = value

    return lambda path: edit_json(path, change)


def json_without(*keys) -> Callable[[Path], object]:
    def change(content: dict) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return lambda path: edit_json(path, change)


def column(name: str, change) -> Callable[[Path], object]:
    return lambda path: edit_table(path, **{name: change})


def column_as(name: str, values: Callable[[list], list]) -> Callable[[Path], object]:
    """A column with other values, whose type is what they are."""

    def change(path: Path) -> None:
        table = pq.read_table(path)
        place = table.schema.get_field_index(name)
        new = pa.array(values(table.column(name).to_pylist()))
        pq.write_table(table.set_column(place, name, new), path)

    return change


def without_column(name: str) -> Callable[[Path], object]:
    return lambda path: pq.write_table(pq.read_table(path).drop_columns([name]), path)


def image(change: Callable[[bytes], bytes | None], row: int = 3) -> Callable[[Path], object]:
    def edit(values: list) -> None:
        values[row] = values[row] | {"bytes": change(values[row]["bytes"])}

    return lambda path: edit_table(path, **{TOP: edit})


def tensor_renamed(path: Path) -> None:
    """The first tensor of a safetensors file under another name of the same length."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    name = next(key for key in header if key != "__metadata__")
    path.write_bytes(content.replace(json.dumps(name).encode(), json.dumps(name[:-1] + "?").encode()))


def header_of_a_gigabyte(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 30) + path.read_bytes()[8:])


# ---- the table ----------------------------------------------------------------------------------------------
FEATURE = ("features", "action")
INFO_CASES = {
    "fps is a word": json_with("fps", value="fast"),
    "fps is null": json_with("fps", value=None),
    "fps is a list": json_with("fps", value=[30]),
    "fps is 0": json_with("fps", value=0),
    "fps is negative": json_with("fps", value=-30),
    "fps is doubled": json_with("fps", value=60),
    "fps is gone": json_without("fps"),
    "version is a number": json_with("codebase_version", value=3),
    "version is gone": json_without("codebase_version"),
    "features is a list": json_with("features", value=["action"]),
    "features is empty": json_with("features", value={}),
    "features is gone": json_without("features"),
    "a feature is a word": json_with(*FEATURE, value="float32"),
    "shape is a word": json_with(*FEATURE, "shape", value="two"),
    "shape is null": json_with(*FEATURE, "shape", value=None),
    "shape is empty": json_with(*FEATURE, "shape", value=[]),
    "shape is negative": json_with(*FEATURE, "shape", value=[-2]),
    "shape is huge": json_with(*FEATURE, "shape", value=[10**12]),
    "dtype is a number": json_with(*FEATURE, "dtype", value=32),
    "dtype is gone": json_without(*FEATURE, "dtype"),
    "camera shape has two numbers": json_with("features", TOP, "shape", value=[64]),
    "camera size is another": json_with("features", TOP, "shape", value=[64, 32, 3]),
    "total_frames is a word": json_with("total_frames", value="many"),
    "total_episodes is another": json_with("total_episodes", value=4),
    "data_path is a number": json_with("data_path", value=7),
    "data_path is gone": json_without("data_path"),
    "data_path leads out": json_with("data_path", value="../{chunk_index}/{file_index}"),
    "video_path is null": json_with("video_path", value=None),
    "video_path is gone": json_without("video_path"),
    "video_path asks for what is not": json_with("video_path", value="{nothing}.mp4"),
}
STATS_CASES = {
    "statistics are a list": json_with("action", value=[1, 2]),
    "mean is a word": json_with("action", "mean", value="high"),
    "mean is null": json_with("action", "mean", value=[None, None]),
    "mean is infinite": json_with("action", "mean", value=[float("inf"), 0.0]),
    "mean is NaN": json_with("action", "mean", value=[float("nan"), 0.0]),
    "mean has another shape": json_with("action", "mean", value=[1.0]),
    "mean is ragged": json_with("action", "mean", value=[[1.0], 2.0]),
    "mean is gone": json_without("action", "mean"),
    "std is negative": json_with("action", "std", value=[-1.0, -1.0]),
    "std is of other data": json_with("action", "std", value=[500.0, 500.0]),
}
UNREADABLE = ("statistics are a list", "mean is a word", "mean is ragged")
EPISODES_CASES = {
    "length is null": column("length", at(1, None)),
    "length is 0": column("length", at(1, 0)),
    "length is negative": column("length", at(1, -12)),
    "length is a word": column_as("length", lambda v: [str(n) for n in v]),
    "length is a fraction": column_as("length", lambda v: [n + 0.5 for n in v]),
    "length is gone": without_column("length"),
    "first frame is null": column("dataset_from_index", at(1, None)),
    "first frame is another": column("dataset_from_index", at(1, 8)),
    "last frame is gone": without_column("dataset_to_index"),
    "an episode number twice": column("episode_index", at(1, 0)),
    "an episode number is null": column("episode_index", at(1, None)),
    "file number is null": column("data/file_index", at(1, None)),
    "file number is gone": without_column("data/file_index"),
    "video number is gone": without_column(f"videos/{TOP}/file_index"),
    "video time is NaN": column(f"videos/{TOP}/from_timestamp", at(1, float("nan"))),
    "video time is null": column(f"videos/{TOP}/from_timestamp", at(1, None)),
    "video time is a word": column_as(f"videos/{TOP}/from_timestamp", lambda v: ["soon"] * len(v)),
    "no row at all": lambda path: pq.write_table(pq.read_table(path).slice(0, 0), path),
}
TABLE_CASES = {
    "action is a word": column_as("action", lambda v: ["left"] * len(v)),
    "action is a number": column_as("action", lambda v: [a[0] for a in v]),
    "action is wider": column_as("action", lambda v: [[*a, 0.0] for a in v]),
    "action is null": column("action", at(5, None)),
    "an action holds null": column("action", at(5, [None, 1.0])),
    "action is NaN": column("action", at(5, [float("nan"), 0.0])),
    "action is infinite": column("action", at(5, [float("-inf"), 0.0])),
    "action is gone": without_column("action"),
    "state is ragged": column("observation.state", at(5, [1.0])),
    "state is words": column_as("observation.state", lambda v: [["up", "down"] for _ in v]),
    "timestamp is NaN": column("timestamp", at(5, float("nan"))),
    "timestamp is null": column("timestamp", at(5, None)),
    "timestamp is a word": column_as("timestamp", lambda v: ["noon"] * len(v)),
    "frame number is another": column("frame_index", at(5, 6)),
    "episode number is huge": column("episode_index", at(5, 2**40)),
    "index is gone": without_column("index"),
    "rows are missing": lambda path: pq.write_table(pq.read_table(path).slice(0, 20), path),
    "no row at all": lambda path: pq.write_table(pq.read_table(path).slice(0, 0), path),
    **{
        f"a bit in a page of {name}": page_flipped(name)
        for name in ("action", "observation.state", "timestamp", "frame_index", "episode_index", "index")
    },
}
VIDEO_CASES = {
    "no track": renamed(b"trak", b"tram"),
    "no sample table": renamed(b"stbl", b"stbx"),
    "no sample sizes": renamed(b"stsz", b"stsx"),
    "no offsets": renamed(b"stco", b"stcx"),
    "no times": renamed(b"stts", b"sttx"),
    "unknown codec": renamed(b"avc1", b"avx9"),
    "no codec parameters": zeroed(b"avcC", 0, 30),
    "sample sizes are 0": zeroed(b"stsz", 8, 96),
    "times are 0": zeroed(b"stts", 4, 12),
    "a hole in the pictures": zeroed(b"mdat", 4000, 2000),
}
V21_CASES = {
    "episodes.jsonl is cut": ("meta/episodes.jsonl", rewritten(lambda c: c[:-9])),
    "episodes.jsonl is missing": ("meta/episodes.jsonl", Path.unlink),
    "a line is no object": ("meta/episodes.jsonl", rewritten(lambda c: b"[1, 2]\n" + c)),
    "a length is a word": ("meta/episodes.jsonl", rewritten(lambda c: c.replace(b"12", b'"x"'))),
    "a table is cut": ("data/chunk-000/episode_000001.parquet", COARSE["first half"]),
    "a table is missing": ("data/chunk-000/episode_000001.parquet", Path.unlink),
}
IMAGE_CASES = {
    "an image is cut": image(lambda content: content[:-40]),
    "an image is empty": image(lambda content: b""),
    "an image is null": image(lambda content: None),
    "an image is text": image(lambda content: b"no picture"),
    "an image has a flipped bit": image(
        lambda content: content[:60] + bytes([content[60] ^ 8]) + content[61:]
    ),
}
WEIGHTS = (f"{MODEL}/model.safetensors", f"{STATE}/optimizer_state.safetensors")
CHECKPOINT_FILES = {
    **dict.fromkeys(WEIGHTS, False),
    f"{MODEL}/policy_preprocessor_step_3_normalizer_processor.safetensors": False,
    f"{MODEL}/policy_preprocessor.json": False,
    f"{MODEL}/config.json": False,
    f"{MODEL}/train_config.json": False,
    f"{STATE}/run_config.json": False,
    f"{STATE}/training_step.json": False,
    f"{STATE}/optimizer_param_groups.json": False,
    f"{STATE}/optimizer_names.json": False,
    f"{STATE}/rng_state.safetensors": False,
    f"{STATE}/checksums.json": False,
}
SHARDS = [
    f"{folder}/{file}"
    for folder in (f"{MODEL}/pytorch_model_fsdp_0", f"{STATE}/optimizer_0")
    for file in ("__0_0.distcp", "__1_0.distcp", ".metadata")
]
METRICS_CASES = {
    "a line without its end": rewritten(lambda content: content[:-20]),
    "a line of another kind": rewritten(lambda content: b"[1, 2]\n" + content),
    "no text": rewritten(lambda content: content[:30] + b"\xff\xfe" + content[32:]),
    "a step that is a word": rewritten(lambda content: content.replace(b'"step": 1', b'"step": "one"')),
}


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}

    def add(name: str, case: Case) -> None:
        name = f"{case.tree}/{case.file}: {name}"
        assert name not in cases
        cases[name] = case

    for file in (INFO, EPISODES, TABLE, VIDEO, TASKS, STATS):
        for name, damage in COARSE.items():
            if file == VIDEO and name == "all but 9 bytes":
                continue  # the name of the encoder
            gone = name in ("missing", "a dangling link")
            add(name, Case("video", file, damage, warned=file == TASKS or (file == STATS and gone)))
    tables = {INFO: INFO_CASES, STATS: STATS_CASES, EPISODES: EPISODES_CASES, TABLE: TABLE_CASES}
    for file, table in (tables | {VIDEO: VIDEO_CASES}).items():
        for name, damage in table.items():
            add(name, Case("video", file, damage, warned=file == STATS and name not in UNREADABLE))
    for name, (file, damage) in V21_CASES.items():
        add(name, Case("v21", file, damage))
    for name, damage in IMAGE_CASES.items():
        add(name, Case("images", TABLE, damage))
    for file in CHECKPOINT_FILES:
        for name in ("missing", "first half", "zeros"):
            if not (name == "missing" and file.endswith("checksums.json")):  # LeRobot's checkpoints have none
                add(name, Case("safetensors", file, COARSE[name]))
        edited = file.endswith("config.json")  # people edit these: a changed one is mentioned
        if not file.endswith(("processor.json", "checksums.json")):
            add(
                "a bit",
                Case(
                    "safetensors",
                    file,
                    renamed(b'"dropout": 0.1', b'"dropout": 0.2') if edited else flipped(0.9),
                    edited,
                ),
            )
    for file in WEIGHTS:
        add("a tensor's name", Case("safetensors", file, tensor_renamed))
        add("a header of a gigabyte", Case("safetensors", file, header_of_a_gigabyte))
    for file in SHARDS:
        for name in ("missing", "empty", "first half", "noise"):
            add(name, Case("dcp", file, COARSE[name]))
        add("a bit", Case("dcp", file, flipped(0.5)))
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        for name in ("missing", "first half", "text"):
            add(name, Case("adapter", f"{MODEL}/{file}", COARSE[name]))
    for name, damage in METRICS_CASES.items():
        add(name, Case("safetensors", "metrics.jsonl", damage, warned=True))
    return cases


CASES = all_cases()


# ---- sound trees, and what reads them -----------------------------------------------------------------------
@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Callable[[str], Path]:
    """A sound tree by name, made when it is first asked for."""
    root = tmp_path_factory.mktemp("sound")
    make = {"video": make_video, "images": make_images, "v21": make_v21}

    def tree(name: str) -> Path:
        (make.get(name) or functools.partial(make_run, name))(root / name)
        return root / name

    return functools.cache(tree)


def make_video(root: Path) -> None:
    """24 frames in 3 episodes; pages of the tables have checksums."""
    write_set(root, [7, 12, 5], options={"g": "4"})
    pq.write_table(pq.read_table(root / TABLE), root / TABLE, write_page_checksum=True, use_dictionary=False)


def make_images(root: Path) -> None:
    """The same with the pictures inside the table, as PNG."""
    from torchvision.io import encode_png

    cfg = data.DatasetConfig(root=str(make(root, make_video)), cache="off")
    train_set, *_ = datasets.open_dataset(cfg, 4)
    frames = train_set.get_batch(np.arange(24))[TOP]
    images = [{"bytes": encode_png(frame).numpy().tobytes(), "path": None} for frame in frames]
    pq.write_table(pq.read_table(root / TABLE).append_column(TOP, pa.array(images)), root / TABLE)
    edit_json(root / INFO, lambda content: content["features"][TOP].update(dtype="image"))
    shutil.rmtree(root / "videos")


def make(root: Path, maker: Callable[[Path], object]) -> Path:
    maker(root)
    return root


def make_v21(root: Path) -> None:
    """The same as v2.1 without pictures: a table for each episode, metadata in lines of JSON."""
    write_set(root, [7, 12, 5], options={"g": "4"})
    whole = pq.read_table(root / TABLE)
    for episode, (start, length) in enumerate([(0, 7), (7, 12), (19, 5)]):
        pq.write_table(whole.slice(start, length), root / f"data/chunk-000/episode_{episode:06d}.parquet")
    lines = [{"episode_index": e, "length": n, "tasks": ["count"]} for e, n in enumerate([7, 12, 5])]
    (root / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (root / "meta/tasks.jsonl").write_text('{"task_index": 0, "task": "count"}\n')

    def older(content: dict) -> None:
        content |= {
            "codebase_version": "v2.1",
            "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        }
        del content["features"][TOP]

    edit_json(root / INFO, older)
    shutil.rmtree(root / "videos")
    shutil.rmtree(root / "meta/episodes")
    (root / TABLE).unlink()


def make_run(form: str, root: Path) -> None:
    """A run of two steps: weights in one file, in the shards of two ranks, or as an adapter."""
    flags = [*ENV, "--output-dir", str(root), "--steps", "2"]
    if form == "dcp":
        flags += ["--parallelism.dp-shard", "2", "--checkpoint-format", "dcp"]
        assert run_ranks(2, train_on_rank, flags, init_group=False) == [0, 0]
    elif form == "adapter":
        base = root.with_name("base")
        assert train.main([*ENV, "--output-dir", str(base), "--steps", "1"]) == 0
        adapt = [
            "--peft.method-type",
            "LORA",
            "--peft.r",
            "2",
            "--policy.path",
            str(base / "checkpoints/last"),
        ]
        assert train.main([*flags, *adapt]) == 0
    else:
        assert train.main(flags) == 0


def train_on_rank(rank: int, world_size: int, flags: list[str]) -> int:
    return train.main(flags)


class Hang(BaseException):
    """The deadline of a case; no `except Exception` swallows it."""


@contextlib.contextmanager
def deadline():
    """Python code is stopped at the deadline; a library that hangs in C ends the whole test run."""

    def stop(*_):
        raise Hang(f"nothing came of it in {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    assert sys.__stderr__ is not None
    faulthandler.dump_traceback_later(3 * DEADLINE_S, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def started(root: Path, cache: Path) -> tuple[str | None, list[str]]:
    """(the sentence that refuses a data set or None, its warnings), at the start of a run."""
    cfg = data.DatasetConfig(root=str(root), cache="disk", cache_dir=str(cache))
    try:
        *_, notes = datasets.open_dataset(cfg, 4)
    except data.UserError as error:
        return str(error), []
    except ValueError as error:
        assert type(error).__name__ in ("UserError", "DatasetError"), repr(error)
        return str(error), []
    return None, [note.text for note in notes if note.level == "warning"]


def resumed(root: Path, target: Path, form: str, capsys) -> tuple[str | None, list[str]]:
    """The same for `train.py --resume`, which has no step left to train."""
    aside = ["--output-dir", str(root)]
    capsys.readouterr()
    code = train.main(["--resume", str(root / "checkpoints/000002"), *aside])
    said = capsys.readouterr().err.strip().splitlines()
    assert code in (0, 1) and "Traceback" not in "".join(said), said
    return (said[-1] if said else "") if code else None, said


def names_the_file(sentence: str, file: str) -> bool:
    """By its name; or, for metadata of episodes, which is read as one table, by its folder."""
    return file.rpartition("/")[2] in sentence or (file == EPISODES and "meta/episodes" in sentence)


@pytest.mark.parametrize("name", CASES)
def test_a_corrupted_input_is_one_sentence_that_names_it(name, sound, tmp_path, capsys, caplog):
    case = CASES[name]
    root = Path(shutil.copytree(sound(case.tree), tmp_path / "tree", symlinks=True))
    case.damage(root / case.file)
    caplog.set_level(logging.WARNING)
    problems = None
    with deadline(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if (root / "meta").is_dir():
            refused, warned = started(root, tmp_path / "cache")
            problems, *_ = check_data.check_dataset(data.DatasetConfig(root=str(root)), 4)
        else:
            refused, warned = resumed(root, tmp_path, case.tree, capsys)
    warned += caplog.messages
    if case.warned:
        assert refused is None, refused
        assert any(names_the_file(text, case.file) for text in warned), warned
    else:
        assert refused is not None, "silent success"
        assert names_the_file(refused, case.file) and "\n" not in refused, refused
    if problems is not None:
        assert any(names_the_file(text, case.file) for text in problems), problems
        assert not any("\n" in text or "Traceback" in text for text in problems), problems


def test_the_table_has_200_inputs_of_every_kind_of_file():
    assert len(CASES) >= 200
    assert Counter(case.tree for case in CASES.values()).keys() == {
        "video",
        "images",
        "v21",
        "safetensors",
        "dcp",
        "adapter",
    }


BUGS = [AttributeError, TypeError, KeyError, NameError, AssertionError]
READING = {
    "paths of the metadata": ("video", lerobot_data, "inside"),
    "order of the episodes": ("v21", lerobot_data, "in_order"),
    "checked entries": ("video", lerobot_data, "entry"),
    "statistics": ("video", lerobot_data, "stats_entry"),
    "a column of a table": ("video", lerobot_data, "to_numpy"),
    "rows of an episode": ("v21", lerobot_data, "episode_rows"),
    "times of the rows": ("images", lerobot_data, "check_times"),
    "which frame of a video": ("video", lerobot_data, "match_frames"),
    "a scan that was kept": ("video", frames, "_kept_scan"),
    "a frame of a video": ("video", frames._Decoder, "_go_to"),
    "image files": ("images", lerobot_data, "image_files"),
    "an image in a cell": ("images", lerobot_data, "image_content"),
    "the check of an image": ("images", frames, "is_whole_image"),
    "the map of an image": ("images", frames, "_make_room"),
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("reading", READING)
def test_a_bug_of_ours_while_reading_is_not_blamed_on_a_file(reading, bug, sound, tmp_path, monkeypatch):
    """A researcher's slip in a copy of this code must show its traceback, not "the file is corrupt"."""
    tree, owner, name = READING[reading]
    root = sound(tree)

    def slip(*_, **__):
        raise bug("a slip of ours")

    monkeypatch.setattr(owner, name, slip)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for read in (datasets.open_dataset, check_data.check_dataset):
        with pytest.raises(bug, match="a slip of ours") as caught:
            read(data.DatasetConfig(root=str(root), cache="off"), 4)
        assert caught.type is bug


@pytest.mark.parametrize("tree", ["video", "images", "v21", "safetensors", "dcp", "adapter"])
def test_a_sound_tree_passes_without_a_word(tree, sound, tmp_path, capsys, caplog):
    root = Path(shutil.copytree(sound(tree), tmp_path / "tree", symlinks=True))
    caplog.set_level(logging.WARNING)
    if (root / "meta").is_dir():
        assert started(root, tmp_path / "cache") == (None, [])
        assert check_data.check_dataset(data.DatasetConfig(root=str(root)), 4)[0] == []
    else:
        assert resumed(root, tmp_path, tree, capsys)[0] is None
    assert not caplog.messages
