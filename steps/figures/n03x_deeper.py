"""What notebook 03x compiles and reads from recorded rows."""

import re
from collections import Counter
from pathlib import Path

from steps.bench import rows
from steps.figures import measured
from steps.figures.triton_compiler import compiled
from steps.step03_triton import fwd_2_roles

FRESH = rows.fresh(rows.read())  # what was measured of the kernels as they are


def shares(kernel, other):
    """A kernel's speed in another's, or in a peer's, in one run, from N = 1024 on."""
    return measured.shares([row for row in FRESH if row["N"] > 512], [kernel], other)


def descriptors():
    """Counts registers a thread and machine instructions of rungs fused and tma, with the same tile at D = 128."""
    script = "from steps.step03_triton import fwd_0_fused, fwd_1_tma\nx = torch.zeros(1, 1, 128, 128).bfloat16()\n"
    script += "fwd_0_fused.TILES['16 bits, Hopper'][128] = fwd_1_tma.TILES[128]\n"
    script += "fwd_0_fused.forward(x, x, x)\nfwd_1_tma.forward(x, x, x)"
    groups = {"products": "HGMMA", "copies": "LDGSTS|UTMALDG", "exp2": "MUFU"}
    groups["addresses, comparisons"] = "IMAD|IADD|LEA|ISETP|LOP3|SHF|PRMT|UIADD|ULEA"
    for name, made in zip(("pointers", "descriptors"), compiled(script), strict=True):
        counts = {group: sum(bool(re.match(p, x)) for x in made["machine"]) for group, p in groups.items()}
        print(f"{name:11} {made['registers']} registers, {len(made['machine'])} instructions;")
        print("    among them", ", ".join(f"{group} {n}" for group, n in counts.items()))


ONCE = "lse + (bh.to(tl.int64) * Nq + i) + row", "row = tl.arange(0, Br)\n    l =", "mask=row < Nq - i"
TWICE = "lse + bh.to(tl.int64) * Nq + row", "row = i + tl.arange(0, Br)\n    l =", "mask=row < Nq"


def roles():
    """Compiles rung roles as it is and with i as a part of row, and prints where its second group adds 64 to rows."""
    text = Path(fwd_2_roles.__file__).read_text().replace("from .replay", "from steps.step03_triton.replay")
    twice = text
    for before, after in zip(ONCE, TWICE, strict=True):
        if before not in twice:
            raise ValueError(f"fwd_2_roles has no {before!r}.")
        twice = twice.replace(before, after)
    script = "import once, twice\nx = torch.zeros(1, 1, 128, 128).bfloat16()\n"
    script += "once.forward(x, x, x)\ntwice.forward(x, x, x)"
    for says, made in zip((ONCE[0], TWICE[0]), compiled(script, {"once": text, "twice": twice}), strict=True):
        found = adds_64(made["ttgir"])
        print(f"lse at {says}", *(f"\n    {name} = {line}" for name, line in found.items()))
        first = {row for i in (0, 128) for row in range(i, i + 64)}
        second = {row + 64 * len(found) for row in first if row + 64 * len(found) < 256}
        print(f"    group 2 begins at row i + {64 * len(found)}: {len(first | second)} of 256 rows are written")


def adds_64(ttgir):
    """{name: operation}: where the second group's part of a program adds 64 to the rows of lse."""
    part = ttgir[ttgir.rindex("partition") :]
    defined = dict(re.findall(r"^ *(%\w+) = (.*?)(?: loc.*)?$", part, re.M))
    waiting, adds = re.findall(r"tt.store (%\w+)", part)[-1:], {}
    while waiting:
        name = waiting.pop()
        says = defined.pop(name, "")
        if re.search(r"%c64_|start = 64", says):
            adds[name] = re.sub(r" \{async[^}]*2>\}|async_task_id = [^>]*>, ", "", says).split(" : tensor")[0].strip()
        waiting += re.findall(r"%\w+", says)
    return adds


def formula_compiled():
    """Prints milliseconds of the formula under torch.compile, of cuDNN and of rung gluon, in one run on an H200."""
    found = [row for row in FRESH if row["gpu"] == "NVIDIA H200" and row["n_gpus"] == 1 and row["pass"] == "fwd"]
    runs = Counter(row["run"] for row in found if row["peer"] == "compiled")
    for causal in (False, True):
        some = [row for row in found if row["run"] == max(runs, default=None) and row["causal"] == causal]
        some = [row for row in some if row["D"] == 128 and not row["options"].get("feature")]
        ms = {row["kernel"] or row["peer"]: round(row["ms_median"], 2) for row in some}
        shown = ", ".join(f"{name} {ms.get(name)}" for name in ("compiled", "sdpa-cudnn", "fwd_3_gluon"))
        moved = sum(4e3 * 2 * row["B"] * row["H"] * row["N"] ** 2 / 4.8e12 for row in some[:1])  # at 4.8 TB/s
        print(f"{'causal' if causal else 'full':6} ms: {shown}; moving S and P {moved:.1f}")
