import dataclasses
import errno
import gzip
import json
import multiprocessing

import pytest

from torchrec_dreamshard import samples
from torchrec_dreamshard.hardware import named_hardware
from torchrec_dreamshard.measurement import CostBreakdown, Measurement, Provenance
from torchrec_dreamshard.samples import MeasurementStore, compact, load_measurements
from torchrec_dreamshard.types import PlacementTask, ShardSpec


def _measurement(index: int) -> Measurement:
    task = PlacementTask.uniform([ShardSpec(rows=100 + index, dim=8, pooling_factor=1.5)], 2)
    cost = CostBreakdown(forward_compute_ms=[index / 3, 0.0], backward_compute_ms=[1.0, 0.0])
    return Measurement(task=task, placement=(0,), cost=cost, provenance=Provenance(host="h", repeats=3))


@pytest.fixture
def store(tmp_path):
    store = MeasurementStore(tmp_path / "new" / "store.jsonl")
    for index in range(3):
        store.append(_measurement(index))
    return store


def test_appended_measurements_come_back_equal_and_in_order(store):
    assert list(store) == [_measurement(index) for index in range(3)]
    assert load_measurements(store.path) == list(MeasurementStore(store.path))


def test_missing_store_reads_as_empty_but_cannot_be_loaded(tmp_path):
    assert list(MeasurementStore(tmp_path / "none.jsonl")) == []
    with pytest.raises(FileNotFoundError, match="none.jsonl"):
        load_measurements(tmp_path / "none.jsonl")


def test_a_failed_measurement_is_a_record(tmp_path):
    store = MeasurementStore(tmp_path / "s.jsonl")
    failed = Measurement(task=_measurement(0).task, placement=(1,), error="out of memory")
    store.append(failed)
    assert list(store) == [failed]


@pytest.mark.parametrize("cut", [1, 40])
def test_torn_last_line_is_dropped_with_a_warning_and_cut_off_by_the_next_append(store, cut, caplog):
    data = store.path.read_bytes()
    store.path.write_bytes(data[:-cut])
    assert list(MeasurementStore(store.path)) == [_measurement(0), _measurement(1)]
    assert "half-written" in caplog.text
    store.append(_measurement(7))
    assert list(store) == [_measurement(0), _measurement(1), _measurement(7)]


def test_torn_line_longer_than_one_look_back_is_cut_off(store):
    with open(store.path, "ab") as file:
        file.write(b"x" * (samples._TAIL_BYTES + 5))
    store.append(_measurement(3))
    assert len(list(store)) == 4


def test_torn_header_is_an_empty_store(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_bytes(samples._HEADER[:10])
    store = MeasurementStore(path)
    assert list(store) == []
    store.append(_measurement(0))
    assert list(MeasurementStore(path)) == [_measurement(0)]


def test_full_disk_keeps_everything_before_it(store, monkeypatch):
    before = store.path.read_bytes()

    def short_write(file, data):
        file.write(data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(samples, "_write_all", short_write)
        with pytest.raises(OSError, match="No space left.*intact.*free some space"):
            store.append(_measurement(3))
    assert store.path.read_bytes() == before
    store.append(_measurement(3))
    assert len(list(store)) == 4


@pytest.mark.parametrize("content", [b"name,rows\n1,2\n", b"{}\n", b"\x00\x01", b'["a"]\n'])
def test_foreign_file_is_refused(tmp_path, content):
    path = tmp_path / "s.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a measurement store"):
        MeasurementStore(path)
    assert path.read_bytes() == content


def test_append_never_touches_a_file_that_became_foreign(store):
    store.path.write_bytes(b"precious\ntext without a newline")
    with pytest.raises(ValueError, match="not a measurement store"):
        store.append(_measurement(0))
    assert store.path.read_bytes() == b"precious\ntext without a newline"


def test_other_version_is_refused_naming_both(tmp_path):
    path = tmp_path / "s.jsonl"
    path.write_text(json.dumps({"format": samples.FORMAT, "version": 99}) + "\n")
    with pytest.raises(ValueError, match="version 99, expected 1"):
        MeasurementStore(path)


def test_damaged_line_in_the_middle_is_refused_by_number(store):
    lines = store.path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:30] + b"\n"
    store.path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match="line 3"):
        list(MeasurementStore(store.path))


def test_compact_store_is_equal_reproducible_and_read_only(store, tmp_path):
    first, second = tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"
    assert compact(store.path, first) == 3
    compact(first, second)
    assert load_measurements(first) == list(store)
    assert first.read_bytes() == second.read_bytes()
    with pytest.raises(ValueError, match="read-only"):
        MeasurementStore(first).append(_measurement(0))
    with pytest.raises(ValueError, match=r"\.jsonl\.gz"):
        compact(store.path, tmp_path / "c.jsonl")


def test_damaged_compact_store_is_refused(store, tmp_path):
    path = tmp_path / "a.jsonl.gz"
    compact(store.path, path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="damaged"):
        list(MeasurementStore(path))
    path.write_bytes(b"plain text")
    with pytest.raises(ValueError, match="damaged"):
        MeasurementStore(path)
    path.write_bytes(gzip.compress(b"plain text\n"))
    with pytest.raises(ValueError, match="not a measurement store"):
        MeasurementStore(path)


def test_what_is_no_regular_file_is_refused(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "device.jsonl").symlink_to("/dev/full")  # reading it never ends
    for name in ("folder", "device"):
        with pytest.raises(ValueError, match="regular file"):
            MeasurementStore(tmp_path / f"{name}.jsonl")


def test_wrong_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"\.jsonl"):
        MeasurementStore(tmp_path / "store.json")


def _append_many(path, first):
    store = MeasurementStore(path)
    for index in range(first, first + 20):
        store.append(_measurement(index))


@pytest.mark.distributed
def test_two_processes_append_to_one_store(tmp_path):
    path = tmp_path / "s.jsonl"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append_many, args=(path, first)) for first in (0, 100)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    rows = sorted(measurement.task.shards[0].rows - 100 for measurement in MeasurementStore(path))
    assert rows == [*range(20), *range(100, 120)]


def _of_device(device, hardware="cpu", index=0):
    task = PlacementTask.uniform([ShardSpec(rows=9, dim=8, pooling_factor=1)], 2, hardware=named_hardware(hardware))
    return dataclasses.replace(_measurement(index), task=task, provenance=Provenance(device=device))


def test_a_store_keeps_to_the_device_of_its_first_measurement(tmp_path):
    path = tmp_path / "s.jsonl"
    first, second = MeasurementStore(path), MeasurementStore(path)  # of two processes that start together
    first.append(_of_device("NVIDIA A100"))
    with pytest.raises(ValueError, match="holds measurements of 'NVIDIA A100', and this device is 'NVIDIA H200'"):
        second.append(_of_device("NVIDIA H200"))
    second.append(_of_device("NVIDIA A100"))
    second.append(_of_device(""))  # not known
    assert len(load_measurements(path)) == 3


def test_stores_of_devices_that_nothing_tells_apart_are_loaded_with_a_warning(tmp_path, caplog):
    paths = [tmp_path / f"{index}.jsonl" for index in range(3)]
    for path, device, hardware in zip(paths, ("A", "B", "C"), ("cpu", "cpu", "h100"), strict=True):
        MeasurementStore(path).append(_of_device(device, hardware))
    assert len(load_measurements(paths[0], paths[2])) == 2 and not caplog.text
    assert len(load_measurements(*paths)) == 3
    assert "hardware is 'cpu'" in caplog.text and "A (1), B (1)" in caplog.text and "C" not in caplog.text
