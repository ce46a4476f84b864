import numpy as np
import pytest
import torch
from run_ranks import run_ranks

from torchrec_dreamshard.errors import MeasurementError
from torchrec_dreamshard.hardware import named_hardware
from torchrec_dreamshard.profiling.comms import (
    AllToAll,
    ReduceScatter,
    modelled_exchange_ms,
    output_values,
    time_exchange,
)
from torchrec_dreamshard.profiling.timing import TimingConfig
from torchrec_dreamshard.types import PlacementTask, ShardSpec

CPU = torch.device("cpu")
SHARDS = [ShardSpec(name=str(i), rows=9, dim=8, pooling_factor=2, batch_size=100, num_features=1 + i) for i in range(2)]


def test_output_values_are_column_sums_times_the_batch():
    sequence = ShardSpec(rows=9, dim=4, pooling_factor=2.5, batch_size=100, is_pooled=False)
    task = PlacementTask.uniform([*SHARDS, sequence], 3)
    assert output_values(task, (0, 2, 2)).tolist() == [800, 0, 1600 + 1000]


def test_modelled_exchange_holds_the_wait_and_grows_with_the_bytes():
    task = PlacementTask.uniform(SHARDS, 2, hardware=named_hardware("cpu"))
    forward, backward = modelled_exchange_ms(task, (0, 1), np.array([1.0, 3.0]))
    assert forward[0] == pytest.approx(forward[1] + 2)
    assert forward[1] == pytest.approx(backward[0]) and backward[0] == backward[1] > 0
    larger = PlacementTask.uniform([*SHARDS, *SHARDS], 2, hardware=named_hardware("cpu"))
    assert modelled_exchange_ms(larger, (0, 1, 0, 1), np.zeros(2))[1][0] > backward[0]


def _all_to_all(rank):
    exchange = AllToAll([6.0, 0.0, 3.0], CPU)
    exchange._output.fill_(rank + 1)
    exchange.forward()
    received = exchange._input.tolist()
    exchange._input.mul_(10)
    exchange.backward()
    return received, exchange._output.tolist()


@pytest.mark.distributed
def test_all_to_all_carries_each_ranks_share_there_and_back():
    results = run_ranks(_all_to_all, 3)
    for received, _ in results:
        assert received == [1.0, 1.0, 3.0]  # two values of rank 0, none of rank 1, one of rank 2
    assert [back for _, back in results] == [[10.0] * 6, [], [30.0] * 3]


def _reduce_scatter(rank):
    exchange = ReduceScatter(4.0, CPU)
    for peer, share in enumerate(exchange._shares):
        share.fill_(10 * rank + peer)
    exchange.forward()
    summed = exchange._own.tolist()
    exchange.backward()
    return summed, [share.tolist() for share in exchange._shares]


@pytest.mark.distributed
def test_reduce_scatter_sums_the_shares_and_all_gather_spreads_them():
    results = run_ranks(_reduce_scatter, 2)
    assert [summed for summed, _ in results] == [[10.0, 10.0], [12.0, 12.0]]
    assert results[0][1] == results[1][1] == [[10.0, 10.0], [12.0, 12.0]]


def _late(rank):
    config = TimingConfig(warmup=1, repeats=3)
    times = time_exchange(AllToAll([100.0, 100.0], CPU), CPU, config, delay_ms=200.0 * rank)
    return times.ms


@pytest.mark.distributed
def test_waiting_for_a_late_rank_is_part_of_the_forward_direction():
    early, late = run_ranks(_late, 2)
    assert early.shape == late.shape == (3, 2)
    assert (early[:, 0] > 150).all()  # of the 200 ms that the other comes late


def _refused(rank):
    with pytest.raises(MeasurementError, match="fp32, fp16, bf16.*'int8'"):
        AllToAll([1.0, 1.0], CPU, comms_dtype="int8")
    with pytest.raises(MeasurementError, match="2 ranks needs 2 column sums, got 3"):
        AllToAll([1.0, 1.0, 1.0], CPU)
    half = AllToAll([4.0, 4.0], CPU, comms_dtype="fp16")
    half.forward()
    return half._input.dtype == torch.float16


@pytest.mark.distributed
def test_precision_and_number_of_ranks_are_checked():
    assert run_ranks(_refused, 2) == [True, True]
