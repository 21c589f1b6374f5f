"""Arguments of ops that read a base weight of 8 to 4 bits, of any type, for every device."""

import numpy as np

from support.expert_cases import make_grouped_linear, make_grouped_linear_backward
from support.op_cases import make_embed, make_head
from support.packed_weights import whole

rng_of = np.random.default_rng


def cases_by_op(dtype: str, deep: int, most: int) -> dict[str, dict]:
    """By op: rows of `deep` numbers are looked up, and an expert has `most` rows."""
    load = (5, 0, most)
    return {
        "embed": make_embed(rng_of(0), T=9, D=whole(dtype, deep), dtype=dtype),
        "head": make_head(rng_of(1), T=3, V=71, D=whole(dtype, 45), dtype=dtype),
        "grouped_linear": make_grouped_linear(rng_of(2), load, 65, whole(dtype, 97), dtype, 2),
        "grouped_linear_backward": make_grouped_linear_backward(
            rng_of(3), load, 65, whole(dtype, 97), dtype
        ),
    }
