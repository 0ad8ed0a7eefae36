"""LoRA adapters for any policy, in PEFT's file format, without PEFT. Needs torch alone.

    cfg = apply_lora(policy, PeftConfig(method_type="LORA"))   # before compile, sharding and the optimizer
    tensors = adapter_state_dict(policy)                       # adapter_model.safetensors, PEFT's key names
    settings = adapter_config(cfg, base_path)                  # adapter_config.json
    weights = merge_state_dict(base, tensors, cfg.scaling)     # plain weights again: W + (alpha / r) B A

`python ckpt.py convert` merges the files of an adapter's checkpoint.

What can be adapted: every nn.Linear, and attention with packed projections (a module that owns
`in_proj_weight` and a Linear `out_proj`: torch's nn.MultiheadAttention and the like). There one adapter
serves query, key and value, as in PEFT, but out_proj stays as it is: peft up to 0.21 adds its adapter twice
(pull request huggingface/peft#3774), so the file holds zeros for it. The base keeps its parameters, their
names and its class names, so weights, wrap units and compiled regions are found as before. It is frozen; only
adapters and `full_training_modules` train.

There is no lora_dropout: its masks would come from a global generator, and a run would depend on its layout.

Shapes: I inputs, O outputs, r rank; A (r, I), B (O, r).
"""

import json
import math
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

PEFT_DEFAULT_ALPHA = 8
PEFT_PREFIX = "base_model.model."
PEFT_OUT_PROJ = "base_layer.out_proj"  # PEFT wraps an attention, and the wrapped one is its base_layer
_trained_in_full: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that `apply_lora` left to train

# What PEFT 0.21 writes beside the keys that `adapter_config` fills, with its defaults.
PEFT_DEFAULTS: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "bias": "none", "corda_config": None, "ensure_weight_tying": False, "eva_config": None,
    "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True, "init_lora_weights": True,
    "layer_replication": None, "layers_pattern": None, "layers_to_transform": None, "loftq_config": {},
    "lora_bias": False, "lora_dropout": 0.0, "megatron_config": None, "megatron_core": "megatron.core",
    "qalora_group_size": 16, "rank_pattern": {}, "revision": None, "target_parameters": None,
    "task_type": None, "trainable_token_indices": None, "use_dora": False, "use_qalora": False,
    "use_rslora": False,
}  # fmt: skip

# A true value under one of these changes which weights are adapted, or the formula: such a file is refused.
UNSUPPORTED = (
    "alora_invocation_tokens", "alpha_pattern", "arrow_config", "exclude_modules", "fan_in_fan_out",
    "kasa_config", "layer_replication", "layers_to_transform", "lora_bias", "rank_pattern",
    "target_parameters",
    "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora", "use_rslora", "velora_config",
)  # fmt: skip
# Those of them that change what the adapter adds to a weight.
UNMERGEABLE = ("alpha_pattern", "fan_in_fan_out", "lora_bias", "rank_pattern", "use_dora")
PACKED_PARTS = ("q_proj", "k_proj", "v_proj", "in_proj", "in_proj_weight")


class UserError(ValueError):
    """The user's to mend, in one sentence: flag or file, rule, way out. Any other error is a bug."""


@dataclass(frozen=True)
class PeftConfig:
    method_type: str | None = None
    """LORA trains small adapters on frozen weights (those of --policy.path). None trains everything."""
    r: int = 16
    """Rank of the adapters. Higher comes closer to full fine-tuning and takes more memory."""
    lora_alpha: int | None = None
    """Adapters are scaled by alpha / r. None is PEFT's 8, whatever the rank; r or 2 r are common."""
    target_modules: tuple[str, ...] | None = None
    """What gets adapters: names or dotted endings of names (linear1 self_attn), or one regular expression
    that covers the whole name. None or all-linear: every linear layer outside attention; name self_attn and
    multihead_attn to adapt attention too."""
    full_training_modules: tuple[str, ...] | None = None
    """Modules, by name or dotted ending, trained in full and stored with the adapter: action_head for a new
    robot, say."""

    def __post_init__(self) -> None:
        for name in ("target_modules", "full_training_modules"):
            object.__setattr__(self, name, _names(getattr(self, name)))

    @property
    def enabled(self) -> bool:
        return self.method_type is not None

    @property
    def scaling(self) -> float:
        return (PEFT_DEFAULT_ALPHA if self.lora_alpha is None else self.lora_alpha) / self.r


