"""Pictures and experiments of notebook 02d: who waits for whom on Hopper."""

import itertools
import re

import matplotlib.pyplot as plt
import torch

from reference import error
from steps.course.bench import rows
from steps.course.figures import measured, planted
from steps.course.figures.picture import pictured
from steps.course.figures.plots import COLOURS, FAINT, GREYS, boxes, subplots, table
from steps.course.workbook import edited
from steps.step02_fa2_cuda import calls, emulator, ladder, plan

UNITS = {"products": COLOURS[0], "exp": COLOURS[1], "float32": COLOURS[2]}
SCHEDULES = {
    "copies late": {},  # the emulation's default: finds waits that are missing
    "products late": {"copies": "eager", "wgmma": "late"},  # finds stages that are filled again too early
    "random": {"threads": "random", "copies": "random", "wgmma": "random", "seed": 1},
}
WAIT_EMPTY, WAIT_FULL = (f"barrier_wait({name} + stage(), parity()" for name in ("empty", "full"))
WAIT_S, RELEASE = "      wgmma_wait<0>();\n", "      K.release();\n"
STUCK = {"the producer waits for the other parity": (f"{WAIT_EMPTY} ^ 1);", f"{WAIT_EMPTY});")}  # of fwd_7_roles, too
MISTAKES = {  # of fwd_7_roles
    "the consumer begins with parity 1": (WAIT_FULL, f"{WAIT_FULL} ^ 1"),
    "the parity never flips": ("return n / DEPTH % 2;", "return 0;"),
    "every lane releases a stage": ("if (threadIdx.x % 32 == 0) barrier_a", "barrier_a"),
    "no wait for S": (WAIT_S + RELEASE, RELEASE),
    "K released before its products end": (WAIT_S + RELEASE, RELEASE + WAIT_S),
}


def legend(fig, colours, where="outside upper center"):
    """A legend of {name: colour}, a box for each."""
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    fig.legend(patches, colours, ncols=len(colours), loc=where)


def beside(other, *kernels, **which):
    """A table of the kernels' shares of another one's speed on an H200, each of one run. which: see `rows.read`."""
    at = {"gpu": measured.H200.name, "dtype": "bf16", "options": {}}
    found = [row for row in rows.fresh(rows.read(**which)) if at.items() <= row.items() and row["D"] in (64, 128)]
    return measured.shares(found, kernels, other)


def lockstep(work, steps):
    """[(unit, warpgroup, start, end)]: both do the same at the same time, each with half of the unit."""
    now, spans = 0, []
    for unit, clocks in steps * [*work.items()]:
        spans += [(unit, group, now, now + 2 * clocks) for group in (0, 1)]
        now += 2 * clocks
    return spans


def ping_pong(work, steps, groups=2):
    """The same with turns: each unit serves one warpgroup at a time, and they alternate."""
    free, ready, spans = dict.fromkeys(work, 0), [0] * groups, []
    for group, (unit, clocks) in itertools.product(steps * tuple(range(groups)), work.items()):
        start = max(free[unit], ready[group])
        free[unit] = ready[group] = start + clocks
        spans.append((unit, group, start, start + clocks))
    return spans


@pictured
def lockstep_and_ping_pong(tile_clocks):
    """A model's timelines of two warpgroups over three steps, in lockstep and in ping-pong. In lockstep the
    tensor cores work 39 % of the time at D = 64 and 55 % at D = 128; in ping-pong, where one's softmax lies under
    the other's products, 78 % and 100 %."""
    fig, grid = subplots(2, 2, figsize=(8.5, 4), sharex=True)
    for column, D in zip(grid.T, (64, 128), strict=True):
        work = dict(zip(("products", "exp", "float32"), tile_clocks(D, Br=64), strict=True))
        for ax, turns in zip(column, (lockstep, ping_pong), strict=True):
            for unit, group, start, end in turns(work, 3):
                ax.barh(group, end - start, left=start, height=0.7, color=UNITS[unit], edgecolor="white")
            busy = 2 * work["products"] * 100 / max(end for *_, end in turns(work, 100))
            ax.set_title(f"D = {D}, {turns.__name__.replace('_', '-')}: products {busy:.0%} of the time", fontsize=10)
            ax.set(ylim=(1.6, -0.6), xlim=(0, 11500))
            ax.set_yticks((0, 1), ("group 0", "group 1"))
            ax.grid(axis="y", visible=False)
    fig.supxlabel("clocks, three steps of each warpgroup, which has 64 of the 128 rows", fontsize=10)
    legend(fig, UNITS)
    return fig


def emulate(text, kernel, *arguments):
    """Runs a kernel of this text in the emulation of a GPU, with one block of one warp."""
    planted.emulated(text, kernel, arguments, grid=1, block=32, shared_bytes=8192, T="bf16")


def tensor_map(x, rows):
    """The tensor map of a matrix: where it lies, its strides, and a box of so many rows and all columns."""
    return emulator.tensor_map(*plan.view_and_box(x[None, None], rows))


