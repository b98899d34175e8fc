"""Log-probabilities that know that there is no NaN among them."""

import copy
import math
import pickle

import pytest
import torch

from fastgen.optimizer.fairseq.hooks import MIN_SCORES, LogProbabilities, without_nan

ROWS = 4


@pytest.fixture
def scores():
    return torch.randn(ROWS, MIN_SCORES // ROWS).log_softmax(dim=-1)


def as_the_loop_does(log_probs):
    """What FairSeq's loop does to the log-probabilities of a step."""
    log_probs[log_probs != log_probs] = torch.tensor(-math.inf).to(log_probs)
    log_probs[:, 1] = -math.inf
    log_probs[:, 3] -= 0.5
    return log_probs


@pytest.mark.parametrize("place", [None, (0, 0), (1, 7), (ROWS - 1, -1)])
def test_the_loop_gets_what_it_would_have_got(scores, place):
    if place is not None:
        scores[place] = math.nan
    expected = as_the_loop_does(scores.clone())
    known = without_nan(scores)
    assert (type(known) is LogProbabilities) is (place is None)
    found = as_the_loop_does(known)
    assert found.as_subclass(torch.Tensor).equal(expected) and not expected.isnan().any()
    assert type(found.view(2, -1)) is torch.Tensor


def test_nan_that_is_written_later_is_found(scores):
    known = without_nan(scores)
    known[2, 5] = math.nan
    assert (known != known).nonzero().tolist() == [[2, 5]]


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinite_values(scores, value):
    scores[0, 0], scores[1, 1] = value, -math.inf
    expected = as_the_loop_does(scores.clone())
    assert as_the_loop_does(without_nan(scores)).as_subclass(torch.Tensor).equal(expected)


def test_the_mask_is_a_mask(scores):
    mask = without_nan(scores) != scores.as_subclass(LogProbabilities)
    assert type(mask) is torch.Tensor and not mask.any()
    known = without_nan(scores)
    mask = known != known
    assert mask.shape == scores.shape and mask.dtype is torch.bool and not mask.any() and (~mask).all()
    assert torch.where(mask, 1, 0).sum() == 0 and (mask | mask).sum() == 0
    other = torch.zeros(scores.shape)
    other[mask] = 1.0
    assert not other.any()
    known[mask | (scores == scores)] = 2.0
    assert (known == 2.0).all()


def test_small_ones_and_other_types_are_left_alone():
    assert type(without_nan(torch.zeros(2, 3))) is torch.Tensor
    assert type(without_nan(torch.zeros(MIN_SCORES, dtype=torch.long))) is torch.Tensor
    assert type(without_nan(torch.zeros(MIN_SCORES, device="meta"))) is torch.Tensor


def test_in_inference_mode_there_is_no_version_to_tell():
    expected = as_the_loop_does(torch.zeros(2, MIN_SCORES))
    with torch.inference_mode():
        scores = torch.zeros(2, MIN_SCORES)
        assert as_the_loop_does(without_nan(scores)).equal(expected)
    assert type(without_nan(scores)) is torch.Tensor
    scores = torch.zeros(2, MIN_SCORES)
    with torch.inference_mode():
        assert as_the_loop_does(without_nan(scores)).equal(expected)


def test_a_mask_that_is_written_into_holds_there(scores):
    known = without_nan(scores)
    mask = known != known
    mask[0, 0] = True
    mask |= torch.arange(scores.shape[1]) == 7
    known[mask] = 2.0
    assert (known == 2.0).nonzero().tolist() == [[0, 0], *([row, 7] for row in range(ROWS))]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda known: pickle.loads(pickle.dumps(known)), torch.clone])
def test_copies_are_ordinary(scores, copied):
    made = copied(without_nan(scores))
    assert type(made) is torch.Tensor and made.equal(scores)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(scores, dtype):
    scores = (1e4 * scores).to(dtype)  # the sum is infinite in half precision
    known = without_nan(scores)
    assert type(known) is LogProbabilities and not (known != known).any()
    scores[1, 2] = math.nan
    assert type(without_nan(scores)) is torch.Tensor
