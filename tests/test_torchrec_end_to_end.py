"""Every sharding type and kind of module that two Gloo ranks can run: forward and gradients are the unsharded model's.

A CPU runs table-wise, column-wise, table-column-wise and, if asked for, row-wise and data-parallel bags, and all but
data-parallel sequences; table-row-wise, grid, quantised collections and ``DMPCollection`` need GPUs.
"""

from __future__ import annotations

import pytest
import torch
from planner_models import (
    bag_collection,
    bag_configs,
    feature_processed,
    jagged_batch,
    managed_collisions,
    sequence_collection,
    sequence_configs,
)
from run_ranks import run_ranks
from sharded_models import SGD, Model, compare_with_unsharded, shard
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import get_default_sharders

WORLD = 2
NAMES = ("t0", "t1", "t2", "t3")
BAG_TYPES = ("table_wise", "column_wise", "table_column_wise", "row_wise", "data_parallel")
SEQUENCE_TYPES = ("table_wise", "column_wise", "row_wise")


def bag_sharder():
    return EmbeddingBagCollectionSharder(fused_params=dict(SGD))


def processed_sharder():
    return FeatureProcessedEmbeddingBagCollectionSharder(bag_sharder())


def sequence_sharder():
    return EmbeddingCollectionSharder(fused_params=dict(SGD))


def constrain(kinds):
    """Constraints from the type of each table; column shards are at least 8 wide."""
    return {name: ParameterConstraints(sharding_types=[kind], min_partition=8) for name, kind in kinds.items()}


def bags(rank, kinds, is_weighted):
    """All tables of one type, one type after the other; several features share a table."""
    shape = {"features": [1, 3, 2, 1], "dims": (16, 16, 32, 8)}
    for kind in kinds:
        types = compare_with_unsharded(
            rank,
            lambda: [bag_collection(is_weighted=is_weighted, **shape)],
            [bag_configs(**shape)],
            [bag_sharder()],
            constrain(dict.fromkeys(NAMES, kind)),
            weighted=(0,) if is_weighted else (),
        )
        assert types == dict.fromkeys(NAMES, kind)


@pytest.mark.distributed
@pytest.mark.parametrize("is_weighted", [False, True], ids=["plain", "weighted"])
def test_bags_of_every_type(is_weighted):
    run_ranks(bags, WORLD, BAG_TYPES, is_weighted)


def compare_kinds(rank, kinds, names, make_module, configs, sharder):
    """All tables of one module as each kind in turn."""
    for kind in kinds:
        wanted = dict.fromkeys(names, kind)
        types = compare_with_unsharded(rank, lambda: [make_module()], [configs], [sharder], constrain(wanted))
        assert types == wanted


def processed(rank):
    dims = (16, 16, 32, 8)
    kinds = ("table_wise", "column_wise", "table_column_wise")
    compare_kinds(rank, kinds, NAMES, lambda: feature_processed(dims=dims), bag_configs(dims=dims), processed_sharder())


@pytest.mark.distributed
def test_feature_processed_bags_of_every_type():
    run_ranks(processed, WORLD)


def sequences(rank):
    names = ("s0", "s1", "s2")
    compare_kinds(rank, SEQUENCE_TYPES, names, sequence_collection, sequence_configs(), sequence_sharder())


@pytest.mark.distributed
def test_sequences_of_every_type():
    run_ranks(sequences, WORLD)


def several(rank):
    """One collection of each kind in one model; inside one collection every table has a type of its own."""
    kinds = {"t0": "row_wise", "t1": "column_wise", "t2": "data_parallel", "t3": "table_wise"}
    kinds |= {"w0": "table_wise", "w1": "row_wise", "p0": "column_wise", "p1": "table_wise"}
    kinds |= {"s0": "row_wise", "s1": "table_wise", "s2": "table_wise"}
    small = {"rows": (50, 70), "dims": (16, 16)}
    types = compare_with_unsharded(
        rank,
        lambda: [
            bag_collection(),
            bag_collection(is_weighted=True, prefix="w", **small),
            feature_processed(prefix="p", **small),
            sequence_collection(),
        ],
        [bag_configs(), bag_configs(prefix="w", **small), bag_configs(prefix="p", **small), sequence_configs()],
        [bag_sharder(), processed_sharder(), sequence_sharder()],
        constrain(kinds),
        weighted=(1,),
    )
    assert types == kinds


@pytest.mark.distributed
def test_several_modules_of_mixed_types():
    run_ranks(several, WORLD)


def unconstrained(rank):
    """What the planner takes by itself."""
    return compare_with_unsharded(
        rank,
        lambda: [bag_collection(), sequence_collection()],
        [bag_configs(), sequence_configs()],
        [bag_sharder(), sequence_sharder()],
    )


@pytest.mark.distributed
def test_the_planners_own_choice():
    first, second = run_ranks(unconstrained, WORLD)
    assert first == second


def collisions(rank):
    """Each output is the row of the table that the id was remapped to, and every id keeps its row."""
    model = managed_collisions("sequence")
    sharded, types = shard(Model(model), get_default_sharders())
    assert set(types.values()) == {"row_wise"}
    collection = sharded.module.collections[0]
    seen = []
    for _ in range(2):
        embeddings, _ = collection(jagged_batch(sequence_configs(), 6, rank))
        seen.append({key: embeddings[key].values().detach().clone() for key in sorted(embeddings.keys())})
        sum(embeddings[key].values().sum() for key in sorted(embeddings.keys())).backward()
    for key, values in seen[0].items():
        assert values.shape == seen[1][key].shape
        # a step of plain SGD lowers each weight by the learning rate times how often it was looked up, over all ranks
        change = values - seen[1][key]
        assert torch.all(change >= -1e-6) and (change.max() > 0 or not values.numel())
        torch.testing.assert_close(change, change[:, :1].expand_as(change), atol=1e-5, rtol=0)


@pytest.mark.distributed
def test_managed_collisions_train_their_rows():
    run_ranks(collisions, WORLD)
