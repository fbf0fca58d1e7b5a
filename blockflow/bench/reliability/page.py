"""The table of promises in docs/reliability.md: written between two marks of that page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blockflow.bench.passage import Passage
from blockflow.bench.reliability.promises import PROMISES, promise_grid
from blockflow.bench.results import Figure

PAGE = "reliability.md"
PROMISE_PASSAGE = Passage("promises")


def promise_table(stored: Mapping[str, Sequence[Figure]], provenance: Mapping[str, str]) -> str:
    """The table, and where and when its figures were measured.

    Args:
        stored: figures by result file.
        provenance: of those files, in a sentence each.
    """
    used = dict.fromkeys(p.results for p in PROMISES if p.results in stored)
    notes = [f"<sub>{provenance[name]}</sub>" for name in used]
    return "\n\n".join([promise_grid(stored).markdown(), *notes])
