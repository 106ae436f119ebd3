"""What a model is trained to predict, one file for each task; README.md in this folder."""
