"""The doctor where a fault just begins, and what its remedies say."""

from __future__ import annotations

from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from control_rig import save_echoes

from blockflow.core.errors import BlockFlowError
from blockflow.monitor.doctor import gather as gathering
from blockflow.monitor.doctor.checks import (
    GOOD_DISK,
    GOOD_FDS,
    GOOD_TASKS,
    LEAST_DISK,
    LEAST_FDS,
    LEAST_TASKS,
    OLDEST_ZMQ,
    examine,
)
from blockflow.monitor.doctor.facts import (
    GIB,
    MIB,
    BlockFacts,
    Facts,
    Finding,
    Leftover,
    Level,
    Port,
)
from blockflow.repository.repository import BlockRepository

GOOD = Facts()
SHM, RUN, STATE, BLOCKS = GOOD.shm, GOOD.run_root, GOOD.state_dir, GOOD.repository


def wrong(**fault: Any) -> list[Finding]:
    return [f for f in examine(replace(GOOD, **fault)) if f.level is not Level.OK]


@pytest.mark.parametrize(
    "fault",
    [
        {"zmq": OLDEST_ZMQ},
        {"shm": replace(SHM, free=GIB)},
        {"fds_soft": GOOD_FDS},
        {"tasks": GOOD_TASKS},
        {"quota": 4.0},
        {"memory": GIB},
        {"memory_limit": GIB},
        {"clock_step_ns": 1_000_000},
        {"year": 2025},
        {"run_root": replace(RUN, path="/r" * 35)},
        {"run_root": replace(RUN, exists=False, ours=False, mode=0o777)},
        {"state_dir": replace(STATE, free=GOOD_DISK)},
        {"state_dir": replace(STATE, exists=False, ours=False, mode=0o777)},
        {"state_dir": replace(STATE, mode=0o755)},
        {"repository": replace(BLOCKS, mode=0o775)},
        {"packages": {**GOOD.packages, "onnxruntime": "1"}},
        {"shm": replace(SHM, path="/mnt/memory/bf", exists=False)},  # it is made when it is needed
    ],
)
def test_just_well(fault: dict[str, Any]) -> None:
    assert wrong(**fault) == []


@pytest.mark.parametrize(
    ("fault", "level"),
    [
        ({"shm": replace(SHM, free=32 * MIB)}, Level.WARNING),
        ({"shm": replace(SHM, path="/closed/bf", exists=False, writable=False)}, Level.ERROR),
        ({"fds_soft": LEAST_FDS}, Level.WARNING),
        ({"tasks": LEAST_TASKS}, Level.WARNING),
        ({"clock_step_ns": 1_000_001}, Level.WARNING),
        ({"year": 2024}, Level.WARNING),
        ({"run_root": replace(RUN, path="/" + "\u00fc" * 36)}, Level.ERROR),  # 73 bytes
        ({"run_root": replace(RUN, mode=0o720)}, Level.ERROR),
        ({"run_root": replace(RUN, mode=0o710)}, Level.WARNING),
        ({"state_dir": replace(STATE, exists=False, free=LEAST_DISK - 1)}, Level.ERROR),
        ({"state_dir": replace(STATE, free=LEAST_DISK)}, Level.WARNING),
        ({"state_dir": replace(STATE, free=GOOD_DISK - 1)}, Level.WARNING),
        ({"state_dir": replace(STATE, free=4 * MIB), "stored_bytes": 2 * MIB}, Level.WARNING),
        ({"state_dir": replace(STATE, free=4 * MIB), "stored_bytes": 2 * MIB + 1}, Level.ERROR),
        ({"state_dir": replace(STATE, mode=0o720)}, Level.ERROR),
    ],
)
def test_just_not(fault: dict[str, Any], level: Level) -> None:
    assert [f.level for f in wrong(**fault)] == [level]


