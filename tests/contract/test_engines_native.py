"""Engines outside torch: memory is used where it lies, and given back."""

import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from blockflow.core.errors import BlockError
from blockflow.engine.base import EngineOptions
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests import engine_rig
from tests.engine_rig import CASES, NATIVE, SPEC, Stored, expected, model

pytestmark = pytest.mark.contract
threads = engine_rig.threads


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


def test_signals_are_survived_after_engines_have_gone_in_any_order() -> None:
    """OpenVINO gives threads a signal stack; what a signal is written to must still be there."""
    code = """
import faulthandler, signal, sys
from pathlib import Path
faulthandler.enable()  # it has a signal stack, too
from tests.engine_rig import CASES, SPEC, Stored, model
from blockflow.engine.base import EngineOptions
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
repo = BlockRepository(Path(sys.argv[1]))
for name in sys.argv[2:]:
    case = CASES[name]
    stored = Stored(case, repo, case.store(repo, LoadedModel(model(), "test", SPEC), name))
    engines = [stored.load(stored.create()) for _ in range(3)]
    for engine in engines:
        engine.close()
del engine, engines
heard = []
signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
signal.raise_signal(signal.SIGTERM)
assert heard == [signal.SIGTERM]
"""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", code, folder, *NATIVE],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert done.returncode == 0, done.stderr


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


def test_a_native_engine_holds_no_memory_of_its_callers(native: Stored) -> None:
    """A dead peer's mapping must be free to go, also while no further request comes."""
    made = native.load(native.create())
    x, out = np.zeros((1, 3, 8, 8), np.float32), np.zeros((1, 3, 8, 8), np.float32)
    alive = weakref.ref(x), weakref.ref(out)
    made.run(torch.from_numpy(x), torch.from_numpy(out))
    del x, out
    assert [a() for a in alive] == [None, None]
    made.close()
