"""What pages say of speeds, counts and records is what today's rows, counters and records give.

`says(page, words, *numbers)` finds the words on the page, in which # stands for a number, and compares the numbers.
"""

import functools
import itertools
import math
import re
import statistics

import pytest

from steps.course.bench import ablations, ring, rows
from steps.course.bench.cost import Point
from steps.course.demo import training
from steps.course.figures import (
    measured,
    n01_fa1_numba,
    n02a_first_kernels,
    n02b_tensor_cores,
    n02e_hopper_backward,
    n02y_deeper,
    n03b_triton_features,
    n03y_deeper,
    n04a_ring,
    ring_tables,
)
from steps.course.workbook import show
from steps.step00_naive import io_count
from steps.step02_fa2_cuda import emulator

RESULTS, DEMO = "steps/course/bench/results/README.md", "steps/course/demo/README.md"
FA3 = "papers/flash_attention_3.md"
NUMBER = r"(?<![\d.,])(\d+(?:,\d{3})*(?:\.\d+)?)"


def says(page, words, *numbers):
    """Whether the page has these words once, with these numbers, rounded to as many decimals as it writes.

    page: a .md file, or the beginning of a notebook's name.
    """
    (file,) = [rows.ROOT / page] if page.endswith(".md") else (rows.ROOT / "notebooks/src").glob(f"{page}_*.py")
    text = " ".join(re.sub(r"^# ?", "", file.read_text(), flags=re.M).split())
    found = list(re.finditer(re.escape(words).replace(r"\#", NUMBER), text))
    assert len(found) == 1, f"{page} says {len(found)} times: {words}"
    said = found[0].groups()
    decimals = [len(number.partition(".")[2]) for number in said]
    assert [*said] == [f"{x:,.{n}f}" for x, n in zip(numbers, decimals, strict=True)], f"{page}: {words}"
    return True


def span(values):
    """The least and the largest."""
    if not (values := list(values)):
        pytest.skip("it has changed since it was measured")
    return min(values), max(values)


# --- shares of another kernel's or a peer's speed, in one run ---------------------------------------------------------

FWD, BWD = "fwd_8_hopper", "bwd_3_hopper"
BOTH = f"{FWD} {BWD}"
SHARES = [  # page, words, and of each pair of numbers: the kernels, whom they are compared with, N from, N to, sizes
    (FA3, "- D = 64: ours has # to # of its speed. - D = 128, full: # to #.", (FWD, "fa3", 0, 2**14, {"D": 64}),
     (FWD, "fa3", 0, 2**14, {"D": 128, "causal": False})),
    (FA3, "D = 128, causal: # to #, from", (FWD, "fa3", 0, 2**14, {"D": 128, "causal": True})),
    (FA3, "has # to # of its speed (an H200, one run, D = 128, the same N).", (BWD, "fa3", 0, 2**14, {})),
    ("02e", "has # to # of the speed of FlashAttention-3's own backward", (BWD, "fa3", 0, 2**14, {})),
    ("02y", "The backward has # to # of FlashAttention-3's speed (causal, D = 128).", (BWD, "fa3", 0, 2**14, {})),
    (RESULTS, "leaves the backward of stage 02 # to # of its speed", (f"{BWD}:DETERMINISTIC=1", BWD, 0, 2**14, {})),
    ("03a", "Of FlashAttention-4's speed it has # to # in the forward, and # to # in the backward.",
     ("fwd_3_gluon", "fa4", 4096, 2**14, {}), ("bwd_2_gluon", "fa4", 4096, 2**14, {})),
    ("03y", "the forward has # to # of cuDNN's speed and # to # of FlashAttention-4's; "
     "the backward has # to # and # to #.",
     ("fwd_3_gluon", "sdpa-cudnn", 4096, 2**14, {}), ("fwd_3_gluon", "fa4", 4096, 2**14, {}),
     ("bwd_2_gluon", "sdpa-cudnn", 4096, 2**14, {}), ("bwd_2_gluon", "fa4", 4096, 2**14, {})),
    ("02y", "both have # to # of its speed (in a second of calls without a pause, at N = 16384, # to #)",
     (BOTH, "fa4", 4096, 2**14, {}), (BOTH, "fa4", 2**14, 2**14, {"timing": "sustained"})),
    ("02y", "our backward has # to # of its speed", (BWD, "fa4", 0, 4095, {})),
    ("02y", "`hopper` without turns has # to # of its speed, and without OVERLAP # to #.",
     (f"{FWD}:PINGPONG=0", FWD, 4096, 4096, {"D": 128}), (f"{FWD}:OVERLAP=0", FWD, 4096, 4096, {"D": 128})),
    ("02y", "N = 1024 on, where `hopper` has # to # of its speed. Without a mask `hopper` has # to # of it, and at "
     "D = 64 # to #.", (FWD, "fa3", 1024, 2**14, {"D": 128, "causal": True}),
     (FWD, "fa3", 0, 2**14, {"D": 128, "causal": False}), (FWD, "fa3", 0, 2**14, {"D": 64})),
]  # fmt: skip


