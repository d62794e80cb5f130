"""A stage as two operators of torch, so that torch.compile, torch.export and fake tensors see one node for a call.

    torch.ops.steps.<stage>_forward (q, k, v, causal, scale, tile, rung, deterministic)                 -> (out, lse)
    torch.ops.steps.<stage>_backward(dout, q, k, v, out, lse, causal, scale, tile, rung, deterministic) -> (dq, dk, dv)

The options have the defaults of the stage's `attention`, which takes the operators by itself where it is traced. What
traces a program does not look into an operator: neither into Triton's interpreter nor into Numba's simulator.

torch.compile compiles a program anew for each value of a float that an operator takes. It does not for a float that
becomes a tensor, so a scale that is not constant in the program reaches the operators as the tensor `traced_scale`.
"""

import torch

OPTIONS = (
    "bool causal=False, float? scale=None, int[]? tile=None, str? rung=None, bool deterministic=False, "
    "Tensor? traced_scale=None"
)


def define(stage, forward, backward, fake_forward):
    """Makes the two operators of a stage and returns them. The first one can be differentiated once.

    forward, backward: the stage's, on tensors with memory. fake_forward(q, k, v, causal, scale, tile, rung): results
    of the right shape for tensors without memory. Making operators of the same names again replaces them.
    """
    forward_schema = f"(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor out, Tensor lse)"
    saved = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
    backward_schema = f"({saved}, {OPTIONS}) -> (Tensor dq, Tensor dk, Tensor dv)"

    @torch.library.custom_op(f"steps::{stage}_forward", mutates_args=(), schema=forward_schema)
    def forward_operator(
        q, k, v, causal=False, scale=None, tile=None, rung=None, deterministic=False, traced_scale=None
    ):  # fmt: skip
        return forward(q, k, v, causal=causal, scale=number(scale, traced_scale), tile=tile, rung=rung)

    @torch.library.custom_op(f"steps::{stage}_backward", mutates_args=(), schema=backward_schema)
    def backward_operator(
        dout, q, k, v, out, lse, causal=False, scale=None, tile=None, rung=None, deterministic=False, traced_scale=None
    ):  # fmt: skip
        options = dict(causal=causal, tile=tile, rung=rung, deterministic=deterministic)
        return backward(dout, q, k, v, out, lse, scale=number(scale, traced_scale), **options)

    @forward_operator.register_fake
    def _(q, k, v, causal=False, scale=None, tile=None, rung=None, deterministic=False, traced_scale=None):
        return fake_forward(q, k, v, causal, scale, tile, rung)

    @backward_operator.register_fake
    def _(dout, q, k, v, *others):
        return tuple(x.new_empty(x.shape) for x in (q, k, v))

    def keep(ctx, inputs, output):
        q, k, v, *ctx.options, traced_scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output, traced_scale)

    def differentiate(ctx, dout, dlse):
        *tensors, traced_scale = ctx.saved_tensors
        grads = backward_operator(dout, *tensors, *ctx.options, traced_scale)
        return *grads, *(None for _ in ctx.options), None

    forward_operator.register_autograd(differentiate, setup_context=keep)
    return with_traced_scale(forward_operator), with_traced_scale(backward_operator)


def with_traced_scale(operator):
    """The operator, which gets its scale as a tensor where torch.compile leaves the scale open."""

    def call(*tensors, causal=False, scale=None, **options):
        if not is_open(scale):
            return operator(*tensors, causal=causal, scale=scale, **options)
        # Of the operations with a number, multiplication is one that torch.compile turns into one with a tensor.
        traced_scale = torch.ones((), dtype=torch.float64, device="cpu") * scale
        return operator(*tensors, causal=causal, traced_scale=traced_scale, **options)

    return call


def is_open(x):
    """Whether x is a number for which torch.compile compiles a program of all values."""
    is_number = isinstance(x, (int, float))
    return torch.compiler.is_compiling() and is_number and not torch.fx.experimental.symbolic_shapes.has_static_value(x)


def number(scale, traced_scale):
    return scale if traced_scale is None else traced_scale.item()
