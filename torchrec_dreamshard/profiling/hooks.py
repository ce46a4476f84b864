"""Recording the embedding costs of a running job, so that it improves its own next plan.

``record_costs(dmp, store)`` attaches to a live ``DistributedModelParallel``. Per step and rank it times the
forward and the backward pass of the fused kernels and both directions of the exchange; windows of steps are
gathered from all ranks and appended to the store as a ``Measurement`` whose placement is the plan that runs.
An exchange counts for as long as the rank is held up by it: time that a pipeline hides is not a cost of the step.
Uniform shardings (row-wise, data-parallel) become the devices' background load. Works with TorchRec 1.8, by duck
typing.
"""

from __future__ import annotations

import datetime
import logging
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import distributed, nn

from torchrec_dreamshard.hardware import named_hardware
from torchrec_dreamshard.measurement import TERMS, CostBreakdown, Measurement, Provenance
from torchrec_dreamshard.profiling.devices import device_name, host_name, installed_versions, named_device
from torchrec_dreamshard.profiling.live_model import (
    KernelLookups,
    LiveSharding,
    device_of,
    find_shardings,
    tensor_of,
)
from torchrec_dreamshard.samples import MeasurementStore
from torchrec_dreamshard.types import DeviceSpec, HardwareSpec, PlacementTask, ShardSpec
from torchrec_dreamshard.validation import integer

_FORWARD, _FORWARD_COMMS, _BACKWARD_COMMS, _BACKWARD = range(len(TERMS))
_MS_DIGITS = 4

logger = logging.getLogger(__name__)


@dataclass
class _Step:
    """Spans of one step: (term, whether the sharding is whole, start, end)."""

    spans: list[tuple[int, bool, Any, Any]] = field(default_factory=list)


@dataclass
class _RankWindow:
    """What one rank brings to a measurement."""

    host: str
    device: str
    shards: list[ShardSpec]
    ms: np.ndarray[Any, np.dtype[np.float64]]
    """``N x 5``: the four terms and the uniform load of every step."""


