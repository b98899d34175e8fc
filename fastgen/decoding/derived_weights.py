"""The derived-weight cache: the single owner of copies of weights in other formats, for all models.

Only this module makes such copies. Captured steps, layers and drafts ask for the copy of a weight in a `Format`. They
hold the `DerivedWeight` that they get, which lives as long as one of them does.

**Validation.** A copy is valid while the parameter is the same object, with the same memory and version. Torch does not
count writes through `parameter.data`. So a copy that affects results is only valid for calls that had begun when it was
validated: each later call compares a fingerprint of the weight's contents once (`fastgen.ops.fingerprint`). A copy
without a fingerprint is made again. Two kinds of copies skip the fingerprint: those of users who promise not to write
in this way (`packed_weights="keep"`), and those of a draft, which is verified. A captured step knows memory, not
parameters, and needs the fingerprint alone. During a call, only third-party code could change a weight. Once such code
runs, a captured step uses no copies for the rest of the call.

**Memory.** Copies that the user has not requested by `weight_dtype` take a share of the memory that would be free
without them. To make room for a new copy, the least recently used ones are evicted. A copy that was used in one of the
last calls is kept: otherwise two models that alternate would remake their copies in each call.

**Back-off.** A copy that cannot be made, or does not help, is not tried again for some calls. A copy of a weight that
has changed must pay first: it is made after as many steps as making it takes the time of.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastgen import counters, memory
from fastgen.interrupts import forkable_lock, undoing
from fastgen.ops import approximate_logits, fingerprint
from fastgen.ops.linear import choose, copies, fit_in_float32

# Calls that do without a copy after it could not be made or did not help; and calls for which an unused copy is kept.
BACK_OFF = 64
# Steps that take about as long as making a copy.
STEPS_OF_COPY = 32
# Share of the device memory that would be free without copies. The rest is for the model and its user.
SHARE_OF_MEMORY = 0.5

_clock, _calls_begun = itertools.count(1), itertools.count(1)


@dataclass(frozen=True, eq=False)
class Format:
    """A format for copies of a weight, [N, K].

    Attributes:
        name: for messages and counts.
        make: returns the copy, or None if this weight has none.
        itemsize: approximate bytes per element of the copy.
        is_compared: a copy is validated by the fingerprint of its weight, on the CPU.
        validate_at: the use in a call at which the call validates the copy; earlier uses do without. Validating costs
            as much as reading the weight.
        waits: the number of the step in which the first copy is made.
        counted_as: the name in `fastgen.stats()` that counts calls which use copies, if any.
    """

    name: str
    make: Callable[[Tensor], Any]
    itemsize: float
    is_compared: bool = False
    validate_at: int = 1
    waits: int = 1
    counted_as: str | None = None

    def nbytes(self, weight: Tensor) -> int:
        """Returns the approximate bytes of a copy."""
        return int(weight.numel() * self.itemsize)


# Smaller weights stay in the processor's caches.
MIN_PANELS = 2**16


# 16-bit panels of a float32 weight that 16 bits represent exactly. Validating the copy costs more than a call of one
# step would gain.
PANELS = Format("panels", copies.exact, 2.0, is_compared=True, validate_at=2, counted_as="weights read in 16 bits")
# For approximate logits: with a guaranteed error bound, and with a likely one for drafts.
LM_HEAD = Format("LM head in 8 bits", approximate_logits.bounded_copy, 1.1, is_compared=True, waits=STEPS_OF_COPY)
DRAFT_HEAD = Format("LM head in 4 bits", approximate_logits.likely_copy, 0.6)


@functools.cache
def low_bit(precision: str, group_size: int) -> Format:
    """Returns the format of `weight_dtype` and of drafts: "int8" or "int4" in groups along K, or "bf16"."""
    itemsize = {"bf16": 2.0, "int8": 1.0 + 2 / group_size, "int4": 0.5 + 2 / group_size}[precision]
    return Format(precision, lambda weight: copies.pack(weight, precision, group_size), itemsize)


def has_panels(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether such an op likely reads its weight from `PANELS`, judged by a sample of the weight's elements.

    x is [M, K], the weight [N, K], the bias [N] or None.
    """
    return (
        weight.numel() >= MIN_PANELS
        and fit_in_float32(x, weight, bias)
        and choose.reads_panels(x.shape[0])
        and fingerprint.is_available()
        and bool(copies.likely_types(weight))
    )


# ---- calls


class _Call:
    """A call that uses captured steps, including calls inside it."""

    def __init__(self) -> None:
        self.began, self.number = next(_clock), next(_calls_begun)
        self.third_party_ran = False  # third-party code has run inside the call
        self.used: set[str] = set()  # names in `fastgen.stats()` of copies that it has used
        self.budgets: dict[torch.device, float] = {}  # computed once, because that takes long


class _Here(threading.local):
    """The calls of this thread."""

    def __init__(self) -> None:
        self.call, self.is_inside = _Call(), False

    def leave(self, call: _Call) -> None:
        """Ends the outermost call."""
        self.is_inside = False
        while call.used:
            counters.count_accelerated(call.used.pop())


_here = _Here()


@contextlib.contextmanager
def call() -> Iterator[None]:
    """Encloses a call that uses captured steps. Weights may have changed before the outermost call."""
    if _here.is_inside:
        yield
        return
    own = _Call()
    with undoing(partial(_here.leave, own)):
        _here.call, _here.is_inside = own, True
        yield


def current_call() -> _Call:
    """Returns the outermost call of this thread, which is a new object each time."""
    return _here.call


