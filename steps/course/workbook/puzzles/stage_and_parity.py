"""In which stage of a ring buffer a tile lies, and with which parities its two sides wait."""

import torch

from steps.course.workbook.puzzles import Case, whole_numbers
from steps.course.workbook.puzzles._emulated import launch


def specification(tiles, stages):
    """The sum of each tile. Tile n has the numbers 4 n ... 4 n + 3, whatever the number of stages."""
    return {"sums": torch.arange(4.0 * tiles).reshape(-1, 4).sum(1)}


def stage_and_parity(n, stages):
    """(stage, the consumer's parity, the producer's parity) of tile n of a ring of `stages` stages.

    The consumer waits on full[stage] with its parity until tile n has come. The producer waits on empty[stage] with its
    parity before it copies tile n there, and for the first tile of a stage this wait has to end at once. A wait for
    parity p ends if the phase of parity p is over. On a new barrier the phase of parity 0 is running.
    """
    parity = n // stages % 2
    return n % stages, parity, parity ^ 1


def run(tiles, stages, answer=stage_and_parity):
    """{"sums": of each tile, -1 of those that were never added up; "places": what was answered}."""
    found = [whole_numbers("stage_and_parity", answer(n, stages), 3) for n in range(tiles)]
    places = torch.tensor(found, dtype=torch.int32)
    x, sums = torch.arange(4.0 * tiles), torch.full((tiles,), -1.0)
    _report[:] = [""]
    if not _unknown(places, stages):  # The kernel cannot run with a stage that does not exist.
        _report[:] = [launch("ring", x, places, sums, tiles, stages, block=64, stuck=True)]
    return {"sums": sums, "places": places}


_report = []  # what the emulation said of the last run, "" if it did not run


def _unknown(places, stages):
    """The stages among the places that do not exist."""
    return [stage for stage in places[:, 0].tolist() if not 0 <= stage < stages]


def expected(tiles, stages):
    """The sums, and the places by counting how many tiles each stage has held."""
    held, places = [0] * stages, []
    for n in range(tiles):
        stage = n % stages
        places.append([stage, held[stage] % 2, (held[stage] + 1) % 2])
        held[stage] += 1
    right = torch.tensor(places, dtype=torch.int32)
    return {"sums": (specification(tiles, stages)["sums"], 0), "places": (right, 0)}


CASES = [
    Case(f"a ring of {stages} stage{'s' * (stages > 1)}, 9 tiles", lambda stages=stages: dict(tiles=9, stages=stages))
    for stages in (1, 2, 3, 4)
]


def explain(got, want, tiles, stages):
    """The first tile that is wrong, and what happens there in the emulation."""
    wrong = (got["places"] != want["places"][0]).any(1).nonzero().flatten().tolist()
    lines = []
    for n in wrong[:1]:
        names = "stage, the consumer's parity, the producer's parity"
        lines.append(f"tile {n}: {names} = {got['places'][n].tolist()}, expected {want['places'][0][n].tolist()}")
    for stage in _unknown(got["places"], stages)[:1]:
        lines.append(f"there is no stage {stage}: the stages are 0 to {stages - 1}, so the emulation did not run")
    for n in ((got["sums"] != want["sums"][0]) & (got["sums"] != -1)).nonzero().flatten().tolist()[:1]:
        when = "before any tile had come" if got["sums"][n].isnan() else "while another tile was there"
        lines.append(f"in the emulation the consumer reads tile {n} {when}")
    return lines + [f"the emulation reports: {line}" for line in _report[0].splitlines()[:3]]


MISTAKES = {
    "parity_of_n": (
        "the parity is that of n, and not of how often the ring has gone round",
        lambda n, stages: (n % stages, n % 2, n % 2 ^ 1)),
    "parity_never_flips": (
        "the parity never flips",
        lambda n, stages: (n % stages, 0, 1)),
    "parity_of_stage": (
        "the parity is that of the stage, and not of how often the ring has gone round",
        lambda n, stages: (n % stages, n % stages % 2, n % stages % 2 ^ 1)),
    "producer_never_flips": (
        "the producer always waits for parity 1, and does not notice that a stage is still full",
        lambda n, stages: (n % stages, n // stages % 2, 1)),
    "same_parity": (
        "both sides wait for the same parity, so that the producer waits for consumers that have had nothing",
        lambda n, stages: (n % stages, n // stages % 2, n // stages % 2)),
    "parities_exchanged": (
        "the two parities are exchanged",
        lambda n, stages: (n % stages, n // stages % 2 ^ 1, n // stages % 2)),
    "stage_and_round_exchanged": (
        "the stage is the number of times that the ring has gone round, and the parity is that of the place",
        lambda n, stages: (n // stages % stages, n % stages % 2, n % stages % 2 ^ 1)),
    "div_and_mod_exchanged": (
        "div and mod are exchanged: the stage is n div stages, and the parity that of n mod stages",
        lambda n, stages: (n // stages, n % stages % 2, n % stages % 2 ^ 1)),
    "producer_one_tile_back": (
        "the producer's parity is that of the tile before, n - 1, and not of the stage's tile before, n - stages",
        lambda n, stages: (n % stages, n // stages % 2, (n - 1) // stages % 2)),
    "round_for_stage": (
        "the stage is n div stages, the number of times that the ring has gone round, and not n mod stages",
        lambda n, stages: (n // stages, n // stages % 2, n // stages % 2 ^ 1)),
}  # fmt: skip
