"""``make chaos``: digit tasks, good and odd requests, and random faults, by the clients' ledger.

``make soak`` is the same for an hour. With ``--kills N``, N processes of all roles in turn are
killed instead, each as soon as the system has recovered from the one before. The exit status is 1
if a promise was broken, and 75 if only replies were late, which a busy machine may have done. A run
is named by its seed; faults and load are then the same, the machine's timing is not.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console

from blockflow.bench.canvas import save_page
from blockflow.bench.chaos import logs
from blockflow.bench.chaos.faults import FRAGILE, Injector, wait_healthy
from blockflow.bench.chaos.findings import GRACE_S, Findings
from blockflow.bench.chaos.grids import growth_grid
from blockflow.bench.chaos.held import SPARE_S, kept
from blockflow.bench.chaos.kills import RECOVERY_S, REPLICAS, Turns, strike
from blockflow.bench.chaos.lag import Lag
from blockflow.bench.chaos.load import Array, Load, Traffic, told_apart
from blockflow.bench.chaos.plan import KINDS, Fault, Kind, plan_faults
from blockflow.bench.chaos.proxy import Proxy
from blockflow.bench.chaos.remote import RemoteSystem
from blockflow.bench.chaos.report import (
    draw,
    fault_table,
    figures,
    outcome_table,
    violation_lines,
)
from blockflow.bench.chaos.watch import Watch, marked
from blockflow.bench.interrupts import orderly
from blockflow.bench.options import make_parser, some_of
from blockflow.bench.own_system import workplace
from blockflow.bench.results import ResultFile, figure_table, make_command
from blockflow.core.errors import BlockFlowError, make_error
from blockflow.core.model import TensorSpec
from blockflow.repository.echo import save_echo
from blockflow.repository.export import export_tree
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.repository.zoo.catalog import ZOO
from blockflow.repository.zoo.digits import HEAD_CLASSES, MultiDigits

QUIET_S = 3.0
"""No faults at the begin, when the load shall be seen to run, and at the end, for the recovery."""

TOPOLOGY: Mapping[str, Any] = {
    "blocks": [*ZOO["digits-multi"].blocks, FRAGILE],
    "tasks": {
        **{task: ["trunk1", "trunk2", f"head_{task}"] for task in HEAD_CLASSES},
        FRAGILE: [FRAGILE],
    },
}
"""The three digit tasks, and one that a poison kills."""
POISON_VALUE = 666.0
ODD = 8.0
SPREAD = 512.0
"""Inputs lie between 0 and this. The answers of random weights to small ones differ so little that
one request's could pass for another's."""
_INPUTS, _DRAWS = 64, 5
_ROWS = (1, 1, 1, 2, 8)
_HEALTHY_S = 120.0

Advance = Callable[[float, str], None]
"""Is told how far the run is, and the latest fault ('' = none)."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a course of faults has to do with."""

    system: RemoteSystem
    load: Load
    injector: Injector
    found: Findings


def prepare(repository: BlockRepository, seed: int) -> tuple[list[Array], dict[str, list[Array]]]:
    """Store the blocks of a digits model with random weights, and one that a poison kills.

    Returns:
        Inputs, and per task the model's own answers to them.
    """
    torch.manual_seed(seed)
    model = MultiDigits().eval()
    spec = TensorSpec("float32", ("rows", 1, 8, 8))
    source = LoadedModel(model, "chaos:digits-multi", spec, seed)
    export_tree(source, repository, blocks=ZOO["digits-multi"].blocks)
    inputs, answers = exam(model, seed)
    save_echo(repository, FRAGILE, spec, settings={"crash_on_value": POISON_VALUE})
    answers[FRAGILE] = inputs
    return inputs, answers


def exam(model: MultiDigits, seed: int) -> tuple[list[Array], dict[str, list[Array]]]:
    """Inputs whose answers can be told apart, and these by task.

    Raises:
        BlockFlowError: INTERNAL, there are none.
    """
    chance = np.random.default_rng(seed)
    for _ in range(_DRAWS):
        inputs = [
            SPREAD * chance.random((_ROWS[i % len(_ROWS)], 1, 8, 8), dtype=np.float32)
            for i in range(_INPUTS)
        ]
        answers: dict[str, list[Array]] = {}
        with torch.inference_mode():
            for task in HEAD_CLASSES:
                one = model.separate(task)
                answers[task] = [one(torch.from_numpy(x)).numpy() for x in inputs]
        if all(map(told_apart, answers.values())):
            return inputs, answers
    raise make_error("INTERNAL", "the model's answers are too much alike", where="chaos")


