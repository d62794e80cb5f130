"""Judges somebody's attention case by case, names the mistake that its failures equal, and measures it on a GPU."""

import contextlib
import os
import threading
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import NamedTuple

import torch
import torch.nn.functional as F

from reference import cases, error, mutants
from steps import engine
from steps.course.bench import cost, timing
from steps.course.verify.anybody import Problem, by_its_names, results, told
from steps.course.workbook import differences

LIMIT, FIRST = 60, 300  # seconds for a case; in the first one the function may be compiled
PATIENCE = 20  # seconds after which a case is named that has not ended
# (Br, Bc) that are tried to name a mistake, beside the tile that was given.
TILES = tuple(pair for pair in product((128, 64, 32, 16), repeat=2) if max(pair) <= 2 * min(pair))


class Judged(NamedTuple):
    """What is found of a function."""

    cases: list  # the rows that `judge` yields
    equals: list  # what `mistakes` gives
    speed: list  # the rows that `speed` yields

    @property
    def failed(self):
        """How many cases are wrong."""
        return sum(bool(row["wrong"]) for row in self.cases)


def judge(function, claims, kept):
    """Yields a row for each case: {"name", "says", "errors", "wrong"}.

    errors: {result: (error, tolerance)}. wrong: lines that say what is wrong, none where the property holds. kept: a
    list to which is added what `mistakes` takes. Raises Problem if the first, plain case has one. If only its gradients
    have one, the first row says so, and the forward is judged alone.
    """
    call, backward = by_its_names(function, claims), claims.backward
    for number, (case, dtype) in enumerate(claims.cases(engine.name == "cuda")):
        x = cases.build(case, claims.supports, dtype, engine.device)
        row = {"name": case.name, "says": f"{case.says}, {str(dtype).removeprefix('torch.')}", "errors": {}}
        try:
            with time_limit(LIMIT if number else FIRST, case.says):
                if number == 0 and backward and (says := _no_backward(call, x, function)):
                    backward = False
                    yield {"name": "backward", "says": "backward", "errors": {}, "wrong": [says]}
                got = results(call, x, backward)
                if number == 0 and not torch.equal(got["out"], results(call, x, False)["out"]):
                    yield row | {"name": "bit_equal", "wrong": ["two runs of the forward differ"]}
        except (Exception, SystemExit) as e:
            if number == 0:
                raise Problem(told(e, function)) from e
            if "CUDA error" not in str(e):
                yield row | {"wrong": [told(e, function)]}
                continue
            yield row | {"wrong": [told(e, function), "The GPU does no more work in this process: no more cases."]}
            return
        top_left = claims.top_left and case.causal and case.Nk is not None
        want = expected_top_left(x) if top_left else x.expected()
        if not top_left and dtype != torch.float64 and x.q.numel() < 10**6:  # as far as the mutants are computed
            kept.append((row["says"], tuple(map(mutants._on_cpu, (x, got, want)))))
        errors = {name: (e, want.tolerance[name]) for name, e in error.errors(got, want).items()}
        wrong = differences.lines(got, want)
        if wrong and (not x.causal or case.Nk is None or top_left) and _sdpa_fails(x, got, want, backward):
            wrong.append("torch's scaled_dot_product_attention fails this, too")
        yield row | {"errors": errors, "wrong": wrong}


def _no_backward(call, x, function):
    """What autograd says if the forward works, and only its backward does not; otherwise None."""
    try:
        results(call, x, True)
    except Problem:
        return None
    except Exception as e:
        with contextlib.suppress(Exception, SystemExit):
            results(call, x, False)
            return f"{told(e, function)}. The forward is judged alone, as --without backward has it"
    return None


def _sdpa_fails(x, got, want, backward):
    """Whether torch's own attention is out of tolerance in each result in which the function is."""
    if engine.name == "cuda" and x.q.storage_offset() % 8:
        return False  # A kernel of torch's would end with an error, and this process with it.

    def sdpa(q, k, v, causal, scale):
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    try:
        theirs = error.failures(results(sdpa, x, backward), want)
    except Exception:
        return False
    return error.failures(got, want).keys() <= theirs.keys()


