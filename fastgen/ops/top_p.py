"""Top-p sampling, in place (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, section 3.1).

The library sorts the whole vocabulary of each row in each step. Here a radix sort does this (`fastgen.ops.sort_rows`),
and only for the rows that need it. The same tokens are dropped as there: if only some of several equal scores are
dropped, torch's order decides, so torch sorts such rows once more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastgen.ops import _library
from fastgen.ops.sort_rows import backend as backend
from fastgen.ops.sort_rows import sort_rows

# Exceeds every probability: the row does not change.
EVERYTHING = 2.0


def top_p_(scores: Tensor, share: Tensor, fill: float, least: int, *, orders_as_torch: bool = True) -> Tensor:
    """Fills the scores of the least probable tokens, which together have 1 - `share` of the probability.

    Args:
        scores: [rows, vocabulary], float32: changed in place.
        share: float64, one number, or [rows, 1]. Above 1, such as `EVERYTHING`, the row does not change.
        fill: the new score of the dropped tokens.
        least: at least this many tokens stay; 1 or more.
        orders_as_torch: of equal scores, drop the same ones as the library. 16-bit scores, many of which are equal,
            gain nothing by that, and half of the rows would be sorted again.

    Returns:
        `scores`.
    """
    torch.ops.fastgen.top_p_(scores, share, fill, least, orders_as_torch)
    return scores


def _top_p_(scores: Tensor, share: Tensor, fill: float, least: int, orders_as_torch: bool) -> None:
    _check(scores, share, least)
    share = share.reshape(-1, 1)
    if bool((share <= 1).all()):
        scores.masked_fill_(_goes(scores, share, least, orders_as_torch), fill)
        return
    rows = (share.expand(len(scores), 1) <= 1).view(-1).nonzero().view(-1)
    if len(rows):
        some = scores.index_select(0, rows)
        goes = _goes(some, share.expand(len(scores), 1)[rows], least, orders_as_torch)
        scores.index_copy_(0, rows, some.masked_fill_(goes, fill))


def _check(scores: Tensor, share: Tensor, least: int) -> None:
    """Raises RuntimeError, as a compiled operator does, before anything is written."""
    require = _library.checks("top_p_", RuntimeError)
    is_whole = all(each.is_cpu and _library.is_in_storage(each) for each in (scores, share))
    require(is_whole, "takes tensors on the CPU, in a storage that reaches as far as they do")
    require(not _library.share_memory(scores, share), "what is written shares memory with what is read")
    require(scores.dim() == 2 and scores.dtype is torch.float32, "scores must be [rows, vocabulary], float32")
    is_number = share.dtype is torch.float64 and share.shape in ((), (1,), (len(scores), 1))
    require(is_number, "share must be one number, or [rows, 1], float64")
    require(least > 0, "some token must stay")


def _goes(scores: Tensor, share: Tensor, least: int, orders_as_torch: bool) -> Tensor:
    """Returns the tokens to drop, [rows, vocabulary], bool."""
    values, columns = sort_rows(scores)
    goes = values.softmax(dim=-1).cumsum(dim=-1) <= (1 - share).to(scores.dtype)
    goes[:, -least:] = False
    if orders_as_torch and bool((goes[:, :-1] & ~goes[:, 1:] & (values[:, :-1] == values[:, 1:])).any()):
        columns = torch.sort(scores).indices
    return goes.scatter(1, columns, goes)


_library.define(
    "top_p_(Tensor(a!) scores, Tensor share, float fill, int least, bool orders_as_torch) -> ()",
    reference=_top_p_,
    fake=lambda *args: None,
)
OPERATOR = torch.ops.fastgen.top_p_.default
