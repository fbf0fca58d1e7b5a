"""Memory per block of a pipeline at work (thesis, figure 4.14), and what a process costs (C).

Each block is in a worker of its own, beside a worker whose block holds nothing: what that takes is
C, the price of a process. On the CPU it is private memory (USS), on a GPU the device's, where C is
the CUDA context: what the process takes there beyond torch's own pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from blockflow.bench.canvas import new_page
from blockflow.bench.grid import bounds, digits
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.sampler import Sampler, memory_of
from blockflow.bench.statistics import Interval, median_interval
from blockflow.bench.thesis.beside import beside_grid, known, quoted, thesis
from blockflow.bench.thesis.experiment import CPU, Context, Data, Experiment, Findings, Plot, skip
from blockflow.bench.thesis.memory_measure import EMPTY, save_empty
from blockflow.bench.thesis.offline_table import CLASSIFIER, LAST, PRINTED, SCRIPTED, SOURCE
from blockflow.bench.thesis.served import (
    WAYS,
    callers_of,
    callers_rate,
    input_of,
    processes,
    replicas,
    served,
    short,
    state_mib,
    task_of,
    warm,
)
from blockflow.client import Client
from blockflow.control.system import System

NAME = "memory-by-block"
PROCESS, OWN, STATE, COST = (
    "memory of its process",
    "beyond C",
    "parameters and buffers",
    "a process without a block (C)",
)
_ROWS = {block: row for block, row in PRINTED[SCRIPTED].items() if block != CLASSIFIER}
"""MB of VRAM that the process of a block by itself occupies, and that torch reserves. Figure 4.14
has no numbers; its text finds 30 to 40% more reserved in the pipeline."""

THESIS_COST = 370.0
THESIS_UNIT = "MB"
"""As it prints them. What torch reserves comes in multiples of 2 MiB, and its numbers are all even:
it may mean MiB."""

_MIB = 2**20
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the pipeline, in MiB at work.

    Attributes:
        process: block -> its process.
        cost: block -> C, the part of it that any process takes; on the CPU the same for all.
    """

    process: Mapping[str, float]
    cost: Mapping[str, float]


def run(ctx: Context) -> Findings:
    """Some starts, each looked at while callers keep the pipeline busy."""
    starts, seconds = ctx.pick((5, 1.5), (1, 0.3))
    chain = ctx.chain()
    cpu = ctx.settings.device == CPU
    way = WAYS[0]
    topology = served(chain, ctx.settings.device, [way])
    if cpu:
        save_empty(chain.repository)
        topology["blocks"].append({"name": EMPTY, "threads": chain.threads})
        topology["tasks"][EMPTY] = [EMPTY]
    x = input_of(chain)
    states = {short(b): state_mib(chain.repository, b) for b in chain.blocks}
    look = on_cpu if cpu else on_gpu
    found: list[Start] = []
    with ctx.step("starts of the pipeline", starts) as advance:
        for _ in range(starts):
            with ctx.system(topology) as system, Client(system.client_endpoint) as client:
                warm(client, [task_of(way)], x)
                if cpu:
                    warm(client, [EMPTY], np.ones((1, 1), np.float32))
                with Sampler(partial(look, system, way), _LOOK_S) as sampler:
                    callers_rate(client, task_of(way), x, seconds, callers_of(chain))
            looks = [start for _, start in sampler.samples if start is not None]
            if len(looks) < len(sampler.samples):
                return skip("NVML does not tell whose memory is whose here (a container?)")
            found.append(typical(looks))
            ctx.keep(figures_of(found, states, ctx.settings.labels))
            advance()
    return conclude(found, states, ctx.settings.labels)


def typical(looks: Sequence[Start]) -> Start:
    """The medians of a start's looks, block by block."""
    process = {b: median(look.process[b] for look in looks) for b in looks[0].process}
    return Start(process, {b: median(look.cost[b] for look in looks) for b in looks[0].cost})


def on_cpu(system: System, way: str) -> Start:
    """Private memory, and that of the process without a block."""
    worker = next(w for w in system.status()["workers"] if w["worker"] == EMPTY)
    found = memory_of({**processes(system, way), EMPTY: worker["pid"]})
    cost = found.pop(EMPTY).uss / _MIB
    return Start({b: m.uss / _MIB for b, m in found.items()}, dict.fromkeys(found, cost))


def on_gpu(system: System, way: str) -> Start | None:
    """The device's memory by process; None where that is hidden."""
    process, cost = {}, {}
    for worker in replicas(system, way):
        kpi = worker["process"] or {}
        if kpi.get("gpu_memory") is None or kpi.get("torch_reserved") is None:
            return None
        block = short(worker["worker"])
        process[block] = kpi["gpu_memory"] / _MIB
        cost[block] = (kpi["gpu_memory"] - kpi["torch_reserved"]) / _MIB
    return Start(process, cost)


