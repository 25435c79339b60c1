"""Answers from a finished run, without training anything."""

from pathlib import Path

import offload
from finetune import preflight
from finetune.adapters import load_adapter
from finetune.checkpoint import RunDir
from finetune.encode import prompt_ids
from finetune.generation import generate
from finetune.model import load_model, load_tokenizer
from finetune.planning import facts_of, full_request
from finetune.rows import Message
from finetune.sampling import pad_id, stop_ids
from offload.plan.plan import plan
from offload.probe import probe


def answer_prompt(run_dir: Path, prompt: str, *, max_new_tokens: int) -> str:
    """Let the trained model answer, its layers streamed as in training.

    Raises:
        CheckpointError: The directory holds no run.
        ModelError: The run has no adapter yet.
    """
    run = RunDir(run_dir)
    run.require_adapter()
    recipe = run.recipe()
    device = preflight.torch_device_name(recipe.offload)
    facts = facts_of(recipe.model)
    machine = probe(device=device, seconds=1.0, dtype=recipe.model.dtype)
    num_slots = plan(facts, machine, full_request(recipe, facts, num_ranks=1)).num_slots
    tokenizer = load_tokenizer(recipe.model.tokenizer_source)
    loaded = load_model(
        path=recipe.model.path,
        config=recipe.model.config,
        init=recipe.model.init,
        dtype=recipe.model.dtype,
        codec=recipe.offload.layer_codec,
        device=device,
        seed=recipe.train.seed,
        tier=recipe.offload.load_tier,
        experts_implementation="eager",  # an answer is asked for anywhere, and a token has few rows
    )
    model = load_adapter(loaded.model, run.adapter)
    model.eval()
    engine = offload.attach(
        model,
        num_slots=num_slots,
        codec=recipe.offload.layer_codec,
        tier=recipe.offload.load_tier,
        device=device,
        hold=loaded.hold,
    )
    try:
        messages = [Message(role="user", content=prompt)]
        if recipe.data.system:
            messages.insert(0, Message(role="system", content=recipe.data.system))
        ids = generate(
            engine,
            [prompt_ids(messages, tokenizer, source="--prompt")],
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids(tokenizer),
            pad_id=pad_id(tokenizer),
            batch_size=1,
        )
    finally:
        engine.close()
    return str(tokenizer.decode(ids[0], skip_special_tokens=True))
