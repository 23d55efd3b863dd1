// The chat page. State is one list of messages, as the API takes them; the page is drawn from the
// stream. Everything goes to this page's own server.

import { render } from "/page/markdown.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const input = $("input");

const EXAMPLES = ["What is 347 + 86?", "Sort these numbers: 45, 12, 78, 30", "Reverse the word planet"];

const TOOLS = [
  {
    type: "function",
    function: {
      name: "weather.get",
      description: "Get the weather in a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

let messages = [];
let running = null; // the AbortController of the answer being written

// --- small things

function node(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function seconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`;
}

function headers() {
  const key = $("key").value.trim();
  const plain = { "Content-Type": "application/json" };
  return key ? { ...plain, Authorization: `Bearer ${key}` } : plain;
}

// Follow the answer, unless the reader has scrolled away from it.
let follows = true;
log.addEventListener("scroll", () => {
  follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
});
function follow() {
  if (follows) log.scrollTop = log.scrollHeight;
}

// --- the server

async function fail(response) {
  const body = await response.json().catch(() => null);
  return new Error(body?.error?.message ?? `The server answered with status ${response.status}.`);
}

// The objects of a stream of server-sent events. Any event may be spread over several reads.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection broke before the answer was complete.");
    const lines = (held + value).split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function request() {
  const body = {
    messages: [...messages],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    reasoning_effort: $("effort").value,
  };
  const system = $("system").value.trim();
  if (system) body.messages.unshift({ role: "system", content: system });
  const temperature = $("temperature").value;
  if (temperature !== "") body.temperature = Number(temperature);
  const most = $("max-tokens").value;
  if (most !== "") body.max_completion_tokens = Number(most);
  const tools = $("tools").value.trim();
  if (tools) {
    try {
      body.tools = JSON.parse(tools);
    } catch (error) {
      throw new Error(`The tools in the settings are not JSON: ${error.message}`);
    }
  }
  return JSON.stringify(body);
}

// --- one answer

class Answer {
  constructor() {
    this.message = { role: "assistant", content: "" };
    this.reasoning = "";
    this.started = performance.now();
    this.firstToken = null;
    this.reasonedUntil = null;
    this.tokens = 0;
    this.root = node("article", "assistant busy");
    this.wait = node("div", "waiting", "Waiting for the model");
    this.root.append(this.wait);
    log.append(this.root);
    this.isDrawing = false;
  }

  take(event) {
    const now = performance.now();
    if (event.usage) this.tokens = event.usage.completion_tokens;
    const delta = event.choices[0]?.delta;
    if (!delta) return;
    const isNew = delta.reasoning_content || delta.content || delta.tool_calls;
    if (isNew) this.firstToken ??= now;
    if (delta.reasoning_content) this.reasoning += delta.reasoning_content;
    if (delta.content) this.message.content += delta.content;
    if (this.reasoning && (delta.content || delta.tool_calls)) this.endReasoning(now);
    for (const call of delta.tool_calls ?? []) this.addCall(call);
    for (const broken of delta.broken_tool_calls ?? []) this.addBroken(broken);
    if (event.choices[0].finish_reason === "length") this.note = "cut off at the token limit";
    this.last = now;
    this.draw();
  }

  // At most once a frame, however fast the tokens come.
  draw() {
    if (this.isDrawing) return;
    this.isDrawing = true;
    requestAnimationFrame(() => {
      this.isDrawing = false;
      this.drawNow();
    });
  }

  drawNow() {
    if (this.firstToken !== null) this.wait.remove();
    if (this.reasoning) {
      this.details ??= this.addReasoning();
      this.details.lastChild.textContent = this.reasoning.trim();
    }
    if (this.message.content) {
      if (!this.text) {
        this.text = node("div", "answer");
        this.root.insertBefore(this.text, this.root.querySelector(".call, .stats"));
      }
      render(this.text, this.message.content);
    }
    this.drawStats();
    follow();
  }

  addReasoning() {
    const details = node("details", "reasoning");
    details.open = this.reasonedUntil === null;
    details.append(node("summary", "", "Reasoning"), node("div"));
    this.root.prepend(details);
    return details;
  }

  endReasoning(now) {
    if (this.reasonedUntil !== null) return;
    this.reasonedUntil = now;
    this.details ??= this.addReasoning();
    this.details.open = false;
    this.details.firstChild.textContent = `Reasoned for ${seconds(now - this.started)}`;
  }

  addCall(call) {
    const { index, ...kept } = call;
    this.message.tool_calls = [...(this.message.tool_calls ?? []), kept];
    const card = node("section", "call");
    const title = node("h3", "", call.function.name);
    title.append(node("small", "", "tool call"));
    card.append(title, node("pre", "", pretty(call.function.arguments)));
    this.root.insertBefore(card, this.root.querySelector(".stats"));
    call.card = card;
    (this.calls ??= []).push({ ...kept, card });
  }

  addBroken(broken) {
    const card = node("section", "call broken");
    const title = node("h3", "", broken.recipient);
    title.append(node("small", "", broken.is_truncated ? "cut off" : `not a call: ${broken.reason}`));
    card.append(title, node("pre", "", broken.text));
    this.root.insertBefore(card, this.root.querySelector(".stats"));
  }

  drawStats() {
    if (this.firstToken === null) return;
    if (!this.stats) {
      this.stats = node("footer", "stats");
      this.root.append(this.stats);
    }
    const writing = (this.last - this.firstToken) / 1000;
    const parts = [`${this.tokens} tokens`];
    if (this.tokens > 1 && writing > 0) parts.push(`${Math.round((this.tokens - 1) / writing)} tokens/s`);
    parts.push(`first token after ${seconds(this.firstToken - this.started)}`);
    if (this.note) parts.push(this.note);
    this.stats.textContent = parts.join(" · ");
  }

  finish() {
    this.root.classList.remove("busy");
    this.wait.remove();
    this.last ??= performance.now();
    if (this.reasoning) this.endReasoning(this.last);
    this.drawNow();
    // Past reasoning is not sent back, except on the way to a tool's result.
    if (this.message.tool_calls && this.reasoning) this.message.reasoning_content = this.reasoning;
    if (this.message.content || this.message.tool_calls) messages.push(this.message);
    if (this.calls) askForResults(this.calls);
  }

  showError(error) {
    this.root.append(node("div", "error", error.message));
  }
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

// The person plays the tools: one field for each call, and on with the answer once all are given.
function askForResults(calls) {
  let missing = calls.length;
  for (const call of calls) {
    const form = node("form");
    const field = node("input");
    field.placeholder = `What ${call.function.name} returns`;
    field.setAttribute("aria-label", field.placeholder);
    form.append(field, node("button", "", "Return"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.replaceWith(node("pre", "result", field.value));
      messages.push({ role: "tool", tool_call_id: call.id, content: field.value });
      missing -= 1;
      if (missing === 0) generate();
      else call.card.parentNode.querySelector(".call input")?.focus();
    });
    call.card.append(form);
  }
  calls[0].card.querySelector("input").focus();
  follow();
}

async function generate() {
  if (running) return;
  running = new AbortController();
  const answer = new Answer();
  update();
  follows = true;
  follow();
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: request(),
      signal: running.signal,
    });
    if (!response.ok) throw await fail(response);
    for await (const event of events(response)) answer.take(event);
  } catch (error) {
    if (error.name === "AbortError") answer.note = "stopped";
    else answer.showError(error);
  } finally {
    running = null;
    answer.finish();
    update();
    follow();
  }
}

// --- the composer

function update() {
  document.body.classList.toggle("generating", running !== null);
  $("send").setAttribute("aria-label", running ? "Stop" : "Send");
  $("send").disabled = !running && !input.value.trim();
  $("welcome").hidden = messages.length > 0 || running !== null;
  $("new").hidden = messages.length === 0;
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
}

function ask(text) {
  // Calls that were never answered are dropped: a conversation cannot go on past them.
  const last = messages.at(-1);
  if (last?.tool_calls) {
    messages.pop();
    for (const form of log.querySelectorAll(".call form")) form.remove();
  }
  messages.push({ role: "user", content: text });
  const row = node("div", "user");
  row.append(node("div", "", text));
  log.append(row);
  generate();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  const text = input.value.trim();
  if (!text) return;
  input.value = "";
  ask(text);
});
input.addEventListener("input", update);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) $("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
$("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  for (const child of [...log.children]) if (child.id !== "welcome") child.remove();
  update();
  input.focus();
});

// --- settings

const remembered = ["effort", "temperature", "max-tokens", "system", "tools"];
for (const id of remembered) {
  const stored = localStorage.getItem(id);
  if (stored !== null) $(id).value = stored;
  $(id).addEventListener("change", () => localStorage.setItem(id, $(id).value));
}
// The key lives as long as the tab.
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  showModel();
});

$("settings-button").addEventListener("click", () => {
  $("settings").hidden = !$("settings").hidden;
  $("settings-button").setAttribute("aria-expanded", String(!$("settings").hidden));
});

$("tools-example").addEventListener("click", () => {
  $("tools").value = JSON.stringify(TOOLS, null, 1);
  $("tools").dispatchEvent(new Event("change"));
  if (!input.value) input.value = "What is the weather in Paris?";
  update();
});

const themes = matchMedia("(prefers-color-scheme: dark)");
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}
setTheme(localStorage.getItem("theme") ?? "");
$("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme || (themes.matches ? "dark" : "light");
  const next = now === "dark" ? "light" : "dark";
  localStorage.setItem("theme", next);
  setTheme(next);
});

async function showModel() {
  const response = await fetch("/v1/models", { headers: headers() }).catch(() => null);
  if (response?.status === 401) {
    $("settings").hidden = false;
    $("key").focus();
    return;
  }
  const model = response?.ok ? (await response.json()).data[0] : null;
  $("model").textContent = model?.id ?? "";
  if (model) document.title = `${model.id} · musespark`;
  const examples = model?.id.includes("spark-mini") ? EXAMPLES : [];
  $("examples").replaceChildren(
    ...examples.map((text) => {
      const button = node("button", "", text);
      button.type = "button";
      button.addEventListener("click", () => running || ask(text));
      return button;
    }),
  );
}

showModel();
update();
if (matchMedia("(hover: hover)").matches) input.focus();
