"""Inputs for a calibration: of a whole data set no more is read than is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from blockflow.core.model import TensorSpec
from blockflow.repository import samples

SPEC = TensorSpec("float32", ("rows", 2))


def test_no_more_files_are_read_than_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "MOST", 2)
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.zeros((1, 2), np.float32))
    (tmp_path / "c.npy").write_bytes(b"not looked at")
    assert len(samples.load_samples(tmp_path, SPEC).inputs) == 2
