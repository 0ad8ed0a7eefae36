"""What policies are rolled out in: the built-in task, and MuJoCo's bimanual tasks of gym-aloha.

    env = make_env("aloha-transfer-cube")
    state = env.reset(seed)                 # (14,) float32
    state = env.step(action)                # 50 times per second; env.success, env.over, env.details()
    image = env.render(height, width)       # (H, W, 3) uint8, only when it is asked for

`max_steps` is an episode's limit, `film_stride` and `film_size` say which steps a film shows and how large.
"""

import os
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from extras import sim
from extras.flags import UserError


class MissingPackage(UserError, ImportError):
    """An optional package is not installed; the sentence names the pip line."""


def make_env(name: str) -> Any:
    """One copy of an environment: "sim", or one of gym-aloha's."""
    return SimEnvironment() if name == "sim" else AlohaEnvironment(name)


def film_fps(name: str) -> float:
    return 50 / (SimEnvironment if name == "sim" else AlohaEnvironment).film_stride


class SimEnvironment(sim.TransferEnv):
    """The built-in task; an episode is over at success, which lasts."""

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
        tasks, suite_env, physics = load_aloha(name)
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
def load_aloha(name: str) -> tuple[Any, Any, Any]:
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
        raise MissingPackage(
            f"--env {name} needs MuJoCo's bimanual tasks ({error}): "
            "pip install gym-aloha==0.1.5 mujoco==3.7.0 dm-control==1.0.39"
        ) from None
    file = {"aloha-transfer-cube": "transfer_cube", "aloha-insertion": "insertion"}[name]
    return tasks, Environment, mujoco.Physics.from_xml_path(str(ASSETS_DIR / f"bimanual_viperx_{file}.xml"))
