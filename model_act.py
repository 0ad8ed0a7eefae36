"""ACT, the Action Chunking Transformer: an observation in, a chunk of S actions out; trained as a VAE.

    training only: the VAE's encoder              training and inference: the policy's network

    class   vae_encoder_cls_embed                 latent  encoder_latent_input_proj
    state   vae_encoder_robot_state_input_proj    state   encoder_robot_state_input_proj
    action  vae_encoder_action_input_proj         env     encoder_env_state_input_proj
       |                                          image   backbone -> encoder_img_feat_input_proj
       |  one token each, S for the actions          |
       |  (B, 2 + S, D)                              |  one token each, h * w per camera: (B, N, D)
       |  + positions vae_encoder_pos_enc            |  + positions encoder_1d_feature_pos_embed
       v                                             v    and camera_positions
    vae_encoder     padding masked                encoder
       |  first token (B, D)                         |  (B, N, D)
       v                                             v
    vae_encoder_latent_output_proj                decoder  <-  queries decoder_pos_embed (S, D)
       |  mu, log_sigma_x2 (B, L)                    |  (B, S, D)
       |                                             v
       +-> latent = mu + sigma * noise -> token   action_head
       |   (inference: 0)                            |  actions (B, S, A)
       v                                             v
    KL(latent, N(0, 1))  ---------------------->  act_loss = L1(actions, target) + kl_weight * KL

`normalizers` bring states, images and actions into the policy's units, and predicted actions back.
Training on random tensors, a program of its own:

    import torch
    from model_act import ACTConfig, ACTPolicy
    state, top = "observation.state", "observation.images.top"
    inputs = {state: {"type": "STATE", "shape": [14]}, top: {"type": "VISUAL", "shape": [3, 96, 128]}}
    outputs = {"action": {"type": "ACTION", "shape": [14]}}
    policy = ACTPolicy(ACTConfig(chunk_size=20, n_action_steps=20, dim_model=64), inputs, outputs)
    batch = {state: torch.randn(4, 14), top: torch.rand(4, 3, 96, 128)}
    batch |= {"action": torch.randn(4, 20, 14), "action_is_pad": torch.zeros(4, 20, dtype=torch.bool)}
    optimizer = torch.optim.AdamW(policy.optim_groups(lr=1e-4, lr_backbone=1e-5, weight_decay=1e-4))
    for step in range(5):
        loss, loss_terms = policy(batch)  # train(): L1 + KL with dropout; eval(): L1, latent 0
        loss.backward(), optimizer.step(), optimizer.zero_grad()
        print(step, loss.item())
    print(policy.eval().select_action(batch).shape)  # one control step; reset() before each episode

A batch holds, each if the features name it, "observation.state" (B, state_dim),
"observation.environment_state" (B, env_dim) and one image (B, 3, H, W) per camera, uint8 or float in
[0, 1]; for a loss "action" (B, S, A) and "action_is_pad" (B, S); and, both optional:

- "noise_seed" (B,). Each dropout mask and the latent's noise is a function of a sample's seed and the
  place in the network: the same whatever else is in the batch, on any rank, eager or compiled.
- "num_valid" (): unpadded steps of the whole optimizer window / number of its pieces. The L1 sum is
  divided by it: any split has the undivided batch's gradient. Without it: LeRobot's loss.

Nothing is read back to the host. `policy.model.compile()` makes one graph for training and one for
evaluation and prediction. Parameters have LeRobot's names and shapes, so weights interchange.

Shapes: B batch, K cameras of one size, S chunk, N encoder tokens, M queries, D dim_model, H heads,
L latent, A action, C channels, h and w rows and columns of the backbone's features.
Source: Zhao et al. 2023, arXiv:2304.13705; names, defaults and loss from LeRobot 0.6.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STATE, ENV_STATE, ACTION = "observation.state", "observation.environment_state", "action"
Features = dict[str, dict]  # {"observation.state": {"type": "STATE", "shape": [14]}, ...}
Stats = dict[str, dict[str, Tensor]] | None  # stats[feature][statistic]; None: nothing to do


class ACTPolicy(nn.Module):
    """ACT with its normalisation, its loss and its choice of actions."""

    # For dist.py: units to shard, and what besides forward() needs its hooks; regions to compile.
    wrap_modules = ("ACTEncoderLayer", "ACTDecoderLayer")
    compile_modules = ("model",)
    forward_methods = ("predict_action_chunk",)

    def __init__(
        self, config: ACTConfig, input_features: Features, output_features: Features, stats: Stats = None
    ) -> None:
        """Random weights from torch's global generator; nothing is downloaded.

        Cameras have a shape (3 or 1, H, W); their order is the tokens'. Without statistics batches are
        taken as normalised (uint8 is scaled). UserError: what cannot make an ACT policy.
        """
        super().__init__()
        self.config, self.stats = config, stats
        self.input_features, self.output_features = (
            {key: {"type": f["type"], "shape": list(f["shape"])} for key, f in features.items()}
            for features in (input_features, output_features)
        )
        check_features(config, self.input_features, self.output_features)
        self.model = ACT(config, self.input_features, self.output_features, stats)
        self.reset()

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The batch's loss, on its device, in normalised units.

        Train mode: L1 + kl_weight * KL, with dropout, a sampled latent. Eval mode: L1, the latent 0.
        With it, detached: "l1_loss"; training a VAE "kld_loss"; in eval mode "l1_per_sample" (B,).
        """
        action, is_pad = required(batch, ACTION), required(batch, "action_is_pad")
        if action.dim() != 3 or action.shape[1] != self.config.chunk_size:
            wanted = f"(batch, {self.config.chunk_size}, action)"
            raise ValueError(f"The batch's action has shape {tuple(action.shape)}; it must be {wanted}.")
        num_valid = batch["num_valid"] if "num_valid" in batch else (~is_pad).sum()
        inputs = self._observation(batch)
        if self.training:
            inputs |= {ACTION: action, "action_is_pad": is_pad, "num_valid": num_valid}
            if self.config.use_vae or self.config.dropout > 0:
                seed = batch.get("noise_seed")
                if seed is None:
                    seed = torch.randint(2**63 - 1, action.shape[:1], device=action.device)
                inputs["noise_seed"] = seed
            _, loss, loss_terms = self.model(inputs)
        else:
            # The network sees no target, so that evaluation and prediction share one compiled graph.
            actions, target = self.model(inputs).actions, self.model.normalize(ACTION, action)
            loss, loss_terms = act_loss(actions, target, is_pad, num_valid, per_sample=True)
        return loss, {name: term.detach() for name, term in loss_terms.items()}

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Tensor]) -> Tensor:
        """The next chunk of actions, with the latent at its prior's mean (0) and no dropout.

        (B, S, A) in the data's units, if there are statistics. Source: Zhao et al. 2023, Algorithm 2.
        """
        return self.model.unnormalize(ACTION, self.model(self._observation(batch)).actions)

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor]) -> Tensor:
        """This control step's action (B, A): the queue's next, or the ensemble of all chunks."""
        if self._ensembler is not None:
            return self._ensembler.update(self.predict_action_chunk(batch))
        if not self._queue:
            chunk = self.predict_action_chunk(batch)
            self._queue.extend(chunk[:, : self.config.n_action_steps].unbind(1))
        return self._queue.popleft()

    def reset(self) -> None:
        """Forget the queue and the ensemble: call at the start of each episode."""
        coeff = self.config.temporal_ensemble_coeff
        self._queue: deque[Tensor] = deque()
        self._ensembler = None if coeff is None else ACTTemporalEnsembler(coeff, self.config.chunk_size)

    def optim_groups(self, lr: float, lr_backbone: float, weight_decay: float) -> list[dict[str, Any]]:
        """LeRobot's two parameter groups: the rest, then the backbone (empty without cameras)."""
        trained = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        backbone = [p for name, p in trained if name.startswith("model.backbone")]
        rest = [p for name, p in trained if not name.startswith("model.backbone")]
        groups = (rest, lr), (backbone, lr_backbone)
        return [{"params": params, "lr": rate, "weight_decay": weight_decay} for params, rate in groups]

    def _observation(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key: required(batch, key) for key in self.model.observations}


