// What charts are marked with: labels, readings and the places of a logarithmic axis.

// A place on the horizontal axis, in words.
function placeText(along, x) {
  if (along === "bytes") return `${bytes(x)} sent`;
  if (along === "seconds") return `${duration(x)}`;
  return `${along === "round" ? "iteration" : "communication round"} ${count(Math.round(x))}`;
}

function reading(line, i, colours) {
  const value = number(line.y[i]);
  const band =
    line.low && line.high[i] > line.low[i]
      ? ` (${number(line.low[i], 3)} to ${number(line.high[i], 3)})`
      : "";
  const found = el("div", { textContent: `${line.name}: ${value}${band}` });
  found.style.color = visible(look(line).colour, colours.card, 4.5);
  return found;
}

function look(line) {
  return looks.of(line.runs[0]);
}

function nearest(values, x) {
  let best = -1;
  for (let i = 0; i < values.length; i += 1) {
    if (best < 0 || Math.abs(values[i] - x) < Math.abs(values[best] - x)) best = i;
  }
  return best;
}

// The last point of a line within the part that is shown.
function lastShown(line, zoom, { logX, logY }) {
  for (let i = line.y.length - 1; i >= 0; i -= 1) {
    const [x, y] = [line.x[i], line.y[i]];
    const inside = !zoom || (x >= zoom[0] && x <= zoom[1]);
    if (inside && y !== null && (x > 0 || !logX) && (y > 0 || !logY)) return { x, y };
  }
  return null;
}

// Move labels up and down until they have some distance, within limits.
function apart(labels, top, bottom, distance) {
  const sorted = labels.toSorted((one, other) => one.y - other.y);
  const most = Math.max(1, Math.floor((bottom - top) / distance));
  const kept = sorted.slice(0, most);
  kept.forEach((label, i) => {
    label.y = Math.max(label.y, i ? kept[i - 1].y + distance : top + 6);
  });
  for (
    let i = kept.length - 1, limit = bottom - 4;
    i >= 0;
    i -= 1, limit = kept[i + 1].y - distance
  ) {
    kept[i].y = Math.min(kept[i].y, limit);
  }
  return kept;
}

function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let kept = text;
  while (kept && context.measureText(`${kept}…`).width > width) kept = kept.slice(0, -1);
  return `${kept}…`;
}

// Powers of ten, as many as there is room for; in short ranges 2 and 5 times these, or fewer.
function logSplits(plot, key) {
  const { min, max } = plot.scales[key];
  const [low, high] = [Math.log10(min), Math.log10(max)];
  const length = (key === "x" ? plot.bbox.width / 70 : plot.bbox.height / 30) / devicePixelRatio;
  const step = Math.max(1, Math.ceil((high - low) / length));
  const factors =
    high - low > 2.5 || step > 1
      ? [1]
      : high - low > 0.7
        ? [1, 2, 5]
        : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
  const found = [];
  for (let power = Math.floor(low / step) * step; power <= high; power += step) {
    found.push(...factors.map((factor) => factor * 10 ** power));
  }
  return found.filter((value) => value >= min && value <= max);
}
