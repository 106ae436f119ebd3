"""The shipped runs of an architecture, with their numbers of parameters."""

from lightscale.config import shipped
from lightscale.config.files import load
from lightscale.planning.commands.configs import shipped_runs
from lightscale_site.markdown import code, table


def size_table(*mixers: str) -> str:
    """The shipped runs with layers of one of `mixers`: shape, parameters, tokens."""
    rows = []
    for record in shipped_runs():
        model = load(shipped.shipped_file(record["name"])).model
        if set(mixers) & set(model.layers):
            numbers = (
                record["parameters"],
                model.num_layers,
                model.hidden_size,
                model.num_heads,
                record["tokens"],
                record["sequence_length"],
            )
            rows.append([code(record["name"]), code(record["architecture"]), *(f"{number:,}" for number in numbers)])
    head = ["run", "`model.mixer`", "parameters", "layers", "width", "heads", "tokens", "sequence length"]
    return table(head, rows, numbers=range(2, 8))


def parameter_table() -> str:
    """Parameters of the shipped runs that have one size of many architectures, such as 70m: architectures by sizes."""
    by_mixer: dict[str, dict[str, int]] = {}
    for record in shipped_runs():
        mixer, _, size = record["name"].rpartition("-")
        if size in _SIZES and mixer == record["architecture"]:
            by_mixer.setdefault(mixer, {})[size] = record["parameters"]
    rows = [
        [code(mixer), *(f"{sizes[size]:,}" if size in sizes else "" for size in _SIZES)]
        for mixer, sizes in by_mixer.items()
    ]
    return table(["mixer", *_SIZES], rows, numbers=range(1, len(_SIZES) + 1))


_SIZES = ("tiny", "70m", "160m", "410m", "1b", "3b", "7b")
