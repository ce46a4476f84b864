"""Starting a function on several Gloo ranks of this host."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed, multiprocessing

TIMEOUT_S = 120


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Calls ``function(rank, *arguments)`` on every rank and returns what each gave, which must be picklable."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_run, args=(function, rank, world_size, port, results, arguments), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
    found = {}
    while not results.empty():
        rank, is_error, value = results.get()
        assert not is_error, f"rank {rank} failed:\n{value}"
        found[rank] = value
    assert sorted(found) == list(range(world_size)), f"only the ranks {sorted(found)} came to an end"
    return [found[rank] for rank in range(world_size)]


def _run(function, rank, world_size, port, results, arguments):
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
    }
    torch.set_num_threads(1)
    try:
        distributed.init_process_group("gloo")
        value = function(rank, *arguments)
        distributed.barrier()
        distributed.destroy_process_group()
        results.put((rank, False, value))
    except BaseException:
        results.put((rank, True, traceback.format_exc()))
