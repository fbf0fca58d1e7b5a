"""``blockflow`` and ``python -m blockflow``: the command."""

import signal
import sys

_HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)


def main() -> int:
    """Run one command, see :func:`blockflow.cli.main.main`; where the client alone is installed
    (docs/client.md), say what is missing. Ctrl-C before that just ends the process: nothing was
    begun, and amid imports it would be Python's traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A parent that takes signals by sigwait has blocked them, for those that it starts as well.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
    try:
        from blockflow.cli.main import main as command
    except ModuleNotFoundError as exc:
        from blockflow.core.errors import SystemError_

        lacking = SystemError_(
            "MISSING_EXTRA",
            f"the package {exc.name!r} is not installed: the client alone can do without it, the "
            "command cannot",
            hint="pip install . in a checkout brings it",
        )
        sys.stderr.write(f"blockflow: {lacking}\n")
        return 2
    return command()


if __name__ == "__main__":
    raise SystemExit(main())
