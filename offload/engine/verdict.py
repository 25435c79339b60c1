"""What checks have found out about a model, as a value: what a step may do with its layers.

`offload.engine.safety.check` makes it. What computes asks it, and decides nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offload.engine.batch import ROW_LENS, Batch
from offload.engine.recompute import OutputSize, TiledMlp, Unread
from offload.errors import UnsupportedModelError

_CLASSES = 4  # sizes between two powers of two

Mode = tuple[str | None, bool]
"""The adapter that computes, None for those that are active; and whether the model trains."""
Case = tuple[Mode, bool, frozenset[str]]
"""A mode, whether there are labels, and the names of a micro-batch's inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSize:
    """The tokens of a trial.

    A trial of few tokens does not show what code does with many: a layer may read a token far back,
    or work in blocks that few tokens do not fill. So trials have the sizes of the steps. Sizes are
    rounded up, so that micro-batches of ever new sizes cost few trials.
    """

    num_tokens: int  # tokens of a micro-batch
    row_tokens: int  # tokens of its longest row

    @classmethod
    def of(cls, batches: Sequence[Batch], *, max_row_tokens: int) -> "TrialSize":
        """Return a size that no micro-batch exceeds.

        Args:
            batches: Micro-batches.
            max_row_tokens: Tokens of a row that the model knows positions for.
        """
        ids = [batch["input_ids"] for batch in batches]
        rows = [
            int(batch[ROW_LENS].max()) if ROW_LENS in batch else batch["input_ids"].shape[1]
            for batch in batches
        ]
        longest = max(rows)
        return cls(
            num_tokens=_rounded_up(max(x.numel() for x in ids)),
            row_tokens=max(longest, min(_rounded_up(longest), max_row_tokens)),
        )

    def covers(self, other: "TrialSize") -> bool:
        """Return whether a trial of this size also shows what one of another size would."""
        return self.num_tokens >= other.num_tokens and self.row_tokens >= other.row_tokens

    def join(self, other: "TrialSize") -> "TrialSize":
        """Return the smallest size that covers both."""
        return TrialSize(
            num_tokens=max(self.num_tokens, other.num_tokens),
            row_tokens=max(self.row_tokens, other.row_tokens),
        )

    @property
    def num_rows(self) -> int:
        """Rows of equal length that have as many tokens."""
        return -(-self.num_tokens // self.row_tokens)

    @property
    def row_lens(self) -> tuple[int, ...]:
        """Packed rows of as many tokens, whose ends no block of tokens is aligned to.

        The first row has one token, so each block of more tokens crosses the end of a row.
        """
        others = max(1, self.num_tokens - 1)
        longest = min(self.row_tokens, others)
        num_full, rest = divmod(others, longest)
        return (1, *[longest] * num_full, *([rest] if rest else []))


@dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """What a step may do with each layer, in one mode."""

    # The products that a recompute leaves out.
    unread: Mapping[int, tuple[Unread, ...]] = field(default_factory=dict)
    # The calls of attention that a recompute can be given.
    attention: Mapping[int, tuple[OutputSize, ...]] = field(default_factory=dict)
    # The MLPs that are computed in tiles.
    mlps: Mapping[int, tuple[TiledMlp, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What was found of a model as it is attached; before any check, nothing is allowed."""

    # The functions that the model ran when it was checked.
    code: Sequence[Any] = ()
    # The largest micro-batches that it was checked for.
    sizes: Mapping[Case, TrialSize] = field(default_factory=dict)
    allowed: Mapping[Mode, Allowed] = field(default_factory=dict)  # what a step may do, by mode
    # Layers that compute packed rows together; all others compute one row after the other.
    together: frozenset[int] = frozenset()
    # Layers in which attention of packed rows may not be one call.
    unjoined: frozenset[int] = frozenset()
    refusal: UnsupportedModelError | None = None  # why the model is not safe, if it is not

    def of(self, mode: Mode) -> Allowed:
        """Return what a step may do in a mode; nothing in one that was not checked."""
        return self.allowed.get(mode, Allowed())

    def reading(self, mode: Mode, layer: int) -> "Verdict":
        """Return the verdict after a recompute of a layer has read what it was to leave out."""
        known = self.of(mode)
        changed = replace(known, unread={**known.unread, layer: ()})
        return replace(self, allowed={**self.allowed, mode: changed})


def _rounded_up(num: int) -> int:
    step = max(1, (1 << (num - 1).bit_length()) // (2 * _CLASSES))
    return -(-num // step) * step
