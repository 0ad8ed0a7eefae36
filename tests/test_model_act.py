"""ACT against values recorded from LeRobot, against a plain ACT of public modules, and path against path."""

import copy
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
import torchvision
from conftest import DATA, shared
from safetensors.torch import load_file
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import model_act
from bench import ReferenceStep
from extras.check_policy import check_config
from extras.lerobot_ckpt import config_dict, policy_of
from extras.plain_act import PlainACT
from extras.pretrained import load_backbone
from model_act import (
    ACT,
    ACTConfig,
    ACTPolicy,
    ACTTemporalEnsembler,
    Dropout,
    UserError,
    noise_words,
    normal_noise,
)

STATE, ENV, TOP, WRIST = (
    f"observation.{k}" for k in ("state", "environment_state", "images.top", "images.wrist")
)
VARIANTS = ("base", "pre_norm", "no_vae", "two_cam", "env_state")
IMAGENET = {
    "mean": torch.tensor([0.485, 0.456, 0.406])[:, None, None],
    "std": torch.tensor([0.229, 0.224, 0.225])[:, None, None],
}


# The head of the file


def test_the_lines_of_the_docstring_train_in_an_empty_folder(tmp_path):
    indented = re.findall(r"(?m)^(?:    .*\n|\n)+", model_act.__doc__ + "\n")
    (program,) = [block for block in indented if "import torch" in block]
    lines = [line for line in program.splitlines() if line.strip()]
    assert len(lines) <= 16
    shutil.copy(model_act.__file__, tmp_path)
    (tmp_path / "use.py").write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, env=alone()
    )
    assert done.returncode == 0, done.stderr
    *losses, shape = done.stdout.splitlines()
    assert len(losses) == 5 and all(math.isfinite(float(line.split()[1])) for line in losses)
    assert shape == "torch.Size([4, 14])"


def alone() -> dict[str, str]:
    """This environment without the project on its path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_figure_names_every_part_of_the_network():
    inputs, outputs = features(STATE, ENV, TOP)
    network = ACT(tiny(), inputs, outputs, stats_of(inputs, outputs))
    parts = {name for name, _ in network.named_children()} | {"vae_encoder_pos_enc", "camera_positions"}
    words = set(re.findall(r"\w+", model_act.__doc__))
    assert not parts - words
    own = {word for word in words if word.startswith(("vae_", "encoder_", "decoder_"))}
    assert not own - parts  # and no part that is gone


def numerics(*parts: str):
    own = DATA.joinpath("numerics", *parts)
    return own if own.exists() else shared("reference", "numerics", *parts)


def tiny(**changes) -> ACTConfig:
    sizes = {
        "dim_model": 32,
        "n_heads": 4,
        "dim_feedforward": 48,
        "latent_dim": 8,
        "chunk_size": 10,
        "n_action_steps": 10,
    }
    layers = {"n_encoder_layers": 2, "n_decoder_layers": 1, "n_vae_encoder_layers": 2}
    return ACTConfig(**{"pretrained_backbone_weights": None, **sizes, **layers, **changes})


def features(*keys: str, **sizes: tuple[int, ...]) -> tuple[dict, dict]:
    shapes = {STATE: (6,), ENV: (5,), TOP: (3, 32, 64), WRIST: (3, 32, 64)}
    kinds = {STATE: "STATE", ENV: "ENV"}
    shape_of = {k: sizes.get(k.rsplit(".")[-1], shapes[k]) for k in keys}
    inputs = {k: {"type": kinds.get(k, "VISUAL"), "shape": list(shape_of[k])} for k in keys}
    return inputs, {"action": {"type": "ACTION", "shape": [6]}}


def stats_of(inputs: dict, outputs: dict) -> dict:
    torch.manual_seed(5)
    stats = {}
    for key, f in {**inputs, **outputs}.items():
        n = f["shape"][0]
        lines = {name: torch.randn(n) for name in ("mean", "min", "q01", "q10")}
        lines |= {
            "std": torch.rand(n) + 0.5,
            "max": lines["min"] + 2,
            "q99": lines["q01"] + 3,
            "q90": lines["q10"] + 1,
        }
        stats[key] = {k: v[:, None, None] if f["type"] == "VISUAL" else v for k, v in lines.items()}
    return stats


def a_batch(policy: ACTPolicy, size: int = 4, seed: int = 0, images: torch.dtype = torch.uint8) -> dict:
    gen = torch.Generator().manual_seed(seed)
    batch = {}
    for key, f in policy.input_features.items():
        shape = (size, *f["shape"])
        if f["type"] == "VISUAL" and images == torch.uint8:
            batch[key] = torch.randint(0, 256, shape, generator=gen, dtype=torch.uint8)
        else:
            batch[key] = torch.randn(shape, generator=gen)
    steps, dim = policy.config.chunk_size, policy.output_features["action"]["shape"][0]
    batch["action"] = torch.randn(size, steps, dim, generator=gen)
    valid = torch.arange(size)[:, None] * 3 + 2
    batch["action_is_pad"] = torch.arange(steps) >= valid
    batch["noise_seed"] = torch.randint(2**62, (size,), generator=gen)
    return batch


def randomise(module: torch.nn.Module) -> None:
    """Biases, norms and frozen statistics away from 0 and 1, so that each shows in the output."""
    gen = torch.Generator().manual_seed(3)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name.endswith("running_var"):
            tensor.data.copy_(torch.rand(tensor.shape, generator=gen) + 0.5)
        elif tensor.dim() == 1:
            tensor.data.add_(0.1 * torch.randn(tensor.shape, generator=gen))


def gradients(policy: torch.nn.Module, batch: dict) -> tuple[torch.Tensor, dict]:
    policy.zero_grad()
    loss, _ = policy(batch)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None}


def assert_close(got: dict, wanted: dict, tolerance: float) -> None:
    """Relative to each tensor's norm, with the smallest norms counted as 1e-3 of the largest."""
    assert got.keys() == wanted.keys()
    floor = 1e-3 * max(v.norm().item() for v in wanted.values())
    errors = {k: (got[k] - v).norm().item() / max(v.norm().item(), floor) for k, v in wanted.items()}
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] <= tolerance, (worst, errors[worst])


