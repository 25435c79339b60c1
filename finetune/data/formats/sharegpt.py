"""ShareGPT's chats, with `from` and `value`."""

from finetune.data.formats._chat import read_chat
from finetune.recipe.extensions import DataFormat, Turns

EXTENSION = DataFormat(
    summary="a chat, as turns with `from` and `value`",
    columns=("conversations",),
    optional=("tools", "system", "images", "image"),
    read=read_chat,
    turns=Turns(
        keys=("from", "value"),
        unlearned=("system", "human", "user", "observation", "tool"),
        foreign="role",
    ),
)
