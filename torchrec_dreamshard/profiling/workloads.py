"""Lookups that behave like a shard's own, and the statistics of a shard from real lookups.

``make_bags`` turns a ``ShardSpec`` into one batch of lookups; ``measure_shard`` and ``measure_tables`` turn real
batches into ``ShardSpec`` records. The two are inverse: what ``make_bags`` draws measures as the shard that it
was drawn for.

A reuse histogram says, for one batch of the shard's own ``batch_size``, which share of the distinct ids is used
how often (17 bins, DreamShard, arXiv 2210.02023, section 3). It is reproduced as it stands; a histogram that was
taken at another batch size has to be converted first (``pool.rebatch``). The number of distinct ids is not part
of a ``ShardSpec``: it follows from the number of lookups and the histogram's mean reuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchrec_dreamshard.reuse import BIN_EDGES, BIN_MEANS
from torchrec_dreamshard.types import NUM_REUSE_BINS, ShardSpec

IntArray = npt.NDArray[np.int64]

_LOW: IntArray = BIN_EDGES[:-1].astype(np.int64)  # a bin holds the counts above LOW, up to HIGH
_HIGH: IntArray = np.append(BIN_EDGES[1:-1], 2 * BIN_EDGES[-2]).astype(np.int64)  # the open bin is taken as one octave


class Bags(NamedTuple):
    """One batch of lookups into one table, as FBGEMM takes them."""

    indices: Tensor
    """Row ids, int64, of length N."""
    offsets: Tensor
    """Starts of the bags in ``indices`` and N at the end, int64: ``num_features * batch_size + 1`` entries."""


def make_bags(shard: ShardSpec, rng: np.random.Generator) -> Bags:
    """Draws one batch of lookups for a shard.

    The number of lookups is exactly ``round(batch_size * pooling_factor)``. Bag lengths vary around their mean
    as independent lookups would (about Poisson); where the mean is at most one, a bag has one lookup or none,
    like a feature that is there or not. Reuse follows the shard's histogram; a shard without one looks up
    uniformly distributed ids. Which rows are hot is random.

    Args:
        shard: what to draw for.
        rng: source of all randomness; equal states give equal bags.

    Returns:
        Bags in feature-major order, on the CPU.
    """
    num_bags = shard.num_features * shard.batch_size
    num_lookups = round(shard.batch_size * shard.pooling_factor)
    if num_lookups <= num_bags:
        lengths = np.zeros(num_bags, dtype=np.int64)
        lengths[rng.permutation(num_bags)[:num_lookups]] = 1
    else:
        lengths = np.bincount(rng.integers(0, num_bags, num_lookups), minlength=num_bags)
    offsets = np.zeros(num_bags + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Bags(torch.from_numpy(_draw_ids(shard, num_lookups, rng)), torch.from_numpy(offsets))


def fuse_bags(bags: Sequence[Bags]) -> Bags:
    """Joins the bags of several tables, in their order, into the input of one fused kernel."""
    starts = np.cumsum([0, *(len(bag.indices) for bag in bags)])
    parts = [bag.offsets[:-1] + int(start) for bag, start in zip(bags, starts, strict=False)]
    return Bags(torch.cat([bag.indices for bag in bags]), torch.cat([*parts, torch.tensor([int(starts[-1])])]))


def reuse_histogram(indices: Tensor) -> tuple[float, ...] | None:
    """The reuse histogram of one batch.

    Args:
        indices: the N ids looked up.

    Returns:
        17 shares of the distinct ids; None when there is no lookup.
    """
    if indices.numel() == 0:
        return None
    return _shares(_count_reuse(indices))


def measure_shard(batches: Iterable[tuple[Tensor, Tensor]], *, rows: int, dim: int, **fields: Any) -> ShardSpec:
    """Measures a table's pooling factor and reuse from real batches.

    Args:
        batches: per batch the table's ids and offsets (the bags' starts and the number of ids, ``bags + 1``
            entries); with several features per table the features' bags one after the other. Read once.
        rows: rows of the table.
        dim: columns of the table.
        **fields: further fields of ``ShardSpec``, for example ``name`` or ``num_features``.

    Returns:
        The shard, with the mean batch size of the batches (where features have batch sizes of their own: the mean
        over them). Ids of all batches weigh the same in its histogram.

    Raises:
        ValueError: no batch, offsets that do not fit the ids, or ids outside the table.
    """
    counter = _LookupCounter(rows, int(fields.get("num_features", 1)))
    for indices, offsets in batches:
        if offsets.numel() < 1 or int(offsets[0]) != 0 or int(offsets[-1]) != indices.numel():
            raise ValueError(f"offsets must start with 0 and end with the number of ids, {indices.numel()}")
        counter.add(indices, offsets.numel() - 1)
    return counter.shard(rows=rows, dim=dim, **fields)


def measure_tables(
    batches: Iterable[Any], tables: Iterable[Any], *, batches_per_step: int = 1, **fields: Any
) -> list[ShardSpec]:
    """Measures the tables of a model from a stream of TorchRec inputs.

    Args:
        batches: ``KeyedJaggedTensor`` batches (anything that gives ``batch[feature].values()`` and
            ``.lengths()``). Read once; one step of them is in memory at a time.
        tables: TorchRec table configs (``name``, ``num_embeddings``, ``embedding_dim``, ``feature_names``).
        batches_per_step: how many of these batches make one step of the job. A whole table sees the lookups of
            every rank: with one rank's batches at hand, give the number of ranks.
        **fields: further fields of every ``ShardSpec``, for example ``optimizer``.

    Returns:
        One shard per table, in their order. Batches left over after the last whole step are not used.

    Raises:
        ValueError: fewer batches than one step needs, a feature that a batch lacks, lengths that do not fit its
            ids, or ids outside a table.
    """
    tables = list(tables)
    counters = [_LookupCounter(table.num_embeddings, len(table.feature_names)) for table in tables]
    step: list[Any] = []
    num_batches = num_steps = 0
    for batch in batches:
        step.append(batch)
        num_batches += 1
        if len(step) < batches_per_step:
            continue
        for table, counter in zip(tables, counters, strict=True):
            try:
                counter.add(*_step_lookups(step, table.feature_names))
            except ValueError as error:
                raise ValueError(f"table {table.name!r}, step {num_steps} of the batches: {error}") from None
        num_steps += 1
        step.clear()
    if num_steps == 0:
        raise ValueError(f"batches must hold at least {batches_per_step}, one step, got {num_batches}")
    return [
        counter.shard(
            rows=table.num_embeddings,
            dim=table.embedding_dim,
            name=table.name,
            num_features=len(table.feature_names),
            **fields,
        )
        for table, counter in zip(tables, counters, strict=True)
    ]


class _LookupCounter:
    """What a table's lookups add up to, step by step."""

    def __init__(self, rows: int, num_features: int) -> None:
        self._rows, self._num_features = rows, num_features
        self._num_steps = self._num_bags = self._num_lookups = 0
        self._reuse = np.zeros(NUM_REUSE_BINS)

    def add(self, indices: Tensor, num_bags: int) -> None:
        """Counts one step: the ids of all bags of all features."""
        if indices.numel():
            if int(indices.min()) < 0 or int(indices.max()) >= self._rows:
                raise ValueError(
                    f"ids must lie in 0 to {self._rows - 1}, got {int(indices.min())} to {int(indices.max())}"
                )
            self._reuse += _count_reuse(indices)
        self._num_steps += 1
        self._num_bags += num_bags
        self._num_lookups += indices.numel()

    def shard(self, **fields: Any) -> ShardSpec:
        """The shard that behaves like what was counted."""
        if self._num_bags == 0:
            raise ValueError("batches must hold at least one sample, got none")
        num_samples = self._num_bags / self._num_features
        return ShardSpec(
            pooling_factor=self._num_lookups / num_samples,
            batch_size=max(1, round(num_samples / self._num_steps)),
            reuse_histogram=_shares(self._reuse) if self._num_lookups else None,
            **fields,
        )


