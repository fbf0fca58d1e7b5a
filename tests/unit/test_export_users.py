"""Models as people bring them: what keeps one from being served is told with its cause."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor, nn
from typer.testing import CliRunner

from blockflow.cli import export as command
from blockflow.core.errors import ExportError, SystemError_
from blockflow.core.model import TensorSpec
from blockflow.engine.base import EngineOptions
from blockflow.engine.registry import create_engine
from blockflow.launch.base import Launcher
from blockflow.repository.artifact import write_artifact
from blockflow.repository.causes import cause
from blockflow.repository.export import export_model
from blockflow.repository.operators import OWN
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.repository.trace import refuse_more_inputs
from blockflow.repository.weights import load_weights
from tests import export_rig
from tests.export_rig import ROW, SCRIPTED, TRACED, refused

repo = export_rig.repo

PICTURE = TensorSpec("float32", ("rows", 3, 8, 8))


# --- operators -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def twice() -> Any:
    """An operator that an extension registers; kept alive, for it goes with its library."""
    library = torch.library.Library("blockflow_users", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    return library


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.blockflow_users.twice(x) + 1


class TwiceOrNot(nn.Module):
    """In a branch: a graph within the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.shape[1] > 2, lambda y: Twice()(y), lambda y: y + 1, (x,))


@pytest.mark.parametrize(
    ("module", "format_"),
    [(Twice, "pt2"), (Twice, SCRIPTED), (Twice, TRACED), (TwiceOrNot, "pt2")],
)
def test_an_operator_that_no_worker_has_is_named(
    repo: BlockRepository, twice: Any, module: type[nn.Module], format_: str
) -> None:
    error = refused(module().eval(), repo, format=format_)
    assert error.code == "EXPORT_FAILED"
    assert "blockflow_users::twice" in error.message and "a worker imports torch" in error.message


def test_attention_that_no_file_holds_has_another_that_does() -> None:
    """Torch's words: to have it say them takes seconds."""
    told = RuntimeError("Failed serializing node flex_attention in graph: %flex_attention : [...")
    assert "scaled_dot_product_attention" in cause(told, ROW)


def by_key(batch: dict[str, Tensor]) -> Tensor:
    return batch["x"]


def by_number(pair: list[Tensor]) -> Tensor:
    return pair[0]


def by_name(**inputs: Tensor) -> Tensor:
    return inputs["x"]


def any_way(x: Tensor | list[Tensor]) -> Tensor:
    return x if isinstance(x, Tensor) else x[0]


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (by_key, "its inputs in one dict (batch)"),
        (by_number, "its inputs in one list (pair)"),
        (by_name, "its inputs by name alone (**inputs)"),
    ],
)
def test_inputs_in_one_object_are_several(forward: Any, why: str) -> None:
    model: Any = nn.Linear(4, 4)
    model.forward = any_way
    refuse_more_inputs(model, "m")
    model.forward = forward
    with pytest.raises(ExportError) as e:
        refuse_more_inputs(model, "m")
    assert why in e.value.message and "takes one tensor, hands on parts of it" in e.value.hint


@pytest.mark.parametrize("asked", ["weight_g", "parametrizations"])
def test_what_a_weight_was_computed_of_is_gone(repo: BlockRepository, asked: str) -> None:
    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * getattr(self, asked)

    hint = refused(Asks(4, 4).eval(), repo).hint
    assert asked in hint and "let the forward read the weight" in hint


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def test_a_computed_weight_that_was_scripted_says_what_to_do(repo: BlockRepository) -> None:
    linear = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(linear, "weight", Symmetric())
    hint = refused(torch.jit.script(linear.eval()), repo).hint
    assert "remove_parametrizations" in hint and "unscripted" in hint


def test_torchs_own_operators_are_known(launcher: Launcher, tmp_path: Path) -> None:
    """All that this torch registers, where nothing but templates' imports was: tests do more."""
    report, log = tmp_path / "report", tmp_path / "log"
    spec = {"report": str(report), "log_path": str(log)}
    child = launcher.launch("tests.launched:operators", spec, "w#0")
    assert child.wait(60) == 0, log.read_text()
    child.close()
    known = set(report.read_text().split())
    assert "aten" in known and known <= OWN


