"""JSON paths of members, as RFC 9535 writes them."""

import pytest

from blockflow.core.jsonpath import member


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
