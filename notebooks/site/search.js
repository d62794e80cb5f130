// How the search sorts its results: a notebook before a page, a page before a file of code.
var Scorer = {
  score: ([page, , , , score]) => score + (page.startsWith("notebooks/0") ? 40 : /^(steps|tests|reference)\//.test(page) ? -10 : 10),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
