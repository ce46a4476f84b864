"""Policy networks: scores of devices for the shard in hand, as masked log-probabilities.

``PolicyNetwork`` sees the shard in hand, every device's predicted load with and without it, the room in memory and
what is still to come. All loads enter relative to the balanced final load, so one network serves any number of
shards and devices and any hardware.

Its score is a greedy rule with learned weights plus a learned correction that starts at zero, so an untrained policy
already is a good placer of its cost model. A step is as long as the slowest forward, exchange and backward, on
whichever devices these are: the rule takes the device where the imbalance of the parts grows least, measured as
powers of a part's load over its balanced final load. Powers mind an imbalance long before it makes a device the slowest
one, and the higher the power the more only the slowest devices count.

``PaperPolicyNetwork`` is DreamShard's own form (arXiv 2210.02023, section 3.3), which sees only what is placed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrec_dreamshard.config import PolicyConfig
from torchrec_dreamshard.features import Normalizer, TaskTensors
from torchrec_dreamshard.mdp import NUM_PARTS, Observation
from torchrec_dreamshard.paper_cost_network import paper_features, reset_linear_layers

POWERS = (4, 8, 16)
"""Of the imbalances in the greedy rule; powers of two, which squaring reaches."""
NUM_RULE_FEATURES = (NUM_PARTS + 1) * len(POWERS) + 2
"""The greedy rule's features, which come first."""
NUM_POLICY_FEATURES = NUM_RULE_FEATURES + 7 * NUM_PARTS + 11
_RULES = tuple(
    (*(weight for power in weights for weight in (power, power, power, 0.0)), 1.0, 0.0)
    for weights in ((0.0, 1.0, 0.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.3))
)
"""Rules to start from: the parts' imbalance in some powers, and the growth of their maxima; the first is untrained."""
_CORRECTION_RATE = 0.2  # of the learning rate: the rule's few weights learn first, noise in the many others harms it
_LARGEST = 1e4  # keeps 16th powers of loads far beyond balance finite


class Policy(nn.Module, ABC):
    """Scores devices. Acting and the loss both go through ``log_probs``, so that they share one mask."""

    config: PolicyConfig
    own_dim: int
    """Length of the policy's own shard encodings, which are summed per device; 0 for none."""

    @abstractmethod
    def encode(self, tasks: TaskTensors) -> Tensor:
        """The policy's own encodings of shards: ``B x S x own_dim``."""

    @abstractmethod
    def features(self, observation: Observation) -> Tensor:
        """What the network looks at, without gradients: ``N x D x features``."""

    @abstractmethod
    def scores(self, features: Tensor, own: Tensor, legal: Tensor) -> Tensor:
        """Scores of devices.

        Args:
            features: ``... x D x features``.
            own: ``... x D x own_dim``, sums of the policy's encodings of what is placed.
            legal: ``... x D`` bool.

        Returns:
            ``... x D``, any value where illegal.
        """

    def parameter_groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """The parameters with their learning rates, for an optimizer."""
        return [{"params": list(self.parameters()), "lr": learning_rate}]

    def alternatives(self) -> list[dict[str, Tensor]]:
        """Other states of the policy that may be better under the cost model at hand, worth a try."""
        return []

    def log_probs(self, features: Tensor, own: Tensor, legal: Tensor) -> Tensor:
        """Log-probabilities of the devices, ``... x D``; minus infinity where illegal."""
        return functional.log_softmax(self.scores(features, own, legal).masked_fill(~legal, -torch.inf), dim=-1)


