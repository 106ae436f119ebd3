"""Mixers and blocks as plain ``torch.nn`` modules, for models of others.

Each maps (b, n, d) to (b, n, d), takes a state and gives one, and is trained like any module:

    from lightscale.layers import HGRN2Mixer

    mixer = HGRN2Mixer(hidden_size=512, num_heads=4)
    y, state = mixer(x)                        # x (b, n, d), one document each row
    y, state = mixer(next_x, state)            # reads on; the state does not grow
    y, state = mixer(x, mask=mask)             # (b, n) bool, the real tokens: padding changes nothing

LION's mixers, ``BiRNMixer``, ``LightNetMixer(…, causal=False)`` and ``SoftmaxMixer`` with ``Attention(causal=False)``
read whole rows, before and behind: they take a mask, and no state. ``form`` has what papers print otherwise, as in
``TNLMixer(…, form=TNLForm(decay="linear"))``.

No process groups, no Megatron, no Triton: on many GPUs, and at full speed, ``lightscale train`` trains.
"""

from lightscale.exchange.plain.decay_mixer import DecayMixer, ScalarDecay
from lightscale.exchange.plain.delta_mixer import DeltaForm, DeltaNetMixer, GatedDeltaNetMixer, KimiDeltaMixer
from lightscale.exchange.plain.lion import LionForm, LionLITMixer, LionRetNetMixer, LionSMixer
from lightscale.exchange.plain.mixers import (
    CosFormer2Mixer,
    GatedForm,
    HGRN2Form,
    HGRN2Mixer,
    LightNetForm,
    LightNetMixer,
    State,
    TNLForm,
    TNLMixer,
    lower_bounds,
)
from lightscale.exchange.plain.model import (
    Block,
    CausalModel,
    Classifier,
    Decoder,
    ImageClassifier,
    MaskedModel,
    Shape,
)
from lightscale.exchange.plain.patches import ImageInputs, PatchMap
from lightscale.exchange.plain.relation import BiRNMixer, CausalRNMixer, RelationForm
from lightscale.exchange.plain.softmax_mixer import Attention, RopeScaling, SoftmaxMixer
from lightscale.exchange.plain.toeplitz import ToeplitzEncoding, ToeplitzForm
from lightscale.exchange.plain.units import GatedUnit, Norm, Perceptron, PositionTable

__all__ = [
    "Attention",
    "BiRNMixer",
    "Block",
    "CausalModel",
    "CausalRNMixer",
    "Classifier",
    "CosFormer2Mixer",
    "DecayMixer",
    "Decoder",
    "DeltaForm",
    "DeltaNetMixer",
    "GatedDeltaNetMixer",
    "GatedForm",
    "GatedUnit",
    "HGRN2Form",
    "HGRN2Mixer",
    "ImageClassifier",
    "ImageInputs",
    "KimiDeltaMixer",
    "LightNetForm",
    "LightNetMixer",
    "LionForm",
    "LionLITMixer",
    "LionRetNetMixer",
    "LionSMixer",
    "MaskedModel",
    "Norm",
    "PatchMap",
    "Perceptron",
    "PositionTable",
    "RelationForm",
    "RopeScaling",
    "ScalarDecay",
    "Shape",
    "SoftmaxMixer",
    "State",
    "TNLForm",
    "TNLMixer",
    "ToeplitzEncoding",
    "ToeplitzForm",
    "lower_bounds",
]
