"""Weights in bf16."""

from offload.codecs._cast import cast

EXTENSION = cast("bf16", "bfloat16", is_exact=True)
