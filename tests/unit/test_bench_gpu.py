"""The GPU benchmark's conclusions from made-up measurements, what it sends, and its refusal without
a GPU."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blockflow.bench import gpu, gpu_load
from blockflow.bench.gpu_figures import (
    BOUND,
    EDGE,
    ENERGY,
    GROWTH,
    HOP,
    IN_PROCESS,
    LESS,
    RATIO,
    SATURATION,
    SATURATION_RATIO,
    SUM,
    TENSORMQ,
    WAYS,
    ZEROMQ,
    Load,
    Memory,
    Sample,
    Samples,
    aim_grid,
    client_figures,
    client_grid,
    growth_mib,
    latency_figures,
    latency_grid,
    load_figures,
    load_grid,
)
from blockflow.bench.pipeline_ways import topology
from blockflow.bench.results import Figure, ResultFile
from blockflow.core.errors import RequestError, SystemError_
from blockflow.tensormq.cuda_fake import FakeCuda
from blockflow.tensormq.cuda_here import DOUBLE_ENV


def samples(
    handle_ms: float, whole_ms: float, batches: tuple[int, ...] = (1, 32), edge_ms: float = 0.0
) -> Samples:
    """In-process 10 ms per row; the ways dearer by so much per hop of four, and at the edges."""
    found = Samples(blocks=4)
    for batch in batches:
        for n in range(20):
            base = 10.0 * batch + 0.001 * (n % 5)
            found.add(IN_PROCESS, batch, Sample(base))
            found.add(SUM, batch, Sample(base + 0.5))
            for way, hop_ms in ((TENSORMQ, handle_ms), (ZEROMQ, whole_ms)):
                found.add(way, batch, Sample(base + 4 * hop_ms + edge_ms, edge_ms))
    found.copies = {TENSORMQ: (1.0, 1.0), ZEROMQ: (4.0, 4.0)}
    return found


def loads(share: float = 0.97, growth: float | None = 0.5) -> dict[str, Load]:
    bound = [100.0, 101.0, 99.0, 100.0, 100.5]
    return {
        TENSORMQ: Load([b * share for b in bound], bound, growth, 700.0),
        ZEROMQ: Load([b * 0.5 for b in bound], bound, None, None),
    }


def named(figures: list[Figure], name: str, way: str = TENSORMQ) -> dict[int | None, Figure]:
    return {f.batch: f for f in figures if f.name == name and f.mode == way}


def verdicts(figures: list[Figure]) -> dict[str, str]:
    return {row[0]: row[3] for row in aim_grid(figures).rows}


def test_a_hop_is_the_difference_shared_by_the_blocks() -> None:
    found = latency_figures(samples(0.1, 2.0))
    hop = named(found, HOP)
    assert hop[1].value == pytest.approx(0.1) and hop[32].value == pytest.approx(0.1)
    assert hop[1].unit == "ms" and hop[1].low is not None
    assert named(found, RATIO)[1].value == pytest.approx(1.04, abs=1e-3)
    assert named(found, LESS)[32].value == pytest.approx(20.0)
    assert named(found, LESS)[32].labels["at_least"]  # for make bench-compare: more is better
    assert named(found, HOP, ZEROMQ)[1].value == pytest.approx(2.0)


def test_the_way_to_the_dispatcher_is_no_hop_but_counts_in_the_whole() -> None:
    found = latency_figures(samples(0.1, 2.0, edge_ms=0.8))
    assert named(found, HOP)[1].value == pytest.approx(0.1)
    assert named(found, LESS)[1].value == pytest.approx(20.0)
    assert named(found, RATIO)[1].value == pytest.approx(1.12, abs=1e-3)
    assert named(found, EDGE, ZEROMQ)[32].p50_ms == pytest.approx(0.8)
    assert named(found, EDGE, IN_PROCESS) == {}


def test_all_aims_met() -> None:
    found = latency_figures(samples(0.1, 2.0)) + load_figures(loads())
    assert set(verdicts(found).values()) == {"met"}


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        (latency_figures(samples(0.2, 2.0)), HOP),
        (latency_figures(samples(0.5, 5.0)), RATIO),
        (latency_figures(samples(0.1, 0.5)), LESS),
        (load_figures(loads(share=0.8)), SATURATION_RATIO),
        (load_figures(loads(growth=900.0)), GROWTH),
    ],
)
def test_each_aim_can_be_missed(figures: list[Figure], missed: str) -> None:
    assert verdicts(figures)[missed] == "missed"


def test_between_the_named_batches_the_ratio_has_no_aim() -> None:
    assert verdicts(latency_figures(samples(0.1, 2.0, (8,))))[RATIO] == "not measured"
    # Nor is the worst one shown of those.
    slow = samples(2.0, 4.0, (2,)).ways
    mixed = samples(0.1, 2.0)
    for way, by_batch in slow.items():
        mixed.ways[way] |= by_batch
    (shown,) = [row for row in aim_grid(latency_figures(mixed)).rows if row[0] == RATIO]
    assert shown[2:] == ("1.04 x", "met")


def test_an_overhead_within_the_noise_gives_no_ratio() -> None:
    found = latency_figures(samples(-0.1, 2.0))
    assert named(found, LESS) == {}
    assert verdicts(found)[LESS] == "not measured"


def test_what_is_not_known_is_said() -> None:
    found = load_figures(loads(growth=None))
    assert named(found, GROWTH) == {}
    assert named(found, ENERGY)[None].value == 700.0
    rows = {row[0]: row for row in load_grid(found).rows}
    assert rows[ZEROMQ][3:] == ("unknown", "unknown", "unknown", "unknown")


def test_the_tables() -> None:
    found = latency_figures(samples(0.1, 2.0)) + load_figures(loads())
    for way, slow in ((TENSORMQ, 1.0), (ZEROMQ, 3.0)):
        for clients in (1, 10):
            found += client_figures(way, clients, [slow * clients] * 10, 100.0 / slow)
    latency = [row for row in latency_grid(found).rows if row]
    assert len(latency) == 2 * 4
    assert [row[1] for row in latency[:4]] == [IN_PROCESS, SUM, TENSORMQ, ZEROMQ]
    assert latency[0][4:] == ("", "", "") and latency[2][4].startswith("0.100 (")
    assert latency[2][6] == "0"
    assert client_grid(found).rows == [
        ("1", "1.00", "100", "3.00", "33.3"),
        ("10", "10.0", "100", "30.0", "33.3"),
    ]
    assert named(found, SATURATION, BOUND)[None].value == 100.0
    assert load_grid(found).rows[0] == (BOUND, "100", "", "", "", "", "")
    assert load_grid(found).rows[1] == (
        TENSORMQ, "97.0", "0.970 (0.970-0.970)", "0.500", "700", "1.00", "1.00",
    )  # fmt: skip
    assert load_grid(found).rows[2][5:] == ("4.00", "4.00")
    for grid in (latency_grid(found), client_grid(found), load_grid(found), aim_grid(found)):
        assert grid.markdown() and grid.rich()


GIB = 2**30


def test_growth_compares_like_with_like() -> None:
    told = [Memory(GIB, 100), Memory(2 * GIB, 100)]
    grown = [Memory(GIB + 2**20, 900), Memory(2 * GIB + 2**20, 900)]
    assert growth_mib(told, grown) == 2.0
    # NVML has lost sight of one: then the pools, both times.
    hidden = [Memory(None, 100 + 2**20), Memory(3 * GIB, 100)]
    assert growth_mib(told, hidden) == 1.0
    assert growth_mib(hidden, told) == -1.0
    assert growth_mib(told, [Memory(None, None)] * 2) is None
    assert growth_mib([], []) is None


class Probe:
    """A device's energy at each look, in joules."""

    def __init__(self, *joules: float | None) -> None:
        self._joules = iter(joules)
        self.looks = 0

    def sample(self, now_ns: int, rows: int) -> dict[str, Any]:
        self.looks += 1
        joules = next(self._joules)
        return {} if joules is None else {"gpu_energy_j": joules}


