"""Stage executors and the buffers between them: DVABatch's state machine, as tables.

Cui et al., "DVABatch" (USENIX ATC 2022), "Managing Stage Executors". Between two stages there are n
buffers; buffer j before a stage and buffer j after it are its *pair* j. An executor may run a batch
on a legal pair: the input available, the output available or invalid. When it is done, its input is
invalid and its output is what it was before; and once it is active again it makes the upstream
input of that pair available. With one pair that keeps every executor inactive until the batch has
left the last stage: batches run serially. With two they overlap.

No tensor lies in these buffers: they say how many batches may be between which stages, and in
which order they pass.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from enum import StrEnum
from itertools import repeat


class Executor(StrEnum):
    ACTIVE = "active"
    CHECKING = "checking"
    WORKING = "working"
    INACTIVE = "inactive"


class Event(StrEnum):
    TAKE = "take on a legal pair"
    BLOCKED = "take on a pair that is not legal"
    GONE = "the batch is gone"
    DONE = "done, a pair is legal"
    DONE_NONE = "done, no pair is legal"
    LEGAL = "a pair becomes legal"


X, E = Executor, Event

EXECUTOR_TABLE: Mapping[tuple[Executor, Event], Executor] = {
    (X.ACTIVE, E.TAKE): X.WORKING,
    (X.ACTIVE, E.BLOCKED): X.CHECKING,
    (X.CHECKING, E.TAKE): X.WORKING,
    (X.CHECKING, E.BLOCKED): X.CHECKING,
    (X.CHECKING, E.GONE): X.ACTIVE,
    (X.WORKING, E.DONE): X.ACTIVE,
    (X.WORKING, E.DONE_NONE): X.INACTIVE,
    (X.INACTIVE, E.LEGAL): X.ACTIVE,
}


class Buffer(StrEnum):
    AVAILABLE = "available"
    WRITING = "in-writing"
    READING = "in-reading"
    INVALID = "invalid"


class Use(StrEnum):
    READ = "read begins"
    CONSUMED = "read ends"
    RELEASE = "the next executor is active again"
    WRITE = "write begins"


B, U = Buffer, Use

BUFFER_TABLE: Mapping[tuple[Buffer, Use], Buffer] = {
    (B.AVAILABLE, U.READ): B.READING,
    (B.READING, U.CONSUMED): B.INVALID,
    (B.INVALID, U.RELEASE): B.AVAILABLE,
    (B.AVAILABLE, U.WRITE): B.WRITING,
    (B.INVALID, U.WRITE): B.WRITING,
}
"""The end of a write is not in it: the buffer goes back to what it was when the write began, or to
available if the next executor has become active meanwhile."""


class IllegalMove(RuntimeError):
    """A defect in BlockFlow: the event cannot happen in this state."""


def advance(state: Executor, event: Event) -> Executor:
    """The executor's next state.

    Raises:
        IllegalMove: the table has no such move.
    """
    try:
        return EXECUTOR_TABLE[(state, event)]
    except KeyError:
        raise IllegalMove(f"{event!s} in state {state}") from None


def use(state: Buffer, what: Use) -> Buffer:
    """The buffer's next state.

    Raises:
        IllegalMove: the table has no such move.
    """
    try:
        return BUFFER_TABLE[(state, what)]
    except KeyError:
        raise IllegalMove(f"{what!s} of a buffer that is {state}") from None


def diagram() -> str:
    """Both tables as one mermaid state diagram."""
    lines = ["stateDiagram-v2", "    state Executor {", "        [*] --> active"]
    lines += [f"        {a} --> {b}: {e}" for (a, e), b in EXECUTOR_TABLE.items() if a != b]
    lines += ["    }", "    state Buffer {", "        [*] --> available"]
    lines += [
        f"        {_word(a)} --> {_word(b)}: {e}" for (a, e), b in BUFFER_TABLE.items() if a != b
    ]
    lines += [f"        in_writing --> {b}: write ends" for b in (B.AVAILABLE, B.INVALID)]
    return "\n".join([*lines, "    }"])


def _word(state: Buffer) -> str:
    return state.value.replace("-", "_")


class Pipeline:
    """The executors of a worker's stages in a row, with ``pairs`` buffer pairs each.

    A batch is told by (level, pair): it rests in input buffer ``pair`` of stage ``level``. What
    leaves the row before its end, skips a stage or merges with another batch does not vanish: its
    pair passes the rest of the row as an empty batch, as soon as it is legal.

    Args:
        levels: how many stages.
        pairs: buffer pairs, at least 1.
    """

    def __init__(self, levels: int, pairs: int) -> None:
        self.levels = levels
        self.pairs = range(pairs)
        self.executors = [X.ACTIVE] * levels
        self.buffers = [[B.AVAILABLE] * pairs for _ in range(levels)]
        self._held: list[set[int]] = [set() for _ in self.pairs]  # levels before which batches rest
        self._before: dict[tuple[int, int], Buffer] = {}
        self._owed: list[list[int]] = [[] for _ in range(levels)]
        self._checked: list[int | None] = [None] * levels
        self._empties: list[tuple[int, int]] = []
        self._restless: set[int] = set()  # levels whose executors are inactive, or owe a release

    @property
    def at_rest(self) -> bool:
        """Everything as at the beginning."""
        return (
            all(x is X.ACTIVE for x in self.executors)
            and all(b is B.AVAILABLE for row in self.buffers for b in row)
            and not any(self._held)
        )

    def legal(self, level: int, pair: int) -> bool:
        """Whether a batch on ``pair`` could run at ``level``."""
        if self.buffers[level][pair] is not B.AVAILABLE:
            return False
        after = level + 1
        if after == self.levels:
            return True
        # Data that rests in the output still waits for the next executor.
        output = self.buffers[after][pair]
        return (output is B.AVAILABLE or output is B.INVALID) and after not in self._held[pair]

    def _any_legal(self, level: int) -> bool:
        return any(map(self.legal, repeat(level), self.pairs))

    def enter(self, level: int, avoid: Container[int] = ()) -> int | None:
        """Put a batch before ``level``: the pair that it travels on, None when all are taken."""
        for pair in self.pairs:
            if pair not in avoid and level not in self._held[pair] and self.legal(level, pair):
                self._held[pair].add(level)
                return pair
        return None

    def full(self, level: int) -> bool:
        """Whether a batch rests on every pair before ``level``."""
        return all(level in held for held in self._held)

    def working(self, level: int) -> bool:
        """Whether the executor runs a batch."""
        return self.executors[level] is X.WORKING

    def can_start(self, level: int, pair: int) -> bool:
        """Whether the batch can run now; if not, its executor goes on checking."""
        if self.executors[level] is X.WORKING:
            return False
        if self.legal(level, pair):
            return True
        if self.executors[level] is not X.INACTIVE:
            self.executors[level] = advance(self.executors[level], E.BLOCKED)
            self._checked[level] = pair
        return False

    def start(self, level: int, pair: int) -> None:
        """The batch runs.

        Raises:
            IllegalMove: it may not.
        """
        self.executors[level] = advance(self.executors[level], E.TAKE)
        self._checked[level] = None
        self._read(level, pair)

    def finish(self, level: int, pair: int) -> None:
        """The batch has run and rests before the next level, if there is one."""
        self._consume(level, pair)
        more = level + 1 == self.levels or self._any_legal(level)
        self.executors[level] = advance(self.executors[level], E.DONE if more else E.DONE_NONE)
        if not more:
            self._restless.add(level)
        self._settle()

    def skip(self, level: int, pair: int) -> bool:
        """Let the batch pass ``level`` without running; False when it has to wait before it."""
        if not self.legal(level, pair):
            return False
        self._leave(level, pair)
        self._read(level, pair)
        self._consume(level, pair)
        self._settle()
        return True

    def vacate(self, level: int, pair: int) -> None:
        """The batch before ``level`` is no more; past the last level there is nothing to do."""
        if level >= self.levels:
            return
        self._leave(level, pair)
        self._empties.append((level, pair))
        self._settle()

    # --- steps -----------------------------------------------------------------------------------

    def _leave(self, level: int, pair: int) -> None:
        """The batch will not run at ``level``: its executor need not check for it any more."""
        if self._checked[level] == pair:
            self.executors[level] = advance(self.executors[level], E.GONE)
            self._checked[level] = None

    def _read(self, level: int, pair: int) -> None:
        self.buffers[level][pair] = use(self.buffers[level][pair], U.READ)
        if level + 1 < self.levels:
            self._before[level, pair] = self.buffers[level + 1][pair]
            self.buffers[level + 1][pair] = use(self.buffers[level + 1][pair], U.WRITE)

    def _consume(self, level: int, pair: int) -> None:
        self.buffers[level][pair] = use(self.buffers[level][pair], U.CONSUMED)
        self._let_go(level, pair)
        if level + 1 < self.levels:
            self.buffers[level + 1][pair] = self._before.pop((level, pair))
            self._held[pair].add(level + 1)
        else:
            # Nobody comes after the last executor: it is active again at once.
            self.buffers[level][pair] = use(self.buffers[level][pair], U.RELEASE)

    def _let_go(self, level: int, pair: int) -> None:
        """The batch rests before ``level`` no more; the executor tells the one before it."""
        self._held[pair].discard(level)
        if level:
            self._owed[level].append(pair)
            self._restless.add(level)

    def _release(self, level: int, pair: int) -> None:
        state = self.buffers[level][pair]
        if state is B.INVALID:
            self.buffers[level][pair] = use(state, U.RELEASE)
        elif state is B.WRITING:
            self._before[level - 1, pair] = B.AVAILABLE

    def _settle(self) -> None:
        """Let everything happen that needs no batch to run: wake executors, pass empty batches."""
        moved = True
        while moved:
            moved = False
            for level in sorted(self._restless, reverse=True):  # each tells only on those before
                if self.executors[level] is X.INACTIVE:
                    if not self._any_legal(level):
                        continue
                    self.executors[level] = advance(X.INACTIVE, E.LEGAL)
                for pair in self._owed[level]:
                    self._release(level - 1, pair)
                self._owed[level].clear()
                self._restless.discard(level)
            for i, (level, pair) in enumerate(self._empties):
                if self.legal(level, pair):
                    del self._empties[i]
                    if level == max(self._held[pair]):
                        self._let_go(level, pair)  # to the end, where it would leave all as it was
                    else:
                        self._read(level, pair)
                        self._consume(level, pair)
                        self._empties.append((level + 1, pair))
                    moved = True
                    break
