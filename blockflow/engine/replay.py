"""Replay: run a module by something prepared for its input's dims; plainly where that fails.

Two preparations, both for CUDA devices: a recorded CUDA graph, which replaces the launches of many
small kernels by one, and torch.compile, which fuses them. Neither may make a block fail that runs
without it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

from blockflow.engine.copies import RunCopies
from blockflow.engine.torch_engine import Forward

_LOG = logging.getLogger("blockflow.engine")

GRAPHS_KEPT = 32
"""A graph holds memory for all its activations; further dims run eagerly."""

_CAPTURES = 3
"""What another thread asks of the device meanwhile may spoil one capture, and not the next."""

Prepare = Callable[[Forward, Tensor], Forward]
"""``prepare(forward, example)`` -> the same function, quicker, for inputs like the example."""


class Replay:
    """``forward``, prepared per key of the input.

    Args:
        what: names the preparation in the log.
        forward: the plain function.
        prepare: may raise anything; the reason is logged and ``forward`` used.
        tries: how often it may fail for a key until that is final.
        key: inputs with the same key share one preparation.
        most: how many are kept.
    """

    def __init__(
        self,
        what: str,
        forward: Forward,
        prepare: Prepare,
        key: Callable[[Tensor], Hashable],
        most: int = GRAPHS_KEPT,
        tries: int = 1,
    ) -> None:
        self._what = what
        self._plain = forward
        self._prepare = prepare
        self._key = key
        self._most = most
        self._tries = tries
        self._failed: Counter[Hashable] = Counter()
        self._ready: dict[Hashable, Forward] = {}
        self._full = False

    def __call__(self, x: Tensor) -> Tensor:
        key = self._key(x)
        run = self._ready.get(key)
        if run is None:
            run = self._make(key, x)
        return run(x)

    def _make(self, key: Hashable, x: Tensor) -> Forward:
        if len(self._ready) >= self._most:
            if not self._full:
                _LOG.warning(
                    "%s: %d are kept; inputs %s and other new ones run eagerly",
                    self._what,
                    self._most,
                    list(x.shape),
                )
            self._full = True
            return self._plain
        try:
            made = self._prepare(self._plain, x)
        except Exception as e:
            # As text: a record that is kept would keep the failed preparation's tensors.
            _LOG.warning("%s failed for %s, runs eagerly: %s", self._what, list(x.shape), str(e))
            made = self._plain
            self._failed[key] += 1
            if self._failed[key] < self._tries:
                return made
        self._ready[key] = made
        return made


def graphed(forward: Forward, copied: RunCopies) -> Replay:
    """By CUDA graphs, one per input dims; ``copied`` gets to know what a replay copies."""
    return Replay("cuda_graph", forward, GraphRecorder(copied), _dims, tries=_CAPTURES)


def compiled(module: nn.Module) -> Replay:
    """By torch.compile, once for all dims."""
    return Replay("compile", module, compile_once, lambda x: x.dtype)


class GraphRecorder:
    """Captures forwards, and leaves torch as it was where one cannot be captured.

    torch (2.13) does not: ``torch.cuda.graph`` ends the capture before it leaves its stream, and
    ``CUDAGraph.capture_end`` asks CUDA for the result before it tells the allocators. After a
    failure there (any synchronisation within, as of ``item()``, is one) the thread would go on in
    the capture's stream, which nothing here waits for, and the graph's pool would count as being
    captured to for ever, which defers the reuse of memory.
    """

    def __init__(self, copied: RunCopies) -> None:
        self._copied = copied
        # The allocator of page-locked memory has no call to forget a capture, and asks the graph.
        self._spoilt: list[torch.cuda.CUDAGraph] = []

    def __call__(self, forward: Forward, example: Tensor) -> Forward:
        """Capture one forward.

        Its kernels read and write memory of the graph's own: the input is copied there, and the
        result is cloned, because the next replay writes to the same place.
        """
        given = example.clone()
        own = torch.cuda.current_stream()
        stream = torch.cuda.Stream()
        stream.wait_stream(own)
        with torch.cuda.stream(stream):  # libraries choose their kernels and work space here
            for _ in range(3):
                forward(given)
        own.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = torch.cuda.graph_pool_handle()
        try:
            # Thread-local: a worker's other threads wait for events of their own meanwhile, which
            # a global capture would forbid.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                result = forward(given)
        except Exception:
            self._spoilt.append(graph)
            _give_up(pool)
            raise
        finally:
            torch.cuda.set_stream(own)
        copied = self._copied

        def replay(x: Tensor) -> Tensor:
            given.copy_(x)
            graph.replay()
            copied.inputs += 1
            copied.outputs += 1
            return result.clone()

        return replay


def _give_up(pool: tuple[int, int]) -> None:
    """Nothing is captured to ``pool`` any more; what lies there may be used again."""
    device = torch.cuda.current_device()
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # the capture was over before it failed, and the pool is its graph's
        return
    torch._C._cuda_releasePool(device, pool)


def compile_once(forward: Forward, example: Tensor) -> Forward:
    """Compile for all dims, and find out now whether that works."""
    made: Forward = torch.compile(forward, dynamic=True)
    made(example)
    return made


def _dims(x: Tensor) -> Hashable:
    return (x.dtype, *x.shape)
