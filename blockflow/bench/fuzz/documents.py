"""Documents: files of the system's own, and what its processes tell each other at length.

They are trusted: they lie in private folders. What is torn or altered is refused all the same, and
never ends the process that reads it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from blockflow.bench.fuzz.decoder import Decoder
from blockflow.control.crashes import FILE as CRASHES
from blockflow.control.crashes import FORMAT as CRASHES_FORMAT
from blockflow.control.crashes import CrashBook
from blockflow.control.documents import read_sealed, seal
from blockflow.control.fleet import Role
from blockflow.control.journal import Journal, JournalFile, Lived, Seat
from blockflow.control.standing import Standing
from blockflow.control.stored import FORMAT, PastEpoch, StoredState
from blockflow.core.errors import WireError
from blockflow.core.launchspec import StageSpec, WorkerLaunch
from blockflow.core.lifecycle import State
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.profile import Point, StageProfile
from blockflow.core.routing import CanaryRoute, RouteTable, StageRoute, TaskRoute
from blockflow.repository.profile_record import ProfileKey, ProfileRecord
from blockflow.tensormq.cuda_api import IPC_HANDLE_BYTES
from blockflow.tensormq.cuda_book import Export
from blockflow.tensormq.keys import read_key_file
from blockflow.wire.control import Routes, decode_control, encode_control

_SPEC = TensorSpec("float32", ("rows", 4))
_CONTRACT = Contract(_SPEC, _SPEC)
BLOCK = BlockInfo("a", "1", "0" * 64, "echo", _CONTRACT, 0, 0)
_MOST_BYTES = 1024 * 1024
_REFUSED = (ValueError,)
"""What is raised where the one caller says in a typed error which file it is."""


class _InFolder:
    """Reads what it is given from a file in a folder of its own, as the real reader does."""

    def __init__(self, read: Callable[[Path, bytes], object]) -> None:
        self._read = read
        # In memory where there is such a folder: a disk takes milliseconds to write a file anew.
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory)

    def __call__(self, raw: bytes) -> object:
        return self._read(Path(self._folder.name), raw)


def document_decoders() -> Mapping[str, Decoder]:
    """All of them, by name."""
    export = Export("GPU-0", 2 << 20, bytes(IPC_HANDLE_BYTES), (bytes(IPC_HANDLE_BYTES),) * 2)
    crash = {"at": 1.0, "incarnation": 3, "cause": "x", "error": None, "work": [], "log": ["y"]}
    state = _a_state().to_dict()
    table = encode_control(Routes(_a_table().to_dict()))
    return {
        "journal": Decoder(_InFolder(_journal), [_text(asdict(_a_journal()))], _REFUSED),
        "sealed document": Decoder(_InFolder(_sealed), [seal(state, FORMAT)], _REFUSED),
        "state": Decoder(lambda raw: StoredState.from_dict(_object(raw)), [_text(state)], _REFUSED),
        "crash book": Decoder(_InFolder(_crash_book), [_text({"a#0": [crash]})]),
        "profile": Decoder(_profile, [_text(_a_profile().to_dict())], _REFUSED),
        "key file": Decoder(_InFolder(_keys), [_a_key_file()]),
        "route table": Decoder(_routes, [table], _REFUSED),
        "device export": Decoder(Export.from_bytes, [export.to_bytes()]),
    }


def _text(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document).encode()


def _object(raw: bytes) -> dict[str, Any]:
    """A JSON object: what a checked seal leaves."""
    try:
        found = json.loads(raw)
    except RecursionError:
        raise ValueError("too deep") from None
    if type(found) is not dict:
        raise ValueError("not an object")
    return found


def _journal(folder: Path, raw: bytes) -> object:
    file = JournalFile(folder)
    file.write(raw.decode("latin-1"))
    return file.read()


def _sealed(folder: Path, raw: bytes) -> object:
    path = folder / "document"
    path.write_bytes(raw)
    return read_sealed(path, _MOST_BYTES, (FORMAT,))


def _crash_book(folder: Path, raw: bytes) -> object:
    """Says in the log what it cannot read, and goes on; so nonsense must not get past the seal."""
    (folder / CRASHES).write_bytes(seal(_checked(raw), CRASHES_FORMAT))
    book = CrashBook(folder, clock=lambda: 2.0)
    return book.latest("a#0", 0)


def _checked(raw: bytes) -> dict[str, Any]:
    try:
        return _object(raw)
    except ValueError as exc:
        raise WireError("MALFORMED_MESSAGE", "no body to be sealed") from exc


def _profile(raw: bytes) -> object:
    return ProfileRecord.from_dict(_object(raw))


def _keys(folder: Path, raw: bytes) -> object:
    path = folder / "a.key"
    path.write_bytes(raw)
    path.chmod(0o600)
    return read_key_file(path)


def _routes(raw: bytes) -> object:
    message = decode_control(raw)
    return RouteTable.from_dict(message.table) if isinstance(message, Routes) else message


def _a_key_file() -> bytes:
    secret = bytes(range(32))
    public = z85.decode(zmq.curve_public(z85.encode(secret)))
    return _text({"public": public.hex(), "secret": secret.hex()})


def _a_table() -> RouteTable:
    stages = [StageRoute(n, name, f"{name}#0", 9 + n, "ipc:///x", "tensormq") for n, name in _NAMES]
    task = TaskRoute("t", ("a", "b"), _CONTRACT, canary=CanaryRoute(("a",), 0.1))
    shares = ({"weight": 1.0},)
    return RouteTable(1, 2, {s.stage: s for s in stages}, {"t": task}, shares, {"c": "given up"})


_NAMES = ((1, "a"), (2, "b"))


def _a_profile() -> ProfileRecord:
    points = tuple(Point(1, r, None, 9, 2.0, 2.0, 2.0, 2.0, 1.9, 2.1, 0.1, 0) for r in (1, 2))
    profile = StageProfile("a", "0" * 64, "echo", "fp32", "m", points)
    key = ProfileKey(("a",), "echo", "fp32")
    ran = {"a": "echo fp32 0"}
    return ProfileRecord(key, profile, (profile,), ran, {"cpu": "x"}, {}, True, "2026-01-01")


def _a_state() -> StoredState:
    body = {"blocks": ["a"], "tasks": {"t": ["a"]}}
    past = PastEpoch(1, "system-update", "2026-01-01T00:00:00+00:00", body, {"a": "0" * 64})
    return StoredState().committed(past, body)


def _a_journal() -> Journal:
    launch = WorkerLaunch(
        name="a#0",
        incarnation=2,
        stages=(StageSpec(1, BLOCK),),
        repository="/x",
        run_dir="/y",
        controller="ipc:///y/control.sock",
        transport="ipc",
        mode="tensormq",
        device="cpu",
        threads=1,
        cores=(0,),
        arena_bytes=1 << 20,
        slots=8,
    )
    worker, dispatcher = _a_life("a#0", 2), _a_life("dispatcher", 1)
    role = str(Role.ACTIVE)
    seat = Seat("a#0", "a", "0" * 64, role, False, "", {"a": {}}, worker, launch.to_dict())
    clients = ("tcp://127.0.0.1:1",)
    standing = Standing({"a": BLOCK.to_dict()}, {"a": {"policy": "none"}}, {"a": 1.5}, ("a note",))
    known = (1, 2, 4.0, {"b": "drained"}, clients, {"t": 1}, (2,), (3,))
    return Journal(*known, dispatcher, standing, (seat,))


def _a_life(name: str, incarnation: int) -> Lived:
    return Lived(
        name=name,
        incarnation=incarnation,
        launched_ns=1,
        stages={"a": 1},
        threads=1,
        lanes=1,
        state=str(State.READY),
        pid=1,
        started=1,
        hello=True,
        endpoint="ipc:///y/d2.sock",
        endpoints=(),
        ready_ns=2,
        load_ms=1.0,
        warm_ms=1.0,
        probe_ms=1.0,
        reaped=False,
    )
