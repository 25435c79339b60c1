"""Products of rows with their own expert's matrix: two implementations.

S rows, sorted by expert (`routing.py`) so that each expert's are one slice; E experts; K and N
features; T tokens.

- `Loop`: one product per expert, for a CPU. It needs the ends of the slices on the host; with a GPU
  the host would have to wait for them. Rows are gathered from their tokens, and added to them, one
  slice at a time: S rows at once would be new memory, whose page faults cost more than the copies.
- `Grouped`: `torch.nn.functional.grouped_mm`, which reads the ends on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn import functional as F

from offload.engine.visit_cache import VISIT_CACHE
from offload.plan.memory.visit import ROW_BYTES


def goes_through_interface(module: nn.Module) -> bool:
    """Return whether transformers lets the expert kernels of a module be selected."""
    return {"has_gate", "has_bias", "is_transposed", "config"} <= set(vars(module))


def reason_outside(experts: nn.Module) -> str | None:
    """Return which computation of a module bypasses transformers' experts interface, if any."""
    own = vars(experts)
    if not goes_through_interface(experts):
        return "does not go through transformers' experts interface"
    # Older versions of transformers have neither of these.
    if own.get("has_post_expert_norm"):
        return "has a norm after each expert"
    if own.get("_is_expert_parallel"):
        return "shares its experts with other devices"
    return None


# ---------------------------------------------------------------------------------------------
# Which rows belong to which expert, and the products of rows with their own expert's matrix.
#
# T tokens, C experts chosen per token, S = T * C routed rows, E experts, K and N features, R rank.


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How the choices of all tokens become rows sorted by expert, and back."""

    choice_S: torch.Tensor  # index of each row among the T * C choices
    token_S: torch.Tensor  # token of each row
    expert_S: torch.Tensor  # expert of each row
    row_TC: torch.Tensor  # row of each token's choice
    end_E: torch.Tensor  # where each expert's rows end, int32


def route(expert_TC: torch.Tensor, *, num_experts: int) -> Routing:
    """Sort the choices by expert; the host does not wait."""
    expert_S, choice_S = torch.sort(expert_TC.flatten(), stable=True)
    row_S = torch.empty_like(choice_S)
    row_S[choice_S] = torch.arange(choice_S.numel(), device=choice_S.device)
    experts_E = torch.arange(num_experts, device=choice_S.device, dtype=expert_S.dtype)
    return Routing(
        choice_S=choice_S,
        token_S=choice_S // expert_TC.shape[1],
        expert_S=expert_S,
        row_TC=row_S.view_as(expert_TC),
        end_E=torch.searchsorted(expert_S, experts_E, right=True, out_int32=True),
    )


GateName = Literal["silu", "clamped_swiglu", "gelu_tanh"]
GATE_NAMES = get_args(GateName)  # in the order of the kernels' numbers


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """How the up projection's output becomes an activation."""

    name: GateName  # the gate's name in `kernels.gate_parts`
    is_interleaved: bool  # whether gate and up columns alternate, or all gates come first
    alpha: float = 1.0  # factor inside the sigmoid of clamped_swiglu
    limit: float = 0.0  # limit that clamped_swiglu clamps its inputs to

    def __call__(self, both_SF: torch.Tensor) -> torch.Tensor:
        """Compute it with torch."""
        if self.is_interleaved:
            gate, up = both_SF[..., ::2], both_SF[..., 1::2]
        else:
            gate, up = both_SF.chunk(2, dim=-1)
        if self.name == "silu":
            return F.silu(gate) * up
        if self.name == "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


GATES: WeakKeyDictionary[nn.Module, Gate | None] = WeakKeyDictionary()


def gate_of(experts: Any) -> Gate | None:
    """Return the gate of a module of experts, found by its results; None if it is unknown.

    Matching names would need a case for each model.
    """
    if experts not in GATES:
        GATES[experts] = _find_gate(experts) if experts.has_gate else None
    return GATES[experts]


def _find_gate(experts: Any) -> Gate | None:
    clamped = {name: float(getattr(experts, name, 0.0)) for name in ("alpha", "limit")}
    span = torch.linspace(-12, 12, 49, dtype=torch.float64)
    both_SF = torch.stack(torch.meshgrid(span, span, indexing="ij"), -1).view(1, -1)
    with torch.no_grad():
        computed = experts._apply_gate(both_SF)
        for is_interleaved in (False, True):
            for gate in (
                Gate(name="silu", is_interleaved=is_interleaved),
                Gate(name="gelu_tanh", is_interleaved=is_interleaved),
                Gate(name="clamped_swiglu", is_interleaved=is_interleaved, **clamped),
            ):
                if torch.allclose(gate(both_SF), computed, rtol=1e-6, atol=1e-9):
                    return gate
    return None


