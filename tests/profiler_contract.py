"""What every profiler must do. A test module subclasses ``ProfilerContract`` and gives it the fixtures below."""

from __future__ import annotations

import numpy as np
import pytest

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.measurement import TERMS, CostBreakdown, Measurement, Profiler
from torchrec_dreamshard.types import DeviceSpec, HardwareSpec, PlacementTask, ShardSpec


def small_shards(count=4, **fields):
    """Shards that any profiler can measure in milliseconds."""
    values = {"rows": 500, "pooling_factor": 3.0, "batch_size": 64, **fields}
    return [ShardSpec(**{"name": f"t{i}", "dim": 8 * (1 + i % 2), **values}) for i in range(count)]


class ProfilerContract:
    """Subclass it, with the fixtures ``profiler`` and ``hardware`` (what the tasks say about the devices)."""

    def test_is_a_profiler(self, profiler):
        assert isinstance(profiler, Profiler)

    @pytest.mark.parametrize("num_devices", [1, 2, 3])
    def test_gives_every_term_for_every_device(self, profiler, hardware, num_devices):
        task = PlacementTask.uniform(small_shards(), num_devices, hardware=hardware)
        placement = [i % num_devices for i in range(4)]
        cost = profiler.measure(task, placement)
        assert isinstance(cost, CostBreakdown)
        for term in TERMS:
            values = getattr(cost, term)
            assert values.shape == (num_devices,) and (values >= 0).all()
        assert (cost.compute_ms > 0).all()
        assert cost.step_ms == pytest.approx(cost.device_ms.max())
        Measurement(task=task, placement=tuple(placement), cost=cost)

    def test_a_device_without_shards_computes_nothing_and_waits(self, profiler, hardware):
        task = PlacementTask.uniform(small_shards(), 2, hardware=hardware)
        cost = profiler.measure(task, [1, 1, 1, 1])
        assert cost.forward_compute_ms[0] == cost.backward_compute_ms[0] == 0
        assert cost.forward_comms_ms[0] > cost.forward_comms_ms[1]

    def test_one_device_has_nobody_to_exchange_with(self, profiler, hardware):
        cost = profiler.measure(PlacementTask.uniform(small_shards(), 1, hardware=hardware), [0] * 4)
        assert cost.forward_comms_ms[0] == cost.backward_comms_ms[0] == 0

    def test_a_task_without_shards_costs_nothing(self, profiler, hardware):
        assert profiler.measure(PlacementTask.uniform([], 2, hardware=hardware), []).step_ms == 0

    def test_shards_without_lookups_can_be_measured(self, profiler, hardware):
        task = PlacementTask.uniform(small_shards(pooling_factor=0.0), 2, hardware=hardware)
        assert np.isfinite(profiler.measure(task, [0, 0, 1, 1]).step_ms)

    def test_background_load_is_part_of_the_step(self, profiler, hardware):
        idle, busy = DeviceSpec(), DeviceSpec(background_ms=1000.0)
        cost = profiler.measure(PlacementTask(tuple(small_shards()), (idle, busy), hardware), [0, 0, 1, 1])
        assert 1000 < cost.step_ms < 2000

    def test_more_work_costs_more(self, profiler, hardware):
        task = PlacementTask.uniform(small_shards(batch_size=4096, pooling_factor=20.0), 2, hardware=hardware)
        small = PlacementTask.uniform(small_shards(batch_size=64, pooling_factor=1.0), 2, hardware=hardware)
        placement = [0, 0, 1, 1]
        more, less = profiler.measure(task, placement), profiler.measure(small, placement)
        assert (more.compute_ms > less.compute_ms).all()

    @pytest.mark.parametrize("placement", [[0, 0, 0], [0, 0, 0, 2], [0, 0, 0, -1]])
    def test_a_placement_of_another_task_is_refused(self, profiler, hardware, placement):
        with pytest.raises(ValueError, match="placement"):
            profiler.measure(PlacementTask.uniform(small_shards(), 2, hardware=hardware), placement)

    def test_hardware_of_another_kind_is_refused(self, profiler, hardware):
        other = HardwareSpec(compute_device="cpu" if hardware.compute_device == "cuda" else "cuda")
        with pytest.raises(MeasurementError, match="hardware|devices"):
            profiler.measure(PlacementTask.uniform(small_shards(), 2, hardware=other), [0, 0, 1, 1])
