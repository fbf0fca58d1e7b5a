"""Memory by arrival rate (thesis, figure 4.13): past saturation it must not grow.

The thesis's queues had no bound, and every waiting tensor held memory. Here slots are counted. The
first overload touches slots that were never used, once, which is measured by itself; then visits
at rates below and past saturation take turns, and at last a long overload.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from blockflow.bench.sampler import Sampler, memory_of
from blockflow.bench.thesis.beside import beside_grid
from blockflow.bench.thesis.experiment import Context, Data, Experiment, Findings, Plot
from blockflow.bench.thesis.growth_figures import Growth, Look, Way, settled
from blockflow.bench.thesis.served import (
    WAYS,
    Flood,
    callers_of,
    callers_rate,
    input_of,
    patience_s,
    processes,
    replicas,
    served,
    task_of,
    warm,
)
from blockflow.bench.thesis.util_figures import DISPATCHER
from blockflow.bench.turns import crossed
from blockflow.client import Client
from blockflow.control.system import System

NAME = "memory-by-rate"
_LOOK_S = 0.25
_MIB = 2**20
_OVER = 3.0
"""The first and the long overload, as a multiple of the callers' rate: as much as any visit."""


def look_at(system: System, way: str, pids: Mapping[str, int]) -> Look:
    """All processes of a way and the Dispatcher, now."""
    found = memory_of(pids).values()
    kpis = [w["process"] or {} for w in replicas(system, way)]
    arena = sum(k.get("arena_used", 0) for k in kpis)
    # In a container NVML hides whose memory is whose; torch's own count does not.
    gpu = [k.get("gpu_memory") or k.get("torch_reserved") for k in kpis]
    # The sum of some of them would be no memory of the way.
    whole = sum(g or 0 for g in gpu) / _MIB if gpu and all(gpu) else None
    return Look(
        sum(m.rss for m in found) / _MIB, sum(m.pss for m in found) / _MIB, arena / _MIB, whole
    )


def run(ctx: Context) -> Findings:
    """Fresh, the first overload, visits in turns, the long overload."""
    multiples, rounds, seconds, long_s = ctx.pick(
        ((0.5, 0.75, 1.5, 2.0, 3.0), 6, 3.0, 20.0), ((0.5, 0.75, 2.0), 1, 0.3, 0.6)
    )
    chain = ctx.chain()
    x = input_of(chain)
    ways: dict[str, Way] = {}
    with (
        ctx.system(served(chain, ctx.settings.device)) as system,
        Client(system.client_endpoint) as client,
    ):
        warm(client, [task_of(way) for way in WAYS], x)
        with ctx.step("callers that wait", None):
            callers = callers_rate(client, task_of(WAYS[0]), x, seconds, callers_of(chain))
        deadline_s = patience_s(callers_of(chain), callers)
        dispatcher = {DISPATCHER: system.status()["dispatcher"]["pid"]}
        looks = {
            way: partial(look_at, system, way, {**processes(system, way), **dispatcher})
            for way in WAYS
        }

        def visit(way: str, times: float, lasts: float, seed: int) -> list[tuple[float, Look]]:
            with Sampler(looks[way], _LOOK_S) as sampler:
                flood = Flood(times * callers, lasts, seed, deadline_s)
                asked = flood.ask(client, task_of(way), x)
            # Requests are sent from the first look on; when the last one is, queues run empty.
            end = sampler.samples[0][0] + asked.seconds
            return [(at, look) for at, look in sampler.samples if at <= end]

        with ctx.step("the first overload", len(WAYS)) as advance:
            for way in WAYS:
                fresh = looks[way]()
                ways[way] = Way(fresh, settled(visit(way, _OVER, long_s / 2, 0)))
                advance()
        with ctx.step("memory by rate", rounds * len(multiples) * len(WAYS)) as advance:
            for number in range(rounds):
                for m, way in crossed(multiples, WAYS, number):
                    found = settled(visit(way, m, seconds, number + 1))
                    ways[way].visits.setdefault(m, []).append(found)
                    advance()
                ctx.keep(Growth(ways, callers, ctx.settings.labels).figures())
        with ctx.step("a long overload", len(WAYS)) as advance:
            for way in WAYS:
                ways[way].long = visit(way, _OVER, long_s, rounds + 1)
                advance()
    made = Growth(ways, callers, ctx.settings.labels)
    heads = ("what", "way", "times_callers", "round_or_s", "rss", "pss", "arena", "gpu")
    notes = [
        "MiB of the way's workers and the Dispatcher, with their shared memory; a waiting tensor "
        "is in an arena, whose slots are counted: who has none left lets the queue before it wait",
        "the first overload touches slots that were never used; that happens once and is bounded "
        "by the arenas' size",
    ]
    return Findings(
        made.says(),
        made.figures(),
        [made.grid(), beside_grid("Is memory flat?", made.summary())],
        [Plot("Memory by arrival rate, and over a long overload", "rates", made.draw())],
        [Data("looks", heads, made.rows())],
        notes,
    )


EXPERIMENT = Experiment(NAME, ("figure 4.13",), "Memory by arrival rate, past saturation too", run)
