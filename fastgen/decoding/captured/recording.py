"""Records what a function does on the CPU, operator by operator, as a CUDA graph records what it starts on a GPU.

Addresses, sizes and host values are frozen, and what would make the host wait for a device is refused: one function can
be captured on both. Only what goes through torch's dispatcher is seen.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, overrides
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fastgen import interrupts
from fastgen.decoding.operations import PRODUCTS, Constant, Operation, Recording, TensorRef, structure_of
from fastgen.locks import forkable_lock
from fastgen.ops import kv_write

_aten = torch.ops.aten

_PLAIN: frozenset[Any] = frozenset({Tensor, torch.nn.Parameter})
# Results whose size, or a decision of the host's that, only the device knows.
_WAITING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_INDEXING = frozenset({_aten.index, _aten._unsafe_index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_})
_COPYING = frozenset({_aten.copy_, _aten._to_copy})
# On the CPU these need no operator; on a GPU they copy to the host, or from it.
# Whoever asks for the address has a kernel that torch's dispatcher does not see.
_TO_HOST = frozenset({Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr})
_FROM_HOST = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor})
# With a number in the place of a tensor these make a tensor of it on the host first.
_CHOOSING = frozenset({torch.where, Tensor.where})
_BETWEEN_HOST_AND_DEVICE = _TO_HOST | _FROM_HOST | _CHOOSING


def record(function: Callable[[], Any], scratch: frozenset[int] = frozenset()) -> tuple[Recording, Any]:
    """Calls `function` once, and undoes what it has written to memory that was there before.

    Args:
        scratch: addresses of storage objects whose contents nobody needs: what is written there is not undone.

    Returns:
        The recording, and what `function` returned.

    Raises:
        RuntimeError: it does what cannot be captured on a GPU. Whatever it raises is passed on; memory is put back.
    """
    recorder = _Recorder(scratch)
    with interrupts.undoing(recorder.put_back), _modes_put_back(), _captures(), _HostAccess(), recorder:
        return recorder.recording, function()


_DISPATCH = (_python_dispatch._get_current_dispatch_mode_stack, _python_dispatch._push_mode, _python_dispatch._pop_mode)
_FUNCTION = (overrides._get_current_function_mode_stack, overrides._push_mode, overrides._pop_mode)


@contextlib.contextmanager
def _modes_put_back() -> Iterator[None]:
    """An interrupt may come between torch's taking a mode and its putting it back: then it would stay for good.

    What torch says of its stack then is about an interrupt that it has met: that one is passed on.
    """
    handled = sys.exc_info()[1]
    with interrupts.undoing(partial(_put_back, (_DISPATCH[0](), _FUNCTION[0]()))):
        try:
            yield
        except RuntimeError as error:
            interrupts.pass_on(error, handled)
            raise


def _put_back(before: tuple[list[Any], list[Any]]) -> None:
    for modes, (current, push, pop) in zip(before, (_DISPATCH, _FUNCTION), strict=True):
        for _ in range(len(current()) - len(modes)):
            pop()
        for mode in modes[len(current()) :]:
            push(mode)


# The thread that records, if one does, and torch's own function, for which another one stands meanwhile.
_recording: dict[int, Callable[[], bool]] = {}


def _end_recording() -> None:
    for answer in _recording.values():
        torch.cuda.is_current_stream_capturing = answer
    _recording.clear()


_one_capture = forkable_lock(undo=_end_recording)


def is_capturing() -> bool:
    """Whether what this thread does is recorded, or captured in a CUDA graph: it must not look at values."""
    if threading.get_ident() in _recording:
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def _captures() -> Iterator[None]:
    """What torch answers while a stream is captured: Transformers then leaves out questions about values."""
    own, cuda = threading.get_ident(), torch.cuda
    with _one_capture:  # the function is one for all threads
        if own in _recording:
            yield
            return
        answer = cuda.is_current_stream_capturing
        with interrupts.undoing(_end_recording):
            _recording[own] = answer
            cuda.is_current_stream_capturing = lambda: (
                threading.get_ident() == own or (cuda.is_available() and answer())
            )
            yield


class _HostAccess(TorchFunctionMode):
    """Refuses what a GPU would copy to the host or from pageable memory, and a CPU has no operator for."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _BETWEEN_HOST_AND_DEVICE and _copies(func, args):
            _refuse(func.__name__, "copies between pageable host memory and the device")
        return func(*args, **kwargs) if kwargs else func(*args)


