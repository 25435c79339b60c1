"""An answer from a finished run, without training anything."""

from collections.abc import Callable, Sequence
from pathlib import Path

from finetune.commands.trained_model import Prepared
from finetune.data.pictures.picture import PLACE
from finetune.data.turns import Message
from finetune.model.tokenizer import Choose


def answer_prompt(
    run_dir: Path,
    prompt: str,
    *,
    images: Sequence[Path] = (),
    max_new_tokens: int,
    choose: Choose,
    stop_strings: Sequence[str],
    note: Callable[[str], None],
) -> str:
    """Let the trained model answer, its layers streamed as in training.

    Args:
        run_dir: Of a finished run.
        prompt: The user's message.
        images: Files of images, which come before it.
        max_new_tokens: Longest answer.
        choose: Chooses the next tokens.
        stop_strings: Texts that end the answer; they are not part of it.
        note: Reports what the user should know about the adapter, or the model's cache.

    Raises:
        CheckpointError: The directory holds no run.
        ModelError: The run has no adapter yet, or its model sees no images.
        ConfigError: The model was made for fewer positions, or an image is missing.
        DataError: An image cannot be used.
        DoesNotFitError: The key-value cache does not fit into device memory.
    """
    prepared = Prepared.of(run_dir, note=note)
    if images:
        prepared = prepared.seeing()
    pictures = tuple(map(prepared.shown, images))
    said = Message(role="user", content=PLACE * len(pictures) + prompt, images=pictures)
    asked = prepared.ids_of([said], source="--prompt")
    prepared.require_room(len(asked), max_new_tokens)
    with prepared.attached(note=note) as model:
        return model.answer(
            asked, max_new_tokens=max_new_tokens, choose=choose, stop_strings=stop_strings
        )
