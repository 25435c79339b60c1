from rich.console import Console

from finetune.plan_report import machine_table
from offload.plan.machine import named_machine


def test_a_machine_is_shown_with_how_it_multiplies_experts_and_why() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(machine_table(named_machine("rtx3060")))
    (line,) = [x for x in capture.get().splitlines() if "experts_implementation" in x]
    assert line.split() == [
        *("experts_implementation", "triton"),
        *("assumed", "until", "a", "run", "measures", "it"),
    ]
