"""Filter: which documents to keep, by named rules with limits for each language.

The README beside this file lists every rule with its limits, source and effect.
"""

from lightscale.data_pipeline.preparation.filters.compose import STEPS, Chain, compose, sha256_of, with_base
from lightscale.data_pipeline.preparation.filters.filter import LANGUAGES, RULE_SETS, Filter, make_filter
from lightscale.data_pipeline.preparation.filters.judgement import Judgement, Step
from lightscale.data_pipeline.preparation.filters.presets import PRESETS
from lightscale.data_pipeline.preparation.filters.rules import RULES, Rule
from lightscale.data_pipeline.preparation.filters.thresholds import THRESHOLDS

__all__ = [
    "LANGUAGES",
    "PRESETS",
    "RULES",
    "RULE_SETS",
    "STEPS",
    "THRESHOLDS",
    "Chain",
    "Filter",
    "Judgement",
    "Rule",
    "Step",
    "compose",
    "make_filter",
    "sha256_of",
    "with_base",
]
