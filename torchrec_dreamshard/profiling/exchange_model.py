"""Analytic time of the all-to-all that carries pooled outputs forward and their gradients back.

Device i holds outputs for the whole batch and sends each of the D devices its share, ``bytes_i / D``. Peers on its
own host are reached over one link, the others over another; links work at the same time and in both directions.
Nobody is done before the slowest link is. Links below ``SHARED_BELOW_GB_S`` go through the host's memory, which
all devices of the host share: there the mean load counts beside the largest.

The backward exchange carries the same bytes the other way and takes the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from torchrec_dreamshard.measurement import FloatArray
from torchrec_dreamshard.types import DeviceSpec, HardwareSpec

SHARED_BELOW_GB_S = 32.0  # a PCIe 4 x16 slot; NVLink is above
SHARED_SLOWEST_WEIGHT = 0.27  # weight of the largest load; published fits: 0.29 (PCIe), 0.24 (processes of one host)
SHARED_REFERENCE_DEVICES = 4  # devices for which the bandwidth of a shared link is stated (both published fits)
SHARED_START_MS = 0.19  # intercept of the published PCIe fit
START_MS = 0.03  # assumed: launch of a collective and its handshake over NVLink
PEER_MS = 0.001  # assumed: one more peer on the same host
FAR_PEER_MS = 0.002  # assumed: one more peer on another host


class AllToAll:
    """The exchange among the devices of one task.

    Args:
        devices: the D devices (their hosts).
        hardware: bandwidths.
    """

    def __init__(self, devices: Sequence[DeviceSpec], hardware: HardwareSpec) -> None:
        self.num_devices = len(devices)
        _, self._host = np.unique([device.host for device in devices], return_inverse=True)
        on_host = np.bincount(self._host)[self._host]
        self._num_hosts = int(self._host.max()) + 1
        self._near_peers, self._far_peers = on_host - 1, self.num_devices - on_host
        self._near_rate, self._far_rate = hardware.intra_host_gb_s * 1e6, hardware.inter_host_gb_s * 1e6
        crowd = int(on_host.max())
        self._shared = hardware.intra_host_gb_s < SHARED_BELOW_GB_S and crowd > 1
        self._crowding = math.sqrt(crowd / SHARED_REFERENCE_DEVICES)
        self._latency = SHARED_START_MS if self._shared else START_MS
        self._latency += PEER_MS * (crowd - 1) + FAR_PEER_MS * int(self._far_peers.max())

    def transfer_ms(self, output_bytes: FloatArray) -> FloatArray:
        """Time of one direction when all devices start together.

        Args:
            output_bytes: ``P x D``, bytes of output over the whole batch on each device of P placements.

        Returns:
            ``P``: ms, 0 without a peer or without any output.
        """
        if self.num_devices == 1:
            return np.zeros(len(output_bytes))
        share = output_bytes / self.num_devices
        total = share.sum(axis=1)
        if self._num_hosts == 1:
            host_total, far_ms = total[:, None], np.zeros(1)
        else:
            by_host = np.stack([share[:, self._host == index].sum(axis=1) for index in range(self._num_hosts)], axis=1)
            host_total = by_host[:, self._host]
            far = np.maximum(share * self._far_peers, total[:, None] - host_total)
            far_ms = far.max(axis=1) / self._far_rate
        near = np.maximum(share * self._near_peers, host_total - share)
        near_ms = near.max(axis=1) / self._near_rate
        if self._shared:
            mean_ms = near.mean(axis=1) / self._near_rate
            near_ms = self._crowding * (SHARED_SLOWEST_WEIGHT * near_ms + (1 - SHARED_SLOWEST_WEIGHT) * mean_ms)
        return np.asarray(np.where(total > 0, self._latency + np.maximum(near_ms, far_ms), 0.0))
