"""ACT, the Action Chunking Transformer, as LeRobot has it: policy, losses, noise, network, layers.

    policy = ACTPolicy(ACTConfig(), input_features, output_features, stats)
    loss, parts = policy(batch)                   # train(): L1 + KL with dropout; eval(): L1, latent at 0
    actions = policy.predict_action_chunk(batch)  # (B, S, A) in the data's own units
    action = policy.select_action(batch)          # (B, A), one control step; reset() at an episode's start

Parameters and buffers have LeRobot's names and shapes, so weights interchange. A batch holds, each if the
features name it, "observation.state" (B, state_dim), "observation.environment_state" (B, env_dim) and one
(B, 3, H, W) image per camera (uint8, or float in [0, 1]); for a loss "action" (B, S, A) and "action_is_pad"
(B, S); and, both optional, "num_valid" () and "noise_seed" (B,).

- Noise. Every dropout mask and the latent's noise is a function of the sample's `noise_seed` and the place in
  the network: the same whatever else is in the batch, on any rank or device, eager or compiled.
- Normaliser. The L1 sum is divided by `num_valid`, the unpadded steps of the whole optimizer window over the
  number of its pieces, so that any split has the gradient of the undivided batch. Without it the batch's own
  steps count: LeRobot's loss.
- Nothing is read back to the host. `policy.model.compile()` makes one graph for training and one for
  evaluation and prediction. Under FSDP the wrap units can be compiled instead: tensors in, tensors out.

Shapes: B batch, K cameras, S chunk, N encoder tokens, M queries, D dim_model, H heads, L latent, A action.
Source: Zhao et al. 2023, arXiv:2304.13705; names, defaults and loss from LeRobot 0.6.
"""

import math
from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STATE, ENV_STATE, ACTION = "observation.state", "observation.environment_state", "action"
BACKBONES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
NORMALIZATION_STATS: dict[str, tuple[str, ...]] = {  # mode -> the statistics it needs
    "IDENTITY": (),
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}


