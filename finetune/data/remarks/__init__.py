"""What a user should know about the rows of a run: counted, and the first ones named."""
