"""Memory for tensors that stay in a worker: used again, and never twice at once."""

from __future__ import annotations

import mmap
import random
from threading import Thread
from typing import Any

import pytest
import torch

from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.core.routing import merge_paths
from blockflow.engine.base import Engine, EngineOptions
from blockflow.tensormq.ebb import WINDOW_NS
from blockflow.wire.data import Item
from blockflow.worker import buffer_pool as made_by
from blockflow.worker.buffer_pool import LEAST, BufferPool, _rounded
from blockflow.worker.failpoints import FailPoints
from blockflow.worker.runner import Runner
from blockflow.worker.stage import Stage
from blockflow.worker.ticket import Batch, Source, Ticket

KIB = 1024


def taken(pool: BufferPool, kib: int) -> torch.Tensor:
    found = pool.take((kib, KIB), torch.uint8)
    assert found is not None
    return found


def free_bytes(pool: BufferPool) -> int:
    """Of all buffers that no tensor lives in."""
    back = [pool._lent[id(lent)][1] for lent in pool._back]
    return sum(map(len, (*pool._free, *back)))


def test_what_was_let_go_is_used_again() -> None:
    pool = BufferPool()
    first = taken(pool, 256).fill_(7)
    at = first.data_ptr()
    second = taken(pool, 256)
    assert second.data_ptr() != at
    del first
    again = taken(pool, 256)
    assert again.data_ptr() == at
    assert (again == 7).all()  # what is mapped anew, at the same place perhaps, is zero


