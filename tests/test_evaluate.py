"""Rollouts against the environment stepped by hand and select_action; the report against what it shows."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks

import ckpt
import data
import dist
import evaluate
import model_act
from extras import checks, environments, lerobot_ckpt, report, sim

IMAGE = (24, 32)


def features(cameras=(sim.CAMERA,), state=14, extra=None):
    inputs = {"observation.state": {"type": "STATE", "shape": [state]}}
    inputs |= {key: {"type": "VISUAL", "shape": [3, *IMAGE]} for key in cameras} | (extra or {})
    return inputs, {"action": {"type": "ACTION", "shape": [14]}}


def small_policy(seed=0, scale=1.0, **flags):
    """An untrained policy whose actions move the arms about."""
    torch.manual_seed(seed)
    shown = sim.Demonstrations(2, 0, *IMAGE)
    stats = {
        key: {"mean": torch.tensor(v.mean(0)), "std": torch.tensor(v.std(0)) * scale}
        for key, v in shown.columns.items()
    }
    stats[sim.CAMERA] = {"mean": torch.full((3, 1, 1), 0.5), "std": torch.full((3, 1, 1), 0.25)}
    settings: dict[str, Any] = {
        "pretrained_backbone_weights": None, "dim_model": 32, "n_heads": 2, "dim_feedforward": 32,
        "n_encoder_layers": 1, "n_vae_encoder_layers": 1, "latent_dim": 4,
        "chunk_size": 100, "n_action_steps": 100,
    }  # fmt: skip
    inputs, outputs = features()
    return model_act.ACTPolicy(model_act.ACTConfig(**(settings | flags)), inputs, outputs, stats)


class Expert(torch.nn.Module):
    """A policy that has looked up the expert's plan for each seed, and finds its place by the state."""

    def __init__(self, seeds, chunk_size=100, n_action_steps=100):
        super().__init__()
        self.config = SimpleNamespace(
            chunk_size=chunk_size, n_action_steps=n_action_steps, temporal_ensemble_coeff=None
        )
        self.input_features, self.output_features = features()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches, self.plans, states = [], [], []
        for seed in seeds:
            env = sim.TransferEnv()
            state, plan = env.reset(seed), sim.plan(env, np.random.default_rng([9, seed]))
            for at, action in enumerate(plan):
                states.append(state)
                self.plans.append(plan[np.minimum(np.arange(at, at + chunk_size), len(plan) - 1)])
                state = env.step(action)
        self.states = torch.tensor(np.stack(states))

    def predict_action_chunk(self, batch):
        self.batches.append(len(batch["observation.state"]))
        places = torch.cdist(batch["observation.state"].double(), self.states.double()).argmin(1)
        return torch.tensor(np.stack([self.plans[place] for place in places]))


def roll(policy: Any, seeds, **settings: Any) -> Any:
    return evaluate.rollout(policy, "sim", seeds, **settings)


def expert_samples(policy: Any, count=6) -> Any:
    return evaluate.expert_samples(policy, "sim", count)


def spread_of(policy: Any, samples) -> evaluate.Spread:
    return evaluate.prediction_spread(policy, samples)


def alone_on(device="cpu") -> dist.Cluster:
    return dist.Cluster(0, 0, 1, 1, torch.device(device), 1, 1)


def counted_renders(monkeypatch):
    count = [0]
    real = sim.render

    def render(*args):
        count[0] += 1
        return real(*args)

    monkeypatch.setattr(sim, "render", render)
    return count


# ---- rollouts


def test_a_policy_that_plays_the_experts_plan_succeeds_when_the_environment_alone_does():
    seeds = range(5, 15)
    episodes = roll(Expert(seeds), seeds)
    for seed, episode in zip(seeds, episodes):
        env = sim.TransferEnv()
        env.reset(seed)
        plan, steps = sim.plan(env, np.random.default_rng([9, seed])), 0
        while not env.success and steps < len(plan):
            env.step(plan[steps])
            steps += 1
        assert episode.success == env.success and episode.seed == seed
        assert not env.success or episode.steps == steps
    assert evaluate.summarize(episodes)["success_rate"] >= 0.9


def test_an_untrained_policy_fails():
    episodes = roll(small_policy(), range(10))
    assert sum(episode.success for episode in episodes) == 0
    assert all(episode.steps == sim.MAX_STEPS for episode in episodes)