# LeRobot's recorded values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_losses_gradients_and_three_steps_equal_lerobot(variant, dtype, monkeypatch):
    where = [variant] if (DATA / "numerics" / variant).exists() else None
    path = (
        (lambda *p: numerics(variant, *p))
        if where
        else (lambda *p: shared("reference", "numerics", variant, *p))
    )
    config = json.loads(path("config.json").read_text())
    policy = policy_of(config).to(dtype)
    assert json.dumps(config_dict(policy, config["device"])) == json.dumps(config)  # values and order
    if variant in ("base", "env_state"):
        weights = load_file(path("model.safetensors"))
    else:
        base = load_file(shared("reference", "numerics", "base", "model.safetensors"))
        weights = load_file(path("model_without_backbone.safetensors"))
        weights |= {k: v for k, v in base.items() if k.startswith("model.backbone.")}
    policy.load_state_dict(weights)  # strict: LeRobot's keys and shapes, no more, no less
    suffix = "_f64" if dtype == torch.float64 else ""
    # The losses and norms of the reference were read back from float32, or float64, tensors.
    near = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    expected, notes = load_file(path("expected.safetensors")), json.loads(path("expected.json").read_text())
    batch = load_file(path("inputs.safetensors"))
    noise = batch.pop("vae_noise", None)

    policy.eval()
    torch.testing.assert_close(policy.predict_action_chunk(batch), expected["eval_actions" + suffix], **near)
    policy.train()
    lr_backbone = 1e-4 if variant == "pre_norm" else 1e-3
    optimizer = torch.optim.AdamW(policy.optim_groups(1e-3, lr_backbone, 1e-4))
    for step in range(3):
        monkeypatch.setattr(model_act, "normal_noise", lambda seed, count, step=step: noise[step])
        loss, parts = policy(batch)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            for name, p in policy.named_parameters():
                if not notes["params"][name]["grad_is_rounding_noise"]:
                    wanted = notes["params"][name]["grad_norm" + suffix]
                    assert p.grad.double().norm().item() == pytest.approx(
                        wanted, rel=near["rtol"], abs=1e-8
                    ), name
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        got = {"loss": loss, "l1_loss": parts["l1_loss"], "grad_norm": norm}
        if policy.config.use_vae:
            got["kld_loss"] = parts["kld_loss"]
        for key, value in got.items():
            assert value.item() == pytest.approx(expected[key + suffix][step].item(), rel=near["rtol"]), (
                key,
                step,
            )
        optimizer.step()
    if dtype == torch.float64:  # in float32 Adam steps on the reference's own rounding noise
        policy.eval()
        actions = policy.predict_action_chunk(batch)
        torch.testing.assert_close(actions, expected["eval_actions_after3_f64"], **near)
        state = policy.state_dict()
        for name, wanted in load_file(path("params_after3_f64.safetensors")).items():
            torch.testing.assert_close(state[name], wanted, rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize("coeff", [0.01, 0.0, -0.05])
def test_temporal_ensembler_equals_lerobot(coeff):
    recorded = load_file(numerics("temporal_ensembler.safetensors"))
    ensembler = ACTTemporalEnsembler(coeff, recorded["chunks"].shape[2])
    actions = torch.stack([ensembler.update(chunk) for chunk in recorded["chunks"]])
    torch.testing.assert_close(actions, recorded[f"actions_coeff_{coeff}"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"n_action_steps": 5}, "queue_n5_actions"),
        ({"n_action_steps": 1, "temporal_ensemble_coeff": 0.01}, "ensemble_001_actions"),
    ],
)
def test_select_action_equals_lerobot(changes, key):
    folder = shared("reference", "numerics", "base")
    config = json.loads((folder / "config.json").read_text()) | changes
    policy = policy_of(config)
    policy.load_state_dict(load_file(folder / "model.safetensors"))
    rows = load_file(folder / "inputs.safetensors")
    for _ in range(2):  # the second time from a reset
        policy.reset()
        calls = [policy.select_action({k: rows[k][i % 4, None] for k in (STATE, TOP)}) for i in range(12)]
        wanted = load_file(folder / "select_action.safetensors")[key]
        torch.testing.assert_close(torch.cat(calls), wanted, rtol=1e-5, atol=1e-6)


def test_preprocessing_equals_lerobot():
    recorded = load_file(shared("reference", "numerics", "preprocess_aloha_img_v3.safetensors"))
    raw = json.loads((DATA / "aloha_img_v3" / "meta" / "stats.json").read_text())
    stats = {
        k: {n: torch.tensor(v) for n, v in s.items()} for k, s in raw.items() if k in (STATE, TOP, "action")
    }
    inputs = {STATE: {"type": "STATE", "shape": [14]}, TOP: {"type": "VISUAL", "shape": [3, 120, 160]}}
    outputs = {"action": {"type": "ACTION", "shape": [14]}}
    config = tiny(chunk_size=20)
    near = {"rtol": 1e-5, "atol": 2e-6}  # images reach 2.6, so 1e-6 of that
    image = recorded["raw.image_as_returned"]
    for name in ("dataset", "imagenet"):
        stats[TOP] |= IMAGENET if name == "imagenet" else {}
        model = ACTPolicy(config, inputs, outputs, stats).model
        for form in (image, (image * 255).round().to(torch.uint8)):
            torch.testing.assert_close(
                model.scaled_image(TOP, form, torch.float32).contiguous(), recorded[f"{name}.image"], **near
            )
        for key, own in ((STATE, "state"), ("action", "action")):
            torch.testing.assert_close(model.normalize(key, recorded[f"raw.{own}"]), recorded[own], **near)
        back = model.unnormalize("action", recorded["action"])
        torch.testing.assert_close(back, recorded["unnormalized_action"], **near)


