"""What every experiment of the thesis leaves when its system dies, or Ctrl-C comes, in mid-run.

Each runs here from begin to end with as many rounds as in a full run, over doubles of everything
that computes or talks: first whole, then with a death just before the end, where all but the last
round is known. A new experiment is tested by being in the registry.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thesis_rig import CHAIN, silent

from blockflow.bench import statistics
from blockflow.bench.closing import Closing
from blockflow.bench.compare.judgement import MIN_PAIRS
from blockflow.bench.in_process import Chain
from blockflow.bench.thesis import (
    energy,
    memory_measure,
    offline,
    offline_memory,
    one_client,
    peers,
    served,
)
from blockflow.bench.thesis.devices_model import CORES, Places
from blockflow.bench.thesis.experiment import Context, Experiment, Settings, Workshop
from blockflow.bench.thesis.experiments import EXPERIMENTS
from blockflow.bench.thesis.outcome import PARTIAL, Call, State, broken_off, make_document
from blockflow.bench.thesis.report import sections
from blockflow.bench.thesis.util_watch import Memory
from blockflow.client.collector import OK, Record
from blockflow.client.result import BlockTiming
from blockflow.core.errors import BlockFlowError, make_error
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository

SETTINGS = Settings()
LOST = "CONNECTION_LOST"
TIMINGS = tuple(BlockTiming(f"way.pt2.block{n}", 0.1, 0.1, 0.1, 1.0) for n in range(1, 5))


class Life:
    """Counts what the system is asked for, and ends it there."""

    def __init__(self, asks: float = float("inf")) -> None:
        self.asks = asks
        self.spent = 0

    def spend(self) -> None:
        self.spent += 1
        if self.spent > self.asks:
            raise make_error(LOST, "the system died")


class Double(Closing):
    """Of a client, a process or a server, whatever its arguments: each question is one of its life.

    Attributes:
        life: of the test's system.
    """

    life = Life()
    client_endpoint, port = "ipc://nowhere", 0

    def __init__(self, *_args: Any, **_options: Any) -> None:
        pass

    def infer(self, *_args: Any, **_options: Any) -> Any:
        self.life.spend()
        return SimpleNamespace(timings=TIMINGS, ingress_ms=0.1, egress_ms=0.1)

    def run(self, _rows: int) -> tuple[float, ...]:
        self.life.spend()
        return (1.0,) * len(TIMINGS)

    def post(self, _path: str, body: Any, _kind: str = "") -> bytes:
        self.life.spend()
        return bytes(body)

    def string(self) -> None:
        self.life.spend()

    json = tensor = string

    def handle(self, _kind: bytes) -> None:
        self.life.spend()

    def close(self) -> None:
        pass


class Generator:
    """A client's requests, evenly; all of them lost once the system is dead."""

    life = Life()

    def __init__(
        self, _client: object, task: str, _inputs: object, *, duration_s: float, **options: Any
    ) -> None:
        self._task = task
        self._count = int(duration_s * options.get("rate", 10))
        self._gap_ms = duration_s * 1e3 / max(1, self._count)
        self.collector = self
        self._records: list[Record] = []

    def run(self) -> Generator:
        try:
            self.life.spend()
            outcome = OK
        except BlockFlowError as exc:  # in a thread of its own nobody would hear it
            outcome = exc.code
        times = [n * self._gap_ms for n in range(max(3, self._count))]
        self._records = [Record(self._task, 1, t, t, t + 5, outcome, TIMINGS) for t in times]
        return self

    def records(self) -> Sequence[Record]:
        return self._records

    def stop(self) -> None:
        pass


class Deployed:
    """A system that says of itself what its topology says; all of it is this process."""

    client_endpoint = "ipc://nowhere"
    client_endpoints = (client_endpoint,)

    def __init__(self, topology: Mapping[str, Any]) -> None:
        self._names = [b["name"] for b in topology["blocks"]]

    def status(self) -> dict[str, Any]:
        pid = os.getpid()
        workers = [
            {"worker": n, "blocks": [n], "pid": pid, "process": {}, "stages": []}
            for n in self._names
        ]
        return {"workers": workers, "dispatcher": {"pid": pid}}


class Counters:
    """What blocks counted: as many requests as are asked for."""

    def __init__(self, _system: object) -> None:
        pass

    def now(self) -> dict[str, Any]:
        return {}

    def since(self, _before: object, asked: Mapping[str, int]) -> dict[str, Any]:
        return {b: {"requests": n, "bytes_out": 8 * n, "copies_out": 0} for b, n in asked.items()}