# ---------------------------------------------------------------------------------------------
# A low-rank branch alongside the matrices of one projection, for all experts.
#
# E experts, K features in, N out, R rank.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Branch:
    """The adapter of one projection of all experts: scaling * (x A) B."""

    a_ERK: torch.Tensor  # a of each expert, laid out as in a linear layer
    b_ERN: torch.Tensor  # B of each expert, transposed
    scaling: float  # a factor
    key: object = None  # names A and B in the cache of a visit; None casts them at each call

    @staticmethod
    def join(branches: Sequence["Branch"]) -> "Branch":
        """Return the sum of several adapters as one of a higher rank."""
        if len(branches) == 1:
            return branches[0]
        keys = tuple(branch.key for branch in branches)
        return Branch(
            a_ERK=torch.cat([branch.a_ERK for branch in branches], dim=1),
            b_ERN=torch.cat([branch.scaling * branch.b_ERN for branch in branches], dim=1),
            scaling=1.0,
            key=None if None in keys else keys,
        )

    def cast(self, dtype: torch.dtype) -> "Branch":
        """Return it in a dtype, with a layout for products and without its graph."""
        with torch.no_grad():
            if self.key is None:
                return self._laid_out(dtype)
            return VISIT_CACHE.once((self.key, dtype), lambda: self._laid_out(dtype))

    def fit(self, dtype: torch.dtype) -> "Branch":
        """Return it in a dtype, with a layout for products, its rank padded to a whole row."""
        cast = self._laid_out(dtype)
        missing = -cast.a_ERK.shape[1] % (ROW_BYTES // dtype.itemsize)
        if not missing:
            return cast
        return replace(
            cast,
            a_ERK=F.pad(cast.a_ERK, (0, 0, 0, missing)),
            b_ERN=F.pad(cast.b_ERN, (0, 0, 0, missing)),
        )

    def _laid_out(self, dtype: torch.dtype) -> "Branch":
        return replace(
            self,
            a_ERK=self.a_ERK.to(dtype, memory_format=torch.contiguous_format).contiguous(),
            b_ERN=self.b_ERN.to(dtype, memory_format=torch.contiguous_format).contiguous(),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Taken:
    """Rows that are gathered from their tokens on demand, one expert at a time."""

    hidden_TK: torch.Tensor
    tokens: Sequence[torch.Tensor]

    def __getitem__(self, expert: int) -> torch.Tensor:
        """Return an expert's rows."""
        return self.hidden_TK.index_select(0, self.tokens[expert])


FEW_SIZES = 32  # rows: a slice is padded to a multiple of it, a smaller one to a power of two
Rows = torch.Tensor | Taken
Pair = tuple[Rows, torch.Tensor]
Slices = Sequence[torch.Tensor] | Taken


class Products(Protocol):
    """An implementation of products of rows that are sorted by expert."""

    num_tokens: int  # whose rows these are

    def __init__(self, routing: Routing) -> None:
        """Keep the routing of the rows."""

    def rows(self, hidden_TK: torch.Tensor) -> Rows:
        """Return the rows of the tokens: each row is its token's features."""

    def sum(self, *pairs: Pair, to_tokens: bool = False) -> torch.Tensor:
        """Return the sum of rows (S, K) @ their expert's matrix of (E, K, N), for all pairs.

        The smaller pair should come first: the next is added to it, which rounds only once where a
        library can accumulate in place.

        Args:
            pairs: Rows and matrices.
            to_tokens: Whether to add up each token's rows: (T, N) rather than (S, N).
        """

    def outer(self, left: Rows, right: Rows) -> torch.Tensor:
        """Return left^T @ right over each expert's rows, (E, K, N); zero where it has none."""


class Loop:
    """One product per expert."""

    def __init__(self, routing: Routing) -> None:
        """Read how many rows each expert has."""
        self._sizes = self._read_sizes(routing)
        self._used = [i for i, size in enumerate(self._sizes) if size]
        self._tokens = routing.token_S.split(self._sizes)
        self._shape = routing.row_TC.shape
        self.num_tokens = len(routing.row_TC)

    @staticmethod
    def _read_sizes(routing: Routing) -> list[int]:
        end_E = routing.end_E
        sizes: list[int] = torch.diff(end_E, prepend=end_E.new_zeros(1)).tolist()
        return sizes

    def rows(self, hidden_TK: torch.Tensor) -> Rows:
        """Copy nothing; rows are gathered expert by expert."""
        return Taken(hidden_TK=hidden_TK, tokens=self._tokens)

    def sum(self, *pairs: Pair, to_tokens: bool = False) -> torch.Tensor:
        """Add in place; tokens at least in float32 because several experts add to one."""
        slices = [(self._split(rows), matrix_EKN.unbind()) for rows, matrix_EKN in pairs]
        like, num_features = pairs[0][1], pairs[0][1].shape[2]
        if to_tokens:
            dtype = torch.promote_types(like.dtype, torch.float32)
            out_TN = like.new_zeros((self._shape[0], num_features), dtype=dtype)
            for i in self._used:
                product = _sum_of(slices, i)[: self._sizes[i]]
                out_TN.index_add_(0, self._tokens[i], product.to(dtype))
            return out_TN.to(like.dtype)
        out_SN = like.new_empty((self._shape.numel(), num_features))
        outs = out_SN.split(self._sizes)
        for i in self._used:
            product = _sum_of(slices, i, out=outs[i])
            if product is not outs[i]:
                outs[i].copy_(product[: self._sizes[i]])
        return out_SN

    def outer(self, left: Rows, right: Rows) -> torch.Tensor:
        """Multiply both sides expert by expert."""
        shape = (len(self._sizes), _tensor(left).shape[1], _tensor(right).shape[1])
        out_EKN = _tensor(left).new_zeros(shape)
        lefts, rights, outs = self._split(left), self._split(right), out_EKN.unbind()
        for i in self._used:
            torch.mm(_filled(lefts[i]).t(), _filled(rights[i]), out=outs[i])
        return out_EKN

    def _split(self, rows: Rows) -> Slices:
        return rows if isinstance(rows, Taken) else rows.split(self._sizes)


class Grouped:
    """torch's grouped products."""

    def __init__(self, routing: Routing) -> None:
        """Keep where each expert's rows end, on the device."""
        self._routing = routing
        self.num_tokens = len(routing.row_TC)

    def rows(self, hidden_TK: torch.Tensor) -> Rows:
        """Copy each token's features to its rows."""
        return hidden_TK.index_select(0, self._routing.token_S)

    def sum(self, *pairs: Pair, to_tokens: bool = False) -> torch.Tensor:
        """Add the results: grouped products cannot accumulate in place."""
        first, *others = (
            F.grouped_mm(_tensor(rows), matrix_EKN, offs=self._routing.end_E)
            for rows, matrix_EKN in pairs
        )
        for other in others:
            first += other
        # summed over each token's rows without copying them to token order
        return F.embedding_bag(self._routing.row_TC, first, mode="sum") if to_tokens else first

    def outer(self, left: Rows, right: Rows) -> torch.Tensor:
        """Sum over the rows.

        On Blackwell the result of an expert without rows is not always zero, see
        https://github.com/pytorch/pytorch/issues/172439, so it is overwritten with zeros.
        """
        end_E = self._routing.end_E
        out_EKN = F.grouped_mm(_tensor(left).t(), _tensor(right), offs=end_E)
        has_rows_E = torch.diff(end_E, prepend=end_E.new_zeros(1)) > 0
        return out_EKN.masked_fill_(~has_rows_E[:, None, None], 0)


def _sum_of(
    slices: Sequence[tuple[Slices, Sequence[torch.Tensor]]],
    expert: int,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of an expert's products; written to `out` if no row was padded."""
    (first, first_EKN), *others = slices
    filled = _filled(first[expert])
    is_whole = out is not None and len(out) == len(filled)
    product = torch.mm(filled, first_EKN[expert], out=out if is_whole else None)
    for rows, matrix_EKN in others:
        product.addmm_(_filled(rows[expert]), matrix_EKN[expert])
    return product


def takes_few_sizes(tensor: torch.Tensor) -> bool:
    """Return whether each row count that a tensor is multiplied with compiles its own program."""
    return tensor.is_cpu and tensor.element_size() < torch.float32.itemsize


def _filled(rows_SK: torch.Tensor) -> torch.Tensor:
    """Return rows padded to one of few sizes, if `takes_few_sizes`."""
    num = len(rows_SK)
    missing = -num % min(FEW_SIZES, 1 << (num - 1).bit_length())
    if not missing or not takes_few_sizes(rows_SK):
        return rows_SK
    return F.pad(rows_SK, (0, 0, 0, missing))


def _tensor(rows: Rows) -> torch.Tensor:
    """Return the tensor of rows, or the one they are gathered from."""
    return rows.hidden_TK if isinstance(rows, Taken) else rows
