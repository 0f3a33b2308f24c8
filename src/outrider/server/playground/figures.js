// How drafting goes: counts of the answer that is being written, and the plots over the chat.

import { hueOf, make } from "./answer.js";
import { Plot, niceTop } from "./plot.js";

const ROUNDS = 8; // that tokens a round are averaged over
const WINDOW = 500; // milliseconds that tokens/s are measured over
const MAX_POINTS = 600;

export class Counts {
  constructor() {
    this.tokens = 0;
    this.rounds = 0; // those that had a draft
    this.drafted = [];
    this.accepted = [];
    this.begin = null; // when the first token came
    this.end = null;
  }

  add(choice, now) {
    const size = choice.token_texts?.length ?? 0;
    if (!size) return;
    this.begin ??= now;
    this.end = now;
    this.tokens += size;
    const drafted = choice.draft?.token_texts.length ?? 0;
    if (!drafted) return;
    this.rounds += 1;
    for (let place = 0; place < drafted; place += 1) {
      this.drafted[place] = (this.drafted[place] ?? 0) + 1;
      this.accepted[place] = (this.accepted[place] ?? 0) + (place < choice.draft.accepted ? 1 : 0);
    }
  }

  get acceptLength() {
    return this.rounds ? 1 + sum(this.accepted) / this.rounds : this.tokens ? 1 : null;
  }

  get share() {
    return this.rounds ? sum(this.accepted) / sum(this.drafted) : null;
  }

  // The first token waited for the prompt: it counts for the start only.
  get rate() {
    return this.end > this.begin ? ((this.tokens - 1) * 1000) / (this.end - this.begin) : null;
  }
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const shown = (value, digits) => (value === null ? "–" : value.toFixed(digits));
export const rateText = (rate) => shown(rate, rate !== null && rate < 10 ? 1 : 0);
export const lengthText = (length) => shown(length, 2);

export class Figures {
  constructor() {
    this.find = (id) => document.getElementById(id);
    this.lengthPlot = new Plot(this.find("length-plot"), 1);
    this.ratePlot = new Plot(this.find("rate-plot"));
    this.stripPlot = new Plot(this.find("strip-plot"), 1);
    this.numPlaces = 0;
    this.clear();
    new ResizeObserver(() => this.later()).observe(this.find("length-plot"));
    new ResizeObserver(() => this.later()).observe(this.find("strip-plot"));
  }

  clear() {
    this.points = [];
    this.numTokens = 0;
    this.begin();
  }

  begin() {
    this.counts = new Counts();
    this.lengths = []; // of the last rounds
    this.arrivals = []; // {time, tokens}
    this.begins = true;
    this.later();
  }

  setPlaces(count) {
    this.numPlaces = count;
    this.bars = [];
    this.find("bars").replaceChildren(...Array.from({ length: count }, (_, place) => this.bar(place + 1)));
    this.later();
  }

  bar(position) {
    const row = make("div", "bar");
    const name = make("span", "place", String(position));
    const track = make("span", "track");
    const fill = make("span", "fill");
    const value = make("span", "value", "–");
    fill.dataset.hue = hueOf(position);
    track.append(fill);
    row.append(name, track, value);
    this.bars.push({ fill, value });
    return row;
  }

  // All that came in at one moment.
  add(choices, now) {
    for (const choice of choices) {
      const size = choice.token_texts?.length ?? 0;
      if (!size) continue;
      this.counts.add(choice, now);
      this.arrivals.push({ time: now, tokens: size });
      this.lengths = [...this.lengths, size].slice(-ROUNDS);
      this.numTokens += size;
      const y = sum(this.lengths) / this.lengths.length;
      this.points.push({ x: this.numTokens, length: y, rate: null, begins: this.begins });
      this.begins = false;
    }
    const rate = this.recentRate(now);
    for (let index = this.points.length - 1; index >= 0 && this.points[index].rate === null; index -= 1) {
      if (rate !== null) this.points[index].rate = rate;
      if (this.points[index].begins) break;
    }
    this.points = this.points.slice(-MAX_POINTS);
    this.later();
  }

  recentRate(now) {
    while (this.arrivals.length > 1 && this.arrivals[0].time < now - WINDOW) this.arrivals.shift();
    const begin = this.arrivals[0]?.time;
    const came = sum(this.arrivals.filter((arrival) => arrival.time > begin).map((arrival) => arrival.tokens));
    return now - begin >= 40 ? (came * 1000) / (now - begin) : null;
  }

  later() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    const { counts } = this;
    const length = lengthText(counts.acceptLength);
    this.find("accept-length").textContent = length;
    this.find("strip-length").textContent = length;
    this.find("rate").textContent = rateText(counts.rate);
    this.find("strip-rate").textContent = rateText(counts.rate);
    this.find("accepted").textContent = counts.share === null ? "–" : `${Math.round(counts.share * 100)} %`;
    (this.bars ?? []).forEach((bar, place) => {
      const share = counts.drafted[place] ? counts.accepted[place] / counts.drafted[place] : null;
      bar.fill.style.width = `${(share ?? 0) * 100}%`;
      bar.value.textContent = share === null ? "–" : `${Math.round(share * 100)} %`;
    });
    const lengthTop = Math.max(this.numPlaces + 1, 2);
    const rateTop = niceTop(1.1 * Math.max(...this.points.map((point) => point.rate ?? 0), 10));
    this.find("length-top").textContent = this.points.length ? String(lengthTop) : "";
    this.find("rate-top").textContent = this.points.length ? String(rateTop) : "";
    const lengths = this.points.map(({ x, length: y, begins }) => ({ x, y, begins }));
    this.lengthPlot.draw(lengths, lengthTop);
    this.stripPlot.draw(lengths, lengthTop);
    this.ratePlot.draw(this.points.map(({ x, rate: y, begins }) => ({ x, y, begins })), rateTop);
  }
}
