"""The Hugging Face hub: which commit of a repository is read, what it holds, and its files."""
