"""Experts by Triton against torch's grouped_mm, the loop and Liger: time, ceiling, memory.

    python -m tests.bench.bench_grouped --out FILE.jsonl    on a GPU; cases in FILE are skipped
    python -m tests.bench.bench_grouped --sweep             which tile is the fastest here
    python -m tests.bench.bench_grouped --compile           what kernels take, on cards not here
    python -m tests.bench.bench_grouped --rehearse          all of it, tiny, interpreted, on a CPU

One layer's experts, all frozen, at the sizes of three models, bf16; `skewed` routing is by
popularity 1 / rank. All arms run in turn within each round, with branches of rank 16 and without,
and a large matmul among them: the ceiling. The stream is kept busy while the host starts an arm, as
it is in training; an arm that waits for the device gains nothing by it. FLOPs are counted: 6 S D F
for a forward, as many for a backward to the inputs, 2 S R (2 D + 3 F) for branches and
twice that backward. Liger's backward cannot leave out the weights' gradients, which are counted
(another 6 S D F), and it has neither branches nor gpt_oss's bias and gate.

Shares are of the same round. `peak` is what a run allocates beyond inputs, weights and branches.
`error` is the distance of an arm's result from the loop's, by the loop's norm.
"""

import argparse
import dataclasses
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from offload.engine.experts.launcher import MAX_SHARED_BYTES
from offload.engine.experts.lora import register
from tests.bench.grouped import (
    ARMS,
    OURS,
    RANK,
    Bench,
    Log,
    Row,
    cases,
    ceiling,
    is_of,
    measure,
    where,
)
from tests.bench.record import median
from tests.bench.tiles import compile_all, show_sweep, sweep
from tests.mixtures import MIXTURES, Mixture

GOAL_OF_CEILING, GOAL_TOKENS, GOAL_OVERHEAD = 0.70, 8192, 0.15

# --------------------------------------------------------------------------------------- showing


def overhead(row: Row, rows: Sequence[Row]) -> float | None:
    """Return what branches add to an arm's time, where it ran without them too."""
    if row["rank"] is None:
        return None
    key = {name: row[name] for name in ("mixture", "num_tokens", "routing", "pass", "arm")}
    bare = [other for other in rows if is_of(other, key | {"rank": None}) and "ms" in other]
    return median(row, "ms") / median(bare[0], "ms") - 1 if bare else None


def show(rows: Sequence[Row], print_line: Callable[[object], None]) -> None:
    """Print the rows as a table, and what was aimed at."""
    rows = [row for row in rows if "arm" in row]
    what = "REHEARSAL, tiny and interpreted, " if rows[0]["rehearsal"] else ""
    table = Table(title=f"{what}{rows[0]['machine']}, {rows[0]['dtype']}; medians")
    columns = ("model", "tokens", "routing", "pass", "arm", "rank", "ms", "TFLOP/s", "of ceiling")
    for column in (*columns, "branches", "peak MiB", "error"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{row[name]}" for name in ("mixture", "num_tokens", "routing", "pass", "arm")]
        cells.append(f"{row['rank'] or ''}")
        if "failed" in row:
            table.add_row(*cells, row["failed"][:60])
            continue
        more = overhead(row, rows)
        cells += [f"{median(row, 'ms'):.3f}", f"{median(row, 'tflop_per_s'):.3g}"]
        cells += [f"{median(row, 'of_ceiling'):.1%}", "" if more is None else f"{more:+.1%}"]
        table.add_row(*cells, f"{row['peak_bytes'] / 2**20:,.1f}", f"{row['error']:.1e}")
    print_line(table)
    if rows[0]["rehearsal"]:
        print_line("a rehearsal reaches no goal and misses none")
        return
    ours = [row for row in rows if row["arm"] == OURS and "ms" in row]
    large = [row for row in ours if row["num_tokens"] >= GOAL_TOKENS and row["rank"] is None]
    shares = [row for row in large if median(row, "of_ceiling") >= GOAL_OF_CEILING]
    added = [more for row in ours if (more := overhead(row, rows)) is not None]
    cheap = [more for more in added if more < GOAL_OVERHEAD]
    aim = f"{GOAL_OF_CEILING:.0%} of the ceiling from {GOAL_TOKENS} tokens"
    print_line(f"{aim}: {len(shares)} of {len(large)}")
    print_line(f"branches under {GOAL_OVERHEAD:.0%}: {len(cheap)} of {len(added)}")


def tiny(mixture: Mixture) -> Mixture:
    """Return a mixture that an interpreter is done with soon."""
    return dataclasses.replace(mixture, num_experts=3, top_k=2, hidden=48, width=40)


def interpret() -> None:
    """Begin again with Triton to interpret: it looks when it is imported, as transformers does."""
    from triton import knobs

    if not knobs.runtime.interpret:
        again = [sys.executable, "-m", "tests.bench.bench_grouped", *sys.argv[1:]]
        sys.exit(subprocess.run(["env", "TRITON_INTERPRET=1", *again], check=False).returncode)


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for flag in ("--rehearse", "--compile", "--sweep"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=9.0, help="no case starts later")
    parser.add_argument("--case-s", type=float, default=20.0, help="most that an arm's rounds take")
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192, 32768, 2048])
    options = parser.parse_args()
    print_line = Console(width=170).print
    if options.compile:
        found = compile_all(print_line, list(MAX_SHARED_BYTES))
        if options.out is not None:
            options.out.write_text("".join(json.dumps(row) + "\n" for row in found))
        return
    device, dtype, size = torch.device("cuda"), torch.bfloat16, 4096
    sizes: tuple[Mixture, ...] = MIXTURES
    tokens = options.tokens
    if options.rehearse:
        interpret()
        torch.set_num_threads(1)
        device, dtype, size = torch.device("cpu"), torch.float32, 64
        sizes, tokens = tuple(tiny(mixture) for mixture in MIXTURES), [7]
    register()
    log = Log(options.out, where(device, dtype))
    if options.sweep:
        sweep(device, dtype, log, max_s=60 * options.minutes)
        show_sweep(log.rows, print_line)
        return
    end_s, top = time.perf_counter() + 60 * options.minutes, ceiling(device, dtype, size)
    for case in cases(sizes, tokens):
        if options.rehearse and case.is_step == case.is_skewed:
            continue  # each once is enough
        every = itertools.product(ARMS, (None, RANK))
        wanted = [
            (arm, rank) for arm, rank in every if not log.has(case.key | {"arm": arm, "rank": rank})
        ]
        if not wanted or time.perf_counter() > end_s:
            continue
        bench = Bench(case, device, dtype)
        for row in measure(bench, wanted, top=top, num_rounds=options.rounds, max_s=options.case_s):
            log.add(case.key | row)
    show(log.rows, print_line)


if __name__ == "__main__":
    main()
