"""Runs a function on several gloo ranks and returns what each rank returned; a hung collective is killed.

    results = run_ranks(4, my_module_level_function, arg, deadline_s=60)

Ranks are forked from a server process that has torch imported but never used, so that a start costs
milliseconds and no thread or lock of the test process is inherited. `function` must be importable
(module level) and its arguments and result picklable (numpy arrays, not tensors: a rank ends before the
shared memory of its tensors is read); it is called as function(rank, world_size, *args)
inside an initialised gloo group (init_group=False: the torchrun variables are set, the group is not).
"""

import multiprocessing
import os
import random
import signal
import socket
import time
import traceback
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torchvision", "tyro"]
)


def free_port() -> int:
    """A port outside the range from which the system gives ports to others in the meantime."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def _rank_main(function, rank, world_size, port, init_group, args, queue) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    # The server that forks ranks may have been started by a loader, which has its children ignore signals.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        if init_group:
            torch.distributed.init_process_group("gloo")
        result = function(rank, world_size, *args)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        queue.put((rank, True, result))
    except BaseException:
        queue.put((rank, False, traceback.format_exc()))
    finally:
        queue.close()
        queue.join_thread()
        os._exit(0)  # a group's destructor may wait for peers that are gone


def run_ranks(world_size: int, function, *args: Any, deadline_s: float = 90, init_group: bool = True) -> list:
    """Results by rank. Raises AssertionError: the traceback of the first rank that failed, or a hang."""
    queue = _context.Queue()
    port = free_port()
    processes = [
        _context.Process(
            target=_rank_main, args=(function, rank, world_size, port, init_group, args, queue), daemon=True
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    end = time.monotonic() + deadline_s
    try:
        while len(results) < world_size:
            left = end - time.monotonic()
            assert left > 0, f"ranks {sorted(set(range(world_size)) - set(results))} hung for {deadline_s} s"
            try:
                rank, fine, result = queue.get(timeout=min(left, 1.0))
            except Exception:
                dead = [
                    r for r, p in enumerate(processes) if r not in results and p.exitcode not in (None, 0)
                ]
                assert not dead, f"rank {dead} died with exit code {[processes[r].exitcode for r in dead]}"
                continue
            assert fine, f"rank {rank} failed:\n{result}"
            results[rank] = result
    finally:
        for process in processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(world_size)]