@functools.cache
def of_gpu(gpu, **which):
    found = [row for row in rows.fresh(rows.read(**which)) if row["gpu"] == gpu.name]
    return [row for row in found if row["dtype"] == "bf16" and row["D"] in (64, 128) and not row["options"]]


def shares(kernels, other, least, most, at):
    gpu = measured.H100 if "gluon" in kernels else measured.H200
    found = of_gpu(gpu, timing=at.get("timing", "interleaved"), switched=other in (FWD, BWD))
    beside = measured.beside(found, kernels.split(), other)
    return span(share for row, share in beside if least <= row["N"] <= most and at.items() <= row.items())


@pytest.mark.parametrize("page, words, pairs", [(page, words, pairs) for page, words, *pairs in SHARES])
def test_shares_of_others(page, words, pairs):
    says(page, words, *itertools.chain(*(shares(*pair) for pair in pairs)))


def test_shares_of_which_one_is_told():
    says(FA3, "from N = 1024 on at most #.", shares(FWD, "fa3", 1024, 2**14, {"D": 128, "causal": True})[1])
    says("02y", "our forward leads by up to # %", 100 * shares(FWD, "fa4", 0, 4095, {})[1] - 100)
    says("02y", "In one forward at N = 512 we have # of cuDNN's speed.", shares(FWD, "sdpa-cudnn", 0, 512, {})[0])
    without = [shares(f"{FWD}:PERSISTENT=0", FWD, N, N, {}) for N in (512, 2**14)]
    slower = [100 / share - 100 for least, most in without for share in (most, least)]
    says("02y", "the kernel is slower by # to # % at N = 512, and by # to # % at N = 16384.", *slower)


def gains(switch, at, least=0):
    """The least and the largest percent by which rung hopper is slower on an H200 without one of its ideas."""
    low, high = shares(f"{FWD}:{switch}=0", FWD, least, 2**14, at)
    return 100 / high - 100, 100 / low - 100


def test_what_each_idea_of_rung_hopper_brings():
    causal, wide, narrow = {"D": 64, "causal": True}, {"D": 128}, {"D": 64}
    says("02y", "SKIP brings # to # % at D = 64 with a causal mask.", *gains("SKIP", causal))
    both = *gains("OVERLAP", wide, 4096), *gains("OVERLAP", narrow, 4096)
    says("02y", "From N = 4096 on OVERLAP brings # to # % at D = 128, and # to # % at D = 64.", *both)
    says("02y", "PINGPONG brings # to # % at D = 64, and nothing at D = 128.", *gains("PINGPONG", narrow, 4096))
    assert gains("PINGPONG", wide, 4096)[1] < 1
    says("02y", "On an H200 this brings # to # % at D = 128.", *gains("LAZY", wide))


# --- counts and records of stage 02 -----------------------------------------------------------------------------------


def test_what_each_rung_brought():
    (copies, before, _), (hopper, *_) = map(measured.rung_row, ("fwd_4_cp_async", "fwd_8_hopper"))
    became = copies["tflops"] / before["tflops"]
    says("02b", "It became # times as fast", became)
    says("02b", "1 - 1/#, more than #%, if nothing but waiting was saved.", became, math.floor(100 - 100 / became))
    peak = measured.H200.half_tflops
    says("02d", "reaches # of # TFLOP/s, # %.", hopper["tflops"], peak, 100 * hopper["tflops"] / peak)
    fa2 = measured.rung_row("fwd_5_fa2", peer="sdpa-cudnn")[0]["tflops"]
    says("02d", "says # TFLOP/s. `fa2` reaches only # % of that", peak, 100 * fa2 / peak)


def test_a_causal_mask_costs_speed():
    names = "fwd_5_fa2", "fwd_6_wgmma", "fwd_7_roles", "fwd_8_hopper", "sdpa-cudnn", "fa3"
    full, causal = (measured.of_one_run(*names, causal=mask) for mask in (False, True))
    assert all(causal[name] < full[name] for name in names if full and causal) and says("02d", "No, all get slower.")


def test_shares_of_the_yardstick():
    """Rung fa2 beside cuDNN, forward and backward."""
    shares = []
    for kernel in ("fwd_5_fa2", "bwd_1_fa2"):
        mine, _, cudnn = measured.rung_row(kernel, peer="sdpa-cudnn")
        shares.append(mine["tflops"] / cudnn["tflops"])
    says("02c", "which reached # of the speed of cuDNN's forward.", shares[0])
    assert 0.48 < shares[1] < min(0.52, shares[0]) and says("02c", "Half, a little less than in the forward.")


