"""The store of measurements: an append-only file of JSON lines in which nothing measured is lost.

The first line is a header with the format's name and version, every other line one ``Measurement``. A line is
written whole and synced before ``append`` returns, under a file lock, so that several processes of one host can
share a store. What a killed process left half-written is dropped by the next reader or writer. A store keeps to the
device of its first measurement: different hardware belongs into different stores. ``compact`` turns a store into a
small read-only ``.jsonl.gz``.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from torchrec_dreamshard.measurement import Measurement
from torchrec_dreamshard.types import HardwareSpec

FORMAT = "torchrec_dreamshard.measurements"
VERSION = 1

_HEADER = (json.dumps({"format": FORMAT, "version": VERSION}) + "\n").encode()
_TAIL_BYTES = 1 << 16  # how far back one read looks for the end of the last whole line

logger = logging.getLogger(__name__)


class MeasurementStore:
    """Measurements in a file.

    Iterating reads the file from its start, so a store can be read while others append to it.

    Args:
        path: a ``.jsonl`` file (created by the first ``append``; a missing file reads as empty), or a
            ``.jsonl.gz`` written by ``compact``, which is read-only and must exist.

    Raises:
        ValueError: the name ends in neither, or the file is not a store of this version.
        FileNotFoundError: a ``.jsonl.gz`` that does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.read_only = self.path.name.endswith(".jsonl.gz")
        if not (self.read_only or self.path.name.endswith(".jsonl")):
            raise ValueError(f"a measurement store must be a .jsonl or .jsonl.gz file, got {self.path}")
        self._device = ""
        if self.read_only or self.path.exists():
            if self.path.exists() and not self.path.is_file():
                raise ValueError(f"a measurement store must be a regular file, and {self.path} is none")
            with self._open() as file:
                self._check_header(file)

    def check_device(self, device: str) -> None:
        """Raises if the store holds measurements of another device.

        Args:
            device: model of a device (``Provenance.device``).

        Raises:
            ValueError: it does.
        """
        if not self._device:
            first = next(iter(self), None)
            self._device = "" if first is None else first.provenance.device
        if self._device and device and device != self._device:
            raise ValueError(
                f"{self.path} holds measurements of {self._device!r}, and this device is {device!r}: "
                "keep different hardware in different stores"
            )

    def __iter__(self) -> Iterator[Measurement]:
        """Yields the measurements in the order of their appending.

        Raises:
            ValueError: a line is damaged (a torn last line of a ``.jsonl`` is dropped with a warning instead).
        """
        if not self.read_only and not self.path.exists():
            return
        with self._open() as file:
            if not self._check_header(file):
                return
            number = 1
            while line := self._read_line(file):
                number += 1
                if not line.endswith(b"\n"):
                    self._torn(number)
                    return
                yield self._parse(line, number)

    def append(self, measurement: Measurement) -> None:
        """Writes one measurement; when it returns, the line is on the disk.

        Args:
            measurement: what to keep.

        Raises:
            ValueError: the store is read-only, holds measurements of another device, or its file is not a store of
                this version.
            OSError: the line could not be written, a full disk say; every earlier measurement is intact.
        """
        if self.read_only:
            raise ValueError(f"{self.path} is read-only: append to a .jsonl store and compact it afterwards")
        line = _dump(measurement)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "ab+", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            end = self._whole_lines_end(file)
            self.check_device(measurement.provenance.device)
            data = line if end else _HEADER + line
            try:
                _write_all(file, data)
                os.fsync(file.fileno())
            except OSError as error:
                file.truncate(end)
                raise OSError(
                    error.errno,
                    f"could not append to the store ({error.strerror}); the measurements before it are intact, "
                    "free some space and start again",
                    str(self.path),
                ) from error

    def _open(self) -> BinaryIO:
        return gzip.open(self.path, "rb") if self.read_only else open(self.path, "rb")  # type: ignore[return-value]

    def _read_line(self, file: BinaryIO) -> bytes:
        try:
            return file.readline()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{self.path} is damaged ({error}): restore it from a copy") from error

    def _check_header(self, file: BinaryIO) -> bool:
        """Reads the first line; False when there is none yet (an empty file, or a torn header)."""
        line = self._read_line(file)
        if not self.read_only and _HEADER.startswith(line) and line != _HEADER:
            return False
        try:
            header = json.loads(line)
        except ValueError:
            header = None
        if not isinstance(header, dict) or header.get("format") != FORMAT:
            raise ValueError(f"{self.path} is not a measurement store: its first line is no header of {FORMAT}")
        if header.get("version") != VERSION:
            raise ValueError(
                f"{self.path} is a measurement store of version {header.get('version')!r}, expected {VERSION}: "
                "read it with the release that wrote it, or measure again"
            )
        return True

    def _parse(self, line: bytes, number: int) -> Measurement:
        try:
            return Measurement.from_dict(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path}, line {number}, is no measurement ({error}): remove or repair it") from error

    def _torn(self, number: int) -> None:
        logger.warning("%s: dropped a half-written last line (line %d)", self.path, number)

    def _whole_lines_end(self, file: Any) -> int:
        """Offset after the last whole line, having cut off what a killed writer left behind it."""
        size = file.seek(0, os.SEEK_END)
        start, newline = size, -1
        while start > 0 and newline < 0:
            start = max(0, start - _TAIL_BYTES)
            file.seek(start)
            newline = file.read(_TAIL_BYTES).rfind(b"\n")
        end: int = start + newline + 1
        file.seek(0)
        self._check_header(file)
        if end < size:
            logger.warning("%s: cut off a half-written last line of %d bytes", self.path, size - end)
            file.truncate(end)
        return end


