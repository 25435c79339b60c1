"""The rows of each step, from the policy itself: answers are sampled, then given rewards.

A round is a step. It depends on the weights before it, the seed and its number, so a run that goes
on from a checkpoint samples the same answers again, to the bit. What the newest round has found is
on disk as soon as it is known, under a digest of the weights: a run that is killed while rewards
are given, or while it learns, does not sample twice, nor is an answer given two different rewards.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from finetune.data.dataset import ExampleSet, Groups
from finetune.data.encode_source import num_cores
from finetune.data.sources import decoded
from finetune.data.steps import StepBatch
from finetune.errors import DataError, RowError
from finetune.files.atomic import write_atomically
from finetune.objectives.grpo.prompts import LongestAnswers, answered, planned_sampling
from finetune.online.draw import Choose, Draw, greedy
from finetune.online.rewards import Answered, Given, rewards_of
from finetune.online.sample import Answer, Sampler, batches_of
from finetune.report.rounds import FOLDER
from finetune.run.run_files import Evaluation
from finetune.training.loop import digest_of
from finetune.training.samples import pad_id
from finetune.training.session import Session
from offload.engine.engine import Engine
from offload.engine.randomness import seed_of
from offload.plan.plan import Plan
from offload.plan.sampling import pass_seconds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from finetune.data.formats.prompt import Prompt
    from finetune.data.tokenize import Example
    from finetune.objectives.grpo import Grpo

OPEN = "open.json"
"""What the newest round has found so far."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Learned(ExampleSet):
    """Examples that are in memory."""

    examples: tuple["Example", ...]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> "Example":
        return self.examples[index]

    def _lengths(self) -> "NDArray[np.int64]":
        return np.array([len(one.input_ids) for one in self.examples], dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """A prompt of the data, for reward functions."""

    question: str  # what the user says last
    row: Mapping[str, object]  # all its columns


class Rounds:
    """Gives the steps of a run their rows; see `finetune.data.steps.StepLoader`."""

    def __init__(self, session: Session, plan: Plan) -> None:
        """Read the columns of all prompts; nothing is sampled.

        Args:
            session: The run, on its engine.
            plan: The plan of its steps.
        """
        run, recipe = session.run, session.run.recipe
        assert isinstance(session.engine, Engine), "a rule of recipes"
        self._session, self._plan, self._engine = session, plan, session.engine
        self._section = cast("Grpo", recipe.objective)
        self._folder = run.dir.path / FOLDER
        self._rewards = rewards_of(self._section.rewards or (), num_workers=max(1, num_cores() - 1))
        self._prepare([len(one.input_ids) for one in _prompts(session.rows.train).prompts()])
        self._asked = {**_asked(session.rows.train), **_asked(session.rows.held_out)}

    def _prepare(self, lengths: Sequence[int]) -> None:
        """Plan how answers are sampled to prompts of these lengths."""
        self._request, self._sampling = planned_sampling(
            self._section,
            self._plan,
            num_answers=self._session.steps.sizes.rows_per_step,
            prompt_tokens=round(fmean(lengths)),
            longest_prompt=max(lengths),
        )

    def __enter__(self) -> Self:
        self._folder.mkdir(exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._rewards.close()

    def __iter__(self) -> Iterator[StepBatch]:
        session = self._session
        for step in range(session.first_step, session.steps.num):
            yield self._batch(step)

    # --------------------------------------------------------------------------------- a round

    def _batch(self, step: int) -> StepBatch:
        """Sample the answers of a step, have them rewarded, and cut them into micro-batches."""
        start_s = time.perf_counter()
        session, section = self._session, self._section
        num_answers = _given(section.num_answers)
        rows = session.steps.order.rows(step)[::num_answers]
        prompts = [_prompts(session.rows.train).prompt(row // num_answers) for row in rows]
        opened = self._opened(step, prompts)
        sample_s = 0.0
        predicted_s: float | None = 0.0
        if opened.answers is None:
            seed, num = session.run.recipe.train.seed, len(prompts) * num_answers
            seeds = [seed_of(seed, step, number) for number in range(num)]
            answers, predicted_s = self._sampled(prompts, num_answers, seeds)
            opened = replace(opened, answers=answers)
            sample_s = time.perf_counter() - start_s
            self._keep(opened)
        assert opened.answers is not None
        reward_start_s = time.perf_counter()
        if opened.given is None:
            opened = replace(opened, given=self._rewarded(prompts, opened.answers))
            self._keep(opened)
        reward_s = time.perf_counter() - reward_start_s
        self._write(step, prompts, opened)
        share = self._share(prompts, opened)
        metrics = self._metrics(opened) | {
            "sample_s": sample_s,
            **({} if predicted_s is None else {"predicted_sample_s": predicted_s}),
            "reward_s": reward_s,
        }
        wait_s = time.perf_counter() - start_s
        return StepBatch(step=step, share=share, wait_s=wait_s, metrics=metrics)

    def _sampled(
        self, prompts: Sequence["Example"], num_answers: int, seeds: Sequence[int] | None
    ) -> tuple[list[list[Answer]], float | None]:
        """Return answers to prompts, in as few batches as their caches fit into.

        Args:
            prompts: The prompts.
            num_answers: The number of answers to each.
            seeds: The seed of each answer, by prompt; None takes the most probable tokens.

        Returns:
            Answers by prompt, and the seconds that a plan says of them; None if it says none.
        """
        session, sampler = self._session, self._sampler()
        choose: Choose = greedy
        if seeds is not None:
            choose = Draw(seeds, temperature=_given(self._section.temperature))
        ids = [prompt.input_ids.tolist() for prompt in prompts]
        answers = [[Answer() for _ in range(num_answers)] for _ in ids]
        most = max(1, self._sampling.groups_per_batch * self._request.num_answers // num_answers)
        batches = batches_of(ids, most=most, are_joined=self._section.sampling == "fast")
        num_ended, num = 0, len(ids) * num_answers
        with (
            session.run.screen.working("Sampling", "answers") as progress,
            session.loop.evaluated(),
        ):

            def note_ended(num_more: int) -> None:
                nonlocal num_ended
                num_ended += num_more
                progress(num_ended, num)

            for groups in batches:
                sampler.sample(ids, groups, answers, choose=choose, note_ended=note_ended)
        return answers, self._predicted_s(sampler)

    def _sampler(self) -> Sampler:
        return Sampler(
            engine=self._engine,
            max_new_tokens=_given(self._section.max_new_tokens),
            stop_ids=frozenset(self._session.stops.ids),
            pad_id=pad_id(self._session.tokenizer),
        )

    def _predicted_s(self, sampler: Sampler) -> float:
        """Return what the plan says of the passes that were made: over prompts, and of tokens."""
        num = sampler.num_passes - sampler.num_batches
        prompts_s = sampler.num_batches * self._sampling.prefill_s
        if not num:
            return prompts_s
        num_groups = max(1, round(sampler.num_groups / sampler.num_passes))
        return prompts_s + num * pass_seconds(
            self._plan,
            num_groups=num_groups,
            num_rows=max(1, round(sampler.num_rows / num / num_groups)),
            num_past=self._request.prompt_tokens + num // sampler.num_batches // 2,
        )

    def _rewarded(
        self, prompts: Sequence["Example"], answers: Sequence[Sequence[Answer]]
    ) -> list[list[Given]]:
        """Return what each answer is given.

        Raises:
            DataError: More than half of them are given nothing.
        """
        asked = [
            self._answered(prompt, answer)
            for prompt, several in zip(prompts, answers, strict=True)
            for answer in several
        ]
        with self._session.run.screen.working("Rewarding", "answers") as progress:
            given = iter(self._rewards.of(asked, progress))
        found = [[next(given) for _ in several] for several in answers]
        failures = [one.failures[0] for several in found for one in several if one.failures]
        if failures:
            self._tell(failures, len(asked))
        return found

    def _tell(self, failures: Sequence[str], num: int) -> None:
        """Say which answers were given no reward.

        Raises:
            DataError: They are more than half.
        """
        what = f"{len(failures)} of {num} answers were given no reward: {failures[0]}"
        if 2 * len(failures) > num:
            raise DataError(
                what,
                limit="answers without one are left out, and a round needs half of its own",
                hint="correct the function, then `--resume`: the answers are kept",
            )
        self._session.run.screen.note(f"{what}; they are left out")

    def _share(self, prompts: Sequence["Example"], found: "Open") -> Any:
        """Return the micro-batches of a round, of answers with a reward.

        Raises:
            DataError: No prompt has two.
        """
        examples: list[Example] = []
        rewards: list[float] = []
        begins: list[bool] = []
        for prompt, answers, given in zip(prompts, found.some, found.rewards, strict=True):
            usable = [(a, g.total) for a, g in zip(answers, given, strict=True)]
            kept = [(a, total) for a, total in usable if total is not None]
            if len(kept) < 2:
                continue  # an advantage is over others
            for n, (answer, total) in enumerate(kept):
                tokens = np.array(answer.tokens, dtype=np.int32)
                logprobs = np.array(answer.logprobs, dtype=np.float32)
                examples.append(answered(prompt, tokens, logprobs))
                rewards.append(total)
                begins.append(n == 0)
        if not examples:
            raise DataError(
                "no prompt of this round has two answers with a reward",
                limit="an advantage is over the other answers to a prompt",
                hint="correct the reward functions, then `--resume`: the answers are kept",
            )
        steps = self._session.steps
        assert steps.comparison is not None
        rows = Learned(parts=(), examples=tuple(examples))
        groups = Groups(
            offsets=np.append(np.flatnonzero(begins), len(begins)).astype(np.int64),
            values=np.array(rewards),
            references=np.empty(0),
        )
        comparison = replace(steps.comparison, groups=groups, lengths=rows._lengths())
        return steps.held_out(rows, comparison).share_of(tuple(range(len(rows))))

    # ------------------------------------------------------------------------------ held out

    def evaluation(self) -> Evaluation:
        """Return what held-out prompts say, each answered once by its most probable tokens.

        The loss is the mean reward with its sign changed, so that a lower one is better.
        """
        prompts = _prompts(self._session.rows.held_out).prompts()
        answers, _ = self._sampled(prompts, 1, None)
        opened = Open(step=-1, key="", answers=answers, given=self._rewarded(prompts, answers))
        metrics = self._metrics(opened)
        totals = [one.total for several in opened.rewards for one in several]
        known = [total for total in totals if total is not None]
        if not known:
            raise DataError(
                "no held-out answer was given a reward",
                limit="the loss on held-out rows is the mean of their rewards",
                hint="correct the reward functions, then `--resume`",
            )
        return Evaluation(loss=-fmean(known), metrics={"reward": fmean(known), **metrics})

    # ------------------------------------------------------------------------------- figures

    def _answered(self, prompt: "Example", answer: Answer) -> Answered:
        asked = self._asked[prompt.source]
        return Answered(prompt=asked.question, answer=self._text(answer), row=asked.row)

    def _text(self, answer: Answer) -> str:
        """Return what an answer says."""
        tokens = answer.tokens if answer.is_cut else answer.tokens[:-1]
        return str(self._session.tokenizer.decode(tokens, skip_special_tokens=True))

    def _metrics(self, found: "Open") -> dict[str, float]:
        """Return figures of a round's answers, by the names that TRL gives them."""
        answers = [answer for several in found.some for answer in several]
        given = [one for several in found.rewards for one in several]
        lengths = [len(answer.tokens) for answer in answers]
        metrics = {
            "completions/mean_length": fmean(lengths),
            "completions/min_length": min(lengths),
            "completions/max_length": max(lengths),
            "completions/clipped_ratio": fmean(answer.is_cut for answer in answers),
            "rewards/left_out": float(sum(one.total is None for one in given)),
        }
        for number, name in enumerate(self._section.labels):
            values = [v for one in given if (v := one.values[number]) is not None]
            if values:
                metrics[f"rewards/{name}/mean"] = fmean(values)
                metrics[f"rewards/{name}/std"] = pstdev(values)
        return metrics

    # ---------------------------------------------------------------------------------- files

    def _opened(self, step: int, prompts: Sequence["Example"]) -> "Open":
        """Return what is known of a round, which a run that was killed may have left.

        Answers hold for the weights and the prompts that they were sampled with, and rewards for
        the functions and the columns of the data that they came from.
        """
        ids = [prompt.input_ids.tolist() for prompt in prompts]
        rows = [self._asked[prompt.source].row for prompt in prompts]
        wanted = Open(
            step=step,
            key=_digest(digest_of(self._session.loop.weights), ids),
            rewards_digest=self._rewards.digest(),
            rows_digest=_digest(rows),
        )
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = Open.read(json.loads((self._folder / OPEN).read_text()))
            is_judged_alike = found.rewards_digest == wanted.rewards_digest
            if not is_judged_alike:
                self._session.run.screen.note(
                    f"The reward functions have changed since round {found.step + 1}"
                )
            if (found.step, found.key) == (wanted.step, wanted.key):
                is_same = is_judged_alike and found.rows_digest == wanted.rows_digest
                given = found.given if is_same else None
                return replace(wanted, answers=found.answers, given=given)
        return wanted

    def _keep(self, found: "Open") -> None:
        write_atomically(self._folder / OPEN, json.dumps(asdict(found)))

    def _write(self, step: int, prompts: Sequence["Example"], found: "Open") -> None:
        """Write the answers of a round as text, with their rewards."""
        names = self._section.labels
        lines = []
        for prompt, answers, given in zip(prompts, found.some, found.rewards, strict=True):
            for answer, one in zip(answers, given, strict=True):
                line = {
                    "row": prompt.source,
                    "prompt": self._asked[prompt.source].question,
                    "answer": self._text(answer),
                    "reward": one.total,
                    "rewards": dict(zip(names, one.values, strict=True)),
                    "num_tokens": len(answer.tokens),
                    "is_cut": answer.is_cut,
                }
                lines.append(line | ({"failures": one.failures} if one.failures else {}))
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_atomically(self._folder / f"{step + 1:06d}.jsonl", text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Open:
    """What is known of a round."""

    step: int  # its number, from 0
    key: str  # digest of the weights before it, and of its prompts
    answers: list[list[Answer]] | None = None  # those to each prompt, once they are sampled
    given: list[list[Given]] | None = None  # what each is given, once that is known
    rewards_digest: str = ""  # digest of the functions that give rewards
    rows_digest: str = ""  # digest of the columns that they read

    @property
    def some(self) -> list[list[Answer]]:
        """The answers, which are known."""
        assert self.answers is not None
        return self.answers

    @property
    def rewards(self) -> list[list[Given]]:
        """What they are given, which is known."""
        assert self.given is not None
        return self.given

    @classmethod
    def read(cls, values: dict[str, Any]) -> "Open":
        """Return what was written."""
        answers, given = values.pop("answers"), values.pop("given")
        return cls(
            answers=[[Answer(**one) for one in several] for several in answers],
            given=None
            if given is None
            else [
                [
                    Given(
                        values=tuple(g["values"]), failures=tuple(g["failures"]), total=g["total"]
                    )
                    for g in several
                ]
                for several in given
            ],
            **values,
        )


def _asked(examples: ExampleSet | None) -> dict[str, Asked]:
    """Return the prompts of examples with all their columns, by where they are."""
    found: dict[str, Asked] = {}
    for part in () if examples is None else examples.parts:
        wanted = {part.tokens.name(row) for row in part.tokens.store.rows[part.examples].tolist()}
        form, named = part.tokens.rows.opened()
        for _, name, raw in named:
            row = decoded(raw) if name in wanted else None
            if row is None or isinstance(row, RowError):
                continue
            prompt = cast("Prompt", form.read(name, raw))
            found[name] = Asked(question=prompt.question, row=cast("Mapping[str, object]", row))
    return found


def _digest(*values: object) -> str:
    return sha256(json.dumps(values, default=str).encode()).hexdigest()


def _prompts(examples: ExampleSet | None) -> LongestAnswers:
    assert isinstance(examples, LongestAnswers), "as they were planned"
    return examples


def _given(value: Any) -> Any:
    """Return a setting that is there where answers are sampled."""
    assert value is not None
    return value
