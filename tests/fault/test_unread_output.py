"""Nobody reads what the control plane says: it supervises on, has successors, ends when told."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from takeover_rig import Load, furnish, members, started
from up_rig import family, gone
from warm_rig import Warm

from blockflow.launch.local import TemplateLauncher
from tests.contract.test_launchers import ENTRY, spec_for

STOP_S = 30.0
"""The guardian kills a control plane that does not end after a minute."""


@contextmanager
def unread(how: str) -> Iterator[int]:
    """A standard error that takes nothing; who takes it closes it."""
    if how == "pipe":
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        try:
            while True:
                os.write(writer, b"." * 4096)
        except BlockingIOError:
            os.set_blocking(writer, True)  # the flag is shared with those who inherit it
    else:
        reader, writer = pty.openpty()
        os.write(reader, b"\x13")  # Ctrl-S
    try:
        yield writer
    finally:
        os.close(reader)


@contextmanager
def redirected_stderr(writer: int) -> Iterator[None]:
    """This process's goes there meanwhile; closes ``writer``."""
    kept = os.dup(2)
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@pytest.mark.parametrize("how", ["pipe", "terminal"])
def test_a_log_that_takes_nothing_keeps_nobody_waiting(
    how: str, tmp_path: Path, warm: Warm
) -> None:
    """Not the Manager whose worker dies, nor the guardian whose Manager does, nor their end."""
    furnish(tmp_path)
    with unread(how) as writer:

        def start(args: list[str], **options: Any) -> subprocess.Popen[Any]:
            with os.fdopen(writer) as stderr:
                return warm.popen(args, **{**options, "stderr": stderr})

        with started(tmp_path, start=start) as it:
            (first, _) = members(it.status())["a#0"]
            os.kill(first, signal.SIGKILL)
            it.until(lambda s: s["ready"] and members(s)["a#0"][0] not in (0, first))
            it.kill_manager()
            it.taken_over(1)
            with Load(it.address) as load:
                load.more()
            children = family(it.process.pid)
            it.process.terminate()
            assert it.process.wait(STOP_S) == 0
            assert gone(children, Path(it.ready["run_dir"]))


@pytest.mark.parametrize("how", ["pipe", "terminal"])
def test_nor_a_template_whose_libraries_have_something_to_say(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it launches has its own log all the same."""
    (tmp_path / "talks.py").write_text("import sys\nprint('beware', file=sys.stderr)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    launcher = TemplateLauncher(preload=["talks"])
    with unread(how) as writer:
        with redirected_stderr(writer):
            launcher.start()
        try:
            launcher.wait_ready(STOP_S)
            log = tmp_path / "log"
            spec = {**spec_for(tmp_path, 4), "log_path": str(log)}
            assert launcher.launch(ENTRY, spec, "w#0").wait(STOP_S) == 4
            assert log.read_text() == "a line on stdout\n"
        finally:
            launcher.close()


KEEPS = """
import sys
from pathlib import Path

KEPT = sys.stderr

def talk(spec):
    files = [open(Path(spec["folder"]) / str(i), "wb") for i in range(20)]
    KEPT.write("beware\\n")
    return len([f for f in files if f.seek(0, 2)])
"""
"""As loggers of torch do; the child's status is how many of its files have got the line."""


def test_what_a_library_has_kept_of_the_templates_output_is_its_childs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keeps.py").write_text(KEEPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    launcher = TemplateLauncher(preload=["keeps"])
    log = tmp_path / "log"
    with unread("pipe") as writer, redirected_stderr(writer):
        launcher.start()
    try:
        launcher.wait_ready(STOP_S)
        spec = {"folder": str(tmp_path), "log_path": str(log)}
        assert launcher.launch("keeps:talk", spec, "w#0").wait(STOP_S) == 0
        assert log.read_text() == "beware\n"
    finally:
        launcher.close()
