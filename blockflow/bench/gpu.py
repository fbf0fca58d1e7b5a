"""``make bench-gpu``: the thesis's section 4.2 on this machine's GPU.

ResNet-50 in four blocks: in one process, and in four worker processes with handles to device memory
(``tensormq``) and with whole tensors over the host (``zeromq``), all on one GPU and interleaved.
What the device itself takes from one process to the next; latency by batch size with one client,
by number of clients; throughput at saturation, GPU memory beyond it, energy; and copies between
host and device, which are counted and not estimated.

The in-process run takes no detour that the workers are spared: it is a process of its own, its
input and its result lie in pinned memory, and under load it has several inferences under way.

Without a GPU it says so and ends with status 2.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress

from blockflow.bench.calibration import calibrate, calibration_figures, compare
from blockflow.bench.contenders import CONTENDERS, Model, prepare_apart
from blockflow.bench.gpu_figures import (
    BOUND,
    IN_PROCESS,
    SUM,
    WAYS,
    Load,
    Memory,
    Sample,
    Samples,
    aim_grid,
    client_figures,
    client_grid,
    growth_mib,
    latency_figures,
    latency_grid,
    load_figures,
    load_grid,
)
from blockflow.bench.gpu_floor import Floor, floor_figures, floor_grid
from blockflow.bench.gpu_load import Energy, flood, images, once
from blockflow.bench.in_process import InProcess, side_by_side
from blockflow.bench.interrupts import orderly
from blockflow.bench.options import make_parser, result_path
from blockflow.bench.own_system import own_settings, workplace
from blockflow.bench.pipeline_ways import topology
from blockflow.bench.results import Figure, ResultFile, fingerprint, make_command
from blockflow.bench.turns import in_turn
from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.launch.gpu_kpi import GpuProbe
from blockflow.tensormq.cuda_api import CudaApi
from blockflow.tensormq.cuda_here import has_mps
from blockflow.tensormq.cuda_preflight import preflight
from blockflow.tensormq.memory import open_device

EXIT_NO_GPU = 2
MODEL, CONTENDER = Model("resnet50"), CONTENDERS["exported"]
"""Cut where the thesis cuts it (figure 4.1)."""

_OUTSTANDING = 32
_PAST = 3
"""Requests under way past saturation, as a multiple of what saturates."""
_KPI_S = 1.0
_WARM_UP = 2
_FEWEST = 10
"""Latencies of which a p90 can be told."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: batch -> rounds, numbers of clients, seconds and rounds of load, and
    rounds and repeats of the device's floor."""

    batches: Mapping[int, int]
    clients: tuple[int, ...]
    client_s: float
    load_s: float
    load_rounds: int
    floor: tuple[int, int] = (20, 15)

    def shortened(self, effort: float) -> Plan:
        """The same, in this share of the time: as many loads, each shorter, and fewer latencies."""
        batches = {
            batch: max(min(rounds, _FEWEST), round(effort * rounds))
            for batch, rounds in self.batches.items()
        }
        return replace(
            self, batches=batches, client_s=effort * self.client_s, load_s=effort * self.load_s
        )


FULL = Plan({1: 200, 2: 100, 4: 100, 8: 60, 16: 40, 32: 30}, tuple(range(1, 11)), 5.0, 10.0, 5)
QUICK = Plan({1: 5, 2: 5}, (1, 2), 0.5, 1.0, 2, (5, 2))


@dataclass(slots=True)
class Bench:
    """One run over a running system.

    Args:
        system: with both ways side by side: the same artifacts under two sets of names.
        others: in-process runs of the same blocks on the same device, one per block.
        energy: of the device.
    """

    plan: Plan
    system: System
    others: Sequence[InProcess]
    energy: Energy
    progress: Progress

    def run(self) -> list[Figure]:
        with Client(self.system.client_endpoint) as client:
            found = latency_figures(self._latencies(client))
            for way, count in itertools.product(WAYS, self.plan.clients):
                found += self._clients(way, count)
            return found + load_figures(self._loads(client))

    # --- one client ------------------------------------------------------------------------------

    def _latencies(self, client: Client) -> Samples:
        samples = Samples(len(MODEL.blocks))
        other = self.others[0]

        def alone(run: Callable[[int], float], rows: int) -> Sample:
            return Sample(run(rows))

        for batch, rounds in self.plan.batches.items():
            x = images(batch)
            bar = self.progress.add_task(f"batch {batch}", total=rounds + _WARM_UP)
            ways: dict[str, Callable[[], Sample]] = {
                IN_PROCESS: partial(alone, other.whole, batch),
                SUM: partial(alone, other.apart, batch),
                **{way: partial(once, client, way, x) for way in WAYS},
            }
            advance = partial(self.progress.advance, bar)
            for way, found in in_turn(ways, rounds, advance, warm_up=_WARM_UP).items():
                samples.ways.setdefault(way, {})[batch] = found
        for way in WAYS:
            samples.copies[way] = self._copies(client, way)
        return samples

    def _copies(self, client: Client, way: str, requests: int = 20) -> tuple[float, float]:
        """(to the device, to the host) per request, from the workers' own counts."""
        before = self._counted(way)
        x = images(1)
        for _ in range(requests):
            client.infer(way, x)
        after = self._counted(way)
        return (after[0] - before[0]) / requests, (after[1] - before[1]) / requests

    def _counted(self, way: str) -> tuple[int, int]:
        time.sleep(_KPI_S)  # the KPIs of what has happened so far are sent four times per second
        kpis = self._processes(way)
        return sum(k["h2d_copies"] for k in kpis), sum(k["d2h_copies"] for k in kpis)

    def _processes(self, way: str) -> list[dict[str, Any]]:
        workers = self.system.status()["workers"]
        return [w["process"] for w in workers if w["worker"].startswith(f"{way}.") and w["process"]]

    # --- several clients, and load ---------------------------------------------------------------

    def _clients(self, way: str, count: int) -> list[Figure]:
        """``count`` clients, each with one request under way."""
        x = images(1)
        with ExitStack() as stack:
            clients = [
                stack.enter_context(Client(self.system.client_endpoint)) for _ in range(count)
            ]
            for client in clients:
                once(client, way, x)
            crew = stack.enter_context(ThreadPoolExecutor(count))
            end = (start := time.monotonic()) + self.plan.client_s

            def ask(client: Client) -> list[float]:
                found = []
                while time.monotonic() < end:
                    found.append(once(client, way, x).total)
                return found

            all_ms = [value for mine in crew.map(ask, clients) for value in mine]
            return client_figures(way, count, all_ms, len(all_ms) / (time.monotonic() - start))

    def _loads(self, client: Client) -> dict[str, Load]:
        """The bound and the ways saturated in turns, then each way with more than that."""
        plan, x = self.plan, images(1)
        bar = self.progress.add_task("saturation", total=plan.load_rounds)
        best_bound(self.others, len(x), 0.0)  # all have been there once: then they begin together

        def rate(arm: str) -> float:
            if arm == BOUND:
                return best_bound(self.others, len(x), plan.load_s)
            return flood(client, arm, x, plan.load_s, _OUTSTANDING).rate

        arms = {arm: partial(rate, arm) for arm in (BOUND, *WAYS)}
        rates = in_turn(arms, plan.load_rounds, partial(self.progress.advance, bar))
        loads = {}
        for way in WAYS:
            before = self._memory(way)
            seconds, outstanding = plan.load_s * _PAST, _OUTSTANDING * _PAST
            past = flood(client, way, x, seconds, outstanding, self.energy)
            growth = growth_mib(before, self._memory(way))
            loads[way] = Load(rates[way], rates[BOUND], growth, past.mj_per_row)
        return loads

    def _memory(self, way: str) -> list[Memory]:
        time.sleep(_KPI_S)
        return [Memory(k["gpu_memory"], k["torch_reserved"]) for k in self._processes(way)]


