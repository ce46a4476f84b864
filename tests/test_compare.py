import json

import pytest

from torchrec_dreamshard import CostBreakdown, MeasurementError, PlacementTask, ShardSpec
from torchrec_dreamshard.baselines import BASELINES
from torchrec_dreamshard.cli import compare, main
from torchrec_dreamshard.packing import place_greedily
from torchrec_dreamshard.table_files import save_tasks


class Counting:
    """Costs are the number of shards of a device; a task with one shard cannot be measured."""

    def measure(self, task, placement):
        if task.num_shards == 1:
            raise MeasurementError("too small to measure")
        return CostBreakdown(step_ms=max(list(placement).count(d) for d in range(task.num_devices)))


class Forgetful:
    def measure(self, task, placement):
        return None


class BalancingAgent:
    def place(self, task, *, refine=True, time_budget_s=None, seed=0, use_policy=True):
        return place_greedily(task, [1.0] * task.num_shards, seed) if refine else (0,) * task.num_shards


@pytest.fixture
def tasks_file(tmp_path, monkeypatch):
    monkeypatch.setattr("torchrec_dreamshard.agent.Agent.load", lambda name: BalancingAgent())
    shards = [ShardSpec(name=f"t{i}", rows=10 * 4**i, dim=4, pooling_factor=1) for i in range(8)]
    tasks = [PlacementTask.uniform(shards[:n], 2) for n in (8, 6, 1)]
    save_tasks(tmp_path / "tasks.json", tasks)
    return str(tmp_path / "tasks.json")


def test_strategies_are_judged_by_the_profiler(tasks_file, capsys):
    code = main(["compare", "--tasks", tasks_file, "--profiler", f"{__name__}:Counting", "--json"])
    result = json.loads(capsys.readouterr().out)
    rows = {row["strategy"]: row for row in result["strategies"]}
    assert code == 0 and set(rows) == {*BASELINES, *compare.LEARNED}
    assert (result["num_tasks"], result["num_compared"]) == (3, 2)
    assert rows["both"]["step_ms"] == 3.5 and rows["policy"]["step_ms"] == 7.0
    assert rows["policy"]["step_ms_per_task"] == [8.0, 6.0, None]
    assert rows["policy"]["failed"] == ["too small to measure"]
    # The best heuristic is the reference; size-greedy puts the largest table alone on its device.
    assert rows[result["reference"]]["change_percent"] == 0
    assert rows["size"]["step_ms"] == 6.0 and result["reference"] != "size"


def test_text_output_and_choice_of_strategies(tasks_file, capsys):
    arguments = ["compare", "--tasks", tasks_file, "--profiler", f"{__name__}:Counting"]
    assert main([*arguments, "--strategies", "size", "policy", "both"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 of 3 tasks") and "% vs size" in lines[2]
    assert [line.split()[0] for line in lines[4:]] == ["size", "policy", "both"]
    assert lines[6].split()[1:5] == ["3.500", "-41.4", "±", "2.8"]  # of -42.9 and -40 %
    assert main([*arguments, "--strategies", "magic"]) == 2
    assert "unknown strategies magic; known are random, size" in capsys.readouterr().err
    assert main(["compare", "--tasks", tasks_file, "--profiler", f"{__name__}:Forgetful"]) == 2
    assert "must return a CostBreakdown, got None" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "none.json"], "none.json: No such file"),
        (["--profiler", "magic"], "unknown profiler 'magic'"),
        (["--profiler", "analytic:abacus"], "unknown hardware 'abacus'"),
        (["--profiler", "no.such.module:X"], "there is no module 'no'"),
        (["--profiler", "json:nothing"], "module 'json' has no 'nothing'"),
        (["--profiler", "json:JSONDecoder"], "must give an object with measure"),
        (["--agent", "none.safetensors"], "none.safetensors"),
        (["--num-tables", "900"], "num_shards must lie in 1 to 856"),
        (["--memory-gib", "0.001"], "fits into 4 devices"),
    ],
)
def test_bad_inputs_are_one_line(arguments, message, capsys):
    assert main(["compare", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("dreamshard compare: error: ") and message in err and err.count("\n") == 1


def test_no_task_compared():
    outcomes = {"size": [compare.Outcome(None, 0.1, "x")], "both": [compare.Outcome(1.0, 0.1)]}
    result = compare.summarise(outcomes) | {"num_tasks": 1, "profiler": "p"}
    assert result["num_compared"] == 0 and "- ± -" in compare.as_text(result)
