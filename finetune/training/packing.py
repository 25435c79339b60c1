"""Whether a run packs rows: settled once, before it is planned, and written into its recipe.

Packed rows are what each is alone, but in their last bits, and a step that is given in tokens has
other rows. So a run keeps what it began with.
"""

from collections.abc import Callable
from typing import Literal

from finetune.data.order import StepSizes
from finetune.data.steps import Steps
from finetune.recipe.recipe import Recipe


def settled_packing(recipe: Recipe, note: Callable[[str], None]) -> Literal["on", "off"]:
    """Return whether a run packs rows, and say why it does not where that was left open.

    No model is asked: the engine finds which of its layers keep packed rows apart, and gives the
    others one row after the other.
    """
    if recipe.data.packing != "auto":
        return recipe.data.packing
    if recipe.train.is_sharded:
        note("Packing: off, as only layers that are streamed keep packed rows apart")
        return "off"
    if recipe.train.compile:
        note("Packing: off, as compiled layers do not keep packed rows apart")
        return "off"
    if recipe.adapter.stated.is_virtual:
        note("Packing: off, as the room of a sequence is for rows without virtual tokens")
        return "off"
    return "on"


def shown_steps(steps: Steps) -> str:
    """Return a line of how many steps and epochs the run has."""
    num, last, epochs = steps.num, steps.num_rows_in(steps.num - 1), steps.order.num_epochs
    line = f"{num:,} step{'s' * (num > 1)}: {epochs:,.4g} epoch{'s' * (epochs != 1)} of"
    line += f" {steps.num_rows:,} row{'s' * (steps.num_rows > 1)}"
    is_short = steps.order.end is not None and num > 1
    return line + (f", of which the last step has {last:,}" if is_short else "")


def shown_packing(sizes: StepSizes) -> tuple[str, ...]:
    """Return a line of how full sequences are and how many rows a step has; none if unpacked."""
    found = sizes.packing
    if found is None:
        return ()
    return (
        f"Packing: sequences are {found.fill:.1%} full; a typical step has {found.rows_per_step:,}"
        f" rows in {sizes.num_micro_batches} micro-batches of {sizes.typical_width:,} tokens",
    )


def shown_layers(*, num_together: int, num_joined: int, num_layers: int) -> str:
    """Return how packed rows are computed, once the engine has found it out.

    Args:
        num_together: Layers that compute them together.
        num_joined: Those of them whose attention is one call.
        num_layers: All layers.
    """
    if not num_together:
        return "Packed rows: this model's layers do not keep them apart, and take one by one"
    attention = "row by row"
    if num_joined:
        attention = "in one call (torch's varlen_attn)"
        if num_joined < num_together:
            attention += f" in {num_joined} of them, row by row in the others"
    if num_together == num_layers:
        return f"Packed rows: computed together in all layers, attention {attention}"
    return (
        f"Packed rows: computed together in {num_together} of {num_layers} layers, attention"
        f" {attention}; the others do not keep them apart, and take one by one"
    )
