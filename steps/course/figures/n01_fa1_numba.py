"""What notebook 01 draws, counts and breaks: memories, the order of the visits, measured speeds."""

from unittest.mock import patch

import torch

from reference import cases, error
from steps import step01_fa1_numba as stage
from steps.course.bench import rows
from steps.course.figures.measured import H200 as GPU
from steps.course.figures.n00_naive import outcome, symptom  # noqa: F401  The notebook's hunts begin with symptom.
from steps.course.figures.picture import pictured
from steps.course.figures.plots import COLOURS, FAINT, INK, OPERAND, PALE, boxes, cells, subplots, table
from steps.step00_naive import io_count

MULTIPLY_ADDS = GPU.fp32_tflops / 2  # in 10^12 a second, all SMs together: 128 an SM and cycle
# Numbers of float32 in 10^12 a second. Shared memory delivers 32 an SM and cycle.
DELIVERS = {"shared memory": MULTIPLY_ADDS * 32 / 128, "device memory": GPU.bandwidth / 4}
TILES = {"published": (16, 16), "loops_swapped": (16, 32), "registers": (128, 64)}  # on a GPU, at d = 64


def memories(N, d):
    """Sizes and speeds of an H200's memories, and how long standard attention's traffic would take there."""
    sm, speed = GPU.multiprocessor, {name: (f"{4 * x:.1f}", f"{MULTIPLY_ADDS / x:.0f}") for name, x in DELIVERS.items()}
    lines = [(f"{GPU.name}, {GPU.sms} SMs", "KiB an SM", "TB/s in all", "multiply-adds in the time of a number")]
    lines += [("registers", 4 * sm.registers // 2**10, "", "")]
    lines += [("shared memory", sm.shared // 2**10, *speed["shared memory"])]
    lines += [("device memory", "", *speed["device memory"])]
    moved, kept = sum(io_count.standard_count(N, d)), 4 * N * d + N
    in_float32 = moved / DELIVERS["device memory"] / (2 * N * N * d / MULTIPLY_ADDS)
    in_fp16 = in_float32 / 2 * GPU.half_tflops / GPU.fp32_tflops
    told = f"Standard attention, N = {N}, d = {d}, moves {moved / kept:.0f} times the size of q, k, v, out and lse."
    told += f"\nThis takes {in_float32:.1f} times as long as the arithmetic in float32, {in_fp16:.1f} times in fp16."
    return f"{table(*lines)}\n{told}"


@pictured
def visits_of_O(V, trace):
    """The six values at each of three visits. The new O divides the way from the old O to what the tile alone gives: at
    visit 2 their weights are 0.23 and 0.77, at visit 3 0.39 and 0.61.
    """
    fig, axes = subplots(1, 3, figsize=(8.4, 3.4), sharey=True)
    for n, (ax, (alone, O, weight), (_, old, _)) in enumerate(zip(axes, trace, trace[:1] + trace[:2], strict=True)):
        for seen, colour in ((True, INK), (False, FAINT)):
            which = [j for j in range(6) if (j < 2 * n + 2) == seen]
            ax.plot(*V[which].T, "o", color=colour, ms=4, label="value of a key seen so far" if seen else None)
        for j, (x, y) in enumerate(V.tolist()):
            ax.text(x, y + 0.45, f"v{j}", ha="center", fontsize=9)
        ax.plot(*torch.stack([old, alone]).T, color=FAINT, lw=1.5, zorder=0)
        ax.plot(*old, "s", color=INK, ms=7, label="old O")
        ax.plot(*alone, "D", color=OPERAND["V"], ms=8, label="the tile alone")
        ax.plot(*O, "X", color=OPERAND["O"], ms=10, label="new O")
        for point, share in ((old, 1 - weight), (alone, weight)) if n else ():
            ax.text(point[0] + 0.5, point[1] - 0.15, f"{share:.2f}", va="center", fontsize=9)
        ax.set(title=f"visit {n + 1}: keys {2 * n}, {2 * n + 1}", xlim=(-1, 11), ylim=(-1, 7.6))
    fig.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return fig


# ---- four puzzles of one line ----------------------------------------------------------------------------------------


def verdict(answer, cases, right):
    """What an answer is worth: the first of the cases, {what it is asked: what is expected}, that it gets wrong."""
    for asked, want in cases.items():
        try:
            got = answer(*asked)
        except Exception as problem:  # whatever the reader's line raises
            got = f"{type(problem).__name__}: {problem}"
        if got is ...:
            return "still to be written"
        if (list(got) if isinstance(got, range) else got) != want:
            return f"{asked} gives {got!r}, and should give {want!r}"
    return f"right. {right}"


def verdict_on_barrier(after):
    wrong = {
        1: "not after line 1: there no thread has stored anything that another one needs",
        3: "not after line 3: there each thread has read already, and its neighbour may not have stored yet",
    }
    found = wrong.get(after) if isinstance(after, int) else None
    return found or verdict(lambda: after, {(): 2}, "All threads have stored before one reads.")


@pictured
def puzzles(index, guard, barrier, rows):
    """Left, a block of 4 x 2 threads: x runs from 0 to 3, y from 0 to 1, and thread (x, y) has the number 4 y + x.
    Right, 12 rows of a tile, of which threads 0 to 7 take rows 0 to 7, and threads 0 to 3 rows 8 to 11.
    """
    places = {(block, 3, thread): 3 * block + thread for block in range(2) for thread in range(3)} | {(5, 128, 7): 647}
    lengths = {(0, 4, 6): [0, 4], (1, 4, 6): [1, 5], (3, 4, 6): [3], (5, 8, 4): [], (2, 3, 9): [2, 5, 8]}
    print("1:", verdict(index, places, "This is cuda.grid(1)."))
    print("2:", verdict(guard, {(n, 6): n < 6 for n in range(8)}, "Of two blocks of 4 threads two have no number."))
    print("3:", verdict_on_barrier(barrier))
    print("4:", verdict(rows, lengths, "Every row has one thread, also where Br is no multiple of T."))
    fig, (block, tile) = subplots(1, 2, figsize=(8.2, 3.0), width_ratios=(1.2, 1))
    colours = [(*COLOURS, *PALE)[t] for t in range(8)]
    words = [[f"({x}, {y})\nt = {4 * y + x}" for x in range(4)] for y in range(2)]
    names = dict(xlabel="threadIdx.x", ylabel="threadIdx.y", xticks=range(4), yticks=range(2))
    cells(block, [colours[:4], colours[4:]], words, title="a block of 4 x 2 threads", **names)
    boxes(tile, [(0, r - 0.5, 1, 1, colours[r % 8], f"thread {r % 8}") for r in range(12)])
    tile.set(title="the rows of a tile", ylabel="row", xlim=(0, 1), ylim=(11.5, -0.5), xticks=[], yticks=range(12))
    tile.tick_params(length=0)
    tile.spines[:].set_visible(False)
    return fig


@pictured
def order_of_visits():
    """S as 3 by 4 tiles with the number of the visit, and what it loads and stores. FA1 goes down the columns: it loads
    K and V at 4 of its 12 visits, and loads and stores O at each. FA2 goes along the rows: it loads K and V at each of
    the 12 visits, Q at 3, and stores O at the end of a row, at visits 4, 8 and 12.
    """
    fig, axes = subplots(1, 2, figsize=(8.4, 3.4))
    visits = torch.arange(1, 13)
    orders = {"FA1: keys outside": visits.reshape(4, 3).T, "FA2: queries outside": visits.reshape(3, 4)}
    for ax, (title, order) in zip(axes, orders.items(), strict=True):
        words = [[moved(title[:3], i, j, order[i, j]) for j in range(4)] for i in range(3)]
        colours = [[PALE[i]] * 4 for i in range(3)]
        cells(ax, colours, words, title=title, xlabel="tile of keys", xticks=range(4), yticks=range(3))
    axes[0].set_ylabel("tile of queries")
    return fig


def moved(paper, i, j, visit):
    """What passes at a visit of tile i, j, in words: loads, and the store of O."""
    loads = ("K V " * (i == 0) + "Q O") if paper == "FA1" else ("Q " * (j == 0) + "K V")
    stores = "\nstore O" if paper == "FA1" or j == 3 else ""
    return f"{visit}\nload {loads}{stores}"


def traffic(N, d):
    """Numbers that pass between device memory and the chip, in units of N^2, by the formulas of io_count.py."""
    lines = [("tile", "standard", "fa1", "fa2", "on a GPU")]
    rung_of = {tile: f"rung {n}, {'fa2' if n else 'fa1'}" for n, tile in enumerate(TILES.values())}
    for Br, Bc in TILES.values():
        counts = io_count.standard_count(N, d), io_count.fa1_count(N, d, Br, Bc), io_count.fa2_count(N, d, Br, Bc)
        moves = (f"{sum(both) / N**2:.2f} N^2" for both in counts)
        lines.append((f"{Br} x {Bc}", *moves, rung_of[Br, Bc]))
    return table(*lines)


def cases_of_the_contract(*names, **replaced):
    """Whether each rung passes these cases; or rung published with functions of its file replaced."""
    kernels, lines = stage.fwd_0_published, []
    with patch.dict(vars(kernels), replaced):
        kernels.forward_kernel.cache_clear()  # Kernels that were compiled before still call the old functions.
        for case in (case for name in names for case in cases.CASES if case.name == name):
            told = []
            for rung in ("published",) if replaced else TILES:
                got, want = outcome(stage, case, lambda x, r=rung: stage.forward(x.q, x.k, x.v, **x.options, rung=r))
                failed = error.failures({"out": got[0], "lse": got[1]}, want)
                told.append(f"{rung} {'FAILS' if failed else 'passes'}")
            lines += [case.says, f"    {', '.join(told)}"]
    kernels.forward_kernel.cache_clear()
    return "\n".join(lines)


def recorded():
    """{(pass, kernel or peer, d): row} on an H200 in float32, at N = 4096, not causal."""
    at = {"gpu": GPU.name, "dtype": "fp32", "N": 4096, "causal": False, "options": {}, "timing": "interleaved"}
    found = [row for row in rows.latest(rows.fresh(rows.read())) if at.items() <= row.items()]
    found = [row for row in found if row["stage"] in ("01_fa1_numba", None)]
    return {(row["pass"], row["kernel"] or row["peer"], row["D"]): row for row in found}


def speeds():
    """Recorded TFLOP/s, shares of sdpa-efficient's speed, and the largest error."""
    found, lines = recorded(), [("TFLOP/s", "d = 64", "share", "error", "d = 128", "share", "error")]
    for pass_, name in sorted({(pass_, name) for pass_, name, _ in found}, key=lambda one: (one[0] != "fwd", one[1])):
        lines.append([name if name.startswith(pass_) else f"{pass_} {name}"])
        for d in (64, 128):
            row, best = found[pass_, name, d], found[pass_, "sdpa-efficient", d]
            lines[-1] += [f"{row['tflops']:.1f}", f"{row['tflops'] / best['tflops']:.2f}", f"{row['error']:.0e}"]
    return table(*lines)
