import dataclasses
import json

import pytest

from torchrec_dreamshard import DeviceSpec, HardwareSpec, PlacementTask, ShardSpec

HISTOGRAM = (0.5, 0.25, 0.25) + (0.0,) * 14
FULL = {
    "rows": 1000,
    "dim": 16,
    "pooling_factor": 2.5,
    "name": "t",
    "batch_size": 512,
    "reuse_histogram": HISTOGRAM,
    "weight_dtype": "fp16",
    "optimizer": "rowwise_adagrad",
    "kernel": "fused_uvm_caching",
    "cache_load_factor": 0.2,
    "is_weighted": True,
    "is_pooled": False,
    "num_features": 3,
    "hbm_bytes": 10,
    "ddr_bytes": 20,
}


def shard(**changes):
    return ShardSpec(**{"rows": 100, "dim": 8, "pooling_factor": 1.0, **changes})


def test_a_shard_needs_only_rows_dim_and_pooling():
    assert shard().weight_bytes == 100 * 8 * 4
    assert (shard().hbm_bytes, shard().ddr_bytes) == (3200, 0)
    assert shard(pooling_factor=0).reuse_histogram is None
    assert shard(weight_dtype="int4", rows=3, dim=1).weight_bytes == 2  # half bytes round up


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("rows", 0, "an integer of at least 1"),
        ("rows", -5, "an integer of at least 1"),
        ("rows", 1.5, "an integer of at least 1"),
        ("rows", True, "an integer of at least 1"),
        ("dim", "16", "an integer of at least 1"),
        ("dim", None, "an integer of at least 1"),
        ("pooling_factor", -0.1, "a finite number of at least 0"),
        ("pooling_factor", float("nan"), "a finite number of at least 0"),
        ("pooling_factor", float("inf"), "a finite number of at least 0"),
        ("pooling_factor", "1", "a finite number of at least 0"),
        ("batch_size", 0, "an integer of at least 1"),
        ("num_features", 0, "an integer of at least 1"),
        ("reuse_histogram", (1.0,), "17 shares"),
        ("reuse_histogram", (0.5,) + (0.0,) * 16, "add up to 1"),
        ("reuse_histogram", (2.0, -1.0) + (0.0,) * 15, "at least 0"),
        ("reuse_histogram", 3, "17 shares"),
        ("weight_dtype", "float32", "one of fp32"),
        ("optimizer", "adamw", "one of sgd"),
        ("kernel", "uvm", "one of fused"),
        ("cache_load_factor", 0.0, "above 0"),
        ("cache_load_factor", 1.5, "(0, 1]"),
        ("hbm_bytes", -1, "an integer of at least 0"),
        ("ddr_bytes", 0.5, "an integer of at least 0"),
        ("name", 7, "a string"),
    ],
)
def test_a_bad_shard_field_is_named_with_value_and_rule(field, value, rule):
    with pytest.raises(ValueError) as caught:
        shard(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"ShardSpec.{field} must be ") and rule in message and repr(value) in message
    assert "\n" not in message


def test_histograms_are_rescaled_only_when_visibly_off():
    assert shard(reuse_histogram=HISTOGRAM).reuse_histogram == HISTOGRAM
    off = shard(reuse_histogram=(0.995,) + (0.0,) * 16).reuse_histogram
    assert off[0] == 1.0
    assert shard(reuse_histogram=(0.0,) * 17).reuse_histogram is None


def test_output_columns_of_bags_and_sequences():
    assert shard(num_features=3).output_columns == 24
    assert shard(is_pooled=False, pooling_factor=2.5).output_columns == 20


@pytest.mark.parametrize("fields", [FULL, {"rows": 100, "dim": 8, "pooling_factor": 0}])
def test_shards_survive_json(fields):
    original = ShardSpec(**fields)
    restored = ShardSpec.from_dict(json.loads(json.dumps(original.to_dict())))
    assert restored == original and restored.memory_is_default == original.memory_is_default
    assert {f.name for f in dataclasses.fields(ShardSpec) if f.init} == set(FULL), "FULL must name every field"


def test_unknown_and_missing_fields_are_refused():
    with pytest.raises(ValueError, match=r"unknown fields \['hash_size'\]"):
        ShardSpec.from_dict({"hash_size": 1, "rows": 1, "dim": 1, "pooling_factor": 1})
    with pytest.raises(ValueError, match=r"lacks the fields \['pooling_factor'\]"):
        ShardSpec.from_dict({"rows": 1, "dim": 1})
    with pytest.raises(ValueError, match="must be a JSON object, got list"):
        PlacementTask.from_dict([1])


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        (DeviceSpec, "hbm_bytes", -1),
        (DeviceSpec, "host", 0.5),
        (DeviceSpec, "background_ms", float("nan")),
        (HardwareSpec, "compute_device", "tpu"),
        (HardwareSpec, "memory_gb_s", 0),
        (HardwareSpec, "comms_dtype", "fp64"),
    ],
)
def test_bad_device_and_hardware_fields(record, field, value):
    with pytest.raises(ValueError, match=rf"^{record.__name__}\.{field} must be .*, got "):
        record(**{field: value})


def test_records_are_frozen():
    for record, name in ((shard(), "rows"), (DeviceSpec(), "host"), (PlacementTask.uniform([], 1), "shards")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, 1)


def test_default_memory_lies_where_the_device_computes():
    cpu = PlacementTask.uniform([shard(), shard(hbm_bytes=7)], 2, hardware=HardwareSpec(compute_device="cpu"))
    assert (cpu.shards[0].hbm_bytes, cpu.shards[0].ddr_bytes) == (0, 3200)
    assert (cpu.shards[1].hbm_bytes, cpu.shards[1].ddr_bytes) == (7, 0)  # what was given stays
    back = PlacementTask(cpu.shards, cpu.devices, HardwareSpec(compute_device="cpu"))
    assert back == cpu


def test_uniform_tasks():
    task = PlacementTask.uniform([shard()], 5, hbm_bytes=9, devices_per_host=2, background_ms=1.5)
    assert [device.host for device in task.devices] == [0, 0, 1, 1, 2]
    assert {device.hbm_bytes for device in task.devices} == {9}
    assert (task.num_shards, task.num_devices, task.devices[4].background_ms) == (1, 5, 1.5)
    assert {device.host for device in PlacementTask.uniform([], 3).devices} == {0}
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match="num_devices must be an integer of at least 1"):
            PlacementTask.uniform([], bad)


def test_tasks_survive_json():
    task = PlacementTask(
        (ShardSpec(**FULL), shard()),
        (DeviceSpec(host=1, background_ms=0.5), DeviceSpec(hbm_bytes=0)),
        HardwareSpec(name="x", memory_gb_s=10, compute_device="cpu"),
    )
    assert PlacementTask.from_dict(json.loads(json.dumps(task.to_dict()))) == task


def test_tasks_refuse_other_records():
    with pytest.raises(ValueError, match="at least one DeviceSpec"):
        PlacementTask((shard(),), ())
    with pytest.raises(ValueError, match=r"PlacementTask\.shards must be a sequence of ShardSpec"):
        PlacementTask(({"rows": 1},), (DeviceSpec(),))


def test_check_placement():
    task = PlacementTask.uniform([shard(), shard()], 2)
    assert task.check_placement([1, 0.0]) == (1, 0)
    with pytest.raises(ValueError, match="one device per shard, 2, got 1"):
        task.check_placement([0])
    with pytest.raises(ValueError, match="has device 2, but the task has devices 0 to 1"):
        task.check_placement([0, 2])
    with pytest.raises(ValueError, match="at least 0, got -1"):
        task.check_placement([0, -1])
