"""Adapters of linear layers in the base's dtype against peft's: time, bytes, errors, loss curves.

    python -m tests.bench.bench_linear_lora time [--hidden 1024] [--dtype bfloat16] [--pairs 15]
        [--dora] [--micro-batches 4]
    python -m tests.bench.bench_linear_lora bytes [--hidden 4096] [--dtype bfloat16] [--dora]
    python -m tests.bench.bench_linear_lora errors [TYPE ...] [--seeds 16] [--dora]
    python -m tests.bench.bench_linear_lora curves [--steps 300]
    python -m tests.bench.bench_linear_lora norms [--hidden 4096] [--dtype bfloat16]

`time`: one layer of Qwen3 with adapters on all linears, forward and backward, in CPU time of one
thread. All arms run in turn within each round, and shares are of the same round. Several
micro-batches are of one visit: what is computed once for it is shared by them, in ours alone.
`bytes`: what the operators of the same layer read and write outside of large products, in a
forward, a recompute (ours leaves out the last product) and a backward; launches likewise. `errors`:
tiny models in bf16, gradients of each adapter tensor against float64, of ours and of peft under
bf16 autocast; the errors of a tensor are pooled over seeds, since for one draw either may be
smaller. A tensor above 1.02 is named with its standard error over seeds. Both take the experts that
float64 takes: a token that takes another outweighs all rounding. `curves`: one tiny model in bf16,
trained with either from the same start on the same rows. With `--dora` all adapters are DoRA.
`norms`: DoRA's norms of weights with their branches, as we compute them, of weights that are merged
in their own dtype, and as a sum of three terms: CPU time of one thread, and the largest error of a
norm against float64.
"""

import argparse
import copy
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from finetune.adapter.linear_lora import Linear, compute_in_base_dtype
from offload.engine.pointwise.magnitudes import row_norms
from offload.engine.recompute import Unread, left_out
from offload.engine.visit_cache import VISIT_CACHE
from offload.errors import UnsupportedModelError
from tests.counted import Counted
from tests.parity.architectures import (
    Gradients,
    causal_types,
    micro_batches,
    plain,
    streamed,
    truth,
)
from tests.parity.held_choices import HeldChoices
from tests.parity.tiny_models import tiny_model

RANK, NUM_TOKENS = 16, 512
LIMIT = 1.02  # of an error as a share of peft's
NONE, OURS, PEFT, AUTOCAST = "no adapter", "ours", "peft", "peft, autocast"
Arm = tuple[nn.Module, bool]  # and whether it runs under autocast


# ------------------------------------------------------------------------------------------- time


