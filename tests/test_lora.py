"""Adapters compared with the peft package (where installed), with one process, and with merged weights."""

import copy
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
import tyro
from conftest import DATA, ROOT
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor

import dist
from dist import FSDPConfig, ParallelismConfig
from extras import ckpt_tools, lerobot_ckpt, lora
from extras.lora import (
    PeftConfig,
    adapter_config,
    adapter_state_dict,
    apply_lora,
    merge_state_dict,
    read_adapter_config,
)

BASE = DATA / "numerics" / "env_state"
EVERYTHING = PeftConfig(
    "LORA",
    r=4,
    lora_alpha=6,
    target_modules=("linear1", "linear2", "self_attn", "multihead_attn", "encoder_latent_input_proj"),
    full_training_modules=("action_head",),
)


def base_policy(dtype=torch.float32):
    """The small reference policy with its weights, without statistics, with dropout."""
    policy = lerobot_ckpt.policy_of(json.loads((BASE / "config.json").read_text()) | {"dropout": 0.1})
    policy.load_state_dict(load_file(BASE / "model.safetensors"), strict=True)
    return policy.to(dtype)


def batch_of(step, rank=0, world=1):
    """This rank's part of the 4 samples of `step`."""
    generator = torch.Generator().manual_seed(step)
    whole = {
        "observation.state": torch.randn(4, 14, generator=generator),
        "observation.environment_state": torch.randn(4, 6, generator=generator),
        "action": torch.randn(4, 20, 14, generator=generator),
        "action_is_pad": torch.arange(20).repeat(4, 1) >= torch.tensor([[20], [7], [3], [1]]),
        "noise_seed": torch.arange(4) + 10 * step,
    }
    num_valid = (~whole["action_is_pad"]).sum().float() / world
    size = 4 // world
    return {k: v[rank * size : (rank + 1) * size] for k, v in whole.items()} | {"num_valid": num_valid}


