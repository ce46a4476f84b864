"""``DreamShardPlanner``: TorchRec's planner with learned costs, a learned placement and a bounded time."""

# TorchRec compares annotated signatures when it checks interfaces, so annotations here are evaluated and spelt
# as TorchRec spells them.
# ruff: noqa: UP006, UP007, UP035, UP045

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Union, cast

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.planners import (
    EmbeddingShardingPlanner,
    to_sharding_plan,
    validate_compute_kernels,
    validate_modules_inclusion_in_sharding_plan,
)
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlanDebugStats,
    PlanLoader,
    PlannerError,
    Proposer,
    ShardingOption,
    Stats,
    StorageReservation,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_dreamshard.measurement import CostBreakdown
from torchrec_dreamshard.planner.adapter import shardable_modules
from torchrec_dreamshard.planner.checks import check_arguments, check_complete, check_inputs, check_topology
from torchrec_dreamshard.planner.collective import check_group, run_on_first_rank
from torchrec_dreamshard.planner.costs import CostSource
from torchrec_dreamshard.planner.enumerator import DreamShardEnumerator, option_order
from torchrec_dreamshard.planner.errors import PlannerInputError
from torchrec_dreamshard.planner.explain import Explanation, explain_plan
from torchrec_dreamshard.planner.failures import no_plan_error
from torchrec_dreamshard.planner.loaded import load_options
from torchrec_dreamshard.planner.partitioner import DreamShardPartitioner
from torchrec_dreamshard.planner.perf_model import LearnedPerfModel
from torchrec_dreamshard.planner.plan_file import load_plan, save_plan
from torchrec_dreamshard.planner.proposer import DreamShardProposer
from torchrec_dreamshard.planner.reservation import reserve
from torchrec_dreamshard.planner.restart import PlanChange, continue_plan
from torchrec_dreamshard.planner.search import Search

if TYPE_CHECKING:
    from torchrec_dreamshard.agent import Agent

logger = logging.getLogger(__name__)

_SEARCH_SHARE = 0.7  # of the budget, where an earlier plan is compared afterwards


