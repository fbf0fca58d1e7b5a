"""JSON bodies: read within limits, decoded strictly, with the place of what is wrong. Pure but for
the stream or file that is read from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, Problem, RequestError, SystemError_
from blockflow.core.jsonpath import item, member, shortened
from blockflow.core.text import json_kind

JSON_TYPE = "application/json"
_MAX_DUPLICATES = 100
_MAX_UNKNOWN = 20


class Readable(Protocol):
    def read(self, size: int) -> bytes: ...


class _Object(dict[str, Any]):
    """A JSON object that remembers which keys stood in it more than once."""

    duplicates: tuple[str, ...] = ()


def check_content_type(value: str | None, coding: str | None = None) -> None:
    """Raises SystemError_: UNSUPPORTED_MEDIA unless it is JSON (a charset may be UTF-8 only), as it
    is: what stands before this service may decode a body, and read another one than is read here.
    """
    kind, _, parameters = (value or "").partition(";")
    charset = parameters.strip().lower().removeprefix("charset=").strip('"')
    if kind.strip().lower() != JSON_TYPE or charset not in ("", "utf-8", "utf8"):
        raise SystemError_(
            "UNSUPPORTED_MEDIA",
            f"content type {(value or 'missing')[:100]!r}",
            hint=f"send 'Content-Type: {JSON_TYPE}'",
        )
    if (coding or "identity").strip().lower() != "identity":
        raise SystemError_(
            "UNSUPPORTED_MEDIA",
            f"content encoding {(coding or '')[:100]!r}",
            hint="send the JSON as it is, without a 'Content-Encoding'",
        )


def read_body(stream: Readable, length: str) -> bytes:
    """Read a request body of at most MAX_REST_BODY_BYTES.

    Args:
        stream: the server's input; it ends at the body's end.
        length: the Content-Length header.

    Raises:
        SystemError_: BODY_TOO_LARGE, BAD_BODY.
    """
    if not length.isdigit():
        raise SystemError_("BAD_BODY", f"Content-Length {length[:40]!r} is no number")
    if int(length) > limits.MAX_REST_BODY_BYTES:
        raise _too_large(int(length))
    parts: list[bytes] = []
    size = 0
    while chunk := stream.read(min(65536, limits.MAX_REST_BODY_BYTES + 1 - size)):
        parts.append(chunk)
        size += len(chunk)
        if size > limits.MAX_REST_BODY_BYTES:
            raise _too_large(size)
    if size < int(length):
        raise SystemError_("BAD_BODY", f"the body ended after {size} of {length} bytes")
    return b"".join(parts)


def parse_json(raw: bytes) -> tuple[Any, list[Problem]]:
    """Decode strictly: UTF-8, finite numbers, bounded nesting.

    Returns:
        The value, and a Problem with its JSON path for each name that stands twice in an object
        (plain JSON would silently take the last), the first hundred.

    Raises:
        SystemError_: BAD_BODY with line and column.
    """
    try:
        value = json.loads(
            raw.decode("utf-8-sig"),  # editors put a mark in front
            object_pairs_hook=_pairs,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        problems: list[Problem] = []
        _collect(value, "$", problems)
    except json.JSONDecodeError as e:
        raise _bad(f"not JSON: {e.msg} at line {e.lineno}, column {e.colno}", e.pos) from e
    except UnicodeDecodeError as e:
        raise _bad(f"not UTF-8 at byte {e.start}", e.start) from e
    except RecursionError as e:
        raise _bad("nested too deeply", None) from e
    except ValueError as e:
        raise _bad(str(e)[:200], None) from e
    return value, problems


def read_update(path: Path | str) -> Any:
    """A system update in a file, read as one that is posted.

    Raises:
        BlockFlowError: INVALID_REQUEST: there is none; TOO_LARGE, BAD_BODY; ``where`` is the file.
    """
    where = str(path)
    try:
        with open(path, "rb") as f:
            raw = f.read(limits.MAX_REST_BODY_BYTES + 1)
    except OSError as e:
        raise RequestError("INVALID_REQUEST", f"cannot be read: {e.strerror}", where=where) from e
    if len(raw) > limits.MAX_REST_BODY_BYTES:
        what = f"more than {limits.MAX_REST_BODY_BYTES} bytes"
        raise RequestError("TOO_LARGE", what, where=where)
    try:
        value, duplicates = parse_json(raw)
        refuse_duplicates(duplicates)
    except BlockFlowError as e:
        e.where = where
        raise
    return value


def refuse_duplicates(problems: Sequence[Problem]) -> None:
    """Raises SystemError_: BAD_BODY when a name stands twice."""
    if problems:
        raise SystemError_(
            "BAD_BODY",
            f"{problems[0].path}: {problems[0].message}",
            where=problems[0].path,
            details={"problems": [p.to_dict() for p in problems]},
        )


def _pairs(pairs: list[tuple[str, Any]]) -> _Object:
    out = _Object(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        twice: dict[str, None] = {}
        for key, _ in pairs:
            if key in seen:
                twice[key] = None
            seen.add(key)
        out.duplicates = tuple(twice)
    return out


def _collect(value: Any, path: str, problems: list[Problem]) -> None:
    """Find the objects with duplicates. Raises RecursionError, where the decoder goes deeper."""
    if len(problems) >= _MAX_DUPLICATES:
        return
    if isinstance(value, _Object):
        for key in value.duplicates[: _MAX_DUPLICATES - len(problems)]:
            what = f"{shortened(key)!r} stands twice"
            problems.append(Problem(member(path, key), what, "give each name once"))
        for key, inner in value.items():
            if isinstance(inner, dict | list):
                _collect(inner, member(path, key), problems)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            if isinstance(inner, dict | list):
                _collect(inner, item(path, i), problems)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:40]} is out of range")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _bad(why: str, position: int | None) -> SystemError_:
    details = {} if position is None else {"position": position}
    return SystemError_("BAD_BODY", why, where="body", details=details)


def _too_large(size: int) -> SystemError_:
    return SystemError_(
        "BODY_TOO_LARGE",
        f"a body of {size} bytes or more is over the limit of {limits.MAX_REST_BODY_BYTES}",
    )


def fields(
    body: Any,
    duplicates: Sequence[Problem],
    required: Mapping[str, tuple[type, ...]],
    optional: Mapping[str, tuple[type, ...]],
) -> Mapping[str, Any]:
    """A small body's fields, checked. Raises SystemError_: BAD_BODY naming all that is wrong."""
    refuse_duplicates(duplicates)
    if not isinstance(body, dict):
        raise SystemError_("BAD_BODY", f"expected a JSON object, got {json_kind(body)}", where="$")
    known = {**required, **optional}
    unknown = [k for k in body if k not in known]
    problems = [
        Problem(member("$", k), f"unknown field {shortened(k)!r}") for k in unknown[:_MAX_UNKNOWN]
    ]
    if len(unknown) > _MAX_UNKNOWN:
        problems.append(Problem("$", f"and {len(unknown) - _MAX_UNKNOWN} more unknown fields"))
    problems += [Problem(f"$.{k}", "required field is missing") for k in required if k not in body]
    for name, types in known.items():
        value = body.get(name)
        # bool is an int to Python, not to JSON
        right = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        if name in body and not right:
            problems.append(Problem(f"$.{name}", f"wrong type: {json_kind(value)}"))
    refuse_duplicates(problems)
    return body
