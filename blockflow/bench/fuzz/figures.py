"""The names of the fuzzers' figures."""

FRAMES, FAILURES, GROWTH = "malformed frames", "failures", "growth of memory"
