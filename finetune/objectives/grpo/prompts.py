"""Prompts as steps are planned for them: each with as many of the longest answers as are sampled.

The answers of a step are known once they are sampled. Until then a prompt is planned with answers
of `max_new_tokens` tokens, which no step exceeds: so the plan's memory holds, and its time is that
of the longest round.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.dataset import ExampleSet, Groups, Rows
from finetune.data.tokenize import Example
from finetune.errors import ConfigError, DataError
from finetune.report.format import shown_time
from finetune.report.rows import BRIEF, Row
from offload.plan.plan import Plan
from offload.plan.sampling import SamplingPlan, SamplingRequest, plan_sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from finetune.objectives.grpo import Grpo
    from finetune.recipe.sections import TrainSection


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LongestAnswers(ExampleSet):
    """Examples of prompts, each several times with an answer that is not known yet."""

    num_answers: int  # answers of each prompt, next to each other
    num_new: int  # tokens of each

    @property
    def groups(self) -> Groups:
        """The answers of each prompt."""
        num = len(self)
        return Groups(
            offsets=np.arange(0, num + 1, self.num_answers, dtype=np.int64),
            values=np.zeros(num),
            references=np.empty(0),
        )

    @property
    def loss_tokens(self) -> "NDArray[np.int64]":
        """Count the tokens of the answers."""
        return np.full(len(self), self.num_new, dtype=np.int64)

    def prompt(self, number: int) -> Example:
        """Return a prompt, counted from 0."""
        return ExampleSet.__getitem__(self, number)

    def prompts(self) -> list[Example]:
        """Return all prompts."""
        return [self.prompt(number) for number in range(len(self) // self.num_answers)]

    def __len__(self) -> int:
        return ExampleSet.__len__(self) * self.num_answers

    def __getitem__(self, index: int) -> Example:
        prompt = self.prompt(range(len(self))[index] // self.num_answers)
        return answered(prompt, np.resize(prompt.input_ids, self.num_new))

    def _lengths(self) -> "NDArray[np.int64]":
        return np.repeat(ExampleSet._lengths(self) + self.num_new, self.num_answers)


def answered(
    prompt: Example, answer: "NDArray[np.int32]", logprobs: "NDArray[np.float32] | None" = None
) -> Example:
    """Return a prompt with an answer, which alone is learned.

    Args:
        prompt: Tokens without a loss.
        answer: Its tokens.
        logprobs: The log-probability that each was sampled with; zeros if there are none.
    """
    drawn = np.zeros(len(answer), dtype=np.float32) if logprobs is None else logprobs
    return replace(
        prompt,
        input_ids=np.concatenate([prompt.input_ids, answer]),
        labels=np.concatenate([prompt.labels, answer]),
        logprobs=np.concatenate([np.zeros(len(prompt.input_ids), dtype=np.float32), drawn]),
    )


def with_longest_answers(rows: Rows, section: "Grpo", *, seq_len: int) -> Rows:
    """Return prompts with the longest answers that may be sampled.

    Args:
        rows: Prompts that are trained on, and held out.
        section: The settings of sampling.
        seq_len: Most tokens of a prompt with its answer.

    Raises:
        DataError: A prompt leaves less room.
    """
    assert section.num_answers is not None, "of rewards"
    assert section.max_new_tokens is not None, "of rewards"
    num_new = section.max_new_tokens

    def of(examples: ExampleSet, num_answers: int) -> LongestAnswers:
        lengths = ExampleSet._lengths(examples)
        longest = int(lengths.max())
        if longest + num_new > seq_len:
            num = int(np.count_nonzero(lengths + num_new > seq_len))
            where = examples.sources[int(lengths.argmax())]
            raise DataError(
                f"{num:,} of {len(lengths):,} prompts leave less than objective.max_new_tokens"
                f" {num_new:,} of train.seq_len {seq_len:,} tokens; the longest, {where}, has"
                f" {longest:,}",
                limit="a prompt is never cut, and has room for the longest answer",
                hint=f"`train.seq_len: {longest + num_new}`"
                + (
                    f", or `objective.max_new_tokens: {seq_len - longest}`"
                    if seq_len > longest
                    else ", or leave these rows out"
                ),
            )
        return LongestAnswers(
            parts=examples.parts, notes=examples.notes, num_answers=num_answers, num_new=num_new
        )

    held_out = None if rows.held_out is None else of(rows.held_out, 1)
    return replace(rows, train=of(rows.train, section.num_answers), held_out=held_out)


def planned_sampling(
    section: "Grpo", plan: Plan, *, num_answers: int, prompt_tokens: int, longest_prompt: int
) -> tuple[SamplingRequest, SamplingPlan]:
    """Return how the answers of a step are sampled.

    Args:
        section: The settings of sampling.
        plan: The plan of a step.
        num_answers: The answers to all prompts of a step together.
        prompt_tokens: Tokens of a typical prompt.
        longest_prompt: Tokens of the longest prompt.

    Raises:
        DoesNotFitError: The caches of the answers to one prompt do not fit.
    """
    assert section.num_answers is not None, "of rewards"
    assert section.max_new_tokens is not None, "of rewards"
    request = SamplingRequest(
        num_prompts=max(1, num_answers // section.num_answers),
        num_answers=section.num_answers,
        prompt_tokens=prompt_tokens,
        longest_prompt=longest_prompt,
        new_tokens=section.max_new_tokens,
        groups_share=section.sampling == "fast",
    )
    return request, plan_sampling(plan, request)


_LIMITS = {
    "link": "copies from RAM",
    "disk": "reads from disk",
    "memory": "the device's memory",
    "compute": "computing",
    "launches": "launches of kernels",
}


def rows_of_sampling(
    section: "Grpo", plan: Plan, train: "TrainSection", *, num_steps: int | None
) -> list[Row]:
    """Return what a plan says of a round, where all prompts and answers are as long as may be.

    Raises:
        ConfigError: Several processes share a step.
        DoesNotFitError: The caches of the answers to one prompt do not fit.
    """
    if plan.request.has_other_ranks:
        raise ConfigError(
            f"objective.rewards with {plan.request.num_ranks} processes",
            limit="one process samples answers and learns from them",
            hint="one process: `sluice finetune`, without a launcher; `--gpus 1` in a plan",
        )
    if section.sampler is not None:
        words = f"by the server at {section.sampler}, before each step; its time is not known"
        return [Row("", "sampling", words, level=BRIEF)]
    assert section.max_new_tokens is not None, "of rewards"
    prompt_tokens = max(1, train.seq_len - section.max_new_tokens)
    request, found = planned_sampling(
        section,
        plan,
        num_answers=train.global_batch_size,
        prompt_tokens=prompt_tokens,
        longest_prompt=prompt_tokens,
    )
    words = (
        f"{shown_time(found.sample_s)} before each step: {request.num_prompts} x"
        f" {request.num_answers} answers of {request.new_tokens:,} tokens,"
        f" {found.tokens_per_s:,.0f} tokens/s"
    )
    figures = {
        "sample_s": found.sample_s,
        "tokens_per_s": found.tokens_per_s,
        "num_batches": found.num_batches,
        "cache_bytes": found.cache_bytes,
    }
    rows = [Row(f"sampling.{name}", "", figure) for name, figure in figures.items()]
    rows.append(Row("sampling.limited_by", "  limited by", _LIMITS[found.limited_by]))
    if num_steps is not None:
        all_s = num_steps * (found.sample_s + plan.step_s)
        note = f"for {num_steps} of sampling and learning, at most"
        rows.append(Row("sampling.all_s", "all rounds", all_s, "s", note, level=BRIEF))
    return [Row("", "sampling", words, level=BRIEF), *rows]
