"""Data of a run: bundled digits, seeded tensors or a user's files; checked against the contract.

Inputs are prepared once, before anything is measured, and handed to LoadGen's process as files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blockflow.bench.demo.data import TASKS as DIGIT_TASKS
from blockflow.bench.demo.data import labels as digit_labels
from blockflow.bench.demo.data import load_data
from blockflow.bench.options import nonsense
from blockflow.core.errors import RequestError
from blockflow.core.model import ROWS, TensorSpec
from blockflow.core.routing import TaskRoute

SYNTHETIC, DIGITS = "synthetic", "digits"
SYNTHETIC_ROWS = 256
DIGITS_SEED = 7
"""Of the demo's parting: another one would hand out images that its model was trained on."""

MAX_SYNTHETIC_ROWS = 100_000
_LARGEST_SEED = 2**32 - 1
_SHOWN = 40
"""Characters of a wrong number that an error repeats."""

_SUFFIXES = (".npy", ".safetensors")
LABELS = "labels"
"""``labels.npy``, or ``labels.TASK.npy`` where tasks have answers of their own; the same with
``.safetensors``, one tensor in each."""

Array = NDArray[Any]
Hook = Callable[[Array], Array]
NO_HOOKS: Mapping[str, Hook] = {}


@dataclass(frozen=True, slots=True)
class Inputs:
    """One task's data.

    Attributes:
        rows: each [1, ...], as the task's contract has it; bfloat16 as uint16 patterns.
        labels: the right class of each row, int64[n]; None where nobody knows it.
        origin: where they come from, for the record.
    """

    rows: list[Array] = field(repr=False)
    dtype: str
    labels: NDArray[np.int64] | None
    origin: str


def load_inputs(
    source: str,
    routes: Mapping[str, TaskRoute],
    *,
    seed: int,
    hooks: Mapping[str, Hook] = NO_HOOKS,
) -> dict[str, Inputs]:
    """Every task's data.

    Args:
        source: ``synthetic``, ``synthetic:ROWS``, ``synthetic:ROWS:BELOW`` (integers are below
            that; a task does not tell the size of its vocabulary), ``digits``, ``digits:SEED`` (of
            the demo that trained the blocks), a .npy or .safetensors file, or a folder of such
            files.
        hooks: by task what its inputs go through first, row by row: [1, ...] to [1, ...].

    Raises:
        RequestError: INVALID_REQUEST for what cannot be read, CONTRACT_MISMATCH for what does not
            fit the task, EMPTY_INPUT.
        SystemError_: MISSING_EXTRA for digits without scikit-learn.
    """
    kind, _, count = source.partition(":")
    if kind == SYNTHETIC:
        found = {t: _synthetic(r.contract.input, count, seed) for t, r in routes.items()}
    elif kind == DIGITS:
        found = _digits(routes, count)
    else:
        found = _files(Path(source), routes)
    return {task: _fit(found[task], routes[task], hooks.get(task)) for task in routes}


def load_hook(text: str) -> Hook:
    """``module:function``, which takes and gives one row as a numpy array.

    Raises:
        RequestError: INVALID_REQUEST with the reason of the import.
    """

    def failed(why: str) -> RequestError:
        return nonsense(why, text, "--preprocess is MODULE:FUNCTION, or TASK=MODULE:FUNCTION,...")

    module, _, name = text.partition(":")
    if not module or not name:
        raise failed("no module, or no function")
    try:
        function = getattr(import_module(module), name)
    except AttributeError:
        raise failed(f"module {module!r} has no {name!r}") from None
    except (Exception, SystemExit) as e:  # an import runs the user's code, which may raise anything
        raise failed(f"the import failed: {type(e).__name__}: {e}") from e
    if not callable(function):
        raise failed(f"{name!r} is no function")
    made: Hook = function
    return made


# --- the sources ---------------------------------------------------------------------------------


def _synthetic(spec: TensorSpec, told: str, seed: int) -> Inputs:
    count, bounded, bound = told.partition(":")
    n, below = _number(count, SYNTHETIC_ROWS), _number(bound, 0)
    if n is None or not 1 <= n <= MAX_SYNTHETIC_ROWS:
        raise nonsense(
            f"{count[:_SHOWN]!r} is no number of rows from 1 to {MAX_SYNTHETIC_ROWS}",
            "--data synthetic:N",
        )
    if below is None or (bounded and not 1 <= below <= 2**63):
        raise nonsense(
            f"{bound[:_SHOWN]!r} is no number that integers are below", "--data synthetic:N:BELOW"
        )
    # torch is only needed here: LoadGen's process starts without it.
    import torch

    from blockflow.repository.probe import bindings_apart, example_input

    bindings = [{**b, ROWS: 1} for b in bindings_apart(spec)] if spec.dynamic else [{ROWS: 1}]
    rows = []
    for i in range(n):
        x = example_input(spec, bindings[i % len(bindings)], int_below=below or None, seed=seed + i)
        plain = x.view(torch.int16) if spec.dtype == "bfloat16" else x
        array = plain.numpy()
        rows.append(array.view(np.uint16) if spec.dtype == "bfloat16" else array)
    origin = f"{n} seeded random rows (seed {seed}{f', integers below {below}' if below else ''})"
    return Inputs(rows, spec.dtype, None, origin)


