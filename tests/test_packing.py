from __future__ import annotations

import numpy as np
import pytest
from placement_tasks import fits, planted_task
from placer_contract import shard

from torchrec_dreamshard.errors import InfeasiblePlacementError
from torchrec_dreamshard.packing import place_greedily, repair
from torchrec_dreamshard.types import PlacementTask


def test_a_placement_that_fits_is_left_alone():
    task = planted_task(12, 3, 0.5)
    placement = place_greedily(task, np.ones(12))
    assert repair(task, placement) == placement


def test_repair_changes_little():
    task = PlacementTask.uniform([shard(f"s{i}", 10) for i in range(12)], 4, hbm_bytes=40)
    placement = (0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3)
    fixed = repair(task, placement)
    assert fits(task, fixed)
    assert sum(a != b for a, b in zip(placement, fixed, strict=True)) <= 4


def test_ties_between_ways_to_fit_are_broken_by_cost():
    shards = [shard("large", 100), shard("a", 50), shard("b", 50), shard("c", 50), shard("d", 50)]
    task = PlacementTask.uniform(shards, 2, hbm_bytes=150)
    fixed = repair(task, (0, 0, 0, 1, 1), np.array([1.0, 9.0, 2.0, 2.0, 2.0]))
    assert fits(task, fixed)
    # The device of the large shard takes one other: the costly one makes the split most even.
    assert fixed[1] == fixed[0]


@pytest.mark.parametrize("num_shards, num_devices", [(12, 2), (60, 16), (400, 64)])
def test_planted_tasks_of_many_sizes(num_shards, num_devices):
    for fill in (0.92, 0.98):
        task = planted_task(num_shards, num_devices, fill, seed=3)
        assert fits(task, place_greedily(task, [s.pooling_factor for s in task.shards]))


def test_nothing_fits_on_a_single_device():
    task = PlacementTask.uniform([shard("a", 60), shard("b", 60)], 1, hbm_bytes=100)
    with pytest.raises(InfeasiblePlacementError, match="20 bytes are missing"):
        repair(task, (0, 0))
