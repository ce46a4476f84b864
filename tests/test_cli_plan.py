"""``dreamshard plan`` from tables files and model factories to plan, picture and reasons."""

from __future__ import annotations

import json
import sys

import pytest
from planner_models import bag_collection
from stand_in_agent import StandInAgent

from torchrec_dreamshard.cli import main
from torchrec_dreamshard.planner import costs, load_plan


def model_factory():
    return bag_collection("meta")


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(costs, "resolve_agent", lambda agent, device: StandInAgent())
    path = tmp_path / "tables.csv"
    path.write_text(
        "name,rows,dim,pooling,features,is_pooled,is_weighted\n"
        "a,1000,64,10,2,true,false\nb,2000,32,1,1,true,true\nc,500,16,3,1,false,false\nd,100,64,5,1,true,false\n"
    )
    return path


def test_tables_to_plan_picture_and_reasons(tables, capsys):
    pytest.importorskip("matplotlib")
    argv = ["plan", "--tables", str(tables), "--world-size", "4", "--local-world-size", "2", "--hbm-gib", "1"]
    argv += ["--out", "p.json", "--picture", "p.png", "--explain", "--json", "--pin", "d=3", "--together", "a", "b"]
    assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_tables"] == 4 and len(result["devices"]) == 4 and len(result["tables"]) == 4
    plan = {name: s.ranks for module in load_plan("p.json").plan.values() for name, s in module.items()}
    assert plan["d"] == [3] and plan["a"] == plan["b"]
    assert (tables.parent / "p.png").read_bytes().startswith(b"\x89PNG")


def test_model_factory_and_text(tables, capsys):
    assert main(["plan", "--model", f"{__name__}:model_factory", "--world-size", "2", "--compute-device", "cpu"]) == 0
    assert "4 tables planned on 2 ranks" in capsys.readouterr().out
    assert main(["plan", "--tables", str(tables), "--world-size", "2", "--explain", "--previous", "plan.json"]) == 0
    assert "new table" in capsys.readouterr().out


def test_topology_file(tables, tmp_path, capsys):
    (tmp_path / "topology.json").write_text('{"world_size": 8, "local_world_size": 4, "hbm_cap": 1000000000}')
    assert main(["plan", "--tables", str(tables), "--topology", "topology.json", "--world-size", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["devices"]) == 4


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--world-size", "2", "--batch-size", "1", "--hbm-gib", "1e-4", "--ddr-gib", "1e-4"], "table bags.a needs"),
        ([], "world size"),
        (["--world-size", "3", "--local-world-size", "2"], "multiple of its local_world_size"),
        (["--world-size", "2", "--pin", "a"], "TABLE=RANK"),
        (["--world-size", "2", "--pin", "a=2"], "pins must be ranks from 0 to 1, got 2 for table a"),
        (["--world-size", "2", "--pin", "a=0", "--pin", "a=1"], "gives table a the ranks 0 and 1"),
        (["--world-size", "2", "--previous", "none.json"], "none.json"),
        (["--world-size", "2", "--topology", "none.json"], "none.json"),
        (["--world-size", "2", "--hbm-gib", "1", "--out", "none/plan.json"], "no folder 'none'"),
        (["--world-size", "2", "--hbm-gib", "1e300"], "must be at most 8,589,934,591 GiB"),
        (["--world-size", "2", "--picture", "."], "is a folder"),
    ],
)
def test_bad_input_is_one_line(tables, capsys, argv, message):
    assert main(["plan", "--tables", str(tables), *argv]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert message in error[-1] and "Traceback" not in "\n".join(error)
    assert not (tables.parent / "plan.json").exists()


def test_a_picture_without_matplotlib_is_explained(tables, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert main(["plan", "--tables", str(tables), "--world-size", "2", "--picture", "p.png"]) == 2
    assert "torchrec_dreamshard[plot]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "model", "message"),
    [
        ("def factory(): raise KeyError('x')", "broken:factory", "broken:factory failed with KeyError"),
        ("def factory(size): return size", "broken:factory", "failed with TypeError"),
        ("1 / 0", "broken:factory", "importing broken failed with ZeroDivisionError"),
        ("def (:", "broken:factory", "importing broken failed with SyntaxError"),
        ("", "broken", "expected MODULE:NAME"),
    ],
)
def test_a_broken_factory_is_one_line(tmp_path, capsys, monkeypatch, body, model, message):
    (tmp_path / "broken.py").write_text(body + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    assert main(["plan", "--model", model, "--world-size", "2"]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and message in error[0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.json", '[{"name": "a.b", "rows": 10, "dim": 4}]', "no collection for these tables"),
        ("t.json", '[{"name": "a", "rows": 100000000000000000000000, "dim": 4}]', "no collection for these tables"),
        ("t.csv", b"\xff\xfe\x00", "t.csv is not CSV"),
    ],
)
def test_tables_that_no_collection_holds(tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["plan", "--tables", str(tmp_path / name), "--world-size", "2"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "value"), [("hbm_cap", '"big"'), ("world_size", "-2"), ("custom_topology_data", "1")]
)
def test_impossible_topology_arguments(tables, tmp_path, capsys, argument, value):
    (tmp_path / "topology.json").write_text(f'{{"world_size": 2, "{argument}": {value}}}')
    assert main(["plan", "--tables", str(tables), "--topology", "topology.json"]) == 2
    assert "topology" in capsys.readouterr().err
