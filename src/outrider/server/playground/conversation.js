// What was asked and answered: the state that requests are made of, and its elements.

import { Answer, make } from "./answer.js";
import { Counts, lengthText, rateText } from "./figures.js";

const ENDS = { length: "ended at max tokens", stop: "", stopped: "stopped" };

// One answer, or the attempt at one.
export class Block {
  constructor(turn, options) {
    this.turn = turn;
    this.options = options;
    this.counts = new Counts();
    this.reason = null;
    this.element = make("div", "answer busy");
    this.element.append(make("h2", "who", options.against ? `Again, ${modeOf(options)}` : "Answer"));
    this.answer = new Answer(this.element);
    turn.element.append(this.element);
  }

  add(choices, now) {
    for (const choice of choices) {
      this.counts.add(choice, now);
      this.answer.add(choice);
      this.reason = choice.finish_reason ?? this.reason;
    }
  }

  get complete() {
    return this.reason === "stop" || this.reason === "length";
  }

  // `actions`: [[name, what it does]].
  finish(actions) {
    this.element.classList.remove("busy");
    this.answer.flush();
    const { tokens, rounds, acceptLength, rate } = this.counts;
    const facts = [`${tokens} ${tokens === 1 ? "token" : "tokens"}`];
    if (rounds) facts.push(`accept length ${lengthText(acceptLength)}`);
    if (rate !== null) facts.push(`${rateText(rate)} tokens/s`);
    facts.push(modeOf(this.options), ENDS[this.reason] ?? "");
    this.meta = make("div", "meta");
    this.meta.append(make("span", "muted", facts.filter(Boolean).map(unbroken).join(" · ")));
    const buttons = make("span", "actions");
    for (const [name, act] of actions) buttons.append(button(name, act));
    this.meta.append(buttons);
    this.element.append(this.meta);
  }

  // Both should say the same.
  compare(other) {
    const same = this.answer.content === other.answer.content && this.answer.reasoning === other.answer.reasoning;
    const rates = this.ratesAgainst(other);
    const text = same ? `The same answer, token for token${rates}.` : "The answers differ.";
    this.element.append(make("p", same ? "verdict" : "verdict wrong", text));
  }

  ratesAgainst(other) {
    const [drafted, plain] = this.options.speculate ? [this, other] : [other, this];
    if (drafted.counts.rate === null || plain.counts.rate === null) return "";
    return `: ${rateText(drafted.counts.rate)} tokens/s with drafts, ${rateText(plain.counts.rate)} without`;
  }

  fail(problem, retry) {
    this.element.classList.remove("busy");
    this.answer.flush();
    const notice = make("div", "notice");
    notice.setAttribute("role", "alert");
    const wait = problem.retryAfter ? ` Try again in ${problem.retryAfter} s.` : "";
    notice.append(make("span", "", problem.message + wait), button("Try again", retry));
    this.element.append(notice);
  }

  remove() {
    this.element.remove();
  }
}

const unbroken = (text) => text.replaceAll(" ", "\u00a0");

function modeOf(options) {
  return options.speculate ? `drafts of ${options.length}` : "without drafts";
}

export function button(name, act) {
  const element = make("button", "quiet", name);
  element.type = "button";
  element.addEventListener("click", () => act(element));
  return element;
}

export class Conversation {
  constructor(element) {
    this.element = element;
    this.turns = [];
  }

  ask(text) {
    const turn = { asked: text, answer: null, element: make("article", "turn") };
    const asked = make("div", "asked");
    asked.append(make("h2", "who", "You"), make("div", "text", text));
    turn.element.append(asked);
    this.element.append(turn.element);
    this.turns.push(turn);
    return turn;
  }

  // All before a turn, and its question. A question without an answer is left out: templates want them in turns.
  messages(turn, system) {
    const before = this.turns.slice(0, this.turns.indexOf(turn)).filter((earlier) => earlier.answer !== null);
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...before.flatMap((earlier) => [
        { role: "user", content: earlier.asked },
        { role: "assistant", content: earlier.answer },
      ]),
      { role: "user", content: turn.asked },
    ];
  }

  clear() {
    this.turns = [];
    this.element.replaceChildren();
  }
}
