"""Deduplicate: exact copies by XXH3-128 of the text, near copies by MinHash over 5-grams of token ids.

The README beside this file describes the method, its results and its memory.
"""

from lightscale.data_pipeline.preparation.dedup.clusters import (
    begins_of_keys,
    find_pairs,
    merge_pairs,
    pairs_of,
    range_bounds,
)
from lightscale.data_pipeline.preparation.dedup.key_files import FAN_IN, merge_key_files, read_ranges
from lightscale.data_pipeline.preparation.dedup.minhash import (
    NUM_BANDS,
    NUM_HASHES,
    ROWS_PER_BAND,
    SHINGLE_TOKENS,
    band_keys,
    signatures,
)
from lightscale.data_pipeline.preparation.dedup.records import (
    document_key,
    records_of,
    write_band_records,
    write_exact_records,
)

__all__ = [
    "FAN_IN",
    "NUM_BANDS",
    "NUM_HASHES",
    "ROWS_PER_BAND",
    "SHINGLE_TOKENS",
    "band_keys",
    "begins_of_keys",
    "document_key",
    "find_pairs",
    "merge_key_files",
    "merge_pairs",
    "pairs_of",
    "range_bounds",
    "read_ranges",
    "records_of",
    "signatures",
    "write_band_records",
    "write_exact_records",
]
