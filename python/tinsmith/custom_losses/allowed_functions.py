"""The functions that a custom loss may call, grouped by the bound on a call's memory before it
runs:

- keeps: the result is at most a few times as large as the input tensors.
- joins: the result is as large as all inputs together, in lists of any length.
- spreads: the result is as large as the inputs, broadcast to one shape.
- picks and multiplies: the result is at most the product of the inputs' sizes; of a matrix product,
  the multiplications count as well.
- sized: the integers after the first argument are sizes, too. new: all integers are.

A name stands for a function of torch, torch.nn.functional, torch.special or torch.linalg, and for a
tensor's method, as far as they exist. Functions that change a tensor in place, draw random numbers,
or leave torch are not here.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

# torch's names, by what bounds the memory of a call; the header explains the groups.
GROUPS = {
    "keeps": """
        abs absolute neg negative positive square sqrt rsqrt reciprocal exp exp2 expm1 log log2
        log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid expit logit
        logsigmoid log_sigmoid softplus relu silu gelu elu leaky_relu softsign erf erfc erfinv
        lgamma gammaln digamma sign sgn signbit floor ceil round trunc frac isnan isinf isposinf
        isneginf isfinite logical_not bitwise_not nan_to_num
        sum mean nansum nanmean prod amax amin aminmax argmax argmin any all count_nonzero logsumexp
        median nanmedian kthvalue var std var_mean std_mean norm vector_norm normalize softmax
        log_softmax softmin cumsum cumprod cummax cummin logcumsumexp diff sort argsort topk
        reshape view view_as flatten ravel squeeze unsqueeze transpose swapaxes swapdims permute
        movedim moveaxis t flip fliplr flipud roll narrow select diagonal tril triu chunk unbind
        gather scatter scatter_add index_add repeat_interleave one_hot arange eye zeros_like
        ones_like full_like detach clone contiguous cpu to type_as float double half bfloat16
        long int bool numel nelement dim ndimension size cross_entropy nll_loss
    """,
    "joins": "cat concat concatenate stack hstack vstack split",
    "spreads": """
        add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow
        float_power maximum minimum max min fmax fmin logaddexp logaddexp2 xlogy xlog1py atan2 hypot
        copysign lerp addcmul addcdiv where clamp clip clamp_min clamp_max masked_fill masked_select
        expand_as eq ne not_equal lt less le less_equal gt greater ge greater_equal isclose
        logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
        mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy
        binary_cross_entropy_with_logits gaussian_nll_loss poisson_nll_loss soft_margin_loss
        hinge_embedding_loss margin_ranking_loss cosine_similarity pairwise_distance
    """,
    "picks": "getitem index_select take_along_dim",
    "multiplies": "matmul mm bmm mv dot inner vdot outer tensordot kron einsum",
    "sized": "expand broadcast_to repeat tile pad new_zeros new_ones new_full",
    "new": "zeros ones full linspace",
}
GROUP_OF = {name: group for group, names in GROUPS.items() for name in names.split()}

# Python's operators by torch.fx's names, each with the torch function above that bounds it.
OPERATORS = {
    **{name: name for name in ("add", "sub", "mul", "pow", "neg", "abs", "matmul", "getitem")},
    **{name: name for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pos": "positive",
    "and_": "bitwise_and",
    "or_": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
}


def power(a: float, b: float) -> float:
    """Python's power of numbers, but never an integer of unlimited length."""
    found = math.pow(a, b)
    exact = isinstance(a, int) and isinstance(b, int) and b >= 0 and abs(found) < 1 << 53
    return a**b if exact else found


# The functions of plain numbers, for calls without a tensor.
NUMBERS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in OPERATORS if name not in ("matmul", "getitem")},
    "pow": power,
}
_MATH = (math.sqrt, math.exp, math.log, math.log2, math.log10, math.log1p, math.expm1, math.fabs)
_MATH += (math.floor, math.ceil, math.tanh, math.sin, math.cos)
MATH: dict[str, Callable[..., Any]] = {**{f.__name__: f for f in _MATH}, "pow": power}

ATTRIBUTES: dict[str, Callable[[Any], Any]] = {
    "shape": lambda x: x.shape,
    "ndim": lambda x: x.ndim,
    "dtype": lambda x: x.dtype,
    "device": lambda x: "cpu",
    "is_cuda": lambda x: False,
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "data": lambda x: x.detach(),
}
# Fields of the results of sort, max and aminmax.
FIELDS = {name: operator.attrgetter(name) for name in ("values", "indices", "min", "max")}

DTYPES = ("float32", "float64", "bfloat16", "float16", "bool")
DTYPES += ("int64", "int32", "int16", "int8", "uint8")

# Keyword arguments that are passed to torch. Any that is neither here nor in IDLE is refused.
_KEYWORDS = """
    input other tensors operands equation dim dims dim0 dim1 dim2 keepdim dtype correction
    unbiased min max alpha value nan posinf neginf beta threshold negative_slope approximate p ord
    eps k n largest sorted descending stable decimals index src source start end step steps length
    size shape sizes repeats split_size chunks diagonal offset shifts mask condition
    exponent weight tensor1 tensor2 vec2 mat2 pad mode num_classes fill_value rounding_mode
    start_dim end_dim delta reduction log_target pos_weight target label_smoothing ignore_index
    margin log_input full var x1 x2 input1 input2 rtol atol equal_nan indices
"""
KEYWORDS = frozenset(_KEYWORDS.split())
# Keyword arguments that make no difference with these values; None: with any value.
IDLE: dict[str, tuple[Any, ...] | None] = {
    "device": None, "layout": None, "memory_format": None, "pin_memory": None, "_stacklevel": None,
    "non_blocking": None, "copy": None, "out": (None,), "inplace": (False,), "reduce": (None,),
    "requires_grad": (False,), "size_average": (None,), "sparse_grad": (False,),
}  # fmt: skip
# Strings that an argument may be, and what takes any: an attribute, a device, an equation.
TEXTS = {"floor", "trunc", "mean", "sum", "none", "batchmean", "fro", "tanh"}
TEXTS |= {"constant", "reflect", "replicate", "circular"}
TAKE_TEXT = ("getattr", "to", "einsum")
