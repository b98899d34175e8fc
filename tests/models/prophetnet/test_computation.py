"""ProphetNet for FairSeq against a plain computation: every stream, beam search, losses and gradients."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fairseq.criterions import cross_entropy

import fastgen
from fastgen.models.prophetnet import attention
from fastgen.models.prophetnet.task import NgramLanguageLoss
from tests.fairseq.test_generate import generator_for
from tests.models.prophetnet.reference import Reference
from tests.models.prophetnet.tiny import PAD, SEP, VARIANTS, WORDS, arguments, dictionary, model_of, rows, sources


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@torch.no_grad()
def test_every_stream_is_what_the_paper_defines(changes):
    args = arguments(**changes)
    model = model_of(args)
    reference = Reference(model.state_dict(), args, PAD)
    sample = sources(3, 9)["net_input"]
    targets = torch.randint(4, 4 + WORDS, (3, 14))
    streams, extra = model(**sample, prev_output_tokens=targets)
    assert len(streams) == args.ngram and extra["attn"] is None
    for row, source in enumerate(rows(sample["src_tokens"])):
        expected = reference.decode(reference.encode(source), targets[row].tolist())
        torch.testing.assert_close(torch.stack(streams)[:, row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("enabled", [True, False], ids=["fastgen", "fairseq"])
@torch.no_grad()
def test_generation_is_that_of_the_plain_computation_step_by_step(changes, enabled):
    args = arguments(**changes)
    model = model_of(args)
    reference = Reference(model.state_dict(), args, PAD)
    sample = sources(2, 7)
    generator = generator_for([model], beam_size=1, max_len_b=11)
    if enabled:
        fastgen.enable(strict=True)
        found = generator.generate([], sample)
    else:
        with fastgen.disabled():
            found = generator.generate([], sample)
    for source, (hypothesis,) in zip(rows(sample["net_input"]["src_tokens"]), found, strict=True):
        encoded, tokens, scores = reference.encode(source), [SEP], []
        while len(tokens) < 13 and (len(tokens) == 1 or tokens[-1] != SEP):
            log_probs = reference.decode(encoded, tokens)[0, -1].log_softmax(0)
            log_probs[PAD] = -torch.inf
            if len(tokens) == 12:
                log_probs = log_probs.where(torch.arange(len(log_probs)) == SEP, -torch.inf)
            elif len(tokens) == 1:
                log_probs[SEP] = -torch.inf  # `min_len` is 1
            scores.append(log_probs.max())
            tokens.append(int(log_probs.argmax()))
        assert hypothesis["tokens"].tolist() == tokens[1:]
        torch.testing.assert_close(hypothesis["positional_scores"], torch.stack(scores), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_the_scores_of_beam_search_are_those_of_the_plain_computation(strict):
    args = arguments()
    model = model_of(args, seed=1)
    reference = Reference(model.state_dict(), args, PAD)
    sample = sources(2, 7)
    found = generator_for([model], beam_size=2, max_len_b=22).generate([], sample)
    assert max(len(hypothesis["tokens"]) for hypotheses in found for hypothesis in hypotheses) > 20
    for source, hypotheses in zip(rows(sample["net_input"]["src_tokens"]), found, strict=True):
        encoded = reference.encode(source)
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"]
            log_probs = reference.decode(encoded, [SEP, *tokens[:-1].tolist()])[0].log_softmax(1)
            expected = log_probs.gather(1, tokens.unsqueeze(1)).squeeze(1)
            torch.testing.assert_close(hypothesis["positional_scores"], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 16), (2, 3)])
def test_buckets(buckets, furthest):
    reference = Reference({}, Namespace(num_buckets=buckets, relative_max_distance=furthest), PAD)
    found = attention.distance_buckets(torch.arange(-2, 600), buckets, furthest).tolist()
    assert found == [reference.bucket(max(distance, 0)) for distance in range(-2, 600)]


def test_gradients_are_those_of_the_plain_computation():
    args = arguments(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, share_all_embeddings=False)
    model = model_of(args).train()
    words = dictionary()
    sample = training_sample()
    criterion = NgramLanguageLoss(SimpleNamespace(target_dictionary=words), label_smoothing=0.1)
    loss, size, logged = criterion(model, sample)
    loss.backward()
    assert size == 2 * int(sample["target"].ne(PAD).sum()) == logged["sample_size"]

    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in model.state_dict().items()}
    reference = Reference(leaves, args, PAD)
    expected = torch.zeros(())
    inputs = sample["net_input"]
    for source, before, target in zip(
        rows(inputs["src_tokens"]), inputs["prev_output_tokens"], sample["target"], strict=True
    ):
        target = target[target != PAD]
        log_probs = reference.decode(reference.encode(source), before[: len(target)].tolist()).log_softmax(2)
        expected = expected - 0.9 * log_probs[:, range(len(target)), target].sum() - 0.1 * log_probs.mean(2).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-3, rtol=1e-5)
    for name, parameter in model.named_parameters():
        # This layer's parameter has another name in checkpoints, and both tables of the decoder are one.
        stored = name.replace("in_proj.", "in_proj_")
        torch.testing.assert_close(
            parameter.grad, leaves[stored].grad, atol=2e-3, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def training_sample() -> dict[str, Any]:
    inputs = sources(3, 8)["net_input"]
    target = torch.randint(4, 4 + WORDS, (3, 6))
    target[0, 5], target[1, 2], target[1, 3:], target[2, 4], target[2, 5:] = SEP, SEP, PAD, SEP, PAD
    before = torch.cat([torch.full((3, 1), SEP), target[:, :-1]], dim=1).masked_fill_(target == PAD, PAD)
    return {
        "net_input": {**inputs, "prev_output_tokens": before},
        "target": target,
        "ntokens": int(target.ne(PAD).sum()),
        "nsentences": 3,
    }


@torch.no_grad()
def test_the_loss_without_the_ngrams_is_that_of_the_next_token():
    model = model_of(arguments()).eval()
    sample = training_sample()
    words = SimpleNamespace(target_dictionary=dictionary())
    loss, size, _ = NgramLanguageLoss(words, disable_ngram_loss=True)(model, sample)
    scores = model(**sample["net_input"])[0][0]
    assert size == sample["ntokens"]
    torch.testing.assert_close(
        loss, F.cross_entropy(scores.transpose(1, 2), sample["target"], ignore_index=PAD, reduction="sum")
    )


@torch.no_grad()
def test_other_criteria_get_the_next_token():
    model = model_of(arguments())
    sample = training_sample()
    criterion = cross_entropy.CrossEntropyCriterion(SimpleNamespace(target_dictionary=dictionary()), False)
    scores = model(**sample["net_input"])[0][0]
    expected = F.cross_entropy(scores.transpose(1, 2), sample["target"], ignore_index=PAD, reduction="sum")
    torch.testing.assert_close(criterion(model, sample)[0], expected)
