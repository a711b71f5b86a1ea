"""A conversation as text: a chat template, what the model writes of it, and where it may be cut."""
