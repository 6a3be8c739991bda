// The arena's page. What people and models write is put in as text only (textContent), never as markup.

const $ = (id) => document.getElementById(id);
const SIDES = ["a", "b"];
const CHOICE_KEYS = { 1: "a", 2: "tie", 3: "both_bad", 4: "b", a: "a", t: "tie", x: "both_bad", b: "b" };
const TOKEN_KEY = "arena-token"; // kept for this tab only

let pair = null; // the pair on the page, as the server tells it
let follows = ""; // the pair that the next prompt goes on from
let isBusy = false;
let hasPrompts = false; // of a data set, to be drawn

// ---- the server

class Refusal extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function request(path, body) {
  const headers = {};
  const token = sessionStorage.getItem(TOKEN_KEY);
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body) });
  } catch {
    throw new Refusal("The server cannot be reached. Nothing that was accepted is lost: try again when it is back.", 0);
  }
  if (!answer.ok) {
    let detail = `the server answered ${answer.status}`;
    try {
      detail = (await answer.json()).detail ?? detail;
    } catch { /* not JSON: the status must do */ }
    if (answer.status === 401) askForToken();
    throw new Refusal(detail, answer.status);
  }
  return answer;
}

const get = async (path) => (await request(path)).json();
const post = async (path, body) => (await request(path, body)).json();

async function* readLines(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch {
      throw new Refusal("The server stopped in the middle of an answer.", 0);
    }
    if (part.done) break;
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
  }
}

// ---- what is shown

function say(message) {
  $("message").textContent = message ? message[0].toUpperCase() + message.slice(1) : "";
  $("message").hidden = !message;
}

function setStatus(text) {
  $("status").textContent = text;
  $("status").hidden = !text;
}

const card = (side) => $(`answer-${side}`);
const part = (side, name) => card(side).querySelector(`.${name}`);

function showPrompt(messages) {
  const roles = { system: "System", user: "You", assistant: "Assistant" };
  $("prompt").replaceChildren(...messages.map((message) => {
    const item = document.createElement("li");
    const role = document.createElement("span");
    item.dataset.role = message.role;
    item.dir = "auto";
    role.className = "role";
    role.textContent = roles[message.role] ?? message.role;
    item.append(role, message.content);
    return item;
  }));
}

function showAnswers(answers) {
  for (const side of SIDES) {
    card(side).className = "answer";
    part(side, "text").textContent = answers[side] ?? "";
    part(side, "name").textContent = "";
    part(side, "note").textContent = "";
  }
  $("answers").hidden = false;
}

function showNames() {
  for (const side of SIDES) {
    part(side, "name").textContent = pair.models[side];
    card(side).classList.toggle("chosen", pair.choice === side);
  }
  const said = { a: "You preferred A.", b: "You preferred B.", tie: "A tie.", both_bad: "Both bad." };
  setStatus(`${said[pair.choice]} Saved.`);
}

// The page is in one of four states: nothing asked, answering, to be judged, over (judged or failed).
function showState() {
  const isAnswered = pair && pair.answers.a !== null && pair.answers.b !== null;
  const isJudged = Boolean(pair && pair.choice);
  $("choices").hidden = isBusy || !isAnswered || isJudged;
  $("next").hidden = isBusy || !pair || (isAnswered && !isJudged) || Boolean(follows);
  $("follow").hidden = !isJudged || pair.choice === "both_bad";
  $("draw-next").hidden = !hasPrompts;
  $("again").hidden = !pair || isAnswered || pair.prompt.length > 1;
  $("composer").hidden = isBusy || Boolean(pair && !follows);
  $("composer-label").textContent = follows ? "Follow up" : "Ask both models";
}

function startOver() {
  pair = null;
  follows = "";
  history.replaceState(null, "", location.pathname);
  $("prompt").replaceChildren();
  $("answers").hidden = true;
  say("");
  setStatus("");
  showState();
  $("text").focus();
}

// ---- asking

async function ask(body) {
  if (isBusy) return;
  isBusy = true;
  say("");
  setStatus("Waiting for the models …");
  showState();
  try {
    const answer = await request("/api/pairs", body);
    for await (const event of readLines(answer)) take(event);
    if (pair && !Object.values(pair.answers).includes(null)) $("text").value = "";
  } catch (error) {
    say(error.message);
    for (const side of SIDES) card(side).classList.remove("writing");
    setStatus("");
  }
  isBusy = false;
  showState();
}

function take(event) {
  if (event.event === "pair") {
    pair = event;
    follows = "";
    history.replaceState(null, "", `#${pair.id}`);
    showPrompt(pair.prompt);
    showAnswers(pair.answers);
    card("a").classList.add("writing");
    setStatus("A answers …");
  } else if (event.event === "text") {
    part(event.side, "text").append(event.text);
  } else if (event.event === "end" || event.event === "error") {
    card(event.side).classList.remove("writing");
    if (event.event === "end") {
      pair.answers[event.side] = event.text;
      part(event.side, "text").textContent = event.text;
      const notes = { length: "Cut at the longest answer allowed.", stop: event.text ? "" : "An empty answer." };
      part(event.side, "note").textContent = notes[event.finish] ?? "";
    } else {
      card(event.side).classList.add("failed");
      part(event.side, "note").textContent = `No answer: ${event.message}`;
    }
    if (event.side === "a") {
      card("b").classList.add("writing");
      setStatus("B answers …");
    }
  } else if (event.event === "done") {
    setStatus(event.is_answered ? "Which answer is better?" : "Without both answers there is nothing to judge.");
  } else {
    say(event.message);
  }
}

// ---- judging

