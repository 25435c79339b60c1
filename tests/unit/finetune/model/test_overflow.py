"""The first module whose output is not finite is named, and its hooks are removed."""

import torch
from torch import nn

from finetune.model.overflow import first_overflow


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return 2 * x, None


def model() -> nn.Module:
    return nn.ModuleDict({"first": Twice(), "inner": nn.ModuleDict({"second": Twice()})})


def run(found: nn.Module, largest: float) -> None:
    x = torch.full((3,), largest, dtype=torch.float16)
    for module in (found["first"], found["inner"]["second"]):  # type: ignore[index]
        x, _ = module(x)


def test_the_first_module_that_overflows_is_named() -> None:
    for largest, expected in ((60000.0, ["first"]), (30000.0, ["inner.second"]), (1.0, [])):
        made = model()
        with first_overflow(made) as found:
            run(made, largest)
        assert found == expected
        run(made, 60000.0)
        assert found == expected  # the hook is gone


def test_other_models_are_not_looked_at() -> None:
    with first_overflow(model()) as found:
        run(model(), 60000.0)
    assert found == []


def test_a_module_that_was_given_what_is_not_finite_is_left_out() -> None:
    made = model()
    with first_overflow(made) as found:
        run(made, float("nan"))
        assert found == []
        run(made, 30000.0)
    assert found == ["inner.second"]
