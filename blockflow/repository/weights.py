"""Weights: a state dict from safetensors, or from what torch loads weights-only, put into a model.

Nothing is ever unpickled into code.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.masks import is_mask
from blockflow.core.text import a_kind

_SHOWN = 5
_GLOBAL = re.compile(r"\bGLOBAL (\S+)")
_WRAPPERS = ("module.", "_orig_mod.")
"""What DataParallel (also DistributedDataParallel) and torch.compile put before each name."""

_COUNTER = "num_batches_tracked"
"""What batch normalisation counts in training, and older state dicts lack, torchvision's first
among them. No result depends on it, and torch's own loading leaves it as it is."""

_VERSIONS = "_metadata"
"""Where torch keeps the versions of the modules whose tensors a state dict has."""

_BY_NAME = {"missing", "unexpected", "misshapen"}
"""Problems that a model's own loading may mend."""

_INDEX = ".safetensors.index.json"
"""How the file ends that tells which of several safetensors files has which tensor."""
_INDEX_BYTES = 64 * 2**20

_REFUSED = "Weights only load failed"
"""How torch's message begins when a file is more than tensors."""


class _NoStateDict(ValueError):
    """The file can be read, and this is what it is instead."""


def load_weights(module: nn.Module, path: Path) -> str:
    """Load a state dict strictly; returns the file's sha256. Of an index of several files it is
    the sha256 of theirs one after the other, as text: the index's first, then in the order of their
    names.

    What the model's own loading makes of other names and dims (a checkpoint from before one of its
    modules was changed) is left to it. Where several names of the model are one tensor (tied
    weights), any of them will do: safetensors keeps such a tensor once. What DataParallel and
    torch.compile put before every name is left out. The counters of batch normalisation may be
    missing.

    Raises:
        ExportError: WEIGHTS_INVALID, listing the keys that are missing, unexpected or misshapen, or
            that are one tensor in the model and differ in the file.
    """
    where = str(path)
    try:
        digest, state = _read_shards(path) if path.name.endswith(_INDEX) else _read_file(path)
    except Exception as e:
        why = str(e).strip().partition("\n")[0]
        if not isinstance(e, _NoStateDict):
            why = f"the file cannot be read: {type(e).__name__}" + f": {why}" * bool(why)
        raise ExportError(
            "WEIGHTS_INVALID",
            why,
            where=where,
            hint="give a .safetensors file (of several their index, .safetensors.index.json), or a "
            "state dict saved with torch.save (.pt, .pth or .bin)",
        ) from e
    own = {k: t for k, t in module.state_dict().items() if isinstance(t, Tensor)}
    state = _without_wrappers(state, own)
    saved = frozenset(state)
    pairs = list(_tied(own, state))
    state |= {k: state[given] for k, given in pairs if k not in state}
    state |= {k: t for k, t in own.items() if k not in state and _is_counter(k)}
    fitting = [k for k in own if k in state and state[k].shape == own[k].shape]
    problems: dict[str, list[str]] = {
        "missing": [k for k in own if k not in state],
        "unexpected": [k for k in state if k not in own],
        "misshapen": [
            f"{k} {list(state[k].shape)} into {list(own[k].shape)}"
            for k in own
            if k in state and state[k].shape != own[k].shape
        ],
        "complex for a real tensor": [
            k for k in own if k in state and state[k].is_complex() and not own[k].is_complex()
        ],
        "more than a tensor of integers holds": [
            k for k in fitting if _loses(state[k], own[k].dtype)
        ],
        "beyond what the model's dtype holds": [
            k for k in fitting if _exceeds(state[k], own[k].dtype)
        ],
        "at odds with the tensor that they share": [
            f"{k} with {given}" for k, given in pairs if not torch.equal(state[k], state[given])
        ],
    }
    found = {kind: keys for kind, keys in problems.items() if keys}
    if found and not found.keys() - _BY_NAME:
        found = found if (left := _left(module, state)) is None else left
        if not found:
            return digest
    if found:
        text = "; ".join(
            f"{len(keys)} {kind}: {', '.join(keys[:_SHOWN])}{', ...' * (len(keys) > _SHOWN)}"
            for kind, keys in found.items()
        )
        raise ExportError(
            "WEIGHTS_INVALID",
            f"the weights do not fit the model: {text}",
            where=where,
            hint=_prefixed(saved, own)
            or "check the factory's arguments (number of classes, width, dtype)",
            details=found,
        )
    try:
        module.load_state_dict(state, strict=True)
    except Exception as e:  # what else a model's own loading minds
        why = " ".join(str(e).split())[:300]
        raise ExportError(
            "WEIGHTS_INVALID",
            f"the model does not take the weights: {type(e).__name__}: {why}",
            where=where,
        ) from e
    return digest


def _left(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, list[str]] | None:
    """What is missing and unexpected once the model has loaded ``state``, whose names or dims are
    not its own: modules may convert what they are given, as torch's parametrizations do with the
    older weight_g and weight_v. None: it does not load it."""
    try:
        left = module.load_state_dict(state, strict=False)
    except Exception:  # the names and dims are what is wrong
        return None
    pairs = (("missing", left.missing_keys), ("unexpected", left.unexpected_keys))
    return {kind: list(keys) for kind, keys in pairs if keys}


def _is_counter(name: str) -> bool:
    return name.rpartition(".")[2] == _COUNTER


def _loses(given: Tensor, wanted: torch.dtype) -> bool:
    """Whether a tensor of integers would get others than ``given`` holds: without their fractions,
    or wrapped around where they are too large."""
    if wanted.is_floating_point or wanted.is_complex or given.is_complex():
        return False
    taken = given.to(wanted)
    if given.is_floating_point():
        return not torch.equal(taken.to(given.dtype), given)
    signs = given.dtype is not wanted and torch.uint64 in (given.dtype, wanted)
    if signs and bool((given.long() < 0).any()):  # from 2**63, or below 0
        return True
    return not torch.equal(taken.long(), given.long())  # int8 and uint8 wrap into each other


