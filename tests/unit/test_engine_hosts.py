"""Engines on this host and in a system update: what is installed here, and who is refused."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from blockflow.control.engines import engine_check, lost_artifact
from blockflow.core.engines import misfits, select
from blockflow.core.errors import BlockError, SystemError_
from blockflow.core.specs import BlockSpec
from blockflow.engine import registry
from blockflow.engine.base import EngineOptions
from blockflow.engine.extras import how_to_install
from blockflow.engine.registry import create_engine, host_misfit
from blockflow.engine.torch_engine import TorchEngine
from blockflow.repository.echo import save_echo
from blockflow.repository.machine import fingerprint
from blockflow.repository.repository import BlockRepository
from tests.unit.test_engines import BARE, FULL, SPEC


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_missing_extra_is_named(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, engine, None)  # as if it were not installed
    with pytest.raises(SystemError_) as e:
        create_engine(FULL, EngineOptions(), engine)
    assert e.value.code == "MISSING_EXTRA"
    assert e.value.hint == how_to_install(engine)
    found = host_misfit(FULL, select(FULL, engine))
    assert found is not None and found.code == "MISSING_EXTRA"
    check = engine_check(BlockRepository(tmp_path), {FULL.digest})
    (problem,) = check(BlockSpec(name="b", engine=engine), FULL, "$.blocks[0]")
    assert (problem.path, problem.code) == ("$.blocks[0].engine", "MISSING_EXTRA")


@pytest.mark.parametrize(
    ("said", "code"), [("", "MISSING_EXTRA"), ("x.so: cannot allocate memory", "NO_SPACE")]
)
def test_an_extra_that_cannot_be_imported_is_named(
    said: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime for an older numpy, say, whose ImportError has no text."""

    def fails(_module: str) -> None:
        raise ImportError(said)

    monkeypatch.setattr(registry, "installed", lambda _package: True)
    monkeypatch.setattr(registry, "import_module", fails)
    with pytest.raises(SystemError_) as e:
        create_engine(FULL, EngineOptions(), "onnxruntime")
    assert e.value.code == code and e.value.where == FULL.name
    with pytest.raises(ImportError):  # a defect: it needs no extra
        create_engine(FULL, EngineOptions(), "exported")


def test_a_precision_that_the_cpu_lacks_is_not_silently_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def lacks(precision: str) -> bool:
        asked.append(precision)
        return precision == "bf16"

    monkeypatch.setattr(registry, "openvino_lacks", lacks)
    monkeypatch.setattr(registry, "installed", lambda _package: True)
    found = host_misfit(FULL, select(FULL, "openvino", "bf16"))
    assert isinstance(found, BlockError) and found.code == "UNSUPPORTED_ENGINE"
    assert found.details["field"] == "precision" and "bf16" in found.message
    assert host_misfit(FULL, select(FULL, "openvino", "fp32")) is None
    assert host_misfit(FULL, select(FULL, "onnxruntime")) is None
    assert asked == ["bf16", "fp32"]