@pytest.mark.parametrize(
    ("joules", "spent"),
    [((5.0, 8.5), 3.5), ((None, None), None), ((0.0, 0.0), None)],
    ids=["told", "no NVML", "neither counter nor power"],
)
def test_energy_is_a_difference_where_the_device_tells_any(
    joules: tuple[float | None, ...], spent: float | None
) -> None:
    energy = gpu_load.Energy(Probe(*joules))  # type: ignore[arg-type]
    energy.start()
    assert energy.stop() == spent


def test_power_is_asked_for_four_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(
        gpu_load, "time", SimpleNamespace(monotonic=lambda: now[0], monotonic_ns=lambda: 0)
    )
    probe = Probe(*range(20))
    energy = gpu_load.Energy(probe)  # type: ignore[arg-type]
    energy.start()
    for _ in range(100):
        now[0] += 0.01
        energy.tend()
    assert probe.looks == 1 + 4


class Answers:
    """A client that answers at once: a row, a refusal, an error; and how many it was asked for."""

    def __init__(self, *errors: Exception | None) -> None:
        self._errors = list(errors)
        self.asked = 0

    def submit(self, task: str, x: np.ndarray, *, deadline_s: float) -> Future[Any]:
        pending: Future[Any] = Future()
        self.asked += 1
        error = self._errors.pop(0) if self._errors else None
        if error is None:
            pending.set_result(x)
        else:
            pending.set_exception(error)
        return pending


