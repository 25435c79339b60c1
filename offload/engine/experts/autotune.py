"""Finds the fastest expert kernels on this machine by timing each on one layer's experts.

GPUs differ: torch's grouped products are one kernel on some and a loop with a host wait on others;
Triton may be missing, or may not support the GPU yet. So the candidates are timed, forward and
backward, at the sizes of the run. Rounds are interleaved because a GPU's clock changes with its
load. The first run of each, in which Triton compiles, is not counted.
"""

import copy
import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from offload.engine.experts import fused
from offload.engine.experts.lora import LOOP, SUFFIX, register, take_branches
from offload.engine.experts.products import Branch, goes_through_interface, reason_outside
from offload.engine.streams import release_cached, seconds_of
from offload.errors import UnsupportedModelError
from offload.plan.machine.machine import ExpertsImplementation
from offload.plan.memory.visit import ROW_BYTES

CANDIDATES: tuple[ExpertsImplementation, ...] = ("eager", "grouped_mm", "triton")
NUM_ROUNDS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One expert kernel, and its time or why it cannot run."""

    implementation: ExpertsImplementation  # the kernel's name
    # Forward and backward, the median of all rounds; None if it cannot run.
    seconds: float | None = None
    reason: str | None = None  # why it cannot run


def find_experts(model: nn.Module) -> nn.Module | None:
    """Return the first module of fused experts that uses transformers' experts interface."""
    return next((m for m in model.modules() if goes_through_interface(m)), None)


def use(implementation: ExpertsImplementation, experts: nn.Module) -> None:
    """Select the expert kernels of a module and of all that share its config.

    The loop may have to be ours (lora.py), except for experts that need more than ours can do.
    """
    register()
    config: Any = experts.config
    is_ours = implementation == LOOP and reason_outside(experts) is None
    config._experts_implementation = implementation + (SUFFIX if is_ours else "")


def reason_against(
    implementation: ExpertsImplementation, experts: nn.Module, device: torch.device
) -> str | None:
    """Return why an expert kernel cannot compute a module, as far as known without running it.

    Args:
        implementation: The kernel.
        experts: Uses transformers' experts interface; its weights may be on the meta device, and
            have the compute dtype.
        device: Where to compute.
    """
    if implementation == "triton":
        return fused.reason_against(experts, device)
    if implementation == "grouped_mm":
        for name, weight in experts.named_parameters():
            row_bytes = weight.shape[-1] * weight.element_size()
            if row_bytes % ROW_BYTES:
                return f"rows of {name} have {row_bytes} bytes, not a multiple of {ROW_BYTES}"
    return None


def fastest(trials: Sequence[Trial]) -> Trial:
    """Return the fastest trial.

    Raises:
        UnsupportedModelError: None can run.
    """
    times_s = [(trial.seconds, trial) for trial in trials if trial.seconds is not None]
    if not times_s:
        reasons = "; ".join(f"{trial.implementation}: {trial.reason}" for trial in trials)
        raise UnsupportedModelError(
            f"this model's experts cannot be multiplied on this device: {reasons}",
            limit="one way must run forward and backward on a micro-batch",
            hint="`offload.device: cpu`, or a shorter `train.seq_len` where memory ran out",
        )
    return min(times_s, key=lambda timed: timed[0])[1]


