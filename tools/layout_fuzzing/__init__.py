"""Random models on random layouts, each against one process: what tools/fuzz_layouts.py is made of."""
