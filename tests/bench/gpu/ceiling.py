"""What the products of a model's own shapes reach: the ceiling, and the work of a step.

The ceiling of the compute lane is the best of the products that the layers themselves run, forward
and by their input, timed on a stream that is busy before they start. The probe's rate is another
shape's.

Work is counted twice. As the plan counts it, a recompute is work too: that says how busy the lane
is. With each product counted once, forward and backward, it says what the training gets, so an
output that is kept and not computed again shows as more FLOP/s.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offload.engine.streams import seconds_of
from offload.plan.facts.facts import AdapterSpec, ModelFacts

NUM_ROUNDS, NUM_PER_ROUND = 5, 8
Compute = Callable[[], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceiling:
    """The best product of a model's layers.

    Attributes:
        flops_per_s: Its rate.
        name: Which it is.
        rates: Of all of them.
    """

    flops_per_s: float
    name: str
    rates: dict[str, float]

    @property
    def said(self) -> dict[str, Any]:
        """What a row says of it."""
        return {"best_product_flops_per_s": self.flops_per_s, "best_product": self.name}


def ceiling_of(
    facts: ModelFacts, num_tokens: int, *, device: torch.device, dtype: torch.dtype
) -> Ceiling:
    """Time each product of the layers that all tokens pass through; experts are none of these."""
    shapes = {
        (linear.d_in, linear.d_out)
        for layer in facts.layers
        for linear in layer.linears
        if linear.num_experts == 1 and linear.group != "router"
    }
    rates = {}
    for d_in, d_out in sorted(shapes):
        x, g, w = (
            random_values(s, device, dtype)
            for s in ((num_tokens, d_in), (num_tokens, d_out), (d_out, d_in))
        )
        flops = 2.0 * num_tokens * d_in * d_out
        for name, run in (("forward", lambda: x @ w.T), ("input", lambda: g @ w)):  # noqa: B023
            rates[f"{d_in} to {d_out}, {name}"] = flops / busy_s(run, device)
    best = max(rates, key=lambda name: rates[name])
    return Ceiling(flops_per_s=rates[best], name=best, rates=rates)


def once_flops(facts: ModelFacts, adapter: AdapterSpec, *, num_tokens: int, seq_len: int) -> float:
    """Count what a step has to compute: each product once, forward and backward, no recompute.

    Frozen weights have a product forward and one by their input, A and B one more each, attention
    two products forward and four backward, and a frozen head two.
    """
    flops = 4.0 * num_tokens * facts.hidden_size * facts.vocab_size
    for layer in facts.layers:
        for linear in layer.linears:
            active = num_tokens * linear.active
            flops += 4.0 * active * linear.d_in * linear.d_out
            if _is_adapted(linear.name, linear.group, adapter):
                flops += 6.0 * active * adapter.rank * (linear.d_in + linear.d_out)
        flops += 3.0 * num_tokens * layer.attention.flops_per_token(seq_len)
    return flops


def _is_adapted(name: str, group: str, adapter: AdapterSpec) -> bool:
    return adapter.experts if group == "experts" else name in adapter.targets


def busy_s(run: Compute, device: torch.device) -> float:
    """Return the seconds of one of several runs in a row that are queued behind other work."""

    def several() -> None:
        for _ in range(NUM_PER_ROUND):
            run()

    run()
    return statistics.median(seconds_of(several, device) for _ in range(NUM_ROUNDS)) / NUM_PER_ROUND


def random_values(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return values as those of weights; products of zeros are faster."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype) * 0.02
