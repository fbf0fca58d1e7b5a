"""The demo from start to end: train, export, serve, measure, report, and leave nothing behind."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from blockflow.bench.canvas import new_page
from blockflow.bench.demo import blocks, picture
from blockflow.bench.demo.data import HELD_OUT, TASKS, Digits, load_data
from blockflow.bench.demo.measure import (
    Deployment,
    TaskFigures,
    age_s,
    measure_joint,
    measure_memory,
    measure_task,
)
from blockflow.bench.demo.report import figures, print_report
from blockflow.bench.demo.server import Connect, Leftovers, Rest, Server
from blockflow.bench.interrupts import unbroken
from blockflow.bench.results import ResultFile, fingerprint
from blockflow.client import Client
from blockflow.core.errors import make_error
from blockflow.repository.repository import BlockRepository

MODULAR, ONE_WORKER, SEPARATE = "modular", "one worker", "separate"
UPDATE_S = 60.0
REQUESTS = 200
"""One at a time, per task: enough for a 99th percentile of which two samples lie above."""

EPOCHS = 5

DEFAULT_PORTS = (5780, 5755)
"""REST and clients: with --keep, so that the commands find the system without being told."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run may choose.

    Attributes:
        topology: the update to deploy.
        repository: where the blocks are put.
        results: folder of the picture and the figures.
        images: held-out images to send.
        requests: requests per task for the latency.
        epochs: passes over the training images.
        seed: of the split and the training.
        reuse: take the blocks of an earlier run instead of training.
        keep: leave the system running.
        rest_port: with ``keep``; otherwise the system chooses.
        client_port: likewise.
    """

    topology: Path = Path("topology.json")
    repository: Path = Path("blocks")
    results: Path = Path("results")
    images: int = HELD_OUT
    requests: int = REQUESTS
    epochs: int = EPOCHS
    seed: int = 7
    reuse: bool = False
    keep: bool = False
    rest_port: int = DEFAULT_PORTS[0]
    client_port: int = DEFAULT_PORTS[1]


@dataclass(slots=True)
class Outcome:
    """What a run found and left.

    ``rest_url`` and ``client_address`` are those of the system if it was kept, else empty.
    ``whole_run_s`` is None where blocks were reused or the system was kept: that is not all of it.
    """

    deployments: list[Deployment] = field(default_factory=list)
    picture: Path = Path()
    figures: Path = Path()
    leftovers: Leftovers | None = None
    rest_url: str = ""
    client_address: str = ""
    log: Path = Path()
    pid: int = 0
    whole_run_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form for ``--json``."""
        return {
            "figures": [f.to_dict() for f in figures(self.deployments, self.whole_run_s)],
            "machine": fingerprint(),
            "picture": str(self.picture),
            "figures_file": str(self.figures),
            "left_behind": None
            if self.leftovers is None
            else [*self.leftovers.processes, *self.leftovers.files],
            "rest": self.rest_url,
            "clients": self.client_address,
        }


