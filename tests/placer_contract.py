"""What every placer must do. A test module subclasses ``PlacerContract`` and gives it a ``placer`` fixture.

A placer is a callable ``placer(task, seed) -> placement``.
"""

from __future__ import annotations

import pytest
from placement_tasks import fits, planted_task, random_task

from torchrec_dreamshard.errors import InfeasiblePlacementError
from torchrec_dreamshard.types import DeviceSpec, PlacementTask, ShardSpec


def shard(name, hbm_bytes, ddr_bytes=0, **kwargs):
    values = {"rows": 100, "dim": 8, "pooling_factor": 2.0, **kwargs}
    return ShardSpec(name=name, hbm_bytes=hbm_bytes, ddr_bytes=ddr_bytes, **values)


class PlacerContract:
    """Subclass it, with a fixture ``placer``."""

    @pytest.mark.parametrize("num_devices", [1, 2, 3, 8, 16, 128])
    def test_places_every_shard_on_a_device(self, placer, num_devices):
        task = random_task(24, num_devices, seed=num_devices)
        placement = placer(task, 0)
        assert isinstance(placement, tuple) and all(type(device) is int for device in placement)
        assert task.check_placement(placement) == placement
        assert fits(task, placement)

    def test_the_same_seed_gives_the_same_placement(self, placer):
        task = random_task(20, 4, seed=5)
        assert placer(task, 3) == placer(task, 3)

    def test_a_task_without_shards(self, placer):
        assert placer(PlacementTask.uniform([], 3), 0) == ()

    def test_shards_without_lookups(self, placer):
        task = PlacementTask.uniform([shard(f"s{i}", 10, pooling_factor=0) for i in range(5)], 2, hbm_bytes=30)
        assert fits(task, placer(task, 0))

    @pytest.mark.parametrize("both_memories", [False, True])
    @pytest.mark.parametrize("fill", [0.92, 0.95, 0.98])
    def test_tight_tasks_are_placed(self, placer, fill, both_memories):
        for seed in range(2):
            task = planted_task(20, 3, fill, seed, both_memories=both_memories)
            assert fits(task, placer(task, seed))

    def test_a_dead_end_is_repaired(self, placer):
        # The costly small shards spread over both devices; the large cheap one then fits nowhere.
        small = [shard(f"small{i}", 30, pooling_factor=50.0 - i) for i in range(4)]
        task = PlacementTask.uniform([*small, shard("large", 80, pooling_factor=0.1)], 2, hbm_bytes=130)
        assert fits(task, placer(task, 0))

    def test_devices_of_different_size(self, placer):
        devices = (DeviceSpec(hbm_bytes=100), DeviceSpec(hbm_bytes=20), DeviceSpec(hbm_bytes=0))
        task = PlacementTask((shard("a", 60), shard("b", 15), shard("c", 35)), devices)
        assert fits(task, placer(task, 0))

    def test_a_shard_larger_than_every_device_is_refused(self, placer):
        task = PlacementTask.uniform([shard("small", 10), shard("huge", 150)], 2, hbm_bytes=100)
        with pytest.raises(InfeasiblePlacementError, match="huge") as refused:
            placer(task, 0)
        assert refused.value.shard == "huge" and refused.value.missing_bytes == 50

    def test_too_much_in_all_is_refused(self, placer):
        task = PlacementTask.uniform([shard(f"s{i}", 50, 70) for i in range(4)], 2, hbm_bytes=200, ddr_bytes=130)
        with pytest.raises(InfeasiblePlacementError, match="host memory") as refused:
            placer(task, 0)
        assert refused.value.missing_bytes == 20

    def test_what_cannot_be_packed_is_refused(self, placer):
        # Three shards of 60 do not fit two devices of 100, though 180 is less than 200.
        task = PlacementTask.uniform([shard(f"s{i}", 60) for i in range(3)], 2, hbm_bytes=100)
        with pytest.raises(InfeasiblePlacementError) as refused:
            placer(task, 0)
        assert refused.value.shard and refused.value.missing_bytes == 20


class BalancingPlacerContract(PlacerContract):
    """For placers that balance some cost: the order of the shards does not matter."""

    def test_the_order_of_the_shards_does_not_matter(self, placer):
        task = random_task(16, 3, seed=2)
        mixed = [7, 3, 15, 0, 1, 12, 2, 9, 4, 14, 5, 6, 10, 8, 13, 11]
        permuted = PlacementTask(tuple(task.shards[i] for i in mixed), task.devices, task.hardware)

        def groups(task, placement):
            return {frozenset(s.name for s, d in zip(task.shards, placement, strict=True) if d == k) for k in range(3)}

        assert groups(task, placer(task, 0)) == groups(permuted, placer(permuted, 0))
