"""Layers that all mixers and the language model share."""
