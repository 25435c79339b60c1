"""What this machine does: products, attention, experts, link, page locks, and making weights."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.experts.autotune import CANDIDATES, try_all
from offload.engine.host.pagelock import open_locker, page_lock
from offload.engine.host.slab import Slab, lay_out
from offload.plan.machine.machine import GIB
from tests.bench.gpu.journal import RATES, Journal
from tests.bench.gpu.models import fill
from tests.bench.gpu.settings import Settings
from tests.bench.grouped import RANK
from tests.mixtures import QWEN

HOST = "host memory"
LOCKED_BYTES, REHEARSED_BYTES = 4 * GIB, GIB // 64
TOKENS, REHEARSED_TOKENS = (2048, 8192), (16,)
ASSUMED_BYTES_PER_S = 1e9  # of making and locking, where this run has not measured it


def run(settings: Settings, journal: Journal) -> None:
    """Measure the machine as a run does, then what a run does not ask for."""
    dtype = "float32" if settings.is_rehearsal else "bfloat16"
    tokens = REHEARSED_TOKENS if settings.is_rehearsal else TOKENS
    grouped = [f"experts, {num} tokens" for num in tokens]
    journal.expect(["machine", HOST, *grouped])
    if not journal.has("machine"):
        machine = settings.machine(dtype)
        found = {name: getattr(machine, name).value for name in RATES}
        journal.add("machine", **found, vram_bytes=machine.vram_bytes, ram_bytes=machine.ram_bytes)
    if not journal.has(HOST):
        size = REHEARSED_BYTES if settings.is_rehearsal else LOCKED_BYTES
        journal.add(HOST, **_host(settings, size))
    for part, num in zip(grouped, tokens, strict=True):
        if not journal.has(part):
            journal.add(part, **_experts(settings, getattr(torch, dtype), num))


def _host(settings: Settings, num_bytes: int) -> dict[str, Any]:
    """Make weights in a new slab and lock it, as the engine does it; say how much could be."""
    device, dtype = torch.device(settings.device), torch.bfloat16
    shape = (num_bytes // dtype.itemsize,)
    weight = nn.Parameter(torch.zeros((), dtype=dtype).expand(shape), requires_grad=False)
    slab = Slab([lay_out([weight])])
    start_s = time.perf_counter()
    fill("a.weight", slab.records[0].fields[0].view(slab.layer(0)))
    made_s = time.perf_counter()
    lock = page_lock(slab.address, slab.num_bytes, num_bytes, open_locker(device, slab.descriptor))
    locked_s = time.perf_counter()
    lock.release()
    slab.close()
    machine = settings.machine("float32" if settings.is_rehearsal else "bfloat16")
    return {
        "num_bytes": num_bytes,
        "fill_bytes_per_s": num_bytes / (made_s - start_s),
        "lock_bytes_per_s": num_bytes / (locked_s - made_s),
        "lock_mode": lock.mode.value,
        "lock_reason": lock.reason,
        "lockable_bytes": machine.pinned_bytes,
    }


def _experts(settings: Settings, dtype: torch.dtype, num_tokens: int) -> dict[str, Any]:
    """Time each way to multiply one layer's experts of Qwen3-30B-A3B, with branches."""
    mixture = QWEN
    if settings.is_rehearsal:
        from tests.bench.bench_grouped import tiny

        mixture = tiny(QWEN)
    trials = try_all(
        mixture.experts(dtype, path="eager"),
        candidates=CANDIDATES,
        device=torch.device(settings.device),
        num_tokens=num_tokens,
        experts_per_token=mixture.top_k,
        ranks=dict.fromkeys(("gate_up_proj", "down_proj"), RANK),
    )
    rows = num_tokens * mixture.top_k
    flops = 2 * 6 * rows * mixture.hidden * mixture.width
    flops += 3 * 2 * rows * RANK * (2 * mixture.hidden + 3 * mixture.width)
    return {
        "seconds": {t.implementation: t.seconds for t in trials},
        "flops_per_s": {t.implementation: flops / t.seconds for t in trials if t.seconds},
        "refused": {t.implementation: t.reason for t in trials if t.seconds is None},
    }


def setup_s(journal: Journal, num_bytes: int) -> float:
    """Return how long making so many bytes of weights and locking them should take."""
    rows: Sequence[dict[str, Any]] = [row for row in journal.rows if row["part"] == HOST]
    if not rows or "fill_bytes_per_s" not in rows[-1]:
        return 2 * num_bytes / ASSUMED_BYTES_PER_S
    rates = (rows[-1]["fill_bytes_per_s"], rows[-1]["lock_bytes_per_s"])
    return sum(num_bytes / rate for rate in rates)
