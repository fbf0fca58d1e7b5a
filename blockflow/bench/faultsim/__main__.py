"""``python -m blockflow.bench.faultsim``."""

from __future__ import annotations

from blockflow.bench.faultsim.run import main

raise SystemExit(main())
