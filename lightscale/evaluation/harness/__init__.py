"""Evaluation by EleutherAI's lm-evaluation-harness (lm-eval): its tasks here, and our models there."""
