"""Outputs that take less than UTF-8, or names that are none."""

from __future__ import annotations

import json
import sys
from io import BytesIO, TextIOWrapper

import pytest

from blockflow.cli.main import main
from blockflow.cli.options import print_json


def output(monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str = "strict") -> BytesIO:
    taken = BytesIO()
    stream = TextIOWrapper(taken, encoding, errors, write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    return taken


@pytest.mark.parametrize(
    ("encoding", "errors"),
    [("ascii", "strict"), ("latin-1", "strict"), ("ascii", "surrogateescape")],  # the C locale's
)
def test_a_table_with_more_than_the_output_takes_is_shown(
    monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str
) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # so narrow that some of it is shortened
    written = output(monkeypatch, encoding, errors)
    assert main(["export", "--list"]) == 0
    assert rb"\u2026" in written.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_document_is_valid_on_any_output(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    document, written = {"name": "caf\u00e9", "where": "/x/\udcff"}, output(monkeypatch, encoding)
    print_json(document)
    assert json.loads(written.getvalue().decode()) == document


def test_a_document_of_plain_text_is_for_people_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    written = output(monkeypatch, "utf-8")
    print_json({"name": "caf\u00e9"})
    assert "caf\u00e9" in written.getvalue().decode()


def test_an_error_output_that_is_full_changes_no_exit_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert main(["apply", "/nowhere.json"]) == 2
        assert main(["apply", "/nowhere.json"]) == 2
        full.write("what is told later")
