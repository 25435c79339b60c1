"""What is shipped in recipes/: recipes, data, and the gallery."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from finetune.errors import ConfigError
from finetune.recipe.load import load_recipe, load_shape, shipped_facts, shipped_shapes
from finetune.recipe.recipe import recipes_dir, shipped_recipes
from offload.plan.facts.facts import ModelFacts
from tests.tiers import mostly_slow
from tests.tools.gallery import MODELS, PAGE, RAM_GIB, SHIPPED, VRAM_GIB, cell, recipe

# Published numbers of parameters, in billions, without towers of images; of our own, the exact one.
PUBLISHED = {
    "gemma-3-1b": 1.0,
    "gemma-3-27b-text": 27.0,
    "gemma-3-4b-text": 3.88,
    "gemma-4-26b-a4b": 25.2,
    "gemma-4-31b": 30.7,
    "gemma-4-e2b": 4.63,  # 5.1 with towers
    "gemma-4-e4b": 7.46,  # 8.0 with towers
    "glm-4.7-flash": 29.9,
    "gpt-oss-120b": 116.8,
    "gpt-oss-20b": 20.9,
    "qwen3-30b-a3b-nvfp4": 30.5,
    "lfm2-8b-a1b": 8.3,
    "llama-3.1-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.236,
    "ministral-3-14b": 13.5,
    "ministral-3-8b": 8.49,
    "mistral-7b-v0.3": 7.25,
    "mistral-small-4": 119.0,
    "mixtral-8x7b": 46.7,
    "nemotron-3-nano-30b-a3b": 31.6,
    "olmoe-1b-7b": 6.92,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-14b": 14.8,
    "qwen3-235b-a22b": 235.1,
    "qwen3-30b-a3b": 30.5,
    "qwen3-32b": 32.8,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-vl-30b-a3b": 30.5,  # 31.1 with its tower
    "qwen3-vl-8b": 8.19,  # 8.77 with its tower
    "qwen3.5-9b": 9.0,
    "qwen3.6-27b": 26.9,
    "qwen3.6-35b-a3b": 34.7,
    "tiny-qwen3": 0.020235648,
    "tiny-qwen3-moe": 0.000095584,
}


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_validates_by_name_and_by_path(name: str) -> None:
    by_name = load_recipe(name, [], check_files=False)
    assert load_recipe(str(shipped_recipes()[name]), [], check_files=False) == by_name


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_tells_a_reader_how_to_run_it(name: str) -> None:
    text = shipped_recipes()[name].read_text(encoding="ascii")
    assert text.startswith("# ")
    assert name in text.split("\nmodel:")[0]


def test_the_quickstart_streams_and_trains_attention_and_experts() -> None:
    recipe = load_recipe("quickstart", [], check_files=False)
    assert recipe.model.dtype == "float32"
    assert recipe.adapter.as_lora.targets == "attention"
    assert recipe.adapter.as_lora.experts
    assert recipe.offload.num_slots == 3
    assert recipe.train.num_micro_batches > 1
    assert recipe.report.samples > 0


def test_the_quickstart_finds_its_model_and_rows_beside_it_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("quickstart", [])
    assert Path(str(recipe.model.path)) == recipes_dir() / "quickstart" / "model"
    assert Path(recipe.data.path or "") == recipes_dir() / "quickstart" / "train.jsonl"


def test_the_30b_recipe_fills_a_step_of_48k_tokens_with_sequences_of_8k() -> None:
    recipe = load_recipe("qwen30b_lora_5090", [])
    assert recipe.model.path == "Qwen/Qwen3-30B-A3B"
    assert recipe.offload.codec == "auto"
    assert (recipe.train.seq_len, recipe.train.micro_batch_size) == (8192, 1)
    assert recipe.train.tokens_per_step == 49_152


def test_the_4060ti_recipe_keeps_weights_in_nf4() -> None:
    assert load_recipe("qwen30b_qlora_4060ti", []).offload.codec == "nf4"


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("qwen30b_dpo_5090", "dpo"),
        ("qwen30b_kto_5090", "kto"),
        ("qwen3_8b_dpo_4090", "dpo"),
        ("qwen3_8b_kto_4090", "kto"),
    ],
)
def test_recipes_of_preferences_compare_with_the_base_that_they_stream(
    name: str, method: str
) -> None:
    recipe = load_recipe(name, [])
    assert recipe.objective.method == method
    assert recipe.objective.computes_reference
    assert not recipe.train.is_full


def test_the_gsm8k_recipe_takes_files_at_hand_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    Path("tokenizer").mkdir()
    recipe = load_recipe(
        "gsm8k_lora",
        ["data.path=train.jsonl", "model.tokenizer=tokenizer", "train.steps=12"],
    )
    assert recipe.data.path == str(tmp_path / "train.jsonl")
    assert recipe.model.tokenizer == str(tmp_path / "tokenizer")
    assert (recipe.model.config, recipe.model.init) == ("tiny-qwen3", "random")
    assert recipe.train.steps == 12


def test_every_published_shape_is_here() -> None:
    assert set(shipped_shapes()) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_shape_is_of_the_published_size(name: str) -> None:
    facts = ModelFacts.from_json(shipped_facts()[name])  # which are those of the built model
    assert facts.num_parameters == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01)


def test_the_tiny_shape_has_the_vocabulary_of_qwen3() -> None:
    assert load_shape("tiny-qwen3")["vocab_size"] == load_shape("qwen3-0.6b")["vocab_size"]


def test_a_shape_is_read_from_a_config_json_or_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        '{"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 9}'
    )
    assert load_shape(str(file)) == load_shape(str(tmp_path))
    assert load_shape(str(file))["vocab_size"] == 9


def test_an_unknown_shape_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        load_shape("Qwen3-30b-a3")
    assert caught.value.what == "Qwen3-30b-a3 is not a model shape"
    assert caught.value.hint.startswith("`model.config: qwen3-30b-a3b`; shipped are qwen3-30b-a3b")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "cannot be read: it is not JSON: Expecting property name"),
        ("[1]", "cannot be read: it holds [1], and should be an object"),
        ('{"hidden_size": 8, "vocab_size": 9}', "cannot be read: model_type is missing"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_shape(str(file))
    assert caught.value.what.startswith(f"{file} {what}")


# ---------------------------------------------------------------------------------- quickstart data


ROOT = Path(__file__).parents[2]
QUICKSTART_DIR = ROOT / "recipes" / "quickstart"
MODEL_DIR = QUICKSTART_DIR / "model"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "tests" / "bench" / "pretrain_quickstart.py"
    spec = importlib.util.spec_from_file_location("pretrain_quickstart", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pretrain_quickstart"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def read_rows(name: str) -> list[list[dict[str, str]]]:
    lines = (QUICKSTART_DIR / name).read_text(encoding="ascii").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def operand_of(messages: list[dict[str, str]]) -> str:
    question = messages[0]["content"]
    quoted = re.findall(r"'([a-z]+)'", question)
    return quoted[0] if quoted else " ".join(re.findall(r"\d+", question))


def test_everything_committed_stays_below_12_megabytes() -> None:
    sizes_bytes = [path.stat().st_size for path in QUICKSTART_DIR.rglob("*") if path.is_file()]
    assert sum(sizes_bytes) <= 12_000_000


def test_the_script_reproduces_the_committed_rows_byte_for_byte(script: ModuleType) -> None:
    train, heldout = script.make_rows(seed=script.SEED, num_train=2000, num_heldout=200)
    assert (QUICKSTART_DIR / "train.jsonl").read_bytes() == train.encode()
    assert (QUICKSTART_DIR / "heldout.jsonl").read_bytes() == heldout.encode()
    for name, rows, num in (("preferences", train, 600), ("preferences_heldout", heldout, 120)):
        pairs = script.make_preferences(rows, num=num)
        assert (QUICKSTART_DIR / f"{name}.jsonl").read_bytes() == pairs.encode()
    for name, rows in (("prompts", train), ("prompts_heldout", heldout)):
        prompts = script.make_prompts(rows)
        assert (QUICKSTART_DIR / f"{name}.jsonl").read_bytes() == prompts.encode()


def test_another_seed_gives_other_rows(script: ModuleType) -> None:
    first = script.make_rows(seed=script.SEED, num_train=8, num_heldout=8)
    assert first != script.make_rows(seed=script.SEED + 1, num_train=8, num_heldout=8)


def test_no_heldout_operand_occurs_in_the_training_rows() -> None:
    train = {operand_of(row) for row in read_rows("train.jsonl")}
    heldout = {operand_of(row) for row in read_rows("heldout.jsonl")}
    assert (len(train), len(heldout)) == (2000, 200)
    assert train.isdisjoint(heldout)


def test_a_quarter_of_the_heldout_rows_has_a_phrasing_unseen_in_training() -> None:
    def phrasing(row: list[dict[str, str]]) -> str:
        return re.sub(r"'[a-z]+'|\d+", "{}", row[0]["content"])

    seen = {phrasing(row) for row in read_rows("train.jsonl")}
    unseen = [row for row in read_rows("heldout.jsonl") if phrasing(row) not in seen]
    assert 0.2 <= len(unseen) / 200 <= 0.3


def test_every_answer_is_one_of_the_skills_applied_to_its_operand(script: ModuleType) -> None:
    for row in read_rows("train.jsonl") + read_rows("heldout.jsonl"):
        operand = operand_of(row)
        is_sum = operand[0].isdigit()
        names = ["sum"] if is_sum else [name for name in script.SKILLS if name != "sum"]
        assert row[1]["content"] in {script.SKILLS[name].solve(operand) for name in names}


def test_the_committed_tokenizer_is_the_one_that_the_script_builds(
    script: ModuleType, tokenizer: PreTrainedTokenizerBase
) -> None:
    built = script.build_tokenizer(max_seq_len=256)
    assert built.get_vocab() == tokenizer.get_vocab()
    assert built.chat_template == tokenizer.chat_template
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


@pytest.mark.parametrize(
    "text", ["rev 'tolmak' = kamlot", "  two  spaces\n\ttab ", "user assistants", "n\u00e9\u4e16"]
)
def test_the_tokenizer_gives_every_text_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_generation_prompt_is_a_prefix_of_the_full_rendering(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    for row in read_rows("heldout.jsonl"):
        prompt = tokenizer.apply_chat_template(row[:1], tokenize=False, add_generation_prompt=True)
        full = tokenizer.apply_chat_template(row, tokenize=False)
        assert full == f"{prompt}{row[1]['content']}<|im_end|>\n"
        prompt_ids, full_ids = tokenizer.encode(prompt), tokenizer.encode(full)
        assert full_ids[: len(prompt_ids)] == prompt_ids
        assert len(full_ids) <= 64


def test_the_model_is_a_qwen3_moe_of_a_few_million_parameters(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    config = AutoConfig.from_pretrained(MODEL_DIR)
    with safe_open(MODEL_DIR / "model.safetensors", framework="pt") as weights:
        names = list(weights.keys())
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
        num_parameters = sum(weights.get_tensor(name).numel() for name in names)
    assert config.model_type == "qwen3_moe"
    assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (6, 8, 2)
    assert config.output_router_logits is False
    assert config.vocab_size >= len(tokenizer)
    assert config.eos_token_id == tokenizer.eos_token_id
    assert config.pad_token_id == tokenizer.pad_token_id
    assert 3_000_000 <= num_parameters <= 5_000_000


# ------------------------------------------------------------------------------------------ gallery


def written() -> dict[tuple[str, int, int], str]:
    """Return the cells of the page, by model, VRAM and RAM."""
    found = {}
    for table in re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        ram = int(table.split(" GiB")[0])
        rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line[:1] == "|"]
        head, _, *models = rows
        for model, *cells in models:
            for column, text in zip(head[1:], cells, strict=True):
                found[model, int(column.split()[0]), ram] = text
    return found


PLACES = [(model, vram, ram) for ram in RAM_GIB for model in MODELS for vram in VRAM_GIB]
DRAWN = PLACES[::17]


def test_every_model_has_a_cell_for_each_card_and_ram() -> None:
    assert list(written()) == PLACES
    assert all(
        re.fullmatch(r"-|[\d,]+( (int8|fp8|nf4|disk))?(, disk)?", x) for x in written().values()
    )


@pytest.mark.parametrize("place", mostly_slow([(place,) for place in DRAWN], (DRAWN[1],)))
def test_a_cell_is_what_the_planner_says(place: tuple[str, int, int]) -> None:
    assert written()[place] == cell(*place), "`make generate` writes it"


@pytest.mark.parametrize("name", mostly_slow(list(SHIPPED), "qwen3_4b_8gb"))
def test_a_suggestion_that_is_shipped_is_current(name: str) -> None:
    assert shipped_recipes()[name].read_text() == recipe(name), "`make generate` writes it"
