"""What plans cost under an agent: the bridge from TorchRec's options to the networks.

Shards that live whole on a device run in one fused kernel and exchange in one all-to-all: the agent predicts them
together. Row-wise, host-bound and data-parallel options run in kernels and collectives of their own, so their
predicted time is added to a device as background. All costs are in ms of one step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from torch import nn
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PartitionByType,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingType

from torchrec_dreamshard.measurement import TERMS, CostBreakdown, FloatArray
from torchrec_dreamshard.planner.adapter import OptionAdapter
from torchrec_dreamshard.types import PlacementTask, ShardSpec

if TYPE_CHECKING:
    from torchrec_dreamshard.agent import Agent

_ALL_REDUCE_LATENCY_MS = 0.02  # one ring of a few devices; small next to the launch costs of a step

_CPU_DENSE_SHARE, _DENSE_GRADIENT_PASSES = 0.35, 3.0  # fits 18 tables of 100 to 100,000 rows, FBGEMM 1.8, AMD EPYC
_CUDA_DENSE_SLOWDOWN = 2.0  # TorchRec 1.8: a dense kernel reaches half of HBM's bandwidth
_FP32_BYTES = 4
_ID_BYTES = 8  # TorchRec sends ids as int64

DATA_PARALLEL = ShardingType.DATA_PARALLEL.value

_Times = TypeVar("_Times", float, FloatArray)


def resolve_agent(agent: Agent | str | Path | None, compute_device: str) -> Agent:
    """The agent itself, one loaded by name or path, or the shipped one for the device.

    Raises:
        ValueError: neither an agent nor something that names one.
    """
    if agent is None or isinstance(agent, (str, Path)):
        from torchrec_dreamshard.agent import Agent as AgentClass

        return AgentClass.load(agent if agent is not None else ("cpu" if compute_device == "cpu" else "cuda"))
    if not (hasattr(agent, "place") and hasattr(agent, "predict")):
        raise ValueError(f"agent must be an Agent, a name, a path or None, got {type(agent).__name__}")
    return agent


def lives_whole(option: ShardingOption) -> bool:
    """Whether each shard sees all lookups of its columns, so that it may sit on any device."""
    return bool(
        option.partition_by == PartitionByType.DEVICE.value
        or option.sharding_type == ShardingType.TABLE_COLUMN_WISE.value
    )


class PlanCosts:
    """Predicted costs of plans on one topology.

    Args:
        agent: the learned costs.
        adapter: translates options.
        topology: the devices (capacities are read per task, not here).
    """

    def __init__(self, agent: Agent, adapter: OptionAdapter, topology: Topology) -> None:
        self.agent = agent
        self.adapter = adapter
        self.world_size = int(topology.world_size)
        self.hardware = adapter.hardware(topology)
        self._devices = adapter.devices(topology)
        self._singles: dict[ShardSpec, float] = {}
        self._background: dict[tuple[Any, ...], FloatArray] = {}

    def task(
        self,
        shards: Sequence[ShardSpec],
        background_ms: FloatArray | None = None,
        capacity: Sequence[tuple[int, int]] | None = None,
    ) -> PlacementTask:
        """A task on the topology's devices.

        Args:
            shards: S shards.
            background_ms: D values.
            capacity: HBM and host bytes left on each of D devices; None for the topology's own.
        """
        devices = list(self._devices)
        for index, device in enumerate(devices):
            changes: dict[str, Any] = {}
            if background_ms is not None:
                changes["background_ms"] = float(background_ms[index])
            if capacity is not None:
                changes["hbm_bytes"], changes["ddr_bytes"] = (max(0, int(left)) for left in capacity[index])
            devices[index] = dataclasses.replace(device, **changes) if changes else device
        return PlacementTask(tuple(shards), tuple(devices), self.hardware)

    def single_ms(self, specs: Iterable[ShardSpec]) -> dict[ShardSpec, float]:
        """Forward plus backward compute of each shard alone on a device."""
        wanted = list(dict.fromkeys(specs))
        missing = [spec for spec in wanted if spec not in self._singles]
        for start in range(0, len(missing), 512):
            part = missing[start : start + 512]
            alone = PlacementTask(tuple(part), (self._devices[0],) * len(part), self.hardware)
            cost = self.agent.predict(alone, range(len(part)))
            compute = _known(cost.compute_ms, "compute")
            self._singles.update(zip(part, compute.tolist(), strict=True))
        return {spec: self._singles[spec] for spec in wanted}

    def warm_up(self, options: Iterable[ShardingOption]) -> None:
        """Predicts the single shards of many options at once, which costs little more than one of them."""
        self.single_ms(spec for option in options for spec in self.adapter.shard_specs(option, self.world_size))

    def option_ms(self, option: ShardingOption) -> float:
        """Work of an option's busiest shard by itself: its kernel, and its own collective if it has one."""
        specs = self.adapter.shard_specs(option, self.world_size)
        kernel = max(self.single_ms(specs).values())
        if option.sharding_type != DATA_PARALLEL:
            return kernel
        return self._dense_ms(kernel, [option]) + self._all_reduce_ms(option)

    def background_ms(self, options: Sequence[ShardingOption]) -> FloatArray:
        """Time per device of options that run apart from the fused group; their shards' ranks are set.

        Returns:
            D values in ms.
        """
        total = np.zeros(self.world_size)
        groups: dict[str, list[ShardingOption]] = {}
        for option in options:
            groups.setdefault(option.sharding_type, []).append(option)
        for kind in sorted(groups):
            key = (kind, tuple(_identity(option) for option in groups[kind]))
            if key not in self._background:
                self._background[key] = self._group_ms(kind, groups[kind])
            total = total + self._background[key]
        return total

    def _group_ms(self, kind: str, options: Sequence[ShardingOption]) -> FloatArray:
        specs: list[ShardSpec] = []
        ranks: list[int] = []
        for option in options:
            specs.extend(self.adapter.shard_specs(option, self.world_size))
            ranks.extend(cast(int, shard.rank) for shard in option.shards)
        cost: CostBreakdown = self.agent.predict(self.task(specs), ranks)
        if kind == DATA_PARALLEL:  # no exchange of outputs; gradients are summed instead
            reduce_ms = _ALL_REDUCE_LATENCY_MS + sum(self._all_reduce_ms(option) for option in options)
            return self._dense_ms(_known(cost.compute_ms, "compute"), options) + reduce_ms
        return _known(cost.device_ms, "device")

    def _dense_ms(self, fused_ms: _Times, options: Sequence[ShardingOption]) -> _Times:
        """Kernels of replicated tables, which are dense, from what fused kernels would take for the same lookups.

        On a cpu a dense kernel is quicker by itself, but its gradient covers the whole table. On a GPU it is slower.
        """
        if self.hardware.compute_device != "cpu":
            return _CUDA_DENSE_SLOWDOWN * fused_ms
        passes = _DENSE_GRADIENT_PASSES * sum(_num_bytes(option) for option in options)
        return _CPU_DENSE_SHARE * fused_ms + passes / (self.hardware.memory_gb_s * 1e6)

    def _all_reduce_ms(self, option: ShardingOption) -> float:
        """A ring all-reduce of the dense gradient over the slowest link: ``2 (W-1)/W`` times its bytes."""
        if self.world_size == 1:
            return 0.0
        hosts = {device.host for device in self._devices}
        rate = self.hardware.inter_host_gb_s if len(hosts) > 1 else self.hardware.intra_host_gb_s
        return 2 * (self.world_size - 1) / self.world_size * _num_bytes(option) / (rate * 1e6)

    def breakdown(self, plan: Sequence[ShardingOption]) -> CostBreakdown:
        """Predicted cost of a plan with ranks.

        Raises:
            PlannerError: a shard has no rank or one outside the topology; the prediction is not finite.
        """
        specs: list[ShardSpec] = []
        ranks: list[int] = []
        apart = []
        for option in plan:
            check_ranks(option, self.world_size)
            if lives_whole(option):
                specs.extend(self.adapter.shard_specs(option, self.world_size))
                ranks.extend(cast(int, shard.rank) for shard in option.shards)
            else:
                apart.append(option)
        background = self.background_ms(apart) if apart else None
        if not specs:
            zeros = np.zeros(self.world_size)
            return CostBreakdown(**dict.fromkeys(TERMS, zeros), background_ms=background)  # type: ignore[arg-type]
        try:
            cost: CostBreakdown = self.agent.predict(self.task(specs, background), ranks)
        except ValueError as error:
            raise PlannerError(f"the agent's prediction is unusable: {error}", PlannerErrorType.OTHER) from error
        if cost.step_ms is None or not math.isfinite(cost.step_ms):
            raise PlannerError(f"the predicted step must be finite, got {cost.step_ms}", PlannerErrorType.OTHER)
        return self._with_input_exchange(cost, specs, ranks)

    def _with_input_exchange(
        self, cost: CostBreakdown, specs: Sequence[ShardSpec], ranks: Sequence[int]
    ) -> CostBreakdown:
        """Adds the exchange of ids to the background, at the price per byte of the predicted forward exchange.

        On GPUs TorchRec's training pipeline hides it behind the step before; on a cpu nothing does, and a replicated
        table, whose ids stay where they are, saves it.
        """
        comms, step_ms = cost.forward_comms_ms, cost.step_ms
        if self.hardware.compute_device != "cpu" or self.world_size == 1 or comms is None or step_ms is None:
            return cost
        outputs = [_FP32_BYTES * spec.batch_size * spec.output_columns for spec in specs]
        ids = [_ID_BYTES * spec.batch_size * spec.pooling_factor for spec in specs]
        sent, received = (np.bincount(ranks, weights, self.world_size).max() for weights in (outputs, ids))
        # The device that waits least shows what the exchange itself takes; all wait for the one with most ids.
        input_ms = float(comms.min()) * received / max(sent, 1.0)
        background = np.zeros(self.world_size) if cost.background_ms is None else cost.background_ms
        return dataclasses.replace(cost, background_ms=background + input_ms, step_ms=step_ms + input_ms)


