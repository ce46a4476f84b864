"""Which optimizer is fused into a table's backward pass, and how many bytes of state it really keeps.

TorchRec's estimate multiplies the bytes of the *weights*, so it is two times too small for 16-bit weights, forgets
the per-row state of every further column shard, and knows nothing of optimizers named in ``fused_params``. FBGEMM
keeps its state in 32 bits by default (``split_table_batched_embeddings_ops_training.py``, FBGEMM 1.8).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.planner.types import ShardingOption

_STATE_BYTES = 4  # float32

# name of the optimizer -> (our name, state values per weight, state values per row)
_STATES: Mapping[str, tuple[str, int, int]] = {
    "sgd": ("sgd", 0, 0),
    "exact_sgd": ("sgd", 0, 0),
    "none": ("none", 0, 0),
    "exact_row_wise_adagrad": ("rowwise_adagrad", 0, 1),
    "row_wise_adagrad": ("rowwise_adagrad", 0, 1),
    "exact_row_wise_weighted_adagrad": ("rowwise_adagrad", 0, 1),
    "ensemble_row_wise_adagrad": ("rowwise_adagrad", 1, 1),
    "ema_in_place_row_wise_adagrad": ("rowwise_adagrad", 0, 1),
    "exact_adagrad": ("adagrad", 1, 0),
    "lars_sgd": ("adagrad", 1, 0),
    "partial_row_wise_adam": ("adam", 1, 1),
    "partial_row_wise_lamb": ("adam", 1, 1),
    "adam": ("adam", 2, 0),
    "lamb": ("adam", 2, 0),
}

# class names of torch.optim and torchrec.optim, as apply_optimizer_in_backward records them
_CLASSES: Mapping[str, str] = {
    "SGD": "exact_sgd",
    "Adagrad": "exact_adagrad",
    "RowWiseAdagrad": "exact_row_wise_adagrad",
    "Adam": "adam",
    "AdamW": "adam",
    "LAMB": "lamb",
    "LarsSGD": "lars_sgd",
    "PartialRowWiseAdam": "partial_row_wise_adam",
    "PartialRowWiseLAMB": "partial_row_wise_lamb",
}


def _fbgemm_name(option: ShardingOption, fused_params: Mapping[str, Any]) -> str:
    if option.compute_kernel.startswith("quant"):
        return "none"
    classes = getattr(option.tensor, "_optimizer_classes", None) or []
    if classes and classes[0].__name__ in _CLASSES:
        return _CLASSES[classes[0].__name__]
    optimizer = fused_params.get("optimizer")
    return "exact_sgd" if optimizer is None else str(getattr(optimizer, "value", optimizer)).lower()


def optimizer_name(option: ShardingOption, fused_params: Mapping[str, Any]) -> str:
    """Optimizer of an option, one of ``types.OPTIMIZERS``.

    Args:
        option: the option; optimizers set with ``apply_optimizer_in_backward`` are found on its tensor.
        fused_params: the sharder's; FBGEMM's default is plain SGD.
    """
    return _STATES.get(_fbgemm_name(option, fused_params), ("adam", 2, 0))[0]


def state_bytes(option: ShardingOption, fused_params: Mapping[str, Any], rows: int, dim: int) -> int:
    """Bytes of optimizer state that FBGEMM keeps for a shard of ``rows`` by ``dim``."""
    _, per_weight, per_row = _STATES.get(_fbgemm_name(option, fused_params), ("adam", 2, 0))
    return _STATE_BYTES * rows * (per_weight * dim + per_row)
