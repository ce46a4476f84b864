"""The estimated MDP (DreamShard, section 3.3): placing shards one by one, with costs from a cost model alone.

Shards come in descending predicted single-shard cost. A state is what every device carries so far, as latents and
predicted loads; an action is a device; the reward comes at the end and is minus the predicted step. Many episodes
of many tasks advance together, and a step re-evaluates D devices once, so an episode costs O(S) evaluations.

A load has three parts, all in ms: forward compute, backward compute and exchange. The exchange's part is the
device's own output values times one rate per task, which is enough to tell which device sends too much; the exact
exchange, with its waiting, enters with the reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from torchrec_dreamshard.cost_model import CostModel
from torchrec_dreamshard.features import SHARD_INDEX, TaskTensors, batch_tasks, placement_latents
from torchrec_dreamshard.packing import check_possible, repair
from torchrec_dreamshard.types import PlacementTask

NUM_PARTS = 3
"""Parts of a load: forward compute, backward compute, exchange."""
SHORTLIST = 64
"""With more devices, only so many of the least loaded ones that have room are looked at in a step."""


class Observation(NamedTuple):
    """What can be known before a shard is placed; ``N`` episodes, ``D`` the devices looked at."""

    devices: Tensor | None
    """``N x D`` int64: which devices are looked at, None for all."""
    legal: Tensor
    """``N x D`` bool: real devices with room for the shard; at least one. In a dead end the least bad one."""
    load: Tensor
    """``N x D x 3``: predicted load without the shard, in ms."""
    load_with: Tensor
    """``N x D x 3``: with it."""
    background: Tensor
    """``N x D``: ms."""
    host_exchange: Tensor
    """``N x D``: exchange of the device's whole host with the shard, over the mean of the hosts; 0 with one host."""
    room: Tensor
    """``N x D x 2``: share of either memory that stays free with the shard."""
    tightness: Tensor
    """``N x 2``: memory of the shards to come over all that is free, in [0, 1]."""
    shard: Tensor
    """``N x 3``: the shard's load alone on a device."""
    largest: Tensor
    """``N x 3``: largest load of any device so far, background counted as backward compute."""
    placed: Tensor
    """``N x 3``: all devices' load so far, with the background."""
    balanced: Tensor
    """``N x 3``: load of a device that carries an equal share of all shards and of the background."""
    num_to_come: Tensor
    """``N``: shards to come, this one included."""
    to_come: Tensor
    """``N x 2``: sum and root of the sum of squares of their loads, each alone on a device."""
    num_devices: Tensor
    """``N``."""


def exchange_rate(prediction_comms: Tensor, exchanged: Tensor, device_mask: Tensor) -> Tensor:
    """Milliseconds of exchange per unit sent, of a placement.

    The device that waits least shows what the exchange itself takes.

    Args:
        prediction_comms: ``B x D``, forward plus backward exchange.
        exchanged: ``B x D``, what each device sends.
        device_mask: ``B x D`` bool.
    """
    least = prediction_comms.masked_fill(~device_mask, torch.inf).amin(dim=-1)
    return least.clamp(min=0) / exchanged.amax(dim=-1).clamp(min=1e-12)


