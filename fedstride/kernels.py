"""The CUDA programs of fedstride/convolution.py and fedstride/products.py, in Triton, which torch brings with CUDA.

Numbers are rounded to TF32 before they are multiplied where torch's own convolutions do so (its default); with
`torch.backends.cudnn.allow_tf32 = False` a product is made of three such ones, which keeps float32's accuracy.
In bfloat16 numbers are multiplied as they are and summed in float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024  # into as many pieces long sums are cut, to keep all multiprocessors busy with few clients


@triton.jit
def _product(
    x, w, bias, out, w_client, I: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr, KH: tl.constexpr,
    KW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr, TOP: tl.constexpr,
    LEFT: tl.constexpr, BY_TAP: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr, BO: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[o, n] = sum over k of patch[n, k] w[o, k], and bias[o], with n = (b, oh, ow), for one client.

    BY_TAP: k = (kh, kw, i), and so lie x as [B, H, W, I] and w as [O, KH, KW, I]: neighbours in memory are summed over,
    as tensor cores want it, and a pass of the loop has a single tap. Else, for few channels, k = (i, kh, kw).
    With padding n = (oh, b, ow): what a program computes lies in a few rows, and taps that miss the image are left out.
    """
    client = tl.program_id(2).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    B: tl.constexpr = N // (OH * OW)
    BY_ROW: tl.constexpr = BY_TAP and TOP > 0
    if BY_ROW:
        b, r = n // OW % B, n // (B * OW) * OW + n % OW
    else:
        b, r = n // (OH * OW), n % (OH * OW)
    row, column = (r // OW) * STRIDE - TOP, (r % OW) * STRIDE - LEFT
    x += client * (N // (OH * OW) * I * H * W)
    w += client * w_client
    total = tl.zeros((BN, BO), dtype=tl.float32)
    if BY_TAP:
        x += (b * (I * H * W) + (row * W + column) * I)[:, None]
        lowest, highest = 0, KH
        if BY_ROW:
            first, last = tl.program_id(0) * BN // (B * OW), tl.minimum(tl.program_id(0) * BN + BN, N) - 1
            lowest = tl.maximum(0, TOP - last // (B * OW) * STRIDE)
            highest = tl.minimum(KH, H + TOP - first * STRIDE)
        for tap in range(lowest * KW, highest * KW):
            kh, kw = tap // KW, tap % KW
            inside = (row + kh >= 0) & (row + kh < H) & (column + kw >= 0) & (column + kw < W) & (n < N)
            for start in range(0, I, BK):
                i = start + tl.arange(0, BK)
                left = tl.load(x + ((kh * W + kw) * I + i)[None, :], mask=inside[:, None], other=0.0)
                right = tl.load(
                    w + o[None, :] * (I * KH * KW) + (tap * I + i)[:, None], mask=(o < O)[None, :], other=0.0
                )
                total = tl.dot(left, right, total, input_precision=PRECISION)
    else:
        x += (b * (I * H * W) + row * W + column)[:, None]
        for start in range(0, I * KH * KW, BK):
            k = start + tl.arange(0, BK)
            i, tap = k // (KH * KW), k % (KH * KW)
            kh, kw, there = tap // KW, tap % KW, k < I * KH * KW
            h, v = row[:, None] + kh[None, :], column[:, None] + kw[None, :]
            inside = (h >= 0) & (h < H) & (v >= 0) & (v < W) & (n < N)[:, None] & there[None, :]
            left = tl.load(x + (i * (H * W) + kh * W + kw)[None, :], mask=inside, other=0.0)
            weights = w + o[None, :] * (I * KH * KW) + k[:, None]
            right = tl.load(weights, mask=(o < O)[None, :] & there[:, None], other=0.0)
            total = tl.dot(left, right, total, input_precision=PRECISION)
    if BIASED:
        total += tl.load(bias + client * O + o, mask=o < O, other=0.0)[None, :].to(tl.float32)
    out += client * (N * O) + (b * (O * OH * OW) + r)[:, None] + o[None, :] * (OH * OW)
    tl.store(out, total, mask=(o < O)[None, :] & (n < N)[:, None])


@triton.jit
def _moved(y, gradient, lr, shift, decay, there, SHIFTED: tl.constexpr):
    """y - lr (gradient + decay y + shift)."""
    before = tl.load(y, mask=there)
    gradient += decay * before
    if SHIFTED:
        gradient += tl.load(shift, mask=there)
    return before - tl.load(lr) * gradient


@triton.jit
def _sums(
    x, g, out, whole, lr, shift, decay, I: tl.constexpr, H: tl.constexpr, W: tl.constexpr, O: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr,
    TOP: tl.constexpr, PART: tl.constexpr, MOVES: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr,
    BO: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[o, k] = sum over n of g[o, n] patch[k, n], for one client and one part of the n.

    One more patch, of ones, gives whole[o], the sum of g[o, n]. MOVES: out is not set to the sum but moved along it.
    """
    client = tl.program_id(2).to(tl.int64)
    K: tl.constexpr = I * KH * KW
    tiles = tl.cdiv(K + 1, BN)
    k = tl.program_id(0) % tiles * BN + tl.arange(0, BN)
    o = tl.program_id(0) // tiles * BO + tl.arange(0, BO)
    i, tap = k // (KH * KW), k % (KH * KW)
    x += client * (N // (OH * OW) * I * H * W)
    g += client * (N * O)
    total = tl.zeros((BO, BN), dtype=tl.float32)
    for start in range(0, PART, BK):
        n = tl.program_id(1) * PART + start + tl.arange(0, BK)
        b, r = n // (OH * OW), n % (OH * OW)
        left = tl.load(
            g + (b * (O * OH * OW) + r)[None, :] + o[:, None] * (OH * OW),
            mask=(o < O)[:, None] & (n < N)[None, :], other=0.0,
        )  # fmt: skip
        h = (r // OW * STRIDE - TOP)[None, :] + (tap // KW)[:, None]
        v = (r % OW * STRIDE - TOP)[None, :] + (tap % KW)[:, None]
        inside = (h >= 0) & (h < H) & (v >= 0) & (v < W) & (n < N)[None, :] & (k < K)[:, None]
        right = tl.load(x + (b * (I * H * W))[None, :] + (i * (H * W))[:, None] + h * W + v, mask=inside, other=0.0)
        right = tl.where((k == K)[:, None], 1.0, right).to(right.dtype)
        total = tl.dot(left, tl.trans(right), total, input_precision=PRECISION)
    place = tl.program_id(1) * tl.num_programs(2) + client
    there, at = (o < O)[:, None] & (k < K)[None, :], o[:, None] * K + k[None, :]
    last = (o < O)[:, None] & (k == K)[None, :]
    tl.store(whole + place * O + o[:, None] + tl.zeros((1, BN), tl.int32), total, mask=last)
    out += place * (O * K) + at
    if MOVES:
        total = _moved(out, total, lr + client, shift + client * (O * K) + at, decay, there, SHIFTED)
    tl.store(out, total, mask=there)


@triton.jit
def _collect(
    parts, parts_whole, out, whole, lr, shift, decay, COUNT: tl.constexpr, M: tl.constexpr, O: tl.constexpr,
    MOVES: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sums of the parts that `_sums` left; the last program of a client has those of biases."""
    client, last = tl.program_id(1).to(tl.int64), tl.num_programs(0) - 1
    if tl.program_id(0) < last:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        total = _total(parts + client * M + at, at < M, tl.num_programs(1).to(tl.int64) * M, COUNT, BLOCK)
        place = client * M + at
        if MOVES:
            total = _moved(out + place, total, lr + client, shift + place, decay, at < M, SHIFTED)
        tl.store(out + place, total, mask=at < M)
    else:
        for start in range(0, O, BLOCK):
            at = start + tl.arange(0, BLOCK)
            total = _total(parts_whole + client * O + at, at < O, tl.num_programs(1).to(tl.int64) * O, COUNT, BLOCK)
            tl.store(whole + client * O + at, total, mask=at < O)


@triton.jit
def _total(first, there, step, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(0, COUNT):
        total += tl.load(first + part * step, mask=there, other=0.0)
    return total


@triton.jit
def _arrange(
    w, out, w_client, P: tl.constexpr, Q: tl.constexpr, T: tl.constexpr, STEP_P: tl.constexpr, STEP_Q: tl.constexpr,
    TURNED: tl.constexpr, BQ: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """out[p, t, q] = w[p, q, t], read in w's own order; TURNED: the taps t in reverse, that is by half a turn."""
    client, p = tl.program_id(2).to(tl.int64), tl.program_id(1)
    tiles = tl.cdiv(T, BT)
    q = tl.program_id(0) // tiles * BQ + tl.arange(0, BQ)[:, None]
    t = tl.program_id(0) % tiles * BT + tl.arange(0, BT)[None, :]
    there = (q < Q) & (t < T)
    values = tl.load(w + client * w_client + p * STEP_P + q * STEP_Q + t, mask=there)
    tap = T - 1 - t if TURNED else t
    tl.store(out + client * (P * Q * T) + (p * T + tap) * Q + q, values, mask=there)


@triton.jit
def _add(
    y, lr, a, b, shift, decay, a_client, a_o, a_k, b_client, b_k, b_i, O: tl.constexpr, I: tl.constexpr,
    K: tl.constexpr, SHIFTED: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y[o, i] -= lr (sum over k of a[o, k] b[k, i] + decay y[o, i] + shift[o, i]), for one client."""
    client = tl.program_id(2).to(tl.int64)
    o, i = tl.program_id(1) * BO + tl.arange(0, BO), tl.program_id(0) * BI + tl.arange(0, BI)
    total = tl.zeros((BO, BI), dtype=tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(
            a + client * a_client + o[:, None] * a_o + k[None, :] * a_k,
            mask=(o < O)[:, None] & (k < K)[None, :], other=0.0,
        )  # fmt: skip
        right = tl.load(
            b + client * b_client + k[:, None] * b_k + i[None, :] * b_i,
            mask=(k < K)[:, None] & (i < I)[None, :], other=0.0,
        )  # fmt: skip
        total = tl.dot(left, right, total, input_precision="tf32")
    there, at = (o < O)[:, None] & (i < I)[None, :], o[:, None] * I + i[None, :]
    y += client * (O * I) + at
    tl.store(y, _moved(y, total, lr + client, shift + client * (O * I) + at, decay, there, SHIFTED), mask=there)


def _precision() -> str:
    return "tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"


def _block(size: int, most: int) -> int:
    return max(16, min(most, triton.next_power_of_2(size)))


def product(
    x: Tensor, w: Tensor, stride: int, top: int, left: int, bias: Tensor | None, turned: bool = False
) -> Tensor:
    """Convolutions [C, B, O, H', W'] of [C, B, I, H, W] with [C, O, I, KH, KW], or with [C, I, O, KH, KW] turned."""
    C, B, I, H, W = x.shape
    O, (KH, KW) = w.shape[2 if turned else 1], w.shape[3:]
    OH, OW = (H + 2 * top - KH) // stride + 1, (W + 2 * left - KW) // stride + 1
    out = x.new_empty(C, B, O, OH, OW)
    N, by_tap = B * OH * OW, I % 32 == 0
    BO, BK = _block(O, 64 if O < 256 else 128), 64 if I == 64 else 32
    if by_tap:
        x, w = arranged(x), arranged(w, turned)
    elif turned:
        w = w.flip(3, 4).transpose(1, 2)
    x, w = x.contiguous(), w if w[0].is_contiguous() else w.contiguous()
    _product[(triton.cdiv(N, 64), triton.cdiv(O, BO), C)](
        x, w, w if bias is None else bias.contiguous(), out, w.stride(0), I, H, W, O, KH, KW, OH, OW, N, stride, top,
        left, by_tap, bias is not None, _precision(), BO, 64, BK,
    )  # fmt: skip
    return out


def arranged(w: Tensor, turned: bool = False) -> Tensor:
    """Kernels [C, O, I, KH, KW] as [C, O, KH, KW, I], images likewise; turned, for gradients, as [C, I, KH, KW, O]."""
    w = w if w[0].is_contiguous() else w.contiguous()
    C, O, I, KH, KW = w.shape
    P, Q, T, steps = O, I, KH * KW, (I * KH * KW, KH * KW)
    if turned:
        P, Q, steps = I, O, (steps[1], steps[0])
    out, BQ, BT = w.new_empty(C, P, KH, KW, Q), _block(Q, 64), min(128, triton.next_power_of_2(T))
    _arrange[(triton.cdiv(Q, BQ) * triton.cdiv(T, BT), P, C)](w, out, w.stride(0), P, Q, T, *steps, turned, BQ, BT)
    return out


Move = tuple[Tensor, Tensor, Tensor | None, float]  # y, lr, shift and decay of y <- y - lr (gradient + decay y + shift)


def sums(
    x: Tensor, g: Tensor, stride: int, padding: int, height: int, width: int, move: Move | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients [C, O, I, KH, KW] of kernels and [C, O] of biases, from x [C, B, I, H, W] and g [C, B, O, H', W'].

    With `move` kernels are moved along their gradients, and what is given back first is not to be used.
    """
    x, g = x.contiguous(), g.contiguous()
    (C, B, I, H, W), (O, OH, OW) = x.shape, g.shape[2:]
    N, K, BO, BK = B * OH * OW, I * height * width, _block(O, 64), 32
    BN = _block(K + 1, 128 if K > 1024 else 64)
    tiles = triton.cdiv(O, BO) * triton.cdiv(K + 1, BN)
    parts = max(1, min(PROGRAMS // (C * tiles), N // (4 * BK)))
    part = triton.cdiv(triton.cdiv(N, parts), BK) * BK
    parts = triton.cdiv(N, part)
    y, lr, shift, decay = move or (x.new_empty(C, O * K), x, None, 0.0)
    whole, rest = x.new_empty(C, O), (lr, y if shift is None else shift, decay)
    kept = (y, whole) if parts == 1 else tuple(x.new_empty(parts, C, n, dtype=torch.float32) for n in (O * K, O))
    _sums[(tiles, parts, C)](
        x, g, *kept, *rest, I, H, W, O, height, width, OH, OW, N, stride, padding, part, bool(move) and parts == 1,
        shift is not None, _precision(), BO, BN, BK,
        num_stages=1,  # with loads ahead of products Triton 3.6 gave wrong sums now and then in TF32, and took longer
    )  # fmt: skip
    if parts > 1:
        grid = triton.cdiv(O * K, 1024) + 1, C
        _collect[grid](*kept, y, whole, *rest, parts, O * K, O, bool(move), shift is not None, 1024)
    return y.view(C, O, I, height, width), whole


def add(y: Tensor, lr: Tensor, a: Tensor, b: Tensor, shift: Tensor | None, decay: float) -> None:
    """y <- y - lr (a b + decay y + shift), as fedstride/products.py has it, with factors in bfloat16 or TF32."""
    (C, O, K), I = a.shape, b.shape[2]
    BO, BI, BK = _block(O, 32), _block(I, 128), _block(K, 32)
    _add[(triton.cdiv(I, BI), triton.cdiv(O, BO), C)](
        y, lr, a, b, y if shift is None else shift, decay, *a.stride(), *b.stride(), O, I, K, shift is not None,
        BO, BI, BK,
        num_stages=1,  # see `sums`
    )  # fmt: skip
