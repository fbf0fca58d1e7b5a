"""Another release is installed over a system that runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

import plain_http
import pytest
from up_rig import family, gone, up, without_torch

import blockflow
from blockflow.cli.exits import ExitCode

pytestmark = pytest.mark.timeout(300)
NEW = "9.1.0"


def test_it_is_told_of_and_never_mixed_with_the_one_that_runs(tmp_path: Path) -> None:
    site = tmp_path / "site"
    package = Path(
        shutil.copytree(
            Path(blockflow.__file__).parent,
            site / "blockflow",
            # With what was compiled of it: a copy has its file's times.
            ignore=shutil.ignore_patterns("bench", "zoo"),
        )
    )
    env = without_torch(tmp_path)
    env["PYTHONPATH"] = os.pathsep.join((str(site), env["PYTHONPATH"]))
    start = partial(subprocess.Popen, cwd=site)
    with up(tmp_path, env=env, start=start) as (process, told):
        address, run_dir = told["rest"] + "/v1/status", Path(told["run_dir"])
        before = plain_http.get(address).json()
        assert before["release"] == blockflow.__version__ and before["warnings"] == []
        module = package / "__init__.py"
        module.write_text(module.read_text().replace(blockflow.__version__, NEW))
        after = plain_http.get(address).json()
        assert after["release"] == blockflow.__version__
        [warning] = after["warnings"]
        assert NEW in warning and "blockflow up" in warning

        ours = family(process.pid)
        os.kill(after["manager"]["pid"], signal.SIGKILL)
        assert process.wait(60) == ExitCode.INTERNAL
        assert gone(ours, run_dir)
    said = (tmp_path / "err").read_text()
    assert f"the package is release {NEW} by now" in said and "from the stored state" in said
    with up(tmp_path, env=env, start=start) as (_, told):
        again = plain_http.get(told["rest"] + "/v1/status").json()
        assert again["release"] == NEW and again["warnings"] == []
