"""An agent: cost model and policy with their configs, what it was trained on, and its file.

The file is one safetensors file: tensors ``cost.*`` and ``policy.*``, and as its metadata the format's name and
version, the configs and what the agent was trained on, as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from torchrec_dreamshard import search
from torchrec_dreamshard.baselines import BASELINES
from torchrec_dreamshard.config import CostConfig, PolicyConfig, SearchConfig
from torchrec_dreamshard.cost_model import CostModel
from torchrec_dreamshard.cost_network import make_cost_model
from torchrec_dreamshard.features import batch_tasks, placement_latents
from torchrec_dreamshard.mdp import EstimatedMDP
from torchrec_dreamshard.measurement import CostBreakdown, FloatArray
from torchrec_dreamshard.packing import check_possible, place_greedily
from torchrec_dreamshard.policy_network import Policy, make_policy
from torchrec_dreamshard.rollout import roll_out
from torchrec_dreamshard.types import PlacementTask

FORMAT = "torchrec_dreamshard.agent"
VERSION = 2
SHIPPED = ("cpu", "cuda")
"""Agents that come with the package."""

_MAX_GREEDY_COSTS = 500_000
"""Shards times devices up to which the greedy placement under the cost model is worth its time as a start."""


class Agent:
    """Places the shards of any task and predicts what placements cost.

    Attributes:
        cost_model: predicts costs.
        policy: chooses devices.
        search_config: how placements are refined.
        metadata: what the agent was trained on, JSON values.
    """

    def __init__(
        self,
        cost_model: CostModel,
        policy: Policy,
        metadata: Mapping[str, Any] | None = None,
        *,
        search_config: SearchConfig | None = None,
    ) -> None:
        self.cost_model = cost_model.eval()
        self.policy = policy.eval()
        self.search_config = search_config or SearchConfig()
        self.metadata = dict(metadata or {})

    def place(
        self,
        task: PlacementTask,
        *,
        refine: bool = True,
        time_budget_s: float | None = None,
        seed: int = 0,
        use_policy: bool = True,
    ) -> tuple[int, ...]:
        """Chooses a device for every shard.

        Args:
            task: the task.
            refine: False for one greedy rollout of the policy and nothing else (largest first by predicted cost if the
                budget ends before the rollout).
            time_budget_s: when to stop refining; None until it converges. A search that converges in time gives the
                same placement whatever the clock. The starts that it always has take some of the time.
            seed: of the search.
            use_policy: False leaves the policy's rollouts out of the starts, to see what the search is worth alone.

        Returns:
            S device indices; they fit into the devices' memory.

        Raises:
            InfeasiblePlacementError: no placement fits; names the shard that cannot fit and the missing bytes.
            ValueError: a budget that is not a number of at least 0.
        """
        if time_budget_s is not None and not time_budget_s >= 0:
            raise ValueError(f"time_budget_s must be None or at least 0, got {time_budget_s!r}")
        deadline = math.inf if time_budget_s is None else time.monotonic() + time_budget_s
        check_possible(task)
        if task.num_shards == 0:
            return ()
        mdp = EstimatedMDP(self.cost_model, [task])
        if not refine:
            return next(iter(self._roll_out(mdp, deadline=deadline)), None) or _largest_first(mdp, seed)
        starts = self._starts(mdp, deadline, seed, use_policy)
        return search.refine(mdp, starts, self.search_config, deadline=deadline, seed=seed).placement

    def _roll_out(
        self,
        mdp: EstimatedMDP,
        num_episodes: int = 1,
        generator: torch.Generator | None = None,
        deadline: float | None = None,
    ) -> list[tuple[int, ...]]:
        rollout = roll_out(mdp, self.policy, num_episodes, generator=generator, deadline=deadline)
        return [] if rollout is None else [tuple(row) for row in rollout.placements.tolist()]

    def _starts(self, mdp: EstimatedMDP, deadline: float, seed: int, use_policy: bool) -> list[tuple[int, ...]]:
        """Placements to refine, the quick ones first; what the deadline leaves no time for is left out."""
        task = mdp.tasks[0]
        starts = [place(task, seed=seed) for name, place in BASELINES.items() if name != "random"]
        starts.append(_largest_first(mdp, seed))
        if use_policy:
            starts += self._roll_out(mdp, deadline=deadline)
        if task.num_shards * task.num_devices <= _MAX_GREEDY_COSTS:
            greedy = search.greedy_placement(mdp, deadline=deadline)
            starts += [] if greedy is None else [greedy]
        if use_policy and self.search_config.num_rollouts and task.num_devices <= 64:
            generator = torch.Generator().manual_seed(seed)
            starts += self._roll_out(mdp, self.search_config.num_rollouts, generator, deadline)
        return starts

    def predict(self, task: PlacementTask, placement: Sequence[int]) -> CostBreakdown:
        """Predicted costs of a placement.

        Args:
            task: the task.
            placement: S device indices; memory is not regarded.

        Raises:
            ValueError: the placement does not belong to the task.
        """
        devices = torch.tensor([task.check_placement(placement)], dtype=torch.int64)
        tasks = batch_tasks([task])
        with torch.no_grad():
            latents = placement_latents(self.cost_model.encode(tasks), devices, task.num_devices)
            predicted = self.cost_model.predict(latents, tasks)
            std = self.cost_model.compute_std(latents, tasks.hardware[:, None, :])

        def array(values: Tensor) -> FloatArray:
            return values[0].double().clamp(min=0).numpy()

        return CostBreakdown(
            forward_compute_ms=array(predicted.forward_compute_ms),
            forward_comms_ms=array(predicted.forward_comms_ms),
            backward_comms_ms=array(predicted.backward_comms_ms),
            backward_compute_ms=array(predicted.backward_compute_ms),
            background_ms=array(tasks.background_ms),
            step_ms=max(0.0, float(predicted.step_ms[0])),
            step_std_ms=float(std.max()),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the agent's file; an existing one is replaced as a whole."""
        tensors: dict[str, Tensor] = {}
        for prefix, module in (("cost", self.cost_model), ("policy", self.policy)):
            for name, tensor in module.state_dict().items():
                tensors[f"{prefix}.{name}"] = tensor.detach().cpu().contiguous()
        configs: dict[str, CostConfig | PolicyConfig | SearchConfig] = {
            "cost": self.cost_model.config,
            "policy": self.policy.config,
            "search": self.search_config,
        }
        about = {
            "format": FORMAT,
            "version": str(VERSION),
            "configs": json.dumps({name: dataclasses.asdict(config) for name, config in configs.items()}),
            "metadata": json.dumps(self.metadata),
        }
        target = Path(path)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            unfinished.write_bytes(save(tensors, metadata=about))
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path_or_name: str | os.PathLike[str]) -> Agent:
        """Reads an agent.

        Args:
            path_or_name: a file, or the name of a shipped agent (``"cpu"``, ``"cuda"``).

        Raises:
            ValueError: no such agent, or a file that is damaged, of another kind or of another version.
        """
        if path_or_name in SHIPPED:
            path = (
                resources.files("torchrec_dreamshard").joinpath("checkpoints").joinpath(f"{path_or_name}.safetensors")
            )
            with resources.as_file(path) as file:
                return cls._read(file)
        return cls._read(Path(path_or_name))

    @classmethod
    def _read(cls, path: Path) -> Agent:
        if not path.is_file():
            raise ValueError(f"{path}: no such agent file; give a file or one of {', '.join(SHIPPED)}")
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                _check_format(path, about)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            configs, metadata = json.loads(about["configs"]), json.loads(about["metadata"])
            cost_model = make_cost_model(CostConfig(**configs["cost"]))
            policy = make_policy(PolicyConfig(**configs["policy"]), torch.Generator().manual_seed(0))
            for prefix, module in (("cost", cost_model), ("policy", policy)):
                _load_state(module, prefix, tensors)
            return cls(cost_model, policy, metadata, search_config=SearchConfig(**configs["search"]))
        except (
            SafetensorError,
            OSError,
            KeyError,
            TypeError,
            AttributeError,
            RuntimeError,
            json.JSONDecodeError,
        ) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{path}: not a readable agent file ({reason}); train or copy it again") from error


def _largest_first(mdp: EstimatedMDP, seed: int) -> tuple[int, ...]:
    """Shards in falling order of their predicted cost alone, each where least is."""
    return place_greedily(mdp.tasks[0], mdp.shard_load[0].sum(dim=-1).double().numpy(), seed)


def _check_format(path: Path, about: Mapping[str, str]) -> None:
    if about.get("format") != FORMAT:
        raise ValueError(f"{path}: not an agent file, its format is {about.get('format')!r}, expected {FORMAT!r}")
    if about.get("version") != str(VERSION):
        raise ValueError(
            f"{path}: agent file of version {about.get('version')}, this package reads version {VERSION}; train it anew"
        )


def _load_state(module: nn.Module, prefix: str, tensors: Mapping[str, Tensor]) -> None:
    state = {name[len(prefix) + 1 :]: value for name, value in tensors.items() if name.startswith(f"{prefix}.")}
    if not all(bool(value.isfinite().all()) for value in state.values()):
        raise RuntimeError("a tensor holds values that are not finite")
    module.load_state_dict(state)
