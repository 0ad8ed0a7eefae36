"""ACT, the Action Chunking Transformer, as LeRobot has it: policy, network, layers, losses.

    policy = ACTPolicy(ACTConfig(), input_features, output_features, stats)
    loss, parts = policy(batch)                     # train(): L1 + KL, with dropout;  eval(): L1 with the latent at 0
    actions = policy.predict_action_chunk(batch)    # (B, S, A), in the data's own units
    action = policy.select_action(batch)            # (B, A), one control step; policy.reset() at the start of an episode

Parameters and buffers have LeRobot's names and shapes, so weights interchange. A batch holds "observation.state" (B, state_dim),
"observation.environment_state" (B, env_dim) and one (B, 3, H, W) image per camera (uint8, or float in [0, 1]), each if the
features name it; for a loss "action" (B, S, A) and "action_is_pad" (B, S); and, both optional, "num_valid" () and "noise_seed" (B,).

- Noise: every dropout mask and the latent's noise is a function of (the sample's `noise_seed`, place in the network), whatever
  else is in the batch, whichever rank or device computes it, eager or compiled. No generator is read inside the network.
- Normaliser: the L1 sum is divided by `num_valid`, the count of unpadded steps of the whole optimizer window over its pieces, so
  that any split of a batch has the gradient of the undivided one. Without it the batch's own steps are counted (LeRobot's loss).
- Nothing is read back to the host. `policy.model.compile()` gives one graph for training and one for evaluation and prediction.

Shapes: B batch, K cameras, S chunk, N encoder tokens, V VAE encoder tokens, D dim_model, H heads, F feed-forward, L latent, A action.
Source: Zhao et al. 2023, arXiv:2304.13705; LeRobot 0.6 for names, defaults and the loss.
"""

import math
from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.ops.misc import FrozenBatchNorm2d

