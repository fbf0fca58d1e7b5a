"""bench/profiling: which engines, precisions and options a block is measured with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from blockflow.bench.profiling import candidates as candidates_module
from blockflow.bench.profiling.candidates import Candidate, candidates, parse_option, reference
from blockflow.core.errors import BlockFlowError, RequestError, SystemError_
from blockflow.core.model import BlockInfo, Contract, TensorSpec, Variant

SPEC = TensorSpec("float32", ("rows", 4))
IMAGE = TensorSpec("float32", ("rows", 3, 8, 8))


def block(format_: str = "pt2", spec: TensorSpec = SPEC, **variants: str) -> BlockInfo:
    found = {k.replace("_", "-"): Variant(f"{k}.x", v, 1) for k, v in variants.items()}
    return BlockInfo("a", "1", "ab" * 32, format_, Contract(spec, spec), 0, 0, found)


def by_label(found: Sequence[Candidate]) -> dict[str, Candidate]:
    return {c.label: c for c in found}


def test_all_engines_are_listed_with_what_they_lack() -> None:
    found = by_label(candidates([block()], ["all"], ["all"], "m1"))
    assert not found["exported fp32"].reason
    assert not found["exported bf16"].reason
    assert "blockflow convert a@1 --to onnx" in found["openvino fp32"].reason
    assert "does not load" in found["torchscript fp32"].reason
    assert not any(label.startswith("echo") for label in found)


def test_variants_and_layouts_are_tried() -> None:
    found = by_label(candidates([block(spec=IMAGE, onnx="cd" * 32)], ["all"], ["all"], "m1"))
    assert not found["openvino fp32"].reason
    assert found["openvino fp32"].selections[0].variant == "onnx"
    assert not found["exported fp32 (memory_format=channels_last)"].reason
    assert "torchscript fp32 (memory_format=channels_last)" not in found
    chain = candidates([block(spec=IMAGE), block()], ["exported"], ["fp32"], "m1")
    assert [c.label for c in chain] == ["exported fp32"], "not all of it are images"


def test_a_missing_package_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(info: BlockInfo, engine: str) -> BlockFlowError | None:
        if engine != "openvino":
            return None
        return SystemError_(
            "MISSING_EXTRA", "no openvino", hint="pip install 'blockflow[openvino]'"
        )

    monkeypatch.setattr(candidates_module, "missing_extra", lacking)
    found = by_label(candidates([block(onnx="cd" * 32)], ["openvino"], ["fp32"], "m1"))
    assert found["openvino fp32"].reason == "no openvino -- pip install 'blockflow[openvino]'"
    choice = {"engine": "openvino", "precision": "fp32", "options": {}}
    second = replace(block(onnx="cd" * 32), choices={"m1": choice})
    (chain,) = candidates([block(), second], ["auto"], ["all"], "m1")
    assert "no openvino" in chain.reason


def test_auto_is_what_a_topology_would_run() -> None:
    (own,) = candidates([block()], ["auto"], ["all"], "m1")
    assert own.label == "exported fp32"
    choice = {"engine": "openvino", "precision": "fp32", "options": {}}
    chosen_here = replace(block(onnx="cd" * 32), choices={"m1": choice})
    (auto,) = candidates([chosen_here], ["auto"], ["all"], "m1")
    assert auto.label == "openvino fp32"
    (elsewhere,) = candidates([chosen_here], ["auto"], ["all"], "m2")
    assert elsewhere.label == "exported fp32"
    lower = candidates([chosen_here], ["auto"], ["bf16", "fp32"], "m1")
    assert [c.selections[0].precision for c in lower if not c.reason] == ["bf16", "fp32"]
    with_options = replace(chosen_here, choices={"m1": {**choice, "options": {"rows": [1]}}})
    (auto,) = candidates([with_options], ["auto"], ["all"], "m1")
    assert auto.label == "openvino fp32 (rows=[1])"
    assert reference(chosen_here, "m1").label == "exported fp32"


def test_a_refused_engine_is_no_candidate() -> None:
    plain = block(onnx="cd" * 32)
    form = replace(plain.variants["onnx"], refused={"openvino": "differs by 0.5 on [8, 4]"})
    choice = {"engine": "openvino", "precision": "fp32", "options": {}}
    info = replace(plain, variants={"onnx": form}, choices={"m1": choice})
    found = by_label(candidates([info], ["auto", "all"], ["all"], "m1"))
    for precision in ("fp32", "bf16", "fp16"):
        assert "differs by 0.5 on [8, 4]" in found[f"openvino {precision}"].reason
    assert not found["exported fp32"].reason and not found["onnxruntime fp32"].reason


def test_options_and_names_are_checked() -> None:
    assert parse_option("memory_format=channels_last") == ("memory_format", "channels_last")
    assert parse_option("spin=true") == ("spin", True)
    for python, json in (("True", "true"), ("None", "null"), ("-inf", "-Infinity")):
        with pytest.raises(RequestError, match=f"{python} is Python's, not JSON's") as e:
            parse_option(f"spin={python}")
        assert (e.value.where, e.value.hint) == (
            "--option spin",
            f"write {json}; if the string is meant, '\"{python}\"'",
        )
    assert parse_option('spin="True"') == ("spin", "True")
    for wrong in ("x", "=1", "x="):
        with pytest.raises(RequestError):
            parse_option(wrong)
    (refused,) = candidates([block()], ["exported"], ["fp32"], "m1", {"nonsense": 1})
    assert "unknown option 'nonsense'" in refused.reason
    for engines, precisions in ((["exportd"], ["fp32"]), (["exported"], ["fp31"])):
        with pytest.raises(RequestError) as e:
            candidates([block()], engines, precisions, "m1")
        assert e.value.code == "INVALID_REQUEST"
        assert "did you mean" in e.value.hint
