"""Statistics and the markdown report of plan_quality.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

NUM_RESAMPLES = 2000


def ratio_interval(costs: FloatArray, reference: FloatArray, seed: int = 0) -> tuple[float, float, float]:
    """Geometric mean of paired ratios with a 95 % bootstrap interval over tasks.

    Args:
        costs: steps of the tasks, NaN where the strategy failed.
        reference: steps of the same tasks.
        seed: of the resampling.

    Returns:
        Mean, lower and upper bound; NaN if no task was placed.
    """
    logs = np.log(costs / reference)
    logs = logs[np.isfinite(logs)]
    if not len(logs):
        return (float("nan"),) * 3
    resampled = np.random.default_rng(seed).choice(logs, (NUM_RESAMPLES, len(logs))).mean(axis=1)
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high))


def summarise(family: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per strategy of a family's record, cheapest first."""
    steps = {name: np.array(run["step_ms"], dtype=np.float64) for name, run in family["strategies"].items()}
    best_known = np.array(family["best_known_ms"], dtype=np.float64)
    heuristic = steps[family["best_heuristic"]]
    rows = []
    for name, costs in steps.items():
        times = family["strategies"][name]["place_ms"]
        rows.append(
            {
                "strategy": name,
                "mean_ms": float(np.nanmean(costs)) if np.isfinite(costs).any() else float("nan"),
                "std_ms": float(np.nanstd(costs)) if np.isfinite(costs).any() else float("nan"),
                "to_best_known": ratio_interval(costs, best_known),
                "to_best_heuristic": ratio_interval(costs, heuristic),
                "feasible": int(np.isfinite(costs).sum()),
                "tasks": len(costs),
                "place_ms": float(np.mean(times)),
            }
        )
    return sorted(rows, key=lambda row: (row["tasks"] - row["feasible"], row["to_best_known"][0]))


def family_table(family: Mapping[str, Any]) -> str:
    """A markdown table of one family."""
    lines = [
        f"### {family['family']} on {family['judge']}",
        "",
        f"{family['num_tasks']} test tasks, {family['num_measurements']} measured placements for whatever is trained, "
        f"trained on {family['trained_on']}{_times(family['train_s'])}, "
        f"seed {family['seed']}. Best known is {_mean_gap(family)} above a lower bound. "
        f"Best heuristic: {family['best_heuristic']}.",
        "",
        "| strategy | step ms (mean ± std over tasks) | / best known (95 % CI) | / best heuristic (95 % CI) | placed "
        "| ms per task |",
        "|---|---|---|---|---|---|",
    ]
    for row in summarise(family):
        ratios = " | ".join(
            "{:.3f} ({:.3f} to {:.3f})".format(*row[key]) for key in ("to_best_known", "to_best_heuristic")
        )
        lines.append(
            f"| {row['strategy']} | {row['mean_ms']:.3f} ± {row['std_ms']:.3f} | {ratios} "
            f"| {row['feasible']}/{row['tasks']} | {row['place_ms']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def overview_table(families: Sequence[Mapping[str, Any]]) -> str:
    """Ratio to the best known of every strategy (rows) and family (columns)."""
    names = sorted({name for family in families for name in family["strategies"]})
    values = {(row["strategy"], i): row["to_best_known"][0] for i, f in enumerate(families) for row in summarise(f)}

    def key(name: str) -> float:
        return float(np.nanmean([values.get((name, i), np.nan) for i in range(len(families))]))

    lines = [
        "| step / best known | " + " | ".join(f"{f['family']}, {f['judge']}" for f in families) + " |",
        "|---" * (len(families) + 1) + "|",
    ]
    for name in sorted(names, key=key):
        cells = [f"{values[name, i]:.3f}" if (name, i) in values else "" for i in range(len(families))]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def report(families: Sequence[Mapping[str, Any]], setup: str) -> str:
    """The whole markdown report."""
    parts = [
        "# Plan quality",
        "",
        setup,
        "",
        "Every plan is judged by the profiler, never by a cost network. Ratios are paired by task: geometric means, "
        "intervals by bootstrap over tasks. *Best known* is the cheapest of a long search on the true cost and all "
        "strategies that place whole tables.",
        "",
        overview_table(families),
        *(family_table(family) for family in families),
    ]
    return "\n".join(parts)


def _times(seconds: Mapping[str, float]) -> str:
    listed = ", ".join(f"{name} {value:.0f} s" for name, value in seconds.items())
    return f" ({listed})" if listed else ""


def _mean_gap(family: Mapping[str, Any]) -> str:
    bound = family.get("lower_bound_ms")
    if not bound:
        return "an unknown amount"
    ratio = ratio_interval(np.array(family["best_known_ms"]), np.array(bound))[0]
    return f"{100 * (ratio - 1):.1f} %"