def _draw_ids(shard: ShardSpec, num_lookups: int, rng: np.random.Generator) -> IntArray:
    if shard.reuse_histogram is None:
        return rng.integers(0, shard.rows, num_lookups)
    counts = _reuse_counts(np.array(shard.reuse_histogram), num_lookups, shard.rows)
    # One random row from each of as many equal strata: distinct without a permutation of the whole table.
    bounds = np.arange(len(counts) + 1) * shard.rows // max(1, len(counts))
    ids = rng.integers(bounds[:-1], bounds[1:])
    rng.shuffle(ids)
    lookups = np.repeat(ids, counts)
    rng.shuffle(lookups)
    return lookups


def _reuse_counts(shares: npt.NDArray[np.float64], num_lookups: int, rows: int) -> IntArray:
    """How often each distinct id is used: at least 1 each, adding up to ``num_lookups`` exactly."""
    if num_lookups == 0:
        return np.zeros(0, dtype=np.int64)
    limit = min(rows, num_lookups)
    num_ids = num_lookups / float(shares @ BIN_MEANS)
    for _ in range(4):  # rounding to whole ids takes or adds some of the rare, much used ones
        per_bin = _apportion(shares, int(np.clip(round(num_ids), 1, limit)))
        if per_bin @ (_LOW + 1) <= num_lookups <= per_bin @ _HIGH:
            break
        num_ids *= num_lookups / float(per_bin @ BIN_MEANS)
    bins = np.repeat(np.arange(NUM_REUSE_BINS), per_bin)
    low, high = _LOW[bins] + 1, _HIGH[bins]
    rank = np.arange(len(bins)) - np.repeat(np.cumsum(per_bin) - per_bin, per_bin)
    position = (rank + 0.5) / per_bin[bins]  # quantile of the power law that `reuse` assumes within a bin
    counts: IntArray = np.clip(np.ceil(_LOW[bins] / (1 - position / 2)), low, high).astype(np.int64)
    missing = num_lookups - int(counts.sum())
    room = high - counts if missing > 0 else counts - low
    if abs(missing) <= room.sum():
        change = _apportion(room, abs(missing))
        return counts + change if missing > 0 else counts - change
    # The bins do not allow this many lookups (fewer rows than they need, say): keep their proportions.
    return 1 + _apportion(counts - 1 if counts.max() > 1 else counts, num_lookups - len(counts))


