"""Fits the exchange of ``CostNetwork``, and the step where a source knows it but not all of its terms.

Known exchange terms give non-negative least squares over ``exchange_features`` and a small correction that has to
prove itself on held-out tasks. A step alone is the cost of its slowest device: which one that is follows from the
current coefficients, so that fitting and choosing alternate.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from torchrec_dreamshard.compute_fitting import folds, importance, install_prior, train_members
from torchrec_dreamshard.cost_network import CostNetwork
from torchrec_dreamshard.exchange import EXCHANGE_FEATURES, NEAR_AND_FAR, OWN, PEERS, SKEW, exchange_features
from torchrec_dreamshard.loads import DeviceLoads
from torchrec_dreamshard.measurement import FloatArray
from torchrec_dreamshard.physics import LOAD_INDEX, NUM_KERNEL_QUANTITIES, fit_nonnegative, load_quantities

_CORRECTION_STEPS = 300
_MIN_ROWS = 60  # fewer known exchanges do not carry a correction
_ROUNDS = 12


def output_values(loads: DeviceLoads) -> Tensor:
    """``B x D``: millions of output values per device."""
    sums = loads.sums(load_quantities(loads.shard_features, loads.shard_hardware))
    return loads.by_measurement(sums[:, LOAD_INDEX["output_values"]])


def drop_ambiguous(features: FloatArray) -> FloatArray:
    """Without what one number of devices cannot tell apart, ``... x E``; such columns become 0.

    Peers look like a constant there, and a device's own outputs like what it sends. Shared among the twins, the cost
    would grow wrongly with the number of devices: latency is kept as a constant, and volume as what is sent.
    """
    peers = features[..., PEERS]
    if len(np.unique(peers[peers > 0])) > 1:
        return features
    kept: FloatArray = features.copy()
    kept[..., [PEERS, OWN]] = 0.0
    return kept


def load_exchange_features(loads: DeviceLoads, forward_ms: Tensor) -> Tensor:
    """``N x E`` features of each load's exchange; ``forward_ms`` are the N forward kernels."""
    features = exchange_features(output_values(loads), loads.by_measurement(forward_ms), loads.tasks)
    return features[loads.measurement, loads.device]


def single_devices(loads: DeviceLoads) -> bool:
    """Whether nothing was measured on more than one device, so that no exchange could take place."""
    return loads.tasks.host.shape[1] == 1


def fit_exchange(
    model: CostNetwork, loads: DeviceLoads, forward_ms: Tensor, generator: torch.Generator, *, fresh: bool
) -> Tensor:
    """Fits the exchange in place where exchange terms are known.

    Args:
        model: the network.
        loads: the measurements.
        forward_ms: ``N``, forward kernels (measured where known), whose differences are the start skew.
        generator: of the correction's initialisation.
        fresh: whether the network is untrained; bandwidths then price what could not be measured.

    Returns:
        ``N x 2`` predictions of the held-out fold by coefficients that did not see it, NaN elsewhere.
    """
    exchange = model.exchange
    if fresh and single_devices(loads):
        exchange.assume_bandwidths()
    features = load_exchange_features(loads, forward_ms)
    held_out = folds(loads, model.config.num_members)[loads.measurement] == 0
    predictions = torch.full_like(loads.comms_ms, torch.nan)
    known = loads.comms_ms.isfinite() & (features.sum(dim=1, keepdim=True) > 0)
    if not known.any():
        return predictions
    all_data, training = exchange.coefficients.clone(), exchange.coefficients.clone()
    for direction in range(2):
        rows = known[:, direction]
        if rows.any():
            all_data[direction] = _fit_direction(features[rows], loads.comms_ms[rows, direction])
            seen = rows & ~held_out
            training[direction] = (
                _fit_direction(features[seen], loads.comms_ms[seen, direction]) if seen.any() else all_data[direction]
            )
    exchange.coefficients.copy_(training)
    exchange.corrected.zero_()
    if int(known.any(dim=1).sum()) >= _MIN_ROWS:
        _fit_correction(model, loads, features, known, held_out, generator)
    with torch.no_grad():
        judged = known & held_out[:, None]
        predictions[judged] = exchange.from_features(features)[judged]
    exchange.coefficients.copy_(all_data)
    return predictions


