"""Closed loop: does the policy work? Rollouts, success rate, and pictures of what it does.

    python evaluate.py --checkpoint outputs/train/.../checkpoints/last          # the built-in task
    python evaluate.py --checkpoint DIR --env aloha-transfer-cube --video DIR   # pip install gym-aloha

Any checkpoint of ours or of LeRobot's will do. Written under --output: episodes.json (one object per
episode), rollout.png, chunk.svg, report.html; with --video one mp4 (PyAV) or gif (Pillow) per episode.

All episodes run in lock-step. The policy is asked in batches of one fixed size, and only when its chunks run
out; an image is rendered only when the policy is asked. With temporal ensembling that is at every step. An
episode's result does not depend on which episodes run beside it, so ranks can share them.

Order of the file: the command, evaluation in training, rollouts, whether predictions vary with what the
policy sees, files. Environments are in extras/environments.py, pictures and the page in extras/report.py.

Shapes: E episodes, B batch, S chunk, A action.
"""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import dist
import model_act
from extras import checks, environments, flags, lerobot_ckpt, lora, report, sim
from extras.environments import MissingPackage

STATE, ACTION = "observation.state", "action"
CHUNKS_KEPT = 50
"""Predicted chunks kept per episode, for the spread of predictions."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What is rolled out, and how the policy is asked."""

    env: Literal["sim", "aloha-transfer-cube", "aloha-insertion"] | None = None
    """sim: the built-in task. aloha-*: MuJoCo's bimanual tasks, with gym-aloha. None: no rollouts."""
    episodes: int = 50
    """Rollouts of one evaluation, over all ranks."""
    seed: int = 0
    """Of the first episode; each further one counts up. For aloha-* these are the seeds of gym-aloha's reset:
    choose others than the demonstrations had. The built-in task never repeats a demonstration."""
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
    """sim: the built-in task. aloha-*: MuJoCo's bimanual tasks, with gym-aloha installed."""
    output: Path | None = None
    """Directory of the results. None: outputs/eval/DATE/TIME_ENV."""
    video: Path | None = None
    """Directory for one video of each of the first --filmed episodes. None: no videos."""
    filmed: int = 10
    """Episodes to film with --video."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPU where there is one."""


@dataclass
class Episode:
    """What became of one rollout."""

    seed: int
    success: bool = False
    steps: int = 0
    """Control steps until success, or until the episode was over."""
    asked: int = 0
    """How often the policy was asked for a chunk, each time with a new image."""
    details: dict[str, Any] = field(default_factory=dict)
    """What else the environment reports, and "error" if the episode was broken off."""
    chunks: list[np.ndarray] = field(default_factory=list, repr=False)
    """Predicted chunks (S, A), at most the first CHUNKS_KEPT."""
    frames: list[np.ndarray] = field(default_factory=list, repr=False)
    """Film, if asked for."""
    over: bool = field(default=False, repr=False)
    """No further control step."""

    def row(self) -> dict[str, Any]:
        """For a JSON file."""
        row = {"seed": self.seed, "success": self.success, "steps": self.steps, "asked": self.asked}
        return row | self.details


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit code: 0, or 1 after a sentence on stderr."""
    import tyro

    cfg = tyro.cli(Command, args=argv, description=(__doc__ or "").split("\n\nAll episodes")[0])
    try:
        checks.check_rollouts(cfg)
        check_environment(cfg.env)
        run(cfg)
    except ValueError as error:
        if not flags.is_user_error(error):
            raise
        print(error, file=sys.stderr)
        return 1
    return 0


def run(cfg: Command) -> None:
    """Roll a checkpoint out, print how it did, and leave files, pictures and videos."""
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise flags.UserError("--device=cuda needs a CUDA device, and torch sees none; use --device cpu.")
    best = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(best if cfg.device == "auto" else cfg.device)
    folder = lerobot_ckpt.policy_dir(cfg.checkpoint)
    print(f"checkpoint: {folder}")
    config, stats = lerobot_ckpt.load_policy_files(cfg.checkpoint)
    policy = lerobot_ckpt.policy_of(config, stats)
    lerobot_ckpt.load_weights(cfg.checkpoint, policy)
    policy.to(device).eval()
    now = datetime.now()
    output = cfg.output or Path(f"outputs/eval/{now:%Y-%m-%d}/{now:%H-%M-%S}_{cfg.env}")
    # Directories that cannot be written to are refused before the rollouts, which take minutes.
    make_directory(output, "--output")
    if cfg.video is not None:
        make_directory(cfg.video, "--video")
    began = time.monotonic()
    episodes = evaluate_share(policy, cfg, device, filmed=1 if cfg.video is None else cfg.filmed)
    results = summarize(episodes)
    print(f"{sentence(cfg, results)}, {time.monotonic() - began:.0f} s")
    origin: dict[str, Any] = {"checkpoint": str(folder)}
    if folder.parent.name.isdecimal():
        origin["step"] = int(folder.parent.name)
    if cfg.video is not None:
        for episode in episodes[: cfg.filmed]:
            name = f"{cfg.env}_{episode.seed:04d}_{'success' if episode.success else 'failure'}"
            film = write_video(cfg.video / name, episode.frames, environments.film_fps(cfg.env))
            episode.details["video"] = str(film.resolve())
        print(f"videos: {cfg.video}")
    samples = expert_samples(policy, cfg.env)
    spread, warning = write_evaluation(output, cfg, episodes, results, policy, samples, origin)
    if spread is not None:
        print(spread.table())
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"results: {output / 'episodes.json'}, {report.write_report(output, str(folder))}")


def check_environment(env: str | None) -> None:
    """Raises MissingPackage, which names the pip line, if the environment's packages are not installed."""
    if env is not None and env.startswith("aloha"):
        environments.load_aloha(env)


