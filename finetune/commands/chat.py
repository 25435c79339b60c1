"""A conversation with a finished run's model, and with its base next to it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.commands.trained_model import Prepared, TrainedModel
from finetune.data.pictures.picture import PLACE, Picture
from finetune.data.turns import Message
from finetune.errors import ConfigError
from finetune.model.tokenizer import Choose
from offload.errors import SluiceError

RESET, END, IMAGE = "/reset", "/exit", "/image"
HELP = f"{END} or Ctrl-D ends the conversation, {RESET} forgets it."
HELP_OF_IMAGES = f"{HELP} {IMAGE} PATH shows an image with what you say next."


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A message with the image that it is about, which is answered if the image can be seen."""

    said: str  # the message
    image: Picture  # what it is about


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat:
    """How a conversation is held."""

    max_new_tokens: int  # longest answer
    # Returns what chooses the tokens of an answer, from the beginning of its random numbers.
    chooser: Callable[[], Choose]
    has_base: bool  # whether the base answers too, the same turns; its answers are not remembered
    say: Callable[[str], None]  # prints a piece of text, which may be a part of a line
    note: Callable[[str], None]  # reports what the user should know

    def hold(self, run_dir: Path, lines: Iterable[str | Shown]) -> None:
        """Answer each line, with all turns before it.

        Args:
            run_dir: Of a finished run.
            lines: What the user says.

        Raises:
            CheckpointError: The directory holds no run.
            ConfigError: The base is to answer, and the run has trained its weights.
            ModelError: The run has no adapter yet.
        """
        prepared = Prepared.of(run_dir, note=self.note)
        if self.has_base and prepared.recipe.train.is_full:
            raise ConfigError(
                f"--compare, and {run_dir} trained the model's own weights",
                limit="an adapter that is switched off leaves the base",
                hint="leave `--compare` out",
            )
        try:
            prepared, blind = prepared.seeing(), ""
        except SluiceError as error:
            blind = f"{error.what}: {error.limit}."
        shown_help = HELP if blind else HELP_OF_IMAGES
        turns, seen = list[Message](), list[Picture]()
        with prepared.attached(note=self.note) as model:
            self.note(shown_help)
            for line in lines:
                if isinstance(line, Shown):
                    self._answer_shown(prepared, model, turns, line, blind=blind)
                    continue
                said = line.strip()
                if said == END:
                    break
                if said == RESET:
                    turns.clear()
                    seen.clear()
                elif file := _file_in(said):
                    self._look(prepared, seen, Path(file), blind=blind)
                elif said.startswith("/") and said[1:].isalpha():
                    self.note(shown_help)
                elif said:
                    self._answer(prepared, model, turns, said, seen)

    def _look(
        self, prepared: Prepared, seen: list[Picture], image: Path | Picture, *, blind: str
    ) -> bool:
        """Add an image to those of a message, or note why it cannot be seen.

        Args:
            prepared: The run.
            seen: The images of the message.
            image: The image, or its file.
            blind: Why the model sees none; empty if it does.
        """
        if blind:
            self.note(blind)
            return False
        try:
            seen.append(prepared.shown(image))
        except SluiceError as error:
            self.note(f"{error.what}; {error.hint}.")
            return False
        if isinstance(image, Path):
            self.note(f"{image} is shown with what you say next.")
        return True

    def _answer_shown(
        self,
        prepared: Prepared,
        model: TrainedModel,
        turns: list[Message],
        shown: Shown,
        *,
        blind: str,
    ) -> None:
        """Answer a message about an image, if that can be seen."""
        own = list[Picture]()
        if self._look(prepared, own, shown.image, blind=blind):
            self._answer(prepared, model, turns, shown.said, own)

    def _answer(
        self,
        prepared: Prepared,
        model: TrainedModel,
        turns: list[Message],
        said: str,
        seen: list[Picture],
    ) -> None:
        """Answer a line with images and remember all; what is too long is not remembered."""
        content = PLACE * len(seen) + said
        asked = [*turns, Message(role="user", content=content, images=tuple(seen))]
        try:
            prompt = prepared.ids_of(asked, source="the conversation")
            num_new = max(1, min(self.max_new_tokens, prepared.most_new(len(prompt))))
            prepared.require_room(len(prompt), num_new)
        except SluiceError as error:
            self.note(f"{error.what}: {error.limit}. {RESET} forgets what was said before.")
            return
        if self.has_base:
            self._spoken(model, prompt, num_new, name="base", is_base=True)
        name = "adapter" if self.has_base else None
        answer = self._spoken(model, prompt, num_new, name=name, is_base=False)
        turns[:] = [*asked, Message(role="assistant", content=answer)]
        seen.clear()

    def _spoken(
        self,
        model: TrainedModel,
        prompt: Sequence[int],
        num_new: int,
        *,
        name: str | None,
        is_base: bool,
    ) -> str:
        """Print an answer as it comes, and return it."""
        said = ""

        def heard(text: str) -> None:
            nonlocal said
            # a character of several tokens ends in this mark until all are there
            if text.startswith(said) and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                self.say(text[len(said) :])
                said = text

        if name is not None:
            self.say(f"{name}: ")
        answer = model.answer(
            prompt,
            max_new_tokens=num_new,
            choose=self.chooser(),
            is_base=is_base,
            heard=heard,
        )
        self.say(f"{answer[len(said) :]}\n")
        return answer


def _file_in(said: str) -> str:
    """Return the file of an image that a line shows; "" if it shows none."""
    word, _, file = said.partition(" ")
    return file.strip() if word == IMAGE else ""
