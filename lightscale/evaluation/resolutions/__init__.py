"""Accuracy, speed and memory of image classifiers over image sizes."""
