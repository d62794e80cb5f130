"""Recorded speeds as pictures and words: bars of kernels and peers, shares of a peer's speed, a rung's result."""

import functools

from steps.course.bench import cost, report
from steps.course.bench import rows as results
from steps.course.bench.rows import label, setting
from steps.course.figures.picture import picture
from steps.course.figures.plots import GREYS, INK, PEERS, colour_of, differing, ladder_rows, subplots, table

H200, H100 = cost.GPUS["NVIDIA H200"], cost.GPUS["NVIDIA H100 80GB HBM3"]


def speed_bars(found, grey=()):
    """TFLOP/s as bars with their values, fastest on top. One row for each kernel and peer, at one size.

    A kernel has the colour of its rung, unless it is one of `grey`.
    """
    fig, ax = subplots()
    ordered = sorted(found, key=lambda row: row["tflops"])
    others = [row["kernel"] in grey or row["peer"] is not None and row["peer"] not in PEERS for row in ordered]
    colours = [GREYS[1] if other else colour_of(row["peer"] or row["kernel"])
               for row, other in zip(ordered, others, strict=True)]  # fmt: skip
    bars = ax.barh([label(row) for row in ordered], [row["tflops"] for row in ordered], height=0.7, color=colours)
    ax.bar_label(bars, fmt="%.3g", padding=4, color=INK)
    ax.margins(x=0.1)  # room for the values
    ax.grid(axis="y", visible=False)
    size = "{gpu}, {pass}, {dtype}, D={D}, {mask}, N={N}"
    mask = "causal" if found[0]["causal"] else "not causal"
    ax.set(xlabel="TFLOP/s", title=size.format(**found[0], mask=mask))
    return fig


def beside(found, kernels, other):
    """[(row, share)]: the kernels' rows, and their TFLOP/s in those of another kernel or a peer in the same run.

    Of several runs that measured both at one size the last one counts.
    """
    theirs = {(row["run"], setting(row)): row["tflops"] for row in found if other in (row["peer"], row["kernel"])}
    both = [row for row in found if row["kernel"] in kernels and (row["run"], setting(row)) in theirs]
    last = {(row["kernel"], setting(row)): row for row in sorted(both, key=lambda row: row["run"])}.values()
    last = sorted(last, key=lambda row: (kernels.index(row["kernel"]), row["D"], row["causal"], row["N"]))
    return [(row, row["tflops"] / theirs[row["run"], setting(row)]) for row in last]


def shares(found, kernels, other):
    """What `beside` gives as a table in words: a line for each kernel, head_dim and mask, a column for each N."""
    ordered = [row | {"share": f"{share:.2f}"} for row, share in beside(found, kernels, other)]
    columns = report.by_length(ordered, lambda row: row["share"])

    def words(row):
        return row["kernel"], f"D = {row['D']}", "causal" if row["causal"] else "full"

    lines = report.table(ordered, [f"of {other}", "", "N ="], words, columns)
    return "\n".join(report.in_text(lines)) if lines else f"no rows of {', '.join(kernels)} beside {other}"


def ideas(kernel, *switches):
    """Prints by how many percent a kernel is slower (+) with one of its ideas switched off, in one run on an H200.

    A line for each switch, and for each head_dim and mask the numbers at N = 512, 4096 and 16384.
    """
    found = [row for row in results.fresh(results.read(switched=True)) if row["gpu"] == H200.name]
    sizes = [(D, causal) for D in (64, 128) for causal in (False, True)]
    lines = [["without", *(f"D = {D}, {'causal' if causal else 'full'}" for D, causal in sizes)]]
    for switch in switches:
        slower = {size: [] for size in sizes}
        for row, share in beside(found, (f"{kernel}:{switch}=0",), kernel):
            slower[row["D"], row["causal"]].append(f"{round(100 / share - 100):+3}")
        lines.append([switch, *(" ".join(numbers) or "not measured" for numbers in slower.values())])
    print(f"{kernel} on an H200: % slower without an idea, at N = 512, 4096 and 16384")
    print(table(*lines))


# What each rung of stage 02 adds to the one before it.
IDEAS = {
    "fwd_0_scalar": "a thread a query",
    "fwd_1_warp": "a warp shares 16 queries",
    "fwd_2_mma": "tensor cores",
    "fwd_3_ldmatrix": "no bank conflicts",
    "fwd_4_cp_async": "copies meanwhile",
    "fwd_5_fa2": "larger tiles, few masks",
    "fwd_6_wgmma": "Hopper's tensor cores, TMA",
    "fwd_7_roles": "one thread copies",
    "fwd_8_hopper": "exponentials under products",
    "bwd_0_scalar": "a thread a key",
    "bwd_1_fa2": "tensor cores, copies meanwhile",
    "bwd_2_wgmma": "Hopper's tensor cores, TMA",
    "bwd_3_hopper": "K in registers, dV early",
}


def share_of(peer, row, found):
    """A row's speed as a share of a peer's in the same run at the same setting, such as "54%", or a dash."""
    reached = {(one["peer"], one["run"], setting(one)): one["tflops"] for one in found}
    theirs = reached.get((peer, row["run"], setting(row)))
    return f"{row['tflops'] / theirs:.0%}" if theirs else "–"