# --- what it shows -------------------------------------------------------------------------------


def figures_of(
    found: Sequence[Start], states: Mapping[str, float], labels: Mapping[str, Any]
) -> list[Figure]:
    """Per block its process, what of that is the block's own, and its state; then C."""
    out = []
    for block, state in states.items():
        whole = [s.process[block] for s in found]
        own = [s.process[block] - s.cost[block] for s in found]
        row = _ROWS.get(block)
        figure = interval_figure(PROCESS, block, None, whole, "MiB", labels)
        out.append(thesis(figure, row.process if row else None, SOURCE, unit=THESIS_UNIT))
        figure = interval_figure(OWN, block, None, own, "MiB", labels)
        out.append(thesis(figure, row.reserved if row else None, SOURCE, unit=THESIS_UNIT))
        out.append(Figure.of(STATE, block, state, "MiB", 1, labels))
    cost = interval_figure(COST, "", None, cost_of(found), "MiB", labels)
    return [*out, thesis(cost, THESIS_COST, "figure 4.14", unit=THESIS_UNIT)]


def cost_of(found: Sequence[Start]) -> Interval:
    """C over all starts, with its interval; a start is one sample, however many blocks tell it."""
    return median_interval([median(s.cost.values()) for s in found])


def conclude(
    found: Sequence[Start], states: Mapping[str, float], labels: Mapping[str, Any]
) -> Findings:
    """From the starts to what is shown."""
    figures = figures_of(found, states, labels)
    cost = cost_of(found)
    whole = sum(median_interval([s.process[b] for s in found]).value for b in states)
    share = len(states) * cost.value / whole
    spread = f"95% {bounds(cost.low, cost.high)}, n = {cost.n}" if cost.n > 1 else "one start"
    says = (
        f"a process without a block takes {digits(cost.value)} MiB ({spread})"
        f"{quoted(labels, f'{THESIS_COST:g} {THESIS_UNIT}')}, {share:.0%} of the {digits(whole)} "
        f"MiB that {len(states)} blocks take"
    )
    rows = [
        (block, number, round(s.process[block], 3), round(s.cost[block], 3))
        for number, s in enumerate(found)
        for block in states
    ]
    notes = [
        "on the CPU: private memory (USS); pages that workers share with the template count "
        "for none of them. The thesis's is a GPU's memory, where C is a CUDA context",
        "the thesis's numbers are those of table 4.2, of blocks by themselves; figure 4.14 has "
        "none, and its text says that the pipeline's blocks reserve 30 to 40% more",
        f"ours is in MiB, the thesis's in {THESIS_UNIT}, as it prints it. What torch reserves "
        "on a GPU comes in multiples of 2 MiB, and the thesis's are even: it may mean MiB",
    ]
    if known(labels):
        head = PRINTED[SCRIPTED][CLASSIFIER].process
        notes.append(
            f"our {LAST} holds the classifier; the thesis's figures beside it are of a block "
            f"without it, which had a process of its own ({head:g} {THESIS_UNIT})"
        )
    return Findings(
        says,
        figures,
        [beside_grid("Memory per block of a pipeline at work", figures, "block")],
        [Plot("Memory per block", "blocks", draw(found, states, labels))],
        [Data("starts", ("block", "start", "process_mib", "cost_mib"), rows)],
        notes,
    )


def draw(found: Sequence[Start], states: Mapping[str, float], labels: Mapping[str, Any]) -> Any:
    """A bar per block: C, the state, and what work adds; the thesis's process as a mark."""
    page = new_page(7, 3.8)
    ax = page.subplots()
    blocks = list(states)
    cost = [median_interval([s.cost[b] for s in found]).value for b in blocks]
    whole = [median_interval([s.process[b] for s in found]).value for b in blocks]
    # Pages of an artifact that nobody has touched are not resident: a bar ends where its process
    # does, whatever the state comes to.
    own = [max(0.0, w - c) for w, c in zip(whole, cost, strict=True)]
    state = [min(mib, most) for mib, most in zip(states.values(), own, strict=True)]
    rest = [most - mib for mib, most in zip(state, own, strict=True)]
    ax.bar(blocks, cost, color="#bdbdbd", label="C")
    ax.bar(blocks, state, bottom=cost, color="#17779b", label=STATE)
    bottom = [c + s for c, s in zip(cost, state, strict=True)]
    ax.bar(blocks, rest, bottom=bottom, color="#f2b134", label="work")
    marks = {b: _ROWS[b].process for b in blocks if b in _ROWS} if known(labels) else {}
    if marks:
        ax.plot(
            list(marks), list(marks.values()), "k_", ms=18, label=f"the thesis's, {THESIS_UNIT}"
        )
    ax.set(ylabel="MiB")
    ax.legend(fontsize=8, frameon=False)
    return page


EXPERIMENT = Experiment(NAME, ("figure 4.14",), "Memory per block, and of a process", run)