def test_what_loads_explain_in_float32():
    """Of the kernels of 01 and 02a: loads a multiply-add, what shared memory then allows, and what was measured."""
    loads, speeds = n02a_first_kernels.LOADS, {row["kernel"]: row["tflops"] for row in n02a_first_kernels.in_float32()}
    if not speeds.keys() >= loads.keys():
        pytest.skip("a kernel has changed since it was measured")
    scalar, warp, registers, swapped = "fwd_0_scalar", "fwd_1_warp", "fwd_2_registers", "fwd_1_loops_swapped"
    allowed = 2 * n01_fa1_numba.DELIVERS["shared memory"] / loads[scalar]
    assert speeds[scalar] > allowed
    words = "by 01's formula this allows # TFLOP/s. (Measured are #, as the compiler joins four loads into one.)"
    says("02a", words, allowed, speeds[scalar])
    counted, gained = loads[scalar] / loads[warp], speeds[warp] / speeds[scalar]
    says("02a", "1 / 0.31 = # times; measured # times:", counted, gained)
    assert loads[registers] < loads[warp] and speeds[registers] < speeds[warp]
    assert loads[swapped] == 2 * loads[scalar] and round(speeds[scalar] / speeds[swapped]) == 10
    assert says("02a", "should have half of the speed of `scalar`, and has a tenth.")
    told = "order of the loops: from # to # TFLOP/s at d = 64."
    says("01", told, speeds[swapped], speeds[registers])


def test_why_standard_attention_leads_in_the_backward_of_01():
    found = n01_fa1_numba.recorded()
    lead = [found["bwd", "sdpa-math", d]["tflops"] / found["bwd", "sdpa-efficient", d]["tflops"] for d in (64, 128)]
    assert min(lead) > 1 and says("01", "In the backward `sdpa-math` is ahead.")
    says("01", "computes four. That alone makes it # % faster in this count", 100 * 5 / 4 - 100)


def test_which_tile_of_01_saves_traffic():
    moved = {}
    for n, (Br, Bc) in enumerate(n01_fa1_numba.TILES.values()):
        moved[n] = sum((io_count.fa2_count if n else io_count.fa1_count)(1024, 64, Br, Bc))
    standard = sum(io_count.standard_count(1024, 64))
    assert [n for n in moved if moved[n] < standard] == [2]
    assert says("01", "Below, only rung 2's tile is large enough to save traffic.")
    says("01", "Rung 0's, 16 x 16 on a GPU, take # KiB.", 4 * (3 * 16 * 64 + 16 * 16) / 1024)
    assert n01_fa1_numba.TILES["published"] == (16, 16)


@pytest.mark.skipif(not emulator.available(), reason="needs g++")
def test_what_a_wavefront_feeds():
    feeds = {rung: n02b_tensor_cores.per_wavefront(rung) for rung in n02b_tensor_cores.RUNGS}
    ceilings = {rung: n02b_tensor_cores.WAVEFRONTS * flop for rung, flop in feeds.items()}
    steps = {b: feeds[b] / feeds[a] for a, b in itertools.pairwise(feeds)}
    says("02b", "one wavefront feeds # FLOP,", feeds["scalar"])
    tiles = {rung: n02b_tensor_cores.ladder.FORWARD[rung].tiles[0][D] for rung, D in n02b_tensor_cores.RUNGS.items()}
    assert len({tiles[rung] for rung in ("warp", "mma", "ldmatrix", "cp_async")}) == 1
    shown = tiles["scalar"] + tiles["fa2"] + tiles["mma"]
    says("02b", "queries x keys, are # x # in `scalar`, # x # in `fa2`, and # x # between:", *shown)
    assert feeds["scalar"] < 256 / 4 and says("02b", "less than a quarter of what the float32 units can do.")
    clocks = [peak * 1e3 / measured.H200.sms / flop for peak, flop in (
        (measured.H200.half_tflops, 4096), (measured.H200.fp32_tflops, 256))]  # fmt: skip
    says("02b", "The clock is # GHz,", clocks[0])
    says("02b", "(01 took that of the float32 peak, # GHz.)", clocks[1])
    says("02b", "Three times as many, #: 20 numbers", feeds["warp"])
    says("02b", "The ceiling is # TFLOP/s.", ceilings["warp"])
    says("02b", "feeds # FLOP, only # times", feeds["mma"], steps["mma"])
    assert n02b_tensor_cores.per_wavefront("mma", 64) == feeds["mma"]
    assert says("02b", "at D = 64 the count is the same")
    words = "from # to # TFLOP/s, # times, and the speed only four times."
    says("02b", words, ceilings["mma"], ceilings["ldmatrix"], steps["ldmatrix"])
    assert feeds["cp_async"] == feeds["ldmatrix"] and says("02b", "Its wavefronts are exactly those of `ldmatrix`.")
    says("02b", "A wavefront feeds # times as many FLOP; the speed does not follow", steps["fa2"])
    says("02b", "At # TFLOP/s `mma` itself would be the limit", ceilings["fa2"])
    assert round(3 * ceilings["fa2"] / measured.H200.half_tflops, 1) == 2
    says("02b", "it reaches two thirds of #,", measured.H200.half_tflops)
    speeds = {b: n02b_tensor_cores.gain(a, b) for a, b in itertools.pairwise(feeds)}
    if not any(map(math.isnan, speeds.values())):
        more = {rung for rung in speeds if speeds[rung] > steps[rung] + 0.01}
        assert more == {"cp_async", "mma"} and says("02b", "`cp_async`, which waits less, and `mma`:")
        assert round(speeds["mma"]) == 2 and says("02b", "`mma` is only twice as fast as `warp`.")
        assert round(speeds["ldmatrix"]) == 4
    scalar = n02b_tensor_cores.speed("scalar", 64)
    if not math.isnan(scalar):
        told = "measured at # TFLOP/s, above its ceiling of #:"
        assert scalar > ceilings["scalar"] and says("02b", told, scalar, ceilings["scalar"])


