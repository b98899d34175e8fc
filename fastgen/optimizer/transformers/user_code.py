"""User code inside a call. Its exceptions are noted, so that they are passed on and never taken for FastGen's failures;
the state of its objects is saved, so that a call can be repeated as if it had not been tried before.

User code is what the caller gives `generate` to be called: logits processors, stopping criteria, the prefix function,
the streamer; also processors and criteria that a generation config or a model creates from classes other than the
library's. It is wrapped after the library has merged it with its own, because merging goes by type.

Modules and methods of the model are not user code here. An error in one of them may come from what FastGen passes to
it, so the call is repeated with the original code, which raises the error again if it was the model's own. Models with
forward hooks, or with a forward pass that is not the library's, are not accelerated in the first place.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
import wrapt
from torch import Tensor
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

# Arguments of `generate` that are user code.
ARGUMENTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")
# Arguments of the decoding loops that are lists of the library's, whose elements may be the user's.
_LISTS = ("logits_processor", "stopping_criteria")
# An object with more parts, or larger tensors, is not saved: copying it would cost more than it is worth.
_MAX_PARTS = 10_000
_MAX_TENSOR_BYTES = 2**24
# Limits, in bytes and calls, of recorded results of user code with which another loop can start over.
_MOST_GIVEN, _MOST_CALLS = 2**28, 2**12
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, deque)


class Errors:
    """What user code has raised in a call."""

    def __init__(self) -> None:
        self._last: BaseException | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes what the block raises."""
        try:
            yield
        except BaseException as error:
            self._last = error
            raise

    def forget(self) -> None:
        """Drops the noted error, which holds the frames that it came through, and so the call's objects."""
        self._last = None

    def caused(self, error: BaseException | None) -> bool:
        """Whether `error` is the last one that user code raised, or was caused by it."""
        while error is not None and error is not self._last:
            error = error.__cause__ or error.__context__
        return error is not None


def says(criterion: Any, name: str) -> bool:
    """Whether a criterion's attribute is True itself; an object that has every attribute does not count."""
    return getattr(criterion, name, False) is True


def wrap(arguments: dict[str, Any], errors: Errors) -> bool:
    """Wraps the user code in the arguments of a decoding loop, in place. Returns whether there is any. The library's
    own streamers do not count, because they only read tokens.
    """
    streamer = arguments.get("streamer")
    found = streamer is not None and not _is_the_librarys(_unwrapped(streamer))
    for name in _LISTS:
        parts = arguments[name]
        wrapped = [part if _is_the_librarys(part) else _UserCode(part, errors) for part in parts]
        if any(new is not old for new, old in zip(wrapped, parts, strict=True)):
            found = True
            arguments[name] = type(parts)(wrapped)
    return found


def has_own(parts: Iterable[Any]) -> bool:
    """Whether one of these processors, criteria or streamers is the user's: Whisper passes some of the library's."""
    return not all(map(_is_the_librarys, parts))


def _is_the_librarys(part: Any) -> bool:
    if isinstance(part, PrefixConstrainedLogitsProcessor):
        return False  # a library class that runs a function of the user's
    kind = type(part)
    # A class can claim any module: only what that module holds under the class's name is the library's.
    module = sys.modules.get(kind.__module__) if kind.__module__.startswith("transformers.") else None
    return module is not None and getattr(module, kind.__name__, None) is kind


def kind_of(part: Any) -> Any:
    """Returns the class of a processor or criterion inside FastGen's wrapper; a function is returned itself."""
    own = _unwrapped(part)
    return own if type(own) in (FunctionType, functools.partial) else type(own)


def _unwrapped(part: Any) -> Any:
    """Returns the object inside FastGen's wrapper; any other object unchanged."""
    return part.__wrapped__ if type(part) in (_UserCode, Streamer) else part


class _Given(NamedTuple):
    """The result of a call of user code, and the tokens after it if it has written to them."""

    result: Any
    written: Tensor | None


def _copied(result: Any) -> Any:
    """Copies a result for replay: user code may write to the tensor later."""
    return result.clone() if isinstance(result, Tensor) else result


