"""Export: from a factory to verified blocks, and every way in which it can go wrong."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import TensorSpec
from blockflow.repository.artifact import FORMATS, read_artifact
from blockflow.repository.export import export_model, export_tree
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel, build, load_model, load_weights
from blockflow.repository.spec_text import parse_range, parse_spec
from blockflow.repository.zoo.resnet import BasicBlock, ResNet
from tests import export_rig
from tests.export_rig import DigitHeads

repo = export_rig.repo

TRACED = "torchscript-traced"
ROW = TensorSpec("float32", ("rows", 4))
SMALL = {"layers": 2, "width": 16, "heads": 2, "vocabulary": 64, "max_length": 32}
TOKENS = TensorSpec("int64", ("rows", "length"), {"length": (1, 32)})


def loaded(module: nn.Module, spec: TensorSpec = ROW) -> LoadedModel:
    return LoadedModel(module.eval(), "test", spec)


def refused(code: str, call) -> ExportError:
    with pytest.raises(ExportError) as e:
        call()
    assert e.value.code == code, str(e.value)
    return e.value


@pytest.mark.parametrize("format_", list(FORMATS))
def test_a_chain_in_every_format(repo: BlockRepository, format_: str) -> None:
    model = load_model("transformer", arguments=SMALL, input_spec=TOKENS, int_below=64)
    report = export_model(
        model, repo, prefix="tf", cuts=["layers.1", "head"], format=format_, version="7"
    )
    assert report.paths == (("tf-1", "tf-2", "tf-3"),)
    assert max(report.max_error.values()) < 1e-4
    assert {"1x7", "3x7", "8x7", "2x1", "1x32"} <= set(report.max_error)
    x = y = torch.randint(0, 64, (4, 9))
    for position, name in enumerate(report.paths[0], start=1):
        manifest = repo.verify(name)
        assert manifest.format == format_ and manifest.version == "7"
        assert manifest.chain is not None and manifest.chain.position == position
        assert manifest.tools["torch"] == torch.__version__
        assert manifest.padding is not None and manifest.padding.error < 1e-4
        with repo.artifact(name) as path, torch.no_grad():
            y = read_artifact(path, format_)(y)
    with torch.no_grad():
        torch.testing.assert_close(y, model.module(x))
    middle = repo.info("tf-2").contract
    assert middle.input.dims == middle.output.dims == ("rows", "length", 16)
    assert middle.input.ranges == {"length": (1, 32)}
    assert repo.info("tf-3").contract.output.dims == ("rows", 16)


def test_the_report_says_what_was_stored(repo: BlockRepository) -> None:
    net = ResNet(BasicBlock, (1, 1, 1, 1), classes=5, width=4)
    model = loaded(net, TensorSpec("float32", ("rows", 3, 32, 32)))
    report = export_model(model, repo, prefix="r", cuts=["layer2", "layer3", "layer4"])
    total = sum(p.numel() for p in model.module.parameters())
    assert sum(b.parameters for b in report.blocks) == total
    for block in report.blocks:
        manifest = repo.manifest(block.name)
        assert (manifest.sha256, manifest.size) == (block.sha256, block.file_bytes)
        assert block.ms > 0 and block.state_bytes > 4 * block.parameters
    assert report.blocks[0].output_bytes == 4 * 4 * 8 * 8
    parts = [block.part for block in report.blocks]
    assert parts == ["begin..layer2", "layer2..layer3", "layer3..layer4", "layer4..end"]
    assert json.loads(json.dumps(report.to_dict()))["model"] == "test"


def test_one_block_and_even_parts(repo: BlockRepository) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    assert export_model(loaded(model), repo, prefix="whole").paths == (("whole",),)
    report = export_model(loaded(model), repo, names=["a", "b", "c"], parts=3)
    assert [b.name for b in report.blocks] == ["a", "b", "c"]


def test_heads_that_branch_from_a_trunk(repo: BlockRepository) -> None:
    tasks = ("digit", "parity", "high")
    heads = {f"head_{task}": f"heads.{task}" for task in tasks}
    blocks = {"trunk1": "trunk1", "trunk2": "trunk2", **heads}
    report = export_tree(loaded(DigitHeads()), repo, blocks=blocks)
    assert set(report.paths) == {("trunk1", "trunk2", f"head_{t}") for t in tasks}
    assert repo.info("head_parity").contract.output.dims == ("rows", 2)
    assert [repo.manifest(n).chain.position for n in ("trunk1", "trunk2", "head_high")] == [1, 2, 3]


class WritesInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.relu(x))


class WritesByHand(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x * 2


@pytest.mark.parametrize("format_", list(FORMATS))
@pytest.mark.parametrize("module", [WritesInput, WritesByHand])
def test_no_stored_block_writes_into_its_input(
    repo: BlockRepository, format_: str, module: type[nn.Module]
) -> None:
    model = module()
    x = torch.randn(3, 4)
    expected = model.eval()(x.clone())
    export_model(loaded(model), repo, prefix="w", format=format_)
    before = x.clone()
    with repo.artifact("w") as path, torch.no_grad():
        y = read_artifact(path, format_)(x)
    assert torch.equal(x, before)
    torch.testing.assert_close(y, expected)


class ByRows(nn.Module):
    """Tracing takes one branch for ever."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 1 else x


