"""Text to tokens and back, tokens in files, and the bit that says that a token is not learned."""
