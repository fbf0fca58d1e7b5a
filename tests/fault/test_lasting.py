"""What a system was started from, or lies on, fails it while a Manager dies."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import plain_http
import pytest
import small_disk
from takeover_rig import AB, Up, X, furnish, started
from warm_rig import Warm

from blockflow.client.sync import Client
from blockflow.control.journal import NAME

mount = small_disk.mount
HERE = Path(__file__).parents[2]


def test_the_working_directory_may_go(tmp_path: Path) -> None:
    """Paths that led out of it lead on."""
    here = tmp_path / "here"
    here.mkdir()
    furnish(tmp_path)
    inside = (
        "sh",
        "-c",
        f'cd {here} && exec "$0" "$@" --repository ../blocks --state-dir ../state',
    )
    with started(tmp_path, {"PYTHONPATH": str(HERE)}, inside) as it:
        here.rmdir()
        it.kill_manager()
        status = it.taken_over(1)
        assert set(status["manager"]["adopted"]) == {"dispatcher", "a#0", "b#0"}
        pid = next(w["pid"] for w in status["workers"] if w["name"] == "a#0")
        os.kill(pid, 9)
        it.until(lambda s: s["ready"] and _pid(s, "a#0") not in (None, pid))
        with Client(it.address) as client:
            client.infer("t", X)
        log = it.log()
        assert "working directory" not in log and log.count("control plane ended") == 1


def _pid(status: dict[str, list[dict[str, object]]], name: str) -> object:
    return next(w["pid"] for w in status["workers"] if w["name"] == name)


def test_a_full_run_directory_keeps_its_journal(tmp_path: Path, warm: Warm, mount: Path) -> None:
    """So that what happens on it is known to a successor, which takes over."""
    furnish(tmp_path)
    start = partial(warm.popen, disk=small_disk.small_disk(mount, "size=16m"))
    with started(tmp_path, {"BLOCKFLOW_RUN_ROOT": str(mount / "run")}, start=start) as it:
        ballast = Path(f"/proc/{it.process.pid}/root{mount}/ballast")
        with pytest.raises(OSError, match="No space left"):
            fill(ballast)
        for what in ("drain", "undrain"):
            operate(it, what)
        status = it.status()
        before = {w["name"]: w["pid"] for w in status["workers"]}
        assert status["warnings"] == [] and "journal" not in it.log()
        for n in (1, 2):
            it.kill_manager()
            status = it.taken_over(n)
            assert {w["name"]: w["pid"] for w in status["workers"]} == before
        with Client(it.address) as client:
            client.infer("t", X)
        assert "journal" not in it.log()
        ballast.unlink()
        it.post(AB)


def test_a_journal_that_cannot_be_written_is_told_while_that_lasts(
    tmp_path: Path, warm: Warm
) -> None:
    furnish(tmp_path)
    with started(tmp_path, start=warm.popen) as it:
        spare = Path(it.ready["run_dir"]) / f".{NAME}.new"
        spare.unlink()
        spare.mkdir()
        operate(it, "drain")
        assert any("the journal cannot be written" in w for w in it.status()["warnings"])
        spare.rmdir()
        operate(it, "undrain")
        assert it.status()["warnings"] == []
        assert it.log().count("the journal cannot be written") == 1
        it.kill_manager()
        assert len(it.taken_over(1)["manager"]["adopted"]) == 3


def operate(it: Up, what: str) -> None:
    answer = plain_http.post(f"{it.ready['rest']}/v1/blocks/b/{what}", json={}, timeout=60)
    assert answer.status_code == 200, answer.text


def fill(path: Path) -> None:
    """Take what is left of a file system."""
    with path.open("wb", buffering=0) as f:
        for size in (1 << 20, 1 << 12, 1):
            with suppress(OSError):
                while True:
                    f.write(bytes(size))
        f.write(b"x")