def _copies(func: Any, args: tuple) -> bool:
    """Whether a call of one of `_BETWEEN_HOST_AND_DEVICE` copies."""
    if func in _FROM_HOST:
        return not (args and isinstance(args[0], Tensor)) or func is Tensor.new_tensor
    return func in _TO_HOST or any(isinstance(argument, (bool, int, float)) for argument in args)


class _Recorder(TorchDispatchMode):
    def __init__(self, scratch: frozenset[int]) -> None:
        super().__init__()
        self.recording, self._scratch = Recording(), scratch
        self._numbers: dict[int, int] = {}  # of storages, by address of the storage object
        self._saved: set[int] = set()
        self._undo: list[Callable[[], Any]] = []
        self._host: set[int] = set()  # storages of tensors made from host values
        self._generators: dict[torch.Generator, Tensor] = {}
        self._draws = False
        self._remember(torch.default_generator)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        arguments = tensors_in((args, kwargs))
        kinds: set[Any] = set(map(type, arguments))
        if not kinds <= _PLAIN and any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in kinds):
            return NotImplemented  # the subclass calls operators with ordinary tensors, and those come here
        facts = _facts(func)
        if self._host or facts.is_checked:
            self._check(func, args, kwargs, arguments)
        # In inference mode composed operators arrive in one piece; the synchronising one may be inside.
        if facts.is_composed:
            with self:
                if func is _aten.linear.default and _is_plain_linear(*args, **kwargs):
                    return _linear(*args, **kwargs)
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is _aten.lift_fresh.default:
            return self._lift(func, args)
        if facts.is_view:
            return func(*args, **kwargs)

        changed = tensors_in([args[at] if at < len(args) else kwargs.get(name) for at, name in facts.written])
        if self._scratch and all(tensor.untyped_storage()._cdata in self._scratch for tensor in changed):
            pass
        elif func is kv_write.OPERATOR and not self._numbers_of(changed) & (self.recording.made | self._saved):
            self._undo.append(kv_write.undo(*args[2:]))  # K and V are large
        else:
            for written in changed:
                self._save(written)
        self._draws |= facts.draws
        for generator in kwargs.values():
            if isinstance(generator, torch.Generator):
                self._remember(generator)
        if kwargs or any(isinstance(argument, list | tuple | dict) for argument in args):
            flat, structure = tree_flatten((args, kwargs))
        else:  # which takes a good part of the time
            flat, structure = list(args), structure_of(len(args))
        refs = [self._ref(arg) for arg in flat]
        result = self._result(func, args, kwargs, arguments)
        outputs = [self._allocate(tensor) for tensor in tensors_in(result)]
        # What changes only how a tensor is laid out is in the args of those that follow.
        if facts.writes or any(ref is not None for ref in outputs) or not outputs:
            in_place = frozenset(self._numbers_of(changed))
            self.recording.operations.append(Operation(func, refs, structure, outputs, in_place))
        return result

    def _result(self, func: Any, args: tuple, kwargs: dict, arguments: list[Tensor]) -> Any:
        """What the operator returns. Nobody looks at the numbers of a product with memory that was there before."""
        if func in PRODUCTS and not kwargs and not self._numbers_of(arguments) <= self.recording.made:
            x, weight = args[-2:]
            return x.new_zeros(x.shape[0], weight.shape[1])
        return func(*args, **kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch would have a compiler look at each call of the method above."""
        return False

    def put_back(self) -> None:
        """A capture executes nothing: restores what was written."""
        for undo in reversed(self._undo):
            undo()
        for generator, state in self._generators.items():
            if self._draws:  # or another thread's draws would repeat
                generator.set_state(state)

    def _check(self, func: Any, args: tuple, kwargs: dict, arguments: list[Tensor]) -> None:
        """Refuses operators that could not be captured on a GPU."""
        packet = func.overloadpacket
        host = [tensor for tensor in arguments if _key(tensor) in self._host] if self._host else []
        if packet in _INDEXING:
            masked = any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
            # x[mask] = number is a masked fill.
            if masked and not (packet is _aten.index_put_ and len(args[1]) == 1 and host and args[2] is host[0]):
                _refuse(func, "waits for the device (an index is a boolean mask)")
            if host and not masked:
                _refuse(func, "copies from pageable host memory to the device")
        elif _WAITING & set(func.tags) and kwargs.get("output_size") is None:
            _refuse(func, "waits for the device")
        elif host and func not in (_aten.fill_.Tensor, _aten.lift_fresh.default):
            _refuse(func, "copies from pageable host memory to the device")
        elif packet in _COPYING:
            source = args[1] if packet is _aten.copy_ else args[0]
            target = args[0].device if packet is _aten.copy_ else kwargs.get("device") or source.device
            if target.type != source.device.type and not (kwargs.get("non_blocking") and source.is_pinned()):
                _refuse(func, f"copies from {source.device} to {target}, and not from pinned memory without waiting")

    def _lift(self, func: Any, args: tuple) -> Tensor:
        """A tensor of host values, made by torch for `x[i] = number` or for a list of indices: frozen."""
        (lifted,) = args
        storage = lifted.untyped_storage()
        self.recording.host_values.add(self._number(storage))
        self._host.add(storage._cdata)
        return func(lifted)

    def _ref(self, arg: Any) -> TensorRef | Constant:
        if not isinstance(arg, Tensor) or arg.layout is not torch.strided:
            return Constant(arg)
        assert not arg.is_conj() and not arg.is_neg(), "lazy conjugates are not recorded"
        return TensorRef.of(self._number(arg.untyped_storage()), arg)

    def _allocate(self, tensor: Tensor) -> TensorRef | None:
        if tensor.untyped_storage()._cdata in self._numbers:
            return None
        self.recording.made.add(self._number(tensor.untyped_storage()))
        ref = self._ref(tensor)
        assert isinstance(ref, TensorRef)
        return ref

    def _number(self, storage: torch.UntypedStorage) -> int:
        # The storages are held, so that no other one can have the address of one that is gone.
        number = self._numbers.setdefault(storage._cdata, len(self.recording.storages))
        if number == len(self.recording.storages):
            self.recording.storages.append(storage)
        return number

    def _numbers_of(self, tensors: list[Tensor]) -> set[int]:
        return {self._number(tensor.untyped_storage()) for tensor in tensors}

    def _save(self, tensor: Tensor) -> None:
        """Keeps the contents of memory that was there before the capture, when it is first written to."""
        number = self._number(tensor.untyped_storage())
        if number not in self.recording.made and number not in self._saved:
            self._saved.add(number)
            storage = tensor.untyped_storage()
            self._undo.append(partial(storage.copy_, storage.clone()))

    def _remember(self, generator: torch.Generator) -> None:
        if generator not in self._generators:
            self._generators[generator] = generator.get_state()


class _Facts(NamedTuple):
    """What the recorder asks of an operator.

    Attributes:
        is_checked: it may do what cannot be captured on a GPU.
        is_composed: it is made of others.
        is_view: it does nothing but make other views of the memory of its arguments.
        draws: it uses a generator of random numbers.
        writes: it writes to its arguments, more than how they are laid out.
        written: which ones: their places and names.
    """

    is_checked: bool
    is_composed: bool
    is_view: bool
    draws: bool
    writes: bool
    written: list[tuple[int, str]]


@cache
def _facts(func: Any) -> _Facts:
    schema, tags, packet = func._schema, set(func.tags), func.overloadpacket
    returns = [each.alias_info for each in schema.returns]
    is_view = bool(returns) and all(alias is not None and not alias.is_write for alias in returns)
    arguments = enumerate(schema.arguments)
    return _Facts(
        is_checked=bool(_WAITING & tags) or packet in _INDEXING | _COPYING,
        is_composed=func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd),
        is_view=is_view and not schema.is_mutable,
        draws=torch.Tag.nondeterministic_seeded in tags,
        writes=schema.is_mutable and torch.Tag.inplace_view not in tags,
        written=[(at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write],
    )


def _is_plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether torch computes the layer as `_linear` does, bit for bit."""
    has_rows = x.dim() >= 2 and x.numel() > 0 and x.is_contiguous()
    return has_rows and weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What torch makes of a linear layer. Its own decomposition takes longer than all else that is recorded."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    result = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return result if x.dim() == 2 else result.view(*x.shape[:-1], weight.shape[0])


def _refuse(function: Any, reason: str) -> None:
    raise RuntimeError(f"operation not permitted when stream is capturing: {function} {reason}")


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors in tuples, lists and dictionaries, in order. torch's own function takes twice as long or longer."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (tuple, list)):
        return
    for part in tree:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (tuple, list, dict)):
            _collect(part, found)


def _key(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
