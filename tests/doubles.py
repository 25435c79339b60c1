"""Small stand-ins for what is slow, large or absent in a test."""

import string
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from offload.engine.host.nvml import Driver, Gpu, Link
from offload.engine.streams import CpuDevice, Event
from offload.plan.schedule.op import Lane

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


# As Qwen3's does: an answer after the last question has a think block, empty where it has no
# thoughts; earlier answers lose theirs; line breaks before an answer are dropped.
THINKING_TEMPLATE = (
    "{%- set asked = namespace(at=-1) -%}"
    '{%- for turn in messages if turn.role == "user" -%}'
    "{%- set asked.at = messages.index(turn) -%}"
    "{%- endfor -%}"
    "{%- for turn in messages -%}"
    '{{- "<|im_start|>" + turn.role + "\\n" -}}'
    '{%- if turn.role == "assistant" -%}'
    '{%- set before, mark, answer = turn.content.rpartition("</think>") -%}'
    '{%- set thoughts = before.replace("<think>", "").strip("\\n") -%}'
    "{%- if loop.index0 > asked.at and (loop.last or thoughts) -%}"
    '{{- "<think>\\n" + thoughts + "\\n</think>\\n\\n" + answer.lstrip("\\n") -}}'
    "{%- else -%}"
    '{{- answer.lstrip("\\n") if mark else answer -}}'
    "{%- endif -%}"
    "{%- else -%}"
    "{{- turn.content -}}"
    "{%- endif -%}"
    '{{- "<|im_end|>\\n" -}}'
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    '{{- "<|im_start|>assistant\\n" -}}'
    "{%- if enable_thinking is defined and not enable_thinking -%}"
    '{{- "<think>\\n\\n</think>\\n\\n" -}}'
    "{%- endif -%}"
    "{%- endif -%}"
)


def thinking_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train a tokenizer in the manner of Qwen3's: pairs of bytes, ChatML, tokens of think blocks.

    Unlike the tiny one it has tokens of many characters, with the space before a word, and splits
    a character that it does not know into its bytes.
    """
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=800, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    backend.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = THINKING_TEMPLATE
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


A_LINK = Link(generation=3, width=8, max_generation=4, max_width=16)
A_GPU = Gpu(
    name="NVIDIA GeForce RTX 4060 Ti",
    capability=(8, 9),
    memory_bytes=16 * 2**30,
    used_bytes=2**30,
    num_processes=2,
    link=A_LINK,
)
A_DRIVER = Driver(version="570.86.10", cuda=(12, 8), gpus=(A_GPU, A_GPU))


class FakeLocker:
    """Locks up to a limit; the limit of a rehearsal may be another one."""

    def __init__(self, most_bytes: int, *, most_rehearsed_bytes: int | None = None) -> None:
        self.rehearsed: list[int] = []
        self.locked: dict[int, int] = {}
        self._most_bytes = most_bytes
        self._most_rehearsed_bytes = (
            most_bytes if most_rehearsed_bytes is None else most_rehearsed_bytes
        )

    def rehearse(self, num_bytes: int) -> str | None:
        self.rehearsed.append(num_bytes)
        return None if num_bytes <= self._most_rehearsed_bytes else f"no {num_bytes}"

    def register(self, address: int, num_bytes: int) -> str | None:
        if address in self.locked:
            return "already registered"
        if num_bytes > self._most_bytes:
            return f"not {num_bytes}"
        self.locked[address] = num_bytes
        return None

    def unregister(self, address: int) -> str | None:
        return None if self.locked.pop(address, None) else "not registered"