def train(policy, steps, module=None, optimizer=None, rank=0, world=1, autocast=None):
    """Adam on what requires a gradient; returns the optimizer and this rank's losses."""
    module = policy if module is None else module
    optimizer = optimizer or torch.optim.AdamW(policy.optim_groups(1e-2, 1e-3, 1e-4))
    losses = []
    for step in steps:
        with dist.accumulate(module, sync=True), autocast or torch.autocast("cpu", enabled=False):
            loss, _ = module(batch_of(step, rank, world))
            loss.backward()
        dist.clip_grad_norm_(module, 10.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return optimizer, losses


def load_adapter(policy, folder):
    """As a resume does: the adapters are created, then filled from the file."""
    cfg, _ = read_adapter_config(folder)
    cfg = apply_lora(policy, cfg)
    lerobot_ckpt.load_weights(folder, policy, adapter=adapter_state_dict(policy))
    return cfg


def save(policy, cfg, folder):
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.detach().contiguous() for k, v in adapter_state_dict(policy).items()}
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(cfg, BASE)))
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(policy, folder) of adapters on the linear layers that have moved away from zero."""
    torch.manual_seed(0)
    policy = base_policy()
    cfg = apply_lora(policy, PeftConfig("LORA", r=4, full_training_modules=("action_head",)))
    train(policy, range(3))
    return policy.eval(), save(policy, cfg, tmp_path_factory.mktemp("adapter"))


# ------------------------------------------------------------ against peft


def test_peft_loads_our_adapter_over_the_same_base_and_acts_the_same(trained, recwarn):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    policy, folder = trained
    theirs = peft.PeftModel.from_pretrained(base_policy(), folder).eval()
    assert not [w for w in recwarn if "missing" in str(w.message).lower()]
    actions = policy.predict_action_chunk(batch_of(9))
    assert (theirs.predict_action_chunk(batch_of(9)) - actions).abs().max() < 1e-6
    assert (base_policy().eval().predict_action_chunk(batch_of(9)) - actions).abs().max() > 1e-3
    written = peft.get_peft_model_state_dict(theirs)
    ours = adapter_state_dict(policy)
    assert (
        written.keys() == {key.removeprefix("base_model.model.") for key in ours}
        or written.keys() == ours.keys()
    )


def test_an_adapter_that_peft_wrote_loads_here_and_acts_the_same(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    regex = r"model\.(encoder|decoder)\.layers\.\d+\.linear[12]"
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=regex, modules_to_save=["action_head"])
    theirs = peft.get_peft_model(base_policy(), config)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    theirs.eval().save_pretrained(tmp_path)
    policy = base_policy().eval()
    cfg = load_adapter(policy, tmp_path)
    assert (cfg.r, cfg.lora_alpha, cfg.target_modules) == (3, 5, (regex,))
    expected = theirs.predict_action_chunk(batch_of(9))
    assert (policy.predict_action_chunk(batch_of(9)) - expected).abs().max() < 1e-6


def test_attention_adapters_are_those_of_peft_over_torchs_attention(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")

    class Policy(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = nn.MultiheadAttention(8, 2)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.self_attn(x, x, x)[0])

    ours, x = Policy(), torch.randn(5, 2, 8)
    plain = copy.deepcopy(ours)
    cfg = apply_lora(ours, PeftConfig("LORA", r=2, target_modules=("self_attn", "head")))
    for parameter in ours.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(plain), save(ours, cfg, tmp_path))
    assert (theirs(x) - ours(x)).abs().max() < 1e-6
    assert (plain(x) - ours(x)).abs().max() > 1e-3
    merged = merge_state_dict(plain.state_dict(), adapter_state_dict(ours), cfg.scaling)
    plain.load_state_dict(merged)
    assert (plain(x) - ours(x)).abs().max() < 1e-6


def test_every_key_of_pefts_own_config_is_written():
    peft = pytest.importorskip("peft", reason="peft is not installed")
    theirs = peft.LoraConfig(r=16, lora_alpha=8, target_modules=["linear1"], inference_mode=True).to_dict()
    theirs = json.loads(
        json.dumps(theirs, default=lambda value: sorted(value) if isinstance(value, set) else value.value)
    )
    ours = adapter_config(PeftConfig("LORA", target_modules=("linear1",)), None)
    shared = theirs.keys() & ours.keys()
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}
    # Keys of later or earlier versions: absent means the default to peft.
    assert all(not theirs[key] for key in theirs.keys() - shared - {"peft_version"})


# ------------------------------------------------------------ what is adapted


def test_a_fresh_adapter_changes_no_output_and_no_key_of_the_base():
    policy = base_policy().eval()
    keys, actions = list(policy.state_dict()), policy.predict_action_chunk(batch_of(0))
    classes = [type(module).__name__ for module in policy.modules()]
    apply_lora(policy, EVERYTHING)
    assert torch.equal(policy.predict_action_chunk(batch_of(0)), actions)
    assert [key for key in policy.state_dict() if "lora_" not in key] == keys
    names = [type(m).__name__ for path, m in policy.named_modules() if "lora_" not in path]
    assert names == classes


def test_only_adapters_and_named_modules_train_and_the_base_stays_bitwise():
    policy = base_policy()
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    apply_lora(policy, EVERYTHING)
    optimizer, _ = train(policy, range(2))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in policy.named_parameters():
        adapter = "lora_" in name or name.startswith("model.action_head.")
        assert parameter.requires_grad == adapter == (id(parameter) in held), name
        if adapter:
            assert optimizer.state[parameter]["exp_avg"].abs().max() > 0, name
    changed = {k for k, v in policy.state_dict().items() if k in before and not torch.equal(v, before[k])}
    assert changed == {"model.action_head.weight", "model.action_head.bias"}


def test_a_starts_as_in_peft_and_b_at_zero():
    policy = base_policy()
    apply_lora(policy, PeftConfig("LORA", target_modules=("linear1",)))
    for key, tensor in adapter_state_dict(policy).items():
        if "lora_B" in key:
            assert not tensor.any()
        else:  # kaiming_uniform_(a=sqrt(5)) is uniform within 1 / sqrt(inputs)
            assert tensor.shape == (16, 64)
            assert 0.95 / 8 < tensor.abs().max() <= 1 / 8


@pytest.mark.parametrize(
    "targets, expected",
    [
        (None, {"linear1", "linear2", "action_head", "vae_encoder_latent_output_proj"}),
        (("all-linear",), {"linear1", "linear2", "action_head", "vae_encoder_latent_output_proj"}),
        (("linear1", "self_attn"), {"linear1", "self_attn"}),
        (('["linear2", "action_head"]',), {"linear2", "action_head"}),
        ((r"model\.decoder\..*linear\d",), {"linear1", "linear2"}),
        (("model.action_head",), {"action_head"}),
    ],
)
def test_targets_are_endings_a_regular_expression_or_every_linear_layer(targets, expected):
    policy = base_policy()
    cfg = apply_lora(policy, PeftConfig("LORA", target_modules=targets))
    adapted = {path for path, module in policy.named_modules() if hasattr(module, "lora_A")}
    last = {path.rsplit(".", 1)[-1] for path in adapted}
    assert last >= expected
    if targets not in (None, ("all-linear",)):
        assert last == expected
    if targets and "decoder" in targets[0]:
        assert all(path.startswith("model.decoder.") for path in adapted)
    # What is stored selects the same modules again.
    again = base_policy()
    apply_lora(again, cfg)
    assert adapter_state_dict(again).keys() == adapter_state_dict(policy).keys()


@pytest.mark.parametrize(
    "targets, words",
    [
        (("q_proj", "v_proj"), ("'q_proj' fits no module", "share one weight", "self_attn", "linear1")),
        (("out_proj",), ("'out_proj' selects", "name self_attn", "linear1")),
        ((".*attn.*",), ("part of a packed attention", "name self_attn")),
        (("linear3",), ("'linear3' fits no module", "action_head")),
        (("norm1",), ("'norm1' is a LayerNorm", "linear1")),
        (("layers",), ("'layers' is a ModuleList",)),
        (("(",), ("is no regular expression",)),
    ],
)
def test_a_target_that_cannot_be_adapted_is_refused_with_what_can(targets, words):
    policy = base_policy()
    with pytest.raises(ValueError) as error:
        apply_lora(policy, PeftConfig("LORA", target_modules=targets))
    assert "--peft.target-modules" in str(error.value)
    for word in words:
        assert word in str(error.value)
    assert all(parameter.requires_grad for parameter in policy.parameters())


@pytest.mark.parametrize("flags", [{"method_type": "IA3"}, {"r": 0}, {"lora_alpha": 0}])
def test_flags_out_of_range_are_refused_by_name(flags):
    with pytest.raises(ValueError, match=f"--peft.{next(iter(flags)).replace('_', '-')}"):
        lora.check(PeftConfig(**flags))


def test_unknown_full_training_modules_are_refused_and_known_ones_leave_the_targets():
    policy = base_policy()
    with pytest.raises(ValueError, match=r"--peft.full-training-modules.*'action_hat'"):
        apply_lora(policy, PeftConfig("LORA", full_training_modules=("action_hat",)))
    apply_lora(policy, PeftConfig("LORA", full_training_modules=("decoder",)))
    keys = {key.removeprefix("base_model.model.") for key in adapter_state_dict(policy)}
    assert "model.decoder.layers.0.linear1.weight" in keys
    assert not [key for key in keys if key.startswith("model.decoder.") and "lora_" in key]


def test_the_command_line_gives_names_as_words():
    cfg = tyro.cli(
        PeftConfig,
        args=["--method-type", "LORA", "--target-modules", "linear1", "self_attn", "--lora-alpha", "32"],
    )
    assert cfg == PeftConfig("LORA", lora_alpha=32, target_modules=("linear1", "self_attn"))
    assert not tyro.cli(PeftConfig, args=[]).enabled


# ------------------------------------------------------------ layouts, precision


def _train_on(rank, world, replicate, shard, folder):
    """This rank's losses, and the gathered adapter after three float64 steps, also saved as DCP shards."""
    cluster = dist.start("cpu", ParallelismConfig(replicate, shard))
    torch.manual_seed(5)
    policy = base_policy(torch.float64)
    apply_lora(policy, EVERYTHING)
    module = dist.parallelize(policy, cluster)
    _, losses = train(policy, range(3), module, rank=rank, world=world)
    state = adapter_state_dict(module)
    if folder is not None:
        assert all(isinstance(value, DTensor) or "out_proj" in key for key, value in state.items())
        assert sum(isinstance(p, DTensor) for p in policy.parameters()) == len(list(policy.parameters()))
        dcp.save({"adapter": state}, checkpoint_id=folder)
    whole = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()}
    return losses, {k: v.detach().numpy() for k, v in whole.items()}


