"""Recovery: whether a request whose worker died is run again, and when. Pure.

Blocks are pure functions unless the topology says otherwise (``replayable: false``), so a request
may start anew from its retained input. What may have killed the worker is run alone, one such
request at a time per worker: a second death can then be blamed on one request, and on no other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from blockflow.core.errors import BlockFlowError, RequestError, make_error
from blockflow.core.routing import PathTree
from blockflow.dispatcher.entry import Entry
from blockflow.dispatcher.plan import Plan
from blockflow.dispatcher.retry import MAX_ATTEMPTS
from blockflow.wire.control import OUT_OF_MEMORY
from blockflow.wire.data import REQUEST_ID_BYTES

DEADLY = 2
"""Workers that may die with one request at work before it is blamed."""

_MIN_LEFT_NS = 1_000_000

_MORE_MEMORY = (
    "send it again once the workers have more memory: a larger limit (blockflow status says it), "
    "fewer rows at once (max_rows) or fewer replicas"
)


@dataclass(frozen=True, slots=True)
class Death:
    """A worker is proven dead.

    Attributes:
        incarnation: its.
        at_work: ticket -> nodes that it was executing for that request.
        unsent: tickets whose input had not left for it yet.
        starved: the kernel killed it for want of memory, which others may have taken.
    """

    incarnation: int
    at_work: Mapping[bytes, Collection[tuple[int, int]]]
    unsent: Collection[bytes] = ()
    starved: bool = False

    @classmethod
    def of(
        cls, incarnation: int, records: Iterable[bytes], unsent: Collection[bytes] = ()
    ) -> Death:
        """From a PeerGone's records: ticket, attempt (1 byte), node (1 byte); or OUT_OF_MEMORY."""
        at_work: dict[bytes, list[tuple[int, int]]] = {}
        starved = False
        for raw in records:
            if type(raw) is bytes and len(raw) == REQUEST_ID_BYTES + 2:
                at_work.setdefault(raw[:-2], []).append((raw[-2], raw[-1]))
            starved |= raw == OUT_OF_MEMORY
        return cls(incarnation, at_work, unsent, starved)

    def not_begun(self, entry: Entry) -> frozenset[int]:
        """Nodes of the present attempt that have certainly not begun.

        The nodes after one that was still at work, and all of them where the input never left.
        """
        tree = entry.plan.tree
        if entry.ticket in self.unsent:
            return frozenset(range(len(tree.nodes)))
        found: set[int] = set()
        for attempt, node in self.at_work.get(entry.ticket, ()):
            if attempt == entry.attempt and node < len(tree.nodes):
                found |= after(tree, node)
        return frozenset(found)


def after(tree: PathTree, node: int) -> set[int]:
    """All nodes below ``node``, without itself."""
    found: set[int] = set()
    todo = [node]
    while todo:
        children = tree.children(todo.pop())
        found.update(children)
        todo += children
    return found


def poisoned(entry: Entry) -> RequestError:
    """The request is to blame."""
    return RequestError(
        "POISON",
        f"{entry.deaths} workers died while they executed this request",
        where=entry.request_id.hex(),
        hint="see the workers' logs; the same input will do the same again",
    )


def starved(entry: Entry) -> RequestError:
    """WORKER_LOST: workers died while they executed the request, but for want of memory. Where
    there is more of it, or less to do for others, the same input may do no harm."""
    return RequestError(
        "WORKER_LOST",
        f"{entry.deaths} workers died while they executed this request: the kernel kills for want"
        " of memory",
        where=entry.request_id.hex(),
        hint=_MORE_MEMORY,
    )


def not_again(error: BlockFlowError, block: str) -> BlockFlowError:
    """``error`` of a request that must not just be sent again: ``block``, which must not run twice,
    may have begun. It keeps its code, which says what has happened."""
    return make_error(
        error.code,
        error.message,
        where=error.where,
        hint=f"block {block!r} must not run twice and may have begun: send it again only if that "
        "does no harm",
        details=error.details,
        retryable=False,
    )


def lost(entry: Entry, incarnation: int, why: str, hint: str = "send it again") -> RequestError:
    """WORKER_LOST: the request's worker died, and ``why`` it is not run again."""
    plan = entry.plan
    ways = zip(plan.blocks, plan.incarnations, strict=True)
    blocks = sorted({block for block, inc in ways if inc == incarnation})
    text = f"the worker of {', '.join(blocks)} died with the request: {why}"
    return RequestError("WORKER_LOST", text, where=entry.request_id.hex(), hint=hint)


def may_have_run(request_id: bytes, plan: Plan) -> RequestError | None:
    """Why a request is not run that its client had sent before, and of which nothing is known here:
    a block on its way may have begun, and must not run twice; None: it can be run."""
    if not plan.once:
        return None
    return RequestError(
        "WORKER_LOST",
        f"what became of the request when it was sent before is not known here, and block"
        f" {plan.blocks[min(plan.once)]!r} must not run twice",
        where=request_id.hex(),
        hint="it may have been done: ask anew, under another id, only if that does no harm",
        retryable=False,
    )


def why_not_again(entry: Entry, death: Death, now_ns: int) -> RequestError | None:
    """Why no part of the request can be run again; None: it can, as far as the request goes."""
    if entry.attempt >= MAX_ATTEMPTS:
        hint = _MORE_MEMORY if death.starved else "send it again"
        return lost(entry, death.incarnation, f"it was run {MAX_ATTEMPTS} times", hint)
    if entry.deadline_ns - now_ns < _MIN_LEFT_NS:
        return lost(entry, death.incarnation, "no time is left to run it again", "allow more time")
    return None


def begun_once(entry: Entry, end: int, not_begun: Collection[int]) -> str:
    """A block on the way to ``end`` that must not run twice and may have begun; '' = none."""
    plan = entry.plan
    if plan.once:
        for node in plan.lineage[end]:
            if node in plan.once and node not in not_begun:
                return plan.blocks[node]
    return ""


def begun_before(entry: Entry, plan: Plan) -> str:
    """A block on ``plan`` that must not run twice and may have begun for a task that has ended in
    an earlier attempt: an update, or a canary's end, leads another one there. '' = none."""
    for node in sorted(plan.once):
        for task in entry.kept.values():
            way = task.plan.lineage.get(task.node, ())
            if any(n in task.plan.once and task.plan.blocks[n] == plan.blocks[node] for n in way):
                return plan.blocks[node]
    return ""
