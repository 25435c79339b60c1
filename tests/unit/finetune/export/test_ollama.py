"""What Ollama is given: the model in one file, and the prompts that it was trained after."""

import json
from pathlib import Path

import pytest

from finetune.export.llama_cpp import programs_for
from finetune.export.ollama import export_ollama, go_template
from tests.doubles import tiny_tokenizer
from tests.llama_cpp import llama_cpp

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if no_thoughts %}<think></think>{% endif %}{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ '[' if m.role == 'user' else '' }}{{ m.content }}"
    "{{ ' \"]\"' if m.role == 'user' else '</s>' }}{% endfor %}"
)
IN_GO = """{{- $last := "" }}
{{- range .Messages }}
{{- if eq .Role "user" }}
{{- if eq $last "" }}
{{- "[" }}
{{- else if eq $last "assistant" }}
{{- "</s>[" }}
{{- end }}
{{- .Content }}
{{- else if eq .Role "assistant" }}
{{- if eq $last "user" }}
{{- " \\"]\\"" }}
{{- end }}
{{- .Content }}
{{- end }}
{{- $last = .Role }}
{{- end }}
{{- if eq $last "user" }}
{{- " \\"]\\"" }}
{{- end }}"""


def in_go(template: str, **kwargs: bool) -> str | None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return go_template(tokenizer, kwargs)


def test_what_is_between_turns_becomes_a_template_of_go() -> None:
    assert in_go(NO_SYSTEM) == IN_GO
    with_system = in_go(CHATML)
    assert with_system is not None
    assert '{{- else if eq .Role "system" }}\n{{- if eq $last "" }}\n' in with_system
    assert with_system.endswith('{{- "<|im_end|>\\n<|im_start|>assistant\\n" }}\n{{- end }}')
    without = in_go(CHATML, no_thoughts=True)
    assert without is not None
    assert without.endswith('assistant\\n<think></think>" }}\n{{- end }}')


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index }}{{ m.role }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.role }}{{ m.content | upper | lower | length }}{% endfor %}",
        "{{ messages[-1].content }}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_depends_on_more_than_roles_is_left_to_the_file(template: str) -> None:
    assert in_go(template) is None


def test_a_begin_that_the_server_may_add_again_is_left_to_the_file() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|im_end|>"
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    assert go_template(tokenizer, {}) is None


def merged(folder: Path, template: str | None) -> Path:
    """Write a merged model without weights."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    settings = {"eos_token_id": [end], "default_chat_template_kwargs": {"no_thoughts": False}}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("is_plain", [True, False])
def test_the_modelfile_names_the_file_the_prompt_and_where_answers_end(
    is_plain: bool, tmp_path: Path
) -> None:
    template = CHATML if is_plain else CHATML.replace("messages %}", "messages %}{{ loop.index }}")
    source, out = merged(tmp_path / "mine", template), tmp_path / "out"
    programs = programs_for("f16", llama_cpp(tmp_path / "llama.cpp"))
    exported = export_ollama(source, out, "mine-f16.gguf", programs)
    assert exported.file == out / "mine-f16.gguf"
    assert {path.name for path in out.iterdir()} == {"Modelfile", "mine-f16.gguf"}
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "out", "llama.cpp"}
    first, *lines = (out / "Modelfile").read_text().splitlines()
    assert first == "# Answers were trained after the prompt of `ollama run --think=false`."
    assert lines[0] == "FROM ./mine-f16.gguf"
    assert lines[-1] == 'PARAMETER stop "<|im_end|>"'
    if is_plain:
        assert lines[1].startswith('TEMPLATE """{{- $last := "" }}')
    else:
        assert lines[1:-1] == ["REQUIRES 0.30.0"]
