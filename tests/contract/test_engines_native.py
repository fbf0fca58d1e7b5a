"""Engines outside torch: memory is used where it lies, and given back."""

import json
import os
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from blockflow.core.engines import FIXED_ROWS
from blockflow.core.errors import BlockError
from blockflow.core.model import TensorSpec
from blockflow.engine.base import EngineOptions
from blockflow.launch.base import Launcher
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests import engine_rig
from tests.engine_rig import CASES, NATIVE, Stored, convolution, expected

pytestmark = pytest.mark.contract
threads = engine_rig.threads


@pytest.fixture(scope="module", params=NATIVE)
def native(request: pytest.FixtureRequest, shelf: BlockRepository) -> Stored:
    return convolution(shelf, CASES[request.param])


def test_the_frameworks_get_the_callers_memory(native: Stored) -> None:
    # OpenVINO's model for any number of rows writes elsewhere, until the result's dims are known
    options = {"openvino": {FIXED_ROWS: [2]}}.get(native.case.engine, {})
    made = native.load(native.create(EngineOptions(extra=options)))
    assert made.copies_out == 0
    x, out = torch.randn(2, 3, 8, 8), torch.empty(2, 3, 8, 8)
    made.run(x, out)
    where: dict[str, Callable[[Any], tuple[int, int]]] = {
        "openvino": lambda e: (
            e._fixed[2].get_input_tensor().data.ctypes.data,
            e._fixed[2].get_output_tensor().data.ctypes.data,
        ),
        "onnxruntime": lambda e: (x.data_ptr(), e._binding.get_outputs()[0].data_ptr()),
    }
    assert where[native.case.engine](made) == (x.data_ptr(), out.data_ptr())
    made.close()


def ends_well(launcher: Launcher, entry: str, spec: Mapping[str, Any], folder: Path) -> None:
    log = folder / "log"
    child = launcher.launch(f"tests.native_children:{entry}", {**spec, "log_path": str(log)}, "w#0")
    assert child.wait(100) == 0, log.read_text()
    child.close()


# --- copies inside -------------------------------------------------------------------------------


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x) * 2


