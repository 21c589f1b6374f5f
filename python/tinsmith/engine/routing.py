"""How evenly a mixture of experts used its experts: metrics of a training call."""

import numpy as np
from numpy.typing import NDArray


def metrics(counts: NDArray[np.int32]) -> dict[str, float]:
    """Of how many rows went to each expert, (layers, experts): by names that clients reduce over
    the parts of a call.

    `expert_share` is an expert's share of its layer's rows, 1 / experts where all have as many; its
    least and its largest. `expert_entropy` is that of a layer's shares over that of equal ones, 1
    where all have as many, and `experts_unused` the share of experts without a row, each in the
    mean over layers. Layers without experts don't count.

        >>> metrics(np.array([[2, 2, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], np.int32))
        {'expert_share:min': 0.0, 'expert_share:max': 0.5, 'expert_entropy:mean': 0.75, \
'experts_unused:mean': 0.25}
    """
    used = counts[counts.sum(axis=1) > 0].astype(np.float64)
    if not used.size:
        return {}
    share = used / used.sum(axis=1, keepdims=True)
    surprise = -np.log(share, where=share > 0, out=np.zeros_like(share))
    entropy = (share * surprise).sum(axis=1) / np.log(max(share.shape[1], 2))
    return {
        "expert_share:min": float(share.min()),
        "expert_share:max": float(share.max()),
        "expert_entropy:mean": float(entropy.mean()),
        "experts_unused:mean": float((share == 0).mean()),
    }
