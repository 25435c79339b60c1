"""Which rows are held out: single rows, or of joined documents a stretch of whole ones.

A row of joined documents may hold parts of several, and a document may go on in the next row. So
that no document is on both sides, a stretch of rows is held out, at a place that the seed draws;
rows before it that go on with a trained document are left out, as are rows after it that go on with
one of its own.
"""

from typing import TYPE_CHECKING

import numpy as np

from finetune.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from finetune.data.dataset import Tokens
    from finetune.data.token_cache import TokenStore


def sides_of(
    tokens: "Tokens", mask: "NDArray[np.bool_]", *, end_id: int, seed: int
) -> "tuple[NDArray[np.int64], NDArray[np.int64]]":
    """Return the rows of a source to train on and those to hold out.

    Args:
        tokens: Of the source.
        mask: Rows that were drawn to be held out; of joined documents, how many.
        end_id: The token that ends a document.
        seed: Draws the place of documents.

    Raises:
        DataError: A document fills one of the sides.
    """
    store, num_held_out = tokens.store, int(mask.sum())
    if not store.report.num_documents or not num_held_out:
        return np.flatnonzero(~mask), np.flatnonzero(mask)
    num_rows, path = len(store), tokens.rows.source.path
    generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, 0])))
    first = int(generator.randint(0, num_rows - num_held_out + 1))
    start = _next_start(store, first, end_id)
    if start == num_rows:  # the last document has begun before: take the stretch at the beginning
        first = start = 0
    held_out = np.arange(start, min(start + num_held_out, num_rows))
    after = np.arange(_next_start(store, start + len(held_out), end_id), num_rows)
    trained = np.concatenate([np.arange(first), after])
    if not len(trained):
        raise DataError(
            f"data.eval_frac holds out {num_held_out} of {num_rows} rows of {path}, and no whole"
            " document fits on each side",
            limit="a document is trained on or held out, not both, and documents are joined in rows"
            " of `train.seq_len` tokens",
            hint="raise `data.eval_frac`, cut the documents, or name a file by `data.eval_path`",
        )
    return trained, held_out


def _ends(store: "TokenStore", row: int, end_id: int) -> "tuple[bool, bool]":
    """Return whether any document ends in a row, and whether the row ends with one."""
    ids = store.input_ids[store.offsets[row] : store.offsets[row + 1]]
    return bool((ids == end_id).any()), bool(ids[-1] == end_id)


def _next_start(store: "TokenStore", row: int, end_id: int) -> int:
    """Return the first row, from `row`, that has no part of a document of the rows before it."""
    if row == 0 or row == len(store) or _ends(store, row - 1, end_id)[1]:
        return row
    while row < len(store) and not _ends(store, row, end_id)[0]:
        row += 1
    return min(row + 1, len(store))
