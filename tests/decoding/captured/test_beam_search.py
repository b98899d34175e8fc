"""The bookkeeping of beam search against Transformers': the same sequences, scores and beam indices."""

from __future__ import annotations

import pytest
import torch

from fastgen.decoding.captured.beam_search import BeamSearch
from fastgen.decoding.captured.search import Search
from fastgen.decoding.kv.rows import StepState
from fastgen.ops.best_candidates import reference

transformers = pytest.importorskip("transformers")

VOCABULARY, EOS, SECOND_EOS, PAD = 40, 2, 18, 3


@pytest.fixture(scope="module")
def model(device):
    """A small language model whose beams end at different steps."""
    torch.manual_seed(6)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=EOS
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.4)
        model.lm_head.weight[[EOS, SECOND_EOS]] *= 4
    return model.to(device)


def begin(prompt, beams, max_length, spare=0, eos=(), early_stopping=False, **options):
    """A search in buffers with a capacity of `spare` more inputs, prompt positions and new tokens than are needed."""
    inputs, width = prompt.shape
    capacity = max_length - width + spare
    state = BeamSearch(
        inputs + spare, beams, width + spare, capacity, prompt.device, eos, early_stopping=early_stopping
    )
    state.begin(prompt, max_length - width, fill=PAD, **options)
    return state


def search(model, prompt, choose, late=0, **options):
    """Beam search with our bookkeeping, without a cache; looks at the flag `late` steps late."""
    state = begin(prompt, **options)
    flags = []
    while len(flags) <= late or not flags[-1 - late]:
        length = min(prompt.shape[1] + len(flags), options["max_length"])
        start = int(state.start[0, 0])
        with torch.no_grad():
            logits = model(state.running_tokens[:, start : start + length].clamp(min=0)).logits[:, -1]
        state.take(choose(logits, state.running_scores, state.candidates))
        flags.append(bool(state.done))
    return state


@pytest.mark.sampled(3)
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 1.7])
@pytest.mark.parametrize(("eos", "beams", "spare"), [([EOS], 4, 0), ([EOS, SECOND_EOS], 3, 3), ([], 2, 3)])
def test_equals_transformers(model, device, eos, beams, length_penalty, early_stopping, spare):
    prompt = torch.randint(6, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(1)).to(device)
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    with torch.no_grad():
        wanted = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), num_beams=beams, num_return_sequences=beams, max_length=17,
            do_sample=False, eos_token_id=eos or None, pad_token_id=PAD, return_dict_in_generate=True,
            output_scores=True, **options,
        )  # fmt: skip
    state = search(model, prompt, reference, beams=beams, max_length=17, eos=eos, spare=spare, **options)
    assert state.results(slice(3), beams).tolist() == wanted.sequences.tolist()
    torch.testing.assert_close(state.scores[:3].flatten(), wanted.sequences_scores, rtol=1e-5, atol=1e-5)
    indices = state.indices[:3].flatten(0, 1)[:, : wanted.beam_indices.shape[1]]
    assert indices.tolist() == wanted.beam_indices.tolist()
    if eos:
        ended = torch.isin(wanted.sequences[:, 5:], torch.tensor(eos, device=device)).any(dim=1)
        assert ended.any()


def test_steps_after_the_end_change_nothing(model, device):
    prompt = torch.full((2, 3), 7, device=device)
    on_time, late = (
        search(model, prompt, reference, late=n, beams=4, max_length=12, eos=[EOS], early_stopping=True) for n in (0, 5)
    )
    for name in ("sequences", "scores", "indices", "running_sequences", "running_scores", "length", "tokens"):
        assert torch.equal(getattr(on_time, name), getattr(late, name)), name


