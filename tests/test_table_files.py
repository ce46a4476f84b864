import json

import pytest

from torchrec_dreamshard import DeviceSpec, PlacementTask, ShardSpec
from torchrec_dreamshard.planner.models import read_tables
from torchrec_dreamshard.pool import rebatch
from torchrec_dreamshard.reuse import power_law_histogram
from torchrec_dreamshard.table_files import load_features, load_tables, load_tasks, save_tables, save_tasks


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_csv_and_json_say_the_same(tmp_path):
    csv_path = write(
        tmp_path,
        "t.csv",
        "name,rows,dim,pooling,features,weight_dtype,is_weighted\nuser,1000,16,2.5,a b,fp16,true\nitem, 20 ,8,,,,\n",
    )
    tables = [
        {"name": "user", "rows": 1000, "dim": 16, "pooling": 2.5, "features": ["a", "b"], "weight_dtype": "fp16"},
        {"name": "item", "rows": 20, "dim": 8},
    ]
    tables[0]["is_weighted"] = True
    expected = [
        ShardSpec(
            name="user", rows=1000, dim=16, pooling_factor=2.5, num_features=2, weight_dtype="fp16", is_weighted=True
        ),
        ShardSpec(name="item", rows=20, dim=8, pooling_factor=1.0),
    ]
    assert load_tables(csv_path) == expected
    csv_path.write_text("\ufeff" + csv_path.read_text())  # as spreadsheets save it
    assert load_tables(csv_path) == expected
    assert load_tables(write(tmp_path, "list.json", tables)) == expected
    assert load_tables(write(tmp_path, "object.json", {"tables": tables})) == expected


def test_histograms_and_names_in_csv(tmp_path):
    header = "rows,dim," + ",".join(f"bin_{i}" for i in range(17))
    path = write(tmp_path, "t.csv", f"{header}\n10,4,0.5,0.5{',0' * 15}\n10,4{',' * 17}\n")
    first, second = load_tables(path)
    assert first.reuse_histogram == (0.5, 0.5) + (0.0,) * 15 and second.reuse_histogram is None
    assert (first.name, second.name) == ("table_0", "table_1")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "rows,dim\n", "must list tables"),
        ("t.json", "[]", "must list tables"),
        ("t.json", '{"rows": 1}', "must list tables"),
        ("t.json", "{", "is not JSON"),
        ("t.json", "[3]", "table 0: must be an object with rows and dim, got 3"),
        ("t.json", '[{"rows": 1, "dim": 4}, {"dim": 4}]', r"table 1: ShardSpec lacks the fields \['rows'\]"),
        ("t.csv", "rows,dim\n5,4\n-1,4\n", "table 1: ShardSpec.rows must be an integer of at least 1, got -1"),
        ("t.csv", "rows,dim\n5,wide\n", "table 0: ShardSpec.dim must be an integer of at least 1, got 'wide'"),
        ("t.csv", "rows,dim,pooling\n5,4,nan\n", "table 0: ShardSpec.pooling_factor must be a finite number"),
        ("t.csv", "rows,dim,hash_size\n5,4,3\n", "table 0: ShardSpec has unknown fields"),
        ("t.csv", "rows,dim\n5,4,7\n", "table 0: more cells than the header"),
        ("t.csv", "name,rows,dim\na,5,4\na,5,4\n", "names tables twice: a"),
    ],
)
def test_bad_tables_files(tmp_path, name, content, message):
    path = write(tmp_path, name, content)
    with pytest.raises(ValueError, match=message) as caught:
        load_tables(path)
    assert "\n" not in str(caught.value)


def test_tasks_survive_their_file(tmp_path):
    tasks = [
        PlacementTask.uniform([ShardSpec(rows=5, dim=4, pooling_factor=0.5)], 2),
        PlacementTask((ShardSpec(rows=7, dim=8, pooling_factor=2),), (DeviceSpec(host=1),)),
    ]
    save_tasks(tmp_path / "tasks.json", tasks)
    assert load_tasks(tmp_path / "tasks.json") == tasks


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "is not a tasks file"),
        ({"format": "other"}, "is not a tasks file"),
        ({"format": "torchrec_dreamshard.tasks", "version": 2}, "has version 2, this release reads 1"),
        ({"format": "torchrec_dreamshard.tasks", "version": 1, "tasks": []}, "at least one task"),
        ({"format": "torchrec_dreamshard.tasks", "version": 1, "tasks": [{"shards": []}]}, "task 0: .*'devices'"),
    ],
)
def test_bad_tasks_files(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        load_tasks(write(tmp_path, "tasks.json", content))


def test_a_model_of_tables_gives_their_reuse_at_the_jobs_batch(tmp_path):
    table = ShardSpec(
        name="t", rows=10_000, dim=8, pooling_factor=2, reuse_histogram=power_law_histogram(10_000, 131_072, 1.0)
    )
    save_tables(tmp_path / "t.json", [table])
    model = read_tables(tmp_path / "t.json")
    assert model.reuse_histograms(65_536) == {"t": table.reuse_histogram}
    assert model.reuse_histograms(1024) == {"t": rebatch(table, 1024).reuse_histogram}


def test_saved_tables_come_back_with_the_names_of_their_features(tmp_path):
    tables = [
        ShardSpec(name=name, rows=9, dim=4, pooling_factor=1.5, num_features=n) for name, n in (("a", 1), ("b", 2))
    ]
    path = tmp_path / "t.json"
    save_tables(path, tables, {"b": ("x", "y")})
    assert load_tables(path) == tables
    assert load_features(path) == {"a": ("a",), "b": ("x", "y")}
    save_tables(path, tables)
    assert load_tables(path) == tables
    with pytest.raises(ValueError, match="'b' reads 2 features: give their names"):
        load_features(path)
