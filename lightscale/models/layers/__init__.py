"""What all mixers and the language model are built from."""
