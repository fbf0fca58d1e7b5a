#!/usr/bin/env python3
"""The live monitor as a script: ``tools/monitor.py [--interval 1] [--url ...] [--json]``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from blockflow.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["top", *sys.argv[1:]]))
