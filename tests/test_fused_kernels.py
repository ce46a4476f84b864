import dataclasses

import numpy as np
import pytest
import torch

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.profiling import fused_kernels
from torchrec_dreamshard.profiling.fused_kernels import DeviceKernels, FusedKernel, group_shards, time_device
from torchrec_dreamshard.profiling.timing import TimingConfig
from torchrec_dreamshard.types import ShardSpec

CPU = torch.device("cpu")
QUICK = TimingConfig(warmup=1, repeats=2, max_disturbed=0)
SHARD = ShardSpec(name="t", rows=50, dim=8, pooling_factor=2.5, batch_size=16)


def _kernel(shards, seed=0):
    return FusedKernel(shards, CPU, np.random.default_rng(seed))


def _reference_output(kernel, shards):
    """What the tables give by index arithmetic."""
    weights = kernel._op.split_embedding_weights()
    indices, offsets = kernel._bags
    columns, bag = [], 0
    for table, shard in enumerate(shards):
        for _ in range(shard.num_features):
            rows = []
            for _ in range(shard.batch_size):
                ids = indices[offsets[bag] : offsets[bag + 1]]
                scale = 1.0
                if kernel._weights is not None:
                    scale = kernel._weights[offsets[bag] : offsets[bag + 1], None]
                rows.append((weights[table].float()[ids] * scale).sum(0))
                bag += 1
            columns.append(torch.stack(rows))
    return torch.cat(columns, dim=1)


@pytest.mark.parametrize("fields", [{}, {"is_weighted": True}, {"weight_dtype": "fp16"}, {"num_features": 2}])
def test_forward_looks_up_and_pools_the_tables(fields):
    shards = [dataclasses.replace(SHARD, **fields), dataclasses.replace(SHARD, **fields, dim=4, rows=7)]
    kernel = _kernel(shards)
    expected = _reference_output(kernel, shards)
    kernel.forward()
    torch.testing.assert_close(kernel._output, expected, rtol=1e-4, atol=1e-4)


def test_backward_applies_the_optimizer_to_the_rows_that_were_used():
    kernel = _kernel([SHARD])
    (weights,) = kernel._op.split_embedding_weights()
    before = weights.detach().clone()
    gradient = torch.zeros_like(before)
    bags = torch.repeat_interleave(torch.arange(16), kernel._bags.offsets.diff())
    gradient.index_add_(0, kernel._bags.indices, kernel._gradient[bags])
    kernel.forward()
    kernel.backward()
    torch.testing.assert_close(weights, before - 0.01 * gradient, rtol=1e-4, atol=1e-5)


def test_backward_needs_a_forward():
    kernel = _kernel([SHARD])
    kernel.forward()
    kernel.backward()
    with pytest.raises(RuntimeError, match="forward"):
        kernel.backward()


def test_every_weight_is_written_with_numbers_that_differ():
    kernel = _kernel([dataclasses.replace(SHARD, rows=9000, dim=128)])  # larger than the tile that is repeated
    (weights,) = kernel._op.split_embedding_weights()
    assert (weights != 0).float().mean() > 0.999 and weights.std() > 0.2


def test_sequences_have_a_row_per_lookup():
    kernel = _kernel([dataclasses.replace(SHARD, is_pooled=False)])
    kernel.forward()
    torch.testing.assert_close(kernel._output, kernel._op.split_embedding_weights()[0][kernel._bags.indices])


def test_equal_generators_build_equal_kernels():
    first, second = _kernel([SHARD], 3), _kernel([SHARD], 3)
    first.forward()
    second.forward()
    assert torch.equal(first._output, second._output) and torch.equal(first._gradient, second._gradient)


