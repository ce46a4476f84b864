"""Restarts from an earlier plan: which changes are made, how few, and when the fresh plan is taken instead."""

from __future__ import annotations

import pytest
from planner_models import bag_collection, quiet_topology
from stand_in_agent import StandInAgent
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

from torchrec_dreamshard.planner import DreamShardPlanner
from torchrec_dreamshard.planner.errors import PlannerInputError

BAGS = [EmbeddingBagCollectionSharder()]


def planner(world=4, hbm_cap=None, **further):
    topology = quiet_topology(world, "cuda", **({} if hbm_cap is None else {"hbm_cap": hbm_cap}))
    reservation = FixedPercentageStorageReservation(0.0)
    return DreamShardPlanner(topology, 64, stats=[], agent=StandInAgent(), storage_reservation=reservation, **further)


def tables(*rows, dim=16):
    return bag_collection("meta", rows=rows, dims=(dim,) * len(rows))


def ranks(plan):
    return {name: sharding.ranks for name, sharding in plan.plan[""].items()}


def restart(model, pins, world=4, hbm_cap=None, **further):
    """A plan with every table pinned, and its continuation without the pins: planners and changed tables."""
    first = planner(world, pins=pins)
    plan = first.plan(model, BAGS)
    before = ranks(plan)
    ours = planner(world, hbm_cap, previous=plan, **further)
    after = ranks(ours.plan(model, BAGS))
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {change.table for change in ours.changes}
    assert len(changed) == len(ours.changes)
    return first, ours, changed


def test_small_gains_add_up():
    """Each of 24 tables is 4 % of the step, less than min_gain; together their moves gain most of it."""
    first, ours, changed = restart(tables(*(100,) * 24), {f"t{i}": 0 for i in range(24)})
    assert len(changed) == 18
    fall = first.predicted().step_ms - ours.predicted().step_ms
    assert fall > 0.7 * first.predicted().step_ms
    assert sum(change.gain_ms for change in ours.changes) == pytest.approx(fall)


def test_equally_slow_devices_are_relieved_together():
    """No single move makes the step fall while another device is just as slow."""
    _, ours, changed = restart(tables(*(100,) * 16), {f"t{i}": i % 2 for i in range(16)}, min_gain=0.2)
    assert len(changed) == 8
    assert all(change.gain_ms > 0 for change in ours.changes)


def test_more_changes_than_can_be_tried_take_the_fresh_plan():
    model = tables(*(100,) * 100)
    first, ours, changed = restart(model, {f"t{i}": 0 for i in range(100)}, world=8)
    fresh = planner(8)
    fresh.plan(model, BAGS)
    assert ours.predicted().step_ms == pytest.approx(fresh.predicted().step_ms)
    assert len(changed) <= 88
    fall = first.predicted().step_ms - ours.predicted().step_ms
    assert sum(change.gain_ms for change in ours.changes) == pytest.approx(fall)


def test_changes_that_together_gain_too_little_are_not_made():
    """Five tables on one device and three on the other: 4 and 4 gain 20 %."""
    pins = {f"t{i}": int(i >= 5) for i in range(8)}
    assert not restart(tables(*(100,) * 8), pins, world=2, min_gain=0.25)[2]
    assert len(restart(tables(*(100,) * 8), pins, world=2, min_gain=0.15)[2]) == 1


def test_a_new_pin_under_tight_memory_swaps_two_tables():
    """Two tables of 12.8 MB fill a device; a search from scratch places nearly all anew."""
    model = tables(*(100_000,) * 8, dim=32)
    plan = planner(hbm_cap=27_000_000).plan(model, BAGS)
    before = ranks(plan)
    pin = (before["t0"][0] + 1) % 4
    ours = planner(hbm_cap=27_000_000, previous=plan, pins={"t0": pin})
    after = ranks(ours.plan(model, BAGS))
    assert after["t0"] == [pin]
    assert len(ours.changes) == sum(before[name] != after[name] for name in before) == 2


def test_less_memory_swaps_where_no_move_fits():
    """Tables of 6, 5 | 4, 4 units (6.4 MB each) on devices that now hold 10: one of 6 or 5 against one of 4."""
    model = tables(600_000, 500_000, 400_000, 400_000)
    pins = {"t0": 0, "t1": 0, "t2": 1, "t3": 1}
    _, ours, changed = restart(model, pins, world=2, hbm_cap=66_000_000, min_gain=1.0)
    assert len(changed) == 2
    assert all("no longer fits" in change.reason and change.gain_ms is None for change in ours.changes)


def test_the_fresh_plan_is_taken_where_moves_and_swaps_do_not_fit():
    """Three tables of 6 units on two devices that now hold 10: one must be split."""
    pins = {"t0": 0, "t1": 0, "t2": 1}
    _, ours, changed = restart(tables(*(600_000,) * 3), pins, world=2, hbm_cap=66_000_000, min_gain=1.0)
    assert changed
    assert all("no longer fits" in change.reason for change in ours.changes)
    assert any(option.num_shards == 2 for option in ours._best_plan)


@pytest.mark.parametrize("min_gain", [float("nan"), -1, 1.5])
def test_min_gain_outside_of_its_range_is_refused(min_gain):
    with pytest.raises(PlannerInputError, match="min_gain must be a share of the step from 0 to 1"):
        planner(min_gain=min_gain)


def test_an_empty_group_is_refused():
    with pytest.raises(PlannerInputError, match="each group of together must name at least one table"):
        planner(together=[["t0", "t1"], []])