def _mean_over_ranks(results):
    return [sum(losses) / len(results) for losses in zip(*(losses for losses, _ in results), strict=True)]


def test_ddp_fsdp_and_hsdp_train_the_adapter_of_one_process(tmp_path):
    alone_losses, alone = _train_on(0, 1, 1, 1, None)
    for world, replicate, shard in ((2, 2, 1), (2, 1, 2), (4, 2, 2)):
        folder = str(tmp_path / f"{world}-{shard}") if shard > 1 else None
        results = run_ranks(world, _train_on, replicate, shard, folder, init_group=False)
        assert _mean_over_ranks(results) == pytest.approx(alone_losses, rel=1e-12), (world, shard)
        for key, value in results[0][1].items():
            # float64 sums in another order, then three steps of Adam at 1e-2.
            assert abs(value - alone[key]).max() < 1e-9, (world, shard, key)
    # The shards of the adapter alone, read without a process group into a policy that is not sharded.
    policy = base_policy(torch.float64)
    apply_lora(policy, EVERYTHING)
    dcp.load({"adapter": adapter_state_dict(policy)}, checkpoint_id=folder, no_dist=True)
    for key, value in adapter_state_dict(policy).items():
        assert (value.detach().numpy() == results[0][1][key]).all(), key


def test_a_compiled_policy_with_adapters_trains_the_same():
    results = []
    for compiled in (False, True):
        torch.manual_seed(5)
        policy = base_policy(torch.float64)
        apply_lora(policy, EVERYTHING)
        if compiled:  # the graph is the compiler's; generating code for it is not in question here
            policy.model.compile(backend="aot_eager")
        _, losses = train(policy, range(2))
        results.append((losses, adapter_state_dict(policy)))
    assert results[1][0] == pytest.approx(results[0][0], rel=1e-10)
    assert list(results[1][1]) == list(results[0][1])


