"""The launches of a layer's visit, and the host's time for them: by the plan, and as they run."""

from dataclasses import replace

import pytest

from finetune.recipe.load import load_shape
from offload.plan.facts.facts import NORM_ELEMENTS, SUM_ELEMENTS
from tests.tiers import mostly_slow
from tests.visits import MIXTURES, OFF, ON, PARTS, SHAPES, Levers, counted_visit, priced_visit

BRANCHES, LOOP = replace(OFF, is_grouped=True), replace(OFF, experts="eager")
DORA = replace(ON, is_dora=True)
CASES = [
    *((shape, levers) for shape in SHAPES for levers in (OFF, BRANCHES, ON)),
    *((shape, LOOP) for shape in MIXTURES),
    *((shape, DORA) for shape in SHAPES if shape not in MIXTURES),
]


@pytest.mark.parametrize(
    ("shape", "levers"),
    mostly_slow(CASES, ("qwen3-8b", BRANCHES), ("qwen3-8b", DORA), ("mixtral-8x7b", OFF)),
    ids=str,
)
def test_a_visit_launches_and_keeps_the_host_as_the_plan_says_within_a_tenth(
    shape: str, levers: Levers, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in ("cpu", "cuda"):  # on a GPU a matrix is one chunk where a CPU takes many
        monkeypatch.setitem(NORM_ELEMENTS, device, 2**40)
        monkeypatch.setitem(SUM_ELEMENTS, device, 2**40)
    fields = load_shape(shape)
    found, said = counted_visit(fields, levers), priced_visit(fields, levers)
    for name in PARTS:
        assert said[name].num_launches == pytest.approx(found[name].num_launches, rel=0.1), name
        assert said[name].host_ops == pytest.approx(found[name].host_ops, rel=0.1), name
