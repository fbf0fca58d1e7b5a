"""``blockflow export``: a model becomes blocks in a repository."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from blockflow.bench.interrupts import unbroken
from blockflow.cli.convert import convert_all, print_variants, variant_kinds
from blockflow.cli.exits import exit_code
from blockflow.cli.options import close_json, commas, progress_bar, users_output
from blockflow.cli.streams import complain
from blockflow.core.errors import BlockFlowError, ExportError
from blockflow.core.jsonarg import json_value
from blockflow.core.model import Padding, TensorSpec

if TYPE_CHECKING:
    from blockflow.repository.convert import ConvertReport
    from blockflow.repository.report import ExportReport

_DEFAULT = "default"
_NO_PADDING = "none"
_MIB = 1024 * 1024


def export(
    model: Annotated[str, typer.Argument(help="A zoo model (see --list) or module:factory.")] = "",
    repository: Annotated[
        Path, typer.Option("--repository", "-r", help="Where the blocks go.")
    ] = Path("blocks"),
    name: Annotated[
        str, typer.Option(help="Names of the blocks, with commas; default: PREFIX-1, ...")
    ] = "",
    prefix: Annotated[
        str, typer.Option(help="Prefix of the blocks' names; default: that of model or factory.")
    ] = "",
    split: Annotated[
        str,
        typer.Option(
            help="Submodules before which a new block begins, with commas; "
            "'default' takes the zoo's. With --block: inside of those."
        ),
    ] = "",
    parts: Annotated[int, typer.Option(min=1, help="Blocks of even measured time.")] = 1,
    block: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=SUBMODULE: a block of its own (trunks with several heads), with what the "
            "model does between it and the next."
        ),
    ] = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="pt2, or the deprecated torchscript-scripted and torchscript-traced.",
        ),
    ] = "pt2",
    weights: Annotated[
        Path | None,
        typer.Option(help="A .safetensors file (or its index), or a .pt state dict."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of random weights.")] = 0,
    arg: Annotated[
        list[str] | None, typer.Option(help="KEY=JSON: an argument of the factory.")
    ] = None,
    input_: Annotated[
        str, typer.Option("--input", help=r"The input, e.g. float32\[rows,3,224,224].")
    ] = "",
    range_: Annotated[
        list[str] | None,
        typer.Option("--range", help="A dynamic dim, e.g. length=1..512, or the rows."),
    ] = None,
    int_below: Annotated[
        int, typer.Option(min=0, help="Integer test inputs stay below it (a vocabulary's size).")
    ] = 0,
    padding: Annotated[
        str,
        typer.Option(
            help="DIM or DIM=VALUE: padding this dynamic dim with VALUE (0) changes no result; "
            "checked. 'none' takes a zoo model's promise back."
        ),
    ] = "",
    version: Annotated[
        str, typer.Option(help="Label of the blocks; it becomes the current version.")
    ] = "1",
    force: Annotated[
        bool, typer.Option("--force", help="Replace blocks that are stored in this version.")
    ] = False,
    variants: Annotated[
        str, typer.Option(help="Also make these of every block, see convert; with commas.")
    ] = "",
    list_: Annotated[bool, typer.Option("--list", help="List the zoo's models and stop.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Cut a model into blocks, verify them against the model and store them.

    Nothing is stored unless every block is written, read back, equal to the model
    for 1, 3 and 8 rows, and gives each row its own result, whatever is beside it
    in a batch.
    """
    if list_:
        _print_zoo(json_)
        return
    report: ExportReport | None = None
    made: list[ConvertReport] = []
    failed: BlockFlowError | None = None
    try:
        kinds = variant_kinds(commas(variants), "--variants")
        with users_output():
            report = _export(
                model=model,
                repository=repository,
                names=commas(name),
                prefix=prefix,
                split=split,
                parts=parts,
                blocks=_pairs(block or [], "--block", "trunk=layer1"),
                format=format_,
                weights=weights,
                seed=seed,
                arguments=_arguments(arg or []),
                spec=_spec(input_, range_ or []),
                padding=padding,
                int_below=int_below or None,
                version=version,
                replace_stored=force,
            )
            if kinds:
                for variant in convert_all(repository, [b.name for b in report.blocks], kinds):
                    made.append(variant)
    except BlockFlowError as e:
        failed = e
    stored = {} if report is None else report.to_dict()
    if json_:
        variants_made = {"variants": [r.to_dict() for r in made]} if stored else {}
        close_json({**stored, **variants_made}, failed)
        return
    if report is not None:
        _print_report(report, repository)
    if made:
        print_variants(made)
    if failed is not None:
        complain(failed)
        if stored:
            complain("the blocks are stored; `blockflow convert` makes their variants")
        raise typer.Exit(exit_code(failed))


