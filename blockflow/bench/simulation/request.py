"""Request: one simulated query from its arrival to its one exit."""

from __future__ import annotations

from enum import StrEnum

from blockflow.dispatcher.plan import Plan


class Exit(StrEnum):
    """How a query left."""

    RESULT = "result"
    EXPIRED = "expired"
    REJECTED = "rejected"


class Request:
    """A query in the simulated system.

    Attributes:
        number: 1, 2, ... in order of arrival.
        rows: how many.
        length: value of the variable dim; None without one.
        came_ns: when it came to the Dispatcher.
        deadline_ns: nothing starts it after that, and it leaves then at the latest.
        plan: its way; None when it was rejected.
        wait_ns: in queues, all stages together.
        compute_ns: in forwards.
        left_ns: when it left; 0 before.
        exit: how it left; None before.
    """

    __slots__ = (
        "came_ns",
        "compute_ns",
        "deadline_ns",
        "exit",
        "left_ns",
        "length",
        "number",
        "plan",
        "rows",
        "task",
        "wait_ns",
    )

    def __init__(
        self, number: int, task: str, rows: int, length: int | None, came_ns: int, deadline_ns: int
    ) -> None:
        self.number = number
        self.task = task
        self.rows = rows
        self.length = length
        self.came_ns = came_ns
        self.deadline_ns = deadline_ns
        self.plan: Plan | None = None
        self.wait_ns = 0
        self.compute_ns = 0
        self.left_ns = 0
        self.exit: Exit | None = None

    def __repr__(self) -> str:
        return f"query {self.number} ({self.task}, {self.rows} rows)"
