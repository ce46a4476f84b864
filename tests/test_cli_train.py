from __future__ import annotations

import json

import pytest

from torchrec_dreamshard import Agent
from torchrec_dreamshard.cli import main
from torchrec_dreamshard.config import CostConfig, TrainConfig


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
