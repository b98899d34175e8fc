"""The model of memory against what is allocated, and what `--batch-size auto` makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import fastgen
from fastgen import settings as process_settings
from fastgen.pipeline import memory
from fastgen.pipeline.memory import MemoryModel, automatic_batch, free_memory
from tests.quantization import tiny

VOCABULARY = 6000
# The model of memory may plan for less than a batch takes by this part of it, and for more by that one. It is meant to
# be a little above: what torch's allocator loses to fragments comes on top.
BELOW, ABOVE = 0.1, 0.35


def bart():
    return tiny.bart(
        vocab_size=VOCABULARY, d_model=128, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=512, decoder_ffn_dim=512, forced_eos_token_id=None, max_position_embeddings=1024,
    )  # fmt: skip


def t5():
    sizes = dict(vocab_size=VOCABULARY, d_model=128, d_kv=32, d_ff=512, num_layers=3, num_decoder_layers=3, num_heads=4)
    return tiny.t5(**sizes, decoder_start_token_id=0)


def gpt2():
    return tiny.gpt2(vocab_size=VOCABULARY, n_embd=128, n_layer=3, n_head=4, n_positions=1024, eos_token_id=1)


def llama():
    return tiny.llama(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2048,
    )  # fmt: skip


def prepared(make: Callable, device: torch.device, new_tokens: int = 20, **options):
    """A model and the generation config of a call that makes so many tokens."""
    model = make().to(device)
    generation = model.generation_config
    generation.update(**{"do_sample": False, "min_new_tokens": new_tokens, "max_new_tokens": new_tokens, **options})
    return model, generation


def generate(model, generation, rows: int, width: int) -> None:
    ids = torch.randint(10, VOCABULARY - 10, (rows, width), device=model.device)
    mask = torch.ones_like(ids)
    # A padded batch has masks.
    mask[0, -3 if model.config.is_encoder_decoder else 0 :][:3] = 0
    with torch.no_grad():
        model.generate(input_ids=ids, attention_mask=mask, generation_config=generation)


def allocated(work: Callable[[], None], device: torch.device) -> int:
    """The most bytes of tensors that were there at the same time, beside those that were there before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "rows", "width", "options"),
    [
        (bart, 8, 256, {"num_beams": 4}), (bart, 2, 512, {}), (bart, 24, 16, {"num_beams": 4, "new_tokens": 30}),
        (t5, 8, 128, {"num_beams": 2}), (gpt2, 8, 256, {"num_beams": 4}),
        (gpt2, 16, 16, {"num_return_sequences": 3, "do_sample": True, "top_p": 0.9}), (llama, 8, 256, {"num_beams": 2}),
    ],
)  # fmt: skip
def test_what_a_batch_takes(make, rows, width, options, device):
    """On a GPU (`--device cuda`) against `torch.cuda.max_memory_allocated`, with the captured step and without."""
    if device.type == "cuda":
        rows *= 64  # the workspaces of cuBLAS would be most of what a small batch takes
    else:
        options = {"new_tokens": 8, **options}
    for captured_step in ("auto", "never") if device.type == "cuda" else ("never",):
        with process_settings.changed(packed_weights="never", captured_step=captured_step):
            model, generation = prepared(make, device, **options)
            generate(model, generation, 1, 8)
            taken = allocated(lambda model=model, config=generation: generate(model, config, rows, width), device)
            planned = MemoryModel.of(model, generation).peak(rows, width)
        assert (1 - BELOW) * taken <= planned <= (1 + ABOVE) * taken, (captured_step, planned / taken)
        assert fastgen.stats()["transformers.generate"]["accelerated"]


def test_attention_with_a_bias_makes_its_scores_on_a_gpu():
    """Against what an H200 took of the same call: `test_what_a_batch_takes`, 64 times the rows."""
    planned = replace(MemoryModel.of(*prepared(t5, torch.device("cpu"), num_beams=2)), on_gpu=True).peak(512, 128)
    assert (1 - BELOW) * 681_052_160 <= planned <= (1 + ABOVE) * 681_052_160


def bart_large(**changes) -> MemoryModel:
    sizes = {
        "layers": 12, "kv_bytes": 2 * 1024 * 2, "hidden": 1024, "inner": 4096, "gated": False, "heads": 16,
        "vocabulary": 50264, "element": 2, "beams": 4, "new_tokens": 140, "encoder_decoder": True, "biased": False,
        "eager": False, "samples": False, "on_gpu": True, "activation": "gelu", "captured": False,
    }  # fmt: skip
    return MemoryModel(**{**sizes, **changes})


def test_k_and_v_of_an_input_are_there_once():
    one, four = (bart_large(beams=beams)._phases(1024)[-1] for beams in (1, 4))
    # What a token costs grows by the encoder's output alone, which the library repeats.
    assert four.token - one.token == 3 * 1024 * 2
    assert one.token == 12 * 2 * 1024 * 2 + 1024 * 2
    assert four.row == 4 * one.row


