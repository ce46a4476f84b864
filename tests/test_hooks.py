import errno

import pytest
import torch
from planner_models import bag_collection, bag_configs, jagged_batch
from run_ranks import run_ranks
from torch import distributed
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, data_parallel, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from torchrec_dreamshard import Measurement, PlacementTask, ShardSpec, samples
from torchrec_dreamshard.measurement import Provenance
from torchrec_dreamshard.profiling.hooks import record_costs
from torchrec_dreamshard.samples import MeasurementStore, load_measurements

pytestmark = pytest.mark.distributed


def _sharded(device_of_table, dims=(8, 16, 32, 4), optimizer=torch.optim.Adagrad):
    """A live model with its tables where ``device_of_table`` says."""
    bags = bag_collection(dims=dims)
    apply_optimizer_in_backward(optimizer, bags.parameters(), {"lr": 0.01})
    kinds = {
        name: data_parallel()
        if device is None
        else table_wise(rank=device, compute_kernel=EmbeddingComputeKernel.FUSED.value)
        for name, device in device_of_table.items()
    }
    plan = construct_module_sharding_plan(bags, kinds, local_size=2, world_size=2, device_type="cpu")
    torch.manual_seed(0)
    return DistributedModelParallel(
        torch.nn.Sequential(bags),
        env=ShardingEnv.from_process_group(distributed.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"0": plan}),
        sharders=[EmbeddingBagCollectionSharder()],
    )


def _steps(model, rank, batch_sizes, backward=True):
    configs = bag_configs()
    for step, batch_size in enumerate(batch_sizes):
        output = model(jagged_batch(configs, batch_size, seed=10 * step + rank)).values()
        if backward:
            output.sum().backward()


def _hooks_of(model):
    return sum(
        len(hooks)
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name.endswith("_hooks") and hasattr(hooks, "__len__")
    )


def _train_recorded(rank, path, device_of_table, batch_sizes):
    model = _sharded(device_of_table)
    _steps(model, rank, [4])
    before = _hooks_of(model)
    with record_costs(model, MeasurementStore(path), steps_per_record=2):
        attached = _hooks_of(model)
        _steps(model, rank, batch_sizes)
    after = _hooks_of(model)
    _steps(model, rank, [4])
    return before, attached, after


def test_records_the_running_plan_with_all_four_terms(tmp_path):
    path = tmp_path / "job.jsonl"
    plan = {"t0": 0, "t1": 1, "t2": 1, "t3": 0}
    results = run_ranks(_train_recorded, 2, path, plan, [8, 8, 8, 8, 8])
    for before, attached, after in results:
        assert attached > before == after
    records = load_measurements(path)
    assert [record.provenance.repeats for record in records] == [2, 2, 1]
    for record in records:
        placed = {shard.name: device for shard, device in zip(record.task.shards, record.placement, strict=True)}
        assert placed == plan
        assert all((getattr(record.cost, term) > 0).all() for term in ("forward_compute_ms", "backward_compute_ms"))
        assert all((getattr(record.cost, term) > 0).all() for term in ("forward_comms_ms", "backward_comms_ms"))
        assert record.cost.step_ms > 0
    shard = next(shard for shard in records[0].task.shards if shard.name == "t2")
    assert (shard.rows, shard.dim, shard.optimizer, shard.kernel) == (80, 32, "adagrad", "fused")
    assert shard.batch_size == 16  # the batches of both ranks
    assert 1 < shard.pooling_factor < 2  # 0 to 3 lookups a sample
    assert shard.reuse_histogram is not None


def test_a_rank_without_tables_and_a_batch_that_varies(tmp_path):
    path = tmp_path / "job.jsonl"
    run_ranks(_train_recorded, 2, path, {"t0": 0, "t1": 0, "t2": 0, "t3": 0}, [4, 12])
    (record,) = load_measurements(path)
    assert record.placement == (0, 0, 0, 0)
    assert record.cost.forward_compute_ms[0] > 0 and record.cost.forward_compute_ms[1] == 0
    assert record.cost.forward_comms_ms[1] > 0 and record.cost.backward_comms_ms[1] > 0
    assert record.task.shards[0].batch_size == 16  # 8 and 24


def test_uniform_shards_become_background_load(tmp_path):
    path = tmp_path / "job.jsonl"
    run_ranks(_train_recorded, 2, path, {"t0": 0, "t1": None, "t2": 1, "t3": None}, [8, 8])
    (record,) = load_measurements(path)
    assert sorted(shard.name for shard in record.task.shards) == ["t0", "t2"]
    assert all(device.background_ms > 0 for device in record.task.devices)
    assert record.cost.background_ms.tolist() == [device.background_ms for device in record.task.devices]


def _evaluate_recorded(rank, path):
    model = _sharded({"t0": 0, "t1": 1, "t2": 1, "t3": 0})
    with torch.no_grad(), record_costs(model, MeasurementStore(path)):
        _steps(model, rank, [8, 8], backward=False)