@dataclass(frozen=True)
class ACTConfig:
    """ACT's hyper-parameters: LeRobot's names and defaults, which are the paper's for bimanual ALOHA."""

    n_obs_steps: int = 1
    """Observation steps given to the policy; only 1 is supported, as in LeRobot."""
    chunk_size: int = 100
    """Actions predicted at once, in control steps."""
    n_action_steps: int = 100
    """Actions executed before the next prediction, in control steps; at most chunk_size."""
    normalization_mapping: dict[str, str] = field(
        default_factory=lambda: {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    )
    """Feature type (VISUAL, STATE, ENV, ACTION) to mode (IDENTITY, MEAN_STD, MIN_MAX, QUANTILES, QUANTILE10);
    a type that is not named passes as it is."""
    vision_backbone: str = "resnet18"
    """torchvision ResNet that encodes the images: resnet18, 34, 50, 101 or 152; one for all cameras."""
    pretrained_backbone_weights: str | None = "ResNet18_Weights.IMAGENET1K_V1"
    """torchvision weights that the backbone starts from; None: random ones, and no download."""
    replace_final_stride_with_dilation: bool = False
    """Dilate the last ResNet stage instead of striding: four times the image tokens. resnet50 and larger."""
    pre_norm: bool = False
    """Normalise before each transformer block instead of after it."""
    dim_model: int = 512
    """Width of the transformer."""
    n_heads: int = 8
    """Attention heads; divides dim_model."""
    dim_feedforward: int = 3200
    """Width of the feed-forward layers."""
    feedforward_activation: str = "relu"
    """relu, gelu, or glu (whose gate takes half of dim_feedforward)."""
    n_encoder_layers: int = 4
    """Layers of the observation encoder."""
    n_decoder_layers: int = 1
    """Layers of the action decoder. The original code says 7 but uses only the first, so 1 is parity."""
    use_vae: bool = True
    """Train with the variational objective: a further encoder reads the target actions into a latent."""
    latent_dim: int = 32
    """Width of the latent."""
    n_vae_encoder_layers: int = 4
    """Layers of the VAE's encoder."""
    temporal_ensemble_coeff: float | None = None
    """Temporal ensembling in select_action (paper: 0.01), which needs n_action_steps 1. None: off."""
    dropout: float = 0.1
    """Dropout probability in the transformer, met to within 2^-17."""
    kl_weight: float = 10.0
    """Weight of the KL term in the loss."""
    optimizer_lr: float = 1e-5
    """AdamW's learning rate outside the backbone."""
    optimizer_weight_decay: float = 1e-4
    """AdamW's weight decay."""
    optimizer_lr_backbone: float = 1e-5
    """AdamW's learning rate of the backbone."""

    def __post_init__(self) -> None:
        def check(fine: bool, name: str, rule: str) -> None:
            if not fine:
                flag = name.replace("_", "-")
                raise ValueError(f"--policy.{flag}={getattr(self, name)} cannot work: {rule}.")

        check(self.n_obs_steps == 1, "n_obs_steps", "only one observation step is supported; use 1")
        counts = ("chunk_size", "n_action_steps", "dim_model", "n_heads", "dim_feedforward", "latent_dim")
        layers = ("n_encoder_layers", "n_decoder_layers", "n_vae_encoder_layers")
        for name in counts + layers:
            check(getattr(self, name) >= 1, name, "it must be at least 1")
        for name in ("kl_weight", "optimizer_lr", "optimizer_weight_decay", "optimizer_lr_backbone"):
            check(0 <= getattr(self, name) < math.inf, name, "it must be a finite number of at least 0")
        check(0 <= self.dropout < 1, "dropout", "it must be at least 0 and below 1")
        rule = f"it must be at most --policy.chunk-size={self.chunk_size}, the actions there are to execute"
        check(self.n_action_steps <= self.chunk_size, "n_action_steps", rule)
        if self.temporal_ensemble_coeff is not None:
            check(math.isfinite(self.temporal_ensemble_coeff), "temporal_ensemble_coeff", "it must be finite")
            rule = "temporal ensembling predicts at every step; use --policy.n-action-steps=1"
            check(self.n_action_steps == 1, "n_action_steps", rule)
        check(self.dim_model % self.n_heads == 0, "n_heads", f"it must divide dim-model={self.dim_model}")
        check(self.dim_model % 2 == 0, "dim_model", "sine and cosine positions need an even width")
        activation, width = self.feedforward_activation, self.dim_feedforward
        check(activation in ("relu", "gelu", "glu"), "feedforward_activation", "use relu, gelu or glu")
        check(activation != "glu" or width % 2 == 0, "dim_feedforward", "glu halves it, so it must be even")
        check(self.vision_backbone in BACKBONES, "vision_backbone", f"use one of {', '.join(BACKBONES)}")
        dilated_basic = self.replace_final_stride_with_dilation and self.vision_backbone in BACKBONES[:2]
        rule = f"{self.vision_backbone} cannot dilate; use --policy.vision-backbone=resnet50 or turn it off"
        check(not dilated_basic, "replace_final_stride_with_dilation", rule)
        kinds, modes = ("VISUAL", "STATE", "ENV", "ACTION"), tuple(NORMALIZATION_STATS)
        for kind, mode in self.normalization_mapping.items():
            rule = f"{kind}: {mode} is not one of {', '.join(kinds)} to one of {', '.join(modes)}"
            check(kind in kinds and mode in modes, "normalization_mapping", rule)


# config.json's other keys, in LeRobot's order, with the values of a run that uses none of them.
LEROBOT_KEYS: dict[str, Any] = {
    **{"device": None, "use_amp": False, "use_peft": False, "push_to_hub": False, "repo_id": None},
    **dict.fromkeys(["private", "tags", "license", "pretrained_path", "pretrained_revision"]),
}


class ACTPolicy(nn.Module):
    """ACT with its normalisation, its loss and its choice of actions."""

    wrap_modules = ("ACTEncoderLayer", "ACTDecoderLayer")
    compile_modules = ("model",)
    forward_methods = ("predict_action_chunk",)

    def __init__(
        self,
        config: ACTConfig,
        input_features: dict[str, dict],
        output_features: dict[str, dict],
        stats: dict[str, dict[str, Tensor]] | None = None,
    ) -> None:
        """Random weights from torch's global generator; nothing is downloaded.

        Args:
            input_features: LeRobot's form, {"observation.state": {"type": "STATE", "shape": [14]}, ...}.
                Cameras have the shape (3 or 1, H, W); their order is the order of their tokens.
            output_features: the same for "action".
            stats: stats[feature][statistic]. None takes batches as already normalised; uint8 is still scaled.
        Raises:
            ValueError: the features cannot make an ACT policy, or a statistic is missing or misshapen.
        """
        super().__init__()
        self.config = config
        self.input_features, self.output_features = (
            {key: {"type": f["type"], "shape": list(f["shape"])} for key, f in features.items()}
            for features in (input_features, output_features)
        )
        check_features(config, self.input_features, self.output_features)
        self.stats = stats
        self.model = ACT(config, self.input_features, self.output_features, stats)
        self.reset()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The batch's loss, on its device, in normalised units.

        Train mode: L1 + kl_weight * KL, with dropout and a sampled latent. Eval mode: L1, the latent at 0.
        Padded steps are selected away: what they hold, NaN included, changes nothing.

        Returns:
            0-d loss, and detached parts: 0-d "l1_loss"; train mode with a VAE: 0-d "kld_loss"; eval mode:
            "l1_per_sample" (B,).
        Raises:
            ValueError: a key is missing from the batch, or its actions are not one chunk long.
        """
        action, is_pad = self._need(batch, ACTION), self._need(batch, "action_is_pad")
        if action.dim() != 3 or action.shape[1] != self.config.chunk_size:
            shape, chunk_size = tuple(action.shape), self.config.chunk_size
            raise ValueError(
                f"The batch's action has shape {shape}; it must be (batch, {chunk_size}, action)."
            )
        num_valid = batch["num_valid"] if "num_valid" in batch else (~is_pad).sum()
        inputs = self._observation(batch)
        if not self.training:
            error = l1_error(self.model(inputs), self.model.normalize(ACTION, action), is_pad)
            loss = mean_over_valid(error.sum(), num_valid, error.shape[-1])
            per_sample = mean_over_valid(error.sum((1, 2)), (~is_pad).sum(1), error.shape[-1])
            return loss, {"l1_loss": loss.detach(), "l1_per_sample": per_sample.detach()}
        inputs |= {ACTION: action, "action_is_pad": is_pad, "num_valid": num_valid}
        if self.config.use_vae or self.config.dropout > 0:
            seed = batch.get("noise_seed")
            if seed is None:
                seed = torch.randint(2**63 - 1, action.shape[:1], device=action.device)
            inputs["noise_seed"] = seed
        loss, l1_loss, kld_loss = self.model(inputs)
        parts = {"l1_loss": l1_loss.detach()}
        if kld_loss is not None:
            parts["kld_loss"] = kld_loss.detach()
        return loss, parts

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Tensor]) -> Tensor:
        """The next chunk of actions from one observation, with the latent at its prior mean (0), no dropout.

        Returns:
            (B, S, A) in the data's own units; normalised if the policy has no statistics.
        Source: Zhao et al. 2023, Algorithm 2.
        """
        return self.model.unnormalize(ACTION, self.model(self._observation(batch)))

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor]) -> Tensor:
        """This control step's action (B, A): next of the queued chunk, or the ensemble of all chunks."""
        if self._ensembler is not None:
            return self._ensembler.update(self.predict_action_chunk(batch))
        if not self._queue:
            self._queue.extend(self.predict_action_chunk(batch)[:, : self.config.n_action_steps].unbind(1))
        return self._queue.popleft()

    def reset(self) -> None:
        """Forget the queue and the ensemble: call at the start of each episode."""
        coeff = self.config.temporal_ensemble_coeff
        self._queue: deque[Tensor] = deque()
        self._ensembler = None if coeff is None else ACTTemporalEnsembler(coeff, self.config.chunk_size)

    def optim_groups(self, lr: float, lr_backbone: float, weight_decay: float) -> list[dict[str, Any]]:
        """LeRobot's two parameter groups in its order: the rest, and the backbone (empty without cameras)."""
        groups: tuple[list, list] = ([], [])
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                groups[name.startswith("model.backbone")].append(parameter)
        return [
            {"params": params, "lr": rate, "weight_decay": weight_decay}
            for params, rate in zip(groups, (lr, lr_backbone))
        ]

    def config_dict(self, device: str) -> dict[str, Any]:
        """The content of LeRobot's config.json, keys in its order."""
        config = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        config["normalization_mapping"] = dict(self.config.normalization_mapping)
        features = {"input_features": self.input_features, "output_features": self.output_features}
        head = {"type": "act", "n_obs_steps": config.pop("n_obs_steps")}
        return head | features | LEROBOT_KEYS | {"device": device} | config

    @classmethod
    def from_config_dict(
        cls, config: dict[str, Any], stats: dict[str, dict[str, Tensor]] | None = None
    ) -> "ACTPolicy":
        """Build from a config.json's content; keys that it lacks take their defaults.

        Raises:
            ValueError: another type of policy, no features, an unknown key, or a value of the wrong type.
        """
        if config.get("type", "act") != "act":
            raise ValueError(
                f"config.json is of a policy of type {config['type']!r}; only 'act' can be loaded."
            )
        hints = get_type_hints(ACTConfig)
        known = {"type", "input_features", "output_features", *LEROBOT_KEYS, *hints}
        if unknown := sorted(set(config) - known):
            raise ValueError(
                f"config.json has keys that ACT does not know, {', '.join(unknown)}; remove them."
            )
        for name in ("input_features", "output_features"):
            features = config.get(name)
            if not isinstance(features, dict) or not all(
                isinstance(f, dict) and {"type", "shape"} <= set(f) for f in features.values()
            ):
                raise ValueError(f"config.json's {name} must map each feature to its type and shape.")
        values = {name: checked(name, config[name], hint) for name, hint in hints.items() if name in config}
        return cls(ACTConfig(**values), config["input_features"], config["output_features"], stats)

    def load_pretrained_backbone(self) -> None:
        """Load the torchvision weights that the config names (`pretrained_state`), if there is a camera."""
        state = pretrained_state(self.config) if self.model.cameras else None
        if state is not None:
            self.model.backbone.load_state_dict(state)

    def _observation(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: self._need(batch, key) for key in self.model.observations}

    def _need(self, batch: dict[str, Tensor], key: str) -> Tensor:
        if key not in batch:
            raise ValueError(f"The batch lacks {key!r}, which the policy needs; it has {', '.join(batch)}.")
        return batch[key]


def pretrained_state(config: ACTConfig) -> dict[str, Tensor] | None:
    """The backbone weights that the config names, from TORCH_HOME or downloaded to it; None for None.

    Raises:
        ValueError: the weights are unknown or another ResNet's, or cannot be had (offline, not cached).
    """
    name, backbone = config.pretrained_backbone_weights, config.vision_backbone
    if name is None:
        return None
    import torchvision

    flag = "--policy.pretrained-backbone-weights"
    known = [str(weights) for weights in torchvision.models.get_model_weights(backbone)]
    if name not in known:
        choice = ", ".join([*known, "None"])
        raise ValueError(f"{flag}={name} is not of --policy.vision-backbone={backbone}; use one of {choice}.")
    try:
        state = torchvision.models.get_weight(name).get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:  # no network is an OSError, a torn file a RuntimeError
        raise ValueError(
            f"{flag}={name} could not be loaded ({error}): set TORCH_HOME to a directory whose "
            f"hub/checkpoints holds the file (now {torch.hub.get_dir()}), or use {flag} None."
        ) from None
    skip = ("fc.weight", "fc.bias", "num_batches_tracked")
    return {key: value for key, value in state.items() if not key.endswith(skip)}


def check_features(config: ACTConfig, inputs: dict[str, dict], outputs: dict[str, dict]) -> None:
    """LeRobot's rules on features, and the shapes that the network takes, or a ValueError."""
    if ENV_STATE not in inputs and not any(f["type"] == "VISUAL" for f in inputs.values()):
        raise ValueError(f"ACT needs a camera or {ENV_STATE}; the inputs are {', '.join(inputs) or 'empty'}.")
    for key, f in inputs.items():
        kind, shape = f["type"], f["shape"]
        if kind != "VISUAL" and (key, kind) not in ((STATE, "STATE"), (ENV_STATE, "ENV")):
            raise ValueError(f"ACT takes cameras, {STATE} (STATE) and {ENV_STATE} (ENV), not {key} ({kind}).")
        if kind == "VISUAL" and (len(shape) != 3 or shape[0] not in (1, 3)):
            raise ValueError(
                f"Camera {key} has shape {shape}; ACT takes (channels, height, width) of 3 or 1 channels."
            )
        if kind == "VISUAL" and config.dim_model % 4:
            raise ValueError(
                f"--policy.dim-model={config.dim_model} must be a multiple of 4 to take cameras."
            )
        if kind != "VISUAL" and len(shape) != 1:
            raise ValueError(f"{key} has shape {shape}; ACT takes a vector.")
    action = outputs.get(ACTION, {"type": None, "shape": []})
    if action["type"] != "ACTION" or len(action["shape"]) != 1:
        raise ValueError(
            f"ACT needs the output {ACTION!r}, a vector of type ACTION; the outputs are {outputs}."
        )


def checked(name: str, value: Any, hint: Any) -> Any:
    """A config.json value as its field's type; whole numbers pass as floats, 0 and 1 as bools."""
    if hint is bool and value in (0, 1):
        return bool(value)
    kinds = (dict,) if name == "normalization_mapping" else getattr(hint, "__args__", (hint,))
    if isinstance(value, (*kinds, int) if float in kinds else kinds) and not isinstance(value, bool):
        return value
    raise ValueError(f"config.json has {name}={value!r}; it must be {getattr(hint, '__name__', hint)}.")


class ACTTemporalEnsembler:
    """Mean, at each control step, of all chunks that reach it, weighted exp(-coeff * i), i = 0 the oldest.

    Computed online over the steps still to come. Source: Zhao et al. 2023, Algorithm 2.
    """

    def __init__(self, coeff: float, chunk_size: int) -> None:
        self.weights = torch.exp(-coeff * torch.arange(chunk_size))
        self.totals = torch.cumsum(self.weights, 0)
        self.actions: Tensor | None = None  # (B, steps to come, A): the mean so far
        self.count = torch.zeros(0, dtype=torch.long)  # (steps to come,): the chunks in it

    def update(self, chunk: Tensor) -> Tensor:
        """Take the (B, S, A) chunk that begins now; return the action (B, A) for now."""
        actions, count = chunk, torch.ones(chunk.shape[1], dtype=torch.long, device=chunk.device)
        if self.actions is not None:
            weights, totals = self.weights.to(chunk.device)[:, None], self.totals.to(chunk.device)[:, None]
            mean = self.actions * totals[self.count - 1] + chunk[:, :-1] * weights[self.count]
            actions = torch.cat([mean / totals[self.count], chunk[:, -1:]], 1)
            count = torch.cat([self.count + 1, count[:1]])
        self.actions, self.count = actions[:, 1:], count[1:]
        return actions[:, 0]


def l1_error(actions: Tensor, target: Tensor, is_pad: Tensor) -> Tensor:
    """|actions - target| (B, S, A), 0 where padded; the target is selected too, as 0 * NaN is NaN."""
    pad = is_pad[..., None]
    return (actions - torch.where(pad, 0.0, target)).abs().masked_fill(pad, 0.0)


def mean_over_valid(total: Tensor, num_valid: Tensor, action_dim: int) -> Tensor:
    """total / (num_valid * A), and 0 where no step is valid."""
    return total / (torch.where(num_valid > 0, num_valid, 1) * action_dim)


def kl_divergence(mu: Tensor, log_sigma_x2: Tensor) -> Tensor:
    """KL from N(0, 1): sum over the latent, mean over the batch. Source: arXiv:1312.6114, appendix B."""
    return (-0.5 * (1 + log_sigma_x2 - mu.pow(2) - log_sigma_x2.exp())).sum(-1).mean()


# The noise is a counter-based stream of 64-bit words for each sample; 16 bits serve one element of dropout.
# For the 10.4 M elements of one sample of the paper-size policy, on one core (EPYC, AVX-512, torch 2.14),
# the words cost 10 ms and their comparison 5 ms. Also tried: torch's generator seeded for each sample, 9 ms,
# for which the host has to read the seeds; bernoulli_, 61 ms; F.dropout, 104 ms with its product.

MIX_1, MIX_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
NOISE_PIECE = (
    1 << 15
)  # words: 256 KiB, so that a piece and its shifted copy stay in a core's second-level cache


def noise_words(seed: Tensor, start: int, count: int) -> Tensor:
    """(B, count) int64 of 64 random bits: words start, start + 1, ... of each sample's stream."""
    own = mix(mix(seed[:, None] + 1))
    places = torch.arange(start, start + count, device=seed.device)
    if seed.device.type != "cpu" or torch.compiler.is_compiling():
        return mix(own ^ places)
    words = torch.empty(len(seed), count, dtype=torch.int64)
    for row, sample in zip(words, own):
        for piece, place in zip(row.split(NOISE_PIECE), places.split(NOISE_PIECE)):
            mix(torch.bitwise_xor(place, sample, out=piece))
    return words


def mix(words: Tensor) -> Tensor:
    """splitmix64's finaliser, in place. int64 shifts keep the sign, so each is masked to shift zeros in."""
    for shift, factor in ((30, MIX_1), (27, MIX_2), (31, 1)):
        high = words >> shift
        high &= (1 << (64 - shift)) - 1
        words ^= high
        if factor != 1:
            words *= factor
    return words


def normal_noise(seed: Tensor, count: int) -> Tensor:
    """(B, count) standard normal float32 from each stream's first 2 * count words (Box-Muller)."""
    uniform = ((noise_words(seed, 0, 2 * count) >> 11) & (2**53 - 1)).double().add(0.5).mul(2.0**-53)
    radius, angle = uniform.chunk(2, dim=1)
    return (torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * angle)).float()


