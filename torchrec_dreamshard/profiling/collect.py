"""Collecting the samples of a plan into a store: resumable, shared among ranks, bounded in number and time."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import distributed

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.measurement import Measurement
from torchrec_dreamshard.profiling.devices import device_name
from torchrec_dreamshard.profiling.fbgemm_profiler import FBGEMMProfiler
from torchrec_dreamshard.profiling.sampling import SamplingPlan
from torchrec_dreamshard.samples import MeasurementStore

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
    name, device = plan.fingerprint, device_name(profiler.device)
    done = _stored(store, name, device)
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
    values: dict[int, dict[int, tuple[float, float]]] = {}
    for measurement in store:
        details = measurement.provenance.details
        cost = measurement.cost
        if details.get("plan") != plan.fingerprint or cost is None:
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


def _share(config: CollectConfig) -> Iterator[tuple[int, int]]:
    """This rank's (sample, repetition) pairs; a repetition goes to the next rank, so that it tells ranks apart too."""
    for repetition, count in ((0, config.num_samples), (1, min(config.num_repeated, config.num_samples))):
        first = (config.rank - repetition) % config.world_size
        for sample in range(first, count, config.world_size):
            yield sample, repetition


def share_size(config: CollectConfig) -> int:
    """How many measurements are this rank's part."""
    return sum(1 for _ in _share(config))


def wait_for_ranks(measured: int) -> int:
    """Waits until every rank of a torchrun launch has come here.

    Args:
        measured: samples that this rank measured.

    Returns:
        The sum over the ranks.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return measured
    # Not before now: while they measure, the ranks have nothing to say to each other, so that a dead one holds
    # nobody up.
    distributed.init_process_group("gloo", timeout=datetime.timedelta(days=1))
    total = torch.tensor(measured)
    distributed.all_reduce(total)
    distributed.destroy_process_group()
    return int(total)


def _stored(store: MeasurementStore, plan: str, device: str) -> set[tuple[int, int]]:
    """The (sample, repetition) pairs of the plan that the store has."""
    done = set()
    for measurement in store:
        found = measurement.provenance.device
        if found != device:
            raise ValueError(
                f"{store.path} holds measurements of {found!r}, and this device is {device!r}: "
                "keep different hardware in different stores"
            )
        details = measurement.provenance.details
        if details.get("plan") == plan:
            done.add((details["sample"], details["repetition"]))
    return done
