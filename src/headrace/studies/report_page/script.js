"use strict";

// Everything that reaches the page here goes through textContent: text of a world or a policy is never markup.
function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick" || name === "onchange") node[name] = value;
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

// --- theme -------------------------------------------------------------------------------------------------------------

(function theme() {
  const root = document.documentElement;
  let stored = null;
  try { stored = localStorage.getItem("headrace-theme"); } catch { /* opened from a file, storage refused */ }
  if (stored) root.dataset.theme = stored;
  document.getElementById("theme").onclick = () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("headrace-theme", root.dataset.theme); } catch { /* as above */ }
  };
})();

// --- values under the pointer ------------------------------------------------------------------------------------------

for (const plot of document.querySelectorAll(".plot")) {
  const chart = JSON.parse(plot.dataset.chart);
  const [low, high] = chart.x;
  const stops = [...new Set(chart.series.flatMap((series) => series.x))].sort((a, b) => a - b);
  let added = [];
  const clear = () => { added.forEach((node) => node.remove()); added = []; };
  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const wanted = low + ((event.clientX - box.left) / box.width) * (high - low);
    const x = stops.reduce((best, stop) => (Math.abs(stop - wanted) < Math.abs(best - wanted) ? stop : best), stops[0]);
    const left = (100 * (x - low)) / (high - low);
    clear();
    added.push(make("span", { class: "cursor", style: `left:${left}%` }));
    const tip = make("div", { class: "tip" }, make("b", {}, `${chart.xLabel} ${x}`));
    const single = new Map(); // a thin line's value stands in brackets behind the bold line of the same name
    for (const series of chart.series) {
      const i = series.x.indexOf(x);
      if (i < 0 || series.text[i] === null) continue;
      if (series.style === "faint") { single.set(series.label, series.text[i]); continue; }
      added.push(make("span", { class: `point c${series.colour}`, style: `left:${left}%;top:${series.top[i]}%` }));
      const own = single.has(series.label) ? ` (this update ${single.get(series.label)})` : "";
      tip.append(make("div", {}, make("i", { class: `swatch c${series.colour}` }), `${series.label} `, make("b", {}, series.text[i]), own));
    }
    added.push(tip);
    plot.append(...added);
    const spare = left > 50 ? `right:${100 - left + 2}%` : `left:${left + 2}%`;
    tip.setAttribute("style", spare);
    // On a narrow screen neither side may have room: keep the box inside the window.
    const place = tip.getBoundingClientRect();
    const overflow = Math.max(0, place.right - (innerWidth - 6)) - Math.max(0, 6 - place.left);
    if (overflow) tip.style.transform = `translateX(${-overflow}px)`;
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", clear);
}

// --- the browser of attempts -------------------------------------------------------------------------------------------

