"use strict";
const words = document.getElementById("words"), odd = document.getElementById("odd");
const rows = [...document.querySelectorAll("#rows > li")];
const texts = rows.map((row) => row.textContent.toLowerCase());
function filter() {
  const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  rows.forEach((row, i) => {
    const fits = wanted.every((word) => texts[i].includes(word)) && (!odd.checked || row.classList.contains("odd"));
    row.hidden = !fits;
    shown += fits;
  });
  document.getElementById("count").textContent = `${shown} of ${rows.length} rows`;
}
document.getElementById("filter").addEventListener("submit", (event) => event.preventDefault());
words.addEventListener("input", filter);
odd.addEventListener("change", filter);
filter();
