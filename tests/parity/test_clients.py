"""Several clients of one engine at once, next to each alone and to plain transformers."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import offload
from finetune.clients.requests import Freeze, Load, Refused, Sample, Save, Score, Step, Train
from finetune.clients.scheduler import Scheduler
from finetune.errors import ConfigError, DataError, DivergedError
from offload.engine.adapters import AdapterSettings
from offload.engine.objective import Reference, Scores, StepLoss
from offload.errors import OffloadError
from tests.parity.clients import LARGE, SMALL, alone, base_model, is_same, shared_engine
from tests.parity.runs import own_name

pytestmark = pytest.mark.usefixtures("one_thread")


class Weighted:
    """Minus the sum of weighted log-probabilities."""

    reference: Reference | None = None

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def loss(self, scores: Scores) -> StepLoss:
        value = -self.weight * scores.policy_N.sum()
        return StepLoss(value=value, metrics={"num": torch.tensor(float(scores.num_rows))})


class Failing(Weighted):
    def loss(self, scores: Scores) -> StepLoss:
        raise ArithmeticError("no loss today")


def rows(seed: int, *lengths: int) -> list[dict[str, torch.Tensor]]:
    """Return rows whose labels are not their next inputs."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        ids, labels = (torch.randint(0, 64, (1, length), generator=generator) for _ in range(2))
        labels[:, : 1 + seed % 3] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


@contextmanager
def scheduler(**changes: Any) -> Iterator[Scheduler]:
    model = base_model()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    engine = shared_engine(model, num_slots=2)
    options = {"max_clients": 12, "max_rank": 16, "max_cached_tokens": 400} | changes
    try:
        yield Scheduler(engine, pattern="pattern", **options)
    finally:
        engine.detach()


def story(number: int) -> list[Any]:
    """Return the requests of a client: it trains, samples and trains, differently from others."""
    sample = Sample(
        prompt=[3 + number, 5, 9, 4][: 2 + number % 3],
        max_tokens=4 + number,
        num_answers=1 + number % 2,
        stop_ids=frozenset({7, 11}),
        seed=40 + number,
    )
    greedy = Sample(prompt=[2, 8 + number], max_tokens=3, seed=0, temperature=0.0)
    train = Train(rows=rows(number, 6 + number, 9, 4), objective=Weighted(0.1 + number))
    again = Train(rows=rows(10 + number, 7), objective=Weighted(0.3))
    step = Step(lr=0.01, max_grad_norm=0.5 if number % 2 else 0.0, weight_decay=0.1 * number)
    return [
        sample,
        train,
        again,
        step,
        sample,
        greedy,
        Score(rows=rows(20 + number, 5, 8), objective=Weighted(1.0)),
        train,
        Freeze(name=f"frozen_{number}"),
        step,
        train,
        sample,
        Save(),
    ]


def settings(number: int) -> AdapterSettings:
    return (SMALL, LARGE)[number % 2]


def plain(result: Any) -> Any:
    """Return a result as values that compare exactly."""
    if isinstance(result, torch.Tensor):
        return result.tolist()
    if isinstance(result, dict):
        return {key: plain(value) for key, value in result.items()}
    if isinstance(result, list | tuple):
        return [plain(one) for one in result]
    if hasattr(result, "__slots__"):
        names = [name for name in result.__slots__ if name != "num_loads"]
        return {name: plain(getattr(result, name)) for name in names}
    return result


def told(*numbers: int, interleaved: bool = True) -> dict[int, Any]:
    """Return what clients get whose requests come at once."""
    with scheduler() as one:
        futures: dict[int, list[Any]] = {number: [] for number in numbers}
        frozen = {}
        for number in numbers:
            one.add(f"client_{number}", settings(number), seed=number)
        stories = [(number, n, r) for number in numbers for n, r in enumerate(story(number))]
        if interleaved:
            stories.sort(key=lambda item: item[1])
        for number, _, request in stories:
            futures[number].append(one.submit(f"client_{number}", request))
            if isinstance(request, Freeze):
                frozen[number] = one.submit(request.name, story(number)[0])
        one.run_all()
        return {
            number: plain([future.result() for future in (*futures[number], frozen[number])])
            for number in numbers
        }