class DreamShardPlanner(EmbeddingShardingPlanner):  # type: ignore[misc]
    """Plans with a trained agent; takes the place of TorchRec's ``EmbeddingShardingPlanner``.

    The arguments of ``EmbeddingShardingPlanner`` mean what they mean there; what is not given is ours. ``plan`` needs
    no process group and no GPU, whatever the topology is for.

    Args:
        topology: the devices; None for those of the running job.
        batch_size: samples per rank.
        enumerator: builds the search space; None for a pruned one.
        storage_reservation: memory kept for the rest of the model.
        proposer: how tables are sharded; None for ``DreamShardProposer``.
        partitioner: where shards go; None for ``DreamShardPartitioner``.
        performance_model: rates plans; None for ``LearnedPerfModel``.
        stats: reports.
        constraints: by table name.
        debug: passed on to ``stats``.
        callbacks: applied to the best plan, in order.
        timeout_seconds: bound of the search, like ``time_budget_s``; the smaller one counts.
        plan_loader: brings a plan that is used instead of a search.
        agent: an ``Agent``, the name or path of one, or None for the one shipped for the topology's device.
        time_budget_s: ``plan`` returns within about this time, with the best plan so far.
        seed: of the search; the same inputs and seed give the same plan in every process.
        reuse_histograms: reuse histogram (17 bins, see ``ShardSpec``) of tables by name, where known.
        pins: rank of a table by name.
        together: groups of names of tables that share one device.
        sharding_group_size: ranks that share one copy of the tables under a ``DMPCollection``; the topology then
            describes one such group.
        previous: an earlier plan (or its file) to continue: tables stay as they are unless a change is needed or pays;
            ``changes`` lists what differs.
        min_gain: least share of the predicted step that a change of ``previous`` must gain.

    Raises:
        PlannerInputError: the topology is impossible, or missing outside of a distributed job.
        ValueError: a keyword is out of its range.
    """

    def __init__(
        self,
        topology: Optional[Topology] = None,
        batch_size: Optional[int] = None,
        enumerator: Optional[Enumerator] = None,
        storage_reservation: Optional[StorageReservation] = None,
        proposer: Optional[Union[Proposer, List[Proposer]]] = None,
        partitioner: Optional[Partitioner] = None,
        performance_model: Optional[PerfModel] = None,
        stats: Optional[Union[Stats, List[Stats]]] = None,
        constraints: Optional[Dict[str, ParameterConstraints]] = None,
        debug: bool = True,
        callbacks: Optional[List[Callable[[List[ShardingOption]], List[ShardingOption]]]] = None,
        timeout_seconds: Optional[int] = None,
        plan_loader: Optional[PlanLoader] = None,
        *,
        agent: "Optional[Union[Agent, str, Path]]" = None,
        time_budget_s: float = 10.0,
        seed: int = 0,
        reuse_histograms: Optional[Mapping[str, Sequence[float]]] = None,
        pins: Optional[Mapping[str, int]] = None,
        together: Sequence[Sequence[str]] = (),
        sharding_group_size: Optional[int] = None,
        previous: Optional[Union[ShardingPlan, str, Path]] = None,
        min_gain: float = 0.05,
    ) -> None:
        if not time_budget_s > 0:
            raise ValueError(f"time_budget_s must be above 0, got {time_budget_s}")
        if topology is None and not dist.is_initialized():
            raise PlannerInputError(
                "no topology was given and no process group is initialised: pass a Topology to plan offline, or call "
                "torch.distributed.init_process_group first"
            )
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            stats=stats,
            constraints=constraints,
            debug=debug,
            callbacks=callbacks,
            timeout_seconds=timeout_seconds,
            plan_loader=plan_loader,
        )
        check_topology(self._topology)
        check_arguments(self._batch_size, together, pins or {})
        self._time_budget_s = float(time_budget_s)
        self._seed = seed
        self._pins = dict(pins or {})
        self._together = [tuple(names) for names in together]
        self._sharding_group_size = sharding_group_size
        self._previous = load_plan(previous) if isinstance(previous, (str, Path)) else previous
        self._min_gain = min_gain
        self.changes: List[PlanChange] = []
        self._space: List[ShardingOption] = []
        self._constraint: Topology = self._topology
        self._source = CostSource(agent, constraints=constraints, reuse_histograms=reuse_histograms)
        self._own_enumerator = enumerator is None
        if enumerator is None:
            self._enumerator: Enumerator = DreamShardEnumerator(self._topology, self._batch_size, constraints)
        self._set_parts(proposer, partitioner, performance_model)

    def _set_parts(
        self,
        proposer: Optional[Union[Proposer, List[Proposer]]],
        partitioner: Optional[Partitioner],
        performance_model: Optional[PerfModel],
    ) -> None:
        bound = [*self._pins, *(name for names in self._together for name in names)]
        if not proposer:
            proposer = DreamShardProposer(self._source, time_budget_s=self._time_budget_s, bound=bound)
        self._proposers: List[Proposer] = proposer if isinstance(proposer, list) else [proposer]
        self._partitioner: Partitioner = partitioner or DreamShardPartitioner(
            self._source, seed=self._seed, pins=self._pins, together=self._together
        )
        self._perf_model: PerfModel = performance_model or LearnedPerfModel(self._topology, self._source)

    def collective_plan(
        self,
        module: nn.Module,
        sharders: Optional[List[ModuleSharder[nn.Module]]] = None,
        pg: Optional[dist.ProcessGroup] = None,
    ) -> ShardingPlan:
        """Plans on the group's first rank and gives every rank the plan, or the error.

        Args:
            module: the model.
            sharders: TorchRec's defaults if None.
            pg: any process group that this rank belongs to; the world if None.

        Raises:
            PlannerInputError: the topology does not match the group, or there is no group.
            PlannerError: what ``plan`` raised on the first rank, on every rank at once.
        """
        if pg is None:
            if not dist.is_initialized():
                raise PlannerInputError(
                    "collective_plan needs a process group: call torch.distributed.init_process_group first, or use "
                    "plan() outside of a distributed job"
                )
            pg = cast(dist.ProcessGroup, dist.GroupMember.WORLD)
        group, used = pg, get_default_sharders() if sharders is None else sharders
        return run_on_first_rank(
            group,
            lambda: check_group(self._topology, group, self._sharding_group_size),
            lambda: self.plan(module, used),
        )

    def plan(
        self,
        module: nn.Module,
        sharders: List[ModuleSharder[nn.Module]],
    ) -> ShardingPlan:
        """Plans a model.

        Args:
            module: the model; its tables may be on the meta device.
            sharders: one per type of module to shard.

        Returns:
            TorchRec's plan, to be given to ``DistributedModelParallel`` with the same sharders.

        Raises:
            PlannerError: no plan exists (names a table, the bytes needed and there), or an input is unusable.
        """
        start = time.monotonic()
        budget = min(self._time_budget_s, self._timeout_seconds or float("inf"))
        self._source.bind(sharders)
        self._check(module, sharders)
        constraint = reserve(
            self._storage_reservation, self._topology, self._batch_size, module, sharders, self._constraints
        )
        space = sorted(self._enumerator.enumerate(module=module, sharders=sharders), key=option_order)
        if not space:
            return ShardingPlan({})
        self._space, self._constraint, self.changes = space, constraint, []
        best = self._load(space)
        share = 1.0 if self._previous is None else _SEARCH_SHARE
        search = Search(self._proposers, self._partitioner, self._perf_model, deadline=start + budget * share)
        if best is None:
            best = search.run(space, self._enumerator, constraint)
            if best is not None and self._previous is not None:
                best = self._continue(self._previous, best, start + budget)
        self._num_proposals, self._num_plans = search.num_proposals, search.num_plans
        if best is None:
            raise self._failed(search, constraint, sharders, time.monotonic() - start)
        return self._finish(best, module, sharders, time.monotonic() - start)

    def save_plan(self, path: Union[str, Path]) -> None:
        """Writes the last plan to a file that ``plan_file.PlanFileLoader`` and ``previous`` understand.

        Raises:
            ValueError: there is no plan yet.
        """
        if self._best_plan is None:
            raise ValueError("there is no plan to save: call plan() first, or collective_plan() and save on its rank 0")
        save_plan(
            path,
            to_sharding_plan(self._best_plan, self._topology),
            options=self._best_plan,
            predicted=self.predicted(),
            context_hash=self._context_hash(),
        )

    def predicted(self) -> CostBreakdown:
        """Predicted cost of the last plan, term by term and device by device.

        Raises:
            ValueError: there is no plan yet.
        """
        if self._best_plan is None:
            raise ValueError("nothing was planned yet: call plan() or collective_plan() first")
        return self._source.on(self._topology).breakdown(self._best_plan)

    def explain(self, max_tables: int = 40) -> Explanation:
        """Why the last plan is as it is: ``str()`` for people, ``to_dict()`` for programs.

        Args:
            max_tables: alternatives are predicted for so many tables, those on the slowest devices first.

        Raises:
            ValueError: there is no plan yet.
        """
        if self._best_plan is None:
            raise ValueError("nothing was planned yet: call plan() or collective_plan() first")
        fixed = {name: f"kept together with {list(names)}" for names in self._together for name in names}
        fixed.update({name: f"pinned to rank {rank}" for name, rank in self._pins.items()})
        return explain_plan(
            self._best_plan,
            self._space,
            self._source.on(self._topology),
            self._constraint,
            constraints=self._constraints,
            fixed=fixed,
            changes=self.changes,
            max_tables=max_tables,
        )

    def _continue(self, previous: ShardingPlan, fresh: List[ShardingOption], deadline: float) -> List[ShardingOption]:
        movable = {**self._pins, **{name: True for names in self._together for name in names}}
        plan, self.changes = continue_plan(
            previous,
            self._space,
            fresh,
            self._source.on(self._topology),
            self._constraint,
            min_gain=self._min_gain,
            movable=movable,
            deadline=deadline,
        )
        return plan

    def _context_hash(self) -> Optional[str]:
        """TorchRec's hash of the inputs; None where the user's parts cannot be hashed."""
        try:
            return cast(str, self.hash_planner_context_inputs_str())
        except AssertionError:
            return None

    def _check(self, module: nn.Module, sharders: List[ModuleSharder[nn.Module]]) -> None:
        names = {"pins": self._pins, "together": [name for names in self._together for name in names]}
        check_inputs(module, sharders, self._constraints, names, self._topology.compute_device)
        known = getattr(self._enumerator, "_constraints", None)
        if self._constraints and not self._own_enumerator and not known:
            logger.warning(
                "constraints were given to the planner, but not to the enumerator that it was given, which is what "
                "applies them: they have no effect on the search space: %s",
                sorted(self._constraints),
            )
        if not any(True for _ in shardable_modules(module, sharders)):
            logger.warning("no module of %s has a sharder among those given: the plan is empty", type(module).__name__)

    def _load(self, space: List[ShardingOption]) -> Optional[List[ShardingOption]]:
        """The plan of the loader, if there is one that brings a plan."""
        if self.plan_loader is None:
            return None
        wanted = self.plan_loader.plan_context_hash()
        if wanted is not None:
            self._loader_plan_validation(self.hash_planner_context_inputs_str(), wanted)
        loaded = self.plan_loader.load()
        if loaded is None:
            return None
        plan_id = getattr(self.plan_loader, "get_plan_id", lambda: None)()
        logger.info("using the loaded plan %s instead of a search", "" if plan_id is None else plan_id)
        return load_options(space, loaded, self._enumerator)

    def _finish(
        self,
        best: List[ShardingOption],
        module: nn.Module,
        sharders: List[ModuleSharder[nn.Module]],
        run_time: float,
    ) -> ShardingPlan:
        for callback in self._callbacks:
            best = callback(best)
            if best is None:
                raise PlannerInputError(f"the callback {callback!r} must return the plan's options, it returned None")
        self._best_plan = best
        check_complete(best, module, sharders, self._topology, self._constraints)
        plan = to_sharding_plan(best, self._topology)
        self._log(plan, best, sharders, run_time, PlanDebugStats(type(self).__name__, self._timeout_seconds))
        validate_modules_inclusion_in_sharding_plan(plan, module, sharders)
        validate_compute_kernels(best)
        return cast(ShardingPlan, plan)

    def _failed(
        self, search: Search, constraint: Topology, sharders: List[ModuleSharder[nn.Module]], run_time: float
    ) -> PlannerError:
        for option in search.last_proposal:
            for shard in option.shards:
                shard.rank = -1
        self._log(ShardingPlan({}), search.last_proposal, sharders, run_time, None)
        return no_plan_error(search, self._topology, constraint, self._batch_size)

    def _log(
        self,
        plan: ShardingPlan,
        options: List[ShardingOption],
        sharders: List[ModuleSharder[nn.Module]],
        run_time: float,
        debug_stats: Optional[PlanDebugStats],
    ) -> None:
        further: Dict[str, Any] = {} if debug_stats is None else {"debug_stats": debug_stats}
        for stats in self._stats:
            stats.log(
                sharding_plan=plan,
                topology=self._topology,
                batch_size=self._batch_size,
                storage_reservation=self._storage_reservation,
                num_proposals=self._num_proposals,
                num_plans=self._num_plans,
                run_time=run_time,
                best_plan=options,
                constraints=self._constraints,
                sharders=sharders,
                enumerator=self._enumerator,
                debug=self._debug,
                **further,
            )
