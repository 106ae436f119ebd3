"""A model that answers: log-likelihoods of token ids, and text, on any layout."""
