"""Stores of text that is made up by a rule, for tasks whose right answers are known: one file for each generator."""
