"""Faults under virtual time: the cores of Dispatcher, workers and control plane, together."""
