"""Answers to prompts, sampled from a model whose layers are streamed.

All groups of answers pass a layer while its weights are there, so a pass over the layers gives each
answer a token, however many there are. A prompt is computed once, and its key-value cache then
continued for each of its answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from finetune.online.draw import Choose

if TYPE_CHECKING:
    from offload.engine.engine import Engine


@dataclass(kw_only=True, slots=True)
class Answer:
    """The tokens of an answer."""

    tokens: list[int] = field(default_factory=list)  # with the one that ends it
    logprobs: list[float] = field(default_factory=list)  # with which each was drawn, in nats
    is_cut: bool = True  # whether no token ended it


def batches_of(
    prompts: Sequence[Sequence[int]], *, most: int, are_joined: bool
) -> list[list[list[int]]]:
    """Return the numbers of prompts by batch, and in it by group.

    Args:
        prompts: Token ids of each.
        most: Prompts of a batch, whose caches fit together.
        are_joined: Whether those of a batch are one group, which has prompts of like length;
            otherwise each is its own.
    """
    order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
    batches = [order[at : at + most] for at in range(0, len(order), most)]
    return [[batch] if are_joined else [[number] for number in batch] for batch in batches]


@dataclass(kw_only=True, slots=True)
class Sampler:
    """Samples answers, and counts what was done."""

    engine: "Engine"  # an attached model
    max_new_tokens: int  # tokens after which an answer is cut off
    stop_ids: frozenset[int]  # tokens that end an answer
    pad_id: int  # token that fills up shorter prompts of a group
    num_batches: int = 0  # batches, each of which began with a pass over its prompts
    num_passes: int = 0  # passes over the layers
    num_groups: int = 0  # groups of all passes
    num_rows: int = 0  # rows of all passes, those of prompts left out

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        groups: Sequence[Sequence[int]],
        answers: Sequence[Sequence[Answer]],
        *,
        choose: Choose,
        note_ended: Callable[[int], None],
    ) -> None:
        """Write the answers to the prompts of a batch, whose caches fit together.

        Args:
            prompts: Token ids of each, those of other batches too.
            groups: Numbers of prompts that are computed together, shorter ones padded.
            answers: Empty answers, as many for each prompt.
            choose: Chooses tokens; answers are numbered prompt by prompt.
            note_ended: Called with the number of answers that have ended since.

        Raises:
            UnsupportedModelError: The model takes no key-value cache.
            OffloadError: It is in training mode.
        """
        num_answers = len(answers[0])
        rows = [
            [
                (prompt * num_answers + number, answer)
                for prompt in group
                for number, answer in enumerate(answers[prompt])
            ]
            for group in groups
        ]
        given, padding = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for number, group in enumerate(groups):
            longest = max(len(prompts[prompt]) for prompt in group)
            missing = [longest - len(prompts[prompt]) for prompt in group]
            given[number] = torch.tensor(
                [[self.pad_id] * num + [*prompts[p]] for p, num in zip(group, missing, strict=True)]
            )
            if any(missing):
                padding[number] = torch.tensor(missing)
        is_first, self.num_batches = True, self.num_batches + 1
        with self.engine.generation() as generation:
            while given:
                logits = generation.next_logits(given, padding=padding if is_first else {})
                self.num_passes += 1
                self.num_groups += len(given)
                self.num_rows += 0 if is_first else sum(map(len, given.values()))
                given = {}
                for number, logits_BV in logits.items():
                    if is_first:
                        generation.repeat(number, num_answers)
                        logits_BV = logits_BV.repeat_interleave(num_answers, dim=0)
                    num_ended = self.give(rows[number], logits_BV, choose)
                    if num_ended:
                        note_ended(num_ended)
                    if any(self.goes_on(answer) for _, answer in rows[number]):
                        newest = [[answer.tokens[-1]] for _, answer in rows[number]]
                        given[number] = torch.tensor(newest)
                    else:
                        generation.drop(number)
                is_first = False

    def goes_on(self, answer: Answer) -> bool:
        """Return whether an answer is given another token."""
        return answer.is_cut and len(answer.tokens) < self.max_new_tokens

    def give(
        self, rows: Sequence[tuple[int, Answer]], logits_BV: torch.Tensor, choose: Choose
    ) -> int:
        """Give each answer of a group that goes on a token; return how many have ended by it."""
        going = [place for place, (_, answer) in enumerate(rows) if self.goes_on(answer)]
        numbers = [rows[place][0] for place in going]
        is_all = len(going) == len(rows)
        tokens, logprobs = choose(numbers, logits_BV if is_all else logits_BV[going])
        num_ended = 0
        for place, token, logprob in zip(going, tokens, logprobs, strict=True):
            answer = rows[place][1]
            answer.tokens.append(token)
            answer.logprobs.append(logprob)
            answer.is_cut = token not in self.stop_ids
            num_ended += not self.goes_on(answer)
        return num_ended
