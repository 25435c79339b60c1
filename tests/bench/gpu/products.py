"""The products of the models' own shapes, and the probe's pieces from an idle and a busy stream.

Both are the card's own: which code is measured does not change them.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from offload.engine.streams import seconds_of
from offload.plan.time.attention import FLASH_BACKWARD_FORWARDS, causal_flops
from tests.bench.gpu import dense, moe30b
from tests.bench.gpu.ceiling import NUM_ROUNDS, Compute, busy_s, ceiling_of, random_values
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.settings import Settings
from tests.bench.gpu.training import model_of

NUM_TOKENS, REHEARSED_TOKENS = 8192, 16
TIMER = "timer"
GEMM, ATTENTION = (8192, 4096, 4096), (32, 4096, 128)  # of the probe, on a card
TINY_GEMM, TINY_ATTENTION = (64, 32, 32), (2, 32, 16)
NUM_LAUNCHES = 500


def idle_s(run: Compute, device: torch.device) -> float:
    """Return the seconds of one run whose clock starts on a stream with nothing to do."""
    if device.type != "cuda":
        return seconds_of(run, device)
    run()
    found = []
    for _ in range(NUM_ROUNDS):
        torch.cuda.current_stream(device).synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


def run(settings: Settings, journal: Journal) -> None:
    """Time the products of a dense model and of a mixture, then the probe's pieces both ways."""
    shapes = (dense.FORMS[0][0], moe30b.SHAPE)
    journal.expect([*shapes, TIMER])
    device = torch.device(settings.device)
    dtype = torch.float32 if settings.is_rehearsal else torch.bfloat16
    num_tokens = REHEARSED_TOKENS if settings.is_rehearsal else NUM_TOKENS
    for shape in shapes:
        if journal.has(shape):
            continue
        adapter = dense.adapter_of(shape)
        facts = model_of(shape, adapter, is_rehearsal=settings.is_rehearsal).facts
        found = ceiling_of(facts, num_tokens, device=device, dtype=dtype)
        journal.add(shape, num_tokens=num_tokens, products_flops_per_s=found.rates, **found.said)
    if not journal.has(TIMER):
        journal.add(TIMER, **_timers(settings, device, dtype))


def _timers(settings: Settings, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    pieces = dict(_pieces(settings, device, dtype))
    found: dict[str, Any] = {
        f"{way}_flops_per_s": {
            name: flops / time_s(run, device) for name, (run, flops) in pieces.items()
        }
        for way, time_s in (("idle", idle_s), ("busy", busy_s))
    }
    machine = settings.machine("float32" if settings.is_rehearsal else "bfloat16")
    found["probe_flops_per_s"] = {
        "product": machine.gemm_flops_per_s.value,
        "attention": machine.attention_flops_per_s.value,
    }
    return found | {"launch_s": _launch_s(device), "probe_launch_s": machine.launch_s.value}


def _pieces(
    settings: Settings, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, tuple[Compute, float]]]:
    m, k, n = TINY_GEMM if settings.is_rehearsal else GEMM
    x, w = random_values((m, k), device, dtype), random_values((n, k), device, dtype)
    yield "product", (lambda: x @ w.T, 2.0 * m * k * n)
    heads, tokens, dim = TINY_ATTENTION if settings.is_rehearsal else ATTENTION
    q, k_, v = (
        random_values((1, heads, tokens, dim), device, dtype).requires_grad_() for _ in range(3)
    )
    gradient = torch.ones_like(q)

    def attend() -> object:
        out = F.scaled_dot_product_attention(q, k_, v, is_causal=True)
        return torch.autograd.grad(out, (q, k_, v), gradient)

    flops = causal_flops(width=heads * dim, seq_len=tokens, is_cpu=device.type == "cpu")
    yield "attention", (attend, (1 + FLASH_BACKWARD_FORWARDS) * flops)


def _launch_s(device: torch.device) -> float:
    """Return what the host needs to launch one small kernel, many in a row."""
    x = torch.zeros(1, device=device)
    x.add_(1)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    start_s = time.perf_counter()
    for _ in range(NUM_LAUNCHES):
        x.add_(1)
    return (time.perf_counter() - start_s) / NUM_LAUNCHES
