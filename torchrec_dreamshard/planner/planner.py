"""``DreamShardPlanner``: TorchRec's planner with learned costs, a learned placement and a bounded time."""

# TorchRec compares annotated signatures when it checks interfaces, so annotations here are evaluated and spelt
# as TorchRec spells them.
# ruff: noqa: UP006, UP007, UP035, UP045

import logging
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union, cast

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner, to_sharding_plan
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
from torchrec_dreamshard.planner.checks import check_arguments, check_enumerator, check_inputs, check_topology
from torchrec_dreamshard.planner.collective import check_group, group_of_job, run_on_first_rank
from torchrec_dreamshard.planner.costs import CostSource
from torchrec_dreamshard.planner.enumerator import DreamShardEnumerator, option_order
from torchrec_dreamshard.planner.explain import Explanation, explain_plan
from torchrec_dreamshard.planner.failures import no_plan_error
from torchrec_dreamshard.planner.finish import call_back, checked_plan
from torchrec_dreamshard.planner.loaded import use_loader
from torchrec_dreamshard.planner.partitioner import DreamShardPartitioner
from torchrec_dreamshard.planner.perf_model import LearnedPerfModel
from torchrec_dreamshard.planner.plan_file import load_plan, save_plan
from torchrec_dreamshard.planner.proposer import DreamShardProposer
from torchrec_dreamshard.planner.reservation import reserve
from torchrec_dreamshard.planner.restart import Candidate, PlanChange, continue_plan
from torchrec_dreamshard.planner.rival import with_rival
from torchrec_dreamshard.planner.search import Search
from torchrec_dreamshard.planner.table_step import TableStep
from torchrec_dreamshard.planner.verify import MeasuredPlan, Verify, measure_plans

if TYPE_CHECKING:
    from torchrec_dreamshard.agent import Agent

logger = logging.getLogger(__name__)

