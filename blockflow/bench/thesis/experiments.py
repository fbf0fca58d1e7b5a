"""The thesis's experiments, in the order of its chapter 4. A module adds its line here."""

from __future__ import annotations

from blockflow.bench.thesis import (
    batches,
    clients,
    components,
    copies,
    deployment,
    devices,
    energy,
    growth,
    growth_blocks,
    offline,
    pipeline_time,
    rates,
    transports,
    util,
)
from blockflow.bench.thesis.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (
    offline.EXPERIMENT,
    transports.EXPERIMENT,
    pipeline_time.EXPERIMENT,
    components.EXPERIMENT,
    util.EXPERIMENT,
    batches.EXPERIMENT,
    copies.EXPERIMENT,
    energy.EXPERIMENT,
    clients.EXPERIMENT,
    rates.EXPERIMENT,
    growth.EXPERIMENT,
    growth_blocks.EXPERIMENT,
    devices.EXPERIMENT,
    deployment.EXPERIMENT,
)
