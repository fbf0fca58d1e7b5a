"""Blocks in the order in which paths visit them."""

from collections.abc import Iterator

import pytest

from blockflow.core.ordering import along


@pytest.mark.parametrize(
    ("names", "paths", "order"),
    [
        ("abc", ["abc"], "abc"),
        ("cab", ["abc"], "abc"),
        ("ba", ["ab"], "ab"),
        ("cba", [], "cba"),
        ("cba", ["xaxyb"], "cab"),
        ("hgt", ["th", "tg"], "thg"),
        ("dcba", ["ac", "abd", "cd"], "acbd"),
        ("ab", ["ab", "ba"], "ab"),
        ("xba", ["ab", "ba", "ax"], "xba"),
    ],
)
def test_as_the_paths_go_and_else_as_it_was(names: str, paths: list[str], order: str) -> None:
    assert "".join(along(paths, names)) == order


def test_for_one_block_no_path_is_looked_at() -> None:
    """A system may have hundreds of workers with one block each, and thousands of paths."""

    class Path(str):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("it was looked at")

    assert along([Path("ab")], ["a"]) == ["a"] and along([Path("ab")], []) == []
