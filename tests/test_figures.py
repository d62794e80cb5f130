"""What notebooks draw of recorded rows: tables of the ring, simulate.py's model beside them, sweeps, bars."""

import functools
import itertools
import json
import re
from dataclasses import replace

import pytest
import typer

from steps.course.bench import report, ring, rows
from steps.course.bench.cost import Point
from steps.course.bench.ring import FETCH, ONE, PEERS, RELAY
from steps.course.figures import (
    measured,
    n00_naive,
    n01_fa1_numba,
    n02d_hopper,
    n02x_deeper,
    n03a_triton_kernels,
    n04a_ring,
    planted,
    plots,
    ring_tables,
)
from steps.course.figures.picture import picture
from steps.course.figures.ring_tables import TABLES
from steps.course.workbook import edited
from steps.step00_naive import fwd_3_tiled
from steps.step01_fa1_numba import fwd_0_published
from steps.step02_fa2_cuda import emulator
from steps.step04_ring import Layout, simulate
from support.made_rows import ORIGIN, ladder_rows, of_02, peer_row, row

LARGE = ring.CASES["32k"][0]


def turned(who, **options):
    """A candidate of the ring whose rows tell these options."""
    return who, options


def made(case, who, ms, pass_="fwd", n_gpus=2, run="r1", **more):
    """A row of several GPUs."""
    who, options = who if isinstance(who, tuple) else (who, case.options(who))
    origin = ORIGIN | {"n_gpus": n_gpus, "run": run}
    row = ring.row_of(case, who, pass_, [ms, ms, ms, ms, 1.5 * ms], 1, 0.0, origin)
    return row | {"options": options} | more


