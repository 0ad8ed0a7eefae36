"""report.html of a run: curves, every evaluation so far, pictures of the last; and the pictures themselves.

    write_report(run_dir, title)                      # after each evaluation, or whenever you like
    write_contact_sheet(path, frames)                 # rollout.png
    path.write_text(chunk_svg(predicted, true))       # chunk.svg

It reads RUN/metrics.jsonl and the folders of evaluations: RUN/eval/*, or RUN itself where the command
evaluate.py wrote one. In such a folder:

    episodes.json  "config", "rows" (one object per episode), success rate and interval; see evaluate.py
    rollout.png    frames of the first rollout          chunk.svg    a predicted chunk beside the true one
    spread.txt     how much predictions vary over observations

The page needs no other file and no network. This file imports nothing of the project.
"""

import base64
import html
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

CSS = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 980px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em } img, svg { max-width: 100%; height: auto }
table { border-collapse: collapse }
td, th { padding: .25em .9em .25em 0; text-align: left; border-bottom: 1px solid #ddd }
pre { overflow-x: auto; font-size: 13px; line-height: 1.35 }
.warning { background: #fff2cc; padding: .6em 1em }
"""
BLUE, ORANGE, GREEN = "#2864b0", "#c8641e", "#3c8c46"
SVG_NAMESPACE = "http://www.w3.org/2000/svg"  # a name that a stand-alone file must bear, never fetched


def write_report(run_dir: Path, title: str) -> Path:
    """Write curves.svg (if there is anything to draw) and report.html. Returns the page's path."""
    files = [run_dir / "episodes.json", *sorted(run_dir.glob("eval/*/episodes.json"))]
    evaluations = [(path.parent, json.loads(path.read_text())) for path in files if path.is_file()]
    rolled_out = [(folder, content) for folder, content in evaluations if content["rows"]]
    curves = curves_svg(read_metrics(run_dir / "metrics.jsonl"), [content for _, content in rolled_out])
    body = [f"<h1>{html.escape(title)}</h1>"]
    if curves:
        (run_dir / "curves.svg").write_text(curves)
        body += ["<h2>Curves</h2>", _inline(curves)]
    if rolled_out:
        body += ["<h2>Rollouts</h2>", _evaluation_table(run_dir, rolled_out)]
    if evaluations:
        body += _last_evaluation(run_dir, *evaluations[-1])
    path = run_dir / "report.html"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    path.write_text(f"{head}<style>{CSS}</style><body>{''.join(body)}</body></html>\n")
    return path


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl in order of step; of a step that was run twice (a resume), the later one."""
    merged: dict[int, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed while it wrote
        merged.setdefault(row["step"], {}).update(row)
    return [merged[step] for step in sorted(merged)]


def write_contact_sheet(path: Path, frames: Sequence[np.ndarray], columns: int = 4, rows: int = 3) -> None:
    """A PNG of frames (H, W, 3) at even distances in time, left to right and top to bottom."""
    from torchvision.io import write_png

    chosen = [frames[round(i)] for i in np.linspace(0, len(frames) - 1, columns * rows)]
    height, width = chosen[0].shape[:2]
    gap = 4
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, 3), 255, np.uint8)
    for number, frame in enumerate(chosen):
        top, left = (number // columns) * (height + gap), (number % columns) * (width + gap)
        sheet[top : top + height, left : left + width] = frame
    write_png(torch.from_numpy(sheet).permute(2, 0, 1).contiguous(), str(path))


# ------------------------------------------------------------------------------------------ parts of the page


def _evaluation_table(run_dir: Path, evaluations: list[tuple[Path, dict]]) -> str:
    """One row per evaluation; a column that is empty in all of them is left out."""
    rows = []
    for folder, content in evaluations:
        links = [
            f'<a href="{(folder / name).relative_to(run_dir)}">{name}</a>'
            for name in ("episodes.json", "rollout.png", "chunk.svg")
            if (folder / name).is_file()
        ]
        held = content.get("held_at_end_rate")
        row = {"step": content.get("step", ""), "environment": html.escape(str(content["config"]["env"]))}
        successes = f"{content['successes']} of {content['episodes']} = {content['success_rate']:.0%}"
        interval = f"{content['success_low']:.0%} to {content['success_high']:.0%}"
        row |= {"success": successes, "95 % interval": interval}
        row |= {"held at end": "" if held is None else f"{held:.0%}"}
        row |= {"mean length": f"{content['episode_steps']:.0f}", "files": " ".join(links)}
        rows.append(row)
    heads = [head for head in rows[0] if any(row[head] != "" for row in rows)]
    lines = [f"<tr>{''.join(f'<th>{head}' for head in heads)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{row[head]}' for head in heads)}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _last_evaluation(run_dir: Path, folder: Path, content: dict[str, Any]) -> list[str]:
    """Its warning, its first rollout, links to its videos, a predicted chunk, and the spread."""
    pieces = []
    if content.get("warning"):
        pieces.append(f'<p class="warning">Warning: {html.escape(content["warning"])}</p>')
    sheet, chunk, spread = (folder / name for name in ("rollout.png", "chunk.svg", "spread.txt"))
    if sheet.is_file():
        first = content["rows"][0]
        encoded = base64.b64encode(sheet.read_bytes()).decode()
        pieces += [
            "<h2>The last evaluation's first rollout</h2>",
            f"<p>Seed {first['seed']}, {_outcome(first)} after {first['steps']} steps.</p>",
            f'<img alt="frames of a rollout, in order of time" src="data:image/png;base64,{encoded}">',
        ]
    links = []
    for row in content["rows"]:
        if row.get("video"):
            address = html.escape(os.path.relpath(row["video"], run_dir))
            links.append(f'<a href="{address}">seed {row["seed"]}, {_outcome(row)}</a>')
    if links:
        pieces.append(f"<p>Videos: {'; '.join(links)}.</p>")
    if chunk.is_file():
        pieces += [
            "<h2>A predicted chunk</h2>",
            "<p>For one frame of a demonstration, beside what the demonstrator did (true). One panel per "
            "joint, over control steps, in the dataset's units.</p>",
            _inline(chunk.read_text()),
        ]
    if spread.is_file():
        pieces += [
            "<h2>How much predictions vary over observations</h2>",
            "<p>Standard deviations of the predicted and of the true actions over demonstrations, and "
            "their ratio: a policy that does the same whatever it sees has one near 0. By image alone: "
            "what is left of the first when the images change and the state does not.</p>",
            f"<pre>{html.escape(spread.read_text())}</pre>",
        ]
    return pieces


def _outcome(row: dict[str, Any]) -> str:
    return "success" if row["success"] else "failure"


def _inline(svg_text: str) -> str:
    """An SVG file's text for use inside a page, where the namespace (an address) is not needed."""
    return svg_text.replace(f' xmlns="{SVG_NAMESPACE}"', "")


# ---------------------------------------------------------------------------------------------- charts as SVG


@dataclass
class Line:
    """One curve of a chart."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = BLUE
    low: Sequence[float] | None = None
    """With `high`: the ends of an interval at each point."""
    high: Sequence[float] | None = None


def curves_svg(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> str:
    """Losses, success rate, gradient norm and learning rate over steps; "" if there is nothing to draw.

    Args:
        metrics: rows of metrics.jsonl.
        evaluations: contents of episodes.json; drawn are those with a "step".
    """
    width, height = 480, 230
    losses = [_curve(metrics, "l1_loss", "training"), _curve(metrics, "val_l1_loss", "validation", ORANGE)]
    charts: list[tuple[str, list[Line], bool, tuple[float, float] | None]] = [
        ("L1 loss", losses, True, None),
        ("success", [_success_curve(evaluations)], False, (0.0, 1.0)),
        ("KL divergence", [_curve(metrics, "kld_loss", "training")], True, None),
        ("gradient norm", [_curve(metrics, "grad_norm", "before clipping")], True, None),
        ("learning rate", [_curve(metrics, "lr", "learning rate")], False, None),
    ]
    panels: list[str] = []
    for title, lines, log, limits in charts:
        lines = [line for line in lines if len(line.x)]
        if lines:
            left, top = width * (len(panels) % 2), height * (len(panels) // 2)
            panels.append(panel(title, lines, left, top, width, height, log, limits))
    return svg(2 * width, height * math.ceil(len(panels) / 2), panels) if panels else ""


def _curve(metrics: list[dict[str, Any]], key: str, label: str, colour: str = BLUE) -> Line:
    """The finite values of a key over steps, thinned out to less than 1,600."""
    points = []
    for row in metrics:
        if isinstance(row.get(key), (int, float)) and math.isfinite(row[key]):
            points.append((row["step"], row[key]))
    points = points[:: max(1, len(points) // 800)]
    return Line(label, [step for step, _ in points], [value for _, value in points], colour)


def _success_curve(evaluations: list[dict[str, Any]]) -> Line:
    drawn = [each for each in evaluations if "step" in each]
    steps, rates, low, high = (
        [each[key] for each in drawn] for key in ("step", "success_rate", "success_low", "success_high")
    )
    return Line("success rate, 95 % interval", steps, rates, GREEN, low, high)


def chunk_svg(predicted: np.ndarray, true: np.ndarray) -> str:
    """Predicted beside true actions (S, A) of one chunk, one panel per joint; NaN in `true` is left out."""
    width, height, columns = 240, 150, 4
    joints = predicted.shape[1]
    panels = []
    for joint in range(joints):
        steps = np.flatnonzero(np.isfinite(true[:, joint]))
        lines = [Line("predicted", list(range(len(predicted))), predicted[:, joint].tolist())]
        if len(steps):
            lines.insert(0, Line("true", steps.tolist(), true[steps, joint].tolist(), ORANGE))
        left, top = width * (joint % columns), height * (joint // columns)
        panels.append(panel(f"joint {joint}", lines, left, top, width, height))
    return svg(width * columns, height * math.ceil(joints / columns), panels)


def svg(width: int, height: int, elements: Iterable[str]) -> str:
    style = "font: 11px system-ui, sans-serif; background: #fff"
    head = f'<svg xmlns="{SVG_NAMESPACE}" viewBox="0 0 {width} {height}" width="{width}" style="{style}">'
    return f"{head}{''.join(elements)}</svg>"


def panel(
    title: str, lines: Sequence[Line], left: float, top: float, width: float, height: float,
    log: bool = False, limits: tuple[float, float] | None = None,
) -> str:  # fmt: skip
    """One chart with axes, ticks and, for several lines or an interval, a legend.

    Args:
        log: a logarithmic y axis, where all values are positive.
        limits: of the y axis. None: those of the values.
    """
    values = np.concatenate(
        [np.asarray(v, float) for line in lines for v in (line.y, line.low or [], line.high or [])]
    )
    log = log and bool((values > 0).all())
    low, high = limits or _limits(float(values.min()), float(values.max()), log)
    first, last = min(min(line.x) for line in lines), max(max(line.x) for line in lines)
    x0, x1, y0, y1 = left + 52, left + width - 14, top + height - 24, top + 26  # y grows downwards

    def scale(y: Any) -> np.ndarray:
        return np.log10(np.asarray(y, float)) if log else np.asarray(y, float)

    def to_x(x: Any) -> np.ndarray:
        return x0 + (np.asarray(x, float) - first) / max(last - first, 1e-9) * (x1 - x0)

    def to_y(y: Any) -> np.ndarray:
        return y0 + (scale(y) - scale(low)) / (scale(high) - scale(low)) * (y1 - y0)

    elements = [f'<text x="{x0}" y="{top + 16}" font-weight="600">{html.escape(title)}</text>']
    for value in _ticks(low, high, log):
        y = float(to_y(value))
        elements.append(f'<path d="M{x0} {y:.1f}H{x1}" stroke="#e4e4e4"/>')
        elements.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{value:g}</text>')
    for value in _ticks(first, last, False):
        x = float(to_x(value))
        elements.append(f'<text x="{x:.1f}" y="{y0 + 16}" text-anchor="middle" fill="#555">{value:g}</text>')
    elements.append(f'<path d="M{x0} {y1}V{y0}H{x1}" fill="none" stroke="#888"/>')
    for line in lines:
        elements += _draw(line, to_x, to_y)
    if len(lines) > 1 or lines[0].low is not None:
        elements += _legend(lines, x1, top + 16)
    return "".join(elements)


def _draw(line: Line, to_x: Callable, to_y: Callable) -> list[str]:
    """A line, its points if they are few, and its intervals."""
    xs, ys = to_x(line.x), to_y(line.y)
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys))
    elements = [f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="1.6"/>']
    if len(xs) <= 30:
        elements += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{line.colour}"/>' for x, y in zip(xs, ys)
        ]
    if line.low is not None and line.high is not None:
        for x, low, high in zip(xs, to_y(line.low), to_y(line.high)):
            path = f"M{x:.1f} {low:.1f}V{high:.1f}"
            elements.append(f'<path d="{path}" stroke="{line.colour}" stroke-opacity=".5"/>')
    return elements


def _legend(lines: Sequence[Line], right: float, y: float) -> list[str]:
    """The labels side by side, ending at `right`."""
    elements = []
    for line in reversed(lines):
        text = html.escape(line.label)
        elements.append(f'<text x="{right}" y="{y}" text-anchor="end" fill="{line.colour}">{text}</text>')
        right -= 6.5 * len(line.label) + 10
    return elements


def _limits(low: float, high: float, log: bool) -> tuple[float, float]:
    """Ends of an axis: those of the values, or around them where they are all the same."""
    if high - low >= 1e-9 * max(abs(high), 1e-9):
        return low, high
    if log:
        return low / 2, high * 2
    return low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    """About four round numbers from low to high."""
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = [1, 2, 5] if high / low < 200 else [1]
        candidates = [mark * 10.0**decade for decade in decades for mark in marks]
        inside = [v for v in candidates if low <= v * 1.0001 and v <= high * 1.0001]
        return inside[:: max(1, len(inside) // 5)] or [low, high]
    if high <= low:
        return [low]
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough)
    multiples = np.arange(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return [round(v, 12) for v in multiples * step]