class Doubled(Context):
    """As in a full run, over doubles."""

    def __init__(self, folder: Path) -> None:
        super().__init__(SETTINGS, Workshop(folder), folder, silent)
        self._chain = Chain(folder, CHAIN.blocks)

    def chain(self, label: str | None = None, model: str | None = None) -> Chain:
        return self._chain

    @contextmanager
    def system(self, topology: Mapping[str, Any], repository: Path | None = None) -> Iterator[Any]:
        yield Deployed(topology)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks")
    for name in CHAIN.blocks:
        save_echo(BlockRepository(folder), name, TensorSpec("float32", ("rows", 8)))
    return folder


@pytest.fixture(autouse=True)
def quick_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an interval is worth is tested elsewhere; here hundreds are made."""
    monkeypatch.setattr(statistics, "_RESAMPLES", 50)


def run_until(
    experiment: Experiment, context: Context, life: Life, patch: pytest.MonkeyPatch
) -> Any:
    """Its findings; the names that its modules call the world by stand for doubles."""
    counter = itertools.count()
    meter = SimpleNamespace(part="a meter", joules=lambda: next(counter), close=lambda: None)
    doubles: dict[str, Any] = {
        **dict.fromkeys(("Client", "InProcess", "HttpServer", "HttpClient", "System"), Double),
        "TaskGenerator": Generator,
        "KpiReader": Counters,
        "memory_of": lambda pids: dict.fromkeys(pids, Memory(3 << 20, 2 << 20, 1 << 20)),
        "find_source": lambda _device: meter,
        "find_places": lambda _settings: Places(CORES, ["0", "1"]),
        "_sent": lambda: next(counter),  # bytes of the loopback device
        "_one": lambda *_: life.spend() or float(20 + next(counter)),
    }
    patch.setattr(Double, "life", life)
    patch.setattr(Generator, "life", life)
    patch.setattr(peers, "Peer", Double)
    patch.setattr(energy, "time", SimpleNamespace(sleep=lambda _s: None))
    helpers = (served, one_client, memory_measure, offline_memory)
    for module in (sys.modules[experiment.run.__module__], *helpers):
        for name, double in doubles.items():
            if hasattr(module, name):
                patch.setattr(module, name, double)
    return experiment.run(context)


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
def test_all_but_the_last_round_is_kept_and_marked_when_the_system_dies(
    experiment: Experiment, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = Life()
    whole = run_until(experiment, Doubled(repository), life, monkeypatch)
    assert whole.skipped is None
    assert whole.figures and whole.tables and whole.plots
    assert "too few rounds" not in whole.says  # a full run has enough of them
    assert life.spent, "nothing of it can die here: this test lacks doubles for it"

    context = Doubled(repository)
    with pytest.raises(BlockFlowError) as caught:
        run_until(experiment, context, Life(life.spent - 1), monkeypatch)
    assert caught.value.code == LOST
    assert {f.name for f in context.kept} <= {f.name for f in whole.figures}
    assert max((f.n for f in context.kept), default=0) >= MIN_PAIRS - 1, "not all rounds are kept"

    outcome = broken_off(experiment, caught.value, context.kept, 1.0)
    assert outcome.state is State.FAILED
    assert all(f.labels[PARTIAL] for f in outcome.findings.figures)
    call = Call(SETTINGS, "blockflow bench thesis", {})
    document = make_document(outcome, call, files=["kept.csv"])
    assert document["partial"]
    assert "PARTIAL" in document["tables"][0]["title"]
    assert len(document["tables"][0]["rows"]) == len(context.kept)
    assert any("PARTIAL" in getattr(part, "text", "") for part in sections([document]))


def test_nothing_is_kept_of_what_died_at_once(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for experiment in EXPERIMENTS:
        context = Doubled(repository)
        with pytest.raises(BlockFlowError, match=LOST):
            run_until(experiment, context, Life(0), monkeypatch)
        assert context.kept == []
        outcome = broken_off(experiment, make_error(LOST, "it died"), context.kept, 1.0)
        assert outcome.findings.tables == []


def test_the_times_are_kept_when_the_memory_cannot_be_measured(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = Doubled(repository)
    rounds, forms = 101, 4  # the warm-up and the form that is measured twice are among them
    with pytest.raises(BlockFlowError, match=LOST):
        run_until(offline.EXPERIMENT, context, Life(rounds * forms), monkeypatch)
    assert max(f.n for f in context.kept if f.name == offline.TIME) == rounds - 1
    assert offline_memory.OWN not in {f.name for f in context.kept}
