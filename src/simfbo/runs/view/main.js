// The page's state, its controls, and where its lines come from: the page itself or its server.

const POLL = 1000; // milliseconds between requests
const MOST_MULTIPLES = 24;
const runs = new Map();
const hidden = new Set();
const looks = new Looks(data.palette);
const chart = new Chart(byId("chart"), false);
const multiples = new Map();
const chosen = { logX: false, logY: null }; // null: as the values suggest
let differ = [];
let changed = true;

function shownRuns() {
  return [...runs.values()].filter((run) => run.seen > 0 || run.header.kind);
}

// Take an answer of the server, or what a frozen page holds.
function take(answer) {
  const found = answer.runs.map((news) => takeRun(news));
  changed ||= found.length !== runs.size;
  runs.clear(); // some may be gone, and new ones are in their place
  for (const run of found) runs.set(run.id, run);
  differ = answer.differ;
}

function takeRun(news) {
  const run = runs.get(news.id) ?? new Run(news.id);
  if (news.reset && run.at > 0) {
    run.clear();
    run.resets += 1;
  }
  changed ||= news.lines.length > 0 || news.reset || news.name !== run.name || Boolean(news.log);
  for (const line of news.lines) run.add(line);
  const { name, title, group, at, mark, idle, checkpoint } = news;
  changed ||= checkpoint !== run.checkpoint;
  Object.assign(run, { name, title, group, at, mark, idle, checkpoint: checkpoint ?? -1 });
  run.damaged += news.damaged ?? 0;
  run.log = news.log ?? run.log;
  return run;
}

// Show everything as it is now.
function render() {
  const known = shownRuns();
  byId("main").hidden = known.length === 0;
  byId("waiting").hidden = known.length > 0;
  showCounts(known);
  if (!known.length) return;
  const metrics = allMetrics(known);
  const metric = choose(byId("metric"), metrics, mainMetric(known, metrics));
  if (changed) draw(known, metrics, metric);
  changed = false;
  showRuns(known, metric);
  const names = known.map((run) => run.id);
  const focus = choose(byId("focus"), names, current(known)[0].id, (id) => runs.get(id).name);
  showDetails(runs.get(focus), differ);
}

function draw(known, metrics, metric) {
  const visibleRuns = known.filter((run) => !hidden.has(run.id));
  const options = { along: byId("along").value, seeds: byId("seeds").value };
  byId("seeds-control").hidden = [...grouped(known).values()].every((group) => group.length < 2);
  drawMain(visibleRuns, metric, options);
  drawOthers(
    visibleRuns,
    metrics.filter((name) => name !== metric).slice(0, MOST_MULTIPLES),
    options,
  );
  showChannels(visibleRuns);
}

function drawMain(visibleRuns, metric, options) {
  const { lines, logX, logY, seeds } = drawn(visibleRuns, metric, options, chosen.logY);
  byId("log-y").checked = logY;
  byId("log-x").checked = logX;
  chart.show(lines, { metric, along: options.along, logX, logY });
  say(byId("note"), noteOn(lines, seeds));
}

// The lines of a chart and its scales. An interval of the mean may reach below zero, which a
// logarithmic axis cannot show: there, bands are the range of values unless asked otherwise.
function drawn(visibleRuns, metric, options, chosenLogY) {
  const single = linesOf(visibleRuns, metric, options.along, "single");
  const logY = chosenLogY ?? spansDecades(single);
  const seeds = options.seeds === "auto" ? (logY ? "range" : "mean") : options.seeds;
  const lines = seeds === "single" ? single : linesOf(visibleRuns, metric, options.along, seeds);
  return { lines, logX: chosen.logX, logY, seeds };
}

function noteOn(lines, seeds) {
  const band =
    seeds === "range" ? "smallest to largest value" : "95 % interval of the mean (Student's t)";
  const parts = lines.some((line) => line.low)
    ? [`Lines are means over the seeds that have ended, bands the ${band}.`]
    : [];
  if (lines.some((line) => line.thin)) parts.push("Thin lines are runs in progress.");
  return [...parts, "Drag to zoom, double-click to see all."].join(" ");
}

function drawOthers(visibleRuns, metrics, options) {
  byId("others").hidden = !metrics.length;
  for (const [name, { box, small }] of multiples) {
    if (metrics.includes(name)) continue;
    small.destroy();
    box.remove();
    multiples.delete(name);
  }
  for (const metric of metrics) {
    if (!multiples.has(metric)) multiples.set(metric, multiple(metric));
    const { lines, logX, logY } = drawn(visibleRuns, metric, options, null);
    multiples.get(metric).small.show(lines, { metric, along: options.along, logX, logY });
  }
}

function multiple(metric) {
  const place = el("div");
  const box = el(
    "figure",
    { className: "card" },
    el("figcaption", { textContent: words(metric) }),
    place,
  );
  byId("multiples").append(box);
  return { box, small: new Chart(place, true) };
}