def make_directory(path: Path, flag: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise flags.UserError(f"{flag}={path} cannot be created: {reason}; name another.") from None
    if not os.access(path, os.W_OK):
        raise flags.UserError(f"{flag}={path} cannot be written to; name another directory.")


# ---- evaluation in training --------------------------------------------------------------------------------


def never() -> bool:
    """The default of `interrupted`."""
    return False


def whole_policy(
    policy: model_act.ACTPolicy, cluster: dist.Cluster, compiled: bool, peft: lora.PeftConfig | None
) -> model_act.ACTPolicy:
    """The policy for rollouts: itself, or a whole copy that is not compiled: rollouts have other shapes.

    Collective: call on every rank.

    Args:
        peft: the adapters that `policy` has, if it has any, with resolved targets.
    """
    if not cluster.sharded and not compiled:
        return policy
    copy = model_act.ACTPolicy(policy.config, policy.input_features, policy.output_features, policy.stats)
    if peft is not None:
        lora.apply_lora(copy, peft)
    copy.load_state_dict(dist.gathered_state_dict(policy))
    return copy.to(cluster.device)


def evaluate_in_training(
    policy: model_act.ACTPolicy,
    cfg: EvalConfig,
    cluster: dist.Cluster,
    run_dir: str | Path,
    step: int,
    samples: dict[str, Tensor] | None = None,
    interrupted: Callable[[], bool] = never,
) -> dict[str, float] | None:
    """Roll out where there is an environment; leave files and pictures in RUN/eval/STEP (rank 0).

    Collective: call on every rank; each rolls out its share, all get the result.

    Args:
        policy: whole on every rank (see `whole_policy`).
        samples: a batch of dataset frames with their true actions, to compare predictions with (see
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
    episodes = all_episodes(cluster, share)
    results = summarize(episodes)
    # Only rank 0 writes; an error of its own ends all ranks, which would else wait for it in the next step.
    with dist.raise_together(cluster):
        if cluster.is_main:
            if episodes:
                print(f"step {step}: {sentence(cfg, results)}", flush=True)
            if samples is None:
                samples = expert_samples(policy, cfg.env)
            directory = Path(run_dir) / "eval" / f"{step:06d}"
            _, warning = write_evaluation(directory, cfg, episodes, results, policy, samples, {"step": step})
            if warning:
                print(f"warning: step {step}: {warning}", file=sys.stderr, flush=True)
    return {key: value for key, value in results.items() if isinstance(value, float)}


def evaluate_share(
    policy: model_act.ACTPolicy,
    cfg: RolloutConfig,
    device: torch.device,
    rank: int = 0,
    world_size: int = 1,
    filmed: int = 0,
    interrupted: Callable[[], bool] = never,
) -> list[Episode]:
    """This rank's episodes: every world_size-th seed, none without --env. Nothing is communicated."""
    if cfg.env is None:
        return []
    return rollout(
        policy,
        cfg.env,
        range(cfg.seed, cfg.seed + cfg.episodes)[rank::world_size],
        device,
        n_action_steps=cfg.n_action_steps,
        temporal_ensemble_coeff=cfg.temporal_ensemble_coeff,
        batch_size=cfg.batch_size,
        filmed=filmed,
        progress=rank == 0,
        interrupted=interrupted,
    )


def all_episodes(cluster: dist.Cluster, share: list[Episode]) -> list[Episode]:
    """The episodes of all ranks, in order of their seeds. Collective: call on every rank; all get them."""
    if cluster.world_size == 1:
        return share
    shares: list[Any] = [None] * cluster.world_size
    # Films stay where they are: only rank 0's is shown, that of the first seed.
    torch.distributed.all_gather_object(shares, [replace(episode, frames=[]) for episode in share])
    if cluster.is_main:
        shares[0] = share
    return sorted((episode for each in shares for episode in each), key=lambda episode: episode.seed)


# ---- rollouts ----------------------------------------------------------------------------------------------


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
    interrupted: Callable[[], bool] = never,
) -> list[Episode]:
    """Roll the policy out once per seed, all in lock-step. Its train or eval mode is left as it was.

    Args:
        policy: anything with config, input_features, output_features and predict_action_chunk(batch).
        n_action_steps, temporal_ensemble_coeff: None takes the policy's own.
        filmed: keep the frames of so many episodes, the first ones.
        interrupted: asked before each control step; true ends all episodes where they are.
    Raises:
        UserError: the policy was made for other features than the environment has.
        MissingPackage: the environment's package is not installed.
    """
    horizon, ensembler = plan_of_execution(policy.config, n_action_steps, temporal_ensemble_coeff)
    camera, image_size = camera_of(policy, env_name)
    episodes = [Episode(seed) for seed in seeds]
    envs = [environments.make_env(env_name) for _ in episodes]
    states = np.zeros((len(envs), sim.ACTION_DIM), np.float32)
    for state, env, episode in zip(states, envs, episodes):
        state[:] = env.reset(episode.seed)
    plans = np.zeros((len(envs), horizon, sim.ACTION_DIM))
    live, bar = np.arange(len(envs)), _Bar(env_name, len(envs), progress)
    was_training = policy.training
    policy.eval()
    step = 0
    while len(live) and not interrupted():
        if step % horizon == 0:
            batch = {STATE: torch.from_numpy(states[live])} if STATE in policy.input_features else {}
            if camera is not None:
                images = np.stack([envs[i].render(*image_size) for i in live])
                batch[camera] = torch.from_numpy(images).permute(0, 3, 1, 2)
            chunks = predict(policy, batch, batch_size, device)  # (E, S, A)
            to_execute = chunks[:, :horizon] if ensembler is None else ensembler.update(chunks)[:, None]
            plans[live] = to_execute.numpy()
            for i, chunk in zip(live, chunks.numpy()):
                episodes[i].asked += 1
                if len(episodes[i].chunks) < CHUNKS_KEPT:
                    episodes[i].chunks.append(chunk)
        for i in live:
            advance(envs[i], episodes[i], states[i], plans[i, step % horizon], film=bool(i < filmed))
        going_on = np.array([not episodes[i].over for i in live])
        live = live[going_on]
        if ensembler is not None and ensembler.actions is not None:
            ensembler.actions = ensembler.actions[torch.from_numpy(going_on)]
        step += 1
        bar.show(step, episodes, len(live))
    policy.train(was_training)
    return episodes


