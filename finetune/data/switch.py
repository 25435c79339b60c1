"""The variable of a chat template that turns reasoning on or off, and which prompts rows follow.

Such a template ends its generation prompt in one of two ways. Qwen3's with `enable_thinking=False`
writes an empty think block there, and does the same before the last answer of a conversation
without reasoning. A server renders it without a value, so that the model may think. An answer that
is trained after one prompt says little of what the model does after the other.

The variable is found by rendering: it is the one that a template reads and does not define, and
with which the end of the generation prompt differs. Published ones have several names for it.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from finetune.data.chat_template import render
from finetune.data.turns import Message
from finetune.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_KWARGS = "default_chat_template_kwargs"
"""Key of generation_config.json for what a server passes to the template of every prompt."""
OFF, ON, EMPTY = "off", "on", "empty"
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_GENERATION_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_QUESTION = (Message(role="user", content="?"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """A template's variable for reasoning.

    Attributes:
        name: Name of the variable.
        default: The value with which the prompt is that without a value; None if it is neither's.
    """

    name: str
    default: bool | None

    def settings(self, *, value: bool | None) -> Mapping[str, bool]:
        """Return what the template is given for a value; nothing for None."""
        return {} if value is None else {self.name: value}

    def kind(self, *, value: bool | None) -> str | None:
        """Return `OFF` or `ON` for a value that a server has to be given, None for the others."""
        if value is None or value == self.default:
            return None
        return ON if value else OFF


_found: dict[str, Switch | None] = {}
"""Template -> its switch."""


def switch_of(tokenizer: "PreTrainedTokenizerBase") -> Switch | None:
    """Return the variable that turns the reasoning of a tokenizer's template on or off, if any."""
    template: Any = tokenizer.chat_template
    if template is None:
        return None
    texts = list(template.values()) if isinstance(template, dict) else [template]
    key = json.dumps(texts)
    if key not in _found:
        names = sorted({name for text in texts for name in _variables(text)} - _GIVEN)
        switches = (_switch(name, tokenizer) for name in names)
        _found[key] = next((one for one in switches if one is not None), None)
    return _found[key]


def _variables(template: str) -> set[str]:
    """Return the variables that a template reads and does not define."""
    import jinja2
    import jinja2.meta

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = environment.parse(_GENERATION_MARKS.sub("", template))
    except jinja2.TemplateSyntaxError:
        return set()  # rendering will say so
    return jinja2.meta.find_undeclared_variables(parsed)


def _switch(name: str, tokenizer: "PreTrainedTokenizerBase") -> Switch | None:
    try:
        plain, off, on = (
            _prompt_end(tokenizer, {}),
            *(_prompt_end(tokenizer, {name: value}) for value in (False, True)),
        )
    except DataError:
        return None
    if off == on or str(False) in off or str(True) in on:  # a text, not a switch
        return None
    return Switch(name=name, default={off: False, on: True}.get(plain))


def _prompt_end(tokenizer: "PreTrainedTokenizerBase", settings: Mapping[str, bool]) -> str:
    """Return what the generation prompt of a question has after the question."""
    asked, prompt = (
        render(_QUESTION, tokenizer, source="a question", is_prompt=is_prompt, settings=settings)
        for is_prompt in (False, True)
    )
    return prompt.removeprefix(asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompted:
    """Which prompts the answers of some rows are trained after.

    Attributes:
        name: Name of the template's variable; None if it has none.
        num_rows: Rows, those held out included.
        num_off: Rows with an answer after the prompt with False, which no server sends by default.
        num_on: Rows with an answer after the prompt with True, which no server sends by default.
        num_empty: Rows without reasoning that learn to write an empty think block.
    """

    name: str | None = None
    num_rows: int = 0
    num_off: int = 0
    num_on: int = 0
    num_empty: int = 0

    @classmethod
    def of(cls, switch: Switch | None, counts: Mapping[str, int], *, num_rows: int) -> Self:
        """Return it for numbers of rows by kind."""
        return cls(
            name=None if switch is None else switch.name,
            num_rows=num_rows,
            num_off=counts.get(OFF, 0),
            num_on=counts.get(ON, 0),
            num_empty=counts.get(EMPTY, 0),
        )

    @property
    def template_kwargs(self) -> Mapping[str, bool]:
        """What a server must give the template; nothing if its default prompt is the trained one.

        Where some rows need False and others True, it is that of more rows.
        """
        if self.name is None or not (self.num_off or self.num_on):
            return {}
        return {self.name: self.num_on > self.num_off}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know before training: a line for each kind of rows."""
        found = [
            f"{_counted(num, self.num_rows)} trained after the prompt with {self.name}={value},"
            f" and servers send it without: set {self.name}={value} there (the flags will be in"
            f" README.md of what is trained){more}"
            for num, value, more in (
                (self.num_off, False, ", or `data.empty_think: learn`"),
                (self.num_on, True, ""),
            )
            if num
        ]
        if self.num_empty:
            found.append(
                f"{_counted(self.num_empty, self.num_rows)} without reasoning, and the prompt lets"
                " the model think: they learn to write an empty think block before the answer"
            )
        return tuple(found)

    def section(self) -> str:
        """Return what a model card says of it; nothing if there is nothing to say."""
        if not self.template_kwargs:
            return "\n".join(self.notes[-1:]) if self.num_empty else ""
        ((name, value),) = self.template_kwargs.items()
        num = self.num_on if value else self.num_off
        flags = "\n".join(f"- {flag}" for flag in server_flags(self.template_kwargs))
        return (
            f"{_counted(num, self.num_rows)} trained after the prompt that the chat template writes"
            f" with `{name}={value}`. A server writes another one unless it is set:\n\n{flags}"
        )


def _counted(num: int, num_rows: int) -> str:
    return f"{num:,} of {num_rows:,} rows are"


def server_flags(
    template_kwargs: Mapping[str, bool],
    *,
    model: str = "MODEL",
    file: str = "MODEL.gguf",
    programs: Collection[str] = ("vLLM", "llama.cpp", "Ollama", "transformers"),
) -> tuple[str, ...]:
    """Return how programs are made to send the prompt with some settings of the template.

    Source: vLLM's engine arguments and OpenAI-compatible server, llama.cpp's tools/server/README.md
    and Ollama's docs/api.md, read in 2026.

    Args:
        template_kwargs: The settings.
        model: Name of the model for vLLM.
        file: Its GGUF file.
        programs: Which ones.
    """
    if not template_kwargs:
        return ()
    shown = json.dumps(dict(template_kwargs))
    think = json.dumps(next(iter(template_kwargs.values())))
    given = ", ".join(f"{name}={value}" for name, value in template_kwargs.items())
    flags = {
        "vLLM": f"`vllm serve {model} {vllm_flag(template_kwargs)}`,"
        f' or `"chat_template_kwargs": {shown}` in a request',
        "llama.cpp": f"`llama-server -m {file} --jinja --chat-template-kwargs '{shown}'`",
        "Ollama": f'`ollama run NAME --think={think}`, or `"think": {think}` in a request',
        "transformers": f"`apply_chat_template(..., add_generation_prompt=True, {given})`",
    }
    return tuple(f"{program}: {flag}" for program, flag in flags.items() if program in programs)


def vllm_flag(template_kwargs: Mapping[str, bool]) -> str:
    """Return the option of `vllm serve` that gives every prompt's template some settings."""
    return f"--default-chat-template-kwargs '{json.dumps(dict(template_kwargs))}'"
