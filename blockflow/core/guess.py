"""Guesses: which known name was probably meant by one that nobody knows.

To compare a name with thousands of similar ones takes a tenth of a second, and who sends one name
that nobody knows may send thousands of them: a request each, or an update full of them. A guess is
a courtesy and must not cost others their time, so a word is compared with some names only, those
that stand next to it in the alphabet where there are many; and after so many words no more guesses
are made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

COMPARED = 32
"""Names that a word is compared with at most: a millisecond."""
WORDS = 64
"""Words that guesses are made for."""
FEW = 8
"""Words of one object among many, where each has guesses of its own."""
_GIVEN = 3


class Guesses:
    """Over one set of known names.

    Args:
        known: these.
        words: that guesses are made for at most.

    Attributes:
        known: they, in order.
    """

    def __init__(self, known: Iterable[str], words: int = WORDS) -> None:
        self.known = sorted(known)
        self._words = words
        self._made: dict[str, list[str]] = {}

    def near(self, word: str) -> list[str]:
        """Up to three names that are close to ``word``, the closest first."""
        made = self._made.get(word)
        if made is None:
            if len(self._made) >= self._words:
                return []
            made = self._made[word] = get_close_matches(word, self._around(word), _GIVEN)
        return made

    def hint(self, word: str) -> str:
        """``near`` as a question; empty if nothing is close."""
        close = self.near(word)
        return f"did you mean {', '.join(close)}?" if close else ""

    def _around(self, word: str) -> list[str]:
        if len(self.known) <= COMPARED:
            return self.known
        first = bisect_left(self.known, word) - COMPARED // 2
        first = min(max(first, 0), len(self.known) - COMPARED)
        return self.known[first : first + COMPARED]


def near(word: str, known: Sequence[str], guesses: Guesses | None = None) -> str:
    """A hint: what was probably meant, or all there is. ``guesses``: those over ``known``."""
    all_of_them = f"known: {', '.join(known)}" if known else "there are none"
    return (guesses or Guesses(known)).hint(word) or all_of_them
