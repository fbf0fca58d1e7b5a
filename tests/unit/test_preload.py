"""What templates import: at their start, and for the launches that name more."""

from __future__ import annotations

import gc
import importlib
from contextlib import suppress

import pytest

from blockflow.core.engines import ENGINES, TORCH_EXPORT
from blockflow.launch.preload import (
    BASE_MODULES,
    LOADER_MODULES,
    Imports,
    few_collections,
    modules_of,
    preload,
)


def test_loaders_have_names_that_launches_use() -> None:
    assert set(LOADER_MODULES) <= {*ENGINES, TORCH_EXPORT}
    assert modules_of([]) == modules_of(["echo", "exported"]) == ()
    assert modules_of(["exported", TORCH_EXPORT]) == LOADER_MODULES[TORCH_EXPORT]
    both = modules_of(["openvino", "onnxruntime", "openvino"])
    assert both == ("blockflow.engine.onnx_runtime", "blockflow.engine.open_vino")
    assert not {m for of in LOADER_MODULES.values() for m in of} & set(BASE_MODULES)


def test_what_is_imported_is_not_asked_for_again() -> None:
    imports = Imports(["base"])
    assert imports.begin(1, []) == [] and not imports.under_way
    assert imports.begin(2, ["base", "a", "b"]) == ["a", "b"]
    assert imports.under_way and imports.done == ["base"]
    imports.end(2)
    assert not imports.under_way and imports.done == ["base", "a", "b"]
    assert imports.begin(3, ["b", "a"]) == []
    assert imports.begin(4, ["c", "a"]) == ["c"]


def test_a_missing_module_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def imported(name: str) -> None:
        asked.append(name)
        if name == "missing":
            raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", imported)
    preload(["a", "missing", "b"])
    assert asked == ["a", "missing", "b"]


def test_what_is_old_is_not_collected_while_much_is_imported() -> None:
    before = gc.get_threshold()
    with suppress(ValueError), few_collections():
        assert gc.get_threshold()[:2] == before[:2] and gc.get_threshold()[2] > 100_000
        raise ValueError
    assert gc.get_threshold() == before


def test_an_answer_to_a_dead_launcher_is_not_ours() -> None:
    imports = Imports([])
    imports.begin(7, ["a"])
    imports.end(6)
    assert imports.under_way and imports.done == []


def test_modules_that_templates_die_on_are_left_to_the_workers() -> None:
    imports = Imports(["base"])
    assert imports.died() == []
    for serial in range(Imports.TRIES):
        assert imports.begin(serial, ["bad"]) == ["bad"]
        assert imports.died() == ["bad"] and not imports.under_way
    assert imports.begin(9, ["bad"]) == [] and imports.done == ["base"]
    assert imports.begin(10, ["bad", "good"]) == ["good"]
    imports.end(10)
    assert imports.done == ["base", "good"]
