"""The built-in task: two planar six-joint arms hand a cube over, with ALOHA's shapes, in numpy alone.

Seen from above. A red cube lies at random on the right, a green zone is marked at random on the left, and
neither arm reaches both: the right arm grasps the cube and carries it to the middle, the left one takes it
and puts it down in the zone. Cube and zone are visible in the image only; the state holds just the joints.

    env = TransferEnv()
    state = env.reset(seed=0)                   # (14,) joint positions
    state = env.step(action)                    # (14,) position targets, 50 a second
    image = env.render(480, 640)                # (480, 640, 3) uint8, any size
    env.success                                 # the cube lies in the zone, brought by both arms

    demos = Demonstrations(episodes=50, seed=0, height=480, width=640)   # columns, and frames drawn on demand

State and action as ALOHA has them: six joints (rad) and gripper of the left arm, then of the right. A gripper
is 0 closed, 1 open. Joint angles count from an arm's forward direction, mirrored for the right arm.

The physics: joints follow their targets with a first-order lag and a speed limit. Fingers that close near the
cube hold it and centre it; a second hand may close on a held cube; an open hand lets go.

A scene is the row of numbers that an image is drawn from: state (14), cube x, y, angle, zone x, y (m, rad).
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

FPS = 50
ACTION_DIM = 14
CAMERA = "observation.images.top"
MAX_STEPS = 300  # of a rollout; the expert needs about 175

WORLD = (1.6, 1.2)  # m, width and height of the image; the origin is its centre, y points up
BASES = np.array([[-0.62, 0.0], [0.62, 0.0]])  # left, right
MIRROR = np.array([[1.0, 1.0], [-1.0, 1.0]])  # an arm's own axes -> the world's
# m; 0.8 in all, so the middle is all that both arms reach
LINKS = np.array([0.20, 0.18, 0.14, 0.12, 0.09, 0.07])
HOME = np.array([0.26, 0.34])  # m, where the hand waits, in the arm's own axes
CUBE_SIZE, ZONE_RADIUS, GRASP_RADIUS = 0.08, 0.10, 0.065  # m
CUBE_AREA = np.array([[0.20, 0.41], [-0.34, 0.26]])  # m, x and y range; the zone's is its mirror image
LAG, MAX_SPEED = 0.35, 0.10  # share of the way to the target, and rad (or gripper strokes), per step
CLOSED, OPEN = 0.4, 0.6  # gripper positions below and above which a hand holds and lets go


class UserError(ValueError):
    """The user's to mend, in one sentence. Any other error is a bug and keeps its traceback."""


@dataclass(frozen=True)
class SimConfig:
    episodes: int = 50
    """Demonstrations that the scripted expert gives (the default dataset, where no other is named)."""
    seed: int = 0
    """Decides the demonstrations. Rollouts start from other scenes, whatever their seed."""


