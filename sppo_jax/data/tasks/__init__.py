"""Tasks whose answers lie in a long context: samples as text, fitted to a length in tokens."""
