"""Export: a model becomes blocks in a repository, verified against the model.

:func:`export_model` makes a chain (one path); :func:`export_tree` makes separately named blocks of
a model with several outputs, whose heads branch from a trunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import Contract, TensorSpec
from blockflow.repository.artifact import refuse_format
from blockflow.repository.balance import split_evenly
from blockflow.repository.branches import branches
from blockflow.repository.formulas import as_input, output_dims
from blockflow.repository.job import Job, Piece, Serving
from blockflow.repository.manifest import is_block_name, is_version
from blockflow.repository.padding import promised
from blockflow.repository.pieces import store_pieces
from blockflow.repository.probe import example_input, infer_spec, probe_bindings, refuse_rows
from blockflow.repository.report import ExportReport, Progress, silent
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel, model_errors
from blockflow.repository.split import split_model
from blockflow.repository.trace import refuse_more_inputs, refuse_result
from blockflow.repository.tree import in_order, observe, paths_of
from blockflow.repository.unfold import unfold, unfolds

DEFAULT_FORMAT = "pt2"

_IN_ORDER = (
    "between blocks a tensor lies in the order of its dims: use reshape() instead of view(), or "
    "cut elsewhere"
)


@torch.inference_mode(False)
def export_model(
    loaded: LoadedModel,
    repository: BlockRepository,
    *,
    names: Sequence[str] = (),
    prefix: str = "",
    cuts: Sequence[str] = (),
    parts: int = 1,
    format: str = DEFAULT_FORMAT,
    version: str = "1",
    replace_stored: bool = True,
    serving: Serving | None = None,
    progress: Progress = silent,
) -> ExportReport:
    """Export a model as one block or as a chain of blocks.

    Args:
        loaded: the model, see :func:`blockflow.repository.sources.load_model`.
        repository: where to; nothing is stored unless the whole chain equals the model.
        names: the blocks' names, in order; without them ``prefix`` is numbered.
        prefix: one block is called ``prefix``, several ``prefix-1``, ``prefix-2``, ...
        cuts: submodules before which a new block begins.
        parts: without ``cuts``: the number of blocks of even measured time.
        format: of the artifacts.
        version: the blocks' label.
        replace_stored: blocks that are there in this version are replaced; else they are refused.
        serving: loads what was written as a worker would, so that this is compared, too.
        progress: told what is being done.

    Raises:
        ExportError: NOT_SPLITTABLE, EXPORT_FAILED, EXPORT_MISMATCH or VERSION_EXISTS, each with its
            reason.
        RequestError: TOO_LARGE: a row of the input could never be sent.
    """
    _check(version, format)
    loaded = loaded.outside_inference()
    if cuts and parts > 1:
        raise ExportError("NOT_SPLITTABLE", "give either cuts or a number of parts, not both")
    count = len(cuts) + 1 if cuts else parts
    block_names = _names(names, prefix, count)
    if not replace_stored:
        repository.refuse_stored(block_names, version)
    examples = _examples(loaded)
    refuse_result(_try_model(loaded, examples[0]), "EXPORT_FAILED", loaded.label)
    progress("splitting", 0.0)
    stages: Sequence[nn.Module]
    deeper = partial(unfold, loaded.module, loaded.input, examples) if unfolds(format) else None
    if cuts:
        stages = split_model(loaded.module, cuts, examples, deeper)
        labels = _labels(cuts)
    elif parts != 1:
        first = {**probe_bindings(loaded.input)[0], "rows": 1}
        timed = example_input(loaded.input, first, int_below=loaded.int_below)
        with model_errors(loaded, timed):
            stages = split_evenly(loaded.module, parts, examples, timed, deeper)
        labels = [f"part {i + 1} of {parts}" for i in range(parts)]
    else:
        stages, labels = [loaded.module], ["whole model"]
    pieces, _ = _chain(loaded, stages, block_names, labels, loaded.input, examples)
    return store_pieces(
        Job(
            loaded=loaded,
            repository=repository,
            pieces=pieces,
            paths=[block_names],
            reference=lambda x: {block_names[-1]: loaded.module(x.clone())},
            format=format,
            version=version,
            replace_stored=replace_stored,
            progress=progress,
            serving=serving,
        )
    )


@torch.inference_mode(False)
def export_tree(
    loaded: LoadedModel,
    repository: BlockRepository,
    *,
    blocks: Mapping[str, str],
    cuts: Sequence[str] = (),
    format: str = DEFAULT_FORMAT,
    version: str = "1",
    replace_stored: bool = True,
    serving: Serving | None = None,
    progress: Progress = silent,
) -> ExportReport:
    """Export named submodules as blocks of their own; the model may have several outputs.

    How they connect is observed: a block follows the block whose output tensor it gets. What the
    model does in between belongs to the block before it as far as all who follow that need it, and
    to those where it differs. Every path from the model's input to a last block is verified against
    what the model itself computes there; of a last block whose result the model does not return the
    report says so (``partial``).

    Args:
        blocks: block name -> submodule name.
        cuts: submodules inside of those, before which a new block begins: a block that is cut
            becomes NAME-1, NAME-2, ...
        replace_stored, serving: as of :func:`export_model`.

    Raises:
        ExportError: NOT_SPLITTABLE when a submodule is called not just once, or more than one
            tensor crosses between two blocks, or what stands between them cannot be followed, or
            when a cut is not possible, or in none of the blocks; EXPORT_FAILED, EXPORT_MISMATCH,
            VERSION_EXISTS.
        RequestError: as of :func:`export_model`.
    """
    _check(version, format)
    loaded = loaded.outside_inference()
    inside = _cuts_of(blocks, cuts)
    names = {name: _names([], name, len(inside[name]) + 1) for name in blocks}
    every = [part for parts in names.values() for part in parts]
    _names(every, "", len(every))
    if not replace_stored:
        repository.refuse_stored(every, version)
    examples = _examples(loaded)
    _try_model(loaded, examples[0])
    observed = observe(loaded, blocks, examples)
    tree = branches(loaded, blocks, examples, observed, format)
    parents = {name: branch.parent for name, branch in tree.items()}
    paths = [[part for name in path for part in names[name]] for path in paths_of(parents)]
    specs: dict[str | None, TensorSpec] = {None: loaded.input}
    tensors: dict[str | None, Sequence[Tensor]] = {None: examples}
    pieces: list[Piece] = []
    length = max(len(p) for p in paths)
    for name in in_order(parents):
        branch = tree[name]
        taken, takes = specs[branch.parent], tensors[branch.parent]
        stages: Sequence[nn.Module] = [branch.stage]
        labels = [branch.label]
        if inside[name]:
            stages = branch.split(inside[name], taken, takes, format)
            labels = _labels(inside[name], branch.label.removesuffix(".."))
        made, tensors[name] = _chain(
            loaded, stages, names[name], labels, taken, takes, first=branch.parent is None
        )
        specs[name] = as_input(made[-1].contract.output)
        pieces += made
    for piece in pieces:
        piece.position = next(p.index(piece.name) for p in paths if piece.name in p) + 1
        piece.of = length
    leaves = {name: blocks[name] for name in blocks if name not in parents.values()}

    def reference(x: Tensor) -> dict[str, Tensor]:
        seen = observe(loaded, leaves, [x]).calls
        return {names[leaf][-1]: call.gives[0] for leaf, call in seen.items()}

    partial_ends = tuple(names[leaf][-1] for leaf in leaves if observed.ends_early(leaf))
    return store_pieces(
        Job(
            loaded,
            repository,
            pieces,
            paths,
            reference,
            format,
            version,
            replace_stored,
            progress,
            partial_ends,
            serving,
        )
    )


def _chain(
    loaded: LoadedModel,
    stages: Sequence[nn.Module],
    names: Sequence[str],
    labels: Sequence[str],
    taken: TensorSpec,
    tensors: Sequence[Tensor],
    *,
    first: bool = True,
) -> tuple[list[Piece], Sequence[Tensor]]:
    """The blocks of stages that run after one another, and what the last one gives.

    Args:
        taken, tensors: what the first one takes, under all bindings of the model's input.
        first: whether that is the model's input.
    """
    pieces: list[Piece] = []
    for i, (stage, name, label) in enumerate(zip(stages, names, labels, strict=True)):
        results = []
        own = [taken.bind(taken.dtype, x.shape) for x in tensors]
        for x in tensors:
            try:
                with torch.no_grad(), model_errors(loaded, x):
                    results.append(stage(x.clone()))
            except ExportError as e:
                if "stride" in e.message and not (first and i == 0):
                    e.where, e.hint = name, _IN_ORDER
                raise
        if odd := _odd(results[0]):
            raise ExportError("EXPORT_FAILED", f"the model returns a tensor {odd}", where=name)
        derive = partial(output_dims, stage, taken, tensors[0], name)
        given = infer_spec(name, taken, own, results, derive)
        padding = promised(loaded.padding, taken, first=first and i == 0)
        contract = Contract(taken, given)
        piece = Piece(name, stage, contract, tensors[0], label, i + 1, len(stages), padding)
        if first and i == 0 and not tensors[0].is_floating_point():
            piece.int_below = loaded.int_below
        pieces.append(piece)
        # as a worker gives it to the next one, and not with the strides that it came out with
        taken, tensors = as_input(given), [y.contiguous() for y in results]
    return pieces, tensors


def _odd(y: Tensor) -> str:
    """What keeps a tensor from travelling, besides its dims and dtype; '' = nothing."""
    if y.is_nested:
        return "that is nested: to_padded_tensor() makes one to send"
    if y.layout is not torch.strided:
        return f"of layout {str(y.layout).removeprefix('torch.')}: to_dense() makes one to send"
    return "" if y.device.type == "cpu" else f"on {y.device}; blocks are exported on the CPU"


def _labels(cuts: Sequence[str], begin: str = "begin") -> list[str]:
    return [f"{start}..{end}" for start, end in pairwise([begin, *cuts, "end"])]


def _cuts_of(blocks: Mapping[str, str], cuts: Sequence[str]) -> dict[str, list[str]]:
    """The cuts inside of each block."""
    inside: dict[str, list[str]] = {name: [] for name in blocks}
    for cut in cuts:
        around = [name for name, path in blocks.items() if cut.startswith(path + ".")]
        if len(around) != 1:
            raise ExportError(
                "NOT_SPLITTABLE",
                f"submodule {cut!r} lies in {' and '.join(around) or 'none'} of the blocks",
                hint="beside named blocks, a cut has to be inside of one of them",
            )
        inside[around[0]].append(cut)
    return inside


def _check(version: str, format_: str) -> None:
    if not is_version(version):
        raise ExportError(
            "EXPORT_FAILED",
            f"{version[:80]!r} is not a version",
            hint="it starts with a letter or digit; letters, digits, '_', '.', '+' and '-' follow",
        )
    refuse_format(format_)


def _names(names: Sequence[str], prefix: str, count: int) -> list[str]:
    if names:
        made = list(names)
    elif count == 1:
        made = [prefix]
    else:
        made = [f"{prefix}-{i + 1}" for i in range(count)]
    if len(made) != count:
        hint = "give one for each block, in order"
        raise ExportError("EXPORT_FAILED", f"{len(made)} names for {count} blocks", hint=hint)
    for name in made:
        if not is_block_name(name):
            raise ExportError(
                "EXPORT_FAILED",
                f"{name[:80]!r} is not a block name",
                hint="a name starts with a letter; letters, digits, '_', '.' and '-' follow",
            )
    if len(set(made)) != len(made):
        raise ExportError("EXPORT_FAILED", f"names are not unique: {', '.join(made)}")
    return made


def _examples(loaded: LoadedModel) -> list[Tensor]:
    """An input for each probing run. Raises as :func:`refuse_rows`."""
    refuse_rows(loaded.input, loaded.label)
    return [
        example_input(loaded.input, b, int_below=loaded.int_below, seed=i)
        for i, b in enumerate(probe_bindings(loaded.input))
    ]


def _try_model(loaded: LoadedModel, example: Tensor) -> object:
    refuse_more_inputs(loaded.module, loaded.label)
    with torch.no_grad(), model_errors(loaded, example):
        return loaded.module(example.clone())