class Dropout:
    """Dropout of one layer, its masks cut site by site from (B, n) int16 random bits; None drops nothing.

    An element is kept with probability 1 - round(p * 2^16) / 2^16, and scaled by that one's inverse.
    """

    def __init__(self, p: float, bits: Tensor | None) -> None:
        out_of_65536 = min(round(p * 65536), 65535)
        self.bits, self.used = bits, 0
        self.threshold, self.scale = out_of_65536 - 32768, 65536 / (65536 - out_of_65536)

    def probabilities(self, x: Tensor) -> Tensor:
        """Attention weights (B, H, M, N), masked, for a product to read; that is still to be scaled."""
        if self.bits is None or torch.compiler.is_compiling():
            return x if self.bits is None else x.masked_fill(self._dropped(x), 0)
        return _Mask.apply(x, self._dropped(x))

    def sums(self, x: Tensor) -> Tensor:
        """The row sums of attention weights after dropout: (B or 1, H, M, N) -> (B, H, M, 1)."""
        return self._plain(x).sum(-1, keepdim=True)

    def activation(self, name: str, x: Tensor) -> Tensor:
        """Dropout of an activation between two linear layers. Overwrites x."""
        if name != "relu" or self.bits is None or torch.compiler.is_compiling():
            return self._plain(getattr(F, name)(x))
        return _ReluDrop.apply(x, self._dropped(x), self.scale)

    def residual(self, skip: Tensor, x: Tensor) -> Tensor:
        """skip + dropout(x) of a linear layer's output x."""
        if self.bits is None:
            return skip + x
        return torch.add(skip, x.masked_fill(self._dropped(x), 0), alpha=self.scale)

    def _plain(self, x: Tensor) -> Tensor:
        return x if self.bits is None else x.masked_fill(self._dropped(x), 0) * self.scale

    def _dropped(self, x: Tensor) -> Tensor:
        assert self.bits is not None
        start, self.used = self.used, self.used + x[0].numel()
        return self.bits[:, start : self.used].unflatten(1, x.shape[1:]) < self.threshold


