"""What notebook 04x counts and draws: bytes of four strategies, timelines of the event model, a rank that fails."""

import textwrap

from steps.figures import ring_tables
from steps.figures.picture import picture
from steps.step04_ring import Layout, launch, simulate, strategies
from steps.step04_ring.simulate import Machine, Shape
from steps.step04_ring.strategies import account


def sent_and_held(N=4):
    """MB that a rank sends, and holds beyond its inputs, with Hk = 32 / Hk = 8; H = 32, D = 128, bfloat16."""
    lines = [f"{'MB, forward':15}" + "".join(f"{f'sent, {size}':>13}{'held':>13}" for size in ("8k", "32k"))]
    sizes = dict(B=1, H=32, D=128, e=2)
    for name in strategies.LESSONS:
        line = f"{name:15}"
        for layout in (Layout("zigzag", S, N, causal=True) for S in (2**13, 2**15)):
            for formula in (lambda *at, **how: account.sent_bytes(*at, **how)[0], account.memory_bytes):
                both = [max(formula(name, layout, rank, Hk=Hk, **sizes) for rank in range(N)) / 1e6 for Hk in (32, 8)]
                line += f"{f'{both[0]:.0f} / {both[1]:.0f}':>13}"
        lines.append(line)
    return "\n".join(lines)


def machine(transport, **more):
    """An H200 and its link as the rows have them, for the event model."""
    recorded = ring_tables.recorded()
    return Machine(simulate.read_flops(recorded), *simulate.read_link(recorded, transport), **more)


def timeline(kind, transport="relay", S=2**15, pass_="fwd"):
    """What four ranks do, as the event model has it."""
    plan = simulate.schedule(Layout(kind, S, 4, causal=True), Shape(), machine(transport), transport, pass_)
    shares = [f"{share:.0%}" for share in (plan.blocks[1] - plan.blocks[0]).sum(0) / plan.seconds]
    shares = ", ".join(dict.fromkeys(shares))  # one, if they are equal
    title = f"model: {kind}, {transport}, {S // 1024}k, {pass_}; ranks compute {shares} of the time"
    return picture(simulate.gantt(plan, title), f"Timeline of four ranks, {title}. Messages stand below the blocks.")


def what_ranks_say(run):
    """What each rank says of a call that fails, and of whom it was the fault; without the advice."""
    try:
        run()
    except launch.RankError as problem:
        for line in str(problem).partition("\nrank ")[0].splitlines():
            line = line.replace("steps.step04_ring.comm.", "").split(". Rank ")[0].split(". Cut ")[0]
            print(textwrap.fill(line, 87, subsequent_indent="    "))
