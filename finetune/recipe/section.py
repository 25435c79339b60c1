"""What all sections of a recipe are made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

# Lists arrive as lists from YAML and are kept as tuples, which are immutable.
Names = Annotated[tuple[str, ...], Field(strict=False)]
Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)]


class Section(BaseModel):
    """The base of every section: frozen, strict about types, closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