class EstimatedMDP:
    """B tasks as tensors with everything about them that does not change during an episode."""

    def __init__(self, cost_model: CostModel, tasks: Sequence[PlacementTask]) -> None:
        """Encodes the tasks.

        Args:
            cost_model: gives all costs; not trained here.
            tasks: B tasks of any sizes.

        Raises:
            InfeasiblePlacementError: a task's shards obviously cannot fit its devices.
        """
        for task in tasks:
            check_possible(task)
        self.cost_model = cost_model
        self.tasks = tuple(tasks)
        self.tensors: TaskTensors = batch_tasks(self.tasks)
        with torch.no_grad():
            self.latents: Tensor = cost_model.encode(self.tensors)
            self.shard_load: Tensor = self._shard_loads()
            self.balanced: Tensor = self._balanced_load()
        cost = self.shard_load.sum(dim=-1).masked_fill(~self.tensors.shard_mask, -1.0)
        self.order: Tensor = cost.argsort(dim=1, descending=True, stable=True)
        """``B x S``: shards in the order in which they are placed, padding last."""

    def _shard_loads(self) -> Tensor:
        """``B x S x 3``; the exchange's rate comes from dealing the shards round robin, largest first."""
        tensors, (batch, num_shards) = self.tensors, self.tensors.shard_mask.shape
        compute = self.cost_model.device_compute(self.latents, tensors.hardware[:, None, :]).clamp(min=0)
        values = torch.expm1(tensors.shard_features[..., SHARD_INDEX["log1p_output_values"]])
        values = values * tensors.shard_mask
        num_devices = tensors.device_mask.sum(dim=1, keepdim=True)
        share = values / values.sum(dim=1, keepdim=True).clamp(min=1e-9)
        share = share + compute.sum(dim=-1) / compute.sum(dim=(1, 2)).clamp(min=1e-9)[:, None]
        largest_first = share.masked_fill(~tensors.shard_mask, -1.0).argsort(dim=1, descending=True, stable=True)
        turns = torch.arange(num_shards).expand(batch, -1) % num_devices
        dealt = torch.zeros_like(largest_first).scatter(1, largest_first, turns)
        width = tensors.device_mask.shape[1]
        predicted = self.cost_model.predict(placement_latents(self.latents, dealt, width), tensors)
        sent = placement_latents(values[..., None], dealt, width).squeeze(-1)
        rate = exchange_rate(predicted.forward_comms_ms + predicted.backward_comms_ms, sent, tensors.device_mask)
        exchange = values * rate[:, None]
        return torch.cat([compute * tensors.shard_mask[..., None], exchange[..., None]], dim=-1)

    def _balanced_load(self) -> Tensor:
        """``B x 3``: load of a device that carries an equal share of all shards."""
        num_devices = self.tensors.device_mask.sum(dim=1, keepdim=True)
        share = self.latents.sum(dim=1) / num_devices
        compute = self.cost_model.device_compute(share, self.tensors.hardware).clamp(min=0)
        return torch.cat([compute, self.shard_load[..., 2].sum(dim=1, keepdim=True) / num_devices], dim=-1)

    def step_ms(self, placements: Tensor) -> Tensor:
        """Predicted steps of ``B x E x S`` placements: ``B x E``."""
        batch, episodes, _ = placements.shape
        width = self.tensors.device_mask.shape[1]
        latents = torch.stack(
            [placement_latents(self.latents, placements[:, e], width) for e in range(episodes)], dim=1
        )
        return self.cost_model.predict(latents, self.tensors).step_ms

    def repaired(self, placements: Tensor, overfull: Tensor, seed: int = 0) -> Tensor:
        """``N x S`` placements with those of the ``N`` overfull episodes repaired.

        Raises:
            InfeasiblePlacementError: no placement fits.
        """
        episodes = len(placements) // len(self.tasks)
        for row in overfull.nonzero().flatten().tolist():
            index = row // episodes
            task = self.tasks[index]
            cost = self.shard_load[index, : task.num_shards].sum(dim=-1).double().numpy()
            fixed = repair(task, placements[row, : task.num_shards].numpy(), cost, seed)
            placements[row, : task.num_shards] = torch.tensor(fixed)
        return placements


