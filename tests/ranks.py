"""Runs a function on several gloo ranks and returns what each rank returned; a hung collective is killed.

    results = run_ranks(4, my_module_level_function, arg, deadline_s=60)

As extras/ranks.py, but inside an initialized gloo group (init_group=False: torchrun's variables are set, the
group is not), and a rank that fails is a test that fails.
"""

from collections.abc import Callable
from typing import Any

from extras import ranks
from extras.ranks import free_port

__all__ = ["free_port", "run_ranks"]


def run_ranks(
    world_size: int, function: Callable, *args: Any, deadline_s: float = 90, init_group: bool = True
) -> list:
    """Results by rank. Raises AssertionError: the traceback of the first rank that failed, or a hang."""
    try:
        return ranks.run_ranks(world_size, function, *args, deadline_s=deadline_s, init_group=init_group)
    except RuntimeError as error:
        raise AssertionError(str(error)) from None
