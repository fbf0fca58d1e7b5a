"""LogStream: what stands in the place of a standard stream, and never waits for long."""

from __future__ import annotations

import io


class LogStream(io.TextIOBase):
    """Text that goes to a descriptor; each kind decides for itself what becomes of the rest.

    Args:
        number: of the descriptor.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        return "backslashreplace"

    def fileno(self) -> int:
        return self._number

    def writable(self) -> bool:
        return True

    def _bytes(self, text: str) -> memoryview:
        """Raises TypeError, as every stream of text does, for what is none: libraries (click) find
        out so that they must not write bytes."""
        return memoryview(str.encode(text, self.encoding, self.errors))


def lost_lines(count: int, why: str) -> str:
    """The line that says so, in the place of ``count`` lost ones."""
    lines = "a line is" if count == 1 else f"{count} lines are"
    return f"blockflow: {lines} lost here: {why}\n"
