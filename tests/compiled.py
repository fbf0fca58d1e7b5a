"""What a parallel run compiles is shared out among its processes.

Every process of xdist collects all tests, at the same time and in the same order: in a fresh clone
each would rewrite the assertions of every file, and compile the whole package, since none finds
what another is just making. So each begins with other files, and then finds those of the others.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.machinery import SourceFileLoader
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

ROOT = Path(__file__).resolve().parents[1]


def compile_share(config: pytest.Config, number: int, count: int) -> None:
    """Compile what this process, of so many, is to: of the files that nobody has compiled."""
    for path in sorted((ROOT / "blockflow").rglob("*.py"))[number::count]:
        if not Path(cache_from_source(str(path))).exists():
            with suppress(SyntaxError):  # whoever imports it says so
                SourceFileLoader(path.stem, str(path)).get_code(path.stem)
    for path in sorted((ROOT / "tests").rglob("test_*.py"))[number::count]:
        pyc = rewrite.get_cache_dir(path) / f"{path.stem}{rewrite.PYC_TAIL}"
        if not pyc.exists() and rewrite.try_makedirs(pyc.parent):
            with suppress(SyntaxError):
                source, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, pyc)
