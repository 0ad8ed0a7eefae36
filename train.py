"""Train ACT (Action Chunking Transformer, Zhao et al. 2023) on LeRobot data sets, in plain PyTorch.

    python train.py --preset demo                                        # a CPU, minutes: trains, then acts
    python train.py --dataset.root DIR --compile                         # one GPU
    torchrun --nproc-per-node=8 train.py --dataset.root DIR --compile    # eight; any layout, same curve
    python train.py --resume outputs/train/.../checkpoints/last          # go on, on whatever hardware is free

Without a data flag the embedded two-arm task (sim.py) is the data set. A run directory holds

    metrics.jsonl            one object per log step      report.html   curves, rollouts: at each evaluation
    checkpoints/005000/      LeRobot's tree (ckpt.py)     checkpoints/last -> 005000, checkpoints/best -> ...

This file is the order of things: flags, construction, step, loop. The parts are model_act.py (the policy),
data.py (frames, sample order), dist.py (ranks, sharding, precision), ckpt.py (checkpoints), lora.py
(adapters), evaluate.py (rollouts, report), track.py (trackers), lerobot_flags.py (lerobot-train's spelling);
sim.py is the embedded task.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import resource
import signal
import sys
import time
import types
import typing
import warnings
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.elastic.multiprocessing.errors as elastic
import tyro
from torch import Tensor, nn

import ckpt
import data
import dist
import evaluate
import lerobot_flags
import lora
import model_act
import sim
import track
from sim import SimConfig


@dataclass(frozen=True)
class PolicyFlags(model_act.ACTConfig):
    path: str | None = None
    """Start from the weights saved in this folder (ours or LeRobot's); its config.json gives the defaults."""

    def __post_init__(self) -> None:
        """Checked in `check`: here tyro would catch the error and answer in its own words."""


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float | None = None
    """AdamW's learning rate of everything but the backbone. None: --policy.optimizer-lr."""
    lr_backbone: float | None = None
    """Learning rate of the vision backbone. None: --policy.optimizer-lr-backbone; 0 freezes it."""
    weight_decay: float | None = None
    """Decoupled weight decay. None: --policy.optimizer-weight-decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's averaging of the gradient and of its square."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    grad_clip_norm: float = 10.0
    """Largest global gradient norm; a larger gradient is scaled down to it. 0: no clipping."""


@dataclass(frozen=True)
class SchedulerConfig:
    name: Literal["none", "linear", "cosine"] = "none"
    """none: constant. linear: warm-up, then constant. cosine: warm-up, then a cosine down to the floor."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly (linear, cosine)."""
    decay_steps: int | None = None
    """Step at which the cosine reaches its floor. None: --steps. Longer than --steps: the whole schedule is
    shortened to fit, as LeRobot does."""
    final_lr_ratio: float = 0.0
    """The cosine's floor, as a share of the learning rate."""


@dataclass(frozen=True)
class Config:
    preset: Literal["aloha", "demo"] = "aloha"
    """A named set of defaults that the other flags override. aloha: the paper's policy on 480x640 images.
    demo: a small policy that learns the embedded task on a CPU in minutes."""
    output_dir: str | None = None
    """Run directory. None: outputs/train/DATE/TIME_JOB, decided by rank 0. One that holds files is refused
    without --resume."""
    job_name: str = "act"
    """Name of the run, for the run directory and the tracker."""
    steps: int = 100_000
    """Loop steps: micro-batches per rank."""
    epochs: float | None = None
    """Passes over the training frames, in place of --steps, which is derived and printed."""
    max_hours: float | None = None
    """Stop with a checkpoint after so many hours, counted from the end of set-up. None: never."""
    batch_size: int = 8
    """Samples per rank and step."""
    num_workers: int | None = None
    """Loader processes per rank; 0 loads in the training process. None: 4, or a rank's cores if fewer."""
    seed: int = 1000
    """Decides initial weights, sample order, dropout and latent noise."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""
    log_freq: int = 200
    """Steps between log lines."""
    save_checkpoint: bool = True
    """Write checkpoints; with --no-save-checkpoint there is none at all, not even the last."""
    save_freq: int = 20_000
    """Steps between checkpoints; 0: only the last one."""
    keep_last: int | None = None
    """Keep this many newest checkpoints of the run, and the best. None: all."""
    checkpoint_format: Literal["safetensors", "dcp", "safetensors_dcp"] = "safetensors"
    """Weights as one file, as shards (needs FSDP or HSDP), or both."""
    async_save: bool = False
    """Write checkpoints in a background thread, from a copy in host memory: the loop pauses for the copy."""
    resume: str | None = None
    """Go on from a run directory, checkpoints/, a step, last, pretrained_model/ or train_config.json;
    `auto`: the newest whole checkpoint under --output-dir, or a fresh start."""
    eval_freq: int = 0
    """Steps between evaluations: validation loss where there are validation episodes, rollouts where there is
    an environment (--eval.env). 0: off."""
    compile: bool = False
    """Compile the network with torch.compile."""
    compile_mode: (
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    ) = None
    """torch.compile's mode. None: reduce-overhead (CUDA graphs) on CUDA without sharding, else default."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Type of activations and matrix products; weights, loss and optimizer stay float32."""
    tf32: bool = True
    """Allow TensorFloat-32 matrix products and convolutions on CUDA."""
    gradient_accumulation_steps: int = 1
    """Steps whose gradients are summed before one optimizer step."""
    parallelism: dist.ParallelismConfig = field(default_factory=dist.ParallelismConfig)
    ddp: dist.DDPConfig = field(default_factory=dist.DDPConfig)
    fsdp: dist.FSDPConfig = field(default_factory=dist.FSDPConfig)
    dataset: data.DatasetConfig = field(default_factory=data.DatasetConfig)
    sim: SimConfig = field(default_factory=SimConfig)
    policy: PolicyFlags = field(default_factory=PolicyFlags)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    peft: lora.PeftConfig = field(default_factory=lora.PeftConfig)
    eval: evaluate.EvalConfig = field(default_factory=evaluate.EvalConfig)
    tracker: Literal["none", "tensorboard", "trackio", "wandb"] = "none"
    """Where metrics go besides metrics.jsonl."""
    tracker_project: str = "act"
    """Project name at the tracker."""
    push_to_hub: str | None = None
    """USER/NAME: upload the last checkpoint to this repository of the hub when the run ends."""
    profile: bool = False
    """Trace steps 60 to 62 of every rank with torch.profiler (Chrome / Perfetto files under RUN/profile)."""


DEMO = Config(
    preset="demo",
    steps=900,
    batch_size=32,
    num_workers=1,
    log_freq=50,
    save_freq=0,
    eval_freq=300,
    sim=SimConfig(episodes=200),
    # Nothing is pretrained here, so the images are normalised with their own statistics.
    dataset=data.DatasetConfig(image_size=(60, 80), val_split=0.02, cache="off", use_imagenet_stats=False),
    policy=PolicyFlags(
        pretrained_backbone_weights=None, n_action_steps=50, dim_model=128, n_heads=4, dim_feedforward=256,
        n_encoder_layers=2, n_vae_encoder_layers=1, dropout=0.0,
        optimizer_lr=3e-4, optimizer_lr_backbone=3e-4,
    ),
    scheduler=SchedulerConfig(name="cosine", warmup_steps=50),
    eval=evaluate.EvalConfig(env="sim"),
)  # fmt: skip
PRESETS = {"aloha": Config(), "demo": DEMO}

LOCK = ".lock"
"""File in a run directory that its run holds a lock on."""

USER_ERRORS = (ValueError, OSError, ImportError)
"""What set-up raises for the user to read: one sentence on stderr, exit code 1, no traceback."""


def main(argv: list[str] | None = None) -> int:
    """Run a command line to its end. Returns the exit code: 0, 1, or 128 + a signal's number."""
    made = None
    try:
        cfg, source = parse_command_line(sys.argv[1:] if argv is None else argv)
        cluster = dist.start(cfg.device, cfg.parallelism)
        with dist.raise_together(cluster):
            check(cfg, cluster)
        existed = cfg.output_dir is not None and Path(cfg.output_dir).exists()
        cfg = with_run_dir(cfg, cluster, source)
        made = None if existed else run_dir(cfg)
        with dist.raise_together(cluster):
            lock = lock_run_dir(run_dir(cfg)) if cluster.is_main else None
        dist.set_numerics(cfg.tf32)
        train_set, val_set, policy = build(cfg, cluster, source)
        with dist.raise_together(cluster):
            cfg = with_steps(cfg, cluster, len(train_set))
        parts = prepare(cfg, cluster, policy)
        with dist.raise_together(cluster):
            place = load_place(cfg, cluster, parts, source)
            log = RunLog(cfg, cluster, train_set, place)
        writer = checkpoint_writer(cfg, cluster)
        stop = StopOnSignal(cluster, cfg.max_hours)
        with dist.raise_together(cluster):
            loaders = make_loaders(cfg, cluster, place, train_set, val_set)
    except USER_ERRORS as error:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # the sentence is the same on every rank
            print(error, file=sys.stderr)
        if made is not None:
            with contextlib.suppress(OSError):
                (made / LOCK).unlink(missing_ok=True)
                made.rmdir()  # nothing was written yet
        return 1
    except KeyboardInterrupt:
        return 130
    log.banner(parts, val_set, place)
    run = Run(cfg, cluster, parts, place, train_set, val_set, *loaders, writer, log, stop)
    code = train(run)
    dist.finish(cluster)  # before what rank 0 does alone, for which the others would wait
    if cfg.push_to_hub is not None and code == 0 and cluster.is_main:
        publish(run)
    log.finish()
    if lock is not None:
        lock.close()
    return code


# ---------------------------------------------------------------------------------------------- the loop


@dataclass
class Parts:
    """What a step needs. A step calls `module`: `policy` itself (one process, FSDP) or its DDP wrapper."""

    policy: model_act.ACTPolicy
    module: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    scaler: dist.LossScaler | None
    keep_grads: bool = False
    """Gradients live in buffers of our own that are zeroed, not freed: CUDA graphs need it."""
    peft: lora.PeftConfig | None = None
    """Resolved targets of the adapters, if the run trains adapters."""


@dataclass
class Place:
    """Where the run stands: what a checkpoint keeps besides weights, optimizer, schedule and loss scale."""

    step: int = 0
    samples_seen: int = 0
    unlogged: dict[str, Any] = field(default_factory=dict)
    best: list[float] | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0
    evaluation_owed: bool = False
    """A signal broke the evaluation of this step off; the resumed run makes up for it."""
    tracker_run_id: str | None = None


@dataclass
class Run:
    cfg: Config
    cluster: dist.Cluster
    parts: Parts
    place: Place
    train_set: data.EpisodeDataset
    val_set: data.EpisodeDataset | None
    train_loader: torch.utils.data.DataLoader
    val_loader: torch.utils.data.DataLoader | None
    writer: ckpt.CheckpointWriter | None
    log: "RunLog"
    stop: "StopOnSignal"


def train(run: Run) -> int:
    """Train from `run.place` to --steps. Collective: call on every rank. Returns the exit code."""
    cfg, cluster, place, log = run.cfg, run.cluster, run.place, run.log
    batches: Any = run.train_loader.dataset
    stop, profiler = run.stop, Profiler(cfg, cluster, place.step)
    loader = data.to_device(run.train_loader, cluster.device)
    sums = dist.MetricSums(cluster, place.unlogged)
    evaluates = cfg.eval_freq > 0 and (run.val_loader is not None or cfg.eval.env is not None)
    start = place.step
    if start >= cfg.steps:
        log.say(f"nothing to do: the run is at step {start:,} of {cfg.steps:,}; give a larger --steps")
    if evaluates and start == 0 and run.val_loader is not None and run.val_set is not None:
        log.say(f"validation of {len(run.val_set):,} frames before the first step ...")
        loss = validation_loss(run)
        if loss is not None:
            log.write_evaluation(place, {"val_l1_loss": loss})  # what training starts from
        log.restart_clock(since_start=True)
    if evaluates and place.evaluation_owed and evaluate_now(run):
        save(run, sums, improved=True)
    run.parts.module.train()
    log.restart_clock()
    for step in range(start, cfg.steps):
        window = batches.window(step)
        train_step(cfg, cluster, run.parts, next(loader), window, step, sums)
        place.step, place.samples_seen = step + 1, batches.position(step + 1)
        log.step_done(loader.waited_s)
        profiler.step()
        if step == start:
            log.first_step()
            dist.shorten_timeout(cluster)
        if place.step < window.stop:
            continue  # what falls due inside an accumulation window is done at its end
        last, improved = place.step == cfg.steps, False
        if due(window, cfg.log_freq, last):
            log.write_steps(
                place, sums, run.parts.optimizer.param_groups[0]["initial_lr"] * lr_factor(cfg, step)
            )
        if evaluates and due(window, cfg.eval_freq, last):
            if due(window, cfg.save_freq, last):
                place.evaluation_owed = True
                save(run, sums, improved)  # should the run not outlive the evaluation
            improved = evaluate_now(run)
        stopping = stop.poll() or out_of_patience(cfg, place)
        if due(window, cfg.save_freq, last or stopping) or improved:
            save(run, sums, improved)
        log.restart_clock()
        if stopping:
            break
    code = finish_saving(run, start)
    log.farewell(place, stop.reason or ("no better evaluation" if out_of_patience(cfg, place) else None))
    if not stop.exit_code:
        stop.restore()
    return code or stop.exit_code


def due(window: range, every: int, last: bool) -> bool:
    """Whether a multiple of `every` steps ends in this window; the last window of a run always counts."""
    return last or (every > 0 and window.stop // every > window.start // every)


def train_step(cfg, cluster, parts: Parts, batch: dict[str, Tensor], window: range, step: int, sums) -> None:
    """One micro-batch, and after the last of its accumulation window the optimizer's step.

    Nothing is read back from the device: what is to be logged is added to `sums`, on the device.
    """
    last_of_window = step + 1 == window.stop
    if parts.keep_grads:
        torch.compiler.cudagraph_mark_step_begin()  # its import costs an eager run a second
    with dist.accumulate(parts.module, last_of_window):
        with dist.autocast(cluster, cfg.mixed_precision, cfg.fsdp):
            loss, metrics = parts.module(batch)
        dist.backward(loss / len(window), parts.scaler)
    sums.add({"loss": loss, **metrics})
    if last_of_window:
        clip = cfg.optimizer.grad_clip_norm or float("inf")
        norm = dist.clip_grad_norm_(parts.module, clip, parts.scaler)
        # fp16: the norm of a step that overflowed is not finite and not stepped; it does not count.
        sums.add({"grad_norm": norm}, 1.0 if parts.scaler is None else 1.0 - parts.scaler.found_inf)
        dist.optimizer_step(parts.optimizer, parts.scaler)
        parts.optimizer.zero_grad(set_to_none=not parts.keep_grads)
    parts.scheduler.step()


def evaluate_now(run: Run) -> bool:
    """Validation loss, rollouts and pictures, as far as the run has them; True if it is the best so far.

    A signal breaks it off: it leaves nothing, and the run stops after this step and owes it.
    Collective: call on every rank; each takes its share, all get the result.
    """
    cfg, cluster, place = run.cfg, run.cluster, run.place
    place.evaluation_owed = True
    results: dict[str, float] = {}
    if run.val_loader is not None:
        loss = validation_loss(run)
        if loss is None:
            return False
        results["val_l1_loss"] = loss
    policy, shown = whole_policy(run), evaluate.spread_out(run.val_set or run.train_set)
    with dist.patience(cluster):
        rollouts = evaluate.evaluate_in_training(
            policy, cfg.eval, cluster, run_dir(cfg), place.step, shown, run.stop.is_asked
        )
    run.parts.module.train()
    if rollouts is None:
        return False
    results |= rollouts
    # The higher success rate is better, and of equal ones that with the lower validation loss.
    known = [
        results[key] * sign for key, sign in (("success_rate", 1), ("val_l1_loss", -1)) if key in results
    ]
    score = [value if math.isfinite(value) else -math.inf for value in known]
    improved = place.best is None or score > place.best
    place.evaluation_owed = False
    run.log.write_evaluation(place, results, improved)
    if cluster.is_main:
        evaluate.write_report(run_dir(cfg), run_dir(cfg).name)
    place.evaluations_since_best = 0 if improved else place.evaluations_since_best + 1
    if improved:
        place.best, place.best_step = score, place.step
    return improved


@torch.no_grad()
def validation_loss(run: Run) -> float | None:
    """L1 with the latent at zero: the mean over all validation frames, each counted once, in any layout.

    Collective: call on every rank. None on all if a signal asks the run to stop.
    """
    cfg, cluster, module = run.cfg, run.cluster, run.parts.module
    assert run.val_loader is not None
    module.eval()
    total = torch.zeros(2, dtype=torch.float64, device=cluster.device)
    for batch in data.to_device(run.val_loader, cluster.device):
        if run.stop.poll():
            return None
        weight = batch.pop("sample_weight").double()
        with dist.autocast(cluster, cfg.mixed_precision, cfg.fsdp):
            per_sample = module(batch)[1]["l1_per_sample"].double()
        total += torch.stack([(per_sample * weight).sum(), weight.sum()])
    loss, count = dist.sum_over_ranks(cluster, total).tolist()
    return loss / count


def whole_policy(run: Run) -> model_act.ACTPolicy:
    """The policy for rollouts: itself, or a copy, gathered and not compiled: rollouts have other shapes.

    Collective: call on every rank.
    """
    parts, cluster = run.parts, run.cluster
    if not cluster.sharded and not run.cfg.compile:
        return parts.policy
    policy = parts.policy
    copy = model_act.ACTPolicy(policy.config, policy.input_features, policy.output_features, policy.stats)
    if parts.peft is not None:
        lora.apply_lora(copy, parts.peft)
    copy.load_state_dict(dist.gathered_state_dict(policy))
    return copy.to(cluster.device)


def out_of_patience(cfg: Config, place: Place) -> bool:
    return cfg.eval.patience is not None and place.evaluations_since_best >= cfg.eval.patience


def save(run: Run, sums: dist.MetricSums, improved: bool) -> None:
    """Write a checkpoint; a failed write is told and the training goes on. Collective: call on every rank."""
    if run.writer is None:
        return
    cfg, cluster, parts, place = run.cfg, run.cluster, run.parts, run.place
    state = {
        "samples_seen": place.samples_seen,
        "seed": cfg.seed,
        "dp_world_size": cluster.world_size,
        "effective_batch_size": cfg.batch_size * cluster.world_size * cfg.gradient_accumulation_steps,
        "parallelism": {"dp_replicate": cluster.dp_replicate, "dp_shard": cluster.dp_shard},
        "unlogged": sums.state_dict(),
        "best": place.best,
        "best_step": place.best_step,
        "evaluations_since_best": place.evaluations_since_best,
        "evaluation_owed": place.evaluation_owed,
        "tracker_run_id": run.log.tracker.run_id,
    }
    adapter = None
    if parts.peft is not None:
        adapter = {
            "state_dict": lora.adapter_state_dict(parts.policy),
            "config": lora.adapter_config(parts.peft, cfg.policy.path),
        }
    try:
        run.writer.poll()
        pause_s = run.writer.save(
            place.step, policy=parts.policy, optimizer=parts.optimizer,
            scheduler=parts.scheduler if cfg.scheduler.name != "none" else None,
            scaler=parts.scaler, state=state, policy_config=parts.policy.config_dict(cluster.device.type),
            run_config=to_dict(cfg), stats=run.train_set.stats, adapter=adapter,
            best=improved,
        )  # fmt: skip
        run.log.say(f"checkpoint {place.step} saved, {pause_s:.2f} s")
    except ckpt.CheckpointError as error:
        run.log.warn(str(error))


def finish_saving(run: Run, start: int) -> int:
    """Wait for a save in the background. Returns 1 if what was trained since `start` is not on disk."""
    if run.writer is None or run.place.step == start:
        return 0
    try:
        run.writer.wait()
    except ckpt.CheckpointError as error:
        run.log.warn(str(error))
    if run.writer.last_published == run.place.step:
        return 0
    run.log.warn(f"the last checkpoint, of step {run.place.step}, is not on disk; see above.")
    return 1


def publish(run: Run) -> None:
    """Upload the last checkpoint. A failure is told, with the command for later; the run stands."""
    cfg, repo_id = run.cfg, run.cfg.push_to_hub
    assert repo_id is not None
    facts = {
        "data set": cfg.dataset.repo_id or cfg.dataset.root or "the embedded two-arm task of sim.py",
        "command": " ".join(["python", *sys.argv]),
        "steps": run.place.step,
        "samples": run.place.samples_seen,
        **run.log.last_values,
    }
    try:
        ckpt.upload_policy(run_dir(cfg) / "checkpoints/last", repo_id, facts)
    except (ValueError, OSError, ImportError) as error:
        run.log.warn(str(error))


class StopOnSignal:
    """SIGTERM, SIGUSR1, Ctrl-C or --max-hours on any rank: all leave the loop after the same step, with a
    checkpoint.

    Build it before set-up's last collective, so that every rank listens when the first goes on to start its
    loader's workers, which may take seconds. torchrun and Slurm signal the whole group: the workers ignore it
    (see data.py), this process must not. Before, a signal ends the process at once: nothing is lost.
    """

    TIME_IS_UP = 1  # votes are signals' numbers, of which this is none that is caught here

    def __init__(self, cluster: dist.Cluster, max_hours: float | None = None) -> None:
        self._end = math.inf if max_hours is None else time.monotonic() + max_hours * 3600
        self._seen = 0
        self._agreed = 0
        self._seen_at = math.inf
        self._is_main = cluster.is_main
        self._vote = dist.StopVote(cluster)
        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        self._before = {number: signal.signal(number, self._note) for number in numbers}

    def restore(self) -> None:
        """Signals act as before again: nothing is left that a checkpoint would save."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: types.FrameType | None) -> None:
        # A second Ctrl-C ends the process at once; torchrun passes the first one on a second time.
        if number == signal.SIGINT and time.monotonic() > self._seen_at + 2:
            raise KeyboardInterrupt
        if not self._seen:
            self._seen, self._seen_at = number, time.monotonic()
            if self._is_main:  # print is not for signal handlers: it may be inside of another print
                os.write(2, f"{signal.Signals(number).name}: stopping after this step\n".encode())

    def is_asked(self) -> bool:
        """Whether this rank has been signalled. The others may not have been: see `poll`."""
        return self._seen > 0

    def poll(self) -> bool:
        """Collective: call on every rank at the same steps."""
        self._agreed = self._vote.poll(self._seen or self.TIME_IS_UP * (time.monotonic() > self._end))
        return self._agreed > 0

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as a shell has it: 143, 138, 130; 0 without a signal."""
        return 128 + self._agreed if self._agreed > self.TIME_IS_UP else 0

    @property
    def reason(self) -> str | None:
        if self._agreed == self.TIME_IS_UP:
            return "--max-hours"
        return signal.Signals(self._agreed).name if self._agreed else None


# ------------------------------------------------------------------------------------------ construction


def check(cfg: Config, cluster: dist.Cluster) -> None:
    """Refuse what cannot work, before any file is written.

    Raises:
        ValueError: one sentence that names the flag, the rule and the way out.
    """

    def need(fine: bool, flag: str, value: Any, rule: str) -> None:
        if not fine:
            raise ValueError(f"--{flag}={value} cannot work: {rule}.")

    for flag in ("steps", "batch_size", "log_freq", "gradient_accumulation_steps"):
        need(getattr(cfg, flag) >= 1, flag.replace("_", "-"), getattr(cfg, flag), "it must be at least 1")
    for flag in ("num_workers", "save_freq", "eval_freq", "seed"):
        value = getattr(cfg, flag)
        need(value is None or value >= 0, flag.replace("_", "-"), value, "it must be 0 or more")
    for flag in ("epochs", "max_hours"):
        value = getattr(cfg, flag)
        fine = value is None or (math.isfinite(value) and value > 0)
        need(fine, flag.replace("_", "-"), value, "it must be a positive number")
    need(cfg.seed < 2**63, "seed", cfg.seed, "it must be below 2^63")
    need(cfg.sim.episodes >= 1, "sim.episodes", cfg.sim.episodes, "the embedded task needs a demonstration")
    act_config(cfg.policy)
    o, s = cfg.optimizer, cfg.scheduler
    for flag in ("lr", "lr_backbone", "weight_decay", "grad_clip_norm"):
        value = getattr(o, flag)
        fine = value is None or (math.isfinite(value) and value >= 0)
        need(fine, f"optimizer.{flag.replace('_', '-')}", value, "it must be a finite number of at least 0")
    need(all(0 <= b < 1 for b in o.betas), "optimizer.betas", o.betas, "each must be at least 0 and below 1")
    need(o.eps > 0, "optimizer.eps", o.eps, "it must be positive")
    need(s.warmup_steps >= 0, "scheduler.warmup-steps", s.warmup_steps, "it must be 0 or more")
    need(s.decay_steps is None or s.decay_steps >= 1, "scheduler.decay-steps", s.decay_steps, "use 1 or more")
    need(
        0 <= s.final_lr_ratio <= 1, "scheduler.final-lr-ratio", s.final_lr_ratio, "it is a share, from 0 to 1"
    )
    if s.name == "cosine" and s.warmup_steps >= (s.decay_steps or cfg.steps):
        raise ValueError(
            f"--scheduler.warmup-steps={s.warmup_steps} leaves no step for the cosine, which ends at "
            f"{s.decay_steps or cfg.steps}; lower it, or raise --scheduler.decay-steps."
        )
    if cfg.compile_mode in ("reduce-overhead", "max-autotune") and cluster.sharded:
        raise ValueError(
            f"--compile-mode={cfg.compile_mode} records CUDA graphs, which cannot hold FSDP's gathers; "
            "use --compile-mode default or max-autotune-no-cudagraphs, or train with DDP."
        )
    if cfg.peft.enabled and cfg.policy.path is None:
        raise ValueError("--peft.method-type adapts a trained policy: say which with --policy.path.")
    if cfg.push_to_hub is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", cfg.push_to_hub):
        raise ValueError(f"--push-to-hub={cfg.push_to_hub} is no repository of the hub; give USER/NAME.")
    if cfg.push_to_hub is not None and not cfg.save_checkpoint:
        raise ValueError(
            "--push-to-hub uploads the last checkpoint, and --no-save-checkpoint writes none; drop one."
        )
    evaluate.check(cfg.eval, prefix="eval.")
    ckpt.check_flags(cfg.checkpoint_format, cluster.sharded, cfg.keep_last)
    dist.check_precision(cluster, cfg.mixed_precision, cfg.fsdp)


def without_effect(cfg: Config, cluster: dist.Cluster, has_validation: bool) -> list[str]:
    """A sentence for each group of flags that was set and does nothing in this mode."""

    def changed(group: Any) -> bool:
        return group != type(group)()

    found = [
        (changed(cfg.ddp) and cluster.mode != "ddp", f"--ddp.* has no effect in mode {cluster.mode}"),
        (changed(cfg.fsdp) and not cluster.sharded, f"--fsdp.* has no effect in mode {cluster.mode}"),
        (cluster.sharded and cfg.fsdp.cpu_offload and cluster.device.type == "cpu",
         "--fsdp.cpu-offload has no effect on a CPU"),
        (cfg.compile_mode is not None and not cfg.compile, "--compile-mode has no effect without --compile"),
        (changed(cfg.scheduler) and cfg.scheduler.name == "none",
         "--scheduler.* has no effect without --scheduler.name linear or cosine"),
        (cfg.eval_freq > 0 and not has_validation and cfg.eval.env is None,
         "--eval-freq has no effect without --dataset.val-split, --dataset.val-episodes or --eval.env"),
        (has_validation and not cfg.eval_freq, "held-out episodes have no effect without --eval-freq"),
        (cfg.eval.env is not None and not cfg.eval_freq, "--eval.env has no effect without --eval-freq"),
        (cfg.eval.env == "sim" and cfg.eval_freq > 0 and not uses_sim(cfg),
         "--eval.env sim rolls out in the embedded task, which this data set need not show"),
        (cluster.world_size == 1 and {"ACCELERATE_USE_CPU", "MASTER_ADDR"} <= set(os.environ),
         "--num_processes of accelerate launch has no effect beside --cpu or on one GPU, where it starts one "
         "process; use torchrun --nproc-per-node, or accelerate's --multi_gpu, which runs on a CPU as well"),
        (cfg.sim != PRESETS[cfg.preset].sim and not uses_sim(cfg),
         "--sim.* has no effect with --dataset.root or --dataset.repo-id"),
        (changed(cfg.peft) and not cfg.peft.enabled,
         "--peft.* has no effect without --peft.method-type LORA"),
        (cfg.profile and cfg.steps < 62, "--profile has no effect: it traces steps 60 to 62"),
        (not cfg.save_checkpoint and cfg.keep_last is not None,
         "--keep-last has no effect without checkpoints"),
        (cluster.device.type != "cuda" and not cfg.tf32, "--no-tf32 has no effect on a CPU"),
    ]  # fmt: skip
    return [sentence for holds, sentence in found if holds]


def with_steps(cfg: Config, cluster: dist.Cluster, num_frames: int) -> Config:
    """`cfg` with the --steps that --epochs come to, rounded up to whole accumulation windows, and checked."""
    if cfg.epochs is None:
        return cfg
    window = cfg.gradient_accumulation_steps
    steps = math.ceil(cfg.epochs * num_frames / (cfg.batch_size * cluster.world_size * window)) * window
    cfg = replace(cfg, steps=steps)
    check(cfg, cluster)
    return cfg


def with_run_dir(cfg: Config, cluster: dist.Cluster, source: Path | None) -> Config:
    """`cfg` with its run directory, which rank 0 names and makes. Collective: call on every rank."""
    now = datetime.now()
    name = cfg.output_dir or f"outputs/train/{now:%Y-%m-%d}/{now:%H-%M-%S}_{cfg.job_name}"
    name = dist.from_main(cluster, name)
    with dist.raise_together(cluster):
        place = Path(name)
        if cluster.is_main:
            if place.exists() and not place.is_dir():
                raise ValueError(f"--output-dir={name} is a file; name a directory.")
            goes_on = cfg.resume == "auto" or (
                source is not None and ckpt.run_dir_of(source) == place.resolve()
            )
            if place.is_dir() and any(p.name != LOCK for p in place.iterdir()) and not goes_on:
                raise ValueError(
                    f"--output-dir={name} holds files already; name another directory, or go on from it "
                    f"with --resume {name}."
                )
            try:
                place.mkdir(parents=True, exist_ok=True)
                probe = place / ".write-test"
                probe.touch()
                probe.unlink()
                metrics = place / "metrics.jsonl"
                if metrics.exists() and not metrics.is_file():
                    raise ValueError(f"{metrics} is no file; move it away, or name another --output-dir.")
            except OSError as error:
                why = f"--output-dir={name} cannot be written ({error.strerror}); name another directory."
                raise ValueError(why) from error
    return replace(cfg, output_dir=name)


def lock_run_dir(place: Path) -> typing.TextIO | None:
    """The run directory's lock, held while the file is open; None where the file system has no locks.

    A run that is just ending, as one that a scheduler starts again, is waited for.
    Raises:
        ValueError: another run writes there.
    """
    try:
        lock = (place / LOCK).open("a+")
        for patience in range(10, -1, -1):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not patience:
                    lock.seek(0)
                    raise ValueError(
                        f"--output-dir={place} is being written by another run ({lock.read().strip()}); wait "
                        "for its end, or name another directory."
                    ) from None
                time.sleep(0.5)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {os.uname().nodename}\n")
        lock.flush()
        return lock
    except OSError:
        return None


def run_dir(cfg: Config) -> Path:
    """The run directory, once `with_run_dir` has decided it."""
    assert cfg.output_dir is not None
    return Path(cfg.output_dir)


def build(cfg: Config, cluster: dist.Cluster, source: Path | None) -> tuple:
    """(training episodes, validation episodes or None, policy with its first weights).

    Collective: call on every rank. The first rank of each node goes ahead and leaves the frame cache and the
    backbone's weights on disk, however long that takes; the others wait outside any collective.
    """
    built: list = []

    def make() -> None:
        if source is None and cfg.policy.path is None and (uses_sim(cfg) or data.camera_keys(cfg.dataset)):
            model_act.pretrained_state(act_config(cfg.policy))  # missing? Said before an hour of decoding
        train_set, val_set = open_data(cfg)
        built.extend([train_set, val_set, build_policy(cfg, train_set, source)])

    dist.rank0_first(cluster, make, per_node=True)
    with dist.raise_together(cluster):
        if not built:
            make()
    return tuple(built)


def uses_sim(cfg: Config) -> bool:
    return cfg.dataset.root is None and cfg.dataset.repo_id is None


def open_data(cfg: Config) -> tuple[data.EpisodeDataset, data.EpisodeDataset | None]:
    """Training and validation episodes: a LeRobot data set, or the embedded task's demonstrations."""
    if not uses_sim(cfg):
        return data.open_dataset(cfg.dataset, cfg.policy.chunk_size)
    height, width = cfg.dataset.image_size or (480, 640)
    shown = sim.Demonstrations(cfg.sim.episodes, cfg.sim.seed, height, width)
    train_set, val_set = data.open_columns(
        cfg.dataset, cfg.policy.chunk_size, shown.columns, list(shown.lengths), shown.fps, shown.cameras
    )
    train_set.notes.insert(0, f"data set: the embedded two-arm task, {cfg.sim.episodes} demonstrations")
    return train_set, val_set


def build_policy(cfg: Config, dataset: data.EpisodeDataset, source: Path | None) -> model_act.ACTPolicy:
    """The policy with a checkpoint's weights, those under --policy.path, or fresh ones from --seed.

    A resumed run keeps the checkpoint's statistics; fine-tuning normalises with the new data set's.
    """
    torch.manual_seed(cfg.seed)
    input_features, output_features = dataset.features
    if source is not None:
        saved, dataset.stats = ckpt.load_policy_files(source)
        own = [note for note in dataset.notes if re.search(r"statistics|--dataset\.min-std", note)]
        dataset.notes = [note for note in dataset.notes if note not in own]
        dataset.notes.append(f"statistics: those of {source}")
        refuse_other_features(saved, input_features, output_features, source)
    policy = model_act.ACTPolicy(act_config(cfg.policy), input_features, output_features, dataset.stats)
    base = cfg.policy.path if source is None or cfg.peft.enabled else source
    if base is None:
        policy.load_pretrained_backbone()
    else:
        if base != source:
            saved, _ = ckpt.load_policy_files(base)
            refuse_other_features(saved, input_features, output_features, base)
            note_other_sizes(saved, dataset, base)
        ckpt.load_weights(base, policy, resume=base == source)
    return policy


def refuse_other_features(saved: dict, inputs: dict, outputs: dict, where: Any) -> None:
    """Raise a sentence that lists every feature in which a checkpoint and the data set differ."""
    wanted = saved["input_features"] | saved["output_features"]
    found = inputs | outputs
    shape = {
        key: [side.get(key, {}).get("shape", "absent") for side in (wanted, found)] for key in wanted | found
    }
    differ = [
        f"{key} ({shape[key][0]} there, {shape[key][1]} here)"
        for key in dict.fromkeys([*wanted, *found])
        if (list(wanted.get(key, {}).get("shape", [])) != list(found.get(key, {}).get("shape", []))
        and wanted.get(key, {}).get("type") != "VISUAL") or (key in wanted) != (key in found)
    ]  # fmt: skip
    if differ:
        raise ValueError(
            f"The policy in {where} was made for other features than this data set has: {'; '.join(differ)}; "
            "choose them with --dataset.state-key, --dataset.action-key and --dataset.image-keys."
        )


def note_other_sizes(saved: dict, dataset: data.EpisodeDataset, where: Any) -> None:
    """A camera of another size works, since ACT is convolutional there, but it is not what was trained."""
    for key, feature in dataset.features[0].items():
        was, now = saved["input_features"].get(key, {}).get("shape"), feature["shape"]
        if feature["type"] == "VISUAL" and was and list(was[-2:]) != list(now[-2:]):
            dataset.notes.append(
                f"warning: the policy in {where} saw {key} at {was[-2]}x{was[-1]}, here it is "
                f"{now[-2]}x{now[-1]}; --dataset.image-size {was[-2]} {was[-1]} makes it the same."
            )


def prepare(cfg: Config, cluster: dist.Cluster, policy: model_act.ACTPolicy) -> Parts:
    """Adapters, compile, shard or wrap, optimizer: in this order, for each needs the one before.

    Compiling in place keeps the state-dict keys as they are; an optimizer built before sharding would step
    dead tensors. Collective: call on every rank.
    """
    peft = lora.apply_lora(policy, cfg.peft) if cfg.peft.enabled else None
    graphs = cfg.compile and compile_regions(cfg, cluster, policy)
    module = dist.parallelize(policy, cluster, cfg.ddp, cfg.fsdp)
    o, p = cfg.optimizer, cfg.policy
    groups = policy.optim_groups(
        lr=p.optimizer_lr if o.lr is None else o.lr,
        lr_backbone=p.optimizer_lr_backbone if o.lr_backbone is None else o.lr_backbone,
        weight_decay=p.optimizer_weight_decay if o.weight_decay is None else o.weight_decay,
    )
    optimizer = torch.optim.AdamW(groups, betas=o.betas, eps=o.eps, fused=True)
    dist.check_optimizer(optimizer, module)
    # With accumulation the schedule, which counts loop steps, rightly moves before the first optimizer step.
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step", category=UserWarning)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(cfg, step))
    scaler = dist.LossScaler(cluster.device) if cfg.mixed_precision == "fp16" else None
    if graphs:
        # A CUDA graph owns the gradients it returns: they are added into our buffers, never taken over.
        for parameter in policy.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return Parts(policy, module, optimizer, scheduler, scaler, bool(graphs), peft)


def compile_regions(cfg: Config, cluster: dist.Cluster, policy: model_act.ACTPolicy) -> bool:
    """Compile in place: the network as one graph; under FSDP each wrap unit, for gathers lie between.

    Returns whether CUDA graphs will be recorded.
    """
    mode = cfg.compile_mode
    if mode is None:
        mode = "reduce-overhead" if cluster.device.type == "cuda" and not cluster.sharded else "default"
    if cluster.sharded:
        regions = list(dist.wrap_units(policy, cfg.fsdp).values())
    else:
        regions = [policy.get_submodule(name) for name in policy.compile_modules]
    for region in regions:
        region.compile(mode=mode, dynamic=False)
    return cluster.device.type == "cuda" and mode in ("reduce-overhead", "max-autotune")


def lr_factor(cfg: Config, step: int) -> float:
    """The learning rate of loop step `step`, as a share of the base rate.

    Source: LeRobot's cosine_decay_with_warmup, shortened to --steps where it would be longer.
    """
    s = cfg.scheduler
    decay, warmup = s.decay_steps or cfg.steps, s.warmup_steps
    if s.name == "none":
        return 1.0
    if s.name == "cosine" and cfg.steps < decay:
        warmup, decay = int(warmup * cfg.steps / decay), cfg.steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if s.name == "linear":
        return 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * min(step, decay) / decay))
    return s.final_lr_ratio + (1 - s.final_lr_ratio) * cosine


