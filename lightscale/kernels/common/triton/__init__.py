"""What the Triton kernels of all operators share.

The passes of an operator's ``triton`` have the arguments, results and meaning of those in its ``chunked.py``, for fp16,
bf16 and fp32. Those that hold the work are registered with torch as operators: ``torch.compile`` calls them as they are
and does not look inside, and the whole operator has its gradient.
"""

from lightscale.kernels.common.triton.cache import provide_cache

provide_cache()