def check(cfg: PeftConfig) -> None:
    """Raise a UserError for flags that no adapter can have."""
    if cfg.method_type is not None and cfg.method_type.upper() != "LORA":
        raise UserError(f"--peft.method-type={cfg.method_type} is not supported; use LORA, or leave it out.")
    if cfg.r < 1:
        raise UserError(f"--peft.r={cfg.r} is not a rank; use 1 or more.")
    if cfg.target_modules and _is_regex(cfg.target_modules):
        try:
            re.compile(cfg.target_modules[0])
        except re.error as error:
            raise UserError(
                f"--peft.target-modules={cfg.target_modules[0]} is no regular expression: {error}."
            ) from None
    if cfg.lora_alpha is not None and cfg.lora_alpha <= 0:
        raise UserError(f"--peft.lora-alpha={cfg.lora_alpha} must be positive; leave it out for PEFT's 8.")


def _names(value: Any) -> tuple[str, ...] | None:
    """Names as a tuple: from words, a saved list, or one word of JSON as on lerobot-train's command line."""
    if value is not None and len(value) == 1 and re.match(r"\[\s*[\"\]]", value[0]):
        try:
            value = json.loads(value[0])
        except json.JSONDecodeError as error:
            raise UserError(f"--peft: {value[0]} is no list in JSON: {error}.") from None
    return None if value is None else tuple(value)


def apply_lora(policy: nn.Module, cfg: PeftConfig) -> PeftConfig:
    """Freeze the policy and add adapters to it in place; its outputs stay the same while B is zero.

    Call it on every rank with torch's generator in one state, before compile, sharding and the optimizer.

    Returns:
        `cfg` with targets and fully trained modules resolved: what `adapter_config` stores.
    Raises:
        UserError: an entry of the targets fits no module, or one that cannot be adapted.
    """
    check(cfg)
    full = _full_training_modules(policy, cfg.full_training_modules or ())
    targets = _targets(policy, cfg.target_modules, full)
    policy.requires_grad_(False)
    for path in full:
        policy.get_submodule(path).requires_grad_(True)
        _trained_in_full.add(policy.get_submodule(path))
    for path in targets:
        module = policy.get_submodule(path)
        _extend(module, _LoraAttention if _is_packed_attention(module) else _LoraLinear, cfg)
    stored = cfg.target_modules
    if stored is None or stored == ("all-linear",):
        stored = _endings(policy, targets)
    return replace(cfg, method_type="LORA", target_modules=stored, full_training_modules=tuple(full))


class _Lora(nn.Module):
    """A module with an adapter. Each form below is put in front of the module's own class, so that any
    attention keeps its forward. `lora_A` and `lora_B` are Linear modules for the sake of PEFT's key names."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_scaling: float
    adapted: str  # the parameter that the adapter adds to

    def base_weight(self) -> Tensor:
        weight = self._parameters[self.adapted]
        assert weight is not None
        return weight


class _LoraLinear(_Lora):
    """y = W x + b + (alpha / r) B A x, taken through the rank: no gradient of W's size is ever made."""

    adapted = "weight"

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * self.lora_scaling).to(y.dtype)


