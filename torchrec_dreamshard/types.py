"""The records that every part of the package shares.

All records are frozen and validated on construction: a bad value raises ``ValueError`` that names the
record, the field, the value and the rule. Every record converts to plain JSON values with ``to_dict`` and
back with ``from_dict``. Letters used in shapes throughout the package: ``S`` shards, ``D`` devices,
``F`` features, ``H`` hidden units, ``B`` a batch of tasks or candidate placements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchrec_dreamshard.validation import choice, integer, invalid, known_fields, number

NUM_REUSE_BINS = 17
"""Bins of a reuse histogram: (0,1], (1,2], (2,4], ..., (16384,32768], above 32768 (DreamShard, section 3)."""

DTYPE_BYTES: Mapping[str, float] = {
    "fp32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "int2": 0.25,
}
"""Bytes of one weight, by ``weight_dtype``."""

COMPUTE_DEVICES = ("cuda", "cpu")
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam", "none")
KERNELS = ("fused", "fused_uvm", "fused_uvm_caching", "dense", "quant", "quant_uvm", "quant_uvm_caching")

DEFAULT_HBM_BYTES = 32 * 1024**3  # TorchRec's default capacity of one accelerator
DEFAULT_DDR_BYTES = 128 * 1024**3  # TorchRec's default host memory of one rank


def _histogram(value: Any) -> tuple[float, ...] | None:
    """Validates a reuse histogram; all zeros means that nothing was looked up, which is None."""
    if value is None:
        return None
    rule = f"None or {NUM_REUSE_BINS} shares of at least 0 that add up to 1"
    try:
        bins = tuple(float(share) for share in value)
    except (TypeError, ValueError):
        raise invalid("ShardSpec", "reuse_histogram", value, rule) from None
    if len(bins) != NUM_REUSE_BINS or not all(math.isfinite(share) and share >= 0 for share in bins):
        raise invalid("ShardSpec", "reuse_histogram", value, rule)
    total = sum(bins)
    if total == 0:
        return None
    if abs(total - 1) > 0.01:
        raise invalid("ShardSpec", "reuse_histogram", value, rule)
    # Published histograms are rounded: only a sum that is visibly off is rescaled, so that round trips are exact.
    return bins if abs(total - 1) < 1e-9 else tuple(share / total for share in bins)


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """One shard of an embedding table that lives whole on one device.

    A table that is not split is one shard; a column-wise split gives several with smaller ``dim``.

    Raises:
        ValueError: a field is out of its range (names the field, the value and the rule).
    """

    rows: int
    """Rows of the shard (hash size)."""
    dim: int
    """Columns of the shard."""
    pooling_factor: float
    """Mean lookups per sample over all features of the table; fractions and 0 are legal."""
    name: str = ""
    """Name used in messages and plans."""
    batch_size: int = 65_536
    """Samples per step whose lookups reach the shard: the *global* batch if table-wise; default the paper's."""
    reuse_histogram: tuple[float, ...] | None = None
    """Share of unique ids by how often each is used in one batch (17 bins); None when unknown or without lookups."""
    weight_dtype: str = "fp32"
    """One of ``DTYPE_BYTES``."""
    optimizer: str = "sgd"
    """Optimizer fused into the backward pass, one of ``OPTIMIZERS``."""
    kernel: str = "fused"
    """Compute kernel as TorchRec names it, one of ``KERNELS``."""
    cache_load_factor: float | None = None
    """Share of the rows cached in HBM by a ``*_uvm_caching`` kernel, in (0, 1]; None elsewhere."""
    is_weighted: bool = False
    """Whether lookups carry per-sample weights."""
    is_pooled: bool = True
    """True for bags (one output row per sample and feature), False for sequences (one per lookup)."""
    num_features: int = 1
    """Features that share the table: a pooled shard gives ``num_features * dim`` output columns per sample."""
    hbm_bytes: int = None  # type: ignore[assignment]
    """Accelerator memory taken; default the weights' size. After construction always an int."""
    ddr_bytes: int = None  # type: ignore[assignment]
    """Host memory taken; default 0. A cpu task moves defaulted memory here. After construction always an int."""
    memory_is_default: bool = field(default=False, init=False, repr=False, compare=False)
    """Whether memory was left to its default (``PlacementTask`` then charges it to the task's own device)."""

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("rows", integer("ShardSpec", "rows", self.rows, 1))
        put("dim", integer("ShardSpec", "dim", self.dim, 1))
        put("pooling_factor", number("ShardSpec", "pooling_factor", self.pooling_factor))
        put("batch_size", integer("ShardSpec", "batch_size", self.batch_size, 1))
        put("num_features", integer("ShardSpec", "num_features", self.num_features, 1))
        put("reuse_histogram", _histogram(self.reuse_histogram))
        choice("ShardSpec", "weight_dtype", self.weight_dtype, tuple(DTYPE_BYTES))
        choice("ShardSpec", "optimizer", self.optimizer, OPTIMIZERS)
        choice("ShardSpec", "kernel", self.kernel, KERNELS)
        if self.cache_load_factor is not None:
            clf = number("ShardSpec", "cache_load_factor", self.cache_load_factor, exclusive=True)
            if clf > 1:
                raise invalid("ShardSpec", "cache_load_factor", self.cache_load_factor, "None or in (0, 1]")
            put("cache_load_factor", clf)
        if not isinstance(self.name, str):
            raise invalid("ShardSpec", "name", self.name, "a string")
        put("memory_is_default", self.hbm_bytes is None and self.ddr_bytes is None)
        hbm = self.hbm_bytes if self.hbm_bytes is not None else (self.weight_bytes if self.memory_is_default else 0)
        put("hbm_bytes", integer("ShardSpec", "hbm_bytes", hbm, 0))
        put("ddr_bytes", integer("ShardSpec", "ddr_bytes", 0 if self.ddr_bytes is None else self.ddr_bytes, 0))

    @property
    def weight_bytes(self) -> int:
        """Size of the weights alone, without optimizer state."""
        return math.ceil(self.rows * self.dim * DTYPE_BYTES[self.weight_dtype])

    @property
    def output_columns(self) -> float:
        """Output values per sample: what the exchange carries (``dim`` per bag, or per lookup of a sequence)."""
        return self.dim * (self.num_features if self.is_pooled else self.pooling_factor)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; defaults are left out, memory only when it was given."""
        out: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if not f.init or (f.name in ("hbm_bytes", "ddr_bytes") and self.memory_is_default):
                continue
            if f.name in ("rows", "dim", "pooling_factor", "hbm_bytes", "ddr_bytes") or value != f.default:
                out[f.name] = list(value) if isinstance(value, tuple) else value
        return out

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ShardSpec:
        """Inverse of ``to_dict``."""
        return cls(**known_fields(cls, values))


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One device: the memory left for shards, where it sits, and what it carries already."""

    hbm_bytes: int = DEFAULT_HBM_BYTES
    """Accelerator memory left for shards."""
    ddr_bytes: int = DEFAULT_DDR_BYTES
    """Host memory left for shards."""
    host: int = 0
    """Index of the host; devices of one host share its fast links."""
    background_ms: float = 0.0
    """Time per step of what the device carries anyway (row-wise and data-parallel shards)."""

    def __post_init__(self) -> None:
        for name in ("hbm_bytes", "ddr_bytes", "host"):
            object.__setattr__(self, name, integer("DeviceSpec", name, getattr(self, name), 0))
        object.__setattr__(self, "background_ms", number("DeviceSpec", "background_ms", self.background_ms))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DeviceSpec:
        """Inverse of ``to_dict``."""
        return cls(**known_fields(cls, values))


