"""Guesses at what was meant: good ones, and never at the cost of others."""

from __future__ import annotations

import pytest

from blockflow.batching.options import Integer, option_problems
from blockflow.core import guess
from blockflow.core.engines import misfits
from blockflow.core.errors import MOST_FINDINGS, TopologyError
from blockflow.core.guess import COMPARED, FEW, WORDS, Guesses
from blockflow.core.model import BlockInfo, Contract, TensorSpec
from tests.control_rig import topology

SPEC = TensorSpec("float32", ("rows", 4))


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many names each word was compared with."""
    counts: list[int] = []
    real = guess.get_close_matches

    def counted(word: str, names: list[str], n: int) -> list[str]:
        counts.append(len(names))
        return real(word, names, n)

    monkeypatch.setattr(guess, "get_close_matches", counted)
    return counts


def test_the_closest_come_first_and_nothing_close_is_nothing() -> None:
    guesses = Guesses(["trunk", "trunk2", "head_parity", "head_digit"])
    assert guesses.near("trunkk") == ["trunk", "trunk2"]
    assert guesses.hint("head_digi") == "did you mean head_digit, head_parity?"
    assert (guesses.near("zzz"), guesses.hint("zzz")) == ([], "")
    assert Guesses(()).near("trunk") == []


def test_among_thousands_of_names_it_is_compared_with_its_neighbours(compared: list[int]) -> None:
    names = [f"head-{i:04}" for i in range(4096)]
    guesses = Guesses(reversed(names))
    assert guesses.known == names
    for word in ("head-0000x", "head-2048x", "head-4095x", "head-204"):
        assert word.removesuffix("x") in " ".join(guesses.near(word))
    assert guesses.near("a") == guesses.near("zzz") == []
    assert compared == [COMPARED] * 6


def test_few_names_are_all_compared_wherever_they_stand(compared: list[int]) -> None:
    names = [*(f"b{i:02}" for i in range(COMPARED - 1)), "zhead_digit"]
    assert Guesses(names).near("head_digit") == ["zhead_digit"]
    assert compared == [COMPARED]


def test_a_word_that_comes_again_costs_nothing(compared: list[int]) -> None:
    guesses = Guesses(["trunk"])
    for _ in range(3):
        assert guesses.near("trunkk") == ["trunk"] and guesses.near("zzz") == []
    assert len(compared) == 2


def test_after_so_many_words_there_are_no_more_guesses(compared: list[int]) -> None:
    guesses = Guesses(["trunk"])
    found = [guesses.near(f"trunk{i}") for i in range(2 * WORDS)]
    assert found == [["trunk"]] * WORDS + [[]] * WORDS and len(compared) == WORDS
    assert guesses.near("trunk1") == ["trunk"]


def test_of_one_of_many_objects_few_words_are_guessed(compared: list[int]) -> None:
    """An update has room for six hundred blocks with a hundred unknown options each."""
    options = {f"max_rowz{i}": 0 for i in range(MOST_FINDINGS)}
    found = option_problems("it", options, {"max_rows": Integer(1, 8)}, "$")
    assert [p.hint for p in found] == [
        *["did you mean max_rows?"] * FEW,
        *["known: max_rows"] * (MOST_FINDINGS - FEW),
    ]
    block = BlockInfo("b", "1", "0" * 64, "echo", Contract(SPEC, SPEC), 0, 0)
    told = misfits(block, options={f"delay_mz{i}": 0 for i in range(MOST_FINDINGS)})
    assert sum("did you mean" in e.hint for e in told) == FEW
    assert len(compared) == 2 * FEW


def test_an_update_says_what_may_have_been_meant(compared: list[int]) -> None:
    blocks = [{"name": "trunk", "thread": 1}, {"name": "head"}]
    tasks = {f"t{i}": ["trunk", "haed"] for i in range(300)}
    with pytest.raises(TopologyError) as caught:
        topology(blocks, tasks)
    hints = {p.path: p.hint for p in caught.value.problems}
    assert hints["$.blocks[0].thread"] == "did you mean threads?"
    assert {hints[f"$.tasks.t{i}[1]"] for i in range(300)} == {"did you mean head?"}
    assert len(compared) == 2, "once for each word"
