# SPDX-License-Identifier: MIT
"""What a call does, recorded once for each layout of its tensors, and replayed on other tensors.

    @replayed
    def forward(record, q, k, v, *, causal=False):
        out = record.new(q.shape, like=q)                                      # memory for a result
        record.launch(kernel, programs, q, k, v, out, ..., CAUSAL=causal)      # kernel[(programs,)](q, k, v, out, ...)
        return (out,)

Why: `kernel[grid](...)` looks at every argument anew, to find the compiled kernel that fits, and checks and encodes
each descriptor anew. For a small call this takes longer than the GPU's work. The result depends only on the options and
on the dtypes, shapes, strides and alignment of the tensors. They are the key under which a recording is cached.

So the body of such a function runs once for each key. It computes with a tensor's numbers only through the record:
`launch` runs a kernel, and `derive` a function of torch. Triton's interpreter replays, too. There bfloat16, which NumPy
does not have, becomes float32. Needs torch, Triton and cached.py.
"""

import functools
import inspect
import threading
from contextlib import nullcontext

import torch
import triton

from .cached import Cache, check_no_gradient, key_of

# Triton's interpreter replaces functions of triton.language while a kernel runs, and so serves one thread at a time.
ONE_AT_A_TIME = threading.RLock()


class replayed:
    """Runs its function once for each layout of the tensors, which are among its arguments and options.

    It is called without the function's first argument. for_inference: nobody differentiates the function, so it may be
    called where autograd records.
    """

    def __init__(self, function, for_inference=False):
        functools.update_wrapper(self, function)
        self.for_inference = for_inference
        self.function, self.parameters = function, inspect.signature(function)
        self.__signature__ = self.parameters.replace(parameters=[*self.parameters.parameters.values()][1:])
        self.recordings = Cache()
        self.clear = self.recordings.clear  # for whoever has changed a table of tiles

    def __call__(self, *arguments, **options):
        """The function's results."""
        named = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
        if not self.for_inference:
            check_no_gradient(*arguments, *named.values())
        others = {name: x for name, x in options.items() if name not in named} if named else options
        key = key_of((*arguments, *named.values()), others)
        key = key and (*key, *named)
        replay = self.recordings.get(key)
        if replay is not None:
            return replay(*arguments, *named.values())
        results, replay = self.first(*arguments, **options)
        self.recordings.add(key, replay)
        return results

    def first(self, *arguments, **options):
        """(the results, a function of the tensors that does the same with others of their layout)."""
        with ONE_AT_A_TIME:
            check(**self.parameters.bind(None, *arguments, **options).arguments)
            recording = Recording([x for x in (*arguments, *options.values()) if isinstance(x, torch.Tensor)])
            results = recording.record(self.function, arguments, options)
        return results, lambda *tensors: recording.replay([x for x in tensors if x is not None])


for_inference = functools.partial(replayed, for_inference=True)


def check(q, k, v=None, dout=None, out=None, lse=None, **_):
    """Raises an error for tensors of which a kernel would read what is not there, and RuntimeError without a GPU."""
    if not q.ndim == k.ndim == 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q must be (B, H, Nq, D) and k (B, Hk, Nk, D); got {tuple(q.shape)} and {tuple(k.shape)}.")
    H, Hk = q.shape[1], k.shape[1]
    if H != Hk * (H // max(1, Hk)):
        raise ValueError(f"H must be a multiple of Hk; got q {tuple(q.shape)} and k {tuple(k.shape)}.")
    shapes = ("v", v, k.shape), ("dout", dout, q.shape), ("out", out, q.shape), ("lse", lse, q.shape[:3])
    for name, x, shape in shapes:
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} must have shape {tuple(shape)}; got {tuple(x.shape)}.")
    for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout), ("out", out)):
        if x is not None and x.shape[3] > 1 and x.stride(3) != 1:
            raise ValueError(f"{name}'s last dimension must be contiguous; it has stride {x.stride(3)}.")
        if x is not None and name != "out" and (x.dtype, x.device) != (q.dtype, q.device):
            raise TypeError(f"{name} must be {q.dtype} on {q.device}, as q is; got {x.dtype} on {x.device}.")
    if not (q.is_cuda or triton.knobs.runtime.interpret):
        try:
            triton.runtime.driver.active  # noqa: B018  It fails where Triton finds no GPU to compile for.
        except RuntimeError:
            raise RuntimeError("no GPU: start Python with TRITON_INTERPRET=1, and Triton interprets kernels.") from None


