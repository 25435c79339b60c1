"""What the backward visit of a layer need not compute or hold.

Products that nothing reads are left out, MLPs are computed in tiles, attention is recorded in the
forward visit, and whole graphs are sent away and come back.
"""

import threading
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from offload.engine.internals import (
    OpOverloadPacket,
    TorchDispatchMode,
    num_writes,
    tree_leaves,
    tree_map_only,
)
from offload.engine.randomness import dropout_of
from offload.plan.facts.linears import output_bytes

# ---------------------------------------------------------------------------------------------
# Leaves out products whose values nothing reads when a layer is recomputed.
#
# Problem. A backward visit recomputes its layer to have the graph. In most models the last product
# of a layer is only added to the hidden state, and in a recompute nothing reads the sum. The
# gradients of the product need its weight and its input. So its value is computed and thrown away:
# 8 to 9 % of a layer's arithmetic, in a step with a recompute.
#
# Idea. In a recompute such a linear layer returns a `NotAValue`: shape, dtype, graph, and no
# memory. Sums and views of one are of the same kind, so the layer's output is too. Any other use is
# an error, then the layer is computed again with all values. So it is if the graph from the layer's
# output to the product is not the one that was found. Which products to try is found before the
# first step, by `offload.engine.safety.parts`. That is not enough: a layer may do something else
# for long rows, above a threshold, or by its number.
#
# Rejected: a NaN in one element for all places. `NaN > 1` is False, so a layer that halves what is
# large took the other branch in its recompute, and kernels that take a pointer read past the
# element.


Path = tuple[tuple[str, int], ...]
"""From node to node of a graph: a node's name, and which of its inputs comes next."""


