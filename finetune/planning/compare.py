"""Which cards a model trains on, and which models train in given memory."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from finetune.errors import ConfigError
from finetune.planning.candidates import fits, found_choice, nearest_request, uncollected
from finetune.planning.request import with_backend
from finetune.planning.subject import Subject
from finetune.recipe.capabilities import broken_rules
from finetune.recipe.load import shipped_shapes
from finetune.recipe.recipe import Recipe, with_seq_len, with_settings
from finetune.report.choice import LEAST_GAIN_FRAC
from finetune.report.format import shown_gib
from finetune.report.rows import Table
from offload.errors import DoesNotFitError
from offload.plan.facts.codec import CODECS, NATIVE, codecs_that
from offload.plan.facts.workload import WeightPlace
from offload.plan.fit import MemoryNeeds
from offload.plan.machine.cards import CARDS
from offload.plan.machine.machine import GIB, Dtype, Machine, Tier
from offload.plan.step import FREE_FRAC, MOST_TOKENS
from offload.plan.what_if import plan_anyway

TOY_PREFIX = "tiny-"  # shapes to try the program with
SHORTEST_SEQ_LEN = 512
LENGTH_STEP = 1024


_SHORT = {"of device memory": "VRAM", "of RAM": "RAM"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One model on one machine, with its layers in one form."""

    model: str  # name of the shape or recipe
    machine: str  # name of the machine
    codec: str  # how the layers wait
    tier: Tier  # where they wait: ram or disk
    stash: Literal["device", "host"]  # where layer inputs wait
    embeddings: WeightPlace  # where the input embedding is
    head: WeightPlace  # where the output head is
    short: tuple[str, ...]  # memories that are too small; empty if it fits
    num_slots: int  # layers on the device, as many as fit; if it does not fit, the fewest
    seq_len: int  # tokens of a sequence
    tokens_per_step: int  # tokens of an optimizer step
    tokens_per_s: float | None  # predicted; None if it does not fit
    vram_bytes: int  # predicted peak of device memory; if it does not fit, the need
    ram_bytes: int  # the host memory of all cards together, at the peak
    # Tokens per step from which streaming is free, in micro-batches of the plan's size; None if
    # they are more than any step should have.
    break_even_tokens: int | None
    # The longest sequence that fits, a multiple of 1,024 within the model's own limit, with layer
    # inputs where they have to be and MLPs in tiles if need be; None if it was not requested.
    longest_seq_len: int | None = None
    longest_limit: str | None = None  # what limits it: VRAM, RAM, or the model's own limit


Group = list[Comparison]
"""Forms of one model on one machine."""


def compare_on_cards(subject: Subject, machines: Sequence[Machine]) -> Iterator[Group]:
    """Plan one recipe or model on each machine, in turn, with its layers in each form.

    A form that the recipe leaves open is the one that its plan chooses. Layers that are more than
    the host's memory are planned on disk too, unless the recipe says where they wait.

    Args:
        subject: What is planned.
        machines: Each with as many of its card as share a step.
    """
    for machine in machines:
        with uncollected():
            group = [
                compared
                for recipe in _forms(subject.recipe)
                for compared in _comparisons(subject, machine, recipe)
            ]
        yield group


def compare_within_memory(subjects: Sequence[Subject], machine: Machine) -> Iterator[Group]:
    """Plan each model in turn, in each form, with the longest sequence that fits.

    Args:
        subjects: What is planned.
        machine: With the memory that may be used.
    """
    for subject in subjects:
        with uncollected():
            group = [
                _with_longest(subject, machine, recipe, compared)
                for recipe in _forms(subject.recipe)
                for compared in _comparisons(subject, machine, recipe)
            ]
        yield group


def fitting(groups: Iterable[Group], machine: Machine) -> Iterator[Group]:
    """Yield of each group what fits.

    Raises:
        DoesNotFitError: Nothing does.
    """
    found, others = False, Group()
    for group in groups:
        fits_here = [compared for compared in group if not compared.short]
        others += group
        if fits_here:
            found = True
            yield fits_here
    if found:
        return
    nearest = min(
        others,
        key=lambda compared: (len(compared.short), compared.vram_bytes + compared.ram_bytes),
    )
    raise DoesNotFitError(
        f"nothing fits: the nearest is {nearest.model} with `offload.codec: {nearest.codec}`"
        f", for {shown_gib(nearest.vram_bytes)} of VRAM and {shown_gib(nearest.ram_bytes)} of RAM",
        limit=f"{shown_gib(machine.vram_bytes)} of VRAM and {shown_gib(machine.ram_bytes)} of RAM"
        " may be used",
        hint="`sluice fit --vram 12 --ram 64` lists what trains on a usual card",
    )


def trained_models(model: str | None) -> list[str]:
    """Return one model, or all shipped shapes but toys."""
    if model is not None:
        return [model]
    return [name for name in shipped_shapes() if not name.startswith(TOY_PREFIX)]


