"""Small stand-ins for what is slow, large or absent in a test."""

import string

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

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