def load_place(cfg: Config, cluster: dist.Cluster, parts: Parts, source: Path | None) -> Place:
    """Optimizer, schedule, loss scale and place in the run of the checkpoint. Nothing communicates."""
    if source is None:
        return Place()
    base_lrs = [group["initial_lr"] for group in parts.optimizer.param_groups]
    weight_decays = [group["weight_decay"] for group in parts.optimizer.param_groups]
    if cfg.peft.enabled:
        ckpt.load_weights(source, parts.policy, adapter=lora.adapter_state_dict(parts.policy), resume=True)
    state = ckpt.load_training_state(source, parts.policy, parts.optimizer, None, parts.scaler)
    if state["step"] > cfg.steps:
        raise ValueError(
            f"--steps={cfg.steps} is behind the checkpoint's step {state['step']}; give a larger --steps."
        )
    # The configuration (saved, then flags) is the truth; the schedule, a function of the step, has no state.
    for group, lr, weight_decay in zip(parts.optimizer.param_groups, base_lrs, weight_decays):
        group |= {"initial_lr": lr, "lr": lr * lr_factor(cfg, state["step"]), "weight_decay": weight_decay}
        group |= {"betas": cfg.optimizer.betas, "eps": cfg.optimizer.eps}
    parts.scheduler.base_lrs = base_lrs
    parts.scheduler.last_epoch, parts.scheduler._step_count = state["step"], state["step"] + 1
    parts.scheduler._last_lr = [group["lr"] for group in parts.optimizer.param_groups]
    batch = cfg.batch_size * cluster.world_size * cfg.gradient_accumulation_steps
    if cluster.is_main and state.get("effective_batch_size", batch) != batch:
        was, micro_batches = state["effective_batch_size"], batch // cfg.batch_size
        keeps = f" --batch-size {was // micro_batches} keeps it." if was % micro_batches == 0 else ""
        print(
            f"warning: the effective batch is {batch} samples now and was {was}; the order of the samples "
            f"goes on, the curve is another one.{keeps}",
            file=sys.stderr,
        )
    if isinstance(state.get("best"), float):
        state["best"] = [state["best"]]  # as checkpoints had it before ties were decided
    known = {f.name for f in dataclasses.fields(Place)}
    return Place(**{key: value for key, value in state.items() if key in known})


