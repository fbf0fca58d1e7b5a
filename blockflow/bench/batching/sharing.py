"""What a shared trunk can save: weights by where the tasks part, and the batches that it forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from blockflow.bench.batching.plan import Plan

if TYPE_CHECKING:
    from torch import nn

MIB = 2**20

Counts = Mapping[str, tuple[int, int]]
"""Block -> rows and batches since its worker started."""


def own_bytes(model: nn.Module, cut: str) -> int:
    """Bytes of weights and buffers from submodule ``cut`` to the end: a task's own part."""
    state = model.state_dict()
    names = list(state)
    first = next(i for i, n in enumerate(names) if n == cut or n.startswith(f"{cut}."))
    return sum(state[n].nbytes for n in names[first:])


def weight_lines(plan: Plan) -> list[str]:
    """For each place where the tasks could part: their weights relative to whole models."""
    from blockflow.repository.sources import load_model  # brings torch, which only this needs

    recipe = plan.trunk
    loaded = load_model(recipe.model, arguments=recipe.arguments, input_spec=recipe.input, seed=0)
    total = sum(t.nbytes for t in loaded.module.state_dict().values())
    out = []
    for cut in plan.parting:
        own = own_bytes(loaded.module, cut)
        ratio = weight_ratio(total, own, plan.tasks)
        out.append(
            f"tasks that have {cut} and what follows of their own: {own / MIB:.1f} of "
            f"{total / MIB:.1f} MiB each, with {plan.tasks} tasks {ratio:.3f} of the full models' "
            "weights"
        )
    return out


def weight_ratio(total: int, own: int, tasks: int) -> float:
    """Weights of one trunk and so many tails, relative to so many whole models."""
    return (total - own + tasks * own) / (tasks * total)


def counts(status: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Rows and batches so far, by what ``names`` makes of each block; others are left out."""
    found: dict[str, tuple[int, int]] = {}
    for worker in status["workers"]:
        for stage in worker.get("stages", ()):
            name, kpi = names.get(stage["block"]), stage["kpi"]
            if name is not None and kpi:
                rows, batches = found.get(name, (0, 0))
                found[name] = rows + kpi["rows"], batches + kpi["batches"]
    return found


def batch_line(arm: str, pairs: Sequence[tuple[Counts, Counts]]) -> str:
    """Mean rows per batch of each block between pairs of counts; "" where nothing ran."""
    rows: dict[str, int] = {}
    batches: dict[str, int] = {}
    for before, after in pairs:
        for block, (r, b) in after.items():
            r0, b0 = before.get(block, (0, 0))
            rows[block] = rows.get(block, 0) + r - r0
            batches[block] = batches.get(block, 0) + b - b0
    means = [f"{block} {rows[block] / n:.1f}" for block, n in batches.items() if n > 0]
    return f"{arm}: rows per batch at {', '.join(means)}" if means else ""
