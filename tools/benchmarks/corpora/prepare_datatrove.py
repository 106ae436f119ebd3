"""datatrove's side of ``prepare.py``: read, filter, near-duplicates, tokenize, with its own steps.

python tools/benchmarks/corpora/prepare_datatrove.py OUT WORKERS PARTS TOKENIZER.json
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashes import xxhash as datatrove_xxhash
from datatrove.utils.hashing import HashConfig
from loguru import logger
from xxhash import xxh64_intdigest

# Its fast hash hands text to xxhash, which takes only bytes from version 4 on.
datatrove_xxhash.xxhash64 = lambda text: xxh64_intdigest(text.encode())


def main() -> None:
    """Run the five steps one after the other."""
    logger.remove()
    out, workers, parts, tokenizer = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    filtered, signatures, buckets, removed = (
        str(out / name) for name in ("filtered", "signatures", "buckets", "removed")
    )
    config = MinhashConfig(
        n_grams=5, num_buckets=14, hashes_per_bucket=8, hash_config=HashConfig(precision=64, hash_fc="xxhash")
    )

    def execute(name: str, pipeline: list[object], tasks: int) -> None:
        LocalPipelineExecutor(
            pipeline=pipeline,
            tasks=tasks,
            workers=min(workers, tasks),
            logging_dir=str(out / "logs" / name),
            start_method="fork",
        ).run()

    filters = [GopherRepetitionFilter(), GopherQualityFilter(), FineWebQualityFilter(char_duplicates_ratio=0.1)]
    execute("filter", [JsonlReader(parts), *filters, JsonlWriter(filtered, compression=None)], workers)
    execute("signatures", [JsonlReader(filtered), MinhashDedupSignature(signatures, config=config)], workers)
    execute("buckets", [MinhashDedupBuckets(signatures, buckets, config=config)], config.num_buckets)
    execute("cluster", [MinhashDedupCluster(buckets, removed, config=config)], 1)
    tokenize = DocumentTokenizer(str(out / "tokens"), tokenizer, eos_token="<|endoftext|>", shuffle_documents=False)
    execute("tokenize", [JsonlReader(filtered), MinhashDedupFilter(removed), tokenize], workers)
    documents = sum(path.stat().st_size // 8 for path in (out / "tokens").glob("*.index"))
    tokens = sum(path.stat().st_size // 4 for path in (out / "tokens").glob("*.ds"))
    print(json.dumps({"kept_documents": documents, "tokens": tokens}))


if __name__ == "__main__":
    main()