def test_openvino_itself_refuses_what_the_cpu_lacks(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    from blockflow.engine.frameworks import openvino_lacks

    class Core:
        def get_property(self, _device: str, _name: str) -> list[str]:
            return ["FP32", "INT8", "BF16"]

    assert openvino_lacks("fp16", Core()) and not openvino_lacks("bf16", Core())
    assert not openvino_lacks("int8", Core())
    for precision in ("bf16", "fp16"):
        if openvino_lacks(precision):
            made = create_engine(FULL, EngineOptions(precision=precision), "openvino")
            file = tmp_path / "model"
            file.write_bytes(b"")
            with pytest.raises(BlockError) as e:
                made.load(file)
            assert e.value.code == "UNSUPPORTED_ENGINE"


SILENT = """
import os, sys
from blockflow.engine import frameworks
loaded = getattr(frameworks, sys.argv[1])()
assert len(os.listdir("/proc/self/task")) == 1, "a thread was started"
assert "openvino_telemetry" not in sys.modules
assert "openvino.tools" not in sys.modules  # who wants them may import them later
print(os.environ.get("ORT_DISABLE_TELEMETRY"))
"""


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_frameworks_are_imported_without_their_telemetry(engine: str) -> None:
    pytest.importorskip(engine)
    out = subprocess.run(
        [sys.executable, "-c", SILENT, engine],
        env={"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == ("1" if engine == "onnxruntime" else "None")


# --- a system update -----------------------------------------------------------------------------


def test_an_update_is_told_all_with_paths(tmp_path: Path) -> None:
    repository = BlockRepository(tmp_path)
    info = save_echo(repository, "e", SPEC)
    check = engine_check(repository, set())
    assert list(check(BlockSpec(name="e"), info, "$.blocks[0]")) == []
    spec = BlockSpec(name="e", device="cuda:1", precision="bf16", options={"delay": 1})
    found = {p.path: p for p in check(spec, info, "$.blocks[3]")}
    assert set(found) == {
        "$.blocks[3].device",
        "$.blocks[3].precision",
        "$.blocks[3].options.delay",
    }
    assert "delay_ms" in found["$.blocks[3].options.delay"].hint
    (engine,) = check(BlockSpec(name="e", engine="openvino"), info, "$.blocks[0]")
    assert engine.path == "$.blocks[0].engine" and "UNSUPPORTED_ENGINE" in engine.message


def test_an_altered_variant_is_found_before_a_worker_starts(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from tests.unit.test_repository_variants import form, save_block

    repository = BlockRepository(tmp_path)
    info = save_block(repository, "b")
    info = repository.save_variant("b", "onnx", form(), b"an onnx file", digest=info.digest)
    spec = BlockSpec(name="b", engine="onnxruntime")
    check = engine_check(repository, set())
    assert list(check(spec, info, "$.blocks[0]")) == []
    (tmp_path / "b" / info.variants["onnx"].file).write_bytes(b"another file")
    (problem,) = check(spec, info, "$.blocks[0]")
    assert problem.path == "$.blocks[0].engine" and "DIGEST_MISMATCH" in problem.message
    # what a live worker runs has been seen
    assert list(engine_check(repository, {info.digest})(spec, info, "$.blocks[0]")) == []
    assert lost_artifact(repository, spec, info) == ""
    (tmp_path / "b" / info.variants["onnx"].file).unlink()
    lost = lost_artifact(repository, spec, info)
    assert lost.startswith("block b: a worker that ends cannot be replaced: ") and " -- " in lost
    assert lost_artifact(repository, BlockSpec(name="b"), info) == ""


def test_an_update_with_a_refused_engine_is_refused(tmp_path: Path) -> None:
    from tests.unit.test_repository_variants import form, refused, save_block

    repository = BlockRepository(tmp_path)
    info = save_block(repository, "b")
    made = refused(openvino="differs by 0.5 on [8, 2], allowed is 0.0001")
    info = repository.save_variant("b", "onnx", made, b"an onnx file", digest=info.digest)
    check = engine_check(repository, set())
    (problem,) = check(BlockSpec(name="b", engine="openvino"), info, "$.blocks[0]")
    assert problem.path == "$.blocks[0].engine" and "UNSUPPORTED_ENGINE" in problem.message
    assert "differs by 0.5" in problem.message and "--to onnx" in problem.hint
    # the same file with another verdict, or none, as files of before have
    info = repository.save_variant("b", "onnx", form(), b"an onnx file", digest=info.digest)
    assert misfits(info, "openvino") == []


def test_machine_code_of_another_machine_is_refused(tmp_path: Path) -> None:
    from tests.unit.test_repository_variants import form, save_block

    repository = BlockRepository(tmp_path)
    info = save_block(repository, "b")
    made = form(machine="elsewhere")
    info = repository.save_variant("b", "aoti", made, b"machine code", digest=info.digest)
    (problem,) = engine_check(repository, set())(
        BlockSpec(name="b", engine="compiled"), info, "$.blocks[0]"
    )
    assert "elsewhere" in problem.message and fingerprint() in problem.message


def test_frameworks_are_imported_in_one_place_only() -> None:
    """Whoever imports them directly turns their telemetry on."""
    package = Path(__file__).parents[2] / "blockflow"
    found = set()
    for file in package.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "onnxruntime" not in text and "openvino" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(n.partition(".")[0] in ("onnxruntime", "openvino") for n in names):
                found.add(file.name)
    # the workshop's imports follow a call of frameworks.onnxruntime()
    assert found <= {"workshop.py"}


@pytest.fixture
def float_settings() -> Iterator[None]:
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = True
    yield
    cudnn.allow_tf32, matmul.allow_tf32 = before


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_fp32_is_no_tf32_on_a_gpu(float_settings: None, tmp_path: Path, device: str) -> None:
    class Loaded(TorchEngine):
        def _load_module(self, artifact: Path) -> nn.Module:
            return nn.Identity()

    Loaded(BARE, EngineOptions(device=device)).load(tmp_path)
    allowed = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    assert allowed == ((True, True) if device == "cpu" else (False, False))
    assert torch.get_float32_matmul_precision() == ("high" if device == "cpu" else "highest")
