"""Stage 00: the contract, and finite differences in float64."""

import torch

import steps.step00_naive as step00
from suite import Contract


class TestContract(Contract):
    stage = step00


def test_gradients_against_finite_differences():
    q, k, v = (torch.randn(1, 2, N, 4, dtype=torch.float64, requires_grad=True) for N in (3, 5, 5))
    for causal in (False, True):
        assert torch.autograd.gradcheck(lambda q, k, v, c=causal: step00.attention(q, k, v, causal=c, tile=(8, 8)), (q, k, v))
