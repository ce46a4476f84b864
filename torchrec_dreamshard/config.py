"""Every knob of training and search, with the paper's values stated beside the defaults.

Each dataclass is frozen and keyword-only; a bad value raises ``ValueError`` that names the field and the rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field


def _check(config: object, name: str, minimum: float, *, exclusive: bool = False) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not (value > minimum if exclusive else value >= minimum):
        bound = "above" if exclusive else "at least"
        raise ValueError(f"{type(config).__name__}.{name} must be {bound} {minimum:g}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class CostConfig:
    """The cost network and how it is fitted."""

    form: str = "physical"
    """"physical": ``CostNetwork``; "paper": ``PaperCostNetwork``, DreamShard's own."""
    num_members: int = 5
    """Members of the ensemble, each with its own held-out fold (paper: one network, nothing held out)."""
    num_channels: int = 8
    """Learned channels of a member that sum over a device's shards (paper: 32)."""
    hidden: int = 64
    """Width of a member's shard encoder (paper: 128)."""
    num_steps: int = 400
    """Gradient steps of one fit (paper: 300 in each of 10 iterations)."""
    batch_size: int = 512
    """Device loads of a gradient step (paper: 64 placements)."""
    learning_rate: float = 5e-3
    """Peak of the cosine schedule (paper: 5e-4, linear decay)."""
    per_task_normalization: bool = False
    """Only for the paper's form: z-scores over each task's own tables, as in the authors' code. The paper's code
    thereby gives one table different features in different tasks; False uses one normaliser for all."""

    def __post_init__(self) -> None:
        if self.form not in ("physical", "paper"):
            raise ValueError(f'CostConfig.form must be "physical" or "paper", got {self.form!r}')
        for name in ("num_members", "num_channels", "hidden", "batch_size"):
            _check(self, name, 1)
        _check(self, "num_steps", 0)
        _check(self, "learning_rate", 0, exclusive=True)
