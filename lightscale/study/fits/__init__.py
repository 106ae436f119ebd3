"""Laws from points (N, D, C, loss): power laws, the envelope of curves, isoFLOP parabolas, E + A/N^α + B/D^β."""
