// Draws the gallery: a choice for each property, and a bar for each kernel and peer at one length.
(function () {
  const room = document.getElementById("gallery"), charts = window.CHARTS || [];
  const properties = ["gpu", "stage", "pass", "head_dim", "mask"], chosen = {};
  Object.assign(chosen, { gpu: "H200", pass: "forward", head_dim: 128 });  // what stands there at first, if it is there
  const names = { fa3: "FlashAttention-3", fa4: "FlashAttention-4", "sdpa-cudnn": "cuDNN", "sdpa-flash": "FlashAttention-2" };
  const words = { gpu: "GPU", head_dim: "head_dim", N: "tokens" };
  if (!charts.length) { room.textContent = "Nothing is measured yet."; return; }

  function element(name, text, parent) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  function fitting(names) {
    return charts.filter((chart) => names.every((name) => chart[name] === chosen[name]));
  }

  // What can be chosen of a property, where the properties before it are as chosen.
  function choices(name, n) {
    return [...new Set(fitting(properties.slice(0, n)).map((chart) => chart[name]))];
  }

  function chooser(name, values, parent) {
    const label = element("label", (words[name] || name) + " ", parent), select = element("select", undefined, label);
    for (const value of values) element("option", value, select).value = value;
    if (!values.includes(chosen[name])) chosen[name] = values.includes(4096) ? 4096 : values[0];
    select.value = chosen[name];
    select.onchange = () => { chosen[name] = values[select.selectedIndex]; draw(name); };
    return select;
  }

  function draw(focused) {
    room.replaceChildren();
    const form = element("p", undefined, room);
    form.className = "choices";
    const selects = {};
    properties.forEach((name, n) => { selects[name] = chooser(name, choices(name, n), form); });
    const [chart] = fitting(properties);
    const lengths = [...new Set(Object.values(chart.speeds).flatMap((one) => Object.keys(one).map(Number)))];
    selects.N = chooser("N", lengths.sort((a, b) => a - b), form);
    const bars = Object.entries(chart.speeds).filter(([, at]) => at[chosen.N])
      .map(([name, at]) => [name, at[chosen.N]]).sort((a, b) => b[1] - a[1]);
    const table = element("table", undefined, room);
    table.className = "bars";
    element("caption", `TFLOP/s, ${chart.pass}, bf16, ${chart.mask}, N = ${chosen.N}`, table);
    for (const [name, speed] of bars) {
      const row = element("tr", undefined, table), cell = (element("th", names[name] || name, row), element("td", undefined, row));
      const bar = element("span", "", cell);
      bar.className = chart.ours.includes(name) ? "bar ours" : "bar";
      bar.style.width = `${(80 * speed) / bars[0][1]}%`;
      element("span", ` ${speed}`, cell);
    }
    element("p", `${chart.date}; ${chart.versions}`, room).className = "about";
    if (focused) selects[focused].focus();
  }

  draw();
})();
