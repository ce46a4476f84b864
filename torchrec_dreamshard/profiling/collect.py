"""Collecting the samples of a plan into a store: resumable, shared among ranks, bounded in number and time."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import distributed

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.measurement import Measurement
from torchrec_dreamshard.profiling.devices import device_name, host_name
from torchrec_dreamshard.profiling.fbgemm_profiler import FBGEMMProfiler
from torchrec_dreamshard.profiling.sampling import SamplingPlan, StepPlan
from torchrec_dreamshard.profiling.timing import TimingConfig
from torchrec_dreamshard.samples import MeasurementStore

_GO, _SKIP, _STOP = range(3)
_RANK_TIMEOUT = datetime.timedelta(days=1)  # ranks end at different times
_MAX_FAILURES = 20  # in a row: the device is lost, or the plan asks for what it cannot do


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """How much to collect, and which part of it is this rank's."""

    num_samples: int
    """Samples of the plan, 0 to this many; those that the store has already are not measured again."""
    num_repeated: int = 0
    """How many of the first samples to measure once more at the end, to tell how repeatable they are."""
    budget_s: float = float("inf")
    """Stop before a sample would start after this time."""
    rank: int = 0
    """This process among ``world_size`` that share the samples."""
    world_size: int = 1
    """Processes that share the samples; on one host they share the store too."""


def collect(
    plan: SamplingPlan,
    profiler: FBGEMMProfiler,
    store: MeasurementStore,
    config: CollectConfig,
    *,
    progress: Callable[[Measurement | None], None] = lambda measurement: None,
) -> int:
    """Measures what the store lacks of this rank's samples; each is on the disk before the next one starts.

    A sample that fails is kept with its error.

    Args:
        plan: the samples.
        profiler: measures them.
        store: keeps them.
        config: how much, and this rank's part.
        progress: called with each measurement, and once with None for every sample that the store had already.

    Returns:
        How many samples were measured now.

    Raises:
        ValueError: the store holds measurements of another device.
        MeasurementError: 20 samples failed in a row.
    """
    name = plan.fingerprint
    store.check_device(device_name(profiler.device))
    done = _stored(store, name)
    measured = failures = 0
    start = time.monotonic()
    for sample, repetition in _share(config):
        if (sample, repetition) in done:
            progress(None)
            continue
        if time.monotonic() - start >= config.budget_s:
            break
        task = plan[sample]
        measurement = profiler.record(
            task, (0,) * task.num_shards, kernels_only=True, plan=name, sample=sample, repetition=repetition
        )
        store.append(measurement)
        measured += 1
        progress(measurement)
        failures = failures + 1 if measurement.error else 0
        if failures == _MAX_FAILURES:
            raise MeasurementError(f"{failures} samples in a row failed, the last one with: {measurement.error}")
    return measured


def repeatability(store: MeasurementStore, plan: SamplingPlan) -> dict[str, list[float]]:
    """How far repeated samples differ.

    Args:
        store: what ``collect`` wrote with ``num_repeated``.
        plan: its plan.

    Returns:
        For the forward, the backward pass and their sum ("total"): for each repeated sample the difference of
        its two medians over their mean.
    """
    name = plan.fingerprint
    values: dict[int, dict[int, tuple[float, float]]] = {}
    for measurement in store:
        details = measurement.provenance.details
        cost = measurement.cost
        if details.get("plan") != name or cost is None:
            continue
        forward, backward = cost.forward_compute_ms, cost.backward_compute_ms
        if forward is not None and backward is not None:
            pair = (float(forward[0]), float(backward[0]))
            values.setdefault(details["sample"], {})[details["repetition"]] = pair
    pairs = np.array([[runs[0], runs[1]] for runs in values.values() if {0, 1} <= set(runs)]).reshape(-1, 2, 2)
    by_term = {"forward": pairs[..., 0], "backward": pairs[..., 1], "total": pairs.sum(axis=-1)}
    return {
        term: (np.abs(both[:, 0] - both[:, 1]) / np.maximum(both.mean(axis=1), 1e-9)).tolist()
        for term, both in by_term.items()
    }


def calmest_runs(measurements: Iterable[Measurement]) -> list[Measurement]:
    """Of several runs of a combination, keeps the one with the least compute time.

    What disturbs a kernel (neighbours on the same memory and caches, stolen cores) only adds to its time, and on a
    shared machine it may last for the whole of a measurement, where no statistic over the repeats can see it.

    Args:
        measurements: of any number of runs; failed ones and those without compute times are left out.

    Returns:
        One measurement for each combination of shards and placement, in the order of their first runs. The compute
        times of all its runs are in its provenance as ``runs_ms``.
    """
    runs: dict[tuple[object, ...], list[tuple[float, Measurement]]] = {}
    for measurement in measurements:
        if measurement.cost is not None and measurement.cost.compute_ms is not None:
            key = (measurement.task.shards, measurement.placement, measurement.task.num_devices)
            runs.setdefault(key, []).append((float(measurement.cost.compute_ms.max()), measurement))
    calmest = []
    for found in runs.values():
        _, best = min(found, key=lambda run: run[0])
        details = {**best.provenance.details, "runs_ms": [round(compute_ms, 4) for compute_ms, _ in found]}
        calmest.append(dataclasses.replace(best, provenance=dataclasses.replace(best.provenance, details=details)))
    return calmest


