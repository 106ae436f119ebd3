import itertools
import json
from collections import Counter

from lightscale.data_pipeline.preparation.tokenizer_sample import TextSample

TEXTS = {
    str(number): str(number % 10) * length
    for number, length in enumerate([100, 200_000, 5, 70_000, 1000, 66_000, 3, 300])
}


def sample(names: list[str], limit_bytes: int) -> TextSample:
    result = TextSample(limit_bytes)
    for name in names:
        result.add(name, TEXTS[name])
    return result


def test_the_sample_does_not_depend_on_the_order_of_the_documents() -> None:
    orders = list(itertools.islice(itertools.permutations(TEXTS), 0, None, 997))
    samples = [sample(list(order), 150_000).excerpts() for order in orders]
    assert len(samples) > 30
    assert all(excerpts == samples[0] for excerpts in samples)
    assert sum(len(text) for _, text in samples[0]) <= 150_000
    everything = sample(list(TEXTS), 10**9).excerpts()
    assert Counter("".join(text for _, text in everything)) == Counter("".join(TEXTS.values()))


def test_the_sample_of_samples_is_that_of_all() -> None:
    for cut in range(1, len(TEXTS)):
        names = list(TEXTS)
        merged = TextSample(150_000)
        for part in (names[:cut], names[cut:]):
            merged.merge(json.loads(json.dumps(sample(part, 150_000).as_json())))
        assert merged.excerpts() == sample(names, 150_000).excerpts()


def test_a_sample_is_never_empty_and_spreads_over_one_large_document() -> None:
    text = "".join(chr(0x4E00 + number) * 65_536 for number in range(20))
    tight, wide = TextSample(10), TextSample(5 * 3 * 65_536)
    for each in (tight, wide):
        each.add("large", text)
    assert len(tight.excerpts()) == 1
    assert len(wide.excerpts()) == len({block for _, block in wide.excerpts()}) == 5
    assert TextSample(10).excerpts() == []