def test_parameter_groups_follow_lerobots_optimizer_file():
    folder = DATA / "ckpts" / "env_single_safetensors" / "000010"
    policy = policy_of(json.loads((folder / "pretrained_model" / "config.json").read_text()))
    groups = policy.optim_groups(1.0, 2.0, 0.5)
    state = load_file(folder / "training_state" / "optimizer_state.safetensors")
    saved = [tuple(state[f"state/{i}/exp_avg"].shape) for i in range(len(state) // 3)]
    assert [tuple(p.shape) for p in groups[0]["params"]] == saved
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in groups] == [
        (1.0, 0.5, len(saved)),
        (2.0, 0.5, 0),
    ]
    with_camera = ACTPolicy(tiny(), *features(STATE, TOP)).optim_groups(1.0, 2.0, 0.5)
    assert [len(g["params"]) for g in with_camera] == [len(with_camera[0]["params"]), 20]


# A plain ACT of public modules

NAIVE = {
    "one camera": ({}, (STATE, TOP), {}),
    "pre-norm, gelu": ({"pre_norm": True, "feedforward_activation": "gelu"}, (STATE, TOP), {}),
    "no VAE, state and env": ({"use_vae": False}, (STATE, ENV, TOP), {}),
    "cameras of one size, no state": ({}, (WRIST, TOP), {}),
    "cameras of two sizes": ({"n_decoder_layers": 3}, (WRIST, STATE, TOP), {"wrist": (3, 64, 32)}),
    "env without state": ({"pre_norm": True, "n_decoder_layers": 2}, (ENV,), {}),
    "dilated resnet50": (
        {"vision_backbone": "resnet50", "replace_final_stride_with_dilation": True, "n_encoder_layers": 1},
        (STATE, TOP),
        {},
    ),
    "resnet34, odd size": ({"vision_backbone": "resnet34"}, (STATE, TOP), {"top": (3, 37, 50)}),
}


@pytest.mark.parametrize("name", NAIVE)
def test_a_plain_act_has_the_same_outputs_losses_and_gradients(name, monkeypatch):
    changes, keys, sizes = NAIVE[name]
    inputs, outputs = features(*keys, **sizes)
    torch.manual_seed(0)
    policy = ACTPolicy(tiny(dropout=0.0, **changes), inputs, outputs)
    randomise(policy)
    plain = PlainACT(policy.config, inputs, outputs)
    plain.load_state_dict(policy.model.state_dict())
    policy.double()
    plain.double()
    batch = a_batch(policy, 3, images=torch.float32)
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    noise = torch.randn(3, policy.config.latent_dim, dtype=torch.float64)
    monkeypatch.setattr(model_act, "normal_noise", lambda seed, count: noise)
    loss, l1, kld = plain.loss(batch, noise)
    loss.backward()
    wanted = {f"model.{n}": p.grad for n, p in plain.named_parameters() if p.grad is not None}
    got_loss, got = gradients(policy, batch)
    torch.testing.assert_close(got_loss, loss.detach(), rtol=1e-10, atol=0)
    with torch.no_grad():
        _, parts = policy(batch)
    torch.testing.assert_close(parts["l1_loss"], l1.detach(), rtol=1e-10, atol=0)
    assert not policy.config.use_vae or parts["kld_loss"].item() == pytest.approx(kld.item(), rel=1e-10)
    assert_close(got, wanted, 1e-9)

    policy.eval(), plain.eval()
    torch.testing.assert_close(policy.predict_action_chunk(batch), plain(batch)[0], rtol=1e-9, atol=1e-11)
    eval_loss, parts = policy(batch)
    torch.testing.assert_close(eval_loss, plain.loss(batch)[0], rtol=1e-10, atol=0)
    valid = (~batch["action_is_pad"]).sum(1)
    torch.testing.assert_close(
        (parts["l1_per_sample"] * valid).sum() / valid.sum(), eval_loss, rtol=1e-10, atol=0
    )
    dim = policy.config.dim_model
    for key, grad in got.items():  # softmax ignores a shift of the keys: exactly zero, not rounding noise
        assert not key.endswith("in_proj_bias") or not grad[dim : 2 * dim].any()
    first = got["model.decoder.layers.0.self_attn.in_proj_weight"]
    assert not first[: 2 * dim].any() and first[2 * dim :].any() != (
        not policy.config.pre_norm and not first.any()
    )


def test_the_reference_step_trains_the_same_policy_on_raw_batches():
    inputs, outputs = features(STATE, TOP)
    config = tiny(dropout=0.0, use_vae=False, optimizer_lr=1e-3, optimizer_lr_backbone=1e-4)
    stats = stats_of(inputs, outputs)
    policy = ACTPolicy(config, inputs, outputs, stats)
    step = ReferenceStep(config, inputs, outputs, stats)
    step.model.load_state_dict(policy.model.state_dict())
    optimizer = torch.optim.AdamW(policy.optim_groups(1e-3, 1e-4, config.optimizer_weight_decay))
    for i in range(3):
        batch = a_batch(policy, seed=i)
        loss, _ = policy(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(step(batch), rel=1e-4)  # float32, and Adam on rounding noise


def test_the_same_seed_gives_lerobots_first_weights():
    # nn.MultiheadAttention, nn.Linear and torchvision's ResNet in the order of the names, then Xavier.
    inputs, outputs = features(STATE, TOP)
    torch.manual_seed(7)
    ours = ACTPolicy(tiny(), inputs, outputs).model.state_dict()
    torch.manual_seed(7)
    plain = PlainACT(tiny(), inputs, outputs)
    for p in [*plain.encoder.parameters(), *plain.decoder.parameters()]:
        if p.dim() > 1:
            torch.nn.init.xavier_uniform_(p)
    for key, value in plain.state_dict().items():
        assert torch.equal(ours[key], value) or key == "vae_encoder_pos_enc", key


# Noise


def test_noise_words_are_splitmix64_of_seed_and_place():
    def mix(z: int) -> int:
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            z = (z ^ (z >> shift)) * factor % 2**64
        return z

    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # splitmix64's first output from state 0
    seeds = [0, 1, 2**62 + 12345, 987654321]
    words = noise_words(torch.tensor(seeds), 5, 7)
    wanted = [[mix(mix(mix(seed + 1)) ^ place) for place in range(5, 12)] for seed in seeds]
    assert [[word % 2**64 for word in row] for row in words.tolist()] == wanted
    long = noise_words(torch.tensor([3]), 0, 3 * model_act.NOISE_PIECE + 17)  # several pieces
    assert torch.equal(long[:, -20:], noise_words(torch.tensor([3]), long.shape[1] - 20, 20))


@pytest.mark.parametrize("p", [0.1, 0.5, 1 / 3, 0.999])
def test_dropout_keeps_the_stated_share_and_scales_by_the_true_one(p):
    seeds = torch.arange(4)
    count = 1 << 20
    drop = Dropout(p, noise_words(seeds, 0, count // 4).view(torch.int16))
    out = drop.scaled(torch.ones(4, count, dtype=torch.float64))
    kept = 1 / drop.scale
    assert abs(kept - (1 - p)) <= 2**-17
    assert set(out.unique().tolist()) == {0.0, drop.scale}
    share = (out > 0).double().mean(1)
    assert ((share - kept).abs() < 5 * math.sqrt(kept * (1 - kept) / count)).all()
    agreement = ((out[0] > 0) == (out[1] > 0)).double().mean()  # independent samples
    assert abs(agreement - kept**2 - (1 - kept) ** 2) < 5 / math.sqrt(count)
    neighbours = ((out[:, 1:] > 0) == (out[:, :-1] > 0)).double().mean()  # independent elements
    assert abs(neighbours - kept**2 - (1 - kept) ** 2) < 5 / math.sqrt(count)


def test_latent_noise_is_standard_normal():
    x = normal_noise(torch.arange(4096), 32).double()
    assert x.dtype == torch.float64 and x.shape == (4096, 32)
    n = math.sqrt(x.numel())
    assert abs(x.mean()) < 5 / n and abs(x.var() - 1) < 5 * math.sqrt(2) / n
    assert abs((x**3).mean()) < 5 * math.sqrt(15) / n and abs((x**4).mean() - 3) < 5 * math.sqrt(96) / n
    correlation = torch.corrcoef(x.T) - torch.eye(32)
    assert correlation.abs().max() < 6 / math.sqrt(4096)


@pytest.mark.parametrize("split", [[4], [3, 1], [1, 1, 1, 1], [2, 2]])
def test_any_split_of_a_batch_has_the_undivided_gradient_with_dropout_and_latent_noise_on(split):
    policy = ACTPolicy(tiny(dropout=0.3), *features(STATE, ENV)).double()
    batch = a_batch(policy, 4)
    whole_loss, whole = gradients(policy, batch)
    share = (~batch["action_is_pad"]).sum() / len(split)
    order = torch.tensor([2, 0, 3, 1])
    total, sums, start = 0.0, {}, 0
    for size in split:  # pieces of equal weight in the KL need equal sizes, so weigh them as a window does
        rows = order[start : start + size]
        start += size
        piece = {k: v[rows] for k, v in batch.items()} | {"num_valid": share.float()}
        kl_weight = len(split) * size / 4
        policy.config = policy.model.config = copy.copy(tiny(dropout=0.3, kl_weight=10.0 * kl_weight))
        loss, grads = gradients(policy, piece)
        total = total + loss / len(split)
        sums = {k: sums.get(k, 0) + g / len(split) for k, g in grads.items()}
    torch.testing.assert_close(total, whole_loss, rtol=1e-6, atol=0)  # num_valid travels in float32
    assert_close(sums, whole, 1e-6)


def test_noise_depends_on_the_seed_and_comes_from_torchs_generator_without_one():
    policy = ACTPolicy(tiny(), *features(ENV))
    batch = a_batch(policy)
    with torch.no_grad():
        first, again = policy(batch)[0], policy(batch)[0]
        other = policy(batch | {"noise_seed": batch["noise_seed"] + 1})[0]
        del batch["noise_seed"]
        drawn = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            drawn.append(policy(batch)[0])
    assert first == again and first != other
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    "changes", [{}, {"pre_norm": True, "n_decoder_layers": 2}, {"feedforward_activation": "glu"}]
)
def test_gradients_with_dropout_on_equal_finite_differences(changes):
    policy = ACTPolicy(tiny(dropout=0.2, **changes), *features(STATE, ENV)).double()
    randomise(policy)
    batch = a_batch(policy)
    _, grads = gradients(policy, batch)
    directions = {n: torch.randn_like(p) for n, p in policy.named_parameters()}
    slope = sum((grads[n] * d).sum() for n, d in directions.items())
    losses = []
    for step in (1e-6, -1e-6):
        moved = copy.deepcopy(policy)
        for n, p in moved.named_parameters():
            p.data.add_(directions[n], alpha=step)
        losses.append(moved(batch)[0].detach())
    assert ((losses[0] - losses[1]) / 2e-6).item() == pytest.approx(slope.item(), rel=1e-5)


def test_eager_shortcuts_equal_the_plain_operations_that_a_compiler_sees(monkeypatch):
    policy = ACTPolicy(tiny(dropout=0.2, n_decoder_layers=2), *features(STATE, TOP)).double()
    batch = a_batch(policy)
    loss, grads = gradients(policy, batch)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    plain_loss, plain = gradients(policy, batch)
    torch.testing.assert_close(loss, plain_loss, rtol=1e-12, atol=0)
    assert_close(grads, plain, 1e-11)


# Compilation and the host


# inductor's C++ of a ResNet takes minutes, so cameras go through the same graphs without it.
@pytest.mark.parametrize(
    ("keys", "backend", "steps"), [((STATE, ENV), "inductor", 20), ((TOP, WRIST), "aot_eager", 5)]
)
def test_compiled_equals_eager_in_one_graph_to_train_and_one_for_the_rest(keys, backend, steps):
    inputs, outputs = features(*keys, wrist=(3, 64, 32))
    config = tiny(n_encoder_layers=1, n_vae_encoder_layers=1)
    policies = [ACTPolicy(config, inputs, outputs, stats_of(inputs, outputs)).double()]
    policies.append(copy.deepcopy(policies[0]))
    torch._dynamo.reset()
    counters.clear()
    policies[1].model.compile(backend=backend)
    optimizers = [torch.optim.AdamW(p.optim_groups(1e-3, 1e-4, 1e-4)) for p in policies]
    for step in range(steps):
        batch = a_batch(policies[0], seed=step)
        losses = []
        for policy, optimizer in zip(policies, optimizers):
            loss, _ = policy(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-9), step  # float64: kinks do not blow rounding up
        if step in (1, 12):  # evaluation and prediction in between change nothing
            chunks = [p.predict_action_chunk(batch) for p in policies]
            torch.testing.assert_close(chunks[1], chunks[0], rtol=1e-8, atol=1e-9)
            for policy in policies:
                policy.eval()
            with torch.no_grad():
                torch.testing.assert_close(policies[1](batch)[0], policies[0](batch)[0], rtol=1e-9, atol=0)
            assert torch.equal(policies[1].select_action(batch), chunks[1][:, 0])
            for policy in policies:
                policy.reset()
                policy.train()
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


def test_wrap_units_compile_one_by_one_with_equal_gradients():
    policy = ACTPolicy(tiny(dropout=0.2, n_decoder_layers=2), *features(STATE, ENV)).double()
    batch = a_batch(policy)
    loss, grads = gradients(policy, batch)
    torch._dynamo.reset()
    counters.clear()
    units = [m for m in policy.modules() if type(m).__name__ in policy.wrap_modules]
    for unit in units:
        unit.compile(backend="eager", fullgraph=True)
    compiled_loss, compiled = gradients(policy, batch)
    assert len(units) == 6 and not counters["graph_break"]
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-12, atol=0)
    assert_close(compiled, grads, 1e-11)


def test_a_step_and_a_prediction_read_nothing_back_to_the_host(monkeypatch):
    inputs, outputs = features(STATE, TOP, WRIST)
    policy = ACTPolicy(tiny(), inputs, outputs, stats_of(inputs, outputs))
    batch = a_batch(policy)
    reads = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "_local_scalar_dense" in str(func) or "nonzero" in str(func):
                reads.append(str(func))
            return func(*args, **(kwargs or {}))

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
        kept = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, kept=kept, name=name: (reads.append(name), kept(self, *a))[1]
        )
    with Reads():
        loss, _ = policy(batch)
        loss.backward()
        policy.eval()
        with torch.no_grad():
            policy(batch)
        policy.select_action(batch)
    assert reads == []
    loss.item()
    assert reads == ["item"]  # the count counts


# The loss


def test_padding_that_holds_nan_changes_neither_loss_nor_gradient():
    policy = ACTPolicy(tiny(), *features(STATE, ENV)).double()
    batch = a_batch(policy)
    loss, grads = gradients(policy, batch)
    for garbage in (math.nan, math.inf, 1e6):
        action = batch["action"].masked_fill(batch["action_is_pad"][..., None], garbage)
        bad_loss, bad = gradients(policy, batch | {"action": action})
        assert torch.equal(bad_loss, loss) and all(torch.equal(bad[k], grads[k]) for k in grads)
        policy.eval()
        assert torch.isfinite(policy(batch | {"action": action})[0])
        policy.train()


def test_a_constant_error_of_one_is_a_loss_of_one_whatever_the_share_of_padding():
    policy = ACTPolicy(tiny(use_vae=False, dropout=0.0), *features(ENV))
    for p in policy.model.action_head.parameters():
        torch.nn.init.zeros_(p)
    batch = a_batch(policy, 2) | {"action": torch.ones(2, 10, 6)}
    batch["action_is_pad"] = torch.arange(10) >= torch.tensor([[10], [1]])
    assert policy(batch)[0].item() == pytest.approx(1.0)
    policy.eval()
    loss, parts = policy(batch)
    assert loss.item() == pytest.approx(1.0) and parts["l1_per_sample"].tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("num_valid", [None, 0.0])
def test_a_fully_padded_batch_has_no_l1_and_finite_gradients(num_valid):
    policy = ACTPolicy(tiny(), *features(STATE, ENV))
    batch = a_batch(policy)
    batch["action_is_pad"] = torch.ones_like(batch["action_is_pad"])
    if num_valid is not None:
        batch["num_valid"] = torch.tensor(num_valid)
    policy.train()
    _, parts = policy(batch)
    assert parts["l1_loss"] == 0 and parts["kld_loss"] > 0  # the KL counts, as in LeRobot
    _, grads = gradients(policy, batch)
    assert all(torch.isfinite(g).all() for g in grads.values())
    assert not any(g.any() for n, g in grads.items() if "vae" not in n)
    policy.eval()
    loss, parts = policy(batch)
    assert loss == 0 and not parts["l1_per_sample"].any()


def test_training_and_validation_report_the_same_l1_when_nothing_is_sampled():
    policy = ACTPolicy(tiny(use_vae=False, dropout=0.0), *features(STATE, ENV))
    batch = a_batch(policy)
    trained = policy(batch)[1]
    policy.eval()
    torch.testing.assert_close(policy(batch)[1]["l1_loss"], trained["l1_loss"])
    assert "kld_loss" not in trained


@pytest.mark.parametrize("key", ["action_is_pad", "action", STATE, TOP])
def test_a_batch_without_a_key_is_refused_by_its_name(key):
    policy = ACTPolicy(tiny(), *features(STATE, TOP))
    batch = a_batch(policy)
    del batch[key]
    with pytest.raises(ValueError, match=f"lacks '{key}'"):
        policy(batch)


def test_actions_of_another_length_than_the_chunk_are_refused():
    policy = ACTPolicy(tiny(), *features(ENV))
    with pytest.raises(ValueError, match=r"\(batch, 10, action\)"):
        policy(a_batch(policy) | {"action": torch.zeros(4, 9, 6)})


def test_every_one_of_seven_decoder_layers_gets_a_gradient():
    policy = ACTPolicy(tiny(n_decoder_layers=7), *features(STATE, ENV))
    randomise(policy)  # the first layer attends to zeros: with its first, zero biases nothing would move
    _, grads = gradients(policy, a_batch(policy))
    assert set(grads) == {n for n, _ in policy.named_parameters()}
    for layer in range(7):
        names = [n for n in grads if n.startswith(f"model.decoder.layers.{layer}.")]
        assert names and all(grads[n].any() for n in names if "in_proj_bias" not in n), layer


# Inputs


def test_cameras_of_three_shapes_train_at_batch_one():
    inputs, outputs = features(TOP, WRIST, top=(3, 48, 64), wrist=(3, 64, 48))
    inputs["observation.images.front"] = {"type": "VISUAL", "shape": [3, 72, 128]}
    policy = ACTPolicy(tiny(), inputs, outputs, stats_of(inputs, outputs))
    _, grads = gradients(policy, a_batch(policy, 1))
    assert set(grads) == {n for n, _ in policy.named_parameters()}


def test_images_of_another_size_than_the_features_say_still_pass():
    policy = ACTPolicy(tiny(), *features(TOP))
    other = torch.rand(2, 3, 64, 96)
    plain = ACTPolicy(tiny(), *features(TOP, top=(3, 64, 96)))
    plain.load_state_dict(policy.state_dict())
    assert torch.equal(policy.predict_action_chunk({TOP: other}), plain.predict_action_chunk({TOP: other}))


def test_a_single_channel_is_expanded_and_other_counts_are_refused():
    inputs, outputs = features(TOP, top=(1, 32, 32))
    policy = ACTPolicy(tiny(), inputs, outputs, stats_of(inputs, outputs))
    wide = ACTPolicy(tiny(), *features(TOP, top=(3, 32, 32)))
    wide.load_state_dict(policy.state_dict())
    image = torch.randint(0, 256, (2, 1, 32, 32), dtype=torch.uint8)
    scaled = policy.model.scaled_image(TOP, image, torch.float32)
    wanted = wide.model(wide._observation({TOP: scaled.contiguous()})).actions
    torch.testing.assert_close(policy.model({TOP: image}).actions, wanted)
    with pytest.raises(ValueError, match=r"observation.images.top has shape \[4, 32, 32\]"):
        ACTPolicy(tiny(), *features(TOP, top=(4, 32, 32)))


def test_uint8_and_float_images_are_scaled_alike_with_and_without_statistics():
    inputs, outputs = features(STATE, TOP)
    image = torch.randint(0, 256, (2, 3, 32, 64), dtype=torch.uint8)
    for stats in (None, stats_of(inputs, outputs)):
        model = ACTPolicy(tiny(), inputs, outputs, stats).model
        a, b = (model.scaled_image(TOP, x, torch.float32) for x in (image, image / 255))
        torch.testing.assert_close(a, b)
        assert stats is not None or a.max() <= 1


@pytest.mark.parametrize("mode", ["MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10", "IDENTITY"])
def test_each_normalisation_has_lerobots_formula_and_its_inverse(mode):
    inputs, outputs = features(STATE, TOP)
    stats = stats_of(inputs, outputs)
    kinds = dict.fromkeys(("VISUAL", "STATE", "ACTION"), mode)
    model = ACTPolicy(tiny(normalization_mapping=kinds), inputs, outputs, stats).model
    x = torch.randn(7, 6)
    for key in (STATE, "action"):
        s = stats[key]
        ends = {"MIN_MAX": ("min", "max"), "QUANTILES": ("q01", "q99"), "QUANTILE10": ("q10", "q90")}.get(
            mode
        )
        if mode == "MEAN_STD":
            wanted = (x - s["mean"]) / (s["std"] + 1e-8)
        elif ends is None:
            wanted = x
        else:
            wanted = 2 * (x - s[ends[0]]) / (s[ends[1]] - s[ends[0]]) - 1
        torch.testing.assert_close(model.normalize(key, x), wanted)
        torch.testing.assert_close(model.unnormalize(key, model.normalize(key, x)), x)


def test_a_joint_that_never_moves_normalises_to_finite_values():
    inputs, outputs = features(ENV, STATE)
    stats = stats_of(inputs, outputs)
    for key, s in stats.items():
        stats[key] = s | {"std": torch.zeros_like(s["std"]), "max": s["min"]}
    for mode, still, normal in (("MEAN_STD", "mean", 0.0), ("MIN_MAX", "min", -1.0)):
        model = ACTPolicy(
            tiny(normalization_mapping={"STATE": mode, "ACTION": mode}), inputs, outputs, stats
        ).model
        value = stats["action"][still]
        assert (model.normalize("action", value) == normal).all()
        torch.testing.assert_close(model.unnormalize("action", torch.full((6,), normal)), value)


def test_a_missing_or_misshapen_statistic_is_refused_by_its_name():
    inputs, outputs = features(STATE, TOP)
    stats = stats_of(inputs, outputs)
    with pytest.raises(ValueError, match=r"lack observation.images.top.mean, which MEAN_STD"):
        ACTPolicy(tiny(), inputs, outputs, {k: s for k, s in stats.items() if k != TOP})
    renamed = {k: {("avg" if n == "mean" else n): v for n, v in s.items()} for k, s in stats.items()}
    with pytest.raises(ValueError, match=r"lack observation.state.mean.*observation.state.avg"):
        ACTPolicy(tiny(), inputs, outputs, renamed)
    short = stats | {"action": {k: v[:5] for k, v in stats["action"].items()}}
    with pytest.raises(ValueError, match=r"action.mean has 5 values, its feature 6"):
        ACTPolicy(tiny(), inputs, outputs, short)
    odd = {"observation.images.cam_1.left-2": inputs[TOP], "observation.images.cam.1_left": inputs[TOP]}
    policy = ACTPolicy(tiny(), odd, outputs, {k: stats.get(k, stats[TOP]) for k in [*odd, "action"]})
    assert len(policy.model.normalizers) == 3  # names with _, . and digits do not collide


def test_statistics_stay_out_of_the_state_dict_and_follow_the_device_and_type():
    inputs, outputs = features(STATE, TOP)
    with_stats = ACTPolicy(tiny(), inputs, outputs, stats_of(inputs, outputs))
    assert set(with_stats.state_dict()) == set(ACTPolicy(tiny(), inputs, outputs).state_dict())
    assert all(b.dtype == torch.float64 for b in with_stats.double().buffers())
    assert all(p.is_contiguous() for p in with_stats.parameters())


def test_predictions_are_in_the_datas_units_and_alike_in_train_and_eval_mode():
    inputs, outputs = features(STATE, ENV)
    stats = stats_of(inputs, outputs)
    policy = ACTPolicy(tiny(), inputs, outputs, stats)
    plain = ACTPolicy(tiny(), inputs, outputs)
    plain.load_state_dict(policy.state_dict())
    batch = a_batch(policy)
    normal = batch | {STATE: (batch[STATE] - stats[STATE]["mean"]) / (stats[STATE]["std"] + 1e-8)}
    actions = policy.train().predict_action_chunk(batch)
    assert policy.training
    assert torch.equal(actions, policy.eval().predict_action_chunk(batch))
    wanted = plain.predict_action_chunk(normal) * stats["action"]["std"] + stats["action"]["mean"]
    torch.testing.assert_close(actions, wanted)


def test_bfloat16_autocast_computes_in_bfloat16_and_reports_float32():
    inputs, outputs = features(STATE, TOP)
    policy = ACTPolicy(tiny(), inputs, outputs, stats_of(inputs, outputs))
    batch = a_batch(policy)
    seen = []
    policy.model.encoder.layers[0].linear1.register_forward_hook(lambda m, i, out: seen.append(out.dtype))
    exact = policy(batch)[0]
    with torch.autocast("cpu", torch.bfloat16):
        loss, parts = policy(batch)
    loss.backward()
    assert seen == [torch.float32, torch.bfloat16]
    assert loss.dtype == torch.float32 and all(v.dtype == torch.float32 for v in parts.values())
    assert loss.item() == pytest.approx(exact.item(), rel=0.03)  # bfloat16 has 8 bits
    low = copy.deepcopy(policy).bfloat16()
    low_loss, _ = low(batch)
    low_loss.backward()
    assert low_loss.dtype == torch.float32 and low_loss.item() == pytest.approx(exact.item(), rel=0.05)


# Configuration


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_obs_steps": 2}, "--policy.n-obs-steps=2"),
        ({"chunk_size": 0, "n_action_steps": 0}, "--policy.chunk-size=0"),
        ({"n_action_steps": 101}, "--policy.n-action-steps=101.*--policy.chunk-size=100"),
        ({"temporal_ensemble_coeff": 0.01}, "use --policy.n-action-steps=1"),
        ({"temporal_ensemble_coeff": math.nan, "n_action_steps": 1}, "temporal-ensemble-coeff"),
        ({"n_heads": 7}, "--policy.n-heads=7"),
        ({"dim_model": 33, "n_heads": 3}, "--policy.dim-model=33"),
        ({"dropout": 1.0}, "--policy.dropout=1.0"),
        ({"dropout": -0.1}, "--policy.dropout=-0.1"),
        ({"kl_weight": math.inf}, "--policy.kl-weight=inf"),
        ({"optimizer_lr": -1.0}, "--policy.optimizer-lr"),
        ({"optimizer_lr_backbone": math.nan}, "--policy.optimizer-lr-backbone"),
        ({"feedforward_activation": "swish"}, "use relu, gelu or glu"),
        ({"feedforward_activation": "glu", "dim_feedforward": 33}, "even"),
        ({"vision_backbone": "vit_b_16"}, "use one of resnet18"),
        ({"replace_final_stride_with_dilation": True}, "--policy.vision-backbone=resnet50"),
        ({"normalization_mapping": {"STATE": "ZSCORE"}}, "ZSCORE"),
        ({"normalization_mapping": {"FORCE": "MEAN_STD"}}, "FORCE"),
        ({"n_decoder_layers": 0}, "--policy.n-decoder-layers=0"),
        ({"latent_dim": -3}, "--policy.latent-dim=-3"),
    ],
)
def test_nonsense_is_refused_in_one_sentence_that_names_the_flag(changes, words):
    with pytest.raises(UserError, match=words) as caught:
        check_config(ACTConfig(**changes))
    assert "\n" not in str(caught.value)


