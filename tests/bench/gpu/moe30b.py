"""Qwen3-30B-A3B's shape, LoRA on attention and experts: bf16, then nf4, by budget and length."""

from offload.plan.facts.facts import AdapterSpec
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.models import ATTENTION
from tests.bench.gpu.parts import Model, Part, worth_running
from tests.bench.gpu.settings import Settings
from tests.bench.gpu.training import machine_for, model_of, row_name, run_parts

SHAPE, RANK = "qwen3-30b-a3b", 8
ADAPTER = AdapterSpec(rank=RANK, targets=ATTENTION, experts=True, is_in_base_dtype=True)
FORMS: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("native", (24, 32)),
    ("nf4", (24, 12, 32)),
)
SEQ_LENS, FRACS = (8192, 2048), (2.0, 0.5, 1.0)


def parts_of(
    codec: str, budgets: tuple[float, ...], settings: Settings, seq_lens: tuple[int, ...]
) -> list[Part]:
    """Return the parts of one form, those first that goals are about; in a rehearsal a few."""
    if settings.is_rehearsal:
        return [
            Part(codec=codec, vram_gib=None, seq_len=16, of_m_star=frac, num_slots=2)
            for frac in FRACS[:2]
        ]
    own = budgets if settings.vram_gib is None else (settings.vram_gib,)
    return [
        Part(codec=codec, vram_gib=budget, seq_len=seq_len, of_m_star=frac)
        for frac in FRACS
        for seq_len in seq_lens
        for budget in own
    ]


def wanted(model: Model, parts: list[Part], settings: Settings) -> list[Part]:
    """Leave out what this run is not to measure."""
    return [part for part in parts if settings.wants(row_name(model, part))]


def run(settings: Settings, journal: Journal) -> None:
    """Measure all parts."""
    model = model_of(SHAPE, ADAPTER, is_rehearsal=settings.is_rehearsal)
    forms = []
    for codec, budgets in FORMS:
        parts = wanted(model, parts_of(codec, budgets, settings, SEQ_LENS), settings)
        if not parts:
            continue
        forms.append(worth_running(model, machine_for(model, settings, parts[0]), parts))
    journal.expect([row_name(model, part) for parts in forms for part in parts])
    for number, parts in enumerate(forms):
        num_later = len(forms) - number - 1
        reserve_s = settings.left_s * num_later / (num_later + 1)
        run_parts(settings, journal, model, parts, reserve_s=reserve_s)
