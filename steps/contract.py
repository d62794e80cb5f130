"""What every stage promises: the functions around a stage's kernels, autograd, operators.

A kernel file knows nothing of this module. It offers two functions for 4-D tensors with a contiguous last dimension:

    forward(q, k, v, *, causal, scale, tile)
    backward(dout, q, k, v, out, lse, *, causal, scale, tile)

`entry_points` turns them into the stage's public functions, and operators.py into operators that torch.compile sees.
The rules about arguments are in checks.py. What they decide depends on the options and on the layout of the tensors
only, so it is decided once for each of them: `Calls` keeps a call that has passed the checks.
"""

import contextlib
import math
import numbers
import operator

import torch
from torch._subclasses.fake_tensor import FakeTensor

from steps import checks, engine, operators
from steps.checks import lse_dtype


def entry_points(rungs, supports):
    """The stage's `forward`, `backward` and `attention`, which check their arguments and then call a kernel.

    rungs: {rung: (forward, backward)}. A call that names no rung gets the first that takes the input's dtype and
    head_dim, and has the tile, if one is given; checks.pick says more.
    supports: the stage's SUPPORTS, with the keys stage, devices, dtypes, head_dims, tiles, rungs, gqa, nq_ne_nk,
    deterministic, order and own_backward, the rungs whose backward is their own. A stage whose rungs differ also has
    limits, {rung: the keys that are different for it, and perhaps best and tile_fits, whether it takes (D, tile)}, and
    elsewhere, {rung: what a machine needs to run it}.
    """
    stage = supports["stage"]
    whole = {rung: checks.supports_of(supports, rung) for rung in rungs}

    def forward(q, k, v, *, causal=False, scale=None, tile=None, rung=None, **lacking):
        """Attention and its log-sum-exp: (out, lse).

        q (B, H, Nq, D), k and v (B, Hk, Nk, D); fewer leading dimensions are accepted. out like q; lse (B, H, Nq)
        float32 (float64 for float64 input), the natural logarithm of the sum of exp of the scaled scores. causal: a
        query sees the keys up to its own position, aligned at the bottom right; a query that sees none gets out 0 and
        lse -inf. scale: 1/sqrt(D) by default. tile: (Br, Bc) out of SUPPORTS["tiles"]. rung: a kernel out of
        SUPPORTS["rungs"]. lacking: options of other stages and libraries, which are refused by the name of who has
        them. Raises TypeError, ValueError or NotImplementedError before anything is computed.
        """
        if lacking:
            checks.refuse(stage, "forward", lacking)
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return forward_operator(q, k, v, causal=causal, scale=scale, tile=tile, rung=rung)
        return forwards(q, k, v, causal=causal, scale=scale, tile=tile, rung=rung)

    def backward(
        dout, q, k, v, out, lse, *,
        causal=False, scale=None, tile=None, rung=None, deterministic=False, **lacking
    ):  # fmt: skip
        """Gradients (dq, dk, dv), like q, k and v, from dout, the gradient of out; out and lse are what `forward` gave.

        tile: the forward's; it does not change a backward that has tiles of its own. deterministic: the gradients are
        bit-equal from run to run, as they always are where SUPPORTS["deterministic"] is True.
        """
        if lacking:
            checks.refuse(stage, "backward", lacking)
        options = dict(causal=causal, scale=scale, tile=tile, rung=rung, deterministic=deterministic)
        if torch.compiler.is_compiling():
            with torch.no_grad():
                return backward_operator(dout, q, k, v, out, lse, **options)
        return backwards(dout, q, k, v, out, lse, **options)

    @Calls
    def forwards(q, k, v, *, causal, scale, tile, rung):
        kernel, own = checks.pick(rungs, supports, rung, 0, q, whole, tile)
        engine.check_runs()
        scale, options = checks.check_call(own, kernel, (("q", q), ("k", k), ("v", v)), causal, scale, tile)
        if q.numel() == 0 or k.numel() == 0:  # There is no query, or no key to sum over.
            return nothing
        return Call(kernel, (q.shape, q.shape[:-1]), causal=causal, scale=scale, **options)

    @Calls
    def backwards(dout, q, k, v, out, lse, *, causal, scale, tile, rung, deterministic):
        kernel, own = checks.pick(rungs, supports, rung, 1, q, whole, tile)
        engine.check_runs()
        scale, options = checks.check_call(own, kernel, (("q", q), ("k", k), ("v", v)), causal, scale, tile)
        checks.check_saved(q, dout, out, lse)
        checks.check_flag("deterministic", deterministic)
        if deterministic and not own["deterministic"]:
            options["deterministic"] = True
        if q.numel() == 0 or k.numel() == 0:
            return no_gradients
        return Call(kernel, (q.shape, k.shape, v.shape), causal=causal, scale=scale, **options)

    def fake_forward(q, k, v, causal, scale, tile, rung):
        """(out, lse) of the right shapes, with nothing in them, after the checks of `forward`."""
        kernel, own = checks.pick(rungs, supports, rung, 0, q, whole, tile)
        checks.check_call(own, kernel, (("q", q), ("k", k), ("v", v)), causal, scale, tile)
        return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=lse_dtype(q))

    forward_operator, backward_operator = operators.define(stage, forward, backward, fake_forward)
    attention = differentiable(stage, forward, backward, forward_operator)
    for function in (forward, backward, attention):  # They can be pickled, by the place where they are found.
        function.__module__, function.__qualname__ = f"steps.{stage}", function.__name__
    return forward, backward, attention