class TransferEnv:
    """One copy of the task. `reset` and `step` return the (14,) float32 state; `success` is as of now."""

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, seed: int) -> np.ndarray:
        """Start the scene that belongs to `seed`; no demonstration starts from the same one."""
        return self._start(np.random.default_rng([1, seed]))

    def _start(self, rng: np.random.Generator) -> np.ndarray:
        self.posture = 1 + rng.uniform(-0.07, 0.07, (2, 5))
        self.cube = np.array([*rng.uniform(*CUBE_AREA.T), rng.uniform(-0.6, 0.6)])
        self.zone = rng.uniform(*CUBE_AREA.T) * [-1, 1]
        self.grips = np.ones(2)
        self.joints = np.stack(
            [reach(HOME + rng.uniform(-0.02, 0.02, 2), self.posture[arm]) for arm in (0, 1)]
        )
        self.closed = np.zeros(2, bool)
        self.holders: list[int] = []  # arms that hold the cube, the one that moves it first
        self.carriers: list[int] = []  # arms that have held it so far, in order
        self.grasp = np.zeros(3)  # the cube in the first holder's hand
        return self.state

    @property
    def state(self) -> np.ndarray:
        return (
            np.concatenate([self.joints, self.grips[:, None]], axis=1).reshape(ACTION_DIM).astype(np.float32)
        )

    @property
    def scene(self) -> np.ndarray:
        return np.concatenate([self.state, self.cube, self.zone]).astype(np.float32)

    @property
    def success(self) -> bool:
        """The right arm gave the cube to the left one, and it lies in the zone with no hand on it."""
        inside = np.linalg.norm(self.cube[:2] - self.zone) < ZONE_RADIUS
        return bool(inside and not self.holders and self.carriers == [1, 0])

    def step(self, action: np.ndarray) -> np.ndarray:
        """One control step of 20 ms towards `action`, 14 position targets.

        Raises:
            ValueError: the action has another shape or is not finite.
        """
        target = np.asarray(action, np.float64)
        if target.shape != (ACTION_DIM,) or not np.isfinite(target).all():
            raise ValueError(f"an action is {ACTION_DIM} finite position targets, got {target!r}")
        target = target.reshape(2, 7)
        self.joints += np.clip(LAG * (target[:, :6] - self.joints), -MAX_SPEED, MAX_SPEED)
        self.grips += np.clip(LAG * (np.clip(target[:, 6], 0, 1) - self.grips), -MAX_SPEED, MAX_SPEED)
        hands = [hand(self.joints[arm], arm) for arm in (0, 1)]
        first = self.holders[:1]
        for arm in (0, 1):
            near = np.linalg.norm(hands[arm][:2] - self.cube[:2]) < GRASP_RADIUS
            if not self.closed[arm] and self.grips[arm] < CLOSED:
                self.closed[arm] = True
                if near:
                    self.holders.append(arm)
                    self.carriers += [arm] if arm not in self.carriers else []
            elif self.closed[arm] and self.grips[arm] > OPEN:
                self.closed[arm] = False
            # a second hand that is pulled away, or an open one, loses the cube
            if arm in self.holders and (not self.closed[arm] or (self.holders[0] != arm and not near)):
                self.holders.remove(arm)
        if self.holders:
            x, y, heading = hands[self.holders[0]]
            turn = np.array([[np.cos(heading), -np.sin(heading)], [np.sin(heading), np.cos(heading)]])
            if self.holders[:1] != first:
                self.grasp = np.array([*(turn.T @ (self.cube[:2] - [x, y])), self.cube[2] - heading])
            self.grasp[:2] *= 0.8  # closing fingers centre what they hold
            self.cube = np.array([*(turn @ self.grasp[:2] + [x, y]), self.grasp[2] + heading])
        return self.state

    def render(self, height: int, width: int) -> np.ndarray:
        return render(self.scene, height, width)


# ---- kinematics --------------------------------------------------------------------------------------------
def chain(joints: np.ndarray, arm: int) -> np.ndarray:
    """(7, 2) points from an arm's base to the point between its fingers, in the world."""
    angles = np.cumsum(joints)
    steps = LINKS[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1) * MIRROR[arm]
    return BASES[arm] + np.concatenate([np.zeros((1, 2)), np.cumsum(steps, axis=0)])


def hand(joints: np.ndarray, arm: int) -> np.ndarray:
    """(3,) position and heading of a hand in the world."""
    points = chain(joints, arm)
    return np.array([*points[-1], np.arctan2(*(points[-1] - points[-2])[::-1])])


