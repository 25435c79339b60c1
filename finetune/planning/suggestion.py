"""A recipe for a model, a machine and a goal, found by planning it in each form of its layers.

A form is a codec, with the layers in RAM or, where RAM cannot hold them, on disk. Nothing is
estimated: each form is planned as `sluice plan` does it, so the figures of the chosen one are those
that its recipe plans to.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from finetune.errors import ConfigError
from finetune.planning.candidates import Goal, chosen_plan, fits, nearest_request
from finetune.planning.compare import fitting_lengths, slowest_card
from finetune.planning.ranks import GPUS, require_gpus
from finetune.planning.request import facts_of, with_backend
from finetune.planning.subject import Subject, WantedModel
from finetune.recipe.capabilities import RIVALS, broken_rules
from finetune.recipe.draft import Draft, Place, apply_overrides
from finetune.recipe.load import recipe_from
from finetune.recipe.recipe import Recipe, whole_units, with_settings
from finetune.report.format import shown_gib
from offload.errors import DoesNotFitError
from offload.plan.facts.codec import CODECS, codecs_that
from offload.plan.machine.cards import CARDS
from offload.plan.machine.machine import GIB, Machine, named_machine, usable_ram_bytes
from offload.plan.plan import Plan
from offload.plan.what_if import plan_anyway

Tier = Literal["auto", "disk"]
Settings = dict[str, dict[str, Any]]
_Size = TypeVar("_Size")
TOKENS_PER_STEP, SEQ_LEN = 16_384, 2_048
SOME_ROWS = "yahma/alpaca-cleaned"
LORA_LR, FULL_LR = 2e-4, 1e-5
RAM_SIZES_GIB = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The machine that a recipe is for."""

    machine: Machine  # its rates and memory
    options: str  # what `sluice plan` is given to mean it
    # Device memory that the recipe may use; None for all that there is.
    vram_gib: float | None = None
    num_gpus: int = 1  # such cards, which share a step and the host's memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A recipe with its layers in one form, planned."""

    settings: Settings  # the settings of the recipe, as they are written
    recipe: Recipe  # the complete recipe
    # The plan of a run; where it does not fit, one with the fewest slots and more memory.
    plan: Plan
    short: tuple[str, ...]  # the memories that are too small for it; empty if it fits

    @property
    def tokens_per_s(self) -> float:
        """Predicted, for full sequences."""
        return self.plan.tokens_per_step / self.plan.step_s

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.recipe.train.seq_len

    @property
    def rounding(self) -> float:
        """How far the codec rounds each weight, as a share of it (RMS)."""
        return CODECS[self.plan.request.typical.codec].rounding


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A recipe, and what it was chosen from."""

    model: WantedModel  # what is trained
    target: Target  # the machine that it was planned for
    goal: Goal  # how it was chosen
    chosen: Form  # the recipe and its plan
    forms: tuple[Form, ...]  # all forms that were planned, the exact one first


def first_settings(model: WantedModel, *, name: str, dtype: str) -> Settings:
    """Return the settings that a suggested recipe begins with: LoRA on all linear layers.

    Args:
        model: Model that is trained.
        name: Name of the run.
        dtype: Type of the machine's rates; a machine in float16 is one without bfloat16.
    """
    half = {"dtype": dtype} if dtype == "float16" else {}
    return {
        "model": {**model.settings, **half},
        "adapter": {"rank": 16, "alpha": 32, "targets": "all-linear"},
        "data": {"path": SOME_ROWS, "eval_frac": 0.01},
        "train": {
            "seq_len": SEQ_LEN,
            "tokens_per_step": TOKENS_PER_STEP,
            "epochs": 1,
            "lr": LORA_LR,
            "warmup_ratio": 0.03,
        },
        "output": {"name": name, "checkpoint_every": 50, "eval_every": 50},
    }


def suggest(
    model: WantedModel,
    target: Target,
    goal: Goal,
    *,
    settings: Mapping[str, Mapping[str, Any]],
    overrides: Sequence[str] = (),
) -> Suggestion:
    """Plan a recipe in each form of its layers, and choose one by the goal.

    Args:
        model: Model that is trained.
        target: The machine.
        goal: How to choose.
        settings: The recipe's, as of `first_settings`.
        overrides: Settings over these, as on a command line; forms that they rule out are not
            planned.

    Raises:
        ConfigError: A setting is wrong.
        DoesNotFitError: No form fits; the error names the smallest card and RAM for which one does.
    """
    if goal.is_longest:
        _require_open_length(overrides)
    base = _Base.of(settings, target, overrides)
    require_gpus(base.subject.recipe.train, target.machine, num_gpus=target.num_gpus, setting=GPUS)
    planned = tuple(base.forms(target.machine, goal))
    fitting = [form for form in planned if not form.short]
    if not fitting:
        raise _refusal(model, target, base, planned)
    return Suggestion(
        model=model, target=target, goal=goal, chosen=_best(fitting, goal), forms=planned
    )


def _best(forms: Sequence[Form], goal: Goal) -> Form:
    """Return the form that the goal prefers; of equals the first."""

    def measure(form: Form) -> float:
        return form.seq_len if goal.is_longest else form.tokens_per_s

    enough = goal.least_frac * max(map(measure, forms))
    return min(
        (form for form in forms if measure(form) >= enough),
        key=lambda form: (form.rounding, -measure(form)),
    )


def _require_open_length(overrides: Sequence[str]) -> None:
    """Refuse settings that leave no length of sequences to be found.

    Raises:
        ConfigError: There is one.
    """
    for text in overrides:
        key = text.partition("=")[0].strip()
        if key in ("train.seq_len", "train.grad_accum_steps"):
            raise ConfigError(
                f"{text} with the goal context",
                limit="the goal finds the length of sequences within `train.tokens_per_step`",
                hint=f"leave out `{key}`, or take the goal quality",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Base:
    """A recipe whose form is open, with its settings as they are written."""

    settings: Settings
    subject: Subject

    @classmethod
    def of(
        cls,
        settings: Mapping[str, Mapping[str, Any]],
        target: Target,
        overrides: Sequence[str],
    ) -> "_Base":
        written = copy.deepcopy({name: dict(section) for name, section in settings.items()})
        if target.vram_gib is not None:
            written.setdefault("offload", {})["vram_budget"] = target.vram_gib
        recipe, written = _completed(written, overrides)
        if recipe.train.is_full:
            written.pop("adapter", None)
            if not any(text.startswith("train.lr=") for text in overrides):
                written["train"]["lr"] = FULL_LR
            recipe, written = _completed(written, ())
        facts = facts_of(recipe.model)
        is_asked = any(text.startswith("train.seq_len=") for text in overrides)
        if not is_asked and recipe.train.seq_len > facts.max_position_embeddings:
            written = _with_length(written, facts.max_position_embeddings, target.num_gpus)
            recipe, written = _completed(written, ())
        subject = Subject(name="", recipe=recipe, facts=facts, num_ranks=target.num_gpus)
        return cls(settings=written, subject=subject)

    def forms(self, machine: Machine, goal: Goal) -> Iterator[Form]:
        """Yield each form: from RAM where that holds the layers, else from disk.

        For the longest sequence both are tried, as layers and inputs share RAM.
        """
        for codec, tiers in self._open().items():
            tried: list[Form] = []
            for tier in tiers:
                tried.append(self._form(machine, codec, tier, goal))
                if not tried[-1].short and not goal.is_longest:
                    break
            yield from [form for form in tried if not form.short] or tried[-1:]

    def fits(self, machine: Machine) -> bool:
        """Return whether any form fits a machine, without a budget of device memory."""
        free = with_settings(self.subject.recipe, {"offload.vram_budget": "auto"})
        here = with_backend(free, self.subject.facts, machine)
        return any(
            fits(self.subject.facts, here, self.subject.requests(placed)[::-1])
            for codec, tiers in reversed(self._open().items())  # the smallest first
            for placed in (_placed(free, codec, tier) for tier in reversed(tiers))
        )

    def _open(self) -> dict[str, list[Tier]]:
        """Return the codecs that the settings leave open and the rules allow, and their tiers."""
        asked = self.settings.get("offload", {})
        codecs = ["auto", *codecs_that(lambda codec: codec.rounding)]
        codecs = [self.subject.recipe.offload.codec] if "codec" in asked else codecs
        tiers: tuple[Tier, ...] = ("auto",) if "tier" in asked else get_args(Tier)
        allowed = {
            codec: [
                t for t in tiers if not any(broken_rules(_placed(self.subject.recipe, codec, t)))
            ]
            for codec in codecs
        }
        return {codec: some for codec, some in allowed.items() if some}

    def _form(self, machine: Machine, codec: str, tier: Tier, goal: Goal) -> Form:
        recipe, settings = _placed(self.subject.recipe, codec, tier), self.settings
        here = with_backend(recipe, self.subject.facts, machine)
        changes: dict[str, Any] = {} if codec == "auto" else {"codec": codec}
        changes |= {} if tier == "auto" else {"tier": tier}
        if goal.is_longest:
            lengths, number = fitting_lengths(self.subject, here, recipe)
            if number:
                settings = _with_length(settings, lengths[number - 1], self.subject.num_ranks)
        if changes:
            settings = settings | {"offload": {**settings.get("offload", {}), **changes}}
        recipe, settings = _completed(settings, ())
        requests = self.subject.requests(recipe)
        made = chosen_plan(self.subject.facts, here, requests)
        short: tuple[str, ...] = ()
        if made is None:
            made, short = plan_anyway(
                self.subject.facts, here, nearest_request(self.subject.facts, here, requests)
            )
        return Form(settings=settings, recipe=recipe, plan=made, short=short)


def _placed(recipe: Recipe, codec: str, tier: Tier) -> Recipe:
    disk = {"offload.tier": tier} if tier == "disk" else {}
    return with_settings(recipe, {"offload.codec": codec, **disk})


def _with_length(settings: Settings, seq_len: int, num_gpus: int) -> Settings:
    """Return settings with another length of sequences, the step cut to whole ones for each GPU."""
    train = settings["train"] | {"seq_len": seq_len}
    if "tokens_per_step" in train:
        size = train.get("micro_batch_size", 1)
        unit = seq_len * (1 if size == "auto" else size)
        train["tokens_per_step"] = whole_units(max(train["tokens_per_step"], num_gpus * unit), unit)
    return settings | {"train": train}


def _completed(settings: Settings, overrides: Sequence[str]) -> tuple[Recipe, Settings]:
    """Return the recipe of some settings, and the settings with the overrides in them.

    Raises:
        ConfigError: A setting is wrong.
    """
    draft = Draft(name="the suggested recipe")
    draft.values.update(copy.deepcopy(settings))
    place = Place(text=draft.name, line=1)
    draft.places.update(
        {f"{name}.{key}": place for name, section in settings.items() for key in section}
    )
    apply_overrides(draft, overrides, rivals=RIVALS)
    written = copy.deepcopy(draft.values)
    return recipe_from(draft, Path.cwd(), check_files=False), written


# ---------------------------------------------------------------------------------------------
# What does not fit


def _refusal(
    model: WantedModel, target: Target, base: _Base, forms: Sequence[Form]
) -> DoesNotFitError:
    """Return the error that no form fits: what is short, and the least with which one would."""
    nearest = min(forms, key=lambda form: (len(form.short), _missing_bytes(form)))
    machine, plan = target.machine, nearest.plan
    codec = plan.request.typical.codec
    place = "disk" if plan.request.is_on_disk else "RAM"
    return DoesNotFitError(
        f"{model.name} does not fit {machine.name} in any form: the nearest, {codec} from {place},"
        f" needs {shown_gib(plan.peak_bytes)} of VRAM and {shown_gib(plan.host_bytes)} of RAM",
        limit=f"{shown_gib(_vram_bytes(nearest))} of VRAM and {shown_gib(machine.ram_bytes)} of RAM"
        f" may be used, so it is short of {' and '.join(nearest.short)}",
        hint=_least(target, base) or "a shorter `train.seq_len`, or a smaller model",
    )


def _vram_bytes(form: Form) -> int:
    budget = form.plan.request.vram_budget_bytes
    have = form.plan.machine.vram_bytes
    budget = form.recipe.offload.vram_budget_bytes if budget is None else budget
    return have if budget is None else min(have, budget)


def _missing_bytes(form: Form) -> int:
    vram = form.plan.peak_bytes - _vram_bytes(form)
    return max(0, vram) + max(0, form.plan.host_bytes - form.plan.machine.ram_bytes)


def _least(target: Target, base: _Base) -> str:
    """Return the smallest card with this RAM, and the least RAM with this card, that do."""
    budget_bytes = base.subject.recipe.offload.vram_budget_bytes or target.machine.vram_bytes
    machine = replace(target.machine, vram_bytes=min(budget_bytes, target.machine.vram_bytes))
    cards = _larger_cards(machine.vram_bytes)
    ram_gib = _least_ram(base, machine)
    card = _first(
        cards, lambda name: base.fits(_with_ram(named_machine(name), machine.installed_bytes))
    )
    words = [] if ram_gib is None else [f"`--ram {ram_gib}` with as much VRAM"]
    if card is not None:
        words.append(f"`--machine {card}` ({CARDS[card].memory_gib:g} GiB) with as much RAM")
    if not words:
        most_bytes = RAM_SIZES_GIB[-1] * GIB
        card = _first(cards, lambda name: base.fits(_with_ram(named_machine(name), most_bytes)))
        if card is None:
            return ""
        words = [f"`--machine {card} --ram {_least_ram(base, named_machine(card))}`"]
    return f"the least that would do: {', or '.join(words)}"


def _least_ram(base: _Base, machine: Machine) -> int | None:
    """Return the least size of RAM, in GiB, with which a form fits; None if none does."""
    return _first(RAM_SIZES_GIB, lambda size: base.fits(_with_ram(machine, size * GIB)))


def _with_ram(machine: Machine, installed_bytes: int) -> Machine:
    ram_bytes = usable_ram_bytes(installed_bytes)
    return replace(machine, ram_bytes=ram_bytes, pinned_bytes=ram_bytes)


def _first(sizes: Sequence[_Size], does: Callable[[_Size], bool]) -> _Size | None:
    """Return the first of some sizes that does; those after it do too."""
    at = bisect_left(sizes, 1, key=lambda size: int(does(size)))
    return sizes[at] if at < len(sizes) else None


def _larger_cards(vram_bytes: int) -> list[str]:
    """Return a card of each larger size of memory, the smallest first: the slowest of desktops."""
    sizes = sorted({card.memory_gib for card in CARDS.values() if card.has_bf16})
    desktop = max(card.memory_gib for card in CARDS.values() if card.line != "server")
    return [
        slowest_card(size)
        if size <= desktop
        else next(name for name, card in CARDS.items() if card.memory_gib == size)
        for size in sizes
        if size * GIB > vram_bytes
    ]
