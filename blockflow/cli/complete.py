"""Names for shell completion, from the running system; silent and quick when there is none."""

from __future__ import annotations

from typing import Any

import typer

_TIMEOUT_S = 0.4


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
