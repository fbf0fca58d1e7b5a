"""The pipeline benchmark's arithmetic: shares, ratios and the table."""

from __future__ import annotations

import pytest
from rich.console import Console

from blockflow.bench import pipeline
from blockflow.bench.pipeline import BLOCKS, WAYS, Sample, figures, start_figures, table, topology


def sample(total: float, compute: float, overhead: float, edge: float = 0.0) -> Sample:
    """Four equal hops."""
    hop = (overhead / 2, 0.0, overhead / 2, compute)
    return Sample(total, (hop,) * 4, edge)


def test_parts_of_a_sample() -> None:
    one = sample(total=100.0, compute=20.0, overhead=4.0, edge=1.0)
    assert one.compute == 80.0
    assert one.hop_overhead == 4.0
    assert one.accounted == pytest.approx(0.97)


def test_figures_pair_rounds() -> None:
    # The machine is twice as slow in the second round: ratios don't see it.
    samples = {way: [sample(110, 25, 2), sample(220, 50, 4)] for way in WAYS}
    samples[WAYS[0]] = [sample(100, 25, 0), sample(200, 50, 0)]
    found = {(f.name, f.mode): f for f in figures(8, samples)}
    assert found[pipeline.RATIO, "tensormq"].value == pytest.approx(1.1)
    assert found[pipeline.COMPUTE, "tensormq"].value == pytest.approx(1.0)
    assert found[pipeline.HOP, "zeromq"].p90_ms == 4
    assert (pipeline.HOP, WAYS[0]) not in found
    assert found[pipeline.LATENCY, WAYS[0]].n == 2


def test_table_has_a_row_per_batch_and_way() -> None:
    samples = {way: [sample(110, 25, 2)] for way in WAYS}
    found = [*figures(1, samples), *figures(8, samples)]
    assert table(found).row_count == 2 * len(WAYS)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(found))
    assert "one-worker" in console.export_text()


def test_start_figures_leave_the_artifact_out() -> None:
    ready, without, uss = start_figures(
        [
            {"start_ms": 300.0, "load_ms": 200.0, "uss_mib": 9.0},
            {"start_ms": 500.0, "load_ms": 420.0, "uss_mib": 11.0},
        ]
    )
    assert ready.value == 300.0
    assert without.p90_ms == 100.0
    assert uss.value == 11.0


def test_topology_serves_the_same_blocks_three_ways() -> None:
    wanted = topology()
    assert set(wanted["tasks"]) == set(WAYS[1:])
    assert {b["block"] for b in wanted["blocks"]} == set(BLOCKS)
    assert sum(b.get("worker") == "one-worker" for b in wanted["blocks"]) == len(BLOCKS)
    assert sum(b.get("mode") == "zeromq" for b in wanted["blocks"]) == len(BLOCKS)
