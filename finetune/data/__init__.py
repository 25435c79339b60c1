"""From sources of rows to micro-batches: formats, templates, loss masks, token stores, steps."""
