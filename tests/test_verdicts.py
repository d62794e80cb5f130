"""Rules of verdicts that hold for every exercise, whatever a reader writes."""

import pytest

from reference import error, mutants
from steps.workbook import edges, exercises, jobs, one_rung
from steps.workbook.exercises import Exercise

TASKS = exercises.load()
EXERCISES = {id: task for id, task in TASKS.items() if isinstance(task, Exercise)}


# What the contract kills, the exercise's own cases kill.

# What a mutant changes: the steps of mutants.Forward, Backward and Ring that it overrides, by the part they belong to.
PARTS = {
    "heads": "key_head sum_heads",
    "scale": "choose_scale score_scale",
    "scale of a gradient": "dq_scale dk_scale",
    "tiles of keys": "key_tiles load end_of_keys",
    "mask": "positions hidden hidden_score mask_causal",
    "keys beyond the last": "mask_tail",
    "softmax": "m_start maximum unit exp alpha probabilities rescale_l add_to_l rescale_O update",
    "division in each tile": "multiply_back normalise_step",
    "division at the end": "divide finish",
    "sums": "accumulator",
    "operand": "operand mixed_up",
    "delta": "delta",
    "dS": "gradient returned",
    "dk and dv": "dk_product dv_product untransposed add",
    "dq": "add_dq",
    "merge": "weight next_lse merge",
    "ring": "steps held seen",
}
PART_OF = {step: part for part, steps in PARTS.items() for step in steps.split()}
# The parts that an exercise's function computes. It cannot make a mistake in another part, which the stage hands it.
MAKES = {
    "00.1": {"softmax", "division at the end"},
    "00.2": {"softmax", "operand", "sums"},
    "00.3": {"mask"},
    "00.4": {"softmax", "scale", "mask", "dS"},
    "01.1": {"softmax", "operand", "sums", "division in each tile", "division at the end"},
    "01.2": {"softmax", "operand", "sums", "division in each tile"},
    "01.3": {"dS"},
    "02.1": {"softmax", "operand", "sums", "division in each tile"},
    "02.2": {"dq", "scale of a gradient"},
    "02.3": {"delta"},
    "02.4": set(),  # an address
    "02.5": {"operand"},
    "02.6": {"tiles of keys"},
    "02.7": set(),  # an address
    "03.1": {"mask", "keys beyond the last"},
    "03.2": {"softmax", "mask", "dS"},
    "03.3": {"softmax", "operand", "sums"},
    "04.1": {"merge"},
    "04.3": set(),  # a table, all of whose entries parts.py compares
}
# {exercise: {mutants: why its function cannot make them, although it computes that part}}
CANNOT = {
    "02.1": {"no_guard masked_row_not_guarded": "it is called only for rows that see a key of the tile"},
    "02.2": {"dk_scale_missing": "it adds to dq alone"},
    "03.2": {"no_guard_in_backward": "a row that sees no key has lse_2 = +inf, for which P is 0"},
}


def steps_of(kind):
    """The names of the steps that a mutant overrides."""
    right = mutants.Forward, mutants.Backward, mutants.Ring
    own = [part for part in kind.__mro__ if part not in (*right, object)]
    names = {name for part in own for name in vars(part) if not name.startswith("_")}
    return names - {"check", "run", "variants", "needs_lse"}


def mutants_of(task):
    """The mutants that the exercise's function can make."""
    kind = mutants.Backward if task.path.stem.startswith("bwd") else mutants.Forward
    cannot = {name for names in CANNOT.get(task.id, ()) for name in names.split()}
    for mutant in mutants.MUTANTS:
        parts = {PART_OF[step] for step in steps_of(mutant.kind)}
        if issubclass(mutant.kind, kind) and parts <= MAKES[task.id] and mutant.name not in cannot:
            yield mutant


@pytest.mark.parametrize("id", EXERCISES)
def test_what_the_contract_kills_the_exercise_s_own_cases_kill(id):
    """Each mutant that the function can make, by the results that the check looks at."""
    task = EXERCISES[id]
    supports = one_rung.supports_of(one_rung.stage(task.stage), task.rung)
    names = error.NAMES[2:] if task.path.stem.startswith("bwd") else error.NAMES[:2]

    def kills(mutant, inputs, want):
        tile = task.tile or inputs.tile or supports["tiles"][0]
        try:
            got = mutant.run(inputs, tile, task.order or supports["order"])
        except mutants.NotApplicable:
            return False
        return bool(error.failures({name: got[name] for name in names}, want))

    left = list(mutants_of(task))
    asked = [*task.cases, *(name for name in task.edges if name not in edges.EDGES)]
    for _, inputs, want in jobs._cases({"cases": asked}, supports) if left else ():
        left = [mutant for mutant in left if not kills(mutant, inputs, want)]
    contract = mutants._prepared(supports) if left else ()
    missed = {m.name: case.name for case, *x in contract for m in left if kills(m, *x)}
    assert not missed, "these mutants are killed by these cases of the contract, and by none of the exercise's own"