class Episodes:
    """State of ``N = B x E`` episodes, E of each task, all at the same step."""

    def __init__(self, mdp: EstimatedMDP, num_episodes: int) -> None:
        self.mdp = mdp
        self.num_episodes = num_episodes
        tensors = mdp.tensors

        def repeat(values: Tensor) -> Tensor:
            return values.repeat_interleave(num_episodes, dim=0)

        self._rows = torch.arange(len(mdp.tasks) * num_episodes)
        self._order = repeat(mdp.order)
        # Everything about shards in the order of placing, and sums over those still to come.
        self.active = repeat(tensors.shard_mask.gather(1, mdp.order))
        self._latents = repeat(_reorder(mdp.latents, mdp.order))
        self._shard_load = repeat(_reorder(mdp.shard_load, mdp.order))
        self._need = repeat(_reorder(tensors.memory_bytes, mdp.order))
        alone = self._shard_load.sum(dim=-1, keepdim=True)
        sums = _sums_to_come(torch.cat([alone, alone.square()], dim=-1))
        self._to_come = torch.stack([sums[..., 0], sums[..., 1].sqrt()], dim=-1)
        self._num_to_come = _sums_to_come(self.active[..., None].to(alone.dtype)).squeeze(-1)
        self._need_to_come = _sums_to_come(self._need)
        self._device_mask = repeat(tensors.device_mask)
        self._num_devices = self._device_mask.sum(dim=1).float()
        self._background = repeat(tensors.background_ms)
        # Background delays what follows the exchanges, as backward compute does.
        self._delay = functional.pad(self._background[..., None], (1, 1))
        self._balanced = repeat(mdp.balanced) + self._delay.sum(dim=1) / self._num_devices[:, None]
        self._capacity = repeat(tensors.capacity_bytes)
        self._hardware = repeat(tensors.hardware)[:, None, :]
        self._host = repeat(tensors.host.clamp(min=0))
        self._num_hosts = 1 + int(tensors.host.max())
        num, width = self._device_mask.shape
        self.free = self._capacity.clone()
        self.latents = mdp.latents.new_zeros(num, width, mdp.latents.shape[-1])
        self.load = self.latents.new_zeros(num, width, NUM_PARTS)
        self.overfull = torch.zeros(num, dtype=torch.bool)
        self.placements = torch.zeros(num, mdp.order.shape[1], dtype=torch.int64)
        self.step_index = 0
        self._load_with = self.load

    @property
    def legal_shape(self) -> tuple[int, int]:
        """N and D."""
        return self._device_mask.shape[0], self._device_mask.shape[1]

    @property
    def done(self) -> bool:
        """Whether all shards are placed."""
        return self.step_index >= self._order.shape[1]

    def observe(self) -> Observation:
        """What can be known before the next shard is placed."""
        step = self.step_index
        left = self.free - self._need[:, step, None]
        legal = self._legal(left)
        devices = None
        load, latents, background, capacity = self.load, self.latents, self._background, self._capacity
        hosts = self._host_exchange()
        if legal.shape[1] > SHORTLIST:
            total = (load.sum(dim=-1) + background).masked_fill(~legal, torch.inf)
            devices = total.topk(SHORTLIST, largest=False, sorted=False).indices.sort(dim=1).values
            legal, background, hosts = (values.gather(1, devices) for values in (legal, background, hosts))
            load, latents, left, capacity = (_reorder(values, devices) for values in (load, latents, left, capacity))
        shard = self._shard_load[:, step]
        compute = self.mdp.cost_model.device_compute(latents + self._latents[:, step, None], self._hardware)
        exchange = load[..., 2:] + shard[:, None, 2:]
        self._load_with = torch.cat([compute, exchange], dim=-1)
        free = self.free.clamp(min=0).sum(dim=1)
        return Observation(
            devices=devices,
            legal=legal,
            load=load,
            load_with=self._load_with,
            background=background,
            host_exchange=hosts,
            room=(left / capacity.clamp(min=1)).clamp(-1, 1).float(),
            tightness=(self._need_to_come[:, step] / free.clamp(min=1)).clamp(0, 1).float(),
            shard=shard,
            largest=(self.load + self._delay).amax(dim=1),
            placed=(self.load + self._delay).sum(dim=1),
            balanced=self._balanced,
            num_to_come=self._num_to_come[:, step],
            to_come=self._to_come[:, step],
            num_devices=self._num_devices,
        )

    def _legal(self, left: Tensor) -> Tensor:
        """``N x D`` bool: real devices with room; a dead end leaves the one that overflows least."""
        legal = (left >= 0).all(dim=-1) & self._device_mask
        dead = ~legal.any(dim=1)
        if dead.any():
            self.overfull |= dead & self.active[:, self.step_index]
            scale = self._capacity.mean(dim=1, keepdim=True).clamp(min=1)
            lacking = ((-left).clamp(min=0) / scale).sum(dim=-1).masked_fill(~self._device_mask, torch.inf)
            least = torch.zeros_like(legal).scatter_(1, lacking.argmin(dim=1, keepdim=True), True)
            legal = torch.where(dead[:, None], least, legal)
        return legal

    def _host_exchange(self) -> Tensor:
        """``N x D``: the exchange of each device's host over the mean of the hosts; 0 with one host."""
        exchange = self.load[..., 2]
        if self._num_hosts == 1:
            return torch.zeros_like(exchange)
        hosts = exchange.new_zeros(len(exchange), self._num_hosts).scatter_add(1, self._host, exchange)
        return hosts.gather(1, self._host) * self._num_hosts / hosts.sum(dim=1, keepdim=True).clamp(min=1e-9)

    def advance(self, observation: Observation, choice: Tensor) -> None:
        """Places the shard.

        Args:
            observation: the latest one.
            choice: ``N`` int64, columns of the observation.
        """
        rows, step = self._rows, self.step_index
        device = choice if observation.devices is None else observation.devices[rows, choice]
        self.latents[rows, device] += self._latents[:, step]
        keep = self.active[:, step, None]
        self.load[rows, device] = torch.where(keep, self._load_with[rows, choice], self.load[rows, device])
        self.free[rows, device] -= self._need[:, step]
        self.placements[rows, self._order[:, step]] = device
        self.step_index += 1

    def with_next(self, devices: Tensor, compute: Tensor) -> tuple[Tensor, Tensor]:
        """What a single episode would come to if the next shard went to each of ``K`` devices.

        Args:
            devices: ``K``.
            compute: ``K x 2``, those devices' compute with the shard.

        Returns:
            Latents ``K x D x H`` and compute ``K x D x 2``.
        """
        rows = torch.arange(len(devices))
        latents = self.latents.expand(len(devices), -1, -1).clone()
        latents[rows, devices] += self._latents[0, self.step_index]
        all_compute = self.load[..., :2].expand(len(devices), -1, -1).clone()
        all_compute[rows, devices] = compute
        return latents, all_compute

    def finish(self) -> tuple[Tensor, Tensor]:
        """Placements and their predicted steps.

        Returns:
            ``N x S`` placements, dead ends repaired, and ``N`` steps in ms.

        Raises:
            InfeasiblePlacementError: no placement fits.
        """
        placements = self.mdp.repaired(self.placements, self.overfull)
        shape = (len(self.mdp.tasks), self.num_episodes, -1)
        if self.overfull.any():
            return placements, self.mdp.step_ms(placements.view(shape)).flatten()
        latents = self.latents.view(*shape[:2], *self.latents.shape[1:])
        return placements, self.mdp.cost_model.predict(latents, self.mdp.tensors).step_ms.flatten()


def _reorder(values: Tensor, order: Tensor) -> Tensor:
    """``N x A x C`` by ``N x K`` indices: ``N x K x C``."""
    return values.gather(1, order[..., None].expand(-1, -1, values.shape[-1]))


def _sums_to_come(values: Tensor) -> Tensor:
    """``N x S x C``: for each step the sum from it to the end."""
    return values.flip(1).cumsum(dim=1).flip(1)
