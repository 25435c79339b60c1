"""Fills Triton's cache with the kernels that later cases start, on all cores, before any is timed.

A kernel takes some seconds to compile, one after the other where it is first started, and a window
on a card is short. Triton compiles for a capability without the card's driver (tests/compiled.py),
so processes without a context of the card share the work.
"""

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import torch

from tests import pointwise_launches as pointwise
from tests.bench.gpu import lane, sweep
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.settings import Settings
from tests.compiled import KERNELS, Launch, _Driver
from tests.mixtures import QWEN, launches

EXPERTS, POINTWISE, SWEEP = "experts", "pointwise", "sweep"
RANKS = (8, 16)
SIZES = (  # hidden, head and width of Qwen3-8B, Qwen3-30B-A3B, and Llama-3.1-8B and Qwen3-0.6B
    (4096, 128, 12288),
    (2048, 128, 768),
    (4096, 128, 14336),
    (1024, 128, 3072),
)
REHEARSED_CAPABILITY = 90
Job = tuple[int, str, Launch]


def run(settings: Settings, journal: Journal) -> None:
    """Compile the kernels of the default tiles and the arms, then of fused operators."""
    names = [EXPERTS, POINTWISE] if settings.parts is None else list(settings.parts)
    journal.expect(names)
    capability = REHEARSED_CAPABILITY if settings.is_rehearsal else capability_of()
    for name in names:
        if journal.has(name) or settings.left_s < 0:
            continue
        start_s = time.perf_counter()
        noted = jobs(name, capability)
        noted = noted[:2] if settings.is_rehearsal else noted
        num, refused = compiled(noted, settings.left_s)
        seconds = time.perf_counter() - start_s
        said = f"{num} of {len(noted)} launches for sm_{capability} in {seconds:.0f} s"
        said += f"; {len(refused)} refused: {refused[0]}" if refused else ""
        journal.add(
            name,
            num_compiled=num,
            num_launches=len(noted),
            refused=refused,
            seconds=seconds,
            note=said,
        )


def jobs(name: str, capability: int) -> list[Job]:
    """Return what a later case will start on this card."""
    if name == POINTWISE:
        noted = []
        for hidden, head, width in SIZES:
            noted += pointwise.launches(torch.bfloat16, hidden=hidden, head=head, width=width)
        return [(capability, pointwise.MODULE, launch) for launch in noted]
    tiles = sweep.TILES if name == SWEEP else lane.tiles_for(capability)
    noted = [
        launch
        for blocks in dict.fromkeys(tiles)
        for rank in (RANKS[:1] if name == EXPERTS else RANKS[1:])
        for is_kept in (True, False)
        for launch in launches(QWEN, torch.bfloat16, blocks, rank=rank, is_kept=is_kept)
    ]
    return [(capability, KERNELS, launch) for launch in noted]


def compiled(work: Sequence[Job], limit_s: float) -> tuple[int, list[str]]:
    """Compile launches on all cores for so long; return how many were, and what was refused."""
    end_s, num, refused = time.perf_counter() + limit_s, 0, []
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("fork"))
    try:
        for job, future in [(job, pool.submit(compile_one, job)) for job in work]:
            error = future.exception(max(0.1, end_s - time.perf_counter()))
            if error is None:
                num += 1
            else:  # too large for this card, say: the case that starts it says so too
                refused.append(f"{job[2].kernel}: {type(error).__name__}: {error}"[:200])
    except TimeoutError:
        pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return num, refused


def compile_one(job: Job) -> None:
    """Compile one launch as a run would specialise it."""
    from triton.runtime import driver

    capability, module, launch = job
    with mock.patch.object(driver, "_active", _Driver(capability)):
        kernel = getattr(importlib.import_module(module), launch.kernel)
        kernel.warmup(grid=launch.grid, **launch.arguments)


def capability_of() -> int:
    """Return the card's capability as 90; this process must not have a context of the card."""
    program = "import torch; print('%d%d' % torch.cuda.get_device_capability())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return int(done.stdout)