def _export(
    *,
    model: str,
    repository: Path,
    names: list[str],
    prefix: str,
    split: str,
    parts: int,
    blocks: dict[str, str],
    spec: TensorSpec | None,
    padding: str,
    format: str,
    version: str,
    replace_stored: bool,
    **source: Any,
) -> ExportReport:
    if not model:
        raise _usage("no model is named", "give a zoo model or module:factory")
    with progress_bar() as progress:
        progress("loading torch", 0.0)
        # here, not above: torch takes seconds that --help and --list need not wait for
        with unbroken():
            from blockflow.engine.workshop import EngineWorkshop
            from blockflow.repository.export import export_model, export_tree
            from blockflow.repository.repository import BlockRepository
            from blockflow.repository.sources import load_model
            from blockflow.repository.zoo.catalog import ZOO

        zoo = ZOO.get(model)
        if ":" in model:
            sys.path.insert(0, str(Path.cwd()))  # the user's own module lies in this folder
        asked = None if padding in ("", _NO_PADDING) else _padding(padding)
        loaded = load_model(model, input_spec=spec, padding=asked, **source)
        if padding == _NO_PADDING:
            loaded = replace(loaded, padding=None)
        store, serving = BlockRepository(repository), partial(EngineWorkshop().runners, None)
        if zoo and zoo.blocks and not (split or names or parts > 1):
            blocks = blocks or dict(zoo.blocks)
        if blocks:
            if names or prefix or parts > 1 or split == _DEFAULT:
                raise _usage(
                    "--block goes without --parts, --name, --prefix and --split default",
                    "--split takes submodules inside of blocks: such a block becomes NAME-1, ...",
                )
            return export_tree(
                loaded,
                store,
                blocks=blocks,
                cuts=commas(split),
                format=format,
                version=version,
                replace_stored=replace_stored,
                serving=serving,
                progress=progress,
            )
        cuts = commas(split)
        if split == _DEFAULT:
            if zoo is None or not zoo.cuts:
                raise _usage(f"{model!r} has no default split", "name the submodules")
            cuts = list(zoo.cuts)
        return export_model(
            loaded,
            store,
            names=names,
            prefix=prefix or model.rpartition(":")[2].rpartition(".")[2],
            cuts=cuts,
            parts=parts,
            format=format,
            version=version,
            replace_stored=replace_stored,
            serving=serving,
            progress=progress,
        )


def _print_report(report: ExportReport, repository: Path) -> None:
    title = escape(f"{report.model} -> {repository} ({report.format})")
    table = Table(title=title, title_justify="left")
    table.add_column("block", overflow="fold")
    table.add_column("takes -> gives", overflow="fold")
    for heading in ("parameters", "ms/row", "out B/row", "file MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for b in report.blocks:
        table.add_row(
            b.name,
            f"{_short(b.input)}\n-> {_short(b.output)}",
            f"{b.parameters:,}",
            f"{b.ms:.2f}",
            f"{b.output_bytes:,}",
            f"{b.file_bytes / _MIB:.2f}",
        )
    console = Console()
    console.print(table)
    for path in report.paths:
        console.print(f"path: {' -> '.join(path)}", highlight=False)
    more = [
        f"{b.name} = {b.part}" for b in report.blocks if b.part[:2] == ".." or b.part[-2:] == ".."
    ]
    if more:
        console.print(
            f"'..' is what the model does before or after: {', '.join(more)}",
            highlight=False,
            markup=False,
        )
    checked = ", ".join(report.max_error)
    worst = max(report.max_error.values())
    equal = "equal to what the model computes there" if report.partial else "equal to the model"
    console.print(f"{equal} for {checked}: largest difference {worst:.3g}")
    for name in report.partial:
        console.print(
            f"The model goes on after {name}: what it computes then is in no block. To serve it, "
            "make it a submodule and name that.",
            highlight=False,
        )
    padded = {b.name: b.padding_error for b in report.blocks if b.padding_error is not None}
    if padded:
        worst = max(padded.values())
        console.print(f"may be padded: {', '.join(padded)}: largest difference {worst:.3g}")
    notes = [f"{b.name}: {note}" for b in report.blocks for note in b.notes]
    if notes:
        console.print("A trace keeps for ever what was found here for one input:")
        for note in notes:
            console.print(f"  {note}", highlight=False, markup=False)
    if report.format.startswith("torchscript"):
        console.print("TorchScript is deprecated upstream; pt2 is the default.")


def _print_zoo(as_json: bool) -> None:
    from blockflow.repository.zoo.catalog import ZOO

    if as_json:
        models = {
            n: {"about": z.about, "input": z.input.to_dict(), "split": list(z.cuts)}
            for n, z in ZOO.items()
        }
        typer.echo(json.dumps(models, indent=2))
        return
    table = Table()
    for heading in ("model", "about", "input", "default split or blocks"):  # to be copied: whole
        table.add_column(heading, no_wrap=heading in ("model", "input"))
    for n, z in ZOO.items():
        places = ", ".join(z.blocks or z.cuts)
        table.add_row(n, z.about, _short(str(z.input)), places)
    Console().print(table)


def _short(contract: str) -> str:
    """``float32[rows, 3]`` without blanks, its bracket safe from rich's markup."""
    return contract.replace(" ", "").replace("[", r"\[")


def _usage(message: str, hint: str) -> ExportError:
    return ExportError("EXPORT_FAILED", message, hint=hint)


def _pairs(items: list[str], option: str, example: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for item in items:
        key, sign, value = item.partition("=")
        if not sign or not key or not value:
            raise _usage(f"{option} {item!r} is not NAME=VALUE", f"for example {example}")
        if key in pairs:
            raise _usage(f"{option} gives {key!r} twice", "")
        pairs[key] = value
    return pairs


def _arguments(items: list[str]) -> dict[str, Any]:
    pairs = _pairs(items, "--arg", "classes=10")
    return {key: json_value(value, f"--arg {key}") for key, value in pairs.items()}


def _padding(text: str) -> Padding:
    from blockflow.repository.spec_text import parse_padding

    try:
        return parse_padding(text)
    except ValueError as e:
        raise _usage(f"--padding: {e}", "for example --padding length, or length=0") from e


def _spec(text: str, ranges: list[str]) -> TensorSpec | None:
    from blockflow.repository.spec_text import parse_range, parse_spec

    try:
        parsed = dict(parse_range(r) for r in ranges)
        if not text:
            if parsed:
                raise ValueError("--range goes with --input")
            return None
        return parse_spec(text, parsed)
    except ValueError as e:
        raise _usage(str(e), "for example --input int64[rows,length] --range length=1..512") from e
