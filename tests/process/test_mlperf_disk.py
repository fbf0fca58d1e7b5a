"""``blockflow bench`` where there is no room: for the run's files, LoadGen's logs or the report."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_dispatcher import FakeDispatcher
from mlperf_rig import job_of

from blockflow.bench.mlperf.job import DRIVER_LOG, LATENCIES, OUTCOME
from blockflow.bench.mlperf.report import write_report
from blockflow.bench.mlperf.run import LEAST_FREE, read_run, run
from blockflow.bench.mlperf.settings import Mode, Scenario, Target, make_settings
from blockflow.bench.mlperf.tally import Counts
from blockflow.core.errors import BlockFlowError


def test_a_disk_that_fills_up_in_the_run_is_a_typed_error(tmp_path: Path) -> None:
    with FakeDispatcher() as fake:
        job = job_of(fake, "echo", tmp_path)
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "driver.json.part").symlink_to("/dev/full")
        found = run(job, folder, lambda counts: None)
    assert found.error is not None
    assert found.error.code == "NO_SPACE"
    assert not found.verdict.valid
    assert (folder / "mlperf_log_summary.txt").read_text()


def test_what_has_no_room_to_be_said_is_no_defect(tmp_path: Path) -> None:
    """Standard error lies on the same full disk as the driver's files."""
    with FakeDispatcher() as fake:
        job = job_of(fake, "echo", tmp_path)
        folder = tmp_path / "run"
        folder.mkdir()
        for name in (DRIVER_LOG, OUTCOME + ".part"):
            (folder / name).symlink_to("/dev/full")
        # Its standard error is open by then; this file would never end for whoever reads it.
        found = run(job, folder, lambda c: (folder / DRIVER_LOG).unlink(missing_ok=True))
    assert found.error is not None
    assert found.error.code == "NO_SPACE"
    assert found.to_dict()["kind"] == "partial"
    counts = found.counts
    assert counts.answered == counts.issued > 0
    assert counts.queries == {"echo": counts.issued}
    assert not found.verdict.valid


def test_a_driver_that_died_on_a_full_disk_was_not_defective(tmp_path: Path) -> None:
    settings = make_settings(Scenario.OFFLINE, Mode.PERFORMANCE, {"a": Target(0.5)}, short=True)
    (tmp_path / DRIVER_LOG).write_text("Fatal Python error: what")
    (tmp_path / LATENCIES).write_bytes(b"PK\x03\x04 broken off")
    found = read_run(settings, tmp_path, 1, Counts(9, 7))
    assert found.error is not None
    assert found.error.code == "INTERNAL"
    with files_of_at_most(4 << 10):
        found = read_run(settings, tmp_path, 1, Counts(9, 7))
    assert found.error is not None
    assert found.error.code == "NO_SPACE"
    assert "Fatal" in found.error.message
    assert found.counts.answered == 7
    assert sorted(p.name for p in tmp_path.iterdir()) == [DRIVER_LOG, LATENCIES]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={LEAST_FREE + (8 << 20)}", "tmpfs"]
        subprocess.run([*mount, str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may mount a disk that can be filled")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Until not a byte more has room."""
    with (folder / "filling").open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def test_a_real_disk_that_fills_up_ends_in_its_own_error(small_disk: Path, tmp_path: Path) -> None:
    full = []

    def progress(counts: Counts) -> None:
        if counts.answered and not full:
            fill(small_disk)
            full.append(counts.answered)

    with FakeDispatcher() as fake:
        job = job_of(fake, "echo", tmp_path, duration_s=1.0)
        found = run(job, small_disk / "run", progress)
    assert full
    assert found.error is not None
    assert found.error.code == "NO_SPACE"
    assert found.to_dict()["partial"]
    assert not found.verdict.valid
    assert found.counts.answered == found.counts.issued >= full[0]


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """What this process and those that it starts write beyond that fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_loadgens_own_log_that_breaks_off_is_a_typed_error(tmp_path: Path) -> None:
    with FakeDispatcher() as fake:
        fake.delay_s = 0.01  # few samples: the driver's own files are small
        job = job_of(fake, "slow", tmp_path)
        with files_of_at_most(4 << 10):
            found = run(job, tmp_path / "run", lambda counts: None)
    assert found.error is not None
    assert found.error.code == "NO_SPACE"
    assert found.to_dict()["partial"]
    assert found.counts.answered > 0
    assert found.latencies["slow"]
    assert not found.verdict.valid


def test_a_report_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "summary.json.part").symlink_to("/dev/full")
    with pytest.raises(BlockFlowError) as caught:
        write_report({"no": "matter"}, [], tmp_path)
    assert caught.value.code == "NO_SPACE"