# --- weights -------------------------------------------------------------------------------------


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight: Tensor
        self.ids: Tensor
        self.register_buffer("weight", torch.ones(4, 4, dtype=torch.int8))
        self.register_buffer("ids", torch.arange(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.to(x.dtype)


def test_what_integers_do_not_hold_is_not_lost_unseen(tmp_path: Path) -> None:
    model, file = Quantised(), tmp_path / "w.pt"
    for lost in (torch.full((4, 4), 0.9), torch.full((4, 4), 200), torch.full((4, 4), 200).byte()):
        torch.save({"weight": lost, "ids": torch.arange(4)}, file)
        with pytest.raises(ExportError, match="1 more than a tensor of integers holds: weight"):
            load_weights(model, file)
        assert model.weight.eq(1).all()
    torch.save({"weight": torch.full((4, 4), -3.0), "ids": torch.arange(4.0)}, file)
    load_weights(model, file)  # nothing is lost
    assert model.weight.eq(-3).all()


# --- causes --------------------------------------------------------------------------------------


class LosesItsRow(nn.Module):
    """``squeeze()`` takes the rows as well, where there is one."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.pool, self.fc, self.again = nn.AdaptiveAvgPool2d(1), nn.Linear(3, 3), again

    def forward(self, x: Tensor) -> Tensor:
        h = self.pool(x).squeeze()
        return torch.cat([h, h], dim=1) if self.again else self.fc(h)


def test_a_lost_row_is_told_as_such(repo: BlockRepository) -> None:
    error = refused(LosesItsRow(False).eval(), repo, spec=PICTURE)
    assert error.code == "EXPORT_MISMATCH" and "squeeze(dim)" in error.hint


@pytest.mark.parametrize("parts", [1, 2])
def test_a_model_that_fails_with_one_row_says_so(repo: BlockRepository, parts: int) -> None:
    error = refused(LosesItsRow(True).eval(), repo, spec=PICTURE, parts=parts)
    assert error.code == "EXPORT_FAILED"
    assert "the model fails on" in error.message and "[1, 3, 8, 8]" in error.message


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x + 1e-6)


def test_what_is_not_a_number_is_the_models_own(repo: BlockRepository) -> None:
    error = refused(Logarithm().eval(), repo)
    assert "the model itself gives" in error.message
    assert "negative" in error.hint and "clamp()" in error.hint


class Standard(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.std(0)


def test_what_one_row_alone_has_not_is_no_matter_of_its_numbers(repo: BlockRepository) -> None:
    error = refused(Standard().eval(), repo, format=TRACED)
    assert "the model itself gives" in error.message
    assert "dim 0" in error.hint and "logarithm" not in error.hint


def quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)).eval())


class Masked(nn.Module):
    """A decoder as torch's tutorial has it: a causal mask for nn.TransformerEncoder."""

    def __init__(self, is_causal: bool | None = None) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 1, 4, batch_first=True)
        self.layers, self.is_causal = nn.TransformerEncoder(layer, 1), is_causal

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layers(x, mask=mask, is_causal=self.is_causal)


class Multiple(nn.Module):
    """Pads to a multiple of 8, and cuts back."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        return nn.functional.pad(x, (0, math.ceil(length / 8) * 8 - length))[:, :length] * 2


@pytest.mark.filterwarnings("ignore")  # of what is deprecated, and of one head
@pytest.mark.parametrize(
    ("make", "spec", "hint"),
    [
        (quantised, ROW, "export the model as it was before"),
        (Masked, TensorSpec("float32", ("rows", 3, 4)), "is_causal=True"),
        (Multiple, TensorSpec("float32", ("rows", "n"), {"n": (8, 40)}), "not math.ceil(n / 8)"),
    ],
)
def test_what_torchs_own_parts_ask_for_is_told(
    repo: BlockRepository, make: Any, spec: TensorSpec, hint: str
) -> None:
    error = refused(make().eval(), repo, spec=spec)
    assert error.code == "EXPORT_FAILED" and hint in error.hint


class ByRow(nn.Module):
    """As model libraries make masks: torch.vmap over a row, or over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: self.a(row) * row)(x)


