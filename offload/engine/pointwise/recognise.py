"""Finds the norms, rotations and gated MLPs of a layer by what they compute.

Lists of model types would be long, and wrong for the next model. So a part of a layer is replaced
only where its own forward and gradients, on random inputs up to extreme sizes, are those of
`reference`, and where it takes no decision by the number or the values of its tokens: a proof sees
few of them. What cannot be proven keeps the model's own code.

A proof runs the module's code on a twin: the same attributes, but weights of its own. So it reads
no weight, and takes as little for a model without values. A linear layer's twin returns a tensor
that was drawn before, and notes what it was handed.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from types import FunctionType
from typing import Any, cast

import torch
from torch import nn

from offload.engine.decisions import takes_decisions
from offload.engine.internals import unset_fake_temporarily
from offload.engine.pointwise import reference
from offload.engine.pointwise.reference import CURVES, Curve

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_FEATURES = 16384  # of a norm: a program holds whole rows
NUM_ROWS = 24
SCALES = (0.0, 1e-20, 1e-6, 1e-3, 1e-2, 0.1, 1.0, 1.0, 1.0, 10.0, 100.0, 1e4)
FP32_ERROR, FP64_ERROR = 4e-6, 1e-12  # relative, of values and of gradients
ROTARY_ARGUMENTS = ("q", "k", "cos", "sin")
_MODES = (True, False)  # training or not
_RENAMING = "transformers.utils.deprecation"  # the module of the wrapper that renames arguments
# Of a proof's failure: own code may do anything with a twin.
FAILURES = (TypeError, ValueError, LookupError, AttributeError, RuntimeError, ArithmeticError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """An RMSNorm; see `reference.norm`."""

    eps: float
    offset: float
    is_cast_first: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """The functions among a module's globals that rotate queries and keys."""

    name: str  # what the module's forward calls it
    # The types of queries and of angles for which it was proven.
    dtypes: frozenset[tuple[torch.dtype, torch.dtype]]
    is_partial: bool  # whether features without an angle pass through
    # The children that norm what it rotates, queries first, if nothing else reads their results.
    norms: tuple[str, str] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedMlp:
    """An MLP: down(curve(gate(x)) * up(x))."""

    # Names of the linears that read x, in the order in which they are called.
    first: tuple[str, str]
    gate: str  # the name of the one whose output is curved
    down: str  # the name of the linear that follows
    curve: Curve  # the activation


def find_norm(module: nn.Module) -> Norm | None:
    """Return what a module computes if it is an RMSNorm with a frozen weight."""
    parameters = list(module.parameters(recurse=False))
    (weight,) = parameters if len(parameters) == 1 else (None,)
    if weight is None or not _is_leaf(module) or _has_tensors(module.buffers) or weight.dim() != 1:
        return None
    if weight.requires_grad or weight.dtype not in DTYPES or len(weight) > MAX_FEATURES:
        return None
    numbers = {x for x in vars(module).values() if isinstance(x, float)}
    forms = [
        Norm(eps=eps, offset=offset, is_cast_first=is_cast_first)
        for eps, offset, is_cast_first in product(sorted(numbers), (0.0, 1.0), (True, False))
    ]
    with _proving():
        found = {_proven_norm(module, len(weight), forms, is_training=is_on) for is_on in _MODES}
    return found.pop() if len(found) == 1 else None


def find_rotary(module: nn.Module) -> Rotary | None:
    """Return the function with which a module's own forward rotates queries and keys."""
    forward = own_forward(type(module))
    if not isinstance(forward, FunctionType) or "forward" in vars(module):
        return None
    source = None if hasattr(forward, "__wrapped__") else _source_of(forward)
    if source is None or _writes_globals(source):  # its copy would write to a copy of them
        return None
    for name, function in inspect.getclosurevars(forward).globals.items():
        if isinstance(function, FunctionType) and _takes_angles(function):
            found = _proven_rotary(function)
            if found is not None:
                norms = _norms_before(type(module), source, name)
                return Rotary(name=name, dtypes=found[0], is_partial=found[1], norms=norms)
    return None


