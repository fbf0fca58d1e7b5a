"""``make bench-gpu``: the thesis's section 4.2 on this machine's GPU.

ResNet-50 in four blocks: in one process, and in four worker processes with handles to device memory
(``tensormq``) and with whole tensors over the host (``zeromq``), all on one GPU and interleaved.
Latency by batch size with one client, by number of clients, throughput at saturation, GPU memory
beyond it, energy, and copies between host and device, which are counted and not estimated.

Without a GPU it says so and ends with status 2.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from blockflow.bench.gpu_figures import (
    IN_PROCESS,
    SUM,
    WAYS,
    Load,
    Samples,
    aim_grid,
    client_figures,
    client_grid,
    latency_figures,
    latency_grid,
    load_figures,
    load_grid,
)
from blockflow.bench.results import Figure, ResultFile, fingerprint
from blockflow.client import Client
from blockflow.control.system import System
from blockflow.core.errors import BlockFlowError, SystemError_
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.registry import create_engine
from blockflow.launch.gpu_kpi import GpuProbe
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import load_model
from blockflow.tensormq.cuda_api import CudaApi
from blockflow.tensormq.cuda_preflight import preflight
from blockflow.tensormq.memory import open_device

EXIT_NO_GPU = 2
BLOCKS = tuple(f"block{i}" for i in range(1, 5))
CUTS = ("layer2", "layer3", "layer4")
"""Where the thesis cuts ResNet-50 (figure 4.1)."""

_OUTSTANDING = 32
_PAST = 3
"""Requests under way past saturation, as a multiple of what saturates."""
_KPI_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: batch -> rounds, numbers of clients, seconds and rounds of load."""

    batches: Mapping[int, int]
    clients: tuple[int, ...]
    client_s: float
    load_s: float
    load_rounds: int


FULL = Plan({1: 200, 2: 100, 4: 100, 8: 60, 16: 40, 32: 30}, tuple(range(1, 11)), 5.0, 10.0, 5)
QUICK = Plan({1: 5, 2: 5}, (1, 2), 0.5, 1.0, 2)


class InProcess:
    """The blocks in this process: the same artifacts and engines, nothing between them."""

    def __init__(self, repository: BlockRepository, device: str) -> None:
        self._device = device
        self._engines: list[Engine] = []
        for name in BLOCKS:
            engine = create_engine(repository.info(name), EngineOptions(device=device))
            with repository.artifact(name) as path:
                engine.load(path)
            engine.warm_up()
            self._engines.append(engine)

    def run(self, x: np.ndarray) -> float:
        """Milliseconds from the host's tensor to the host's result, with one wait at the end."""
        return self._run(x, lambda: None)

    def run_apart(self, x: np.ndarray) -> float:
        """The same with a wait after every block: the sum of the blocks."""
        return self._run(x, self._wait)

    def _run(self, x: np.ndarray, between: Callable[[], None]) -> float:
        import torch

        start = time.monotonic_ns()
        with torch.inference_mode():
            y: Any = torch.from_numpy(x).to(self._device)
            for engine in self._engines:
                y = engine.run(y)
                between()
            y.cpu()
        return (time.monotonic_ns() - start) / 1e6

    def _wait(self) -> None:
        import torch

        if self._device != "cpu":
            torch.cuda.synchronize(self._device)

    def rate(self, x: np.ndarray, seconds: float) -> float:
        """Rows per second, two inferences under way: the bound of one stream of work."""
        import torch

        waiting: deque[Any] = deque()
        done = 0
        end = (start := time.monotonic()) + seconds
        with torch.inference_mode():
            while time.monotonic() < end:
                y: Any = torch.from_numpy(x).to(self._device, non_blocking=True)
                for engine in self._engines:
                    y = engine.run(y)
                waiting.append(y)
                if len(waiting) > 1:
                    waiting.popleft().cpu()
                    done += len(x)
        return done / (time.monotonic() - start)


def topology() -> dict[str, Any]:
    """Both ways side by side: the same artifacts under two sets of names."""
    blocks = [
        {"name": f"{way}.{b}", "block": b, "device": "cuda:0", "mode": way, "slots": 16}
        for way in WAYS
        for b in BLOCKS
    ]
    return {"blocks": blocks, "tasks": {way: [f"{way}.{b}" for b in BLOCKS] for way in WAYS}}


