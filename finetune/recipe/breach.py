"""A broken rule between fields of a recipe."""

from collections.abc import Iterable, Iterator
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


Allowed = tuple[str, object, bool, str, str]
"""A field with a setting: its path, its value, whether that is possible, the limit, the fix."""


def breaches(
    rules: Iterable[Allowed], *, setting: str, value: object, instead: str = ""
) -> Iterator[Breach]:
    """Yield a breach for each field whose value is not possible with a setting.

    Args:
        rules: The fields.
        setting: Dotted path of the setting.
        value: Its value.
        instead: The setting's value with which all fields are possible; empty if there is none.
    """
    for field, found, is_possible, limit, fix in rules:
        if not is_possible:
            shown = str(found).lower() if isinstance(found, bool) else found
            yield Breach(
                field=field,
                what=f"{field} is {shown} and {setting} is {value}",
                limit=limit,
                hint=f"`{field}: {fix}`" + (f", or `{setting}: {instead}`" if instead else ""),
                reads=(setting,),
            )
