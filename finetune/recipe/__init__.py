"""What the user wants: fields, defaults and limits, read from YAML with all problems at once."""
