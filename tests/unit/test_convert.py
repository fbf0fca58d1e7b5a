"""Conversion: what is checked before a variant is stored. The workshop is a stand-in."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from blockflow.cli.main import main
from blockflow.core.engines import select
from blockflow.core.errors import BlockError, BlockFlowError, ExportError, RepositoryError
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from blockflow.engine.workshop import EngineWorkshop
from blockflow.repository.convert import convert_block
from blockflow.repository.export import export_model
from blockflow.repository.machine import fingerprint
from blockflow.repository.manifest import PaddingForm, contract_form
from blockflow.repository.repository import BlockRepository
from blockflow.repository.samples import Samples, load_samples, seeded_samples
from blockflow.repository.sources import LoadedModel
from tests.padding_rig import LENGTH, VECTORS
from tests.unit.test_repository_variants import SPEC, save_block
from tests.variants import read_torchlib_once

Run = Callable[[Tensor], Tensor]


class Bench:
    """Makes files of a few bytes; the reference doubles, the variant does what it is told."""

    def __init__(self, **engines: Run) -> None:
        self._engines = engines or {"one": lambda x: x * 2}
        self.samples: list[Tensor] = []
        self.seen: list[tuple[int, ...]] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self.reference: Run = lambda x: x * 2

    def make(
        self, kind: str, block: BlockInfo, source: Path, samples: Sequence[Tensor], target: Path
    ) -> None:
        assert source.read_bytes() == b"reference"
        self.samples = list(samples)
        target.write_bytes(f"{kind} of {block.name}".encode())
        self.meanwhile()

    @contextmanager
    def runners(
        self, kind: str | None, block: BlockInfo, file: Path
    ) -> Iterator[Mapping[str, Run]]:
        def reference(x: Tensor) -> Tensor:
            self.seen.append(tuple(x.shape))
            return self.reference(x)

        assert file.exists()
        yield {"reference": reference} if kind is None else self._engines


@pytest.fixture
def repository(tmp_path: Path) -> BlockRepository:
    made = BlockRepository(tmp_path / "blocks")
    save_block(made, "b")
    return made


def test_a_variant_is_verified_and_stored(repository: BlockRepository) -> None:
    bench = Bench(one=lambda x: x * 2, two=lambda x: x * 2.0001)
    report = convert_block(repository, "b", "onnx", bench)
    assert bench.seen == [(1, 2), (3, 2), (8, 2)] and bench.samples == []
    assert report.errors["one"] == 0 and 0 < report.errors["two"] < 1e-4
    assert (report.calibration, report.warning, report.tolerance) == ("", "", 1e-4)
    with repository.artifact("b", digest=report.digest, variant="onnx") as path:
        assert path.read_bytes() == b"onnx of b"
    stored = repository.manifest("b").variants["onnx"]
    assert stored.error == report.errors["two"] and stored.machine == "" and stored.tools


def test_machine_code_is_bound_to_this_machine(repository: BlockRepository) -> None:
    convert_block(repository, "b", "aoti", Bench())
    assert repository.info("b").variants["aoti"].machine == fingerprint()


def _fails(x: Tensor) -> Tensor:
    raise BlockError("BLOCK_FAILED", "a kernel is missing")


UNFIT = [
    (lambda x: x * 2.01, "differs by 0.005"),
    (lambda x: x * float("nan"), "differs by nan"),
    (lambda x: x * 2 if len(x) < 8 else x, "on [8, 2]"),
    (_fails, "fails on [1, 2]: a kernel is missing"),
]


@pytest.mark.parametrize(("run", "says"), UNFIT)
def test_an_engine_that_differs_is_refused_and_the_others_are_not(
    repository: BlockRepository, run: Run, says: str
) -> None:
    bench = Bench(onnxruntime=lambda x: x * 2, openvino=run)
    report = convert_block(repository, "b", "onnx", bench)
    assert set(report.errors) == {"onnxruntime"} and set(report.refused) == {"openvino"}
    form = repository.manifest("b").variants["onnx"]
    assert form.error == 0 and form.engines["onnxruntime"].refused == ""
    assert says in form.engines["openvino"].refused
    assert (form.engines["openvino"].error is None) == ("nan" in says or "fails" in says)
    info = repository.info("b")
    assert select(info, "onnxruntime").variant == "onnx"
    with pytest.raises(BlockError, match=re.escape(says)) as e:
        select(info, "openvino", "bf16")  # from the same file
    assert e.value.code == "UNSUPPORTED_ENGINE"


@pytest.mark.parametrize(("run", "says"), UNFIT)
def test_what_no_engine_may_run_is_not_stored(
    repository: BlockRepository, run: Run, says: str
) -> None:
    before = repository.manifest("b")
    with pytest.raises(ExportError) as e:
        convert_block(repository, "b", "onnx", Bench(bad=run, worse=_unloadable))
    assert e.value.code == "EXPORT_MISMATCH" and says in e.value.message
    assert ("--tolerance" in e.value.hint) == ("0.005" in says or "on [8" in says)
    assert "stay with engine 'exported'" in e.value.hint
    assert "bad" in e.value.message and "worse cannot load it" in e.value.message
    assert repository.manifest("b") == before
    assert len(list((repository.root / "b").iterdir())) == 2


def _unloadable(x: Tensor) -> Tensor:
    raise BlockError("LOAD_FAILED", "no kernel for this dtype")


def test_an_engine_that_cannot_load_it_is_told(repository: BlockRepository) -> None:
    report = convert_block(repository, "b", "onnx", Bench(a=_unloadable, b=lambda x: x * 2))
    assert report.refused == {"a": "cannot load it: no kernel for this dtype"}
    assert set(report.errors) == {"b"}
    with pytest.raises(ExportError) as e:
        convert_block(repository, "b", "onnx-int8", Bench(a=_unloadable))
    assert e.value.code == "EXPORT_FAILED" and "no kernel for this dtype" in e.value.message
    assert set(repository.info("b").variants) == {"onnx"}


def _masked_mean(x: Tensor) -> Tensor:
    """Rows of padding alone (zeros) give zeros."""
    real = (x != 0).any(-1, keepdim=True)
    return (x * real).sum(1) / real.sum(1).clamp(min=1)


def test_what_an_engine_makes_of_padding_alone_is_told(repository: BlockRepository) -> None:
    contract = contract_form(Contract(VECTORS, TensorSpec("float32", ("rows", 2))))
    promise = PaddingForm(dim=LENGTH.dim, value=LENGTH.value, error=0, tolerance=1e-4)
    update = {"name": "p", "contract": contract, "padding": promise}
    repository.save(repository.manifest("b").model_copy(update=update), b"reference")

    def divides(x: Tensor) -> Tensor:
        return x.sum(1) / (x != 0).any(-1, keepdim=True).sum(1)

    bench = Bench(one=_masked_mean, two=divides)
    bench.reference = _masked_mean
    report = convert_block(repository, "p", "onnx", bench)
    assert set(report.errors) == {"one", "two"}, "no length's promise is broken"
    assert "nothing but padding two makes another result: it differs by nan" in report.warning
    bench.reference = divides  # whose own result is no number
    assert convert_block(repository, "p", "onnx", bench).warning == ""


def test_the_tolerance_can_be_given(repository: BlockRepository) -> None:
    report = convert_block(repository, "b", "onnx", Bench(a=lambda x: x * 2.01), tolerance=0.1)
    assert report.tolerance == 0.1 and repository.manifest("b").variants["onnx"].tolerance == 0.1


def test_int8_is_calibrated(repository: BlockRepository) -> None:
    bench = Bench()
    report = convert_block(repository, "b", "onnx-int8", bench)
    assert len(bench.samples) >= 8 and "random" in report.warning
    assert "seeded" in report.calibration
    given = Samples([torch.ones(2, 2), torch.ones(5, 2)], "2 inputs from x", False)
    report = convert_block(repository, "b", "onnx-int8", bench, samples=given)
    assert bench.samples == given.inputs and report.warning == ""
    assert repository.manifest("b").variants["onnx-int8"].calibration == "2 inputs from x"
    assert (5, 2) in bench.seen  # what it was calibrated on is compared, too


def test_a_block_that_is_replaced_meanwhile(repository: BlockRepository) -> None:
    bench = Bench()
    bench.meanwhile = lambda: save_block(repository, "b", b"another model")
    with pytest.raises(RepositoryError) as e:
        convert_block(repository, "b", "onnx", bench)
    assert e.value.code == "DIGEST_MISMATCH" and not repository.info("b").variants


def test_an_unknown_kind_or_block(repository: BlockRepository) -> None:
    with pytest.raises(ExportError) as e:
        convert_block(repository, "b", "tflite", Bench())
    assert "onnx" in e.value.hint
    with pytest.raises(RepositoryError):
        convert_block(repository, "c", "onnx", Bench())


@pytest.mark.parametrize(
    ("dtype", "run"),
    [
        ("int64", lambda x: (x.float() * 2.001).long()),
        ("int64", lambda x: x.abs() * 2),
        ("uint8", lambda x: (x.int() * 2).clamp(max=255).to(torch.uint8)),
        ("int8", lambda x: (x.int() * 2).clamp(-128, 127).to(torch.int8)),
    ],
)
def test_integers_are_compared_far_from_zero(
    repository: BlockRepository, dtype: str, run: Run
) -> None:
    save_block(repository, "ints", spec=TensorSpec(dtype, ("rows", 16)))
    with pytest.raises(ExportError, match="differs by"):
        convert_block(repository, "ints", "onnx", Bench(narrow=run))
    convert_block(repository, "ints", "onnx", Bench())


def test_a_block_that_takes_small_integers_only(repository: BlockRepository) -> None:
    class Table(Bench):
        @contextmanager
        def runners(
            self, kind: str | None, block: BlockInfo, file: Path
        ) -> Iterator[Mapping[str, Run]]:
            yield {"any": self.looked_up}

        def looked_up(self, x: Tensor) -> Tensor:
            if int(x.max()) > 9:
                raise BlockError("BLOCK_FAILED", "index out of range")
            return x * 2

    save_block(repository, "tokens", spec=TensorSpec("int64", ("rows", 16)))
    report = convert_block(repository, "tokens", "onnx", Table())
    assert report.checked == ("1x16", "3x16", "8x16")


# --- samples -------------------------------------------------------------------------------------


def test_samples_from_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones((2, 2), np.float32))
    save_file({"x": torch.zeros(3, 2), "y": torch.zeros(1, 2)}, tmp_path / "b.safetensors")
    (tmp_path / "notes.txt").write_text("not a sample")
    found = load_samples(tmp_path, SPEC)
    assert [tuple(x.shape) for x in found.inputs] == [(2, 2), (3, 2), (1, 2)]
    assert not found.seeded and found.origin.startswith("3 inputs")
    assert len(load_samples(tmp_path / "a.npy", SPEC).inputs) == 1


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("wrong-dims.npy", np.ones((2, 3), np.float32)),
        ("wrong-type.npy", np.ones((2, 2), np.float64)),
        ("objects.npy", np.array([{}], dtype=object)),
        ("text.txt", None),
        ("empty.npy", b""),
        ("damaged.npy", b"PK\x03\x04 an archive that ends here"),
    ],
)
def test_samples_that_cannot_be_used(tmp_path: Path, name: str, array: object) -> None:
    file = tmp_path / name
    if array is None or isinstance(array, bytes):
        file.write_bytes(array or b"x")
    else:
        np.save(file, array, allow_pickle=True)
    with pytest.raises(ExportError) as e:
        load_samples(file, SPEC)
    assert e.value.code == "EXPORT_FAILED" and name in e.value.where
    with pytest.raises(ExportError):
        load_samples(tmp_path / "not-there.npy", SPEC)


def test_half_precision_is_allowed_what_it_needs(tmp_path: Path) -> None:
    repository = BlockRepository(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).half().eval()
    spec = TensorSpec("float16", ("rows", 64))
    export_model(LoadedModel(model, "half", spec), repository, names=["half"])
    read_torchlib_once()
    report = convert_block(repository, "half", "onnx", EngineWorkshop())
    assert report.tolerance == 1e-2
    strict = convert_block(repository, "half", "onnx", EngineWorkshop(), tolerance=0.5)
    assert strict.tolerance == 0.5


def test_an_empty_folder_has_no_samples(tmp_path: Path) -> None:
    with pytest.raises(ExportError):
        load_samples(tmp_path, SPEC)


def test_seeded_samples_are_the_same_every_time() -> None:
    spec = TensorSpec("int64", ("rows", "length"), {"length": (1, 32)})
    one, two = seeded_samples(spec), seeded_samples(spec)
    assert one.seeded and len(one.inputs) >= 8
    assert all(torch.equal(a, b) for a, b in zip(one.inputs, two.inputs, strict=True))
    assert {1, 32} <= {x.shape[1] for x in one.inputs}


# --- the workshop and the command ----------------------------------------------------------------


def test_only_exported_programs_are_converted(repository: BlockRepository, tmp_path: Path) -> None:
    data = repository.info("b").to_dict() | {"format": "torchscript-traced"}
    with pytest.raises(ExportError) as e:
        EngineWorkshop().make("onnx", BlockInfo.from_dict(data), tmp_path, (), tmp_path / "x")
    assert "pt2" in e.value.hint


def test_no_compiler_is_said_so(
    repository: BlockRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ExportError) as e:
        EngineWorkshop().make("aoti", repository.info("b"), tmp_path, (), tmp_path / "x")
    assert "no-such-compiler" in e.value.message and "g++" in e.value.hint
    assert e.value.where == "b"


def test_a_path_that_torch_cannot_compile_from_is_said_so(
    repository: BlockRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__file__", "/my models/torch/__init__.py")
    monkeypatch.setenv("CXX", sys.executable)  # it is not called
    with pytest.raises(ExportError) as e:
        EngineWorkshop().make("aoti", repository.info("b"), tmp_path, (), tmp_path / "x")
    assert "/my models/" in e.value.message and "onnx" in e.value.hint
    assert e.value.where == "b"


@pytest.mark.parametrize("absent", ["onnxscript", "of_another_version", "cannot allocate memory"])
def test_a_missing_exporter_is_named(
    absent: str, repository: BlockRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    monkeypatch.setattr("blockflow.engine.workshop._read", lambda _: import_module(absent))
    with pytest.raises(BlockFlowError) as e:
        EngineWorkshop().make("onnx", repository.info("b"), tmp_path, (), tmp_path / "x")
    assert (e.value.code == "MISSING_EXTRA") is ("pip" in e.value.hint) is (" " not in absent)


def test_what_cannot_be_read_is_the_exports_error(
    repository: BlockRepository, tmp_path: Path
) -> None:
    pytest.importorskip("onnxscript")
    file = tmp_path / "artifact"
    file.write_bytes(b"not a program")
    with pytest.raises(ExportError) as e:
        EngineWorkshop().make("onnx", repository.info("b"), file, (), tmp_path / "x")
    assert e.value.code == "EXPORT_FAILED"


def test_the_cause_is_told_and_what_helps(tmp_path: Path) -> None:
    """The exporter's message begins with advice to its developers, in colours."""
    pytest.importorskip("onnxscript")

    class Bessel(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i1(x)

    repository = BlockRepository(tmp_path)
    model = LoadedModel(Bessel().eval(), "t", TensorSpec("float32", ("rows", 4)))
    export_model(model, repository, prefix="b")
    with pytest.raises(ExportError) as e:
        convert_block(repository, "b", "onnx", EngineWorkshop())
    assert "No ONNX function found for prims.bessel_i1" in e.value.message
    assert "\x1b" not in e.value.message
    assert "--to aoti" in e.value.hint and "'exported'" in e.value.hint


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    read_torchlib_once()
    blocks = str(tmp_path / "blocks")
    factory = tmp_path / "small.py"
    factory.write_text("from torch import nn\ndef make():\n    return nn.Linear(2, 3)\n")
    sys.path.insert(0, str(tmp_path))
    try:
        export = ["export", "small:make", "--input", "float32[rows,2]", "-r", blocks, "--json"]
        assert main([*export, "--prefix", "s", "--variants", "onnx"]) == 0
    finally:
        sys.path.remove(str(tmp_path))
    (made,) = json.loads(capsys.readouterr().out)["variants"]
    assert made["variant"] == "onnx" and max(made["errors"].values()) < 1e-4
    np.save(tmp_path / "x.npy", np.ones((4, 2), np.float32))
    calibrate = ["--calibrate", str(tmp_path / "x.npy"), "--tolerance", "0.5"]
    assert main(["convert", "s", "--to", "onnx-int8", "-r", blocks, *calibrate, "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)["variants"]
    assert made["calibration"] == "1 inputs from x.npy" and made["warning"] == ""
    assert set(BlockRepository(blocks).info("s").variants) == {"onnx", "onnx-int8"}
    assert main(["convert", "s", "--to", "tflite", "-r", blocks]) == 2
    assert main(["convert", "t", "--to", "onnx", "-r", blocks]) == 2
