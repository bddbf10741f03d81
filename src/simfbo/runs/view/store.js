// What is known of each run, kept from the lines of its history. However long a run is, this takes
// a bounded amount of memory: records are thinned, excluded replies are counted in a grid.

const data = JSON.parse(byId("data").textContent);
const live = data.live;
const MOST_POINTS = 4000;
const MOST_CLIENTS = 1000;
const MOST_EVENTS = 200;
const RECENT = 10; // records that say how fast a run is
const ROWS = 64;
const COLUMNS = 96;
const TEXTS = new Set(["algorithm", "reason", "status", "text"]);
const BOOKKEEPING = new Set(["kind", ...data.bookkeeping]); // what records hold besides metrics

// Counts by client and round, in cells that become larger as they must.
class Grid {
  constructor() {
    this.cells = new Uint32Array(ROWS * COLUMNS);
    this.rounds = 1; // per cell
    this.clients = 1;
    this.lastRound = 0;
    this.lastClient = 0;
  }

  add(round, client, n) {
    while (Math.floor(round / this.rounds) >= COLUMNS) this.fold(1, 2);
    while (Math.floor(client / this.clients) >= ROWS) this.fold(2, 1);
    this.cells[this.index(round, client)] += n;
    this.lastRound = Math.max(this.lastRound, round);
    this.lastClient = Math.max(this.lastClient, client);
  }

  index(round, client) {
    return Math.floor(client / this.clients) * COLUMNS + Math.floor(round / this.rounds);
  }

  // Make cells twice as high or wide.
  fold(high, wide) {
    const folded = new Uint32Array(ROWS * COLUMNS);
    this.cells.forEach((n, i) => {
      const row = Math.floor(Math.floor(i / COLUMNS) / high);
      folded[row * COLUMNS + Math.floor((i % COLUMNS) / wide)] += n;
    });
    this.cells = folded;
    this.clients *= high;
    this.rounds *= wide;
  }
}

class Run {
  constructor(id) {
    this.id = id;
    this.at = 0;
    this.mark = "";
    this.log = null;
    this.idle = 0;
    this.checkpoint = -1;
    this.resets = 0;
    this.clear();
  }

  clear() {
    this.header = {};
    this.records = []; // every `stride`-th of them
    this.stride = 1;
    this.seen = 0;
    this.last = null;
    this.recent = [];
    this.best = new Map(); // smallest and largest value of each metric
    this.excluded = { total: 0, reasons: new Map(), clients: new Map(), grid: new Grid() };
    this.warnings = [];
    this.warned = 0;
    this.verdict = null;
    this.end = null;
    this.damaged = 0;
  }

  add(given) {
    const line = tidied(given);
    if (line.kind === "header") this.header = line;
    else if (line.kind === "record") this.addRecord(line);
    else if (line.kind === "refusal") this.addRefusal(line);
    else if (line.kind === "warning") this.addWarning(line);
    else if (line.kind === "verdict") this.verdict = line;
    else if (line.kind === "end") this.end = line;
  }

  addRecord(line) {
    this.last = line;
    this.recent = [...this.recent.slice(1 - RECENT), { round: line.round, seconds: line.seconds }];
    if (this.seen % this.stride === 0) this.keep(line);
    this.seen += 1;
    for (const metric of metricsOf(line)) {
      const value = line[metric];
      const { low, high } = this.best.get(metric) ?? { low: Infinity, high: -Infinity };
      if (value !== null) {
        this.best.set(metric, { low: Math.min(low, value), high: Math.max(high, value) });
      }
    }
  }

  // Beyond a number of points, only every second one stays, and of those to come likewise.
  keep(line) {
    this.records.push(line);
    if (this.records.length > MOST_POINTS) {
      this.records = this.records.filter((record, i) => i % 2 === 0);
      this.stride *= 2;
    }
  }

  addRefusal(line) {
    const n = Number.isInteger(line.count) ? line.count : 1;
    const { reasons, clients, grid } = this.excluded;
    const { reason } = line;
    this.excluded.total += n;
    if (reasons.has(reason) || reasons.size < 50) {
      reasons.set(reason, (reasons.get(reason) ?? 0) + n);
    }
    if (!Number.isSafeInteger(line.client) || line.client < 0) return;
    if (!Number.isSafeInteger(line.round) || line.round < 0) return;
    grid.add(line.round, line.client, n);
    if (!clients.has(line.client) && clients.size >= MOST_CLIENTS) return;
    const own = clients.get(line.client) ?? new Map();
    if (own.has(reason) || own.size < 50) own.set(reason, (own.get(reason) ?? 0) + n);
    clients.set(line.client, own);
  }

  addWarning(line) {
    this.warned += 1;
    if (this.warnings.length < MOST_EVENTS) this.warnings.push(line);
  }

  // All that is drawn of the records: those kept, and the last one.
  get points() {
    const kept = this.records;
    if (!this.last || kept[kept.length - 1]?.round === this.last.round) return kept;
    return [...kept, this.last];
  }

  get round() {
    return Math.max(this.last?.round ?? 0, this.end ? 0 : this.checkpoint);
  }

  get rounds() {
    return Number.isFinite(this.header.rounds) ? this.header.rounds : null;
  }

  // Seconds between records, as far as is known.
  get interval() {
    const [one, other] = this.recent.slice(-2);
    return other ? other.seconds - one.seconds : 0;
  }

  get status() {
    if (this.end) return this.end.status;
    if (!live) return "stopped";
    return this.idle <= 30 + 3 * this.interval ? "running" : "silent";
  }

  get statusText() {
    const status = this.status;
    if (status === "silent") return `no news for ${duration(this.idle)}`;
    return status === "stopped" ? "stopped without an end record" : status;
  }

  get secondsLeft() {
    const [first, last] = [this.recent[0], this.recent[this.recent.length - 1]];
    if (this.status !== "running" || this.rounds === null || !last) return null;
    const pace = (last.seconds - first.seconds) / (last.round - first.round);
    return Number.isFinite(pace) ? pace * (this.rounds - this.round) : null;
  }
}

// A line whose texts are texts and whose numbers are numbers, whatever somebody wrote into it.
function tidied(line) {
  const right =
    line.kind === "record"
      ? (value, key) => (key === "kind" || typeof value === "number" ? value : null)
      : (value, key) => (TEXTS.has(key) ? asText(value) : value);
  const found = Object.fromEntries(
    Object.entries(line).map(([key, value]) => [key, right(value, key)]),
  );
  if (line.kind === "end") found.status = asText(line.status);
  if (line.kind === "header") found.about = aboutOf(line.about);
  return found;
}

function asText(value) {
  return typeof value === "string" ? value : (JSON.stringify(value) ?? "");
}

function aboutOf(about) {
  const { metric, goal, colour, maximise } = about ?? {};
  const found = { metric: asText(metric), goal: asText(goal), colour: asText(colour) };
  return Array.isArray(maximise) ? { ...found, maximise } : found;
}

function metricsOf(record) {
  return Object.keys(record).filter((key) => {
    const value = record[key];
    return !BOOKKEEPING.has(key) && (value === null || typeof value === "number");
  });
}

// Whether a metric should be large, as the run's task says; by its name where that says nothing.
function isMaximised(run, metric) {
  const about = run.header.about ?? {};
  if (about.metric === metric) return about.goal === "max";
  if (Array.isArray(about.maximise)) return about.maximise.includes(metric);
  return /(accuracy|auc)$/.test(metric) || metric === "irrelevant_shut";
}
