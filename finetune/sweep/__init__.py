"""Several runs over one stream of their base: which they are, their directory, and how they end."""
