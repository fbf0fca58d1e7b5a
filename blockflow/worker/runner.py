"""Runner: loads the worker's blocks and computes its batches.

All of it happens in the worker's engine thread, but for the forwards of further lanes, each of
which has a thread of its own. It touches no socket and keeps no books.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass

import torch

from blockflow.core.errors import BlockError, BlockFlowError, RequestError, make_error
from blockflow.core.scarcity import named, no_room
from blockflow.engine.base import Engine
from blockflow.launch.environment import give_memory_back
from blockflow.repository.padding import blank
from blockflow.repository.repository import BlockRepository
from blockflow.tensormq.atwork import NO_LANE, WAITS_NS, AtWork
from blockflow.tensormq.cuda_completions import DeviceQueue
from blockflow.tensormq.memory import TensorMemory
from blockflow.worker.buffer_pool import BufferPool
from blockflow.worker.copies import InputCopies
from blockflow.worker.failpoints import FailPoints
from blockflow.worker.gathering import gathered, joined
from blockflow.worker.stage import Stage
from blockflow.worker.ticket import FILL, Batch, Ticket

_LOG = logging.getLogger("blockflow.worker")


@dataclass(frozen=True, slots=True)
class Loaded:
    """All blocks are loaded and warm, or ``error`` says why not."""

    load_ms: float
    warm_ms: float
    error: BlockFlowError | None = None


class Runner:
    """Used by the engine thread, and by further lanes for :meth:`compute_beside`.

    Args:
        stages: by number; their engines are made and not loaded.
        points: failpoints of this process.
        memory: of this worker; None computes without a device.
        at_work: gets to know what is computed, for whoever finds this process dead or stuck.

    Attributes:
        threads: the intra-op threads in use, of each lane.
        landed: called, in another thread, with a batch that :meth:`compute` has left ``landing``.
        copied: by stage, what was copied of its inputs.
        pool: memory of what stays in this process.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        points: FailPoints,
        memory: TensorMemory | None = None,
        at_work: AtWork | None = None,
    ) -> None:
        self._memory = memory
        self._at_work = at_work
        self._stages = stages
        self._failpoints = points
        self.pool = BufferPool()
        self._dtypes = {n: getattr(torch, s.contract.output.dtype) for n, s in stages.items()}
        self._device_done_ns = 0
        self.landed: Callable[[Batch], None] = lambda _: None
        self.copied = {number: InputCopies() for number in stages}
        self.threads = max((s.engine.options.threads for s in stages.values()), default=1)

    def load(self, repository: BlockRepository) -> Loaded:
        """Load and warm up every block."""
        begin = time.monotonic_ns()
        try:
            with suppress(RuntimeError):  # already set: a process hosts one worker but in tests
                torch.set_num_interop_threads(1)
            for stage in self._stages.values():
                self._failpoints.hit("before_load", stage.name)
                block = stage.spec.block
                kind = stage.engine.variant
                digest = block.digest if kind is None else block.variants[kind].digest
                with repository.artifact(block.name, digest=digest, variant=kind) as path:
                    stage.engine.load(path)
                self._failpoints.hit("after_load", stage.name)
            loaded = time.monotonic_ns()
            # Before the first forward: what an engine then reserves and does not touch (oneDNN's
            # scratch, megabytes) must not lie on pages that the load has dirtied.
            release_load_memory()
            warm = time.monotonic_ns()
            for stage in self._stages.values():
                stage.engine.warm_up(1)
        except Exception as exc:
            return Loaded(0.0, 0.0, _not_loaded(exc))
        end = time.monotonic_ns()
        return Loaded((loaded - begin) / 1e6, (end - warm) / 1e6)

    def compute(self, batch: Batch) -> None:
        """Fill in the batch's result and times, or its errors.

        On a device the result may not be there yet, but everything that makes it is ordered. One
        that has to come to the host is ``landing`` then, and lands in another thread: the next
        batch can be ordered meanwhile.

        Raises:
            CudaError: the device is lost; who was at work stays named.
        """
        memory = self._memory
        if memory is not None and memory.device is not None:
            self._order(memory, memory.device.queue, batch)
            return
        lane = self._name(batch)
        try:
            self._compute(batch, lane)
        finally:
            self._unname(lane)

    def compute_beside(self, batch: Batch) -> None:
        """:meth:`compute` in the thread of a further lane, beside other batches."""
        # torch keeps both for each thread that computes.
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with torch.inference_mode():
            self.compute(batch)

    def sent(self) -> None:
        """The messages of what was computed last have left: what is to follow it on a device may
        take its share of the interpreter."""
        if self._memory is not None and self._memory.device is not None:
            self._memory.device.completions.go_on()

    @property
    def concurrent(self) -> bool:
        """Whether every engine here can compute beside the others."""
        return all(stage.engine.concurrent for stage in self._stages.values())

    def _order(self, memory: TensorMemory, queue: DeviceQueue, batch: Batch) -> None:
        """:meth:`compute` on a device, which works on when this returns.

        It tells a kernel's error late, with whatever is asked of it next, and is lost then. So a
        batch is at work until the device is past it, and a suspect has the device for itself.
        """
        suspect = any(t.item.alone for t in batch.tickets)
        lane, batch.waits = NO_LANE, batch.limit_ns > 0
        if suspect:
            queue.settle()
        # Who has no time-out needs no waking more for when its time begins.
        began = (lambda: self._began(batch, lane)) if batch.waits else None
        with memory.batch(batch.stage, lambda: self._unname(lane), began):
            lane = self._name(batch)
            if lane == NO_LANE and self._at_work is not None:
                queue.settle()  # what was done is not crossed out yet
                lane = self._name(batch)
            self._compute(batch, lane)
        if suspect:
            queue.settle()
        if batch.out is not None:
            batch.landing = batch.out.finish(lambda ns: self._land(batch, ns))

    def _began(self, batch: Batch, lane: int) -> None:
        """The device comes to the batch: its time begins."""
        batch.forward_ns = time.monotonic_ns()
        batch.waits = False
        if self._at_work is not None:
            self._at_work.renew(lane)

    def _land(self, batch: Batch, copied_ns: int) -> None:
        """The device's time belongs to the compute, the copy not. While the device was at the batch
        before, this one has waited."""
        done = time.monotonic_ns() - copied_ns
        begun = min(max(batch.compute_from_ns, self._device_done_ns), done)
        batch.started_ns += begun - batch.compute_from_ns
        batch.compute_from_ns, batch.compute_to_ns = begun, done
        self._device_done_ns = done
        self.landed(batch)

    def _name(self, batch: Batch) -> int:
        """Write down who is at work from now on."""
        items = [t.item for t in batch.tickets]
        if self._at_work is None:
            return NO_LANE
        return self._at_work.begin(batch.stage, items, WAITS_NS if batch.waits else 0)

    def _unname(self, lane: int) -> None:
        if self._at_work is not None:
            self._at_work.end(lane)

    def _compute(self, batch: Batch, lane: int) -> None:
        stage = self._stages[batch.stage]
        engine = stage.free.pop()
        try:
            whole = None if batch.out is None else batch.out.tensor()
            try:
                self._forward(stage, engine, batch, batch.tickets, whole)
                if self._failpoints.armed and not batch.probe:
                    self._failpoints.hit("after_forward", stage.name)
            except Exception as exc:
                self._failed(stage, engine, batch, exc, whole, lane)
            if batch.cuts and batch.result is not None:
                self._blank(batch)
        except Exception as exc:  # no memory for the output itself: the worker goes on without it
            batch.result = None
            error = _without_output(stage, exc)
            for ticket in batch.tickets:
                batch.errors.setdefault(ticket.key, error)
        finally:
            stage.free.append(engine)
        if not batch.compute_to_ns:
            batch.compute_to_ns = time.monotonic_ns()
            batch.compute_from_ns = batch.compute_from_ns or batch.compute_to_ns

    def set_threads(self, threads: int) -> None:
        """Compute with so many intra-op threads from the next batch on.

        All blocks do, or all go on as they were.
        """
        if threads < 1:  # which means "as many as you like" to some engines
            _LOG.error("%d threads cannot compute", threads)
            return
        changed: list[Stage] = []
        for stage in self._stages.values():
            if not _threads_set(stage, threads):
                break
            changed.append(stage)
        else:
            self.threads = threads
            return
        for stage in changed:  # what is said of this worker's threads is said of all its blocks
            _threads_set(stage, self.threads)

    def widen(self, lanes: int) -> None:
        """Make ready for so many forwards of one block at once, where its engine can."""
        for stage in self._stages.values():
            stage.widen(lanes)

    def close(self) -> None:
        """Free the engines."""
        for stage in self._stages.values():
            for engine in stage.engines:
                engine.close()

    def _forward(
        self,
        stage: Stage,
        engine: Engine,
        batch: Batch,
        tickets: Sequence[Ticket],
        out: torch.Tensor | None,
    ) -> None:
        """One forward of ``tickets``; the result is in ``out``, or in ``batch.result`` without."""
        x, joined = gathered(tickets, batch.pad_to, stage.fill, self.pool)
        if self._memory is not None and self._memory.device is not None:
            self._memory.begins()
        if joined and not batch.probe:
            self.copied[stage.number].add(joined, x.nbytes)
        if self._failpoints.armed and not batch.probe:
            self._failpoints.hit("before_forward", stage.name)
        place = out
        if engine.copies_out:
            place = None
        elif out is None and not x.is_cuda:
            dims = stage.output_dims(tickets[0].source.dtype, x.shape)
            place = self.pool.take(dims, self._dtypes[stage.number])
        if not batch.compute_from_ns:
            batch.compute_from_ns = time.monotonic_ns()
        y = engine.run(x, place)
        batch.compute_to_ns = time.monotonic_ns()
        if engine.copied.inputs and not batch.probe:
            self.copied[stage.number].add(engine.copied.inputs, x.nbytes)
        batch.copies += engine.copied.outputs
        if out is None or place is not None:
            batch.result = y
            return
        # Copied here and not by the engine, so that the copy is accounted as overhead.
        if y.shape != out.shape or y.dtype != out.dtype:
            raise BlockError(
                "OUTPUT_MISMATCH",
                f"the result is {y.dtype}{list(y.shape)}, the contract says "
                f"{out.dtype}{list(out.shape)}",
                where=stage.name,
            )
        out.copy_(y)
        batch.result = out
        batch.copies += 1

    def _failed(
        self,
        stage: Stage,
        engine: Engine,
        batch: Batch,
        exc: Exception,
        whole: torch.Tensor | None,
        lane: int,
    ) -> None:
        """Blame the guilty only: with batch mates, each ticket is run again by itself. Where
        nothing may run twice, nobody can be told from the guilty."""
        count = len(batch.tickets)
        if count == 1 or not batch.replayable:
            error = _as_error(stage, exc)
            if count > 1:
                why = f"one of a batch of {count}, which must not run twice: {error.message}"
                error = make_error(error.code, why[:500], where=error.where)
            batch.errors.update((t.key, error) for t in batch.tickets)
            return
        # A device may still be at what was ordered for all of them.
        on_device = self._memory is not None and self._memory.device is not None
        results: list[torch.Tensor | None] = []
        row = 0
        for ticket in batch.tickets:
            part = None if whole is None else whole[row : row + ticket.rows]
            row += ticket.rows
            batch.forward_ns = time.monotonic_ns()  # the block's time-out is for each of them
            if ticket.deadline_ns <= batch.forward_ns:  # the batch, and its mates, took time
                late = f"expired before it could be run alone at {stage.name!r}"
                batch.errors[ticket.key] = RequestError("DEADLINE_EXCEEDED", late)
                results.append(None)
                continue
            if self._at_work is not None:
                if on_device:
                    if not batch.waits:
                        self._at_work.renew(lane)
                else:
                    self._at_work.restart(lane, batch.stage, [ticket.item])
            try:
                self._forward(stage, engine, batch, (ticket,), part)
                results.append(batch.result)
            except Exception as again:
                batch.errors[ticket.key] = _as_error(stage, again)
                results.append(None)
        batch.result = whole
        if whole is None and any(r is not None for r in results):
            batch.result = joined(batch.tickets, results)
            batch.copies += 1

    def _blank(self, batch: Batch) -> None:
        """Zeros beyond each ticket's own length, if a stage here goes on with the padded tensor."""
        tickets = batch.tickets
        if not any(s in self._stages for t in tickets for s, _ in t.item.path.targets[t.item.hop]):
            return
        row = 0
        for ticket in tickets:
            own = batch.result[row : row + ticket.rows]
            blank(own, batch.cuts[ticket.key], FILL)
            row += ticket.rows


