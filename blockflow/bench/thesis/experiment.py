"""Experiment: what one of the thesis's experiments is, what it is given, and what it hands back.

An experiment is a plain function of a :class:`Context` that returns :class:`Findings`; the registry
(:mod:`blockflow.bench.thesis.experiments`) lists them, and the runner
(:mod:`blockflow.bench.thesis.run`) does what they have in common: the fixed work before and after,
files, plots, the report, and what happens when one fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blockflow.bench.contenders import CONTENDERS, Model, prepare_apart
from blockflow.bench.grid import Grid
from blockflow.bench.in_process import Chain
from blockflow.bench.results import Figure
from blockflow.bench.thesis.beside import THESIS_MODEL
from blockflow.control.system import System

MACHINE, THESIS = "machine", "thesis"
"""Where the constants of calculated experiments come from."""

ENGINE, CPU = "exported", "cpu"
"""What the blocks compute with, and on, unless a call says otherwise."""

Advance = Callable[[], None]
"""One more part of a step is done."""

Step = Callable[[str, int | None], AbstractContextManager[Advance]]
"""``with step("what is done", parts) as advance``: shown while it lasts; None: nobody knows."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a call of ``blockflow bench thesis`` asks of every experiment.

    Attributes:
        quick: is everything sound? Few rounds; the figures mean little.
        model: of the zoo, cut at its usual places. The thesis's is ``resnet50``.
        engine: label of a contender (:data:`blockflow.bench.contenders.CONTENDERS`).
        device: ``cpu`` or ``cuda:N``, as a topology's block says it.
        constants: ``machine`` or ``thesis``: for experiments that calculate from constants.
    """

    quick: bool = False
    model: str = THESIS_MODEL
    engine: str = ENGINE
    device: str = CPU
    constants: str = MACHINE

    @property
    def labels(self) -> dict[str, Any]:
        """For every figure of a measurement that ran the model."""
        return {"model": self.model, "engine": self.engine, "device": self.device}


class Workshop:
    """The blocks, exported once for all experiments of a call.

    Args:
        folder: scratch; every model has a repository of its own below it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: set[tuple[str, str]] = set()

    def repository(self, model: str) -> Path:
        """Folder of a model's repository; it may be empty."""
        path = self._folder / model
        path.mkdir(parents=True, exist_ok=True)
        return path

    def chain(self, model: str, label: str) -> Chain:
        """The blocks of a zoo model for a contender, made when first asked for.

        Raises:
            BlockFlowError: they cannot be made, or the engine cannot run here.
        """
        contender = CONTENDERS[label]
        if (model, label) not in self._made:
            problem = prepare_apart(Model(model), contender, self.repository(model))
            if problem is not None:
                raise problem
            self._made.add((model, label))
        return Model(model).chain(contender, self.repository(model))


class Context:
    """What an experiment is given.

    Args:
        settings: of the call.
        workshop: the call's blocks.
        scratch: a folder of this experiment's own; gone afterwards.

    Attributes:
        kept: what is stored if the experiment breaks off, see :meth:`keep`.
    """

    def __init__(self, settings: Settings, workshop: Workshop, scratch: Path, step: Step) -> None:
        self.settings = settings
        self.workshop = workshop
        self.scratch = scratch
        self.step = step
        self.kept: list[Figure] = []
        self._systems = 0

    def pick(self, full: Any, quick: Any) -> Any:
        """The one for a full run or the one for a quick run."""
        return quick if self.settings.quick else full

    def keep(self, figures: Sequence[Figure]) -> None:
        """All that is found so far, in place of what was kept before.

        It is stored, and marked as partial, if the experiment breaks off. Every experiment calls
        this (a test runs each until its system dies): after every whole round, or, where a round is
        short and figures would disturb the next one, by :func:`turns.in_turn`'s ``broken``.
        """
        self.kept = list(figures)

    def chain(self, label: str | None = None, model: str | None = None) -> Chain:
        """The blocks of the call's model for the call's engine, unless others are named."""
        wanted = model or self.settings.model, label or self.settings.engine
        with self.step("exporting the blocks", None):
            return replace(self.workshop.chain(*wanted), device=self.settings.device)

    @contextmanager
    def system(self, topology: Mapping[str, Any]) -> Iterator[System]:
        """A running system of its own over the call's model's blocks, with ``topology`` applied.

        Raises:
            BlockFlowError: it cannot be started, or the topology is refused.
        """
        self._systems += 1
        with System(
            repository=self.workshop.repository(self.settings.model),
            state_dir=self.scratch / f"state{self._systems}",
            rest_port=0,
            client_port=0,
        ) as system:
            with self.step("starting the workers", None):
                system.apply(topology)
            yield system


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture.

    Attributes:
        stem: of its file's name; several plots of an experiment have several.
        page: by :func:`blockflow.bench.canvas.new_page`.
    """

    title: str
    stem: str
    page: Any


@dataclass(frozen=True, slots=True)
class Data:
    """Raw samples or a curve, in long form, for a CSV file of its own.

    Attributes:
        rows: as long as ``heads``.
    """

    stem: str
    heads: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Findings:
    """What an experiment hands back.

    Attributes:
        says: one line: what it shows. What lies inside the noise is said to (:mod:`beside`).
        figures: all numbers; the thesis's stand beside them as the label ``thesis``.
        tables: our figures beside the thesis's.
        plots: one at least, where something was measured.
        data: what else is worth a file.
        notes: what a reader must know beside the tables, a line each.
        skipped: why it was not run here; everything else is then empty.
        failed: it ran, and found something wrong (a table that does not come out); the call then
            ends with a status that says so.
    """

    says: str
    figures: Sequence[Figure] = ()
    tables: Sequence[Grid] = ()
    plots: Sequence[Plot] = ()
    data: Sequence[Data] = ()
    notes: Sequence[str] = ()
    skipped: str | None = None
    failed: bool = False


def skip(reason: str) -> Findings:
    """Of an experiment that cannot run on this machine."""
    return Findings(f"not run: {reason}", skipped=reason)


def variant(settings: Settings) -> str:
    """What makes another result of the same experiment, for the names of its files: the model, the
    engine and the device, where they are not the usual ones; '' where all are."""
    mine = settings.model, settings.engine, settings.device.partition(":")[0]
    return "-".join(
        m for m, usual in zip(mine, (THESIS_MODEL, ENGINE, CPU), strict=True) if m != usual
    )


Need = Callable[[Settings], str | None]
"""Why an experiment cannot run on this machine; None where it can."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One of the thesis's experiments.

    Attributes:
        name: for ``--only``.
        of: what it reproduces: ``table 4.3``, ``figure 4.11``.
        title: one line.
        run: does it.
        needs: asked before; the first reason skips it.
        variant: what tells its result in such a call from the usual one's, see :func:`variant`.
    """

    name: str
    of: tuple[str, ...]
    title: str
    run: Callable[[Context], Findings]
    needs: tuple[Need, ...] = field(default=())
    variant: Callable[[Settings], str] = field(default=variant)

    def stem(self, settings: Settings) -> str:
        """Of the names of the files of such a call: neither another model nor the thesis's
        constants take the place of what was measured."""
        more = self.variant(settings)
        return f"{self.name}-{more}" if more else self.name