def nothing(q, k, v):
    """(out, lse) where there is no query, or no key to sum over."""
    return zeros(q), torch.full(q.shape[:-1], -math.inf, dtype=lse_dtype(q), device=q.device)


def no_gradients(dout, q, k, v, out, lse):
    return zeros(q), zeros(k), zeros(v)


# ---- calls that have passed the checks -------------------------------------------------------------------------------


class Calls:
    """Calls `prepare(*tensors, **options)`, which checks them, and then what it returns, a function of the tensors.

    What it returned is kept under all that the checks may depend on. A later call with the same key has passed them.
    """

    MOST = 1000  # functions that are kept; then all are forgotten

    def __init__(self, prepare):
        self.prepare, self.kept = prepare, {}

    def __call__(self, *tensors, **options):
        key = key_of(tensors, options)
        call = self.kept.get(key)
        if call is None:
            call = self.prepare(*tensors, **options)
            if key is not None:
                if len(self.kept) >= self.MOST:
                    self.kept.clear()
                self.kept[key] = call
        return call(*tensors)


def key_of(tensors, options):
    """What the checks and a plan depend on: the options with their types, because 1 == True, and the tensors' layouts.

    None where that is not known: of tensors without memory, of subclasses, and of options that can change.
    """
    try:
        key = [(name, type(x) if type(x) in CONSTANT else types_in(x), x) for name, x in options.items()]
        for x in tensors:
            if type(x) is torch.Tensor or type(x) is torch.nn.Parameter:
                address = x.data_ptr()
                if address == 0:
                    return None
                key.append((x.dtype, x.device, x.shape, x.stride(), address % 16, x.is_neg()))
            elif x is None:
                key.append(None)
            else:
                return None
        key = tuple(key)
        hash(key)
        return key
    except (RuntimeError, TypeError, NotImplementedError):
        return None


CONSTANT = frozenset((bool, int, float, str, type(None)))  # the types of almost all options, which are told fast


def types_in(x):
    """The type of a number, or those in a tuple, because (1.0, 1) == (True, 1).

    Raises TypeError for what can change. A tensor may be an option, such as first_query: it equals itself, and has the
    same hash, also after its number has changed.
    """
    if type(x) is tuple:
        return tuple(map(types_in, x))
    if type(x) in CONSTANT or isinstance(x, numbers.Number):
        return type(x)
    raise TypeError


