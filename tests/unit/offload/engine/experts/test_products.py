"""Products of rows with their own expert's matrix on a CPU."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload.engine.experts.autotune import use
from offload.engine.experts.products import FEW_SIZES, Loop, route
from tests.parity.architectures import SLACK, rel_error
from tests.parity.experts import KINDS, SIZES, Holder, step

NUM_EXPERTS, NUM_TOKENS, K, N = 4, 70, 24, 16


class Sizes(TorchDispatchMode):
    """Notes with how many rows matrices are multiplied, or over how many they are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_):
            left = args[-2]
            self.rows.add(left.shape[1] if left.stride(0) == 1 else left.shape[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "is_even"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)]
)
def test_few_different_numbers_of_rows_are_multiplied_in_16_bits(
    dtype: torch.dtype, is_even: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    expert_TC = torch.randint(NUM_EXPERTS - 1, (NUM_TOKENS, 2), generator=generator)
    products = Loop(route(expert_TC, num_experts=NUM_EXPERTS))
    hidden_TK = torch.randn(NUM_TOKENS, K, generator=generator).to(dtype)
    weight_EKN = torch.randn(NUM_EXPERTS, K, N, generator=generator).to(dtype)
    with Sizes() as sizes:
        up_SN = products.sum((products.rows(hidden_TK), weight_EKN))
        down_TK = products.sum(
            (up_SN, weight_EKN.mT), (up_SN, weight_EKN.mT.contiguous()), to_tokens=True
        )
        outer_EKN = products.outer(products.rows(hidden_TK), up_SN)
    assert sizes.rows
    assert all(size % FEW_SIZES == 0 for size in sizes.rows) == is_even
    for i in range(NUM_EXPERTS):
        rows_K = hidden_TK[torch.nonzero(expert_TC == i)[:, 0]].double()
        rows_N = rows_K @ weight_EKN[i].double()
        torch.testing.assert_close(
            outer_EKN[i].double(), rows_K.T @ rows_N, rtol=0.05, atol=0.05 * float(K)
        )
    up_TCN = (hidden_TK[:, None, None].double() @ weight_EKN[expert_TC].double())[:, :, 0]
    down = 2 * (up_TCN[:, :, None] @ weight_EKN.mT[expert_TC].double()).sum(dim=(1, 2))
    assert (down_TK.double() - down).norm() < 0.01 * down.norm()


@pytest.mark.parametrize("kind", ["gated", "transposed, biased, clamped", "without gate"])
def test_experts_without_adapters_are_as_close_to_the_truth_as_transformers_own(kind: str) -> None:
    """Grade REORDER: in 16 bits a CPU multiplies them by our products."""
    squares = {"ours": 0.0, "own": 0.0}
    for seed in range(32):
        torch.manual_seed(seed)
        holder = Holder(KINDS[kind][0], "eager", limit=7.0, sizes=SIZES).bfloat16()
        own = step(holder, "mixed", torch.bfloat16, seed=seed)
        use("eager", holder.experts)
        ours = step(holder, "mixed", torch.bfloat16, seed=seed)
        assert not torch.equal(ours["weight"], own["weight"]), "by transformers' loop again"
        true = step(holder.double(), "mixed", torch.bfloat16, seed=seed, precision=torch.float64)
        squares["ours"] += rel_error(ours, true) ** 2
        squares["own"] += rel_error(own, true) ** 2
        if seed >= 3 and squares["ours"] <= SLACK**2 * squares["own"]:
            return
    pytest.fail(f"squared errors {squares}, the limit is {SLACK} in error")