def _exceeds(given: Tensor, wanted: torch.dtype) -> bool:
    """Whether numbers become infinite. A mask's may, one number below 0 at many places: what it
    takes away stays away."""
    if given.dtype is wanted or not wanted.is_floating_point or given.is_complex():
        return False
    lost = given.to(wanted).isinf()
    if not lost.any():
        return False
    beyond = given.double()[lost]
    beyond = beyond[beyond.isfinite()]
    return len(beyond) > 0 and not is_mask(given.dim(), *map(float, beyond.aminmax()))


def _without_wrappers(state: dict[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``state`` under the names of the model that was wrapped when it was saved. So are the
    versions of its modules, by which some convert what they load."""
    for prefix in _WRAPPERS * 2:  # one inside the other, in either order
        if state and all(k.startswith(prefix) and k not in own for k in state):
            bare: Any = OrderedDict((k.removeprefix(prefix), t) for k, t in state.items())
            versions = getattr(state, _VERSIONS, None)
            if isinstance(versions, Mapping):
                inner = {k + ".": v for k, v in versions.items() if f"{k}.".startswith(prefix)}
                named = {k.removeprefix(prefix).removesuffix("."): v for k, v in inner.items()}
                setattr(bare, _VERSIONS, OrderedDict(named))
            state = bare
    return state


def _prefixed(saved: Collection[str], own: Collection[str]) -> str:
    """A hint if the names in the file are the model's with something before each; else ''. Counters
    may be missing there."""
    name = next(iter(own), "")
    wanted = {k for k in own if not _is_counter(k)}
    has = {k for k in saved if not _is_counter(k)}
    for given in saved:
        prefix = given.removesuffix(name)
        if name and prefix and prefix + name == given and {prefix + k for k in wanted} == has:
            return (
                f"every name in the file begins with {prefix!r}, which the model's lack: save "
                "the inner module's state_dict()"
            )
    return ""


def _tied(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Each further name of a tensor of the model with the first of its names that the file has."""
    names: dict[Any, list[str]] = {}
    for name, t in own.items():
        if t.numel():
            at = (t.untyped_storage().data_ptr(), t.storage_offset(), tuple(t.shape), t.stride())
            names.setdefault((t.dtype, *at), []).append(name)
    for same in names.values():
        given = next((name for name in same if name in state), None)
        if given is not None:
            yield from ((name, given) for name in same if name != given)


def _read_file(path: Path) -> tuple[str, dict[str, Tensor]]:
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    return digest, _read_state(path)


def _read_shards(path: Path) -> tuple[str, dict[str, Tensor]]:
    """Large models are stored in several files, as Hugging Face's libraries write them."""
    with path.open("rb") as f:
        raw = f.read(_INDEX_BYTES + 1)
    try:
        index = json.loads(raw) if len(raw) <= _INDEX_BYTES else None
    except (ValueError, RecursionError) as e:
        raise _NoStateDict(f"it is no JSON: {e}") from e
    named = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(named, dict) or not all(isinstance(f, str) for f in named.values()):
        raise _NoStateDict("it has no weight_map of names to files")
    digests = [hashlib.sha256(raw).hexdigest()]
    state: dict[str, Tensor] = {}
    for name in sorted(set(named.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise _NoStateDict(f"{name!r} is no .safetensors file beside it")
        digest, part = _read_file(path.with_name(name))
        digests.append(digest)
        wanted = [key for key, file in named.items() if file == name]
        if lacking := [key for key in wanted if key not in part]:
            raise _NoStateDict(f"{name!r} lacks {', '.join(lacking[:_SHOWN])}, which it is to have")
        state |= {key: part[key] for key in wanted}
    return hashlib.sha256("".join(digests).encode()).hexdigest(), state


def _read_state(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    if path.suffix not in (".pt", ".pth", ".bin"):
        raise _NoStateDict(f"what kind of file {path.suffix!r} is, is not known")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:
        if _REFUSED not in str(e):
            raise
        asked = _GLOBAL.search(str(e))  # torch goes on to advise what runs a stranger's code
        what = f"it asks for {asked[1]}" if asked else "it is more than tensors, or damaged"
        raise _NoStateDict(f"{what}: only tensors under names are loaded, never code") from e
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise _NoStateDict(f"it holds {a_kind(state)}, not a state dict")
    inner = [
        repr(name)
        for name, entry in state.items()
        if isinstance(entry, Mapping) and any(isinstance(t, Tensor) for t in entry.values())
    ]
    if inner:
        which = " or ".join(inner[:_SHOWN])
        raise _NoStateDict(f"it is a checkpoint of a training, with {which} in it: save that alone")
    for name, tensor in state.items():
        if not isinstance(name, str):
            raise _NoStateDict(f"the name of entry {name!r} is {a_kind(name)}, not text")
        if not isinstance(tensor, Tensor):
            raise _NoStateDict(f"entry {name!r} is {a_kind(tensor)}, not a tensor")
        if tensor.is_meta:
            raise _NoStateDict(f"entry {name!r} has dims and no values (it is on 'meta')")
        if tensor.is_quantized:
            raise _NoStateDict(f"entry {name!r} is quantized: dequantize() makes one to load")
        if tensor.is_nested:
            raise _NoStateDict(f"entry {name!r} is nested: to_padded_tensor() makes one to load")
        if tensor.layout is not torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
            raise _NoStateDict(f"entry {name!r} is {kind}: to_dense() makes it one to load")
    return state
