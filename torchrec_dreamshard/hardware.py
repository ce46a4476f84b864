"""Named devices and links.

Bandwidths are what a streaming kernel or an all-to-all reaches in practice, not the data sheet's peak; the
comment beside each number says where it comes from. Units: 1e9 bytes per second, 1e6 bytes.

References:
    [perf] https://github.com/owensgroup/ml_perf_model, analysis/utils.py at 5b2522a (measured, BSD-3-Clause).
    [recsys] https://github.com/NVIDIA/recsys-examples, dynamicemb benchmark at 43465ae (nominal peaks).
    [nccl] https://github.com/NVIDIA/nccl-tests, issues 178, 212 and 267 (maintainers' statements).
    [hugectr] https://github.com/NVIDIA-Merlin/HugeCTR, samples/dlrm/dgx_a100.py at 128c4c2.
    [torchrec] TorchRec 1.8, distributed/planner/constants.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from torchrec_dreamshard.types import HardwareSpec

_T = TypeVar("_T")

LINKS_GB_S: Mapping[str, float] = {
    "pcie": 4.4,  # 4 GPUs without NVLink, all-to-all: implied by published cost networks (aggregate, 4.1 to 4.5)
    "nvlink2": 120.0,  # V100, 6 links: 150 per direction (data sheet) x 0.8, the share that NVLink 3 and 4 reach
    "nvlink3": 227.5,  # A100: 260 of algorithm bandwidth on 8 GPUs [hugectr] x 7/8 that leaves the GPU
    "nvlink4": 370.0,  # H100 and H200: of 450 line rate [nccl 212]
    "network_100g": 12.1,  # one 100 Gb/s NIC: 12.5 x the 0.97 that [nccl 267] states for NDR
    "network_200g": 24.2,  # one 200 Gb/s NIC: 25 x 0.97
    "network_400g": 48.5,  # one 400 Gb/s NIC [nccl 267]
    "ethernet": 1.2,  # 10 Gb/s x 0.97, a plain cpu host
    "loopback": 0.43,  # ranks of one cpu host: fitted to measured exchanges of 4 and 8 processes (see benchmarks)
}
"""Effective bandwidth of one device over each kind of link, 1e9 bytes/s in each direction."""

HARDWARE: Mapping[str, HardwareSpec] = {
    spec.name: spec
    for spec in (
        HardwareSpec(
            name="v100",
            memory_gb_s=860.0,  # between 817 measured and 900 nominal [perf]; fitted to its kernels
            cache_mb=6.29,  # 6 MiB [perf]
            intra_host_gb_s=LINKS_GB_S["nvlink2"],
            inter_host_gb_s=LINKS_GB_S["network_100g"],
        ),
        HardwareSpec(
            name="a100",  # 80 GB SXM
            memory_gb_s=1835.0,  # nominal 2039 [recsys] x 0.9, the share measured on V100 (0.91) and H100 (0.89)
            cache_mb=41.9,  # 40 MiB [perf]
            intra_host_gb_s=LINKS_GB_S["nvlink3"],
            inter_host_gb_s=LINKS_GB_S["network_200g"],
        ),
        HardwareSpec(
            name="h100",  # 80 GB SXM
            memory_gb_s=2980.0,  # nominal 3350 [recsys] x 0.89, copy kernels on an H100 (TorchRec pull 4634)
            cache_mb=52.4,  # 50 MiB (data sheet)
            intra_host_gb_s=LINKS_GB_S["nvlink4"],
            inter_host_gb_s=LINKS_GB_S["network_400g"],
        ),
        HardwareSpec(
            name="h200",
            memory_gb_s=4270.0,  # nominal 4800 [recsys] x 0.89 as for H100
            cache_mb=52.4,  # the H100's die
            intra_host_gb_s=LINKS_GB_S["nvlink4"],
            inter_host_gb_s=LINKS_GB_S["network_400g"],
        ),
        HardwareSpec(
            name="cpu",
            compute_device="cpu",
            memory_gb_s=7.0,  # one thread on random rows: fitted to measured kernels of 4 one-thread processes
            cache_mb=32.0,  # last-level cache of a common server core complex
            intra_host_gb_s=LINKS_GB_S["loopback"],
            inter_host_gb_s=LINKS_GB_S["ethernet"],
        ),
    )
}
"""Named devices."""


@dataclass(frozen=True, kw_only=True)
class DeviceDetails:
    """What the analytic kernel model needs beyond ``HardwareSpec``."""

    cache_gb_s: float
    """Bandwidth of the last-level cache, 1e9 bytes/s."""
    host_link_gb_s: float
    """Bandwidth of kernels that read host memory in place, 1e9 bytes/s in each direction."""
    hot_use_us: float
    """Backward time per use of a row that all its uses wait for: their gradients are summed one after the other."""


_DETAILS: Mapping[str, DeviceDetails] = {
    "v100": DeviceDetails(
        cache_gb_s=2847.0,  # measured [perf]
        host_link_gb_s=10.5,  # PCIe 3: a quarter of the H100's
        hot_use_us=0.027,  # fitted to published cost networks of a GPU of that class (single tables of few lookups)
    ),
    "a100": DeviceDetails(
        cache_gb_s=2271.0,  # measured on the 40 GB card [perf]
        host_link_gb_s=21.0,  # PCIe 4: half of the H100's
        hot_use_us=0.018,  # between the two others
    ),
    "h100": DeviceDetails(
        cache_gb_s=5600.0,  # chipsandcheese.com, 2023-07-02
        host_link_gb_s=42.0,  # PCIe 5; fitted to tables in host memory [recsys]
        hot_use_us=0.012,  # fitted [recsys]
    ),
    "cpu": DeviceDetails(cache_gb_s=28.0, host_link_gb_s=7.0, hot_use_us=0.0),  # fitted; host memory is its own
}
_DETAILS = {**_DETAILS, "h200": _DETAILS["h100"]}  # the same die


def device_details(hardware: HardwareSpec) -> DeviceDetails:
    """Details of the named device; for other names in proportion to the memory's bandwidth, like an A100's."""
    if hardware.name in _DETAILS:
        return _DETAILS[hardware.name]
    cpu = hardware.compute_device == "cpu"
    return DeviceDetails(
        cache_gb_s=(4.0 if cpu else 1.5) * hardware.memory_gb_s,
        host_link_gb_s=(1.0 if cpu else 0.0115) * hardware.memory_gb_s,
        hot_use_us=0.0 if cpu else 0.018,
    )


def named_hardware(
    name: str, *, intra_host: str | None = None, inter_host: str | None = None, comms_dtype: str = "fp32"
) -> HardwareSpec:
    """Looks a device up, optionally with other links.

    Args:
        name: a key of ``HARDWARE``.
        intra_host: a key of ``LINKS_GB_S`` for the link between devices of one host; None for the usual one.
        inter_host: the same for the link between hosts.
        comms_dtype: see ``HardwareSpec``.

    Raises:
        ValueError: an unknown name; the message lists the known ones.
    """
    spec = _look_up(HARDWARE, name, "hardware")
    return dataclasses.replace(
        spec,
        comms_dtype=comms_dtype,
        intra_host_gb_s=spec.intra_host_gb_s if intra_host is None else _look_up(LINKS_GB_S, intra_host, "link"),
        inter_host_gb_s=spec.inter_host_gb_s if inter_host is None else _look_up(LINKS_GB_S, inter_host, "link"),
    )


def resolve_hardware(hardware: str | HardwareSpec) -> HardwareSpec:
    """``hardware`` itself, or the named device."""
    return named_hardware(hardware) if isinstance(hardware, str) else hardware


def _look_up(table: Mapping[str, _T], name: str, kind: str) -> _T:
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}; known are {', '.join(sorted(table))}")
    return table[name]
