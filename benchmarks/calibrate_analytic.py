"""How well the analytic models fit published timings.

    python benchmarks/calibrate_analytic.py [--json]

Counted are all points that today's kernels can be compared with; the target is within 20 % each and 10 % in the
geometric mean of the ratios. Printed beside them, not counted: the older V100 backward kernels, the published PCIe
exchange fit, measured CPU kernels and exchanges, and shapes of published cost networks of an unnamed GPU.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
from public_rows import DATA, load_comms_rows, load_compute_rows

from torchrec_dreamshard import PlacementTask, ShardSpec
from torchrec_dreamshard.hardware import HARDWARE, named_hardware
from torchrec_dreamshard.pool import POOL_BATCH_SIZE, load_public_pool, with_dim
from torchrec_dreamshard.profiling.analytic import AnalyticProfiler
from torchrec_dreamshard.profiling.kernel_model import kernel_constants, shard_loads, smooth_max
from torchrec_dreamshard.reuse import power_law_histogram

GPUS = ("v100", "a100", "h100", "h200")
DIMS = (4, 8, 16, 32, 64, 128)
KERNEL_OF_PLACEMENT = {"hbm": "fused", "uvm": "fused_uvm", "uvm_with_hbm_lru_cache": "fused_uvm_caching"}


@dataclass(frozen=True)
class Point:
    """A published time beside the model's, both in ms."""

    group: str
    label: str
    measured_ms: float
    predicted_ms: float
    counted: bool = True

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_ms / self.measured_ms


@cache
def reference() -> dict[str, Any]:
    """The published points."""
    values: dict[str, Any] = json.loads((DATA / "gpu_reference_points.json").read_text())
    return values


def compute_terms(shards: list[ShardSpec], hardware: str) -> tuple[float, float]:
    """Forward and backward ms of one fused kernel."""
    task = PlacementTask.uniform(shards, 1, hbm_bytes=2**50, ddr_bytes=2**50, hardware=HARDWARE[hardware])
    cost = AnalyticProfiler(hardware).measure(task, [0] * len(shards))
    assert cost.forward_compute_ms is not None and cost.backward_compute_ms is not None
    return float(cost.forward_compute_ms[0]), float(cost.backward_compute_ms[0])


def compute_ms(shards: list[ShardSpec], hardware: str) -> float:
    """Forward plus backward ms of one fused kernel."""
    return sum(compute_terms(shards, hardware))


def h100_points() -> list[Point]:
    """FBGEMM's fused op on one H100: tables in HBM, behind a cache, in host memory; SGD and Adam."""
    block = reference()["h100_fused_lookup"]
    points = []
    for row in block["rows"]:
        shard = ShardSpec(
            rows=row["rows_per_table"],
            dim=block["dim"],
            pooling_factor=block["ids_per_sample_and_table"],
            batch_size=block["batch_per_table"],
            reuse_histogram=power_law_histogram(row["rows_per_table"], block["batch_per_table"], 1.05),
            optimizer=row["optimizer"],
            kernel=KERNEL_OF_PLACEMENT[row["fbgemm_placement"]],
            cache_load_factor=row["cache_footprint_ratio"],
            is_pooled=False,
        )
        label = f"{row['optimizer']} {row['fbgemm_placement']} {row['cache_footprint_ratio'] or ''}".strip()
        times = compute_terms([shard] * block["num_tables"], "h100")
        for direction, predicted in zip(("forward", "backward"), times, strict=True):
            points.append(Point("h100", f"{label} {direction}", row[f"fbgemm_{direction}_ms"], predicted))
    return points


def v100_points() -> list[Point]:
    """Kernels and whole calls on a V100. Its backward kernels do not sort, so they are not counted."""
    block = reference()["v100_kernels"]
    constants = kernel_constants(HARDWARE["v100"])
    points = []
    for row in (dict(zip(block["columns"], values, strict=True)) for values in block["rows"]):
        shard = ShardSpec(
            rows=row["rows_per_table"], dim=row["dim"], pooling_factor=row["ids_per_bag"], batch_size=row["batch"]
        )
        shards = [shard] * row["tables"]
        label = f"{row['variant']} L={row['ids_per_bag']} D={row['dim']}"
        forward_ms, backward_ms = compute_terms(shards, "v100")
        if row["variant"].startswith("forward"):
            loads = shard_loads(shards, HARDWARE["v100"])
            kernel_ms = smooth_max(loads.forward.sum(), loads.forward_serial.max(), constants.serial_power)
            points.append(Point("v100 kernel", label, row["kernel_us"] / 1e3, float(kernel_ms)))
            points.append(Point("v100 call", label, row["op_us"] / 1e3, forward_ms))
        else:
            points.append(Point("v100 older kernel", label, row["kernel_us"] / 1e3, backward_ms, counted=False))
    return points


