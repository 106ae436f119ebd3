"""What flash-linear-attention (fla) loads as its own classes, where they compute the same as our models.

HGRN2, LLaMA and their hybrids, with SwiGLU. Read in fla 0.6.0, whose HGRN2 differs from ours in two numbers: queries
are scaled by 1/sqrt(d_k), and the norm of the mixer's output adds 1e-5 to the mean square, whatever norm_eps is.
The output is linear in v: with W_v times sqrt(d_k 1e-5 / eps) that norm gets o sqrt(1e-5 / eps) for our o, and

    o sqrt(1e-5 / eps) / sqrt(mean(o²) 1e-5 / eps + 1e-5) = o / sqrt(mean(o²) + eps).

Norms without weights are norms with weights of 1.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightscale.config.fields import toml_value
from lightscale.errors import UserError
from lightscale.exchange.files.export_config import ConfigFacts
from lightscale.exchange.files.safetensors_files import Written
from lightscale.exchange.files.weights import kept_dtype
from lightscale.exchange.formats import ExportFormat
from lightscale.exchange.plain.mixers import HGRN2Form
from lightscale.exchange.plain.model import Shape
from lightscale.exchange.trained import TrainedRun

_OUTPUT_EPS = 1e-5
"""That fla's HGRN2 adds to the mean square of a mixer's output."""
_NO_POSITIONS = "fla has no LRPE ([x cos tθ, x sin tθ] of queries and keys) or TPE (a Toeplitz convolution)"
_DIFFERENT = {
    "tnl": (
        "fla's lightning attention decays by exp(-(8/H) (1 - layer/L) h) in head h, in head 0 not at all, "
        "TNL by exp(-s (1 - layer/(L-1) + 1e-5)), s = 2^(-8(h+1)/H); fla has neither TNL nor LRPE"
    ),
    "cosformer2": _NO_POSITIONS,
    "lightnet": "fla's LightNet gates its output by silu(x W_down W_up), lightscale by sigmoid(x W_down W_up); "
    f"{_NO_POSITIONS}",
}
"""Why a mixer cannot be written."""
_SCALED = """Its HGRN2 scales queries and adds 1e-5 in the norm of each mixer's output, which
the weights of `i_proj` make up for."""
_NAMES = {
    "model.embed_tokens.": "model.embeddings.",
    "model.lower_bounds.table": "model.lower_bounds",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".mlp_norm.",
    ".mixer.": ".attn.",
}


class FlaFormat(ExportFormat):
    """Weights in fp32 are bitwise the checkpoint's, but for W_v of HGRN2."""

    def check(self, shape: Shape) -> None:
        """See ``ExportFormat``."""
        attention = shape.attention
        softmax = "llama" in shape.mixers
        others = [mixer for mixer in dict.fromkeys(shape.mixers) if mixer not in ("hgrn2", "llama")]
        reasons = [f"{mixer}: {_DIFFERENT.get(mixer, 'fla has no model of it')}" for mixer in others]
        reasons += _other_forms(shape)
        if shape.task != "causal" or shape.reads_both_ways():
            reasons.append("fla's language models predict only the next token")
        if shape.glu_activation != "silu":
            reasons.append(
                "gated linear units: fla's are silu(x W_1) ⊙ x W_2, and model.glu_activation = 'none' has no silu"
            )
        if softmax and attention.rope_scaling is not None:
            reasons.append("llama: fla's rotary angles are not scaled, and rope_scaling slows the slow ones down")
        if softmax and (attention.positions == "none" or attention.rope_fraction < 1):
            reasons.append("llama: fla's attention rotates all channels of queries and keys")
        for name in ("norm_placement", "zero_centered_norm", "embedding_multiplier", "final_logit_cap"):
            if (value := getattr(shape, name)) != getattr(Shape, name):
                reasons.append(f"model.{name} = {toml_value(value)} is not written for fla")
        for name in ("window", "softmax_scale", "attention_logit_cap", "attention_sinks") if softmax else ():
            if (value := getattr(attention, name)) not in (None, False):
                reasons.append(f"llama: {name} = {toml_value(value)} is not written for fla")
        if softmax and attention.output_gate:
            reasons.append("llama: fla's attention is W_o o, without the gate that output_gate = true multiplies by")
        if softmax and attention.output_bias:
            reasons.append("llama: fla's attention is W_o o, without the bias that attention_bias = 'all' adds")
        if softmax and attention.head_dim is not None:
            heads = f"{shape.hidden_size} / {shape.num_attention_heads}"
            reasons.append(
                f"llama: fla's heads are hidden_size / num_heads = {heads} wide, not head_dim = {attention.head_dim}"
            )
        if softmax and attention.qk_norm != "none":
            reasons.append(f"llama: qk_norm = {attention.qk_norm!r} is not written for fla, whose norms are others")
        if reasons:
            raise UserError(
                "--format fla: fla's classes compute something else; omit --format to export for transformers\n"
                + "\n".join(f"  {reason}" for reason in reasons)
            )

    def config(self, shape: Shape, facts: ConfigFacts) -> dict[str, Any]:
        """Of fla's HGRN2 model, some of whose layers may attend by softmax, or of its transformer."""
        softmax = [layer for layer, mixer in enumerate(shape.mixers) if mixer == "llama"]
        attention: dict[str, Any] = {
            "num_heads": shape.num_attention_heads,
            "num_kv_heads": shape.attention.num_key_value_heads or shape.num_attention_heads,
            "qkv_bias": shape.attention.bias,
            "rope_theta": shape.attention.rope_theta,
            "window_size": None,
        }
        if len(softmax) == len(shape.mixers):
            names: dict[str, Any] = {"architectures": ["TransformerForCausalLM"], "model_type": "transformer"}
            of_class = {**names, **attention, "qk_norm": False}
        else:
            of_class = {
                "architectures": ["HGRN2ForCausalLM"],
                "model_type": "hgrn2",
                "num_heads": shape.num_attention_heads,
                "expand_ratio": shape.hidden_size // shape.num_attention_heads,
                "use_lower_bound": True,
                "use_short_conv": False,
                "attn": {"layers": softmax, **attention} if softmax else None,
            }
        return {
            **of_class,
            "dtype": facts.dtype,
            "vocab_size": shape.vocab_size,
            "hidden_size": shape.hidden_size,
            "num_hidden_layers": len(shape.mixers),
            "intermediate_size": shape.intermediate_size,
            "hidden_act": "swish",
            "norm_eps": shape.rms_norm_eps,
            "elementwise_affine": True,
            "initializer_range": facts.init_std,
            "max_position_embeddings": facts.max_tokens,
            "tie_word_embeddings": shape.tied,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), facts.eot_id),
        }

    def tensors(self, run: TrainedRun, dtype: torch.dtype) -> list[Written]:
        """See ``ExportFormat``; norms that have no weight here have ones."""
        shape = run.shape
        found = [self._stored(run, name, dtype) for name in run.rows]
        layers = [(f"model.layers.{layer}.", mixer) for layer, mixer in enumerate(shape.mixers)]
        ones = [f"{layer}attn.g_norm.weight" for layer, mixer in layers if mixer == "hgrn2"]
        if shape.norm == "srmsnorm":
            ones += [f"{layer}{name}.weight" for layer, _ in layers for name in ("attn_norm", "mlp_norm")]
            ones.append("model.norm.weight")
        size = shape.hidden_size
        return found + [Written(name=name, dtype=dtype, shape=(size,), blocks=[torch.ones(size)]) for name in ones]

    def _stored(self, run: TrainedRun, name: str, dtype: torch.dtype) -> Written:
        rows, shape, theirs = run.rows[name], run.shape, name
        for ours, there in _NAMES.items():
            theirs = theirs.replace(ours, there)
        blocks: Iterable[Tensor] = run.tensors.blocks(rows)
        head, _, projection = name.rpartition(".mixer.")
        if projection == "v_proj.weight" and shape.mixers[int(head.rpartition(".")[2])] == "hgrn2":
            theirs = theirs.replace("v_proj", "i_proj")
            blocks = _scaled(blocks, value_scale(shape))
        return Written(name=theirs, dtype=kept_dtype(name, dtype), shape=run.tensors.shape(rows), blocks=blocks)

    def beside(self, run: TrainedRun) -> dict[str, str]:
        """fla has it."""
        return {}

    def usage(self, shape: Shape) -> str:
        """See ``ExportFormat``."""
        needs = "; its softmax attention also needs flash-attn" if "llama" in shape.mixers else ""
        scaled = f" {_SCALED}" if "hgrn2" in shape.mixers else ""
        return f"""```python
import fla  # pip install flash-linear-attention; needs a GPU{needs}
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(PATH)
model = AutoModelForCausalLM.from_pretrained(PATH).cuda()
inputs = tokenizer("Once upon a time", return_tensors="pt").to("cuda")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0], skip_special_tokens=True))
```

For the classes of flash-linear-attention 0.6.0.{scaled}"""