def try_all(
    experts: nn.Module,
    *,
    candidates: Sequence[ExpertsImplementation],
    device: torch.device,
    num_tokens: int,
    experts_per_token: int,
    ranks: Mapping[str, int],
) -> tuple[Trial, ...]:
    """Time each expert kernel on a temporary copy of the module with random weights.

    Args:
        experts: In the compute dtype; only its shapes are read, so it may be on meta.
        candidates: Kernels to try.
        device: Where to compute.
        num_tokens: Of a micro-batch.
        experts_per_token: Number of experts that each token is routed to, at random.
        ranks: Rank of the LoRA branch by parameter, for projections that have one.
    """
    reasons = {name: reason_against(name, experts, device) for name in candidates}
    bench: _Bench | None = None
    times_s: dict[ExpertsImplementation, list[float]] = {}
    try:
        bench = _Bench(experts, device, num_tokens, experts_per_token, ranks)
        for name in candidates:
            if reasons[name] is None:
                reasons[name] = _failure(bench, name)
        able = [name for name in candidates if reasons[name] is None]
        times_s = {name: [] for name in able}
        for _ in range(NUM_ROUNDS):
            for name in able:
                times_s[name].append(bench.step_s(name))
    finally:
        del bench
        gc.collect()  # tensors of a failed run are in a reference cycle with its traceback
        release_cached(device)
    return tuple(
        Trial(implementation=name, seconds=statistics.median(times_s[name]))
        if reasons[name] is None
        else Trial(implementation=name, reason=reasons[name])
        for name in candidates
    )


def _failure(bench: "_Bench", name: ExpertsImplementation) -> str | None:
    """Run once to warm up; return what went wrong.

    Any exception is caught: the other kernels remain, and the reason is shown. Triton alone raises
    its own errors, those of a missing compiler and those of missing headers.
    """
    try:
        bench.step_s(name)
    except torch.OutOfMemoryError:
        return "device memory ran out"
    except Exception as error:  # noqa: BLE001
        first_line = (str(error).strip().splitlines() or [""])[0]
        return f"{type(error).__name__}: {first_line}"
    return None


class _Bench:
    """One layer's experts with inputs, to be timed."""

    def __init__(
        self,
        experts: nn.Module,
        device: torch.device,
        num_tokens: int,
        experts_per_token: int,
        ranks: Mapping[str, int],
    ) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)
        self._experts = cast("Any", copy.deepcopy(experts).to_empty(device=device))
        self._experts.requires_grad_(requires_grad=False)
        with torch.no_grad():
            for parameter in self._experts.parameters():
                parameter.normal_(std=0.02, generator=self._generator)
        dtype, hidden = self._experts.down_proj.dtype, self._features("down_proj")[1]
        self._hidden_TD = self._random(num_tokens, hidden).to(dtype).requires_grad_()
        scores_TE = self._random(num_tokens, self._experts.num_experts).softmax(-1)
        weight_TC, self._expert_TC = scores_TE.topk(experts_per_token)
        self._weight_TC = weight_TC.to(dtype).requires_grad_()
        self._gradient_TD = self._random(num_tokens, hidden).to(dtype)
        self._branches = {name: self._branch(name, rank) for name, rank in ranks.items()}

    def step_s(self, name: ExpertsImplementation) -> float:
        """Return the time of a forward and a backward."""
        use(name, self._experts)
        if self._branches:
            take_branches(self._experts)
        return seconds_of(self._step, self._device)

    def _step(self) -> None:
        keywords = {"lora": self._branches} if self._branches else {}
        out = self._experts(self._hidden_TD, self._expert_TC, self._weight_TC, **keywords)
        factors = [f for b in self._branches.values() for f in (b.a_ERK, b.b_ERN)]
        inputs = [self._hidden_TD, self._weight_TC, *factors]
        torch.autograd.grad(out, inputs, self._gradient_TD)

    def _branch(self, name: str, rank: int) -> Branch:
        d_in, d_out = self._features(name)
        num_experts: int = self._experts.num_experts
        return Branch(
            a_ERK=self._random(num_experts, rank, d_in).requires_grad_(),
            b_ERN=self._random(num_experts, rank, d_out).requires_grad_(),
            scaling=1.0,
        )

    def _features(self, name: str) -> tuple[int, int]:
        """Return the input and output features of a projection."""
        weight: torch.Tensor = getattr(self._experts, name)
        d_in, d_out = weight.shape[1:] if self._experts.is_transposed else weight.shape[:0:-1]
        return d_in, d_out

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device)
