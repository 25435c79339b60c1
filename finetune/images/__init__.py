"""Images of rows: computed once by the frozen tower, kept on disk, and then rows of a micro-batch.

An image's features take the places of tokens V, V + 1, ..., which the vocabulary of V tokens does
not have. So order, packing, comparison, resume and plan see rows of tokens, and nothing else.
"""
