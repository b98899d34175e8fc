"""Detects another project's distribution with an import package of the same name: installed together, both are broken.

Imported before the rest of the package, whose files may belong to either.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parents[1]
if any(_FOLDER.glob("fastgen-*.dist-info")):
    raise ImportError(
        f"two distributions have installed a package `fastgen` into {_FOLDER}, and their files are mixed: "
        "run `pip uninstall fastgen fastgen-transformers`, and install the one that you want "
        "(`fastgen-transformers` is the one for Transformers)"
    )
