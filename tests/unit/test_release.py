"""Which release the package's files are of."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockflow import __version__
from blockflow.control import release


def test_a_package_that_has_not_changed_is_not_replaced() -> None:
    assert release.replaced_by() == release.warning() == ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f'__version__ = "{__version__}"\n', ""),
        ('"""Of the package."""\n\n__version__ = "9.1.0rc1"\n\n__all__ = []\n', "9.1.0rc1"),
        ("__version__ = version('blockflow')\n", ""),
        ('__version__ = ""\n', ""),
        ("", ""),
    ],
)
def test_the_release_is_read_from_the_file(tmp_path: Path, text: str, found: str) -> None:
    file = tmp_path / "__init__.py"
    file.write_text(text)
    assert release.replaced_by(file) == found


def test_what_cannot_be_read_tells_nothing(tmp_path: Path) -> None:
    file = tmp_path / "__init__.py"
    assert release.replaced_by(file) == ""
    file.write_bytes(b'__version__ = "9.0.0"\n\xff\xfe')
    assert release.replaced_by(file) == ""
    file.unlink()
    file.mkdir()
    assert release.replaced_by(file) == ""


def test_people_are_told_both_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "replaced_by", lambda: "9.1.0")
    told = release.warning()
    assert "9.1.0" in told and __version__ in told and "blockflow up" in told
