// The table of islands: state, contribution, lag, link; sorted as the reader wants it.

import { DASH, count, duration, el, fill, fixed, known, percent, rate, say, seconds, seen, short, small } from "./text.js";

const STATES = { active: "●", joining: "◐", leaving: "◌", left: "◌", suspect: "▲", dead: "✕", alive: "●" };
const OTHERS = ["server", "seed", "observer"]; // roles that do not train
const CLOCK_S = 1; // seconds apart from this node's clock that are worth a look
const SHOWN = 64; // rows, the rest is counted
const [MERGED, CLAIMED] = ["Merged tokens", "Claimed tokens"]; // as certified, or where nobody certifies any
const TROUBLE = ["suspect", "dead", "leaving", "joining"];
const NOTES = { tokens_per_second: "while computing: what an island waits is not in it" };
const LARGEST_FIRST = ["round", "merged_tokens", "tokens_per_second", "distance", "upload"];
const gone = (p) => !["active", "joining"].includes(p.status); // what it said last is no figure of now
const COLUMNS = [
  ["name", "Island", (p) => (p.name || p.peer).toLowerCase(), ""],
  ["status", "State", (p) => p.status, ""],
  ["round", "Round", (p) => p.round, "num"],
  ["agrees", "State agrees", (p) => String(p.agrees), ""],
  ["merged_tokens", MERGED, (p) => p.merged_tokens, "num"],
  ["tokens_per_second", "Tokens/s", (p) => (gone(p) ? 0 : p.tokens_per_second), "num"],
  ["loss", "Loss", (p) => (gone(p) ? null : p.loss) ?? Infinity, "num"],
  ["distance", "Distance", (p) => p.distance ?? -1, "num"],
  ["address", "Link", (p) => `${p.link}${p.address}`, ""],
  ["rtt_s", "Round trip", (p) => p.rtt_s ?? Infinity, "num"],
  ["clock_offset_s", "Clock", (p) => Math.abs(p.clock_offset_s ?? Infinity), "num"],
  ["upload", "Up / down", (p) => p.upload, "num"],
  ["version", "Version", (p) => p.version, ""],
  ["region", "Region", (p) => p.region, ""],
];

export class Peers {
  constructor() {
    this.by = "merged_tokens";
    this.down = true;
    this.rows = new Map();
    this.count = document.querySelector("#peers-count");
    this.body = el("tbody");
    this.heads = COLUMNS.map(([key, name, , kind]) =>
      el("th", { scope: "col", class: kind, "data-key": key, title: NOTES[key] }, el("button", { type: "button", class: "plain", onclick: () => this.sort(key) }, name)),
    );
    const caption = el("caption", { class: "sr" }, "Islands this node knows; the headings sort");
    const region = el("div", { class: "scroll tall", tabindex: 0, role: "region", "aria-label": "Table of islands" }, el("table", { class: "peers" }, caption, el("thead", {}, el("tr", {}, ...this.heads)), this.body));
    this.more = el("p", { class: "quiet" });
    this.regions = el("ul", { class: "regions", "aria-label": "By region" });
    fill(document.querySelector("#peers .body"), this.regions, region, this.more);
  }

  sort(key) {
    this.down = this.by === key ? !this.down : LARGEST_FIRST.includes(key);
    this.by = key;
    this.draw(this.store);
  }

