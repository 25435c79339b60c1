"""Tiles of the experts' kernels: which is the fastest here, and what each takes on other cards."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from rich.table import Table

from offload.engine.experts import fused
from offload.engine.experts.launcher import MAX_SHARED_BYTES, Blocks, blocks_for
from offload.engine.streams import seconds_of
from tests.bench.grouped import OURS, RANK, Bench, Case, Log, Row, failures
from tests.bench.record import median, quantiles
from tests.compiled import compile_for
from tests.mixtures import GPT_OSS, QWEN, launches

ROWS_PER_EXPERT = (16, 64, 257)  # few, some, many: classes of blocks_for

# -------------------------------------------------------------------------------------- sweeping


def candidates(capability: tuple[int, int], rows_per_expert: int) -> Iterator[Blocks]:
    """Yield tiles that a card may take: accumulators in half of the registers, shared memory."""
    highest = max(16, min(128, 1 << (rows_per_expert - 1).bit_length()))
    max_bytes = MAX_SHARED_BYTES.get(
        10 * capability[0] + capability[1], min(MAX_SHARED_BYTES.values())
    )
    for m, n, k, num_warps, num_stages in itertools.product(
        sorted({highest, max(16, highest // 2)}), (64, 128, 256), (32, 64), (4, 8), (2, 3, 4, 5)
    ):
        shared_bytes = (m + n) * k * 2 * (num_stages - 1)
        if 16 <= m * n // (32 * num_warps) <= 128 and shared_bytes <= max_bytes:
            yield Blocks(m=m, n=n, k=k, num_warps=num_warps, num_stages=num_stages)


def sweep(device: torch.device, dtype: torch.dtype, log: Log, *, max_s: float) -> None:
    """Time a step with branches for each tile, by how many rows an expert has."""
    end_s = time.perf_counter() + max_s
    capability = torch.cuda.get_device_capability(device)
    for rows_per_expert, mixture in itertools.product(ROWS_PER_EXPERT[::-1], (QWEN, GPT_OSS)):
        num_tokens = rows_per_expert * mixture.num_experts // mixture.top_k
        case = Case(mixture=mixture, num_tokens=num_tokens, is_skewed=False, is_step=True)
        bench = Bench(case, device, dtype)
        compute = bench.arm(OURS, RANK)
        chosen = blocks_for(capability, dtype, rows_per_expert=rows_per_expert)
        for blocks in dict.fromkeys((chosen, *candidates(capability, rows_per_expert))):
            key = {"sweep": dataclasses.asdict(blocks), "rows_per_expert": rows_per_expert}
            key |= case.key
            if log.has(key) or time.perf_counter() > end_s:
                continue
            try:
                with mock.patch.object(fused, "blocks_for", return_value=blocks):
                    bench.run(compute)
                    times = [seconds_of(lambda: bench.run(compute), bench.device) for _ in range(5)]  # noqa: B023
            except failures() as failure:
                log.add(key | {"failed": f"{type(failure).__name__}: {failure}"[:200]})
                continue
            log.add(
                key | {"ms": quantiles([s * 1e3 for s in times]), "is_chosen": blocks == chosen}
            )


def show_sweep(rows: Sequence[Row], print_line: Callable[[object], None]) -> None:
    """Print the fastest tiles by model and rows per expert, and the one that is taken now."""
    table = Table(title=f"a step with branches of rank {RANK} on {rows[0]['machine']}")
    for column in ("model", "rows per expert", "m n k warps stages", "ms", "taken now"):
        table.add_column(column, justify="right")
    timed = [row for row in rows if "sweep" in row and "ms" in row]
    for of in dict.fromkeys((row["mixture"], row["rows_per_expert"]) for row in timed):
        same = [row for row in timed if (row["mixture"], row["rows_per_expert"]) == of]
        same.sort(key=lambda row: median(row, "ms"))
        for row in [*same[:5], *(row for row in same[5:] if row["is_chosen"])]:
            tile = " ".join(f"{number}" for number in row["sweep"].values())
            is_now = "*" if row["is_chosen"] else ""
            table.add_row(of[0], f"{of[1]}", tile, f"{median(row, 'ms'):.3f}", is_now)
    print_line(table)


# ------------------------------------------------------------------------------------- compiling


def compile_all(print_line: Callable[[object], None], capabilities: Sequence[int]) -> list[Row]:
    """Print what kernels take at worst, with branches and without; Mixtral is compiled as Qwen."""
    table = Table(title="registers of a thread, and KiB of shared memory; worst of two models")
    kernels = ("multiply", "activate", "activate_backward", "sum_outer")
    for column in (
        "card",
        "dtype",
        "rows",
        "m n k warps stages",
        *kernels,
        "limit",
        "spilled",
        "wide",
    ):
        table.add_column(column, justify="right")
    rows = []
    for capability, dtype, rows_per_expert in itertools.product(
        capabilities, (torch.bfloat16, torch.float32), ROWS_PER_EXPERT
    ):
        blocks = blocks_for(divmod(capability, 10), dtype, rows_per_expert=rows_per_expert)
        noted = [
            launch
            for mixture, rank in itertools.product((QWEN, GPT_OSS), (RANK, None))
            for launch in launches(mixture, dtype, blocks, rank=rank)
        ]
        found = compile_for(capability, noted)
        by_kernel = {k: [each for each in found if each.launch.kernel == k] for k in kernels}
        row = {
            "card": f"sm_{capability}",
            "dtype": f"{dtype}".removeprefix("torch."),
            "rows_per_expert": rows_per_expert,
            "blocks": dataclasses.asdict(blocks),
            "registers": {k: max(e.registers for e in by_kernel[k]) for k in kernels},
            "shared_bytes": {k: max(e.shared_bytes for e in by_kernel[k]) for k in kernels},
            "max_shared_bytes": MAX_SHARED_BYTES[capability],
            "spilled_bytes": max(each.spilled_bytes for each in found),
            "is_wide": all(each.is_wide for each in found),
            "num_programs": len(found),
        }
        rows.append(row)
        table.add_row(*_cells(row))
    print_line(table)
    return rows


def _cells(row: Row) -> Iterator[str]:
    yield from (row["card"], row["dtype"], f"{row['rows_per_expert']}")
    yield " ".join(f"{number}" for number in row["blocks"].values())
    for kernel, registers in row["registers"].items():
        yield f"{registers}, {row['shared_bytes'][kernel] / 2**10:.0f}"
    yield f"{row['max_shared_bytes'] / 2**10:.0f}"
    yield f"{row['spilled_bytes']} B"
    yield "yes" if row["is_wide"] else "no"
