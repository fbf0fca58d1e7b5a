"""Records are values: equal by what they hold, and the same as a frozen dataclass to who reads."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from blockflow.core.records import record


@record
class Place:
    row: int
    name: str = ""


def test_records_are_compared_and_found_by_what_they_hold() -> None:
    one = Place(1, "a")
    assert one == Place(1, "a") != replace(one, row=2) and {one, Place(1, "a")} == {one}
    assert [f.name for f in fields(one)] == ["row", "name"] and repr(one).endswith("'a')")


def test_a_record_has_no_other_fields() -> None:
    with pytest.raises(AttributeError):
        Place(1).other = 2  # type: ignore[attr-defined]
