"""Fits the fused-kernel part of ``CostNetwork``: physical prior, then the members' corrections.

Every member holds out one fold of the tasks and keeps the parameters that were best there, so that all measurements
train most members and every measurement has a member that never saw it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from torchrec_dreamshard.cost_network import CROWDED, CostNetwork
from torchrec_dreamshard.loads import DeviceLoads
from torchrec_dreamshard.measurement import FloatArray
from torchrec_dreamshard.physics import NUM_KERNEL_QUANTITIES, fit_nonnegative, load_quantities

Progress = Callable[[int, int], None]

_CHECK_EVERY = 20
_HEAD_SPEED = 10.0  # learning rate of the few mixing weights over that of the encoder
_MAX_STEPS_FACTOR = 5.0
_HUBER = 0.3  # a relative error above this counts linearly
_GROWTH_PENALTY = 1e-3  # a cost is proportional to its load unless the data says otherwise
_FLOOR = 1e-3  # of a typical cost: below it, errors are no longer relative


class HeldOut(NamedTuple):
    """Predictions of each load by the members that did not see it, in ms."""

    compute_ms: Tensor
    """``N x 2``."""
    prior_ms: Tensor
    """``N x 2``: by a prior that did not see it either."""
    judged: Tensor
    """``N`` bool: whether some member held the load out."""


def folds(loads: DeviceLoads, num_folds: int) -> Tensor:
    """Fold of each measurement, ``B``: by task, or by placement where there are too few tasks.

    It depends on the task alone, so that a model trained further on more data holds out what it held out before.
    """
    if len(set(loads.group.tolist())) >= 3 * num_folds:
        return loads.group % num_folds
    return loads.repeat % num_folds


def fit_compute(
    model: CostNetwork,
    loads: DeviceLoads,
    *,
    fresh: bool,
    generator: torch.Generator,
    progress: Progress | None = None,
) -> None:
    """Fits prior and corrections in place to the loads whose compute is known.

    Args:
        model: the network; one that is not fresh keeps its prior up to its scale.
        loads: the measurements.
        fresh: whether the network is untrained.
        generator: of initialisation and minibatches.
        progress: called with the steps done and all steps.
    """
    rows = known_rows(loads)
    if not len(rows):
        if fresh:
            model.known.zero_()
        return
    if fresh:
        prior, _ = fit_prior(loads, rows)
        install_prior(model, loads, rows, prior)
        model.reset(generator)
    else:
        _rescale(model, loads, rows)
    _fit_corrections(model, loads, rows, fresh=fresh, generator=generator, progress=progress)


def known_rows(loads: DeviceLoads) -> Tensor:
    """Loads with shards whose forward plus backward compute is known."""
    return torch.nonzero((loads.offsets.diff() > 0) & loads.compute_ms[:, 2].isfinite()).squeeze(1)


def directions(loads: DeviceLoads, rows: Tensor) -> FloatArray:
    """``R x 2``: forward and backward; where only the sum is known, backward is twice forward (TorchRec's planner)."""
    targets = loads.compute_ms[rows].double().numpy()
    return np.stack(
        [np.where(np.isfinite(y), y, targets[:, 2] * (1 + i) / 3) for i, y in enumerate(targets[:, :2].T)], axis=1
    )


def fit_prior(loads: DeviceLoads, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The physical prior, ``2 x (1 + P')``, by relative least squares, and the loads' quantities, ``R x P``."""
    quantities = load_quantities(loads.shard_features, loads.shard_hardware)
    sums = loads.sums(quantities)[rows]
    kernel = sums[:, :NUM_KERNEL_QUANTITIES].double().numpy()
    matrix = np.concatenate([np.ones((len(kernel), 1)), kernel], axis=1)
    prior = []
    for y in directions(loads, rows).T:
        weight = 1.0 / (y + max(0.01 * float(np.median(y)), 1e-9))
        prior.append(fit_nonnegative(matrix * weight[:, None], y * weight))
    return torch.tensor(np.stack(prior), dtype=torch.float32), sums


def install_prior(model: CostNetwork, loads: DeviceLoads, rows: Tensor, prior: Tensor) -> None:
    """Fits the normalisers and sets prior and units of an untrained network."""
    sums = loads.sums(load_quantities(loads.shard_features, loads.shard_hardware))[rows]
    model.shard_normalizer.fit(loads.shard_features)
    model.hardware_normalizer.fit(loads.load_hardware)
    model.load_normalizer.fit(torch.log(sums[:, CROWDED].clamp(min=1e-9)))
    model.set_prior(prior, sums.mean(dim=0))
    model.known.copy_((prior.sum(dim=1) > 0).float())


def _rescale(model: CostNetwork, loads: DeviceLoads, rows: Tensor) -> None:
    """Moves a trained network to the level of new measurements (other hardware, say)."""
    model.shard_normalizer.fit(loads.shard_features)
    model.hardware_normalizer.fit(loads.load_hardware)
    with torch.no_grad():
        latents = loads.sums(model.encode_shards(loads.shard_features, loads.shard_hardware))[rows]
        predicted = model.device_compute(latents, loads.load_hardware[rows])
    truth = torch.from_numpy(directions(loads, rows)).float()
    for direction in range(2):
        usable = (truth[:, direction] > 0) & (predicted[:, direction] > 0)
        if usable.any():
            factor = (truth[usable, direction] / predicted[usable, direction]).median()
            model.unit_ms[direction] *= factor
            model.prior[direction] *= factor


def _relative_error(out: Tensor, truth: Tensor, floor: Tensor) -> Tensor:
    """``R x M`` robust relative errors, mean over the known ones of forward, backward and sum."""
    out = torch.cat([out, out.sum(dim=-1, keepdim=True)], dim=-1)
    known = truth.isfinite()[:, None, :]
    error = torch.log((out + floor) / (truth.nan_to_num(1.0)[:, None, :] + floor))
    loss = functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=_HUBER)
    return (loss * known).sum(dim=-1) / known.sum(dim=-1)


def _fit_corrections(
    model: CostNetwork,
    loads: DeviceLoads,
    rows: Tensor,
    *,
    fresh: bool,
    generator: torch.Generator,
    progress: Progress | None,
) -> None:
    members = model.config.num_members
    held_out = folds(loads, members)[loads.measurement[rows]][:, None] == torch.arange(members)
    target = loads.compute_ms[rows]
    floor = _FLOOR * target[:, 2].median().clamp(min=1e-9)

    def errors(index: Tensor) -> Tensor:
        shards, placed, load = loads.select(rows[index])
        encoded = model.encode_shards(loads.shard_features[shards], loads.shard_hardware[shards])
        latents = encoded.new_zeros(len(index), model.latent_dim).index_add(0, load, encoded[placed])
        return _relative_error(model.member_compute(latents), target[index], floor)

    train_members(
        model,
        errors,
        held_out=held_out,
        weight=importance(target[:, 2]),
        fresh=fresh,
        generator=generator,
        progress=progress,
    )


def importance(cost_ms: Tensor) -> Tensor:
    """Weights of rows in the loss: what matters most are the loads that can be the slowest of a step."""
    return (cost_ms / cost_ms.median().clamp(min=1e-9)).clamp(0.05, 20.0).sqrt()


def train_members(
    model: CostNetwork,
    errors: Callable[[Tensor], Tensor],
    *,
    held_out: Tensor,
    weight: Tensor,
    fresh: bool,
    generator: torch.Generator,
    progress: Progress | None,
) -> None:
    """Gradient descent on each member's own training rows; keeps what was best on the rows that it holds out.

    Args:
        model: the network.
        errors: ``I`` rows to ``I x M`` errors.
        held_out: ``R x M`` bool.
        weight: ``R``, of each row.
        fresh: whether the members are untrained; others get smaller and fewer steps.
        generator: of the minibatches.
        progress: called with the steps done and all steps.
    """
    config = model.config
    everything = torch.arange(len(weight))
    head = [p for name, p in model.named_parameters() if not name.startswith(("encoder", "exchange"))]
    parameters = [*model.encoder.parameters(), *head]
    optimizer = torch.optim.Adam([{"params": list(model.encoder.parameters())}, {"params": head}])
    peak = config.learning_rate * (1.0 if fresh else 0.3)
    # More rows than one batch carry more detail, which takes longer to learn.
    steps = math.ceil(config.num_steps * min(max(len(weight) / config.batch_size, 1.0), _MAX_STEPS_FACTOR))
    steps = steps if fresh else math.ceil(steps / 3)
    best = torch.full((config.num_members,), math.inf)
    best_state = [p.detach().clone() for p in parameters]
    for step in range(steps + 1):
        if step % _CHECK_EVERY == 0 or step == steps:
            with torch.no_grad():
                score = (errors(everything) * weight[:, None] * held_out).sum(dim=0)
                better = score <= best
                best = torch.where(better, score, best)
                for kept, p in zip(best_state, parameters, strict=True):
                    member_axis = 1 if p is model.mixing else 0
                    kept.movedim(member_axis, 0)[better] = p.movedim(member_axis, 0)[better]
        if step == steps:
            break
        rate = peak * 0.5 * (1 + math.cos(math.pi * step / steps)) * min(1.0, (step + 1) / 20)
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rate, rate * _HEAD_SPEED
        index = everything
        if len(everything) > config.batch_size:
            index = torch.randint(len(everything), (config.batch_size,), generator=generator)
        trained = ~held_out[index] * weight[index, None]
        loss = (errors(index) * trained).sum() / trained.sum().clamp(min=1e-9) * config.num_members
        loss = loss + _GROWTH_PENALTY * (model.growth**2).sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        if progress is not None:
            progress(step + 1, steps)
    with torch.no_grad():
        for kept, p in zip(best_state, parameters, strict=True):
            p.copy_(kept)


def held_out_predictions(model: CostNetwork, loads: DeviceLoads) -> HeldOut:
    """What the fitted members say about the loads that they did not train on."""
    members = model.config.num_members
    fold = folds(loads, members)[loads.measurement]
    rows = known_rows(loads)
    with torch.no_grad():
        latents = loads.sums(model.encode_shards(loads.shard_features, loads.shard_hardware))
        compute = model.member_compute(latents)[torch.arange(loads.num_loads), fold]
        prior_ms = model.prior_compute(latents)
        for index in range(members):
            seen = rows[fold[rows] != index]
            if len(seen):
                prior, _ = fit_prior(loads, seen)
                mine = fold == index
                occupied = (latents[mine, :1] > 0).float()
                prior_ms[mine] = latents[mine, :NUM_KERNEL_QUANTITIES] @ prior[:, 1:].T + prior[:, 0] * occupied
    judged = torch.zeros(loads.num_loads, dtype=torch.bool)
    judged[rows] = True
    return HeldOut(compute, prior_ms, judged)


def calibrate_spread(model: CostNetwork, loads: DeviceLoads, held_out: HeldOut) -> None:
    """Sets what the members' spread and the noise weigh: 68 % of the held-out truths lie within one deviation."""
    rows = torch.nonzero(held_out.judged).squeeze(1)
    if len(rows) < 2 * model.config.num_members:
        return
    truth = loads.compute_ms[rows, 2]
    with torch.no_grad():
        latents = loads.sums(model.encode_shards(loads.shard_features, loads.shard_hardware))[rows]
        total = model.member_compute(latents).sum(dim=-1)
    size = total.mean(dim=1).clamp(min=1e-9)
    spread = total.std(dim=1, correction=0) / size
    error = (held_out.compute_ms[rows].sum(dim=1) - truth).abs() / size
    # Robust scale: squared errors are cut at three times their 68 % quantile.
    cut = error.clamp(max=3 * float(error.quantile(0.68)) + 1e-9)
    matrix = torch.stack([spread**2, torch.ones_like(spread)], dim=1).double().numpy()
    weights = fit_nonnegative(matrix, (cut**2).double().numpy())
    deviation = torch.from_numpy(np.sqrt(matrix @ weights)).float().clamp(min=1e-9)
    inflation = (error / deviation).quantile(0.68)
    model.spread.copy_(torch.from_numpy(np.sqrt(weights)).float() * inflation)
