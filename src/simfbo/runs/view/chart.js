// A chart: uPlot draws axes and lines, each with its own horizontal values; bands, labels at the
// lines' ends and the readings under the pointer are drawn here.

const FONT = "12px system-ui, sans-serif";
const FADED = 0.18;
const charts = new Set();

class Chart {
  // `small` charts have numbers as labels and no readings.
  constructor(place, small) {
    Object.assign(this, { place, small, lines: [], labels: [], plot: null, zoom: null });
    this.highlighted = null;
    this.tip = el("div", { className: "tip", hidden: true });
    charts.add(this);
  }

  // Draw lines; options are `metric`, `along`, `logX` and `logY`.
  show(lines, options) {
    const shape = JSON.stringify([options, lines.map((line) => [line.name, look(line)])]);
    this.lines = lines;
    this.options = options;
    this.place.dataset.lines = lines.length;
    if (!lines.length) return this.clear();
    if (shape !== this.shape) this.zoom = null;
    if (shape === this.shape && this.plot) this.plot.setData(this.data(), true);
    else this.build();
    this.shape = shape;
    this.describe();
  }

  clear() {
    this.plot?.destroy();
    Object.assign(this, { plot: null, shape: null, labels: [] });
    this.place.removeAttribute("aria-label");
  }

  // Make the plot anew, as a change of lines, axes, width or colours demands.
  build() {
    this.plot?.destroy();
    this.theme = theme();
    this.width = Math.max(this.place.clientWidth, 200);
    this.plot = new uPlot(this.setup(), this.data(), this.place);
    if (!this.small) this.plot.over.append(this.tip);
  }

  describe() {
    const text =
      `${words(this.options.metric)}: ` +
      this.lines.map((line) => `${line.name} ${number(line.y[line.y.length - 1])}`).join("; ");
    this.place.setAttribute("role", "img");
    this.place.setAttribute("aria-label", text);
  }

  data() {
    return [null, ...this.lines.map((line) => this.positive([line.x, line.y]))];
  }

  // On a logarithmic axis, what is not positive leaves a gap.
  positive([x, y]) {
    const { logX, logY } = this.options;
    if (!logX && !logY) return [x, y];
    const kept = x.map((value, i) => i).filter((i) => !logX || x[i] > 0);
    return [kept.map((i) => x[i]), kept.map((i) => (logY && !(y[i] > 0) ? null : y[i]))];
  }

  setup() {
    const { logX, logY } = this.options;
    const height = this.small ? 170 : Math.min(420, Math.max(260, this.width * 0.42));
    return {
      mode: 2,
      width: this.width,
      height,
      legend: { show: false },
      padding: [10, this.room(), 0, 0],
      cursor: { show: !this.small, y: false, points: { show: false }, drag: { x: true, y: false } },
      scales: {
        x: { time: false, distr: logX ? 3 : 1, range: () => this.range() },
        y: { distr: logY ? 3 : 1, range: () => limits(this.inView(), "y", logY) },
      },
      axes: [this.axis("x", logX), this.axis("y", logY)],
      series: [{}, ...this.lines.map((line) => this.series(line))],
      hooks: {
        drawAxes: [() => this.drawBands()],
        draw: [() => this.drawLabels()],
        setCursor: [() => this.read()],
        setSelect: [() => this.zoomIn()],
      },
    };
  }

  series(line) {
    const { colour, dash } = look(line);
    return {
      stroke: visible(colour, this.theme.card, 3),
      width: line.thin ? 1 : 2,
      dash: DASHES[dash],
      paths: uPlot.paths.linear(),
      points: { show: false },
      alpha: this.alpha(line),
      facets: [
        { scale: "x", auto: true },
        { scale: "y", auto: true },
      ],
    };
  }

  axis(key, logarithmic) {
    const { quiet, line } = this.theme;
    const format = key === "x" && this.options.along === "bytes" ? bytes : (v) => number(v, 6);
    return {
      scale: key,
      stroke: quiet,
      font: FONT,
      size: key === "x" ? 24 : 58,
      gap: 4,
      space: key === "x" ? 70 : 34,
      grid: { stroke: line, width: 1 },
      ticks: { show: false },
      values: (plot, splits) => splits.map((value) => (value === null ? "" : format(value))),
      ...(logarithmic
        ? { splits: (plot) => logSplits(plot, key), filter: (plot, all) => all }
        : {}),
    };
  }

  // The part of the horizontal axis that is shown.
  range() {
    return this.zoom ?? limits(this.lines, "x", this.options.logX);
  }

  // The lines, as far as they are within the part that is shown.
  inView() {
    if (!this.zoom) return this.lines;
    const [low, high] = this.zoom;
    const within = (line, values) =>
      values?.filter((_, i) => line.x[i] >= low && line.x[i] <= high);
    return this.lines.map((line) => ({
      seeds: line.seeds,
      y: within(line, line.y),
      low: within(line, line.low),
      high: within(line, line.high),
    }));
  }

