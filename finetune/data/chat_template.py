"""Render messages by a tokenizer's chat template, within limits.

A template is a program that came with the model. One that loops or grows without end is stopped by
time and size, and whatever it raises is an error that names the row.

The time limit counts the process's CPU time (SIGVTALRM), so load on the machine does not matter.
The memory limit is on the address space and is lifted after rendering. Both need the main thread,
where rows are tokenised, here and in worker processes.
"""

import json
import re
import resource
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from finetune.data.turns import Message
from finetune.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a row's renderings; a typical one takes less than a millisecond and a megabyte."""

    cpu_s: float = 20.0  # processor time
    memory_bytes: int = 2**30  # address space in addition to what the process has
    num_chars: int = 2**26  # length of the rendered text


LIMITS = Limits()
NO_SETTINGS: Mapping[str, bool] = MappingProxyType({})
_STATM, _PAGE_BYTES = Path("/proc/self/statm"), resource.getpagesize()


class _OutOfTimeError(BaseException):
    """A rendering has used up its time; no `except Exception` of a filter may swallow this."""


def render(
    messages: Sequence[Message],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    source: str,
    tools: Sequence[Mapping[str, Any]] = (),
    is_prompt: bool = False,
    settings: Mapping[str, bool] = NO_SETTINGS,
    limits: Limits = LIMITS,
) -> str:
    """Return the text of messages.

    Args:
        messages: At least one.
        tokenizer: With a template.
        source: The row, as errors name it.
        tools: Definitions of tools.
        is_prompt: Whether the text includes the generation prompt.
        settings: Values of the template's own variables.
        limits: Its limits.

    Raises:
        DataError: The template fails or exceeds a limit, or writes nothing of a question.
    """
    turns = [message.to_json() for message in messages]
    variables: dict[str, Any] = dict(settings)
    with limited(source, limits):
        turns = turns_for(tokenizer, turns, source=source)
        try:
            text = tokenizer.apply_chat_template(
                turns,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=is_prompt,
                **variables,
            )
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise refused(f"cannot render the row: {reason}", source=source) from error
    assert isinstance(text, str)
    if len(text) > limits.num_chars:
        raise _endless(f"writes {len(text)} characters", limits, source)
    return text


def refused(what: str, *, source: str) -> DataError:
    """Return the error for a template in whose text the answers of a row cannot be found."""
    return DataError(
        f"the chat template {what} ({source})",
        limit="each answer must follow its generation prompt and end with a special token",
        hint="set `model.tokenizer` to a tokenizer with another template, or fix the row",
    )


def _endless(what: str, limits: Limits, source: str) -> DataError:
    return DataError(
        f"the chat template {what} for one row ({source})",
        limit=f"a row may take {limits.cpu_s:g} s and {limits.num_chars} characters",
        hint="set `model.tokenizer` to a tokenizer with another template, or shorten the row",
    )


# ---------------------------------------------------------------------------------------------
# The form of a turn's content: a text, or a list of parts of which it is the only one. It is a
# list where there are images too.
#
# Templates of models for images loop over the parts of a content. Over a text they loop too, letter
# by letter, and write nothing of it. So a marker is rendered both ways, once for each template and
# role, and what shows it is used; a text, where both do.

_MARKER = "70813459"  # without letters, which a template may write in capitals
_TURN, _ASKED = {"role": "user", "content": _MARKER}, {"role": "user", "content": "?"}
_PROBES: Mapping[str, tuple[dict[str, Any], ...]] = {
    "user": (_TURN,),
    "assistant": (_ASKED, {**_TURN, "role": "assistant"}),
    "system": ({**_TURN, "role": "system"}, _ASKED),
}
_AS_ROLE = {"developer": "system", "tool": "user"}
_parted: dict[str, frozenset[str]] = {}
"""Template -> the roles whose content it writes only as a list of parts."""


