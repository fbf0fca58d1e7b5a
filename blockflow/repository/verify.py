"""Verify: written blocks equal their model, repeat themselves, and keep rows apart.

Who sends a row gets what the model makes of that row: not of the rows that share its batch, which
are other clients' as a rule, and not of the calls before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from blockflow.core.errors import BlockFlowError, ExportError
from blockflow.core.model import ROWS, Contract
from blockflow.core.scarcity import no_room
from blockflow.repository.company import Made, check_rows, check_strangers, check_whole_batch
from blockflow.repository.differences import (
    TOLERANCE,
    Scale,
    changed,
    difference,
    dtype_of,
    tolerated,
)
from blockflow.repository.job import Job, Piece, Runner, Serving
from blockflow.repository.manifest import PaddingForm
from blockflow.repository.padding import check_padding, length_inputs
from blockflow.repository.probe import check_bindings, example_input, told_of
from blockflow.repository.sources import in_train_mode, model_errors

_DIFFERS: Mapping[str, str] = {
    "pt2": "the export fixes what Python computed then (a number, a branch on its own state): "
    "compute it with torch operations",
    "torchscript-scripted": "scripting reads some Python in its own way; try pt2, the default",
    "torchscript-traced": "tracing keeps for ever the branch that it took, by a value or by a "
    "size, and what numpy or Python computed; try pt2, the default, which names the place, or "
    "torchscript-scripted, which keeps branches and loops",
}
"""What makes a block differ from a model that repeats itself, by format."""

_TRACE_SEEDS = 3
_ANOTHER_SEED = 77
_LARGER = 8.0


def verify_results(job: Job, runners: Mapping[str, Runner]) -> dict[str, float]:
    """Every path equals the model, for several numbers of rows and each range's ends.

    Returns:
        Dims of the checked input, as text -> largest absolute difference.

    Raises:
        ExportError: EXPORT_MISMATCH when a path differs from the model, when a block or the model
            gives two results for one input, or when a row's result depends on the other rows;
            EXPORT_FAILED when the model itself fails.
    """

    def step(name: str, x: Tensor) -> Tensor:
        return _step(job, runners[name], name, x)

    errors: dict[str, float] = {}
    bindings = check_bindings(job.loaded.input)
    coarse = _coarse(job)
    most = max(binding[ROWS] for binding in bindings)
    with torch.no_grad():
        widest = next(_inputs(job, next(b for b in bindings if b[ROWS] == most)))
        scales = {name: Scale.of([y]) for name, y in _model(job, widest).items()}
    for binding in bindings:
        for i, x in enumerate(_inputs(job, binding)):
            dims = "x".join(str(d) for d in x.shape)
            with torch.no_grad():
                expected = _model(job, x)
                made = _walk(job, runners, x)
                # first of all: what changes from call to call differs from the model as well, and
                # no other cause has to be looked for
                if not errors:
                    _another_call(job, runners, binding)
                    _check_repeats(job, runners, x, made, expected)
                for path in job.paths:
                    _, y = made[path[-1]]
                    last = path[-1]
                    error = _difference(job, path, x, y, expected[last], scales[last], coarse)
                    errors[dims] = max(errors.get(dims, 0.0), error)
                # the more rows, the likelier is a branch on all of them to go another way for one
                if binding[ROWS] == most and not i:
                    for check in (check_rows, check_whole_batch, check_strangers):
                        check(job.pieces, step, made, coarse)
    return errors


def verify_served(
    job: Job, runners: Mapping[str, Runner], serving: Serving, files: Mapping[str, Path]
) -> None:
    """Each block's engine computes what the block does: it reads the file in a way of its own, and
    changes the graph (:mod:`blockflow.engine.lean`).

    Raises:
        ExportError: EXPORT_MISMATCH.
    """
    spec, coarse = job.loaded.input, _coarse(job)
    with torch.no_grad():
        inputs = [next(_inputs(job, binding)) for binding in check_bindings(spec, rows=(1, 3))]
        walks = [_walk(job, runners, x) for x in inputs]
    for piece in job.pieces:
        scale = Scale.of(made[piece.name][1] for made in walks)
        with serving(job.info(piece), files[piece.name]) as served:
            for made, run in product(walks, served.values()):
                x, y = made[piece.name]
                try:
                    error, allowed = changed(run(x.contiguous()), y, scale, coarse)
                except BlockFlowError as e:
                    why = f"fails on {list(x.shape)}: {e.message}"
                    raise _not_served(piece, why) from e
                if not error <= allowed:
                    why = f"differs from the block by {error:.3g} on {list(x.shape)}"
                    raise _not_served(piece, f"{why}, allowed is {allowed:.3g}")


def _not_served(piece: Piece, why: str) -> ExportError:
    return ExportError(
        "EXPORT_MISMATCH",
        f"the engine that is to run the block {why}",
        where=piece.name,
        hint="the model and its export agree, so this is a defect of blockflow: please report it; "
        "another --format has another engine",
    )


def _inputs(job: Job, binding: Mapping[str, int]) -> Iterator[Tensor]:
    """One input of these dims; for a trace several, which has taken one branch for all of them.

    A branch by a value that all of these agree on is not found out: no sample could.
    """
    spec, below = job.loaded.input, job.loaded.int_below
    traced = job.format == "torchscript-traced"
    for seed in range(1, 1 + (_TRACE_SEEDS if traced else 1)):
        x = example_input(spec, binding, int_below=below, seed=seed)
        yield x
        if traced and x.is_floating_point():
            yield -x  # whatever its sums, means and outermost values are, they now are not


def verify_padding(job: Job, runners: Mapping[str, Runner]) -> dict[str, PaddingForm]:
    """What each block that promises padding keeps of it, on what it gets in its path.

    Raises:
        ExportError: EXPORT_MISMATCH: the promise does not hold.
    """
    model = job.loaded
    if model.padding is None:
        return {}
    coarse = _coarse(job)
    inputs = length_inputs(model.input, model.padding, int_below=model.int_below)
    with torch.no_grad():
        walks = [_walk(job, runners, x) for x in inputs]
    forms: dict[str, PaddingForm] = {}
    for piece in job.pieces:
        padding = piece.padding
        if padding is None:
            continue
        allowed = tolerated(piece.contract.output.dtype, coarse)

        def run(x: Tensor, name: str = piece.name) -> Tensor:
            return _step(job, runners[name], name, x)

        pairs = [made[piece.name] for made in walks]
        differ = partial(difference, scale=Scale.of(y for _, y in pairs))
        error = check_padding(run, piece.contract, padding, pairs, differ, allowed, piece.name)
        forms[piece.name] = PaddingForm(
            dim=padding.dim, value=padding.value, error=error, tolerance=allowed
        )
    return forms


def _model(job: Job, x: Tensor) -> dict[str, Tensor]:
    """What the model gives; copies, for it may hand out a tensor that its next call changes."""
    with model_errors(job.loaded, x):
        return {name: y.clone() for name, y in job.reference(x).items()}


def _walk(job: Job, runners: Mapping[str, Runner], x: Tensor) -> Made:
    """Run every path on one input of the model."""
    made: dict[str, tuple[Tensor, Tensor]] = {}
    for path in job.paths:
        y = x
        for name in path:
            if name not in made:
                # a copy, as of the model's; in the order of its dims, as a worker gives it on
                given = _step(job, runners[name], name, y)
                made[name] = y, given.clone(memory_format=torch.contiguous_format)
            y = made[name][1]
    return made


def _step(job: Job, run: Runner, name: str, x: Tensor) -> Tensor:
    writes = x._version
    try:
        y = run(x)
    except Exception as e:
        text = str(e).strip().splitlines()
        told = (
            f"the stored block fails on {list(x.shape)}: {type(e).__name__}: "
            f"{text[-1][:300] if text else ''}"
        )
        raise no_room(e, told, name) or ExportError(
            "EXPORT_MISMATCH",
            told,
            where=name,
            hint=f"format {job.format} may have fixed a dim that the contract calls dynamic",
        ) from e
    if x._version != writes:
        raise ExportError("EXPORT_MISMATCH", "the stored block writes into its input", where=name)
    contract = next(piece.contract for piece in job.pieces if piece.name == name)
    _check_dims(contract, x, y, name)
    return y


def _check_dims(contract: Contract, x: Tensor, y: Tensor, name: str) -> None:
    """The contract says of ``y`` what it is: a worker refuses each request of which it is wrong."""
    bound = dict(zip(contract.input.dims, x.shape, strict=True))
    binding = {dim: size for dim, size in bound.items() if isinstance(dim, str)}
    promised = contract.output_dims(binding)
    if tuple(y.shape) != promised or dtype_of(y) != contract.output.dtype:
        raise ExportError(
            "EXPORT_MISMATCH",
            f"the stored block gives {dtype_of(y)}{list(y.shape)} for {list(x.shape)}, its "
            f"contract {contract.output} means {list(promised)}",
            where=name,
            hint="one row has lost its dim: squeeze(dim) and reshape leave the rows alone where "
            "they are told which dims are meant (flatten(1))"
            if y.dim() < len(promised)
            else "an output dim that is a number and an input dim together, or that depends on a "
            "size, is no dim of a contract: cut elsewhere, or fix the dim",
        )


def _another_call(job: Job, runners: Mapping[str, Runner], binding: Mapping[str, int]) -> None:
    """Somebody else's request, of larger values: what is kept of it (a largest value, say, which
    the same input again would not change) shows in the next result. If it fails, it is let be."""

    def larger(x: Tensor) -> Tensor:
        return x * _LARGER if x.is_floating_point() else x

    spec, below = job.loaded.input, job.loaded.int_below
    x = larger(example_input(spec, binding, int_below=below, seed=_ANOTHER_SEED))
    with suppress(BlockFlowError):
        for name, (taken, _) in _walk(job, runners, x).items():
            _step(job, runners[name], name, larger(taken))
    with suppress(BlockFlowError):
        _model(job, x)


def _check_repeats(
    job: Job, runners: Mapping[str, Runner], x: Tensor, made: Made, expected: Mapping[str, Tensor]
) -> None:
    """The same input a second time gives the same, of each block and of the model.

    Both are asked: a block may count its calls in step with the model, and what Python computes
    goes on in the model alone.
    """

    def repeated(who: str, where: str, module: nn.Module, before: Tensor, again: Tensor) -> None:
        found = changed(again, before, Scale.of([before, again]), coarse)
        _refuse_change(who, where, module, *found)

    coarse = _coarse(job)
    for piece in job.pieces:
        taken, before = made[piece.name]
        again = _step(job, runners[piece.name], piece.name, taken)
        repeated("the stored block", piece.name, piece.stage, before, again)
    for name, again in _model(job, x).items():
        repeated("the model", job.loaded.label, job.loaded.module, expected[name], again)


def _refuse_change(who: str, where: str, module: nn.Module, error: float, allowed: float) -> None:
    if not error <= allowed:
        raise ExportError(
            "EXPORT_MISMATCH",
            f"{who} gives two results for one input: they differ by {error:.3g}, allowed is "
            f"{allowed:.3g}",
            where=where,
            hint=in_train_mode(module)
            or "it draws random numbers, or keeps state between calls (a counter, a running mean, "
            "a cache); a result may depend on the input alone",
        )


def _coarse(job: Job) -> float:
    """What the least exact dtype allows that the model computes with, of its input and its weights:
    a result may be of a finer one, and is no more exact for it (``y.double()``)."""
    module = job.loaded.module
    dtypes = {dtype_of(t) for t in (*module.parameters(), *module.buffers())}
    return max(TOLERANCE.get(d, 0.0) for d in (job.loaded.input.dtype, *dtypes))


def _difference(
    job: Job,
    path: Sequence[str],
    x: Tensor,
    y: Tensor,
    expected: Tensor,
    scale: Scale,
    coarse: float,
) -> float:
    """The largest difference, absolutely."""
    where = " -> ".join(path)
    hint = in_train_mode(job.loaded.module) or _DIFFERS[job.format]
    if y.shape != expected.shape or y.dtype != expected.dtype:
        raise ExportError(
            "EXPORT_MISMATCH",
            f"the blocks give {y.dtype}{list(y.shape)}, "
            f"the model {expected.dtype}{list(expected.shape)}",
            where=where,
            hint=hint,
        )
    if lost := int((~expected.isfinite()).sum()):
        raise ExportError(
            "EXPORT_MISMATCH",
            f"{lost} of the {expected.numel()} numbers that the model itself gives for a test "
            f"input {list(x.shape)} are NaN or infinite, which equals nothing",
            where=where,
            hint=_only_in_company(job, path[-1], x)
            or told_of(x)
            + ": a logarithm or a root needs a clamp() in the model, attention one "
            "position at least that is not masked (a row may be padding alone); else check the "
            "weights",
        )
    found, allowed = difference(y, expected, scale), tolerated(dtype_of(y), coarse)
    # a NaN compares false with everything: "not <=" refuses it
    if not found <= allowed:
        raise ExportError(
            "EXPORT_MISMATCH",
            f"the blocks differ from the model by {found:.3g}, allowed is {allowed:.3g}",
            where=where,
            hint=hint,
        )
    return float((y.double() - expected.double()).abs().max())


def _only_in_company(job: Job, last: str, x: Tensor) -> str:
    """A hint where the model makes numbers of a row beside others and not of it alone; else ''."""
    spec = job.loaded.input
    beside = {**spec.bind(spec.dtype, x.shape), ROWS: 7}
    others = example_input(spec, beside, int_below=job.loaded.int_below)
    if len(x) > 1 or not _model(job, torch.cat([x, others]))[last][:1].isfinite().all():
        return ""
    return (
        "beside other rows it makes numbers of this one: it computes over dim 0 (a std(), "
        "which one row has not), and a batch holds rows of several clients (docs/blocks.md)"
    )