def checkpoint_writer(cfg: Config, cluster: dist.Cluster) -> ckpt.CheckpointWriter | None:
    """Collective: call on every rank."""
    if not cfg.save_checkpoint:
        return None
    return ckpt.CheckpointWriter(
        run_dir(cfg), checkpoint_format=cfg.checkpoint_format, keep_last=cfg.keep_last,
        async_save=cfg.async_save, sharded=cluster.sharded,
    )  # fmt: skip


def make_loaders(
    cfg: Config, cluster: dist.Cluster, place: Place, train_set: data.EpisodeDataset, val_set: Any
) -> tuple[torch.utils.data.DataLoader, torch.utils.data.DataLoader | None]:
    """Loaders of the training batches from `place` on and of the validation's, if any; none starts yet."""
    train_batches = data.TrainBatches(
        train_set, cfg.seed, cfg.batch_size, cluster.rank, cluster.world_size,
        cfg.gradient_accumulation_steps, cfg.steps, place.step, place.samples_seen,
    )  # fmt: skip
    if val_set is None:
        return make_loader(cfg, cluster, train_batches), None
    val_batches = data.ValBatches(val_set, cfg.batch_size, cluster.rank, cluster.world_size)
    return make_loader(cfg, cluster, train_batches), make_loader(cfg, cluster, val_batches)


