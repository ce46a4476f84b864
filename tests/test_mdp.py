from __future__ import annotations

import pytest
import torch
from additive_model import AdditiveCostModel
from placement_tasks import fits, planted_task, random_task
from placer_contract import shard

from torchrec_dreamshard.config import PolicyConfig
from torchrec_dreamshard.mdp import SHORTLIST, Episodes, EstimatedMDP
from torchrec_dreamshard.policy_network import make_policy
from torchrec_dreamshard.rollout import roll_out, trail_log_probs
from torchrec_dreamshard.types import PlacementTask

FORMS = ("default", "paper")


def policy(form="default", seed=0):
    return make_policy(PolicyConfig(form=form), torch.Generator().manual_seed(seed)).eval()


def test_shards_come_in_descending_cost_and_padding_last():
    tasks = [random_task(5, 2, seed=1), random_task(9, 3, seed=2)]
    mdp = EstimatedMDP(AdditiveCostModel(), tasks)
    for row, task in enumerate(tasks):
        cost = mdp.shard_load[row].sum(-1)[mdp.order[row, : task.num_shards]]
        assert bool((cost.diff() <= 0).all())
        assert sorted(mdp.order[row, : task.num_shards].tolist()) == list(range(task.num_shards))


@pytest.mark.parametrize("form", FORMS)
def test_a_task_is_played_alike_alone_and_in_a_batch(form):
    tasks = [random_task(5, 2, seed=1), random_task(9, 3, seed=2), random_task(7, 4, seed=3)]
    model, agent = AdditiveCostModel(launch_ms=0.1), policy(form)
    together = roll_out(EstimatedMDP(model, tasks), agent)
    for row, task in enumerate(tasks):
        alone = roll_out(EstimatedMDP(model, [task]), agent)
        assert together.placements[row, : task.num_shards].tolist() == alone.placements[0].tolist()
        assert together.step_ms[row].item() == pytest.approx(alone.step_ms[0].item(), rel=1e-5)


def test_the_final_cost_is_that_of_the_placement():
    task = random_task(12, 3)
    mdp = EstimatedMDP(AdditiveCostModel(launch_ms=0.5), [task])
    rollout = roll_out(mdp, policy(), 4, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(rollout.step_ms, mdp.step_ms(rollout.placements[None])[0], rtol=1e-5)


def test_the_load_with_the_shard_is_the_load_after_placing_it():
    mdp = EstimatedMDP(AdditiveCostModel(launch_ms=0.5), [random_task(6, 3)])
    episodes = Episodes(mdp, 2)
    while not episodes.done:
        seen = episodes.observe()
        choice = torch.tensor([1, 2])
        episodes.advance(seen, choice)
        rows = torch.arange(2)
        assert torch.allclose(episodes.load[rows, choice], seen.load_with[rows, choice])


def test_memory_masks_devices_and_dead_ends_are_repaired():
    task = planted_task(20, 3, 0.97, seed=1)
    rollout = roll_out(
        EstimatedMDP(AdditiveCostModel(), [task]), policy(), 8, generator=torch.Generator().manual_seed(0)
    )
    assert all(fits(task, placement) for placement in rollout.placements.tolist())


@pytest.mark.parametrize("form", FORMS)
def test_acting_and_loss_share_one_mask_and_one_distribution(form):
    task = planted_task(15, 4, 0.9, seed=2)
    mdp, agent = EstimatedMDP(AdditiveCostModel(), [task]), policy(form)
    trail = roll_out(mdp, agent, 6, generator=torch.Generator().manual_seed(0), keep_trail=True).trail
    log_probs = trail_log_probs(agent, mdp, trail)
    chosen = log_probs.gather(-1, trail.choices[..., None])
    assert bool(chosen.isfinite().all())
    assert bool((log_probs.exp()[~trail.legal] == 0).all())
    assert torch.allclose(log_probs.exp().sum(-1), torch.ones_like(log_probs[..., 0]), atol=1e-5)
    # Acting greedily on the same states takes the device that the loss finds most probable.
    greedy = roll_out(mdp, agent, keep_trail=True).trail
    assert torch.equal(trail_log_probs(agent, mdp, greedy).argmax(-1), greedy.choices)


def test_with_very_many_devices_only_a_shortlist_is_looked_at():
    shards = [shard(f"s{i}", 10, pooling_factor=1.0 + i) for i in range(150)]
    task = PlacementTask.uniform(shards, 2 * SHORTLIST, hbm_bytes=30)
    mdp = EstimatedMDP(AdditiveCostModel(), [task])
    assert Episodes(mdp, 1).observe().legal.shape[1] == SHORTLIST
    placement = roll_out(mdp, policy()).placements[0].tolist()
    assert fits(task, placement) and len(set(placement)) == 2 * SHORTLIST


def test_the_untrained_policy_is_greedy_under_its_cost_model():
    # Costs 7, 6, 5, 4, 3: largest first onto the least loaded gives 7 + 4 + 3 against 6 + 5.
    shards = [shard(f"s{i}", 1, dim=100, pooling_factor=float(c)) for i, c in enumerate((7, 6, 5, 4, 3))]
    mdp = EstimatedMDP(AdditiveCostModel(), [PlacementTask.uniform(shards, 2)])
    placement = roll_out(mdp, policy()).placements[0].tolist()
    assert placement[0] != placement[1] == placement[2]
    assert placement[3] == placement[0]


def test_features_do_not_depend_on_the_unit_of_time():
    task = random_task(10, 4)
    mdp = EstimatedMDP(AdditiveCostModel(), [task])
    episodes = Episodes(mdp, 1)
    for _ in range(3):
        seen = episodes.observe()
        episodes.advance(seen, torch.tensor([1]))
    seen = episodes.observe()
    scaled = seen._replace(
        **{
            name: 7.0 * getattr(seen, name)
            for name in ("load", "load_with", "background", "shard", "largest", "placed", "balanced", "to_come")
        }
    )
    assert torch.allclose(policy().features(seen), policy().features(scaled), atol=1e-5)
