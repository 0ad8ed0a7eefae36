"""Closed loop: does the policy work? Rollouts, success rate, and pictures of what it does.

    python evaluate.py --checkpoint outputs/train/.../checkpoints/last          # the embedded task
    python evaluate.py --checkpoint DIR --env aloha-transfer-cube --video DIR   # pip install gym-aloha

Any checkpoint of ours or of LeRobot's will do. Written under --output: episodes.json (an object an episode),
rollout.png, chunk.svg, report.html; with --video one mp4 (PyAV) or gif (Pillow) an episode.

All episodes run in lock-step. The policy is asked in batches of one fixed size, and only when its chunks run
out; an image is rendered only when it is asked. With temporal ensembling that is at every step. An episode's
result does not depend on which episodes run beside it, so ranks can share them.

The first part of the file rolls out, the second draws: curves, chunks, contact sheet, report.html.

Shapes: E episodes, B batch, S chunk, A action.
"""

import base64
import html
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import ckpt
import dist
import model_act
import sim

STATE, ACTION = "observation.state", "action"
ENVIRONMENTS = ("sim", "aloha-transfer-cube", "aloha-insertion")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What is rolled out, and how the policy is asked."""

    env: Literal["sim", "aloha-transfer-cube", "aloha-insertion"] | None = None
    """sim: the embedded task. aloha-*: MuJoCo's bimanual tasks, with gym-aloha. None: no rollouts."""
    episodes: int = 50
    """Rollouts of one evaluation, over all ranks."""
    seed: int = 0
    """Of the first episode; each further one counts up. For aloha-* these are the seeds of gym-aloha's reset:
    choose others than the demonstrations had. The embedded task never repeats a demonstration."""
    n_action_steps: int | None = None
    """Actions of a chunk to execute before the policy is asked again. None: the policy's own."""
    temporal_ensemble_coeff: float | None = None
    """Ask at every step and average the chunks, older ones weighing exp(-coeff * age) (the paper: 0.01).
    None: as the policy's configuration says."""
    batch_size: int = 10
    """Observations that go through the policy at once; only speed and memory depend on it."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig(RolloutConfig):
    """Evaluation in training, every --eval-freq steps."""

    patience: int | None = None
    """Stop the training after so many evaluations in a row without a new best. None: never."""


@dataclass(frozen=True, kw_only=True)
class Command(RolloutConfig):
    """Roll a checkpoint out and report its success rate."""

    checkpoint: Path
    """Run directory, step directory, `last`, or pretrained_model/; ours or LeRobot's, of any format."""
    env: Literal["sim", "aloha-transfer-cube", "aloha-insertion"] = "sim"  # type: ignore[assignment]
    """sim: the embedded task. aloha-*: MuJoCo's bimanual tasks, with gym-aloha installed."""
    output: Path | None = None
    """Directory of the results. None: outputs/eval/DATE/TIME_ENV."""
    video: Path | None = None
    """Directory of one video for each of the first --filmed episodes. None: no videos."""
    filmed: int = 10
    """Episodes to film with --video."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""


@dataclass
class Episode:
    """What became of one rollout."""

    seed: int
    success: bool
    steps: int
    """Control steps until success, or until the episode was over."""
    asked: int
    """How often the policy was asked for a chunk, each time with a new image."""
    details: dict[str, Any] = field(default_factory=dict)
    """What else the environment says, and "error" if the episode was broken off."""
    chunks: np.ndarray | None = field(default=None, repr=False)
    """(asked, S, A) predicted chunks, at most the first 50."""
    frames: list[np.ndarray] = field(default_factory=list, repr=False)
    """Film, if asked for."""

    def row(self) -> dict[str, Any]:
        """For a JSON file."""
        row = {"seed": self.seed, "success": self.success, "steps": self.steps, "asked": self.asked}
        return row | self.details


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0, or 1 after a sentence on stderr."""
    import tyro

    cfg = tyro.cli(Command, args=argv, description=(__doc__ or "").split("\n\nAll episodes")[0])
    try:
        check(cfg)
        run(cfg)
    except (ValueError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def run(cfg: Command) -> None:
    """Roll a checkpoint out, print how it did, and leave files, pictures and videos."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(best if cfg.device == "auto" else cfg.device)
    found = ckpt.policy_dir(cfg.checkpoint)
    print(f"checkpoint: {found}")
    config, stats = ckpt.load_policy_files(cfg.checkpoint)
    policy = model_act.ACTPolicy.from_config_dict(config, stats)
    ckpt.load_weights(cfg.checkpoint, policy)
    policy.to(device).eval()
    now = datetime.now()
    output = cfg.output or Path(f"outputs/eval/{now:%Y-%m-%d}/{now:%H-%M-%S}_{cfg.env}")
    output.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    episodes = evaluate_share(policy, cfg, device, filmed=1 if cfg.video is None else cfg.filmed)
    results = summarize(episodes)
    print(f"{sentence(cfg, results)}, {time.monotonic() - began:.0f} s")
    origin: dict[str, Any] = {"checkpoint": str(found)}
    if found.parent.name.isdecimal():
        origin["step"] = int(found.parent.name)
    if cfg.video is not None:
        for episode in episodes[: cfg.filmed]:
            name = f"{cfg.env}_{episode.seed:04d}_{'success' if episode.success else 'failure'}"
            film = write_video(cfg.video / name, episode.frames, film_fps(cfg.env))
            episode.details["video"] = str(film.resolve())
        print(f"videos: {cfg.video}")
    samples = expert_samples(policy, cfg.env)
    spread, warning = write_evaluation(output, cfg, episodes, results, policy, samples, origin)
    if spread is not None:
        print(spread.table())
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"results: {output / 'episodes.json'}, {write_report(output, str(found))}")


# --------------------------------------------------------------------------------------------------- rollouts


def check(cfg: RolloutConfig, prefix: str = "") -> None:
    """Refuse what cannot work, before any work. `prefix` comes before the flags' names: "eval." or nothing.

    Raises:
        ValueError: a flag is out of range.
        ImportError: the environment's package is missing; names the pip line.
    """
    for flag in ("episodes", "batch_size", "n_action_steps"):
        value = getattr(cfg, flag)
        if value is not None and value < 1:
            raise ValueError(
                f"--{prefix}{flag.replace('_', '-')}={value} cannot work: it must be at least 1."
            )
    if cfg.seed < 0:
        raise ValueError(f"--{prefix}seed={cfg.seed} cannot work: seeds of episodes are 0 or more.")
    if cfg.temporal_ensemble_coeff is not None and (cfg.n_action_steps or 1) != 1:
        raise ValueError(
            f"--{prefix}temporal-ensemble-coeff={cfg.temporal_ensemble_coeff} asks the policy at every step; "
            f"drop --{prefix}n-action-steps={cfg.n_action_steps}."
        )
    if cfg.env is not None and cfg.env.startswith("aloha"):
        _aloha(cfg.env)


def evaluate_in_training(
    policy: model_act.ACTPolicy,
    cfg: EvalConfig,
    cluster: dist.Cluster,
    run_dir: str | Path,
    step: int,
    samples: dict[str, Tensor] | None = None,
    interrupted: Callable[[], bool] = bool,
) -> dict[str, float] | None:
    """Roll out where there is an environment; leave pictures and report.html in the run directory (rank 0).

    Collective: call on every rank; each rolls out its share, all get the result.

    Args:
        policy: whole on every rank (a gathered copy where the training's is sharded).
        samples: a batch of data set frames with their true actions, to compare predictions with (see
            `spread_out`); None: the expert's where there is one.
        interrupted: asked between control steps; true on any rank breaks the evaluation off on all.
    Returns:
        None if it was broken off; else
        "success_rate" with its 95 % interval "success_low" and "success_high", "episode_steps", and what else
        the environment counts; nothing without an environment.
    """
    with dist.raise_together(cluster):
        share = evaluate_share(
            policy, cfg, cluster.device, cluster.rank, cluster.world_size, filmed=1, interrupted=interrupted
        )
    if dist.any_rank(cluster, interrupted()):
        return None
    if cluster.world_size > 1:
        shares: list[Any] = [None] * cluster.world_size
        torch.distributed.all_gather_object(shares, [replace(e, frames=[]) for e in share])
        film = [e.frames for e in share[:1]]
        share = sorted((e for part in shares for e in part), key=lambda e: e.seed)
        for episode, frames in zip(share, film if cluster.is_main else []):
            episode.frames = frames  # rank 0 has the first seed
    results = summarize(share)
    with dist.raise_together(cluster):
        if cluster.is_main:
            if share:
                print(f"step {step}: {sentence(cfg, results)}", flush=True)
            if samples is None:
                samples = expert_samples(policy, cfg.env)
            directory = Path(run_dir) / "eval" / f"{step:06d}"
            _, warning = write_evaluation(directory, cfg, share, results, policy, samples, {"step": step})
            if warning:
                print(f"warning: step {step}: {warning}", file=sys.stderr, flush=True)
            write_report(Path(run_dir), Path(run_dir).name)
    return {k: v for k, v in results.items() if isinstance(v, float)}


def evaluate_share(
    policy: model_act.ACTPolicy,
    cfg: RolloutConfig,
    device,
    rank: int = 0,
    world_size: int = 1,
    filmed: int = 0,
    interrupted: Callable[[], bool] = bool,
) -> list[Episode]:
    """This rank's episodes: every world_size-th seed, none without --env. Nothing is communicated."""
    if cfg.env is None:
        return []
    seeds = range(cfg.seed, cfg.seed + cfg.episodes)[rank::world_size]
    return rollout(
        policy, cfg.env, seeds, device, n_action_steps=cfg.n_action_steps,
        temporal_ensemble_coeff=cfg.temporal_ensemble_coeff, batch_size=cfg.batch_size,
        filmed=filmed, progress=rank == 0, interrupted=interrupted,
    )  # fmt: skip


def rollout(
    policy: model_act.ACTPolicy,
    env_name: str,
    seeds: Iterable[int],
    device: torch.device | str = "cpu",
    *,
    n_action_steps: int | None = None,
    temporal_ensemble_coeff: float | None = None,
    batch_size: int = 10,
    filmed: int = 0,
    progress: bool = False,
    interrupted: Callable[[], bool] = bool,
) -> list[Episode]:
    """Roll the policy out once per seed, all in lock-step. Its train or eval mode is left as it was.

    Args:
        policy: anything with config, input_features, output_features and predict_action_chunk(batch).
        n_action_steps, temporal_ensemble_coeff: None takes the policy's own.
        filmed: keep the frames of so many episodes, the first ones.
        interrupted: asked before each control step; true ends all episodes where they are.
    Raises:
        ValueError: the policy was made for other features than the environment has.
        ImportError: the environment's package is missing.
    """
    config, seeds = policy.config, list(seeds)
    coeff = temporal_ensemble_coeff
    if coeff is None and n_action_steps is None:
        coeff = config.temporal_ensemble_coeff
    horizon = 1 if coeff is not None else (n_action_steps or config.n_action_steps)
    if horizon > config.chunk_size:
        rule = f"it is more than the policy's chunk of {config.chunk_size}"
        raise ValueError(f"--n-action-steps={horizon} cannot work: {rule}.")
    camera, (height, width) = _camera_of(policy, env_name)
    ensembler = None if coeff is None else model_act.ACTTemporalEnsembler(coeff, config.chunk_size)
    envs = [make_env(env_name) for _ in seeds]
    states = np.stack([env.reset(seed) for env, seed in zip(envs, seeds)]) if seeds else np.zeros((0, 14))
    episodes = [Episode(seed, False, 0, 0) for seed in seeds]
    chunks: list[list[np.ndarray]] = [[] for _ in seeds]
    plans = np.zeros((len(seeds), horizon, sim.ACTION_DIM))
    live, bar = np.arange(len(seeds)), _Bar(env_name, len(seeds), progress)
    was_training = policy.training
    policy.eval()
    step = 0
    while len(live) and not interrupted():
        if step % horizon == 0:
            batch = {STATE: torch.from_numpy(states[live])} if STATE in policy.input_features else {}
            if camera is not None:
                images = np.stack([envs[i].render(height, width) for i in live])
                batch[camera] = torch.from_numpy(images).permute(0, 3, 1, 2)
            predicted = predict(policy, batch, batch_size, device)  # (E, S, A)
            if ensembler is not None:
                plans[live, 0] = ensembler.update(predicted).numpy()
            else:
                plans[live] = predicted[:, :horizon].numpy()
            for i, chunk in zip(live, predicted.numpy()):
                episodes[i].asked += 1
                chunks[i] += [chunk] if len(chunks[i]) < 50 else []
        over = np.zeros(len(live), bool)
        for place, i in enumerate(live):
            env, episode = envs[i], episodes[i]
            if i < filmed and step % env.film_stride == 0:
                episode.frames.append(env.render(*env.film_size))
            action = plans[i, step % horizon]
            if np.isfinite(action).all():
                states[i] = env.step(action)
            else:
                episode.details["error"] = f"the action of step {step} is not finite"
            episode.success, episode.steps = env.success, step + 1
            over[place] = env.over or step + 1 == env.max_steps or "error" in episode.details
            if over[place]:
                if i < filmed:
                    episode.frames.append(env.render(*env.film_size))
                episode.details |= env.details()
                episode.chunks = np.stack(chunks[i])
        if over.any():
            live = live[~over]
            if ensembler is not None and ensembler.actions is not None:
                ensembler.actions = ensembler.actions[torch.from_numpy(~over)]
        step += 1
        bar.show(step, episodes, len(live))
    policy.train(was_training)
    return episodes


def predict(policy: model_act.ACTPolicy, batch: dict[str, Tensor], size: int, device) -> Tensor:
    """(E, S, A) float32 chunks on the CPU, for E observations asked `size` at a time.

    The last batch is filled up with repeats: at one batch shape, what comes out for an observation does not
    depend, to the last bit, on how many others there are.
    """
    count = len(next(iter(batch.values())))
    parts = []
    for start in range(0, count, size):
        rows = torch.arange(start, start + size).clamp(max=count - 1)
        part = {key: value[rows].to(device) for key, value in batch.items()}
        parts.append(policy.predict_action_chunk(part).float().cpu()[: count - start])
    return torch.cat(parts)


def _camera_of(policy: model_act.ACTPolicy, env_name: str) -> tuple[str | None, tuple[int, int]]:
    """(the policy's camera, its image size), or a ValueError on why the policy cannot act there."""
    cameras = {k: f["shape"] for k, f in policy.input_features.items() if f["type"] == "VISUAL"}
    problems = []
    if len(cameras) > 1 or any(shape[0] != 3 for shape in cameras.values()):
        problems.append(
            f"it takes the cameras {', '.join(cameras)}, and there is one, in colour (ask its own robot)"
        )
    for key, feature in (policy.input_features | policy.output_features).items():
        if key in (STATE, ACTION) and list(feature["shape"]) != [14]:
            problems.append(f"its {key} has the shape {feature['shape']}, and there it is [14]")
        elif key not in (STATE, ACTION, *cameras):
            problems.append(f"it takes {key}, which is not given")
    if problems:
        raise ValueError(f"The policy cannot act in --env {env_name}: {'; '.join(problems)}.")
    for key, shape in cameras.items():
        return key, (shape[1], shape[2])
    return None, (0, 0)


def summarize(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Success rate with its 95 % interval, mean length, and the rate of every yes-or-no detail."""
    if not episodes:
        return {}
    count = len(episodes)
    won = sum(e.success for e in episodes)
    low, high = wilson(won, count)
    results: dict[str, Any] = {
        "success_rate": won / count, "success_low": low, "success_high": high,
        "episode_steps": float(np.mean([e.steps for e in episodes])), "successes": won, "episodes": count,
    }  # fmt: skip
    flags = {k for e in episodes for k, v in e.details.items() if isinstance(v, bool)}
    return results | {
        f"{k}_rate": sum(bool(e.details.get(k)) for e in episodes) / count for k in sorted(flags)
    }


def wilson(successes: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a proportion, by default the 95 % one. Source: Wilson 1927."""
    if count == 0:
        return 0.0, 1.0
    share = successes / count
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    low, high = ((middle + sign * half) / (1 + z * z / count) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def sentence(cfg: RolloutConfig, results: dict[str, Any]) -> str:
    text = (
        f"{cfg.env}: success {results['successes']} of {results['episodes']} = {results['success_rate']:.0%} "
        f"(95 % interval {results['success_low']:.0%} to {results['success_high']:.0%})"
    )
    for key in sorted(k for k in results if k.endswith("_rate") and k != "success_rate"):
        text += f", {key.removesuffix('_rate').replace('_', ' ')} {results[key]:.0%}"
    return text + f", mean length {results['episode_steps']:.0f} steps"


class _Bar:
    """Progress on a terminal's stderr; nothing elsewhere."""

    def __init__(self, name: str, count: int, shown: bool) -> None:
        self.name, self.count, self.shown = name, count, shown and sys.stderr.isatty()
        self.began = self.drawn = time.monotonic()

    def show(self, step: int, episodes: list[Episode], live: int) -> None:
        now = time.monotonic()
        if self.shown and (now - self.drawn > 0.2 or not live):
            self.drawn = now
            won = sum(e.success for e in episodes)
            text = f"{self.name}: step {step}, {self.count - live}/{self.count} done, {won} succeeded, "
            print(f"\r{text}{now - self.began:.0f} s ", end="" if live else "\n", file=sys.stderr, flush=True)


# ---- does it look? -----------------------------------------------------------------------------------------


def expert_samples(
    policy: model_act.ACTPolicy, env_name: str | None, count: int = 24
) -> dict[str, Tensor] | None:
    """A batch of the embedded task's expert with its true actions, from scenes of its own; None elsewhere."""
    if env_name != "sim":
        return None
    camera, (height, width) = _camera_of(policy, env_name)
    rows: list[dict[str, np.ndarray]] = []
    for number in range(count):
        shown = sim.expert_episode(2**31, number)
        length, at = len(shown["action"]), 5 * number
        steps = at + np.arange(policy.config.chunk_size)
        row = {STATE: shown["state"][at], ACTION: shown["action"][np.minimum(steps, length - 1)]}
        row["action_is_pad"] = steps >= length
        if camera is not None:
            row[camera] = sim.render(shown["scene"][at], height, width).transpose(2, 0, 1)
        rows.append(row)
    return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}


def spread_out(dataset: Any, count: int = 24) -> dict[str, Tensor]:
    """A batch of `count` frames at even distances in a data.EpisodeDataset, with their true actions."""
    return dataset.get_batch(np.linspace(0, len(dataset) - 1, count).round().astype(np.int64))


@dataclass
class Spread:
    """How much predictions vary over observations: standard deviations per joint (A,), in data units."""

    predicted: np.ndarray
    target: np.ndarray
    from_images: np.ndarray | None
    """Standard deviation that is left when only the images change, the state staying what it is."""

    def flat_joints(self) -> list[int]:
        """Joints whose predictions vary by less than a tenth of what the targets do, if those move at all."""
        moves = self.target > 0.01 * self.target.max()
        return np.flatnonzero(moves & (self.predicted < 0.1 * self.target)).tolist()

    def warning(self) -> str | None:
        flat = self.flat_joints()
        if flat:
            return (
                f"the predictions hardly vary over observations (less than 10 % of the targets' spread) "
                f"in {len(flat)} of {len(self.target)} joints: {', '.join(map(str, flat))}; the policy does "
                "much the same whatever it sees. Train longer, or check that cameras, states and actions "
                "belong together."
            )
        if self.from_images is not None and (self.from_images < 0.02 * self.target).all():
            return (
                "the predictions do not depend on the images (less than 2 % of the targets' spread in every "
                "joint); the policy acts on the state alone. Train longer, or check the cameras."
            )
        return None

    def table(self) -> str:
        lines = ["joint  predicted  target   ratio"]
        lines[0] += "" if self.from_images is None else "  by image alone"
        for joint, (ours, target) in enumerate(zip(self.predicted, self.target)):
            image = "" if self.from_images is None else f" {self.from_images[joint]:11.4f}"
            lines.append(f"{joint:5d} {ours:10.4f} {target:7.4f} {ours / max(target, 1e-12):7.0%}{image}")
        return "\n".join(lines)


def prediction_spread(
    policy: model_act.ACTPolicy, samples: dict[str, Tensor], batch_size: int = 10
) -> Spread:
    """Spread of the predictions over a batch of data set frames, beside that of the true actions.

    Args:
        samples: a batch with "action" (B, S, A) and "action_is_pad", best from B different episodes.
    """
    device = next(policy.parameters()).device
    inputs = {key: samples[key] for key in policy.input_features}
    predicted = predict(policy, inputs, batch_size, device).numpy()
    kept = np.where(samples["action_is_pad"].numpy()[..., None], np.nan, 1.0)  # (B, S, 1)
    columns = (~np.isnan(kept)).sum(axis=(0, 2)) > 1  # chunk steps with two targets at least

    def spread(chunks: np.ndarray) -> np.ndarray:
        return np.nanmean(np.nanstd((chunks * kept)[:, columns], axis=0), axis=0)

    from_images = None
    cameras = [key for key, f in policy.input_features.items() if f["type"] == "VISUAL"]
    if cameras:
        first = {k: v if k in cameras else v[:1].expand_as(v) for k, v in inputs.items()}
        from_images = predict(policy, first, batch_size, device).numpy().std(axis=0).mean(axis=0)
    return Spread(spread(predicted), spread(samples[ACTION].numpy()), from_images)


def rollout_spread(policy: model_act.ACTPolicy, episodes: Sequence[Episode]) -> Spread | None:
    """The same from rollouts, where no true actions are known: beside their spread over the training set."""
    std = (policy.stats or {}).get(ACTION, {}).get("std")
    chunks = [e.chunks for e in episodes if e.chunks is not None]
    if std is None or not chunks:
        return None
    return Spread(np.concatenate(chunks).std(axis=0).mean(axis=0), std.double().cpu().numpy(), None)


# ---- environments ------------------------------------------------------------------------------------------


class SimEnvironment(sim.TransferEnv):
    """The embedded task; an episode is over at success, which lasts."""

    max_steps, film_stride, film_size = sim.MAX_STEPS, 2, (240, 320)

    @property
    def over(self) -> bool:
        return self.success

    def details(self) -> dict[str, Any]:
        return {"handed_over": self.carriers == [1, 0]}


class AlohaEnvironment:
    """A bimanual MuJoCo task of gym-aloha, rendered when asked: gym-aloha renders 3 images at every step.

    Success is the environment's own: the highest reward at any step. For the transfer that is a mere touch by
    the receiving hand, so the rollout goes on, and "held_at_end" says whether that hand alone has the cube.
    """

    max_steps, film_stride, film_size, over = 400, 4, (480, 640), False

    def __init__(self, name: str) -> None:
        self.name = name
        tasks, suite_env, physics = _aloha(name)
        self.tasks, self.camera = tasks, physics
        task = tasks.TransferCubeTask() if name == "aloha-transfer-cube" else tasks.InsertionTask()
        task.get_observation = lambda physics: {"qpos": task.get_qpos(physics)}
        # One model and one renderer for all episodes: each would have memory and a GL context of its own.
        self.physics = physics.copy(share_model=True)
        self.env = suite_env(self.physics, task, float("inf"), control_timestep=0.02, flat_observation=False)

    @property
    def success(self) -> bool:
        return self.highest == 4

    def reset(self, seed: int) -> np.ndarray:
        from gym_aloha.utils import sample_box_pose, sample_insertion_pose

        # gym-aloha hands the pose over in a module's global.
        if self.name == "aloha-transfer-cube":
            self.tasks.BOX_POSE[0] = sample_box_pose(seed)
        else:
            self.tasks.BOX_POSE[0] = np.concatenate(sample_insertion_pose(seed))
        self.reward = self.highest = 0
        return self.env.reset().observation["qpos"].astype(np.float32)

    def step(self, action: np.ndarray) -> np.ndarray:
        """Targets are joint angles; gym-aloha's action_space says -1 to 1, and clipping would break them."""
        timestep = self.env.step(action)
        self.reward = int(timestep.reward)
        self.highest = max(self.highest, self.reward)
        return timestep.observation["qpos"].astype(np.float32)

    def render(self, height: int, width: int) -> np.ndarray:
        self.camera.data.qpos[:] = self.physics.data.qpos
        self.camera.forward()
        frame = self.camera.render(height=480, width=640, camera_id="top")
        if (height, width) == (480, 640):
            return frame
        image = torch.from_numpy(frame.copy()).permute(2, 0, 1)[None]
        image = torch.nn.functional.interpolate(image, (height, width), mode="bilinear", antialias=True)
        return image[0].permute(1, 2, 0).numpy()

    def details(self) -> dict[str, Any]:
        held = self.reward == 4
        if self.name == "aloha-transfer-cube":
            height = float(self.physics.named.data.xpos["box", "z"])
            held = held and not self._touches("vx300s_right/") and height > 0.1
        return {"highest_reward": self.highest, "held_at_end": held}

    def _touches(self, hand: str) -> bool:
        name_of = self.physics.model.id2name
        for contact in self.physics.data.contact[: self.physics.data.ncon]:
            names = name_of(int(contact.geom1), "geom"), name_of(int(contact.geom2), "geom")
            if "red_box" in names and any(name.startswith(hand) for name in names):
                return True
        return False


@lru_cache(maxsize=2)
def _aloha(name: str) -> tuple[Any, Any, Any]:
    """gym-aloha's tasks, dm_control's Environment, and the loaded model."""
    os.environ.setdefault("MUJOCO_GL", "egl")  # read when mujoco is imported; there is no display
    # And with it Triton: loaded after EGL's driver, which has another LLVM, it crashes.
    import torch._dynamo  # noqa: F401

    try:
        from dm_control import mujoco
        from dm_control.rl.control import Environment
        from gym_aloha.constants import ASSETS_DIR
        from gym_aloha.tasks import sim as tasks
    except ImportError as error:
        raise ImportError(
            f"--env {name} needs MuJoCo's bimanual tasks ({error}): "
            "pip install gym-aloha==0.1.5 mujoco==3.7.0 dm-control==1.0.39"
        ) from None
    file = {"aloha-transfer-cube": "transfer_cube", "aloha-insertion": "insertion"}[name]
    return tasks, Environment, mujoco.Physics.from_xml_path(str(ASSETS_DIR / f"bimanual_viperx_{file}.xml"))


def make_env(name: str) -> Any:
    """reset(seed) and step(action) give the (14,) float32 state, render(H, W) the image."""
    return SimEnvironment() if name == "sim" else AlohaEnvironment(name)


def film_fps(name: str) -> float:
    return 50 / (SimEnvironment if name == "sim" else AlohaEnvironment).film_stride


def write_video(path: Path, frames: Sequence[np.ndarray], fps: float) -> Path:
    """Frames (H, W, 3) uint8 as path.mp4 where PyAV is installed, else path.gif. Returns the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        import av
    except ImportError:
        return _write_gif(path.with_name(path.name + ".gif"), frames, fps)
    file = path.with_name(path.name + ".mp4")
    height, width = (n - n % 2 for n in frames[0].shape[:2])  # yuv420p halves both
    with av.open(str(file), "w") as container:
        stream = container.add_stream("libx264", rate=round(fps), options={"crf": "20", "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            image = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame[:height, :width]), format="rgb24")
            container.mux(stream.encode(image))
        container.mux(stream.encode())
    return file


def _write_gif(file: Path, frames: Sequence[np.ndarray], fps: float) -> Path:
    try:
        from PIL import Image
    except ImportError:
        raise ImportError(
            "--video needs PyAV (mp4) or Pillow (gif): pip install av, or pip install pillow"
        ) from None
    images = [Image.fromarray(frame).quantize(64) for frame in frames]
    images[0].save(file, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0)
    return file


# ----------------------------------------------------------------------------------------------------- report


def write_evaluation(
    directory: Path,
    cfg: RolloutConfig,
    episodes: Sequence[Episode],
    results: dict[str, Any],
    policy: model_act.ACTPolicy,
    samples: dict[str, Tensor] | None,
    origin: dict[str, Any],
) -> tuple[Spread | None, str | None]:
    """episodes.json, rollout.png, chunk.svg and spread.txt. Returns the spread, and a warning."""
    directory.mkdir(parents=True, exist_ok=True)
    spread = prediction_spread(policy, samples) if samples is not None else rollout_spread(policy, episodes)
    warning = spread.warning() if spread is not None else None
    if spread is not None:
        (directory / "spread.txt").write_text(spread.table() + "\n")
    content = origin | results | {
        "config": asdict(cfg), "warning": warning, "rows": [episode.row() for episode in episodes]
    }  # fmt: skip
    (directory / "episodes.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
    film = next((e for e in episodes if e.frames), None)
    if film is not None:
        write_contact_sheet(directory / "rollout.png", film.frames)
    if samples is not None:
        inputs = {key: samples[key] for key in policy.input_features}
        predicted = predict(policy, inputs, 10, next(policy.parameters()).device).numpy()
        shown = len(predicted) // 3
        true = np.where(samples["action_is_pad"][shown, :, None], np.nan, samples[ACTION][shown])
        (directory / "chunk.svg").write_text(chunk_svg(predicted[shown], true))
    return spread, warning


def write_report(run_dir: Path, title: str) -> Path:
    """curves.svg from metrics.jsonl, and report.html: curves, every evaluation so far, pictures of the last.

    The page needs no other file and no network. Evaluations are those in run_dir and run_dir/eval/*.
    """
    found = [run_dir / "episodes.json", *sorted(run_dir.glob("eval/*/episodes.json"))]
    evaluations = [(path.parent, json.loads(path.read_text())) for path in found if path.is_file()]
    rolled_out = [(path, content) for path, content in evaluations if content["rows"]]
    curves = curves_svg(read_metrics(run_dir / "metrics.jsonl"), [content for _, content in rolled_out])
    if curves:
        (run_dir / "curves.svg").write_text(curves)
    parts = [f"<h1>{html.escape(title)}</h1>"]
    if curves:
        parts += ["<h2>Curves</h2>", _inline(curves)]
    if rolled_out:
        parts += ["<h2>Rollouts</h2>", _evaluation_table(run_dir, rolled_out)]
    if evaluations:
        directory, last = evaluations[-1]
        if last.get("warning"):
            parts.append(f'<p class="warning">Warning: {html.escape(last["warning"])}</p>')
        sheet, chunk, spread = (directory / name for name in ("rollout.png", "chunk.svg", "spread.txt"))
        if sheet.is_file():
            first = last["rows"][0]
            outcome = f"{'success' if first['success'] else 'failure'} after {first['steps']} steps"
            data = base64.b64encode(sheet.read_bytes()).decode()
            parts.append(
                f"<h2>The last evaluation's first rollout</h2><p>Seed {first['seed']}, {outcome}.</p>"
            )
            parts.append(
                f'<img alt="frames of a rollout, in order of time" src="data:image/png;base64,{data}">'
            )
        films = [row for row in last["rows"] if row.get("video")]
        if films:
            links = [
                f'<a href="{html.escape(os.path.relpath(row["video"], run_dir))}">seed {row["seed"]}, '
                f"{'success' if row['success'] else 'failure'}</a>"
                for row in films
            ]
            parts.append(f"<p>Videos: {'; '.join(links)}.</p>")
        if chunk.is_file():
            parts += [
                "<h2>A predicted chunk</h2>",
                "<p>For one frame of a demonstration, beside what the demonstrator did (true). One panel a "
                "joint, control steps along, in the data's units.</p>",
            ]
            parts.append(_inline(chunk.read_text()))
        if spread.is_file():
            parts.append("<h2>How much predictions vary over observations</h2>")
            parts.append(
                "<p>Standard deviations of the predicted and of the true actions over demonstrations, and "
                "their ratio: a policy that does the same whatever it sees has one near 0. By image alone: "
                "what is left of the first when the images change and the state does not.</p>"
            )
            parts.append(f"<pre>{html.escape(spread.read_text())}</pre>")
    path = run_dir / "report.html"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
    path.write_text(f"{head}<style>{CSS}</style><body>{''.join(parts)}</body></html>\n")
    return path


CSS = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 980px; margin: 2em auto; padding: 0 1em; color: #222 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em } img, svg { max-width: 100%; height: auto }
table { border-collapse: collapse }
td, th { padding: .25em .9em .25em 0; text-align: left; border-bottom: 1px solid #ddd }
pre { overflow-x: auto; font-size: 13px; line-height: 1.35 }
.warning { background: #fff2cc; padding: .6em 1em }
"""
COLOURS = ("#2864b0", "#c8641e", "#3c8c46", "#8246a0")


def _evaluation_table(run_dir: Path, evaluations: list[tuple[Path, dict]]) -> str:
    """One row an evaluation; a column that no evaluation has anything to say in is left out."""
    rows = []
    for directory, content in evaluations:
        links = [
            f'<a href="{(directory / name).relative_to(run_dir)}">{name}</a>'
            for name in ("episodes.json", "rollout.png", "chunk.svg")
            if (directory / name).is_file()
        ]
        held = content.get("held_at_end_rate")
        rows.append({
            "step": content.get("step", ""),
            "environment": html.escape(str(content["config"]["env"])),
            "success": f"{content['successes']} of {content['episodes']} = {content['success_rate']:.0%}",
            "95 % interval": f"{content['success_low']:.0%} to {content['success_high']:.0%}",
            "held at end": "" if held is None else f"{held:.0%}",
            "mean length": f"{content['episode_steps']:.0f}",
            "files": " ".join(links),
        })  # fmt: skip
    heads = [head for head in rows[0] if any(row[head] != "" for row in rows)] if rows else []
    lines = [f"<tr>{''.join(f'<th>{head}' for head in heads)}</tr>"]
    lines += [f"<tr>{''.join(f'<td>{row[head]}' for head in heads)}</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _inline(svg: str) -> str:
    """An SVG file's text for use inside a page, where the namespace (an address) is not needed."""
    return svg.replace(f' xmlns="{SVG_NAMESPACE}"', "")


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
    sheet = np.full((rows * (height + 4) - 4, columns * (width + 4) - 4, 3), 255, np.uint8)
    for place, frame in enumerate(chosen):
        top, left = (place // columns) * (height + 4), (place % columns) * (width + 4)
        sheet[top : top + height, left : left + width] = frame
    write_png(torch.from_numpy(sheet).permute(2, 0, 1).contiguous(), str(path))


# ---- charts as SVG -----------------------------------------------------------------------------------------

SVG_NAMESPACE = "http://www.w3.org/2000/svg"  # a name that a stand-alone file must bear, never fetched


@dataclass
class Line:
    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = COLOURS[0]
    low: Sequence[float] | None = None
    """With `high`: the ends of an interval at each point."""
    high: Sequence[float] | None = None


def curves_svg(metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> str:
    """Losses, success rate, gradient norm and learning rate over steps; "" if there is nothing to draw."""

    def line(key: str, label: str, colour: str = COLOURS[0]) -> Line:
        points = [
            (r["step"], r[key])
            for r in metrics
            if isinstance(r.get(key), (int, float)) and math.isfinite(r[key])
        ]
        points = points[:: max(1, len(points) // 800)]
        return Line(label, [p[0] for p in points], [p[1] for p in points], colour)

    rolled = [e for e in evaluations if "step" in e]
    ends = [[e[key] for e in rolled] for key in ("success_rate", "success_low", "success_high")]
    success = Line(
        "success rate, 95 % interval", [e["step"] for e in rolled], ends[0], COLOURS[2], ends[1], ends[2]
    )
    charts = [
        ("L1 loss", [line("l1_loss", "training"), line("val_l1_loss", "validation", COLOURS[1])], True, None),
        ("success", [success], False, (0.0, 1.0)),
        ("KL divergence", [line("kld_loss", "training")], True, None),
        ("gradient norm", [line("grad_norm", "before clipping")], True, None),
        ("learning rate", [line("lr", "learning rate")], False, None),
    ]
    charts = [chart for chart in charts if any(len(each.x) for each in chart[1])]
    if not charts:
        return ""
    height = 230 * ((len(charts) + 1) // 2)
    panels = [
        panel(
            title,
            [each for each in lines if len(each.x)],
            480 * (i % 2),
            230 * (i // 2),
            480,
            230,
            log,
            limits,
        )
        for i, (title, lines, log, limits) in enumerate(charts)
    ]
    return svg(960, height, panels)


def chunk_svg(predicted: np.ndarray, true: np.ndarray) -> str:
    """Predicted beside true actions (S, A) of one chunk, a panel a joint; NaN in `true` is left out."""
    joints, columns = predicted.shape[1], 4
    panels = []
    for joint in range(joints):
        steps = np.flatnonzero(np.isfinite(true[:, joint]))
        lines = [
            Line("true", steps.tolist(), true[steps, joint].tolist(), COLOURS[1]),
            Line("predicted", list(range(len(predicted))), predicted[:, joint].tolist()),
        ]
        lines = [each for each in lines if len(each.x)]
        panels.append(
            panel(f"joint {joint}", lines, 240 * (joint % columns), 150 * (joint // columns), 240, 150)
        )
    return svg(960, 150 * math.ceil(joints / columns), panels)


def svg(width: int, height: int, parts: Iterable[str]) -> str:
    style = "font: 11px system-ui, sans-serif; background: #fff"
    head = f'<svg xmlns="{SVG_NAMESPACE}" viewBox="0 0 {width} {height}" width="{width}" style="{style}">'
    return f"{head}{''.join(parts)}</svg>"


def panel(
    title: str, lines: Sequence[Line], left: float, top: float, width: float, height: float,
    log: bool = False, limits: tuple[float, float] | None = None,
) -> str:  # fmt: skip
    """One chart with axes, ticks and, for several lines, a legend."""
    everything = np.concatenate(
        [np.asarray(v, float) for each in lines for v in (each.y, each.low or [], each.high or [])]
    )
    log = log and bool((everything > 0).all())
    scale: Callable[[Any], np.ndarray] = (lambda v: np.log10(np.asarray(v, float))) if log else np.asarray
    low, high = limits or (float(everything.min()), float(everything.max()))
    if high - low < 1e-9 * max(abs(high), 1e-9):
        low, high = (
            (low / 2, high * 2) if log else (low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1))
        )
    bottom_value, top_value = float(scale(low)), float(scale(high))
    first = min(min(each.x) for each in lines)
    last = max(max(each.x) for each in lines)
    x0, x1, y0, y1 = left + 52, left + width - 14, top + height - 24, top + 26

    def place_x(x: Any) -> np.ndarray:
        return x0 + (np.asarray(x, float) - first) / max(last - first, 1e-9) * (x1 - x0)

    def place_y(y: Any) -> np.ndarray:
        return y0 + (scale(y) - bottom_value) / (top_value - bottom_value) * (y1 - y0)

    parts = [f'<text x="{x0}" y="{top + 16}" font-weight="600">{html.escape(title)}</text>']
    for value in _ticks(low, high, log):
        y = float(place_y(value))
        parts.append(f'<path d="M{x0} {y:.1f}H{x1}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{value:g}</text>')
    for value in _ticks(first, last, False):
        x = float(place_x(value))
        parts.append(f'<text x="{x:.1f}" y="{y0 + 16}" text-anchor="middle" fill="#555">{value:g}</text>')
    parts.append(f'<path d="M{x0} {y1}V{y0}H{x1}" fill="none" stroke="#888"/>')
    for each in lines:
        xs, ys = place_x(each.x), place_y(each.y)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{each.colour}" stroke-width="1.6"/>')
        if len(xs) <= 30:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{each.colour}"/>' for x, y in zip(xs, ys)
            ]
        if each.low is not None and each.high is not None:
            for x, a, b in zip(xs, place_y(each.low), place_y(each.high)):
                parts.append(
                    f'<path d="M{x:.1f} {a:.1f}V{b:.1f}" stroke="{each.colour}" stroke-opacity=".5"/>'
                )
    at = x1
    for each in reversed(lines if len(lines) > 1 or lines[0].low is not None else []):
        text = html.escape(each.label)
        parts.append(f'<text x="{at}" y="{top + 16}" text-anchor="end" fill="{each.colour}">{text}</text>')
        at -= 6.5 * len(each.label) + 10
    return "".join(parts)


def _ticks(low: float, high: float, log: bool) -> list[float]:
    """About four round numbers from low to high."""
    if log:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        marks = [1, 2, 5] if high / low < 200 else [1]
        found = [mark * 10.0**decade for decade in decades for mark in marks]
        inside = [v for v in found if low <= v * 1.0001 and v <= high * 1.0001]
        return inside[:: max(1, len(inside) // 5)] or [low, high]
    if high <= low:
        return [low]
    rough = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough)
    return [
        round(v, 12)
        for v in np.arange(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1) * step
    ]


if __name__ == "__main__":
    sys.exit(main())
