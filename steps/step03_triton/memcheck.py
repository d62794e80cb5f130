# SPDX-License-Identifier: MIT
"""compute-sanitizer's memcheck for Triton's interpreter: a load or store beside its tensor is an error that names it.

The interpreter accepts any address that a kernel computes. The memory beside a tensor mostly belongs to the same
process. A kernel without a needed mask then computes right numbers here, but fails or errs on a GPU. Therefore
each launch notes which bytes belong to the tensors among its arguments, and all bytes of one load or store must lie
within one of them. An access that lies wholly within another tensor of the launch is not seen, here as on a GPU.

Only the course's kernels are watched. Those of other modules run as Triton's interpreter has it, unless somebody calls
`watch_every_kernel`: a notebook, say, for the kernels in its cells.
"""

from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, InterpreterError

# Of the watched launch under way: {argument's name: (first byte, byte behind the last)}. Otherwise None.
spans: dict[str, tuple[int, int]] | None = None
_every = False  # whether kernels of other modules are watched, too


class OutOfBounds(IndexError):
    """A kernel's load or store is not within one tensor."""


class NoTruthValue(TypeError):
    """A kernel asks whether a tile is true, as `and`, `or`, `not` and `if` do."""


def tensors_in(name, argument):
    """(name, tensor) of each tensor in a launch's argument, which may be a tuple or a tensor descriptor."""
    if isinstance(argument, tuple):
        names = getattr(argument, "_fields", range(len(argument)))
        for field, value in zip(names, argument, strict=True):
            yield from tensors_in(f"{name}.{field}", value)
    elif hasattr(argument, "base"):  # a descriptor, or a tensor that Triton reads as another type
        yield from tensors_in(name, argument.base)
    elif hasattr(argument, "data_ptr"):
        yield name, argument


def span(tensor):
    """The tensor's first byte, and the byte behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    elements = last + 1 if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


def check(builder, what, pointers, mask):
    """OutOfBounds if the bytes at those pointers whose mask is set are not all of one tensor."""
    addresses = pointers.data[mask.data]
    if spans is None or addresses.size == 0:
        return
    first = int(addresses.min())
    end = int(addresses.max()) + max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    if any(begin <= first and end <= behind for begin, behind in spans.values()):
        return
    name, (begin, behind) = min(spans.items(), key=lambda item: distance(first, *item[1]))
    before, after = begin - first, end - behind
    where = f"{before} bytes before the first" if before > 0 else f"up to {after} bytes behind the last"
    raise OutOfBounds(f"program {builder.grid_idx} {what} {where} of {name}")


def distance(first, begin, behind):
    """How far this byte is from the nearest of the bytes from begin to behind - 1; 0 if it is one of them."""
    return max(begin - first, first - (behind - 1), 0)


def watch_every_kernel():
    """From now on kernels of all modules are watched."""
    global _every
    _every = True


def is_watched(function):
    return _every or function.__module__.partition(".")[0] == __name__.partition(".")[0]


def watch():
    """From now on the interpreter checks each load and each store of a watched kernel."""
    launch = GridExecutor.__call__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def watched_launch(self, *args, **kwargs):
        global spans
        if not is_watched(self.fn):
            return launch(self, *args, **kwargs)
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        spans = {name: span(x) for argument in arguments.items() for name, x in tensors_in(*argument)}
        try:
            return launch(self, *args, **kwargs)
        except InterpreterError as error:
            innermost = error
            while innermost.__cause__:  # One for each function of the kernel that was being called.
                innermost = innermost.__cause__
            if isinstance(innermost, OutOfBounds | NoTruthValue):
                raise innermost from None
            raise
        finally:
            spans = None

    def watched_load(self, pointers, mask, *how, **named):
        check(self, "loads", pointers, mask)
        return load(self, pointers, mask, *how, **named)

    def watched_store(self, pointers, value, mask, *how):
        check(self, "stores", pointers, mask)
        return store(self, pointers, value, mask, *how)

    GridExecutor.__call__ = watched_launch
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = watched_load, watched_store
