"""``make bench``: what a modular pipeline costs beside its compute.

One network in four blocks, four ways, interleaved in one run:

(a) ``in-process``: the blocks called in turn in one process, nothing between them;
(b) ``tensormq``:  one worker process per block, handles between them;
(c) ``zeromq``:    the same with whole tensors in the messages;
(d) ``one-worker``: all four blocks in one worker process.

The order of the ways rotates from round to round, so that drift of the machine hits all alike; read
the ratios. Time accounting is the thesis's (eq. 4.1): waiting + overhead + compute per block.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from blockflow.bench.bare import one_way_ms
from blockflow.bench.results import Figure, ResultFile, figure_table, latency_figure
from blockflow.client import Client, Result
from blockflow.control.system import System
from blockflow.core.model import BlockInfo
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.registry import create_engine
from blockflow.launch.environment import MallocTuning
from blockflow.launch.process_kpi import private_and_shared
from blockflow.repository.export import export_model
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import load_model

LATENCY = "latency"
HOP = "overhead per hop"
RATIO = "latency to in-process"
COMPUTE = "compute to in-process"
ACCOUNTED = "accounted share"
SHORT = {HOP: "hop", RATIO: "total x", COMPUTE: "comp. x", ACCOUNTED: "parts"}
"""Column heads of the figures, short enough for a table of 80 columns."""

WAYS = ("in-process", "tensormq", "zeromq", "one-worker")
SPLIT = ("layer2", "layer3", "layer4")
BLOCKS = tuple(f"block{i}" for i in range(1, 5))
"""The thesis cuts ResNet-50 at the same places (figure 4.1)."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One inference, in milliseconds.

    Attributes:
        total: end to end, by the caller's clock.
        hops: (transit, wait, overhead, compute) per block.
        edge: the Dispatcher's own share and the way of the result back to it.
    """

    total: float
    hops: tuple[tuple[float, float, float, float], ...]
    edge: float = 0.0

    @property
    def compute(self) -> float:
        """All forwards together."""
        return sum(h[3] for h in self.hops)

    @property
    def hop_overhead(self) -> float:
        """Mean over the hops of transit + overhead."""
        return statistics.fmean(t + o for t, _, o, _ in self.hops)

    @property
    def accounted(self) -> float:
        """Share of the end-to-end time that the stamped parts add up to.

        What is missing is the way between the client and the Dispatcher, which nobody stamps.
        """
        return (sum(sum(h) for h in self.hops) + self.edge) / self.total


def topology() -> dict[str, Any]:
    """All ways side by side in one system: the same artifacts under three sets of names."""
    blocks: list[dict[str, Any]] = []
    tasks: dict[str, list[str]] = {}
    for way in WAYS[1:]:
        names = [f"{way}.{b}" for b in BLOCKS]
        tasks[way] = names
        for name, block in zip(names, BLOCKS, strict=True):
            spec: dict[str, Any] = {"name": name, "block": block, "slots": 4}
            if way == "zeromq":
                spec["mode"] = "zeromq"
            if way == "one-worker":
                spec["worker"] = way
            blocks.append(spec)
    return {"blocks": blocks, "tasks": tasks}


def export_resnet(root: Path, artifact_format: str) -> None:
    """ResNet-50 with seeded random weights, cut where the thesis cuts it."""
    export_model(
        load_model("resnet50", seed=0),
        BlockRepository(root),
        names=BLOCKS,
        cuts=SPLIT,
        format=artifact_format,
    )


def load_engines(repository: BlockRepository) -> list[Engine]:
    """The in-process way: the same artifacts, engines and thread count, without a system."""
    engines = []
    for name in BLOCKS:
        info: BlockInfo = repository.info(name)
        engine = create_engine(info, EngineOptions(threads=1))
        with repository.artifact(name) as path:
            engine.load(path)
        engine.warm_up()
        engines.append(engine)
    return engines


def run_in_process(engines: Sequence[Engine], x: np.ndarray) -> Sample:
    import torch

    stamps = [time.monotonic_ns()]
    y: Any = torch.from_numpy(x)
    for engine in engines:
        y = engine.run(y)
        stamps.append(time.monotonic_ns())
    hops = tuple((0.0, 0.0, 0.0, (b - a) / 1e6) for a, b in itertools.pairwise(stamps))
    return Sample((stamps[-1] - stamps[0]) / 1e6, hops)


def run_system(client: Client, way: str, x: np.ndarray) -> Sample:
    start = time.monotonic_ns()
    result: Result = client.infer(way, x, deadline_s=60.0)
    total = (time.monotonic_ns() - start) / 1e6
    hops = tuple((t.transit_ms, t.wait_ms, t.overhead_ms, t.compute_ms) for t in result.timings)
    return Sample(total, hops, result.ingress_ms + result.egress_ms)


def measure(
    client: Client,
    engines: Sequence[Engine],
    batch: int,
    rounds: int,
    advance: Callable[[], None],
) -> dict[str, list[Sample]]:
    """``rounds`` inferences per way after two of warm-up, the order rotating."""
    x = np.random.default_rng(batch).standard_normal((batch, 3, 224, 224), dtype=np.float32)
    samples: dict[str, list[Sample]] = {way: [] for way in WAYS}
    for i in range(-2, rounds):
        shift = i % len(WAYS)
        for way in WAYS[shift:] + WAYS[:shift]:
            one = run_in_process(engines, x) if way == WAYS[0] else run_system(client, way, x)
            if i >= 0:
                samples[way].append(one)
        advance()
    return samples


def figures(batch: int, samples: Mapping[str, Sequence[Sample]]) -> list[Figure]:
    """Per way the latency and, beside the in-process way, what it costs."""
    base = samples[WAYS[0]]
    out = []
    for way, runs in samples.items():
        out.append(latency_figure(LATENCY, way, batch, [s.total for s in runs]))
        if way == WAYS[0]:
            continue
        out.append(latency_figure(HOP, way, batch, [s.hop_overhead for s in runs]))
        # Paired by round: both sides of a ratio saw the same state of the machine.
        pairs = list(zip(base, runs, strict=True))
        for name, values in (
            (RATIO, [b.total / a.total for a, b in pairs]),
            (COMPUTE, [b.compute / a.compute for a, b in pairs]),
            (ACCOUNTED, [b.accounted for b in runs]),
        ):
            value = statistics.median(values)
            out.append(Figure(name, way, batch, None, None, value, "x", len(runs)))
    return out


def table(found: Sequence[Figure]) -> Table:
    """One row per batch and way."""
    out = Table(title="ResNet-50 in 4 blocks, one client (ms)", title_justify="left")
    for head in ("rows", "way", "p50", "p90", *SHORT.values()):
        out.add_column(head, justify="left" if head == "way" else "right", no_wrap=True)
    by = {(f.name, f.mode, f.batch): f for f in found}
    for batch in dict.fromkeys(f.batch for f in found if f.name == LATENCY):
        for way in WAYS:
            latency = by[LATENCY, way, batch]
            cells = [str(batch), way, f"{latency.p50_ms:.1f}", f"{latency.p90_ms:.1f}"]
            for name in SHORT:
                figure = by.get((name, way, batch))
                cells.append("" if figure is None else f"{figure.value:.3f}")
            out.add_row(*cells, end_section=way == WAYS[-1])
    return out


def measure_start(system: System, base: dict[str, Any], count: int) -> list[dict[str, float]]:
    """Add one worker at a time for one more block and see how fast and how big it is.

    ``start_ms`` runs from the order to launch until Ready; ``load_ms`` is the artifact's share;
    ``uss_mib`` the private memory of the idle process beyond its block's parameters and buffers.
    """
    out = []
    for i in range(count):
        block = BLOCKS[i % len(BLOCKS)]
        name = f"extra{i}"
        wanted = {**base, "blocks": [*base["blocks"], {"name": name, "block": block}]}
        system.apply(wanted)
        worker = next(w for w in system.status()["workers"] if w["worker"] == name)
        state = BlockRepository(system.settings.repository).info(block).state_bytes
        uss, _ = private_and_shared(worker["pid"])
        out.append(
            {
                "start_ms": worker["start_ms"],
                "load_ms": worker["load_ms"],
                "uss_mib": (uss - state) / 2**20,
            }
        )
        system.apply(base)
    return out


def start_figures(starts: Sequence[Mapping[str, float]]) -> list[Figure]:
    """How fast one more worker is there, and how big it is (the largest)."""
    ready = [s["start_ms"] for s in starts]
    without = [s["start_ms"] - s["load_ms"] for s in starts]
    most = max(s["uss_mib"] for s in starts)
    return [
        latency_figure("worker ready", "tensormq", None, ready),
        latency_figure("worker ready but for artifact load", "tensormq", None, without),
        Figure("worker USS without state", "tensormq", None, None, None, most, "MiB", len(starts)),
    ]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m blockflow.bench.pipeline", description=__doc__)
    parser.add_argument("--batches", default="1,8,32", help="batch sizes, comma-separated")
    parser.add_argument(
        "--rounds", default="60,16,6", help="rounds per batch size, comma-separated"
    )
    parser.add_argument("--starts", type=int, default=5, help="workers to start one by one")
    parser.add_argument("--format", default="pt2", help="artifact format of the blocks")
    parser.add_argument("--json", default="results/pipeline.jsonl", help="file for the figures")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the process re-executes itself once, tuned as workers are."""
    tuning = MallocTuning().variables()
    if any(os.environ.get(k) != v for k, v in tuning.items()):
        # The allocator reads its settings at process start; the in-process way must have the same.
        command = [sys.executable, "-m", "blockflow.bench.pipeline", *(argv or sys.argv[1:])]
        os.execve(sys.executable, command, {**os.environ, **tuning})
    args = parse_args(argv)
    batches = [int(b) for b in args.batches.split(",")]
    rounds = [int(r) for r in args.rounds.split(",")]
    console = Console()
    with tempfile.TemporaryDirectory(prefix="blockflow-bench-") as folder:
        root = Path(folder)
        with Progress(console=console) as progress:
            step = progress.add_task("exporting ResNet-50", total=None)
            export_resnet(root / "blocks", args.format)
            progress.remove_task(step)
            engines = load_engines(BlockRepository(root / "blocks"))
            with System(
                repository=root / "blocks", state_dir=root / "state", rest_port=0, client_port=0
            ) as system:
                base = topology()
                system.apply(base)
                found: list[Figure] = []
                with Client(system.client_endpoint) as client:
                    for batch, n in zip(batches, rounds, strict=True):
                        bar = progress.add_task(f"batch {batch}", total=n + 2)
                        samples = measure(
                            client, engines, batch, n, functools.partial(progress.advance, bar)
                        )
                        found += figures(batch, samples)
                bar = progress.add_task("starting workers", total=None)
                found += start_figures(measure_start(system, base, args.starts))
            for gap_ms in (0, 30):
                progress.update(bar, description="bare messages")
                times = one_way_ms(root, 100, gap_ms / 1e3)
                name = f"bare ZeroMQ message, {gap_ms} ms apart"
                found.append(latency_figure(name, "ipc", None, times))
            progress.remove_task(bar)
    console.print(table(found))
    console.print(
        figure_table("One more worker; a bare message", [f for f in found if f.batch is None])
    )
    ResultFile(Path(args.json), "pipeline").write(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
