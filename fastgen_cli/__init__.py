"""Command lines of FastGen. They parse, call the library and print; nothing else lives here."""

import sys

try:
    import fastgen  # noqa: F401 (reads the settings of the environment)
except ValueError as error:
    print(f"fastgen: {error}", file=sys.stderr)
    raise SystemExit(2) from None
