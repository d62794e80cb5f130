"""A stage as operators of torch, so that torch.compile, torch.export and fake tensors see one node for a call.

    torch.ops.steps.<stage>_forward (q, k, v, options)                 -> (out, lse)
    torch.ops.steps.<stage>_backward(dout, q, k, v, out, lse, options) -> (dq, dk, dv)
    torch.ops.steps.<stage>_carry   (q, k, v, out, lse, options)       changes out and lse in place

The options have the defaults of the stage's `attention`, which calls the operators by itself while it is traced. The
backward of a stage with features also returns their gradients, which are empty if they are not wanted; and only such a
stage has the third operator. A tracer does not look into an operator.

torch.compile compiles a program anew for each value of a float that is an argument of an operator, but not for each
value in a tensor. So floats that are not constant in a program reach the operators in a tensor, `traced`. Where it is
NaN, the option itself has the value.
"""

import math

import torch

from steps.checks import NOT_TWICE, lse_dtype

OPTIONS = "bool causal=False, float? scale=None, int[]? tile=None, str? rung=None, bool deterministic=False"
SAVED = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"


class Operators:
    """The operators of a contract.Stage. Making operators of the same names again replaces them."""

    def __init__(self, stage):
        self.stage, self.features = stage, stage.features
        self.floats = ("scale", *self.features.FLOATS)
        self.of_forward, self.of_backward = self.define_forward(), self.define_backward()
        self.of_carry = self.define_carry() if self.features.CARRIED else None

    # ---- a call that is traced ----

    def forward(self, q, k, v, options):
        """(out, lse), which can be differentiated once."""
        if not torch.compiler.is_compiling():  # Torch's own error would name only the place of a wrong type.
            self.stage.check_shapes(q, k, v, self.stage.defaults | options)
        carried = [x for x in map(options.get, self.features.CARRIED) if x is not None]
        arguments = self.arguments(q, options)
        if not carried:
            return self.of_forward(q, k, v, *arguments)
        self.of_carry(q, k, v, *carried, *arguments)
        return tuple(carried)

    def attention(self, q, k, v, options):
        """out of `forward`, which may draw a seed."""
        if options.get("dropout_p") and options.get("seed") is None:
            self.features.read_traced(options | {"seed": 0}, q)  # A call that is refused draws nothing.
            options["seed"] = self.features.draw_seed(q.device)
        self.features.check_gradients(options, q, k, v)
        return self.forward(q, k, v, options)[0]

    def backward(self, dout, q, k, v, out, lse, options, wanted):
        """(dq, dk, dv), and the gradients of the `wanted` options."""
        flags = [name in wanted for name in self.features.GRADIENTS]
        *grads, more = self.split(self.of_backward(dout, q, k, v, out, lse, *flags, *self.arguments(q, options)))
        return *grads, *(more[name] for name in wanted)

    def split(self, results):
        """[dq, dk, dv, {option: its gradient}]"""
        return [*results[:3], dict(zip(self.features.GRADIENTS, results[3:], strict=True))]

    def arguments(self, q, options):
        """The options in the order of the schema, without those that are carried; the last one is `traced`."""
        options = {name: x for name, x in options.items() if name not in self.features.CARRIED}
        f = self.stage.defaults | options | self.features.read_traced(options, q)
        traced, of_all_values = None, [name for name in self.floats if is_open(f[name])]
        if of_all_values:
            # Multiplication by a number is an operation that torch.compile turns into one by a tensor.
            one = torch.ones((), dtype=torch.float64, device="cpu")
            traced = torch.stack([one * (f[name] if name in of_all_values else math.nan) for name in self.floats])
            f |= {name: self.stage.defaults[name] for name in of_all_values}
        return *f.values(), traced

    # ---- what an operator does with its arguments ----

    def by_name(self, arguments):
        """{name: value} of all options: torch leaves out the last ones if they are default."""
        names = [*self.stage.defaults, "traced"]
        return self.stage.defaults | {"traced": None} | dict(zip(names, arguments, strict=False))

    def given(self, arguments, *without):
        """The options that are not default, by name, as in a call that is not traced."""
        f = self.by_name(arguments)
        if (traced := f.pop("traced")) is not None:
            numbers = zip(self.floats, traced.tolist(), strict=True)
            f |= {name: number for name, number in numbers if not math.isnan(number)}
        f = {name: tuple(x) if isinstance(x, list) else x for name, x in f.items() if name not in without}
        return {name: x for name, x in f.items() if x is not self.stage.defaults[name]}

    def define_forward(self):
        schema = f"(Tensor q, Tensor k, Tensor v, {self.schema}) -> (Tensor out, Tensor lse)"

        @torch.library.custom_op(f"steps::{self.stage.name}_forward", mutates_args=(), schema=schema)
        def forward(q, k, v, *arguments):
            options = self.given(arguments, "deterministic")
            return self.stage.attend(q, k, v, options, self.stage.take_tensors(options, q), gradient=True)

        @forward.register_fake
        def _(q, k, v, *arguments):
            self.stage.check_shapes(q, k, v, self.by_name(arguments))
            return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=lse_dtype(q))

        forward.register_autograd(self.differentiate, setup_context=self.save)
        return forward

    def define_backward(self):
        flags = "".join(f", bool {name}_gradient=False" for name in self.features.GRADIENTS)
        results = ", ".join(f"Tensor d{name}" for name in ("q", "k", "v", *self.features.GRADIENTS))

        @torch.library.custom_op(f"steps::{self.stage.name}_backward", mutates_args=(),
                                 schema=f"({SAVED}{flags}, {self.schema}) -> ({results})")  # fmt: skip
        def backward(dout, q, k, v, out, lse, *arguments):
            wanted, arguments = self.wanted(arguments)
            options = self.given(arguments)
            named = self.stage.take_tensors(options, q)
            results = self.stage.differentiate(dout, q, k, v, out, lse, options, named, wanted)
            more = dict(zip(wanted, results[3:], strict=True))
            return *results[:3], *(more.get(name, q.new_empty(0)) for name in self.features.GRADIENTS)

        @backward.register_fake
        def _(dout, q, k, v, out, lse, *arguments):
            wanted, arguments = self.wanted(arguments)
            f = self.by_name(arguments)
            like = [f[name] if name in wanted else q.new_empty(0) for name in self.features.GRADIENTS]
            return tuple(x.new_empty(x.shape) for x in (q, k, v, *like))

        backward.register_autograd(refuse)
        return backward

    def define_carry(self):
        schema = f"(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) lse, {self.schema}) -> ()"

        @torch.library.custom_op(f"steps::{self.stage.name}_carry", mutates_args=("out", "lse"), schema=schema)
        def carry(q, k, v, out, lse, *arguments):
            options = self.given(arguments, "deterministic") | {"out": out, "lse": lse}
            self.stage.attend(q, k, v, options, self.stage.take_tensors(options, q), gradient=True)

        @carry.register_fake
        def _(q, k, v, out, lse, *arguments):
            self.stage.check_shapes(q, k, v, self.by_name(arguments) | {"out": out, "lse": lse})

        return carry

    @property
    def schema(self):
        return f"{OPTIONS}{self.features.SCHEMA}, Tensor? traced=None"

    def wanted(self, arguments):
        """(the options whose gradients a backward has to return, its other arguments)."""
        names = self.features.GRADIENTS
        return tuple(name for name, x in zip(names, arguments, strict=False) if x), arguments[len(names) :]

    # ---- autograd ----

    def save(self, ctx, inputs, output):
        q, k, v, *arguments = inputs
        ctx.options = self.by_name(arguments)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, *output, *(ctx.options.pop(name) for name in self.tensors))

    def differentiate(self, ctx, dout, dlse):
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        f = ctx.options | dict(zip(self.tensors, tensors, strict=True))
        names = [*self.stage.defaults, "traced"]
        # needs_input_grad is shorter where the last arguments are default.
        needed = [name for name, needs in zip(names, ctx.needs_input_grad[3:], strict=False) if needs]
        f |= dict.fromkeys(self.features.TENSORS) | self.features.of_backward(self.tensors_of(f), needed)
        flags = [name in needed for name in self.features.GRADIENTS]
        *grads, more = self.split(self.of_backward(dout, q, k, v, out, lse, *flags, *(f[name] for name in names)))
        return *grads, *(more[name] if name in needed else None for name in names)

    @property
    def tensors(self):
        return (*self.features.TENSORS, "traced")

    def tensors_of(self, f):
        return {name: f[name] for name in self.features.TENSORS if f[name] is not None}


def refuse(ctx, *grads):
    raise RuntimeError(NOT_TWICE)


def is_open(x):
    """Whether x is a number for whose values torch.compile compiles one program."""
    is_number = isinstance(x, (int, float))
    return torch.compiler.is_compiling() and is_number and not torch.fx.experimental.symbolic_shapes.has_static_value(x)
