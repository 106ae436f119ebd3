"""Filter: which documents to keep, by named rules with limits for each language.

The README beside this file lists every rule with its limits, source and effect.
"""

from lightscale.data_pipeline.preparation.filters.filter import LANGUAGES, Filter, make_filter
from lightscale.data_pipeline.preparation.filters.rules import RULES, Rule
from lightscale.data_pipeline.preparation.filters.thresholds import THRESHOLDS

__all__ = ["LANGUAGES", "RULES", "THRESHOLDS", "Filter", "Rule", "make_filter"]