def plan_of_execution(
    config: model_act.ACTConfig, n_action_steps: int | None, temporal_ensemble_coeff: float | None
) -> tuple[int, model_act.ACTTemporalEnsembler | None]:
    """(control steps from one question to the next, the ensembler if chunks are averaged)."""
    coeff = temporal_ensemble_coeff
    if coeff is None and n_action_steps is None:
        coeff = config.temporal_ensemble_coeff
    if coeff is not None:
        return 1, model_act.ACTTemporalEnsembler(coeff, config.chunk_size)
    horizon = n_action_steps or config.n_action_steps
    if horizon > config.chunk_size:
        rule = f"it is more than the policy's chunk of {config.chunk_size}"
        raise flags.UserError(f"--n-action-steps={horizon} cannot work: {rule}.")
    return horizon, None


def advance(env: Any, episode: Episode, state: np.ndarray, action: np.ndarray, film: bool) -> None:
    """One control step of one episode; `state` (A,) is overwritten by the new one."""
    if film and episode.steps % env.film_stride == 0:
        episode.frames.append(env.render(*env.film_size))
    if np.isfinite(action).all():
        state[:] = env.step(action)
    else:
        episode.details["error"] = f"the action of step {episode.steps} is not finite"
    episode.success, episode.steps = env.success, episode.steps + 1
    episode.over = env.over or episode.steps == env.max_steps or "error" in episode.details
    if episode.over:
        if film:
            episode.frames.append(env.render(*env.film_size))
        episode.details |= env.details()


