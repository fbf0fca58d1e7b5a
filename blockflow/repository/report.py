"""ExportReport: what an export made, block by block, and how well it equals the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction that is done (0..1)."""


def silent(_what: str, _fraction: float) -> None:
    """No progress is shown."""


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One stored block.

    Attributes:
        name: the block.
        part: what of the model it holds.
        input: input contract, as text.
        output: output contract, as text.
        parameters: number of parameters.
        state_bytes: bytes of parameters and buffers.
        ms: median time of one row on one thread, on this machine.
        output_bytes: bytes of one output row, dynamic dims at their largest.
        sha256: the artifact's digest.
        file_bytes: the artifact's size.
        padding_error: largest difference that padding made to a result, as a part of its largest
            value; None for a block that may not be padded.
        notes: places where a trace keeps what it found for one input.
    """

    name: str
    part: str
    input: str
    output: str
    parameters: int
    state_bytes: int
    ms: float
    output_bytes: int
    sha256: str
    file_bytes: int
    padding_error: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExportReport:
    """All blocks of one export.

    Attributes:
        model: how the model was named.
        format: the artifacts' format.
        blocks: in the order of the chain (or of the tree's blocks).
        paths: each path of block names that equals the model (or one of its outputs).
        max_error: dims of the checked input, as text -> largest absolute difference.
        partial: last blocks of paths whose result the model does not return: it goes on after them.
    """

    model: str
    format: str
    blocks: tuple[BlockReport, ...]
    paths: tuple[tuple[str, ...], ...]
    max_error: dict[str, float]
    partial: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)