def _forms(recipe: Recipe) -> list[Recipe]:
    """Return the recipe with its layers in each form that is compared, where its rules allow it."""
    asked = recipe.offload.codec
    exact = "auto" if asked == "auto" else NATIVE
    codecs = (exact, *codecs_that(lambda codec: codec.option), asked)
    forms = (with_settings(recipe, {"offload.codec": codec}) for codec in dict.fromkeys(codecs))
    return [form for form in forms if not any(broken_rules(form))]


def _comparisons(subject: Subject, machine: Machine, recipe: Recipe) -> Iterator[Comparison]:
    """Yield what a recipe gives on a machine; of layers that RAM cannot hold, from disk as well."""
    compared = _comparison(subject, machine, recipe)
    yield compared
    on_disk = with_settings(recipe, {"offload.tier": "disk"})
    if "RAM" in compared.short and recipe.offload.tier == "auto" and not any(broken_rules(on_disk)):
        other = _comparison(subject, machine, on_disk)
        if not other.short:
            yield other


def _with_longest(
    subject: Subject, machine: Machine, recipe: Recipe, compared: Comparison
) -> Comparison:
    """Add the longest sequence that fits, of multiples of 1,024, and what limits it.

    The tokens of a step stay the same, unless the sequence is longer than all of them.
    """
    if compared.short:
        return compared
    facts = subject.facts
    here = with_backend(recipe, facts, machine)
    placed = with_settings(recipe, {"offload.tier": compared.tier})
    lengths, number = fitting_lengths(subject, here, placed)
    if number == len(lengths):
        longest = lengths[-1] if lengths else recipe.train.seq_len
        return replace(compared, longest_seq_len=longest, longest_limit="model")
    too_long = subject.requests(with_seq_len(placed, lengths[number]))
    nearest = nearest_request(facts, here, too_long)
    needs = MemoryNeeds.of(facts, here, nearest)
    short = needs.shortages(needs.fewest)
    return replace(
        compared,
        longest_seq_len=lengths[number - 1] if number else recipe.train.seq_len,
        longest_limit=", ".join(_SHORT.get(one.what, one.what) for one in short),
    )


def fitting_lengths(
    subject: Subject, machine: Machine, recipe: Recipe
) -> tuple[Sequence[int], int]:
    """Return the lengths of sequences that are tried, in tokens, and how many of them fit."""

    def is_too_long(seq_len: int) -> bool:
        requests = subject.requests(with_seq_len(recipe, seq_len))
        # the last take least memory: where they fit, the others need not be tried
        return not fits(subject.facts, machine, requests[::-1])

    limit = subject.facts.max_position_embeddings
    lengths = [
        n for n in (SHORTEST_SEQ_LEN, *range(LENGTH_STEP, limit + 1, LENGTH_STEP)) if n <= limit
    ]
    return lengths, bisect_right(lengths, 0, key=lambda seq_len: int(is_too_long(seq_len)))


def _comparison(subject: Subject, machine: Machine, recipe: Recipe) -> Comparison:
    facts = subject.facts
    short: tuple[str, ...] = ()
    here = with_backend(recipe, facts, machine)
    requests = subject.requests(recipe)
    choice = found_choice(facts, here, requests)
    if choice is None:
        made, short = plan_anyway(facts, here, nearest_request(facts, here, requests))
    else:
        made = choice.plan
    request = made.request
    return Comparison(
        model=subject.name,
        machine=machine.name,
        codec=request.typical.codec,
        tier="disk" if request.is_on_disk else "ram",
        stash="host" if request.is_stashed else "device",
        embeddings=request.typical.embeddings,
        head=request.typical.head,
        short=short,
        num_slots=made.num_slots,
        seq_len=request.typical.seq_len,
        tokens_per_step=made.tokens_per_step,
        tokens_per_s=None if short or choice is None else choice.chosen.tokens_per_s,
        vram_bytes=made.peak_bytes,
        ram_bytes=made.host_bytes,
        break_even_tokens=made.break_even_tokens,
    )


# ---------------------------------------------------------------------------------------------
# Machines


def machine_names(names: str, *, dtype: Dtype) -> list[str]:
    """Return the names of a list with commas; for `all`, of all known cards with that dtype."""
    if names != "all":
        return [name.strip() for name in names.split(",")]
    return [name for name in CARDS if dtype == "float32" or CARDS[name].has_bf16]


def budgeted(machine: Machine, *, vram_gib: float | None) -> Machine:
    """Return a machine with no more device memory than a budget.

    A budget of what a named card is sold with is all that a process may use of it.

    Raises:
        ConfigError: The machine has less than that.
    """
    if vram_gib is None:
        return machine
    card = CARDS.get(machine.name)
    most_gib = machine.vram_bytes / GIB if card is None else card.memory_gib
    if vram_gib > most_gib:
        raise ConfigError(
            f"--vram {vram_gib:g}, but {machine.name} has {shown_gib(most_gib * GIB)}",
            limit="a budget is at most what the card has",
            hint=f"`--vram {most_gib:g}`, or another `--machine`",
        )
    budget_bytes = int(vram_gib * GIB)
    if budget_bytes >= machine.vram_bytes:
        return machine
    return replace(machine, vram_bytes=budget_bytes, desktop_bytes=0)


