"""What every engine keeps to, on one block that each of them loads."""

import mmap
import os
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
import torch
from torch import Tensor

from blockflow.core.engines import ENGINES
from blockflow.core.errors import BlockError, RepositoryError, RequestError
from blockflow.core.model import BlockInfo
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.compiled import Package
from blockflow.engine.copies import RunCopies
from blockflow.engine.indices import INDICES, to_text
from blockflow.engine.registry import CLASSES, create_engine
from blockflow.repository.echo import save_echo
from blockflow.repository.repository import BlockRepository
from tests import engine_rig
from tests.engine_rig import CASES, SPEC, Stored, convolution, expected

pytestmark = pytest.mark.contract
threads = engine_rig.threads
BITWISE = ("echo",)
"""Engines that promise the same bits whatever the batch."""


@pytest.fixture(scope="module", params=list(CASES))
def stored(request: pytest.FixtureRequest, shelf: BlockRepository) -> Stored:
    case = CASES[request.param]
    if case.engine == "echo":
        return Stored(case, shelf, save_echo(shelf, "block-echo", SPEC))
    return convolution(shelf, case)


@pytest.fixture
def engine(stored: Stored) -> Iterator[Engine]:
    made = stored.load(stored.create())
    yield made
    made.close()


def test_every_engine_is_in_this_suite() -> None:
    assert {c.engine for c in CASES.values()} == set(CLASSES) == set(ENGINES)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_runs_without_a_slot(engine: Engine, rows: int) -> None:
    x = torch.randn(rows, 3, 8, 8)
    y = engine.run(x)
    torch.testing.assert_close(y, expected(engine, x), rtol=1e-4, atol=1e-5)
    # the input's slot may be released at once: the result must not lie in it
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_fills_the_slot_it_is_given(stored: Stored, engine: Engine, rows: int) -> None:
    x, out = torch.randn(rows, 3, 8, 8), torch.full((rows, 3, 8, 8), 7.0)
    assert engine.run(x, out) is out
    torch.testing.assert_close(out, expected(engine, x), rtol=1e-4, atol=1e-5)
    inside = stored.case.inside
    assert engine.copied == RunCopies(0, engine.copies_out + inside)
    engine.run(x)  # nothing is to be copied into
    assert engine.copied == RunCopies(0, inside)


def test_it_holds_no_memory_of_its_callers(engine: Engine) -> None:
    """A dead peer's mapping must be free to go, also while no further request comes."""
    x, out = np.zeros((1, 3, 8, 8), np.float32), np.zeros((1, 3, 8, 8), np.float32)
    alive = weakref.ref(x), weakref.ref(out)
    engine.run(torch.from_numpy(x), torch.from_numpy(out))
    del x, out
    assert [a() for a in alive] == [None, None]


def test_machine_code_says_which_indices_it_takes(shelf: BlockRepository) -> None:
    """None here; tests/unit/test_engine_indices.py has what is done with that."""
    block = convolution(shelf, CASES["compiled"])
    engine = block.load(block.create())
    package = engine._forward
    assert isinstance(package, Package)
    assert package._loader.get_metadata()[INDICES] == to_text(None)
    engine.close()


def test_an_input_with_strides_is_read_or_copied_once(stored: Stored, engine: Engine) -> None:
    x, out = torch.randn(2, 8, 8, 3).permute(0, 3, 1, 2), torch.empty(2, 3, 8, 8)
    engine.run(x, out)
    torch.testing.assert_close(out, expected(engine, x), rtol=1e-4, atol=1e-5)
    copies = stored.case.native or stored.case.engine == "compiled"
    assert engine.copied.inputs == copies
    engine.run(x.contiguous(), out)
    assert engine.copied.inputs == 0


