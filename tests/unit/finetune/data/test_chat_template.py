import resource
import signal

import pytest

from finetune.data.chat_template import Limits, render
from finetune.data.rows import Conversation
from finetune.data.tokenize import encode
from finetune.data.turns import Message
from finetune.errors import DataError
from tests.doubles import tiny_tokenizer

ASKED = Message(role="user", content="Why?")
GROWS = (
    "{% set ns = namespace(x='0123456789') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}"
)
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def rendered(template: str, limits: Limits) -> str:
    tokenizer = tiny_tokenizer(chat_template=template)
    return render([ASKED], tokenizer, source="rows.jsonl:7", limits=limits)


@pytest.mark.parametrize(
    ("template", "limits", "problem"),
    [
        (LOOPS, Limits(cpu_s=0.1), r"computes for more than 0\.1 s for one row"),
        (GROWS, Limits(memory_bytes=2**26), r"takes more than 67108864 bytes for one row"),
        ("{{ 'ab' * 10**12 }}", Limits(memory_bytes=2**26), r"takes more than 67108864 .*"),
        ("{{ 'ab' * 60 }}", Limits(num_chars=100), r"writes 120 characters for one row"),
    ],
)
def test_a_template_without_end_is_stopped_and_names_its_row(
    template: str, limits: Limits, problem: str
) -> None:
    def state() -> object:
        timer = signal.getitimer(signal.ITIMER_VIRTUAL)
        return resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGVTALRM), timer

    before = state()
    with pytest.raises(DataError, match=rf"the chat template {problem} \(rows\.jsonl:7\)"):
        rendered(template, limits)
    assert state() == before


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages[0].name.first }}", "no attribute 'name'"),
        ("{{ messages[0]['content'] + 1 }}", "can only concatenate"),
        ("{{ 'abc'.encode('no such') }}", "unknown encoding"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ range(10**9) }}", "Range too big"),
        ("{% for m in messages %}", "Unexpected end of template"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ raise_exception('Only one\nturn') }}", "Only one"),
    ],
)
def test_whatever_a_template_raises_is_an_error_with_its_row(template: str, reason: str) -> None:
    row = Conversation(
        messages=(ASKED, Message(role="assistant", content="So.")), source="rows.jsonl:7"
    )
    with pytest.raises(DataError, match=rf"cannot render the row: .*({reason}).* \(rows\.jsonl:7"):
        encode(row, tiny_tokenizer(chat_template=template), seq_len=99, loss_on="assistant")
