"""Chaos: real processes under real load and random faults, judged by the clients' own ledger."""
