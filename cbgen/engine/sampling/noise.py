"""Counter-based Gumbel noise: a pure function of (row seed, position, token id).

Sampling by noise is Gumbel-max: the argmax of (logit + Gumbel noise) is a draw from the softmax of
the logits (Gumbel 1954; Maddison, Tarlow and Minka, "A* Sampling", 2014). As the noise of a token
depends on nothing but its own place, an answer does not change with the batch, the order, the
chunking or a preemption, and no generator is ever advanced.

The hash is the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
Generators", 2014), applied once a counter.
"""

from __future__ import annotations

import torch

_GOLDEN_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MULTIPLIER_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = -7723592293110705685  # 0x94D049BB133111EB

MAX_NOISE = 38.0
"""Above the largest noise: -log(-log(1 - 2**-53)) is 36.74."""
MIN_NOISE = -4.0
"""Below the smallest noise: -log(-log(2**-53)) is -3.60."""


def hash64(value: torch.Tensor) -> torch.Tensor:
    """Mix each int64 into another one; arithmetic is modulo 2**64."""
    value = (value ^ _shift_right(value, 30)) * _MULTIPLIER_1
    value = (value ^ _shift_right(value, 27)) * _MULTIPLIER_2
    return value ^ _shift_right(value, 31)


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the key of each row's noise: [n] int64, from seeds and positions [n] int64."""
    return hash64(hash64(seeds + _GOLDEN_GAMMA) + positions * _GOLDEN_GAMMA)


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the noise of tokens: float64, of the shape of keys and token_ids broadcast (int64)."""
    bits = _shift_right(hash64(keys + token_ids * _GOLDEN_GAMMA), 12)  # 52: adding 0.5 is exact
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-52  # in (0, 1), both ends excluded
    return -torch.log(-torch.log(uniform))


def add_noise_to_few(
    scores: torch.Tensor, threshold: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Return scores with noise: float64 [rows, vocab], -inf for those below a row's threshold.

    Noise is drawn for the others alone. The host waits to learn how many there are.
    """
    row_index, token_index = torch.nonzero(scores >= threshold[:, None], as_tuple=True)
    noisy = torch.full(scores.shape, float("-inf"), dtype=torch.float64, device=scores.device)
    noise = gumbel_noise(keys[row_index], token_index)
    noisy[row_index, token_index] = scores[row_index, token_index].double() + noise
    return noisy


def add_noise_to_all(
    scores: torch.Tensor, threshold: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Return what `add_noise_to_few` returns; noise is drawn for all scores, and nobody waits."""
    noise = gumbel_noise(keys[:, None], torch.arange(scores.shape[-1], device=scores.device))
    return (scores.double() + noise).masked_fill(scores < threshold[:, None], float("-inf"))


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    # torch shifts arithmetically; the mask drops the copies of the sign.
    return (value >> bits) & ((1 << (64 - bits)) - 1)
