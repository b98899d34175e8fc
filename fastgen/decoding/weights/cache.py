"""The derived-weight cache: the one owner of copies of weights in other formats, for all models.

Captured steps, layers and drafts ask for the copy of a weight in a `Format` (`fastgen.decoding.weights.formats`) and
hold the `DerivedWeight` that they get, which lives as long as one of them.

**Validation.** A copy stands for its weight while the parameter is the same object, with the same memory and version.
Torch does not count writing through `parameter.data`. So a copy that results depend on counts only for calls that had
begun when it was validated: each later call compares the fingerprint of the weight's contents once
(`fastgen.ops.fingerprint`). Where none was taken, the copy is made again. Two do without this second part: who says
that nobody writes in this way (`packed_weights="keep"`), and a draft, which is verified. A captured step knows memory
and no parameters: the second part is all that it needs. During a call, only third-party code could change a weight:
where it runs, a captured step does without copies for the rest of the call.

**Memory.** Copies that the user has not asked for by `weight_dtype` take a share of what would be free without them.
For a new one, those go that have not been used for longest. A copy that was used in one of the last calls is kept, or
two models that alternate would make theirs anew in each call.

**Back-off.** A copy that cannot be made, or does not help, is not tried again for some calls. One of a weight that has
changed must pay first: it is made after as many steps as it takes the time of.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import caches, counters, memory
from fastgen.interrupts import undoing
from fastgen.locks import forkable_lock
from fastgen.ops import fingerprint

# So many calls do without a copy that does not help, or that cannot be made; a copy is kept for so many without it.
BACK_OFF = 64
# Steps that take about as long as making a copy.
STEPS_OF_COPY = 32
# Of the memory of a device that would be free without copies. The rest is for the model and its user.
SHARE_OF_MEMORY = 0.5

_clock, _calls_begun = itertools.count(1), itertools.count(1)


@dataclass(frozen=True, eq=False)
class Format:
    """What a copy of a weight, [N, K], is.

    Attributes:
        name: for messages and counts.
        make: the copy, or None if this weight has none.
        itemsize: approximate bytes of an element of the copy.
        is_compared: a copy is validated by the fingerprint of its weight, on the CPU.
        validate_at: a call validates the copy when it needs it for this time, and does without before: that costs as
            much as reading the weight.
        waits: the first copy is made in the step of this number.
        counted_as: calls that use copies are counted under this name in `fastgen.stats()`, if there is one.
    """

    name: str
    make: Callable[[Tensor], Any]
    itemsize: float
    is_compared: bool = False
    validate_at: int = 1
    waits: int = 1
    counted_as: str | None = None

    def nbytes(self, weight: Tensor) -> int:
        """Approximate bytes of a copy."""
        return int(weight.numel() * self.itemsize)


# ---- calls


class _Call:
    """A call that uses captured steps, with those inside of it."""

    def __init__(self) -> None:
        self.began, self.number = next(_clock), next(_calls_begun)
        self.third_party_ran = False  # third-party code has run inside of it
        self.used: set[str] = set()  # what it has used, by the name in `fastgen.stats()`
        self.budgets: dict[torch.device, float] = {}  # asked for once, because that takes long


class _Here(threading.local):
    """The calls of this thread."""

    def __init__(self) -> None:
        self.call, self.is_inside = _Call(), False

    def leave(self, call: _Call) -> None:
        """The outermost one is over."""
        self.is_inside = False
        while call.used:
            counters.count_accelerated(call.used.pop())


_here = _Here()


@contextlib.contextmanager
def call() -> Iterator[None]:
    """A call that uses captured steps, also inside another one. Before the outermost one, weights may have changed."""
    if _here.is_inside:
        yield
        return
    own = _Call()
    with undoing(partial(_here.leave, own)):
        _here.call, _here.is_inside = own, True
        yield


def current_call() -> _Call:
    """The outermost call of this thread: of another one, it is another object."""
    return _here.call


def third_party_runs() -> None:
    """Third-party code is about to run inside the call. It might write to weights."""
    _here.call.third_party_ran = True


def now() -> int:
    """A time for `DerivedWeight.current`."""
    return next(_clock)


# ---- copies


def _place(tensor: Tensor) -> tuple[Any, ...]:
    # Not `data_ptr`, which a capture refuses: a kernel that it does not see might get it.
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()


class _Copy(NamedTuple):
    """Replaced as one: other threads read it."""

    value: Any
    validated: int  # when, by the clock
    fingerprint: int | None  # of what it was made of
    number: int  # unique in this process
    nbytes: int


class DerivedWeight:
    """A weight and its copy in one format, while there is one. `of` makes it.

    Attributes:
        is_asked_for: by the user. Such a copy is not evicted.
    """

    def __init__(self, weight: Tensor, format: Format, parameter: Tensor | None) -> None:
        self.weight, self.format = weight.detach(), format
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_asked_for = False
        # A snapshot of the parameter. Its memory is held by `weight`: no other tensor can come to lie there.
        self._parameter = parameter
        self._version = None if parameter is None else parameter._version
        self._place = None if parameter is None else _place(parameter)
        self._copy: _Copy | None = None
        self._used_in = 0  # the last call that has used it, and how often
        self._call: _Call | None = None
        self._uses = 0
        self._back_off = 0  # calls that will not try
        self._waits = format.waits  # steps until there will be a copy

    @property
    def copy(self) -> Any:
        """The copy, even if the weight has changed since; None where there is none."""
        return None if self._copy is None else self._copy.value

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return 0 if self._copy is None else self._copy.nbytes

    @property
    def number(self) -> Hashable:
        """Identifies the copy in this process."""
        return None if self._copy is None else self._copy.number

    def is_of(self, parameter: Tensor) -> bool:
        """Whether the weight is this parameter, unchanged as far as torch counts."""
        return self._parameter is parameter and self._version == parameter._version and self._place == _place(parameter)

    def note_use(self) -> None:
        """This call uses the copy."""
        self._used_in = _here.call.number

    def current(self, since: int = 0) -> Any:
        """The copy, if it was validated at this time or later, or is now; None where there is none."""
        copy = self._copy
        self.note_use()
        if copy is None or copy.validated >= since:
            return None if copy is None else copy.value
        validated = now()
        if copy.fingerprint is not None and fingerprint.fingerprint(self.weight) == copy.fingerprint:
            with _lock:
                if self._copy is copy:  # another thread may have dropped it meanwhile
                    self._copy = copy._replace(validated=validated)
            return copy.value
        self.drop()
        return None

    def make(self) -> Any:
        """Makes the copy of the weight as it is now; None if it has none, or memory is short."""
        self.note_use()
        self._waits, self._copy = 0, None
        if not (self.is_asked_for or has_memory(self.format.nbytes(self.weight), self.weight.device)):
            return None
        # In this order: a copy of what is written meanwhile has another fingerprint.
        validated = now()
        contents = fingerprint.fingerprint(self.weight) if self.format.is_compared else None
        value = self.format.make(self.weight)
        if value is not None:
            self._copy = _Copy(value, validated, contents, now(), _nbytes(value))
        return value

    def optional(self) -> Any:
        """The copy, made if there is none; None if the weight has none, or memory is short."""
        copy = self.current()
        return self.make() if copy is None else copy

    def required(self, since: int) -> Any:
        """The copy, validated at this time or later, made if there is none: the user has asked for it.

        Raises:
            torch.OutOfMemoryError: there is too little memory for a copy.
        """
        self.is_asked_for = True
        copy = self.current(since)
        if copy is not None:
            return copy
        size = self.format.nbytes(self.weight)
        if size >= free_memory(self.weight.device):
            raise torch.OutOfMemoryError(
                f"there is no memory for weights in {self.format.name}: {size} more bytes are needed. Free some, or "
                'set weight_dtype="fp32"'
            )
        return self.make()

    def in_step(self) -> Any:
        """The copy for a captured step, of the weight as it is in this call; None where it does without."""
        call = _here.call
        if call.third_party_ran:
            return None
        if self._call is not call:
            self._call, self._uses = call, 0
        self._uses += 1
        if self._uses < self.format.validate_at:
            return None
        if self._uses == self.format.validate_at:
            self._validate(call)
        if self._waits > 0:
            self._waits -= 1
            if self._waits == 0 and self.make() is None:
                self.back_off()
        if self.format.counted_as is not None and self._copy is not None:
            call.used.add(self.format.counted_as)
        return self.copy

    @property
    def is_validated(self) -> bool:
        """Whether `in_step` gives the same from now on, up to the end of the call or to where third-party code runs."""
        return self._call is _here.call and self._uses >= self.format.validate_at and self._waits == 0

    def _validate(self, call: _Call) -> None:
        """In a new call."""
        if self._back_off > 0:
            self._back_off -= 1
        elif self.current(call.began) is None:
            self._waits = self._waits or STEPS_OF_COPY

    def back_off(self) -> None:
        """The copy does not help: it goes, and some calls do without one."""
        self._back_off = BACK_OFF
        self.drop()

    def drop(self) -> None:
        """Frees the copy."""
        with _lock:  # others may add themselves meanwhile
            self._copy, users = None, list(self._users)
        for user in users:
            user.forget()

    def tell(self, user: Any) -> None:
        """Calls `user.forget()` when the copy goes, as long as the user lives."""
        with _lock:
            self._users.add(user)


def _nbytes(copy: Any) -> int:
    if isinstance(copy, Tensor):
        return copy.nbytes
    return sum(map(_nbytes, copy)) if isinstance(copy, tuple) else 0


_known: weakref.WeakValueDictionary[Hashable, DerivedWeight] = weakref.WeakValueDictionary()
_lock = forkable_lock()


def of(weight: Tensor, format: Format, parameter: Tensor | None = None) -> DerivedWeight:
    """The derived weight of a weight, [N, K], in a format; all users share it.

    Args:
        parameter: that the weight is, or is a view of. Without one, only its contents tell whether it has changed.
    """
    key = (*_place(weight), weight.dtype, format)
    with _lock:
        found = _known.get(key)
        if found is None or (parameter is not None and not found.is_of(parameter)):
            found = _known[key] = DerivedWeight(weight, format, parameter)
        return found


def known() -> list[DerivedWeight]:
    """All that somebody holds, with and without a copy."""
    with _lock:
        return list(_known.values())


def drop_all() -> None:
    """Frees all copies. A call that runs makes those again that it needs."""
    for each in known():
        each.drop()


caches.register(drop_all)


# ---- memory


def has_memory(nbytes: int, device: torch.device) -> bool:
    """Whether there is memory for copies of so many bytes. Copies that were not used lately are evicted for them."""
    call = _here.call
    held = [each for each in known() if each.nbytes and not each.is_asked_for and each.weight.device == device]
    total = sum(each.nbytes for each in held)
    if device not in call.budgets:
        call.budgets[device] = SHARE_OF_MEMORY * (free_memory(device) + total)
    missing = total + nbytes - call.budgets[device]
    idle = [each for each in held if call.number - each._used_in > BACK_OFF]
    if missing > sum(each.nbytes for each in idle):
        return False
    for each in sorted(idle, key=lambda each: each._used_in):
        if missing <= 0:
            break
        missing -= each.nbytes
        each.drop()
    return True


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device, with what torch holds of a GPU and does not use."""
    if device.type != "cuda":
        return memory.free_host_memory()
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + held