function showCounts(known) {
  const statuses = known.map((run) => run.status);
  const of = (...names) => statuses.filter((status) => names.includes(status)).length;
  const parts = [
    [of("running"), "running"],
    [of("finished"), "finished"],
    [of("interrupted", "stopped"), "stopped"],
    [of("silent"), "without news"],
    [of("diverged", "starved"), "failed"],
  ];
  const text = parts
    .filter(([n]) => n)
    .map(([n, name]) => `${n} ${name}`)
    .join(" · ");
  say(byId("counts"), text);
  document.title = `${text || "waiting"} – simfbo`;
}

function allMetrics(known) {
  return [...new Set(known.flatMap((run) => (run.last ? metricsOf(run.last) : [])))];
}

// Those in progress, if there are any: they are what a reader wants to see.
function current(known) {
  const running = known.filter((run) => run.status === "running");
  return running.length ? running : known;
}

// The metric that most tasks name as their main one.
function mainMetric(known, metrics) {
  const votes = current(known).map((run) => run.header.about?.metric);
  const voted = (name) => votes.filter((vote) => vote === name).length;
  return metrics.toSorted((one, other) => voted(other) - voted(one))[0];
}

// Fill a list of choices, keep what was chosen, and return it.
function choose(select, values, first, text = words) {
  const chosenValue = values.includes(select.value) ? select.value : first;
  replaceIfNew(
    select,
    values.map((value) => [value, text(value)]),
    () => values.map((value) => el("option", { value, textContent: text(value) })),
  );
  if (chosenValue !== undefined) select.value = chosenValue;
  return chosenValue;
}

function toggle(id) {
  if (!hidden.delete(id)) hidden.add(id);
  again();
}

function highlight(id) {
  const run = id === null || hidden.has(id) ? null : runs.get(id);
  for (const one of charts) one.highlight(run);
}

function again() {
  changed = true;
  render();
}

async function ask() {
  const seen = Object.fromEntries(
    [...runs.values()].map(({ id, at, mark, log }) => [id, { at, mark, log: log?.stamp }]),
  );
  const response = await fetch("lines", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(seen),
  });
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

// Follow the runs. The server is left in peace for longer than it takes to answer.
async function follow() {
  const start = performance.now();
  let pause = POLL;
  let answer = null;
  try {
    answer = await ask();
    take(answer);
    const more = answer.runs.some((run) => run.more);
    pause = more ? 0 : Math.max(POLL, 5 * (performance.now() - start));
    connected(answer.hidden ? `${count(answer.hidden)} older runs are not shown` : "", true);
    if (!document.hidden && !more) render();
  } catch (error) {
    connected(
      answer === null && error instanceof TypeError
        ? "The server has stopped; waiting for it."
        : `Something cannot be shown: ${error.message}`,
      false,
    );
    pause = 2 * POLL;
  }
  setTimeout(follow, document.hidden ? Math.max(pause, 5 * POLL) : pause);
}

function connected(text, well) {
  document.body.dataset.connection = well ? "live" : "lost";
  say(byId("connection"), text);
}

function listen() {
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  for (const id of ["metric", "along", "seeds", "focus"]) byId(id).addEventListener("input", again);
  byId("metric").addEventListener("input", () => {
    chosen.logY = null;
  });
  byId("log-x").addEventListener("input", (event) => {
    chosen.logX = event.target.checked;
    again();
  });
  byId("log-y").addEventListener("input", (event) => {
    chosen.logY = event.target.checked;
    again();
  });
  byId("chart").addEventListener("dblclick", () => chart.zoomOut());
  byId("evaluations").addEventListener("toggle", render);
  byId("heat").addEventListener("pointermove", readHeat);
  byId("heat").addEventListener("pointerleave", () => say(byId("heat-text"), heatCaption));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const one of charts) one.shape = null;
    again();
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) again();
  });
  new ResizeObserver(() => {
    for (const one of charts) one.resize();
  }).observe(document.body);
}

function showComparison(lines) {
  if (!lines.length) return;
  byId("comparison").hidden = false;
  const head = Object.keys(lines[0]);
  byId("comparison")
    .querySelector(".wide")
    .append(
      table(
        head,
        lines.map((line) => head.map((key) => line[key])),
        "texts",
      ),
    );
}

listen();
if (live) {
  follow();
} else {
  take({ ...data, runs: data.runs.map((run, i) => ({ ...run, id: `${i}` })) });
  showComparison(data.table);
  render();
}
// For tests: what the page holds and shows.
window.view = {
  size: () => [...runs.values()].map((run) => run.points.length),
  labels: () => chart.labels.map((label) => label.text),
  range: () => chart.range(),
  lines: () => chart.lines.map(({ name, x, y, low, high }) => ({ name, x, y, low, high })),
  student,
};
