"""msgpack with limits: sizes are checked before anything is decoded, types right after.

Every decoder of the project ends in :func:`decode`; whatever the bytes are, the outcome is a value
or a :class:`~blockflow.core.errors.WireError`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from blockflow.core import limits
from blockflow.core.errors import WireError

_HEAD_BYTES = 64
"""Of a message: its version, kind and id are among them."""


def encode(value: Any) -> bytes:
    """Pack plain values (None, bool, int, float, str, bytes, list, dict)."""
    packed: bytes = msgpack.Packer().pack(value)
    return packed


def cut_texts(error: Mapping[str, Any], most_bytes: int) -> dict[str, Any]:
    """A :meth:`BlockFlowError.to_dict` as a message can take it. Texts are cut, as frameworks quote
    a whole model in one; halves of surrogate pairs go as Python writes them, ``\\udcff``."""
    out = dict(error)
    for key in ("message", "where", "hint"):
        if key in out:
            text = str(out[key]).encode(errors="backslashreplace")
            out[key] = text[:most_bytes].decode(errors="ignore")  # not half of a character
    return out


def joined(parts: Sequence[bytes]) -> bytes:
    """What :func:`encode` makes of a list, from what it has made of each of the list's values."""
    head: bytes = msgpack.Packer().pack_array_header(len(parts))
    return head + b"".join(parts)


def decode(data: bytes | memoryview, *, max_bytes: int, what: str) -> Any:
    """Unpack one value of at most ``max_bytes`` bytes and MAX_NESTING levels.

    Raises:
        WireError: MALFORMED_MESSAGE; ``what`` names the message in its text.
    """
    value = unpack(data, max_bytes=max_bytes, what=what)
    check_depth(value, limits.MAX_NESTING if max_bytes <= limits.MAX_HEADER_BYTES else 12, what)
    return value


def unpack(data: bytes | memoryview, *, max_bytes: int, what: str) -> Any:
    """:func:`decode` without the walk over all levels.

    For callers that check the type of every field they read anyway: what is nested where a number
    should be is refused there, at a tenth of the cost.

    Raises:
        WireError: MALFORMED_MESSAGE.
    """
    size = len(data)
    if size > max_bytes:
        raise malformed(what, f"{size} bytes are more than the limit of {max_bytes}")
    try:
        value: Any = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=size,
            max_map_len=size,
            max_ext_len=0,
        )
    except Exception as exc:  # msgpack raises a dozen unrelated types on nonsense
        raise malformed(what, f"not msgpack ({type(exc).__name__})") from exc
    return value


def first_values(data: bytes | memoryview, count: int) -> list[Any]:
    """The first values of an array, of which the rest may be of any length, or anything: no more
    than :data:`_HEAD_BYTES` are looked at. Fewer, or none, where that is all that can be read."""
    head = msgpack.Unpacker(raw=False, strict_map_key=True, max_ext_len=0)
    out: list[Any] = []
    try:
        head.feed(bytes(data[:_HEAD_BYTES]))
        for _ in range(min(head.read_array_header(), count)):
            out.append(head.unpack())
    except Exception:  # as above
        return out
    return out


def check_depth(value: Any, levels: int, what: str) -> None:
    """Refuse a value that is nested deeper than ``levels``."""
    level: list[Any] = [[value]]  # the unpacker makes plain lists and dicts only
    while level:
        below: list[Any] = []
        for one in level:
            for item in one.values() if type(one) is dict else one:
                kind = type(item)
                if kind is list or kind is dict:
                    below.append(item)
        if below and levels == 0:
            raise malformed(what, "nested too deeply")
        level, levels = below, levels - 1


def malformed(what: str, why: str) -> WireError:
    return WireError("MALFORMED_MESSAGE", f"{what}: {why}", where=what)


def wrong_version(what: str, got: object) -> WireError:
    return WireError(
        "UNSUPPORTED_VERSION",
        f"{what}: version {got!r}, this side speaks {limits.PROTOCOL_VERSION}",
        where=what,
        hint="run the same BlockFlow release on both sides",
    )


def is_int(value: object, lo: int, hi: int) -> bool:
    """True for a real integer (not a bool) within lo..hi."""
    return type(value) is int and lo <= value <= hi
