"""Tiles of the experts' kernels, each kernel's time by its name: which is the fastest for which.

A forward and a backward of Qwen3-30B-A3B's experts with branches, by each tile. The profiler says
what each kernel took, so that a table of tiles can have another one for each.
"""

import itertools
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from offload.engine.experts import fused
from offload.engine.experts.launcher import Blocks
from offload.engine.experts.lora import register
from offload.engine.streams import seconds_of
from tests.bench.bench_grouped import tiny
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.kernels import top_of
from tests.bench.gpu.settings import Settings
from tests.bench.grouped import LOOP, OURS, RANK, Bench, Case, failures
from tests.bench.record import quantiles
from tests.mixtures import QWEN

LENS, REHEARSED_LENS = (8192, 2048), (16,)
NUM_ROUNDS = 5
TILES = tuple(
    Blocks(m=m, n=n, k=k, num_warps=warps, num_stages=stages)
    for (m, n, warps), k, stages in itertools.product(
        ((128, 128, 8), (64, 128, 4), (64, 256, 8), (128, 256, 8)), (64,), (3, 4, 2)
    )
)


def part_of(num_tokens: int, blocks: Blocks) -> str:
    """Return what a row is called."""
    tile = f"{blocks.m}x{blocks.n}x{blocks.k}"
    return f"{num_tokens} {tile}, {blocks.num_warps} warps, {blocks.num_stages} stages"


def run(settings: Settings, journal: Journal) -> None:
    """Time every tile at both lengths."""
    lens = REHEARSED_LENS if settings.is_rehearsal else LENS
    tiles = TILES[:2] if settings.is_rehearsal else TILES
    journal.expect([part_of(num, blocks) for num in lens for blocks in tiles])
    mixture = tiny(QWEN) if settings.is_rehearsal else QWEN
    dtype = torch.float32 if settings.is_rehearsal else torch.bfloat16
    register()
    for num_tokens in lens:
        case = Case(mixture=mixture, num_tokens=num_tokens, is_skewed=False, is_step=True)
        bench = Bench(case, torch.device(settings.device), dtype)
        compute = bench.arm(LOOP if settings.is_rehearsal else OURS, RANK)
        for blocks in tiles:
            name = part_of(num_tokens, blocks)
            if journal.has(name) or settings.left_s < 0:
                continue
            try:
                with mock.patch.object(fused, "blocks_for", return_value=blocks):
                    journal.add(name, **timed(bench, compute))
            except failures() as error:  # it takes more than the card has
                journal.fail(name, error)


def timed(bench: Bench, compute: Any) -> dict[str, Any]:
    """Return the seconds of a step, and of each of its kernels."""
    is_cuda = bench.device.type == "cuda"

    def step() -> None:
        bench.run(compute)

    step()
    seconds = quantiles([seconds_of(step, bench.device) for _ in range(NUM_ROUNDS)])
    kind = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[kind]) as seen:
        step()
        if is_cuda:
            torch.cuda.current_stream().synchronize()
    top = top_of(seen, is_cuda=is_cuda)
    named = [f"{one['name'][:24]} {one['seconds'] * 1e3:.3g}" for one in top[:5]]
    return {
        "seconds": seconds,
        "kernels": top,
        "note": f"{seconds['p50'] * 1e3:.3g} ms; {'; '.join(named)}",
    }
