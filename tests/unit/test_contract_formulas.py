"""Contracts whose output's dims are formulas: what they bound, fit and compose to."""

from __future__ import annotations

from typing import Any

import pytest

from blockflow.batching.lengths import within_classes
from blockflow.core.dims import Dim
from blockflow.core.errors import RequestError, TopologyError
from blockflow.core.model import BlockInfo, Contract, Padding, TensorSpec
from blockflow.core.paths import path_contract
from blockflow.core.placement import desired_workers
from blockflow.core.topology import parse_topology
from blockflow.repository.formulas import as_input
from blockflow.repository.manifest import contract_form

SOUND = TensorSpec("float32", ("rows", "length"), {"length": (16, 200)})


def given(*dims: Dim, **ranges: tuple[int, int]) -> TensorSpec:
    return TensorSpec("float32", ("rows", *dims), ranges)


def block(name: str, taken: TensorSpec, out: TensorSpec, **more: Any) -> BlockInfo:
    return BlockInfo(name, "1", f"digest of {name}", "pt2", Contract(taken, out), 0, 0, **more)


EARS = block("ears", SOUND, given("(length - 5)//4", 8, length=(16, 200)))
HEAD = block("head", given("n", 8, n=(1, 48)), given("n//2", 3, n=(1, 48)))


def test_a_formula_bounds_the_bytes_and_the_dims() -> None:
    contract = EARS.contract
    assert contract.output.row_bytes() == 4 * 48 * 8
    assert contract.output.bounded and contract.output.dynamic == ("length",)
    assert contract.output_dims({"rows": 2, "length": 25}) == (2, 5, 8)
    assert not given("(length - 5)//4").bounded


def test_a_row_has_bytes_where_the_assumed_length_leaves_nothing() -> None:
    """A spectrogram's window of 2048, and no range: lengths are taken to be 1024 then."""
    spectrum = given(80, "(length - 2048)//512 + 1")
    assert spectrum.row_bytes() == spectrum.least_row_bytes() == 4 * 80
    ears = block("ears", TensorSpec("float32", ("rows", "length")), spectrum)
    topology = parse_topology({"blocks": ["ears"], "tasks": {"t": ["ears"]}}, lambda _: ears)
    (worker,) = desired_workers(topology, (0, 1))
    assert worker.full_slots == worker.slots == 16


def test_two_dims_that_are_nothing_at_least_are_no_huge_row() -> None:
    cut = given("height - 40000", "width - 40000")
    assert cut.least_row_bytes() == 4


def test_too_little_is_refused_as_the_requests_fault() -> None:
    anything = TensorSpec("float32", ("rows", "length"))
    contract = Contract(anything, given("(length - 5)//4"))
    with pytest.raises(RequestError, match="leaves nothing") as e:
        contract.output_dims(contract.input.bind("float32", (3, 8)))
    assert e.value.code == "CONTRACT_MISMATCH" and e.value.hint


