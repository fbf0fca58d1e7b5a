"""Samples: inputs of a block, for calibration and verification; given as files or made up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from blockflow.core.errors import BlockFlowError, ExportError
from blockflow.core.model import TensorSpec
from blockflow.repository.probe import check_bindings, example_input

MOST = 512
"""Inputs that are read: more do not make a calibration better, but longer."""

_SUFFIXES = (".npy", ".safetensors")
_SEEDED = 8


@dataclass(frozen=True, slots=True)
class Samples:
    """Inputs that fit a contract; ``origin`` tells where they come from, for the record."""

    inputs: Sequence[Tensor]
    origin: str
    seeded: bool


def seeded_samples(spec: TensorSpec, *, int_below: int | None = None) -> Samples:
    """Random inputs of every kind of dims: nothing real, so ranges found with them are guesses.

    Args:
        spec: the contract that they fit.
        int_below: bounds integers, see :func:`~blockflow.repository.probe.example_input`.
    """
    bindings = check_bindings(spec)
    inputs = [
        example_input(spec, bindings[i % len(bindings)], int_below=int_below, seed=i)
        for i in range(max(_SEEDED, len(bindings)))
    ]
    return Samples(inputs, f"{len(inputs)} seeded random inputs", True)


def load_samples(path: Path, spec: TensorSpec) -> Samples:
    """Read ``.npy`` and ``.safetensors`` files; each tensor is one input with any number of rows.

    Args:
        path: a file, or a folder of such files (in the order of their names).
        spec: the contract that each has to fit.

    Raises:
        ExportError: EXPORT_FAILED for what cannot be read or does not fit.
    """
    files = sorted(p for p in path.iterdir() if p.suffix in _SUFFIXES) if path.is_dir() else [path]
    inputs: list[Tensor] = []
    for file in files:
        if len(inputs) == MOST:
            break  # there may be a data set's worth of them
        for x in _read(file):
            if len(inputs) == MOST:
                break
            try:
                spec.bind(str(x.dtype).removeprefix("torch."), x.shape, where=str(file))
            except BlockFlowError as e:
                raise ExportError("EXPORT_FAILED", e.message, where=str(file)) from e
            inputs.append(x.contiguous())
    if not inputs:
        raise _unreadable(path, "no .npy or .safetensors file in it")
    return Samples(inputs, f"{len(inputs)} inputs from {path.name}", False)


def _read(file: Path) -> Iterator[Tensor]:
    from safetensors.torch import load_file

    try:
        if file.suffix == ".npy":
            yield torch.from_numpy(np.load(file, allow_pickle=False))
        elif file.suffix == ".safetensors":
            yield from load_file(file).values()
        else:
            raise _unreadable(file, "not a .npy or .safetensors file")
    except ExportError:
        raise
    except Exception as e:  # parsers of headers and archives may raise nearly anything
        raise _unreadable(file, str(e) or type(e).__name__) from e


def _unreadable(path: Path, why: str) -> ExportError:
    return ExportError(
        "EXPORT_FAILED",
        f"samples cannot be read: {why}",
        where=str(path),
        hint="save each input with numpy.save (never as an object array) or safetensors",
    )