@pytest.mark.parametrize(
    ("fault", "remedy"),
    [
        ({"fds_soft": 64, "fds_hard": 4096}, "ulimit -n 4096,"),
        ({"fds_soft": 64, "fds_hard": 1 << 60}, "ulimit -n 65536,"),
        ({"quota": 0.5}, "give the service 1 core(s)"),
        ({"quota": 2.9}, "give the service 2 core(s)"),
        ({"blocks": (BlockFacts("b", "X: x", "mend it so"),)}, "mend it so"),
        ({"blocks": (BlockFacts("b", "X: x"),)}, "export the block again"),
        ({"ports": (Port("clients", "h:1", "--client-port", "nginx"),)}, "--client-port N"),
    ],
)
def test_what_to_do(fault: dict[str, Any], remedy: str) -> None:
    (finding,) = wrong(**fault)
    assert remedy in finding.remedy


def test_what_is_told_of_several() -> None:
    left = (Leftover("/x y/a", 3 * MIB), Leftover("/x/b", 2 * GIB))
    (finding,) = wrong(leftovers=left)
    assert "2 dead system(s) left 2.0 GiB" in finding.text
    assert finding.remedy.endswith("rm -r '/x y/a' /x/b")
    (finding,) = wrong(repository=replace(BLOCKS, loose=tuple("abcde")))
    assert "a, b, c, d, e, and" in finding.text and "more" not in finding.text
    (finding,) = wrong(memory=GIB - MIB)
    assert "1023 MiB" in finding.text


def test_a_block_that_cannot_be_used_is_not_said_to_be_sound_nor_unmeasured() -> None:
    bad = BlockFacts("b", "DIGEST_MISMATCH: x", profile="not measured")
    told = examine(replace(GOOD, blocks=(bad, BlockFacts("c"))))
    assert [f.level for f in told if f.check == "repository"] == [Level.ERROR]
    assert [f.level for f in told if f.check == "profiles"] == [Level.OK]


def test_one_finding_for_a_platform_that_is_well_in_part() -> None:
    (finding,) = (f for f in examine(replace(GOOD, memfd=False)) if f.check == "platform")
    assert finding.level is Level.ERROR


# --- gathering


def test_artifacts_are_hashed_up_to_a_sum(tmp_path: Path) -> None:
    store = save_echoes(tmp_path, "a", "b")
    size = store.manifest("a").size
    assert store.manifest("b").size == size
    for budget, hashed in ((2 * size, True), (2 * size - 1, False), (size, False)):
        assert gathering._blocks(tmp_path, budget)[1] is hashed
    file = tmp_path / "b" / store.manifest("b").artifact
    file.write_bytes(file.read_bytes()[::-1])
    found, _ = gathering._blocks(tmp_path, size)
    assert [b.problem for b in found] == ["", ""]  # it was not looked at
    assert gathering._blocks(tmp_path, 2 * size)[0][1].problem.startswith("DIGEST_MISMATCH: ")