def test_tokens_and_parents_are_those_of_the_beams(model, device):
    """Rows continued by `parents` and `tokens` alone, and read through the table, are the beams."""
    prompt = torch.full((2, 3), 9, device=device)
    state = begin(prompt, beams=3, max_length=10)  # without an end, after which nothing changes
    rows = 6
    written = torch.zeros(rows, 8, dtype=torch.int64, device=device)
    steps = StepState(2, 3, 8, device)
    for step in range(6):
        with torch.no_grad():
            logits = model(state.running_sequences[:, :, : 3 + step].flatten(0, 1)).logits[:, -1]
        state.take(reference(logits, state.running_scores, state.candidates))
        if step:
            steps.advance(state.parents)
        written[:, step] = state.tokens
        positions = torch.arange(step + 1, device=device)
        read = written[steps.ancestry[:, : step + 1].long(), positions]
        assert read.tolist() == state.running_sequences.flatten(0, 1)[:, 3 : 4 + step].tolist()


def test_what_does_not_fit_into_the_buffers(device):
    state, prompt = BeamSearch(1, 2, 4, 3, device), torch.zeros(1, 5, dtype=torch.int64, device=device)
    for given in (prompt, prompt[:, 1:].expand(2, 4)):
        with pytest.raises(ValueError, match="into buffers for 1 prompts of 4 positions"):
            state.begin(given, 1)
    with pytest.raises(ValueError, match="there is nothing to generate"):
        state.begin(prompt[:, 1:], 0)


def test_one_search_after_the_other(model, device):
    """What a search leaves in the buffers means nothing to the next one."""
    longer = torch.full((2, 3), 7, device=device)
    shorter = torch.full((1, 2), 11, device=device)
    state = search(model, longer, reference, beams=3, max_length=12, eos=[EOS])
    state.begin(shorter, 8, fill=PAD, length_penalty=0.4)
    for step in range(8):
        with torch.no_grad():
            logits = model(state.running_tokens[:, 1 : 3 + step].clamp(min=0)).logits[:, -1]
        state.take(reference(logits, state.running_scores, state.candidates))
    alone = search(model, shorter, reference, beams=3, max_length=10, eos=[EOS], length_penalty=0.4)
    assert state.results(slice(1), 3).tolist() == alone.results(slice(1), 3).tolist()
    # The model runs on more rows in one of them, and may round otherwise.
    torch.testing.assert_close(state.scores[:1], alone.scores)


@pytest.mark.parametrize("spare", [0, 3])
def test_drawn_beams(device, spare):
    """Each candidate as often as its probability among those of all beams says; each once; nothing impossible."""
    inputs = 3000
    prompt = torch.zeros(inputs, 1, dtype=torch.int64, device=device)
    state = BeamSearch(inputs + spare, 2, 1, 4, device, samples=True)
    state.begin(prompt, 4)
    state.running_scores[:, 1] = -0.5  # as if the beams had gone on already
    probabilities = torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.4], [0.5, 0.0, 0.3, 0.1, 0.1]], device=device)
    scores, beams, tokens = (
        part[:inputs] for part in state.propose(probabilities.log().repeat(inputs + spare, 1), True)
    )
    joint = torch.cat([probabilities[0], probabilities[1] * torch.tensor(-0.5).exp().to(device)])
    joint = joint / joint.sum()
    drawn = 5 * beams + tokens
    first = torch.bincount(drawn[:, 0], minlength=10) / inputs
    assert ((first - joint).abs() < 5 * (joint * (1 - joint) / inputs).sqrt() + 1e-9).all()
    assert (drawn.sort(dim=1).values.diff(dim=1) > 0).all() and scores.isfinite().all()
    torch.testing.assert_close(
        scores, (probabilities.log() + torch.tensor([[0.0], [-0.5]], device=device)).flatten()[drawn]
    )
    assert not state.has_nan


@pytest.mark.parametrize(("kind", "beams"), [(Search, 1), (BeamSearch, 2)])
def test_samples_of_what_is_no_probability(device, kind, beams):
    state, prompt = kind(2, beams, 1, 4, device, samples=True), torch.zeros(1, 1, dtype=torch.int64, device=device)
    state.begin(prompt, 4)
    scores = torch.zeros(2 * beams, VOCABULARY, device=device)
    scores[-1, 3] = torch.nan  # of an input that only fills the batch up
    state.choose(scores, normalise=True)
    assert not state.has_nan and not state.done
    state.choose(scores.flip(0), normalise=True)
    assert state.has_nan and state.done
    state.begin(prompt, 4)
    assert not state.has_nan and not state.done
