"""Between two calls, a captured step's K and V take no memory; the next call finds them as new ones."""

from __future__ import annotations

import pytest
import torch

import fastgen
from fastgen.decoding import host_memory
from fastgen.optimizer.transformers.captured import graph_cache
from tests.equivalence.captured import record_programs


@pytest.fixture(autouse=True)
def programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are recorded as programs, in the first call."""
    record_programs(device, monkeypatch)


def test_idle_steps_take_no_memory() -> None:
    """Of steps for different numbers of rows, only the one that runs has its K and V in memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        max_position_embeddings=4096, eos_token_id=None, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 60, (4, 1500))
    expected = {rows: 2 * 2 * rows * 1500 * 256 * 4 for rows in (1, 4)}  # bytes of the prefix
    for rows in (1, 4, 1, 4):
        call = model.generate(
            ids[:rows], attention_mask=torch.ones_like(ids[:rows]), do_sample=False, max_new_tokens=12
        )
        with fastgen.disabled():
            wanted = model.generate(ids[:rows], do_sample=False, max_new_tokens=12)
        assert torch.equal(call, wanted)  # whatever calls before have left
    steps = list(graph_cache._of(model).steps.values())
    assert [step.key.rows for step in steps] == [1, 4]
    assert steps[1].buffers.own[0].prefix[0].any()  # the next call may be like the last one
    graph_cache.take(model, steps[0].key, lambda: None)
    steps[0].clear()
    before = host_memory._resident()
    for step in steps:
        for kv in step.buffers.own:
            for part in kv.prefix:
                assert not part.any()  # reads zeros of the system, which are one page
                part.fill_(1)
    assert host_memory._resident() - before > sum(expected.values()) * 0.9
