"""The GPU benchmark's conclusions from made-up measurements, and its refusal without a GPU."""

from __future__ import annotations

import pytest

from blockflow.bench import gpu
from blockflow.bench.gpu_figures import (
    ENERGY,
    GROWTH,
    HOP,
    IN_PROCESS,
    LESS,
    RATIO,
    SATURATION_RATIO,
    SUM,
    TENSORMQ,
    ZEROMQ,
    Load,
    Samples,
    aim_grid,
    client_figures,
    client_grid,
    latency_figures,
    latency_grid,
    load_figures,
    load_grid,
)
from blockflow.bench.results import Figure
from blockflow.tensormq.memory import DOUBLE_ENV


def samples(handle_ms: float, whole_ms: float, batches: tuple[int, ...] = (1, 32)) -> Samples:
    """In-process 10 ms per row, and the ways dearer by so much per hop of four."""
    found = Samples(blocks=4)
    for batch in batches:
        for n in range(20):
            base = 10.0 * batch + 0.001 * (n % 5)
            found.add(IN_PROCESS, batch, base)
            found.add(SUM, batch, base + 0.5)
            found.add(TENSORMQ, batch, base + 4 * handle_ms)
            found.add(ZEROMQ, batch, base + 4 * whole_ms)
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
    assert named(found, HOP, ZEROMQ)[1].value == pytest.approx(2.0)


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
    assert latency[0][4:] == ("", "") and latency[2][4].startswith("0.100 (")
    assert client_grid(found).rows == [
        ("1", "1.00", "100", "3.00", "33.3"),
        ("10", "10.0", "100", "30.0", "33.3"),
    ]
    assert load_grid(found).rows[0] == (
        TENSORMQ, "97.0", "0.970", "0.500", "700", "1.00", "1.00",
    )  # fmt: skip
    assert load_grid(found).rows[1][5:] == ("4.00", "4.00")
    for grid in (latency_grid(found), client_grid(found), load_grid(found), aim_grid(found)):
        assert grid.markdown() and grid.rich()


def test_without_a_gpu_it_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from blockflow.core.errors import SystemError_

    def none(device: str) -> None:
        raise SystemError_("MISSING_EXTRA", "no usable CUDA driver")

    monkeypatch.setattr(gpu, "open_device", none)
    assert gpu.main([]) == gpu.EXIT_NO_GPU
    err = capsys.readouterr().err
    assert "no GPU on this machine" in err and "make bench-pipeline" in err


def test_a_gpu_that_cannot_be_shared_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: object,
) -> None:
    from pathlib import Path

    from blockflow.tensormq.cuda_fake import FakeCuda

    made = FakeCuda(Path(str(tmp_path)), lacks=["ipc_events"])
    monkeypatch.delenv(DOUBLE_ENV, raising=False)
    monkeypatch.setattr(gpu, "open_device", lambda _: made)
    assert gpu.main([]) == gpu.EXIT_NO_GPU
    assert "interprocess events" in capsys.readouterr().err


def test_the_topology_names_both_ways_over_the_same_artifacts() -> None:
    made = gpu.topology()
    assert len(made["blocks"]) == 8 and set(made["tasks"]) == {TENSORMQ, ZEROMQ}
    assert {b["device"] for b in made["blocks"]} == {"cuda:0"}
    assert {(b["name"], b["mode"]) for b in made["blocks"]} >= {
        ("tensormq.block1", "tensormq"),
        ("zeromq.block4", "zeromq"),
    }
