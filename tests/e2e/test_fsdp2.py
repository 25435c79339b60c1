"""Two gloo processes that each hold a part of the model, against one that streams its layers."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.e2e.runs import adapter, assert_same_training, losses, run

PLAIN = {"experts": False, "dropout": 0.2}
OPEN = {"num_slots": "auto"}
FSDP2 = "train.parallel=fsdp2"


def words_of(recipe: Path, machine_file: Path, run_dir: Path) -> tuple[object, ...]:
    return ("finetune", recipe, "--machine", machine_file, f"output.dir={run_dir}")


def test_two_parts_train_as_one_stream_does(tmp_path, write_recipe, machine_file, forked) -> None:
    # 3 micro-batches: one rank has two of them; dropout; rows are held out, in an odd number
    recipe = write_recipe(adapter=PLAIN, offload=OPEN, output={"eval_every": 3})
    ranks = forked.start_ranks(*words_of(recipe, machine_file, tmp_path / "parts"), FSDP2)
    assert run(*words_of(recipe, machine_file, tmp_path / "stream"), "data.packing=off") == 0
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert_same_training(tmp_path / "parts", tmp_path / "stream")