@dataclass(frozen=True, kw_only=True)
class HardwareSpec:
    """What the devices of a task are, as numbers that a cost model can learn from.

    The defaults are TorchRec's planner constants for an unnamed GPU; ``hardware.py`` has named devices.
    """

    compute_device: str = "cuda"
    """"cuda" or "cpu"."""
    name: str = "generic"
    """For people and for the analytic profiler; not an input of the networks."""
    memory_gb_s: float = 963.1
    """Bandwidth of the memory that holds the shards, 1e9 bytes/s."""
    cache_mb: float = 40.0
    """Last-level cache in 1e6 bytes (L2 of a GPU)."""
    intra_host_gb_s: float = 644.2
    """Bandwidth of one device's link to the others of its host, 1e9 bytes/s."""
    inter_host_gb_s: float = 13.4
    """Bandwidth of one device to other hosts, 1e9 bytes/s."""
    comms_dtype: str = "fp32"
    """Precision of the exchanged values, one of ``DTYPE_BYTES``."""

    def __post_init__(self) -> None:
        choice("HardwareSpec", "compute_device", self.compute_device, COMPUTE_DEVICES)
        choice("HardwareSpec", "comms_dtype", self.comms_dtype, tuple(DTYPE_BYTES))
        for name in ("memory_gb_s", "cache_mb", "intra_host_gb_s", "inter_host_gb_s"):
            object.__setattr__(self, name, number("HardwareSpec", name, getattr(self, name), exclusive=True))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HardwareSpec:
        """Inverse of ``to_dict``."""
        return cls(**known_fields(cls, values))


