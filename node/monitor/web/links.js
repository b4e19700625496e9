// Who reaches whom how fast: as the islands measure it in passing, else what both ends announce.

import { DASH, duration, el, empty, fill, known, rate, say, seconds } from "./text.js";

const NUMBERS_UP_TO = 8; // islands; with more the matrix is drawn
const ORDER = 6; // powers of ten from the palest to the darkest: 10 kB/s to 10 GB/s

export class Links {
  constructor() {
    this.body = document.querySelector("#links .body");
    this.at = [0, 1];
    this.known = new Map();
  }

  draw(store) {
    this.store = store;
    if (this.from !== store.links) {
      this.from = store.links;
      const { peers, links } = store.links;
      this.known = new Map(links.map(([from, to, speed, trip, age]) => [`${peers[from]} ${peers[to]}`, { speed, trip, age }]));
    }
    const peers = store.state.peers.filter((p) => p.role === "island" && ["active", "joining", "suspect"].includes(p.status));
    if (peers.length > NUMBERS_UP_TO) peers.sort((a, b) => (a.region === b.region ? 0 : a.region < b.region ? -1 : 1));
    if (peers.length < 2) {
      this.kind = "";
      return fill(this.body, empty("This node knows of no other island, so there is no link."));
    }
    if (peers.length <= NUMBERS_UP_TO) this.numbers(peers, (from, to) => this.between(from, to));
    else this.picture(peers, (from, to) => this.between(from, to));
  }

  /** What is known of a link; null of an island to itself. */
  between(from, to) {
    if (from === to) return null;
    const link = this.known.get(`${from.peer} ${to.peer}`);
    // where nobody has told of this very link: what both ends tell of theirs to everybody
    const usual = known(from.own_rtt_s) && known(to.own_rtt_s) ? (from.own_rtt_s + to.own_rtt_s) / 2 : null;
    const trip = known(link?.trip) ? seconds(link.trip) : known(usual) ? `≈ ${seconds(usual)}` : "";
    const through = [from, to].every((p) => p.link === "relay" || p.address === "relay") ? ", through a relay" : "";
    if (known(link?.speed)) return { speed: link.speed, trip, measured: true, how: (link.age ? `measured there, told ${duration(link.age)} ago` : "measured here") + through };
    const bound = Math.min(from.upload || 0, to.download || 0);
    return { speed: bound || null, trip, measured: false, how: (bound ? "at most, as announced" : "not measured") + through };
  }

  note(peers, cell) {
    const any = peers.some((a) => peers.some((b) => known(cell(a, b)?.speed)));
    const rest = this.store.links.left_out;
    const more = rest ? ` There are too many links to show: of those of other islands ${rest.toLocaleString("en")} more are known.` : "";
    return any
      ? `Filled: measured by an island on bodies over 256 KB. Outlined: no more than both ends announced. A dash: not known. Round trips with ≈: the mean of what both ends see with all their peers.${this.slowest(peers)}${more}`
      : "No throughput yet: it is measured on bodies over 256 KB, and this run's are shorter, or none has passed.";
  }

  /** The islands whose links upwards are the slowest, by the median: they make others wait. */
  slowest(peers) {
    const medians = peers
      .map((from) => {
        const speeds = peers.map((to) => this.known.get(`${from.peer} ${to.peer}`)?.speed).filter(known).sort((a, b) => a - b);
        return [from, speeds[speeds.length >> 1], speeds.length];
      })
      .filter(([, , n]) => n > 0)
      .sort((a, b) => a[1] - b[1]);
    if (medians.length < 3) return "";
    return ` Slowest to send, by the median: ${medians.slice(0, 3).map(([peer, speed]) => `${this.store.names.of(peer.peer)} ${rate(speed)}`).join(", ")}.`;
  }

