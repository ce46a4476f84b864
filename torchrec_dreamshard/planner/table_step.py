"""A training step of a model's tables alone, under a plan: forward, backward and optimizers, on drawn or given batches.

The dense part of a model takes the same time under every plan, so that plans can be compared without it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import LazyAwaitable, ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torchrec_dreamshard.planner.adapter import shardable_modules, table_configs

_NUM_DRAWN = 4  # batches: one alone would stay in the caches


class TableStep:
    """Builds the sharded tables; calling it runs one step.

    Args:
        module: the model; it is not changed, and its tables are not copied.
        sharders: as for the plan.
        plan: a plan of the model.
        group: the ranks; the plan's ranks count within it.
        batch_size: samples per rank of drawn batches.
        constraints: by table name, for the pooling factors of drawn batches.
        batches: this rank's batches, each with every feature; drawn where there are none.
        seed: of drawn batches.
    """

    def __init__(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        plan: ShardingPlan,
        group: dist.ProcessGroup,
        *,
        batch_size: int,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        batches: Sequence[KeyedJaggedTensor] = (),
        seed: int = 0,
    ) -> None:
        on_cpu = "nccl" not in str(dist.get_backend_config(group))
        device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        found = [(path, child) for path, child, _ in shardable_modules(module, sharders) if path in plan.plan]
        generator = torch.Generator().manual_seed(seed * group.size() + group.rank())
        drawn = [
            [draw_batch(child, batch_size, constraints or {}, generator) for _, child in found]
            for _ in range(0 if batches else _NUM_DRAWN)
        ]
        inputs = [[batch] * len(found) for batch in batches] or drawn
        self._inputs = [[batch.to(device) for batch in row] for row in inputs]
        self._model = DistributedModelParallel(
            _Tables([_without_weights(child, sharders) for _, child in found]),
            env=ShardingEnv.from_process_group(group),
            device=device,
            plan=ShardingPlan({f"members.{index}": plan.plan[path] for index, (path, _) in enumerate(found)}),
            sharders=sharders,
        )
        rest = dict(in_backward_optimizer_filter(self._model.named_parameters()))
        self._optimizer = torch.optim.SGD(list(rest.values()), lr=0.01) if rest else None
        self._count = 0

    def __call__(self) -> None:
        """One step, on the next batch."""
        batches = self._inputs[self._count % len(self._inputs)]
        self._count += 1
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        outputs = [tensor for tensor in self._model(batches) if tensor.requires_grad]
        torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
        if self._optimizer is not None:
            self._optimizer.step()


class _Tables(nn.Module):
    """Collections side by side; all exchanges start before the first is waited for."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, batches: Sequence[KeyedJaggedTensor]) -> list[Tensor]:
        outputs = [member(batch) for member, batch in zip(self.members, batches, strict=True)]
        return [tensor for output in outputs for tensor in _tensors(output)]


def draw_batch(
    module: nn.Module, batch_size: int, constraints: Mapping[str, ParameterConstraints], generator: torch.Generator
) -> KeyedJaggedTensor:
    """A random batch for a collection, with the pooling factors of the constraints.

    Few ids take most of the lookups, as in most traffic: an id is drawn with a probability of about one over its rank.
    """
    rows: dict[str, int] = {}
    factors: dict[str, float] = {}
    for name, config in table_configs(module).items():
        given = list(constraints[name].pooling_factors) if name in constraints else [1.0]
        given = given * len(config.feature_names) if len(given) == 1 else given
        for feature, factor in zip(config.feature_names, given, strict=True):
            rows[feature] = min(rows.get(feature, config.num_embeddings), config.num_embeddings)
            factors[feature] = max(factors.get(feature, 0.0), float(factor))
    lengths = torch.cat(
        # a bag has the whole part of the mean, and one more as often as makes up the fraction
        [(torch.rand(batch_size, generator=generator) + factor).long() for factor in factors.values()]
    )
    counts = lengths.view(len(rows), batch_size).sum(dim=1).tolist()
    ids = [
        (torch.rand(count, dtype=torch.float64, generator=generator) * torch.tensor(float(num)).log()).exp().long() - 1
        for count, num in zip(counts, rows.values(), strict=True)
    ]
    values = torch.cat(ids).clamp_(min=0)
    weights = torch.rand(len(values), generator=generator) if _takes_weights(module) else None
    return KeyedJaggedTensor(keys=list(rows), values=values, lengths=lengths, weights=weights)


def _takes_weights(module: nn.Module) -> bool:
    inner = getattr(module, "_embedding_module", module)  # of a managed-collision collection
    is_weighted = getattr(inner, "is_weighted", None)
    return bool(callable(is_weighted) and is_weighted())


def _without_weights(module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> nn.Module:
    """A copy whose tables are on the meta device, with what optimizers left on them."""
    memo: dict[int, Any] = {}
    for _, child, sharder in shardable_modules(module, sharders):
        for table in sharder.shardable_parameters(child).values():
            twin = nn.Parameter(torch.empty_like(table, device="meta"), requires_grad=table.requires_grad)
            twin.__dict__.update(table.__dict__)
            memo[id(table)] = twin
    return copy.deepcopy(module, memo)


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, LazyAwaitable):
        output = output.wait()
    if isinstance(output, (KeyedTensor, JaggedTensor, KeyedJaggedTensor)):
        yield cast(Tensor, output.values())
    elif isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from _tensors(part)
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _tensors(part)
