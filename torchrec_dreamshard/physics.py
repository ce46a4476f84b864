"""The physical side of a kernel's cost: quantities that add up over a device's shards, and non-negative fits.

A fused lookup launches once, walks over tables, samples and lookups, moves rows and outputs through memory, and
its backward pass sorts the ids and updates each distinct row once. Every such quantity is non-negative and sums
over shards, so a non-negative combination of them grows with load whatever the coefficients. The quantities
follow the traffic formulas of "Building a Performance Model for Deep Learning Recommendation Model Training on
GPUs" (arXiv 2201.07821) and FBGEMM's own byte counts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchrec_dreamshard.features import HARDWARE_INDEX, SHARD_INDEX
from torchrec_dreamshard.measurement import FloatArray
from torchrec_dreamshard.types import KERNELS

LOAD_QUANTITIES: tuple[str, ...] = (
    "tables",
    "bags",
    "lookups",
    "unique_ids",
    "read_ms",
    "unique_ms",
    "narrow_ms",
    "sort",
    "output_ms",
    "state_ms",
    "host_memory_ms",
    "dense_ms",
    "longest_bag",
    "hottest_uses",
    "output_values",
    "weight_gb",
)
"""Names of the P quantities. ``_ms`` are bytes over the hardware's memory bandwidth, the others are in millions
(``tables`` is a plain count, ``longest_bag`` in lookups, ``hottest_uses`` in thousands)."""

NUM_KERNEL_QUANTITIES = LOAD_QUANTITIES.index("longest_bag")
"""P', the first so many quantities: what a kernel's cost is additive in. Bags and hottest rows are walked serially,
so that their largest value counts, and output values are what the exchange carries."""

LOAD_INDEX = {name: index for index, name in enumerate(LOAD_QUANTITIES)}

_SECTOR_BYTES = 128.0  # a GPU fetches rows in lines of this size, however narrow they are
_HOST_LINK_SLOWDOWN = 28.0  # TorchRec's planner: HBM over the link to host memory, 897 / 32 GiB/s
_DENSE_KERNELS = tuple(SHARD_INDEX[f"kernel_{name}"] for name in KERNELS if name == "dense")


def load_quantities(features: Tensor, hardware: Tensor) -> Tensor:
    """Physical quantities of shards.

    Args:
        features: ``... x F`` raw features of real shards.
        hardware: ``... x K`` raw features of the hardware, broadcast against the shards.

    Returns:
        ``... x P``, all at least 0.
    """

    def log(name: str) -> Tensor:
        return features[..., SHARD_INDEX[name]]

    bytes_per_ms = torch.exp(hardware[..., HARDWARE_INDEX["log_memory_gb_s"]]) * 1e6
    lookups, unique = torch.expm1(log("log1p_lookups")), torch.expm1(log("log1p_unique_ids"))
    read, unique_bytes = torch.expm1(log("log1p_read_bytes")), torch.expm1(log("log1p_unique_bytes"))
    output = torch.expm1(log("log1p_output_values"))
    row_bytes = torch.exp(log("log_dim")) * log("weight_dtype_bytes")
    dense = features[..., _DENSE_KERNELS].sum(dim=-1)
    quantities = (
        torch.ones_like(lookups),
        torch.exp(log("log_batch") + log("log_num_features")) / 1e6,
        lookups / 1e6,
        unique / 1e6,
        read / bytes_per_ms,
        unique_bytes / bytes_per_ms,
        lookups * (_SECTOR_BYTES - row_bytes).clamp(min=0) / bytes_per_ms,
        lookups * log("log1p_lookups") / 1e7,
        4.0 * output / bytes_per_ms,
        unique * torch.expm1(log("log1p_state_bytes")) / bytes_per_ms,
        unique_bytes * (1 - log("cached_share")) * _HOST_LINK_SLOWDOWN / bytes_per_ms,
        dense * torch.exp(log("log_weight_bytes")) / bytes_per_ms,
        torch.expm1(log("log1p_pooling")),
        torch.expm1(log("log1p_hottest_uses")) / 1e3,
        output / 1e6,
        torch.exp(log("log_weight_bytes")) * log("cached_share") / 1e9,
    )
    return torch.stack(quantities, dim=-1).clamp(min=0)


def fit_nonnegative(matrix: FloatArray, target: FloatArray, *, ridge: float = 1e-6) -> FloatArray:
    """Non-negative least squares by the active-set method of Lawson and Hanson (1974, chapter 23).

    Args:
        matrix: ``N x P``.
        target: ``N``.
        ridge: share of each column's own norm added to its diagonal, which spreads the weight of equal columns.

    Returns:
        ``P`` coefficients of at least 0 that minimise ``|matrix x - target|**2``.
    """
    norms = np.sqrt((matrix**2).sum(axis=0))
    used = np.flatnonzero(norms > 0)
    solution = np.zeros(matrix.shape[1])
    if not len(used):
        return solution
    scaled = matrix[:, used] / norms[used]
    gram = scaled.T @ scaled + ridge * np.eye(len(used))
    right = scaled.T @ target
    x, free = np.zeros(len(used)), np.zeros(len(used), dtype=bool)
    for _ in range(10 * len(used)):
        slope = np.where(free, -np.inf, right - gram @ x)
        if free.all() or slope.max() <= 1e-10 * np.abs(right).max():
            break
        free[slope.argmax()] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.solve(gram[np.ix_(free, free)], right[free])
            negative = free & (trial <= 0)
            if not negative.any():
                break
            # As far towards the trial as all stay non-negative; what reaches 0 is no longer free.
            share = (x[negative] / (x[negative] - trial[negative])).min()
            x = x + share * (trial - x)
            free &= x > 1e-15 * max(np.abs(x).max(), 1e-300)
            x[~free] = 0.0
        x = trial
    solution[used] = x / norms[used]
    return solution
