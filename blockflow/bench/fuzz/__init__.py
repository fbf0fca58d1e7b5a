"""Fuzzers: malformed bytes at every decoder and every socket; ``make fuzz``."""
