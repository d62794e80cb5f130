"""A stage as two operators of torch, so that torch.compile, torch.export and fake tensors see one node for a call.

    torch.ops.steps.<stage>_forward (q, k, v, causal, scale, tile, rung, deterministic)                 -> (out, lse)
    torch.ops.steps.<stage>_backward(dout, q, k, v, out, lse, causal, scale, tile, rung, deterministic) -> (dq, dk, dv)

The options have the defaults of the stage's `attention`, which takes the operators by itself where it is traced. What
traces a program does not look into an operator: neither into Triton's interpreter nor into Numba's simulator.
"""

import torch

OPTIONS = "bool causal=False, float? scale=None, int[]? tile=None, str? rung=None, bool deterministic=False"


def define(stage, forward, backward, fake_forward):
    """Makes the two operators of a stage and returns them. The first one can be differentiated once.

    forward, backward: the stage's, on tensors with memory. fake_forward(q, k, v, causal, scale, tile, rung): results
    of the right shape for tensors without memory. Making operators of the same names again replaces them.
    """
    forward_schema = f"(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor out, Tensor lse)"
    saved = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
    backward_schema = f"({saved}, {OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)"

    @torch.library.custom_op(f"steps::{stage}_forward", mutates_args=(), schema=forward_schema)
    def forward_operator(q, k, v, causal=False, scale=None, tile=None, rung=None, deterministic=False):
        return forward(q, k, v, causal=causal, scale=scale, tile=tile, rung=rung)

    @torch.library.custom_op(f"steps::{stage}_backward", mutates_args=(), schema=backward_schema)
    def backward_operator(dout, q, k, v, out, lse, causal=False, scale=None, tile=None, rung=None, deterministic=False):
        options = dict(causal=causal, scale=scale, tile=tile, rung=rung, deterministic=deterministic)
        return backward(dout, q, k, v, out, lse, **options)

    @forward_operator.register_fake
    def _(q, k, v, causal=False, scale=None, tile=None, rung=None, deterministic=False):
        return fake_forward(q, k, v, causal, scale, tile, rung)

    @backward_operator.register_fake
    def _(dout, q, k, v, *others):
        return tuple(x.new_empty(x.shape) for x in (q, k, v))

    def keep(ctx, inputs, output):
        q, k, v, *ctx.options = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output)

    def differentiate(ctx, dout, dlse):
        return *backward_operator(dout, *ctx.saved_tensors, *ctx.options), *(None for _ in ctx.options)

    forward_operator.register_autograd(differentiate, setup_context=keep)
    return forward_operator, backward_operator
