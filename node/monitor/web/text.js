// Numbers as people read them, and elements made without markup in strings.

export const DASH = "–";
const MAX_NAMES = 4096; // of peers, those who are gone included
// turn what follows them round (Unicode, UAX 9): in a peer's name they would rewrite a sentence
const TURNING = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

// what shows nothing by itself, some of it as a letter (Hangul fillers) or a sign (an empty braille cell)
const UNSEEN = /[\p{C}\p{Z}\u115f\u1160\u2800\u3164\uffa0]/gu;

/** An element: el("td", {class: "num", title: "x"}, "text", child). Text is never markup. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : straight(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined).map(straight));
  return node;
}

/** Text without what would turn it round; anything else as it is. */
function straight(value) {
  return typeof value === "string" ? value.replace(TURNING, "") : value;
}

/** Change an element's text only where it differs: nothing flickers, nothing is read out twice. */
export function say(node, text) {
  const shown = straight(text);
  if (node.textContent !== shown) node.textContent = shown;
}

/** Replace the children of a panel's body. */
export function fill(node, ...children) {
  node.replaceChildren(...children.filter(Boolean));
}

export function known(value) {
  return value !== null && value !== undefined && Number.isFinite(value);
}

export function fixed(value, digits = 2) {
  return known(value) ? value.toFixed(digits) : DASH;
}

/** 1,234 or 1.23 M: at most four digits. */
export function count(value) {
  if (!known(value)) return DASH;
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"]])
    if (Math.abs(value) >= size) return `${three(value / size)} ${unit}`;
  return Math.round(value).toLocaleString("en");
}

/** 1.23 TFLOP/s from operations a second. */
export function flops(value) {
  if (!known(value)) return DASH;
  for (const [size, unit] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"]])
    if (value >= size) return `${three(value / size)} ${unit}FLOP/s`;
  return `${Math.round(value)} FLOP/s`;
}

export function bytes(value) {
  if (!known(value)) return DASH;
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]])
    if (value >= size) return `${three(value / size)} ${unit}`;
  return `${Math.round(value)} B`;
}

export function rate(value) {
  return known(value) && value > 0 ? `${bytes(value)}/s` : DASH;
}

export function percent(value, digits = 0) {
  return known(value) ? `${(100 * value).toFixed(digits)} %` : DASH;
}

export function three(value) {
  const size = Math.abs(value);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2);
}

/** A small number with three significant digits: 0.0463, 0. */
export function small(value) {
  if (!known(value)) return DASH;
  return value === 0 ? "0" : Number(value.toPrecision(3)).toString();
}

export function seconds(value) {
  if (!known(value)) return DASH;
  if (value < 0.1) return `${Math.round(1000 * value)} ms`;
  if (value < 10) return `${value.toFixed(1)} s`;
  return duration(value);
}

export function duration(value) {
  if (!known(value)) return DASH;
  const whole = Math.max(0, Math.round(value));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${String(Math.floor((whole % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB");
}

/** The end of a peer id, which tells peers apart. */
export function short(peer) {
  return `…${peer.slice(-6)}`;
}

/** What can be seen of a name. */
export function seen(name) {
  return name.replace(UNSEEN, "");
}

/** Do something that may fail without what comes after it: it is reported to the console. */
export function attempt(work) {
  try {
    work();
  } catch (error) {
    reportError(error);
  }
}

/** Names of peers by id, as the newest state has them; falls back to the end of the id. */
export class Names {
  constructor() {
    this.byId = new Map();
    this.times = new Map(); // that a name is given, by what can be seen of it
  }
  learn(peers) {
    for (const peer of peers) {
      this.byId.delete(peer.peer); // the newest last
      if (seen(peer.name)) this.byId.set(peer.peer, peer.name);
    }
    for (const id of this.byId.keys()) {
      if (this.byId.size <= MAX_NAMES) break;
      this.byId.delete(id);
    }
    this.times.clear();
    for (const name of this.byId.values()) this.times.set(seen(name), (this.times.get(seen(name)) ?? 0) + 1);
  }
  /** How many of the islands of a round have names by now. */
  known(round) {
    return Object.keys(round.islands).filter((peer) => this.byId.has(peer)).length;
  }
  /** What a peer is called, or once has `said`: who is not alone with a name has the end of the id as well. */
  of(peer, said = "") {
    const name = this.byId.get(peer) ?? said;
    if (!seen(name)) return short(peer);
    return this.times.get(seen(name)) > 1 ? `${name} ${short(peer)}` : name;
  }
}

/** Why a panel is empty. */
export function empty(why) {
  return el("p", { class: "empty" }, why);
}

/** Only what can be seen by a screen reader. */
export function hidden(text) {
  return el("span", { class: "sr" }, text);
}

/** A small table from rows of texts; the first of each row is its heading. */
export function table(caption, head, rows) {
  return el(
    "table",
    {},
    el("caption", { class: "sr" }, caption),
    el("thead", {}, el("tr", {}, ...head.map((name, i) => el("th", { scope: "col", class: i ? "num" : null }, name)))),
    el(
      "tbody",
      {},
      ...rows.map(([first, ...rest]) =>
        el("tr", {}, el("th", { scope: "row" }, first), ...rest.map((cell) => el("td", { class: "num" }, cell))),
      ),
    ),
  );
}