_SEARCH_SHARE = 0.7  # of the budget, where an earlier plan or TorchRec's is compared afterwards


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
        previous: an earlier plan (or its file) to continue: tables stay as they are unless changes are needed or pay;
            ``changes`` lists what differs.
        min_gain: least share of the predicted step, 0 to 1, that changes of ``previous`` must gain together.
        verify: lets ``collective_plan`` measure the best few plans on the job's ranks and take the fastest.

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
        verify: Optional[Verify] = None,
    ) -> None:
        if not time_budget_s > 0:
            raise ValueError(f"time_budget_s must be above 0, got {time_budget_s}")
        if topology is None:
            group_of_job()
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
        check_arguments(self._batch_size, together, pins or {}, min_gain, self._topology.world_size)
        self._time_budget_s = float(time_budget_s)
        self._seed = seed
        self._pins = dict(pins or {})
        self._together = [tuple(names) for names in together]
        self._sharding_group_size = sharding_group_size
        self._previous = load_plan(previous) if isinstance(previous, (str, Path)) else previous
        self._min_gain = min_gain
        self._verify = verify
        if verify is not None and verify.build is None and sharding_group_size is not None:
            raise ValueError(
                "verify needs Verify(build=) where sharding_group_size is given: tables alone know no copies"
            )
        self._best_plan: Optional[List[ShardingOption]] = None
        self.changes: List[PlanChange] = []
        self.measured: List[MeasuredPlan] = []
        self._space: List[ShardingOption] = []
        self._constraint: Topology = self._topology
        self._source = CostSource(agent, constraints=constraints, reuse_histograms=reuse_histograms)
        if enumerator is None:
            self._enumerator: Enumerator = DreamShardEnumerator(self._topology, self._batch_size, constraints)
        self._set_parts(proposer, partitioner, performance_model)
        self._may_rival = not (proposer or partitioner or performance_model or pins or together or previous)

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
        group = group_of_job() if pg is None else pg
        used = get_default_sharders() if sharders is None else sharders
        check = partial(check_group, self._topology, group, self._sharding_group_size)
        if (verify := self._verify) is None:
            return run_on_first_rank(group, check, lambda: self.plan(module, used))
        candidates: List[Candidate] = []  # of the first rank

        def search() -> List[Tuple[float, ShardingPlan]]:
            candidates.extend(self._search(module, used, verify.num_plans))
            finished = (checked_plan(c.options, module, used, self._topology, self._constraints) for c in candidates)
            return [(self._perf_model.rate(c.options), plan) for c, plan in zip(candidates, finished, strict=True)]

        plans = run_on_first_rank(group, check, search)
        tables_alone = partial(
            TableStep,
            module,
            used,
            batch_size=self._batch_size,
            constraints=self._constraints,
            batches=verify.batches,
            seed=self._seed,
        )
        chosen, self.measured = measure_plans(verify, plans, group, verify.build or tables_alone)
        if not plans:
            return ShardingPlan({})
        return run_on_first_rank(group, None, lambda: self._finish(candidates[chosen], module, used))

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
        candidates = self._search(module, sharders)
        return self._finish(candidates[0], module, sharders) if candidates else ShardingPlan({})

    def _search(
        self, module: nn.Module, sharders: List[ModuleSharder[nn.Module]], num_kept: int = 1
    ) -> List[Candidate]:
        """The best different plans, the best predicted first; none where there is nothing to shard."""
        start = time.monotonic()
        budget = min(self._time_budget_s, self._timeout_seconds or float("inf"))
        self._best_plan, self.changes, self.measured = None, [], []
        self._source.bind(sharders)
        names = {"pins": self._pins, "together": [name for group in self._together for name in group]}
        check_inputs(module, sharders, self._constraints, names, self._topology.compute_device)
        check_enumerator(self._enumerator, self._constraints)
        constraint = reserve(
            self._storage_reservation, self._topology, self._batch_size, module, sharders, self._constraints
        )
        space = sorted(self._enumerator.enumerate(module=module, sharders=sharders), key=option_order)
        if not space:
            return []
        self._space, self._constraint = space, constraint
        deadline = start + budget * (1.0 if self._previous is None and num_kept == 1 else _SEARCH_SHARE)
        search = Search(self._proposers, self._partitioner, self._perf_model, deadline=deadline, num_kept=num_kept)
        loaded = self._load(space)
        if loaded is not None:
            candidates = [Candidate(loaded)]
        else:
            search.run(space, self._enumerator, constraint)
            plans = [plan for _, plan in search.kept]
            if num_kept > 1 and self._may_rival:  # TorchRec's greedy knows of no pins, and not of the user's parts
                plans = with_rival(plans, num_kept, space, self._enumerator, constraint, start + budget)
            candidates = [Candidate(plan) for plan in plans]
            if candidates and self._previous is not None:
                candidates = self._continue(self._previous, candidates[0].options, start + budget)[:num_kept]
        self._num_proposals, self._num_plans = search.num_proposals, search.num_plans
        self._run_time = time.monotonic() - start
        if not candidates:
            raise self._failed(search, constraint, sharders)
        return [c._replace(options=call_back(self._callbacks, c.options)) for c in candidates]

    def save_plan(self, path: Union[str, Path]) -> None:
        """Writes the last plan to a file that ``plan_file.PlanFileLoader`` and ``previous`` understand.

        Raises:
            ValueError: there is no plan yet.
        """
        options = self._last()
        save_plan(
            path,
            to_sharding_plan(options, self._topology),
            options=options,
            predicted=self.predicted(),
            context_hash=self._context_hash(),
        )

    def predicted(self) -> CostBreakdown:
        """Predicted cost of the last plan, term by term and device by device.

        Raises:
            ValueError: there is no plan yet.
        """
        return self._source.on(self._topology).breakdown(self._last())

    def explain(self, max_tables: int = 40) -> Explanation:
        """Why the last plan is as it is: ``str()`` for people, ``to_dict()`` for programs.

        Args:
            max_tables: alternatives are predicted for so many tables, those on the slowest devices first.

        Raises:
            ValueError: there is no plan yet.
        """
        return explain_plan(
            self._last(),
            self._space,
            self._source.on(self._topology),
            self._constraint,
            constraints=self._constraints,
            pins=self._pins,
            together=self._together,
            changes=self.changes,
            measured=self.measured,
            max_tables=max_tables,
        )

    def _last(self) -> List[ShardingOption]:
        if self._best_plan is None:
            raise ValueError("nothing was planned yet: call plan() first, or collective_plan() and ask its rank 0")
        return self._best_plan

    def _continue(self, previous: ShardingPlan, fresh: List[ShardingOption], deadline: float) -> List[Candidate]:
        return continue_plan(
            previous,
            self._space,
            fresh,
            self._source.on(self._topology),
            self._constraint,
            min_gain=self._min_gain,
            movable={**self._pins, **{name: True for names in self._together for name in names}},
            deadline=deadline,
        )

    def _context_hash(self) -> Optional[str]:
        """TorchRec's hash of the inputs; None where the user's parts cannot be hashed."""
        try:
            return cast(str, self.hash_planner_context_inputs_str())
        except AssertionError:
            return None

    def _load(self, space: List[ShardingOption]) -> Optional[List[ShardingOption]]:
        """The plan of the loader, if there is one that brings a plan."""
        if self.plan_loader is None:
            return None
        if (wanted := self.plan_loader.plan_context_hash()) is not None:
            self._loader_plan_validation(self.hash_planner_context_inputs_str(), wanted)
        return use_loader(self.plan_loader, space, self._enumerator)

    def _finish(
        self, candidate: Candidate, module: nn.Module, sharders: List[ModuleSharder[nn.Module]]
    ) -> ShardingPlan:
        self._best_plan, self.changes = candidate.options, list(candidate.changes)
        plan = checked_plan(candidate.options, module, sharders, self._topology, self._constraints)
        for change in self.changes:
            logger.info("changed since the earlier plan: %s", change)
        self._log(plan, candidate.options, sharders, PlanDebugStats(type(self).__name__, self._timeout_seconds))
        return plan

    def _failed(self, search: Search, constraint: Topology, sharders: List[ModuleSharder[nn.Module]]) -> PlannerError:
        for option in search.last_proposal:
            for shard in option.shards:
                shard.rank = -1
        self._log(ShardingPlan({}), search.last_proposal, sharders, None)
        return no_plan_error(search, self._topology, constraint, self._batch_size)

    def _log(
        self,
        plan: ShardingPlan,
        options: List[ShardingOption],
        sharders: List[ModuleSharder[nn.Module]],
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
                run_time=self._run_time,
                best_plan=options,
                constraints=self._constraints,
                sharders=sharders,
                enumerator=self._enumerator,
                debug=self._debug,
                **further,
            )
