"""Code that the Triton kernels of all operators share.

The passes of an operator's ``triton`` have the arguments, results and meaning of the passes in its ``chunked.py``, for
fp16, bf16 and fp32. The passes that launch kernels are registered with torch as operators. ``torch.compile`` calls
these without a trace of their code, and the whole operator has its gradient.
"""

from lightscale.kernels.common.triton.cache import compile_once, provide_cache

provide_cache()
compile_once()