def reach(points: np.ndarray, posture: np.ndarray) -> np.ndarray:
    """Joint angles (..., 6) that bring the hand to points (..., 2), given in the arm's own axes.

    Of all solutions this is the one whose last five joints bend in the proportions `posture` (5,): one number
    then sets the distance from the base, which falls as the arm bends; the first joint sets the direction.
    """
    bend = np.linspace(1.1, 0.02, 256)
    angles = np.cumsum(-bend[:, None] * np.concatenate([[0.0], posture]), axis=1)
    tip = (LINKS * np.exp(1j * angles)).sum(axis=1)
    wanted = points[..., 0] + 1j * points[..., 1]
    bent = np.interp(np.abs(wanted), np.abs(tip), bend)
    turn = np.angle(wanted) - np.interp(np.abs(wanted), np.abs(tip), np.unwrap(np.angle(tip)))
    return np.concatenate([turn[..., None], -bent[..., None] * posture], axis=-1)


# ---- the expert --------------------------------------------------------------------------------------------
def expert_episode(seed: int, episode: int) -> dict[str, np.ndarray]:
    """Demonstration number `episode` of `seed`: a pure function of the two.

    Returns:
        "state" (T, 14) and "scene" (T, 19) before each "action" (T, 14); "success" (), bool, after the last.
    """
    rng = np.random.default_rng([2, seed, episode])
    env = TransferEnv()
    env._start(rng)
    actions = plan(env, rng)
    states, scenes = [], []
    for action in actions:
        states.append(env.state)
        scenes.append(env.scene)
        env.step(action)
    return {
        "state": np.stack(states),
        "action": actions,
        "scene": np.stack(scenes),
        "success": np.array(env.success),
    }


def plan(env: TransferEnv, rng: np.random.Generator) -> np.ndarray:
    """(T, 14) float32 targets that solve the scene; like a person's, no two are paced and aimed the same."""

    def near(point: np.ndarray, spread: float) -> np.ndarray:
        return point + rng.normal(0, spread / 2, 2).clip(-spread, spread)

    pace = rng.uniform(0.97, 1.03)
    cube, zone, meet = near(env.cube[:2], 0.008), near(env.zone, 0.012), near(np.array([0.0, -0.05]), 0.012)
    home = [hand(env.joints[arm], arm)[:2] for arm in (0, 1)]
    aside = near(np.array([-0.14, -0.02]), 0.015)
    away = [near(BASES[arm] + HOME * MIRROR[arm], 0.02) for arm in (0, 1)]
    # step, position, gripper: a hand moves from key to key with the smoothest of motions (minimum jerk)
    right = [(0, home[1], 1), (60, cube, 1), (64, cube, 1), (74, cube, 0), (76, cube, 0), (102, meet, 0)]
    right += [(116, meet, 0), (123, meet, 1), (126, meet, 1), (152, away[1], 1)]
    left = [(0, home[0], 1), (20, home[0], 1), (76, aside, 1), (86, aside, 1), (104, meet, 1), (113, meet, 0)]
    left += [(124, meet, 0), (152, zone, 0), (156, zone, 0), (163, zone, 1), (182, zone + [-0.05, 0.08], 1)]
    steps = np.arange(round(174 * pace)) / pace
    targets = []
    for arm, keys in enumerate((left, right)):
        times, positions, grips = (np.array(column, float) for column in zip(*keys))
        after = np.searchsorted(times, steps, side="right").clip(1, len(times) - 1)
        share = ((steps - times[after - 1]) / (times[after] - times[after - 1])).clip(0, 1)
        eased = (share**3 * (10 - 15 * share + 6 * share**2))[:, None]
        path = positions[after - 1] + eased * (positions[after] - positions[after - 1])
        joints = reach((path - BASES[arm]) * MIRROR[arm], env.posture[arm])
        tremor = rng.normal(0, 0.004, (len(steps) + 14, 6))
        joints = joints + np.stack([np.convolve(t, np.ones(15) / 15**0.5, "valid") for t in tremor.T], axis=1)
        targets += [joints, (grips[after - 1] + share * (grips[after] - grips[after - 1]))[:, None]]
    return np.concatenate(targets, axis=1).astype(np.float32)


