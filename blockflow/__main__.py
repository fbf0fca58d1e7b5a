"""``python -m blockflow``: the command, where its script is not on the path."""

from blockflow.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
