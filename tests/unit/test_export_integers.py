"""The bound of integers is kept with a block, and all that is compared later is drawn below it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from blockflow.bench.profiling import child
from blockflow.bench.profiling.plan import Cell
from blockflow.core.errors import ExportError
from blockflow.core.launchspec import StageSpec
from blockflow.core.model import BlockInfo, Padding, TensorSpec
from blockflow.engine.workshop import EngineWorkshop
from blockflow.repository.convert import Workshop, convert_block
from blockflow.repository.export import export_model
from blockflow.repository.probe import example_input
from blockflow.repository.repository import BlockRepository
from blockflow.repository.samples import seeded_samples
from blockflow.repository.sources import LoadedModel, load_model
from blockflow.repository.verdict import Run
from tests import export_rig
from tests.export_rig import TRACED

repo = export_rig.repo

WORDS = 1000
TOKENS = TensorSpec("int64", ("rows", "length"), {"length": (1, 16)})


def test_any_bound_of_the_manifest_can_be_drawn() -> None:
    for below in (2**63 - 1, 2**63):
        assert example_input(TOKENS, {"rows": 2, "length": 3}, int_below=below).max() > 2**32


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(WORDS, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens).sum(1))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> BlockRepository:
    """Two chains: ``m`` with a bound, ``n`` without."""
    repo = BlockRepository(tmp_path_factory.mktemp("blocks"))
    for prefix, below in (("m", WORDS), ("n", None)):
        bag = LoadedModel(Bag().eval(), "t", TOKENS, int_below=below, padding=Padding("length"))
        export_model(bag, repo, prefix=prefix, cuts=["out"])
    return repo


def test_the_block_that_takes_tokens_keeps_it(stored: BlockRepository) -> None:
    assert [stored.manifest(f"m-{i}").int_below for i in (1, 2)] == [WORDS, None]
    assert stored.manifest("n-1").int_below is None


class Weekdays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(7, 2))

    def forward(self, days: Tensor) -> Tensor:
        return nn.functional.embedding(days.long(), self.table).sum(1)


@pytest.mark.parametrize(
    ("dtype", "hint"),
    [
        ("int64", r"integers from \d+ to \d+ \(--int-below\)"),
        ("float32", r"every second one negative: .* clamp\(\)"),
    ],
)
def test_an_index_outside_of_the_models_table_is_explained(
    repo: BlockRepository, dtype: str, hint: str
) -> None:
    days = TensorSpec(dtype, ("rows", "length"))
    model = LoadedModel(Weekdays().eval(), "t", days, int_below=WORDS)
    with pytest.raises(ExportError, match="index out of range") as e:
        export_model(model, repo, prefix="w")
    assert e.value.code == "EXPORT_FAILED"
    assert re.search(hint, e.value.hint)


def test_models_of_the_zoo_keep_theirs(repo: BlockRepository) -> None:
    sizes = {"layers": 1, "width": 16, "heads": 2, "max_length": 16}
    encoder = load_model("transformer", arguments=sizes, input_spec=TOKENS)
    export_model(encoder, repo, prefix="t", format=TRACED)
    assert repo.manifest("t").int_below == 4096
    export_model(load_model("digits"), repo, prefix="d", format=TRACED)
    assert repo.manifest("d").int_below is None


class Sees(Workshop):
    """Keeps the largest number of what is calibrated with, and of what is compared on."""

    def __init__(self) -> None:
        self.calibrated = self.compared = 0

    def make(
        self, kind: str, block: BlockInfo, source: Path, samples: Sequence[Tensor], target: Path
    ) -> None:
        self.calibrated = max((int(x.max()) for x in samples), default=0)
        target.write_bytes(b"made")

    @contextmanager
    def runners(
        self, kind: str | None, block: BlockInfo, file: Path
    ) -> Iterator[Mapping[str, Run]]:
        def run(x: Tensor) -> Tensor:
            if kind is not None:
                self.compared = max(self.compared, int(x.max()))
            return x.double().sum(1, keepdim=True)

        yield {"any": run}


@pytest.mark.parametrize(("name", "least", "most"), [("m-1", 900, 999), ("n-1", 1, 1)])
def test_a_conversion_sees_all_tokens(
    stored: BlockRepository, monkeypatch: pytest.MonkeyPatch, name: str, least: int, most: int
) -> None:
    monkeypatch.setattr("blockflow.repository.convert._far", lambda *_: ())
    sees = Sees()
    convert_block(stored, name, "onnx-int8", sees)
    assert least <= sees.calibrated <= most and least <= sees.compared <= most
    inputs = seeded_samples(TOKENS, int_below=stored.info(name).int_below).inputs
    assert least <= max(int(x.max()) for x in inputs) <= most


@pytest.mark.parametrize(("name", "least", "most"), [("m-1", 500, 999), ("n-1", 1, 1)])
def test_a_measurement_sees_all_tokens(
    stored: BlockRepository, tmp_path: Path, name: str, least: int, most: int
) -> None:
    bench = child.load(
        {
            "stages": [StageSpec(0, stored.info(name), "exported").to_dict()],
            "threads": torch.get_num_threads(),
            "run_dir": str(tmp_path),
            "repository": str(stored.root),
        }
    )
    x, _ = bench._inputs(Cell(1, 8, 16))
    assert least <= int(x.max()) <= most


def test_rare_tokens_are_not_left_out_of_the_verdict(repo: BlockRepository) -> None:
    """Their vectors are larger, as training makes them: a calibration with two others cuts them."""
    pytest.importorskip("onnxruntime")

    class Rare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(WORDS, 64), nn.Linear(64, 8)
            with torch.no_grad():
                self.table.weight.mul_(torch.linspace(0.2, 4, WORDS).unsqueeze(1))
            self.mix = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.out(self.mix(self.table(tokens)).mean(1))

    torch.manual_seed(0)
    loaded = LoadedModel(Rare().eval(), "rare", TOKENS, int_below=WORDS)
    export_model(loaded, repo, prefix="rare")
    report = convert_block(repo, "rare", "onnx-int8", EngineWorkshop(), tolerance=10)
    x = torch.randint(0, WORDS, (8, 16), generator=torch.Generator().manual_seed(9))
    file = repo.root / "rare" / repo.manifest("rare").variants["onnx-int8"].file
    with EngineWorkshop().runners("onnx-int8", repo.info("rare"), file) as engines:
        y = engines["onnxruntime"](x)
    with torch.no_grad():
        wanted = loaded.module(x)
    found = float((y - wanted).abs().max() / wanted.abs().max())
    assert found < 2 * report.errors["onnxruntime"]