STATE, ENV_STATE, ACTION = "observation.state", "observation.environment_state", "action"
BACKBONES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
NORMALIZATION_STATS = {  # mode -> the statistics it needs
    "IDENTITY": (),
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
NORMALIZATION_EPS = 1e-8


@dataclass(frozen=True)
class ACTConfig:
    """ACT's hyper-parameters: LeRobot's names and defaults, the paper's bimanual ALOHA set-up."""

    n_obs_steps: int = 1
    """Observation steps given to the policy. Only 1 is supported, as in LeRobot."""
    chunk_size: int = 100
    """Actions predicted at once, in control steps."""
    n_action_steps: int = 100
    """Actions of a chunk that are executed before the next prediction, in control steps; at most chunk_size."""
    normalization_mapping: dict[str, str] = field(
        default_factory=lambda: {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    )
    """Feature type (VISUAL, STATE, ENV, ACTION) to IDENTITY, MEAN_STD, MIN_MAX, QUANTILES or QUANTILE10; others pass as they are."""
    vision_backbone: str = "resnet18"
    """torchvision ResNet that encodes the images: resnet18, 34, 50, 101 or 152. One serves all cameras."""
    pretrained_backbone_weights: str | None = "ResNet18_Weights.IMAGENET1K_V1"
    """torchvision weights the backbone starts from; None starts from random ones (and needs no download)."""
    replace_final_stride_with_dilation: bool = False
    """Keep the last ResNet stage at stride 16 by dilation: four times the image tokens. resnet50 and larger only."""
    pre_norm: bool = False
    """Normalise before each transformer block instead of after it."""
    dim_model: int = 512
    """Width of the transformer."""
    n_heads: int = 8
    """Attention heads; divides dim_model."""
    dim_feedforward: int = 3200
    """Width of the feed-forward layers."""
    feedforward_activation: str = "relu"
    """relu, gelu or glu (which halves the feed-forward width it is given)."""
    n_encoder_layers: int = 4
    """Layers of the observation encoder."""
    n_decoder_layers: int = 1
    """Layers of the action decoder. The original code says 7 and, by a slip, uses the first only; so 1 is parity."""
    use_vae: bool = True
    """Train with the variational objective: a further encoder reads the target actions into a latent."""
    latent_dim: int = 32
    """Width of the latent."""
    n_vae_encoder_layers: int = 4
    """Layers of the VAE's encoder."""
    temporal_ensemble_coeff: float | None = None
    """Weight decay of temporal ensembling in select_action (the paper: 0.01); needs n_action_steps 1. None is off."""
    dropout: float = 0.1
    """Dropout probability in the transformer, kept to within 2^-17."""
    kl_weight: float = 10.0
    """Weight of the KL term in the loss."""
    optimizer_lr: float = 1e-5
    """AdamW's learning rate, outside the backbone."""
    optimizer_weight_decay: float = 1e-4
    """AdamW's weight decay."""
    optimizer_lr_backbone: float = 1e-5
    """AdamW's learning rate of the backbone."""

    def __post_init__(self) -> None:
        def check(fine: bool, name: str, rule: str) -> None:
            if not fine:
                value = getattr(self, name)
                raise ValueError(f"--policy.{name.replace('_', '-')}={value} cannot work: {rule}.")

        check(self.n_obs_steps == 1, "n_obs_steps", "only 1 observation step is supported; use 1")
        for name in ("chunk_size", "n_action_steps", "dim_model", "n_heads", "dim_feedforward", "latent_dim"):
            check(getattr(self, name) >= 1, name, "it must be at least 1")
        for name in ("n_encoder_layers", "n_decoder_layers", "n_vae_encoder_layers"):
            check(getattr(self, name) >= 1, name, "there must be at least 1 layer")
        for name in ("kl_weight", "optimizer_lr", "optimizer_weight_decay", "optimizer_lr_backbone"):
            value = getattr(self, name)
            check(math.isfinite(value) and value >= 0, name, "it must be a finite number of at least 0")
        if self.n_action_steps > self.chunk_size:
            raise ValueError(
                f"--policy.n-action-steps={self.n_action_steps} is more than --policy.chunk-size={self.chunk_size}; "
                "at most one chunk can be executed per prediction, so lower the first or raise the second."
            )
        if self.temporal_ensemble_coeff is not None:
            check(math.isfinite(self.temporal_ensemble_coeff), "temporal_ensemble_coeff", "it must be finite")
            if self.n_action_steps > 1:
                raise ValueError(
                    f"--policy.temporal-ensemble-coeff={self.temporal_ensemble_coeff} predicts at every step; "
                    f"set --policy.n-action-steps=1 (it is {self.n_action_steps})."
                )
        check(self.dim_model % self.n_heads == 0, "n_heads", f"it must divide dim-model={self.dim_model}")
        check(self.dim_model % 2 == 0, "dim_model", "it must be even (sine and cosine positions)")
        check(0 <= self.dropout < 1, "dropout", "it must be at least 0 and below 1")
        activations = ("relu", "gelu", "glu")
        check(self.feedforward_activation in activations, "feedforward_activation", "use relu, gelu or glu")
        odd_glu = self.feedforward_activation == "glu" and self.dim_feedforward % 2
        check(not odd_glu, "dim_feedforward", "glu halves it, so it must be even")
        check(self.vision_backbone in BACKBONES, "vision_backbone", f"use one of {', '.join(BACKBONES)}")
        if self.replace_final_stride_with_dilation and self.vision_backbone in ("resnet18", "resnet34"):
            raise ValueError(
                f"--policy.replace-final-stride-with-dilation needs a bottleneck ResNet, and {self.vision_backbone} has none; "
                "use --policy.vision-backbone=resnet50 or leave the dilation off."
            )
        for kind, mode in self.normalization_mapping.items():
            if mode not in NORMALIZATION_STATS:
                raise ValueError(
                    f"--policy.normalization-mapping gives {kind} the mode {mode}; use one of {', '.join(NORMALIZATION_STATS)}."
                )
            if kind not in ("VISUAL", "STATE", "ENV", "ACTION"):
                raise ValueError(
                    f"--policy.normalization-mapping names {kind}; use VISUAL, STATE, ENV or ACTION."
                )


# config.json's further keys, in LeRobot's order, with the values of a run that uses none of them.
LEROBOT_KEYS = {
    "device": None, "use_amp": False, "use_peft": False, "push_to_hub": False, "repo_id": None, "private": None,
    "tags": None, "license": None, "pretrained_path": None, "pretrained_revision": None,
}  # fmt: skip


class ACTPolicy(nn.Module):
    """ACT with its normalisation, loss, and action selection."""

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
        """Build with random weights (torch's global generator) and download nothing.

        Args:
            input_features: LeRobot's form, {"observation.state": {"type": "STATE", "shape": [14]}, ...}; the order of the
                cameras is the order of their tokens.
            output_features: the same for "action".
            stats: stats[feature][statistic]; None takes batches as already normalised (uint8 images are scaled all the same).
        Raises:
            ValueError: the features cannot make an ACT policy, or a statistic that the normalisation needs is missing.
        """
        super().__init__()
        self.config = config
        self.input_features = {
            k: {"type": f["type"], "shape": list(f["shape"])} for k, f in input_features.items()
        }
        self.output_features = {
            k: {"type": f["type"], "shape": list(f["shape"])} for k, f in output_features.items()
        }
        check_features(config, self.input_features, self.output_features)
        self.stats = stats
        self.model = ACT(config, self.input_features, self.output_features, stats)
        self.reset()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch, on its device.

        In train mode, L1 + kl_weight * KL with dropout and a sampled latent; in eval mode the L1 alone with the latent at 0.
        Both are in normalised units. Padded steps are selected away: whatever they hold, NaN included, changes nothing.

        Returns:
            (loss, parts): 0-d loss; detached "l1_loss", with a VAE in train mode "kld_loss", in eval mode "l1_per_sample" (B,).
        Raises:
            ValueError: the batch lacks a key, or the actions are not one chunk long.
        """
        action, is_pad = self._need(batch, ACTION), self._need(batch, "action_is_pad")
        if action.dim() != 3 or action.shape[1] != self.config.chunk_size:
            raise ValueError(
                f"action has the shape {tuple(action.shape)}; (batch, chunk_size={self.config.chunk_size}, action) is needed."
            )
        num_valid = batch.get("num_valid")
        if num_valid is None:
            num_valid = (~is_pad).sum()
        inputs = self._observation(batch)
        if self.training:
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
        error = masked_l1(self.model(inputs), self.model.normalize(ACTION, action), is_pad)  # (B, S, A)
        loss = mean_over_valid(error.sum(), num_valid, error.shape[-1])
        per_sample = mean_over_valid(error.sum((1, 2)), (~is_pad).sum(1), error.shape[-1])
        return loss, {"l1_loss": loss.detach(), "l1_per_sample": per_sample.detach()}

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Tensor]) -> Tensor:
        """Predict the next chunk of actions from one observation, with the latent at its prior mean (0) and no dropout.

        Returns:
            (B, S, A), in the data's own units (normalised if the policy has no statistics).
        """
        return self.model.unnormalize(ACTION, self.model(self._observation(batch)))

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor]) -> Tensor:
        """The action for this control step, (B, A): from the queue of the last chunk, or a temporal ensemble of all chunks."""
        if self._ensembler is not None:
            return self._ensembler.update(self.predict_action_chunk(batch))
        if not self._queue:
            self._queue.extend(self.predict_action_chunk(batch)[:, : self.config.n_action_steps].unbind(1))
        return self._queue.popleft()

    def reset(self) -> None:
        """Forget the queue or ensemble: call at the start of each episode."""
        coeff = self.config.temporal_ensemble_coeff
        self._queue: deque[Tensor] = deque()
        self._ensembler = None if coeff is None else ACTTemporalEnsembler(coeff, self.config.chunk_size)

    def optim_groups(self, lr: float, lr_backbone: float, weight_decay: float) -> list[dict[str, Any]]:
        """LeRobot's two parameter groups in its order: all but the backbone, and the backbone (empty without cameras)."""
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        backbone = [p for name, p in named if name.startswith("model.backbone")]
        others = [p for name, p in named if not name.startswith("model.backbone")]
        return [
            {"params": others, "lr": lr, "weight_decay": weight_decay},
            {"params": backbone, "lr": lr_backbone, "weight_decay": weight_decay},
        ]

    def config_dict(self, device: str) -> dict[str, Any]:
        """The content of LeRobot's config.json, in its order of keys."""
        config = {f.name: getattr(self.config, f.name) for f in fields(self.config)}
        config["normalization_mapping"] = dict(self.config.normalization_mapping)
        features = {"input_features": self.input_features, "output_features": self.output_features}
        head = {"type": "act", "n_obs_steps": config.pop("n_obs_steps")}
        return head | features | LEROBOT_KEYS | {"device": device} | config

    @classmethod
    def from_config_dict(
        cls, config: dict[str, Any], stats: dict[str, dict[str, Tensor]] | None = None
    ) -> "ACTPolicy":
        """Build from the content of a config.json; keys that it lacks take their defaults.

        Raises:
            ValueError: another policy type, an unknown key, or a value of the wrong type.
        """
        if config.get("type", "act") != "act":
            raise ValueError(
                f"config.json describes a policy of type {config['type']!r}; only 'act' can be loaded."
            )
        hints = get_type_hints(ACTConfig)
        known = {"type", "input_features", "output_features", *LEROBOT_KEYS, *hints}
        if unknown := sorted(set(config) - known):
            raise ValueError(
                f"config.json has keys that ACT does not know: {', '.join(unknown)}; remove them."
            )
        for key in ("input_features", "output_features"):
            if not isinstance(config.get(key), dict):
                raise ValueError(f"config.json has no {key}; a checkpoint without them cannot be built.")
        values = {}
        for name, hint in hints.items():
            if name in config:
                values[name] = checked_value(name, config[name], hint)
        return cls(ACTConfig(**values), config["input_features"], config["output_features"], stats)

    def load_pretrained_backbone(self) -> None:
        """Load the torchvision weights that the config names into the backbone; nothing to do without cameras or with None.

        Raises:
            ValueError: unknown weights, weights of another ResNet, or no way to get them (offline and not in the cache).
        """
        name, backbone = self.config.pretrained_backbone_weights, self.config.vision_backbone
        if name is None or not self.model.cameras:
            return
        way_out = "use --policy.pretrained-backbone-weights None for random ones"
        known = [str(w) for w in torchvision.models.get_model_weights(backbone)]
        if name not in known:
            raise ValueError(
                f"--policy.pretrained-backbone-weights={name} does not fit --policy.vision-backbone={backbone}; "
                f"use one of {', '.join(known)}, or {way_out}."
            )
        try:
            state = torchvision.models.get_weight(name).get_state_dict(progress=False, check_hash=True)
        except (OSError, RuntimeError) as error:  # URLError is an OSError; a wrong hash is a RuntimeError
            raise ValueError(
                f"The backbone weights {name} could not be downloaded ({error}); put the file under $TORCH_HOME/hub/checkpoints "
                f"({torch.hub.get_dir()}/checkpoints now), or {way_out}."
            ) from None
        state = {
            k: v
            for k, v in state.items()
            if not k.startswith("fc.") and not k.endswith("num_batches_tracked")
        }
        self.model.backbone.load_state_dict(state)

    def _observation(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: self._need(batch, key) for key in self.model.inputs}

    def _need(self, batch: dict[str, Tensor], key: str) -> Tensor:
        if key not in batch:
            raise ValueError(
                f"The batch has no {key!r}, which this policy needs; it has {', '.join(sorted(batch))}."
            )
        return batch[key]


def check_features(config: ACTConfig, inputs: dict[str, dict], outputs: dict[str, dict]) -> None:
    """LeRobot's rules on features, and the shapes that the network can take, or a ValueError that says which is broken."""
    cameras = [key for key, f in inputs.items() if f["type"] == "VISUAL"]
    if not cameras and ENV_STATE not in inputs:
        raise ValueError(
            f"ACT needs at least one camera or {ENV_STATE}; the inputs are {', '.join(inputs) or 'empty'}."
        )
    for key, f in inputs.items():
        kinds = {STATE: "STATE", ENV_STATE: "ENV"}
        if f["type"] not in ("VISUAL", "STATE", "ENV"):
            raise ValueError(f"The input {key} has the type {f['type']}; ACT takes STATE, ENV and VISUAL.")
        if f["type"] != "VISUAL" and kinds.get(key) != f["type"]:
            raise ValueError(
                f"The input {key} of type {f['type']} has no place; ACT takes {STATE} (STATE) and {ENV_STATE} (ENV)."
            )
        if f["type"] == "VISUAL" and (len(f["shape"]) != 3 or f["shape"][0] not in (1, 3)):
            raise ValueError(
                f"The camera {key} has the shape {f['shape']}; (3, height, width), or 1 channel, is needed."
            )
        if f["type"] != "VISUAL" and len(f["shape"]) != 1:
            raise ValueError(f"The input {key} has the shape {f['shape']}; a vector is needed.")
    if cameras and config.dim_model % 4:
        raise ValueError(
            f"--policy.dim-model={config.dim_model} must be a multiple of 4 to place image tokens in two dimensions."
        )
    if outputs.get(ACTION, {}).get("type") != "ACTION" or len(outputs[ACTION]["shape"]) != 1:
        raise ValueError(
            f"ACT needs the output {ACTION!r} of type ACTION, a vector; the outputs are {outputs or 'empty'}."
        )


def checked_value(name: str, value: Any, hint: Any) -> Any:
    """A value of config.json as the type of its field, or a ValueError; JSON's whole numbers pass as floats, 0 and 1 as bools."""
    if hint is bool and value in (0, 1):
        return bool(value)
    if name == "normalization_mapping":
        fine = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
        hint = "a mapping of names"
    else:
        kinds = getattr(hint, "__args__", (hint,))
        fine = isinstance(value, (*kinds, int) if float in kinds else kinds) and not isinstance(value, bool)
    if not fine:
        raise ValueError(f"config.json has {name}={value!r}; it must be {getattr(hint, '__name__', hint)}.")
    return value


class ACTTemporalEnsembler:
    """Average, for each control step, of all the chunks that reach it, with weights exp(-coeff * i), i = 0 the oldest.

    Computed online over the S - 1 steps still to come. Source: Zhao et al. 2023, Algorithm 2.
    """

    def __init__(self, coeff: float, chunk_size: int) -> None:
        self.weights = torch.exp(-coeff * torch.arange(chunk_size))
        self.totals = torch.cumsum(self.weights, 0)
        self.actions: Tensor | None = None  # (B, steps to come, A), averaged
        self.count = torch.zeros(0, dtype=torch.long)  # chunks in each average

    def update(self, chunk: Tensor) -> Tensor:
        """Take a (B, S, A) chunk that begins now; return the ensemble's (B, A) action for now."""
        weights, totals = self.weights.to(chunk.device), self.totals.to(chunk.device)
        if self.actions is None:
            actions = chunk.clone()
            count = torch.ones(chunk.shape[1], dtype=torch.long, device=chunk.device)
        else:
            before, now = totals[self.count - 1, None], totals[self.count, None]
            actions = (self.actions * before + chunk[:, :-1] * weights[self.count, None]) / now
            actions = torch.cat([actions, chunk[:, -1:]], 1)
            count = torch.cat([(self.count + 1).clamp(max=chunk.shape[1]), torch.ones_like(self.count[:1])])
        self.actions, self.count = actions[:, 1:], count[1:]
        return actions[:, 0]


# ---- losses


def masked_l1(actions: Tensor, target: Tensor, is_pad: Tensor) -> Tensor:
    """|actions - target|, and 0 where padded: (B, S, A). Selected on the inputs too, so that no NaN reaches the gradient."""
    pad = is_pad[..., None]
    return (actions - torch.where(pad, 0.0, target)).abs().masked_fill(pad, 0.0)


def mean_over_valid(total: Tensor, num_valid: Tensor, action_dim: int) -> Tensor:
    """total / (num_valid * A), and 0 where nothing is valid."""
    return total / (torch.where(num_valid > 0, num_valid, 1) * action_dim)


def kl_divergence(mu: Tensor, log_sigma_x2: Tensor) -> Tensor:
    """KL of N(mu, sigma) from N(0, 1), summed over the latent, mean over the batch. Source: arXiv:1312.6114, App. B."""
    return (-0.5 * (1 + log_sigma_x2 - mu.pow(2) - log_sigma_x2.exp())).sum(-1).mean()


# ---- noise

MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64
NOISE_CHUNK = 1 << 15  # words; 256 KiB, so that a piece and its shifted copy stay in a core's second-level cache


def mix(words: Tensor) -> Tensor:
    """splitmix64's finaliser, in place on int64 (with arithmetic shifts, which keep it one-to-one)."""
    words ^= words >> 30
    words *= MIX_1
    words ^= words >> 27
    words *= MIX_2
    words ^= words >> 31
    return words


def noise_words(seed: Tensor, start: int, count: int) -> Tensor:
    """(B, count) int64 of 64 random bits each: words start, start + 1, ... of each sample's own stream.

    Counter-based, so that a word depends on (seed, place) alone, on any device and in any graph, and no seed is read by the host.
    """
    state = mix(mix(seed[:, None] + 1))
    places = torch.arange(start, start + count, device=seed.device)
    if seed.device.type != "cpu" or torch.compiler.is_compiling():
        return mix(state ^ places)
    words = torch.empty(len(seed), count, dtype=torch.int64)
    for row, own in zip(words, state):  # in pieces that stay in the cache
        for piece, place in zip(row.split(NOISE_CHUNK), places.split(NOISE_CHUNK)):
            mix(torch.bitwise_xor(place, own, out=piece))
    return words


def normal_noise(seed: Tensor, count: int) -> Tensor:
    """(B, count) float32 of standard normal noise (Box-Muller on the first words of each sample's stream)."""
    uniform = ((noise_words(seed, 0, 2 * count) >> 11) & (2**53 - 1)).double().add(0.5).mul(2.0**-53)
    radius, angle = uniform.chunk(2, dim=1)
    return (torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * angle)).float()


class Dropout:
    """Dropout whose masks are cut, site after site, from one (B, n) int16 tensor of random bits; None drops nothing.

    The kept share is (1 - p) to within 2^-17, and what is kept is scaled by the inverse of the true share.
    """

    def __init__(self, p: float, bits: Tensor | None) -> None:
        self.bits, self.used = bits, 0
        out_of_65536 = min(round(p * 65536), 65535)
        self.threshold = out_of_65536 - 32768
        self.scale = 65536 / (65536 - out_of_65536)

    def probabilities(self, x: Tensor) -> Tensor:
        """Dropout of attention probabilities (B, H, M, N) whose only reader is a product."""
        return x if self.bits is None else drop(x, self._dropped(x), self.scale)

    def sum_of_probabilities(self, x: Tensor) -> Tensor:
        """What dropout leaves of each row's sum: (B or 1, H, M, N) -> (B, H, M, 1)."""
        return torch.where(self._dropped(x), 0.0, x).sum(-1, keepdim=True) * self.scale

    def activation(self, name: str, x: Tensor) -> Tensor:
        """Activation and dropout between two linear layers; what it is given is overwritten."""
        if self.bits is None:
            return getattr(F, name)(x)
        if name == "relu":
            return relu_drop(x, self._dropped(x), self.scale)
        x = getattr(F, name)(x)
        return drop(x, self._dropped(x), self.scale)

    def residual(self, skip: Tensor, x: Tensor) -> Tensor:
        """skip + dropout(x), where x is a linear layer's output, which is overwritten."""
        if self.bits is None:
            return skip + x
        dropped = self._dropped(x)
        x = x.masked_fill_(dropped, 0) if len(x) == len(dropped) else x.masked_fill(dropped, 0)
        return torch.add(skip, x, alpha=self.scale)

    def _dropped(self, x: Tensor) -> Tensor:
        assert self.bits is not None
        start, self.used = self.used, self.used + x[0].numel()
        return self.bits[:, start : self.used].unflatten(1, x.shape[1:]) < self.threshold


def drop(x: Tensor, dropped: Tensor, scale: float) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.where(dropped, 0.0, x * scale)
    return _Drop.apply(x, dropped, scale)


def relu_drop(x: Tensor, dropped: Tensor, scale: float) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.where(dropped, 0.0, x.relu() * scale)
    return _ReluDrop.apply(x, dropped, scale)


class _Drop(torch.autograd.Function):
    """Eager dropout in the fewest passes over memory. The gradient is overwritten: its writer must be a product's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dropped: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(dropped)
        ctx.scale = scale
        return x.masked_fill(dropped, 0).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad.masked_fill_(ctx.saved_tensors[0], 0).mul_(ctx.scale), None, None


class _ReluDrop(torch.autograd.Function):
    """ReLU and dropout, in place both ways: what is positive in the end is what passes the gradient."""

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
        return torch.ops.aten.threshold_backward.grad_input(grad, y, 0, grad_input=grad).mul_(ctx.scale), None, None


# ---- network


class ACT(nn.Module):
    """The network, from raw observations to a chunk of normalised actions, or to the loss where targets are given."""

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
        self.inputs = [key for key in (STATE, ENV_STATE) if key in inputs] + self.cameras
        self.use_state = STATE in inputs
        dim, action_dim = config.dim_model, outputs[ACTION]["shape"][0]

        if config.use_vae:
            self.vae_encoder = ACTEncoder(config, config.n_vae_encoder_layers, class_token_only=True)
            self.vae_encoder_cls_embed = nn.Embedding(1, dim)
            if self.use_state:
                self.vae_encoder_robot_state_input_proj = nn.Linear(inputs[STATE]["shape"][0], dim)
            self.vae_encoder_action_input_proj = nn.Linear(action_dim, dim)
            self.vae_encoder_latent_output_proj = nn.Linear(dim, config.latent_dim * 2)
            positions = sinusoidal_positions(1 + self.use_state + config.chunk_size, dim)
            self.register_buffer("vae_encoder_pos_enc", positions[None])
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

        # Not in the state dict: fixed, and stored elsewhere in a checkpoint.
        for key in self.cameras:
            size = self.backbone.feature_size(*inputs[key]["shape"][1:])
            self.register_buffer(
                f"camera_positions_{size[0]}x{size[1]}", camera_positions(*size, dim), persistent=False
            )
        self.normalizers = nn.ModuleDict()
        for key, f in {**inputs, ACTION: outputs[ACTION]}.items():
            mode = config.normalization_mapping.get(f["type"], "IDENTITY")
            if stats is not None and mode != "IDENTITY":
                self.normalizers[module_name(key)] = Normalizer(key, mode, f["shape"], stats.get(key, {}))

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Observations alone give (B, S, A) normalised actions; with the targets of a batch, (loss, L1, KL or None)."""
        config, dtype = self.config, self.action_head.weight.dtype
        wide = torch.promote_types(dtype, torch.float32)  # losses, normalisation
        vectors = {
            k: self.normalize(k, batch[k].to(wide)).to(dtype) for k in (STATE, ENV_STATE) if k in batch
        }
        training = ACTION in batch
        seed, size = batch.get("noise_seed"), len(batch[self.inputs[-1]])

        target = mu = log_sigma_x2 = None
        latent = self.action_head.weight.new_zeros(size, config.latent_dim)
        if training:
            pad = batch["action_is_pad"]
            target = self.normalize(ACTION, torch.where(pad[..., None], 0.0, batch[ACTION].to(wide)))
        images = self.image_tokens(batch) if self.cameras else None
        bits = self.dropout_bits(seed, 0 if images is None else images[0].shape[1])
        if training and config.use_vae:
            mu, log_sigma_x2 = self.encode_actions(
                vectors.get(STATE), target.to(dtype), pad, bits["vae_encoder"]
            )
            mu, log_sigma_x2 = mu.to(wide), log_sigma_x2.to(wide)
            noise = normal_noise(seed, config.latent_dim).to(wide)
            latent = (mu + (log_sigma_x2 / 2).exp() * noise).to(dtype)

        tokens = [self.encoder_latent_input_proj(latent)[:, None]]
        if STATE in vectors:
            tokens.append(self.encoder_robot_state_input_proj(vectors[STATE])[:, None])
        if ENV_STATE in vectors:
            tokens.append(self.encoder_env_state_input_proj(vectors[ENV_STATE])[:, None])
        positions = self.encoder_1d_feature_pos_embed.weight
        if images is not None:
            tokens.append(images[0])
            positions = torch.cat([positions, images[1].to(positions.dtype)])
        encoded = self.encoder(torch.cat(tokens, 1), positions, None, bits["encoder"])  # (B, N, D)
        decoded = self.decoder(
            encoded, positions, self.decoder_pos_embed.weight, bits["decoder"]
        )  # (B, S, D)
        actions = self.action_head(decoded).to(wide)
        if not training:
            return actions

        l1_loss = mean_over_valid(
            masked_l1(actions, target, pad).sum(), batch["num_valid"], actions.shape[-1]
        )
        if mu is None:
            return l1_loss, l1_loss, None
        kld_loss = kl_divergence(mu, log_sigma_x2)
        return l1_loss + kld_loss * config.kl_weight, l1_loss, kld_loss

    def image_tokens(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The cameras' tokens (B, h*w of all cameras, D) and their positions (h*w of all cameras, D)."""
        by_size: dict[tuple[int, ...], list[str]] = {}
        for key in self.cameras:
            by_size.setdefault(tuple(batch[key].shape[-2:]), []).append(key)
        tokens, positions = {}, {}
        for keys in by_size.values():
            images = torch.cat([self.scale_image(key, batch[key]) for key in keys])
            features = self.encoder_img_feat_input_proj(self.backbone(images))  # (K*B, D, h, w)
            size = tuple(features.shape[-2:])
            place = getattr(self, f"camera_positions_{size[0]}x{size[1]}", None)
            if place is None:
                place = camera_positions(*size, self.config.dim_model).to(features.device)
            for key, camera in zip(keys, features.flatten(2).mT.chunk(len(keys))):
                tokens[key], positions[key] = camera, place
        return torch.cat([tokens[k] for k in self.cameras], 1), torch.cat(
            [positions[k] for k in self.cameras]
        )

    def scale_image(self, key: str, image: Tensor) -> Tensor:
        """A camera's normalised images (B, 3, h, w), channels last: a uint8 image is scaled to [0, 1] first, one channel expanded."""
        dtype = self.action_head.weight.dtype
        x = image.to(torch.promote_types(dtype, torch.float32), memory_format=torch.channels_last)
        x = self.normalize(key, x / 255 if image.dtype == torch.uint8 else x)
        return x.expand(-1, 3, -1, -1).to(dtype)

    def encode_actions(
        self, state: Tensor | None, target: Tensor, pad: Tensor, bits: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the latent, (B, L) each, from the target actions."""
        tokens = [self.vae_encoder_cls_embed.weight.expand(len(target), 1, -1)]
        if state is not None:
            tokens.append(self.vae_encoder_robot_state_input_proj(state)[:, None])
        tokens.append(self.vae_encoder_action_input_proj(target))
        attend = F.pad(~pad, (len(tokens) - 1, 0), value=True)[:, None, None]  # (B, 1, 1, V)
        encoded = self.vae_encoder(torch.cat(tokens, 1), self.vae_encoder_pos_enc[0], attend, bits)
        return self.vae_encoder_latent_output_proj(encoded[:, 0]).chunk(2, dim=1)

    def dropout_bits(self, seed: Tensor | None, image_tokens: int) -> dict[str, list[Tensor] | None]:
        """Random bits of every layer's dropout, (B, n) int16 each, or None where nothing is dropped.

        Each sample's stream holds the latent's noise first, then the layers in order.
        """
        stacks: dict[str, list[Tensor] | None] = {"vae_encoder": None, "encoder": None, "decoder": None}
        if seed is None or self.config.dropout == 0:
            return stacks
        tokens = len(self.encoder_1d_feature_pos_embed.weight) + image_tokens
        vae_tokens = 1 + self.use_state + self.config.chunk_size
        layers: list[tuple[str, int]] = []
        if self.config.use_vae:
            layers += [("vae_encoder", layer.dropout_size(vae_tokens)) for layer in self.vae_encoder.layers]
        layers += [("encoder", layer.dropout_size(tokens)) for layer in self.encoder.layers]
        layers += [
            ("decoder", layer.dropout_size(self.config.chunk_size, tokens)) for layer in self.decoder.layers
        ]
        words = noise_words(seed, 2 * self.config.latent_dim, -(-sum(size for _, size in layers) // 4))
        start, bits = 0, words.view(torch.int16)
        for name, size in layers:
            stacks[name] = [*(stacks[name] or []), bits[:, start : start + size]]
            start += size
        return stacks

    def normalize(self, key: str, x: Tensor) -> Tensor:
        """A feature of the data's units in the policy's."""
        name = module_name(key)
        return self.normalizers[name](x) if name in self.normalizers else x

    def unnormalize(self, key: str, x: Tensor) -> Tensor:
        """A feature of the policy's units in the data's."""
        name = module_name(key)
        return self.normalizers[name].inverse(x) if name in self.normalizers else x


def module_name(key: str) -> str:
    return key.replace(".", "/")  # a module's name holds no dot, a feature's no slash


class Normalizer(nn.Module):
    """One feature's normalisation, by LeRobot's formulas: (x - shift) / divisor + offset. Its statistics are not in the state dict."""

    def __init__(self, key: str, mode: str, shape: list[int], stats: dict[str, Tensor]) -> None:
        super().__init__()
        values = []
        for name in NORMALIZATION_STATS[mode]:
            if name not in stats:
                raise ValueError(
                    f"The statistics lack {key}.{name}, which --policy.normalization-mapping's {mode} needs; they have "
                    f"{', '.join(f'{key}.{other}' for other in stats) or 'nothing of this feature'}."
                )
            value = torch.as_tensor(stats[name], dtype=torch.float32).flatten()
            if len(value) not in (1, shape[0]):
                raise ValueError(
                    f"The statistic {key}.{name} has {len(value)} values; the feature has {shape[0]}."
                )
            values.append(value[:, None, None] if len(shape) == 3 else value)
        if mode == "MEAN_STD":
            shift, factor, divisor, self.offset = values[0], values[1], values[1] + NORMALIZATION_EPS, 0.0
        else:  # between two values that go to -1 and 1
            span = values[1] - values[0]
            factor = torch.where(span == 0, NORMALIZATION_EPS, span) / 2
            shift, divisor, self.offset = values[0], factor, -1.0
        self.register_buffer("shift", shift, persistent=False)
        self.register_buffer("factor", factor, persistent=False)
        self.register_buffer("divisor", divisor, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.shift) / self.divisor + self.offset

    def inverse(self, x: Tensor) -> Tensor:
        return (x - self.offset) * self.factor + self.shift


# ---- layers


class ACTEncoder(nn.Module):
    """A stack of encoder layers, normalised at the end if they normalise first."""

    def __init__(self, config: ACTConfig, num_layers: int, class_token_only: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ACTEncoderLayer(config) for _ in range(num_layers))
        self.layers[-1].first_token_only = class_token_only
        self.norm = nn.LayerNorm(config.dim_model) if config.pre_norm else nn.Identity()

    def forward(
        self, x: Tensor, positions: Tensor, attend: Tensor | None, bits: list[Tensor] | None
    ) -> Tensor:
        """x (B, N, D), positions (N, D), attend (B, 1, 1, N) bool or None, bits one a layer -> (B, N or 1, D)."""
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, attend, None if bits is None else bits[i])
        return self.norm(x)


class ACTEncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with dropout, a residual and a LayerNorm."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config.dim_model, config.n_heads)
        add_feedforward(self, config)
        self.norm1 = nn.LayerNorm(config.dim_model)
        self.norm2 = nn.LayerNorm(config.dim_model)
        self.config = config
        self.first_token_only = (
            False  # compute the first token's output only, when no later layer sees the others
        )

    def dropout_size(self, tokens: int) -> int:
        """Random numbers that the layer's dropout takes for one sample."""
        queries = 1 if self.first_token_only else tokens
        return queries * (
            self.config.n_heads * tokens + 2 * self.config.dim_model + feedforward_width(self.config)
        )

    def forward(
        self, x: Tensor, positions: Tensor, attend: Tensor | None = None, bits: Tensor | None = None
    ) -> Tensor:
        pre_norm, dropout = self.config.pre_norm, Dropout(self.config.dropout, bits)
        value = self.norm1(x) if pre_norm else x
        key = query = value + positions.to(value.dtype)
        if self.first_token_only:
            x, query = x[:, :1], key[:, :1]
        x = dropout.residual(x, self.self_attn(query, key, value, attend, dropout))
        x = x if pre_norm else self.norm1(x)
        x = dropout.residual(x, feedforward(self, self.norm2(x) if pre_norm else x, dropout))
        return x if pre_norm else self.norm2(x)


class ACTDecoder(nn.Module):
    """A stack of decoder layers, normalised at the end."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ACTDecoderLayer(config) for _ in range(config.n_decoder_layers))
        self.layers[0].input_is_constant = True
        self.norm = nn.LayerNorm(config.dim_model)

    def forward(
        self, encoded: Tensor, positions: Tensor, queries: Tensor, bits: list[Tensor] | None
    ) -> Tensor:
        """encoded (B, N, D), positions (N, D), queries (S, D), bits one a layer -> (B, S, D)."""
        x = encoded.new_zeros(1, *queries.shape)
        for i, layer in enumerate(self.layers):
            x = layer(x, encoded, queries, positions, None if bits is None else bits[i])
        return self.norm(x)


class ACTDecoderLayer(nn.Module):
    """Self-attention, attention to the encoder and feed-forward, each with dropout, a residual and a LayerNorm."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config.dim_model, config.n_heads)
        self.multihead_attn = Attention(config.dim_model, config.n_heads)
        add_feedforward(self, config)
        self.norm1 = nn.LayerNorm(config.dim_model)
        self.norm2 = nn.LayerNorm(config.dim_model)
        self.norm3 = nn.LayerNorm(config.dim_model)
        self.config = config
        self.input_is_constant = False  # the first layer's is zeros, so its self-attention needs little work

    def dropout_size(self, steps: int, tokens: int) -> int:
        """Random numbers that the layer's dropout takes for one sample."""
        heads, dim = self.config.n_heads, self.config.dim_model
        return steps * (heads * (steps + tokens) + 3 * dim + feedforward_width(self.config))

    def forward(
        self, x: Tensor, encoded: Tensor, queries: Tensor, positions: Tensor, bits: Tensor | None = None
    ) -> Tensor:
        """x (B, S, D), encoded (B, N, D), queries (S, D), positions (N, D), bits (B, n) -> (B, S, D).

        Where the input is constant, x is (1, S, D), one row repeated.
        """
        pre_norm, dropout = self.config.pre_norm, Dropout(self.config.dropout, bits)
        queries, positions = queries.to(x.dtype), positions.to(encoded.dtype)
        value = self.norm1(x) if pre_norm else x
        query = value + queries
        if self.input_is_constant:
            x = dropout.residual(x, self.self_attn.of_constant(query, value[:, :1], dropout))
        else:
            x = dropout.residual(x, self.self_attn(query, query, value, None, dropout))
        x = x if pre_norm else self.norm1(x)
        query = ((self.norm2(x) if pre_norm else x) + queries).expand(len(encoded), -1, -1)
        x = dropout.residual(x, self.multihead_attn(query, encoded + positions, encoded, None, dropout))
        x = x if pre_norm else self.norm2(x)
        x = dropout.residual(x, feedforward(self, self.norm3(x) if pre_norm else x, dropout))
        return x if pre_norm else self.norm3(x)


def add_feedforward(layer: nn.Module, config: ACTConfig) -> None:
    layer.linear1 = nn.Linear(config.dim_model, config.dim_feedforward)
    layer.linear2 = nn.Linear(feedforward_width(config), config.dim_model)


def feedforward_width(config: ACTConfig) -> int:
    return config.dim_feedforward // (2 if config.feedforward_activation == "glu" else 1)


def feedforward(layer: Any, x: Tensor, dropout: Dropout) -> Tensor:
    return layer.linear2(dropout.activation(layer.config.feedforward_activation, layer.linear1(x)))


class Attention(nn.Module):
    """Multi-head attention with nn.MultiheadAttention's parameters, that never returns its weights.

    The key bias stays out of the product: softmax ignores the shift it makes. So its gradient, in reach of rounding only otherwise,
    is exactly zero, and Adam does not turn noise into steps.
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
        self, query: Tensor, key: Tensor, value: Tensor, attend: Tensor | None, dropout: "Dropout"
    ) -> Tensor:
        """query (B, M, D), key and value (B, N, D), attend (B, 1, 1, N) bool: True where a key may be seen -> (B, M, D)."""
        dim = query.shape[-1]
        weight_q, weight_k, weight_v = self.in_proj_weight.split(dim)
        bias_q, _, bias_v = self.in_proj_bias.split(dim)
        q = self._heads(F.linear(query, weight_q, bias_q))
        k = self._heads(F.linear(key, weight_k))
        v = self._heads(F.linear(value, weight_v, bias_v))
        if dropout.bits is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=attend)
        else:
            out = dropout.probabilities(self._weights(q, k, attend)).to(v.dtype) @ v
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def of_constant(self, query: Tensor, value: Tensor, dropout: "Dropout") -> Tensor:
        """The same for keys that are the queries (1, S, D), one for all samples, and values that are all equal (1, 1, D).

        The weights of a query sum to 1, so that every output is the value: without dropout the queries and keys have no effect, and no
        gradient but noise of rounding; with it, what is left of the sum scales the value. -> (B or 1, S, D)
        """
        dim = query.shape[-1]
        weight_q, weight_k, weight_v = self.in_proj_weight.split(dim)
        bias_q, _, bias_v = self.in_proj_bias.split(dim)
        out = F.linear(value, weight_v, bias_v)
        if dropout.bits is None:
            return self.out_proj(out).expand(-1, query.shape[1], -1)
        q, k = self._heads(F.linear(query, weight_q, bias_q)), self._heads(F.linear(query, weight_k))
        left = dropout.sum_of_probabilities(self._weights(q, k, None))  # (B, H, S, 1)
        out = left.to(out.dtype) * self._heads(out)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _weights(self, q: Tensor, k: Tensor, attend: Tensor | None) -> Tensor:
        scores = (q * (1 / math.sqrt(q.shape[-1]))) @ k.mT  # (B, H, M, N)
        if attend is not None:
            scores = scores.masked_fill(~attend, -torch.inf)
        return scores.softmax(-1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, N, D/H)


class ResNet(nn.Module):
    """torchvision's ResNet up to its last stage, with frozen batch norms folded into the convolutions."""

    def __init__(self, name: str, dilate: bool) -> None:
        super().__init__()
        net = getattr(torchvision.models, name)(
            weights=None, norm_layer=FrozenBatchNorm2d, replace_stride_with_dilation=[False, False, dilate]
        )
        for part in ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4"):
            self.add_module(part, getattr(net, part))
        self.width = net.fc.in_features
        self.dilate = dilate

    def feature_size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the features of an image."""
        halvings = 4 if self.dilate else 5
        return -(-height // 2**halvings), -(-width // 2**halvings)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, h, w) normalised images -> (B, width, h / 32, w / 32), channels last."""
        x = self.maxpool(conv_norm(images, self.conv1, self.bn1).relu_())
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            for block in stage:
                skip = x if block.downsample is None else conv_norm(x, *block.downsample)
                x = conv_norm(x, block.conv1, block.bn1).relu_()
                x = conv_norm(x, block.conv2, block.bn2)
                if hasattr(block, "conv3"):
                    x = conv_norm(x.relu_(), block.conv3, block.bn3)
                x = x.add_(skip).relu_()
        return x


def conv_norm(x: Tensor, conv: nn.Module, norm: FrozenBatchNorm2d) -> Tensor:
    """norm(conv(x)) in one convolution: a frozen batch norm is a scale of the filters and a shift of their output."""
    if type(conv) is not nn.Conv2d:  # wrapped, by an adapter for example
        return norm(conv(x))
    # In float64, so that scale and shift are rounded once: closer to the exact activations than the unfolded form.
    scale = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
    shift = norm.bias.double() - norm.running_mean.double() * scale
    weight = (conv.weight * scale.to(conv.weight.dtype)[:, None, None, None]).to(x.dtype)
    return F.conv2d(x, weight, shift.to(x.dtype), conv.stride, conv.padding, conv.dilation)


def sinusoidal_positions(count: int, dim: int) -> Tensor:
    """(count, dim) sines and cosines, interleaved. Source: Vaswani et al. 2017, section 3.5."""
    angle = torch.arange(count, dtype=torch.float64)[:, None] / 10000 ** (
        2 * (torch.arange(dim, dtype=torch.float64) // 2) / dim
    )
    table = torch.where(torch.arange(dim) % 2 == 0, angle.sin(), angle.cos())
    return table.float()


def camera_positions(height: int, width: int, dim: int) -> Tensor:
    """(height * width, dim) sines and cosines of the row in the first half, of the column in the second, both scaled to (0, 2 pi]."""
    half = dim // 2
    frequency = 10000 ** (2 * (torch.arange(half, dtype=torch.float32) // 2) / half)
    place = []
    for count in (height, width):
        angle = torch.arange(1, count + 1, dtype=torch.float32) / (count + 1e-6) * (2 * math.pi)
        angle = angle[:, None] / frequency
        place.append(torch.where(torch.arange(half) % 2 == 0, angle.sin(), angle.cos()))
    rows, columns = place
    return torch.cat(
        [rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)], dim=-1
    ).flatten(0, 1)
