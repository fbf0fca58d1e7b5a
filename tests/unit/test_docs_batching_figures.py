"""docs/batching.md says in its prose what the stored results say, and of the papers what they say.

Whoever stores new results learns here which sentences are true no longer, and what to write there.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from blockflow.bench.batching import figures as f
from blockflow.bench.batching import plan
from blockflow.bench.batching.plan import INPUT, LBCI, NONE, REASONS, SHARED
from blockflow.bench.results import Figure
from tests.batching_prose import FRAGMENTS, sources
from tests.quoted_rig import Stored, changed, listed, page_text

PAGE = "batching.md"
QUOTING = (
    ("On our machine, in short", "### A profile is not what is served"),
    ("### A profile is not what is served", "So the benchmark profiles"),
    ("What it says here:", "## Threads or lanes?"),
)
"""From where to where each number must be one of a fragment's..."""
SETTLED = (
    f"at {listed(f'{load:g}' for load in plan.DVABATCH_LOADS.values())} of what it serves",
    "99th percentile",
    "ResNet-18",
    "235 MB of weights",
    f"Requests of {(1 + plan.SIZES['medium']) / 2:g} rows on average",
    f"a t_opt of {plan.T_OPT_ROWS} rows' time",
    'with `"buffer_pairs": 1`, which has no joins, mean and p99 are ZeroBatch\'s',
)
"""...or here: what settings and models make so, whatever is measured."""


@pytest.fixture(scope="module")
def page() -> str:
    return page_text(PAGE)


@pytest.fixture(scope="module")
def figures() -> list[Figure]:
    return sources()


def check(fragment: str, page: str, figures: list[Figure]) -> None:
    text = FRAGMENTS[fragment](Stored(figures))
    assert page.count(text) == 1, f"docs/{PAGE} must say once ({fragment}):\n{text}"


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_the_page_says_what_is_stored(fragment: str, page: str, figures: list[Figure]) -> None:
    check(fragment, page, figures)


@pytest.mark.parametrize("words", SETTLED)
def test_what_is_settled_stands_in_the_page(words: str, page: str) -> None:
    assert words in page, f"docs/{PAGE} must say:\n{words}"


@pytest.mark.parametrize(("begin", "end"), QUOTING)
def test_every_number_is_a_fragments(
    begin: str, end: str, page: str, figures: list[Figure]
) -> None:
    text = page[page.index(begin) : page.index(end, page.index(begin) + 1)]
    for known in (*(make(Stored(figures)) for make in FRAGMENTS.values()), *SETTLED):
        text = text.replace(known, "")
    left = re.findall(r".{0,50}\d.{0,50}", text)
    assert not left, f"no fragment of tests/batching_prose.py holds these: {left}"


# The detectors see what they are there for.


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_a_change_of_any_figure_is_found(fragment: str, page: str, figures: list[Figure]) -> None:
    stored = Stored(figures)
    FRAGMENTS[fragment](stored)
    assert stored.asked
    for figure in stored.asked:
        at = next(i for i, g in enumerate(figures) if g is figure)
        planted = [[*figures[:at], other, *figures[at + 1 :]] for other in changed(figure)]
        texts = [FRAGMENTS[fragment](Stored(those)) for those in planted]
        assert any(text not in page for text in texts), (
            f"{texts} although there is another {figure}"
        )


def test_the_last_digit_is_found_and_the_sentence_told(page: str, figures: list[Figure]) -> None:
    high = Stored(figures).one(f.SIMULATED, NONE, experiment=REASONS, model=INPUT, load="high")
    planted = [replace(g, value=g.value + 0.1) if g is high else g for g in figures]
    told = f"a query takes .* and {high.value + 0.1:.1f} ms under `none`;"
    with pytest.raises(AssertionError, match=told):
        check("lengths, none", page, planted)


def test_what_is_missing_or_stands_twice_is_not_chosen(figures: list[Figure]) -> None:
    once, twice = Stored(figures), Stored(figures * 2)
    with pytest.raises(LookupError, match="no figure"):
        once.one(f.PEAK_OF_BOUND, "batched", experiment=INPUT)
    with pytest.raises(LookupError, match="no figure"):
        once.all(f.SPLIT, experiment=INPUT)
    with pytest.raises(LookupError, match="2 figures"):
        twice.one(f.PEAK_OF_BOUND, "batched", experiment=SHARED)
    with pytest.raises(LookupError, match="0 notes"):
        once.note(INPUT, "^t_opt is")
    with pytest.raises(LookupError, match="2 notes"):
        twice.note(LBCI, "^t_opt is")
