"""lightscale's side of ``prepare.py``: read, filter, tokenize, duplicates, store, in a process of its own.

python tools/benchmarks/corpora/prepare_lightscale.py OUT WORKERS PARTS [--gigatoken]
"""

import functools
import json
import sys
from pathlib import Path

if "--gigatoken" not in sys.argv:
    # As where it is not installed: tiktoken encodes. Workers import this file too, so that it holds for them.
    sys.modules["gigatoken"] = None  # type: ignore[assignment]

from lightscale.data_pipeline.executors import ProcessPool
from lightscale.data_pipeline.preparation.corpus import make_corpus
from lightscale.data_pipeline.preparation.prepare import PrepareOptions, prepare


def main() -> None:
    """Prepare a store of the files in PARTS."""
    out, workers, parts = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    # datatrove's side has no such rule.
    source = {"paths": [parts], "language": "en", "filters": {"lorem_ipsum": False}}
    corpus = make_corpus({"tokenizer": "tiktoken:cl100k_base", "sources": {"text": source}}, origin="benchmark")
    report = prepare(
        corpus, out / "store", PrepareOptions(make_executor=functools.partial(ProcessPool, num_workers=workers))
    )
    kept = report["corpus"]["text"]["stages"]["write"]["train"]["documents"]
    print(json.dumps({"kept_documents": kept, "tokens": report["sources"]["text"]["tokens"]}))


if __name__ == "__main__":
    main()
