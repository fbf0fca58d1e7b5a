"""The device's part in a hop, on the double: two real processes take turns, and leave nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from blockflow.bench.gpu_floor import (
    ALONE,
    FLOOR,
    IN_TURNS,
    SWITCH,
    Floor,
    floor_figures,
    floor_grid,
)
from blockflow.core.errors import SystemError_
from blockflow.launch.base import Launcher
from blockflow.tensormq.cuda_fake import FakeCuda
from blockflow.tensormq.cuda_here import DOUBLE_ENV
from tests.apart_rig import forked

SMALL = 1 << 12


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setenv(DOUBLE_ENV, str(tmp_path))
    api = FakeCuda(tmp_path)
    yield api
    assert api.world.broken_rules() == []
    assert api.world.names("event") == []
    api.close()


@pytest.fixture
def fork(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process has nothing to import; that it starts from nothing, too, shows the test
    without this."""
    forked(launcher, monkeypatch)


@pytest.mark.usefixtures("fork")
def test_two_processes_take_turns_at_kernels(double: FakeCuda) -> None:
    with closing(Floor(double, "cuda:0", SMALL)) as floor:
        found = floor.measure(rounds=3, repeats=6)
        other = floor._other.pid
    assert {way: len(samples) for way, samples in found.items()} == {ALONE: 6, IN_TURNS: 6}
    assert all(ms > 0 for samples in found.values() for ms in samples)
    assert not Path(f"/proc/{other}").exists()
    figures = floor_figures(found)
    assert [(f.name, f.mode) for f in figures] == [
        (FLOOR, ALONE),
        (FLOOR, IN_TURNS),
        (SWITCH, IN_TURNS),
    ]
    assert [row[0] for row in floor_grid(figures).rows] == [ALONE, IN_TURNS]


@pytest.mark.usefixtures("fork")
def test_each_kernel_comes_behind_the_one_of_the_other(
    double: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    real = FakeCuda.stream_wait
    monkeypatch.setattr(
        FakeCuda, "stream_wait", lambda api, s, e: (waits.append(e), real(api, s, e))[1]
    )
    with closing(Floor(double, "cuda:0", SMALL)) as floor:
        floor._in_turns(4)
        assert waits == [floor._mine._theirs] * 5  # the last one is the end's


def test_another_process_that_cannot_start_says_why(
    double: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DOUBLE_ENV)
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a device")
    with pytest.raises(SystemError_, match="no usable CUDA driver"):
        Floor(double, "cuda:0", SMALL)
