"""What the cost-model benchmarks share: forms to compare, errors on held-out measurements, tables with spread.

Both forms are trained on the same rows. The paper's form gets a global normaliser (the authors' code normalises per
task, which is worse), and its 3,000 steps of batches of 64.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchrec_dreamshard import Measurement
from torchrec_dreamshard.config import CostConfig
from torchrec_dreamshard.cost_model import CostModel
from torchrec_dreamshard.features import batch_tasks, placement_latents
from torchrec_dreamshard.fitting import fit_cost_model, rank_correlation

TERM_NAMES = ("forward_compute_ms", "backward_compute_ms", "forward_comms_ms", "backward_comms_ms", "step_ms")


def forms(quick: bool = False) -> dict[str, CostConfig]:
    """The default and the paper's form."""
    paper_steps = 1_000 if quick else 3_000
    return {
        "default": CostConfig(),
        "paper": CostConfig(form="paper", num_steps=paper_steps, batch_size=64, learning_rate=1e-3),
    }


@dataclass(frozen=True)
class Errors:
    """Errors of one set of predictions."""

    mse: float
    mape: float
    rank: float
    weighted: float
    """Sum of absolute errors over the sum of truths."""
    ratio: float
    """Mean of predicted over true."""

    @classmethod
    def of(cls, predicted: np.ndarray, truth: np.ndarray) -> Errors:
        """From predictions and truths of the same length."""
        positive = truth > 1e-9
        share = predicted[positive] / truth[positive]
        return cls(
            mse=float(((predicted - truth) ** 2).mean()),
            mape=float(np.abs(share - 1).mean()),
            rank=rank_correlation(predicted, truth),
            weighted=float(np.abs(predicted - truth).sum() / truth.sum()),
            ratio=float(share.mean()),
        )


@torch.no_grad()
def predictions(model: CostModel, measurements: Sequence[Measurement], chunk: int = 500) -> dict[str, np.ndarray]:
    """Predictions by term, one value per device (``step_ms``: per measurement), and ``compute_std``."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in (*TERM_NAMES, "compute_ms", "compute_std")}
    for start in range(0, len(measurements), chunk):
        some = measurements[start : start + chunk]
        tasks = batch_tasks([m.task for m in some])
        placements = torch.zeros(tasks.shard_mask.shape, dtype=torch.int64)
        for row, m in enumerate(some):
            placements[row, : len(m.placement)] = torch.tensor(m.placement, dtype=torch.int64)
        latents = placement_latents(model.encode(tasks), placements, tasks.host.shape[1])
        out = model.predict(latents, tasks)._asdict()
        out["compute_ms"] = out["forward_compute_ms"] + out["backward_compute_ms"]
        out["compute_std"] = model.compute_std(latents, tasks.hardware[:, None, :])
        for name, values in parts.items():
            values.append((out[name] if name == "step_ms" else out[name][tasks.device_mask]).double().numpy())
    return {name: np.concatenate(values) for name, values in parts.items()}


def truths(measurements: Sequence[Measurement], name: str) -> np.ndarray:
    """Measured values of a term in the order of ``predictions``; NaN where unknown."""
    values = []
    for m in measurements:
        assert m.cost is not None
        value = getattr(m.cost, name)
        size = 1 if name == "step_ms" else m.task.num_devices
        values.append(np.full(size, np.nan) if value is None else np.reshape(value, size))
    return np.concatenate(values)


def term_errors(model: CostModel, measurements: Sequence[Measurement]) -> dict[str, Errors]:
    """Errors by term, where the truth is known; loads of empty devices count for no compute term."""
    predicted = predictions(model, measurements)
    errors = {}
    for name in (*TERM_NAMES, "compute_ms"):
        truth = truths(measurements, name)
        known = np.isfinite(truth)
        if "compute" in name:
            known &= truth > 0
        if (truth[known] > 0).any():
            errors[name] = Errors.of(predicted[name][known], truth[known])
    return errors


def inside_90(model: CostModel, measurements: Sequence[Measurement]) -> float:
    """Share of the held-out compute costs inside the stated 90 % interval."""
    predicted, truth = predictions(model, measurements), truths(measurements, "compute_ms")
    known = np.isfinite(truth) & (truth > 0)
    return float((np.abs(predicted["compute_ms"] - truth)[known] <= 1.645 * predicted["compute_std"][known]).mean())


def timed_fit(
    measurements: Sequence[Measurement], config: CostConfig, seed: int, model: CostModel | None = None
) -> tuple[CostModel, float]:
    """A fitted model and the CPU seconds that it took."""
    start = time.process_time()
    fitted, _ = fit_cost_model(measurements, config, seed=seed, model=model)
    return fitted, time.process_time() - start


def split(
    measurements: Sequence[Measurement], seed: int, share: float = 0.8
) -> tuple[list[Measurement], list[Measurement]]:
    """A random share of the rows for training and the rest for testing."""
    order = np.random.default_rng(seed).permutation(len(measurements))
    cut = round(share * len(order))
    return [measurements[i] for i in order[:cut]], [measurements[i] for i in order[cut:]]


def with_spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean and standard deviation over seeds; of a single seed its value alone."""
    mean, std = float(np.mean(values)), float(np.std(values))
    if not math.isfinite(mean):
        return ""
    places = max(0, digits - 1 - math.floor(math.log10(abs(mean)))) if mean else digits
    shown = f"{mean:.{min(places, digits)}f}"
    return shown if len(values) == 1 else f"{shown} ± {std:.{min(places, digits)}f}"