@dataclass(frozen=True)
class PlacementTask:
    """Shards to be spread over devices.

    A placement of the task is a sequence of S device indices, one per shard in the order of ``shards``.
    """

    shards: tuple[ShardSpec, ...]
    devices: tuple[DeviceSpec, ...]
    hardware: HardwareSpec = HardwareSpec()

    def __post_init__(self) -> None:
        shards, devices = tuple(self.shards), tuple(self.devices)
        if not devices:
            raise ValueError("PlacementTask.devices must hold at least one DeviceSpec, got none")
        for name, records, kind in (("shards", shards, ShardSpec), ("devices", devices, DeviceSpec)):
            for record in records:
                if not isinstance(record, kind):
                    raise invalid("PlacementTask", name, record, f"a sequence of {kind.__name__}")
        if self.hardware.compute_device == "cpu":
            shards = tuple(_on_host(shard) if shard.memory_is_default else shard for shard in shards)
        object.__setattr__(self, "shards", shards)
        object.__setattr__(self, "devices", devices)

    @classmethod
    def uniform(
        cls,
        shards: Sequence[ShardSpec],
        num_devices: int,
        *,
        hbm_bytes: int = DEFAULT_HBM_BYTES,
        ddr_bytes: int = DEFAULT_DDR_BYTES,
        devices_per_host: int | None = None,
        background_ms: float = 0.0,
        hardware: HardwareSpec | None = None,
    ) -> PlacementTask:
        """The common case: equal devices.

        Args:
            shards: S shards.
            num_devices: D.
            hbm_bytes: accelerator memory of each device.
            ddr_bytes: host memory of each device.
            devices_per_host: devices that share a host; None puts all on one.
            background_ms: see ``DeviceSpec``.
            hardware: what the devices are; None for a generic cuda device.
        """
        num_devices = integer("PlacementTask", "num_devices", num_devices, 1)
        per_host = (
            num_devices
            if devices_per_host is None
            else integer("PlacementTask", "devices_per_host", devices_per_host, 1)
        )
        devices = tuple(
            DeviceSpec(hbm_bytes=hbm_bytes, ddr_bytes=ddr_bytes, host=index // per_host, background_ms=background_ms)
            for index in range(num_devices)
        )
        return cls(tuple(shards), devices, hardware or HardwareSpec())

    @property
    def num_shards(self) -> int:
        """S."""
        return len(self.shards)

    @property
    def num_devices(self) -> int:
        """D."""
        return len(self.devices)

    def check_placement(self, placement: Sequence[int]) -> tuple[int, ...]:
        """Returns the placement as plain ints.

        Raises:
            ValueError: wrong length, or a device index out of range. Memory is not checked.
        """
        result = tuple(integer("placement", f"[{i}]", device, 0) for i, device in enumerate(placement))
        if len(result) != self.num_shards:
            raise ValueError(f"placement must have one device per shard, {self.num_shards}, got {len(result)}")
        if result and max(result) >= self.num_devices:
            raise ValueError(
                f"placement has device {max(result)}, but the task has devices 0 to {self.num_devices - 1}"
            )
        return result

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "shards": [shard.to_dict() for shard in self.shards],
            "devices": [device.to_dict() for device in self.devices],
            "hardware": self.hardware.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PlacementTask:
        """Inverse of ``to_dict``."""
        known = known_fields(cls, values)
        return cls(
            tuple(ShardSpec.from_dict(shard) for shard in known["shards"]),
            tuple(DeviceSpec.from_dict(device) for device in known["devices"]),
            HardwareSpec.from_dict(known.get("hardware", {})),
        )


def _on_host(shard: ShardSpec) -> ShardSpec:
    """The same shard with its defaulted memory in host memory."""
    moved = dataclasses.replace(shard, hbm_bytes=0, ddr_bytes=shard.weight_bytes)
    object.__setattr__(moved, "memory_is_default", True)
    return moved