def arms(hidden: int, dtype: torch.dtype, *, dora: bool) -> Mapping[str, Arm]:
    """Return a layer of Qwen3 without adapters, and with them as each arm computes them."""
    config = Qwen3Config(
        vocab_size=8,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=1,
        num_attention_heads=hidden // 128,
        num_key_value_heads=max(1, hidden // 512),
        head_dim=128,
    )
    torch.manual_seed(0)
    base: Any = Qwen3Model(config)
    base = base.to(dtype).requires_grad_(requires_grad=False)
    wanted = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear", use_dora=dora)
    adapted = get_peft_model(copy.deepcopy(base), wanted)
    ours = copy.deepcopy(adapted)
    compute_in_base_dtype(ours)
    found: dict[str, Arm] = {NONE: (base, False), OURS: (ours, False), PEFT: (adapted, False)}
    return found if dtype == torch.float32 else {**found, AUTOCAST: (adapted, True)}


def step_s(arm: Arm, x_BTD: torch.Tensor, *, micro_batches: int) -> float:
    """Return the CPU time of a forward and backward in a visit of so many, in seconds."""
    model, is_autocast = arm
    leaf_BTD = x_BTD.detach().requires_grad_()
    start_s = time.thread_time()
    VISIT_CACHE.enter("a visit")
    for _ in range(micro_batches):
        with torch.autocast("cpu", torch.bfloat16) if is_autocast else nullcontext():
            y_BTD = model(inputs_embeds=leaf_BTD, use_cache=False).last_hidden_state
        y_BTD.backward(torch.ones_like(y_BTD))
    VISIT_CACHE.enter(None)
    return (time.thread_time() - start_s) / micro_batches


def show_times(*, hidden: int, dtype: str, pairs: int, dora: bool, micro_batches: int) -> None:
    """Print each arm's time as a share of that without adapters."""
    torch.set_num_threads(1)
    made = arms(hidden, getattr(torch, dtype), dora=dora)
    if micro_batches > 1:  # peft computes all for each of them
        made = {name: made[name] for name in (NONE, OURS)}
    x_BTD = torch.randn(1, NUM_TOKENS, hidden, dtype=getattr(torch, dtype))
    step = partial(step_s, x_BTD=x_BTD, micro_batches=micro_batches)
    for arm in made.values():
        step(arm)
    rounds = [{name: step(arm) for name, arm in made.items()} for _ in range(pairs)]
    for name in made:
        shares = sorted(one[name] / one[NONE] for one in rounds)
        row = {
            "arm": name,
            "hidden": hidden,
            "dtype": dtype,
            "DoRA": dora,
            "micro_batches": micro_batches,
            "pairs": pairs,
            "median_s": round(statistics.median(one[name] for one in rounds), 4),
            "share": round(statistics.median(shares), 3),
            "quartiles": [round(shares[pairs // 4], 3), round(shares[3 * pairs // 4], 3)],
        }
        _show(row)


# ------------------------------------------------------------------------------------------ bytes


def show_bytes(*, hidden: int, dtype: str, dora: bool) -> None:
    """Print what each arm moves, and ours as a share of peft's."""
    x_BTD = torch.randn(1, NUM_TOKENS, hidden, dtype=getattr(torch, dtype))
    sums = {}
    for name, (model, is_autocast) in arms(hidden, getattr(torch, dtype), dora=dora).items():
        if is_autocast:
            continue
        _visit(model, x_BTD, leaves_out=name != PEFT)  # gradients of the next are added to its own
        with VISIT_CACHE.in_pass():
            found = _visit(model, x_BTD, leaves_out=name != PEFT)
        sums[name] = sum(one.total_bytes for one in found)
        megabytes = [round(one.total_bytes / 1e6) for one in found]
        ops = [one.total_ops for one in found]
        _show({"arm": name, "hidden": hidden, "dtype": dtype, "MB": megabytes, "ops": ops})
    _show({"ours over peft's": round(sums[OURS] / sums[PEFT], 3)})


def _visit(
    model: nn.Module, x_BTD: torch.Tensor, *, leaves_out: bool
) -> tuple[Counted, Counted, Counted]:
    """Count a forward, a recompute and a backward of the layer alone."""
    (norm,) = [m for name, m in model.named_modules() if name.rpartition(".")[2] == "norm"]
    vars(norm)["forward"] = lambda hidden: hidden
    downs = [m for name, m in model.named_modules() if name.endswith("down_proj")]
    unread = [Unread(module=downs[0], path=())] if leaves_out else []
    forward, recompute, backward = Counted(), Counted(), Counted()
    with forward, torch.no_grad():
        model(inputs_embeds=x_BTD, use_cache=False)
    leaf_BTD = x_BTD.detach().requires_grad_()
    with recompute, left_out(unread):
        y_BTD = model(inputs_embeds=leaf_BTD, use_cache=False).last_hidden_state
    gradient_BTD = torch.ones_like(x_BTD)
    with backward:
        y_BTD.backward(gradient_BTD)
    return forward, recompute, backward


# ----------------------------------------------------------------------------------------- errors


def adapted_bf16(model_type: str, seed: int, *, dora: bool) -> nn.Module:
    """Return a tiny model in bf16 whose linears all have an adapter in float32."""
    base: Any = tiny_model(model_type, seed=seed)
    torch.manual_seed(seed)
    wanted = LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", use_dora=dora)
    model = get_peft_model(base, wanted)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
        elif "lora_magnitude" in name:
            parameter.data *= 0.5 + torch.rand_like(parameter)
        elif "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    return model


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Our error of one tensor over peft's, both pooled over seeds, and what seeds scatter it by."""

    value: float
    standard_error: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> "Ratio":
        """Return the root of a ratio of sums of squares, one of each per seed, to first order.

        A seed's squares are of the same draw, so its shares of both sums are subtracted.
        """
        value, num_seeds = math.sqrt(sum(ours) / sum(theirs)), len(ours)
        shares = zip(ours, theirs, strict=True)
        apart = sum((a / sum(ours) - b / sum(theirs)) ** 2 for a, b in shares)
        spread = math.inf if num_seeds == 1 else math.sqrt(apart * num_seeds / (num_seeds - 1)) / 2
        return cls(value=value, standard_error=value * spread)

    def is_above(self, limit: float, *, by: float) -> bool:
        """Say whether it exceeds a limit by more than so many standard errors."""
        return self.value - by * self.standard_error > limit


def errors_of(model_type: str, *, num_seeds: int, dora: bool) -> dict[str, Ratio] | None:
    """Return our pooled error over peft's for each tensor; None where there is no truth."""
    ours, theirs = dict[str, list[float]](), dict[str, list[float]]()
    for seed in range(num_seeds):
        model, batches = adapted_bf16(model_type, seed, dora=dora), micro_batches()
        with HeldChoices() as noted:
            exact = truth(model, batches)
        if exact is None:
            return None
        mine = copy.deepcopy(model)
        compute_in_base_dtype(mine)
        if not any(isinstance(module, Linear) for module in mine.modules()):
            return None
        with HeldChoices(noted):
            _note(ours, streamed(mine, batches, num_slots=2)[1], exact)
        with HeldChoices(noted), torch.autocast("cpu", torch.bfloat16):
            _note(theirs, plain(model, batches)[1], exact)
    return {n: Ratio.of(ours[n], theirs[n]) for n in ours if sum(ours[n]) * sum(theirs[n]) > 0}


def _note(squares: dict[str, list[float]], found: Gradients, exact: Gradients) -> None:
    for name, true in exact.items():
        if "lora_" in name and float(true.norm()) > 0:
            error = float((found[name].double() - true).norm() / true.norm())
            squares.setdefault(name, []).append(error**2)


def show_errors(types: Sequence[str], *, seeds: int, dora: bool) -> None:
    """Print a line per model type, and one for all."""
    warnings.simplefilter("ignore")
    logs: list[float] = []
    for model_type in types or causal_types():
        try:
            ratios = errors_of(model_type, num_seeds=seeds, dora=dora)
        except (
            UnsupportedModelError,
            AttributeError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            _show({"type": model_type, "left out": type(error).__name__})
            continue
        if not ratios:
            _show({"type": model_type, "left out": "no truth or no linear"})
            continue
        own = [math.log(ratio.value) for ratio in ratios.values()]
        logs += own
        high = {name: ratio for name, ratio in ratios.items() if ratio.value > LIMIT}
        row = {
            "type": model_type,
            "tensors": len(own),
            "geometric_mean": round(math.exp(statistics.mean(own)), 4),
            "median": round(math.exp(statistics.median(own)), 4),
            "standard_error": round(
                statistics.median(r.standard_error for r in ratios.values()), 4
            ),
            "largest": round(math.exp(max(own)), 4),
            "above": {n: [round(r.value, 4), round(r.standard_error, 4)] for n, r in high.items()},
            "above_by_2_standard_errors": sum(r.is_above(LIMIT, by=2) for r in high.values()),
        }
        _show(row)
    total = {
        "types": "all",
        "tensors": len(logs),
        "geometric_mean": round(math.exp(statistics.mean(logs)), 4),
        "share_above": round(sum(x > math.log(LIMIT) for x in logs) / len(logs), 4),
        "largest": round(math.exp(max(logs)), 4),
    }
    _show(total)


# ------------------------------------------------------------------------------------------ norms


def merged_norms(
    weight_MK: torch.Tensor, a_RK: torch.Tensor, b_MR: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """Return the norms of the rows of a weight with its branch, made in chunks of this dtype."""
    norms, a_RK, size = [], a_RK.to(dtype), 2**18 // weight_MK.shape[1]
    for rows in range(0, len(weight_MK), size):
        part = weight_MK[rows : rows + size].to(dtype)
        part = torch.addmm(part, b_MR[rows : rows + size].to(dtype), a_RK)
        norms.append(torch.linalg.vector_norm(part, dim=1, dtype=torch.float32))
    return torch.cat(norms)


def norms_in_terms(
    weight_MK: torch.Tensor, a_RK: torch.Tensor, b_MR: torch.Tensor, *, dtype: torch.dtype
) -> torch.Tensor:
    """Return them as |W|^2 + 2 sum_r B (W A^T) + sum_r B (B A A^T), with W A^T in this dtype."""
    norms, lows, size = [], [], 2**18 // weight_MK.shape[1]
    for rows in range(0, len(weight_MK), size):
        part = weight_MK[rows : rows + size]
        norms.append(torch.linalg.vector_norm(part.float(), dim=1))
        lows.append((part.to(dtype) @ a_RK.to(dtype).t()).float())
    added = torch.addmm(torch.cat(lows), b_MR, a_RK @ a_RK.t(), beta=2).mul_(b_MR).sum(dim=1)
    return torch.cat(norms).square().add_(added).sqrt_()


def our_norms(weight_MK: torch.Tensor, a_RK: torch.Tensor, b_MR: torch.Tensor) -> torch.Tensor:
    """Return them as we compute them."""
    return row_norms(weight_MK, a_RK=a_RK, b_MR=b_MR, scaling=1.0)


def _cpu_s(function: Callable[[], object]) -> float:
    start_s = time.thread_time()
    function()
    return time.thread_time() - start_s


def show_norms(*, hidden: int, dtype: str) -> None:
    """Print the time and the error of each way to compute the norms."""
    torch.set_num_threads(1)
    weight_dtype = getattr(torch, dtype)
    ways: Mapping[str, Callable[..., torch.Tensor]] = {
        "ours": our_norms,
        f"merged in {dtype}": partial(merged_norms, dtype=weight_dtype),
        "terms, float32": partial(norms_in_terms, dtype=torch.float32),
        f"terms, {dtype}": partial(norms_in_terms, dtype=weight_dtype),
    }
    for num_rows, num_columns in ((hidden, hidden), (3 * hidden, hidden), (hidden, 3 * hidden)):
        torch.manual_seed(0)
        weight_MK = (torch.randn(num_rows, num_columns) * num_columns**-0.5).to(weight_dtype)
        a_RK = torch.randn(RANK, num_columns) * num_columns**-0.5
        b_MR = 0.1 * torch.randn(num_rows, RANK)
        true_M = (weight_MK.double() + b_MR.double() @ a_RK.double()).norm(dim=1)
        for name, way in ways.items():
            error = float(((way(weight_MK, a_RK, b_MR).double() - true_M) / true_M).abs().max())
            times = [_cpu_s(partial(way, weight_MK, a_RK, b_MR)) for _ in range(9)]
            row = {
                "norms": name,
                "weight": [num_rows, num_columns],
                "dtype": dtype,
                "median_s": round(statistics.median(times), 4),
                "largest_error": error,
            }
            _show(row)


# ----------------------------------------------------------------------------------------- curves


def show_curves(*, steps: int) -> None:
    """Print the losses of both arms, and their largest and mean difference."""
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    torch.manual_seed(0)
    base = Qwen3ForCausalLM(config).bfloat16()
    wanted = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
    start = get_peft_model(base, wanted)
    ours = copy.deepcopy(start)
    compute_in_base_dtype(ours)
    curves = {OURS: _curve(ours, steps), PEFT: _curve(start, steps)}
    for step in range(0, steps, max(1, steps // 12)):
        row = {"step": step} | {name: round(losses[step], 5) for name, losses in curves.items()}
        _show(row)
    apart = [abs(a - b) for a, b in zip(*curves.values(), strict=True)]
    ends = {name: round(statistics.mean(losses[-50:]), 5) for name, losses in curves.items()}
    last = {"mean of last 50": ends, "mean apart": statistics.mean(apart), "most": max(apart)}
    _show(last)


def _curve(model: nn.Module, steps: int) -> list[float]:
    """Train on rows that continue in a fixed permutation, so that there is something to learn."""
    generator = torch.Generator().manual_seed(7)
    follows = torch.randperm(64, generator=generator)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    losses = []
    for _ in range(steps):
        rows = [torch.randint(0, 64, (8,), generator=generator)]
        while len(rows) < 24:
            is_noise = torch.rand(8, generator=generator) < 0.1
            drawn = torch.randint(0, 64, (8,), generator=generator)
            rows.append(torch.where(is_noise, drawn, follows[rows[-1]]))
        ids = torch.stack(rows, dim=1)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def _show(row: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(required=True)
    times = commands.add_parser("time")
    times.add_argument("--hidden", type=int, default=4096)
    times.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    times.add_argument("--pairs", type=int, default=15)
    times.add_argument("--micro-batches", type=int, default=1)
    times.set_defaults(run=show_times)
    moved = commands.add_parser("bytes")
    moved.add_argument("--hidden", type=int, default=4096)
    moved.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    moved.set_defaults(run=show_bytes)
    errors = commands.add_parser("errors")
    errors.add_argument("types", nargs="*")
    errors.add_argument("--seeds", type=int, default=16)
    errors.set_defaults(run=show_errors)
    norms = commands.add_parser("norms")
    norms.add_argument("--hidden", type=int, default=4096)
    norms.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    norms.set_defaults(run=show_norms)
    for command in (times, moved, errors):
        command.add_argument("--dora", action="store_true")
    curves = commands.add_parser("curves")
    curves.add_argument("--steps", type=int, default=300)
    curves.set_defaults(run=show_curves)
    arguments = vars(parser.parse_args())
    run: Callable[..., None] = arguments.pop("run")
    run(**arguments)


if __name__ == "__main__":
    main()
