"""What a resume takes in RAM on a machine that does not have the run's directory."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.doubles import tiny_tokenizer
from tests.e2e.full_runs import checkpoint, full_recipe
from tests.e2e.restoring import ALONE, GREW

NOISE_BYTES = 4 * 2**20  # buffers of messages, and counters that the kernel sums late


@pytest.fixture
def wide_dir(tmp_path: Path) -> Path:
    """Return a model whose checkpoint is far more than what processes differ by."""
    folder, tokenizer = tmp_path / "wide", tiny_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_process_of_another_machine_restores_a_checkpoint_tensor_by_tensor(
    wide_dir, tmp_path, write_recipe, machine_file, forked
) -> None:
    """Weights and states have their memory before; of the second machine rank 1 fills it."""
    recipe = full_recipe(write_recipe, optimizer="adamw", steps=2)
    often = ("output.eval_every=null", "output.checkpoint_every=1", f"model.path={wide_dir}")
    words = ("finetune", recipe, "--machine", machine_file, *often)
    sizes = (1, 2)
    more = {rank: [f"output.dir={tmp_path / 'none'}"] for rank in (1, 2)}
    ranks = forked.start_machines(*words, sizes=sizes, more=more)
    assert [rank.end() for rank in ranks] == [0] * 3, [rank.shown for rank in ranks]
    before = checkpoint(tmp_path / "run", 2)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-0000002")
    ranks = forked.start_machines(
        *words, "--resume", sizes=sizes, more=more, module="tests.e2e.restoring"
    )
    assert [rank.end() for rank in ranks] == [0] * 3, [rank.shown for rank in ranks]
    after = checkpoint(tmp_path / "run", 2)
    assert all(torch.equal(after[name], before[name]) for name in before)
    whole = sum(value.nbytes for value in before.values())
    largest = max(value.nbytes for value in before.values())
    assert whole > 10 * (largest + NOISE_BYTES)
    grew, alone = (
        [int(rank.shown.partition(words)[2].split()[0]) for rank in ranks]
        for words in (GREW, ALONE)
    )
    assert max(grew[1:]) <= largest + NOISE_BYTES  # the main one maps the file
    assert alone == [0, 0, 0]  # weights, states and low halves, around the layers too
