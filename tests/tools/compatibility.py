"""The tables of what goes together, from the rows that refuse it."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from finetune.planning.ranks import LAUNCHED
from finetune.recipe.capabilities import (
    CHOICES,
    LENGTHS,
    OF_ARGUMENTS,
    OF_MODEL,
    OF_OPTIONS,
    OF_PROCESSES,
    OF_RUNS,
    OF_SHARED_WEIGHTS,
    OF_TRAINER,
    PAIRS,
    SUMS,
    Row,
    Values,
    stated,
)

Rows = Sequence[Sequence[str]]


def pairs() -> dict[str, Rows]:
    """Return what does not go with settings of each section, and what is not possible at all."""
    of_ours = (
        row
        for choice, extensions in CHOICES.items()
        for name in sorted({*extensions} - {*extensions.foreign})
        for row in stated(choice, name)
    )
    ordered = sorted((*PAIRS, *of_ours), key=lambda row: row.other)
    return {
        section: [_cells(row) for row in rows]
        for section, rows in groupby(ordered, key=lambda row: row.other.partition(".")[0])
    }


def placed() -> Rows:
    """Return what does not go with a model, a device or a number of processes."""
    return [_cells(row) for row in (*OF_MODEL, *OF_PROCESSES, *OF_SHARED_WEIGHTS)]


def _cells(row: Row) -> Sequence[str]:
    others = ", ".join(
        f"{name if ' ' in name else f'`{name}`'} {some.words}" for name, some in _others(row)
    )
    return [f"`{row.field}` {row.values.words}", others, row.limit, instead(row)]


def _others(row: Row) -> Iterable[tuple[str, Values]]:
    return (((row.other, row.others),) if row.other else ()) + row.also


def instead(row: Row) -> str:
    """Return what to write in place of what a row refuses."""
    fix = f"`{row.field}: {row.fix}`" if row.fix else ""
    rest = f"`{row.field}` without it" if row.values.without else ""
    ways = ", or ".join(filter(None, (row.hint or fix or rest, row.instead)))
    return ways.replace("{option}", LAUNCHED)


def numbers() -> Rows:
    """Return what is asked of numbers."""
    return [
        [f"`{row.field}`", ", ".join(f"`{name}`" for name in row.reads), row.limit, row.fix]
        for row in (*SUMS, *LENGTHS)
    ]


def runs() -> Rows:
    """Return what runs that train together cannot have."""
    return [[f"`{row.field}` {row.values.words}", row.limit, instead(row)] for row in OF_RUNS]


def trainer() -> Rows:
    """Return what a Trainer that streams cannot have."""
    rows = (*OF_ARGUMENTS, *OF_OPTIONS, *OF_TRAINER)
    return [[f"`{row.field}`", row.limit, row.hint] for row in rows]
