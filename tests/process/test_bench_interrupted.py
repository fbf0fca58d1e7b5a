"""A benchmark that is ended by SIGTERM leaves no folder and no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from blockflow.bench.interrupts import INTERRUPTED, interruptible
from blockflow.bench.other_process import run_apart
from tests.dispatcher_rig import wait_until
from tests.warm_rig import Warm

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0


def words_of(process: psutil.Process) -> list[str]:
    """Of its command line; [] of one that has ended and that somebody else is to reap."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:  # zombies among them
        return []


def of_ours(folder: Path) -> list[Path]:
    """What is in it, but for the cache that torch makes at its import."""
    return [p for p in folder.iterdir() if not p.name.startswith("torchinductor_")]


FUZZ = """
import subprocess, sys
from types import SimpleNamespace
from blockflow.bench.demo import server
from blockflow.launch.environment import subprocess as forks
server.subprocess = SimpleNamespace(
    Popen=forks.Popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
)
from blockflow.bench.fuzz.run import main
sys.exit(main())
"""


def test_a_benchmark_takes_its_system_and_its_folder_along(tmp_path: Path, warm: Warm) -> None:
    """The fuzzer stands for all: its system is a process of its own with a guardian, a control
    plane, a template, a Dispatcher and a worker."""
    scratch, run_root = tmp_path / "scratch", tmp_path.parent / "rf"  # short: paths of sockets
    scratch.mkdir()
    run_root.mkdir(mode=0o700)
    target = tmp_path / "fuzz.jsonl"
    arguments = ["--decoder-frames", "10", "--frames", "1000000000", "--json", str(target)]
    benchmark = warm.popen(
        [sys.executable, "-c", FUZZ, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(scratch),
            "BLOCKFLOW_RUN_ROOT": str(run_root),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    family: list[psutil.Process] = []
    try:

        def works() -> bool:
            assert benchmark.poll() is None, benchmark.communicate()[0]
            return len(list(run_root.glob("*/arena-*"))) > 1

        wait_until(works, WAIT_S)
        family = psutil.Process(benchmark.pid).children(recursive=True)
        folders = of_ours(scratch)
        benchmark.terminate()
        said, _ = benchmark.communicate(timeout=WAIT_S)
    finally:
        benchmark.kill()
        benchmark.wait()
    assert folders and len(family) > 3, "there was nothing to leave behind"
    assert benchmark.returncode == INTERRUPTED, said
    assert "interrupted; what was started was stopped" in said
    assert "Traceback" not in said
    assert of_ours(scratch) == of_ours(run_root) == []
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    assert not target.exists()


def test_a_process_with_one_thing_to_do_takes_its_folder_along(tmp_path: Path) -> None:
    """Exports run so: they were killed, and left theirs."""
    here = threading.main_thread().ident
    assert here is not None

    def interrupt() -> None:
        wait_until(lambda: any(tmp_path.glob("*/inside")), WAIT_S)
        signal.pthread_kill(here, signal.SIGTERM)

    impatient = threading.Thread(target=interrupt)
    impatient.start()
    with interruptible(), pytest.raises(KeyboardInterrupt):
        run_apart("tests.scratch_child", str(tmp_path))
    impatient.join()
    assert list(tmp_path.iterdir()) == []
    assert not [p for p in psutil.Process().children() if "tests.scratch_child" in words_of(p)]