def own_forward(kind: type[nn.Module]) -> Any:
    """Return the forward of a class, within wrappers of transformers that rename arguments."""

    def is_own(function: Any) -> bool:
        return getattr(function, "__globals__", {}).get("__name__") != _RENAMING

    return inspect.unwrap(kind.forward, stop=is_own)


def renamed_arguments(kind: type[nn.Module]) -> dict[str, str]:
    """Return what those wrappers rename, by old name."""
    names, forward = {}, cast("Any", kind.forward)
    while forward is not own_forward(kind):
        settings = inspect.getclosurevars(forward).nonlocals
        names[settings["old_name"]] = settings["new_name"] or settings["old_name"]
        forward = forward.__wrapped__
    return names


def _source_of(function: FunctionType) -> ast.FunctionDef | None:
    try:
        (source,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, ValueError):
        return None
    return source if isinstance(source, ast.FunctionDef) else None


def _norms_before(
    kind: type[nn.Module], function: ast.FunctionDef, rotary: str
) -> tuple[str, str] | None:
    """Return the children whose results a forward rotates and nothing else reads; None if unsure.

    Known is straight code alone, in the body of the forward itself:

        q = self.one(...).transpose(1, 2)
        k = self.other(...).transpose(1, 2)
        q, k = rotary(q, k, ...)

    Transpositions may be missing. Other assignments may come in between if they name neither q, k,
    the children nor the function, and write nothing in place. No other code of the class names the
    children.
    """
    calls = [x for x in function.body if _rotated_names(x, rotary) is not None]
    if len(calls) != 1 or _num_named(function, rotary) != 1:
        return None
    before = function.body[: function.body.index(calls[0])]
    norms = []
    for name in _rotated_names(calls[0], rotary) or ():
        naming = [i for i, x in enumerate(before) if _num_named(x, name)]
        child = _normed_by(before[naming[-1]], name) if naming else None
        if child is None or _num_named(function, child) != 1 or _names_elsewhere(kind, child):
            return None
        if any(map(_writes_in_place, before[naming[-1] + 1 :])):
            return None
        norms.append(child)
    return (norms[0], norms[1]) if norms[0] != norms[1] else None


def _names_elsewhere(kind: type[nn.Module], child: str) -> bool:
    """Return whether code of a class names a child, other than its forward and constructors."""
    own = [base for base in kind.__mro__ if not issubclass(nn.Module, base)]
    functions = [
        inspect.unwrap(getattr(x, "fget", None) or getattr(x, "__func__", None) or x)
        for base in own
        for name, x in vars(base).items()
        if name != "__init__" and callable(getattr(x, "fget", None) or x)
    ]
    others = (x for x in functions if isinstance(x, FunctionType) and x != own_forward(kind))
    return any((code := _source_of(x)) is None or _num_named(code, child) for x in others)


def _writes_in_place(statement: ast.stmt) -> bool:
    """Return whether a statement may change a tensor: it is no assignment to names, or calls x_."""
    if not isinstance(statement, ast.Assign):
        return True
    targets = [x for target in statement.targets for x in ast.walk(target)]
    attributes = [x.attr for x in ast.walk(statement) if isinstance(x, ast.Attribute)]
    return any(isinstance(x, (ast.Subscript, ast.Attribute)) for x in targets) or any(
        name.endswith("_") for name in attributes
    )


def _rotated_names(statement: ast.stmt, rotary: str) -> tuple[str, str] | None:
    """Return q and k of `q, k = rotary(q, k, ...)`."""
    match statement:
        case ast.Assign(
            targets=[ast.Tuple(elts=[ast.Name(id=to_q), ast.Name(id=to_k)])],
            value=ast.Call(
                func=ast.Name(id=function), args=[ast.Name(id=q), ast.Name(id=k), *others]
            ),
        ) if (to_q, to_k, function) == (q, k, rotary) and q != k:
            named = {x.id for one in others for x in ast.walk(one) if isinstance(x, ast.Name)}
            return None if {q, k} & named else (q, k)
    return None


