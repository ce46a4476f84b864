import json

import numpy as np
import pytest

from torchrec_dreamshard import CostBreakdown, Measurement, PlacementTask, Profiler, Provenance, ShardSpec
from torchrec_dreamshard.measurement import TERMS

TASK = PlacementTask.uniform([ShardSpec(rows=10, dim=4, pooling_factor=1) for _ in range(3)], 2)
FULL = dict(zip(TERMS, ([1.0, 2.0], [3.0, 1.0], [1.0, 1.0], [4.0, 6.0]), strict=True))


def test_the_step_is_the_slowest_device():
    cost = CostBreakdown(**FULL)
    assert cost.device_ms.tolist() == [9.0, 10.0]
    assert cost.step_ms == 10.0
    assert cost.compute_ms.tolist() == [5.0, 8.0]
    assert CostBreakdown(**FULL, background_ms=[4.0, 0.0]).step_ms == 13.0


def test_a_measured_step_stands():
    assert CostBreakdown(**FULL, step_ms=7.5).step_ms == 7.5
    assert CostBreakdown(step_ms=7.5).device_ms is None


def test_partial_costs_know_no_step():
    cost = CostBreakdown(forward_compute_ms=[1, 2], backward_compute_ms=[1, 1])
    assert cost.step_ms is None and cost.device_ms is None and cost.compute_ms.tolist() == [2.0, 3.0]
    assert CostBreakdown(compute_ms=[1, 2]).forward_compute_ms is None


@pytest.mark.parametrize("value", [[-1.0, 0.0], [float("nan"), 0.0], [float("inf"), 0.0], [[1.0]], "ab", 1.0])
def test_bad_terms_are_named(value):
    with pytest.raises(ValueError, match=r"^CostBreakdown\.forward_comms_ms must be a sequence of .*numbers"):
        CostBreakdown(forward_comms_ms=value)


def test_terms_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="of length 2 like the terms before it"):
        CostBreakdown(forward_compute_ms=[1, 2], backward_compute_ms=[1])


def test_a_cost_knows_something():
    with pytest.raises(ValueError, match="at least one term"):
        CostBreakdown()
    with pytest.raises(ValueError, match=r"step_ms must be a finite number of at least 0, got -1"):
        CostBreakdown(step_ms=-1)


def test_arrays_are_copies_and_read_only():
    source = np.array([1.0, 2.0])
    cost = CostBreakdown(compute_ms=source)
    source[0] = 9
    assert cost.compute_ms[0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        cost.compute_ms[0] = 5


@pytest.mark.parametrize(
    "cost",
    [
        CostBreakdown(**FULL),
        CostBreakdown(**FULL, step_ms=7.5, step_std_ms=0.1, background_ms=[1, 1]),
        CostBreakdown(compute_ms=[0.1, 0.2]),
        CostBreakdown(step_ms=3),
    ],
)
def test_costs_survive_json(cost):
    assert CostBreakdown.from_dict(json.loads(json.dumps(cost.to_dict()))) == cost


def test_measurements_survive_json():
    provenance = Provenance(
        host="a", device="cpu", simulated=True, versions={"torch": "2"}, repeats=3, details={"all": [1.0]}
    )
    for record in (
        Measurement(task=TASK, placement=(0, 1, 1), cost=CostBreakdown(**FULL), provenance=provenance),
        Measurement(task=TASK, placement=[0, 0, 0], error="out of memory"),
    ):
        assert Measurement.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def test_measurements_are_checked():
    with pytest.raises(ValueError, match="a cost or an error, got neither"):
        Measurement(task=TASK, placement=(0, 0, 0))
    with pytest.raises(ValueError, match="one device per shard, 3, got 1"):
        Measurement(task=TASK, placement=(0,), error="x")
    with pytest.raises(ValueError, match=r"cost\.compute_ms must be of length 2, one per device, got 3"):
        Measurement(task=TASK, placement=(0, 0, 0), cost=CostBreakdown(compute_ms=[1, 2, 3]))
    with pytest.raises(ValueError, match=r"Measurement\.cost must be a CostBreakdown, got 3\.0"):
        Measurement(task=TASK, placement=(0, 0, 0), cost=3.0)
    for bad in ({"placement": [0, 0, 0], "error": "x"}, {"task": TASK.to_dict(), "error": "x"}):
        with pytest.raises(ValueError, match="Measurement lacks the fields"):
            Measurement.from_dict(bad)


def test_anything_that_measures_is_a_profiler():
    class Mine:
        def measure(self, task, placement):
            return CostBreakdown(step_ms=1)

    assert isinstance(Mine(), Profiler) and not isinstance(object(), Profiler)