ROWS = np.zeros((2, 3), np.float32)


class PerRequest:
    """A device that takes three joules for each request that it is sent."""

    def __init__(self, client: Answers) -> None:
        self._client = client

    def sample(self, now_ns: int, rows: int) -> dict[str, Any]:
        return {"gpu_energy_j": 3.0 * self._client.asked}


def test_a_flood_counts_what_is_answered_after_its_first_round() -> None:
    refused = SystemError_("OVERLOADED", "later")
    assert refused.retryable
    client = Answers(None, refused, refused, None)
    found = gpu_load.flood(client, "a", ROWS, 0.0, 2)  # type: ignore[arg-type]
    # Two to begin with, two after them: of these the first is refused, the second answered.
    assert found.rows == 2 and found.mj_per_row is None
    assert found.rate == found.rows / found.seconds
    assert client.asked == 2 + 2 + 2


def test_the_energy_of_a_flood_is_that_of_the_rows_that_it_counts() -> None:
    """Not of those before its first round is over, nor of those that are waited for at its end."""
    client = Answers()
    energy = gpu_load.Energy(PerRequest(client))  # type: ignore[arg-type]
    found = gpu_load.flood(client, "a", ROWS, 0.0, 50, energy)  # type: ignore[arg-type]
    assert (client.asked, found.rows) == (50 + 50 + 1, len(ROWS))
    assert found.joules == 3.0 and found.mj_per_row == 3e3 / len(ROWS)


def test_a_flood_ends_with_the_error_of_a_request_that_is_not_to_be_repeated() -> None:
    wrong = RequestError("CONTRACT_MISMATCH", "no such tensor")
    for place in range(6):
        client = Answers(*[None] * place, wrong)
        with pytest.raises(RequestError):
            gpu_load.flood(client, "a", ROWS, 1e-3 * place, 2)  # type: ignore[arg-type]


def test_a_request_knows_its_way_to_the_dispatcher_and_back() -> None:
    def answer(there: float | None, back: float | None) -> Sample:
        result = SimpleNamespace(
            upload=SimpleNamespace(ms=there), download=SimpleNamespace(ms=back), ingress_ms=0.25
        )
        client = SimpleNamespace(infer=lambda *_, **__: result)
        return gpu_load.once(client, "a", ROWS)  # type: ignore[arg-type]

    assert answer(1.0, 0.5).edge == 1.75
    assert answer(None, None).edge == 0.25
    assert answer(1.0, 0.5).total >= 0


def test_the_bound_is_the_better_of_one_process_and_of_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(rates: dict[int, float]) -> float:
        def rate(others: list[None], rows: int, seconds: float) -> float:
            return rates[len(others)] * rows

        monkeypatch.setattr(gpu, "side_by_side", rate)
        return gpu.best_bound([None] * 4, 2, 1.0)  # type: ignore[list-item]

    assert made({1: 300.0, 4: 200.0}) == 600.0
    assert made({1: 100.0, 4: 200.0}) == 400.0


