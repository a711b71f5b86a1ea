"""A source's documents as tokens: each is made once and kept, whatever its rows hold."""