class _UserCode(wrapt.ObjectProxy):
    """Wraps an object of the user's transparently, and notes what its code raises."""

    def __init__(self, wrapped: Any, errors: Errors) -> None:
        super().__init__(wrapped)
        self._self_errors = errors
        self._self_given: list[_Given] | None = None  # its results since `Calls` began
        self._self_again: deque[_Given] = deque()  # its results for the calls to come

    @property
    def __call__(self) -> Any:  # a property, because the library inspects the object's own signature
        return wrapt.FunctionWrapper(self.__wrapped__.__call__, self._self_run)

    def _self_run(self, function: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._self_again:
            given = self._self_again.popleft()
            if given.written is not None:
                args[0].copy_(given.written)
            return _copied(given.result)
        before = args[0].clone() if self._self_given is not None and args and isinstance(args[0], Tensor) else None
        with self._self_errors.noted():
            result = function(*args, **kwargs)
        if self._self_given is not None:
            has_written = before is not None and not torch.equal(before, args[0])
            self._self_given.append(_Given(_copied(result), args[0].clone() if has_written else None))
        return result

    def __getattr__(self, name: str) -> Any:  # it may be a property of the user's class
        with self._self_errors.noted():
            return getattr(self.__wrapped__, name)


class Calls:
    """Records the results of the user's processors and criteria, so that another loop can start over.

    User code may count its calls where nobody sees that. It is therefore not called again; its results are replayed.
    """

    def __init__(self, parts: Iterable[Any]) -> None:
        parts = list(parts)
        self._users = [part for part in parts if isinstance(part, _UserCode)]
        self._state = SavedState(self._users)
        self._others = SavedState(part for part in parts if not isinstance(part, _UserCode))
        for part in self._users:
            part._self_given = [*part._self_again]

    def rewind(self, draws_others: bool = False) -> None:
        """Replays the recorded calls in the calls to come, and restores the library's own objects.

        With `draws_others`, the loop draws other tokens, so that only its first call is the same as before.
        """
        self._others.restore()
        if draws_others and any(len(part._self_given or ()) > 1 for part in self._users):
            self._state.restore()
        else:
            for part in self._users:
                part._self_again = deque(part._self_given or ())
        self.end()

    def is_much(self) -> bool:
        """Whether the recorded results are too large to keep, if all are as large as the last one."""
        nbytes = 0
        for part in self._users:
            given = part._self_given or ()
            if given and isinstance(given[-1].result, Tensor):
                nbytes += len(given) * given[-1].result.nbytes
        return nbytes > _MOST_GIVEN or any(len(part._self_given or ()) > _MOST_CALLS for part in self._users)

    def end(self) -> None:
        """Ends the recording: no other loop will start over."""
        for part in self._users:
            part._self_given = None


class Streamer(wrapt.ObjectProxy):
    """A streamer that, after `rewind`, skips the `put`s that it has already passed on, and a repeated end."""

    def __init__(self, streamer: Any, errors: Errors) -> None:
        super().__init__(streamer)
        self._self_errors = errors
        self._self_done = 0
        self._self_skip = 0
        self._self_has_ended = False

    def put(self, value: Any) -> None:
        if self._self_skip:
            self._self_skip -= 1
            return
        with self._self_errors.noted():
            self.__wrapped__.put(value)
        self._self_done += 1

    def end(self) -> None:
        if self._self_has_ended:
            return
        with self._self_errors.noted():
            self.__wrapped__.end()
        self._self_has_ended = True

    @property
    def count(self) -> int:
        """Number of `put`s since the start to which `rewind` has returned."""
        return self._self_done - self._self_skip

    def rewind(self, to: int = 0) -> None:
        """Expects the `put`s after the first `to` of them to come again."""
        self._self_skip = self._self_done - to


class _TooMuch(Exception):
    pass


class SavedState:
    """The attributes of some objects: numbers and other values, and the contents of containers and tensors.

    Does not save what an attribute only refers to (a model, a tokenizer), what is kept elsewhere (in a file or a
    closure), or large objects.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._saved: list[tuple[Any, dict[str, tuple[Any, Any, int]]]] = []
        for part in objects:
            owner = getattr(part, "__self__", part)  # a method's state is that of its object
            if isinstance(owner, (type, torch.nn.Module)) or not isinstance(getattr(owner, "__dict__", None), dict):
                continue
            copied = _Copier().copy
            with contextlib.suppress(_TooMuch):
                attributes = {name: (value, copied(value), _version(value)) for name, value in vars(owner).items()}
                self._saved.append((owner, attributes))

    def restore(self) -> None:
        """Restores every object."""
        for owner, attributes in self._saved:
            state = vars(owner)
            for name in state.keys() - attributes.keys():
                del state[name]
            for name, (value, content, version) in attributes.items():
                state[name] = value
                if version == 0 or version != _version(value):
                    _put_back(value, content)


class _Copier:
    """Copies containers and tensors, up to a size; returns anything else itself."""

    def __init__(self) -> None:
        self._left = _MAX_PARTS

    def copy(self, value: Any, depth: int = 0) -> Any:
        self._left -= 1
        if self._left < 0 or depth > 50:  # a container that contains itself is infinitely deep
            raise _TooMuch
        content: Any = None
        if type(value) in _MAPPINGS:
            content = {key: self.copy(part, depth + 1) for key, part in value.items()}
        elif type(value) in _SEQUENCES:
            content = [self.copy(part, depth + 1) for part in value]
        if content is not None:
            made = copy.copy(value)
            _put_back(made, content)
            return made
        if type(value) is tuple:
            return tuple(self.copy(part, depth + 1) for part in value)
        if type(value) is set:
            return set(value)
        if type(value) is torch.Tensor:
            if value.nbytes > _MAX_TENSOR_BYTES or value.is_inference():
                raise _TooMuch
            return value.detach().clone()
        return value


def _version(value: Any) -> int:
    """Returns how often a tensor has been changed, counted from 1; 0 for a value without such a count."""
    return value._version + 1 if type(value) is torch.Tensor and not value.is_inference() else 0


def _put_back(value: Any, content: Any) -> None:
    """Restores the contents of the same container or tensor, because others may hold it, too."""
    if type(value) in _SEQUENCES:
        value.clear()
        value.extend(content)
    elif type(value) in (*_MAPPINGS, set):
        value.clear()
        value.update(content)
    elif type(value) is torch.Tensor:
        value.detach().copy_(content)
