"""Mutate: malformed frames out of valid ones, the same for the same seed. Pure but for its chance,
which is seeded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgpack

BOMBS: tuple[bytes, ...] = (
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32-1 elements
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
    b"\xdb\xff\xff\xff\xff",  # of text
    b"\xc9\xff\xff\xff\xff\x01",  # of an extension
    b"\xd6\xff\x00\x00\x00\x00",  # a time stamp
    b"\x91" * 2000,  # nesting
    b"\x81\x01" * 1000,
    b"[" * 5000,
    b'{"a":' * 2000,
    b"\xc1",
    b"\xa2\xff\xfe",  # not UTF-8
    b"",
)
"""What asks for more memory or depth than it brings bytes."""

_ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    255,
    2**31,
    2**63,
    2**64 - 1,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "../../x",
    "\x00",
    "a" * 300,
    b"",
    b"\xff" * 16,
    [],
    [[]],
    {},
    {"k": 1},
    {b"k": 1},
)
_MOST_CHANGES = 8
_MOST_NOISE = 400


class Mutator:
    """Makes malformed frames.

    Args:
        valid: frames that are well-formed; most of what is made begins with one.
        seed: the same seed, the same frames.
    """

    def __init__(self, valid: Sequence[bytes], seed: int) -> None:
        self._valid = list(valid)
        self._random = random.Random(seed)
        self._ways: tuple[Callable[[bytes], bytes], ...] = (
            self._bytes_changed,
            self._bytes_changed,
            self._cut,
            self._spliced,
            self._part_replaced,
            self._part_replaced,
            self._part_replaced,
            self._grown,
            self._noise,
            self._bomb,
        )

    def frame(self) -> bytes:
        """The next one."""
        rnd = self._random
        return rnd.choice(self._ways)(rnd.choice(self._valid))

    def frames(self, count: int) -> Iterator[bytes]:
        for _ in range(count):
            yield self.frame()

    def _bytes_changed(self, frame: bytes) -> bytes:
        out, rnd = bytearray(frame), self._random
        for _ in range(rnd.randint(1, _MOST_CHANGES)):
            if out:
                out[rnd.randrange(len(out))] = rnd.randrange(256)
        return bytes(out)

    def _cut(self, frame: bytes) -> bytes:
        return frame[: self._random.randrange(len(frame) + 1)]

    def _spliced(self, frame: bytes) -> bytes:
        other, rnd = self._random.choice(self._valid), self._random
        return frame[: rnd.randrange(len(frame) + 1)] + other[rnd.randrange(len(other) + 1) :]

    def _grown(self, frame: bytes) -> bytes:
        rnd = self._random
        at = rnd.randrange(len(frame) + 1)
        return frame[:at] + rnd.choice(BOMBS) + frame[at:]

    def _noise(self, _frame: bytes) -> bytes:
        return self._random.randbytes(self._random.randrange(_MOST_NOISE))

    def _bomb(self, _frame: bytes) -> bytes:
        return self._random.choice(BOMBS)

    def _part_replaced(self, frame: bytes) -> bytes:
        """The right structure with one odd value, be it msgpack or JSON."""
        try:
            if frame.startswith(b"{"):
                odd = self._replaced(json.loads(frame))
                return json.dumps(odd, default=repr, skipkeys=True).encode()
            return bytes(msgpack.packb(self._replaced(msgpack.unpackb(frame))))
        except ValueError:
            return self._bytes_changed(frame)

    def _replaced(self, value: Any) -> Any:
        rnd = self._random
        if isinstance(value, list) and value and rnd.random() < 0.85:
            at = rnd.randrange(len(value))
            return [*value[:at], self._replaced(value[at]), *value[at + 1 :]]
        if isinstance(value, dict) and value and rnd.random() < 0.85:
            key = rnd.choice(list(value))
            if rnd.random() < 0.2:
                return {**value, "odd": rnd.choice(_ODD)}
            return {**value, key: self._replaced(value[key])}
        return rnd.choice(_ODD)
