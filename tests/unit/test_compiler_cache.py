"""What torch's compiler loads again is this user's own, whatever is known of his home."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from blockflow.core.caches import INDUCTOR
from blockflow.engine.compiler_cache import compiler_cache


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (INDUCTOR, "HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # so that it is what it was afterwards
        monkeypatch.delenv(name)


@pytest.mark.parametrize("home", [None, "file"])
@pytest.mark.parametrize("torchs_own", [True, False])
def test_without_a_cache_it_is_private_and_goes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None, torchs_own: bool
) -> None:
    """Torch would take a folder of a known name, which anybody can have made before."""
    (tmp_path / "file").touch()
    if home is not None:
        monkeypatch.setenv("HOME", str(tmp_path / home))
    before = f"{tempfile.gettempdir()}/torchinductor_me" if torchs_own else None
    if before is not None:
        monkeypatch.setenv(INDUCTOR, before)
    with suppress(ZeroDivisionError), compiler_cache(tmp_path):
        used = Path(os.environ[INDUCTOR])
        assert used.parent == tmp_path and used.stat().st_mode & 0o777 == 0o700
        raise ZeroDivisionError
    assert not used.exists() and os.environ.get(INDUCTOR) == before


def test_the_users_own_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):
        with compiler_cache(tmp_path):
            used = Path(os.environ[INDUCTOR])
            assert used == tmp_path / ".cache/blockflow/inductor" and used.is_dir()