def test_mma_gained_more_than_its_count():
    share = {}
    for rung in ("warp", "mma"):
        D = n02b_tensor_cores.RUNGS[rung]
        ceiling = n02b_tensor_cores.WAVEFRONTS * n02b_tensor_cores.per_wavefront(rung)
        share[rung] = n02b_tensor_cores.speed(rung, D) / ceiling * 100
    says("02b", "`warp` reached only #% of its ceiling, and `mma` #%.", share["warp"], share["mma"])


@pytest.mark.skipif(not emulator.available(), reason="needs g++")
def test_what_one_wavefront_feeds_in_the_picture():
    """Multiply-adds of S. In `scalar`, `scores` also stores them."""
    of = {rung: n02b_tensor_cores.wavefronts(rung)["scores"][1] for rung in ("scalar", "warp", "mma", "ldmatrix")}
    of["scalar"] -= 64 * 32 // 32
    tiles = {rung: 64 * (32 if rung == "scalar" else 64) for rung in of}
    fed = [tiles[rung] * n02b_tensor_cores.RUNGS[rung] / of[rung] for rung in of]
    says("02b", "Scalar: 1 word, # multiply-adds. Warp: 4 or 8, #. Mma: 4, #. Ldmatrix: 32, #.", *fed)


def test_what_the_transpose_reads():
    """At D = 128, where dV and dK would take P^T and dS^T from shared memory, and dQ take dS from registers."""
    read = {name: took for name, (_, took, _) in n02e_hopper_backward.products(128, 64).items()}
    stored = 2 * 4 * 32 * (128 + 64)  # two warpgroups, four wgmma of 16 queries, n = 128; the first operand is 64 rows
    partial = 2 * 4 * 32 * 128  # each sums over its own 64 keys
    saved, cost = (stored - read["dV"]) / 1024, (read["dQ"] - partial) / 1024
    says("02e", "With Sᵀ, dV and dK read # KiB less each, dQ # more: only P's store is saved.", saved, cost)
    assert 2 * saved == cost


@pytest.mark.skipif(not emulator.available(), reason="needs g++")
def test_what_the_roofs_foresaw_for_bwd_3():
    found = {D: [n02e_hopper_backward.roof(rung, D)[0] for rung in ("wgmma", "hopper")] for D in (64, 128)}
    foreseen = [new / old for old, new in found.values()]
    rows_of = [measured.rung_row(BWD, D=D) for D in (64, 128)]
    got = [row["tflops"] / before["tflops"] for row, before, *_ in rows_of]
    words = "D = 64 should become # times as fast and D = 128 # times; measured were # and #."
    says("02e", words, *foreseen, *got)
    second, first, *_ = measured.rung_row("bwd_2_wgmma")
    says("02e", "has `bwd_2` # times as fast as `bwd_1`", second["tflops"] / first["tflops"])


@pytest.mark.skipif(not emulator.available(), reason="needs g++")
def test_what_passes_through_shared_memory_beside_the_products():
    clocks, read = n02e_hopper_backward.step_of(64, 128)
    others = n02e_hopper_backward.beside_products(64)
    free = clocks - read / n02e_hopper_backward.BANDWIDTH
    says("02e", "the grey ones need # clocks, and # are free.", sum(others.values()), free)
    assert others["lse, delta"] == 2 * others["dS^T"] and says("02e", "that takes twice as long as dSᵀ.")
    for D, (Br, Bc) in n02e_hopper_backward.TILES.items():
        says("02e", "which has # times as many bytes?", 2 * Br * Bc / (2 * 4 * Br))
        _, words = n02e_hopper_backward.roof("wgmma", D)
        _, read = n02e_hopper_backward.step_of(D, Br)
        shared = read / n02e_hopper_backward.BANDWIDTH + sum(n02e_hopper_backward.beside_products(D).values())
        assert f"shared memory {shared:.0f} clocks" in words, "The picture shows all of it."


