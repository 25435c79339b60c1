"""What the key-value caches of a generation take in device memory.

Softmax attention keeps a key and a value of each token, in the compute dtype. With a window it
keeps what the window sees, after a prompt all of it until the next token. A delta rule keeps a
state of fixed size, in fp32, and the last features of its convolution.
"""

from collections.abc import Iterable

from offload.errors import DoesNotFitError
from offload.plan.facts.attention import Attention, DeltaAttention, SoftmaxAttention
from offload.plan.facts.facts import ModelFacts
from offload.plan.machine.machine import GIB
from offload.plan.memory.memory import CONTEXT, CUBLAS, SLOTS, MemoryTerm, total_bytes

FP32_BYTES = 4
STAYING = (
    *(SLOTS, CUBLAS, CONTEXT, "decoded layer", "decode workspace"),
    *("embeddings, norm and head", "adapters", "trained modules"),
)
"""Terms of a step's peak that are there while a model generates too."""


def layer_cache_bytes(
    attention: Attention, *, num_tokens: int, num_new: int, dtype_bytes: int
) -> int | None:
    """Return what a layer keeps of one row after a pass.

    Args:
        attention: The layer's token mixing.
        num_tokens: Tokens of the row so far.
        num_new: Those of them that were computed in the newest pass.
        dtype_bytes: Of an element in the compute dtype.

    Returns:
        Bytes; None where they differ by model: of other recurrences, and of latent attention, of
        which some models keep the features before their projection and others keys and values.
    """
    if isinstance(attention, SoftmaxAttention) and not attention.is_latent:
        width = attention.num_kv_heads * (attention.qk_dim + attention.v_dim)
        if attention.window is not None:
            num_tokens = min(num_tokens, attention.window - 1 + num_new)
        return num_tokens * width * dtype_bytes
    if isinstance(attention, DeltaAttention):
        state = attention.num_value_heads * attention.key_dim * attention.value_dim
        conv = attention.conv_features * attention.conv_tokens
        return state * FP32_BYTES + conv * dtype_bytes
    return None


def cache_bytes(
    facts: ModelFacts, *, prompt_tokens: int, new_tokens: int, dtype_bytes: int
) -> int | None:
    """Return the most that the caches of one row take: after its prompt, or at its end.

    Args:
        facts: The model.
        prompt_tokens: Of the row.
        new_tokens: That are generated after it.
        dtype_bytes: Of an element in the compute dtype.

    Returns:
        Bytes; None where a layer's are not known.
    """
    passes = (prompt_tokens, prompt_tokens), (prompt_tokens + new_tokens - 1, 1)
    totals = []
    for num_tokens, num_new in passes:
        layers = [
            layer_cache_bytes(
                layer.attention, num_tokens=num_tokens, num_new=num_new, dtype_bytes=dtype_bytes
            )
            for layer in facts.layers
        ]
        known = [num_bytes for num_bytes in layers if num_bytes is not None]
        if len(known) < len(layers):
            return None
        totals.append(sum(known))
    return max(totals)


def fitting_rows(
    facts: ModelFacts,
    terms: Iterable[MemoryTerm],
    *,
    limit_bytes: int,
    prompt_tokens: int,
    new_tokens: int,
    dtype_bytes: int,
) -> int | None:
    """Return how many rows have room for their caches in device memory; None if that is not known.

    The arguments are those of `require_room`.
    """
    row_bytes = cache_bytes(
        facts, prompt_tokens=prompt_tokens, new_tokens=new_tokens, dtype_bytes=dtype_bytes
    )
    return None if row_bytes is None else free_bytes(terms, limit_bytes) // row_bytes


def free_bytes(terms: Iterable[MemoryTerm], limit_bytes: int) -> int:
    """Return the device memory that is free where a model generates."""
    return max(0, limit_bytes - total_bytes(term for term in terms if term.name in STAYING))


def require_room(
    facts: ModelFacts,
    terms: Iterable[MemoryTerm],
    *,
    limit_bytes: int,
    num_rows: int,
    prompt_tokens: int,
    new_tokens: int,
    dtype_bytes: int,
) -> None:
    """Check that the caches of some rows fit into device memory, where their size is known.

    Args:
        facts: The model.
        terms: Of the peak of a step in device memory.
        limit_bytes: Device memory that may be used.
        num_rows: Rows that are generated together.
        prompt_tokens: Of the longest of them.
        new_tokens: That are generated after it.
        dtype_bytes: Of an element in the compute dtype.

    Raises:
        DoesNotFitError: They do not.
    """
    row_bytes = cache_bytes(
        facts, prompt_tokens=prompt_tokens, new_tokens=new_tokens, dtype_bytes=dtype_bytes
    )
    free = free_bytes(terms, limit_bytes)
    if row_bytes is None or num_rows * row_bytes <= free:
        return
    num_fitting = free // row_bytes
    raise DoesNotFitError(
        f"the key-value caches of {num_rows} rows of {prompt_tokens} tokens and {new_tokens} new"
        f" ones take {num_rows * row_bytes / GIB:.2f} GiB",
        limit=f"{free / GIB:.2f} GiB of device memory is free next to the slots",
        hint=f"at most {num_fitting} rows at a time"
        if num_fitting
        else "a smaller `--max-new-tokens`, a shorter prompt, or fewer `offload.num_slots`",
    )
