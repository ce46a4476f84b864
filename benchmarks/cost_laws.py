"""Small made-up cost laws, as different from each other as devices may be; each is a ``Profiler``.

None of them was used to design the cost network's features. A law gives each device's forward and backward kernel
from plain arrays over its shards, and the exchange from all devices' output columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from torchrec_dreamshard import CostBreakdown, PlacementTask, ShardSpec
from torchrec_dreamshard.reuse import unique_rows


class Loads:
    """Properties of the shards of one device, arrays of length N (at least 1)."""

    def __init__(self, shards: Sequence[ShardSpec]) -> None:
        self.count = len(shards)
        self.rows, self.dim, self.pooling, batch = (
            np.array([getattr(shard, name) for shard in shards], dtype=np.float64)
            for name in ("rows", "dim", "pooling_factor", "batch_size")
        )
        self.lookups = batch * self.pooling / 1e6
        self.outputs = batch * self.dim / 1e6
        self.unique = np.array([unique_rows(shard) for shard in shards]) / 1e6
        self.weight_gb = self.rows * self.dim * 4 / 1e9
        self.working_gb = self.unique * self.dim * 4 / 1e3


def _cliff(size: float, capacity: float, width: float = 0.15) -> float:
    """0 well below a capacity, 1 well above it."""
    return float(1 / (1 + np.exp(-np.log(max(size, 1e-12) / capacity) / width)))


def sum_of_maxima(x: Loads) -> tuple[float, float]:
    """Every table is bound by bytes or by lookups, the slower of the two."""
    each = np.maximum(0.02 * x.lookups * x.dim, 0.6 * x.lookups) + 0.02
    return 0.1 + each.sum(), 0.2 + 1.8 * each.sum()


def max_of_sums(x: Loads) -> tuple[float, float]:
    """The device is bound by bytes or by lookups in all (a roofline)."""
    work = max(0.02 * (x.lookups * x.dim).sum(), 0.7 * x.lookups.sum(), 0.04 * x.outputs.sum())
    return 0.1 + work, 0.2 + 2.2 * work


def fusion(x: Loads) -> tuple[float, float]:
    """Fused kernels gain with every table: a power of the sum below 1."""
    work = (0.03 * x.lookups * x.dim + 0.05 * x.outputs + 0.1).sum()
    return 0.3 + 2 * work**0.7, 0.5 + 3 * work**0.8


def weight_cliff(x: Loads) -> tuple[float, float]:
    """Costs double and a half when the device's tables outgrow a cache of 4 GB."""
    work = (0.02 * x.lookups * x.dim + 0.1).sum() * (1 + 1.5 * _cliff(x.weight_gb.sum(), 4.0))
    return work, 2 * work


def working_set_cliff(x: Loads) -> tuple[float, float]:
    """Costs triple when what a batch touches outgrows a cache of 0.3 GB."""
    work = (0.015 * x.lookups * x.dim + 0.1).sum() * (1 + 2 * _cliff(x.working_gb.sum(), 0.3))
    return work, 1.5 * work


def per_table(x: Loads) -> tuple[float, float]:
    """Launches dominate."""
    return 0.1 + 0.8 * x.count + 0.004 * (x.lookups * x.dim).sum(), 0.2 + 1.1 * x.count + 0.005 * x.lookups.sum()


def quadratic_dim(x: Loads) -> tuple[float, float]:
    """Wide tables are much dearer than their bytes, and large ones a little."""
    work = (x.lookups * (x.dim / 32) ** 2 * np.log10(x.rows) / 6 + 0.05).sum()
    return 0.1 + work, 0.1 + 2 * work


def largest_table(x: Loads) -> tuple[float, float]:
    """Tables run side by side, and the largest is waited for."""
    each = x.pooling**0.8 * x.dim**0.5 * (1 + 0.2 * np.log10(x.rows))
    work = 0.02 * (0.6 * (each**4).sum() ** 0.25 + 0.4 * each.sum())
    return 0.2 + work, 0.26 + 1.3 * work


