"""Runs of every architecture, made and not trained: weights that all differ, saved as a run saves them."""

import importlib.util
import json
import runpy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightscale.config.files import load
from lightscale.data_pipeline.tokenizers import TiktokenTokenizer, Tokenizer
from lightscale.runs.run_directory import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    "tnl": 'mixer = "tnl"',
    "hgrn2": 'mixer = "hgrn2"',
    "cosformer2": 'mixer = "cosformer2"\n[model.mixer_options.cosformer2]\ngate_rank = 6',
    "lightnet": 'mixer = "lightnet"\nglu_activation = "silu"',
    "llama": 'mixer = "llama"\nglu_activation = "silu"\nnorm = "rmsnorm"',
    "grouped": """mixer = ["tnl", "llama"]
tie_word_embeddings = false
[model.mixer_options.llama]
num_key_value_heads = 2
head_dim = 10
attention_bias = "all"
rope_theta = 500.0
[model.mixer_options.llama.rope_scaling]
factor = 8.0
low_freq_factor = 1.0
high_freq_factor = 4.0
original_max_position_embeddings = 64""",
    "softmax": """mixer = ["llama", "tnl"]
norm = "rmsnorm"
[model.mixer_options.llama]
num_key_value_heads = 2
qk_norm = "all"
zero_centered_norm = true
rope_fraction = 0.5
output_gate = true
window = 20
attention_logit_cap = 4.0
attention_sinks = true
attention_bias = "qkv"
rope_scaling = { rope_type = "yarn", factor = 4.0, original_max_position_embeddings = 64 }""",
    "decay": """mixer = ["decay-attention", "tnl"]
mup = { base_hidden_size = 32 }
[model.mixer_options.decay-attention]
decay = "softplus"
input_gate = true
feature_map = "none"
scale = false
positions = "lrpe"
short_convolution = 4
output = "gated"
gate_rank = 5""",
    "delta": """mixer = ["gated-delta-net", "kimi-delta", "delta-net"]
norm = "rmsnorm"
[model.mixer_options]
gated-delta-net = { num_value_heads = 8, value_head_dim = 6, negative_eigenvalues = true }
kimi-delta = { gate_rank = 5, short_convolution = 2 }
delta-net = { short_convolution = 0, key_head_dim = 7 }""",
    "swiglu hgrn2": 'mixer = "hgrn2"\nglu_activation = "silu"',
    "swiglu hybrid": """mixer = ["llama", "hgrn2"]
glu_activation = "silu"
norm = "rmsnorm"
norm_eps = 1e-3
tie_word_embeddings = false
[model.mixer_options.llama]
num_key_value_heads = 2
attention_bias = "qkv"
rope_theta = 500.0""",
    "hybrid": 'mixer = ["tnl", "hgrn2", "lightnet", "llama", "cosformer2"]\nnorm = "rmsnorm"',
    "printed": """mixer = ["tnl", "hgrn2", "lightnet", "causal-rn", "cosformer2"]
norm = "rmsnorm"
final_norm = false
tie_word_embeddings = false
tpe = { form = "printed", modes = 5 }
[model.mixer_options]
tnl = { gate_input = "raw", output_projection = false, decay = "linear", lrpe = "all" }
hgrn2 = { query_activation = "none", lower_bounds = "to_one" }
lightnet = { lrpe = false, tpe = false, output_norm = false, full_rank_gate = true, gate_input = "raw" }
causal-rn = { positions = 400, expansion = 2, post_norm = false }
cosformer2 = { gate_input = "raw", gate_rank = 3, output_projection = false }""",
    "pairs": """mixer = ["causal-rn", "lightnet"]
norm = "layernorm"
intermediate_size = 0
mixer_options.causal-rn = { form = "quadratic", activation = "silu" }
mixer_options.lightnet = { decay = false, output_projection = false }""",
    "masked_rn": """mixer = ["bi-rn", "lightnet"]
intermediate_size = 0
mixer_options.bi-rn = { positions = 400, eps = 1e-3 }
mixer_options.lightnet = { causal = false, lrpe = false, tpe = false, gate_input = "raw" }
[task]
name = "masked\"""",
    "masked": """mixer = ["lion-s", "lightnet", "lion-retnet", "llama", "lion-lit", "hgrn2", "tnl"]
norm = "rmsnorm"
[model.mixer_options]
hgrn2.causal = false
tnl.causal = false
[model.mixer_options.lightnet]
causal = false
[model.mixer_options.llama]
causal = false
[model.mixer_options.lion-s]
input_gate = true
[task]
name = "masked\"""",
    "masked_llama": """mixer = "llama"
glu_activation = "silu"
norm = "rmsnorm"
tie_word_embeddings = false
mixer_options.llama.causal = false
[task]
name = "masked\"""",
    "classify": """mixer = ["lion-s", "lion-retnet"]
mixer_options.lion-s.vector_decay = true
head.num_labels = 3
head.pooling = "last"
[task]
name = "classify\"""",
    "classify_causal": """mixer = "tnl"
head.num_labels = 2
[task]
name = "classify\"""",
}
CLASSES = ["good", "bad", "other"]
"""Of the run "classify"."""
RUN = """
[model]
num_layers = {layers}
hidden_size = 64
num_heads = 8
vocab_size = 320
{shape}

[data]
store = "store"
sequence_length = 96

[optimizer]
lr = 1e-3

[train]
steps = 4
global_batch_size = 4
"""


