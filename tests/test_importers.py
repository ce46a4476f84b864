import pytest

from torchrec_dreamshard.hardware import named_hardware
from torchrec_dreamshard.importers import load_csv

HEADER = "measurement,device,rows,dim,pooling_factor,batch_size,is_pooled,compute_ms,step_ms\n"


def write(tmp_path, text):
    path = tmp_path / "timings.csv"
    path.write_text(text)
    return path


def test_rows_of_a_label_become_one_measurement(tmp_path):
    path = write(
        tmp_path,
        HEADER + "a,0,100,16,2.5,512,true,1.5,3\na,1,200,8,1,512,0,2,\na,1,300,8,1,,,,\nb,0,100,16,2,,,0.5,\n",
    )
    first, second = load_csv(path)
    assert first.placement == (0, 1, 1) and first.cost.compute_ms.tolist() == [1.5, 2.0] and first.cost.step_ms == 3
    assert first.task.shards[0].pooling_factor == 2.5 and not first.task.shards[1].is_pooled
    assert second.task.num_devices == 1 and second.cost.step_ms is None


def test_a_device_without_shards_computes_nothing(tmp_path):
    (m,) = load_csv(write(tmp_path, HEADER + "a,0,100,16,2,,,1,\na,2,,,,,,,\n"))
    assert m.task.num_devices == 3 and m.cost.compute_ms.tolist() == [1, 0, 0]


def test_what_ran_fits_into_memory(tmp_path):
    (m,) = load_csv(write(tmp_path, HEADER + "a,0,300000000,128,2,,,1,\na,1,100,16,2,,,1,\n"))
    assert m.task.devices[0].hbm_bytes == 300_000_000 * 128 * 4
    (cpu,) = load_csv(write(tmp_path, HEADER + "a,0,300000000,128,2,,,1,\n"), named_hardware("cpu"))
    assert cpu.task.devices[0].ddr_bytes == 300_000_000 * 128 * 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("measurement,device,rows\n", "lacks the columns"),
        (HEADER.replace("step_ms", "color"), "unknown columns"),
        (HEADER, "no rows"),
        (HEADER + "a,0,100,16,2,,,nan,\n", "line 2: compute_ms must be a finite"),
        (HEADER + "a,0,100,16,2,,,-1,\n", "line 2: compute_ms must be a finite"),
        (HEADER + "a,0,100,16,2,,,1,\na,0,100,16,2,,,2,\n", "line 3: compute_ms of device 0 is 1"),
        (HEADER + "a,0,100,16,2,,,1,\na,1,100,16,2,,,,\n", r"not for \[1\]"),
        (HEADER + "a,0,0,16,2,,,1,\n", "line 2: ShardSpec.rows"),
        (HEADER + "a,100000000,100,16,2,,,1,\n", "line 2: device must be an index from 0 to 65535"),
        (HEADER + "a,0,100\n", "number of values"),
        (HEADER + "a,0,100,16,2,,,,\n", "at least one term"),
    ],
)
def test_bad_files_are_refused_with_the_place(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        load_csv(write(tmp_path, text))
