"""Parts of a set-up that a reader of train.py can take on trust: data, compiled regions, loaders, writer."""

import math
import os
import shutil
from typing import Any

import torch

import ckpt
import data
import dist
import model_act
from extras import datasets
from extras.rundir import run_dir


def open_data(cfg: Any) -> tuple[data.EpisodeDataset, data.EpisodeDataset | None, list[data.Note]]:
    """Training and validation episodes: a LeRobot dataset, or the built-in demonstrations."""
    if cfg.uses_sim:
        return datasets.open_demonstrations(cfg.dataset, cfg.sim, cfg.policy.chunk_size)
    return datasets.open_dataset(cfg.dataset, cfg.policy.chunk_size)


def compile_regions(cfg: Any, cluster: dist.Cluster, policy: model_act.ACTPolicy) -> bool:
    """Compile in place: the network as one graph; under FSDP each wrap unit, between gathers.

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


def checkpoint_writer(cfg: Any, cluster: dist.Cluster) -> ckpt.CheckpointWriter | None:
    """Collective: call on every rank."""
    if not cfg.save_checkpoint:
        return None
    return ckpt.CheckpointWriter(
        run_dir(cfg), checkpoint_format=cfg.checkpoint_format, keep_last=cfg.keep_last,
        async_save=cfg.async_save, sharded=cluster.sharded, digits=max(6, len(str(cfg.steps))),
    )  # fmt: skip


def make_loaders(
    cfg: Any,
    cluster: dist.Cluster,
    progress: Any,
    train_set: data.EpisodeDataset,
    val_set: data.EpisodeDataset | None,
) -> tuple[data.TrainBatches, torch.utils.data.DataLoader, torch.utils.data.DataLoader | None]:
    """Batches from `progress` on, their loader, and the validation's; none starts yet."""
    share = (cfg.batch_size, cluster.rank, cluster.world_size)
    steps = (cfg.gradient_accumulation_steps, cfg.steps, progress.step, progress.samples_seen)
    batches = data.TrainBatches(train_set, cfg.seed, *share, *steps)
    loader = make_loader(cfg, cluster, batches)
    if val_set is None:
        return batches, loader, None
    return batches, loader, make_loader(cfg, cluster, data.ValBatches(val_set, *share))


def make_loader(
    cfg: Any, cluster: dist.Cluster, batches: data.TrainBatches | data.ValBatches
) -> torch.utils.data.DataLoader:
    num_workers = workers(cfg, cluster)
    if num_workers > 0:
        check_shared_memory(batches, num_workers)
    return data.make_loader(batches, num_workers, pin_memory=cluster.device.type == "cuda")


def workers(cfg: Any, cluster: dist.Cluster) -> int:
    """Loader processes of this rank, one thread each: more than cores would slow the step."""
    if cfg.num_workers is not None:
        return cfg.num_workers
    return min(4, max(1, (os.cpu_count() or 1) // cluster.local_world_size))


def check_shared_memory(
    batches: data.TrainBatches | data.ValBatches, num_workers: int, prefetch_factor: int = 2
) -> None:
    """Refuse more batches in flight than /dev/shm holds: a worker would end in a bus error."""
    frame_bytes = sum(3 * math.prod(source.shape) for source in batches.dataset.cameras.values())
    need = num_workers * prefetch_factor * batches.batch_size * frame_bytes
    need *= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else need
    if need > free:
        raise data.DatasetError(
            f"--num-workers={num_workers} needs {need / 1e6:.1f} MB of /dev/shm on this node for its "
            f"batches, and {free / 1e6:.1f} MB are free; use fewer workers, or more of it "
            "(docker run --shm-size=8g)."
        )
