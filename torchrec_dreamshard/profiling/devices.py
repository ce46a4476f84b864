"""What the device of a measurement is: its model, the named hardware that it is closest to, the versions around it."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import platform
import socket
import subprocess
from typing import Any

import torch

from torchrec_dreamshard.hardware import HARDWARE

_GPU_STATE = ("clocks.sm", "clocks.mem", "temperature.gpu", "clocks_throttle_reasons.active")

logger = logging.getLogger(__name__)


def named_device(device: torch.device) -> str:
    """The name in ``hardware.HARDWARE`` that a device's model contains; "cpu" for a cpu.

    Raises:
        ValueError: no name fits.
    """
    if device.type == "cpu":
        return "cpu"
    model = device_name(device)
    found = next((name for name in HARDWARE if name in model.lower()), None)
    if found is None:
        raise ValueError(f"no named hardware fits {model!r}: name the closest of {', '.join(HARDWARE)} yourself")
    return found


@functools.cache
def device_name(device: torch.device) -> str:
    """Model of a device, for example "NVIDIA H200" or "AMD EPYC"."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


def host_name() -> str:
    """Name of this host: what has the same name shares links that are faster than the network.

    A network namespace other than the system's own counts as a host of its own, as what leaves it goes over a link.
    """
    name = socket.gethostname()
    try:
        own, first = (os.stat(f"/proc/{process}/ns/net").st_ino for process in ("self", "1"))
    except OSError:  # another user's process: not to be told
        return name
    return name if own == first else f"{name}/net:{own}"


@functools.cache
def installed_versions() -> dict[str, str]:
    """Versions of the packages that a measurement depends on."""
    found = {}
    for package in ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec_dreamshard"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def device_state(device: torch.device) -> dict[str, Any]:
    """What may disturb a measurement right now: load of the host, clocks and throttling of a GPU."""
    if device.type == "cpu":
        return {"load": round(os.getloadavg()[0], 2)}
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={uuid}", f"--query-gpu={','.join(_GPU_STATE)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("clocks of %s are not known: %s", device, error)
        return {}
    return dict(zip(_GPU_STATE, (value.strip() for value in answer.split(",")), strict=False))