@pytest.mark.parametrize("parts", [[1] * 8, [3, 5]], ids=["one by one", "in two"])
def test_a_batch_gives_what_its_rows_give_alone(
    stored: Stored, engine: Engine, parts: list[int]
) -> None:
    """Whom a request shares a batch with must not show in its result (docs/engines.md)."""
    x = torch.randn(8, 3, 8, 8)
    together = engine.run(x, torch.empty_like(x))
    alone = torch.cat([engine.run(part, torch.empty_like(part)) for part in x.split(parts)])
    if stored.case.engine in BITWISE:
        assert torch.equal(together, alone)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_a_slot_is_a_view_of_foreign_memory(engine: Engine) -> None:
    memory = bytearray(4 * 2 * 3 * 64 + 64)
    out = torch.frombuffer(memory, dtype=torch.float32, offset=64, count=384).view(2, 3, 8, 8)
    x = torch.randn(2, 3, 8, 8)
    engine.run(x, out)
    torch.testing.assert_close(out, expected(engine, x), rtol=1e-4, atol=1e-5)


def test_the_input_is_never_written(engine: Engine) -> None:
    x = torch.randn(4, 3, 8, 8)
    before = x.clone()
    engine.run(x)
    engine.run(x, torch.empty(4, 3, 8, 8))
    assert torch.equal(x, before)


def test_warms_up_and_runs_again(engine: Engine) -> None:
    engine.warm_up()
    engine.warm_up(rows=4)
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(engine.run(x), engine.run(x))


def test_engines_of_one_process_run_side_by_side(stored: Stored) -> None:
    """Each in a thread of its own, with results as if it were alone; and threads take turns."""
    engines = [stored.load(stored.create()) for _ in range(2)]
    assert all(e.concurrent for e in engines)
    batches = [torch.randn(1 + n % 3, 3, 8, 8) for n in range(12)]
    alone = [expected(engines[0], x) for x in batches]
    meet = Barrier(2, timeout=60)

    def runs(engine: Engine) -> list[Tensor]:
        with torch.inference_mode():
            meet.wait()
            return [engine.run(x, torch.empty_like(x)) for x in batches]

    with ThreadPoolExecutor(2) as lanes:
        for pair in (engines, engines[::-1]):
            for found in lanes.map(runs, pair):
                for y, want in zip(found, alone, strict=True):
                    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    for engine in engines:
        engine.close()


def test_a_twin_runs_beside_the_engine_it_is_of(stored: Stored, engine: Engine) -> None:
    twin = engine.twin()
    assert (twin is not None) is ENGINES[stored.case.engine].side_by_side
    if twin is None:
        return
    batches = [torch.randn(1 + n % 3, 3, 8, 8) for n in range(24)]
    alone = [expected(engine, x) for x in batches]
    meet = Barrier(2, timeout=60)

    def runs(one: Engine) -> list[Tensor]:
        out = []
        with torch.inference_mode():
            meet.wait()
            for x in batches:
                out.append(one.run(x, torch.empty_like(x)))
                assert one.copied == RunCopies(0, one.copies_out + stored.case.inside)
        return out

    with ThreadPoolExecutor(2) as lanes:
        for found in lanes.map(runs, (engine, twin)):
            for y, want in zip(found, alone, strict=True):
                torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
    engine.set_threads(2)
    engine.set_threads(1)
    twin.close()
    engine.run(batches[0])


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (torch.zeros(1, 3, 8, 9), "CONTRACT_MISMATCH"),
        (torch.zeros(1, 3, 8), "CONTRACT_MISMATCH"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.float64), "CONTRACT_MISMATCH"),
        (torch.zeros(0, 3, 8, 8), "EMPTY_INPUT"),
    ],
)
def test_an_input_that_breaks_the_contract(engine: Engine, x: Tensor, code: str) -> None:
    with pytest.raises(RequestError) as e:
        engine.run(x)
    assert e.value.code == code


@pytest.mark.parametrize(
    "out", [torch.empty(2, 3, 8, 8), torch.empty(1, 3, 8, 8, dtype=torch.float64)]
)
def test_a_slot_that_does_not_fit(engine: Engine, out: Tensor) -> None:
    with pytest.raises(BlockError) as e:
        engine.run(torch.zeros(1, 3, 8, 8), out)
    assert e.value.code == "OUTPUT_MISMATCH"


