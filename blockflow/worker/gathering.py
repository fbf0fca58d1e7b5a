"""Gathering: the rows of several tickets as one tensor, before a forward and after several."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from blockflow.repository.padding import cut, padded
from blockflow.worker.buffer_pool import BufferPool
from blockflow.worker.ticket import FILL, Ticket


def gathered(
    tickets: Sequence[Ticket], pad_to: tuple[int, ...], value: float, pool: BufferPool
) -> tuple[torch.Tensor, int]:
    """The tickets' rows as one contiguous tensor, and how often they were copied for that: 0 or 1.

    Rows that lie side by side are a view. So is a batch that was padded for the stage before and
    stays together.
    """
    filled = pad_to if value == FILL else None
    parts: list[torch.Tensor] = []
    i, count = 0, len(tickets)
    while i < count:
        ticket = tickets[i]
        source, start, cut_to = ticket.source, ticket.start, ticket.cut
        as_it_is = cut_to is None or source.shape == filled
        stop = start
        while ticket.source is source and ticket.start == stop:
            if not as_it_is and ticket.cut != cut_to:
                break
            stop += ticket.item.rows
            i += 1
            if i == count:
                break
            ticket = tickets[i]
        x: torch.Tensor = source.tensor()
        part = x if stop - start == x.shape[0] else x[start:stop]
        parts.append(part if as_it_is or cut_to is None else cut(part, cut_to))
    fill = bool(pad_to) and any(part.shape[1:] != pad_to for part in parts)
    if fill or len(parts) > 1:
        like = parts[0]
        dims = (sum(len(p) for p in parts), *(pad_to if fill else like.shape[1:]))
        place = None if like.is_cuda else pool.take(dims, like.dtype)
        return (padded(parts, pad_to, value, place) if fill else torch.cat(parts, out=place)), 1
    (x,) = parts
    return (x, 0) if x.is_contiguous() else (x.contiguous(), 1)


def joined(tickets: Sequence[Ticket], results: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """One tensor with every ticket's rows at its place; those of failed ones are zeros.

    At least one has a result.
    """
    good = next(r for r in results if r is not None)
    return torch.cat(
        [
            good.new_zeros((t.rows, *good.shape[1:])) if r is None else r
            for t, r in zip(tickets, results, strict=True)
        ]
    )
