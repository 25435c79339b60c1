"""Every causal language model type is exact or refused, as the committed table says."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from offload.engine.model.layers import LayeredModel
from tests.parity.architectures import (
    ROUNDED,
    ROW_LENS,
    TOGETHER,
    Verdict,
    causal_types,
    is_rounding,
    read_table,
    rows_alone_and_packed,
    verdict_of,
    write_table,
)
from tests.parity.tiny_models import tiny_model, with_adapters
from tests.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")
TABLE = read_table(Path(__file__).parents[2] / "docs" / "architectures.md")
NUM_EXACT, NUM_TOGETHER = 158, 111  # ratchets
SAMPLE = (
    "bamba",  # mamba and attention
    "bart",  # a loss that is not shifted
    "bloom",  # layers that return tuples, attention biases
    "deepseek_v3",  # latent attention, dense and experts
    "gemma3n_text",  # four hidden states at once
    "gemma4_text",  # an input of its own for each layer, a container that layers could share
    "gpt2",
    "gpt_oss",
    "hy_v4",  # layers that hand on more than a hidden state
    "inkling2_text",  # a tail that reads hidden states of earlier layers
    "llama",
    "mamba2",  # no attention
    "qwen3_moe",
    "qwen3_next",  # linear and full attention, experts
    "rwkv",  # layers that return a state
    "zamba2",  # parameters that layers share
)


def check(model_type: str) -> None:
    committed = TABLE.verdicts.get(model_type)
    found = verdict_of(model_type)
    if committed is not None and transformers.__version__ == TABLE.transformers:
        # An error near the limit may fall on either side of it, depending on the processor.
        assert _limit_aside(found) == _limit_aside(committed)


def _limit_aside(verdict: Verdict) -> Verdict:
    return replace(verdict, packs=verdict.packs.removesuffix(ROUNDED))


@pytest.mark.parametrize(
    "model_type",
    mostly_slow(
        [name for name in SAMPLE if name in causal_types()],
        *("bloom", "gemma3n_text"),
    ),
)
def test_reorder_a_sample_of_types_is_exact_or_refused_as_committed(model_type: str) -> None:
    check(model_type)


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", causal_types())
def test_reorder_each_type_is_exact_or_refused_as_committed(model_type: str) -> None:
    check(model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["glm4", "gemma4_unified_text", "deepseek_v4"])
def test_packed_rows_are_apart_by_rounding_and_not_if_a_row_sees_another(model_type: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = tiny_model(model_type)
        model = with_adapters(base, LayeredModel(base).layers)
        alone, packed = rows_alone_and_packed()
        assert is_rounding(model, alone, packed)
        first, second, third = ROW_LENS[0]
        packed[0]["row_lens"] = torch.tensor([first, second + third])
        packed[0]["labels"][0, first + second] = -100  # as many labels, but another context
        assert not is_rounding(model, alone, packed)


def test_the_table_lists_every_type_of_its_version() -> None:
    if transformers.__version__ == TABLE.transformers:
        assert TABLE.verdicts.keys() == set(causal_types())
    assert all(bool(verdict.reason) != verdict.is_exact for verdict in TABLE.verdicts.values())


def test_the_table_never_has_fewer_exact_types() -> None:
    assert sum(verdict.is_exact for verdict in TABLE.verdicts.values()) >= NUM_EXACT


def test_every_exact_type_packs_and_never_fewer_compute_their_rows_together() -> None:
    assert all(bool(verdict.packs) == verdict.is_exact for verdict in TABLE.verdicts.values())
    together = [v for v in TABLE.verdicts.values() if v.packs.startswith(TOGETHER)]
    assert len(together) >= NUM_TOGETHER


def test_a_table_that_was_written_can_be_read(tmp_path: Path) -> None:
    verdicts = [
        Verdict(model_type="a-b", is_exact=True, packs="row by row"),
        Verdict(model_type="c_d", is_exact=False, reason="x | y; z"),
    ]
    path = tmp_path / "table.md"
    path.write_text(write_table(verdicts))
    table = read_table(path)
    assert list(table.verdicts.values()) == verdicts
    assert table.transformers == transformers.__version__
    assert "Of 2 causal language model types 1 are exact and 1 are refused." in path.read_text()