def test_the_input_may_be_a_read_only_mapping(engine: Engine, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    file = tmp_path / "slot"
    file.write_bytes(x.numpy().tobytes())
    with file.open("rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as memory:
        with warnings.catch_warnings():  # torch says that writes would fail; that is the point
            warnings.simplefilter("ignore")
            view = torch.frombuffer(memory, dtype=torch.float32).view(2, 3, 8, 8)
        y = engine.run(view)
        torch.testing.assert_close(y, expected(engine, x), rtol=1e-4, atol=1e-5)
        del view


def test_the_thread_count_is_set(stored: Stored) -> None:
    made = stored.load(stored.create(EngineOptions(threads=2)))
    if not stored.case.native:
        assert torch.get_num_threads() == 2
    made.close()


def test_the_thread_count_can_be_changed(engine: Engine) -> None:
    x, out = torch.randn(3, 3, 8, 8), torch.empty(3, 3, 8, 8)
    for threads in (2, 1):
        engine.set_threads(threads)
        engine.run(x, out)
        torch.testing.assert_close(out, expected(engine, x), rtol=1e-4, atol=1e-5)


def test_nothing_runs_before_load_or_after_close(stored: Stored) -> None:
    made = stored.create()
    for _ in range(2):
        with pytest.raises(BlockError) as e:
            made.run(torch.zeros(1, 3, 8, 8))
        assert e.value.code == "LOAD_FAILED"
        stored.load(made)
        made.close()


def test_loading_and_closing_leave_no_descriptor(stored: Stored) -> None:
    stored.load(stored.create()).close()  # what is opened once per process is open now
    before = len(os.listdir("/proc/self/fd"))
    made = stored.load(stored.create())
    made.run(torch.zeros(1, 3, 8, 8))
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("data", [b"", b"garbage", b"PK\x03\x04 not a zip"])
def test_an_artifact_that_cannot_be_loaded(stored: Stored, data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "artifact"
    file.write_bytes(data)
    with pytest.raises(BlockError) as e:
        stored.create().load(file)
    assert e.value.code == "LOAD_FAILED" and e.value.where == stored.info.name


def test_a_wrong_contract_is_noticed(stored: Stored) -> None:
    """As it is loaded, or in the first run."""
    if stored.case.engine == "echo":
        pytest.skip("echo has no output of its own")
    data = stored.info.to_dict()
    data["contract"]["output"]["dims"] = ["rows", 3, 8, 9]
    wrong = Stored(stored.case, stored.repo, BlockInfo.from_dict(data))
    made = wrong.create()
    with pytest.raises(BlockError) as e:
        wrong.load(made).run(torch.zeros(1, 3, 8, 8))
    assert e.value.code == "OUTPUT_MISMATCH"
    made.close()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (EngineOptions(precision="int3"), "precision"),
        (EngineOptions(device="nonsense:7"), "device"),
        (EngineOptions(extra={"memory_format": "spiral"}), "options.memory_format"),
        (EngineOptions(extra={"no_such": 1}), "options.no_such"),
    ],
)
def test_options_that_do_not_exist(stored: Stored, options: EngineOptions, field: str) -> None:
    with pytest.raises(BlockError) as e:
        stored.create(options)
    assert e.value.code == "UNSUPPORTED_ENGINE" and e.value.details["field"] == field


def test_an_unknown_format_or_engine(stored: Stored) -> None:
    data = {**stored.info.to_dict(), "format": "savedmodel"}
    with pytest.raises(RepositoryError) as e:
        create_engine(BlockInfo.from_dict(data), EngineOptions())
    assert e.value.code == "UNSUPPORTED_FORMAT" and "pt2" in e.value.hint
    with pytest.raises(BlockError) as u:
        create_engine(stored.info, EngineOptions(), "opnvino")
    assert u.value.code == "UNSUPPORTED_ENGINE" and "openvino" in u.value.hint
