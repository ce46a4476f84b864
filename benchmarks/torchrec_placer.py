"""TorchRec's own planner as a strategy: whole tables only, its estimates, its partitioners."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, MemoryBalancedPartitioner, SortBy
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import Partitioner, PlannerError, Topology
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_dreamshard import InfeasiblePlacementError, PlacementTask

PARTITIONERS: dict[str, Callable[[], Partitioner]] = {
    "torchrec_default": lambda: GreedyPerfPartitioner(),
    "torchrec_by_perf": lambda: GreedyPerfPartitioner(sort_by=SortBy.PERF),
    "torchrec_memory_balanced": lambda: MemoryBalancedPartitioner(),
}

_DATA_TYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16}


def place_with_torchrec(task: PlacementTask, make_partitioner: Callable[[], Partitioner]) -> tuple[int, ...]:
    """Places whole tables with ``EmbeddingShardingPlanner``.

    Args:
        task: pooled fused shards on equal devices, one feature each.
        make_partitioner: makes TorchRec's partitioner.

    Raises:
        InfeasiblePlacementError: TorchRec finds no plan.
    """
    names = [f"t{index}" for index in range(task.num_shards)]
    tables = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=shard.dim,
            num_embeddings=shard.rows,
            feature_names=[name],
            data_type=_DATA_TYPES[shard.weight_dtype],
        )
        for name, shard in zip(names, task.shards, strict=True)
    ]
    module = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    constraints = {
        name: ParameterConstraints(
            sharding_types=[ShardingType.TABLE_WISE.value],
            compute_kernels=[EmbeddingComputeKernel.FUSED.value],
            pooling_factors=[max(shard.pooling_factor, 1e-3)],
        )
        for name, shard in zip(names, task.shards, strict=True)
    }
    hosts = len({device.host for device in task.devices})
    topology = Topology(
        world_size=task.num_devices,
        local_world_size=task.num_devices // hosts,
        compute_device=task.hardware.compute_device,
        hbm_cap=task.devices[0].hbm_bytes,
        ddr_cap=task.devices[0].ddr_bytes,
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=task.shards[0].batch_size // task.num_devices,
        constraints=constraints,
        partitioner=make_partitioner(),
        storage_reservation=FixedPercentageStorageReservation(0.0),
        debug=False,
    )
    sharders: list[ModuleSharder[torch.nn.Module]] = [EmbeddingBagCollectionSharder()]  # type: ignore[list-item]
    try:
        plan = planner.plan(module, sharders)
    except PlannerError as error:
        raise InfeasiblePlacementError(f"TorchRec finds no plan: {str(error).splitlines()[0]}") from None
    ranks = {name: sharding.ranks[0] for module_plan in plan.plan.values() for name, sharding in module_plan.items()}
    return tuple(int(ranks[name]) for name in names)
