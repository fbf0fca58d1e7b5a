"""REST's secrets are away or half renewed when a control plane dies: the next one needs no file."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from takeover_rig import Load, furnish, members
from up_rig import gone, up
from warm_rig import Warm

from blockflow.core.errors import BlockFlowError
from blockflow.monitor.rest import RestClient
from blockflow.tensormq.private_files import write_private

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="certificates are made with openssl")
PATIENCE_S = 60.0


def make_pair(folder: Path, name: str) -> tuple[Path, Path]:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [str(OPENSSL), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(certificate)]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-nodes"]
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)
    return certificate, key


def settled(rest: RestClient, restarts: int) -> dict[str, Any]:
    """Status once so many managers have died and all is well."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            status = dict(rest.get("/v1/status"))
        except BlockFlowError as e:
            if e.code in ("UNAUTHORIZED", "INVALID_REQUEST"):
                raise
            status = {}
        if status and status["manager"]["restarts"] == restarts and status["ready"]:
            return status
        assert time.monotonic() < end, status
        time.sleep(0.02)


def test_successors_serve_with_the_secrets_in_force(tmp_path: Path, warm: Warm) -> None:
    furnish(tmp_path)
    certificate, key = make_pair(tmp_path, "server")
    trusted = shutil.copy(certificate, tmp_path / "trusted.pem")
    token, mine = tmp_path / "token", tmp_path / "mine"
    for path in (token, mine):
        write_private(path, b"o" * 40)
    more = ["--topology", str(tmp_path / "topology.json"), "--token-file", str(token)]
    more += ["--rest-cert", str(certificate), "--rest-key", str(key)]
    with up(tmp_path, *more, start=warm.popen) as (process, ready):
        rest = RestClient(ready["rest"], token_file=mine, ca_file=trusted)
        before = settled(rest, 0)
        # The token is away, and of a new pair the key only has come yet.
        token.unlink()
        shutil.copy(make_pair(tmp_path, "new")[1], key)
        with Load(ready["clients"][0]) as load:
            os.kill(before["manager"]["pid"], signal.SIGKILL)
            after = settled(rest, 1)
            load.more()
        assert members(after) == members(before) and not load.failed
        # Another one holds at once, and for the next successor, whatever becomes of its file.
        write_private(token, b"n" * 40)
        with pytest.raises(BlockFlowError) as e:
            rest.get("/v1/status")
        assert e.value.code == "UNAUTHORIZED"
        mine.write_bytes(b"n" * 40)
        rest = RestClient(ready["rest"], token_file=mine, ca_file=trusted)
        settled(rest, 1)
        token.write_bytes(b"")
        os.kill(after["manager"]["pid"], signal.SIGKILL)
        assert members(settled(rest, 2)) == members(before)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
        assert gone([], Path(ready["run_dir"]))
    log = (tmp_path / "err").read_text()
    assert "the token that was in force stays so" in log
    assert "begun anew" not in log and "o" * 40 not in log and "n" * 40 not in log
