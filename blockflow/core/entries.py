"""Entries: what is wrong with one object of a topology, and what is left of it without that."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from blockflow.core.errors import MOST_FINDINGS, Problem, further
from blockflow.core.guess import Guesses
from blockflow.core.jsonpath import member, shortened
from blockflow.core.text import has_half

S = TypeVar("S", bound=BaseModel)

_MOST_LEVELS = 8
"""Of lists and objects in a block's field: of a launch order's twelve four are around it."""
_LOWEST, _HIGHEST = -(1 << 63), (1 << 64) - 1
"""The numbers that MessagePack has."""


def from_pydantic(
    exc: ValidationError,
    base: str,
    model: type[BaseModel],
    guesses: dict[type[BaseModel], Guesses],
) -> list[Problem]:
    """What a model finds wrong with an object that stands at ``base``.

    ``guesses``: over the fields of each model; one for all objects of an update, whose words are
    bounded together.
    """
    out = []
    for err in exc.errors(include_url=False)[:MOST_FINDINGS]:
        path = base
        for part in err["loc"]:
            path = f"{path}[{part}]" if isinstance(part, int) else member(path, str(part))
        hint = ""
        message = err["msg"].removeprefix("Value error, ")
        if err["type"] == "extra_forbidden":
            field = str(err["loc"][-1])
            message = f"unknown field {shortened(field)!r}"
            owner = _at(model, err["loc"][:-1])
            if owner not in guesses:
                guesses[owner] = Guesses(owner.model_fields)
            hint = guesses[owner].hint(field) or f"known: {', '.join(owner.model_fields)}"
        elif err["type"] == "missing":
            message = "required field is missing"
        elif "input" in err and isinstance(err["input"], str | int | float | bool | type(None)):
            message = f"{message} (got {shortened(repr(err['input']))})"
            if err["type"] == "string_pattern_mismatch":  # a pattern is for programs
                named = _at(model, err["loc"][:-1]).model_fields.get(str(err["loc"][-1]))
                hint = (named and named.description) or ""
        out.append(Problem(path, message, hint))
    return [*out, *further(exc.error_count(), base)]


def told(found: Collection[Problem], base: str) -> list[Problem]:
    """The findings about the object at ``base`` that are told, and how many more there are."""
    return [*islice(found, MOST_FINDINGS), *further(len(found), base)]


def _at(model: type[BaseModel], place: Sequence[int | str]) -> type[BaseModel]:
    """The model of the object at ``place`` in ``model``, as far as there are such."""
    for part in place:
        field = model.model_fields.get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field is not None else ()
        inner = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        model = inner[0] if inner else model
    return model


def wrong_fields(exc: ValidationError) -> set[str]:
    """Of the object itself, not of what it holds."""
    errors = exc.errors(include_url=False, include_context=False, include_input=False)
    return {str(err["loc"][0]) for err in errors if err["loc"]}


def usable(kind: type[S], entry: Mapping[str, Any], wrong: Collection[str]) -> S | None:
    """``entry`` without the fields that are wrong, so that whatever else is wrong with it is found
    as well; None where those cannot be missing."""
    try:
        return kind.model_validate({k: v for k, v in entry.items() if k not in wrong})
    except ValidationError:
        return None


def uncarried(entry: Mapping[str, Any], path: str) -> dict[str, Problem]:
    """Fields that no message could take to a worker, whatever its engine or policy would say."""
    out = {}
    for name, value in entry.items():
        layer, why = [value], f"is nested more than {_MOST_LEVELS} levels deep"
        for _ in range(_MOST_LEVELS + 1):
            if any(type(v) is int and not _LOWEST <= v <= _HIGHEST for v in layer):
                why = "a number in it has more than 64 bits"
                break
            if any(isinstance(v, str) and has_half(v) for v in layer):
                why = "a text in it has half of a surrogate pair, which is no character"
                break
            held = [v for v in layer if isinstance(v, dict | list)]
            if not held:
                why = ""
                break
            layer = [x for v in held for x in ((*v, *v.values()) if isinstance(v, dict) else v)]
        if why:
            out[name] = Problem(member(path, name), why)
    return out
