"""The built-in task: its expert and renderer against the environment's own rules, in many scenes."""

import pickle

import numpy as np
import pytest
import torch

from extras import sim


def play(env: sim.TransferEnv, actions: np.ndarray) -> np.ndarray:
    return np.stack([env.step(action) for action in actions])


def test_an_episode_is_a_function_of_seed_and_number_alone():
    first, again = sim.expert_episode(3, 5), sim.expert_episode(3, 5)
    assert all(np.array_equal(first[key], again[key]) for key in first)
    for other in (sim.expert_episode(3, 6), sim.expert_episode(4, 5)):
        assert not np.array_equal(first["scene"][0, 14:], other["scene"][0, 14:])


def test_the_expert_succeeds_in_at_least_95_of_100_scenes():
    successes = [bool(sim.expert_episode(seed, 10 * seed)["success"]) for seed in range(40)]
    assert np.mean(successes) >= 0.95


def test_an_episode_has_alohas_shapes_and_lengths_that_differ():
    episodes = [sim.expert_episode(0, number) for number in range(8)]
    for episode in episodes:
        assert episode["state"].shape == episode["action"].shape == (len(episode["action"]), 14)
        assert episode["state"].dtype == episode["action"].dtype == np.float32
        assert 150 <= len(episode["action"]) <= sim.MAX_STEPS
        assert np.abs(np.diff(episode["action"], axis=0)).max() < 0.2
    assert len({len(episode["action"]) for episode in episodes}) > 2


def test_the_state_does_not_tell_where_cube_and_zone_are_but_the_image_does():
    here, there = sim.TransferEnv(), sim.TransferEnv()
    here.reset(0), there.reset(0)
    there.cube, there.zone = there.cube + [0.05, -0.1, 0.2], there.zone + [0.02, 0.1]
    actions = sim.plan(here, np.random.default_rng(0))[:55]  # up to where the hand closes
    assert np.array_equal(play(here, actions), play(there, actions))
    assert not np.array_equal(here.render(60, 80), there.render(60, 80))
    states = np.stack([here.reset(seed) for seed in range(300)])
    scenes = np.stack([(here.reset(seed), here.scene)[1] for seed in range(300)])
    correlation = np.corrcoef(states[:, [0, 1, 7, 8]].T, scenes[:, 14:].T)[:4, 4:]
    assert np.abs(correlation).max() < 0.25


def test_a_player_of_other_scenes_demonstrations_fails():
    successes = 0
    for number in range(40):
        env = sim.TransferEnv()
        env.reset(number)
        for action in sim.expert_episode(0, number)["action"]:
            env.step(action)
        successes += env.success
    assert successes < 0.1 * 40


def test_rollouts_start_from_scenes_that_no_demonstration_has():
    env = sim.TransferEnv()
    starts = {tuple((env.reset(seed), env.scene[14:])[1]) for seed in range(30)}
    shown = {tuple(sim.expert_episode(seed, n)["scene"][0, 14:]) for seed in range(3) for n in range(10)}
    assert len(starts) == 30 and not starts & shown


def test_a_hand_holds_only_a_cube_that_is_near_and_drops_it_when_it_opens():
    env = sim.TransferEnv()
    rest = env.reset(1)
    closed = rest.copy()
    closed[[6, 13]] = 0
    play(env, np.repeat(closed[None], 20, axis=0))
    assert not env.holders  # far from the cube
    env.reset(1)
    env.cube[:2] = sim.hand(env.joints[1], 1)[:2] + [0.03, 0]
    play(env, np.repeat(closed[None], 20, axis=0))
    assert env.holders == [1] and env.carriers == [1]
    assert np.linalg.norm(env.cube[:2] - sim.hand(env.joints[1], 1)[:2]) < 0.005  # centred by the fingers
    moved = closed.copy()
    moved[7] += 0.3
    play(env, np.repeat(moved[None], 20, axis=0))
    assert np.linalg.norm(env.cube[:2] - sim.hand(env.joints[1], 1)[:2]) < 0.005
    moved[13] = 1
    play(env, np.repeat(moved[None], 20, axis=0))
    left_at = env.cube.copy()
    play(env, np.repeat(closed[None], 20, axis=0))
    assert not env.holders and np.array_equal(env.cube, left_at)


def test_a_cube_in_the_zone_counts_only_if_both_arms_brought_it():
    env = sim.TransferEnv()
    env.reset(2)
    env.cube[:2] = env.zone
    assert not env.success
    env.carriers = [1, 0]
    assert env.success
    env.holders = [0]
    assert not env.success


def test_neither_arm_reaches_the_other_ones_half():
    nearest = sim.CUBE_AREA[0, 0] - sim.GRASP_RADIUS
    assert sim.BASES[0, 0] + sim.LINKS.sum() < sim.CUBE_AREA[0, 0]
    assert np.hypot(nearest - sim.BASES[0, 0], sim.CUBE_AREA[1]).min() > sim.LINKS.sum() - 0.03


