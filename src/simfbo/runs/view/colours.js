// Colours that can be seen on the page's background, and what tells lines apart besides them.

const DASHES = [[], [9, 4], [2, 3], [9, 3, 2, 3]];

function theme() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    ink: value("ink"),
    quiet: value("quiet"),
    line: value("line"),
    card: value("card"),
    accent: value("accent"),
  };
}

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function luminance(hex) {
  const [r, g, b] = channels(hex).map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

function mix(hex, other, share) {
  const [from, to] = [channels(hex), channels(other)];
  const mixed = from.map((value, i) => Math.round(value + share * (to[i] - value)));
  return `#${mixed.map((value) => value.toString(16).padStart(2, "0")).join("")}`;
}

// The colour, as much lighter or darker as the background asks for.
function visible(hex, background, ratio) {
  const end = luminance(background) > 0.2 ? "#000000" : "#ffffff";
  let share = 0;
  while (share < 1 && contrast(mix(hex, end, share), background) < ratio) share += 0.05;
  return mix(hex, end, Math.min(share, 1));
}

// A line's colour and dashes as the background of a box.
function sample(colour, dash) {
  let at = 0;
  const stops = DASHES[dash].flatMap((length, i) => {
    at += length;
    return [`${i % 2 ? "transparent" : colour} ${at - length}px ${at}px`];
  });
  return stops.length ? `repeating-linear-gradient(90deg, ${stops.join(", ")})` : colour;
}

// A look for each group of runs, in the order in which they appear; it stays as others come.
class Looks {
  constructor(palette) {
    this.palette = palette;
    this.found = new Map();
  }

  of(run) {
    if (!this.found.has(run.group)) this.found.set(run.group, this.next(run));
    return this.found.get(run.group);
  }

  // A method's own colour, unless another group has it.
  next(run) {
    const own = run.header.about?.colour ?? "";
    const taken = [...this.found.values()].map((one) => one.colour);
    const free = [...(/^#[0-9a-f]{6}$/i.test(own) ? [own] : []), ...this.palette].find(
      (colour) => !taken.includes(colour),
    );
    const n = this.found.size;
    return { colour: free ?? this.palette[n % this.palette.length], number: n + 1, dash: n % 4 };
  }
}
