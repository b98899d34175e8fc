"""The build backend of FastGen: setuptools, or a one-line error about a missing requirement, before any download."""

from __future__ import annotations

import runpy
from typing import Any

_MINIMUM = 77
_REMEDY = f"run `pip install 'setuptools>={_MINIMUM}'`, or leave out --no-build-isolation"

try:
    import setuptools
except ImportError:
    raise SystemExit(f"fastgen: the build needs setuptools {_MINIMUM} or later, and there is none: {_REMEDY}") from None
_release = setuptools.__version__
if int(_release.partition(".")[0]) < _MINIMUM:
    raise SystemExit(f"fastgen: the build needs setuptools {_MINIMUM} or later, not {_release}: {_REMEDY}")

from setuptools import build_meta  # noqa: E402
from setuptools.build_meta import *  # noqa: E402, F403


def get_requires_for_build_wheel(settings: Any = None) -> list[str]:
    """Checks the requirements. pip calls this first, before it downloads FastGen's dependencies.

    Raises:
        SystemExit: the operators cannot be built here.
    """
    _check()
    return build_meta.get_requires_for_build_wheel(settings)


def get_requires_for_build_editable(settings: Any = None) -> list[str]:
    """Checks as `get_requires_for_build_wheel`."""
    _check()
    return build_meta.get_requires_for_build_editable(settings)


def _check() -> None:
    missing = runpy.run_path("setup.py")["missing"]()
    if missing:
        raise SystemExit(f"fastgen: {missing}")
