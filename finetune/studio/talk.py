"""A conversation with a finished run, in a process of its own that holds the model.

`sluice chat` is what the process does. One conversation is held at a time: another run's begins in
a new process. It ends with the server, as it holds nothing that would be lost.
"""

import threading
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from finetune.errors import RowError, StudioError
from finetune.processes import prepare_worker, process_context, signals_deferred
from finetune.studio.launcher import started
from offload.errors import SluiceError

if TYPE_CHECKING:
    from finetune.data.pictures.picture import Picture

MOST_TOKENS = 256  # longest answer
MAX_IMAGE_BYTES = 2**23  # size of a file that is attached
Part = tuple[Literal["say", "note", "problem", "end"], str]
Asked = tuple[str, "Picture | None"]  # a message, and the image that it is about


class Talk:
    """The conversation that is held, if one is."""

    def __init__(self, folder: Path) -> None:
        """Hold none yet."""
        self._folder, self._name = folder, ""
        self._process: SpawnProcess | None = None
        self._is_answering = threading.Lock()

    def answer(self, name: str, said: str, image: str | None = None) -> Generator[Part, None, None]:
        """Give the parts of an answer as they come.

        Args:
            name: A run's, which is checked to be in the folder.
            said: Message of the user, or `/reset`.
            image: An image that the message is about, as a `data:` URI.

        Raises:
            StudioError: A run is at work, or the image is not one that is read.
        """
        if said.strip().startswith("/image"):
            raise StudioError(
                "`/image` names a file",
                limit="the page reads no files but runs and recipes",
                hint=f"attach the image to the message, or `sluice chat {self._folder / name}` in a"
                " terminal",
            )
        picture = None if image is None else _picture(image)
        now = started(self._folder)
        if now is not None:
            raise StudioError(
                f"{now.name} is at work",
                limit="a run is planned for all of the card and the RAM",
                hint="stop it or wait for it",
            )
        return self._parts(name, (" ".join(said.split("\n")), picture))

    def end(self) -> None:
        """End the conversation, so that a run has all of the card.

        Raises:
            StudioError: An answer is on its way.
        """
        if not self._is_answering.acquire(blocking=False):
            raise StudioError(
                f"{self._name} is answering",
                limit="a run is planned for all of the card and the RAM",
                hint="wait for the end of the answer",
            )
        try:
            self.close()
        finally:
            self._is_answering.release()

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None

    def _parts(self, name: str, asked: Asked) -> Generator[Part, None, None]:
        if not self._is_answering.acquire(blocking=False):
            yield "problem", f"{self._name} is answering: one conversation is held at a time"
            return
        is_whole = False
        try:
            if self._process is None or not self._process.is_alive() or name != self._name:
                self.close()
                self._start(name)
                yield from self._heard()  # until the model is loaded
            if self._process is not None:
                self._pipe.send(asked)
                yield from self._heard()
            is_whole = True
        finally:
            if not is_whole:  # the page is gone: nobody reads the rest
                self.close()
            self._is_answering.release()

    def _heard(self) -> Generator[Part, None, None]:
        kind = ""
        try:
            while kind != "end":
                part: Part = self._pipe.recv()
                kind = part[0]
                if kind != "end":
                    yield part
                if kind == "problem":
                    self.close()
                    return
        except (EOFError, ConnectionError):
            yield "problem", "the process that answers has died: it needs memory for the model"
            self.close()

    def _start(self, name: str) -> None:
        context = process_context()
        self._pipe, its_end = context.Pipe()
        self._name = name
        self._process = context.Process(target=_converse, args=(its_end, self._folder / name))
        with signals_deferred():
            self._process.start()
        its_end.close()


def _picture(image: str) -> "Picture":
    """Return the image of a `data:` URI; it is decoded by the process that answers.

    Raises:
        StudioError: It is another kind of file, or broken.
    """
    from finetune.data.pictures.references import read_base64

    try:
        return replace(read_base64(image), name="that is attached")
    except RowError as error:
        raise StudioError(
            str(error), limit="the page sends what its browser has read", hint="attach another file"
        ) from error


def _converse(pipe: "Connection[Part, Asked]", run_dir: Path) -> None:
    prepare_worker()
    from finetune.commands.chat import Chat, Shown
    from finetune.model.tokenizer import chosen_by

    def lines() -> "Iterator[str | Shown]":
        while True:
            pipe.send(("end", ""))
            said, image = pipe.recv()
            yield said if image is None else Shown(said=said, image=image)

    chat = Chat(
        max_new_tokens=MOST_TOKENS,
        chooser=lambda: chosen_by(temperature=0.0, top_k=None, top_p=None, seed=None),
        has_base=False,
        say=lambda text: pipe.send(("say", text)),
        note=lambda text: pipe.send(("note", text)),
    )
    with suppress(EOFError, ConnectionError):  # the server has ended
        try:
            chat.hold(run_dir, lines())
        except SluiceError as error:
            pipe.send(("problem", str(error)))
