"""Outputs of fused attention that a recompute takes over from its forward visit.

Problem. A recompute repeats attention, whose arithmetic grows with the square of the sequence.
Apart from queries, keys and values, all that the backward needs of it is its output and one number
for each row of scores, the log-sum-exp: 260 bytes for a token and head of 128 features in bf16.

Idea. Only calls of `torch.nn.functional.scaled_dot_product_attention` are intercepted, and those of
torch's operator for packed rows; and in such a call the operation below autograd. A forward visit
records what the operation returns. In the recompute the operation of the same call returns the
record in place of computing. Autograd then saves what it would have saved, and runs the same kernel
with the same bits in the backward.

A kernel may be chosen, and the log-sum-exp be written, only where gradients are needed. So a call
of a forward visit is recorded with gradients switched on, and only if the same kernel would run
without them: then the forward has the bits that it has where nothing is recorded.

Wherever a call is not the recorded one (another operation, shape, type, option), it computes. If
there are more or fewer calls than in the forward, which one is which is not known, and the layer is
computed again. Attention with dropout, without a fused kernel, or by cuDNN (whose forward with a
log-sum-exp is another graph) is never recorded.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch._ops import OpOverloadPacket
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from offload.engine.randomness import dropout_of
from offload.plan.facts.linears import output_bytes

_aten = torch.ops.aten
_JOINED = "torch_attn::_varlen_attn"
"""The operator for packed rows; importing it takes a second, so that is left to its first call."""
_CALL: Any = torch.nn.functional.scaled_dot_product_attention
_FUSED = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
}
_ALIGN_BYTES = 16  # of each tensor in a buffer
_LEAVES = ("query", "key", "value")
_ORDER = (*_LEAVES, "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fused:
    """What a fused operation was given and returned.

    Attributes:
        operation: It.
        given: Its arguments; of a tensor its shape, strides, dtype and device.
        tensors: Output (B, H, T, D) and log-sum-exp (B, H, ...), without a graph; of packed rows in
            one call (T, H, D) and (H, T).
        rest: What else it returned: sizes, and the state of dropout that is off.
    """

    operation: Any
    given: Any
    tensors: tuple[torch.Tensor, ...]
    rest: tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """The attention of one forward visit: an entry for each call, None for one that computes."""

    calls: tuple[_Fused | None, ...] = ()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is to be kept from the forward to the backward."""
        return [x for call in self.calls if call is not None for x in call.tensors]

    @property
    def num_bytes(self) -> int:
        """Size of a buffer for all of them."""
        return self._places()[-1]

    @property
    def sizes(self) -> tuple["OutputSize", ...]:
        """Heads, features and element size of each recorded call."""
        outputs = [call.tensors[0] for call in self.calls if call is not None]
        return tuple(OutputSize(x.shape[1], x.shape[-1], x.element_size()) for x in outputs)

    def at(self, buffer: torch.Tensor) -> "Recorded":
        """Return the same tensors, by shape and strides, as views of a uint8 buffer."""
        views = (
            buffer[start : start + x.nbytes].view(x.dtype).as_strided(x.shape, x.stride())
            for (start, _), x in zip(pairwise(self._places()), self.tensors, strict=True)
        )
        return Recorded(
            calls=tuple(
                call and replace(call, tensors=tuple(next(views) for _ in call.tensors))
                for call in self.calls
            )
        )

    def packed(self, buffer: torch.Tensor) -> "Recorded":
        """Copy all tensors to a buffer, and return the views of it."""
        packed = self.at(buffer)
        for target, source in zip(packed.tensors, self.tensors, strict=True):
            target.copy_(source)
        return packed

    def _places(self) -> list[int]:
        sizes = (-(-x.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES for x in self.tensors)
        return list(accumulate(sizes, initial=0))


@dataclass(frozen=True, slots=True)
class OutputSize:
    """Of one call of attention: heads of queries, features of a value, bytes of an element."""

    num_heads: int
    head_features: int
    element_bytes: int

    def num_bytes(self, num_rows: int, seq_len: int) -> int:
        """Return what output and log-sum-exp take for so many sequences of so many tokens."""
        return output_bytes(
            num_heads=self.num_heads,
            head_features=self.head_features,
            element_bytes=self.element_bytes,
            num_rows=num_rows,
            seq_len=seq_len,
        )


NOTHING = Recorded()


class Recorder(TorchFunctionMode):
    """Records the fused attention of a forward visit, which runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Fused | None] = []
        self._versions: list[tuple[torch.Tensor, int]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not _is_attention(func):
            return func(*args, **(kwargs or {}))
        given = dict(zip(_names_of(func), args, strict=False)) | (kwargs or {})
        with torch.enable_grad():
            leaves = {name: given[name].detach().requires_grad_() for name in _LEAVES}
            wanted = given | leaves
        if func is _CALL and _kernel_of(given) != _kernel_of(wanted):
            self._calls.append(None)
            return func(**given)
        with torch.enable_grad(), _Seen() as seen:
            returned = func(**wanted)
        self._calls.append(seen.found)
        returned = tree_map_only(torch.Tensor, lambda x: x.detach(), returned)
        output = returned if func is _CALL else returned[0]
        self._versions.append((output, output._version))
        return returned

    def recorded(self) -> Recorded:
        """Return what was recorded; nothing if the layer wrote to an output of attention."""
        is_written = any(x._version != version for x, version in self._versions)
        return NOTHING if is_written else Recorded(calls=tuple(self._calls))


class Giver(TorchFunctionMode):
    """Gives a recompute what its forward visit recorded."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self._recorded = recorded
        self._num_calls = 0

    @property
    def is_as_recorded(self) -> bool:
        """Whether there were as many calls as in the forward."""
        return self._num_calls == len(self._recorded.calls)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if not _is_attention(func):
            return func(*args, **(kwargs or {}))
        calls, number = self._recorded.calls, self._num_calls
        self._num_calls += 1
        given = calls[number] if number < len(calls) else None
        if given is None:
            return func(*args, **(kwargs or {}))
        with _Given(given):
            return func(*args, **(kwargs or {}))


@contextmanager
def given(recorded: Recorded) -> Iterator[Callable[[], bool]]:
    """Give a recompute its recorded attention; yields whether its calls were those recorded."""
    if not recorded.tensors:
        yield lambda: True
        return
    with Giver(recorded) as giver:
        yield lambda: giver.is_as_recorded


def sizes_of(
    forward: Callable[[], torch.Tensor],
    recompute: Callable[[Recorded], tuple[torch.Tensor, torch.Tensor]],
) -> tuple[OutputSize, ...]:
    """Return the sizes of a layer's recorded attention, in the order of its calls.

    There are none unless output and gradient are the same to the bit with the record and without,
    and the forward is the same whether it is recorded or not.

    Args:
        forward: Computes the layer without a graph.
        recompute: Computes it with a graph, given a record; returns its output and its input.
    """
    with Recorder() as recorder:
        with_BTD = forward()
    recorded = recorder.recorded()
    if not recorded.tensors or not torch.equal(with_BTD, forward()):
        return ()
    outputs: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    for one in (recorded, NOTHING):
        output_BTD, input_BTD = recompute(one)
        outputs.append(output_BTD.detach())
        gradients += torch.autograd.grad(output_BTD, input_BTD, outputs[-1])
    return recorded.sizes if torch.equal(*outputs) and torch.equal(*gradients) else ()


class _Seen(TorchDispatchMode):
    """Sees the fused operation of one call."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: list[tuple[Any, Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        is_fused = func in _FUSED or func.name() == _JOINED
        if is_fused and not dropout_of(func, args, kwargs or {}):
            self._seen.append((func, _form_of(args, kwargs or {}), returned))
        return returned

    @property
    def found(self) -> _Fused | None:
        """The one fused operation that ran; None if its tensors are not whole blocks of memory."""
        if len(self._seen) != 1:
            return None
        ((operation, form, returned),) = self._seen
        tensors = tuple(x.detach() for x in returned[:2])
        if not all(map(_is_whole, tensors)):
            return None
        rest = tree_map_only(torch.Tensor, lambda x: x.detach(), tuple(returned[2:]))
        return _Fused(operation=operation, given=form, tensors=tensors, rest=rest)


class _Given(TorchDispatchMode):
    """Returns what was recorded in place of the operation that returned it."""

    def __init__(self, recorded: _Fused) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded = recorded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        one = self._recorded
        if func is not one.operation or _form_of(args, kwargs or {}) != one.given:
            return func(*args, **(kwargs or {}))
        return (*(x.detach() for x in one.tensors), *one.rest)


def _is_attention(func: Any) -> bool:
    if func is _CALL:
        return True
    return isinstance(func, OpOverloadPacket) and func._qualified_op_name == _JOINED


def _names_of(func: Any) -> Sequence[str]:
    if func is _CALL:
        return _ORDER
    return [argument.name for argument in func.default._schema.arguments]


def _kernel_of(given: dict[str, Any]) -> int:
    return int(torch._fused_sdp_choice(**given))


def _form_of(args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    def form(x: torch.Tensor) -> Any:
        return tuple(x.shape), x.stride(), x.dtype, x.device

    return tree_map_only(torch.Tensor, form, (tuple(args), kwargs))


def _is_whole(x: torch.Tensor) -> bool:
    """Return whether a tensor fills its memory, in whatever order."""
    is_dense = torch.empty_like(x, device="meta").stride() == x.stride()
    return is_dense and x.untyped_storage().nbytes() == x.nbytes
