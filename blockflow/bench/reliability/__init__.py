"""Reliability: what each promise of docs/reliability.md measures on this machine."""
