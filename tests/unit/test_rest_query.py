"""Query parameters: what they may say, and that the commands hear it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from blockflow.control.commands import Commands
from blockflow.control.rest.query import DRY_RUN, IF_EPOCH, WAIT, read_query
from blockflow.control.rest.resources import Call, Handlers, resources
from blockflow.core.errors import RequestError
from tests.unit.test_rest_app import Noted

FLAGS, NUMBERS = (WAIT, DRY_RUN), (IF_EPOCH,)


@pytest.mark.parametrize(
    ("text", "flags", "numbers"),
    [
        ("", {"wait": True, "dry_run": False}, {}),
        ("wait=False&if_epoch=0", {"wait": False, "dry_run": False}, {"if_epoch": 0}),
        ("if_epoch=17&dry_run=1", {"wait": True, "dry_run": True}, {"if_epoch": 17}),
        (
            "if_epoch=" + "9" * 18 + "&" * 31,
            {"wait": True, "dry_run": False},
            {"if_epoch": 10**18 - 1},
        ),
    ],
)
def test_what_is_said_and_what_is_not(
    text: str, flags: dict[str, bool], numbers: dict[str, int]
) -> None:
    assert read_query(text, FLAGS, NUMBERS) == (flags, numbers)


@pytest.mark.parametrize(
    "value", ["-1", "", "true", "1.0", "9" * 19, "%D9%A3", "1&if_epoch=1", "1&x=1", "1" + "&" * 32]
)
def test_an_epoch_is_a_number_that_is_said_once(value: str) -> None:
    with pytest.raises(RequestError) as e:
        read_query(f"if_epoch={value}", FLAGS, NUMBERS)
    assert (e.value.code, e.value.where) == ("INVALID_REQUEST", "query")


def test_other_resources_take_no_epoch() -> None:
    with pytest.raises(RequestError) as e:
        read_query("if_epoch=1", (WAIT,), ())
    assert e.value.hint == "this resource takes: wait=true|false"
    with pytest.raises(RequestError, match="none"):
        read_query("if_epoch=1", (), ())


def test_commands_hear_which_epoch_is_meant() -> None:
    noted = Noted()
    handlers = Handlers(cast(Commands, noted), "", lambda: None)
    table = {r.operation: r for r in resources(handlers)}
    for operation in ("systemUpdate", "rollBack"):
        resource, body = table[operation], dict[str, Any]()
        for text in ("if_epoch=7", "if_epoch=0&dry_run=true", ""):
            query, numbers = read_query(text, resource.flags, resource.numbers)
            resource.handler(Call({}, query, body, (), numbers))
    assert [(name, kw.get("if_epoch")) for name, _, kw in noted.calls] == [
        *(("apply", 7), ("preview", 0), ("apply", None)),
        *(("rollback", 7), ("rollback", 0), ("rollback", None)),
    ]
