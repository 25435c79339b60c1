"""Drawing tokens by inversion, and answers that do not depend on others."""

import math

import pytest
import torch

from finetune.online.draw import Draw, greedy
from finetune.online.sample import Answer, Sampler, batches_of
from tests.parity.generations import attached
from tests.parity.steps import tiny

NUM_VOCAB = 1_300  # three blocks, the last of them not full


def plain(logits_V: torch.Tensor, drawn: float) -> int:
    ends = logits_V.double().softmax(0).cumsum(0)
    return int((ends <= drawn * ends[-1]).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_tokens_are_those_of_the_plain_inversion(temperature: float) -> None:
    logits_BV = torch.randn(64, NUM_VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    tokens, logprobs = Draw(range(64), temperature=temperature)(range(64), logits_BV)
    for row, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        generator = torch.Generator().manual_seed(row)
        drawn = float(torch.rand((), generator=generator, dtype=torch.float64))
        logits_V = logits_BV[row] / temperature
        assert token == plain(logits_V, drawn)
        assert logprob == pytest.approx(float(logits_V.log_softmax(0)[token]), abs=1e-5)


def test_a_token_without_probability_is_never_drawn() -> None:
    logits_BV = torch.full((400, NUM_VOCAB), -math.inf)
    logits_BV[:, [3, 700, NUM_VOCAB - 1]] = torch.tensor([0.0, 1.0, -2.0])
    tokens, _ = Draw(range(400), temperature=1.0)(range(400), logits_BV)
    counts = {token: tokens.count(token) / 400 for token in set(tokens)}
    expected = torch.tensor([0.0, 1.0, -2.0]).softmax(0).tolist()
    assert [*sorted(counts)] == [3, 700, NUM_VOCAB - 1]
    assert [counts[one] for one in sorted(counts)] == pytest.approx(expected, abs=0.06)


def test_an_answer_draws_its_own_numbers_whichever_others_draw() -> None:
    logits_BV = torch.randn(3, NUM_VOCAB, generator=torch.Generator().manual_seed(2))
    together, alone = Draw([5, 6, 7], temperature=1.0), Draw([5, 6, 7], temperature=1.0)
    both = [together([0, 1, 2], logits_BV)[0] for _ in range(3)]
    own = [alone([1], logits_BV[1:2])[0][0] for _ in range(3)]
    assert [tokens[1] for tokens in both] == own
    assert len(set(own)) > 1


def test_batches_have_prompts_of_like_length() -> None:
    prompts = [[0] * num for num in (3, 9, 5, 9, 1)]
    assert batches_of(prompts, most=2, are_joined=False) == [[[1], [3]], [[2], [0]], [[4]]]
    assert batches_of(prompts, most=3, are_joined=True) == [[[1, 3, 2]], [[0, 4]]]


def test_exact_answers_are_the_same_to_the_bit_whichever_prompts_are_sampled_with_them() -> None:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 64, (num,), generator=generator).tolist() for num in (5, 9, 5)]

    def answers(numbers: list[int], most: int) -> list[list[Answer]]:
        found = [[Answer() for _ in range(4)] for _ in numbers]
        seeds = [10 * number + n for number in numbers for n in range(4)]
        sampler = Sampler(engine=engine, max_new_tokens=7, stop_ids=frozenset({5}), pad_id=0)
        chosen = [prompts[number] for number in numbers]
        ended: list[int] = []
        for groups in batches_of(chosen, most=most, are_joined=False):
            draw = Draw(seeds, temperature=1.0)
            sampler.sample(chosen, groups, found, choose=draw, note_ended=ended.append)
        assert sum(ended) == 4 * len(numbers)
        assert sampler.num_batches == math.ceil(len(numbers) / most)
        return found

    with attached(tiny("qwen3").eval()) as engine:
        together = answers([0, 1, 2], 3)
        assert answers([0, 1, 2], 1) == together
        assert [answers([number], 3)[0] for number in range(3)] == together
    every = [one for several in together for one in several]
    assert any(one.is_cut for one in every)
    assert all(one.is_cut == (one.tokens[-1] != 5) for one in every)


def test_the_most_probable_token_is_greedy() -> None:
    assert greedy([0], torch.tensor([[0.0, 3.0, 1.0]])) == ([1], [0.0])