def test_an_episode_does_not_depend_on_which_run_beside_it():
    policy = small_policy(n_action_steps=60)
    together = roll(policy, range(7), batch_size=4)
    for seed in (0, 3, 6):
        (alone,) = roll(policy, [seed], batch_size=4)
        assert np.array_equal(alone.chunks, together[seed].chunks)
        assert alone.row() == together[seed].row()


def test_images_are_rendered_only_when_the_policy_is_asked(monkeypatch):
    count = counted_renders(monkeypatch)
    episodes = roll(small_policy(), range(4))
    assert [episode.asked for episode in episodes] == [3] * 4  # 300 steps in chunks of 100
    assert count[0] == 12


def test_finished_episodes_are_neither_rendered_nor_asked(monkeypatch):
    seeds, count = range(4), counted_renders(monkeypatch)
    policy = Expert(seeds)
    episodes = roll(policy, seeds, n_action_steps=20, batch_size=2)
    asked = [-(-episode.steps // 20) for episode in episodes]
    assert [episode.asked for episode in episodes] == asked and count[0] == sum(asked)
    assert set(policy.batches) == {2}  # one batch shape, whatever is left


def test_temporal_ensembling_equals_select_action_one_step_at_a_time(monkeypatch):
    policy = small_policy(n_action_steps=1, temporal_ensemble_coeff=0.01)
    count = counted_renders(monkeypatch)
    monkeypatch.setattr(environments.SimEnvironment, "max_steps", 12)
    episodes = roll(policy, [3, 4])
    assert count[0] == 24 and all(episode.asked == 12 for episode in episodes)
    overridden = roll(small_policy(), [3, 4], temporal_ensemble_coeff=0.01)
    for episode, other in zip(episodes, overridden):
        assert np.array_equal(episode.chunks, other.chunks)
    env = sim.TransferEnv()
    state = env.reset(3)
    policy.reset()
    policy.eval()
    for step in range(12):
        image = torch.from_numpy(env.render(*IMAGE)).permute(2, 0, 1)[None]
        batch = {"observation.state": torch.tensor(state)[None], sim.CAMERA: image}
        expected = policy.predict_action_chunk(batch)[0].numpy()
        np.testing.assert_allclose(
            episodes[0].chunks[step], expected, rtol=0, atol=1e-5
        )  # batch of 10 or of 1
        state = env.step(policy.select_action(batch)[0].numpy())


def test_ensembling_goes_on_unchanged_when_a_neighbour_is_done():
    seeds = [1, 2, 3]
    settings: Any = {"temporal_ensemble_coeff": 0.01, "batch_size": 3}
    together = roll(Expert(seeds), seeds, **settings)
    assert len({episode.steps for episode in together}) > 1
    for seed, episode in zip(seeds, together):
        assert roll(Expert([seed]), [seed], **settings)[0].row() == episode.row()


def test_train_mode_comes_back_and_dropout_plays_no_part():
    policy = small_policy(dropout=0.5)
    policy.train()
    first = roll(policy, [0])
    assert policy.training
    policy.eval()
    assert np.array_equal(first[0].chunks, roll(policy, [0])[0].chunks)


def test_a_diverged_policy_fails_its_episodes_and_says_why():
    policy = small_policy()
    with torch.no_grad():
        policy.model.action_head.bias.fill_(float("nan"))
    (episode,) = roll(policy, [0])
    assert not episode.success and "not finite" in episode.row()["error"]


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        (features(cameras=("observation.images.a", "observation.images.b")), "takes the cameras"),
        (features(state=7), r"observation.state has the shape \[7\]"),
        (
            features(extra={"observation.environment_state": {"type": "ENV", "shape": [7]}}),
            "which is not given",
        ),
    ],
)
def test_a_policy_made_for_other_features_is_refused_with_a_sentence(inputs, problem):
    policy = Expert([0])
    policy.input_features, policy.output_features = inputs
    with pytest.raises(ValueError, match=problem):
        roll(policy, [0])


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"episodes": 0}, "--episodes=0"),
        ({"batch_size": 0}, "--batch-size=0"),
        ({"seed": -1}, "--seed=-1"),
        ({"temporal_ensemble_coeff": 0.01, "n_action_steps": 5}, "drop --n-action-steps=5"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags, problem):
    with pytest.raises(ValueError, match=problem):
        checks.check_rollouts(evaluate.RolloutConfig(env="sim", **flags))


