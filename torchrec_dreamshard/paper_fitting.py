"""Fits the paper's cost network as the paper does: mean squared error, Adam, minibatches, no held-out split."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from torchrec_dreamshard.features import batch_tasks, placement_latents
from torchrec_dreamshard.loads import DeviceLoads
from torchrec_dreamshard.measurement import Measurement
from torchrec_dreamshard.paper_cost_network import PaperCostNetwork, paper_features


def fit_paper(
    model: PaperCostNetwork,
    measurements: Sequence[Measurement],
    loads: DeviceLoads,
    *,
    seed: int,
    fresh: bool,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Trains ``model`` in place on all four costs of Algorithm 1, each where it is known.

    Args:
        model: the network.
        measurements: B measurements with costs.
        loads: the same as tensors.
        seed: of initialisation and minibatches.
        fresh: whether to draw the weights anew and to fit the normaliser.
        progress: called after each step.
    """
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    if fresh:
        model.normalizer.fit(paper_features(loads.shard_features))
        model.reset(generator)
        known_step = loads.step_ms[loads.step_ms.isfinite()]
        reference = known_step if len(known_step) else loads.compute_ms[:, 2].nan_to_num(0.0)
        model.cost_scale.copy_(reference.mean().clamp(min=1e-6))
        model.has_overall.fill_(float(len(known_step) > 0))
    tasks = batch_tasks([m.task for m in measurements])
    placements = torch.zeros(tasks.shard_mask.shape, dtype=torch.int64)
    placements[tasks.shard_mask] = torch.tensor([d for m in measurements for d in m.placement], dtype=torch.int64)
    targets = loads.by_measurement(torch.cat([loads.compute_ms, loads.comms_ms[:, 1:]], dim=1).nan_to_num(-1.0))
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=config.learning_rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-3, total_iters=max(config.num_steps, 1))
    num_devices = tasks.host.shape[1]
    for step in range(config.num_steps):
        rows = torch.randint(len(measurements), (min(config.batch_size, len(measurements)),), generator=generator)
        batch = type(tasks)(*(tensor[rows] for tensor in tasks))
        latents = placement_latents(model.encode(batch), placements[rows], num_devices)
        out = model.predict(latents, batch)
        both = out.forward_compute_ms + out.backward_compute_ms
        stacked = torch.stack([out.forward_compute_ms, out.backward_compute_ms, both, out.backward_comms_ms], dim=-1)
        truth = targets[rows]
        known = (truth >= 0) & batch.device_mask[..., None]
        # The sum is a target only where the directions are not known apart.
        known[..., 2] &= ~(known[..., 0] & known[..., 1])
        loss = (((stacked - truth) / model.cost_scale) ** 2 * known).sum() / known.sum().clamp(min=1)
        overall = loads.step_ms[rows]
        error = ((out.step_ms - overall.nan_to_num(0.0)) / model.cost_scale) ** 2 * overall.isfinite()
        loss = loss + error.mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, config.num_steps)