def test_features_that_make_no_act_policy_are_refused():
    inputs, outputs = features(STATE, TOP)
    with pytest.raises(ValueError, match=r"needs a camera or observation.environment_state"):
        ACTPolicy(tiny(), *features(STATE))
    with pytest.raises(ValueError, match=r"observation.force"):
        ACTPolicy(tiny(), inputs | {"observation.force": {"type": "STATE", "shape": [3]}}, outputs)
    with pytest.raises(ValueError, match="needs the output 'action'"):
        ACTPolicy(tiny(), inputs, {})
    with pytest.raises(ValueError, match="multiple of 4"):
        ACTPolicy(tiny(dim_model=30, n_heads=5), inputs, outputs)


def test_a_config_file_is_read_back_and_what_it_must_not_hold_is_refused():
    config = json.loads(numerics("env_state", "config.json").read_text())
    policy = policy_of(config)
    assert policy.config.dim_model == 64 and config_dict(policy, "cuda")["device"] == "cuda"
    old = {k: v for k, v in config.items() if k not in ("use_peft", "n_decoder_layers", "pre_norm")}
    assert policy_of(old).config == policy.config
    for changes, words in (
        ({"type": "diffusion"}, "type 'diffusion'"),
        ({"input_shapes": {}}, "input_shapes"),
        ({"dim_model": "64"}, "dim_model='64'"),
        ({"dropout": True}, "dropout=True"),
        ({"n_heads": 4.0}, "n_heads=4.0"),
        ({"input_features": None}, "input_features"),
        ({"normalization_mapping": "MEAN_STD"}, "normalization_mapping"),
    ):
        with pytest.raises(ValueError, match=words):
            policy_of(config | changes)
    assert policy_of(config | {"dropout": 0, "pre_norm": 0}).config.dropout == 0