def _bf16_losses(rank, world, shard, param_dtype):
    cluster = dist.start("cpu", ParallelismConfig(1, shard))
    fsdp = FSDPConfig(param_dtype=param_dtype, reduce_dtype="float32" if param_dtype else None)
    torch.manual_seed(5)
    policy = base_policy()
    apply_lora(policy, EVERYTHING)
    module = dist.parallelize(policy, cluster, fsdp=fsdp)
    _, losses = train(policy, range(3), module, None, rank, world, dist.autocast(cluster, "bf16", fsdp))
    assert all(p.dtype == torch.float32 for p in policy.parameters())
    return losses, None


def test_bf16_by_autocast_and_by_gathered_parameters_stays_near_float32():
    torch.manual_seed(5)
    policy = base_policy()
    apply_lora(policy, EVERYTHING)
    _, exact = train(policy, range(3))
    alone, _ = _bf16_losses(0, 1, 1, None)
    assert alone == pytest.approx(exact, rel=0.05) and alone != exact  # bf16 keeps 8 bits
    for param_dtype in (None, "bfloat16"):
        results = run_ranks(2, _bf16_losses, 2, param_dtype, init_group=False)
        assert _mean_over_ranks(results) == pytest.approx(exact, rel=0.05)


def test_a_base_stored_in_bf16_trains_float32_adapters():
    policy = base_policy(torch.bfloat16)
    apply_lora(policy, EVERYTHING)
    before = [p.detach().clone() for p in policy.parameters()]
    _, losses = train(policy, range(3))
    assert all(torch.isfinite(torch.tensor(losses)))
    moved = 0
    for (name, p), old in zip(policy.named_parameters(), before, strict=True):
        assert p.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
        moved += "lora_B" in name and not torch.equal(p, old)
    assert moved == sum("lora_B" in name for name, _ in policy.named_parameters())


# ------------------------------------------------------------ files


def test_resuming_from_an_adapter_continues_bitwise(tmp_path):
    torch.manual_seed(5)
    policy = base_policy()
    cfg = apply_lora(policy, EVERYTHING)
    optimizer, _ = train(policy, range(2))
    save(policy, cfg, tmp_path)
    moments = copy.deepcopy(optimizer.state_dict())
    _, expected = train(policy, range(2, 4), optimizer=optimizer)

    resumed = base_policy()
    torch.manual_seed(6)  # another start of A, overwritten by the file
    apply_lora(resumed, EVERYTHING)
    lerobot_ckpt.load_weights(tmp_path, resumed, adapter=adapter_state_dict(resumed), resume=True)
    optimizer = torch.optim.AdamW(resumed.optim_groups(1e-2, 1e-3, 1e-4))
    optimizer.load_state_dict(moments)
    _, losses = train(resumed, range(2, 4), optimizer=optimizer)
    assert losses == expected
    for key, value in adapter_state_dict(policy).items():
        assert torch.equal(adapter_state_dict(resumed)[key], value), key


def test_a_file_that_lacks_a_tensor_or_has_one_too_many_is_refused(trained, tmp_path):
    _, folder = trained
    tensors = load_file(folder / "adapter_model.safetensors")
    key = next(key for key in tensors if "linear1.lora_A" in key)
    broken = {
        f"missing {key}": {k: v for k, v in tensors.items() if k != key},
        "unexpected base_model.model.model.extra": tensors | {"base_model.model.model.extra": torch.ones(1)},
        "has shape (3, 64), not (4, 64)": tensors | {key: torch.ones(3, 64)},
    }
    shutil.copy(folder / "adapter_config.json", tmp_path)
    for words, content in broken.items():
        save_file(content, tmp_path / "adapter_model.safetensors")
        with pytest.raises(ValueError) as error:
            load_adapter(base_policy(), tmp_path)
        assert words in str(error.value) and "adapter_model.safetensors" in str(error.value)


