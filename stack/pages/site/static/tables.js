// Makes tables sortable and filterable, shows long ones by pages, widens and folds long
// cells, and colours states.
"use strict";

const LONG = 220;
const SENTENCE = 60;
const MANY = 10;
const DAY = /^\d{4}-\d\d-\d\d$/;
const FEW = 12;
const PAGE = 25;
const GOOD = /^(green|fixed|serves)\b/;
const BAD = /^(broken|wrong|does not apply)\b/;
const NONE = /^(absent|refuses|unknown|not (run|tried|checked|build|lint|test))\b/;

function fold(cell) {
  const text = cell.textContent.trim();
  const columns = cell.parentElement.cells.length;
  if (text.length > SENTENCE && columns > MANY) cell.classList.add("sentence");
  if (DAY.test(text)) cell.classList.add("day");
  if (text.length <= LONG) return;
  const details = document.createElement("details");
  const summary = document.createElement("summary");
  summary.textContent = text.slice(0, 120) + " …";
  details.append(summary);
  while (cell.firstChild) details.append(cell.firstChild);
  cell.dataset.order = text;
  cell.append(details);
}

function colour(cell) {
  const text = cell.textContent.trim();
  for (const [kind, words] of Object.entries({ good: GOOD, bad: BAD, none: NONE }))
    if (words.test(text)) cell.classList.add(kind);
}

async function enhance() {
  const shown = [...document.querySelectorAll("article table")].filter(
    (table) => !table.closest("#chooser") && table.tHead && table.tBodies[0],
  );
  for (const table of shown)
    for (const cell of table.querySelectorAll("tbody td")) {
      colour(cell);
      fold(cell);
    }
  const tables = shown.filter((table) => table.tBodies[0].rows.length >= FEW);
  if (tables.length) {
    const { default: DataTable } = await window.dataTables;
    for (const table of tables) {
      const width = table.tHead.rows[0].cells.length;
      const regular = [...table.tBodies[0].rows].every((row) => row.cells.length === width);
      if (!regular) continue;
      new DataTable(table, {
        order: [],
        paging: table.tBodies[0].rows.length > PAGE,
        pageLength: PAGE,
        lengthMenu: [
          [PAGE, 100, -1],
          [PAGE, 100, "All"],
        ],
        info: true,
        autoWidth: false,
        language: { search: "Filter:", lengthMenu: "_MENU_ rows" },
      });
    }
  }
  document.documentElement.dataset.tables = "ready";
}

document.addEventListener("DOMContentLoaded", () => {
  enhance().catch((error) => {
    document.documentElement.dataset.tables = "failed";
    throw error;
  });
});
