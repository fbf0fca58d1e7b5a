"""The doctor: every check finds its planted fault and has a remedy; gathering sees what is."""

from __future__ import annotations

import errno
import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from control_rig import save_echoes

from blockflow.cli.exits import ExitCode
from blockflow.cli.main import main
from blockflow.control.store import CURRENT, PREVIOUS, StateStore
from blockflow.monitor.doctor import gather as gathering
from blockflow.monitor.doctor.checks import CHECKS, examine, summary, worst
from blockflow.monitor.doctor.facts import (
    GIB,
    MIB,
    BlockFacts,
    Facts,
    Folder,
    Leftover,
    Level,
    Port,
)
from blockflow.monitor.doctor.gather import find_leftovers, gather, look_at
from blockflow.tensormq.janitor import RunDir
from blockflow.tensormq.keys import Keyring

GOOD = Facts()
SHM, RUN, STATE, BLOCKS = GOOD.shm, GOOD.run_root, GOOD.state_dir, GOOD.repository
TAKEN = Port("REST", "127.0.0.1:5780", "--port", "nginx (process 7)")

PLANTED: list[tuple[dict[str, Any], str, Level, str]] = [
    ({"system": "Darwin"}, "platform", Level.ERROR, "not Linux"),
    ({"python": (3, 10)}, "platform", Level.ERROR, "3.10"),
    ({"pidfd": False}, "platform", Level.ERROR, "pidfd_open"),
    ({"memfd": False}, "platform", Level.ERROR, "memfd_create"),
    ({"counted": False}, "platform", Level.WARNING, "does not count"),
    ({"uid": 0}, "platform", Level.WARNING, "root"),
    ({"cpu_latency": "/dev/x: permission denied"}, "idle cores", Level.NOTE, "/dev/x: permission"),
    ({"zmq": (4, 3, 2)}, "libzmq", Level.ERROR, "4.3.2"),
    ({"curve": False}, "libzmq", Level.ERROR, "CURVE"),
    ({"threads": "ZeroMQ needs 2 threads"}, "libzmq", Level.ERROR, "needs 2"),
    ({"packages": {}}, "engines", Level.ERROR, "torch"),
    ({"packages": {"torch": "2"}}, "engines", Level.NOTE, "openvino"),
    (
        {"packages": {"torch": "2"}, "blocks": (BlockFacts("b", extra="openvino"),)},
        "engines",
        Level.ERROR,
        "use it: b",
    ),
    ({"shm": replace(SHM, exists=False)}, "shared memory", Level.ERROR, "not there"),
    ({"shm": replace(SHM, writable=False)}, "shared memory", Level.ERROR, "written"),
    ({"shm": replace(SHM, free=31 * MIB)}, "shared memory", Level.ERROR, "31 MiB"),
    (
        {"shm": replace(SHM, free=63 * MIB, size=64 * MIB)},
        "shared memory",
        Level.WARNING,
        "of 64 MiB",
    ),
    ({"shm": replace(SHM, free=500 * MIB)}, "shared memory", Level.WARNING, "500 MiB"),
    ({"shm": replace(SHM, inodes=9)}, "shared memory", Level.ERROR, "9 more files"),
    ({"memory": GIB // 2}, "memory", Level.WARNING, "512 MiB"),
    ({"memory_limit": GIB // 2}, "memory", Level.WARNING, "512 MiB"),
    ({"quota": 1.5}, "cores", Level.NOTE, "planned for 1;"),
    ({"quota": 0.5}, "cores", Level.WARNING, "0.5"),
    ({"cores": 1}, "cores", Level.NOTE, "one core"),
    ({"gpus": 2}, "GPUs", Level.NOTE, "multi-process service"),
    ({"gpus": 2, "cuda": False}, "GPUs", Level.WARNING, "built without CUDA"),
    ({"fds_soft": 64}, "descriptors", Level.ERROR, "64"),
    ({"fds_soft": 512}, "descriptors", Level.WARNING, "512"),
    ({"tasks": 63}, "processes", Level.ERROR, "63"),
    ({"tasks": 255}, "processes", Level.WARNING, "few blocks"),
    ({"clocksource": "hpet"}, "clock", Level.WARNING, "hpet"),
    ({"clock_step_ns": 4_000_000}, "clock", Level.WARNING, "coarse"),
    ({"year": 1970}, "clock", Level.WARNING, "1970"),
    ({"run_root": replace(RUN, ours=False)}, "run folder", Level.ERROR, "another user"),
    ({"run_root": replace(RUN, mode=0o777)}, "run folder", Level.ERROR, "777"),
    ({"run_root": replace(RUN, mode=0o755)}, "run folder", Level.WARNING, "755"),
    ({"run_root": replace(RUN, path="/r" * 36)}, "run folder", Level.ERROR, "longer than 70"),
    ({"leftovers": (Leftover("/dev/shm/x/y", 3 * MIB),)}, "leftovers", Level.WARNING, "3 MiB"),
    ({"state_dir": replace(STATE, writable=False)}, "state", Level.ERROR, "written"),
    ({"state_dir": replace(STATE, ours=False)}, "state", Level.ERROR, "written"),
    ({"state_dir": replace(STATE, exists=False, writable=False)}, "state", Level.ERROR, "made by"),
    ({"state_dir": replace(STATE, free=MIB - 1)}, "state", Level.ERROR, "1 MiB"),
    ({"state_dir": replace(STATE, inodes=0)}, "state", Level.ERROR, "0 more files"),
    ({"state_dir": replace(STATE, mode=0o770)}, "state", Level.ERROR, "others"),
    ({"state_dir": replace(STATE, loose=("s/state.json",))}, "state", Level.ERROR, "others"),
    ({"state_dir": replace(STATE, foreign=("s/lock",))}, "state", Level.ERROR, "others"),
    ({"stored": "state.json: torn", "stored_usable": False}, "state", Level.ERROR, "torn"),
    ({"stored": "state.json: torn"}, "state", Level.WARNING, "previous generation"),
    ({"ports": (TAKEN,)}, "ports", Level.ERROR, "nginx"),
    ({"keys": "the token file is empty"}, "keys", Level.ERROR, "empty"),
    ({"repository": replace(BLOCKS, exists=False)}, "repository", Level.WARNING, "no folder"),
    ({"repository": replace(BLOCKS, mode=0o777)}, "repository", Level.ERROR, "anybody"),
    ({"repository": replace(BLOCKS, loose=("blocks/t",))}, "repository", Level.ERROR, "blocks/t"),
    ({"repository": replace(BLOCKS, loose=("x",) * 9)}, "repository", Level.ERROR, "and 4 more"),
    ({"repository": replace(BLOCKS, foreign=("blocks/u",))}, "repository", Level.WARNING, "user's"),
    ({"blocks": (BlockFacts("b", "DIGEST_MISMATCH: x"),)}, "repository", Level.ERROR, "DIGEST"),
    ({"blocks": ()}, "repository", Level.NOTE, "no block"),
    ({"hashed": False}, "repository", Level.NOTE, "not hashed"),
    ({"blocks": (BlockFacts("b", profile="not measured"),)}, "profiles", Level.NOTE, "b"),
]


def test_a_sound_machine_has_nothing_to_mend() -> None:
    findings = examine(GOOD)
    assert {f.level for f in findings} == {Level.OK}
    assert worst(findings) is Level.OK
    asked = {check for _, check, *_ in PLANTED}  # all but those are told of
    assert asked - {f.check for f in findings} == {"GPUs", "keys", "ports"}
    other = examine(replace(GOOD, cuda=False, mps=True, packages={"torch": "2", "openvino": ""}))
    assert "GPUs" not in {f.check for f in other} and "torch 2" in [f.text for f in other]
    assert summary(findings)["worst"] == "ok"
    (gpus,) = (f for f in examine(replace(GOOD, gpus=2, mps=True)) if f.check == "GPUs")
    assert (gpus.level, gpus.text[0]) == (Level.OK, "2")


@pytest.mark.parametrize(("fault", "check", "level", "word"), PLANTED, ids=lambda v: str(v)[:40])
def test_a_planted_fault_is_found(
    fault: dict[str, Any], check: str, level: Level, word: str
) -> None:
    findings = examine(replace(GOOD, **fault))
    wrong = [f for f in findings if f.level is not Level.OK]
    assert any(f.check == check and f.level is level and word in f.text for f in wrong), wrong
    assert {f.check for f in wrong} == {check}  # and nothing else is blamed
    assert all(f.remedy for f in wrong)
    assert worst(findings) is level


def test_every_check_has_a_planted_fault() -> None:
    for check in CHECKS:
        assert any(
            f.level is not Level.OK for fault, *_ in PLANTED for f in check(replace(GOOD, **fault))
        ), check.__name__


def test_our_own_system_on_a_port_is_no_fault() -> None:
    assert worst(examine(replace(GOOD, ports=(replace(TAKEN, holder="blockflow"),)))) is Level.OK


# --- gathering ------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders of this test's own; nothing of the user's is looked at."""
    monkeypatch.setenv("BLOCKFLOW_RUN_ROOT", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


def found(root: Path, **kw: Any) -> Facts:
    given = {"rest_port": free_port(), "client_port": free_port(), **kw}
    return gather(root / "blocks", **given)


def test_this_machine_can_run_the_tests(machine: Path) -> None:
    """Nothing is made up: on a machine that runs this suite, these checks are well."""
    facts = found(machine)
    assert facts.system == "Linux" and facts.pidfd and facts.memfd and facts.curve and facts.counted
    assert facts.threads == ""
    assert facts.packages["torch"] and facts.cores >= 1 and facts.memory > 0
    assert facts.clock_step_ns >= 1 and facts.quota >= 0 and facts.memory_limit >= 0
    assert not facts.leftovers and not facts.keys and facts.blocks == ()
    assert not facts.repository.exists and facts.run_root.ours
    assert list(machine.iterdir()) == []  # and nothing was made


def test_where_proc_tells_of_processes_only(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a service with ``ProcSubset=pid``."""

    def absent() -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "/proc/meminfo")

    monkeypatch.setattr(psutil, "virtual_memory", absent)
    assert found(machine).memory > 0


def test_dead_and_living_systems_are_told_apart() -> None:
    with TemporaryDirectory(prefix="bf") as folder:  # a short path: there would be sockets below it
        root = Path(folder)
        living = RunDir.create(root)
        dead = root / "dead"
        dead.mkdir()
        (dead / "lock").touch()
        (dead / "arena").write_bytes(b"x" * 100_000)
        (root / "link").symlink_to(dead)
        (left,) = find_leftovers(root)
        assert left.path == str(dead)
        assert dead.exists()  # looking removes nothing
        living.remove()


def test_a_block_that_was_altered(machine: Path) -> None:
    store = save_echoes(machine / "blocks", "good", "bad")
    facts = found(machine)
    assert [b.problem for b in facts.blocks] == ["", ""] and facts.hashed
    file = machine / "blocks" / "bad" / store.manifest("bad").artifact
    file.write_bytes(file.read_bytes()[::-1])
    bad, good = found(machine).blocks
    assert "DIGEST_MISMATCH" in bad.problem and bad.remedy and not good.problem
    quick = found(machine, hash_bytes=0)
    assert not quick.hashed


def test_who_has_the_port(machine: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        rest, _ = found(machine, rest_port=port).ports
    assert rest.holder and rest.option == "--port"


@pytest.mark.parametrize(
    ("name", "command", "holder"),
    [
        ("bf:manager", "", "blockflow"),
        ("python3", "/opt/b/bin/python3 /opt/b/bin/blockflow up", "blockflow"),
        ("python3", "python3 -m blockflow up", "blockflow"),
        ("python3", "/home/blockflow/bin/python3 app.py", "python3 (process 7)"),
        ("nginx", "nginx: master process /home/blockflow/nginx", "nginx (process 7)"),
    ],
)
def test_whose_the_port_is(
    monkeypatch: pytest.MonkeyPatch, name: str, command: str, holder: str
) -> None:
    def entry(port: int, pid: int | None, status: str = psutil.CONN_LISTEN) -> Any:
        return SimpleNamespace(status=status, laddr=SimpleNamespace(port=port), pid=pid)

    seen = [entry(81, 9), entry(80, 9, psutil.CONN_ESTABLISHED), entry(82, None), entry(80, 7)]
    process = SimpleNamespace(cmdline=command.split, name=lambda: name)
    monkeypatch.setattr(psutil, "net_connections", lambda kind: seen)
    monkeypatch.setattr(psutil, "Process", {7: process}.__getitem__)
    assert gathering._holder(80) == holder
    assert gathering._holder(82) == gathering._holder(83) == "another user's process"


def test_a_port_that_is_not_for_this_user(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(gathering.socket, "create_server", refuse)
    rest, _ = gather(machine / "blocks", rest_port=80, client_port=81).ports
    assert "for root alone" in rest.holder


def test_keys_that_are_unfit(machine: Path) -> None:
    ring = Keyring(machine / "config" / "blockflow" / "keys")
    ring.create()
    assert not found(machine).keys
    ring.token_file.chmod(0o644)
    assert "read by others" in found(machine).keys
    assert "token" not in found(machine, keys=machine / "none").keys
    assert found(machine, keys=machine / "none").keys


def test_a_folder_that_cannot_even_be_looked_at_is_told_of(machine: Path) -> None:
    """A name too long, say, or a folder above that is closed to us."""
    folder = look_at(machine / ("x" * 300))
    assert not folder.exists and folder.ours and folder.writable


def test_a_folder_that_is_not_there_is_judged_by_its_place(machine: Path) -> None:
    folder = look_at(machine / "a" / "b")
    assert not folder.exists and folder.writable and folder.free > 0
    link = machine / "link"
    link.symlink_to("/etc")
    assert not look_at(link).ours


def test_what_others_can_write_to_or_own(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = save_echoes(machine / "blocks", "open", "closed")
    sound = found(machine).repository
    assert sound.loose == sound.foreign == ()
    folder = machine / "blocks" / "open"
    file = folder / store.manifest("open").artifact
    folder.chmod(0o777)
    file.chmod(0o666)
    (machine / "blocks" / "closed" / "link").symlink_to(file)  # its own mode means nothing
    assert found(machine).repository.loose == tuple(sorted((str(folder), str(file))))
    assert found(machine).repository.foreign == ()
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    foreign = gathering.look_into(machine / "blocks").foreign
    assert (str(folder) in foreign) is (os.getuid() != 0)
    if os.getuid() == 0:
        os.chown(folder, 12345, 0)
        assert gathering.look_into(machine / "blocks").foreign == (str(folder),)


def test_a_state_that_is_torn(machine: Path) -> None:
    folder = machine / "state"
    assert found(machine, state_dir=folder).stored == ""
    with StateStore(folder) as state:
        assert found(machine, state_dir=folder).stored == ""  # new, and in use
        for epoch in (1, 2):
            state.commit(epoch, {"posted": epoch}, {})
    sound = found(machine, state_dir=folder)
    assert (sound.stored, sound.stored_usable) == ("", True)
    assert sound.stored_bytes == (folder / CURRENT).stat().st_size > 0
    before = sorted(p.name for p in folder.iterdir())
    (folder / CURRENT).write_bytes(b"{")
    torn = found(machine, state_dir=folder)
    assert torn.stored.startswith("state.json: not valid JSON") and torn.stored_usable
    (folder / PREVIOUS).unlink()
    lost = found(machine, state_dir=folder)
    assert lost.stored.endswith("state.previous.json: missing") and not lost.stored_usable
    (folder / CURRENT).unlink()
    assert not found(machine, state_dir=folder).stored_usable  # the lock file knows of a first save
    assert sorted(p.name for p in folder.iterdir()) == sorted({*before} - {CURRENT, PREVIOUS})


# --- the command ----------------------------------------------------------------------------------


def test_the_command(
    machine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = replace(GOOD, repository=Folder(str(machine)))
    monkeypatch.setattr("blockflow.monitor.doctor.gather.gather", lambda *_a, **_kw: good)
    assert main(["doctor"]) == ExitCode.OK
    assert "error" not in capsys.readouterr().out
    bad = replace(good, zmq=(4, 2, 0))
    monkeypatch.setattr("blockflow.monitor.doctor.gather.gather", lambda *_a, **_kw: bad)
    assert main(["doctor"]) == ExitCode.NOT_READY
    assert "CVE-2019-13132" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == ExitCode.NOT_READY
    told = json.loads(capsys.readouterr().out)
    assert told["worst"] == "error"
    assert {"check", "level", "text", "remedy"} == set(told["findings"][0])


def test_the_command_looks_at_this_machine(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(os.listdir(machine))
    ports = ["--port", str(free_port()), "--client-port", str(free_port())]
    main(["doctor", "-r", str(machine / "blocks"), *ports, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert {f["check"] for f in told["findings"]} >= {"platform", "libzmq", "ports", "repository"}
    assert sorted(os.listdir(machine)) == before
