"""What is installed from a wheel is the package as it stands in the checkout, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import blockflow

ROOT = Path(__file__).resolve().parents[2]
BUILD = "from setuptools import build_meta; build_meta.build_wheel('wheel')"


def test_a_wheel_holds_every_file_of_the_package(tmp_path: Path) -> None:
    """Data too, which setuptools takes only by the patterns of pyproject.toml."""
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "blockflow", tmp_path / "blockflow", ignore=caches)
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    here = {
        str(path.relative_to(tmp_path))
        for path in (tmp_path / "blockflow").rglob("*")
        if path.is_file()
    }

    subprocess.run([sys.executable, "-c", BUILD], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheel").iterdir()
    assert wheel.name == f"blockflow-{blockflow.__version__}-py3-none-any.whl"
    about = f"blockflow-{blockflow.__version__}.dist-info/"
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        assert {name for name in names if not name.startswith(about)} == here
        licence = packed.read(f"{about}licenses/LICENSE")
    assert licence == (ROOT / "LICENSE").read_bytes()
