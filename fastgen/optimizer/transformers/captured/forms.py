"""Results of a given form: between steps, the host finds the tokens that may come next, as data of a step with slots.

Without slots, the form is a processor that the host runs within a step, like any processor of the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessor

from fastgen.optimizer.transformers.captured.rewritten_processors import Bucket, Buffer, CapturedProcessor, StepTokens


class Form(Protocol):
    """The state of a sequence in its form. It is immutable."""

    def behind(self, token: int) -> Form:
        """Returns the state after a token."""

    def allows(self, token: int) -> bool:
        """Whether this token may come next."""

    def forced(self) -> list[int]:
        """Returns the tokens that must come next, because no other text is possible."""

    def blocked(self, size: int) -> Tensor:
        """Returns [size], bool, on the CPU: which tokens may not come next."""


class FormProcessor(LogitsProcessor):
    """Gives each sequence of a call a form.

    It identifies a sequence by its tokens, because beams change rows, rows leave a batch, and a call may be repeated.

    Args:
        begin: the initial state of the form.
    """

    def __init__(self, begin: Form) -> None:
        self._begin = begin
        self._prompt = self._longest = 0  # lengths, including padding: of the prompt, and the largest so far
        self._prompts: set[bytes] = set()
        self._forms: dict[bytes, Form] = {}  # states of the sequences of the latest step

    def anew(self) -> FormProcessor:
        """Returns a processor for another call, which may run at the same time."""
        return FormProcessor(self._begin)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return restricted(scores, self.blocked(input_ids, scores.shape[1]).to(scores.device))

    def blocked(self, tokens: Tensor, size: int) -> Tensor:
        """Returns [rows, size], bool, on the CPU: the tokens that may not follow `tokens`, [rows, length]."""
        rows, length = [row.tobytes() for row in tokens.cpu().numpy()], tokens.shape[1]
        # A draft may be discarded, so lengths may shrink, but no step is skipped.
        if not (self._prompt < length <= self._longest + 1 and self._knows(rows, tokens.itemsize)):
            self._prompt, self._longest, self._prompts = length, length, set(rows)
        self._longest = max(self._longest, length)
        self._forms = {key: self._form(key, row) for key, row in dict(zip(rows, tokens, strict=True)).items()}
        return torch.stack([self._forms[key].blocked(size) for key in rows])

    def forced(self, tokens: Tensor) -> list[int]:
        """Returns the tokens that must follow a sequence of the latest step, [length], until there is a choice."""
        return self._forms[tokens.numpy().tobytes()].forced()

    def drafted(self, tokens: Tensor, draft: Sequence[int]) -> list[Form]:
        """Returns the state of a sequence of the latest step, [length], after each token of a draft, up to the first
        token that may not come. The next step may continue any of them.
        """
        key, found = tokens.numpy().tobytes(), list[Form]()
        form = self._forms[key]
        for token in draft:
            if not form.allows(token):
                break
            try:
                form = form.behind(token)
            except ValueError:  # the form cannot be followed; raised again if the sequence itself gets there
                break
            found.append(form)
            key += torch.tensor(token, dtype=tokens.dtype).numpy().tobytes()
            self._forms[key] = form
        self._longest = max(self._longest, len(tokens) + len(found))
        return found

    def _knows(self, rows: list[bytes], itemsize: int) -> bool:
        """Whether these sequences continue prompts of the call."""
        return all(row[: self._prompt * itemsize] in self._prompts for row in rows)

    def _form(self, key: bytes, tokens: Tensor) -> Form:
        before = self._forms.get(key[: -tokens.itemsize]) if len(tokens) > self._prompt else None
        if before is not None:
            return before.behind(int(tokens[-1]))
        form = self._begin
        for token in tokens[self._prompt :].tolist():
            form = form.behind(token)
        return form


def restricted(scores: Tensor, blocked: Tensor, are_banned: bool = True) -> Tensor:
    """Returns the scores without blocked tokens; both [rows, vocabulary].

    Other processors may have left no allowed token. If they force a token, such as the first one of a translation, it
    comes. Otherwise, for example if they block repetitions, all allowed tokens are equally likely.

    Args:
        are_banned: other processors may have banned tokens.
    """
    found = scores.masked_fill(blocked, -torch.inf)
    if not are_banned:
        return found
    is_over = found.amax(1, keepdim=True) == -torch.inf
    is_forced = (scores > -torch.inf).sum(1, keepdim=True) == 1
    alike = scores.amax(1, keepdim=True).expand_as(scores).masked_fill(blocked, -torch.inf)
    return torch.where(is_over, torch.where(is_forced, scores, alike), found)


class FormMask(CapturedProcessor):
    """The blocked tokens of each row of a step with slots. `block` sets those of an input; by default there are none.

    Args:
        are_banned: as in `restricted`. A step may have one mask of each kind, and a call uses its own kind.
    """

    is_of_any_rows, neutral = True, ()

    def __init__(self, bucket: Bucket, are_banned: bool) -> None:
        self.are_banned = are_banned
        self._blocked = Buffer(bucket, bucket.per_input, bucket.vocabulary, fill=False)

    def __call__(self, scores: Tensor, step: StepTokens) -> Tensor:
        return restricted(scores, self._blocked.tensor, self.are_banned)

    def block(self, form: FormProcessor, tokens: Tensor, target: int) -> None:
        """Sets the blocked tokens of an input, whose sequences are `tokens`, [rows, length]."""
        rows = self._blocked.of(target)
        rows.copy_(form.blocked(tokens, rows.shape[1]))

    def block_behind(self, forms: Sequence[Form], first: int) -> None:
        """Sets the blocked tokens of consecutive inputs from `first` on, by their states in the form."""
        for target, form in enumerate(forms, first):
            rows = self._blocked.of(target)
            rows.copy_(form.blocked(rows.shape[1]))

    def put(self, numbers: Sequence[float], target: int | None = None) -> None:
        (self._blocked.tensor if target is None else self._blocked.of(target)).fill_(False)

    def insert(self, other: CapturedProcessor, source: int, target: int) -> None:
        assert isinstance(other, FormMask), "of this signature"
        self._blocked.of(target).copy_(other._blocked.of(source))
