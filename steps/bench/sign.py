"""`python -m steps.bench.sign OLD_TREE`: for maintainers, when reworded kernels still compile to the same code.

What is recorded of a kernel carries a hash of its text (rows.py), and a text can change while what runs stays
the same. A stale record, which is a row, a profiled rung or the timeline, gets the hash of the files as they are if

- it was fresh in OLD_TREE, another checkout of the course, as that checkout's own code judges;
- both trees launch the kernel alike at the record's sizes;
- NVRTC compiles both trees' texts, with the macros of that launch and without line information, to the same machine
  code and constants. Only the names of symbols may differ.

All other stale records stay as they are and are listed: measure them anew. Among them are the kernels in Python, of
which no more is compared than their code without comments, as in their hash. When such a file moves, PTX (stage 01) or
TTGIR (stage 03) would have to be compared.
"""

import json
import os
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import typer

from steps.bench import cost, profile, rows

# What a hash depends on.
FIELDS = ("stage", "kernel", "peer", "source", "gpu", "n_gpus", "dtype", "B", "H", "Hk", "N", "Nk", "D", "causal")
TRIES = 3  # Of the same text NVRTC may make other machine code the next time.
# Runs inside a tree with its modules. Prints each record's launches, None for a stale one, and the kernels' texts.
INSIDE = """
import json, sys
from pathlib import Path
from steps.step02_fa2_cuda import nvrtc
try:
    from steps.bench.rows import is_stale, launches
except ImportError:  # an older tree
    from steps.bench.fingerprint import is_stale, launches
records, stems = json.load(sys.stdin)
files = [Path(nvrtc.__file__).parent / f"{stem}.cu" for stem in stems]
texts = {file.stem: nvrtc._source(file) for file in files if file.exists()}
def found(record):
    return None if is_stale(record) else launches(record) if record["stage"] == "02_fa2_cuda" else {}
print(json.dumps([list(map(found, records)), texts]))
"""


def inside(tree, records, stems):
    """What INSIDE gives in a tree."""
    how = dict(cwd=tree, env=os.environ | {"PYTHONPATH": str(tree), "STEPS_ENGINE": "cpu"}, text=True)
    asked = json.dumps([records, sorted(stems)])
    return json.loads(subprocess.check_output([sys.executable, "-c", INSIDE], input=asked, **how))


def recorded_in(content):
    """Of a file's content: (the dict whose `source` is to be signed, the FIELDS of what it was measured on)."""
    if isinstance(content, list):
        pairs = [(row, row) for row in content]
    elif "rungs" in content:
        pairs = [(one, profile.subject(content, one)) for one in content["rungs"].values()]
    else:
        pairs = [(content, content)]
    return [(signed, {name: subject[name] for name in FIELDS}) for signed, subject in pairs]


def builds(record):
    """What has to be compiled for a record: {(stem, macros, architecture)}."""
    major, minor = cost.GPUS.get(record["gpu"], cost.GPUS["NVIDIA H200"]).capability
    arch = f"sm_{major}{minor}{'a' if major == 9 else ''}"
    works = [(stem, macros) for stem, found in rows.launches(record).items() for *_, macros in found]
    return {(stem, tuple((name, str(value)) for name, value in macros.items()), arch) for stem, macros in works}


def compiled(text, macros, arch):
    """What runs; None if there is no such text or it does not compile with these macros."""
    from cuda.core import Program, ProgramOptions

    how = dict(std="c++17", device_as_default_execution_space=True, no_cache=True, define_macro=list(macros))
    try:
        return text and sections(Program(text, "c++", ProgramOptions(arch=arch, **how)).compile("cubin").code)
    except Exception:  # NVRTC's errors have no common class across versions of cuda.core
        return None


def compile_alike(before, after, macros, arch):
    """Whether NVRTC makes the same machine code of two texts."""
    for _ in range(TRIES):
        code = compiled(before, macros, arch)
        if code is not None and code == compiled(after, macros, arch):
            return True
    return False


def sections(cubin):
    """{name: bytes} of an ELF file: code, constants, resources; without the symbols, whose names may change."""
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    found = {}
    # A section's header: where its name is among the names, its type, flags, address, where it is, and its size.
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + n * size) for n in range(count)]
    for at, kind, _, _, offset, length in headers:
        name = cubin[headers[names][4] + at :].partition(b"\0")[0].decode()
        if name not in (".symtab", ".strtab", ".shstrtab"):
            found[name] = cubin[offset : offset + length] if kind != 8 else length  # 8: nothing in the file
    return found


def refusal(record, before):
    """Why the record may not be signed, whatever the compiler says; or None. before: its launches in the old tree."""
    if record["stage"] != "02_fa2_cuda" or not rows.row_hash(record):
        return "other code"
    if before is None:
        return "stale in the old tree, too"
    if before != json.loads(json.dumps(rows.launches(record))):
        return "another launch"
    return None


def verdicts(records, old_tree):
    """For each record None if it may be signed, otherwise why not."""
    stems = {stem for record in records for stem in record["kernel"].partition(":")[0].split("+")}
    launched, old = inside(old_tree, records, stems)
    _, new = inside(rows.ROOT, [], stems)
    reasons = list(map(refusal, records, launched))
    same = {}  # each build is compiled once, because many records share one
    for n, record in enumerate(records):
        for stem, *how in builds(record) if reasons[n] is None else ():
            if (stem, *how) not in same:
                same[stem, *how] = compile_alike(old.get(stem), new.get(stem), *how)
            if not same[stem, *how]:
                reasons[n] = "other machine code"
    return reasons


def main(old_tree: Path):
    """Signs what is recorded of stage 02 anew where it compiles to the same code as in OLD_TREE."""
    files = {path: [json.loads(line) for line in path.open()] for path in rows.COMMITTED.glob("*.jsonl")}
    for kind in ("profile", "timeline"):
        files |= {path: json.loads(path.read_text()) for path in rows.COMMITTED.glob(f"*.{kind}.json")}
    stale = [pair for content in files.values() for pair in recorded_in(content) if rows.is_stale(pair[1])]
    different = {json.dumps(record): record for _, record in stale}  # many runs measure the same thing
    reasons = dict(zip(different, verdicts(list(different.values()), old_tree), strict=True))
    for signed, record in stale:
        if reasons[json.dumps(record)] is None:
            signed["source"] = rows.row_hash(record)
    for path, content in files.items():
        lines = content if isinstance(content, list) else [content]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    counts = Counter((record["kernel"], reasons[json.dumps(record)]) for _, record in stale)
    for (kernel, reason), count in sorted(counts.items(), key=str):
        print(f"{kernel}: {count} {'signed' if reason is None else f'left stale: {reason}'}")


if __name__ == "__main__":
    typer.run(main)
