// Numbers, sizes and times as text, and elements made of text. Nothing here parses HTML: names of
// runs, metrics, settings and reasons may be anything.

const UNITS = ["B", "kB", "MB", "GB", "TB"];

function words(name) {
  return String(name).replaceAll("_", " ");
}

function count(value) {
  return Number.isFinite(value) ? value.toLocaleString("en") : "–";
}

function number(value, digits = 4) {
  if (!Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    return value
      .toExponential(digits - 1)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  }
  return String(Number(value.toPrecision(digits)));
}

function bytes(value) {
  if (!Number.isFinite(value)) return "–";
  let unit = 0;
  while (Math.abs(value) >= 999.5 && unit < UNITS.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${Number(value.toPrecision(3))} ${UNITS[unit]}`;
}

function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  if (seconds < 48 * 3600) return `${Math.round(seconds / 360) / 10} h`;
  return `${Math.round(seconds / 86400)} d`;
}

function plural(n, word) {
  return `${count(n)} ${word}${n === 1 ? "" : "s"}`;
}

// Any value of a setting.
function setting(value) {
  return typeof value === "string" ? value : (JSON.stringify(value) ?? "–");
}

// An element with properties and children; texts become text.
function el(tag, properties = {}, ...children) {
  const found = Object.assign(document.createElement(tag), properties);
  found.append(...children);
  return found;
}

function byId(id) {
  return document.getElementById(id);
}

// Change a text only if it is another one, so that a reader's selection stays.
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// A table of texts, the first row as its head.
function table(head, rows, className = "") {
  const line = (cells, tag) => el("tr", {}, ...cells.map((cell) => el(tag, { textContent: cell })));
  return el(
    "table",
    { className },
    el("thead", {}, line(head, "th")),
    el("tbody", {}, ...rows.map((row) => line(row, "td"))),
  );
}
