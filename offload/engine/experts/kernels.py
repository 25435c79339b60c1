"""Products of rows with their own expert's matrix, as Triton programs.

Problem. Before Hopper torch computes one expert after another, and waits for the device to report
how many rows each has: some hundred launches and a wait per projection.

Idea. Rows are sorted by expert, and end_E holds the end of each expert's rows. Each program
computes one tile of the result, for one expert. The number of tiles is known on the device alone,
but no column has more than ceil(S / BLOCK_M) + E of them. So that many programs are started; each
works out which expert its tile belongs to, and those after the last tile exit at once.

All work per row is fused into its tile: gathering it from its token, the branch (one more step of
the sum), bias, gate and routing weight, and their backward. Only rows that are summed over a
token's choices are written first, each to its choice's place, and summed later: atomic adds would
not be reproducible.

Sums are fp32 whatever the dtype of the rows, and fp32 rows are not rounded to TF32.

Letters: T tokens, C choices per token, S = T * C rows, E experts, K features in, N out, F width of
an expert, R rank.
"""

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
SILU, CLAMPED_SWIGLU, GELU_TANH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
GELU = tl.constexpr(3)

# ------------------------------------------------------------------------------------------ parts


@triton.jit
def find_tile(end_E, num_experts, num_columns, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return this program's expert, first row, end of the expert's rows, and column block.

    Neighbouring programs share up to 8 tiles of rows and then a block of columns, so that most of
    their reads hit the L2 cache. A surplus program gets an expert index that does not exist.
    """
    index = tl.arange(0, EXPERTS)
    end = tl.load(end_E + index, mask=index < num_experts, other=0)
    start = tl.load(end_E + index - 1, mask=(index > 0) & (index < num_experts), other=0)
    num_tiles = tl.where(index < num_experts, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
    tile_end = tl.cumsum(num_tiles, 0)
    expert = tl.sum((tile_end * num_columns <= tl.program_id(0)).to(tl.int32), 0)
    is_ours = index == expert
    first_tile = tl.sum(tl.where(is_ours, tile_end - num_tiles, 0), 0)
    local = tl.program_id(0) - first_tile * num_columns
    group = 8 * (local // (8 * num_columns))
    size = tl.minimum(tl.sum(tl.where(is_ours, num_tiles, 0), 0) - group, 8)
    size = tl.maximum(size, 1)
    within = local % (8 * num_columns)
    row = tl.sum(tl.where(is_ours, start, 0), 0) + (group + within % size) * BLOCK_M
    return expert, row, tl.sum(tl.where(is_ours, end, 0), 0), within // size


@triton.jit
def rounded(x, place):
    """Return fp32 values in a pointer's element type, rounded to nearest, ties to even."""
    if IS_INTERPRETED and place.dtype.element_ty == tl.bfloat16:  # there .to() truncates
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(place.dtype.element_ty)


@triton.jit
def add_dot(acc, left, right):
    """Return acc + left @ right, summed in fp32."""
    if IS_INTERPRETED:  # there tl.dot reads the bits of bf16 as integers
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def add_product(
    acc,
    left,  # pointers to the rows (BLOCK_M, 1)
    right,  # pointers to the columns (1, BLOCK_N)
    stride_k,
    num_k,
    IS_EVEN: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Add rows @ columns over K; pointers must be valid, so surplus rows and columns repeat."""
    k = tl.arange(0, BLOCK_K)
    for start in range(0, num_k, BLOCK_K):
        if IS_EVEN:
            x = tl.load(left + (start + k)[None, :])
            w = tl.load(right + (start + k)[:, None] * stride_k)
        else:
            is_k = start + k < num_k
            x = tl.load(left + (start + k)[None, :], mask=is_k[None, :], other=0.0)
            w = tl.load(right + (start + k)[:, None] * stride_k, mask=is_k[:, None], other=0.0)
        acc = add_dot(acc, x, w)
    return acc


@triton.jit
def gate_parts(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, GATE: tl.constexpr):
    """Return a gated activation, and its derivatives by gate and up.

    SILU is g sigmoid(g) u. CLAMPED_SWIGLU, of gpt_oss, is g sigmoid(ALPHA g) (u + 1), g clamped to
    at most LIMIT and u to +-LIMIT. GELU_TANH is gelu in its tanh form, times u;
    GELU is the exact one.
    """
    if GATE == SILU:
        share = tl.sigmoid(gate)
        curve = gate * share
        return curve * up, (share + curve * (1.0 - share)) * up, curve
    if GATE == CLAMPED_SWIGLU:
        is_low, is_within = gate <= LIMIT, (up >= -LIMIT) & (up <= LIMIT)
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1.0
        share = tl.sigmoid(ALPHA * gate)
        curve = gate * share
        slope = share + ALPHA * curve * (1.0 - share)
        return curve * up, tl.where(is_low, slope * up, 0.0), tl.where(is_within, curve, 0.0)
    if GATE == GELU:
        share = 0.5 + 0.5 * tl.erf(0.7071067811865476 * gate)
        curve = gate * share
        density = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)
        return curve * up, (share + gate * density) * up, curve
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    # The share is (1 + tanh(inner)) / 2. What is left of 1 is not their difference: of a gate of 5
    # that would be rounding, times 30.
    low = tl.exp(-2.0 * tl.abs(inner))
    more = 1.0 / (1.0 + low)
    less = low * more
    share, rest = tl.where(inner > 0, more, less), tl.where(inner > 0, less, more)
    slope = 2.0 * 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
    curve = gate * share
    return curve * up, (share + curve * rest * slope) * up, curve


@triton.jit
def part_of(tile, index: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return one of 1 to 32 parts of a tile's columns, by halving it."""
    part = tile
    for i in tl.static_range(1, 6):
        if PARTS >> i:
            pairs = tl.reshape(part, (BLOCK_M, 2, part.shape[1] // 2))
            left, right = tl.split(tl.permute(pairs, (0, 2, 1)))
            part = right if (PARTS >> i) & index else left
    return part


@triton.jit
def gate_backward(
    acc,  # (BLOCK_M, BLOCK_N): the gradient of the activation, from a column on
    column,
    row,  # from the tile's first row, where all pointers are
    is_row,
    weight,
    gates,
    of_gates,
    out,
    width,
    IS_INTERLEAVED: tl.constexpr,
    IS_AGAIN: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write what `activate_backward` does for some columns; return their share of a weight's."""
    f = column + tl.arange(0, BLOCK_N)
    is_there = is_row[:, None] & (f < width)[None, :]
    place = (row * 2 * width)[:, None] + f[None, :]
    gate = tl.load(gates + place, is_there, other=0.0).to(tl.float32)
    up = tl.load(gates + width + place, is_there, other=0.0).to(tl.float32)
    active, by_gate, by_up = gate_parts(gate, up, ALPHA, LIMIT, GATE)
    share = tl.sum(acc * active, 1)  # masked values are zero: every gate is zero at zero
    if IS_AGAIN:
        again = rounded(active * weight, out)
        tl.store(out + (row * width)[:, None] + f[None, :], again, is_there)
    acc *= weight
    by_gate = rounded(acc * by_gate, of_gates)
    by_up = rounded(acc * by_up, of_gates)
    if IS_INTERLEAVED:  # stored in pairs: single-value stores are twice as many, and spill
        both = tl.reshape(tl.join(by_gate, by_up), (BLOCK_M, 2 * BLOCK_N))
        n = 2 * column + tl.arange(0, 2 * BLOCK_N)
        is_there = is_row[:, None] & (n < 2 * width)[None, :]
        tl.store(of_gates + (row * 2 * width)[:, None] + n[None, :], both, is_there)
    else:
        tl.store(of_gates + place, by_gate, is_there)
        tl.store(of_gates + width + place, by_up, is_there)
    return share


# ---------------------------------------------------------------------------------------- kernels


@triton.jit
def multiply(
    rows,  # (T, K) if IS_GATHERED, else (S, K)
    matrices,  # (E, K, N), any strides
    low,  # (S, R)
    factors,  # (E, R, N)
    out,  # (S, N), by choice if IS_SCATTERED
    token_S,
    choice_S,
    end_E,
    num_experts,
    num_k,
    num_n,
    rank,
    scaling,
    stride_e,
    stride_k,
    stride_n,
    EXPERTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_GATHERED: tl.constexpr,
    IS_SCATTERED: tl.constexpr,
    HAS_LOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write rows @ their expert's matrix + low @ its factor, times a number."""
    num_columns = (num_n + BLOCK_N - 1) // BLOCK_N
    expert, first, end, column = find_tile(end_E, num_experts, num_columns, EXPERTS, BLOCK_M)
    if expert >= num_experts:
        return
    expert = expert.to(tl.int64)
    row = first + tl.arange(0, BLOCK_M)
    is_row = row < end
    row = tl.minimum(row, end - 1).to(tl.int64)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    there = n % num_n
    taken = tl.load(token_S + row) if IS_GATHERED else row
    acc = add_product(
        tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32),
        rows + (taken * num_k)[:, None],
        matrices + expert * stride_e + (there * stride_n)[None, :],
        stride_k,
        num_k,
        IS_EVEN,
        BLOCK_K,
    )
    if HAS_LOW:
        left = low + (row * rank)[:, None]
        right = factors + expert * rank * num_n + there[None, :]
        acc = add_product(acc, left, right, num_n, rank, IS_EVEN=False, BLOCK_K=BLOCK_R)
    place = tl.load(choice_S + row) if IS_SCATTERED else row
    is_there = is_row[:, None] & (n < num_n)[None, :]
    acc = rounded(acc * scaling, out)
    tl.store(out + (place * num_n)[:, None] + n[None, :], acc, is_there)


@triton.jit
def activate(
    hidden,  # (T, K)
    matrices,  # (E, K, 2 F), any strides
    biases,  # (E, 2 F)
    low,  # (S, R)
    factors,  # (E, R, 2 F)
    weights,  # (T * C,)
    gates,  # (S, 2 F)
    out,  # (S, F)
    token_S,
    choice_S,
    end_E,
    num_experts,
    num_k,
    width,
    rank,
    stride_e,
    stride_k,
    stride_n,
    EXPERTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LOW: tl.constexpr,
    IS_KEPT: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write the down projection's input, routing weights included, and the gate's inputs."""
    num_columns = (width + BLOCK_N // 2 - 1) // (BLOCK_N // 2)
    expert, first, end, column = find_tile(end_E, num_experts, num_columns, EXPERTS, BLOCK_M)
    if expert >= num_experts:
        return
    expert = expert.to(tl.int64)
    row = first + tl.arange(0, BLOCK_M)
    is_row = row < end
    row = tl.minimum(row, end - 1).to(tl.int64)
    # Gate and up columns alternate in the tile, whatever their order in the matrix.
    n = tl.arange(0, BLOCK_N)
    if IS_INTERLEAVED:
        there = (column * BLOCK_N + n) % (2 * width)
    else:
        there = (column * (BLOCK_N // 2) + n // 2) % width + (n % 2) * width
    acc = add_product(
        tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32),
        hidden + (tl.load(token_S + row) * num_k)[:, None],
        matrices + expert * stride_e + (there * stride_n)[None, :],
        stride_k,
        num_k,
        IS_EVEN,
        BLOCK_K,
    )
    if HAS_LOW:
        left = low + (row * rank)[:, None]
        right = factors + expert * rank * 2 * width + there[None, :]
        acc = add_product(acc, left, right, 2 * width, rank, IS_EVEN=False, BLOCK_K=BLOCK_R)
    if HAS_BIAS:
        acc += tl.load(biases + expert * 2 * width + there)[None, :].to(tl.float32)
    acc = rounded(acc, out).to(tl.float32)  # as the backward will read it
    gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N // 2, 2)))
    f = column * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    is_there = is_row[:, None] & (f < width)[None, :]
    if IS_KEPT:
        place = gates + (row * 2 * width)[:, None] + f[None, :]
        tl.store(place, rounded(gate, gates), is_there)
        tl.store(place + width, rounded(up, gates), is_there)
    active, _, _ = gate_parts(gate, up, ALPHA, LIMIT, GATE)
    weight = tl.load(weights + tl.load(choice_S + row)).to(tl.float32)
    active = rounded(active * weight[:, None], out)
    tl.store(out + (row * width)[:, None] + f[None, :], active, is_there)


@triton.jit
def activate_backward(
    gradient,  # (T, K), of the result
    matrices,  # (E, K, F), any strides: down, transposed
    low,  # (S, R)
    factors,  # (E, R, F)
    weights,  # (T * C,)
    gates,  # (S, 2 F)
    of_gates,  # (S, 2 F), in the order of the matrix up
    of_weights,  # (S, column blocks), fp32, to be summed
    out,  # (S, F), the down projection's input
    token_S,
    choice_S,
    end_E,
    num_experts,
    num_k,
    width,
    rank,
    stride_e,
    stride_k,
    stride_n,
    EXPERTS: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_LOW: tl.constexpr,
    IS_AGAIN: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write gradients of the gate's inputs, shares of routing weights', and the input again.

    The gate takes the tile's columns in parts: three values per element of all of it at once need
    so many registers that one program fills a multiprocessor.
    """
    num_columns = (width + BLOCK_N - 1) // BLOCK_N
    expert, first, end, column = find_tile(end_E, num_experts, num_columns, EXPERTS, BLOCK_M)
    if expert >= num_experts:
        return
    expert = expert.to(tl.int64)
    row = first + tl.arange(0, BLOCK_M)
    is_row = row < end
    row = tl.minimum(row, end - 1).to(tl.int64)
    f = column * BLOCK_N + tl.arange(0, BLOCK_N)
    there = f % width
    acc = add_product(
        tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32),
        gradient + (tl.load(token_S + row) * num_k)[:, None],
        matrices + expert * stride_e + (there * stride_n)[None, :],
        stride_k,
        num_k,
        IS_EVEN,
        BLOCK_K,
    )
    if HAS_LOW:
        left = low + (row * rank)[:, None]
        right = factors + expert * rank * width + there[None, :]
        acc = add_product(acc, left, right, width, rank, IS_EVEN=False, BLOCK_K=BLOCK_R)
    weight = tl.load(weights + tl.load(choice_S + row)).to(tl.float32)
    tile = first.to(tl.int64) * width
    share = tl.zeros((BLOCK_M,), dtype=tl.float32)
    gates += 2 * tile
    of_gates += 2 * tile
    if IS_AGAIN:
        out += tile
    PART: tl.constexpr = 16 if IS_AGAIN and not IS_INTERLEAVED else 8  # more would spill on sm_90
    PARTS: tl.constexpr = BLOCK_N // PART
    for i in tl.static_range(PARTS):
        share += gate_backward(
            part_of(acc, i, PARTS, BLOCK_M),
            column * BLOCK_N + i * PART,
            tl.minimum(tl.arange(0, BLOCK_M), end - 1 - first),
            is_row,
            weight[:, None],
            gates,
            of_gates,
            out,
            width,
            IS_INTERLEAVED,
            IS_AGAIN,
            GATE,
            ALPHA,
            LIMIT,
            BLOCK_M,
            PART,
        )
    tl.store(of_weights + row * num_columns + column, share, is_row)


@triton.jit
def sum_outer(
    left,  # (S, R)
    right,  # (T, N) if IS_GATHERED, else (S, N)
    out,  # (E, R, N) fp32
    token_S,
    end_E,
    RANK: tl.constexpr,
    num_n,
    IS_GATHERED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Write left^T @ right over each expert's rows; zero where it has none."""
    expert = tl.program_id(0).to(tl.int64)
    end = tl.load(end_E + expert)
    start = tl.load(end_E + expert - 1, mask=expert > 0, other=0)
    r = tl.program_id(2) * BLOCK_R + tl.arange(0, BLOCK_R)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for first in range(start, end, BLOCK_M):
        row = first + tl.arange(0, BLOCK_M)
        is_row = row < end
        row = tl.minimum(row, end - 1).to(tl.int64)
        is_left = is_row[None, :] & (r < RANK)[:, None]
        a = tl.load(left + (row * RANK)[None, :] + r[:, None], is_left, other=0.0)
        taken = tl.load(token_S + row) if IS_GATHERED else row
        b = tl.load(right + (taken * num_n)[:, None] + (n % num_n)[None, :])
        acc = add_dot(acc, a, b)
    place = out + (expert * RANK + r)[:, None] * num_n + n[None, :]
    tl.store(place, acc, (r < RANK)[:, None] & (n < num_n)[None, :])