def test_parts_of_two_kernels():
    took = {(one["without"], one["D"]): one["ms_median"] for one in ablations.read("left_out")["times"]}
    says("02y", "At D = 128 the additions to dq, # %", 100 - 100 * took["additions to dq", 128] / took[None, 128])
    left = Point(4, 16, 4096, 128).flops("bwd") / took["all four", 128] / 1e9
    products = [row["tflops"] for row in rows.read() if row["peer"] == "matmul" and "H200" in row["gpu"]]
    assert round(10 * left / statistics.median(products)) == 9
    assert says("02y", "has nine tenths of the speed of a matrix product")
    says("02y", "whole kernel reached # TFLOP/s at D = 128", measured.rung_row("bwd_3_hopper")[0]["tflops"])
    exact = {changed: found for changed, found, _ in n02y_deeper.recorded()}
    spent = [round(exact[one], -1) for one in ("OVERLAP = 1, PINGPONG = 1", "without exp", "without softmax")] + [2050]
    words = "Of the # clocks beyond the products # vanish with the exponentials and # with the rest of the softmax. "
    says("02y", words + "The last # are", spent[0] - 2050, *(a - b for a, b in itertools.pairwise(spent)))
    gained = exact["OVERLAP = 0, PINGPONG = 1"] / exact["OVERLAP = 1, PINGPONG = 1"]
    says("02y", "OVERLAP gains # %.", 100 * gained - 100)


def test_small_calls():
    found = [one for one in rows.fresh(rows.read()) if one["options"].get("feature") == "small call"]
    found = [one for one in found if one["N"] == 256]
    found = [one for one in found if one["run"] == max(one["run"] for one in found)]
    assert all(one["host_us"] > 1e3 * one["ms_median"] for one in found)
    alone = {rows.label(one): one["host_us"] for one in found if one["pass"] == "fwd"}
    assert all(round(2 * alone["02 fwd_8_hopper"] / alone[peer]) == 1 for peer in ("sdpa-flash", "sdpa-cudnn"))
    assert says(RESULTS, "A forward of stage 02 takes the CPU half as long as one of torch's own.")
    both = {("graph" in one["options"], rows.label(one)): one for one in found if one["pass"] == "fwd+bwd"}
    eager, graphs = ({who: one for (graph, who), one in both.items() if graph == how} for how in (False, True))
    captured, fastest = [one["host_us"] for one in graphs.values()], min(eager.values(), key=lambda one: one["host_us"])
    assert fastest["peer"] == "sdpa-cudnn" and max(captured) < min(fastest["host_us"], 1.15 * min(captured))
    same = "about the same time whichever kernels are inside (# to # µs), and less than cuDNN's without graphs."
    says(RESULTS, same, *span(captured))
    longer = [1e3 * (graphs[who]["ms_median"] - eager[who]["ms_median"]) for who in {*eager, *graphs}]
    says(RESULTS, "The GPU takes # to # µs longer", *span(longer))


def test_training():
    made = rows.read_record("training")
    steps, losses = made["size"]["steps"], made["losses"]
    far = [training.apart(losses[dtype]) for dtype in ("float32", "bfloat16")]
    most = [max(x for name, x in one.items() if "SDPA" not in name) for one in far]
    says(DEMO, "# steps of # bytes, once", steps, made["size"]["batch"] * made["size"]["N"])
    says(DEMO, "further than # nats from SDPA's, in bfloat16 no further than #.", *most)
    says(DEMO, "as far, by # and #.", *(one[training.MATH] for one in far))
    for one in losses["float32"].values():
        says(DEMO, "all losses in float32 are #.", one[-1])
    for of_dtype in losses.values():
        assert max(training.apart({name: one[:20] for name, one in of_dtype.items()}).values()) < 1e-4
    speeds = [round(made["speed"]["tokens"][name], -3) for name in (training.SDPA, "02", "03", training.MATH)]
    says(DEMO, "# bytes a second with SDPA, # with stage 02 and # with stage 03; with SDPA's plain formula #.", *speeds)
    assert says(DEMO, f"of one run on an {made['gpu']}.")


# --- the ring ---------------------------------------------------------------------------------------------------------


