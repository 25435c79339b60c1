"""Packed rows: attention of all rows in one call, against row by row.

The same steps both ways, warm, in turn: seconds, the most memory, and how far gradients and losses
are apart. On a CPU, which has no such kernel, a stand-in is called: it shows that the case runs.
"""

from contextlib import nullcontext
from statistics import median
from typing import Any

import torch

from offload.engine.engine import Engine, EngineOptions
from offload.engine.streams import device_named
from offload.plan.facts.facts import AdapterSpec
from tests.bench.gpu.exact import Size, config_of
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.models import ATTENTION, make
from tests.bench.gpu.settings import Settings
from tests.variable_length import variable_length

NUM_LAYERS, NUM_WARM, NUM_TIMED = 5, 2, 5
LENS = {"short rows": (96, 180, 64, 220, 130) * 12, "long rows": (4096, 1500, 2600)}
TINY_LENS = {"short rows": (5, 9, 3, 7), "long rows": (20, 12)}


def run(settings: Settings, journal: Journal) -> None:
    """Compare both ways on rows of each kind."""
    work = TINY_LENS if settings.is_rehearsal else LENS
    journal.expect(list(work))
    for name, lens in work.items():
        if not journal.has(name) and settings.left_s > 0:
            with variable_length() if settings.is_rehearsal else nullcontext():
                journal.add(name, **compared(lens, settings))


def compared(lens: tuple[int, ...], settings: Settings) -> dict[str, Any]:
    """Time steps both ways; return what differs."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 512, (1, sum(lens)), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone(), "row_lens": torch.tensor(lens)}
    found = {way: _steps(batch, settings, joins_rows=way == "joined") for way in ("rows", "joined")}
    apart, joined = (found[way].pop("gradients") for way in ("rows", "joined"))
    distance = sum(float((joined[n] - g).norm() ** 2) for n, g in apart.items()) ** 0.5
    norm = sum(float(g.norm() ** 2) for g in apart.values()) ** 0.5
    return {
        "num_packed_rows": len(lens),
        "tokens_per_step": sum(lens),
        "gradients_apart": distance / norm,
        "speedup": found["rows"]["step_s"] / found["joined"]["step_s"],
        **{
            f"{way}_{name}": value
            for way, values in found.items()
            for name, value in values.items()
        },
    }


def _steps(
    batch: dict[str, torch.Tensor], settings: Settings, *, joins_rows: bool
) -> dict[str, Any]:
    hidden = 64 if settings.is_rehearsal else 2048
    size = Size(name="packed", hidden=hidden, seq_len=0, num_micro_batches=1)
    made = make(
        config_of("qwen3-8b", size),
        dtype=torch.bfloat16,
        codec="native",
        device=torch.device(settings.device),
        adapter=AdapterSpec(rank=8, targets=ATTENTION, experts=False),
        experts_implementation=None,
    )
    options = EngineOptions(
        num_slots=NUM_LAYERS,
        num_kept_graphs=0,
        codec="native",
        tier="ram",
        store_dir=None,
        stash="device",
        trained_weights="device",
        head_chunk_tokens=1024,
        joins_rows=joins_rows,
    )
    engine = Engine(
        made.model, device=device_named(settings.device), options=options, backing=made.slab
    )
    try:
        if settings.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds, loss = [], 0.0
        for _ in range(NUM_WARM + NUM_TIMED):
            made.model.zero_grad()
            result = engine.forward_backward([batch], dropout_seed=0)
            seconds.append(result.timeline.step_s)
            loss = result.loss
        return {
            "step_s": median(seconds[NUM_WARM:]),
            "steps_s": seconds[NUM_WARM:],
            "loss": loss,
            "num_joined_layers": len(engine.rows_joined),
            "peak_allocated_bytes": (
                torch.cuda.max_memory_allocated() if settings.device == "cuda" else 0
            ),
            "gradients": {
                n: p.grad.float().cpu()
                for n, p in made.model.named_parameters()
                if p.grad is not None
            },
        }
    finally:
        engine.close()