@pytest.mark.parametrize("num", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_move_clients_at_once_get_what_each_gets_alone(num: int) -> None:
    together = told(*range(num))
    for number in range(num):
        assert together[number] == told(number)[number]
    assert together[0][0] != together[0][4]  # it has learned


@pytest.mark.slow
def test_move_the_order_of_other_clients_requests_changes_nothing() -> None:
    assert told(0, 1) == told(1, 0, interleaved=False)


@pytest.mark.thorough
def test_move_chunks_of_a_request_add_up_to_the_whole() -> None:
    states = []
    for chunks in ([3], [1, 2], [1, 1, 1]):
        with scheduler() as one:
            one.add("a", LARGE, seed=0)
            left = rows(1, 9, 4, 6)
            for size in chunks:
                one.submit("a", Train(rows=left[:size], objective=Weighted(1.0)))
                left = left[size:]
            one.submit("a", Step(lr=0.01))
            state = one.submit("a", Save())
            one.run_all()
            states.append(state.result().values)
    assert is_same(states[1], states[0])
    assert is_same(states[2], states[0])


@pytest.mark.thorough
def test_reorder_a_client_learns_what_plain_transformers_does() -> None:
    own = SMALL
    with scheduler() as one:
        one.add("a", own, seed=5)
        first = one.submit("a", Save())
        trained = []
        for step in range(3):
            given = rows(step, 8, 5)
            trained.append(one.submit("a", Train(rows=given, objective=Weighted(0.5))))
            one.submit("a", Step(lr=0.01, max_grad_norm=0.2, weight_decay=0.1))
        last = one.submit("a", Save())
        one.run_all()
    model = alone(own)
    parameters = {
        own_name(name, "default"): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(first.result().values[name])
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=0.01, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1
    )
    for step in range(3):
        for n, row in enumerate(rows(step, 8, 5)):
            logits = model(input_ids=row["input_ids"]).logits[0, :-1]
            labels = row["labels"][0, 1:]
            kept = labels >= 0
            logps = torch.log_softmax(logits, -1)[kept].gather(1, labels[kept, None])[:, 0]
            found = trained[step].result().logprobs[n]
            torch.testing.assert_close(found, logps.detach(), rtol=2e-5, atol=2e-5)
            (-0.5 * logps.sum()).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
    for name, values in last.result().values.items():
        torch.testing.assert_close(values, parameters[name].detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.thorough
def test_move_answers_are_those_of_plain_transformers_with_the_weights_before_a_step() -> None:
    train, step = Train(rows=rows(1, 7, 5), objective=Weighted(1.0)), Step(lr=0.3)
    with scheduler() as one:
        one.add("a", LARGE, seed=0)
        for request in (train, step):
            one.submit("a", request)
        state = one.submit("a", Save())
        sample = Sample(prompt=[4, 9, 1], max_tokens=8, seed=0, temperature=0.0)
        answers = [one.submit("a", sample)]
        for request in (train, step):
            one.submit("a", request)
        answers.append(one.submit("a", sample))
        states = [state, one.submit("a", Save())]
        one.run_all()
    model, prompt = alone(LARGE), torch.tensor([[4, 9, 1]])
    for answer, values in zip(answers, states, strict=True):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(values.result().values[own_name(name, "default")])
        tokens = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert answer.result()[0].tokens == tokens[0, 3:].tolist()
    assert answers[0].result()[0].tokens != answers[1].result()[0].tokens


@pytest.mark.thorough
def test_move_scores_of_a_frozen_copy_are_those_of_training() -> None:
    given = rows(3, 9, 6)
    with scheduler() as one:
        one.add("a", LARGE, seed=0)
        one.submit("a", Train(rows=given, objective=Weighted(1.0)))
        one.submit("a", Step(lr=0.01))
        one.submit("a", Freeze(name="copy"))
        scored = one.submit("copy", Score(rows=given))
        trained = one.submit("a", Train(rows=given, objective=Weighted(1.0)))
        one.run_all()
    for found, expected in zip(scored.result().logprobs, trained.result().logprobs, strict=True):
        assert torch.equal(found, expected)
    assert scored.result().loss == 0
    assert trained.result().metrics == {"num": 2.0}


@pytest.mark.thorough
def test_move_a_client_goes_on_from_its_state() -> None:
    train, step = Train(rows=rows(1, 7, 5), objective=Weighted(1.0)), Step(lr=0.01)
    with scheduler() as one:
        one.add("a", SMALL, seed=0)
        for request in (train, step):
            one.submit("a", request)
        middle = one.submit("a", Save())
        for request in (train, step):
            one.submit("a", request)
        last = one.submit("a", Save())
        one.run_all()
        one.add("b", SMALL, seed=9)
        one.submit("b", train)  # its gradients are cleared
        one.submit("b", Load(state=middle.result()))
        for request in (train, step):
            one.submit("b", request)
        found = one.submit("b", Save())
        one.run_all()
    assert plain(found.result()) == plain(last.result())


@pytest.mark.slow
def test_a_pass_loads_layers_once_for_all_clients() -> None:
    counts = []
    for num in (1, 4):
        with scheduler() as one:
            for number in range(num):
                one.add(f"client_{number}", settings(number), seed=number)
                for request in story(number):
                    if not isinstance(request, Freeze | Sample):
                        one.submit(f"client_{number}", request)
                one.submit(f"client_{number}", Sample(prompt=[1, 2], max_tokens=5, seed=number))
            one.run_all()
            counts.append((one.num_passes, one.num_loads))
    assert counts[0] == counts[1]
    assert counts[0][0] == {"train": 4, "score": 1, "decode": 5}


# ---------------------------------------------------------------------------------- failures


def test_a_request_that_fails_harms_no_other() -> None:
    train = Train(rows=rows(2, 6, 4), objective=Weighted(1.0))
    sample = Sample(prompt=[4, 5], max_tokens=6, seed=1)
    results = []
    for has_others in (False, True):
        with scheduler() as one:
            one.add("a", SMALL, seed=0)
            one.add("b", LARGE, seed=0)
            failed = []
            for turn in range(2):
                one.submit("a", train)
                if has_others:
                    bad = Failing(1.0) if turn else Weighted(float("nan"))
                    failed.append(one.submit("b", Train(rows=rows(1, 5), objective=bad)))
                    failed.append(one.submit("b", Score(rows=rows(1, 5), objective=bad)))
                one.submit("a", Step(lr=0.01))
            last = [one.submit("a", sample), one.submit("a", Save())]
            step = one.submit("b", Step(lr=0.1))
            one.run_all()
            results.append(plain([future.result() for future in last]))
            kinds = [type(future.exception()) for future in failed]
            assert (
                kinds
                == [DivergedError, DivergedError, ArithmeticError, ArithmeticError][: len(failed)]
            )
            why = (
                "a request of 'b' to train on has failed" if has_others else "'b' has no gradients"
            )
            with pytest.raises(DataError, match=why):
                step.result()
    assert results[0] == results[1]


@pytest.mark.thorough
def test_a_step_that_lacks_rows_fails_and_the_next_is_that_of_its_own_rows() -> None:
    train, states = Train(rows=rows(2, 6), objective=Weighted(1.0)), []
    lost: list[Any] = [
        Train(rows=rows(1, 5), objective=Failing(1.0)),
        Train(rows=rows(1, 5), objective=Weighted(float("inf"))),
        Refused(error=DataError("such a row", hint="another")),
    ]
    for bad in (None, *lost):
        with scheduler() as one:
            one.add("a", SMALL, seed=0)
            before = [] if bad is None else [train, bad, train, Step(lr=0.01)]
            failed = [one.submit("a", request) for request in before]
            one.submit("a", train)
            one.submit("a", Step(lr=0.01))
            state = one.submit("a", Save())
            one.run_all()
            if failed:
                with pytest.raises(DataError, match="lack its rows, and are cleared"):
                    failed[-1].result()
            states.append(state.result().values)
    for state in states[1:]:
        assert is_same(state, states[0])


def test_a_put_adapter_answers_as_the_client_whose_values_it_has() -> None:
    sample = Sample(prompt=[4, 5], max_tokens=6, seed=1)
    with scheduler() as one:
        one.add("a", LARGE, seed=0)
        one.submit("a", Train(rows=rows(2, 6), objective=Weighted(1.0)))
        one.submit("a", Step(lr=0.1))
        state, wanted = one.submit("a", Save(has_moments=False)), one.submit("a", sample)
        one.run_all()
        assert not state.result().moments
        one.put("b", LARGE, state.result().values)
        found = one.submit("b", sample)
        refused = one.submit("b", Step(lr=0.1))
        misfit = one.put("c", SMALL, state.result().values)
        one.run_all()
        assert plain(found.result()) == plain(wanted.result())
        assert isinstance(refused.exception(), ConfigError)
        assert isinstance(misfit.exception(), OffloadError)
        assert one.adapters.names == ("a", "b")


def test_an_answer_ends_where_its_request_says() -> None:
    with scheduler() as one:
        one.add("a", SMALL, seed=0)
        whole = one.submit("a", Sample(prompt=[4, 5], max_tokens=6, seed=1))
        ended = one.submit(
            "a", Sample(prompt=[4, 5], max_tokens=6, seed=1, is_ended=lambda ids: len(ids) == 3)
        )
        one.run_all()
        assert whole.result()[0].is_cut
        assert not ended.result()[0].is_cut
        assert ended.result()[0].tokens == whole.result()[0].tokens[:3]


@pytest.mark.thorough
def test_gradients_of_a_pass_that_fails_halfway_are_undone() -> None:
    def fail(_gradient: torch.Tensor) -> None:
        raise ArithmeticError("in the first layer, which is the last to have its gradients")

    train, states = Train(rows=rows(2, 6, 5), objective=Weighted(1.0)), []
    for fails in (False, True):
        with scheduler() as one:
            one.add("a", SMALL, seed=0)
            one.add("b", SMALL, seed=0)
            one.submit("a", train)
            one.run_all()
            first = next(iter(one.adapters.parameters("b").values()))
            if fails:
                first.register_hook(fail)
            one.submit("a", train)
            failed = one.submit("b", train)
            one.submit("a", Step(lr=0.01))
            state = one.submit("a", Save())
            one.run_all()
            assert isinstance(failed.exception(), ArithmeticError) == fails
            assert first.grad is None or not fails
            states.append(state.result().values)
    assert is_same(states[1], states[0])


@pytest.mark.thorough
def test_answers_of_others_are_the_same_after_a_pass_that_failed() -> None:
    sample = Sample(prompt=[4, 5, 6], max_tokens=8, num_answers=2, seed=1)
    results = []
    for fails in (False, True):
        with scheduler() as one:
            one.add("a", SMALL, seed=0)
            one.add("b", LARGE, seed=0)
            first, other = one.submit("a", sample), one.submit("b", sample)
            for _ in range(3):
                one.run_pass()
            if fails:  # someone writes to the weights of b, whose caches are then stale
                with torch.no_grad():
                    for parameter in one.adapters.parameters("b").values():
                        parameter.add_(0.0)
            one.run_all()
            results.append(plain([first.result(), other.result()]))
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("request_", "error", "said"),
    [
        (Sample(prompt=[64], max_tokens=1, seed=0), offload.OffloadError, "64"),
        (Sample(prompt=[1], max_tokens=0, seed=0), ConfigError, "max_tokens is 0"),
        (Sample(prompt=[1], max_tokens=1, seed=0, temperature=-1.0), ConfigError, "temperature is"),
        (Sample(prompt=[1], max_tokens=400, seed=0), ConfigError, "400 tokens fit"),
        (
            Train(
                rows=[{k: v.repeat(2, 1) for k, v in rows(0, 4)[0].items()}], objective=Weighted(1)
            ),
            DataError,
            r"row 0 is \(2, 4\)",
        ),
        (Freeze(name="a"), ConfigError, "there is a client 'a' already"),
    ],
)
def test_requests_that_are_not_valid_fail_at_once(request_, error, said) -> None:
    with scheduler() as one:
        one.add("a", SMALL, seed=0)
        future = one.submit("a", request_)
        assert future.done()
        with pytest.raises(error, match=said):
            future.result()
        assert not one.submit("a", Save()).done()


@pytest.mark.thorough
def test_a_client_that_has_no_slot_fails_with_all_that_it_has_asked_for() -> None:
    with scheduler(max_clients=1) as one:
        first = one.add("a", SMALL, seed=0)
        added = one.add("b", SMALL, seed=0)
        asked = [
            one.submit("b", Freeze(name="c")),
            one.submit("c", Save()),
            one.submit("b", Save()),
        ]
        one.run_all()
        assert first.result() is None
        for future in (added, *asked):
            with pytest.raises(offload.OffloadError, match="all 1 slots of adapters are taken"):
                future.result()
        with pytest.raises(ConfigError, match="there is no client 'b'"):
            one.submit("b", Save())


@pytest.mark.thorough
def test_a_client_that_is_removed_leaves_the_others_as_they_are() -> None:
    with scheduler() as one:
        one.add("a", SMALL, seed=0)
        one.add("b", LARGE, seed=0)
        sample = Sample(prompt=[4, 5, 6], max_tokens=8, seed=1)
        kept, lost = one.submit("a", sample), one.submit("b", sample)
        waiting = one.submit("b", Step(lr=0.1))
        for _ in range(3):
            one.run_pass()
        removed = one.remove("b")
        with pytest.raises(ConfigError, match="there is no client 'b'"):
            one.submit("b", Save())
        one.run_all()
        assert removed.result() is None
        assert waiting.cancelled()
        with pytest.raises(CancelledError):
            lost.result()
        assert one.adapters.names == ("a",)
        expected = told_alone(sample)
        assert plain(kept.result()) == expected


def told_alone(sample: Sample) -> Any:
    with scheduler() as one:
        one.add("a", SMALL, seed=0)
        future = one.submit("a", sample)
        one.run_all()
        return plain(future.result())


@pytest.mark.thorough
def test_requests_from_other_threads_are_served_until_it_is_closed() -> None:
    sample = Sample(prompt=[4, 5, 6], max_tokens=8, seed=1)
    with scheduler(max_cached_tokens=12) as one:  # one request at a time
        one.add("a", SMALL, seed=0)
        results: list[Any] = []

        def ask() -> None:
            results.append(plain(one.submit("a", sample).result(timeout=60)))

        def serve_until_told() -> None:
            threads = [threading.Thread(target=ask) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            one.close()

        asking = threading.Thread(target=serve_until_told)
        asking.start()
        one.serve()
        asking.join()
    assert results == [told_alone(sample)] * 3
