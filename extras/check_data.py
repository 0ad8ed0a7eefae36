"""`python data.py check` and `python data.py cache`: a whole LeRobot dataset examined, or decoded ahead.

    problems, warnings, notes = check_dataset(DatasetConfig(root="DIR"), chunk_size=100)

Reading is the training's (lerobot_data, datasets), which raises at the first thing that is wrong. Here it is
called episode by episode and camera by camera, and its sentences are collected: the first problem of each.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

import data
from extras import datasets, frames, lerobot_data
from extras.lerobot_data import Metadata, Rows


@dataclass
class Findings:
    """What a check has come to: sentences, and corrected statistics."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    corrected: dict[str, dict[str, list]] = field(default_factory=dict)
    """meta/stats.json as it should be."""

    def problem(self, text: str) -> None:
        if text not in self.problems:  # a video's is met in each of its episodes
            self.problems.append(text)

    @contextmanager
    def collected(self) -> Iterator[None]:
        """A refusal inside is a problem, and the check continues behind it."""
        try:
            yield
        except frames.MissingPackage:
            raise
        except (data.DatasetError, lerobot_data.UserError, frames.UserError) as error:
            self.problem(str(error))


def check_dataset(
    cfg: data.DatasetConfig, chunk_size: int = 100, fix_stats: bool = False
) -> tuple[list[str], list[str], list[str]]:
    """(problems, warnings, what was checked) of a whole dataset, every frame decoded."""
    findings = Findings()
    with findings.collected():
        datasets.check_dataset_config(cfg, chunk_size)
        meta = lerobot_data.read_metadata(lerobot_data.resolve_root(cfg.root, cfg.repo_id))
        names = lerobot_data.vector_keys(meta, cfg.action_key, cfg.state_key)
        keys = data.chosen_cameras(cfg, meta.cameras())
        for text in meta.warnings:
            findings.problem(text)
        findings.warnings += lerobot_data.state_note(meta, names)
        check_files(meta, findings)
        stats = stored_statistics(meta, findings)
        rows = check_tables(meta, names, cfg, findings)
        check_vectors(meta, rows, names, stats, cfg, findings)
        sizes = Counter(check_camera(meta, rows, key, stats, cfg, findings) for key in keys)
        describe(meta, rows, names, sizes, findings)
        check_lengths(rows, chunk_size, findings)
        if fix_stats:
            write_statistics(meta, findings)
    return findings.problems, findings.warnings, findings.notes


# ---- tables
def check_files(meta: Metadata, findings: Findings) -> None:
    needed = {episode.file for episode in meta.episodes}
    needed |= {video[0] for episode in meta.episodes for video in episode.videos.values()}
    for path in (*(meta.root / "data").rglob("*.parquet"), *(meta.root / "videos").rglob("*.mp4")):
        if path not in needed:
            findings.warnings.append(f"{path} belongs to no episode.")


def check_tables(meta: Metadata, names: dict[str, str], cfg: data.DatasetConfig, findings: Findings) -> Rows:
    """The rows of all episodes that can be read, also of those with values that cannot be trained on."""
    parts: dict[int, dict[str, np.ndarray]] = {}
    for path, episodes in lerobot_data.episodes_by_file(meta, range(len(meta.episodes))).items():
        with findings.collected():
            columns = lerobot_data.read_columns(meta, names, path)
            for e in episodes:
                with findings.collected():
                    parts[e] = lerobot_data.episode_rows(meta, e, columns)
                    for text in lerobot_data.check_rows(meta, e, parts[e], cfg.tolerance_s):
                        findings.problem(text)
    if not parts:
        raise lerobot_data.DatasetError(f"{meta.root}: no episode can be read.")
    return lerobot_data.join_rows(meta, parts, [])


