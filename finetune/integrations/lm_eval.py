"""A model class for EleutherAI's lm-evaluation-harness, whose requests are scored by the engine.

All requests of a call pass the layers together: a task's multiple-choice questions load the model
once. Importing this module makes `sluice` a model of lm_eval:

    import finetune.integrations.lm_eval
    lm_eval.simple_evaluate("sluice", model_args={"pretrained": "DIR", "adapter": "RUN"}, ...)

Requests are tokenised and scored as by lm_eval's own `hf` class: the same tokens, log-likelihoods
within rounding. Lines have at most `max_length` tokens, where `hf` gives the model one more in a
continuation that it has to cut.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed: `pip install 'sluice-finetune[lm_eval]'`", name=error.name
    ) from error

from rich.console import Console

from finetune.data.chat_template import turns_for
from finetune.data.tokenize import IGNORE_INDEX
from finetune.errors import ConfigError
from finetune.model.config import fetch_model
from finetune.model.tokenizer import load_tokenizer
from finetune.report.screen import Screen
from finetune.scoring.contenders import contenders_of
from finetune.scoring.rows import Line, LineScore
from finetune.scoring.scorer import attaching, base_to_score, machine_here, plan_wave
from finetune.training.generate import generate
from offload.errors import DoesNotFitError
from offload.plan.machine.machine import DTYPE_BYTES
from offload.plan.memory.memory import fitting_rows, require_room
from offload.plan.scoring import ScorePlan

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

MAX_NEW_TOKENS = 256  # of an answer, where a task does not say, as in lm_eval's own class


@register_model("sluice")
class SluiceLM(TemplateLM):
    """A base, or one adapter on it, whose layers are streamed."""

    def __init__(
        self,
        pretrained: str,
        *,
        adapter: str | None = None,
        settings: str = "",
        machine: str | None = None,
        max_length: int | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        """Load the base and attach it; all layers stay on the device if they fit.

        Args:
            pretrained: A model directory, a hub id or a recipe.
            adapter: An adapter's folder, or the directory of a finished run.
            settings: Settings over those of a recipe, such as `model.dtype=float32`, with spaces
                between them.
            machine: What `sluice probe --save` wrote; None measures this machine.
            max_length: Most tokens of a line; None takes what the model was made for.
            batch_size: 1 or "auto": micro-batches are those of the plan.
            max_batch_size: Not taken, as `batch_size`.
            device: "cuda" or "cpu", as `offload.device`.

        Raises:
            SluiceError: Anything that a user or the machine can cause.
        """
        super().__init__()
        if batch_size not in (None, 1, "1", "auto") or max_batch_size is not None:
            raise ConfigError(
                f"batch_size {batch_size}, max_batch_size {max_batch_size}",
                limit="the plan chooses micro-batches by the memory that there is",
                hint='leave them out, or `batch_size="auto"`',
            )
        words = settings.split()
        if device is not None:
            words.append(f"offload.device={device.partition(':')[0]}")
        self._subject = base_to_score(pretrained, words)
        recipe, facts = self._subject.recipe, self._subject.facts
        adapters = () if adapter is None else (Path(adapter),)
        self._wave, notes = contenders_of(
            recipe, adapters=adapters, checkpoints=None, has_base=False
        )
        self.notes = (*self._subject.notes, *notes)
        screen = Screen(Console(stderr=True), is_verbose=False)
        fetch_model(recipe.model, working=screen.working, note=screen.note)
        self.tokenizer = load_tokenizer(recipe.model)
        self.max_length = max_length or facts.max_position_embeddings
        self._machine = machine_here(self._subject, None if machine is None else Path(machine))
        self._num_slots = self._settled_slots()
        base = attaching(self._subject, self._machine, num_slots=self._num_slots)
        self._scorer = base.open(self._wave, pad_id=self._pad_id)
        self.num_loads = 0

    def close(self) -> None:
        """End the engine; the model answers no more requests."""
        self._scorer.close()

    # ---------------------------------------------------------------------------------- tokenizer

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        token_id = self.tokenizer.eos_token_id
        assert isinstance(token_id, int)
        return token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that an empty context is replaced by."""
        token_id = self.tokenizer.bos_token_id
        return token_id if isinstance(token_id, int) else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for caches of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @property
    def _pad_id(self) -> int:
        token_id = self.tokenizer.pad_token_id
        assert isinstance(token_id, int)
        return token_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return the tokens of a text, as lm_eval's own class does."""
        if add_special_tokens is None and has_bos_prefix(
            string, self.tokenizer.decode(self.prefix_token_id)
        ):
            add_special_tokens = False
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids: list[int] = self.tokenizer.encode(string, **options)
        return ids

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a chat as text."""
        return str(
            self.tokenizer.apply_chat_template(
                turns_for(self.tokenizer, chat_history, source="a chat of lm_eval"),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    # ------------------------------------------------------------------------------- log-likelihood

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_options: object
    ) -> list[tuple[float, bool]]:
        scores = self._scored([self._line(context, rest) for _, context, rest in requests])
        found = [(score.logp, score.is_greedy) for score in scores]
        for (texts, _, _), one in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, one)
        return found

    def loglikelihood_rolling(
        self, requests: "Sequence[Instance]", disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, in windows of `max_length` tokens."""
        windows = [list(self._windows(*request.args)) for request in requests]
        left = iter(self._scored([line for own in windows for line in own]))
        found = [sum(next(left).logp for _ in own) for own in windows]
        for request, one in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, one)
        return found

    def _windows(self, text: str) -> Iterator[Line]:
        for window in get_rolling_token_windows(
            token_list=self.tok_encode(text),
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length - 1,
            context_len=1,
        ):
            yield self._line(*make_disjoint_window(window))

    def _line(self, context: Sequence[int], continuation: Sequence[int]) -> Line:
        """Return a continuation to be scored; its context is cut at the left.

        Raises:
            ConfigError: The continuation alone is too long.
        """
        num = len(continuation)
        if num >= self.max_length:
            raise ConfigError(
                f"a continuation of {num} tokens",
                limit=f"with a token before it, it has at most max_length: {self.max_length}",
                hint="a larger `max_length`, if the model takes it",
            )
        ids = (*context, *continuation)[-self.max_length :]
        unscored = len(ids) - num
        return Line(ids=ids, labels=(*[IGNORE_INDEX] * unscored, *ids[unscored:]))

    def _scored(self, lines: Sequence[Line]) -> tuple[LineScore, ...]:
        if not lines:
            return ()
        made = self._plan(lines, num_slots=self._num_slots)
        scored = self._scorer.score(lines, made.sweeps)
        self.num_loads += scored.num_loads
        return scored.lines[0]

    # ---------------------------------------------------------------------------------- generation

    def generate_until(
        self, requests: "Sequence[Instance]", disable_tqdm: bool = False
    ) -> list[str]:
        """Return the greedy continuation of each context, up to a stop or so many tokens.

        Raises:
            ConfigError: A task samples, or asks for so many tokens that no context is left.
        """
        found = list[str]()
        groups = dict[tuple[tuple[str, ...], int], list[int]]()
        for number, request in enumerate(requests):
            groups.setdefault(self._stops_of(dict(request.args[1])), []).append(number)
        answers = dict[int, str]()
        for (stops, max_new_tokens), numbers in groups.items():
            most = self.max_length - max_new_tokens
            prompts = [self.tok_encode(requests[n].args[0])[-most:] for n in numbers]
            texts = self._continued(prompts, stops, max_new_tokens)
            answers |= dict(zip(numbers, texts, strict=True))
        for number, request in enumerate(requests):
            self.cache_hook.add_partial("generate_until", request.args, answers[number])
            found.append(answers[number])
        return found

    def _stops_of(self, options: dict[str, Any]) -> tuple[tuple[str, ...], int]:
        options = dict(normalize_gen_kwargs(options, MAX_NEW_TOKENS))
        eos = str(self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False))
        until = handle_stop_sequences(options.pop("until", None), eos=eos)
        max_new_tokens = int(options.pop("max_gen_toks"))
        if options.pop("do_sample", False):
            raise ConfigError(
                "a task samples (do_sample: true)",
                limit="answers are the most probable tokens",
                hint="`gen_kwargs={'do_sample': False}`",
            )
        options.pop("temperature", None)  # 0 without sampling
        if options:
            raise ConfigError(
                f"a task sets {', '.join(sorted(options))}",
                limit="until, max_gen_toks and do_sample: false are read",
                hint="leave it out of the task's generation_kwargs",
            )
        if max_new_tokens >= self.max_length:
            raise ConfigError(
                f"max_gen_toks is {max_new_tokens}",
                limit=f"with a context it is at most max_length: {self.max_length}",
                hint="a smaller `max_gen_toks` in the task's generation_kwargs",
            )
        return tuple(until), max_new_tokens

    def _continued(
        self, prompts: Sequence[Sequence[int]], stops: Sequence[str], max_new_tokens: int
    ) -> list[str]:
        """Continue prompts, each up to a stop."""

        def is_ended(_row: int, ids: Sequence[int]) -> bool:
            return any(stop and stop in self._text(ids) for stop in stops)

        answers = generate(
            self._scorer.engine,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_ids=[self.eot_token_id],
            pad_id=self._pad_id,
            batch_size=self._batch_size(prompts, max_new_tokens),
            note=self._note,
            is_ended=is_ended,
        )
        return [
            str(postprocess_generated_text(self._text(ids), list(stops), None)) for ids in answers
        ]

    def _note(self, text: str) -> None:
        self.notes = (*self.notes, text)

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    # --------------------------------------------------------------------------------------- plans

    def _plan(self, lines: Sequence[Line], *, num_slots: int | None) -> ScorePlan:
        return plan_wave(self._subject, self._machine, self._wave, lines, num_slots=num_slots)

    def _settled_slots(self) -> int:
        """Return all layers if they fit with a line of `train.seq_len`, else what the plan says."""
        length = min(self.max_length, self._subject.recipe.train.seq_len)
        line = Line(ids=(0,) * length, labels=(0,) * length)
        num_layers = self._subject.facts.num_layers
        if self._subject.recipe.offload.num_slots == "auto":
            try:
                return self._plan([line], num_slots=num_layers).num_slots
            except DoesNotFitError:
                pass
        return self._plan([line], num_slots=None).num_slots

    def _batch_size(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> int:
        """Return how many prompts pass the layers at a time: so many rows and their caches fit.

        Raises:
            DoesNotFitError: Not even one does.
        """
        longest = max(map(len, prompts))
        width = longest + max_new_tokens
        line = Line(ids=(0,) * width, labels=(0,) * width)
        made = self._plan([line] * len(prompts), num_slots=self._num_slots)
        facts, machine = self._subject.facts, self._machine
        budget = self._subject.recipe.offload.vram_budget_bytes or machine.vram_bytes
        room: dict[str, int] = {
            "limit_bytes": min(budget, machine.vram_bytes),
            "prompt_tokens": longest,
            "new_tokens": max_new_tokens,
            "dtype_bytes": DTYPE_BYTES[self._subject.recipe.model.dtype],
        }
        require_room(facts, made.device_memory, num_rows=1, **room)
        num_rows = fitting_rows(facts, made.device_memory, **room)
        num_passed = len(made.sweeps[0][0])
        return num_passed if num_rows is None else min(num_passed, num_rows)
