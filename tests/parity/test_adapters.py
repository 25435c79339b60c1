"""Adapters that come and go while a model is attached, next to those that were there before."""

import gc
import weakref

import pytest
import torch

import offload
from offload.engine.adapters import AdapterSettings
from offload.engine.passes.part import RunStep
from offload.engine.shared import Asked
from tests.parity.clients import LARGE, SMALL, alone, attached, is_same, values_of
from tests.parity.generations import generated, prompts
from tests.parity.runs import engine_of, rows

pytestmark = pytest.mark.usefixtures("one_thread")


def steps(engine, adapter: str, parameters, num: int = 3) -> list[float]:
    """Take steps of plain AdamW; return their losses."""
    optimizer, losses = torch.optim.AdamW(parameters, lr=0.01), []
    for step in range(num):
        run = RunStep(micro_batches=rows(step, 9, 5), adapter=adapter)
        losses.append(engine.forward_backward_runs([run])[0].loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("settings", [SMALL, LARGE])
def test_move_an_adapter_that_was_added_learns_as_one_that_was_there(settings) -> None:
    with attached() as (engine, adapters):
        adapters.add("other", LARGE if settings is SMALL else SMALL, seed=1)
        steps(engine, "other", adapters.parameters("other").values(), num=1)
        adapters.add("late", settings, seed=7)
        first = adapters.values("late")
        adapters.copy("other", "snapshot")
        losses = steps(engine, "late", adapters.parameters("late").values())
        adapters.remove("other")
        losses += steps(engine, "late", adapters.parameters("late").values())
        found = adapters.values("late")
    model = alone(settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "default" in name.split("."):
                parameter.copy_(first[name.replace(".default", "")])
    own = engine_of(model)
    trained = list(own.trained_parameters.values())
    expected = steps(own, "default", trained) + steps(own, "default", trained)
    assert losses == expected
    assert is_same(found, values_of(model, "default"))
    assert not is_same(found, first)
    own.close()


@pytest.mark.thorough
def test_initial_values_depend_on_the_seed_alone() -> None:
    with attached() as (_, adapters):
        adapters.add("a", LARGE, seed=3)
        adapters.add("b", SMALL, seed=3)
        found = adapters.values("b")
        adapters.add("c", SMALL, seed=4)
        assert not is_same(adapters.values("c"), found)
    torch.manual_seed(99)
    with attached() as (_, adapters):
        state = torch.random.get_rng_state()
        adapters.add("first", SMALL, seed=3)
        assert torch.equal(torch.random.get_rng_state(), state)
        assert is_same(adapters.values("first"), found)
    of_a = {name: x for name, x in found.items() if "lora_A" in name}
    assert all(0.8 < x.abs().max() * x.shape[1] ** 0.5 <= 1 for x in of_a.values())
    assert not any(x.any() for name, x in found.items() if name not in of_a)


@pytest.mark.thorough
def test_one_that_was_removed_leaves_memory_and_its_name() -> None:
    with attached() as (engine, adapters):
        adapters.add("a", SMALL, seed=0)
        steps(engine, "a", adapters.parameters("a").values(), num=1)
        before = sum(p.nbytes for p in engine.resident_parameters.values())
        adapters.add("b", LARGE, seed=0)
        steps(engine, "b", adapters.parameters("b").values(), num=1)
        held = [weakref.ref(parameter) for parameter in adapters.parameters("b").values()]
        size = adapters.num_bytes("b")
        assert sum(p.nbytes for p in engine.resident_parameters.values()) == before + size
        assert 4 * size <= adapters.slot_bytes == adapters.reserved_bytes // 4
        adapters.remove("b")
        gc.collect()
        assert sum(p.nbytes for p in engine.resident_parameters.values()) == before
        assert not [one for one in held if one() is not None]
        assert adapters.names == ("a",)
        adapters.add("b", SMALL, seed=0)  # other linears, under the same name
        losses = steps(engine, "b", adapters.parameters("b").values())
    with attached() as (engine, adapters):
        adapters.add("b", SMALL, seed=0)
        assert steps(engine, "b", adapters.parameters("b").values()) == losses


@pytest.mark.thorough
def test_move_a_frozen_copy_keeps_what_was_copied_and_ends_with_its_removal() -> None:
    with attached() as (engine, adapters):
        adapters.add("a", LARGE, seed=0)
        steps(engine, "a", adapters.parameters("a").values(), num=2)
        with engine.using("a"), engine.generation() as generation:
            expected = generated(generation, prompts())
        adapters.copy("a", "frozen")
        values = adapters.values("a")
        steps(engine, "a", adapters.parameters("a").values(), num=1)
        with engine.using("frozen"), engine.generation() as generation:
            found = generated(generation, prompts())
        for group, (logits_BTV, _) in expected.items():
            assert torch.equal(found[group][0], logits_BTV)
        assert not any(p.requires_grad for p in adapters.parameters("frozen").values())
        with engine.using("frozen"):
            generation = engine.generation()
            generation.next_logits(prompts())
        adapters.load("a", values)
        assert is_same(adapters.values("a"), adapters.values("frozen"))
        adapters.remove("frozen")
        adapters.copy("a", "frozen")
        with (
            engine.using("frozen"),
            pytest.raises(offload.OffloadError, match="parameters or the adapter changed"),
        ):
            generation.next_logits({0: prompts()[0][:, :1]})


@pytest.mark.thorough
def test_move_one_pass_gives_generations_of_several_adapters_what_each_has_alone() -> None:
    with attached() as (engine, adapters):
        adapters.add("a", LARGE, seed=0)
        adapters.add("b", SMALL, seed=1)
        adapters.add("c", LARGE, seed=2)  # both it and a are on the head
        for name in adapters.names:
            steps(engine, name, adapters.parameters(name).values(), num=2)
        of_alone, num_loads = {}, 0
        for name in adapters.names:
            with engine.using(name), engine.generation() as generation:
                of_alone[name] = generated(generation, prompts())
                num_loads = generation.num_loads
        begun = {}
        for name in adapters.names:
            with engine.using(name):
                begun[name] = engine.generation()
        given = {name: prompts() for name in adapters.names}
        found: dict[str, dict[int, list[torch.Tensor]]]
        found = {name: {group: [] for group in prompts()} for name in given}
        for _ in range(6):
            asked = [
                Asked(adapter=name, generation=begun[name], tokens=tokens)
                for name, tokens in given.items()
            ]
            for one, logits in zip(asked, engine.joined_logits(asked), strict=True):
                for group, logits_BV in logits.items():
                    found[one.adapter][group].append(logits_BV)
                given[one.adapter] = {g: x.argmax(-1, keepdim=True) for g, x in logits.items()}
        for name, answers in of_alone.items():
            for group, (logits_BTV, _) in answers.items():
                assert torch.equal(torch.stack(found[name][group], 1), logits_BTV)
            assert begun[name].num_loads == num_loads
        assert not torch.equal(of_alone["a"][0][0], of_alone["b"][0][0])


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("a", SMALL, "there is an adapter 'a' already"),
        ("lora_A", SMALL, "an adapter is to be named 'lora_A'"),
        ("b.c", SMALL, r"an adapter is to be named 'b\.c'"),
        (
            "b",
            AdapterSettings(rank=17, alpha=1.0, targets=SMALL.targets),
            r"the rank of 'b' is 17; slots were declared for ranks of 1 to 16",
        ),
        (
            "b",
            AdapterSettings(rank=1, alpha=1.0, targets=frozenset({"q_prj"})),
            r"'b' is to be on q_prj; slots were declared for adapters on down_proj, gate_proj",
        ),
        ("b", SMALL, "all 1 slots of adapters are taken"),
    ],
)
def test_adapters_that_fit_no_slot_are_refused(name, settings, said) -> None:
    with attached(max_adapters=1) as (engine, adapters):
        adapters.add("a", SMALL, seed=0)
        with pytest.raises(offload.OffloadError, match=said):
            adapters.add(name, settings, seed=0)
        steps(engine, "a", adapters.parameters("a").values(), num=1)


@pytest.mark.thorough
def test_adapters_are_not_changed_while_the_engine_computes() -> None:
    class Adding:
        reference = None

        def loss(self, scores):
            adapters.add("b", SMALL, seed=0)

    with attached() as (engine, adapters):
        adapters.add("a", SMALL, seed=0)
        run = RunStep(micro_batches=rows(0, 5), adapter="a", objective=Adding())
        said = "adapters are changed while the engine computes"
        with pytest.raises(offload.OffloadError, match=said):
            engine.forward_backward_runs([run])
        with engine.using("a"), pytest.raises(offload.OffloadError, match=said):
            adapters.remove("a")
        with pytest.raises(offload.OffloadError, match="there is no adapter 'b'"):
            adapters.remove("b")
        values = adapters.values("a")
        with pytest.raises(offload.OffloadError, match="differ from it in 1 tensors, such as"):
            adapters.load("a", dict(list(values.items())[1:]))
