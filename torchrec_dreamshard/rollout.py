"""The one acting routine: rolls a policy out on the estimated MDP, for collecting, training and planning."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dreamshard.mdp import Episodes, EstimatedMDP
from torchrec_dreamshard.policy_network import Policy


class Rollout(NamedTuple):
    """E episodes of each of B tasks; ``N = B x E``, ``T = S`` steps."""

    placements: Tensor
    """``N x S`` int64, in the order of the task's shards; they fit."""
    step_ms: Tensor
    """``N``: predicted steps."""
    trail: Trail | None
    """What the loss needs, if asked for."""


class Trail(NamedTuple):
    """What was seen and done, step by step."""

    features: Tensor
    """``T x N x D x features``."""
    legal: Tensor
    """``T x N x D`` bool."""
    choices: Tensor
    """``T x N`` int64."""
    active: Tensor
    """``T x N`` bool: False where the episode's shards were already all placed."""
    order: Tensor
    """``N x T`` int64: the shard of each step."""


def roll_out(
    mdp: EstimatedMDP,
    policy: Policy,
    num_episodes: int = 1,
    *,
    generator: torch.Generator | None = None,
    follow: Tensor | None = None,
    keep_trail: bool = False,
    deadline: float | None = None,
) -> Rollout | None:
    """Plays E episodes of each task.

    Args:
        mdp: B tasks under a cost model.
        policy: scores the devices.
        num_episodes: E.
        generator: samples the choices; None takes the most probable device each time.
        follow: ``N x S`` placements to follow instead of choosing (for imitation).
        keep_trail: whether to return what the loss needs; needs a view of all devices.
        deadline: ``time.monotonic()`` at which to give up; None for never.

    Returns:
        The episodes, or None if the deadline passed.

    Raises:
        InfeasiblePlacementError: no placement of a task fits.
    """
    # Without gradients to come, inference mode saves a fifth of the many small operations' time.
    with torch.no_grad() if keep_trail else torch.inference_mode():
        episodes = Episodes(mdp, num_episodes)
        rows = torch.arange(len(episodes.placements))
        order = mdp.order.repeat_interleave(num_episodes, dim=0)
        encoded = policy.encode(mdp.tensors).repeat_interleave(num_episodes, dim=0) if policy.own_dim else None
        own = episodes.latents.new_zeros(*episodes.legal_shape, policy.own_dim)
        trail: list[tuple[Tensor, Tensor, Tensor]] = []
        while not episodes.done:
            if deadline is not None and time.monotonic() > deadline:
                return None
            shard = order[:, episodes.step_index]
            seen = episodes.observe()
            features = policy.features(seen)
            seen_own = (
                own if seen.devices is None else own.gather(1, seen.devices[..., None].expand(-1, -1, own.shape[-1]))
            )
            log_probs = policy.log_probs(features, seen_own, seen.legal)
            if follow is not None:
                choices = follow[rows, shard]
            elif generator is None:
                choices = log_probs.argmax(dim=-1)
            else:
                noise = torch.rand(log_probs.shape, generator=generator).clamp(1e-9, 1 - 1e-7)
                choices = (log_probs - torch.log(-torch.log(noise))).argmax(dim=-1)
            episodes.advance(seen, choices)
            if encoded is not None:
                own[rows, episodes.placements[rows, shard]] += encoded[rows, shard]
            if keep_trail:
                trail.append((features, seen.legal, choices))
        placements, step_ms = episodes.finish()
        if not keep_trail:
            return Rollout(placements, step_ms, None)
        features, legal, choices = (torch.stack(part) for part in zip(*trail, strict=True))
        return Rollout(placements, step_ms, Trail(features, legal, choices, episodes.active.T, order))


def trail_log_probs(policy: Policy, mdp: EstimatedMDP, trail: Trail) -> Tensor:
    """The log-probabilities of a trail under the policy as it is now, with gradients: ``T x N x D``."""
    legal = trail.legal
    own = trail.features.new_zeros(*legal.shape, policy.own_dim)
    if policy.own_dim:
        episodes = trail.order.shape[0] // len(mdp.tasks)
        encoded = policy.encode(mdp.tensors).repeat_interleave(episodes, dim=0)
        in_order = encoded.gather(1, trail.order[..., None].expand(-1, -1, policy.own_dim)).transpose(0, 1)
        chosen = torch.nn.functional.one_hot(trail.choices, legal.shape[-1]).to(in_order.dtype)
        placed = chosen[..., None] * in_order[:, :, None, :]
        own = placed.cumsum(dim=0) - placed
    return policy.log_probs(trail.features, own, legal)