def _share(config: CollectConfig) -> Iterator[tuple[int, int]]:
    """This rank's (sample, repetition) pairs; a repetition goes to the next rank, so that it tells ranks apart too."""
    for repetition, count in ((0, config.num_samples), (1, min(config.num_repeated, config.num_samples))):
        first = (config.rank - repetition) % config.world_size
        for sample in range(first, count, config.world_size):
            yield sample, repetition


def share_size(config: CollectConfig) -> int:
    """How many measurements are this rank's part."""
    return sum(1 for _ in _share(config))


def collect_steps(
    hosts: Sequence[str],
    tables: SamplingPlan,
    profilers: Mapping[int, FBGEMMProfiler],
    store: MeasurementStore,
    config: CollectConfig,
    *,
    progress: Callable[[Measurement | None], None] = lambda measurement: None,
) -> int:
    """Measures placements as whole steps, exchange included: a collective call of all ranks.

    Samples go round the numbers of devices from 2 to all ranks; a rank that a sample has no device for waits.
    Rank 0 keeps the store and the time.

    Args:
        hosts: name of each rank's host (``rank_hosts``).
        tables: the tables to place.
        profilers: for each number of devices, the profiler with the group of its ranks (``step_profilers``).
        store: rank 0's keeps the measurements, the other ranks' are not touched.
        config: how much.
        progress: as in ``collect``.

    Returns:
        How many samples were measured now.

    Raises:
        ValueError: the store holds measurements of another device.
        MeasurementError: a rank was lost, or 20 samples failed in a row.
    """
    plan = StepPlan(tables=tables, hosts=tuple(hosts.index(host) for host in hosts))
    name, start = plan.fingerprint, time.monotonic()
    done = set()
    if config.rank == 0:
        store.check_device(device_name(profilers[2].device))
        done = _stored(store, name)
    measured = failures = 0
    for sample in range(config.num_samples):
        state = _GO
        if config.rank == 0 and (sample, 0) in done:
            state = _SKIP
        elif config.rank == 0 and time.monotonic() - start >= config.budget_s:
            state = _STOP
        state = _agree(state)
        if state == _STOP:
            break
        if state == _SKIP:
            progress(None)
            continue
        task, placement = plan[sample]
        measured += 1
        if config.rank < task.num_devices:
            measurement = profilers[task.num_devices].record(
                task, placement, plan=name, sample=sample, repetition=0, hosts=list(hosts[: task.num_devices])
            )
            if config.rank == 0:
                store.append(measurement)
            failures = failures + 1 if measurement.error else 0
        if _agree(failures) >= _MAX_FAILURES:
            raise MeasurementError(f"{_MAX_FAILURES} samples in a row failed: their errors are in {store.path}")
        progress(None)
    return measured


def step_profilers(device: str, timing: TimingConfig, num_threads: int, seed: int) -> dict[int, FBGEMMProfiler]:
    """Profilers for 2 ranks, 3 ranks and so on up to all of them; a collective call."""
    return {
        size: FBGEMMProfiler(
            device, timing=timing, num_threads=num_threads, seed=seed, group=distributed.new_group(list(range(size)))
        )
        for size in range(2, distributed.get_world_size() + 1)
    }


def rank_hosts(device: torch.device) -> list[str]:
    """Name of each rank's host, in the order of the ranks; a collective call.

    Args:
        device: this rank's.

    Raises:
        ValueError: the ranks have different devices, which one store must not mix.
    """
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, (host_name(), device_name(device)))
    models = [model for _, model in ranks]
    if len(set(models)) > 1:
        raise ValueError(
            f"the ranks must have equal devices, got {', '.join(sorted(set(models)))}: "
            "measure different hardware in runs and stores of its own"
        )
    return [host for host, _ in ranks]


@contextlib.contextmanager
def joined_ranks(device: str) -> Iterator[None]:
    """Joins the ranks of a torchrun launch for the body."""
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    distributed.init_process_group(backend, timeout=_RANK_TIMEOUT)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def wait_for_ranks(measured: int) -> int:
    """Waits until every rank of a torchrun launch has come here.

    Args:
        measured: samples that this rank measured.

    Returns:
        The sum over the ranks.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return measured
    # Not before now: while they measure alone, the ranks have nothing to say to each other, so that a dead one
    # holds nobody up.
    with joined_ranks("cpu"):
        total = torch.tensor(measured)
        distributed.all_reduce(total)
    return int(total)


def _agree(value: int) -> int:
    """Rank 0's value, on every rank."""
    shared = torch.tensor(value)
    try:
        distributed.broadcast(shared, src=0)
    except RuntimeError as error:
        raise MeasurementError(f"a rank was lost: {error}") from error
    return int(shared)


def _stored(store: MeasurementStore, plan: str) -> set[tuple[int, int]]:
    """The (sample, repetition) pairs of the plan that the store has."""
    found = (measurement.provenance.details for measurement in store)
    return {(details["sample"], details["repetition"]) for details in found if details.get("plan") == plan}
