"""What ``tools/bench.py`` measures, a file for each benchmark or for what several share."""
