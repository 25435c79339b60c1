"""Turn a conversation into tokens, and mark those that are learned.

What is learned. The loss covers what the model must generate: each answer and the special token
that ends its turn (`<|im_end|>` in ChatML). Everything before an answer is its prompt and has no
loss. Text after the last end of turn (a newline in ChatML) is left out: nothing is learned from it.
`finetune.data.spans` finds where answers are.

Where an answer starts. It starts where the generation prompt for the turns before it ends; that
prompt must be a prefix of the whole rendering. Where a template has a variable that turns reasoning
off, answers without reasoning follow the prompt with it off. Qwen3's template has a trap: it writes
an empty think block before the last answer, and none before earlier ones. That block is part of the
prompt and has no loss, unless `data.empty_think` is `learn`. Two cases start from the prompt with
reasoning on: an answer with reasoning of its own, and earlier turns, whose think block the template
itself leaves out. A template for which no prefix fits is refused.

Which tokens. A rendering is tokenised once. If a token spans the start of the last answer, the two
sides are tokenised separately, so that the tokens before that answer are exactly those that the
model generates from. A token that spans the start of an earlier answer has no loss.

Rows that are too long are cut at `seq_len`, left out, or split into parts of `seq_len` tokens, of
which each begins with the last token of the one before, so that each token is predicted once.

Without a template (a base tokenizer) a row of one prompt and one answer is joined as is:
prompt + answer + end of text, with nothing in between.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from finetune.data.chat_template import NO_SETTINGS, Switch, refused, render, switch_of
from finetune.data.rows import (
    Compared,
    Conversation,
    Document,
    LossOn,
)
from finetune.data.spans import Rendering, Shapes, Span, render_answers
from finetune.data.turns import Message
from finetune.errors import DataError, RowError
from finetune.recipe.sections import EmptyThink

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from finetune.data.pictures.picture import Picture
    from finetune.data.top_tokens import TopTokens


def require_known_ids(
    ids: "Iterable[Sequence[int] | NDArray[Any]]",
    tokenizer: "PreTrainedTokenizerBase",
    num_tokens: int,
    *,
    where: str,
) -> None:
    """Check that a model has these tokens; most tokenizers have no others, so none is read.

    Args:
        ids: Pieces of them.
        tokenizer: Their tokenizer.
        num_tokens: Rows of the model's embedding.
        where: What has them, in errors.

    Raises:
        DataError: It lacks one.
    """
    if max(tokenizer.get_vocab().values(), default=0) < num_tokens:
        return
    highest = max((int(np.max(piece)) for piece in ids if len(piece)), default=0)
    if highest >= num_tokens:
        raise DataError(
            f"the token {tokenizer.convert_ids_to_tokens(highest)} has the number {highest:,}, and"
            f" the model has {num_tokens:,} tokens, from 0 ({where})",
            limit="each token of the tokenizer that is used is a row of the model's embedding",
            hint="take the model's own tokenizer (`model.tokenizer`), or enlarge the base once, by"
            " `model.resize_token_embeddings(len(tokenizer))` of transformers and"
            " `save_pretrained`",
        )


IGNORE_INDEX = -100
_READS_TEXT_ALONE = "it has images, and the model has no processor for them: it reads text alone"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Example:
    """The tokens of one row."""

    input_ids: "NDArray[np.int32]"  # the tokens, up to the end of the last answer
    # The tokens, not shifted, or -100 where there is no loss; in words with a class its number.
    labels: "NDArray[np.int32]"
    source: str  # the source of the row
    is_truncated: bool  # whether the row was cut at its right
    end_ids: tuple[int, ...] = ()  # the tokens that end its answers, of those that were not cut off
    # What a user should know of the prompts of what is learned: kinds of
    # `finetune.data.chat_template`.
    kinds: tuple[str, ...] = ()
    # The value of an answer that is compared with others, or the number of a text's class; else
    # None.
    value: float | None = None
    # Its log-probability by the reference, in nats; None where that is not known.
    reference: float | None = None
    # The log-probability that each token was sampled with, in nats, 0 where it was not; None where
    # that is not known.
    logprobs: "NDArray[np.float32] | None" = None
    # A teacher's likeliest tokens at each label; None where there is no teacher.
    top: "TopTokens | None" = None
    # Key and number of tokens of each image, in order; its tokens are those of the model's image
    # token.
    images: tuple[tuple[bytes, int], ...] = ()

    @property
    def num_loss_tokens(self) -> int:
        """Count the tokens that have a loss; the first token of a row is never predicted."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