def _apportion(weights: npt.NDArray[Any], total: int) -> IntArray:
    """Splits ``total`` into whole numbers in proportion to ``weights``, by largest remainder."""
    if total == 0:
        return np.zeros(len(weights), dtype=np.int64)
    quotas = weights * (total / weights.sum())
    whole: IntArray = np.floor(quotas).astype(np.int64)
    left = total - int(whole.sum())
    if left > 0:
        whole[np.argsort(whole - quotas, kind="stable")[:left]] += 1
    return whole


def _count_reuse(indices: Tensor) -> IntArray:
    """Distinct ids per bin."""
    _, counts = np.unique(indices.cpu().numpy(), return_counts=True)
    return np.bincount(np.searchsorted(_HIGH[:-1], counts), minlength=NUM_REUSE_BINS)


def _shares(reuse: npt.NDArray[Any]) -> tuple[float, ...]:
    return tuple((reuse / reuse.sum()).tolist())


def _step_lookups(step: Sequence[Mapping[str, Any]], features: Sequence[str]) -> tuple[Tensor, int]:
    """The ids of a table's features in one step, and the number of their bags."""
    ids, num_bags = [], 0
    for feature in features:
        for batch in step:
            try:
                jagged = batch[feature]
            except (KeyError, ValueError):
                raise ValueError(f"a batch lacks the feature {feature!r}") from None
            values, lengths = jagged.values(), jagged.lengths()
            if int(lengths.sum()) != values.numel() or bool((lengths < 0).any()):
                raise ValueError(
                    f"the lengths of feature {feature!r} must be at least 0 and add up to its {values.numel()} ids, "
                    f"got {int(lengths.sum())}"
                )
            ids.append(values)
            num_bags += lengths.numel()
    return torch.cat(ids), num_bags