def test_an_adapter_of_another_rank_or_formula_is_refused(trained, tmp_path):
    _, folder = trained
    policy = base_policy()
    apply_lora(policy, PeftConfig("LORA", r=8, full_training_modules=("action_head",)))
    with pytest.raises(ValueError, match=r"has shape \(4, 64\), not \(8, 64\)"):
        lerobot_ckpt.load_weights(folder, policy, adapter=adapter_state_dict(policy))
    settings = json.loads((folder / "adapter_config.json").read_text())
    for special in (
        {"use_dora": True},
        {"rank_pattern": {"linear1": 2}},
        {"bias": "all"},
        {"peft_type": "IA3"},
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings | special))
        with pytest.raises(ValueError, match=r"adapter_config\.json.*not supported"):
            read_adapter_config(tmp_path)


def test_merged_weights_act_as_the_adapter_did():
    policy = base_policy(torch.float64)
    cfg = apply_lora(policy, EVERYTHING)
    train(policy, range(3))
    actions = policy.eval().predict_action_chunk(batch_of(9))
    plain = base_policy(torch.float64).eval()
    merged = merge_state_dict(plain.state_dict(), adapter_state_dict(policy), cfg.scaling)
    assert list(merged) == list(plain.state_dict())
    plain.load_state_dict(merged)
    assert (plain.predict_action_chunk(batch_of(9)) - actions).abs().max() < 1e-12


def test_convert_writes_full_weights_beside_the_adapter(trained, tmp_path):
    policy, folder = trained
    run = tmp_path / "000010"
    adapter = shutil.copytree(folder, run / "pretrained_model")
    config = json.loads((BASE / "config.json").read_text())
    (adapter / "config.json").write_text(json.dumps(config | {"use_peft": True}))
    (adapter / "policy_preprocessor.json").write_text("{}")
    command = [sys.executable, str(ROOT / "ckpt.py"), "convert", "--checkpoint-dir", str(run)]
    subprocess.run(command, check=True)
    assert json.loads((adapter / "config.json").read_text()) == config | {"use_peft": False}
    weights = adapter / "model.safetensors"
    assert weights.stat().st_mode == (adapter / "config.json").stat().st_mode
    merged = base_policy()
    merged.load_state_dict(load_file(weights), strict=True)
    difference = merged.eval().predict_action_chunk(batch_of(9)) - policy.predict_action_chunk(batch_of(9))
    assert difference.abs().max() < 1e-6
    written = weights.read_bytes()
    subprocess.run(command, check=True)  # once more, from the adapter and its base again
    assert weights.read_bytes() == written

    settings = json.loads((adapter / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "gone")
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"builds on {tmp_path / 'gone'}, which is not there" in done.stderr
    assert weights.read_bytes() == written


def test_an_adapter_over_another_base_is_refused():
    policy = base_policy()
    cfg = apply_lora(policy, EVERYTHING)
    base, adapter = base_policy().state_dict(), adapter_state_dict(policy)
    del base["model.decoder.layers.0.linear1.weight"]
    with pytest.raises(ValueError, match=r"model\.decoder\.layers\.0\.linear1\.weight is not in the base"):
        merge_state_dict(base, adapter, cfg.scaling)
    base["model.decoder.layers.0.linear1.weight"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"linear1\.weight is \(3, 3\) in the base"):
        merge_state_dict(base, adapter, cfg.scaling)


def test_an_adapter_that_trained_out_proj_is_refused_wherever_it_would_be_merged(tmp_path):
    policy = base_policy()
    folder = save(policy, apply_lora(policy, EVERYTHING), tmp_path / "adapter")
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(key for key in tensors if key.endswith("base_layer.out_proj.lora_B.weight"))
    save_file(tensors | {key: torch.ones_like(tensors[key])}, file)
    shutil.copy(BASE / "config.json", folder)
    for merge_it in (
        lambda: ckpt_tools.convert(folder),
        lambda: lerobot_ckpt.load_weights(folder, base_policy()),
    ):
        with pytest.raises(ValueError, match=r"out_proj.*is not zero.*huggingface/peft#3774"):
            merge_it()
    assert not (folder / "model.safetensors").exists()


def test_the_file_works_alone_in_an_empty_folder(tmp_path):
    shutil.copy(ROOT / "extras/lora.py", tmp_path)
    code = (
        "import lora, torch; policy = torch.nn.Sequential(torch.nn.Linear(2, 3)); "
        "print(lora.apply_lora(policy, lora.PeftConfig('LORA')))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert "target_modules=('0',)" in done.stdout, done.stderr