class _LoraAttention(_Lora):
    """Attention that reads `in_proj_weight` (3 D, D) gets W + (alpha / r) B A, as in PEFT.

    Where W is stored in bf16 the sum is rounded to bf16 and small updates are lost: keep it in float32 there.
    """

    adapted = "in_proj_weight"

    @property
    def in_proj_weight(self) -> Tensor:
        weight = self.base_weight()
        if isinstance(weight, DTensor):  # a shard, outside forward: FSDP itself reads it under this name
            return weight
        return (weight + self.lora_B.weight @ self.lora_A.weight * self.lora_scaling).to(weight.dtype)


def _extend(module: nn.Module, form: type[_Lora], cfg: PeftConfig) -> None:
    """Add A and B, and put `form` in front of the module's class, under its name: wrap units go by it."""
    weight = module._parameters[form.adapted]
    assert weight is not None
    outputs, inputs = weight.shape
    # Adapters of half-precision weights are kept in float32, as PEFT does: Adam's small steps vanish below.
    dtype = weight.dtype if weight.dtype in (torch.float32, torch.float64) else torch.float32
    base_class = type(module)
    module.__class__ = type(base_class.__name__, (form, base_class), {})
    assert isinstance(module, _Lora)
    # nn.Linear's own initialisation is PEFT's for A: kaiming_uniform_(a=sqrt(5)).
    module.lora_A = nn.Linear(inputs, cfg.r, bias=False, device=weight.device, dtype=dtype)
    module.lora_B = nn.Linear(cfg.r, outputs, bias=False, device=weight.device, dtype=dtype)
    nn.init.zeros_(module.lora_B.weight)
    module.lora_scaling = cfg.scaling


def _is_packed_attention(module: nn.Module) -> bool:
    return "in_proj_weight" in module._parameters and isinstance(getattr(module, "out_proj", None), nn.Linear)


def _targetable(policy: nn.Module) -> tuple[list[str], list[str], list[str]]:
    """Paths of the Linear modules outside attention, of the packed attentions, and of their out_proj."""
    modules = dict(policy.named_modules())
    attentions = [path for path, module in modules.items() if _is_packed_attention(module)]
    inside = [f"{path}.out_proj" for path in attentions]
    linears = [
        path for path, module in modules.items() if isinstance(module, nn.Linear) and path not in inside
    ]
    return linears, attentions, inside


def _fits(path: str, ending: str) -> bool:
    return path == ending or path.endswith(f".{ending}")


def _full_training_modules(policy: nn.Module, endings: tuple[str, ...]) -> list[str]:
    matches: list[str] = []
    for ending in endings:
        paths = [path for path, module in policy.named_modules() if _fits(path, ending)]
        if not any(list(policy.get_submodule(path).parameters()) for path in paths):
            raise UserError(
                f"--peft.full-training-modules: no module with parameters is called {ending!r}; "
                f"there are {_list(name for name, _ in policy.named_children())} and modules inside them."
            )
        matches += [path for path in paths if path not in matches]
    return [path for path in matches if not any(path.startswith(f"{outer}.") for outer in matches)]


def _targets(policy: nn.Module, asked: tuple[str, ...] | None, full: list[str]) -> list[str]:
    linears, attentions, inside = _targetable(policy)
    what_can_be = f"what can be adapted: {_list(_endings(policy, linears + attentions))}"
    if asked is None or asked == ("all-linear",):
        paths = linears
    else:
        paths, regex = [], _is_regex(asked)
        names = [path for path, _ in policy.named_modules() if path]
        for entry in asked:
            fitting = [path for path in names if (re.fullmatch(entry, path) if regex else _fits(path, entry))]
            odd = [path for path in fitting if path not in linears + attentions]
            if odd and odd[0] in inside:
                owner = odd[0].split(".")[-2]
                raise UserError(
                    f"--peft.target-modules: {entry!r} selects {odd[0]}, part of a packed attention, which "
                    f"PEFT would train to no effect; name {owner} for query, key and value; {what_can_be}."
                )
            if odd or not fitting:
                kind = f"is a {type(policy.get_submodule(odd[0])).__name__}" if odd else "fits no module"
                packed = " (query, key and value share one weight)" if entry.endswith(PACKED_PARTS) else ""
                raise UserError(f"--peft.target-modules: {entry!r} {kind}{packed}; {what_can_be}.")
            paths += [path for path in fitting if path not in paths]
    paths = [p for p in paths if not any(p == f or p.startswith(f"{f}.") for f in full)]
    if not paths:
        raise UserError(
            "--peft.target-modules: nothing is left without the --peft.full-training-modules; name others."
        )
    return paths