class Checks(nn.Module):
    """A branch that no sample takes, and a model's look at its input."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 4:
            raise ValueError("four numbers")
        return x * 2 if x.abs().max() < 1e6 else x


class ByValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Nonzero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)[x[0] > 0].transpose(0, 1)


class SwapsRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(0)


class ComplexOut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x)


class NoOut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, :0]


class TwoOut(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


LENGTH = TensorSpec("float32", ("rows", "length"), {"length": (2, 64)})


def test_what_a_trace_keeps_for_ever_is_listed(repo: BlockRepository) -> None:
    report = export_model(LoadedModel(Checks(), "test", ROW), repo, names=["m"], format=TRACED)
    (block,) = report.blocks
    assert len(block.notes) == 2, "a size and a value"
    for note in block.notes:
        assert note.startswith("test_export.py:") and "Python boolean" in note
    linear = LoadedModel(nn.Linear(4, 4), "test", ROW)
    assert export_model(linear, repo, names=["n"], format=TRACED).blocks[0].notes == ()


@pytest.mark.parametrize(
    ("module", "spec", "format_", "code", "words"),
    [
        (ByRows, ROW, TRACED, "EXPORT_MISMATCH", "differ from the model"),
        (ByValue, ROW, "pt2", "EXPORT_FAILED", "cannot be written as pt2"),
        (ByValue, ROW, TRACED, "EXPORT_MISMATCH", "differ from the model"),
        (Nonzero, LENGTH, "pt2", "NOT_SPLITTABLE", "cannot be derived"),
        (SwapsRows, ROW, "pt2", "NOT_SPLITTABLE", "dim 0"),
        (ComplexOut, ROW, "pt2", "NOT_SPLITTABLE", "complex64"),
        (TwoOut, ROW, "pt2", "EXPORT_FAILED", "returns a tuple"),
        (NoOut, ROW, "pt2", "NOT_SPLITTABLE", "dim 1 has no elements"),
        (lambda: nn.Linear(5, 5), ROW, "pt2", "EXPORT_FAILED", "the model fails on"),
        (lambda: nn.Bilinear(4, 4, 2), ROW, "pt2", "NOT_SPLITTABLE", "2 inputs (input1, input2)"),
        (lambda: nn.Linear(4, 4), ROW, "onnx", "EXPORT_FAILED", "unknown format"),
    ],
)
def test_models_that_cannot_be_exported(
    repo: BlockRepository, module, spec: TensorSpec, format_: str, code: str, words: str
) -> None:
    error = refused(
        code, lambda: export_model(loaded(module(), spec), repo, prefix="m", format=format_)
    )
    assert words in error.message
    assert repo.names() == [], "nothing is stored unless all is well"


@pytest.mark.parametrize("name", ["../evil", "a/b", "", "1st", "a\n", "x" * 65])
def test_names_with_path_traversal(repo: BlockRepository, name: str) -> None:
    model = loaded(nn.Linear(4, 4))
    error = refused("EXPORT_FAILED", lambda: export_model(model, repo, names=[name]))
    assert "not a block name" in error.message
    assert not repo.root.exists() and not (repo.root.parent / "evil").exists()


def test_names_must_be_enough_and_unique(repo: BlockRepository) -> None:
    model = loaded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    for names, words in ((["a"], "1 names for 2"), (["a", "a"], "not unique")):
        error = refused(
            "EXPORT_FAILED", lambda n=names: export_model(model, repo, names=n, cuts=["1"])
        )
        assert words in error.message
    error = refused("NOT_SPLITTABLE", lambda: export_model(model, repo, cuts=["1"], parts=2))
    assert "not both" in error.message


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("no_such_module_:make", "no module 'no_such_module_'"),
        ("torch.nn:NoSuchThing", "has no 'NoSuchThing'"),
        ("torch:__version__", "not a function"),
        ("made_model:model", "is a Linear, not a function"),
        ("torch.nn:Linear", "raised TypeError"),
        ("builtins:dict", "returned a dict, not a torch.nn.Module (at builtins:dict) -- write a f"),
        ("broken_factory_module:make", "the import failed: ZeroDivisionError"),
        ("ending_factory_module:make", "the import failed: SystemExit"),
        ("dated_factory_module:make", "the import failed: AttributeError: module 'os' has no"),
        ("ending_factory:make", "the factory raised SystemExit"),
        (
            "lacking_factory:make",
            "No module named 'no_such_module_' (at lacking_factory:make) -- is it",
        ),
    ],
)
def test_factories_that_fail(
    factory: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_factory_module.py").write_text("1 / 0\n")
    (tmp_path / "ending_factory_module.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "dated_factory_module.py").write_text("import os\nos.getcwdu()\n")
    (tmp_path / "ending_factory.py").write_text("def make():\n    raise SystemExit(3)\n")
    (tmp_path / "lacking_factory.py").write_text("def make():\n    import no_such_module_\n")
    (tmp_path / "made_model.py").write_text("from torch import nn\nmodel = nn.Linear(4, 4)\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert words in str(refused("FACTORY_FAILED", lambda: build(factory, {}, 0)))


def test_models_that_are_not_named_right() -> None:
    assert "resnet50" in refused("FACTORY_FAILED", lambda: load_model("resnet51")).hint
    for named in ("mine.py:make", "./mine.py:make", "models/mine.py:make"):
        error = refused("FACTORY_FAILED", lambda ref=named: build(ref, {}, 0))
        assert "not its file: mine:make" in error.hint
    assert "Linear" in refused("FACTORY_FAILED", lambda: build("torch.nn:Liner", {}, 0)).hint
    error = refused("EXPORT_FAILED", lambda: load_model("torch.nn:Flatten"))
    assert "--input" in error.hint


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_weights_are_loaded(tmp_path: Path, suffix: str) -> None:
    source, target = nn.Linear(4, 3), nn.Linear(4, 3)
    file = tmp_path / f"w{suffix}"
    if suffix == ".safetensors":
        save_file(source.state_dict(), file)
    else:
        torch.save({"state_dict": source.state_dict()}, file)
    digest = load_weights(target, file)
    assert torch.equal(source.weight, target.weight) and len(digest) == 64


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"weight": torch.zeros(3, 4)}, "1 missing: bias"),
        ({"weight": torch.zeros(3, 4), "bias": torch.zeros(3), "x": torch.zeros(1)},
         "1 unexpected: x"),
        ({"weight": torch.zeros(4, 3), "bias": torch.zeros(3)}, "weight [4, 3] into [3, 4]"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(tmp_path: Path, state: dict, words: str) -> None:
    save_file(state, tmp_path / "w.safetensors")
    error = refused(
        "WEIGHTS_INVALID", lambda: load_weights(nn.Linear(4, 3), tmp_path / "w.safetensors")
    )
    assert words in error.message


class Tied(nn.Module):
    """An embedding whose table is also the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.last = nn.Linear(4, 5, bias=False)
        self.last.weight = self.table.weight