  numbers(peers, cell) {
    if (this.kind !== "numbers") {
      this.kind = "numbers";
      // made once: who scrolls it, or stands in it with the keyboard, is not thrown out
      this.region = el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Matrix of links" });
      this.words = el("p", { class: "words" });
      fill(this.body, this.region, this.words);
      this.shape = "";
    }
    const names = peers.map((p) => this.store.names.of(p.peer));
    const cells = peers.map((from) => peers.map((to) => cell(from, to)));
    const shape = JSON.stringify([names, cells]);
    if (shape === this.shape) return;
    this.shape = shape;
    const row = (found) => {
      if (!found) return el("td", { class: "self", "aria-label": "itself" }, "");
      const td = el("td", { class: `num ${found.measured ? "measured" : known(found.speed) ? "announced" : ""}`, title: found.how }, rate(found.speed), found.trip ? el("small", {}, found.trip) : null);
      td.style.setProperty("--level", level(found.speed));
      return td;
    };
    const rows = cells.map((line, i) => el("tr", {}, el("th", { scope: "row" }, names[i]), ...line.map(row)));
    fill(this.region, el("table", { class: "matrix" }, el("caption", { class: "sr" }, "Throughput and round trip from the row's island to the column's"), el("thead", {}, el("tr", {}, el("td", {}, "from ↓ to →"), ...names.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, ...rows)));
    say(this.words, this.note(peers, cell));
  }

  picture(peers, cell) {
    if (this.kind !== "picture") {
      this.kind = "picture";
      this.shape = "";
      this.canvas = el("canvas", { tabindex: 0, role: "img", class: "matrix" });
      this.sheet = el("canvas"); // the matrix without the cursor
      this.told = el("p", { class: "words" });
      this.spoken = el("p", { class: "sr", "aria-live": "polite" }); // what keys ask for, not what changes by itself
      this.canvas.addEventListener("pointermove", (event) => {
        const size = this.canvas.clientWidth / this.peers.length;
        this.go(Math.floor(event.offsetY / size), Math.floor(event.offsetX / size));
      });
      this.canvas.addEventListener("keydown", (event) => {
        const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [-Infinity, -Infinity] }[event.key];
        if (!step) return;
        event.preventDefault();
        this.go(this.at[0] + step[0], this.at[1] + step[1]);
        say(this.spoken, this.told.textContent);
      });
      this.words = el("p", { class: "words" });
      fill(this.body, this.canvas, this.told, this.spoken, this.words);
      new ResizeObserver(() => this.paint()).observe(this.canvas);
    }
    this.peers = peers;
    this.cell = cell;
    const shape = JSON.stringify([colours(), peers.map((p) => [p.peer, this.store.names.of(p.peer), p.upload, p.download, p.link, p.address])]);
    if (shape !== this.shape || this.painted !== this.from) {
      Object.assign(this, { shape, painted: this.from });
      say(this.words, this.note(peers, cell));
      this.canvas.setAttribute("aria-label", `Matrix of links between ${peers.length} islands. Arrow keys move from link to link, Home to the first.`);
      this.paint();
    }
    this.go(...this.at);
  }

  go(row, column) {
    const limit = this.peers.length - 1;
    this.at = [Math.min(limit, Math.max(0, row)), Math.min(limit, Math.max(0, column))];
    const [from, to] = this.at.map((i) => this.peers[i]);
    const found = this.cell(from, to);
    const names = [from, to].map((p) => this.store.names.of(p.peer));
    const rtt = found?.trip ? `, round trip ${found.trip}` : "";
    say(this.told, found ? `${names[0]} → ${names[1]}: ${found.speed ? rate(found.speed) : DASH} (${found.how})${rtt}` : `${names[0]}: itself`);
    this.point();
  }

  /** Draw the matrix, which has as many cells as there are pairs: only when they have changed. */
  paint() {
    const width = Math.round(this.canvas.clientWidth * (devicePixelRatio || 1));
    if (!width) return;
    for (const one of [this.canvas, this.sheet]) one.width = one.height = width;
    const pen = this.sheet.getContext("2d");
    const [ink, line] = colours();
    const size = width / this.peers.length;
    const gap = size > 6 ? 1 : 0;
    this.peers.forEach((from, row) =>
      this.peers.forEach((to, column) => {
        const found = this.cell(from, to);
        const [x, y] = [column * size, row * size];
        pen.globalAlpha = 1;
        pen.fillStyle = line;
        if (!found) return pen.fillRect(x + size * 0.4, y + size * 0.4, size * 0.2, size * 0.2);
        if (!known(found.speed)) return pen.fillRect(x + size * 0.3, y + size * 0.48, size * 0.4, Math.max(1, size * 0.06));
        pen.globalAlpha = 0.15 + 0.85 * level(found.speed);
        pen.fillStyle = pen.strokeStyle = ink;
        const inset = found.measured ? gap : size * 0.28;
        pen.fillRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
      }),
    );
    this.point();
  }

  /** Put the cursor on the matrix. */
  point() {
    if (!this.sheet.width) return;
    const pen = this.canvas.getContext("2d");
    const size = this.sheet.width / this.peers.length;
    pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
    pen.drawImage(this.sheet, 0, 0);
    pen.strokeStyle = colours()[2];
    pen.lineWidth = 2 * (devicePixelRatio || 1);
    pen.strokeRect(this.at[1] * size, this.at[0] * size, size, size);
  }
}

/** Of measured links, of lines and of the cursor, in the theme of now. */
function colours() {
  const style = getComputedStyle(document.documentElement);
  return ["--blue", "--line", "--strong"].map((name) => style.getPropertyValue(name));
}

/** 0 to 1 for 10 kB/s to 10 GB/s, by powers of ten. */
function level(speed) {
  if (!known(speed) || speed <= 0) return 0;
  return Math.min(1, Math.max(0, (Math.log10(speed) - 4) / ORDER));
}
