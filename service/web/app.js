// Progress, copying, colours and what changes something. Pages read without it.
"use strict";

const root = document.documentElement;
root.classList.add("script");
const THEMES = ["auto", "light", "dark"];
const keep = (store, name, value) => { try { return value === undefined ? store.getItem(name) : store.setItem(name, value); } catch { return null; } };

let theme = keep(localStorage, "theme");
if (!THEMES.includes(theme)) theme = "auto";
if (theme !== "auto") root.dataset.theme = theme;

document.addEventListener("DOMContentLoaded", start);

function start() {
  switchTheme();
  bind(document);
}

function bind(part) {
  for (const form of part.querySelectorAll("form[data-filters]")) bindFilters(form);
  for (const form of part.querySelectorAll("form[data-unlock]")) bindUnlock(form);
  for (const form of part.querySelectorAll("form[data-warmup]")) bindWarmup(form);
  for (const field of part.querySelectorAll("input[data-token]")) bindToken(field);
  for (const element of part.querySelectorAll("[data-origin]")) useOwnOrigin(element);
  for (const button of part.querySelectorAll("button[data-copy]")) button.addEventListener("click", () => copy(button));
  for (const button of part.querySelectorAll("button[data-method]")) button.addEventListener("click", () => act(button));
  for (const element of part.querySelectorAll("[data-refresh]")) refreshSoon(element);
  watch([...part.querySelectorAll("[data-events]")]);
}

function switchTheme() {
  const button = document.getElementById("theme");
  const show = () => {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    button.setAttribute("aria-label", "Colours: " + (theme === "auto" ? "as the system" : theme));
    button.querySelector(".word").textContent = theme;
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    keep(localStorage, "theme", theme);
    show();
  });
  show();
}

// A form's URL says what was chosen, and nothing of what was not.
function bindFilters(form) {
  form.addEventListener("change", (event) => { if (event.target.matches("select")) form.requestSubmit(); });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const chosen = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
    location.assign(form.getAttribute("action") + (chosen.size ? "?" + chosen : ""));
  });
}

function bindToken(field) {
  field.value = keep(sessionStorage, "token") || "";
  field.addEventListener("input", () => keep(sessionStorage, "token", field.value));
}

// The address in a line to copy is the one this page has, whatever a proxy made of it.
function useOwnOrigin(element) {
  element.textContent = element.textContent.replaceAll(element.dataset.origin, location.origin);
  element.closest(".snippet").querySelector("button").dataset.copy = element.textContent;
}

async function copy(button) {
  const text = button.dataset.copy;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // a page over plain HTTP has no clipboard
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

function authorization() {
  const token = keep(sessionStorage, "token");
  return token ? { authorization: "Bearer " + token } : {};
}

async function call(method, url, body) {
  const headers = authorization();
  if (body !== undefined) headers["content-type"] = "application/json";
  let reply;
  try {
    reply = await fetch(url, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    return { ok: false, status: 0, document: { title: "The service does not answer", detail: "Try again once it does." } };
  }
  const document = await reply.json().catch(() => ({ title: "The service gave no reply that can be read" }));
  return { ok: reply.ok, status: reply.status, document };
}

function showOutcome(place, reply) {
  const told = reply.document;
  place.replaceChildren();
  const title = document.createElement("strong");
  title.textContent = told.title || "It did not work";
  place.append(title);
  if (told.problems && told.problems.length) {
    const list = document.createElement("ul");
    for (const problem of told.problems) {
      const item = document.createElement("li");
      const field = document.createElement("code");
      field.textContent = problem.field;
      item.append(field, ": " + problem.found + "; allowed: " + problem.allowed);
      list.append(item);
    }
    place.append(list);
  } else if (told.detail) {
    place.append(" " + told.detail);
  }
  place.hidden = false;
}

function planOf(form) {
  if (form.dataset.warmup) return JSON.parse(form.dataset.warmup);
  const chosen = (name) => [...form.querySelectorAll(`input[name="${name}"]:checked`)].map((box) => box.value);
  const tp = form.elements.tp.value;
  const plan = { arch: chosen("arch"), kernels: chosen("preset").map((preset) => ({ preset, tp: tp === "all" ? tp : Number(tp) })) };
  const misses = Number(form.elements.misses.value);
  return misses ? { ...plan, misses } : plan;
}

function commandOf(form) {
  const plan = planOf(form);
  const words = ["mlaprep warmup"];
  for (const { preset } of plan.kernels) words.push("--preset " + preset);
  if (plan.kernels.length) words.push("--tp " + form.elements.tp.value);
  for (const arch of plan.arch) words.push("--arch " + arch);
  if (plan.misses) words.push("--misses " + plan.misses);
  return words.join(" ") + " --url " + location.origin;
}

function bindWarmup(form) {
  const outcome = form.querySelector(".outcome");
  const command = form.querySelector("[data-command]");
  if (command) {
    const show = () => {
      command.textContent = commandOf(form);
      command.closest(".snippet").querySelector("button").dataset.copy = command.textContent;
    };
    form.addEventListener("input", show);
    show();
  }
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button:not([type=button])");
    button.disabled = true;
    outcome.hidden = true;
    const reply = await call("POST", "/v1/warmups", planOf(form));
    if (reply.ok) {
      location.assign("/warmups/" + reply.document.id);
      return;
    }
    button.disabled = false;
    showOutcome(outcome, reply);
    if (reply.status === 401) form.querySelector("input[data-token]")?.focus();
  });
}

