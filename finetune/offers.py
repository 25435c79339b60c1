"""What would do: which cards a model trains on, and which models train in given memory."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from finetune import planning
from finetune.errors import ConfigError
from finetune.figures import shown_gib, table_of
from finetune.recipe import Recipe
from finetune.shapes import shipped_shapes
from offload.errors import DoesNotFitError
from offload.plan.codec import CodecName
from offload.plan.facts import ModelFacts
from offload.plan.machine import CARD_NAMES, GIB, Machine, named_machine
from offload.plan.option import fits, plan_anyway
from offload.plan.plan import PlanRequest

CODECS: tuple[CodecName, ...] = ("native", "fp8", "nf4")
TOY_PREFIX = "tiny-"  # shapes to try the program with
SHORTEST_SEQ_LEN = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One model on one machine, with its layers in one form.

    Attributes:
        model: Name of the shape or recipe.
        machine: Name of the machine.
        codec: How the layers wait.
        stash: Where layer inputs wait.
        short: Memories that are too small; empty where it fits.
        num_slots: Layers on the device, as many as fit; where it does not fit, the fewest.
        seq_len: Tokens of a sequence.
        tokens_per_step: Tokens of an optimizer step.
        tokens_per_s: Predicted; None where it does not fit.
        vram_bytes: Predicted peak of device memory; what is needed, where it does not fit.
        ram_bytes: The same of host memory.
        break_even_tokens: Tokens per step above which streaming costs nothing.
        longest_seq_len: Of powers of two, the longest sequence that fits, within the model's own
            limit and with layer inputs where they have to be; None where nobody asked for it.
    """

    model: str
    machine: str
    codec: CodecName
    stash: str
    short: tuple[str, ...]
    num_slots: int
    seq_len: int
    tokens_per_step: int
    tokens_per_s: float | None
    vram_bytes: int
    ram_bytes: int
    break_even_tokens: float
    longest_seq_len: int | None = None


def offers_on(recipe: Recipe, machines: Sequence[Machine], *, model: str) -> list[Offer]:
    """Plan one recipe on each machine, with its layers in each form."""
    facts = planning.facts_of(recipe.model)
    request = planning.full_request(recipe, facts, num_ranks=1)
    codecs = dict.fromkeys([*CODECS, request.typical.codec])
    return [
        _offer(facts, planning.as_told(recipe.model, facts, machine), one, model=model)
        for machine in machines
        for one in (_with_codec(request, codec) for codec in codecs)
    ]


def offers_within(models: Sequence[str], machine: Machine) -> list[Offer]:
    """Plan LoRA on each model, in each form, with layer inputs in RAM only where they have to be.

    Args:
        models: Shipped shapes, or paths of configs.
        machine: With the memory that may be used.
    """
    return [offer for model in models for offer in _offers_of(model, machine)]


