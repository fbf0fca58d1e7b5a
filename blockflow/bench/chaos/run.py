"""``make chaos``: the digit tasks under load and random faults, judged by the clients' ledger.

``make soak`` is the same for an hour. The exit status is 1 if a promise was broken. A run is named
by its seed; faults and load are then the same, the machine's timing is not.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from blockflow.bench.canvas import save_page
from blockflow.bench.chaos.faults import Injector, wait_healthy
from blockflow.bench.chaos.load import Array, Load
from blockflow.bench.chaos.plan import KINDS, Kind, plan_faults
from blockflow.bench.chaos.remote import RemoteSystem
from blockflow.bench.chaos.report import (
    Findings,
    draw,
    fault_table,
    figures,
    outcome_table,
    violation_lines,
)
from blockflow.bench.chaos.watch import Watch
from blockflow.bench.results import ResultFile, figure_table, make_command
from blockflow.core.errors import BlockFlowError
from blockflow.core.model import TensorSpec
from blockflow.repository.export import export_tree
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from blockflow.repository.zoo.catalog import ZOO
from blockflow.repository.zoo.digits import HEAD_CLASSES, MultiDigits

QUIET_S = 3.0
"""No faults at the begin, when the load shall be seen to run, and at the end, for the recovery."""

TOPOLOGY: Mapping[str, Any] = {
    "blocks": list(ZOO["digits-multi"].blocks),
    "tasks": {task: ["trunk1", "trunk2", f"head_{task}"] for task in HEAD_CLASSES},
}
_INPUTS = 64
_ROWS = (1, 1, 1, 2, 8)
_HEALTHY_S = 60.0


class _Lag:
    """How late a thread of this process is woken, at worst: the error of every time measured."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        step = 0.01
        while not self._stop.is_set():
            before = time.monotonic()
            self._stop.wait(step)
            self.worst_s = max(self.worst_s, time.monotonic() - before - step)

    def stop(self) -> float:
        self._stop.set()
        self._thread.join()
        return self.worst_s


def prepare(repository: BlockRepository, seed: int) -> tuple[list[Array], dict[str, list[Array]]]:
    """Store the blocks of a digits model with random weights.

    Returns:
        Inputs, and per task the model's own answers to them.
    """
    torch.manual_seed(seed)
    model = MultiDigits().eval()
    spec = TensorSpec("float32", ("rows", 1, 8, 8))
    source = LoadedModel(model, "chaos:digits-multi", spec, seed)
    export_tree(source, repository, blocks=ZOO["digits-multi"].blocks)
    chance = np.random.default_rng(seed)
    inputs = [
        chance.random((_ROWS[i % len(_ROWS)], 1, 8, 8), dtype=np.float32) for i in range(_INPUTS)
    ]
    answers: dict[str, list[Array]] = {}
    with torch.inference_mode():
        for task in HEAD_CLASSES:
            one = model.separate(task)
            answers[task] = [one(torch.from_numpy(x)).numpy() for x in inputs]
    return inputs, answers


def run(
    folder: Path,
    *,
    seconds: float,
    seed: int,
    gap_s: float,
    rate: float,
    deadline_s: float,
    kinds: Sequence[Kind] = KINDS,
    quiet_s: float = QUIET_S,
    advance: Callable[[float, str], None] = lambda _s, _what: None,
) -> Findings:
    """One run in ``folder``; ``advance`` is told the seconds done and the latest fault."""
    inputs, answers = prepare(BlockRepository(folder / "blocks"), seed)
    system = RemoteSystem(folder)
    lag = _Lag()
    with system:
        run_dir = system.run_dir
        watch = Watch(run_dir)
        system.apply(TOPOLOGY)
        load = Load(
            system.client_endpoint, inputs, answers, rate=rate, deadline_s=deadline_s, seed=seed
        )
        found = Findings(load.ledger)
        injector = Injector(system, TOPOLOGY, load.now, seed)
        load.start()
        watch.start()
        for fault in plan_faults(seed, seconds, gap_s, kinds, quiet_s):
            _rest(load, fault.at_s, advance)
            done = injector.inject(fault)
            found.faults.append(done)
            advance(load.now(), done.kind)
        _rest(load, seconds, advance)
        injector.close()
        found.readopted = injector.readopted
        found.recovered = wait_healthy(system, _HEALTHY_S) is not None
        load.stop()
        watch.stop()
        found.memory = watch.samples
    found.lag_s = lag.stop()
    found.survivors = watch.survivors()
    found.files = [str(run_dir)] if run_dir.exists() else []
    return found


def _rest(load: Load, until_s: float, advance: Callable[[float, str], None]) -> None:
    while (left := until_s - load.now()) > 0:
        time.sleep(min(left, 0.5))
        advance(load.now(), "")


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write the figures and the picture; status 1 if a promise was broken."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="python -m blockflow.bench.chaos.run")
    parser.add_argument("--seconds", type=float, default=300.0, help="of load (default 300)")
    parser.add_argument("--seed", type=int, default=1, help="of faults and load (default 1)")
    parser.add_argument("--gap", type=float, default=2.0, help="mean seconds between faults")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second and task")
    parser.add_argument("--deadline", type=float, default=10.0, help="seconds per request")
    parser.add_argument("--only", default="", help="kinds of faults, separated by commas")
    parser.add_argument("--json", default="results/chaos.jsonl", help="file for the figures")
    parser.add_argument("--plot", default="results/chaos.png", help="picture; '' = none")
    parser.add_argument(
        "--target", default="chaos", choices=("chaos", "soak"), help=argparse.SUPPRESS
    )
    args = parser.parse_args(arguments)
    wanted = [k.strip() for k in args.only.split(",") if k.strip()]
    kinds = [k for k in KINDS if k.name in wanted] if wanted else list(KINDS)
    if wanted and len(kinds) != len(set(wanted)):
        parser.error("--only takes some of: " + ", ".join(k.name for k in KINDS))
    if args.seconds <= 2 * QUIET_S or args.gap <= 0 or args.rate <= 0 or args.deadline <= 0:
        parser.error(f"--seconds must exceed {2 * QUIET_S:g}, the others must be above 0")
    console = Console()
    with (
        tempfile.TemporaryDirectory(prefix="bf-chaos-") as folder,
        Progress(console=console) as bar,
    ):
        step = bar.add_task("chaos", total=args.seconds)

        def advance(done_s: float, what: str) -> None:
            text = f"chaos: {what}" if what else None
            bar.update(step, completed=min(done_s, args.seconds), description=text)

        found = run(
            Path(folder),
            seconds=args.seconds,
            seed=args.seed,
            gap_s=args.gap,
            rate=args.rate,
            deadline_s=args.deadline,
            kinds=kinds,
            advance=advance,
        )
    made = figures(found)
    console.print(outcome_table(found))
    console.print(fault_table(found))
    for fault in found.faults:
        if fault.note.startswith("not done"):
            console.print(f"{fault.at_s:7.1f} s  {fault.kind}: {fault.note}", highlight=False)
    memory = [f for f in made if f.name in ("RSS", "shared memory", "descriptors")]
    console.print(figure_table("memory", memory))
    violations = found.violations()
    for line in violation_lines(violations):
        console.print(line, highlight=False)
    command = make_command(args.target, [a for a in arguments if a != f"--target={args.target}"])
    ResultFile(Path(args.json), args.target, command).write(made)
    if args.plot:
        try:
            save_page(draw(found), Path(args.plot))
            console.print(f"picture: {args.plot}", highlight=False)
        except BlockFlowError as e:
            console.print(str(e), highlight=False)
    return 1 if violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