class Call:
    """A call of a kernel that has passed the checks, for tensors of one layout.

    A kernel may have a function `planned`, with the arguments of a call that it has had. It returns a function of the
    tensors that does what the call did, for other tensors of the same layout, without looking at them again.
    """

    def __init__(self, kernel, shapes, names=(), **options):
        """shapes: those of the results. names: those of the last tensors, which the kernel takes by name."""
        self.kernel, self.shapes, self.names, self.options = kernel, shapes, names, options
        self.planned = None

    def __call__(self, *tensors):
        if self.planned is not None and not torch.is_autocast_enabled(tensors[0].device.type):
            return self.planned(*tensors)
        given = [x for x in tensors if x is not None]
        count, rank = len(given) - len(self.names), given[0].ndim
        read = [as_4d(x, rows=x.ndim < rank) for x in given[:count]]
        named = dict(zip(self.names, map(in_memory, given[count:]), strict=True))
        if "out" in named:  # what earlier calls gave, which is changed in place
            named |= {"out": as_4d(named["out"]), "lse": as_4d(named["lse"], rows=True)}
        results = compute(self.kernel, *read, **named, **self.options)
        if hasattr(self.kernel, "planned") and all(map(operator.is_, (*read, *named.values()), given)):
            # Nothing has to be done before or after the kernel.
            with contextlib.suppress(KeyError):  # Another thread has just made the kernel forget what it kept.
                self.planned = engine.one_at_a_time(self.kernel.planned(*read, **named, **self.options))
        if tensors[0].ndim == 4:
            return results
        return tuple(x.reshape(shape) for x, shape in zip(results, self.shapes, strict=True))


def differentiable(stage, forward, backward, forward_operator):
    """The stage's `attention(q, k, v, **options) -> out`.

    It is made from a forward that saves (out, lse) and a backward that uses them, and can be differentiated once. Only
    q, k, v, out and lse are kept for the backward, so that memory grows with N and not with N^2. While a call is
    traced, `forward_operator` stands for it.
    """

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, options, deterministic):
            out, lse = forward(q, k, v, **options)
            out = apart(out)
            ctx.save_for_backward(q, k, v, out, lse)
            ctx.options = options | {"deterministic": deterministic}
            return out

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, dout):
            return *backward(dout, *ctx.saved_tensors, **ctx.options), None, None

    def attention(q, k, v, *, causal=False, scale=None, tile=None, rung=None, deterministic=False, **lacking):
        """out as of `forward`, differentiable once with the gradients of `backward`.

        torch.compile, torch.export and fake tensors see one operator. Autocast does not change the dtype.
        """
        if lacking:
            checks.refuse(stage, "attention", lacking)
        checks.check_flag("causal", causal)
        checks.check_flag("deterministic", deterministic)
        options = {"causal": causal, "scale": scale, "tile": tile, "rung": rung}
        if is_traced(q):
            return forward_operator(q, k, v, **options, deterministic=deterministic)[0]
        checks.check_derivatives(q, k, v)
        return Attention.apply(q, k, v, options, deterministic)

    return attention


def apart(out):
    """out as torch wants the result of an autograd.Function: a view could not be changed in place, as by `out.add_`."""
    return out.detach() if out._is_view() else out


def is_traced(q):
    """Whether a call is recorded and not computed: by torch.compile, torch.export, a mode of torch, or a fake q.

    Such a call needs an operator. Others are an autograd.Function: an operator would take several times as long.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or isinstance(q, FakeTensor)


@engine.one_at_a_time
def compute(kernel, *tensors, **options):
    """The kernel's results, contiguous. Autograd does not see them, and autocast does not change the kernel's dtype."""
    # set_grad_enabled does the same as torch.no_grad() in half the time.
    with torch.set_grad_enabled(False), no_autocast(tensors[0]):
        return tuple([x.contiguous() for x in kernel(*tensors, **options)])


def no_autocast(x):
    """A context in which autocast does not change the dtype of what is computed with x."""
    device = "cuda" if x.is_cuda else "cpu"
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def zeros(x):
    """Zeros like x, contiguous and without a history."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def in_memory(x):
    """x with its numbers in memory as they are. Raises an error that says why for a tensor without memory.

    Torch negates a tensor such as z.conj().imag only when it reads it. Here it is negated, because a kernel reads
    memory.
    """
    try:
        address = 0 if type(x) is FakeTensor else x.data_ptr()
    except RuntimeError:
        address = 0
    if address == 0 and x.numel() > 0:
        checks.refuse_without_memory(x)
    return x.resolve_neg() if x.is_neg() else x


def as_4d(x, rows=False):
    """x as (B, H, N, D) with D contiguous; with rows, which have no D, as (B, H, N).

    It is copied only where D is not contiguous, as after out.sum().backward().
    """
    x = in_memory(x)
    rank = 3 if rows else 4
    if x.ndim < rank:
        x = x.reshape((1,) * (rank - x.ndim) + tuple(x.shape))
    return x if rows or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
