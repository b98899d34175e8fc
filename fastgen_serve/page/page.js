// The page: it asks the interfaces that any client has. Nothing of it is kept but the key, until the tab is closed.

const element = (id) => document.getElementById(id);
const KEY = "fastgen-key";
const ENOUGH = 128; // tokens of a text that has no end of its own
const WELCOME = "Results appear here, the best ones side by side with their scores.";
const LOOK_EVERY = { idle: 3000, running: 700 }; // milliseconds between two looks at the queue

let server = null; // what /stats says
let running = null; // the AbortController of what runs
let looking = 0; // the timer of the next look
let resultsAreChosen = false; // otherwise there are as many results as beams

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// ---- the server

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server does not answer. Is it running?");
  }
  if (!response.ok) throw new Refused(response.status, await reason(response));
  return response;
}

async function reason(response) {
  try {
    const { error } = await response.json();
    return error.message ?? error;
  } catch {
    return `The server answers with status ${response.status}.`;
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.code, event.error.message);
      yield event;
    }
  }
}

// ---- models and the queue

async function look() {
  clearTimeout(looking);
  try {
    server = await (await ask("stats")).json();
    element("key-field").hidden = !sessionStorage.getItem(KEY);
    element("metrics").hidden = Boolean(sessionStorage.getItem(KEY)); // a link has no key with it
    showModels();
    showQueue();
    if (element("failure").dataset.about === "server") hideFailure();
  } catch (error) {
    if (error.status === 401) {
      askForKey();
      return; // until there is another key
    }
    showFailure(error.message, "server");
  }
  if (document.visibilityState === "visible")
    looking = setTimeout(look, running ? LOOK_EVERY.running : LOOK_EVERY.idle);
}

function askForKey() {
  element("key-field").hidden = false;
  element("metrics").hidden = true;
  if (sessionStorage.getItem(KEY)) showFailure("The server does not know this API key.", "server");
  sessionStorage.removeItem(KEY);
  element("key").focus();
}

function chosen() {
  return server?.models.find((model) => model.name === element("model").value);
}

function showModels() {
  const menu = element("model");
  const models = server.models.filter((model) => model.generates || !model.ready);
  const names = models.map((model) => `${model.name}${model.ready ? "" : " (loading)"}`);
  const shown = Array.from(menu.options, (option) => option.textContent);
  if (names.join("\n") !== shown.join("\n")) {
    const before = chosen()?.name;
    menu.replaceChildren(...models.map((model, index) => new Option(names[index], model.name)));
    if (models.some((model) => model.name === before)) menu.value = before;
    menu.disabled = models.length === 0;
    showModel();
  }
  element("run").disabled = running !== null || !chosen()?.ready;
  if (models.length === 0) element("state").textContent = "No model here generates text.";
  else if (!chosen()?.ready) element("state").textContent = `${chosen().name} is loading.`;
  else if (!running && !element("list").children.length && element("failure").hidden) element("state").textContent = WELCOME;
}

function showModel() {
  const model = chosen();
  if (!model?.ready) return;
  element("beams").max = server.max_beams;
  element("beams").value = Math.min(model.beams, server.max_beams);
  element("most").max = server.max_tokens;
  // A text goes on for as long as it may; a target has an end.
  element("most").value =
    model.kind === "encoder-decoder" ? "" : Math.min(ENOUGH, server.max_tokens, Math.floor((model.positions ?? 2 * ENOUGH) / 2));
  element("as-field").hidden = !model.chats;
  element("languages").hidden = model.languages.length === 0;
  for (const id of ["source", "target"])
    element(id).replaceChildren(new Option("model’s own", ""), ...model.languages.map(({ code, name }) => new Option(name, code)));
  resultsAreChosen = false;
  followBeams();
}

function showQueue() {
  const model = chosen();
  const meter = element("slots");
  const [busy, slots] = [model?.busy ?? 0, model?.slots ?? 0];
  element("busy").textContent = busy;
  element("all-slots").textContent = slots;
  element("waiting").textContent = model?.waiting ?? 0;
  meter.setAttribute("aria-valuenow", busy);
  meter.setAttribute("aria-valuemax", Math.max(slots, 1));
  meter.firstElementChild.style.width = `${(100 * busy) / Math.max(slots, 1)}%`;
}

// ---- the form

function followBeams() {
  const beams = element("beams").valueAsNumber || 1;
  if (!resultsAreChosen) element("results").value = beams;
  element("results").max = beams > 1 ? beams : (server?.max_beams ?? 1);
  element("penalty").disabled = beams < 2;
  element("temperature").disabled = beams > 1;
}

function given(id) {
  const field = element(id);
  return field.disabled || Number.isNaN(field.valueAsNumber) ? undefined : field.valueAsNumber;
}

