"""Launches the kernels for one routing: sizes, tiles and output buffers.

The letters are those of kernels.py.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.engine.experts.products import GATE_NAMES, Branch, Gate, Routing
from offload.plan.time.expert_passes import LARGE_TILE_ROWS, TILE_ROWS, tile_rows

# ---------------------------------------------------------------------------------------------
# Tile sizes of a grouped product, by GPU and by the number of rows per expert.
#
# We have timed no tile yet. These are the sizes that tuning found for a similar kernel (vLLM's
# fused_moe/configs, E=128) on an A100, an RTX 4090 and an RTX 5090 up to 256 rows per expert; an
# RTX 3090 takes that of the RTX 4090, whose multiprocessors have as many registers and as much
# shared memory. On an H100 and an H200 that tuning found 128 x 256 for 64 rows and more, which
# leaves room for one program with our gate; 128 x 128 leaves room for two, of which one computes
# while the other reads and writes. tests/compiled.py reads what each tile takes from the machine
# code.

REGISTERS, MAX_REGISTERS = 65536, 255  # of a multiprocessor, and of a thread, from sm_80 to sm_120
MAX_SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024, 120: 99 * 1024}


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """A tile's size and launch settings."""

    m: int  # rows
    n: int  # columns
    k: int  # elements of the sum at a time
    num_warps: int  # groups of 32 threads that share the tile
    num_stages: int  # steps of the sum in flight, loaded before they are used

    @property
    def max_registers(self) -> int:
        """Return how many a thread may have if two programs are to share a multiprocessor."""
        return min(MAX_REGISTERS, REGISTERS // (2 * 32 * self.num_warps))

    @property
    def outer(self) -> "Blocks":
        """Return the tile of a sum over rows, whose height is only a branch's rank."""
        return replace(self, m=max(16, min(64, self.m)))

    def within(self, num_columns: int) -> "Blocks":
        """Return the tile for a matrix that may have few columns, like a branch's first factor."""
        return replace(self, n=max(16, min(self.n, 1 << (num_columns - 1).bit_length())))


INTERPRETED = Blocks(m=16, n=64, k=64, num_warps=1, num_stages=1)
FP32 = Blocks(m=32, n=32, k=16, num_warps=4, num_stages=2)  # larger ones spill on some GPUs
LOW = Blocks(m=TILE_ROWS, n=128, k=64, num_warps=4, num_stages=3)
TILES = {
    (8, 6): replace(LOW, num_warps=8),
    (8, 9): replace(LOW, num_warps=8),
    (9, 0): replace(LOW, m=LARGE_TILE_ROWS, num_warps=8),
}


def blocks_for(
    capability: tuple[int, int] | None, dtype: torch.dtype, *, rows_per_expert: int
) -> Blocks:
    """Return the tile for a GPU; None is Triton's interpreter, where small tiles are fast.

    An expert whose rows leave more than a quarter of that tile empty has a lower one.
    """
    if capability is None:
        return INTERPRETED
    if dtype is torch.float32:  # without tensor cores
        return FP32
    tile = TILES.get(capability, LOW)
    rows = tile_rows(rows_per_expert, is_large=tile.m == LARGE_TILE_ROWS)
    return tile if rows == tile.m else replace(LOW, m=rows)


MIN_DOT, MAX_RANK_BLOCK = 16, 64
MAX_LOW_BLOCK = 32  # of a rank that a large tile sums at a time: 64 would spill
LowPair = tuple[Any, Any]  # rows of a rank and their second factor, or nothing


class Launcher:
    """Launches the kernels on the current stream; the host waits for nothing."""

    def __init__(self, routing: Routing, gate: Gate, blocks: Blocks) -> None:
        # Not every machine has Triton.
        from offload.engine.experts import kernels

        self._kernels: Any = kernels
        self._routing, self._gate = routing, gate
        self._num_rows, self._num_experts = routing.token_S.numel(), routing.end_E.numel()
        self._blocks = blocks

    def beside(
        self,
        rows: torch.Tensor,
        branch: Branch | None,
        *,
        is_back: bool = False,
        is_gathered: bool = False,
    ) -> LowPair:
        """Return rows @ the branch's first factor, scaled (S, R), and its second factor."""
        if branch is None:
            return None, None
        first, second = branch.a_ERK, branch.b_ERN
        if is_back:
            first, second = second, first
        low_SR = self._multiply(
            rows,
            first.transpose(1, 2),
            (None, None),
            scaling=branch.scaling,
            is_gathered=is_gathered,
        )
        return low_SR, second

    def to_tokens(
        self, rows_SK: torch.Tensor, matrices_EKN: torch.Tensor, low: LowPair
    ) -> torch.Tensor:
        """Return rows @ their expert's matrix, summed over each token's choices, (T, N)."""
        by_choice_SN = self._multiply(rows_SK, matrices_EKN, low, is_scattered=True)
        return by_choice_SN.view(*self._routing.row_TC.shape, -1).sum(1)

    def activate(
        self,
        hidden_TD: torch.Tensor,
        matrices_EDF: torch.Tensor,
        biases_EF: torch.Tensor | None,
        low: LowPair,
        weight_TC: torch.Tensor,
        *,
        is_kept: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the down projection's input (S, F), and the gate's inputs (S, 2 F)."""
        width = matrices_EDF.shape[2] // 2
        out_SF = hidden_TD.new_empty(self._num_rows, width)
        gates_SF = hidden_TD.new_empty(self._num_rows, 2 * width) if is_kept else None
        self._launch(
            self._kernels.activate,
            self._blocks,
            num_columns=math.ceil(2 * width / self._blocks.n),
            hidden=hidden_TD,
            biases=biases_EF,
            weights=weight_TC,
            gates=gates_SF,
            out=out_SF,
            width=width,
            HAS_BIAS=biases_EF is not None,
            IS_KEPT=is_kept,
            **self._product(matrices_EDF, low),
            **self._gated(),
        )
        return out_SF, gates_SF

    def activate_backward(
        self,
        grad_TD: torch.Tensor,
        matrices_EDF: torch.Tensor,
        low: LowPair,
        weight_TC: torch.Tensor,
        gates_SF: torch.Tensor,
        *,
        is_again: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Return gradients of gate inputs and routing weights, and the down projection's input."""
        width, blocks = matrices_EDF.shape[2], self._blocks
        of_gates_SF = torch.empty_like(gates_SF)
        inner_SF = grad_TD.new_empty(self._num_rows, width) if is_again else None
        num_columns = math.ceil(width / blocks.n)
        shares = grad_TD.new_empty(self._num_rows, num_columns, dtype=torch.float32)
        self._launch(
            self._kernels.activate_backward,
            blocks,
            num_columns=num_columns,
            gradient=grad_TD,
            weights=weight_TC,
            gates=gates_SF,
            of_gates=of_gates_SF,
            of_weights=shares,
            out=inner_SF,
            width=width,
            IS_AGAIN=is_again,
            **self._product(matrices_EDF, low),
            **self._gated(),
        )
        of_weight_TC = shares.sum(1)[self._routing.row_TC].to(weight_TC.dtype)
        return of_gates_SF, of_weight_TC, inner_SF

    def outer(
        self, left_SR: torch.Tensor, right: torch.Tensor, *, is_gathered: bool = False
    ) -> torch.Tensor:
        """Return left^T @ right over each expert's rows, (E, R, N) in fp32."""
        rank, num_n, blocks = left_SR.shape[1], right.shape[1], self._blocks.outer
        out_ERN = right.new_empty(self._num_experts, rank, num_n, dtype=torch.float32)
        block_r = _rank_block(rank)
        grid = (self._num_experts, math.ceil(num_n / blocks.n), math.ceil(rank / block_r))
        self._kernels.sum_outer[grid](
            left=left_SR,
            right=right,
            out=out_ERN,
            token_S=self._routing.token_S,
            end_E=self._routing.end_E,
            RANK=rank,
            num_n=num_n,
            IS_GATHERED=is_gathered,
            BLOCK_M=blocks.m,
            BLOCK_N=blocks.n,
            BLOCK_R=block_r,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            enable_fp_fusion=True,
        )
        return out_ERN

    def _multiply(
        self,
        rows: torch.Tensor,
        matrices_EKN: torch.Tensor,
        low: LowPair,
        *,
        scaling: float = 1.0,
        is_gathered: bool = False,
        is_scattered: bool = False,
    ) -> torch.Tensor:
        num_n = matrices_EKN.shape[2]
        blocks = self._blocks.within(num_n)
        out_SN = rows.new_empty(self._num_rows, num_n)
        self._launch(
            self._kernels.multiply,
            blocks,
            num_columns=math.ceil(num_n / blocks.n),
            rows=rows,
            out=out_SN,
            num_n=num_n,
            scaling=scaling,
            IS_GATHERED=is_gathered,
            IS_SCATTERED=is_scattered,
            **self._product(matrices_EKN, low),
        )
        return out_SN

    def _product(self, matrices_EKN: torch.Tensor, low: LowPair) -> dict[str, object]:
        """Return the arguments of a frozen product with its branch."""
        low_SR, factors_ERN = low
        stride_e, stride_k, stride_n = matrices_EKN.stride()
        num_k, rank = matrices_EKN.shape[1], 0 if low_SR is None else low_SR.shape[1]
        return {
            "matrices": matrices_EKN,
            "low": low_SR,
            "factors": factors_ERN,
            "num_k": num_k,
            "rank": rank,
            "stride_e": stride_e,
            "stride_k": stride_k,
            "stride_n": stride_n,
            "IS_EVEN": num_k % self._blocks.k == 0,
            "HAS_LOW": low_SR is not None,
            "BLOCK_R": min(MAX_LOW_BLOCK, _rank_block(rank)),
        }

    def _gated(self) -> dict[str, object]:
        gate = self._gate
        return {
            "GATE": GATE_NAMES.index(gate.name),
            "IS_INTERLEAVED": gate.is_interleaved,
            "ALPHA": gate.alpha,
            "LIMIT": gate.limit,
        }

    def _launch(
        self, kernel: Any, blocks: Blocks, *, num_columns: int, **arguments: object
    ) -> None:
        num_tiles = math.ceil(self._num_rows / blocks.m) + self._num_experts
        kernel[(num_tiles * num_columns,)](
            token_S=self._routing.token_S,
            choice_S=self._routing.choice_S,
            end_E=self._routing.end_E,
            num_experts=self._num_experts,
            EXPERTS=_power_of_2(self._num_experts),
            BLOCK_M=blocks.m,
            BLOCK_N=blocks.n,
            BLOCK_K=blocks.k,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
            maxnreg=blocks.max_registers,
            enable_fp_fusion=True,  # explicit because Triton 3.10 changes the default
            **arguments,
        )


def _power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _rank_block(rank: int) -> int:
    """Return how much of a rank is summed at a time: tensor cores need at least 16."""
    return min(max(MIN_DOT, _power_of_2(rank)), MAX_RANK_BLOCK)