class Bench:
    """One run over a running system."""

    def __init__(self, plan: Plan, system: System, local: InProcess, progress: Progress) -> None:
        self._plan = plan
        self._system = system
        self._local = local
        self._progress = progress
        self._probe = GpuProbe("cuda:0")

    def run(self) -> list[Figure]:
        with Client(self._system.client_endpoint) as client:
            found = latency_figures(self._latencies(client))
            for way, count in itertools.product(WAYS, self._plan.clients):
                found += self._clients(way, count)
            found += load_figures({way: self._load(client, way) for way in WAYS})
        return found

    # --- one client ------------------------------------------------------------------------------

    def _latencies(self, client: Client) -> Samples:
        samples = Samples(len(BLOCKS))
        for batch, rounds in self._plan.batches.items():
            x = images(batch)
            bar = self._progress.add_task(f"batch {batch}", total=rounds + 2)
            ways: list[tuple[str, Callable[[], float]]] = [
                (IN_PROCESS, partial(self._local.run, x)),
                (SUM, partial(self._local.run_apart, x)),
                *((way, partial(once, client, way, x)) for way in WAYS),
            ]
            for n in range(-2, rounds):
                shift = n % len(ways)
                for way, measure in ways[shift:] + ways[:shift]:
                    value = measure()
                    if n >= 0:
                        samples.add(way, batch, value)
                self._progress.advance(bar)
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
        workers = self._system.status()["workers"]
        return [w["process"] for w in workers if w["worker"].startswith(f"{way}.") and w["process"]]

    # --- several clients, and load ---------------------------------------------------------------

    def _clients(self, way: str, count: int) -> list[Figure]:
        """``count`` clients, each with one request under way."""
        samples: list[list[float]] = [[] for _ in range(count)]
        end = (start := time.monotonic()) + self._plan.client_s

        def ask(mine: list[float]) -> None:
            x = images(1)
            with Client(self._system.client_endpoint) as client:
                while time.monotonic() < end:
                    mine.append(once(client, way, x))

        threads = [threading.Thread(target=ask, args=(mine,)) for mine in samples]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        all_ms = [value for mine in samples for value in mine]
        return client_figures(way, count, all_ms, len(all_ms) / (time.monotonic() - start))

    def _load(self, client: Client, way: str) -> Load:
        x = images(1)
        rates, bounds = [], []
        for _ in range(self._plan.load_rounds):
            bounds.append(self._local.rate(x, self._plan.load_s))
            rates.append(flood(client, way, x, self._plan.load_s, _OUTSTANDING))
        at_saturation = self._memory(way)
        before = self._probe.sample(time.monotonic_ns(), 0).get("gpu_energy_j")
        start = time.monotonic()
        rate = flood(client, way, x, self._plan.load_s * _PAST, _OUTSTANDING * _PAST)
        rows = rate * (time.monotonic() - start)
        after = self._probe.sample(time.monotonic_ns(), 0).get("gpu_energy_j")
        end = self._memory(way)
        growth = None if at_saturation is None or end is None else (end - at_saturation) / 2**20
        spent = None if before is None or after is None else (after - before) * 1e3 / rows
        return Load(rates, bounds, growth, spent)

    def _memory(self, way: str) -> int | None:
        time.sleep(_KPI_S)
        kpis = self._processes(way)
        if any(k["gpu_memory"] is None for k in kpis):
            # In a container NVML hides whose memory is whose; torch's pool and the slab do not.
            return sum((k["torch_reserved"] or 0) for k in kpis)
        return sum(k["gpu_memory"] for k in kpis)


def images(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, 3, 224, 224), dtype=np.float32)


def once(client: Client, way: str, x: np.ndarray) -> float:
    """Milliseconds of one request."""
    start = time.monotonic_ns()
    client.infer(way, x, deadline_s=60.0)
    return (time.monotonic_ns() - start) / 1e6


def flood(client: Client, way: str, x: np.ndarray, seconds: float, outstanding: int) -> float:
    """Rows per second with so many requests under way; rejected ones are asked again."""
    waiting = deque(client.submit(way, x, deadline_s=60.0) for _ in range(outstanding))
    done = 0
    end = (start := time.monotonic()) + seconds
    while waiting:
        try:
            waiting.popleft().result()
            done += len(x)
        except BlockFlowError as exc:
            if not exc.retryable:
                raise
        if time.monotonic() < end:
            waiting.append(client.submit(way, x, deadline_s=60.0))
    return done / (time.monotonic() - start)


def find_device() -> CudaApi:
    """The first GPU, able to share its memory.

    Raises:
        SystemError_: why the benchmark cannot run here.
    """
    try:
        api = open_device("cuda:0")
    except BlockFlowError as exc:
        raise SystemError_(
            "MISSING_EXTRA",
            f"no GPU on this machine: {exc.message}",
            hint="this benchmark compares processes on one NVIDIA GPU and has nothing to measure "
            "without; make bench-pipeline measures the same on the CPU",
        ) from exc
    able = preflight(api, os.environ)
    if not able.able:
        api.close()
        raise SystemError_("INTERNAL", f"the GPU cannot be shared: {able.reason}", where="cuda:0")
    return api


def measure(plan: Plan, api: CudaApi, console: Console) -> list[Figure]:
    with (
        tempfile.TemporaryDirectory(prefix="bf-bench-") as folder,
        Progress(console=console) as progress,
    ):
        root = Path(folder)
        repository = BlockRepository(root / "blocks")
        bar = progress.add_task("exporting ResNet-50", total=None)
        export_model(load_model("resnet50", seed=0), repository, names=BLOCKS, cuts=CUTS)
        local = InProcess(repository, api.torch_device)
        progress.remove_task(bar)
        with System(
            repository=root / "blocks", state_dir=root / "state", rest_port=0, client_port=0
        ) as system:
            system.apply(topology())
            return Bench(plan, system, local, progress).run()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m blockflow.bench.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="is everything sound?")
    parser.add_argument("--json", default="results/gpu.jsonl", help="file for the figures")
    args = parser.parse_args(argv)
    console = Console()
    try:
        api = find_device()
    except SystemError_ as exc:
        Console(stderr=True).print(f"bench-gpu: {exc.message}\n{exc.hint}", highlight=False)
        return EXIT_NO_GPU
    found = measure(QUICK if args.quick else FULL, api, console)
    for grid in (latency_grid(found), client_grid(found), load_grid(found), aim_grid(found)):
        console.print(grid.rich())
    facts = api.facts()
    labels = {"gpu": facts.name, "gpu_gib": round(facts.total_bytes / 2**30, 1)}
    target = ResultFile(Path(args.json), "gpu", "make bench-gpu")
    target.write(found, {**fingerprint(), **labels})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
