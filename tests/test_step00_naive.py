"""Stage 00: the contract, finite differences in float64, and the traffic count."""

import functools

import pytest
import torch

import steps.step00_naive as step00
from reference import attention
from steps.step00_naive import io_count
from support.contract_suite import Contract


class TestContract(Contract):
    stage = step00
    own_lse = ("tiled",)


def test_gradients_against_finite_differences():
    q, k, v = (torch.randn(1, 2, N, 4, dtype=torch.float64, requires_grad=True) for N in (3, 5, 5))
    for causal in (False, True):
        attend = functools.partial(step00.attention, causal=causal, tile=(8, 8))
        assert torch.autograd.gradcheck(attend, (q, k, v))


ORDERS = {
    "standard": (io_count.standard, lambda N, d, Br, Bc: io_count.standard_count(N, d)),
    "fa1": (io_count.fa1, io_count.fa1_count),
    "fa2": (io_count.fa2, io_count.fa2_count),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("N, d, tile", [
    (0, 4, (4, 4)), (1, 1, (1, 1)), (6, 2, (2, 3)), (16, 8, (4, 4)), (17, 5, (4, 8)), (23, 8, (8, 5)),
    (40, 3, (16, 16)), (9, 4, (64, 64)),
])  # fmt: skip
def test_each_order_computes_attention_and_moves_what_its_formula_says(order, N, d, tile):
    algorithm, formula = ORDERS[order]
    q, k, v = torch.randn(3, N, d, dtype=torch.float64, generator=torch.Generator().manual_seed(N))
    for scale in (None, 40.0):  # scores in the hundreds
        memory = io_count.Memory()
        got = algorithm(memory, q, k, v, scale, **({} if order == "standard" else {"tile": tile}))
        want = (x[0, 0] for x in attention.forward(*(x[None, None] for x in (q, k, v)), scale=scale))
        torch.testing.assert_close(got, tuple(want))
        assert (memory.loads, memory.stores) == formula(N, d, *tile)


def test_memory_counts_its_accesses_and_nothing_on_the_chip():
    memory = io_count.Memory()
    x, y = memory.put(torch.zeros(4, 3)), memory.empty(4, like=torch.zeros(0))
    assert (memory.loads, memory.stores) == (0, 0)
    tile = x[1:9]  # the last tile ends with the array
    tile += 1
    assert (memory.loads, memory.stores) == (9, 0) and not x.data.any()  # a tile on the chip is a copy
    y[:2] = tile[:2, 0]
    y[2:] = 0
    assert (memory.loads, memory.stores) == (9, 4) and y.data.tolist() == [1, 1, 0, 0]