async function act(button) {
  const place = button.closest("main").querySelector(".outcome");
  button.disabled = true;
  const reply = await call(button.dataset.method, button.dataset.url);
  button.disabled = false;
  if (!reply.ok) {
    showOutcome(place, reply);
    if (reply.status === 401) document.querySelector("input[data-token]")?.focus();
    return;
  }
  place.hidden = true;
  await renew(button.closest("[data-region]"));
}

// Where reading takes a token, a page that is opened by a link comes without one, and is fetched again with it.
function bindUnlock(form) {
  const unlock = async (asked) => {
    const reply = await fetch(location.href, { headers: authorization() }).catch(() => null);
    if (reply && reply.ok) {
      const fresh = new DOMParser().parseFromString(await reply.text(), "text/html");
      document.title = fresh.title;
      document.body.replaceWith(fresh.body);
      start();
    } else if (asked) {
      showOutcome(form.querySelector(".outcome"), { document: { title: "The token does not let you read this" } });
    }
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    unlock(true);
  });
  if (keep(sessionStorage, "token")) unlock(false);
}

// A region as the server renders it now, in place of the one that is shown.
async function renew(region) {
  if (!region.isConnected) return;
  const reply = await fetch(location.href, { headers: authorization() }).catch(() => null);
  if (!reply || !reply.ok) {
    if (region.dataset.refresh) refreshSoon(region);
    return;
  }
  const fresh = new DOMParser().parseFromString(await reply.text(), "text/html").getElementById(region.id);
  if (!fresh) return;
  if (fresh.innerHTML === region.innerHTML && fresh.dataset.refresh === region.dataset.refresh) {
    if (region.dataset.refresh) refreshSoon(region);
    return;
  }
  const held = region.contains(document.activeElement);
  const scrolled = region.scrollLeft;
  region.replaceWith(fresh);
  fresh.scrollLeft = scrolled;
  if (held) (fresh.querySelector("button, a") || fresh).focus();
  const holder = { querySelectorAll: (what) => [...fresh.querySelectorAll(what), ...(fresh.matches(what) ? [fresh] : [])] };
  bind(holder);
}

function refreshSoon(region) {
  setTimeout(() => {
    // What somebody reads by keyboard, or is not looking at, stays as it is.
    if (document.hidden || region.contains(document.activeElement)) refreshSoon(region); else renew(region);
  }, 1000 * Number(region.dataset.refresh));
}

// A browser keeps six connections to a host, so three jobs are followed at once: one runs, the others wait.
function watch(jobs) {
  for (const element of jobs.slice(0, 3)) follow(element);
}

async function follow(element) {
  let failed = Number(element.dataset.failed);
  let state = element.dataset.state;
  let last = "";
  while (element.isConnected) {
    for await (const { id, data } of eventsOf(element.dataset.events, last)) {
      if (!element.isConnected) return;
      last = id;
      const job = JSON.parse(data);
      showProgress(element, job);
      // Another state, or one more failure: more than figures changes, and the server renders it.
      if (job.state !== state || job.failed !== failed) {
        ({ state, failed } = job);
        await renew(element.closest("[data-region]"));
      }
      if (!["queued", "running"].includes(job.state)) return;
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

// Server-sent events by fetch, since an EventSource cannot send a token. Ends with the stream, however that ends.
async function* eventsOf(url, last) {
  const stop = new AbortController();
  try {
    const headers = { accept: "text/event-stream", ...authorization(), ...(last ? { "last-event-id": last } : {}) };
    const reply = await fetch(url, { headers, signal: stop.signal });
    if (!reply.ok) return;
    let text = "";
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
      text += value;
      const blocks = text.split("\n\n");
      text = blocks.pop();
      for (const block of blocks) {
        const fields = Object.fromEntries(block.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
        if (fields.event === "progress") yield fields;
      }
    }
  } catch { // gone; whoever follows asks again
  } finally {
    stop.abort();
  }
}

function showProgress(element, job) {
  for (const field of element.querySelectorAll("[data-field]")) {
    const value = job[field.dataset.field];
    field.textContent = field.dataset.field === "eta_s" ? (value === null ? "" : "about " + Math.ceil(value) + " s left") : value.toLocaleString("en");
  }
  const bar = element.querySelector(".bar");
  bar.setAttribute("aria-valuenow", job.done);
  let from = 0;
  for (const part of ["built", "cached", "failed"]) {
    const rect = bar.querySelector(`[data-bar="${part}"]`);
    const width = (100 * job[part]) / (job.total || 1);
    rect.setAttribute("x", from);
    rect.setAttribute("width", width);
    from += width;
  }
}
