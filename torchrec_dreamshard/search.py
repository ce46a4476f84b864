"""Refines placements under a cost model: moves and swaps around the slowest devices, from several starts.

An iteration looks at every move and swap of a shard on a slowest device in three sieves, each smaller and more
exact: loads taken as additive, the two changed devices predicted anew, the whole step predicted. The walk goes
downhill in the predicted step; between equal steps in a smooth measure of imbalance, which leads across the
plateaus that a maximum has. At the bottom it is kicked, and the best placement is kept.

The clock only stops the walk, it never steers it: a search that converges in time gives the same placement
whatever the machine's speed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchrec_dreamshard.config import SearchConfig
from torchrec_dreamshard.mdp import Episodes, EstimatedMDP

GREEDY_DEVICES = 16
"""Devices on which the greedy placement tries a shard."""
_BALANCE = 1e-2
"""Weight of a device's own load beside the step in the greedy placement."""
_BETTER = 1e-6
"""Relative gain below which two steps count as equal: float32 sums are no more exact."""
_MAX_PAIRS = 65_536
"""Moves and swaps of the first sieve; with more, a sample of the slowest devices' shards is looked at."""
_MAX_ROWS = 65_536
"""Device loads of the last sieve, which bounds its finalists with very many devices."""
_LARGE = 32
"""With so many devices or more, several changes of disjoint devices are tried at once."""


class RefineResult(NamedTuple):
    """The best placement found."""

    placement: tuple[int, ...]
    predicted_ms: float
    """Its predicted step, with the caution of ``SearchConfig``."""
    converged: bool
    """False when the deadline stopped the search."""


class _Candidates(NamedTuple):
    """``M`` changes: shard ``shard`` goes from ``source`` to ``target``, and ``back`` (or none: -1) the other way."""

    shard: Tensor
    source: Tensor
    target: Tensor
    back: Tensor