def of_ring(table, n_gpus=4):
    """{(pass, Hk, who, N): [the number, those in its brackets]} of a table of H200."""
    head, *lines = ring_tables.TABLES[table](ring_tables.recorded("H200", n_gpus))
    if not lines:
        pytest.skip("the ring has changed since it was measured")
    words = {(*line[1:4], N): word for line in lines for N, word in zip(head[4:], line[4:], strict=True) if word != "–"}
    return {key: [float(number) for number in re.findall(r"[\d.]+", word)] for key, word in words.items()}


def test_the_ring_s_efficiency():
    of_two, of_four = ({key: x[1] for key, x in of_ring("speed", n).items() if len(x) > 1} for n in (2, 4))
    long = {key: share for key, share in of_four.items() if key[-1] != "8k"}
    fetch = span(share for key, share in long.items() if key[2] == "fetch")
    torchs = span(share for key, share in long.items() if key[2].startswith("torch"))
    told = "four GPUs have an efficiency of # to # from 32k on, where `context_parallel` has # to #."
    assert fetch[0] > 0.85 and says("04b", told, *fetch, *torchs) and says("04b", "keep about nine tenths of the")
    ms = {key: x[0] for key, x in of_ring("speed").items()}
    assert all(ms[key] > ms[pass_, Hk, "fetch", N] for key in ms for pass_, Hk, who, N in [key] if who == "relay")
    slower = [100 * ms["fwd", "32", "relay", N] / ms["fwd", "32", "fetch", N] - 100 for N in ("32k", "128k")]
    assert says("04b", "Relay's forward, Hk = H, takes # % longer at 32k and # % at 128k", *slower)
    assert abs(ms["fwd", "8", "fetch", "8k"] / ms["fwd", "32", "fetch", "8k"] - 1) < 0.02
    assert says("04b", "even a quarter of the bytes (Hk = 8) changes nothing")
    one, four = (ms["fwd", "32", who, "8k"] for who in ("one GPU", "fetch"))
    assert all(ms[p, Hk, "one GPU", "8k"] < x for (p, Hk, who, N), x in ms.items() if N == "8k" and who != "one GPU")
    says("04b", "a forward takes # ms on one, # on four", one, four)
    if_hidden = 1e3 * n04a_ring.timelines()["zigzag"].seconds
    assert round(ms["fwd", "32", "relay", "32k"] / if_hidden) == 2
    assert says("04a", "(Relay on GPUs hides little, and takes twice as long: 04b, part 6.)")
    both = span(share for key, share in long.items() if key[::2] == ("fwd+bwd", "fetch"))
    says("04x", "the ring over fetch has # to # of four GPUs", *both)
    other = {key: x[0] for key, x in of_ring("strategies").items()}
    both = [(ms[p, Hk, who, N], other[p, Hk, f"ring, {who}", N]) for p, Hk, who, N in long if who in ("fetch", "relay")]
    apart = max(max(one) / min(one) for one in both)
    says("04x", "from 32k on, the rings' times differ by up to # %", 100 * apart - 100)
    says("04x", "On four GPUs a rank has a fifth of a millisecond of work for a forward.")
    assert round(ms["fwd", "32", "one GPU", "8k"] / 4, 1) == 0.2
    ours, *torchs = ([speed["fwd+bwd", "32", who, "128k"] for speed in (of_two, of_four)]
                     for who in ("fetch", "torch, allgather", "torch, alltoall"))  # fmt: skip
    told = "two and four H200 # and # of hopper's speed (128k tokens, causal, forward + backward), torch's own # and #"
    says("README.md", told, *ours, *map(max, *torchs))


def test_the_price_of_a_fixed_order():
    number = {"fetch, any order": 1, "fetch": 2}  # beside one GPU that adds in the same order
    two, four = (span(x[number[key[2]]] for key, x in of_ring("orders", n).items() if key[2] in number) for n in (2, 4))
    says("04x", "These are between # and # on two GPUs, and between # and # on four.", *two, *four)
    orders = of_ring("orders")
    says("04x", "another run, where it has # to #.", *span(x[1] for key, x in orders.items() if key[2] == "fetch"))
    (_, mixed, ordered), (_, free, _) = (orders["fwd+bwd", "8", who, "32k"] for who in ("fetch", "fetch, any order"))
    says("04x", "with Hk = 8 at 32k, # becomes # or #.", mixed, free, ordered)
    ms = {key[2:]: x[0] for key, x in of_ring("orders").items() if key[:2] == ("fwd+bwd", "32")}
    pairs = ("fetch", "fetch, any order"), ("one GPU, in order", "one GPU")
    (a, b), (c, d) = ((ms[one, "128k"], ms[other, "128k"]) for one, other in pairs)
    told = "the call of four GPUs # % longer (# ms for #), and that of one GPU # % (# for #)"
    says("04x", told, 100 * a / b - 100, a, b, 100 * c / d - 100, c, d)
    fixed, free = ms["fetch", "32k"], ms["fetch, any order", "32k"]
    says(RESULTS, "forward + backward takes # ms in a fixed order and # in any", fixed, free)
    raced = of_ring("speed")["fwd+bwd", "32", "fetch", "32k"][0]
    says("04x", "where the ring over fetch took # instead of # ms.", fixed, raced)