function request() {
  const beams = given("beams");
  const text = element("text").value;
  const isChat = chosen().chats && element("as").value === "chat";
  return [
    isChat ? "v1/chat/completions" : "v1/completions",
    {
      model: chosen().name,
      ...(isChat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
      ...(beams > 1 ? { num_beams: beams, length_penalty: given("penalty") } : { temperature: given("temperature") ?? 0 }),
      src_lang: element("source").value || undefined,
      tgt_lang: element("target").value || undefined,
      n: given("results"),
      min_tokens: given("least"),
      max_tokens: given("most"),
      stream: true,
      stream_options: { include_usage: true },
      return_token_ids: true,
    },
  ];
}

// ---- results

function result(index) {
  const known = element("list").children[index];
  if (known) return known;
  const item = document.createElement("li");
  item.className = `result runs${index === 0 && given("beams") > 1 ? " best" : ""}`;
  item.innerHTML =
    '<header><b></b><span class="score"></span></header><div class="words"></div>' +
    '<footer><span class="length"></span><button type="button" disabled>Copy</button></footer>';
  item.querySelector("b").textContent = index + 1;
  item.querySelector("button").setAttribute("aria-label", `Copy result ${index + 1}`);
  item.querySelector("button").addEventListener("click", () => copy(item));
  item.dataset.tokens = 0;
  element("list").append(item);
  return item;
}

function show(choice) {
  for (let index = 0; index < choice.index; index++) result(index); // in their order, whichever comes first
  const item = result(choice.index);
  const text = choice.text ?? choice.delta?.content ?? "";
  if (text) {
    const words = document.createElement("span");
    words.className = "new";
    words.textContent = text;
    item.querySelector(".words").append(words);
  }
  item.dataset.tokens = Number(item.dataset.tokens) + (choice.token_ids?.length ?? 0);
  const tokens = `${item.dataset.tokens} ${item.dataset.tokens === "1" ? "token" : "tokens"}`;
  item.querySelector(".length").textContent = choice.finish_reason === "length" ? `${tokens}, cut at the limit` : tokens;
  if (typeof choice.score === "number") item.querySelector(".score").textContent = `score ${signed(choice.score)}`;
  if (choice.finish_reason) {
    item.classList.remove("runs");
    item.querySelector("button").disabled = false;
  }
}

function signed(score) {
  return score.toFixed(3).replace("-", "−");
}

// What a result begins with as the best one does is quieter, so that the difference is seen.
function markDifferences() {
  const [best, ...others] = Array.from(document.querySelectorAll(".words"));
  for (const words of others) {
    const text = words.textContent;
    let end = 0;
    while (end < text.length && text[end] === best.textContent[end]) end++;
    const same = document.createElement("span");
    same.className = "same";
    same.textContent = text.slice(0, end);
    words.replaceChildren(same, text.slice(end));
  }
}

async function copy(item) {
  const words = item.querySelector(".words");
  try {
    await navigator.clipboard.writeText(words.textContent);
    element("state").textContent = "Copied.";
  } catch {
    getSelection().selectAllChildren(words); // where a page may not write to the clipboard
    element("state").textContent = "Selected: copy it with your keyboard.";
  }
}

function seconds(milliseconds) {
  return milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;
}

function showNumbers(start, first, tokens) {
  const passed = performance.now() - start;
  element("tokens").textContent = tokens;
  element("rate").textContent = tokens ? (tokens / (passed / 1000)).toFixed(tokens / passed < 0.01 ? 1 : 0) : "–";
  element("first").textContent = first === null ? "–" : seconds(first - start);
  element("total").textContent = seconds(passed);
}

function showFailure(message, about = "request") {
  const failure = element("failure");
  failure.textContent = message;
  failure.dataset.about = about;
  failure.hidden = false;
}

function hideFailure() {
  element("failure").hidden = true;
  element("failure").textContent = "";
}

function showRunning(isRunning) {
  element("run").disabled = isRunning;
  element("stop").disabled = !isRunning;
  element("list").setAttribute("aria-busy", isRunning);
}

async function run() {
  if (running || element("run").disabled || !element("request").reportValidity()) return;
  running = new AbortController();
  const start = performance.now();
  let first = null;
  let tokens = 0;
  hideFailure();
  element("list").replaceChildren();
  element("state").textContent = "Generating.";
  showRunning(true);
  if (matchMedia("(max-width: 52rem)").matches) element("results-title").scrollIntoView(); // where they are below
  showNumbers(start, null, 0);
  look();
  try {
    const [path, body] = request();
    const headers = { "Content-Type": "application/json" };
    const response = await ask(path, { method: "POST", body: JSON.stringify(body), headers, signal: running.signal });
    for await (const event of events(response)) {
      for (const choice of event.choices) {
        if (choice.token_ids?.length) first ??= performance.now();
        tokens += choice.token_ids?.length ?? 0;
        show(choice);
      }
      tokens = event.usage?.completion_tokens ?? tokens;
      showNumbers(start, first, tokens);
    }
    markDifferences();
    const count = element("list").children.length;
    element("state").textContent = `${count === 1 ? "One result" : `${count} results`}, ${tokens} tokens.`;
  } catch (error) {
    if (error.name === "AbortError") element("state").textContent = "Stopped.";
    else {
      for (const id of tokens ? [] : ["tokens", "rate", "first", "total"]) element(id).textContent = "–";
      element("state").textContent = tokens ? "Cut off." : "";
      showFailure(error.message);
      if (error.status === 401) askForKey();
    }
  } finally {
    for (const item of element("list").children) item.classList.remove("runs");
    running = null;
    showRunning(false);
    look();
  }
}

// ---- what people do

element("request").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
element("stop").addEventListener("click", () => running?.abort());
element("beams").addEventListener("input", followBeams);
element("results").addEventListener("input", () => (resultsAreChosen = true));
element("model").addEventListener("change", () => {
  showModel();
  look();
});
element("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, element("key").value.trim());
  hideFailure();
  look();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run();
  else if (event.key === "Escape") running?.abort();
});
document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && look());

look();
