"""The yardstick: real messages between two real processes, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockflow.bench.bare import BareLink


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_messages_arrive_asleep_and_awake_small_and_large(tmp_path: Path, transport: str) -> None:
    done: list[int] = []
    with BareLink(tmp_path, transport) as link:
        for times in (
            link.burst(5),
            link.burst(5, spin=True, before=lambda: done.append(1)),
            link.burst(5, size=300_000),
            link.burst(5),  # asleep again after a burst awake
        ):
            assert len(times) == 5
            assert all(0 <= t < 10_000 for t in times)
    assert len(done) == 5
