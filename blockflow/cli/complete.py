"""Names for shell completion, from the running system; silent and quick when there is none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import typer

_TIMEOUT_S = 0.4
_BREAKS = "@:="
"""Where bash ends a word (``COMP_WORDBREAKS``), but names, addresses and options go on."""


@contextmanager
def asked_by_bash() -> Iterator[None]:
    """A completion for bash sees words as they were typed, and answers with what bash replaces.

    Of ``trunk@2`` bash makes ``trunk``, ``@``, ``2``; what it puts an answer in the place of begins
    with the ``@``.
    """
    if os.environ.get("_BLOCKFLOW_COMPLETE") != "complete_bash":
        yield
        return
    words, at = os.environ["COMP_WORDS"].split("\n"), int(os.environ["COMP_CWORD"])
    # Not so where others' completions (npm's) have taken the sign out of ``COMP_WORDBREAKS``.
    pieces = words[max(at - 1, 0) : at + 1] if any(words[at : at + 1]) else []
    broken = any(_is_sign(word) and "@" in word for word in pieces)
    words, at = whole_words(words, at)
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(words), str(at)
    answers = StringIO()
    try:
        with redirect_stdout(answers):
            yield
    finally:
        for answer in answers.getvalue().splitlines():
            start = max(answer.find("@"), 0) if broken else 0
            sys.stdout.write(f"{answer[start:]}\n")


def whole_words(words: Sequence[str], at: int) -> tuple[list[str], int]:
    """Put together again what bash has taken apart; ``at`` is the place of the word to complete.

    No argument of a command is, or begins with, one of these signs alone.
    """
    whole: list[str] = []
    place, glued = at, False
    for i, word in enumerate(words):
        sign = _is_sign(word)
        if whole and (sign or (glued and word)):  # an empty one has begun behind a space
            whole[-1] += word
        else:
            whole.append(word)
        glued = sign
        if i == at:
            place = len(whole) - 1
    return whole, place


def _is_sign(word: str) -> bool:
    return bool(word) and not word.strip(_BREAKS)


def complete_block(ctx: typer.Context, incomplete: str) -> list[str]:
    """Deployed blocks that begin so."""
    return _names(ctx, "/v1/blocks", "blocks", incomplete)


def complete_task(ctx: typer.Context, incomplete: str) -> list[str]:
    """Published tasks that begin so."""
    return _names(ctx, "/v1/tasks", "tasks", incomplete)


def _names(ctx: typer.Context, path: str, key: str, incomplete: str) -> list[str]:
    from blockflow.core.errors import BlockFlowError
    from blockflow.monitor.rest import RestClient

    try:
        document = RestClient(ctx.params.get("url") or None, timeout_s=_TIMEOUT_S).get(path)
    except BlockFlowError:
        return []  # a completion has nowhere to show an error
    return [name for name in names_in(document, key) if name.startswith(incomplete)]


def names_in(document: Any, key: str) -> list[str]:
    """Names in a listing: objects with ``name``, plain strings, or a map by name."""
    items = document.get(key, document) if isinstance(document, dict) else document
    if isinstance(items, dict):
        return sorted(items)
    if not isinstance(items, list):
        return []
    names = [i.get("name") if isinstance(i, dict) else i for i in items]
    return sorted(n for n in names if isinstance(n, str))