def best_bound(others: Sequence[InProcess], rows: int, seconds: float) -> float:
    """Rows per second of processes that only compute: of one alone, or of all side by side. Which
    is more depends on who has more to do, the device or the threads that order its kernels."""
    return max(side_by_side(some, rows, seconds) for some in (others[:1], others))


def find_device(name: str = "cuda:0") -> CudaApi:
    """A GPU, able to share its memory.

    Raises:
        SystemError_: why the benchmark cannot run on it.
    """
    try:
        api = open_device(name)
    except BlockFlowError as exc:
        raise SystemError_(
            "MISSING_EXTRA",
            f"no GPU {name} on this machine: {exc.message}",
            hint="this benchmark compares processes on one NVIDIA GPU and has nothing to measure "
            "without; make bench-pipeline measures the same on the CPU",
        ) from exc
    able = preflight(api, os.environ)
    if not able.able:
        api.close()
        raise SystemError_("INTERNAL", f"the GPU cannot be shared: {able.reason}", where=name)
    return api


def measure(plan: Plan, api: CudaApi, console: Console) -> list[Figure]:
    """Everything of a plan, with the steadiness of the machine that orders the device's work."""
    begin = calibrate()
    with workplace(console) as (root, progress):
        bar = progress.add_task("preparing ResNet-50", total=None)
        problem = prepare_apart(MODEL, CONTENDER, root / "blocks")
        if problem is not None:
            raise problem
        with closing(Floor(api, "cuda:0")) as floor:
            floors = floor_figures(floor.measure(*plan.floor))
        chain = MODEL.chain(CONTENDER, root / "blocks")
        with ExitStack() as stack:
            mine = replace(chain, device=api.torch_device)
            others = [stack.enter_context(InProcess(mine)) for _ in chain.blocks]
            system = stack.enter_context(System(own_settings(root)))
            system.apply(topology(replace(chain, device="cuda:0"), WAYS))
            progress.remove_task(bar)
            energy = Energy(GpuProbe("cuda:0", api.facts().uuid))
            found = Bench(plan, system, others, energy, progress).run()
    return [*floors, *found, *calibration_figures(compare(begin, calibrate()))]


def _share(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 1:
        raise argparse.ArgumentTypeError("must lie within 0.1 and 1")
    return value


@orderly
def main(arguments: list[str]) -> int:
    """Run the benchmark, print its tables, write its figures; status 2 without a GPU."""
    parser = make_parser("gpu", __doc__, quick="is everything sound?")
    parser.add_argument(
        "--effort",
        type=_share,
        default=1.0,
        metavar="SHARE",
        help="share of the full length, 0.1 to 1, for a device that is lent by the minute",
    )
    args = parser.parse_args(arguments)
    console = Console()
    try:
        api = find_device()
    except SystemError_ as exc:
        Console(stderr=True).print(f"bench-gpu: {exc.message}\n{exc.hint}", highlight=False)
        return EXIT_NO_GPU
    with closing(api):
        facts = api.facts()
        plan = QUICK if args.quick else FULL.shortened(args.effort)
        found = measure(plan, api, console)
    for grid in (floor_grid, latency_grid, client_grid, load_grid, aim_grid):
        console.print(grid(found).rich())
    gib, mps = round(facts.total_bytes / 2**30, 1), has_mps(os.environ)
    labels = {"gpu": facts.name, "gpu_gib": gib, "mps": mps}
    path = result_path(args, "gpu", whole=True)
    target = ResultFile(path, "gpu", make_command("bench-gpu", arguments))
    target.write(found, {**fingerprint(), **labels})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
