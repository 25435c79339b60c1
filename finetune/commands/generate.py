"""Answers from a finished run, without training anything."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import offload
from finetune.adapter.linear_lora import compute_in_base_dtype
from finetune.adapter.lora import base_eos, load_adapter
from finetune.data.rows import Conversation, Message
from finetune.data.stops import (
    GENERATION_CONFIG,
    Stops,
    cut_at,
    eos_ids,
    read_generation_config,
)
from finetune.data.tokenize import encode, prompt_ids
from finetune.model.load import load_model
from finetune.model.sampling import Choose
from finetune.model.tokenizer import load_tokenizer
from finetune.planning.request import facts_of, full_request
from finetune.recipe.recipe import Recipe
from finetune.run.run_dir import RunDir
from finetune.training import preflight
from finetune.training.generate import generate
from finetune.training.samples import pad_id
from offload.plan.memory.cache import require_room
from offload.plan.plan import plan
from offload.probe.machine import probe

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def answer_prompt(
    run_dir: Path,
    prompt: str,
    *,
    max_new_tokens: int,
    choose: Choose,
    stop_strings: Sequence[str],
    note: Callable[[str], None],
) -> str:
    """Let the trained model answer, its layers streamed as in training.

    Args:
        run_dir: Of a finished run.
        prompt: The user's message.
        max_new_tokens: Longest answer.
        choose: Chooses the next tokens.
        stop_strings: Texts that end the answer; they are not part of it.
        note: Reports what the user should know about the adapter, or the model's cache.

    Raises:
        CheckpointError: The directory holds no run.
        ModelError: The run has no adapter yet.
        DoesNotFitError: The key-value cache does not fit into device memory.
    """
    run = RunDir(run_dir)
    recipe = run.recipe() if run.recipe_file.exists() else None
    if recipe is not None and recipe.train.is_full:
        recipe = _of_trained(run, recipe)
    else:
        for word in run.require_adapter():
            note(word)
        recipe = run.recipe()
    device = preflight.torch_device_name(recipe.offload)
    facts = facts_of(recipe.model)
    machine = probe(device=device, seconds=1.0, dtype=recipe.model.dtype)
    planned = plan(facts, machine, full_request(recipe, facts, num_ranks=1))
    tokenizer = load_tokenizer(recipe.model.tokenizer_source)
    messages = [Message(role="user", content=prompt)]
    if recipe.data.system:
        messages.insert(0, Message(role="system", content=recipe.data.system))
    asked = prompt_ids(messages, tokenizer, source="--prompt")
    require_room(
        facts,
        planned.device_memory,
        limit_bytes=min(
            machine.vram_bytes, planned.request.vram_budget_bytes or machine.vram_bytes
        ),
        num_rows=1,
        prompt_tokens=len(asked),
        new_tokens=max_new_tokens,
        dtype_bytes=planned.request.typical.dtype_bytes,
    )
    loaded = load_model(
        recipe.model,
        codec=recipe.offload.layer_codec,
        device=device,
        seed=recipe.train.seed,
        tier=recipe.offload.load_tier,
        experts_implementation="eager",  # it works on any device, and a token has few rows
    )
    model: PeftModel | PreTrainedModel = loaded.model
    trained = run.model if recipe.train.is_full else run.adapter
    if not recipe.train.is_full:
        adapted = model = load_adapter(loaded.model, run.adapter)
        if recipe.adapter.compute_dtype == "auto":
            compute_in_base_dtype(adapted)
    model.requires_grad_(requires_grad=False).eval()
    engine = offload.attach(
        model,
        num_slots=planned.num_slots,
        codec=recipe.offload.layer_codec,
        tier=recipe.offload.load_tier,
        device=device,
        backing=loaded.backing,
    )
    try:

        def text(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=True))

        def is_ended(_row: int, ids: Sequence[int]) -> bool:
            return any(string in text(ids) for string in stop_strings)

        ids = generate(
            engine,
            [asked],
            max_new_tokens=max_new_tokens,
            stop_ids=frozenset(_stops(trained, model, tokenizer).ids),
            pad_id=pad_id(tokenizer),
            batch_size=1,
            note=note,
            choose=choose,
            is_ended=is_ended,
        )
    finally:
        engine.close()
    return cut_at(text(ids[0]), stop_strings)


def _of_trained(run: RunDir, recipe: Recipe) -> Recipe:
    """Return the recipe with the model that its run has trained in place of the published one.

    Raises:
        CheckpointError: It is not there yet, or damaged.
    """
    run.require_model()
    update = {"path": str(run.model), "config": None, "init": "pretrained", "tokenizer": None}
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=update)})


def _stops(
    trained: Path, model: "PeftModel | PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"
) -> Stops:
    """Return where generation stops, as the run has recorded it.

    Older runs recorded nothing: their answers end as the template ends any answer.
    """
    fields = read_generation_config(trained)
    if fields is not None:
        return Stops(trained=eos_ids(fields, source=trained / GENERATION_CONFIG), base=())
    turns = Message(role="user", content="?"), Message(role="assistant", content="!")
    example = encode(
        Conversation(messages=turns, source="the template's own"),
        tokenizer,
        seq_len=sys.maxsize,
        loss_on="assistant",
    )
    return Stops(trained=example.end_ids, base=base_eos(model))
