"""Run a function on several gloo ranks of this machine; a hung collective is killed.

    results = run_ranks(4, my_function, arg, deadline_s=60)        # by rank

Ranks are forked from a server process that has torch imported but never used it: a start costs
milliseconds, and no thread or lock of this process is inherited. The function must be importable (module
level), its arguments and its result picklable (numpy arrays, not tensors: a rank ends before the shared
memory of its tensors is read). It is called as function(rank, world_size, *args), with torchrun's variables
set and one thread.
"""

import multiprocessing
import os
import queue
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as c10d

PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torchvision", "tyro"]


def run_ranks(
    world_size: int, function: Callable, *args: Any, deadline_s: float = 90, init_group: bool = False
) -> list[Any]:
    """Results by rank.

    Args:
        init_group: initialize torch.distributed's default group (gloo) before the function is called.
    Raises:
        RuntimeError: a rank failed (with its traceback), died, or took longer than the deadline.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    results_queue, port = context.Queue(), free_port()
    processes = []
    for rank in range(world_size):
        job = (function, rank, world_size, port, init_group, args, results_queue)
        processes.append(context.Process(target=_rank_main, args=job, daemon=True))
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        _collect(results, processes, results_queue, deadline_s)
    except RuntimeError as error:
        raise RuntimeError(f"{function.__name__}: {error}") from None
    finally:
        for process in processes:
            process.join(timeout=5 if len(results) == world_size else 0)
            process.kill()
            process.join()  # until then the process object keeps the queue's semaphores
    return [results[rank] for rank in range(world_size)]


def _collect(results: dict[int, Any], processes: list, results_queue: Any, deadline_s: float) -> None:
    """Fill `results` until every rank has one."""
    end = time.monotonic() + deadline_s
    while len(results) < len(processes):
        missing = [rank for rank in range(len(processes)) if rank not in results]
        left = end - time.monotonic()
        if left <= 0:
            raise RuntimeError(f"ranks {missing} hung for {deadline_s:g} s")
        # Exit codes first, then the queue: what a rank wrote before it ended is still read.
        dead = {rank: code for rank in missing if (code := processes[rank].exitcode) not in (None, 0)}
        try:
            rank, succeeded, result = results_queue.get(timeout=min(left, 1.0))
        except queue.Empty:
            if dead:
                raise RuntimeError(f"ranks died, with exit codes by rank: {dead}") from None
            continue
        if not succeeded:
            raise RuntimeError(f"rank {rank} failed:\n{result}")
        results[rank] = result


def _rank_main(
    function: Callable,
    rank: int,
    world_size: int,
    port: int,
    init_group: bool,
    args: tuple,
    results_queue: Any,
) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    # The server that forks ranks may have been started by a loader, which has its children ignore signals.
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        if init_group:
            c10d.init_process_group("gloo")
        result = function(rank, world_size, *args)
        if c10d.is_initialized():
            c10d.barrier()  # a rank that leaves early breaks the connections of those still communicating
        results_queue.put((rank, True, result))
    except BaseException:
        results_queue.put((rank, False, traceback.format_exc()))
    finally:
        results_queue.close()
        results_queue.join_thread()
        os._exit(0)  # the group's destructor may wait for peers that are gone


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
