"""Small models, batches and topologies for tests of the planner."""

from __future__ import annotations

import torch
from torchrec.distributed.planner.types import Topology
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantBags
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantSequences
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def quiet_topology(world_size=2, compute_device="cpu", **further):
    """A topology without TorchRec's warning about direct construction."""
    return Topology(world_size=world_size, compute_device=compute_device, created_by_factory=True, **further)


def bag_configs(rows=(40, 60, 80, 100), dims=(8, 16, 32, 4), features=None, prefix="t"):
    features = features or [1] * len(rows)
    return [
        EmbeddingBagConfig(
            name=f"{prefix}{i}",
            num_embeddings=num,
            embedding_dim=dim,
            feature_names=[f"{prefix}{i}_f{j}" for j in range(count)],
        )
        for i, (num, dim, count) in enumerate(zip(rows, dims, features, strict=True))
    ]


def bag_collection(device="cpu", is_weighted=False, **further):
    return EmbeddingBagCollection(tables=bag_configs(**further), device=torch.device(device), is_weighted=is_weighted)


def sequence_configs(rows=(40, 60, 80), dim=16, prefix="s"):
    return [
        EmbeddingConfig(name=f"{prefix}{i}", num_embeddings=num, embedding_dim=dim, feature_names=[f"{prefix}{i}_f0"])
        for i, num in enumerate(rows)
    ]


def sequence_collection(device="cpu", **further):
    return EmbeddingCollection(tables=sequence_configs(**further), device=torch.device(device))


def jagged_batch(configs, batch_size, seed, weighted=False):
    """A random batch for the features of ``configs``, 0 to 3 lookups per sample and feature."""
    generator = torch.Generator().manual_seed(seed)
    keys, values, lengths = [], [], []
    for config in configs:
        for feature in config.feature_names:
            keys.append(feature)
            lengths.append(torch.randint(0, 4, (batch_size,), generator=generator))
            count = int(lengths[-1].sum())
            values.append(torch.randint(0, config.num_embeddings, (count,), generator=generator))
    flat = torch.cat(values)
    weights = torch.rand(len(flat), generator=generator) if weighted else None
    return KeyedJaggedTensor(keys=keys, values=flat, lengths=torch.cat(lengths), weights=weights)


def managed_collisions(kind, device="cpu", buckets=2):
    """A managed-collision collection of bags or sequences."""
    configs = bag_configs() if kind == "bag" else sequence_configs()
    modules = {
        config.name: MCHManagedCollisionModule(
            zch_size=config.num_embeddings,
            device=torch.device(device),
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=10,
            input_hash_size=4000,
            buckets=buckets,
        )
        for config in configs
    }
    collisions = ManagedCollisionCollection(modules, configs)
    if kind == "bag":
        inner = EmbeddingBagCollection(tables=configs, device=torch.device(device))
        return ManagedCollisionEmbeddingBagCollection(inner, collisions)
    return ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=configs, device=torch.device(device)), collisions
    )


def feature_processed(device="cpu", **further):
    """A bag collection whose features are weighted by position."""
    features = [name for config in bag_configs(**further) for name in config.feature_names]
    weights = PositionWeightedModuleCollection(dict.fromkeys(features, 10), device=torch.device(device))
    return FeatureProcessedEmbeddingBagCollection(bag_collection(device, is_weighted=True, **further), weights)


def quantised(kind):
    """An int8 collection, as for inference."""
    module = bag_collection() if kind == "bag" else sequence_collection()
    observer = torch.ao.quantization.PlaceholderObserver
    module.qconfig = torch.ao.quantization.QConfig(
        activation=observer.with_args(dtype=torch.float), weight=observer.with_args(dtype=torch.qint8)
    )
    return (QuantBags if kind == "bag" else QuantSequences).from_float(module)
