"""Energy per inference (thesis, figure 4.10), where something counts energy: RAPL or NVML.

One client asks again as soon as it is answered. The counters are those of the whole processor or
of the whole GPU: what else the machine does is in them, and so is what it takes when it idles,
which is measured in every round and given beside.
"""

from __future__ import annotations

import time
from functools import partial

from blockflow.bench.in_process import Chain
from blockflow.bench.sampler import Sampler
from blockflow.bench.thesis.beside import beside_grid
from blockflow.bench.thesis.energy_figures import Energy, Visit
from blockflow.bench.thesis.energy_source import EnergySource, find_source
from blockflow.bench.thesis.experiment import (
    Context,
    Data,
    Experiment,
    Findings,
    Plot,
    Settings,
    skip,
)
from blockflow.bench.thesis.served import (
    ARMS,
    ask_in_turn,
    input_of,
    once,
    served,
    task_of,
    warm,
)
from blockflow.bench.turns import balanced
from blockflow.client import Client

NAME = "energy"
_LOOK_S = 0.2


def missing(settings: Settings) -> str | None:
    """Why no energy can be read here."""
    found = find_source(settings.device)
    if isinstance(found, str):
        return found
    found.close()
    return None


def run(ctx: Context) -> Findings:
    """All ways and batch sizes in turns."""
    source = find_source(ctx.settings.device)
    if isinstance(source, str):
        return skip(source)
    try:
        return measure(ctx, ctx.chain(), source)
    finally:
        source.close()


def measure(ctx: Context, chain: Chain, source: EnergySource) -> Findings:
    """With a source of energy."""
    batches, rounds, seconds = ctx.pick(((1, 8, 32), 5, 2.0), ((1, 2), 1, 0.2))
    inputs = {rows: input_of(chain, rows) for rows in batches}
    labels = {**ctx.settings.labels, "counted": source.part}
    arms = [(arm, rows) for rows in batches for arm in ARMS]
    found: dict[tuple[str, int], list[Visit]] = {arm: [] for arm in arms}
    with (
        ctx.system(served(chain, ctx.settings.device, ARMS)) as system,
        Client(system.client_endpoint) as client,
    ):
        for x in inputs.values():
            warm(client, [task_of(arm) for arm in ARMS], x)
        with ctx.step("energy", rounds * len(arms)) as advance:
            for number in range(rounds):
                with Sampler(source.joules, _LOOK_S) as idle:
                    time.sleep(seconds)
                if spent(idle) <= 0:
                    return skip(f"the counters do not move ({source.part})")
                idle_w = spent(idle) / idle.seconds
                for arm, rows in balanced(arms, number):
                    ask = partial(ask_in_turn, [client], [task_of(arm)], inputs[rows], seconds)
                    with Sampler(source.joules, _LOOK_S) as sampler:
                        answered = ask().answers * rows
                    visit = Visit(answered, sampler.seconds, spent(sampler), idle_w)
                    found[arm, rows].append(visit)
                    advance()
                ctx.keep(Energy(found, labels).figures())
    made = Energy(found, labels)
    figures = made.figures()
    heads = ("way", "rows", "round", "answered_rows", "seconds", "joules", "idle_w")
    return Findings(
        made.says(),
        figures,
        [beside_grid("Energy per inference, one client", once(figures))],
        [Plot("Energy per tensor by batch size", "batches", made.draw())],
        [Data("visits", heads, made.rows())],
        [f"counted: {source.part}, whatever else it does meanwhile"],
    )


def spent(sampler: Sampler[float]) -> float:
    """Joules from the first look to the last one."""
    return sampler.samples[-1][1] - sampler.samples[0][1]


EXPERIMENT = Experiment(
    NAME, ("figure 4.10",), "Energy per inference by batch size", run, (missing,)
)