class PolicyNetwork(Policy):
    """The default policy; see the module's text."""

    own_dim = 0

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.device = nn.Linear(NUM_POLICY_FEATURES, config.hidden)
        self.mix = nn.Linear(3 * config.hidden, config.hidden)
        self.out = nn.Linear(config.hidden, 1)
        self.rule = nn.Parameter(config.greed * torch.tensor(_RULES[0]))

    def reset(self, generator: torch.Generator) -> None:
        """Draws the weights anew; the correction starts at zero."""
        with torch.no_grad():
            for layer in (self.device, self.mix):
                layer.weight.normal_(0.0, layer.in_features**-0.5, generator=generator)
                layer.bias.zero_()
            self.out.weight.zero_()
            self.out.bias.zero_()
            self.rule.copy_(self.config.greed * torch.tensor(_RULES[0]))

    def parameter_groups(self, learning_rate: float) -> list[dict[str, Any]]:
        """The rule's weights move in units of the greed, the correction's slowly."""
        correction = [parameter for name, parameter in self.named_parameters() if name != "rule"]
        return [
            {"params": [self.rule], "lr": learning_rate * max(self.config.greed, 1.0)},
            {"params": correction, "lr": learning_rate * _CORRECTION_RATE},
        ]

    def alternatives(self) -> list[dict[str, Tensor]]:
        """The same correction with each of the rules to start from."""
        state = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        return [{**state, "rule": self.config.greed * torch.tensor(rule)} for rule in _RULES]

    def encode(self, tasks: TaskTensors) -> Tensor:
        """See ``Policy.encode``."""
        return tasks.shard_features.new_zeros(*tasks.shard_mask.shape, 0)

    def features(self, observation: Observation) -> Tensor:
        """See ``Policy.features``."""
        o = observation
        devices = o.num_devices[:, None]
        background = functional.pad(o.background[..., None], (1, 1))  # counted as backward compute
        unit = o.balanced.sum(dim=-1, keepdim=True).clamp(min=1e-9)

        def relative(loads: Tensor) -> Tensor:
            return loads / (unit if loads.dim() == 2 else unit[..., None])

        load, load_with = relative(o.load + background), relative(o.load_with + background)
        largest, final = relative(o.largest)[:, None, :], relative(o.balanced)[:, None, :]
        total = load_with.sum(dim=-1, keepdim=True)
        least = total.masked_fill(~o.legal[..., None], torch.inf).amin(dim=1, keepdim=True)
        over = load_with - largest
        own = [
            _imbalance_growth(load, load_with, final),
            over.clamp(min=0).sum(dim=-1, keepdim=True),
            total,
            load_with,
            load_with - load,
            load_with - final,
            over,
            total - least,
            relative(o.background)[..., None],
            o.host_exchange[..., None],
            o.room,
        ]
        common = [
            o.tightness,
            relative(o.shard),
            relative(o.balanced),
            relative(o.balanced - o.placed / devices),
            relative(o.to_come[:, :1]) / devices,
            relative(o.to_come[:, 1:]),
            torch.log1p(o.num_to_come[:, None] / devices),
            torch.log(devices) / 5.0,
        ]
        shared = torch.cat(common, dim=-1)[:, None, :].expand(-1, load.shape[1], -1)
        return torch.cat([*own, shared], dim=-1).clamp(-_LARGEST, _LARGEST)

    def scores(self, features: Tensor, own: Tensor, legal: Tensor) -> Tensor:
        """See ``Policy.scores``."""
        hidden = functional.relu(self.device(features.clamp(-10, 10)))
        weight = legal.to(hidden.dtype).unsqueeze(-1)
        mean = (hidden * weight).sum(dim=-2, keepdim=True) / weight.sum(dim=-2, keepdim=True).clamp(min=1)
        largest = (hidden * weight).amax(dim=-2, keepdim=True)
        pooled = torch.cat([mean, largest], dim=-1)
        # The same as self.mix of all three joined, without copying the pooled part to every device.
        first = self.config.hidden
        mixed = functional.linear(hidden, self.mix.weight[:, :first], self.mix.bias)
        mixed = functional.relu(mixed + functional.linear(pooled, self.mix.weight[:, first:]))
        correction: Tensor = self.out(mixed).squeeze(-1)
        return correction - features[..., :NUM_RULE_FEATURES] @ self.rule


def _imbalance_growth(load: Tensor, load_with: Tensor, balanced: Tensor) -> Tensor:
    """By how much placing a shard raises a device's share of the imbalances.

    Args:
        load: ``... x 3``, any unit.
        load_with: ``... x 3``, with the shard.
        balanced: ``... x 3``, of a device at the end if all are equal.

    Returns:
        ``... x 4 len(POWERS)``, for each power the three parts and their sum.
    """
    weight = _with_sum(balanced)
    relative = _with_sum(torch.stack([load, load_with])) / weight.clamp(min=1e-6)
    growth, power, reached = [], relative, 1
    for wanted in POWERS:
        while reached < wanted:
            power, reached = power.square(), 2 * reached
        growth.append(weight * (power[1] - power[0]))
    return torch.cat(growth, dim=-1)


def _with_sum(parts: Tensor) -> Tensor:
    """``... x 3`` to ``... x 4``."""
    return torch.cat([parts, parts.sum(dim=-1, keepdim=True)], dim=-1)


class PaperPolicyNetwork(Policy):
    """Own shard encoder 21 -> 128 -> 32 summed per device, 3 -> 64 -> 32 on the predicted costs, 64 -> 1."""

    own_dim = 32

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.normalizer = Normalizer(21)
        self.encoder = nn.Sequential(nn.Linear(21, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU())
        self.costs = nn.Sequential(nn.Linear(NUM_PARTS, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.out = nn.Linear(64, 1)

    def reset(self, generator: torch.Generator) -> None:
        """Draws all weights anew."""
        reset_linear_layers(self, generator)

    def encode(self, tasks: TaskTensors) -> Tensor:
        """See ``Policy.encode``."""
        values = paper_features(tasks.shard_features)
        if self.training and not bool(self.normalizer.scale.any()):
            self.normalizer.fit(values[tasks.shard_mask])
        encoded: Tensor = self.encoder(self.normalizer(values))
        return encoded * tasks.shard_mask[..., None]

    def features(self, observation: Observation) -> Tensor:
        """See ``Policy.features``: the devices' predicted costs without the shard, in ms."""
        return observation.load

    def scores(self, features: Tensor, own: Tensor, legal: Tensor) -> Tensor:
        """See ``Policy.scores``."""
        out: Tensor = self.out(torch.cat([own, self.costs(features)], dim=-1)).squeeze(-1)
        return out


def make_policy(config: PolicyConfig, generator: torch.Generator) -> Policy:
    """A fresh policy of the configured form."""
    with torch.random.fork_rng(devices=[]):  # layers draw initial weights from the global generator
        policy = PolicyNetwork(config) if config.form == "default" else PaperPolicyNetwork(config)
    policy.reset(generator)
    return policy