def make_loader(cfg: Config, cluster: dist.Cluster, batches: Any) -> torch.utils.data.DataLoader:
    return data.make_loader(batches, workers(cfg, cluster), pin_memory=cluster.device.type == "cuda")


def workers(cfg: Config, cluster: dist.Cluster) -> int:
    """Loader processes of this rank, a thread each: more of them than cores would slow the step down."""
    if cfg.num_workers is not None:
        return cfg.num_workers
    return min(4, max(1, (os.cpu_count() or 1) // cluster.local_world_size))


# ---------------------------------------------------------------------------------------------------- the log


class RunLog:
    """What the run says: console, RUN/metrics.jsonl, tracker. Only rank 0 speaks."""

    def __init__(
        self, cfg: Config, cluster: dist.Cluster, train_set: data.EpisodeDataset, place: Place
    ) -> None:
        self.cfg, self.cluster, self.train_set = cfg, cluster, train_set
        self.tracker = track.start_tracker(
            cfg.tracker, run_dir(cfg), cfg.job_name, to_dict(cfg), place.tracker_run_id, cluster.is_main,
            project=cfg.tracker_project,
        )  # fmt: skip
        self._file = open_metrics(run_dir(cfg) / "metrics.jsonl", place.step) if cluster.is_main else None
        self._logged_before = False  # the first line counts the start of the workers as waiting
        self._mark = self._born = time.perf_counter()
        self._elapsed = self._waited = self._waited_before = 0.0
        self.last_values: dict[str, float] = {}
        self._steps = 0

    def banner(self, parts: Parts, val_set: data.EpisodeDataset | None, place: Place) -> None:
        """Everything that was decided: data, layout, batch, rate, memory, and flags that do nothing."""
        cfg, cluster, train_set = self.cfg, self.cluster, self.train_set
        effective = cfg.batch_size * cluster.world_size * cfg.gradient_accumulation_steps
        steps = cfg.steps - place.step
        samples = steps * cfg.batch_size * cluster.world_size
        trained = sum(p.numel() for p in parts.policy.parameters() if p.requires_grad)
        lrs = ", backbone ".join(
            f"{group['initial_lr']:g}" for group in parts.optimizer.param_groups if group["params"]
        )
        if preset := preset_flags(cfg):
            self.say(f"preset {cfg.preset}: {preset}")
        for line in train_set.notes:
            self.warn(line.removeprefix("warning: ")) if line.startswith("warning:") else self.say(line)
        held_out = f", {val_set.num_episodes} held out" if val_set is not None else ""
        self.say(f"data: {train_set.num_episodes} episodes, {len(train_set):,} frames to train on{held_out}")
        total = sum(p.numel() for p in parts.policy.parameters())
        inputs = ", ".join(parts.policy.input_features)
        origin = f"; weights of {cfg.policy.path}" if cfg.policy.path and place.step == 0 else ""
        self.say(f"policy: {total:,} parameters, {trained:,} trained; inputs {inputs}{origin}")
        self.say(
            f"layout: {cluster.mode}, {cluster.world_size} ranks = dp_replicate {cluster.dp_replicate} x "
            f"dp_shard {cluster.dp_shard}, {cluster.device.type}, precision {cfg.mixed_precision}, "
            f"{'compiled' if cfg.compile else 'eager'}"
        )
        self.say(
            f"batch: {cfg.batch_size} a rank x {cluster.world_size} ranks x "
            f"{cfg.gradient_accumulation_steps} accumulated = {effective} effective; "
            f"{steps:,} {'steps' if place.step == 0 else f'of {cfg.steps:,} steps to go'} = "
            f"{samples:,} samples = {samples / len(train_set):.2f} epochs; "
            f"lr {lrs} (schedule {cfg.scheduler.name}, not scaled)"
        )
        self.say(f"run: {cfg.output_dir}, from step {place.step}, sample {place.samples_seen:,}")
        for sentence in without_effect(cfg, cluster, val_set is not None):
            self.warn(sentence + ".")

    def first_step(self) -> None:
        """Reading the loss of the first step waits for it, so that its time is true, compilation included."""
        if self.cluster.device.type == "cuda":
            torch.cuda.synchronize()
        self.say(f"first step done after {time.perf_counter() - self._born:.1f} s"
                 + (", compilation included" if self.cfg.compile else ""))  # fmt: skip

    def step_done(self, waited_s: float) -> None:
        """Call after each step with the seconds waited for data so far; host time only."""
        now = time.perf_counter()
        self._elapsed, self._mark = self._elapsed + now - self._mark, now
        self._waited, self._waited_before = self._waited + waited_s - self._waited_before, waited_s
        self._steps += 1

    def restart_clock(self, since_start: bool = False) -> None:
        """What happened since the last step or the start (saving, evaluating) does not count as step time."""
        now = time.perf_counter()
        self._born, self._mark = self._born + (now - self._mark if since_start else 0), now

    def write_steps(self, place: Place, sums: dist.MetricSums, lr: float) -> None:
        """The log line and row of the steps since the last one. Collective: call on every rank."""
        cfg, cluster = self.cfg, self.cluster
        if cluster.device.type == "cuda":
            torch.cuda.synchronize()  # the read below would wait all the same; now it is step time
        self.step_done(self._waited_before)
        steps = self._steps - 1
        sums.add_times({"step_s": self._elapsed / steps, "data_s": self._waited / steps})
        values = sums.reduce()
        self._elapsed, self._waited, self._steps = 0.0, 0.0, 0
        epoch = place.samples_seen / len(self.train_set)
        step_s, data_s = values["step_s"], values["data_s"]
        rate = cfg.batch_size * cluster.world_size / step_s
        row = {"step": place.step, "samples": place.samples_seen, "epoch": epoch, "loss": values["loss"],
               "l1_loss": values["l1_loss"], "kld_loss": values.get("kld_loss", 0.0),
               "grad_norm": values["grad_norm"], "lr": lr, "step_s": step_s, "data_s": data_s,
               "samples_per_s": rate}  # fmt: skip
        self._row(row)
        eta = int((cfg.steps - place.step) * step_s)
        self.say(
            f"step {place.step:,}/{cfg.steps:,}  samples {place.samples_seen:,}  epoch {epoch:.2f}  "
            f"loss {row['loss']:.4f}  l1 {row['l1_loss']:.4f}  kld {row['kld_loss']:.4f}  "
            f"grad_norm {row['grad_norm']:.3f}  lr {lr:.2e}  "
            f"step {step_s:.4f} s  data {data_s:.4f} s ({data_s / step_s:.0%})  {rate:.1f} samples/s  "
            f"mem {memory_gb(cluster):.1f} GB  eta {eta // 3600}:{eta // 60 % 60:02d}:{eta % 60:02d}"
        )
        if data_s > 0.2 * step_s and self._logged_before:
            decodes = any(not isinstance(c, data.CachedFrames) for c in self.train_set.cameras.values())
            self.warn(
                f"{data_s / step_s:.0%} of the time is spent waiting for data; raise --num-workers (now "
                f"{workers(cfg, self.cluster)}){' or decode once with --dataset.cache disk' * decodes}.",
                once="data",
            )

        self._logged_before = True

    def write_evaluation(self, place: Place, results: dict[str, float], improved: bool = False) -> None:
        epoch = place.samples_seen / len(self.train_set)
        self._row({"step": place.step, "samples": place.samples_seen, "epoch": epoch, **results})
        values = "  ".join(f"{key} {value:.4f}" for key, value in results.items())
        self.say(f"step {place.step:,}  {values}{'  (the best so far)' * improved}")

    def farewell(self, place: Place, reason: str | None) -> None:
        """How the run ended, and how it goes on."""
        seconds = int(time.perf_counter() - self._born)
        took = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        where = f"; go on with: python train.py --resume {self.cfg.output_dir}"
        if reason is not None:
            where = where if self.cfg.save_checkpoint else ""
            self.say(f"stopped ({reason}) at step {place.step:,} of {self.cfg.steps:,}, after {took}{where}")
        else:
            self.say(f"done: {place.step:,} steps, {took}, {self.cfg.output_dir}")

    def _row(self, row: dict[str, float]) -> None:
        if not math.isfinite(row.get("loss", 0.0)):
            self.warn(
                f"the loss is {row['loss']} at step {row['step']:.0f}; lower --optimizer.lr, or look for "
                "broken rows with: python data.py check --root DIR",
                once="loss",
            )
        self.tracker.log(int(row["step"]), row)
        self.last_values |= {key: row[key] for key in row if key.endswith(("loss", "success_rate"))}
        if self._file is not None:
            try:
                if os.fstat(self._file.fileno()).st_nlink == 0:  # somebody removed the run directory
                    run_dir(self.cfg).mkdir(parents=True, exist_ok=True)
                    self._file = open_metrics(run_dir(self.cfg) / "metrics.jsonl", int(row["step"]))
                    self.warn("metrics.jsonl was removed; a new one begins here.")
                finite = {key: value if math.isfinite(value) else None for key, value in row.items()}
                self._file.write(json.dumps(finite) + "\n")  # JSON has no NaN
                self._file.flush()
            except OSError as error:
                self.warn(
                    f"metrics.jsonl could not be written ({error}); the training goes on.", once="metrics"
                )

    def say(self, line: str) -> None:
        if self.cluster.is_main:
            speak(line, sys.stdout)

    def warn(self, sentence: str, once: str | None = None) -> None:
        """A warning on stderr; with `once`, only the first of that name."""
        said = self.__dict__.setdefault("_said", set())
        if self.cluster.is_main and once not in said:
            speak(f"warning: {sentence}", sys.stderr)
        said.update({once} - {None})

    def finish(self) -> None:
        self.tracker.finish()
        if self._file is not None:
            self._file.close()


def speak(line: str, stream: typing.TextIO) -> None:
    """Print; a console that is gone (a closed terminal, `| head`) or full does not end a run."""
    try:
        print(line, file=stream, flush=True)
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_metrics(path: Path, step: int) -> typing.TextIO:
    """The metrics file, without the rows after `step`, which a resumed run will write again.

    A run that begins where rows of another lie keeps these as metrics.jsonl.before.
    """
    if path.exists() and step == 0 and path.stat().st_size:
        os.replace(path, path.with_suffix(".jsonl.before"))
    if path.exists():
        lines, kept, broken = path.read_bytes().splitlines(keepends=True), [], 0
        for line in lines:
            try:
                kept += [line] if json.loads(line)["step"] <= step and line.endswith(b"\n") else []
                broken += not line.endswith(b"\n")
            except (ValueError, TypeError, KeyError, IndexError):
                broken += 1
        if broken:
            print(
                f"warning: {path}: {broken} of {len(lines)} rows are damaged and left out.", file=sys.stderr
            )
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(b"".join(kept))
        os.replace(temporary, path)
    return path.open("a")


def memory_gb(cluster: dist.Cluster) -> float:
    """Peak memory of this rank: allocated on the GPU, or resident on a CPU."""
    if cluster.device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


class Profiler:
    """--profile: traces of steps 60 to 62, RUN/profile/rankN.json, with a page of what took the time."""

    def __init__(self, cfg: Config, cluster: dist.Cluster, start: int) -> None:
        self._profile = None
        if not cfg.profile or start > 58 or cfg.steps < 62:
            return
        self._directory, self._rank = run_dir(cfg) / "profile", cluster.rank
        self._directory.mkdir(exist_ok=True)
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] * (cluster.device.type == "cuda")
        self._profile = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=58 - start, warmup=1, active=3, repeat=1),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def step(self) -> None:
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
        head = f"steps 60 to 62, rank {self._rank}: {wall:.4f} s a step, {launches / 3:.0f} launches a step"
        if on_gpu and wall:
            head += f", GPU idle {max(0.0, 1 - busy / wall):.0%}"
        (self._directory / f"rank{self._rank}.txt").write_text(
            f"{head}\n\n{averages.table(sort_by=by, row_limit=30)}\n"
        )


