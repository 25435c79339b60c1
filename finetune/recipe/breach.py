"""A broken rule between fields of a recipe."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Breach:
    """A rule between fields that a recipe breaks, in the three parts of an error.

    Args:
        field: Dotted path of the field to point at.
        what: What is wrong, with the values seen.
        limit: What the rule asks.
        hint: The exact setting that fixes it.
        reads: The other fields that the rule read.
    """

    field: str
    what: str
    limit: str
    hint: str
    reads: tuple[str, ...] = ()
