"""``python -m blockflow.bench.batching``."""

from __future__ import annotations

from blockflow.bench.batching.run import main

if __name__ == "__main__":
    raise SystemExit(main())
