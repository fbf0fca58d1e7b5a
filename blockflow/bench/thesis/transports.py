"""Round trips of a string, a JSON document and a tensor between two processes (table 4.3).

By HTTP (CherryPy, over one connection and over a new one each time), by ZeroMQ (REQ and REP), and
the tensor also by a handle: its elements lie in a slot already, as a block's output does, or are
copied there first. The answer is as large as the message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from blockflow.bench.grid import digits, size_text
from blockflow.bench.results import Figure, bursts_figure, interval_figure
from blockflow.bench.statistics import percentile
from blockflow.bench.thesis import peers
from blockflow.bench.thesis.bars import draw_bars
from blockflow.bench.thesis.beside import (
    AGAIN,
    Rounds,
    beside_grid,
    compared,
    quoted,
    thesis,
)
from blockflow.bench.thesis.experiment import Context, Data, Experiment, Findings, Plot
from blockflow.bench.thesis.http_server import TEXT, HttpClient, HttpServer
from blockflow.bench.turns import in_turn, took_ms
from blockflow.repository.probe import example_input
from blockflow.repository.zoo.catalog import ZOO

ROUND_TRIP, RATIO = "round trip", "ratio"
HTTP, HTTP_NEW, ZEROMQ = "HTTP", "HTTP, new connection", "ZeroMQ"
HANDLE, COPIED = "handle", "handle, copied in"
WAYS = (HTTP, HTTP_NEW, ZEROMQ, HANDLE, COPIED)
KINDS = STRING, JSON, TENSOR = "string", "JSON", "tensor"

_SOURCE = "table 4.3"
THESIS: Mapping[tuple[str, str], float] = {
    (STRING, HTTP): 1.676,
    (JSON, HTTP): 2.273,
    (TENSOR, HTTP): 10.885,
    (STRING, ZEROMQ): 0.069,
    (JSON, ZEROMQ): 0.106,
    (TENSOR, ZEROMQ): 1.054,
}
"""Milliseconds on *awenode*; which of the two ways of HTTP was used is not said."""

THESIS_RATIO: Mapping[str, float] = {STRING: 24, JSON: 21, TENSOR: 10}
"""HTTP / ZeroMQ."""


_TWICE = f"{STRING}, {ZEROMQ}"
"""Of what all kinds have the quickest: small, so that it shows what the machine does to others."""

Call = Callable[[], None]


Bursts = Mapping[str, Sequence[Sequence[float]]]
"""Message -> milliseconds, burst by burst; a burst per round."""

Labels = Mapping[str, Mapping[str, Any]]
"""Kind of message -> labels of its figures."""


def run(context: Context) -> Findings:
    x = _input(context.settings.model)
    rounds, burst = context.pick((60, 25), (6, 5))
    with (
        peers.Peer(x) as peer,
        peers.Peer(x) as other,  # two starts of the same thing differ as well
        HttpServer() as server,
        HttpClient(server.port) as kept,
        HttpClient(server.port, keep=False) as new,
        context.step("round trips", rounds + 1) as advance,
    ):
        turns = {
            name: partial(_burst, call, burst)
            for name, call in _messages(peer, {HTTP: kept, HTTP_NEW: new}, x).items()
        }
        turns[_TWICE + AGAIN] = partial(_burst, other.string, burst)
        done = partial(findings, nbytes=x.nbytes, model=context.settings.model)
        return done(
            in_turn(
                *(turns, rounds, advance),
                broken=lambda so_far: context.keep(done(so_far).figures),
                warm_up=1,
            )
        )


def _burst(call: Call, count: int) -> list[float]:
    return [took_ms(call) for _ in range(count)]


def _input(model: str) -> np.ndarray[Any, Any]:
    spec = ZOO[model].input
    return np.ascontiguousarray(example_input(spec, {"rows": 1}).numpy())


def _messages(
    peer: peers.Peer, posts: Mapping[str, HttpClient], x: np.ndarray[Any, Any]
) -> dict[str, Call]:
    """Message -> a round trip, kind by kind."""
    ways: dict[str, Mapping[str, Call]] = {way: _posts(post, x) for way, post in posts.items()}
    ways[ZEROMQ] = {STRING: peer.string, JSON: peer.json, TENSOR: peer.tensor}
    ways[HANDLE] = {TENSOR: partial(peer.handle, peers.HANDLE)}
    ways[COPIED] = {TENSOR: partial(peer.handle, peers.COPIED)}
    return {
        f"{kind}, {way}": calls[kind]
        for kind in KINDS
        for way, calls in ways.items()
        if kind in calls
    }


def _posts(client: HttpClient, x: np.ndarray[Any, Any]) -> dict[str, Call]:
    def string() -> None:
        client.post("/string", peers.TEXT.encode()).decode()

    def document() -> None:
        json.loads(client.post("/json", json.dumps(peers.DOCUMENT).encode(), TEXT))

    def tensor() -> None:
        np.frombuffer(client.post("/tensor", x.data.cast("B")), x.dtype).reshape(x.shape)

    return {STRING: string, JSON: document, TENSOR: tensor}


def findings(found: Bursts, nbytes: int, model: str) -> Findings:
    """Figures, table, plot and the line. Pure.

    Args:
        nbytes: of the tensor, which is an input of ``model``; the other messages are no model's.
        model: of the call.
    """
    of = {kind: {"model": model, "bytes": nbytes} if kind == TENSOR else {} for kind in KINDS}
    rounds = Rounds({name: [percentile(b, 50) for b in bursts] for name, bursts in found.items()})
    names = [name for name in rounds.samples if not name.endswith(AGAIN)]
    figures = [_round_trip(name, found[name][rounds.cut :], of) for name in names]
    ratios = [
        _ratio(rounds, kind, base, way, of)
        for kind in KINDS
        for base, way in ((ZEROMQ, HTTP), (ZEROMQ, HTTP_NEW), (HANDLE, ZEROMQ), (COPIED, ZEROMQ))
        if f"{kind}, {base}" in rounds.samples
    ]
    size = size_text(nbytes)
    return Findings(
        says=_says(rounds, size, of),
        figures=[*figures, *ratios],
        tables=[
            beside_grid("Table 4.3: round trips", figures),
            beside_grid("Table 4.3: ratios", ratios),
        ],
        plots=[Plot("Round trips", "round-trips", draw_bars(figures, "ms", log=True))],
        data=[
            Data(
                "bursts",
                ("message", "round", "ms"),
                [
                    (n, i, ms)
                    for n, bursts in found.items()
                    for i, b in enumerate(bursts)
                    for ms in b
                ],
            )
        ],
        notes=[
            f"The tensor has {size} here and is sent as raw bytes; the thesis does not say how "
            "large its own was, and whether its HTTP client kept the connection.",
            "A handle goes where a tensor lies in shared memory; a string and a JSON document are "
            "control messages, and BlockFlow sends those by ZeroMQ.",
        ],
    )


def _round_trip(name: str, bursts: Sequence[Sequence[float]], of: Labels) -> Figure:
    kind, _, way = name.partition(", ")
    base = HTTP if way == HTTP_NEW else way
    return thesis(bursts_figure(kind, way, bursts, of[kind]), THESIS.get((kind, base)), _SOURCE)


def _ratio(rounds: Rounds, kind: str, base: str, way: str, of: Labels) -> Figure:
    interval = rounds.ratio(f"{kind}, {base}", f"{kind}, {way}")
    made = interval_figure(f"{kind}: {way} / {base}", RATIO, None, interval, "x", of[kind])
    printed = THESIS_RATIO[kind] if base == ZEROMQ else None
    return thesis(made, printed, _SOURCE)


def _says(rounds: Rounds, size: str, of: Labels) -> str:
    def ratio(kind: str, base: str, way: str) -> str:
        return compared(rounds.ratio(f"{kind}, {base}", f"{kind}, {way}"), rounds.noise)

    def http(kind: str) -> str:
        printed = f"{digits(THESIS_RATIO[kind])} times slower"
        return ratio(kind, ZEROMQ, HTTP) + quoted(of[kind], printed)

    return (
        f"HTTP beside ZeroMQ: a string {http(STRING)}; a tensor of {size} {http(TENSOR)}. "
        f"The tensor by ZeroMQ beside its handle: {ratio(TENSOR, HANDLE, ZEROMQ)}"
    )


EXPERIMENT = Experiment(
    "transports",
    (_SOURCE,),
    "Round trips of a string, JSON and a tensor: HTTP, ZeroMQ, handle",
    run,
)
