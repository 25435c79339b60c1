"""RMSNorm, rotary embedding, gated activations and cross-entropy as Triton programs.

Each reads its operands once, computes in fp32 and writes its result once. The models' own code is
several operators, each of which reads and writes all of it, much of it in fp32.

Layout. A norm's program holds whole rows: one long row or several short ones. A rotation's program
holds one token, whose angles it reads once for all heads of queries and keys; it norms them first
where they are normed, and rounds where separate operators would. A gate's program
holds a part of a row. A cross-entropy's program reads one token's logits in parts, twice: for the
sum of their exponentials, scaled anew where a higher logit is found, and for the gradient.

Letters: M rows, N features, H heads, D features of a head, V tokens of the vocabulary.
"""

import triton
import triton.language as tl

from offload.engine.experts.kernels import gate_parts, rounded

LOWEST = tl.constexpr(-3.4e38)  # finite, since the difference of two infinities is none


@triton.jit
def norm(
    x,  # (M, N)
    weight,  # (N,)
    y,  # (M, N), contiguous
    inverse,  # (M,) fp32: one over the root of the mean square
    num_rows,
    num_n,
    stride_x,
    eps,
    offset,
    IS_CAST_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write rows over their root mean square, times the weight plus an offset."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    is_row = row < num_rows
    is_there = is_row[:, None] & (n < num_n)[None, :]
    value = tl.load(x + (row * stride_x)[:, None] + n[None, :], is_there, other=0.0)
    value = value.to(tl.float32)
    factor = tl.load(weight + n, n < num_n, other=0.0).to(tl.float32) + offset
    scale = tl.rsqrt(tl.sum(value * value, 1) / num_n + eps)
    normed = value * scale[:, None]
    if IS_CAST_FIRST:
        normed = rounded(normed, y).to(tl.float32)
    result = rounded(normed * factor[None, :], y)
    tl.store(y + (row * num_n)[:, None] + n[None, :], result, is_there)
    tl.store(inverse + row, scale, is_row)


@triton.jit
def norm_backward(
    gradient,  # (M, N)
    x,  # (M, N)
    weight,  # (N,)
    inverse,  # (M,) fp32
    out,  # (M, N), contiguous
    num_rows,
    num_n,
    stride_g,
    stride_x,
    offset,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the gradient by a norm's input."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    is_row = row < num_rows
    is_there = is_row[:, None] & (n < num_n)[None, :]
    scale = tl.load(inverse + row, is_row, other=0.0)[:, None]
    normed = tl.load(x + (row * stride_x)[:, None] + n[None, :], is_there, other=0.0)
    normed = normed.to(tl.float32) * scale
    factor = tl.load(weight + n, n < num_n, other=0.0).to(tl.float32) + offset
    given = tl.load(gradient + (row * stride_g)[:, None] + n[None, :], is_there, other=0.0)
    given = given.to(tl.float32) * factor[None, :]
    mean = tl.sum(given * normed, 1) / num_n
    result = rounded(scale * (given - normed * mean[:, None]), out)
    tl.store(out + (row * num_n)[:, None] + n[None, :], result, is_there)


@triton.jit
def angles(cos, sin, rotated_width, IS_BACK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return what each feature of a token is multiplied by, and its partner, and which that is.

    The transpose of a rotation takes the partner's sine with the sign turned.
    """
    d = tl.arange(0, BLOCK_D)
    half = rotated_width // 2
    is_rotated = d < rotated_width
    partner = tl.where(is_rotated, tl.where(d < half, d + half, d - half), d)
    factor = tl.load(cos + d, is_rotated, other=1.0).to(tl.float32)
    sign = tl.where(d < half, -1.0, 1.0)
    if IS_BACK:
        other = -sign * tl.load(sin + partner, is_rotated, other=0.0).to(tl.float32)
    else:
        other = sign * tl.load(sin + d, is_rotated, other=0.0).to(tl.float32)
    return factor, other, partner


@triton.jit
def weighted(value, scale, weight, y, IS_CAST_FIRST: tl.constexpr):
    """Return features times the scale of their row and their weight, rounded as `norm` does."""
    normed = value * scale[:, None]
    if IS_CAST_FIRST:
        normed = rounded(normed, y).to(tl.float32)
    return rounded(normed * weight[None, :], y).to(tl.float32)


@triton.jit
def turn(
    x,  # the first head of a token
    weight,  # (D,)
    out,
    inverse,  # of the token's heads
    num_heads,
    width,
    stride_x,
    stride_out,
    eps,
    offset,
    factor_D,
    other_D,
    partner_D,
    HAS_NORM: tl.constexpr,
    IS_CAST_FIRST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write each feature times a factor, plus its partner's times another; norm heads first."""
    d = tl.arange(0, BLOCK_D)
    weight_D, of_partner_D = factor_D, factor_D  # not read without a norm
    if HAS_NORM:
        weight_D = tl.load(weight + d, d < width, other=0.0).to(tl.float32) + offset
        of_partner_D = tl.load(weight + partner_D, d < width, other=0.0).to(tl.float32) + offset
    for first in range(0, num_heads, BLOCK_H):
        head = (first + tl.arange(0, BLOCK_H)).to(tl.int64)
        is_there = (head < num_heads)[:, None] & (d < width)[None, :]
        place = x + (head * stride_x)[:, None]
        value = tl.load(place + d[None, :], is_there, other=0.0).to(tl.float32)
        partner = tl.load(place + partner_D[None, :], is_there, other=0.0).to(tl.float32)
        if HAS_NORM:
            scale = tl.rsqrt(tl.sum(value * value, 1) / width + eps)
            tl.store(inverse + head, scale, head < num_heads)
            value = weighted(value, scale, weight_D, out, IS_CAST_FIRST)
            partner = weighted(partner, scale, of_partner_D, out, IS_CAST_FIRST)
        result = rounded(value * factor_D[None, :] + partner * other_D[None, :], out)
        tl.store(out + (head * stride_out)[:, None] + d[None, :], result, is_there)


@triton.jit
def norm_turn_backward(
    gradient,  # by the first turned head of a token
    x,
    weight,
    inverse,
    out,
    num_heads,
    width,
    stride_g,
    stride_x,
    stride_out,
    offset,
    factor_D,
    other_D,
    partner_D,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the gradient by each head before it was normed and turned."""
    d = tl.arange(0, BLOCK_D)
    weight_D = tl.load(weight + d, d < width, other=0.0).to(tl.float32) + offset
    for first in range(0, num_heads, BLOCK_H):
        head = (first + tl.arange(0, BLOCK_H)).to(tl.int64)
        is_there = (head < num_heads)[:, None] & (d < width)[None, :]
        place = gradient + (head * stride_g)[:, None]
        given = tl.load(place + d[None, :], is_there, other=0.0).to(tl.float32)
        partner = tl.load(place + partner_D[None, :], is_there, other=0.0).to(tl.float32)
        given = rounded(given * factor_D[None, :] + partner * other_D[None, :], out).to(tl.float32)
        scale = tl.load(inverse + head, head < num_heads, other=0.0)[:, None]
        normed = tl.load(x + (head * stride_x)[:, None] + d[None, :], is_there, other=0.0)
        normed = normed.to(tl.float32) * scale
        given = given * weight_D[None, :]
        mean = tl.sum(given * normed, 1) / width
        result = rounded(scale * (given - normed * mean[:, None]), out)
        tl.store(out + (head * stride_out)[:, None] + d[None, :], result, is_there)


@triton.jit
def rotate(
    q,  # (B, H, T, D), any strides but the last
    k,  # (B, fewer H, T, D)
    q_weight,  # (D,)
    k_weight,
    cos,  # (B or 1, T, rotated)
    sin,
    q_out,
    k_out,
    q_inverse,  # (B, T, H) fp32: one over the root of the mean square
    k_inverse,
    num_q,
    num_k,
    num_t,
    width,
    rotated_width,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    q_out_b,
    q_out_h,
    q_out_t,
    k_out_b,
    k_out_h,
    k_out_t,
    cos_b,
    cos_t,
    sin_b,
    sin_t,
    eps,
    offset,
    IS_BACK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_CAST_FIRST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write one token's queries and keys rotated, half by half; further features as they are.

    With `HAS_NORM` each head is normed by itself first; else weights and inverses are not read.
    """
    b = tl.program_id(0).to(tl.int64) // num_t
    t = tl.program_id(0).to(tl.int64) % num_t
    factor, other, partner = angles(
        cos + b * cos_b + t * cos_t,
        sin + b * sin_b + t * sin_t,
        rotated_width,
        IS_BACK,
        BLOCK_D,
    )
    if HAS_NORM:
        q_inverse += (b * num_t + t) * num_q
        k_inverse += (b * num_t + t) * num_k
    turn(
        q + b * q_b + t * q_t,
        q_weight,
        q_out + b * q_out_b + t * q_out_t,
        q_inverse,
        num_q,
        width,
        q_h,
        q_out_h,
        eps,
        offset,
        factor,
        other,
        partner,
        HAS_NORM,
        IS_CAST_FIRST,
        BLOCK_H,
        BLOCK_D,
    )
    turn(
        k + b * k_b + t * k_t,
        k_weight,
        k_out + b * k_out_b + t * k_out_t,
        k_inverse,
        num_k,
        width,
        k_h,
        k_out_h,
        eps,
        offset,
        factor,
        other,
        partner,
        HAS_NORM,
        IS_CAST_FIRST,
        BLOCK_H,
        BLOCK_D,
    )


@triton.jit
def norm_rotate_backward(
    of_q,  # (B, H, T, D), any strides but the last
    of_k,
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    q_inverse,
    k_inverse,
    q_out,
    k_out,
    num_q,
    num_k,
    num_t,
    width,
    rotated_width,
    of_q_b,
    of_q_h,
    of_q_t,
    of_k_b,
    of_k_h,
    of_k_t,
    q_b,
    q_h,
    q_t,
    k_b,
    k_h,
    k_t,
    q_out_b,
    q_out_h,
    q_out_t,
    k_out_b,
    k_out_h,
    k_out_t,
    cos_b,
    cos_t,
    sin_b,
    sin_t,
    offset,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the gradients by one token's queries and keys before they were normed and rotated."""
    b = tl.program_id(0).to(tl.int64) // num_t
    t = tl.program_id(0).to(tl.int64) % num_t
    factor, other, partner = angles(
        cos + b * cos_b + t * cos_t,
        sin + b * sin_b + t * sin_t,
        rotated_width,
        IS_BACK=True,
        BLOCK_D=BLOCK_D,
    )
    norm_turn_backward(
        of_q + b * of_q_b + t * of_q_t,
        q + b * q_b + t * q_t,
        q_weight,
        q_inverse + (b * num_t + t) * num_q,
        q_out + b * q_out_b + t * q_out_t,
        num_q,
        width,
        of_q_h,
        q_h,
        q_out_h,
        offset,
        factor,
        other,
        partner,
        BLOCK_H,
        BLOCK_D,
    )
    norm_turn_backward(
        of_k + b * of_k_b + t * of_k_t,
        k + b * k_b + t * k_t,
        k_weight,
        k_inverse + (b * num_t + t) * num_k,
        k_out + b * k_out_b + t * k_out_t,
        num_k,
        width,
        of_k_h,
        k_h,
        k_out_h,
        offset,
        factor,
        other,
        partner,
        BLOCK_H,
        BLOCK_D,
    )


@triton.jit
def gate_up(
    gate,  # (M, N)
    up,  # (M, N)
    out,  # (M, N), contiguous
    num_n,
    stride_gate,
    stride_up,
    GATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write a gated activation."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_there = n < num_n
    g = tl.load(gate + row * stride_gate + n, is_there, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride_up + n, is_there, other=0.0).to(tl.float32)
    active, _, _ = gate_parts(g, u, 1.0, 0.0, GATE)
    tl.store(out + row * num_n + n, rounded(active, out), is_there)


@triton.jit
def gate_up_backward(
    gradient,  # (M, N)
    gate,  # (M, N)
    up,  # (M, N)
    of_gate,  # (M, N), contiguous
    of_up,  # (M, N), contiguous
    num_n,
    stride_g,
    stride_gate,
    stride_up,
    GATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the gradients of a gated activation by both of its inputs."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_there = n < num_n
    given = tl.load(gradient + row * stride_g + n, is_there, other=0.0).to(tl.float32)
    g = tl.load(gate + row * stride_gate + n, is_there, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride_up + n, is_there, other=0.0).to(tl.float32)
    _, by_gate, by_up = gate_parts(g, u, 1.0, 0.0, GATE)
    tl.store(of_gate + row * num_n + n, rounded(given * by_gate, of_gate), is_there)
    tl.store(of_up + row * num_n + n, rounded(given * by_up, of_up), is_there)


@triton.jit
def cross_entropy(
    logits,  # (M, V)
    labels,  # (M,)
    num_items,  # () or (M,)
    losses,  # (M,) fp32
    gradient,  # (M, V), contiguous
    num_v,
    stride_x,
    stride_items,
    HAS_GRADIENT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Write a token's cross-entropy, and the gradient of the sum over `num_items` by its logits."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_V)
    own = logits + row * stride_x
    most = tl.full((BLOCK_V,), LOWEST, tl.float32)
    sums = tl.zeros((BLOCK_V,), tl.float32)
    for first in range(0, num_v, BLOCK_V):
        is_there = first + part < num_v
        x = tl.load(own + first + part, is_there, other=-float("inf")).to(tl.float32)
        more = tl.maximum(most, x)
        sums = sums * tl.exp(most - more) + tl.exp(x - more)
        most = more
    highest = tl.max(most, 0)
    total = tl.sum(sums * tl.exp(most - highest), 0)
    label = tl.load(labels + row)
    of_label = tl.load(own + label).to(tl.float32)
    tl.store(losses + row, tl.log(total) - (of_label - highest))
    if HAS_GRADIENT:
        scale = 1.0 / tl.load(num_items + row * stride_items).to(tl.float32)
        for first in range(0, num_v, BLOCK_V):
            v = first + part
            x = tl.load(own + v, v < num_v, other=-float("inf")).to(tl.float32)
            probability = tl.exp(x - highest) / total
            result = tl.where(v == label, probability - 1.0, probability) * scale
            tl.store(gradient + row * num_v + v, rounded(result, gradient), v < num_v)
