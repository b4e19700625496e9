// Charts of the run: drawn by uPlot, described in words, told as a table, and walked with arrow keys.

import { DASH, attempt, count, el, fill, fixed, hidden, known, say, seconds, small, table } from "./text.js";

const HEIGHT = 220;
const NAMED_ISLANDS = 8; // with more of them only this node's line is named
const TABLE_ROWS = 20;
// Okabe and Ito's colours, and a dash each: no line is told from another by colour alone
const STYLES = [
  ["--orange", []],
  ["--sky", [6, 3]],
  ["--green", [2, 3]],
  ["--purple", [8, 3, 2, 3]],
  ["--vermillion", [4, 2]],
  ["--yellow", [10, 4]],
  ["--blue", [3, 6]],
  ["--quiet", [1, 3]],
];

const variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** One chart in a panel. `series` is asked anew with each update, as islands come and go. */
class Chart {
  constructor(host, { title, series, format, empty, summary, height = HEIGHT, from, headed, range }) {
    Object.assign(this, { title, series, format, why: empty, summary, height, from, range });
    const heading = headed ? el("h3", {}, title) : null;
    this.legend = el("ul", { class: "legend" });
    this.plot = el("div", { class: "plot", tabindex: 0, role: "img" });
    this.plot.style.minHeight = `${height}px`;
    this.spoken = el("p", { class: "sr", "aria-live": "polite" });
    this.words = el("p", { class: "words" });
    this.details = el("details", { ontoggle: () => this.tell() }, el("summary", {}, "As a table", hidden(`: ${title}`)), el("div", { class: "scroll" }));
    fill(host, heading, this.legend, this.plot, this.spoken, this.words, this.details);
    this.plot.addEventListener("keydown", (event) => this.walk(event));
    this.plot.addEventListener("focus", () => this.walk({ key: "End", preventDefault() {} }));
    new ResizeObserver(() => this.resize()).observe(this.plot);
  }

  update(store) {
    const rounds = store.columns.round;
    this.store = store;
    this.lines = this.series(store);
    this.data = [rounds, ...this.lines.map((line) => line.values)];
    this.bounds = this.range?.(store);
    const nothing = !rounds.length || this.lines.every((line) => !line.values.some(known));
    this.plot.classList.toggle("blank", nothing);
    const words = nothing ? this.why : this.summary(store);
    say(this.words, words);
    this.plot.setAttribute("aria-label", `${this.title}. ${words} Arrow keys read it round by round.`);
    const shape = this.lines.map((line) => `${line.name}${line.color}`).join();
    if (this.shape !== shape || !this.chart) {
      this.shape = shape;
      this.build();
    } else this.chart.setData(this.data);
    this.read(this.chart?.cursor.idx ?? null);
    this.tell();
  }

  /** The lines that the legend and the table have. */
  get named() {
    return this.lines.filter((line) => line.named !== false);
  }