def test_evaluation_records_the_forward_terms_only(tmp_path):
    path = tmp_path / "job.jsonl"
    run_ranks(_evaluate_recorded, 2, path)
    (record,) = load_measurements(path)
    assert (record.cost.forward_compute_ms > 0).all() and (record.cost.forward_comms_ms > 0).all()
    assert record.cost.backward_compute_ms is None and record.cost.step_ms is None


def _weights_with_and_without(rank, path):
    weights = []
    for recorded in (False, True):
        model = _sharded({"t0": 0, "t1": 1, "t2": 1, "t3": 0})
        if recorded:
            recorder = record_costs(model, MeasurementStore(path), steps_per_record=1)
            recorder.attach()
        _steps(model, rank, [8, 8, 8])
        if recorded:
            recorder.detach()
        weights.append(
            {name: [s.tensor.clone() for s in value.local_shards()] for name, value in model.state_dict().items()}
        )
    return all(
        torch.equal(a, b) for name in weights[0] for a, b in zip(weights[0][name], weights[1][name], strict=True)
    )


def test_training_gives_the_same_weights_with_the_recorder(tmp_path):
    assert run_ranks(_weights_with_and_without, 2, tmp_path / "job.jsonl") == [True, True]


def _fail_inside(rank, path):
    model = _sharded({"t0": 0, "t1": 1, "t2": 1, "t3": 0})
    if rank == 1:
        with pytest.raises(RuntimeError, match="user"), record_costs(model, MeasurementStore(path)):
            raise RuntimeError("the user's own")
    return _hooks_of(model)


def test_an_error_on_one_rank_leaves_nobody_waiting(tmp_path):
    first, second = run_ranks(_fail_inside, 2, tmp_path / "job.jsonl")
    assert first == second


def test_a_model_without_sharded_modules_is_refused(tmp_path):
    recorder = record_costs(torch.nn.Linear(1, 1), MeasurementStore(tmp_path / "s.jsonl"))
    with pytest.raises(ValueError, match="DistributedModelParallel"):
        recorder.attach()


def _variable_batches(rank, path):
    """t0 and t1 live on rank 0, t2 and t3 on rank 1; each feature has its own batch, expanded to 6 samples."""
    model = _sharded({"t0": 0, "t1": 0, "t2": 1, "t3": 1}, optimizer=torch.optim.SGD)  # few support such batches
    features = [f"t{i}_f0" for i in range(4)]
    with record_costs(model, MeasurementStore(path), steps_per_record=4):
        for step in range(2):
            strides = [1 + feature + rank + 2 * step for feature in range(4)]
            lengths = torch.cat([torch.full((stride,), feature) for feature, stride in enumerate(strides)])
            batch = KeyedJaggedTensor(
                keys=features,
                values=torch.zeros(int(lengths.sum()), dtype=torch.int64),
                lengths=lengths,
                stride_per_key_per_rank=[[stride] for stride in strides],
                inverse_indices=(features, torch.zeros(4, 6, dtype=torch.int64)),
            )
            model(batch).values().sum().backward()


def test_features_with_batches_of_their_own_are_counted_exactly(tmp_path):
    path = tmp_path / "job.jsonl"
    run_ranks(_variable_batches, 2, path)
    (record,) = load_measurements(path)
    shards = {shard.name: shard for shard in record.task.shards}
    # Bags of feature f in step s, over both ranks: 2 f + 3 + 4 s; the mean over two steps is 2 f + 5.
    assert [shards[f"t{feature}"].batch_size for feature in range(4)] == [5, 7, 9, 11]
    assert [shards[f"t{feature}"].pooling_factor for feature in range(4)] == [0, 1, 2, 3]
    assert all((getattr(record.cost, term) > 0).all() for term in ("forward_compute_ms", "backward_compute_ms"))
    assert (record.cost.backward_comms_ms > 0).all()


def _record_onto(rank, path, fail):
    model = _sharded({"t0": 0, "t1": 1, "t2": 1, "t3": 0})
    store = MeasurementStore(path)
    with pytest.MonkeyPatch.context() as patch:
        if fail:
            patch.setattr(samples, "_write_all", _no_space)
        with record_costs(model, store, steps_per_record=1):
            _steps(model, rank, [8, 8])
    return _hooks_of(model)


def _no_space(file, data):
    file.write(data[:10])
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_costs_the_record_and_not_the_job(tmp_path):
    path = tmp_path / "job.jsonl"
    run_ranks(_record_onto, 2, path, False)
    before = path.read_bytes()
    run_ranks(_record_onto, 2, path, True)
    assert path.read_bytes() == before


def test_a_job_is_not_recorded_into_a_store_of_other_hardware(tmp_path):
    path = tmp_path / "job.jsonl"
    task = PlacementTask.uniform([ShardSpec(rows=9, dim=4, pooling_factor=1)], 1)
    MeasurementStore(path).append(
        Measurement(task=task, placement=(0,), error="out of memory", provenance=Provenance(device="NVIDIA H200"))
    )
    recorder = record_costs(torch.nn.Linear(1, 1), MeasurementStore(path))
    with pytest.raises(ValueError, match="measurements of 'NVIDIA H200'.*different stores"):
        recorder.attach()