def test_pretrained_weights_load_into_the_backbone_and_an_offline_machine_gets_one_sentence(
    monkeypatch, tmp_path
):
    torch.manual_seed(1)
    state = torchvision.models.resnet18(weights=None).state_dict()
    state["bn1.running_mean"] += 1
    kind = torchvision.models.ResNet18_Weights
    monkeypatch.setattr(kind, "get_state_dict", lambda self, **kw: state)
    policy = ACTPolicy(tiny(pretrained_backbone_weights="ResNet18_Weights.IMAGENET1K_V1"), *features(TOP))
    assert not torch.equal(
        policy.model.backbone.conv1.weight, state["conv1.weight"]
    )  # not by the constructor
    load_backbone(policy)
    for key, value in policy.model.backbone.state_dict().items():
        assert torch.equal(value, state[key]), key
    monkeypatch.undo()

    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(ValueError, match=r"TORCH_HOME.*--policy.pretrained-backbone-weights None") as caught:
        load_backbone(policy)
    assert "\n" not in str(caught.value) and "no network" in str(caught.value)
    with pytest.raises(ValueError, match=r"ResNet34_Weights.IMAGENET1K_V1, None"):
        wrong = tiny(vision_backbone="resnet34", pretrained_backbone_weights="ResNet18_Weights.IMAGENET1K_V1")
        load_backbone(ACTPolicy(wrong, *features(TOP)))
    load_backbone(ACTPolicy(tiny(), *features(TOP)))  # None: nothing to do


@pytest.mark.gpu
def test_cuda_graphs_equal_eager_and_never_wait_for_the_host():
    inputs, outputs = features(STATE, TOP)
    eager = ACTPolicy(tiny(), inputs, outputs, stats_of(inputs, outputs)).cuda()
    graphed = copy.deepcopy(eager)
    graphed.model.compile(mode="reduce-overhead")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for step in range(5):
        batch = {k: v.cuda() for k, v in a_batch(eager, seed=step).items()}
        batch["num_valid"] = (~batch["action_is_pad"]).sum().float()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        loss, grads = gradients(eager, batch)
        graphed_loss, graphed_grads = gradients(graphed, batch)
        torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(graphed_loss, loss, rtol=1e-5, atol=0)
        assert_close(graphed_grads, grads, 1e-4)
    host = noise_words(batch["noise_seed"].cpu(), 3, 1000)
    assert torch.equal(noise_words(batch["noise_seed"], 3, 1000).cpu(), host)
