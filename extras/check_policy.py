"""What no ACT policy can be made of, told by its flag: where a configuration enters, from flags or a file."""

import math

from model_act import NORMALIZATION_STATS, ACTConfig, refuse_unless

BACKBONES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
# The smallest value, and the bound that all stay below; NaN is in no range.
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("chunk_size", "n_action_steps", "dim_model", "n_heads"), (1, math.inf)),
    **dict.fromkeys(("dim_feedforward", "latent_dim", "n_encoder_layers"), (1, math.inf)),
    **dict.fromkeys(("n_decoder_layers", "n_vae_encoder_layers"), (1, math.inf)),
    **dict.fromkeys(("optimizer_lr", "optimizer_lr_backbone"), (0, math.inf)),
    **dict.fromkeys(("optimizer_weight_decay", "kl_weight"), (0, math.inf)),
    "dropout": (0, 1),
}


def check_config(config: ACTConfig) -> None:
    """Refuse what no policy can be made of: a UserError with the flag, the rule and the way out."""

    def check(fine: bool, name: str, rule: str) -> None:
        flag = f"--policy.{name.replace('_', '-')}={getattr(config, name)}"
        refuse_unless(fine, f"{flag} cannot work: {rule}.")

    for name, (low, high) in RANGES.items():
        end = "finite" if high == math.inf else f"below {high}"
        check(low <= getattr(config, name) < high, name, f"it must be at least {low} and {end}")
    check(config.n_obs_steps == 1, "n_obs_steps", "only one observation step is supported; use 1")
    rule = f"it must be at most --policy.chunk-size={config.chunk_size}, the actions there are to execute"
    check(config.n_action_steps <= config.chunk_size, "n_action_steps", rule)
    if config.temporal_ensemble_coeff is not None:
        check(math.isfinite(config.temporal_ensemble_coeff), "temporal_ensemble_coeff", "it must be finite")
        rule = "temporal ensembling predicts at every step; use --policy.n-action-steps=1"
        check(config.n_action_steps == 1, "n_action_steps", rule)
    check(config.dim_model % config.n_heads == 0, "n_heads", f"it must divide dim-model={config.dim_model}")
    check(config.dim_model % 2 == 0, "dim_model", "sine and cosine positions need an even width")
    activation, backbone = config.feedforward_activation, config.vision_backbone
    check(activation in ("relu", "gelu", "glu"), "feedforward_activation", "use relu, gelu or glu")
    halves = activation == "glu" and config.dim_feedforward % 2 == 1
    check(not halves, "dim_feedforward", "glu halves it, so it must be even")
    check(backbone in BACKBONES, "vision_backbone", f"use one of {', '.join(BACKBONES)}")
    can_dilate = not config.replace_final_stride_with_dilation or backbone not in BACKBONES[:2]
    rule = f"{backbone} cannot dilate; use --policy.vision-backbone=resnet50 or turn it off"
    check(can_dilate, "replace_final_stride_with_dilation", rule)
    types, modes = ("VISUAL", "STATE", "ENV", "ACTION"), tuple(NORMALIZATION_STATS)
    for kind, mode in config.normalization_mapping.items():
        rule = f"{kind}: {mode} is not one of {', '.join(types)} to one of {', '.join(modes)}"
        check(kind in types and mode in modes, "normalization_mapping", rule)
