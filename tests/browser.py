"""A real browser for tests that look at pages: Debian's chromium with its driver, and selenium."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = [
    *([] if importlib.util.find_spec("selenium") else ["the package selenium"]),
    *([] if CHROMIUM else ["chromium"]),
    *([] if DRIVER else ["chromedriver"]),
]
in_browser = pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed")


@contextlib.contextmanager
def started() -> Iterator[Any]:
    """A browser without a window, which keeps what pages write to its log."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, width: int, height: int) -> None:
    """Windows of less than 500 pixels are those of a telephone."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
