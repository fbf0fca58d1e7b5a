"""``blockflow convert``: further forms of stored blocks, for the engines that need them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from blockflow.bench.interrupts import unbroken
from blockflow.cli.options import Json, close_json, commas, progress_bar
from blockflow.cli.streams import complain
from blockflow.core.engines import VARIANTS
from blockflow.core.errors import BlockFlowError, RequestError

if TYPE_CHECKING:
    from blockflow.repository.convert import ConvertReport

_MIB = 1024 * 1024


def convert(
    blocks: Annotated[list[str], typer.Argument(help="Blocks of the repository.")],
    to: Annotated[str, typer.Option("--to", help=f"With commas: {', '.join(VARIANTS)}.")],
    repository: Annotated[Path, typer.Option("--repository", "-r", help="Where they are.")] = Path(
        "blocks"
    ),
    calibrate: Annotated[
        Path | None,
        typer.Option(help="onnx-int8: real inputs, a .npy or .safetensors file or a folder."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(min=0, help="Largest error, as a part of the largest reference value."),
    ] = None,
    json_: Json = False,
) -> None:
    """Make variants of BLOCKS, verify them against the blocks, and pin them in the manifests.

    Each engine is judged by itself: one that differs too much may not run the
    variant, the others may. Where none may, nothing is stored.

    onnx is for the engines onnxruntime and openvino, onnx-int8 for both with
    precision int8, aoti for the engine compiled.
    """
    kinds = variant_kinds(commas(to) or [""], "--to")
    if tolerance is not None and not isfinite(tolerance):
        raise RequestError("INVALID_REQUEST", f"{tolerance} is no bound", where="--tolerance")
    made: list[ConvertReport] = []
    failed: BlockFlowError | None = None
    try:
        for report in convert_all(
            repository, blocks, kinds, calibrate=calibrate, tolerance=tolerance
        ):
            made.append(report)
    except BlockFlowError as e:
        failed = e
    if json_:
        close_json({"variants": [r.to_dict() for r in made]}, failed)
        return
    if made:
        print_variants(made)
    if failed is not None:
        raise failed


def variant_kinds(kinds: list[str], option: str) -> list[str]:
    """Raises RequestError: INVALID_REQUEST: not all of them are known."""
    unknown = [k for k in kinds if k not in VARIANTS]
    if unknown:
        raise RequestError(
            "INVALID_REQUEST",
            f"no variant {', '.join(filter(None, unknown)) or 'is named'}",
            where=option,
            hint=f"known: {', '.join(VARIANTS)}",
        )
    return kinds


def convert_all(
    repository: Path,
    blocks: Sequence[str],
    kinds: Sequence[str],
    *,
    calibrate: Path | None = None,
    tolerance: float | None = None,
) -> Iterator[ConvertReport]:
    """Every kind of every block, in order. Raises as :func:`convert_block`; what is done stays."""
    with progress_bar() as progress:
        progress("loading torch", 0.0)
        # here, not above: torch takes seconds that --help need not wait for
        with unbroken():
            from blockflow.engine.workshop import EngineWorkshop
            from blockflow.repository.convert import convert_block
            from blockflow.repository.repository import BlockRepository
            from blockflow.repository.samples import load_samples

        store, workshop = BlockRepository(repository), EngineWorkshop()
        specs = {name: store.info(name).contract.input for name in blocks}
        for name in blocks:
            samples = None if calibrate is None else load_samples(calibrate, specs[name])
            for kind in kinds:
                yield convert_block(
                    store,
                    name,
                    kind,
                    workshop,
                    samples=samples,
                    tolerance=tolerance,
                    progress=progress,
                )


def print_variants(made: Sequence[ConvertReport]) -> None:
    """The table for people; warnings go to the standard error."""
    table = Table("block", "variant", "engines: error", title="variants", title_justify="left")
    table.add_column("allowed", justify="right")
    table.add_column("file MiB", justify="right")
    for r in made:
        errors = ", ".join(f"{engine}: {error:.1e}" for engine, error in r.errors.items())
        size = f"{r.file_bytes / _MIB:.2f}"
        table.add_row(r.block, r.variant, errors, f"{r.tolerance:g}", size)
    Console().print(table)
    for r in made:
        for engine, why in r.refused.items():
            complain(f"{r.block} {r.variant}: not for {engine}: {why}")
        if r.warning:
            complain(f"{r.block} {r.variant}: {r.warning}")
