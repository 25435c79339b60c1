"""Documents to continue pretraining on."""

from finetune.data.rows import Document
from finetune.data.turns import text
from finetune.recipe.extensions import DataFormat

EXTENSION = DataFormat(
    summary="a document: documents are joined and cut, and all of them is learned",
    columns=("text",),
    read=lambda row, form, source, unused: Document.read(
        text(row, form.column("text")), source, unused
    ),
    is_document=True,
)
