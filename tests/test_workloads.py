import dataclasses
import types
import weakref

import numpy as np
import pytest
import torch

from torchrec_dreamshard.pool import load_public_pool, rebatch
from torchrec_dreamshard.profiling.workloads import (
    Bags,
    _reuse_counts,
    fuse_bags,
    make_bags,
    measure_shard,
    measure_tables,
    reuse_histogram,
)
from torchrec_dreamshard.reuse import unique_rows
from torchrec_dreamshard.types import NUM_REUSE_BINS, ShardSpec


def _histogram(**shares):
    bins = [0.0] * NUM_REUSE_BINS
    for name, share in shares.items():
        bins[int(name[1:])] = share
    return tuple(bins)


SKEWED = ShardSpec(
    rows=50_000,
    dim=16,
    pooling_factor=7.3,
    batch_size=4096,
    reuse_histogram=_histogram(b0=0.6, b1=0.25, b3=0.1, b7=0.05),
)


def _make(shard, seed=0):
    return make_bags(shard, np.random.default_rng(seed))


def _distance(a, b):
    """Total variation distance."""
    return 0.5 * sum(abs(x - y) for x, y in zip(a, b, strict=True))


def test_lookups_are_exact_in_number_and_inside_the_table():
    bags = _make(SKEWED)
    assert len(bags.indices) == round(4096 * 7.3)
    assert bags.indices.min() >= 0 and bags.indices.max() < SKEWED.rows
    assert bags.offsets[0] == 0 and bags.offsets[-1] == len(bags.indices)
    assert bool((bags.offsets.diff() >= 0).all()) and len(bags.offsets) == 4097


def test_bag_lengths_vary_around_the_mean():
    lengths = _make(SKEWED).offsets.diff().double()
    assert lengths.std() == pytest.approx(7.3**0.5, rel=0.1)


def test_fractional_pooling_below_one_gives_bags_of_one_or_none():
    lengths = _make(dataclasses.replace(SKEWED, pooling_factor=0.25)).offsets.diff()
    assert lengths.sum() == 1024 and lengths.max() == 1


def test_no_lookups():
    bags = _make(ShardSpec(rows=10, dim=4, pooling_factor=0, batch_size=8))
    assert len(bags.indices) == 0 and bags.offsets.tolist() == [0] * 9


@pytest.mark.parametrize(
    "histogram",
    [
        SKEWED.reuse_histogram,
        _histogram(b0=1.0),
        _histogram(b4=1.0),
        _histogram(b2=0.5, b6=0.5),
        _histogram(b0=0.999, b9=0.001),
    ],
)
def test_realised_reuse_matches_the_histogram(histogram):
    shard = dataclasses.replace(SKEWED, reuse_histogram=histogram)
    assert _distance(reuse_histogram(_make(shard).indices), histogram) < 0.002


def test_without_a_histogram_ids_are_uniform():
    shard = dataclasses.replace(SKEWED, rows=100, reuse_histogram=None, pooling_factor=100.0)
    counts = torch.bincount(_make(shard).indices, minlength=100).double()
    assert counts.std() / counts.mean() < 0.05


def test_one_id_used_by_everyone():
    shard = ShardSpec(rows=1, dim=4, pooling_factor=20.0, batch_size=4096, reuse_histogram=_histogram(b16=1.0))
    assert _make(shard).indices.unique().tolist() == [0]


@pytest.mark.parametrize("rows", [1, 3, 1000])
@pytest.mark.parametrize("num_lookups", [1, 2, 7, 1000, 100_001])
def test_histograms_that_cannot_be_met_still_give_every_lookup(rows, num_lookups):
    rng = np.random.default_rng(0)
    for _ in range(20):
        shares = rng.dirichlet(np.full(NUM_REUSE_BINS, 0.1))
        counts = _reuse_counts(shares, num_lookups, rows)
        assert counts.sum() == num_lookups and counts.min() >= 1 and len(counts) <= rows


def test_equal_generators_give_equal_bags_and_others_do_not():
    first, second, third = _make(SKEWED, 1), _make(SKEWED, 1), _make(SKEWED, 2)
    assert torch.equal(first.indices, second.indices) and torch.equal(first.offsets, second.offsets)
    assert not torch.equal(first.indices, third.indices)


def test_fused_bags_keep_every_tables_bags():
    parts = [
        _make(dataclasses.replace(SKEWED, pooling_factor=p, batch_size=4), i) for i, p in enumerate((2.0, 0.0, 1.5))
    ]
    fused = fuse_bags(parts)
    bags = [fused.indices[a:b].tolist() for a, b in zip(fused.offsets[:-1], fused.offsets[1:], strict=True)]
    expected = [
        part.indices[a:b].tolist() for part in parts for a, b in zip(part.offsets[:-1], part.offsets[1:], strict=True)
    ]
    assert bags == expected


