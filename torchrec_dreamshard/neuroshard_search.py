"""A pre-train-and-search strategy in the spirit of NeuroShard (MLSys 2023, arXiv 2305.01868, section 3.3).

Outer beam: states are ways to split tables by columns; a step halves one table's columns, tried for the largest and
for the most expensive ones. Inner search: shards in descending predicted single cost, each onto the device whose
predicted fused cost becomes lowest, under a cap on the devices' sums of output columns; several caps are tried and the
predicted step decides. All greedy runs of a beam step run as one batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_dreamshard.cost_model import CostModel
from torchrec_dreamshard.features import TaskTensors, batch_tasks, placement_latents
from torchrec_dreamshard.packing import check_possible, repair
from torchrec_dreamshard.pool import with_dim
from torchrec_dreamshard.types import PlacementTask

_COLUMNS_MULTIPLE = 4
"""FBGEMM wants column counts that are multiples of 4."""


@dataclass(frozen=True, kw_only=True)
class NeuroShardConfig:
    """The search; the defaults are the paper's."""

    beam_width: int = 3
    """Ways to split that survive a step."""
    num_candidates: int = 10
    """Tables whose halving is tried in each: so many by size, and so many by predicted cost."""
    depth: int = 10
    """Halvings at most; 0 places whole tables."""
    caps: tuple[float, ...] = tuple(np.linspace(1.0, 1.5, 11).tolist())
    """Caps on a device's columns, in means over the devices."""


class ColumnPlan(NamedTuple):
    """A task whose tables may be split by columns, and where its shards go."""

    task: PlacementTask
    placement: tuple[int, ...]
    predicted_ms: float


def search_columns(task: PlacementTask, cost_model: CostModel, config: NeuroShardConfig | None = None) -> ColumnPlan:
    """Splits and places; deterministic.

    Args:
        task: its shards may be halved; halves are named ``<name>/0`` and ``<name>/1``.
        cost_model: judges, never measured.
        config: see ``NeuroShardConfig``.

    Returns:
        The plan with the lowest predicted step, memory respected.

    Raises:
        InfeasiblePlacementError: no placement of the task fits.
    """
    config = config or NeuroShardConfig()
    check_possible(task)
    if not task.shards:
        return ColumnPlan(task, (), 0.0)
    with torch.no_grad():
        beam = [_with_costs(plan, cost_model) for plan in _place_all([task], cost_model, config.caps)]
        best = beam[0].plan
        for _ in range(config.depth):
            splits = {split.shards: split for state in beam for split in _halvings(state, config.num_candidates)}
            if not splits:
                break
            plans = _place_all(list(splits.values()), cost_model, config.caps)
            plans.sort(key=lambda plan: plan.predicted_ms)
            beam = [_with_costs(plan, cost_model) for plan in plans[: config.beam_width]]
            best = min(best, beam[0].plan, key=lambda plan: plan.predicted_ms)
        placement = repair(best.task, best.placement)
        return ColumnPlan(best.task, placement, _predicted_ms(best.task, placement, cost_model))


def _predicted_ms(task: PlacementTask, placement: Sequence[int], cost_model: CostModel) -> float:
    tensors = batch_tasks([task])
    latents = placement_latents(cost_model.encode(tensors), torch.tensor([placement]), task.num_devices)
    return float(cost_model.predict(latents, tensors).step_ms)


class _State(NamedTuple):
    plan: ColumnPlan
    single_ms: Tensor
    """``S``: predicted cost of each shard alone."""


def _with_costs(plan: ColumnPlan, cost_model: CostModel) -> _State:
    tensors = batch_tasks([plan.task])
    return _State(plan, _single_ms(cost_model, cost_model.encode(tensors), tensors)[0])


def _halvings(state: _State, num_candidates: int) -> list[PlacementTask]:
    """The state's task with one table halved, for the largest and the most expensive tables."""
    shards = state.plan.task.shards
    splittable = np.array([shard.dim % (2 * _COLUMNS_MULTIPLE) == 0 for shard in shards])
    sizes = np.array([shard.hbm_bytes + shard.ddr_bytes for shard in shards], dtype=np.float64)
    chosen: dict[int, None] = {}
    for key in (sizes, state.single_ms.double().numpy()):
        order = [int(i) for i in np.argsort(-key, kind="stable") if splittable[i]]
        chosen.update(dict.fromkeys(order[:num_candidates]))
    return [_halve(state.plan.task, index) for index in chosen]