def predict(
    policy: model_act.ACTPolicy, batch: dict[str, Tensor], size: int, device: torch.device | str
) -> Tensor:
    """(E, S, A) float32 chunks on the CPU, for E observations asked `size` at a time.

    The last batch is filled up with repeats: at one batch shape, what comes out for an observation does not
    depend, to the last bit, on how many others there are.
    """
    count = len(next(iter(batch.values())))
    chunks = []
    for start in range(0, count, size):
        rows = torch.arange(start, start + size).clamp(max=count - 1)
        part = {key: value[rows].to(device) for key, value in batch.items()}
        chunks.append(policy.predict_action_chunk(part).float().cpu()[: count - start])
    return torch.cat(chunks)


def camera_of(policy: model_act.ACTPolicy, env_name: str) -> tuple[str | None, tuple[int, int]]:
    """(the policy's camera, its image size). Raises UserError: why the policy cannot act there."""
    cameras = {k: f["shape"] for k, f in policy.input_features.items() if f["type"] == "VISUAL"}
    problems = []
    if len(cameras) > 1 or any(shape[0] != 3 for shape in cameras.values()):
        problems.append(
            f"it takes the cameras {', '.join(cameras)}, and there is one, in colour (ask its own robot)"
        )
    for key, feature in (policy.input_features | policy.output_features).items():
        if key in (STATE, ACTION) and list(feature["shape"]) != [sim.ACTION_DIM]:
            problems.append(f"its {key} has the shape {feature['shape']}, and there it is [{sim.ACTION_DIM}]")
        elif key not in (STATE, ACTION, *cameras):
            problems.append(f"it takes {key}, which is not given")
    if problems:
        raise flags.UserError(f"The policy cannot act in --env {env_name}: {'; '.join(problems)}.")
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
    results: dict[str, Any] = {"success_rate": won / count, "success_low": low, "success_high": high}
    results |= {"episode_steps": float(np.mean([e.steps for e in episodes]))}
    results |= {"successes": won, "episodes": count}
    yes_or_no = {key for e in episodes for key, value in e.details.items() if isinstance(value, bool)}
    for key in sorted(yes_or_no):
        results[f"{key}_rate"] = sum(bool(e.details.get(key)) for e in episodes) / count
    return results


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


# ---- does it look at its input? ----------------------------------------------------------------------------


def expert_samples(
    policy: model_act.ACTPolicy, env_name: str | None, count: int = 24
) -> dict[str, Tensor] | None:
    """A batch of the built-in task's expert with its true actions, from scenes of its own; None elsewhere."""
    if env_name != "sim":
        return None
    camera, (height, width) = camera_of(policy, env_name)
    rows: list[dict[str, np.ndarray]] = []
    for number in range(count):
        episode = sim.expert_episode(2**31, number)
        length, at = len(episode["action"]), 5 * number
        steps = at + np.arange(policy.config.chunk_size)
        row = {STATE: episode["state"][at], ACTION: episode["action"][np.minimum(steps, length - 1)]}
        row["action_is_pad"] = steps >= length
        if camera is not None:
            row[camera] = sim.render(episode["scene"][at], height, width).transpose(2, 0, 1)
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
    """Spread of the predictions over a batch of dataset frames, beside that of the true actions.

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
    chunks = [chunk for episode in episodes for chunk in episode.chunks]
    if std is None or not chunks:
        return None
    return Spread(np.stack(chunks).std(axis=0).mean(axis=0), std.double().cpu().numpy(), None)


# ---- files -------------------------------------------------------------------------------------------------


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
    content = origin | results | {"config": asdict(cfg), "warning": warning}
    content["rows"] = [episode.row() for episode in episodes]
    (directory / "episodes.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
    film = next((e for e in episodes if e.frames), None)
    if film is not None:
        report.write_contact_sheet(directory / "rollout.png", film.frames)
    if samples is not None:
        inputs = {key: samples[key] for key in policy.input_features}
        predicted = predict(policy, inputs, 10, next(policy.parameters()).device).numpy()
        drawn = len(predicted) // 3
        true = np.where(samples["action_is_pad"][drawn, :, None], np.nan, samples[ACTION][drawn])
        (directory / "chunk.svg").write_text(report.chunk_svg(predicted[drawn], true))
    return spread, warning


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
        raise MissingPackage(
            "--video needs PyAV (mp4) or Pillow (gif): pip install av, or pip install pillow"
        ) from None
    images = [Image.fromarray(frame).quantize(64) for frame in frames]
    images[0].save(file, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0)
    return file


if __name__ == "__main__":
    sys.exit(main())