def test_without_a_gpu_it_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(device: str) -> None:
        raise SystemError_("MISSING_EXTRA", "no usable CUDA driver")

    monkeypatch.setattr(gpu, "open_device", none)
    assert gpu.main([]) == gpu.EXIT_NO_GPU
    err = capsys.readouterr().err
    assert "no GPU cuda:0 on this machine" in err and "make bench-pipeline" in err


def test_a_gpu_that_cannot_be_shared_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    made = FakeCuda(tmp_path, lacks=["ipc_events"])
    monkeypatch.delenv(DOUBLE_ENV, raising=False)
    monkeypatch.setattr(gpu, "open_device", lambda _: made)
    assert gpu.main([]) == gpu.EXIT_NO_GPU
    assert "interprocess events" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "name", "command"),
    [
        ([], "gpu.jsonl", "make bench-gpu"),
        (["--quick"], "gpu-quick.jsonl", "make bench-gpu ARGS=--quick"),
    ],
)
def test_figures_are_stored_with_their_gpu_and_a_quick_run_beside_a_real_one(
    arguments: list[str],
    name: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(DOUBLE_ENV, raising=False)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "find_device", lambda: FakeCuda(tmp_path / "device"))
    found = latency_figures(samples(0.1, 2.0)) + load_figures(loads())
    monkeypatch.setattr(gpu, "measure", lambda plan, api, console: found)
    assert gpu.main(arguments) == 0
    (run,) = ResultFile(tmp_path / "results" / name, "gpu").runs()
    assert (run.command, len(run.figures)) == (command, len(found))
    assert run.machine["gpu"] and run.machine["gpu_gib"] > 0 and run.machine["mps"] is False


def test_a_shorter_run_has_as_many_loads_and_enough_latencies() -> None:
    half, least = gpu.FULL.shortened(0.5), gpu.FULL.shortened(0.1)
    assert (half.client_s, half.load_s) == (gpu.FULL.client_s / 2, gpu.FULL.load_s / 2)
    assert half.batches[1] == gpu.FULL.batches[1] / 2
    assert (half.load_rounds, half.clients) == (gpu.FULL.load_rounds, gpu.FULL.clients)
    assert set(least.batches) == set(gpu.FULL.batches)
    assert min(least.batches.values()) == 10
    assert gpu.FULL.shortened(1.0) == gpu.FULL


@pytest.mark.parametrize("effort", ["0", "1.5", "nan", "much"])
def test_an_effort_that_is_no_share_is_refused(
    capsys: pytest.CaptureFixture[str], effort: str
) -> None:
    with pytest.raises(SystemExit) as found:
        gpu.main(["--effort", effort])
    assert found.value.code == 2
    assert "--effort" in capsys.readouterr().err


def test_the_topology_names_both_ways_over_the_same_artifacts(tmp_path: Path) -> None:
    chain = replace(gpu.MODEL.chain(gpu.CONTENDER, tmp_path), device="cuda:0")
    made = topology(chain, WAYS)
    assert len(made["blocks"]) == 8 and set(made["tasks"]) == {TENSORMQ, ZEROMQ}
    assert {b["device"] for b in made["blocks"]} == {"cuda:0"}
    assert {b["block"] for b in made["blocks"]} == {f"pt2.block{n}" for n in (1, 2, 3, 4)}
    assert {b.get("mode", "tensormq") for b in made["blocks"] if "tensormq." in b["name"]} == {
        "tensormq"
    }
    assert {b.get("mode") for b in made["blocks"] if "zeromq." in b["name"]} == {"zeromq"}


def test_a_run_that_prepared_nothing_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = SystemError_("NO_SPACE", "no room")
    monkeypatch.setattr(gpu, "prepare_apart", lambda *_: error)
    with pytest.raises(SystemError_, match="no room"):
        gpu.measure(gpu.QUICK, FakeCuda(tmp_path), gpu.Console(quiet=True))
