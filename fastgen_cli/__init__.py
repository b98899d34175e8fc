"""Command lines of FastGen. They parse, call the library and print; nothing else lives here."""

import fastgen  # noqa: F401 (reads the settings of the environment, and reports a wrong one, before the commands begin)
