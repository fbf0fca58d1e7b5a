"""One suite for all engines: a new engine adds one entry to CASES."""

import itertools
import mmap
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from blockflow.core.engines import ENGINES
from blockflow.core.errors import BlockError, RepositoryError, RequestError
from blockflow.core.model import BlockInfo, TensorSpec
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.registry import CLASSES, create_engine
from blockflow.repository.echo import save_echo
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests.variants import variant_of

pytestmark = pytest.mark.contract
SPEC = TensorSpec("float32", ("rows", 3, 8, 8))


class Convolution(nn.Module):
    """Same dims out as in, so that it stands beside echo; fails on a value in TorchScript, too."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.norm.running_mean.uniform_(-1, 1)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.relu(x)))


def model() -> Convolution:
    torch.manual_seed(0)
    return Convolution().eval().requires_grad_(False)


@dataclass(frozen=True)
class Case:
    """One engine with the file that it runs."""

    engine: str
    format: str = "pt2"
    variant: str | None = None
    native: bool = False

    def store(self, repo: BlockRepository, loaded: LoadedModel, name: str) -> BlockInfo:
        """Export a model in this case's form; skips where the machine lacks what it takes."""
        if self.variant is not None:
            return variant_of(repo, loaded, name, self.variant, self.engine)
        export_model(loaded, repo, names=[name], format=self.format)
        return repo.info(name)


CASES: Mapping[str, Case] = {
    "pt2": Case("exported"),
    "torchscript-scripted": Case("torchscript", "torchscript-scripted"),
    "torchscript-traced": Case("torchscript", "torchscript-traced"),
    "compiled": Case("compiled", variant="aoti"),
    "onnxruntime": Case("onnxruntime", variant="onnx", native=True),
    "openvino": Case("openvino", variant="onnx", native=True),
    "echo": Case("echo", "echo"),
}
LIGHT = [c for c in CASES if c not in ("echo", "compiled")]
"""Those that run any model; a compilation takes half a minute, so one block stands for it."""
TORCH = [c for c in LIGHT if not CASES[c].native]
NATIVE = [c for c in LIGHT if CASES[c].native]


@dataclass(frozen=True)
class Stored:
    """The block of most tests, for one case."""

    case: Case
    repo: BlockRepository
    info: BlockInfo

    def create(self, options: EngineOptions | None = None) -> Engine:
        return create_engine(self.info, options or EngineOptions(), self.case.engine)

    def load(self, made: Engine) -> Engine:
        with self.repo.artifact(self.info.name, variant=made.variant) as path:
            made.load(path)
        return made


@pytest.fixture(scope="module", params=list(CASES))
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    case = CASES[request.param]
    repo = BlockRepository(tmp_path_factory.mktemp("blocks"))
    if case.engine == "echo":
        return Stored(case, repo, save_echo(repo, "block", SPEC))
    return Stored(case, repo, case.store(repo, LoadedModel(model(), "test", SPEC), "block"))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def engine(stored: Stored) -> Iterator[Engine]:
    made = stored.load(stored.create())
    yield made
    made.close()


def expected(engine: Engine, x: Tensor) -> Tensor:
    if engine.block.format == "echo":
        return x
    with torch.no_grad():
        return model()(x.clone())


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
def test_fills_the_slot_it_is_given(engine: Engine, rows: int) -> None:
    x, out = torch.randn(rows, 3, 8, 8), torch.full((rows, 3, 8, 8), 7.0)
    assert engine.run(x, out) is out
    torch.testing.assert_close(out, expected(engine, x), rtol=1e-4, atol=1e-5)
    assert engine.copies_out in (0, 1)


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
    assert e.value.code == "LOAD_FAILED" and e.value.where == "block"


def test_a_wrong_contract_is_noticed(stored: Stored) -> None:
    if stored.case.engine == "echo":
        pytest.skip("echo has no output of its own")
    data = stored.info.to_dict()
    data["contract"]["output"]["dims"] = ["rows", 3, 8, 9]
    wrong = Stored(stored.case, stored.repo, BlockInfo.from_dict(data))
    made = wrong.load(wrong.create())
    with pytest.raises(BlockError) as e:
        made.run(torch.zeros(1, 3, 8, 8))
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


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (EngineOptions(precision="bf16"), 0.1),
        (EngineOptions(extra={"memory_format": "channels_last"}), 1e-5),
    ],
)
def test_precision_and_layout(
    tmp_path: Path, name: str, options: EngineOptions, tolerance: float
) -> None:
    repo, case = BlockRepository(tmp_path), CASES[name]
    stored = Stored(case, repo, case.store(repo, LoadedModel(model(), "test", SPEC), "block"))
    made = stored.load(stored.create(options))
    x, out = torch.randn(2, 3, 8, 8), torch.empty(2, 3, 8, 8)
    y = made.run(x, out)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected(made, x), rtol=tolerance, atol=tolerance)


