"""Which rows belong to which expert, and the products of rows with their own expert's matrix.

T tokens, C experts chosen per token, S = T * C routed rows, E experts, K and N features, R rank.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How the choices of all tokens become rows sorted by expert, and back.

    Attributes:
        choice_S: Index of each row among the T * C choices.
        token_S: Token of each row.
        expert_S: Expert of each row.
        row_TC: Row of each token's choice.
        end_E: Where each expert's rows end, int32.
    """

    choice_S: torch.Tensor
    token_S: torch.Tensor
    expert_S: torch.Tensor
    row_TC: torch.Tensor
    end_E: torch.Tensor

    def spread(self, hidden_TK: torch.Tensor) -> torch.Tensor:
        """Give each row its token's features."""
        return hidden_TK.index_select(0, self.token_S)

    def gather(self, rows_SK: torch.Tensor) -> torch.Tensor:
        """Sum each token's rows, without copying them to token order."""
        return F.embedding_bag(self.row_TC, rows_SK, mode="sum")


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
