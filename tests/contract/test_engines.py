"""One suite for all engines: a new engine adds one entry to MAKERS."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.errors import BlockError, RepositoryError, RequestError
from blockflow.core.model import BlockInfo, TensorSpec
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.registry import ENGINES, create_engine
from blockflow.repository.echo import save_echo
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel

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


def exported(repo: BlockRepository, format_: str) -> BlockInfo:
    loaded = LoadedModel(model(), "test", SPEC)
    export_model(loaded, repo, names=["block"], format=format_)
    return repo.info("block")


MAKERS: dict[str, Callable[[BlockRepository], BlockInfo]] = {
    "pt2": lambda repo: exported(repo, "pt2"),
    "torchscript-scripted": lambda repo: exported(repo, "torchscript-scripted"),
    "torchscript-traced": lambda repo: exported(repo, "torchscript-traced"),
    "echo": lambda repo: save_echo(repo, "block", SPEC),
}


@pytest.fixture(scope="module", params=list(MAKERS))
def stored(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[BlockRepository, BlockInfo]:
    repo = BlockRepository(tmp_path_factory.mktemp("blocks"))
    return repo, MAKERS[request.param](repo)


@pytest.fixture
def engine(stored: tuple[BlockRepository, BlockInfo]) -> Iterator[Engine]:
    repo, info = stored
    threads = torch.get_num_threads()
    made = create_engine(info, EngineOptions(threads=1))
    with repo.artifact(info.name) as path:
        made.load(path)
    yield made
    made.close()
    torch.set_num_threads(threads)


def expected(engine: Engine, x: Tensor) -> Tensor:
    if engine.block.format == "echo":
        return x
    with torch.no_grad():
        return model()(x.clone())


def test_every_engine_is_in_this_suite() -> None:
    assert set(MAKERS) == set(ENGINES)


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


def test_the_thread_count_is_set(stored: tuple[BlockRepository, BlockInfo]) -> None:
    repo, info = stored
    before = torch.get_num_threads()
    made = create_engine(info, EngineOptions(threads=2))
    try:
        with repo.artifact(info.name) as path:
            made.load(path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        made.close()


def test_nothing_runs_before_load_or_after_close(
    stored: tuple[BlockRepository, BlockInfo],
) -> None:
    repo, info = stored
    made = create_engine(info, EngineOptions())
    for _ in range(2):
        with pytest.raises(BlockError) as e:
            made.run(torch.zeros(1, 3, 8, 8))
        assert e.value.code == "LOAD_FAILED"
        with repo.artifact(info.name) as path:
            made.load(path)
        made.close()


@pytest.mark.parametrize("data", [b"", b"garbage", b"PK\x03\x04 not a zip"])
def test_an_artifact_that_cannot_be_loaded(
    stored: tuple[BlockRepository, BlockInfo], data: bytes, tmp_path: Path
) -> None:
    file = tmp_path / "artifact"
    file.write_bytes(data)
    with pytest.raises(BlockError) as e:
        create_engine(stored[1], EngineOptions()).load(file)
    assert e.value.code == "LOAD_FAILED" and e.value.where == "block"


def test_a_wrong_contract_is_noticed(stored: tuple[BlockRepository, BlockInfo]) -> None:
    repo, info = stored
    if info.format == "echo":
        pytest.skip("echo has no output of its own")
    data = info.to_dict()
    data["contract"]["output"]["dims"] = ["rows", 3, 8, 9]
    made = create_engine(BlockInfo.from_dict(data), EngineOptions())
    with repo.artifact(info.name) as path:
        made.load(path)
    with pytest.raises(BlockError) as e:
        made.run(torch.zeros(1, 3, 8, 8))
    assert e.value.code == "OUTPUT_MISMATCH"


@pytest.mark.parametrize(
    "options",
    [
        EngineOptions(precision="int3"),
        EngineOptions(device="nonsense:7"),
        EngineOptions(extra={"memory_format": "spiral"}),
    ],
)
def test_options_that_do_not_exist(
    stored: tuple[BlockRepository, BlockInfo], options: EngineOptions
) -> None:
    repo, info = stored
    if info.format == "echo":
        pytest.skip("echo computes nothing")
    made = create_engine(info, options)
    with pytest.raises(BlockError) as e, repo.artifact(info.name) as path:
        made.load(path)
    assert e.value.code == "LOAD_FAILED"


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (EngineOptions(precision="bf16"), 0.1),
        (EngineOptions(extra={"memory_format": "channels_last"}), 1e-5),
    ],
)
def test_precision_and_layout(
    stored: tuple[BlockRepository, BlockInfo], options: EngineOptions, tolerance: float
) -> None:
    repo, info = stored
    made = create_engine(info, options)
    with repo.artifact(info.name) as path:
        made.load(path)
    x, out = torch.randn(2, 3, 8, 8), torch.empty(2, 3, 8, 8)
    y = made.run(x, out)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected(made, x), rtol=tolerance, atol=tolerance)


def test_an_unknown_format(stored: tuple[BlockRepository, BlockInfo]) -> None:
    data = {**stored[1].to_dict(), "format": "onnx"}
    with pytest.raises(RepositoryError) as e:
        create_engine(BlockInfo.from_dict(data), EngineOptions())
    assert e.value.code == "UNSUPPORTED_FORMAT" and "pt2" in e.value.hint


class Picky(nn.Module):
    """Looks tokens up: an index outside the table fails inside the computation."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


@pytest.mark.parametrize("format_", [f for f in MAKERS if f != "echo"])
def test_a_failing_computation_is_a_block_error(tmp_path: Path, format_: str) -> None:
    repo = BlockRepository(tmp_path)
    spec = TensorSpec("int64", ("rows", "length"), {"length": (1, 9)})
    export_model(LoadedModel(Picky().eval(), "picky", spec), repo, names=["p"], format=format_)
    made = create_engine(repo.info("p"), EngineOptions())
    with repo.artifact("p") as path:
        made.load(path)
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


@pytest.mark.parametrize("format_", [f for f in MAKERS if f != "echo"])
@pytest.mark.parametrize(
    ("module", "spec"),
    [
        (SideEffects, TensorSpec("float32", ("rows", 3, 6))),
        (Attends, TensorSpec("float32", ("rows", "length", 8), {"length": (1, 32)})),
    ],
)
def test_engines_compute_what_the_model_computes(
    tmp_path: Path, format_: str, module: type[nn.Module], spec: TensorSpec
) -> None:
    torch.manual_seed(0)
    repo, source = BlockRepository(tmp_path), module().eval().requires_grad_(False)
    export_model(LoadedModel(source, "m", spec), repo, names=["m"], format=format_)
    made = create_engine(repo.info("m"), EngineOptions())
    with repo.artifact("m") as path:
        made.load(path)
    for rows, length in ((1, 1), (3, 32), (2, 7)):
        x = torch.randn(spec.resolve({"rows": rows, "length": length}))
        torch.testing.assert_close(made.run(x), source(x), rtol=1e-4, atol=1e-5)
