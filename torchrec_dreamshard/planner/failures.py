"""The error when no plan exists: which table, how many bytes, and what can be done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchrec.distributed.planner.types import PlannerError, PlannerErrorType, ShardingOption, Storage, Topology
from torchrec.distributed.planner.utils import storage_repr_in_gb

from torchrec_dreamshard.planner.choices import capacities, fits_alone, group_options, largest_shard
from torchrec_dreamshard.planner.ledger import MEMORIES

if TYPE_CHECKING:
    from torchrec_dreamshard.planner.search import Search

_NAMED = 3  # tables named in one error

_WAYS_OUT = {
    "cpu": (
        "allow column_wise (a smaller min_partition gives narrower shards), or row_wise, which an "
        "EmbeddingBagCollection takes on a cpu where sharding_types name it"
    ),
    "cuda": (
        "allow column_wise (a smaller min_partition gives narrower shards), row_wise or table_row_wise; or a kernel "
        "that keeps the weights elsewhere: fused_uvm_caching (host memory with a cache in HBM, whose size is "
        "cache_params.load_factor), fused_uvm (host memory alone) or key_value (SSD)"
    ),
}


def no_plan_error(search: Search, topology: Topology, constraint: Topology, batch_size: int) -> PlannerError:
    """TorchRec's error for a model without a plan, with the same type, led by what did not fit.

    Args:
        search: the failed search.
        topology: the devices as given.
        constraint: the devices after the reservation.
        batch_size: samples per rank.
    """
    there = Storage(0, 0, 0)
    for device in constraint.devices:
        there += device.storage
    needed = search.lowest_storage
    too_large = needed is not None and not needed.fits_in(there)
    reason = str(search.last_error) if search.last_error is not None else "no proposal was made"
    reason = too_large_tables(search.space, constraint) or reason
    text = (
        f"Unable to find a plan: {reason}\n"
        f"{search.num_proposals} proposals were tried. All tables need {storage_repr_in_gb(needed)}, "
        f"{storage_repr_in_gb(there)} are there for them on {topology.world_size} devices of "
        f"{storage_repr_in_gb(topology.devices[0].storage)} each, after the reservation.\n"
        "Possible solutions:\n"
        f"  1) more devices (now {topology.world_size}) or devices with more memory\n"
        "  2) smaller tables, or weights of lower precision\n"
        f"  3) a smaller batch (now {batch_size} samples per rank) or storage reservation\n"
        f"  4) fewer constraints for the table named above: {_WAYS_OUT.get(topology.compute_device, _WAYS_OUT['cuda'])}"
    )
    kind = PlannerErrorType.INSUFFICIENT_STORAGE if too_large else PlannerErrorType.STRICT_CONSTRAINTS
    return PlannerError(text, kind)


def too_large_tables(space: Sequence[ShardingOption], constraint: Topology) -> str:
    """Names the tables of which no option fits on the devices, even alone; empty where there are none."""
    capacity = capacities(constraint)
    lines = []
    for (path, name), variants in group_options(space).items():
        if any(fits_alone(option, capacity) for option in variants):
            continue
        plain, finest = variants[0], min(variants, key=lambda option: float(largest_shard(option).sum()))
        memory = int((largest_shard(plain) - capacity.max(axis=0)).argmax())
        need = int(largest_shard(plain)[memory])
        best = ""
        if finest is not plain:
            best = (
                f", or as little as {int(largest_shard(finest)[memory]):,} per shard as {finest.sharding_type} "
                f"({finest.compute_kernel}) in {finest.num_shards}"
            )
        lines.append(
            f"table {f'{path}.{name}'.lstrip('.')} needs {need:,} bytes of {MEMORIES[memory]} as {plain.sharding_type} "
            f"({plain.compute_kernel}){best}, but no device has more than {int(capacity[:, memory].max()):,}"
        )
    more = f"; and {len(lines) - _NAMED} tables more" if len(lines) > _NAMED else ""
    return "; ".join(lines[:_NAMED]) + more
