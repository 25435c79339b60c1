"""From a row of JSONL to micro-batches: formats, chat templates, loss masks, steps."""