class Demonstrations:
    """Expert episodes as dataset columns, with one camera whose frames are drawn when asked for.

    columns: "observation.state" and "action" (N, 14) float32, one row per frame. lengths: (episodes,) frames.
    cameras: {CAMERA: SceneFrames}.
    """

    def __init__(self, episodes: int, seed: int, height: int, width: int) -> None:
        if episodes < 1:
            raise UserError(f"the built-in task needs at least 1 episode, got {episodes}.")
        demos = [expert_episode(seed, episode) for episode in range(episodes)]
        self.fps = FPS
        self.lengths = np.array([len(episode["action"]) for episode in demos])
        self.columns = {
            "observation.state": np.concatenate([episode["state"] for episode in demos]),
            "action": np.concatenate([episode["action"] for episode in demos]),
        }
        scenes = np.concatenate([episode["scene"] for episode in demos])
        self.cameras = {CAMERA: SceneFrames(scenes, height, width)}


class SceneFrames:
    """Frames of scenes (N, 19), drawn when asked for (a data.FrameSource). They are small to pickle, so that
    loader workers draw them."""

    # It would be, but of small images two threads draw fewer than one, since they hold Python's lock.
    thread_safe = False

    def __init__(self, scenes: np.ndarray, height: int, width: int) -> None:
        self.scenes, self.shape = scenes, (height, width)

    def __len__(self) -> int:
        return len(self.scenes)

    def get(self, index: int) -> np.ndarray:
        """(H, W, 3) uint8"""
        return render(self.scenes[index], *self.shape)

    def read_into(self, rows: np.ndarray, out: Any) -> None:
        """Draw the frames of these rows into out, a torch tensor (B, 3, H, W) uint8."""
        pixels = out.numpy()
        for i, row in enumerate(rows.tolist()):
            pixels[i] = self.get(row).transpose(2, 0, 1)

    def in_order(self, start: int, stop: int) -> Iterator[np.ndarray]:
        return (self.get(index) for index in range(start, stop))

    @cached_property
    def digest(self) -> str:
        """Of all scenes."""
        return hashlib.sha256(self.scenes.tobytes()).hexdigest()[:16]

    def span_key(self, start: int, stop: int) -> str:
        """Names the content of these frames: equal only for equal ones."""
        return f"sim-{self.digest}-{self.shape[0]}x{self.shape[1]} {start} {stop}"


# ---- the renderer ------------------------------------------------------------------------------------------
TABLE, ZONE, CUBE, FINGER = (206, 204, 198), (24, 140, 60), (214, 30, 30), (96, 98, 104)
LINK = ((142, 158, 182), (188, 172, 140))  # left, right: pale, so that cube and zone stand out
JOINT = ((174, 188, 208), (214, 202, 174))


