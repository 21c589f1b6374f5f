"""How evenly a mixture of experts used its experts: metrics of a training call."""

import numpy as np
from numpy.typing import NDArray


def metrics(counts: NDArray[np.int32]) -> dict[str, float]:
    """Metrics from the number of rows of each expert, (layers, experts). The names say how clients
    reduce them over the chunks of a call.

    `expert_share` is an expert's share of its layer's rows, the least and the largest; it is 1 /
    experts if all have as many. `expert_entropy` is the entropy of a layer's shares divided by that
    of equal shares, and `experts_unused` the share of experts without a row. Both are means over
    layers. Layers without experts don't count.

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
