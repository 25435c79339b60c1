"""What a base is by its name."""

from finetune.scoring.scorer import base_to_score


def test_a_shape_by_name_is_its_published_model() -> None:
    subject = base_to_score("qwen3-8b", [])
    assert subject.recipe.model.path == "Qwen/Qwen3-8B"
    assert base_to_score("Qwen/Qwen3-8B", []).recipe == subject.recipe
