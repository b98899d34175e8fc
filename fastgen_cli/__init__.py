"""FastGen's command lines. They only parse, call the library and print."""

import fastgen  # noqa: F401 (reads the settings of the environment, and reports a wrong one, before the commands begin)