def rungs(pass_, peer="sdpa-cudnn"):
    """Stage 02's rungs, forward ("fwd") or backward ("bwd"), as a table in words: TFLOP/s, and shares of a peer's."""
    gpu, ladder = ladder_rows(fresh())
    lines = [("rung", "adds to the one before", "TFLOP/s", f"of {PEERS[peer][0]}")]
    for kernel, row in ladder[pass_].items():
        idea = ", ".join([IDEAS[kernel], *differing(row)])
        lines.append((kernel, idea, f"{row['tflops']:.3g}", share_of(peer, row, fresh())))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = [f"{a:{widths[0]}}  {b:{widths[1]}}  {c:>{widths[2]}}  {d:>{widths[3]}}" for a, b, c, d in lines]
    return "\n".join([*shown, f"({gpu}, bf16, D = 128, N = 4096, full, unless a line says otherwise)"])


def rung(kernel, found=None, *, gpu=None, D=128, N=4096, dtype="bf16", peer=None):
    """A rung's result in a line, of one run: TFLOP/s, the factor to the rung before, the share of a peer's speed.

    found: rows, the fresh committed ones if None. Where there is no row at this size, the line says so. peer: the
    fastest one if None.
    """
    size = f"{dtype}, D = {D}, N = {N}, full"
    chosen = rung_row(kernel, found, gpu=gpu, D=D, N=N, dtype=dtype, peer=peer)
    if not chosen:
        return f"{kernel}: not measured as it is now, {size}"
    mine, before, other = chosen
    words = [f"{kernel}: {mine['tflops']:.3g} TFLOP/s"]
    words += [f"{mine['tflops'] / before['tflops']:.2f} x {before['kernel']}"] if before else []
    name = PEERS[peer][0] if peer in PEERS else other and other["peer"]
    words += [f"{mine['tflops'] / other['tflops']:.2f} of {name}"] if other else []
    return f"{', '.join(words)}\n  ({mine['gpu']}, {size})"


def rung_row(kernel, found=None, *, gpu=None, D=128, N=4096, dtype="bf16", peer=None):
    """(row, row of the next lower rung or None, row of a peer or None) of a rung in one run.

    peer: the fastest one if None. gpu: by default rows of an H200 count, and where there are none, those of an H100.
    Of several runs the last one counts in which a lower rung was measured, too.
    """
    found = fresh() if found is None else found
    at = {"D": D, "N": N, "causal": False, "dtype": dtype, "options": {}, "n_gpus": 1}
    found = [row for row in found if row["timing"] == "interleaved" and all(row[name] == at[name] for name in at)]
    rungs = [row for row in found if row["kernel"] == kernel]
    gpus = (H200, H100) if gpu is None else (gpu,)
    rungs = next(filter(None, ([row for row in rungs if row["gpu"] == gpu.name] for gpu in gpus)), [])
    candidates = [(row, *company(row, found, peer)) for row in rungs]
    return max(candidates, key=lambda one: (one[1] is not None, one[0]["run"]), default=None)


@functools.cache
def fresh():
    """The committed rows of the kernels as they are now."""
    return results.fresh(results.read())


def of_one_run(*names, found=None, gpu=H200, pass_="fwd", D=128, N=4096, causal=False):
    """{name: TFLOP/s} of kernels and peers on a GPU, in the last run in which all of them were measured; or {}."""
    at = {"gpu": gpu.name, "pass": pass_, "D": D, "N": N, "causal": causal, "dtype": "bf16", "options": {}}
    runs = {}
    for row in fresh() if found is None else found:
        if row["timing"] == "interleaved" and at.items() <= row.items():
            runs.setdefault(row["run"], {})[row["kernel"] or row["peer"]] = row["tflops"]
    complete = [runs[run] for run in sorted(runs) if set(names) <= runs[run].keys()]
    return {name: complete[-1][name] for name in names} if complete else {}


def speeds(panels, gpu, alt, peak=None):
    """Bars of {title: {kernel or peer: TFLOP/s}} on a GPU, a panel for each title; dashed: a peak, if there is one."""
    fig, grid = subplots(1, len(panels), figsize=(8.5, 3.6), sharey=True)
    for ax, (title, found) in zip(grid, panels.items(), strict=True):
        words = [PEERS[name][0] if name in PEERS else name.split("_", 2)[2] for name in found]
        bars = ax.bar(range(len(found)), found.values(), color=[colour_of(name) for name in found])
        ax.bar_label(bars, fmt="%.0f", fontsize=9)
        ax.set_xticks(range(len(found)), words, rotation=40, ha="right", fontsize=9)
        ax.set_title(title if found else f"{title}: not measured as it is now")
        ax.grid(axis="x", visible=False)
        if peak:
            ax.axhline(peak, color=INK, ls="--", lw=1)
    grid[0].set_ylabel(f"TFLOP/s, bf16, {gpu.name.split()[1]}")
    return picture(fig, alt)


def company(row, found, peer=None):
    """Of the run and size of a kernel's row: the row of the next lower rung, and of a peer (the fastest), or None."""
    pass_, number, _ = row["kernel"].split("_", 2)
    beside = [one for one in found if (one["run"], setting(one)) == (row["run"], setting(row))]
    kernels = {int(one["kernel"].split("_")[1]): one for one in beside if one["stage"] == row["stage"]}
    lower = [n for n in kernels if n < int(number) and kernels[n]["kernel"].startswith(pass_)]
    peers = [one for one in beside if one["peer"] and peer in (None, one["peer"])]
    return kernels[max(lower)] if lower else None, max(peers, key=lambda one: one["tflops"], default=None)
