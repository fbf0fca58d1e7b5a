"""One client that asks again when it is answered: what it sees by each way through the blocks.

Whole tensors and handles side by side in one system, the blocks called in turn in one process (the
thesis's offline sum), and, where it is asked for, the whole model behind a CherryPy server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from blockflow.bench.in_process import Chain, InProcess
from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ, Sample
from blockflow.bench.pipeline_ways import in_process_sample, run_once, topology
from blockflow.bench.thesis.beside import AGAIN, Rounds
from blockflow.bench.thesis.experiment import Advance, Context, Findings
from blockflow.bench.thesis.http_server import TEXT, HttpClient, HttpServer
from blockflow.bench.thesis.served import input_of
from blockflow.bench.turns import in_turn, took_ms
from blockflow.client import Client

OFFLINE = "offline sum"
HTTP, HTTP_JSON = "HTTP, whole model", "HTTP, whole model, JSON"
TWICE = TENSORMQ + AGAIN

_WARM_UP = 2
"""Requests of each way that do not count, whatever the first rounds look like."""


@dataclass(frozen=True, slots=True)
class Series:
    """What one way took, one :class:`Sample` per round; the n-th of all ways are of one round."""

    samples: Mapping[str, Sequence[Sample]]

    def rounds(self, number: Callable[[Sample], float]) -> Rounds:
        """One number of every sample."""
        return Rounds({way: [number(s) for s in found] for way, found in self.samples.items()})


def middle(burst: Sequence[Sample]) -> Sample:
    """What is typical of some inferences in a row: the median of every part by itself."""
    hops = [
        tuple(median(part) for part in zip(*block, strict=True))
        for block in zip(*(s.hops for s in burst), strict=True)
    ]
    total, edge = median(s.total for s in burst), median(s.edge for s in burst)
    return Sample(total, tuple((t, w, o, c) for t, w, o, c in hops), edge)


def pipeline_ms(sample: Sample) -> float:
    """The pipeline computing time (eq. 4.1): everything from the first block to the last."""
    return sum(sum(hop) for hop in sample.hops)


def overhead_ms(sample: Sample) -> float:
    """All blocks' overhead, forwarding included (section 4.2.1), waiting not."""
    return sum(transit + overhead for transit, _, overhead, _ in sample.hops)


def compute_ms(sample: Sample) -> float:
    """All forwards."""
    return sample.compute


class Bench:
    """A running system with both ways, one of them twice, and what is compared with it.

    Args:
        alone: the same blocks in one process.
        server: the whole model behind HTTP, if it takes part.
    """

    def __init__(
        self, chain: Chain, client: Client, alone: InProcess, server: HttpServer | None
    ) -> None:
        self._chain = chain
        self._client = client
        self._alone = alone
        self._alone_rows = 0
        self._server = server

    def measure(
        self,
        bursts: Mapping[int, int],
        rounds: int,
        advance: Advance,
        broken: Callable[[Mapping[int, Series]], None],
    ) -> dict[int, Series]:
        """``rounds`` samples of each way with each number of rows, all of them in turns, so that
        drift hits all sizes alike.

        Args:
            bursts: rows -> inferences in a row, the :func:`middle` of which makes a sample.
            rounds: samples of each.
            advance: called after every round.
            broken: gets the samples of the whole rounds when one fails.
        """
        with ExitStack() as stack:
            post = None
            if self._server is not None:
                post = stack.enter_context(HttpClient(self._server.port))
            calls = {
                (rows, way): partial(_burst, call, count)
                for rows, count in bursts.items()
                for way, call in self._calls(input_of(self._chain, rows), post).items()
            }
            found = in_turn(
                *(calls, rounds, advance),
                broken=lambda so_far: broken(_by_size(so_far)),
                warm_up=_WARM_UP,
            )
        return _by_size(found)

    def _calls(self, x: np.ndarray, post: HttpClient | None) -> Mapping[str, Callable[[], Sample]]:
        """Way -> one inference of it."""
        ways: dict[str, Callable[[], Sample]] = {
            OFFLINE: lambda: self._offline(len(x)),
            ZEROMQ: lambda: run_once(self._client, ZEROMQ, x),
            TENSORMQ: lambda: run_once(self._client, TENSORMQ, x),
            TWICE: lambda: run_once(self._client, TWICE, x),
        }
        if post is not None:
            ways[HTTP] = lambda: _timed(lambda: _by_bytes(post, x))
            ways[HTTP_JSON] = lambda: _timed(lambda: _by_text(post, x))
        return ways

    def _offline(self, rows: int) -> Sample:
        """In the other process; it has new buffers after another size, which a first run touches
        and which workers have in their slots already."""
        if rows != self._alone_rows:
            self._alone.run(rows)
            self._alone_rows = rows
        return in_process_sample(self._alone.run(rows))


def _burst(call: Callable[[], Sample], count: int) -> Sample:
    return middle([call() for _ in range(count)])


def _by_size(found: Mapping[tuple[int, str], Sequence[Sample]]) -> dict[int, Series]:
    """A series per number of rows."""
    ways: dict[int, dict[str, Sequence[Sample]]] = {}
    for (rows, way), samples in found.items():
        ways.setdefault(rows, {})[way] = samples
    return {rows: Series(samples) for rows, samples in ways.items()}


@contextmanager
def bench(context: Context, *, http: bool = False) -> Iterator[Bench]:
    """Start everything.

    Args:
        http: the whole model behind a CherryPy server takes part.

    Raises:
        BlockFlowError: something cannot be started.
    """
    chain = context.chain()
    with ExitStack() as stack:
        # Other processes for what is measured twice: two starts differ by more than two requests.
        system = stack.enter_context(context.system(topology(chain, (TENSORMQ, ZEROMQ, TWICE))))
        client = stack.enter_context(Client(system.client_endpoint))
        with context.step("loading the model", None):
            alone = stack.enter_context(InProcess(chain))
            server = stack.enter_context(HttpServer(chain)) if http else None
        yield Bench(chain, client, alone, server)


def by_all_ways(
    context: Context,
    what: str,
    bursts: Mapping[int, int],
    rounds: int,
    findings: Callable[[Mapping[int, Series]], Findings],
    *,
    http: bool = False,
) -> Findings:
    """What ``findings`` makes of the series by rows (:meth:`Bench.measure`); of an experiment that
    breaks off, what it makes of the whole rounds is kept."""
    with (
        bench(context, http=http) as ways,
        context.step(what, rounds) as advance,
    ):
        return findings(
            ways.measure(
                *(bursts, rounds, advance), lambda so_far: context.keep(findings(so_far).figures)
            )
        )


def _timed(call: Callable[[], np.ndarray]) -> Sample:
    """The whole round trip: nothing is known of what is inside."""
    return Sample(took_ms(call), ())


def _by_bytes(post: HttpClient, x: np.ndarray) -> np.ndarray:
    """The tensor's bytes there, the result's back."""
    return np.frombuffer(post.post("/infer", x.data.cast("B")), np.float32).reshape(len(x), -1)


def _by_text(post: HttpClient, x: np.ndarray) -> np.ndarray:
    """Both as nested lists of numbers."""
    found = post.post("/infer", json.dumps(x.tolist()).encode(), TEXT)
    return np.asarray(json.loads(found), dtype=np.float32)
