"""Steps of whole matrices, of which ranks hold parts."""
