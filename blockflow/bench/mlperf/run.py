"""One run: LoadGen's process is started, watched, and its files are read. It never hangs."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from blockflow.bench.mlperf.accuracy import LABELS
from blockflow.bench.mlperf.detail_log import DetailLog, read_log
from blockflow.bench.mlperf.driver import DONE, GIVEN_UP, UNUSABLE
from blockflow.bench.mlperf.job import (
    ACCURACY_LOG,
    DETAIL_LOG,
    DRIVER_LOG,
    JOB,
    LATENCIES,
    OUTCOME,
    QUERIES,
    SUMMARY_LOG,
    TASK,
    Job,
    disk,
    is_full,
    write_json,
)
from blockflow.bench.mlperf.result import RunResult, interrupted
from blockflow.bench.mlperf.settings import RunSettings, Scenario
from blockflow.bench.mlperf.tally import Counts
from blockflow.bench.mlperf.verdict import judge
from blockflow.client.collector import BlockMeans
from blockflow.core.errors import BlockFlowError, make_error
from blockflow.engine.extras import how_to_install

START_S = 60.0
"""LoadGen's process imports, reads its data and prepares its queries before the first one."""

LEAST_FREE = 64 << 20
"""Bytes that have to be free for the logs before a run."""

LEAVE_S = 10.0
"""For LoadGen's process to write what it knows, once it was told to leave."""

POLL_S = 0.25
"""Of its output: progress is shown also while there is none."""

_GAPS = 20.0
"""Poisson arrivals are so many mean gaps apart once in 500 million times."""

_TAIL_LINES, _TAIL_BYTES = 15, 1 << 14

Progress = Callable[[Counts], None]


def check_loadgen() -> None:
    """Raise MISSING_EXTRA unless LoadGen is installed."""
    if find_spec("mlperf_loadgen") is None:
        raise make_error(
            "MISSING_EXTRA",
            "the load generator mlcommons-loadgen is not installed",
            hint=how_to_install("bench"),
        )


def run(
    job: Job, folder: Path, progress: Progress, *, patience_s: float | None = None
) -> RunResult:
    """Do one run in a process of its own.

    Args:
        job: what to do.
        folder: gets the logs; made if it is not there.
        progress: called with the counts, several times a second.
        patience_s: without any sample's end for so long the process is killed; by default
            :func:`patience_of` the run.

    Returns:
        the result, also of a run that broke off: its ``error`` says why. Ctrl-C is such an error,
        CANCELLED; a second one, while LoadGen's process writes what it knows, is raised.

    Raises:
        SystemError_: NO_SPACE, MISSING_EXTRA: nothing was measured.
    """
    check_loadgen()
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < LEAST_FREE:
            raise make_error(
                "NO_SPACE",
                f"{free >> 20} MiB free for the logs, {LEAST_FREE >> 20} are needed",
                where=str(folder),
                hint="free some space, or name another folder with --out",
            )
        for name in (OUTCOME, LATENCIES, DETAIL_LOG, SUMMARY_LOG, ACCURACY_LOG, LABELS):
            (folder / name).unlink(missing_ok=True)  # of an earlier run
        write_json(folder / JOB, asdict(job))
    patience = patience_of(job.settings) if patience_s is None else patience_s
    said = folder / DRIVER_LOG
    with disk(folder):
        said.write_bytes(b"")  # not what an earlier run had to say
    with disk(folder), said.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "blockflow.bench.mlperf.driver", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C comes here, and this function ends it
        )
    last, hung, stopped = Counts(), False, False
    try:
        try:
            last, hung = _follow(process, progress, patience, said)
        except KeyboardInterrupt:
            stopped = True
            if process.stdout is not None:
                process.stdout.close()  # nobody waits for it: it writes what it knows, and leaves
        with suppress(subprocess.TimeoutExpired):
            process.wait(LEAVE_S if stopped else START_S)
    finally:
        # However this function is left, the process is not.
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    why = Stopped(patience if hung else 0.0, stopped)
    return read_run(job.settings, folder, process.returncode, last, why)


def patience_of(settings: RunSettings) -> float:
    """Seconds without any sample's end after which a run hangs: twice a request's deadline, the
    time of a start, and in the server scenario any time in which nobody may have asked."""
    quiet_s = _GAPS / settings.rate if settings.scenario is Scenario.SERVER else 0.0
    return 2 * settings.deadline_s + START_S + quiet_s


