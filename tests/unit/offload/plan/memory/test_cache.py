"""The room for key-value caches; tests/parity/test_cache_bytes.py compares them with real ones."""

import pytest

from offload.errors import DoesNotFitError
from offload.plan.machine.machine import GIB
from offload.plan.memory.memory import (
    SLOTS,
    VISIT,
    MemoryTerm,
    cache_bytes,
    fitting_rows,
    require_room,
)
from tests.builders import qwen3_30b

FACTS = qwen3_30b()
ROW_BYTES = 48 * 2 * 4 * 128 * 2  # a token: layers, keys and values, heads, features, bf16


def test_a_row_takes_keys_and_values_of_all_tokens_that_were_computed() -> None:
    found = cache_bytes(FACTS, prompt_tokens=1000, new_tokens=25, dtype_bytes=2)
    assert found == ROW_BYTES * 1024


def test_rows_that_do_not_fit_are_refused_with_the_number_that_do() -> None:
    terms = [
        MemoryTerm(name=SLOTS, num_bytes=10 * GIB),
        MemoryTerm(name=VISIT, num_bytes=5 * GIB),  # of a step: not there while it generates
    ]
    asked = {"prompt_tokens": 10_000, "new_tokens": 241, "dtype_bytes": 2}
    limit_bytes = 10 * GIB + 4 * ROW_BYTES * 10_240
    assert fitting_rows(FACTS, terms, limit_bytes=limit_bytes, **asked) == 4
    require_room(FACTS, terms, limit_bytes=limit_bytes, num_rows=4, **asked)
    with pytest.raises(
        DoesNotFitError,
        match=r"of 5 rows of 10000 tokens and 241 new ones take 4\.69 GiB; 3\.75 GiB of device"
        r" memory is free next to the slots\n\nhint: at most 4 rows at a time",
    ):
        require_room(FACTS, terms, limit_bytes=limit_bytes, num_rows=5, **asked)
    with pytest.raises(DoesNotFitError, match=r"0\.00 GiB .*\n\nhint: a smaller `--max-new"):
        require_room(FACTS, terms, limit_bytes=10 * GIB, num_rows=1, **asked)
