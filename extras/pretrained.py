"""ImageNet weights for the backbone, by torchvision's names; from TORCH_HOME, or downloaded to it.

    load_backbone(policy)      # what policy.config names; nothing without a camera

This file imports nothing of the project.
"""

from typing import Any

import torch
from torch import Tensor, nn


class UserError(ValueError):
    """The user's to mend, in one sentence: flag or file, rule, way out. Other errors are bugs."""


def load_backbone(policy: nn.Module) -> None:
    """Load the weights that the policy's config names, if it has a camera."""
    owner: Any = policy
    state = pretrained_state(owner.config) if owner.model.cameras else None
    if state is not None:
        owner.model.backbone.load_state_dict(state)


def pretrained_state(config: Any) -> dict[str, Tensor] | None:
    """The backbone weights that the config names, from TORCH_HOME or downloaded to it; None for None.

    UserError: they are unknown, another ResNet's, or cannot be had (offline and not cached).
    """
    name, backbone = config.pretrained_backbone_weights, config.vision_backbone
    if name is None:
        return None
    import torchvision

    flag = "--policy.pretrained-backbone-weights"
    known = [str(weights) for weights in torchvision.models.get_model_weights(backbone)]
    rule = f"is not of --policy.vision-backbone={backbone}; use one of {', '.join(known)}, None."
    if name not in known:
        raise UserError(f"{flag}={name} {rule}")
    try:
        state = torchvision.models.get_weight(name).get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:  # no network is an OSError, a torn file a RuntimeError
        place = f"a directory whose hub/checkpoints holds the file (now {torch.hub.get_dir()})"
        way = f"set TORCH_HOME to {place}, or use {flag} None"
        raise UserError(f"{flag}={name} could not be loaded ({error}): {way}.") from None
    skip = ("fc.weight", "fc.bias", "num_batches_tracked")
    return {key: value for key, value in state.items() if not key.endswith(skip)}
