"""LoadGen's process: ``python -m blockflow.bench.mlperf.driver FOLDER``.

It has no torch, no scikit-learn and no hooks in it, only the client SDK, so that what LoadGen
measures is the system. Its standard output are lines of JSON: the counts so far. Its verdict on
itself is its exit status and ``driver.json``.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from blockflow.bench.mlperf.allowance import allowance_of
from blockflow.bench.mlperf.job import (
    CONNECT_S,
    JOB,
    LATENCIES,
    OUTCOME,
    QUERIES,
    READY_S,
    TASK,
    Job,
    read_inputs,
    whole_file,
    write_json,
)
from blockflow.bench.mlperf.settings import Mode, RunSettings, Scenario
from blockflow.bench.mlperf.sut import Array, Complete, Sut
from blockflow.bench.mlperf.tally import Tally
from blockflow.client import Client
from blockflow.core.errors import BlockFlowError

HEARTBEAT_S = 0.2
DONE, GIVEN_UP, UNUSABLE = 0, 3, 4
"""Exit statuses; ``UNUSABLE``: the run's files cannot be written."""

_NO_BOUND_MS = 1e6
_BEHIND = 1.25
"""Offline, LoadGen's one query is sized for so much more than was seen."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job of a folder."""
    (folder,) = (Path(a) for a in (sys.argv[1:] if argv is None else argv))
    job = Job.from_dict(json.loads((folder / JOB).read_text(encoding="utf-8")))
    data = read_inputs(Path(job.data), job.most)
    library = job.library({task: len(d.rows) for task, d in data.items()})
    allowance = allowance_of(job.settings)
    tally = Tally(library.tasks, job.settings.deadline_s, allowance=allowance)
    client = Client(job.address, connect_timeout_s=CONNECT_S, client_keys=job.client_keys or None)
    try:
        client.wait_ready(library.tasks, timeout_s=READY_S)
    except BlockFlowError as exc:
        tally.give_up(exc.code, exc.message)
        return leave(folder, tally)
    complete = completer(job.settings.logs_answers)
    sut = Sut(client, library, data, job.settings, tally, complete)
    over = threading.Event()
    watcher = threading.Thread(target=_watch, args=(folder, tally, over), daemon=True)
    watcher.start()
    drive(job.settings, len(library), sut, folder)
    over.set()
    watcher.join()
    client.close()
    return leave(folder, tally)


def drive(settings: RunSettings, samples: int, sut: Sut, folder: Path) -> None:
    """Let LoadGen drive ``sut`` and write its logs; returns when every sample is answered."""
    import mlperf_loadgen as lg

    def issue(queries: list[Any]) -> None:
        sut.issue([q.id for q in queries], [q.index for q in queries])

    def nothing(*_: object) -> None:
        """Queries are sent at once, and the data lie in memory: nothing to flush or to load."""

    logs = lg.LogSettings()
    logs.enable_trace = False
    logs.log_output.outdir = str(folder)
    logs.log_output.copy_summary_to_stdout = False
    system = lg.ConstructSUT(issue, nothing)
    library = lg.ConstructQSL(samples, samples, nothing, nothing)
    lg.StartTestWithLogSettings(system, library, loadgen_settings(lg, settings), logs)
    lg.DestroyQSL(library)
    lg.DestroySUT(system)


