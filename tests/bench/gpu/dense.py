"""Qwen3-8B's and Qwen3-32B's shapes, LoRA on all linear layers."""

from offload.plan.facts.facts import AdapterSpec, linear_names
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.models import fields
from tests.bench.gpu.moe30b import parts_of, wanted
from tests.bench.gpu.parts import worth_running
from tests.bench.gpu.settings import Settings
from tests.bench.gpu.training import machine_for, model_of, row_name, run_parts
from tests.builders import model_facts

RANK, SEQ_LENS = 16, (2048, 8192)
FORMS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("qwen3-8b", "native", (12,)),
    ("qwen3-32b", "native", (24,)),
    ("qwen3-32b", "nf4", (16,)),
)


def adapter_of(shape: str) -> AdapterSpec:
    """Return an adapter on all linear layers, computed as a run does it."""
    targets = linear_names(model_facts(fields(shape)))
    return AdapterSpec(rank=RANK, targets=targets, experts=False, is_in_base_dtype=True)


def run(settings: Settings, journal: Journal) -> None:
    """Measure all parts."""
    work = []
    for shape, codec, budgets in FORMS[:1] if settings.is_rehearsal else FORMS:
        model = model_of(shape, adapter_of(shape), is_rehearsal=settings.is_rehearsal)
        parts = wanted(model, parts_of(codec, budgets, settings, SEQ_LENS), settings)
        if not parts:
            continue
        work.append((model, worth_running(model, machine_for(model, settings, parts[0]), parts)))
    journal.expect([row_name(model, part) for model, parts in work for part in parts])
    for number, (model, parts) in enumerate(work):
        num_later = len(work) - number - 1
        reserve_s = settings.left_s * num_later / (num_later + 1)
        run_parts(settings, journal, model, parts, reserve_s=reserve_s)
