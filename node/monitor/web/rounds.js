// The newest rounds as bars, and for one of them who was ready when, and who was dropped.

import { count, el, empty, fill, fixed, known, percent, say, seconds } from "./text.js";

const SHOWN = 14;
const PHASES = [
  ["ready", "until the last contributor was ready"],
  ["match", "until the leader's plan came"],
  ["exchange", "until every merged part was here"],
  ["certify", "until a majority had signed"],
  ["apply", "until the trainer stood on the new state"],
];
const SYMBOL = { committed: "✓", degraded: "▲" };

/** A round of the whole model by its number, one of a fragment by both. */
const key = (round) => `${round.round}.${round.fragment}`;
const name = (round) => round.round.toLocaleString("en") + (round.fragments > 1 ? ` · ${round.fragment + 1}/${round.fragments}` : "");

/** How rounds ended since the node started, attempts that came to nothing included. */
function outcomes(found) {
  const told = Object.entries(found).filter(([, times]) => times);
  return told.length ? `Since this node started: ${told.map(([how, times]) => `${count(times)} ${how}`).join(", ")}.` : "";
}

const total = (round) => PHASES.reduce((sum, [name]) => sum + (round.phases[name] ?? 0), 0);

export class Rounds {
  constructor() {
    this.body = document.querySelector("#rounds .body");
    this.detail = document.querySelector("#waits .body");
    this.title = document.querySelector("#waits-title");
    this.told = el("p", { class: "words" });
    this.chosen = null; // null: the newest
  }

  draw(store) {
    this.store = store;
    say(this.told, outcomes(store.state.rounds.outcomes));
    const newest = store.rounds.slice(-SHOWN).reverse();
    if (!newest.length) {
      const before = store.columns.round.length; // the charts show them
      fill(this.body, empty(before ? "No round since this node started." : "No round is committed yet."), this.told);
      fill(this.detail, empty(`Shown with the ${before ? "next" : "first"} round.`));
      return;
    }
    if (!newest.some((round) => key(round) === this.chosen)) this.chosen = null;
    const shape = JSON.stringify([this.chosen, newest.map((round) => [key(round), round.time, this.store.names.known(round)])]);
    if (shape === this.shape) return; // nothing flickers, and what is selected stays
    this.shape = shape;
    const focused = document.activeElement?.dataset?.round;
    const longest = Math.max(...newest.map(total), 1e-6);
    fill(
      this.body,
      el("ul", { class: "legend phases" }, ...PHASES.map(([name, why]) => el("li", { title: why }, el("i", { class: `phase ${name}`, "aria-hidden": "true" }), name))),
      el(
        "table",
        { class: "rounds" },
        el("caption", { class: "sr" }, "The newest rounds; choose one to see who waited for whom"),
        el("thead", {}, el("tr", {}, ...["Round", "From snapshot to merge", "Total", "Merged", "Computing"].map((name) => el("th", { scope: "col" }, name)))),
        el("tbody", {}, ...newest.map((round) => this.row(round, longest))),
      ),
      this.told,
    );
    if (focused) this.body.querySelector(`[data-round="${focused}"]`)?.focus();
    this.explain(newest.find((round) => key(round) === this.chosen) ?? newest[0]);
  }

  row(round, longest) {
    const picked = key(round) === this.chosen;
    const words = PHASES.map(([name]) => `${name} ${seconds(round.phases[name] ?? 0)}`).join(", ");
    const bar = el("div", { class: "bar", role: "img", "aria-label": words, title: words });
    for (const [name] of PHASES) {
      const part = el("i", { class: `phase ${name}` });
      part.style.width = `${(100 * (round.phases[name] ?? 0)) / longest}%`;
      bar.append(part);
    }
    const dropped = Object.keys(round.dropped).length;
    const empty = round.live && !round.members && !dropped; // a roll call
    const choose = () => {
      this.chosen = picked ? null : key(round);
      this.draw(this.store);
    };
    return el(
      "tr",
      { class: picked ? "picked" : null, onclick: choose },
      el("th", { scope: "row" }, el("button", { type: "button", class: "plain", "data-round": key(round), "aria-pressed": String(picked) }, name(round))),
      el("td", { class: "grow" }, bar),
      el("td", { class: "num" }, seconds(total(round))),
      el("td", { class: "num" }, el("span", { class: `outcome ${round.outcome}`, title: empty ? "merges nothing: it lets in who is there" : round.outcome }, `${SYMBOL[round.outcome] ?? "?"} ${empty ? `lets in ${round.live}` : `${round.members}/${round.live}`}`), dropped ? el("span", { class: "warn" }, ` −${dropped}`) : null),
      el("td", { class: "num" }, percent(round.utilisation)),
    );
  }