def _follow(
    process: subprocess.Popen[bytes], progress: Progress, patience_s: float, log: Path
) -> tuple[Counts, bool]:
    """Read its lines until it closes them; the last counts, and whether it had to be killed.

    LoadGen's C++ writes where it likes: lines that are no counts go into the log.
    """
    if process.stdout is None:
        raise ValueError("the process has no pipe")
    fd, buffer, counts = process.stdout.fileno(), b"", Counts()
    last = time.monotonic()
    while True:
        if not select.select([fd], [], [], POLL_S)[0]:
            progress(counts)
        else:
            data = os.read(fd, 1 << 16)
            if not data:
                return counts, False
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                now = read_counts(line)
                if now is None:
                    with suppress(OSError), log.open("ab") as file:
                        file.write(line + b"\n")
                    continue
                if (now.answered, now.failures) != (counts.answered, counts.failures):
                    last = time.monotonic()
                counts = now
            progress(counts)
        if time.monotonic() - last > patience_s:
            process.kill()
            return counts, True


def read_counts(line: bytes) -> Counts | None:
    """The counts of a line of the driver's; None of a line that is something else."""
    try:
        return Counts.from_dict(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


@dataclass(frozen=True, slots=True)
class Stopped:
    """Why a run was ended from outside: it made no progress for ``hung_s`` (0: it did not hang),
    or the user has interrupted it."""

    hung_s: float = 0.0
    interrupted: bool = False


BY_ITSELF = Stopped()
"""It was not stopped."""


def read_run(
    settings: RunSettings, folder: Path, status: int, last: Counts, stopped: Stopped = BY_ITSELF
) -> RunResult:
    """The result of a run from what it left in its folder.

    Args:
        settings: of the run.
        folder: with LoadGen's logs and the driver's.
        status: the driver's exit status.
        last: counts, where the driver left none.
        stopped: whether it was ended, and why.
    """
    log = read_log(_text(folder / DETAIL_LOG))
    told = _outcome(folder)
    counts = Counts.from_dict(told["counts"]) if told else last
    blocks = tuple(BlockMeans(**b) for b in told.get("blocks", ()))
    latencies, queries_ms = _latencies(folder)
    error = _error(folder, settings, status, log, told, stopped)
    broken = "" if error is None else f"the run broke off: {error.message}"
    verdict = judge(settings, log, counts, latencies, broken, queries_ms)
    return RunResult(folder, settings, verdict, counts, blocks, latencies, error)


def _error(
    folder: Path,
    settings: RunSettings,
    status: int,
    log: DetailLog,
    told: Mapping[str, Any],
    stopped: Stopped,
) -> BlockFlowError | None:
    """Why the run broke off, if it did."""
    where = str(folder)
    if stopped.interrupted:
        return interrupted(where)
    if stopped.hung_s:
        return make_error(
            "TIMEOUT",
            f"no answer and no failure for {stopped.hung_s:g} s; the run was ended",
            where=where,
            hint=f"{DRIVER_LOG} and LoadGen's logs lie there",
        )
    if status == GIVEN_UP and told:
        why = told["given_up"]
        return make_error(str(why["code"]), f"given up: {why['why']}", where=where)
    tail = _tail(folder / DRIVER_LOG)
    log_broke_off = status == DONE and not log.is_whole(settings.mode)
    if status == UNUSABLE or log_broke_off or (not told and is_full(folder)):
        what = "LoadGen's log breaks off" if log_broke_off else "the run's files have no room"
        return make_error(
            "NO_SPACE",
            f"{what}: " + (" ".join(tail) or "they could not be written"),
            where=where,
            hint="free some space, or name another folder with --out",
        )
    if status != DONE:
        return make_error(
            "INTERNAL", f"LoadGen's process ended with {status}:\n" + "\n".join(tail), where=where
        )
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _tail(path: Path) -> list[str]:
    """The last lines of what a process had to say, however much it was."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace").splitlines()[-_TAIL_LINES:]
    except OSError:
        return []


def _outcome(folder: Path) -> dict[str, Any]:
    """The process's own account; empty if it left none."""
    try:
        found: dict[str, Any] = json.loads(_text(folder / OUTCOME) or "{}")
    except ValueError:
        return {}
    return found


def _latencies(folder: Path) -> tuple[dict[str, list[float]], list[float]]:
    """Milliseconds per task, and of whole queries."""
    try:
        with np.load(folder / LATENCIES, allow_pickle=False) as found:
            tasks = {
                name.removeprefix(TASK): found[name].tolist()
                for name in found.files
                if name.startswith(TASK)
            }
            return tasks, found[QUERIES].tolist()
    except (OSError, ValueError, EOFError, KeyError, BadZipFile):
        return {}, []
