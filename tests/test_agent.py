from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from additive_model import AdditiveCostModel
from placement_tasks import random_task
from placer_contract import BalancingPlacerContract
from safetensors.torch import save_file

from torchrec_dreamshard.agent import FORMAT, Agent
from torchrec_dreamshard.config import CostConfig, PolicyConfig, SearchConfig
from torchrec_dreamshard.cost_network import make_cost_model
from torchrec_dreamshard.policy_network import make_policy

QUICK = SearchConfig(num_kicks=2, num_rollouts=2)


def make_agent(cost_model=None, form="default"):
    policy = make_policy(PolicyConfig(form=form), torch.Generator().manual_seed(0))
    return Agent(cost_model or AdditiveCostModel(launch_ms=0.01), policy, {"trained_on": "paper"}, search_config=QUICK)


class TestPolicyAlone(BalancingPlacerContract):
    @pytest.fixture
    def placer(self):
        agent = make_agent()
        return lambda task, seed: agent.place(task, refine=False, seed=seed)


class TestRefined(BalancingPlacerContract):
    @pytest.fixture
    def placer(self):
        agent = make_agent()
        return lambda task, seed: agent.place(task, seed=seed)


class TestRefinedInNoTime(BalancingPlacerContract):
    @pytest.fixture
    def placer(self):
        agent = make_agent()
        return lambda task, seed: agent.place(task, time_budget_s=0.0, seed=seed)


@pytest.mark.parametrize("form", ["physical", "paper"])
def test_a_file_gives_the_same_agent(tmp_path, form):
    cost = make_cost_model(CostConfig(form=form))
    agent = make_agent(cost, "paper" if form == "paper" else "default")
    agent.save(tmp_path / "agent.safetensors")
    again = Agent.load(tmp_path / "agent.safetensors")
    task = random_task(12, 3)
    assert again.metadata == agent.metadata and again.search_config == QUICK
    assert again.place(task, refine=False) == agent.place(task, refine=False)
    assert again.predict(task, (0, 1, 2) * 4) == agent.predict(task, (0, 1, 2) * 4)
    assert os.listdir(tmp_path) == ["agent.safetensors"]


def test_predicts_the_terms_of_the_model():
    task = random_task(6, 2, background_ms=1.5)
    cost = make_agent(AdditiveCostModel(std=0.1)).predict(task, (0, 0, 0, 1, 1, 1))
    assert cost.step_ms == pytest.approx(cost.device_ms.max(), rel=1e-5)
    assert cost.background_ms.tolist() == [1.5, 1.5]
    assert cost.step_std_ms > 0
    with pytest.raises(ValueError, match="placement"):
        make_agent().predict(task, (0, 1))


def test_no_shards():
    task = random_task(0, 2)
    assert make_agent().place(task) == ()
    assert make_agent().predict(task, ()).step_ms == 0


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_shipped_agents_load_and_say_what_they_are(name):
    agent = Agent.load(name)
    assert agent.metadata["trained_on"] in ("measured", "simulated")
    task = random_task(10, 2)
    assert len(agent.place(task, refine=False)) == 10


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match="no such agent file"):
        Agent.load(path)
    path.write_bytes(b"not at all")
    with pytest.raises(ValueError, match="not a readable agent file"):
        Agent.load(path)
    save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="not an agent file"):
        Agent.load(path)
    save_file({"a": torch.zeros(1)}, path, metadata={"format": FORMAT, "version": "99"})
    with pytest.raises(ValueError, match="version 99"):
        Agent.load(path)
    make_agent(make_cost_model(CostConfig())).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a readable agent file"):
        Agent.load(path)


def test_a_bad_budget_is_refused():
    with pytest.raises(ValueError, match="time_budget_s"):
        make_agent().place(random_task(4, 2), time_budget_s=-1)


def test_a_spent_budget_ends_the_rollout_too(monkeypatch):
    task, asked = random_task(30, 4), []
    monkeypatch.setattr("torchrec_dreamshard.agent.roll_out", lambda *_, deadline, **__: asked.append(deadline))
    placement = make_agent().place(task, refine=False, time_budget_s=0)
    assert asked[0] is not None and len(set(task.check_placement(placement))) == 4


def test_two_processes_with_other_hash_seeds_place_alike():
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from placement_tasks import random_task\n"
        "from torchrec_dreamshard.agent import Agent\n"
        "print(Agent.load('cuda').place(random_task(15, 3, hbm_bytes=10**9)))"
    )

    def output(hash_seed):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout

    assert output("1") == output("2")
