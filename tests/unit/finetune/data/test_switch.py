"""The variable of a template that turns reasoning off, and what is said of rows trained with it."""

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.data.chat_template import Switch, server_flags, switch_of
from finetune.data.dataset import Rows, load_rows
from finetune.recipe.sections import DataSection
from tests.chat_templates import CHATML, GPT_OSS, OFF_BY_DEFAULT, QWEN3, R1, SPECIAL
from tests.doubles import tiny_tokenizer

ASKED = {"role": "user", "content": "Q"}
PLAIN = [ASKED, {"role": "assistant", "content": "A"}]
THOUGHT = [ASKED, {"role": "assistant", "content": "A", "reasoning_content": "hm"}]
RENAMED = QWEN3.replace("enable_thinking", "reasons")
NOT_A_SWITCH = CHATML.replace(
    "<|im_start|>assistant\n' }}", "<|im_start|>assistant' + (mood | default('') | string) }}"
)


@pytest.mark.parametrize(
    ("template", "switch"),
    [
        (CHATML, None),
        (GPT_OSS, None),  # its variable changes the system turn alone
        (R1, None),
        (NOT_A_SWITCH, None),  # its variable is a text
        (QWEN3, Switch(name="enable_thinking", default=True)),
        (RENAMED, Switch(name="reasons", default=True)),
        (OFF_BY_DEFAULT, Switch(name="thinking", default=False)),
    ],
)
def test_a_switch_is_found_by_rendering(template: str, switch: Switch | None) -> None:
    assert switch_of(tiny_tokenizer(chat_template=template)) == switch


def loaded(tmp_path: Path, template: str, chats: list[Any], **settings: Any) -> Rows:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in chats))
    tokenizer = tiny_tokenizer(chat_template=template)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    data = DataSection(path=str(file), **settings)
    return load_rows(data, tokenizer, seq_len=500, seed=0, cache_dir=tmp_path / "cache")


OFF = "2 of 3 rows are trained after the prompt with reasons=False, and servers send it without"
ON = "1 of 3 rows are trained after the prompt with thinking=True, and servers send it without"
EMPTY = "2 of 3 rows are without reasoning, and the prompt lets the model think: they learn"


@pytest.mark.parametrize(
    ("template", "settings", "kwargs", "said"),
    [
        (CHATML, {}, {}, None),
        (RENAMED, {}, {"reasons": False}, OFF),
        (RENAMED, {"empty_think": "learn"}, {}, EMPTY),
        (RENAMED, {"loss_on": "all"}, {}, None),
        (OFF_BY_DEFAULT, {}, {"thinking": True}, ON),
        (R1, {}, {}, EMPTY),
    ],
)
def test_rows_that_follow_another_prompt_than_servers_send_are_counted_also_from_the_cache(
    tmp_path: Path,
    template: str,
    settings: dict[str, Any],
    kwargs: dict[str, bool],
    said: str | None,
) -> None:
    chats = [PLAIN, PLAIN] if template == CHATML else [PLAIN, THOUGHT, PLAIN]
    for _ in range(2):
        prompted = loaded(tmp_path, template, chats, **settings).prompted
        assert prompted.template_kwargs == kwargs
        assert len(prompted.notes) == (said is not None)
        assert (said or "") in "".join(prompted.notes)
        assert bool(prompted.section()) == (said is not None)


def test_the_card_has_the_flag_of_each_server(tmp_path: Path) -> None:
    section = loaded(tmp_path, QWEN3, [PLAIN]).prompted.section()
    for flag in (
        """`vllm serve MODEL --default-chat-template-kwargs '{"enable_thinking": false}'`""",
        "`llama-server -m MODEL.gguf --jinja --chat-template-kwargs"
        """ '{"enable_thinking": false}'`""",
        "`ollama run NAME --think=false`",
        "`apply_chat_template(..., add_generation_prompt=True, enable_thinking=False)`",
    ):
        assert flag in section
    assert server_flags({}) == ()