class Ending(nn.Module):
    """As torchvision's trunks end: other dims for the same numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(torch.sigmoid(x) * 2, 1)


class Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.flatten(x, 1)


WIDE = TensorSpec("float32", ("rows", 4, 256, 64))
"""A quarter of a MiB a row."""


@pytest.fixture(scope="module")
def endings(shelf: BlockRepository) -> BlockRepository:
    for made in (Plain(), Ending(), Views()):
        loaded = partial(LoadedModel, made.eval(), "test", WIDE)
        CASES["openvino"].stored(shelf, type(made).__name__.lower(), loaded)
    return shelf


@pytest.mark.parametrize(
    ("engine", "options", "block", "copies"),
    [
        ("onnxruntime", {}, "plain", 0),
        ("onnxruntime", {}, "ending", 1),
        ("onnxruntime", {}, "views", 1),
        ("openvino", {}, "plain", 1),
        ("openvino", {FIXED_ROWS: [2, 3]}, "plain", 0),
        ("openvino", {FIXED_ROWS: [2, 3]}, "ending", 0),
        ("openvino", {FIXED_ROWS: [2, 3]}, "views", 1),
    ],
)
def test_copies_inside_are_counted(
    endings: BlockRepository, engine: str, options: dict[str, Any], block: str, copies: int
) -> None:
    pytest.importorskip(engine)
    stored = Stored(CASES[engine], endings, endings.info(f"{block}-pt2"))
    made = stored.load(stored.create(EngineOptions(extra=options)))
    made.warm_up(1)
    x = torch.randn(3, 4, 256, 64)
    right = x if block == "views" else torch.sigmoid(x) * 2
    for rows in (2, 3, 2):
        got = made.run(x[:rows])
        torch.testing.assert_close(got, right[:rows].reshape(got.shape), rtol=1e-4, atol=1e-5)
        assert made.copied.outputs == copies
    made.run(x[:1])
    # One row was not asked for: it runs in the model for any number.
    assert made.copied.outputs == (1 if engine == "openvino" else copies)
    made.close()


def test_openvinos_models_for_given_rows_have_their_constants_together(
    endings: BlockRepository, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openvino")
    open_vino = import_module("blockflow.engine.open_vino")
    core, read = open_vino.openvino_core(), []

    def read_model(path: str) -> Any:
        read.append(path)
        return core.read_model(path)

    double = SimpleNamespace(read_model=read_model, compile_model=core.compile_model)
    monkeypatch.setattr(open_vino, "openvino_core", lambda: double)
    stored = Stored(CASES["openvino"], endings, endings.info("plain-pt2"))
    stored.load(stored.create(EngineOptions(extra={FIXED_ROWS: [2, 3]}))).close()
    assert len(read) == 1


@pytest.mark.parametrize(("fixed", "copies"), [([], 1), ([128], 0)])
def test_openvino_keeps_a_result_of_its_own_where_a_copy_is_counted(
    endings: BlockRepository, launcher: Launcher, tmp_path: Path, fixed: list[int], copies: int
) -> None:
    """The count comes from what is known of OpenVINO: whether that is so shows in its memory."""
    pytest.importorskip("openvino")
    report = tmp_path / "report"
    spec = {
        "repository": str(endings.root),
        "block": "plain-pt2",
        "options": {FIXED_ROWS: fixed} if fixed else {},
        "dims": [128, 4, 256, 64],
        "report": str(report),
    }
    ends_well(launcher, "fills_a_slot", spec, tmp_path)
    counted, mib = json.loads(report.read_text())
    assert counted == copies
    assert (mib >= 28) == bool(copies), f"{mib} MiB for a result of 32 MiB"


class Deep(nn.Sequential):
    """Of many operators, each of which is prepared for each length."""

    def __init__(self) -> None:
        layers = [(nn.Conv1d(4 if not n else 32, 32, 3, padding=1), nn.GELU()) for n in range(8)]
        super().__init__(*(part for layer in layers for part in layer))


LENGTHS = TensorSpec("float32", ("rows", 4, "length"), {"length": (8, 1024)})


def test_new_dims_do_not_take_memory_without_end(
    shelf: BlockRepository, launcher: Launcher, tmp_path: Path
) -> None:
    """OpenVINO keeps what it has prepared for dims; by default that was 128 MiB more here."""
    pytest.importorskip("openvino")
    stored = CASES["openvino"].stored(shelf, "deep", partial(LoadedModel, Deep(), "t", LENGTHS))
    spec = {
        "repository": str(shelf.root),
        "block": stored.info.name,
        "longest": 700,
        "used_to": 200,
        "shortest": 100,
        "report": str(tmp_path / "report"),
    }
    ends_well(launcher, "meets_many_dims", spec, tmp_path)
    assert json.loads((tmp_path / "report").read_text()) < 50


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


def test_signals_are_survived_after_engines_have_gone_in_any_order(
    shelf: BlockRepository, launcher: Launcher, tmp_path: Path
) -> None:
    """OpenVINO gives threads a signal stack; what a signal is written to must still be there."""
    (name,) = {convolution(shelf, CASES[name]).info.name for name in NATIVE}
    spec = {"repository": str(shelf.root), "block": name, "engines": NATIVE}
    ends_well(launcher, "outlives_engines", spec, tmp_path)


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
    with native.repo.artifact(native.info.name, variant=made.variant) as path:
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

    def broken(x: Tensor, out: Tensor) -> int:
        raise RuntimeError("first line\nthe reason\n")

    made._compute = broken
    with pytest.raises(BlockError) as e:
        made.run(torch.zeros(1, 3, 8, 8))
    assert e.value.code == "BLOCK_FAILED" and "the reason" in e.value.message
    made._compute = good
    assert made.run(torch.zeros(1, 3, 8, 8)).shape == (1, 3, 8, 8)
    made.close()
