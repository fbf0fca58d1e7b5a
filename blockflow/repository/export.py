"""Export: a model becomes blocks in a repository, verified against the model.

:func:`export_model` makes a chain (one path); :func:`export_tree` makes separately named blocks of
a model with several outputs, whose heads branch from a trunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import Contract, TensorSpec
from blockflow.repository.artifact import refuse_format
from blockflow.repository.balance import split_evenly
from blockflow.repository.job import Job, Piece, Serving
from blockflow.repository.manifest import is_block_name, is_version
from blockflow.repository.padding import promised
from blockflow.repository.pieces import store_pieces
from blockflow.repository.probe import example_input, infer_spec, probe_bindings
from blockflow.repository.report import ExportReport, Progress, silent
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel, model_errors
from blockflow.repository.split import split_model
from blockflow.repository.traced import refuse_more_inputs
from blockflow.repository.tree import connected, in_order, observe, paths_of
from blockflow.repository.unfold import unfold

DEFAULT_FORMAT = "pt2"


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
    """
    _check(version, format)
    loaded = loaded.outside_inference()
    if cuts and parts > 1:
        raise ExportError("NOT_SPLITTABLE", "give either cuts or a number of parts, not both")
    count = len(cuts) + 1 if cuts else parts
    block_names = _names(names, prefix, count)
    if not replace_stored:
        repository.refuse_stored(block_names, version)
    bindings = probe_bindings(loaded.input)
    examples = [
        example_input(loaded.input, b, int_below=loaded.int_below, seed=i)
        for i, b in enumerate(bindings)
    ]
    _try_model(loaded, examples[0])
    progress("splitting", 0.0)
    stages: Sequence[nn.Module]
    # TorchScript would keep the sizes of one example
    deeper = partial(unfold, loaded.module, loaded.input, examples) if format == "pt2" else None
    if cuts:
        stages = split_model(loaded.module, cuts, examples, deeper)
        labels = [f"begin..{cuts[0]}", *(f"{a}.." for a in cuts)]
    elif parts != 1:
        timed = example_input(loaded.input, {**bindings[0], "rows": 1}, int_below=loaded.int_below)
        with model_errors(loaded, timed):
            stages = split_evenly(loaded.module, parts, examples, timed, deeper)
        labels = [f"part {i + 1} of {parts}" for i in range(parts)]
    else:
        stages, labels = [loaded.module], ["whole model"]
    pieces = _chain(loaded, bindings, examples, stages, block_names, labels)
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
    format: str = DEFAULT_FORMAT,
    version: str = "1",
    replace_stored: bool = True,
    serving: Serving | None = None,
    progress: Progress = silent,
) -> ExportReport:
    """Export named submodules as blocks of their own; the model may have several outputs.

    How they connect is observed: a block follows the block whose output tensor it gets. Every path
    from the model's input to a last block is verified against what the model itself computes there;
    of a last block whose result the model does not return the report says so (``partial``).

    Args:
        blocks: block name -> submodule name.
        replace_stored, serving: as of :func:`export_model`.

    Raises:
        ExportError: NOT_SPLITTABLE when a submodule is called not just once, or gets a tensor that
            neither the model's input nor a named block gives, or that is written to in between;
            EXPORT_FAILED, EXPORT_MISMATCH, VERSION_EXISTS.
    """
    _check(version, format)
    loaded = loaded.outside_inference()
    _names(list(blocks), "", len(blocks))
    if not replace_stored:
        repository.refuse_stored(list(blocks), version)
    bindings = probe_bindings(loaded.input)
    examples = [
        example_input(loaded.input, b, int_below=loaded.int_below, seed=i)
        for i, b in enumerate(bindings)
    ]
    _try_model(loaded, examples[0])
    observed = observe(loaded, blocks, examples)
    calls = observed.calls
    parents = connected(calls)
    paths = paths_of(parents)
    specs: dict[str, TensorSpec] = {}
    pieces: list[Piece] = []
    length = max(len(p) for p in paths)
    for name in in_order(parents):
        parent = parents[name]
        taken = loaded.input if parent is None else specs[parent]
        specs[name] = infer_spec(name, taken, bindings, calls[name].gives)
        position = next(p.index(name) for p in paths if name in p) + 1
        pieces.append(
            Piece(
                name=name,
                stage=loaded.module.get_submodule(blocks[name]),
                contract=Contract(taken, specs[name]),
                example=calls[name].takes[0],
                part=blocks[name],
                position=position,
                of=length,
                padding=promised(loaded.padding, taken, first=parent is None),
            )
        )
    leaves = {path[-1]: blocks[path[-1]] for path in paths}

    def reference(x: Tensor) -> dict[str, Tensor]:
        seen = observe(loaded, leaves, [x]).calls
        return {name: call.gives[0] for name, call in seen.items()}

    partial = tuple(filter(observed.ends_early, leaves))
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
            partial,
            serving,
        )
    )


def _chain(
    loaded: LoadedModel,
    bindings: Sequence[Mapping[str, int]],
    examples: Sequence[Tensor],
    stages: Sequence[nn.Module],
    names: Sequence[str],
    labels: Sequence[str],
) -> list[Piece]:
    pieces: list[Piece] = []
    taken, tensors = loaded.input, list(examples)
    for i, (stage, name, label) in enumerate(zip(stages, names, labels, strict=True)):
        results = []
        for x, example in zip(tensors, examples, strict=True):
            with torch.no_grad(), model_errors(loaded, example):
                results.append(stage(x.clone()))
        if not isinstance(results[0], Tensor):
            raise ExportError(
                "EXPORT_FAILED",
                f"the model returns a {type(results[0]).__name__}, not one tensor",
                where=name,
                hint="name each head as a block of its own (--block name=submodule)",
            )
        given = infer_spec(name, taken, bindings, results)
        pieces.append(
            Piece(
                name,
                stage,
                Contract(taken, given),
                tensors[0],
                label,
                i + 1,
                len(stages),
                promised(loaded.padding, taken, first=i == 0),
            )
        )
        taken, tensors = given, results
    return pieces


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
        raise ExportError("EXPORT_FAILED", f"{len(made)} names for {count} blocks")
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


def _try_model(loaded: LoadedModel, example: Tensor) -> None:
    refuse_more_inputs(loaded.module, loaded.label)
    with torch.no_grad(), model_errors(loaded, example):
        loaded.module(example.clone())