def _is_regex(asked: tuple[str, ...]) -> bool:
    """One entry with a character that no module name has is a regular expression."""
    return len(asked) == 1 and not re.fullmatch(r"[\w.]+", asked[0])


def _endings(policy: nn.Module, paths: list[str]) -> tuple[str, ...]:
    """A short list that selects exactly `paths`: last parts of names, or whole ones where ambiguous."""
    names = [path for path, _ in policy.named_modules() if path]
    endings = []
    for last in sorted({path.rsplit(".", 1)[-1] for path in paths}):
        mine = [path for path in paths if _fits(path, last)]
        endings += [last] if mine == [n for n in names if _fits(n, last)] else mine
    return tuple(endings)


def _list(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def adapter_state_dict(policy: nn.Module) -> dict[str, Tensor]:
    """Adapters and fully trained modules of a plain, DDP or FSDP2 policy under PEFT's key names.

    The tensors are the policy's own, shards included: DCP can save them, and load into them in place.
    """
    policy = policy.module if isinstance(policy, DistributedDataParallel) else policy
    mine: tuple[str, ...] = ()
    unused: dict[str, Tensor] = {}
    for path, module in policy.named_modules():
        if isinstance(module, _Lora):
            mine += (f"{path}.lora_A.", f"{path}.lora_B.")
        if isinstance(module, _LoraAttention):
            a, out_proj = module.lora_A, f"{PEFT_PREFIX}{path}.{PEFT_OUT_PROJ}"
            zeros = torch.zeros(a.out_features, a.in_features, dtype=a.weight.dtype, device=a.weight.device)
            unused |= {f"{out_proj}.lora_A.weight": zeros, f"{out_proj}.lora_B.weight": zeros.mT.contiguous()}
        if module in _trained_in_full:
            mine += (f"{path}.",)
    used = {PEFT_PREFIX + key: value for key, value in policy.state_dict().items() if key.startswith(mine)}
    return used | unused


def adapter_config(cfg: PeftConfig, base_path: str | os.PathLike | None) -> dict:
    """Content of adapter_config.json for what `apply_lora` returned, on top of the weights at `base_path`."""
    targets = cfg.target_modules
    assert targets is not None, "adapter_config needs the resolved config that apply_lora returns"
    return dict(
        sorted(
            {
                **PEFT_DEFAULTS,
                "base_model_name_or_path": None if base_path is None else str(base_path),
                "lora_alpha": PEFT_DEFAULT_ALPHA if cfg.lora_alpha is None else cfg.lora_alpha,
                "modules_to_save": list(cfg.full_training_modules or ()) or None,
                "peft_type": "LORA",
                "r": cfg.r,
                "target_modules": targets[0] if _is_regex(targets) else list(targets),
            }.items()
        )
    )


def read_adapter_config(checkpoint_dir: str | os.PathLike) -> tuple[PeftConfig, str | None]:
    """Settings and base path of the adapter, ours or PEFT's, whose adapter_config.json is in this folder."""
    path = Path(checkpoint_dir) / "adapter_config.json"
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
    _refuse_other_kinds(settings, path, UNSUPPORTED)
    targets = settings.get("target_modules")
    if not isinstance(targets, str | list):
        raise UserError(f"{path} cannot be used: it has no target_modules.")
    cfg = PeftConfig(
        method_type="LORA",
        r=settings["r"],
        lora_alpha=settings["lora_alpha"],
        target_modules=(targets,) if isinstance(targets, str) else tuple(sorted(targets)),
        full_training_modules=tuple(settings.get("modules_to_save") or ()) or None,
    )
    return cfg, settings.get("base_model_name_or_path")


def merge_settings(settings: Mapping[str, Any], path: Path) -> tuple[float, str | None]:
    """The scale alpha / r, or that of rsLoRA, and the base path in the content of an adapter_config.json."""
    _refuse_other_kinds(settings, path, UNMERGEABLE)
    r = settings["r"]
    scaling = settings["lora_alpha"] / (math.sqrt(r) if settings.get("use_rslora") else r)
    return scaling, settings.get("base_model_name_or_path")


def _refuse_other_kinds(settings: Any, path: Path, special: Iterable[str]) -> None:
    if not isinstance(settings, Mapping) or settings.get("peft_type") != "LORA":
        kind = settings.get("peft_type") if isinstance(settings, Mapping) else None
        raise UserError(f"{path}: peft_type {kind!r} is not supported; only LORA is.")
    for key in ("r", "lora_alpha"):
        if not isinstance(settings.get(key), int | float):
            raise UserError(f"{path} cannot be used: it has no {key}.")
    used = [key for key in special if settings.get(key)]
    if used or settings.get("bias", "none") != "none":
        names = _list(used) or "bias"
        raise UserError(f"{path}: {names} is not supported; merge this adapter with PEFT instead.")


def _refuse_out_proj(adapter: dict[str, Tensor]) -> None:
    for key, tensor in adapter.items():
        if key.endswith(f".{PEFT_OUT_PROJ}.lora_B.weight") and tensor.any():
            raise UserError(
                f"The adapter's tensor {key} is not zero, and versions of peft differ in what it means "
                "(huggingface/peft#3774); merge this adapter with the peft that trained it."
            )


def merged_weight(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scaling: float) -> Tensor:
    """W + (alpha / r) B A, summed in float64 and given in W's precision."""
    return (weight.double() + lora_b.double() @ lora_a.double() * scaling).to(weight.dtype)


def merge_state_dict(
    base: dict[str, Tensor], adapter: dict[str, Tensor], scaling: float
) -> dict[str, Tensor]:
    """The base's weights with an adapter file's tensors worked in; same keys as the base.

    Raises:
        UserError: the adapter holds a tensor for a module that the base lacks, or one of another shape.
    """
    _refuse_out_proj(adapter)
    merged = dict(base)
    for peft_key, tensor in adapter.items():
        if f".{PEFT_OUT_PROJ}.lora_" in peft_key or peft_key.endswith(".lora_A.weight"):
            continue
        key = peft_key.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
        module, is_adapter, _ = key.rpartition(".lora_")
        target, shape, lora_a = key, tuple(tensor.shape), None
        if is_adapter:
            target = f"{module}.in_proj_weight" if f"{module}.in_proj_weight" in base else f"{module}.weight"
            lora_a = adapter.get(peft_key.replace(".lora_B.", ".lora_A."))
            if not key.endswith(".lora_B.weight") or lora_a is None or lora_a.shape[:1] != tensor.shape[1:]:
                raise UserError(f"The adapter's tensor {peft_key} is of a kind that cannot be merged here.")
            shape = (tensor.shape[0], lora_a.shape[1])
        if target not in base or tuple(base[target].shape) != shape:
            has = f"is {tuple(base[target].shape)} in" if target in base else "is not in"
            raise UserError(
                f"{peft_key} of the adapter is for a {shape} weight; {target} {has} the base; "
                "give the base that it was trained on."
            )
        if lora_a is None:
            merged[target] = tensor.to(base[target].dtype)
        else:
            merged[target] = merged_weight(base[target], lora_a, tensor, scaling)
    return merged
