"""What a checkpoint of a run holds beside weights and optimizer, the end of saving, and the upload."""

import sys
from typing import Any

import ckpt
import dist
from extras import flags, hub, lerobot_ckpt, lora
from extras.rundir import run_dir


def checkpoint_state(run: Any, sums: dist.MetricSums) -> dict[str, Any]:
    """Content of training_step.json. Collective: call on every rank.

    Args:
        run: train.Run.
    """
    cfg, cluster, progress = run.cfg, run.cluster, run.progress
    return {
        **lerobot_ckpt.step_state(flags.to_dict(cfg), cluster.world_size, degrees(cluster)),
        "samples_seen": progress.samples_seen,
        "seed": cfg.seed,
        "effective_batch_size": cfg.batch_size * cluster.world_size * cfg.gradient_accumulation_steps,
        "unlogged": sums.state_dict(),
        "tracker_run_id": run.log.tracker.run_id,
    }


def checkpoint_files(run: Any, lr_factor: float) -> dict[str, Any]:
    """LeRobot's files, and the configuration.

    Args:
        lr_factor: of the next step.
    """
    cfg, learner, policy = run.cfg, run.learner, run.learner.policy
    run_config = flags.to_dict(cfg)
    adapter_config = None
    if learner.peft is not None:
        adapter_config = lora.adapter_config(learner.peft, cfg.policy.path)
    files = lerobot_ckpt.checkpoint_files(
        lerobot_ckpt.config_dict(policy, run.cluster.device.type),
        run_config,
        degrees(run.cluster),
        stats=policy.stats,
        step=run.progress.step,
        base_lrs=learner.base_lrs,
        lr_factor=lr_factor,
        adapter_config=adapter_config,
    )
    files[f"{ckpt.TRAINING}/run_config.json"] = run_config
    if learner.scaler is not None:
        files[f"{ckpt.TRAINING}/scaler_state.json"] = learner.scaler.state_dict()
    return files


def degrees(cluster: dist.Cluster) -> dict[str, int]:
    return {"dp_replicate": cluster.dp_replicate, "dp_shard": cluster.dp_shard}


def finish(run: Any, start: int) -> int:
    """Wait for a save in the background. Returns 1 if what was trained since `start` is not on disk."""
    if run.writer is None or run.progress.step == start:
        return 0
    try:
        run.writer.wait()
    except ckpt.CheckpointError as error:
        run.log.warn(str(error))
    if run.writer.last_published == run.progress.step:
        return 0
    run.log.warn(f"the last checkpoint, of step {run.progress.step}, is not on disk; see above.")
    return 1


def publish(run: Any) -> None:
    """Upload the last checkpoint. A failure is told, with the command for later; the run stands."""
    cfg = run.cfg
    facts = {
        "dataset": cfg.dataset.repo_id or cfg.dataset.root or "the built-in two-arm task",
        "command": " ".join(["python", *sys.argv]),
        "steps": run.progress.step,
        "samples": run.progress.samples_seen,
        **run.log.last_values,
    }
    try:
        hub.upload_policy(run_dir(cfg) / "checkpoints/last", cfg.push_to_hub, facts)
    except hub.UserError as error:
        run.log.warn(str(error))
