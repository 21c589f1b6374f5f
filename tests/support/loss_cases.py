"""What a custom loss may call, in expressions that torch evaluates too: at least one each.

Each takes logprobs x (6,) of any sign, v (6,) positive, i (6,) from 0 to 5, m (6,4), a scalar c,
and y, which is m times x; it returns a tensor, or several, that depend on x.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Case = Callable[..., Any]

POINTWISE: dict[str, Case] = {
    "add": lambda x, v, i, m, c, y: x + v + 1 + c + i + torch.add(x, v, alpha=3),
    "sub": lambda x, v, i, m, c, y: (1 - x) - v - torch.sub(v, x, alpha=2) + torch.subtract(x, v),
    "mul": lambda x, v, i, m, c, y: x * v * 2 * c * i + torch.multiply(x, x) + x.mul(v),
    "div": lambda x, v, i, m, c, y: x / v + v / x + 1 / x + x.div(v) + torch.true_divide(x, v),
    "divide": lambda x, v, i, m, c, y: torch.divide(x, v) + i / 2 + x,
    "div floor": lambda x, v, i, m, c, y: x + torch.div(v, x, rounding_mode="floor"),
    "div trunc": lambda x, v, i, m, c, y: x + torch.div(v, x, rounding_mode="trunc"),
    "floor_divide": lambda x, v, i, m, c, y: (
        x + torch.floor_divide(v, x.detach()) + v // 0.3 + i // 2 + (i - 3) // 2
    ),
    "remainder": lambda x, v, i, m, c, y: x % 0.4 + v % x + (i - 3) % 2 + torch.remainder(x, v),
    "pow": lambda x, v, i, m, c, y: x**2 + v**x + 2**x + x**3 + x.pow(0) + torch.pow(v, 0.5) * x,
    "float_power": lambda x, v, i, m, c, y: torch.float_power(v, 1.5) * x,
    "pow of zero": lambda x, v, i, m, c, y: (x - x.detach()) ** 2 + (x - x.detach()) ** 1,
    "maximum": lambda x, v, i, m, c, y: (
        torch.maximum(x, -v) + torch.max(x, v) + torch.maximum(x, x)
    ),
    "minimum": lambda x, v, i, m, c, y: (
        torch.minimum(x, -v) + torch.min(x, v) + torch.minimum(x, x)
    ),
    "logaddexp": lambda x, v, i, m, c, y: torch.logaddexp(x, v) + torch.logaddexp(v, 100 * x),
    "xlogy": lambda x, v, i, m, c, y: (
        torch.special.xlogy(x, v) + torch.xlogy(x * 0, v) + x.xlogy(v)
    ),
    "where": lambda x, v, i, m, c, y: torch.where(x > -0.5, x, v * x) + x.where(v > 1, v),
    "where of infinity": lambda x, v, i, m, c, y: torch.where(v > 1, x, -torch.inf).exp(),
    "clamp": lambda x, v, i, m, c, y: torch.clamp(x, -1, 0.2) + x.clamp(min=-1) + x.clip(max=v - 1),
    "clamp by tensors": lambda x, v, i, m, c, y: torch.clamp(v, x, v * x) + torch.clip(x, x, v - 1),
    "clamp integers": lambda x, v, i, m, c, y: x * i.clamp(min=2) + x * i.clamp(max=3),
    "neg": lambda x, v, i, m, c, y: (
        -x + (+v) + torch.neg(v) * x + torch.negative(x) + torch.positive(x)
    ),
    "abs": lambda x, v, i, m, c, y: abs(x) + torch.absolute(x) + x.abs() + (x - x.detach()).abs(),
    "square": lambda x, v, i, m, c, y: torch.square(x),
    "exp": lambda x, v, i, m, c, y: torch.exp(x) + x.exp2() + torch.expm1(x) + i.double().exp() * x,
    "log": lambda x, v, i, m, c, y: torch.log(x * x + 9) + (x * x).log2() + (x * x).log10(),
    "log1p": lambda x, v, i, m, c, y: torch.log1p(x * x),
    "sqrt": lambda x, v, i, m, c, y: torch.sqrt(x * x + v) + (x * x).rsqrt(),
    "reciprocal": lambda x, v, i, m, c, y: torch.reciprocal(x),
    "sin": lambda x, v, i, m, c, y: torch.sin(x) + x.cos() * v + torch.atan(x),
    "tanh": lambda x, v, i, m, c, y: torch.tanh(x),
    "sigmoid": lambda x, v, i, m, c, y: torch.sigmoid(x) + torch.special.expit(90 * x),
    "logsigmoid": lambda x, v, i, m, c, y: F.logsigmoid(x) + F.logsigmoid(100 * x),
    "softplus": lambda x, v, i, m, c, y: F.softplus(x, beta=2.0) + F.softplus(40 * x),
    "silu": lambda x, v, i, m, c, y: F.silu(x) + F.relu(x) + x.relu() + F.relu(x - x.detach()),
    "sign": lambda x, v, i, m, c, y: x + x.sign() + x.floor() + x.ceil() + x.trunc() + v.round(),
    "comparisons": lambda x, v, i, m, c, y: (
        x * (x > 0) + x * (x < v) + (x >= c) + (x <= 0) + (i == 3) + (i != 2) * x
    ),
    "comparisons by name": lambda x, v, i, m, c, y: (
        x
        + torch.eq(i, 1)
        + x.gt(0)
        + torch.less(x, v)
        + x.greater(0)
        + x.greater_equal(v)
        + torch.less_equal(x, c)
        + torch.not_equal(i, 2)
    ),
    "logic": lambda x, v, i, m, c, y: (
        x * ((x > 0) & (v < 1))
        + ((x > 0) | (v < 1))
        + ((x > 0) ^ (v > 1))
        + ~(x > 0)
        + torch.logical_and(x > 0, v < 1)
        + torch.logical_or(x > 0, v < 1)
        + (i & 1)
        + (i | 1)
        + torch.logical_not(x > 0)
        + torch.logical_xor(x > 0, v > 1)
        + torch.bitwise_not(i)
        + torch.bitwise_and(i, 3)
        + torch.bitwise_or(i, 4)
        + torch.bitwise_xor(i, 5)
    ),
    "not numbers": lambda x, v, i, m, c, y: (
        x + torch.isnan(x.log()) + torch.isinf(v / 0) + torch.isfinite(x)
    ),
    "nan_to_num": lambda x, v, i, m, c, y: torch.nan_to_num(
        x * (v / 0.0 * (v > 1)).nan_to_num(nan=2.0, posinf=3.0), neginf=-1.0
    ),
    "masked_fill": lambda x, v, i, m, c, y: x.masked_fill(v > 1, 0.5) + x * i.masked_fill(v > 1, 7),
    "types": lambda x, v, i, m, c, y: (
        x.float().double() * i.float()
        + x.to(torch.float32) * v.long()
        + i.bool() * x
        + x.to(v)
        + x.type_as(v)
        + i.to(dtype=torch.float64) * x
        + (x > 0).int()
        + (x > 0).sum()
        + x.contiguous()
        + x.clone()
        + x.cpu()
        + x.to("cpu")
        + i.to(v.dtype)
        + x.to(x.device)
    ),
    "other types": lambda x, v, i, m, c, y: (
        x.half() + x.bfloat16() * i.to(torch.bfloat16),
        x.to(torch.float16) * v,
    ),
    "other powers": lambda x, v, i, m, c, y: (
        torch.rsub(x, v, alpha=2) + torch.fmod(v, x) + x.fmod(0.4) + torch.lerp(x, v, 0.3),
        torch.addcmul(v, x, x, value=2) + x.addcdiv(x, v) + torch.hypot(x, v),
        torch.fmax(x, -v) + x.fmin(v) + x.clamp_min(-0.5) + torch.clamp_max(x, 0.1),
        torch.logaddexp2(x, v) + torch.special.xlog1py(v, x * x) + torch.atan2(x, v),
        torch.copysign(v, x) * x + x * torch.isclose(x, x + 1e-9),
    ),
    "trigonometry": lambda x, v, i, m, c, y: (
        torch.tan(x) + (x / 9).asin() + torch.acos(x / 9) + torch.sinh(x) + x.cosh(),
        torch.asinh(x) + torch.acosh(x * x + 2) + torch.atanh(x / 9),
    ),
    "other activations": lambda x, v, i, m, c, y: (
        F.gelu(x) + F.gelu(x, approximate="tanh") + F.elu(x) + F.leaky_relu(x, 0.2),
        F.softsign(x) + torch.logit(v / 2) * x,
    ),
    "special": lambda x, v, i, m, c, y: (
        torch.erf(x) + torch.erfc(x) + torch.special.erfinv(x / 9) + x.frac() + torch.sgn(x) * x,
        torch.lgamma(v) * x + torch.special.gammaln(x * x + 1) + torch.digamma(x * x + 1),
        x * torch.signbit(x) + x * torch.isposinf(v / 0) + x * torch.isneginf(x),
    ),
    "detach": lambda x, v, i, m, c, y: x.detach() * x + x.data * x + x.exp().detach() * v,
}
REDUCTIONS: dict[str, Case] = {
    "sum": lambda x, v, i, m, c, y: (x.sum(), torch.sum(y, dim=1), i.sum() * x),
    "sum of dims": lambda x, v, i, m, c, y: (
        y.sum((0, 1)),
        y.sum(-2, keepdim=True),
        x.sum(0),
        y.sum(dim=[0]),
        (x > 0).sum() * x.sum(dtype=torch.float64),
    ),
    "mean": lambda x, v, i, m, c, y: (x.mean(), torch.mean(y, 0), i.float().mean() * x),
    "nansum": lambda x, v, i, m, c, y: torch.nansum(torch.where(v > 1, x, torch.nan)),
    "prod": lambda x, v, i, m, c, y: (x.prod(), y.prod(1), (x * (v > 1)).prod(0)),
    "prod with one zero": lambda x, v, i, m, c, y: (x - x[2].detach()).prod(),
    "amax": lambda x, v, i, m, c, y: (x.amax(), x.amin(0), y.amax((0, 1)), x.max()),
    "amax of ties": lambda x, v, i, m, c, y: (x.clamp(-0.5, 0.0).amax(), x.clamp(-0.5, 0).min()),
    "max along": lambda x, v, i, m, c, y: (
        y.max(dim=1)[0],
        y.max(0).values,
        x.max(0)[0],
        x.min(0).indices + x,
        y.min(1, keepdim=True).values,
    ),
    "argmax": lambda x, v, i, m, c, y: (
        x + x.argmax(),
        m.argmin(1) * x,
        x + m.argmax(),
        m.argmax(0, keepdim=True) + x[0],
    ),
    "logsumexp": lambda x, v, i, m, c, y: (
        x.logsumexp(0),
        torch.logsumexp(y, dim=(0, 1)),
        torch.logsumexp(700 * x, 0),
        torch.logsumexp(torch.where(v > 1, x, -torch.inf), 0, True),
    ),
    "any": lambda x, v, i, m, c, y: (
        x * (m > 0).any(-1),
        x * (m > -1).all(dim=1),
        (x > 9).any() * x,
        (x < 9).all() * x,
        torch.count_nonzero(i) * x,
    ),
    "softmax": lambda x, v, i, m, c, y: (
        x.softmax(0),
        F.softmax(y, dim=1),
        torch.softmax(x, -1, dtype=torch.float64),
    ),
    "log_softmax": lambda x, v, i, m, c, y: (
        x.log_softmax(0),
        F.log_softmax(y, dim=0),
        torch.log_softmax(900 * x, -1),
        (torch.log_softmax(torch.where(v > 1, x, -torch.inf), 0) * (v > 1)).nan_to_num(),
    ),
    "cumsum": lambda x, v, i, m, c, y: (x.cumsum(0), torch.cumsum(y, dim=1)),
    "var": lambda x, v, i, m, c, y: (
        x.var(),
        x.std(),
        torch.var(y, 1),
        x.var(unbiased=False),
        (x * 0).std(),
        torch.std(y, dim=0, correction=0, keepdim=True),
        torch.std(x, False),
    ),
    "norm": lambda x, v, i, m, c, y: (
        x.norm(),
        torch.linalg.norm(x),
        x.norm(p=1),
        torch.linalg.vector_norm(y, dim=1),
        torch.linalg.vector_norm(x, 3),
        (x * 0).norm(),
        x.norm(math.inf),
        torch.norm(x, dim=0),
    ),
    "other reductions": lambda x, v, i, m, c, y: (
        torch.nanmean(torch.where(v > 1, x, torch.nan)),
        x.median() + torch.nanmedian(x),
        y.median(1).values,
        x.kthvalue(2)[0],
        torch.aminmax(x).min + x.aminmax().max,
        torch.var_mean(x)[1] * torch.std_mean(y, 1)[0],
        F.softmin(x, 0),
    ),
    "other sums": lambda x, v, i, m, c, y: (
        x.cumprod(0) + torch.logcumsumexp(x, 0),
        torch.cummax(x, 0).values + x.cummin(0)[0],
    ),
    "sort": lambda x, v, i, m, c, y: (
        x.sort().values,
        torch.sort(y, dim=0, descending=True)[0],
        x.argsort() * x,
        x.topk(3).values,
        torch.topk(y, k=2, dim=1, largest=False).values,
    ),
}
SHAPES: dict[str, Case] = {
    "getitem": lambda x, v, i, m, c, y: (
        x[1:],
        x[..., ::2],
        x[-1],
        x[None, :, None],
        x[v > 1],
        x[i],
        m[i, 1:3] * x[:, None],
        m[:, [0, 2]] * x[:, None],
        x[2:5][1],
        y[v > 1, i[v > 1].clamp(max=3)],
    ),
    "reshape": lambda x, v, i, m, c, y: (
        x.reshape(2, 3),
        y.view(-1, 8),
        x.view((3, -1)),
        x.flatten(),
        x.ravel(),
        torch.flatten(y, 0, 1),
        x.reshape(2, 3).t(),
        x.view(6, 1).view_as(x),
    ),
    "squeeze": lambda x, v, i, m, c, y: (
        x.unsqueeze(0),
        torch.unsqueeze(x, -1).squeeze(-1),
        x[None, :, None].squeeze(),
        x[None].squeeze(0),
        x.squeeze(0),
    ),
    "transpose": lambda x, v, i, m, c, y: (
        y.T,
        y.transpose(0, 1),
        torch.permute(y, (1, 0)),
        y.swapaxes(0, -1),
        y.mT,
        y.swapdims(0, 1),
        y.permute(1, 0),
    ),
    "expand": lambda x, v, i, m, c, y: (
        x.expand(3, 6),
        x[:, None].expand(-1, 4),
        x[:, None].expand_as(m),
        x.repeat(2, 2),
        torch.broadcast_to(x, (2, 6)),
        x.repeat_interleave(2),
        torch.repeat_interleave(x, i),
        y.repeat_interleave(2, dim=1),
    ),
    "flip": lambda x, v, i, m, c, y: (
        x.flip(0),
        torch.flip(y, dims=[0, 1]),
        x.roll(2),
        torch.roll(y, 1, 0),
    ),
    "narrow": lambda x, v, i, m, c, y: (
        x.narrow(0, 1, 3),
        torch.select(y, 1, 2),
        x.diff(),
        torch.narrow(y, dim=1, start=0, length=2),
    ),
    "gather": lambda x, v, i, m, c, y: (
        x.gather(0, i),
        torch.gather(y, dim=1, index=i[:, None].clamp(max=3)),
        x.index_select(0, i),
        torch.index_select(y, 1, i.clamp(max=3)),
        x.masked_select(v > 1),
        torch.diagonal(y),
    ),
    "scatter": lambda x, v, i, m, c, y: (
        torch.zeros(x.shape[0]).scatter_add(0, i, x),
        v.scatter(0, i[:1], x[:1]),
        torch.index_add(y, 0, i, m, alpha=2),
        torch.take_along_dim(y, i[:, None].clamp(max=3), dim=1),
    ),
    "moves": lambda x, v, i, m, c, y: (
        torch.movedim(y, 0, 1),
        y.moveaxis(1, 0),
        y.fliplr() + torch.flipud(y),
        x.tile(2, 3),
        torch.hstack([x, v]),
        torch.vstack([x, v]),
    ),
    "cat": lambda x, v, i, m, c, y: (
        torch.cat([x, v]),
        torch.cat((m, y), dim=1),
        torch.stack([x, v, x]),
        torch.stack((x, v), dim=-1),
        torch.concat([x, x]),
        torch.concatenate([x[:1], i]),
    ),
    "split": lambda x, v, i, m, c, y: (
        x.split(4)[0],
        x.split([1, 2, 3])[2],
        torch.chunk(x, 4)[1],
        x.chunk(2)[-1],
        x.unbind()[3],
        y.unbind(1)[2],
    ),
    "triangle": lambda x, v, i, m, c, y: (
        torch.tril(x[:, None] * v),
        torch.triu(x[:, None] * v, diagonal=1),
    ),
    "pad": lambda x, v, i, m, c, y: (
        F.pad(x, (2, 1)),
        F.pad(y, (1, 0, 0, 2), value=3.0),
        F.one_hot(i, 7) * x[:, None],
    ),
    "products": lambda x, v, i, m, c, y: (
        torch.dot(x, v),
        x @ v,
        x @ m,
        m.T @ x,
        (x[:, None] * v) @ m,
        torch.mv(m.T, x),
        torch.mm(y.T, m),
        torch.outer(x, v),
        torch.inner(x, x),
        x.vdot(v),
        torch.bmm(y[None], m.T[None]),
        torch.matmul(y.expand(3, 6, 4), m.T),
        torch.matmul(x, m[None].expand(2, 6, 4)),
    ),
    "other products": lambda x, v, i, m, c, y: (
        torch.tensordot(y, m, dims=([0], [0])),
        torch.kron(x, v),
        x @ torch.eye(x.shape[0]) + x * torch.linspace(0, 1, x.shape[0]),
    ),
    "einsum": lambda x, v, i, m, c, y: (
        torch.einsum("i,i->", x, v),
        torch.einsum("i,ij->j", x, m),
        torch.einsum("ij->ji", y),
        torch.einsum("ij,kj->ik", y, m),
        torch.einsum("i,j->ji", x, v),
        torch.einsum("ii->i", x[:, None] * v),
        torch.einsum("...j,j->...", y, m[0]),
    ),
    "new": lambda x, v, i, m, c, y: (
        x + torch.zeros(x.shape[0]) + torch.ones_like(x) + torch.zeros_like(x) + x.new_zeros(6),
        torch.ones(2, x.shape[0], dtype=torch.float64) * x,
        x + torch.full((x.shape[0],), 2.5) + torch.full_like(x, 3),
        x
        + torch.arange(x.numel())
        + torch.arange(1, 2 * x.numel(), 2)
        + x.new_ones(x.shape)
        + x.new_full((6,), 4),
        torch.zeros(x.shape, device=x.device, dtype=x.dtype) + x,
    ),
    "sizes": lambda x, v, i, m, c, y: (
        x.sum() / x.shape[0],
        x / x.numel(),
        x / m.size(1),
        x / x.nelement(),
        x * m.ndim,
        x * m.dim(),
        x * math.sqrt(x.shape[0]) + math.pow(m.shape[1], 0.5),
        x * (x.shape[0] // 4),
        x * m.ndimension(),
        x * (-(m.size()[0] + 1 - 2 * 3) / 7),
        x * (x.shape[0] % 4) ** 2,
        x * (x.shape[0] > 3),
    ),
}
LOSSES: dict[str, Case] = {
    "mse": lambda x, v, i, m, c, y: (F.mse_loss(x, v), F.mse_loss(x, v, reduction="none")),
    "l1": lambda x, v, i, m, c, y: F.l1_loss(x, v, reduction="sum"),
    "smooth_l1": lambda x, v, i, m, c, y: (
        F.smooth_l1_loss(x, v),
        F.smooth_l1_loss(x, v, beta=2.0),
    ),
    "huber": lambda x, v, i, m, c, y: F.huber_loss(x, v, delta=0.7),
    "kl_div": lambda x, v, i, m, c, y: (
        F.kl_div(x, v, reduction="sum"),
        F.kl_div(v, x, log_target=True),
        F.kl_div(y, m.exp(), reduction="batchmean"),
    ),
    "bce": lambda x, v, i, m, c, y: (
        F.binary_cross_entropy_with_logits(x, v),
        F.binary_cross_entropy_with_logits(x, v, pos_weight=v),
    ),
    "classes": lambda x, v, i, m, c, y: (
        F.cross_entropy(y, i.clamp(max=3), label_smoothing=0.1),
        F.nll_loss(y.log_softmax(1), i.clamp(max=3), reduction="none"),
    ),
    "other losses": lambda x, v, i, m, c, y: (
        F.binary_cross_entropy(x.sigmoid(), v / 2, weight=v),
        F.gaussian_nll_loss(x, v, v) + F.poisson_nll_loss(x, v),
        F.soft_margin_loss(x, torch.sign(v - 1)) + F.hinge_embedding_loss(x, torch.sign(v - 1)),
        F.margin_ranking_loss(x, v, torch.ones_like(v), margin=0.5),
        F.pairwise_distance(y, m) + torch.pairwise_distance(y, m),
    ),
    "normalize": lambda x, v, i, m, c, y: (F.normalize(x, dim=0), F.normalize(y, p=1.0)),
    "cosine": lambda x, v, i, m, c, y: (
        F.cosine_similarity(x, v, dim=0),
        torch.cosine_similarity(y, m),
    ),
}
CASES = {**POINTWISE, **REDUCTIONS, **SHAPES, **LOSSES}
