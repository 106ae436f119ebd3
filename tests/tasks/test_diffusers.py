"""A diffusion transformer with softmax attention beside diffusers' DiT of the same weights: outputs and gradients."""

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightscale.config.model import ModelConfig
from lightscale.data_pipeline.loading.windows import Batch
from lightscale.models.language_model import transformer_config
from lightscale.parallel.mesh import start_mesh

diffusion = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("test_diffusion.py"))))
RunRanks = Callable[..., list[Any]]
D, CLASSES, SIDE, PATCH, LAYERS = 16, 5, 8, 2, 3
MODEL = ModelConfig.model_validate(
    {
        "mixer": "llama",
        "num_layers": LAYERS,
        "hidden_size": D,
        "num_heads": 4,
        "intermediate_size": 4 * D,
        "norm": "layernorm",
        "glu_activation": "silu",
        "init_std": 0.3,
        "mixer_options": {"llama": {"causal": False, "positions": "none"}},
        "diffusion": {"num_labels": CLASSES},
        "grid": {"shape": [4, 4], "leading_tokens": 0},
        "patches": {"size": [PATCH, PATCH], "channels": 3, "learned_positions": True},
    }
)


def ours(rank: int, world_size: int, init_method: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    tokens, wanted = torch.randn(2, 3, 16, 12, generator=generator)
    batch = Batch(
        tokens=tokens,
        labels=torch.zeros(3, 16, dtype=torch.int64),
        loss_mask=torch.ones(3, 16),
        start_slots=torch.arange(3) * 16,
        start_positions=torch.zeros(3, dtype=torch.int64),
        sources=torch.zeros(3, dtype=torch.int64),
        # The last one has no class. Timesteps are early ones: theirs are multiplied in fp32, whose cosine of 999 is off
        # by 6e-5.
        conditions=torch.tensor([[0, 1], [5, 4], [40, CLASSES]], dtype=torch.int32),
        wanted=wanted,
    )
    with start_mesh(device="cpu", init_method=init_method) as mesh:
        (module,) = diffusion.chunks_of(mesh, MODEL, transformer_config(MODEL, mesh, torch.float64))
        found: dict[str, Any] = diffusion.disturbed(module, batch)
        return found


def as_theirs(of: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights, or their gradients, by diffusers' names."""
    found = {
        "pos_embed.proj.weight": of["embedding.patches.weight"].view(D, PATCH, PATCH, 3).permute(0, 3, 1, 2),
        "pos_embed.proj.bias": of["embedding.patches.bias"],
        "pos_embed.pos_embed": of["embedding.positions.table"][None],
        "proj_out_1.weight": of["output_layer.modulation.weight"],
        "proj_out_1.bias": of["output_layer.modulation.bias"],
        "proj_out_2.weight": of["output_layer.weight"],
        "proj_out_2.bias": of["output_layer.bias"],
    }
    for layer in range(LAYERS):
        own, block = f"decoder.layers.{layer}", f"transformer_blocks.{layer}"
        # Theirs has the perceptron of the timestep in each block; of equal weights it is the same function.
        conditioning = {
            "timestep_embedder.linear_1.weight": "time_in",
            "timestep_embedder.linear_1.bias": "time_in_bias",
            "timestep_embedder.linear_2.weight": "time_out",
            "timestep_embedder.linear_2.bias": "time_out_bias",
            "class_embedder.embedding_table.weight": "labels",
        }
        found |= {f"{block}.norm1.emb.{name}": of[f"conditioning.{one}"] for name, one in conditioning.items()}
        found |= {f"{block}.norm1.linear.{name}": of[f"{own}.modulation.{name}"] for name in ("weight", "bias")}
        k, v = of[f"{own}.self_attention.kv_proj.weight"].view(4, 2, D // 4, D).unbind(1)
        found |= {f"{block}.attn1.to_k.weight": k.reshape(D, D), f"{block}.attn1.to_v.weight": v.reshape(D, D)}
        found[f"{block}.attn1.to_q.weight"] = of[f"{own}.self_attention.q_proj.weight"]
        found[f"{block}.attn1.to_out.0.weight"] = of[f"{own}.self_attention.out_proj.weight"]
        gate, up = of[f"{own}.mlp.linear_fc1.weight"].chunk(2)
        found[f"{block}.ff.net.0.proj.weight"] = torch.cat([up, gate])
        found[f"{block}.ff.net.2.weight"] = of[f"{own}.mlp.linear_fc2.weight"]
    return found


def test_a_diffusion_transformer_is_that_of_diffusers(run_ranks: RunRanks) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: pip install diffusers")
    (figures,) = run_ranks(ours, 1)
    theirs = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=D // 4,
        in_channels=3,
        num_layers=LAYERS,
        attention_bias=False,
        sample_size=SIDE,
        patch_size=PATCH,
        activation_fn="swiglu",
        num_embeds_ada_norm=CLASSES,
        norm_eps=1e-6,
    ).double()
    theirs.eval()
    for block in theirs.transformer_blocks:
        # Their class divides by w / 2 - 1; DiT, and its authors' code, by w / 2.
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    state, names = as_theirs(figures["weights"]), dict(theirs.named_parameters())
    # What they have and blocks here have not: biases of attention's output and of the gated linear unit.
    absent = {name for name in names if name not in state}
    assert all(name.endswith(".bias") and (".attn1." in name or ".ff." in name) for name in absent)
    state |= {name: torch.zeros_like(names[name]) for name in absent}
    # No part of their state: positions are sines there, a table here.
    theirs.pos_embed.pos_embed = state.pop("pos_embed.pos_embed").clone().requires_grad_()
    theirs.load_state_dict(state)

    def as_images(tokens: Tensor) -> Tensor:
        return tokens.double().view(3, 4, 4, PATCH, PATCH, 3).permute(0, 5, 1, 3, 2, 4).reshape(3, 3, SIDE, SIDE)

    timesteps, classes = figures["conditions"].long().unbind(1)
    sample = theirs(as_images(figures["tokens"]), timesteps, classes).sample
    torch.testing.assert_close(as_images(figures["logits"]), sample.detach(), rtol=1e-5, atol=1e-5)
    weight = as_images(figures["weight"][..., None].expand(3, 16, 12))
    # A token's loss is the mean over its patch.
    ((sample - as_images(figures["wanted"])).square() * weight / 12).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    gradients["pos_embed.pos_embed"] = theirs.pos_embed.pos_embed.grad
    shared = [name for name in gradients if ".norm1.emb." in name]
    for name in {name.partition(".norm1.emb.")[2] for name in shared}:
        # One perceptron here: the gradients of theirs together.
        total = sum(gradients[one] for one in shared if one.endswith(f".emb.{name}"))
        gradients |= {one: total for one in shared if one.endswith(f".emb.{name}")}
    compared = as_theirs(figures["gradients"])
    assert compared.keys() == gradients.keys() - absent
    for name, gradient in compared.items():
        error = np.abs(gradient - gradients[name]).max() / gradients[name].abs().max()
        assert error < 1e-5, name