def exchange_points() -> list[Point]:
    """The published fit of a 4-GPU exchange over PCIe, at balanced and skewed column sums."""
    points = []
    profiler = AnalyticProfiler(named_hardware("a100", intra_host="pcie"))
    for columns in ((64,) * 4, (256,) * 4, (512,) * 4, (512, 256, 256, 256), (768, 256, 128, 128)):
        shards = [ShardSpec(rows=1, dim=dim, pooling_factor=0, batch_size=POOL_BATCH_SIZE) for dim in columns]
        cost = profiler.measure(PlacementTask.uniform(shards, 4), range(4))
        assert cost.backward_comms_ms is not None
        published = 0.20 + 0.0080 * sum(columns) + 0.0131 * max(columns)
        points.append(Point("pcie exchange fit", str(columns), published, float(cost.backward_comms_ms[0]), False))
    return points


def cpu_ratios(limit: int) -> dict[str, list[float]]:
    """Predicted over measured on the CPU rows: 10th percentile, median and 90th percentile."""
    profiler = AnalyticProfiler("cpu")
    result = {}
    for workers in (4, 8):
        compute = load_compute_rows(workers, limit)
        ratios = [profiler.measure(m.task, m.placement).compute_ms[0] / m.cost.compute_ms[0] for m in compute]
        result[f"kernels, {workers} processes"] = np.percentile(ratios, [10, 50, 90]).tolist()
        ratios = []
        for m in load_comms_rows(workers, limit):
            predicted = profiler.measure(m.task, m.placement).backward_comms_ms.max()
            ratios.append(predicted / m.cost.backward_comms_ms.max())
        result[f"exchange, {workers} processes"] = np.percentile(ratios, [10, 50, 90]).tolist()
    return result


def shapes(hardware: str, trials: int = 40) -> dict[str, Any]:
    """Fusion gain and the worth of halving columns on the public pool, as published for a learned GPU model."""
    rng = np.random.default_rng(0)
    pool = load_public_pool()
    gains = {}
    every = []
    for size in (2, 5, 10, 15):
        values = []
        for _ in range(trials):
            shards = [with_dim(pool[i], int(rng.choice(DIMS))) for i in rng.choice(len(pool), size, replace=False)]
            values.append(sum(compute_ms([shard], hardware) for shard in shards) / compute_ms(shards, hardware))
        gains[f"{size}_tables"] = float(np.mean(values))
        every += values
    halves = {
        str(dim): float(
            np.mean(
                [
                    compute_ms([with_dim(table, dim // 2)], hardware) / compute_ms([with_dim(table, dim)], hardware)
                    for table in pool[:: len(pool) // trials]
                    if table.pooling_factor > 0
                ]
            )
        )
        for dim in (128, 64, 32)
    }
    return {
        "fusion_gain_sum_of_singles_over_fused": gains,
        "range_5_to_95_percent": np.percentile(every, [5, 95]).tolist(),
        "half_columns_over_whole_kernel_time": halves,
    }


def summary(points: list[Point]) -> dict[str, float]:
    """Geometric mean of the counted ratios and the largest deviations."""
    logs = np.log([point.ratio for point in points if point.counted])
    return {
        "points": len(logs),
        "geometric_mean_ratio": float(np.exp(logs.mean())),
        "geometric_mean_error": float(np.expm1(np.abs(logs).mean())),
        "lowest_ratio": float(np.exp(logs.min())),
        "highest_ratio": float(np.exp(logs.max())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=int, default=1000, help="CPU rows per file (default: 1000)")
    args = parser.parse_args()
    points = h100_points() + v100_points() + exchange_points()
    report = {
        "summary": summary(points),
        "cpu_predicted_over_measured_p10_p50_p90": cpu_ratios(args.rows),
        "shapes": {hardware: shapes(hardware) for hardware in GPUS},
    }
    if args.json:
        print(json.dumps({**report, "points": [{**asdict(p), "ratio": p.ratio} for p in points]}, indent=1))
        return
    print(f"{'group':18} {'point':48} {'published ms':>12} {'model ms':>10} {'ratio':>6}")
    for p in points:
        mark = "" if p.counted else "  (not counted)"
        print(f"{p.group:18} {p.label:48} {p.measured_ms:12.4f} {p.predicted_ms:10.4f} {p.ratio:6.2f}{mark}")
    print("\ncounted points:", {k: round(v, 3) for k, v in report["summary"].items()})
    print("\nCPU, model over measured (10th, 50th, 90th percentile):")
    for name, values in report["cpu_predicted_over_measured_p10_p50_p90"].items():
        print(f"  {name:24} " + " ".join(f"{value:5.2f}" for value in values))
    learned = reference()["learned_gpu_aggregates"]
    print("\nshapes: sum of singles over fused (2, 5, 10, 15 tables; 5-95 %), half over whole columns (128, 64, 32)")
    for name, values in {"published": learned, **report["shapes"]}.items():
        gains = values["fusion_gain_sum_of_singles_over_fused"]
        spread = gains.get("range_5_to_95_percent") or values["range_5_to_95_percent"]
        halves = values["half_columns_over_whole_kernel_time"]
        numbers = [gains[f"{n}_tables"] for n in (2, 5, 10, 15)]
        print(
            f"  {name:10} "
            + " ".join(f"{value:5.2f}" for value in numbers)
            + "  [{:.2f}, {:.2f}]   ".format(*spread)
            + " ".join(f"{halves[dim]:5.2f}" for dim in ("128", "64", "32"))
        )


if __name__ == "__main__":
    main()
