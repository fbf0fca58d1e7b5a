#!/usr/bin/env python3
"""Export a model as blocks; the same command as ``blockflow export``.

tools/export_block.py resnet50 --split default --prefix resnet50
"""

from __future__ import annotations

import sys
from pathlib import Path

# a checkout works without being installed
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from blockflow.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["export", *sys.argv[1:]]))
