"""What every row of csrc/device/ops.inc means: its formula in NumPy, independent of any device.

A function takes the op's inputs by their names in ops.inc and returns what the op writes. It
computes in the dtype it is given: with float64 it is the truth, with float32 the yardstick of what
a device may lose. Frozen weights come as plain (rows, cols) arrays, pages of the KV cache as (page,
KV_PAGE, G, E) whatever a device's own order.
"""

import numpy as np
import torch

KV_PAGE = 64

# ---- rows in, rows out ----


def embed(ids, w, **_):
    return {"y": w[ids]}


def gather(x, rows, **_):
    return {"y": x[rows]}


def scatter(y, x, rows, **_):
    y = y.copy()
    y[rows] = x
    return {"y": y}


def blend(y, table, ids, weights, **_):
    return {"y": y + (weights[..., None] * table[ids]).sum(1)}


def add(y, x, **_):
    return {"y": y + x}


def patches(pixels, how, **_):
    """In float32 on any device, step by step, as the image processors of transformers do it."""
    rows, cols, side, merge = how.rows, how.cols, how.side, how.merge
    rescale, mean, std = (np.array(x, np.float32) for x in (how.rescale, how.mean, how.std))
    values = (pixels.astype(np.float32) * rescale - mean) / std
    blocks = values.reshape(rows // merge, merge, side, cols // merge, merge, side, 3)
    blocks = blocks.transpose(0, 3, 1, 4, 6, 2, 5)  # each patch (channel, side, side)
    frames = np.repeat(blocks[:, :, :, :, :, None], how.frames, axis=5)
    return {"y": frames.reshape(rows * cols, 3 * how.frames * side * side)}


# ---- f32 and bf16: bits, and so as bytes ----


def widen(x, **_):
    return {"y": (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32)}


def narrow(x, **_):
    """By torch's rounding."""
    half = torch.from_numpy(np.asarray(x, np.float32)).bfloat16()
    return {"y": half.view(torch.int16).numpy().view(np.uint8)}


# ---- products ----


def linear(x, w, bias, plus, **_):
    product = x @ w.T
    if bias is not None:
        product = product + bias
    return {"y": product if plus is None else plus + product}


def matmul(a, b, a_turned, b_turned, b_bf16, N, K, accumulate, c=None, **_):
    """`b` comes as bytes, for it may be bf16."""
    b = (b.view(np.uint16).astype(np.uint32) << 16 if b_bf16 else b.view(np.uint32)).view(
        np.float32
    )
    b = b.astype(a.dtype).reshape((N, K) if b_turned else (K, N))
    product = (a.T if a_turned else a) @ (b.T if b_turned else b)
    return {"c": c + product if accumulate else product}


def linear_backward(dy, w, accumulate, dx=None, **_):
    return {"dx": dx + dy @ w if accumulate else dy @ w}


def lora(x, count, scale, **group):
    out = {}
    for i in range(count):
        y, a, b = (group[f"{name}{i}"] for name in "yab")
        s = x @ a
        out |= {f"y{i}": y + scale * (s @ b), f"s{i}": s}
    return out


def lora_backward(dx, x, count, scale, **group):
    out = {}
    for i in range(count):
        dy, s, a, b, da, db = (group[f"{name}{i}"] for name in ("y", "s", "a", "b", "da", "db"))
        ds = scale * (dy @ b.T)
        out |= {f"da{i}": da + x.T @ ds, f"db{i}": db + scale * (s.T @ dy), f"ds{i}": ds}
        dx = None if dx is None else dx + ds @ a.T
    return out if dx is None else out | {"dx": dx}


# ---- the layer's pointwise parts ----


def rmsnorm(x, w, eps, **_):
    rstd = 1 / np.sqrt(np.mean(x * x, axis=-1) + x.dtype.type(eps))
    return {"y": x * rstd[:, None] * w, "rstd": rstd}


def rmsnorm_backward(dy, x, w, rstd, plus, **_):
    g, unit = dy * w, x * rstd[:, None]
    dx = rstd[:, None] * (g - unit * np.mean(g * unit, axis=-1, keepdims=True))
    return {"dx": dx if plus is None else dx + plus}


def layernorm(x, w, b, eps, **_):
    left = x - x.mean(-1, keepdims=True)
    variance = np.mean(left * left, axis=-1, keepdims=True)
    return {"y": left / np.sqrt(variance + x.dtype.type(eps)) * w + b}


def rope_table(pos, axis, inv_freq, scale, **_):
    pos = pos[:, [0] * len(inv_freq) if axis is None else axis]
    angle = (pos.astype(np.float32) * inv_freq.astype(np.float32)).astype(inv_freq.dtype)
    return {"cosine": np.cos(angle) * scale, "sine": np.sin(angle) * scale}


def turn(x, cosine, sine, W):
    u, v, rest = np.split(x, (W // 2, W), axis=-1)
    c, s = cosine[:, None, :], sine[:, None, :]
    return np.concatenate([u * c - v * s, v * c + u * s, rest], axis=-1)


def rotate(cosine, sine, W, eps, **args):
    out = {}
    for name in "qk":
        x, w = args[f"{name}_raw"], args[f"{name}_norm"]
        if w is not None:
            rstd = 1 / np.sqrt(np.mean(x * x, axis=-1) + x.dtype.type(eps))
            x = x * rstd[..., None] * w
            out[f"{name}_rstd"] = rstd
        out[name] = turn(x, cosine, sine, W)
    return out


def rotate_backward(cosine, sine, W, **args):
    out = {}
    for name in "qk":
        x, w, rstd = (args[f"{name}_{what}"] for what in ("raw", "norm", "rstd"))
        g = turn(args[f"d{name}"], cosine, -sine, W)
        if w is not None:
            g, unit = g * w, x * rstd[..., None]
            g = rstd[..., None] * (g - unit * np.mean(g * unit, axis=-1, keepdims=True))
        out[f"d{name}"] = g
    return out


def logistic(x):
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def swiglu(gate, up, **_):
    return {"y": gate * logistic(gate) * up}


def swiglu_backward(dy, gate, up, **_):
    s = logistic(gate)
    return {"dgate": dy * up * (s + gate * s * (1 - s)), "dup": dy * gate * s}


def gelu(x, exact, **_):
    half = x / 2  # stays of x's type
    if exact:
        return {"y": half * (1 + erf(half * 2**0.5))}
    return {"y": half * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))}


def erf(x):
    return torch.erf(torch.from_numpy(np.ascontiguousarray(x))).numpy()


def halve(x, E, **_):
    return {"a": x[:, :E], "b": x[:, E:]}


def join(a, b, **_):
    return {"x": np.concatenate([a, b], axis=-1)}


def gate(x, gate, **_):
    return {"y": x * logistic(gate)}


def gate_backward(dy, x, gate, **_):
    s = logistic(gate)
    return {"dx": dy * s, "dgate": dy * x * s * (1 - s)}


# ---- gated delta networks ----

CONV = 4


def conv_silu(x, w, spans):
    """Of torch tensors x (T,C), w (C,CONV)."""
    out = [x[:0]]
    for span in spans:
        rows = torch.nn.functional.pad(x[span.row : span.row + span.rows], (0, 0, CONV - 1, 0))
        out.append(sum(w[:, j] * rows[j : j + span.rows] for j in range(CONV)))
    return torch.nn.functional.silu(torch.cat(out))


def conv(x, w, spans, **_):
    return {"y": conv_silu(*(torch.from_numpy(a) for a in (x, w.reshape(-1, CONV))), spans).numpy()}


def conv_backward(dy, x, w, spans, **_):
    x, w = torch.from_numpy(x).requires_grad_(), torch.from_numpy(w.reshape(-1, CONV))
    (dx,) = torch.autograd.grad(conv_silu(x, w, spans), x, torch.from_numpy(dy))
    return {"dx": dx.numpy()}


def softplus(x):
    return np.logaddexp(x, x.dtype.type(0))


def delta_gates(b, a, rate, bias, **_):
    return {"beta": logistic(b), "decay": -np.exp(rate) * softplus(a + bias)}


def delta_gates_backward(dbeta, ddecay, b, a, rate, bias, **_):
    s = logistic(b)
    return {"db": dbeta * s * (1 - s), "da": ddecay * -np.exp(rate) * logistic(a + bias)}


def delta_rule(q, k, v, beta, decay):
    """y and w (rows,H,E) of one sequence, and the states behind its full pages; of torch tensors, q
    and k (rows,H,N)."""
    state = q.new_zeros(*q.shape[1:], v.shape[-1])
    y, w, pages = [], [], []
    for i in range(len(q)):
        state = state * decay[i].exp()[:, None, None]
        w.append(v[i] - torch.einsum("hne,hn->he", state, k[i]))
        state = state + torch.einsum("hn,he->hne", k[i], beta[i][:, None] * w[i])
        y.append(torch.einsum("hne,hn->he", state, q[i]))
        if (i + 1) % KV_PAGE == 0:
            pages.append(state)
    return torch.stack(y), torch.stack(w), pages


def delta_inputs(q, k, v, beta, decay, H):
    """Torch tensors of a whole batch; q and k once for each value head."""
    q, k, v, beta, decay = (torch.from_numpy(x).requires_grad_() for x in (q, k, v, beta, decay))
    repeats = H // q.shape[1]
    return (q, k, v, beta, decay), tuple(x.repeat_interleave(repeats, dim=1) for x in (q, k))


def delta(q, k, v, beta, decay, spans, T, H, N, E, **_):
    (_, _, *rest), (q, k) = delta_inputs(q, k, v, beta, decay, H)
    y, w, pages = np.full_like(v, np.nan), np.full_like(v, np.nan), []
    pages = np.full((T // KV_PAGE, H, N, E), np.nan, v.dtype)
    for span in spans:
        rows = slice(span.row, span.row + span.rows)
        found = delta_rule(*(x[rows].detach() for x in (q, k, *rest)))
        y[rows], w[rows] = (x.numpy() for x in found[:2])
        for i, state in enumerate(found[2]):
            pages[(span.row + i * KV_PAGE) // KV_PAGE] = state.numpy()
    return {"y": y, "w": w, "pages": pages}


def delta_backward(dy, q, k, v, beta, decay, spans, H, **_):
    names = ("dq", "dk", "dv", "dbeta", "ddecay")
    leaves, (q, k) = delta_inputs(q, k, v, beta, decay, H)
    total = dict(zip(names, (np.zeros(x.shape, dy.dtype) for x in leaves), strict=True))
    for span in spans:
        rows = slice(span.row, span.row + span.rows)
        y, _, _ = delta_rule(*(x[rows] for x in (q, k, *leaves[2:])))
        gradients = torch.autograd.grad(y, leaves, torch.from_numpy(dy[rows]), retain_graph=True)
        for name, gradient in zip(names, gradients, strict=True):
            total[name] += gradient.numpy()
    return total


# ---- mixtures of experts ----


def shares_of_all(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def route(logits, K, norm, **_):
    chosen = np.argsort(-logits, axis=-1, kind="stable")[:, :K]
    share = np.take_along_axis(shares_of_all(logits), chosen, -1)
    if norm:
        share = share / share.sum(-1, keepdims=True)
    return {"chosen": chosen, "share": share}


def route_backward(dshare, chosen, logits, norm, **_):
    p, dp = shares_of_all(logits), np.zeros_like(logits)
    kept = np.take_along_axis(p, chosen, -1)
    if norm:
        total = kept.sum(-1, keepdims=True)
        dshare = (dshare - (dshare * kept).sum(-1, keepdims=True) / total) / total
    np.put_along_axis(dp, chosen, dshare, -1)
    return {"dlogits": p * (dp - (p * dp).sum(-1, keepdims=True))}


def group(chosen, K, X, **_):
    pair = np.argsort(chosen.ravel(), kind="stable")
    place = np.empty_like(pair)
    place[pair] = np.arange(len(pair))
    last = np.cumsum(np.bincount(chosen.ravel(), minlength=X))
    bounds = np.stack([np.concatenate([[0], last[:-1]]), last], -1)
    return {"pair": pair, "row": pair // K, "place": place, "bounds": bounds}


def group_part(bounds, row, first, count, **_):
    part = [
        first_row + np.searchsorted(row[first_row:last_row], (first, first + count))
        for first_row, last_row in bounds
    ]
    return {"part": np.array(part)}


def unite(x, place, plus, T, K, **_):
    out = x[place.reshape(T, K)].sum(1)
    return {"y": out if plus is None else plus + out}


def by_expert(bounds, P):
    """Each expert and its pairs."""
    every = [(0, P)] if bounds is None else bounds
    return [(e, slice(first, last)) for e, (first, last) in enumerate(every)]


def grouped_linear(x, w, bias, bounds, X, P, N, count, **_):
    y = np.zeros((count, P, N), x.dtype)
    for e, own in by_expert(bounds, P):
        for part in range(count):
            y[part, own] = x[own] @ w[part * X + e].T
            if bias is not None:
                y[part, own] += bias[part * X + e]
    return {"y": y}


def grouped_linear_backward(dy, w, bounds, P, D, accumulate, dx=None, **_):
    out = dx.copy() if accumulate else np.zeros((P, D), dy.dtype)
    for e, own in by_expert(bounds, P):
        out[own] += dy[own] @ w[e]
    return {"dx": out}


def grouped_matmul(y, x, w, turned, bounds, P, scale, accumulate, **_):
    y = y.copy()
    for e, own in by_expert(bounds, P):
        product = np.asarray(scale, x.dtype) * (x[own] @ (w[e].T if turned else w[e]))
        y[own] = y[own] + product if accumulate else product
    return {"y": y}


def grouped_gradient(dw, x, dy, bounds, P, scale, **_):
    dw = dw.copy()
    for e, own in by_expert(bounds, P):
        dw[e] += np.asarray(scale, x.dtype) * (x[own].T @ dy[own])
    return {"dw": dw}


def unit(gate, up, limit):
    """What an expert makes of gate and up: swiglu, or gpt-oss's own."""
    if not limit:
        return swiglu(gate, up)["y"]
    gate = np.minimum(gate, limit)
    return gate * logistic(1.702 * gate) * (np.clip(up, -limit, limit) + 1)


def unit_backward(dy, gate, up, limit):
    if not limit:
        return swiglu_backward(dy, gate, up)
    g, u = np.minimum(gate, limit), np.clip(up, -limit, limit)
    s = logistic(1.702 * g)
    slope = s * (1 + 1.702 * g * (1 - s))
    return {"dgate": (gate == g) * dy * (u + 1) * slope, "dup": (up == u) * dy * g * s}


def swiglu_share(gate, up, share, pair, P, limit, **_):
    share = share.ravel()[np.arange(P) if pair is None else pair][:, None]
    return {"y": share * unit(gate, up, limit)}


def swiglu_share_backward(dy, gate, up, share, pair, P, limit, **_):
    place = np.arange(P) if pair is None else pair
    own = share.ravel()[place][:, None]
    dshare = np.zeros(share.size, dy.dtype)
    dshare[place] = (dy * unit(gate, up, limit)).sum(-1)
    return unit_backward(own * dy, gate, up, limit) | {"dshare": dshare.reshape(share.shape)}


def share_bias(y, share, chosen, bias, **_):
    return {"y": y + (share[..., None] * bias[chosen]).sum(1)}


def share_bias_backward(dshare, dy, chosen, bias, **_):
    return {"dshare": dshare + (dy[:, None] * bias[chosen]).sum(-1)}


def sigmoid(x, **_):
    return {"y": logistic(x)}


def sigmoid_backward(dy, y, **_):
    return {"dx": dy * y * (1 - y)}


# ---- attention ----


def kv_write(k_pages, v_pages, k, v, slot, **_):
    k_pages, v_pages = k_pages.copy(), v_pages.copy()
    k_pages[slot // KV_PAGE, slot % KV_PAGE] = k
    v_pages[slot // KV_PAGE, slot % KV_PAGE] = v
    return {"k_pages": k_pages, "v_pages": v_pages}


def kv_copy(k_pages, v_pages, to, count, **rest):
    source = rest["from"]  # a keyword of Python
    k_pages, v_pages = k_pages.copy(), v_pages.copy()
    k_pages[to, :count] = k_pages[source, :count]
    v_pages[to, :count] = v_pages[source, :count]
    return {"k_pages": k_pages, "v_pages": v_pages}


def attend(q, k, v):
    """softmax(q·kᵀ/√E)·v of one query (E) and the keys it sees (n, E), and the logsumexp."""
    scores = (k @ q) / np.sqrt(q.dtype.type(len(q)))
    top = scores.max()
    weight = np.exp(scores - top)
    return (weight @ v) / weight.sum(), top + np.log(weight.sum())


def first_seen(position, window):
    """The first key that a query at this position sees; a window of 0 is none."""
    return max(0, position - window + 1) if window else 0


def attention(q, k_pages, v_pages, spans, pages, H, G, window=0, whole=0, **_):
    y, lse = np.full_like(q, np.nan), np.full(q.shape[:2], np.nan, q.dtype)
    for span in spans:
        for i in range(span.rows):
            seen = span.pos + (span.rows if whole else i + 1)
            keys = slice(first_seen(span.pos + i, window), seen)
            own = pages[span.first : span.first + (seen + KV_PAGE - 1) // KV_PAGE]
            k = k_pages[own].reshape(-1, *k_pages.shape[2:])[keys]
            v = v_pages[own].reshape(-1, *v_pages.shape[2:])[keys]
            for h in range(H):
                g = h * G // H
                y[span.row + i, h], lse[span.row + i, h] = attend(
                    q[span.row + i, h], k[:, g], v[:, g]
                )
    return {"y": y, "lse": lse}


def sink(y, lse, sinks, **_):
    both = np.logaddexp(lse, sinks)
    return {"y": y * np.exp(lse - both)[..., None], "lse": both}


def attention_backward(dy, y, lse, q, k, v, spans, H, G, E, window=0, **_):
    dq, dk, dv = np.full_like(q, np.nan), np.full_like(k, np.nan), np.full_like(v, np.nan)
    root = np.sqrt(q.dtype.type(E))
    for span in spans:
        rows = slice(span.row, span.row + span.rows)
        key = np.arange(span.rows)
        first = np.array([first_seen(i, window) for i in key])
        seen = (first[:, None] <= key) & (key <= key[:, None])
        dk[rows] = dv[rows] = 0
        for h in range(H):
            g = h * G // H
            scores = q[rows, h] @ k[rows, g].T / root - lse[rows, h][:, None]
            p = np.exp(np.where(seen, scores, -np.inf))
            slope = np.sum(dy[rows, h] * y[rows, h], axis=-1, keepdims=True)
            ds = p * (dy[rows, h] @ v[rows, g].T - slope) / root
            dq[rows, h] = ds @ k[rows, g]
            dk[rows, g] += ds.T @ q[rows, h]
            dv[rows, g] += p.T @ dy[rows, h]
    return {"dq": dq, "dk": dk, "dv": dv}


# ---- the head ----


def head(x, w, **_):
    return {"logits": x @ w.T}


def head_lora(logits, x, a, b, scale, **_):
    s = x @ a
    return {"logits": logits + scale * (s @ b), "s": s}


def logsumexp(logits):
    """logΣexp of each row; −inf for a row of −inf, without a NaN on the way."""
    top = logits.max(axis=-1, keepdims=True)
    top = np.where(np.isinf(top), 0, top).astype(logits.dtype)
    with np.errstate(divide="ignore", over="ignore"):
        return top[:, 0] + np.log(np.exp(logits - top).sum(axis=-1))


def parts(lse):
    """logΣexp as the ops have it, (T, 2): here it is the first of the two numbers."""
    return np.stack([lse, np.zeros_like(lse)], axis=-1)


def logprob(logits, ids, start, **_):
    lse = logsumexp(logits) if len(logits) else np.zeros(0, logits.dtype)
    row = np.repeat(np.arange(len(logits)), np.diff(start))
    with np.errstate(invalid="ignore"):
        return {"lse": parts(lse), "logp": logits[row, ids] - lse[row]}


def logprob_backward(logits, lse, dlogp, ids, start, first=0, **_):
    dlogits, lse = np.zeros_like(logits), lse.sum(axis=-1)
    for t in range(len(logits)):
        for i in range(start[t], start[t + 1]):
            dlogits[t] -= dlogp[i] * np.exp(logits[t] - lse[t])
            if 0 <= ids[i] - first < logits.shape[1]:
                dlogits[t, ids[i] - first] += dlogp[i]
    return {"dlogits": dlogits}


def ranking(logits):
    """Ids of one row from the best on: larger first, the lower id first among equals, NaN last."""
    nan = np.isnan(logits)
    return np.lexsort((np.arange(len(logits)), np.where(nan, 0, -logits), nan))


def topk_logprob(logits, lse, K, **_):
    lse = lse.sum(axis=-1)
    ids = np.array([ranking(row)[:K] for row in logits], np.int32).reshape(len(logits), K)
    with np.errstate(invalid="ignore"):
        return {"ids": ids, "logp": np.take_along_axis(logits, ids, axis=1) - lse[:, None]}


def log_softmax(logits):
    return logits - logsumexp(logits)[:, None]


def jsd_terms(log_p, log_q, beta):
    """Terms of the generalized Jensen-Shannon divergence of the student's log_p and the teacher's
    log_q, and d term / d log_p. What has no mass adds nothing, also where its logarithm is −inf."""
    p, q = np.exp(log_p), np.exp(log_q)

    def times(mass, log):
        return np.where(mass == 0, 0, mass * log)

    with np.errstate(invalid="ignore", divide="ignore"):
        if beta == 0:
            return times(q, log_q - log_p), -q
        if beta == 1:
            terms = times(p, log_p - log_q)
            return terms, p + terms
        log_m = np.logaddexp(log_p + np.log1p(-beta), log_q + np.log(beta))
        of_p = (1 - beta) * times(p, log_p - log_m)
        return beta * times(q, log_q - log_m) + of_p, of_p


def jsd(student, teacher, scale, how, **_):
    dtype, ids = student.dtype, None
    beta = dtype.type(round(how.beta, 6))  # as it was before it became a float
    if how.probs:
        log_p, log_q = (np.log(np.maximum(x, dtype.type(1e-8))) for x in (student, teacher))
    else:
        tau = dtype.type(round(how.temperature, 6))
        x, y = student / tau, teacher / tau
        if how.top_k:
            ids = np.array([ranking(row)[: how.top_k] for row in teacher], int)
            ids = ids.reshape(len(y), how.top_k)
            x, y = (np.take_along_axis(z, ids, axis=1) for z in (x, y))
        log_p, log_q = log_softmax(x), log_softmax(y)
    terms, slope = jsd_terms(log_p, log_q, beta)
    slope = np.where(terms > how.clip, 0, slope)
    terms = np.minimum(terms, dtype.type(how.clip))
    out = {"loss": terms if how.each else terms.sum(axis=1)}
    if scale is None:
        return out
    slope = slope * (scale if how.each else scale[:, None])
    if how.probs:
        return out | {"dstudent": np.where(student < 1e-8, 0, slope / np.exp(log_p))}
    gradient = (slope - np.exp(log_p) * slope.sum(axis=1, keepdims=True)) / tau
    if ids is None:
        return out | {"dstudent": gradient}
    dstudent = np.zeros_like(student)
    np.put_along_axis(dstudent, ids, gradient, axis=1)
    return out | {"dstudent": dstudent}


def temper(logits, draws, **_):
    temperature = np.array([d.temperature or 1 for d in draws], logits.dtype).reshape(-1, 1)
    return {"logits": logits / temperature}


def philox(counter, key):
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        low = 0xFFFFFFFF
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & low, (p0 >> 32) ^ c[3] ^ k[1], p0 & low]
        k = [(k[0] + 0x9E3779B9) & low, (k[1] + 0xBB67AE85) & low]
    return c


def uniform(draw):
    """The number in (0, 1) of (seed, sample, pos): 52 bits, in the middle of their interval."""
    c = philox((draw.sample, draw.pos, 0, 0), (draw.seed & 0xFFFFFFFF, draw.seed >> 32))
    return (((c[0] << 32 | c[1]) >> 12) + 0.5) * 2.0**-52


def kept(logits, draw):
    """Ids of one row that a draw may give, in id order: top_k, then top_p of those."""
    order = ranking(logits)
    if draw.top_k > 0:
        order = order[: draw.top_k]
    if draw.top_p < 1:
        mass = np.exp(logits[order] - logits[order].max())
        before = np.cumsum(mass) - mass
        order = order[: max(1, np.count_nonzero(before < draw.top_p * mass.sum()))]
    return np.sort(order)


def sample(logits, lse, draws, **_):
    lse = lse.sum(axis=-1)
    ids, logp = np.zeros(len(logits), np.int32), np.zeros(len(logits), logits.dtype)
    for t, draw in enumerate(draws):
        row = logits[t]
        if draw.temperature == 0:
            ids[t] = ranking(row)[0]
            logp[t] = row[ids[t]] - lse[t]
            continue
        own = kept(row, draw)
        mass = np.exp(row[own] - lse[t])
        ids[t] = own[np.searchsorted(np.cumsum(mass), uniform(draw) * mass.sum(), side="right")]
        cuts = 0 < draw.top_k < len(row) or draw.top_p < 1
        logp[t] = row[ids[t]] - lse[t] - (np.log(mass.sum()) if cuts else 0)
    return {"ids": ids, "logp": logp}


# ---- the optimizer ----


def square_sum(total, g, **_):
    return {"total": total + np.sum(g.astype(np.float64) ** 2)}


def accumulate(y, x, **_):
    return {"y": y + x}


def average(y, x, scale, rate, **_):
    return {"y": y + y.dtype.type(rate) * (y.dtype.type(scale) * x - y)}


def adamw(m, v, before, g, step, scale, lr, beta1, beta2, eps, weight_decay, **_):
    g = g.dtype.type(scale) * g
    w = before * (1 - lr * weight_decay)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    denominator = np.sqrt(v) / np.sqrt(1 - beta2**step) + eps
    return {"w": w - lr / (1 - beta1**step) * m / denominator, "m": m, "v": v}


def adamw_norm(total, **step):
    return {"total": total + np.sum(adamw(**step)["w"].astype(np.float64) ** 2)}


def gram(c, x, turned, **_):
    return {"c": c + (x @ x.T if turned else x.T @ x)}


def mix(before, x, k, turned, **_):
    return {"y": before - (k @ x if turned else x @ k)}
