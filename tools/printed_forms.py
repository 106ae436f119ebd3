#!/usr/bin/env python
"""How far each printed form moves the logits: ``python tools/printed_forms.py``.

A model with the usual options and one with a single other option get the same weights (drawn by name, from one seed)
and the same 256 random tokens, in fp64. The figure is RMS(difference) / RMS(usual logits), in per cent. It says how
much a choice matters to weights that were not trained with it; not which of the two trains better.

Where an option brings weights of another shape (a gate's rank, the modes of TPE, an output layer of its own), those are
drawn anew, and the figure has that in it.

States that run on between documents (``data.packing = "joined"``) are told from those that begin again by the logits of
the second of two documents of half of the tokens each.

The shape is 4 layers of width 128 with 4 heads. Weights have a standard deviation of 1/sqrt(width), so that gates and
decays are as far from their middle as in trained models; with the 0.02 of fresh ones most choices hardly show.
``--layers``, ``--width``, ``--tokens`` and ``--init-std`` change that, and ``--only TEXT`` leaves the forms whose names
have the text in them.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightscale.config.model import ModelConfig
from lightscale.models.language_model import LanguageModel, transformer_config
from lightscale.parallel.initialization import draw_weights
from lightscale.parallel.mesh import Mesh, start_mesh

TOKENS = 256
SHAPE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_heads": 4,
    "intermediate_size": 352,
    "vocab_size": 512,
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """One other choice for a mixer."""

    mixer: str
    options: dict[str, Any] = field(default_factory=dict)
    """Of the mixer."""
    model: dict[str, Any] = field(default_factory=dict)
    """Of the model."""
    joined: bool = False
    """Whether states run on between documents; else they begin again where there are two."""

    @property
    def name(self) -> str:
        """As in a table."""
        packing = {"data.packing": "joined"} if self.joined else {}
        return ", ".join(f"{key} = {value}" for key, value in {**self.options, **self.model, **packing}.items())

    def config(self, *, init_std: float, usual: bool = False) -> ModelConfig:
        """The model with this choice, or the usual one."""
        activation = "silu" if self.mixer == "lightnet" else "none"
        shape = {**SHAPE, "mixer": self.mixer, "init_std": init_std, "glu_activation": activation}
        if usual:
            return ModelConfig.model_validate(shape)
        return ModelConfig.model_validate({**shape, **self.model, "mixer_options": {self.mixer: self.options}})


FORMS = [
    *(Form(mixer=mixer, options={"gate_input": "raw"}) for mixer in ("tnl", "cosformer2", "lightnet")),
    *(Form(mixer="tnl", options={"decay": decay}) for decay in ("linear", "minimax")),
    *(Form(mixer="tnl", options={"lrpe": where}) for where in ("all", "none")),
    *(Form(mixer=mixer, options={"output_projection": False}) for mixer in ("tnl", "cosformer2", "hgrn2")),
    *(Form(mixer=mixer, model={"final_norm": False}) for mixer in ("tnl", "hgrn2", "llama")),
    *(Form(mixer=mixer, model={"tie_word_embeddings": False}) for mixer in ("tnl", "llama")),
    Form(mixer="hgrn2", options={"query_activation": "none"}),
    Form(mixer="hgrn2", options={"lower_bounds": "to_one"}),
    *(Form(mixer=mixer, model={"tpe": {"form": "printed"}}) for mixer in ("cosformer2", "lightnet")),
    Form(mixer="lightnet", model={"tpe": {"modes": 128}}),
    *(Form(mixer="lightnet", options={key: False}) for key in ("decay", "shared_decay", "lrpe", "tpe", "output_norm")),
    Form(mixer="lightnet", options={"learned_angles": True}),
    Form(mixer="lightnet", options={"full_rank_gate": True}),
    Form(mixer="lightnet", options={"gate_rank": 64}),
    *(
        Form(mixer="causal-rn", options=options)
        for options in (
            {"eps": 0.0},
            {"post_norm": False},
            {"pre_norm": "off"},
            {"form": "quadratic"},
            {"form": "quadratic", "activation": "relu"},
            {"expansion": 4},
            {"positions": 4096},
        )
    ),
    *(Form(mixer="causal-rn", model=model) for model in ({"intermediate_size": 0}, {"norm": "layernorm"})),
    *(Form(mixer="lion-s", options=options) for options in ({"gate": "enter"}, {"eps": 0.0}, {"input_gate": True})),
    *(Form(mixer=mixer, joined=True) for mixer in ("tnl", "hgrn2", "cosformer2", "lightnet", "llama")),
]


@torch.no_grad()
def logits(model: ModelConfig, mesh: Mesh, tokens: torch.Tensor, *, documents: int = 1) -> torch.Tensor:
    """(1, n, V), fp64, of weights drawn by their names; ``documents``: of equal length that the tokens are."""
    module = LanguageModel(
        transformer_config(model, mesh, torch.float64), model, vocab_size=model.vocab_size, mesh=mesh
    )
    draw_weights(module, seed=0, tensor_rank=0, tensor_size=1)
    positions = torch.arange(tokens.size(1))[None] % (tokens.size(1) // documents)
    found: torch.Tensor = module(tokens, positions)
    return found


def shape_of(layers: int, width: int) -> dict[str, Any]:
    """Of models with heads and gated linear units in the proportions of ``SHAPE``."""
    inner = width * SHAPE["intermediate_size"] // SHAPE["hidden_size"]
    return {**SHAPE, "num_layers": layers, "hidden_size": width, "intermediate_size": inner}


def distances(forms: list[Form], *, init_std: float, num_tokens: int = TOKENS) -> Iterator[tuple[Form, float]]:
    """Of each form RMS(its logits - the usual ones) / RMS(the usual ones)."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, SHAPE["vocab_size"], (1, num_tokens), generator=generator)
    usual: dict[tuple[str, int], torch.Tensor] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        start_mesh(device="cpu", init_method=f"file://{Path(folder).resolve()}/meeting", timeout_s=60) as mesh,
    ):
        for form in forms:
            documents = 2 if form.joined else 1
            if (form.mixer, documents) not in usual:
                model = form.config(init_std=init_std, usual=True)
                usual[form.mixer, documents] = logits(model, mesh, tokens, documents=documents)
            expected = usual[form.mixer, documents]
            other = logits(form.config(init_std=init_std), mesh, tokens)
            last = slice(num_tokens - num_tokens // documents, None)
            yield form, float((other - expected)[:, last].norm() / expected[:, last].norm())


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--init-std", type=float, help="standard deviation of the weights (default: 1/sqrt(width))")
    parser.add_argument("--layers", type=int, default=SHAPE["num_layers"])
    parser.add_argument("--width", type=int, default=SHAPE["hidden_size"])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--only", metavar="TEXT", default="", help="only forms whose names contain this text")
    wanted = parser.parse_args()
    forms = [form for form in FORMS if wanted.only in form.name]
    if not forms:
        parser.error(
            f"--only {wanted.only}: no form matches; use one of {', '.join(dict.fromkeys(x.name for x in FORMS))}"
        )
    SHAPE.update(shape_of(wanted.layers, wanted.width))
    torch.set_num_threads(1)
    print("| mixer | option | logits move by |\n|---|---|---|")
    for form, distance in distances(forms, init_std=wanted.init_std or wanted.width**-0.5, num_tokens=wanted.tokens):
        print(f"| {form.mixer} | {form.name} | {100 * distance:.3g} % |")


if __name__ == "__main__":
    main()
