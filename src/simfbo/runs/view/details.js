// What is shown of one run: warnings and verdict, excluded replies, settings, evaluations and log;
// and of all runs the bytes by channel.

const MOST_ROWS = 200;

function showDetails(run, differ) {
  showMessages(run);
  showExcluded(run);
  showSettings(run, differ);
  showEvaluations(run);
  showLog(run);
}

// Replace what a place shows, unless that is the same: a reader may have selected some of it.
function replaceIfNew(place, content, make) {
  const key = JSON.stringify(content);
  if (place.shownContent === key) return;
  place.shownContent = key;
  place.replaceChildren(...make());
}

function showMessages(run) {
  const found = run.warnings
    .slice(-5)
    .map((line) => ["warning", `Iteration ${count(line.round)}: ${line.text}.`]);
  if (run.warned > 5)
    found.unshift(["warning", `${count(run.warned - 5)} earlier warnings are in the log.`]);
  if (run.end?.reason) found.push(["warning", `The run ${run.statusText}: ${run.end.reason}.`]);
  if (run.verdict)
    found.push([run.verdict.converged ? "good" : "warning", `${capital(run.verdict.text)}.`]);
  replaceIfNew(byId("messages"), found, () =>
    found.map(([kind, text]) => el("p", { className: `message ${kind}`, textContent: text })),
  );
}

function capital(text) {
  return String(text).charAt(0).toUpperCase() + String(text).slice(1);
}

function showExcluded(run) {
  const { total, reasons, clients, grid } = run.excluded;
  byId("excluded").hidden = total === 0;
  if (!total) return;
  const columns = [...reasons.keys()];
  const sum = (own) => [...own.values()].reduce((a, b) => a + b, 0);
  const lines = [...clients]
    .sort(([, a], [, b]) => sum(b) - sum(a))
    .slice(0, 15)
    .map(([client, own]) => [
      `client ${client}`,
      ...columns.map((reason) => count(own.get(reason) ?? 0)),
      count(sum(own)),
    ]);
  lines.push(["all clients", ...columns.map((reason) => count(reasons.get(reason))), count(total)]);
  replaceIfNew(byId("reasons"), lines, () => [
    table(["", ...columns.map((reason) => reason.replaceAll("-", " ")), "total"], lines),
    ...(clients.size > 15
      ? [
          el("p", {
            className: "quiet",
            textContent: `Of ${plural(clients.size, "client")}, the 15 with most.`,
          }),
        ]
      : []),
  ]);
  drawHeat(byId("heat"), run, grid);
}

// Clients against rounds; the darker a cell, the more replies of it were excluded.
function drawHeat(canvas, run, grid) {
  const { accent, line } = theme();
  const key = JSON.stringify([run.id, run.excluded.total, run.round, accent]);
  if (canvas.shownContent === key) return;
  canvas.shownContent = key;
  const across = Math.floor(Math.max(grid.lastRound, run.round) / grid.rounds) + 1;
  const down = Math.floor(grid.lastClient / grid.clients) + 1;
  const width = Math.min(across, COLUMNS);
  const cell = { width: 600 / width, height: Math.max(4, Math.min(18, 280 / down)) };
  canvas.width = 600;
  canvas.height = Math.ceil(cell.height * down);
  const context = canvas.getContext("2d");
  context.fillStyle = line;
  context.fillRect(0, 0, canvas.width, canvas.height);
  const most = grid.cells.reduce((a, b) => Math.max(a, b), 1);
  context.fillStyle = accent;
  grid.cells.forEach((n, i) => {
    if (!n) return;
    context.globalAlpha = 0.15 + 0.85 * (n / most);
    context.fillRect(
      (i % COLUMNS) * cell.width,
      Math.floor(i / COLUMNS) * cell.height,
      cell.width - 0.5,
      cell.height - 0.5,
    );
  });
  canvas.cell = { ...cell, grid };
  const per = grid.clients > 1 ? `${grid.clients} clients` : "one client";
  const last = Math.max(grid.lastRound, run.round);
  heatCaption =
    `Clients 0 to ${count(grid.lastClient)} downwards, iterations 0 to ${count(last)} to the right; ` +
    `a cell is ${per} in ${plural(grid.rounds, "iteration")}, the fullest has ${count(most)}.`;
  canvas.setAttribute("aria-label", heatCaption);
  if (!canvas.matches(":hover")) say(byId("heat-text"), heatCaption);
}

let heatCaption = "";

function readHeat(event) {
  const { width, height, grid } = event.target.cell ?? {};
  if (!grid) return;
  const scale = event.target.width / event.target.clientWidth;
  const column = Math.min(Math.floor((event.offsetX * scale) / width), COLUMNS - 1);
  const row = Math.min(Math.floor((event.offsetY * scale) / height), ROWS - 1);
  const [round, client] = [column * grid.rounds, row * grid.clients];
  const span = (first, n) => (n > 1 ? `${count(first)} to ${count(first + n - 1)}` : count(first));
  say(
    byId("heat-text"),
    `Client ${span(client, grid.clients)}, iteration ${span(round, grid.rounds)}: ` +
      `${count(grid.cells[row * COLUMNS + column])} excluded.`,
  );
}

