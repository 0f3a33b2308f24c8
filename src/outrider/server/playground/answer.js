// The text of one answer as tokens: coloured where drafted, with what was rejected beside it.

const NUM_HUES = 8; // positions beyond share the last one

export function hueOf(position) {
  return String(Math.min(position, NUM_HUES));
}

export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// Tokens wait here until their text is settled: the server holds back what may be part of a character, of a stop string
// or of a marker. A delta takes its characters from the tokens that wait.
export class Answer {
  constructor(element) {
    this.element = element;
    this.content = "";
    this.reasoning = "";
    this.numTokens = 0;
    this.waiting = []; // {rest, position, rejected}
    this.parts = {}; // where content and reasoning go
  }

  add(choice) {
    this.enqueue(choice);
    for (const kind of ["reasoning_content", "content"]) {
      const text = choice.delta[kind];
      if (!text) continue;
      if (kind === "content") this.content += text;
      else this.reasoning += text;
      this.take(text, this.part(kind));
    }
    if (choice.finish_reason) this.flush();
  }

  // Rejected drafts stand right before the token that the target chose instead.
  enqueue(choice) {
    const texts = choice.token_texts ?? [];
    const accepted = choice.draft?.accepted ?? 0;
    const rejected = choice.draft?.token_texts.slice(accepted) ?? [];
    texts.forEach((text, number) => {
      this.waiting.push({
        rest: text,
        position: choice.draft_positions[number],
        rejected: number === accepted ? rejected : [],
      });
    });
    this.numTokens += texts.length;
  }

  take(text, part) {
    const found = this.waiting.map((token) => token.rest).join("").indexOf(text);
    if (found < 0) {
      part.append(make("span", "token", text)); // not of the tokens' own text: no colour then
      return;
    }
    let skip = found;
    let left = text.length;
    const fragment = document.createDocumentFragment();
    while (left > 0) {
      const token = this.waiting[0];
      this.show(token.rejected.splice(0), fragment);
      const skipped = Math.min(skip, token.rest.length);
      const taken = token.rest.slice(skipped, skipped + left);
      skip -= skipped;
      left -= taken.length;
      token.rest = token.rest.slice(skipped + taken.length);
      if (taken) fragment.append(tokenElement(taken, token.position));
      if (!token.rest) this.waiting.shift();
    }
    part.append(fragment);
  }

  show(rejected, fragment) {
    for (const text of rejected) {
      const element = make("span", "rejected", text.replaceAll("\n", "⏎"));
      element.setAttribute("aria-hidden", "true");
      fragment.append(element);
    }
  }

  // What was rejected before a token without text, such as the one that ends the answer.
  flush() {
    for (const token of this.waiting) this.show(token.rejected, this.part("content"));
    this.waiting = [];
  }

  part(kind) {
    if (!this.parts[kind]) {
      this.parts[kind] = make("div", kind === "content" ? "text" : "text reasoning");
      this.element.append(this.parts[kind]);
    }
    return this.parts[kind];
  }
}

function tokenElement(text, position) {
  const element = make("span", "token", text);
  if (position > 0) {
    element.dataset.position = position;
    element.dataset.hue = hueOf(position);
    element.title = `position ${position} in the draft`;
  }
  return element;
}
