"""Small stand-ins for what is slow, large or absent in a test."""

import string
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from offload.engine.streams import CpuDevice, Event
from offload.plan.op import Lane

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# The trap of Qwen3's template: the last answer, and only that, gets an empty think block.
CHAT_TEMPLATE = (
    "{%- set seen = namespace(user=-1) -%}"
    '{%- for turn in messages -%}{%- if turn.role == "user" -%}'
    "{%- set seen.user = loop.index0 -%}"
    "{%- endif -%}{%- endfor -%}"
    "{%- for turn in messages -%}"
    '{{- "<|im_start|>" + turn.role + "\\n" -}}'
    '{%- if loop.last and turn.role == "assistant" and loop.index0 > seen.user'
    ' and "</think>" not in turn.content -%}'
    '{{- "<think>\\n\\n</think>\\n\\n" -}}'
    "{%- endif -%}"
    '{{- turn.content + "<|im_end|>\\n" -}}'
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    '{{- "<|im_start|>assistant\\n" -}}'
    "{%- if enable_thinking is defined and not enable_thinking -%}"
    '{{- "<think>\\n\\n</think>\\n\\n" -}}'
    "{%- endif -%}"
    "{%- endif -%}"
)


def tiny_tokenizer(
    *, chat_template: str | None = CHAT_TEMPLATE, merges: tuple[tuple[str, str], ...] = ()
) -> PreTrainedTokenizerFast:
    """Build a TinyTokenizer: one token per character, ChatML's special tokens, Qwen3's trap.

    It is a real tokenizer of transformers. `merges` joins pairs of characters into one token, to
    try text whose tokens lie across a boundary.
    """
    pieces = ["<unk>", *string.printable, *("".join(pair) for pair in merges)]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(BPE(vocab=vocab, merges=list(merges), unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    return tokenizer


class AroundOp(Protocol):
    """Runs an op's body, when and how it likes."""

    def __call__(self, number: int, lane: Lane, body: Callable[[], None]) -> None: ...


class HookedDevice(CpuDevice):
    """A CPU whose ops are run by a function that may hold them up or break them."""

    def __init__(self, around: AroundOp) -> None:
        super().__init__()
        self._around = around
        self._num_issued = 0

    def begin(self) -> None:
        super().begin()
        self._num_issued = 0

    def submit(self, lane: Lane, waits: Sequence[Event], body: Callable[[], None]) -> Event:
        number = self._num_issued
        self._num_issued += 1
        return super().submit(lane, waits, lambda: self._around(number, lane, body))