@lru_cache(maxsize=4)
def _canvas(height: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pixel centres x (W,) and y (H,) in m, and the bare table (H, W, 3) uint8."""
    xs = ((np.arange(width, dtype=np.float32) + 0.5) / width - 0.5) * WORLD[0]
    ys = (0.5 - (np.arange(height, dtype=np.float32) + 0.5) / height) * WORLD[1]
    checks = (np.floor(xs / 0.2)[None] + np.floor(ys / 0.2)[:, None]) % 2
    table = np.array(TABLE) - 8 * checks[..., None]
    for base in BASES:
        table[np.hypot(xs[None] - base[0], ys[:, None] - base[1]) < 0.065] = 150
    return xs, ys, table.astype(np.uint8)


def render(scene: np.ndarray, height: int, width: int) -> np.ndarray:
    """(height, width, 3) uint8 image of a scene (19,): each shape is blended into the pixels around it."""
    xs, ys, table = _canvas(height, width)
    image = table.copy()
    scene = np.asarray(scene, np.float64)
    across, down = width / WORLD[0], height / WORLD[1]  # pixels per metre

    def paint(middle, reach_x: float, reach_y: float, colour: tuple, distance: Callable) -> None:
        """Fill a shape within the reaches of `middle`; distance(x, y) from its edge is negative inside."""
        x, y = middle
        left = max(int((x - reach_x + WORLD[0] / 2) * across) - 1, 0)
        right = int((x + reach_x + WORLD[0] / 2) * across) + 2
        top = max(int((WORLD[1] / 2 - y - reach_y) * down) - 1, 0)
        bottom = int((WORLD[1] / 2 - y + reach_y) * down) + 2
        if right > 0 and bottom > 0:
            cover = distance(xs[left:right] - np.float32(x), (ys[top:bottom] - np.float32(y))[:, None])
            cover *= np.float32(-across)
            cover += np.float32(0.5)
            np.minimum(np.maximum(cover, 0, out=cover), 1, out=cover)
            for channel in range(3):  # one by one: numpy is slow at an inner axis of length 3
                part = image[top:bottom, left:right, channel]
                part[:] = part + cover * (np.float32(colour[channel]) - part)

    def bar(start: np.ndarray, end: np.ndarray, radius: float, colour: tuple) -> None:
        hx, hy = ((end - start) / 2).astype(np.float32)
        ux, uy = (hx, hy) / (hx * hx + hy * hy)

        def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            along = np.minimum(np.maximum(x * ux + y * uy, -1), 1)
            return np.sqrt(np.square(x - along * hx) + np.square(y - along * hy)) - np.float32(radius)

        paint((start + end) / 2, abs(hx) + radius, abs(hy) + radius, colour, distance)

    def rings(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        away = np.sqrt(x * x + y * y)
        return np.minimum(
            away - np.float32(0.3 * ZONE_RADIUS), np.abs(away - 0.86 * ZONE_RADIUS) - 0.14 * ZONE_RADIUS
        )

    paint(scene[17:19], ZONE_RADIUS, ZONE_RADIUS, ZONE, rings)
    arms = scene[:ACTION_DIM].reshape(2, 7)
    points = [chain(arms[arm, :6], arm) for arm in (0, 1)]
    for arm in (0, 1):
        for i in range(5):
            bar(points[arm][i], points[arm][i + 1], 0.030 - 0.003 * i, LINK[arm])
        for i in range(6):
            radius = 0.036 - 0.003 * i
            paint(
                points[arm][i], radius, radius, JOINT[arm], lambda x, y, r=radius: np.sqrt(x * x + y * y) - r
            )
    paint(scene[14:16], 0.71 * CUBE_SIZE, 0.71 * CUBE_SIZE, CUBE, _square(scene[16], CUBE_SIZE / 2))
    for arm in (0, 1):
        wrist, tip = points[arm][5:]
        gap = CUBE_SIZE / 2 + 0.006 + 0.03 * arms[arm, 6]
        heading = np.arctan2(*(tip - wrist)[::-1])
        paint((wrist + tip) / 2, 0.12, 0.12, FINGER, _fingers(heading, gap, LINKS[-1] / 2))
    return image


def _square(angle: float, half: float) -> Callable:
    c, s = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    return lambda x, y: np.maximum(np.abs(c * x + s * y), np.abs(c * y - s * x)) - np.float32(half)


def _fingers(heading: float, gap: float, half: float) -> Callable:
    """Distance to a palm at -half and to two fingers from there to past +half, `gap` off the middle line."""
    c, s = np.float32(np.cos(heading)), np.float32(np.sin(heading))

    def distance(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        ahead, beside = c * x + s * y, np.abs(c * y - s * x)
        palm = np.maximum(np.abs(ahead + np.float32(half)) - 0.011, beside - np.float32(gap + 0.009))
        finger = np.maximum(
            np.abs(ahead - 0.01) - np.float32(half + 0.01), np.abs(beside - np.float32(gap)) - 0.009
        )
        return np.minimum(palm, finger)

    return distance
