"""What notebook 03x compiles, and the recorded rows that it shows."""

import re
import warnings
from pathlib import Path

from steps.course.figures import measured
from steps.course.figures.measured import fresh
from steps.course.figures.triton_compiler import compiled
from steps.step03_triton import fwd_2_roles

warnings.filterwarnings("ignore", message="flex_attention called without")  # The page says that it is not compiled.


def shares(kernel, other):
    """A kernel's speed in another's, or in a peer's, in one run on an H100, from N = 1024 on."""
    found = [row for row in fresh() if row["gpu"] == measured.H100.name and row["N"] > 512]
    return measured.shares(found, [kernel], other)


def compiled_formula():
    """Prints TFLOP/s of the plain formula under torch.compile, of cuDNN and of rung tma in one run on an H200."""
    for causal in (False, True):
        found = measured.of_one_run("compiled", "sdpa-cudnn", "fwd_1_tma", N=16384, causal=causal)
        speeds = ", ".join(f"{name} {tflops:.0f}" for name, tflops in found.items())
        print(f"causal {causal!s:5} TFLOP/s: {speeds or 'not measured as it is now'}")


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
    once = Path(fwd_2_roles.__file__).read_text().replace("from .replay", "from steps.step03_triton.replay")
    twice = once
    for before, after in zip(ONCE, TWICE, strict=True):
        twice = twice.replace(before, after)
    script = "import once, twice\nx = torch.zeros(1, 1, 128, 128).bfloat16()\n"
    script += "once.forward(x, x, x)\ntwice.forward(x, x, x)"
    for says, made in zip((ONCE[0], TWICE[0]), compiled(script, {"once": once, "twice": twice}), strict=True):
        part = made["ttgir"][made["ttgir"].rindex("partition") :]
        found = re.findall(r"%[A-Za-z]\w* = (?:tt.make_range .*start = 64 : i32}|arith.addi .*%c64_\w+)", part)
        print(f"lse at {says}", *(re.sub("async_task_id = [^>]*>, ", "", line) for line in found), sep="\n    ")
        print(f"    group 2 begins at row i + {64 * len(found)}")
