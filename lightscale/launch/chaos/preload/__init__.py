"""A library that is loaded before the C library, through which surroundings go wrong without a trace in the program."""
