"""Random changes of training images, a function of (seed, turn); README.md in this folder."""