@runtime_checkable
class WithoutValue(Protocol):
    """A linear layer of another kind, or all experts of a layer, that can leave its value out."""

    def without_value(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return a `not_a_value` with the output's graph; or the output if that differs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Unread:
    """A linear layer whose product nothing reads in a recompute."""

    module: nn.Module | WithoutValue  # it
    path: Path  # the nodes from that of the decoder layer's output to that of the product


class Left:
    """What was left out of one visit."""

    def __init__(self, unread: Sequence[Unread]) -> None:
        """Expect these to be left out, once each."""
        self._unread = unread
        self._num_refused = _refused.count
        self._nodes: list[tuple[object, Node | None]] = []

    def call(self, module: nn.Module | WithoutValue, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Call a linear layer, without its value where it can leave it out."""
        y = _output(module, *args, **kwargs)
        if is_no_value(y):
            self._nodes.append((module, y.grad_fn))
        return y

    def is_as_found(self, output: torch.Tensor) -> bool:
        """Return whether the graph of a layer's output leads to each product as it was found."""
        nodes = dict(self._nodes)
        return (
            _refused.count == self._num_refused  # the layer may have caught the error
            and len(self._nodes) == len(nodes) == len(self._unread)
            and is_no_value(output) == bool(self._unread)
            and all(_leads(output.grad_fn, one.path, nodes.get(one.module)) for one in self._unread)
        )


@contextmanager
def left_out(unread: Sequence[Unread]) -> Iterator[Left]:
    """Leave products out in this context."""
    left = Left(unread)
    for one in unread:
        vars(one.module)["forward"] = partial(left.call, one.module)
    try:
        yield left
    finally:
        for one in unread:
            vars(one.module).pop("forward", None)


class ReadError(RuntimeError):
    """Something used a value that was left out."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        _refused.count += 1


class _Refused(threading.local):
    """How many uses were refused in this thread."""

    count = 0


_refused = _Refused()


# ---------------------------------------------------------------------------------------------
# Computes an MLP some tokens at a time, so that one long sequence fits.
#
# Problem. An MLP widens each token three to four times and saves several tensors of that width for
# its backward. For one long sequence this is most of a visit, and no smaller micro-batch exists.
#
# Idea. Each token of an MLP is computed by itself. A forward computes a tile of tokens after
# another into one output. With a graph the whole MLP is one autograd function that saves its input
# alone; its backward goes over the tiles, computes each again with a graph and takes its gradients.
# Those of the tokens go to one buffer, those of what trains are added up in fp32, as over
# micro-batches. Where nothing reads the MLP's output in a recompute, its value is left out, and
# tiles cost no arithmetic.
#
# Exact but for rounding: sums over tokens have another order. So the size of a tile is recorded
# with a run.
#
# Which modules: those whose operations all act within a token (`find_mlps`) and whose values show
# it (`problem_of`). Routed experts are not: their products depend on which rows an expert gets. Nor
# are MLPs that draw random numbers: the masks of a backward would not be those of the forward.

# ---------------------------------------------------------------------------------------------
# Outputs of fused attention that a recompute takes over from its forward visit.
#
# Problem. A recompute repeats attention, whose arithmetic grows with the square of the sequence.
# Apart from queries, keys and values, all that the backward needs of it is its output and one
# number for each row of scores, the log-sum-exp: 260 bytes for a token and head of 128 features in
# bf16.
#
# Idea. Only calls of `torch.nn.functional.scaled_dot_product_attention` are intercepted, and those
# of torch's operator for packed rows; and in such a call the operation below autograd. A forward
# visit records what the operation returns. In the recompute the operation of the same call returns
# the record in place of computing. Autograd then saves what it would have saved, and runs the same
# kernel with the same bits in the backward.
#
# A kernel may be chosen, and the log-sum-exp be written, only where gradients are needed. So a call
# of a forward visit is recorded with gradients switched on, and only if the same kernel would run
# without them: then the forward has the bits that it has where nothing is recorded.
#
# Wherever a call is not the recorded one (another operation, shape, type, option), it computes. If
# there are more or fewer calls than in the forward, which one is which is not known, and the layer
# is computed again. Attention with dropout, without a fused kernel, or by cuDNN (whose forward with
# a log-sum-exp is another graph) is never recorded.

_aten = torch.ops.aten
_SUMS = {_aten.add.Tensor, _aten.sub.Tensor}
_SCALED = {_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar}
_UNREAD_SHAPED = {
    *(_aten.view.default, _aten._unsafe_view.default, _aten.transpose.int, _aten.permute.default),
    *(_aten.unsqueeze.default, _aten.squeeze.dim, _aten.t.default, _aten.detach.default),
    *(_aten.clone.default, _aten._to_copy.default),
}


class NotAValue(torch.Tensor):
    """The output of a linear layer without its values, or a sum of one: it cannot be read."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: torch.Tensor, device: torch.device) -> "NotAValue":
        """Take shape, strides and dtype from a tensor, and no memory."""
        y: NotAValue = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=device
        )
        torch._C._set_throw_on_mutable_data_ptr(y)  # for code that takes its address
        return y

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's is no class method
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> "NotAValue":
        """Return what a sum, a product with a constant or a view of it has of a shape and a dtype.

        Raises:
            ReadError: It is another operation, or its gradient needs the value.
        """
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        others = [x for x in given if not isinstance(x, cls)]
        is_scaled = (
            func in _SCALED
            and len(given) - len(others) == 1
            and (isinstance(args[0], cls) or func is _aten.mul.Tensor)
            and not any(x.requires_grad for x in others)
        )
        if not (is_scaled or func in _SUMS or func in _UNREAD_SHAPED):
            raise ReadError(
                f"`{func}` uses the output of a linear layer whose value was left out of a"
                " recompute; a layer does this only in some of its calls"
            )
        y = next(x for x in given if isinstance(x, cls))
        if func not in _UNREAD_SHAPED and all(
            x.shape == y.shape and x.dtype == y.dtype for x in given
        ):
            return cls(_shape_of(y), device=y.device)  # torch's shapes for it take 0.2 ms in Python
        args, kwargs = tree_map_only(torch.Tensor, _shape_of, (args, kwargs or {}))
        return cls(func(*args, **kwargs), device=y.device)

    def register_hook(self, hook: Any) -> Any:
        """Raise an error: a hook on the gradient may read the value in the backward.

        Raises:
            ReadError: Always.
        """
        raise ReadError(f"{hook} is registered on an output whose value was left out")


def not_a_value(x: torch.Tensor, num_features: int) -> torch.Tensor:
    """Return an output of a linear layer without values.

    Args:
        x: The layer's input, (..., K).
        num_features: Features of the output.
    """
    shape = (*x.shape[:-1], num_features)
    return NotAValue(torch.empty(shape, dtype=x.dtype, device="meta"), device=x.device)


def is_no_value(y: torch.Tensor) -> bool:
    """Return whether a tensor is from `not_a_value`, or a sum of one."""
    return isinstance(y, NotAValue)


def _shape_of(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def can_leave_out(module: nn.Module) -> bool:
    """Return whether a module is a frozen linear layer that can leave its value out."""
    if type(module) is nn.Linear:
        return not any(parameter.requires_grad for parameter in module.parameters())
    return hasattr(type(module), "without_value")  # `isinstance` would ask each of its tables


def _output(module: nn.Module | WithoutValue, *args: Any, **kwargs: Any) -> torch.Tensor:
    own = cast("Any", type(module))
    if not args or torch.compiler.is_compiling():
        return cast("torch.Tensor", own.forward(module, *args, **kwargs))
    if isinstance(module, WithoutValue):
        return module.without_value(*args, **kwargs)
    if len(args) > 1 or kwargs:
        return cast("torch.Tensor", own.forward(module, *args, **kwargs))
    (x,) = args
    weight_MK: Any = module.weight
    is_plain = (
        type(x) is torch.Tensor
        and type(weight_MK) is nn.Parameter
        and x.dim() > 1
        and x.is_contiguous()
        and x.dtype == weight_MK.dtype
        and not torch.is_autocast_enabled(x.device.type)
    )
    if not is_plain:
        return cast("torch.Tensor", own.forward(module, x))
    return cast("torch.Tensor", _Product.apply(x, weight_MK))  # type: ignore[no-untyped-call]


class _Product(torch.autograd.Function):
    """A frozen linear layer without its value; its backward is the product that torch's has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_MK: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        ctx.save_for_backward(weight_MK)
        return not_a_value(x, len(weight_MK))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weight_MK,) = ctx.saved_tensors
        return (gradient.flatten(0, -2) @ weight_MK).view(ctx.shape), None


def _leads(node: Node | None, path: Path, end: Node | None) -> bool:
    for name, index in path:
        if node is None or node.name() != name or index >= len(node.next_functions):
            return False
        node = node.next_functions[index][0]
    return node is not None and node is end


_MATRIX_DIM = 2
_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)


class TiledMlp:
    """An MLP of one layer, computed tile by tile."""

    def __init__(
        self,
        module: nn.Module,
        *,
        num_features: int,
        chunk_tokens: int,
        unread: Sequence[Unread] = (),
    ) -> None:
        """Keep an MLP that `find_mlps` found.

        Args:
            module: The MLP.
            num_features: Features of its output.
            chunk_tokens: Tokens of a tile.
            unread: Linears in it whose products its own output alone needs.
        """
        self.module, self.unread = module, tuple(unread)
        self._num_features, self._chunk_tokens = num_features, chunk_tokens

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output, (..., M)."""
        return self._apply(x, has_value=True)

    def without_value(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the output's graph without its values; see `offload.engine.recompute`."""
        return self._apply(x, *args, has_value=False, **kwargs)

    def _apply(self, x: torch.Tensor, *, has_value: bool) -> torch.Tensor:
        trained = [p for p in self.module.parameters() if p.requires_grad]
        return cast("torch.Tensor", _Tiles.apply(x, self, has_value, *trained))  # type: ignore[no-untyped-call]

    def value(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the output tile by tile, without a graph."""
        y = x.new_empty(*x.shape[:-1], self._num_features)
        with torch.no_grad():
            for x_tile, y_tile in zip(self.tiles(x), self.tiles(y), strict=True):
                y_tile.copy_(compute(self.module, x_tile))
        return y

    def outline(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output without values."""
        return not_a_value(x, self._num_features)

    def tiles(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return views of the tokens of a contiguous tensor, each (1, n, K) if it has rows."""
        tokens = x.view(-1, x.shape[-1])
        tokens = tokens.unsqueeze(0) if x.dim() > _MATRIX_DIM else tokens
        return cast("Sequence[torch.Tensor]", tokens.split(self._chunk_tokens, dim=-2))

    def graph(self, x_tile: torch.Tensor) -> torch.Tensor:
        """Compute a tile with its graph, without the products that nothing reads."""
        with torch.enable_grad():
            if self.unread:
                try:
                    with left_out(self.unread) as left:
                        y_tile = compute(self.module, x_tile)
                    if left.is_as_found(y_tile):
                        return y_tile
                except torch.OutOfMemoryError:
                    raise
                except _ERRORS:  # of a read; others come again where all is computed
                    pass
                self.unread = ()
            return compute(self.module, x_tile)


def compute(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run the forward of the module's class, also while it is replaced."""
    return cast("torch.Tensor", cast("Any", type(module)).forward(module, x))


class _Tiles(torch.autograd.Function):
    """An MLP that saves its input alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        mlp: TiledMlp,
        has_value: bool,  # noqa: FBT001  # torch passes arguments by position
        *trained: torch.Tensor,
    ) -> torch.Tensor:
        x = x.contiguous()
        ctx.mlp, ctx.trained = mlp, trained  # leaves: autograd holds them anyway
        ctx.save_for_backward(x)
        return mlp.value(x) if has_value else mlp.outline(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        mlp: TiledMlp = ctx.mlp
        needs_x, _, _, *needs = ctx.needs_input_grad
        trained = [p for p, need in zip(ctx.trained, needs, strict=True) if need]
        of_x = torch.empty_like(x) if needs_x else None
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in trained]
        into = mlp.tiles(x if of_x is None else of_x)
        tiles = zip(mlp.tiles(x), mlp.tiles(gradient.contiguous()), into, strict=True)
        for x_tile, g_tile, of_x_tile in tiles:
            leaf = x_tile.detach().requires_grad_(needs_x)
            found: list[torch.Tensor | None] = [
                *torch.autograd.grad(
                    mlp.graph(leaf),
                    [*([leaf] if needs_x else []), *trained],
                    g_tile,
                    allow_unused=True,
                )
            ]
            if needs_x:
                of_leaf = found.pop(0)
                of_x_tile.zero_() if of_leaf is None else of_x_tile.copy_(of_leaf)
            for total, of_one in zip(sums, found, strict=True):
                if of_one is not None:
                    total.add_(of_one)
        added = iter(total.to(p.dtype) for p, total in zip(trained, sums, strict=True))
        return of_x, None, None, *(next(added) if need else None for need in needs)


@contextmanager
def tiled(mlps: Sequence[TiledMlp]) -> Iterator[None]:
    """Compute MLPs tile by tile in this context."""
    for mlp in mlps:  # looked up at each call: its value may be left out
        vars(mlp.module)["forward"] = partial(_call, mlp)
    try:
        yield
    finally:
        for mlp in mlps:
            vars(mlp.module).pop("forward", None)


def _call(mlp: TiledMlp, x: torch.Tensor) -> torch.Tensor:
    return mlp.forward(x)


def names_left_out(layer: nn.Module, unread: Sequence[Unread]) -> frozenset[str]:
    """Return the names of a layer's linears that a recompute leaves out.

    Of an MLP in tiles they are those that its tiles leave out.
    """
    found: list[object] = []
    for one in unread:
        module = one.module
        found += [m.module for m in module.unread] if isinstance(module, TiledMlp) else [module]
    return frozenset(
        name for name, module in layer.named_modules() if any(module is one for one in found)
    )


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
    """What a fused operation was given and returned."""

    operation: Any  # it
    given: Any  # its arguments; of a tensor its shape, strides, dtype and device
    # Output (B, H, T, D) and log-sum-exp (B, H, ...), without a graph; of packed rows in one call
    # (T, H, D) and (H, T).
    tensors: tuple[torch.Tensor, ...]
    rest: tuple[Any, ...]  # what else it returned: sizes, and the state of dropout that is off


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
        self._versions.append((output, num_writes(output)))
        return returned

    def recorded(self) -> Recorded:
        """Return what was recorded; nothing if the layer wrote to an output of attention."""
        is_written = any(num_writes(x) != version for x, version in self._versions)
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


# ---------------------------------------------------------------------------------------------
# What autograd saves of a layer, sent away from its forward visit to its backward visit.
#
# Problem. A layer whose graph is kept is not computed again, but all that autograd saved of it
# stays on the device for most of the step. The host has more room, and the link has time.
#
# Idea. Hooks on saved tensors leave a note in the place of each tensor: its shape, strides, type
# and which block of memory it views. When the visit ends, each block is copied once to one buffer
# and let go of, however many tensors view it. The buffer leaves and comes back as two ops of the
# schedule; then the notes are views of the buffer that it came back to. Values, strides and the
# alignment of blocks are those of the forward, so the backward runs the same kernels on the same
# bits, as if the graph had stayed. Nothing is computed again, so nothing is drawn again.
#
# What stays where it is: weights, which alias slots and are there again for the backward; arguments
# that layers are passed, such as masks and rotary tables, which are held for the whole pass; and
# what is not plain memory on the compute device (sparse tensors, subclasses, scalars on the host).
# So does what a custom function keeps without `save_for_backward`: gradients are right, but the
# device has less room than planned.
#
# Autograd notices that a saved tensor was written to, but not where hooks took it. So versions are
# compared when the visit ends: a layer that wrote to what it had saved is computed again, and then
# autograd raises its own error.
#
# Size. How many bytes a graph takes is known once one was computed. A pass without gradients
# measures each layer when a micro-batch is larger than any before it (`GraphSizes`); the schedule
# then counts on these bytes. If a graph is larger even so, as experts may save more for other
# tokens, its layer is computed again with a warning, and the size is raised for the next step.

_GRAPH_ALIGN_BYTES = 512  # of a block in a buffer, as of any block of torch's CUDA allocator

Shape = tuple[int, ...]
"""Sizes of a micro-batch, with each of which a graph grows."""


@dataclass(frozen=True, slots=True)
class _Note:
    """A saved tensor: the number of its block, and how it views it."""

    block: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class SavedTensors:
    """What autograd saved in one visit: first in memory of its own, then in a buffer."""

    def __init__(self, *, staying: Container[int], torch_device: torch.device) -> None:
        """Save nothing yet.

        Args:
            staying: Addresses of the blocks of memory that stay where they are.
            torch_device: Where layers compute.
        """
        self._staying, self._torch_device = staying, torch_device
        self._held: list[tuple[torch.Tensor, int]] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._starts = [0]
        self._buffer: torch.Tensor | None = None

    def hooked(self) -> AbstractContextManager[None]:
        """Return a context in which autograd hands over what it saves."""
        hooks: AbstractContextManager[None] = saved_tensors_hooks(self.pack, self.unpack)
        return hooks

    @property
    def num_bytes(self) -> int:
        """Size of a buffer for all blocks."""
        return self._starts[-1]

    @property
    def num_blocks(self) -> int:
        """Blocks of memory that leave."""
        return len(self._numbers)

    @property
    def is_unwritten(self) -> bool:
        """Whether the tensors are as they were when they were saved."""
        return all(num_writes(x) == version for x, version in self._held)

    def pack(self, x: torch.Tensor) -> object:
        """Leave a note in the place of a tensor that autograd saves, unless it stays."""
        if not self._leaves(x):
            return x
        self._held.append((x, num_writes(x)))
        block = x.untyped_storage()
        number = self._numbers.setdefault((block.data_ptr(), block.nbytes()), self.num_blocks)
        if number == len(self._starts) - 1:
            size = -(-block.nbytes() // _GRAPH_ALIGN_BYTES) * _GRAPH_ALIGN_BYTES
            self._starts.append(self._starts[-1] + size)
        return _Note(number, x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset()))

    def unpack(self, saved: object) -> torch.Tensor:
        """Return a tensor that the backward needs, in the buffer that it came back to.

        A layer that differentiates while it computes gets the tensor where it still is.
        """
        if isinstance(saved, torch.Tensor):
            return saved
        assert isinstance(saved, _Note)
        if self._buffer is None:
            memory = next(x for x, _ in self._held if self._number(x) == saved.block)
            start = 0
        else:
            memory = self._buffer
            start = int(memory.storage_offset()) + self._starts[saved.block]
        place = start // saved.dtype.itemsize + saved.offset
        view = torch.empty(0, dtype=saved.dtype, device=memory.device)
        return view.set_(memory.untyped_storage(), place, saved.shape, saved.strides)

    @torch.no_grad()
    def move_to(self, buffer: torch.Tensor) -> None:
        """Copy each block to a uint8 buffer, and let go of it."""
        blocks = {self._number(x): x.untyped_storage() for x, _ in self._held}
        for number, block in blocks.items():
            source = torch.empty(0, dtype=torch.uint8, device=self._torch_device).set_(block)
            start = self._starts[number]
            buffer[start : start + source.numel()].copy_(source)
        self._held.clear()

    def is_in(self, buffer: torch.Tensor) -> None:
        """Note the buffer that all blocks came back to."""
        self._buffer = buffer

    def _number(self, x: torch.Tensor) -> int:
        block = x.untyped_storage()
        return self._numbers[block.data_ptr(), block.nbytes()]

    def _leaves(self, x: torch.Tensor) -> bool:
        is_plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided
        if not is_plain or x.device != self._torch_device or x.is_conj() or x.is_neg():
            return False
        address = x.untyped_storage().data_ptr()
        return bool(address) and address not in self._staying


class GraphSizes:
    """What autograd saves of each layer, by the shape of a micro-batch."""

    def __init__(self) -> None:
        """Know none."""
        self._sizes: dict[object, dict[Shape, int]] = {}

    def of(self, layer: object, shape: Shape) -> int | None:
        """Return the bytes of a shape, or those of the next larger one; None if all are smaller."""
        sizes = self._sizes.get(layer, {})
        if shape in sizes:
            return sizes[shape]
        larger = (
            size
            for known, size in sizes.items()
            if all(a <= b for a, b in zip(shape, known, strict=True))
        )
        return min(larger, default=None)

    def add(self, layer: object, shape: Shape, num_bytes: int) -> None:
        """Note what a visit took."""
        sizes = self._sizes.setdefault(layer, {})
        sizes[shape] = max(num_bytes, sizes.get(shape, 0))