def test_what_maps_over_rows_is_exported(repo: BlockRepository) -> None:
    """torch.export leaves in its program where a map begins and ends, which no worker runs."""
    export_model(LoadedModel(ByRow().eval(), "by row", ROW), repo, names=["m"])
    with repo.artifact("m") as path:
        create_engine(repo.info("m"), EngineOptions()).load(path)


class AllOptional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor | None = None, **more: Any) -> Tensor:
        return self.b(self.a(x))


def test_a_forward_whose_input_has_a_default_is_split(repo: BlockRepository) -> None:
    loaded = LoadedModel(AllOptional().eval(), "test", ROW)
    report = export_model(loaded, repo, names=["a", "b"], cuts=["b"])
    assert [list(path) for path in report.paths] == [["a", "b"]]


def test_a_module_that_is_used_twice_is_told(repo: BlockRepository) -> None:
    act = nn.GELU()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 2)).eval()
    error = refused(model, repo, cuts=["3"])
    assert error.code == "NOT_SPLITTABLE"
    assert "'3' is the same module as '1'" in error.message


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "a_users_model.py").write_text(
        "from torch import nn\n\n\ndef make(bias=True):\n    return nn.Linear(4, 4, bias=bias)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    app = typer.Typer()
    app.command("export")(command.export)
    args = ["a_users_model:make", "--input", "float32[rows,4]", "--name", "m"]
    return lambda *more: CliRunner().invoke(app, [*args, *more])


@pytest.mark.parametrize("value", ["False", "None", "nan"])
def test_pythons_words_are_not_taken_for_strings(cli: Any, value: str) -> None:
    result = cli("--arg", f"bias={value}")
    assert result.exit_code == 2
    assert "INVALID_REQUEST" in result.stderr and "--arg bias" in result.stderr


def test_jsons_words_are_taken(cli: Any) -> None:
    result = cli("--arg", "bias=false", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["blocks"][0]["parameters"] == 16


def test_an_unknown_variant_is_refused_before_anything_is_stored(cli: Any, tmp_path: Path) -> None:
    result = cli("--variants", "onx")
    assert result.exit_code == 2 and "no variant onx" in result.stderr
    assert not (tmp_path / "blocks" / "m").exists()


@pytest.mark.parametrize("as_json", [False, True])
def test_blocks_that_are_stored_are_told_when_their_variants_fail(
    cli: Any, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    def full(*_: Any) -> Any:
        raise SystemError_("NO_SPACE", "the disk is full")

    monkeypatch.setattr(command, "convert_all", full)
    result = cli("--variants", "onnx", *["--json"] * as_json)
    assert result.exit_code == 5, "a matter of the machine, not of what was asked"
    assert "NO_SPACE" in result.stderr
    if as_json:
        document = json.loads(result.stdout)
        assert document["error"]["code"] == "NO_SPACE" and document["paths"] == [["m"]]
    else:
        assert "a_users_model:make" in result.stdout and "are stored" in result.stderr


def test_a_repository_may_have_any_name(cli: Any, tmp_path: Path) -> None:
    result = cli("--repository", "exp[/v1]")
    assert result.exit_code == 0, result.output
    assert "exp[/v1]" in result.stdout
    assert BlockRepository(tmp_path / "exp[" / "v1]").names() == ["m"]


def test_no_input_travels_with_a_block(tmp_path: Path) -> None:
    file = tmp_path / "block"
    write_artifact(nn.ReLU(), ROW, torch.ones(2, 4), "pt2", file)
    with zipfile.ZipFile(file) as archive:
        inputs = [i for i in archive.infolist() if "sample_inputs" in i.filename]
    assert not any(i.file_size for i in inputs)
