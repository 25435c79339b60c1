from dataclasses import replace

import pytest
from rich.console import Console

from finetune.recipe.sections import ReportSection
from finetune.report.format import shown_time
from finetune.report.plan import plan_json
from finetune.report.summary import plan_summary
from offload.plan.machine.machine import GIB, Rate, named_machine
from offload.plan.request import ObjectiveCost, with_workload
from offload.plan.search import Choice, search
from tests.builders import qwen3_8b, request, slow_link, ways_of, workload

FACTS = qwen3_8b()
CARD = named_machine("rtx4060ti")
REQUEST = request(num_workers=1)
SHORT = request(workload(seq_len=256), num_micro_batches=1, num_workers=1)


def rows(choice: Choice) -> dict[str, list[str]]:
    """Return the lines of each row, by its name."""
    console = Console(width=400, highlight=False)
    with console.capture() as capture:
        console.print(plan_summary(choice, ReportSection()))
    title, *lines = capture.get().splitlines()
    num = choice.plan.request.num_ranks
    cards = f"{num} x " if num > 1 else ""
    assert title == f"Plan for {cards}{choice.plan.machine.name}: it fits"
    width = lines[0].index(f"{shown_time(choice.plan.step_s)} for")
    found: dict[str, list[str]] = {}
    name = ""
    for line in lines:
        name = line[:width].strip() or name
        found.setdefault(name, []).append(line[width:].rstrip())
    return found


def test_a_step_that_computes_is_limited_by_the_gpu_and_its_copies_are_hidden() -> None:
    choice = search(FACTS, CARD, ways_of(REQUEST), rounding=())
    found, plan = rows(choice), choice.plan
    assert list(found)[:2] == ["step", "limited by"]
    tokens_per_s = f"{plan.tokens_per_step / plan.step_s:,.0f}"
    assert f"for 16,384 tokens: {tokens_per_s} tokens/s, predicted from" in found["step"][0]
    (limit,) = found["limited by"]
    assert limit.startswith("GPU compute: backward ")
    assert limit.endswith("of copies from RAM hide behind it")
    assert f"streaming adds less than 1% from N* = {plan.break_even_tokens:,}" in found["tokens"][0]


@pytest.mark.parametrize(
    ("num_micro_batches", "hint"),
    [(8, "`train.micro_batch_size: 8`"), (1, "`train.micro_batch_size: 2`, 512 tokens per step")],
)
def test_launches_limit_a_small_micro_batch_and_a_larger_one_is_named(
    num_micro_batches: int, hint: str
) -> None:
    slow_host = replace(CARD, vram_bytes=80 * GIB, launch_s=Rate(value=1e-4, source="a test"))
    asked = replace(SHORT, num_micro_batches=num_micro_batches)
    choice = search(FACTS, slow_host, [asked], rounding=())
    found = rows(choice)
    (limit,) = found["limited by"]
    assert limit.startswith("launches: the GPU waits for the host to start its kernels; backward ")
    name, gain = found["faster with"][0].rsplit(": +", 1)
    assert name == hint
    size = int(hint.split("`")[1].split()[1])
    larger = workload(seq_len=256, micro_batch_size=size, label_tokens=256 * size)
    alone = request(larger, num_micro_batches=1, num_workers=1)
    then = search(FACTS, slow_host, [alone], rounding=()).plan
    more = then.tokens_per_step / then.step_s * choice.plan.step_s / choice.plan.tokens_per_step
    assert gain == f"{more - 1:.1%}"


def test_a_step_that_computes_is_told_no_larger_micro_batches() -> None:
    choice = search(FACTS, CARD, [REQUEST], rounding=())
    assert choice.chosen.costs.bound == "compute"
    assert "micro_batch" not in {what_if.change for what_if in choice.what_ifs}


def test_a_step_that_waits_is_limited_by_its_copies_and_a_faster_link_comes_first() -> None:
    choice = search(FACTS, slow_link(), ways_of(SHORT), rounding=("nf4",))
    found = rows(choice)
    (limit,) = found["limited by"]
    waited = choice.plan.predict().phases()["stall"] / choice.plan.step_s
    assert limit.startswith(f"copies from RAM: the GPU waits for weights {waited:.0%} of the step")
    percents = [float(line.rsplit("+")[-1].rstrip("%")) for line in found["faster with"]]
    assert percents == sorted(percents, reverse=True)
    assert any(line.startswith("a link of twice the rate: +") for line in found["faster with"])
    assert any("which rounds each weight, by 9.2% RMS: +" in line for line in found["faster with"])
    assert "in bf16_packed; slots for" in found["layers"][0]


def test_what_was_rejected_is_named_by_what_differs_and_why() -> None:
    choice = search(FACTS, CARD, ways_of(REQUEST)[:2], rounding=())
    lines = rows(choice)["rejected"]
    assert len(lines) == len(choice.rejected)
    more = choice.plan.num_slots + 1
    (slots,) = [line for line in lines if line.startswith(f"{more} slots: ")]
    assert ": at least " in slots
    assert slots.endswith("iB of device memory")
    assert not any("native" in line or "sequences" in line for line in lines)


