"""The analytic profiler: what it must obey whatever its constants are."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.hardware import HARDWARE, named_hardware
from torchrec_dreamshard.measurement import Profiler
from torchrec_dreamshard.pool import load_public_pool, sample_tasks, with_dim
from torchrec_dreamshard.profiling.analytic import AnalyticProfiler
from torchrec_dreamshard.types import DeviceSpec, PlacementTask, ShardSpec

POOL = load_public_pool(include_unused=False)
GPUS = ("v100", "a100", "h100", "h200")


def one_device(shards, hardware="a100"):
    return PlacementTask.uniform(shards, 1, hbm_bytes=2**50, ddr_bytes=2**50, hardware=HARDWARE[hardware])


def compute_ms(shards, hardware="a100"):
    task = one_device(shards, hardware)
    return float(AnalyticProfiler(hardware).measure(task, [0] * len(shards)).compute_ms[0])


def test_is_a_profiler_and_says_that_it_simulates():
    profiler = AnalyticProfiler("h100", noise=0.1, seed=3)
    assert isinstance(profiler, Profiler)
    assert profiler.provenance.simulated
    assert profiler.provenance.device == "analytic h100"
    assert profiler.provenance.details == {"noise": 0.1, "seed": 3}


@pytest.mark.parametrize("hardware", [*GPUS, "cpu"])
@pytest.mark.parametrize(
    "field, small, large",
    [
        ("pooling_factor", 2.0, 2.5),
        ("pooling_factor", 0.001, 0.5),
        ("batch_size", 1024, 4096),
        ("dim", 8, 128),
        ("rows", 1000, 10**8),
    ],
)
def test_more_work_costs_more(hardware, field, small, large):
    shard = ShardSpec(rows=10**6, dim=64, pooling_factor=4)
    less, more = (dataclasses.replace(shard, **{field: value}, hbm_bytes=None) for value in (small, large))
    assert compute_ms([less], hardware) < compute_ms([more], hardware)
    assert compute_ms([shard, less], hardware) < compute_ms([shard, more], hardware)


def test_options_that_move_more_bytes_cost_more():
    shard = ShardSpec(rows=10**7, dim=64, pooling_factor=10)

    def cost(**changes):
        return compute_ms([dataclasses.replace(shard, hbm_bytes=0, **changes)])

    optimizers = [cost(optimizer=name) for name in ("sgd", "rowwise_adagrad", "adagrad", "adam")]
    assert optimizers == sorted(optimizers) and len(set(optimizers)) == 4
    dtypes = [cost(weight_dtype=name) for name in ("int8", "fp16", "fp32")]
    assert dtypes == sorted(dtypes) and len(set(dtypes)) == 3
    assert cost() < cost(is_weighted=True)
    assert cost() < cost(is_pooled=False)
    assert cost() < cost(kernel="dense")
    assert cost() < cost(kernel="fused_uvm_caching", cache_load_factor=0.9)
    assert cost(kernel="fused_uvm_caching", cache_load_factor=0.9) < cost(kernel="fused_uvm_caching")
    assert cost(kernel="fused_uvm_caching") < cost(kernel="fused_uvm")


def test_dense_tables_of_a_device_share_one_kernel():
    dense = ShardSpec(rows=100, dim=64, pooling_factor=1, kernel="dense", batch_size=512)
    alone, many = compute_ms([dense]), compute_ms([dense] * 10)
    assert alone < many < 1.2 * alone


def test_reuse_is_worth_cache_hits():
    spread = ShardSpec(rows=10**8, dim=128, pooling_factor=10, reuse_histogram=(1.0, *[0.0] * 16))
    reused = dataclasses.replace(spread, reuse_histogram=(*[0.0] * 5, 1.0, *[0.0] * 11))
    assert compute_ms([reused]) < 0.7 * compute_ms([spread])


def test_quantised_kernels_have_no_backward():
    shard = ShardSpec(rows=10**6, dim=64, pooling_factor=10, weight_dtype="int8", kernel="quant", optimizer="none")
    cost = AnalyticProfiler().measure(one_device([shard]), [0])
    assert cost.backward_compute_ms[0] == 0 < cost.forward_compute_ms[0]


def test_narrow_rows_do_not_get_cheaper_below_a_sector():
    shards = [ShardSpec(rows=10**7, dim=dim, pooling_factor=20, batch_size=65536) for dim in (4, 8)]
    assert compute_ms(shards[:1]) == pytest.approx(compute_ms(shards[1:]))


@pytest.mark.parametrize("hardware", GPUS)
def test_fusion_gain_lies_between_one_and_three(hardware):
    rng = np.random.default_rng(0)
    gains = []
    for size in (2, 5, 10, 15):
        for _ in range(5):
            drawn = [with_dim(POOL[i], int(rng.choice([4, 16, 64, 128]))) for i in rng.choice(len(POOL), size)]
            gains.append(sum(compute_ms([shard], hardware) for shard in drawn) / compute_ms(drawn, hardware))
    assert min(gains) > 1
    assert 1.1 < np.mean(gains) < 3


def test_empty_device_computes_nothing_and_waits():
    task = PlacementTask.uniform(POOL[:4], 2)
    cost = AnalyticProfiler().measure(task, [0, 0, 0, 0])
    assert cost.forward_compute_ms[1] == cost.backward_compute_ms[1] == 0
    assert cost.forward_comms_ms[1] == pytest.approx(cost.forward_comms_ms[0] + cost.forward_compute_ms[0])


def test_nothing_placed_costs_nothing():
    assert AnalyticProfiler().measure(PlacementTask((), (DeviceSpec(), DeviceSpec())), []).step_ms == 0


def test_one_device_exchanges_nothing():
    cost = AnalyticProfiler().measure(PlacementTask.uniform(POOL[:4], 1), [0] * 4)
    assert cost.forward_comms_ms[0] == cost.backward_comms_ms[0] == 0


def test_order_of_shards_and_devices_does_not_matter():
    (task,) = sample_tasks(POOL, 1, 20, 4, dims=(4, 64), seed=1)
    rng = np.random.default_rng(0)
    placement = rng.integers(0, 4, 20)
    shuffled, renamed = rng.permutation(20), rng.permutation(4)
    other = PlacementTask(tuple(task.shards[i] for i in shuffled), task.devices, task.hardware)
    before = AnalyticProfiler().measure(task, placement)
    after = AnalyticProfiler().measure(other, renamed[placement[shuffled]])
    assert after.step_ms == pytest.approx(before.step_ms)
    np.testing.assert_allclose(after.device_ms[renamed], before.device_ms)


def test_slow_links_between_hosts_count():
    (near,) = sample_tasks(POOL, 1, 20, 4, dims=64, seed=1)
    (far,) = sample_tasks(POOL, 1, 20, 4, dims=64, seed=1, devices_per_host=2)
    placement = [i % 4 for i in range(20)]
    a, b = (AnalyticProfiler().measure(task, placement) for task in (near, far))
    assert b.backward_comms_ms[0] > 2 * a.backward_comms_ms[0]
    np.testing.assert_allclose(a.compute_ms, b.compute_ms)


def test_pcie_and_precision_of_the_exchange():
    (task,) = sample_tasks(POOL, 1, 20, 4, dims=64, seed=1)
    half = dataclasses.replace(task, hardware=dataclasses.replace(task.hardware, comms_dtype="fp16"))
    placement = [i % 4 for i in range(20)]
    nvlink, pcie = (AnalyticProfiler(named_hardware("a100", intra_host=link)) for link in ("nvlink3", "pcie"))
    full_ms, half_ms = (pcie.measure(t, placement).backward_comms_ms[0] for t in (task, half))
    assert 1.8 < (full_ms - 0.19) / (half_ms - 0.19) < 2.2
    assert full_ms > 20 * nvlink.measure(task, placement).backward_comms_ms[0]


def test_sequences_exchange_every_lookup():
    bag = ShardSpec(rows=1000, dim=16, pooling_factor=20)
    profiler = AnalyticProfiler(named_hardware("a100", intra_host="pcie"))
    pooled, sequence = (
        profiler.measure(PlacementTask.uniform([dataclasses.replace(bag, is_pooled=kind)], 2), [0]).backward_comms_ms[0]
        for kind in (True, False)
    )
    assert sequence > 10 * pooled - 0.19 * 10


def test_background_is_part_of_the_step():
    (task,) = sample_tasks(POOL, 1, 8, 2, seed=1)
    loaded = dataclasses.replace(
        task, devices=tuple(dataclasses.replace(d, background_ms=5.0 * i) for i, d in enumerate(task.devices))
    )
    placement = [0, 1] * 4
    plain, with_load = (AnalyticProfiler().measure(t, placement) for t in (task, loaded))
    assert with_load.step_ms == pytest.approx(float((plain.device_ms + [0, 5]).max()))


def test_many_at_once_agree_with_one_by_one():
    (task,) = sample_tasks(POOL, 1, 30, 4, dims=(4, 128), devices_per_host=2, seed=1)
    placements = np.random.default_rng(0).integers(0, 4, (50, 30))
    profiler = AnalyticProfiler("v100")
    steps = profiler.step_ms(task, placements)
    np.testing.assert_allclose(steps, [profiler.measure(task, p).step_ms for p in placements])
    assert len(set(steps)) == 50


def test_noise_depends_on_seed_task_and_placement_only():
    tasks = sample_tasks(POOL, 2, 10, 2, seed=1)
    placement = [0, 1] * 5
    profiler = AnalyticProfiler(noise=0.05, seed=1)
    first = profiler.measure(tasks[0], placement)
    profiler.measure(tasks[1], placement)
    assert profiler.measure(tasks[0], placement) == first
    code = (
        "import json; from torchrec_dreamshard.pool import *;"
        "from torchrec_dreamshard.profiling.analytic import AnalyticProfiler;"
        "task = sample_tasks(load_public_pool(include_unused=False), 2, 10, 2, seed=1)[0];"
        "print(json.dumps(AnalyticProfiler(noise=0.05, seed=1).measure(task, [0, 1] * 5).to_dict()))"
    )
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={"PYTHONHASHSEED": "9"})
    assert json.loads(other.stdout) == first.to_dict()
    assert AnalyticProfiler(noise=0.05, seed=2).measure(tasks[0], placement) != first
    exact = AnalyticProfiler().measure(tasks[0], placement)
    assert first.step_ms == pytest.approx(exact.step_ms, rel=0.2)
    assert first.step_ms != exact.step_ms


def test_what_cannot_be_measured_is_an_error():
    task = PlacementTask.uniform(POOL[:4], 2, hbm_bytes=1000)
    with pytest.raises(MeasurementError, match=r"device 0 lacks [\d,]+ bytes of HBM"):
        AnalyticProfiler().measure(task, [0] * 4)
    with pytest.raises(MeasurementError, match="for cuda devices, but the profiler simulates cpu"):
        AnalyticProfiler("cpu").measure(PlacementTask.uniform(POOL[:4], 2), [0] * 4)
    with pytest.raises(ValueError, match="noise must be"):
        AnalyticProfiler(noise=-1)


def test_task_hardware_can_be_taken():
    task = PlacementTask.uniform(POOL[:4], 2, hardware=HARDWARE["v100"])
    placement = [0, 1, 0, 1]
    assert AnalyticProfiler(None).measure(task, placement) == AnalyticProfiler("v100").measure(task, placement)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("is_pooled", [True, False])
def test_shards_without_lookups_are_legal_and_nearly_free(is_pooled):
    shard = ShardSpec(rows=100, dim=16, pooling_factor=0, is_pooled=is_pooled)
    cost = AnalyticProfiler().measure(PlacementTask.uniform([shard], 2), [1])
    assert cost.backward_compute_ms.tolist() == [0, 0]
    assert 0 < cost.forward_compute_ms[1] < 0.1
    assert np.isfinite(cost.step_ms)


def test_uvm_kernels_are_plain_on_a_cpu():
    shard = dataclasses.replace(POOL[0], kernel="fused_uvm", hbm_bytes=None)
    assert compute_ms([shard], "cpu") == compute_ms([POOL[0]], "cpu")
