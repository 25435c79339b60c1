"""The commands as they are typed: their arguments, and the printing of what they answer."""
