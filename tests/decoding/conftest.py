"""The layers of these tests are taken for the library's own: otherwise FastGen would leave them alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastgen.decoding import derived_weights


@pytest.fixture(autouse=True)
def layers_are_the_librarys(tests_are_the_librarys: None) -> None:
    """See above."""


@pytest.fixture(autouse=True)
def kernels_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CPU runs. Triton's kernels take a hundred times as long in their interpreter; tests/ops/gpu has them."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")


@pytest.fixture(params=["kernels of the CPU", "Triton's kernels"])
def each_backend(request: pytest.FixtureRequest, kernels_of_the_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the few tests that show that both are called alike."""
    if request.param == "Triton's kernels":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def new_copies() -> Callable[[], list[derived_weights.DerivedWeight]]:
    """What the cache of copies knows of this test: what others have left there need not be collected."""
    before = list(derived_weights.known())
    return lambda: [each for each in derived_weights.known() if all(each is not other for other in before)]
