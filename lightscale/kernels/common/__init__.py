"""Code that all operators share: document boundaries, the dtype of states, and checks of arguments."""
