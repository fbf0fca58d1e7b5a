"""Stock: what the repository holds, for whoever asks the control plane. Nobody is kept by a
:mod:`disk <blockflow.control.disk>` that does not answer: SystemError_, TIMEOUT."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from blockflow.control.disk import GLANCE_S, Disk
from blockflow.control.engines import lost_artifact
from blockflow.control.profiles import ProfileShelf
from blockflow.core.errors import BlockFlowError, RepositoryError, SystemError_
from blockflow.core.model import BlockInfo
from blockflow.core.scarcity import is_away, passed_over
from blockflow.core.specs import BlockSpec
from blockflow.core.topology import Topology
from blockflow.repository.repository import BlockRepository


class Stock:
    """Called by many threads.

    Args:
        repository: where blocks are looked up.
        profiles: what was measured of them.
    """

    def __init__(self, repository: BlockRepository, profiles: ProfileShelf) -> None:
        self._repository = repository
        self._profiles = profiles
        self._disk = Disk(repository.root)

    def check(self) -> None:
        """Before something is asked that may take its time: that anything is answered."""
        self._disk.is_there()

    def blocks(self) -> list[dict[str, Any]]:
        """The stored blocks; those whose manifest cannot be read come with their error."""
        return self._disk.ask(self._blocks)

    def _blocks(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        for name in self._repository.names():
            try:
                info = self._repository.info(name).to_dict()
                out.append({**info, "versions": self._repository.versions(name)})
            except RepositoryError as e:
                out.append({"name": name, "error": e.to_dict()})
        return out

    def gone(self, artifacts: Iterable[tuple[str, str]]) -> set[tuple[str, str]] | None:
        """Those pairs of block and digest that are not stored any more; None: nobody knows, for the
        repository is away, or does not answer."""
        try:
            return self._disk.ask(lambda: {pair for pair in artifacts if not self._has(*pair)})
        except BlockFlowError as e:
            if not is_away(e):
                raise
            return None

    def _has(self, block: str, digest: str) -> bool:
        has = False
        with passed_over():
            self._repository.info(block, digest=digest)
            has = True
        return has

    def lost(self, topology: Topology) -> list[str]:
        """Why workers of these blocks could not be replaced, if so, for people. That anything is
        answered is seen at a glance of the first one, for status is wanted most when something does
        not; a thousand blocks take longer. (Of a server that is gone the folder may still be known,
        and what is in it be asked for in vain.)"""
        pairs = [(spec, topology.infos[name]) for name, spec in topology.blocks.items()]

        def look(start: int, stop: int | None = None) -> list[str]:
            return [lost_artifact(self._repository, *pair) for pair in pairs[start:stop]]

        try:
            first = self._disk.ask(lambda: look(0, 1), GLANCE_S)
            return first + self._disk.ask(lambda: look(1))
        except SystemError_ as e:
            return [f"{e.message} -- {e.hint}"]

    def profile(self, spec: BlockSpec, info: BlockInfo) -> dict[str, Any]:
        """:meth:`ProfileShelf.state`."""
        return self._disk.ask(lambda: self._profiles.state(spec, info))