async function judge(choice) {
  if (isBusy || $("choices").hidden) return;
  isBusy = true;
  say("");
  try {
    pair = await post("/api/judgements", { pair: pair.id, choice });
    showNames();
  } catch (error) {
    say(`${error.message}${error.status ? "" : " Your judgement was not saved yet."}`);
    if (error.status === 409 || error.status === 404) await reload();
  }
  isBusy = false;
  showState();
}

// A page that was left open, or loaded again, goes on with its pair: the database has it.
async function reload() {
  const id = location.hash.slice(1) || (pair && pair.id);
  if (!id) return;
  try {
    pair = await get(`/api/pairs/${encodeURIComponent(id)}`);
  } catch (error) {
    pair = null;
    say(error.message);
    return;
  }
  showPrompt(pair.prompt);
  showAnswers(pair.answers);
  if (pair.choice) showNames();
  else if (Object.values(pair.answers).includes(null)) setStatus("Its answers were not finished: ask again.");
  else setStatus("Which answer is better?");
}

// ---- results

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function bar(low, high, value, middle) {
  const made = element("div", "bar");
  const place = (className, left, width) => {
    const child = element("span", className);
    child.style.left = `${100 * left}%`;
    if (width !== undefined) child.style.width = `${100 * width}%`;
    made.append(child);
  };
  if (middle !== undefined) place("middle", middle);
  place("range", low, high - low);
  if (value !== null) place("point", Math.min(value, 0.995));
  return made;
}

function resultRow(left, right, drawn, note) {
  const row = element("div", "bar-row");
  const head = element("div", "bar-head");
  head.append(element("span", "", left), element("span", "number", right));
  row.append(head, drawn);
  if (note) row.append(element("div", "fine", note));
  return row;
}

function section(title, rows) {
  const list = element("div", "bars");
  list.append(...rows);
  return rows.length ? [element("h2", "", title), list] : [];
}

const percent = (share) => `${Math.round(100 * share)} %`;

function showResults(results) {
  const count = (name) => results.choices[name] ?? 0;
  const numDecided = count("a") + count("b");
  const numJudged = numDecided + count("tie") + count("both_bad");
  $("summary").textContent = numJudged
    ? `${numJudged} judgements: ${numDecided} decided, ${count("tie")} ties, ${count("both_bad")} both bad.`
    : "Nothing was judged yet.";
  const rows = (list) => list.map(({ name, rate, won, lost, neither }) => resultRow(
    name,
    rate.value === null ? "none decided" : `${percent(rate.value)} (${percent(rate.low)} to ${percent(rate.high)})`,
    bar(rate.low, rate.high, rate.value, 0.5),
    `${won} won, ${lost} lost, ${neither} neither`,
  ));
  $("tables").replaceChildren(
    ...section("Win rates of decided pairs", rows(results.models)),
    ...section("Of each two models", rows(results.duels)),
  );
}

async function showView(name) {
  const isResults = name === "results";
  $("show-results").setAttribute("aria-pressed", String(isResults));
  $("show-judging").setAttribute("aria-pressed", String(!isResults));
  $("judging").hidden = isResults;
  $("results").hidden = !isResults;
  if (!isResults) return;
  try {
    showResults(await get("/api/results"));
  } catch (error) {
    say(error.message);
  }
}

// ---- the token

function askForToken() {
  $("token-form").hidden = false;
  $("judging").hidden = true;
  $("token").disabled = false;
  $("token").focus();
}

async function begin() {
  try {
    const state = await get("/api/state");
    $("token-form").hidden = true;
    $("judging").hidden = false;
    hasPrompts = state.has_prompts;
    $("draw").hidden = !hasPrompts;
    const forms = Object.entries(state.forms);
    say(forms.length > 1 ? "" : "The server has one model only: there is nothing to compare it with.");
    $("forms").textContent = forms.map(([name, form]) => `${name} is asked in ${form}.`).join(" ");
    await reload();
    showState();
    if (!pair) $("text").focus({ preventScroll: true });
  } catch (error) {
    $("token").disabled = false;
    say(error.message);
  }
}

// ---- what a person does

function submit(event) {
  event?.preventDefault();
  const text = $("text").value;
  if (!text.trim()) return say("Write a prompt first.");
  ask(follows ? { text, follows } : { text });
}

function followUp() {
  if ($("follow").hidden || $("next").hidden) return;
  follows = pair.id;
  showState();
  $("text").focus();
}

$("composer").addEventListener("submit", submit);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
});
for (const id of ["draw", "draw-next"]) $(id).addEventListener("click", () => ask({ draw: true }));
$("new").addEventListener("click", startOver);
$("follow").addEventListener("click", followUp);
$("again").addEventListener("click", () => ask({ text: pair.prompt[0].content }));
$("choices").addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) judge(button.dataset.choice);
});
$("show-judging").addEventListener("click", () => showView("judging"));
$("show-results").addEventListener("click", () => showView("results"));
$("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(TOKEN_KEY, $("token").value.trim());
  $("token").value = "";
  $("token").disabled = true; // until its answer: a late refusal would ask again after a better token
  begin();
});
document.addEventListener("keydown", (event) => {
  const isTyping = ["TEXTAREA", "INPUT"].includes(event.target.tagName);
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || $("judging").hidden) return;
  const key = event.key.toLowerCase();
  const press = (id) => { if ($(id).offsetParent) { event.preventDefault(); $(id).click(); } };
  if (CHOICE_KEYS[key]) judge(CHOICE_KEYS[key]);
  else if (key === "n") press("new");
  else if (key === "f") press("follow");
  else if (key === "r") press("again");
  else if (key === "d") press($("next").hidden ? "draw" : "draw-next");
});

begin();