def hop(transport, nbytes, ms):
    """A row of a message to the next rank."""
    times = dict(ms_median=ms, ms_p20=ms, ms_p80=ms, ms_worst=ms, reps=100, tflops=0.0, error=0.0)
    sizes = Point(1, 1, nbytes // 256, 128).sizes
    return peer_row(peer="copy", n_gpus=2, options={"transport": transport}, **sizes, **times, **{"pass": "copy"})


def of_one_gpu():
    """Blocks as fast as 100 TFLOP/s at all sizes."""
    plain = dict(n_gpus=1, layout=None, kernel="fwd_8_hopper", tflops=100.0, reps=30)
    small = replace(LARGE, point=Point(1, 16, 4096, 128))
    sizes = itertools.product((False, True), ("fwd", "bwd"))
    return [made(small, ONE, 1.0, **plain) | {"causal": causal, "pass": pass_} for causal, pass_ in sizes]


FREE = [hop(t, n, 1e3 * (n / 1e15 + 1e-9)) for t in simulate.TRANSPORTS for n in (4096, 2**20, 2**28)]


def test_predictions_stand_beside_what_was_measured():
    """Of the lengths that do not wait for the host. The hops are those of two GPUs."""
    seconds = LARGE.point.flops("fwd") / 2 / 100e12
    short = replace(LARGE, point=replace(LARGE.point, N=2**13))
    rings = [made(LARGE, FETCH, 1e3 * seconds), made(short, FETCH, 1.0), made(LARGE, RELAY, 500 * seconds, n_gpus=4)]
    head, *lines = ring_tables.predictions([*of_one_gpu(), *FREE, *rings])
    assert head[-1] == "32k" and lines == [
        ["2 H200", "fwd", "32", "fetch", f"{1e3 * seconds:.3g} (+0%)"],
        ["4 H200", "fwd", "32", "relay", f"{500 * seconds:.3g} (+1%)"],
    ]
    assert ring_tables.predictions(rings) == [], "there are neither blocks nor hops"


def test_the_table_of_speed_compares_within_one_race():
    contiguous = ring.CASES["32k"][3]
    found = [made(LARGE, ONE, 20.0), made(LARGE, RELAY, 12.5), made(LARGE, FETCH, 10.0), made(LARGE, PEERS[0], 16.0)]
    found += [made(contiguous, ONE, 30.0), made(contiguous, FETCH, 20.0)]
    found.append(made(ring.CASES["8k"][0], turned(FETCH, graph=True), 1.0))
    found += [made(LARGE, FETCH, 99.0, run="r2"), made(LARGE, turned(FETCH, changed="nothing"), 1.0)]
    found += [made(LARGE, who, ms, n_gpus=4) for who, ms in ((RELAY, 8.0), (ONE, 40.0), (FETCH, 20.0))]
    found.append(made(LARGE, FETCH, 77.0, gpu="NVIDIA H100 80GB HBM3"))
    head, *lines = ring_tables.ring_speed(found)
    assert head == ["GPUs", "causal", "Hk", "by", "32k"], "neither graphs nor changed rings"
    words = {(line[0], line[3]): line[4] for line in lines}
    assert words["2 H200", "one GPU"] == "20" and words["2 H200", "fetch"] == "10 (1.00)"
    assert words["2 H200", "relay"] == "12.5 (0.80)" and words["2 H200", "torch, allgather"] == "16 (0.62)"
    assert words["4 H200", "fetch"] == "20 (0.50)" and lines[0][0] == "2 H100"
    assert [line[3] for line in lines][1:4] == ["one GPU", "fetch", "relay"]
    assert not ring_tables.ring_speed([made(LARGE, ONE, 1.0, n_gpus=1)])


def test_the_ring_stands_beside_one_gpu_in_either_order():
    kinds = {"deterministic": True}, {"deterministic": False}, {"graph": True}
    in_order, any_order, graph = (turned(who, **how) for who, how in zip((ONE, FETCH, FETCH), kinds, strict=True))
    large = [(ONE, 20.0), (in_order, 24.0), (FETCH, 12.5), (any_order, 10.0)]
    found = [made(LARGE, FETCH, 1.0, run="r0")]
    found += [made(LARGE, who, ms) for who, ms in large]
    found += [made(ring.CASES["8k"][0], who, 3.0, run="r2") for who in (graph, FETCH)]
    head, *lines = ring_tables.ring_orders(found)
    words = {line[3]: line[4:] for line in lines}
    assert head[4:] == ["32k"] and words["one GPU"] == ["20"] and words["one GPU, in order"] == ["24"]
    assert words["fetch"] == ["12.5 (0.80, 0.96)"] and words["fetch, any order"] == ["10 (1.00, 1.20)"]
    head, *lines = ring_tables.ring_graphs(found)
    assert head[4:] == ["8k"] and [line[3:] for line in lines] == [["fetch", "3"], ["fetch, in a graph", "3"]]


def test_the_page_of_results_has_no_table_of_a_run_that_is_gone():
    assert report.EMPTY not in (rows.COMMITTED / "README.md").read_text()


def outputs(stem):
    return (rows.ROOT / "notebooks" / f"{stem}.ipynb").read_text()


def test_the_notebooks_show_every_table_of_what_is_recorded_as_it_is_now():
    text = outputs("04b_strategies") + outputs("04x_deeper")
    tables = {name: ring_tables.recorded("H200") for name in TABLES} | {"graphs": ring_tables.recorded()}
    tables |= {name: ring_tables.recorded("H200", n_gpus=4) for name in ("speed", "strategies")}
    for name, found in tables.items():
        assert ring_tables.shown(name, of_one_gpu()).startswith("Not recorded yet.")
        for line in ring_tables.shown(name, found).splitlines():
            assert json.dumps(line)[1:-1] in text or json.dumps(line, ensure_ascii=False)[1:-1] in text, (name, line)


def of_four(table, n_gpus=4):
    """A ring_tables table of H200 as {(pass, Hk, who, N): word}, of so many GPUs."""
    head, *lines = TABLES[table](ring_tables.recorded("H200", n_gpus))
    if not lines:
        pytest.skip("the ring has changed since it was measured")
    return {(*line[1:4], N): word for line in lines for N, word in zip(head[4:], line[4:], strict=True) if word != "–"}


def shares_of(words, number=0):
    """The first, or another, of the numbers in each word's brackets, from the least to the largest."""
    return sorted(word.split("(")[1].strip(")").split(", ")[number] for word in words if "(" in word)


def test_the_efficiency_s_picture_has_a_line_for_everybody(monkeypatch):
    drawn = []
    monkeypatch.setattr(ring_tables, "picture", lambda fig, alt: drawn.extend((fig.axes, alt)))
    ring_tables.efficiency()
    axes, words = drawn
    assert [ax.get_title("left") for ax in axes] == [f"{n}k positions" for n in (8, 32, 128)]
    for ax, N in zip(axes, ("8k", "32k", "128k"), strict=True):
        lines = {line.get_label(): [f"{y:.2f}" for y in line.get_ydata()] for line in ax.lines}
        for who, found in lines.items():
            table = [shares_of([of_four("speed", n)["fwd+bwd", "32", who, N]])[0] for n in (2, 4)]
            assert found == ["1.00", *table] and f"{who}, {N}, 4 GPUs: {table[1]}" in words
        assert len(lines) == 4


def test_the_trace_is_drawn_as_long_as_the_ring_is_as_it_was(monkeypatch, capsys):
    record, drawn = rows.read_record("trace"), []
    monkeypatch.setattr(ring_tables, "code_hash", lambda stage, kernel: record["source"][kernel])
    monkeypatch.setattr(ring_tables, "picture", lambda fig, alt: drawn.extend((fig.axes, alt)))
    ring_tables.recorded_call()
    axes, words = drawn
    calls = {call["kernel"].removeprefix("ring+"): call for call in record["calls"] if call["pass"] == "fwd"}
    for ax, name in zip(axes, ("relay", "fetch"), strict=True):
        title, spans = ax.get_title("left"), calls[name]["spans"]
        assert len(ax.patches) == len(spans) and title in words
        told = [text.get_text() for text in ax.texts]
        long = [lane == "moves" and end - start > 300 for lane, _, start, end in spans]
        assert [word == "K, V" for word in told] == long, "a barrier moves nothing"
        # A title is about what is drawn, and not about the mean of all calls.
        assert title.startswith(f"{name}: {max(end for *_, end in spans) / 1e3:.3g} ms, ")
    monkeypatch.undo()
    monkeypatch.setattr(ring_tables, "code_hash", lambda stage, kernel: "of another version")
    assert ring_tables.recorded_call() is None and capsys.readouterr().out.startswith("No trace")


def test_a_rank_has_one_colour_in_all_figures():
    """simulate.py may be used without steps/course/figures, so that it has the colours once more."""
    assert simulate.RANK == tuple((colour, plots.ink_on(colour)) for colour in plots.RANK)


def test_a_kernel_of_stage_03_has_one_colour_and_no_other_kernel_has_it():
    kernels = [*n03a_triton_kernels.RUNGS["forward"], *n03a_triton_kernels.RUNGS["backward"]]
    colours = {(kernel.split("_", 2)[2], plots.colour_of(kernel)) for kernel in kernels}
    assert len(colours) == len(dict(colours)) == len({colour for _, colour in colours}) == 4


def test_mistakes_of_04a_are_seen_where_its_answer_says():
    def no_diagonal(layout, me, src, work=Layout.work):
        return (found := work(layout, me, src)) and (*found[:2], False)

    words = n04a_ring.mistakes_seen(no_diagonal, Layout.work).splitlines()
    assert [line.split() for line in words[1:]] == [["no_diagonal", "-", *["all"] * 3], ["work", *"----"]]
    assert words[1] in outputs("04a_ring")
    assert re.search(r"key_too_many +- +- +- +all", outputs("04a_ring"))


def test_shares_are_of_one_run_and_one_size_and_the_last_run_counts():
    def ours(tflops, **at):
        return of_02("fwd_2_mma", tflops=tflops, **at)

    def theirs(tflops, **at):
        return peer_row(peer="fa4", tflops=tflops, **at)

    late, larger = dict(run="r2"), dict(N=1024, Nk=1024)
    found = [ours(5.0, **late), ours(3.0), theirs(6.0), theirs(4.0, **late), ours(6.0, **larger), theirs(8.0, **larger)]
    found += [ours(1.0, D=128), theirs(4.0, D=128), ours(9.0, causal=True), theirs(9.0, causal=True, **late)]
    found += [ours(2.0, options={"window": 8}), ours(2.0, D=256), ours(1.0, N=2048)]
    assert [share for _, share in measured.beside(found, ("fwd_2_mma",), "fa4")] == [1.25, 0.75, 0.25]
    assert measured.shares(found, ("fwd_2_mma",), "fa4").splitlines() == [
        "of fa4              N =   512   1024",
        "fwd_2_mma  D = 64   full  1.25  0.75",
        "fwd_2_mma  D = 128  full  0.25  –",
    ]
    assert measured.shares(found, ("fwd_2_mma",), "flex") == "no rows of fwd_2_mma beside flex"
    itself = measured.beside(found, ("fwd_2_mma",), "fwd_2_mma")
    assert {share for _, share in itself} == {1.0}


def test_a_rung_s_line_compares_it_in_one_run_with_the_rung_below_and_the_fastest_peer():
    at = dict(D=128, N=4096, Nk=4096)
    found = [of_02("fwd_2_mma", tflops=20.0, **at), of_02("fwd_5_fa2", tflops=50.0, **at)]
    found += [peer_row(peer=name, tflops=tflops, **at) for name, tflops in (("sdpa-flash", 80.0), ("fa4", 100.0))]
    found += [of_02("fwd_0_scalar", tflops=1.0, **at), of_02("fwd_9_next", tflops=1.0, **at)]
    found += [of_02("fwd_5_fa2", tflops=70.0, run="r2", **at)]  # it has no company
    line, where = measured.rung("fwd_5_fa2", found).splitlines()
    assert line == "fwd_5_fa2: 50 TFLOP/s, 2.50 x fwd_2_mma, 0.50 of fa4" and "NVIDIA H200, bf16, D = 128" in where
    assert measured.rung("fwd_0_scalar", found).startswith("fwd_0_scalar: 1 TFLOP/s, 0.01 of fa4")
    assert measured.rung("fwd_5_fa2", found[-1:]).startswith("fwd_5_fa2: 70 TFLOP/s\n")
    assert "not measured as it is now" in measured.rung("fwd_5_fa2", found, N=512)
    on_h100 = [one | {"gpu": measured.H100.name, "run": "r9", "tflops": 40.0} for one in found]
    assert measured.rung("fwd_5_fa2", on_h100 + found).splitlines() == [line, where]
    for all_or_some, gpu in ((on_h100, None), (on_h100 + found, measured.H100)):
        assert "(NVIDIA H100 80GB HBM3, bf16" in measured.rung("fwd_5_fa2", all_or_some, gpu=gpu)


def test_the_forgotten_shift_fails_where_notebooks_00_and_01_say():
    told = n00_naive.contract(mask=lambda S, i, j, shift, mask=fwd_3_tiled.mask: mask(S, i, j, 0))
    assert [line.split()[1:4] for line in told.splitlines()[1:]] == [["causal", "with", n] for n in ("fewer", "more")]
    assert "fails" not in n00_naive.contract()
    causal = "ragged_causal", "fewer_queries_causal", "more_queries_causal"
    shift_forgotten = fwd_0_published.cuda.jit(device=True)(lambda j, Nq, Nk, Br, causal: j // Br * Br if causal else 0)
    told = n01_fa1_numba.cases_of_the_contract(*causal, first_query_tile=shift_forgotten)
    assert [line.split()[1] for line in told.splitlines()[1::2]] == ["passes", "FAILS", "passes"]
    assert "FAILS" not in n01_fa1_numba.cases_of_the_contract(*causal)


def test_a_picture_has_words_and_letters_that_can_be_read():
    wide, narrow = plots.plt.figure(figsize=(12, 2)), plots.plt.figure(figsize=(6, 2))
    for fig in (wide, narrow):
        fig.text(0, 0, "a label", fontsize=10)
    assert picture(narrow, "words").alt == "words"
    with pytest.raises(ValueError, match="below 9 points.*'a label'"):
        picture(wide, "words")
    with pytest.raises(ValueError, match="alt text"):
        picture(narrow, " ")


def test_speeds_of_one_run_are_of_the_last_run_that_measured_them_all():
    at = dict(D=128, N=4096, Nk=4096)
    found = [of_02("fwd_5_fa2", tflops=10.0, **at), peer_row(peer="fa3", tflops=20.0, **at)]
    late = [of_02("fwd_5_fa2", tflops=30.0, run="r2", **at), of_02("fwd_5_fa2", tflops=1.0, N=512, run="r2")]
    both = functools.partial(measured.of_one_run, found=[*found, *late])
    assert both("fwd_5_fa2", "fa3") == {"fwd_5_fa2": 10.0, "fa3": 20.0}
    assert both("fwd_5_fa2") == {"fwd_5_fa2": 30.0} and not both("fa4")
    assert not both("fwd_5_fa2", gpu=measured.H100)


def test_turns_hide_what_lockstep_does_not():
    """The shares that 02d's picture of the model names."""
    for clocks, shares in (((512, 512, 288), (0.39, 0.78)), ((1024, 512, 320), (0.55, 1.0))):
        work = dict(zip(("products", "exp", "float32"), clocks, strict=True))
        for turns, share in zip((n02d_hopper.lockstep, n02d_hopper.ping_pong), shares, strict=True):
            spans = turns(work, 100)
            assert 200 * clocks[0] / max(end for *_, end in spans) == pytest.approx(share, abs=0.01)
    served = sorted(span[2:] for span in spans if span[0] == "products")
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(served)), "one at a time"


def test_bars_show_every_number():
    bars = measured.speed_bars([row(), peer_row(tflops=9.0)]).axes[0]
    assert [bar.get_width() for bar in bars.patches] == [3.0, 9.0]


def test_the_ladder_shows_each_rung_once_says_what_differs_and_has_the_peers_of_one_run():
    more = [
        of_02("fwd_2_mma", N=4096, D=64, tflops=1.0),  # there is one with D=128
        of_02("fwd_2_mma", N=512, D=128, tflops=2.0),
        of_02("fwd_2_mma", N=4096, D=128, causal=True, tflops=3.0),
        row(stage="03_triton", kernel="fwd_0_fused", N=4096, D=128, tflops=5.0),
        peer_row(N=4096, D=64, tflops=6.0),
        of_02("fwd_2_mma", gpu="Tesla T4", N=4096, D=128, tflops=7.0),
        peer_row(N=4096, Nk=4096, D=128, tflops=9.0, run="another"),  # beside other kernels
    ]
    elsewhere = [one | {"gpu": "NVIDIA H100 80GB HBM3", "run": "later"} for one in ladder_rows()]
    under_load = of_02("fwd_2_mma", N=4096, D=128, tflops=8.0, timing="sustained")
    some = [*ladder_rows(), *more, *elsewhere, *ladder_rows(), under_load]
    assert plots.ladder_numbers(more) is None and plots.ladder_numbers(some) == {
        "gpu": "NVIDIA H200",
        "matmul": 800.0,
        "fwd": {"rungs": [["scalar", 4.0, "fp32\nD=64"], ["mma", 50.0, ""]], "peers": {"sdpa-flash": 340.0}},
        "bwd": {"rungs": [["scalar", 1.5, "fp32\nD=64"]], "peers": {}},
    }
    forward, backward = plots.ladder(plots.ladder_numbers(ladder_rows())).axes
    assert [bar.get_height() for bar in forward.patches] == [4.0, 50.0] and forward.lines[0].get_ydata()[0] == 340
    assert [bar.get_height() for bar in backward.patches] == [1.5]
    (narrow,) = plots.ladder_narrow(plots.ladder_numbers(ladder_rows())).axes
    assert [bar.get_width() for bar in narrow.patches] == [4.0, 50.0, 1.5]


def test_the_ladder_is_drawn_again_when_its_numbers_change(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "fresh", lambda found, root: found)
    monkeypatch.setattr(plots, "PICTURES", {"02_fa2_cuda": "pictures/ladder.png"})
    for speed in (50.0, 60.0):
        for one in ladder_rows(tflops=speed):
            rows.append(one, tmp_path / "steps/course/bench/results")
        with pytest.raises(typer.Exit):
            plots.main(check=True, root=tmp_path)
        plots.main(root=tmp_path)
        plots.main(check=True, root=tmp_path)
        assert plots.numbers_in(tmp_path / "pictures/ladder.png")["fwd"]["rungs"][1][1] == speed


# --- what 02a, 02b and 02c say -------------------------------------------------------------------------------


def test_a_compiler_joins_four_loads_of_rung_scalar_as_02a_and_02b_say():
    code = n02x_deeper.machine_code("scalar", 64)
    if not code:
        pytest.skip("needs nvdisasm, which Triton's package brings for Linux")
    loads = [line.split()[0] for line in code if "LDS" in line]
    assert loads.count("LDS.128") > len(loads) / 2


@pytest.mark.skipif(not emulator.available(), reason="needs g++")
def test_a_planted_text_that_no_compiler_takes_is_no_mistake_that_a_case_sees():
    x, want = planted.prepared("one_key", "scalar", tile=(16, 16))
    with edited("fwd_0_scalar.cu", ("m = -INFINITY, l = 0;", "m = ;")), pytest.raises(RuntimeError, match="expected"):
        planted.verdict(x, want, "scalar")
    zero = {"m": ("m = -INFINITY, l = 0;", "m = 0, l = 0;")}
    seen = planted.killed("scalar", zero, ["negative_row"], [{}], tile=(16, 16))
    assert seen == {("m", "negative_row"): ["wrong"]}