  /** Make uPlot anew: the lines or the theme are others. */
  build() {
    this.chart?.destroy();
    this.values = null; // until the legend is of these lines, too
    const quiet = variable("--quiet");
    const axis = {
      stroke: quiet,
      font: "11px system-ui, sans-serif",
      ticks: { show: false },
      border: { show: false },
      gap: 6,
    };
    this.chart = new uPlot(
      {
        width: Math.max(120, this.plot.clientWidth),
        height: this.height,
        legend: { show: false },
        padding: [8, 22, 0, 0],
        scales: { x: { time: false }, y: { range: (_, low, high) => span(...(this.bounds ?? [low, high]), this.from) } },
        cursor: { drag: { x: false, y: false }, y: false, points: { size: 7 } },
        hooks: { setCursor: [(chart) => this.read(chart.cursor.idx)] },
        axes: [
          { ...axis, grid: { show: false }, size: 26, space: 70, values: (_, ticks) => ticks.map((t) => (Number.isInteger(t) ? t.toLocaleString("en") : "")) },
          { ...axis, grid: { stroke: variable("--line"), width: 1 }, size: 46, space: 34, values: (_, ticks) => ticks.map((t) => this.format(t)) },
        ],
        series: [
          { label: "Round" },
          ...this.lines.map((line) => ({
            label: line.name,
            stroke: variable(line.color),
            width: line.width ?? 1.5,
            dash: line.dash,
            fill: line.fill ? variable(line.fill) : undefined,
            spanGaps: line.span ?? false,
            points: { show: line.points ?? this.data[0].length < 12, size: 5 },
          })),
        ],
        bands: this.lines.flatMap((line, i) => (line.stacked ? [{ series: [i + 1, i + 2], fill: variable(line.stacked) }] : [])),
      },
      this.data,
      this.plot,
    );
    this.values = [];
    fill(
      this.legend,
      el("li", { class: "where" }),
      ...this.named.map((line) => {
        const value = el("b");
        this.values.push(value);
        return el("li", {}, swatch(line), `${line.name} `, value);
      }),
    );
  }

  /** Show the values under the cursor, or of the newest round; of a line that spans gaps its newest. */
  read(index) {
    if (!this.values || !this.data[0].length) return;
    const last = this.data[0].length - 1;
    const at = index ?? last;
    const where = this.store.span(at, (round) => round.toLocaleString("en"));
    say(this.legend.firstChild, this.store.mixed(at) ? `Rounds ${where}, mean` : `Round ${where}`);
    for (const [i, line] of this.named.entries()) {
      const shown = line.shown ?? line.values;
      let value = shown[at];
      if (index === null && !known(value)) value = line.newest;
      for (let before = at; line.span && index === null && !known(value) && before >= 0; before -= 1) value = shown[before];
      say(this.values[i], known(value) ? this.format(value) : DASH);
    }
  }

  walk(event) {
    const count = this.data?.[0].length ?? 0;
    const page = Math.max(1, Math.floor(count / 10));
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -page, PageDown: page, Home: -Infinity, End: Infinity };
    if (!(event.key in moves) || !count || !this.chart) return;
    event.preventDefault();
    const now = this.chart.cursor.idx ?? count - 1;
    const next = Math.min(count - 1, Math.max(0, now + moves[event.key]));
    this.chart.setCursor({ left: this.chart.valToPos(this.data[0][next], "x"), top: 0 });
    say(this.spoken, this.legend.textContent);
  }

  /** Fill the table, where it is open. */
  tell() {
    if (!this.details.open || !this.lines) return;
    const { named, store } = this;
    const rows = this.data[0]
      .map((_, i) => [store.span(i), ...named.map((line) => format(this.format, (line.shown ?? line.values)[i]))])
      .slice(-TABLE_ROWS)
      .reverse();
    fill(this.details.lastChild, table(`${this.title}, the newest ${rows.length} points`, ["Round", ...named.map((line) => line.name)], rows));
  }

  resize() {
    const width = this.plot.clientWidth;
    if (this.chart && width > 0 && width !== this.chart.width) this.chart.setSize({ width, height: this.height });
  }
}

function swatch(line) {
  const mark = el("i", { class: line.stacked || line.fill ? "swatch area" : "swatch", "aria-hidden": "true" });
  mark.style.borderTopColor = `var(${line.color})`;
  mark.style.borderTopStyle = !line.dash?.length ? "solid" : line.dash[0] < 3 ? "dotted" : "dashed";
  mark.style.borderTopWidth = `${Math.max(2, line.width ?? 2)}px`;
  if (line.stacked ?? line.fill) mark.style.background = `var(${line.stacked ?? line.fill})`;
  return mark;
}

const format = (how, value) => (known(value) ? how(value) : DASH);

