"""Records what a function does on a CPU, operator by operator, as a CUDA graph records kernel launches on a GPU.

Addresses, sizes and host values are frozen. Anything that would make the host wait for a device is refused, so that the
same function can be captured on both. Only calls through torch's dispatcher are seen.
"""

from __future__ import annotations

import contextlib
import itertools
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
from fastgen.decoding.recorded_graph import PRODUCTS, Constant, Operation, Recording, TensorRef, structure_of
from fastgen.interrupts import forkable_lock
from fastgen.ops import kv_write

_aten = torch.ops.aten

_PLAIN: frozenset[Any] = frozenset({Tensor, torch.nn.Parameter})
# Operators whose result size, or a host decision on it, depends on values that only the device knows.
_WAITING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_INDEXING = frozenset({_aten.index, _aten._unsafe_index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_})
_COPYING = frozenset({_aten.copy_, _aten._to_copy})
# On a CPU these run no operator, but on a GPU they copy to the host or from it. A caller that asks for the address has
# a kernel that does not go through torch's dispatcher.
_TO_HOST = frozenset({Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr})
_FROM_HOST = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor})
# If an argument is a number, these first make a tensor of it on the host.
_CHOOSING = frozenset({torch.where, Tensor.where})
_BETWEEN_HOST_AND_DEVICE = _TO_HOST | _FROM_HOST | _CHOOSING


def record(function: Callable[[], Any], scratch: frozenset[int] = frozenset()) -> tuple[Recording, Any]:
    """Calls `function` once, and undoes what it has written to memory that existed before.

    Args:
        scratch: addresses of storage objects whose contents are not needed: writes to them are not undone.

    Returns:
        The recording, and what `function` returned.

    Raises:
        RuntimeError: the function cannot be captured on a GPU. Its own exceptions are passed on; memory is restored.
    """
    recorder = _Recorder(scratch)
    with interrupts.undoing(recorder.put_back), _modes_put_back(), _captures(), _HostAccess(), recorder:
        return recorder.recording, function()


_DISPATCH = (_python_dispatch._get_current_dispatch_mode_stack, _python_dispatch._push_mode, _python_dispatch._pop_mode)
_FUNCTION = (overrides._get_current_function_mode_stack, overrides._push_mode, overrides._pop_mode)


@contextlib.contextmanager
def _modes_put_back() -> Iterator[None]:
    """Restores torch's modes, because an interrupt may come while torch has taken one off its stack.

    The RuntimeError that torch then raises about its stack is due to the interrupt, which is passed on instead.
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


# The recording thread, if there is one, and torch's own function, which is replaced meanwhile.
_recording: dict[int, Callable[[], bool]] = {}


def _end_recording() -> None:
    for answer in _recording.values():
        torch.cuda.is_current_stream_capturing = answer
    _recording.clear()


_one_capture = forkable_lock(undo=_end_recording)


def is_capturing() -> bool:
    """Whether this thread records, or captures a CUDA graph, so that it must not look at values."""
    if threading.get_ident() in _recording:
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def _captures() -> Iterator[None]:
    """Makes torch answer as during a stream capture, for which Transformers leaves out questions about values."""
    own, cuda = threading.get_ident(), torch.cuda
    with _one_capture:  # all threads share the function
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


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """Outside this thread's recording, if it records: for a call of a signal handler, which comes in the middle."""
    own = threading.get_ident()
    if own not in _recording:
        yield
        return
    answer, replaced, modes = _recording[own], torch.cuda.is_current_stream_capturing, (_DISPATCH[0](), _FUNCTION[0]())

    def go_on() -> None:
        _put_back(modes)
        torch.cuda.is_current_stream_capturing = replaced
        _recording[own] = answer

    with interrupts.undoing(go_on):
        _end_recording()
        dispatch, function = (
            list(itertools.takewhile(lambda mode: not isinstance(mode, _OWN), each)) for each in modes
        )
        _put_back((dispatch, function))
        yield