def expected_top_left(x):
    """What is expected where query i sees the keys 0 to i, whatever Nq and Nk, as in torch's SDPA.

    The first n = min(Nq, Nk) queries and keys form a square, in which both alignments agree. Later queries see every
    key.
    """
    n = min(x.q.shape[-2], x.k.shape[-2])
    square = error.expected(*(t[:, :, :n] for t in (x.q, x.k, x.v, x.dout)), causal=True, scale=x.scale)
    rest = error.expected(x.q[:, :, n:], x.k, x.v, x.dout[:, :, n:], scale=x.scale)
    for name in error.NAMES:
        rest.tolerance[name] += square.tolerance[name]
        if name in ("dk", "dv"):
            rest.value[name][:, :, :n] += square.value[name]
            rest.exact[name] = rest.exact[name].clone()
            rest.exact[name][:, :, :n] = False
        else:
            rest.value[name] = torch.cat([square.value[name], rest.value[name]], 2)
            rest.exact[name] = torch.cat([square.exact[name], rest.exact[name]], 2)
    return rest


@contextlib.contextmanager
def time_limit(seconds, says):
    """Ends the program after so many seconds: a kernel that hangs cannot be stopped in any other way.

    says: the case, which is told then, and at Ctrl-C.
    """

    def give_up():
        why = "Does a loop never end? If it is only slow, a smaller --tile makes N smaller."
        print(f"stopped after {seconds} s in the case: {says}. {why}", flush=True)
        os._exit(1)

    tell = f"not yet ended: {says}. It may take {seconds} s, and Ctrl-C stops it."
    timers = threading.Timer(PATIENCE, print, [tell], {"flush": True}), threading.Timer(seconds, give_up)
    for timer in timers:
        timer.start()
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped in the case: {says}", flush=True)
        raise
    finally:
        for timer in timers:
            timer.cancel()


def mistakes(kept, tile):
    """[(cases, mutants)]: what the results of these cases equal, all of them or, of several mistakes, each its own.

    kept: [(says, (inputs, results, expected))]. The tiles and the order of loops are not known, so the first are taken
    for which there is such a mistake. No case may contradict a name, right or wrong. If others are wrong besides, two
    cases have to carry it.
    """
    rows = [(says, row, error.failures(*row[1:])) for says, row in kept]
    wrong = sorted((row for row in rows if row[2]), key=lambda row: row[1][0].q.numel())
    tiles = dict.fromkeys([(tile, tile), *(pair for pair in TILES if max(pair) <= 2 * tile)])
    if not wrong or mutants._nan_everywhere([((x, tile, got, want), f) for _, (x, got, want), f in wrong]):
        return []
    seen = {}
    against = {pair: set() for pair in tiles}  # kinds of mutants that a case contradicts
    for pair, order in product(tiles, ("fa2", "fa1")):
        if found := _equal(rows, pair, order, seen, against=against[pair] if order == "fa2" else None):
            return [("", found)]
    found = {}
    left = [row for row in wrong if _can_be_told(row)][:6]  # where more are wrong, it is seldom two known mistakes
    for pair in tiles:
        carriers = {m: [] for m in mutants.MUTANTS}
        for n, row in enumerate(left, 1):
            possible = [m for m, some in carriers.items() if not against[pair].issuperset((m.kind, *m.kind.variants))
                        and len(some) + len(left) - n > 0]  # fmt: skip
            for m in _equal([row], pair, "fa2", seen, possible, against[pair]):
                carriers[m].append(row[0])
        for m, some in carriers.items():
            if len(some) > 1 and any(_fits(kind, rows, pair, seen) for kind in (m.kind, *m.kind.variants)):
                found.setdefault(tuple(some), []).append(m)
        left = [row for row in left if row[0] not in chain(*found)]
        if len(left) < 2:  # Nothing can have two carriers any more.
            break
    # A mistake that explains more of the cases explains these, too.
    return [("; ".join(some), equal) for some, equal in found.items() if not any({*some} < {*more} for more in found)]


def _fits(kind, rows, tile, seen):
    """Whether the mutant's results are in no case wrong and others than these."""
    for _, (x, got, want), failures in rows:
        found = mutants.compared(kind, ((x, tile, got, want), failures), "fa2", seen)
        if found.wrong and found.differs:
            return False
    return True


def remark(kept, tile):
    """What can be said of wrong results that equal those of no mutant, or ""."""
    return mutants.remark([(x, (tile, tile), got, want) for _, (x, got, want) in kept])


