"""The distinct images of a run: how many, and of how many tokens."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """The distinct images of a run's rows."""

    most_tokens: int  # tokens of the largest
    num_images: int | None = None  # how many; None before rows are known
    num_tokens: int | None = None  # tokens of all; None if each has the most

    @property
    def total_tokens(self) -> int | None:
        """Tokens of all distinct images; None before rows are known."""
        if self.num_tokens is not None or self.num_images is None:
            return self.num_tokens
        return self.num_images * self.most_tokens
