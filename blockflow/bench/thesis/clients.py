"""One to ten clients that ask in turn, each with a task of its own (thesis, figure 4.11).

All tasks of a way share its blocks, so that a block meets the sum of the clients' rates (eq. 4.3).
"""

from __future__ import annotations

from contextlib import ExitStack

from blockflow.bench.statistics import percentile
from blockflow.bench.thesis.beside import beside_grid
from blockflow.bench.thesis.clients_figures import KNEE, STEP, Clients, Visit
from blockflow.bench.thesis.experiment import Context, Data, Experiment, Findings, Plot
from blockflow.bench.thesis.served import (
    ARMS,
    ask_in_turn,
    input_of,
    served,
    task_of,
    warm,
)
from blockflow.bench.turns import crossed
from blockflow.client import Client

NAME = "clients"


def run(ctx: Context) -> Findings:
    """Every number of clients by all ways in each round."""
    counts, rounds, seconds = ctx.pick((tuple(range(1, 11)), 12, 1.0), ((1, 2, 4), 1, 0.2))
    most = max(counts)
    chain = ctx.chain()
    x = input_of(chain)
    found: dict[tuple[str, int], list[Visit]] = {(arm, n): [] for n in counts for arm in ARMS}
    with (
        ctx.system(served(chain, ctx.settings.device, ARMS, tasks=most)) as system,
        ExitStack() as stack,
    ):
        clients = [stack.enter_context(Client(system.client_endpoint)) for _ in range(most)]
        for number, client in enumerate(clients):
            warm(client, [task_of(arm, number) for arm in ARMS], x, 1)

        def visit(arm: str, n: int) -> Visit:
            tasks = [task_of(arm, i) for i in range(n)]
            asked = ask_in_turn(clients[:n], tasks, x, seconds)
            return Visit(percentile(asked.steady_ms, 50), asked.rate, asked.refused)

        with ctx.step("clients that ask in turn", rounds * len(found)) as advance:
            for number in range(rounds):
                for n, arm in crossed(counts, ARMS, number):
                    found[arm, n].append(visit(arm, n))
                    advance()
                ctx.keep(Clients(found, ctx.settings.labels).figures())
    made = Clients(found, ctx.settings.labels)
    figures = made.figures()
    heads = ("way", "clients", "round", "median_ms", "per_s", "refused")
    knees = [f for f in figures if f.name in (KNEE, STEP)]
    notes = [
        f"equal visits were apart by up to {made.noise:.0%}: read no difference smaller than that",
        *made.refusals(),
    ]
    return Findings(
        made.says(),
        figures,
        [made.grid(), beside_grid("Where latency begins to grow", knees)],
        [Plot("Round trip and throughput by number of clients", "clients", made.draw())],
        [Data("visits", heads, made.rows())],
        notes,
    )


EXPERIMENT = Experiment(NAME, ("figure 4.11",), "Latency and throughput, 1 to 10 clients", run)
