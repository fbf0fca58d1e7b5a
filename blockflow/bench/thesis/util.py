"""CPU and GPU utilisation per block and of the whole (thesis, figure 4.6).

One client asks again as soon as it is answered. CPU is what the kernel has counted for each
worker's process and for the Dispatcher; the GPU's utilisation is NVML's, the whole device's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from blockflow.bench.sampler import Sampler, cpu_seconds
from blockflow.bench.thesis.beside import beside_grid
from blockflow.bench.thesis.experiment import CPU, Context, Data, Experiment, Findings, Plot
from blockflow.bench.thesis.served import (
    ARMS,
    ask_in_turn,
    input_of,
    once,
    processes,
    served,
    task_of,
    warm,
)
from blockflow.bench.thesis.util_figures import DISPATCHER, Utilisation, Visit
from blockflow.bench.turns import in_turn
from blockflow.client import Client
from blockflow.launch.gpu_kpi import GpuProbe

NAME = "utilisation"
_LOOK_S = 0.25
_UNIT = "gpu_util_percent"

Seen = tuple[Mapping[str, float], float | None]
"""CPU seconds by process, and the GPU's utilisation in percent."""


def run(ctx: Context) -> Findings:
    """All arms in turns, visit by visit."""
    rounds, seconds = ctx.pick((6, 3.0), (1, 0.4))
    settings, chain = ctx.settings, ctx.chain()
    x = input_of(chain)
    with (
        closing(GpuProbe(settings.device)) as probe,
        ctx.system(served(chain, settings.device, ARMS)) as system,
        Client(system.client_endpoint) as client,
    ):
        warm(client, [task_of(arm) for arm in ARMS], x)
        dispatcher = {DISPATCHER: system.status()["dispatcher"]["pid"]}

        def visit(arm: str) -> Visit:
            pids = {**processes(system, arm), **dispatcher}

            def look() -> Seen:
                gpu = probe.sample(time.monotonic_ns(), 0).get(_UNIT)
                return cpu_seconds(pids), gpu

            with Sampler(look, _LOOK_S) as sampler:
                asked = ask_in_turn([client], [task_of(arm)], x, seconds)
            looks = [(at, cpu) for at, (cpu, _) in sampler.samples]
            gpu = [(at, u) for at, (_, u) in sampler.samples if u is not None]
            return Visit.of(looks, asked.rate, gpu)

        def keep(so_far: Mapping[str, Sequence[Visit]]) -> None:
            ctx.keep(utilisation(so_far, settings.labels).figures())

        with ctx.step("one client, busy all the time", rounds) as advance:
            arms = {arm: partial(visit, arm) for arm in ARMS}
            found = in_turn(arms, rounds, advance, broken=keep)
    return conclude(found, settings.labels, settings.device)


def utilisation(found: Mapping[str, Sequence[Visit]], labels: Mapping[str, Any]) -> Utilisation:
    """Of the cores that this process may use."""
    return Utilisation(found, len(os.sched_getaffinity(0)), labels)


def conclude(
    found: Mapping[str, Sequence[Visit]], labels: Mapping[str, Any], device: str
) -> Findings:
    """From the visits to what is shown."""
    made = utilisation(found, labels)
    figures = made.figures()
    notes = [
        "CPU of a block: of one core, its worker's process with all threads. The mean over the "
        "blocks is the thesis's figure; its values are in a picture only."
    ]
    if device == CPU:
        notes.append(
            "GPU utilisation: skipped, the blocks compute on the CPU. There the compute itself is "
            "CPU time, so that the ways differ by what passing tensors on costs."
        )
    elif made.gpu is None:
        notes.append(f"GPU utilisation: skipped, NVML gives none for {device}")
    elif made.unseen:
        notes.append(f"GPU utilisation: without {made.unseen} rounds, in which NVML gave none")
    return Findings(
        made.says(),
        figures,
        [beside_grid("CPU and GPU utilisation, one client", once(figures))],
        [Plot("Utilisation over time, and by process", "cpu", made.draw())],
        [Data("timeline", ("what", "way", "round", "seconds", "percent"), made.rows())],
        notes,
    )


EXPERIMENT = Experiment(NAME, ("figure 4.6",), "CPU and GPU utilisation, one client", run)