def _not_loaded(exc: Exception) -> BlockFlowError:
    """NO_SPACE, by which another start is tried, also where a file could not be opened for want of
    a descriptor, or the first forward found no memory."""
    if isinstance(exc, BlockFlowError):
        return named(exc)
    _LOG.error("loading failed", exc_info=exc)
    why = f"{type(exc).__name__}: {exc}"
    return no_room(exc, why, "") or BlockError("LOAD_FAILED", why)


def _threads_set(stage: Stage, threads: int) -> bool:
    try:
        stage.engine.set_threads(threads)
    except Exception as exc:  # whatever a framework raises: what is loaded still computes
        _LOG.error("threads of %s stay: %s", stage.name, exc)
        return False
    return True


def _as_error(stage: Stage, exc: Exception) -> BlockFlowError:
    if isinstance(exc, BlockFlowError):
        return copy(exc)  # without its frames and causes: they know the batch, which keeps it
    _LOG.error("engine of %s raised", stage.name, exc_info=exc)
    return BlockError("BLOCK_FAILED", f"{type(exc).__name__}: {exc}"[:500], where=stage.name)


def _without_output(stage: Stage, exc: Exception) -> BlockFlowError:
    """NO_SPACE for want of memory, as where an arena has none; it is not the block's fault."""
    lacking = no_room(exc, "no memory for an output", stage.name)
    if lacking is None:
        return _as_error(stage, exc)
    _LOG.warning("no memory for an output of %s: %s", stage.name, str(exc))
    return lacking


def release_load_memory() -> None:
    """Give back what loading, or the readiness probe, has left: dead objects, free pages.

    The allocator is told to keep freed memory (see ``launch.environment``), which is right for
    activations and wrong for the file buffers of a load. What stays is taken out of the collector's
    sight: a full collection over a loaded program's graph would stall a request for milliseconds.
    """
    gc.collect()
    gc.freeze()
    give_memory_back()
