"""The path distribution index (thesis, eq. 4.4): which block is on which device. Pure.

The thesis spreads four blocks over one, two and four GPUs: PDI 25, 50 and 100. Where there are not
several GPUs this is read for cores: a worker is pinned to one, and the PDI counts cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.bench.in_process import Chain
from blockflow.bench.pipeline_ways import block_names, task_name
from blockflow.bench.thesis.served import served

GPUS, CORES = "GPUs", "cores"


def index(devices: int, blocks: int) -> float:
    """Eq. 4.4, in percent."""
    return 100 * devices / blocks


def spread(blocks: int, devices: int) -> tuple[int, ...]:
    """The device of each block, counted from 0: neighbours together, as evenly as it goes."""
    return tuple(b * devices // blocks for b in range(blocks))


def numbers(blocks: int) -> tuple[int, ...]:
    """How many devices are tried: one, half as many as blocks, as many."""
    return tuple(sorted({1, -(-blocks // 2), blocks}))


@dataclass(frozen=True, slots=True)
class Places:
    """What blocks are spread over.

    Attributes:
        kind: :data:`GPUS` or :data:`CORES`.
        names: of them: CUDA device names, or cpu numbers.
    """

    kind: str
    names: Sequence[str]

    def settings(self, place: int) -> Mapping[str, Any]:
        """For a topology's block on the ``place``-th of them."""
        if self.kind == GPUS:
            return {"device": self.names[place]}
        return {"cores": [int(self.names[place])]}

    @property
    def one(self) -> str:
        return self.kind.removesuffix("s")


def way_of(way: str, devices: int) -> str:
    """A way's name on so many devices: of its blocks, and of its task."""
    return f"{task_name(way)}-{devices}"


def spread_topology(
    chain: Chain, ways: Sequence[str], places: Places, counts: Sequence[int]
) -> dict[str, Any]:
    """All ways on all numbers of devices, side by side; what is not asked computes nothing."""
    blocks: list[Any] = []
    tasks: dict[str, Any] = {}
    for count in counts:
        layout = spread(len(chain.blocks), count)
        for way in ways:
            made = served(chain, "cpu", [way])
            names = block_names(way_of(way, count), chain)
            for spec, name, place in zip(made["blocks"], names, layout, strict=True):
                blocks.append({**spec, "name": name, **places.settings(place)})
            (task,) = made["tasks"].values()
            tasks[way_of(way, count)] = {**task, "path": names}
    return {"blocks": blocks, "tasks": tasks}