def _halve(task: PlacementTask, index: int) -> PlacementTask:
    shard = task.shards[index]
    halves = [with_dim(shard, shard.dim // 2, f"{shard.name}/{part}") for part in range(2)]
    return dataclasses.replace(task, shards=(*task.shards[:index], *halves, *task.shards[index + 1 :]))


def _place_all(tasks: Sequence[PlacementTask], cost_model: CostModel, caps: Sequence[float]) -> list[ColumnPlan]:
    """The inner search for B tasks with equally many shards and the same devices."""
    tensors = batch_tasks(tasks)
    encoded = cost_model.encode(tensors)
    order = _single_ms(cost_model, encoded, tensors).argsort(dim=1, descending=True, stable=True)
    placements, failed = _greedy(cost_model, encoded, order, _columns(tasks), tensors, caps)
    index = placements.unsqueeze(-1).expand(-1, -1, -1, encoded.shape[-1])
    shape = (*placements.shape[:2], tasks[0].num_devices, encoded.shape[-1])
    latents = encoded.new_zeros(shape).scatter_add(2, index, encoded[:, None].expand(-1, len(caps), -1, -1))
    step_ms = cost_model.predict(latents, tensors).step_ms.masked_fill(failed, torch.inf)
    cheapest = step_ms.argmin(dim=1)
    return [
        ColumnPlan(task, tuple(placements[row, cap].tolist()), float(step_ms[row, cap]))
        for row, (task, cap) in enumerate(zip(tasks, cheapest.tolist(), strict=True))
    ]


def _greedy(
    cost_model: CostModel, encoded: Tensor, order: Tensor, columns: Tensor, tensors: TaskTensors, caps: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """Greedy placements ``B x C x S`` under C caps, and whether each went beyond its cap or memory: ``B x C``."""
    batch, num_shards, hidden = encoded.shape
    num_caps, num_devices = len(caps), tensors.capacity_bytes.shape[1]
    hardware = tensors.hardware[:, None, None]
    latents = encoded.new_zeros(batch, num_caps, num_devices, hidden)
    free = tensors.capacity_bytes[:, None].repeat(1, num_caps, 1, 1)
    room = (columns.sum(dim=1)[:, None] * torch.tensor(caps, dtype=columns.dtype) / num_devices)[..., None]
    room = torch.maximum(room, columns.amax(dim=1)[:, None, None]).repeat(1, 1, num_devices)
    failed = torch.zeros(batch, num_caps, dtype=torch.bool)
    placements = torch.zeros(batch, num_caps, num_shards, dtype=torch.int64)
    rows = torch.arange(batch)
    for position in range(num_shards):
        shard = order[:, position]
        need, width = tensors.memory_bytes[rows, shard][:, None], columns[rows, shard][:, None]
        cost = cost_model.device_compute(latents + encoded[rows, shard][:, None, None], hardware).sum(dim=-1)
        in_memory = (free >= need[:, :, None]).all(dim=-1)
        fits = in_memory & (room >= width[..., None] * (1 - 1e-9))
        failed |= ~fits.any(dim=-1)
        # Beyond a cap, memory still counts; beyond memory the placement is repaired if it is ever used.
        allowed = torch.where(fits.any(dim=-1, keepdim=True), fits, in_memory)
        device = (cost + 1e12 * ~allowed).argmin(dim=-1, keepdim=True)
        latents.scatter_add_(
            2,
            device[..., None].expand(-1, -1, -1, hidden),
            encoded[rows, shard][:, None, None].expand(-1, num_caps, -1, -1),
        )
        free.scatter_add_(2, device[..., None].expand(-1, -1, -1, 2), -need[:, :, None].expand(-1, num_caps, -1, -1))
        room.scatter_add_(2, device, -width.expand(-1, num_caps)[..., None])
        placements.scatter_(2, shard[:, None, None].expand(-1, num_caps, -1), device)
    return placements, failed


def _single_ms(cost_model: CostModel, encoded: Tensor, tensors: TaskTensors) -> Tensor:
    """Predicted forward plus backward compute of each shard alone, ``B x S``."""
    return cost_model.device_compute(encoded, tensors.hardware[:, None]).sum(dim=-1)


def _columns(tasks: Sequence[PlacementTask]) -> Tensor:
    """Output values of each shard over the batch, ``B x S`` float64: what the exchange carries."""
    return torch.tensor(
        [[shard.output_columns * shard.batch_size for shard in task.shards] for task in tasks], dtype=torch.float64
    )
