"""What every test has: a device to run on (`pytest --device cuda`), fixed seeds, no time limits on generated cases."""

from __future__ import annotations

import os
import random
import sys

import pytest
import torch
from hypothesis import settings

# A shared or cold machine makes any single case slow; that is not a failure. CI tries the same cases each time.
settings.register_profile("fastgen", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("fastgen")

# Triton runs kernels on a CPU in its interpreter. It decides that when it is imported, which toolkits do, and so do the
# other conftest files: before there are options.
if not any(argument.startswith("--device") for argument in (*sys.argv, os.environ.get("PYTEST_ADDOPTS", ""))):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Processes that share out the tests leave each other a core, and so does what they start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

# What tests measure while others run is nothing to remember.
os.environ.setdefault("FASTGEN_CACHE", "")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="device that the tests run on: cpu (default), cuda, cuda:1, ...")
    parser.addoption("--captured", action="store_true", help="equivalence tests run with a simulated captured step")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device named by --device. The run stops if it was asked for and is not there."""
    device = torch.device(request.config.getoption("--device"))
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.exit(f"--device {device}: torch {torch.__version__} sees no CUDA device", returncode=4)
    return device


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed that every test starts from."""
    random.seed(0)
    torch.manual_seed(0)
    return 0


@pytest.fixture(scope="session")
def kernels(device: torch.device) -> None:
    """Skips where the kernels cannot run: comparing the reference with itself would show nothing."""
    from fastgen.ops import triton as package

    if not package.available(torch.empty(0, device=device)):
        pytest.skip(f"the Triton kernels cannot run on {device}: {package.backend()}")
