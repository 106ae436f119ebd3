"""What a null run recorded, and what follows from it."""
