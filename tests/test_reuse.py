"""Reuse histograms: distinct rows and other batch sizes."""

import pytest

from torchrec_dreamshard.pool import load_public_pool
from torchrec_dreamshard.reuse import mean_reuse, power_law_histogram, rescale_histogram, unique_rows
from torchrec_dreamshard.types import NUM_REUSE_BINS, ShardSpec


def histogram(**shares):
    bins = [0.0] * NUM_REUSE_BINS
    for name, share in shares.items():
        bins[int(name.removeprefix("bin"))] = share
    return tuple(bins)


def test_unique_rows_of_the_public_pool_match_the_published_count():
    total = sum(unique_rows(shard) for shard in load_public_pool())
    assert total == pytest.approx(128_435_723, rel=0.02)


def test_unique_rows_are_bounded_by_rows_and_lookups():
    few_rows = ShardSpec(rows=10, dim=4, pooling_factor=3, reuse_histogram=histogram(bin0=1.0))
    assert unique_rows(few_rows) == 10
    assert unique_rows(ShardSpec(rows=10**9, dim=4, pooling_factor=0.5, batch_size=100)) == pytest.approx(50, rel=1e-3)
    assert unique_rows(ShardSpec(rows=1, dim=4, pooling_factor=2)) == 1
    assert unique_rows(ShardSpec(rows=10, dim=4, pooling_factor=0)) == 0


def test_uniform_ids_without_histogram():
    shard = ShardSpec(rows=1000, dim=4, pooling_factor=1, batch_size=1000)
    assert unique_rows(shard) == pytest.approx(1000 * (1 - 1 / 2.718281828), rel=1e-3)


def test_rescaling_thins_and_keeps_the_sum():
    heavy = histogram(bin10=1.0)
    assert rescale_histogram(heavy, 1 / 512)[10] < 1e-6
    assert sum(rescale_histogram(heavy, 0.1)) == pytest.approx(1)
    assert mean_reuse(rescale_histogram(heavy, 0.25)) == pytest.approx(mean_reuse(heavy) / 4, rel=0.15)
    singles = rescale_histogram(histogram(bin0=1.0), 0.01)
    assert singles[0] > 0.99


def test_power_law_matches_published_unique_rows():
    # Ten tables of 1,677,721 rows, 104,857 ids each with exponent 1.05: 350,280 distinct rows (NVIDIA recsys-examples).
    bins = power_law_histogram(1_677_721, 104_857, 1.05)
    shard = ShardSpec(rows=1_677_721, dim=128, pooling_factor=1, batch_size=104_857, reuse_histogram=bins)
    assert 10 * unique_rows(shard) == pytest.approx(350_280, rel=0.1)
