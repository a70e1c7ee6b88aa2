"use strict";
// The chat page: one conversation with /v1/chat/completions, streamed. No build step, no library.

const $ = (id) => document.getElementById(id);
const log = $("log"), message = $("message"), form = $("form");
let messages = [];       // what was said, without the system message
let running = null;      // the AbortController of the answer that is being written

function headers() {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

function add(role, text) {
  const article = document.createElement("article");
  article.className = role;
  const body = document.createElement("div");
  body.className = "text";
  body.textContent = text;
  article.append(body);
  log.append(article);
  log.scrollTop = log.scrollHeight;
  return article;
}

function thinkingOf(article) {
  let found = article.querySelector("details");
  if (!found) {
    found = document.createElement("details");
    found.innerHTML = "<summary>Thinking</summary><div></div>";
    article.prepend(found);
  }
  return found.querySelector("div");
}

function figures(article, usage, firstMs, lastMs) {
  const parts = [];
  const tokens = usage.completion_tokens ?? 0;
  if (tokens > 1 && lastMs > firstMs) {
    parts.push(`${((tokens - 1) / (lastMs - firstMs) * 1000).toFixed(1)} tokens/s`);
  }
  parts.push(`${tokens} tokens`);
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  parts.push(`${cached} of ${usage.prompt_tokens ?? 0} prompt tokens cached`);
  const accepted = usage.completion_tokens_details?.accepted_prediction_tokens ?? 0;
  parts.push(`${accepted} drafts accepted`);
  const footer = document.createElement("footer");
  footer.textContent = parts.join(" · ");
  article.append(footer);
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

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

async function answer() {
  const article = add("assistant", "");
  const body = article.querySelector(".text");
  const system = $("system").value.trim();
  const began = performance.now();
  let firstMs = 0, usage = null, text = "";
  running = new AbortController();
  busy(true);
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      signal: running.signal,
      body: JSON.stringify({
        model: $("model").dataset.id ?? "",
        messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
        temperature: Number($("temperature").value),
        max_completion_tokens: Number($("max-tokens").value),
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) usage = event.usage;
      const delta = event.choices?.[0]?.delta;
      if (!delta) continue;
      const thought = delta.reasoning_content ?? delta.reasoning;
      if (thought) thinkingOf(article).textContent += thought;
      if (delta.content) {
        text += delta.content;
        body.textContent = text;
      }
      if (!firstMs && (delta.content || thought)) firstMs = performance.now() - began;
      log.scrollTop = log.scrollHeight;
    }
    if (usage) figures(article, usage, firstMs, performance.now() - began);
  } catch (error) {
    if (error.name !== "AbortError") {
      article.classList.add("error");
      body.textContent = `${text}${text ? "\n" : ""}${error.message}`;
    } else {
      body.textContent = `${text} (stopped)`;
    }
  } finally {
    messages.push({ role: "assistant", content: text });
    running = null;
    busy(false);
    log.scrollTop = log.scrollHeight;
    message.focus();
  }
}

function busy(yes) {
  $("send").hidden = yes;
  $("stop").hidden = !yes;
}

function send() {
  const text = message.value.trim();
  if (!text || running) return;
  message.value = "";
  messages.push({ role: "user", content: text });
  add("user", text);
  answer();
}

function restart() {
  running?.abort();
  messages = [];
  log.replaceChildren();
  message.focus();
}

async function showModel() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await failure(response));
    const found = (await response.json()).data[0];
    $("model").dataset.id = found.id;
    $("model").textContent = found.id;
  } catch (error) {
    $("model").textContent = error.message;
  }
}

form.addEventListener("submit", (event) => { event.preventDefault(); send(); });
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "k" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    restart();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", restart);
$("key").addEventListener("change", showModel);
showModel();