def phases(text):
    """A table of what the wait of a kernel `passes` does, by the phases that ended and the parity that it asks for."""
    how, lines = dict(grid=1, block=1, shared_bytes=64, T="bf16"), [("phases ended", "wait for 0", "wait for 1")]
    for ended in range(4):
        reports = [planted.report(text, "passes", (ended, parity), **how) for parity in (0, 1)]
        lines.append((ended, *("waits" if "is stuck" in report else "goes on" for report in reports)))
    return table(*lines)


@pictured
def ring_of_stages(copies, uses):
    """A ring of two stages. The producer copies tiles 0 to 5 back to back into stages 0, 1, 0, 1 ...; the
    consumer waits for each and then uses it. The parity of full flips when a copy ends, that
    of empty when a use ends."""
    fig, ax = subplots(figsize=(8.4, 3))
    last, found = uses[-1][1] + 1, []
    for y, spans in ((0, copies), (3, uses)):
        found += [(start, y, end - start, 0.7, COLOURS[n % 2], n) for n, (start, end) in enumerate(spans)]
        for stage in (0, 1):
            ends = [0, *(end for _, end in spans[stage::2]), last]  # a phase of full ends with a copy
            for n, (start, end) in enumerate(itertools.pairwise(ends)):
                found.append((start, y + 1 + stage, end - start, 0.7, (FAINT, GREYS[1])[n % 2], n % 2))
    free = [0, *(end for _, end in uses)]
    waits = [(end, start - end) for end, (start, _) in zip(free, uses, strict=False) if start > end]
    found += [(start, 3, clocks, 0.7, "white", "wait") for start, clocks in waits]
    boxes(ax, found)
    ax.set(xlabel="clock", xlim=(0, last), ylim=(5.9, -0.2), xticks=range(0, last, 2))
    ax.set_yticks([y + 0.35 for y in range(6)], ("producer", "full[0]", "full[1]", "consumer", "empty[0]", "empty[1]"))
    ax.set_title("blue: stage 0, orange: stage 1, with the number of the tile; grey: the parity of a barrier's phase")
    return fig


def outcomes(*rungs, mistakes=(), backward=False):
    """A table: what becomes of rungs as they are, and of the last with each of {name: (old text, new text)}."""
    sizes, kernels = ((400, 64), ladder.BACKWARD) if backward else ((300, 32), ladder.FORWARD)
    q, k, v, dout = torch.randn(4, 1, 1, *sizes, generator=torch.Generator().manual_seed(0)).bfloat16()
    want, lines = error.expected(q, k, v, dout), [("", *SCHEDULES)]

    def outcome(rung, how):
        try:
            with emulator.schedule(**how):
                found = out, lse = calls.forward(q, k, v, rung=rung, tile=(64, 64))
                found = calls.backward(dout, q, k, v, out, lse, rung=rung) if backward else found
        except RuntimeError as report:
            return "stuck" if "stuck" in str(report) else "refused"
        names = ("dq", "dk", "dv") if backward else ("out", "lse")
        spoilt = error.failures(dict(zip(names, found, strict=True)), want)
        return f"spoils {', '.join(spoilt)}" if spoilt else "lives"

    tried = [(rung, f"{rung} as it is", ()) for rung in rungs]
    tried += [(rungs[-1], name, (change,)) for name, change in dict(mistakes).items()]
    for rung, name, change in tried:
        with edited(kernels[rung].file, *change):
            lines.append((name, *(outcome(rung, how) for how in SCHEDULES.values())))
    return table(*lines)


def report_of(mistakes):
    """What the emulation says of rung roles with {name: mistake}, shortened, and the lines that it names."""
    (mistake,) = mistakes.values()
    q, k, v = torch.randn(3, 1, 1, 300, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    try:
        with edited("fwd_7_roles.cu", mistake) as lines:
            calls.forward(q, k, v, rung="roles", tile=(64, 64))
    except RuntimeError as stuck:
        told = re.sub(r"; threads 1-31 returned.*|, and count as missing| \(\d+ of \d+ arrivals.*?\)", "", str(stuck))
        named = sorted({int(n) for n in re.findall(r"\.cu:(\d+)", told)})
        return "\n".join([told, *(f"line {n}: {lines[n - 1].strip()}" for n in named)])


def rungs_on_hopper():
    """TFLOP/s of rungs 5 to 8 and of the peers on an H200 as bars, of one run, without and with a causal mask."""
    names = "fwd_5_fa2", "fwd_6_wgmma", "fwd_7_roles", "fwd_8_hopper", "sdpa-cudnn", "fa3"
    panels = {word: measured.of_one_run(*names, causal=word == "causal") for word in ("full", "causal")}
    panels = {word: {name: found[name] for name in names if found} for word, found in panels.items()}
    told = "; ".join(f"{word}: {', '.join(f'{name} {x:.0f}' for name, x in found.items())}"
                     for word, found in panels.items())  # fmt: skip
    alt = f"Bars of TFLOP/s at D = 128, N = 4096, bf16, below the datasheet's peak of 989. {told}."
    return measured.speeds(panels, measured.H200, alt, peak=measured.H200.half_tflops)