def test_what_a_choice_needs_and_what_a_profile_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this machine: what holds on another one does not count."""
    info = type("Info", (), {"choices": {"here": {"engine": "openvino"}, "there": {"engine": "x"}}})
    told: dict[str, Any] = {"fresh": False, "reason": "none is stored"}

    class Manifest:
        size, format = 0, "pt2"

        def to_info(self) -> Any:
            return info

    class Store:
        def __init__(self, root: Path) -> None:
            pass

        def names(self) -> list[str]:
            return ["b"]

        def manifest(self, name: str) -> Manifest:
            return Manifest()

        def verify(self, name: str) -> None:
            pass

    monkeypatch.setattr(gathering, "BlockRepository", Store)
    monkeypatch.setattr(gathering.ProfileShelf, "state", lambda *_: told)
    for machine, extra in (("here", "openvino"), ("elsewhere", "")):
        monkeypatch.setattr(gathering, "fingerprint", lambda machine=machine: machine)
        ((block,), _) = gathering._blocks(tmp_path, 1)
        assert (block.extra, block.profile) == (extra, "none is stored")
    told["fresh"] = True
    assert gathering._blocks(tmp_path, 1)[0][0].profile == ""
    monkeypatch.setattr(Manifest, "format", "echo")  # computes nothing that could be measured
    told["fresh"] = False
    assert gathering._blocks(tmp_path, 1)[0][0].profile == ""


def test_each_port_is_looked_at_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BLOCKFLOW_RUN_ROOT", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with gathering.socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        facts = gathering.gather(
            tmp_path / "blocks", state_dir=tmp_path / "state", rest_port=0, client_port=port
        )
    rest, clients = facts.ports
    assert (rest.holder, rest.option) == ("", "--port")
    assert (clients.address, clients.option) == (f"127.0.0.1:{port}", "--client-port")
    assert clients.holder
    assert facts.fds_soft <= facts.fds_hard
    assert facts.state_dir.path == str(tmp_path / "state")


@pytest.mark.parametrize(
    ("group", "user", "most"), [(0, -1, 0), (100, -1, 100), (0, 90, 90), (100, 90, 90)]
)
def test_the_tightest_limit_of_processes_counts(
    monkeypatch: pytest.MonkeyPatch, group: int, user: int, most: int
) -> None:
    monkeypatch.setattr(gathering.cgroup, "tasks_limit", lambda: group)
    monkeypatch.setattr(gathering.resource, "getrlimit", lambda kind: (user, user))
    monkeypatch.setattr(gathering.os, "geteuid", lambda: 1000)
    assert gathering._tasks() == most
    monkeypatch.setattr(gathering.os, "geteuid", lambda: 0)
    assert gathering._tasks() == group


def test_leftovers_are_measured_in_bytes(tmp_path: Path) -> None:
    dead = tmp_path / "dead"
    dead.mkdir()
    (dead / "lock").touch()
    (dead / "arena").write_bytes(b"x" * 1_000_000)
    (left,) = gathering.find_leftovers(tmp_path)
    assert 1_000_000 <= left.nbytes < 1_100_000


def test_where_shared_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for root, place in (
        ("/dev/shm/x", "/dev/shm"),
        ("/run/x", "/run/x"),
        ("/dev/shmx", "/dev/shmx"),
    ):
        monkeypatch.setenv(gathering.ROOT_ENV, root)
        assert gathering._shared_memory(Path(root)) == Path(place)
    monkeypatch.delenv(gathering.ROOT_ENV)  # a machine without it: files go to the disk
    assert gathering._shared_memory(Path("/tmp/blockflow-0")) == Path("/dev/shm")


def test_the_devices_that_a_test_pretends_are_none_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(gathering.DOUBLE_ENV, "2")
    assert gathering._gpus() == 0


def test_a_build_for_gpus_is_known_by_its_library(tmp_path: Path) -> None:
    torch = ModuleSpec("torch", None, origin=str(tmp_path / "torch" / "__init__.py"))
    library = tmp_path / "torch" / "lib" / "libtorch_cuda.so"
    library.parent.mkdir(parents=True)
    assert not gathering.has_cuda(torch) and not gathering.has_cuda(None)
    library.touch()
    assert gathering.has_cuda(torch)


def test_a_folder_that_may_be_written_and_not_entered(tmp_path: Path, monkeypatch: Any) -> None:
    asked: list[int] = []
    monkeypatch.setattr("os.access", lambda _, mode: asked.append(mode) or True)
    assert gathering.look_at(tmp_path).writable
    assert asked == [gathering.os.W_OK | gathering.os.X_OK]


def test_keys_that_are_named_and_not_there_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert gathering._keys(None) == ""
    assert str(tmp_path / "keys") in gathering._keys(tmp_path / "keys")


def test_who_has_no_home_lacks_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that no user has, as in some containers."""

    def none() -> Path:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    assert gathering._keys(None) == ""


def test_errors_of_blocks_keep_their_hints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def torn(self: Any, name: str) -> Any:
        raise BlockFlowError("DIGEST_MISMATCH", "torn", hint="write it anew")

    monkeypatch.setattr(BlockRepository, "names", lambda self: ["b"])
    monkeypatch.setattr(BlockRepository, "manifest", torn)
    assert gathering._blocks(tmp_path, 1) == (
        (BlockFacts("b", "DIGEST_MISMATCH: torn", "write it anew"),),
        True,
    )
