"""Passage: what is written between two marks of a page that is otherwise written by hand. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Passage:
    """A place for what stored results say."""

    name: str

    @property
    def begin(self) -> str:
        return f"<!-- {self.name}: made from docs/results/ by python -m blockflow.bench.docs -->"

    @property
    def end(self) -> str:
        return f"<!-- end of {self.name} -->"

    def fill(self, text: str, made: str) -> str:
        """The page with ``made`` between its marks.

        Raises:
            ValueError: the page does not have them, in this order.
        """
        head, begin, rest = text.partition(self.begin)
        _, end, tail = rest.partition(self.end)
        if not begin or not end:
            raise ValueError(f"there is no place for it: {self.begin} ... {self.end}")
        return f"{head}{self.begin}\n\n{made}\n\n{self.end}{tail}"
