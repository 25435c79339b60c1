"""Weights in fp16."""

from offload.codecs._cast import cast

EXTENSION = cast("fp16", "float16", is_exact=False)