def slowest_card(vram_gib: float | None) -> str:
    """Return the slowest known desktop card that has this much memory and hardly more.

    A server card is only chosen by name: its rates are several times those of the others.

    Raises:
        ConfigError: No budget is given, or no such card has that much.
    """
    if vram_gib is None:
        raise ConfigError(
            "neither --vram nor --machine is given",
            limit="what fits depends on the memory of the card",
            hint="`sluice fit --vram 12 --ram 64`, or `--machine rtx3060`",
        )
    desk = [name for name in CARDS if CARDS[name].line != "server"]
    large = [name for name in desk if CARDS[name].memory_gib >= vram_gib]
    if large:
        return min(large, key=lambda name: (CARDS[name].memory_gib, CARDS[name].half_tflops))
    most = max(desk, key=lambda name: CARDS[name].memory_gib)
    servers = [name for name in CARDS if CARDS[name].memory_gib >= vram_gib]
    limit = f"{most} has {CARDS[most].memory_gib:g} GiB"
    if not servers:
        most = max(CARDS, key=lambda name: CARDS[name].memory_gib)
        limit = f"{most} has {CARDS[most].memory_gib:g} GiB"
    raise ConfigError(
        f"--vram {vram_gib:g} is more than any known {'desktop ' if servers else ''}card has",
        limit=limit,
        hint=f"`--machine {servers[0]}` takes a server's rates"
        if servers
        else f"`--vram {CARDS[most].memory_gib:g}`, or `--machine FILE`",
    )


# ---------------------------------------------------------------------------------------------
# Shown

UNITS = f"VRAM and RAM in GiB; from N* tokens per step streaming adds less than {FREE_FRAC:.0%}"
LEGEND = (
    "; exact are {exact}; longest: tokens of the longest sequence, and what limits it"
    " (the model: its positions)"
).format(exact=", ".join(codecs_that(lambda codec: codec.is_exact)))
FIGURES = ("slots|whole", "tok/s|whole", "VRAM|whole", "RAM|whole", "N*|whole")
# What most cells take, so that tables of which lines come one by one are as wide from the first on.
_LAYERS_WIDTH, _FIGURE_WIDTHS = 12, (5, 6, 5, 5, 6)
CARD_WIDTHS = (0, _LAYERS_WIDTH, len("no: VRAM, RAM"), *_FIGURE_WIDTHS)
MODEL_WIDTHS = (0, _LAYERS_WIDTH, *_FIGURE_WIDTHS, 7, 9)


def machines_table(title: str, comparisons: Sequence[Comparison]) -> Table:
    """Return on which machines a model trains."""
    lines = [
        (
            *(compared.machine, _layers(compared)),
            f"no: {', '.join(compared.short)}" if compared.short else "yes",
            *_figures(compared),
        )
        for compared in comparisons
    ]
    return Table(title, ["card", "layers", "fits", *FIGURES], lines)


def fit_table(title: str, comparisons: Sequence[Comparison]) -> Table:
    """Return which models train, and with which longest sequences."""
    lines = [
        (
            *(compared.model, _layers(compared), *_figures(compared)),
            *(compared.longest_seq_len, compared.longest_limit or ""),
        )
        for compared in comparisons
    ]
    columns = ("model", "layers", *FIGURES)
    is_one = len({compared.model for compared in comparisons}) == 1
    note = advice(comparisons) if is_one else ""
    return Table(title, [*columns, "longest|whole", "limited by"], lines, note=note)


def advice(comparisons: Sequence[Comparison]) -> str:
    """Return which of the forms that fit is exact, and what a faster one costs."""

    def rate(compared: Comparison) -> float:
        return compared.tokens_per_s or 0

    def form(compared: Comparison) -> str:
        return compared.codec + (" from disk" if compared.tier == "disk" else "")

    exact = [one for one in comparisons if CODECS[one.codec].is_exact]
    fastest = max(comparisons, key=rate)
    rounding = CODECS[fastest.codec].rounding
    if not exact:
        return f"no exact form fits; {form(fastest)} rounds weights by {rounding:.1%}"
    best = max(exact, key=rate)
    gain = rate(fastest) / rate(best) - 1
    if gain < LEAST_GAIN_FRAC:
        return f"{form(best)} is exact, and none is faster"
    faster = f"{form(fastest)} is {gain:.0%} faster, rounds by {rounding:.1%}"
    return f"{form(best)} is exact; {faster}"


def comparisons_json(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Return the comparisons for programs; sizes in bytes."""
    return [asdict(compared) for compared in comparisons]


def _layers(compared: Comparison) -> str:
    """Return the form of the layers, and where they wait if that is not RAM."""
    return compared.codec if compared.tier == "ram" else f"{compared.codec}, disk"


def _figures(compared: Comparison) -> list[Any]:
    free_from = compared.break_even_tokens
    return [
        compared.num_slots,
        "" if compared.tokens_per_s is None else compared.tokens_per_s,
        f"{compared.vram_bytes / GIB:,.1f}",
        f"{compared.ram_bytes / GIB:,.1f}",
        f"> {MOST_TOKENS / 1e6:.0f} M" if free_from is None else free_from,
    ]
