"""From files to token stores, and from stores to batches."""