def turns_for(
    tokenizer: "PreTrainedTokenizerBase", turns: Sequence[Mapping[str, Any]], *, source: str
) -> list[dict[str, Any]]:
    """Return turns with contents in the form that a tokenizer's template writes.

    Args:
        tokenizer: A tokenizer with a template.
        turns: Messages whose contents are texts, or lists of parts where they have images.
        source: The row, as errors name it.

    Raises:
        DataError: The template writes neither form of a question.
    """
    key = json.dumps(tokenizer.chat_template)
    if key not in _parted:
        parted: set[str] = set()
        with limited(source):
            for role in _PROBES:
                if not _shows(tokenizer, role, parted) and _shows(tokenizer, role, {*parted, role}):
                    parted.add(role)
                elif role == "user" and _shows(tokenizer, role, parted) is False:
                    raise DataError(
                        f"the chat template writes nothing of what a user says ({source})",
                        limit="a turn is given to it as a text, or as a list of parts",
                        hint="set `model.tokenizer` to a tokenizer with another template",
                    )
        _parted[key] = frozenset(parted)
    return _in_form(turns, _parted[key])


def _in_form(turns: Iterable[Mapping[str, Any]], parted: Collection[str]) -> list[dict[str, Any]]:
    return [
        {**turn, "content": [{"type": "text", "text": turn["content"]}]}
        if isinstance(turn["content"], str) and _AS_ROLE.get(turn["role"], turn["role"]) in parted
        else dict(turn)
        for turn in turns
    ]


def _shows(tokenizer: "PreTrainedTokenizerBase", role: str, parted: Collection[str]) -> bool | None:
    """Return whether a template writes what a role says; None if it fails."""
    turns = _in_form(_PROBES[role], parted)
    try:
        return _MARKER in str(tokenizer.apply_chat_template(turns, tokenize=False))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - a template may raise anything, and says it of the row too
        return None


_is_limited: list[bool] = []
"""Not empty within a block of `limited`."""


@contextmanager
def limited(source: str, limits: Limits = LIMITS) -> Iterator[None]:
    """Limit time and memory within the block, all renderings in it together.

    A block within another one changes nothing: to set the limits takes as long as to render.

    Args:
        source: The row, as errors name it.
        limits: The limits.

    Raises:
        DataError: A limit was exceeded.
    """
    if _is_limited:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most_bytes = _address_space_bytes() + limits.memory_bytes
    bounds = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    before = signal.signal(signal.SIGVTALRM, _out_of_time)
    _is_limited.append(True)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, limits.cpu_s)
        resource.setrlimit(resource.RLIMIT_AS, (min([most_bytes, *bounds]), hard))
        yield
    except _OutOfTimeError as error:
        raise _endless(f"computes for more than {limits.cpu_s:g} s", limits, source) from error
    except MemoryError as error:
        raise _endless(f"takes more than {limits.memory_bytes} bytes", limits, source) from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)
        _is_limited.clear()


def _out_of_time(_number: int, _frame: FrameType | None) -> None:
    raise _OutOfTimeError


def _address_space_bytes() -> int:
    with _STATM.open("rb", buffering=0) as file:  # for each row: half the time of read_bytes
        return int(file.read(32).split()[0]) * _PAGE_BYTES


# ---------------------------------------------------------------------------------------------
# The variable of a chat template that turns reasoning on or off, and which prompts rows follow.
#
# Such a template ends its generation prompt in one of two ways. Qwen3's with
# `enable_thinking=False` writes an empty think block there, and does the same before the last
# answer of a conversation without reasoning. A server renders it without a value, so that the model
# may think. An answer that is trained after one prompt says little of what the model does after the
# other.
#
# The variable is found by rendering: it is the one that a template reads and does not define, and
# with which the end of the generation prompt differs. Published ones have several names for it.

