"""What a user should know about the rows of a run: what was joined, skipped, cut and dropped."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from finetune.data.tokenize import Fate
from finetune.errors import DataError

if TYPE_CHECKING:
    from finetune.data.dataset import Chosen
    from finetune.data.encode_source import SourceRows
    from finetune.data.token_cache import TokenStore
    from finetune.data.tokenize import Encoder

_NUM_NAMED = 3


def source_notes(rows: "SourceRows", store: "TokenStore") -> list[str]:
    """Say what of a source is not among its rows."""
    path, report = rows.source.path, store.report
    notes = [*rows.source.notes]
    if report.num_documents:
        notes.append(f"{path}: {report.num_documents:,} documents, joined")
    if report.num_duplicates:
        notes.append(f"{report.num_duplicates:,} rows of {path} were dropped as duplicates")
    if report.skipped:
        bad = [f"{rows.source.name((file, line))}: {what}" for file, line, what in report.skipped]
        notes.append(f"{len(bad)} bad rows of {path} were skipped:\n  " + "\n  ".join(bad[:10]))
    return notes


def choice_notes(parts: Sequence["Chosen"], encoder: "Encoder") -> list[str]:
    """Report what was cut, split and dropped.

    Raises:
        DataError: Nothing is left, or a row is too long and the recipe asks for an error.
    """
    seq_len = encoder.seq_len
    num_rows = sum(len(part.row_ids) for part in parts)
    found = {fate: _with_fate(parts, fate) for fate in Fate}
    if encoder.too_long == "error" and found[Fate.TOO_LONG][0]:
        num, named = found[Fate.TOO_LONG]
        raise DataError(
            f"{num} of {num_rows} rows have more than {seq_len} tokens: {named}",
            limit="`data.too_long` is error",
            hint="raise `train.seq_len`, or `data.too_long: truncate`, `drop` or `split`",
        )
    num_cut = found[Fate.CUT][0]
    notes = [f"{num_cut} of {num_rows} rows were cut to {seq_len} tokens"] if num_cut else []
    whys = {
        Fate.SPLIT: f"were split into parts of at most {seq_len} tokens",
        Fate.NOTHING_LEFT: f"were dropped: their answers start beyond {seq_len} tokens",
        Fate.TOO_LONG: f"were dropped: they have more than {seq_len} tokens",
        Fate.NOT_TRAINED: "were dropped: none of their turns is trained",
        Fate.ALIKE: f"were dropped: within {seq_len} tokens their answers are the same",
    }
    for fate, why in whys.items():
        num, named = found[fate]
        if num:
            notes.append(f"{num} of {num_rows} rows {why} ({named})")
    num_apart = sum(part.num_apart for part in parts)
    if num_apart:
        notes.append(
            f"{num_apart} of {num_rows} rows are learned in several texts: the template writes"
            " earlier turns otherwise once later ones follow"
        )
    if not any(len(part.examples) for part in parts):
        if found[Fate.NOT_TRAINED][0] == num_rows:
            raise DataError(
                f"none of the {num_rows} rows has a turn that is trained",
                limit="at least one row must have something to learn",
                hint="leave out `train: false` in the turns to learn",
            )
        raise DataError(
            f"none of the {num_rows} rows has an answer within {seq_len} tokens",
            limit="at least one row must have something to learn",
            hint=f"raise `train.seq_len` above {seq_len}",
        )
    return notes


def _with_fate(parts: Sequence["Chosen"], fate: Fate) -> tuple[int, str]:
    """Count the rows with a fate, and name the first ones."""
    found = [(part, part.with_fate(fate)) for part in parts]
    num = sum(len(rows) for _, rows in found)
    first = [part.tokens.name(row) for part, rows in found for row in rows[:_NUM_NAMED].tolist()]
    return num, ", ".join(first[:_NUM_NAMED]) + (", ..." if num > _NUM_NAMED else "")
