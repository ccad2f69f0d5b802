// Search and sorting of the table of classes; the page is complete without them.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const search = document.getElementById(table.dataset.search);
  search.closest("p").hidden = false;
  search.addEventListener("input", () => {
    const wanted = search.value.trim().toLowerCase();
    for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
  for (const head of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[head.cellIndex].textContent;
      const isNumber = head.dataset.kind === "number";
      const sorted = [...body.rows].sort((a, b) =>
        isNumber ? value(a) - value(b) : value(a).localeCompare(value(b), undefined, { numeric: true }));
      if (down) sorted.reverse();
      body.append(...sorted);
    });
  }
}