def options(rows, claims, named):
    """The options that would leave out what fails, and little else; [] if none would leave out all of it."""
    failed = {row["name"] for row in rows if row["wrong"]}
    asked = {case.name for case, _ in claims.cases(engine.name == "cuda")}
    found, unclaimed = [], []
    if not claims.top_left and any(m.name == "top_left" for _, equal in named for m in equal):
        found.append("--top-left")
        failed -= {case.name for case, _ in claims.cases(engine.name == "cuda") if case.causal and case.Nk}
    for name in ("large_scores", "empty", "offset", "gqa", "strides", "nq_ne_nk"):  # the narrow ones first
        fewer = {case.name for case, _ in replace(claims, **{name: False}).cases(engine.name == "cuda")}
        if left_out := failed & (asked - fewer):
            unclaimed.append(name.replace("_", "-"))
            failed -= left_out
    gradients = {row["name"] for row in rows if row["wrong"] and row["errors"] and not _forward_fails(row)}
    if left_out := failed & (gradients | {"backward"}):
        unclaimed.append("backward")
        failed -= left_out
    found += ["--without", ",".join(unclaimed)] if unclaimed else []
    return [] if failed else found


def _forward_fails(row):
    return any(not e <= tolerance for name, (e, tolerance) in row["errors"].items() if name in ("out", "lse"))


def _can_be_told(row):
    """Whether one wrong case can have its mistake named: NaN looks alike whatever made it, and so do infinities."""
    _, (_, got, want), failures = row
    wrong = failures.keys() & {"out", "lse"} or failures
    pairs = [(got[name], want.value[name]) for name in wrong]
    return all(x.isfinite().any() and not (x.isnan() & ref.isfinite()).any() for x, ref in pairs)


def _equal(rows, tile, order, seen, known=mutants.MUTANTS, against=None):
    """Those of the mutants `known` that the results of all the rows equal, with these tiles and this order of loops.

    seen, against: see mutants.explaining.
    """
    wrong = {name for _, _, failures in rows for name in failures}
    forward = wrong & {"out", "lse"}  # The gradients are computed from these, and wrong with them.
    kind, names = (mutants.Forward, ("out", "lse")) if forward else (mutants.Backward, ("dq", "dk", "dv"))
    names = [name for name in names if name in rows[0][1][1]]
    rows = [((x, tile, got, want), failures) for _, (x, got, want), failures in rows]
    known = [m for m in known if issubclass(m.kind, kind) and ("lse" in names or not m.kind.needs_lse)]
    return mutants.explaining(known, rows, names, order, seen, against)


def speed(function, claims):
    """[{"pass", "ms", "tflops", "sdpa_tflops"}] for 16k tokens of hidden size 2048, beside SDPA in the same run."""
    call = by_its_names(function, claims)
    dtype = next((t for t in claims.dtypes if t in (torch.bfloat16, torch.float16)), claims.dtypes[0])
    D = 64 if 64 in claims.head_dims else claims.head_dims[0]
    B, H, N = 4, 2048 // D, -(-4096 // claims.multiple_of) * claims.multiple_of
    options = dict(device="cuda", dtype=dtype, requires_grad=claims.backward)
    tensors = [torch.randn(B, H, N, D, **options) for _ in range(4)]

    def theirs(q, k, v):
        out = call(q, k, v, claims.causal, None)
        return out[0] if isinstance(out, tuple | list) else out

    rows, sdpa = [], partial(F.scaled_dot_product_attention, is_causal=claims.causal)
    for pass_ in ("fwd", "fwd+bwd") if claims.backward else ("fwd",):
        calls = {name: partial(_pass, pass_, f, *tensors) for name, f in (("theirs", theirs), ("sdpa", sdpa))}
        calls["theirs"]()  # The first call may compile.
        if timing.one_call(calls["theirs"], device="cuda") > 1000:
            break
        ms = {name: t["ms_median"] for name, t in timing.interleaved(calls, device="cuda").items()}
        tflops = {name: cost.Point(B, H, N, D, claims.causal).flops(pass_) / 1e9 / t for name, t in ms.items()}
        rows.append({"pass": pass_, "ms": ms["theirs"], "tflops": tflops["theirs"], "sdpa_tflops": tflops["sdpa"]})
    return rows


def _pass(pass_, attention, q, k, v, dout):
    out = attention(q, k, v)
    return out if pass_ == "fwd" else torch.autograd.grad(out, (q, k, v), dout)
