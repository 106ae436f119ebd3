"""Conversations: their shapes in files, templates that make texts of them, and the tokens that count for the loss."""
