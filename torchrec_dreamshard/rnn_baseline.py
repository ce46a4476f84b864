"""The RNN strategy to compare with: sequence-to-sequence placement trained on measured costs.

After Mirhoseini et al., "Device Placement Optimization with Reinforcement Learning" (ICML 2017), as DreamShard
(arXiv 2210.02023, section 4.1) uses it: an LSTM reads all shards, a second LSTM with attention names a device for one
shard after the other, and REINFORCE trains both directly on measurements, without a cost model. The number of
devices is built into its output; it knows nothing about memory beyond a mask on what no longer fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.features import SHARD_FEATURES, Normalizer, shard_features
from torchrec_dreamshard.measurement import Profiler
from torchrec_dreamshard.packing import check_possible, memory_of, repair
from torchrec_dreamshard.types import PlacementTask


@dataclass(frozen=True, kw_only=True)
class RNNConfig:
    """The RNN strategy and its training."""

    num_measurements: int = 100
    """Calls of ``Profiler.measure`` in all."""
    num_episodes: int = 10
    """Placements of one task that are sampled, measured and compared in one update."""
    hidden: int = 64
    """Units of each LSTM."""
    learning_rate: float = 5e-3
    """Of Adam."""
    entropy_weight: float = 0.001
    """Of the entropy bonus."""
    max_grad_norm: float = 1.0
    """Bound on the gradient's norm (Mirhoseini et al.)."""


class RNNPlacer(nn.Module):
    """Encoder and attentive decoder over the shards of a task.

    Args:
        num_devices: D, the most devices that a task may have.
        hidden: H.
    """

    def __init__(self, num_devices: int, hidden: int) -> None:
        super().__init__()
        self.num_devices = num_devices
        self.normalizer = Normalizer(len(SHARD_FEATURES))
        self.embed = nn.Linear(len(SHARD_FEATURES), hidden)
        self.encoder = nn.LSTM(hidden, hidden, batch_first=True)
        self.device_embedding = nn.Embedding(num_devices + 1, hidden)  # the last one starts the sequence
        self.decoder = nn.LSTMCell(2 * hidden, hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.output = nn.Linear(2 * hidden, num_devices)

    def sample(
        self, task: PlacementTask, num_episodes: int, generator: torch.Generator | None = None
    ) -> tuple[list[tuple[int, ...]], Tensor, Tensor]:
        """Places the shards one after the other, those with most lookups first.

        Args:
            task: the task, with at most ``num_devices`` devices.
            num_episodes: E.
            generator: samples the devices; None takes the most probable one each time.

        Returns:
            E placements that fit, their log-probabilities ``E`` and mean entropies ``E`` (of what the network
            chose, before dead ends were repaired).

        Raises:
            InfeasiblePlacementError: no placement fits.
            ValueError: more devices than the network has.
        """
        if task.num_devices > self.num_devices:
            raise ValueError(f"RNNPlacer places on at most {self.num_devices} devices, the task has {task.num_devices}")
        check_possible(task)
        placements = torch.zeros(num_episodes, task.num_shards, dtype=torch.int64)
        log_probability, entropy = torch.zeros(num_episodes), torch.zeros(num_episodes)
        if not task.shards:
            return [()] * num_episodes, log_probability, entropy
        need, free = (torch.from_numpy(values) for values in memory_of(task))
        free = free.expand(num_episodes, -1, -1).clone()
        order = np.argsort([-shard.pooling_factor * shard.dim for shard in task.shards], kind="stable")
        inputs = torch.tanh(self.embed(self.normalizer(shard_features(task.shards))[torch.from_numpy(order)]))
        memory, (state, cell) = self.encoder(inputs[None])
        hidden, cell = state[0].expand(num_episodes, -1), cell[0].expand(num_episodes, -1)
        previous, rows = torch.full((num_episodes,), self.num_devices), torch.arange(num_episodes)
        for position, shard in enumerate(order):
            step = torch.cat([inputs[position].expand(num_episodes, -1), self.device_embedding(previous)], dim=-1)
            hidden, cell = self.decoder(step, (hidden, cell))
            attention = torch.softmax(self.query(hidden) @ memory[0].T / hidden.shape[-1] ** 0.5, dim=-1)
            logits = self.output(torch.cat([hidden, attention @ memory[0]], dim=-1))[:, : task.num_devices]
            fits = (free >= need[shard]).all(dim=-1)
            fits |= ~fits.any(dim=-1, keepdim=True)  # a dead end is repaired at the end
            log_p = torch.log_softmax(logits.masked_fill(~fits, -1e9), dim=-1)
            previous = _choose(log_p, generator)
            log_probability = log_probability + log_p[rows, previous]
            entropy = entropy - (log_p.exp() * log_p).sum(dim=-1) / len(order)
            free[rows, previous] -= need[shard]
            placements[:, shard] = previous
        return [repair(task, row) for row in placements.tolist()], log_probability, entropy

    def place(self, task: PlacementTask) -> tuple[int, ...]:
        """The most probable placement; see ``sample`` for errors."""
        with torch.no_grad():
            return self.sample(task, 1)[0][0]


def train_rnn(
    tasks: Sequence[PlacementTask],
    profiler: Profiler,
    config: RNNConfig | None = None,
    *,
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> RNNPlacer:
    """Trains the RNN strategy by REINFORCE on measured steps.

    Args:
        tasks: training tasks; each update draws one.
        profiler: measures ``config.num_measurements`` placements in all.
        config: see ``RNNConfig``.
        seed: of the weights, the tasks and the samples; the same seed gives the same network.
        progress: called with the mean measured step in ms after every update.

    Raises:
        ValueError: no tasks.
    """
    if not tasks:
        raise ValueError("train_rnn needs at least one task, got none")
    config = config or RNNConfig()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        placer = RNNPlacer(max(task.num_devices for task in tasks), config.hidden)
    placer.normalizer.fit(torch.cat([shard_features(task.shards) for task in tasks]))
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(placer.parameters(), lr=config.learning_rate)
    left = config.num_measurements
    while left > 0:
        task = tasks[int(torch.randint(len(tasks), (1,), generator=generator))]
        episodes = min(config.num_episodes, left)
        left -= episodes
        placements, log_probability, entropy = placer.sample(task, episodes, generator)
        measured = [_measure(profiler, task, placement) for placement in placements]
        known = torch.tensor([step is not None for step in measured])
        if int(known.sum()) < 2:
            continue  # nothing to compare with
        steps = torch.tensor([step for step in measured if step is not None])
        advantage = -(steps - steps.mean()) / steps.std().clamp(min=1e-6 * float(steps.mean()))
        loss = -(advantage * log_probability[known]).mean() - config.entropy_weight * entropy.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(placer.parameters(), config.max_grad_norm)
        optimizer.step()
        if progress is not None:
            progress(float(steps.mean()))
    return placer


def _choose(log_p: Tensor, generator: torch.Generator | None) -> Tensor:
    """Devices ``E`` drawn from ``E x D`` log-probabilities, or the most probable ones without a generator."""
    if generator is None:
        return log_p.argmax(dim=-1)
    return torch.multinomial(log_p.detach().exp(), 1, generator=generator).squeeze(-1)


def _measure(profiler: Profiler, task: PlacementTask, placement: Sequence[int]) -> float | None:
    """The measured step in ms; None when it cannot be measured or is not known."""
    try:
        return profiler.measure(task, placement).step_ms
    except MeasurementError:
        return None
