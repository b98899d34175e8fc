"""Fingerprints tell contents apart, whatever the number of threads."""

from __future__ import annotations

import pytest
import torch

from fastgen.ops import fingerprint
from tests.ops.instructions import threads

pytestmark = pytest.mark.skipif(not fingerprint.is_available(), reason="the extension was not built")


@pytest.mark.parametrize("count", [0, 1, 7, 8, 63, 64, 65, 1000, 2**18 + 5])
def test_fingerprints(count):
    x = torch.randn(count, generator=torch.Generator().manual_seed(8))
    before = fingerprint.fingerprint(x)
    assert fingerprint.fingerprint(x.clone()) == before
    for i in {0, count // 3, count - 1} if count else ():
        changed = x.clone()
        changed[i].neg_()
        assert fingerprint.fingerprint(changed) != before
    if count > 1:
        assert fingerprint.fingerprint(-x) != before
        assert fingerprint.fingerprint(x.flip(0)) != before
        assert fingerprint.fingerprint(x[:-1].clone()) != before
    if count > 2**18:  # more than one part of the bytes
        half = 2**18
        assert fingerprint.fingerprint(torch.cat([x[half:], x[:half]])) != before


def test_fingerprints_do_not_depend_on_threads():
    x = torch.randn(2**20 + 3)
    before = fingerprint.fingerprint(x)
    with threads(3):
        assert fingerprint.fingerprint(x) == before


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_of_any_type(dtype):
    x = torch.arange(200_000).to(dtype)
    changed = x.clone()
    changed[-2:] = 0
    assert fingerprint.fingerprint(x) == fingerprint.fingerprint(x.clone()) != fingerprint.fingerprint(changed)


def test_refuses_numbers_that_are_apart():
    with pytest.raises(RuntimeError, match="next to each other"):
        fingerprint.fingerprint(torch.zeros(4, 4)[:, ::2])
