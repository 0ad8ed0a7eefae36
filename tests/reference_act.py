"""A plain ACT from public torch modules, with LeRobot's parameter names and without any of our shortcuts.

`ReferenceACT` is the network, `ReferenceStep` a LeRobot-style eager training step: attention with its weights
returned, one backbone pass per camera, float images, dropout modules, un-fused AdamW, the losses read back.
Images come normalised or not, as `ReferenceStep.preprocess` or the caller does it.
"""

import math

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.ops.misc import FrozenBatchNorm2d

STATE, ENV, ACTION = "observation.state", "observation.environment_state", "action"


class EncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(c.dim_model, c.n_heads, dropout=c.dropout)
        self.linear1 = nn.Linear(c.dim_model, c.dim_feedforward)
        self.linear2 = nn.Linear(c.dim_feedforward, c.dim_model)
        self.norm1, self.norm2 = nn.LayerNorm(c.dim_model), nn.LayerNorm(c.dim_model)
        self.dropout, self.dropout1, self.dropout2 = (nn.Dropout(c.dropout) for _ in range(3))
        self.activation, self.pre_norm = getattr(F, c.feedforward_activation), c.pre_norm

    def forward(self, x, pos, key_padding_mask=None):
        skip = x
        x = self.norm1(x) if self.pre_norm else x
        x = skip + self.dropout1(self.self_attn(x + pos, x + pos, x, key_padding_mask=key_padding_mask)[0])
        x = x if self.pre_norm else self.norm1(x)
        skip = x
        x = self.norm2(x) if self.pre_norm else x
        x = skip + self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))
        return x if self.pre_norm else self.norm2(x)


class DecoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(c.dim_model, c.n_heads, dropout=c.dropout)
        self.multihead_attn = nn.MultiheadAttention(c.dim_model, c.n_heads, dropout=c.dropout)
        self.linear1 = nn.Linear(c.dim_model, c.dim_feedforward)
        self.linear2 = nn.Linear(c.dim_feedforward, c.dim_model)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(c.dim_model) for _ in range(3))
        self.dropout, self.dropout1, self.dropout2, self.dropout3 = (nn.Dropout(c.dropout) for _ in range(4))
        self.activation, self.pre_norm = getattr(F, c.feedforward_activation), c.pre_norm

    def forward(self, x, memory, pos, memory_pos):
        skip = x
        x = self.norm1(x) if self.pre_norm else x
        x = skip + self.dropout1(self.self_attn(x + pos, x + pos, x)[0])
        x = x if self.pre_norm else self.norm1(x)
        skip = x
        x = self.norm2(x) if self.pre_norm else x
        x = skip + self.dropout2(self.multihead_attn(x + pos, memory + memory_pos, memory)[0])
        x = x if self.pre_norm else self.norm2(x)
        skip = x
        x = self.norm3(x) if self.pre_norm else x
        x = skip + self.dropout3(self.linear2(self.dropout(self.activation(self.linear1(x)))))
        return x if self.pre_norm else self.norm3(x)


class Stack(nn.Module):
    def __init__(self, layer, count, c, norm):
        super().__init__()
        self.layers = nn.ModuleList(layer(c) for _ in range(count))
        self.norm = nn.LayerNorm(c.dim_model) if norm else nn.Identity()

    def forward(self, x, *args):
        for layer in self.layers:
            x = layer(x, *args)
        return self.norm(x)


