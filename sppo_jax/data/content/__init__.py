"""What a file's rows hold: text, conversations or tokens, and which keys say what is learned."""
