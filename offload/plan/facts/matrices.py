"""The matrices of a layer that Muon orthogonalises, each by itself.

A fused projection holds several, and so does a stack of experts. What is stored transposed has the
same matrices: the orthogonal factor of a transpose is the transpose of the factor.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from offload.errors import UnsupportedModelError
from offload.plan.facts.facts import LayerFacts

GATE_UP, QKV, OUTPUT = "gate_up_proj", "qkv_proj", "o_proj"
_BY_HEAD = re.compile(r"query_key_value|c_attn|Wqkv|attn_qkv|W_pack|qkv|in_proj\w*")


@dataclass(frozen=True, kw_only=True, slots=True)
class MatrixKind:
    """Matrices of one size in a layer.

    Attributes:
        rows: Of each.
        columns: Of each.
        number: How many.
    """

    rows: int
    columns: int
    number: int


def blocks_of(name: str, num_rows: int, *, num_queries: int) -> tuple[int, ...]:
    """Return the rows of each matrix in a projection, in order.

    Args:
        name: Last part of its name.
        num_rows: Its features out.
        num_queries: Features that the output projection of the same attention reads.
    """
    if name == GATE_UP:
        return (num_rows // 2,) * 2
    if name == QKV:
        num_keys = (num_rows - num_queries) // 2
        return (num_queries, num_keys, num_keys)
    return (num_rows,)


def require_separable(names: Iterable[str]) -> None:
    """Refuse projections whose matrices lie in an order that only their family knows.

    Args:
        names: Last parts of projections' names.

    Raises:
        UnsupportedModelError: There is one.
    """
    for name in names:
        if _BY_HEAD.fullmatch(name):
            raise UnsupportedModelError(
                f"train.optimizer: muon, and {name} holds several matrices",
                limit="each is orthogonalised by itself, and their rows may be mixed by heads",
                hint="`train.optimizer: adamw`",
            )


def layer_matrices(layer: LayerFacts) -> tuple[MatrixKind, ...]:
    """Return the matrices of a layer.

    Raises:
        UnsupportedModelError: See `require_separable`.
    """
    require_separable(linear.name for linear in layer.linears)
    num_queries = next((x.d_in for x in layer.linears if x.name == OUTPUT), 0)
    return tuple(
        MatrixKind(rows=rows, columns=linear.d_in, number=linear.num_experts)
        for linear in layer.linears
        for rows in blocks_of(linear.name, linear.d_out, num_queries=num_queries)
    )
