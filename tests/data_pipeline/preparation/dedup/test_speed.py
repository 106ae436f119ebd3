"""How fast signatures are, beside datasketch on the same shingles: printed, and held by a generous limit."""

import re
import sysconfig
import time
import zlib
from pathlib import Path
from statistics import median

import datasketch
import numpy as np
import pytest

from lightscale.data_pipeline.preparation.dedup import NUM_HASHES, band_keys, document_key, signatures


@pytest.mark.long
def test_signatures_are_many_times_faster_than_datasketch() -> None:
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    documents = [
        np.array([zlib.crc32(token.encode()) for token in re.findall(r"\w+|[^\w\s]", text)], dtype=np.uint32)
        for text in texts
    ]
    num_bytes, num_tokens = sum(len(text.encode()) for text in texts), sum(map(len, documents))

    def ours() -> None:
        band_keys(signatures(documents))

    def theirs() -> None:
        for ids in documents[::20]:
            minhash = datasketch.MinHash(num_perm=NUM_HASHES)
            windows = np.lib.stride_tricks.sliding_window_view(ids, 5)
            minhash.update_batch([window.tobytes() for window in windows])

    def exact() -> None:
        for text in texts:
            document_key(text)

    seconds = {}
    for name, work in (("ours", ours), ("theirs", theirs), ("exact", exact)):
        times = []
        for _ in range(5):
            start = time.thread_time()
            work()
            times.append(time.thread_time() - start)
        seconds[name] = median(times)
    share = sum(map(len, documents[::20])) / num_tokens
    ratio = seconds["theirs"] / share / seconds["ours"]
    print(
        f"\nsignatures and bands {num_bytes / seconds['ours'] / 1e6:.0f} MB/s, "
        f"{seconds['ours'] / num_tokens * 1e9:.0f} ns a token, {ratio:.1f} times datasketch; "
        f"exact keys {num_bytes / seconds['exact'] / 1e6:.0f} MB/s"
    )
    assert ratio > 4
