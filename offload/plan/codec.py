"""The forms in which layers wait, by name, and what a weight takes in each."""

from typing import Literal

CodecName = Literal["native", "bf16", "fp16", "fp8", "int8", "nf4", "bf16_packed"]
