"""Shell completion: names of the running system, and words as bash takes them apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_rest import FakeRest

from blockflow.cli.complete import names_in, whole_words
from blockflow.cli.main import main


@pytest.fixture
def rest(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRest]:
    blocks = [{"name": n} for n in ("trunk1", "trunk2", "head@1", "head@2")]
    answers: dict[str, Any] = {
        "GET /v1/blocks": (200, {"blocks": blocks}),
        "GET /v1/tasks": (200, {"tasks": [{"name": "digit"}, {"name": "high"}]}),
    }
    with FakeRest(answers) as fake:
        monkeypatch.setenv("BLOCKFLOW_URL", fake.url)
        monkeypatch.setenv("_BLOCKFLOW_COMPLETE", "complete_bash")
        yield fake


def completed(words: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> set[str]:
    """What bash is answered for the last of these words; it gives each a line."""
    monkeypatch.setenv("COMP_WORDS", words.replace(" ", "\n"))
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    assert main([]) == 0
    return set(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ("blockflow drain tr", {"trunk1", "trunk2"}),
        ("blockflow drain he", {"head@1", "head@2"}),
        ("blockflow infer d", {"digit"}),
        ("blockflow bench --task d", {"digit"}),
        ("blockflow bench --task = d", {"digit"}),
        ("blockflow dr", {"drain"}),
        # In the place of the word from the @ on.
        ("blockflow drain head @", {"@1", "@2"}),
        ("blockflow drain head @ 2", {"@2"}),
        ("blockflow drain head @ 2 --js", {"--json"}),
        # Where bash does not end a word at the @.
        ("blockflow drain head@", {"head@1", "head@2"}),
        ("blockflow drain head@2", {"head@2"}),
        # Behind a space.
        ("blockflow infer digit@ ", {"digit", "high"}),
        ("blockflow infer digit @ ", {"digit", "high"}),
    ],
)
def test_completion_names(
    rest: FakeRest, monkeypatch: Any, capsys: Any, words: str, want: set[str]
) -> None:
    assert completed(words, monkeypatch, capsys) == want


def test_the_address_that_was_typed_is_asked(rest: FakeRest, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("BLOCKFLOW_URL", "http://127.0.0.1:1")
    assert completed("blockflow drain tr", monkeypatch, capsys) == set()
    scheme, host, port = rest.url.split(":")
    words = f"blockflow drain --url {scheme} : {host} : {port} tr"
    assert completed(words, monkeypatch, capsys) == {"trunk1", "trunk2"}


def test_words_are_whole_again() -> None:
    assert whole_words(["b", "ping", "a", "@", "2", "c"], 5) == (["b", "ping", "a@2", "c"], 3)
    assert whole_words(["b", "--url", "=", "http", ":", "//h", ""], 6) == (
        ["b", "--url=http://h", ""],
        2,
    )
    assert whole_words(["b", "ping"], 2) == (["b", "ping"], 2)


def test_names_in_listings() -> None:
    assert names_in({"tasks": [{"name": "b"}, {"name": "a"}, {}]}, "tasks") == ["a", "b"]
    assert names_in({"tasks": {"x": 1}}, "tasks") == ["x"]
    assert names_in(["q"], "tasks") == ["q"]
    assert names_in(3, "tasks") == []