def test_memory_is_shown_against_what_there_is_or_what_may_be_used() -> None:
    plan = search(FACTS, CARD, [REQUEST], rounding=())
    found = rows(plan)
    assert found["VRAM"][0].startswith(f"{plan.plan.peak_bytes / GIB:.2f} GiB of 14.69 GiB: ")
    assert found["RAM"][0].startswith(f"{plan.plan.host_bytes / GIB:.2f} GiB of 64.00 GiB: ")
    assert "12.94 GiB slab" in found["RAM"][0]
    less = search(FACTS, CARD, [replace(REQUEST, vram_budget_bytes=12 * GIB)], rounding=())
    assert " of 12.00 GiB (`offload.vram_budget`): " in rows(less)["VRAM"][0]
    more = search(FACTS, CARD, [replace(REQUEST, vram_budget_bytes=24 * GIB)], rounding=())
    assert " of 14.69 GiB, less than `offload.vram_budget`: " in rows(more)["VRAM"][0]


def test_a_cpu_has_one_memory() -> None:
    rate = Rate(value=1e10, source="drawn")
    cpu = replace(CARD, device="cpu", vram_bytes=64 * GIB, memory_bytes_per_s=rate)
    choice = search(FACTS, cpu, [REQUEST], rounding=())
    found = rows(choice)
    assert "VRAM" not in found
    both = choice.plan.peak_bytes + choice.plan.host_bytes
    assert found["RAM"][0].startswith(f"{both / GIB:.2f} GiB of 64.00 GiB: ")
    assert found["limited by"][0].startswith("CPU compute: ")


def test_resident_layers_are_loaded_once_and_have_no_break_even() -> None:
    found = rows(search(FACTS, replace(CARD, vram_bytes=80 * GIB), [REQUEST], rounding=()))
    assert found["layers"] == ["12.94 GiB in RAM; slots for 36 of 36: loaded once, then resident"]
    assert "N*" not in found["tokens"][0]
    assert "copies" not in found["limited by"][0]
    (line,) = found["faster with"]
    assert line.startswith("nothing tried: 1 GiB more VRAM, a link of twice the rate, ")


def test_what_an_objective_costs_is_shown_as_time_and_loads() -> None:
    plain = search(FACTS, CARD, [REQUEST], rounding=())
    assert "objective" not in rows(plain)
    asked = replace(REQUEST, objective=ObjectiveCost(has_reference=True))
    choice = search(FACTS, CARD, [asked], rounding=())
    (line,) = rows(choice)["objective"]
    time_frac, _ = choice.plan.objective_price
    assert 0.1 < time_frac < 0.4
    assert line.endswith(f"also by the reference: +{time_frac:.0%} time, +0 loads")


def test_what_an_embedding_in_ram_saves_and_costs_is_shown_and_written() -> None:
    device = search(FACTS, CARD, [replace(REQUEST, num_slots=4)], rounding=())
    assert "embeddings" not in rows(device)
    assert "embeddings" not in plan_json(device.plan)
    host = search(FACTS, CARD, [with_workload(device.plan.request, embeddings="host")], rounding=())
    (line,) = rows(host)["embeddings"]
    rows_bytes = 2048 * 8 + 2049 * 4096 * 2  # of a micro-batch
    saved = 151936 * 4096 * 2 - 2 * rows_bytes
    added_s = host.plan.step_s - device.plan.step_s
    assert line == (
        f"in RAM (`offload.embeddings: host`): {saved / GIB:.2f} GiB less of device memory, and at"
        f" most {8 * rows_bytes / 2**20:.1f} MiB of rows to it per step, which is"
        f" {shown_time(added_s)} longer"
    )
    written = plan_json(host.plan)["embeddings"]
    assert (written["saved_vram_bytes"], written["most_h2d_bytes"]) == (saved, 8 * rows_bytes)
    assert written["added_s"] == pytest.approx(added_s, abs=1e-9)
    assert "most_d2h_bytes" not in written
    # it has a few rows, and its buffers take more than all of them
    tiny = replace(qwen3_8b(vocab_size=64), head_parameters=0)
    few = search(tiny, CARD, [host.plan.request], rounding=())
    assert " more of device memory, and at most " in rows(few)["embeddings"][0]


def test_what_a_head_in_ram_saves_and_costs_is_shown_and_written() -> None:
    device = search(FACTS, CARD, [replace(REQUEST, num_slots=4)], rounding=())
    assert "head" not in rows(device)
    assert "head" not in plan_json(device.plan)
    host = search(FACTS, CARD, [with_workload(device.plan.request, head="host")], rounding=())
    (line,) = rows(host)["head"]
    size, added_s = 151936 * 4096 * 2, host.plan.step_s - device.plan.step_s
    assert line == (
        f"in RAM (`offload.head: host`): {size / GIB:.2f} GiB less of device memory; copied over"
        f" slots once per step, and 4 loads more, which is {shown_time(added_s)} longer"
    )
    written = plan_json(host.plan)["head"]
    assert (written["saved_vram_bytes"], written["h2d_bytes"]) == (size, size)
    assert written["num_loads"] == 4
    assert written["added_s"] == pytest.approx(added_s, abs=1e-9)
    # two slots are smaller than the head: they have room for it and for no more
    few = search(FACTS, CARD, [replace(host.plan.request, num_slots=2)], rounding=()).plan
    slot_bytes = few.costs.layers[0].weight_bytes
    assert plan_json(few)["head"]["saved_vram_bytes"] == 2 * slot_bytes
