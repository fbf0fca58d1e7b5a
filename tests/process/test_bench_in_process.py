"""The in-process run: a real other process that loads, computes, and ends with its socket."""

from __future__ import annotations

from pathlib import Path

import pytest
from control_rig import save_echoes

from blockflow.bench.in_process import Chain, InProcess
from blockflow.core.errors import BlockFlowError
from blockflow.launch.base import Launcher
from tests.apart_rig import forked


@pytest.fixture(autouse=True)
def forks(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """That others start from nothing is shown with those that need no torch (clients of loads)."""
    forked(launcher, monkeypatch)


def test_it_computes_what_it_is_asked(tmp_path: Path) -> None:
    save_echoes(tmp_path, "one", "two")
    with InProcess(Chain(tmp_path, ("one", "two"))) as other:
        assert len(other.run(3)) == 2
        assert other.whole(3) > 0 and other.apart(3) > 0
        other.start_running(3, 0.01)
        assert other.rate() > 0
        assert other.pss_mib() > 1


def test_heads_compute_what_the_last_block_has_given(tmp_path: Path) -> None:
    save_echoes(tmp_path, "one", "head")
    with InProcess(Chain(tmp_path, ("one",), heads=("head", "head"))) as other:
        assert len(other.run(3)) == 3
        other.start_running(3, 0.01)
        assert other.rate() > 0


def test_a_block_that_does_not_load_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(BlockFlowError) as caught:
        InProcess(Chain(tmp_path, ("missing",)))
    assert caught.value.code == "UNKNOWN_BLOCK"