def _fit_direction(features: Tensor, truth: Tensor) -> Tensor:
    matrix, y = drop_ambiguous(features.double().numpy()), truth.double().numpy()
    weight = 1.0 / (y + max(0.1 * float(np.median(y)), 1e-9))
    coefficients = fit_nonnegative(matrix * weight[:, None], y * weight)
    if coefficients[SKEW] > 1:  # nobody waits longer than for the slowest
        rest = y - matrix[:, SKEW]
        others = matrix.copy()
        others[:, SKEW] = 0.0
        coefficients = fit_nonnegative(others * weight[:, None], rest * weight)
        coefficients[SKEW] = 1.0
    # Links never seen in use are as efficient, for their bandwidth, as their twins inside a host.
    for near, far in NEAR_AND_FAR:
        if not matrix[:, far].any():
            coefficients[far] = coefficients[near]
    return torch.from_numpy(coefficients).float()


def _fit_correction(
    model: CostNetwork,
    loads: DeviceLoads,
    features: Tensor,
    known: Tensor,
    held_out: Tensor,
    generator: torch.Generator,
) -> None:
    """Trains the correction on the folds that ``held_out`` leaves, and switches it on where it helps there."""
    exchange = model.exchange
    used = known.any(dim=1)
    x, held_out, known = features[used], held_out[used], known[used]
    truth = torch.where(known, loads.comms_ms[used], 1.0)
    floor = 0.05 * torch.stack(
        [truth[known[:, i], i].median() if known[:, i].any() else truth.new_tensor(1.0) for i in (0, 1)]
    )

    def errors() -> Tensor:
        error = torch.log((exchange.from_features(x) + floor + 1e-9) / (truth + floor + 1e-9))
        return functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=0.3) * known

    with torch.no_grad():
        before = (errors() * held_out[:, None]).sum(dim=0)
    exchange.normalizer.fit(exchange.inputs(x))
    exchange.reset(generator)
    exchange.corrected.fill_(1.0)
    optimizer = torch.optim.Adam(exchange.parameters(), weight_decay=1e-4)
    for step in range(_CORRECTION_STEPS):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / _CORRECTION_STEPS)
        loss = (errors() * ~held_out[:, None]).sum() / (known & ~held_out[:, None]).sum().clamp(min=1)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    with torch.no_grad():
        after = (errors() * held_out[:, None]).sum(dim=0)
    exchange.corrected.copy_((after < 0.95 * before).float())


def fit_step(model: CostNetwork, loads: DeviceLoads, generator: torch.Generator, *, fresh: bool) -> None:
    """Learns from steps what the terms do not tell, in place.

    With all terms known, only a factor and an offset between their slowest sum and the step remain. Without
    exchange terms the steps give the exchange, without compute also (or only) the kernels.
    """
    known = loads.step_ms.isfinite()
    has_compute, has_comms = bool(loads.compute_ms[:, 2].isfinite().any()), bool(loads.comms_ms.isfinite().any())
    if not known.any():
        return
    if has_compute and has_comms:
        _fit_affine(model, loads)
        return
    if not has_compute:
        _fit_compute_to_steps(model, loads, with_exchange=not has_comms, generator=generator, fresh=fresh)
    elif not has_comms:
        _fit_exchange_to_steps(model, loads)


def _fit_affine(model: CostNetwork, loads: DeviceLoads) -> None:
    device_ms = loads.compute_ms[:, 2] + loads.comms_ms.sum(dim=1)
    slowest = loads.by_measurement(device_ms).amax(dim=1)
    no_background = loads.tasks.background_ms.amax(dim=1) == 0
    rows = loads.step_ms.isfinite() & slowest.isfinite() & no_background & (loads.step_ms > 0)
    model.step_fit.copy_(torch.tensor([1.0, 0.0]))
    if int(rows.sum()) < 8:
        return
    x, y = slowest[rows].double().numpy(), loads.step_ms[rows].double().numpy()
    if np.median(np.abs(x / y - 1)) > 0.01:
        matrix = np.stack([x, np.ones_like(x)], axis=1)
        model.step_fit.copy_(torch.from_numpy(fit_nonnegative(matrix / y[:, None], np.ones_like(y))).float())


def bottleneck_fit(design: FloatArray, fixed: FloatArray, step_ms: FloatArray, start: FloatArray) -> FloatArray:
    """Non-negative coefficients such that the slowest device's cost is the step.

    Args:
        design: ``B x D x E``.
        fixed: ``B x D``, known part of each device's cost; -inf for padding.
        step_ms: ``B``.
        start: ``E`` first coefficients.
    """
    rows = np.arange(len(step_ms))
    coefficients, best, best_error = start, start, np.inf
    for _ in range(_ROUNDS):
        cost = design @ coefficients + fixed
        error = float(np.abs(cost.max(axis=1) / step_ms - 1).mean())
        if error < best_error:
            best, best_error = coefficients, error
        slowest = cost.argmax(axis=1)
        rest = np.maximum(step_ms - fixed[rows, slowest], 0.0)
        coefficients = fit_nonnegative(design[rows, slowest] / step_ms[:, None], rest / step_ms)
    return best