def test_an_unknown_format_or_engine(stored: Stored) -> None:
    data = {**stored.info.to_dict(), "format": "savedmodel"}
    with pytest.raises(RepositoryError) as e:
        create_engine(BlockInfo.from_dict(data), EngineOptions())
    assert e.value.code == "UNSUPPORTED_FORMAT" and "pt2" in e.value.hint
    with pytest.raises(BlockError) as u:
        create_engine(stored.info, EngineOptions(), "opnvino")
    assert u.value.code == "UNSUPPORTED_ENGINE" and "openvino" in u.value.hint


# --- engines outside torch: memory is used where it lies ------------------------------------------


@pytest.fixture(scope="module", params=NATIVE)
def native(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    case, repo = CASES[request.param], BlockRepository(tmp_path_factory.mktemp("native"))
    return Stored(case, repo, case.store(repo, LoadedModel(model(), "test", SPEC), "block"))


def test_no_copy_is_made(native: Stored) -> None:
    made = native.load(native.create())
    assert made.copies_out == 0
    x, out = torch.randn(2, 3, 8, 8), torch.empty(2, 3, 8, 8)
    made.run(x, out)
    where: dict[str, Callable[[Any], tuple[int, int]]] = {
        "openvino": lambda e: (
            e._request.get_input_tensor().data.ctypes.data,
            e._request.get_output_tensor().data.ctypes.data,
        ),
        "onnxruntime": lambda e: (x.data_ptr(), e._binding.get_outputs()[0].data_ptr()),
    }
    assert where[native.case.engine](made) == (x.data_ptr(), out.data_ptr())
    made.close()


def test_an_input_with_strides_is_understood(native: Stored) -> None:
    made = native.load(native.create())
    x = torch.randn(2, 8, 8, 3).permute(0, 3, 1, 2)
    torch.testing.assert_close(made.run(x), expected(made, x), rtol=1e-4, atol=1e-5)
    with pytest.raises(BlockError) as e:
        made.run(x, torch.empty(2, 8, 8, 3).permute(0, 3, 1, 2))
    assert e.value.code == "OUTPUT_MISMATCH"
    made.close()


def test_closing_frees_the_model(native: Stored) -> None:
    made: Any = native.load(native.create())
    made.run(torch.zeros(1, 3, 8, 8))
    held = made._request if native.case.engine == "openvino" else made._session
    alive = weakref.ref(held)
    del held
    made.close()
    assert alive() is None


def test_no_more_threads_compute_than_asked_for(native: Stored) -> None:
    def run(threads: int) -> Any:
        made = native.load(native.create(EngineOptions(threads=threads)))
        made.run(torch.zeros(1, 3, 8, 8))
        return made

    before = len(os.listdir("/proc/self/task"))
    made = run(1)
    if native.case.engine == "onnxruntime":
        assert len(os.listdir("/proc/self/task")) == before
    else:
        compiled = made._request.get_compiled_model()
        assert compiled.get_property("INFERENCE_NUM_THREADS") == 1
        assert compiled.get_property("NUM_STREAMS") == 1
        made.set_threads(2)
        assert made._request.get_compiled_model().get_property("INFERENCE_NUM_THREADS") == 2
    made.close()


def test_threads_are_not_changed_with_an_altered_file(native: Stored, tmp_path: Path) -> None:
    made = native.create()
    file = tmp_path / "copy"
    with native.repo.artifact("block", variant=made.variant) as path:
        file.write_bytes(path.read_bytes())
    made.load(file)
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(BlockError) as e:
        made.set_threads(2)
    assert e.value.code == "LOAD_FAILED" and "altered" in e.value.message
    assert made.run(torch.zeros(1, 3, 8, 8)).shape == (1, 3, 8, 8)
    made.close()


def test_what_a_native_engine_raises_is_the_blocks_error(native: Stored) -> None:
    made: Any = native.load(native.create())
    good = made._compute

    def broken(x: Tensor, out: Tensor) -> None:
        raise RuntimeError("first line\nthe reason\n")

    made._compute = broken
    with pytest.raises(BlockError) as e:
        made.run(torch.zeros(1, 3, 8, 8))
    assert e.value.code == "BLOCK_FAILED" and "the reason" in e.value.message
    made._compute = good
    assert made.run(torch.zeros(1, 3, 8, 8)).shape == (1, 3, 8, 8)
    made.close()


@pytest.mark.parametrize("name", NATIVE)
def test_int8(tmp_path: Path, name: str) -> None:
    repo, loaded = BlockRepository(tmp_path), LoadedModel(model(), "test", SPEC)
    info = variant_of(repo, loaded, "block", "onnx-int8", name)
    made = create_engine(info, EngineOptions(precision="int8"), name)
    assert made.variant == "onnx-int8"
    with repo.artifact("block", variant=made.variant) as path:
        made.load(path)
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(made.run(x), expected(made, x), rtol=0.1, atol=0.3)
    made.close()


# --- any model ------------------------------------------------------------------------------------


class Picky(nn.Module):
    """Looks tokens up: an index outside the table fails inside the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


# OpenVINO gives zeros for such an index
@pytest.mark.parametrize("name", [c for c in LIGHT if c != "openvino"])
def test_a_failing_computation_is_a_block_error(tmp_path: Path, name: str) -> None:
    repo, case = BlockRepository(tmp_path), CASES[name]
    spec = TensorSpec("int64", ("rows", "length"), {"length": (1, 9)})
    info = case.store(repo, LoadedModel(Picky().eval(), "picky", spec), "p")
    made = Stored(case, repo, info).load(create_engine(info, EngineOptions(), case.engine))
    made.warm_up()
    with pytest.raises(BlockError) as e:
        made.run(torch.full((2, 3), 99))
    assert e.value.code == "BLOCK_FAILED" and e.value.where == "p"
    # the engine is still good
    assert made.run(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 2)


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"fail_on_value": 5}, "BLOCK_FAILED"), ({"fail_on_load": 1}, "LOAD_FAILED"),
     ({"unknown": 1}, "LOAD_FAILED"), ({"delay_ms": "x"}, "LOAD_FAILED")],
)  # fmt: skip
def test_echo_fails_when_told_to(tmp_path: Path, settings: dict, code: str) -> None:
    repo = BlockRepository(tmp_path)
    info = save_echo(repo, "e", SPEC, settings=settings)
    made = create_engine(info, EngineOptions())
    x = torch.zeros(2, 3, 8, 8)
    x[1, 0, 0, 0] = 5

    def load_and_run() -> None:
        with repo.artifact("e") as path:
            made.load(path)
        made.run(x)

    with pytest.raises(BlockError) as e:
        load_and_run()
    assert e.value.code == code


class SideEffects(nn.Module):
    """Graph forms that a rewriting engine could lose: unused in-place results, sizes, two norms."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 1)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.twice = nn.BatchNorm1d(4)
        self.norm.running_mean.uniform_(-1, 1)
        self.twice.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1)
        y = self.conv(y)
        # the convolution's result is used twice: its norm must not be folded away
        z = self.norm(y) + y
        return self.twice(self.conv(x)).relu_().view(x.size(0), x.size(2) * 4) + z.flatten(1).sum(
            1, keepdim=True
        )


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.position = nn.Parameter(torch.randn(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position[: x.size(1)]
        return self.mix(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize(
    ("module", "spec"),
    [
        (SideEffects, TensorSpec("float32", ("rows", 3, 6))),
        (Attends, TensorSpec("float32", ("rows", "length", 8), {"length": (1, 32)})),
    ],
)
def test_engines_compute_what_the_model_computes(
    tmp_path: Path, name: str, module: type[nn.Module], spec: TensorSpec
) -> None:
    torch.manual_seed(0)
    repo, source, case = BlockRepository(tmp_path), module().eval(), CASES[name]
    info = case.store(repo, LoadedModel(source.requires_grad_(False), "m", spec), "m")
    made = Stored(case, repo, info).load(create_engine(info, EngineOptions(), case.engine))
    for rows, length in ((1, 1), (3, 32), (2, 7)):
        x = torch.randn(spec.resolve({"rows": rows, "length": length}))
        torch.testing.assert_close(made.run(x), source(x), rtol=1e-4, atol=1e-5)


def test_a_native_engine_holds_no_memory_of_its_callers(native: Stored) -> None:
    """A dead peer's mapping must be free to go, also while no further request comes."""
    made = native.load(native.create())
    x, out = np.zeros((1, 3, 8, 8), np.float32), np.zeros((1, 3, 8, 8), np.float32)
    alive = weakref.ref(x), weakref.ref(out)
    made.run(torch.from_numpy(x), torch.from_numpy(out))
    del x, out
    assert [a() for a in alive] == [None, None]
    made.close()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(NATIVE, ["float16", "float64", "int64"]),
        ("openvino", "bfloat16"),  # ONNX Runtime has no such kernels on a CPU
    ],
)
def test_other_dtypes(tmp_path: Path, name: str, dtype: str) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x

    repo, case, spec = BlockRepository(tmp_path), CASES[name], TensorSpec(dtype, ("rows", 4))
    info = case.store(repo, LoadedModel(Twice().eval(), "twice", spec), "t")
    made = Stored(case, repo, info).load(create_engine(info, EngineOptions(), case.engine))
    for rows in (1, 5):
        x = torch.arange(rows * 4).reshape(rows, 4).to(getattr(torch, dtype))
        out = torch.empty_like(x)
        assert made.run(x, out) is out
        assert torch.equal(out, x + x)
    made.close()