def _number(text: str, default: int) -> int | None:
    """None for what is none. (Python itself refuses to read thousands of digits.)"""
    if not text:
        return default
    return int(text) if text.isdecimal() and len(text) <= _SHOWN else None


def _digits(routes: Mapping[str, TaskRoute], told: str) -> dict[str, Inputs]:
    seed = _number(told, DIGITS_SEED)
    if seed is None or seed > _LARGEST_SEED:
        raise nonsense(
            f"{told[:_SHOWN]!r} is no seed from 0 to {_LARGEST_SEED}", "--data digits:SEED"
        )
    data = load_data(seed)
    rows = list(data.test_images[:, None])
    origin = f"{len(rows)} held-out digits of scikit-learn (seed {seed})"
    return {
        task: Inputs(
            rows,
            "float32",
            digit_labels(task, data.test_digits) if task in DIGIT_TASKS else None,
            origin,
        )
        for task in routes
    }


def _files(path: Path, routes: Mapping[str, TaskRoute]) -> dict[str, Inputs]:
    """A task with a folder of its own name in there has that folder's files for itself."""
    try:
        places = {task: path / task if (path / task).is_dir() else path for task in routes}
        rows = {place: _rows(place) for place in dict.fromkeys(places.values())}
    except OSError as e:  # a name that is too long, a folder that may not be read
        raise _unreadable(path, str(e)) from e
    found = {}
    for task, route in routes.items():
        place = places[task]
        folder = place if place.is_dir() else place.parent
        labels = _labels(folder, task, len(rows[place]))
        origin = f"{len(rows[place])} rows from {place.name}"
        found[task] = Inputs(rows[place], route.contract.input.dtype, labels, origin)
    return found


def _rows(path: Path) -> list[Array]:
    """Every row of a file, or of a folder's files in the order of their names."""
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    files = [f for f in files if f.suffix in _SUFFIXES and f.name.partition(".")[0] != LABELS]
    if not files:
        raise _unreadable(path, "no .npy or .safetensors file there")
    rows: list[Array] = []
    for file in files:
        for array in _read(file):
            if array.ndim == 0 or array.dtype.hasobject:
                raise _unreadable(file, f"a {array.dtype} of rank {array.ndim} has no rows")
            rows += [array[i : i + 1] for i in range(len(array))]
    if not rows:
        raise RequestError("EMPTY_INPUT", "no file there has a row", where=str(path))
    return rows


def _read(file: Path) -> Sequence[Array]:
    from safetensors.numpy import load_file

    try:
        if file.suffix != ".npy":
            return list(load_file(file).values())
        found = np.load(file, allow_pickle=False)
    except Exception as e:  # parsers of headers and archives may raise nearly anything
        raise _unreadable(file, str(e) or type(e).__name__) from e
    if not isinstance(found, np.ndarray):
        raise _unreadable(file, "an archive of arrays, whatever its name says")
    return [found]


def _labels(folder: Path, task: str, rows: int) -> NDArray[np.int64] | None:
    for file in (folder / (n + s) for n in (f"{LABELS}.{task}", LABELS) for s in _SUFFIXES):
        if not file.exists():
            continue
        tensors = _read(file)
        if len(tensors) != 1:
            raise _unreadable(file, f"{len(tensors)} tensors, where one holds the labels")
        found = tensors[0]
        if found.shape != (rows,) or found.dtype.kind not in "iu":
            raise RequestError(
                "CONTRACT_MISMATCH",
                f"{found.dtype}{list(found.shape)} are no labels of {rows} rows",
                where=str(file),
                hint=f"one whole number per row of the data: int64[{rows}]",
            )
        return found.astype(np.int64)
    return None


def _unreadable(path: Path, why: str) -> RequestError:
    return nonsense(
        f"the data cannot be read: {why}",
        str(path),
        "synthetic, digits, or a folder of .npy or .safetensors files; dim 0 is rows",
    )


# --- the contract --------------------------------------------------------------------------------


def _fit(inputs: Inputs, route: TaskRoute, hook: Hook | None) -> Inputs:
    """The inputs after the hook, each of them fit for the task."""
    spec, rows = route.contract.input, []
    for i, row in enumerate(inputs.rows):
        where = f"{route.name}, row {i}"
        x = row if hook is None else _through(hook, row, where)
        told = "bfloat16" if (spec.dtype, x.dtype.name) == ("bfloat16", "uint16") else x.dtype.name
        binding = spec.bind(told, x.shape, where=where)
        if binding[ROWS] != 1:
            raise RequestError("CONTRACT_MISMATCH", f"{binding[ROWS]} rows, not 1", where=where)
        rows.append(np.ascontiguousarray(x))
    return Inputs(rows, spec.dtype, inputs.labels, inputs.origin)


def _through(hook: Hook, row: Array, where: str) -> Array:
    try:
        made = hook(row.copy())  # tasks share rows, and a hook may write into what it gets
    except (Exception, SystemExit) as e:  # the user's code may raise anything
        raise nonsense(f"the hook raised {type(e).__name__}: {e}", where) from e
    if not isinstance(made, np.ndarray):
        raise nonsense(f"the hook gave a {type(made).__name__}, not a numpy array", where)
    return made
