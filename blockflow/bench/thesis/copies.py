"""Bytes that an inference moves (figure 4.9).

The thesis counts copies between host and device with a profiler. On a GPU the workers count them
themselves. On a CPU whole tensors go through sockets: the workers are connected by TCP here, and
the kernel's counter of the loopback device says what went through, for one request at a time.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil

from blockflow.bench.canvas import new_page
from blockflow.bench.in_process import Chain
from blockflow.bench.kpi_reader import KpiReader, Kpis
from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ
from blockflow.bench.pipeline_ways import block_names, task_name, topology
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.thesis.bars import WAY_COLOURS, draw_bars
from blockflow.bench.thesis.beside import AGAIN, Rounds, beside_grid, quoted, thesis
from blockflow.bench.thesis.experiment import Context, Data, Experiment, Findings, Plot, Settings
from blockflow.bench.thesis.served import input_of
from blockflow.bench.turns import in_turn
from blockflow.client import Client
from blockflow.control.system import System

SOCKETS = "through sockets, all blocks"
PER_BLOCK = "through sockets, per block"
FIRST = "tensors into and out of block1 as messages"
ENGINE = "copied by the engines, all blocks"
TO_DEVICE, TO_HOST = "host to device, all blocks", "device to host, all blocks"
BACKGROUND = "nothing"
RATIO = "ratio"

WAYS = (ZEROMQ, TENSORMQ)
_SOURCE = "figure 4.9"
_FIRST_MB = 9.0 / 2
"""PCIe, both directions: "around 9MB for just 2 single inferences" of one block."""

_HANDLE_B = 180.0
"""Of the handle itself, "around 180 Bytes" (text of figure 4.8)."""

_LOOPBACK = "lo"
_MB = 1e6
_WARM_UP = 2
_KPI_S = 1.0


def _needs_a_counter(_settings: Settings) -> str | None:
    if _LOOPBACK in psutil.net_io_counters(pernic=True):
        return None
    return f"the kernel shows no counters of the device {_LOOPBACK!r}"


def run(context: Context) -> Findings:
    chain = context.chain()
    rounds = context.pick(20, 5)
    wanted = {**topology(chain, WAYS), "transport": "tcp"}
    with context.system(wanted) as system:
        # By its own memory and a unix socket: the client's legs are not the blocks' copies.
        own = next(e for e in system.client_endpoints if e.startswith("ipc://"))
        with Client(own) as client, context.step("one inference by each way", rounds) as advance:
            return _measure(context, chain, system, client, rounds, advance)


def _measure(
    context: Context,
    chain: Chain,
    system: System,
    client: Client,
    rounds: int,
    advance: Callable[[], None],
) -> Findings:
    x = input_of(chain)
    device = chain.device != "cpu"
    reader = KpiReader(system)
    calls = {way: partial(client.infer, task_name(way), x) for way in WAYS}
    for call in calls.values():
        for _ in range(_WARM_UP):
            call()
    start = time.monotonic()
    calls[ZEROMQ]()
    pause = time.monotonic() - start
    before, copied = reader.now(), _copied(system) if device else {}
    turns: dict[str, Callable[[], float]] = {way: partial(_bytes_of, calls[way]) for way in WAYS}
    turns[TENSORMQ + AGAIN] = turns[TENSORMQ]
    turns[BACKGROUND] = partial(_bytes_of, partial(time.sleep, pause))

    def broken(so_far: Mapping[str, Sequence[float]]) -> None:
        context.keep(list(_sent_figures(_rounds(so_far), context.settings)))

    found = in_turn(turns, rounds, advance, broken=broken)
    broken(found)  # what the workers have counted may not come
    requests = {ZEROMQ: rounds, TENSORMQ: 2 * rounds}
    asked = {b: requests[way] for way in WAYS for b in block_names(way, chain)}
    grown = reader.since(before, asked)
    counted = {way: _engine(grown, block_names(way, chain)) for way in WAYS}
    first = x.nbytes + _per_request(grown, block_names(ZEROMQ, chain)[0], "bytes_out")
    over = {}
    if device:
        after = _copied(system)
        for way, directions in after.items():
            over[way] = tuple(
                (a - b) / requests[way] for a, b in zip(directions, copied[way], strict=True)
            )
    return findings(found, len(chain.blocks), counted, first, over, context.settings)


def _bytes_of(call: Callable[[], Any]) -> float:
    """Bytes that the loopback device has sent meanwhile."""
    before = _sent()
    call()
    return float(_sent() - before)


def _sent() -> int:
    return int(psutil.net_io_counters(pernic=True)[_LOOPBACK].bytes_sent)


def _engine(grown: Kpis, blocks: Sequence[str]) -> float:
    """Bytes per request that engines have copied because they cannot write into a slot."""
    return sum(
        _per_request(grown, block, "bytes_out") * _per_request(grown, block, "copies_out")
        for block in blocks
    )


def _per_request(grown: Kpis, block: str, what: str) -> float:
    """By the block's own count of requests: it may hold some from before the first round."""
    return float(grown[block][what] / grown[block]["requests"])


def _copied(system: System) -> dict[str, tuple[int, int]]:
    """Way -> bytes to the device and back so far, as its workers count them."""
    time.sleep(_KPI_S)  # what has happened so far is sent four times per second
    out = {}
    for way in WAYS:
        kpis = [
            w["process"]
            for w in system.status()["workers"]
            if w["process"] and w["blocks"][0].startswith(f"{task_name(way)}.")
        ]
        out[way] = sum(k["h2d_bytes"] for k in kpis), sum(k["d2h_bytes"] for k in kpis)
    return out