def describe(
    meta: Metadata, rows: Rows, names: dict[str, str], sizes: Counter[str], findings: Findings
) -> None:
    parts = [plural(len(rows.ids), "episode"), f"{plural(rows.spans[-1][1], 'frame')} at {meta.fps:g} fps"]
    parts += [f"{key} [{rows.columns[name].shape[1]}]" for key, name in reversed(names.items())]
    parts += [f"{plural(number, 'camera')} {size}" for size, number in sizes.items() if size]
    findings.notes.append(", ".join(parts))


def check_lengths(rows: Rows, chunk_size: int, findings: Findings) -> None:
    lengths = np.array([stop - start for start, stop in rows.spans])
    if (lengths < chunk_size).any():
        which = ", ".join(str(rows.ids[i]) for i in np.flatnonzero(lengths < chunk_size)[:20])
        short = int((lengths < chunk_size).sum())
        verb = "is" if short == 1 else "are"
        text = f"{plural(short, 'episode')} {verb} shorter than the chunk of {chunk_size}: {which}."
        findings.warnings.append(text)
    valid = np.concatenate([np.minimum(np.arange(n, 0, -1), chunk_size) for n in lengths])
    padded = 1 - valid.mean() / chunk_size
    text = f"{padded:.1%} of the target steps are padding at chunk {chunk_size}"
    if padded > datasets.MUCH_PADDING:
        findings.warnings.append(f"{text}; a smaller one wastes less.")
    else:
        findings.notes.append(text)


# ---- statistics
def stored_statistics(meta: Metadata, findings: Findings) -> data.Stats:
    stats: data.Stats = {}
    with findings.collected():
        stats, warnings = lerobot_data.read_stats(meta)
        for text in warnings:
            findings.problem(text)
    findings.corrected = {key: as_lists(entry) for key, entry in stats.items()}
    return stats


def check_vectors(
    meta: Metadata,
    rows: Rows,
    names: dict[str, str],
    stats: data.Stats,
    cfg: data.DatasetConfig,
    findings: Findings,
) -> None:
    """The stored statistics of state and action, of the whole and per episode, against the rows."""
    for key, name in names.items():
        measured = data.measure(rows.columns[name])
        wrong, usable = datasets.contradictions(name, stats.get(key), measured)
        if stats and key not in stats:
            wrong = [f"meta/stats.json has no statistics of {key}."]
        if wrong or not usable:
            findings.corrected[key] = as_lists(measured)
        with findings.collected():
            per_episode = lerobot_data.episode_stats(meta, key)
            for e, span in zip(rows.ids, rows.spans):
                of_episode = data.measure(rows.columns[name][slice(*span)])
                where = "the metadata of episodes"
                off, _ = datasets.contradictions(name, per_episode[e] or None, of_episode, where)
                wrong += [f"episode {e}: {text}" for text in off[:1]]
        for text in wrong:
            findings.problem(f"{meta.root}: {text}")
        for j in np.flatnonzero(measured["std"] < cfg.min_std):
            text = f"{key}, joint {j} is constant or nearly so (std {measured['std'][j]:.2g})."
            findings.warnings.append(text)


def write_statistics(meta: Metadata, findings: Findings) -> None:
    target = meta.root / "meta" / "stats.fixed.json"
    try:
        target.write_text(json.dumps(findings.corrected, indent=4))
    except OSError as error:
        raise data.DatasetError(f"{target} cannot be written ({error.strerror}).") from error
    text = f"the statistics, corrected where they were wrong, are in {target}; move it over stats.json"
    findings.notes.append(text)


def as_lists(entry: dict[str, np.ndarray]) -> dict[str, list]:
    return {name: value.tolist() for name, value in entry.items()}


# ---- cameras
def check_camera(
    meta: Metadata,
    rows: Rows,
    key: str,
    stats: data.Stats,
    cfg: data.DatasetConfig,
    findings: Findings,
) -> str:
    """Match and decode every frame of a camera. Returns its size, "" if it cannot be opened."""
    with findings.collected():
        camera = datasets.new_camera(meta, rows, key, cfg)
        for part in camera.parts:
            with findings.collected():
                for text in camera.add(*part):
                    findings.problem(text)
        source = camera.source()
        if camera.gray:
            findings.warnings.append(datasets.gray_warning(key))
        decode_all(source, rows, key, findings)
        with findings.collected():
            check_camera_statistics(meta, source, key, stats, findings)
        return "x".join(map(str, source.shape))
    return ""


