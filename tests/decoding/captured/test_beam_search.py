"""The bookkeeping of beam search against Transformers': the same sequences, scores and beam indices; what is drawn."""

from __future__ import annotations

import pytest
import torch

from fastgen.decoding.captured.beam_search import BeamSearch
from fastgen.decoding.captured.search import Search
from fastgen.ops.search_step import continuations_reference

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


def search(model, prompt, beams, max_length, spare, eos, early_stopping, **options):
    """Beam search with our bookkeeping, without a cache, in buffers for `spare` more inputs and positions."""
    inputs, width = prompt.shape
    capacity = max_length - width + spare
    state = BeamSearch(
        inputs + spare, beams, width + spare, capacity, prompt.device, eos, early_stopping=early_stopping
    )
    state.begin(prompt, max_length - width, fill=PAD, **options)
    return run(model, state)


def run(model, state):
    start = int(state.start[0, 0])
    while not state.done:
        with torch.no_grad():
            logits = model(state.running_tokens[:, start : int(state.length.max())].clamp(min=0)).logits[:, -1]
        state.take(continuations_reference(logits, state.running_scores, state.candidates))
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
    state = search(model, prompt, beams=beams, max_length=17, eos=eos, spare=spare, **options)
    assert state.results(slice(3), beams).tolist() == wanted.sequences.tolist()
    torch.testing.assert_close(state.scores[:3].flatten(), wanted.sequences_scores, rtol=1e-5, atol=1e-5)
    indices = state.indices[:3].flatten(0, 1)[:, : wanted.beam_indices.shape[1]]
    assert indices.tolist() == wanted.beam_indices.tolist()
    if eos:
        ended = torch.isin(wanted.sequences[:, 5:], torch.tensor(eos, device=device)).any(dim=1)
        assert ended.any()


def test_what_does_not_fit_into_the_buffers(device):
    state, prompt = BeamSearch(1, 2, 4, 3, device), torch.zeros(1, 5, dtype=torch.int64, device=device)
    for given in (prompt, prompt[:, 1:].expand(2, 4)):
        with pytest.raises(ValueError, match="into buffers for 1 prompts of 4 positions"):
            state.begin(given, 1)
    with pytest.raises(ValueError, match="there is nothing to generate"):
        state.begin(prompt[:, 1:], 0)


@pytest.mark.parametrize("spare", [0, 2])
def test_a_row_that_has_ended_is_padded(device, spare):
    """Until the last one ends. Then nothing changes, however late that is noticed."""
    state = Search(2 + spare, 1, 1 + spare, 4, device, [EOS, SECOND_EOS])
    state.begin(torch.full((2, 1), 9, device=device), 4, fill=PAD)
    for tokens in ([EOS, 5], [7, 8], [7, SECOND_EOS], [7, 7], [7, 7]):
        scores = torch.zeros(2 + spare, VOCABULARY, device=device)
        scores[range(2), tokens] = 1
        state.choose(scores, normalise=True)
    assert state.done and state.results(slice(2), 1).tolist() == [[9, EOS, PAD, PAD], [9, 5, 8, SECOND_EOS]]


def test_copies(device):
    state = Search(4, 3, 2, 4, device)
    state.begin(torch.tensor([[3, 4], [5, 6]], device=device), 1)
    scores = torch.zeros(12, 7, device=device)
    scores[torch.arange(12), torch.arange(12) % 7] = 1
    state.choose(scores, normalise=True)
    assert state.done and state.results(slice(2), 3)[:, [0, -1]].tolist() == [[3 + n // 3 * 2, n] for n in range(6)]


def test_one_search_after_the_other(model, device):
    """What a search leaves in the buffers means nothing to the next one."""
    options = {"beams": 3, "spare": 0, "eos": [EOS], "early_stopping": False}
    state = search(model, torch.full((2, 3), 7, device=device), max_length=12, **options)
    shorter = torch.full((1, 2), 11, device=device)
    state.begin(shorter, 8, fill=PAD, length_penalty=0.4)
    alone = search(model, shorter, max_length=10, length_penalty=0.4, **options)
    assert run(model, state).results(slice(1), 3).tolist() == alone.results(slice(1), 3).tolist()
    # The model runs on more rows in one of them, and may round otherwise.
    torch.testing.assert_close(state.scores[:1], alone.scores)


def test_drawn_rows(device):
    """As often as their probabilities say; what has the probability 0, never."""
    count = 4000
    prompt = torch.zeros(1, 1, dtype=torch.int64, device=device)
    state = Search(1, count, 1, 4, device, samples=True)
    state.begin(prompt, 4)
    probabilities = torch.tensor([0.0, 0.05, 0.2, 0.25, 0.5], device=device)
    state.choose(probabilities.log().expand(count, -1), normalise=True)
    drawn = torch.bincount(state.tokens, minlength=5) / count
    assert drawn[0] == 0
    assert ((drawn - probabilities).abs() < 5 * (probabilities * (1 - probabilities) / count).sqrt() + 1e-9).all()


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
