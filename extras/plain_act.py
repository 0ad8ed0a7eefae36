"""ACT, the Action Chunking Transformer, in torch's public modules: the text to read first.

ACT imitates demonstrations. From one observation (joint positions, camera images) it predicts a chunk: the
next S actions at once. Demonstrators differ, so it is trained as a variational autoencoder: an encoder that
sees the demonstrated actions puts their style in a latent z. At inference z is 0, its prior's mean.

    training:  class, state, actions -> vae_encoder -> mu, log_sigma_x2 -> z
    always:    z, state, environment state, image features -> encoder -> keys and values
               S learned queries -> decoder over those -> action_head -> S actions

model_act.py is this network, made fast and exact; tests hold it to the same outputs, losses and gradients.
A batch, normalised: "observation.state" (B, state_dim), "observation.environment_state" (B, env_dim) if any,
an image (B, 3, H, W) per camera, "action" (B, S, A), "action_is_pad" (B, S), true past the episode's end.

Shapes: B batch, S chunk, N encoder tokens, D dim_model, L latent, A action, C channels, h and w rows and
columns of features. Tokens come first, (N, B, D).
Source: Zhao et al. 2023, arXiv:2304.13705, by way of lerobot 0.6, policies/act/modeling_act.py.
"""

import math
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter

STATE, ENV_STATE = "observation.state", "observation.environment_state"