class CostRecorder:
    """Records the costs of a live model; made by ``record_costs``.

    All ranks attach, step and detach alike: windows are gathered by a collective call at the start of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        store: MeasurementStore,
        *,
        steps_per_record: int = 50,
        hardware: HardwareSpec | None = None,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        self._model = model
        self._store = store
        self._steps_per_record = integer("CostRecorder", "steps_per_record", steps_per_record, 1)
        self._device = device_of(model)
        self._hardware = hardware or named_hardware(named_device(self._device))
        self._group = group if group is not None else getattr(getattr(model, "_env", None), "process_group", None)
        self._handles: list[Any] = []
        self._lookups: list[KernelLookups] = []
        self._steps: list[_Step] = []
        self._step: _Step | None = None

    def __enter__(self) -> CostRecorder:
        """Attaches."""
        self.attach()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Detaches; after an error the open window is dropped, as the other ranks may not come to gather it."""
        self.detach(gather=kind is None)

    def attach(self) -> None:
        """Starts recording with the next step.

        Raises:
            ValueError: attached already, the model has no sharded embedding module, or the store holds measurements
                of another device.
        """
        if self._handles:
            raise ValueError("this recorder is attached already: detach it first")
        self._store.check_device(device_name(self._device))
        shardings = find_shardings(self._model)
        self._handles.append(self._model.register_forward_pre_hook(self._on_step))
        for sharding in shardings:
            for kernel in sharding.kernels:
                self._watch_kernel(kernel, sharding)
            self._watch_exchange(sharding)

    def detach(self, *, gather: bool = True) -> None:
        """Stops recording and leaves the model as it was.

        Args:
            gather: write the open window, a collective call of all ranks; otherwise drop it.
        """
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._close_step()
        if gather:
            self._record()
        self._steps.clear()
        self._lookups.clear()

    def _on_step(self, *_: object) -> None:
        self._close_step()
        if len(self._steps) >= self._steps_per_record:
            self._record()
        self._step = _Step()

    def _close_step(self) -> None:
        if self._step is not None:
            self._steps.append(self._step)
        self._step = None

    def _watch_kernel(self, kernel: nn.Module, sharding: LiveSharding) -> None:
        lookups = KernelLookups(kernel)
        if sharding.is_whole:
            self._lookups.append(lookups)
        op: Any = kernel.emb_module
        started: list[Any] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._step is not None and sharding.is_whole:
                lookups.note(kwargs)
            started.append(self._mark())

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._span(_FORWARD, sharding, started.pop())
            tensor = tensor_of(output)
            if tensor is not None:
                self._watch_node(tensor.grad_fn, _BACKWARD, sharding)

        self._handles.append(op.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(op.register_forward_hook(after))

    def _watch_exchange(self, sharding: LiveSharding) -> None:
        started: list[Any] = []

        def before(*_: object) -> None:
            started.append(self._mark())

        def after(_: nn.Module, args: tuple[Any, ...], awaitable: Any) -> None:
            self._span(_FORWARD_COMMS, sharding, started.pop())
            wait = awaitable._wait_impl

            def timed_wait() -> Any:
                start = self._mark()
                output = wait()
                self._span(_FORWARD_COMMS, sharding, start)
                self._watch_backward_exchange(output, sharding)
                return output

            awaitable._wait_impl = timed_wait  # an object of this step only

        self._handles.append(sharding.exchange.register_forward_pre_hook(before))
        self._handles.append(sharding.exchange.register_forward_hook(after))

    def _watch_backward_exchange(self, output: Any, sharding: LiveSharding) -> None:
        """TorchRec's autograd has two nodes: "Wait" starts the backward exchange, "Req" before it waits for it."""
        tensor = tensor_of(output)
        node = tensor.grad_fn if tensor is not None else None
        for _ in range(2):
            if node is not None and node.name().endswith(("WaitBackward", "ReqBackward")):
                self._watch_node(node, _BACKWARD_COMMS, sharding)
                node = node.next_functions[0][0] if node.next_functions else None

    def _watch_node(self, node: Any, term: int, sharding: LiveSharding) -> None:
        started: list[Any] = []
        node.register_prehook(lambda grads: started.append(self._mark()))
        node.register_hook(lambda inputs, outputs: self._span(term, sharding, started.pop()))

    def _mark(self) -> Any:
        """A point in time: nanoseconds on a cpu, an event in the stream on cuda."""
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _span(self, term: int, sharding: LiveSharding, start: Any) -> None:
        if self._step is not None:
            self._step.spans.append((term, sharding.is_whole, start, self._mark()))

    def _record(self) -> None:
        """Gathers the window of every rank; rank 0 appends it to the store."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        ms = np.zeros((len(self._steps), len(TERMS) + 1))
        for row, step in enumerate(self._steps):
            for term, is_whole, start, end in step.spans:
                elapsed_ms = (end - start) / 1e6 if isinstance(start, int) else start.elapsed_time(end)
                ms[row, term if is_whole else len(TERMS)] += elapsed_ms
        self._steps.clear()
        shards = [shard for lookups in self._lookups for shard in lookups.shards()]
        windows = self._gather(_RankWindow(host_name(), device_name(self._device), shards, ms))
        measurement = self._measurement(windows) if windows is not None else None
        if measurement is not None:
            try:
                self._store.append(measurement)
            except (OSError, ValueError) as error:  # the job is worth more than its records
                logger.error("the costs of %d steps were not recorded: %s", measurement.provenance.repeats, error)

    def _gather(self, window: _RankWindow) -> list[_RankWindow] | None:
        """All ranks' windows on rank 0, None elsewhere."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return [window]
        is_first = distributed.get_rank(self._group) == 0
        found: list[Any] = [None] * distributed.get_world_size(self._group)
        distributed.gather_object(window, found if is_first else None, group=self._group, group_dst=0)
        return found if is_first else None

    def _measurement(self, windows: list[_RankWindow]) -> Measurement | None:
        shards = tuple(shard for window in windows for shard in window.shards)
        num_steps = min(len(window.ms) for window in windows)
        if not shards or num_steps == 0:
            return None
        hosts = [window.host for window in windows]
        ms = np.stack([window.ms[:num_steps] for window in windows])
        medians = np.median(ms, axis=1)
        devices = tuple(
            DeviceSpec(host=hosts.index(window.host), background_ms=float(background))
            for window, background in zip(windows, medians[:, -1], strict=True)
        )
        terms = dict(zip(TERMS, medians.T, strict=False))
        if not ms[:, :, _BACKWARD].any():  # an evaluation: there is no backward pass
            terms = {name: terms[name] for name in (TERMS[_FORWARD], TERMS[_FORWARD_COMMS])}
        return Measurement(
            task=PlacementTask(shards, devices, self._hardware),
            placement=tuple(rank for rank, window in enumerate(windows) for _ in window.shards),
            cost=CostBreakdown(**terms, background_ms=medians[:, -1] if medians[:, -1].any() else None),
            provenance=self._provenance(windows, ms),
        )

    def _provenance(self, windows: list[_RankWindow], ms: np.ndarray[Any, np.dtype[np.float64]]) -> Provenance:
        return Provenance(
            host=socket.gethostname(),
            device=", ".join(sorted({window.device for window in windows})),
            profiler="record_costs",
            versions=installed_versions(),
            time=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            repeats=ms.shape[1],
            details={name: ms[:, :, term].round(_MS_DIGITS).tolist() for term, name in enumerate(TERMS)}
            | {"hosts": [window.host for window in windows]},
        )


def record_costs(
    model: nn.Module,
    store: MeasurementStore,
    *,
    steps_per_record: int = 50,
    hardware: HardwareSpec | None = None,
    group: distributed.ProcessGroup | None = None,
) -> CostRecorder:
    """Records the embedding costs of a live model into a store.

    ::

        with record_costs(dmp, MeasurementStore("job.jsonl")):
            train(dmp)

    Args:
        model: a ``DistributedModelParallel`` that trains or evaluates.
        store: rank 0 appends to it; the other ranks' is not touched. A record that cannot be written (a full disk) is
            lost with a logged error, and the job goes on.
        steps_per_record: steps whose medians make one measurement (all of them are kept in its provenance).
        hardware: what the measurements say about the devices; None for the closest named device.
        group: the ranks of the model; None for the model's own.

    Returns:
        A context manager; its ``attach`` and ``detach`` can be called instead.
    """
    return CostRecorder(model, store, steps_per_record=steps_per_record, hardware=hardware, group=group)