  draw(store) {
    this.store = store;
    const peers = store.state.peers;
    const islands = peers.filter((peer) => peer.role === "island");
    const live = islands.filter((peer) => ["active", "joining"].includes(peer.status));
    const versions = new Map();
    for (const peer of live) versions.set(peer.version || "?", (versions.get(peer.version || "?") ?? 0) + 1);
    const mix = [...versions].sort((a, b) => b[1] - a[1]).map(([name, n]) => `${n} × ${name}`).join(", ");
    const others = OTHERS.map((role) => [role, peers.filter((peer) => peer.role === role).length]).filter(([, n]) => n);
    const rest = others.map(([role, n]) => `, ${n} ${role}${n > 1 ? "s" : ""}`).join("");
    say(this.count, `${live.length} live of ${islands.length}${rest}${mix ? ` · versions ${mix}` : ""}`);
    this.byRegion(islands);
    const claimed = store.ownStates;
    const tokens = this.heads.find((head) => head.dataset.key === "merged_tokens");
    say(tokens.firstChild, claimed ? CLAIMED : MERGED);
    for (const head of this.heads) head.setAttribute("aria-sort", head.dataset.key !== this.by ? "none" : this.down ? "descending" : "ascending");
    const value = claimed && this.by === "merged_tokens" ? (p) => p.total_tokens : COLUMNS.find(([key]) => key === this.by)[2];
    const first = peers.length > SHOWN ? unusual : () => 0;
    const sorted = [...peers].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      return first(a) - first(b) || (x < y ? -1 : x > y ? 1 : a.peer < b.peer ? -1 : 1) * (this.down ? -1 : 1);
    });
    const shown = sorted.slice(0, SHOWN);
    say(this.more, sorted.length > shown.length ? `and ${sorted.length - shown.length} more; this node and those in trouble come first, and /api/v1/state has all` : "");
    const rounds = live.map((peer) => peer.round).sort((a, b) => a - b);
    const head = rounds[rounds.length >> 1] ?? 0; // the median: one alone may claim anything
    const most = Math.max(...peers.map((peer) => peer.merged_tokens), 1);
    const rows = shown.map((peer) => this.row(peer, head, most));
    if (rows.some((row, i) => this.body.children[i] !== row) || this.body.children.length !== rows.length) this.body.replaceChildren(...rows);
    for (const peer of this.rows.keys()) if (!shown.some((p) => p.peer === peer)) this.rows.delete(peer);
  }

  /** Live islands, speed and what was merged, by the region that operators declare. */
  byRegion(islands) {
    const found = new Map();
    for (const peer of islands) {
      const one = found.get(peer.region) ?? { live: 0, all: 0, speed: 0, merged: 0 };
      found.set(peer.region, one);
      const live = ["active", "joining"].includes(peer.status);
      one.all += 1;
      one.live += live ? 1 : 0;
      one.speed += live ? peer.tokens_per_second : 0;
      one.merged += peer.merged_tokens;
    }
    this.regions.hidden = found.size < 2;
    const all = this.store.ownStates ? 0 : this.store.state.merged_tokens;
    const words = [...found].sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, one]) => [name || "no region", `${one.live} live${one.live < one.all ? ` of ${one.all}` : ""} · ${count(one.speed)} tokens/s${all ? ` · ${percent(one.merged / all)} of merged tokens` : ""}`]);
    const shape = JSON.stringify(words);
    if (shape === this.regioned) return;
    this.regioned = shape;
    fill(this.regions, ...words.map(([name, text]) => el("li", {}, el("b", {}, name), ` ${text}`)));
  }

  row(peer, head, most) {
    let row = this.rows.get(peer.peer);
    if (!row) {
      row = el("tr", {}, el("th", { scope: "row" }, el("span", { class: "who" }), el("small", { title: peer.peer })), ...COLUMNS.slice(1).map(([key, , , kind]) => el("td", { class: `${kind} ${key}` })));
      const tokens = row.children[4];
      tokens.append(el("span", { class: "share" }, el("i")), el("b"));
      this.rows.set(peer.peer, row);
    }
    const mine = peer.link === "self";
    const lag = head - peer.round;
    row.classList.toggle("mine", mine);
    row.dataset.status = peer.status;
    const cells = row.children;
    say(cells[0].children[0], seen(peer.name) ? peer.name : short(peer.peer));
    say(cells[0].children[1], mine ? "this node" : peer.role === "island" ? short(peer.peer) : peer.role);
    const silent = !mine && peer.silent_s > 5 ? ` · silent ${duration(peer.silent_s)}` : "";
    say(cells[1], `${STATES[peer.status] ?? "?"} ${peer.status}${silent}`);
    const claimed = this.store.ownStates; // and each island counts its own rounds
    say(cells[2], `${peer.round.toLocaleString("en")}${lag > 0 && !claimed ? ` (−${lag})` : ""}`);
    cells[3].classList.toggle("bad", peer.agrees === false);
    say(cells[3], gone(peer) || claimed ? DASH : peer.agrees === null ? "○ other round" : peer.agrees ? "✓ same" : "✕ differs");
    cells[4].children[0].hidden = claimed;
    cells[4].children[0].firstChild.style.width = `${(100 * peer.merged_tokens) / most}%`;
    say(cells[4].children[1], count(claimed ? peer.total_tokens : peer.merged_tokens));
    const together = claimed ? 0 : this.store.state.merged_tokens;
    cells[4].title = together ? `${percent(peer.merged_tokens / together, 1)} of what was merged; says it has trained ${count(peer.total_tokens)}` : "";
    say(cells[5], peer.tokens_per_second && !gone(peer) ? count(peer.tokens_per_second) : DASH);
    say(cells[6], gone(peer) ? DASH : fixed(peer.loss));
    say(cells[7], small(peer.distance));
    say(cells[8], mine ? "this node" : [...new Set([peer.link, peer.address])].filter(Boolean).join(" · "));
    say(cells[9], known(peer.rtt_s) ? seconds(peer.rtt_s) : DASH);
    const offset = peer.clock_offset_s;
    cells[10].classList.toggle("bad", known(offset) && Math.abs(offset) > CLOCK_S);
    say(cells[10], known(offset) ? `${offset < 0 ? "−" : "+"}${Math.abs(offset).toFixed(2)} s` : DASH);
    say(cells[11], peer.upload || peer.download ? `${rate(peer.upload)} / ${rate(peer.download)}` : DASH);
    say(cells[12], peer.version || "?");
    say(cells[13], seen(peer.region) ? peer.region : DASH);
    return row;
  }
}

/** Sorts this node first, then who has another state, then who is in trouble. */
function unusual(peer) {
  if (peer.link === "self") return 0;
  return peer.agrees === false ? 1 : TROUBLE.includes(peer.status) ? 2 : 3;
}