def rows_latency(x: Loads) -> tuple[float, float]:
    """Every lookup is a random access whose latency grows with the table, whatever the width."""
    work = (x.lookups * (x.rows / 1e5) ** 0.35 + 0.02).sum()
    return 0.1 + work, 0.2 + 1.5 * work


def padded_dim(x: Loads) -> tuple[float, float]:
    """Columns come in steps of 32, and distinct rows cost the backward pass."""
    wide = np.ceil(x.dim / 32) * 32
    return (
        0.1 + (0.02 * x.lookups * wide + 0.02).sum(),
        0.2 + (0.03 * x.unique * wide + 0.2 * x.lookups + 0.02).sum(),
    )


def congestion(x: Loads) -> tuple[float, float]:
    """Every table slows all others down."""
    work = (0.02 * x.lookups * x.dim + 0.2 * x.unique + 0.1).sum()
    return 0.2 + 0.5 * work**1.3, 0.2 + work * (1 + 0.03 * x.count)


@dataclass
class Exchange:
    """Forward and backward exchange of D devices from their kernels and output values."""

    ms_per_million: float = 0.03
    latency_ms: float = 0.05
    per_peer_ms: float = 0.0
    waits: bool = True

    def __call__(self, forward_ms: np.ndarray, outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward exchange of every device in ms."""
        devices = len(outputs)
        if devices == 1:
            return np.zeros(1), np.zeros(1)
        sent = self.ms_per_million * outputs * (devices - 1) / devices
        transfer = self.latency_ms + self.per_peer_ms * (devices - 1) + 0.7 * sent.max() + 0.3 * sent
        return transfer + self.waits * (forward_ms.max() - forward_ms), 1.1 * transfer


@dataclass
class Law:
    """A cost law as a ``Profiler``."""

    kernel: Callable[[Loads], tuple[float, float]]
    exchange: Exchange = field(default_factory=Exchange)
    noise: float = 0.0
    """Relative deviation of every measured term."""
    step_only: bool = False
    """Whether nothing but the step is known."""
    seed: int = 0

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng(self.seed)

    def measure(self, task: PlacementTask, placement: Sequence[int]) -> CostBreakdown:
        """See ``Profiler.measure``."""
        forward, backward, outputs = (np.zeros(task.num_devices) for _ in range(3))
        for device in range(task.num_devices):
            shards = [shard for shard, where in zip(task.shards, placement, strict=True) if where == device]
            if shards:
                loads = Loads(shards)
                forward[device], backward[device] = self.kernel(loads)
                outputs[device] = loads.outputs.sum()
        exchange = self.exchange(forward, outputs)
        terms = [
            term * np.exp(self.noise * self._generator.standard_normal(len(term)))
            for term in (forward, *exchange, backward)
        ]
        names = ("forward_compute_ms", "forward_comms_ms", "backward_comms_ms", "backward_compute_ms")
        background = [device.background_ms for device in task.devices]
        cost = CostBreakdown(**dict(zip(names, terms, strict=True)), background_ms=background)
        return CostBreakdown(step_ms=cost.step_ms) if self.step_only else cost


LAWS: dict[str, Law] = {
    "sum of maxima": Law(sum_of_maxima),
    "max of sums": Law(max_of_sums),
    "fusion": Law(fusion),
    "cliff by weights": Law(weight_cliff),
    "cliff by working set": Law(working_set_cliff),
    "congestion": Law(congestion),
    "per table": Law(per_table),
    "quadratic in dim": Law(quadratic_dim),
    "largest table": Law(largest_table),
    "latency by rows": Law(rows_latency),
    "padded dim, noise 5 %": Law(padded_dim, noise=0.05),
    "exchange-bound, skew": Law(max_of_sums, Exchange(ms_per_million=1.0, latency_ms=0.5, per_peer_ms=0.1)),
    "step only": Law(fusion, step_only=True),
}