def test_graphs_and_a_million_tokens():
    speed, graphs = of_ring("speed"), {key[:3]: x[0] for key, x in of_ring("graphs").items()}
    sizes = list(itertools.product(("fwd", "fwd+bwd"), ("32", "8")))
    ratios = [graphs[*size, "fetch, in a graph"] / graphs[*size, "fetch"] for size in sizes]
    says("04x", "the forward took # and # of the time, and forward + backward # and #.", *ratios)
    assert 0.3 < ratios[2] < 0.36 and says(RESULTS, "backward over fetch takes a third of the time.")
    shares = [speed[*size, "one GPU", "8k"][0] / 4 / graphs[*size, "fetch, in a graph"] for size in sizes[2:]]
    shares += [speed[*size, "fetch", "8k"][1] for size in sizes[2:]]
    says("04x", "the efficiency of forward + backward is # and # instead of # and #.", *shares)
    million = [row for row in ring_tables.recorded("H200") if row["N"] == 2**20 and row["kernel"] == ring.FETCH]
    found = {(row["pass"], row["n_gpus"]): row for row in million}
    seconds = [found[p, n]["ms_median"] / 1e3 for p in ("fwd", "fwd+bwd") for n in (2, 4)]
    told = "# and # seconds forward, # and # forward + backward. Each of the four did # and # TFLOP/s."
    says("04x", told, *seconds, *(found[p, 4]["tflops"] for p in ("fwd", "fwd+bwd")))


def test_which_strategy_is_the_fastest():
    times = {}
    for n in (2, 4):
        for (pass_, Hk, who, N), (ms, *_) in of_ring("strategies", n).items():
            times.setdefault((n, pass_, Hk, N), {})[who] = ms
    assert {(n, N) for n, *_, N in times} == set(itertools.product((2, 4), ("8k", "32k", "128k")))
    (exception,) = (at for at, ms in times.items() if at[::3] != (4, "8k") and min(ms, key=ms.get) != "ring, fetch")
    ulysses, fetch = (times[exception][who] for who in ("ulysses", "ring, fetch"))
    assert exception == (4, "fwd+bwd", "8", "128k") and ulysses == min(times[exception].values())
    says("04x", "for forward + backward with Hk = 8: there Ulysses takes # ms and the ring #", ulysses, fetch)
    told = "ring, fetch | faster than relay, query-parallel, star and Ulysses, or at most 2 % slower |"
    assert fetch < 1.02 * ulysses and says("04b", told)
    names = {"ring, fetch", "ring, relay", "query_parallel", "star", "ulysses"}
    assert all({*ms} | {"star"} == names and ("star" in ms or "bwd" in at[1]) for at, ms in times.items())
    graphs, eager = of_ring("graphs"), of_ring("speed")
    both = [(x[0], eager[p, Hk, "one GPU", N][0]) for (p, Hk, who, N), x in graphs.items() if who.endswith("graph")]
    assert len(both) == 4 and all(graph < one for graph, one in both)
    assert says("04b", "| four GPUs, 8k positions | one GPU, or a CUDA graph")


def test_how_much_of_the_moving_is_hidden():
    record = rows.read_record("trace")
    calls = {call["kernel"]: call for call in record["calls"] if call["pass"] == "fwd"}
    assert ring.PROFILED == 6 and says("04b", "One of six calls of the forward at 32k")
    assert says("04b", "The first had to wait for a rank that was late (grey), until the first block had ended.")
    fetch, relay = (calls[f"ring+{name}"]["spans"] for name in ("fetch", "relay"))
    waited = next(end - start for lane, _, start, end in fetch if lane == "waits")
    idle = next(start for _, name, start, _ in fetch if "PtoP" in name) - fetch[0][3]
    assert waited > 500 and 0 < idle < 50, "The first copy waits until after the first block, and no longer."
    hops, blocks = ([span[2:] for span in relay if word in span[1]] for word in ("nccl", "attention"))
    assert says("04b", "Over relay the first hop began before the block. The others begin when a block ends")
    assert hops[0][0] < blocks[0][0]
    assert says("04x", "a hop of NCCL's took # to # ms there", *span((end - start) / 1e3 for start, end in hops))
    assert all(abs(start - end) < 50 for (start, _), (_, end) in zip(hops[1:], blocks[1:], strict=False))