def test_measuring_inverts_making():
    measured = measure_shard([_make(SKEWED, seed) for seed in range(2)], rows=SKEWED.rows, dim=16, name="t")
    assert (measured.batch_size, measured.name) == (4096, "t")
    assert measured.pooling_factor == pytest.approx(7.3, abs=1e-3)
    assert _distance(measured.reuse_histogram, SKEWED.reuse_histogram) < 0.002


def test_measured_histogram_is_right_on_a_batch_counted_by_hand():
    indices = torch.tensor([5, 5, 5, 1, 2, 2, 9, 9, 9, 9])  # 1 once, 2 twice, 5 three and 9 four times
    assert reuse_histogram(indices)[:4] == (0.25, 0.25, 0.5, 0.0)
    assert reuse_histogram(torch.tensor([], dtype=torch.int64)) is None


def test_a_table_without_lookups_is_measured_as_such():
    shard = measure_shard([Bags(torch.zeros(0, dtype=torch.int64), torch.zeros(5, dtype=torch.int64))], rows=3, dim=4)
    assert (shard.pooling_factor, shard.batch_size, shard.reuse_histogram) == (0.0, 4, None)


@pytest.mark.parametrize(
    ("indices", "offsets", "message"),
    [([1, 2], [0, 1], "end with the number of ids, 2"), ([1, 7], [0, 2], "0 to 4, got 1 to 7"), ([], [], "offsets")],
)
def test_bad_batches_are_refused(indices, offsets, message):
    with pytest.raises(ValueError, match=message):
        measure_shard([(torch.tensor(indices), torch.tensor(offsets))], rows=5, dim=4)


class _Jagged:
    """What a KeyedJaggedTensor gives for one feature."""

    def __init__(self, lists):
        self._lists = lists

    def values(self):
        return torch.tensor([value for row in self._lists for value in row], dtype=torch.int64)

    def lengths(self):
        return torch.tensor([len(row) for row in self._lists], dtype=torch.int32)


def test_tables_are_measured_over_features_and_ranks():
    table = types.SimpleNamespace(name="t", num_embeddings=10, embedding_dim=8, feature_names=["a", "b"])
    batches = [{"a": _Jagged([[1], [1, 2]]), "b": _Jagged([[], [1]])} for _ in range(2)]
    (shard,) = measure_tables(batches, [table], batches_per_step=2, optimizer="adam")
    assert (shard.batch_size, shard.num_features, shard.optimizer) == (4, 2, "adam")
    assert shard.pooling_factor == pytest.approx(2.0)  # 8 lookups of 4 samples
    assert shard.reuse_histogram[1] == 0.5 and shard.reuse_histogram[3] == 0.5  # id 2 twice, id 1 six times
    table.feature_names.append("c")
    with pytest.raises(ValueError, match="table 't', step 0 of the batches: a batch lacks the feature 'c'"):
        measure_tables(batches, [table])
    with pytest.raises(ValueError, match="at least 3"):
        measure_tables(batches, [table], batches_per_step=3)
    broken = _Jagged([[1]])
    broken.lengths = lambda: torch.tensor([2, -1, 1])
    with pytest.raises(ValueError, match="lengths of feature 'a' must be at least 0 and add up to its 1 ids, got 2"):
        measure_tables([{"a": broken}], [types.SimpleNamespace(**{**vars(table), "feature_names": ["a"]})])


def test_features_of_a_table_may_have_batch_sizes_of_their_own():
    table = types.SimpleNamespace(name="t", num_embeddings=10, embedding_dim=8, feature_names=["a", "b"])
    (shard,) = measure_tables([{"a": _Jagged([[1], [2], [3]]), "b": _Jagged([[1, 2]])}], [table])
    assert (shard.batch_size, shard.pooling_factor) == (2, 2.5)  # 4 bags of 2 features, 5 lookups


def test_batches_are_read_one_step_at_a_time():
    table = types.SimpleNamespace(name="t", num_embeddings=10, embedding_dim=8, feature_names=["a"])
    alive = []

    def stream():
        for _ in range(6):
            batch = {"a": _Jagged([[1]])}
            alive.append(weakref.ref(batch["a"]))
            yield batch
            del batch
            assert sum(reference() is not None for reference in alive) <= 2

    measure_tables(stream(), [table], batches_per_step=2)


@pytest.mark.parametrize("batch_size", [1024, 65_536])
def test_lookups_follow_the_statistics_of_tables_across_the_public_pool(batch_size):
    rng = np.random.default_rng(0)
    distances = []
    for shard in (rebatch(shard, batch_size) for shard in load_public_pool(include_unused=False)[::60]):
        indices, offsets = make_bags(shard, rng)
        assert len(indices) == round(batch_size * shard.pooling_factor) and len(offsets) == batch_size + 1
        if len(indices):
            distances.append(_distance(reuse_histogram(indices), shard.reuse_histogram))
            unique = len(indices.unique())
            assert unique == pytest.approx(unique_rows(shard), rel=0.05, abs=2)
    assert np.median(distances) < 0.002 and np.percentile(distances, 75) < 0.05
