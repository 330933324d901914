// Keeps what is marked data-live up to date. Without this script, a page is as it was when it was sent.
"use strict";

const events = document.currentScript.dataset.events;
const isStale = (stale) => document.body.classList.toggle("stale", stale);
let source = null;

async function refresh() {
  let fresh;
  try {
    const answer = await fetch(location.href);
    if (!answer.ok) return location.reload(); // the page that says why tries again by itself
    fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  } catch {
    return isStale(true); // the server is gone; the source of events tries again
  }
  document.querySelectorAll("[data-live]").forEach((part) => replace(part, fresh.getElementById(part.id)));
  document.title = fresh.title;
}

function replace(part, fresh) {
  if (!fresh || fresh.innerHTML === part.innerHTML || part.contains(document.activeElement)) return;
  const open = [...part.querySelectorAll("details")].map((each) => each.open);
  fresh.querySelectorAll("details").forEach((each, place) => (each.open = open[place] ?? false));
  part.replaceWith(fresh);
}

function watch() {
  source?.close();
  source = document.hidden || !document.querySelector("[data-live]") ? null : new EventSource(events);
  source?.addEventListener("newer", refresh);
  source?.addEventListener("error", () => {
    isStale(true);
    if (source?.readyState === EventSource.CLOSED) setTimeout(watch, 10_000); // refused, which it takes for the end
  });
  source?.addEventListener("open", () => isStale(false));
}

document.addEventListener("visibilitychange", () => (watch(), source && refresh()));
watch();