def test_more_steps_than_the_chunk_has_are_refused():
    with pytest.raises(ValueError, match="n-action-steps=101"):
        roll(small_policy(), [0], n_action_steps=101)


def test_wilson_interval_has_the_published_values():
    # Agresti & Coull 1998 and any calculator: no interval of zero width at 0 or 1
    for successes, count, low, high in (
        (0, 10, 0.0, 0.2775),
        (50, 50, 0.9287, 1.0),
        (45, 50, 0.7864, 0.9565),
    ):
        assert evaluate.wilson(successes, count) == pytest.approx((low, high), abs=1e-4)
    assert evaluate.wilson(0, 0) == (0.0, 1.0)


# ---- ranks


def evaluate_on_rank(rank, world_size, run_dir):
    policy = small_policy(scale=3.0)
    cluster = dist.Cluster(rank, rank, world_size, world_size, torch.device("cpu"), world_size, 1)
    cfg = evaluate.EvalConfig(env="sim", episodes=5, batch_size=2)
    return evaluate.evaluate_in_training(policy, cfg, cluster, run_dir, 10)


def test_two_ranks_share_the_episodes_and_get_what_one_process_gets(tmp_path):
    alone = evaluate_on_rank(0, 1, tmp_path / "one")
    assert run_ranks(2, evaluate_on_rank, tmp_path / "two") == [alone, alone]
    one, two = (json.loads((tmp_path / n / "eval/000010/episodes.json").read_text()) for n in ("one", "two"))
    assert one == two and [row["seed"] for row in one["rows"]] == list(range(5))
    for name in ("eval/000010/rollout.png", "eval/000010/chunk.svg"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


def fail_on_rank_1(rank, world_size, run_dir):
    policy = small_policy()
    if rank == 1:
        policy.input_features, _ = features(state=7)
    cluster = dist.Cluster(rank, rank, world_size, world_size, torch.device("cpu"), world_size, 1)
    try:
        evaluate.evaluate_in_training(
            policy, evaluate.EvalConfig(env="sim", episodes=2), cluster, run_dir, 10
        )
    except ValueError as error:
        return str(error)


def test_an_error_on_one_rank_is_an_error_on_all(tmp_path):
    first, second = run_ranks(2, fail_on_rank_1, tmp_path)
    assert first == second and "observation.state" in first


# ---- does it look?


def test_a_policy_that_does_the_same_whatever_it_sees_gets_a_warning():
    policy = small_policy()
    samples = expert_samples(policy)
    with torch.no_grad():
        policy.model.action_head.weight.zero_()
    spread = spread_of(policy, samples)
    assert spread.flat_joints() == list(range(14))
    assert "hardly vary over observations" in str(spread.warning())
    assert len(spread.table().splitlines()) == 15


def test_a_policy_that_acts_like_the_expert_gets_no_warning():
    policy = small_policy()
    samples = expert_samples(policy)
    truth = samples["action"].clone()
    policy.predict_action_chunk = lambda batch: truth[[int(i) for i in batch["row"]]]
    policy.input_features = {"row": {"type": "STATE", "shape": [1]}}
    spread = spread_of(policy, samples | {"row": torch.arange(6)})
    np.testing.assert_allclose(spread.predicted, spread.target, rtol=1e-6)
    assert spread.warning() is None


def test_a_policy_that_ignores_its_images_gets_a_warning():
    policy = Expert(range(3))
    policy.states = torch.tensor(np.stack([sim.expert_episode(2**31, n)["state"][5 * n] for n in range(6)]))
    policy.plans = [sim.expert_episode(2**31, n)["action"][5 * n : 5 * n + 100] for n in range(6)]
    spread = spread_of(policy, expert_samples(policy))
    assert not spread.flat_joints() and "do not depend on the images" in str(spread.warning())


def test_padded_targets_play_no_part_in_the_spread():
    policy = small_policy()
    samples = expert_samples(policy)
    samples["action_is_pad"][:, 60:] = True
    before = spread_of(policy, samples)
    samples["action"][:, 60:] = float("nan")
    after = spread_of(policy, samples)
    assert np.array_equal(before.target, after.target) and np.isfinite(after.target).all()


# ---- command, files, report


@pytest.fixture
def checkpoint(tmp_path):
    policy = small_policy(scale=2.0, n_action_steps=50)
    writer = ckpt.CheckpointWriter(tmp_path / "run")
    optimizer = torch.optim.AdamW(policy.optim_groups(1e-4, 1e-4, 1e-4))
    degrees = {"dp_replicate": 1, "dp_shard": 1}
    files = lerobot_ckpt.checkpoint_files(
        lerobot_ckpt.config_dict(policy, "cpu"),
        {},
        degrees,
        stats=policy.stats,
        step=7,
        base_lrs=[1e-4, 1e-4],
    )
    writer.save(7, policy, optimizer, state={"samples_seen": 56}, files=files)
    return tmp_path / "run", policy


def test_the_command_rolls_a_checkpoint_out_as_the_policy_that_was_saved(checkpoint, tmp_path, capsys):
    run_dir, policy = checkpoint
    output, films = tmp_path / "out", tmp_path / "films"
    flags = ["--checkpoint", str(run_dir), "--episodes", "3", "--seed", "4", "--output", str(output)]
    assert evaluate.main([*flags, "--video", str(films), "--filmed", "2"]) == 0
    printed = capsys.readouterr().out
    assert "success 0 of 3 = 0% (95 % interval 0% to 56%)" in printed and "joint" in printed
    content = json.loads((output / "episodes.json").read_text())
    expected = [episode.row() for episode in roll(policy, [4, 5, 6])]
    filmed = [row.pop("video", None) for row in content["rows"]]
    assert content["rows"] == expected and content["config"]["seed"] == 4
    assert filmed[2] is None and {str(film) for film in films.iterdir()} == set(filmed[:2])
    assert content["step"] == 7 and content["checkpoint"] == str(
        run_dir / "checkpoints/000007/pretrained_model"
    )
    page = (output / "report.html").read_text()
    assert page.count('href="../films/sim_000') == 2 and f"checkpoint: {content['checkpoint']}" in printed
    assert {"episodes.json", "rollout.png", "chunk.svg", "report.html"} <= {p.name for p in output.iterdir()}


def test_errors_of_the_command_are_one_sentence_on_stderr(tmp_path, capsys):
    assert evaluate.main(["--checkpoint", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error


def test_a_missing_simulator_is_an_error_that_names_the_pip_line(monkeypatch):
    for name in ("dm_control", "gym_aloha"):
        monkeypatch.setitem(sys.modules, name, None)
    environments.load_aloha.cache_clear()
    with pytest.raises(ImportError, match="pip install gym-aloha"):
        evaluate.check_environment("aloha-transfer-cube")


def test_videos_are_mp4_or_without_pyav_gif_with_every_frame(tmp_path, monkeypatch):
    frames = [sim.render(scene, 61, 83) for scene in sim.expert_episode(0, 0)["scene"][:40:4]]
    pytest.importorskip("PIL")
    from PIL import Image

    try:
        import av

        file = evaluate.write_video(tmp_path / "film", frames, 25)
        with av.open(str(file)) as container:
            decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert file.suffix == ".mp4" and len(decoded) == 10 and decoded[0].shape == (60, 82, 3)
        assert np.abs(decoded[5].astype(float) - frames[5][:60, :82]).mean() < 6
    except ImportError:
        pass
    monkeypatch.setitem(sys.modules, "av", None)
    file = evaluate.write_video(tmp_path / "sub" / "film", frames, 25)
    with Image.open(file) as image:
        assert file.suffix == ".gif" and getattr(image, "n_frames", 1) == 10


def test_the_report_shows_curves_and_rollouts_and_asks_the_network_for_nothing(tmp_path):
    rows = [{"step": s, "l1_loss": 1 / s, "grad_norm": 2.0, "lr": 1e-4} for s in range(10, 200, 10)]
    rows += [
        {"step": 100, "l1_loss": 0.5},
        {"step": 100, "val_l1_loss": 0.3},
        {"step": 110, "l1_loss": float("nan")},
    ]
    lines = "\n".join(json.dumps(row) for row in rows)
    (tmp_path / "metrics.jsonl").write_text(lines + '\n{"step": 200, "l1_l')
    assert [r for r in report.read_metrics(tmp_path / "metrics.jsonl") if r["step"] == 100] == [
        {"step": 100, "l1_loss": 0.5, "grad_norm": 2.0, "lr": 1e-4, "val_l1_loss": 0.3}
    ]
    policy, cfg = small_policy(), evaluate.EvalConfig(env="sim", episodes=2)
    for step in (50, 100):
        evaluate.evaluate_in_training(policy, cfg, alone_on(), tmp_path, step)
    page = report.write_report(tmp_path, "a <b> run").read_text()
    assert "http" not in page and "a &lt;b&gt; run" in page and page.count("<svg") == 2
    assert "0 of 2 = 0%" in page and page.count('src="data:image/png;base64,') == 1 == page.count("src=")
    links = re.findall('href="([^"]+)"', page)
    assert len(links) == 6 and all((tmp_path / link).is_file() for link in links)


def test_without_an_environment_the_pictures_come_from_data_set_frames(tmp_path):
    policy = small_policy()
    shown = sim.Demonstrations(2, 0, *IMAGE)
    dataset, _, _ = data.open_columns(
        data.DatasetConfig(cache="off"), 100, shown.columns, shown.lengths.tolist(), 50, shown.cameras
    )
    samples = evaluate.spread_out(dataset, count=5)
    cfg = evaluate.EvalConfig(env=None)
    assert evaluate.evaluate_in_training(policy, cfg, alone_on(), tmp_path, 10, samples) == {}
    page = report.write_report(tmp_path, "run").read_text()
    assert "Rollouts" not in page and "A predicted chunk" in page and "predicted  target" in page
    true = dataset.get_batch(np.array([round((len(dataset) - 1) / 4)]))
    assert torch.equal(samples["action"][1], true["action"][0])


def test_a_run_without_anything_to_show_has_a_report_all_the_same(tmp_path):
    assert "<h1>empty</h1>" in report.write_report(tmp_path, "empty").read_text()


def test_charts_place_values_between_their_ticks():
    text = report.panel("t", [report.Line("l", [0, 50, 100], [1.0, 2.0, 3.0])], 0, 0, 400, 200)
    points = [tuple(map(float, p.split(","))) for p in re.findall('points="([^"]+)"', text)[0].split()]
    assert points[0][0] < points[1][0] < points[2][0] and points[0][1] > points[1][1] > points[2][1]
    assert points[1][0] == pytest.approx((points[0][0] + points[2][0]) / 2, abs=0.11)
    flat = report.panel("t", [report.Line("l", [5], [0.0])], 0, 0, 400, 200, log=True)
    assert "nan" not in flat and "inf" not in flat
    assert report._ticks(0.0, 1.0, False) == [0.0, 0.5, 1.0]
    assert report._ticks(0.01, 10.0, True) == [0.01, 0.1, 1.0, 10.0]


# ---- MuJoCo, where gym-aloha is installed


def test_triton_is_loaded_before_mujocos_driver(tmp_path):
    """The driver brings an LLVM of its own, and Triton's, loaded second, would take it for its own and crash."""
    (tmp_path / "dm_control.py").write_text(
        "import sys; sys.exit(0 if 'torch._dynamo' in sys.modules else 3)"
    )
    code = "import evaluate; evaluate.check_environment('aloha-insertion')"
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("env_name", ["aloha-transfer-cube", "aloha-insertion"])
def test_gym_alohas_tasks_render_on_demand_and_move_as_the_original_environment(env_name):
    pytest.importorskip("gym_aloha")
    env = environments.make_env(env_name)
    state = env.reset(3)
    actions = state + np.linspace(0, 0.2, 20)[:, None] * np.random.default_rng(0).uniform(-1, 1, 14)
    ours = [env.step(action) for action in actions]

    import gym_aloha  # noqa: F401
    import gymnasium

    name = {"aloha-transfer-cube": "AlohaTransferCube-v0", "aloha-insertion": "AlohaInsertion-v0"}[env_name]
    original = gymnasium.make(f"gym_aloha/{name}", obs_type="pixels_agent_pos", max_episode_steps=400)
    observation, _ = original.reset(seed=3)
    np.testing.assert_allclose(state, observation["agent_pos"], atol=1e-6)
    for action, expected in zip(actions, ours):
        observation, *_ = original.step(action)
        np.testing.assert_allclose(expected, observation["agent_pos"], atol=1e-6)
    assert np.abs(env.render(480, 640).astype(int) - observation["pixels"]["top"]).mean() < 0.5
    assert env.render(120, 160).shape == (120, 160, 3)
    assert env.details()["held_at_end"] is False