function span(low, high, from) {
  if (!known(low) || !known(high)) return [0, 1];
  if (from !== undefined) return [from, Math.max(high * 1.08, from + 1e-9)];
  const room = Math.max((high - low) * 0.06, Math.abs(high) * 0.01, 1e-9);
  return [low - room, high + room];
}

/** The first, newest and lowest known value of a column, each with its place and when it was. */
function ends(store, values) {
  const at = values.map((value, i) => (known(value) ? i : -1)).filter((i) => i >= 0);
  if (!at.length) return null;
  const lowest = at.reduce((best, i) => (values[i] < values[best] ? i : best), at[0]);
  const point = (i) => ({ at: i, value: values[i], when: store.when(i) });
  return { first: point(at[0]), last: point(at.at(-1)), low: point(lowest) };
}

/** The newest validation loss and when it was: not every round has one, and columns may mix it with older ones. */
function validated(store) {
  const told = store.rounds.findLast((round) => known(round.validation_loss));
  if (told) return { value: told.validation_loss, when: `at round ${told.round}` };
  return ends(store, store.columns.validation_loss)?.last;
}

function lossLines(store) {
  const peers = Object.keys(store.islands);
  const few = peers.length <= NAMED_ISLANDS;
  let place = 0;
  const islands = peers.map((peer) => {
    const mine = peer === store.me;
    const [color, dash] = few ? STYLES[place++ % STYLES.length] : [mine ? "--orange" : "--faint", []];
    return { name: mine ? `${store.names.of(peer)} (this node)` : store.names.of(peer), values: store.islands[peer], color, dash, width: mine && !few ? 2 : 1.25, named: few || mine };
  });
  if (!few) islands.sort((a, b) => Number(a.named) - Number(b.named));
  const middle = few ? [] : [{ name: `median of ${peers.length}`, values: medians(store), color: "--green", width: 2.5, dash: [7, 3] }];
  return [...islands, ...middle, { name: "validation", values: store.columns.validation_loss, color: "--strong", width: 2.5, span: true, newest: validated(store)?.value }];
}

/** By round, of `least` islands or more: one of them may say anything of its loss. */
function medians(store, least = 1) {
  const columns = Object.values(store.islands);
  return store.columns.round.map((_, i) => {
    const told = columns.map((column) => column[i]).filter(known).sort((a, b) => a - b);
    return told.length < least ? null : told[(told.length - 1) >> 1];
  });
}

/** From the lowest to the highest loss; what is far from those that can be relied on is not in it, and leaves the chart. */
function lossRange(store) {
  const sure = [...store.columns.validation_loss, ...(store.islands[store.me] ?? []), ...medians(store, 3)].filter(known);
  const relied = sure.length ? sure : medians(store).filter(known);
  if (!relied.length) return undefined;
  const [low, high] = extent(relied);
  const room = Math.max(high - low, Math.abs(high) / 2);
  const all = Object.values(store.islands).flat().filter((value) => known(value) && value >= low - room && value <= high + room);
  return extent([...relied, ...all]);
}

function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

const PHASES = [
  ["apply", "--green", "--green-area"],
  ["certify", "--purple", "--purple-area"],
  ["exchange", "--blue", "--blue-area"],
  ["match", "--sky", "--sky-area"],
  ["ready", "--orange", "--orange-area"],
];

/** Each line is the sum of its phase and those below, the largest first, so that areas stack. */
function phaseLines(store) {
  const c = store.columns;
  const rest = PHASES.map(([name]) => name);
  return PHASES.map(([name, color, area], i) => {
    const below = rest.slice(i);
    const values = c.round.map((_, at) => {
      const parts = below.map((phase) => c[phase][at]).filter(known);
      return parts.length ? parts.reduce((a, b) => a + b, 0) : null;
    });
    return { name, values, shown: c[name], color, width: 1, stacked: i < PHASES.length - 1 ? area : undefined, fill: i === PHASES.length - 1 ? area : undefined };
  });
}

