"""The fuzzer's short form at the sockets of a running system; ``make fuzz`` is the long one."""

from __future__ import annotations

from pathlib import Path

from warm_rig import Warm

from blockflow.bench.fuzz.run import fuzz_system, running_system

FRAMES = 4000
SEED = 20


def test_every_socket_survives_malformed_frames(tmp_path: Path, warm: Warm) -> None:
    with warm.spawning(), running_system(tmp_path) as status:
        report = fuzz_system(FRAMES, SEED, status, rounds=3)
    assert not report.failures
    assert all(report.frames.values())
    assert report.frames.keys() == {
        "clients, tcp",
        "clients, ipc",
        "handshake",
        "endless messages",
        "results",
        "worker",
        "controller",
        "grant side",
        "REST",
    }
    assert set(report.growth) == {"up", "dispatcher", "a#0", "b#0"}
