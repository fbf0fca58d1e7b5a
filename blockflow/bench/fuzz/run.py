"""``make fuzz``: a million malformed frames at every decoder and every socket of a running system.

A decoder fails when it raises anything but a typed error. The system fails when a process dies, a
good request is not answered in between, a message hits a defect, or a process's memory grows by
more than 32 MiB. The same seed sends the same frames; a failure names the seed and what was sent.
"""

from __future__ import annotations

import http.client
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq
from rich.console import Console

from blockflow.bench.demo.server import Server
from blockflow.bench.fuzz import figures as names
from blockflow.bench.fuzz.decoder import Decoder
from blockflow.bench.fuzz.decoders import DIMS, decoders
from blockflow.bench.fuzz.mutate import Mutator
from blockflow.bench.fuzz.sockets import Target, targets
from blockflow.bench.grid import Grid
from blockflow.bench.interrupts import orderly
from blockflow.bench.options import count, make_parser, result_path
from blockflow.bench.results import Figure, ResultFile, make_command
from blockflow.client import Client
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

MIB = 1024 * 1024
GROWTH_BYTES = 32 * MIB
ROUNDS = 20
"""How often a good request is sent in between."""

TASK = "t"
TOPOLOGY = {"blocks": ["a", "b"], "tasks": {TASK: ["a", "b"]}}
_X = np.arange(4, dtype=np.float32).reshape(DIMS)
_FRAMES, _DECODER_FRAMES = 1_000_000, 100_000
_SHOWN_BYTES = 200
_REQUEST_S = 30.0
_WARM = 0.1
"""Part of the frames after which memory is first looked at: buffers and caches have filled."""

Status = Callable[[], Mapping[str, Any]]


@dataclass(slots=True)
class Report:
    """What a run found: ``frames`` sent by target, ``failures`` in words."""

    frames: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    growth: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def fuzz_decoders(frames: int, seed: int, chosen: Mapping[str, Decoder]) -> Report:
    """``frames`` at each of the ``chosen`` decoders, in this process."""
    report = Report()
    logging.disable()  # some say in the log what they refuse
    try:
        for name, decoder in chosen.items():
            _fuzz_decoder(name, decoder, frames, seed, report)
    finally:
        logging.disable(logging.NOTSET)
    return report


def _fuzz_decoder(name: str, decoder: Decoder, frames: int, seed: int, report: Report) -> None:
    begin = time.perf_counter()
    refusals: tuple[type[Exception], ...] = (BlockFlowError, *decoder.errors)
    for frame in Mutator(decoder.valid, seed).frames(frames):
        try:
            decoder.decode(frame)
        except refusals:
            pass
        except Exception as exc:
            what = f"{exc!r} for {frame[:_SHOWN_BYTES]!r}"
            report.failures.append(f"decoder {name} (seed {seed}): {what}")
            break
    report.frames[name] = frames
    report.seconds[name] = time.perf_counter() - begin


def fuzz_system(frames: int, seed: int, status: Status, rounds: int = ROUNDS) -> Report:
    """``frames`` in all at the sockets of the system that ``status`` tells of."""
    report = Report()
    before = status()
    ours = processes(before)
    sizes: dict[str, int] = {}
    with Client(before["dispatcher"]["clients"][0], connect_timeout_s=_REQUEST_S) as client:
        with targets(before, seed) as found:
            whole = sum(t.weight for t in found)
            for turn in range(rounds):
                if turn == max(1, int(_WARM * rounds)):
                    sizes = {name: _rss(pid) for name, pid in ours.items()}
                for target in found:
                    count = max(1, int(frames * target.weight / whole / rounds))
                    _strike(target, count, seed, report)
                if not _serves(client, report):
                    break
        _serves(client, report)  # closing has sent what was queued
    after = status()
    judge(ours, processes(after), sizes, report)
    defects = after["dispatcher"]["kpi"].get("events", {}).get("defects", 0)
    if defects:
        report.failures.append(f"{defects} messages hit a defect: see the log")
    return report


def processes(status: Mapping[str, Any]) -> dict[str, int]:
    """Name -> pid of the processes of a system."""
    members = [status["dispatcher"], *status["workers"]]
    return {"up": status["manager"]["pid"], **{str(m["name"]): m["pid"] for m in members}}


def _strike(target: Target, count: int, seed: int, report: Report) -> None:
    begin, sent = time.perf_counter(), 0
    try:
        for frame in target.mutator.frames(count):
            target.send(frame)
            sent += 1
    except (OSError, zmq.ZMQError) as exc:
        report.failures.append(f"{target.name} (seed {seed}) takes nothing more: {exc!r}")
    report.frames[target.name] = report.frames.get(target.name, 0) + sent
    report.seconds[target.name] = report.seconds.get(target.name, 0.0) + time.perf_counter() - begin


def _serves(client: Client, report: Report) -> bool:
    """Whether a good request is answered; credits that a flood has taken come back in time."""
    end = time.monotonic() + _REQUEST_S
    while True:
        try:
            same = np.array_equal(client.infer(TASK, _X, deadline_s=_REQUEST_S).value, _X)
        except BlockFlowError as exc:
            if exc.code == "OVERLOADED" and time.monotonic() < end:
                time.sleep((exc.retry_after_ms or 50) / 1000)
                continue
            report.failures.append(f"a good request failed: {exc}")
            return False
        if not same:
            report.failures.append("a good request got a wrong answer")
        return same