/** A chart of one figure of this node's inner steps. */
function stepChart(host, title, column, format, color) {
  return new Chart(host, {
    title,
    headed: true,
    series: (store) => [{ name: title.toLowerCase(), values: store.columns[column], color, width: 2 }],
    format,
    height: 110,
    from: 0,
    empty: "No inner step yet.",
    summary: (store) => {
      const { first, last } = ends(store, store.columns[column]);
      return `${format(last.value)} ${last.when}, ${format(first.value)} ${first.when}.`;
    },
  });
}

/** All charts; `draw(store)` brings them up to date. */
export function makeCharts() {
  const body = (id) => document.querySelector(`#${id} .body`);
  const charts = [
    new Chart(body("loss"), {
      title: "Loss by round",
      series: lossLines,
      range: lossRange,
      format: (value) => fixed(value, value < 10 ? 2 : 1),
      height: 260,
      empty: "No round is committed yet. The first loss is shown with the first round.",
      summary: (store) => {
        const v = ends(store, store.columns.validation_loss);
        const newest = validated(store);
        const seen = `${Object.keys(store.islands).length} islands' training loss.`;
        if (!v) return `Validation loss is not measured yet (eval_every in the manifest). ${seen}`;
        return `Validation loss ${fixed(newest.value, 3)} ${newest.when}, from ${fixed(v.first.value, 3)} ${v.first.when}; lowest ${fixed(v.low.value, 3)} ${v.low.when}. ${seen}`;
      },
    }),
    new Chart(body("consensus"), {
      title: "Consensus by round",
      series: (store) => [
        { name: "before the merge", values: store.columns.consensus, color: "--vermillion", width: 2 },
        { name: "after", values: store.columns.consensus_after, color: "--green", width: 2, dash: [6, 3] },
      ],
      format: small,
      from: 0,
      height: 178,
      empty: "Not measured yet: it takes two islands that are ready for the same round.",
      summary: (store) => {
        const { consensus, consensus_after: left } = store.columns;
        const last = (ends(store, consensus) ?? ends(store, left)).last;
        const merged = store.mixed(last.at) ? `rounds ${store.span(last.at)} were merged` : `round ${store.span(last.at)} was merged`;
        if (!known(consensus[last.at])) return `Not measured before a merge; after ${merged} islands were ${small(last.value)} from their mean.`;
        return `Islands were ${small(last.value)} from their mean before ${merged}, ${small(left[last.at])} after. Estimated from 1 KB sketches, good to 15 %.`;
      },
    }),
    new Chart(body("time"), {
      title: "Time to merge by round",
      series: phaseLines,
      format: (value) => (value === 0 ? "0" : seconds(value)),
      from: 0,
      height: 170,
      empty: "No round is committed yet.",
      summary: (store) => {
        const { last } = ends(store, phaseLines(store)[0].values);
        const use = store.columns.utilisation[last.at];
        const mixed = store.mixed(last.at);
        const which = mixed ? `Merges of rounds ${store.span(last.at)} took, in the mean,` : "The last merge took";
        return `${which} ${seconds(last.value)} from snapshot to application here${known(use) ? `; ${Math.round(100 * use)} % of ${mixed ? "these rounds" : "that round"} were inner steps` : ""}.`;
      },
    }),
  ];
  const hosts = [el("div"), el("div"), el("div")];
  fill(body("steps"), ...hosts);
  charts.push(
    stepChart(hosts[0], "Learning rate", "lr", small, "--blue"),
    stepChart(hosts[1], "Gradient norm", "grad_norm", small, "--vermillion"),
    stepChart(hosts[2], "Tokens a second while computing", "tokens_per_second", count, "--green"),
  );
  return {
    draw: (store) => {
      document.querySelector("#steps").hidden = !store.columns.lr.some(known); // a seed takes none
      charts.forEach((chart) => attempt(() => chart.update(store)));
    },
    rebuild: () => charts.forEach((chart) => chart.lines && chart.build()),
  };
}
