"use strict";
// The chat page: one conversation with v1/chat/completions, streamed. No build step, no library.

const $ = (id) => document.getElementById(id);
const log = $("log"), message = $("message");
let said = [];           // the conversation, without the system message
let running = null;      // the AbortController of the answer that is being written

// ------------------------------------------------------------------------------- the server

class Refusal extends Error {
  constructor(text, status) {
    super(text);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const key = $("key").value.trim();
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new Refusal(told?.error?.message ?? `${response.status} ${response.statusText}`,
                    response.status);
}

function question() {
  const system = $("system").value.trim();
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  return JSON.stringify({
    model: $("model").dataset.id ?? "",
    messages: [...(system ? [{ role: "system", content: system }] : []), ...said],
    temperature: number("temperature"),
    max_completion_tokens: number("max-tokens"),
    stream: true,
    stream_options: { include_usage: true },
  });
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const line = block.split("\n").find((item) => item.startsWith("data: "));
      if (line && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function showModel() {
  const shown = $("model");
  try {
    const found = (await (await ask("v1/models")).json()).data[0];
    shown.dataset.id = shown.textContent = found.id;
  } catch (error) {
    shown.textContent = error.message;
    if (error.status === 401) askForKey();
  }
}

function askForKey() {
  $("settings").open = true;
  $("key").focus();
}

// ---------------------------------------------------------------------------------- the log

function element(name, className, text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}

function add(role, text) {
  const article = element("article", role);
  article.append(element("div", "text", text));
  log.append(article);
  log.scrollTop = log.scrollHeight;
  return article;
}

function button(text, className, act) {
  const made = element("button", className, text);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

function withFences(text) {
  // Parts at odd places stood between two fences, or behind one that is still open.
  return text.split(/^```.*\n?/m).map((part, place) =>
    place % 2 ? element("pre", "", part) : document.createTextNode(part));
}

// One answer on its way into the log; drawn at most once a frame, however fast tokens come.
class Answer {
  constructor() {
    this.article = add("assistant", "");
    this.article.classList.add("busy");
    this.text = this.thought = "";
    this.began = performance.now();
    this.first = this.usage = null;
    this.frame = 0;
  }

  take(event) {
    if (event.error) throw new Error(event.error.message);
    this.usage = event.usage ?? this.usage;
    const delta = event.choices?.[0]?.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning ?? "";
    if (!thought && !delta.content) return;
    this.first ??= performance.now();
    this.thought += thought;
    this.text += delta.content ?? "";
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    const following = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    if (this.thought) this.drawThought();
    this.article.querySelector(".text").replaceChildren(...withFences(this.text));
    if (following) log.scrollTop = log.scrollHeight;
  }

  drawThought() {
    let details = this.article.querySelector("details");
    if (!details) {
      details = element("details", "");
      details.append(element("summary", "", "Thinking"), element("div", "thought"));
      details.open = true;
      this.article.prepend(details);
    }
    details.querySelector(".thought").textContent = this.thought;
    if (this.text && !this.answering) details.open = false;  // once: readers may open it again
    this.answering = this.text !== "";
  }

  figures() {
    if (!this.usage) return [];
    const { completion_tokens: tokens = 0, prompt_tokens: prompt = 0 } = this.usage;
    const seconds = (performance.now() - this.first) / 1000;
    const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
    const drafts = this.usage.completion_tokens_details?.accepted_prediction_tokens ?? 0;
    return [
      ...(tokens > 1 && this.first ? [`${((tokens - 1) / seconds).toFixed(1)} tokens/s`] : []),
      `${tokens} tokens`,
      ...(this.first ? [`first after ${((this.first - this.began) / 1000).toFixed(2)} s`] : []),
      `${cached} of ${prompt} prompt tokens cached`,
      `${drafts} drafts accepted`,
    ];
  }

  end(remark = "") {
    cancelAnimationFrame(this.frame);
    this.draw();
    this.article.classList.remove("busy");
    const footer = element("footer", "");
    const facts = [...(remark ? [remark] : []), ...this.figures()];
    footer.append(element("span", "figures", facts.join(" · ")));
    if (this.text && navigator.clipboard) {
      footer.append(button("Copy", "copy", () => navigator.clipboard.writeText(this.text)));
    }
    footer.append(button("Try again", "again", () => again(this.article)));
    this.article.append(footer);
    log.scrollTop = log.scrollHeight;
  }

  fail(error) {
    this.article.classList.add("error");
    this.article.append(element("div", "fault", error.message));
    this.end();
  }
}

// ------------------------------------------------------------------------- the conversation

async function answer() {
  const conversation = said;  // a new chat may begin meanwhile
  const written = new Answer();
  running = new AbortController();
  busy(true);
  let needsKey = false;
  try {
    const response = await ask("v1/chat/completions",
                               { method: "POST", body: question(), signal: running.signal });
    for await (const event of events(response)) written.take(event);
    written.end();
  } catch (error) {
    if (error.name === "AbortError") written.end("stopped");
    else written.fail(error);
    needsKey = error.status === 401;
  } finally {
    running = null;
    busy(false);
  }
  if (written.text) conversation.push({ role: "assistant", content: written.text });
  if (needsKey) askForKey();
  else message.focus();
}

function busy(yes) {
  $("send").hidden = yes;
  $("stop").hidden = !yes;
  log.setAttribute("aria-busy", yes);
}

function send() {
  const text = message.value.trim();
  if (!text || running) return;
  takeBack("user");  // what was never answered is replaced
  message.value = "";
  said.push({ role: "user", content: text });
  add("user", text);
  answer();
}

// Remove the last message and what is shown of it and after it, if it is of this role.
function takeBack(role) {
  if (said.at(-1)?.role !== role) return null;
  const shown = [...log.querySelectorAll(`article.${role}`)].at(-1);
  while (log.lastElementChild !== shown) log.lastElementChild.remove();
  shown.remove();
  return said.pop().content;
}

function again(article) {
  if (running) return;
  if (takeBack("assistant") === null) article.remove();
  answer();
}

function edit() {
  takeBack("assistant");
  message.value = takeBack("user") ?? "";
}

function restart() {
  running?.abort();
  said = [];
  log.replaceChildren();
  message.focus();
}

// ---------------------------------------------------------------------------------- controls

function remember(id, kind) {
  let storage = null;
  try {
    storage = window[kind];
  } catch {
    return;  // the browser was told to keep nothing
  }
  const name = `deepinfer.${id}`, field = $(id);
  field.value = storage.getItem(name) ?? field.value;
  field.addEventListener("change", () => storage.setItem(name, field.value));
}

message.addEventListener("keydown", (event) => {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !message.value && !running) {
    event.preventDefault();
    edit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    restart();
  }
});
$("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", restart);
for (const id of ["system", "temperature", "max-tokens"]) remember(id, "localStorage");
remember("key", "sessionStorage");
$("key").addEventListener("change", showModel);
showModel();
