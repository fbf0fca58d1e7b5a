"""Contenders: the engines that ``make bench-pipeline`` compares, and the blocks that each needs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockflow.bench.in_process import Chain
from blockflow.bench.other_process import answer_apart, run_apart
from blockflow.core.engines import ENGINES, FIXED_ROWS, Selection
from blockflow.core.errors import BlockFlowError
from blockflow.engine.registry import host_misfit
from blockflow.repository.repository import BlockRepository
from blockflow.repository.zoo.catalog import ZOO


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine at a precision.

    Attributes:
        label: how tables and ``--engines`` call it.
        engine, precision: as a topology says them.
        format: of the reference artifact.
        fixed_rows: it has a model of its own for each number of rows that it will be asked for.
    """

    label: str
    engine: str
    precision: str = "fp32"
    format: str = "pt2"
    fixed_rows: bool = False

    @property
    def prefix(self) -> str:
        """Of its blocks' names in the repository: artifacts of different formats lie apart."""
        return self.format


CONTENDERS: Mapping[str, Contender] = {
    c.label: c
    for c in (
        Contender("torchscript", "torchscript", format="torchscript-traced"),
        Contender("torchscript-scripted", "torchscript", format="torchscript-scripted"),
        Contender("exported", "exported"),
        Contender("onnxruntime", "onnxruntime"),
        Contender("openvino", "openvino"),
        Contender("openvino-rows", "openvino", fixed_rows=True),
        Contender("openvino-bf16", "openvino", "bf16"),
        Contender("openvino-bf16-rows", "openvino", "bf16", fixed_rows=True),
        Contender("compiled", "compiled"),
    )
}
ANY_ROWS = tuple(label for label, c in CONTENDERS.items() if not c.fixed_rows)
"""Those that may be given batches of sizes that nobody has said before."""
USUAL = ("torchscript", "exported", "onnxruntime", "openvino", "openvino-bf16")
"""Without ``compiled``, which takes minutes and a C++ compiler to prepare, without scripting, which
gives the module that tracing gives (``blockflow bench thesis --only offline``), and without fixed
rows, which take the memory of the weights for each size."""


@dataclass(frozen=True, slots=True)
class Model:
    """A zoo model in blocks; ``blocks`` without a contender's prefix."""

    name: str

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(f"block{i + 1}" for i in range(len(ZOO[self.name].cuts) + 1))

    def chain(self, contender: Contender, root: Path, rows: Sequence[int] = ()) -> Chain:
        """What its in-process run loads; ``rows`` are the batches that it will be given."""
        names = tuple(f"{contender.prefix}.{b}" for b in self.blocks)
        options = {FIXED_ROWS: list(rows)} if contender.fixed_rows and rows else {}
        return Chain(root, names, contender.engine, contender.precision, options=options)


def prepare_apart(model: Model, contender: Contender, root: Path) -> BlockFlowError | None:
    """:func:`prepare` in a process of its own, so that this one neither computes nor compiles; the
    reason when it cannot run here."""
    try:
        run_apart("blockflow.bench.contenders", model.name, contender.label, str(root))
    except BlockFlowError as e:
        return e
    return None


def prepare(model: Model, contender: Contender, root: Path) -> None:
    """Make what ``contender`` loads, once.

    The weights are random but seeded: they do not matter for the time, and all have the same.

    Raises:
        BlockFlowError: why it cannot run here.
    """
    # Here, and not above: a benchmark has this done apart, and needs no torch itself.
    from blockflow.engine.workshop import EngineWorkshop
    from blockflow.repository.convert import convert_block
    from blockflow.repository.export import export_model
    from blockflow.repository.sources import load_model

    repository = BlockRepository(root)
    chain = model.chain(contender, root)
    missing = sorted(set(chain.blocks) - set(repository.names()))
    if missing:
        export_model(
            load_model(model.name, seed=0),
            repository,
            names=chain.blocks,
            cuts=ZOO[model.name].cuts,
            format=contender.format,
        )
    for name in chain.blocks:
        stored = repository.info(name)
        # Asked first: converting takes long, and would be for nothing.
        wanted = Selection(contender.engine, contender.precision, {}, None)
        misfit = host_misfit(stored, wanted)
        if misfit is not None:
            raise misfit
        kinds = ENGINES[contender.engine].files[contender.precision]
        if stored.format not in kinds and kinds[0] not in stored.variants:
            convert_block(repository, name, kinds[0], EngineWorkshop())


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare one contender's blocks."""
    model, label, root = argv or sys.argv[1:]
    return answer_apart(lambda: prepare(Model(model), CONTENDERS[label], Path(root)))


if __name__ == "__main__":
    raise SystemExit(main())
