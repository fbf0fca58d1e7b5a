"""``blockflow`` and ``python -m blockflow``: the command."""

import signal


def main() -> int:
    """Run one command, see :func:`blockflow.cli.main.main`. Ctrl-C before that just ends the
    process: nothing was begun, and amid imports it would be Python's traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from blockflow.cli.main import main as command

    return command()


if __name__ == "__main__":
    raise SystemExit(main())
