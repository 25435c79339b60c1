"""A finished run's model, attached to answer: its layers are streamed as in training."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import offload
from finetune.adapter.linear_lora import compute_in_base_dtype
from finetune.adapter.lora import add_lora, base_eos, load_adapter, set_trained
from finetune.adapter.virtual_tokens import PrefixArguments, load_prefix
from finetune.data.chat_template import (
    GENERATION_CONFIG,
    Stops,
    cut_at,
    eos_ids,
    read_generation_config,
)
from finetune.data.pictures.picture import Picture
from finetune.data.rows import Conversation
from finetune.data.tokenize import encode, prompt_ids, require_known_ids
from finetune.data.turns import Message
from finetune.errors import ConfigError, DataError, ModelError, RowError
from finetune.files.atomic import expanded
from finetune.model.load import load_model
from finetune.model.tokenizer import Choose, load_tokenizer
from finetune.planning.request import facts_of, full_request
from finetune.recipe.recipe import Recipe, with_settings
from finetune.run.adapter_folder import refuse_classifier
from finetune.run.run_dir import RunDir
from finetune.training import preflight
from finetune.training.generate import generate
from finetune.training.samples import pad_id
from offload.engine.model.recorders import front_arguments
from offload.plan.memory.memory import require_room
from offload.plan.plan import plan
from offload.probe.machine import probe

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from finetune.images.live import LiveImages
    from offload.engine.engine import Engine
    from offload.plan.facts.facts import ModelFacts
    from offload.plan.machine.machine import Machine
    from offload.plan.plan import Plan

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A finished run whose model is not loaded yet."""

    run: RunDir  # its directory
    step: (
        int | None
    )  # the steps that the checkpoint which answers has had; None: the run is finished
    recipe: Recipe  # its recipe; of a run that trained all weights, with the model that it has left
    tokenizer: "PreTrainedTokenizerBase"  # the model's
    facts: "ModelFacts"  # the model's shapes
    machine: "Machine"  # where it is to be computed
    plan: "Plan"  # how its layers are streamed
    images: "LiveImages | None" = None  # those of its prompts; None if they are of text alone

    @classmethod
    def of(cls, run_dir: Path, *, note: Note) -> "Prepared":
        """Plan how a run's model is computed.

        Args:
            run_dir: The directory of a run that is finished, or has a checkpoint to answer.
            note: Reports what the user should know about the adapter.

        Raises:
            CheckpointError: The directory holds no run.
            ModelError: The run has no adapter yet.
        """
        run = RunDir(run_dir)
        recipe = run.recipe() if run.recipe_file.exists() else None
        step = None if recipe is None else _step_to_try(run, recipe)
        if recipe is not None and recipe.train.is_full:
            recipe = _of_trained(run, recipe)
        elif recipe is not None and step is not None:
            note(f"{run_dir} is not finished: its checkpoint after step {step} answers")
        else:
            for word in run.require_adapter():
                note(word)
            refuse_classifier(run.adapter, "able to answer")
            recipe = run.recipe()
        facts = facts_of(recipe.model)
        device = preflight.torch_device_name(recipe.offload)
        machine = probe(device=device, seconds=1.0, dtype=recipe.model.dtype)
        return cls(
            run=run,
            step=step,
            recipe=recipe,
            tokenizer=load_tokenizer(recipe.model),
            facts=facts,
            machine=machine,
            plan=plan(facts, machine, full_request(recipe, facts)),
        )

    def seeing(self) -> "Prepared":
        """Return the same for prompts with images.

        Raises:
            ConfigError: The run has trained virtual tokens.
            ModelError: The model sees no images, or they were not compared.
        """
        from finetune.images.live import LiveImages

        recipe = self.recipe
        if recipe.adapter.stated.is_virtual:
            raise ConfigError(
                f"an image, and {self.run.path} trained virtual tokens",
                limit="both take the places of tokens in front of the layers",
                hint="ask in text alone",
            )
        device = torch.device(preflight.torch_device_name(recipe.offload))
        num_tokens = self.facts.vocab_size
        images = LiveImages.of(recipe, self.tokenizer, num_tokens=num_tokens, device=device)
        if images is None:
            raise ModelError(
                f"an image, and {recipe.model.path} has no processor for them",
                limit="the model reads text alone",
                hint="ask in text alone",
            )
        images.require_exact()
        return replace(self, images=images)

    def shown(self, image: Path | Picture) -> Picture:
        """Return an image for prompts, once the tower has looked at it.

        Args:
            image: An image, or its file.

        Raises:
            ConfigError: There is no such file.
            DataError: It is no image that can be used.
            ModelError: The model has no tower, or no processor that can be loaded here.
        """
        assert self.images is not None, "of `seeing`"
        if isinstance(image, Path):
            path = expanded(str(image)).absolute()
            if not path.is_file():
                raise ConfigError(f"there is no file {image}", hint="name the file of an image")
            image = Picture(name=str(image), path=str(path))
        with _usable():
            self.images.look(image)
        return image

    def ids_of(self, messages: Sequence[Message], *, source: str) -> Sequence[int]:
        """Return the tokens before an answer to some turns, after the run's system prompt.

        Raises:
            DataError: The model lacks one, or the template takes no such turns or images.
        """
        turns = list(messages)
        if self.recipe.data.system:
            turns.insert(0, Message(role="system", content=self.recipe.data.system))
        empty_think = self.recipe.data.empty_think
        with _usable():
            ids = prompt_ids(
                turns, self.tokenizer, source=source, empty_think=empty_think, images=self.images
            )
        known = ids if self.images is None else self.images.without(ids)
        require_known_ids([known], self.tokenizer, self.facts.vocab_size, where=source)
        return ids

    def most_new(self, num_prompt: int) -> int:
        """Return how many tokens an answer may have; none or fewer if the prompt is too long."""
        in_front, limit = self.recipe.adapter.num_in_front, self.facts.max_position_embeddings
        return limit - in_front - num_prompt + 1

    def require_room(self, num_prompt: int, num_new: int) -> None:
        """Check that an answer fits into the model's positions, and its cache into device memory.

        The last new token is never read, so it takes no position.

        Raises:
            ConfigError: The model was made for fewer positions.
            DoesNotFitError: The key-value cache is too large.
        """
        in_front, limit = self.recipe.adapter.num_in_front, self.facts.max_position_embeddings
        most_new = self.most_new(num_prompt)
        if num_new > most_new:
            raise ConfigError(
                (f"{in_front} virtual tokens, " if in_front else "")
                + f"a prompt of {num_prompt:,} tokens and an answer of up to {num_new:,} take"
                f" {in_front + num_prompt + num_new - 1:,} positions",
                limit=f"the model was made for at most {limit:,}",
                hint=f"`--max-new-tokens {most_new}`" if most_new > 0 else "a shorter prompt",
            )
        budget = self.plan.request.vram_budget_bytes or self.machine.vram_bytes
        require_room(
            self.facts,
            self.plan.device_memory,
            limit_bytes=min(self.machine.vram_bytes, budget),
            num_rows=1,
            prompt_tokens=num_prompt + in_front,
            new_tokens=num_new,
            dtype_bytes=self.plan.request.typical.dtype_bytes,
        )

    @contextmanager
    def attached(self, *, note: Note) -> Iterator["TrainedModel"]:
        """Load the model with its adapter, and put it on an engine in this context."""
        recipe, device = self.recipe, preflight.torch_device_name(self.recipe.offload)
        if self.images is not None:
            self.images.let_go()
        loaded = load_model(
            recipe.model,
            codec=recipe.offload.layer_codec,
            device=device,
            seed=recipe.train.seed,
            tier=recipe.offload.load_tier,
            experts_implementation="eager",  # it works on any device, and a token has few rows
        )
        if self.images is not None:
            self.images.put_in_front(loaded.model)
        adapted = None
        if self.step is not None:
            section, seed = recipe.adapter, recipe.train.seed
            adapted = add_lora(loaded.model, section, seed=seed, backing=loaded.backing)
            set_trained(adapted, self.run.checkpoints.trained(self.step), name="default")
        elif recipe.adapter.stated.kind == "prefix":
            load_prefix(loaded.model, self.run.adapter)
        elif not recipe.train.is_full:
            adapted = load_adapter(loaded.model, self.run.adapter)
        if adapted is not None and recipe.adapter.as_lora.compute_dtype == "auto":
            compute_in_base_dtype(adapted)
        model: PeftModel | PreTrainedModel = adapted or loaded.model
        model.requires_grad_(requires_grad=False).eval()
        engine = offload.attach(
            model,
            num_slots=self.plan.num_slots,
            codec=recipe.offload.layer_codec,
            tier=recipe.offload.load_tier,
            device=device,
            embeddings=self.plan.request.typical.embeddings,
            head=self.plan.request.typical.head,
            backing=loaded.backing,
        )
        trained = self.run.model if recipe.train.is_full else self.run.adapter
        try:
            yield TrainedModel(
                engine=engine,
                model=model,
                tokenizer=self.tokenizer,
                stop_ids=frozenset(_stops(trained, model, self.tokenizer).ids),
                note=note,
            )
        finally:
            engine.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """A model on its engine."""

    engine: "Engine"  # runs it
    model: "PeftModel | PreTrainedModel"  # with its adapter, or trained whole
    tokenizer: "PreTrainedTokenizerBase"  # its tokenizer
    stop_ids: frozenset[int]  # tokens that end an answer
    note: Note  # reports that the model is computed without a cache

    def answer(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int,
        choose: Choose,
        stop_strings: Sequence[str] = (),
        is_base: bool = False,
        heard: Callable[[str], None] | None = None,
    ) -> str:
        """Return what the model answers.

        Args:
            prompt: Its tokens.
            max_new_tokens: Longest answer.
            choose: Chooses the next tokens.
            stop_strings: Texts that end the answer; they are not part of it.
            is_base: Whether the adapter is switched off.
            heard: Called with the text so far, at each token.
        """

        def text(ids: Sequence[int]) -> str:
            shown = [token for token in ids if token not in self.stop_ids]
            return str(self.tokenizer.decode(shown, skip_special_tokens=True))

        def is_ended(_row: int, ids: Sequence[int]) -> bool:
            if heard is not None:
                heard(cut_at(text(ids), stop_strings))
            return any(string in text(ids) for string in stop_strings)

        with self._without_adapter() if is_base else nullcontext():
            ids = generate(
                self.engine,
                [prompt],
                max_new_tokens=max_new_tokens,
                stop_ids=self.stop_ids,
                pad_id=pad_id(self.tokenizer),
                batch_size=1,
                note=self.note,
                choose=choose,
                is_ended=is_ended,
            )
        return cut_at(text(ids[0]), stop_strings)

    @contextmanager
    def _without_adapter(self) -> Iterator[None]:
        model: Any = self.model  # peft's: a model trained whole has no base
        arguments = front_arguments(model)
        if isinstance(arguments, PrefixArguments):
            with arguments.switched_off():
                yield
        else:
            with model.disable_adapter():
                yield


@contextmanager
def _usable() -> Iterator[None]:
    """Turn what is wrong with an image into an error that a user sees."""
    try:
        yield
    except RowError as error:
        raise DataError(str(error), hint="name another file, or ask in text alone") from error


def _step_to_try(run: RunDir, recipe: Recipe) -> int | None:
    """Return the step of the checkpoint that answers for a run without an adapter yet, if any."""
    is_lora = recipe.adapter.stated.kind in ("lora", "modules") and not recipe.train.is_full
    if run.adapter.exists() or not is_lora or recipe.model.head != "tokens":
        return None
    return run.checkpoints.newest()


def _of_trained(run: RunDir, recipe: Recipe) -> Recipe:
    """Return the recipe with the model that its run has trained in place of the published one.

    Raises:
        CheckpointError: It is not there yet, or damaged.
    """
    run.require_model()
    own = {"path": str(run.model), "config": None, "init": "pretrained", "tokenizer": None}
    return with_settings(recipe, {f"model.{name}": value for name, value in own.items()})


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