def table(positions: Tensor, dim: int) -> Tensor:
    """positions (...) -> (..., dim), sines at even places and cosines at odd ones."""
    columns = []
    for i in range(dim):
        angle = positions / 10000 ** (2 * (i // 2) / dim)
        columns.append(angle.sin() if i % 2 == 0 else angle.cos())
    return torch.stack(columns, -1)


class ReferenceACT(nn.Module):
    def __init__(self, c, inputs: dict, outputs: dict):
        super().__init__()
        self.c, self.inputs = c, inputs
        self.cameras = [k for k, f in inputs.items() if f["type"] == "VISUAL"]
        action_dim, dim = outputs[ACTION]["shape"][0], c.dim_model
        if c.use_vae:
            self.vae_encoder = Stack(EncoderLayer, c.n_vae_encoder_layers, c, c.pre_norm)
            self.vae_encoder_cls_embed = nn.Embedding(1, dim)
            if STATE in inputs:
                self.vae_encoder_robot_state_input_proj = nn.Linear(inputs[STATE]["shape"][0], dim)
            self.vae_encoder_action_input_proj = nn.Linear(action_dim, dim)
            self.vae_encoder_latent_output_proj = nn.Linear(dim, 2 * c.latent_dim)
            places = torch.arange(1 + (STATE in inputs) + c.chunk_size, dtype=torch.float64)
            self.register_buffer("vae_encoder_pos_enc", table(places, dim).float()[None])
        if self.cameras:
            net = getattr(torchvision.models, c.vision_backbone)(
                weights=None,
                norm_layer=FrozenBatchNorm2d,
                replace_stride_with_dilation=[False, False, c.replace_final_stride_with_dilation],
            )
            self.backbone = IntermediateLayerGetter(net, {"layer4": "features"})
        self.encoder = Stack(EncoderLayer, c.n_encoder_layers, c, c.pre_norm)
        self.decoder = Stack(DecoderLayer, c.n_decoder_layers, c, True)
        if STATE in inputs:
            self.encoder_robot_state_input_proj = nn.Linear(inputs[STATE]["shape"][0], dim)
        if ENV in inputs:
            self.encoder_env_state_input_proj = nn.Linear(inputs[ENV]["shape"][0], dim)
        self.encoder_latent_input_proj = nn.Linear(c.latent_dim, dim)
        if self.cameras:
            self.encoder_img_feat_input_proj = nn.Conv2d(net.fc.in_features, dim, 1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + (STATE in inputs) + (ENV in inputs), dim)
        self.decoder_pos_embed = nn.Embedding(c.chunk_size, dim)
        self.action_head = nn.Linear(dim, action_dim)

    def forward(self, batch: dict[str, Tensor], noise: Tensor | None = None):
        """Actions (B, S, A), mu and log_sigma_x2; `noise` (B, L) replaces the drawn one."""
        size, c, weight = len(next(iter(batch.values()))), self.c, self.action_head.weight
        mu = log_sigma_x2 = None
        latent = weight.new_zeros(size, c.latent_dim)
        if c.use_vae and self.training:
            tokens = [self.vae_encoder_cls_embed.weight[None].repeat(1, size, 1)]
            if STATE in self.inputs:
                tokens.append(self.vae_encoder_robot_state_input_proj(batch[STATE])[None])
            extra = len(tokens)
            tokens.append(self.vae_encoder_action_input_proj(batch[ACTION]).transpose(0, 1))
            padding = torch.cat(
                [torch.zeros(size, extra).bool().to(weight.device), batch["action_is_pad"]], 1
            )
            positions = self.vae_encoder_pos_enc.transpose(0, 1)
            out = self.vae_encoder_latent_output_proj(
                self.vae_encoder(torch.cat(tokens), positions, padding)[0]
            )
            mu, log_sigma_x2 = out[:, : c.latent_dim], out[:, c.latent_dim :]
            noise = torch.randn_like(mu) if noise is None else noise
            latent = mu + (log_sigma_x2 / 2).exp() * noise
        tokens = [self.encoder_latent_input_proj(latent)[None]]
        if STATE in self.inputs:
            tokens.append(self.encoder_robot_state_input_proj(batch[STATE])[None])
        if ENV in self.inputs:
            tokens.append(self.encoder_env_state_input_proj(batch[ENV])[None])
        positions = [self.encoder_1d_feature_pos_embed.weight[:, None]]
        for camera in self.cameras:
            features = self.backbone(batch[camera])["features"]
            rows, columns = features.shape[2:]
            y, x = torch.meshgrid(torch.arange(1.0, rows + 1), torch.arange(1.0, columns + 1), indexing="ij")
            place = [table(axis / (axis.max() + 1e-6) * 2 * math.pi, c.dim_model // 2) for axis in (y, x)]
            positions.append(torch.cat(place, -1).flatten(0, 1)[:, None].to(features))
            tokens.append(self.encoder_img_feat_input_proj(features).flatten(2).permute(2, 0, 1))
        positions = torch.cat(positions)
        memory = self.encoder(torch.cat(tokens), positions, None)
        start = weight.new_zeros(c.chunk_size, size, c.dim_model)
        out = self.decoder(start, memory, self.decoder_pos_embed.weight[:, None], positions)
        return self.action_head(out.transpose(0, 1)), mu, log_sigma_x2

    def loss(self, batch: dict[str, Tensor], noise: Tensor | None = None):
        """LeRobot's loss, its L1 and its KL (0 without one)."""
        actions, mu, log_sigma_x2 = self(batch, noise)
        valid = ~batch["action_is_pad"][..., None]
        error = (actions - batch[ACTION]).abs() * valid
        l1 = error.sum() / (valid.sum() * actions.shape[-1]).clamp(min=1)
        if mu is None:
            return l1, l1, torch.zeros(())
        kld = (-0.5 * (1 + log_sigma_x2 - mu**2 - log_sigma_x2.exp())).sum(-1).mean()
        return l1 + self.c.kl_weight * kld, l1, kld


class ReferenceStep:
    """One training step on a raw batch, as LeRobot's loop does it; calling it returns the loss as a float."""

    def __init__(self, c, inputs: dict, outputs: dict, stats: dict, device: str = "cpu", bf16: bool = False):
        self.model, self.stats, self.device, self.bf16 = ReferenceACT(c, inputs, outputs), stats, device, bf16
        self.model.to(device).train()
        rest = [p for n, p in self.model.named_parameters() if not n.startswith("backbone")]
        backbone = [p for n, p in self.model.named_parameters() if n.startswith("backbone")]
        groups = [{"params": rest}, {"params": backbone, "lr": c.optimizer_lr_backbone}]
        self.optimizer = torch.optim.AdamW(groups, lr=c.optimizer_lr, weight_decay=c.optimizer_weight_decay)

    def preprocess(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch = {key: value.to(self.device) for key, value in batch.items()}
        for key in (*self.model.inputs, ACTION):
            x = batch[key].float() / 255 if batch[key].dtype == torch.uint8 else batch[key]
            mean, std = (self.stats[key][name].to(self.device) for name in ("mean", "std"))
            batch[key] = (x - mean) / (std + 1e-8)
        return batch

    def __call__(self, batch: dict[str, Tensor]) -> float:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
            loss, l1, kld = self.model.loss(self.preprocess(batch))
            values = [x.item() for x in (loss, l1, kld)]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 10.0).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return values[0]
