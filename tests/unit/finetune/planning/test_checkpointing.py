"""`train.gradient_checkpointing`: which layers a plan computes again."""

import re

import pytest

from offload.errors import DoesNotFitError
from offload.plan.plan import Plan
from tests.bench.bench_launches import planned
from tests.bench.record import ROOT


def plan_of(name: str, card: str, *settings: str) -> Plan:
    return planned(str(ROOT / f"recipes/{name}.yaml"), card, list(settings))


@pytest.mark.parametrize(("value", "num_kept"), [("true", 0), ("false", 36)])
def test_all_layers_are_computed_again_or_none(value: str, num_kept: int) -> None:
    plan = plan_of("qwen3_4b_8gb", "rtx3060", f"train.gradient_checkpointing={value}")
    assert plan.num_kept_graphs == num_kept
    assert plan.residency.num_sent_graphs == 0
    free = plan_of("qwen3_4b_8gb", "rtx3060")
    assert 0 < free.num_kept_graphs < 36
    assert free.step_s < plan.step_s


@pytest.mark.parametrize("name", ["qwen30b_lora_5090", "qwen3_32b_24gb"])
def test_none_is_refused_with_the_bytes_and_the_hint_plans(name: str) -> None:
    with pytest.raises(DoesNotFitError, match=r"GiB .* memory.* too much") as error:
        plan_of(name, "rtx3060", "train.gradient_checkpointing=false")
    hint = re.findall(r"`([\w.]+): ([^`]+)`", error.value.hint)
    plan = plan_of(name, "rtx3060", *(f"{field}={value}" for field, value in hint))
    assert plan.num_kept_graphs == int(dict(hint)["offload.kept_graphs"])
