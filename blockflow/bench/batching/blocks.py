"""The benchmark's blocks and their profiles, kept in a folder of their own from run to run.

``python -m blockflow.bench.batching.blocks FOLDER NAME...`` exports what is missing; the benchmark
runs that apart, so that it does not compute itself. The folder's name says what the blocks come
from, and profiles are stored with the digest of their block, so nothing stale is used. What a full
run is compared with it profiles anew: the machine may have been slower, or busy, on another day.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from blockflow.bench.batching.plan import EXPERIMENTS, FULL, TINY, Plan, Recipe
from blockflow.bench.other_process import answer_apart, run_apart
from blockflow.bench.profiling.candidates import Candidate
from blockflow.bench.profiling.plan import Cell, Effort
from blockflow.bench.profiling.run import Wish, measure
from blockflow.bench.simulation.sources import stored_profiles
from blockflow.core.engines import select
from blockflow.core.profile import StageProfile
from blockflow.repository.profiles import ProfileStore
from blockflow.repository.repository import BlockRepository
from blockflow.repository.zoo import catalog

ENGINE, PRECISION = "exported", "fp32"


def recipes_of(*plans: Plan) -> dict[str, Recipe]:
    """All recipes of these plans, by name."""
    found = [r for p in plans for r in p.recipes(EXPERIMENTS)]
    return {r.name: r for r in found}


def folder_of(cache: Path, recipes: Sequence[Recipe]) -> Path:
    """Where the blocks of these recipes lie below ``cache``: another zoo is another folder."""
    zoo = Path(catalog.__file__).parent
    code = b"".join(p.read_bytes() for p in sorted(zoo.glob("*.py")))
    digests = "".join(sorted(r.digest(code) for r in recipes))
    return cache / Recipe(digests, "").digest(code)


def export_apart(folder: Path, recipes: Sequence[Recipe]) -> None:
    """Export the blocks that ``folder`` does not have yet, in a process of their own.

    Raises:
        BlockFlowError: the export's reason.
    """
    run_apart("blockflow.bench.batching.blocks", str(folder), *(r.name for r in recipes))


def export(folder: Path, recipe: Recipe) -> None:
    """Store a recipe's blocks unless they are there. The weights are random but seeded."""
    repository = BlockRepository(folder)
    if set(recipe.blocks) <= set(repository.names()):
        return
    # Here, and not above: the benchmark itself needs no torch.
    from blockflow.repository.export import export_model
    from blockflow.repository.sources import load_model

    loaded = load_model(recipe.model, arguments=recipe.arguments, input_spec=recipe.input, seed=0)
    export_model(loaded, repository, names=recipe.blocks, cuts=recipe.cuts)


class _Watcher:
    """Shows a profile's cells on the benchmark's progress bar."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._name = name
        self._task = progress.add_task(f"profiling {name}", total=None)

    def start(self, seconds: float) -> None:
        self._progress.update(self._task, total=seconds or None)

    def step(self, candidate: Candidate, cell: Cell, left_s: float) -> None:
        total = self._progress.tasks[self._progress.task_ids.index(self._task)].total
        what = f"profiling {self._name}: {cell.rows} rows"
        self._progress.update(self._task, description=what, completed=(total or 0.0) - left_s)

    def close(self) -> None:
        self._progress.remove_task(self._task)


@dataclass(frozen=True, slots=True)
class Profiles:
    """What a recipe's blocks cost, measured in two ways.

    Attributes:
        apart: each block over and over by itself. It finds its weights and its code in the caches;
            these are the profiles that the policies of the running workers predict with.
        in_turn: one block after the other, as a worker runs them.
    """

    apart: Sequence[StageProfile]
    in_turn: Sequence[StageProfile]


def profile(
    folder: Path, recipe: Recipe, effort: Effort, progress: Progress, *, again: bool = False
) -> Profiles:
    """A recipe's profiles; what was measured before is not measured again, unless ``again``.

    Raises:
        BlockFlowError: a block cannot be measured.
    """
    repository = BlockRepository(folder)
    wish = Wish(
        engines=(ENGINE,),
        precisions=(PRECISION,),
        threads=(1,),
        rows=recipe.rows,
        lengths=recipe.lengths or None,
        effort=effort,
        again=again,
    )
    whole = list(recipe.blocks)
    for names in [*([name] for name in whole), *([whole] if len(whole) > 1 else [])]:
        watcher = _Watcher(progress, recipe.name if len(names) > 1 else names[0])
        try:
            measure(repository, names, wish, watcher)
        finally:
            watcher.close()
    spec = {name: {"engine": ENGINE, "precision": PRECISION} for name in whole}
    apart = list(stored_profiles(folder, whole, spec).values())
    store, infos = ProfileStore(folder), [repository.info(name) for name in whole]
    chosen = [select(info, ENGINE, PRECISION, machine=store.machine) for info in infos]
    return Profiles(apart, store.fresh(infos, chosen).parts or apart)


def main(argv: Sequence[str] | None = None) -> int:
    """Export recipes into a folder."""
    folder, *names = argv or sys.argv[1:]
    known = recipes_of(FULL, TINY)

    def export_all() -> None:
        for name in names:
            export(Path(folder), known[name])

    return answer_apart(export_all)


if __name__ == "__main__":
    raise SystemExit(main())
