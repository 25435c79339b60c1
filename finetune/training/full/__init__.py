"""The update of a model whose own weights train and are streamed, by one process or several."""
