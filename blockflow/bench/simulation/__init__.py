"""Simulation of workers, policies and arrivals under virtual time (docs/simulation.md)."""