def load_measurements(*paths: str | os.PathLike[str]) -> list[Measurement]:
    """All measurements of some stores; warns where different devices are described as the same hardware.

    Args:
        paths: ``.jsonl`` or ``.jsonl.gz`` stores.

    Raises:
        ValueError: not a store of this version, or damaged.
        FileNotFoundError: no such file.
    """
    for path in paths:
        if not Path(path).exists():
            raise FileNotFoundError(f"no measurement store at {path}")
    measurements = [measurement for path in paths for measurement in MeasurementStore(path)]
    devices: dict[HardwareSpec, Counter[str]] = {}
    for measurement in measurements:
        if measurement.provenance.device:
            devices.setdefault(measurement.task.hardware, Counter())[measurement.provenance.device] += 1
    for hardware, counts in devices.items():
        if len(counts) > 1:
            logger.warning(
                "measurements of different devices all say that their hardware is %r, and nothing learned of them can "
                "tell these devices apart: %s",
                hardware.name,
                ", ".join(f"{device} ({count})" for device, count in counts.most_common()),
            )
    return measurements


def compact(source: str | os.PathLike[str], destination: str | os.PathLike[str]) -> int:
    """Writes a store as a compressed, read-only one; equal stores give equal bytes.

    Args:
        source: any store.
        destination: the ``.jsonl.gz`` to write; replaced at once when it is complete.

    Returns:
        The number of measurements written.

    Raises:
        ValueError: ``destination`` is no ``.jsonl.gz``, or ``source`` is damaged.
        FileNotFoundError: no ``source``.
    """
    destination = Path(destination)
    if not destination.name.endswith(".jsonl.gz"):
        raise ValueError(f"a compact store must be a .jsonl.gz file, got {destination}")
    measurements = load_measurements(source)
    partial = destination.with_name(destination.name + ".partial")
    with open(partial, "wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
        file.write(_HEADER)
        file.writelines(_dump(measurement) for measurement in measurements)
    os.replace(partial, destination)
    return len(measurements)


def _dump(measurement: Measurement) -> bytes:
    return (json.dumps(measurement.to_dict(), separators=(",", ":"), allow_nan=False) + "\n").encode()


def _write_all(file: Any, data: bytes) -> None:
    """Writes every byte: a raw write may stop short when the disk fills up."""
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
