"""The analytic model against published timings (benchmarks/calibrate_analytic.py)."""

import calibrate_analytic as calibration
import numpy as np
import pytest
from public_rows import load_comms_rows, load_compute_rows

from torchrec_dreamshard.pool import load_public_pool


@pytest.fixture(scope="module")
def points():
    return calibration.h100_points() + calibration.v100_points()


def test_every_counted_point_is_within_a_fifth(points):
    counted = [point for point in points if point.counted]
    assert len(counted) == 40
    assert {point.group for point in counted} == {"h100", "v100 kernel", "v100 call"}
    assert {p.label: round(p.ratio, 2) for p in counted if not 0.8 < p.ratio < 1.2} == {}


def test_geometric_mean_is_within_a_tenth(points):
    summary = calibration.summary(points)
    assert 0.95 < summary["geometric_mean_ratio"] < 1.05
    assert summary["geometric_mean_error"] < 0.1


def test_older_backward_kernels_have_the_same_scale(points):
    assert all(0.7 < point.ratio < 1.1 for point in points if not point.counted)


def test_exchange_over_pcie_follows_the_published_fit():
    assert all(0.8 < point.ratio < 1.25 for point in calibration.exchange_points())


def test_shapes_bracket_the_published_ones():
    published = calibration.reference()["learned_gpu_aggregates"]
    shapes = {hardware: calibration.shapes(hardware, trials=10) for hardware in ("v100", "h100")}
    for size, gain in published["fusion_gain_sum_of_singles_over_fused"].items():
        if size.endswith("tables"):
            low, high = (shapes[h]["fusion_gain_sum_of_singles_over_fused"][size] for h in ("v100", "h100"))
            assert 0.6 * gain < low < high < 1.3 * gain
    for dim, ratio in published["half_columns_over_whole_kernel_time"].items():
        low, high = (shapes[h]["half_columns_over_whole_kernel_time"][dim] for h in ("v100", "h100"))
        assert 0.8 * ratio < low < high < 1.05 * ratio


def test_cpu_model_is_centred_on_measured_kernels():
    ratios = calibration.cpu_ratios(limit=200)
    assert ratios["kernels, 4 processes"][1] == pytest.approx(1, abs=0.15)
    assert ratios["exchange, 4 processes"][1] == pytest.approx(1, abs=0.2)


def test_public_rows_keep_what_the_files_say():
    (row, *_) = load_compute_rows(4, limit=5)
    pool = load_public_pool()
    assert [(shard.name, shard.dim) for shard in row.task.shards] == [("table_466", 32), ("table_219", 16)]
    assert row.task.shards[0].rows == pool[466].rows
    assert row.cost.compute_ms.tolist() == [32.4196]
    assert row.cost.step_ms is None and row.cost.forward_compute_ms is None
    assert not row.provenance.simulated


def test_comms_rows_keep_skew_and_empty_ranks():
    rows = load_comms_rows(4)
    assert len(rows) == 5012
    first = rows[0]
    assert [shard.dim for shard in first.task.shards] == [132, 68, 28, 24]
    np.testing.assert_allclose(first.cost.forward_compute_ms, [14, 3, 0, 12])
    np.testing.assert_allclose(first.cost.backward_comms_ms, [32.5651, 31.4177, 27.4171, 25.861])
    assert any(len(set(row.placement)) < 4 for row in rows)