def _other_forms(shape: Shape) -> list[str]:
    """Why HGRN2 and what stands around the mixers are not fla's, one line each."""
    form, reasons = shape.forms.get("hgrn2", HGRN2Form()), []
    assert isinstance(form, HGRN2Form), type(form)
    if form.query_activation != "silu":
        reasons.append("hgrn2: fla's queries are silu(x W_q), and query_activation = 'none' has no silu")
    if form.lower_bounds != "from_zero":
        reasons.append("hgrn2: fla subtracts the first row from the lower bounds, lower_bounds = 'to_one' does not")
    if not form.output_projection:
        reasons.append("hgrn2: fla's output is W_o norm(o), and output_projection = false has no W_o")
    if shape.norm == "layernorm":
        reasons.append("fla's models have RMS norms, and model.norm = 'layernorm' subtracts the mean")
    if not shape.final_norm:
        reasons.append("fla's models have a norm before the output layer; use model.final_norm = true")
    if not shape.intermediate_size:
        reasons.append("fla's blocks have a gated linear unit; model.intermediate_size = 0 has none")
    return reasons


def value_scale(shape: Shape) -> float:
    """What W_v of HGRN2 is multiplied by; the head's width and the ratio of both epsilons are under the root."""
    return math.sqrt(shape.hidden_size / shape.num_attention_heads * _OUTPUT_EPS / shape.rms_norm_eps)


def _scaled(blocks: Iterable[Tensor], factor: float) -> Iterator[Tensor]:
    for block in blocks:
        yield block.to(torch.promote_types(block.dtype, torch.float32)) * factor
