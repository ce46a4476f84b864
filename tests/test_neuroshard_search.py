"""The search over column halvings."""

import dataclasses

import pytest
import torch

from torchrec_dreamshard.cost_model import CostModel, CostPrediction
from torchrec_dreamshard.errors import InfeasiblePlacementError
from torchrec_dreamshard.features import SHARD_INDEX
from torchrec_dreamshard.neuroshard_search import NeuroShardConfig, search_columns
from torchrec_dreamshard.pool import load_public_pool, plant_capacity, sample_tasks
from torchrec_dreamshard.types import PlacementTask, ShardSpec


class ByColumns(CostModel):
    """A device costs ``dim * pooling`` of its shards plus ``fixed`` for each; the step is the slowest device."""

    latent_dim = 1

    def __init__(self, fixed=0.0):
        super().__init__()
        self.fixed = fixed

    def encode(self, tasks):
        columns = tasks.shard_features[..., SHARD_INDEX["log_dim"]].exp()
        lookups = tasks.shard_features[..., SHARD_INDEX["log1p_pooling"]].expm1()
        return ((columns * lookups + self.fixed) * tasks.shard_mask).unsqueeze(-1)

    def device_compute(self, latents, hardware):
        return torch.cat([latents / 2, latents / 2], dim=-1)

    def combine(self, compute, latents, tasks):
        zero = torch.zeros_like(compute[..., 0])
        return CostPrediction(compute[..., 0], zero, zero, compute[..., 1], compute.sum(-1).amax(-1))

    def compute_std(self, latents, hardware):
        return torch.zeros(latents.shape[:-1])


def giant_and_small(dim=64):
    shards = [ShardSpec(rows=1000, dim=dim, pooling_factor=10, name="giant")]
    shards += [ShardSpec(rows=100, dim=4, pooling_factor=1, name=f"small_{i}") for i in range(4)]
    return PlacementTask.uniform(shards, 4)


def test_halves_the_table_that_holds_everybody_up():
    plan = search_columns(giant_and_small(), ByColumns())
    giants = [
        (shard, device) for shard, device in zip(plan.task.shards, plan.placement, strict=True) if "giant" in shard.name
    ]
    assert sum(shard.dim for shard, _ in giants) == 64
    assert len({device for _, device in giants}) == 4
    assert plan.predicted_ms == pytest.approx(164, rel=1e-3)


def test_does_not_halve_when_parts_cost_more():
    plan = search_columns(giant_and_small(), ByColumns(fixed=1000.0))
    assert plan.task == giant_and_small()


def test_depth_zero_places_whole_tables():
    task = giant_and_small()
    plan = search_columns(task, ByColumns(), NeuroShardConfig(depth=0))
    assert plan.task == task
    assert plan.predicted_ms == pytest.approx(640, rel=1e-3)


def test_indivisible_columns_stay_whole():
    assert search_columns(giant_and_small(dim=12), ByColumns()).task == giant_and_small(dim=12)


def test_more_depth_is_never_worse_and_the_result_is_deterministic():
    (task,) = sample_tasks(load_public_pool(), 1, 20, 4, dims=(4, 128), seed=3)
    plans = [search_columns(task, ByColumns(fixed=5.0), NeuroShardConfig(depth=depth)) for depth in (0, 3, 3)]
    assert plans[1].predicted_ms <= plans[0].predicted_ms
    assert plans[1] == plans[2]
    assert sum(shard.weight_bytes for shard in plans[1].task.shards) == sum(s.weight_bytes for s in task.shards)


def test_memory_is_respected():
    (task,) = sample_tasks(load_public_pool(), 1, 24, 4, dims=(4, 64), seed=5)
    tight, _ = plant_capacity(task, 0.97)
    plan = search_columns(tight, ByColumns(), NeuroShardConfig(depth=1))
    for device, spec in enumerate(plan.task.devices):
        used = sum(s.hbm_bytes for s, where in zip(plan.task.shards, plan.placement, strict=True) if where == device)
        assert used <= spec.hbm_bytes
    none = dataclasses.replace(task, devices=PlacementTask.uniform((), 4, hbm_bytes=1).devices)
    with pytest.raises(InfeasiblePlacementError):
        search_columns(none, ByColumns())


def test_task_without_shards():
    assert search_columns(PlacementTask.uniform((), 2), ByColumns()).placement == ()
