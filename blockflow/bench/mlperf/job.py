"""Job: what LoadGen's process is told, and what it leaves behind: plain files of a run's folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from blockflow.bench.mlperf.data import Array, Inputs
from blockflow.bench.mlperf.library import Library
from blockflow.bench.mlperf.settings import Mode, RunSettings
from blockflow.bench.mlperf.sut import TaskData
from blockflow.bench.options import nonsense
from blockflow.core.errors import make_error

TASK, QUERIES = "task.", "queries"
"""Names in the file of latencies: a task's, with its own name behind it, and whole queries'."""

JOB, OUTCOME, LATENCIES, DRIVER_LOG = "job.json", "driver.json", "latencies.npz", "driver.log"
SUMMARY_LOG, DETAIL_LOG = "mlperf_log_summary.txt", "mlperf_log_detail.txt"
ACCURACY_LOG = "mlperf_log_accuracy.json"

CONNECT_S = 5.0
READY_S = 10.0
"""A system that answered a moment ago is not waited for any longer."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OUT = "make room, or name another folder with --out"
_PROBE = "room"
_PROBE_BYTES = 1 << 16

_ALL = "all"
"""In a file of rows that all have the same dims."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run of LoadGen's process.

    Attributes:
        address: of the Dispatcher.
        client_keys: this client's key file; '' for none.
        data: folder that :func:`save_inputs` wrote.
        weights: task -> how often it is asked.
        most: task -> rows that one request may bring.
    """

    address: str
    client_keys: str
    data: str
    weights: Mapping[str, int]
    most: Mapping[str, int]
    settings: RunSettings

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Job:
        """Of what ``asdict`` has made of one, and JSON of that."""
        return cls(**{**data, "settings": RunSettings.from_dict(data["settings"])})

    def library(self, rows: Mapping[str, int]) -> Library:
        """What the sample numbers stand for; ``rows`` counts each task's data."""
        if self.settings.mode is Mode.ACCURACY or self.settings.unique:
            return Library.once(rows)
        return Library.weighted(rows, self.weights, self.settings.per_query)


def save_inputs(inputs: Mapping[str, Inputs], folder: Path) -> None:
    """Write every task's rows for LoadGen's process; tasks with the same rows share a file.

    Raises:
        SystemError_: NO_SPACE.
    """
    index: dict[str, dict[str, str]] = {}
    written: dict[tuple[int, ...], str] = {}
    with disk(folder):
        for task, found in inputs.items():
            key = tuple(id(r) for r in found.rows)
            if key not in written:
                written[key] = f"{len(written)}.npz"
                arrays: dict[str, Any] = {str(i): row for i, row in enumerate(found.rows)}
                if len({row.shape for row in found.rows}) == 1:  # quicker to read by far
                    arrays = {_ALL: np.concatenate(found.rows)}
                np.savez(folder / written[key], **arrays)
            index[task] = {"file": written[key], "dtype": found.dtype}
        write_json(folder / "index.json", index)


def read_inputs(folder: Path, most: Mapping[str, int]) -> dict[str, TaskData]:
    """Inverse of :func:`save_inputs`."""
    index = json.loads((folder / "index.json").read_text(encoding="utf-8"))
    files: dict[str, list[Array]] = {}
    for entry in index.values():
        if entry["file"] not in files:
            with np.load(folder / entry["file"], allow_pickle=False) as found:
                files[entry["file"]] = _rows(found)
    return {t: TaskData(files[e["file"]], e["dtype"], most[t]) for t, e in index.items()}


def _rows(found: Mapping[str, Array]) -> list[Array]:
    if _ALL in found:
        whole = found[_ALL]
        return [whole[i : i + 1] for i in range(len(whole))]
    return [found[str(i)] for i in range(len(found))]


def write_json(path: Path, document: Any) -> None:
    """Write it whole or not at all."""
    with whole_file(path) as file:
        file.write((json.dumps(document, indent=2) + "\n").encode())


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its name when it is whole; what there was room for is removed else."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def disk(where: Path, hint: str = _OUT) -> Iterator[None]:
    """Turns what goes wrong on writing into a typed error with this remedy; other errors pass.

    Raises:
        BlockFlowError: NO_SPACE for a full disk, else INVALID_REQUEST.
    """
    try:
        yield
    except OSError as exc:
        raise make_error(
            "NO_SPACE" if exc.errno in _FULL else "INVALID_REQUEST",
            f"cannot write: {exc.strerror or exc}",
            where=str(exc.filename or where),
            hint=hint,
        ) from exc


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A call's own folder, which no other call takes meanwhile. It is made if it is not there, and
    goes again if nothing comes into it.

    Runs have the same names in every call: with two of them one would read the other's logs as its
    own, and say VALID of figures that are not its own.

    Raises:
        BlockFlowError: INVALID_REQUEST where another call has it, or it cannot be made; NO_SPACE.
    """
    made = not folder.exists()
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise nonsense(
                "another call of `blockflow bench` writes there",
                str(folder),
                "wait for its end, or name another folder with --out",
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        if made:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        os.close(held)


def is_full(folder: Path) -> bool:
    """Whether a small file has no room there: a quota or a limit tells itself in no other way."""
    try:
        with whole_file(folder / _PROBE) as file:
            file.write(bytes(_PROBE_BYTES))
        (folder / _PROBE).unlink()
    except OSError as exc:
        return exc.errno in _FULL
    return False
