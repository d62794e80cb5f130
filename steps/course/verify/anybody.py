"""Anybody's attention: how it is found and called, and the cases that it claims to take."""

import difflib
import importlib.util
import inspect
import sys
import traceback
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from reference import cases


class Problem(Exception):
    """What is wrong with the function, in one line."""


@dataclass(frozen=True)
class Claims:
    """What the function claims to take. A case beyond it is left out. The command's help explains each."""

    dtypes: tuple
    head_dims: tuple
    tile: int = 64
    top_left: bool = False
    causal: bool = True
    scale: bool = True
    gqa: bool = True
    nq_ne_nk: bool = True
    ragged: bool = True
    empty: bool = True
    strides: bool = True
    offset: bool = True
    large_scores: bool = True
    backward: bool = True

    @property
    def supports(self):
        """The claims in the form of a stage's SUPPORTS."""
        return vars(self) | {"stage": "the function", "tiles": ((self.tile, self.tile),)}

    @property
    def multiple_of(self):
        """A number that divides every N."""
        return 1 if self.ragged else self.tile

    def cases(self, gpu):
        """[(case, dtype)] of what the contract asks of such a function."""
        head_dims = [cases.Case(f"head_dim_{D}", f"head_dim {D}", D=D, H=1, causal=True) for D in self.head_dims]
        rows = [(case, dtype) for case, dtype, lacks in cases.select(self.supports, gpu) if not lacks]
        rows = [(self.fitted(case), dtype) for case, dtype in rows if not case.name.startswith("head_dim")]
        more = [case for case in (*head_dims, *MORE) if not cases._missing(case, self.supports, gpu)]
        rows += [(self.fitted(case), self.dtypes[0]) for case in more]
        rows = [(case, dtype) for case, dtype in rows if case]
        return sorted(rows, key=lambda row: row[0].place == "offset")  # Last: it may end all work of the GPU.

    def fitted(self, case):
        """The case with sizes that the function takes, or None if the case's property is not claimed."""
        m, T = self.multiple_of, self.supports["tiles"][0][0]
        Nq = case.Nq(T)
        Nk = Nq if case.Nk is None else case.Nk(T)
        unclaimed = (
            case.tile != "square",  # Only a stage of the course can be told which tile to take.
            any(0 < n < m for n in (Nq, Nk)),
            "causal" in case.name and not self.causal,
            case.scale is not None and not self.scale,
            0 in (Nq, Nk, case.B, case.H) and not self.empty,
            case.name == "large_scores" and not self.large_scores,
            case.name.startswith("one_past") and m > 1,
            not case.anybody,
            case.place == "offset" and not self.offset,
            (case.place not in ("contiguous", "offset") or case.through_autograd) and not self.strides,
        )
        if any(unclaimed):
            return None
        says = case.says if m == 1 else case.says.replace("not a multiple of the tile", f"a multiple of {m}")
        if self.top_left and case.causal and case.Nk:
            says = f"{says.split(':')[0]}: aligned at the top left"
        Nq, Nk = (-(-n // m) * m for n in (Nq, Nk))
        sizes = dict(Nq=lambda T: Nq, Nk=case.Nk and (lambda T: Nk))
        D = case.D if case.D in self.head_dims else min(self.head_dims)
        return replace(case, says=says, causal=case.causal and self.causal, D=D, **sizes)


def _one_past(T):
    """The last tile of T has one token, which a loop that ends too early leaves out."""
    return cases.Case(f"one_past_{T}", f"N = {T + 1}, one more than a tile of {T}", Nq=lambda _: T + 1, H=1)


# What --without can leave out, as it names them.
PROPERTIES = [field.name.replace("_", "-") for field in fields(Claims) if field.default is True]

# What is asked of functions from elsewhere, beside the contract's cases. A mistake that others accompany is named if
# two cases carry it, so there are two with grouped heads, with fewer queries, and with rows that see no key.
MORE = (
    *(_one_past(T) for T in (16, 32, 64, 128)),
    cases.Case("explicit_scale_causal", "causal, a scale other than 1/sqrt(D)", scale=0.3, causal=True),
    cases.Case("pairs_of_heads", "grouped heads: 2 query heads share each key head", H=6, Hk=3),
    cases.Case("one_query_causal", "causal with one query, the last: it sees every key", H=1, causal=True,
               Nq=lambda T: 1, Nk=lambda T: T + 5),
    cases.Case("three_without_a_key", "causal with three queries more than keys: these see no key", H=1, causal=True,
               Nq=lambda T: T + 4, Nk=lambda T: T + 1),
)  # fmt: skip


def load(target):
    """The function at "FILE.py:function" or "package.module:function". Raises Problem."""
    place, colon, name = target.rpartition(":")
    if not colon:
        raise Problem("write FILE.py:function or package.module:function")
    path = Path(place)
    if path.suffix == ".py" and not path.is_file():
        raise Problem(f"there is no file {path}")
    try:
        if path.suffix == ".py":
            sys.path.insert(0, str(path.parent.resolve()))  # The file may import its neighbours.
            spec = importlib.util.spec_from_file_location(f"verified_{path.stem}", path)
            found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found)
        else:
            found = importlib.import_module(place)
    except (Exception, SystemExit) as e:
        raise Problem(f"importing {place} raised {told(e)}") from e
    if "triton" in sys.modules:  # Stage 03 makes its interpreter refuse an access beside a tensor.
        importlib.import_module("steps.step03_triton")
        importlib.import_module("steps.step03_triton.memcheck").watch_every_kernel()
    function = getattr(found, name, None)
    if not callable(function):
        near = difflib.get_close_matches(name, [each for each, value in vars(found).items() if callable(value)], 1)
        raise Problem(f"there is no function {name} in {place}" + (f"; did you mean {near[0]}?" if near else ""))
    return function


def told(e, function=None):
    """An exception in one line, with the line of the function's file that was running, if the traceback has one."""
    if isinstance(e, Problem):
        return str(e)
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    lines = [frame.lineno for frame in traceback.extract_tb(e.__traceback__) if frame.filename == file]
    first = (str(e).strip().splitlines() or [""])[0]
    return f"{type(e).__name__}: {first}" + (f" ({Path(file).name}, line {lines[-1]})" if lines else "")


def by_its_names(function, claims):
    """call(q, k, v, causal, scale) -> what the function returns. Raises Problem if it lacks a parameter it claims."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # torch's functions do not tell theirs; SDPA is one of them.
        parameters = dict.fromkeys(("is_causal", "scale", "enable_gqa"))
    names = {}
    for claim, known in (("causal", ("causal", "is_causal")), ("scale", ("scale", "softmax_scale", "sm_scale"))):
        names[claim] = next((name for name in known if name in parameters), None)
        if getattr(claims, claim) and not names[claim]:
            raise Problem(f"it has no parameter {' or '.join(known)}: wrap it, or say --without {claim}")

    def call(q, k, v, causal, scale):
        options = {names["causal"]: causal, names["scale"]: q.shape[-1] ** -0.5 if scale is None else scale}
        if "enable_gqa" in parameters and q.shape[1] != k.shape[1]:
            options["enable_gqa"] = True
        return function(q, k, v, **{name: value for name, value in options.items() if name})

    return call


def results(call, x, backward):
    """{name: tensor}: out, lse if it is returned, and autograd's gradients. Raises Problem for another form."""
    leaves = [t.detach().requires_grad_(backward) for t in (x.q, x.k, x.v)]
    before = [t.detach().clone() for t in leaves]
    with torch.set_grad_enabled(backward):
        returned = call(*leaves, x.causal, x.scale)
    pair = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    if len(pair) > 2 or not all(isinstance(t, torch.Tensor) for t in pair):
        kinds = ", ".join(type(t).__name__ for t in pair)
        raise Problem(f"it must return out or (out, lse), tensors; it returned {kinds}")
    got = dict(zip(("out", "lse"), pair, strict=False))
    for name, shape in (("out", x.q.shape), ("lse", x.q.shape[:-1])):
        if name in got and got[name].shape != shape:
            raise Problem(f"{name} must be {tuple(shape)} for q {tuple(x.q.shape)}; it is {tuple(got[name].shape)}")
    if got["out"].dtype != x.q.dtype:
        raise Problem(f"out must be {x.q.dtype} like q; it is {got['out'].dtype}")
    if backward and not got["out"].requires_grad:
        raise Problem("out does not require grad, so there is no backward: mend that, or say --without backward")
    if backward:
        got["out"].backward(x.dout)
        got |= {f"d{name}": leaf.grad for name, leaf in zip("qkv", leaves, strict=True)}
    for name, leaf, old in zip("qkv", leaves, before, strict=True):
        if not torch.equal(leaf, old):
            raise Problem(f"it overwrites its input {name}")
        if backward and leaf.grad is None:
            raise Problem(f"no gradient reaches {name}")
    return {name: t.detach() for name, t in got.items()}
