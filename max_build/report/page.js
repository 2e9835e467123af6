"use strict";

// --- theme: auto → light → dark; kept where the browser lets a file keep anything

const themes = ["auto", "light", "dark"];
const toggle = document.getElementById("theme");

function recalled() {
  try { return localStorage.getItem("max-build-theme") || "auto"; } catch { return "auto"; }
}

function wear(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  toggle.querySelector("b").textContent = theme;
}

toggle.addEventListener("click", () => {
  const now = toggle.querySelector("b").textContent;
  const next = themes[(themes.indexOf(now) + 1) % themes.length];
  try { localStorage.setItem("max-build-theme", next); } catch { /* then not */ }
  wear(next);
});
wear(themes.includes(recalled()) ? recalled() : "auto");

// --- tables: a click on a heading sorts, a second one turns the order round

const order = new Intl.Collator("en", { numeric: true });

function sort(heading) {
  const table = heading.closest("table");
  const column = heading.cellIndex;
  const numeric = "numeric" in heading.dataset;
  const was = heading.getAttribute("aria-sort");
  const up = was === "none" ? !numeric : was === "descending"; // of numbers the largest first
  for (const other of heading.parentElement.cells) other.setAttribute("aria-sort", "none");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  const body = table.tBodies[0];
  const value = (row) => {
    const cell = row.cells[column];
    return cell.dataset.sort ?? cell.textContent;
  };
  const rows = [...body.rows].sort((one, other) => order.compare(value(one), value(other)));
  if (numeric || rows.every((row) => "sort" in row.cells[column].dataset)) {
    rows.sort((one, other) => value(one) - value(other));
  }
  body.append(...(up ? rows : rows.reverse()));
}

for (const heading of document.querySelectorAll("table.data thead th")) {
  heading.querySelector("button").addEventListener("click", () => sort(heading));
}

// --- filters: words that have to occur in a row, and chips that choose an outcome

function filter(table) {
  const field = document.querySelector(`[data-filter="${CSS.escape(table.id)}"]`);
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  const picked = [...table.closest("section").querySelectorAll("[data-pick][aria-pressed=true]")]
    .map((chip) => chip.dataset.pick);
  let count = 0;
  for (const row of table.tBodies[0].rows) {
    const text = row.textContent.toLowerCase();
    const badge = row.querySelector(".badge")?.textContent;
    row.hidden = !words.every((word) => text.includes(word))
      || (picked.length > 0 && !picked.includes(badge));
    count += !row.hidden;
  }
  const told = document.querySelector(`[data-count="${CSS.escape(table.id)}"]`);
  const all = table.tBodies[0].rows.length;
  told.textContent = count === all ? `${all} rows` : `${count} of ${all} rows`;
}

for (const field of document.querySelectorAll("[data-filter]")) {
  field.addEventListener("input", () => filter(document.getElementById(field.dataset.filter)));
}

for (const chip of document.querySelectorAll("[data-pick]")) {
  chip.addEventListener("click", () => {
    chip.setAttribute("aria-pressed", String(chip.getAttribute("aria-pressed") !== "true"));
    filter(chip.closest("section").querySelector("table"));
  });
}

// --- a bar of the timeline leads to its row, even if that is filtered out

function arrive() {
  const row = document.getElementById(location.hash.slice(1));
  if (!row?.matches("tr")) return;
  row.hidden = false;
  row.focus();
  row.scrollIntoView({ block: "center" });
}

addEventListener("hashchange", arrive);
arrive();
