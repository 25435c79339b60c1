"""What all sections of a recipe are made of."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# Lists arrive as lists from YAML and are kept as tuples, which are immutable.
Names = Annotated[tuple[str, ...], Field(strict=False)]
Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)]
AdapterMethod = Literal[
    "lora",
    "loha",
    "lokr",
    "ia3",
    "vera",
    "oft",
    "miss",
    "hira",
    "prompt",
    "p_tuning",
    "prefix",
    "prefix_mlp",
]
"""Methods of `adapter.method`, by the names that peft has for them."""


class Section(BaseModel):
    """The base of every section: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
