"""DeviceReach: which consumers a worker's device memory reaches, and for those it does not, why."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from blockflow.tensormq.cuda_device import CudaDevice
from blockflow.tensormq.cuda_verdict import VerdictView

_LOG = logging.getLogger("blockflow.cuda")


class DeviceReach:
    """What an owner knows of its consumers. Each reason to take the host is logged once.

    Args:
        device: whose memory it is. run_dir: where consumers' books lie. own: the incarnation.
    """

    def __init__(self, device: CudaDevice, run_dir: Path, own: int) -> None:
        self._device = device
        self._run_dir = run_dir
        self._own = own
        self._takes: dict[int, bool] = {}
        self._views: dict[int, VerdictView] = {}  # of those whose own verdict decides
        self._obstacles: dict[int, str] = {}
        self._told: set[str] = set()
        self._given_up = ""

    @property
    def obstacle(self) -> str:
        """Why tensors for some consumer on a device go over the host (of several reasons that
        hold, the latest); '' where none do. In any thread."""
        return next(iter(list(self._obstacles.values())[-1:]), "")

    def takes(self, consumer: int) -> bool:
        """Whether a consumer can be given device memory, as of the last :meth:`look`."""
        return self._takes.get(consumer, False)

    def set_consumers(self, placed: Mapping[int, str]) -> None:
        """Where consumers on devices compute: incarnation -> ``cuda:N``."""
        known, self._views = self._views, {}
        self._takes, self._obstacles = {}, {}
        for consumer, device in placed.items():
            if consumer == self._own:
                continue
            why = self._given_up or self._distance(device)
            view = None
            if not why:
                view = known.get(consumer) or VerdictView.of(self._run_dir, consumer, self._own)
            if view is None:
                self._block(consumer, why or f"incarnation {consumer} takes no device memory")
                continue
            self._views[consumer] = view
            self._takes[consumer] = view.opened
            if view.refusal() is not None:
                self._judge(consumer, view)

    def _distance(self, device: str) -> str:
        """Why this memory is out of reach from a device; '' if it is not."""
        _, _, number = device.partition(":")
        if device == self._device.name or self._device.api.readable_by(int(number)):
            return ""
        return f"{self._device.name} and {device} are no peers"

    def look(self, consumers: Collection[int]) -> None:
        """Tensors for these are about to be placed: follow their verdicts, if they have changed."""
        for consumer in consumers:
            view = self._views.get(consumer)
            if view is not None and not (view.opened and self._takes[consumer]):
                self._judge(consumer, view)

    def _judge(self, consumer: int, view: VerdictView) -> None:
        opened = self._takes[consumer] = view.opened
        if opened:
            self._obstacles.pop(consumer, None)
            return
        refusal = view.refusal()
        if refusal is None:
            # Its verdict is about to come, so it is no news; it shows, though, if it never does.
            self._obstacles[consumer] = f"incarnation {consumer} has opened no device memory yet"
            return
        name = self._device.name
        self._block(consumer, f"incarnation {consumer} cannot open memory of {name}: {refusal}")

    def _block(self, consumer: int, why: str) -> None:
        self._takes[consumer] = False
        self._obstacles.pop(consumer, None)
        self._obstacles[consumer] = why
        if why not in self._told:
            self._told.add(why)
            _LOG.warning("tensors go over the host: %s", why)

    def give_up(self, why: str) -> None:
        """There is no device memory to give, to anybody."""
        self._given_up = why
        self._views.clear()
        for consumer in list(self._takes):
            self._block(consumer, why)

    def forget(self, consumer: int) -> None:
        """It is dead."""
        for known in (self._takes, self._views, self._obstacles):
            known.pop(consumer, None)
