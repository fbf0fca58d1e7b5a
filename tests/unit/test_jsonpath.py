"""JSON paths of members, as RFC 9535 writes them."""

import pytest

from blockflow.core.jsonpath import MOST_NAME, MOST_PATH, item, member, shortened


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("digit", "$.tasks.digit"),
        ("a_1", "$.tasks.a_1"),
        ("a.path[0]", "$.tasks['a.path[0]']"),
        ("1st", "$.tasks['1st']"),
        ("", "$.tasks['']"),
        ("it's", "$.tasks['it\\'s']"),
        ('say "so"\n', "$.tasks['say \"so\"\\n']"),
        ("back\\slash", "$.tasks['back\\\\slash']"),
        ("\N{SNOWMAN}", "$.tasks['\\u2603']"),
    ],
)
def test_a_name_that_is_no_plain_word_is_quoted(name: str, path: str) -> None:
    assert member("$.tasks", name) == path


def test_long_names_are_shortened_and_deep_paths_end() -> None:
    assert shortened("a" * MOST_NAME) == "a" * MOST_NAME
    assert member("$", "a" * 900_000) == f"$['{'a' * MOST_NAME}...']"
    path = "$"
    for n in range(1000):
        path = item(member(path, "name"), n)
    assert len(path) < MOST_PATH + 20 and path.startswith("$.name[0].name[1]")
    assert path.endswith("...") and path.count("...") == 1
