"""One visit: the benchmark as a process of its own that imports one arm's sources.

The project is installed in the environment, for editing: without more, every tree would run the
same code. ``PYTHONPATH`` comes first, workers inherit it, and what is really imported is asked for
before each visit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from blockflow.bench.calibration import NAME as CALIBRATION
from blockflow.bench.compare.judgement import Metric, metrics_of
from blockflow.bench.compare.trees import SCRATCH, Tree
from blockflow.bench.mlperf.job import disk
from blockflow.bench.results import Figure, ResultFile
from blockflow.core.errors import make_error

_END_S = 10.0
_LOOK_S = 0.05
_ASK_S = 60.0
_TAIL = 2000
_WHERE = "import blockflow; print(blockflow.__file__)"


def environment(tree: Tree) -> dict[str, str]:
    """With the tree's package before all others."""
    return {**os.environ, "PYTHONPATH": str(tree.folder)}


def imported_from(tree: Tree) -> Path:
    """The package's file that an interpreter of this arm imports.

    Raises:
        SystemError_: BENCHMARK_FAILED when it is another tree's, or there is none; TIMEOUT.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _WHERE],
            cwd=tree.folder,
            env=environment(tree),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"no answer within {_ASK_S:g} s to which sources are imported"
        raise make_error("TIMEOUT", text, where=tree.title) from None
    found = done.stdout.strip()
    if done.returncode or not Path(found).is_relative_to(tree.folder.resolve()):
        raise make_error(
            "BENCHMARK_FAILED",
            f"{tree.title} imports {found or 'no blockflow'}, not its own sources",
            where=str(tree.folder),
            hint=done.stderr.strip()[-_TAIL:],
        )
    return Path(found)


def run_benchmark(tree: Tree, command: Sequence[str], limit_s: float) -> list[Figure]:
    """Run ``python -m COMMAND --json FILE`` in a tree and read what it has written.

    Raises:
        SystemError_: BENCHMARK_FAILED when it fails or what it writes are no figures, TIMEOUT after
            ``limit_s`` seconds, NO_SPACE where there is no room for its files.
    """
    with (
        disk(Path(tempfile.gettempdir()), SCRATCH),
        # What a benchmark leaves behind must not cost its figures.
        tempfile.TemporaryDirectory(prefix="bf-visit-", ignore_cleanup_errors=True) as name,
    ):
        result, log = Path(name) / "figures.jsonl", Path(name) / "log"
        status = _run([*command, "--json", str(result)], tree, log, limit_s)
        if status or not result.exists():
            raise make_error(
                "BENCHMARK_FAILED",
                f"the benchmark ended with status {status}"
                + ("" if status else " and wrote no figures"),
                where=tree.title,
                hint=log.read_text(encoding="utf-8", errors="replace").strip()[-_TAIL:],
            )
        try:
            return [Figure.from_dict(line) for line in ResultFile(result, command[0]).read()]
        except (ValueError, TypeError) as exc:
            text = f"the benchmark wrote what are no figures: {exc}"
            raise make_error("BENCHMARK_FAILED", text, where=tree.title) from exc


def _run(arguments: Sequence[str], tree: Tree, log: Path, limit_s: float) -> int:
    """Its exit status."""
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", *arguments],
            # Not the tree: a benchmark must not leave its files there.
            cwd=log.parent,
            env=environment(tree),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise make_error(
                "TIMEOUT",
                f"the benchmark took longer than {limit_s:g} s",
                where=tree.title,
                hint="give more with --timeout, or measure less",
            ) from None
        finally:
            _end(process)


def values_of(figures: Sequence[Figure]) -> dict[Metric, float]:
    """The numbers that can be compared: not those of the machine's own calibration."""
    return metrics_of(f for f in figures if f.name != CALIBRATION and f.n > 0)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the benchmark if it still runs, and what it has started, which may outlive it: nothing of
    it is to load the machine in the next visit, or afterwards."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    until = time.monotonic() + _END_S
    while _alive(process.pid):
        if time.monotonic() > until:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(_LOOK_S)
    process.wait()


def _alive(group: int) -> bool:
    """A process of the group runs. Zombies do not: where nobody adopts orphans they stay."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return any(_is_of(group, p) for p in psutil.process_iter())


def _is_of(group: int, process: psutil.Process) -> bool:
    try:
        return os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
    except (OSError, psutil.Error):  # it has just gone
        return False