TooLong = Literal["drop", "truncate", "split", "error"]


class Fate(IntEnum):
    """What became of a row."""

    WHOLE = 0
    CUT = 1
    NOTHING_LEFT = 2
    """It was cut, and its answers start beyond `seq_len`."""
    TOO_LONG = 3
    """It is longer than `seq_len`, and left out or refused."""
    NOT_TRAINED = 4
    """None of its turns is to be learned."""
    SPLIT = 5
    ALIKE = 6
    """Its answers were cut, and what is left of them is the same."""
    CUT_IMAGE = 7
    """It is longer than `seq_len`, and an image would be cut or left out of a part."""


class Imaging(Protocol):
    """What makes tokens of the images of rows."""

    @property
    def digest(self) -> str:
        """Digest of all that the tokens of an image depend on."""

    @property
    def image_id(self) -> int:
        """The token in the place of each row of features."""

    @property
    def silent_ids(self) -> frozenset[int]:
        """Tokens of images and around them, which have no loss."""

    def expanded(
        self, rendering: Rendering, pictures: "Sequence[Picture]", *, source: str
    ) -> tuple[Rendering, tuple[tuple[bytes, int], ...]]:
        """Return a text with the tokens of its images, and key and number of tokens of each.

        Raises:
            RowError: An image cannot be used, or the text has another number of places for them.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """How rows become tokens."""

    # Fast, with a template unless rows are documents, or one prompt and one answer.
    tokenizer: "PreTrainedTokenizerBase"
    seq_len: int  # most tokens of an example
    loss_on: LossOn  # what is learned
    too_long: TooLong  # what is done with rows of more tokens
    empty_think: EmptyThink  # whether an empty think block is of the prompt, or learned
    imaging: Imaging | None = None  # for rows with images; None where the model sees none
    _shapes: Shapes = field(init=False)

    def __post_init__(self) -> None:
        """Learn of the template, which must write a block where one is to be learned."""
        shapes = Shapes(tokenizer=self.tokenizer, empty_think=self.empty_think)
        object.__setattr__(self, "_shapes", shapes)
        if self.empty_think == "learn" and (
            shapes.switch is None or shapes.switch.default is False
        ):
            raise DataError(
                "data.empty_think is learn, and the chat template has no empty think block that"
                " servers leave out by default",
                limit="a block is learned where turning reasoning off adds it to the prompt",
                hint="`data.empty_think: prompt`",
            )

    @property
    def switch(self) -> Switch | None:
        """The template's variable for reasoning."""
        return self._shapes.switch

    def encode(self, row: Conversation) -> tuple[Fate, list[Example]]:
        """Tokenise a row, and mark what is learned; several examples if it was split.

        Raises:
            DataError: The template cannot render the row, or the start or end of an answer cannot
                be found in the rendering.
        """
        learned = row.learned(self.loss_on)
        renderings = _render(row, self._shapes)  # checks all answers, learned or not
        if self.loss_on == "all":
            renderings = renderings[-1:]
        else:
            renderings = tuple(r for r in renderings if any(s.turn in learned for s in r.spans))
        wholes = [self._whole(rendering, learned, row) for rendering in renderings]
        if not any(whole.num_loss_tokens for whole in wholes):
            return Fate.NOT_TRAINED, []
        is_long = any(len(whole.input_ids) > self.seq_len for whole in wholes)
        if is_long and self.too_long in ("drop", "error"):
            return Fate.TOO_LONG, []
        if any(self._cuts_image(whole) for whole in wholes):
            return Fate.CUT_IMAGE, []
        if is_long and self.too_long == "split":
            return Fate.SPLIT, [p for w in wholes for p in self._parts(w) if p.num_loss_tokens]
        cut = [next(self._parts(whole)) for whole in wholes]
        kept = [example for example in cut if example.num_loss_tokens]
        if not kept:
            return Fate.NOTHING_LEFT, []
        return Fate.CUT if is_long else Fate.WHOLE, kept

    def document(self, row: Document) -> tuple[Fate, list[Example]]:
        """Tokenise a document, all of which is learned.

        Raises:
            DataError: The tokenizer has no end-of-text token.
        """
        ids = self.document_ids(row)
        one = Example(input_ids=ids, labels=ids, source=row.source, is_truncated=False)
        return Fate.WHOLE, [one]

    def answers(self, row: Compared) -> tuple[Fate, list[Example]]:
        """Tokenise answers to one prompt; what befalls one of them befalls the row.

        Raises:
            RowError: The template writes the turns of an answer apart from each other.
            DataError: As `encode`.
        """
        return encode_answers(row, self)

    def document_ids(self, document: Document) -> "NDArray[np.int32]":
        """Return a document's tokens: its beginning where the tokenizer adds one, text, its end.

        Raises:
            DataError: The tokenizer has no end-of-text token.
        """
        if self.tokenizer.eos_token is None:
            raise DataError(
                f"the tokenizer has no end-of-text token to end {document.source} with",
                limit="documents are joined with that token between them",
                hint="set `model.tokenizer` to one that has it",
            )
        text = _bos(self.tokenizer) + document.text
        ids = [*_ids(text, self.tokenizer), self.tokenizer.eos_token_id]
        return np.array(ids, dtype=np.int32)

    def last(self, row: Conversation) -> Example:
        """Tokenise the text that ends with a row's last answer, cut at `seq_len`.

        Raises:
            DataError: As `encode`.
        """
        rendering = _render(row, self._shapes)[-1]
        return next(self._parts(self._whole(rendering, row.learned(self.loss_on), row)))

    def _whole(self, rendering: Rendering, learned: set[int], row: Conversation) -> "_Whole":
        """Tokenise a rendering; its ends are those of all answers, learned or not."""
        images = tuple[tuple[bytes, int], ...]()
        pictures = row.images_until(rendering.spans[-1].turn)
        if pictures:
            rendering, images = require_imaging(self.imaging).expanded(
                rendering, pictures, source=row.source
            )
        spans = rendering.spans
        ids, answers, images_at = _tokenise(rendering, self.tokenizer, source=row.source)
        input_ids = np.array(ids, dtype=np.int32)
        labels = np.full_like(input_ids, IGNORE_INDEX)
        taken = [span for span in spans if span.turn in learned] if self.loss_on != "all" else []
        parts = [part for part, span in zip(answers, spans, strict=True) if span in taken]
        for tokens in [range(len(ids))] if self.loss_on == "all" else parts:
            labels[tokens.start : tokens.stop] = input_ids[tokens.start : tokens.stop]
        for tokens in images_at:
            labels[tokens.start : tokens.stop] = IGNORE_INDEX
        if images:
            labels[np.isin(input_ids, [*require_imaging(self.imaging).silent_ids])] = IGNORE_INDEX
        return _Whole(
            input_ids=input_ids,
            labels=labels,
            source=row.source,
            ends=tuple(tokens[-1] for tokens in answers),
            kinds=tuple(dict.fromkeys(kind for span in taken for kind in span.kinds)),
            images=images,
        )

    def _cuts_image(self, whole: "_Whole") -> bool:
        """Return whether an example of a row would have a part of its images."""
        if not whole.images or len(whole.input_ids) <= self.seq_len:
            return False
        places = np.flatnonzero(whole.input_ids == require_imaging(self.imaging).image_id)
        return self.too_long == "split" or bool(places[-1] >= self.seq_len)

    def _parts(self, whole: "_Whole") -> Iterator[Example]:
        """Give the parts of an example that are of at most `seq_len` tokens.

        A part begins with the last token of the one before: no token's loss is lost between them.
        """
        length = len(whole.input_ids)
        for start in range(0, max(1, length - 1), max(1, self.seq_len - 1)):
            part = slice(start, start + self.seq_len)
            labels = whole.labels[part]
            if start:  # learned in the part before
                labels = np.concatenate([[IGNORE_INDEX], labels[1:]]).astype(np.int32)
            yield Example(
                input_ids=whole.input_ids[part],
                labels=labels,
                source=whole.source,
                is_truncated=length > self.seq_len and self.too_long == "truncate",
                end_ids=tuple(int(whole.input_ids[e]) for e in whole.ends if start < e < part.stop),
                kinds=whole.kinds,
                images=whole.images,
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Whole:
    """The tokens of a text, before they are cut; `ends` are the places of its answers' ends.

    `kinds` are those of its examples.
    """

    input_ids: "NDArray[np.int32]"
    labels: "NDArray[np.int32]"
    source: str
    ends: tuple[int, ...]
    kinds: tuple[str, ...]
    images: tuple[tuple[bytes, int], ...]

    @property
    def num_loss_tokens(self) -> int:
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


def require_imaging(imaging: Imaging | None) -> Imaging:
    """Return what makes tokens of images.

    Raises:
        RowError: The model takes none.
    """
    if imaging is None:
        raise RowError(_READS_TEXT_ALONE)
    return imaging


def encode(
    conversation: Conversation,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seq_len: int,
    loss_on: LossOn,
) -> Example:
    """Tokenise a conversation and mark what is learned; truncate to `seq_len` on the right.

    Only the text that ends with the last answer, if the template takes several.

    Raises:
        DataError: The template cannot render the row, or the start or end of an answer cannot be
            found in the rendering.
    """
    encoder = Encoder(
        tokenizer=tokenizer,
        seq_len=seq_len,
        loss_on=loss_on,
        too_long="truncate",
        empty_think="prompt",
    )
    return encoder.last(conversation)


class PromptImages(Protocol):
    """The images of prompts, which have features."""

    def ids_of(self, text: str, pictures: "Sequence[Picture]", *, source: str) -> list[int]:
        """Return the tokens of a text with images, those of each by its own numbers.

        Args:
            text: As the chat template writes it.
            pictures: Its images, in order.
            source: The row, for errors.

        Raises:
            RowError: An image cannot be used, or the text has another number of places for them.
        """


def render_prompt(
    conversation: Conversation,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    empty_think: EmptyThink,
    images: PromptImages | None = None,
) -> tuple[tuple[int, ...], str, str]:
    """Return the tokens before the last answer, that answer, and what the template was given.

    What it was given is a setting such as `enable_thinking=False`; "" where that is the default.

    Raises:
        RowError: The row has images that cannot be used, or there are no `images`.
    """
    shapes = Shapes(tokenizer=tokenizer, empty_think=empty_think)
    last = _render(conversation, shapes)[-1]
    answers = [message.content for message in conversation.messages if message.role == "assistant"]
    span, switch = last.spans[-1], shapes.switch
    values = [value for value in (False, True) if switch and switch.kind(value=value) in span.kinds]
    given = f"{switch.name}={values[0]}" if switch and values else ""
    pictures, source = conversation.images_until(span.turn), conversation.source
    ids = _prompt_ids(last.text[: span.start], pictures, tokenizer, images, source=source)
    return ids, answers[-1], given


def prompt_ids(
    messages: Sequence[Message],
    tokenizer: "PreTrainedTokenizerBase",
    *,
    source: str,
    empty_think: EmptyThink,
    images: PromptImages | None = None,
) -> tuple[int, ...]:
    """Return the tokens from which the model answers `messages`, as rows without reasoning do.

    Raises:
        RowError: They have images that cannot be used, or there are no `images`.
    """
    pictures = [picture for message in messages for picture in message.images]
    if tokenizer.chat_template is None:
        text = _plain_prompt(messages, tokenizer, source=source)
    else:
        switch = switch_of(tokenizer)
        is_off = switch is not None and empty_think == "prompt"
        settings = switch.settings(value=False) if switch and is_off else NO_SETTINGS
        text = render(messages, tokenizer, source=source, is_prompt=True, settings=settings)
    return _prompt_ids(text, pictures, tokenizer, images, source=source)


def _prompt_ids(
    text: str,
    pictures: "Sequence[Picture]",
    tokenizer: "PreTrainedTokenizerBase",
    images: PromptImages | None,
    *,
    source: str,
) -> tuple[int, ...]:
    """Return the tokens of a prompt with the images of its turns."""
    if not pictures:
        return tuple(_ids(text, tokenizer))
    if images is None:
        raise RowError(_READS_TEXT_ALONE)
    return tuple(images.ids_of(text, pictures, source=source))


def _render(conversation: Conversation, shapes: Shapes) -> tuple[Rendering, ...]:
    """Return texts that end with an answer, and the span of each answer that is learned."""
    tokenizer = shapes.tokenizer
    if tokenizer.chat_template is not None:
        return render_answers(conversation, shapes)
    source, messages = conversation.source, conversation.messages
    has_more = any(turn.calls or turn.thought or turn.images for turn in messages)
    if conversation.tools or has_more:
        raise DataError(
            f"{source} has tools, reasoning or images, and the tokenizer has no chat template",
            limit="a template says how they are written",
            hint="set `model.tokenizer` to the instruct model's tokenizer, which has a template",
        )
    last = max(i for i, message in enumerate(messages) if message.role == "assistant")
    prompt = _plain_prompt(messages[:last], tokenizer, source=source)
    text = prompt + messages[last].content + str(tokenizer.eos_token)
    span = Span(turn=last, start=len(prompt), end=len(text), end_token=str(tokenizer.eos_token))
    return (Rendering(text=text, spans=(span,)),)


def _plain_prompt(
    messages: Sequence[Message], tokenizer: "PreTrainedTokenizerBase", *, source: str
) -> str:
    """Join system prompt and prompt for a tokenizer without a template."""
    users = [message.content for message in messages if message.role == "user"]
    system = [message.content + "\n\n" for message in messages if message.role == "system"]
    if len(users) != 1 or len(users) + len(system) != len(messages) or tokenizer.eos_token is None:
        raise DataError(
            f"{source} has {len(messages)} turns before its last answer,"
            f" and the tokenizer has no chat template (end of text: {tokenizer.eos_token})",
            limit="without a template a row is one prompt, one answer and the end-of-text token",
            hint="set `model.tokenizer` to the instruct model's tokenizer, which has a template",
        )
    return _bos(tokenizer) + "".join(system) + users[0]


def _bos(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Return the beginning-of-text token if the tokenizer puts it before a text by itself."""
    first = tokenizer("")["input_ids"]
    return str(tokenizer.bos_token) if first and first[0] == tokenizer.bos_token_id else ""


def _ids(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Tokenise text that already holds its special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _tokenise(
    rendering: Rendering, tokenizer: "PreTrainedTokenizerBase", *, source: str
) -> tuple[list[int], list[range], list[range]]:
    """Return the tokens of a rendering, and which are of each answer and of each image."""
    text, spans = rendering.text, rendering.spans
    cut = spans[-1].start
    ids, offsets = _ids_and_offsets(text, tokenizer)
    if any(start < cut < end for start, end in offsets):
        whole = str(tokenizer.decode(ids))
        ids, offsets = _ids_and_offsets(text[:cut], tokenizer)
        answer_ids, answer_offsets = _ids_and_offsets(text[cut:], tokenizer)
        ids += answer_ids
        offsets += [(cut + start, cut + end) for start, end in answer_offsets]
        if tokenizer.decode(ids) != whole:
            raise refused("puts an answer where the tokenizer cannot split the text", source=source)
    starts = [start for start, _ in offsets]

    def tokens(start: int, end: int) -> range:
        return range(bisect_left(starts, start), bisect_left(starts, end))

    learned = [tokens(span.start, span.end) for span in spans]
    for span, own in zip(spans, learned, strict=True):
        end_id = tokenizer.convert_tokens_to_ids(span.end_token)
        if not own or ids[own[-1]] != end_id:
            raise refused(f"ends an answer with {span.end_token}, no single token", source=source)
    return ids, learned, [tokens(*place) for place in rendering.silent]


def _ids_and_offsets(
    text: str, tokenizer: "PreTrainedTokenizerBase"
) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokenise text; also return the range of characters that each token covers."""
    check_is_fast(tokenizer)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(encoded["input_ids"]), list(encoded["offset_mapping"])


def check_is_fast(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Refuse a tokenizer that does not report the character offsets of its tokens."""
    if not tokenizer.is_fast:
        raise DataError(
            f"the tokenizer {type(tokenizer).__name__} does not tell where its tokens lie",
            limit="the loss mask needs a tokenizer with offsets (`is_fast`)",
            hint="set `model.tokenizer` to a folder that has a tokenizer.json",
        )


# ---------------------------------------------------------------------------------------------
# Answers of one row: what befalls one of them befalls the row.


def encode_answers(row: Compared, encoder: Encoder) -> tuple[Fate, list[Example]]:
    """Tokenise a row; what befalls one of its answers befalls the row.

    Raises:
        RowError: The template writes the turns of an answer apart from each other.
        DataError: As `Encoder.encode`.
    """
    fates, examples = list[Fate](), list[Example]()
    nothing = (None,) * len(row.values)
    known = zip(
        row.values,
        row.references or nothing,
        row.logprobs or nothing,
        row.teacher or nothing,
        strict=True,
    )
    for conversation, (value, reference, drawn, top) in zip(row.conversations, known, strict=True):
        fate, parts = encoder.encode(conversation)
        if len(parts) > 1:
            raise RowError(
                "the template writes earlier turns of an answer otherwise once later ones follow:"
                " leave one turn in each answer, and make the others the prompt"
            )
        if fate is Fate.CUT and reference is not None:
            raise RowError(
                f"an answer has the reference's log-probability, and is cut to {encoder.seq_len}"
                " tokens"
            )
        fates.append(fate)
        for one in parts:
            is_cut = fate is Fate.CUT
            logprobs = None if drawn is None else _at_labels(drawn, one, is_cut=is_cut)
            if row.is_rated:
                one = replace(one, labels=_last_alone(one.labels))
            teacher = None if top is None else _top_at_labels(top, one, is_cut=is_cut)
            examples.append(
                replace(one, value=value, reference=reference, logprobs=logprobs, top=teacher)
            )
    worst = max(fates)
    if worst not in (Fate.WHOLE, Fate.CUT):
        return worst, []
    if worst is Fate.CUT and len(examples) > 1 and _are_alike(examples):
        return Fate.ALIKE, []
    return worst, examples


def _last_alone(labels: "NDArray[np.int32]") -> "NDArray[np.int32]":
    """Return labels of which only that of the last token is left, which ends an answer."""
    assert labels[-1] != IGNORE_INDEX, "a row ends with the answer, and was not cut"
    last = np.full_like(labels, IGNORE_INDEX)
    last[-1] = labels[-1]
    return last


def _at_labels(drawn: Sequence[float], example: Example, *, is_cut: bool) -> "NDArray[np.float32]":
    """Put the log-probabilities of an answer's tokens where the tokens are.

    Raises:
        RowError: Their numbers differ.
    """
    places = _places(example, len(drawn), "`logprobs`", is_cut=is_cut)
    found = np.zeros(len(example.labels), dtype=np.float32)
    found[places] = drawn[: len(places)]
    return found


def _top_at_labels(top: "TopTokens", example: Example, *, is_cut: bool) -> "TopTokens":
    """Put a teacher's likeliest tokens where the tokens of an answer are.

    Raises:
        RowError: Their numbers differ.
    """
    places = _places(example, len(top.counts), "lists of `top_ids`", is_cut=is_cut)
    return top.at(places, len(example.labels))


def _places(example: Example, num: int, what: str, *, is_cut: bool) -> "NDArray[np.int64]":
    """Return the places of an answer's tokens, of which a row has so many.

    Raises:
        RowError: The answer has another number of them.
    """
    places = np.flatnonzero(example.labels != IGNORE_INDEX)
    if num != len(places) and not (is_cut and num > len(places)):
        raise RowError(
            f"it has {num} {what} for an answer of {len(places)} tokens, its end included"
        )
    return places


def _are_alike(examples: list[Example]) -> bool:
    return len({one.input_ids.tobytes() for one in examples}) == 1