def _padded(model: CostNetwork, loads: DeviceLoads, values: Tensor) -> FloatArray:
    """Loads' ``N`` known costs with the background as ``B x D``, -inf for padding."""
    total = loads.by_measurement(values) + loads.tasks.background_ms
    return total.masked_fill(~loads.tasks.device_mask, -torch.inf).double().numpy()


def _fit_exchange_to_steps(model: CostNetwork, loads: DeviceLoads) -> None:
    with torch.no_grad():
        latents = loads.sums(model.encode_shards(loads.shard_features, loads.shard_hardware))
        compute = model.device_compute(latents, loads.load_hardware)
    measured = loads.compute_ms[:, 2]
    features = exchange_features(output_values(loads), loads.by_measurement(compute[:, 0]), loads.tasks)
    rows = (loads.step_ms.isfinite() & (loads.step_ms > 0)).numpy()
    if not rows.any():
        return
    fixed = _padded(model, loads, torch.where(measured.isfinite(), measured, compute.sum(dim=1)))
    coefficients = bottleneck_fit(
        drop_ambiguous(features.double().numpy()[rows]),
        fixed[rows],
        loads.step_ms.double().numpy()[rows],
        np.ones(len(EXCHANGE_FEATURES)),
    )
    model.exchange.coefficients.copy_(torch.from_numpy(coefficients).float() / 2)
    model.exchange.coefficients[:, SKEW].clamp_(max=0.5)


def _fit_compute_to_steps(
    model: CostNetwork, loads: DeviceLoads, *, with_exchange: bool, generator: torch.Generator, fresh: bool
) -> None:
    members = model.config.num_members
    known = torch.nonzero(loads.step_ms.isfinite() & (loads.step_ms > 0)).squeeze(1)
    if not len(known):
        return
    sums = loads.sums(load_quantities(loads.shard_features, loads.shard_hardware))
    values = output_values(loads)
    if fresh:
        occupied = (sums[:, :1] > 0).float()
        kernel = torch.cat([occupied, sums[:, :NUM_KERNEL_QUANTITIES]], dim=1)
        # Without the skew: the kernels whose ends it compares are only now being found.
        exchange = exchange_features(values, torch.zeros_like(values), loads.tasks) * float(with_exchange)
        own = loads.by_measurement(kernel)[known].double().numpy()
        design = np.concatenate([own, drop_ambiguous(exchange[known].double().numpy())], axis=-1)
        fixed = _padded(model, loads, loads.comms_ms.sum(dim=1).nan_to_num(0.0))[known.numpy()]
        start = np.ones(design.shape[-1])
        coefficients = bottleneck_fit(design, fixed, loads.step_ms[known].double().numpy(), start)
        prior = torch.from_numpy(coefficients[: 1 + NUM_KERNEL_QUANTITIES]).float()
        rows = torch.nonzero(loads.offsets.diff() > 0).squeeze(1)
        install_prior(model, loads, rows, torch.stack([prior / 3, 2 * prior / 3]))
        model.reset(generator)
        if with_exchange:
            rest = torch.from_numpy(coefficients[1 + NUM_KERNEL_QUANTITIES :]).float()
            model.exchange.coefficients.copy_(rest / 2)
    held_out = folds(loads, members)[known][:, None] == torch.arange(members)
    train_members(
        model,
        _step_errors(model, loads, known, values),
        held_out=held_out,
        weight=importance(loads.step_ms[known]),
        fresh=fresh,
        generator=generator,
        progress=None,
    )


def _step_errors(model: CostNetwork, loads: DeviceLoads, known: Tensor, values: Tensor) -> Callable[[Tensor], Tensor]:
    """``I`` rows of ``known`` to the members' ``I x M`` errors of the step, through the max over devices."""

    def errors(index: Tensor) -> Tensor:
        chosen = known[index]
        encoded = model.encode_shards(loads.shard_features, loads.shard_hardware)
        compute = loads.by_measurement(model.member_compute(loads.sums(encoded)))[chosen].movedim(2, 1)
        tasks = type(loads.tasks)(*(tensor[chosen] for tensor in loads.tasks))
        outputs = values[chosen][:, None, :].expand(compute.shape[:-1])
        device_ms = compute.sum(dim=-1) + model.exchange(outputs, compute[..., 0], tasks).sum(dim=-1)
        device_ms = device_ms + tasks.background_ms[:, None, :]
        step = device_ms.masked_fill(~tasks.device_mask[:, None, :], 0.0).amax(dim=-1)
        error = torch.log(step.clamp(min=1e-9) / loads.step_ms[chosen][:, None])
        return functional.huber_loss(error, torch.zeros_like(error), reduction="none", delta=0.3)

    return errors
