"""Fits a cost model to measurements: split by task, physical prior, residual with early stopping, report.

Every member of the ensemble holds out one fold of the tasks: it stops when its own fold stops improving, and the
report's errors are those of each member on the fold that it never saw.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_dreamshard.config import CostConfig
from torchrec_dreamshard.cost_model import CostModel
from torchrec_dreamshard.cost_network import CostNetwork, make_cost_model
from torchrec_dreamshard.exchange import exchange_features
from torchrec_dreamshard.loads import DeviceLoads, collect_loads, usable
from torchrec_dreamshard.measurement import Measurement
from torchrec_dreamshard.paper_cost_network import PaperCostNetwork
from torchrec_dreamshard.paper_fitting import fit_paper
from torchrec_dreamshard.physics import LOAD_INDEX, NUM_KERNEL_QUANTITIES, fit_nonnegative, load_quantities

Progress = Callable[[int, int], None]
"""Called with the steps done and the steps in all."""


@dataclass(frozen=True, kw_only=True)
class TermReport:
    """Errors of one term on held-out measurements."""

    num_values: int
    mape: float
    """Mean absolute percentage error, as a share."""
    rank_correlation: float
    """Spearman's."""
    prior_mape: float
    """The same error of the physical prior alone."""


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """What a fit is worth, judged on measurements that it did not see."""

    ready: bool
    """False when the model is no better than its prior, or there was too little data to tell."""
    reason: str
    num_measurements: int
    num_failed: int
    num_loads: int
    terms: dict[str, TermReport] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def fit_cost_model(
    measurements: Sequence[Measurement],
    config: CostConfig | None = None,
    *,
    seed: int = 0,
    model: CostModel | None = None,
    progress: Progress | None = None,
) -> tuple[CostModel, FitReport]:
    """Fits a cost model.

    Args:
        measurements: whatever is known; partial costs are used for the terms that they know, failures are skipped.
        config: form and size; default ``CostConfig()``, or the model's own.
        seed: of initialisation, folds and batches; the same seed gives equal tensors.
        model: a fitted model to continue from (it is not changed).
        progress: called after each gradient step.

    Returns:
        The model and what it is worth.

    Raises:
        ValueError: no measurement has a cost.
    """
    kept = usable(measurements)
    loads = collect_loads(kept)
    fitted = make_cost_model(config or CostConfig()) if model is None else copy.deepcopy(model)
    if isinstance(fitted, PaperCostNetwork):
        fit_paper(fitted, kept, loads, seed=seed, fresh=model is None, progress=progress)
        terms: dict[str, TermReport] = {}
    else:
        assert isinstance(fitted, CostNetwork)
        terms = _fit_network(fitted, loads, seed=seed, fresh=model is None, progress=progress)
    ready = all(term.mape <= term.prior_mape * 1.001 for term in terms.values())
    report = FitReport(
        ready=ready,
        reason="" if ready else "a term is predicted worse than by the physical prior alone",
        num_measurements=len(kept),
        num_failed=len(measurements) - len(kept),
        num_loads=loads.num_loads,
        terms=terms,
    )
    return fitted.eval(), report


def _fit_network(
    model: CostNetwork, loads: DeviceLoads, *, seed: int, fresh: bool, progress: Progress | None
) -> dict[str, TermReport]:
    generator = torch.Generator().manual_seed(seed)
    model.shard_normalizer.fit(loads.shard_features)
    model.hardware_normalizer.fit(loads.load_hardware)
    occupied = loads.offsets.diff() > 0
    total = loads.compute_ms[:, 2]
    rows = torch.nonzero(occupied & total.isfinite()).squeeze(1)
    if len(rows):
        if fresh:
            _fit_prior(model, loads, rows)
            model.reset(generator)
        _fit_residual(model, loads, rows, generator, progress)
    _fit_exchange(model, loads)
    return {}