class Recording:
    """The steps of a call. Each is a function of the list of its tensors: those given, then those made so far."""

    def __init__(self, tensors):
        self.device = tensors[0].device
        interpreted = triton.knobs.runtime.interpret
        # {place of a tensor: the dtype that the interpreter does not have}
        self.narrow = {n: x.dtype for n, x in enumerate(tensors) if interpreted and x.dtype == torch.bfloat16}
        # A kernel reads what lies in memory. Torch negates z.conj().imag, for example, only when torch itself reads it.
        self.negative = [n for n, x in enumerate(tensors) if x.is_neg()]
        # A recording must distinguish its tensors, also where a caller passes one of them twice, as dout and as q.
        distinct = [x.detach() if any(x is y for y in tensors[:n]) else x for n, x in enumerate(tensors)]
        self.tensors = self.readable(distinct)
        self.steps = []

    def readable(self, tensors):
        """The tensors as the kernels read them."""
        for n in self.negative:
            tensors[n] = tensors[n].resolve_neg()
        for n in self.narrow:
            if n < len(tensors):
                tensors[n] = tensors[n].float()
        return tensors

    def record(self, function, arguments, options):
        """The function's results, a tuple of tensors, while its steps are noted."""
        self.function = function
        given = iter(self.tensors.copy())
        arguments = [next(given) if isinstance(x, torch.Tensor) else x for x in arguments]
        options = {name: next(given) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        with torch.cuda.device_of(self.tensors[0]):  # Triton launches on the current device
            results = function(self, *arguments, **options)
        self.results = [self.place(x) for x in results]
        results = self.narrowed(self.tensors)
        self.tensors = None  # A recording keeps no tensor alive.
        return results

    def replay(self, tensors):
        """The results of the same steps on other tensors."""
        if self.device.type == "cuda" and torch._C._cuda_getDevice() != self.device.index:
            with torch.cuda.device(self.device):
                return self.replay(tensors)
        if self.narrow or self.negative:
            tensors = self.readable(tensors)
        with ONE_AT_A_TIME if triton.knobs.runtime.interpret else nullcontext():
            for step in self.steps:
                step(tensors)
        return self.narrowed(tensors)

    def narrowed(self, tensors):
        if not self.narrow:
            return tuple([tensors[n] for n in self.results])
        return tuple([tensors[n].to(self.narrow.get(n, tensors[n].dtype)) for n in self.results])

    def place(self, tensor):
        """Where this very tensor is in the list."""
        for n, x in enumerate(self.tensors):
            if x is tensor:
                return n
        raise ValueError("a replayed function has a tensor that neither was given nor made through its record.")

    def step(self, step, like):
        """The tensor that a step makes. The interpreter gives it the dtype of `like` when the call ends."""
        if like is not None and self.place(like) in self.narrow:
            self.narrow[len(self.tensors)] = torch.bfloat16
        step(self.tensors)
        self.steps.append(step)
        return self.tensors[-1]

    # ---- what a replayed function calls ----

    def negated(self, *tensors):
        """Whether one of these was given as the negative of what lies in memory, so that this is a copy of it."""
        return any(self.place(x) in self.negative for x in tensors)

    def new(self, shape, like=None, fill=None, dtype=torch.float32):
        """A contiguous tensor on the device of the call, of the dtype of `like`, if given; empty, or full of `fill`."""
        dtype = dtype if like is None else like.dtype
        shape = tuple(shape)

        def make(tensors):
            new = tensors[0].new_empty(shape, dtype=dtype)
            tensors.append(new if fill is None else new.fill_(fill))

        return self.step(make, like)

    def derive(self, function, tensor, like=None):
        """The tensor that this function of torch gives for this one; its dtype is that of `like`, if given."""
        place = self.place(tensor)
        return self.step(lambda tensors: tensors.append(function(tensors[place])), like)

    def in_float32(self, tensor):
        """The tensor contiguous and in float32; None for None."""
        return None if tensor is None else self.derive(lambda x: x.float().contiguous(), tensor)

    def launch(self, kernel, programs, *arguments, **constants):
        """kernel[grid](*arguments, **constants), for a grid of one or two dimensions."""
        grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
        start = kernel[grid]
        compiled = start(*arguments, **constants)
        if compiled is None:  # The interpreter compiles nothing.
            start = functools.partial(start, **constants)
        else:
            start = compiled[grid]
            named = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
            arguments = [named[name] for name in kernel.arg_names]
        puts = [(n, put) for n, x in enumerate(arguments) if (put := self.put(x))]
        values = [None if self.put(x) else x for x in arguments]

        def launch(tensors):
            filled = values.copy()
            for n, put in puts:
                filled[n] = put(tensors)
            start(*filled)

        self.steps.append(launch)

    def put(self, x):
        """A function of the call's tensors that gives an argument such as x; None if x has no tensor in it."""
        if isinstance(x, torch.Tensor):
            place = self.place(x)
            return lambda tensors: tensors[place]
        if hasattr(x, "base"):
            return put_descriptor(x, self.place(x.base))
        if isinstance(x, tuple):
            return put_tuple(x, [self.put(part) for part in x])
        return None


def put_descriptor(descriptor, place):
    """A function that makes such a descriptor of another tensor, without the checks that the first one has passed."""
    kind, fields = type(descriptor), {**vars(descriptor), "base": None}

    def put(tensors):
        new = object.__new__(kind)
        new.__dict__.update(fields)
        new.base = tensors[place]
        return new

    return put


def put_tuple(x, puts):
    """A function that makes such a tuple, which may have names; None if there is no tensor in it."""
    if not any(puts):
        return None
    make = type(x)._make if hasattr(x, "_make") else tuple
    parts = [None if put else part for part, put in zip(x, puts, strict=True)]
    puts = [(n, put) for n, put in enumerate(puts) if put]

    def put(tensors):
        filled = parts.copy()
        for n, put in puts:
            filled[n] = put(tensors)
        return make(filled)

    return put
