"""Computes an MLP some tokens at a time, so that one long sequence fits.

Problem. An MLP widens each token three to four times and saves several tensors of that width for
its backward. For one long sequence this is most of a visit, and no smaller micro-batch exists.

Idea. Each token of an MLP is computed by itself. A forward computes a tile of tokens after another
into one output. With a graph the whole MLP is one autograd function that saves its input alone; its
backward goes over the tiles, computes each again with a graph and takes its gradients. Those of the
tokens go to one buffer, those of what trains are added up in fp32, as over micro-batches. Where
nothing reads the MLP's output in a recompute, its value is left out, and tiles cost no arithmetic.

Exact but for rounding: sums over tokens have another order. So the size of a tile is recorded with
a run.

Which modules: those whose operations all act within a token (`find_mlps`) and whose values show it
(`problem_of`). Routed experts are not: their products depend on which rows an expert gets. Nor are
MLPs that draw random numbers: the masks of a backward would not be those of the forward.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload.engine.closeness import are_close
from offload.engine.recompute.unread import Unread, left_out, not_a_value
from offload.errors import UnsupportedModelError

_MIN_LINEARS, _MATRIX_DIM = 2, 2
_STEPS = 64  # roundings by which kernels of other shapes may differ
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
        """Return the output's graph without its values; see `offload.engine.recompute.unread`."""
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
    """Compute MLPs tile by tile meanwhile."""
    for mlp in mlps:  # looked up at each call: its value may be left out
        vars(mlp.module)["forward"] = partial(_call, mlp)
    try:
        yield
    finally:
        for mlp in mlps:
            vars(mlp.module).pop("forward", None)


def _call(mlp: TiledMlp, x: torch.Tensor) -> torch.Tensor:
    return mlp.forward(x)


# ---------------------------------------------------------------------------------------------
# Which


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FoundMlp:
    """A module whose operations all act within a token.

    Attributes:
        x: An input that it was given, (..., K).
        num_features: Features of its output.
    """

    x: torch.Tensor
    num_features: int


def find_mlps(layer: nn.Module, run: Callable[[], object]) -> dict[str, FoundMlp]:
    """Return the outermost modules of a layer that can be computed tile by tile, by name.

    Args:
        layer: A decoder layer without hooks, perhaps without values.
        run: Computes it once, without a graph.
    """
    named = {
        name: module
        for name, module in layer.named_modules()
        if name and "forward" not in vars(module) and _has_linears(module)
    }
    within = _WithinTokens(named)
    with ExitStack() as stack:
        for name, module in named.items():
            vars(module)["forward"] = partial(within.call, name, module)
            stack.callback(vars(module).pop, "forward", None)
        stack.enter_context(within)
        run()
    found = within.found()
    return {
        name: one
        for name, one in found.items()
        if not any(name.startswith(f"{outer}.") for outer in found)
    }


def require_tiles(
    model_name: str, chunk_tokens: int | None, mlps: Iterable[Sequence[TiledMlp]]
) -> None:
    """Check that some MLP can be computed in tiles, where that is asked for.

    Args:
        model_name: Of the model, for the message.
        chunk_tokens: Tokens of a tile; None if nothing is asked for.
        mlps: What was found, by layer.

    Raises:
        UnsupportedModelError: None can.
    """
    if chunk_tokens is not None and not any(mlps):
        raise UnsupportedModelError(
            f"mlp_chunk_tokens is {chunk_tokens}, but no MLP of {model_name} can be computed in"
            " tiles",
            limit="its parts must compute each token by itself, draw no random numbers (a"
            " dropout) and have no hooks; routed experts are computed whole",
            hint="`mlp_chunk_tokens=None`",
        )


def problem_of(mlp: TiledMlp, x: torch.Tensor) -> str | None:
    """Return what shows that an MLP does not compute each token by itself, from values.

    A token that is NaN makes what depends on it NaN, forward and backward.

    Args:
        mlp: With tiles that cut `x`.
        x: An input of several tokens.
    """
    leaf = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        whole = compute(mlp.module, leaf)
    parts = mlp.value(leaf.detach())
    if not are_close(whole, parts, steps=_STEPS):
        return "gives other values in parts"
    for token in (0, x[..., 0].numel() - 1):
        marked = x.detach().clone()
        marked.view(-1, x.shape[-1])[token] = torch.nan
        if _others_are_nan(compute(mlp.module, marked), token):
            return "computes a token from another"
        ones = torch.ones_like(whole)
        ones.view(-1, ones.shape[-1])[token] = torch.nan
        (of_x,) = torch.autograd.grad(whole, [leaf], ones, retain_graph=True)
        if _others_are_nan(of_x, token):
            return "takes a token's gradient from another"
    return None


