"""What a process of a parallel run tells the first one: of a test that passes, that it has.

xdist sends six messages for each test, of which three say nothing that anybody looks at, and the
first process takes a millisecond for them, while all others compute.
"""

from __future__ import annotations

from typing import Any

import pytest

DULL = "nothing to tell"


class LeanReports:
    """A plugin of such a process.

    Args:
        interactor: xdist's own, which sends.
    """

    def __init__(self, interactor: Any) -> None:
        self._send = interactor.sendevent
        interactor.sendevent = self._sendevent

    def _sendevent(self, name: str, **facts: Any) -> None:
        if name not in ("logstart", "logfinish") and DULL not in facts.get("data", ()):
            self._send(name, **facts)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_to_serializable(self, report: Any) -> dict[str, Any] | None:
        told = report.when == "call" or not report.passed or report.sections
        return None if told else {DULL: True}


def report_less(config: pytest.Config) -> None:
    """Unless more is asked for: each test's name, the time of its fixtures, a file."""
    options = config.option
    if options.verbose > 0 or options.durations is not None or options.xmlpath:
        return
    for plugin in config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            config.pluginmanager.register(LeanReports(plugin))
            return
