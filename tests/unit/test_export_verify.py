"""A result depends on its own row and on nothing beside it: what mixes rows is refused, with the
block and the cause; what only looks like it is exported."""

from __future__ import annotations

import logging
import sys
import threading
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import TensorSpec
from blockflow.repository.artifact import FORMATS, write_artifact
from blockflow.repository.export import export_model, export_tree
from blockflow.repository.probe import example_input
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel, load_model
from blockflow.repository.zoo.catalog import ZOO
from tests import export_rig
from tests.export_rig import ROW, SCRIPTED, TRACED, refused
from tests.unit.test_export_state import Draws

repo = export_rig.repo


class LessTheMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)


class BatchStatistics(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x.unsqueeze(-1).expand(-1, -1, 2), None, None, training=True)


class BranchOfAll(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return x * 2
        return x


class ByRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            return x * 2
        return x


class Neighbour(nn.Module):
    """Nothing is mixed, but each gets what is another's."""

    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, 0)


@pytest.mark.parametrize(
    ("module", "formats"),
    [
        (LessTheMean, FORMATS),
        (BatchStatistics, ("pt2", TRACED)),
        (BranchOfAll, (SCRIPTED,)),
        (ByRows, (SCRIPTED,)),
        (Neighbour, ("pt2",)),
    ],
)
def test_rows_that_depend_on_each_other_are_refused(
    repo: BlockRepository, module: type[nn.Module], formats: tuple[str, ...]
) -> None:
    for format_ in formats:
        error = refused(module().eval(), repo, format=format_)
        assert error.code == "EXPORT_MISMATCH"
        assert "depends on the rows beside it" in error.message
        assert "of 8 differs by" in error.message and "allowed is 0.0001" in error.message
        assert "float32[rows,8,4]" in error.hint and "docs/blocks.md" in error.hint


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_pixels_that_are_scaled_by_those_of_all_are_refused(
    repo: BlockRepository, dtype: str
) -> None:
    """All large pictures of random pixels have the same largest one."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pixels = x.float()
            return (pixels / pixels.max()).flatten(1)

    error = refused(Scaled().eval(), repo, spec=TensorSpec(dtype, ("rows", 32, 32)))
    assert "depends on the rows beside it" in error.message


def test_the_block_that_mixes_rows_is_named(repo: BlockRepository) -> None:
    model = nn.Sequential(nn.Linear(4, 4), LessTheMean(), nn.Linear(4, 4)).eval()
    error = refused(model, repo, names=["a", "b", "c"], cuts=["1", "2"], format=TRACED)
    assert "rows beside it" in error.message and error.where == "b"


class Heads(nn.Module):
    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 2), second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.trunk(x)
        return self.one(y), self.two(y)


def test_a_tree_is_asked_as_well(repo: BlockRepository) -> None:
    blocks = {"trunk": "trunk", "one": "one", "two": "two"}
    for second, words in ((LessTheMean(), "rows beside it"), (Draws(), "two results")):
        model = LoadedModel(Heads(second).eval(), "test", ROW)
        with pytest.raises(ExportError, match=words) as e:
            export_tree(model, repo, blocks=blocks, format=TRACED)
        assert (e.value.code, e.value.where) == ("EXPORT_MISMATCH", "two")
    assert repo.names() == []


class Pixels(nn.Module):
    """2,000 integers a row, of which some are rounded another way beside other rows."""

    def __init__(self, edges: int) -> None:
        super().__init__()
        self.edges = edges

    def forward(self, x: Tensor) -> Tensor:
        classes = torch.ones(x.shape[0], 2000, dtype=torch.int64)
        classes[:, : self.edges] = x.shape[0]
        return classes


def test_of_integers_a_few_may_differ(repo: BlockRepository) -> None:
    error = refused(Pixels(3).eval(), repo)
    assert "differs by 0.0015 from the same row alone, allowed is 0.001" in error.message
    export_model(LoadedModel(Pixels(2).eval(), "test", ROW), repo, prefix="pixels")


def test_groups_of_rows_are_exported_as_rows_of_more_dims(repo: BlockRepository) -> None:
    class LessTheGroupsMean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(1, keepdim=True)

    spec = TensorSpec("float32", ("rows", 8, 4))
    export_model(LoadedModel(LessTheGroupsMean().eval(), "test", spec), repo, prefix="grouped")
    assert repo.names() == ["grouped"]


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_precisions_have_their_own_tolerance(repo: BlockRepository, dtype: str) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
    spec = TensorSpec(dtype, ("rows", 256))
    loaded = LoadedModel(model.to(getattr(torch, dtype)).eval(), "test", spec)
    export_model(loaded, repo, prefix="m", format=TRACED)
    assert repo.names() == ["m"]


@pytest.mark.parametrize(
    ("name", "format_"),
    [*product(["transformer", "transformer-tokens"], [SCRIPTED, TRACED]),
     ("transformer-tokens", "pt2")],
)  # fmt: skip
def test_lengths_padding_and_masks_mix_no_rows(
    repo: BlockRepository, name: str, format_: str
) -> None:
    small = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 64, "max_length": 32}
    spec = TensorSpec("int64", ("rows", "length"), {"length": (1, 32)})
    model = load_model(name, arguments=small, input_spec=spec, int_below=64)
    report = export_model(model, repo, prefix="tf", cuts=ZOO[name].cuts[:1], format=format_)
    assert "8x7" in report.max_error


def test_an_infinity_between_blocks_equals_itself(repo: BlockRepository) -> None:
    class Masks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(x < x.mean(1, keepdim=True), float("-inf"))

    model = nn.Sequential(Masks(), nn.Softmax(1)).eval()
    loaded = LoadedModel(model, "test", ROW)
    export_model(loaded, repo, names=["mask", "weights"], cuts=["1"], format=TRACED)
    error = refused(Masks().eval(), BlockRepository(repo.root.parent / "other"), format=TRACED)
    assert "the model itself" in error.message and "NaN or infinite" in error.message
    assert "negative" in error.hint


def test_an_infinity_hides_no_difference(repo: BlockRepository) -> None:
    class Mixes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.pad(x - x.mean(0, keepdim=True), (0, 1), value=float("-inf"))

    model = nn.Sequential(Mixes(), nn.Softmax(1)).eval()
    error = refused(model, repo, names=["mix", "weights"], cuts=["1"], format=TRACED)
    assert "rows beside it" in error.message and error.where == "mix"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout()), "two results"),
        (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "the model fails"),
        (nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Upsample(2), nn.BatchNorm1d(4)), "beside it"),
    ],
)
def test_train_mode_is_named_as_the_cause(
    repo: BlockRepository, module: nn.Module, words: str
) -> None:
    error = refused(module.train(), repo, format=TRACED)
    assert words in error.message
    assert error.hint == "it is in train mode: call eval() before the export"


def test_the_part_in_train_mode_is_named(repo: BlockRepository) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval()
    model[1].train()
    assert refused(model, repo).hint == "1: in train mode: call eval() before the export"


@pytest.mark.parametrize(
    ("before", "words"),
    [([nn.Linear(4, 4)], "the model fails"), ([nn.Unflatten(1, (4, 1)), nn.Upsample(2)], "beside")],
    ids=["rows", "lengths"],
)
def test_a_batch_norm_without_statistics_of_its_own_is_named_as_the_cause(
    repo: BlockRepository, before: list[nn.Module], words: str
) -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    error = refused(nn.Sequential(*before, norm).eval(), repo)
    assert words in error.message
    assert error.hint.startswith(f"{len(before)}: a batch norm without running statistics")


def test_a_block_that_copies_its_input_is_not_in_train_mode(repo: BlockRepository) -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x -= x.mean(0, keepdim=True)
            return x

    error = refused(Writes().eval(), repo)
    assert "rows beside it" in error.message and "dim 0" in error.hint


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_model_that_fails_on_a_number_of_rows_says_so(repo: BlockRepository, rows: int) -> None:
    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.jit.is_tracing() and x.shape[0] == rows:
                raise ValueError("not so many")
            return x * 2

    error = refused(Picky().eval(), repo, format=TRACED)
    assert error.code == "EXPORT_FAILED"
    assert f"(tried [{rows}, 4]): ValueError: not so many" in error.message


class BranchOfValues(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class LeavesTorch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.numpy().max())


@pytest.mark.parametrize(
    ("module", "format_", "code", "hint"),
    [
        (BranchOfValues, TRACED, "EXPORT_MISMATCH", "tracing keeps for ever the branch"),
        (BranchOfValues, "pt2", "EXPORT_FAILED", "torch.cond"),
        (LeavesTorch, "pt2", "EXPORT_FAILED", "leaves torch for numpy"),
        (LeavesTorch, SCRIPTED, "EXPORT_FAILED", "leaves torch for numpy"),
        (LeavesTorch, TRACED, "EXPORT_MISMATCH", "what numpy or Python computed"),
        (ByRows, "pt2", "EXPORT_FAILED", "a branch on a size"),
    ],
)
def test_the_cause_is_named(
    repo: BlockRepository, module: type[nn.Module], format_: str, code: str, hint: str
) -> None:
    error = refused(module().eval(), repo, format=format_)
    assert error.code == code
    assert hint in error.hint
    assert "state between calls" not in error.hint
    if format_ == "pt2" and module is not ByRows:  # torch finds that out at the end, nowhere
        assert f"({Path(__file__).name}, line " in error.message


def test_a_refused_export_prints_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But what another thread prints meanwhile (the progress) is seen."""
    shown, kept = threading.Event(), []

    class Branches(BranchOfValues):
        def forward(self, x: Tensor) -> Tensor:
            def show() -> None:
                sys.stderr.write("40 %\n")
                shown.set()

            kept.append(sys.stderr)
            threading.Thread(target=show).start()
            assert shown.wait(10)
            return super().forward(x)

    # as torch's loggers are outside of a test, where their handlers write on the real one
    handler = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(
        logging.getLogger("torch.fx.experimental.symbolic_shapes"), "handlers", [handler]
    )
    monkeypatch.setattr(logging.getLogger("torch"), "level", logging.INFO)
    with pytest.raises(ExportError):
        write_artifact(Branches(), ROW, torch.ones(2, 4), "pt2", tmp_path / "f")
    assert capfd.readouterr() == ("", "40 %\n")
    kept[0].write("later\n")
    assert capfd.readouterr() == ("", "later\n"), "muted for the export, not for ever"
    assert logging.getLogger("torch").level == logging.INFO


