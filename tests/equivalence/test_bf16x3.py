"""Products in float32 on AMX tiles, in three parts of bfloat16: tokens are those of the original code."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen.ops.linear import choose
from tests.equivalence.cases import BEAM
from tests.equivalence.check import accelerated, check
from tests.equivalence.models import BY_NAME, LONG
from tests.ops.instructions import has_tiles

pytestmark = pytest.mark.skipif(not has_tiles(), reason="this processor has no AMX tiles")


@pytest.mark.parametrize("options", [BEAM, {"num_beams": 1, "max_new_tokens": 16}], ids=["beams", "greedy"])
@pytest.mark.parametrize("name", ["bart", "t5", "llama", "opt"])
def test_tokens(name: str, options: dict, strict: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everywhere, prefill and steps of many rows included."""
    used = []
    chosen = choose.kernel_for

    def kernel_for(*given: Any) -> Any:
        kernel = chosen(*given)
        used.append(kernel is not None and kernel.name == "bf16x3")
        return kernel

    monkeypatch.setattr(choose, "kernel_for", kernel_for)
    family = BY_NAME[name]
    for _ in range(2):
        check(family.build(), family.make_inputs(3, LONG), options)
    assert any(used) and accelerated() == 2
