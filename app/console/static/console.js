// Keeps the page current, sends decisions without a reload, and listens to keys. Everything works without it but
// that. It makes no markup: whole elements come from the server's pages, parsed by the browser.
"use strict";

const POLL_MS = 1000;
const HIDDEN_POLL_MS = 5000;
const REQUEST_LIMIT_MS = 15000;

const byId = (id) => document.getElementById(id);
const live = document.querySelector("[data-live]");
let tag = "";

function ask(method, address, body, known) {
  return new Promise((resolve) => {
    const request = new XMLHttpRequest();
    request.open(method, address);
    request.responseType = "document";
    request.timeout = REQUEST_LIMIT_MS;
    request.setRequestHeader("x-console-live", "1");
    if (known) request.setRequestHeader("if-none-match", known);
    if (body) request.setRequestHeader("content-type", "application/x-www-form-urlencoded");
    request.onloadend = () =>
      resolve({ status: request.status, page: request.response, tag: request.getResponseHeader("etag") || "" });
    request.send(body);
  });
}

function trouble(words) {
  const place = byId("trouble");
  if (place.textContent !== words) place.textContent = words;
  place.hidden = !words;
}

function announce(words) {
  byId("news").textContent = words;
}

// Times

function ago(ms) {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} days`;
}

function tellTimes() {
  for (const time of document.querySelectorAll("time[data-kind=age]"))
    time.textContent = `${ago(Date.now() - Date.parse(time.dateTime))} ago`;
  for (const time of document.querySelectorAll("time[data-kind=until]")) {
    const left = Date.parse(time.dateTime) - Date.now();
    time.textContent = `${new Date(time.dateTime).toLocaleString()} (${left > 0 ? `${ago(left)} left` : `${ago(-left)} ago`})`;
  }
  for (const time of document.querySelectorAll("time[data-kind=at]")) {
    const at = new Date(time.dateTime);
    const isToday = at.toDateString() === new Date().toDateString();
    time.textContent = isToday ? at.toLocaleTimeString() : at.toLocaleString();
  }
}

// What is new takes the place of what is old; what the reader types or has opened stays.

function replace(old, fresh) {
  const hadFocus = old.contains(document.activeElement);
  let focused = null;
  for (const name of ["deny_message", "edited_input"]) {
    const typed = old.querySelector(`[name=${name}]`);
    const next = fresh.querySelector(`[name=${name}]`);
    if (!typed || !next) continue;
    const { open } = typed.closest("details");
    // An untouched input is shown as it is now: another person may have edited it.
    if (name === "deny_message" || open || typed.value !== typed.defaultValue) next.value = typed.value;
    next.closest("details").open = open;
    if (document.activeElement === typed) focused = { next, at: [typed.selectionStart, typed.selectionEnd] };
  }
  fresh = document.adoptNode(fresh);
  fresh.hidden = old.hidden;
  if (old.classList.contains("current")) fresh.classList.add("current");
  old.replaceWith(fresh);
  if (focused) {
    focused.next.focus();
    focused.next.setSelectionRange(...focused.at);
  } else if (hadFocus) fresh.focus({ preventScroll: true });
}

function merge(page) {
  for (const fresh of page.querySelectorAll("[data-swap]")) {
    const old = byId(fresh.id);
    if (old && !old.isEqualNode(fresh)) old.replaceWith(document.adoptNode(fresh));
  }
  for (const list of page.querySelectorAll("[data-list]")) {
    const mine = byId(list.id);
    const ids = new Set();
    for (const fresh of [...list.children]) {
      ids.add(fresh.id);
      const old = byId(fresh.id);
      if (!old) {
        const added = document.adoptNode(fresh);
        mine.append(added);
        if (live.hasAttribute("data-inbox")) announce(`New: ${added.querySelector("h2").textContent}`);
      } else if (old.dataset.version !== fresh.dataset.version) replace(old, fresh);
    }
    if (!mine.hasAttribute("data-keep"))
      for (const old of [...mine.children]) if (!ids.has(old.id)) old.remove();
  }
}

async function refreshCard(card) {
  const answer = await ask("GET", card.dataset.address);
  const fresh = answer.status === 200 && answer.page.getElementById(card.id);
  if (!fresh || fresh.dataset.version === card.dataset.version || !card.isConnected) return;
  const wasWaiting = card.hasAttribute("data-waiting");
  replace(card, fresh);
  if (wasWaiting && !fresh.hasAttribute("data-waiting")) announce(fresh.querySelector(".outcome").textContent);
}

function count() {
  const waiting = document.querySelectorAll(".card[data-waiting]").length;
  const shown = byId("count");
  if (!shown) return;
  const words = `${waiting}${byId("more").hidden ? "" : "+"}`;
  if (shown.textContent !== words) shown.textContent = words;
  byId("empty").hidden = document.querySelector(".card") !== null;
  document.title = `${waiting ? `(${words}) ` : ""}Inbox · Bascule`;
}

async function poll() {
  let listed = null;
  let status = 200;
  if (live) {
    const answer = await ask("GET", location.href, null, tag);
    status = answer.status;
    if (status === 200 && answer.page) {
      tag = answer.tag;
      listed = new Set([...answer.page.querySelectorAll(".card")].map((card) => card.id));
      merge(answer.page);
    }
  }
  if (status === 401) {
    trouble("You are signed out. Load the page again to sign in.");
    return;
  }
  trouble(status === 200 || status === 304 ? "" : "The service does not answer; what you see may be old.");
  // A card that left the inbox, or whose call is on its way, is asked for by itself.
  for (const card of document.querySelectorAll(".card:not([data-over])"))
    if (!live || !card.hasAttribute("data-waiting") || (listed && !listed.has(card.id)))
      await refreshCard(card);
  markAppeared();
  count();
  filter();
  tellTimes();
  setTimeout(poll, document.hidden ? HIDDEN_POLL_MS : POLL_MS);
}

// Deciding

// For how long each card has been on the page: the audit keeps it beside the decision.
const appeared = new Map();

function markAppeared() {
  for (const card of document.querySelectorAll(".card[data-waiting]"))
    if (!appeared.has(card.id)) appeared.set(card.id, performance.now());
}

async function decide(form, button) {
  const card = form.closest(".card");
  const fields = new URLSearchParams(new FormData(form));
  fields.set("result", button.value);
  fields.set("shown_ms", Math.round(performance.now() - (appeared.get(card.id) ?? performance.now())));
  for (const one of form.querySelectorAll("button")) one.disabled = true;
  const answer = await ask("POST", form.action, fields.toString());
  const fresh = answer.page && answer.page.getElementById(card.id);
  if (fresh) {
    replace(card, fresh);
    const told = fresh.querySelector(".notice, .outcome");
    if (told) announce(told.textContent);
    (fresh.querySelector("[aria-invalid]") ?? fresh).focus({ preventScroll: true });
  } else {
    for (const one of form.querySelectorAll("button")) one.disabled = false;
    const said = answer.page && answer.page.querySelector("main p");
    trouble(said ? said.textContent : "No answer came. The card shows what counts as soon as the service answers.");
  }
  count();
  tellTimes();
}

document.addEventListener("submit", (event) => {
  if (!event.target.matches("form.decide")) return;
  event.preventDefault();
  decide(event.target, event.submitter);
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-fill]");
  if (button) fill(button);
  if (event.target.closest("#keys")) byId("help").showModal();
});

function fill(button) {
  const input = button.form.elements.deny_message;
  input.value = button.dataset.fill;
  input.focus();
}

// The list and its keys

function filter() {
  const wanted = (byId("filter")?.value || "").toLowerCase();
  for (const card of document.querySelectorAll("#cards > .card"))
    card.hidden = wanted !== "" && !card.textContent.toLowerCase().includes(wanted);
}

byId("filter")?.addEventListener("input", filter);

function current() {
  return document.activeElement?.closest(".card") || document.querySelector(".card.current:not([hidden])");
}

function select(card) {
  if (!card) return;
  for (const one of document.querySelectorAll(".card.current")) one.classList.remove("current");
  card.classList.add("current");
  card.focus({ preventScroll: true });
  card.scrollIntoView({ block: "nearest" });
}

function move(step) {
  const cards = [...document.querySelectorAll("#cards > .card:not([hidden])")];
  const at = cards.indexOf(current());
  select(at < 0 ? cards[0] : cards[Math.min(cards.length - 1, Math.max(0, at + step))]);
}

// The current card if it waits. With none chosen, the first that does.
function chosen() {
  const card = current() || document.querySelector("#cards > .card[data-waiting]:not([hidden])");
  if (card && card !== current()) select(card);
  return card?.hasAttribute("data-waiting") ? card : null;
}

function openDeny() {
  const card = chosen();
  if (!card) return null;
  closeAll(card);
  card.querySelector("details.deny").open = true;
  card.querySelector("[name=deny_message]").focus();
  return card;
}

function closeAll(card) {
  for (const one of card?.querySelectorAll("details.deny, details.edit, details.like") ?? []) one.open = false;
}

function openEdit() {
  const card = chosen();
  const input = card?.querySelector("[name=edited_input]");
  if (!input) return;
  closeAll(card);
  card.querySelector("details.edit").open = true;
  input.focus();
  card.scrollIntoView({ block: "nearest" });
}

function openLike() {
  const card = chosen();
  const details = card?.querySelector("details.like");
  if (!details) return;
  closeAll(card);
  details.open = true;
  (details.querySelector("input") ?? details.querySelector("button")).focus();
  card.scrollIntoView({ block: "nearest" });
}

// The first `a` goes to the button, which shows what it would do; the second one presses it.
function allow() {
  const button = chosen()?.querySelector("button.allow");
  if (!button) return;
  closeAll(button.form);
  if (document.activeElement === button) button.click();
  else {
    button.focus();
    button.closest(".card").scrollIntoView({ block: "nearest" });
  }
}

const keys = {
  j: () => move(1),
  k: () => move(-1),
  a: allow,
  d: openDeny,
  e: openEdit,
  l: openLike,
  "/": () => byId("filter")?.focus(),
  "?": () => byId("help")?.showModal(),
};
for (const n of [1, 2, 3, 4])
  keys[n] = () => {
    const button = openDeny()?.querySelectorAll("[data-fill]")[n - 1];
    if (button) fill(button);
  };

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || byId("help")?.open) return;
  if (event.key === "Escape") {
    event.preventDefault();
    document.activeElement?.blur?.();
    const card = event.target.closest(".card") || document.querySelector(".card.current:not([hidden])");
    closeAll(card);
    select(card);
    return;
  }
  if (event.target.matches("input, textarea, select")) return;
  const act = Object.hasOwn(keys, event.key) ? keys[event.key] : null;
  if (!act || !byId("cards")) return;
  event.preventDefault();
  act();
});

// A link from another site comes without the cookie; asked from here, the page comes.
async function arrive() {
  const next = byId("main").dataset.arrived;
  if (next && (await ask("GET", next)).status === 200) location.replace(next);
}

markAppeared();
tellTimes();
count();
arrive();
if (live || document.querySelector(".card:not([data-over])")) setTimeout(poll, POLL_MS);
