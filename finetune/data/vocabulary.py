"""Tokens that a tokenizer has and a model does not, found before the model is loaded."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from finetune.data.dataset import Rows


def require_known_rows(rows: "Rows", tokenizer: "PreTrainedTokenizerBase", num_tokens: int) -> None:
    """Check that a model has the tokens of rows, and the one that fills them up.

    Args:
        rows: That are trained on, and held out.
        tokenizer: Their tokenizer.
        num_tokens: Rows of the model's embedding.

    Raises:
        DataError: It lacks one.
    """
    require_known_ids([[tokenizer.pad_token_id]], tokenizer, num_tokens, where="what pads rows")
    for part in (*rows.train.parts, *(rows.held_out.parts if rows.held_out else ())):
        where = str(part.tokens.rows.source.path)
        require_known_ids(part.blocks("input_ids"), tokenizer, num_tokens, where=where)


def require_known_ids(
    ids: "Iterable[Sequence[int] | NDArray[Any]]",
    tokenizer: "PreTrainedTokenizerBase",
    num_tokens: int,
    *,
    where: str,
) -> None:
    """Check that a model has these tokens; most tokenizers have no others, so none is read.

    Args:
        ids: Pieces of them.
        tokenizer: Their tokenizer.
        num_tokens: Rows of the model's embedding.
        where: What has them, in errors.

    Raises:
        DataError: It lacks one.
    """
    if max(tokenizer.get_vocab().values(), default=0) < num_tokens:
        return
    highest = max((int(np.max(piece)) for piece in ids if len(piece)), default=0)
    if highest >= num_tokens:
        raise DataError(
            f"the token {tokenizer.convert_ids_to_tokens(highest)} has the number {highest:,}, and"
            f" the model has {num_tokens:,} tokens, from 0 ({where})",
            limit="each token of the tokenizer that is used is a row of the model's embedding",
            hint="take the model's own tokenizer (`model.tokenizer`), or enlarge the base once, by"
            " `model.resize_token_embeddings(len(tokenizer))` of transformers and"
            " `save_pretrained`",
        )