def findings(
    found: Mapping[str, Sequence[float]],
    blocks: int,
    engine: Mapping[str, float],
    first: float,
    over: Mapping[str, tuple[float, ...]],
    settings: Settings,
) -> Findings:
    """Figures, table, plots and the line. Pure.

    Args:
        found: way -> bytes through sockets of each request.
        engine: way -> bytes per request that engines copied.
        first: bytes per request of the first block's input and output.
        over: way -> bytes per request to the device and to the host; empty without one.
        settings: of the call.
    """
    sent = _rounds(found)
    figures = [
        *_sent_figures(sent, settings),
        *_block_figures(sent, blocks, settings),
        *_moved_figures(engine, first, over, settings),
    ]
    background = float(np.median(found[BACKGROUND]))
    noise = {**settings.labels, "noise": sent.noise}
    ratio = interval_figure(
        f"{SOCKETS}: {ZEROMQ} / {TENSORMQ}", RATIO, 1, sent.ratio(TENSORMQ, ZEROMQ), "x", noise
    )
    whole, handles = (sent.median(way).value / _MB for way in WAYS)
    return Findings(
        says=(
            f"an inference moves {whole:.3g} MB through sockets with whole tensors and "
            f"{handles:.3g} MB with handles: {sent.compared(TENSORMQ, ZEROMQ, 'more', 'less')}; "
            f"block1 alone takes and gives {first / _MB:.3g} MB as messages"
            + quoted(
                settings.labels, f"{_FIRST_MB} MB over PCIe with whole tensors, none with handles"
            )
        ),
        figures=[*figures, ratio],
        tables=[beside_grid("Figure 4.9: moved per inference", [*figures, ratio])],
        plots=[
            Plot(
                "Figure 4.9: moved per inference",
                "moved",
                draw_bars([f for f in figures if f.unit == "MB"], "MB"),
            ),
            Plot("Figure 4.9, right: in all", "cumulative", _draw_cumulative(found)),
        ],
        data=[
            Data(
                "requests",
                ("way", "request", "bytes", "bytes_so_far"),
                [
                    (way, i, moved, so_far)
                    for way, samples in found.items()
                    for i, (moved, so_far) in enumerate(
                        zip(samples, itertools.accumulate(samples), strict=True)
                    )
                ],
            )
        ],
        notes=[
            f"The loopback device sends {background / 1e3:.3g} kB in the time of a request while "
            "nobody asks: heartbeats, KPIs, and whatever else runs on this machine.",
            "Bytes per block are the message, what acknowledges it, TCP's headers and what nobody "
            "asked for; the thesis's 180 B are a handle alone.",
            "The workers are connected by TCP for this, as on several machines, so that the "
            "kernel counts; on one machine they use Unix sockets, which it does not.",
            "A byte through a socket is copied twice, into the kernel and out of it. What the "
            "thesis counts is PCIe: the same tensors, to the host and to the next block's device.",
        ],
    )


def _rounds(found: Mapping[str, Sequence[float]]) -> Rounds:
    return Rounds({way: list(s) for way, s in found.items() if way != BACKGROUND})


def _block_figures(sent: Rounds, blocks: int, settings: Settings) -> Iterator[Figure]:
    for way in WAYS:
        each = [b / blocks for b in sent.of(way)]
        made = interval_figure(PER_BLOCK, way, 1, each, "B", settings.labels)
        yield thesis(made, _HANDLE_B if way == TENSORMQ else None, "figure 4.8", "the handle alone")


def _moved_figures(
    engine: Mapping[str, float],
    first: float,
    over: Mapping[str, tuple[float, ...]],
    settings: Settings,
) -> Iterator[Figure]:
    labels = settings.labels
    made = Figure.of(FIRST, ZEROMQ, first / _MB, "MB", 1, labels, batch=1)
    yield thesis(made, _FIRST_MB, _SOURCE, "the thesis's is over PCIe")
    for way in WAYS:
        yield Figure.of(ENGINE, way, engine[way] / _MB, "MB", 1, labels, batch=1)
    for way, directions in over.items():
        for name, value in zip((TO_DEVICE, TO_HOST), directions, strict=True):
            made = Figure.of(name, way, value / _MB, "MB", 1, labels, batch=1)
            yield thesis(made, 0.0 if way == TENSORMQ else None, _SOURCE)


def _sent_figures(sent: Rounds, settings: Settings) -> Iterator[Figure]:
    for way in WAYS:
        found = [b / _MB for b in sent.of(way)]
        yield interval_figure(SOCKETS, way, 1, found, "MB", settings.labels)


def _draw_cumulative(found: Mapping[str, Sequence[float]]) -> Any:
    page = new_page(7, 4)
    ax = page.subplots()
    for way in WAYS:
        total = np.cumsum(found[way]) / _MB
        ax.plot(range(1, len(total) + 1), total, "o-", ms=3, color=WAY_COLOURS[way], label=way)
    ax.set(xlabel="inferences", ylabel="MB through sockets")
    ax.legend(fontsize=8, frameon=False)
    ax.grid(alpha=0.25)
    return page


EXPERIMENT = Experiment(
    "copies",
    (_SOURCE,),
    "Bytes that an inference moves: whole tensors and handles",
    run,
    (_needs_a_counter,),
)
