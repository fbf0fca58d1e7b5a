"""What control groups allow, of both versions of the kernel's interface."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cgroup_rig import cgroup

from blockflow.core.cores import Cores, at_once
from blockflow.launch import cgroup as groups

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the groups lie; ``own`` beside it says which are this process's."""
    monkeypatch.setattr(groups, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(groups, "OWN", tmp_path / "own")
    return tmp_path / "cgroup"


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_tightest_group_counts(root: Path) -> None:
    write(root.parent / "own", "1:cpu,cpuacct:/\n0::/service/unit\n")
    write(root / "service" / "cpu.max", "150000 100000\n")
    write(root / "service" / "unit" / "cpu.max", "max 100000\n")
    write(root / "cpu.max", "400000 100000\n")
    write(root / "service" / "unit" / "memory.max", "max\n")
    write(root / "service" / "memory.max", f"{GIB}\n")
    write(root / "cpu,cpuacct" / "cpu.cfs_quota_us", "-1\n")
    write(root / "cpu,cpuacct" / "cpu.cfs_period_us", "100000\n")
    assert groups.cpu_quota() == 1.5
    assert groups.memory_limit() == GIB
    assert groups.available_cores().at_once == 1


def test_the_limits_of_older_control_groups(root: Path) -> None:
    write(root.parent / "own", "4:memory:/unit\n3:cpu,cpuacct:/unit\n2:cpuset:/unit\n")
    write(root / "cpu,cpuacct" / "unit" / "cpu.cfs_quota_us", "250000\n")
    write(root / "cpu,cpuacct" / "unit" / "cpu.cfs_period_us", "100000\n")
    write(root / "memory" / "memory.limit_in_bytes", f"{GIB}\n")
    # Without a limit it says the most that it can count.
    write(root / "memory" / "unit" / "memory.limit_in_bytes", "9223372036854771712\n")
    assert groups.cpu_quota() == 2.5
    assert groups.memory_limit() == GIB
    (root / "memory" / "memory.limit_in_bytes").unlink()
    assert groups.memory_limit() == 0


def test_of_nested_limits_of_processes_the_tightest_counts(root: Path) -> None:
    write(root.parent / "own", "4:pids:/a/b\n0::/a\n")
    assert groups.tasks_limit() == 0
    write(root / "pids" / "a" / "b" / "pids.max", "max\n")
    write(root / "pids" / "a" / "pids.max", "512\n")
    write(root / "a" / "pids.max", "1024\n")
    assert groups.tasks_limit() == 512


def test_what_is_left_of_the_memory_counts_files_that_can_be_dropped(root: Path) -> None:
    write(root.parent / "own", "0::/a/b\n1:memory:/c\n")
    assert groups.memory_left() is None
    write(root / "a" / "memory.max", "1000\n")
    write(root / "a" / "memory.current", "900\n")
    write(root / "a" / "memory.stat", "anon 500\ninactive_file 300\nactive_file 100\n")
    assert groups.memory_left() == 400
    write(root / "a" / "b" / "memory.max", "max\n")
    write(root / "a" / "b" / "memory.current", "1\n")
    write(root / "memory" / "memory.limit_in_bytes", "700\n")
    write(root / "memory" / "memory.usage_in_bytes", "600\n")
    assert groups.memory_left() == 100
    write(root / "memory" / "memory.stat", "inactive_file 1\ntotal_inactive_file 200\n")
    assert groups.memory_left() == 300
    assert sorted(groups.memory_rooms()) == [(300, 700), (400, 1000)]
    write(root / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    assert groups.memory_left() == 400


def test_in_a_container_its_root_is_the_group(root: Path) -> None:
    """The path may be the host's, of which nothing is to be seen."""
    write(root.parent / "own", "0::/kubepods/pod1/container\n")
    write(root / "cpu.max", "400000 100000\n")
    assert groups.cpu_quota() == 4.0


@pytest.mark.parametrize("text", ["", "max 100000", "100000 0", "many 100000", "100000"])
def test_what_says_no_limit_or_nonsense_limits_nothing(root: Path, text: str) -> None:
    write(root.parent / "own", "0::/\n")
    write(root / "cpu.max", text)
    assert groups.cpu_quota() == 0.0
    assert groups.available_cores() == tuple(sorted(os.sched_getaffinity(0)))
    assert groups.available_cores().at_once == len(os.sched_getaffinity(0))


def test_without_control_groups_there_is_no_limit(root: Path) -> None:
    assert (groups.cpu_quota(), groups.memory_limit()) == (0.0, 0)


def said_within(group: Path, code: str) -> str:
    """What a process of the group prints that runs ``code``, which waits for a line first."""
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        (group / "cgroup.procs").write_text(str(process.pid))
        return process.communicate("\n", timeout=60)[0]


def test_what_the_kernel_limits_is_found() -> None:
    code = "from blockflow.launch.cgroup import cpu_quota; input(); print(cpu_quota())"
    with cgroup("cpu", "cpu.cfs_quota_us", 150_000) as group:
        period = int((group / "cpu.cfs_period_us").read_text())
        assert float(said_within(group, code)) == 150_000 / period


@pytest.mark.parametrize(
    ("quota", "most"), [(0, 8), (-1, 8), (0.2, 1), (1, 1), (2.9, 2), (8, 8), (64, 8)]
)
def test_cores_that_may_be_busy_at_once(quota: float, most: int) -> None:
    cores = Cores(range(8), quota)
    assert cores.at_once == at_once(cores) == most
    assert cores == tuple(range(8)) and len(cores) == 8


def test_of_other_sequences_all_may_be() -> None:
    assert at_once((3, 5)) == at_once(range(2)) == 2


def test_the_nearest_group_that_counts_says_how_many_were_killed(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "VMSTAT", tmp_path / "vmstat")
    write(root.parent / "own", "4:memory:/host/unit\n0::/service/unit\n")
    assert groups.oom_kills() == (0, False)
    write(tmp_path / "vmstat", "nr_free_pages 9\noom_kill 12\n")
    assert groups.oom_kills() == (12, False)
    write(root / "memory.events", "low 0\nmax 7\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert groups.oom_kills() == (2, True)
    write(root / "service" / "unit" / "memory.events", "oom_kill 1\n")
    assert groups.oom_kills() == (1, True)
    # Before Linux 4.13 version 1 does not count.
    write(root / "memory" / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\n")
    assert groups.oom_kills() == (1, True)
    write(root / "memory" / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert groups.oom_kills() == (5, True)


def test_what_the_kernel_kills_is_counted() -> None:
    """A child takes more than there is, and is the largest of its group."""
    code = (
        "import subprocess, sys\n"
        "from blockflow.launch.cgroup import memory_limit, oom_kills\n"
        "input()\n"
        "before = oom_kills()\n"
        "greedy = 'x = bytearray(b\"x\") * (1 << 28)'\n"
        "status = subprocess.run([sys.executable, '-c', greedy]).returncode\n"
        "now = oom_kills()\n"
        "print(status, now.total - before.total, before.own and now.own, memory_limit())\n"
    )
    with cgroup("memory", "memory.limit_in_bytes", GIB // 16) as group:
        assert said_within(group, code).split() == ["-9", "1", "True", str(GIB // 16)]
