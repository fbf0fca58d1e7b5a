"""Shapes: the small words that the JSON schemas of REST are written in.

Every property of an answer has a description: what it is, its unit, and when it is null. A test
looks at all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from blockflow.core import limits

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
NAME: Schema = {"type": "string", "pattern": limits.NAME_PATTERN}
BLOCK: Schema = {
    "type": "string",
    "pattern": limits.BLOCK_PATTERN,
    "maxLength": limits.MAX_NAME_CHARS,
}
FREE: Schema = {"type": "object", "additionalProperties": True}


def ref(name: str, about: str = "") -> Schema:
    return {"$ref": f"#/components/schemas/{name}"} | ({"description": about} if about else {})


def said(about: str, schema: Schema) -> Schema:
    """``schema`` with its description."""
    return {**schema, "description": about}


def text(about: str) -> Schema:
    return said(about, TEXT)


def number(about: str) -> Schema:
    return said(about, NUMBER)


def count(about: str) -> Schema:
    return said(about, COUNT)


def flag(about: str) -> Schema:
    return said(about, FLAG)


def one_of(about: str, values: Iterable[str]) -> Schema:
    return {"type": "string", "enum": sorted(map(str, values)), "description": about}


def listing(of: Schema, about: str = "") -> Schema:
    return {"type": "array", "items": of} | ({"description": about} if about else {})


def mapping(of: Schema, about: str) -> Schema:
    """An object whose names are data: tasks, blocks, codes."""
    return {"type": "object", "additionalProperties": of, "description": about}


def maybe(schema: Schema) -> Schema:
    """``schema`` or null; its description says when."""
    about = {"description": schema["description"]} if "description" in schema else {}
    bare = {k: v for k, v in schema.items() if k != "description"}
    return {"anyOf": [bare, {"type": "null"}], **about}


def obj(
    required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, **more: Any
) -> Schema:
    """An object with these properties. A later release may add further ones, unless ``more`` says
    otherwise."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        **more,
    }


_TYPES: Mapping[Any, Schema] = {int: COUNT, float: NUMBER, str: TEXT, bool: FLAG}


def properties(record: type, summary: Schema) -> dict[str, Schema]:
    """The fields of a record of figures as properties.

    Args:
        record: a dataclass; each field is ``Annotated`` with what it is.
        summary: schema of its fields that are maps (time summaries).
    """
    found: dict[str, Schema] = {}
    for name, hint in get_type_hints(record, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, about = get_args(hint)
            found[name] = _field(kind, about, summary)
    return found


def _field(kind: Any, about: str, summary: Schema) -> Schema:
    if isinstance(kind, UnionType):
        (inner,) = (k for k in get_args(kind) if k is not NoneType)
        return maybe(said(f"{about}; null = there is none", _TYPES[inner]))
    return said(about, _TYPES.get(kind, summary))


def inlined(schema: Schema) -> Schema:
    """``schema`` of a pydantic model with its local definitions put where they are referred to."""
    definitions = schema.pop("$defs", {})

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            target = node.get("$ref")
            if isinstance(target, str):
                rest = {k: walk(v) for k, v in node.items() if k != "$ref"}
                return {**walk(definitions[target.rsplit("/", 1)[1]]), **rest}
            return {k: walk(v) for k, v in node.items()}
        if isinstance(node, list):
            return [walk(v) for v in node]
        return node

    out: Schema = walk(schema)
    return out
