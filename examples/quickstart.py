"""The lines that a TorchRec user adds: plan with DreamShard, hand the plan to ``DistributedModelParallel``.

torchrun --standalone --nproc_per_node 2 examples/quickstart.py
"""

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import Topology

from torchrec_dreamshard import DreamShardPlanner

# Your script as it is: a process group and a model whose tables are still on the meta device.
device = torch.device("cuda", dist.get_node_local_rank()) if torch.cuda.is_available() else torch.device("cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
model = EmbeddingBagCollection(
    tables=[
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=1000 * (i + 1), embedding_dim=16, feature_names=[f"f{i}"])
        for i in range(8)
    ],
    device=torch.device("meta"),
)

# What changes: DreamShardPlanner in the place of EmbeddingShardingPlanner, with the same arguments.
sharders = get_default_sharders()
planner = DreamShardPlanner(
    topology=Topology(world_size=dist.get_world_size(), compute_device=device.type),
    batch_size=256,  # of one rank
)
plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)

# And on with your script.
lengths = torch.ones(8 * 256, dtype=torch.int32)
ids = KeyedJaggedTensor(keys=[f"f{i}" for i in range(8)], values=torch.randint(1000, (8 * 256,)), lengths=lengths)
output = sharded(ids.to(device)).values()
output.sum().backward()
if dist.get_rank() == 0:
    print(plan)
    print(f"output of rank 0: {tuple(output.shape)}")
dist.destroy_process_group()
