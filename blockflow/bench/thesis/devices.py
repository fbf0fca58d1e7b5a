"""Blocks on one, two and four devices: path distribution index 25, 50, 100 (figures 4.15, 4.16).

One client sends at random (Poisson), at the same rate everywhere: the thesis's 300 per second would
be nothing on one machine and ruin another one, so it is a share of what a single device can do.
Without several GPUs a device is a core, to which the workers are pinned; that is another question
(no tensor has to move between cores), and everything says so.
"""

from __future__ import annotations

import os

from blockflow.bench.pipeline_figures import TENSORMQ
from blockflow.bench.thesis.beside import beside_grid, known
from blockflow.bench.thesis.devices_figures import Distribution, Visit
from blockflow.bench.thesis.devices_model import (
    CORES,
    GPUS,
    Places,
    index,
    numbers,
    spread_topology,
    way_of,
)
from blockflow.bench.thesis.experiment import (
    CPU,
    Context,
    Data,
    Experiment,
    Findings,
    Plot,
    Settings,
)
from blockflow.bench.thesis.served import (
    ARMS,
    Flood,
    callers_of,
    callers_rate,
    input_of,
    warm,
)
from blockflow.bench.turns import crossed
from blockflow.client import Client

NAME = "devices"
_SHARE = 0.6
"""Of what the pipeline can do on one device; nothing is saturated."""


def find_places(settings: Settings) -> Places:
    """GPUs if the call is for GPUs and there are two at least; else this process's cores."""
    if settings.device != CPU:
        import torch

        count = torch.cuda.device_count()
        if count > 1:
            return Places(GPUS, [f"cuda:{n}" for n in range(count)])
    return Places(CORES, [str(c) for c in sorted(os.sched_getaffinity(0))])


def too_few(settings: Settings) -> str | None:
    """Why blocks cannot be spread here."""
    places = find_places(settings)
    if len(places.names) > 1:
        return None
    return f"blocks need two {places.kind} at least to be spread over; there is one"


def run(ctx: Context) -> Findings:
    """All ways on all numbers of devices in each round."""
    rounds, seconds = ctx.pick((6, 12.0), (1, 0.3))
    chain = ctx.chain()
    places = find_places(ctx.settings)
    wanted = numbers(len(chain.blocks))
    counts = [n for n in wanted if n <= len(places.names)]
    x = input_of(chain)
    found: dict[tuple[str, int], list[Visit]] = {}
    labels = ctx.settings.labels
    if places.kind == CORES:
        labels["device"] = CPU  # whatever the call says: pinned workers compute on their cores
    with (
        ctx.system(spread_topology(chain, ARMS, places, counts)) as system,
        Client(system.client_endpoint) as client,
    ):
        # On every number of devices one way twice: each has a noise of its own.
        warm(client, [way_of(arm, n) for n in counts for arm in ARMS], x)
        with ctx.step("what one device can do", None):
            alone = callers_rate(client, way_of(TENSORMQ, counts[0]), x, seconds, callers_of(chain))
        rate = _SHARE * alone
        with ctx.step(f"blocks on {places.kind}", rounds) as advance:
            for number in range(rounds):
                for n, arm in crossed(counts, ARMS, number):
                    # The same arrivals for all arms.
                    asked = Flood(rate, seconds, number).ask(client, way_of(arm, n), x)
                    found.setdefault((arm, n), []).append(Visit.of(asked.records))
                ctx.keep(Distribution(found, places, rate, labels).figures())
                advance()
    made = Distribution(found, places, rate, labels)
    heads = ("way", "pdi", "round", "block", "compute_ms", "overhead_ms")
    notes = [
        f"one client, Poisson, {rate:.1f} requests per second ({_SHARE:.0%} of what the pipeline "
        f"can do on one {places.one}{'; thesis: 300' * known(labels)})"
    ]
    if places.kind == CORES:
        notes.append(
            "the index counts CORES, not GPUs: workers are pinned, tensors stay where they are. "
            "What changes is who computes beside whom; the thesis's copies between GPUs do not "
            "occur. Several GPUs: --device cuda:0 on a machine that has them"
        )
    notes += made.refusals()
    blocks = len(chain.blocks)
    notes += [
        f"PDI {index(n, blocks):.0f}: skipped, {blocks} blocks on {n} different {places.kind} "
        f"need {n} {places.kind}, there are {len(places.names)}"
        for n in wanted
        if n not in counts
    ]
    return Findings(
        made.says(),
        made.figures(),
        [beside_grid(f"Computing and overhead by PDI ({places.kind})", made.table(), "placement")],
        [Plot(f"Computing and overhead per block by PDI ({places.kind})", "blocks", made.draw())],
        [Data("visits", heads, made.rows())],
        notes,
    )


EXPERIMENT = Experiment(
    NAME,
    ("figure 4.15", "figure 4.16"),
    "Computing and overhead with blocks on one, two and four devices",
    run,
    (too_few,),
)
