"""A picture of a placement's cost: one stacked bar per device. Needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from torchrec_dreamshard.measurement import TERMS, CostBreakdown

_COLOURS = ("#4c72b0", "#a1c9f4", "#ffb482", "#c44e52")
_BACKGROUND_COLOUR = "#b0b0b0"
_MAX_LABELS = 16


def draw_cost(path: str | Path, cost: CostBreakdown, *, title: str = "predicted step") -> None:
    """Draws forward, communication and backward times of every device into a file.

    Args:
        path: a picture file; its suffix chooses the format.
        cost: all four terms must be known.
        title: above the picture; the step time is added.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: a term is not known.
    """
    missing = [term for term in TERMS if getattr(cost, term) is None]
    if missing:
        raise ValueError(f"a picture needs all four terms of a cost, these are unknown: {', '.join(missing)}")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ImportError(
            "a picture needs matplotlib: pip install 'torchrec_dreamshard[plot]'", name=error.name
        ) from error
    terms = {term.removesuffix("_ms").replace("_", " "): np.asarray(getattr(cost, term)) for term in TERMS}
    devices = np.arange(len(next(iter(terms.values()))))
    figure = Figure(figsize=(min(16.0, 6.0 + 0.3 * len(devices)), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bottom = np.zeros(len(devices))
    bars = list(zip(terms, terms.values(), _COLOURS, strict=True))
    if cost.background_ms is not None and cost.background_ms.any():
        bars.insert(0, ("row-wise, data-parallel, ids", np.asarray(cost.background_ms), _BACKGROUND_COLOUR))
    for label, values, colour in bars:
        axes.bar(devices, values, bottom=bottom, label=label, color=colour)
        bottom += values
    if len(devices) <= _MAX_LABELS:
        axes.set_xticks(devices)
    axes.set_xlabel("device")
    axes.set_ylabel("ms")
    axes.set_title(title if cost.step_ms is None else f"{title}: {cost.step_ms:.3f} ms")
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path)
