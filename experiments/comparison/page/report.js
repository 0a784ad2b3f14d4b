"use strict";
(() => {
  // Tables: a heading sorts its column, numbers from the largest, once more from the smallest.
  const valueOf = (row, column) => row.children[column].dataset.v ?? row.children[column].textContent;

  function compare(a, b) {
    if (a === "" || b === "") return (a === "") - (b === "");
    const [x, y] = [Number(a), Number(b)];
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
      const [a, b] = [valueOf(one, column), valueOf(two, column)];
      const isMissing = a === "" || b === "";
      return compare(a, b) * (isDown && !isMissing ? -1 : 1);
    });
    body.append(...rows);
  }

  for (const button of document.querySelectorAll(".sortable thead button")) {
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

  // Rows of a temperature or a batch size are hidden and shown.
  const filters = [...document.querySelectorAll("[data-filter]")];

  function filterRows() {
    const off = filters.filter((button) => button.getAttribute("aria-pressed") === "false");
    for (const row of document.querySelectorAll("#methods tbody tr")) {
      row.hidden = off.some((button) => row.dataset[button.dataset.filter] === button.dataset.value);
    }
    hint();
  }

  for (const button of filters) {
    button.addEventListener("click", () => {
      const isOn = button.getAttribute("aria-pressed") === "true";
      button.setAttribute("aria-pressed", String(!isOn));
      filterRows();
    });
  }
  filterRows();

  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
      button.textContent = "copied";
    });
  }
})();