def fitting(offers: Sequence[Offer], machine: Machine) -> list[Offer]:
    """Return those that fit.

    Raises:
        DoesNotFitError: None does.
    """
    found = [offer for offer in offers if not offer.short]
    if found:
        return found
    nearest = min(offers, key=lambda offer: (len(offer.short), offer.vram_bytes + offer.ram_bytes))
    raise DoesNotFitError(
        f"nothing fits: what comes nearest is {nearest.model} with `offload.codec: {nearest.codec}`"
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


def _offers_of(model: str, machine: Machine) -> Iterator[Offer]:
    recipe = planning.recipe_for_shape(model, [])
    facts = planning.facts_of(recipe.model)
    if facts.max_position_embeddings < recipe.train.seq_len:
        shorter = f"train.seq_len={facts.max_position_embeddings}"
        recipe = planning.recipe_for_shape(model, [shorter])
    plain = planning.full_request(recipe, facts, num_ranks=1)
    for codec in CODECS:
        request = _with_codec(plain, codec)
        stashed = replace(request, is_stashed=True)
        if not fits(facts, machine, request) and fits(facts, machine, stashed):
            request = stashed
        offer = _offer(facts, machine, request, model=model)
        if offer.short:
            yield offer
            continue
        in_ram = _longest(facts, machine, stashed, above=0)
        on_device = _longest(facts, machine, _with_codec(plain, codec), above=in_ram)
        yield replace(offer, longest_seq_len=max(in_ram, on_device))


def _longest(facts: ModelFacts, machine: Machine, request: PlanRequest, *, above: int) -> int:
    """Return the longest sequence that fits, of those above another; 0 where none does.

    The tokens of a step stay, but for a sequence that is longer than all of them.
    """
    tokens = request.typical.num_tokens * request.num_micro_batches

    def is_too_long(seq_len: int) -> bool:
        workload = replace(request.typical, seq_len=seq_len, label_tokens=seq_len)
        way = replace(
            request,
            typical=workload,
            largest=workload,
            num_micro_batches=max(1, tokens // seq_len),
        )
        return not fits(facts, machine, way)

    limit = facts.max_position_embeddings
    doubled = [SHORTEST_SEQ_LEN << n for n in range(limit.bit_length())]
    lengths = [n for n in doubled if above < n <= limit]
    number = bisect_right(lengths, 0, key=lambda seq_len: int(is_too_long(seq_len)))
    return lengths[number - 1] if number else 0


def _offer(facts: ModelFacts, machine: Machine, request: PlanRequest, *, model: str) -> Offer:
    made, short = plan_anyway(facts, machine, request)
    return Offer(
        model=model,
        machine=machine.name,
        codec=request.typical.codec,
        stash="host" if request.is_stashed else "device",
        short=short,
        num_slots=made.num_slots,
        seq_len=request.typical.seq_len,
        tokens_per_step=made.tokens_per_step,
        tokens_per_s=None if short else made.tokens_per_step / made.step_s,
        vram_bytes=made.peak_bytes,
        ram_bytes=made.host_bytes,
        break_even_tokens=made.break_even_tokens,
    )


def _with_codec(request: PlanRequest, codec: CodecName) -> PlanRequest:
    return replace(
        request,
        typical=replace(request.typical, codec=codec),
        largest=replace(request.largest, codec=codec),
    )


# ---------------------------------------------------------------------------------------------
# Machines


def machine_names(names: str) -> list[str]:
    """Return the names of a list with commas, or those of all known cards for `all`."""
    return list(CARD_NAMES) if names == "all" else [name.strip() for name in names.split(",")]


def budgeted(machine: Machine, *, vram_gib: float | None) -> Machine:
    """Return a machine with no more device memory than a budget.

    Raises:
        ConfigError: The machine has less than that.
    """
    if vram_gib is None:
        return machine
    if vram_gib * GIB > machine.vram_bytes:
        raise ConfigError(
            f"--vram {vram_gib:g}, but {machine.name} has {shown_gib(machine.vram_bytes)}",
            limit="a budget is at most what the card has",
            hint=f"`--vram {machine.vram_bytes / GIB:g}`, or another `--machine`",
        )
    return replace(machine, vram_bytes=int(vram_gib * GIB))


def slowest_card(vram_gib: float | None) -> str:
    """Return the known card that has so much memory and hardly more: of those, the slowest.

    Raises:
        ConfigError: No budget is given, or no card has so much.
    """
    if vram_gib is None:
        raise ConfigError(
            "neither --vram nor --machine is given",
            limit="what fits depends on the memory of the card",
            hint="`sluice fit --vram 12 --ram 64`, or `--machine rtx3060`",
        )
    cards = [named_machine(name) for name in CARD_NAMES]
    large = [card for card in cards if card.vram_bytes >= vram_gib * GIB]
    if not large:
        most = max(cards, key=lambda card: card.vram_bytes)
        raise ConfigError(
            f"--vram {vram_gib:g} is more than any known card has",
            limit=f"{most.name} has {shown_gib(most.vram_bytes)}",
            hint=f"`--vram {most.vram_bytes / GIB:g}`, or `--machine FILE`",
        )
    return min(large, key=lambda card: (card.vram_bytes, card.gemm_flops_per_s.value)).name


# ---------------------------------------------------------------------------------------------
# Shown

MACHINE_COLUMNS = ("card", "codec", "fits", "slots", "tokens/s", "VRAM", "RAM", "N*")
FIT_COLUMNS = (
    *("model", "codec", "stash", "slots", "tokens/s", "VRAM", "RAM", "N*"),
    "longest sequence",
)


def machine_rows(offers: Sequence[Offer]) -> list[list[str]]:
    """Return the rows of `MACHINE_COLUMNS`."""
    return [
        [offer.machine, offer.codec, _verdict(offer), str(offer.num_slots), *_figures(offer)]
        for offer in offers
    ]


def fit_rows(offers: Sequence[Offer]) -> list[list[str]]:
    """Return the rows of `FIT_COLUMNS`."""
    return [
        [
            *(offer.model, offer.codec, offer.stash, str(offer.num_slots)),
            *_figures(offer),
            f"{offer.longest_seq_len:,}",
        ]
        for offer in offers
    ]


def offers_json(offers: Sequence[Offer]) -> list[dict[str, Any]]:
    """Return the offers for programs; sizes in bytes."""
    return [asdict(offer) for offer in offers]


def offers_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return rows for a terminal; a name that repeats is written once."""
    table = table_of(title, *columns)
    for column in table.columns:
        if column.header in ("codec", "fits", "stash"):
            column.justify = "left"
    last = ""
    for name, *others in rows:
        if name != last and last:
            table.add_section()
        table.add_row("" if name == last else name, *others)
        last = name
    return table


def offers_markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table of Markdown."""
    lines = [title, "", _markdown_row(columns), _markdown_row(["---"] * len(columns))]
    return "\n".join([*lines, *(_markdown_row(row) for row in rows)])


def _markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _verdict(offer: Offer) -> str:
    return f"no: {' and '.join(offer.short)}" if offer.short else "yes"


def _figures(offer: Offer) -> list[str]:
    return [
        "" if offer.tokens_per_s is None else f"{offer.tokens_per_s:,.0f}",
        shown_gib(offer.vram_bytes),
        shown_gib(offer.ram_bytes),
        f"{offer.break_even_tokens:,.0f}",
    ]