def loadgen_settings(lg: Any, settings: RunSettings) -> Any:
    """LoadGen's own settings; ``lg`` is its module."""
    s = lg.TestSettings()
    accuracy = settings.mode is Mode.ACCURACY
    s.mode = lg.TestMode.AccuracyOnly if accuracy else lg.TestMode.PerformanceOnly
    s.min_duration_ms = round(settings.min_duration_s * 1e3)
    s.min_query_count = settings.min_queries
    s.qsl_rng_seed = settings.seed
    s.sample_index_rng_seed = settings.seed + 1
    s.schedule_rng_seed = settings.seed + 2
    s.accuracy_log_rng_seed = settings.seed + 3
    s.accuracy_log_sampling_target = settings.logged
    s.performance_issue_unique = settings.unique
    share, expected_ns = settings.percentile, settings.expected_ms * 1e6
    match settings.scenario:
        case Scenario.SINGLE_STREAM:
            s.scenario = lg.TestScenario.SingleStream
            s.single_stream_target_latency_percentile = share
            s.single_stream_expected_latency_ns = expected_ns
        case Scenario.MULTISTREAM:
            s.scenario = lg.TestScenario.MultiStream
            s.multi_stream_target_latency_percentile = share
            s.multi_stream_expected_latency_ns = expected_ns
            s.multi_stream_samples_per_query = settings.samples_per_query
        case Scenario.SERVER:
            s.scenario = lg.TestScenario.Server
            s.server_target_latency_percentile = share
            s.server_target_qps = settings.rate
            s.server_target_latency_ns = round((settings.bound_ms or _NO_BOUND_MS) * 1e6)
        case Scenario.OFFLINE:
            s.scenario = lg.TestScenario.Offline
            s.offline_expected_qps = settings.rate * _BEHIND
    return s


def completer(logs_answers: bool) -> Complete:
    """Tells LoadGen which samples are answered, and with what if its log is to hold that."""
    import mlperf_loadgen as lg

    def complete(ids: Sequence[int], outputs: Sequence[Array | None]) -> None:
        if not logs_answers:
            lg.QuerySamplesComplete([lg.QuerySampleResponse(i, 0, 0) for i in ids])
            return
        # LoadGen copies the elements before it returns; ``outputs`` keeps them alive until then.
        lg.QuerySamplesComplete(
            [
                lg.QuerySampleResponse(i, 0, 0)
                if x is None
                else lg.QuerySampleResponse(i, x.ctypes.data, x.nbytes)
                for i, x in zip(ids, outputs, strict=True)
            ]
        )

    return complete


def _watch(folder: Path, tally: Tally, over: threading.Event) -> None:
    """Tell how far it is; end the process when the run is given up or nobody waits for it.

    LoadGen cannot be stopped from outside: leaving is the only way out of a run.
    """
    parent = os.getppid()
    while not over.wait(HEARTBEAT_S):
        heard = _tell(tally) and os.getppid() == parent
        if tally.given_up.is_set() or not heard:
            os._exit(leave(folder, tally) or GIVEN_UP)


def _tell(tally: Tally) -> bool:
    """Say how far it is; False where nobody reads it any more."""
    try:
        sys.stdout.write(json.dumps(tally.counts().to_dict()) + "\n")
        sys.stdout.flush()
    except OSError:
        return False
    return True


def leave(folder: Path, tally: Tally) -> int:
    """Write what the driver knows; the exit status.

    Where its files cannot be written the counts are told all the same, and why is said on standard
    error: which may lie on the same full disk.
    """
    with tally.at_rest():
        counts, blocks = tally.counts(), tally.blocks()
        # The prefix: a task may be called as one of numpy's own arguments.
        arrays: dict[str, Any] = {TASK + t: np.asarray(x) for t, x in tally.latencies().items()}
        arrays[QUERIES] = np.asarray(tally.queries_ms())
    try:
        with whole_file(folder / LATENCIES) as file:
            np.savez(file, **arrays)
        write_json(
            folder / OUTCOME,
            {
                "counts": counts.to_dict(),
                "given_up": {"code": tally.code, "why": tally.reason},
                "first_error": tally.first_error,
                "blocks": [asdict(b) for b in blocks],
            },
        )
    except OSError as exc:
        _tell(tally)
        with suppress(OSError):
            os.write(sys.stderr.fileno(), f"{exc}\n".encode())
        return UNUSABLE
    return GIVEN_UP if tally.given_up.is_set() else DONE


if __name__ == "__main__":
    # At once: a last flush of a standard error without room would change the status.
    os._exit(main())
