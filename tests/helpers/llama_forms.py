"""Options of LLaMA with everything in which later models of its type differ from the first one. Loaded by path."""

from typing import Any

GROUPED: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 10,
    "rope_theta": 500.0,
    "attention_bias": "all",
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}
"""For eight heads of queries, on up to four tensor ranks."""
OPTIONS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "qk_norm": "head",
    "zero_centered_norm": True,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "window": 20,
    "attention_logit_cap": 4.0,
    "attention_sinks": True,
    "output_gate": True,
}
"""What hybrids have, all at once."""