def _fit_prior(model: CostNetwork, loads: DeviceLoads, rows: Tensor) -> None:
    quantities = load_quantities(loads.shard_features, loads.shard_hardware)
    sums = loads.sums(quantities)[rows, :NUM_KERNEL_QUANTITIES].double().numpy()
    matrix = np.concatenate([np.ones((len(sums), 1)), sums], axis=1)
    targets = loads.compute_ms[rows].double().numpy()
    floor = 1e-3 * max(float(np.median(targets[:, 2])), 1e-9)
    prior = []
    for direction in range(2):
        y = targets[:, direction]
        # Sources that cannot tell the directions apart: backward is taken as twice forward (TorchRec's planner).
        y = np.where(np.isfinite(y), y, targets[:, 2] * (1 + direction) / 3)
        weight = 1.0 / (y + floor)
        prior.append(fit_nonnegative(matrix * weight[:, None], y * weight))
    model.set_prior(torch.tensor(np.stack(prior), dtype=torch.float32), float(np.median(targets[:, 2])) or 1.0)


def _fit_residual(
    model: CostNetwork, loads: DeviceLoads, rows: Tensor, generator: torch.Generator, progress: Progress | None
) -> None:
    config = model.config
    members = config.num_members
    groups = int(loads.group.max()) + 1
    fold_of_group = torch.randperm(groups, generator=generator) % members
    fold = fold_of_group[loads.group[loads.measurement[rows]]]
    held_out = fold[:, None] == torch.arange(members)
    target = loads.compute_ms[rows]
    floor = 1e-3 * float(target[:, 2].median())
    optimizer = torch.optim.Adam(model.parameters(), lr=config.learning_rate)
    best = torch.full((members,), math.inf)
    best_state = [p.detach().clone() for p in model.parameters()]

    def losses(index: Tensor, latents: Tensor) -> Tensor:
        out = model.member_compute(latents)
        out = torch.cat([out, out.sum(dim=-1, keepdim=True)], dim=-1)
        truth = target[index][:, None, :]
        error = torch.log((out + floor) / (truth.nan_to_num(1.0) + floor))
        known = truth.isfinite()
        error = torch.nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=0.3)
        return (error * known).sum(dim=-1) / known.sum(dim=-1)

    for step in range(config.num_steps + 1):
        if step % 20 == 0 or step == config.num_steps:
            with torch.no_grad():
                encoded = model.encode_shards(loads.shard_features, loads.shard_hardware)
                error = losses(torch.arange(len(rows)), loads.sums(encoded)[rows])
                score = (error * held_out).sum(dim=0) / held_out.sum(dim=0).clamp(min=1)
                better = score < best
                best = torch.where(better, score, best)
                for kept, parameter in zip(best_state, model.parameters(), strict=True):
                    kept[better] = parameter[better]
        if step == config.num_steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * 0.5 * (1 + math.cos(math.pi * step / config.num_steps))
        encoded = model.encode_shards(loads.shard_features, loads.shard_hardware)
        error = losses(torch.arange(len(rows)), loads.sums(encoded)[rows])
        loss = (error * ~held_out).sum() / (~held_out).sum() * members
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if progress is not None:
            progress(step + 1, config.num_steps)
    with torch.no_grad():
        for kept, parameter in zip(best_state, model.parameters(), strict=True):
            parameter.copy_(kept)


def _fit_exchange(model: CostNetwork, loads: DeviceLoads) -> None:
    with torch.no_grad():
        latents = loads.sums(model.encode_shards(loads.shard_features, loads.shard_hardware))
        predicted = model.device_compute(latents, loads.load_hardware)[:, 0]
    measured = loads.compute_ms[:, 0]
    forward = torch.where(measured.isfinite(), measured, predicted)
    output = loads.by_measurement(latents[:, LOAD_INDEX["output_values"]])
    features = exchange_features(output, loads.by_measurement(forward), loads.tasks)
    matrix = features[loads.measurement, loads.device].double().numpy()
    for direction in range(2):
        y = loads.comms_ms[:, direction].double().numpy()
        known = np.isfinite(y)
        if known.any():
            weight = 1.0 / (y[known] + 0.1 * max(float(np.median(y[known])), 1e-9))
            coefficients = fit_nonnegative(matrix[known] * weight[:, None], y[known] * weight)
            model.exchange.coefficients[direction] = torch.from_numpy(coefficients).float()