def run(
    folder: Path,
    traffic: Traffic,
    *,
    seconds: float,
    gap_s: float,
    kinds: Sequence[Kind] = KINDS,
    quiet_s: float = QUIET_S,
    spare: float = 0.0,
    advance: Advance = lambda _s, _what: None,
) -> Findings:
    """One run in ``folder``; ``advance`` is told the seconds done and the latest fault."""

    def course(stage: Stage) -> None:
        for fault in plan_faults(traffic.seed, seconds, gap_s, kinds, quiet_s, spare):
            _rest(stage.load, fault.at_s, advance)
            done = stage.injector.inject(fault)
            stage.found.faults.append(done)
            advance(stage.load.now(), done.kind)
        _rest(stage.load, seconds, advance)

    return perform(folder, replace(traffic, odd=ODD), TOPOLOGY, course)


def run_kills(
    folder: Path,
    traffic: Traffic,
    *,
    kills: int,
    kinds: Sequence[Kind] = KINDS,
    replicas: int = REPLICAS,
    quiet_s: float = QUIET_S,
    advance: Advance = lambda _s, _what: None,
) -> Findings:
    """Kill ``kills`` processes, those of all roles in turn; ``advance`` is told how many."""

    def course(stage: Stage) -> None:
        load, found = stage.load, stage.found
        _rest(load, quiet_s)
        turns, latest_s = Turns(kinds), load.now()
        while sum(bool(f.tasks) for f in found.faults) < kills:
            kind = turns.take(load.now())
            if kind is None:  # all have died too often lately
                time.sleep(0.1)
                continue
            done, ready_s = strike(stage.system, stage.injector, Fault(load.now(), kind, 0.0))
            if not done.tasks:
                turns.give_back(kind, load.now())
                if load.now() - latest_s > RECOVERY_S:
                    found.defects.append(f"nobody could be killed any more: {done.note}")
                    return
                continue
            found.faults.append(done)
            latest_s = load.now()
            advance(sum(bool(f.tasks) for f in found.faults), done.kind)
            if ready_s is None:
                found.defects.append(f"after {done.kind!r} not everything was ready again in time")
                return
            found.ready_again.setdefault(done.kind, []).append(ready_s)
        _rest(load, load.now() + quiet_s)

    blocks = [{"name": b, "replicas": replicas} for b in TOPOLOGY["blocks"]]
    return perform(folder, traffic, {**TOPOLOGY, "blocks": blocks}, course)


def perform(
    folder: Path, traffic: Traffic, topology: Mapping[str, Any], course: Callable[[Stage], None]
) -> Findings:
    """Start the system and its load, let the course of faults run, and collect what is found."""
    inputs, answers = prepare(BlockRepository(folder / "blocks"), traffic.seed)
    others = psutil.Process().children(recursive=True)
    system = RemoteSystem(folder)
    with marked() as mark, system, ExitStack() as stack:
        watch = Watch(system.run_dir, others=others, mark=mark)
        system.apply(topology)
        proxy = Proxy(system.client_endpoint) if traffic.odd else None
        if proxy is not None:
            stack.callback(proxy.close)
        load = Load(
            system.client_endpoint,
            inputs,
            answers,
            traffic,
            far_address=proxy.endpoint if proxy else "",
        )
        found = Findings(load.ledger)
        injector = Injector(
            system,
            topology,
            load.now,
            traffic.seed,
            proxy=proxy,
            poison=partial(load.poison, FRAGILE, POISON_VALUE),
        )
        load.start()
        watch.start()
        lag = Lag(load.now)
        try:
            course(Stage(system, load, injector, found))
        finally:  # also of an interrupted run: faults leave processes that keep the machine busy
            injector.close()
        found.takeovers = injector.takeovers
        found.recovered = wait_healthy(system, _HEALTHY_S) is not None
        load.stop()
        found.lag = lag.stop()
        found.defects += kept(system, traffic.deadline_s + SPARE_S)
        watch.stop()
        found.memory = watch.samples
    found.defects += [*load.failures, *filter(None, [watch.failure])]
    if system.exit_status != 0:
        found.defects.append(f"the system did not end in order: status {system.exit_status}")
    found.defects += logs.read(folder)
    found.survivors = watch.survivors()
    found.files = watch.files()
    return found


