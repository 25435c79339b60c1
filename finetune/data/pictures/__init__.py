"""Images of rows: how rows name them, where they are, and their pixels."""
