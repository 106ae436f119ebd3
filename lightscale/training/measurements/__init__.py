"""What a step measures of itself beside its loss."""
