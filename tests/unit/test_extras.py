"""What a hint tells to install: the packages of pyproject.toml's extras, by their own names."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from blockflow.core.engines import ENGINES
from blockflow.engine.extras import EXTRAS, how_to_install

ROOT = Path(__file__).resolve().parents[2]


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = project["optional-dependencies"]

    def packages(extra: str) -> set[str]:
        found: set[str] = set()
        for requirement in declared[extra]:
            own = re.fullmatch(r"blockflow\[([\w,]+)\]", requirement)
            if own is None:
                found.add(re.split(r"[~=<>!]", requirement)[0])
            else:
                found.update(*(packages(other) for other in own.group(1).split(",")))
        return found

    assert {extra: set(names) for extra, names in EXTRAS.items()} == {
        extra: packages(extra) for extra in declared if extra not in ("engines", "dev")
    }


def test_of_every_engines_package_it_is_known_how_to_install_it() -> None:
    """A newcomer's too: who lacks it would be told of a KeyError."""
    assert {kind.extra for kind in ENGINES.values()} - {""} <= EXTRAS.keys()


def test_what_two_extras_share_is_named_once() -> None:
    assert how_to_install("demo", "bench").count("matplotlib") == 1
    assert how_to_install("onnx", "onnxruntime").endswith("onnx onnxscript onnxruntime")


def test_the_python_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python")
    assert how_to_install("onnxruntime") == (
        "in the checkout: '/opt/my env/bin/python' -m pip install -c constraints.txt onnxruntime"
    )


def test_nobody_tells_to_install_an_extra_by_our_name() -> None:
    """Where BlockFlow runs from a checkout and is not installed, pip would take another project."""
    told = re.compile(r"pip install[^\n]*blockflow\[")
    files = [*ROOT.glob("blockflow/**/*.py"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]
    assert [
        str(path.relative_to(ROOT))
        for path in files
        if told.search(path.read_text(encoding="utf-8"))
    ] == []
