"""Memory kept back for the rest of the model, on the host as well where the host holds the tables."""

from __future__ import annotations

from torch import nn
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ModuleSharder


def reserve(
    reservation: StorageReservation,
    topology: Topology,
    batch_size: int,
    module: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    constraints: dict[str, ParameterConstraints] | None,
) -> Topology:
    """The topology that is left for tables.

    TorchRec's reservations by percentage or absolute size touch HBM only, which a cpu topology does not have; there
    they are applied to the host's memory.

    Raises:
        PlannerError: nothing is left (names the reservation, the bytes there and the bytes reserved).
    """
    left: Topology = reservation.reserve(
        topology=topology, batch_size=batch_size, module=module, sharders=sharders, constraints=constraints
    )
    if topology.compute_device == "cpu":
        percentage = float(getattr(reservation, "_percentage", None) or 0.0)
        absolute = int(getattr(reservation, "_hbm_reserved_bytes", None) or 0)
        for device, whole in zip(left.devices, topology.devices, strict=True):
            device.storage.ddr -= int(percentage * whole.storage.ddr) + absolute
    for device, whole in zip(left.devices, topology.devices, strict=True):
        for memory, there, remains in (
            ("HBM", whole.storage.hbm, device.storage.hbm),
            ("host memory", whole.storage.ddr, device.storage.ddr),
        ):
            if remains < 0:
                raise PlannerError(
                    f"{type(reservation).__name__} reserves {there - remains:,} bytes of {memory} on rank "
                    f"{device.rank}, which has {there:,}: nothing is left for tables. Reserve less, reduce the batch "
                    f"size ({batch_size}) or the dense part of the model, or use devices with more memory",
                    PlannerErrorType.INSUFFICIENT_STORAGE,
                )
    return left