@pytest.mark.parametrize("given", [("table.weight",), ("last.weight",), None])
def test_weights_that_are_tied_may_be_given_once(
    tmp_path: Path, given: tuple[str, ...] | None
) -> None:
    source, target = Tied(), Tied()
    state = {k: v.clone() for k, v in source.state_dict().items() if given is None or k in given}
    save_file(state, tmp_path / "w.safetensors")
    load_weights(target, tmp_path / "w.safetensors")
    assert torch.equal(source.table.weight, target.last.weight)
    assert target.last.weight is target.table.weight


def test_tied_weights_that_differ_in_the_file(tmp_path: Path) -> None:
    state = {k: v + n for n, (k, v) in enumerate(Tied().state_dict().items())}
    save_file(state, tmp_path / "w.safetensors")
    error = refused("WEIGHTS_INVALID", lambda: load_weights(Tied(), tmp_path / "w.safetensors"))
    assert "last.weight with table.weight" in error.message


class Evil:
    def __reduce__(self) -> tuple:
        return os.system, ("touch evil-was-here",)


_SAID = {
    "saved.pt": ("it asks for posix.system", "never code"),
    "list.pt": ("it holds a list",),
    "number.pt": ("entry 'weight' is an int",),
    "unnamed.pt": ("the name of entry 7 is an int",),
    "missing.pt": ("the file cannot be read: FileNotFoundError",),
    "training.pt": ("a checkpoint of a training, with 'model_state_dict' in it",),
    "lightning.ckpt": ("what kind of file '.ckpt' is",),
}