function flat(tree, prefix = "") {
  return Object.entries(tree).flatMap(([key, value]) =>
    value !== null && typeof value === "object" && !Array.isArray(value)
      ? flat(value, `${prefix}${key}.`)
      : [[prefix + key, value]],
  );
}

// The settings that differ, a column for each group of runs, and all of one run.
function showSettings(run, differ) {
  const groups = [...grouped(shownRuns()).values()].slice(0, 12);
  const found = groups.map((group) => group.map((one) => new Map(flat(one.header))));
  const lines = differ
    .filter((key) => key !== "config.seed")
    .map((key) => [
      key.replace(/^config\./, ""),
      ...found.map((headers) =>
        [...new Set(headers.map((header) => setting(header.get(key))))].join(", "),
      ),
    ]);
  replaceIfNew(byId("differences"), [groups.map(([one]) => one.title), lines], () =>
    lines.length ? [table(["differs", ...groups.map(([one]) => one.title)], lines, "texts")] : [],
  );
  const all = flat(run.header)
    .filter(([key]) => key !== "kind")
    .map(([key, value]) => [key, setting(value)]);
  replaceIfNew(byId("all-settings"), all, () => [table(["setting", "value"], all, "texts")]);
}

// All values of a run; made only while they can be seen.
function showEvaluations(run) {
  const place = byId("evaluations").querySelector(".wide");
  if (!byId("evaluations").open) return;
  const points = run.points;
  const step = Math.ceil(points.length / MOST_ROWS);
  const shown = points.filter((_, i) => i % step === 0 || i === points.length - 1);
  const metrics = run.last ? metricsOf(run.last) : [];
  const lines = shown.map((record) => [
    count(record.round),
    bytes(record.bytes_down),
    bytes(record.bytes_up),
    duration(record.seconds),
    ...metrics.map((metric) => number(record[metric])),
  ]);
  replaceIfNew(place, lines, () => [
    table(["iteration", "bytes down", "bytes up", "time", ...metrics.map(words)], lines),
  ]);
}

function eventsOf(run) {
  const { algorithm = "Unknown algorithm", seed } = run.header;
  const place = live ? `, in ${run.id}` : "";
  const found = [`${algorithm}, ${count(run.rounds)} iterations, seed ${setting(seed)}${place}.`];
  if (run.resets) found.push(`Resumed while it was watched: ${plural(run.resets, "time")}.`);
  if (run.damaged)
    found.push(`${capital(plural(run.damaged, "line"))} of the history cannot be read.`);
  found.push(...run.warnings.map((line) => `Iteration ${count(line.round)}: ${line.text}.`));
  if (run.excluded.total) found.push(`${count(run.excluded.total)} replies excluded so far.`);
  if (run.last) found.push(`Last evaluation after iteration ${count(run.last.round)}.`);
  if (run.verdict) found.push(`${capital(run.verdict.text)}.`);
  found.push(`${capital(run.statusText)}${run.end?.reason ? `: ${run.end.reason}` : ""}.`);
  return found;
}

function showLog(run) {
  const events = eventsOf(run);
  replaceIfNew(byId("events"), events, () => events.map((text) => el("li", { textContent: text })));
  const log = byId("server-log");
  const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 4;
  log.hidden = !run.log;
  say(log, run.log?.text ?? "");
  if (atEnd) log.scrollTop = log.scrollHeight;
}

// Bytes by channel, both ways, a bar for each run, from the last records.
function showChannels(runs) {
  const found = runs
    .map((run) => [run, channelsOf(run)])
    .filter(([, parts]) => parts.length)
    .slice(0, 20);
  byId("channels").hidden = !found.length;
  const most = Math.max(
    1,
    ...found.map(([, parts]) => parts.reduce((sum, part) => sum + part.sent, 0)),
  );
  replaceIfNew(
    byId("channels").querySelector("div"),
    found.map(([run, parts]) => [run.name, parts]),
    () => found.map(([run, parts]) => channelRow(run, parts, most)),
  );
}

function channelsOf(run) {
  return data.channels
    .map((key) => ({ name: key.replace("bytes_", ""), sent: Number(run.last?.[key]) || 0 }))
    .filter(({ sent }) => sent > 0);
}

function channelRow(run, parts, most) {
  const bar = el("div", { className: "bar" });
  parts.forEach(({ name, sent }, i) => {
    const title = `${name}: ${bytes(sent)}`;
    const part = el("span", { className: `part channel-${i % 4}`, title });
    part.style.width = `${(100 * sent) / most}%`;
    bar.append(part);
  });
  const text = parts.map(({ name, sent }) => `${name} ${bytes(sent)}`).join(", ");
  return el(
    "div",
    { className: "channel" },
    el("div", { textContent: run.name }),
    bar,
    el("div", { className: "quiet", textContent: text }),
  );
}
