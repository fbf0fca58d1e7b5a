"""``blockflow bench``: data, pre-processing hooks and accuracy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from blockflow.bench.mlperf.accuracy import LABELS as TRUTH
from blockflow.bench.mlperf.accuracy import Truth, classify, in_top, read_answers
from blockflow.bench.mlperf.accuracy import main as accuracy_main
from blockflow.bench.mlperf.data import load_hook, load_inputs
from blockflow.bench.mlperf.job import ACCURACY_LOG, read_inputs, save_inputs
from blockflow.bench.mlperf.library import Library
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import Contract, TensorSpec
from blockflow.core.routing import TaskRoute

SPEC = TensorSpec("float32", ("rows", 4))
ROUTES = {"a": TaskRoute("a", ("trunk", "head"), Contract(SPEC, SPEC))}


# --- data ----------------------------------------------------------------------------------------


def test_synthetic_rows_are_the_same_for_the_same_seed() -> None:
    first, again, other = (load_inputs("synthetic:5", ROUTES, seed=s)["a"] for s in (1, 1, 2))
    assert len(first.rows) == 5
    assert all(np.array_equal(x, y) for x, y in zip(first.rows, again.rows, strict=True))
    assert not np.array_equal(first.rows[0], other.rows[0])


def test_synthetic_tokens_are_as_many_as_one_says() -> None:
    spec = TensorSpec("int64", ("rows", 16))
    route = TaskRoute("t", ("t",), Contract(spec, spec))
    for source, least, most in (("synthetic:4", 1, 1), ("synthetic:4:1000", 500, 999)):
        found = load_inputs(source, {"t": route}, seed=1)["t"]
        assert least <= max(int(x.max()) for x in found.rows) <= most
        assert ("below 1000" in found.origin) == (most == 999)


def test_synthetic_bfloat16_and_lengths() -> None:
    spec = TensorSpec("bfloat16", ("rows", "length"), {"length": (2, 8)})
    route = TaskRoute("t", ("b",), Contract(spec, spec))
    found = load_inputs("synthetic:4", {"t": route}, seed=1)["t"]
    assert {r.dtype.name for r in found.rows} == {"uint16"}
    assert len({r.shape for r in found.rows}) == 2


def test_a_folder_with_labels_and_a_hook(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.arange(12, dtype=np.uint8).reshape(3, 4))
    np.save(tmp_path / "1.npy", np.zeros((1, 4), np.uint8))
    np.save(tmp_path / "labels.npy", np.array([0, 1, 2, 3]))
    hooks = dict.fromkeys(ROUTES, lambda x: x.astype(np.float32))
    found = load_inputs(str(tmp_path), ROUTES, seed=1, hooks=hooks)["a"]
    assert len(found.rows) == 4
    assert found.rows[1].tolist() == [[4, 5, 6, 7]]
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 2, 3]
    save_inputs({"a": found}, tmp_path)
    data = read_inputs(tmp_path, {"a": 2})["a"]
    assert data.tensor([0, 1]).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_files_without_a_row_are_refused_before_anything_runs(tmp_path: Path) -> None:
    np.save(tmp_path / "0.npy", np.zeros((0, 4), np.float32))
    np.save(tmp_path / "labels.npy", np.zeros(0, np.int64))
    with pytest.raises(BlockFlowError, match="EMPTY_INPUT"):
        load_inputs(str(tmp_path), ROUTES, seed=1)


def test_mixed_tasks_may_have_folders_of_their_own(tmp_path: Path) -> None:
    wide = TensorSpec("float32", ("rows", 6))
    routes = {**ROUTES, "wide": TaskRoute("wide", ("b",), Contract(wide, wide))}
    (tmp_path / "wide").mkdir()
    save_file(
        {"x": np.ones((2, 6), np.float32), "y": np.zeros((1, 6), np.float32)},
        tmp_path / "wide" / "x.safetensors",
    )
    np.save(tmp_path / "wide" / "labels.npy", np.array([4, 5, 6]))
    np.save(tmp_path / "x.npy", np.zeros((5, 4), np.float32))
    found = load_inputs(str(tmp_path), routes, seed=1)
    assert {task: len(i.rows) for task, i in found.items()} == {"a": 5, "wide": 3}
    assert found["a"].labels is None
    assert found["wide"].labels is not None
    assert found["wide"].labels.tolist() == [4, 5, 6]
    assert {r.shape for r in found["wide"].rows} == {(1, 6)}


def test_rows_of_different_dims_are_kept_apart(tmp_path: Path) -> None:
    spec = TensorSpec("float32", ("rows", "length"))
    route = TaskRoute("t", ("b",), Contract(spec, spec))
    found = load_inputs("synthetic:4", {"t": route}, seed=1)
    save_inputs(found, tmp_path)
    assert list(read_inputs(tmp_path, {"t": 2})["t"].kinds) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("array", "code"),
    [
        (np.zeros((2, 5), np.float32), "CONTRACT_MISMATCH"),
        (np.zeros((2, 4), np.float64), "CONTRACT_MISMATCH"),
        (np.zeros(2, np.float32), "CONTRACT_MISMATCH"),
        (np.zeros((), np.float32), "INVALID_REQUEST"),
    ],
)
def test_data_that_do_not_fit_are_refused(tmp_path: Path, array: Any, code: str) -> None:
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(BlockFlowError) as caught:
        load_inputs(str(tmp_path), ROUTES, seed=1)
    assert caught.value.code == code


def test_labels_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 4), np.float32))
    np.save(tmp_path / "labels.a.npy", np.array([1, 2, 3]))
    with pytest.raises(BlockFlowError) as caught:
        load_inputs(str(tmp_path), ROUTES, seed=1)
    assert caught.value.code == "CONTRACT_MISMATCH"


@pytest.mark.parametrize(
    "source",
    [
        "synthetic:0",
        "synthetic:x",
        "synthetic:4:0",
        "synthetic:4:x",
        "synthetic:4:",
        "synthetic:4:" + "9" * 30,
        "synthetic:" + "9" * 5000,
        "digits:x",
        "digits:" + "9" * 5000,
        f"digits:{2**32}",
        "/nowhere",
    ],
)
def test_nonsense_is_no_data(source: str) -> None:
    with pytest.raises(BlockFlowError) as caught:
        load_inputs(source, ROUTES, seed=1)
    assert caught.value.code == "INVALID_REQUEST"


@pytest.mark.parametrize("name", ["x.npy", "x.safetensors"])
def test_a_broken_file_is_no_data(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"not an array")
    with pytest.raises(BlockFlowError) as caught:
        load_inputs(str(tmp_path), ROUTES, seed=1)
    assert caught.value.code == "INVALID_REQUEST"


def test_a_file_that_is_no_array_whatever_its_name_says(tmp_path: Path) -> None:
    packed = tmp_path / "packed.npz"
    np.savez(packed, x=np.ones(3))
    whole = tmp_path / "whole.npy"
    np.save(whole, np.ones((3, 4)))
    header = whole.read_bytes()
    broken = (
        packed.read_bytes(),
        b"PK\x03\x04broken",
        header[:40],
        header.replace(b"(3, 4)", b"(10**13,)").replace(b"(3, 4), ", b""),
    )
    for content in broken:
        (tmp_path / "x.npy").write_bytes(content)
        with pytest.raises(BlockFlowError) as caught:
            load_inputs(str(tmp_path / "x.npy"), ROUTES, seed=1)
        assert caught.value.code == "INVALID_REQUEST"


@pytest.mark.parametrize("text", ["json", "nowhere_at_all:f", "json:nothing", "json:__doc__"])
def test_nonsense_is_no_hook(text: str) -> None:
    with pytest.raises(BlockFlowError) as caught:
        load_hook(text)
    assert caught.value.code == "INVALID_REQUEST"


@pytest.mark.parametrize("raised", [ValueError("no"), SystemExit(3)])
def test_a_hook_that_fails_is_named(raised: BaseException) -> None:
    def fails(row: Any) -> Any:
        raise raised

    with pytest.raises(BlockFlowError, match=f"the hook raised {type(raised).__name__}"):
        load_inputs("synthetic:1", ROUTES, seed=1, hooks=dict.fromkeys(ROUTES, fails))


def test_a_task_has_a_hook_of_its_own() -> None:
    routes = {**ROUTES, "b": replace(ROUTES["a"], name="b")}
    found = load_inputs("synthetic:1", routes, seed=1, hooks={"b": lambda x: 2 * x})
    assert np.array_equal(found["b"].rows[0], 2 * found["a"].rows[0])


def test_a_hook_that_writes_into_its_row_changes_no_other_task(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, *ROUTES["a"].contract.input.dims[1:]), np.float32))
    routes = {**ROUTES, "b": replace(ROUTES["a"], name="b")}

    def tenfold(row: Any) -> Any:
        row *= 10
        return row

    found = load_inputs(str(tmp_path), routes, seed=1, hooks={"a": tenfold})
    assert (found["a"].rows[1] == 10).all()
    assert (found["b"].rows[1] == 1).all()


def test_a_hook_that_fails_is_told() -> None:
    def broken(x: Any) -> Any:
        raise KeyError("mean")

    for hook in (broken, lambda x: "text"):
        with pytest.raises(BlockFlowError) as caught:
            load_inputs("synthetic:1", ROUTES, seed=1, hooks={"a": hook})
        assert caught.value.code == "INVALID_REQUEST"


# --- accuracy ------------------------------------------------------------------------------------


def test_top_1_and_top_5_with_ties() -> None:
    logits = np.array([[9, 1, 2, 3, 4, 5, 6.0], [1, 2, 3, 4, 5, 6, 9], [0, 0, 0, 0, 0, 0, 0]])
    labels = np.array([0, 2, 1])
    assert in_top(logits, labels, 1) == 1
    assert in_top(logits, labels, 5) == 3
    assert in_top(np.zeros((7, 7)), np.arange(7), 1) == 1  # telling nothing apart is not right


def test_nan_is_never_right() -> None:
    nan = float("nan")
    rows = np.array([[nan] * 7, [0, nan, 0, 0, 0, 0, 0], [9, nan, nan, nan, nan, nan, 1]])
    assert in_top(rows, np.array([0, 1, 0]), 1) == 0
    assert in_top(rows, np.array([0, 1, 0]), 5) == 0
    assert in_top(np.array([[9, nan, 1, 2, 3, 4]]), np.array([0]), 2) == 1


def test_accuracy_counts_what_is_missing_as_wrong() -> None:
    answers = {i: np.eye(6, dtype=np.float32)[i].tobytes() for i in range(3)} | {3: b""}
    found = classify("a", answers, Truth([0, 1, 0, 3], "float32"))
    assert (found.rows, found.missing, found.top1) == (4, 1, 0.5)
    assert found.top5 == 0.75


def test_bfloat16_answers_are_read() -> None:
    scores = np.array([[1.0, -2.0]], np.float32).view(np.uint32) >> 16
    found = classify("a", {0: scores.astype(np.uint16).tobytes()}, Truth([0], "bfloat16"))
    assert (found.top1, found.top5) == (1.0, None)


def test_answers_that_are_no_classes_are_refused() -> None:
    with pytest.raises(BlockFlowError) as caught:
        classify("a", {0: np.zeros(4, np.float32).tobytes()}, Truth([4], "float32"))
    assert caught.value.code == "CONTRACT_MISMATCH"


def test_loadgens_answers_are_read_by_task_and_row() -> None:
    log = [{"seq_id": 0, "qsl_idx": 2, "data": "0A"}, {"seq_id": 1, "qsl_idx": 0, "data": "0B"}]
    library = Library.once({"a": 2, "b": 1})
    assert read_answers(json.dumps(log), library) == {"a": {0: b"\x0b"}, "b": {0: b"\x0a"}}
    for broken in ("[{", '[{"qsl_idx": 9, "data": ""}]', '[{"data": ""}]'):
        with pytest.raises(BlockFlowError):
            read_answers(broken, library)


def test_labels_may_be_safetensors_and_what_is_none_is_said(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((3, 4), np.float32))
    labels = np.array([0, 1, 2])
    save_file({"y": labels}, tmp_path / "labels.safetensors")
    found = load_inputs(str(tmp_path), ROUTES, seed=1)["a"].labels
    assert found is not None
    assert found.tolist() == [0, 1, 2]
    save_file({"y": labels, "z": labels}, tmp_path / "labels.safetensors")
    for place, why in ((str(tmp_path), "2 tensors"), ("x" * 5000, "name too long|no .npy")):
        with pytest.raises(BlockFlowError, match=why):
            load_inputs(place, ROUTES, seed=1)


def test_the_accuracy_script_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert accuracy_main([str(tmp_path)]) == 2
    assert "no accuracy run with labels" in capsys.readouterr().err
    (tmp_path / ACCURACY_LOG).write_text("[]")
    broken: list[Any] = [{}, [1], {"rows": {"a": "x"}, "truths": {}}, {"rows": {}, "truths": [1]}]
    for labels, dtype in (([], "float32"), ([0, 1], "float32"), (["x"], "float32"), ([0], "wide")):
        truth = {"labels": labels, "dtype": dtype}
        broken.append({"rows": {"a": 1}, "truths": {"a": truth}})
    for told in broken:
        (tmp_path / TRUTH).write_text(json.dumps(told))
        assert accuracy_main([str(tmp_path)]) == 2
        assert "no accuracy run with labels" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        accuracy_main([])