  explain(round) {
    say(this.title, `Who waited for whom · round ${name(round)}`);
    const islands = Object.entries(round.islands)
      .filter(([, item]) => known(item.ready_s))
      .sort((a, b) => a[1].ready_s - b[1].ready_s);
    const dropped = Object.entries(round.dropped);
    const longest = Math.max(...islands.map(([, item]) => item.ready_s), 1e-6);
    const merged = ([, item]) => (item.tokens ?? 0) > 0;
    const last = islands.filter(merged).at(-1);
    const shown = islands.length > 12 ? [...islands.slice(0, 4), null, ...islands.slice(-7)] : islands;
    const words = this.store.ownStates
      ? "Nobody waits for all: islands meet in pairs, each in rounds of its own. The log says whom this one met."
      : !last || islands.length < 2
        ? "Nobody waited: one island was ready alone, or this node came after the round."
        : last[1].ready_s < 0.05
          ? "All were ready within 50 ms."
          : `All waited for ${this.store.names.of(last[0])}, ${seconds(last[1].ready_s)} after the first.`;
    const rows = shown.map((entry) => {
      if (!entry) return el("li", { class: "more" }, `… ${islands.length - 11} more`);
      const [peer, item] = entry;
      const dot = el("i", { class: merged(entry) ? "dot" : "dot late" });
      dot.style.left = `${(100 * item.ready_s) / longest}%`;
      const why = merged(entry) ? "" : " · not merged";
      return el("li", {}, el("span", { class: "who" }, this.store.names.of(peer)), el("span", { class: "track", "aria-hidden": "true" }, dot), el("span", { class: "num" }, `+${fixed(item.ready_s, 2)} s${why}`));
    });
    fill(
      this.detail,
      el("p", {}, words),
      rows.length ? el("ol", { class: "waits" }, ...rows) : null,
      dropped.length
        ? el("div", {}, el("h3", {}, "Dropped"), el("ul", { class: "dropped" }, ...dropped.map(([peer, why]) => el("li", {}, el("span", { class: "mark", "aria-hidden": "true" }, "✕ "), `${this.store.names.of(peer)}: ${why}`))))
        : el("p", { class: "quiet" }, "Nobody was dropped."),
      this.weights(round),
      this.habit(),
    );
  }

  /** Whose work counts for less than announced, by the run's merge rule. */
  weights(round) {
    const less = Object.entries(round.islands)
      .filter(([, item]) => known(item.scale) && item.scale < 0.995)
      .sort((a, b) => a[1].scale - b[1].scale);
    if (!less.length) return null;
    const more = less.length > 8 ? [el("li", { class: "more" }, `… ${less.length - 8} more`)] : [];
    return el("div", {}, el("h3", {}, "Counted for less, by the merge rule"), el("ul", { class: "dropped weights" }, ...less.slice(0, 8).map(([peer, item]) => el("li", {}, `${this.store.names.of(peer)}: ${percent(item.scale)} of its share`)), ...more));
  }

  /** Who was the last one most often, in the rounds that are shown. */
  habit() {
    const times = new Map();
    const rounds = this.store.rounds.slice(-SHOWN);
    for (const { islands } of rounds) {
      const merged = Object.entries(islands).filter(([, item]) => known(item.ready_s) && item.tokens > 0);
      if (merged.length < 2) continue;
      const [peer] = merged.reduce((a, b) => (b[1].ready_s > a[1].ready_s ? b : a));
      times.set(peer, (times.get(peer) ?? 0) + 1);
    }
    if (!times.size) return null;
    const order = [...times].sort((a, b) => b[1] - a[1]).slice(0, 4);
    return el("div", {}, el("h3", {}, `Last in the newest ${rounds.length} rounds`), el("p", { class: "quiet" }, order.map(([peer, n]) => `${this.store.names.of(peer)} ${n}×`).join(" · ")));
  }
}