class _Problem:
    """What stays the same while one task's placement is refined."""

    def __init__(self, mdp: EstimatedMDP, config: SearchConfig) -> None:
        self.model, self.config, self.tensors = mdp.cost_model, config, mdp.tensors
        num_shards, self.num_devices = mdp.tasks[0].num_shards, mdp.tasks[0].num_devices
        # A row of zeros stands for "no shard", so that a move is a swap with it.
        self.latents = torch.cat([mdp.latents[0, :num_shards], mdp.latents.new_zeros(1, mdp.latents.shape[-1])])
        self.shard_load = torch.cat([mdp.shard_load[0, :num_shards], mdp.shard_load.new_zeros(1, 3)])
        self.need = torch.cat([self.tensors.memory_bytes[0, :num_shards], torch.zeros(1, 2, dtype=torch.float64)])
        self.capacity = self.tensors.capacity_bytes[0]
        self.background = self.tensors.background_ms[0]
        self.hardware = self.tensors.hardware[0]
        self.finalists = max(8, min(config.num_finalists, _MAX_ROWS // self.num_devices))

    def compute(self, latents: Tensor) -> Tensor:
        """``... x H`` to forward and backward compute ``... x 2`` in ms."""
        compute: Tensor = self.model.device_compute(latents, self.hardware)
        return compute

    def caution(self, latents: Tensor) -> Tensor:
        """``... x H`` to what is added to a device's time for the model's doubt, ``...`` in ms."""
        if not self.config.caution:
            return latents.new_zeros(latents.shape[:-1])
        return self.config.caution * self.model.compute_std(latents, self.hardware)

    def step_ms(self, compute: Tensor, caution: Tensor, latents: Tensor) -> Tensor:
        """Predicted steps with caution of ``K x D`` devices: ``K``."""
        predicted = self.model.combine(compute[None], latents[None], self.tensors)
        device_ms = predicted.forward_compute_ms + predicted.forward_comms_ms + predicted.backward_comms_ms
        device_ms = device_ms + predicted.backward_compute_ms + self.background
        extra = (device_ms + caution).amax(dim=-1) - device_ms.amax(dim=-1)
        return (predicted.step_ms + extra)[0]

    def parts(self, compute: Tensor, exchange: Tensor, background: Tensor) -> Tensor:
        """The four loads whose balance is smoothed: forward, backward, exchange, all together; ``... x 4``."""
        total = compute.sum(dim=-1) + exchange + background
        return torch.cat([compute, exchange[..., None], total[..., None]], dim=-1)


def _power(values: Tensor) -> Tensor:
    """16th powers; far cheaper than ``pow``."""
    power: Tensor = values.square().square().square().square()
    return power


def _root(values: Tensor) -> Tensor:
    return values.clamp(min=0).sqrt().sqrt().sqrt().sqrt()


class _Walk:
    """One placement and everything that follows from it."""

    def __init__(self, problem: _Problem, placement: Tensor) -> None:
        self.problem = problem
        self.placement = placement
        num = problem.num_devices
        one_more = problem.latents.new_zeros(num, problem.latents.shape[-1])
        self.latents = one_more.index_add(0, placement, problem.latents[:-1])
        self.exchange = problem.shard_load.new_zeros(num).index_add(0, placement, problem.shard_load[:-1, 2])
        self.free = problem.capacity.index_add(0, placement, problem.need[:-1], alpha=-1)
        self.compute, self.caution = problem.compute(self.latents), problem.caution(self.latents)
        self.step_ms = float(problem.step_ms(self.compute[None], self.caution[None], self.latents[None]))
        self.parts = problem.parts(self.compute.clamp(min=0), self.exchange, problem.background)
        self.scale = self.parts.amax(dim=0).clamp(min=1e-9)
        self.powers = _power(self.parts / self.scale)
        self.power_sums = self.powers.sum(dim=0)
        self.smooth = float((self.scale * _root(self.power_sums)).sum())

    def slowest(self) -> Tensor:
        """Devices with the largest load, of either kind; more of them with very many devices."""
        count = max(1, self.problem.num_devices // 128)
        devices: Tensor = torch.unique(self.parts.topk(count, dim=0).indices.flatten())  # untyped in PyTorch
        return devices

    def smoothed(self, candidates: _Candidates, new_source: Tensor, new_target: Tensor) -> Tensor:
        """Smooth imbalance after ``M`` changes, from the two devices' new ``M x 4`` loads."""
        old = self.powers[candidates.source] + self.powers[candidates.target]
        new = _power(new_source / self.scale) + _power(new_target / self.scale)
        return (self.scale * _root(self.power_sums - old + new)).sum(dim=-1)

    def sieve_additive(self, generator: torch.Generator) -> _Candidates:
        """All moves and swaps of the slowest devices' shards that fit, the most promising of them."""
        problem, placement = self.problem, self.placement
        num_shards, num_devices = len(placement), problem.num_devices
        shards = torch.isin(placement, self.slowest()).nonzero().flatten()
        most = max(1, _MAX_PAIRS // (num_shards + num_devices))
        if len(shards) > most:
            shards = shards[torch.randperm(len(shards), generator=generator)[:most]].sort().values
        devices = torch.cat([torch.arange(num_devices), placement])
        backs = torch.cat([torch.full((num_devices,), num_shards), torch.arange(num_shards)])
        shard = shards.repeat_interleave(len(devices))
        candidates = _Candidates(shard, placement[shard], devices.repeat(len(shards)), backs.repeat(len(shards)))
        net = problem.need[candidates.shard] - problem.need[candidates.back]
        fits = (self.free[candidates.source] + net >= 0).all(dim=-1)
        fits &= (self.free[candidates.target] - net >= 0).all(dim=-1)
        candidates = _take(candidates, (fits & (candidates.source != candidates.target)).nonzero().flatten())
        # A fused kernel takes less than its shards alone: what moves is scaled by how much less.
        alone = problem.shard_load.sum(dim=0).clamp(min=1e-9)
        fused = torch.cat([self.compute.sum(dim=0).clamp(min=0), self.exchange.sum(dim=0, keepdim=True)]) / alone
        weight = torch.cat([problem.shard_load * fused, (problem.shard_load * fused).sum(dim=-1, keepdim=True)], dim=-1)
        change = weight[candidates.shard] - weight[candidates.back]
        new_source = (self.parts[candidates.source] - change).clamp(min=0)
        smooth = self.smoothed(candidates, new_source, (self.parts[candidates.target] + change).clamp(min=0))
        count = min(problem.config.num_candidates, len(smooth))
        return _take(candidates, smooth.topk(count, largest=False).indices)

    def sieve_devices(self, candidates: _Candidates) -> tuple[_Candidates, Tensor, Tensor, Tensor]:
        """The candidates in ascending smooth imbalance, their two devices predicted anew.

        Returns:
            Candidates, smooth imbalance ``M``, and both devices' latents ``M x 2 x H`` and compute ``M x 2 x 2``.
        """
        problem = self.problem
        change = problem.latents[candidates.shard] - problem.latents[candidates.back]
        pair = torch.stack([candidates.source, candidates.target], dim=1)
        latents = self.latents[pair] + torch.stack([-change, change], dim=1)
        compute = problem.compute(latents)
        sent = problem.shard_load[candidates.shard, 2] - problem.shard_load[candidates.back, 2]
        exchange = self.exchange[pair] + torch.stack([-sent, sent], dim=1)
        parts = problem.parts(compute.clamp(min=0), exchange, problem.background[pair])
        smooth = self.smoothed(candidates, parts[:, 0], parts[:, 1])
        order = smooth.argsort(stable=True)
        return _take(candidates, order), smooth[order], latents[order], compute[order]

    def improved(self, generator: torch.Generator) -> _Walk | None:
        """The best neighbour if it is better, else None."""
        candidates = self.sieve_additive(generator)
        if not len(candidates.shard):
            return None
        candidates, smooth, latents, compute = self.sieve_devices(candidates)
        count = min(self.problem.finalists, len(smooth))
        rows = torch.arange(count)
        caution = self.problem.caution(latents[:count])
        all_latents = self.latents.expand(count, -1, -1).clone()
        all_compute, all_caution = self.compute.expand(count, -1, -1).clone(), self.caution.expand(count, -1).clone()
        for side, device in enumerate((candidates.source[:count], candidates.target[:count])):
            all_latents[rows, device] = latents[:count, side]
            all_compute[rows, device] = compute[:count, side]
            all_caution[rows, device] = caution[:, side]
        step = self.problem.step_ms(all_compute, all_caution, all_latents)
        best = int(step.argmin())
        if float(step[best]) >= self.step_ms * (1 - _BETTER):
            # No shorter step. An equal one that is better balanced leads on; they are sorted by balance.
            level = (step <= self.step_ms * (1 + _BETTER / 10)).nonzero().flatten()
            if not len(level) or float(smooth[level[0]]) >= self.smooth * (1 - 10 * _BETTER):
                return None
            best = int(level[0])
        walks = [self._changed(candidates, [best])]
        if self.problem.num_devices >= _LARGE:
            walks.append(self._changed(candidates, self._disjoint(candidates, smooth, best)))
        better = [walk for walk in walks if self.loses_to(walk)]
        return min(better, key=lambda walk: (walk.step_ms, walk.smooth)) if better else None

    def loses_to(self, other: _Walk) -> bool:
        """Whether the other's step is shorter, or as short and better balanced (which cannot go in circles)."""
        if other.step_ms < self.step_ms * (1 - _BETTER):
            return True
        return other.step_ms <= self.step_ms * (1 + _BETTER / 10) and other.smooth < self.smooth * (1 - 10 * _BETTER)

    def _disjoint(self, candidates: _Candidates, smooth: Tensor, first: int) -> list[int]:
        """Changes that improve the balance and share no device, starting with ``first``."""
        chosen, taken = [first], {int(candidates.source[first]), int(candidates.target[first])}
        pairs = zip(candidates.source.tolist(), candidates.target.tolist(), smooth.tolist(), strict=True)
        for index, (source, target, value) in enumerate(pairs):
            if value < self.smooth and source not in taken and target not in taken:
                chosen.append(index)
                taken |= {source, target}
        return chosen

    def _changed(self, candidates: _Candidates, which: Sequence[int]) -> _Walk:
        placement = torch.cat([self.placement, self.placement.new_zeros(1)])
        index = torch.tensor(which)
        placement[candidates.shard[index]] = candidates.target[index]
        placement[candidates.back[index]] = candidates.source[index]
        return _Walk(self.problem, placement[:-1])

    def kicked(self, generator: torch.Generator) -> _Walk:
        """A random neighbour a few changes away, most of them at the slowest devices; it fits."""
        problem, placement, free = self.problem, self.placement.clone(), self.free.clone()
        num_shards, num_devices = len(placement), problem.num_devices
        slow = self.slowest()
        for _ in range(2 + int(torch.randint(0, 4, (1,), generator=generator))):
            pick = torch.randint(0, 1 << 30, (4,), generator=generator).tolist()
            pool = torch.isin(placement, slow).nonzero().flatten() if pick[0] % 4 else torch.arange(num_shards)
            shard = int(pool[pick[1] % len(pool)]) if len(pool) else pick[1] % num_shards
            source = int(placement[shard])
            back = num_shards if pick[2] % 3 == 0 else pick[3] % num_shards
            target = pick[3] % num_devices if back == num_shards else int(placement[back])
            net = problem.need[shard] - problem.need[back]
            if source != target and bool((free[source] + net >= 0).all()) and bool((free[target] - net >= 0).all()):
                placement[shard] = target
                if back < num_shards:
                    placement[back] = source
                free[source] += net
                free[target] -= net
        return _Walk(problem, placement)


def _take(candidates: _Candidates, index: Tensor) -> _Candidates:
    return _Candidates(*(values[index] for values in candidates))


def _descend(walk: _Walk, generator: torch.Generator, deadline: float) -> _Walk:
    while time.monotonic() < deadline:
        better = walk.improved(generator)
        if better is None:
            break
        walk = better
    return walk


def refine(
    mdp: EstimatedMDP,
    starts: Sequence[Sequence[int]],
    config: SearchConfig | None = None,
    *,
    deadline: float = math.inf,
    seed: int = 0,
) -> RefineResult:
    """Refines placements of one task.

    Args:
        mdp: the one task, under its cost model.
        starts: placements that fit, at least one.
        config: see ``SearchConfig``.
        deadline: ``time.monotonic()`` at which to stop.
        seed: of samples and kicks.

    Returns:
        The best placement found, under the model never worse than any start.
    """
    config = config or SearchConfig()
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        problem = _Problem(mdp, config)
        unique = dict.fromkeys(tuple(start) for start in starts)
        walks = [_Walk(problem, torch.tensor(start, dtype=torch.int64)) for start in unique]
        walks.sort(key=lambda walk: walk.step_ms)
        best = walks[0]
        if problem.num_devices == 1 or not len(best.placement):
            return RefineResult(tuple(best.placement.tolist()), best.step_ms, True)
        walks = [_descend(walk, generator, deadline) for walk in walks[: config.num_starts]]
        walks.sort(key=lambda walk: walk.step_ms)
        for walk in walks:
            failures = 0
            while failures < config.num_kicks and time.monotonic() < deadline:
                other = _descend(walk.kicked(generator), generator, deadline)
                failures += 1
                if other.step_ms < walk.step_ms * (1 - _BETTER):
                    walk, failures = other, 0
            best = min(best, walk, key=lambda w: w.step_ms)
        return RefineResult(tuple(best.placement.tolist()), best.step_ms, time.monotonic() < deadline)


def greedy_placement(mdp: EstimatedMDP, *, deadline: float = math.inf) -> tuple[int, ...] | None:
    """Greedy under the cost model: each shard where the predicted step is least.

    Shards come in descending predicted single-shard cost; with many devices only the ``GREEDY_DEVICES`` least
    loaded ones are tried (after NeuroShard's inner search, arXiv 2305.01868, section 3.3).

    Args:
        mdp: one task under its cost model.
        deadline: ``time.monotonic()`` at which to give up.

    Returns:
        The placement, dead ends repaired; None if the deadline passed.

    Raises:
        InfeasiblePlacementError: no placement fits.
    """
    with torch.inference_mode():
        episodes = Episodes(mdp, 1)
        while not episodes.done:
            if time.monotonic() > deadline:
                return None
            seen = episodes.observe()
            total = (seen.load_with.sum(dim=-1) + seen.background)[0].masked_fill(~seen.legal[0], torch.inf)
            columns = total.topk(min(GREEDY_DEVICES, len(total)), largest=False).indices
            devices = columns if seen.devices is None else seen.devices[0, columns]
            latents, compute = episodes.with_next(devices, seen.load_with[0, columns, :2])
            step = mdp.cost_model.combine(compute[None], latents[None], mdp.tensors).step_ms[0]
            # While another device is the slowest by far, the step says little: the balance decides.
            score = (step + _BALANCE * total[columns]).masked_fill(total[columns].isinf(), torch.inf)
            episodes.advance(seen, columns[score.argmin()][None])
        return tuple(episodes.finish()[0][0].tolist())
