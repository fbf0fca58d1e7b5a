"""PingBook: pings under way; who answered and how long it took. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blockflow.control.events import Send
from blockflow.wire.control import Ping, Pong


@dataclass(slots=True)
class Round:
    """One ping to several processes. ``answers``: incarnation -> (round trip ms, state)."""

    seq: int
    sent_ns: int
    deadline_ns: int
    waiting: dict[int, str]
    names: Mapping[int, str]
    answers: dict[int, tuple[float, str]] = field(default_factory=dict)

    def to_dict(self) -> list[dict[str, Any]]:
        """One entry per process asked; ``ok`` is false for those that did not answer in time."""
        out: list[dict[str, Any]] = []
        for incarnation, name in self.names.items():
            entry: dict[str, Any] = {"worker": name, "incarnation": incarnation}
            if incarnation in self.answers:
                rtt, state = self.answers[incarnation]
                entry |= {"ok": True, "rtt_ms": round(rtt, 3), "state": state}
            else:
                entry["ok"] = False
            out.append(entry)
        return out


class PingBook:
    """The rounds under way, by sequence number.

    Args:
        first: the numbers are above it.
    """

    def __init__(self, first: int = 0) -> None:
        self._seq = first
        self._rounds: dict[int, Round] = {}

    def begin(
        self, targets: Mapping[int, str], now_ns: int, timeout_ns: int
    ) -> tuple[Round, list[Send]]:
        """Ping ``targets`` (incarnation -> name)."""
        self._seq += 1
        ping = Round(self._seq, now_ns, now_ns + timeout_ns, dict(targets), dict(targets))
        if targets:
            self._rounds[ping.seq] = ping
        message = Ping(ping.seq)
        return ping, [Send(i, message) for i in targets]

    def pong(self, incarnation: int, message: Pong, now_ns: int) -> Round | None:
        """An answer came; returns the round if it was its last one."""
        ping = self._rounds.get(message.seq)
        if ping is None or ping.waiting.pop(incarnation, None) is None:
            return None
        ping.answers[incarnation] = ((now_ns - ping.sent_ns) / 1e6, message.state)
        return self._end(ping) if not ping.waiting else None

    def gone(self, incarnation: int) -> list[Round]:
        """A process died: it will not answer. Returns the rounds that end by it."""
        ended = []
        for ping in list(self._rounds.values()):
            if ping.waiting.pop(incarnation, None) is not None and not ping.waiting:
                ended.append(self._end(ping))
        return ended

    def tick(self, now_ns: int) -> list[Round]:
        """The rounds whose time is up."""
        return [self._end(p) for p in list(self._rounds.values()) if now_ns >= p.deadline_ns]

    def deadline(self) -> int | None:
        return min((p.deadline_ns for p in self._rounds.values()), default=None)

    def _end(self, ping: Round) -> Round:
        return self._rounds.pop(ping.seq)