# Eager operations in few passes over memory, for a CPU is slow at fresh memory. Each overwrites its gradient,
# which its only reader (a product, a convolution, a pooling, or a sum of such) has just written for it alone.


class _Mask(torch.autograd.Function):
    """masked_fill with 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor) -> Tensor:
        ctx.save_for_backward(dropped)
        return x.masked_fill(dropped, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.masked_fill_(ctx.saved_tensors[0], 0), None


class _Relu(torch.autograd.Function):
    """ReLU in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.relu_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward.grad_input(grad, y, 0, grad_input=grad)


class _ReluDrop(torch.autograd.Function):
    """ReLU and dropout in place: what is positive in the end is what passes the gradient on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor, scale: float) -> Tensor:
        x.relu_().masked_fill_(dropped, 0).mul_(scale)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        torch.ops.aten.threshold_backward.grad_input(grad, y, 0, grad_input=grad)
        return grad.mul_(ctx.scale), None, None


class ACT(nn.Module):
    """The network: from raw observations to normalised actions, or to the loss where targets are given."""

    def __init__(
        self,
        config: ACTConfig,
        inputs: dict[str, dict],
        outputs: dict[str, dict],
        stats: dict[str, dict[str, Tensor]] | None,
    ) -> None:
        super().__init__()
        self.config = config
        self.cameras = [key for key, f in inputs.items() if f["type"] == "VISUAL"]
        self.observations = [key for key in (STATE, ENV_STATE) if key in inputs] + self.cameras
        self.use_state = STATE in inputs
        dim, action_dim = config.dim_model, outputs[ACTION]["shape"][0]

        # In LeRobot's order of construction: the same seed gives the same weights.
        if config.use_vae:
            self.vae_encoder = ACTEncoder(config, config.n_vae_encoder_layers)
            self.vae_encoder.layers[-1].first_token_only = True  # the class token's
            self.vae_encoder_cls_embed = nn.Embedding(1, dim)
            if self.use_state:
                self.vae_encoder_robot_state_input_proj = nn.Linear(inputs[STATE]["shape"][0], dim)
            self.vae_encoder_action_input_proj = nn.Linear(action_dim, dim)
            self.vae_encoder_latent_output_proj = nn.Linear(dim, config.latent_dim * 2)
            self.vae_encoder_pos_enc: Tensor
            self.register_buffer(
                "vae_encoder_pos_enc", sinusoids(1 + self.use_state + config.chunk_size, dim)[None]
            )
        if self.cameras:
            self.backbone = ResNet(config.vision_backbone, config.replace_final_stride_with_dilation)
        self.encoder = ACTEncoder(config, config.n_encoder_layers)
        self.decoder = ACTDecoder(config)
        if self.use_state:
            self.encoder_robot_state_input_proj = nn.Linear(inputs[STATE]["shape"][0], dim)
        if ENV_STATE in inputs:
            self.encoder_env_state_input_proj = nn.Linear(inputs[ENV_STATE]["shape"][0], dim)
        self.encoder_latent_input_proj = nn.Linear(config.latent_dim, dim)
        if self.cameras:
            self.encoder_img_feat_input_proj = nn.Conv2d(self.backbone.width, dim, kernel_size=1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + self.use_state + (ENV_STATE in inputs), dim)
        self.decoder_pos_embed = nn.Embedding(config.chunk_size, dim)
        self.action_head = nn.Linear(dim, action_dim)
        for parameter in [*self.encoder.parameters(), *self.decoder.parameters()]:
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

        # Outside the state dict: positions are fixed, statistics have a file of their own.
        self.normalizers = nn.ModuleDict()
        for key, f in {**inputs, ACTION: outputs[ACTION]}.items():
            mode = config.normalization_mapping.get(f["type"], "IDENTITY")
            if stats is not None and mode != "IDENTITY":
                self.normalizers[module_name(key)] = Normalizer(key, mode, f["shape"], stats.get(key, {}))
        for key in self.cameras:
            rows, columns = self.backbone.feature_size(*inputs[key]["shape"][1:])
            positions = camera_positions(rows, columns, dim)
            self.register_buffer(f"camera_positions_{rows}x{columns}", positions, persistent=False)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Observations alone give actions (B, S, A); with a batch's targets, 0-d (loss, L1, KL or None)."""
        config, dtype = self.config, self.action_head.weight.dtype
        wide = torch.promote_types(dtype, torch.float32)  # of normalisation and losses
        state, env_state = (
            self.normalize(key, batch[key].to(wide)).to(dtype) if key in self.observations else None
            for key in (STATE, ENV_STATE)
        )
        positions = self.encoder_1d_feature_pos_embed.weight
        images = None
        if self.cameras:
            images, places = self.image_tokens(batch, dtype)
            positions = torch.cat([positions, places.to(positions.dtype)])
        bits = self.dropout_bits(batch.get("noise_seed"), len(positions))

        latent = self.action_head.weight.new_zeros(len(batch[self.observations[0]]), config.latent_dim)
        target = mu = log_sigma_x2 = None
        if ACTION in batch:
            is_pad = batch["action_is_pad"]
            target = self.normalize(ACTION, torch.where(is_pad[..., None], 0.0, batch[ACTION].to(wide)))
            if config.use_vae:
                mu, log_sigma_x2 = self.encode_actions(state, target.to(dtype), is_pad, bits["vae_encoder"])
                mu, log_sigma_x2 = mu.to(wide), log_sigma_x2.to(wide)
                noise = normal_noise(batch["noise_seed"], config.latent_dim).to(wide)
                latent = (mu + (log_sigma_x2 / 2).exp() * noise).to(dtype)

        tokens = [self.encoder_latent_input_proj(latent)[:, None]]
        if state is not None:
            tokens.append(self.encoder_robot_state_input_proj(state)[:, None])
        if env_state is not None:
            tokens.append(self.encoder_env_state_input_proj(env_state)[:, None])
        if images is not None:
            tokens.append(images)
        encoded = self.encoder(torch.cat(tokens, 1), positions, None, bits["encoder"])  # (B, N, D)
        decoded = self.decoder(encoded, positions, self.decoder_pos_embed.weight, bits["decoder"])
        actions = self.action_head(decoded).to(wide)  # (B, S, A)
        if target is None:
            return actions
        l1_loss = mean_over_valid(
            l1_error(actions, target, is_pad).sum(), batch["num_valid"], actions.shape[-1]
        )
        if mu is None or log_sigma_x2 is None:
            return l1_loss, l1_loss, None
        kld_loss = kl_divergence(mu, log_sigma_x2)
        return l1_loss + kld_loss * config.kl_weight, l1_loss, kld_loss

    def encode_actions(
        self, state: Tensor | None, target: Tensor, is_pad: Tensor, bits: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the latent, (B, L) each, from the target actions."""
        tokens = [self.vae_encoder_cls_embed.weight.expand(len(target), 1, -1)]
        if state is not None:
            tokens.append(self.vae_encoder_robot_state_input_proj(state)[:, None])
        tokens.append(self.vae_encoder_action_input_proj(target))
        attend = F.pad(~is_pad, (len(tokens) - 1, 0), value=True)[:, None, None]  # (B, 1, 1, N)
        encoded = self.vae_encoder(torch.cat(tokens, 1), self.vae_encoder_pos_enc[0], attend, bits)
        mu, log_sigma_x2 = self.vae_encoder_latent_output_proj(encoded[:, 0]).chunk(2, dim=1)
        return mu, log_sigma_x2

    def image_tokens(self, batch: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All cameras' tokens (B, n, D) and positions (n, D); cameras of one size share a pass."""
        sizes: dict[tuple[int, int], list[str]] = {}
        for key in self.cameras:
            sizes.setdefault((batch[key].shape[-2], batch[key].shape[-1]), []).append(key)
        tokens, positions = {}, {}
        for keys in sizes.values():
            images = torch.cat([self.scaled_image(key, batch[key], dtype) for key in keys])
            features = self.encoder_img_feat_input_proj(self.backbone(images))  # (K * B, D, h, w)
            rows, columns = features.shape[-2:]
            places = getattr(self, f"camera_positions_{rows}x{columns}", None)
            if places is None:  # images of another size than the features say
                places = camera_positions(rows, columns, self.config.dim_model).to(features.device)
            for key, camera in zip(keys, features.flatten(2).mT.chunk(len(keys))):
                tokens[key], positions[key] = camera, places
        return torch.cat([tokens[k] for k in self.cameras], 1), torch.cat(
            [positions[k] for k in self.cameras]
        )

    def scaled_image(self, key: str, image: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalised, channels last, with three channels. A uint8 image is scaled to [0, 1] first."""
        x = image.to(torch.promote_types(dtype, torch.float32), memory_format=torch.channels_last)
        x = self.normalize(key, x / 255 if image.dtype == torch.uint8 else x)
        return x.expand(-1, 3, -1, -1).to(dtype)

    def dropout_bits(self, seed: Tensor | None, tokens: int) -> dict[str, list[Tensor] | None]:
        """Random bits (B, n) int16 for every layer, or None where nothing is dropped.

        A sample's stream holds the latent's noise, then the layers of the VAE encoder, encoder and decoder.
        """
        stacks: dict[str, list[Tensor] | None] = dict.fromkeys(("vae_encoder", "encoder", "decoder"))
        if seed is None or self.config.dropout == 0:
            return stacks
        steps = self.config.chunk_size
        sizes = [("encoder", layer.dropout_size(tokens)) for layer in self.encoder.layers]
        sizes += [("decoder", layer.dropout_size(steps, tokens)) for layer in self.decoder.layers]
        if self.config.use_vae:
            vae_tokens = 1 + self.use_state + steps
            vae_layers = self.vae_encoder.layers
            sizes = [("vae_encoder", layer.dropout_size(vae_tokens)) for layer in vae_layers] + sizes
        counts = [count for _, count in sizes]
        words = noise_words(seed, 2 * self.config.latent_dim, -(-sum(counts) // 4))
        for (name, _), cut in zip(sizes, words.view(torch.int16)[:, : sum(counts)].split(counts, dim=1)):
            stacks[name] = [*(stacks[name] or []), cut]
        return stacks

    def normalize(self, key: str, x: Tensor) -> Tensor:
        """A feature from the data's units to the policy's."""
        if module_name(key) not in self.normalizers:
            return x
        return self.normalizers[module_name(key)](x)

    def unnormalize(self, key: str, x: Tensor) -> Tensor:
        """A feature from the policy's units to the data's."""
        if module_name(key) not in self.normalizers:
            return x
        normalizer: Any = self.normalizers[module_name(key)]
        return normalizer.inverse(x)


def module_name(key: str) -> str:
    return key.replace(".", "/")  # a module's name holds no dot, a feature's no slash


class Normalizer(nn.Module):
    """One feature's normalisation, by LeRobot's formulas: (x - shift) / divisor + offset."""

    shift: Tensor
    divisor: Tensor
    factor: Tensor

    def __init__(self, key: str, mode: str, shape: list[int], stats: dict[str, Tensor]) -> None:
        super().__init__()
        values = []
        for name in NORMALIZATION_STATS[mode]:
            if name not in stats:
                has = ", ".join(f"{key}.{other}" for other in stats) or "nothing of this feature"
                raise ValueError(
                    f"The statistics lack {key}.{name}, which {mode} normalisation needs; they have {has}."
                )
            value = torch.as_tensor(stats[name]).float().flatten()
            if len(value) not in (1, shape[0]):
                raise ValueError(
                    f"The statistic {key}.{name} has {len(value)} values, its feature {shape[0]}."
                )
            values.append(value[:, None, None] if len(shape) == 3 else value)
        first, second = values
        if mode == "MEAN_STD":
            self.offset, factor, divisor = 0.0, second, second + 1e-8
        else:  # from between the two values to between -1 and 1
            span = torch.where(second == first, 1e-8, second - first)
            self.offset, factor, divisor = -1.0, span / 2, span / 2
        for name, value in (("shift", first), ("factor", factor), ("divisor", divisor)):
            self.register_buffer(name, value.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.shift) / self.divisor + self.offset

    def inverse(self, x: Tensor) -> Tensor:
        return (x - self.offset) * self.factor + self.shift


class ACTEncoder(nn.Module):
    """A stack of encoder layers, normalised at the end if they normalise first."""

    def __init__(self, config: ACTConfig, num_layers: int) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(ACTEncoderLayer(config) for _ in range(num_layers))
        self.norm = nn.LayerNorm(config.dim_model) if config.pre_norm else nn.Identity()

    def forward(
        self, x: Tensor, positions: Tensor, attend: Tensor | None, bits: list[Tensor] | None
    ) -> Tensor:
        """x (B, N, D), positions (N, D), attend (B, 1, 1, N), a layer's bits each -> (B, N or 1, D)."""
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, attend, None if bits is None else bits[i])
        return self.norm(x)


class ACTDecoder(nn.Module):
    """A stack of decoder layers over zeros, normalised at the end."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        layers = [ACTDecoderLayer(config) for _ in range(config.n_decoder_layers)]
        layers[0].input_is_constant = True
        self.layers: Any = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(config.dim_model)

    def forward(
        self, encoded: Tensor, positions: Tensor, queries: Tensor, bits: list[Tensor] | None
    ) -> Tensor:
        """encoded (B, N, D), positions (N, D), queries (S, D), a layer's bits each -> (B, S, D)."""
        x = encoded.new_zeros(1, *queries.shape)
        for i, layer in enumerate(self.layers):
            x = layer(x, encoded, positions, queries, None if bits is None else bits[i])
        return self.norm(x)


class ACTLayer(nn.Module):
    """The feed-forward block, which encoder and decoder layers share; their constructors add its weights."""

    def add_feedforward(self, config: ACTConfig) -> None:
        self.config = config
        self.width = config.dim_feedforward // (2 if config.feedforward_activation == "glu" else 1)
        self.linear1 = nn.Linear(config.dim_model, config.dim_feedforward)
        self.linear2 = nn.Linear(self.width, config.dim_model)

    def feedforward(self, x: Tensor, dropout: Dropout) -> Tensor:
        return self.linear2(dropout.activation(self.config.feedforward_activation, self.linear1(x)))


class ACTEncoderLayer(ACTLayer):
    """Self-attention and feed-forward, each with dropout, a residual and a LayerNorm."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config.dim_model, config.n_heads)
        self.add_feedforward(config)
        self.norm1 = nn.LayerNorm(config.dim_model)
        self.norm2 = nn.LayerNorm(config.dim_model)
        self.first_token_only = False  # give the first token's output alone, where nobody reads the others

    def dropout_size(self, tokens: int) -> int:
        """Random 16-bit numbers for one sample."""
        queries = 1 if self.first_token_only else tokens
        return queries * (self.config.n_heads * tokens + 2 * self.config.dim_model + self.width)

    def forward(
        self, x: Tensor, positions: Tensor, attend: Tensor | None = None, bits: Tensor | None = None
    ) -> Tensor:
        """x (B, N, D), positions (N, D), attend (B, 1, 1, N), bits (B, n) -> (B, N or 1, D)."""
        pre_norm, dropout = self.config.pre_norm, Dropout(self.config.dropout, bits)
        value = self.norm1(x) if pre_norm else x
        key = query = value + positions.to(value.dtype)
        if self.first_token_only:
            x, query = x[:, :1], key[:, :1]
        x = dropout.residual(x, self.self_attn(query, key, value, attend, dropout))
        x = x if pre_norm else self.norm1(x)
        x = dropout.residual(x, self.feedforward(self.norm2(x) if pre_norm else x, dropout))
        return x if pre_norm else self.norm2(x)


class ACTDecoderLayer(ACTLayer):
    """Self-attention, cross-attention and feed-forward, each with dropout, a residual and a LayerNorm."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config.dim_model, config.n_heads)
        self.multihead_attn = Attention(config.dim_model, config.n_heads)
        self.add_feedforward(config)
        self.norm1 = nn.LayerNorm(config.dim_model)
        self.norm2 = nn.LayerNorm(config.dim_model)
        self.norm3 = nn.LayerNorm(config.dim_model)
        self.input_is_constant = False  # x is one row repeated, (1, S, D): the first layer's zeros

    def dropout_size(self, steps: int, tokens: int) -> int:
        """Random 16-bit numbers for one sample."""
        heads, dim = self.config.n_heads, self.config.dim_model
        return steps * (heads * (steps + tokens) + 3 * dim + self.width)

    def forward(
        self, x: Tensor, encoded: Tensor, positions: Tensor, queries: Tensor, bits: Tensor | None = None
    ) -> Tensor:
        """x (B or 1, S, D), encoded (B, N, D), positions (N, D), queries (S, D), bits (B, n) -> (B, S, D)."""
        pre_norm, dropout = self.config.pre_norm, Dropout(self.config.dropout, bits)
        queries = queries.to(x.dtype)
        value = self.norm1(x) if pre_norm else x
        query = value + queries
        if self.input_is_constant:
            x = dropout.residual(x, self.self_attn.to_constant(query, value, dropout))
        else:
            x = dropout.residual(x, self.self_attn(query, query, value, None, dropout))
        x = x if pre_norm else self.norm1(x)
        query = ((self.norm2(x) if pre_norm else x) + queries).expand(len(encoded), -1, -1)
        key = encoded + positions.to(encoded.dtype)
        x = dropout.residual(x, self.multihead_attn(query, key, encoded, None, dropout))
        x = x if pre_norm else self.norm2(x)
        x = dropout.residual(x, self.feedforward(self.norm3(x) if pre_norm else x, dropout))
        return x if pre_norm else self.norm3(x)


class Attention(nn.Module):
    """Multi-head attention with nn.MultiheadAttention's parameters, which never returns its weights.

    The key bias is left out of the product, as softmax ignores the shift that it makes: its gradient is
    exactly zero, not the noise of rounding, which Adam would turn into steps of the learning rate.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.out_proj = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attend: Tensor | None, dropout: Dropout
    ) -> Tensor:
        """query (B, M, D), key and value (B, N, D), attend (B, 1, 1, N): True where visible -> (B, M, D)."""
        q, k, v = self.project(query, key, value)
        if dropout.bits is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=attend)
        else:
            out = dropout.probabilities(self.weights(q, k, attend)).to(v.dtype) @ v * dropout.scale
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def to_constant(self, query: Tensor, value: Tensor, dropout: Dropout) -> Tensor:
        """Attention among (1, S, D) tokens, the same for all samples, of equal values -> (B or 1, S, D).

        Weights sum to 1, so that every output is the value, and queries and keys do nothing (a product would
        give them noise for a gradient); with dropout, what it leaves of the sum scales the value.
        """
        q, k, v = self.project(query, query, value[:, :1])
        out = v.expand(-1, -1, query.shape[1], -1)
        if dropout.bits is not None:
            out = dropout.sums(self.weights(q, k, None)).to(v.dtype) * v
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values, (B, H, M or N, D / H) each."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        projected = (
            F.linear(query, weights[0], biases[0]),
            F.linear(key, weights[1]),
            F.linear(value, weights[2], biases[2]),
        )
        return [x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in projected]

    def weights(self, q: Tensor, k: Tensor, attend: Tensor | None) -> Tensor:
        """softmax(q k^T / sqrt(D / H)): (B, H, M, N)."""
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        return (scores if attend is None else scores.masked_fill(~attend, -torch.inf)).softmax(-1)


class ResNet(nn.Module):
    """torchvision's ResNet up to its last stage, its frozen batch norms folded into the convolutions."""

    def __init__(self, name: str, dilate: bool) -> None:
        import torchvision  # most of a second, which --help and policies without a camera do without

        super().__init__()
        net = torchvision.models.get_model(
            name,
            weights=None,
            norm_layer=torchvision.ops.FrozenBatchNorm2d,
            replace_stride_with_dilation=[False, False, dilate],
        )
        self.conv1, self.bn1, self.maxpool = net.conv1, net.bn1, net.maxpool
        self.layer1, self.layer2, self.layer3, self.layer4 = net.layer1, net.layer2, net.layer3, net.layer4
        self.width, self.stride = net.fc.in_features, 16 if dilate else 32

    def feature_size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of an image's features."""
        return -(-height // self.stride), -(-width // self.stride)

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) -> (B, width, rows, columns)."""
        x = self.maxpool(relu(conv_norm(images, self.conv1, self.bn1)))
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in stage:
                skip = x if block.downsample is None else conv_norm(x, *block.downsample)
                x = relu(conv_norm(x, block.conv1, block.bn1))
                x = conv_norm(x, block.conv2, block.bn2)
                if hasattr(block, "conv3"):
                    x = conv_norm(relu(x), block.conv3, block.bn3)
                x = relu(x.add_(skip))
        return x


def relu(x: Tensor) -> Tensor:
    """ReLU of a convolution's result, which is overwritten."""
    return x.relu_() if torch.compiler.is_compiling() else _Relu.apply(x)


def conv_norm(x: Tensor, conv: nn.Module, norm: Any) -> Tensor:
    """norm(conv(x)) as one convolution: a frozen batch norm scales the filters and shifts what they give."""
    if type(conv) is not nn.Conv2d:  # wrapped, by an adapter for example
        return norm(conv(x))
    # In float64 so that scale and shift are rounded once: closer to the exact values than the unfolded form.
    scale = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
    shift = norm.bias.double() - norm.running_mean.double() * scale
    weight = (conv.weight * scale.to(conv.weight.dtype)[:, None, None, None]).to(x.dtype)
    return F.conv2d(x, weight, shift.to(x.dtype), conv.stride, conv.padding, conv.dilation)


def sinusoids(count: int, dim: int) -> Tensor:
    """(count, dim) sines and cosines of the place, interleaved. Source: Vaswani et al. 2017, section 3.5."""
    frequency = 10000 ** (2 * (torch.arange(dim, dtype=torch.float64) // 2) / dim)
    angle = torch.arange(count, dtype=torch.float64)[:, None] / frequency
    return torch.where(torch.arange(dim) % 2 == 0, angle.sin(), angle.cos()).float()


def camera_positions(rows: int, columns: int, dim: int) -> Tensor:
    """(rows * columns, dim): sines and cosines of the row, then of the column, each scaled to (0, 2 pi]."""
    half = dim // 2
    frequency = 10000 ** (2 * (torch.arange(half, dtype=torch.float32) // 2) / half)
    axes = []
    for count in (rows, columns):
        place = torch.arange(1, count + 1, dtype=torch.float32) / (count + 1e-6) * (2 * math.pi)
        angle = place[:, None] / frequency
        axes.append(torch.where(torch.arange(half) % 2 == 0, angle.sin(), angle.cos()))
    row, column = axes[0][:, None].expand(-1, columns, -1), axes[1][None].expand(rows, -1, -1)
    return torch.cat([row, column], dim=-1).flatten(0, 1)
