from __future__ import annotations

import pytest
from placement_tasks import random_task
from placer_contract import BalancingPlacerContract, PlacerContract

from torchrec_dreamshard.baselines import BASELINES
from torchrec_dreamshard.types import PlacementTask, ShardSpec


class TestRandom(PlacerContract):
    @pytest.fixture
    def placer(self):
        return BASELINES["random"]

    def test_seeds_differ(self, placer):
        task = random_task(20, 4)
        assert placer(task, 0) != placer(task, 1)


# By dim alone many shards are equal, and their order decides: only what has no ties can be free of it.
@pytest.mark.parametrize("name", ["size", "lookup", "size_lookup"], scope="class")
class TestBalancing(BalancingPlacerContract):
    @pytest.fixture
    def placer(self, name):
        return BASELINES[name]


class TestDim(PlacerContract):
    @pytest.fixture
    def placer(self):
        return BASELINES["dim"]


def test_each_balances_its_own_cost():
    shards = [
        ShardSpec(name="a", rows=10**6, dim=4, pooling_factor=1.0),
        ShardSpec(name="b", rows=10**2, dim=64, pooling_factor=1.0),
        ShardSpec(name="c", rows=10**3, dim=8, pooling_factor=90.0),
    ]
    task = PlacementTask.uniform(shards, 2)

    def alone(name):
        placement = BASELINES[name](task)
        return next(s.name for s, d in zip(shards, placement, strict=True) if placement.count(d) == 1)

    assert [alone(name) for name in ("size", "dim", "lookup", "size_lookup")] == ["a", "b", "c", "c"]
