"""Train ACT (Action Chunking Transformer, Zhao et al. 2023) on LeRobot datasets, in plain PyTorch.

    python train.py --preset demo                                      # a CPU: minutes
    python train.py --dataset.root DIR --compile                       # one GPU
    torchrun --nproc-per-node=8 train.py --dataset.root DIR --compile  # eight: the same curve
    python train.py --resume outputs/train/.../checkpoints/last        # any hardware

Without a data flag the built-in two-arm task (extras/sim.py) is the dataset. A run directory holds

    metrics.jsonl         one object per log step     report.html   curves, after each evaluation
    checkpoints/005000/   LeRobot's tree (ckpt.py)    checkpoints/last -> 005000, and best -> ...

This file puts the parts together and owns the loop: model_act.py is the policy, data.py makes its
batches, dist.py knows ranks, sharding and precision, ckpt.py writes and reads checkpoints.
Words: a loop step is one micro-batch per rank; --steps, the frequencies and the schedule count these. A
window is the loop steps that share one optimizer step. A piece of it is one rank's micro-batch.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.elastic.multiprocessing.errors as elastic
from torch import Tensor, nn

import ckpt
import data
import dist
import evaluate
import model_act
from extras import assembly, checks, datasets, flags, lerobot_ckpt, lora, report, rundir, runlog, saving, sim
from extras.pretrained import load_backbone, pretrained_state


@dataclass
class Learner:
    """What a step trains. It calls `module`: `policy` itself (single, FSDP) or its DDP wrapper."""

    policy: model_act.ACTPolicy
    module: nn.Module
    optimizer: torch.optim.Optimizer
    base_lrs: list[float]
    """Learning rate per parameter group; the rate of a step is its share of these (`lr_factor`)."""
    scaler: dist.LossScaler | None
    keep_grads: bool = False
    """Gradients live in buffers of our own that are zeroed, not freed: CUDA graphs need it."""
    peft: lora.PeftConfig | None = None
    """Resolved targets of the adapters, if the run trains adapters."""


@dataclass
class Progress:
    """Where the run stands: all that a checkpoint keeps besides weights, optimizer and loss scale.

    Learning rate, sample order and noise are functions of it, and which evaluation was the best
    follows from metrics.jsonl: none of them is stored.
    """

    step: int = 0
    samples_seen: int = 0
    unlogged: dict[str, Any] = field(default_factory=dict)
    """Sums of the steps since the last log line."""
    tracker_run_id: str | None = None


@dataclass
class Run:
    """Everything that `set_up` has made, for the loop."""

    cfg: Config
    cluster: dist.Cluster
    learner: Learner
    progress: Progress
    train_set: data.EpisodeDataset
    val_set: data.EpisodeDataset | None
    batches: data.TrainBatches
    train_loader: torch.utils.data.DataLoader
    val_loader: torch.utils.data.DataLoader | None
    writer: ckpt.CheckpointWriter | None
    log: runlog.RunLog
    stop: rundir.StopOnSignal
    lock: Any
    """Held open to keep other runs out of the run directory."""
    saved_step: int | None = None
    """Step of the newest checkpoint that was begun; one that stands is not written twice."""

    @property
    def evaluates(self) -> bool:
        return self.cfg.eval_freq > 0 and (self.val_loader is not None or self.cfg.eval.env is not None)


def main(argv: list[str] | None = None) -> int:
    """Run a command line to its end. Returns the exit code: 0, 1, or 128 + a signal's number."""
    try:
        run = set_up(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not flags.is_user_error(error):
            raise  # a bug keeps its traceback
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # the sentence is the same on every rank
            print(error, file=sys.stderr)
        return 1
    code = train(run)
    # Leave the group before rank 0 uploads: the others would wait in here, up to the time-out.
    dist.finish(run.cluster)
    if run.cfg.push_to_hub is not None and code == 0 and run.cluster.is_main:
        saving.publish(run)
    run.log.close()
    if run.lock is not None:
        run.lock.close()
    return code


def set_up(argv: list[str]) -> Run:
    """From a command line to all that the loop needs. Collective: call on every rank.

    Whatever can be refused is refused in a `raise_together`: the error of one rank becomes that of
    all, which would otherwise wait for it in the next collective. So its body holds no collective.
    """
    cfg, source = parse_command_line(argv)
    cluster = dist.start(cfg.device, cfg.parallelism)
    dist.set_process(cfg.tf32, compiled=cfg.compile)
    with dist.raise_together(cluster):  # before anything is read or written
        checks.check(cfg, cluster)
        evaluate.check_environment(cfg.eval.env)
    is_new = cfg.output_dir is None or not Path(cfg.output_dir).exists()
    cfg = rundir.with_run_dir(cfg, cluster, source)
    with rundir.removed_if_refused(rundir.run_dir(cfg) if is_new else None):
        with dist.raise_together(cluster):
            lock = rundir.lock_run_dir(rundir.run_dir(cfg)) if cluster.is_main else None
        train_set, val_set, policy, notes = build(cfg, cluster, source)
        with dist.raise_together(cluster):
            cfg = checks.with_steps(cfg, cluster, len(train_set))
        learner = prepare(cfg, cluster, policy)
        with dist.raise_together(cluster):
            progress, more_notes = load_progress(cfg, cluster, learner, source)
        # "Best" and patience follow from the earlier rows, of which all ranks need one version.
        history = runlog.earlier_evaluations(cluster, source, progress.step)
        with dist.raise_together(cluster):
            log = runlog.RunLog(cfg, cluster, train_set, progress, history, assembly.workers(cfg, cluster))
        writer = assembly.checkpoint_writer(cfg, cluster)
        # Signal handlers, on all ranks before any of them starts its loader's workers.
        stop = rundir.StopOnSignal(cluster, cfg.max_hours)
        with dist.raise_together(cluster):
            loaders = assembly.make_loaders(cfg, cluster, progress, train_set, val_set)
    log.banner(learner, val_set, notes + more_notes, progress, PRESETS[cfg.preset])
    return Run(cfg, cluster, learner, progress, train_set, val_set, *loaders, writer, log, stop, lock)


def build_policy(cfg: Config, train_set: data.EpisodeDataset, source: Path | None) -> model_act.ACTPolicy:
    """The policy with a checkpoint's weights, those under --policy.path, or fresh ones from --seed.

    Its statistics are those of the run: a resumed run keeps the checkpoint's, fine-tuning normalises
    with the new dataset's.
    """
    torch.manual_seed(cfg.seed)  # the only use of a global generator: initial weights
    inputs, outputs = train_set.features
    stats = train_set.stats
    if source is not None:
        saved, stats = lerobot_ckpt.load_policy_files(source)
        checks.refuse_other_features(saved, inputs, outputs, source)
    policy = model_act.ACTPolicy(flags.act_config(cfg.policy), inputs, outputs, stats)
    # Adapters are loaded on their base, once they exist: in `load_progress`.
    base = cfg.policy.path if source is None or cfg.peft.enabled else source
    if base is None:
        load_backbone(policy)
        return policy
    if base != source:
        saved, _ = lerobot_ckpt.load_policy_files(base)
        checks.refuse_other_features(saved, inputs, outputs, base)
    lerobot_ckpt.load_weights(base, policy, resume=base == source)
    return policy


def prepare(cfg: Config, cluster: dist.Cluster, policy: model_act.ACTPolicy) -> Learner:
    """Adapters, compile, shard or wrap, optimizer: in this order, for each needs the one before.

    Compiling in place keeps the state-dict keys as they are; an optimizer built before sharding would
    step dead tensors. Collective: call on every rank.
    """
    peft = lora.apply_lora(policy, cfg.peft) if cfg.peft.enabled else None
    keeps_grads = cfg.compile and assembly.compile_regions(cfg, cluster, policy)
    module = dist.parallelize(policy, cluster, cfg.ddp, cfg.fsdp)
    o, p = cfg.optimizer, cfg.policy
    groups = policy.optim_groups(
        lr=p.optimizer_lr if o.lr is None else o.lr,
        lr_backbone=p.optimizer_lr_backbone if o.lr_backbone is None else o.lr_backbone,
        weight_decay=p.optimizer_weight_decay if o.weight_decay is None else o.weight_decay,
    )
    base_lrs = [group["lr"] for group in groups]
    if cfg.scheduler.name != "none":
        groups = [group | {"initial_lr": group["lr"]} for group in groups]  # as LeRobot's reader expects
    optimizer = torch.optim.AdamW(groups, betas=o.betas, eps=o.eps, fused=True)
    dist.check_optimizer(optimizer, module)
    scaler = dist.LossScaler(cluster.device) if cfg.mixed_precision == "fp16" else None
    if keeps_grads:
        # A CUDA graph owns the gradients it returns: they are added into buffers of our own.
        for parameter in policy.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    return Learner(policy, module, optimizer, base_lrs, scaler, keeps_grads, peft)


def load_progress(
    cfg: Config, cluster: dist.Cluster, learner: Learner, source: Path | None
) -> tuple[Progress, list[data.Note]]:
    """Optimizer, loss scale and progress of the checkpoint. Nothing communicates."""
    if source is None:
        return Progress(), []
    notes: list[data.Note] = []
    if cfg.peft.enabled:  # the base is loaded; the adapter exists since `prepare`
        adapter = lora.adapter_state_dict(learner.policy)
        lerobot_ckpt.load_weights(source, learner.policy, adapter=adapter, resume=True)
    groups = learner.optimizer.param_groups
    settings = [{key: group[key] for key in group if key != "params"} for group in groups]
    state = lerobot_ckpt.load_training_state(source, learner.policy, learner.optimizer)
    checks.refuse_fewer_steps(cfg, state["step"])
    # Hyper-parameters are the configuration's (saved, then flags), not those of the file.
    for group, configured in zip(groups, settings):
        group.pop("initial_lr", None)
        group |= configured
    if learner.scaler is not None:
        saved_scale = source / ckpt.TRAINING / "scaler_state.json"
        if saved_scale.is_file():
            learner.scaler.load_state_dict(ckpt.read_json(saved_scale))
        else:
            notes = [data.Note("warning", f"{source} has no loss scale; it starts from its initial value.")]
    notes += checks.notes_on_batch(cfg, cluster, state)
    known = {f.name for f in fields(Progress)}
    return Progress(**{key: value for key, value in state.items() if key in known}), notes


def train(run: Run) -> int:
    """Train to --steps and return the exit code. Collective: call on every rank."""
    cfg, cluster, learner, progress, log = run.cfg, run.cluster, run.learner, run.progress, run.log
    loader = data.to_device(run.train_loader, cluster.device)
    sums = dist.MetricSums(cluster, progress.unlogged)
    profiler = runlog.Profiler(cfg, cluster, progress.step)
    start = run.saved_step = progress.step  # what was loaded needs no checkpoint
    before_the_first_step(run, sums)
    # Evaluation may have left the module in eval mode: no dropout, no sampled latent.
    learner.module.train()
    log.restart_clock()
    # A window is the loop steps (micro-batches) of one optimizer step. What falls due inside one is
    # done at its end: between two windows no gradient is pending, so that a checkpoint needs none.
    for window in run.batches.windows():
        for step in window:
            train_step(cfg, cluster, learner, next(loader), window, step, sums)
            log.step_done(loader.waited_s)
            profiler.step_done()
        progress.step, progress.samples_seen = window.stop, run.batches.position(window.stop)
        if window.start == start:
            log.first_step_done()
            # Only now: a first step may compile for minutes, on one rank longer than on another.
            dist.shorten_timeout(cluster)
        last = progress.step == cfg.steps
        if due(window, cfg.log_freq, last):
            log.write_steps(progress, sums, learner.base_lrs[0] * lr_factor(cfg, window.stop - 1))
        if due(window, cfg.save_freq, last):
            save(run, sums)  # before the evaluation, in which the run may die
        if run.evaluates and due(window, cfg.eval_freq, last):
            evaluate_now(run, sums)
        if run.stop.poll() or log.out_of_patience():
            break
        log.restart_clock()
    save(run, sums)
    code = saving.finish(run, start)
    log.ended(progress, run.stop.reason or ("no better evaluation" if log.out_of_patience() else None))
    if not run.stop.exit_code:
        run.stop.restore()
    return code or run.stop.exit_code


def due(window: range, every: int, last: bool = False) -> bool:
    """Whether a multiple of `every` steps ends in this window; the run's last always counts."""
    return last or (every > 0 and window.stop // every > window.start // every)


def train_step(
    cfg: Config,
    cluster: dist.Cluster,
    learner: Learner,
    batch: dict[str, Tensor],
    window: range,
    step: int,
    sums: dist.MetricSums,
) -> None:
    """One micro-batch, and after the last of its window the optimizer's step. Collective.

    Nothing is read back from the device: what is to be logged is added to `sums`, on the device.

    Args:
        batch: as data.py describes it, on the device.
        window: the loop steps that share an optimizer step; `step` is one of them.
    """
    last_of_window = step + 1 == window.stop
    if learner.keep_grads:
        torch.compiler.cudagraph_mark_step_begin()  # its import costs an eager run a second
    # Forward and backward both inside: DDP decides in forward whether this backward will reduce.
    with dist.accumulate(learner.module, last_of_window):
        with dist.autocast(cluster, cfg.mixed_precision, cfg.fsdp):
            loss, loss_terms = learner.module(batch)
        # Each piece's L1 is scaled by num_valid: the pieces' mean is the undivided batch's loss.
        dist.backward(loss / len(window), learner.scaler)
    sums.add({"loss": loss, **loss_terms})
    if not last_of_window:
        return
    clip = cfg.optimizer.grad_clip_norm or float("inf")
    norm = dist.clip_grad_norm_(learner.module, clip, learner.scaler)
    # fp16: the norm of a step that overflowed is not finite and not stepped; it does not count.
    sums.add({"grad_norm": norm}, 1.0 if learner.scaler is None else 1.0 - learner.scaler.found_inf)
    set_lr(learner, lr_factor(cfg, step))
    dist.optimizer_step(learner.optimizer, learner.scaler)
    learner.optimizer.zero_grad(set_to_none=not learner.keep_grads)


def set_lr(learner: Learner, factor: float) -> None:
    for group, base_lr in zip(learner.optimizer.param_groups, learner.base_lrs):
        group["lr"] = base_lr * factor


def lr_factor(cfg: Config, step: int) -> float:
    """The learning rate of a loop step, as a share of the base rate: a function of it, no state.

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


def evaluate_now(run: Run, sums: dist.MetricSums) -> None:
    """Validation loss and rollouts, as far as the run has them. `best` leads to the highest success
    rate, of equal ones to the lowest validation loss (runlog.score), of all rows in metrics.jsonl.

    A signal aborts it, without a row: the missing row tells the resumed run to repeat it.
    Collective: call on every rank; each takes its share, all get the result.
    """
    cfg, cluster, progress = run.cfg, run.cluster, run.progress
    directory = rundir.run_dir(cfg)
    results: dict[str, float] = {}
    if run.val_loader is not None:
        loss = validation_loss(run)
        if loss is None:
            return
        results["val_l1_loss"] = loss
    learner = run.learner
    policy = evaluate.whole_policy(learner.policy, cluster, cfg.compile, learner.peft)
    samples = evaluate.spread_out(run.val_set or run.train_set)
    with dist.extended_timeout(cluster):  # rollouts outlast any step
        rollouts = evaluate.evaluate_in_training(
            policy, cfg.eval, cluster, directory, progress.step, samples, run.stop.is_asked
        )
    learner.module.train()
    if rollouts is None:
        return
    improved = run.log.write_evaluation(progress, results | rollouts)
    with dist.raise_together(cluster):
        if cluster.is_main:
            report.write_report(directory, directory.name)  # after the row, so that it shows it
    if improved:
        save(run, sums, best=True)


@torch.no_grad()
def validation_loss(run: Run) -> float | None:
    """L1 with the latent at zero: the mean over all validation frames (in training: over valid steps).

    Collective: call on every rank. None on all if a signal asks the run to stop.
    """
    cfg, cluster, module = run.cfg, run.cluster, run.learner.module
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
    total_loss, count = dist.sum_over_ranks(cluster, total).tolist()
    return total_loss / count


def save(run: Run, sums: dist.MetricSums, best: bool = False) -> None:
    """Write a checkpoint of this step, unless it is written; with `best`, point `best` at it.
    A failed write is a warning, and the training continues. Collective: call on every rank.
    """
    writer, learner, progress = run.writer, run.learner, run.progress
    if writer is None or (run.saved_step == progress.step and not best):
        return
    try:
        writer.poll()
        if best and run.saved_step == progress.step and writer.mark_best(progress.step):
            return  # it is on disk, and only the pointer moves
        set_lr(learner, lr_factor(run.cfg, progress.step))  # the next step's
        state = saving.checkpoint_state(run, sums)
        files = saving.checkpoint_files(run, lr_factor(run.cfg, progress.step))
        adapter = None if learner.peft is None else lora.adapter_state_dict(learner.policy)
        content: dict[str, Any] = {"state": state, "files": files, "adapter": adapter}
        seconds = writer.save(progress.step, learner.policy, learner.optimizer, best=best, **content)
        run.saved_step = progress.step
        run.log.info(f"checkpoint {progress.step} saved, {seconds:.2f} s")
    except ckpt.CheckpointError as error:
        run.log.warn(str(error))


# ------------------------------------------------------------------------------------------- end of the spine


def parse_command_line(argv: list[str]) -> tuple[Config, Path | None]:
    """The configuration, and the checkpoint to resume from (None: a fresh start)."""
    return flags.parse_command_line(Config, PRESETS, argv, (__doc__ or "").split("\n\n")[0])


def build(
    cfg: Config, cluster: dist.Cluster, source: Path | None
) -> tuple[data.EpisodeDataset, data.EpisodeDataset | None, model_act.ACTPolicy, list[data.Note]]:
    """Training and validation episodes, the policy with its first weights, and what to tell.

    Collective: call on every rank. The first rank of each node goes ahead and leaves the frame cache
    and the backbone's weights on disk, however long it takes; the others wait outside any collective.
    """
    built: list[Any] = []

    def make() -> None:
        if source is None and cfg.policy.path is None and (cfg.uses_sim or datasets.camera_keys(cfg.dataset)):
            # If the weights cannot be had, this is told before an hour of decoding.
            pretrained_state(flags.act_config(cfg.policy))
        train_set, val_set, notes = assembly.open_data(cfg)
        policy = build_policy(cfg, train_set, source)
        if source is not None:  # whose statistics are used
            notes = [note for note in notes if note.about != "statistics"]
        built.extend([train_set, val_set, policy, notes + checks.notes_on_weights(cfg, train_set, source)])

    dist.rank0_first(cluster, make, per_node=True)
    with dist.raise_together(cluster):
        if not built:
            make()
    return tuple(built)  # type: ignore[return-value]


def before_the_first_step(run: Run, sums: dist.MetricSums) -> None:
    """A first validation, or the evaluation that a signal broke off."""
    cfg, progress, log = run.cfg, run.progress, run.log
    if progress.step >= cfg.steps:
        log.info(f"nothing to do: the run is at step {cfg.steps:,} of {cfg.steps:,}; raise --steps")
    if not run.evaluates:
        return
    if progress.step == 0:
        if run.val_set is not None:
            log.info(f"validation of {len(run.val_set):,} frames before the first step ...")
            loss = validation_loss(run)
            if loss is not None:
                log.write_evaluation(progress, {"val_l1_loss": loss})  # what training starts from
        log.restart_clock(since_start=True)
        return
    if run.writer is not None and log.best_step is not None:
        # The pointer follows the log, also after a kill between the two.
        run.writer.mark_best(log.best_step)
    window = range(max(0, progress.step - cfg.gradient_accumulation_steps), progress.step)
    if due(window, cfg.eval_freq, progress.step >= cfg.steps) and not log.evaluated(progress.step):
        evaluate_now(run, sums)


@dataclass(frozen=True)
class PolicyFlags(model_act.ACTConfig):
    path: str | None = None
    """Start from the weights in this folder (ours or LeRobot's); its config.json gives defaults."""


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float | None = None
    """AdamW's learning rate of everything but the backbone. None: --policy.optimizer-lr."""
    lr_backbone: float | None = None
    """Learning rate of the vision backbone. None: --policy.optimizer-lr-backbone; 0 freezes it."""
    weight_decay: float | None = None
    """Decoupled weight decay. None: --policy.optimizer-weight-decay."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's beta1 and beta2."""
    eps: float = 1e-8
    """Added to AdamW's denominator."""
    grad_clip_norm: float = 10.0
    """Largest global gradient norm; a larger gradient is scaled down to it. 0: no clipping."""


@dataclass(frozen=True)
class SchedulerConfig:
    name: Literal["none", "linear", "cosine"] = "none"
    """none: constant. linear: warm-up, then constant. cosine: warm-up, then down to the floor."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly (linear, cosine)."""
    decay_steps: int | None = None
    """Step at which the cosine reaches its floor. None: --steps. Longer than --steps: the whole
    schedule is shortened to fit, as LeRobot does."""
    final_lr_ratio: float = 0.0
    """The cosine's floor, as a share of the learning rate."""


CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True)
class Config:
    preset: Literal["aloha", "demo"] = "aloha"
    """A named set of defaults that the other flags override. aloha: the paper's policy on 480x640
    images. demo: a small policy that learns the built-in task on a CPU in minutes."""
    output_dir: str | None = None
    """Run directory. None: outputs/train/DATE/TIME_JOB, decided by rank 0. One that holds files is
    refused without --resume."""
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
    """Loader processes per rank; 0: the training process loads. None: 4, or a rank's cores if fewer."""
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
    """Write checkpoints in the background, from a copy in host memory: the loop waits for the copy."""
    resume: str | None = None
    """Resume from a run directory, checkpoints/, a step, last, pretrained_model/, train_config.json;
    `auto`: the newest whole checkpoint under --output-dir, or a fresh start."""
    eval_freq: int = 0
    """Steps between evaluations: validation loss where there are validation episodes, rollouts where
    there is an environment (--eval.env). 0: off."""
    compile: bool = False
    """Compile the network with torch.compile."""
    compile_mode: CompileMode | None = None
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
    sim: sim.SimConfig = field(default_factory=sim.SimConfig)
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

    @property
    def uses_sim(self) -> bool:
        return self.dataset.root is None and self.dataset.repo_id is None


DEMO = Config(
    preset="demo", steps=900, batch_size=32, num_workers=1, log_freq=50, save_freq=0, eval_freq=300,
    sim=sim.SimConfig(episodes=200), scheduler=SchedulerConfig(name="cosine", warmup_steps=50),
    # Nothing is pretrained here, so the images are normalised with their own statistics.
    dataset=data.DatasetConfig(image_size=(60, 80), val_split=0.02, cache="off", use_imagenet_stats=False),
    policy=PolicyFlags(
        pretrained_backbone_weights=None, n_action_steps=50, dim_model=128, n_heads=4, dim_feedforward=256,
        n_encoder_layers=2, n_vae_encoder_layers=1, dropout=0.0,
        optimizer_lr=3e-4, optimizer_lr_backbone=3e-4,
    ),
    eval=evaluate.EvalConfig(env="sim"),
)  # fmt: skip
PRESETS = {"aloha": Config(), "demo": DEMO}


if __name__ == "__main__":
    # torchrun's last words are then the traceback of the rank that failed first.
    sys.exit(elastic.record(main)())
