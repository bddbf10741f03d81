// From runs to the lines of a chart: one for each run, or one for the seeds of a group together.

// Student's t for a 95 % interval, by degrees of freedom from 1 on.
const STUDENT = [12.706, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.306, 2.2622, 2.2281];

function student(freedom) {
  if (freedom <= STUDENT.length) return STUDENT[freedom - 1];
  const z = 1.959964; // the first terms of its expansion, right to four digits here
  return (
    z +
    (z ** 3 + z) / (4 * freedom) +
    (5 * z ** 5 + 16 * z ** 3 + 3 * z) / (96 * freedom ** 2) +
    (3 * z ** 7 + 19 * z ** 5 + 17 * z ** 3 - 15 * z) / (384 * freedom ** 3)
  );
}

const ALONG = {
  round: (record) => record.round,
  communication_rounds: (record) => record.communication_rounds,
  bytes: (record) => record.bytes_up + record.bytes_down,
  seconds: (record) => record.seconds,
};

// The lines of a metric. In a group of several seeds, the mean is that of the runs that have ended,
// as far as the shortest goes; runs in progress are drawn on their own, thin.
function linesOf(runs, metric, along, seeds) {
  const lines = [];
  for (const group of grouped(runs.filter((run) => run.best.has(metric))).values()) {
    const ended = group.filter((run) => run.end);
    const averaged = seeds !== "single" && group.length > 1 ? ended : [];
    const alone = group.filter((run) => !averaged.includes(run));
    if (averaged.length) lines.push(meanLine(averaged, metric, along, seeds));
    for (const run of alone) {
      lines.push({ ...ownLine(run, metric, along), thin: seeds !== "single" && group.length > 1 });
    }
  }
  return lines;
}

function grouped(runs) {
  const found = new Map();
  for (const run of runs) found.set(run.group, [...(found.get(run.group) ?? []), run]);
  return found;
}

function ownLine(run, metric, along) {
  const points = run.points;
  return {
    runs: [run],
    name: run.name,
    x: points.map(ALONG[along]),
    y: points.map((record) => record[metric] ?? null),
  };
}

function meanLine(runs, metric, along, seeds) {
  const line = { runs, name: runs[0].title, seeds, x: [], y: [], low: [], high: [] };
  for (const records of together(runs)) {
    const values = records.map((record) => record[metric] ?? null);
    const { middle, low, high } = spread(values, seeds);
    line.x.push(mean(records.map(ALONG[along])));
    line.y.push(middle);
    line.low.push(low);
    line.high.push(high);
  }
  return line;
}

// The records of several runs, side by side, at the rounds that all of them have.
function together(runs) {
  const [first, ...others] = runs.map((run) => run.points);
  const byRound = others.map((points) => new Map(points.map((record) => [record.round, record])));
  const shared = first.filter((record) => byRound.every((known) => known.has(record.round)));
  return shared.map((record) => [record, ...byRound.map((known) => known.get(record.round))]);
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

// The mean and its band; a value that is missing leaves a gap.
function spread(values, seeds) {
  if (values.includes(null)) return { middle: null, low: null, high: null };
  const middle = mean(values);
  if (seeds === "range") {
    return { middle, low: Math.min(...values), high: Math.max(...values) };
  }
  const n = values.length;
  const square = values.reduce((sum, value) => sum + (value - middle) ** 2, 0);
  const half = n < 2 ? 0 : student(n - 1) * Math.sqrt(square / (n - 1) / n);
  return { middle, low: middle - half, high: middle + half };
}

// Logarithmic where values are positive and span more than two decades, as in our figures.
function spansDecades(lines) {
  let [low, high] = [Infinity, 0];
  for (const line of lines) {
    for (const value of line.y) {
      if (value === null) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  return low > 0 && high > 100 * low;
}

// The smallest and largest value that an axis must show. Intervals of a mean do not count: those of
// few seeds may reach far beyond the lines.
function limits(lines, key, logarithmic) {
  let [low, high] = [Infinity, -Infinity];
  for (const line of lines) {
    const shown = key === "y" && line.seeds === "range" ? [line.low, line.high] : [line[key]];
    for (const value of shown.flat()) {
      if (!Number.isFinite(value) || (logarithmic && value <= 0)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) return logarithmic ? [0.1, 1] : [0, 1];
  if (low === high) return logarithmic ? [low / 2, high * 2] : padded(low, high, 1);
  if (key === "x") return [low, high];
  return logarithmic ? [low / 1.2, high * 1.2] : padded(low, high, 0.05 * (high - low));
}

function padded(low, high, room) {
  return [low - room, high + room];
}