def judge(
    before: Mapping[str, int], after: Mapping[str, int], sizes: Mapping[str, int], report: Report
) -> None:
    """Compare the processes (name -> pid) and their memory with what they were.

    ``sizes`` are resident bytes by name; without them memory is not judged.
    """
    if before != after:
        report.failures.append(f"processes have changed: {before} -> {after}")
        return
    for name, size in sizes.items():
        report.growth[name] = grown = _rss(after[name]) - size
        if grown > GROWTH_BYTES:
            report.failures.append(f"{name} has grown by {grown / MIB:.0f} MiB")


def _rss(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


# --- the command ----------------------------------------------------------------------------------


@contextmanager
def running_system(folder: Path) -> Iterator[Status]:
    """A system of echo blocks in processes of its own."""
    repository = BlockRepository(folder / "blocks")
    for name in TOPOLOGY["blocks"]:
        save_echo(repository, name, TensorSpec("float32", ("rows", DIMS[1])))
    with Server(folder / "blocks", folder, JsonRest) as server:
        server.start()
        server.rest.post("/v1/system-update", TOPOLOGY, timeout_s=_REQUEST_S)
        yield lambda: dict(server.rest.get("/v1/status"))


class JsonRest:
    """JSON in and out."""

    def __init__(self, url: str) -> None:
        self._host, _, self._port = url.removeprefix("http://").rpartition(":")

    def get(self, path: str) -> Any:
        return self._call("GET", path, None, _REQUEST_S)

    def post(self, path: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        return self._call("POST", path, json.dumps(body or {}), timeout_s or _REQUEST_S)

    def _call(self, method: str, path: str, body: str | None, timeout_s: float) -> Any:
        connection = http.client.HTTPConnection(self._host, int(self._port), timeout=timeout_s)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            document = json.loads(answer.read())
        finally:
            connection.close()
        if answer.status >= 400:
            raise BlockFlowError("INTERNAL", f"{method} {path}: {document}")
        return document


def grid(report: Report) -> Grid:
    """Frames and time per target."""
    rows = [
        (name, f"{count:,}", f"{count / max(report.seconds[name], 1e-9):,.0f}")
        for name, count in report.frames.items()
    ]
    return Grid("malformed frames", ("target", "frames", "per second"), rows, frozenset({"target"}))


def growth_grid(report: Report) -> Grid:
    """Memory per process."""
    rows = [(name, f"{size / MIB:+.1f}") for name, size in report.growth.items()]
    return Grid("growth of memory", ("process", "MiB"), rows, frozenset({"process"}))


def figures(decoded: Report, system: Report) -> list[Figure]:
    """For the result file: what was sent, what failed, what grew."""

    def figure(name: str, mode: str, value: float, unit: str, n: int) -> Figure:
        return Figure.of(name, mode, float(value), unit, n)

    out = [
        figure(names.FRAMES, f"decoder {name}", count, "frames", count)
        for name, count in decoded.frames.items()
    ]
    out += [
        figure(names.FRAMES, name, count, "frames", count) for name, count in system.frames.items()
    ]
    sent = sum(system.frames.values())
    failed = len(decoded.failures) + len(system.failures)
    return [
        figure(names.FRAMES, "all decoders", sum(decoded.frames.values()), "frames", sent),
        figure(names.FRAMES, "all", sent, "frames", sent),
        figure(names.FAILURES, "all", failed, "1", sent),
        *out,
        *(figure(names.GROWTH, name, b / MIB, "MiB", 1) for name, b in system.growth.items()),
    ]


@orderly
def main(arguments: list[str]) -> int:
    """Run it; the exit status is 1 when something failed."""
    parser = make_parser("fuzz.run", __doc__, name="fuzz")
    parser.add_argument(
        "--frames", type=count, default=_FRAMES, help=f"at the sockets, in all (default {_FRAMES})"
    )
    parser.add_argument(
        "--decoder-frames",
        type=count,
        default=_DECODER_FRAMES,
        help=f"at each decoder (default {_DECODER_FRAMES})",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the frames (default 1)")
    args = parser.parse_args(arguments)
    console = Console(highlight=False)
    report, found = fuzz_decoders(args.decoder_frames, args.seed, decoders()), Report()
    console.print(grid(report).rich())
    if not report.failures:
        with (
            tempfile.TemporaryDirectory(prefix="blockflow-fuzz-") as folder,
            running_system(Path(folder)) as status,
        ):
            found = fuzz_system(args.frames, args.seed, status)
        console.print(grid(found).rich())
        console.print(growth_grid(found).rich())
    failures = [*report.failures, *found.failures]
    for failure in failures:
        console.print(f"failed: {failure}", style="red")
    if not failures:
        console.print(f"nothing failed (seed {args.seed})", style="green")
    made = figures(report, found)
    whole = args.frames >= _FRAMES and args.decoder_frames >= _DECODER_FRAMES
    path = result_path(args, "fuzz", whole=whole)
    ResultFile(path, "fuzz", make_command("fuzz", arguments)).write(made)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