def _num_bytes(option: ShardingOption) -> float:
    return float(option.tensor.numel() * option.tensor.element_size())


def _identity(option: ShardingOption) -> tuple[Any, ...]:
    """What an option's time as background depends on within one plan."""
    ranks = tuple(shard.rank for shard in option.shards)
    return (option.path, option.name, option.compute_kernel, option.num_shards, option.batch_size, ranks)


def check_ranks(option: ShardingOption, world_size: int) -> None:
    """Refuses a shard without a rank of the topology.

    Raises:
        PlannerError: names the table, the rank and the world size.
    """
    for index, shard in enumerate(option.shards):
        if shard.rank is None or not 0 <= shard.rank < world_size:
            raise PlannerError(
                f"shard {index} of table {option.fqn.lstrip('.')} has rank {shard.rank}, but the topology has ranks "
                f"0 to {world_size - 1}: every shard needs one of them",
                PlannerErrorType.INVALID_RANK_ASSIGNMENT,
            )


def _known(values: FloatArray | None, name: str) -> FloatArray:
    if values is None or not np.all(np.isfinite(values)):
        raise PlannerError(f"the agent predicts no finite {name} times: train it on both directions")
    return values


class CostSource:
    """Where the parts of one planner get their costs, so that each shard is predicted once.

    Args:
        agent: see ``resolve_agent``; loaded when first needed.
        constraints: by table name, for what TorchRec's options do not carry.
        reuse_histograms: by table name, see ``OptionAdapter``.
    """

    def __init__(
        self,
        agent: Agent | str | Path | None = None,
        *,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        reuse_histograms: Mapping[str, Sequence[float]] | None = None,
    ) -> None:
        self._agent = agent
        self._resolved: dict[str, Agent] = {}
        self.adapter = OptionAdapter(constraints, reuse_histograms)
        self._costs: dict[tuple[Any, ...], PlanCosts] = {}

    @classmethod
    def of(cls, agent: Agent | CostSource | str | Path | None) -> CostSource:
        """The source itself, or one around an agent."""
        return agent if isinstance(agent, CostSource) else cls(agent)

    def bind(self, sharders: Iterable[ModuleSharder[nn.Module]]) -> None:
        """Forgets earlier plans and reads what the sharders know."""
        self._costs.clear()
        self.adapter.bind(sharders)

    def agent(self, compute_device: str) -> Agent:
        """The agent for a kind of device."""
        if compute_device not in self._resolved:
            self._resolved[compute_device] = resolve_agent(self._agent, compute_device)
        return self._resolved[compute_device]

    def on(self, topology: Topology) -> PlanCosts:
        """Costs on a topology; equal topologies share predictions."""
        key = (
            topology.compute_device,
            topology.world_size,
            topology.intra_group_size,
            topology.hbm_mem_bw,
            topology.ddr_mem_bw,
            topology.intra_host_bw,
            topology.inter_host_bw,
        )
        if key not in self._costs:
            self._costs[key] = PlanCosts(self.agent(topology.compute_device), self.adapter, topology)
        return self._costs[key]
