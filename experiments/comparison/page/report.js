"use strict";
(() => {
  // Tables: a heading sorts its column, numbers from the largest, once more from the smallest.
  const textOf = (row, column) => row.children[column].textContent.trim();
  const isMissing = (text) => text === "" || text === "–";

  function compare(a, b) {
    const [x, y] = [a, b].map((text) => Number.parseFloat(text.replace(/,/g, "")));
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
  }

  function sortBy(head) {
    const table = head.closest("table"), body = table.tBodies[0];
    const column = [...head.parentNode.children].indexOf(head);
    const before = head.getAttribute("aria-sort");
    const isDown = before ? before === "ascending" : head.classList.contains("n");
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
    const rows = [...body.rows].sort((one, two) => {
      const [a, b] = [textOf(one, column), textOf(two, column)];
      if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
      return compare(a, b) * (isDown ? -1 : 1);
    });
    body.append(...rows);
  }

  for (const button of document.querySelectorAll("thead button")) {
    button.addEventListener("click", () => sortBy(button.closest("th")));
  }

  // A table that is wider than its box says so, until its last column is in sight.
  const boxes = [...document.querySelectorAll(".wide")];

  function hint() {
    for (const box of boxes) {
      box.classList.toggle("cut", box.scrollWidth > box.clientWidth + 1);
      box.classList.toggle("ended", box.scrollLeft + box.clientWidth >= box.scrollWidth - 1);
    }
  }

  for (const box of boxes) box.addEventListener("scroll", hint, { passive: true });
  for (const part of document.querySelectorAll("details")) part.addEventListener("toggle", hint);
  window.addEventListener("resize", hint);

  // Buttons above a table hide and show the rows that have their value in a column.
  function filterRows(section) {
    const off = [...section.querySelectorAll("[data-column][aria-pressed=false]")];
    for (const row of section.querySelectorAll("tbody tr")) {
      row.hidden = off.some(({ dataset }) => textOf(row, dataset.column) === dataset.value);
    }
    hint();
  }

  for (const button of document.querySelectorAll("[data-column]")) {
    button.addEventListener("click", () => {
      const isOn = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!isOn));
      filterRows(button.closest("section"));
    });
  }
  document.querySelectorAll("section:has([data-column])").forEach(filterRows);
  hint();

  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
      button.textContent = "copied";
    });
  }
})();