# ---------------------------------------------------------------------------------- command line


def parse_command_line(argv: list[str]) -> tuple[Config, Path | None]:
    """The configuration of a command line, and the checkpoint to resume from (None: a fresh start).

    Defaults come, from weak to strong, from the preset, the config.json under --policy.path, and the
    configuration saved in the resumed checkpoint; flags override them all.
    Raises:
        ValueError: one sentence for the user. Flags that nobody knows end in tyro's own message, exit code 2.
    """
    kinds = field_types(Config)
    given = lerobot_flags.split_flags(argv)
    flags = lerobot_flags.translate(given, kinds)
    default = fitted_preset(PRESETS.get(last_value(flags, "preset") or "aloha", Config()), flags)
    path, source = last_value(flags, "policy.path"), None
    if path not in (None, "None"):
        saved_policy, _ = ckpt.load_policy_files(path)
        default = replace(default, policy=with_saved_policy(default.policy, saved_policy, path))
    if {"steps", "epochs"} <= set(flags):
        raise ValueError("--steps and --epochs say the same in two ways; give one of them.")
    if "resume" in flags:
        output_dir, resume = last_value(flags, "output_dir"), last_value(flags, "resume") or "auto"
        if resume == "auto" and output_dir is None:
            raise ValueError("--resume auto looks under --output-dir: name the run directory with it.")
        source = ckpt.resolve_resume(resume, output_dir)
        if source is not None:
            saved, default = resumed_config(source, output_dir, flags)
        elif int(os.environ.get("RANK", 0)) == 0:
            print(f"resume auto: no checkpoint under {output_dir}; a fresh start")
        default = replace(default, resume=resume)
        if (last_value(given, f"{default.tracker}.enable") or "").lower() == "false":
            flags.setdefault("tracker", ["none"])  # --wandb.enable=false, and the saved run had it on
    if "policy.normalization_mapping" in flags:
        # tyro would take single keys only: --policy.normalization-mapping.STATE
        words = flags.pop("policy.normalization_mapping")
        mapping = dict(zip(words[::2], words[1::2]))
        default = replace(default, policy=replace(default.policy, normalization_mapping=mapping))
    if "steps" in flags:
        default = replace(default, epochs=None)
    config = tyro.cli(
        Config,
        args=lerobot_flags.join_flags(flags, kinds),
        default=default,
        description=(__doc__ or "").split("\n\n")[0],
    )
    if source is not None:
        print_changes(saved, config)
    return config, source


