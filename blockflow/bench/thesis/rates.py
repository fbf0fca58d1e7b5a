"""Throughput by arrival rate and the point of saturation (thesis, figure 4.12, eq. 4.2 and 4.3).

What a few callers get that wait for their answers says which rates are tried: one client sends at
random (Poisson) and waits for no answer, at multiples of that. Each round begins with the blocks'
times on an idle machine, which predict the limit, and with those callers.
"""

from __future__ import annotations

import os
from functools import partial

from blockflow.bench.in_process import Chain
from blockflow.bench.thesis.beside import beside_grid
from blockflow.bench.thesis.experiment import CPU, Context, Data, Experiment, Findings, Plot
from blockflow.bench.thesis.rates_figures import PAST, Sweep
from blockflow.bench.thesis.rates_model import Calm, Capacity, Flow, flow_of, typical
from blockflow.bench.thesis.served import (
    ARMS,
    WAYS,
    Flood,
    callers_of,
    callers_rate,
    input_of,
    patience_s,
    served,
    service_ms,
    task_of,
    warm,
)
from blockflow.bench.turns import crossed
from blockflow.client import Client

NAME = "throughput"
_RUNS = 20
_FILLING_S = 1.0
_SETTLING = 4
"""At and past saturation so many deadlines pass before a visit counts: the Dispatcher does not know
yet how long its queues take, admits what will be late, and has to be rid of it."""


def capacity_of(ctx: Context, chain: Chain) -> Capacity:
    """From the blocks' own times, in a process of their own: what workers count holds the overloads
    of the rounds before. On a GPU nobody knows how much of it a block leaves to the others."""
    seats = len(os.sched_getaffinity(0)) if ctx.settings.device == CPU else None
    with ctx.step("the blocks alone", None):
        return Capacity(service_ms(chain, _RUNS), seats)


def run(ctx: Context) -> Findings:
    """All rates by all ways in each round."""
    multiples, rounds, seconds, settling = ctx.pick(
        ((0.25, 0.5, 0.75, 0.9, 1.0, 1.25, 2.0), 6, 4.0, _SETTLING), ((0.5, 1.5), 1, 0.4, 0.1)
    )
    chain = ctx.chain()
    x = input_of(chain)
    flows: dict[tuple[str, float], list[Flow]] = {}
    calm: list[Calm] = []
    with (
        ctx.system(served(chain, ctx.settings.device, ARMS)) as system,
        Client(system.client_endpoint) as client,
    ):
        warm(client, [task_of(arm) for arm in ARMS], x)
        waiting = partial(callers_rate, client, task_of(WAYS[0]), x, seconds, callers_of(chain))
        with ctx.step("callers that wait", None):
            callers = waiting()
        deadline_s = patience_s(callers_of(chain), callers)
        # The way that takes part twice does so past saturation, where ways are compared.
        visits = [(m, a) for m in multiples for a in ARMS if m >= PAST or a in WAYS]
        with ctx.step("arrivals at random", rounds * len(visits)) as advance:
            for number in range(rounds):
                calm.append(Calm(capacity_of(ctx, chain), waiting()))
                turns = crossed(multiples, ARMS, number)
                for multiple, arm in (visit for visit in turns if visit in visits):
                    # The same arrivals for all arms.
                    seed = number * len(multiples) + multiples.index(multiple)
                    filling_s = settling * deadline_s if multiple >= 1 else _FILLING_S
                    flood = Flood(multiple * callers, filling_s + seconds, seed, deadline_s)
                    asked = flood.ask(client, task_of(arm), x)
                    flow = flow_of(asked.records, asked.seconds, filling_s)
                    flows.setdefault((arm, multiple), []).append(flow)
                    advance()
                ctx.keep(Sweep(flows, calm, callers, ctx.settings.labels).figures())
    made = Sweep(flows, calm, callers, ctx.settings.labels)
    heads = ("way", "times_callers", "round", "lambda", "came", "answered", "refused", "p50_ms")
    return Findings(
        made.says(),
        made.figures(),
        [made.grid(), beside_grid("Saturation, and what predicts it", made.summary())],
        [Plot("Throughput by arrival rate", "rates", made.draw())],
        [Data("visits", heads, made.rows())],
        notes(typical([c.capacity for c in calm])),
    )


def notes(capacity: Capacity) -> list[str]:
    """How the limit was predicted."""
    times = ", ".join(f"{b} {ms:.2f} ms" for b, ms in capacity.service_ms.items())
    out = [f"blocks alone: {times}; the slowest alone would allow {capacity.least_mu:.1f}/s"]
    if capacity.shared is not None:
        out.append(
            f"{capacity.seats} cores for {len(capacity.service_ms)} blocks: "
            f"{capacity.shared:.1f}/s at most. The thesis's limit min mu takes a processor of its "
            "own for every block; the predicted limit is the lower one"
        )
    out.append(
        "past the limit the thesis's queues grow; here every request has a deadline, and the "
        "Dispatcher refuses what would wait too long (column refused, with what came late). It "
        f"learns what that is: from 1.0 on the first {_SETTLING} deadlines of a visit do not count"
    )
    return out


EXPERIMENT = Experiment(
    NAME, ("figure 4.12", "eq. 4.2", "eq. 4.3"), "Throughput by arrival rate, and saturation", run
)
