"""The distribution of the tokens that `generate` samples with a draft, against the exact one.

A vocabulary of a few tokens has few continuations, whose probabilities the original code gives. Many draws are the rows
of one call.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import transformers

import fastgen
from fastgen.optimizer.transformers import loop
from tests.equivalence.models import Weights, enliven
from tests.equivalence.speculation import DRAFTS, assert_speculates, counts, draft_of

pytestmark = [pytest.mark.usefixtures("speculates_at_once", "any_lengths"), pytest.mark.sampled(4)]

VOCABULARY, TOKENS = 5, 3
DRAWS, ROWS = 10_000, 5_000
SIGNIFICANT = 0.001
PROMPT = [4, 0, 4, 2, 2, 3]  # which the model repeats now and then
PLAIN: dict[str, Any] = {"top_k": 0}
# Most of these ban and change other tokens at each position.
PROCESSORS: dict[str, Any] = {
    "temperature": 0.8, "top_k": 4, "top_p": 0.95, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2,
    "bad_words_ids": [[2, 4]],
}  # fmt: skip


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is recorded for as few tokens as there are here."""
    monkeypatch.setattr(loop, "MIN_STEPS", 1)


@pytest.fixture(scope="module")
def model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    enliven(made, Weights(3, eos=1.0))
    with torch.no_grad():
        made.lm_head.weight.div_(made.lm_head.weight.std() * 4)
    made.generation_config.pad_token_id = 0
    return made


def drawn_of(model: Any, prompts: torch.Tensor, tokens: int, **options: Any) -> torch.Tensor:
    given = {"attention_mask": torch.ones_like(prompts), "do_sample": True, "max_new_tokens": tokens}
    with torch.no_grad():
        return model.generate(prompts, **given, **options)


def exact(model: Any, options: dict[str, Any]) -> torch.Tensor:
    """[continuations], counted up: their probabilities by the original code. Padding, 0, follows `eos_token_id`."""
    found = torch.ones(1, dtype=torch.float64)
    eos = options.get("eos_token_id")
    options = {name: value for name, value in options.items() if name != "eos_token_id"}
    for length in range(TOKENS):
        words = itertools.product(range(VOCABULARY), repeat=length)
        prefixes = torch.tensor([[*PROMPT, *tokens] for tokens in words])
        with fastgen.disabled():
            returned = drawn_of(model, prefixes, 1, return_dict_in_generate=True, output_scores=True, **options)
        following = torch.softmax(returned.scores[0].double(), dim=-1)
        has_ended = (prefixes[:, len(PROMPT) :] == eos).any(dim=1) if eos is not None else []
        following[has_ended] = torch.eye(VOCABULARY, dtype=torch.float64)[0]
        found = (found.unsqueeze(1) * following).flatten()
    return found


def frequencies(model: Any, method: str, options: dict[str, Any]) -> torch.Tensor:
    """[continuations]: how often each was drawn."""
    asked = draft_of(method, model, spread=0.3)
    powers = VOCABULARY ** torch.arange(TOKENS - 1, -1, -1)
    found = torch.zeros(VOCABULARY**TOKENS, dtype=torch.int64)
    torch.manual_seed(0)
    prompts = torch.tensor([PROMPT]).expand(ROWS, -1).contiguous()
    for _ in range(DRAWS // ROWS):
        drawn = drawn_of(model, prompts, TOKENS + 1, **options, **asked)
        new = torch.nn.functional.pad(drawn, (0, TOKENS))[:, len(PROMPT) : len(PROMPT) + TOKENS]
        found += torch.bincount((new * powers).sum(1), minlength=len(found))
    assert_speculates(DRAWS // ROWS)
    assert 0 < counts()["accepted"] < counts()["drafted"]
    return found


def chi_square(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How probable counts at least as far from the expected ones are (Pearson). 0 if some are impossible."""
    expected = probabilities * observed.sum()
    if (observed[probabilities == 0] > 0).any():
        return 0.0
    # Cells with less than five expected draws become one.
    rare = expected < 5
    observed = torch.cat([observed[~rare].double(), observed[rare].sum().double().view(1)])
    expected = torch.cat([expected[~rare], expected[rare].sum().view(1)])
    counted = expected > 0
    statistic = ((observed - expected)[counted] ** 2 / expected[counted]).sum()
    freedom = counted.sum().double() - 1
    return float(torch.special.gammaincc(freedom / 2, statistic / 2)) if freedom > 0 else 1.0


def probability(model: Any, method: str, options: dict[str, Any]) -> float:
    """The smaller probability, of continuations of two and of three tokens."""
    found, wanted = frequencies(model, method, options), exact(model, options)
    shorter = found.view(-1, VOCABULARY).sum(1), wanted.view(-1, VOCABULARY).sum(1)
    return min(chi_square(found, wanted), chi_square(*shorter))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method, options", [*((method, PROCESSORS) for method in DRAFTS), ("int4", PLAIN)])
def test_distribution(model: Any, method: str, options: dict[str, Any]) -> None:
    if method == "lookup":  # which drafts repeated n-grams
        options = {name: value for name, value in options.items() if name != "no_repeat_ngram_size"}
    assert probability(model, method, options) > SIGNIFICANT


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["int8", "lookup"])
def test_distribution_where_rows_end(model: Any, method: str) -> None:
    """The first token ends every other row."""
    options = {"temperature": 0.8, "repetition_penalty": 1.2, "top_k": 0, "eos_token_id": 2}
    assert probability(model, method, options) > SIGNIFICANT


def test_nothing_can_be_drawn_behind_a_token_that_is_not_accepted(model: Any) -> None:
    """A token of the draft is banned, and all tokens are banned after it: plain generation never gets there."""
    prompts = torch.tensor([[0, 2, 1, 2, 3, 2, 4, 2, 0]]).expand(50, -1).contiguous()
    banned = [[2], *([2, token] for token in range(VOCABULARY))]
    drawn = drawn_of(model, prompts, TOKENS + 1, top_k=0, bad_words_ids=banned, prompt_lookup_num_tokens=4)
    assert_speculates(1)
    assert counts()["drafted"] > 0
    assert not (drawn[:, prompts.shape[1] :] == 2).any()


@pytest.mark.parametrize("draft", ["lookup", "assistant", "early exit"])
def test_the_library_draws_by_default(model: Any, draft: str) -> None:
    """With one seed the tokens are those of its own assisted generation."""
    fastgen.enable(assisted_sampling="library")
    options, prompt = draft_of(draft, model, spread=0.3), torch.tensor([PROMPT])

    def tokens(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return drawn_of(model, prompt, 20, **options)[0].tolist()

    with fastgen.disabled():
        expected = [tokens(seed) for seed in range(3)]
    # The library does not draft for several sequences, so there is nothing to reproduce.
    assert len(drawn_of(model, prompt.expand(3, -1), 20, **options)) == 3
    assert counts()["accelerated"] == 1
    fastgen.reset_stats()
    assert [tokens(seed) for seed in range(3)] == expected
    assert fastgen.stats()["transformers.generate"]["fallback"] == {"assisted decoding": 3}


@pytest.mark.parametrize("size", [-1, -(10**9)])
def test_sizes_that_the_library_refuses(model: Any, size: int) -> None:
    prompt = torch.tensor([PROMPT])
    with pytest.raises(ValueError, match="max_matching_ngram_size"):
        model.generate(prompt, prompt_lookup_num_tokens=3, max_matching_ngram_size=size, max_new_tokens=20)
