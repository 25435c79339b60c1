"""Adapters on fused experts: none, ours, and peft's merged weights, forward and backward.

    python -m tests.bench.bench_experts [--device cuda] [--dtype float32] [--rounds 7] [--out FILE]

One layer's experts in the shape of Qwen3-30B-A3B (hidden size 2048, expert width 768, 8 experts per
token) with adapters of rank 16 on both projections, all else frozen, gradients by the hidden states
and the routing weights too. The model has 128 experts; on a CPU there are 16 by default, and
as many tokens fewer, so that each expert gets the rows that it gets of 4,096 tokens.

All arms run in turn within each round, so that a machine that changes its speed changes it for all;
shares are of the same round. On a CPU a step's time is that of its thread, which other jobs do not
lengthen by waiting. `peak` is what a step needs at most beside its inputs, weights and adapters:
tensors counted as they come and go on a CPU, allocated bytes on a GPU.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from finetune.adapter.linear_lora import compute_beside
from offload.engine.tracing.tracer import LiveBytes, Tracer
from tests.bench.record import git, quantiles

HIDDEN, WIDTH, TOP_K, RANK = 2048, 768, 8, 16
ROWS_PER_EXPERT = 256
NUM_EXPERTS = {"cpu": 16, "cuda": 128}
PLAIN = {"cpu": "eager", "cuda": "grouped_mm"}  # the faster one of transformers
NONE, OURS, PEFT = "no adapter", "ours", "peft"


class Holder(nn.Module):
    """A model of one experts module, all of it frozen."""

    def __init__(self, *, num_experts: int, path: str, dtype: torch.dtype) -> None:
        super().__init__()
        config = Qwen3MoeConfig(
            hidden_size=HIDDEN, moe_intermediate_size=WIDTH, num_experts=num_experts
        )
        config._experts_implementation = path
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        self.experts = Qwen3MoeExperts(config)
        torch.set_default_dtype(before)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)
        self.requires_grad_(requires_grad=False)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the experts."""
        result: torch.Tensor = self.experts(*inputs)
        return result


class Bench:
    """The arms, over one set of frozen weights, and what goes through them."""

    def __init__(self, *, device: str, dtype: torch.dtype, num_experts: int) -> None:
        if device == "cpu":
            torch.set_num_threads(1)
        torch.manual_seed(0)
        self.device, self.dtype, self.num_experts = device, dtype, num_experts
        self.num_tokens = ROWS_PER_EXPERT * num_experts // TOP_K
        with torch.device(device):
            bare = Holder(num_experts=num_experts, path=PLAIN[device], dtype=dtype)
            self._hidden_TD = torch.randn(self.num_tokens, HIDDEN, dtype=dtype, requires_grad=True)
            scores_TE = torch.randn(self.num_tokens, num_experts).softmax(-1)
            weight_TC, self._expert_TC = scores_TE.topk(TOP_K)
            self._weight_TC = (weight_TC / weight_TC.sum(-1, keepdim=True)).to(dtype)
            self._weight_TC.requires_grad_()
            self._gradient_TD = torch.randn(self.num_tokens, HIDDEN, dtype=dtype)
        names = [f"experts.{name}" for name in ("gate_up_proj", "down_proj")]
        config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=[], target_parameters=names)
        peft = get_peft_model(_copy(bare), config)
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
        self.arms: Mapping[str, nn.Module] = {
            NONE: bare,
            OURS: compute_beside(_copy(peft)),
            PEFT: peft,
        }

    def forward_s(self, arm: str) -> float:
        """Return the time of a forward without a graph, as when a layer is first visited."""
        with torch.no_grad():
            return self._time_s(lambda: self._forward(arm))

    def step_s(self, arm: str) -> float:
        """Return the time of a forward with a graph, and of its backward."""
        self._forget(arm)
        return self._time_s(lambda: self._forward(arm).backward(self._gradient_TD))

    def peak_bytes(self, arm: str) -> int:
        """Return what such a step takes at most, gradients of adapters included."""
        self._forget(arm)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self._forward(arm).backward(self._gradient_TD)
            return torch.cuda.max_memory_allocated() - before
        live = LiveBytes()
        with Tracer(live):
            self._forward(arm).backward(self._gradient_TD)
        return live.peak_bytes

    def _forward(self, arm: str) -> torch.Tensor:
        result: torch.Tensor = self.arms[arm](self._hidden_TD, self._expert_TC, self._weight_TC)
        return result

    def _forget(self, arm: str) -> None:
        for tensor in (self._hidden_TD, self._weight_TC, *self.arms[arm].parameters()):
            tensor.grad = None

    def _time_s(self, run: Callable[[], object]) -> float:
        if self.device == "cpu":
            start_s = time.thread_time()
            run()
            return time.thread_time() - start_s
        stream = torch.cuda.current_stream()
        stream.synchronize()
        start_s = time.perf_counter()
        run()
        stream.synchronize()
        return time.perf_counter() - start_s


def _copy(model: Any) -> Any:
    """Copy a model, but for its frozen weights."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters() if not p.requires_grad})


def measure(bench: Bench, *, num_rounds: int) -> list[dict[str, object]]:
    """Run all arms in turn; return one row for each."""
    for arm in bench.arms:  # warm-up
        bench.step_s(arm)
    samples: dict[str, list[dict[str, float]]] = {arm: [] for arm in bench.arms}
    for _ in range(num_rounds):
        found = {
            arm: {"forward_s": bench.forward_s(arm), "step_s": bench.step_s(arm)}
            for arm in bench.arms
        }
        for arm, times in found.items():
            ratios = {f"{name}_ratio": t / found[NONE][name] for name, t in times.items()}
            samples[arm].append(times | ratios)
    return [
        {
            "bench": "experts",
            "git_sha": git("rev-parse", "--short", "HEAD"),
            "dirty": bool(git("status", "--porcelain")),
            "device": bench.device,
            "dtype": str(bench.dtype),
            "torch": torch.__version__,
            "num_experts": bench.num_experts,
            "num_tokens": bench.num_tokens,
            "rank": RANK,
            "arm": arm,
            **{name: quantiles([sample[name] for sample in taken]) for name in taken[0]},
            "tokens_per_s": bench.num_tokens / statistics.median(s["step_s"] for s in taken),
            "peak_bytes": bench.peak_bytes(arm),
            "n": len(taken),
        }
        for arm, taken in samples.items()
    ]


def show(rows: Sequence[Mapping[str, Any]], print_line: Callable[[object], None]) -> None:
    """Print the rows as a table."""
    first = rows[0]
    table = Table(
        title=f"{first['num_experts']} experts, {first['num_tokens']} tokens, {first['dtype']},"
        f" rank {RANK}; medians of {first['n']} rounds"
    )
    for column in ("arm", "forward", "", "forward + backward", "", "tokens/s", "peak"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row['arm']}",
            f"{row['forward_s']['p50'] * 1e3:.1f} ms",
            f"{row['forward_s_ratio']['p50']:.2f}",
            f"{row['step_s']['p50'] * 1e3:.1f} ms",
            f"{row['step_s_ratio']['p50']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['peak_bytes'] / 2**20:,.1f} MiB",
        )
    print_line(table)


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=list(NUM_EXPERTS), default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="*")
    parser.add_argument("--experts", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for dtype in options.dtype or ["bfloat16", "float32"]:
        bench = Bench(
            device=options.device,
            dtype=getattr(torch, dtype),
            num_experts=options.experts or NUM_EXPERTS[options.device],
        )
        found = measure(bench, num_rounds=options.rounds)
        show(found, Console().print)
        rows += found
    if options.out is not None:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
