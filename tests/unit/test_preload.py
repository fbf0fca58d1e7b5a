"""What templates import: at their start, and for the launches that name more."""

from __future__ import annotations

from blockflow.core.engines import ENGINES, TORCH_EXPORT
from blockflow.launch.preload import BASE_MODULES, LOADER_MODULES, Imports, modules_of


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
        assert imports.died() == ["bad"]
    assert imports.begin(9, ["bad"]) == [] and imports.done == ["base"]
    assert imports.begin(10, ["bad", "good"]) == ["good"]
    imports.end(10)
    assert imports.done == ["base", "good"]
