"""What tests of the commands share."""

from __future__ import annotations

import json
from typing import Any

import pytest


def document(capsys: pytest.CaptureFixture[str]) -> Any:
    """The one JSON document on stdout."""
    return json.loads(capsys.readouterr().out)
