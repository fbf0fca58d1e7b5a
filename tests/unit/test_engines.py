"""Which engine runs which block: pure selection, and what a host adds to it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blockflow.control.engines import engine_check
from blockflow.core.engines import (
    ENGINES,
    TORCH_EXPORT,
    VARIANTS,
    loaders,
    misfits,
    own_engine,
    pins,
    select,
)
from blockflow.core.errors import BlockError, BlockFlowError, RepositoryError, SystemError_
from blockflow.core.model import BlockInfo, Contract, TensorSpec, Variant
from blockflow.core.specs import BlockSpec
from blockflow.engine import registry
from blockflow.engine.base import EngineOptions
from blockflow.engine.registry import CLASSES, create_engine, host_misfit
from blockflow.engine.torch_engine import TorchEngine
from blockflow.repository.echo import save_echo
from blockflow.repository.machine import fingerprint
from blockflow.repository.repository import BlockRepository

SPEC = TensorSpec("float32", ("rows", 2))
BARE = BlockInfo("b", "1", "0" * 64, "pt2", Contract(SPEC, SPEC), 0, 0)
ONNX = Variant("1.onnx", "1" * 64, 1)
INT8 = Variant("2.onnx-int8", "2" * 64, 1)
FULL = replace(
    BARE, variants={"onnx": ONNX, "onnx-int8": INT8, "aoti": Variant("3.aoti", "3" * 64, 1, "here")}
)
CHOICE = {"engine": "openvino", "precision": "int8", "options": {}, "ms": 1.0}


def test_the_tables_fit_together() -> None:
    assert set(CLASSES) == set(ENGINES)
    for kind in ENGINES.values():
        for files in kind.files.values():
            # one variant, or formats of reference artifacts
            assert len(files) == 1 or not set(files) & set(VARIANTS)
    assert own_engine("pt2") == "exported" and own_engine("onnx") is None


@pytest.mark.parametrize(
    ("engine", "precision", "expected"),
    [
        ("auto", "auto", ("exported", "fp32", None)),
        ("auto", "bf16", ("exported", "bf16", None)),
        ("exported", "fp16", ("exported", "fp16", None)),
        ("openvino", "auto", ("openvino", "fp32", "onnx")),
        ("openvino", "bf16", ("openvino", "bf16", "onnx")),
        ("onnxruntime", "int8", ("onnxruntime", "int8", "onnx-int8")),
        ("compiled", "fp32", ("compiled", "fp32", "aoti")),
    ],
)
def test_what_runs(engine: str, precision: str, expected: tuple[str, str, str | None]) -> None:
    chosen = select(FULL, engine, precision, machine="here")
    assert (chosen.engine, chosen.precision, chosen.variant) == expected


@pytest.mark.parametrize("rows", [8, [], [0], [1.0], [True], ["8"], [1] * 17, [70_000], None, {}])
def test_fixed_rows_are_numbers_of_rows(rows: Any) -> None:
    select(FULL, "openvino", options={"rows": [1, 8, 65_536]})
    (problem,) = misfits(FULL, "openvino", options={"rows": rows})
    assert problem.code == "UNSUPPORTED_ENGINE" and "numbers of rows" in problem.message
    assert problem.details["field"] == "options.rows"
    (problem,) = misfits(FULL, "onnxruntime", options={"rows": [1]})
    assert "unknown option" in problem.message


def test_fixed_rows_need_all_other_dims_fixed() -> None:
    long = TensorSpec("float32", ("rows", "length", 2), {"length": (1, 9)})
    block = replace(FULL, contract=Contract(long, long))
    (problem,) = misfits(block, "openvino", options={"rows": [1]})
    assert "length" in problem.hint


def test_auto_is_this_machines_choice() -> None:
    block = replace(FULL, choices={"here": CHOICE | {"options": {}}})
    assert select(block, machine="here").variant == "onnx-int8"
    assert select(block, precision="int8", machine="here").engine == "openvino"
    # not for this precision, not here, and not where nobody says where it is
    assert select(block, precision="fp32", machine="here").engine == "exported"
    assert select(block, machine="there").engine == "exported"
    assert select(block).engine == "exported"
    assert select(block, device="cuda:0", machine="here").engine == "exported"


def refusing(*engines: str, kind: str = "onnx-int8") -> BlockInfo:
    """``FULL``, of which these engines may not run one variant."""
    why = dict.fromkeys(engines, "differs by 0.5 on [8, 2], allowed is 0.1")
    form = replace(FULL.variants[kind], refused=why)
    return replace(FULL, variants={**FULL.variants, kind: form})


def test_a_refused_engine_runs_nothing() -> None:
    block = refusing("openvino")
    (problem,) = misfits(block, "openvino", "int8")
    assert problem.code == "UNSUPPORTED_ENGINE" and problem.details["field"] == "engine"
    assert "differs by 0.5 on [8, 2], allowed is 0.1" in problem.message
    assert problem.hint.startswith("use onnxruntime or auto")
    assert problem.details["command"] == "blockflow convert b@1 --to onnx-int8"
    assert misfits(block, "onnxruntime", "int8") == misfits(block, "openvino") == []
    # of one file at several precisions all
    assert misfits(refusing("openvino", kind="onnx"), "openvino", "bf16")


def test_auto_is_no_engine_that_is_refused() -> None:
    block = replace(refusing("openvino"), choices={"here": CHOICE})
    assert select(block, machine="here").engine == "exported"
    assert select(block, precision="int8", machine="there", engine="onnxruntime").variant
    block = replace(refusing("onnxruntime"), choices={"here": CHOICE})
    assert select(block, machine="here").engine == "openvino"
    # a worker with the engine that was not refused before is another
    assert pins(block, "onnxruntime") != pins(FULL, "onnxruntime")
    assert pins(block, "compiled") == pins(FULL, "compiled")


def test_loaders_are_all_that_may_come_to_load_a_block() -> None:
    assert loaders(BARE) == {"exported"}
    assert loaders(BARE, "auto", "cuda:0") == {"exported", TORCH_EXPORT}
    assert loaders(BARE, "openvino", "cuda:0") == {"openvino"}
    assert loaders(replace(FULL, choices={"here": CHOICE})) == {"exported", "openvino"}
    assert loaders(replace(BARE, format="nonsense")) == set()


def test_given_options_go_over_the_choices() -> None:
    chosen = {"engine": "exported", "precision": "bf16", "options": {"memory_format": "contiguous"}}
    block = replace(BARE, choices={"here": chosen})
    assert select(block, machine="here").options == {"memory_format": "contiguous"}
    own = select(block, options={"memory_format": "channels_last"}, machine="here")
    assert own.precision == "bf16" and own.options == {"memory_format": "channels_last"}


@pytest.mark.parametrize(
    ("asked", "code", "field", "says"),
    [
        ({"engine": "openvin"}, "UNSUPPORTED_ENGINE", "engine", "openvino"),
        ({"engine": "torchscript"}, "UNSUPPORTED_ENGINE", "engine", "torchscript-scripted"),
        ({"engine": "onnxruntime", "precision": "bf16"}, "UNSUPPORTED_ENGINE", "precision", "int8"),
        ({"engine": "openvino", "device": "cuda:0"}, "UNSUPPORTED_ENGINE", "device", "cpu"),
        ({"options": {"cuda_graf": True}}, "UNSUPPORTED_ENGINE", "options.cuda_graf", "cuda_graph"),
        ({"options": {"cuda_graph": 1}}, "UNSUPPORTED_ENGINE", "options.cuda_graph", "True"),
        ({"options": {"compile": True}}, "UNSUPPORTED_ENGINE", "options.compile", "compiled"),
        ({"engine": "onnxruntime"}, "ARTIFACT_MISSING", "engine", "convert b@1 --to onnx"),
        ({"engine": "compiled"}, "ARTIFACT_MISSING", "engine", "convert b@1 --to aoti"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(asked: dict[str, Any], code: str, field: str, says: str) -> None:
    found = misfits(BARE, **asked)[0]
    assert (found.code, found.details["field"]) == (code, field)
    assert says in found.hint
    with pytest.raises(BlockFlowError) as e:
        select(BARE, **asked)
    assert e.value.to_dict() == found.to_dict()


def test_all_findings_come_at_once() -> None:
    found = misfits(BARE, "openvino", "int3", {"a": 1, "b": 2}, device="cuda:0")
    fields = [e.details["field"] for e in found]
    assert fields == ["device", "options.a", "options.b", "precision"]


def test_machine_code_stays_on_its_machine() -> None:
    with pytest.raises(RepositoryError) as e:
        select(FULL, "compiled", machine="there")
    assert "compiled on machine here, this is there" in e.value.message


def test_cuda_options_on_cuda() -> None:
    options = {"cuda_graph": True, "compile": True}
    assert select(BARE, options=options, device="cuda:0").options == options
    assert select(BARE, options={"cuda_graph": False}).engine == "exported"


def test_what_a_worker_would_run_decides_about_its_replacement() -> None:
    other = {**FULL.variants, "onnx": replace(ONNX, digest="9" * 64)}
    changed = replace(FULL, variants=other)
    assert pins(FULL, "openvino") != pins(changed, "openvino")
    assert pins(FULL, "exported") == pins(changed, "exported") == pins(BARE, "exported")
    assert pins(FULL, "auto") == pins(BARE, "auto")
    chosen = replace(FULL, choices={"here": CHOICE})
    assert pins(chosen, "auto") != pins(FULL, "auto")
    assert pins(chosen, "exported") == pins(FULL, "exported")


def test_block_facts_travel() -> None:
    block = replace(FULL, choices={"here": CHOICE})
    assert BlockInfo.from_dict(block.to_dict()) == block


# --- the host ------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_missing_extra_is_named(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, engine, None)  # as if it were not installed
    with pytest.raises(SystemError_) as e:
        create_engine(FULL, EngineOptions(), engine)
    assert e.value.code == "MISSING_EXTRA"
    assert e.value.hint == f"pip install 'blockflow[{engine}]'"
    found = host_misfit(FULL, select(FULL, engine))
    assert found is not None and found.code == "MISSING_EXTRA"


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
    assert engine.path == "$.blocks[0].engine" and "ARTIFACT_MISSING" in engine.message


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
