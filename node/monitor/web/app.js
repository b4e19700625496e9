// Starts the page: the first picture, then the stream of updates; theme, range and key.

import { makeCharts } from "./charts.js";
import { Links } from "./links.js";
import { Panels } from "./panels.js";
import { Peers } from "./peers.js";
import { Rounds } from "./rounds.js";
import { Locked, Stream, get, keyIn, recall, remember, setKey, takeKey } from "./stream.js";
import { Names, attempt, el, say } from "./text.js";

const RANGES = [["Whole run", 0], ["500 rounds", 500], ["100 rounds", 100], ["25 rounds", 25]];
const POINTS = 360;
const MARK = "▲ "; // in the title: there is something to look at
const HALF_A_DAY_MS = 43_200_000;
const KEPT_ROUNDS = 48;
const KEPT_EVENTS = 120;
const LINKS_MS = [2000, 15000]; // between two looks at all links, from the first on: they change slowly
const THEMES = ["auto", "light", "dark"];

/** What is known: the newest state, and the columns that the charts are drawn from. */
class Store {
  constructor(picture) {
    this.names = new Names();
    this.links = { peers: [], links: [] };
    this.rounds = picture.rounds;
    this.events = picture.events;
    this.run = picture.state.run?.id;
    this.outerRate = picture.state.run?.manifest?.outer?.lr;
    this.setHistory(picture.history);
    this.setState(picture.state);
  }
  setState(state) {
    this.state = state;
    this.me = state.node.peer;
    this.names.learn(state.peers);
    // in pairs each island has a state of its own, and none is at "another round"
    this.ownStates = (state.consensus ? state.consensus.agreeing : state.peers.find((p) => p.link === "self")?.agrees) === null;
  }
  setHistory({ every, columns, islands }) {
    Object.assign(this, { every, columns, islands });
    this.single = every > 1 ? columns.round.at(-1) : 0; // from this round on a point is of one round
    this.appended = 0;
    this.stale = false;
  }
  /** Take columns that were asked for a while ago; rows that came meanwhile stay. */
  renew(history, meanwhile, last) {
    this.setHistory(history);
    const newest = this.columns.round.at(-1) ?? -1;
    for (const row of meanwhile) if (row.round > newest) this.addRow(row, last);
  }
  add({ state, rows, rounds, events }, last) {
    this.setState(state);
    for (const row of rows) this.addRow(row, last);
    const redone = (old) => rounds.some((r) => r.fragment === old.fragment && r.round <= old.round);
    this.rounds = [...this.rounds.filter((old) => !redone(old)), ...rounds].slice(-KEPT_ROUNDS);
    this.events = [...this.events, ...events].slice(-KEPT_EVENTS);
  }
  addRow(row, last) {
    const rounds = this.columns.round;
    const all = [...Object.values(this.columns), ...Object.values(this.islands)];
    while (rounds.length && rounds[rounds.length - 1] >= row.round) for (const values of all) values.pop();
    const before = rounds.length;
    this.single = Math.min(this.single, row.round);
    for (const [name, values] of Object.entries(this.columns)) values.push(row[name]);
    for (const peer of Object.keys(row.islands)) this.islands[peer] ??= new Array(before).fill(null);
    for (const [peer, values] of Object.entries(this.islands)) values.push(row.islands[peer] ?? null);
    if (last) while (rounds.length && rounds[0] <= row.round - last) for (const values of [...Object.values(this.columns), ...Object.values(this.islands)]) values.shift();
    this.appended += 1;
    this.meanwhile?.push(row);
  }
  /** The first round of a point; its number is that of the last one. The first point is as wide as the next. */
  begin(i) {
    const { round } = this.columns;
    return i ? round[i - 1] + 1 : Math.max(0, 2 * round[0] - round[1] + 1);
  }
  /** Whether a point is the mean of several rounds. */
  mixed(i) {
    const round = this.columns.round[i];
    return round < this.single && this.begin(i) < round;
  }
  /** The rounds that a point is of: "8000", "7959 to 7981". */
  span(i, tell = String) {
    const round = tell(this.columns.round[i]);
    return this.mixed(i) ? `${tell(this.begin(i))} to ${round}` : round;
  }
  /** When a point was: "at round 8000", "as the mean of rounds 7959 to 7981". */
  when(i) {
    return this.mixed(i) ? `as the mean of rounds ${this.span(i)}` : `at round ${this.span(i)}`;
  }
  /** Whether so much was appended that the whole is better asked for again, or it did not come. */
  get coarse() {
    return this.stale || this.appended > Math.max(60, 20 * this.every);
  }
}

class App {
  constructor() {
    this.last = 0;
    this.heard = Date.now(); // when the node answered last
    this.charts = makeCharts();
    this.links = new Links();
    this.panels = [this.charts, new Panels(), new Rounds(), new Peers(), this.links];
    this.connection = document.querySelector("#connection");
    this.makeRange();
    this.makeTheme();
    document.querySelector("#unlock").addEventListener("submit", (event) => {
      event.preventDefault();
      const given = document.querySelector("#key").value.trim();
      const taken = setKey(keyIn(given) ?? given);
      say(document.querySelector("#unlock-error"), taken ? "" : "A key has letters, digits and signs of ASCII only: copy it, or the whole address, again.");
      this.tried = true;
      if (taken) this.open();
    });
    // the whole address, in the tab that asks for the key: only its fragment is another
    addEventListener("hashchange", () => takeKey() && this.open());
  }

