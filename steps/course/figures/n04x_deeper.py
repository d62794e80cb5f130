"""What notebook 04x draws and tells: timelines of the event model, what ranks say of a rank that fails."""

import textwrap

import torch

from steps.course.figures.n04a_ring import computing, machine, ranks  # noqa: F401  `ranks` are the notebook's processes.
from steps.course.figures.picture import picture
from steps.step04_ring import Layout, launch, simulate
from steps.step04_ring.simulate import Shape

torch.set_num_threads(1)  # Small tensors are faster on one thread.


def timeline(kind, transport="relay", S=2**15, pass_="fwd"):
    """What four ranks do, as the event model has it."""
    plan = simulate.schedule(Layout(kind, S, 4, causal=True), Shape(), machine(transport), transport, pass_)
    title = f"model: {kind}, {transport}, {S // 1024}k, {pass_}; {computing(plan)}"
    return picture(simulate.gantt(plan, title), f"Timeline of four ranks, {title}. Messages stand below the blocks.")


def what_ranks_say(run):
    """What each rank says of a call that fails, and of whom it was the fault; without the advice."""
    try:
        run()
    except launch.RankError as problem:
        for line in str(problem).partition("\nrank ")[0].splitlines():
            line = line.replace("steps.step04_ring.ranks.comm.", "").split(". Rank ")[0].split(". Cut ")[0]
            print(textwrap.fill(line, 87, subsequent_indent="    "))