class _HostAccess(TorchFunctionMode):
    """Refuses functions that on a GPU copy to the host or from pageable memory, and on a CPU run no operator."""

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
        self._numbers: dict[int, int] = {}  # numbers of storages, by address of the storage object
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
            return NotImplemented  # the subclass calls operators with ordinary tensors, which come here
        facts = _facts(func)
        if self._host or facts.is_checked:
            self._check(func, args, kwargs, arguments)
        # In inference mode, composite operators arrive whole; a synchronising operator may be inside.
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
            self._undo.append(kv_write.undo(*args[2:]))  # saves only what is overwritten, because K and V are large
        else:
            for written in changed:
                self._save(written)
        self._draws |= facts.draws
        for generator in kwargs.values():
            if isinstance(generator, torch.Generator):
                self._remember(generator)
        if kwargs or any(isinstance(argument, list | tuple | dict) for argument in args):
            flat, structure = tree_flatten((args, kwargs))
        else:  # `tree_flatten` takes a good part of the recording's time
            flat, structure = list(args), structure_of(len(args))
        refs = [self._ref(arg) for arg in flat]
        result = self._result(func, args, kwargs, arguments)
        outputs = [self._allocate(tensor) for tensor in tensors_in(result)]
        # An operator that only changes a tensor's layout shows in the arguments of later operators.
        if facts.writes or any(ref is not None for ref in outputs) or not outputs:
            in_place = frozenset(self._numbers_of(changed))
            self.recording.operations.append(Operation(func, refs, structure, outputs, in_place))
        return result

    def _result(self, func: Any, args: tuple, kwargs: dict, arguments: list[Tensor]) -> Any:
        """Returns the operator's result; zeros for a product with earlier memory, whose values nobody reads."""
        if func in PRODUCTS and not kwargs and not self._numbers_of(arguments) <= self.recording.made:
            x, weight = args[-2:]
            return x.new_zeros(x.shape[0], weight.shape[1])
        return func(*args, **kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, because torch would otherwise have a compiler inspect each call of the method above."""
        return False

    def put_back(self) -> None:
        """Restores what was written, because a capture executes nothing."""
        for undo in reversed(self._undo):
            undo()
        for generator, state in self._generators.items():
            if self._draws:  # otherwise draws of another thread would repeat
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
        """Handles a tensor that torch makes of host values for `x[i] = number`, or for a list of indices: frozen."""
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
        # The recording holds the storages, so that no new one can get the address of a freed one.
        number = self._numbers.setdefault(storage._cdata, len(self.recording.storages))
        if number == len(self.recording.storages):
            self.recording.storages.append(storage)
        return number

    def _numbers_of(self, tensors: list[Tensor]) -> set[int]:
        return {self._number(tensor.untyped_storage()) for tensor in tensors}

    def _save(self, tensor: Tensor) -> None:
        """Saves the contents of memory that existed before the capture, when it is first written to."""
        number = self._number(tensor.untyped_storage())
        if number not in self.recording.made and number not in self._saved:
            self._saved.add(number)
            storage = tensor.untyped_storage()
            self._undo.append(partial(storage.copy_, storage.clone()))

    def _remember(self, generator: torch.Generator) -> None:
        if generator not in self._generators:
            self._generators[generator] = generator.get_state()


_OWN = (_HostAccess, _Recorder)


class _Facts(NamedTuple):
    """Properties of an operator that the recorder needs.

    Attributes:
        is_checked: it may do something that cannot be captured on a GPU.
        is_composed: it is composed of other operators.
        is_view: it only makes views of its arguments' memory.
        draws: it uses a random number generator.
        writes: it writes to its arguments' contents, not only to their layout.
        written: positions and names of the arguments that it writes to.
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
    """Whether torch computes the layer bit for bit as `_linear` does."""
    has_rows = x.dim() >= 2 and x.numel() > 0 and x.is_contiguous()
    return has_rows and weight.dim() == 2 and (bias is None or bias.shape == weight.shape[:1])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Decomposes a linear layer as torch does. Torch's own code for it takes longer than the rest of the recording."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    result = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return result if x.dim() == 2 else result.view(*x.shape[:-1], weight.shape[0])


def _refuse(function: Any, reason: str) -> None:
    raise RuntimeError(f"operation not permitted when stream is capturing: {function} {reason}")


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors in tuples, lists and dictionaries, in order. Torch's function takes at least twice as
    long.
    """
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
