"""The yardstick: real messages between two real processes, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

from blockflow.bench.bare import one_way_ms


def test_messages_arrive_and_the_other_process_ends(tmp_path: Path) -> None:
    times = one_way_ms(tmp_path, 20, 0.0)
    assert len(times) == 20
    assert all(0 < t < 10_000 for t in times)