(function browser() {
  const source = document.getElementById("attempt-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const root = document.getElementById("attempts");
  const state = { run: "", update: "", kind: "", result: "", current: 0, tab: "conversation" };
  const signed = (number) => (number > 0 ? "+" : number < 0 ? "−" : "") + Math.abs(number).toFixed(2);
  const words = (name) => name.replaceAll("_", " ");

  const list = make("ul", { class: "list" });
  const detail = make("div", { class: "detail" });
  const count = make("span", { class: "count" });
  const chooser = (key, label, options) => {
    const select = make("select", { onchange: () => { state[key] = select.value; state.current = 0; draw(); } });
    select.append(make("option", { value: "" }, "all"), ...options.map(([value, text]) => make("option", { value }, text)));
    return make("label", {}, label, select);
  };
  const distinct = (key) => [...new Set(data.attempts.map((attempt) => attempt[key]))];
  const updates = distinct("update").sort((a, b) => a - b).map((update) => [update, update]);
  const kinds = distinct("kind").sort().map((kind) => [kind, words(kind)]);
  const filters = make("div", { class: "filters" },
    data.runs.length > 1 ? chooser("run", "run", data.runs.map((name, i) => [i, name])) : null,
    chooser("update", "update", updates),
    kinds.length > 1 ? chooser("kind", "kind", kinds) : null,
    chooser("result", "result", [["yes", "reached the goal"], ["no", "did not"]]),
    count);
  root.append(filters, make("div", { class: "browser" }, list, detail));

  const matches = (attempt) =>
    (state.run === "" || attempt.run === Number(state.run)) &&
    (state.update === "" || attempt.update === Number(state.update)) &&
    (state.kind === "" || attempt.kind === state.kind) &&
    (state.result === "" || attempt.success === (state.result === "yes"));

  function draw() {
    const found = data.attempts.filter(matches);
    count.textContent = `${found.length} shown`;
    list.replaceChildren(...found.map((attempt, i) => entry(attempt, i)));
    if (found.length) drawDetail(found[state.current]);
    else detail.replaceChildren("No attempt matches these filters.");
  }

  function entry(attempt, i) {
    const name = data.runs.length > 1 ? `${data.runs[attempt.run]} · ` : "";
    const button = make("button", { type: "button", "aria-current": i === state.current, title: attempt.task, onclick: () => { state.current = i; draw(); } },
      make("span", { class: attempt.success ? "yes" : "no" }, attempt.success ? "✓" : "✗"),
      make("span", {}, words(attempt.kind)),
      make("span", { class: "num", title: "normalized advantage" }, signed(attempt.advantage)),
      make("small", {}, `${name}update ${attempt.update} · attempt ${attempt.dispatch}`));
    return make("li", {}, button);
  }

  function drawDetail(attempt) {
    const pairs = [
      ["outcome", attempt.outcome], ["ended by", words(attempt.reason)],
      attempt.value === null ? null : ["expected (frozen value)", `${attempt.value.toFixed(3)} on evidence of ${attempt.evidence}`],
      attempt.group === null ? null : ["group", attempt.group],
      attempt.value === null ? null : ["raw advantage", signed(attempt.outcome - attempt.value)],
      ["advantage used", signed(attempt.advantage)], ["action tokens", attempt.actionTokens],
      ["sent out under", `version ${attempt.version}${attempt.staleness ? `, ${attempt.staleness} behind` : ""}`],
      attempt.unmatched ? ["not understood", `${attempt.unmatched} actions`] : null,
    ].filter(Boolean);
    const tab = (key, label) => make("button", { type: "button", role: "tab", "aria-selected": state.tab === key, onclick: () => { state.tab = key; drawDetail(attempt); } }, label);
    detail.replaceChildren(
      make("h3", {}, attempt.task),
      make("dl", { class: "pairs" }, ...pairs.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value))))),
      make("div", { class: "tabs", role: "tablist" }, tab("conversation", "Conversation"), tab("tokens", "Tokens trained on")),
      ...(state.tab === "conversation" ? conversation(attempt) : tokens(attempt)));
  }

  function conversation(attempt) {
    return attempt.turns.flatMap(([observation, action]) =>
      [make("p", { class: "turn world" }, observation), make("p", { class: "turn policy" }, action)]);
  }

  function tokens(attempt) {
    const table = data.tokens[attempt.run];
    const total = attempt.rows.reduce((sum, row) => sum + row.ids.length, 0);
    const note = make("p", { class: "token-note" }, make("i", {}, "marked"), ` tokens were written by the policy and trained on: ${attempt.actionTokens} of ${total}. The stronger the mark, the less likely the token was.`);
    if (table.some(([, text]) => text === null)) note.append(" The run has no tokenizer yet, so ids stand in for text.");
    return [note, ...attempt.rows.flatMap((row, i) => [
      attempt.rows.length > 1 ? make("p", { class: "token-note" }, `Row ${i + 1} of ${attempt.rows.length}`) : null,
      tokenRow(row, table)].filter(Boolean))];
  }

  function tokenRow(row, table) {
    const box = make("div", { class: "tokens" });
    let place = 0, sampled = 0;
    row.mask.forEach((length, run) => {
      for (const end = place + length; place < end; place += 1) {
        const [id, text, special] = table[row.ids[place]];
        const shown = text === null ? `${id} ` : text.replaceAll("\n", "⏎\n");
        const span = make("span", { class: (run % 2 ? "trained" : "") + (special ? " special" : ""), title: `token ${id}` }, shown);
        if (run % 2) {
          const logprob = row.logprobs[sampled];
          sampled += 1;
          span.title = `token ${id}, probability ${Math.exp(logprob).toPrecision(3)} (log ${logprob}), version ${row.versions.join(", ")}`;
          span.style.setProperty("--surprise", Math.min(1, -logprob / 4));
        }
        box.append(span);
      }
    });
    return box;
  }

  draw();
})();
