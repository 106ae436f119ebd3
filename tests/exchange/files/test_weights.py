"""Shipped runs can be exported, but those of pairs: the plain model has a place for each parameter, of its shape."""

from pathlib import Path

import pytest

from lightscale.config import shipped
from lightscale.config.files import load
from lightscale.config.schema import RunConfig
from lightscale.errors import UserError
from lightscale.exchange.files.weights import exported_tensors, run_shape, tensor_shapes
from lightscale.models.accounting import parameter_shapes


def check(config: RunConfig) -> None:
    model = config.model
    shape, found = run_shape(config, num_ids=model.vocab_size - 1), set()
    sizes, rows = tensor_shapes(shape), exported_tensors(model, vocab_size=shape.vocab_size)
    stored = parameter_shapes(model)
    assert rows.keys() == sizes.keys()
    for name, part in rows.items():
        whole = stored[part.key]
        held = whole[0] if part.ranges is None else sum(stop - start for start, stop in part.ranges)
        assert (held, *whole[1:]) == sizes[name], name
        found.add(part.key)
    assert found == stored.keys()


@pytest.mark.parametrize("name", shipped.run_names())
def test_a_shipped_run(name: str) -> None:
    config = load(shipped.shipped_file(name))
    if config.model.head is not None and config.model.head.pairs:
        # transformers' models of a label read one text.
        with pytest.raises(UserError, match=r"model\.head\.pairs"):
            check(config)
        return
    check(config)


@pytest.mark.parametrize("name", ["tnl", "cosformer2", "hgrn2"])
def test_a_printed_architecture_and_recipe(name: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'extends = ["arch/{name}-printed", "size/tiny", "recipe/stdlib", "recipe/as-printed"]\n')
    check(load(file))
