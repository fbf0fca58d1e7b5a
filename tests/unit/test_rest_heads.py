"""What may stand in the head of a request to REST: nothing that a proxy would read otherwise."""

from __future__ import annotations

import io

import pytest

from blockflow.control.rest.request import StrictRequest


def read(lines: bytes) -> dict[bytes, bytes]:
    return StrictRequest.header_reader(io.BytesIO(lines + b"\r\n"))


@pytest.mark.parametrize(
    "name",
    [
        b"Content-Length ",
        b"Content-Length\t",
        b"\x0bContent-Length",
        b"Content-Length\x00",
        b"Transfer-Encoding ",
        b"Content Length",
        b"H\xc3\xb6st",
        b"",
    ],
)
def test_a_name_is_one_to_everybody(name: bytes) -> None:
    """A body that only one of two servers sees becomes a request to the other."""
    with pytest.raises(ValueError, match="Illegal header name"):
        read(b"Host: localhost\r\n" + name + b": 5\r\n")


@pytest.mark.parametrize("end", [b"\r", b"\0"])
def test_a_value_ends_with_its_line_to_everybody(end: bytes) -> None:
    with pytest.raises(ValueError, match="X-Odd holds the end of a line, or a zero byte"):
        read(b"Host: localhost\r\nX-Odd: 1" + end + b"Content-Length: 5\r\n")


def test_what_is_proper_stays_as_it_is() -> None:
    lines = b'host:localhost\r\nX-Odd!#$%&\'*+.^`|~1: \xc3\xa4 \t "b"\r\nX_Odd: 1\r\nEmpty:\r\n'
    assert read(lines) == {
        b"Host": b"localhost",
        b"X-Odd!#$%&'*+.^`|~1": b'\xc3\xa4 \t "b"',
        b"Empty": b"",
    }