class PlainACT(nn.Module):
    """The network. `config` is anything with the fields of model_act.ACTConfig (relu or gelu)."""

    def __init__(self, config: Any, inputs: dict[str, dict], outputs: dict[str, dict]) -> None:
        super().__init__()
        self.config, dim, action_dim = config, config.dim_model, outputs["action"]["shape"][0]
        self.cameras = [key for key, f in inputs.items() if f["type"] == "VISUAL"]
        widths = {key: f["shape"][0] for key, f in inputs.items() if f["type"] != "VISUAL"}
        self.has_state, self.has_env = STATE in widths, ENV_STATE in widths
        if config.use_vae:
            self.vae_encoder = Stack(config, EncoderLayer, config.n_vae_encoder_layers)
            self.vae_encoder_cls_embed = nn.Embedding(1, dim)
            if self.has_state:
                self.vae_encoder_robot_state_input_proj = nn.Linear(widths[STATE], dim)
            self.vae_encoder_action_input_proj = nn.Linear(action_dim, dim)
            self.vae_encoder_latent_output_proj = nn.Linear(dim, config.latent_dim * 2)
            places = torch.arange(1 + self.has_state + config.chunk_size, dtype=torch.float64)
            self.vae_encoder_pos_enc = nn.Buffer(sinusoids(places, dim)[None].float())
        if self.cameras:
            # A ResNet up to its last feature map; the statistics of its norms stay as loaded.
            dilate = [False, False, config.replace_final_stride_with_dilation]
            resnet = getattr(torchvision.models, config.vision_backbone)
            net = resnet(norm_layer=torchvision.ops.FrozenBatchNorm2d, replace_stride_with_dilation=dilate)
            self.backbone = IntermediateLayerGetter(net, {"layer4": "features"})
        self.encoder = Stack(config, EncoderLayer, config.n_encoder_layers)
        self.decoder = Stack(config, DecoderLayer, config.n_decoder_layers)
        if self.has_state:
            self.encoder_robot_state_input_proj = nn.Linear(widths[STATE], dim)
        if self.has_env:
            self.encoder_env_state_input_proj = nn.Linear(widths[ENV_STATE], dim)
        self.encoder_latent_input_proj = nn.Linear(config.latent_dim, dim)
        if self.cameras:
            self.encoder_img_feat_input_proj = nn.Conv2d(net.fc.in_features, dim, kernel_size=1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + len(widths), dim)
        self.decoder_pos_embed = nn.Embedding(config.chunk_size, dim)
        self.action_head = nn.Linear(dim, action_dim)

    def forward(self, batch: dict[str, Tensor], noise: Tensor | None = None) -> tuple[Tensor, Any, Any]:
        """Actions (B, S, A); mean and log variance of the latent (B, L) or None; `noise` (B, L)."""
        config, mu, log_sigma_x2, size = self.config, None, None, len(next(iter(batch.values())))
        # 1. The latent: sampled by the VAE's encoder in training, otherwise 0.
        latent = self.action_head.weight.new_zeros(size, config.latent_dim)
        if config.use_vae and self.training:
            mu, log_sigma_x2 = self.encode_actions(batch)
            latent = mu + log_sigma_x2.div(2).exp() * (torch.randn_like(mu) if noise is None else noise)
        # 2. The observation's tokens: latent, state, environment state, then every camera's pixels.
        tokens = [self.encoder_latent_input_proj(latent)[None]]  # (1, B, D)
        if self.has_state:
            tokens.append(self.encoder_robot_state_input_proj(batch[STATE])[None])
        if self.has_env:
            tokens.append(self.encoder_env_state_input_proj(batch[ENV_STATE])[None])
        positions = [self.encoder_1d_feature_pos_embed.weight[:, None]]  # (1 to 3, 1, D)
        for camera in self.cameras:
            features = self.backbone(batch[camera])["features"]  # (B, C, h, w)
            positions.append(camera_positions(features, config.dim_model)[:, None])  # (h * w, 1, D)
            features = self.encoder_img_feat_input_proj(features)  # (B, D, h, w)
            tokens.append(features.flatten(2).permute(2, 0, 1))  # (h * w, B, D)
        # 3. The encoder mixes the tokens; the decoder's S queries read from them; each becomes an action.
        places = torch.cat(positions)  # (N, 1, D)
        encoded = self.encoder(torch.cat(tokens), places)  # (N, B, D)
        blank = encoded.new_zeros(config.chunk_size, size, config.dim_model)  # (S, B, D)
        decoded = self.decoder(blank, self.decoder_pos_embed.weight[:, None], encoded, places)  # (S, B, D)
        return self.action_head(decoded.transpose(0, 1)), mu, log_sigma_x2

    def encode_actions(self, batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """Mean and log variance of the latent, (B, L) each, read from a class token beside the actions."""
        size = len(batch["action"])
        tokens = [self.vae_encoder_cls_embed.weight[:, None].repeat(1, size, 1)]  # (1, B, D)
        if self.has_state:
            tokens.append(self.vae_encoder_robot_state_input_proj(batch[STATE])[None])
        visible = torch.zeros(size, len(tokens), dtype=torch.bool, device=batch["action"].device)
        padding = torch.cat([visible, batch["action_is_pad"]], 1)  # (B, 2 + S)
        tokens.append(self.vae_encoder_action_input_proj(batch["action"]).transpose(0, 1))  # (S, B, D)
        encoded = self.vae_encoder(torch.cat(tokens), self.vae_encoder_pos_enc.transpose(0, 1), padding)
        return self.vae_encoder_latent_output_proj(encoded[0]).chunk(2, dim=1)

    def loss(self, batch: dict[str, Tensor], noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """L1 + kl_weight * KL, its L1 and its KL (0 without VAE or in eval mode)."""
        actions, mu, log_sigma_x2 = self(batch, noise)
        valid = ~batch["action_is_pad"][..., None]  # (B, S, 1)
        error = (actions - batch["action"]).abs() * valid
        l1_loss = error.sum() / (valid.sum() * actions.shape[-1]).clamp_min(1)
        if mu is None or log_sigma_x2 is None:
            return l1_loss, l1_loss, torch.zeros_like(l1_loss)
        # How far the latent's Gaussian is from N(0, 1): what keeps z = 0 meaningful at inference.
        kld_loss = (-0.5 * (1 + log_sigma_x2 - mu.pow(2) - log_sigma_x2.exp())).sum(-1).mean()
        return l1_loss + kld_loss * self.config.kl_weight, l1_loss, kld_loss


class Stack(nn.Module):
    """Layers one after another; a decoder, and a pre-norm stack, is normalised at the end."""

    def __init__(self, config: Any, kind: type, count: int) -> None:
        super().__init__()
        c, final_norm = config, config.pre_norm or kind is DecoderLayer
        sizes = c.dim_model, c.n_heads, c.dim_feedforward, c.dropout, c.feedforward_activation
        self.layers = nn.ModuleList(kind(*sizes, norm_first=c.pre_norm) for _ in range(count))
        self.norm = nn.LayerNorm(c.dim_model) if final_norm else nn.Identity()

    def forward(self, x: Tensor, *context: Tensor | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, *context)
        return self.norm(x)


class EncoderLayer(nn.TransformerEncoderLayer):
    """torch's layer, but every layer adds the positions to its queries and keys (not to the values)."""

    def forward(self, x: Tensor, positions: Tensor, padding: Tensor | None = None) -> Tensor:  # type: ignore[override]
        first, y = self.norm_first, self.norm1(x) if self.norm_first else x
        x = x + self.dropout1(self.self_attn(y + positions, y + positions, y, key_padding_mask=padding)[0])
        x = x if first else self.norm1(x)
        x = x + self._ff_block(self.norm2(x) if first else x)
        return x if first else self.norm2(x)


class DecoderLayer(nn.TransformerDecoderLayer):
    """The same, with cross-attention between self-attention and feed-forward."""

    def forward(self, x: Tensor, queries: Tensor, encoded: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        first, y = self.norm_first, self.norm1(x) if self.norm_first else x
        x = x + self.dropout1(self.self_attn(y + queries, y + queries, y)[0])
        x = x if first else self.norm1(x)
        y = self.norm2(x) if first else x
        x = x + self.dropout2(self.multihead_attn(y + queries, encoded + positions, encoded)[0])
        x = x if first else self.norm2(x)
        x = x + self._ff_block(self.norm3(x) if first else x)
        return x if first else self.norm3(x)


def sinusoids(places: Tensor, dim: int) -> Tensor:
    """(n, dim): sines and cosines, interleaved, of n places."""
    column = torch.arange(dim, device=places.device)
    angle = places[:, None] / 10000 ** (2 * (column.to(places.dtype) // 2) / dim)
    return torch.where(column % 2 == 0, angle.sin(), angle.cos())


def camera_positions(features: Tensor, dim: int) -> Tensor:
    """(h * w, dim) for features (B, C, h, w): sinusoids of the row, then of the column, in (0, 2 pi]."""
    rows, columns = features.shape[-2:]
    counts = (torch.arange(1.0, n + 1, device=features.device) / (n + 1e-6) for n in (rows, columns))
    row, column = (sinusoids(count * (2 * math.pi), dim // 2) for count in counts)
    grid = row[:, None].expand(-1, columns, -1), column[None].expand(rows, -1, -1)
    return torch.cat(grid, -1).flatten(0, 1).to(features.dtype)


def normalized(batch: dict[str, Tensor], stats: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """(x - mean) / (std + 1e-8) on every feature that has statistics; uint8 is scaled to [0, 1] first."""
    out = {key: x.float() / 255 if x.dtype == torch.uint8 else x for key, x in batch.items()}
    return out | {k: (out[k] - s["mean"]) / (s["std"] + 1e-8) for k, s in stats.items() if k in out}
