"""What is recognised of each exact type is what the committed table says."""

import functools
from typing import Any

import pytest
import transformers
from packaging import version
from transformers import CONFIG_MAPPING
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from tests.parity.architectures import exact_types
from tests.parity.recognised import read_rows, recognised_of
from tests.tiers import mostly_slow

ROWS = read_rows()
SINCE_5_24 = {"codegen", "gptj"}  # whose rows older versions do not compute together
KNOWN = [name for name in ROWS if name.partition(",")[0] in CONFIG_MAPPING]


def test_each_exact_type_has_a_row() -> None:
    assert sorted(KNOWN) == sorted(exact_types())


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("model_type", mostly_slow(KNOWN, "gpt_oss", "nemotron_h", "qwen3"))
def test_nothing_that_was_recognised_of_a_type_is_lost(model_type: str) -> None:
    found = recognised_of(model_type)
    if model_type in SINCE_5_24 and version.parse(transformers.__version__) < version.parse("5.24"):
        found = {**found, **dict.fromkeys(("outputs", "together"), 4)}
    assert found == ROWS[model_type]


@pytest.mark.usefixtures("one_thread")
def test_a_wrapper_of_a_forward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    own: Any = Qwen3Attention.forward
    wrapper = functools.wraps(own)(lambda *args, **kwargs: own(*args, **kwargs))
    monkeypatch.setattr(Qwen3Attention, "forward", wrapper)
    lost = dict(ROWS["qwen3"].items() - recognised_of("qwen3").items())
    assert lost == {"HeadNorms": 8, "Rotary": 4}