def act_loss(
    actions: Tensor,
    target: Tensor,
    is_pad: Tensor,
    num_valid: Tensor,
    kl_weight: float = 0.0,
    posterior: tuple[Tensor, Tensor] | None = None,
    per_sample: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Training's and evaluation's loss, L1 over valid steps + kl_weight * KL, and its terms. A new term
    must be a sum / num_valid, or a mean over samples, else layouts no longer agree.
    Args: actions and target (B, S, A), normalised; is_pad (B, S); num_valid (); posterior: mean and
        log variance of the latent, (B, L) each, or None without VAE; per_sample: each sample's L1 too.
    """
    # Padding is selected away, not multiplied: whatever it holds, NaN included, changes nothing.
    pad, action_dim = is_pad[..., None], actions.shape[-1]
    error = (actions - torch.where(pad, 0.0, target)).abs().masked_fill(pad, 0.0)
    l1_loss = error.sum() / (torch.where(num_valid > 0, num_valid, 1) * action_dim)
    loss_terms = {"l1_loss": l1_loss}
    if per_sample:
        steps = (~is_pad).sum(1).clamp_min(1)
        loss_terms["l1_per_sample"] = error.sum((1, 2)) / (steps * action_dim)
    if posterior is None:
        return l1_loss, loss_terms
    # From N(0, 1): sum over the latent, mean over the batch. Source: arXiv:1312.6114, B.
    mu, log_sigma_x2 = posterior
    kld_loss = (-0.5 * (1 + log_sigma_x2 - mu.pow(2) - log_sigma_x2.exp())).sum(-1).mean()
    return l1_loss + kld_loss * kl_weight, loss_terms | {"kld_loss": kld_loss}


class ACTOutput(NamedTuple):
    """Actions for an observation, or the loss for a batch with targets. Never both: an unused `actions`
    output would make autograd backpropagate zeros through the whole network."""

    actions: Tensor | None  # (B, S, A), normalised
    loss: Tensor | None = None  # 0-d
    loss_terms: dict[str, Tensor] | None = None


class ACT(nn.Module):
    """The network: raw observations to normalised actions, or to the loss if there are targets."""

    vae_encoder_pos_enc: Tensor  # (1, 2 + S, D)

    def __init__(self, config: ACTConfig, inputs: Features, outputs: Features, stats: Stats) -> None:
        super().__init__()
        self.config = config
        self.cameras = [key for key, f in inputs.items() if f["type"] == "VISUAL"]
        self.observations = [key for key in (STATE, ENV_STATE) if key in inputs] + self.cameras
        self.use_state = STATE in inputs
        dim, action_dim = config.dim_model, outputs[ACTION]["shape"][0]

        # In LeRobot's order: the same seed gives the same weights, and optimizer files fit.
        if config.use_vae:
            # The latent is read from the class token alone, so the last layer computes no other.
            self.vae_encoder = ACTEncoder(config, config.n_vae_encoder_layers, first_token_only=True)
            self.vae_encoder_cls_embed = nn.Embedding(1, dim)
            if self.use_state:
                self.vae_encoder_robot_state_input_proj = nn.Linear(inputs[STATE]["shape"][0], dim)
            self.vae_encoder_action_input_proj = nn.Linear(action_dim, dim)
            self.vae_encoder_latent_output_proj = nn.Linear(dim, config.latent_dim * 2)
            places = torch.arange(1 + self.use_state + config.chunk_size, dtype=torch.float64)
            self.register_buffer("vae_encoder_pos_enc", sinusoids(places, dim)[None].float())
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
                # A module's name holds no dot, a feature's no slash.
                name = key.replace(".", "/")
                self.normalizers[name] = Normalizer(key, mode, f["shape"], stats.get(key, {}))
        for key in self.cameras:
            rows, columns = self.backbone.feature_size(*inputs[key]["shape"][1:])
            positions = camera_positions(rows, columns, dim)
            self.register_buffer(f"camera_positions_{rows}x{columns}", positions, persistent=False)

    def forward(self, batch: dict[str, Tensor]) -> ACTOutput:
        """Observations alone give actions; with a batch's targets and its noise_seed, the loss."""
        config, dtype = self.config, self.action_head.weight.dtype
        wide = torch.promote_types(dtype, torch.float32)  # of normalisation and losses
        vectors = {
            key: self.normalize(key, batch[key].to(wide)).to(dtype)  # (B, state_dim or env_dim)
            for key in self.observations
            if key not in self.cameras
        }
        positions = self.encoder_1d_feature_pos_embed.weight  # (1 to 3, D)
        images: list[Tensor] = []
        if self.cameras:
            image_tokens, places = self.image_tokens(batch, dtype)  # (B, n, D), (n, D)
            images.append(image_tokens)
            positions = torch.cat([positions, places.to(positions.dtype)])  # (N, D)
        bits = dropout_bits(config, batch.get("noise_seed"), len(positions), self.use_state)

        # The latent: sampled from what the VAE's encoder reads in the targets, or the prior's mean.
        latent = self.action_head.weight.new_zeros(len(batch[self.observations[0]]), config.latent_dim)
        target = posterior = None
        if ACTION in batch:
            is_pad = batch["action_is_pad"]  # (B, S)
            # Padding becomes 0 before anything reads it: 0 * NaN is NaN, in a gradient as well.
            target = torch.where(is_pad[..., None], 0.0, batch[ACTION].to(wide))
            target = self.normalize(ACTION, target)  # (B, S, A)
            if config.use_vae:
                posterior = self.encode_actions(vectors.get(STATE), target, is_pad, bits)
                mu, log_sigma_x2 = posterior  # (B, L) each
                noise = normal_noise(batch["noise_seed"], config.latent_dim).to(wide)  # (B, L)
                latent = (mu + (log_sigma_x2 / 2).exp() * noise).to(dtype)  # (B, L)

        # One token (B, 1, D) each, then the images' (B, n, D), in the order of `positions`.
        tokens = [self.encoder_latent_input_proj(latent)[:, None]]
        if STATE in vectors:
            tokens.append(self.encoder_robot_state_input_proj(vectors[STATE])[:, None])
        if ENV_STATE in vectors:
            tokens.append(self.encoder_env_state_input_proj(vectors[ENV_STATE])[:, None])
        encoded = self.encoder(torch.cat(tokens + images, 1), positions, None, bits)  # (B, N, D)
        queries = self.decoder_pos_embed.weight  # (S, D)
        decoded = self.decoder(encoded, positions, queries, bits)  # (B, S, D)
        actions = self.action_head(decoded).to(wide)  # (B, S, A)
        if target is None:
            return ACTOutput(actions)
        loss = act_loss(actions, target, is_pad, batch["num_valid"], config.kl_weight, posterior)
        return ACTOutput(None, *loss)

    def encode_actions(
        self, state: Tensor | None, target: Tensor, is_pad: Tensor, bits: Iterator[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the latent, (B, L) each, in the target's type."""
        dtype = self.action_head.weight.dtype
        tokens = [self.vae_encoder_cls_embed.weight.expand(len(target), 1, -1)]  # (B, 1, D)
        if state is not None:
            tokens.append(self.vae_encoder_robot_state_input_proj(state)[:, None])  # (B, 1, D)
        tokens.append(self.vae_encoder_action_input_proj(target.to(dtype)))  # (B, S, D)
        attend = F.pad(~is_pad, (len(tokens) - 1, 0), value=True)[:, None, None]  # (B, 1, 1, 2 + S)
        positions = self.vae_encoder_pos_enc[0]  # (2 + S, D)
        encoded = self.vae_encoder(torch.cat(tokens, 1), positions, attend, bits)  # (B, 1, D)
        mu, log_sigma_x2 = self.vae_encoder_latent_output_proj(encoded[:, 0]).chunk(2, dim=1)
        return mu.to(target.dtype), log_sigma_x2.to(target.dtype)

    def image_tokens(self, batch: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """All cameras' tokens (B, n, D) and positions (n, D); cameras of one size share a pass."""
        sizes: dict[tuple[int, ...], list[str]] = {}
        for key in self.cameras:
            sizes.setdefault(tuple(batch[key].shape[-2:]), []).append(key)
        tokens: dict[str, Tensor] = {}
        positions: dict[str, Tensor] = {}
        for keys in sizes.values():
            images = [self.scaled_image(key, batch[key], dtype) for key in keys]  # (B, 3, H, W) each
            features = self.backbone(torch.cat(images))  # (K * B, C, h, w)
            features = self.encoder_img_feat_input_proj(features)  # (K * B, D, h, w)
            rows, columns = features.shape[-2:]
            places = getattr(self, f"camera_positions_{rows}x{columns}", None)  # (h * w, D)
            if places is None:  # images of another size than the features say
                places = camera_positions(rows, columns, self.config.dim_model).to(features.device)
            tokens |= dict(zip(keys, features.flatten(2).mT.chunk(len(keys))))  # (B, h * w, D) each
            positions |= dict.fromkeys(keys, places)
        ordered = [tokens[key] for key in self.cameras]
        return torch.cat(ordered, 1), torch.cat([positions[key] for key in self.cameras])

    def scaled_image(self, key: str, image: Tensor, dtype: torch.dtype) -> Tensor:
        """Normalised, channels last, three channels. A uint8 image is scaled to [0, 1] first."""
        x = image.to(torch.promote_types(dtype, torch.float32), memory_format=torch.channels_last)
        x = self.normalize(key, x / 255 if image.dtype == torch.uint8 else x)
        return x.expand(-1, 3, -1, -1).to(dtype)

    def normalize(self, key: str, x: Tensor) -> Tensor:
        """A feature from the data's units to the policy's."""
        name = key.replace(".", "/")
        return self.normalizers[name](x) if name in self.normalizers else x

    def unnormalize(self, key: str, x: Tensor) -> Tensor:
        """A feature from the policy's units to the data's."""
        normalizers: Any = self.normalizers
        name = key.replace(".", "/")
        return normalizers[name].inverse(x) if name in normalizers else x


class ACTEncoder(nn.Module):
    """A stack of encoder layers, normalised at the end if they normalise first."""

    def __init__(self, config: ACTConfig, num_layers: int, first_token_only: bool = False) -> None:
        super().__init__()
        layers = [ACTEncoderLayer(config) for _ in range(num_layers - 1)]
        self.layers = nn.ModuleList([*layers, ACTEncoderLayer(config, first_token_only)])
        self.norm = nn.LayerNorm(config.dim_model) if config.pre_norm else nn.Identity()

    def forward(
        self, x: Tensor, positions: Tensor, attend: Tensor | None, bits: Iterator[Tensor | None]
    ) -> Tensor:
        """x (B, N, D), positions (N, D), attend (B, 1, 1, N), bits per layer -> (B, N or 1, D)."""
        for layer in self.layers:
            x = layer(x, positions, attend, next(bits))
        return self.norm(x)


class ACTDecoder(nn.Module):
    """A stack of decoder layers over zeros, normalised at the end."""

    def __init__(self, config: ACTConfig) -> None:
        super().__init__()
        layers = [ACTDecoderLayer(config, i == 0) for i in range(config.n_decoder_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(config.dim_model)

    def forward(
        self, encoded: Tensor, positions: Tensor, queries: Tensor, bits: Iterator[Tensor | None]
    ) -> Tensor:
        """encoded (B, N, D), positions (N, D), queries (S, D), bits per layer -> (B, S, D)."""
        x = encoded.new_zeros(1, *queries.shape)  # one for all samples
        for layer in self.layers:
            x = layer(x, encoded, positions, queries, next(bits))
        return self.norm(x)


class ACTLayer(nn.Module):
    """The feed-forward block of encoder and decoder layers; their constructors add its weights."""

    def add_feedforward(self, config: ACTConfig) -> None:
        self.config = config
        self.linear1 = nn.Linear(config.dim_model, config.dim_feedforward)
        self.linear2 = nn.Linear(activation_width(config), config.dim_model)

    def feedforward(self, x: Tensor, dropout: Dropout) -> Tensor:
        activation = getattr(F, self.config.feedforward_activation)
        return self.linear2(dropout.scaled(activation(self.linear1(x))))


class ACTEncoderLayer(ACTLayer):
    """Self-attention and feed-forward, each with dropout, a residual and a LayerNorm.

    first_token_only: give the first token's output alone, where nobody reads the others.
    """

    def __init__(self, config: ACTConfig, first_token_only: bool = False) -> None:
        super().__init__()
        self.first_token_only = first_token_only
        self.self_attn = Attention(config.dim_model, config.n_heads)
        self.add_feedforward(config)
        self.norm1 = nn.LayerNorm(config.dim_model)
        self.norm2 = nn.LayerNorm(config.dim_model)

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
    """Self-attention, cross-attention, feed-forward, each with dropout, residual and LayerNorm.

    input_is_constant: x is one row repeated, (1, S, D), as the first layer's zeros are.
    """

    def __init__(self, config: ACTConfig, input_is_constant: bool = False) -> None:
        super().__init__()
        self.input_is_constant = input_is_constant
        self.self_attn = Attention(config.dim_model, config.n_heads)
        self.multihead_attn = Attention(config.dim_model, config.n_heads)
        self.add_feedforward(config)
        self.norm1 = nn.LayerNorm(config.dim_model)
        self.norm2 = nn.LayerNorm(config.dim_model)
        self.norm3 = nn.LayerNorm(config.dim_model)

    def forward(
        self, x: Tensor, encoded: Tensor, positions: Tensor, queries: Tensor, bits: Tensor | None = None
    ) -> Tensor:
        """x (B or 1, S, D), encoded (B, N, D), positions (N, D), queries (S, D) -> (B, S, D)."""
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
    """Multi-head attention with nn.MultiheadAttention's parameters.

    The key bias is left out, as softmax ignores the shift that it makes: its gradient is exactly zero,
    not the noise of rounding, which Adam would turn into steps of the learning rate.

    Contract with adapters (LoRA): a forward reads self.in_proj_weight exactly once, so a subclass may
    make it a property that returns the adapted weight. out_proj, like every Linear of this file, is
    called as a module, so a subclass may adapt its forward.
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
        """query (B, M, D), key and value (B, N, D), attend (B, 1, 1, N): visible -> (B, M, D)."""
        q, k, v = self.project(query, key, value)
        if dropout.bits is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=attend)
        else:
            out = dropout.masked(self.weights(q, k, attend)).to(v.dtype) @ v * dropout.scale
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def to_constant(self, query: Tensor, value: Tensor, dropout: Dropout) -> Tensor:
        """Attention among (1, S, D) tokens of equal values, the same for all samples -> (B or 1, S, D).

        Weights sum to 1, so every output is the value; queries and keys do nothing (a product would give
        them noise for a gradient). With dropout, what it leaves of the sum scales the value.
        """
        q, k, v = self.project(query, query, value[:, :1])
        out = v.expand(-1, -1, query.shape[1], -1)
        if dropout.bits is not None:
            kept = dropout.scaled(self.weights(q, k, None)).sum(-1, keepdim=True)  # (B, H, M, 1)
            out = kept.to(v.dtype) * v
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values, (B, H, M or N, D / H) each."""
        weights, biases = self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3)
        q, k = F.linear(query, weights[0], biases[0]), F.linear(key, weights[1])
        v = F.linear(value, weights[2], biases[2])
        return [x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v)]

    def weights(self, q: Tensor, k: Tensor, attend: Tensor | None) -> Tensor:
        """softmax(q k^T / sqrt(D / H)): (B, H, M, N)."""
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        return (scores if attend is None else scores.masked_fill(~attend, -torch.inf)).softmax(-1)


# ------------------------------------------------------------------------------------------- end of the spine


@dataclass(frozen=True)
class ACTConfig:
    """ACT's hyper-parameters: LeRobot's names and defaults, the paper's for bimanual ALOHA."""

    n_obs_steps: int = 1
    """Observation steps given to the policy; only 1 is supported, as in LeRobot."""
    chunk_size: int = 100
    """Actions predicted at once, in control steps."""
    n_action_steps: int = 100
    """Actions executed before the next prediction, in control steps; at most chunk_size."""
    normalization_mapping: dict[str, str] = field(
        default_factory=lambda: {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    )
    """Feature type (VISUAL, STATE, ENV, ACTION) to mode (IDENTITY, MEAN_STD, MIN_MAX, QUANTILES,
    QUANTILE10); a type that is not named passes as it is."""
    vision_backbone: str = "resnet18"
    """torchvision ResNet for the images: resnet18, 34, 50, 101 or 152; one for all cameras."""
    pretrained_backbone_weights: str | None = "ResNet18_Weights.IMAGENET1K_V1"
    """torchvision weights that the backbone starts from; None: random ones, and no download."""
    replace_final_stride_with_dilation: bool = False
    """Dilate the last ResNet stage, no stride: four times the image tokens. resnet50 and larger."""
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
    """Layers of the action decoder. The original code says 7 but uses only the first."""
    use_vae: bool = True
    """Train as a VAE: a further encoder reads the target actions into a latent."""
    latent_dim: int = 32
    """Width of the latent."""
    n_vae_encoder_layers: int = 4
    """Layers of the VAE's encoder."""
    temporal_ensemble_coeff: float | None = None
    """Temporal ensembling in select_action (paper: 0.01); needs n_action_steps 1. None: off."""
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


class ResNet(nn.Module):
    """torchvision's ResNet without its head, its frozen norms folded into the convolutions."""

    def __init__(self, name: str, dilate: bool) -> None:
        import torchvision  # most of a second, needed with a camera only

        super().__init__()
        dilation, norm = [False, False, dilate], torchvision.ops.FrozenBatchNorm2d
        get_model = torchvision.models.get_model
        net = get_model(name, weights=None, norm_layer=norm, replace_stride_with_dilation=dilation)
        self.conv1, self.bn1, self.maxpool = net.conv1, net.bn1, net.maxpool
        self.layer1, self.layer2 = net.layer1, net.layer2
        self.layer3, self.layer4 = net.layer3, net.layer4
        self.width, self.stride = net.fc.in_features, 16 if dilate else 32

    def feature_size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of an image's features."""
        return -(-height // self.stride), -(-width // self.stride)

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) -> (B, width, rows, columns)."""
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


def conv_norm(x: Tensor, conv: nn.Module, norm: Any) -> Tensor:
    """norm(conv(x)) as one convolution: a frozen norm scales the filters and shifts their output.

    Contract with adapters: a convolution may become any other module with the same input and output.
    It is then called, and the norm after it; only a plain nn.Conv2d's weight is read here.
    """
    if type(conv) is not nn.Conv2d:
        return norm(conv(x))
    # In float64, so that scale and shift are rounded once: closer to exact than unfolded.
    scale = norm.weight.double() * (norm.running_var.double() + norm.eps).rsqrt()
    shift = norm.bias.double() - norm.running_mean.double() * scale
    weight = (conv.weight * scale.to(conv.weight.dtype)[:, None, None, None]).to(x.dtype)
    return F.conv2d(x, weight, shift.to(x.dtype), conv.stride, conv.padding, conv.dilation)


def sinusoids(places: Tensor, dim: int) -> Tensor:
    """(n, dim) sines and cosines, interleaved, of n places. Source: Vaswani et al. 2017, 3.5."""
    column = torch.arange(dim)
    angle = places[:, None] / 10000 ** (2 * (column.to(places.dtype) // 2) / dim)
    return torch.where(column % 2 == 0, angle.sin(), angle.cos())


def camera_positions(rows: int, columns: int, dim: int) -> Tensor:
    """(rows * columns, dim): sinusoids of the row, then of the column, each scaled to (0, 2 pi]."""
    row, column = (
        sinusoids(torch.arange(1.0, count + 1) / (count + 1e-6) * (2 * math.pi), dim // 2)
        for count in (rows, columns)
    )
    grid = row[:, None].expand(-1, columns, -1), column[None].expand(rows, -1, -1)
    return torch.cat(grid, dim=-1).flatten(0, 1)


class ACTTemporalEnsembler:
    """Mean, at each step, of all chunks that reach it, weighted exp(-coeff * i), 0 the oldest.

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


# The noise is a counter-based stream of 64-bit words per sample; dropout takes 16 bits per element. For
# the 10.4 M elements of a sample of the paper-size policy, on a core (EPYC, AVX-512, torch 2.14), the
# words cost 10 ms and their comparison 5 ms. Also tried: torch's generator seeded per sample, 9 ms, for
# which the host has to read the seeds; bernoulli_, 61 ms; F.dropout, 104 ms with its product.

MIX_1, MIX_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
# Words: 256 KiB, so that a piece and its shifted copy stay in a core's second-level cache.
NOISE_PIECE = 1 << 15


def dropout_bits(
    config: ACTConfig, seed: Tensor | None, tokens: int, use_state: bool
) -> Iterator[Tensor | None]:
    """The random bits of each layer, (B, n) int16, in the order in which the layers run.

    A sample's stream holds the latent's noise, then the layers of VAE encoder, encoder and decoder. A
    layer drops attention weights (queries x keys per head), each block's output, and an activation.
    """
    if seed is None or config.dropout == 0:
        return itertools.repeat(None)

    def size(queries: int, keys: int, blocks: int) -> int:
        return queries * (config.n_heads * keys + blocks * config.dim_model + activation_width(config))

    steps, vae_tokens = config.chunk_size, 1 + use_state + config.chunk_size
    counts = [size(tokens, tokens, 2)] * config.n_encoder_layers
    counts += [size(steps, steps + tokens, 3)] * config.n_decoder_layers
    if config.use_vae:
        vae_layers = [size(vae_tokens, vae_tokens, 2)] * (config.n_vae_encoder_layers - 1)
        counts = [*vae_layers, size(1, vae_tokens, 2), *counts]  # the last: one token
    words = noise_words(seed, 2 * config.latent_dim, -(-sum(counts) // 4))
    return iter(words.view(torch.int16)[:, : sum(counts)].split(counts, dim=1))


def activation_width(config: ACTConfig) -> int:
    return config.dim_feedforward // (2 if config.feedforward_activation == "glu" else 1)


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
    """splitmix64's finaliser, in place. int64 shifts keep the sign, so each is masked."""
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
    """Dropout of a layer, its masks cut one by one from (B, n) int16 random bits; None: no dropout.

    An element is kept with probability 1 - round(p * 2^16) / 2^16 and scaled by its inverse.
    """

    def __init__(self, p: float, bits: Tensor | None) -> None:
        out_of_65536 = min(round(p * 65536), 65535)
        self.bits, self.used = bits, 0
        self.threshold, self.scale = out_of_65536 - 32768, 65536 / (65536 - out_of_65536)

    def masked(self, x: Tensor) -> Tensor:
        """x (B, ...) with zeros where it is dropped, still to be scaled."""
        return x if self.bits is None else x.masked_fill(self._dropped(x), 0)

    def scaled(self, x: Tensor) -> Tensor:
        return x if self.bits is None else self.masked(x) * self.scale

    def residual(self, skip: Tensor, x: Tensor) -> Tensor:
        """skip + dropout(x)."""
        return skip + x if self.bits is None else torch.add(skip, self.masked(x), alpha=self.scale)

    def _dropped(self, x: Tensor) -> Tensor:
        assert self.bits is not None
        start, self.used = self.used, self.used + x[0].numel()
        return self.bits[:, start : self.used].unflatten(1, x.shape[1:]) < self.threshold


NORMALIZATION_STATS: dict[str, tuple[str, ...]] = {  # mode -> the statistics it needs
    "IDENTITY": (),
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}


class Normalizer(nn.Module):
    """One feature's normalisation, by LeRobot's formulas: (x - shift) / divisor + offset."""

    shift: Tensor
    divisor: Tensor
    factor: Tensor

    def __init__(self, key: str, mode: str, shape: list[int], stats: dict[str, Tensor]) -> None:
        super().__init__()
        values = []
        for name in NORMALIZATION_STATS[mode]:
            has = ", ".join(f"{key}.{other}" for other in stats) or "nothing of this feature"
            needs = f"{key}.{name}, which {mode} normalisation needs"
            refuse_unless(name in stats, f"The statistics lack {needs}; they have {has}.")
            value = torch.as_tensor(stats[name]).float().flatten()
            sizes = f"has {len(value)} values, its feature {shape[0]}"
            refuse_unless(len(value) in (1, shape[0]), f"The statistic {key}.{name} {sizes}.")
            values.append(value[:, None, None] if len(shape) == 3 else value)
        first, second = values
        if mode == "MEAN_STD":
            self.offset, factor, divisor = 0.0, second, second + 1e-8
        else:  # from between the two values to between -1 and 1
            span = torch.where(second == first, 1e-8, second - first)
            self.offset, factor, divisor = -1.0, span / 2, span / 2
        # Not persistent: statistics are no weights, and their file is the checkpoint's.
        for name, value in (("shift", first), ("factor", factor), ("divisor", divisor)):
            self.register_buffer(name, value.clone(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.shift) / self.divisor + self.offset

    def inverse(self, x: Tensor) -> Tensor:
        return (x - self.offset) * self.factor + self.shift


class UserError(ValueError):
    """The user's to mend, in one sentence: flag or file, rule, way out. Other errors are bugs."""


def refuse_unless(fine: bool, sentence: str) -> None:
    if not fine:
        raise UserError(sentence)


def check_features(config: ACTConfig, inputs: Features, outputs: Features) -> None:
    """LeRobot's rules on features, and the shapes that the network takes, or a UserError."""
    names, cameras = ", ".join(inputs) or "empty", [k for k, f in inputs.items() if f["type"] == "VISUAL"]
    fine = bool(cameras) or ENV_STATE in inputs
    refuse_unless(fine, f"ACT needs a camera or {ENV_STATE}; the inputs are {names}.")
    for key, f in inputs.items():
        kind, shape = f["type"], f["shape"]
        if key in cameras:
            rule = "ACT takes (channels, height, width) of 3 or 1 channels"
            fine = len(shape) == 3 and shape[0] in (1, 3)
            refuse_unless(fine, f"Camera {key} has shape {shape}; {rule}.")
            flag = f"--policy.dim-model={config.dim_model}"
            refuse_unless(config.dim_model % 4 == 0, f"{flag} must be a multiple of 4 to take cameras.")
            continue
        takes = f"ACT takes cameras, {STATE} (STATE) and {ENV_STATE} (ENV)"
        fine = (key, kind) in ((STATE, "STATE"), (ENV_STATE, "ENV"))
        refuse_unless(fine, f"{takes}, not {key} ({kind}).")
        refuse_unless(len(shape) == 1, f"{key} has shape {shape}; ACT takes a vector.")
    action = outputs.get(ACTION, {"type": None, "shape": []})
    fine = action["type"] == "ACTION" and len(action["shape"]) == 1
    refuse_unless(fine, f"ACT needs the output 'action', a vector of type ACTION; it has {outputs}.")


def required(batch: dict[str, Tensor], key: str) -> Tensor:
    if key not in batch:
        raise ValueError(f"The batch lacks {key!r}, which the policy needs; it has {', '.join(batch)}.")
    return batch[key]
