// The playground: what the controls do.

import { hueOf, make } from "./answer.js";
import { Block, Conversation, button } from "./conversation.js";
import { Figures } from "./figures.js";
import { chunks, key, modelCard } from "./request.js";

const EXAMPLES = ["Why does it rain?", "How do plants grow?", "Give me tips for better sleep."];
const MAX_DRAWN = 8; // positions that the legend names

const find = (id) => document.getElementById(id);
const conversation = new Conversation(find("turns"));
const figures = new Figures();
const log = find("log");
let busy = null; // the AbortController of the answer that is being written
let afterKey = null; // what waits for a key
let card = null; // what the server says of itself
let numPlaces = 0; // of a draft at its longest

// settings

function settings() {
  const seed = find("seed").value === "" ? Math.floor(Math.random() * 2 ** 31) : Number(find("seed").value);
  return {
    speculate: numPlaces > 0 && find("speculate").checked,
    length: Number(find("length").value),
    system: find("system").value,
    temperature: Number(find("temperature").value),
    top_p: Number(find("top-p").value),
    max_tokens: Number(find("max-tokens").value),
    seed,
  };
}

function settingsAreValid() {
  const wrong = [...document.querySelectorAll("#panel input")].find((input) => !input.checkValidity());
  if (!wrong) return true;
  showPanel(true);
  wrong.reportValidity();
  return false;
}

function bodyOf(turn, options) {
  const { speculate, length, system, against, ...sampling } = options;
  return {
    ...sampling,
    messages: conversation.messages(turn, system),
    speculative: speculate ? { num_speculative_tokens: length } : { enabled: false },
    stream: true,
    return_token_ids: true,
    return_drafts: true,
  };
}

// asking

function send() {
  const text = find("prompt").value.trim();
  if (busy || !text || !settingsAreValid()) return;
  if (!card) {
    readCard(send);
    return;
  }
  find("prompt").value = "";
  fitPrompt();
  find("welcome").hidden = true;
  showPanel(false);
  run(conversation.ask(text), settings());
}

async function run(turn, options) {
  const control = new AbortController();
  setBusy(control);
  const block = new Block(turn, options);
  figures.begin();
  scrollToEnd(true);
  try {
    for await (const batch of chunks(bodyOf(turn, options), control.signal)) {
      const choices = batch.flatMap((chunk) => chunk.choices);
      const now = performance.now();
      const atEnd = isAtEnd();
      block.add(choices, now);
      figures.add(choices, now);
      scrollToEnd(atEnd);
    }
    end(block);
  } catch (problem) {
    if (busy === control) setBusy(null);
    if (problem.name === "AbortError") end(block, "stopped");
    else if (problem.status === 401) askForKey(() => retry(block), block);
    else fail(block, problem);
  } finally {
    if (busy === control) setBusy(null);
    scrollToEnd(isAtEnd());
  }
}

function end(block, reason = block.reason) {
  block.reason = reason;
  const { turn, options, answer } = block;
  if (!options.against) turn.answer = answer.content;
  const actions = [["Copy", (pressed) => copy(answer.content, pressed)]];
  if (!options.against && block.complete && numPlaces) actions.push([otherWay(options), () => repeat(block)]);
  const atEnd = isAtEnd();
  block.finish(actions);
  if (options.against && block.complete) block.compare(options.against);
  scrollToEnd(atEnd);
  find("status").textContent = reason === "stopped" ? "Stopped." : `Answered with ${block.counts.tokens} tokens.`;
}

function fail(block, problem) {
  if (!block.options.against && block.answer.content) block.turn.answer = block.answer.content;
  block.fail(problem, () => retry(block));
}

function retry(block) {
  if (busy) return;
  block.remove();
  run(block.turn, block.options);
}

const otherWay = (options) => (options.speculate ? "Repeat without drafts" : "Repeat with drafts");

function repeat(block) {
  if (busy) return;
  run(block.turn, { ...block.options, speculate: !block.options.speculate, against: block });
}

function setBusy(control) {
  busy = control;
  const hadFocus = [find("send"), find("stop")].includes(document.activeElement);
  find("send").hidden = busy !== null;
  find("stop").hidden = busy === null;
  log.setAttribute("aria-busy", String(busy !== null));
  if (hadFocus) find("prompt").focus();
}

async function copy(text, pressed) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = make("textarea", "unseen"); // without https there is no clipboard but this
    field.value = text;
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  pressed.textContent = "Copied";
  setTimeout(() => (pressed.textContent = "Copy"), 1500);
}

function newChat() {
  busy?.abort();
  conversation.clear();
  figures.clear();
  showPanel(false);
  find("welcome").hidden = false;
  find("prompt").focus();
}

// scrolling and sizes

const isAtEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 40;

