"""Subject: what ``blockflow profile`` measures, and the command that does it. Pure.

Whoever finds that a profile is missing names the command that makes it. It must be the whole
command: a block that runs under another engine than its usual one, or another version of it, is not
measured by the bare one.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from blockflow.core.engines import AUTO
from blockflow.core.errors import RequestError
from blockflow.core.model import BlockInfo


@dataclass(frozen=True, slots=True)
class Subject:
    """A block, or the blocks of a chain, and what runs them.

    Attributes:
        blocks: names as the command takes them, ``name`` or ``name@version``.
        engine, precision, options: as a topology says them; ``auto`` is what the bare command
            measures.
        chain: the blocks are one subject, run after one another.
    """

    blocks: tuple[str, ...]
    engine: str = AUTO
    precision: str = AUTO
    options: Mapping[str, Any] = field(default_factory=dict)
    chain: bool = False

    def command(self, threads: Sequence[int] = ()) -> str:
        """What a person types to measure it with these numbers of threads (the usual ones are 1,
        2, 4, and so on up to the cores; they need not be said)."""
        words = ["blockflow", "profile"]
        words += ["--chain", ",".join(self.blocks)] if self.chain else self.blocks
        if self.engine != AUTO:
            words += ["--engines", self.engine]
        if self.precision != AUTO:
            words += ["--precisions", self.precision]
        for key, value in sorted(self.options.items()):
            words += ["--option", f"{key}={json.dumps(value)}"]
        if any(n & (n - 1) for n in threads):
            words += ["--threads", ",".join(map(str, sorted(set(threads))))]
        return shlex.join(words)


def commands(missing: Iterable[tuple[Subject, int]]) -> str:
    """One line that measures several blocks, each with its number of threads: a command for those
    that are run alike."""
    alike: list[tuple[Subject, list[str], list[int]]] = []
    for subject, threads in missing:
        head = replace(subject, blocks=())
        for known, blocks, counts in alike:
            if known == head and not head.chain:
                blocks += [b for b in subject.blocks if b not in blocks]
                counts.append(threads)
                break
        else:
            alike.append((head, list(subject.blocks), [threads]))
    return " && ".join(replace(h, blocks=tuple(b)).command(n) for h, b, n in alike)


def refuse_gaps(infos: Sequence[BlockInfo]) -> None:
    """Refuse blocks that do not follow one another.

    Raises:
        RequestError: INVALID_REQUEST with the first place that does not fit.
    """
    for a, b in pairwise(infos):
        why = b.contract.input.accepts(a.contract.output)
        if why:
            raise RequestError(
                "INVALID_REQUEST", f"{b.name} does not take what {a.name} gives: {why}"
            )
