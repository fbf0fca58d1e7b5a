"""Launch orders that no process could read are refused with the update."""

from __future__ import annotations

import pytest
from control_rig import World, topology

from blockflow.core.errors import TopologyError


def test_a_worker_of_more_blocks_than_it_can_be_told_of_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World().up()
    blocks = [{"name": f"b{i}", "worker": "w" if i < 9 else f"v{i}"} for i in range(12)]
    many, posted = topology(blocks, {"t": ["b0"]}), {"blocks": blocks}
    assert world.brain.preview(many)["changed"]
    monkeypatch.setattr("blockflow.control.orders.limits.MAX_CONTROL_BYTES", 1000)
    monkeypatch.setattr("blockflow.control.brain.check_size", lambda _: None)
    for ask in (world.brain.preview, lambda t: world.brain.apply(t, posted, world.now)):
        with pytest.raises(TopologyError, match="INVALID_TOPOLOGY") as refused:
            ask(many)
        [problem] = refused.value.problems
        assert "worker 'w' has 9 blocks" in problem.message and "limit of 1000" in problem.message
    assert not world.brain.runner.updates