def test_capacity_for_what_is_generated():
    def capacities(new_tokens, captured=False):
        return bart_large(new_tokens=new_tokens, captured=captured)._suffix_capacities()

    # The hooks have a capacity of 256 positions and a quarter more each time. A captured step has a power of two,
    # and those that were outgrown are kept.
    assert capacities(140) == [140] and capacities(257) == [320]
    assert [capacities(n, captured=True) for n in (20, 100, 128, 140, 257)] == [[64], [128], [128], [256], [256]]
    assert capacities(600, captured=True) == [256, 512, 1024]


def test_sizes_are_those_of_the_captured_step_and_of_the_store():
    from fastgen.decoding.kv import growing as kv
    from fastgen.optimizer.transformers import prefill
    from fastgen.optimizer.transformers.captured import key, prefilled_call

    assert memory.MIN_SHARED_PREFIX == kv.MIN_SHARED_PREFIX
    assert memory.FIRST_CAPACITY == prefill._MAX_FIRST_CAPACITY
    assert memory.CAPTURED_CAPACITIES == (key._FIRST_NEW, key._MAX_FIRST_NEW)
    assert memory.CAPTURED_PREFIX == key._MULTIPLE and memory.CAPTURED_BATCHES == prefilled_call.BATCHES


def test_a_captured_step_has_buffers_of_its_own():
    plain, captured = bart_large(), bart_large(captured=True)
    (encode, decode), (_, other) = captured._phases(1024), plain._phases(1024)
    prefix = 12 * 2 * 1024 * 2
    assert encode == plain._phases(1024)[0]
    assert decode.token == other.token + prefix, "the K/V of the inputs is there twice at first"
    assert captured.peak(33, 1024) == captured.peak(48, 1024) > plain.peak(48, 1024)


@pytest.mark.parametrize("changes", [{}, {"captured": True}, {"beams": 1, "eager": True}, {"encoder_decoder": False}])
@pytest.mark.parametrize("free", [2**28, 2**32, 2**36])
def test_what_is_planned_fits_and_little_is_left(changes, free):
    model, longest = bart_large(**changes), 1024
    rows, tokens = model.largest(free, 1024, longest)
    assert tokens % longest == 0 and 1 <= tokens // longest <= rows <= 1024
    full = tokens // longest
    used = max(need.of(rows, tokens) for need in model._phases(longest))
    if full > 1:
        assert used <= free
    if 1 < full < rows:
        assert max(need.of(rows, tokens + longest) for need in model._phases(longest)) > free


def test_automatic_batches_shrink_with_the_memory(monkeypatch):
    model, generation = prepared(bart, torch.device("cpu"), num_beams=4)
    sizes = []
    for free in (1 << 40, 1 << 28, 1 << 26, 1):
        monkeypatch.setattr(memory, "free_memory", lambda device, free=free: free)
        sizes.append(automatic_batch(model, generation, longest=64))
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) >= 3
    assert sizes[0] == (64, 64 * 64) and sizes[-1] == (1, 64)


def test_memory_for_packed_weights(monkeypatch):
    model, generation = prepared(bart, torch.device("cpu"))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * weights)
    assert automatic_batch(model, generation, 64) == (1, 64)
    with process_settings.changed(packed_weights="never"):
        assert automatic_batch(model, generation, 64) > (1, 64)


def test_sizes_that_configurations_hide():
    """A decoder of its own depth, and widths that have other names."""
    found = MemoryModel.of(*prepared(t5, torch.device("cpu"), num_beams=5))
    assert (found.layers, found.kv_bytes, found.inner, found.beams) == (3, 2 * 4 * 32 * 4, 512, 5)
    assert found.biased and not found.gated and found.encoder_decoder
    found = MemoryModel.of(*prepared(llama, torch.device("cpu"), num_beams=3))
    assert (found.layers, found.kv_bytes, found.heads, found.beams) == (3, 2 * 2 * 32 * 4, 4, 3)
    assert found.gated and not found.encoder_decoder
    found = MemoryModel.of(*prepared(bart, torch.device("cpu")))
    assert (found.layers, found.kv_bytes, found.vocabulary) == (3, 2 * 128 * 4, VOCABULARY)


def test_free_memory(monkeypatch):
    assert 2**20 < free_memory(torch.device("cpu")) < 2**50
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 400)
    assert free_memory(SimpleNamespace(type="cuda")) == 1300


def test_a_limit_that_stands_for_none_takes_no_memory_from_the_batch():
    """No sequence has more positions than the model, whatever its configuration says."""
    model, generation = prepared(llama, torch.device("cpu"))
    fits = model.config.max_position_embeddings
    plans = []
    for limit in (fits, 10**9, 10**18):
        generation.update(max_new_tokens=None, max_length=limit)
        plans.append(MemoryModel.of(model, generation).largest(2**30, 64, 40))
    assert plans[0] == plans[1] == plans[2]
