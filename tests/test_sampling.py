import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from torchrec_dreamshard.hardware import named_hardware
from torchrec_dreamshard.pool import load_public_pool
from torchrec_dreamshard.profiling.sampling import SamplingPlan, StepPlan
from torchrec_dreamshard.reuse import unique_rows

POOL = load_public_pool()
PLAN = SamplingPlan(pool=POOL, hardware=named_hardware("cpu"))


def test_samples_depend_on_plan_and_index_alone():
    again = SamplingPlan(pool=load_public_pool(), hardware=named_hardware("cpu"))
    assert [again[i] for i in (7, 3)] == [PLAN[7], PLAN[3]]
    assert dataclasses.replace(PLAN, seed=1)[3] != PLAN[3]


def test_samples_are_the_same_in_another_process():
    code = (
        "from torchrec_dreamshard.pool import *; from torchrec_dreamshard.hardware import *;"
        "from torchrec_dreamshard.profiling.sampling import *;"
        "plan = SamplingPlan(pool=load_public_pool(), hardware=named_hardware('cpu'));"
        "print(plan.fingerprint, plan[5].to_dict())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env={"PYTHONHASHSEED": "7"})
    assert done.stdout.decode().strip() == f"{PLAN.fingerprint} {PLAN[5].to_dict()}"


def test_fingerprint_tells_plans_apart():
    others = [dataclasses.replace(PLAN, **change) for change in ({"seed": 1}, {"max_tables": 5}, {"pool": POOL[:100]})]
    assert len({PLAN.fingerprint, *(plan.fingerprint for plan in others)}) == 4


def test_samples_keep_the_limits():
    plan = dataclasses.replace(PLAN, max_lookups=20_000, max_output_bytes=2**22, max_weight_bytes=2**24)
    for task in (plan[i] for i in range(60)):
        assert 1 <= task.num_shards <= 20 and task.num_devices == 1
        smallest = task.shards[0].batch_size == 64
        assert sum(s.batch_size * s.pooling_factor for s in task.shards) <= 20_000 or smallest
        assert sum(4 * s.batch_size * s.output_columns for s in task.shards) <= 2**22 or smallest
        assert all(shard.rows >= unique_rows(shard) for shard in task.shards)
        assert sum(s.weight_bytes for s in task.shards) <= 1.2 * 2**24 or smallest


def test_a_prefix_covers_the_axes_evenly():
    tasks = [PLAN[i] for i in range(80)]
    counts = np.bincount([(task.num_shards - 1) // 5 for task in tasks], minlength=4)
    assert counts.min() >= 15  # of 20 each
    megabytes = np.log2([sum(s.weight_bytes for s in task.shards) / 2**20 for task in tasks])
    assert np.percentile(megabytes, 10) < 3.5 and np.percentile(megabytes, 90) > 7
    assert {s.dim for task in tasks for s in task.shards} == {4, 8, 16, 32, 64, 128}
    uniform = sum(len({s.dim for s in task.shards}) == 1 for task in tasks if task.num_shards > 5)
    assert 10 < uniform < 40
    assert {s.optimizer for task in tasks for s in task.shards} == {"sgd", "rowwise_adagrad", "adagrad"}
    assert any(not s.is_pooled for task in tasks for s in task.shards)
    assert any(s.is_weighted for task in tasks for s in task.shards)


def test_tables_of_a_sample_differ_and_share_their_kernel():
    for task in (PLAN[i] for i in range(20)):
        assert len({shard.name for shard in task.shards}) == task.num_shards
        assert len({(s.batch_size, s.weight_dtype, s.optimizer, s.is_weighted, s.is_pooled) for s in task.shards}) == 1


def test_cuda_samples_have_cuda_variants():
    tasks = [dataclasses.replace(PLAN, hardware=named_hardware("a100"))[i] for i in range(60)]
    assert {"adam"} < {s.optimizer for task in tasks for s in task.shards}
    assert "fused_uvm_caching" in {s.kernel for task in tasks for s in task.shards}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tables": 900}, "900.*856 tables"),
        ({"batch_sizes": (8, 4)}, "low <= high"),
        ({"max_lookups": 0}, "max_lookups"),
    ],
)
def test_impossible_plans_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAN, **change)


def test_step_plans_go_round_the_numbers_of_ranks_and_vary_in_balance():
    plan = StepPlan(tables=PLAN, hosts=(0, 0, 1, 1))
    samples = [plan[i] for i in range(60)]
    assert [task.num_devices for task, _ in samples[:4]] == [2, 3, 4, 2]
    assert [device.host for device in samples[2][0].devices] == [0, 0, 1, 1]
    assert samples == [StepPlan(tables=PLAN, hosts=(0, 0, 1, 1))[i] for i in range(60)]
    largest = [max(np.bincount(placement)) / len(placement) for _, placement in samples if len(placement) > 8]
    assert min(largest) < 0.45 and max(largest) > 0.9
    assert plan.fingerprint != StepPlan(tables=PLAN, hosts=(0, 0, 0, 1)).fingerprint
    with pytest.raises(ValueError, match="at least 2 ranks"):
        StepPlan(tables=PLAN, hosts=(0,))