  async open() {
    const turn = (this.turn = {}); // who opens anew, as with another key, ends what went before
    this.stream?.stop();
    for (let wait = 1000; ; wait = Math.min(30000, 2 * wait)) {
      try {
        const picture = await get(`/api/v1/dashboard?points=${POINTS}`);
        if (turn !== this.turn) return;
        this.heard = Date.now();
        document.querySelector("#unlock").hidden = true;
        document.querySelector("#main").hidden = false;
        const links = this.store?.links;
        this.store = new Store(picture);
        this.store.links = links ?? this.store.links;
        if (this.last) await this.loadHistory();
        if (turn !== this.turn) return;
        this.draw();
        document.documentElement.dataset.filled ??= String(Math.round(performance.now()));
        this.following ??= this.followLinks();
        return this.follow(picture.cursor);
      } catch (error) {
        if (turn !== this.turn) return;
        if (error instanceof Locked) return this.lock();
        this.silent();
        await new Promise((done) => setTimeout(done, wait));
        if (turn !== this.turn) return;
      }
    }
  }

  follow(cursor) {
    this.stream = new Stream(cursor, {
      update: (news) => this.update(news),
      state: (state, text) => this.tell(state, text),
      silent: () => this.silent(),
      restart: () => this.open(),
      locked: () => this.lock(),
    });
    this.stream.run();
  }

  async followLinks() {
    for (let wait = LINKS_MS[0]; ; wait = Math.min(LINKS_MS[1], 2 * wait)) {
      if (!document.hidden) {
        try {
          this.store.links = await get("/api/v1/links");
          this.links.draw(this.store);
        } catch {
          // the stream says when the node does not answer, or wants another key
        }
      }
      await new Promise((done) => setTimeout(done, wait));
    }
  }

  async update(news) {
    const run = news.state.run?.id;
    if (run && run !== this.store.run) return this.open(); // what is of the run as a whole is only in the first picture
    this.store.add(news, this.last);
    document.documentElement.dataset.updates = String(Number(document.documentElement.dataset.updates ?? 0) + 1);
    const anew = this.store.coarse;
    if (anew) await this.loadHistory();
    this.draw(!anew && news.rows.length === 0);
  }

  /** Charts change with a round only; the rest with each update. One that fails is reported, and does not stop the others. */
  draw(still = false) {
    for (const panel of this.panels) {
      if (still && panel === this.charts) continue;
      attempt(() => panel.draw(this.store));
    }
  }

  /** Ask for the chosen range; of several answers that of the newest question counts. */
  async loadHistory() {
    const { store, last } = this;
    const meanwhile = (store.meanwhile = []);
    Object.assign(store, { appended: 0, stale: false });
    const [history] = await Promise.allSettled([get(`/api/v1/history?points=${POINTS}&last=${last}`)]);
    if (store.meanwhile !== meanwhile) return;
    store.meanwhile = null;
    if (history.status === "fulfilled") store.renew(history.value, meanwhile, last);
    else store.stale = true; // asked for again with the next update
  }

  /** Whether what is shown is "live"; once it is "off" no other try changes what is said. */
  tell(state, text) {
    if (state === "wait" && this.connection.dataset.state === "off") return;
    if (state === "live") this.heard = Date.now();
    this.connection.dataset.state = state;
    document.querySelector("#main").dataset.state = state;
    say(this.connection, text);
  }

  /** The node does not answer: what is shown is of then. */
  silent() {
    const long = Date.now() - this.heard > HALF_A_DAY_MS;
    const when = { hour: "2-digit", minute: "2-digit", ...(long ? { day: "numeric", month: "short" } : {}) };
    this.tell("off", `no answer since ${new Date(this.heard).toLocaleString("en-GB", when)}`);
    if (!document.title.startsWith(MARK)) document.title = MARK + document.title;
  }

  lock() {
    this.tell("off", "locked");
    document.querySelector("#main").hidden = true;
    document.querySelector("#unlock").hidden = false;
    if (this.tried) say(document.querySelector("#unlock-error"), "The node does not take this key.");
    document.querySelector("#key").focus();
  }

  makeRange() {
    const host = document.querySelector("#range");
    for (const [name, last] of RANGES) {
      const choose = async () => {
        this.last = last;
        await this.loadHistory();
        this.charts.draw(this.store);
      };
      host.append(el("label", {}, el("input", { type: "radio", name: "range", checked: last === 0, onchange: choose }), el("span", {}, name)));
    }
  }

  makeTheme() {
    const button = document.querySelector("#theme");
    const apply = (theme) => {
      if (theme === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = theme;
      say(button.querySelector(".label"), `Theme: ${theme}`);
    };
    let theme = recall(() => localStorage, "atoll-theme") ?? "auto";
    if (!THEMES.includes(theme)) theme = "auto";
    apply(theme);
    button.addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      remember(() => localStorage, "atoll-theme", theme);
      apply(theme);
      this.charts.rebuild();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.charts.rebuild());
  }
}

takeKey();
new App().open();
