// The table of runs: one row each, changed in place so that focus and pointer stay where they are.

const CELLS = ["look", "name", "status", "progress", "left", "value", "best", "bytes", "seconds"];
const rows = new Map();

function showRuns(runs, metric) {
  const place = byId("rows");
  if (!place.firstChild) place.append(tableOfRuns());
  const body = place.querySelector("tbody");
  for (const run of runs) {
    if (!rows.has(run.id)) rows.set(run.id, rowOf(run));
    fill(rows.get(run.id), run, metric);
  }
  for (const id of rows.keys()) if (!runs.some((run) => run.id === id)) rows.delete(id);
  const wanted = runs.map((run) => rows.get(run.id).row);
  if (wanted.length !== body.children.length || wanted.some((row, i) => row !== body.children[i])) {
    body.replaceChildren(...wanted);
  }
  say(place.querySelector(".value"), words(metric ?? ""));
}

function tableOfRuns() {
  const titles = ["", "run", "status", "progress", "time left", "", "best", "bytes", "time"];
  const head = titles.map((text, i) =>
    el("th", { textContent: text, className: CELLS[i], scope: "col" }),
  );
  return el("table", { className: "runs" }, el("thead", {}, el("tr", {}, ...head)), el("tbody"));
}

function rowOf(run) {
  const cells = Object.fromEntries(CELLS.map((name) => [name, el("td", { className: name })]));
  const parts = {
    cells,
    row: el("tr", {}, ...Object.values(cells)),
    swatch: el("span", { className: "swatch" }),
    toggle: el("button", { type: "button", className: "toggle" }),
    bar: el("progress", { max: 1 }),
    rounds: el("span"),
    mark: el("span", { className: "status-mark" }),
    text: el("span"),
  };
  cells.look.append(parts.toggle);
  parts.toggle.append(parts.swatch, el("span", { className: "number" }));
  cells.progress.append(parts.bar, parts.rounds);
  cells.status.append(parts.mark, parts.text);
  parts.row.addEventListener("click", () => toggle(run.id));
  parts.row.addEventListener("pointerenter", () => highlight(run.id));
  parts.row.addEventListener("pointerleave", () => highlight(null));
  parts.toggle.addEventListener("focus", () => highlight(run.id));
  parts.toggle.addEventListener("blur", () => highlight(null));
  return parts;
}

function fill(parts, run, metric) {
  const { cells } = parts;
  const { colour, number: n, dash } = looks.of(run);
  parts.row.classList.toggle("off", hidden.has(run.id));
  parts.toggle.setAttribute("aria-pressed", String(!hidden.has(run.id)));
  parts.toggle.setAttribute("aria-label", `Show ${run.name}`);
  parts.swatch.style.background = sample(visible(colour, theme().card, 3), dash);
  say(parts.toggle.lastChild, String(n));
  say(cells.name, run.name);
  cells.name.title = run.id;
  fillStatus(parts, run);
  fillProgress(parts, run);
  fillNumbers(cells, run, metric);
}

function fillStatus(parts, run) {
  parts.mark.dataset.status = parts.row.dataset.status = run.status;
  const notes = [
    run.warned && plural(run.warned, "warning"),
    run.excluded.total && `${count(run.excluded.total)} excluded`,
    run.damaged && plural(run.damaged, "damaged line"),
  ].filter(Boolean);
  say(parts.text, [run.statusText, ...notes].join(", "));
}

function fillProgress(parts, run) {
  const total = run.rounds;
  parts.bar.hidden = total === null;
  parts.bar.value = total ? Math.min(1, run.round / total) : 0;
  parts.bar.setAttribute("aria-label", `Progress of ${run.name}`);
  say(parts.rounds, total === null ? count(run.round) : `${count(run.round)} of ${count(total)}`);
}

function fillNumbers(cells, run, metric) {
  const best = run.best.get(metric);
  const good = best && (isMaximised(run, metric) ? best.high : best.low);
  const left = run.secondsLeft;
  say(cells.left, left === null ? "" : duration(left));
  say(cells.value, number(run.last?.[metric] ?? NaN));
  say(cells.best, number(good ?? NaN));
  say(cells.bytes, bytes(run.last ? ALONG.bytes(run.last) : NaN));
  say(cells.seconds, duration(run.last?.seconds ?? NaN));
}