def test_joints_move_no_faster_than_the_limit_whatever_the_target():
    env = sim.TransferEnv()
    before = env.reset(0)
    after = env.step(np.full(14, 100.0))
    assert np.abs(after - before).max() <= sim.MAX_SPEED + 1e-6


@pytest.mark.parametrize("action", [np.zeros(7), np.full(14, np.nan), np.zeros((1, 14))])
def test_an_action_of_another_shape_or_not_finite_is_refused(action):
    with pytest.raises(ValueError, match="14 finite position targets"):
        sim.TransferEnv().step(action)


def test_reach_puts_the_hand_where_it_was_asked_to():
    rng = np.random.default_rng(0)
    for arm in (0, 1):
        posture = 1 + rng.uniform(-0.07, 0.07, 5)
        wanted = np.stack([rng.uniform(0.22, 0.55, 50), rng.uniform(-0.3, 0.3, 50)], axis=1)
        for point, joints in zip(wanted, sim.reach(wanted, posture)):
            found = (sim.hand(joints, arm)[:2] - sim.BASES[arm]) * sim.MIRROR[arm]
            assert np.abs(found - point).max() < 2e-3


@pytest.mark.parametrize("size", [(480, 640), (96, 128), (61, 83), (32, 32)])
def test_an_image_shows_cube_and_zone_in_their_places_at_any_size(size):
    height, width = size
    for seed in range(5):
        env = sim.TransferEnv()
        env.reset(seed)
        image = env.render(height, width)
        assert image.shape == (height, width, 3) and image.dtype == np.uint8

        def pixel(point, image=image):
            row = int((0.5 - point[1] / sim.WORLD[1]) * height)
            return image[row, int((0.5 + point[0] / sim.WORLD[0]) * width)].astype(int)

        red, green = pixel(env.cube[:2]), pixel(env.zone)
        assert red[0] > red[1] + 60 and red[0] > red[2] + 60
        assert green[1] > green[0] + 20


def test_a_small_image_is_the_large_one_scaled_down():
    scene = sim.expert_episode(0, 0)["scene"][100]
    large, small = (sim.render(scene, h, w).astype(float) for h, w in ((480, 640), (120, 160)))
    averaged = large.reshape(120, 4, 160, 4, 3).mean(axis=(1, 3))
    assert np.abs(averaged - small).mean() < 1.5


def test_arms_that_leave_the_image_are_cut_off():
    scene = sim.expert_episode(0, 0)["scene"][0].copy()
    for turn in np.linspace(-3, 3, 13):
        scene[[0, 7]] = turn
        assert sim.render(scene, 60, 80).shape == (60, 80, 3)


def test_demonstrations_are_columns_and_frames_that_fit_the_states():
    demos = sim.Demonstrations(episodes=3, seed=7, height=48, width=64)
    count = int(demos.lengths.sum())
    frames = demos.cameras[sim.CAMERA]
    assert demos.columns["observation.state"].shape == demos.columns["action"].shape == (count, 14)
    assert len(frames) == count and frames.shape == (48, 64)
    episode = sim.expert_episode(7, 1)
    row = int(demos.lengths[0]) + 20
    assert np.array_equal(demos.columns["action"][row], episode["action"][20])
    assert np.array_equal(frames.get(row), sim.render(episode["scene"][20], 48, 64))
    assert np.array_equal(frames.scenes[:, :14], demos.columns["observation.state"])


def test_frames_pickle_and_are_named_by_their_content():
    frames = sim.Demonstrations(episodes=1, seed=0, height=24, width=32).cameras[sim.CAMERA]
    copied = pickle.loads(pickle.dumps(frames))
    assert copied.span_key(0, 5) == frames.span_key(0, 5) and np.array_equal(copied.get(5), frames.get(5))
    assert np.array_equal(np.stack(list(frames.in_order(2, 5))), np.stack([frames.get(i) for i in (2, 3, 4)]))
    other = sim.Demonstrations(episodes=1, seed=1, height=24, width=32).cameras[sim.CAMERA]
    larger = sim.SceneFrames(frames.scenes, 48, 64)
    assert len({source.span_key(0, 5) for source in (frames, other, larger)}) == 3
    assert frames.span_key(0, 5) != frames.span_key(5, 10)
    out = torch.empty((2, 3, 24, 32), dtype=torch.uint8)
    frames.read_into(np.array([7, 3]), out)
    assert np.array_equal(out[1].permute(1, 2, 0).numpy(), frames.get(3))


def test_no_demonstration_at_all_is_refused():
    with pytest.raises(ValueError, match="at least 1 episode"):
        sim.Demonstrations(episodes=0, seed=0, height=24, width=32)
