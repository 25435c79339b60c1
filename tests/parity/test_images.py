"""Images of rows: from features that were computed once, what plain transformers gives for pixels.

The tower of the model that is streamed is without values. All is compared in float64.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

import offload
from finetune.errors import DataError, ModelError
from finetune.images.features import Features
from finetune.images.front import ARGUMENTS, EXACT_TYPES, require_exact
from offload.engine.generation import Generation
from offload.engine.model.layers import LayeredModel
from offload.engine.tracing.visits import trace_visits
from tests.parity.architectures import PACKED_FP64, Gradients, gradients, rel_error
from tests.parity.generations import attached
from tests.parity.image_cases import Batch, Case, case_of, packed, padded, types
from tests.parity.images import (
    FAMILIES,
    IMAGE,
    plain_inputs,
    plain_step,
)

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_LAYERS = 4
APART = ("glm5_next", "mistral_large4")  # whose layers are passed values by others
SEEN = 1e-3  # relative: what a mistake changes gradients by, at least


def batches(case: Case, *, is_packed: bool) -> list[Batch]:
    if is_packed:
        return [packed(case, case.rows[:3]), packed(case, case.rows[3:])]
    return [padded(case, case.rows[n : n + 2]) for n in (0, 2, 4)]


def step(
    case: Case, *, is_packed: bool = False, num_slots: int = 2, **options: Any
) -> tuple[float, Gradients]:
    model = copy.deepcopy(case.model)
    engine = offload.attach(model, num_slots=num_slots, device="cpu", **options)
    try:
        loss = engine.forward_backward(batches(case, is_packed=is_packed)).loss
        return loss, gradients(model)
    finally:
        engine.detach()


def plain_of(case: Case, model_type: str, **changes: Any) -> tuple[float, Gradients]:
    return plain_step(case.plain, FAMILIES[model_type], case.images, case.rows, **changes)


# ------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("model_type", types("gemma3", "mistral3", "qwen3_vl"))
def test_reorder_images_as_features_have_the_gradients_of_pixels(model_type: str) -> None:
    case = case_of(model_type)
    plain_loss, reference = plain_of(case, model_type)
    for is_packed in (False, True):
        loss, ours = step(case, is_packed=is_packed)
        assert rel_error(ours, reference) <= PACKED_FP64
        assert loss == pytest.approx(plain_loss, rel=PACKED_FP64)


def test_reorder_embeddings_with_an_adapter_have_the_gradients_of_pixels() -> None:
    case = case_of("qwen3_vl", "embed_tokens")
    _, reference = plain_of(case, "qwen3_vl")
    assert any("lora_embedding" in name for name in reference)
    assert rel_error(step(case)[1], reference) <= PACKED_FP64


def test_types_that_take_images_are_those_that_are_compared() -> None:
    assert set(FAMILIES) == EXACT_TYPES
    with pytest.raises(ModelError, match="rows with images for a llama4 model"):
        require_exact("llama4")


WAYS: Mapping[str, dict[str, Any]] = {
    "resident": {"num_slots": NUM_LAYERS},
    "embedding on the host": {"embeddings": "host"},
    "inputs on the host": {"stash": "host"},
}


@pytest.mark.thorough
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_move_no_bit_depends_on_where_things_are(way: str, *, is_packed: bool) -> None:
    case = case_of("qwen3_vl")
    loss, reference = step(case, is_packed=is_packed)
    other_loss, ours = step(case, is_packed=is_packed, **WAYS[way])
    assert other_loss == loss
    assert all(torch.equal(ours[name], reference[name]) for name in reference)


@pytest.mark.parametrize("model_type", types("gemma4", "qwen2_5_vl", "qwen3_vl"))
def test_rows_with_images_are_computed_together_where_others_are(model_type: str) -> None:
    case = case_of(model_type)
    layered = LayeredModel(case.model)
    found = []
    for rows in (case.rows, [row for row in case.rows if not row.images]):
        batch = packed(case, rows)
        del batch["labels"]
        found.append([call.together is not None for call in layered.front(batch).packed])
    assert found[0] == found[1]
    assert all(found[0]) or model_type in APART


# ------------------------------------------------------------------------ what the comparison sees


def turned(features: Features) -> Features:
    assert features.grid is not None
    frames, rows, columns = features.grid
    return replace(features, grid=(frames, columns, rows))


MISTAKES: Mapping[str, Callable[[Features], Features]] = {
    "a row too late": lambda x: replace(x, rows_ND=x.rows_ND.roll(1, 0)),
    "another layer's": lambda x: replace(x, layers=x.layers[::-1]),
    "a grid with other sides": turned,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_one_image_is_seen(mistake: str) -> None:
    case = case_of("qwen3_vl")
    case.features[1] = MISTAKES[mistake](case.features[1])
    _, reference = plain_of(case, "qwen3_vl")
    assert rel_error(step(case, is_packed=True)[1], reference) > SEEN


@pytest.mark.parametrize(
    ("model_type", "types"), [("gemma3", "token_type_ids"), ("gemma4", "mm_token_type_ids")]
)
def test_a_causal_mask_within_images_would_be_seen(model_type: str, types: str) -> None:
    case = case_of(model_type)
    _, reference = plain_of(case, model_type, without=[types])
    assert rel_error(step(case)[1], reference) > SEEN


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_vl"])
def test_the_rest_of_a_cut_image_has_features_and_counts_as_text(model_type: str) -> None:
    case = case_of(model_type)
    arguments: Any = getattr(case.model.get_base_model(), ARGUMENTS)  # type: ignore[operator]
    ids_1T = torch.tensor([case.ids(case.rows[0])[5:]])  # of image 0, without its first token
    given = arguments({"input_ids": ids_1T})
    features = given["mm_encoder_outputs"]["image"].pooler_output
    assert torch.equal(torch.cat(features), case.features[0].rows_ND[1:])
    types = given.get("token_type_ids", given.get("mm_token_type_ids"))
    assert not types.any()
    if model_type == "qwen3_vl":
        assert torch.equal(given["position_ids"], torch.arange(8).expand(4, 1, -1))
        assert torch.equal(
            given["added_features"].of_layer(1)[0, :3], case.features[0].layers[1][1:]
        )


def test_an_image_next_to_itself_is_two_and_another_after_it_a_third() -> None:
    case = case_of("gemma3")
    arguments: Any = getattr(case.model.get_base_model(), ARGUMENTS)  # type: ignore[operator]
    four_T = torch.arange(4)
    ids_1T = case.first_id + torch.cat([four_T, four_T, 4 + four_T])[None]
    given = arguments({"input_ids": ids_1T})
    features = given["mm_encoder_outputs"]["image"].pooler_output
    expected = [case.features[number].rows_ND for number in (0, 0, 1)]
    assert all(map(torch.equal, features, expected))
    assert given["token_type_ids"].all()
    assert (given["input_ids"] == IMAGE).all()


def test_a_text_with_the_image_token_next_to_an_image_is_refused() -> None:
    case = case_of("gemma3")
    arguments: Any = getattr(case.model.get_base_model(), ARGUMENTS)  # type: ignore[operator]
    ids_1T = torch.tensor([[*range(case.first_id, case.first_id + 4), IMAGE]])
    with pytest.raises(DataError, match="a text has the token"):
        arguments({"input_ids": ids_1T})
    assert arguments({"input_ids": ids_1T[:, 4:]})["input_ids"].tolist() == [[IMAGE]]


def test_a_trace_of_memory_reads_no_image() -> None:
    case = case_of("qwen3_vl")
    case.features.clear()
    traced = [
        trace_visits(
            model,
            batch_size=2,
            seq_len=16,
            is_padded=True,
            head_chunk_tokens=8,
            capability=None,
        )
        for model in (case.model, case.plain)
    ]
    assert traced[0].visits == traced[1].visits


# -------------------------------------------------------------------------------------- generation

NUM_TOKENS = 6


def generated(
    generation: Generation, tokens_BT: torch.Tensor, padding_B: torch.Tensor
) -> list[list[int]]:
    found, padding = [], {0: padding_B}
    for _ in range(NUM_TOKENS):
        logits_BV = generation.next_logits({0: tokens_BT}, padding=padding)[0]
        logits_BV[:, IMAGE] = -torch.inf  # which no answer has
        tokens_BT = logits_BV.argmax(-1)[:, None]
        found.append(tokens_BT)
        padding = {}
    return torch.cat(found, dim=1).tolist()


@pytest.mark.parametrize("model_type", types("gemma3", "mistral3", "qwen3_5", "qwen3_vl"))
def test_answers_to_images_are_those_of_the_plain_model(model_type: str) -> None:
    case = case_of(model_type)
    plain: Any = case.plain.get_base_model()  # type: ignore[operator]
    expected = []
    for row in case.rows:
        inputs = plain_inputs(plain, FAMILIES[model_type], case.images, row)
        with torch.no_grad():
            ids_1T = plain.generate(
                **inputs,
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                suppress_tokens=[IMAGE],
            )
        expected.append(ids_1T[0, len(row.tokens) :].tolist())
    base: Any = case.model.get_base_model()  # type: ignore[operator]
    base.model.rope_deltas = torch.tensor([[7]])  # of another batch
    width = max(len(row.tokens) for row in case.rows)
    padding_B = torch.tensor([width - len(row.tokens) for row in case.rows])
    ids = [[0] * (width - len(row.tokens)) + case.ids(row) for row in case.rows]
    with attached(case.model) as engine:
        with engine.generation() as generation:
            assert generated(generation, torch.tensor(ids), padding_B) == expected
        with engine.generation() as generation:
            generation.next_logits({0: torch.tensor([case.ids(case.rows[1])])})
            generation.repeat(0, 2)
            first_BT = torch.tensor([[expected[1][0]]] * 2)
            later = generated(generation, first_BT, torch.zeros(2))
    assert [row[:-1] for row in later] == [expected[1][1:]] * 2


def test_an_image_after_tokens_in_a_cache_is_refused() -> None:
    case = case_of("qwen3_vl")
    with attached(case.model) as engine, engine.generation() as generation:
        generation.next_logits({0: torch.tensor([[20, 21, 22]])})
        with pytest.raises(DataError, match="after the first tokens"):
            generation.next_logits({0: torch.tensor([case.ids(case.rows[0])])})
