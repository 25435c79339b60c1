"""A folder that `ollama create` makes a model of: a GGUF file, and a Modelfile next to it.

From 0.34.1 on Ollama takes no adapters, and it has never quantised GGUF well: the file is the
merged model, in its final form.

From 0.30 on it answers by llama.cpp's server, with the chat template in the file. But `ollama
create` first compares that template with some that Ollama has, by edit distance, and takes its own
where one is near: a fine-tune whose turns differ by one token is then asked in other words. Before
0.30 the file's template was not read at all. A TEMPLATE in the Modelfile settles both. Ollama
prefers the file's own all the same if that knows tools or reasoning, which TEMPLATE does not.

TEMPLATE is written in Go's template language. It is found by rendering: what the chat template
writes between one turn and the next depends, in most, on the roles of both alone. These texts are
read off two conversations, and others must come out the same. Where they do not, nothing is
written, and the Modelfile asks for a version that reads the file's own.

For Gemma 4, Nemotron and gpt-oss Ollama has code that writes the prompt, whatever a file says.

Source: Ollama's server/create.go (`errAdaptersUnsupported`), server/model.go
(`detectChatTemplate`), server/images.go (`shouldPreferChatTemplate`) and llm/llama_server.go, read
in 2026; docs/modelfile.mdx.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.data.chat_template import (
    GENERATION_CONFIG,
    eos_ids,
    limited,
    read_generation_config,
    render,
)
from finetune.data.turns import Message
from finetune.errors import DataError
from finetune.export.gguf import Exported, convert
from finetune.export.llama_cpp import Programs
from finetune.export.merge import Progress
from finetune.files.atomic import becoming, workspace
from finetune.model.tokenizer import load_tokenizer
from finetune.recipe.sections import ModelSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MODELFILE = "Modelfile"
READS_OWN = "0.30.0"
"""The first version of Ollama that answers with the chat template in the file."""

_START, _END, _SYSTEM, _USER, _ANSWER = "", "end", "system", "user", "assistant"
_TURNS = (_USER, _ANSWER, _USER, _ANSWER, _USER)
_CONTENT = "7081{}3459"  # without letters, which a template may write in capitals


def export_ollama(
    source: Path, out: Path, name: str, programs: Programs, *, progress: Progress | None = None
) -> Exported:
    """Write a folder with a GGUF file and a Modelfile.

    Args:
        source: A finished run, or a merged model.
        out: A folder that is not there yet.
        name: The name of the GGUF file.
        programs: Programs of llama.cpp for the form of its weights.
        progress: Called with the progress of the merge.

    Raises:
        CheckpointError: `source` is neither a model nor a finished run.
        MergeError: A program fails, or its output is not complete.
        ModelError: See `merge`.
    """
    with becoming(out) as folder, workspace(folder) as work:
        made, model = convert(source, work, name, programs, progress=progress)
        made.file.rename(folder / name)
        text = _modelfile(model, name, made.template_kwargs)
        (folder / MODELFILE).write_text(text, encoding="utf-8")
    return replace(made, file=out / name)


def _modelfile(model: Path, name: str, kwargs: Mapping[str, bool]) -> str:
    """Return the Modelfile of a model.

    Args:
        model: The folder of the merged model.
        name: The name of its GGUF file.
        kwargs: Arguments that its chat template needs.
    """
    tokenizer = load_tokenizer(ModelSection(path=str(model)))
    template = None if tokenizer.chat_template is None else go_template(tokenizer, kwargs)
    ids = eos_ids(read_generation_config(model) or {}, source=model / GENERATION_CONFIG)
    stops = [tokenizer.decode([token]) for token in ids or (tokenizer.eos_token_id,)]
    lines = [f"FROM ./{name}"]
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
    elif tokenizer.chat_template is not None:
        lines.append(f"REQUIRES {READS_OWN}")
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    for value in kwargs.values():
        flag = f"--think={json.dumps(value)}"
        lines.insert(0, f"# Answers were trained after the prompt of `ollama run {flag}`.")
    return "\n".join(lines) + "\n"


def go_template(tokenizer: "PreTrainedTokenizerBase", kwargs: Mapping[str, bool]) -> str | None:
    """Return a chat template in Go's language; None if what it writes depends on more than roles.

    Args:
        tokenizer: A tokenizer with a template.
        kwargs: Arguments of the template.
    """
    between: dict[tuple[str, str], str] = {}
    with limited("the chat template"):
        has_system = _between((_SYSTEM, _USER), tokenizer, kwargs) is not None
        for first in ((), (_SYSTEM,)) if has_system else ((),):
            for num in range(1, len(_TURNS) + 1, 2):
                found = _between((*first, *_TURNS[:num]), tokenizer, kwargs)
                if found is None:
                    return None
                if any(between.setdefault(pair, text) != text for pair, text in found.items()):
                    return None
    begin = tokenizer.bos_token
    if begin and between[_START, _USER].startswith(str(begin)):
        if tokenizer("7").input_ids[:1] != [tokenizer.bos_token_id]:
            return None  # it is not known whether the server adds one more
        for pair in between:
            if pair[0] == _START:
                between[pair] = between[pair].removeprefix(str(begin))
    return _in_go(between)


def _between(
    turns: Sequence[str], tokenizer: "PreTrainedTokenizerBase", kwargs: Mapping[str, bool]
) -> dict[tuple[str, str], str] | None:
    """Return what a template writes between turns, by the roles of both; None if it refuses them.

    Args:
        turns: Roles of a conversation, after which an answer is asked for.
        tokenizer: A tokenizer with a template.
        kwargs: Arguments of the template.
    """
    said = [_CONTENT.format(number) for number in range(len(turns))]
    messages = [Message(role=role, content=text) for role, text in zip(turns, said, strict=True)]
    try:
        rest = render(
            messages, tokenizer, source="the chat template", is_prompt=True, settings=kwargs
        )
    except DataError:
        return None
    found: dict[tuple[str, str], str] = {}
    for last, role, text in zip((_START, *turns), (*turns, _END), (*said, ""), strict=True):
        before, mark, rest = rest.partition(text) if text else (rest, "", "")
        is_once = (mark or not text) and not any(one in before for one in said)
        if not is_once or found.setdefault((last, role), before) != before:
            return None
    return found


def _in_go(between: Mapping[tuple[str, str], str]) -> str:
    """Write what is between turns as a template: the text before each, by the role before it.

    After an answer that is the last turn nothing is written, so that it can be gone on with.
    """
    lines = ['{{- $last := "" }}', "{{- range .Messages }}"]
    for number, role in enumerate(dict.fromkeys(to for _, to in between if to != _END)):
        lines.append(f"{{{{- {'else ' * (number > 0)}if eq .Role {json.dumps(role)} }}}}")
        lines += [*_chosen(between, role), "{{- .Content }}"]
    lines += ["{{- end }}", "{{- $last = .Role }}", "{{- end }}", *_chosen(between, _END)]
    return "\n".join(lines)


def _chosen(between: Mapping[tuple[str, str], str], role: str) -> Iterator[str]:
    """Yield what writes the text before a role, by the role before it."""
    start = "if"
    for (last, to), text in between.items():
        if to == role:
            yield f"{{{{- {start} eq $last {json.dumps(last)} }}}}"
            yield f"{{{{- {json.dumps(text, ensure_ascii=False)} }}}}"
            start = "else if"
    yield "{{- end }}"