def _rest(load: Load, until_s: float, advance: Advance = lambda _s, _what: None) -> None:
    while (left := until_s - load.now()) > 0:
        time.sleep(min(left, 0.5))
        advance(load.now(), "")


def parse_args(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[Kind]]:
    parser = make_parser("chaos.run", name="chaos")
    parser.add_argument("--seconds", type=float, default=300.0, help="of load (default 300)")
    parser.add_argument("--kills", type=int, default=0, help="kill so many, as fast as it recovers")
    parser.add_argument("--seed", type=int, default=1, help="of faults and load (default 1)")
    parser.add_argument("--gap", type=float, default=2.0, help="mean seconds between faults")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second and task")
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds per request")
    parser.add_argument(
        "--grace", type=float, default=GRACE_S, help="seconds that a reply may be late (0.1)"
    )
    names = some_of([k.name for k in KINDS])
    parser.add_argument("--only", type=names, help="kinds of faults, separated by commas")
    parser.add_argument(
        "--spare",
        type=float,
        default=0.0,
        help="part of the run, at its end, that leaves dispatcher, template and manager alone, so "
        "that a slow leak in them shows (default 0)",
    )
    parser.add_argument("--plot", help="picture (default results/chaos.png); '' = none")
    parser.add_argument(
        "--target", default="chaos", choices=("chaos", "soak"), help=argparse.SUPPRESS
    )
    args = parser.parse_args(arguments)
    kinds = [k for k in KINDS if not args.only or k.name in args.only]
    if args.seconds <= 2 * QUIET_S or args.gap <= 0 or args.rate <= 0 or args.deadline <= 0:
        parser.error(f"--seconds must exceed {2 * QUIET_S:g}, the others must be above 0")
    if not 0 <= args.spare <= 1:
        parser.error("--spare is a part of the run, from 0 to 1")
    if args.kills and not Turns(kinds):
        parser.error("--only leaves nothing that kills")
    # One run must not take the place of another's figures.
    args.name = "kills" if args.kills else args.target
    args.json = args.json or f"results/{args.name}.jsonl"
    args.plot = f"results/{args.name}.png" if args.plot is None else args.plot
    return args, kinds


def status_of(found: Findings) -> int:
    """0, 1 if a promise was broken, EX_TEMPFAIL if it was time alone: then a second run on a
    machine that others share says more; a lost reply is one whatever the next run does."""
    if found.broken():
        return 1
    return os.EX_TEMPFAIL if found.slow() else 0


@orderly
def main(arguments: list[str]) -> int:
    """Run, print, write the figures and the picture; the status is :func:`status_of`."""
    args, kinds = parse_args(arguments)
    console = Console()
    traffic = Traffic(args.rate, args.deadline, args.seed)
    whole = args.kills or args.seconds
    with workplace(console) as (folder, bar):
        step = bar.add_task(args.name, total=whole)

        def advance(done: float, what: str) -> None:
            text = f"{args.name}: {what}" if what else None
            bar.update(step, completed=min(done, whole), description=text)

        if args.kills:
            found = run_kills(Path(folder), traffic, kills=args.kills, kinds=kinds, advance=advance)
        else:
            found = run(
                folder,
                traffic,
                seconds=args.seconds,
                gap_s=args.gap,
                kinds=kinds,
                spare=args.spare,
                advance=advance,
            )
    found.grace_s = args.grace
    made = figures(found)
    console.print(outcome_table(found))
    console.print(fault_table(found))
    for fault in found.faults:
        if fault.note.startswith("not done"):
            console.print(f"{fault.at_s:7.1f} s  {fault.kind}: {fault.note}", highlight=False)
    memory = [f for f in made if f.name in ("RSS", "shared memory", "descriptors")]
    console.print(figure_table("memory", memory))
    console.print(growth_grid(made).rich())
    violations = found.violations()
    for line in (*violation_lines(violations), *found.examples()):
        console.print(line, highlight=False)
    command = make_command(args.target, [a for a in arguments if a != f"--target={args.target}"])
    ResultFile(Path(args.json), args.name, command).write(made)
    if args.plot:
        try:
            save_page(draw(made), Path(args.plot))
            console.print(f"picture: {args.plot}", highlight=False)
        except BlockFlowError as e:
            console.print(str(e), highlight=False)
    return status_of(found)


if __name__ == "__main__":
    raise SystemExit(main())
