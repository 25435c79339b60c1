"""Tokenizers, and tokens that are drawn from logits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from finetune.errors import ConfigError, ModelError
from finetune.model.tokenizer import Sampling, chosen_by, load_tokenizer, most_probable
from finetune.recipe.sections import ModelSection
from finetune.training.generate import generate
from tests.chat_templates import CHATML, PARTS
from tests.doubles import tiny_tokenizer
from tests.parity.steps import tiny


def test_a_tokenizer_is_asked_for_where_none_is_known() -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer: null"):
        load_tokenizer(ModelSection())


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer in"):
        load_tokenizer(ModelSection(path=str(tmp_path)))


@pytest.mark.parametrize("own", [None, CHATML])
def test_the_template_of_a_processor_is_taken_where_the_tokenizer_has_none(
    own: str | None, tmp_path: Path
) -> None:
    tiny_tokenizer(chat_template=own).save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PARTS}))
    assert load_tokenizer(ModelSection(path=str(tmp_path))).chat_template == (own or PARTS)


# ----------------------------------------------------------------------------------------- sampling


PROMPT = [5, 9, 11]


def test_a_row_draws_what_transformers_draws_for_it() -> None:
    model: Any = tiny("qwen3").eval()
    ids = torch.tensor([PROMPT])
    torch.manual_seed(7)
    plain = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.5,
        top_k=20,
        top_p=0.9,
        max_new_tokens=8,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()
    engine = offload.attach(model, num_slots=2, device="cpu")
    try:
        found = [
            generate(
                engine,
                [PROMPT, *others],
                max_new_tokens=8,
                stop_ids=(),
                pad_id=0,
                batch_size=8,
                note=pytest.fail,
                choose=chosen_by(temperature=1.5, top_k=20, top_p=0.9, seed=7),
            )[0]
            for others in ([], [[4, 4]])
        ]
    finally:
        engine.close()
    assert found == [plain, plain]


def test_at_temperature_0_the_most_probable_token_is_taken() -> None:
    choose = chosen_by(temperature=0, top_k=None, top_p=None, seed=None)
    assert choose is most_probable
    assert choose([0, 1], torch.tensor([[0.1, 0.9], [3.0, 2.0]])) == [1, 0]


def test_rows_have_random_numbers_of_their_own() -> None:
    logits = torch.zeros(1, 50)
    sampling = Sampling(temperature=1.0, top_k=None, top_p=None, seed=3)
    alone, together = sampling.sampler(), sampling.sampler()
    drawn = [alone([4], logits)[0] for _ in range(5)]
    assert drawn == [together([0, 4], logits.expand(2, 50))[1] for _ in range(5)]


@pytest.mark.parametrize(("name", "value"), [("top_k", 5), ("top_p", 0.5), ("seed", 1)])
def test_a_setting_of_draws_where_nothing_is_drawn_is_refused(name: str, value: float) -> None:
    given: dict[str, Any] = {"top_k": None, "top_p": None, "seed": None, name: value}
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=rf"{option} {value} at --temperature 0.*\n\nhint: "):
        chosen_by(temperature=0, **given)
