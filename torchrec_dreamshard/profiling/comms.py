"""Exchanges between devices: what an all-to-all of pooled embeddings costs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchrec_dreamshard.types import DTYPE_BYTES, PlacementTask

FloatArray = npt.NDArray[np.float64]


def output_values(task: PlacementTask, placement: Sequence[int]) -> FloatArray:
    """Pooled output values that each device computes for the global batch, ``D`` numbers."""
    values = np.zeros(task.num_devices)
    for shard, device in zip(task.shards, placement, strict=True):
        values[device] += shard.output_columns * shard.batch_size
    return values


def modelled_exchange_ms(
    task: PlacementTask, placement: Sequence[int], forward_ms: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """What the exchange would cost by the bandwidths of ``task.hardware``, for when it cannot be measured.

    A device sends every device an equal share of its output values, and its link carries the larger of what it
    sends and receives, inside the host and between hosts one after the other. All devices leave an exchange
    when the slowest link is done; the forward one starts when the slowest kernel is done, the backward one at
    once. There is no cost per message, so small exchanges are too cheap.

    Args:
        task: the task.
        placement: S device indices.
        forward_ms: ``D``, when each device's forward kernel is done.

    Returns:
        Forward and backward exchange of each device, ``D`` each, the forward one with the wait in it.
    """
    hardware, num_devices = task.hardware, task.num_devices
    hosts = np.array([device.host for device in task.devices])
    near = hosts[:, None] == hosts[None, :]
    sent_bytes = np.repeat(output_values(task, placement)[:, None], num_devices, axis=1) / num_devices
    sent_bytes *= DTYPE_BYTES[hardware.comms_dtype]
    np.fill_diagonal(sent_bytes, 0.0)
    link_ms = np.zeros(num_devices)
    for mask, gb_s in ((near, hardware.intra_host_gb_s), (~near, hardware.inter_host_gb_s)):
        carried = sent_bytes * mask
        link_ms += np.maximum(carried.sum(axis=1), carried.sum(axis=0)) / (gb_s * 1e6)
    exchange_ms = np.full(num_devices, link_ms.max())
    return forward_ms.max() - forward_ms + exchange_ms, exchange_ms