  zoomIn() {
    const { left, width } = this.plot.select;
    if (width < 4) return;
    this.zoom = [left, left + width].map((at) => this.plot.posToVal(at, "x"));
    this.plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.plot.setData(this.data(), true);
  }

  zoomOut() {
    this.zoom = null;
    this.plot?.setData(this.data(), true);
  }

  // Fade all lines but those of a run; null shows all.
  highlight(run) {
    if (this.highlighted === run || !this.plot) return;
    this.highlighted = run;
    this.lines.forEach((line, i) => {
      this.plot.series[i + 1].alpha = this.alpha(line);
    });
    this.plot.redraw(false);
  }

  alpha(line) {
    return this.highlighted && !line.runs.includes(this.highlighted) ? FADED : 1;
  }

  drawBands() {
    for (const line of this.lines.filter((one) => one.low)) {
      const context = this.clipped();
      context.globalAlpha = 0.16 * this.alpha(line);
      context.fillStyle = visible(look(line).colour, this.theme.card, 3);
      context.fill(this.bandPath(line));
      context.restore();
    }
  }

  clipped() {
    const { ctx, bbox } = this.plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    return ctx;
  }

  bandPath(line) {
    const { logX, logY } = this.options;
    const floor = logY ? this.plot.scales.y.min / 10 : -Infinity;
    const shown = line.x
      .map((x, i) => i)
      .filter((i) => line.low[i] !== null && !(logX && line.x[i] <= 0));
    const at = (i, value) => [
      this.plot.valToPos(line.x[i], "x", true),
      this.plot.valToPos(Math.max(value, floor), "y", true),
    ];
    const path = new Path2D();
    for (const i of shown) path.lineTo(...at(i, line.high[i]));
    for (const i of shown.toReversed()) path.lineTo(...at(i, line.low[i]));
    return path;
  }

  // The width that labels take on the right.
  room() {
    if (this.usesNumbers()) return 26;
    const context = (this.tip.context ??= document.createElement("canvas").getContext("2d"));
    context.font = FONT;
    const widest = Math.max(0, ...this.lines.map((line) => context.measureText(line.name).width));
    return Math.min(widest + 14, this.width * 0.24);
  }

  usesNumbers() {
    return this.small || this.width < 560;
  }

  // Names at the ends of lines, pushed apart where they would overlap.
  drawLabels() {
    const { ctx, bbox } = this.plot;
    const ratio = devicePixelRatio;
    this.labels = apart(this.ends(), bbox.top, bbox.top + bbox.height, 14 * ratio);
    ctx.save();
    ctx.font = FONT.replace("12", String(12 * ratio));
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    for (const label of this.labels) {
      this.drawLabel(ctx, label, bbox.left + bbox.width + 6 * ratio, (this.room() - 10) * ratio);
    }
    ctx.restore();
  }

  drawLabel(ctx, { line, text, from, y }, x, width) {
    ctx.fillStyle = ctx.strokeStyle = visible(look(line).colour, this.theme.card, 4.5);
    ctx.globalAlpha = this.alpha(line);
    ctx.fillText(shortened(ctx, text, width), x, y);
    ctx.globalAlpha *= 0.4;
    ctx.beginPath();
    ctx.setLineDash([1, 3]);
    ctx.moveTo(...from);
    ctx.lineTo(x - 2, y);
    ctx.stroke();
  }

  // Where lines end, in pixels of the canvas, and what is said there.
  ends() {
    const place = ({ x, y }) => [
      this.plot.valToPos(x, "x", true),
      this.plot.valToPos(y, "y", true),
    ];
    return this.lines.flatMap((line) => {
      const text = this.usesNumbers() ? String(look(line).number) : line.name;
      const end = lastShown(line, this.zoom, this.options);
      return end ? [{ line, text, from: place(end), y: place(end)[1] }] : [];
    });
  }

  // Show the values under the pointer.
  read() {
    const { left, top } = this.plot.cursor;
    this.tip.hidden = this.small || left < 0 || !this.lines.length;
    if (this.tip.hidden) return;
    const x = this.plot.posToVal(left, "x");
    const found = this.lines
      .map((line) => ({ line, i: nearest(line.x, x) }))
      .filter(({ line, i }) => i >= 0 && line.y[i] !== null)
      .sort((one, other) => other.line.y[other.i] - one.line.y[one.i]);
    const places = found.map(({ line, i }) => line.x[i]);
    this.tip.replaceChildren(
      el("b", { textContent: placeText(this.options.along, places[nearest(places, x)] ?? x) }),
      ...found.slice(0, 12).map(({ line, i }) => reading(line, i, this.theme)),
    );
    const right = left > this.plot.over.clientWidth / 2;
    this.tip.style.left = right ? "" : `${left + 14}px`;
    this.tip.style.right = right ? `${this.plot.over.clientWidth - left + 14}px` : "";
    this.tip.style.top = `${Math.min(top, 60)}px`;
  }

  resize() {
    if (this.plot && Math.abs(this.place.clientWidth - this.width) > 1) this.build();
  }

  destroy() {
    this.plot?.destroy();
    charts.delete(this);
  }
}
