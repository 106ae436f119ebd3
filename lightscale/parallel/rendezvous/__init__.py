"""How the ranks of a run meet: the store that they share, and where it listens."""
