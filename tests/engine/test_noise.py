"""Counter-based noise: a pure function with the distribution of Gumbel's law."""

from __future__ import annotations

import math

import pytest
import torch

from cbgen.engine.sampling.noise import (
    MAX_NOISE,
    MIN_NOISE,
    add_noise_to_all,
    add_noise_to_few,
    gumbel_noise,
    hash64,
    row_keys,
)

BITS = 2**64
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
GAMMA = 0x9E3779B97F4A7C15


def signed(value: int) -> int:
    return value % BITS - (BITS if value % BITS >= BITS // 2 else 0)


def splitmix(value: int) -> int:
    """SplitMix64's finalizer on Python integers."""
    value = (value ^ (value >> 30)) * MULTIPLIERS[0] % BITS
    value = (value ^ (value >> 27)) * MULTIPLIERS[1] % BITS
    return value ^ (value >> 31)


def unshift(value: int, bits: int) -> int:
    """Undo `x ^ (x >> bits)`."""
    result = value
    for _ in range(64 // bits):
        result = value ^ (result >> bits)
    return result


def inverse_splitmix(value: int) -> int:
    value = unshift(value, 31) * pow(MULTIPLIERS[1], -1, BITS) % BITS
    value = unshift(value, 27) * pow(MULTIPLIERS[0], -1, BITS) % BITS
    return unshift(value, 30)


def noise_of(num_positions: int, num_tokens: int, seed: int = 1) -> torch.Tensor:
    """Return noise of [positions, tokens]."""
    keys = row_keys(torch.full((num_positions,), seed), torch.arange(num_positions))
    return gumbel_noise(keys[:, None], torch.arange(num_tokens)[None])


@pytest.mark.parametrize("value", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_the_hash_is_that_of_splitmix64(value):
    assert hash64(torch.tensor([value])).tolist() == [signed(splitmix(value % BITS))]


@pytest.mark.parametrize(("seed", "position", "token_id"), [(0, 0, 0), (2**63 - 1, 70000, 151935)])
def test_noise_is_the_same_in_every_version(seed, position, token_id):
    key = splitmix((splitmix((seed + GAMMA) % BITS) + position * GAMMA) % BITS)
    bits = splitmix((key + token_id * GAMMA) % BITS) >> 11
    expected = -math.log(-math.log((bits + 0.5) * 2.0**-53))
    keys = row_keys(torch.tensor([seed]), torch.tensor([position]))
    assert gumbel_noise(keys, torch.tensor([token_id])).item() == pytest.approx(expected, abs=1e-9)


def test_noise_has_the_mean_and_spread_of_gumbels_law():
    noise = noise_of(1000, 200)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)


def test_noise_turned_back_is_uniform():
    uniform = torch.exp(-torch.exp(-noise_of(1000, 200)))
    counts = torch.histc(uniform, bins=50, min=0, max=1)
    chi_square = ((counts - 4000) ** 2 / 4000).sum().item()
    assert chi_square < 95  # 49 degrees of freedom: exceeded once in 10,000


@pytest.mark.parametrize("axis", [0, 1])
def test_neighbouring_positions_and_tokens_are_not_correlated(axis):
    noise = noise_of(400, 400)
    first = noise.narrow(axis, 0, 399).flatten()
    second = noise.narrow(axis, 1, 399).flatten()
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.01


def test_neighbouring_seeds_are_not_correlated():
    pair = torch.stack([noise_of(400, 400, seed=8).flatten(), noise_of(400, 400, seed=9).flatten()])
    assert abs(torch.corrcoef(pair)[0, 1]) < 0.01


def test_a_seed_is_not_a_shift_of_the_position():
    assert not set(noise_of(50, 1, seed=1).flatten().tolist()) & set(
        noise_of(50, 1, seed=2).flatten().tolist()
    )


def test_noise_does_not_depend_on_what_is_computed_with_it():
    whole = noise_of(20, 300)
    keys = row_keys(torch.tensor([1]), torch.tensor([13]))
    assert torch.equal(gumbel_noise(keys, torch.tensor([299, 5])), whole[13, [299, 5]])


def test_a_million_draws_lie_between_the_bounds():
    noise = noise_of(2000, 500)
    assert noise.min().item() > MIN_NOISE
    assert noise.max().item() < MAX_NOISE


@pytest.mark.parametrize("hashed", [0, 2**11, 2**63, 2**64 - 2**12, 2**64 - 1])
def test_the_rarest_draws_lie_between_the_bounds_too(hashed):
    key = signed(inverse_splitmix(hashed))
    noise = gumbel_noise(torch.tensor([key]), torch.tensor([0])).item()
    assert MIN_NOISE < noise < MAX_NOISE


def test_noise_for_all_tokens_is_that_for_a_few_of_them():
    scores = torch.randn(6, 200, generator=torch.Generator().manual_seed(2))
    scores[1, 5:] = float("-inf")
    threshold = torch.tensor([-1.0, float("-inf"), 0.0, 0.5, 3.0, -9.0])
    keys = row_keys(torch.arange(6), torch.arange(6) * 7)
    few, every = (add(scores, threshold, keys) for add in (add_noise_to_few, add_noise_to_all))
    assert torch.equal(few, every)