def _normed_by(statement: ast.stmt, name: str) -> str | None:
    """Return the child of `name = self.child(...)`, or of that transposed from tokens to heads."""
    match statement:
        case ast.Assign(targets=[ast.Name(id=target)], value=ast.Call() as value) if target == name:
            match value:
                case ast.Call(
                    func=ast.Attribute(attr="transpose", value=ast.Call() as normed),
                    args=[ast.Constant(value=1), ast.Constant(value=2)],
                    keywords=[],
                ):
                    value = normed
            match value:
                case ast.Call(
                    func=ast.Attribute(attr=child, value=ast.Name(id="self")),
                    args=[_],
                    keywords=[],
                ):
                    return child
    return None


def _num_named(code: ast.AST, name: str) -> int:
    """Return how often code names a variable or an attribute."""
    return sum(name in (getattr(x, "id", None), getattr(x, "attr", None)) for x in ast.walk(code))


@cache
def _proven_rotary(
    function: FunctionType,
) -> tuple[frozenset[tuple[torch.dtype, torch.dtype]], bool] | None:
    """Return for which dtypes a function rotates, and whether other features pass; None if not."""
    with _proving():
        dtypes = frozenset(
            (of_q, of_angles)
            for of_q, of_angles in product(DTYPES, DTYPES)
            if _rotates(function, of_q, of_angles, width=8, rotated=8)
        )
        is_partial = all(_rotates(function, *x, width=12, rotated=8) for x in dtypes)
    return (dtypes, is_partial) if dtypes else None


def find_gated_mlp(module: nn.Module) -> GatedMlp | None:
    """Return what a module computes if it is a gated MLP of three linear layers."""
    children = dict(module.named_children())
    linears = {name: child for name, child in children.items() if _features(child) is not None}
    others = [child for name, child in children.items() if name not in linears]
    if len(linears) != 3 or _has_tensors(module.parameters) or _has_tensors(module.buffers):
        return None
    if "forward" in vars(module):
        return None
    if not all(_is_leaf(child) and not _has_tensors(child.parameters) for child in others):
        return None
    with _proving():
        found = {_proven_mlp(module, linears, is_training=is_on) for is_on in _MODES}
    return found.pop() if len(found) == 1 else None


# ------------------------------------------------------------------------------------------ proofs


@contextmanager
def _proving() -> Iterator[None]:
    """Compute with values, on the CPU and without a trace in torch's generator."""
    with (
        unset_fake_temporarily(),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
    ):
        torch.manual_seed(0)
        yield


def _has_tensors(of: Callable[..., Iterator[torch.Tensor]]) -> bool:
    """Return whether a module has parameters, or buffers, of its own."""
    return next(of(recurse=False), None) is not None


def twin_of(
    module: nn.Module, parts: Mapping[str, nn.Module | nn.Parameter], **changed: object
) -> Any:
    """Return a module of the same code and attributes, with other parts, and without hooks."""
    twin = nn.Module.__new__(type(module))
    nn.Module.__init__(twin)
    empty = dict(vars(twin))
    vars(twin).update({name: x for name, x in vars(module).items() if name not in empty})
    vars(twin).update(changed)
    for name, part in parts.items():
        setattr(twin, name, part)
    return twin


def _is_leaf(module: nn.Module) -> bool:
    return next(module.children(), None) is None and "forward" not in vars(module)


def _drawn(num_features: int, dtype: torch.dtype) -> torch.Tensor:
    """Draw rows from tiny to large, and rows of which one feature outweighs all others."""
    scales = torch.tensor([SCALES[i % len(SCALES)] for i in range(NUM_ROWS)], dtype=torch.float64)
    x = torch.randn(1, NUM_ROWS, num_features, dtype=torch.float64) * scales.unsqueeze(-1)
    x[0, ::5, 0] *= 30
    return x.to(dtype)


