"""Estimates of a preparation: tokens, disk and time on one host; hours, memory and opens on many."""