class Demo:
    """One run of the demo.

    Args:
        connect: makes a REST client for an address.
    """

    def __init__(self, settings: Settings, console: Console, connect: Connect) -> None:
        self._settings = settings
        self._console = console
        self._connect = connect

    def run(self) -> Outcome:
        """Do everything; raises what fails, having stopped the system before.

        Raises:
            BlockFlowError: with the code of what failed.
        """
        s = self._settings
        topology = read_topology(s.topology)
        if s.keep:  # said now, not after the training
            check_free(s.rest_port, s.client_port)
        data = load_data(s.seed)
        new_page(1, 1)  # without matplotlib this says so now, not after the measurements
        repository = blocks.open_repository(s.repository)
        self._prepare(data, repository)
        outcome = Outcome(picture=s.results / "demo.png", figures=s.results / "demo.jsonl")
        with self._state_folder() as folder:
            server = Server(
                s.repository.resolve(),
                folder,
                self._connect,
                rest_port=s.rest_port if s.keep else 0,
                client_port=s.client_port if s.keep else 0,
                outlive=s.keep,
            )
            with server:
                with self._step("Starting the system: blockflow up"):
                    server.start()
                for name, wanted in self._variants(topology).items():
                    outcome.deployments.append(
                        self._measure(server, name, wanted, data, repository)
                    )
                if s.keep:
                    apply(server.rest, topology)
                    outcome.rest_url, outcome.client_address = (
                        server.rest_url,
                        server.client_address,
                    )
                    outcome.log, outcome.pid = server.log, server.pid
                    server.release()
            if not s.keep:
                outcome.leftovers = server.leftovers()
        self._report(outcome)
        return outcome

    def _variants(self, topology: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        return {
            MODULAR: topology,
            ONE_WORKER: blocks.one_worker_topology(topology, "all"),
            SEPARATE: blocks.separate_topology(),
        }

    def _prepare(self, data: Digits, repository: BlockRepository) -> None:
        s = self._settings
        if s.reuse and blocks.are_stored(repository):
            self._say(f"Blocks of an earlier run: {s.repository}/")
            return
        with unbroken():
            from blockflow.bench.demo.train import train  # torch takes seconds

        with self._step(f"Training on {len(data.train_images):,} images") as step:
            model = train(data, epochs=s.epochs, seed=s.seed, progress=step)
        with self._step(f"Exporting blocks to {s.repository}/") as step:
            blocks.export_blocks(model, repository, seed=s.seed, progress=step)

    def _measure(
        self,
        server: Server,
        name: str,
        topology: Mapping[str, Any],
        data: Digits,
        repository: BlockRepository,
    ) -> Deployment:
        s = self._settings
        images, digits = data.test_images[: s.images], data.test_digits[: s.images]
        tasks: dict[str, TaskFigures] = {}
        with self._step(f"Serving: {name}") as step:
            apply(server.rest, topology)
            shared = name != SEPARATE
            parts = len(TASKS) + shared

            def part(done: int) -> Callable[[float], None]:
                return lambda fraction: step((done + fraction) / parts)

            with Client(server.client_address) as client:
                client.wait_ready(TASKS)
                for i, task in enumerate(TASKS):
                    tasks[task] = measure_task(client, task, images, digits, s.requests, part(i))
                joint = None
                if shared:
                    joint = measure_joint(client, images, digits, s.requests, part(len(TASKS)))
            server.note_processes()
            used = tuple(b if isinstance(b, str) else str(b["name"]) for b in topology["blocks"])
            state = blocks.state_bytes(repository, used)
            workers = server.rest.get("/v1/workers")["workers"]
            memory = measure_memory([int(w["pid"]) for w in workers], state)
        return Deployment(name, used, tasks, joint, memory)

    def _report(self, outcome: Outcome) -> None:
        machine = fingerprint()
        line = f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"
        with self._step("Drawing the picture"):
            picture.draw(outcome.deployments, line, outcome.picture)
            taken_s = age_s()
            if not (self._settings.reuse or self._settings.keep):
                outcome.whole_run_s = taken_s
            made = figures(outcome.deployments, outcome.whole_run_s)
            ResultFile(outcome.figures, "demo", "make demo").write(made, machine)
        self._console.print()
        print_report(self._console, outcome.deployments, outcome.deployments[-1])
        self._say(f"All of this took {taken_s:.0f} s.")

    @contextmanager
    def _state_folder(self) -> Iterator[Path]:
        folder = Path(tempfile.mkdtemp(prefix="blockflow-demo-"))
        kept = False
        try:
            yield folder
            kept = self._settings.keep
        finally:
            if not kept:
                shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _step(self, what: str) -> Iterator[Callable[[float], None]]:
        """A progress bar for one step; yields what takes the fraction done (0..1)."""
        bar = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
        )
        with bar:
            task = bar.add_task(what, total=1.0)
            yield lambda fraction: bar.update(task, completed=min(1.0, fraction))
            bar.update(task, completed=1.0)

    def _say(self, text: str) -> None:
        self._console.print(text)


def read_topology(path: Path) -> dict[str, Any]:
    """The topology file's JSON object.

    Raises:
        SystemError_: NOT_FOUND or BAD_BODY.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise make_error(
            "NOT_FOUND",
            f"no topology: {exc.strerror}",
            where=str(path),
            hint="run the demo in a checkout of the project, or name a file with --topology",
        ) from exc
    except ValueError as exc:
        raise make_error("BAD_BODY", f"not JSON: {exc}", where=str(path)) from exc
    tasks = data.get("tasks") if isinstance(data, dict) else None
    if not isinstance(tasks, dict) or not set(TASKS) <= set(tasks):
        raise make_error("BAD_BODY", f"the demo's tasks are {', '.join(TASKS)}", where=str(path))
    return dict(data)


def check_free(*ports: int) -> None:
    """Find out early that a port is taken; the system itself reports it again if need be.

    Raises:
        SystemError_: PORT_IN_USE.
    """
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as exc:
                raise make_error(
                    "PORT_IN_USE",
                    f"another process listens there: {exc.strerror}",
                    where=f"127.0.0.1:{port}",
                    hint="end it (blockflow stop --yes), or use --rest-port and --client-port",
                ) from exc


def apply(rest: Rest, topology: Mapping[str, Any]) -> None:
    """POST the system update and wait until it serves."""
    rest.post("/v1/system-update", topology, timeout_s=UPDATE_S)
