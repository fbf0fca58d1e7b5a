"""Engine: loads an artifact and runs ``forward(tensor) -> tensor``.

One thread at a time calls an engine, though not always the same one; implementations need no locks
and release the interpreter lock while they compute. Where several lanes compute one block at once,
each has a twin of its engine. Where to add one: docs/writing-an-engine.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from blockflow.core.fits import Fits
from blockflow.core.model import BlockInfo
from blockflow.core.scarcity import no_room
from blockflow.engine.copies import RunCopies


class WeightStore(Protocol):
    """Memory that several processes of this host have in common."""

    def hold(self, key: str, nbytes: int, pieces: Sequence[tuple[int, memoryview]]) -> Any | None:
        """A buffer of ``nbytes`` whose pages all have in common that ask for ``key``, until they
        write to them. It holds what the first one has put there, as (offset, bytes), and is good
        for as long as it is referred to. None: it cannot be had.
        """


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine shall compute.

    ``device`` is ``cpu`` or ``cuda:N``; ``threads`` is the number of intra-op threads, always given
    (a framework's default on every process oversubscribes the cores); ``precision`` is one of
    :data:`blockflow.core.engines.PRECISIONS`, or ``auto`` for :func:`create_engine` to resolve;
    ``extra`` holds engine-specific options of the topology. ``weights`` is for engines that can
    share their weights with other processes; None: each its own.
    """

    device: str = "cpu"
    threads: int = 1
    precision: str = "fp32"
    extra: Mapping[str, Any] = field(default_factory=dict)
    weights: WeightStore | None = None


class Engine(ABC):
    """One loaded block. The life is load -> warm_up -> run ... -> close.

    Attributes:
        name: of the engine in the registry.
        variant: which form of the artifact :meth:`load` wants; None is the reference artifact.
        copied: what the last run has copied, good until the next one begins. :meth:`run` resets it.
    """

    name: str = ""
    variant: str | None = None

    def __init__(self, block: BlockInfo, options: EngineOptions) -> None:
        self.block = block
        self.options = options
        self.copied = RunCopies()
        self._fits = Fits(block.contract, block.name)

    @abstractmethod
    def load(self, artifact: Path) -> None:
        """Load the verified artifact.

        Raises:
            BlockError: LOAD_FAILED, with the engine's own reason.
            SystemError_: NO_SPACE: the machine has not the memory for it, or no descriptor.
        """

    @abstractmethod
    def run(self, x: Any, out: Any | None = None) -> Any:
        """Compute one batch.

        Args:
            x: torch tensor that fits the block's input contract; a read-only view of a slot, so it
                is never written.
            out: contiguous torch tensor of the output's dims (a view of the output slot) or None.

        Returns:
            The output tensor; ``out`` itself when it was given, filled by the engine without a copy
            where it can, with one copy otherwise (``copies_out`` says which). Without ``out`` the
            result never shares memory with ``x``, whose slot may be released at once.

        Raises:
            RequestError: CONTRACT_MISMATCH or EMPTY_INPUT when ``x`` does not fit the contract.
            BlockError: BLOCK_FAILED when the computation raises, OUTPUT_MISMATCH when the result
                does not fit ``out`` or the contract.
        """

    @property
    @abstractmethod
    def copies_out(self) -> int:
        """Copies of the output that one ``run`` with ``out`` makes for the sake of ``out``: 0 or 1.

        With 1, a caller who has to account for the copy runs without, and makes it. What a
        framework copies inside, whoever gives the memory, is in ``copied`` alone.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the block's memory. The engine is not used afterwards."""

    @property
    def concurrent(self) -> bool:
        """Whether :meth:`run` may go on beside that of other engines in the same process, each in a
        thread of its own. On a device they would share its stream and the pool of its memory."""
        return self.options.device == "cpu"

    def twin(self) -> Engine | None:
        """Another one of the same loaded block, weights and all, for a thread beside this one's.

        It takes no memory but what a run of its own needs. What is changed at this one
        (:meth:`set_threads`) holds for both; each is closed by itself. None: what this engine keeps
        between two runs is not for two threads, so the block runs one batch at a time. Engines that
        are ``side_by_side`` in :data:`blockflow.core.engines.ENGINES` have twins on a CPU, but for
        blocks that :meth:`run` has to treat in another way.
        """
        return None

    def set_threads(self, threads: int) -> None:
        """Change the number of intra-op threads of a loaded engine, between two batches.

        Called in the engine thread; a :meth:`run` in a further lane may go on meanwhile, as it
        began. Here: torch's pool; each thread that computes has its own.

        Raises:
            BlockError: LOAD_FAILED where the block has to be opened anew for it and cannot be
                (SystemError_: NO_SPACE, as of :meth:`load`); the engine then goes on with the
                threads it had.
        """
        import torch  # computed tensors only: this room is where torch belongs

        torch.set_num_threads(threads)

    def warm_up(self, rows: int = 1) -> None:
        """Run the block on zeros so that the first request finds pools and code in place.

        Raises:
            SystemError_: NO_SPACE, as of :meth:`load`: what a block fails for here is no request's.
            BlockFlowError: as :meth:`run`.
        """
        try:
            self.run(self._zeros(rows))
        except Exception as e:
            name = self.block.name
            lacking = no_room(e, f"block {name!r} cannot be warmed up: {e}"[:500], name)
            if lacking is None:
                raise
            raise lacking from e

    def _zeros(self, rows: int) -> Any:
        """The smallest input of so many rows."""
        import torch  # computed tensors only: this room is where torch belongs

        spec = self.block.contract.input
        dtype = getattr(torch, spec.dtype)
        return torch.zeros(spec.least_dims(rows), dtype=dtype, device=self.options.device)
