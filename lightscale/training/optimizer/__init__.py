"""The optimizers by name. One is a spec without torch: planning reads it too, and no other part of training."""
