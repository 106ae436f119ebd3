"""Uses of a trained model: validation, evaluation, generation, prediction."""