def decode_all(source: Any, rows: Rows, key: str, findings: Findings) -> None:
    progress = frames.ProgressBar(f"decoding {key}", len(source))
    for span in rows.spans:
        if source.file_of_row[span[0]] >= 0:
            with findings.collected():
                for _ in source.in_order(*span):
                    progress.add(1)
    progress.close()


def check_camera_statistics(
    meta: Metadata, source: Any, key: str, stats: data.Stats, findings: Findings
) -> None:
    known_rows = np.flatnonzero(source.file_of_row >= 0)
    if not len(known_rows):
        return
    measured = datasets.measure_frames(source, known_rows)
    stored = stats.get(key, {})
    if stats and not {"mean", "std"} <= set(stored):
        raise data.DatasetError(f"{meta.root}: meta/stats.json has no mean and std of camera {key}.")
    if not stored:
        return
    pairs = {name: (np.resize(stored[name], (3, 1, 1)), measured[name]) for name in ("mean", "std")}
    far = np.abs(pairs["mean"][0] - pairs["mean"][1]).max() > 0.1
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.nan_to_num(np.abs(np.log2(pairs["std"][0] / pairs["std"][1])), nan=np.inf)
    if far or factor.max() > 1:
        findings.corrected[key] = as_lists(measured)
        text = "; ".join(
            f"{name} {there.reshape(-1).round(4).tolist()} in the statistics and "
            f"{here.reshape(-1).round(4).tolist()} in the frames"
            for name, (there, here) in pairs.items()
        )
        findings.problem(f"{meta.root}: camera {key} has {text}.")


# ---- the commands
def plural(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def own_flags(text: str) -> str:
    """The text for these commands, whose flags are train.py's without their prefix."""
    return re.sub(r"--(dataset|policy)\.(?=[a-z])", "--", text)


def check(cfg: data.DatasetConfig, chunk_size: int = 100, fix_stats: bool = False) -> int:
    """Check a whole dataset, every frame decoded: name its problems, and exit with 1 if there is one.

    Args:
        cfg: Where the dataset is, and how it would be trained on.
        chunk_size: Steps of an action chunk, for the share of padding.
        fix_stats: Write meta/stats.fixed.json, with what was wrong computed from the data.
    """
    problems, warnings, notes = check_dataset(cfg, chunk_size, fix_stats)
    lines = [f"problem: {text}" for text in problems] + [f"warning: {text}" for text in warnings]
    lines += [f"{cfg.root or cfg.repo_id}: {'; '.join(notes) or 'not all of it could be read'}"]
    print(*map(own_flags, lines), sep="\n")
    print(f"{plural(len(problems), 'problem')}, {plural(len(warnings), 'warning')}")
    return 1 if problems else 0


def cache(cfg: data.DatasetConfig) -> int:
    """Decode a dataset's frames into the frame cache, so that the next run starts at once.

    Args:
        cfg: Where the dataset is, which part of it, and where the cache goes.
    """
    mode: Literal["disk"] = "disk"
    _, _, notes = datasets.open_dataset(replace(cfg, cache=mode), chunk_size=1)
    for note in notes:
        print(own_flags(f"warning: {note.text}" if note.level == "warning" else note.text))
    return 0


def main() -> int:
    import tyro

    commands = {"check": check, "cache": cache}
    try:
        return tyro.extras.subcommand_cli_from_dict(commands, config=(tyro.conf.OmitArgPrefixes,))
    except (data.UserError, lerobot_data.UserError, frames.UserError) as error:
        print(own_flags(str(error)), file=sys.stderr)
        return 1
