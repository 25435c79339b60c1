"""The committed quickstart: rows made from the seed, an honest split, a small usable model."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

ROOT = Path(__file__).parents[3]
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


def test_everything_committed_stays_below_9_megabytes() -> None:
    sizes_bytes = [path.stat().st_size for path in QUICKSTART_DIR.rglob("*") if path.is_file()]
    assert sum(sizes_bytes) <= 9_000_000


def test_the_script_reproduces_the_committed_rows_byte_for_byte(script: ModuleType) -> None:
    train, heldout = script.make_rows(seed=script.SEED, num_train=2000, num_heldout=200)
    assert (QUICKSTART_DIR / "train.jsonl").read_bytes() == train.encode()
    assert (QUICKSTART_DIR / "heldout.jsonl").read_bytes() == heldout.encode()
    for name, rows, num in (("preferences", train, 600), ("preferences_heldout", heldout, 120)):
        pairs = script.make_preferences(rows, num=num)
        assert (QUICKSTART_DIR / f"{name}.jsonl").read_bytes() == pairs.encode()


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