def _others_are_nan(y: torch.Tensor, token: int) -> bool:
    is_nan = y.detach().reshape(-1, y.shape[-1]).isnan().any(dim=-1)
    is_nan[token] = False
    return bool(is_nan.any())


def _has_linears(module: nn.Module) -> bool:
    """Return whether a module has several matrices, and no stack of them."""
    dims = [p.dim() for p in module.parameters()]
    return dims.count(_MATRIX_DIM) >= _MIN_LINEARS and max(dims) <= _MATRIX_DIM


_aten = torch.ops.aten
_SHAPED = {
    *(_aten.view.default, _aten._unsafe_view.default, _aten.t.default, _aten.detach.default),
    *(_aten.transpose.int, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.alias.default),
    *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.slice.Tensor),
    *(_aten.clone.default, _aten._to_copy.default, _aten.copy_.default, _aten.cat.default),
    *(_aten.new_empty.default, _aten.empty_like.default, _aten.zeros_like.default),
    *(_aten.expand.default, _aten.native_layer_norm.default),
}
# Products, and which argument holds the tokens.
_PRODUCTS = {
    _aten.mm.default: 0,
    _aten.mm.out: 0,
    _aten.addmm.default: 1,
    _aten.addmm.out: 1,
    _aten.addmm_.default: 1,
}
_MEANS = {_aten.mean.dim, _aten.sum.dim_IntList}
_DRAWS = torch.Tag.nondeterministic_seeded


class _WithinTokens(TorchDispatchMode):
    """Follows what modules compute from their inputs, and notes those that leave a token."""

    def __init__(self, named: dict[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._own = {name: {id(p) for p in module.parameters()} for name, module in named.items()}
        self._reached: dict[str, dict[int, torch.Tensor]] = {}  # by module: storages, kept alive
        self._active: list[str] = []
        self._calls: dict[str, list[FoundMlp]] = {name: [] for name in named}
        self._widest: dict[str, int] = {}
        self._refused: set[str] = set()

    def found(self) -> dict[str, FoundMlp]:
        """Return the modules that were called once, on tokens, and widen them inside."""
        return {
            name: calls[0]
            for name, calls in self._calls.items()
            if name not in self._refused
            and len(calls) == 1
            and self._widest.get(name, 0) > max(calls[0].x.shape[-1], calls[0].num_features)
        }

    def call(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a module and follow what it computes."""
        own = cast("Any", type(module))
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, torch.Tensor) or x.dim() < _MATRIX_DIM or name in self._active:
            self._refused.add(name)
            return own.forward(module, *args, **kwargs)
        self._reached[name] = {x.untyped_storage()._cdata: x}
        self._active.append(name)
        try:
            y = own.forward(module, x)
        finally:
            self._active.pop()
            self._reached.pop(name)
        if isinstance(y, torch.Tensor) and y.shape[:-1] == x.shape[:-1] and y.dtype == x.dtype:
            one = FoundMlp(x=x.detach().clone(), num_features=y.shape[-1])
            self._calls[name].append(one)
        else:
            self._refused.add(name)
        return y

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and judge it for each module that it is a part of."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.prim.device.default:  # asked of fake tensors
            return out
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        results = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        for name in self._active:
            reached = self._reached[name]
            leaves = [t if t._base is None else t._base for t in given if t.requires_grad]
            if any(leaf.is_leaf and id(leaf) not in self._own[name] for leaf in leaves):
                self._refused.add(name)  # a gradient would be lost
            if not any(_key(t) in reached for t in given):
                if _DRAWS in func.tags:
                    self._refused.add(name)
                continue
            if not _is_within_tokens(func, args, reached):
                self._refused.add(name)
            reached |= {_key(t): t for t in results}  # what is written to is returned too
            width = max((t.shape[-1] for t in results if t.dim()), default=0)
            self._widest[name] = max(self._widest.get(name, 0), width)
        return out


def _key(tensor: torch.Tensor) -> int:
    return cast("int", tensor.untyped_storage()._cdata)


def _is_within_tokens(func: Any, args: Sequence[Any], reached: dict[int, torch.Tensor]) -> bool:
    """Return whether an operation keeps tokens, its rows, apart."""
    if _DRAWS in func.tags:
        return False
    if func in _PRODUCTS:
        factors = args[_PRODUCTS[func] : _PRODUCTS[func] + 2]
        return _key(factors[0]) in reached and _key(factors[1]) not in reached
    if func in _MEANS:
        return list(args[1] or ()) in ([-1], [args[0].dim() - 1])
    return func in _SHAPED or torch.Tag.pointwise in func.tags


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
