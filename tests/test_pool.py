"""The public pool and the tasks drawn from it."""

import dataclasses
import json
import subprocess
import sys

import pytest

from torchrec_dreamshard.pool import load_public_pool, plant_capacity, rebatch, sample_tasks, split, with_dim
from torchrec_dreamshard.types import ShardSpec


def test_public_pool_holds_the_published_tables():
    pool = load_public_pool()
    assert len(pool) == 856
    assert sum(shard.pooling_factor == 0 for shard in pool) == 36
    assert len(load_public_pool(include_unused=False)) == 820
    assert (pool[44].rows, round(pool[44].pooling_factor, 2)) == (6_618_839, 193.05)
    lookups = sum(shard.pooling_factor * shard.batch_size for shard in pool)
    assert lookups == pytest.approx(887_017_990, rel=1e-5)


def test_halves_are_disjoint_and_complete():
    pool = load_public_pool()
    train, test = split(pool, seed=3)
    names = [{shard.name for shard in half} for half in (train, test)]
    assert len(train) == len(test) == 428
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 856
    assert split(pool, seed=4)[0] != train


def test_tasks_follow_the_arguments():
    pool = load_public_pool()
    tasks = sample_tasks(
        pool, 20, (10, 30), (2, 4), dims=(4, 128), batch_size=1024, hardware="v100", memory_bytes=2**34,
        devices_per_host=2, seed=1,
    )  # fmt: skip
    assert {task.num_devices for task in tasks} == {2, 4}
    assert {shard.dim for task in tasks for shard in task.shards} == {4, 128}
    assert len({task.num_shards for task in tasks}) > 5
    for task in tasks:
        assert 10 <= task.num_shards <= 30
        assert len({shard.name for shard in task.shards}) == task.num_shards
        assert all(shard.batch_size == 1024 for shard in task.shards)
        assert all(device.hbm_bytes == 2**34 for device in task.devices)
        assert [device.host for device in task.devices] == [i // 2 for i in range(task.num_devices)]
        assert task.hardware.name == "v100"
        assert sum(shard.hbm_bytes for shard in task.shards) <= task.num_devices * 2**34


def test_cpu_tasks_live_in_host_memory():
    (task,) = sample_tasks(load_public_pool(), 1, 5, 2, hardware="cpu", memory_bytes=2**33)
    assert all(shard.hbm_bytes == 0 and shard.ddr_bytes == shard.weight_bytes for shard in task.shards)
    assert task.devices[0].ddr_bytes == 2**33


def test_same_seed_same_tasks_in_another_process():
    code = (
        "import json; from torchrec_dreamshard.pool import *;"
        "print(json.dumps([t.to_dict() for t in sample_tasks(load_public_pool(), 2, (3, 9), 4, dims=(4, 8), seed=7)]))"
    )
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={"PYTHONHASHSEED": "5"})
    here = sample_tasks(load_public_pool(), 2, (3, 9), 4, dims=(4, 8), seed=7)
    assert json.loads(other.stdout) == json.loads(json.dumps([task.to_dict() for task in here]))


def test_impossible_draws_are_refused():
    with pytest.raises(ValueError, match="num_shards must lie in 1 to 2"):
        sample_tasks(load_public_pool()[:2], 1, 3, 2)
    with pytest.raises(ValueError, match="raise memory_bytes"):
        sample_tasks(load_public_pool(), 1, 40, 2, memory_bytes=1000)
    with pytest.raises(ValueError, match="unknown hardware 'tpu'; known are a100"):
        sample_tasks(load_public_pool(), 1, 4, 2, hardware="tpu")


@pytest.mark.parametrize("fill", [0.92, 0.98, 1.0])
def test_planted_placement_fills_every_device(fill):
    (task,) = sample_tasks(load_public_pool(), 1, 30, 4, seed=2)
    tight, placement = plant_capacity(task, fill, seed=5)
    for device, spec in enumerate(tight.devices):
        used = sum(shard.hbm_bytes for shard, where in zip(tight.shards, placement, strict=True) if where == device)
        assert used <= spec.hbm_bytes
        assert used == pytest.approx(fill * spec.hbm_bytes, rel=1e-6)


def test_changed_dim_and_batch_change_memory_along():
    shard = ShardSpec(rows=100, dim=16, pooling_factor=1)
    assert with_dim(shard, 8) == ShardSpec(rows=100, dim=8, pooling_factor=1)
    given = dataclasses.replace(shard, hbm_bytes=999, ddr_bytes=10)
    assert (with_dim(given, 8).hbm_bytes, with_dim(given, 8).ddr_bytes) == (500, 5)
    assert rebatch(given, 64).hbm_bytes == 999
    assert rebatch(shard, 64).memory_is_default