def test_a_view_keeps_its_place() -> None:
    pool = BufferPool()
    whole = taken(pool, 256).fill_(7)
    at, rows = whole.data_ptr(), whole[10:12]
    del whole
    assert taken(pool, 256).fill_(1).data_ptr() != at
    assert (rows == 7).all()
    del rows
    assert free_bytes(pool) == 2 * 256 * KIB


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [((3, 128, KIB), torch.float32), ((70_001,), torch.bool), ((5, 1, 20_000), torch.bfloat16)],
)
def test_tensors_are_what_was_asked_for(dims: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = BufferPool()
    made = pool.take(dims, dtype)
    assert made is not None and made.shape == dims and made.dtype is dtype
    assert made.is_contiguous() and made.data_ptr() % mmap.PAGESIZE == 0
    made.zero_()
    assert made.untyped_storage().nbytes() == made.nbytes


def test_sizes_are_few_and_little_is_added() -> None:
    page = mmap.PAGESIZE
    for top in (LEAST, 1 << 20, 1 << 26):
        sizes = {_rounded(n) for n in range(top + 1, 2 * top, top // 97)} | {_rounded(2 * top)}
        assert len(sizes) <= 8 + 1 and max(sizes) == 2 * top
    for n in (LEAST, LEAST + 1, 10**6, 10**7 + 1):
        assert n <= _rounded(n) <= n * 9 // 8 + page and _rounded(n) % page == 0


def test_little_is_left_to_the_heap() -> None:
    pool = BufferPool()
    assert pool.take((LEAST - 1,), torch.uint8) is None
    assert pool.take((LEAST,), torch.uint8) is not None
    assert pool.take((0, 4), torch.float32) is None


def test_one_that_is_too_small_makes_way() -> None:
    """Tensors that grow would otherwise leave a place of each size behind."""
    pool = BufferPool()
    for kib in range(100, 4000, 100):
        del_me = taken(pool, kib)
        assert free_bytes(pool) == 0
        del del_me
        assert kib * KIB <= free_bytes(pool) <= kib * KIB * 9 // 8 + mmap.PAGESIZE


def test_what_a_burst_has_left_is_given_back() -> None:
    pool = BufferPool()
    pool.ebb(1)
    burst = [taken(pool, 4096).fill_(1) for _ in range(3)]
    held, steady = burst[0][:1], [taken(pool, 128) for _ in range(2)]
    del burst, steady
    pool.ebb(WINDOW_NS)
    assert free_bytes(pool) == 2 * (4096 + 128) * KIB, "the window goes on"
    pool.ebb(WINDOW_NS + 1)
    assert free_bytes(pool) == 2 * (4096 + 128) * KIB, "needed within it"
    taken(pool, 128)
    pool.ebb(2 * WINDOW_NS)
    assert free_bytes(pool) == 2 * (4096 + 128) * KIB
    pool.ebb(2 * WINDOW_NS + 1)
    assert free_bytes(pool) == 128 * KIB, "of one size the same are used again"
    assert (held == 1).all(), "what somebody looks at stays"
    del held
    assert free_bytes(pool) == (4096 + 128) * KIB
    for window in (3, 4):  # the other one is in use, and a large one is all that is left
        small = [taken(pool, 128), taken(pool, 128)]
        del small
        pool.ebb(window * WINDOW_NS + 1)
    assert free_bytes(pool) == 128 * KIB, "not half of it was needed"


def test_a_machine_without_memory_says_so_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_args: Any, **_kw: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    pool = BufferPool()
    monkeypatch.setattr(made_by, "_Buffer", none_left)
    assert pool.take((LEAST,), torch.uint8) is None


@pytest.mark.parametrize("seed", range(5))
def test_tensors_that_live_at_once_never_share(seed: int) -> None:
    rng, pool = random.Random(seed), BufferPool()
    alive: list[tuple[int, torch.Tensor]] = []
    most = 0
    for turn in range(400):
        if alive and rng.random() < 0.5:
            mark, tensor = alive.pop(rng.randrange(len(alive)))
            assert (tensor == mark).all()
        else:
            tensor = taken(pool, rng.choice((64, 65, 200, 1000))).fill_(turn % 251)
            # As a batch is: one of its rows may outlive it.
            alive.append((turn % 251, tensor if rng.random() < 0.5 else tensor[3:5]))
        most = max(most, len(alive))
    assert all((tensor == mark).all() for mark, tensor in alive)
    alive.clear()
    del tensor
    # and the last one that the loop has had in hand
    assert free_bytes(pool) <= (most + 1) * (1000 * KIB * 9 // 8 + mmap.PAGESIZE)


def test_any_thread_may_ask_and_let_go() -> None:
    pool = BufferPool()
    wrong: list[int] = []

    def lane(mark: int) -> None:
        for _ in range(200):
            tensor = taken(pool, 64 + mark).fill_(mark)
            if not (tensor == mark).all():
                wrong.append(mark)

    lanes = [Thread(target=lane, args=(n,)) for n in range(4)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    assert not wrong
    # The former tensor of a lane is alive while it asks for the next.
    assert free_bytes(pool) <= 4 * 2 * (68 * KIB * 9 // 8 + mmap.PAGESIZE)


SPEC = TensorSpec("float32", ("rows", 64 * KIB))
INFO = BlockInfo("more", "1", "0" * 64, "test", Contract(SPEC, SPEC), 0, 0)


class More(Engine):
    """x + 1, into a place where it is given one."""

    def load(self, artifact: Any) -> None:
        self.given: list[int] = []
        self.seen: list[int] = []

    def run(self, x: Any, out: Any | None = None) -> Any:
        self.seen.append(x.data_ptr())
        self.given.append(0 if out is None else out.data_ptr())
        return torch.add(x, 1, out=out)

    @property
    def copies_out(self) -> int:
        return 0

    def close(self) -> None:
        pass


def test_results_that_stay_and_inputs_put_together_have_such_places() -> None:
    engine = More(INFO, EngineOptions())
    engine.load(None)
    runner = Runner({1: Stage(StageSpec(1, INFO), engine)}, FailPoints("", None))  # type: ignore[arg-type]

    def computed(*values: float) -> torch.Tensor:
        tickets = []
        for key, value in enumerate(values):
            item = Item(bytes(16), 1, 1, merge_paths([[1]])[0], 0, 1, 1000)
            x = torch.full((1, 64 * KIB), value)
            source = Source("float32", (64 * KIB,), 1, tensor=x)
            tickets.append(Ticket(key, item, 1, source, 0, 0, 0, 0, 2**62, 0))
        batch = Batch(1, tuple(tickets))
        with torch.inference_mode():
            runner.compute(batch)
        assert not batch.errors
        result: torch.Tensor = batch.result
        return result

    held = computed(1.0)
    assert engine.given[0] == held.data_ptr()
    for turn in range(3):
        assert computed(4.0, 5.0)[:, 0].tolist() == [5.0, 6.0], turn
    assert 0 not in engine.given and held.data_ptr() not in engine.given[1:]
    assert len(set(engine.given[1:])) <= 2 and len(set(engine.seen[1:])) <= 2
    assert (held == 2.0).all()
