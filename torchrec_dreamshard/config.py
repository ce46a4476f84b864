"""Every knob of training and search, with the paper's values stated beside the defaults.

Each dataclass is frozen and keyword-only; a bad value raises ``ValueError`` that names the field and the rule.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    num_members: int = 4
    """Members of the ensemble, each with its own held-out fold (paper: one network, nothing held out)."""
    hidden: int = 64
    """Width of a member's shard encoder (paper: 128)."""
    num_steps: int = 400
    """Gradient steps of one fit up to ``batch_size`` rows, at most five times as many for more; a third of them where
    a fitted model is continued (paper: 300 in each of 10 iterations)."""
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
        for name in ("num_members", "hidden", "batch_size"):
            _check(self, name, 1)
        _check(self, "num_steps", 0)
        _check(self, "learning_rate", 0, exclusive=True)


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """The policy network."""

    form: str = "default"
    """"default": ``PolicyNetwork``; "paper": ``PaperPolicyNetwork``, DreamShard's own."""
    hidden: int = 32
    """Width of the default's layers (paper: 128, 64 and 32)."""
    greed: float = 30.0
    """How much the untrained default prefers devices whose imbalance grows less: logits per balanced final load."""

    def __post_init__(self) -> None:
        if self.form not in ("default", "paper"):
            raise ValueError(f'PolicyConfig.form must be "default" or "paper", got {self.form!r}')
        _check(self, "hidden", 1)
        _check(self, "greed", 0)


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """The refinement of placements under the cost model (the paper has none)."""

    num_rollouts: int = 8
    """Placements sampled from the policy as starts, besides its greedy one."""
    num_starts: int = 1
    """How many of the best starts are refined."""
    num_kicks: int = 16
    """Perturbations in a row without a better placement after which the search has converged."""
    num_candidates: int = 512
    """Moves and swaps of an iteration whose devices' costs are predicted."""
    num_finalists: int = 32
    """The best of them, whose whole step is predicted (fewer with very many devices)."""
    caution: float = 0.5
    """Standard deviations of the slowest device's predicted compute that are added to a predicted step."""

    def __post_init__(self) -> None:
        for name in ("num_starts", "num_candidates", "num_finalists"):
            _check(self, name, 1)
        for name in ("num_rollouts", "num_kicks", "caution"):
            _check(self, name, 0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Algorithm 1 of the paper."""

    num_measurements: int = 100
    """Calls of ``Profiler.measure`` in all, exactly (paper: 100); failed measurements count."""
    num_iterations: int = 5
    """Rounds of collecting, fitting and improving the policy (paper: 10)."""
    num_updates: int = 12
    """REINFORCE updates of a round (paper: 10)."""
    tasks_per_update: int = 8
    """Tasks of an update (paper: 1)."""
    num_episodes: int = 16
    """Episodes of each task of an update (paper: 10)."""
    learning_rate: float = 5e-3
    """Of the policy, cosine decay over the whole training (paper: 5e-4, linear decay)."""
    entropy_weight: float = 0.001
    """Of the entropy bonus (paper: 0.001)."""
    diversify: bool = True
    """Measure refined, heuristic and unbalanced placements besides the policy's, and train the policy on tasks
    of other sizes made from the same shards (paper: neither)."""
    num_imitations: int = 20
    """Updates of a round that imitate the refined placements of ``tasks_per_update`` tasks, before REINFORCE
    (paper: none)."""
    num_validations: int = 24
    """Practice tasks that the policy before, within and after the updates of a round places greedily under the cost
    model; the best one stays (paper: none, the last one stays)."""
    cost: CostConfig = CostConfig()
    policy: PolicyConfig = PolicyConfig()
    search: SearchConfig = SearchConfig()

    def __post_init__(self) -> None:
        for name in ("num_iterations", "tasks_per_update", "num_episodes"):
            _check(self, name, 1)
        for name in ("num_measurements", "num_updates", "num_imitations", "num_validations", "entropy_weight"):
            _check(self, name, 0)
        _check(self, "learning_rate", 0, exclusive=True)

    @classmethod
    def paper(cls) -> TrainConfig:
        """The paper's networks, features and budget (DreamShard, section 4.1 and appendix)."""
        return cls(
            num_iterations=10,
            num_updates=10,
            tasks_per_update=1,
            num_episodes=10,
            learning_rate=5e-4,
            diversify=False,
            num_imitations=0,
            num_validations=0,
            cost=CostConfig(form="paper", num_steps=300, batch_size=64, learning_rate=5e-4),
            policy=PolicyConfig(form="paper"),
        )