def test_what_a_layer_of_04a_keeps():
    layers, S, H, Hk, D, mlp, lse = 32, 2**20, 32, 8, 128, 14336, 4
    per_token = 2 * (2 * H + 2 * Hk) * D + lse * H + 2 * (2 * H * D + 3 * mlp)
    kept = layers * S * per_token / 1e9
    says("04a", "the rest keep # GB. An H200 has #, so it takes # of them.", kept, 141, math.ceil(kept / 141))
    says("04a", "the layers' inputs, # GB", layers * S * 2 * H * D / 1e9)
    slowest = [sum(n04a_ring.slowest_rank(kind, 8, 4)) for kind in n04a_ring.LAYOUTS]
    says("04a", "The titles add up the scores of the slowest rank: #, #, and #.", *slowest)


# --- stage 03 ---------------------------------------------------------------------------------------------------------


def test_products_of_the_backward():
    counted = [show("bwd_0_fused", name).count("tl.dot(") for name in ("visit_queries", "visit_keys")]
    says("03a", "S, dP, dV, dK: # |", counted[0])
    says("03a", "S, dP, dQ: # |", counted[1])
    assert sum(counted) == 7 and says("03a", "4 + 3 = 7 products instead of 5, and no atomics")


def test_ideas_of_the_forward_in_gluon():
    head = (rows.ROOT / "steps/step03_triton/fwd_3_gluon.py").read_text().split('"""')[1]
    (table,) = [part for part in head.split("\n\n") if part.startswith("    idea ")]
    ideas = [re.split(" {2,}", line.strip()) for line in table.splitlines()[1:]]
    assert len(ideas) > 4 and all(says("03y", f"| {idea} | {gain} |") for idea, gain in ideas)


def test_words_for_gluon_beside_its_peers():
    assert shares("fwd_3_gluon", "sdpa-cudnn", 2048, 2**14, {})[0] > 1
    short, long = (shares("fwd_3_gluon", "fa4", N, N, {"B": 2**14 // N}) for N in (1024, 2**14))
    assert short[0] > 1 > long[1]
    cudnn, fa4 = (shares("bwd_2_gluon", peer, 1024, 2**14, {}) for peer in ("sdpa-cudnn", "fa4"))
    assert cudnn[0] > 1 > fa4[1] and says("03a", "`gluon` is faster than cuDNN in both passes.")
    alt = n03y_deeper.beside_peers().alt
    assert "faster than cuDNN from N = 2048 on" in alt and "slower than FlashAttention-4 everywhere" in alt


def test_features():
    tiles = range(1, 256 + 1)  # of 64 queries; a window of an eighth is 32 tiles and a part of one
    says("03b", "a factor of #.", sum(tiles) / sum(min(n, 32 + 1) for n in tiles))
    times = {at: n03b_triton_features.milliseconds(*at) for at in itertools.product((64, 128), ("fwd", "bwd"))}
    if not all(("window", "ours") in ms for ms in times.values()):
        pytest.skip("the features have changed since they were measured")
    window = {at: ms["causal", "ours"] / ms["window", "ours"] for at, ms in times.items()}
    at_sizes = [window[D, which] for which in ("fwd", "bwd") for D in (64, 128)]
    says("03b", "Measured were # and # in the forward, and # and # in the backward", *at_sizes)
    ahead = {(feature, *at): ms[feature, "fa4"] / ms[feature, "ours"] for at, ms in times.items()
             for feature, who in ms if who == "fa4" and feature not in ("none", "causal")}  # fmt: skip
    assert says("03b", "FlashAttention-4 is faster with windows and with sinks. It is slower with a soft-cap, and with")
    faster = 100 / ahead.pop(("packed", 64, "fwd")) - 100
    assert says("03b", "except in the forward of packed sequences at head_dim 64, where it is # % faster.", faster)
    for (feature, *at), share in ahead.items():
        assert (share > 1) == (feature == "packed" or "soft-cap" in feature), (feature, at)
    in_gluon = {(feature, *at) for at, feature in itertools.product(times, n03b_triton_features.BASES)
                if n03b_triton_features.language(n03b_triton_features.last_of(feature, *at)) == "Gluon"}  # fmt: skip
    assert {("dropout", 64, "bwd"), ("dropout", 128, "bwd")} <= in_gluon and ("dropout", 64, "fwd") not in in_gluon
    spent = [times[128, "fwd"][feature, "ours"] for feature in ("dropout", "additive mask", "soft-cap", "ALiBi")]
    assert spent[0] > spent[1] > max(spent[2:])


def test_decoding():
    speeds = n03b_triton_features.bandwidths()
    both = zip(speeds["decode"], speeds["sdpa-cudnn"], strict=True)
    assert len(speeds["decode"]) == 2 and all(abs(ours / cudnn - 1) < 0.0125 for ours, cudnn in both)
    assert says("03b", "as fast as cuDNN's, within 1 %")
