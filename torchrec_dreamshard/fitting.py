"""Fits a cost model to measurements and says what it is worth.

The errors in the report are those of each ensemble member on the tasks that it never saw, beside those of the
physical prior alone, fitted to the same training rows.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrec_dreamshard.compute_fitting import (
    HeldOut,
    Progress,
    calibrate_spread,
    fit_compute,
    folds,
    held_out_predictions,
)
from torchrec_dreamshard.config import CostConfig
from torchrec_dreamshard.cost_model import CostModel
from torchrec_dreamshard.cost_network import CostNetwork, make_cost_model
from torchrec_dreamshard.exchange_fitting import fit_exchange, fit_step, single_devices
from torchrec_dreamshard.loads import DeviceLoads, collect_loads, usable
from torchrec_dreamshard.measurement import FloatArray, Measurement
from torchrec_dreamshard.paper_cost_network import PaperCostNetwork
from torchrec_dreamshard.paper_fitting import fit_paper

logger = logging.getLogger(__name__)

_EXACT = 0.005  # held-out error far below that of repeated measurements: a nearer prior proves nothing
_WORSE = 1.02  # times the prior's error
_MIN_CORRELATION, _UNLIKE = 0.5, 0.1  # ranks do not matter where all costs are nearly equal
_MIN_JUDGED = 8  # fewer held-out values do not tell anything
_CONTRADICTION = 1.5  # ratio between costs of one and the same placement


@dataclass(frozen=True, kw_only=True)
class TermReport:
    """Errors of one term on held-out measurements."""

    num_values: int
    mape: float
    """Mean absolute percentage error, as a share."""
    rank_correlation: float
    """Spearman's."""
    weighted_error: float
    """Sum of absolute errors over the sum of truths: what large loads count in."""
    prior_mape: float | None = None
    """``mape`` of the physical prior alone; None where there is no prior to compare with."""
    prior_weighted_error: float | None = None
    """``weighted_error`` of the physical prior alone."""
    inside_90: float | None = None
    """Share of the truths inside the stated 90 % interval; None where no deviation is stated."""


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """What a fit is worth, judged on measurements that it did not see."""

    ready: bool
    """False when the model is worse than its prior alone, or when there was too little data to tell."""
    reason: str
    """Why it is not ready, or empty."""
    num_measurements: int
    num_failed: int
    num_contradictory: int
    """Measurements whose placement was also measured with a clearly different cost."""
    num_repeated: int
    """Measurements of a placement beyond its first; they are held out together, never to judge each other."""
    num_loads: int
    notes: tuple[str, ...] = ()
    """What to know of a model even if it is ready."""
    terms: dict[str, TermReport] = field(default_factory=dict)
    """By name of the term; "compute_ms" is forward plus backward, "step_ms" the overall cost."""

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
        config: form and size; default ``CostConfig()``. Ignored with ``model``, which has its own.
        seed: of initialisation and minibatches; the same seed gives equal tensors.
        model: a fitted model to continue from (it is not changed).
        progress: called with the gradient steps done and all of them.

    Returns:
        The model, with its parameters frozen, and what it is worth.

    Raises:
        ValueError: no measurement has a cost.
    """
    kept = usable(measurements)
    loads = collect_loads(kept)
    fitted = make_cost_model(config or CostConfig()) if model is None else copy.deepcopy(model)
    fitted.requires_grad_(True)
    terms: dict[str, TermReport] = {}
    if isinstance(fitted, PaperCostNetwork):
        fit_paper(fitted, kept, loads, seed=seed, fresh=model is None, progress=progress)
        reason = ""
    elif isinstance(fitted, CostNetwork):
        terms = _fit_network(fitted, loads, seed=seed, fresh=model is None, progress=progress)
        reason = doubts(terms)
    else:
        raise ValueError(f"fit_cost_model trains CostNetwork and PaperCostNetwork, got {type(fitted).__name__}")
    report = FitReport(
        ready=not reason,
        reason=reason,
        num_measurements=len(kept),
        num_failed=len(measurements) - len(kept),
        num_contradictory=count_contradictory(kept),
        num_repeated=len(kept) - int(loads.repeat.max()) - 1,
        num_loads=loads.num_loads,
        notes=_notes(kept, loads, fresh=model is None),
        terms=terms,
    )
    return fitted.eval().requires_grad_(False), report


def _fit_network(
    model: CostNetwork, loads: DeviceLoads, *, seed: int, fresh: bool, progress: Progress | None
) -> dict[str, TermReport]:
    generator = torch.Generator().manual_seed(seed)
    fit_compute(model, loads, fresh=fresh, generator=generator, progress=progress)
    held_out = held_out_predictions(model, loads)
    alone = _term(held_out.compute_ms.sum(dim=1), loads.compute_ms[:, 2], held_out.judged, held_out.prior_ms.sum(dim=1))
    if fresh and alone is not None and worse_than_prior(alone):
        logger.info("the learned corrections do not beat the physical prior on held-out measurements: dropped")
        model.drop_corrections()
        held_out = held_out._replace(compute_ms=held_out.prior_ms)
    calibrate_spread(model, loads, held_out)
    measured = loads.compute_ms[:, 0]
    forward = torch.where(measured.isfinite(), measured, held_out.compute_ms[:, 0])
    comms = fit_exchange(model, loads, forward, generator, fresh=fresh)
    fit_step(model, loads, generator, fresh=fresh)
    return _report(model, loads, held_out, comms)


def _term(
    predicted: Tensor, truth: Tensor, judged: Tensor | None = None, prior: Tensor | None = None, **more: float
) -> TermReport | None:
    """Errors where the truth is known and not 0 (and ``judged``), or None where there are too few values."""
    rows = truth.isfinite() & predicted.isfinite() & (truth > 0)
    rows = rows if judged is None else rows & judged
    if int(rows.sum()) < 2:
        return None
    arrays = [x[rows].double().numpy() for x in (predicted, truth)]
    alone = None if prior is None else prior[rows].double().numpy()
    return TermReport(
        num_values=len(arrays[0]),
        mape=_mape(*arrays),
        rank_correlation=rank_correlation(*arrays),
        weighted_error=_weighted_error(*arrays),
        prior_mape=None if alone is None else _mape(alone, arrays[1]),
        prior_weighted_error=None if alone is None else _weighted_error(alone, arrays[1]),
        **more,
    )


def _report(model: CostNetwork, loads: DeviceLoads, held_out: HeldOut, comms: Tensor) -> dict[str, TermReport]:
    compute, prior, truth = held_out.compute_ms, held_out.prior_ms, loads.compute_ms
    judged, terms = held_out.judged, {}
    for index, name in enumerate(("forward_compute_ms", "backward_compute_ms")):
        terms[name] = _term(compute[:, index], truth[:, index], judged, prior[:, index])
    if judged.any():
        with torch.no_grad():
            latents = loads.sums(model.encode_shards(loads.shard_features, loads.shard_hardware))
            deviation = model.compute_std(latents, loads.load_hardware)
        inside = ((compute.sum(dim=1) - truth[:, 2]).abs() <= 1.645 * deviation)[judged].double().mean()
        terms["compute_ms"] = _term(compute.sum(dim=1), truth[:, 2], judged, prior.sum(dim=1), inside_90=float(inside))
    for index, name in enumerate(("forward_comms_ms", "backward_comms_ms")):
        terms[name] = _term(comms[:, index], loads.comms_ms[:, index])
    terms["step_ms"] = _term(_held_out_steps(model, loads, held_out), loads.step_ms)
    return {name: term for name, term in terms.items() if term is not None}


def _held_out_steps(model: CostNetwork, loads: DeviceLoads, held_out: HeldOut) -> Tensor:
    """``B`` steps from the members that held the measurement out."""
    fold = folds(loads, model.config.num_members)[loads.measurement]
    with torch.no_grad():
        latents = loads.sums(model.encode_shards(loads.shard_features, loads.shard_hardware))
        compute = model.member_compute(latents)[torch.arange(loads.num_loads), fold]
        return model.combine(loads.by_measurement(compute), loads.by_measurement(latents), loads.tasks).step_ms


def worse_than_prior(term: TermReport) -> bool:
    """Whether the prior alone predicts a term better, on balance of small loads and large ones."""
    if term.prior_mape is None or term.prior_weighted_error is None:
        return False
    if max(term.mape, term.weighted_error) <= _EXACT:
        return False
    # Small loads count in one, large ones in the other: losses here and gains there are weighed by their ratios.
    plain = (term.mape + _EXACT) / (term.prior_mape + _EXACT)
    weighted = (term.weighted_error + _EXACT) / (term.prior_weighted_error + _EXACT)
    return plain * weighted > _WORSE**2


def doubts(terms: dict[str, TermReport]) -> str:
    """Why the model is not ready, or an empty string."""
    if not terms:
        return "no term could be judged on held-out measurements: measure more placements"
    for name, term in terms.items():
        if term.num_values < _MIN_JUDGED:
            return f"only {term.num_values} held-out values of {name}, at least {_MIN_JUDGED} are needed to judge it"
    for name in ("compute_ms", "step_ms"):
        if name not in terms:
            continue
        term = terms[name]
        if worse_than_prior(term):
            return (
                f"{name} is predicted worse (held-out error {term.mape:.1%}, {term.weighted_error:.1%} weighted by "
                f"load) than by the physical prior alone ({term.prior_mape:.1%}, {term.prior_weighted_error:.1%}): "
                "measure more placements, or more different ones"
            )
        if term.rank_correlation < _MIN_CORRELATION and term.mape > _UNLIKE:
            return (
                f"predicted {name} hardly follows the measured one (rank correlation {term.rank_correlation:.2f}, "
                f"error {term.mape:.1%}): repeat some measurements to see their noise, then measure more"
            )
    return ""


def _notes(measurements: Sequence[Measurement], loads: DeviceLoads, *, fresh: bool) -> tuple[str, ...]:
    notes = []
    if contradictory := count_contradictory(measurements):
        notes.append(
            f"{contradictory} measurements contradict others of the same placement (more than {_CONTRADICTION:g} times "
            "apart): a cost between them is learned; remove the wrong ones, or measure again on a quiet machine"
        )
    if fresh and single_devices(loads):
        notes.append(
            "every measurement is of a single device, so the exchange between devices is not learned but priced by the "
            "bandwidths of the hardware: add measurements of at least two devices"
        )
    return tuple(notes)


def count_contradictory(measurements: Sequence[Measurement]) -> int:
    """Measurements whose placement was also measured at a clearly different cost."""
    totals: dict[object, list[float]] = {}
    for m in measurements:
        assert m.cost is not None
        total = m.cost.step_ms if m.cost.step_ms is not None else None
        if total is None and m.cost.compute_ms is not None:
            total = float(m.cost.compute_ms.sum())
        if total is not None:
            totals.setdefault((m.task, m.placement), []).append(total)
    return sum(len(same) for same in totals.values() if max(same) > _CONTRADICTION * min(same))


def _mape(predicted: FloatArray, truth: FloatArray) -> float:
    return float(np.mean(np.abs(predicted - truth) / truth))


def _weighted_error(predicted: FloatArray, truth: FloatArray) -> float:
    return float(np.abs(predicted - truth).sum() / truth.sum())


def rank_correlation(a: FloatArray, b: FloatArray) -> float:
    """Spearman's rank correlation; ties get their mean rank, 0 where one side is constant."""
    ranks = []
    for values in (a, b):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    if any(np.ptp(r) == 0 for r in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