def fitted_preset(preset: Config, flags: dict[str, list[str]]) -> Config:
    """The preset without what other flags make senseless: its warm-up is a share of --steps, and it has
    rollouts in the embedded task for the embedded task's data only."""
    steps, scheduler = last_value(flags, "steps") or "", preset.scheduler
    if steps.isdecimal() and scheduler.warmup_steps:
        warmup = min(scheduler.warmup_steps, scheduler.warmup_steps * int(steps) // preset.steps)
        preset = replace(preset, scheduler=replace(scheduler, warmup_steps=warmup))
    if {"dataset.root", "dataset.repo_id"} & set(flags):
        preset = replace(preset, eval=replace(preset.eval, env=None))
    return preset


def preset_flags(cfg: Config) -> str:
    """The flags that a preset other than the first decided, with their values."""
    plain, preset, now = (flat(to_dict(c)) for c in (Config(), PRESETS[cfg.preset], cfg))
    decided = [name for name in now if name != "preset" and preset[name] == now[name] != plain[name]]
    return " ".join(f"--{name.replace('_', '-')} {now[name]}" for name in decided)


def last_value(flags: dict[str, list[str]], name: str) -> str | None:
    values = flags.get(name)
    return values[-1] if values else None


def with_saved_policy(default: PolicyFlags, saved: dict[str, Any], path: str) -> PolicyFlags:
    """The policy of a config.json, as defaults for the flags."""
    names = {f.name for f in dataclasses.fields(model_act.ACTConfig)}
    return replace(default, path=path, **{key: value for key, value in saved.items() if key in names})


def resumed_config(
    source: Path, output_dir: str | None, flags: dict[str, list[str]]
) -> tuple[Config, Config]:
    """The configuration saved in a checkpoint: as it is, and as defaults for the flags.

    The layout is not part of what a run is: saved degrees that do not fit today's processes and flags give
    way to DDP (or one process), and a format of shards, which that cannot write, to safetensors.
    """
    values = ckpt.load_run_config(source)
    saved = config = from_dict(Config, values, PRESETS.get(values.get("preset", "aloha"), Config()))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    given = {name: last_value(flags, f"parallelism.{name}") for name in ("dp_replicate", "dp_shard")}
    sharded = True  # where nothing fits, dist.start says so with all numbers
    for degrees in (config.parallelism, dist.ParallelismConfig()):
        config = replace(config, parallelism=degrees)
        try:
            asked = replace(degrees, **{name: int(value) for name, value in given.items() if value})
            sharded = dist.resolve_degrees(asked, world_size)[1] > 1
            break
        except ValueError:
            continue
    if not sharded and "checkpoint_format" not in flags:
        config = replace(config, checkpoint_format="safetensors")
    return saved, replace(config, output_dir=output_dir or str(ckpt.run_dir_of(source)))


def field_types(config: Any, prefix: str = "") -> dict[str, Any]:
    """{"steps": int, "dataset.root": str | None, ...}: every flag and its type."""
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(config).items():
        found |= (
            field_types(kind, f"{prefix}{name}.") if dataclasses.is_dataclass(kind) else {prefix + name: kind}
        )
    return found


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as JSON has it: nested dicts, lists for tuples."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(kind: type, values: dict[str, Any], default: Any) -> Any:
    """The inverse of `to_dict`; what is absent is `default`'s.

    Raises:
        ValueError: a key that this version does not know.
    """
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(values) - set(hints)):
        raise ValueError(
            f"The saved configuration has keys that this version does not know: {', '.join(unknown)}; "
            "remove them from training_state/run_config.json."
        )
    changes = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            value = from_dict(hints[name], value, getattr(default, name))
        changes[name] = tuple(value) if isinstance(value, list) else value
    return replace(default, **changes)