function scrollToEnd(wanted) {
  if (wanted) log.scrollTop = log.scrollHeight;
}

function fitPrompt() {
  const prompt = find("prompt");
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function showPanel(open) {
  document.body.classList.toggle("panel-open", open);
  find("panel-button").setAttribute("aria-expanded", String(open));
  find("panel-button").textContent = open ? "Close" : "Settings";
}

// the key

// After a 401. A key that was sent is wrong then.
function askForKey(then, block = null) {
  find("key-wrong").hidden = key.get() === null;
  key.forget();
  openKey(then, block);
}

function openKey(then, block = null) {
  afterKey = { then, block };
  find("key-button").hidden = false;
  find("key").value = "";
  if (!find("key-dialog").open) find("key-dialog").showModal();
  find("key").focus();
}

function useKey(event) {
  event.preventDefault();
  key.set(find("key").value.trim());
  find("key").value = "";
  const waiting = afterKey;
  afterKey = null;
  find("key-dialog").close();
  find("prompt").focus();
  readCard(waiting?.then);
}

function leaveKey() {
  const waiting = afterKey;
  afterKey = null;
  find("key").value = "";
  if (waiting?.block) waiting.block.fail({ message: "The server asks for an API key." }, () => retry(waiting.block));
}

// what the server is

async function readCard(then = null) {
  find("trouble").hidden = true;
  try {
    card = await modelCard();
  } catch (problem) {
    if (problem.status === 401) askForKey(then);
    else showTrouble(problem.message);
    return;
  }
  showCard();
  then?.();
}

function showTrouble(message) {
  find("trouble").textContent = message;
  find("trouble").hidden = false;
}

function showCard() {
  find("model").textContent = card.id;
  numPlaces = card.num_speculative_tokens;
  find("no-drafter").hidden = numPlaces > 0;
  find("max-tokens").max = card.max_model_len;
  find("max-tokens").value = Math.min(Number(find("max-tokens").value), Math.floor(card.max_model_len / 2));
  find("length").max = Math.max(numPlaces, 1);
  find("length").value = numPlaces;
  find("speculate").disabled = numPlaces === 0;
  find("speculate").checked = numPlaces > 0;
  figures.setPlaces(numPlaces);
  showLegend();
  showLength();
}

function showLength() {
  find("length-shown").textContent = numPlaces ? `${find("length").value} tokens` : "–";
  find("length").disabled = !numPlaces || !find("speculate").checked;
}

function showLegend() {
  const drawn = Math.min(numPlaces, MAX_DRAWN);
  const places = Array.from({ length: drawn }, (_, place) => {
    const swatch = make("span", "token", String(place + 1) + (place + 1 === MAX_DRAWN && numPlaces > MAX_DRAWN ? "+" : ""));
    swatch.dataset.hue = hueOf(place + 1);
    return swatch;
  });
  const parts = [make("span", "", "the target’s own")];
  if (drawn) parts.push(grouped("drafted, at position", places));
  const rejected = make("span", "rejected-name");
  rejected.append(make("s", "", "rejected"));
  find("legend").replaceChildren(...parts, rejected);
}

function grouped(name, elements) {
  const group = make("span", "group", `${name} `);
  group.append(...elements);
  return group;
}

// keys and buttons

find("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
find("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
find("prompt").addEventListener("input", fitPrompt);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || find("key-dialog").open) return;
  if (busy) busy.abort();
  else if (document.body.classList.contains("panel-open")) {
    showPanel(false);
    find("panel-button").focus();
  }
});
find("stop").addEventListener("click", () => busy?.abort());
find("new-chat").addEventListener("click", newChat);
find("panel-button").addEventListener("click", () => showPanel(!document.body.classList.contains("panel-open")));
find("show-rejected").addEventListener("change", (event) => document.body.classList.toggle("show-rejected", event.target.checked));
find("speculate").addEventListener("change", showLength);
find("length").addEventListener("input", showLength);
find("key-button").addEventListener("click", () => {
  find("key-wrong").hidden = true;
  openKey(null);
});
find("key-form").addEventListener("submit", useKey);
find("key-cancel").addEventListener("click", () => find("key-dialog").close());
find("key-forget").addEventListener("click", () => {
  key.forget();
  find("key-dialog").close();
});
find("key-dialog").addEventListener("close", leaveKey);
find("examples").append(
  ...EXAMPLES.map((text) =>
    button(text, () => {
      find("prompt").value = text;
      send();
      find("prompt").focus();
    }),
  ),
);
document.body.classList.toggle("show-rejected", find("show-rejected").checked); // a reload may keep it
find("key-button").hidden = key.get() === null;
readCard();
if (matchMedia("(min-width: 56rem)").matches) find("prompt").focus(); // a phone would bring up its keyboard
