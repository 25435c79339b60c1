import json
from dataclasses import replace

from rich.console import Console

from finetune.report.choice import choice_json, choice_tables
from offload.plan.machine.machine import GIB, Rate, named_machine
from offload.plan.search import search
from tests.builders import qwen3_8b, request, slow_link, ways_of, workload

FACTS = qwen3_8b()
CARD = named_machine("rtx4060ti")
REQUEST = request(num_workers=1)
SHORT_REQUEST = request(workload(seq_len=256), num_micro_batches=1, num_workers=1)
SLOW = slow_link()


def shown(choice) -> str:
    console = Console(width=140, highlight=False)
    with console.capture() as capture:
        console.print(choice_tables(choice))
    return capture.get()


def test_the_choice_its_rivals_and_what_if_are_shown() -> None:
    choice = search(FACTS, SLOW, ways_of(SHORT_REQUEST), rounding=("int8", "nf4"))
    text = shown(choice)
    assert f"bf16_packed, {choice.plan.num_slots} slots, inputs" in text
    assert "1 x 1 sequences" in text
    assert "chosen" in text
    reasons = [one for one in text.splitlines() if "slower by" in one or "short of" in one]
    assert len(reasons) == 3
    assert "GiB of device memory" in text
    n_star = f"of 1 x 256, streaming adds less than 1% from N* = {choice.plan.break_even_tokens:,}"
    assert f"{n_star}; this step has 256 tokens." in " ".join(text.split())
    assert "1 GiB more VRAM" in text
    assert "a link of twice the rate" in text
    assert "512 tokens per step" in text
    assert "offload.codec: nf4, which rounds each weight, by 9.2% RMS" in text


def test_the_json_holds_what_is_shown() -> None:
    choice = search(FACTS, SLOW, ways_of(SHORT_REQUEST), rounding=("nf4",))
    values = json.loads(json.dumps(choice_json(choice)))
    assert values["choice"]["codec"] == "bf16_packed"
    assert values["choice"]["num_slots"] == choice.plan.num_slots
    assert values["choice"]["step_s"] == choice.plan.step_s
    assert len(values["rejected"]) == 3
    for one, rejected in zip(values["rejected"], choice.rejected, strict=True):
        assert one["reason"] in shown(choice)
        assert one["is_simulated"] == (rejected.step_s is not None)
        assert bool(one["short_bytes"]) == bool(rejected.shortages)
    what_ifs = {one["change"]: one for one in values["what_if"]}
    assert set(what_ifs) == {"memory", "link", "tokens", "micro_batch", "nf4"}
    assert what_ifs["nf4"]["weight_rounding"] == 0.092
    assert what_ifs["link"]["weight_rounding"] == 0
    assert what_ifs["link"]["tokens_per_s"] > 256 / choice.plan.step_s


def test_what_does_not_fit_and_what_takes_as_long_say_so() -> None:
    choice = search(FACTS, CARD, ways_of(replace(REQUEST, num_micro_batches=12))[:2], rounding=())
    assert "no faster" in shown(choice)
    alone = search(FACTS, CARD, [replace(REQUEST, num_micro_batches=12)], rounding=())
    tokens = next(line for line in shown(alone).splitlines() if "49,152 tokens" in line)
    assert "short of" in tokens
    assert "GiB of device memory" in tokens


def test_a_resident_plan_has_no_break_even_and_a_cpu_no_vram() -> None:
    roomy = replace(CARD, vram_bytes=80 * GIB)
    assert "N*" not in shown(search(FACTS, roomy, [REQUEST], rounding=()))
    cpu = replace(
        CARD,
        device="cpu",
        vram_bytes=64 * GIB,
        memory_bytes_per_s=Rate(value=1e10, source="drawn"),
    )
    text = shown(search(FACTS, cpu, [REQUEST], rounding=()))
    assert "1 GiB more RAM" in text
    assert "VRAM" not in text