TEMPLATE_KWARGS = "default_chat_template_kwargs"
"""Key of generation_config.json for what a server passes to the template of every prompt."""
OFF, ON, EMPTY = "off", "on", "empty"
_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_GENERATION_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_QUESTION = (Message(role="user", content="?"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Switch:
    """A template's variable for reasoning."""

    name: str  # name of the variable
    # The value with which the prompt is that without a value; None if it is neither's.
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
    """Which prompts the answers of some rows are trained after."""

    name: str | None = None  # name of the template's variable; None if it has none
    num_rows: int = 0  # rows, those held out included
    # Rows with an answer after the prompt with False, which no server sends by default.
    num_off: int = 0
    # Rows with an answer after the prompt with True, which no server sends by default.
    num_on: int = 0
    num_empty: int = 0  # rows without reasoning that learn to write an empty think block

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
        flags = "\n".join(f"- {flag}" for flag in serving(self.template_kwargs))
        return (
            f"{_counted(num, self.num_rows)} trained after the prompt that the chat template writes"
            f" with `{name}={value}`. A server writes another one unless it is set:\n\n{flags}"
        )


def _counted(num: int, num_rows: int) -> str:
    return f"{num:,} of {num_rows:,} rows are"


def serving(
    template_kwargs: Mapping[str, bool],
    *,
    model: str = "MODEL",
    file: str = "MODEL.gguf",
    name: str = "NAME",
    programs: Collection[str] = ("vLLM", "llama.cpp", "Ollama", "transformers"),
) -> tuple[str, ...]:
    """Return how programs are made to answer, after the prompt with some settings of the template.

    Source: vLLM's engine arguments and OpenAI-compatible server, llama.cpp's tools/server/README.md
    and Ollama's docs/api.md, read in 2026.

    Args:
        template_kwargs: The settings.
        model: Name of the model for vLLM.
        file: Its GGUF file.
        name: Name of the model for Ollama.
        programs: Which ones.
    """
    if not template_kwargs:
        commands = {
            "vLLM": f"`vllm serve {model}`",
            "llama.cpp": f"`llama-server -m {file} --jinja`",
            "Ollama": f"`ollama run {name}`",
        }
        return tuple(f"{one}: {call}" for one, call in commands.items() if one in programs)
    shown = json.dumps(dict(template_kwargs))
    think = json.dumps(next(iter(template_kwargs.values())))
    given = ", ".join(f"{key}={value}" for key, value in template_kwargs.items())
    flags = {
        "vLLM": f"`vllm serve {model} {vllm_flag(template_kwargs)}`,"
        f' or `"chat_template_kwargs": {shown}` in a request',
        "llama.cpp": f"`llama-server -m {file} --jinja --chat-template-kwargs '{shown}'`",
        "Ollama": f'`ollama run {name} --think={think}`, or `"think": {think}` in a request',
        "transformers": f"`apply_chat_template(..., add_generation_prompt=True, {given})`",
    }
    return tuple(f"{program}: {flag}" for program, flag in flags.items() if program in programs)


def vllm_flag(template_kwargs: Mapping[str, bool]) -> str:
    """Return the option of `vllm serve` that gives every prompt's template some settings."""
    return f"--default-chat-template-kwargs '{json.dumps(dict(template_kwargs))}'"


# ---------------------------------------------------------------------------------------------
# The tokens at which generation stops: those that end the trained answers, then the base's own.
#
# A base model that is trained to chat ends its answers in `<|im_end|>`, while its config still says
# `<|endoftext|>`: a server that uses this config never stops. So the trained tokens are written
# where every server looks: `generation_config.json`, next to the adapter and in a merged model. It
# also has what the chat template must be given for the prompt that answers were trained after,
# under the key that some published models use; servers need flags for it (`finetune.data.switch`).

GENERATION_CONFIG = "generation_config.json"
_OF_MODEL_CONFIG = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """Where generation stops."""

    trained: tuple[int, ...]  # tokens that end the trained answers, the usual one first
    base: tuple[int, ...]  # tokens at which the base model stops
    # What the chat template must be given for the prompt of these answers.
    template_kwargs: Mapping[str, bool] = field(default_factory=dict)

    @property
    def ids(self) -> tuple[int, ...]:
        """All of them, the trained ones first."""
        return tuple(dict.fromkeys(self.trained + self.base))

    def shown(self, tokenizer: "PreTrainedTokenizerBase") -> str:
        """Return where answers end, in one line."""

        def names(ids: Iterable[int]) -> str:
            return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in ids)

        others = self.ids[len(self.trained) :]
        also = f"; generation stops at {names(others)} too" if others else ""
        if not self.trained:
            return f"No answer ends within `train.seq_len`, so no end is learned{also}"
        if len(self.trained) == 1:
            return f"Answers end with {names(self.trained)}{also}"
        return f"Answers end with different tokens: {names(self.trained)}{also}"


def cut_at(text: str, strings: Iterable[str]) -> str:
    """Return a text up to the first of some strings that end it."""
    found = [at for at in map(text.find, strings) if at >= 0]
    return text[: min(found, default=len(text))]


def eos_ids(fields: Mapping[str, Any], *, source: Path | str) -> tuple[int, ...]:
    """Return the tokens of `eos_token_id`, which is one, several or none.

    Raises:
        ModelError: It is something else.
    """
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ModelError(
            f"eos_token_id is {value!r} in {source}",
            limit="it must be a token's number, or a list of them",
            hint=f"correct it in {source}",
        )
    return tuple(ids)


def read_generation_config(folder: Path) -> dict[str, Any] | None:
    """Return the fields of a folder's generation config, None if it has none.

    Raises:
        ModelError: The file is damaged.
    """
    file = folder / GENERATION_CONFIG
    if not file.exists():
        return None
    try:
        fields = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _damaged(file, str(error)) from error
    if not isinstance(fields, dict):
        raise _damaged(file, f"it holds a {type(fields).__name__}")
    return fields


def template_kwargs_in(folder: Path) -> dict[str, bool]:
    """Return what a folder's generation config says that the chat template must be given.

    Raises:
        ModelError: The file is damaged.
    """
    found = (read_generation_config(folder) or {}).get(TEMPLATE_KWARGS, {})
    if not isinstance(found, dict) or not all(type(value) is bool for value in found.values()):
        raise _damaged(folder / GENERATION_CONFIG, f"{TEMPLATE_KWARGS} is {found!r}")
    return found


def write_generation_config(folder: Path, fields: Mapping[str, Any], stops: Stops) -> None:
    """Write a folder's generation config, with where to stop and what the template is given."""
    ids = stops.ids
    written = {**fields, "eos_token_id": ids[0] if len(ids) == 1 else list(ids)}
    if stops.template_kwargs:
        written[TEMPLATE_KWARGS] = dict(stops.template_kwargs)
    text = json.dumps(written, indent=2) + "\n"
    (folder / GENERATION_CONFIG).write_text(text)


def merge_generation_config(base: Path, adapter: Path, folder: Path) -> None:
    """Let a merged model stop where the adapter was trained to, and where its base does.

    If the adapter has no generation config, the one copied from the base stays.

    Raises:
        ModelError: A file is damaged.
    """
    trained = read_generation_config(adapter)
    if trained is None:
        return
    fields = read_generation_config(base)
    if fields is None:  # transformers would make one of the model's config
        config = json.loads((base / "config.json").read_text())
        fields = {name: config[name] for name in _OF_MODEL_CONFIG if config.get(name) is not None}
    stops = Stops(
        trained=eos_ids(trained, source=adapter / GENERATION_CONFIG),
        base=eos_ids(fields, source=base / GENERATION_CONFIG),
        template_kwargs=template_kwargs_in(adapter),
    )
    if (stops.ids and stops.ids != stops.base) or stops.template_kwargs:
        write_generation_config(folder, fields, stops)


def _damaged(file: Path, problem: str) -> ModelError:
    return ModelError(
        f"{file} cannot be read: {problem}",
        limit="it must be a JSON object, as transformers writes it",
        hint=f"write it anew, or remove {file}: then the end of answers is taken from the template",
    )
