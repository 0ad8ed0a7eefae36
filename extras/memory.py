"""How much memory a run takes per rank, on paper: before a process group exists, for any number of ranks."""

from torch import nn

import dist


def memory_per_rank(policy: nn.Module, dp_shard: int, fsdp: dist.FSDPConfig | None = None) -> dict[str, int]:
    """Bytes that the fullest rank holds beside activations. Call before `parallelize`, for any degree.

    Returns:
        "parameters", "gradients", "optimizer" (AdamW's two moments) and "gathered": the two largest units,
        one in use and one fetched ahead. Each tensor is sharded along its first axis, and padded as if it
        were even.
    """
    fsdp, parameters = fsdp or dist.FSDPConfig(), list(policy.parameters())
    replicated, units = set(parameters), []
    if dp_shard > 1:
        replicated = {p for m in dist.ignored_modules(policy, fsdp) for p in m.parameters()}
        units = [set(m.parameters()) - replicated for m in dist.wrap_units(policy, fsdp).values()]
    held = {p: p.numel() * p.element_size() for p in parameters}
    for p in set(parameters) - replicated:
        held[p] = -(-p.shape[0] // dp_shard) * p.shape[1:].numel() * p.element_size()
    trainable = sum(held[p] for p in parameters if p.requires_grad)
    units.append(set(parameters) - replicated - set().union(*units))
    itemsize = (dist.DTYPES[fsdp.param_dtype] or parameters[0].dtype).itemsize
    whole = sorted(itemsize * sum(p.numel() for p in unit) for unit in units)
    return {
        "parameters": sum(held.values()),
        "gradients": trainable,
        "optimizer": 2 * trainable,
        "gathered": sum(whole[-2:]),
    }
