"""The published tasks as a client knows them, and the questions of callers about them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from blockflow.client.outcome import Described, Failed, Link, Outcome
from blockflow.core.errors import BlockFlowError, RequestError, WireError, make_error
from blockflow.core.routing import TaskRoute
from blockflow.wire.client import UNASKED, Describe, Description, Reply, encode_to_dispatcher

PROBE_WAIT_NS = 500_000_000
"""A request without a deadline waits at most this long to learn its tasks' own."""

READY_POLL_NS = 50_000_000
READY_POLL_CAP_NS = 1_000_000_000
_LATER = 8
"""``wait_ready`` asks again after READY_POLL_NS, and more and more rarely the longer it has waited:
after an eighth of that time. Many clients may wait for long."""


@dataclass(slots=True)
class _Question:
    """``wanted`` None: what is published now; else: wait until all of it (or anything) is."""

    request_id: bytes
    wanted: frozenset[str] | None
    deadline_ns: int
    began_ns: int
    asked_ns: int

    def again_ns(self) -> int:
        pause = max((self.asked_ns - self.began_ns) // _LATER, READY_POLL_NS)
        return min(self.deadline_ns, self.asked_ns + min(pause, READY_POLL_CAP_NS))


class Catalog:
    """Events in, headers to send and outcomes out; ``link`` is shared with the core.

    Attributes:
        open: the questions that wait.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.open: dict[bytes, _Question] = {}
        self._tasks: dict[str, TaskRoute] | None = None
        self._epoch = 0
        self._probed_ns: int | None = None
        self._asked_ns = 0  # by whoever waits for tasks, once more

    def expects(self, request_id: bytes) -> bool:
        """Whether a description of this name answers something: a question, or the client's own."""
        return request_id in self.open or (request_id == UNASKED and self._probed_ns is not None)

    def ask(
        self, request_id: bytes, wanted: Iterable[str] | None, timeout_ms: int, now_ns: int
    ) -> list[bytes]:
        """Take a question; returns what to send for it now."""
        self.open[request_id] = _Question(
            request_id,
            None if wanted is None else frozenset(wanted),
            now_ns + timeout_ms * 1_000_000,
            now_ns,
            now_ns,
        )
        return [_describe(request_id)] if self._link.up else []

    def on_connected(self) -> list[bytes]:
        """A new connection may lead to another system: forget, and ask anew."""
        self._forget()
        return [_describe(rid) for rid in self.open]

    def on_epoch(self, epoch: int) -> None:
        """A reply names its epoch; a newer one than ours may have other tasks."""
        if epoch > self._epoch:
            self._epoch = epoch
            self._forget()

    def on_description(self, msg: Description) -> list[Outcome]:
        """Raises WireError when there is no question to blame a broken description on."""
        try:
            routes = [TaskRoute.from_dict(t) for t in msg.tasks]
        except ValueError as exc:
            error = WireError("MALFORMED_MESSAGE", f"a published task cannot be read: {exc}"[:500])
            if self.open.pop(msg.request_id, None) is None:
                raise error from exc
            return [Failed(msg.request_id, error)]
        self._tasks = {r.name: r for r in routes}
        self._epoch = msg.epoch
        self._probed_ns = None
        out: list[Outcome] = []
        for q in list(self.open.values()):
            if q.request_id == msg.request_id if q.wanted is None else self._satisfied(q.wanted):
                del self.open[q.request_id]
                out.append(Described(q.request_id, dict(self._tasks)))
        return out

    def due(self, request_id: bytes) -> int:
        """When :meth:`on_tick` must look at this question next."""
        q = self.open[request_id]
        if q.wanted is not None:
            return q.again_ns()
        if not self._link.up:
            return min(q.deadline_ns, self._link.gives_up_at(q.asked_ns))
        return q.deadline_ns

    def on_tick(self, request_id: bytes, now_ns: int) -> tuple[list[Outcome], list[bytes]]:
        """A question's time has come: ask again or end it."""
        q = self.open[request_id]
        if q.wanted is not None and now_ns < q.deadline_ns:
            q.asked_ns = now_ns
            # An answer is one for all who wait so: thousands would ask for nothing else.
            if not self._link.up or now_ns - self._asked_ns < READY_POLL_NS:
                return [], []
            self._asked_ns = now_ns
            return [], [_describe(request_id)]
        del self.open[request_id]
        if not self._link.up:
            return [Failed(request_id, self._link.lost("no connection"))], []
        if q.wanted is not None and self._satisfied(q.wanted):  # it had no time to ask, but knows
            return [Described(request_id, dict(self._tasks or {}))], []
        if q.wanted is None or self._tasks is None:
            error = make_error("TIMEOUT", "no answer in time", where=self._link.address)
            return [Failed(request_id, error)], []
        missing = ", ".join(sorted(q.wanted - self._tasks.keys())) or "any task"
        return [
            Failed(
                request_id,
                RequestError(
                    "NOT_READY",
                    f"not published in time: {missing}",
                    where=self._link.address,
                    hint="apply a topology that has it, or look at `blockflow status`",
                ),
            )
        ], []

    def close(self) -> list[Outcome]:
        return self.end_all(
            RequestError("CANCELLED", "the client was closed", where=self._link.address)
        )

    def end(self, request_id: bytes | None, error: BlockFlowError) -> list[Outcome]:
        """End a question, if there is one of this name, with ``error``."""
        if request_id is None or self.open.pop(request_id, None) is None:
            return []
        return [Failed(request_id, error)]

    def on_refusal(self, msg: Reply) -> list[Outcome]:
        """A Reply in a Description's place: the question could not be read, or answered."""
        errors = [r.error for r in msg.results if r.error is not None]
        return self.end(msg.request_id, errors[0]) if errors else []

    def end_all(self, error: BlockFlowError) -> list[Outcome]:
        """End every question with ``error``."""
        return [o for rid in list(self.open) for o in self.end(rid, error)]

    # --- deadlines -------------------------------------------------------------------------------

    def knows(self, now_ns: int) -> tuple[bool, list[bytes]]:
        """Whether tasks' own deadlines are known (or given up on), and what to send to learn."""
        if self._tasks is not None:
            return True, []
        if self._probed_ns is None:
            self._probed_ns = now_ns
            return False, [_describe(UNASKED)]
        return now_ns >= self._probed_ns + PROBE_WAIT_NS, []

    def deadline_ms(self, tasks: Sequence[str]) -> int | None:
        """The shortest deadline that the topology gives ``tasks``, None when none is known."""
        known = self._tasks or {}
        return min([known[t].deadline_ms for t in tasks if t in known], default=None)

    def _forget(self) -> None:
        self._tasks = None
        self._probed_ns = None

    def _satisfied(self, wanted: frozenset[str]) -> bool:
        return bool(self._tasks) and wanted <= (self._tasks or {}).keys()


def _describe(request_id: bytes) -> bytes:
    return encode_to_dispatcher(Describe(request_id))