def _is_close(found: torch.Tensor, expected: torch.Tensor, error: float) -> bool:
    """Compare row by row, so that no large row hides a small one."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    found, expected = found.detach().double(), expected.double()
    size = expected.abs().amax(-1, keepdim=True)
    return bool(((found - expected).abs() <= error * size).all())


def is_close(found: torch.Tensor, expected: torch.Tensor, num_errors: int) -> bool:
    """Return whether two results of a dtype are some rounding errors of it apart, in each row."""
    return _is_close(found, expected, num_errors * _error_of(expected.dtype))


def _error_of(dtype: torch.dtype) -> float:
    return FP32_ERROR if dtype == torch.float32 else 2 * torch.finfo(dtype).eps


def _proven_norm(
    module: nn.Module, num_features: int, forms: Sequence[Norm], *, is_training: bool
) -> Norm | None:
    """Return the form whose values are the module's in all dtypes, with the least bits apart."""
    distance: dict[Norm, float] = dict.fromkeys(forms, 0.0)
    ((name, _),) = module.named_parameters(recurse=False)
    for dtype in DTYPES[::2]:
        weight = (1 + 0.3 * torch.randn(num_features)).to(dtype)
        frozen = nn.Parameter(weight, requires_grad=False)
        twin = twin_of(module, {name: frozen}, training=is_training)
        if takes_decisions(partial(_normed, twin, num_features, dtype)):
            return None
        x = _drawn(num_features, dtype).requires_grad_()
        gradient = torch.randn_like(x)
        try:
            y = type(module).forward(twin, x)
            (of_x,) = torch.autograd.grad(y, x, gradient)
        except FAILURES:
            return None
        given = x.detach()
        for form in list(distance):
            expected, inverse = reference.norm(
                given, weight, form.eps, form.offset, form.is_cast_first
            )
            back = reference.norm_backward(gradient, given, weight, inverse, form.offset)
            error = _error_of(dtype)
            if _is_close(y, expected, error) and _is_close(of_x, back, 4 * error):
                distance[form] += float((y.detach().double() - expected.double()).abs().sum())
            else:
                del distance[form]
    return min(distance, key=lambda form: distance[form]) if distance else None


def _normed(twin: nn.Module, num_features: int, dtype: torch.dtype, *rows: int) -> None:
    type(twin).forward(twin, torch.empty(*rows, num_features, dtype=dtype))


def _writes_globals(code: ast.AST) -> bool:
    """Return whether code writes global variables, or hands all of them on."""
    return _num_named(code, "globals") > 0 or any(isinstance(x, ast.Global) for x in ast.walk(code))


def _takes_angles(function: FunctionType) -> bool:
    return tuple(inspect.signature(function).parameters)[:4] == ROTARY_ARGUMENTS


def _rotates(
    function: Callable[..., Any],
    dtype: torch.dtype,
    of_angles: torch.dtype,
    *,
    width: int,
    rotated: int,
) -> bool:
    """Return whether a function of queries, keys and angles is the reference's."""

    def symbolic(num_b: int, num_t: int) -> None:
        q, k = (torch.empty(num_b, num_t, n, width, dtype=dtype).transpose(1, 2) for n in (3, 1))
        for rows in (num_b, 1):
            cos, sin = (torch.empty(rows, num_t, rotated, dtype=of_angles) for _ in range(2))
            function(q, k, cos, sin)

    for num_b in (1, 2):
        q = torch.randn(2, 5, 3, width).to(dtype).transpose(1, 2).requires_grad_()
        k = torch.randn(2, 5, 1, width).to(dtype).transpose(1, 2).requires_grad_()
        cos, sin = (torch.randn(num_b, 5, rotated).to(of_angles) for _ in range(2))
        try:
            found = function(q, k, cos, sin)
            gradients = [torch.randn_like(x) for x in found]
            backs = torch.autograd.grad(found, (q, k), gradients)
        except FAILURES:
            return False
        expected = reference.rotate(q.detach(), k.detach(), cos, sin, False)  # noqa: FBT003
        of_q, of_k = gradients
        turned = reference.rotate(of_q, of_k, cos, sin, True)  # noqa: FBT003
        pairs = zip((*found, *backs), (*expected, *turned), strict=True)
        if not all(_is_close(a, b, 4 * _error_of(dtype)) for a, b in pairs):
            return False
    return not takes_decisions(symbolic)