class Small(nn.Module):
    """Probabilities of many classes: the largest of them is small."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.head = nn.Linear(4, 50_000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).softmax(self.dim) * (1e-5 if self.dim == 0 else 1.0)


def test_small_results_are_compared_as_well(repo: BlockRepository) -> None:
    error = refused(Small(0).eval(), repo, format=TRACED)
    assert "depends on the rows beside it" in error.message
    small = LoadedModel(Small(1).eval(), "test", ROW)
    export_model(small, repo, prefix="small", format=TRACED)


class SmallBranch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bool(x.sum() > 0):
            return x * 1e-5
        return x * 1e-6


def test_small_results_show_a_branch_that_was_traced(repo: BlockRepository) -> None:
    assert "differ from the model" in refused(SmallBranch().eval(), repo, format=TRACED).message


def test_a_row_close_to_zero_by_chance_is_measured_by_the_batch(repo: BlockRepository) -> None:
    """Rounding is a large part of it, and a small one of what the block gives."""

    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 4096), nn.Tanh(), nn.Linear(4096, 1))
            self.register_buffer("zero", self.net(example_input(ROW, {"rows": 8}, seed=1))[0])

        def forward(self, x: Tensor) -> Tensor:
            return (self.net(x) - self.zero) * 100

    torch.manual_seed(0)
    loaded = LoadedModel(Regression().eval(), "test", ROW)
    export_model(loaded, repo, prefix="regression", format=TRACED)


class Widens(nn.Module):
    """Computes in float32 and says so in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y.double()


class OfCoarseWeights(nn.Module):
    """As if many rows were rounded in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x.to(torch.bfloat16)).to(torch.float32)
        return y * 1.01 if x.shape[0] > 2 else y


def test_a_result_is_as_exact_as_what_it_was_computed_with(repo: BlockRepository) -> None:
    export_model(LoadedModel(Widens().eval(), "test", ROW), repo, names=["w"])
    assert repo.info("w").contract.output.dtype == "float64"
    coarse = LoadedModel(OfCoarseWeights().eval(), "test", ROW)
    export_model(coarse, repo, names=["c"], format=SCRIPTED)
