"""``lightscale plan``: its module, and those of its options ``--nodes`` and ``--failures``."""