@pytest.mark.parametrize(
    ("taken", "out", "words"),
    [
        (given("length//2"), given(3), "no names"),
        (SOUND, given("n//2"), "not bound"),
        (SOUND, given("n"), "not bound"),
    ],
)
def test_contracts_that_cannot_be(taken: TensorSpec, out: TensorSpec, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Contract(taken, out)


@pytest.mark.parametrize(
    ("dim", "words"),
    [
        ("rows", "depends on the rows"),
        ("rows*2", "depends on the rows"),
        ("length//", "is no dim"),
        ("seq-", "is no dim"),
        ("length**2", "is no dim"),
        ("f(length)", "is no dim"),
        ("8//(length - 1)", "may divide by zero"),
        ("length - 9", "never positive"),
        ("3 - 4*length", "never positive"),
    ],
)
def test_dims_that_cannot_be(dim: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        given(dim, **({"length": (1, 9)} if "length" in dim else {}))


def test_a_contract_keeps_its_formulas_wherever_it_is_written() -> None:
    contract = EARS.contract
    assert Contract.from_dict(contract.to_dict()) == contract
    assert contract_form(contract).to_contract() == contract


@pytest.mark.parametrize(
    ("taken", "fits"),
    [
        (given("n", 8, n=(2, 48)), True),
        (given("n", 8), True),
        (given("n", 8, n=(3, 48)), False),
        (given("n", 8, n=(2, 47)), False),
        (given(5, 8), False),
        (given("n", "n", n=(1, 99)), False),
    ],
)
def test_what_takes_a_formula(taken: TensorSpec, fits: bool) -> None:
    assert (taken.accepts(EARS.contract.output) == "") is fits


def test_what_has_one_name_must_have_one_formula() -> None:
    square = given("n", "n", n=(1, 200))
    both = Contract(SOUND, given("length//2", "length//2", length=(16, 200)))
    other = Contract(SOUND, given("length//2", "length//3", length=(16, 200)))
    assert not square.accepts(both.output) and "which is" in square.accepts(other.output)


def test_a_path_gives_what_its_blocks_make_of_its_input() -> None:
    infos = {"ears": EARS, "head": HEAD}
    contract = path_contract(["ears", "head"], infos)
    assert contract.input == SOUND
    assert contract.output == given("(length - 5) // 8", 3, length=(16, 200))
    for length in range(16, 201):
        (_, n, _) = EARS.contract.output_dims({"rows": 1, "length": length})
        whole = contract.output.resolve({"rows": 1, "length": length})
        assert whole == HEAD.contract.output.resolve({"rows": 1, "n": n})


def test_a_path_whose_formula_grows_too_long_is_a_finding() -> None:
    long = "+".join(["n//2"] * 60)
    infos = {
        b: block(b, given("n", n=(2, 10**6)), given(long if b != "c" else "n", n=(2, 60)))
        for b in "abc"
    }
    infos["b"] = block("b", given("n"), given(long))
    infos["c"] = block("c", given("n"), given("n"))
    with pytest.raises(TopologyError) as e:
        parse_topology({"blocks": list("abc"), "tasks": {"t": list("abc")}}, infos.__getitem__)
    (problem,) = e.value.problems
    assert problem.path == "$.tasks.t" and "cannot be written" in problem.message


def test_the_next_block_has_names_of_its_own() -> None:
    out = given("length", "length//2", "w//4", "length//2", "h*w", length=(4, 9), w=(8, 16))
    taken = as_input(out)
    assert taken.dims == ("rows", "length", "length2", "w2", "length2", "h2")
    assert taken.ranges == {"length": (4, 9), "length2": (2, 4), "w2": (2, 4)}
    assert as_input(given("length2//2", length2=(4, 9))).dims == ("rows", "length3")
    assert not taken.accepts(out)


def test_classes_bound_what_they_can_name() -> None:
    padded = Padding("n")
    infos = {
        "ears": EARS,
        "head": block("head", HEAD.contract.input, HEAD.contract.output, padding=padded),
        "same": block("same", given("n", n=(1, 200)), given("n", n=(1, 200)), padding=padded),
    }
    classes: dict[str, dict[str, Any]] = {b: {"classes": [4, 32]} for b in infos}
    behind = path_contract(["ears", "head"], infos)
    # behind a stride it is not the input's length that the classes are of
    assert within_classes(behind, [["ears", "head"]], infos, classes) == behind
    first = path_contract(["same"], infos)
    assert within_classes(first, [["same"]], infos, classes).input.ranges == {"n": (1, 32)}


@pytest.mark.parametrize(
    ("other", "given_by_it", "words"),
    [
        (given("n", n=(8, 64)), given("max(n//2, 6)", n=(8, 64)), "it makes"),
        (given("n", n=(8, 64)), given("min(n//2, 30)", n=(8, 64)), "it makes"),
        (given("n", n=(8, 64)), given("n//4", n=(8, 64)), "it makes"),
        (given("n", n=(8, 64)), given("n - 32", n=(8, 64)), "it makes"),
        (given("n", n=(8, 64)), given("(n - n%2)//2", n=(8, 64)), ""),
        (given("n", n=(1, 99)), given("n//2", n=(1, 99)), ""),
        (given("n"), given("n*2//4"), ""),
    ],
)
def test_a_canary_gives_as_much_as_its_task(
    other: TensorSpec, given_by_it: TensorSpec, words: str
) -> None:
    taken = given("length", length=(8, 64))
    half = block("half", taken, given("length//2", length=(8, 64)))
    infos = {"half": half, "new": block("new", other, given_by_it)}
    task = {"path": ["half"], "canary": {"path": ["new"], "share": 0.5}}
    body = {"blocks": ["half", "new"], "tasks": {"t": task}}
    if not words:
        assert parse_topology(body, infos.__getitem__).tasks["t"].canary is not None
        return
    with pytest.raises(TopologyError) as caught:
        parse_topology(body, infos.__getitem__)
    assert words in caught.value.problems[0].message


def test_what_the_task_makes_nothing_of_its_canary_may_make_something_of() -> None:
    taken = given("length", length=(8, 64))
    infos = {
        "old": block("old", taken, given("length - 10", length=(8, 64))),
        "new": block("new", taken, given("max(length - 10, 1)", length=(8, 64))),
    }
    task = {"path": ["old"], "canary": {"path": ["new"], "share": 0.5}}
    parse_topology({"blocks": ["old", "new"], "tasks": {"t": task}}, infos.__getitem__)


def test_a_path_does_not_come_back_to_a_block() -> None:
    """Though its contract fits itself."""
    same, task = block("same", given("n"), given("n")), {"t": ["same", "same"]}
    with pytest.raises(TopologyError) as caught:
        parse_topology({"blocks": ["same"], "tasks": task}, {"same": same}.__getitem__)
    (problem,) = caught.value.problems
    assert problem.path == "$.tasks.t[1]" and "twice" in problem.message
