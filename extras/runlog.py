"""What a run says and remembers: console, RUN/metrics.jsonl, tracker, profile.

    log = RunLog(cfg, cluster, train_set, progress, evaluations(directory, progress.step), workers)
    log.banner(learner, val_set, notes, progress, preset)
    log.step_done(loader.waited_s)                     # each loop step: host time only
    log.write_steps(progress, sums, lr)                # each log step: one row, one line
    improved = log.write_evaluation(progress, results) # is it the best? The rows so far say so

metrics.jsonl is the run's memory: which evaluation is the best, how many have passed since, and whether one
is owed are functions of its rows, so no checkpoint has to store them. Only rank 0 writes and prints.
"""

import contextlib
import json
import math
import os
import resource
import sys
import time
import typing
from pathlib import Path
from typing import Any

import torch

import ckpt
import data
import dist
from extras import checks, flags, frames, track
from extras.rundir import run_dir

METRICS = "metrics.jsonl"


# ------------------------------------------------------------------------------------------ the run's memory


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file that can be read, oldest first; none where there is no file."""
    rows = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def evaluations(directory: Path, step: int) -> list[dict[str, Any]]:
    """The evaluations of a run directory up to a step, without the validation before the first step."""
    rows = read_rows(directory / METRICS)
    return [row for row in rows if 0 < row["step"] <= step and {"success_rate", "val_l1_loss"} & set(row)]


def earlier_evaluations(cluster: dist.Cluster, source: Path | None, step: int) -> list[dict[str, Any]]:
    """The evaluations of the run whose checkpoint `source` is resumed. Collective: call on every rank.

    Rank 0 reads them: it is about to cut the file at this step.
    """
    rows = []
    if source is not None and cluster.is_main:
        rows = evaluations(ckpt.run_dir_of(source), step)
    return dist.from_main(cluster, rows)


def score(row: dict[str, Any]) -> tuple[float, float]:
    """The higher success rate is better, and of equal ones that with the lower validation loss."""
    values = []
    for key, sign in (("success_rate", 1), ("val_l1_loss", -1)):
        value = row.get(key)
        values.append(sign * value if value is not None and math.isfinite(value) else -math.inf)
    return values[0], values[1]


def best_evaluation(rows: list[dict[str, Any]]) -> int | None:
    """Which of these evaluations is the best: the first of those with the highest score. None without any."""
    return max(range(len(rows)), key=lambda i: (score(rows[i]), -i), default=None)


def evaluations_since_best(rows: list[dict[str, Any]]) -> int:
    """How many evaluations in a row have not been better than the best one."""
    best = best_evaluation(rows)
    return 0 if best is None else len(rows) - 1 - best


class RunLog:
    """Console, metrics.jsonl and tracker of one run. Build it on every rank; rank 0 writes."""

    def __init__(
        self,
        cfg: Any,
        cluster: dist.Cluster,
        train_set: data.EpisodeDataset,
        progress: Any,
        evaluations: list[dict[str, Any]],
        num_workers: int,
    ) -> None:
        """
        Args:
            cfg, progress: train.Config, and where the run stands (train.Progress).
            evaluations: the earlier rows of this run that count for "best" (see `evaluations`).
            num_workers: loader processes of a rank.
        """
        self.cfg, self.cluster, self.train_set, self.num_workers = cfg, cluster, train_set, num_workers
        self.evaluations = list(evaluations)
        self.tracker = track.start_tracker(
            cfg.tracker,
            run_dir(cfg),
            cfg.job_name,
            flags.to_dict(cfg),
            progress.tracker_run_id,
            cluster.is_main,
            project=cfg.tracker_project,
        )
        self.last_values: dict[str, float] = {}
        self._warned: set[str] = set()
        self._file: typing.TextIO | None = None
        if cluster.is_main:
            self._file = self._open_metrics(progress.step)
        self._logged_before = False  # the first line counts the start of the workers as waiting
        self._mark = self._born = time.perf_counter()
        self._elapsed = self._waited = self._waited_before = 0.0
        self._steps = 0

    # -- time: what a step took, without what lies between steps

    def first_step_done(self) -> None:
        """Say how long the first step took, compilation included; on a GPU it is waited for."""
        if self.cluster.device.type == "cuda":
            torch.cuda.synchronize()
        compiled = ", compilation included" if self.cfg.compile else ""
        self.info(f"first step done after {time.perf_counter() - self._born:.1f} s{compiled}")

    def step_done(self, waited_s: float) -> None:
        """Call after each step with the seconds waited for data so far; host time only."""
        now = time.perf_counter()
        self._elapsed, self._mark = self._elapsed + now - self._mark, now
        self._waited, self._waited_before = self._waited + waited_s - self._waited_before, waited_s
        self._steps += 1

    def restart_clock(self, since_start: bool = False) -> None:
        """What happened since the last step (saving, evaluating) does not count as step time.

        Args:
            since_start: nor does it count for the time to the first step.
        """
        now = time.perf_counter()
        if since_start:
            self._born += now - self._mark
        self._mark = now

    # -- rows and lines

    def write_steps(self, progress: Any, sums: dist.MetricSums, lr: float) -> None:
        """The log line and row of the steps since the last one. Collective: call on every rank."""
        cfg, cluster = self.cfg, self.cluster
        if cluster.device.type == "cuda":
            torch.cuda.synchronize()  # the read below would wait all the same; now it is step time
        self.step_done(self._waited_before)
        steps = self._steps - 1
        sums.add_times({"step_s": self._elapsed / steps, "data_s": self._waited / steps})
        values = sums.reduce()
        self._elapsed, self._waited, self._steps = 0.0, 0.0, 0
        step_s, data_s = values["step_s"], values["data_s"]
        row = {
            "step": progress.step,
            "samples": progress.samples_seen,
            "epoch": progress.samples_seen / len(self.train_set),
            "loss": values["loss"],
            "l1_loss": values["l1_loss"],
            "kld_loss": values.get("kld_loss", 0.0),
            "grad_norm": values["grad_norm"],
            "lr": lr,
            "step_s": step_s,
            "data_s": data_s,
            "samples_per_s": cfg.batch_size * cluster.world_size / step_s,
        }
        self._write_row(row)
        eta = clock_time((cfg.steps - progress.step) * step_s)
        self.info(
            f"step {progress.step:,}/{cfg.steps:,}  samples {progress.samples_seen:,}  "
            f"epoch {row['epoch']:.2f}  "
            f"loss {row['loss']:.4f}  l1 {row['l1_loss']:.4f}  kld {row['kld_loss']:.4f}  "
            f"grad_norm {row['grad_norm']:.3f}  lr {lr:.2e}  "
            f"step {step_s:.4f} s  data {data_s:.4f} s ({data_s / step_s:.0%})  "
            f"{row['samples_per_s']:.1f} samples/s  mem {memory_gb(cluster):.1f} GB  eta {eta}"
        )
        if data_s > 0.2 * step_s and self._logged_before:
            self._warn_of_slow_data(data_s / step_s)
        self._logged_before = True

    def write_evaluation(self, progress: Any, results: dict[str, float]) -> bool:
        """The row of an evaluation. Call on every rank; all learn whether it is the best so far."""
        epoch = progress.samples_seen / len(self.train_set)
        row = {"step": progress.step, "samples": progress.samples_seen, "epoch": epoch, **results}
        counts = progress.step > 0  # what is measured before the first step is only where training starts
        if counts:
            self.evaluations.append(row)
        improved = counts and evaluations_since_best(self.evaluations) == 0
        self._write_row(row)
        values = "  ".join(f"{key} {value:.4f}" for key, value in results.items())
        self.info(f"step {progress.step:,}  {values}{'  (new best)' if improved else ''}")
        return improved

    @property
    def best_step(self) -> int | None:
        """Step of the best evaluation so far."""
        best = best_evaluation(self.evaluations)
        return None if best is None else self.evaluations[best]["step"]

    def evaluated(self, step: int) -> bool:
        """Whether the evaluation of this step has been made."""
        return any(row["step"] == step for row in self.evaluations)

    def out_of_patience(self) -> bool:
        patience = self.cfg.eval.patience
        return patience is not None and evaluations_since_best(self.evaluations) >= patience

    def _warn_of_slow_data(self, share: float) -> None:
        sources = self.train_set.cameras.values()
        decodes = any(not isinstance(source, frames.CachedFrames) for source in sources)
        self.warn(
            f"{share:.0%} of the time is spent waiting for data; raise --num-workers (now "
            f"{self.num_workers}){' or decode once with --dataset.cache disk' if decodes else ''}.",
            once="data",
        )

    def _write_row(self, row: dict[str, Any]) -> None:
        if not math.isfinite(row.get("loss", 0.0)):
            self.warn(
                f"the loss is {row['loss']} at step {row['step']:.0f}; lower --optimizer.lr, or look for "
                "broken rows with: python data.py check --root DIR",
                once="loss",
            )
        self.tracker.log(int(row["step"]), row)
        self.last_values |= {key: row[key] for key in row if key.endswith(("loss", "success_rate"))}
        if self._file is None:
            return
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:  # somebody removed the run directory
                run_dir(self.cfg).mkdir(parents=True, exist_ok=True)
                self._file = self._open_metrics(int(row["step"]))
                self.warn("metrics.jsonl was removed; a new one begins here.")
            finite = {key: value if math.isfinite(value) else None for key, value in row.items()}
            self._file.write(json.dumps(finite) + "\n")  # JSON has no NaN
            self._file.flush()
        except OSError as error:
            self.warn(
                f"metrics.jsonl could not be written ({error}); the training continues.", once="metrics"
            )

    def _open_metrics(self, step: int) -> typing.TextIO:
        """The metrics file, without the rows after `step`, which a resumed run will write again.

        A run that begins where rows of another lie keeps these as metrics.jsonl.before.
        """
        path = run_dir(self.cfg) / METRICS
        if path.exists() and step == 0 and path.stat().st_size:
            os.replace(path, path.with_suffix(".jsonl.before"))
        if path.exists():
            lines, kept, broken = path.read_bytes().splitlines(keepends=True), [], 0
            for line in lines:
                try:
                    if not line.endswith(b"\n"):
                        broken += 1
                    elif json.loads(line)["step"] <= step:
                        kept.append(line)
                except (ValueError, TypeError, KeyError, IndexError):
                    broken += 1
            if broken:
                self.warn(f"{path}: {broken} of {len(lines)} rows are damaged and left out.")
            temporary = path.with_suffix(".tmp")
            temporary.write_bytes(b"".join(kept))
            os.replace(temporary, path)
        return path.open("a")

    # -- the console

    def banner(
        self,
        learner: Any,
        val_set: data.EpisodeDataset | None,
        notes: list[data.Note],
        progress: Any,
        preset: Any,
    ) -> None:
        """Everything that was decided: data, layout, batch, rate, and flags that do nothing.

        Args:
            learner: train.Learner.
            preset: the train.Config that the flags started from.
        """
        cfg, cluster, policy = self.cfg, self.cluster, learner.policy
        if decided := flags.preset_flags(cfg, preset):
            self.info(f"preset {cfg.preset}: {decided}")
        for note in notes:
            if note.level == "warning":
                self.warn(note.text)
            else:
                self.info(note.text)
        held_out = f", {val_set.num_episodes} held out" if val_set is not None else ""
        frame_count = len(self.train_set)
        self.info(
            f"data: {self.train_set.num_episodes} episodes, {frame_count:,} frames to train on{held_out}"
        )
        total = sum(p.numel() for p in policy.parameters())
        trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
        origin = f"; weights of {cfg.policy.path}" if cfg.policy.path and progress.step == 0 else ""
        inputs = ", ".join(policy.input_features)
        self.info(f"policy: {total:,} parameters, {trained:,} trained; inputs {inputs}{origin}")
        self.info(
            f"layout: {cluster.mode}, {cluster.world_size} ranks = dp_replicate {cluster.dp_replicate} x "
            f"dp_shard {cluster.dp_shard}, {cluster.device.type}, precision {cfg.mixed_precision}, "
            f"{'compiled' if cfg.compile else 'eager'}"
        )
        steps = cfg.steps - progress.step
        samples = steps * cfg.batch_size * cluster.world_size
        effective = cfg.batch_size * cluster.world_size * cfg.gradient_accumulation_steps
        groups = zip(learner.optimizer.param_groups, learner.base_lrs)
        lrs = ", backbone ".join(f"{lr:g}" for group, lr in groups if group["params"])
        self.info(
            f"batch: {cfg.batch_size} a rank x {cluster.world_size} ranks x "
            f"{cfg.gradient_accumulation_steps} accumulated = {effective} effective; "
            f"{steps:,} {'steps' if progress.step == 0 else f'of {cfg.steps:,} steps to go'} = "
            f"{samples:,} samples = {samples / frame_count:.2f} epochs; "
            f"lr {lrs} (schedule {cfg.scheduler.name}, not scaled)"
        )
        self.info(f"run: {cfg.output_dir}, from step {progress.step}, sample {progress.samples_seen:,}")
        for sentence in checks.without_effect(cfg, cluster, val_set is not None, preset):
            self.warn(f"{sentence}.")

    def ended(self, progress: Any, reason: str | None) -> None:
        """How the run ended, and how it can be resumed."""
        took = clock_time(time.perf_counter() - self._born)
        if reason is None:
            self.info(f"done: {progress.step:,} steps, {took}, {self.cfg.output_dir}")
            return
        way = f"; resume with: python train.py --resume {self.cfg.output_dir}"
        self.info(
            f"stopped ({reason}) at step {progress.step:,} of {self.cfg.steps:,}, after {took}"
            f"{way if self.cfg.save_checkpoint else ''}"
        )

    def info(self, line: str) -> None:
        if self.cluster.is_main:
            write_line(line, sys.stdout)

    def warn(self, sentence: str, once: str | None = None) -> None:
        """A warning on stderr; with `once`, only the first of that name."""
        if self.cluster.is_main and once not in self._warned:
            write_line(f"warning: {sentence}", sys.stderr)
        if once is not None:
            self._warned.add(once)

    def close(self) -> None:
        self.tracker.finish()
        if self._file is not None:
            self._file.close()


def write_line(line: str, stream: typing.TextIO) -> None:
    """Print; a console that is gone (a closed terminal, `| head`) or full does not end a run."""
    try:
        print(line, file=stream, flush=True)
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def clock_time(seconds: float) -> str:
    """H:MM:SS"""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def memory_gb(cluster: dist.Cluster) -> float:
    """Peak memory of this rank: allocated on the GPU, or resident on a CPU."""
    if cluster.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class Profiler:
    """--profile: traces of steps 60 to 62, RUN/profile/rankN.json, with a page of what took the time."""

    def __init__(self, cfg: Any, cluster: dist.Cluster, start: int) -> None:
        self._profile = None
        if not cfg.profile or start > 58 or cfg.steps < 62:
            return
        self._directory, self._rank = run_dir(cfg) / "profile", cluster.rank
        self._directory.mkdir(exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if cluster.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=58 - start, warmup=1, active=3, repeat=1),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def step_done(self) -> None:
        if self._profile is not None:
            self._profile.step()

    def _write(self, profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(self._directory / f"rank{self._rank}.json"))
        averages = profile.key_averages()
        on_gpu = torch.profiler.ProfilerActivity.CUDA in profile.activities
        launches = sum(e.count for e in averages if "LaunchKernel" in e.key or "GraphLaunch" in e.key)
        by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        busy = sum(getattr(e, by) for e in averages) / 3e6
        spans = [e for e in profile.events() if e.name.startswith("ProfilerStep")]
        wall = sum(e.time_range.elapsed_us() for e in spans) / 1e6 / max(1, len(spans))
        head = (
            f"steps 60 to 62, rank {self._rank}: {wall:.4f} s per step, {launches / 3:.0f} launches per step"
        )
        if on_gpu and wall:
            head += f", GPU idle {max(0.0, 1 - busy / wall):.0%}"
        (self._directory / f"rank{self._rank}.txt").write_text(
            f"{head}\n\n{averages.table(sort_by=by, row_limit=30)}\n"
        )
