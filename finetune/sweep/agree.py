"""Which runs of a sweep peft can hold in one model, so that they train together."""

from collections.abc import Sequence
from dataclasses import dataclass

from finetune.planning.request import facts_of
from finetune.sweep.variants import Variant


@dataclass(frozen=True, kw_only=True, slots=True)
class _Held:
    """What peft cannot hold twice: other adapted parameters, a head that is tied to a copy."""

    parameters: frozenset[str]
    is_tied: bool

    def agrees(self, other: "_Held") -> bool:
        both = self.parameters and other.parameters and self.parameters != other.parameters
        return not both and not self.is_tied and not other.is_tied


def waves_of(runs: Sequence[Variant], *, most: int | None) -> list[list[Variant]]:
    """Return which runs train together, in their order; each is in the first wave that takes it.

    Args:
        runs: They agree in what they must share.
        most: Runs at a time; None for any number.
    """
    waves: list[list[Variant]] = []
    held: list[list[_Held]] = []
    found = _held_by(runs)
    for run, own in zip(runs, found, strict=True):
        for wave, others in zip(waves, held, strict=True):
            if (most is None or len(wave) < most) and all(own.agrees(one) for one in others):
                wave.append(run)
                others.append(own)
                break
        else:
            waves.append([run])
            held.append([own])
    return waves


def _held_by(runs: Sequence[Variant]) -> list[_Held]:
    """Find out what peft would adapt, on a model without weights; only where it can matter."""
    model = runs[0].recipe.model
    if not facts_of(model).has_experts and not any(r.recipe.adapter.modules_to_save for r in runs):
        return [_Held(parameters=frozenset(), is_tied=False) for _ in runs]
    from finetune.adapter.lora import held_by
    from finetune.model.empty import empty_of

    empty = empty_of(model)
    return [
        _Held(parameters=parameters, is_tied=is_tied)
        for parameters, is_tied in (held_by(empty, run.recipe.adapter) for run in runs)
    ]
