"""What computes norms, rotary embedding, gates and the loss: settled before a run is planned.

Each of the four is decided by itself. The model's own code and the fused operators differ in their
last bits, so a run keeps what it began with: the choice is written into its recipe.
"""

import importlib.util
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, cast, get_args

from finetune.errors import ConfigError
from finetune.recipe.recipe import Recipe
from finetune.report.format import shown_time
from finetune.report.screen import Screen
from offload.plan.facts.workload import FusedPart

if TYPE_CHECKING:
    import torch
    from torch import nn

LayerKernels = Literal["plain", "fused"] | tuple[FusedPart, ...]
WORDS = {"Norm": "norms", "Rotary": "rotations", "GatedMlp": "gates"}


def settled_layer_kernels(recipe: Recipe, device: "torch.device", screen: Screen) -> LayerKernels:
    """Return whether a run's layers are plain or fused, or which parts are fused, and show why.

    Fused operators are tried on a layer of the model's own code where they are left to choose.

    Raises:
        ConfigError: They are asked for, and cannot run here.
    """
    wanted = recipe.model.layer_kernels
    has_triton = _has_triton()
    if recipe.model.kernels == "fused" and not (has_triton and device.type == "cuda"):
        what = "there is no Triton here" if device.type == "cuda" else f"{device} has no CUDA"
        raise ConfigError(
            f"model.layer_kernels: fused, but {what}",
            limit="fused operators are Triton's, which run on CUDA; a resumed run keeps those that"
            " it began with",
            hint="`model.layer_kernels: auto` for a new run",
        )
    if wanted != "auto":
        return wanted
    is_plain = recipe.train.compile or recipe.train.is_full or recipe.train.is_sharded
    if device.type != "cuda" or is_plain:
        return "plain"
    if not has_triton:
        screen.note("Norms, rotary, gates and loss: the model's own code, as there is no Triton")
        return "plain"
    against = _found_against(recipe, device, screen)
    if not against:
        return "fused"
    return tuple(part for part in get_args(FusedPart) if part not in against) or "plain"


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _found_against(recipe: Recipe, device: "torch.device", screen: Screen) -> set[FusedPart]:
    """Try the operators, show what came of it, and return the parts with one wrong or slower."""
    from finetune.model.empty import empty_of
    from offload.engine.model.layers import LayeredModel
    from offload.engine.pointwise.trial import try_fused

    screen.note("Trying fused norms, rotary, gates and loss ...")
    model = empty_of(recipe.model).requires_grad_(requires_grad=False)
    vocab_size = cast("nn.Embedding", model.get_input_embeddings()).num_embeddings
    trials = try_fused(list(LayeredModel(model).layers), vocab_size, device)
    for trial in trials:
        if trial.plain_s is not None and trial.fused_s is not None:
            times = f"{shown_time(trial.fused_s)}, by the model's code {shown_time(trial.plain_s)}"
            screen.detail(f"  {trial.name}: {times}")
    against = {trial.part: trial for trial in trials if trial.reason is not None}
    for part, trial in against.items():
        screen.note(f"{part.capitalize()}: the model's own code ({trial.name}: {trial.reason})")
    return set(against)


def shown_fused(by_layer: Sequence[Counter[str]], *, fuses_loss: bool) -> tuple[str, ...]:
    """Return a line of how many parts of all layers are fused, and which kinds in none of them.

    There is none if nothing is to be fused.
    """
    if not by_layer:
        return ()
    total = sum(by_layer, Counter[str]())
    parts = [f"{total[kind]:,} {word}" for kind, word in WORDS.items() if total[kind]]
    left = [word for kind, word in WORDS.items() if not total[kind]]
    left += [] if fuses_loss else ["loss"]
    loss = "the loss, and " if fuses_loss else ""
    rest = f"; {' and '.join(left)} by the model's own code" if left else ""
    return (f"Fused: {loss}in {len(by_layer)} layers {', '.join(parts) or 'nothing'}{rest}",)
