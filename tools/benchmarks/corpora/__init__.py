"""What prepares and loads corpora, timed."""
