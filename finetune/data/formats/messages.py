"""Chats with `role` and `content`."""

from finetune.data.formats._chat import read_chat
from finetune.recipe.extensions import DataFormat, Turns

EXTENSION = DataFormat(
    summary="a chat, as turns with `role` and `content`",
    columns=("messages",),
    optional=("tools", "system", "images", "image"),
    read=read_chat,
    turns=Turns(
        keys=("role", "content"),
        unlearned=("system", "developer", "user", "tool"),
        foreign="from",
    ),
)
