"""Scarcity at a worker's start is told as NO_SPACE, by which it is tried again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals_rig import no_descriptor
from torch import Tensor

from blockflow.core.errors import BlockError, BlockFlowError, RequestError, SystemError_
from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.scarcity import failure, is_scarcity, named, no_room
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.native import Compute, NativeEngine
from blockflow.engine.torch_engine import TorchEngine
from blockflow.repository.echo import save_echo
from blockflow.repository.journal import JOURNAL
from blockflow.repository.repository import BlockRepository
from blockflow.tensormq.arena import Arena
from blockflow.tensormq.atwork import AtWork
from blockflow.worker.engines import make_engines
from blockflow.worker.failpoints import FailPoints
from blockflow.worker.runner import Loaded, Runner
from blockflow.worker.stage import Stage

SPEC = TensorSpec("float32", ("rows", 2))
INFO = BlockInfo("b", "1", "0" * 64, "test", Contract(SPEC, SPEC), 0, 0)

LACKING: dict[str, Exception] = {
    "Python's": MemoryError(),
    "the CPU allocator's": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 67108864 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "a mapping's": RuntimeError("unable to mmap 4096 bytes from file <x>: Cannot allocate memory"),
    "the device's": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cuBLAS's": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    "OpenVINO's": RuntimeError("Exception from src/inference/src/cpp/core.cpp:\nstd::bad_alloc"),
    "descriptors": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "the kernel's for sockets": OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS)),
}
"""What frameworks raise, by whose want it is."""

PERMANENT: dict[str, Exception] = {
    "no file": FileNotFoundError(errno.ENOENT, "No such file or directory"),
    "a wrong file": ValueError("unexpected end of data"),
    "too large a number": OverflowError("a file too large to be read"),
}


def lacking(name: str) -> Exception:
    """A new one: each exception keeps what it was raised for."""
    made = LACKING[name]
    return type(made)(*made.args)


def fail_for(cause: Exception, hide: bool) -> None:
    """An error whose own text says nothing of it."""
    try:
        raise cause
    except Exception as e:
        raise BlockError("BLOCK_FAILED", "block 'b' failed") from None if hide else e


@pytest.mark.parametrize("name", LACKING)
def test_it_is_told_however_it_is_said(name: str) -> None:
    assert is_scarcity(lacking(name))
    for hide in (False, True):
        with pytest.raises(BlockError) as failed:
            fail_for(lacking(name), hide)
        assert is_scarcity(failed.value)
    told = no_room(lacking(name), "no start", "b")
    assert told is not None and (told.code, told.retryable) == ("NO_SPACE", True)


def test_what_is_called_otherwise_gets_its_name() -> None:
    own = SystemError_("NO_SPACE", "full", hint="its own")
    other = BlockError("BLOCK_FAILED", "block 'b' failed", where="b")
    assert named(own) is own
    assert named(other) is other
    for reason in (lacking("Python's"), own):
        with pytest.raises(BlockError) as failed:
            fail_for(reason, hide=False)
        told = named(failed.value)
        assert (told.code, told.message) == ("NO_SPACE", "block 'b' failed")
    told = failure(ValueError("odd"), "what was done", "b")
    assert (told.code, told.message, told.where) == ("INTERNAL", "what was done", "b")
    assert failure(lacking("Python's"), "what was done", "b").code == "NO_SPACE"


@pytest.mark.parametrize("name", PERMANENT)
def test_other_failures_are_none(name: str) -> None:
    assert not is_scarcity(PERMANENT[name])
    with pytest.raises(type(PERMANENT[name])) as e:
        raise PERMANENT[name] from PERMANENT[name]  # its own reason: there is no end of the chain
    assert no_room(e.value, "no start", "b") is None


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
@pytest.mark.parametrize(
    "make",
    [lambda run: Arena.create(run, 7, 1 << 16, slots=1), lambda run: AtWork.create(run, 7, 1)],
    ids=["arena", "at work"],
)
def test_no_descriptor_for_shared_memory(
    make: Any, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(SystemError_) as e:
        make(tmp_path)
    assert (e.value.code, e.value.retryable) == ("NO_SPACE", True)
    assert e.value.hint


# --- engines -------------------------------------------------------------------------------------


class Torch(TorchEngine):
    """Has memory for so many loads, and for so many forwards."""

    def __init__(self, why: str, loads: int = 0, forwards: int = 0) -> None:
        super().__init__(INFO, EngineOptions())
        self.why, self.loads, self.forwards = why, loads, forwards

    def _load_module(self, artifact: Path) -> torch.nn.Module:
        if not self.loads:
            raise lacking(self.why)
        self.loads -= 1
        return Doubles(self)


class Doubles(torch.nn.Module):
    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine = [engine]

    def forward(self, x: Tensor) -> Tensor:
        (engine,) = self.engine
        if not engine.forwards:
            raise lacking(engine.why)
        engine.forwards -= 1
        return x * 2


class Native(NativeEngine):
    """Likewise, by pointers. ``opened``: with how many threads each time."""

    def __init__(self, why: str, loads: int = 0, forwards: int = 0) -> None:
        super().__init__(INFO, EngineOptions())
        self.why, self.loads, self.forwards = why, loads, forwards
        self.opened: list[int] = []

    def _open(self, path: Path, threads: int) -> Compute:
        if not self.loads:
            raise lacking(self.why)
        self.loads -= 1
        self.opened.append(threads)

        def compute(x: Tensor, out: Tensor) -> int:
            if not self.forwards:
                raise lacking(self.why)
            self.forwards -= 1
            torch.mul(x, 2, out=out)
            return 0

        return compute

    def _probe(self, x: Tensor) -> tuple[int, ...]:
        return tuple(x.shape)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "artifact"
    made.touch()
    return made


@pytest.mark.parametrize("name", LACKING)
@pytest.mark.parametrize("kind", [Torch, Native])
def test_an_engine_without_memory(kind: Any, name: str, file: Path) -> None:
    """To load, and to warm up; what a request lacks is its own failure, as the block may ask for
    more memory than there is."""
    with pytest.raises(SystemError_) as e:
        kind(name).load(file)
    assert (e.value.code, e.value.where) == ("NO_SPACE", "b")
    engine: Engine = kind(name, loads=1)
    engine.load(file)
    with pytest.raises(SystemError_) as e:
        engine.warm_up()
    assert (e.value.code, e.value.where) == ("NO_SPACE", "b")
    with pytest.raises(BlockError) as failed:
        engine.run(torch.zeros(1, 2))
    assert failed.value.code == "BLOCK_FAILED"
    engine.close()


def test_what_fails_otherwise_fails_as_ever(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("unexpected end of data")

    monkeypatch.setattr(Torch, "_load_module", broken)
    monkeypatch.setattr(Native, "_open", broken)
    for engine in (Torch("Python's"), Native("Python's")):
        with pytest.raises(BlockError) as e:
            engine.load(file)
        assert (e.value.code, e.value.retryable) == ("LOAD_FAILED", False)


def test_the_number_of_threads_that_it_has_opens_nothing(file: Path) -> None:
    """A worker is told its threads with its lanes, whichever of the two has changed."""
    engine = Native("Python's", loads=3)
    found = Runner({1: Stage(StageSpec(1, INFO), engine)}, FailPoints("", Path()))
    engine.load(file)
    for threads in (1, 1, 2, 2, 1):
        found.set_threads(threads)
        assert found.threads == threads
    assert engine.opened == [1, 2, 1]
    found.set_threads(3)  # for which there is no memory: it has the old number still
    assert found.threads == 1
    found.set_threads(1)
    assert engine.opened == [1, 2, 1]
    engine.close()


# --- the worker ----------------------------------------------------------------------------------


def start(repository: BlockRepository, monkeypatch: pytest.MonkeyPatch, **does: Any) -> Loaded:
    """Load block ``e``, whose engine does that."""
    stages = make_engines([StageSpec(1, repository.info("e"))], "cpu", 1)
    for name, what in does.items():
        monkeypatch.setattr(stages[1].engine, name, what)
    return Runner(stages, FailPoints("", Path())).load(repository)


@pytest.fixture
def repository(tmp_path: Path) -> BlockRepository:
    made = BlockRepository(tmp_path)
    save_echo(made, "e", SPEC)
    return made


def code_of(loaded: Loaded) -> str:
    assert loaded.error is not None
    assert loaded.error.retryable == (loaded.error.code == "NO_SPACE")
    return loaded.error.code


@pytest.mark.parametrize("name", LACKING)
@pytest.mark.parametrize("where", ["load", "run"])
def test_a_worker_that_cannot_start_for_want_of_it(
    where: str, name: str, repository: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*_: Any) -> Any:
        raise lacking(name)

    assert code_of(start(repository, monkeypatch, **{where: lacks})) == "NO_SPACE"


@pytest.mark.parametrize(
    "error",
    [ValueError("x"), BlockError("BLOCK_FAILED", "x"), RequestError("CONTRACT_MISMATCH", "x")],
    ids=lambda e: type(e).__name__,
)
def test_a_worker_that_cannot_start_for_another_reason(
    error: Exception, repository: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    code = error.code if isinstance(error, BlockFlowError) else "LOAD_FAILED"
    assert code_of(start(repository, monkeypatch, load=fails)) == code


def test_no_descriptor_for_the_blocks_file(
    repository: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = make_engines([StageSpec(1, repository.info("e"))], "cpu", 1)

    found = Runner(stages, FailPoints("", Path()))
    monkeypatch.setattr(os, "open", no_descriptor)
    assert code_of(found.load(repository)) == "NO_SPACE"


@pytest.mark.parametrize("at", range(4), ids=["repository", "folder", "manifest", "artifact"])
def test_a_block_that_cannot_be_opened_for_want_of_a_descriptor_is_not_called_missing(
    at: int, repository: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, opened = os.open, 0

    def fails(path: Any, *args: Any, **kw: Any) -> int:
        nonlocal opened
        if path != repository.root / JOURNAL:  # there is none
            opened += 1
            if opened > at:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, *args, **kw)

    monkeypatch.setattr(os, "open", fails)
    with pytest.raises(SystemError_) as e, repository.artifact("e"):
        pass
    assert e.value.code == "NO_SPACE" and os.strerror(errno.EMFILE) in e.value.message


def test_nor_is_a_repository_empty_then(
    repository: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "scandir", no_descriptor)
    with pytest.raises(SystemError_, match=os.strerror(errno.EMFILE)):
        repository.names()
