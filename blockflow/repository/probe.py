"""Probe: example inputs for a contract, and the contract of an output found by running.

A block's output dims are numbers, or names that its input binds, or formulas of such
(core.model.Contract). They are found by running it with several sets of dims: what stays is a
number, what moves with an input dim is that dim, and anything else (half the length, say) is asked
for as a formula (:mod:`blockflow.repository.formulas`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from blockflow.core import limits
from blockflow.core.dims import Dim, names_in, size_of
from blockflow.core.errors import ExportError, RequestError
from blockflow.core.model import DTYPE_BYTES, ROWS, TensorSpec, tensor_bytes
from blockflow.core.scarcity import no_room

PROBE_ROWS = (2, 5)
"""Rows of the two probing runs: never 1, which tracers take for a constant."""

_SMALLER = 16

# Dims that rarely occur as a model's own sizes, so that "equal in all runs" means something; no two
# pairs differ by the same, so that one dim and a number are not taken for another dim.
_PROBE_SIZES = ((7, 13), (11, 19), (17, 29), (23, 37), (31, 47), (41, 61), (43, 67))


def usual_below(dtype: str) -> int:
    """What integer examples stay below where nobody says so: pixels take all that there are, and
    anything else may be a number in a table, whose size is not known."""
    return {"uint8": 256, "int8": 128}.get(dtype, 2)


def refuse_rows(spec: TensorSpec, label: str) -> None:
    """Refuse an input of which no row could ever be sent, before several are made of it.

    Raises:
        RequestError: TOO_LARGE.
    """
    least = spec.least_dims()
    nbytes = tensor_bytes(spec.dtype, least)
    if nbytes > limits.MAX_MESSAGE_BYTES:
        raise RequestError(
            "TOO_LARGE",
            f"a row of the input, {list(least)} at least, has {nbytes} bytes; no tensor that is "
            f"sent may have more than {limits.MAX_MESSAGE_BYTES}",
            where=label,
            hint="smaller dims: see --input; or make it several rows",
        )


def example_input(
    spec: TensorSpec, binding: Mapping[str, int], *, int_below: int | None = None, seed: int = 0
) -> Tensor:
    """A random tensor that fits ``spec``: normal floats, integers in 0 .. int_below - 1.

    Raises:
        SystemError_: NO_SPACE when it is larger than the memory.
        ExportError: EXPORT_FAILED when it is larger than any.
    """
    dims = spec.resolve(binding)
    try:
        return _drawn(spec, dims, int_below, torch.Generator().manual_seed(seed))
    except (RuntimeError, MemoryError) as e:
        which = f"an input {list(dims)} of {spec}"
        lacking = no_room(e, f"{which} does not fit into memory", "")
        raise lacking or ExportError(
            "EXPORT_FAILED",
            f"{which} cannot be made: {str(e)[:200]}",
            hint="smaller dims: see --input and --range",
        ) from e


def told_of(x: Tensor) -> str:
    """What an example input holds, for a hint."""
    if x.is_floating_point():
        return "test inputs are normal random numbers, every second one negative"
    return f"test inputs are integers from {int(x.min())} to {int(x.max())} (--int-below)"


def _drawn(
    spec: TensorSpec, dims: tuple[int, ...], int_below: int | None, generator: torch.Generator
) -> Tensor:
    """Every other row has small integers only: drawn alike, rows of many elements have the same
    largest one, and who divides by that of the whole batch would not be noticed."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(dims, generator=generator).to(dtype)
    highest = 1 if dtype is torch.bool else torch.iinfo(dtype).max
    below = min(int_below or usual_below(spec.dtype), highest + 1, 2**63 - 1)
    drawn = torch.randint(0, below, dims, generator=generator)
    drawn[1::2] %= max(below // _SMALLER, 2)
    return drawn.to(dtype)


def probe_bindings(spec: TensorSpec) -> list[dict[str, int]]:
    """:func:`bindings_apart`, and one that has each dim next to the first: what rounds to a
    multiple gives back sizes that have one remainder, as all odd ones, and no two neighbours."""
    bindings = bindings_apart(spec)
    beside = _beside(spec, bindings[0])
    return bindings if beside in bindings else [*bindings, beside]


def bindings_apart(spec: TensorSpec) -> list[dict[str, int]]:
    """Two bindings of the dynamic dims that differ in every dim whose range allows it, and more
    where those do not tell two dims apart, or turn them round: then each has another value while
    the others stay. One more has each dim with a range at its largest: what a coarse stride leaves
    of the others may be the same."""
    pairs: dict[str, tuple[int, int]] = {ROWS: PROBE_ROWS}
    for i, name in enumerate(spec.dynamic):
        lo, hi = spec.ranges.get(name, (1, 1024))
        # not the beginning of the range, which people make a multiple of what the model divides by
        wanted = [
            tuple(
                min(n if n >= lo else lo - 1 + n, hi)
                for n in _PROBE_SIZES[(i + k) % len(_PROBE_SIZES)]
            )
            for k in range(len(_PROBE_SIZES))
        ]
        least = min(max(lo, 2), hi)
        options = [(a, b) for a, b in (*wanted, (least, hi), (hi, least), (hi, lo)) if a != b]
        free = [pair for pair in options if pair not in pairs.values()]
        pairs[name] = (free or options or [(lo, lo)])[0]
    bindings = [{name: pair[run] for name, pair in pairs.items()} for run in (0, 1)]
    for name in spec.dynamic:
        lo, hi = spec.ranges.get(name, (1, 1024))
        # turned round, too: neither the product of two nor their sum would move
        if lo < hi and sum(set(pairs[name]) == set(pair) for pair in pairs.values()) > 1:
            bindings.append({**bindings[0], name: lo if pairs[name][0] == hi else hi})
        if name in spec.ranges and all(b[name] < hi for b in bindings):
            bindings.append({**bindings[0], name: hi})
    return bindings


def _beside(spec: TensorSpec, binding: Mapping[str, int]) -> dict[str, int]:
    """``binding`` with every dynamic dim one larger, or one smaller at the end of its range."""
    near = dict(binding)
    for name in spec.dynamic:
        lo, hi = spec.ranges.get(name, (1, 1024))
        near[name] += 1 if near[name] < hi else -(near[name] > lo)
    return near


def check_bindings(spec: TensorSpec, rows: Iterable[int] = (1, 3, 8)) -> list[dict[str, int]]:
    """Bindings to verify a block with: each number of rows, the ends of each range, and sizes next
    to the first, which are odd where those are even."""
    middle = probe_bindings(spec)[0]
    bindings = [{**middle, ROWS: r} for r in rows]
    if spec.dynamic:
        bindings.append({**_beside(spec, middle), ROWS: 2})
    for name in spec.dynamic:
        lo, hi = spec.ranges.get(name, (1, 64))
        bindings += [{**middle, ROWS: 2, name: lo}, {**middle, ROWS: 1, name: hi}]
    return bindings


def infer_spec(
    what: str,
    bound_by: TensorSpec,
    bindings: Sequence[Mapping[str, int]],
    tensors: Sequence[Tensor],
    formulas: Callable[[], Sequence[Dim]],
) -> TensorSpec:
    """The contract of a tensor that came out under each of several bindings.

    Args:
        what: names the tensor in errors.
        bound_by: the spec whose dynamic dims may appear.
        bindings: sets of dims, in which the dynamic dims differ: those of :func:`probe_bindings`.
        tensors: the tensor under each of them.
        formulas: asked for all dims where running does not tell one.

    Raises:
        ExportError: NOT_SPLITTABLE when a dim is neither fixed nor one of the input's, or could be
            two of them, and ``formulas`` do not tell it either.
    """

    def refused(why: str, hint: str = "") -> ExportError:
        usual = "a block's output dims follow from the input's, rows first"
        return ExportError("NOT_SPLITTABLE", f"{what}: {why}", hint=hint or usual)

    first = tensors[0]
    ranks = {y.dim() for y in tensors}
    if 0 in ranks:
        raise refused("a single number comes out, not one row for each row of input")
    if len(ranks) > 1:
        raise refused(f"rank {_either(ranks)} for inputs of one contract")
    names = [ROWS, *bound_by.dynamic]
    dims: list[Dim] = []
    derived: Sequence[Dim] = ()
    for i, sizes in enumerate(zip(*(y.shape for y in tensors), strict=True)):
        match = [n for n in names if sizes == tuple(b[n] for b in bindings)]
        moving = [n for n in match if len({b[n] for b in bindings}) > 1]
        if i == 0:
            if ROWS not in match:
                raise refused(
                    f"dim 0 has {sizes[0]} elements for {bindings[0][ROWS]} rows of input"
                )
            dims.append(ROWS)
        elif len(moving) == 1:
            dims.append(moving[0])
        elif len(set(sizes)) == 1 and sizes[0]:
            dims.append(int(sizes[0]))
        elif not any(sizes):
            raise refused(f"dim {i} has no elements")
        else:
            derived = derived or formulas()
            made = tuple(size_of(derived[i], b) for b in bindings) if i < len(derived) else ()
            if made != sizes:
                raise refused(f"dim {i} is {_either(sizes)}, not {derived[i : i + 1]}")
            dims.append(derived[i])
    dtype = str(first.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        hint = "torch.view_as_real() makes a real tensor of a complex one"
        raise refused(
            f"dtype {dtype} cannot travel between blocks",
            hint if first.is_complex() else f"dtypes that can: {', '.join(DTYPE_BYTES)}",
        )
    try:
        own = {name for dim in dims for name in names_in(dim)}
        ranges = {n: r for n, r in bound_by.ranges.items() if n in own}
        return TensorSpec(dtype, tuple(dims), ranges)
    except ValueError as e:  # a rank that no message holds
        raise refused(str(e)) from e


def _either(values: Iterable[object]) -> str:
    return " or ".join(dict.fromkeys(str(v) for v in values))
