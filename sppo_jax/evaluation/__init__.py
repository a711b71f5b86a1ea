"""What a model finds and uses in its context: losses by position, and scores of tasks at lengths."""