def _features(module: nn.Module) -> tuple[int, int] | None:
    """Return the features that go in and out of a linear layer, adapted or not."""
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    return sizes if all(isinstance(x, int) for x in sizes) else None  # type: ignore[return-value]


def drawn_mlp(
    module: nn.Module, form: GatedMlp, *, is_training: bool = True
) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    """Return an MLP's own code between its linears: from the outputs of the first, by name."""
    others = {
        name: twin_of(child, {}, training=is_training)
        for name, child in module.named_children()
        if name not in (*form.first, form.down)
    }

    def compute(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        (gate, *_) = outputs.values()
        twins = {name: _Linear(drawn, []) for name, drawn in outputs.items()}
        down = _Linear(gate, [])
        parts = {**others, **twins, form.down: down}
        twin = twin_of(module, parts, training=is_training)
        type(module).forward(twin, gate)
        assert down.given is not None
        return down.given

    return compute


class _Linear(nn.Module):
    """A linear layer's twin: returns what was drawn, and notes what it was handed."""

    def __init__(self, drawn: torch.Tensor, calls: list["_Linear"]) -> None:
        super().__init__()
        self.drawn, self.calls = drawn, calls
        self.given: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.given = x
        self.calls.append(self)
        return self.drawn


def _proven_mlp(
    module: nn.Module, linears: Mapping[str, nn.Module], *, is_training: bool
) -> GatedMlp | None:
    calls: list[_Linear] = []
    twins: dict[str, _Linear] = {}
    for name, linear in linears.items():
        _, features = _features(linear) or (0, 0)
        drawn = _drawn(features, torch.float64).requires_grad_()
        twins[name] = _Linear(drawn, calls)
    others = {
        name: twin_of(child, {}, training=is_training)
        for name, child in module.named_children()
        if name not in linears
    }
    twin = twin_of(module, {**others, **twins}, training=is_training)
    x = torch.randn(1, NUM_ROWS, _widest_input(linears), dtype=torch.float64)
    try:
        y = type(module).forward(twin, x)
    except FAILURES:
        return None
    if len(calls) != 3 or set(calls) != set(twins.values()):
        return None
    (first, second, down), names = calls, {twin: name for name, twin in twins.items()}
    if first.given is not x or second.given is not x or y is not down.drawn:
        return None
    for (gate, up), curve in product(((first, second), (second, first)), CURVES):
        if gate.drawn.shape == up.drawn.shape and _gates(down.given, gate.drawn, up.drawn, curve):
            form = GatedMlp(
                first=(names[first], names[second]), gate=names[gate], down=names[down], curve=curve
            )
            own = drawn_mlp(module, form, is_training=is_training)
            return None if takes_decisions(partial(_gated, own, form, gate)) else form
    return None


def _gated(
    own: Callable[[Mapping[str, torch.Tensor]], torch.Tensor],
    form: GatedMlp,
    like: _Linear,
    *rows: int,
) -> None:
    own({name: torch.empty(*rows, like.drawn.shape[-1]) for name in form.first})


def _widest_input(linears: Mapping[str, nn.Module]) -> int:
    return max((_features(linear) or (0, 0))[0] for linear in linears.values())


def _gates(found: torch.Tensor | None, gate: torch.Tensor, up: torch.Tensor, curve: Curve) -> bool:
    expected = reference.gated(gate.detach(), up.detach(), curve)
    if found is None or not _is_close(found, expected, FP64_ERROR):
        return False
    gradient = torch.randn_like(found)
    try:
        backs = torch.autograd.grad(found, (gate, up), gradient, retain_graph=True)
    except FAILURES:
        return False
    ours = reference.gated_backward(gradient, gate.detach(), up.detach(), curve)
    return all(_is_close(a, b, FP64_ERROR) for a, b in zip(backs, ours, strict=True))
