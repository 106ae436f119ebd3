"""What all operators share: document boundaries, the dtype of states, and checks of their arguments."""
