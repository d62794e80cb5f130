// Puzzle 0 in the page: the reader's line is judged here, with the texts of puzzle.toml and as puzzle.py judges it.
//
// The line is not executed by the browser. It is parsed as the arithmetic of Python, and computed by `value`.
// Whoever changes puzzle.py changes this file, too: tests/test_site.py gives both the same lines.
(function () {
  const NAMES = ["l", "m", "m_new", "s"];
  const CONSTANTS = { inf: Infinity, e: Math.E };
  const MODULES = ["math", "np", "numpy", "torch"];
  const FUNCTIONS = {
    exp: (...x) => (x.length === 1 ? (x[0] > 709 ? Infinity : Math.exp(x[0])) : misused()),
    log: (x, base) => (x > 0 && !(base <= 0) ? Math.log(x) / (base === undefined ? 1 : Math.log(base)) : x === undefined ? misused() : fails()),
    max: (...x) => (x.length > 1 ? x.reduce((best, one) => (one > best ? one : best)) : misused()),
    min: (...x) => (x.length > 1 ? x.reduce((best, one) => (one < best ? one : best)) : misused()),
    abs: (...x) => (x.length === 1 ? Math.abs(x[0]) : misused()),
  };

  // An unclear line: the name of what is said about it, and what is filled into that text.
  class Unclear extends Error {
    constructor(name, filled = {}) { super(name); this.filled = filled; }
  }
  class Fails extends Error {}  // where Python would raise an error, and the result is no number

  function misused() { throw new Unclear("misused"); }
  function fails() { throw new Fails(); }
  function unreadable() { throw new Unclear("unreadable"); }
  function otherThanArithmetic() { throw new Unclear("no_arithmetic"); }

  // --- from a line to a tree ------------------------------------------------------------------------------------

  const TOKEN = /\s*(\*\*=?|\/\/=?|[<>=!]=|[-+*/%@]=|[-+*/%@<>=(),.?:[\]{}&|^~;]|(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[\p{L}_][\p{L}\p{N}_]*|"[^"]*"|'[^']*')/uy;

  function tokensOf(line) {
    const found = [];
    let at = 0;
    line = line.split("#")[0].trimEnd();
    while (at < line.length) {
      TOKEN.lastIndex = at;
      const match = TOKEN.exec(line);
      if (!match) unreadable();
      found.push(match[1]);
      at = TOKEN.lastIndex;
    }
    return found;
  }

  const STATEMENTS = ["import", "from", "for", "while", "def", "return", "class", "pass", "del", "with"];
  const BEYOND = ["[", "]", "{", "}", ":", "^", "&", "|", "~", "lambda", "not", "True", "False", "None"];

  function balanced(tokens) {
    const open = [], pairs = { ")": "(", "]": "[", "}": "{" };
    const fits = tokens.every((token) => {
      if ("([{".includes(token)) open.push(token);
      return !(token in pairs) || open.pop() === pairs[token];
    });
    return fits && !open.length;
  }

  // A node is a function of the names' values, so that an unknown name is only found when it is needed, as in Python.
  function parse(line) {
    line = line.trim().replaceAll("\u2212", "-");
    if (line.length > 300) throw new Unclear("too_long");
    const tokens = tokensOf(line);
    let at = 0;
    const peek = () => tokens[at];
    const take = (wanted) => (peek() === wanted ? Boolean(++at) : false);
    const expect = (wanted) => take(wanted) || unreadable();
    const isName = (token) => /^[\p{L}_]/u.test(token || "") && !["if", "else", "and", "or", "not", "in", "is", "lambda", "for"].includes(token);

    function ternary() {
      const a = comparison();
      if (!take("if")) return a;
      const test = comparison();
      expect("else");
      const b = ternary();
      return (names) => (test(names) ? a(names) : b(names));
    }

    function comparison() {
      const a = sum(), compare = { "<": (x, y) => x < y, "<=": (x, y) => x <= y, ">": (x, y) => x > y, ">=": (x, y) => x >= y,
        "==": (x, y) => x === y, "!=": (x, y) => x !== y }[peek()];
      if (["and", "or", "not", "in", "is"].includes(peek())) { at += 1; comparison(); return otherThanArithmetic; }
      if (!compare) return a;
      at += 1;
      const b = sum();
      if (/^([<>]=?|[=!]=)$/.test(peek() || "")) { at += 1; sum(); return otherThanArithmetic; }
      return (names) => Number(compare(a(names), b(names)));
    }

    function chain(inner, operators) {
      let a = inner();
      while (peek() in operators) {
        const operator = operators[tokens[at++]], left = a, right = inner();
        a = (names) => operator(left(names), right(names));
      }
      return a;
    }

    const sum = () => chain(product, { "+": (x, y) => x + y, "-": (x, y) => x - y });
    const product = () => chain(signed, { "*": (x, y) => x * y, "/": (x, y) => (y === 0 ? fails() : x / y),
      "%": otherThanArithmetic, "//": otherThanArithmetic, "@": otherThanArithmetic });

    function signed() {
      if (take("-")) { const a = signed(); return (names) => -a(names); }
      if (take("+")) return signed();
      const base = called();
      if (!take("**")) return base;
      const exponent = signed();
      return (names) => power(base(names), exponent(names));
    }

    function called() {
      const token = peek();
      at += 1;
      if (token === "(") {
        const inside = ternary();
        if (peek() === ",") otherThanArithmetic();
        expect(")");
        return call(inside, null);
      }
      if (/^[\d.]/.test(token || "") && token !== ".") return call(() => Number(token.replaceAll("_", "")), null);
      if (/^["']/.test(token || "")) return call(otherThanArithmetic, null);
      if (!isName(token)) return unreadable();
      if (!take(".")) return call((names) => look(token, names), token);
      const name = tokens[at++];
      if (!isName(name)) return unreadable();
      const known = MODULES.includes(token) && name in CONSTANTS;
      return call(known ? () => CONSTANTS[name] : otherThanArithmetic, MODULES.includes(token) ? name : null);
    }

    // What stands before "(" is called; what is not one of the functions cannot be.
    function call(node, name) {
      if (!take("(")) return node;
      const given = [];
      while (!take(")")) {
        given.push(ternary());
        if (peek() === "=") otherThanArithmetic();
        if (peek() !== ")") expect(",");
      }
      const known = Object.hasOwn(FUNCTIONS, name ?? "");
      return call(known ? (names) => FUNCTIONS[name](...given.map((one) => one(names))) : otherThanArithmetic, null);
    }

    const assigned = tokens[1] === "=" && isName(tokens[0]) && (tokens[0] === "l" || !NAMES.includes(tokens[0]));
    const updated = tokens[0] === "l" && /^(\*\*|[-+*/])=$/.test(tokens[1] || "");
    if (assigned || updated) at = 2;
    if (!tokens.length || STATEMENTS.includes(tokens[0])) throw new Unclear("one_expression");
    if (tokens.some((token) => BEYOND.includes(token)) && balanced(tokens)) return otherThanArithmetic;
    let tree = ternary();
    if (peek() === "=" || peek() === ";") throw new Unclear("one_expression");
    if (peek() === ",") return otherThanArithmetic;
    if (at < tokens.length) unreadable();
    if (updated) {
      const right = tree, operator = tokens[1].slice(0, -1);
      const apply = { "+": (x, y) => x + y, "-": (x, y) => x - y, "*": (x, y) => x * y, "/": (x, y) => (y === 0 ? fails() : x / y), "**": power };
      tree = (names) => apply[operator](names.l, right(names));
    }
    return tree;
  }

  function power(x, y) {
    const found = x ** y;
    if (x === 0 && y < 0 || Math.abs(found) === Infinity && Number.isFinite(x) && Number.isFinite(y)) fails();
    return x === 1 ? 1 : found;
  }

  function look(name, names) {
    if (Object.hasOwn(names, name)) return names[name];
    if (Object.hasOwn(CONSTANTS, name)) return CONSTANTS[name];
    if (Object.hasOwn(FUNCTIONS, name)) throw new Unclear("is_function", { name });
    throw new Unclear("unknown_name", { name });
  }

  // --- from a tree to a verdict ---------------------------------------------------------------------------------

  function run(tree, scores, m = -Infinity, l = 0) {
    for (const s of scores) {
      const m_new = s > m ? s : m;
      try {
        l = tree({ l, m, m_new, s });
      } catch (problem) {
        if (problem instanceof Fails) return NaN;
        throw problem;
      }
      m = m_new;
    }
    return l;
  }

  function results(tree, texts) {
    const of = (scores) => [run(tree, scores), run(tree, scores.slice(1), scores[0], 1)];
    return Object.fromEntries(Object.entries(texts.scores).map(([name, scores]) => [name, of(scores)]));
  }

  function same(some, others) {
    const near = (a, b) => a === b || Math.abs(a - b) <= 1e-9 * Math.max(Math.abs(a), Math.abs(b)) && Number.isFinite(a - b);
    return some.every((a, n) => near(a, others[n]) || Number.isNaN(a) && Number.isNaN(others[n]));
  }

  // A number as Python's format ".4g" writes (places = 4) it.
  function short(x, places) {
    if (!Number.isFinite(x)) return Number.isNaN(x) ? "nan" : x > 0 ? "inf" : "-inf";
    const [digits, power] = x.toExponential(places - 1).split("e").map(Number);
    if (x !== 0 && (power < -4 || power >= places)) return `${digits}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
    return String(Number(x.toPrecision(places)));
  }

  const written = (scores) => `[${scores.map((x) => (Number.isInteger(x) ? `${x}.0` : String(x))).join(", ")}]`;

  const filled = (text, words) => text.replace(/\{(\w+)\}/g, (_, name) => words[name]);

  // [whether the line is right, what to say about it]
  function judge(line, texts) {
    let got;
    try {
      got = results(parse(line), texts);
    } catch (problem) {
      if (problem instanceof Unclear) return [false, filled(texts.says[problem.message], problem.filled)];
      throw problem;
    }
    const sum = (scores) => scores.reduce((l, s) => l + Math.exp(s - Math.max(...scores)), 0);
    const want = Object.fromEntries(Object.entries(texts.scores).map(([name, scores]) => [name, sum(scores)]));
    const names = Object.keys(want), name = names.find((one) => !same(got[one].slice(0, 1), [want[one]]));
    if (name === undefined) return [true, texts.right];
    const numbers = { got: short(got[name][0], 4), want: short(want[name], 4) };
    const says = filled(texts.says.not_yet, { name, scores: written(texts.scores[name]), ...numbers });
    for (const [answer, words] of Object.entries(texts.mistakes)) {
      const mistaken = results(parse(answer), texts);
      if (names.every((one) => same(got[one], mistaken[one]))) return [false, `${says}\n${words}`];
    }
    if (names.every((one) => same(got[one].slice(1), [want[one]])))
      return [false, `${says}\n${texts.says.first_score}`];
    return [false, says];
  }

  // [whether m may begin with this number, what to say about it]
  function judgeStart(text, texts) {
    let start;
    try {
      text = text.replace(/float\((["'])(-?inf)\w*\1\)/, "$2").trim().replace(/^m/, "").trim().replace(/^=/, "").trim();
      start = parse(text)({});
    } catch {
      return [false, texts.says.no_number];
    }
    if (start === -Infinity) return [true, texts.next];
    if (start === 0) return [false, texts.says.start_at_0];
    return [false, filled(texts.says.start_elsewhere, { start: short(start, 6) })];
  }

  // --- in the page ----------------------------------------------------------------------------------------------

  // Asks for the line, and then for the number that m begins with. Each empty answer shows a hint.
  function puzzle(root) {
    const texts = window.PUZZLE, form = document.createElement("form"), answer = document.createElement("output");
    const questions = [
      { name: "l", judge, hints: [...texts.hints], example: "l + exp(s - m_new)", label: "your line: the new l" },
      { name: "m", judge: judgeStart, hints: [...texts.start_hints], example: "", label: "m before the first score" },
    ];
    const label = document.createElement("label"), line = document.createElement("input");
    const button = document.createElement("button");
    Object.assign(line, { size: 40, spellcheck: false, autocomplete: "off", autocapitalize: "none" });
    button.textContent = "Check";
    let question;

    function pose() {
      question = questions.shift();
      label.textContent = `${question.name} = `;
      line.value = "";
      line.placeholder = question.example;
      line.setAttribute("aria-label", question.label);
    }

    form.onsubmit = (event) => {
      event.preventDefault();
      const asked = line.value.trim() !== "";
      const [right, says] = asked ? question.judge(line.value, texts) : [false, question.hints.shift() || "That was the last hint."];
      answer.textContent = right && questions.length ? `${says}\n${texts.start}` : says;
      answer.className = right ? "right" : "";
      if (right && questions.length) pose();
    };
    pose();
    form.append(label, line, " ", button, answer);
    root.replaceChildren(form);
  }

  if (typeof module !== "undefined") module.exports = { judge, judgeStart };  // for its test
  else document.querySelectorAll(".puzzle").forEach(puzzle);
})();
