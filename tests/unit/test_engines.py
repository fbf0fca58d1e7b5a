"""Which engine runs which block: pure selection, and what a host adds to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from blockflow.core.engines import (
    DIFFERS,
    ENGINES,
    TORCH_EXPORT,
    UNLOADED,
    VARIANTS,
    loaders,
    misfits,
    own_engine,
    pins,
    select,
    tolerable,
)
from blockflow.core.errors import BlockFlowError, RepositoryError
from blockflow.core.model import BlockInfo, Contract, TensorSpec, Variant
from blockflow.engine.registry import CLASSES

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


def test_fixed_rows_are_at_most_what_the_block_was_exported_for() -> None:
    few = TensorSpec("float32", ("rows", 2), {"rows": (1, 8)})
    block = replace(FULL, contract=Contract(few, few))
    select(block, "openvino", options={"rows": [1, 8]})
    (problem,) = misfits(block, "openvino", options={"rows": [1, 9]})
    assert "exported for 8" in problem.message and problem.details["field"] == "options.rows"


def test_auto_is_this_machines_choice() -> None:
    block = replace(FULL, choices={"here": CHOICE | {"options": {}}})
    assert select(block, machine="here").variant == "onnx-int8"
    assert select(block, precision="int8", machine="here").engine == "openvino"
    # not for this precision, not here, and not where nobody says where it is
    assert select(block, precision="fp32", machine="here").engine == "exported"
    assert select(block, machine="there").engine == "exported"
    assert select(block).engine == "exported"
    assert select(block, device="cuda:0", machine="here").engine == "exported"


@pytest.mark.parametrize(
    "other", [{"engine": "newer"}, {"precision": "int4"}, {"options": {"newer": 1}}]
)
def test_a_choice_of_another_release_is_none(other: dict[str, str]) -> None:
    block = replace(FULL, choices={"here": {**CHOICE, **other}})
    assert select(block, machine="here") == select(block)


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
    assert "--tolerance" in problem.hint
    # of one file at several precisions all
    assert misfits(refusing("openvino", kind="onnx"), "openvino", "bf16")


@pytest.mark.parametrize(
    "why",
    [
        f"{UNLOADED}no kernel",
        *(
            f"{DIFFERS}{error} on [1, 2], allowed is 0.1"
            for error in ("nan", "inf", "1.2", "3e+05")
        ),
    ],
)
def test_more_tolerance_is_advised_where_it_helps(why: str) -> None:
    form = replace(ONNX, refused={"openvino": why})
    (problem,) = misfits(replace(FULL, variants={"onnx": form}), "openvino")
    assert problem.hint.startswith("use onnxruntime or auto") and "tolerance" not in problem.hint


@pytest.mark.parametrize(("error", "may"), [("0.012", True), ("9.3e-06", True), ("1", False)])
def test_more_tolerance_is_for_errors_below_the_largest_value(error: str, may: bool) -> None:
    assert tolerable(f"{DIFFERS}{error} on [1, 2], allowed is 0.1") is may


def test_what_cannot_be_converted_is_not_told_to_be() -> None:
    (problem,) = misfits(replace(BARE, format="torchscript-traced"), "openvino")
    assert problem.code == "UNSUPPORTED_ENGINE" and problem.details["field"] == "engine"
    assert "torchscript-traced" in problem.message and "--format pt2" in problem.hint


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


def test_options_that_were_given_without_the_choice_go_on_without_it() -> None:
    """Measured afterwards, it would keep a block that serves from being started again."""
    block = replace(FULL, choices={"here": CHOICE})
    given = {"weights": "own"}
    assert not misfits(block, options=given, machine="here")
    assert select(block, options=given, machine="here") == select(FULL, options=given)
    assert select(block, options={"rows": [2]}, machine="here").engine == "openvino"
    (problem,) = misfits(block, options={"wieghts": "own"}, machine="here")
    assert "weights" in problem.hint


@pytest.mark.parametrize(
    ("asked", "code", "field", "says"),
    [
        ({"engine": "openvin"}, "UNSUPPORTED_ENGINE", "engine", "openvino"),
        ({"engine": "torchscript"}, "UNSUPPORTED_ENGINE", "engine", "torchscript-scripted"),
        ({"engine": "onnxruntime", "precision": "bf16"}, "UNSUPPORTED_ENGINE", "precision", "int8"),
        ({"engine": "openvino", "device": "cuda:0"}, "UNSUPPORTED_ENGINE", "device", "cpu"),
        ({"options": {"cuda_graf": True}}, "UNSUPPORTED_ENGINE", "options.cuda_graf", "cuda_graph"),
        ({"options": {"cuda_graph": 1}}, "UNSUPPORTED_ENGINE", "options.cuda_graph", "True"),
        ({"options": {"weights": "mine"}}, "UNSUPPORTED_ENGINE", "options.weights", "shared, own"),
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
