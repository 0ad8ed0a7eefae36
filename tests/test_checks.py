"""Variables of accelerate's launcher: those that only launch are accepted, those that configure are refused."""

import pytest

from extras import checks


@pytest.mark.parametrize(
    "name, value, refused",
    [
        ("ACCELERATE_USE_FSDP", "true", True),
        ("ACCELERATE_USE_DEEPSPEED", "true", True),
        ("FSDP_VERSION", "2", True),
        ("ACCELERATE_MIXED_PRECISION", "bf16", True),
        ("ACCELERATE_MIXED_PRECISION", "no", False),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", True),
        ("ACCELERATE_DYNAMO_BACKEND", "NO", False),
        ("ACCELERATE_DYNAMO_MODE", "default", False),
        ("ACCELERATE_USE_CPU", "True", False),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", True),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1", False),
        ("ACCELERATE_USE_MEGATRON_LM", "true", True),
        ("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2", True),
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2", True),
        ("ACCELERATE_CPU_AFFINITY", "1", False),
    ],
)
def test_accelerate_may_launch_but_not_configure(monkeypatch, name, value, refused):
    monkeypatch.setenv(name, value)
    if refused:
        with pytest.raises(ValueError, match=f"{name}={value}.*use --"):
            checks.refuse_accelerate_settings("cpu")
    else:
        checks.refuse_accelerate_settings("cpu")