def act_config(flags: PolicyFlags) -> model_act.ACTConfig:
    names = [f.name for f in dataclasses.fields(model_act.ACTConfig)]
    return model_act.ACTConfig(**{name: getattr(flags, name) for name in names})


def print_changes(saved: Config, now: Config) -> None:
    """Each flag that differs from the resumed run's, on rank 0."""
    before, after = flat(to_dict(saved)), flat(to_dict(now))
    differ = [name for name in after if before.get(name) != after[name] and name != "resume"]
    if int(os.environ.get("RANK", 0)) != 0:
        return
    for name in differ:
        print(f"resume: --{name.replace('_', '-')} {before.get(name)} -> {after[name]}")
    kept = [name for name in differ if name in ("dataset.use_imagenet_stats", "dataset.min_std")]
    if kept:
        print(
            f"warning: --{', --'.join(kept).replace('_', '-')} has no effect on a resumed run, which keeps "
            "its statistics.",
            file=sys.stderr,
        )
    decides_samples = re.compile(r"seed$|sim\.|dataset\.(?!cache|tolerance)")
    other = [name for name in differ if name not in kept and decides_samples.match(name)]
    if other:
        copy = " (unless it is a copy of the same data set)" * (other == ["dataset.root"])
        print(
            f"warning: with another --{', --'.join(other).replace('_', '-')} other samples follow than the "
            f"run would have had{copy}; to begin a new run with its weights use --policy.path.",
            file=sys.stderr,
        )


def flat(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


if __name__ == "__main__":
    # torchrun's last words are then the traceback of the rank that failed first.
    sys.exit(elastic.record(main)())