def test_weights_files_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pickled.pt").write_bytes(pickle.dumps({"weight": Evil()}))
    torch.save({"weight": Evil()}, tmp_path / "saved.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"weight": 3}, tmp_path / "number.pt")
    torch.save({7: torch.zeros(1)}, tmp_path / "unnamed.pt")
    (tmp_path / "garbage.safetensors").write_bytes(b"\xff" * 100)
    (tmp_path / "weights.bin").write_bytes(b"")
    (tmp_path / "lightning.ckpt").write_bytes(b"")
    training = {"epoch": 3, "model_state_dict": nn.Linear(4, 3).state_dict(), "best": {"loss": 1.0}}
    torch.save(training, tmp_path / "training.pt")
    for file in [*tmp_path.iterdir(), tmp_path / "missing.pt"]:
        error = refused("WEIGHTS_INVALID", lambda f=file: load_weights(nn.Linear(4, 3), f))
        assert error.where == str(file)
        assert "weights_only" not in str(error), "advice that runs a stranger's code"
        for word in _SAID.get(file.name, ()):
            assert word in error.message
    assert not (tmp_path / "evil-was-here").exists()


def test_specs_as_text() -> None:
    assert parse_spec("float32[rows,3, 8]").dims == ("rows", 3, 8)
    assert parse_spec("int64[rows,length]", dict([parse_range("length=1..9")])).ranges == {
        "length": (1, 9)
    }
    for text in ("float32", "float32[]", "float32[3]", "f32[rows]", "float32[rows,-1]",
                 "float32[rows,a b]", "float32[rows,99999999999]"):  # fmt: skip
        with pytest.raises(ValueError):
            parse_spec(text)
    assert parse_spec("float32[rows,3]", {"rows": (1, 63)}).ranges == {"rows": (1, 63)}
    for rows in ((1, 4), (2, 63)):
        with pytest.raises(ValueError, match="ends with 8 at least"):
            parse_spec("float32[rows,3]", {"rows": rows})
    for text in ("length", "length=1", "length=a..b", "=1..2"):
        with pytest.raises(ValueError):
            parse_range(text)
