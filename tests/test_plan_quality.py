"""The plan quality benchmark: its bounds, statistics and a run without training."""

import itertools
import json
import math

import numpy as np
import plan_quality
import pytest
from quality_report import ratio_interval
from true_search import long_search, lower_bound_ms

from torchrec_dreamshard.pool import load_public_pool, plant_capacity, sample_tasks
from torchrec_dreamshard.profiling.analytic import AnalyticProfiler


@pytest.mark.parametrize("hardware, dims", [("v100", 16), ("h100", (4, 128))])
def test_search_finds_the_optimum_and_the_bound_stays_below(hardware, dims):
    profiler = AnalyticProfiler(hardware)
    for task in sample_tasks(load_public_pool(), 3, 8, 2, dims=dims, hardware=hardware, seed=1):
        every = np.array(list(itertools.product(range(2), repeat=8)))
        optimum = profiler.step_ms(task, every).min()
        _, found = long_search(
            task, lambda rows, task=task: profiler.step_ms(task, rows), [(0,) * 8], num_evaluations=1500
        )
        assert found == pytest.approx(optimum)
        assert 0.5 * optimum < lower_bound_ms(task, task.hardware) <= optimum


def test_search_respects_memory():
    (task,) = sample_tasks(load_public_pool(), 1, 20, 4, seed=1)
    tight, planted = plant_capacity(task, 0.97)
    profiler = AnalyticProfiler()
    placement, cost = long_search(tight, lambda rows: profiler.step_ms(tight, rows), [planted], num_evaluations=500)
    assert profiler.measure(tight, placement).step_ms == pytest.approx(cost)


def test_interval_is_paired_and_leaves_failures_out():
    reference = np.array([1.0, 10.0, 100.0])
    assert ratio_interval(1.1 * reference, reference) == pytest.approx((1.1, 1.1, 1.1))
    mean, low, high = ratio_interval(np.array([1.0, 11.0, math.nan]), reference)
    assert mean == pytest.approx(math.sqrt(1.1))
    assert low < mean < high
    assert math.isnan(ratio_interval(np.array([math.nan]), np.array([1.0]))[0])


def test_train_and_test_tasks_share_no_table():
    train, test = plan_quality.make_tasks(plan_quality.FAMILIES["mixed-20x2"], "a100", False, 5, seed=0)
    names = [{shard.name for task in tasks for shard in task.shards} for tasks in (train, test)]
    assert not names[0] & names[1]


def test_run_writes_results_and_keeps_them(tmp_path, capsys):
    pytest.importorskip("torchrec")
    arguments = ["--families", "DLRM-20x4", "--num-tasks", "2", "--trained", "--num-evaluations", "200"]
    arguments += ["--output", str(tmp_path), "--json"]
    plan_quality.main(arguments)
    (result,) = json.loads(capsys.readouterr().out)
    assert {"random", "lookup", "torchrec_default", "long_search_on_true_cost"} <= set(result["strategies"])
    for record in result["strategies"].values():
        assert (np.array(record["step_ms"]) >= np.array(result["best_known_ms"]) - 1e-9).all()
    assert (np.array(result["lower_bound_ms"]) <= np.array(result["best_known_ms"])).all()
    assert "| lookup |" in (tmp_path / "report.md").read_text()
    plan_quality.main(arguments)
    assert json.loads(capsys.readouterr().out) == [result]
    with pytest.raises(SystemExit):
        plan_quality.parse_args(["--judges", "tpu"])
