"""Whatever a forward does between its submodules: the blocks are equal to it, or it is refused.

``BLOCKFLOW_SEEDS=3000`` tries more models."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import TensorSpec
from blockflow.repository.artifact import read_artifact
from blockflow.repository.export import export_tree
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel
from tests.export_rig import TRACED

WIDTH = 6
SEEDS = int(os.environ.get("BLOCKFLOW_SEEDS", "60"))
KINDS = ("plain", "writes its input", "pair", "keyword", "writes its output", "writes a part")
STEPS = ("add", "relu_", "relu_ as a statement", "half", "view", "add_", "centre", "detach")


class Part(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Any = None, *, named: Any = None) -> Any:
        x = named if x is None else x
        if self.kind == "writes its input":
            x.relu_()
        y = self.linear(x)
        if self.kind == "writes its output":
            y.relu_()
        if self.kind == "writes a part":
            y[:, :2].mul_(0.5)
        return (y, x) if self.kind == "pair" else y


class Any_(nn.Module):
    """A random program over values: each step makes one more, of earlier ones."""

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(rng.choice(KINDS)) for _ in range(rng.randint(2, 6)))
        self.steps: list[tuple[str, int, int]] = []
        values = 1
        for i in range(len(self.parts)):
            for _ in range(rng.randint(0, 2)):
                self.steps.append((rng.choice(STEPS), rng.randrange(values), rng.randrange(values)))
                values += 1
            self.steps.append(("call", i, rng.randrange(max(0, values - 3), values)))
            values += 1
        self.ends = [rng.randrange(values) for _ in range(rng.randint(1, 3))]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        v = [x]
        for step, a, b in self.steps:
            v.append(self.call(a, v[b]) if step == "call" else self.step(step, v[a], v[b]))
        return tuple(v[end] for end in self.ends)

    def call(self, number: int, x: Tensor) -> Tensor:
        part: Any = self.parts[number]
        y: Any = part(named=x) if part.kind == "keyword" else part(x)
        result: Tensor = y[0] if part.kind == "pair" else y
        return result

    def step(self, step: str, a: Tensor, b: Tensor) -> Tensor:
        match step:
            case "add":
                return a + b
            case "relu_":
                return a.relu_()
            case "relu_ as a statement":
                a.relu_()
                return b
            case "half":
                return a * 0.5
            case "view":
                return a.view(-1, WIDTH)
            case "add_":
                return a.add_(0.25)
            case "centre":
                return a - a.mean(1, keepdim=True)
            case _:
                return a.detach()


def given(model: Any_, blocks: dict[str, str], x: Tensor) -> dict[str, Any]:
    """What each block's submodule returns, as it was then."""
    seen: dict[str, Any] = {}

    def watch(name: str) -> Any:
        def hook(_m: nn.Module, _args: Any, out: Any) -> None:
            seen[name] = out.clone() if isinstance(out, Tensor) else None

        return hook

    hooks = [model.get_submodule(p).register_forward_hook(watch(n)) for n, p in blocks.items()]
    model(x.clone())
    for hook in hooks:
        hook.remove()
    return seen


@torch.no_grad()
def test_blocks_are_the_model_or_refused(tmp_path: Path) -> None:
    made = between = 0
    refused: set[str] = set()
    for seed in range(SEEDS):
        rng = Random(seed)
        torch.manual_seed(seed)
        model = Any_(rng).eval()
        numbers = rng.sample(range(len(model.parts)), rng.randint(1, len(model.parts)))
        blocks = {f"b{i}": f"parts.{i}" for i in numbers}
        repo = BlockRepository(tmp_path / str(seed))
        loaded = LoadedModel(model, "any", TensorSpec("float32", ("rows", WIDTH)))
        try:
            report = export_tree(loaded, repo, blocks=blocks, format=TRACED)
        except ExportError as e:
            refused.add(e.code)
            continue
        made += 1
        between += any(".." in block.part for block in report.blocks)
        for scale in (1.0, 1e4):  # beyond what the export has tried
            x = torch.randn(4, WIDTH) * scale
            wanted = given(model, blocks, x)
            for path in report.paths:
                y = x
                for name in path:
                    with repo.artifact(name) as file:
                        y = read_artifact(file, TRACED)(y)
                torch.testing.assert_close(
                    y, wanted[path[-1]], rtol=1e-4, atol=1e-4 * scale, msg=f"seed {seed}"
                )
    assert refused <= {"NOT_SPLITTABLE", "EXPORT_MISMATCH"}
    assert made > SEEDS / 5 and between > SEEDS / 8
