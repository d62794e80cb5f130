"""Rows are signed anew only where the old tree's text compiles to the same machine code."""

import json

import pytest

from steps.bench import rows, sign


def of_02(**changes):
    sizes = dict(B=1, H=2, Hk=2, N=512, Nk=512, D=64, causal=False)
    subject = dict(stage="02_fa2_cuda", kernel="fwd_5_fa2", peer=None, source="0" * 12, gpu="NVIDIA H200", n_gpus=1)
    return {**subject, "dtype": "bf16", **sizes, **changes}


def test_a_record_is_signed_only_if_it_was_fresh_and_launches_and_compiles_alike(monkeypatch):
    cases = [
        (of_02(), None),
        (of_02(D=128), "other machine code"),  # compiled() below
        (of_02(D=32), "other machine code"),  # neither text compiles
        (of_02(D=96), "stale in the old tree, too"),
        (of_02(dtype="fp16"), "another launch"),
        (of_02(D=7), "other code"),
        (of_02(stage="03_triton"), "other code"),
    ]
    tried = [one for one, _ in cases]
    launched = [json.loads(json.dumps(rows.launches(one))) for one in tried[:3]] + [None, {}, {}, {}]
    monkeypatch.setattr(sign, "inside", lambda tree, *_: (launched, {"fwd_5_fa2": tree}))
    code = {"128": lambda text: text, "32": lambda text: None, "64": lambda text: b"the same"}
    monkeypatch.setattr(sign, "compiled", lambda text, macros, arch: code[dict(macros)["D"]](text))
    assert sign.verdicts(tried, "old tree") == [reason for _, reason in cases]
    made = iter([b"1", b"2", b"3", b"3"])
    monkeypatch.setattr(sign, "compiled", lambda *_: next(made))
    assert sign.compile_alike("old", "new", (), "sm_90a"), "NVRTC may make other machine code the next time"


@pytest.mark.compile
def test_machine_code_depends_on_code_and_macros_only():
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    text = '__device__ int before[2] = {1, 2}; extern "C" __global__ void f(int* x) { x[0] = before[x[1]] + N; }'
    one, two = (sign.compiled(text, (("N", n),), "sm_80") for n in "12")
    reworded = "// says\n" + text.replace("before", "after")
    assert ".text.f" in one and one == sign.compiled(reworded, (("N", "1"),), "sm_80") != two
    assert one != sign.compiled(text.replace("{1, 2}", "{1, 3}"), (("N", "1"),), "sm_80")
    assert sign.compiled(text, (), "sm_80") is None and sign.compiled(None, (), "sm_80") is None
