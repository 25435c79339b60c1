import pytest

from finetune.recipe.load import RENAMED, REPLACED, UNSUPPORTED, load_recipe
from finetune.recipe.recipe import near_path, sections, settings

PATHS = {f"{section}.{name}" for section in sections() for name in settings(section)}
NAMES = {path.rpartition(".")[2] for path in PATHS} | set(sections())


def test_each_word_has_one_answer_and_is_no_setting_of_ours() -> None:
    tables = (RENAMED, REPLACED, UNSUPPORTED)
    words = [word for table in tables for word in table]
    assert len(words) == len(set(words))
    assert NAMES.isdisjoint(words)
    assert all(word == word.lower() and "-" not in word for word in words)


@pytest.mark.parametrize("word", RENAMED)
def test_a_renamed_word_names_a_setting_that_exists(word: str) -> None:
    assert RENAMED[word] in PATHS | set(sections())


@pytest.mark.parametrize("word", REPLACED)
def test_a_replaced_word_names_a_setting_that_exists_and_a_value_that_it_takes(
    word: str, tmp_path
) -> None:
    path, value = REPLACED[word]
    assert path in PATHS
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {path: Qwen/Qwen3-0.6B}\n"
        "data: {path: rows, eval_frac: 0.1}\n"
        "train: {seq_len: 1024, grad_accum_steps: 8, steps: 500}\n"
        "output: {name: small, eval_every: 50}\n"
    )
    more = ["train.schedule=cosine_with_restarts"] if path == "train.num_cycles" else []
    more += ["train.tokens_per_step=8192"] if path == "train.micro_batch_size" else []
    more += ["objective.method=dpo"] if path == "objective.reference" else []
    assert load_recipe(str(recipe), [f"{path}={value}", *more], check_files=False)


def test_settings_that_a_reason_names_exist() -> None:
    for word, why in UNSUPPORTED.items():
        named = [part.strip("`(),.;:") for part in why.split() if part.count(".") == 1]
        for name in named:
            if name.partition(".")[0] in sections():
                assert name in PATHS, word


def test_names_are_near_by_letters_and_not_by_length() -> None:
    assert near_path("train", "stepz") == "train.steps"
    assert near_path("train", "Micro-Batch-Size") == "train.micro_batch_size"
    assert near_path("adapter", "rnak") == "adapter.rank"
    assert near_path("", "ofload") == "offload"
    assert near_path("adapter", "warmup_step") == "train.warmup_steps"
    assert near_path("train", "spets_long") is None
    assert near_path("train", "epsilon") is None
