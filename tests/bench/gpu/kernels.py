"""Where a warm step's time goes: every kernel by name, and the layers' FLOP/s."""

from typing import Any

from torch.profiler import ProfilerActivity, profile

from tests.bench.gpu import dense, moe30b
from tests.bench.gpu.card import Card
from tests.bench.gpu.journal import Journal
from tests.bench.gpu.parts import MIN_LAYERS, Model, Part
from tests.bench.gpu.rig import NUM_WARM, rates_of
from tests.bench.gpu.settings import Settings
from tests.bench.gpu.training import FAILURES, Session, machine_for, model_of

SEQ_LEN, VRAM_GIB, OF_M_STAR = 8192, 32.0, 0.5


def run(settings: Settings, journal: Journal) -> None:
    """Profile a mixture and a dense model, their weights in bf16."""
    dense_shape = dense.FORMS[0][0]
    work = (
        (moe30b.SHAPE, moe30b.ADAPTER),
        (dense_shape, dense.adapter_of(dense_shape)),
    )
    journal.expect([shape for shape, _ in work])
    for shape, adapter in work:
        if journal.has(shape) or settings.left_s < 0:
            continue
        model = model_of(shape, adapter, is_rehearsal=settings.is_rehearsal)
        try:
            journal.add(shape, **profiled(settings, model))
        except FAILURES as error:
            journal.fail(shape, error)


def profiled(settings: Settings, model: Model) -> dict[str, Any]:
    """Run warm steps, then one under the profiler."""
    part = Part(
        codec="native",
        vram_gib=settings.vram_gib or VRAM_GIB,
        seq_len=16 if settings.is_rehearsal else SEQ_LEN,
        of_m_star=OF_M_STAR,
        num_slots=2,
    )
    machine = machine_for(model, settings, part)
    num_layers = settings.num_layers or min(MIN_LAYERS, model.facts.num_layers)
    is_cuda = machine.device == "cuda"
    with Card(machine.device) as card:
        session = Session(model, machine, "native", num_layers=num_layers, card=card)
        try:
            planned, rig, batches = session.ready(part)
            work = session.work(planned)
            for _ in range(NUM_WARM):
                rig.step(batches)
            plain = rig.step(batches)
            with profile(
                activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]
            ) as seen:
                step = rig.step(batches)
        finally:
            session.close()
    return {
        **planned.said,
        **rates_of(planned.run, [plain], work),
        "step_without_profiler_s": plain.seconds,
        "profiled_step_s": step.seconds,
        "phases_s": plain.timeline.with_optimizer(plain.optimizer_s).phases(),
        "top": top_of(seen, is_cuda=is_cuda),
    }


def top_of(seen: Any, *, is_cuda: bool) -> list[dict[str, Any]]:
    """Return all that took time by itself, and its share of what was seen, the most first."""
    found = []
    for event in seen.key_averages():
        took_us = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        found.append((float(took_us) / 1e6, int(event.count), str(event.key)))
    total_s = sum(seconds for seconds, _, _ in found) or 1.0
    return [
        {"name": name, "num": num, "seconds": seconds, "frac": seconds / total_s}
        for seconds, num, name in sorted(found, reverse=True)
        if seconds
    ]
