"""``python -m blockflow.bench.faultsim``."""

from __future__ import annotations

import logging

from blockflow.bench.faultsim.run import main

logging.disable(logging.CRITICAL)  # what the cores warn of is what is done to them here
raise SystemExit(main())