def third_party_runs() -> None:
    """Notes that third-party code is about to run inside the call. It might write to weights."""
    _here.call.third_party_ran = True


def now() -> int:
    """Returns the present time for `DerivedWeight.current`."""
    return next(_clock)


# ---- copies


def _place(tensor: Tensor) -> tuple[Any, ...]:
    # Not `data_ptr`, which a capture refuses, because an unseen kernel might get it.
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()


class _Copy(NamedTuple):
    """Replaced as a whole, because other threads read it."""

    value: Any
    validated: int  # the time, by the clock
    fingerprint: int | None  # of the weight that it was made from
    number: int  # unique in this process
    nbytes: int


class DerivedWeight:
    """A weight and, while it exists, its copy in one format. Made by `of`.

    Attributes:
        is_asked_for: the user has requested the copy, so that it is not evicted.
    """

    def __init__(self, weight: Tensor, format: Format, parameter: Tensor | None) -> None:
        self.weight, self.format = weight.detach(), format
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.is_asked_for = False
        # A snapshot of the parameter. `weight` holds its memory, so that no other tensor can get the same address.
        self._parameter = parameter
        self._version = None if parameter is None else parameter._version
        self._place = None if parameter is None else _place(parameter)
        self._copy: _Copy | None = None
        self._used_in = 0  # the last call that has used the copy
        self._call: _Call | None = None
        self._uses = 0
        self._back_off = 0  # calls that will not try to make a copy
        self._waits = format.waits  # steps until the copy is made

    @property
    def copy(self) -> Any:
        """The copy, even if the weight has changed since; None if there is none."""
        return None if self._copy is None else self._copy.value

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return 0 if self._copy is None else self._copy.nbytes

    @property
    def number(self) -> Hashable:
        """A number that identifies the copy in this process."""
        return None if self._copy is None else self._copy.number

    def is_of(self, parameter: Tensor) -> bool:
        """Whether the weight is this parameter, unchanged as far as torch's version counter tells."""
        return self._parameter is parameter and self._version == parameter._version and self._place == _place(parameter)

    def note_use(self) -> None:
        """Notes that this call uses the copy."""
        self._used_in = _here.call.number

    def current(self, since: int = 0) -> Any:
        """Returns the copy if it was validated at this time or later, or can be validated now; otherwise None."""
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
        """Makes the copy of the weight in its present state. Returns None if it has none, or memory is short."""
        self.note_use()
        self._waits, self._copy = 0, None
        if not (self.is_asked_for or has_memory(self.format.nbytes(self.weight), self.weight.device)):
            return None
        # In this order, so that a write during the copy gives another fingerprint later.
        validated = now()
        contents = fingerprint.fingerprint(self.weight) if self.format.is_compared else None
        value = self.format.make(self.weight)
        if value is not None:
            self._copy = _Copy(value, validated, contents, now(), _nbytes(value))
        return value

    def optional(self) -> Any:
        """Returns the copy, and makes it if there is none; None if the weight has none, or memory is short."""
        copy = self.current()
        return self.make() if copy is None else copy

    def required(self, since: int) -> Any:
        """Returns a copy validated at this time or later, and makes it if needed, because the user has requested it.

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
        """Returns the copy for a captured step, valid for this call; None if the step does without."""
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
        """Whether `in_step` returns the same for the rest of the call, or until third-party code runs."""
        return self._call is _here.call and self._uses >= self.format.validate_at and self._waits == 0

    def _validate(self, call: _Call) -> None:
        """Validates the copy in a new call."""
        if self._back_off > 0:
            self._back_off -= 1
        elif self.current(call.began) is None:
            self._waits = self._waits or STEPS_OF_COPY

    def back_off(self) -> None:
        """Drops a copy that does not help. Some calls do without one then."""
        self._back_off = BACK_OFF
        self.drop()

    def drop(self) -> None:
        """Frees the copy."""
        with _lock:  # other users may register meanwhile
            self._copy, users = None, list(self._users)
        for user in users:
            user.forget()

    def tell(self, user: Any) -> None:
        """Calls `user.forget()` when the copy is dropped, as long as the user lives."""
        with _lock:
            self._users.add(user)


def _nbytes(copy: Any) -> int:
    if isinstance(copy, Tensor):
        return copy.nbytes
    return sum(map(_nbytes, copy)) if isinstance(copy, tuple) else 0


_known: weakref.WeakValueDictionary[Hashable, DerivedWeight] = weakref.WeakValueDictionary()
_lock = forkable_lock()


def of(weight: Tensor, format: Format, parameter: Tensor | None = None) -> DerivedWeight:
    """Returns the derived weight of a weight, [N, K], in a format. All users share it.

    Args:
        parameter: the parameter that the weight is, or is a view of. Without it, only contents tell of a change.
    """
    key = (*_place(weight), weight.dtype, format)
    with _lock:
        found = _known.get(key)
        if found is None or (parameter is not None and not found.is_of(parameter)):
            found = _known[key] = DerivedWeight(weight, format, parameter)
        return found


def known() -> list[DerivedWeight]:
    """Returns all derived weights that are in use, with and without a copy."""
    with _lock:
        return list(_known.values())


def drop_all() -> None:
    """Frees all copies. A running call makes those again that it needs."""
    for each in known():
        each.drop()


memory.register(drop_all)


# ---- memory


def has_memory(nbytes: int, device: torch.device) -> bool:
    """Whether there is memory for copies of this many bytes. Evicts copies that were not used lately."""
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
    """Returns the free bytes of a device, including memory that torch has reserved on a GPU and does not use."""
    if device.type != "cuda":
        return memory.free_host_memory()
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + held
