"""Gives rows the hash of today's text where only the text of a kernel has changed, and not its machine code.

    python tests/support/rehash.py OLD_TREE     a checkout of the commit in which the rows were fresh

For each row that is fresh there and stale here, its kernel is compiled by both trees at the row's dtype, head_dim and
mask. If the machine code, or in stage 03 the PTX, is the same but for names and line numbers, the row gets the new
hash. Otherwise it stays stale, and has to be measured again. It knows stages 02 and 03. No GPU is needed.
"""

import functools
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
STAGES = "02_fa2_cuda", "03_triton"
FEATURES = "flash", "flash_gluon", "flash_gluon_backward", "decode"  # the kernels of stage 03 that are no rungs
HASHES = """
import json, sys
from steps.course.bench import rows
print(json.dumps([rows.is_stale(json.loads(line)) for line in sys.stdin]))
"""
CUDA = """
import functools, hashlib, json, struct, sys
from pathlib import Path
from steps.course.bench import rows
from steps.step02_fa2_cuda import nvrtc

def code(cubin):
    # What of an ELF file is executed: its sections of instructions and constants, but not those about lines.
    (start,), (size, count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + size * n) for n in range(count)]
    for name, kind, _, _, offset, length in sections:
        word = cubin[sections[names][4] + name :].split(b"\\0")[0]
        if word.startswith((b".text", b".nv.constant")) and kind == 1:
            yield word + cubin[offset : offset + length]

@functools.cache
def compiled(file, macros):
    cubin = nvrtc.compile(file, dict(macros), "sm_90a").cubin
    return hashlib.sha256(b"".join(sorted(code(cubin)))).hexdigest()

for line in sys.stdin:
    row, found = json.loads(line), []
    for stem, launched in getattr(rows, "launched_by", getattr(rows, "launches", None))(row).items():
        if stem.endswith("order"):
            found.append(launched)
            continue
        file = Path(nvrtc.__file__).with_name(stem + ".cu")
        turned = row["kernel"].partition(":")[2]
        if turned == "LARGE_SCORES=0":  # an edit of the text, and no macro
            from steps.course.bench import ablations
            file = ablations.changed(stem, ablations.SEPARATE[stem])
        found += [(launch, compiled(file, tuple(launch[-1].items()))) for launch in launched]
    print(json.dumps(found))
"""


def run(tree, *command, text=None):
    path = os.pathsep.join((str(tree), str(Path(tree) / "tests")))
    environment = os.environ | {"PYTHONPATH": path, "STEPS_ENGINE": "compile", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-P", *command]
    done = subprocess.run(command, cwd=tree, env=environment, input=text, capture_output=True, text=True, check=True)
    return done.stdout


def machine_code(tree, keys):
    """{row, a line of JSON: what the tree compiles for it}. One process compiles all rows of stage 02."""
    cuda = [key for key in keys if json.loads(key)["stage"] == "02_fa2_cuda"]
    found = dict(zip(cuda, run(tree, "-c", CUDA, text="\n".join(cuda)).splitlines(), strict=True))
    return found | {key: code_of_stage_03(tree)[key] for key in keys if key not in found}


@functools.cache
def code_of_stage_03(tree):
    """{a row, as `key_of` it: hashes of the kernels that the tree compiles for it}. All are compiled together."""
    from steps.course.bench import rows

    lines = [line for path in rows.COMMITTED.glob("*.jsonl") for line in path.read_text().splitlines()]
    has = {path.stem for path in Path(tree, "steps", "step03_triton").rglob("*.py")}  # another tree may lack some
    of_stage = [row for row in map(json.loads, lines) if row["stage"] == "03_triton"]
    keys = dict.fromkeys(key_of(row) for row in of_stage if {*row["kernel"].split("+")} <= has)
    wanted = {key: as_compiled(json.loads(key)) for key in keys}
    found = defaultdict(list)
    for kind in (list, dict):  # of rungs, and of features
        ones = list({json.dumps(one): one for one in wanted.values() if isinstance(one, kind)}.values())
        made = run(tree, str(ROOT / "tests/support/compile_triton.py"), json.dumps(ones))
        for kernel in map(json.loads, made.splitlines()):
            found[json.dumps(ones[kernel["wanted"]])].append(kernel["text"])
    assert len(found) == len({json.dumps(one) for one in wanted.values()})
    return {key: found[json.dumps(one)] for key, one in wanted.items()}


def as_compiled(row):
    """The entry of compile_triton.py for a row. A rung is compiled with both passes."""
    if row["kernel"] in FEATURES:
        return row
    rung = row["kernel"].split("+")[0].split("_", 2)[2]
    dtype = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[row["dtype"]]
    return [rung, 90, dtype, row["D"], row["causal"]]


def key_of(row):
    """What of a row decides which machine code it ran, as a line of JSON."""
    fields = ["stage", "kernel", "dtype", "D", "causal"]
    if row["stage"] == "02_fa2_cuda":
        fields += ["gpu", "B", "H", "Hk", "N", "Nk"]
    if row["kernel"] in FEATURES:
        fields += ["pass", "B", "H", "Hk", "N", "Nk", "options"]
    return json.dumps({name: row[name] for name in fields})


def main(old):
    from steps.course.bench import rows

    for path in sorted(rows.COMMITTED.glob("*.jsonl")):
        lines = path.read_text().splitlines()
        was_stale = json.loads(run(old, "-c", HASHES, text="\n".join(lines)))
        found = {n: json.loads(line) for n, line in enumerate(lines) if not was_stale[n]}
        found = {n: row for n, row in found.items() if row["stage"] in STAGES and rows.is_stale(row)}
        keys = {key_of(row) for row in found.values()}
        before, after = machine_code(old, keys), machine_code(str(ROOT), keys)
        for n, row in found.items():
            key = key_of(row)
            if before[key] == after[key]:
                lines[n] = json.dumps(row | {"source": rows.row_hash(row)})
            else:
                print("changed:", key)
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    main(sys.argv[1])
