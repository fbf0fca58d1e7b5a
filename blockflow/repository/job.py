"""Job: the blocks that one export makes of a model, before they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from blockflow.core.model import BlockInfo, Contract, Padding
from blockflow.repository.report import Progress
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel

Runner = Callable[[Tensor], Tensor]

Serving = Callable[[BlockInfo, Path], AbstractContextManager[Mapping[str, Runner]]]
"""A file of a block, loaded by the engine that will serve it, under that engine's name."""


@dataclass(slots=True)
class Piece:
    """One block in the making.

    Attributes:
        name: of the block.
        stage: the module.
        contract: input and output.
        example: an input with at least two rows.
        part: what of the model it holds.
        position: in its path, from 1.
        of: length of the longest path.
        padding: what it promises of its input.
        notes: what its format may have lost.
        int_below: integers of its input are smaller; None: not known, or there are none.
    """

    name: str
    stage: nn.Module
    contract: Contract
    example: Tensor
    part: str
    position: int = 1
    of: int = 1
    padding: Padding | None = None
    notes: tuple[str, ...] = ()
    int_below: int | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What to store, where, and what it must equal.

    ``reference`` gives, for an input of the model, the expected output of each path (by its last
    block's name). Without ``replace_stored`` versions that are there when it comes to storing are
    not replaced. ``partial`` are last blocks that the model does not end with. With ``serving`` the
    blocks' engine has to compute what the blocks do.
    """

    loaded: LoadedModel
    repository: BlockRepository
    pieces: Sequence[Piece]
    paths: Sequence[Sequence[str]]
    reference: Callable[[Tensor], Mapping[str, Tensor]]
    format: str
    version: str
    replace_stored: bool
    progress: Progress
    partial: Sequence[str] = ()
    serving: Serving | None = None

    def info(self, piece: Piece) -> BlockInfo:
        """The block as it will be, as far as its engine asks."""
        unset = "0" * 64
        return BlockInfo(piece.name, self.version, unset, self.format, piece.contract, 0, 0)
