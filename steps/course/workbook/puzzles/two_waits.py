"""In which order a consumer of rung hopper starts its products, waits for them and gives K and V back."""

import re

import torch

from steps.course.workbook.puzzles import Case
from steps.course.workbook.puzzles._emulated import launch as emulate
from steps.step02_fa2_cuda import emulator, plan

# In the order in which hopper.cu numbers them.
OPERATIONS = (
    "start S", "start O", "wait for S", "wait for all", "release K", "release V", "softmax", "rescale O", "pack P",
)  # fmt: skip


def specification(q, k, v, factors):
    """out of 64 queries, where P = 2^S without a maximum, and factors[j] takes the place of alpha in step j."""
    O = torch.zeros(64, 64, dtype=torch.float64)
    for j in range(0, len(k), 64):
        P = (q.double() @ k[j : j + 64].double().T).exp2().bfloat16().double()
        O = O * (factors[j // 64].double() if j else 1) + P @ v[j : j + 64].double()  # alpha brings O to the new m
    return {"out": O * factors[len(k) // 64].double()}


def order_of_step():
    """The operations of one step, a list of names, in the order in which a warpgroup does them.

    A step computes S of block j and adds P V of block j - 1, whose P the step before has packed. Each of the names is
    in the list once: "start S" and "start O" start a product, which is a group of its own; "wait for S" waits until at
    most one group is under way, "wait for all" until none is; "release K" and "release V" give the stage to the
    producer, which fills it again at once; "softmax" makes P of S in S's registers; "pack P" packs it into the
    registers that "start O" reads; "rescale O" multiplies O with alpha. The softmax has to run while the product for O
    is under way. K may be given back later than it could be: the result is right, and the producer waits longer.
    """
    before = ["start S", "start O", "wait for S", "release K", "softmax"]
    return [*before, "wait for all", "release V", "pack P", "rescale O"]


def run(q, k, v, factors, copies, wgmma, answer=order_of_step):
    """What the kernel makes of the order, and three properties of the order that no result shows.

    {"out": the result, "refused": the lines of hopper.cu that misuse a register, "overlap": whether the softmax runs
    under the product for O, "operand": whether P stays as it is until that product has read it, "started": see
    `_started`}.
    """
    order = answer()
    _check_names(order)
    out = torch.full((64, 64), torch.nan)
    maps = [emulator.tensor_map(*plan.view_and_box(x[None, None], 64)) for x in (k, v)]
    numbers = torch.tensor([OPERATIONS.index(name) for name in order], dtype=torch.int32)
    report = emulate(
        "step", q, *maps, numbers, factors, out, len(k) // 64, len(order),
        block=256, stuck=True, copies=copies, wgmma=wgmma,
    )  # fmt: skip
    _last[:] = order, report
    lines = [int(n) for n in re.findall(r"hopper\.cu:(\d+)", report)][:2]
    refused = torch.tensor([*lines, 0, 0][:2])
    overlap, operand = (torch.tensor([float(holds(order))]) for holds in (_overlaps, _operand_kept))
    return {"out": out, "refused": refused, "overlap": overlap, "operand": operand, "started": _started(order)}


_last = []  # the order that was run last, and what the emulation reported


def _check_names(order):
    """Raises TypeError or ValueError if the order is no list that has each of the operations once."""
    if not isinstance(order, tuple | list):
        raise TypeError(f"order_of_step has to return a list of names; got {order!r:.60}")
    if unknown := [name for name in order if name not in OPERATIONS]:
        raise ValueError(f"there is no operation {unknown[0]!r}; there are {', '.join(OPERATIONS)}")
    missing = [repr(name) for name in OPERATIONS if name not in order]
    double = [repr(name) for name in OPERATIONS if list(order).count(name) > 1]
    wrong = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"more than once: {', '.join(double)}"] * bool(double)
    if wrong:
        raise ValueError(f"each operation has to be in the list once; {'; '.join(wrong)}")


def _overlaps(order):
    """Whether the softmax stands between the start of O's product and the wait for it."""
    return order.index("start O") < order.index("softmax") < order.index("wait for all")


def _operand_kept(order):
    """Whether P is not packed between the start of O's product and the wait for it.

    wgmma reads P from registers while it is under way. The emulation does not watch the registers that a wgmma reads.
    """
    return not order.index("start O") < order.index("pack P") < order.index("wait for all")


def _started(order):
    """[whether S is started before O and both before the wait for S, whether O is started before S], as numbers.

    The wait for S leaves the group under way that was started last. Both wrong orders give the same result.
    """
    S, O, wait = (order.index(name) for name in ("start S", "start O", "wait for S"))
    return torch.tensor([float(S < O < wait), float(O < S)])


NEEDS_THE_END = {"softmax": "S", "release K": "S", "release V": "O", "rescale O": "O", "pack P": "O"}


def _too_early(order):
    """A line about the first operation that needs the end of a product which may not have ended, if there is one."""
    under_way, started = [], []
    for n, name in enumerate(order, 1):
        if name.startswith("start"):
            under_way.append(name[-1])
            started.append(name[-1])
        if name.startswith("wait"):
            del under_way[: -1 if name == "wait for S" else None]
        product = NEEDS_THE_END.get(name)
        if product in under_way or product and product not in started:
            found = f"{' and '.join(under_way)} may be under way" if product in started else "it is not yet started"
            return [f'operation {n}, "{name}", needs the end of the product for {product}, but {found}']
    return []


def _given_back_early(order):
    """Whether K or V is given to the producer before its product has surely ended."""
    place = {name: n for n, name in enumerate(order)}
    ends = {}
    for product, other in (("start S", "start O"), ("start O", "start S")):
        started_first = place[product] < place[other] < place["wait for S"]  # then that wait leaves only the other one
        waits = [place["wait for all"], *[place["wait for S"]] * started_first]
        ends[product] = min((n for n in waits if n > place[product]), default=len(order))
    return place["release K"] < ends["start S"] or place["release V"] < ends["start O"]


def expected(q, k, v, factors):
    out = specification(q, k, v, factors)["out"]
    right = {"refused": (torch.tensor([0, 0]), 0), "overlap": (torch.tensor([1.0]), 0)}
    right["operand"] = torch.tensor([1.0]), 0
    right["started"] = torch.tensor([1.0, 0.0]), 0
    return {"out": (out, 0.02 * out.abs().max().item()), **right}


def _case(says, copies, wgmma):
    def inputs():
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(n, 64, generator=generator).bfloat16() for n in (64, 320, 320))
        factors = torch.tensor([1.0, 0.5, 0.75, 1.25, 0.5, 2.0])
        return dict(q=q / 8, k=k, v=v, factors=factors)

    return Case(says, inputs, dict(copies=copies, wgmma=wgmma))


CASES = [
    _case("copies and products are done as late as they may", "late", "late"),
    _case("copies come at once, products as late as they may", "eager", "late"),
    _case("copies come as late as they may, products at once", "late", "eager"),
]


def explain(got, want, **_):
    """Which operation comes too early, what the emulation reports or why out is another one, what no result shows."""
    order, report = _last
    lines = _too_early(order)
    if report:
        lines.append(f"the emulation reports: {report.splitlines()[0].split(': ', 1)[-1]}")
    elif not (got["out"] - want["out"][0]).abs().max() <= want["out"][1]:
        why = "no tile was overwritten, but O or P is changed in the wrong place"
        if _given_back_early(order):
            why = "a tile was overwritten while a product still read it"
        lines.append(f"out is another one in this schedule: {why}")
    if order.index("wait for S") < order.index("start S"):
        lines.append("S is started after the wait for S")
    elif not got["started"][0]:
        lines.append("the wait for S leaves one group under way, the one that was started last: here that is S itself")
    if order.index("pack P") < order.index("softmax"):
        lines.append("P is packed before the softmax has made it")
    if order.index("rescale O") < order.index("start O"):
        lines.append("O is rescaled before P V of the block before is added to it")
    if not got["overlap"]:
        lines.append("the softmax does not run while the product for O is under way")
    if not got["operand"]:
        lines.append("P is packed into registers that the product for O still reads")
    return lines


RIGHT = ("start S", "start O", "wait for S", "release K", "softmax", "wait for all", "release V", "pack P", "rescale O")


def _moved(name, before):
    """The right order, but with `name` in front of `before`."""
    rest = [x for x in RIGHT if x != name]
    rest.insert(rest.index(before), name)
    return rest


MISTAKES = {
    "k_released_early": (
        "K is given back before S has been waited for, and the producer overwrites it",
        lambda: _moved("release K", "wait for S")),
    "v_released_early": (
        "V is given back before the product for O has ended, and the producer overwrites it",
        lambda: _moved("release V", "wait for all")),
    "softmax_early": (
        "the softmax reads S before it has been waited for",
        lambda: _moved("softmax", "wait for S")),
    "rescaled_early": (
        "O is rescaled while its product is under way",
        lambda: _moved("rescale O", "wait for all")),
    "packed_early": (
        "P is packed while the product for O still reads it",
        lambda: _moved("pack P", "wait for all")),
    "o_first": (
        "O is started before S, so that the wait for all but one group waits for O, and S is used too early",
        lambda: ["start O", "start S", *RIGHT[2:]]),
    "o_late": (
        "O is started after the wait for S, which leaves one group under way: S itself, so that S is used too early",
        lambda: ["start S", "wait for S", "start O", *RIGHT[3:]]),
    "no_overlap": (
        "all is waited for before the softmax, so that nothing runs under it",
        lambda: _moved("softmax", "release V")),
}  # fmt: skip