def byte_tokenizer() -> TiktokenTokenizer:
    """Bytes, two merges, digits by threes; special ids with gaps between them, as published vocabularies have."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256, b"the": 257}
    special = {"<|endoftext|>": 259, "<|other|>": 263}
    pattern = r"\p{N}{1,3}+|\s+|[^\s\p{N}]+"
    return TiktokenTokenizer(name="bytes", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def save_runs(rank: int, world_size: int, init_method: str, folder: str, names: list[str]) -> None:
    """Write to ``folder`` a run for each of ``names`` of ``SHAPES``, with a checkpoint of step 3."""
    from lightscale.parallel.mesh import start_mesh
    from lightscale.training.build import build_engine
    from lightscale.training.checkpoints.saving import Saver

    plain = runpy.run_path(str(ROOT / "tests/helpers/plain_models.py"))
    tokenizer = byte_tokenizer()
    common = {"data": {"tokens": 1152, "skips": [], "fingerprint": {"tokenizer": tokenizer.sha256}}}
    with start_mesh(device="cpu", init_method=init_method, timeout_s=60) as mesh:
        for name in names:
            run = RunDirectory(Path(folder) / name)
            engine = build_engine(load(run.config), mesh, vocab_size=tokenizer.vocab_size, trainable=False)
            plain["disturb"](engine.module, 0.1)
            saver = Saver(run.checkpoints, mesh)
            saver.save(engine, step=3, common=common, facts={"tokens": 1152}, contents=("weights",))


def make_run(folder: Path, name: str, tokenizer: Tokenizer) -> RunDirectory:
    """The directory of a run without checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.toml"
    shape, layers = SHAPES[name], {"hybrid": 5, "printed": 5, "masked": 7, "delta": 3}.get(name, 2)
    inner = "" if "intermediate_size" in shape else "intermediate_size = 80\n"
    file.write_text(RUN.format(shape=inner + shape, layers=layers), encoding="utf-8")
    run = RunDirectory(folder / name)
    run.create(load(file))
    run.tokenizer.mkdir()
    tokenizer.save(run.tokenizer)
    if name == "classify":
        run.classes.write_text(json.dumps(CLASSES))
    return run


@pytest.fixture(scope="session")
def saved_runs(tmp_path_factory: pytest.TempPathFactory, run_ranks: Callable[..., list[Any]]) -> Path:
    """A folder with a run for each of ``SHAPES``, not to be changed."""
    folder = tmp_path_factory.mktemp("runs")
    for name in SHAPES:
        make_run(folder, name, byte_tokenizer())
    run_ranks(save_runs, 1, str(folder), list(SHAPES))
    return folder


@pytest.fixture
def own_run(saved_runs: Path, tmp_path: Path) -> Callable[[str], Path]:
    """``own_run("tnl")``: a copy of the run to be changed."""

    def copy(name: str) -> Path:
        shutil.copytree(saved_runs / name, tmp_path / name)
        return tmp_path / name

    return copy


@pytest.fixture(scope="session")
def offline() -> None:
    """transformers, where it is installed; nothing is fetched."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install 'lightscale[hf]'")


@pytest.fixture(scope="session")
def transformers() -> Any:
    """The package."""
    return pytest.importorskip("transformers", reason="needs pip install 'lightscale[hf]'")
