from __future__ import annotations

import json

import pytest

from torchrec_dreamshard import Agent, CostBreakdown, Measurement, PlacementTask, ShardSpec
from torchrec_dreamshard.cli import main
from torchrec_dreamshard.config import CostConfig, TrainConfig
from torchrec_dreamshard.samples import MeasurementStore


@pytest.fixture
def quick(monkeypatch):
    """The default config, so small that training takes a moment."""
    tiny = TrainConfig(num_iterations=1, num_updates=1, num_imitations=0, tasks_per_update=1, num_episodes=2)
    object.__setattr__(tiny, "cost", CostConfig(num_steps=5, num_members=2))
    monkeypatch.setattr("torchrec_dreamshard.config.TrainConfig", lambda: tiny)


ARGUMENTS = ["--num-tasks", "4", "--num-tables", "6-8", "--num-devices", "2", "--json"]


def test_trains_on_a_profiler_and_continues(tmp_path, capsys, quick):
    out = str(tmp_path / "a.safetensors")
    code = main(["train", "--profiler", "analytic:a100", "--num-measurements", "9", "--out", out, *ARGUMENTS])
    result = json.loads(capsys.readouterr().out)
    assert code == (0 if result["report"]["ready"] else 1)
    assert result["num_measurements"] == 9 and result["trained_on"] == "simulated"
    assert Agent.load(out).metadata["num_measurements"] == 9
    again = str(tmp_path / "b.safetensors")
    main(
        ["train", "--profiler", "analytic:a100", "--num-measurements", "3", "--agent", out, "--out", again, *ARGUMENTS]
    )
    assert json.loads(capsys.readouterr().out)["continued_from"]["num_measurements"] == 9


def test_a_report_that_is_not_ready_is_no_success(tmp_path, capsys, quick, monkeypatch):
    from torchrec_dreamshard.fitting import FitReport

    monkeypatch.setattr(FitReport, "to_dict", lambda self: {"ready": False, "reason": "too little data", "terms": {}})
    out = str(tmp_path / "a.safetensors")
    code = main(["train", "--profiler", "analytic:a100", "--num-measurements", "4", "--out", out, *ARGUMENTS[:-1]])
    assert code == 1
    assert "NOT READY to plan with: too little data" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "nothing to learn from"),
        (["--num-measurements", "5"], "needs a --profiler"),
        (["--measurements", "missing.jsonl"], "missing.jsonl"),
        (["--profiler", "analytic:a100", "--agent", "missing.safetensors"], "no such agent file"),
    ],
)
def test_usage_errors(tmp_path, capsys, arguments, message):
    assert main(["train", "--out", str(tmp_path / "a.safetensors"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unwritable_file_is_refused_before_the_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torchrec_dreamshard.training.train", lambda *a, **k: pytest.fail("trained for nothing"))
    for out, message in ((tmp_path, "is a folder"), (tmp_path / "none" / "a.safetensors", "no folder")):
        assert main(["train", "--profiler", "analytic:a100", "--out", str(out)]) == 2
        assert message in capsys.readouterr().err


def csv_file(tmp_path, count, bad=""):
    lines = ["measurement,device,rows,dim,pooling_factor,batch_size,compute_ms"]
    for i in range(count):
        for device in range(2):
            dim, pooling = 8 * (1 + (i + device) % 5), 1 + (3 * i + device) % 7
            for _ in range(2):
                cost = 2 * (0.1 + 0.01 * dim * pooling)
                lines.append(f"m{i},{device},{1000 * (i + 1)},{dim},{pooling},512,{cost}")
    path = tmp_path / "timings.csv"
    path.write_text("\n".join([*lines, bad]))
    return str(path)


def test_learns_from_a_csv(tmp_path, capsys, quick):
    out = str(tmp_path / "a.safetensors")
    code = main(["train", "--measurements", csv_file(tmp_path, 12), "--hardware", "cpu", "--out", out, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert code == 0 and result["report"]["ready"]
    assert result["profilers"] == ["csv"] and result["num_measurements"] == 12
    assert result["report"]["terms"]["compute_ms"]["num_values"] == 24


def test_the_help_names_the_columns(capsys):
    assert main(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for column in ("measurement", "device", "pooling_factor", "forward_compute_ms", "step_ms", "reuse_histogram"):
        assert column in text


@pytest.mark.parametrize("bad", ["m0,0,10,8,1,512,nan", "m0,0,10,8,1,512,-1", "m99,0,10,8", "m0,0,10,8,1,512,77"])
def test_bad_timings_are_refused_with_their_line(tmp_path, capsys, bad):
    out = tmp_path / "a.safetensors"
    assert main(["train", "--measurements", csv_file(tmp_path, 3, bad), "--out", str(out)]) == 2
    assert "timings.csv, line 14:" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("cost", [float("nan"), -1.0])
def test_bad_costs_of_a_store_are_refused_with_their_line(tmp_path, capsys, cost):
    store = tmp_path / "s.jsonl"
    task = PlacementTask.uniform([ShardSpec(rows=10, dim=8, pooling_factor=1)], 1)
    MeasurementStore(store).append(Measurement(task=task, placement=(0,), cost=CostBreakdown(compute_ms=[1.0])))
    store.write_text(store.read_text().replace("[1.0]", json.dumps([cost])))
    out = tmp_path / "a.safetensors"
    assert main(["train", "--measurements", str(store), "--out", str(out)]) == 2
    assert "line 2" in capsys.readouterr().err and not out.exists()


def test_too_few_rows_and_single_devices_are_told(tmp_path, capsys, caplog, quick):
    out = str(tmp_path / "a.safetensors")
    assert main(["train", "--measurements", csv_file(tmp_path, 3), "--out", out]) == 1
    assert "NOT READY to plan with: only 6 held-out values" in capsys.readouterr().out
    path = tmp_path / "single.csv"
    path.write_text("".join(line for line in open(csv_file(tmp_path, 12)) if ",1," not in line[:6]))
    main(["train", "--measurements", str(path), "--out", out])
    assert "every measurement is of a single device" in caplog.text