def test_shards_fuse_unless_their_kernels_differ():
    other_dim = dataclasses.replace(SHARD, dim=16)
    assert group_shards([SHARD, other_dim]) == [[SHARD, other_dim]]
    for fields in ({"weight_dtype": "fp16"}, {"optimizer": "adagrad"}, {"is_weighted": True}, {"batch_size": 8}):
        other = dataclasses.replace(SHARD, **fields)
        assert group_shards([SHARD, other, SHARD]) == [[SHARD, SHARD], [other]]
    sequence = dataclasses.replace(SHARD, is_pooled=False)
    assert len(group_shards([sequence, dataclasses.replace(sequence, dim=16)])) == 2


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad"])
@pytest.mark.parametrize("fields", [{}, {"weight_dtype": "fp16"}, {"is_weighted": True}, {"is_pooled": False}])
def test_times_are_positive_for_every_supported_variant(optimizer, fields):
    shard = dataclasses.replace(SHARD, optimizer=optimizer, **fields)
    times = time_device([shard, shard], CPU, QUICK, rng=np.random.default_rng(0))
    assert times.ms.shape == (2, 2) and (times.ms > 0).all()


def test_a_mixed_device_runs_all_its_kernels():
    shards = [SHARD, dataclasses.replace(SHARD, weight_dtype="fp16"), dataclasses.replace(SHARD, is_pooled=False)]
    kernels = DeviceKernels(shards, CPU, np.random.default_rng(0))
    kernels.forward()
    assert all(kernel._output is not None for kernel in kernels._kernels) and len(kernels._kernels) == 3
    kernels.backward()
    assert all(kernel._output is None for kernel in kernels._kernels)


def test_an_empty_device_takes_no_time():
    assert time_device([], CPU, QUICK, rng=np.random.default_rng(0)).median_ms().tolist() == [0, 0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dim": 6}, "dim to be a multiple of 4, got 6"),
        ({"optimizer": "adam"}, "optimizer to be one of sgd, rowwise_adagrad, adagrad, got 'adam'"),
        ({"weight_dtype": "bf16"}, "weight_dtype to be one of fp32, fp16, got 'bf16'"),
        ({"kernel": "fused_uvm_caching"}, "kernel to be one of fused, got 'fused_uvm_caching'"),
    ],
)
def test_what_the_kernels_cannot_do_is_a_measurement_error(fields, message):
    with pytest.raises(MeasurementError, match=f"shard 't' cannot be measured.*{message}"):
        time_device([dataclasses.replace(SHARD, **fields)], CPU, QUICK, rng=np.random.default_rng(0))


def test_too_little_memory_is_refused_before_it_is_used(monkeypatch):
    monkeypatch.setattr(fused_kernels, "_available_host_bytes", lambda: 1000)
    with pytest.raises(MeasurementError, match=r"1 shards need 3,144 bytes.*1,000 are available"):
        time_device([dataclasses.replace(SHARD, optimizer="rowwise_adagrad")], CPU, QUICK, rng=np.random.default_rng(0))


def test_the_limit_of_a_control_group_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(fused_kernels, "_CGROUP", tmp_path)
    assert fused_kernels._available_host_bytes() > 2700
    for name, text in (("max", "5000\n"), ("current", "3000\n"), ("stat", "anon 9\ninactive_file 700\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert fused_kernels._available_host_bytes() == 2700
    (tmp_path / "memory.max").write_text("max\n")
    assert fused_kernels._available_host_bytes() > 2700


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, AssertionError, ValueError])
def test_a_failing_kernel_is_a_measurement_error_of_one_line(monkeypatch, error):
    def fail(shards, device):
        raise error("CUDA out of memory. Tried to allocate 2 GiB\nand more text")

    monkeypatch.setattr(fused_kernels, "_build_op", fail)
    with pytest.raises(MeasurementError, match=r"failed: CUDA out of memory. Tried to allocate 2 GiB$"):
        time_device([SHARD], CPU, QUICK, rng=np.random.default_rng(0))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["fused", "fused_uvm", "fused_uvm_caching"])
@pytest.mark.parametrize("fields", [{}, {"optimizer": "adam"}, {"weight_dtype": "bf16"}, {"weight_dtype": "fp16"}])
def test_cuda_variants(kernel, fields):
    shard = dataclasses.replace(SHARD, kernel=kernel, **fields)
    times = time_device([shard, shard], torch.device("cuda"), QUICK, rng=np.random.default_rng(0))
    assert times.ms.shape == (2, 2) and (times.ms > 0).all()
